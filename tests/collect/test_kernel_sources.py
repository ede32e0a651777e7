"""Names of parameters, read from CUDA C++."""

from __future__ import annotations

import pytest

from cudatool.collect.kernel_sources import parameter_names

SOURCE = """
// __global__ void add(float *not_this, int nor_this);
template <typename T, int N = 4>
__global__ void add(const T *a, std::pair<int, T> b, T *__restrict__ out, int n = 1) { work(a, n); }
namespace ns {
extern "C" __global__ void __launch_bounds__(128, 2)
scale(Params p, float (&f)[4], const float factor /* by (how) much */, void (*call)(int, int), int table[3]) {}
}
__global__ void none(void) {}
__global__ void unnamed(int, const float *, unsigned long, const int *__restrict__) {}
__global__ void twice(int a) {}
__global__ void twice(float b) {}
__global__ void open(int a
"""


@pytest.mark.parametrize(
    ("kernel", "count", "names"),
    [
        ("add<float, 4>", 4, ["a", "b", "out", "n"]),
        ("ns::scale", 5, ["p", "f", "factor", "call", "table"]),
        ("none", 0, []),
        ("unnamed", 4, ["", "", "", ""]),
        ("twice", 1, []),
        ("add<float, 4>", 3, []),
        ("missing", 1, []),
    ],
)
def test_parameter_names(kernel: str, count: int, names: list[str]) -> None:
    assert names == parameter_names(SOURCE, kernel, count)
