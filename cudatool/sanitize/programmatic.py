"""Programmatic dependent launch: a kernel that may begin before the kernel before it in its stream has ended.

CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization": with the attribute
programmaticStreamSerialization, "the CUDA driver can safely launch the kernel early and not wait on the completion and
memory flush of the primary before launching the secondary"; the secondary may begin "once all primary thread blocks
trigger". PTX ISA, griddepcontrol: "If the prerequisite grid is using griddepcontrol.launch_dependents, then the
dependent grid must use griddepcontrol.wait to ensure correct functional execution."

So of two kernels that follow each other directly in a stream, the second one comes in no order with the first if it has
the attribute and no wait, and the first one triggers. It comes after what the first one came after. It is an operation
of another agent, which the stream waits for before its next operation::

    stream        A.start   A ............   after B
                       \\                  /
    second agent        B.start  B ......

Any other operation between the two makes it wait for all of the first. That a kernel waits, and where, is known from
its PTX alone: accesses before the wait count as ordered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cudatool.sanitize.ordering import Agent, Ordering
from cudatool.sanitize.rows import Row
from cudatool.trace.distinct import distinct
from cudatool.trace.events import Kind, LaunchFlag
from cudatool.trace.model import Trace

if TYPE_CHECKING:
    from cudatool.sanitize.clocks import Moment

__all__ = ["AGENTS", "Dependents", "early_streams"]

AGENTS: Final = 2
"""Agents for each stream with early kernels: in a chain of them every second one shares an agent."""
_EARLY: Final = LaunchFlag.PROGRAMMATIC | LaunchFlag.WAITS


def early_streams(trace: Trace) -> list[int]:
    """Return the streams on which kernels may begin early that do not wait."""
    records = trace.records
    early = (records["kind"] == Kind.KERNEL_LAUNCH) & (records["flags"] & _EARLY == LaunchFlag.PROGRAMMATIC)
    return [stream for stream in distinct(records["stream"][early]).tolist() if stream]


class Dependents:
    """The kernels of a trace that trigger, and those that begin early.

    Parameters
    ----------
    agents
        For each of :func:`early_streams`, those that stand for its early kernels.
    """

    def __init__(self, agents: dict[int, tuple[Agent, ...]]) -> None:
        self._agents = agents
        self._triggering: dict[Agent, tuple[int, Moment, int]] = {}
        """By stream, the latest kernel that triggers: where the stream stood after it, the moment at which that kernel
        could begin, and how many before it in the chain began early."""

    def enqueue(self, row: Row, host: Agent, stream: Agent, ordering: Ordering, *, serialized: bool) -> Agent:
        """Append a kernel and return the agent whose operation it is; `serialized` if it must not begin early."""
        agent, depth = stream, 0
        after, begin, length = self._triggering.get(stream, (-1, stream.done, 0))
        early = row.flags & _EARLY == LaunchFlag.PROGRAMMATIC and after == stream.count
        agents = self._agents.get(stream.stream)
        if early and agents and not serialized:
            agent, depth = agents[length % AGENTS], length + 1
            for moment in (begin, *ordering.position(stream)[1:]):
                ordering.learn(agent, moment)
        triggers = row.flags & LaunchFlag.TRIGGERS and agents is not None
        if triggers:  # its beginning is a moment of its own
            ordering.enqueue(host, agent, row.record)
            begin = agent.done
        ordering.enqueue(host, agent, row.record)
        if triggers:
            self._triggering[stream] = stream.count + (agent is not stream), begin, depth
        return agent
