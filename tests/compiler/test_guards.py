"""Whatever a function can read may change between two calls: a replay must never give what was right before."""

from __future__ import annotations

import array
import functools
import itertools
import os
import random as host_random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from generated import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import cudatool as ct
from cudatool import blas, ops, random
from cudatool.amp import autocast
from cudatool.compiler import compile
from cudatool.compiler._values import content
from cudatool.errors import GraphBreakError
from cudatool.runtime.array import DeviceArray

pytestmark = pytest.mark.usefixtures("device")

VARIABLE = "CUDATOOL_TEST_SCALE"


@pytest.fixture(autouse=True)
def surroundings_as_before() -> Iterator[None]:
    precision = ct.get_float32_matmul_precision()
    yield
    ct.set_float32_matmul_precision(precision)
    os.environ.pop(VARIABLE, None)
    sys.modules.pop("settings_of_test", None)


def numbers(*shape: int, seed: int = 0, dtype: Any = np.float32) -> DeviceArray:
    return ct.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


@dataclass
class Options:
    scale: float = 1.5
    shifts: list[float] = field(default_factory=lambda: [0.5, 0.25])


class Slotted:
    __slots__ = ("__hidden", "factor")

    def __init__(self) -> None:
        self.factor, self.__hidden = 1.25, 0.75

    def product(self) -> float:
        return self.factor * self.__hidden


context: ContextVar[float] = ContextVar("context", default=2.0)


@dataclass
class Call:
    """What a program is called with, and what is kept of what it stored."""

    args: tuple[Any, ...] = field(default_factory=lambda: (numbers(2, 4),))
    kwargs: dict[str, Any] = field(default_factory=lambda: {"gain": 1.0, "parts": [numbers(4, seed=2), 2]})
    held: list[Any] = field(default_factory=list)


CALLS: weakref.WeakKeyDictionary[Program, Call] = weakref.WeakKeyDictionary()
"""Beside the programs, whose attributes are all state of their functions."""


class Program:
    """A function and all that it reads; two of them do the same, one of them compiled."""

    def __init__(self) -> None:
        class Layer:
            bonus = 1.0
            bonuses: ClassVar[list[float]] = [0.5, 1.0]

            def __init__(self) -> None:
                self.weight = numbers(4, 4, seed=1)
                self.stored = [ct.zeros((2, 4))]
                self.rate = 0.5

            @property
            def doubled(self) -> float:
                return self.rate * 2

            @staticmethod
            def bend(x: Any) -> Any:
                return ops.tanh(x)

            def forward(self, x: Any) -> Any:
                y = self.bend(blas.mm(x, self.weight) * self.doubled) + self.bonus + sum(self.bonuses)
                self.stored = [y * 2.0, y]
                return y

        offset = 1.0

        def shift(x: Any, by: float = 0.5, *, times: float = 2.0) -> Any:
            return x + by * times

        self.kind, self.layer, self.options, self.slotted = Layer, Layer(), Options(), Slotted()
        self.table, self.names, self.flags = {"a": 1.0, "b": 2.0}, ["a", "b"], {"plus"}
        self.queue, self.bytes, self.ints = deque([1.0, 2.0]), bytearray(b"\1\2"), array.array("i", [3, 4])
        self.host, self.shift = np.arange(3.0), shift
        self.target: Any = Options()
        self.reference, self.bound = weakref.ref(self.target), functools.partial(shift, by=0.25)
        self.ordered: OrderedDict[str, float] = OrderedDict(a=0.5, b=4.0)
        self.extra = types.SimpleNamespace(value=0.125)
        program = self

        def function(x: Any, *, gain: Any, parts: Any) -> Any:
            import settings_of_test

            y = program.layer.forward(x) * settings_of_test.SCALE + offset
            y = program.bound(program.shift(y)) * program.options.scale + sum(program.options.shifts)
            for position, name in enumerate(program.table):
                y = y + program.table[name] * (position + 1)
            y = y + (1.0 if "plus" in program.flags else -1.0) + sum(program.queue) + sum(program.bytes)
            y = y + sum(program.ints) + float(program.host.sum()) + len(program.names) + program.slotted.product()
            target = program.reference()
            y = y + (target.scale if target is not None else 9.0) + next(iter(program.ordered.values()))
            y = y * float(os.environ.get(VARIABLE, "1.0")) + context.get() + program.extra.value
            return ops.softmax(y * gain, -1) + parts[0].to(np.float32) * parts[1], y

        self.function = function

    def cell(self, value: float) -> None:
        cells = dict(zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True))
        cells["offset"].cell_contents = value


