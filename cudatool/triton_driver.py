"""Triton on the software device: what stands in its place for NVIDIA's compiler and driver.

A program with ``@triton.jit`` kernels runs as it is. Triton compiles to PTX, and that is where it stops: the software
device takes PTX, so no ptxas is run. Its own launcher, the one for NVIDIA's driver, launches the kernels.

Kernels take arrays of ours, and any other object with a ``data_ptr()`` in the device's memory, on our current stream.
They also take PyTorch's tensors in the host's memory, of a PyTorch built for processors: those of
``triton.runtime.driver.active.get_active_torch_device()``. Such memory is registered (``cuMemHostRegister``) as long as
the tensor's storage lives, and the launch waits for the kernel, since PyTorch would not wait before it reads.

This module imports Triton. It is imported when a program has imported Triton and uses the software device.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, Final

from triton import backends
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

import cudatool
from cudatool.code_cache import CodeCache
from cudatool.errors import DeviceUnavailableError
from cudatool.ptx.model import PROGRAMS, PtxError
from cudatool.runtime import calls
from cudatool.runtime.calls import check, operation
from cudatool.runtime.device import current_device, get_device_capability, set_device
from cudatool.runtime.stream import current_stream
from cudatool.sim.host_library import path_of
from cudatool.sim.kernels import modeled_ns
from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, Kind
from cudatool.triton_order import ordered

__all__ = ["TARGET", "Compiler", "Driver", "install"]

TARGET: Final = GPUTarget("cuda", 89, 32)
"""What kernels are compiled for. The device's own capability is 9.0, but it has no ``wgmma`` instructions."""
_VERSION: Final = 2  # of what is done to kernels here
_PTX_VERSION: Final = 84  # 8.4, the first with all that compute capability 8.9 can do
_INLINE: Final = re.compile(r"// begin inline asm\n.*?// end inline asm", re.DOTALL)
_LOC: Final = re.compile(r"^\s*\.loc\s.*\n", re.MULTILINE)
_MAY_USE: Final = AccessFlag.READ | AccessFlag.WRITE | AccessFlag.INEXACT
_ALREADY_REGISTERED: Final = 712  # CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED


def install() -> None:
    """Take the place of NVIDIA's compiler and driver in Triton's table of them, in this process."""
    backends.backends["nvidia"] = backends.Backend(compiler=Compiler, driver=Driver)


class Compiler(CUDABackend):  # type: ignore[misc]  # Triton has no types
    """Triton's compiler for NVIDIA's GPUs, up to the PTX."""

    def parse_options(self, opts: dict[str, Any]) -> Any:
        """Return Triton's options, with a version of PTX: else it is ptxas that is asked for one."""
        return super().parse_options({"ptx_version": _PTX_VERSION, **{k: v for k, v in opts.items() if v is not None}})

    def add_stages(self, stages: dict[str, Callable[..., Any]], *options: Any) -> None:
        """Add barriers before Triton leaves its own language, and let the last stage hand on the PTX.

        What the last stage returns is what Triton keeps and the driver loads.
        """
        super().add_stages(stages, *options)
        lower = stages["llir"]
        stages["llir"] = lambda module, metadata: lower(_with_barriers(module), metadata)
        stages["cubin"] = lambda ptx, metadata: _finished(ptx).encode() + b"\0"

    def hash(self) -> str:
        """Return what keeps these results apart from ptxas's in Triton's cache."""
        return f"cudatool-{_VERSION}-{_PTX_VERSION}-{self.target.arch}"


def _with_barriers(module: Any) -> Any:
    """Return a module of TTGIR with the barriers that :mod:`cudatool.triton_order` adds to it."""
    context = module.context
    text = str(module)
    found = ordered(text, _barrier(context))
    if found == text:
        return module
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(found)
        file.flush()
        parsed = ir.parse_mlir_module(file.name, context)
    parsed.context = context
    return parsed


def _barrier(context: Any) -> str:
    """Return how this version of Triton prints the barrier of ``tl.debug_barrier``."""
    builder = ir.builder(context)
    module = builder.create_module()
    function = builder.get_or_insert_function(module, "f", builder.get_function_ty([], []), "public", False)
    module.push_back(function)
    builder.set_insertion_point_to_start(function.add_entry_block())
    builder.create_barrier()
    return next(line.strip() for line in str(module.str_nodebug()).splitlines() if "barrier" in line)


