"""With how many threads NumPy multiplies on the software device."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cudatool as ct
from cudatool.blas import _numerics, _threads


@pytest.fixture
def three():
    """OpenBLAS has three threads; what asks how many it has."""
    found = _threads._openblas()
    if found is None:
        pytest.skip("NumPy is not linked with OpenBLAS")
    get, set_to = found
    before = get()
    set_to(3)
    yield get
    set_to(before)


@pytest.mark.parametrize(("columns", "threads"), [(192, 1), (1 << 15, 2)])
def test_a_small_product_is_computed_on_one_thread_and_a_large_one_on_all_processors(
    device, monkeypatch, three, columns, threads
):
    if device == "cuda":
        pytest.skip("products on a GPU are not functions of the host")
    a, b = ct.ones((64, 64), np.float32), ct.ones((64, columns), np.float32)
    seen = []

    def matmul(a, b):
        seen.append(three())
        return np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)

    monkeypatch.setattr(_threads, "processors", lambda: 2)
    monkeypatch.setattr(_numerics.np, "matmul", matmul)
    ct.matmul(a, b)
    ct.synchronize()
    assert [threads] == seen
    assert 3 == three()


def test_all_threads_are_back_when_the_last_of_several_products_has_ended(three):
    meet, seen = threading.Barrier(3), []

    def multiply(turn: int) -> None:
        with _threads.threads_for(1):
            meet.wait(10)
            seen.append(three())
            meet.wait(10)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(multiply, range(3)))
    assert [1, 1, 1] == seen
    assert 3 == three()
