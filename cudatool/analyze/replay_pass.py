"""One pass of recorded calls through our own allocator, decision by decision; see :mod:`cudatool.analyze.replay`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from cudatool.analyze.calls import RELEASES, AllocatorCall, Part, Verb
from cudatool.analyze.releases import leading_releases, share_of_program
from cudatool.analyze.replay_pools import UnnamedPools
from cudatool.analyze.replay_script import Script
from cudatool.analyze.replay_start import own_stream, set_up
from cudatool.analyze.requests import Requests
from cudatool.errors import OutOfMemoryError, UsageError
from cudatool.memory.blocks import FREE, MIN_BLOCK_SIZE, SMALL_LIMIT, Block, BlockPool, PoolId, round_size, segment_size
from cudatool.memory.journal import Journal
from cudatool.memory.policy import DEFAULT_POOL, Policy
from cudatool.memory.settings import Settings
from cudatool.memory.snapshot import segment as segment_info
from cudatool.trace.events import SEGMENT_GAINS, Kind, unpack_pool
from cudatool.trace.model import Trace

__all__ = ["ALONE", "Divergence", "ReplayPass", "pool_ids"]

_ADDRESS_SPACE = 1 << 46  # for expandable segments if the size of the device is not known
ALONE = 5
"""What a call costs more that is taken by itself, in calls that are served many at a time; measured."""

# The probable reasons for a difference.
_ANOTHER_FITS = "another free block fits best here: other settings applied, or a block hides a rest"
_CONTRADICTION = "the file contradicts itself"
_ENOUGH_HERE = "there is memory enough here: a limit applied that the file does not name"
_IN_USE_HERE = "it is in use here, or was never there"
_NOTHING_FITS = "no free block fits here: other settings applied, or blocks were in other pools"
_SOMETHING_FITS = "a free block fits here: the request was for a private pool, or other settings applied"
_STILL_IN_USE = "it is entirely free here: its pool was still in use, or a block in it is not in the file"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first decision that differs: of the call at `event`, an index into the trace's records.

    Attributes
    ----------
    what, size
        The call, and its bytes.
    expected, actual
        What was recorded, and what the replay did.
    reason
        The probable cause.
    """

    event: int
    what: str
    size: int
    expected: str
    actual: str
    reason: str


def pool_ids(trace: Trace) -> Callable[[int], PoolId]:
    """Return a function from the number of a pool in a trace's records to its id."""
    pools = [(first, second) for first, second in trace.header.get("pools", ())]
    return lambda number: pools[number] if 0 <= number < len(pools) else unpack_pool(number)


