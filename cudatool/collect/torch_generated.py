"""What PyTorch's compiler knows of the code that it generates: which line allocates which buffer, and for what.

``torch.compile`` writes a Python file for each graph, whose function ``call`` allocates (``buf5 =
empty_strided_cuda(...)``). A stack ends there, and the file says nothing of the program. The compiler knows more, while
it compiles: the nodes that each buffer was made from, which have the lines and the modules of the program. This is
noted when such a file is loaded, never while it runs::

    compiled now                the graph: nodes, module and lines of each buffer; kept for when the file comes from
                                PyTorch's cache
    from PyTorch's cache, or    the file: comments name nodes of the graph that torch.compile traced, which this process
    before the recording,       has (module), unless it was traced before; PyTorch keeps the lines of the program
    and not by a recorded one

What of this a version of PyTorch lacks stays empty, and reports count it.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import wraps
from types import ModuleType
from typing import Any, Final

from cudatool.code_cache import CodeCache
from cudatool.collect.generated_source import Statement, is_backward, statements
from cudatool.collect.replaced import Replaced
from cudatool.errors import ConfigError
from cudatool.loading.after_import import AfterImport
from cudatool.trace import hooks, stacks
from cudatool.trace.events import Event, GeneratedFact, GeneratedFlag, Kind
from cudatool.trace.model import Frame

__all__ = ["GeneratedFiles", "living", "module_path", "start", "stop"]

_LineMap = Sequence[tuple[int, str | None]]
"""First lines, and the stack of the program that the lines from there on were made from, as text."""

_FORMAT: Final = "cudatool.generated/1"
_KEPT: Final = CodeCache("torch")
_MOST_NODES: Final = 8
"""A fused kernel may compute hundreds of nodes: the last ones are kept."""
_MOST_GRAPHS: Final = 64
_running: GeneratedFiles | None = None


def start() -> None:
    """Note what PyTorch's compiler generates, until :func:`stop`."""
    global _running
    _running = GeneratedFiles()


def stop() -> None:
    """Note it no longer."""
    global _running
    if _running is not None:
        _running.stop()
    _running = None


def living() -> list[Event]:
    """Return the events of all files that were loaded so far, for a recording that begins now."""
    now = time.monotonic_ns()
    return [] if _running is None else [event._replace(time=now) for event in _running.events]


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a buffer, or a node, was made from: nodes, a module's path, and lines of the program as PyTorch's text.

    PyTorch leaves out its own lines. Where none is left, as in a Sequential of its own modules, the program's line is
    the call of what was compiled: `stack`, the number of its stack.
    """

    nodes: tuple[str, ...] = ()
    module: str = ""
    lines: str = ""
    stack: int = 0


_Known = tuple[Statement, _Origin]


class GeneratedFiles:
    """Notes each file that PyTorch's compiler generates or takes from its cache, until :meth:`stop`.

    Attributes
    ----------
    events
        What was emitted.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._replaced = Replaced()
        self._traced: dict[object, dict[str, _Origin]] = {}  # compilation -> node that Dynamo traced -> origin
        self._called: dict[object, int] = {}  # compilation -> the stack of the call that compiled
        self._finder = AfterImport(
            {"torch._inductor.codecache": self._watch_files, "torch._inductor.compile_fx": self._watch_graphs}
        )
        self._finder.start()

    def stop(self) -> None:
        """Note no more. Stopping again changes nothing."""
        self._finder.stop()
        self._replaced.put_back()

    def _watch_files(self, codecache: ModuleType) -> None:
        cache = codecache.PyCodeCache
        for path, columns in getattr(cache, "linemaps", {}).items():
            if len(columns) == 2:  # loaded before
                self._loaded(path, list(zip(*columns, strict=True)), None)
        original = cache.load_by_key_path

        @wraps(original)
        def load(cls: Any, key: str, path: str, linemap: Any = None, *args: Any, **kwargs: Any) -> Any:
            module = original(key, path, linemap, *args, **kwargs)
            if linemap is not None:  # the file of a single kernel has none
                self._loaded(path, linemap, _graph())
            return module

        self._replaced.replace(cache, "load_by_key_path", classmethod(load))

    def _watch_graphs(self, compile_fx: ModuleType) -> None:
        original = compile_fx.compile_fx

        @wraps(original)
        def compile_graph(model: Any, *args: Any, **kwargs: Any) -> Any:
            graph = getattr(model, "graph", None)
            if graph is not None:
                if len(self._traced) >= _MOST_GRAPHS:
                    oldest = next(iter(self._traced))
                    del self._traced[oldest], self._called[oldest]
                self._traced.setdefault(_compilation(), {}).update((node.name, _of_node(node)) for node in graph.nodes)
                self._called[_compilation()] = stacks.capture()
            return original(model, *args, **kwargs)

        self._replaced.replace(compile_fx, "compile_fx", compile_graph)

    def _loaded(self, path: str, line_map: _LineMap, graph: Any) -> None:
        flags = GeneratedFlag(0)
        try:
            with open(path, encoding="utf-8") as file:
                source = file.read()
            flags |= GeneratedFlag.BACKWARD if is_backward(source) else 0
            known, is_of_graph = self._known(source, line_map, graph)
            flags |= 0 if is_of_graph else GeneratedFlag.NO_GRAPH
        # The compiler's internals are other ones in another version: the program must run, and the report says it.
        except Exception:
            known, flags = [], flags | GeneratedFlag.UNREADABLE
        events = _events(path, flags, known)
        self.events += events
        if hooks.active:
            for event in events:
                hooks.forward(event)

    def _known(self, source: str, line_map: _LineMap, graph: Any) -> tuple[list[_Known], bool]:
        """Return the statements that allocate with their origins, and whether these are of the compiler's graph."""
        compilation = _compilation()
        called = self._called.get(compilation, 0)
        key = hashlib.sha256(repr((_FORMAT, source, [tuple(row) for row in line_map])).encode()).hexdigest()
        if graph is None and (kept := _kept(key, called)) is not None:
            return kept, True
        origins = _Origins(graph, line_map, self._traced.get(compilation, {}), called)
        known = [(statement, origins.of(statement)) for statement in statements(source)]
        if graph is not None:
            _keep(key, known)
        return known, graph is not None


