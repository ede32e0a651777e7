"""Numbers that C and Python write to each other stand in both; here they are compared.

C's have no home of their own: each names the enumeration in Python that it follows, and fails here if that changes.
"""

from __future__ import annotations

import re
from enum import IntEnum, IntFlag
from pathlib import Path

import pytest

from cudatool.collect import cupti_calls
from cudatool.collect.cupti_rows import What
from cudatool.collect.torch_rows import Action, RowKind, TraceCall
from cudatool.sim.jit import context, race_engine
from cudatool.sim.jit.instrument import Flag, RaceMode
from cudatool.sim.jit.race_engine import RaceReason
from cudatool.sim.jit.races import ClusterBarrier
from cudatool.trace import lifetimes, stacks
from cudatool.trace.events import OF_BACKWARD, OF_MODULE, Kind, UseFlag

SOURCES = Path(__file__).parents[1] / "cudatool"


def named(of: type[IntEnum | IntFlag], *names: str, prefix: str = "") -> dict[str, int]:
    return {f"{prefix}{name}": of[name] for name in names or of.__members__}


NUMBERS: dict[str, dict[str, int]] = {
    "collect/_log_rows.h": named(What)
    | named(Action, "ALLOC", "FREE_REQUESTED", "FREE_COMPLETED", "SNAPSHOT", "FREED")
    | {"OUT_OF_MEMORY": Action.OOM},
    "collect/_log_rows.c": {"KERNEL_LAUNCHED": Kind.KERNEL_LAUNCH, "EXECUTED": Kind.EXECUTION}
    | {"OF_MODULE": OF_MODULE, "OF_BACKWARD": OF_BACKWARD},
    "collect/_nvtx.c": named(Kind, "RANGE_PUSH", "RANGE_POP", "MARK", "RANGE_START", "RANGE_END"),
    "collect/_cupti.c": named(UseFlag, "CONTEXT", "MODULE", "GRAPH", "STREAM", "KERNEL", "HEAP", "POOL", prefix="USE_")
    | {"CAPTURE_BEGINS": cupti_calls._CAPTURE_BEGINS, "CAPTURE_ENDS": cupti_calls._CAPTURE_ENDS},
    "collect/torch_log.cpp": named(RowKind) | named(TraceCall) | named(Action, "FREED"),
    "trace/_sweep.c": {"BORN": lifetimes._BORN, "FREED": lifetimes._FREED, "ENDED": lifetimes._ENDED},
    "trace/_walk.c": {"MOST_KEPT": stacks._MAX_DEPTH},
    "sim/_races.h": named(RaceMode, "READ", "WRITE")
    | named(Flag, "STRONG", "WIDE", "ASYNC", "ACQUIRE", "RELEASE", "BLIND")
    | named(RaceReason)
    | {"RUNS": race_engine.RUNS},
    "sim/_race_order.c": named(ClusterBarrier, prefix="CLUSTER_") | {"EXITED": context.EXIT},
}


def numbers_of(text: str) -> dict[str, int]:
    """Return the numbers of a C source's enumerations, and its macros that are numbers, by name."""
    text = re.sub(r"//.*|/\*.*?\*/", "", text)
    found = {name: int(number, 0) for name, number in re.findall(r"#define (\w+) +(0x\w+?|\d+)u?\s", text)}
    for body in re.findall(r"\benum\b[^;{}()]*\{(.*?)\}", text, re.DOTALL):
        number = -1
        for one in filter(None, map(str.strip, body.split(","))):
            name, _, value = one.partition("=")
            number = int(value, 0) if re.fullmatch(r"\s*(0x\w+|-?\d+)\s*", value) else number + 1
            found[name.strip()] = number
    return found


@pytest.mark.parametrize("file", NUMBERS)
def test_numbers_of_c_are_those_of_python(file: str) -> None:
    found = numbers_of((SOURCES / file).read_text())
    assert NUMBERS[file] == {name: found.get(name) for name in NUMBERS[file]}


def test_as_many_bytes_of_a_structure_are_noted_in_c_as_are_read_in_python() -> None:
    [body] = re.findall(
        r"size_t described\(char letter\) \{(.*?)\}", (SOURCES / "collect/_cupti.c").read_text(), re.DOTALL
    )
    sizes = {letter: int(size) for letter, size in re.findall(r"letter == '(\w)' \? (\d+)", body)}
    assert sizes == cupti_calls.DESCRIBED


def test_what_the_allocator_does_is_the_kind_of_record_in_c_that_it_is_in_python() -> None:
    [written] = re.findall(r"kinds_of_actions\[\] = \{([^}]*)\}", (SOURCES / "collect/_log_rows.c").read_text())
    of_python = {
        Action.ALLOC: Kind.BLOCK_ALLOC,
        Action.FREE_REQUESTED: Kind.BLOCK_FREE_REQUESTED,
        Action.FREE_COMPLETED: Kind.BLOCK_FREE_COMPLETED,
        Action.SEGMENT_ALLOC: Kind.SEGMENT_ALLOC,
        Action.SEGMENT_FREE: Kind.SEGMENT_FREE,
        Action.SEGMENT_MAP: Kind.SEGMENT_MAP,
        Action.SEGMENT_UNMAP: Kind.SEGMENT_UNMAP,
        Action.OOM: Kind.OOM,
    }
    kinds = dict(enumerate(map(int, written.split(","))))
    assert kinds == {**of_python, Action.SNAPSHOT: 0}
