"""The parts of recording that only a GPU needs; imported only for one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from cudatool import _driver
from cudatool.collect import cupy_living, torch_generated, torch_living, torch_program
from cudatool.collect.cupti import CuptiCollector, CuptiUnavailable
from cudatool.collect.cupy_pool import CupyPool
from cudatool.collect.gpu_launches import Launches
from cudatool.collect.jax_memory import JaxMemory
from cudatool.collect.kept_ptx import KeptPtx
from cudatool.collect.levels import Level
from cudatool.collect.nvtx_ranges import RangeLog
from cudatool.collect.torch_blocks import TorchBlocks
from cudatool.recording.before import Before
from cudatool.trace.events import SEGMENT_GAINS, Event

__all__ = ["drain", "driver", "facts_at_the_end", "flush", "living", "paused", "range_log"]

_cupti: CuptiCollector | None = None  # records other libraries' use of the driver
_blocks: TorchBlocks | None = None  # what lets it have the blocks of PyTorch's allocator


@contextmanager
def driver(measure_accesses: bool, level: Level) -> Iterator[dict[str, Any]]:
    """Pass what libraries do on the GPU to the subscribers of the hooks; yield what the header says of it."""
    try:
        if measure_accesses:
            with _launches_of_libraries() as facts:
                yield facts
        else:
            with _driver_calls(level) as facts:
                yield facts
    finally:
        torch_generated.stop()
        torch_program.stop()


@contextmanager
def _driver_calls(level: Level) -> Iterator[dict[str, Any]]:
    """Pass any library's calls of a GPU's driver to the subscribers of the hooks; yield what the header says of it.

    Where CUPTI does not record kernels, PyTorch's operators are recorded.
    """
    global _cupti, _blocks

    # CUPTI (13.0) ends the process with SIGSEGV when a graph is launched that was instantiated before graphs were
    # recorded as a whole. Node by node it does not.
    graphs_may_exist = _driver.nvidia_has_started()
    facts: dict[str, Any] = {"driver_ran_before": True} if graphs_may_exist else {}
    if level is Level.KERNELS and graphs_may_exist:
        level = Level.GRAPH_NODES
    torch_generated.start()
    jax = JaxMemory()

    def sample(last: bool) -> None:
        jax.sample(last=last)
        if _blocks is not None:
            _blocks.sample()

    try:
        _cupti = CuptiCollector(
            torch_program.is_watching,
            level,
            _sees_blocks,
            sample=sample,
            graphs_may_exist=graphs_may_exist,
        )
    except CuptiUnavailable as error:
        torch_program.start()
        yield facts | {"cupti_error": str(error)}
        return
    facts |= {"cupti_version": _cupti.version, "kernels_told_late": True, "level": str(level)}
    if _cupti.activity_error:
        facts["cupti_error"] = _cupti.activity_error
        torch_program.start()
    else:
        _blocks = TorchBlocks(_cupti.pass_on)
    cupy = CupyPool()
    try:
        yield facts
    finally:
        cupy.stop()
        if _blocks is not None:
            _blocks.stop()
        _cupti.stop()
        _cupti = _blocks = None


@contextmanager
def _launches_of_libraries() -> Iterator[dict[str, Any]]:
    """Pass what orders the work of any library, and what it may access, to the subscribers of the hooks.

    PyTorch's and our runtime's work is reported by sources of their own. The value is what the header says of it.
    """
    global _cupti

    kept = KeptPtx()
    try:
        _cupti = CuptiCollector(
            torch_program.is_watching,
            Level.MEMORY,
            launches=Launches(kept.find),
            pytorch_passes_on=torch_program.is_passing_on,
        )
    except CuptiUnavailable as error:
        torch_program.start()
        yield {"cupti_error": str(error)}
        return
    torch_program.start(beside_others=True)  # after the other one: of two sources the last one is asked first
    kept.start()
    cupy = CupyPool()
    try:
        yield {"cupti_version": _cupti.version}
    finally:
        cupy.stop()
        kept.stop()
        _cupti.stop()
        _cupti = None


def _sees_blocks() -> bool:
    return _blocks is not None and _blocks.is_watching


def flush() -> None:
    """Pass on what was logged: PyTorch's and the driver's part."""
    torch_program.flush()
    if _blocks is not None:
        _blocks.name_tensors()
    if _cupti is not None:
        _cupti.flush()


def range_log() -> RangeLog | None:
    """Return what reads the ranges of NVTX, None if the collector of CUPTI does."""
    return RangeLog() if _cupti is None else None


def drain() -> None:
    """Do nothing: the GPU runs what is pending by itself."""


def facts_at_the_end() -> dict[str, Any]:
    """Return what a trace's header says that only the end of a recording shows."""
    return {"watches_launches": True} if _cupti is not None and _cupti.watches_launches else {}


def paused() -> AbstractContextManager[None]:
    """Return a context in which what other threads take and give back is passed on only afterwards."""
    return nullcontext() if _cupti is None else _cupti.paused()


def living(held: Iterable[Event]) -> Before:
    """Return what PyTorch and CuPy hold. What records the driver's calls must be paused.

    Parameters
    ----------
    held
        Segments of our allocator, among other events.
    """
    found = Before(notes=torch_generated.living())
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_initialized():
        if _cupti is not None and _sees_blocks():
            found.blocks, found.unknown = torch_living.living(torch, _cupti.pass_on_snapshot)
        else:
            found.unknown = torch_living.missing(torch)
    if cupy is not None:
        devices = _driver.nvidia_devices_in_use()
        if _cupti is not None:
            known = [(event.address, event.size) for event in (*held, *found.blocks) if event.kind in SEGMENT_GAINS]
            found.allocations = cupy_living.living(cupy, _driver.nvidia_address_range, known)
            _cupti.note_living(found.allocations)
        found.unknown += cupy_living.missing(cupy, devices, found.allocations)
    return found
