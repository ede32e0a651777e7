"""Why a launch ended early, in words: where in the CUDA source, which thread, and what the others wait for."""

from __future__ import annotations

from cudatool.ptx import Function, Instruction
from cudatool.ptx.kernel_names import kernel_name
from cudatool.sim.jit.collective import Kind, suspension_of
from cudatool.sim.jit.context import Stop
from cudatool.sim.jit.kernel_text import KernelText
from cudatool.sim.jit.launch import (
    KernelAssert,
    KernelBadFree,
    KernelDeadlock,
    KernelError,
    KernelStackOverflow,
    KernelTimeout,
    KernelTrap,
    Stopped,
    Wait,
    take_message,
)
from cudatool.source_text import SourceLine

__all__ = ["explain"]


def explain(stopped: Stopped, text: KernelText, code: Function) -> KernelError:
    """Return the error that says why a launch of a kernel ended early; `code` is what was translated for it."""
    context, reason = stopped.context, stopped.reason
    kernel = kernel_name(text.name)
    if reason == Stop.ASSERT:
        return _of_all(KernelAssert, kernel, take_message(context))
    if reason in (Stop.DEADLOCK, Stop.STALLED):
        waiting = "; ".join(_who_waits(block, waits, text, code) for block, waits in stopped.waiting)
        return _of_all(KernelDeadlock, kernel, f"no thread can go on: {waiting}")
    if reason == Stop.TIMEOUT:
        block, waits = stopped.waiting[0]
        place = f"; {_who_waits(block, waits, text, code)}" if context.parked and waits else f" in block {block}"
        return _of_all(KernelTimeout, kernel, f"ended after the time that sim:timeout allows{place}")
    at = context.at_x, context.at_y, context.at_z
    who = f"{kernel}: block {at}, thread {context.at_thread}"
    source = text.source_of(context.site)
    error: KernelError
    if reason == Stop.STACK_OVERFLOW:
        what = f"calls need more than the {context.stack_bytes} bytes of CU_LIMIT_STACK_SIZE"
        error = KernelStackOverflow(f"{who}: {what}, at {source}")
    elif reason == Stop.BAD_FREE:
        what = "free of an address that is not a live block of the device's heap"
        error = KernelBadFree(f"{who}: {what}, at {source}")
    else:
        what = "trap"
        error = KernelTrap(f"{who}: {what} at {source}")
    error.what, error.block, error.thread, error.line = what, at, context.at_thread, context.site
    return error


def _of_all(kind: type[KernelError], kernel: str, what: str) -> KernelError:
    """Return the error of a launch that no single thread ended, or of which `what` says who did."""
    error = kind(f"{kernel}: {what}")
    error.what = what
    return error


def _who_waits(block: tuple[int, int, int], waits: list[Wait], text: KernelText, code: Function) -> str:
    """Return where the threads of a block wait."""
    suspensions = [i for i in code.instructions if suspension_of(i) is not None]
    places: dict[str, list[int]] = {}
    for wait in waits:
        at = suspensions[wait.suspension - 1]
        places.setdefault(_what_waits(at, wait, text), []).append(wait.thread)
    said = ", ".join(f"{_thread_ranges(threads)} {place}" for place, threads in places.items())
    return f"block {block}: {said}"


def _what_waits(at: Instruction, wait: Wait, text: KernelText) -> str:
    row = suspension_of(at)
    assert row is not None
    place = text.where(at) or SourceLine("", at.line)
    if row.kind == Kind.YIELD:
        return f"in a loop that waits for memory to change ({place})"
    what = ""
    if row.kind == Kind.WARP:
        what = f", mask {wait.mask:#010x}"
    elif row.kind in (Kind.BARRIER, Kind.BARRIER_REDUCE):
        what = f", barrier {wait.number}" + (f", {wait.count} threads" if wait.count else "")
    return f"at {at.name}{what} ({place})"


def _thread_ranges(threads: list[int]) -> str:
    """Return ``"threads 0-3, 7"`` in words: the first few runs of numbers."""
    runs: list[list[int]] = []
    for thread in threads:
        if runs and thread == runs[-1][1] + 1:
            runs[-1][1] = thread
        else:
            runs.append([thread, thread])
    said = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:4])
    more = f" and {len(runs) - 4} more ranges" if len(runs) > 4 else ""
    return f"thread{'s' if len(threads) > 1 else ''} {said}{more}"
