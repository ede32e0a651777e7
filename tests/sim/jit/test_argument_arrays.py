"""What all suspensions of a kernel leave alike is put into its array once, and holds whatever ran before."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace

import numpy as np
import pytest

from cudatool.sim import jit
from cudatool.sim.jit.codegen import generate
from cudatool.sim.jit.collective import array_offset
from cudatool.sim.jit.instrument import Instrument
from cudatool.sim.jit.launch import PAGE, _Memory

SOURCE = """
extern "C" __global__ void numbered(int *out) {
    asm volatile("barrier.sync 3, 128;");
    out[threadIdx.x] = __shfl_sync(0x0000ffffu << (threadIdx.x & 16), threadIdx.x * 3, 5);
    asm volatile("barrier.sync 2, 128;");
}
extern "C" __global__ void plain(int *out) {
    __shared__ int part[128];
    int mine = threadIdx.x;
    part[mine] = mine * mine;
    if (mine % 2) { __syncthreads(); mine += 1000; } else { __syncthreads(); mine += 2000; }
    out[threadIdx.x] = part[127 - threadIdx.x] + mine;
}
extern "C" __global__ void total(int *out) {
    int sum = threadIdx.x;
    if (threadIdx.x < 64) for (int by = 16; by; by /= 2) sum += __shfl_xor_sync(0xffffffff, sum, by);
    out[threadIdx.x] = sum;
}
"""


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return jit.load(ptx_of(SOURCE)).kernels


def filled_by_threads(kernel: jit.JitKernel) -> set[str]:
    """Return the argument arrays into which the code of the kernel's threads stores."""
    text = generate(kernel.text.stepping, kernel.layout, instrument=Instrument.NONE, large_grid=False).text
    threads = "".join(re.findall(r"^define internal i32 @thread_\d+\(.*?^}$", text, re.MULTILINE | re.DOTALL))
    return {name for name in ("mask", "a", "b") if f"ptr %slots, i64 {array_offset(name)}\n" in threads}


def test_threads_leave_only_what_differs_between_suspensions(kernels):
    found = {name: filled_by_threads(kernel) for name, kernel in kernels.items()}
    assert {"numbered": {"mask", "a", "b"}, "plain": set(), "total": {"a"}} == found


@pytest.mark.parametrize("first", ["numbered", "total"])
def test_barriers_do_not_take_what_another_kernel_left(launch, kernels, first):
    out, index = np.zeros(128, np.int32), np.arange(128)
    for name in (first, "plain", first, "plain"):
        launch(kernels[name], 1, 128, out)
    expected = (127 - index) ** 2 + index + np.where(index % 2, 1000, 2000)
    np.testing.assert_array_equal(expected, out)


def test_shuffles_do_not_take_the_mask_that_another_kernel_left(launch, kernels):
    out, index = np.zeros(128, np.int32), np.arange(128)
    for name in ("numbered", "total"):
        launch(kernels[name], 1, 128, out)
    sums = np.repeat(index.reshape(4, 32).sum(axis=1), 32)
    np.testing.assert_array_equal(np.where(index < 64, sums, index), out)


def test_pages_of_slots_are_in_memory_before_a_kernel_runs():
    memory, pages = _Memory(), 100
    alone = {"in_step": 1, "shared_step": 0, "slots_step": 0}
    launch = SimpleNamespace(**alone, shared_bytes=0, local_bytes=0, slot_bytes=pages * PAGE, block=(32, 1, 1))
    memory.prepare(launch)
    resident, size = (ctypes.c_ubyte * pages)(), ctypes.c_size_t(pages * PAGE)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.slots.address), size, resident) == 0
    assert {1} == {each & 1 for each in resident}
