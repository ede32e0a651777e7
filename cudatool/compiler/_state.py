"""What a function reads beside the device: facts of its arguments and of its surroundings, and state it can reach.

Arrays in arguments are inputs: their shapes, strides and dtypes are facts. Everything else that the function can reach
(``self``, closures, globals that its code names, objects among the arguments) is state: numbers, strings and the
content of small host containers by value, arrays and other objects by identity (:mod:`cudatool.compiler._values`).

Whether all of it is as it was is asked at each call, so there are two ways: :class:`Looks` compares what each place
holds with what it held, by identity, in some 30 ns a place; only if something differs, a new :class:`ReachableState`
says whether the function can tell.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from operator import is_
from pathlib import PurePath
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from cudatool.amp import autocast, get_autocast_dtype, is_autocast_cache_enabled, is_autocast_enabled
from cudatool.backends._settings import settings
from cudatool.compiler._values import cannot_be_guarded, content, fact, is_constant, restorer
from cudatool.errors import GraphBreakError
from cudatool.ops._dispatch import active_layers
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.device import current_device, get_device_capability

__all__ = ["Facts", "Looks", "ReachableState", "arguments", "environment"]

Facts = dict[str, Any]
"""Guarded facts by what a message calls them."""

_ABSENT: Final = object()
_OURS: Final = ("cudatool", "numpy", "cuda", "ml_dtypes")
_OPEN: Final = ("argparse", "collections", "functools", "threading", "_thread", "types", "weakref")
"""Modules of Python whose objects hold what programs put into them."""
_ENVIRONMENT: Final = ("environ", "environb", "getenv", "getenvb")


def environment() -> Facts:
    """Return the facts that hold for every function: device, autocast, precision, layers of operations."""
    device = current_device()
    others = tuple(
        handler for handler in active_layers() if not isinstance(getattr(handler, "__self__", None), autocast)
    )
    facts: Facts = {"device": device, "capability": get_device_capability(device), "layers": others}
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
            facts[path] = fact(value)
            if not is_constant(value):
                objects[path] = value

    for index, value in enumerate(args):
        visit(f"args[{index}]", value)
    for name, value in kwargs.items():
        visit(name, value)
    facts["number of arguments"] = (len(args), tuple(kwargs))
    return facts, arrays, objects


@dataclasses.dataclass(slots=True)
class _Slot:
    """A place that holds a value: an attribute, an item, a variable."""

    value: Any
    put: Callable[[Any], None] | None  # sets it; None where it cannot be


@dataclasses.dataclass(slots=True)
class _Look:
    """A container: what yields what it holds, and what that was."""

    path: str
    now: Callable[[], Sequence[Any]]
    then: Sequence[Any]

    def is_same(self) -> bool:
        try:
            now = self.now()
        except (AttributeError, ValueError):  # a slot or a variable that was bound is bound no longer
            return False
        return len(now) == len(self.then) and all(map(is_, now, self.then))


class Looks:
    """The places of a :class:`ReachableState`, to be compared quickly with what they held.

    Parameters
    ----------
    but
        Places that may change: each replay sets them.
    """

    def __init__(self, state: ReachableState, but: frozenset[str]) -> None:
        found = [look for look in state.looks if not _is_in(look.path, but)]
        holders = {path.rpartition(end)[0] for path in but for end in (".", "[")}
        self._looks = found
        self._set = [look for look in found if look.path in holders or any(p.startswith(look.path) for p in but)]
        self._contents = [(value, then) for path, value, then in state.contents if not _is_in(path, but)]

    def are_same(self) -> bool:
        """Return whether each place holds the very objects that it held; if not, they may still be equal."""
        return all(look.is_same() for look in self._looks) and all(
            content(value) == then for value, then in self._contents
        )

    def renew(self) -> None:
        """Take what the places hold now that a replay has set."""
        for look in self._set:
            look.then = tuple(look.now())


class ReachableState:
    """All that a function can reach, as it is now.

    Attributes
    ----------
    slots
        The places by path, with what they hold.
    looks, contents
        The same by container, and values with a content of their own: see :class:`Looks`.
    unguarded
        What no fact can stand for, and why: the function cannot be a graph.
    """

    def __init__(self, function: Any, objects: dict[str, Any]) -> None:
        self.slots: dict[str, _Slot] = {}
        self.facts: Facts = {}
        self.looks: list[_Look] = []
        self.contents: list[tuple[str, Any, Any]] = []
        self.unguarded: dict[str, str] = {}
        self._restore: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}
        self._named: set[str] = set()
        self._inside_library = 0
        self._visit("", function)
        for path, value in objects.items():
            self._visit(path, value)
        self.facts = {path: fact(slot.value) for path, slot in self.slots.items()} | self.facts
        # An attribute that no code of the function names may be whatever it is.
        self.unguarded = {
            path: why
            for path, why in self.unguarded.items()
            if path.partition("[")[0].rpartition(".")[2] in self._named
        }

    def _slot(self, path: str, value: Any, put: Callable[[Any], None] | None) -> None:
        self.slots[path] = _Slot(value, put)
        self._visit(path, value)

    def _look(self, path: str, now: Callable[[], Sequence[Any]]) -> None:
        self.looks.append(_Look(path, now, tuple(now())))

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, DeviceArray) or is_constant(value) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, FunctionType):
            self._function(path, value)
        elif isinstance(value, MethodType):
            self._slot(path + "self" if not path else f"{path}.self", value.__self__, None)
            self._visit(path, value.__func__)
        elif isinstance(value, dict):
            self._mapping(path, value, "{}[{!r}]")
        elif isinstance(value, list | deque):
            self._sequence(path, value)
        elif (found := content(value)) is not None:
            self._content(path, value, found)
            for index, part in enumerate(value if isinstance(value, set | frozenset) else ()):
                self._visit(f"{path}{{{index}}}", part)
        elif why := cannot_be_guarded(value):
            self.unguarded |= {} if self._inside_library else {path: why}
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(wrapped := getattr(value, "__dict__", {}).get("__wrapped__"), FunctionType | MethodType):
            self._visit(path, wrapped)
        else:
            self._object(path, value)

    def _object(self, path: str, value: Any) -> None:
        inside = _is_library_module(type(value).__module__)
        self._inside_library += inside
        self._attributes(path, value)
        self._inside_library -= inside

    def _attributes(self, path: str, value: Any) -> None:
        for name, part in _parts(value):
            self._slot(f"{path}{name}", part, None)
        if _is_the_programs(value):
            if isinstance(getattr(value, "__dict__", None), dict):
                self._mapping(path, vars(value), "{}.{}")
            names = [name for kind in type(value).__mro__ for name in _slots_of(kind) if hasattr(value, name)]
            if names:
                self._look(path, partial(_attributes, value, names))
            for name in names:
                put = partial(setattr, value, name)
                self._restore.append(partial(put, getattr(value, name)))
                self._slot(f"{path}.{name}", getattr(value, name), put)
            self.facts[f"{path}[slots]"] = tuple(names)
            if id(type(value)) not in self._seen:
                self._class(type(value))

    def _content(self, path: str, value: Any, found: Any) -> None:
        self.contents.append((path, value, found))
        self.facts[f"{path}[content]"] = found
        if (restore := restorer(value)) is not None:
            self._restore.append(restore)

    def _class(self, kind: type) -> None:
        """Visit what a class of the program, and those that it is derived from, hold for all their objects."""
        for base in kind.__mro__[:-1]:
            if id(base) in self._seen and base is not kind:
                continue
            self._seen[id(base)] = base
            if not _is_program_module(base.__module__):
                continue
            self._look("", partial(_items, vars(base)))
            for name, value in list(vars(base).items()):
                if not (name.startswith("__") and name.endswith("__")) or isinstance(value, FunctionType):
                    self._slot(f"{base.__module__}.{base.__qualname__}.{name}", value, None)

    def _sequence(self, path: str, value: list[Any] | deque[Any]) -> None:
        copy = list(value)
        self._look(path, partial(tuple, value))

        def restore() -> None:
            value.clear()
            value.extend(copy)

        self._restore.append(restore)
        self.facts[f"{path}[length]"] = len(copy)
        for index, part in enumerate(copy):
            self._slot(f"{path}[{index}]", part, partial(value.__setitem__, index))

    def _mapping(self, path: str, mapping: dict[Any, Any], form: str) -> None:
        copy = dict(mapping)
        self._look(path, partial(_items, mapping))

        def restore() -> None:
            if list(mapping) != list(copy):  # in its order, too
                mapping.clear()
                mapping.update(copy)
            for key, part in copy.items():
                if mapping.get(key, _ABSENT) is not part:
                    mapping[key] = part

        self._restore.append(restore)
        self.facts[f"{path}[keys]"] = [fact(key) for key in copy]
        for key, part in copy.items():
            self._slot(form.format(path, key), part, partial(mapping.__setitem__, key))

    def _function(self, path: str, function: FunctionType) -> None:
        module = function.__module__ or ""  # none for what was executed as text
        if not _is_program_module(module):
            return
        self._look(path, partial(_of_function, function))
        self.facts[f"{path}[code]"] = fact(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            value = _content_of(cell)
            if value is _ABSENT:
                continue
            put = partial(setattr, cell, "cell_contents")
            self._restore.append(partial(put, value))
            self._slot(f"{path}.{name}" if path else name, value, put)
        for index, value in enumerate(function.__defaults__ or ()):
            self._slot(f"{path} default {index}", value, None)
        if function.__kwdefaults__:
            self._mapping(f"{path} defaults", function.__kwdefaults__, "{}[{!r}]")
        names = tuple(dict.fromkeys(_names(function.__code__)))
        self._named.update(names, function.__code__.co_freevars, _strings(function.__code__))
        self._names(module, function.__globals__, names, of_module=False)

    def _names(self, module: str, variables: dict[str, Any], names: tuple[str, ...], *, of_module: bool) -> None:
        """Visit the variables of a module that code names; attributes of objects have the same names, by chance."""
        self._look(module, partial(_variables, variables, names))
        for name in names:
            value = variables.get(name, _ABSENT)
            if value is _ABSENT and not of_module:
                value = sys.modules.get(name, _ABSENT)  # imported by the function itself
            known = f"{module}.{name}"
            if isinstance(value, ModuleType):
                self._module(value, names)
            elif value is not _ABSENT and known not in self.slots:
                put = partial(variables.__setitem__, name)
                self._restore.append(partial(put, value))
                if of_module and _is_library_module(module):
                    self.slots[known] = _Slot(value, put)  # which function it is, and not what it reads
                else:
                    self._slot(known, value, put)

    def _module(self, module: ModuleType, names: tuple[str, ...]) -> None:
        if id(module) in self._seen:
            return
        self._seen[id(module)] = module
        if module is os and not set(names).isdisjoint(_ENVIRONMENT):
            self._look("os.environ", partial(_items, os.environ._data))  # type: ignore[attr-defined]
            self.facts["os.environ"] = dict(os.environ)
        self._names(module.__name__, vars(module), names, of_module=True)

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

    def difference(self, other: ReachableState, but: frozenset[str] = frozenset()) -> str:
        """Return the path of something that differs in `other`, empty if nothing is; leave out those in `but`."""
        for path in {**self.facts, **other.facts}:
            if self.facts.get(path, _ABSENT) != other.facts.get(path, _ABSENT) and not _is_in(path, but):
                return path
        return ""

    def changed(self, after: ReachableState) -> frozenset[str]:
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
        return list(before) == list(now) and all(_alike(before[key], now[key]) for key in before)
    return bool(fact(before) == fact(now))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what objects of Python hold that has no place that could be set."""
    if isinstance(value, tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, partial):
        yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, property):
        yield from ((f".{name}", getattr(value, name)) for name in ("fget", "fset"))
    elif isinstance(value, staticmethod | classmethod):
        yield ".__func__", value.__func__
    elif isinstance(value, cached_property):
        yield ".func", value.func
    elif isinstance(value, weakref.ref):
        yield "()", value()


