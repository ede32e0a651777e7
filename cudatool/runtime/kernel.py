"""Kernels: CUDA C++ source in, a launch out, with cuda.core's conventions."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import re
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from cudatool import _driver, ptx, source_text
from cudatool.code_cache import CodeCache
from cudatool.errors import UsageError
from cudatool.runtime import calls
from cudatool.runtime._native import Launcher, Region
from cudatool.runtime.annotate import annotating
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.calls import check, entry, operation, raise_status
from cudatool.runtime.capture import relaxed
from cudatool.runtime.device import call_on, current_device
from cudatool.runtime.nvrtc import include_paths
from cudatool.runtime.stream import Stream, as_stream, current_stream
from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, Kind, WarningCode, WarningFlag, launch_flags, pack_dims

__all__ = ["Kernel", "compile", "compile_own", "is_watched", "launch", "memory_of_launch", "watched"]


class Kernel:
    """A kernel that is loaded; made by :func:`compile`.

    ``kernel[config](*arguments)`` launches it on the current stream, where `config` is a
    :class:`cuda.core.LaunchConfig` or ``(grid, block)``; see :func:`launch` for the arguments.

    Attributes
    ----------
    name
        As given to :func:`compile`.
    core
        The :class:`cuda.core.Kernel`, with its ``attributes`` and ``occupancy``.
    parameters
        Offset and size in bytes of each parameter.
    """

    def __init__(self, core: Any, name: str, ptx: Callable[[], tuple[bytes, str]] | None = None) -> None:
        self.core = core
        self.name = name
        self._ptx = ptx  # the PTX of its module, and its name there
        with operation():
            self.handle = int(core.handle)
            self.parameters = [(int(info.offset), int(info.size)) for info in core.arguments_info]
        convert = functools.partial(_convert, name, self.parameters)
        self.launcher = Launcher(
            entry("cuLaunchKernel"), self.handle, self.parameters, DeviceArray, np.generic, convert
        )

    def __getitem__(self, config: Any) -> Callable[..., None]:
        if isinstance(config, tuple):
            if len(config) != 2:
                raise UsageError(f"kernel[{config}]: pass (grid, block) or a LaunchConfig")
            try:
                config = _config(*config)
            except (TypeError, ValueError) as error:
                raise UsageError(f"kernel[{config}]: {error}") from None
        elif not isinstance(config, calls.core.LaunchConfig):
            raise UsageError(f"kernel[{config}]: pass (grid, block) or a LaunchConfig")
        return functools.partial(launch, None, config, self)

    def pack(self, arguments: tuple[Any, ...]) -> bytes:
        """Return the bytes of the kernel's parameters, each at its offset, for these arguments.

        Raises
        ------
        UsageError
            There are too many or too few, or one does not fit its parameter.
        """
        if len(arguments) != len(self.parameters):
            raise self.miscounted(arguments)
        return self.launcher.pack(arguments)

    def miscounted(self, arguments: tuple[Any, ...]) -> UsageError:
        """Return the error for too many or too few arguments."""
        return UsageError(f"{self.name} takes {len(self.parameters)} arguments, not {len(arguments)}")

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """Allow launches to ask for so much dynamic shared memory on the current device; 48 KiB is allowed already.

        Raises
        ------
        CudaError
            The device has not that much for one block.
        """
        attribute = calls.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with operation():
            check(calls.driver.cuKernelSetAttribute(attribute, shared_mem_bytes, self.handle, current_device()))

    @functools.cached_property
    def accesses(self) -> ptx.KernelAccesses | None:
        """Which memory the kernel may access, inferred from its PTX; None if that is not known."""
        if self._ptx is None:
            return None
        code, mangled = self._ptx()
        try:
            return ptx.infer_accesses(ptx.parse(code), mangled)
        except ptx.PtxError:
            return None

    @functools.cached_property
    def orders_others(self) -> tuple[bool, bool, bool]:
        """How it takes part in the order of work: :func:`cudatool.ptx.orders_others`."""
        code, mangled = self._ptx() if self._ptx is not None else (b"", "")
        return ptx.orders_others(code, lambda: ptx.parse(code), mangled)

    def __repr__(self) -> str:
        return f"<Kernel {self.name}>"


@functools.lru_cache(maxsize=256, typed=True)
def _config(grid: Any, block: Any) -> Any:
    return calls.core.LaunchConfig(grid=grid, block=block)


_FLOAT_CODES: Final = {2: "<e", 4: "<f", 8: "<d"}


def _convert(name: str, parameters: list[tuple[int, int]], index: int, argument: Any) -> bytes:
    """Return the bytes that stand for one argument of the kernel `name`."""
    try:
        return _to_bytes(argument, parameters[index][1])
    except (OverflowError, TypeError) as error:
        raise UsageError(f"argument {index} of {name}: {error}") from None


def _to_bytes(argument: Any, size: int) -> bytes:
    """Return the `size` bytes that stand for an argument, of any kind; for most, the launcher does it."""
    if isinstance(argument, DeviceArray):
        value = argument.data_ptr().to_bytes(8, "little")
    elif isinstance(argument, calls.core.Buffer):
        value = int(argument.handle).to_bytes(8, "little")
    elif isinstance(argument, np.generic) or (isinstance(argument, np.ndarray) and not argument.ndim):
        value = argument.tobytes()
    elif isinstance(argument, np.ndarray):
        raise TypeError("a NumPy array is host memory; copy it with cudatool.asarray")
    elif isinstance(argument, int):
        try:
            value = argument.to_bytes(size, "little", signed=argument < 0)
        except OverflowError:
            raise OverflowError(f"{argument} does not fit in {size} bytes") from None
    elif isinstance(argument, float):
        if size not in _FLOAT_CODES:
            raise TypeError(f"a float was passed for a parameter of {size} bytes")
        value = struct.pack(_FLOAT_CODES[size], argument)
    else:
        raise TypeError(f"cannot pass {type(argument).__name__}; foreign arrays go through cudatool.asarray")
    if len(value) != size:
        raise TypeError(f"{type(argument).__name__} has {len(value)} bytes, the parameter {size}")
    return value


def launch(stream: Any, config: Any, kernel: Kernel, *arguments: Any) -> None:
    """Enqueue a kernel.

    Parameters
    ----------
    stream
        A :class:`Stream`, anything with ``__cuda_stream__``, or None for the current stream.
    config
        A :class:`cuda.core.LaunchConfig`: grid, block, shared memory in bytes.
    arguments
        One for each parameter. A :class:`DeviceArray` or :class:`cuda.core.Buffer` is passed as its address; a NumPy
        scalar or structured element as it is; a Python bool or int as an integer, a Python float as a floating-point
        number of the parameter's size. A driver knows the size of a parameter, not its type: pass ``2.0`` or
        ``np.float32(2)``, not ``2``, to a parameter that is a float.

    Raises
    ------
    UsageError
        The arguments do not fit the parameters, or `stream`, `config` or `kernel` is none.
    CudaError
        The driver refused the launch.
    """
    if stream is None:
        stream = current_stream()
    elif not isinstance(stream, Stream):
        stream = as_stream(stream)
    try:
        fits = len(arguments) == len(kernel.parameters)
        has_attributes = config.cluster or config.is_cooperative or config.programmatic_stream_serialization
    except AttributeError:
        raise _not_to_be_launched(config, kernel) from None
    if not fits:
        raise kernel.miscounted(arguments)
    handle, index = stream.native, stream.device_index
    correlation = hooks.begin() if hooks.active else 0
    try:
        if has_attributes:
            status = call_on(index, _launch_with_attributes, config, handle, kernel, arguments)
        else:
            enqueue = kernel.launcher.launch
            status = call_on(index, enqueue, config.grid, config.block, config.shmem_size, handle, arguments)
    finally:
        if correlation:
            hooks.end()
    if status:
        raise_status(status)
    if correlation:
        _emit_launch(stream, config, kernel, arguments, correlation)


def _not_to_be_launched(config: Any, kernel: Any) -> UsageError:
    if not isinstance(kernel, Kernel):
        return UsageError(f"launch takes a kernel of cudatool.compile, not {type(kernel).__name__}")
    return UsageError(f"launch takes a cudatool.LaunchConfig, not {type(config).__name__}")


def _emit_launch(stream: Stream, config: Any, kernel: Kernel, arguments: tuple[Any, ...], correlation: int) -> None:
    cluster = config.cluster or (1, 1, 1)
    hooks.emit(
        Kind.KERNEL_LAUNCH,
        device=stream.device_index,
        stream=stream.trace_id(),
        correlation=correlation,
        name=kernel.name,
        aux0=pack_dims(*(g * c for g, c in zip(config.grid, cluster, strict=True))),
        aux1=pack_dims(*config.block),
        size=config.shmem_size,
        flags=launch_flags(config.programmatic_stream_serialization, *kernel.orders_others)
        if hooks.wants_accesses
        else 0,
    )
    inferring = hooks.wants_accesses and not hooks.measures_accesses and not annotating()
    if inferring and kernel.accesses is not None:
        _emit_accesses(kernel.accesses, arguments, kernel.pack(arguments), stream, correlation)
    if _watched.by is not None:
        _watched.by(kernel, arguments)


class _Watched(threading.local):
    by: Callable[[Kernel, tuple[Any, ...]], None] | None = None


_watched = _Watched()


@contextmanager
def watched(by: Callable[[Kernel, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `by` with kernel and arguments of each launch of the calling thread inside, after its event.

    It applies while there is a subscriber of events, so that it costs nothing where there is none.
    """
    before, _watched.by = _watched.by, by
    try:
        yield
    finally:
        _watched.by = before


