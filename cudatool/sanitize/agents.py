"""The agents of a trace: which host threads and streams there are, and which of them wait for each other implicitly."""

from __future__ import annotations

from dataclasses import dataclass

from cudatool.sanitize.clocks import Clocks
from cudatool.sanitize.effort import Effort
from cudatool.sanitize.ordering import Agent
from cudatool.sanitize.programmatic import AGENTS, early_streams
from cudatool.trace.distinct import distinct
from cudatool.trace.events import Kind, StreamFlag
from cudatool.trace.model import Trace
from cudatool.trace.streams import stream_names, thread_names

__all__ = ["Agents", "agents_of"]


@dataclass(frozen=True, slots=True)
class Agents:
    """The agents of one trace.

    Attributes
    ----------
    agents
        All of them, by their position in clocks.
    hosts
        By host thread.
    streams
        By the stream's id.
    dependents
        By the id of a stream with programmatic launches: what carries out kernels that begin early.
    clocks
        Those of all agents.
    """

    agents: list[Agent]
    hosts: dict[int, Agent]
    streams: dict[int, Agent]
    dependents: dict[int, tuple[Agent, ...]]
    clocks: Clocks


def agents_of(trace: Trace, effort: Effort, *, one_host: bool) -> Agents:
    """Return the agents of a trace, in which all host threads are one agent if it is `one_host`."""
    records = trace.records
    threads = distinct(records["thread"]).tolist()
    ids = [stream for stream in distinct(records["stream"]).tolist() if stream]
    of_thread = thread_names(trace)
    early = early_streams(trace)

    count = 1 if one_host else len(threads)
    clocks = Clocks(count + len(ids) + AGENTS * len(early), effort)
    nothing = clocks.nothing
    host_agents = [
        Agent(i, nothing, "the host" if one_host else f"host thread {of_thread[threads[i]]}", is_host=True)
        for i in range(count)
    ]
    hosts = {thread: host_agents[0 if one_host else i] for i, thread in enumerate(threads)}
    streams = _streams(trace, ids, count, clocks)
    agents = [*host_agents, *streams.values()]
    dependents: dict[int, tuple[Agent, ...]] = {}
    for stream in early:
        own = streams[stream]
        dependents[stream] = tuple(
            Agent(len(agents) + i, nothing, own.label, device=own.device, context=own.context, stream=stream)
            for i in range(AGENTS)
        )
        agents += dependents[stream]
    return Agents(agents, hosts, streams, dependents, clocks)


def _streams(trace: Trace, ids: list[int], first: int, clocks: Clocks) -> dict[int, Agent]:
    """Return the agents of the streams with these ids, of which the `first` in clocks is the first."""
    records = trace.records
    created = records[records["kind"] == Kind.STREAM_CREATE]
    columns = (created[name].tolist() for name in ("device", "size", "flags"))
    facts = dict(zip(created["stream"].tolist(), zip(*columns, strict=True), strict=True))
    is_legacy, is_non_blocking = int(StreamFlag.LEGACY_DEFAULT), int(StreamFlag.NON_BLOCKING)  # faster than members
    names = stream_names(trace, in_sentences=True)
    found: dict[int, Agent] = {}
    legacy: list[Agent] = []
    blocking: list[Agent] = []
    for index, stream in enumerate(ids, first):
        device, context, flags = facts.get(stream, (-1, 0, 0))
        label = names[stream]
        agent = found[stream] = Agent(index, clocks.nothing, label, device=device, context=context, stream=stream)
        if flags & is_legacy:
            agent.pending = {}
            legacy.append(agent)
        elif not flags & is_non_blocking:
            blocking.append(agent)
    for default in legacy:
        # A stream whose creation was not seen may be of any device.
        default.peers = tuple(s for s in blocking if s.is_of(default.device, default.context))
        for peer in default.peers:
            peer.peers += (default,)
    return found
