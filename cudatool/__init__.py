"""Profiling and memory diagnostics for CUDA programs in Python, with and without a GPU.

``import cudatool`` is shaped like ``torch.cuda``: devices, streams, events, a caching allocator and its statistics;
and adds arrays, kernels from CUDA C++ and :func:`matmul`. Nothing is loaded before it is used.

PYTEST_DONT_REWRITE: pytest warns of plugins' packages that were imported before it, as ``cudatool run -m pytest`` does.
"""

from __future__ import annotations

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

from cudatool.loading import attached as _attached
from cudatool.loading.whole_imports import whole_imports as _whole_imports
from cudatool.runtime.public_modules import PUBLIC_MODULES as _PUBLIC_MODULES

if TYPE_CHECKING:
    from cuda.core import LaunchConfig, ProgramOptions

    from cudatool.backends._precision import (
        are_deterministic_algorithms_enabled,
        get_float32_matmul_precision,
        is_deterministic_algorithms_warn_only_enabled,
        set_float32_matmul_precision,
        use_deterministic_algorithms,
    )
    from cudatool.blas import matmul
    from cudatool.errors import CompileError, CudaError, CudatoolError, OutOfMemoryError, SynchronizationError
    from cudatool.graphs import CUDAGraph, graph, is_current_stream_capturing, make_graphed_callables
    from cudatool.memory.driver_provider import free_mutex
    from cudatool.memory.pluggable import CUDAPluggableAllocator
    from cudatool.random import (
        get_rng_state,
        get_rng_state_all,
        initial_seed,
        manual_seed,
        manual_seed_all,
        seed,
        seed_all,
        set_rng_state,
        set_rng_state_all,
    )
    from cudatool.recording import record
    from cudatool.recording.armed import arm, trigger
    from cudatool.recording.serving import serve
    from cudatool.runtime.allocator import (
        caching_allocator_alloc,
        caching_allocator_delete,
        caching_allocator_disabled,
        caching_allocator_enable,
        change_current_allocator,
        get_allocator_backend,
        mem_get_info,
    )
    from cudatool.runtime.annotate import annotate
    from cudatool.runtime.array import DeviceArray, asarray, empty, from_dlpack, full, ones, zeros
    from cudatool.runtime.cudart import check_error, cudart, cudaStatus
    from cudatool.runtime.device import (
        can_device_access_peer,
        current_device,
        device,
        device_count,
        device_of,
        get_arch_list,
        get_device_capability,
        get_device_name,
        get_device_properties,
        get_gencode_flags,
        init,
        is_available,
        is_bf16_supported,
        is_initialized,
        is_tf32_supported,
        set_device,
        synchronize,
    )
    from cudatool.runtime.dtypes import (
        bfloat16,
        can_cast,
        float8_e4m3fn,
        float8_e5m2,
        promote_types,
        result_type,
    )
    from cudatool.runtime.event import Event
    from cudatool.runtime.host_view import HostArray, host_view
    from cudatool.runtime.ipc import IpcArray, IpcHandle, ipc_handle, open_ipc_handle
    from cudatool.runtime.ipc_loans import ipc_collect
    from cudatool.runtime.kernel import Kernel, compile, launch
    from cudatool.runtime.memory_statistics import (
        empty_cache,
        get_per_process_memory_fraction,
        list_gpu_processes,
        max_memory_allocated,
        max_memory_cached,
        max_memory_reserved,
        memory_allocated,
        memory_cached,
        memory_reserved,
        memory_snapshot,
        memory_stats,
        memory_stats_as_nested_dict,
        memory_summary,
        reset_accumulated_memory_stats,
        reset_max_memory_allocated,
        reset_max_memory_cached,
        reset_peak_memory_stats,
        set_per_process_memory_fraction,
    )
    from cudatool.runtime.mempool import MemPool, graph_pool_handle, use_mem_pool
    from cudatool.runtime.nvml import clock_rate, device_memory_used, memory_usage, power_draw, temperature, utilization
    from cudatool.runtime.peer import enable_peer_access
    from cudatool.runtime.pinned import (
        empty_host_cache,
        empty_pinned,
        host_memory_stats,
        host_memory_stats_as_nested_dict,
        host_register,
        is_pinned,
        pin_memory,
        reset_accumulated_host_memory_stats,
        reset_peak_host_memory_stats,
    )
    from cudatool.runtime.ranges import range
    from cudatool.runtime.stream import (
        ExternalStream,
        Stream,
        StreamContext,
        current_stream,
        default_stream,
        get_stream_from_external,
        set_stream,
        stream,
    )
    from cudatool.runtime.sync_debug import get_sync_debug_mode, set_sync_debug_mode

__version__ = "0.1.0"