def is_watched() -> bool:
    """Return whether the calling thread's launches are watched (:func:`watched`)."""
    return _watched.by is not None


def memory_of_launch(kernel: Kernel, arguments: tuple[Any, ...]) -> tuple[ptx.AccessRange, ...] | None:
    """Return what a launch may access, inferred from PTX; None if that is not known.

    Of an array that is passed to a parameter it is all of the memory that the array is a part of: unlike a trace, what
    asks this must not miss anything.
    """
    if kernel.accesses is None:
        return None
    ranges = [extent for extent in map(_whole_extent, arguments) if extent is not None]

    def find(address: int) -> tuple[int, int] | None:
        return next(((start, size) for start, size in ranges if start <= address < start + size), None)

    found = ptx.accesses_of_launch(kernel.accesses, kernel.pack(arguments), find)
    return None if found.unknown else found.ranges


def _whole_extent(argument: Any) -> tuple[int, int] | None:
    memory: object = argument._memory if isinstance(argument, DeviceArray) else None
    return (memory.address, memory.size) if isinstance(memory, Region) else _extent(argument)


def _emit_accesses(
    accesses: ptx.KernelAccesses, arguments: tuple[Any, ...], values: bytes, stream: Stream, correlation: int
) -> None:
    """Say what a launch may access, inferred from PTX.

    Of an array that is passed to a parameter, all elements count as accessed, and nothing beyond; such ranges are
    marked as inexact.
    """
    ranges = [extent for extent in map(_extent, arguments) if extent is not None]

    def find(address: int) -> tuple[int, int] | None:
        return next(((start, size) for start, size in ranges if start <= address < start + size), None)

    flags = {ptx.Mode.READ: AccessFlag.READ, ptx.Mode.WRITE: AccessFlag.WRITE, ptx.Mode.ATOMIC: AccessFlag.ATOMIC}
    found = ptx.accesses_of_launch(accesses, values, find)
    if found.unknown:
        doubts = ", ".join(sorted(found.doubts))
        text = f"{accesses.kernel} may access more than its arguments say: {doubts}"
        hooks.emit(Kind.WARNING, name=text, flags=WarningFlag.UNSEEN, stack=0, aux0=WarningCode.ACCESSES_NOT_KNOWN)
    for touched in found.ranges:
        how = AccessFlag.INEXACT
        for mode in touched.mode:
            how |= flags[mode]
        hooks.emit(
            Kind.ACCESS,
            device=stream.device_index,
            stream=stream.trace_id(),
            correlation=correlation,
            address=touched.address,
            size=touched.size,
            flags=how,
            stack=0,
        )


