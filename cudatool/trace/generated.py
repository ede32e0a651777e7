"""Lines of code that PyTorch's compiler generated: the buffer that each allocates, its graph nodes, module and origin.

A frame of such a file says nothing to a user. What the compiler knew of its line is in the trace
(``GENERATED_LINE``), so that stacks can go on where the compiler began, as debuggers do for inlined functions::

    model.py:10 (forward)        the lines that the buffer was made from   } added here
    train.py:19 (forward)                                                  }
    c4earad....py:412 (call)     the generated file
    train.py:40 (step)           its caller
"""

from __future__ import annotations

from collections.abc import Sequence

from cudatool.trace.events import GeneratedFact, GeneratedFlag, Kind
from cudatool.trace.frames import is_generated
from cudatool.trace.model import Frame, GeneratedCode, GeneratedLine, Trace

__all__ = ["go_on_in_program"]


_PARTLY = GeneratedFlag.NO_GRAPH | GeneratedFlag.UNREADABLE
_LONGEST = 64  # lines that one statement may span


def go_on_in_program(trace: Trace) -> None:
    """Set :attr:`Trace.generated` to what a trace says of generated code, and let the stacks go on from there."""
    flags, lines = _read(trace)
    trace.generated = GeneratedCode(flags, lines)
    files = {file for file in dict.fromkeys(frame.file for frame in trace.frames) if is_generated(file)} | set(lines)
    generated = [frame.file in files for frame in trace.frames]
    if not any(generated):
        return
    at: dict[int, tuple[Frame, GeneratedLine | None]] = {}
    longer: dict[int, tuple[int, ...]] = {}
    for number, stack in enumerate(trace.stacks):
        inner = [trace.frames[i] for i in stack if generated[i]]
        if not inner:
            continue
        known = ((frame, lines.get(frame.file, {}).get(frame.line)) for frame in inner)
        at[number] = next((found for found in known if found[1] is not None), (inner[0], None))
        line = at[number][1]
        inlined = () if line is None else trace.stacks[line.stack]
        if inlined and stack[-len(inlined) :] != inlined:  # not if all that is known is the line of the call
            longer[number] = inlined + stack
    stacks = list(trace.stacks)
    for number, stack in longer.items():
        stacks[number] = stack
    trace.stacks, trace.generated = stacks, GeneratedCode(flags, lines, at)


def _read(trace: Trace) -> tuple[dict[str, GeneratedFlag], dict[str, dict[int, GeneratedLine]]]:
    """Return the files, and their lines; of a file that was loaded twice, what the load with a graph said."""
    flags: dict[str, GeneratedFlag] = {}
    lines: dict[str, dict[int, GeneratedLine]] = {}
    path_of: dict[int, str] = {}
    rows = trace.of_kind(Kind.GENERATED_FILE, Kind.GENERATED_LINE, Kind.GENERATED_FACT)
    for row in rows[rows["kind"] == Kind.GENERATED_FILE]:
        path = trace.names[row["name"]]
        if flags.get(path, _PARTLY) & _PARTLY:  # the graph says more than the file alone
            path_of = {number: own for number, own in path_of.items() if own != path}
            path_of[int(row["correlation"])], flags[path] = path, GeneratedFlag(int(row["flags"]))
    facts: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for row in rows[rows["kind"] == Kind.GENERATED_FACT]:
        key = int(row["correlation"]), int(row["aux0"])
        facts.setdefault(key, []).append((int(row["flags"]), trace.names[row["name"]]))
    for row in rows[rows["kind"] == Kind.GENERATED_LINE]:
        number, first, last = int(row["correlation"]), int(row["aux0"]), int(row["aux1"])
        if number in path_of:
            own = facts.get((number, first), [])
            line = GeneratedLine(
                first=first,
                last=last,
                buffer=trace.names[row["name"]],
                nodes=_of(own, GeneratedFact.NODE),
                module=next(iter(_of(own, GeneratedFact.MODULE)), ""),
                reused_by=_of(own, GeneratedFact.REUSED_BY),
                stack=int(row["stack"]),
            )
            spanned = range(first, min(last, first + _LONGEST) + 1)
            lines.setdefault(path_of[number], {}).update(dict.fromkeys(spanned, line))
    return flags, lines


def _of(facts: Sequence[tuple[int, str]], wanted: GeneratedFact) -> tuple[str, ...]:
    return tuple(name for what, name in facts if what == wanted)
