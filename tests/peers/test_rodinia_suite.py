"""Programs of CUDA C++ without nvcc, and what their results are held against: on a program written here."""

from __future__ import annotations

import os
import shutil
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
template <int N> __global__ void sums(float *out) {
    __shared__ float part[N];
    int t = threadIdx.x;
    part[t] = tex1Dfetch(source, blockIdx.x * N + t);
    for (int half = N / 2; half; half /= 2) {
        __syncthreads();
        if (t < half) part[t] += part[t + half];
    }
    if (t == 0) out[blockIdx.x] = scaled(part[0])WRONG;
}
int main(int argc, char **argv) {
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


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize(("wrong", "said"), [("", "right"), ("+ MORE", "WRONG")])
def test_a_cuda_program_is_held_against_its_kernels_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, said: str
) -> None:
    """What the device computes otherwise than the host's compiler shows."""
    folder = tmp_path / "cuda" / "sum"
    folder.mkdir(parents=True)
    (folder / "sum.cu").write_text(SHARED_SUM.replace("WRONG", wrong))
    (folder / "sizes.h").write_text(
        "#define SIZE 64\n#ifdef __CUDACC_RTC__\n#define MORE 1\n#else\n#define MORE 0\n#endif\n"
    )
    monkeypatch.chdir(tmp_path)
    program = rodinia_suite.Program("sum", ("sum.cu",), "256", "256")
    assert rodinia_suite.compare(program, tmp_path, tmp_path / "work").startswith(f"{said}: 1 copies, 16 B")
