"""A small PTX interpreter, to compare kernels with: integers, branches, one block, collectives.

It shares no code with what it checks. Each instruction is written down as the PTX ISA describes it (chapters 9.7.1,
9.7.5 to 9.7.9 and 9.7.13), one thread and, in bit fields, one bit at a time. A thread is a generator that stops at a
collective with its operands and goes on with the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass

__all__ = ["run"]

_TYPE = re.compile(r"([usb])(8|16|32|64)$")
_REQUEST = tuple["Step", list[int]]


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction: ``@!p mul.wide.u32 d, a, b`` is ``("!%p", "mul", ("wide", "u32"), ["%d", "%a", "%b"])``."""

    guard: str
    opcode: str
    modifiers: tuple[str, ...]
    operands: list[str]

    @property
    def types(self) -> list[tuple[str, int]]:
        """Kind and bits of the types named."""
        return [(m[1], int(m[2])) for name in self.modifiers if (m := _TYPE.match(name))]


def _parse(text: str) -> tuple[list[Step], dict[str, int], dict[str, int]]:
    """Return the code of a kernel, its labels, and the bits of its registers."""
    body = text[text.index("{") + 1 : text.rindex("}")]
    steps: list[Step] = []
    labels: dict[str, int] = {}
    bits: dict[str, int] = {}
    for part in re.split(r";|(?<=:)\s*\n", body):
        line = part.strip()
        if line.endswith(":"):
            labels[line[:-1]] = len(steps)
        elif line.startswith(".reg"):
            kind, names = line.split()[1], line.split(None, 2)[2]
            for name in names.split(","):
                base, _, count = name.strip().rstrip(">").partition("<")
                width = 1 if kind == ".pred" else int(kind[2:])
                bits.update(dict.fromkeys([f"{base}{n}" for n in range(int(count))] if count else [base], width))
        elif line and not line.startswith("."):
            guard = ""
            if line.startswith("@"):
                guard, line = line[1:].split(None, 1)
            name, _, rest = line.partition(" ")
            opcode, *modifiers = name.split(".")
            operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s][^,]*", rest)]
            steps.append(Step(guard, opcode, tuple(modifiers), operands))
    return steps, labels, bits


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (value >> bits - 1 << bits)


def _clamped(value: int, kind: str, bits: int) -> int:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind == "s" else (0, (1 << bits) - 1)
    return max(low, min(high, value))


def _product(step: Step, a: int, b: int) -> int:
    return a * b >> step.types[-1][1] if "hi" in step.modifiers else a * b


def _quotient(a: int, b: int) -> int:
    """Return the quotient, rounded towards zero; a GPU gives all ones for a division by zero."""
    if not b:
        return -1
    return abs(a) // abs(b) * (-1 if (a < 0) != (b < 0) else 1)


def _sum(step: Step, value: int) -> int:
    return _clamped(value, "s", 32) if "sat" in step.modifiers else value


def _shift(step: Step, a: int, count: int) -> int:
    count = min(count, step.types[-1][1])
    return a << count if step.opcode == "shl" else a >> count


def _field(value: int, bits: int) -> int:
    """Return a position or length: PTX names its low 8 bits; for fields of 64 bits a GPU goes by the whole value."""
    return min(value, 255) if bits == 64 else value & 255


def _bfe(step: Step, a: int, position: int, length: int) -> int:
    kind, bits = step.types[-1]
    position, length = _field(position, bits), _field(length, bits)
    sign = a >> min(position + length - 1, bits - 1) & 1 if kind == "s" and length else 0
    inside = [n < length and position + n < bits for n in range(bits)]
    return sum((a >> position + n & 1 if inside[n] else sign) << n for n in range(bits))


def _bfi(step: Step, a: int, b: int, position: int, length: int) -> int:
    bits = step.types[-1][1]
    position, length = _field(position, bits), _field(length, bits)
    for n in range(min(length, max(bits - position, 0))):
        b = b & ~(1 << position + n) | (a >> n & 1) << position + n
    return b


def _bfind(step: Step, a: int) -> int:
    bits = step.types[-1][1]
    found = (~a if a < 0 else a).bit_length() - 1
    return bits - 1 - found if "shiftamt" in step.modifiers and found >= 0 else found


def _brev(step: Step, a: int) -> int:
    bits = step.types[-1][1]
    return sum((a >> n & 1) << bits - 1 - n for n in range(bits))


def _bmsk(step: Step, start: int, length: int) -> int:
    start, length = (n & 31 if "wrap" in step.modifiers else min(n, 32) for n in (start, length))
    return (1 << length) - 1 << start


def _szext(step: Step, a: int, width: int) -> int:
    width = width & 31 if "wrap" in step.modifiers else min(width, 32)
    value = a & (1 << width) - 1
    return _signed(value, width) if "s32" in step.modifiers and width else value


def _funnel(step: Step, low: int, high: int, count: int) -> int:
    count = count & 31 if "wrap" in step.modifiers else min(count, 32)
    both = high << 32 | low
    return both >> 32 - count if "l" in step.modifiers else both >> count


