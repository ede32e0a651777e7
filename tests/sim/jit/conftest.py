"""Running small PTX kernels written in tests."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver, nvrtc

from cudatool import _driver
from cudatool.code_cache import CodeCache
from cudatool.sim import jit
from cudatool.sim.jit import native

if os.environ.get("CUDATOOL_DEVICE", "sim").startswith("cuda"):
    collect_ignore_glob = ["test_*.py"]  # the process drives a GPU


@pytest.fixture(scope="session", autouse=True)
def driver_first() -> None:
    """Choose the device before kernels run: they load the library that stands in for libcuda."""
    _driver.initialize()


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """Keep what LLVM makes of a text for the next run, which is most of what these tests take.

    PTX is translated in each test: it is only the same text that LLVM need not compile again.
    """
    kept, compiled = CodeCache("native"), native._compiled
    machine = (native.llvm.get_host_cpu_name(), native._features(), str(native.llvm.llvm_version_info))
    begun = hashlib.sha256(Path(native.__file__).read_bytes() + repr(machine).encode())

    def found_or_compiled(text: str, *, optimized: bool, gathers: bool, wide: bool) -> bytes:
        digest = begun.copy()
        digest.update(f"{optimized} {gathers} {wide} {text}".encode())
        key = digest.hexdigest()
        if (found := kept.get(key)) is None:
            found = compiled(text, optimized=optimized, gathers=gathers, wide=wide)
            kept.put(key, found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_compiled", found_or_compiled)
        yield


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


def launch(
    kernel: jit.JitKernel,
    grid: Any,
    block: Any,
    *arguments: Any,
    shared_bytes: int = 0,
    stack_bytes: int = 1024,
    **options: Any,
) -> None:
    """Launch with a grid and block of one to three dimensions."""
    sizes = [(*s, 1, 1)[:3] if isinstance(s, tuple) else (s, 1, 1) for s in (grid, block)]
    shape = jit.LaunchShape(*sizes, shared_bytes, stack_bytes=stack_bytes)
    buffer = pack(*arguments)
    kernel.launch(shape, ctypes.addressof(buffer), jit.LaunchOptions(**options))


def elementwise(
    code: str,
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, Any],
    declare: str = "",
    *,
    optimized: Sequence[bool] = (False, True),
) -> dict[str, np.ndarray]:
    """Run `code` for each element: registers ``%a`` hold the elements of inputs, and of outputs afterwards.

    It runs in each way that `optimized` has, which must give the same bits.
    """
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
    kernel, found = jit.load(text.encode()).kernels["k"], set()
    for is_optimized in optimized:
        for result in results.values():
            result.fill(0)
        launch(kernel, 1, count, *arrays.values(), optimized=is_optimized)
        found.add(tuple(result.tobytes() for result in results.values()))
    assert 1 == len(found)
    return results


def place_variables(module: jit.JitModule) -> dict[str, ctypes.Array[ctypes.c_char]]:
    """Give a module's global variables memory, as the driver does."""
    memory = {name: ctypes.create_string_buffer(v.initial, max(v.size, 1)) for name, v in module.globals.items()}
    addresses = {name: ctypes.addressof(buffer) for name, buffer in memory.items()}
    for name, variable in module.globals.items():
        for offset, symbol, addend in variable.relocations:
            ctypes.c_uint64.from_buffer(memory[name], offset).value = {**module.functions, **addresses}[symbol] + addend
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


@pytest.fixture
def is_optimized(request: pytest.FixtureRequest) -> bool:
    """Whether a test of an instruction runs it in optimized code, too: in each run a tenth of them, other ones in each.

    To optimize a kernel takes longer than all else. The run's seed decides; ``-p no:randomly`` optimizes all.
    """
    seed = request.config.getoption("randomly_seed", None)
    return seed is None or random.Random(f"{seed} {request.node.nodeid}").random() < 1 / 10


@pytest.fixture(name="elementwise")
def elementwise_fixture(is_optimized: bool) -> Callable[..., dict[str, np.ndarray]]:
    """Run code as small launches do, and optimized if this is the test's turn."""
    return partial(elementwise, optimized=(False, True) if is_optimized else (False,))


