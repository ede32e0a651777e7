"""Products and collectives in graphs: calls of our runtime that became nodes, which have other names.

A launch of a graph has one correlation, and each of its executions names its node. The graph's instantiation and
updates show which call a node was made from; one call may have become several nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cudatool.trace.events import Kind
from cudatool.trace.lifetimes import Ints

__all__ = ["CapturedCall", "CapturedCalls", "as_called"]

_CALLS: Final = (Kind.GEMM, Kind.COLLECTIVE)
_CHANGES: Final = (Kind.GRAPH_INSTANTIATE, Kind.GRAPH_UPDATE, Kind.GRAPH_NODE, Kind.GRAPH_LAUNCH)


def as_called(ran: npt.NDArray[np.void], records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Return executions of a trace in which the nodes of captured calls have the names of these calls."""
    captured = CapturedCalls()
    captured.add(records)
    name, _ = captured.of(ran)
    ran = ran.copy()
    ran["name"] = np.where(name > 0, name, ran["name"])
    return ran


class CapturedCall(NamedTuple):
    """A captured call in a graph: its correlation and name, as in its record, and the first node that it became."""

    correlation: int
    name: int
    first_node: int


class CapturedCalls:
    """What launches of graphs run of captured calls, in a trace or in what there is of it so far.

    Parameters
    ----------
    most
        Launches that are remembered, the latest ones; all by default.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._waiting = np.empty(0, np.uint64)  # correlations of new nodes; the call, if one was captured, comes next
        self._names: dict[int, int] = {}  # of captured calls, by correlation
        self._graphs: dict[int, dict[int, CapturedCall]] = {}  # by executable graph and node
        self._firsts: dict[int, dict[int, int]] = {}  # by executable graph and correlation: the call's first node
        self._launches: dict[int, dict[int, CapturedCall]] = {}  # by launch and node, as its graph was then

    @property
    def launches(self) -> Mapping[int, Mapping[int, CapturedCall]]:
        """The captured call of each node, by the launch's correlation; without launches that ran none."""
        return self._launches

    def add(self, records: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Take the next events; return which of them are calls that were captured, launches of kernels too."""
        kinds, correlation = records["kind"], records["correlation"]
        new = correlation[(kinds == Kind.GRAPH_NODE_ADDED) & (correlation != 0)]
        captured = np.zeros(len(records), np.bool_)
        if len(new) or len(self._waiting):
            captured |= np.isin(kinds, (Kind.KERNEL_LAUNCH, *_CALLS))
            captured &= np.isin(correlation, np.concatenate([self._waiting, new]))
        self._waiting = new[~np.isin(new, correlation[captured])]
        calls = records[captured & (kinds != Kind.KERNEL_LAUNCH)]
        self._names.update(zip(calls["correlation"].tolist(), calls["name"].tolist(), strict=True))
        if self._names:
            self._follow(records[np.isin(kinds, _CHANGES)])
        return captured

    def of(self, ran: npt.NDArray[np.void]) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Return for each execution the name of the captured call that it belongs to, 0 for none, and if it is its
        first node."""
        name, is_first = np.zeros(len(ran), np.int64), np.zeros(len(ran), np.bool_)
        if self._launches:
            # A kernel of a graph is known by its own name.
            found = np.flatnonzero((ran["address"] > 0) & (ran["flags"] & 1 == 0))
            fields = (ran[column][found].tolist() for column in ("correlation", "address"))
            for at, launch, node in zip(found.tolist(), *fields, strict=True):
                call = self._launches.get(launch, {}).get(node)
                if call is not None:
                    name[at], is_first[at] = call.name, call.first_node == node
        return name, is_first

    def _follow(self, changes: npt.NDArray[np.void]) -> None:
        columns = (changes[name].tolist() for name in ("kind", "aux0", "aux1", "correlation"))
        for kind, graph, node, correlation in zip(*columns, strict=True):
            if kind in (Kind.GRAPH_INSTANTIATE, Kind.GRAPH_UPDATE):
                self._graphs[graph], self._firsts[graph] = {}, {}
            elif kind == Kind.GRAPH_LAUNCH:
                self._remember(correlation, self._graphs.get(graph, {}))
            elif (name := self._names.get(correlation)) is not None:
                first = self._firsts.setdefault(graph, {}).setdefault(correlation, node)
                self._graphs.setdefault(graph, {})[node] = CapturedCall(correlation, name, first)

    def _remember(self, launch: int, nodes: dict[int, CapturedCall]) -> None:
        if nodes:
            self._launches[launch] = nodes
            if self._most is not None and len(self._launches) > self._most:
                del self._launches[next(iter(self._launches))]
