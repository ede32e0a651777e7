"""What owns something of the driver's."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["Owner"]


class Owner:
    """Base of what gives a handle of the driver's back at its end: a copy would do so a second time, so there is none.

    Events can be sent to other processes nevertheless (:mod:`cudatool.multiprocessing`).
    """

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled: it owns a resource of the driver")
