"""Functions of device arrays as graphs with planned memory: traced once, guarded at each call, replayed.

The counterpart of ``torch.compile`` for programs that use cudatool's own arrays; how it works and what it does not do
is in docs/compiler.md.
"""

from __future__ import annotations

from cudatool.compiler._compile import CompiledFunction, compile
from cudatool.compiler._plan import Buffer, Plan
from cudatool.compiler._trace import Graph, Node

__all__ = ["Buffer", "CompiledFunction", "Graph", "Node", "Plan", "compile"]
