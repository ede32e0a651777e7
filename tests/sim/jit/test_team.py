"""Plain launches on several host threads: all blocks run once, and what ends one thread ends the launch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from cudatool.sim import jit

SOURCE = """
extern "C" __global__ void count(int *x) { atomicAdd(&x[blockIdx.x], 1); }
extern "C" __global__ void stray(int *x, long long at) { x[blockIdx.x] = 1; if (blockIdx.x == at) *(int *)8 = 1; }
"""


@pytest.fixture(scope="module")
def kernels(ptx_of):
    return jit.load(ptx_of(SOURCE)).kernels


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_each_block_runs_once(launch, kernels, threads):
    x = np.zeros(1000, np.int32)
    for _ in range(20):
        launch(kernels["count"], 1000, 32, x, threads=threads)
    np.testing.assert_array_equal(20 * 32, x)


@pytest.mark.parametrize("block", [0, 500, 999])
def test_a_fault_on_any_thread_is_the_launches_and_ends_it(launch, kernels, block):
    x = np.zeros(1000, np.int32)
    with pytest.raises(jit.KernelFault) as caught:
        launch(kernels["stray"], 1000, 32, x, np.int64(block), threads=4)
    assert caught.value.address == 8
    test_each_block_runs_once(launch, kernels, 4)


def test_launches_of_differing_numbers_of_threads_take_no_tickets_of_each_other(launch, kernels):
    x = np.zeros(50, np.int32)
    counts = np.random.default_rng(5).integers(1, 9, 500).tolist()
    for threads in counts:
        launch(kernels["count"], 50, 32, x, threads=threads)
    np.testing.assert_array_equal(len(counts) * 32, x)


def test_launches_of_several_threads_at_once_share_no_worker(launch, kernels):
    arrays = [np.zeros(300, np.int32) for _ in range(4)]

    def work(x: np.ndarray) -> None:
        for _ in range(50):
            launch(kernels["count"], 300, 32, x, threads=2)

    threads = [threading.Thread(target=work, args=(x,)) for x in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x in arrays:
        np.testing.assert_array_equal(50 * 32, x)


def test_a_child_process_has_workers_of_its_own(launch, kernels):
    test_each_block_runs_once(launch, kernels, 2)
    child = os.fork()
    if not child:
        status = 1
        try:
            test_each_block_runs_once(launch, kernels, 2)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


ENDLESS = """
import cudatool as ct
source = 'extern "C" __global__ void k(int *x, int n) { x[blockIdx.x] = n; while (n) asm volatile(""); }'
kernel = ct.compile(source, "k")[(64,), (1024,)]
x = ct.zeros(64, dtype="int32")
kernel(x, 0)
ct.synchronize()
try:
    print("launching", flush=True)
    kernel(x, 1)
    ct.synchronize()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_control_c_ends_a_kernel_on_all_its_threads():
    environment = {**os.environ, "CUDATOOL_DEVICE": "sim:threads=3"}
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, text=True, env=environment
    ) as program:
        try:
            assert program.stdout.readline() == "launching\n"
            time.sleep(0.5)
            program.send_signal(signal.SIGINT)
            program.wait(timeout=60)
        finally:
            program.kill()
        assert program.stdout.read() == "interrupted\n"
