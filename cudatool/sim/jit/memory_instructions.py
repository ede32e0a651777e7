"""Loads, stores, atomics and fences."""

from __future__ import annotations

from cudatool.ptx import Instruction, Operand, elements, space_of, type_bytes
from cudatool.ptx.effects import has_result, is_read_only
from cudatool.ptx.isa import STRONG
from cudatool.sim.jit import races
from cudatool.sim.jit.arithmetic import canonical, extreme
from cudatool.sim.jit.emit import ATOMIC, READ, WRITE, Emitter, llvm_type
from cudatool.sim.jit.instrument import Flag
from cudatool.sim.jit.races import ClusterBarrier
from cudatool.sim.jit.table import lowers, types_of

__all__: list[str] = []

_ORDERS = frozenset({"acquire", "release", "acq_rel"})


def _memory_type(t: str) -> str:
    """Return the type in which memory is accessed: floats only where LLVM computes with that very format."""
    return t if t in ("f32", "f64") or t[0] in "us" else f"b{8 * type_bytes(t)}"


def _flags(i: Instruction, strong: bool) -> Flag:
    if not strong:
        return Flag.NONE
    flags = Flag.STRONG | Flag.WIDE if races.is_wide(i) else Flag.STRONG
    return flags | Flag.VOLATILE if "volatile" in i.modifiers else flags


@lowers("ld ldu")
def _load(e: Emitter, i: Instruction) -> None:
    t = _memory_type(types_of(i)[-1])
    kind, size = llvm_type(t), type_bytes(t)
    targets = elements(i.operands[0])
    space, pointer = e.pointer(space_of(i), i.operands[1])
    strong = "volatile " if STRONG.intersection(i.modifiers) and space != "local" else ""
    flags = Flag.READ_ONLY if is_read_only(i) else _flags(i, bool(strong))
    if i.line in e.guesses:
        flags |= Flag.GUESS | Flag.STRONG | Flag.WIDE
    pointer = e.guarded(space, pointer, size * len(targets), READ, i, flags=flags)
    for index, target in enumerate(targets):
        at = e.op(f"getelementptr i8, ptr {pointer}, i64 {size * index}") if index else pointer
        if space == "entry":
            value = e.op(f"load {kind}, ptr {at}, align 1, !invariant.load !0")
        else:
            value = e.op(f"load {strong}{kind}, ptr {at}, align {min(size, 8)}{'' if strong else e.group(space)}")
            if size < 4 and not strong:
                # LLVM makes one load of two narrow ones side by side, of which it forgets that threads may take turns.
                value = e.op(f"freeze {kind} {value}")
        e.set(target, value, t)
    if "acquire" in i.modifiers:
        e.emit("fence acquire")  # volatile alone orders volatile accesses only
    if strong:
        races.strong(e, i, pointer, READ)


@lowers("st")
def _store(e: Emitter, i: Instruction) -> None:
    t = _memory_type(types_of(i)[-1])
    kind, size = llvm_type(t), type_bytes(t)
    sources = elements(i.operands[1])
    space, pointer = e.pointer(space_of(i), i.operands[0])
    strong = "volatile " if STRONG.intersection(i.modifiers) and space != "local" else ""
    pointer = e.guarded(space, pointer, size * len(sources), WRITE, i, flags=_flags(i, bool(strong)))
    if "release" in i.modifiers:
        e.emit("fence release")
    for index, source in enumerate(sources):
        value = e.get(source, t)
        at = e.op(f"getelementptr i8, ptr {pointer}, i64 {size * index}") if index else pointer
        group = "" if strong else e.group(space)
        e.emit(f"store {strong}{kind} {value}, ptr {at}, align {min(size, 8)}{group}")
    if strong:
        races.strong(e, i, pointer, WRITE)


# PTX operation -> atomicrmw operation by class of type.
_RMW = {
    "add": {"u": "add", "s": "add", "f": "fadd", "b": "add"},
    "min": {"u": "umin", "s": "min", "f": "fmin"},
    "max": {"u": "umax", "s": "max", "f": "fmax"},
    "and": {"b": "and", "u": "and", "s": "and"},
    "or": {"b": "or", "u": "or", "s": "or"},
    "xor": {"b": "xor", "u": "xor", "s": "xor"},
    "exch": {"b": "xchg", "u": "xchg", "s": "xchg", "f": "xchg"},
    "inc": {"u": "uinc_wrap"},
    "dec": {"u": "udec_wrap"},
}
# The same for shared memory, which one host thread owns while it runs a block: plain loads and stores are atomic there.
_PLAIN = {
    "add": "add {k} {a}, {b}",
    "fadd": "fadd {k} {a}, {b}",
    "umin": "call {k} @llvm.umin.{k}({k} {a}, {k} {b})",
    "umax": "call {k} @llvm.umax.{k}({k} {a}, {k} {b})",
    "min": "call {k} @llvm.smin.{k}({k} {a}, {k} {b})",
    "max": "call {k} @llvm.smax.{k}({k} {a}, {k} {b})",
    "and": "and {k} {a}, {b}",
    "or": "or {k} {a}, {b}",
    "xor": "xor {k} {a}, {b}",
}