def _prmt(step: Step, a: int, b: int, selector: int) -> int:
    data = (b << 32 | a).to_bytes(8, "little")
    n = selector & 3
    chosen = {
        "f4e": [n, n + 1, n + 2, n + 3],
        "b4e": [n, n - 1 & 7, n - 2 & 7, n - 3 & 7],
        "rc8": [n] * 4,
        "ecl": [max(n, k) for k in range(4)],
        "ecr": [min(n, k) for k in range(4)],
        "rc16": [2 * (n & 1), 2 * (n & 1) + 1] * 2,
    }.get(step.modifiers[-1], [selector >> 4 * k & 15 for k in range(4)])
    return sum((data[c & 7] if c < 8 else 255 * (data[c & 7] >> 7)) << 8 * k for k, c in enumerate(chosen))


def _lop3(step: Step, a: int, b: int, c: int, table: int) -> int:
    return sum((table >> 4 * (a >> n & 1) + 2 * (b >> n & 1) + (c >> n & 1) & 1) << n for n in range(32))


def _dot(step: Step, a: int, b: int, c: int) -> int:
    (a_kind, _), (b_kind, _) = step.types[:2]
    wide = 8 if step.opcode == "dp4a" else 16
    first = 2 if "hi" in step.modifiers else 0
    for n in range(32 // wide):
        x, y = a >> wide * n & (1 << wide) - 1, b >> 8 * (n + first) & 255
        c += (_signed(x, wide) if a_kind == "s" else x) * (_signed(y, 8) if b_kind == "s" else y)
    return c


def _low24(value: int, kind: str) -> int:
    return _signed(value, 24) if kind == "s" else value & 0xFFFFFF


def _mul24(step: Step, a: int, b: int, c: int = 0) -> int:
    product = _low24(a, step.types[-1][0]) * _low24(b, step.types[-1][0])
    return (product >> 16 if "hi" in step.modifiers else product) + c


def _cvt(step: Step, a: int) -> int:
    return _clamped(a, *step.types[0]) if "sat" in step.modifiers else a


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}

_OPERATIONS: dict[str, Callable[..., int]] = {
    "mov": lambda step, a: a,
    "cvt": _cvt,
    "add": lambda step, a, b: _sum(step, a + b),
    "sub": lambda step, a, b: _sum(step, a - b),
    "mul": _product,
    "mad": lambda step, a, b, c: _product(step, a, b) + c,
    "div": lambda step, a, b: _quotient(a, b),
    "mul24": _mul24,
    "mad24": _mul24,
    "sad": lambda step, a, b, c: abs(a - b) + c,
    "min": lambda step, a, b: min(a, b),
    "max": lambda step, a, b: max(a, b),
    "abs": lambda step, a: abs(a),
    "neg": lambda step, a: -a,
    "and": lambda step, a, b: a & b,
    "or": lambda step, a, b: a | b,
    "xor": lambda step, a, b: a ^ b,
    "not": lambda step, a: ~a,
    "shl": _shift,
    "shr": _shift,
    "shf": _funnel,
    "popc": lambda step, a: a.bit_count(),
    "clz": lambda step, a: step.types[-1][1] - a.bit_length(),
    "brev": _brev,
    "bfe": _bfe,
    "bfi": _bfi,
    "bfind": _bfind,
    "bmsk": _bmsk,
    "szext": _szext,
    "prmt": _prmt,
    "lop3": _lop3,
    "dp4a": _dot,
    "dp2a": _dot,
    "setp": lambda step, a, b: _COMPARE[step.modifiers[0]](a, b),
    "selp": lambda step, a, b, p: a if p else b,
}
_COLLECTIVES = ("bar", "shfl", "vote", "match", "redux")


def _source_types(step: Step, count: int) -> list[tuple[str, int]]:
    """Return as what an instruction reads its sources; those that are not named are as the last."""
    kind, bits = step.types[-1]
    given: dict[str, list[tuple[str, int]]] = {
        "shl": [(kind, bits), ("u", 32)],
        "shr": [(kind, bits), ("u", 32)],
        "bfe": [(kind, bits), ("u", 32)],
        "bfi": [(kind, bits), (kind, bits), ("u", 32)],
        "szext": [("u", 32)],
        "selp": [(kind, bits), (kind, bits), ("u", 1)],
        "dp4a": [("u", 32), ("u", 32), ("s", 32)],
        "dp2a": [("u", 32), ("u", 32), ("s", 32)],
    }
    types = given.get(step.opcode, [(kind, bits)])
    if step.opcode == "mad" and "wide" in step.modifiers:
        types = [(kind, bits), (kind, bits), (kind, 2 * bits)]
    return [types[min(n, len(types) - 1)] for n in range(count)]


