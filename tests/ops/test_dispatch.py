"""The dispatcher: operations, implementations by kind of device, layers."""

from __future__ import annotations

import inspect
import pickle
import threading

import pytest

from cudatool.errors import MissingImplementationError, UsageError
from cudatool.ops import Op, _dispatch, layer, op, registered


@pytest.fixture
def add(monkeypatch, device):
    """An operation on this device that is gone after the test."""
    monkeypatch.setattr(_dispatch, "_ops", {})
    made = op("cudatool.tests.add")

    @made.implementation(device)
    def _(a, b, *, scale=1):
        """Return a sum."""
        return (a + b) * scale

    return made


def test_a_call_runs_the_implementation_of_this_device(add, device):
    @add.implementation("sim" if device == "cuda" else "cuda")
    def _(a, b, *, scale=1):
        raise AssertionError

    assert 6 == add(1, 2, scale=2)
    assert ("cuda", "sim") == add.kinds


def test_an_implementation_may_be_for_both_kinds(add):
    @add.implementation("cuda", "sim")
    def _(a, b):
        return "both"

    assert "both" == add(1, 2)


def test_an_operation_exists_once(add):
    assert add is op("cudatool.tests.add")
    assert {"cudatool.tests.add": add} == registered()


def test_a_missing_entry_names_operation_kind_and_what_is_there(monkeypatch, device):
    monkeypatch.setattr(_dispatch, "_ops", {})
    other = "sim" if device == "cuda" else "cuda"
    lonely = op("cudatool.tests.lonely")
    with pytest.raises(MissingImplementationError, match=f"lonely has no .* for {device} devices; there is none"):
        lonely()
    lonely.implementation(other)(print)
    with pytest.raises(NotImplementedError, match=f"for {device} devices; there is one for {other};") as caught:
        lonely()
    again = pickle.loads(pickle.dumps(caught.value))
    assert ("cudatool.tests.lonely", device, (other,)) == (again.op, again.kind, again.kinds)
    lonely.implementation(device)(int)
    assert 0 == lonely()


def test_there_are_no_other_kinds_of_device(add):
    for kinds in ((), ("rocm",)):
        with pytest.raises(UsageError, match="cuda and sim"):
            add.implementation(*kinds)
    with pytest.raises(UsageError, match="'add'"):
        op("add")


def test_a_layer_sees_the_call_and_decides_what_is_called(add):
    seen = []

    def double(op, args, kwargs):
        seen.append((op, args, kwargs))
        return op.redispatch(*[2 * a for a in args], **kwargs)

    with layer(double):
        assert 18 == add(1, 2, scale=3)
    assert [(add, (1, 2), {"scale": 3})] == seen
    assert 3 == add(1, 2)


def test_the_last_layer_entered_runs_first(add):
    order = []

    def named(name):
        def handler(op, args, kwargs):
            order.append(name)
            return op.redispatch(*args, **kwargs)

        return layer(handler)

    with named("outer"), named("inner"):
        add(1, 2)
    assert ["inner", "outer"] == order


def test_what_a_layer_calls_reaches_only_the_layers_below(add):
    calls = []

    def below(op, args, kwargs):
        calls.append(args)
        return op.redispatch(*args, **kwargs)

    def above(op, args, kwargs):
        return op(*args) + op.redispatch(*args)  # neither comes here again

    with layer(below), layer(above):
        assert 6 == add(1, 2)
        assert 6 == add(1, 2)
    assert 4 * [(1, 2)] == calls


def test_what_an_implementation_calls_below_a_layer_is_not_seen_by_it(add, device):
    outer = op("cudatool.tests.outer")
    outer.implementation(device)(lambda: add(1, 2))
    seen = []

    def watch(op, args, kwargs):
        seen.append(op.name)
        return op.redispatch(*args, **kwargs)

    with layer(watch):
        assert 3 == outer()
    assert ["cudatool.tests.outer"] == seen


def test_one_layer_can_be_entered_twice(add):
    again = layer(lambda op, args, kwargs: op.redispatch(*args) + 10)
    with again:
        with again:
            assert 23 == add(1, 2)
        assert 13 == add(1, 2)
    assert 3 == add(1, 2)


def test_layers_are_back_after_an_error(add):
    def fail(op, args, kwargs):
        raise KeyError

    with layer(fail):
        for _ in range(2):
            with pytest.raises(KeyError):
                add(1, 2)
    assert 3 == add(1, 2)


def test_layers_belong_to_their_thread(add):
    results = []
    with layer(lambda op, args, kwargs: None):
        thread = threading.Thread(target=lambda: results.append(add(1, 2)))
        thread.start()
        thread.join()
        assert add(1, 2) is None
    assert [3] == results


def test_threads_that_share_a_layer_each_get_back_their_own(add, shared_by_threads):
    outer, shared = layer(lambda op, args, kwargs: "outer"), layer(lambda op, args, kwargs: "shared")
    assert [3, "outer"] == shared_by_threads(shared, outer, lambda: add(1, 2))


def test_a_call_is_told_once_under_the_operations_name(add, calls):
    with layer(lambda op, args, kwargs: op.redispatch(*args)):
        add(1, 2)
    assert [("cudatool.tests.add", 0)] == [(event.name, event.aux1) for event in calls]
    assert "test_dispatch" in str(_frames(calls[0].stack)[0])


def _frames(stack):
    from cudatool.trace import stacks

    return stacks.frames(stack)


def test_an_operation_looks_like_its_first_implementation(add):
    assert ("add", "cudatool.tests", "Return a sum.") == (add.__name__, add.__module__, add.__doc__)
    assert ["a", "b", "scale"] == list(inspect.signature(add).parameters)
    assert isinstance(add, Op)
    assert "<Op cudatool.tests.add: " in repr(add)
