"""A global variable that only some threads read keeps LLVM from making vectors of none of them."""

from __future__ import annotations

import re

import llvmlite.binding as llvm
import numpy as np
import pytest

from cudatool.sim import jit
from cudatool.sim.jit import native

SOURCE = """
__constant__ float edge[2] = {3, 5};
__device__ float inside[2] = {7, 11};
extern "C" __global__ void scaled(const int *kinds, float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (kinds[i] == 1) x[i] = edge[0] * x[i] + edge[1];
    else if (kinds[i] == 2) x[i] = inside[1] * x[i] - inside[0];
    else if (kinds[i] > 2) x[i] = 0;
}
"""


@pytest.fixture(scope="module")
def module(ptx_of):
    return jit.load(ptx_of(SOURCE))


def test_threads_that_read_a_global_in_a_branch_run_in_vectors(module):
    machine = native._machine(3, gathers=True)
    code = llvm.parse_assembly(module.kernels["scaled"].llvm_ir())
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(code, passes)
    assert re.search(r"fma\.v\d+f32", str(code))


@pytest.mark.parametrize("threads", [1, 16, 50])
def test_each_thread_reads_the_global_of_its_branch(launch, module, place_variables, threads):
    memory = place_variables(module)
    kinds = (np.arange(threads) % 4).astype(np.int32)
    x = np.arange(threads, dtype=np.float32)
    expected = np.select([kinds == 0, kinds == 1, kinds == 2], [x, 3 * x + 5, 11 * x - 7], 0)
    assert memory.keys() == {"edge", "inside"}
    launch(module.kernels["scaled"], 1, threads, kinds, x, np.int32(threads))
    np.testing.assert_array_equal(expected, x)
