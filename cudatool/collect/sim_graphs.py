"""Reports the nodes and edges of graphs to the hooks when the software device makes or changes them.

A launch then needs only one record: it names nodes by number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cudatool.collect.sim_ids import id_of_stream
from cudatool.ptx.kernel_names import kernel_name
from cudatool.trace import hooks
from cudatool.trace.events import Kind, WarningCode, WarningFlag

if TYPE_CHECKING:
    from cudatool.sim import Machine

__all__ = ["GraphWatcher"]

_KERNEL, _MEMCPY, _MEMSET, _EMPTY, _WAIT_EVENT, _EVENT_RECORD = 0, 1, 2, 5, 6, 7  # CUgraphNodeType
_BATCH_MEM_OP = 12


class GraphWatcher:
    """Emits the ``GRAPH_*`` events that describe graphs. One for each :class:`SimDriverCollector`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._added: dict[int, int] = {}  # driver call that added a node -> correlation of its event
        self._last = 0  # the last one of those

    def captured(self, call: int) -> None:
        """Report the node, if any, that a driver call has captured."""
        found = self._machine.captures.added_by(call)
        if found is not None:
            stream, node = found
            self._node_added(node, device=stream.context.device.ordinal, stream=id_of_stream(stream))

    def added(self, handle: int) -> None:
        """Report a node that was added by hand."""
        self._node_added(self._machine.objects[handle])

    def _node_added(self, node: Any, **where: int) -> None:
        # The first node of an operation of our runtime goes by the operation's own correlation.
        ours = hooks.current_operation()
        self._last = correlation = ours if ours not in (0, self._last) else hooks.new_correlation()
        self._added[node.added_by] = correlation
        hooks.emit(
            Kind.GRAPH_NODE_ADDED,
            correlation=correlation,
            aux0=node.graph.id,
            flags=int(node.kind),
            name=_name(node),
            **where,
        )

    def instantiated(self, handle: int) -> None:
        """Report an executable graph that was made, its nodes and edges."""
        executable = self._machine.objects[handle]
        hooks.emit(Kind.GRAPH_INSTANTIATE, aux0=executable.id, aux1=executable.source.id)
        self._nodes(executable)
        for first, second in executable.edges():
            hooks.emit(Kind.GRAPH_EDGE, aux0=executable.id, address=first, aux1=second)

    def updated(self, handle: int) -> None:
        """Report what the nodes of an executable graph do from now on."""
        executable = self._machine.objects[handle]
        hooks.emit(Kind.GRAPH_UPDATE, aux0=executable.id)
        self._nodes(executable)

    def _nodes(self, executable: Any) -> None:
        for number, node, is_on in executable.nodes():
            event = 0
            if node.kind == _BATCH_MEM_OP:
                text = "batch memory operation nodes: what they write and wait for is not recorded"
                hooks.emit(Kind.WARNING, name=text, flags=WarningFlag.UNSEEN, aux0=WarningCode.NODES_NOT_RECORDED)
            if node.kind in (_WAIT_EVENT, _EVENT_RECORD):
                event = hooks.event_id(node.work.event.handle)
            hooks.emit(
                Kind.GRAPH_NODE,
                correlation=self._added.get(node.added_by, 0),
                aux0=executable.id,
                aux1=number,
                flags=int(node.kind) if is_on else _EMPTY,
                address=event,
                name=_name(node),
            )
            for address, size in self._pointers(node):
                hooks.emit(Kind.GRAPH_POINTER, aux0=executable.id, aux1=number, address=address, size=size)

    def _pointers(self, node: Any) -> Iterator[tuple[int, int]]:
        """Yield the device addresses that a node will use, and how many bytes from there, if known."""
        work = node.work
        if node.kind == _KERNEL:
            words = work.launch.arguments
            for at in range(0, len(words) - 7, 8):
                address = int.from_bytes(words[at : at + 8], "little")
                allocations = self._machine.allocations
                if allocations.look_up(allocations.holding, address) is not None:
                    yield address, 0
        elif node.kind == _MEMCPY:
            for side in (work.source, work.target):
                if side.is_known:
                    yield side.address, work.span(side)
        elif node.kind == _MEMSET:
            yield work.address, work.span
        for slot in work.slots:
            yield slot.address, slot.size


def _name(node: Any) -> str:
    if node.kind == _KERNEL:
        return kernel_name(node.work.launch.function.name)
    return f"{node.kind.name.lower().replace('_', ' ')} node"
