"""What a function reads beside the device: facts of its arguments and of its surroundings, and state it can reach.

Arrays in arguments are inputs: their shapes, strides and dtypes are facts. Everything else that the function can reach
(``self``, closures, globals that its code names, objects among the arguments) is state: numbers and strings by value,
arrays and other objects by identity.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np

from cudatool.amp import get_autocast_dtype, is_autocast_cache_enabled, is_autocast_enabled
from cudatool.backends._settings import settings
from cudatool.errors import GraphBreakError
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.device import current_device, get_device_capability

__all__ = ["Facts", "State", "arguments", "environment", "is_constant"]

Facts = dict[str, Any]
"""Guarded facts by what a message calls them."""

_CONSTANTS: Final = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis), np.generic, np.dtype, enum.Enum)
_SMALL: Final = 65536  # bytes of a NumPy array that is guarded by its content
_ABSENT: Final = object()


def is_constant(value: Any) -> bool:
    """Return whether a value is guarded by its type and value."""
    return isinstance(value, _CONSTANTS)


def environment() -> Facts:
    """Return the facts that hold for every function: device, autocast, precision."""
    device = current_device()
    facts: Facts = {"device": device, "capability": get_device_capability(device)}
    facts["autocast"] = (str(get_autocast_dtype()), is_autocast_cache_enabled()) if is_autocast_enabled() else None
    return facts | {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Facts, dict[str, DeviceArray], dict[str, Any]]:
    """Return the facts of arguments, the arrays among them, and the objects whose state counts, each by its path."""
    facts: Facts = {}
    arrays: dict[str, DeviceArray] = {}
    objects: dict[str, Any] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, DeviceArray):
            arrays[path] = value
            layout = value.layout
            facts[path] = ("array", value.shape, str(value.dtype), value.strides, value.device, layout.flags.writeable)
        elif type(value) in (list, tuple, dict):
            parts = list(value.items()) if type(value) is dict else list(enumerate(value))
            facts[path] = (type(value).__name__, tuple(repr(key) for key, _ in parts))
            for key, part in parts:
                visit(f"{path}[{key!r}]", part)
        else:
            facts[path] = _fact(value)
            if not is_constant(value):
                objects[path] = value

    for index, value in enumerate(args):
        visit(f"args[{index}]", value)
    for name, value in sorted(kwargs.items()):
        visit(name, value)
    facts["number of arguments"] = (len(args), tuple(sorted(kwargs)))
    return facts, arrays, objects


def _fact(value: Any) -> Any:
    """Return what stands for a value: equal if the function cannot tell two values apart."""
    if is_constant(value):
        return type(value).__name__, repr(value) if isinstance(value, float | complex | np.generic) else value
    if isinstance(value, slice):
        return repr(value)
    if isinstance(value, np.ndarray) and value.nbytes <= _SMALL and not value.dtype.hasobject:
        return "numpy", value.shape, str(value.dtype), value.tobytes()
    return _Identity(value)


class _Identity:
    """An object, equal to itself alone; it keeps the object, so that no other can have its place."""

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} at {id(self.value):#x}"


@dataclasses.dataclass(slots=True)
class _Slot:
    """A place that holds a value: an attribute, an item, a variable."""

    value: Any
    put: Callable[[Any], None] | None  # sets it; None where it cannot be


class State:
    """All that a function can reach, as it is now."""

    def __init__(self, function: Any, objects: dict[str, Any]) -> None:
        self.slots: dict[str, _Slot] = {}
        self._restore: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}
        self._visit("", function)
        for path, value in objects.items():
            self._visit(path, value)
        self.facts: Facts = {path: _fact(slot.value) for path, slot in self.slots.items()}

    def _slot(self, path: str, value: Any, put: Callable[[Any], None] | None) -> None:
        self.slots[path] = _Slot(value, put)
        self._visit(path, value)

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, DeviceArray) or is_constant(value) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, FunctionType):
            self._function(path, value)
        elif isinstance(value, MethodType):
            self._slot(path + "self" if not path else f"{path}.self", value.__self__, None)
            self._visit(path, value.__func__)
        elif isinstance(value, partial):
            for name in ("func", "args", "keywords"):
                self._visit(f"{path}.{name}", getattr(value, name))
        elif isinstance(value, dict):
            self._mapping(path, value, "{}[{!r}]")
        elif isinstance(value, list):
            copy = list(value)
            self._restore.append(partial(value.__setitem__, slice(None), copy))
            for index, part in enumerate(copy):
                self._slot(f"{path}[{index}]", part, partial(value.__setitem__, index))
        elif isinstance(value, tuple):
            for index, part in enumerate(value):
                self._slot(f"{path}[{index}]", part, None)
        elif isinstance(wrapped := getattr(value, "__dict__", {}).get("__wrapped__"), FunctionType | MethodType):
            self._visit(path, wrapped)
        elif _is_the_programs(value):
            self._mapping(path, vars(value), "{}.{}")
            for kind in type(value).__mro__[:-1]:
                self._class(kind)

    def _class(self, kind: type) -> None:
        """Visit the methods of a class, and what it holds for all its objects."""
        if id(kind) in self._seen or kind.__module__.partition(".")[0] == "cudatool":
            return
        self._seen[id(kind)] = kind
        for name, value in vars(kind).items():
            if isinstance(value, FunctionType):
                self._visit(name, value)
            elif isinstance(value, DeviceArray) or is_constant(value):
                self._slot(f"{kind.__qualname__}.{name}", value, None)

    def _mapping(self, path: str, mapping: dict[Any, Any], form: str) -> None:
        copy = dict(mapping)

        def restore() -> None:
            for key in mapping.keys() - copy.keys():
                del mapping[key]
            for key, part in copy.items():
                if mapping.get(key, _ABSENT) is not part:
                    mapping[key] = part

        self._restore.append(restore)
        for key, part in copy.items():
            self._slot(form.format(path, key), part, partial(mapping.__setitem__, key))

    def _function(self, path: str, function: FunctionType) -> None:
        if function.__module__.partition(".")[0] == "cudatool":
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            put = partial(setattr, cell, "cell_contents")
            self._restore.append(partial(put, value))
            self._slot(f"{path}.{name}" if path else name, value, put)
        for value in function.__defaults__ or ():
            self._visit(f"{path} default", value)
        variables = function.__globals__
        for name in dict.fromkeys(_names(function.__code__)):
            value = variables.get(name, _ABSENT)
            known = f"{function.__module__}.{name}"
            if value is not _ABSENT and not isinstance(value, ModuleType) and known not in self.slots:
                put = partial(variables.__setitem__, name)
                self._restore.append(partial(put, value))
                self._slot(known, value, put)

    def arrays(self, but: frozenset[str]) -> dict[str, DeviceArray]:
        """Return the arrays by path; leave out those in `but`."""
        return {
            path: slot.value
            for path, slot in self.slots.items()
            if isinstance(slot.value, DeviceArray) and not _is_in(path, but)
        }

    def restore(self) -> None:
        """Put everything back as it was."""
        for put in self._restore:
            put()

    def difference(self, other: State, but: frozenset[str] = frozenset()) -> str:
        """Return the path of something that differs in `other`, empty if nothing is; leave out those in `but`."""
        for path in {**self.facts, **other.facts}:
            if self.facts.get(path, _ABSENT) != other.facts.get(path, _ABSENT) and not _is_in(path, but):
                return path
        return ""

    def changed(self, after: State) -> frozenset[str]:
        """Return the slots whose arrays a run has replaced.

        Raises
        ------
        GraphBreakError
            The run has changed something else: a number, or what is there at all.
        """
        found: set[str] = set()
        while path := self.difference(after, frozenset(found)):
            before, now = self.slots.get(path), after.slots.get(path)
            if before is None or now is None or now.put is None or not _alike(before.value, now.value):
                raise GraphBreakError(f"the function changes {path}, which a replay would not change")
            found.add(path)
        return frozenset(found)


def _is_in(path: str, places: frozenset[str]) -> bool:
    """Return whether a path is one of these places, or inside one."""
    return path in places or any(path.startswith((f"{place}.", f"{place}[")) for place in places)


def _alike(before: Any, now: Any) -> bool:
    """Return whether two values differ in the arrays they hold only."""
    if isinstance(before, DeviceArray):
        return isinstance(now, DeviceArray)
    if type(before) is not type(now):
        return False
    if isinstance(before, list | tuple):
        return len(before) == len(now) and all(map(_alike, before, now))
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(_alike(before[key], now[key]) for key in before)
    return bool(_fact(before) == _fact(now))


def _is_the_programs(value: Any) -> bool:
    """Return whether the attributes of an object are state: not of modules, classes, and what others make."""
    if isinstance(value, type | ModuleType) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    module = type(value).__module__
    return module.partition(".")[0] not in ("cudatool", "numpy", "cuda") or module.startswith("cudatool.optim")


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals in a function's code, and in the functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
