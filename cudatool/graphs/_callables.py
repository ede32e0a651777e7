"""Functions of arrays as graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from cudatool.errors import UsageError
from cudatool.graphs._context import graph
from cudatool.graphs._graph import CUDAGraph, PoolLike
from cudatool.runtime.array import DeviceArray, empty
from cudatool.runtime.device import synchronize
from cudatool.runtime.dtypes import require_int
from cudatool.runtime.mempool import graph_pool_handle
from cudatool.runtime.stream import Stream, StreamContext
from cudatool.runtime.traced_calls import traced

__all__ = ["GraphedCallable", "make_graphed_callables"]

_Function = Callable[..., Any]


class GraphedCallable:
    """A function that replays what another one did when it was captured.

    ``graphed(*args)`` copies the arrays in `args` to where the graph reads them, unless they are those arrays, replays
    the graph on the current stream, and returns the arrays that it writes, which the next call overwrites.

    Attributes
    ----------
    backward
        The same for the function's backward, from gradients of its outputs to what that returned; None if none was
        given.
    """

    def __init__(self, cuda_graph: CUDAGraph, inputs: Sequence[Any], outputs: Any) -> None:
        self._graph = cuda_graph
        self._arrays = list(_arrays(inputs))
        self._outputs = outputs
        self.backward: GraphedCallable | None = None

    def __call__(self, *args: Any) -> Any:
        """Replay the graph.

        Raises
        ------
        UsageError
            The arguments are not as the sample arguments were.
        """
        given = list(_arrays(args))
        if len(given) != len(self._arrays):
            raise UsageError(f"the graph was captured with {len(self._arrays)} arrays, not {len(given)}")
        for index, (array, static) in enumerate(zip(given, self._arrays, strict=True)):
            if (array.shape, array.dtype) != (static.shape, static.dtype):
                raise UsageError(
                    f"array {index} has shape {array.shape} and dtype {array.dtype}; the graph was captured with "
                    f"{static.shape} and {static.dtype}"
                )
        moved = [(a, s) for a, s in zip(given, self._arrays, strict=True) if _place(a) != _place(s)]
        # What lies where another argument is copied to must be read before.
        places = {static.data_ptr() for _, static in moved}
        sources = [array.clone() if array.data_ptr() in places else array for array, _ in moved]
        for source, (_, static) in zip(sources, moved, strict=True):
            static.copy_(source)
        self._graph.replay()
        return self._outputs


@overload
def make_graphed_callables(
    callables: _Function,
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    pool: PoolLike = None,
    capture_error_mode: str = "global",
    *,
    backwards: _Function | None = None,
) -> GraphedCallable: ...


@overload
def make_graphed_callables(
    callables: tuple[_Function, ...],
    sample_args: tuple[tuple[Any, ...], ...],
    num_warmup_iters: int = 3,
    pool: PoolLike = None,
    capture_error_mode: str = "global",
    *,
    backwards: tuple[_Function | None, ...] | None = None,
) -> tuple[GraphedCallable, ...]: ...


@traced
def make_graphed_callables(
    callables: _Function | tuple[_Function, ...],
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    pool: PoolLike = None,
    capture_error_mode: str = "global",
    *,
    backwards: Any = None,
) -> GraphedCallable | tuple[GraphedCallable, ...]:
    """Return versions of functions that do their work on the device by one graph each.

    Parameters
    ----------
    callables
        A function of device arrays, or several, in the order in which they will be called: they share a pool.
    sample_args
        The arguments to capture with, device arrays or tuples, lists and dicts of them; for several functions, those of
        each. The arrays become the graphs' own inputs: their content is overwritten.
    num_warmup_iters
        How often each function is called before it is captured, on the stream that it is captured on, so that kernels
        are compiled and libraries have their workspaces.
    pool, capture_error_mode
        See :meth:`cudatool.CUDAGraph.capture_begin`. By default the functions have a pool of their own.
    backwards
        For each function the one that computes gradients, or None. There is no autograd: it gets an array like each
        output, and reads what else it needs from the function's inputs and whatever the function kept. They are
        captured after all functions and in the reverse order, and are to be called in that order:
        ``graphed.backward(*gradients)``.

    Raises
    ------
    UsageError
        There are not as many sample arguments or backwards as functions, or something among them is no device array.
    """
    several = isinstance(callables, tuple)
    functions: tuple[_Function, ...] = callables if isinstance(callables, tuple) else (callables,)
    samples: tuple[tuple[Any, ...], ...] = sample_args if several else (sample_args,)
    backward_of = (backwards if several else (backwards,)) if backwards is not None else (None,) * len(functions)
    if not len(functions) == len(samples) == len(backward_of):
        raise UsageError(f"{len(functions)} callables, but {len(samples)} sample_args and {len(backward_of)} backwards")
    for function in functions:
        if not callable(function):
            raise UsageError(f"a function is graphed, not {type(function).__name__}")
    if require_int("num_warmup_iters", num_warmup_iters) < 0:
        raise UsageError(f"num_warmup_iters must not be below 0: {num_warmup_iters}")
    for arguments in samples:
        list(_arrays(arguments))  # to check them
    pool = graph_pool_handle() if pool is None else pool
    stream = Stream()

    def captured(function: _Function, inputs: tuple[Any, ...]) -> GraphedCallable:
        cuda_graph = CUDAGraph()
        with graph(cuda_graph, pool, stream, capture_error_mode):
            outputs = function(*inputs)
        list(_arrays(outputs))
        return GraphedCallable(cuda_graph, inputs, outputs)

    synchronize()
    with StreamContext(stream):
        for function, inputs, backward in zip(functions, samples, backward_of, strict=True):
            for _ in range(num_warmup_iters):
                outputs = function(*inputs)
                if backward is not None:
                    backward(*_like(outputs))
                del outputs
    synchronize()
    graphed = [captured(function, inputs) for function, inputs in zip(functions, samples, strict=True)]
    for made, backward in zip(reversed(graphed), reversed(backward_of), strict=True):
        if backward is not None:
            with StreamContext(stream):
                gradients = _like(made._outputs)
            made.backward = captured(backward, gradients)
    return tuple(graphed) if several else graphed[0]


def _place(array: DeviceArray) -> tuple[int, tuple[int, ...]]:
    return array.data_ptr(), array.strides


def _like(outputs: Any) -> tuple[DeviceArray, ...]:
    return tuple(empty(array.shape, array.dtype, device=array.device) for array in _arrays(outputs))


def _arrays(value: Any) -> Iterator[DeviceArray]:
    """Yield the arrays in nested tuples, lists and dicts."""
    if isinstance(value, DeviceArray):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _arrays(part)
    else:
        raise UsageError(
            f"graphed callables take and return device arrays, and tuples, lists and dicts of them, not "
            f"{type(value).__name__}; bind other arguments beforehand (functools.partial)"
        )
