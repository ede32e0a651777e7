"""Low-level functions beside PyTorch's, and what only a GPU has: sensors, GPUDirect Storage, a driver that forks badly."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import cudatool
from cudatool import gds
from cudatool.errors import CudaError, DeviceUnavailableError, FileFormatError, UsageError

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu():
    from cudatool import _driver

    if _driver.initialize().kind != "cuda":
        pytest.skip("this process uses the software device")


def test_properties_are_torchs(torch):
    ours, theirs = cudatool.get_device_properties(), torch.cuda.get_device_properties(0)
    compared = 0
    for name in type(ours).__slots__:
        if hasattr(theirs, name) and name != "uuid":
            assert (name, getattr(theirs, name)) == (name, getattr(ours, name))
            compared += 1
    assert str(theirs.uuid) == ours.uuid
    assert compared >= 14


@pytest.mark.parametrize(
    "name", ["device_memory_used", "utilization", "memory_usage", "temperature", "power_draw", "clock_rate"]
)
def test_sensors_say_what_torchs_say(torch, name):
    theirs = getattr(torch.cuda, name)()
    ours = getattr(cudatool, name)()
    assert type(theirs) is type(ours)
    assert ours >= 0
    if name == "device_memory_used":  # of all processes, which go on meanwhile
        assert theirs == pytest.approx(ours, rel=0.5)


def test_this_process_is_among_those_that_use_the_gpu():
    cudatool.empty(1 << 20)
    assert cudatool.list_gpu_processes().startswith("GPU:0")


def test_cudart_answers_as_torchs_does(torch):
    ours, theirs = cudatool.cudart(), torch.cuda.cudart()
    for code in (0, 1, 2, 700):
        assert theirs.cudaGetErrorString(theirs.cudaError(code)) == ours.cudaGetErrorString(code)
    assert theirs.cudaMemGetInfo(0)[1] == ours.cudaMemGetInfo(0)[1]
    array = np.zeros(1 << 16)
    status = [int(runtime.cudaHostRegister(array.ctypes.data, array.nbytes, 0)) for runtime in (theirs, ours)]
    assert [0, 712] == status  # cudaErrorHostMemoryAlreadyRegistered
    assert cudatool.is_pinned(array)
    assert 0 == ours.cudaHostUnregister(array.ctypes.data)


def test_the_same_copies_are_hidden_synchronizations_as_in_torch(torch):
    pinned = torch.zeros(1000).pin_memory()
    tensor, host = torch.zeros(1000, device="cuda"), torch.zeros(1000)
    array, ours_pinned = cudatool.zeros(1000), cudatool.empty_pinned(1000)
    cases = {
        "to host": (lambda: tensor.cpu(), lambda: array.get()),
        "to pinned, not blocking": (
            lambda: pinned.copy_(tensor, non_blocking=True),
            lambda: array.get(ours_pinned, blocking=False),
        ),
        "from host": (lambda: tensor.copy_(host), lambda: array.copy_(host.numpy())),
        "from pinned, not blocking": (
            lambda: tensor.copy_(pinned, non_blocking=True),
            lambda: array.copy_(ours_pinned, non_blocking=True),
        ),
        "from pinned, blocking": (lambda: tensor.copy_(pinned), lambda: array.copy_(ours_pinned)),
        "a kernel": (lambda: tensor.add_(1), lambda: array.fill_(1)),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("warn")
    cudatool.set_sync_debug_mode("warn")
    try:
        for name, (theirs, ours) in cases.items():
            assert (name, _warns(theirs)) == (name, _warns(ours))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        cudatool.set_sync_debug_mode("default")
        cudatool.synchronize()


def _warns(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return any("synchronizing" in str(warning.message) for warning in caught)


def _run(source, **environment):
    return subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "CUDATOOL_DEVICE": "cuda", **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_visible_devices_are_counted_as_the_driver_counts_them():
    uuid = f"GPU-{cudatool.get_device_properties().uuid}"
    count = cudatool.device_count()
    for setting, expected in {
        "0": 1, "": 0, "-1": 0, uuid: 1, uuid[:12]: 1, "0,0": 0, "99": 0, "0,99": 1, "nonsense": 0, f"0,{count}": 1,
    }.items():  # fmt: skip
        done = _run(
            "import cudatool\n"
            "before = cudatool.device_count()\n"
            "from cuda.bindings import driver\n"
            "status, = driver.cuInit(0)\n"
            "print(before, 0 if status else driver.cuDeviceGetCount()[1])",
            CUDA_VISIBLE_DEVICES=setting,
        )
        assert (setting, f"{expected} {expected}\n") == (setting, done.stdout), done.stderr


def test_process_can_fork_after_asking_for_devices():
    done = _run(
        "import os, cudatool\n"
        "assert cudatool.is_available() and cudatool.device_count() and not cudatool.is_initialized()\n"
        "child = os.fork()\n"
        "if child: assert os.waitpid(child, 0)[1] == 0\n"
        "print(cudatool.ones(3).get().sum(), flush=True)\n"
        "if not child: os._exit(0)"
    )
    assert "3.0\n3.0\n" == done.stdout, done.stderr


def test_launch_blocking_waits_for_each_kernel():
    source = (
        "import cudatool, time\n"
        'kernel = cudatool.compile(\'extern "C" __global__ void f(long long n) '
        "{ long long t = clock64(); while (clock64() - t < n) {} }', 'f')\n"
        "kernel[1, 1](1); cudatool.synchronize()\n"
        "kernel[1, 1](400_000_000)\n"
        "print(cudatool.current_stream().query())"
    )
    assert "False\n" == _run(source).stdout
    assert "True\n" == _run(source, CUDA_LAUNCH_BLOCKING="1").stdout


def test_memory_of_both_kinds_rests_while_a_copy_on_another_stream_uses_it():
    """Source: test_cuda.py::test_caching_pinned_memory"""
    source = 'extern "C" __global__ void f(long long n) { long long t = clock64(); while (clock64() - t < n) {} }'
    spin, other = cudatool.compile(source, "f"), cudatool.Stream()
    count = 3 << 20  # so that the blocks of earlier tests, which may be freed meanwhile, are too small
    array, host = cudatool.empty(count), cudatool.empty_pinned(count)
    where = array.data_ptr(), host.ctypes.data
    cudatool.synchronize()
    with cudatool.stream(other):
        spin[1, 1](300_000_000)
        array.copy_(host, non_blocking=True)
    array.record_stream(other)
    del array, host
    busy = cudatool.empty(count), cudatool.empty_pinned(count)
    assert not other.query()
    assert where[0] != busy[0].data_ptr()
    assert where[1] != busy[1].ctypes.data
    other.synchronize()
    rested = cudatool.empty(count), cudatool.empty_pinned(count)
    assert where == (rested[0].data_ptr(), rested[1].ctypes.data)


@pytest.fixture
def storage(tmp_path: Path):
    try:
        with gds.GdsFile(tmp_path / "array", os.O_CREAT | os.O_RDWR) as file:
            yield file
    except (DeviceUnavailableError, CudaError) as reason:
        if not isinstance(reason, CudaError) or reason.name == "CU_FILE_HANDLE_NOT_REGISTERED":
            pytest.skip(f"cuFile cannot be used here: {reason}")
        raise


def test_arrays_go_to_a_file_and_come_back(storage, tmp_path):
    """Source: test_cuda.py::test_gds_read_write_tensors"""
    first, second = np.arange(4096, dtype="f4"), np.arange(8192, dtype="f4").reshape(2, -1) + 0.5
    storage.save_storage(cudatool.asarray(first), offset=0)
    storage.save_storage(cudatool.asarray(second), offset=first.nbytes)
    one, other = cudatool.empty(first.shape), cudatool.empty(second.shape)
    gds.gds_register_buffer(one)
    storage.load_storage(one, offset=0)
    gds.gds_deregister_buffer(one)
    storage.load_storage(other, offset=first.nbytes)
    np.testing.assert_array_equal(first, one.get())
    np.testing.assert_array_equal(second, other.get())
    assert first.tobytes() + second.tobytes() == (tmp_path / "array").read_bytes()


def test_file_that_ends_too_early_is_an_error(storage):
    storage.save_storage(cudatool.ones(1024))
    with pytest.raises(FileFormatError, match="4096 of the 8192 bytes"):
        storage.load_storage(cudatool.empty(2048))


def test_file_that_was_deregistered_is_refused(storage):
    storage.deregister_handle()
    with pytest.raises(UsageError, match="register_handle"):
        storage.load_storage(cudatool.empty(1))
    storage.register_handle()
    with pytest.raises(UsageError, match="registered already"):
        storage.register_handle()