def _extent(argument: Any) -> tuple[int, int] | None:
    """Return address and bytes of the memory that an argument stands for."""
    if isinstance(argument, DeviceArray):
        low, high = np.lib.array_utils.byte_bounds(argument.layout)
        return low, high - low
    if isinstance(argument, calls.core.Buffer):
        return int(argument.handle), int(argument.size)
    return None


def _launch_with_attributes(config: Any, stream: int, kernel: Kernel, arguments: tuple[Any, ...]) -> int:
    values = ctypes.create_string_buffer(kernel.launcher.pack(arguments))
    base = ctypes.addressof(values)
    pointers = (ctypes.c_void_p * len(arguments))(*[base + offset for offset, _ in kernel.parameters])
    native = _native_config(config, stream)
    return int(calls.driver.cuLaunchKernelEx(native, kernel.handle, ctypes.addressof(pointers), 0)[0])


def _native_config(config: Any, stream: int) -> Any:
    """Return cuda.core's LaunchConfig as the driver's; a grid of clusters becomes one of blocks."""
    driver = calls.driver
    kinds = driver.CUlaunchAttributeID
    native = driver.CUlaunchConfig()
    cluster = config.cluster or (1, 1, 1)
    native.gridDimX, native.gridDimY, native.gridDimZ = (g * c for g, c in zip(config.grid, cluster, strict=True))
    native.blockDimX, native.blockDimY, native.blockDimZ = config.block
    native.sharedMemBytes = config.shmem_size
    native.hStream = stream
    attributes = []
    if config.cluster:
        dimension = driver.CUlaunchAttribute()
        dimension.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension.value.clusterDim.x, dimension.value.clusterDim.y, dimension.value.clusterDim.z = cluster
        attributes.append(dimension)
    if config.is_cooperative:
        cooperative = driver.CUlaunchAttribute()
        cooperative.id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        attributes.append(cooperative)
    if config.programmatic_stream_serialization:
        overlap = driver.CUlaunchAttribute()
        overlap.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        attributes.append(overlap)
    native.attrs, native.numAttrs = attributes, len(attributes)
    return native


