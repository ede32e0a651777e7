"""Running small PTX kernels written in tests."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from cudatool import _driver
from cudatool.sim import jit

if os.environ.get("CUDATOOL_DEVICE", "sim").startswith("cuda"):
    collect_ignore_glob = ["test_*.py"]  # the process drives a GPU


@pytest.fixture(scope="session", autouse=True)
def driver_first() -> None:
    """Choose the device before kernels run: they load the library that stands in for libcuda."""
    _driver.initialize()


HEADER = ".version 8.3\n.target sm_90\n.address_size 64\n"

# dtype -> register type, type of loads and stores
_TYPES = {
    np.dtype(np.uint8): ("b16", "u8"),
    np.dtype(np.int8): ("b16", "s8"),
    np.dtype(np.uint16): ("b16", "u16"),
    np.dtype(np.int16): ("b16", "s16"),
    np.dtype(np.float16): ("b16", "b16"),
    np.dtype(np.uint32): ("b32", "u32"),
    np.dtype(np.int32): ("b32", "s32"),
    np.dtype(np.float32): ("f32", "f32"),
    np.dtype(np.uint64): ("b64", "u64"),
    np.dtype(np.int64): ("b64", "s64"),
    np.dtype(np.float64): ("f64", "f64"),
}


def pack(*arguments: Any) -> ctypes.Array[ctypes.c_char]:
    """Pack kernel arguments as the device lays them out: arrays as their addresses, NumPy scalars as they are."""
    data = b""
    for argument in arguments:
        value = argument.ctypes.data.to_bytes(8, "little") if isinstance(argument, np.ndarray) else argument.tobytes()
        data += bytes(-len(data) % len(value)) + value
    return ctypes.create_string_buffer(data, len(data) + 1)


def launch(kernel: jit.Kernel, grid: Any, block: Any, *arguments: Any, shared_bytes: int = 0, **options: Any) -> None:
    """Launch with a grid and block of one to three dimensions."""
    shape = [(*s, 1, 1)[:3] if isinstance(s, tuple) else (s, 1, 1) for s in (grid, block)]
    buffer = pack(*arguments)
    kernel.launch(grid=shape[0], block=shape[1], shared_bytes=shared_bytes, params=ctypes.addressof(buffer), **options)


def elementwise(
    code: str, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, Any], declare: str = ""
) -> dict[str, np.ndarray]:
    """Run `code` for each element: registers ``%a`` hold the elements of inputs, and of outputs afterwards."""
    count = len(next(iter(inputs.values())))
    results = {name: np.zeros(count, dtype) for name, dtype in outputs.items()}
    arrays = {**inputs, **results}
    lines = [
        f".visible .entry k({', '.join(f'.param .u64 p_{name}' for name in arrays)}) {{",
        ".reg .b64 %addr_<3>; .reg .b32 %index; .reg .pred %p, %q;",
        declare,
        "mov.u32 %index, %tid.x;",
    ]
    body, after = [], []
    for name, array in arrays.items():
        register, memory = _TYPES[array.dtype]
        address = [
            f"ld.param.u64 %addr_0, [p_{name}];",
            f"mad.wide.u32 %addr_1, %index, {array.itemsize}, %addr_0;",
        ]
        lines.append(f".reg .{register} %{name};")
        if name in inputs:
            body += [*address, f"ld.global.{memory} %{name}, [%addr_1];"]
        else:
            after += [*address, f"st.global.{memory} [%addr_1], %{name};"]
    text = HEADER + "\n".join([*lines, *body, code, *after, "ret;", "}"])
    launch(jit.load(text.encode()).kernels["k"], 1, count, *arrays.values())
    return results


def place_variables(module: jit.JitModule) -> dict[str, ctypes.Array[ctypes.c_char]]:
    """Give a module's global variables memory, as the driver does."""
    memory = {name: ctypes.create_string_buffer(v.initial, max(v.size, 1)) for name, v in module.globals.items()}
    addresses = {name: ctypes.addressof(buffer) for name, buffer in memory.items()}
    for name, variable in module.globals.items():
        for offset, symbol, addend in variable.relocations:
            ctypes.c_uint64.from_buffer(memory[name], offset).value = addresses[symbol] + addend
    module.bind(addresses)
    return memory


@pytest.fixture(name="place_variables")
def place_variables_fixture() -> Iterator[Callable[..., dict[str, ctypes.Array[ctypes.c_char]]]]:
    kept = []

    def place(module: jit.JitModule) -> dict[str, ctypes.Array[ctypes.c_char]]:
        kept.append(place_variables(module))
        return kept[-1]

    yield place
    kept.clear()


@pytest.fixture(name="elementwise")
def elementwise_fixture() -> Callable[..., dict[str, np.ndarray]]:
    return elementwise


@pytest.fixture(name="launch")
def launch_fixture() -> Callable[..., None]:
    return launch


@pytest.fixture
def ptx_kernel() -> Callable[..., jit.Kernel]:
    """Return a function that loads a kernel ``k`` from its parameters and body."""

    def make(params: str, body: str, before: str = "", directives: str = "", **options: Any) -> jit.Kernel:
        text = f"{HEADER}{before}\n.visible .entry k({params}) {directives}\n{{\n{body}\n}}\n"
        return jit.load(text.encode(), **options).kernels["k"]

    return make
