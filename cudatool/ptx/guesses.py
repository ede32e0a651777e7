"""Loads that only guess: what they read reaches nothing but a loop of ``atom.cas``, which checks it.

The CUDA C++ Programming Guide makes any atomic function of ``atomicCAS`` in this way ("Atomic Functions")::

    old = *p                                        ld        old, [p]
    do                                        LOOP: ...       new = f(old)
        assumed = old                               atom.cas  found, [p], old, new
        old = atomicCAS(p, assumed, f(assumed))     setp.ne   again, old, found
    while old != assumed                            mov       old, found
                                              @again bra      LOOP

Whatever the load gives, the result is the same: a guess that is not in memory changes nothing, and the next guess is
what ``atom.cas`` found. Nothing depends on the loaded value before it has been compared, if

- the loop is one basic block that is left only where the two values are equal;
- in the loop, the guess and what is computed of it are used by ``atom.cas`` (not as an address) and that test alone;
- a round of the loop does nothing else but compute and load, and leaves nothing to the next one but the guess;
- the loop goes on with what ``atom.cas`` found. One that loads again may wait for a cache that never sees the others;
- before the loop the value is copied to where the loop begins with it, and used by nothing else.

A loop that a compiler makes several blocks of is not recognized.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from cudatool.ptx.flow import BasicBlock, Flow, reads, writes
from cudatool.ptx.isa import STRONG, InstructionClass, opcode_of
from cudatool.ptx.model import Address, Function, Instruction, Register

__all__ = ["guessing_loads"]

_COMPUTES: Final = frozenset(
    {InstructionClass.OTHER, InstructionClass.CONVERSION, InstructionClass.PREDICATE, InstructionClass.MOVE}
)
_Place = tuple[int, Instruction]  # the number of its block, and an instruction


def guessing_loads(function: Function) -> frozenset[int]:
    """Return the lines of the plain loads whose value nothing uses before an ``atom.cas`` has compared it."""
    if not any(_is_cas(i) for i in function.instructions):
        return frozenset()
    flow = Flow(function)
    loops: dict[str, set[int]] = defaultdict(set)  # by the register that holds a guess when they begin
    for number, block in enumerate(flow.blocks):
        if number in block.successors and (guess := _guess_of(_code(flow, block))):
            loops[guess].add(number)
    return _loads_into(flow, loops) if loops else frozenset()


def _code(flow: Flow, block: BasicBlock) -> list[Instruction]:
    return flow.function.instructions[block.start : block.stop]


def _is_cas(i: Instruction) -> bool:
    return i.opcode == "atom" and "cas" in i.modifiers


def _is_plain_load(i: Instruction) -> bool:
    return i.opcode == "ld" and "nc" not in i.modifiers and STRONG.isdisjoint(i.modifiers)


def _is_copy(i: Instruction) -> bool:
    return i.opcode == "mov" and i.guard is None and all(isinstance(one, Register) for one in i.operands)


def _guess_of(code: list[Instruction]) -> str:
    """Return the register that holds the guess when this block begins, if it is such a loop, else ``""``.

    A value is called after the register that held it when the block began, or by the number of the instruction that
    computed it; copies have one name.
    """
    last, values = code[-1], dict[str, str]()
    if last.opcode != "bra" or last.guard is None or sum(map(_is_cas, code)) != 1:
        return ""
    steps: list[tuple[Instruction, list[str]]] = []  # with the values that each one uses
    guess = found = again = ""
    for number, i in enumerate(code[:-1]):
        kept = writes(i) if i.guard is not None else []  # where its guard does not hold
        used = [values.get(name, name) for name in (*reads(i), *kept)]
        steps.append((i, used))
        if _is_cas(i) and i.guard is None and isinstance(i.operands[2], Register):
            guess, found = values.get(i.operands[2].name, i.operands[2].name), str(number)
        if found and _tells_apart(i) and {guess, found} == {*used}:
            again = str(number)
        values.update(dict.fromkeys(writes(i), used[0] if _is_copy(i) else str(number)))
    goes_on = values.get(last.guard.name) == again and last.guard.negated == _is_for_equal(code, again)
    if not again or not goes_on or guess.isdecimal() or values.get(guess) != found:
        return ""
    return guess if _is_compared_first(steps, values, guess, found) else ""


def _tells_apart(i: Instruction) -> bool:
    """Whether an instruction says whether two registers have the same bits."""
    bits = any(m[0] in "bsu" and m[1:].isdecimal() for m in i.modifiers)
    return i.opcode == "setp" and i.guard is None and i.modifiers[0] in ("eq", "ne") and len(i.operands) == 3 and bits


def _is_for_equal(code: list[Instruction], number: str) -> bool:
    return number != "" and code[int(number)].modifiers[0] == "eq"


def _is_compared_first(
    steps: list[tuple[Instruction, list[str]]], values: dict[str, str], guess: str, found: str
) -> bool:
    """Return whether a loop uses the guess, and what it computes of it, for ``atom.cas`` and the test alone.

    How often it goes round must make no difference, either. `values` is what registers hold at its end.
    """
    computed = {guess}
    for number, (i, used) in enumerate(steps):
        uses_guess = not computed.isdisjoint(used)
        if _is_cas(i):
            address = i.operands[1]
            if isinstance(address, Address) and isinstance(address.base, Register) and used[0] in computed:
                return False
        elif uses_guess and not _is_copy(i) and not (_tells_apart(i) and {guess, found} == {*used}):
            computed.add(str(number))
        if not (_is_cas(i) or _computes(i) or (i.opcode == "ld" and not uses_guess)):
            return False
    begun_with = {value for _, used in steps for value in used if not value.isdecimal()} - {guess}
    return all(values.get(register, register) == register for register in begun_with)


def _computes(i: Instruction) -> bool:
    """Whether an instruction computes a result of registers, and does nothing else."""
    row = opcode_of(i.opcode)
    return row.has_result and row.kind in _COMPUTES and not any(isinstance(one, Address) for one in i.operands)


def _loads_into(flow: Flow, loops: dict[str, set[int]]) -> frozenset[int]:
    """Return the lines of the plain loads whose values these loops begin with, and that nothing uses before."""
    dominators = flow.dominators()
    uses: dict[str, list[_Place]] = defaultdict(list)
    for number, i in _places(flow):
        for name in reads(i):
            uses[name].append((number, i))

    def is_guess(register: str, load: int, known: set[str]) -> bool:
        """Whether all that uses a register begins a loop with it, comes after the loop, or copies it to such a one.

        A loop that all ways to the load in block `load` have come through compared another value.
        """
        ours = [loop for loop in loops.get(register, ()) if not dominators[load] >> loop & 1]
        return register not in known and all(
            any(dominators[number] >> loop & 1 for loop in ours)
            or (_is_copy(i) and is_guess(writes(i)[0], load, known | {register}))
            for number, i in uses[register]
        )

    lines: dict[bool, set[int]] = {True: set(), False: set()}
    for number, i in _places(flow):
        if _is_plain_load(i) and dominators[number] >= 0:
            results = writes(i)
            lines[len(results) == 1 and bool(uses[results[0]]) and is_guess(results[0], number, set())].add(i.line)
    return frozenset(lines[True] - lines[False])  # a line may have several, as code that was inlined twice


def _places(flow: Flow) -> Iterator[_Place]:
    for number, block in enumerate(flow.blocks):
        for i in _code(flow, block):
            yield number, i