class ReplayPass:
    """One pass through the calls."""

    def __init__(
        self,
        trace: Trace,
        asked: Requests,
        settings: Settings,
        total_memory: int | None,
        tails: dict[int, int],
        guesses: set[int],
        pools: UnnamedPools | None,
    ) -> None:
        self.asked = asked
        self.settings = settings
        self.pool_id = pool_ids(trace)
        self.total_memory = total_memory
        self.script = Script(total_memory or _ADDRESS_SPACE)
        self.policy = Policy(
            self.script,
            device=asked.device,
            settings=settings,
            journal=Journal(asked.device, None),
            total_memory=self.script.total_memory,
            outside=nullcontext,
        )
        self._records = trace.records
        frees = trace.records["kind"] == Kind.BLOCK_FREE_REQUESTED
        self._frees_have_stacks = bool((trace.records["stack"][frees] > 0).any())
        # Numbers of calls, and how many of each call's first releases are, or may be, the program's.
        self._by_program: list[tuple[int, int]] = []
        self._doubtful: list[tuple[int, int]] = []
        self._too_much: list[int] = []  # bytes that could not be reserved
        self._perhaps_too_much: list[int] = []
        self._available: list[int] = []  # bytes that could be reserved on the device, at each failure
        self._recorded_level = sum(change.size for change in asked.prior_memory)  # bytes reserved when it was recorded
        self.allocs = self.exact = self.changes = self.changes_exact = 0
        self.cost = self._most = 0
        self.first: Divergence | None = None
        self.tails = tails
        self.guesses = guesses  # the tails that were guessed
        self.unnamed_pools = pools
        self.misplaced = 0
        self._address: dict[int, int] = {}  # of each block in use
        self._prior_at: dict[int, int] = {}  # end of a prior block in use -> its number
        self.guessed = False  # whether there is a new guess
        self._goes_on = self._stops = False
        self._not_before = -1  # the event before which a difference shows that guesses are wrong
        self._pools: set[PoolId] = set()

    def run(self, *, goes_on: bool = False, at_most: int | None = None, not_before: int = -1) -> bool:
        """Replay everything and return True; or stop and return False.

        Unless it `goes_on`, it stops if there is a new guess to start again from, or if guesses are wrong: those of
        pools if anything differs, the others if an event differs that comes before `not_before`. It also stops at a
        cost.
        """
        self._goes_on, self._not_before = goes_on, not_before
        calls = self.asked.calls
        self._most = (1 + ALONE) * len(calls) if at_most is None else at_most
        if self.asked.prior_memory or self.asked.prior_blocks:
            self._set_up()
        return calls.go_through(calls.special(), self._many, self._one, "replaying")

    def _many(self, part: Part, start: int, stop: int) -> int:
        """Replay calls in which nothing else happens, up to the first that differs from the recording."""
        lists = part.mallocs, part.blocks, part.sizes, part.streams, part.addresses
        stop = min(stop, start + max(self._most - self.cost, 0))
        stop, _ = self.policy.serve(self._address, *lists, start, stop)
        allocs = part.mallocs[start:stop].count(True)
        self.allocs += allocs
        self.exact += allocs
        self.cost += stop - start
        return stop

    def _one(self, number: int, call: AllocatorCall) -> bool:
        """Replay a call; return whether to go on."""
        if self.cost >= self._most:
            return False
        self.cost += 1 + ALONE
        for change in call.changes:
            self._recorded_level += -change.size if change.kind in RELEASES else change.size
        verb = call.verb
        scripted = call.changes or call.done or verb is Verb.FAILED_MALLOC
        if scripted and verb is Verb.MALLOC and call.changes and call.changes[0].kind in RELEASES:
            call = self._separate(number, call)
        if scripted:
            self._begin(call)
        if verb is Verb.MALLOC:
            self._malloc(call)
        elif verb is Verb.FREE or verb is Verb.FREE_LATER:
            self._free(call)
        elif verb is Verb.EMPTY_CACHE:
            self._empty_cache(call)
        else:
            self._failed_malloc(call)
        if (scripted or self.script.wrong) and not self._stops:
            self._end(call)
        return not self._stops

    def separated(self, *, otherwise: bool = False) -> Requests:
        """Return the requests, with every ``empty_cache`` as a separate call.

        If `otherwise`, doubtful releases are the program's, too.
        """
        emptied = dict(self._by_program if not otherwise else self._by_program + self._doubtful)
        calls = self.asked.calls.with_emptied(emptied) if emptied else self.asked.calls
        retries = self.policy.statistics.num_alloc_retries
        return replace(
            self.asked,
            calls=calls,
            tails=self.tails,
            retries=retries - len(self._doubtful) if otherwise else retries,
            ceiling=min(self._too_much if otherwise else self._too_much + self._perhaps_too_much, default=None),
            available=min(self._available, default=None),
            otherwise=self.separated(otherwise=True) if self._doubtful and not otherwise else None,
        )

    def _separate(self, number: int, call: AllocatorCall) -> AllocatorCall:
        """Do what the program did before this call; return the remainder of the call."""
        fitted = self._fits(call)
        self._begin(call._replace(changes=()))  # blocks that other streams had finished with by then are free
        id = self._pool(call.pool) if call.pool else DEFAULT_POOL
        size = round_size(call.size, self.settings)
        stack = int(self._records["stack"][call.event])
        share = share_of_program(
            call,
            size,
            self.policy,
            self.policy.pool_for(id, is_small=size <= SMALL_LIMIT),
            self.settings,
            stack=stack,
            frees_have_stacks=self._frees_have_stacks,
            fits=fitted,
            peak_reserved=self.asked.peak_reserved,
            total_memory=self.total_memory,
        )
        if share.doubtful:
            self._doubtful.append((number, len(leading_releases(call))))
        first = call._replace(done=(), changes=call.changes[: share.by_program])
        rest = call._replace(done=(), changes=call.changes[share.by_program :])
        if share.by_program:
            self._by_program.append((number, share.by_program))
            self._begin(first)
            self._empty_cache(first)
            self._end(first)
        elif share.demand:
            self._had_no_memory(share.demand, share.doubtful)
            if self._fits(call):  # it waited for other streams after it had searched for a free block
                released = leading_releases(call)
                self._begin(call._replace(done=(), changes=released))
                self.policy.release_cached(DEFAULT_POOL)
                self.policy.statistics.num_alloc_retries += 1
                self._end(call._replace(changes=released))
                rest = call._replace(done=(), changes=call.changes[len(released) :])
        return rest

    def _had_no_memory(self, demand: int, doubtful: bool = False) -> None:
        """Note that this many bytes could not be reserved."""
        if demand > self.asked.peak_reserved:  # else they could at another time: the limit is not always the same
            (self._perhaps_too_much if doubtful else self._too_much).append(demand - 1)

    def _set_up(self) -> None:
        """Put the allocator into the state that the recording began with."""
        self._address, self.misplaced = set_up(
            self.policy, self.asked, self.tails, self._pool, self.script.total_memory * 9 // 8
        )
        for call, size in zip(self.asked.prior_blocks, self.asked.prior_sizes, strict=True):
            if call.block in self._address:
                self._prior_at[call.address + size + self.tails.get(call.block, 0)] = call.block
        for number in self.asked.prior_pending:
            address = self._address.pop(number, None)
            if address is not None:
                self.policy.record_stream(address, own_stream(number))
                self.policy.free(address)
        self.script.exact, self.script.wrong = 0, []

    # One call.

    def _begin(self, call: AllocatorCall) -> None:
        self.script.expected = deque(call.changes)
        self.script.passed = {own_stream(block) for block in call.done}
        self.script.fails = call.verb is Verb.FAILED_MALLOC
        if call.done:
            self.policy.free_passed_blocks()

    def _free(self, call: AllocatorCall) -> None:
        address = self._address.pop(call.block, None)
        if address is None:
            return  # its block could not be placed anywhere
        try:
            if call.verb is Verb.FREE_LATER:
                self.policy.record_stream(address, own_stream(call.block))
            self.policy.free(address)
        except UsageError:  # the same: another block is where it was
            self._diverge(call, f"{address:#x} freed", "not in use", _CONTRADICTION)

    def _end(self, call: AllocatorCall) -> None:
        pools = self.unnamed_pools
        if self.first is None and pools is not None and any(pools.explain(a, call) for a in self.script.early):
            self.guessed, self._stops = True, not self._goes_on
            if self._stops:
                return
        self.changes += len(call.changes)
        self.changes_exact += self.script.exact
        if self.script.wrong:
            reason = _STILL_IN_USE if self.script.early else _NOTHING_FITS
            self._diverge(call, "nothing of that kind", self.script.wrong[0], reason)
        elif self.script.expected:
            left = self.script.expected[0]
            reason = _SOMETHING_FITS if left.kind in SEGMENT_GAINS else _IN_USE_HERE
            self._diverge(call, f"{left.kind.name} of {left.size} bytes at {left.address:#x}", "nothing", reason)
        if self.script.expected:
            self._enforce()
        self.script.exact, self.script.wrong, self.script.early, self.script.fails = 0, [], [], False

    def _malloc(self, call: AllocatorCall) -> None:
        self.allocs += 1
        size, pool = self._size_and_pool(call)
        fitting = pool.fit(size, call.stream)
        # What would be handed out and taken back at once takes longer, and counts as another allocation.
        if fitting is not None and fitting.address != call.address:
            self._malloc_elsewhere(call, fitting.address, fitting)
            return
        if fitting is None and not call.changes and not pool.expandable and self.policy.segments.allowed is None:
            self._diverge(call, f"{call.address:#x}", "a new segment", _NOTHING_FITS)
            self._put_where_it_was(call)
            return
        try:
            actual = self._allocate(call)
        except OutOfMemoryError:
            actual = 0
        if actual == call.address:
            self.exact += 1
            self._address[call.block] = actual
            return
        self._malloc_elsewhere(call, actual)

    def _malloc_elsewhere(self, call: AllocatorCall, actual: int, fitting: Block | None = None) -> None:
        """Note that a request got another address, or would get that of a `fitting` free block; put it where it was."""
        if self.first is None and self._can_guess(call, actual, fitting):
            self.guessed, self._stops = True, not self._goes_on
            if self._stops:
                return
        reason = _SOMETHING_FITS if call.changes else _ANOTHER_FITS
        here = f"{actual:#x}"
        if not actual or self.script.is_made_up(actual):
            here, reason = "a new segment" if actual else "out of memory", _NOTHING_FITS
        self._diverge(call, f"{call.address:#x}", here, reason)
        if actual and fitting is None:
            self._give_back(actual)
        self._put_where_it_was(call)

    def _put_where_it_was(self, call: AllocatorCall) -> None:
        self._enforce()
        if self.policy.allocate_at(call.address, round_size(call.size, self.settings), call.size):
            self._address[call.block] = call.address

    def _allocate(self, call: AllocatorCall) -> int:
        id = self._pool(call.pool) if call.pool else DEFAULT_POOL
        if id == DEFAULT_POOL:
            return self.policy.malloc(call.size, call.stream)
        self.policy.begin_allocate_to_pool(id, lambda stream: True)
        try:
            return self.policy.malloc(call.size, call.stream)
        finally:
            self.policy.end_allocate_to_pool(id)
            self.policy.release_pool(id)

    def _failed_malloc(self, call: AllocatorCall) -> None:
        try:
            address = self._allocate(call)
        except OutOfMemoryError:
            reserved = self.policy.statistics.all.reserved_bytes.current
            needed = segment_size(round_size(call.size, self.settings), self.settings)
            self._available.append(self._recorded_level + int(self._records["aux0"][call.event]))
            # If the device had enough free memory, a memory fraction made the request fail.
            self._had_no_memory(reserved + min(int(self._records["aux0"][call.event]) + 1, needed))
            return
        self._diverge(call, "out of memory", f"{address:#x}", _ENOUGH_HERE)
        self._give_back(address)

    def _empty_cache(self, call: AllocatorCall) -> None:
        if not call.changes:
            return  # blocks became free, as they do whenever the allocator checks its events
        pools = list(dict.fromkeys(self.pool_id(change.pool) for change in call.changes))
        for id in pools:
            if id in self._pools:
                self.policy.release_pool(id)
                self._pools.discard(id)
        if DEFAULT_POOL in pools or not self._default_has_free_segments():
            self.policy.release_cached(DEFAULT_POOL)
            return
        for id in pools:  # a pool that goes away empties its own cache; torch.cuda.empty_cache() the default one too
            self.policy.release_cached(id)

    def _size_and_pool(self, call: AllocatorCall) -> tuple[int, BlockPool]:
        """Return the size of the block for a request, and the pool that it comes from."""
        id = DEFAULT_POOL
        if call.pool:
            id = self._pool(call.pool)
        else:
            self.policy.free_passed_blocks()
        size = round_size(call.size, self.settings)
        return size, self.policy.pool_for(id, is_small=size <= SMALL_LIMIT)

    def _fits(self, call: AllocatorCall) -> bool:
        size, pool = self._size_and_pool(call)
        return pool.fit(size, call.stream) is not None

    def _default_has_free_segments(self) -> bool:
        pools = [self.policy.pool_for(DEFAULT_POOL, is_small=is_small) for is_small in (True, False)]
        return any(pool.whole_segments() for pool in pools)

    # Differences.

    def _diverge(self, call: AllocatorCall, expected: str, actual: str, reason: str) -> None:
        pools = self.unnamed_pools
        if not self._goes_on and ((pools is not None and len(pools)) or call.event < self._not_before):
            self._stops = True
        if self.first is None:
            self.first = Divergence(call.event, call.verb.name.lower(), call.size, expected, actual, reason)

    def _can_guess(self, call: AllocatorCall, actual: int, fitting: Block | None) -> bool:
        """Explain an allocation after a prior block by a remainder in this block, or others by a private pool."""
        prior = self._prior_at.get(actual)
        if prior is None or prior not in self._address or prior in self.tails:
            pools = self.unnamed_pools
            return pools is not None and any(pools.explain(at, call) for at in (call.address, actual))
        block = fitting or self.policy.block_in_use(actual)
        after = block.next
        room = block.size + (after.size if after is not None and after.state is FREE else 0)
        missing = room - round_size(call.size, self.settings) + MIN_BLOCK_SIZE
        if block.pool.is_small or block.pool.expandable or missing > SMALL_LIMIT:
            return False
        self.tails[prior] = missing
        self.guesses.add(prior)
        return True

    def _give_back(self, address: int) -> None:
        block = self.policy.block_in_use(address)
        self.policy.free(address)
        if self.script.is_made_up(block.address) and block.previous is None and block.next is None:
            self.policy.segments.release(block)

    def _enforce(self) -> None:
        """Apply what the recording did and the allocator did not."""
        while self.script.expected:
            change = self.script.expected.popleft()
            pool = self.policy.pool_for(self._pool(change.pool), is_small=change.is_small)
            if change.kind is Kind.SEGMENT_ALLOC:
                self.policy.segments.adopt(pool, change.address, change.size, change.stream)
            elif change.kind is Kind.SEGMENT_MAP:
                self.script.expected.appendleft(change)  # the provider takes it off
                if self.policy.segments.adopt_pages(pool, change.address, change.size, change.stream) is None:
                    self.script.expected.popleft()
                self.script.exact = 0
            else:
                for block in pool.whole_segments():
                    if block.address == change.address:
                        self.script.expected.appendleft(change)
                        self.policy.segments.release(block)
                        self.script.exact -= 1

    def _pool(self, number: int) -> PoolId:
        id = self.pool_id(number)
        if id != DEFAULT_POOL and id not in self._pools:
            try:
                self.policy.use_pool(id)
            except UsageError:  # it is being released, so it cannot be this one
                return DEFAULT_POOL
            self._pools.add(id)
        return id

    def compare_final(self, final: list[dict[str, Any]] | None) -> tuple[int, int]:
        """Return how many blocks differ from the recorded ones at the end, and how many there are."""
        if final is None:
            return 0, 0
        segments = self.policy.segments
        ours = {
            (block["address"], block["size"], block["requested_size"], block["state"])
            for head in segments.heads()
            for block in segment_info(head, self.asked.device, 0, None)["blocks"]
        }
        recorded = [
            (block["address"], block["size"], block.get("requested_size", block["size"]), block["state"])
            for segment in final
            if segment.get("device", 0) == self.asked.device
            for block in segment["blocks"]
        ]
        says_of_free = any(asked for _, _, asked, state in recorded if state == "inactive")
        if self.asked.prior_memory or not says_of_free:
            # The last requested size of a free block may be from before the recording, and no trace of ours has it.
            ours = {(a, size, 0 if state == "inactive" else asked, state) for a, size, asked, state in ours}
            recorded = [(a, size, 0 if state == "inactive" else asked, state) for a, size, asked, state in recorded]
        return max(len(ours - set(recorded)), len(set(recorded) - ours)), len(recorded)