def run(text: str, parameters: dict[str, int], memory: bytearray, threads: int) -> None:
    """Run a block of a kernel; `parameters` are offsets in `memory`, which is what ``global`` addresses mean."""
    steps, labels, bits = _parse(text)
    spaces = {"global": memory, "shared": bytearray(1 << 16)}
    running = [_thread(steps, labels, bits, parameters, spaces, t, threads) for t in range(threads)]
    waiting = {t: request for t, thread in enumerate(running) if (request := next(thread, None))}
    while waiting:
        answers: dict[int, int] = {}
        for warp in range(0, threads, 32):
            answers |= {warp + lane: answer for lane, answer in _answers(waiting, warp).items()}
        if not answers:
            assert {"bar"} == {step.opcode for step, _ in waiting.values()}, "threads wait for others that do not come"
            assert threads == len(waiting), "a thread has ended before a barrier"
            answers = dict.fromkeys(waiting, 0)
        for t, answer in answers.items():
            try:
                waiting[t] = running[t].send(answer)
            except StopIteration:
                del waiting[t]


def _answers(waiting: dict[int, _REQUEST], warp: int) -> dict[int, int]:
    """Return what the lanes of a warp get whose collective all lanes of its mask have come to."""
    lanes = {lane: waiting[warp + lane] for lane in range(32) if warp + lane in waiting}
    found: dict[int, int] = {}
    for step, operands in lanes.values():
        mask = operands[-1]
        group = {n: values for n, (other, values) in lanes.items() if mask >> n & 1 and other is step}
        if step.opcode != "bar" and mask == sum(1 << lane for lane in group):
            found |= _collective(step, group)
    return found


def _collective(step: Step, group: dict[int, list[int]]) -> dict[int, int]:
    """Return what a collective gives to each lane of those that execute it, whose operands `group` has."""
    values = {lane: operands[0] for lane, operands in group.items()}
    if step.opcode == "vote":
        return dict.fromkeys(group, sum(bool(value) << lane for lane, value in values.items()))
    if step.opcode == "match":
        return {n: sum((other == value) << lane for lane, other in values.items()) for n, value in values.items()}
    if step.opcode == "redux":
        first, *others = values.values()
        for value in others:
            operation = _OPERATIONS[step.modifiers[1]]
            a, b = (_signed(v, 32) if step.modifiers[2] == "s32" else v for v in (first, value))
            first = operation(Step("", "", (), []), a, b) & 0xFFFFFFFF
        return dict.fromkeys(group, first)
    found = {}
    for lane, (value, distance, *_) in group.items():
        other = {"idx": distance, "up": lane - distance, "down": lane + distance, "bfly": lane ^ distance}
        found[lane] = values.get(other[step.modifiers[1]], value)
    return found


def _thread(
    steps: list[Step],
    labels: dict[str, int],
    bits: dict[str, int],
    parameters: dict[str, int],
    spaces: dict[str, bytearray],
    number: int,
    threads: int,
) -> Generator[_REQUEST, int, None]:
    registers = {"%tid.x": number, "%ntid.x": threads, "%nctaid.x": 1}
    spaces = {**spaces, "local": bytearray(256)}

    def read(operand: str, kind: str = "u", width: int = 64) -> int:
        literal = int(operand, 0) if operand[0].isdigit() else 0  # variables are the first in their space
        value = registers[operand] if operand.startswith("%") else literal
        return _signed(value, width) if kind == "s" else value & (1 << width) - 1

    def place(step: Step, operand: str) -> tuple[bytearray, int]:
        base, _, offset = operand[1:-1].partition("+")
        return spaces[step.modifiers[0]], read(base) + int(offset or 0)

    at = 0
    while at < len(steps):
        step = steps[at]
        at += 1
        if step.guard and registers[step.guard.lstrip("!")] == step.guard.startswith("!"):
            continue
        target, operands = (step.operands or [""])[0], step.operands[1:]
        if step.opcode == "ret":
            return
        if step.opcode == "bra":
            at = labels[target]
        elif step.opcode == "ld" and step.modifiers[0] == "param":
            registers[target] = parameters[operands[0][1:-1]]
        elif step.opcode in ("ld", "st", "red"):
            memory, address = place(step, operands[0] if step.opcode == "ld" else target)
            size = step.types[-1][1] // 8
            if step.opcode == "ld":
                registers[target] = int.from_bytes(memory[address : address + size], "little")
            else:
                for value in operands[0].strip("{}").split(","):
                    result = read(value.strip(), "u", 8 * size)
                    if step.opcode == "red":
                        result += int.from_bytes(memory[address : address + size], "little")
                    memory[address : address + size] = (result & (1 << 8 * size) - 1).to_bytes(size, "little")
                    address += size
        elif step.opcode in _COLLECTIVES:
            answer = yield step, [read(operand, "u", 32) for operand in operands or ["0"]]
            if step.opcode != "bar":
                registers[target] = answer
        elif target.startswith("{"):  # mov.b64 {low, high}, value
            low, high = target.strip("{}").replace(" ", "").split(",")
            registers[low], registers[high] = read(operands[0]) & 0xFFFFFFFF, read(operands[0]) >> 32
        else:
            sources = [read(o, *t) for o, t in zip(operands, _source_types(step, len(operands)), strict=True)]
            registers[target] = _OPERATIONS[step.opcode](step, *sources) & (1 << bits[target]) - 1
