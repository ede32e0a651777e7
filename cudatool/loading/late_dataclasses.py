"""Dataclasses that are made when the first object of theirs is.

To make a dataclass takes half a millisecond, most of it to compile the source of its methods, and :mod:`dataclasses`
takes 7 ms to load. The software device declares forty of them where it starts, and most programs use none. They are
declared as others are, but without slots: a class that has some would be another one once it is made.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass", "field", "replace"]

if TYPE_CHECKING:
    from dataclasses import dataclass, field, replace
else:
    _lock = threading.RLock()
    _declared: dict[type, dict[str, Any]] = {}  # those that are not made, and their options
    _OF_NO_COPY = frozenset({"__init__", "__dict__", "__weakref__"})

    class _Field:
        def __init__(self, **options: Any) -> None:
            self.options = options

    def field(**options: Any) -> Any:
        """As :func:`dataclasses.field`."""
        return _Field(**options)

    def replace(instance: Any, **changes: Any) -> Any:
        """As :func:`dataclasses.replace`."""
        import dataclasses  # loaded by then: there is an object

        return dataclasses.replace(instance, **changes)

    def dataclass(**options: Any) -> Any:
        """As :func:`dataclasses.dataclass`."""

        def declare(cls: type) -> type:
            def first(self: Any, *given: Any, **named: Any) -> None:
                _make(cls)
                cls.__init__(self, *given, **named)

            cls.__init__ = first
            _declared[cls] = options
            return cls

        return declare

    def _make(cls: type) -> None:
        import dataclasses  # takes a while to load

        with _lock:
            for base in reversed(cls.__mro__):  # a dataclass has the fields of those that it is made of
                options = _declared.get(base)
                if options is None:
                    continue
                for name, value in list(vars(base).items()):
                    if isinstance(value, _Field):
                        setattr(base, name, dataclasses.field(**value.options))
                # Its __init__ comes of a copy: until it has that one, the first objects of other threads wait here.
                parts = {name: value for name, value in vars(base).items() if name not in _OF_NO_COPY}
                copy = dataclasses.dataclass(**options)(type(base.__name__, base.__bases__, parts))
                dataclasses.dataclass(**options, init=False)(base)
                base.__init__ = copy.__init__
                del _declared[base]