class _Origins:
    """Where the statements of one file come from."""

    def __init__(self, graph: Any, line_map: _LineMap, traced: dict[str, _Origin], called: int) -> None:
        self._graph = graph
        self._called = called
        self._order = {} if graph is None else {node: i for i, node in enumerate(graph.graph.nodes)}
        self._first = [line for line, _ in line_map]
        self._lines = [text or "" for _, text in line_map]
        self._traced = traced
        self._by_lines: dict[str, list[_Origin]] = {}
        for origin in traced.values():
            if origin.lines:
                self._by_lines.setdefault(origin.lines, []).append(origin)

    def of(self, statement: Statement) -> _Origin:
        """Return the origin of what a statement allocates."""
        made = self._of_buffer(statement.buffer or statement.output) if self._graph is not None else _Origin()
        if made.lines or made.module:
            return made
        # The comment above the call that writes the buffer names nodes that Dynamo traced, or of the backward graph.
        place = bisect_right(self._first, statement.first) - 1
        lines = self._lines[place] if place >= 0 else ""
        named = [self._traced[node] for node in statement.nodes if node in self._traced]
        same = [origin for origin in named if origin.lines == lines] if lines else named[-1:]
        modules = {origin.module for origin in same or self._by_lines.get(lines, [])}
        module = modules.pop() if len(modules) == 1 else ""
        lines = lines or (same[-1].lines if same else "")
        return _Origin(made.nodes or statement.nodes, module, lines, self._called if module and not lines else 0)

    def _of_buffer(self, name: str) -> _Origin:
        buffer = self._graph.name_to_buffer.get(name)
        if buffer is None:
            return _Origin()
        nodes = sorted((node for node in buffer.get_origins() if node in self._order), key=self._order.__getitem__)
        last = buffer.get_origin_node()
        if last in nodes:  # others may come later in the graph
            nodes.remove(last)
            nodes.append(last)
        found = [_of_node(node) for node in nodes]
        if not any(origin.lines or origin.module for origin in found):
            # An argument, copied into the layout in which an operation takes it: that one says for what it is.
            found = [_of_node(user) for node in reversed(nodes) for user in reversed(list(node.users))]
        # A node that the compiler added has neither lines nor a module; the one before it says for what it is.
        origin = next((origin for origin in reversed(found) if origin.lines or origin.module), _Origin())
        called = self._called if origin.module and not origin.lines else 0
        return _Origin(tuple(node.name for node in nodes), origin.module, origin.lines, called)