@lowers("atom red")
def _atomic(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    operands = list(i.operands)
    target = operands.pop(0) if has_result(i) else None
    space, pointer = e.pointer(space_of(i), operands[0])
    size = type_bytes(t)
    operation = next((m for m in i.modifiers if m in _RMW or m == "cas"), "")
    order = next((m for m in i.modifiers if m in _ORDERS), "monotonic")
    sources = elements(operands[1])
    pointer = e.guarded(space, pointer, size * len(sources), ATOMIC, i, flags=_flags(i, strong=True))
    wrote = "true"
    if operation == "cas":
        kind = f"i{8 * size}"
        expected, new = (e.get(operand, f"b{8 * size}") for operand in operands[1:3])
        pair = e.op(f"cmpxchg ptr {pointer}, {kind} {expected}, {kind} {new} seq_cst seq_cst, align {size}")
        olds, t = [e.op(f"extractvalue {{ {kind}, i1 }} {pair}, 0")], f"b{8 * size}"
        wrote = e.op(f"extractvalue {{ {kind}, i1 }} {pair}, 1")
    else:  # each element of a vector is updated atomically, not the vector
        olds = [_update(e, t, operation, order, space, pointer, index, source) for index, source in enumerate(sources)]
        t = f"b{8 * size}" if t in _NARROW else t
    races.strong(e, i, pointer, ATOMIC, wrote=wrote, blind=target is None)
    if target is not None:
        for register, old in zip(elements(target), olds, strict=True):
            e.set(register, old, t)


_NARROW = frozenset({"f16", "bf16", "f16x2", "bf16x2"})


def _update(
    e: Emitter, t: str, operation: str, order: str, space: str, pointer: str, index: int, source: Operand
) -> str:
    """Update one element atomically; return what it was."""
    size = type_bytes(t)
    at = e.op(f"getelementptr i8, ptr {pointer}, i64 {size * index}") if index else pointer
    value = e.get(source, t)
    if t in _NARROW:
        return _update_narrow(e, t, operation, space, at, value)
    name = _RMW.get(operation, {}).get("f" if t in ("f32", "f64") else t[0])
    if name is None:
        raise e.unsupported()
    kind = llvm_type(t)
    if space == "shared" and name in _PLAIN:
        old = e.op(f"load {kind}, ptr {at}, align {size}")
        new = e.op(_PLAIN[name].format(k=kind, a=old, b=value))
        e.emit(f"store {kind} {new}, ptr {at}, align {size}")
        return old
    return e.op(f"atomicrmw {name} ptr {at}, {kind} {value} {order}, align {size}")


def _update_narrow(e: Emitter, t: str, operation: str, space: str, pointer: str, value: str) -> str:
    """The same for 16-bit floats, which hosts do not update: compare and swap until no other thread came between."""
    size, kind = type_bytes(t), llvm_type(t)
    bits = f"i{8 * size}"

    def changed(old: str) -> str:
        now = e.from_bits(old, t)
        if operation == "add":
            result = e.op(f"fadd {kind} {now}, {value}")
        elif operation in ("min", "max"):
            result = extreme(e, operation, kind, now, value)
        else:
            raise e.unsupported()
        return e.to_bits(canonical(e, result, kind) if "half" in kind else result, t)

    first = e.op(f"load {bits}, ptr {pointer}, align {size}")
    if space == "shared":
        e.emit(f"store {bits} {changed(first)}, ptr {pointer}, align {size}")
        return first
    before, again, done = (e.new_label() for _ in range(3))
    e.emit(f"br label %{before}")
    e.label(before)
    e.emit(f"br label %{again}")
    e.label(again)
    old, seen = e.name(), e.name()
    e.emit(f"{old} = phi {bits} [ {first}, %{before} ], [ {seen}, %{again} ]")
    pair = e.op(f"cmpxchg ptr {pointer}, {bits} {old}, {bits} {changed(old)} seq_cst seq_cst, align {size}")
    e.emit(f"{seen} = extractvalue {{ {bits}, i1 }} {pair}, 0")
    e.emit(f"br i1 {e.op(f'extractvalue {{ {bits}, i1 }} {pair}, 1')}, label %{done}, label %{again}")
    e.label(done)
    return old


@lowers("membar fence")
def _fence(e: Emitter, i: Instruction) -> None:
    e.emit("fence seq_cst")
    races.fence(e, i)


@lowers("barrier")
def _cluster_arrive(e: Emitter, i: Instruction) -> None:
    """Clusters are of one block: the barrier is where threads wait (:mod:`.collective`), not where they arrive."""
    if i.modifiers[:2] != ("cluster", "arrive"):
        raise e.unsupported()
    races.cluster(e, ClusterBarrier.ARRIVE_RELAXED if "relaxed" in i.modifiers else ClusterBarrier.ARRIVE)


@lowers("createpolicy")
def _policy(e: Emitter, i: Instruction) -> None:
    """A cache policy is opaque, and there is no cache."""
    e.set(i.operands[0], "0", "b64")


@lowers("prefetch prefetchu applypriority discard griddepcontrol pmevent setmaxnreg nanosleep")
def _hint(e: Emitter, i: Instruction) -> None:
    """Hints: nothing to do."""
