"""Failed requests of CuPy and JAX, against stand-ins whose exceptions are made as theirs are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from cudatool.collect.library_failures import LibraryFailures, bytes_requested
from cudatool.trace import hooks, stacks
from cudatool.trace.events import FREE_UNKNOWN, Event, Kind

Seen = list[tuple[int, ...]]


def _cupy() -> ModuleType:
    """CuPy's module of memory, with its class of exceptions."""

    class OutOfMemoryError(MemoryError):
        def __init__(self, size: int, total: int, limit: int = 0) -> None:
            super().__init__(f"Out of memory allocating {size:,} bytes")

    memory = ModuleType("cupy.cuda.memory")
    memory.OutOfMemoryError = OutOfMemoryError
    return memory


def _jax() -> ModuleType:
    """JAX; its class of exceptions has no initializer of its own."""
    jax = ModuleType("jax")
    jax.errors = SimpleNamespace(JaxRuntimeError=type("JaxRuntimeError", (RuntimeError,), {}))
    return jax


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    cupy, memory, jax = ModuleType("cupy"), _cupy(), _jax()
    cupy.cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 1, memGetInfo=lambda: (5000, 9000)))
    for module in (cupy, memory, jax, ModuleType("jax_cuda13_plugin")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return SimpleNamespace(memory=memory, jax=jax)


@pytest.fixture
def watched(loaded: SimpleNamespace) -> Iterator[tuple[SimpleNamespace, Seen, list[Event]]]:
    seen: Seen = []
    events: list[Event] = []
    failures = LibraryFailures(lambda *facts: seen.append(facts))
    hooks.subscribe(events.append)
    failures.start()
    try:
        yield loaded, seen, events
    finally:
        failures.stop()
        hooks.unsubscribe(events.append)


def _failed(events: list[Event]) -> list[Event]:
    return [event for event in events if event.kind is Kind.LIBRARY_OOM]


def test_cupys_failure_is_reported_before_the_program_catches_it(watched) -> None:
    loaded, seen, events = watched
    with pytest.raises(MemoryError, match="allocating 7,000 bytes"):
        raise loaded.memory.OutOfMemoryError(7000, 100, limit=6000)
    (event,) = _failed(events)
    assert [(1, 7000, 6000, 5000)] == seen
    assert (1, 7000, 5000, 6000, 0, "CuPy") == (
        event.device,
        event.size,
        event.aux0,
        event.aux1,
        event.flags,
        event.name,
    )
    assert stacks.frames(event.stack)[0].function.endswith(
        "test_cupys_failure_is_reported_before_the_program_catches_it"
    )


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        (("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.", 8), 8589934592),
        (("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.50GiB.",), 3 << 29),
        (("whatever it says", 8), 0),
    ],
)
def test_jaxs_failure_is_known_by_its_status(watched, arguments: tuple[object, ...], size: int) -> None:
    loaded, seen, events = watched
    with pytest.raises(RuntimeError):
        raise loaded.jax.errors.JaxRuntimeError(*arguments)
    (event,) = _failed(events)
    assert [(0, size, 0, 0)] == seen
    assert (FREE_UNKNOWN, "JAX") == (event.flags, event.name)


@pytest.mark.parametrize("arguments", [("INTERNAL: RESOURCE_EXHAUSTED:", 13), ("INVALID_ARGUMENT: no",), ()])
def test_other_errors_of_jax_are_none(watched, arguments: tuple[object, ...]) -> None:
    loaded, seen, events = watched
    with pytest.raises(RuntimeError):
        raise loaded.jax.errors.JaxRuntimeError(*arguments)
    assert ([], []) == (seen, _failed(events))


def test_jax_without_a_gpu_fails_in_the_hosts_memory(watched, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, seen, _ = watched
    monkeypatch.delitem(sys.modules, "jax_cuda13_plugin")
    loaded.jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.", 8)
    assert [] == seen


def test_after_the_end_the_classes_are_as_they_were(loaded: SimpleNamespace) -> None:
    classes = (loaded.memory.OutOfMemoryError, loaded.jax.errors.JaxRuntimeError)
    before, seen = [one.__init__ for one in classes], []
    failures = LibraryFailures(lambda *facts: seen.append(facts))
    failures.start()
    assert [one.__init__ for one in classes] != before
    failures.stop()
    classes[0](1, 2)
    classes[1]("RESOURCE_EXHAUSTED: x", 8)
    assert ([one.__init__ for one in classes], []) == (before, seen)


def test_an_amount_that_jax_does_not_say_is_zero() -> None:
    assert 0 == bytes_requested("RESOURCE_EXHAUSTED: too many open files")
    assert 3 << 20 == bytes_requested("trying to allocate 3.0MiB")


@pytest.mark.parametrize("module", ["jax", "cupy.cuda.memory"])
def test_a_version_without_the_exceptions_class_is_left_alone(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    watched = LibraryFailures(lambda *facts: None)
    watched.start()
    watched.stop()
    assert {name for name in vars(sys.modules[module]) if not name.startswith("__")} == set()
