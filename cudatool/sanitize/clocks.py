"""Vector clocks: for every agent, up to which of its operations everything is known to be finished.

A clock of a few agents is a tuple. That of many is a tree of tuples, in which a changed clock shares all but one path
with the one that it was made from, and in which joining two costs what one of them has learnt since it last heard of
the other (as with U. Mathur et al., "A Tree Clock Data Structure for Causal Orderings in Concurrent Executions", ASPLOS
2022). Both rest on one invariant::

    a clock that has operation n of agent a also has everything that operation n of a came after

So an agent that learns something takes a new epoch before any other one can learn of that. Clocks are replaced, never
changed.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cudatool.sanitize.effort import Effort

__all__ = ["Clock", "Clocks", "Moment", "Tree"]

_BITS: Final = 5  # of an agent's number, for each level of a tree
_COMPONENT: Final = 4  # units of an effort: it takes memory, too


class Tree:
    """The clock of many agents: `root` leads to tuples of tuples, and the last ones hold epochs."""

    __slots__ = ("root", "shifts")

    def __init__(self, root: tuple, shifts: tuple[int, ...]) -> None:  # type: ignore[type-arg]
        self.root = root
        self.shifts = shifts

    def __getitem__(self, agent: int) -> int:
        node = self.root
        for shift in self.shifts:
            node = node[agent >> shift & (1 << _BITS) - 1]
        return node  # type: ignore[return-value]

    def __iter__(self) -> Iterator[int]:
        nodes: Iterable = self.root  # type: ignore[type-arg]
        for _ in self.shifts[1:]:
            nodes = itertools.chain.from_iterable(nodes)
        return iter(nodes)

    def raised(self, agent: int, epoch: int) -> Tree:
        """Return the clock with another epoch of one agent."""
        path = []
        node = self.root
        for shift in self.shifts:
            place = agent >> shift & (1 << _BITS) - 1
            path.append((node, place))
            node = node[place]
        new: tuple | int = epoch  # type: ignore[type-arg]
        for node, place in reversed(path):
            new = (*node[:place], new, *node[place + 1 :])
        return Tree(new, self.shifts)  # type: ignore[arg-type]


Clock = tuple[int, ...] | Tree


class Moment:
    """Operation `epoch` of an agent and, by `clock`, all that it comes after."""

    __slots__ = ("agent", "clock", "epoch")

    def __init__(self, agent: int, epoch: int, clock: Clock) -> None:
        self.agent = agent
        self.epoch = epoch
        self.clock = clock


class _Log:
    """What an agent has learnt: from its operation ``epochs[i]`` on it comes after the operation ``of[i]``."""

    __slots__ = ("epochs", "of")

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.of: list[tuple[int, int]] = []


class Clocks:
    """The clocks of a number of agents.

    Attributes
    ----------
    nothing
        The clock of an agent that knows of no other's work.
    """

    def __init__(self, agents: int, effort: Effort) -> None:
        self._effort = effort
        self._logs: list[_Log] = []
        self.nothing: Clock = (0,) * agents
        self._spent = _COMPONENT * agents
        if agents > 1 << _BITS:
            self._logs = [_Log() for _ in range(agents)]
            self.nothing = _tree([0] * agents)
            self._spent = (_COMPONENT << _BITS) * len(self.nothing.shifts)

    def join(self, agent: int, epoch: int, clock: Clock, moment: Moment) -> Clock:
        """Return the clock of operation `epoch` of `agent`, so far `clock`, if it comes after `moment`, too.

        No other agent may know of operation `epoch` yet.
        """
        if moment.agent == agent or clock[moment.agent] >= moment.epoch:
            return clock
        joined = self._joined(agent, clock, moment)
        if self._logs:
            self._logs[agent].epochs.append(epoch)
            self._logs[agent].of.append((moment.agent, moment.epoch))
        return joined

    def peek(self, agent: int, clock: Clock, moment: Moment) -> Clock:
        """Return what `join` would for the present clock of `agent`, which learns nothing."""
        if moment.agent == agent or clock[moment.agent] >= moment.epoch:
            return clock
        return self._joined(agent, clock, moment)

    def _joined(self, agent: int, clock: Clock, moment: Moment) -> Clock:
        other, reached = moment.agent, moment.epoch
        if self._effort.counts:
            self._effort.spend(self._spent)
        if not self._logs:
            joined = list(map(max, clock, moment.clock))
            if joined[other] < reached:
                joined[other] = reached
            return tuple(joined)
        # What either side lacks: the shorter list is added to the other side's clock.
        own, others = self._logs[agent], self._logs[other]
        mine = bisect_right(own.epochs, moment.clock[agent])
        news = bisect_right(others.epochs, reached) - bisect_right(others.epochs, clock[other])
        if len(own.epochs) - mine <= news:
            return self._learn(agent, self.raised(moment.clock, other, reached), own.of[mine:])
        return self._learn(agent, clock, [(other, reached)])

    def more(self, agent: int, clock: Clock, moment: Moment) -> Clock:
        """Return `clock`, which may be more than `agent` knows, with a moment."""
        if self._logs:
            return self._learn(agent, clock, [(moment.agent, moment.epoch)])
        return self.peek(agent, clock, moment)

    def after(self, moment: Moment) -> Clock:
        """Return the clock of an agent that has waited for a moment."""
        return self.raised(moment.clock, moment.agent, moment.epoch)

    def join_all(self, agent: int, epoch: int, clock: Clock, other: Clock) -> Clock:
        """As `join`, with everything that is finished by `other`, which may be no agent's clock."""
        if not self._logs:
            self._effort.spend(self._spent)
            return tuple(map(max, clock, other))
        self._effort.spend(_COMPONENT * len(self._logs))
        known = list(clock)
        news = [(one, reached) for one, reached in enumerate(other) if reached > known[one]]
        own = self._logs[agent]
        own.epochs += [epoch] * len(news)
        own.of += news
        return self._learn(agent, clock, news)

    def _learn(self, agent: int, clock: Clock, news: list[tuple[int, int]]) -> Clock:
        waiting = list(news)
        while waiting:
            other, reached = waiting.pop()
            known = clock[other]
            if other == agent or known >= reached:
                continue
            log = self._logs[other]
            waiting += log.of[bisect_right(log.epochs, known) : bisect_right(log.epochs, reached)]
            clock = self.raised(clock, other, reached)
        return clock

    def raised(self, clock: Clock, agent: int, epoch: int) -> Clock:
        """Return the clock that also has operation `epoch` of `agent`, which it has all the rest of already."""
        self._effort.spend(self._spent)
        if isinstance(clock, Tree):
            return clock.raised(agent, epoch)
        return (*clock[:agent], epoch, *clock[agent + 1 :])

    def meet(self, first: Clock, second: Clock) -> Clock:
        """Return the clock of what both have."""
        self._effort.spend(_COMPONENT * max(len(self._logs), 1) + self._spent)
        lower = map(min, first, second)
        return _tree(list(lower)) if self._logs else tuple(lower)


def _tree(epochs: list[int]) -> Tree:
    nodes: list = epochs  # type: ignore[type-arg]
    shifts = [0]
    while len(nodes) > 1 << _BITS:
        nodes = [tuple(nodes[start : start + (1 << _BITS)]) for start in range(0, len(nodes), 1 << _BITS)]
        shifts.insert(0, shifts[0] + _BITS)
    return Tree(tuple(nodes), tuple(shifts))