def _is_the_programs(value: Any) -> bool:
    """Return whether the attributes of an object are state: not of modules, and what libraries make."""
    if isinstance(value, ModuleType | tuple | partial | property | staticmethod | classmethod | weakref.ref):
        return False
    module = type(value).__module__
    return _is_program_module(module) or module in _OPEN or module.startswith("cudatool.optim")


def _is_program_module(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in _OURS and (top == "__main__" or top not in sys.stdlib_module_names)


@cache
def _is_library_module(module: str) -> bool:
    """Return whether a module is one that was installed, or Python's, rather than the program's."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not _is_program_module(module) or bool({"site-packages", "dist-packages"} & set(PurePath(file).parts))


def _slots_of(kind: type) -> list[str]:
    """Return the attributes that a class declares in ``__slots__``, by their names in the object."""
    declared = vars(kind).get("__slots__", ())
    names = [declared] if isinstance(declared, str) else list(declared)
    private = f"_{kind.__name__.lstrip('_')}"
    hidden = [private + name if name.startswith("__") and not name.endswith("__") else name for name in names]
    return [name for name in hidden if name not in ("__dict__", "__weakref__")]


def _items(mapping: Mapping[Any, Any]) -> Sequence[Any]:
    return [*mapping, *mapping.values()]


def _attributes(value: Any, names: list[str]) -> Sequence[Any]:
    return [getattr(value, name) for name in names]


def _of_function(function: FunctionType) -> Sequence[Any]:
    cells = [_content_of(cell) for cell in function.__closure__ or ()]
    return [function.__code__, function.__defaults__, function.__kwdefaults__, *cells]


def _content_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return _ABSENT


def _variables(variables: dict[str, Any], names: tuple[str, ...]) -> Sequence[Any]:
    return [variables.get(name, _ABSENT) for name in names]


def _strings(code: CodeType) -> Iterator[str]:
    """Yield the strings in a function's code, by which it may ask for attributes."""
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _strings(constant)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals in a function's code, and in the functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