def compile(source: str, name: str, *, options: Any = None) -> Kernel:
    """Compile CUDA C++ for the current device, load it, and return one of its kernels.

    What was compiled before, in any process, comes from a cache on disk, where there may be one.

    Parameters
    ----------
    source
        CUDA C++; the headers of CUDA and CCCL can be included.
    name
        The kernel's, as C++ says it: ``"scale"``, ``"ns::scale<float>"``.
    options
        A :class:`cuda.core.ProgramOptions`. With include paths of its own nothing is cached: headers may change.

    Raises
    ------
    CompileError
        NVRTC refused the source; the error's ``log`` has its messages.
    UsageError
        An argument is of another type.
    """
    if not isinstance(source, str):
        raise UsageError(f"a source is a string of CUDA C++, not {type(source).__name__}")
    if not isinstance(name, str):
        raise UsageError(f"a kernel's name is a string, not {type(name).__name__}")
    if options is not None and not isinstance(options, calls.core.ProgramOptions):
        raise UsageError(f"options are a cudatool.ProgramOptions, not {type(options).__name__}")
    return _loaded(source, name, options)


def compile_own(source: str, name: str) -> Kernel:
    """Do what :func:`compile` does, for a source of this package.

    On the software device, NVRTC makes its PTX alone. For a program's sources it makes machine code, too, which takes
    as long again and is not used: only its assembler finds mistakes of inline assembly and functions without a body.
    """
    return _loaded(source, name, None, is_ours=True)


