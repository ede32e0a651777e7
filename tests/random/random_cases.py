"""Draws whose numbers are known, in ``tests/data/torch_rng.npz``, and how to make them here.

They are what PyTorch draws on an H200, which ``tests/gpu/test_gpu_random.py`` checks there, where all is equal to the
last bit; in that file some are the software device's, exact where the GPU approximates (:data:`APPROXIMATE`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

import cudatool
from cudatool import random

REALS = ("float32", "float64", "float16", "bfloat16")
WHOLE = ("bool", "uint8", "int8", "int16", "int32", "int64")
THREADS = 132 * 8 * 256  # all that run on an H200 at once
SIZES = (1, 255, 256, 257, 1000, 65_537)
BOUNDARIES = (THREADS - 1, THREADS, THREADS + 1, 2 * THREADS + 1, 4 * THREADS, 4 * THREADS + 1, 9 * THREADS + 3)


def cases() -> list[dict[str, Any]]:
    """Return every case: method, dtype, shape, arguments, seed and offset; a key ``view`` says how its array lies."""
    found: list[dict[str, Any]] = []

    def add(method: str, dtype: str, shape: Any, *args: Any, seed: int = 42, offset: int = 0, **more: Any) -> None:
        shape = list(shape) if isinstance(shape, tuple) else [shape]
        found.append(dict(method=method, dtype=dtype, shape=shape, args=args, seed=seed, offset=offset, **more))

    for dtype in REALS:
        for size in SIZES:
            add("uniform_", dtype, size)
        add("uniform_", dtype, 1000, -3.5, 2.25, seed=2**63 + 7, offset=4096)
        for method in ("normal_", "exponential_"):
            for size in (1, 1000, 65_537):
                add(method, dtype, size)
        add("normal_", dtype, 1000, 3.0, 0.125, seed=1, offset=2**34 - 4)
        add("exponential_", dtype, 1000, 2.5, seed=3)
        for size in (8, 24, 1000, 1001, 1002, 4096, 65_537):
            add("dropout", dtype, size, 0.1)
        add("dropout", dtype, (40, 50), 0.75, view="transposed")
        add("dropout", dtype, (33, 5), 0.5, view="transposed")
        add("dropout", dtype, (60, 20), 0.5, view="gaps")
    for size in BOUNDARIES:
        add("uniform_", "float32", size, seed=0)
        add("normal_", "float32", size, seed=0)
        add("dropout", "float32", size, 0.5, seed=0)
        add("random_", "int64", size, 100, seed=0)
    for size in BOUNDARIES[:5]:
        add("uniform_", "float64", size, seed=0)
        add("dropout", "float16", size + 3 & ~7, 0.5, seed=0)
        add("bernoulli_", "float32", size, 0.3, seed=0)
        add("random_", "int64", size, seed=0)
    for dtype in (*REALS, *WHOLE):
        add("random_", dtype, 1000)
        add("bernoulli_", dtype, 1000, 0.25)
        add("bernoulli_array", dtype, 1000)
        add("bernoulli_array", dtype, 5001, seed=9)
        if dtype != "bool":
            add("random_", dtype, 1000, 100)
            add("random_", dtype, 1000, 17, 101, seed=5)
            add("random_", dtype, 1000, 3, None, seed=5)
    for low, high in ((0, 2**28 - 1), (0, 2**28), (-(2**31), 2**31 - 1), (-(2**40), 2**50)):
        for dtype in ("int64", "float32", "float64"):
            add("random_", dtype, 1000, low, high)
    add("random_", "int64", 1000, -(2**63), 2**63 - 1)
    add("random_", "float16", 1000, 0, 65504)
    add("random_", "float16", 1000, -40001, 1)
    add("random_", "bfloat16", 1000, 0, 10_001)
    for view in ("transposed", "gaps", "permuted", "column"):
        shape = {"permuted": (7, 11, 13), "column": (300, 4)}.get(view, (40, 50))
        add("uniform_", "float32", shape, view=view)
        add("bernoulli_array", "float32", shape, view=view)
    for method in ("uniform_", "normal_"):
        for dtype in ("complex64", "complex128"):
            add(method, dtype, 1000)
    for dtype in REALS:
        add("log_normal_", dtype, 1000, 0.5, 0.75)
        add("cauchy_", dtype, 1000, 1.0, 3.0)
    for dtype in (*REALS, "uint8", "int32", "int64"):
        add("geometric_", dtype, 1000, 0.3)
    for dtype in ("float32", "float64"):
        for shape, count in (((1000,), 1), ((1000,), 1000), ((9, 33), 1), ((9, 33), 20)):
            add("multinomial", dtype, shape, count, False)
            add("multinomial", dtype, shape, count, True)
    for n in (1, 2, 3, 10, 100, 1000, 5000, 29_900, 30_000, 32_000, 33_000, 65_537, 300_000):
        add("randperm", "int64", n)
        add("randperm", "int64", n, seed=7, offset=12)
    for dtype in ("float32", "float64", "float16", "int32", "int16", "uint8"):
        add("randperm", dtype, 100)
    return found


def places(size: int) -> np.ndarray[Any, Any]:
    """Return the indices of the elements that are kept: the ends, and where threads begin anew."""
    corners = (0, 256, 1024, THREADS, 2 * THREADS, 4 * THREADS, 8 * THREADS, size)
    near = {at + step for at in corners for step in range(-2, 3)}
    return np.array(sorted(index for index in near if 0 <= index < size))


def as_bytes(found: Any) -> bytes:
    """Return the elements of an array in C order."""
    return bytes(np.ascontiguousarray(found).view(np.uint8).reshape(-1))


def spread(case: dict[str, Any]) -> list[int]:
    """Return the shape of the memory in which the array of a case lies."""
    shape = case["shape"]
    return {
        None: shape,
        "transposed": shape[::-1],
        "permuted": [shape[1], shape[2], shape[0]] if len(shape) == 3 else shape,
        "gaps": [shape[0], 2 * shape[1]] if len(shape) == 2 else shape,
        "column": [shape[0], 2 * shape[1]] if len(shape) == 2 else shape,
    }[case.get("view")]


def viewed(memory: Any, case: dict[str, Any]) -> Any:
    """Return the array of a case; works for PyTorch's arrays, NumPy's and ours."""
    view = case.get("view")
    if view == "transposed":
        return memory.T
    if view == "permuted":
        return getattr(memory, "permute", memory.transpose)(2, 0, 1)
    if view == "gaps":
        return memory[:, ::2]
    if view == "column":
        return memory[:, : memory.shape[1] // 2]
    return memory


def dtype_of(name: str) -> np.dtype[Any]:
    """Return a dtype by PyTorch's name."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def draw(case: dict[str, Any], generator: random.Generator) -> np.ndarray[Any, Any]:
    """Return what cudatool makes of a case, in host memory, bfloat16 as its bits."""
    dtype = dtype_of(case["dtype"])
    method, args = case["method"], case["args"]
    if method == "randperm":
        found = random.randperm(case["shape"][0], dtype=dtype, generator=generator)
    else:
        found = viewed(cudatool.empty(spread(case), dtype).copy_(np.ones(spread(case)).astype(dtype)), case)
        if method == "dropout":
            found, mask = random.native_dropout(found, args[0], generator=generator)
            np.testing.assert_array_equal(found.get() != 0, mask.get())
        elif method == "multinomial":
            weights = cudatool.asarray((np.arange(found.size) % 100 + 1).astype(dtype).reshape(found.shape))
            found = random.multinomial(weights, *args, generator=generator)
        elif method == "bernoulli_array":
            p = (np.arange(found.size) / found.size).astype(np.float32).reshape(found.shape)
            random.bernoulli_(found, cudatool.asarray(p), generator=generator)
        else:
            getattr(random, method)(found, *args, generator=generator)
    host = found.get()
    return host.view(np.int16) if case["dtype"] == "bfloat16" else host


APPROXIMATE = {
    # What uses sin.approx, lg2.approx or ex2.approx, which the software device computes exactly: the largest
    # difference, relative to numbers of 1 and above. Half precision rounds at most one step differently.
    "normal_": 1e-5,
    "log_normal_": 1e-5,
    "exponential_": 1e-5,
    "cauchy_": 1e-3,
}


def assert_same(case: dict[str, Any], expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> None:
    """Compare a case's numbers with recorded ones."""
    method, dtype = case["method"], case["dtype"]
    if method not in APPROXIMATE or dtype in ("float64", "complex128"):
        np.testing.assert_array_equal(found, expected, err_msg=str(case))
    elif dtype in ("float16", "bfloat16"):
        assert np.abs(expected.view(np.int16).astype(int) - found.view(np.int16)).max() <= 1, case
    else:
        close = APPROXIMATE[method]
        np.testing.assert_allclose(found, expected, rtol=close, atol=close, err_msg=str(case))
