"""The statements of a file of PyTorch's compiler that allocate memory, or may.

The forms are those that ``torch._inductor.codegen.wrapper`` writes::

    buf5 = empty_strided_cuda((32, 256), (256, 1), torch.float32)                  allocates buf5
    # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.addmm]
    extern_kernels.addmm(arg1_1, buf4, ..., out=buf5)                              writes it; may take a workspace
    buf6 = buf5; del buf5  # reuse                                                 buf6 takes over the memory
    buf7 = torch.ops.aten.topk.default(buf6, 4)                                    allocates its results
    buf8 = buf7[0]                                                                 one of them
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Statement", "is_backward", "statements"]


@dataclass(slots=True)
class Statement:
    """A statement that allocates.

    Attributes
    ----------
    first, last
        Its lines.
    buffer
        The variable that holds the memory; empty where a kernel may take temporary memory.
    output
        The buffer that such a kernel writes, where it is named.
    nodes
        The nodes that the comment above the kernel names; for a buffer, the one that writes it first.
    reused_by
        The variables that take over the memory, in that order.
    """

    first: int
    last: int
    buffer: str = ""
    output: str = ""
    nodes: tuple[str, ...] = ()
    reused_by: list[str] = field(default_factory=list)


_NOT_THE_PROGRAM: Final = ("get_args", "benchmark_compiled_module", "recursively_apply_fns", "__init__")
_ALLOCATES: Final = re.compile(r"(torch\.)?empty_strided\w*$")
_SAME_MEMORY: Final = re.compile(r"(reinterpret_tensor|alloc_from_pool|_reinterpret_tensor|as_strided)$")
_NO_MEMORY: Final = re.compile(r"(assert_\w+|args\.clear|get_raw_stream|.*\.set_device|run_intermediate_hooks)$")
_NODES: Final = re.compile(r"^\s*# (?:Topologically Sorted|Unsorted) Source Nodes: \[([^\]]*)\]")
_BETWEEN: Final = re.compile(r"\s*(#|\w+ = get_raw_\w*stream\()")  # what may stand between that comment and the call
_MOST_BETWEEN: Final = 4


def statements(source: str) -> list[Statement]:
    """Return the statements of a generated file that may allocate, in its order.

    Raises
    ------
    SyntaxError
        It is not Python.
    """
    text = source.splitlines()
    found: list[Statement] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name not in _NOT_THE_PROGRAM:
            found += _Function(text).read(node.body)
    return sorted(found, key=lambda statement: statement.first)


_BACKWARD: Final = re.compile(r"^# AOT ID: \['\w*_backward'\]", re.MULTILINE)


def is_backward(source: str) -> bool:
    """Return whether a generated file is a backward pass, as the comment at its beginning says."""
    return bool(_BACKWARD.search(source))


class _Function:
    """Reads the statements of one function."""

    def __init__(self, text: Sequence[str]) -> None:
        self._text = text
        self._found: list[Statement] = []
        self._held: dict[str, Statement] = {}  # variable -> what allocated its memory
        self._unwritten: set[str] = set()  # buffers that no kernel has written yet

    def read(self, body: Sequence[ast.stmt]) -> list[Statement]:
        for node in _simple(body):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self._assigned(node.targets[0].id, node)
            elif isinstance(node, ast.Expr | ast.Assign) and isinstance(node.value, ast.Call):
                self._called(node.value)
        return self._found

    def _assigned(self, name: str, node: ast.Assign) -> None:
        value = node.value
        if isinstance(value, ast.Call):
            function = ast.unparse(value.func)
            if _ALLOCATES.match(function):
                self._allocated(node, name)
                self._unwritten.add(name)
            elif not _SAME_MEMORY.match(function):
                if not _NO_MEMORY.match(function):
                    self._written(value)
                    self._allocated(node, name, self._named_above(node))
            elif value.args and isinstance(value.args[0], ast.Name):
                self._taken_over(name, value.args[0].id, node)
        elif isinstance(value, ast.Name):
            self._taken_over(name, value.id, node)
        elif isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
            self._share(name, value.value.id)

    def _called(self, call: ast.Call) -> None:
        if _NO_MEMORY.match(ast.unparse(call.func)):
            return
        self._written(call)
        out = next((word.value for word in call.keywords if word.arg == "out"), None)
        names = [node.id for node in ast.walk(out) if isinstance(node, ast.Name)] if out is not None else []
        held = next((self._held[name].buffer for name in names if name in self._held), "")
        self._found.append(
            Statement(
                call.lineno, call.end_lineno or call.lineno, "", names[0] if held else "", self._named_above(call)
            )
        )

    def _allocated(self, node: ast.stmt, name: str, nodes: tuple[str, ...] = ()) -> None:
        self._held[name] = Statement(node.lineno, node.end_lineno or node.lineno, name, nodes=nodes)
        self._found.append(self._held[name])

    def _taken_over(self, name: str, source: str, node: ast.Assign) -> None:
        deleted = re.search(rf"\bdel {re.escape(source)}\b", self._text[(node.end_lineno or node.lineno) - 1])
        if deleted and source in self._held:
            self._held[source].reused_by.append(name)
        self._share(name, source)

    def _share(self, name: str, source: str) -> None:
        if source in self._held:
            self._held[name] = self._held[source]

    def _written(self, call: ast.Call) -> None:
        """Give the buffers that this call is the first to use the nodes that are named above it."""
        for node in ast.walk(call):
            held = self._held.get(node.id) if isinstance(node, ast.Name) else None
            if held is not None and held.buffer in self._unwritten:
                self._unwritten.discard(held.buffer)
                held.nodes = self._named_above(call)

    def _named_above(self, node: ast.stmt | ast.expr) -> tuple[str, ...]:
        for text in self._text[max(node.lineno - 2, 0) : max(node.lineno - 2 - _MOST_BETWEEN, 0) : -1]:
            if found := _NODES.match(text):
                return tuple(name.strip() for name in found[1].split(",") if name.strip())
            if not _BETWEEN.match(text):
                break
        return ()


def _simple(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements in the order of the file, those inside of ``with`` and others too."""
    for node in body:
        inner = [part for name in ("body", "orelse", "finalbody") for part in getattr(node, name, ())]
        if inner and not isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from _simple(inner)
        else:
            yield node
