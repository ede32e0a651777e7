"""Copies and collectives between two GPUs, beside torch.cuda.comm and torch.cuda.nccl."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cudatool
from cudatool import comm, nccl
from cudatool._driver import gpu_names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(len(gpu_names()) < 2, reason="needs two NVIDIA GPUs"),
]

RNG = np.random.default_rng(0)
_SAMPLES = Path(__file__).parents[2] / "samples"


@pytest.fixture(scope="module", autouse=True)
def torch():
    found = pytest.importorskip("torch", reason="needs PyTorch")
    import torch.cuda.comm  # noqa: F401 - part of torch only when imported

    return found


def random(*shape: int, dtype: object = np.float32) -> np.ndarray:
    return (RNG.normal(size=shape) * 8).astype(dtype)


def to_torch(torch, array: np.ndarray, device: int):
    """Return a tensor of the same bits."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def bits(array: object) -> np.ndarray:
    """Return the bytes of an array of ours, or of torch's."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if isinstance(array, cudatool.DeviceArray):
        return array.get().reshape(-1).view(np.uint8)
    tensor = array.cpu().contiguous().reshape(-1)  # type: ignore[attr-defined]
    return np.frombuffer(bytes(tensor.untyped_storage()), np.uint8)


def assert_equal(theirs, ours) -> None:
    assert len(theirs) == len(ours)
    for tensor, array in zip(theirs, ours, strict=True):
        assert tuple(tensor.shape) == array.shape
        assert tensor.get_device() == array.device
        np.testing.assert_array_equal(bits(tensor), bits(array))


def both(torch, dtype: object = np.float32, size: int = 100_000):
    """The same values on both GPUs as torch's tensors and as our arrays."""
    data = [random(size, dtype=dtype) for _ in range(2)]
    return (
        [to_torch(torch, part, index) for index, part in enumerate(data)],
        [cudatool.asarray(part, device=index) for index, part in enumerate(data)],
    )


@pytest.mark.parametrize("on_host", [False, True])
def test_broadcast_is_torchs(torch, on_host: bool) -> None:
    data = random(50, 60)
    tensor = torch.from_numpy(data) if on_host else torch.from_numpy(data).cuda()
    theirs = torch.cuda.comm.broadcast(tensor, (0, 1))
    assert_equal(theirs, comm.broadcast(data if on_host else cudatool.asarray(data), (0, 1)))


@pytest.mark.parametrize(("dim", "sizes"), [(0, None), (1, None), (0, (1, 48)), (1, (59, 1))])
def test_scatter_and_gather_are_torchs(torch, dim: int, sizes: tuple[int, ...] | None) -> None:
    data = random(49, 60)
    theirs = torch.cuda.comm.scatter(torch.from_numpy(data), (0, 1), sizes, dim)
    ours = comm.scatter(data, (0, 1), sizes, dim)
    assert_equal(theirs, ours)
    assert_equal([torch.cuda.comm.gather(theirs, dim, 1)], [comm.gather(ours, dim, 1)])
    np.testing.assert_array_equal(torch.cuda.comm.gather(theirs, dim, "cpu").numpy(), comm.gather(ours, dim, "cpu"))


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64], ids=lambda d: np.dtype(d).name
)
def test_reduce_add_is_torchs(torch, dtype: object) -> None:
    tensors, arrays = both(torch, dtype)
    assert_equal([torch.cuda.comm.reduce_add(tensors, 1)], [comm.reduce_add(arrays, 1)])


def test_coalesced_forms_are_torchs(torch) -> None:
    data = [
        random(5, dtype=np.int64),
        random(7, 3),
        random(2, dtype=np.float64),
        random(100),
        random(4, dtype=np.int64),
    ]
    tensors = [[torch.from_numpy(part).to(index) for part in data] for index in (0, 1)]
    arrays = [[cudatool.asarray(part, device=index) for part in data] for index in (0, 1)]
    theirs = torch.cuda.comm.broadcast_coalesced(tensors[0], (0, 1), 60)
    ours = comm.broadcast_coalesced(arrays[0], (0, 1), 60)
    for one, other in zip(theirs, ours, strict=True):
        assert_equal(one, other)
    assert_equal(torch.cuda.comm.reduce_add_coalesced(tensors, 0, 60), comm.reduce_add_coalesced(arrays, 0, 60))