def _finished(ptx: str) -> str:
    """Return a kernel whose lines are right, and that says that its blocks are programs.

    LLVM counts on, line by line, in the text of inline assembly, as which Triton writes its loads and stores.
    """
    ptx = _INLINE.sub(lambda found: _of_one_line(found[0]), ptx)
    return re.sub(r"^\.reqntid", f'.pragma "{PROGRAMS}";\n.reqntid', ptx, count=1, flags=re.MULTILINE)


def _of_one_line(text: str) -> str:
    first = _LOC.search(text)
    return text if first is None else text[: first.end()] + _LOC.sub("", text[first.end() :])


class Driver(CudaDriver):  # type: ignore[misc]
    """Triton's driver for NVIDIA's GPUs, with the devices and streams of :mod:`cudatool`."""

    def __init__(self) -> None:
        # Not Triton's own, which asks PyTorch for devices and streams.
        with _libcuda_to_link():
            self.utils = CudaUtils()
        self.launcher_cls = _Launcher

    @staticmethod
    def is_active() -> bool:
        """Return True: Triton's table holds this driver only where the software device is in use."""
        return True

    def get_current_target(self) -> Any:
        """Return what kernels are compiled for."""
        return TARGET

    def get_current_device(self) -> int:
        """Return the number of the thread's current device."""
        return current_device()

    def set_current_device(self, device: int) -> None:
        """Make a device the thread's current one."""
        set_device(device)

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        """Return a device's compute capability."""
        return get_device_capability(device)

    def get_current_stream(self, device: int) -> int:
        """Return the handle of a device's current stream on this thread."""
        return current_stream(device).cuda_stream

    def get_device_interface(self) -> Any:
        """Return what has the events that Triton's benchmarks measure with: :mod:`cudatool`, as ``torch.cuda``."""
        return cudatool

    def get_active_torch_device(self) -> Any:
        """Return where PyTorch's tensors for kernels are: ``cpu``, with the current device's number."""
        torch = import_module("torch")
        if torch.version.cuda:
            raise DeviceUnavailableError(
                "this PyTorch is built for CUDA, and has no tensors on the software device; "
                "pass cudatool's arrays to kernels, or install PyTorch's build for processors"
            )
        _register_what_is_asked_for()
        return torch.device("cpu", current_device())

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return what times a kernel for Triton's autotuner, on the device's clock."""
        return _benchmark

    def get_empty_cache_for_benchmark(self) -> Any:
        """Return None: the software device's clock knows no cache that would have to be emptied."""
        return None

    def clear_cache(self, cache: Any) -> None:
        """Do nothing."""


@cache
def _folder_of_this_process() -> str:
    """Return a folder that goes when the process ends: Triton up to 3.5 remembers it for the launchers to come.

    Not a TemporaryDirectory: a forked child that ends would remove its parent's.
    """
    folder, maker = tempfile.mkdtemp(prefix="cudatool-"), os.getpid()

    def remove() -> None:
        if os.getpid() == maker:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


@contextmanager
def _libcuda_to_link() -> Iterator[None]:
    """Name a folder with the software device's libcuda to Triton, which links its launcher to it.

    The folder's path is a part of the name under which Triton keeps the launcher, so it has to stay the same.
    """
    folder = CodeCache("triton").folder() or _folder_of_this_process()
    library = path_of("cudatool.sim._libcuda")
    for name in ("libcuda.so.1", "libcuda.so"):  # the second for Triton up to 3.5
        link = os.path.join(folder, name)
        if not os.path.islink(link) or os.readlink(link) != library:
            made = f"{link}.{os.getpid()}"
            os.symlink(library, made)
            os.replace(made, link)
    before = os.environ.get("TRITON_LIBCUDA_PATH")
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_LIBCUDA_PATH"]
        else:
            os.environ["TRITON_LIBCUDA_PATH"] = before


