"""Events of a program that uses PyTorch on a GPU, with no change to the program.

When the program imports ``torch``, a small extension is loaded (:mod:`cudatool.collect.torch_build`) that logs its
operators, its streams and events and its caching allocator. What only Python sees is added here: queries, graphs, and
pinned memory that leaves PyTorch as an array or a list. The log is read when the recording ends, and before another
source's event, so that the order is right.

What other libraries do beside it, :mod:`cudatool.collect.cupti` records. To leave out what is reported here, it learns
where PyTorch's calls of the driver begin and end, and where PyTorch's libraries are.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, wraps
from time import monotonic_ns
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from cudatool.collect import _cupti
from cudatool.collect.replaced import Replaced
from cudatool.collect.torch_accesses import IDLE, UNKNOWN, Argument, OperatorPlan, make_plan
from cudatool.collect.torch_build import TorchBuildError, load
from cudatool.collect.torch_events import TorchEvents
from cudatool.collect.torch_rows import Note
from cudatool.loading.after_import import AfterImport
from cudatool.trace import hooks, stacks
from cudatool.trace.events import AccessFlag, Event, Kind, WarningCode, WarningFlag, pack_pool

__all__ = ["TorchCollector", "flush", "is_passing_on", "is_watching", "start", "stop"]

_log = logging.getLogger("cudatool.collect")
_running: TorchCollector | None = None


def start(*, beside_others: bool = False) -> None:
    """Watch PyTorch on a GPU, until :func:`stop`; `beside_others` as in :class:`TorchCollector`."""
    global _running
    _running = TorchCollector(beside_others=beside_others)
    _running.start()


def flush() -> None:
    """Pass what PyTorch did so far to the subscribers of the hooks, if it is watched."""
    if _running is not None:
        _running.flush()


def is_watching() -> bool:
    """Return whether the program's PyTorch is watched: it has imported one that can use a GPU."""
    return _running is not None and _running.is_watching


def is_passing_on() -> bool:
    """Return whether this thread is passing on events of PyTorch."""
    return _running is not None and _running.is_passing_on


def stop() -> None:
    """Stop watching PyTorch, if it is watched."""
    global _running
    if _running is not None:
        _running.stop()
    _running = None