@pytest.mark.parametrize("op", [nccl.SUM, nccl.PROD, nccl.MAX, nccl.MIN, nccl.AVG])
@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32], ids=lambda d: np.dtype(d).name
)
def test_all_reduce_is_torchs(torch, dtype: object, op: int) -> None:
    tensors, arrays = both(torch, dtype)
    torch.cuda.nccl.all_reduce(tensors, op=op)
    nccl.all_reduce(arrays, op=op)
    assert_equal(tensors, arrays)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32], ids=lambda d: np.dtype(d).name
)
@pytest.mark.parametrize("op", [nccl.SUM, nccl.AVG])
def test_software_device_reduces_as_nccl_does(dtype: object, op: int) -> None:
    from cudatool.nccl._calls import Name
    from cudatool.nccl._numerics import perform

    data = [random(100_000, dtype=dtype) for _ in range(2)]
    expected = [np.empty_like(part) for part in data]
    perform(Name.ALL_REDUCE, op, data, expected)
    arrays = [cudatool.asarray(part, device=index) for index, part in enumerate(data)]
    nccl.all_reduce(arrays, op=op)
    for part, array in zip(expected, arrays, strict=True):
        np.testing.assert_array_equal(bits(part), bits(array))


def test_other_collectives_are_torchs(torch) -> None:
    tensors, arrays = both(torch)
    torch.cuda.nccl.broadcast(tensors)
    nccl.broadcast(arrays)
    assert_equal(tensors, arrays)

    # Not beside torch, which sends the first tensor whatever its root.
    _, arrays = both(torch)
    expected = arrays[1].get()
    nccl.broadcast(arrays, 1)
    np.testing.assert_array_equal(expected, arrays[0].get())

    tensors, arrays = both(torch)
    torch.cuda.nccl.reduce(tensors, root=1)
    nccl.reduce(arrays, root=1)
    assert_equal(tensors, arrays)

    theirs = [torch.zeros(200_000, device=index) for index in range(2)]
    ours = [cudatool.zeros(200_000, device=index) for index in range(2)]
    torch.cuda.nccl.all_gather(tensors, theirs)
    nccl.all_gather(arrays, ours)
    assert_equal(theirs, ours)

    torch.cuda.nccl.reduce_scatter(theirs, tensors)
    nccl.reduce_scatter(ours, arrays)
    assert_equal(tensors, arrays)


def test_version_is_that_of_torchs_library(torch) -> None:
    assert torch.cuda.nccl.version()[:2] == nccl.version()[:2]


def test_peer_access_is_what_torch_says(torch) -> None:
    for pair in ((0, 0), (0, 1), (1, 0)):
        assert torch.cuda.can_device_access_peer(*pair) == cudatool.can_device_access_peer(*pair)


def test_copies_between_devices_work_with_expandable_segments() -> None:
    program = (
        "import numpy as np, cudatool as ct\n"
        "x = ct.asarray(np.arange(3e6)); y = ct.zeros(3_000_000, np.float64, device=1)\n"
        "y.copy_(x); y[::2].copy_(x[1::2])\n"
        "expected = np.arange(3e6); expected[::2] = expected[1::2]\n"
        "np.testing.assert_array_equal(expected, y.get())\n"
    )
    environment = {**os.environ, "CUDATOOL_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_data_parallel_training_gives_on_two_gpus_what_it_gives_on_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cudatool", "sanitize", "--device", "cuda", _SAMPLES / "data_parallel.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {
        (step, count): float(loss)
        for step, count, loss in re.findall(r"step +(\d+) on (\d) of \d: loss (\S+)", done.stderr + done.stdout)
    }
    assert 8 == len(found)
    for (step, count), loss in found.items():
        np.testing.assert_allclose(loss, found[step, "1"], rtol=1e-3, atol=1e-3, err_msg=f"step {step} on {count}")