def _replace_method(program: Program, value: float) -> None:
    program.kind.bend = staticmethod(lambda x: x * value)  # type: ignore[method-assign]


def _other_code(program: Program, value: float) -> None:
    program.shift = _shift_otherwise(value)
    program.shift.__code__ = _shift_otherwise(value + 1.0).__code__


def _shift_otherwise(number: float) -> Any:
    code = f"def shift(x, by=0.5, *, times=2.0): return x - by * times * {number}"
    variables: dict[str, Any] = {}
    exec(code, variables)
    return variables["shift"]


def _replace_target(program: Program, value: float) -> None:
    program.target = Options(value)
    program.reference = weakref.ref(program.target)


def _swap(mapping: dict[str, float]) -> None:
    first = next(iter(mapping))
    mapping[first] = mapping.pop(first)


def _argument(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> Callable[[Program, float], None]:
    return lambda program, value: setattr(CALLS[program], "args", (numbers(*shape, seed=seed, dtype=dtype),))


CHANGES: dict[str, Callable[[Program, float], Any]] = {
    "nothing": lambda program, value: None,
    "other numbers in the argument": lambda program, value: CALLS[program].args[0].fill_(value),
    "another argument": _argument((2, 4), 5),
    "more rows": _argument((3, 4), 6),
    "one row": _argument((1, 4), 7),
    "other strides": lambda program, value: setattr(CALLS[program], "args", (numbers(4, 2).T,)),
    "a keyword": lambda program, value: CALLS[program].kwargs.update(gain=value),
    "a list among the arguments": lambda program, value: CALLS[program].kwargs["parts"].__setitem__(1, value),
    "an array in that list": lambda program, value: CALLS[program].kwargs["parts"].__setitem__(0, numbers(4, seed=3)),
    "a shorter dtype in that list": lambda p, value: (
        CALLS[p].kwargs["parts"].__setitem__(0, numbers(4, dtype=np.float16))
    ),
    "the order of keywords": lambda program, value: _swap(CALLS[program].kwargs),
    "a weight": lambda program, value: setattr(program.layer, "weight", numbers(4, 4, seed=int(value * 4))),
    "numbers in a weight": lambda program, value: program.layer.weight.fill_(value),
    "an attribute": lambda program, value: setattr(program.layer, "rate", value),
    "an attribute of a class": lambda program, value: setattr(program.kind, "bonus", value),
    "a list of a class": lambda program, value: program.kind.bonuses.append(value),
    "a method of a class": _replace_method,
    "a property": lambda program, value: setattr(program.kind, "doubled", property(lambda self: value)),
    "an attribute in a slot": lambda program, value: setattr(program.slotted, "factor", value),
    "a private attribute in a slot": lambda program, value: setattr(program.slotted, "_Slotted__hidden", value),
    "a variable of the function around": lambda program, value: program.cell(value),
    "a default": lambda program, value: setattr(program.shift, "__defaults__", (value,)),
    "a keyword's default": lambda program, value: program.shift.__kwdefaults__.update(times=value),
    "the code of a function": _other_code,
    "another function": lambda program, value: setattr(program, "shift", _shift_otherwise(value)),
    "a function with arguments bound": lambda p, value: setattr(p, "bound", functools.partial(p.shift, by=value)),
    "keywords bound to a function": lambda program, value: program.bound.keywords.update(by=value),
    "a constant of a module": lambda program, value: setattr(sys.modules["settings_of_test"], "SCALE", value),
    "a field": lambda program, value: setattr(program.options, "scale", value),
    "a list in a field": lambda program, value: program.options.shifts.append(value),
    "the order of a list": lambda program, value: program.options.shifts.reverse(),
    "an entry": lambda program, value: program.table.update(a=value),
    "another entry": lambda program, value: program.table.update({str(value): value}),
    "the order of entries": lambda program, value: _swap(program.table),
    "the order of an OrderedDict": lambda program, value: program.ordered.move_to_end(next(iter(program.ordered))),
    "a list of names": lambda program, value: program.names.append("c"),
    "a set": lambda program, value: program.flags.symmetric_difference_update({"plus"}),
    "a deque": lambda program, value: program.queue.append(value),
    "a deque turned": lambda program, value: program.queue.rotate(1),
    "bytes": lambda program, value: program.bytes.append(int(value)),
    "an array of Python": lambda program, value: program.ints.append(int(value)),
    "an array of NumPy": lambda program, value: program.host.fill(value),
    "what a weak reference refers to": _replace_target,
    "an attribute of what a weak reference refers to": lambda program, value: setattr(program.target, "scale", value),
    "a namespace": lambda program, value: setattr(program.extra, "value", value),
    "the environment": lambda program, value: os.environ.update({VARIABLE: str(value)}),
    "a context variable": lambda program, value: context.set(value),
    "the precision": lambda program, value: ct.set_float32_matmul_precision("high" if value > 1 else "highest"),
    "what was stored is kept": lambda program, value: CALLS[program].held.append(program.layer.stored[0]),
    "a view of what was stored is kept": lambda program, value: CALLS[program].held.append(program.layer.stored[0][:1]),
    "the list of what was stored is kept": lambda program, value: CALLS[program].held.append(program.layer.stored),
    "what was stored is changed": lambda program, value: program.layer.stored[0].fill_(value),
    "what was stored is replaced": lambda program, value: setattr(program.layer, "stored", [ct.zeros(3)]),
    "what was kept is dropped": lambda program, value: CALLS[program].held.clear(),
}
AROUND: dict[str, Callable[[], Any]] = {
    "autocast": lambda: autocast(dtype=ct.bfloat16),
    "a stream": lambda: ct.stream(ct.Stream()),
}


def values(found: Any) -> Any:
    """Return what arrays hold, in lists that can be compared."""
    if isinstance(found, DeviceArray):
        return found.shape, str(found.dtype), found.get().tobytes()
    return [values(part) for part in found] if isinstance(found, list | tuple) else found


def check(steps: list[tuple[str, float, str]]) -> None:
    """Do the same to two programs, one of them compiled; they must give the same after each change."""
    module = sys.modules["settings_of_test"] = types.ModuleType("settings_of_test")
    module.SCALE = 1.0  # type: ignore[attr-defined]
    token = context.set(2.0)
    eager, traced = Program(), Program()
    CALLS[eager], CALLS[traced] = Call(), Call()
    compiled = compile(traced.function)
    try:
        for _ in range(3):
            assert values(eager.function(*CALLS[eager].args, **CALLS[eager].kwargs)) == values(
                compiled(*CALLS[traced].args, **CALLS[traced].kwargs)
            )
        assert 1 == compiled.hits, compiled.explain()
        for step, (change, value, around) in enumerate(steps):
            for program in (eager, traced):
                CHANGES[change](program, value)
            with ExitStack() as stack:
                if around:
                    stack.enter_context(AROUND[around]())
                wanted = eager.function(*CALLS[eager].args, **CALLS[eager].kwargs)
                found = compiled(*CALLS[traced].args, **CALLS[traced].kwargs)
                assert values(wanted) == values(found), (steps[: step + 1], compiled.explain())
            assert values(eager.layer.stored) == values(traced.layer.stored), (steps[: step + 1], compiled.explain())
            assert values(CALLS[eager].held) == values(CALLS[traced].held), (steps[: step + 1], compiled.explain())
    finally:
        context.reset(token)
        ct.set_float32_matmul_precision("highest")
        os.environ.pop(VARIABLE, None)


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_of_what_a_function_reads_goes_unnoticed(change: str) -> None:
    # With the change once, three calls without one (in which it is traced), and the change again.
    check([(change, 1.75, ""), *[("nothing", 1.0, "")] * 3, (change, 0.75, ""), ("nothing", 1.0, "")])


@pytest.mark.parametrize("around", AROUND)
def test_no_change_of_the_surroundings_goes_unnoticed(around: str) -> None:
    check([("nothing", 1.0, around)] * 3 + [("nothing", 1.0, "")] * 2)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(CHANGES)),
            st.sampled_from([0.5, 0.75, 1.25, 2.0]),
            st.sampled_from(["", "", "", *AROUND]),
        ),
        max_size=12,
    )
)
def test_any_sequence_of_changes_gives_what_eager_execution_gives(steps: list[tuple[str, float, str]]) -> None:
    check(steps)


