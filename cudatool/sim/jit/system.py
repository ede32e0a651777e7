"""The functions that CUDA's compiler expects of the system, and instructions that end a thread's launch.

Calls that are left when a kernel's own functions are inlined or merged (:mod:`cudatool.ptx.inline`) are these. They are
answered by C functions of the package (``cudatool/sim/_device.c``).
"""

from __future__ import annotations

from collections.abc import Callable

from cudatool.ptx import Address, Instruction, Operand, Symbol, call_parts
from cudatool.sim.jit.context import Context
from cudatool.sim.jit.emit import Emitter
from cudatool.sim.jit.heap_blocks import block_freed, block_taken, with_gap
from cudatool.sim.jit.races import cleared
from cudatool.sim.jit.table import lowers

__all__ = ["SYSTEM"]


def _argument(e: Emitter, operand: Operand, kind: str) -> str:
    """Return the value of type `kind` in the ``.param`` variable that a call names."""
    if not isinstance(operand, Symbol):
        raise e.unsupported("an argument that is not a .param variable")
    _, pointer = e.pointer("param", Address(operand))
    return e.op(f"load {kind}, ptr {pointer}, align 1")


def _result(e: Emitter, results: tuple[Operand, ...], value: str, kind: str) -> None:
    for operand in results:
        assert isinstance(operand, Symbol)
        _, pointer = e.pointer("param", Address(operand))
        e.emit(f"store {kind} {value}, ptr {pointer}, align 1")


def _vprintf(e: Emitter, results: tuple[Operand, ...], arguments: tuple[Operand, ...]) -> None:
    """CUDA C++ Programming Guide, "Formatted Output"."""
    given = [f"i64 {_argument(e, argument, 'i64')}" for argument in arguments[:2]]
    _result(e, results, e.call("i32", "cudatool_vprintf", *given), "i32")


def _malloc(e: Emitter, results: tuple[Operand, ...], arguments: tuple[Operand, ...]) -> None:
    """CUDA C++ Programming Guide, "Dynamic Global Memory Allocation and Operations"."""
    size = _argument(e, arguments[0], "i64")
    block = e.call("i64", "cudatool_malloc", f"i64 {e.field('heap')}", f"i64 {with_gap(e, size)}")
    block_taken(e, block, size)
    cleared(e, block, size)
    _result(e, results, block, "i64")


def _free(e: Emitter, results: tuple[Operand, ...], arguments: tuple[Operand, ...]) -> None:
    """Undefined for what is no block in use: the launch fails, as it does on GPUs."""
    block = _argument(e, arguments[0], "i64")
    block_freed(e, block)
    freed = e.call("i32", "cudatool_free", f"i64 {e.field('heap')}", f"i64 {block}")
    with e.when(e.op(f"icmp eq i32 {freed}, 0")):
        e.stop("BAD_FREE")


def _assert(e: Emitter, results: tuple[Operand, ...], arguments: tuple[Operand, ...]) -> None:
    """CUDA C++ Programming Guide, "Assertion"."""
    kinds = ("i64", "i64", "i32", "i64")  # message, file, line, function; a character size follows
    given = [f"{kind} {_argument(e, operand, kind)}" for operand, kind in zip(arguments, kinds, strict=False)]
    where = [f"i32 {name}" for name in ("%bx", "%by", "%bz", "%tx", "%ty", "%tz")]
    e.declarations.add("declare void @cudatool_assert(ptr, i64, i64, i32, i64, i32, i32, i32, i32, i32, i32)")
    first = e.op(f"getelementptr i8, ptr %context, i64 {Context.message.offset}")
    e.emit(f"call void @cudatool_assert(ptr {first}, {', '.join((*given, *where))})")
    e.stop("ASSERT")


def _set_conditional(e: Emitter, results: tuple[Operand, ...], arguments: tuple[Operand, ...]) -> None:
    """CUDA device runtime API, cudaGraphSetConditional. The handle is the address of the value."""
    handle = e.op(f"inttoptr i64 {_argument(e, arguments[0], 'i64')} to ptr")
    e.emit(f"store volatile i32 {_argument(e, arguments[1], 'i32')}, ptr {handle}, align 4")


_Call = Callable[[Emitter, tuple[Operand, ...], tuple[Operand, ...]], None]

SYSTEM: dict[str, _Call] = {
    "vprintf": _vprintf,
    "malloc": _malloc,
    "free": _free,
    "__assertfail": _assert,
    "cudaGraphSetConditional": _set_conditional,
}


@lowers("call")
def _call(e: Emitter, i: Instruction) -> None:
    results, target, arguments = call_parts(i)
    name = getattr(target, "name", "")
    if name not in SYSTEM:
        raise e.unsupported(name)
    SYSTEM[name](e, results, arguments)


@lowers("trap")
def _trap(e: Emitter, i: Instruction) -> None:
    e.stop("TRAP")


@lowers("overflow")
def _overflow(e: Emitter, i: Instruction) -> None:
    e.stop("STACK_OVERFLOW")


@lowers("brkpt")
def _breakpoint(e: Emitter, i: Instruction) -> None:
    """Nothing to stop for without a debugger."""


@lowers("progress")
def _progress(e: Emitter, i: Instruction) -> None:
    pointer = e.op(f"getelementptr i8, ptr %context, i64 {Context.progress.offset}")
    count = e.op(f"load i64, ptr {pointer}")
    e.emit(f"store i64 {e.op(f'add i64 {count}, 1')}, ptr {pointer}")
