"""Arrays used by two processes where they lie."""

from __future__ import annotations

import base64
import pickle

import numpy as np
import pytest
from warm_process import run_python

import cudatool
from cudatool.errors import CudaError, UsageError

READER = """
import base64, pickle, sys
import cudatool
array = cudatool.open_ipc_handle(pickle.loads(base64.b64decode(sys.argv[1])))
print(array.shape, array.dtype, array.get().ravel().tolist())
array.fill_(7)
cudatool.synchronize()
"""


def opened_elsewhere(handle: cudatool.IpcHandle) -> str:
    text = base64.b64encode(pickle.dumps(handle)).decode()
    done = run_python(READER, text)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("size", [6, 600_000])
def test_array_is_read_and_written_by_another_process(size: int) -> None:
    data = np.arange(size, dtype=np.float32).reshape(2, -1)
    array = cudatool.asarray(data)
    before = cudatool.ipc_handle(array)
    if size == 6:
        assert "(2, 3) float32 [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]" == opened_elsewhere(before)
    else:
        opened_elsewhere(before)
    assert np.array_equal(np.full_like(data, 7), array.get())


def test_handle_cannot_be_opened_where_it_comes_from() -> None:
    array = cudatool.zeros(4)
    with pytest.raises(CudaError):
        cudatool.open_ipc_handle(cudatool.ipc_handle(array))


def test_array_that_is_not_contiguous_is_refused() -> None:
    array = cudatool.zeros((4, 4))
    with pytest.raises(UsageError, match="C order"):
        cudatool.ipc_handle(array[:, ::2])
