"""Video instructions and dot products of bytes. Semantics: PTX ISA, 9.7.1 (``dp4a``, ``dp2a``), 9.7.16 and 9.7.17.

A scalar video instruction works on a byte, a half or a word of each source, in more bits than 32, and then clamps,
merges into or accumulates onto a third source. A packed one does so for two halves or four bytes at once.
"""

from __future__ import annotations

from cudatool.ptx import Instruction, Operand, Register
from cudatool.sim.jit.arithmetic import intrinsic
from cudatool.sim.jit.emit import Emitter
from cudatool.sim.jit.table import lowers, types_of

__all__: list[str] = []

_WIDE = "i128"  # what intermediate results are kept in: a product, a sum and a sign fit
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")


def _part(e: Emitter, word: str, signed: bool, bits: int, position: int, to: str) -> str:
    """Return `bits` of a 32-bit word from bit `position` on, extended."""
    raised = e.op(f"shl i32 {word}, {32 - bits - position}")
    return e.convert(e.op(f"{'ashr' if signed else 'lshr'} i32 {raised}, {32 - bits}"), "i32", to, signed=signed)


def _selected(e: Emitter, operand: Operand, type_name: str) -> str:
    """Return a source of a scalar video instruction in :data:`_WIDE`."""
    selector = operand.selector if isinstance(operand, Register) else ""
    bits = {"b": 8, "h": 16}.get(selector[:1], 32)
    return _part(e, e.get(operand, "b32"), type_name[0] == "s", bits, bits * int(selector[1:] or 0), _WIDE)


def _clamp(e: Emitter, value: str, kind: str, signed: bool, bits: int) -> str:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return intrinsic(e, "smin", kind, intrinsic(e, "smax", kind, value, str(low)), str(high))


def _compare(e: Emitter, i: Instruction, kind: str, a: str, b: str) -> str:
    how = next(modifier for modifier in i.modifiers if modifier in _COMPARE)
    if how not in ("eq", "ne"):
        how = f"s{how}"
    return e.op(f"zext i1 {e.op(f'icmp {how} {kind} {a}, {b}')} to {kind}")


def _operation(e: Emitter, name: str, i: Instruction, kind: str, a: str, b: str) -> str:
    """Return what ``v<name>`` makes of two extended sources."""
    if name in ("add", "sub"):
        return e.op(f"{name} {kind} {a}, {b}")
    if name in ("min", "max"):
        return intrinsic(e, f"s{name}", kind, a, b)
    if name == "absdiff":
        high, low = (intrinsic(e, which, kind, a, b) for which in ("smax", "smin"))
        return e.op(f"sub {kind} {high}, {low}")
    if name == "avrg":  # halves are rounded away from zero
        total = e.op(f"add {kind} {a}, {b}")
        positive = e.op(f"zext i1 {e.op(f'icmp sge {kind} {total}, 0')} to {kind}")
        return e.op(f"ashr {kind} {e.op(f'add {kind} {total}, {positive}')}, 1")
    if name == "set":
        return _compare(e, i, kind, a, b)
    count = e.op(f"and {kind} {b}, 31") if "wrap" in i.modifiers else intrinsic(e, "umin", kind, b, "32")
    return e.op(f"{'shl' if name == 'shl' else 'ashr'} {kind} {a}, {count}")


@lowers("vadd vsub vabsdiff vmin vmax vset vshl vshr")
def _scalar(e: Emitter, i: Instruction) -> None:
    types = types_of(i)
    if i.opcode == "vset":
        types = ["u32", *types]
    result_type, *sources = types
    a, b = (_selected(e, operand, t) for operand, t in zip(i.operands[1:3], sources, strict=True))
    value = _operation(e, i.opcode[1:], i, _WIDE, a, b)
    target = i.operands[0]
    selector = target.selector if isinstance(target, Register) else ""
    bits = {"b": 8, "h": 16}.get(selector[:1], 32)
    signed = result_type[0] == "s"
    if "sat" in i.modifiers:
        value = _clamp(e, value, _WIDE, signed, bits)
    second = next((m for m in i.modifiers[-1:] if m in ("add", "min", "max")), "")
    if second:
        third = e.convert(e.get(i.operands[3], "b32"), "i32", _WIDE, signed=signed)
        value = _operation(e, second, i, _WIDE, value, third)
    word = e.convert(value, _WIDE, "i32")
    if selector:
        position = bits * int(selector[1:])
        mask = (2**bits - 1) << position
        placed = e.op(f"and i32 {e.op(f'shl i32 {word}, {position}')}, {mask}")
        kept = e.op(f"and i32 {e.get(i.operands[3], 'b32')}, {~mask}")
        word = e.op(f"or i32 {placed}, {kept}")
    e.set(Register(target.name) if isinstance(target, Register) else target, word, "b32")


