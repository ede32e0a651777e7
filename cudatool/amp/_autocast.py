"""Autocast: a layer in front of every operation that casts what goes in."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cudatool.amp._policy import POLICIES, CastPolicy
from cudatool.errors import UsageError
from cudatool.ops import Op, layer
from cudatool.optim._optimizers import is_parameter
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.capture import capture_id
from cudatool.runtime.dtypes import as_dtype, is_number
from cudatool.runtime.multi_tensor import empty_alike
from cudatool.runtime.stream import current_stream
from cudatool.runtime.traced_calls import traced

__all__ = [
    "autocast",
    "check_device_type",
    "clear_autocast_cache",
    "custom_fwd",
    "get_autocast_dtype",
    "is_autocast_cache_enabled",
    "is_autocast_enabled",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_FLOAT32: Final = np.dtype(np.float32)
_LOWER: Final = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_DIVISION: Final = "cudatool.ops.div"
_ELIGIBLE: Final = (_FLOAT32, *_LOWER)  # float64 was asked for and stays


class _Thread(threading.local):
    """The regions that the calling thread is in, and the parameters they have cast."""

    def __init__(self) -> None:
        self.regions: list[autocast] = []  # the innermost, which counts, is the last
        # By id, dtype and capture: the parameter, which is kept so that its id stays its own, and the result.
        self.cache: dict[tuple[int, np.dtype[Any], int], tuple[DeviceArray, DeviceArray]] = {}

    @property
    def region(self) -> autocast | None:
        return self.regions[-1] if self.regions else None


_thread = _Thread()


class autocast:  # noqa: N801 - torch's name
    """Run operations inside in the precision that suits each: ``torch.autocast("cuda", ...)``.

    A context manager, and a decorator. Products of matrices run in `dtype`, what overflows or sums runs in float32,
    and what combines arrays runs in the widest of theirs (:class:`~cudatool.amp._policy.CastPolicy`); the rest, and
    float64, is left alone, and so is a call with ``out=``. Regions nest; one that is not enabled is free of autocast.
    It holds for the calling thread, and for calls by programs: what an operation calls itself is not cast again.

    Parameters
    ----------
    device_type
        ``"cuda"``, as every array is on such a device.
    dtype
        float16 or bfloat16; default: that of the region around, or float16.
    enabled
        Whether to cast.
    cache_enabled
        Keep what a float32 parameter, which is an array that an optimizer has, was cast to, until the thread leaves
        its outermost region; default: as the region around, or True. A parameter must not be changed meanwhile.

    Raises
    ------
    UsageError
        `device_type` or `dtype` is none of these.
    """

    dtype: np.dtype[Any]
    enabled: bool
    cache_enabled: bool

    def __init__(
        self,
        device_type: str = "cuda",
        dtype: npt.DTypeLike | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        check_device_type(device_type)
        around = _thread.region
        self.dtype = _lower(dtype) if dtype is not None else around.dtype if around else _LOWER[0]
        self.enabled = enabled
        self.cache_enabled = (around is None or around.cache_enabled) if cache_enabled is None else cache_enabled
        self._layer = layer(self._run)

    def __enter__(self) -> autocast:
        self._layer.__enter__()
        _thread.regions.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self not in _thread.regions:
            raise UsageError("this autocast region is left before it is entered, or on another thread; use with")
        _thread.regions.pop()
        self._layer.__exit__(kind, error, traceback)
        if not _thread.regions:
            _thread.cache.clear()

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        if not callable(function):
            raise UsageError(f"autocast()(function) decorates a function, not {type(function).__name__}; use with")

        @functools.wraps(function)
        def cast(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self:
                return function(*args, **kwargs)

        return cast

    def _run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        policy = POLICIES.get(op.name)
        if op.name == _DIVISION and args and is_number(args[0]):
            policy = CastPolicy.FLOAT32  # which is torch's reciprocal, times the number
        if policy is None or not self.enabled or _thread.region is not self or kwargs.get("out") is not None:
            return op.redispatch(*args, **kwargs)
        wanted = self.dtype if policy is CastPolicy.LOWER_PRECISION else _FLOAT32
        if policy is CastPolicy.WIDEST:
            wanted = self._widest(op, [*args, *kwargs.values()])
        elif policy is CastPolicy.FLOAT32_RESULT:
            given = op.__signature__.bind_partial(*args, **kwargs).arguments
            first = next(iter(given.values()), None)
            if given.get("dtype") is None and isinstance(first, DeviceArray) and first.dtype in _ELIGIBLE:
                kwargs = {**kwargs, "dtype": _FLOAT32}
            return op.redispatch(*args, **kwargs)
        args, kwargs = self._cast_all(args, kwargs, wanted)
        return op.redispatch(*args, **kwargs)

    def _cast_all(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: np.dtype[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call, with the arrays in them cast where autocast may."""
        cast = self._cast
        return tuple([cast(value, dtype) for value in args]), {key: cast(each, dtype) for key, each in kwargs.items()}

    def _cast(self, value: Any, dtype: np.dtype[Any]) -> Any:
        """Return an argument, with the arrays in it cast."""
        if isinstance(value, list | tuple):
            return [self._cast(each, dtype) for each in value] if _arrays(value) else value
        if not isinstance(value, DeviceArray) or value.dtype == dtype or value.dtype not in _ELIGIBLE:
            return value
        if not (self.cache_enabled and value.dtype == _FLOAT32 and is_parameter(value)):
            return _converted(value, dtype)
        # A graph must contain the casts that it uses: what was cast before its capture is not there at its replay.
        key = id(value), dtype, capture_id(current_stream(value.device).cuda_stream)
        if key not in _thread.cache:
            _thread.cache[key] = value, _converted(value, dtype)
        return _thread.cache[key][1]

    def _widest(self, op: Op, values: list[Any]) -> np.dtype[Any]:
        dtypes = {array.dtype for array in _arrays(values) if array.dtype in _ELIGIBLE}
        if _FLOAT32 in dtypes:
            return _FLOAT32
        if dtypes - {self.dtype}:
            raise UsageError(
                f"{op.name} was given {' and '.join(sorted(map(str, dtypes)))} under autocast to {self.dtype}; "
                "use one half precision at a time"
            )
        return self.dtype