@pytest.fixture(name="launch")
def launch_fixture(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Launch in optimized code or, two test functions of three in each run, as small launches do.

    All cases of a function launch alike, as most of them share a kernel, whose optimizing takes longer than all else.
    The run's seed decides; ``-p no:randomly`` optimizes all.
    """
    seed, function = request.config.getoption("randomly_seed", None), request.node.nodeid.partition("[")[0]
    return partial(launch, optimized=seed is None or random.Random(f"{seed} {function}").random() < 1 / 3)


@pytest.fixture
def launch_in_turn(is_optimized: bool) -> Callable[..., None]:
    """Launch as small launches do or, if this is the test's turn, optimized."""
    return partial(launch, optimized=is_optimized)


@pytest.fixture
def ptx_module() -> Callable[..., jit.JitModule]:
    """Return a function that loads a module whose one kernel is ``k``, from its parameters and body."""

    def make(params: str, body: str, before: str = "", directives: str = "", **options: Any) -> jit.JitModule:
        text = f"{HEADER}{before}\n.visible .entry k({params}) {directives}\n{{\n{body}\n}}\n"
        return jit.load(text.encode(), **options)

    return make


@pytest.fixture
def ptx_kernel(ptx_module: Callable[..., jit.JitModule]) -> Callable[..., jit.JitKernel]:
    """Return a function that loads a kernel ``k`` from its parameters and body."""
    return lambda *text, **options: ptx_module(*text, **options).kernels["k"]


# ---- CUDA C++ through the driver API ----


@cache
def nvrtc_ptx(source: str, *options: str) -> bytes:
    """Compile CUDA C++ to PTX."""
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    flags = [b"--gpu-architecture=compute_90", *(option.encode() for option in options)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = bytearray(size)
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(ptx)


@cache
def nvidia_includes() -> tuple[str, ...]:
    """Return NVRTC options for the headers of NVIDIA's wheels."""
    import nvidia

    return tuple(f"-I{folder}/cu13/{part}" for folder in nvidia.__path__ for part in ("include", "include/cccl"))


class Program:
    """A module loaded in a context of its own, as a program does that uses the driver API."""

    def __init__(self, image: bytes) -> None:
        driver.cuInit(0)
        _, self.context = driver.cuCtxCreate(None, 0, 0)
        status, self.module = driver.cuModuleLoadData(image)
        assert status == driver.CUresult.CUDA_SUCCESS, status

    def launch(
        self, name: str, grid: Any, block: Any, *arguments: Any, cooperative: bool = False, shared_bytes: int = 0
    ) -> driver.CUresult:
        """Launch; return the launch's own status. Arguments are NumPy scalars or device addresses as int."""
        shape = [(*s, 1, 1)[:3] if isinstance(s, tuple) else (s, 1, 1) for s in (grid, block)]
        _, function = driver.cuModuleGetFunction(self.module, name.encode())
        values = [np.uint64(a) if isinstance(a, int) else a for a in arguments]
        boxes = [np.array([value]) for value in values]
        pointers = np.array([box.ctypes.data for box in boxes], np.uint64)
        call = driver.cuLaunchCooperativeKernel if cooperative else driver.cuLaunchKernel
        extra = () if cooperative else (0,)
        (status,) = call(function, *shape[0], *shape[1], shared_bytes, 0, pointers.ctypes.data, *extra)
        return status

    def synchronize(self) -> driver.CUresult:
        """Wait for the device; return what that says."""
        return driver.cuCtxSynchronize()[0]

    def upload(self, array: np.ndarray) -> int:
        """Return the address of a copy of `array` on the device."""
        _, address = driver.cuMemAlloc(max(array.nbytes, 1))
        driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes)
        return int(address)

    def download(self, address: int, count: int, dtype: Any) -> np.ndarray:
        """Return `count` elements from the device."""
        result = np.empty(count, dtype)
        (status,) = driver.cuMemcpyDtoH(result.ctypes.data, address, result.nbytes)
        assert status == driver.CUresult.CUDA_SUCCESS, status
        return result

    def close(self) -> None:
        """Destroy the context and all that is in it."""
        driver.cuCtxDestroy(self.context)


@pytest.fixture(scope="session")
def ptx_of() -> Callable[..., bytes]:
    """Return the function that compiles CUDA C++."""
    return nvrtc_ptx


@pytest.fixture
def program() -> Iterator[Callable[..., Program]]:
    """Return a function that loads CUDA C++ (or PTX, as bytes) in a context of its own."""
    made: list[Program] = []

    def load(source: str | bytes, *options: str, headers: bool = False) -> Program:
        image = (
            source
            if isinstance(source, bytes)
            else nvrtc_ptx(source, *options, *(nvidia_includes() if headers else ()))
        )
        made.append(Program(image))
        return made[-1]

    yield load
    for one in made:
        one.close()
