"""How torch.compile is involved in a call site: which compilation ran, and which node of its graph allocated.

PyTorch's snapshots contain this. An event's ``compile_context`` is the id of the compilation in whose context it
happened, "N/A" outside of one. Frames of generated code have ``fx_node_name`` where ``augment_with_fx_traces`` was on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cudatool.trace.lifetimes import Ints, Lifetimes, distinct_pairs
from cudatool.trace.model import Trace

__all__ = ["Compiled", "compiled_sites", "joined"]

_MOST = 3  # contexts in words


@dataclass(frozen=True, slots=True)
class Compiled:
    """The compiled code of a call site, from a PyTorch snapshot.

    Attributes
    ----------
    contexts
        The ids of compilations, such as ``"0/0"``, in the order in which the file names them; of all its blocks.
    fx_node
        The node of an FX graph that the innermost frame with one names; empty where none does.
    """

    contexts: tuple[str, ...] = ()
    fx_node: str = ""

    def described(self, label: str) -> str:
        """Return a call site's label with these facts added, ``"train.py:12 (step) [compiled 0/0, FX node relu]"``."""
        more = f" and {len(self.contexts) - _MOST} more" if len(self.contexts) > _MOST else ""
        said = [f"compiled {', '.join(self.contexts[:_MOST])}{more}"] if self.contexts else []
        said += [f"FX node {self.fx_node}"] if self.fx_node else []
        return f"{label} [{', '.join(said)}]" if said else label


def joined(parts: Sequence[Compiled]) -> Compiled:
    """Return the combined facts of several call sites that are shown as one; only the first of their nodes is kept."""
    contexts = dict.fromkeys(context for part in parts for context in part.contexts)
    return Compiled(tuple(contexts), next((part.fx_node for part in parts if part.fx_node), ""))


def compiled_sites(trace: Trace, blocks: Lifetimes, site: Ints, stacks: list[int]) -> list[Compiled]:
    """Return the compiled code of each call site, whose stacks are `stacks`.

    Parameters
    ----------
    site
        The site number of each block.
    """
    names, number = trace.compile_contexts(blocks.start)
    contexts: list[list[str]] = [[] for _ in stacks]
    if names:
        pairs, _ = distinct_pairs(site, number)
        for own, context in pairs.tolist():
            if context:
                contexts[own].append(names[context - 1])
    nodes = (next((node for i in trace.stacks[stack] if (node := trace.fx_node(i))), "") for stack in stacks)
    return [Compiled(tuple(said), node) for said, node in zip(contexts, nodes, strict=True)]