def _loaded(source: str, name: str, options: Any, *, is_ours: bool = False) -> Kernel:
    index = current_device()
    with operation() as correlation, relaxed():  # nothing that is captured depends on what is loaded now
        code = _object_code(source, name, options, is_ours=is_ours)
        kernel = Kernel(code.get_kernel(name), name, functools.partial(_ptx, source, name, options, is_ours=is_ours))
    if correlation:
        hooks.emit(Kind.MODULE_LOAD, device=index, name=name, size=len(code.code))
    return kernel


_HEADER_WHEELS: Final = ("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cccl")


@functools.cache
def _headers_digest() -> bytes:
    """Return what changes when the installed headers do."""
    versions = []
    for wheel in _HEADER_WHEELS:
        try:
            versions.append(importlib.metadata.version(wheel))
        except importlib.metadata.PackageNotFoundError:
            versions.append("")
    return hashlib.sha256(repr((versions, include_paths())).encode()).digest()


_programs: Final = CodeCache("nvrtc")


def _ptx(source: str, name: str, options: Any, *, is_ours: bool) -> tuple[bytes, str]:
    """Return the PTX of a program, and what its kernel is called there."""
    with operation():
        code = _object_code(source, name, options, "ptx", is_ours=is_ours)
    mangled = code.symbol_mapping[name]
    return bytes(code.code), mangled.decode() if isinstance(mangled, bytes) else mangled


def _object_code(source: str, name: str, options: Any, target: str = "", *, is_ours: bool = False) -> Any:
    """Return the compiled program; a cache entry is the kernel's mangled name, a zero byte, and the code."""
    core = calls.core
    given = options
    # The software device cannot run machine code.
    target = target or ("ptx" if _driver.initialize().kind == "sim" else "cubin")
    if given is None:
        stem = name.partition("<")[0].rpartition(":")[2]
        file = source_text.keep(f"{stem}.cu", source)
        # Of a virtual architecture there is no machine code.
        arch = f"compute_{core.Device().arch}" if is_ours and target == "ptx" else None
        # No source of ours uses the textures, surfaces and runtime calls without which NVRTC takes a fifth less time.
        given = core.ProgramOptions(name=file, lineinfo=True, arch=arch, minimal=is_ours or None)
    own_paths = [given.include_path] if isinstance(given.include_path, str) else list(given.include_path or ())
    complete = dataclasses.replace(given, include_path=[*own_paths, *include_paths()])
    if own_paths:
        return core.Program(source, "c++", complete).compile(target, name_expressions=(name,))

    from cuda.core.utils import make_program_cache_key

    key = make_program_cache_key(
        code=source,
        code_type="c++",
        options=complete,
        target_type=target,
        name_expressions=(name,),
        extra_digest=_headers_digest(),
    )
    found = _programs.get(key.hex())
    if found is None:
        compiled = core.Program(source, "c++", complete).compile(target, name_expressions=(name,))
        mangled = compiled.symbol_mapping[name]
        mangled = mangled if isinstance(mangled, bytes) else mangled.encode()
        code = bytes(compiled.code)
        if target == "ptx":
            # NVRTC puts the working directory in front of the file's name. That of other processes is another one.
            file = re.escape(complete.name.encode())
            code = re.sub(rb'^(\s*\.file\s+\d+\s+")[^"]*/(%b")' % file, rb"\1\2", code, flags=re.MULTILINE)
        found = mangled + b"\0" + code
        _programs.put(key.hex(), found)
    mangled, _, code = found.partition(b"\0")
    load = core.ObjectCode.from_ptx if target == "ptx" else core.ObjectCode.from_cubin
    return load(code, name=complete.name, symbol_mapping={name: mangled})
