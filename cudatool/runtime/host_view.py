"""Host arrays whose every use is recorded: what the host reads and writes in memory that the device can reach.

What NumPy does with a :class:`HostArray` comes through one of four doors, and each has a rule::

    indexing           by integers, slices, fields: the elements named; by arrays: at most all of them
    ufuncs             inputs are read, outputs written; so operators, also in place, most reductions, and ``out=``
    methods            _METHODS; the others make views, or end in a ufunc
    NumPy's functions  _VIEWS touch nothing, _WRITERS write their first argument, _WHOLE read all they are given;
                       any other reads at most what it is given; ``out=`` is written

"At most" is recorded as inexact, and gives no certain findings.

Not seen is what reads memory past NumPy: ``memoryview``, ``ctypes``, other libraries' C code, ``np.random`` with
``out=``, and arrays that ``np.asarray`` makes, which are plain ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import EllipsisType
from typing import Any, Final

import numpy as np

from cudatool.errors import UsageError
from cudatool.runtime.extents import emit_extents, extents
from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, Kind

__all__ = ["HostArray", "host_view"]

_READ, _WRITE, _INEXACT = AccessFlag.READ, AccessFlag.WRITE, AccessFlag.INEXACT
_SOME: Final = _READ | _INEXACT


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_METHODS: Final[dict[str, AccessFlag]] = {
    # What they do with the elements of the array. A result that is a view of it has read nothing.
    **dict.fromkeys(
        _words(
            "argmax argmin argpartition argsort astype copy cumprod cumsum dot dump dumps flatten nonzero ravel repeat "
            "reshape round tobytes tofile tolist __bool__ __complex__ __copy__ __deepcopy__ __float__ __format__ "
            "__index__ __int__ __reduce__ __reduce_ex__ __repr__ __str__"
        ),
        _READ,
    ),
    **dict.fromkeys(_words("choose compress item searchsorted take trace"), _SOME),
    "fill": _WRITE,
    **dict.fromkeys(_words("put setfield"), _WRITE | _INEXACT),
    **dict.fromkeys(_words("partition sort"), _READ | _WRITE),
    "byteswap": _READ | _WRITE | _INEXACT,  # in place or not
}

_VIEWS: Final = _words(
    "array_split atleast_1d atleast_2d atleast_3d broadcast_arrays broadcast_to can_cast common_type diagonal dsplit "
    "einsum_path empty_like expand_dims flip fliplr flipud hsplit imag iscomplexobj isrealobj matrix_transpose "
    "may_share_memory min_scalar_type moveaxis ndim ones_like permute_dims real result_type rollaxis rot90 shape "
    "shares_memory size split squeeze swapaxes transpose unstack vsplit zeros_like"
)
_WRITERS: Final = {
    # function -> what it does with its first argument; the others are read
    "copyto": _WRITE,
    "fill_diagonal": _WRITE | _INEXACT,
    "place": _WRITE | _INEXACT,
    "put": _WRITE | _INEXACT,
    "put_along_axis": _WRITE | _INEXACT,
    "putmask": _WRITE | _INEXACT,
}
_WHOLE: Final = _words(
    "all allclose amax amin angle any append argmax argmin argpartition argsort argwhere around array2string "
    "array_repr array_str astype average bincount block clip column_stack concat concatenate convolve copy corrcoef "
    "correlate count_nonzero cov cross cumprod cumsum cumulative_prod cumulative_sum diff digitize dot dstack "
    "einsum fix flatnonzero gradient histogram hstack inner interp isclose kron lexsort max mean median min nancumprod "
    "nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar nonzero outer packbits pad partition "
    "percentile prod ptp quantile ravel repeat reshape roll round save savetxt savez savez_compressed sinc sort stack "
    "std sum tensordot tile trapezoid unique unpackbits var vdot vstack where"
)


class HostArray(np.ndarray[Any, Any]):
    """A NumPy array whose reads and writes are recorded while a trace records accesses; made by :func:`host_view`.

    Views of it are of its kind, copies and results are plain arrays.
    """

    def __getitem__(self, index: Any) -> Any:
        plain = _plain(self)
        result = plain[_map(_plain_if_ours, index)]
        if isinstance(result, np.ndarray) and _basic(index):
            return result.view(HostArray)
        if hooks.wants_accesses:
            _record(_ours(index), _READ)
            if _basic(index):
                _record([_element(plain, index)], _READ)
            else:
                _record([self], _SOME)
        return result

    def __setitem__(self, index: Any, value: Any) -> None:
        plain = _plain(self)
        if hooks.wants_accesses:
            _record([*_ours(index), *_ours(value)], _READ)
            if _basic(index):
                _record([_element(plain, index)], _WRITE)
            else:
                _record([self], _WRITE | _INEXACT)
        plain[_map(_plain_if_ours, index)] = _plain_if_ours(value)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        result = getattr(ufunc, method)(*map(_plain_if_ours, inputs), **_map(_plain_if_ours, kwargs))
        out = kwargs.get("out", ())
        if hooks.wants_accesses:
            inexact = _INEXACT if kwargs.get("where", True) is not True or method == "reduceat" else AccessFlag(0)
            if method == "at":  # changes the elements of its first input that the second one names
                _record(_ours(inputs[:1]), _SOME | _WRITE)
                inputs = inputs[1:]
            written = _ours(out)
            in_place = [array for array in _ours(inputs) if any(array is other for other in written)]
            _record([array for array in _ours(inputs) if not _among(array, in_place)], _READ | inexact)
            _record([array for array in written if not _among(array, in_place)], _WRITE | inexact)
            _record(in_place[:1], _READ | _WRITE | inexact)
            _record(_ours(kwargs.get("where")), _READ)
        return result if not out else out[0] if len(out) == 1 else out

    def __array_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Iterable[Any], kwargs: Any
    ) -> Any:
        args = tuple(args)
        result = func(*_map(_plain_if_ours, args), **_map(_plain_if_ours, kwargs))
        given, out = _ours((args, {key: value for key, value in kwargs.items() if key != "out"})), kwargs.get("out")
        if out is not None:
            result = out
        name = func.__name__ if func.__module__ == "numpy" else ""
        if hooks.wants_accesses and name not in _VIEWS:
            inexact = AccessFlag(0) if name in _WHOLE and "where" not in kwargs else _INEXACT
            if name in _WRITERS:
                target = args[0] if args else kwargs.get("dst", kwargs.get("a", kwargs.get("arr")))
                masked = AccessFlag(0) if "where" not in kwargs and len(args) < 4 else _INEXACT
                _record(_ours(target), _WRITERS[name] | masked)
                _record([array for array in given if array is not target], _READ | masked)
            elif not _is_view(result, given):
                _record(given, _READ | inexact)
            _record(_ours(out), _WRITE | inexact & (_INEXACT if "where" in kwargs else AccessFlag(0)))
        return _map(functools.partial(_as_ours, given), result)

    @property
    def flat(self) -> Any:
        """An iterator over the elements; what it is used for is not seen."""
        if hooks.wants_accesses:
            _record([self], _SOME | _WRITE)
        return _plain(self).flat

    @flat.setter
    def flat(self, value: Any) -> None:
        if hooks.wants_accesses:
            _record([self], _WRITE)
        _plain(self).flat = value  # type: ignore[misc]  # NumPy's stubs do not know that it can be set


def _method(name: str, mode: AccessFlag) -> Callable[..., Any]:
    original = getattr(np.ndarray, name)

    @functools.wraps(original)
    def method(self: HostArray, *args: Any, **kwargs: Any) -> Any:
        result = original(_plain(self), *_map(_plain_if_ours, args), **_map(_plain_if_ours, kwargs))
        if hooks.wants_accesses:
            out = kwargs.get("out")
            if not _is_view(result, [self]):
                _record([self], mode & ~_INEXACT if self.size == 1 else mode)
            _record([array for array in _ours((args, kwargs)) if array is not out], _READ)
            _record(_ours(out), _WRITE)
        return _as_ours([self], result)

    return method


for _name, _mode in _METHODS.items():
    setattr(HostArray, _name, _method(_name, _mode))


def host_view(array: Any) -> HostArray:
    """Return a view of a host array through which every read and write is recorded, for the sanitizer.

    The arrays of :func:`cudatool.empty_pinned` and :func:`cudatool.pin_memory` are of this kind already if they are
    made while accesses are recorded.

    Parameters
    ----------
    array
        A NumPy array in pinned or managed memory, or anything with ``__dlpack__`` in such memory, for example a
        :class:`cuda.core.Buffer`. Pageable memory can be given too, but only the host uses it.

    Raises
    ------
    UsageError
        It is no array, or one that the host cannot read.
    """
    if isinstance(array, np.ndarray):
        return array.view(HostArray)
    try:
        return np.from_dlpack(array).view(HostArray)
    except (AttributeError, BufferError, RuntimeError, TypeError) as error:
        raise UsageError(f"{type(array).__name__} is no array in memory of the host: {error}") from error


def _record(arrays: Iterable[np.ndarray[Any, Any]], mode: AccessFlag) -> None:
    for array in arrays:
        emit_extents(Kind.HOST_ACCESS, extents(array), mode)


def _plain(array: HostArray) -> np.ndarray[Any, Any]:
    return array.view(np.ndarray)


def _plain_if_ours(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, HostArray) else value


def _as_ours(ours: list[HostArray], result: Any) -> Any:
    """Return a result that is a view of one of ours as one of ours, any other as it is."""
    if type(result) is np.ndarray and _is_view(result, ours):
        return result.view(HostArray)
    return result


def _is_view(result: Any, ours: list[HostArray]) -> bool:
    parts = result if isinstance(result, list | tuple) else [result]
    return any(isinstance(part, np.ndarray) and np.may_share_memory(part, one) for part in parts for one in ours)


def _among(array: HostArray, others: list[HostArray]) -> bool:
    return any(array is other for other in others)


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with `change` applied to all that is in lists, tuples and dictionaries."""
    if isinstance(value, list):
        return [_map(change, item) for item in value]
    if type(value) is tuple:
        return tuple(_map(change, item) for item in value)
    if isinstance(value, dict):
        return {key: _map(change, item) for key, item in value.items()}
    return change(value)


def _ours(value: Any) -> list[HostArray]:
    """Return the arrays of ours in nested lists, tuples and dictionaries."""
    found: list[HostArray] = []
    _map(lambda item: found.append(item) if isinstance(item, HostArray) else None, value)
    return found


def _basic(index: Any) -> bool:
    """Return whether an index gives a view of exactly the elements that it names."""
    parts = index if isinstance(index, tuple) else (index,)
    if isinstance(index, str) or (isinstance(index, list) and all(isinstance(part, str) for part in index)):
        return True  # fields of a structured array
    return all(
        part is None
        or isinstance(part, slice | EllipsisType)
        or (hasattr(part, "__index__") and not isinstance(part, bool | np.bool | np.ndarray))
        for part in parts
    )


def _element(plain: np.ndarray[Any, Any], index: Any) -> np.ndarray[Any, Any]:
    """Return what a basic index names as a view, even if it is a single element."""
    if isinstance(index, str | list):
        return plain[index]
    parts = index if isinstance(index, tuple) else (index,)
    return plain[parts if Ellipsis in parts else (*parts, ...)]