def test_what_a_call_returns_and_stores_is_one_array_as_without() -> None:
    class Layer:
        def __init__(self) -> None:
            self.kept, self.part = ct.zeros(4), ct.zeros(2)

        def forward(self, x: DeviceArray) -> tuple[DeviceArray, ...]:
            y = x * 2.0
            self.kept, self.part = y, y[:2]
            return y, y, y.reshape(2, 2)

    layer = Layer()
    forward = compile(layer.forward, fullgraph=True)
    for step in range(4):
        y, same, matrix = forward(ct.full(4, step))
        assert y is same is layer.kept
        y.add_(1.0)
        assert [[2.0 * step + 1] * 2] * 2 == matrix.get().tolist()
        assert [2.0 * step + 1] * 2 == layer.part.get().tolist()
    assert 2 == forward.hits


def test_a_replay_leaves_alone_what_the_program_kept_of_the_last_one() -> None:
    class Layer:
        def forward(self, x: DeviceArray) -> DeviceArray:
            self.kept = x * 2.0
            return ops.sum(self.kept)

    layer = Layer()
    layer.kept = ct.zeros(1)  # type: ignore[attr-defined]
    forward, kept = compile(layer.forward, fullgraph=True), []
    for step in range(6):
        forward(ct.full(1, step))
        kept.append(layer.kept)
    assert [0.0, 2.0, 4.0, 6.0, 8.0, 10.0] == [float(array[0]) for array in kept]
    assert "still in use elsewhere: run eagerly" in forward.explain()
    kept.clear()
    hits = forward.hits
    for step in range(3):
        forward(ct.full(1, step))
    assert hits + 2 <= forward.hits