def _keep(key: str, known: Iterable[_Known]) -> None:
    """Keep what the graph says of a file: when PyTorch takes the file from its cache, there will be no graph."""
    rows = [(asdict(own), asdict(origin) | {"stack": bool(origin.stack)}) for own, origin in known]
    with suppress(ConfigError):  # the size of our cache is no size
        _KEPT.put(key, json.dumps(rows).encode())


def _kept(key: str, called: int) -> list[_Known] | None:
    """Return what was kept, None if nothing was; `called` is the stack of the call that compiles now."""
    with suppress(ConfigError, ValueError, TypeError, KeyError):
        rows = json.loads(_KEPT.get(key) or b"null")
        return rows and [
            (
                Statement(**{**own, "nodes": tuple(own["nodes"])}),
                _Origin(tuple(of["nodes"]), of["module"], of["lines"], called if of["stack"] else 0),
            )
            for own, of in rows
        ]
    return None


def _graph() -> Any:
    """Return the compiler's graph that is being compiled, None outside of a compilation."""
    virtualized = sys.modules.get("torch._inductor.virtualized")
    graph = None if virtualized is None else virtualized.V.graph
    return graph if hasattr(graph, "name_to_buffer") else None


def _compilation() -> object:
    """Return the id of the compilation in progress."""
    guards = sys.modules.get("torch._guards")
    return None if guards is None else guards.CompileContext.current_compile_id()


def _of_node(node: Any) -> _Origin:
    """Return what a node's metadata says; a node of the backward graph has the modules of its forward one."""
    modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path, kind = list(modules.values())[-1] if modules else ("", None)
    return _Origin((node.name,), module_path(path, getattr(kind, "__name__", str(kind or ""))), node.stack_trace or "")


_ROOT = re.compile(r"^[LG]\['(\w+)'\]")
_MODULE_ITSELF: Final = ("self", "fn")  # in its own forward(), and in Dynamo's wrapper of a module of PyTorch
_GETATTR = re.compile(r"getattr\(([^,()]+), '?\"?([\w.]+)'?\"?\)")
_MEMBER = re.compile(r"\._modules\['(\w+)'\]|\['(\w+)'\]|\[(\d+)\]")


def module_path(source: str, kind: str) -> str:
    """Return the path of a module, ``layers.0.fc1``, from the expression by which Dynamo found it.

    That is relative to the module that was compiled, or begins with the name of a variable. The compiled module itself
    is named by its class, `kind`.
    """
    while (plain := _GETATTR.sub(r"\1.\2", source)) != source:
        source = plain
    root = _ROOT.match(source)
    rest = _MEMBER.sub(lambda found: "." + next(filter(None, found.groups())), source[root.end() :] if root else source)
    name = "" if root is None or root[1] in _MODULE_ITSELF else root[1]
    return f"{name}{rest}".strip(".") or kind


_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


def _stack(lines: str) -> int:
    """Return the number of the stack that PyTorch wrote as the interpreter does, outermost frame first."""
    found = [Frame(file, function, int(line)) for file, line, function in _FRAME.findall(lines)]
    return stacks.intern(reversed(found))


def _events(path: str, flags: GeneratedFlag, known: Iterable[_Known]) -> list[Event]:
    number, thread, now = hooks.new_correlation(), hooks.thread_id(), time.monotonic_ns()

    def event(kind: Kind, name: str, flags: int = 0, stack: int = 0, first: int = 0, last: int = 0) -> Event:
        return Event(now, kind, -1, flags, thread, 0, number, stack, name, 0, 0, first, last)

    events = [event(Kind.GENERATED_FILE, path, flags)]
    for own, origin in known:
        facts = [(GeneratedFact.NODE, node) for node in origin.nodes[-_MOST_NODES:]]
        facts += [(GeneratedFact.MODULE, origin.module)] if origin.module else []
        facts += [(GeneratedFact.REUSED_BY, later) for later in own.reused_by]
        stack = _stack(origin.lines) or origin.stack
        events.append(event(Kind.GENERATED_LINE, own.buffer, 0, stack, own.first, own.last))
        events += [event(Kind.GENERATED_FACT, name, what, first=own.first) for what, name in facts]
    return events
