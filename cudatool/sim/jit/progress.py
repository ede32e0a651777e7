"""Where threads that wait for others in a loop let those go on.

The threads of a block take turns at suspensions only. A loop that reads memory until another thread writes it would
never end, so it gets a suspension of its own: the pseudo-instruction ``yield`` before each *poll*. It suspends a
thread when it has come there often, so that loops that end soon cost a count. ``progress`` marks what a thread
reaches when its waiting is over, and what it does outside of such loops together with others; when nothing of the kind
happens for a while, and threads come back to their polls with the same values, no thread can go on.

A poll is a read that may see another value each time, in a loop whose end depends on it:

- a volatile, relaxed or acquiring load, or one that bypasses caches (``ld.cg``, ``ld.cv``);
- an atomic operation that changes nothing (``atom.add`` of 0), an exchange, and a compare-and-swap whose expected value
  stays the same: a lock. One that is tried again with the value it found always succeeds for some thread.

``nanosleep`` suspends always, unless for no time: libcu++ sleeps 0 ns after each atomic access that finds its object in
local memory (around a compiler's error, nvbug 4064730), and a kernel may have a hundred of these.

Of polls that a loop comes to in turn only the first gets a ``yield``, so that nothing comes between those of one time
around. Warps that run in step rely on that: in the histograms of CUDA's first samples each lane adds to a counter,
writes it with the lane's number, and reads whether another lane's write came after.
"""

from __future__ import annotations

from dataclasses import replace

from cudatool.ptx import Flow, Function, Immediate, Instruction, Operand, Register, opcode_of
from cudatool.ptx.effects import has_result
from cudatool.ptx.flow import reads, writes
from cudatool.ptx.isa import OpcodeAccess
from cudatool.sim.jit.collective import suspension_of

__all__ = ["insert_yields"]

_ROUND = 24  # what an instruction costs that is looked at, in what a look at a block does
_POLLING_LOADS = frozenset({"volatile", "relaxed", "acquire", "mmio", "cg", "cv"})


def insert_yields(function: Function) -> Function:
    """Return `function` with ``yield`` before each poll and ``progress`` where waiting is over."""
    code = function.instructions
    zeros = _zeros(code) if any(one.opcode == "nanosleep" for one in code) else set()
    candidates = [index for index, one in enumerate(code) if _may_poll(one) or _sleeps(one, zeros)]
    if not candidates:
        return function
    flow = Flow(function)
    block_of = [number for number, block in enumerate(flow.blocks) for _ in range(block.start, block.stop)]
    before: dict[int, list[Instruction]] = {}
    spinning: set[int] = set()
    polling: list[int] = []  # blocks
    for index in candidates:
        loop = flow.innermost_loop(block_of[index])
        if code[index].opcode == "nanosleep":
            _put(before, index, "yield", code[index], "always")
        elif loop and _decides(flow, loop, index):
            if _suspends(flow, loop):  # the count of polls begins again after every suspension
                _put(before, index, "yield", code[index], "always")
            elif not any(one in loop and flow.comes_first(one, block_of[index], loop) for one in polling):
                _put(before, index, "yield", code[index])
                polling.append(block_of[index])
        else:
            continue
        spinning |= loop
    if not before:
        return function
    left = {s for number in spinning for s in flow.blocks[number].successors if s not in spinning}
    for number in left:
        if flow.blocks[number].start < len(code):
            _put(before, flow.blocks[number].start, "progress", code[flow.blocks[number].start])
    for index, instruction in enumerate(code):
        if suspension_of(instruction) is not None and block_of[index] not in spinning:
            _put(before, index, "progress", instruction)
    return _insert(function, before)


def _put(before: dict[int, list[Instruction]], index: int, opcode: str, at: Instruction, *modifiers: str) -> None:
    before.setdefault(index, []).append(replace(at, opcode=opcode, modifiers=modifiers, operands=(), guard=None))


def _insert(function: Function, before: dict[int, list[Instruction]]) -> Function:
    """Return `function` with instructions inserted; labels lead to what is inserted at them."""
    instructions: list[Instruction] = []
    moved: list[int] = []
    for index, instruction in enumerate(function.instructions):
        moved.append(len(instructions))
        instructions += [*before.get(index, ()), instruction]
    moved.append(len(instructions))
    labels = {name: moved[index] for name, index in function.labels.items()}
    return replace(function, instructions=instructions, labels=labels)


def _zeros(code: list[Instruction]) -> set[str]:
    """Return the registers that only ever become 0."""
    zeros: set[str] = set()
    others: set[str] = set()
    for one in code:
        (zeros if one.opcode == "mov" and _is_constant(one.operands[1], 0) else others).update(writes(one))
    return zeros - others


def _sleeps(instruction: Instruction, zeros: set[str]) -> bool:
    if instruction.opcode != "nanosleep":
        return False
    (time,) = instruction.operands
    return not (time.name in zeros if isinstance(time, Register) else _is_constant(time, 0))


def _may_poll(instruction: Instruction) -> bool:
    modifiers = instruction.modifiers
    if instruction.opcode == "ld":
        # No other thread writes local memory.
        return "local" not in modifiers and not _POLLING_LOADS.isdisjoint(modifiers)
    if opcode_of(instruction.opcode).access is not OpcodeAccess.ATOMIC or not has_result(instruction):
        return False
    if "exch" in modifiers or "cas" in modifiers:
        return True
    neutral = -1 if "and" in modifiers else 0
    value = instruction.operands[-1]
    return "inc" not in modifiers and "dec" not in modifiers and _is_constant(value, neutral)


def _is_constant(operand: Operand, value: int) -> bool:
    return isinstance(operand, Immediate) and not operand.width and (int(operand.value) - value) % (1 << 32) == 0


def _decides(flow: Flow, loop: frozenset[int], index: int) -> bool:
    """Whether the end of `loop` may depend on what the instruction at `index` reads."""
    code = flow.function.instructions
    inside = [i for number in sorted(loop) for i in range(flow.blocks[number].start, flow.blocks[number].stop)]
    poll = code[index]
    if "cas" in poll.modifiers and _changes(code, inside, poll.operands[2]):
        return False
    if "shared" not in poll.modifiers and _suspends(flow, loop):
        return True  # one thread may read for all and tell them through shared memory
    known = set(writes(poll))
    while True:
        flow.spend(_ROUND * len(inside))
        more = {name for i in inside if known.intersection(reads(code[i])) for name in writes(code[i])}
        if more <= known:
            break
        known |= more
    leaves = (number for number in loop if not loop.issuperset(flow.blocks[number].successors))
    lasts = (code[flow.blocks[number].stop - 1] for number in leaves)
    return any(known.intersection(reads(last)) for last in lasts)


def _suspends(flow: Flow, loop: frozenset[int]) -> bool:
    """Whether there is a barrier or a collective in `loop`."""
    code = flow.function.instructions
    return any(suspension_of(one) for n in loop for one in code[flow.blocks[n].start : flow.blocks[n].stop])


def _changes(code: list[Instruction], inside: list[int], operand: Operand) -> bool:
    """Whether a loop gives a register another value than a constant."""
    if not isinstance(operand, Register):
        return False
    sets = (code[i] for i in inside if operand.name in writes(code[i]))
    return any(one.opcode != "mov" or not isinstance(one.operands[1], Immediate) for one in sets)