NUMBERS = itertools.count()
ROWS = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
GENERATOR = np.random.default_rng(0)
OBJECTS = np.array([1.0, None], object)
LARGE = np.zeros(1 << 18)
UNGUARDED: dict[str, Callable[[Any], Any]] = {
    "an iterator": lambda x: x * float(next(ROWS)),
    "a counter": lambda x: x * float(next(NUMBERS)),
    "random numbers of Python": lambda x: x * host_random.random(),
    "random choices of Python": lambda x: x * (2.0 if host_random.random() < 2 else 3.0),
    "random numbers of NumPy": lambda x: x * float(np.random.rand()),
    "a generator of NumPy": lambda x: x * float(GENERATOR.random()),
    "an array of objects": lambda x: x * OBJECTS[0],
    "a large array": lambda x: x * float(LARGE[7]),
    "the time": lambda x: x * (float(__import__("time").perf_counter_ns() % 1_000_003)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("what", UNGUARDED)
def test_what_no_guard_can_stand_for_is_no_graph(what: str) -> None:
    compiled = compile(UNGUARDED[what], fullgraph=True)
    x = ct.ones(3)
    compiled(x)
    with pytest.raises(GraphBreakError):
        compiled(x)


def test_a_list_that_is_given_and_changed_is_no_graph() -> None:
    def collects(x: DeviceArray, found: list[Any]) -> DeviceArray:
        found.append(x * 2.0)
        return x + 1.0

    found: list[Any] = []
    compiled = compile(collects)
    for _ in range(4):
        del found[:]
        compiled(ct.ones(2), found)
        assert [[2.0, 2.0]] == [array.get().tolist() for array in found]
    assert "changes a container among its arguments" in compiled.explain()


def test_random_numbers_of_the_device_are_those_of_eager_execution() -> None:
    def drops(x: DeviceArray) -> DeviceArray:
        return random.dropout(x, 0.5)

    compiled, x = compile(drops, fullgraph=True), ct.ones(64)
    found: list[list[Any]] = []
    for function in (drops, compiled):
        for seed in (0, 0, 7):
            random.manual_seed(seed)
            found.append([function(x).get().tolist() for _ in range(4)])
    assert found[:3] == found[3:]


def test_the_state_of_a_generator_is_all_its_numbers() -> None:
    one, other = np.random.RandomState(0), np.random.RandomState(0)
    assert content(one) == content(other)
    name, numbers, *rest = other.get_state()
    numbers[300] += 1
    other.set_state((name, numbers, *rest))
    with np.printoptions(threshold=10):  # their texts are the same
        assert content(one) != content(other)