@lowers("vmad")
def _vmad(e: Emitter, i: Instruction) -> None:
    _, a_type, b_type = types_of(i)[:3]
    signed = "s" in (a_type[0], b_type[0])
    a, b = _selected(e, i.operands[1], a_type), _selected(e, i.operands[2], b_type)
    c = e.convert(e.get(i.operands[3], "b32"), "i32", _WIDE, signed=signed)
    value = e.op(f"add {_WIDE} {e.op(f'mul {_WIDE} {a}, {b}')}, {c}")
    if "po" in i.modifiers:
        value = e.op(f"add {_WIDE} {value}, 1")
    shift = 7 if "shr7" in i.modifiers else 15 if "shr15" in i.modifiers else 0
    if shift:
        value = e.op(f"ashr {_WIDE} {value}, {shift}")
    if "sat" in i.modifiers:
        value = _clamp(e, value, _WIDE, signed, 32)
    e.set(i.operands[0], e.convert(value, _WIDE, "i32"), "b32")


@lowers("vadd2 vsub2 vavrg2 vabsdiff2 vmin2 vmax2 vset2 vadd4 vsub4 vavrg4 vabsdiff4 vmin4 vmax4 vset4")
def _packed(e: Emitter, i: Instruction) -> None:
    lanes = int(i.opcode[-1])
    bits = 32 // lanes
    types = types_of(i)
    if i.opcode.startswith("vset"):
        types = ["u32", *types]
    result_type, a_type, b_type = types[:3]
    both = [e.get(operand, "b32") for operand in i.operands[1:3]]
    places = [_lane_places(operand, lanes, n * lanes) for n, operand in enumerate(i.operands[1:3])]
    target = i.operands[0]
    mask = target.selector if isinstance(target, Register) else ""
    chosen = {int(digit) for digit in mask[1:]} if mask else set(range(lanes))
    third = e.get(i.operands[3], "b32") if len(i.operands) > 3 else "0"
    adds = i.modifiers[-1] == "add"
    result = third if adds else "0"
    for lane in range(lanes):
        position = lane * bits
        if lane not in chosen:
            if not adds:
                result = e.op(f"or i32 {result}, {e.op(f'and i32 {third}, {(2**bits - 1) << position}')}")
            continue
        a, b = (
            _part(e, both[where[lane] // lanes], t[0] == "s", bits, where[lane] % lanes * bits, "i32")
            for where, t in zip(places, (a_type, b_type), strict=True)
        )
        value = _operation(e, i.opcode[1:-1], i, "i32", a, b)
        if "sat" in i.modifiers:
            value = _clamp(e, value, "i32", result_type[0] == "s", bits)
        if adds:
            result = e.op(f"add i32 {result}, {value}")
        else:
            placed = e.op(f"shl i32 {e.op(f'and i32 {value}, {2**bits - 1}')}, {position}")
            result = e.op(f"or i32 {result}, {placed}")
    e.set(Register(target.name) if isinstance(target, Register) else target, result, "b32")


def _lane_places(operand: Operand, lanes: int, first: int) -> list[int]:
    """Return for each lane, lowest first, which part of both sources side by side a selector picks."""
    selector = operand.selector if isinstance(operand, Register) else ""
    return [int(digit) for digit in reversed(selector[1:])] if selector else [first + n for n in range(lanes)]


@lowers("dp4a dp2a")
def _dot(e: Emitter, i: Instruction) -> None:
    a_type, b_type = types_of(i)[:2]
    a, b, total = (e.get(operand, "b32") for operand in i.operands[1:4])
    lanes, width = (4, 8) if i.opcode == "dp4a" else (2, 16)
    first = 16 if "hi" in i.modifiers else 0  # of dp2a: which half of b
    for lane in range(lanes):
        x = _part(e, a, a_type[0] == "s", width, width * lane, "i32")
        y = _part(e, b, b_type[0] == "s", 8, first + 8 * lane, "i32")
        total = e.op(f"add i32 {total}, {e.op(f'mul i32 {x}, {y}')}")
    e.set(i.operands[0], total, "b32")
