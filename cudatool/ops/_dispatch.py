"""The dispatcher: one table, operation x kind of device -> implementation, and layers in front of it.

::

    mm = op("cudatool.blas.mm")

    @mm.implementation("cuda")
    def _(a, b, *, out=None):
        '''Return the matrix product.'''

    mm(a, b)          # traced as cudatool.blas.mm; runs the layers of this thread, then the implementation

A layer sees every operation that the thread calls while it is active, and decides what is called below::

    def in_half(op, args, kwargs):
        return op.redispatch(*[as_half(a) for a in args], **kwargs)

    with layer(in_half):
        mm(a, b)

While a layer runs, it and those above it are off: what it calls itself, and what implementations call, reaches only
the layers below. The last one entered runs first.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, TypeVar

from cudatool import _driver
from cudatool.errors import MissingImplementationError, UsageError
from cudatool.runtime.traced_calls import record_call
from cudatool.trace import hooks

__all__ = ["KINDS", "Handler", "Op", "active_layers", "layer", "op", "registered"]

KINDS: Final = ("cuda", "sim")
"""Kinds of device: a GPU, the software device."""

Handler = Callable[["Op", tuple[Any, ...], dict[str, Any]], Any]
"""What a layer runs instead of an operation: the operation, its arguments, its keyword arguments -> its result."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Layers(threading.local):
    stack: tuple[Handler, ...] = ()  # the last one entered is the last


_layers = _Layers()
_ops: dict[str, Op] = {}


class Op:
    """An operation with one implementation for each kind of device; made by :func:`op`.

    It looks like a function: name, documentation and signature are those of its first implementation.

    Attributes
    ----------
    name
        What programs call it: ``"cudatool.blas.mm"``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.__module__, _, self.__qualname__ = name.rpartition(".")
        self.__name__ = self.__qualname__
        self.__traced__ = True
        self._table: dict[str, Callable[..., Any]] = {}
        self._chosen: Callable[..., Any] | None = None  # of the table, for the device of this process

    def implementation(self, *kinds: str) -> Callable[[_Function], _Function]:
        """Return a decorator that registers a function for kinds of device (:data:`KINDS`), in place of any before.

        Raises
        ------
        UsageError
            There is no such kind.
        """
        if not kinds or not set(kinds) <= set(KINDS):
            raise UsageError(f"{self.name}: kinds of device are {' and '.join(KINDS)}, not {kinds}")

        def register(function: _Function) -> _Function:
            if not self._table:
                self.__doc__ = function.__doc__
                self.__signature__ = inspect.signature(function)
            if getattr(function, "__qualname__", "") == "_":
                function.__qualname__ = self.name  # which Python's messages about wrong arguments tell
            self._table.update(dict.fromkeys(kinds, function))
            self._chosen = None
            return function

        return register

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of device that have an implementation."""
        return tuple(kind for kind in KINDS if kind in self._table)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if hooks.active:
            return record_call(self.name, self.redispatch, args, kwargs)
        if _layers.stack:
            return self.redispatch(*args, **kwargs)
        return (self._chosen or self._choose())(*args, **kwargs)  # as redispatch, whose call would cost more than this

    def redispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Call what lies below the layer that calls this: the next layer, or else the implementation.

        Raises
        ------
        MissingImplementationError
            There is none for the kind of device that this process uses.
        """
        stack = _layers.stack
        if not stack:
            return (self._chosen or self._choose())(*args, **kwargs)
        _layers.stack = stack[:-1]
        try:
            return stack[-1](self, args, kwargs)
        finally:
            _layers.stack = stack

    def _choose(self) -> Callable[..., Any]:
        kind = _driver.initialize().kind
        try:
            self._chosen = self._table[kind]
        except KeyError:
            raise MissingImplementationError(self.name, kind, self.kinds) from None
        return self._chosen

    def __reduce__(self) -> str:
        return self.__qualname__  # pickled as a function is, by its name

    def __repr__(self) -> str:
        return f"<Op {self.name}: {', '.join(self.kinds) or 'no implementation'}>"


def op(name: str) -> Op:
    """Return the operation of this name; the first call makes it."""
    found = _ops.get(name) if isinstance(name, str) else None
    if found is None:
        if not isinstance(name, str) or "." not in name:
            raise UsageError(f"an operation is named as programs call it, with its package, not {name!r}")
        found = _ops[name] = Op(name)
    return found


def active_layers() -> tuple[Handler, ...]:
    """Return the handlers of the layers that the calling thread is in."""
    return _layers.stack


def registered() -> Mapping[str, Op]:
    """Return the operations of all imported modules, by name."""
    return dict(_ops)


class layer:  # noqa: N801 - reads as a statement
    """Context manager: `handler` runs in place of every operation that this thread calls inside.

    Parameters
    ----------
    handler
        Called with operation, arguments and keyword arguments; what it returns is the operation's result. It calls
        ``op.redispatch`` for what lies below it, as often as it likes.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self._before: dict[int, list[tuple[Handler, ...]]] = {}  # by thread: one entry for each time it is entered

    def __enter__(self) -> layer:
        self._before.setdefault(threading.get_ident(), []).append(_layers.stack)
        _layers.stack = (*_layers.stack, self.handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _layers.stack = self._before[threading.get_ident()].pop()
