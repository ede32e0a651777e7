"""Programs of CUDA C++ without nvcc, and what their results are held against: on a program written here."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import rodinia_suite

if os.environ.get("CUDATOOL_DEVICE", "sim").startswith("cuda"):
    pytest.skip("the process drives a GPU", allow_module_level=True)

SHARED_SUM = """
#include <stdio.h>
#include <stdlib.h>
#include "sizes.h"
__constant__ float scale[1];
__device__ static float scaled(float x) { return x * scale[0]; } // called by the kernel
texture<float, 1, cudaReadModeElementType> source;
template <class T> struct Sum {
    T value;
    __device__ void add(T x) { value += scaled(x); }
};
template <int N, class T> __global__ void __launch_bounds__(N, sizeof(Sum<T>)) sums(T *out) { // T is deduced
    __shared__ T part[N];
    int t = threadIdx.x;
    part[t] = tex1Dfetch(source, blockIdx.x * N + t);
    for (int half = N / 2; half; half /= 2) {
        __syncthreads();
        if (t < half) part[t] += part[t + half];
    }
    Sum<T> sum = {0};
    sum.add(part[0]);
    if (t == 0) out[blockIdx.x] = sum.value WRONG;
}
int main(int argc, char **argv) {
    if (argc < 2) return 0;
    int count = atoi(argv[1]);
    float *in = (float *)malloc(count * 4), *out = (float *)malloc(count * 4), factor = 2, *a, *b;
    for (int i = 0; i < count; i++) in[i] = i % 10;
    cudaMalloc((void **)&a, count * 4);
    cudaMalloc((void **)&b, count * 4);
    cudaMemcpy(a, in, count * 4, cudaMemcpyHostToDevice);
    cudaMemcpyToSymbol(scale, &factor, 4);
    cudaBindTexture(0, source, a, count * 4);
    sums<SIZE> <<< count / SIZE, SIZE >>> (b);
    cudaThreadSynchronize();
    cudaMemcpy(out, b, count / SIZE * 4, cudaMemcpyDeviceToHost);
    printf("%s\\n", cudaGetErrorString(cudaGetLastError()));
}
"""


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


def _write_program(root: Path, wrong: str = "") -> None:
    folder = root / "cuda" / "sum"
    folder.mkdir(parents=True)
    (folder / "sum.cu").write_text(SHARED_SUM.replace("WRONG", wrong))
    (folder / "sizes.h").write_text(
        "#define SIZE 64\n#ifdef __CUDACC_RTC__\n#define MORE 1\n#else\n#define MORE 0\n#endif\n"
    )


@needs_compiler
@pytest.mark.parametrize(("wrong", "said"), [("", "right"), ("+ MORE", "WRONG")])
def test_a_cuda_program_is_held_against_its_kernels_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, said: str
) -> None:
    """What the device computes otherwise than the host's compiler shows."""
    _write_program(tmp_path, wrong)
    monkeypatch.chdir(tmp_path)
    program = rodinia_suite.Program("sum", ("sum.cu",), "256", "256")
    assert rodinia_suite.compare(program, tmp_path, tmp_path / "work").startswith(f"{said}: 1 copies, 16 B")


@needs_compiler
@pytest.mark.parametrize(("arguments", "calls"), [("256", True), ("", False)])
def test_a_program_that_does_nothing_has_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, calls: bool
) -> None:
    """One that refuses its arguments would be the fastest."""
    _write_program(tmp_path)
    work = tmp_path / "work"
    (work / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    program = rodinia_suite.Program("sum", ("sum.cu",), "256", arguments)
    if calls:
        times = rodinia_suite.measure(program, tmp_path, work, 3, 1, seconds=0)
        assert " s start, " in rodinia_suite.describe(times)
        assert [1] == [len(runs) for runs in times.values()]
        return
    with pytest.raises(RuntimeError, match="a measured program ended with 0"):
        rodinia_suite.measure(program, tmp_path, work, 1, 1)


def test_instances_of_kernels_are_read_from_the_symbols_of_an_object() -> None:
    symbols = """
0000000000000000 W void dwt::transform<64, (Kind)2>(int const*, int*)
0000000000000040 W dwt::Buffer<int, 8>::size() const
0000000000000080 T plain(float*)
00000000000000c0 W void copy<std::pair<int, float> >(std::pair<int, float>*)
""".strip()
    found = rodinia_suite.instances(symbols, ("transform", "plain", "copy"))
    assert ["dwt::transform<64, (Kind)2>", "copy<std::pair<int, float> >"] == found


@needs_compiler
def test_memory_is_touched_before_each_run_of_either_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_program(tmp_path)
    openmp = tmp_path / "openmp" / "sum"
    openmp.mkdir(parents=True)
    (openmp / "sum.c").write_text("int main() { int n = 0;\n#pragma omp parallel\nn = 1;\nreturn n - 1; }")
    monkeypatch.chdir(tmp_path)
    program = rodinia_suite.Program("sum", ("sum.cu",), "256", "256", openmp=("sum", ("sum.c",), ""))
    done: list[object] = []
    timed = rodinia_suite._timed
    monkeypatch.setattr(rodinia_suite, "_touch", done.append)
    monkeypatch.setattr(rodinia_suite, "_timed", lambda *a, **b: (done.append(Path(a[0][0]).name), timed(*a, **b))[1])
    rodinia_suite.measure(program, tmp_path, tmp_path / "work", 1, 1, touched=4096)
    python = Path(sys.executable).name
    assert [python, python, *(4096, python) * 2, *(4096, "openmp") * 2] == done


def test_row_is_of_the_median_runs() -> None:
    def run(processor: float, **parts: float) -> rodinia_suite.Run:
        return rodinia_suite.Run(9, processor, 0.5, parts, 0, "")

    ours = [run(3, cuMemcpyHtoD_v2=0.25, cuLaunchKernel=1.25), run(9), run(1)]
    found = rodinia_suite.row("sum", {"ours": ours, "openmp": [run(2, regions=0.5)]})
    assert found == "| sum | 3 | 0.50 | 0.25 | 1.25 | 3.00 | 0.50 | 2.00 | 3.00 | 1.50 |\n"
    assert {line.count("|") for line in (*rodinia_suite.HEAD.splitlines(), found)} == {11}