def _converted(array: DeviceArray, dtype: np.dtype[Any]) -> DeviceArray:
    """Return the array in another dtype, with the dimensions in the same order in memory, which BLAS can read."""
    return empty_alike(array, dtype).copy_(array)


def _arrays(value: Any) -> list[DeviceArray]:
    """Return the arrays in an argument, or in a list of arguments."""
    if isinstance(value, list | tuple):
        return [array for each in value for array in _arrays(each)]
    return [value] if isinstance(value, DeviceArray) else []


def check_device_type(device_type: str) -> None:
    """Raise UsageError for any type of device but ``"cuda"``, the only one that torch has and cudatool too."""
    if device_type != "cuda":
        raise UsageError(f"mixed precision is for the device type 'cuda', where all arrays are, not {device_type!r}")


def _lower(dtype: npt.DTypeLike) -> np.dtype[Any]:
    found = as_dtype(dtype)
    if found not in _LOWER:
        raise UsageError(f"autocast casts to {' or '.join(map(str, _LOWER))}, not {found}")
    return found


@traced
def is_autocast_enabled(device_type: str = "cuda") -> bool:
    """Return whether operations that the calling thread calls are cast."""
    check_device_type(device_type)
    return _thread.region is not None and _thread.region.enabled


@traced
def get_autocast_dtype(device_type: str = "cuda") -> np.dtype[Any]:
    """Return what products run in, in the region that the calling thread is in; outside, what they would run in."""
    check_device_type(device_type)
    return _thread.region.dtype if _thread.region else _LOWER[0]


@traced
def is_autocast_cache_enabled() -> bool:
    """Return whether parameters that are cast are kept, in the region that the calling thread is in."""
    return _thread.region.cache_enabled if _thread.region else True


@traced
def clear_autocast_cache() -> None:
    """Forget what the calling thread's parameters were cast to."""
    _thread.cache.clear()


@traced
def custom_fwd(
    fwd: Callable[_P, _R] | None = None, *, device_type: str = "cuda", cast_inputs: npt.DTypeLike | None = None
) -> Callable[_P, _R] | Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function that wants its inputs in one precision: ``torch.amp.custom_fwd``.

    Called under autocast, the arrays among its arguments that are floating-point, but not float64, are cast, and the
    function runs without autocast. Elsewhere, or without `cast_inputs`, nothing is changed.

    Parameters
    ----------
    cast_inputs
        float32, float16 or bfloat16.
    """
    check_device_type(device_type)
    if cast_inputs is not None and as_dtype(cast_inputs) not in _ELIGIBLE:
        raise UsageError(f"cast_inputs must be one of {', '.join(map(str, _ELIGIBLE))}, not {as_dtype(cast_inputs)}")
    if fwd is None:
        return functools.partial(custom_fwd, cast_inputs=cast_inputs)  # type: ignore[return-value]
    if not callable(fwd):
        raise UsageError(f"custom_fwd decorates a function, not {type(fwd).__name__}")

    @functools.wraps(fwd)
    def forward(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        region = _thread.region
        if cast_inputs is None or region is None or not region.enabled:
            return fwd(*args, **kwargs)
        cast_args, cast_kwargs = region._cast_all(args, kwargs, np.dtype(cast_inputs))
        with autocast(enabled=False):
            return fwd(*cast_args, **cast_kwargs)

    return forward