class _Launcher(CudaLauncher):  # type: ignore[misc]
    def __init__(self, src: Any, metadata: Any) -> None:
        super().__init__(src, metadata)
        if "torch" in sys.modules:
            _register_what_is_asked_for()
        self._threads = metadata.num_warps * TARGET.warp_size

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        if _estimate.is_wanted:
            try:
                _estimate.ns += modeled_ns(function, x * y * z * self._threads)
                return
            except PtxError:
                pass  # the launch fails, and says why
        storages = _storages(rest) if "torch" in sys.modules else {}
        if not storages:
            super().__call__(x, y, z, stream, function, *rest)
        else:
            for storage in storages.values():
                _register(storage)
            super().__call__(x, y, z, stream, function, *rest)
            _wait(stream)
            if hooks.wants_accesses:
                for storage in storages.values():  # PyTorch has it back: from here on the host may use it
                    hooks.emit(Kind.HOST_ACCESS, address=storage.data_ptr(), size=storage.nbytes(), flags=_MAY_USE)


# ---- PyTorch's tensors in the host's memory ----

_registered: dict[int, tuple[int, Any]] = {}  # by address: the size, and a weak reference to the storage


def _storages(arguments: Iterable[Any]) -> dict[int, Any]:
    """Return the storages of the tensors in the host's memory among `arguments`, by address."""
    found: dict[int, Any] = {}
    tensor = sys.modules["torch"].Tensor
    for argument in arguments:
        if isinstance(argument, tensor):
            if argument.device.type == "cpu":
                storage = argument.untyped_storage()
                found[storage.data_ptr()] = storage
        elif isinstance(argument, tuple):
            found |= _storages(argument)
        elif isinstance(base := getattr(argument, "base", None), tensor):  # a tensor descriptor
            found |= _storages((base,))
    return found


def _wait(stream: int) -> None:
    check(
        calls.driver.cuStreamSynchronize(stream)
    )  # as the program's own call: recorded, it orders the host's accesses


def _register(storage: Any) -> None:
    address, size = storage.data_ptr(), storage.nbytes()
    known = _registered.get(address)
    if not size:
        return
    if known is not None and known[0] == size:
        if not known[1].expired():
            return
        if not hooks.active:  # a recording has it apart from the tensor whose memory this was
            _registered[address] = size, _reference(storage)
            return
    with operation():
        for start, (length, reference) in list(_registered.items()):
            if reference.expired() or (start < address + size and address < start + length):
                check(calls.driver.cuMemHostUnregister(start))
                del _registered[start]
        result = calls.driver.cuMemHostRegister(address, size, 0)
        if int(result[0]) == _ALREADY_REGISTERED:  # by the program
            return
        check(result)
    _registered[address] = size, _reference(storage)


def _reference(storage: Any) -> Any:
    return import_module("torch.multiprocessing.reductions").StorageWeakRef(storage)


def _register_what_is_asked_for() -> None:
    """Register the storages of tensors whose address is asked for: kernels may get it in a table of pointers."""
    tensor = sys.modules["torch"].Tensor
    ask = tensor.data_ptr
    if getattr(ask, "__module__", None) == __name__:
        return  # done before

    def data_ptr(self: Any) -> int:
        if self.device.type == "cpu":
            _register(self.untyped_storage())
        return int(ask(self))

    tensor.data_ptr = data_ptr


# ---- the autotuner ----


class _Estimate(threading.local):
    """How long the launches of this thread would take that are not made, if `is_wanted`."""

    is_wanted = False
    ns = 0


_estimate: Final = _Estimate()


def _benchmark(call: Callable[[], Any], *, quantiles: Sequence[float] | None = None, **_: Any) -> Any:
    """Return the milliseconds that `call` takes on the device's clock; as many times over as there are `quantiles`.

    The clock counts what a kernel's code does, so that it need not run, and not even be translated. A recording has the
    launches that there would be on a GPU: they are made then.
    """
    _estimate.is_wanted, _estimate.ns = True, 0
    try:
        call()
    finally:
        _estimate.is_wanted = False
    if hooks.active:
        call()
    took = _estimate.ns / 1e6
    return took if quantiles is None else [took] * len(quantiles)