__all__ = [
    # devices
    "can_device_access_peer",
    "current_device",
    "device",
    "device_count",
    "device_of",
    "get_arch_list",
    "enable_peer_access",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_gencode_flags",
    "init",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "is_tf32_supported",
    "set_device",
    "synchronize",
    # what their sensors say
    "clock_rate",
    "device_memory_used",
    "memory_usage",
    "power_draw",
    "temperature",
    "utilization",
    # the CUDA runtime API
    "check_error",
    "cudaStatus",
    "cudart",
    # hidden synchronizations
    "get_sync_debug_mode",
    "set_sync_debug_mode",
    # streams and events
    "Event",
    "ExternalStream",
    "Stream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "get_stream_from_external",
    "set_stream",
    "stream",
    # memory
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "caching_allocator_disabled",
    "caching_allocator_enable",
    "change_current_allocator",
    "CUDAPluggableAllocator",
    "empty_cache",
    "free_mutex",
    "get_allocator_backend",
    "get_per_process_memory_fraction",
    "graph_pool_handle",
    "list_gpu_processes",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "MemPool",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
    "use_mem_pool",
    # graphs
    "CUDAGraph",
    "graph",
    "is_current_stream_capturing",
    "make_graphed_callables",
    # pinned memory
    "empty_host_cache",
    "empty_pinned",
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "host_register",
    "is_pinned",
    "pin_memory",
    "reset_accumulated_host_memory_stats",
    "reset_peak_host_memory_stats",
    # random numbers
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
    # arrays
    "DeviceArray",
    "asarray",
    "empty",
    "from_dlpack",
    "full",
    "matmul",
    "ones",
    "zeros",
    # number types
    "bfloat16",
    "can_cast",
    "float8_e4m3fn",
    "float8_e5m2",
    "promote_types",
    "result_type",
    # precision
    "are_deterministic_algorithms_enabled",
    "get_float32_matmul_precision",
    "is_deterministic_algorithms_warn_only_enabled",
    "set_float32_matmul_precision",
    "use_deterministic_algorithms",
    # arrays of other processes
    "IpcArray",
    "IpcHandle",
    "ipc_collect",
    "ipc_handle",
    "open_ipc_handle",
    # kernels
    "Kernel",
    "LaunchConfig",
    "ProgramOptions",
    "compile",
    "launch",
    # notebooks
    # traces
    "annotate",
    "arm",
    "HostArray",
    "host_view",
    "range",
    "record",
    "serve",
    "trigger",
    # errors
    "CompileError",
    "CudaError",
    "CudatoolError",
    "OutOfMemoryError",
    "SynchronizationError",
]

# Where the names live, what loads least first.
_HOMES = (
    "errors",
    "runtime.ranges",
    "runtime.sync_debug",
    "runtime.device",
    "runtime.event",
    "runtime.stream",
    "runtime.allocator",
    "runtime.memory_statistics",
    "runtime.cudart",
    "runtime.nvml",
    "runtime.mempool",
    "runtime.pinned",
    "memory.pluggable",
    "memory.driver_provider",
    "runtime.kernel",
    "runtime.dtypes",
    "runtime.array",
    "runtime.peer",
    "runtime.annotate",
    "runtime.host_view",
    "runtime.ipc",
    "runtime.ipc_loans",
    "backends._precision",
    "blas",
    "graphs",
    "random",
    "recording",
    "recording.armed",
    "recording.serving",
)
_CUDA_CORE = ("LaunchConfig", "ProgramOptions")

# What a room uses of one above it, and why it cannot be the other way round.
_attached.HOMES.update(
    # `a + b` is looked up in the class of arrays; operations are made of arrays.
    ArrayMethods="cudatool.array_methods.ArrayMethods",
    # A copy between arrays with gaps is a kernel as other operations are; runtime.transfer chooses it.
    copy="cudatool.ops._copy.copy",
    # IPython looks for `%load_ext cudatool` in the package itself, which loads nothing.
    load_notebook="cudatool.notebook.load",
    # Python starts each child process through `processes`, which may import next to nothing.
    record_child="cudatool.recording.children.begin",
    # A program imports Triton, not this; the driver is what learns of it.
    serve_triton="cudatool.triton_driver.install",
    # The environment may ask for it in a program that never imports cudatool.tunable.
    tune_products="cudatool.tunable._context.install",
)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):  # a private module is being imported: load nothing else
        raise AttributeError(f"module 'cudatool' has no attribute {name!r}")
    if name == "load_ipython_extension":  # IPython's name for it, which is no part of the runtime
        return _load_ipython_extension
    if f"cudatool.{name}" in _PUBLIC_MODULES:
        with _whole_imports():
            return import_module(f"cudatool.{name}")
    if name not in __all__:  # as when one of our own rooms is being imported
        raise AttributeError(f"module 'cudatool' has no attribute {name!r}")
    with _whole_imports():
        # When a name is first used: `import cudatool` loads next to nothing.
        from cudatool.runtime.traced_calls import is_traced, traced

    if name in _CUDA_CORE:
        from cudatool.runtime import calls  # when a name is first used: `import cudatool` loads next to nothing

        found = getattr(calls.core, name)
    else:
        with _whole_imports():
            modules = (import_module(f"cudatool.{home}") for home in _HOMES)
            found = next(getattr(module, name) for module in modules if name in module.__all__)
        if isinstance(found, FunctionType) and not is_traced(found):
            found = traced(found)
    globals()[name] = found
    return found


def _load_ipython_extension(shell: Any) -> None:
    """Give an IPython shell ``%%cudatool run|snapshot|sanitize``; ``%load_ext cudatool`` calls it."""
    _attached.attached("load_notebook")(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