class TorchCollector:
    """Watches PyTorch, from its import or from now if it is imported already, until :meth:`stop`.

    Parameters
    ----------
    device
        ``"cuda"``; or ``"cpu"``, which treats the host's tensors as a device's (for tests).
    beside_others
        Whether :mod:`cudatool.collect.cupti` reports the driver's calls that are not PyTorch's, Triton's launches among
        them, and is to leave out the others.
    """

    def __init__(self, *, device: str = "cuda", beside_others: bool = False) -> None:
        self._device, self._beside_others = device, beside_others
        self._extension: Any = None
        self._events: TorchEvents | None = None
        self._passing_on = 0  # a thread
        self._read_at = 0  # what happened before has been passed on
        self._replaced = Replaced()
        self._graphs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._finder = AfterImport({"torch": self._watch})
        # Kernels that bypass the dispatcher: those of PyTorch's compiler, and Triton's own.
        launchers: dict[str, Callable[[ModuleType], None]] = {}
        launchers["torch._inductor.runtime.triton_heuristics"] = self._wrap_compiled
        if not beside_others:
            launchers["triton.runtime.jit"] = self._wrap_triton
        self._compiled = AfterImport(launchers)

    def start(self) -> None:
        """Begin."""
        self._finder.start()

    def flush(self) -> None:
        """Pass on what was logged so far."""
        if self._events is not None:
            self._read()
            with self._passes_on():
                self._events.finish()

    @property
    def is_passing_on(self) -> bool:
        """Whether this thread is passing on what was logged."""
        return self._passing_on == threading.get_ident()

    @property
    def is_watching(self) -> bool:
        """Whether PyTorch has been imported and is watched."""
        return self._extension is not None

    def stop(self) -> None:
        """Stop watching. Rows that were not passed on are lost. Stopping again changes nothing."""
        self._finder.stop()
        self._compiled.stop()
        if self._extension is not None:
            _cupti.leave_out(None)
            self._extension.stop()
            hooks.unsubscribe(self)
            self._replaced.put_back()
        self._extension = self._events = None

    def _watch(self, torch: ModuleType) -> None:
        if self._device == "cuda" and not torch.version.cuda:
            return  # this PyTorch has no CUDA device
        if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
            self._give_up("it runs without its caching allocator (PYTORCH_NO_CUDA_MEMORY_CACHING)")
            return
        try:
            extension = load(torch)
        except TorchBuildError as error:
            self._give_up(str(error))
            return
        stacks.hide(os.path.dirname(torch.__file__ or ""))
        self._extension = extension
        self._events = TorchEvents(hooks.forward_rows, _plan_reader(torch), extension.names)
        if self._beside_others:
            _cupti.leave_out(os.path.dirname(torch.__file__ or ""))
            extension.mark_operators(_cupti.log)
        extension.start(self._device, stacks.capture, hooks.thread_id, IDLE)
        os.register_at_fork(after_in_child=extension.forget)
        hooks.subscribe(self, first=True)
        if torch.version.cuda:
            torch.cuda._lazy_call(self._watch_memory)
        self._wrap_python(torch)

    def _watch_memory(self) -> None:
        if self._extension is not None:
            try:
                self._extension.watch_memory()
            except RuntimeError as error:  # without its memory events, no result about it would be correct
                self._extension.stop()
                self._give_up(str(error).partition("\n")[0])

    @staticmethod
    def _give_up(reason: str) -> None:
        hooks.emit(
            Kind.WARNING,
            name=f"PyTorch is not watched: {reason}",
            flags=WarningFlag.UNSEEN,
            aux0=WarningCode.PYTORCH_NOT_WATCHED,
        )
        _log.warning("PyTorch is not watched: %s", reason)

    def __call__(self, event: Event) -> None:
        """Pass on what PyTorch did before another library's event."""
        if not self._passing_on and event.time >= self._read_at:
            self._read()

    def before_rows(self, rows: npt.NDArray[np.void]) -> int:
        """Pass on what PyTorch did before these events of another library (:func:`.hooks.forward_rows`)."""
        if self._passing_on:
            return len(rows)
        if rows["time"][0] >= self._read_at:
            self._read()
        return int(rows["time"].searchsorted(self._read_at)) or len(rows)

    def _read(self) -> None:
        assert self._events is not None
        with self._passes_on():
            while True:
                now = monotonic_ns()
                log = self._extension.drain()
                if not log:
                    break
                self._events.read(log)
            self._read_at = now

    @contextmanager
    def _passes_on(self) -> Iterator[None]:
        self._passing_on = threading.get_ident()
        try:
            yield
        finally:
            self._passing_on = 0

    # What only Python sees --------------------------------------------------------------------------------------

    def _wrap_python(self, torch: ModuleType) -> None:
        note = self._extension.note
        stream_of = self._extension.stream

        def event_query(event: Any, done: bool) -> None:
            note(Note.EVENT_QUERY, event.cuda_event, int(done))

        def stream_query(stream: Any, done: bool) -> None:
            note(Note.STREAM_QUERY, stream.cuda_stream, int(done), stream.device_index)

        def event_wait(event: Any, _: None, stream: Any = None) -> None:
            if not event.cuda_event:
                stream = stream or torch.cuda.current_stream()
                note(Note.EMPTY_WAIT, stream.cuda_stream, stream.device_index)

        def leaves(tensor: Any, flags: AccessFlag) -> None:
            if tensor.device.type == "cpu" and tensor.is_pinned():
                if not tensor.is_contiguous():
                    flags |= AccessFlag.INEXACT
                note(Note.HOST_ACCESS, tensor.data_ptr(), _span(tensor), flags)

        def graph_ended(graph: Any, _: Any) -> None:
            pool = 0
            with suppress(RuntimeError):  # the capture has failed
                pool = pack_pool(graph.pool())
            graph_note(Note.GRAPH_END, graph, pool)

        def graph_note(what: Note, graph: Any, *words: int) -> None:
            number = self._graphs.get(graph) or self._graphs.setdefault(graph, hooks.new_graph())
            device = torch.cuda.current_device()
            note(what, number, stream_of(device), device, *words)

        self._after(torch.cuda.Event, "query", event_query)
        self._after(torch.cuda.Event, "wait", event_wait)
        self._after(torch.cuda.Stream, "query", stream_query)
        # An array shares the memory; the program may read it only later.
        self._after(
            torch.Tensor, "numpy", lambda tensor, *_, **__: leaves(tensor, AccessFlag.READ | AccessFlag.INEXACT)
        )
        self._after(torch.Tensor, "tolist", lambda tensor, _: leaves(tensor, AccessFlag.READ))
        if torch.version.cuda:
            graphs = torch.cuda.CUDAGraph
            self._after(graphs, "capture_begin", lambda graph, *_, **__: graph_note(Note.GRAPH_BEGIN, graph))
            self._after(graphs, "capture_end", graph_ended, always=True)
            self._after(graphs, "replay", lambda graph, _: graph_note(Note.GRAPH_LAUNCH, graph))
        extension = self._extension
        self._replaced.around_backward(
            torch, lambda: extension.backward_from(stacks.capture()), lambda: extension.backward_from(0)
        )
        self._compiled.start()

    def _wrap_compiled(self, heuristics: ModuleType) -> None:
        def launched(tuner: Any, stream: int, *args: Any) -> None:
            words = []
            for name, value in zip(tuner.fn.arg_names, args, strict=False):
                if getattr(value, "is_cuda", False):
                    # By the compiler's names; it knows which arguments user-written kernels mutate.
                    flags = AccessFlag.INEXACT | (
                        AccessFlag.READ | AccessFlag.WRITE
                        if name in tuner.mutated_arg_names or name.startswith("in_out_ptr")
                        else AccessFlag.WRITE
                        if name.startswith("out_ptr")
                        else AccessFlag.READ
                    )
                    words += [value.data_ptr(), _span(value), flags]
            self._launched(tuner.fn.__name__, stream, words)

        original = heuristics.CachingAutotuner.run

        @wraps(original)
        def run(tuner: Any, *args: Any, stream: int, **kwargs: Any) -> Any:
            _cupti.mark_inside(1)
            try:
                result = original(tuner, *args, stream=stream, **kwargs)
            finally:
                _cupti.mark_inside(-1)
            launched(tuner, stream, *args)
            return result

        self._replaced.replace(heuristics.CachingAutotuner, "run", run)

    def _wrap_triton(self, jit: ModuleType) -> None:
        original = jit.JITFunction.run

        @wraps(original)
        def run(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
            result = original(kernel, *args, warmup=warmup, **kwargs)
            if not warmup:
                torch = sys.modules["torch"]
                self._launched(kernel.fn.__name__, self._extension.stream(torch.cuda.current_device()), [])
            return result

        self._replaced.replace(jit.JITFunction, "run", run)

    def _launched(self, name: str, stream: int, words: list[int]) -> None:
        device = sys.modules["torch"].cuda.current_device()
        self._extension.note(Note.LAUNCH, self._extension.name(name), stream, device, *words)

    def _after(self, owner: Any, name: str, observe: Callable[..., None], *, always: bool = False) -> None:
        """Call ``observe(self, result, *args)`` after each call; with `always`, after one that failed too."""
        original = getattr(owner, name)

        @wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = None
            try:
                result = original(self, *args, **kwargs)
            except BaseException:
                if always:
                    observe(self, None, *args, **kwargs)
                raise
            observe(self, result, *args, **kwargs)
            return result

        self._replaced.replace(owner, name, method)


def _span(tensor: Any) -> int:
    """Return the bytes from a tensor's first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize if tensor.numel() else 0


def _plan_reader(torch: ModuleType) -> Callable[[str], OperatorPlan]:
    @cache
    def plan_of(name: str) -> OperatorPlan:
        base, _, overload = name.partition(".")
        try:
            schema = torch._C._get_schema(base, overload)
        except RuntimeError:  # the library that defined the operator has been unloaded
            return UNKNOWN
        return make_plan(name, _arguments(schema.arguments), _arguments(schema.returns))

    return plan_of


def _arguments(found: Sequence[Any]) -> list[Argument]:
    return [
        Argument(
            argument.name,
            is_written=argument.alias_info is not None and argument.alias_info.is_write,
            is_aliased=argument.alias_info is not None and not argument.alias_info.is_write,
            is_keyword=argument.kwarg_only,
        )
        for argument in found
    ]
