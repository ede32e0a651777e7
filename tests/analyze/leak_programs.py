"""Programs as sequences of allocator events: some that leak by the definition in `cudatool.analyze.growth`, some not.

Each takes a :class:`Program` and may use its random numbers. `step` is a range where the program names its steps, and
nothing where it does not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from cudatool.trace.events import RECORD, CopyFlag, Kind
from cudatool.trace.model import Frame, Trace

KIB, MIB = 1 << 10, 1 << 20


@dataclass
class Program:
    """Writes events as an allocator would that never reuses an address."""

    seed: int = 0
    with_ranges: bool = False
    with_stacks: bool = True
    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)  # kind, address, size, stack, name
    frames: dict[Frame, int] = field(default_factory=dict)
    stacks: dict[tuple[int, ...], int] = field(default_factory=lambda: {(): 0})
    names: dict[str, int] = field(default_factory=lambda: {"": 0})
    top: int = 1 << 40
    live: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def stack(self, site: str) -> int:
        """Return the number of a stack; "a/b" is function a called by b, all below the loop in main."""
        if not self.with_stacks:
            return 0
        frames = [Frame("/home/me/train.py", part, 10 + sum(map(ord, part))) for part in site.split("/")]
        frames.append(Frame("/home/me/train.py", "main", 5))
        key = tuple(self.frames.setdefault(frame, len(self.frames)) for frame in frames)
        return self.stacks.setdefault(key, len(self.stacks))

    def take(self, site: str, size: int) -> int:
        """Allocate; the value is the block."""
        self.top += -(-size // 512) * 512
        address = self.top - -(-size // 512) * 512
        self.live[address] = size
        self.rows.append((Kind.BLOCK_ALLOC, address, size, self.stack(site), 0))
        return address

    def give(self, *blocks: int) -> None:
        for block in blocks:
            size = self.live.pop(block)
            self.rows.append((Kind.BLOCK_FREE_REQUESTED, block, size, 0, 0))
            self.rows.append((Kind.BLOCK_FREE_COMPLETED, block, size, 0, 0))

    def give_all(self) -> None:
        self.give(*self.live)

    def read(self, block: int) -> None:
        """Copy a block to the host."""
        self.rows.append((Kind.MEMCPY, block, self.live[block], 0, 0))

    @contextmanager
    def step(self, number: int = 0, name: str = "step") -> Iterator[None]:
        if not self.with_ranges:
            yield
            return
        interned = self.names.setdefault(f"{name} {number}", len(self.names))
        self.rows.append((Kind.RANGE_PUSH, 0, 0, 0, interned))
        yield
        self.rows.append((Kind.RANGE_POP, 0, 0, 0, 0))

    # What loops are made of.

    def model(self, layers: int = 6, size: int = 256 * KIB) -> list[int]:
        return [self.take(f"weight{i % 3}/build", size) for i in range(layers)]

    def work(self, count: int = 3, size: int = 64 * KIB, site: str = "work") -> None:
        """Temporaries, the same at each call: forwards allocated, backwards freed."""
        blocks = [self.take(f"{site}{i}", size * (i + 1)) for i in range(count)]
        self.give(*reversed(blocks))

    def varying_work(self, longest: int = 32) -> None:
        self.work(3, self.random.randint(1, longest) * 4 * KIB)

    def trace(self) -> Trace:
        records = np.zeros(len(self.rows), RECORD)
        kind, address, size, stack, name = (np.array(column) for column in zip(*self.rows, strict=True))
        records["kind"], records["address"], records["stack"], records["name"] = kind, address, stack, name
        records["size"], records["aux0"] = -(-size // 512) * 512, size
        records["flags"] = np.where(kind == Kind.MEMCPY, int(CopyFlag.SOURCE_DEVICE), 0)
        records["time"] = 1000 + 10 * np.arange(len(self.rows))
        return Trace(
            records, names=list(self.names), stacks=list(self.stacks), frames=list(self.frames), source="program"
        )


Scenario = Callable[[Program], None]
LEAKS: dict[str, tuple[Scenario, frozenset[str]]] = {}
"""What leaks, and the functions that allocate what is never given back."""
SOUND: dict[str, Scenario] = {}
"""What does not leak; some of it grows for a time, which may be all that was recorded."""
VARYING: dict[str, Scenario] = {}
"""What leaks, but gives back so much at random meanwhile that it is not always told."""
UNDECIDED: dict[str, Scenario] = {}
"""What leaks, but shows too little of it."""
MISTAKEN: dict[str, Scenario] = {}
"""What does not leak, but looks in every event like something that does."""


def leak(*functions: str) -> Callable[[Scenario], Scenario]:
    def enter(scenario: Scenario) -> Scenario:
        LEAKS[scenario.__name__] = scenario, frozenset(functions)
        return scenario

    return enter


def sound(scenario: Scenario) -> Scenario:
    SOUND[scenario.__name__] = scenario
    return scenario


def varies(scenario: Scenario) -> Scenario:
    VARYING[scenario.__name__] = scenario
    return scenario


def undecided(scenario: Scenario) -> Scenario:
    UNDECIDED[scenario.__name__] = scenario
    return scenario


def mistaken(scenario: Scenario) -> Scenario:
    MISTAKEN[scenario.__name__] = scenario
    return scenario


def loop(p: Program, steps: int, body: Callable[[int], object], work: Callable[[], None] | None = None) -> None:
    p.model()
    for i in range(steps):
        with p.step(i):
            (work or p.work)()
            body(i)


@leak("kept")
def every_step(p: Program) -> None:
    loop(p, 40, lambda i: p.take("kept", 100 * KIB))


@leak("kept")
def every_fourth_step(p: Program) -> None:
    loop(p, 60, lambda i: p.take("kept", 100 * KIB) if i % 4 == 0 else None)


@leak("kept")
def every_tenth_step(p: Program) -> None:
    loop(p, 80, lambda i: p.take("kept", 100 * KIB) if i % 10 == 9 else None)


@leak("kept")
def starts_late(p: Program) -> None:
    loop(p, 60, lambda i: p.take("kept", 50 * KIB) if i >= 36 else None)


@leak("kept")
def starts_very_late(p: Program) -> None:
    loop(p, 100, lambda i: p.take("kept", 50 * KIB) if i >= 80 else None)


@leak("kept")
def of_variable_size(p: Program) -> None:
    loop(p, 50, lambda i: p.take("kept", p.random.randint(1, 400) * KIB))


@leak("kept")
def with_varying_work(p: Program) -> None:
    loop(p, 60, lambda i: p.take("kept", p.random.randint(1, 64) * KIB), p.varying_work)


@leak("cat")
def growing_concatenation(p: Program) -> None:
    held = []

    def append(i: int) -> None:
        held.append(p.take("cat", (i + 1) * 16 * KIB))
        if len(held) > 1:
            p.give(held.pop(0))

    loop(p, 50, append)


@leak("cat")
def growing_concatenation_every_fifth(p: Program) -> None:
    held = []

    def append(i: int) -> None:
        if i % 5:
            return
        held.append(p.take("cat", (i + 1) * 16 * KIB))
        if len(held) > 1:
            p.give(held.pop(0))

    loop(p, 60, append)


@leak("activation0", "activation1", "activation2", "activation3", "loss")
def retained_graph(p: Program) -> None:
    """A list of losses keeps every activation of every step."""
    p.model()
    for i in range(30):
        with p.step(i):
            for layer in range(4):
                p.take(f"activation{layer}", 200 * KIB)
            p.take("loss", 4)
            gradients = [p.take(f"gradient{layer}", 256 * KIB) for layer in range(4)]
            p.give(*gradients)


@leak("remember")
def service_over_threads(p: Program) -> None:
    """Requests of 4 threads interleave, each with its own work; one in three is remembered."""
    p.model()
    working: list[list[int]] = [[], [], [], []]
    for _ in range(400):
        thread = p.random.randrange(4)
        if working[thread]:
            p.give(*working[thread])
            working[thread] = []
            if p.random.random() < 0.33:
                p.take("remember/serve", p.random.choice((4, 8, 16)) * KIB)
        else:
            size = p.random.choice((64, 128, 256)) * KIB
            working[thread] = [p.take(f"input/serve{thread}", size), p.take(f"hidden/serve{thread}", 2 * size)]


@leak("kept")
def now_and_then(p: Program) -> None:
    loop(p, 120, lambda i: p.take("kept", 64 * KIB) if p.random.random() < 0.2 else None)


@leak("kept")
def small_beside_large(p: Program) -> None:
    """512 bytes a step beside epochs that build up and drop megabytes."""
    p.model()
    cache: list[int] = []
    for i in range(64):
        with p.step(i):
            p.work(3, 2 * MIB)
            cache.append(p.take("cache", MIB))
            p.take("kept", 512)
            if i % 8 == 7:
                p.give(*cache)
                cache.clear()


@leak("kept")
def at_a_site_that_also_gives_back(p: Program) -> None:
    """One site, three of four blocks of which are dropped at the end of an epoch of 5 steps."""
    p.model()
    epoch: list[int] = []
    for i in range(120):
        with p.step(i):
            p.work()
            block = p.take("kept", 100 * KIB)
            if i % 4:
                epoch.append(block)
            if i % 5 == 4:
                p.give(*epoch)
                epoch.clear()


@leak("kept")
def of_a_function_with_many_callers(p: Program) -> None:
    """Each stack grows only now and then; the function they share grows always."""
    loop(p, 80, lambda i: p.take(f"kept/caller{p.random.randrange(40)}", 40 * KIB))


@leak("kept")
def of_a_list_that_main_drops(p: Program) -> None:
    """The list is a local variable of main: when it returns, all memory is given back."""
    loop(p, 40, lambda i: p.take("kept", 100 * KIB))
    p.give_all()


@leak("kept")
def more_and_more(p: Program) -> None:
    loop(p, 40, lambda i: p.take("kept", (i + 1) * 10 * KIB))


@leak("kept")
def after_a_warm_up(p: Program) -> None:
    """The site first fills a cache, in the first steps, then leaks."""
    loop(p, 80, lambda i: p.take("kept", 100 * KIB) if i < 5 or i % 4 == 0 else None)


@leak("kept", "other")
def two_at_once(p: Program) -> None:
    def body(i: int) -> None:
        p.take("kept", 100 * KIB)
        if i % 3 == 0:
            p.take("other", 10 * KIB)

    loop(p, 60, body)


@leak("kept")
def beside_a_ring(p: Program) -> None:
    ring: list[int] = []

    def body(i: int) -> None:
        ring.append(p.take("ring", 300 * KIB))
        if len(ring) > 8:
            p.give(ring.pop(0))
        p.take("kept", 20 * KIB)

    loop(p, 60, body)


# No leaks.


def _attention(p: Program, length: int) -> None:
    p.work(2, 32 * KIB)
    scores = p.take("scores", 4 * 8 * length)
    p.give(scores, p.take("output", 4 * KIB))


def _generate(p: Program, tokens: int, layers: int = 2) -> list[int]:
    """Generate with a cache that is concatenated, layer by layer; return what it holds."""
    cache = [p.take("cache", 4 * KIB * 16) for _ in range(layers)]
    for token in range(tokens):
        with p.step(token, "token"):
            for layer in range(layers):
                old = cache[layer]
                cache[layer] = p.take("cache", 4 * KIB * (17 + token))
                p.give(old)
                _attention(p, 17 + token)
    return cache


@sound
def cache_of_one_generation(p: Program) -> None:
    p.model()
    p.give(*_generate(p, 100))


@sound
def cache_of_one_generation_under_way(p: Program) -> None:
    p.model()
    _generate(p, 100)


@sound
def caches_of_many_generations(p: Program) -> None:
    p.model()
    for _ in range(6):
        p.give(*_generate(p, p.random.randint(10, 40)))


@sound
def caches_of_many_generations_one_under_way(p: Program) -> None:
    p.model()
    for _ in range(3):
        p.give(*_generate(p, 30))
    _generate(p, 29)


@sound
def cache_in_chunks(p: Program) -> None:
    p.model()
    for request in range(10):
        with p.step(request, "request"):
            pages = []
            for token in range(32):
                if token % 8 == 0:
                    pages.append(p.take("page", 128 * KIB))
                p.work()
            p.give(*pages)


@sound
def building_a_model(p: Program) -> None:
    p.model(100)


@sound
def building_a_model_with_temporaries(p: Program) -> None:
    for _ in range(60):
        noise = p.take("normal/__init__/Model.__init__", 512 * KIB)
        p.take("weight/__init__/Model.__init__", 512 * KIB)
        p.give(noise)


@sound
def building_and_then_training(p: Program) -> None:
    for _ in range(30):
        noise = p.take("normal/build", 512 * KIB)
        p.take("weight/build", 512 * KIB)
        p.give(noise)
    for i in range(30):
        with p.step(i):
            p.work(6)


@sound
def sweep_of_lengths(p: Program) -> None:
    p.model()
    for i in range(40):
        with p.step(i):
            p.work(4, (i + 1) * 32 * KIB)


@sound
def sweep_with_a_kept_mask(p: Program) -> None:
    """A mask that is made anew for each new longest input."""
    p.model()
    mask = p.take("mask", KIB)
    for i in range(40):
        with p.step(i):
            old, mask = mask, p.take("mask", (i + 1) * 16 * KIB)
            p.give(old)
            p.work(4, (i + 1) * 32 * KIB)


@sound
def random_lengths_with_a_kept_mask(p: Program) -> None:
    p.model()
    longest, mask = 0, p.take("mask", KIB)
    for i in range(150):
        with p.step(i):
            length = p.random.randint(1, 4096)
            if length > longest:
                longest, old, mask = length, mask, p.take("mask", length * 16)
                p.give(old)
            p.work(4, length * 64)


@sound
def warm_up_caches(p: Program) -> None:
    """One entry for each of 12 shapes, which come at random."""
    p.model()
    seen: set[int] = set()
    for i in range(120):
        with p.step(i):
            shape = p.random.randrange(12)
            if shape not in seen:
                seen.add(shape)
                p.take("plan", (shape + 1) * 64 * KIB)
            p.work(3, (shape + 1) * 16 * KIB)


@sound
def workspace_that_grows_to_a_bound(p: Program) -> None:
    p.model()
    space, size = p.take("workspace", 64 * KIB), 64 * KIB
    for i in range(60):
        with p.step(i):
            need = min((i + 1) * 128 * KIB, 2 * MIB)
            if need > size:
                old, space, size = space, p.take("workspace", need), need
                p.give(old)
            p.work()


def _fills(p: Program, bound: int, steps: int, replace: bool) -> None:
    p.model()
    ring: list[int] = []
    for i in range(steps):
        with p.step(i):
            p.work()
            if len(ring) < bound:
                ring.append(p.take("buffer", 200 * KIB))
            elif replace:
                ring.append(p.take("buffer", 200 * KIB))
                p.give(ring.pop(0))


@sound
def buffer_that_fills_by_half(p: Program) -> None:
    _fills(p, 40, 80, replace=True)


@sound
def buffer_that_fills_late(p: Program) -> None:
    _fills(p, 85, 100, replace=True)


@sound
def buffer_that_fills_and_stays(p: Program) -> None:
    _fills(p, 60, 90, replace=False)


@sound
def ring_of_variable_sizes(p: Program) -> None:
    p.model()
    ring: list[int] = []
    for i in range(150):
        with p.step(i):
            p.work()
            ring.append(p.take("ring", p.random.randint(1, 64) * 16 * KIB))
            if len(ring) > 16:
                p.give(ring.pop(0))


@sound
def double_buffering(p: Program) -> None:
    p.model()
    old = p.take("batch", MIB)
    for i in range(60):
        with p.step(i):
            new = p.take("batch", MIB)
            p.work()
            p.give(old)
            old = new


@sound
def prefetching_of_variable_batches(p: Program) -> None:
    p.model()
    queue: list[int] = []
    for i in range(100):
        with p.step(i):
            while len(queue) < 1 + p.random.randrange(4):
                queue.append(p.take("batch", p.random.randint(8, 16) * 64 * KIB))
            p.work()
            p.give(queue.pop(0))


def train(p: Program, steps: int, layers: int = 8, state: bool = True, model: bool = True) -> None:
    if model:
        p.model(layers)
    held: list[int] = []
    for i in range(steps):
        with p.step(i):
            activations = [p.take(f"forward/layer{n}", 128 * KIB) for n in range(layers)]
            gradients = []
            for n in reversed(range(layers)):
                gradients.append(p.take(f"gradient/layer{n}", 256 * KIB))
                p.give(activations.pop())
            for _ in range(layers):
                temporary = p.take("square/optimizer", 256 * KIB)
                if state and len(held) < 2 * layers:
                    held += [p.take("state/optimizer", 256 * KIB) for _ in range(2)]
                p.give(temporary)
            p.give(*gradients)


@sound
def training_that_ends_with_its_model(p: Program) -> None:
    train(p, 20)


@sound
def training_that_gives_all_back(p: Program) -> None:
    train(p, 20)
    p.give_all()


@sound
def training_of_two_steps(p: Program) -> None:
    train(p, 2, 24)


@sound
def training_of_one_step(p: Program) -> None:
    train(p, 1, 24)


@sound
def one_forward_pass(p: Program) -> None:
    p.model(24)
    for _ in range(24):
        p.work(2, site="attend/block/forward/step")
        p.take("attend/block/forward/step", 128 * KIB)


@sound
def moving_averages(p: Program) -> None:
    p.model()
    [p.take("average", 256 * KIB) for _ in range(6)]
    for i in range(50):
        with p.step(i):
            p.work()
            p.give(p.take("difference", 256 * KIB))


@sound
def checkpoints_that_are_dropped(p: Program) -> None:
    p.model()
    held: list[int] = []
    for i in range(80):
        with p.step(i):
            p.work()
            if i % 5 == 4 and i < 60:
                held.append(p.take("checkpoint", MIB))
            if i == 60:
                p.give(*held)


@sound
def the_last_three_checkpoints(p: Program) -> None:
    p.model()
    held: list[int] = []
    for i in range(80):
        with p.step(i):
            p.work()
            if i % 5 == 4:
                held.append(p.take("checkpoint", MIB))
                if len(held) > 3:
                    p.give(held.pop(0))


@sound
def data_set_that_grows_then_steady(p: Program) -> None:
    p.model()
    for i in range(90):
        with p.step(i):
            if i < 60:
                p.take("data", 300 * KIB)
            p.work()


@sound
def predictions_of_each_epoch(p: Program) -> None:
    p.model()
    for epoch in range(5):
        predictions = []
        for i in range(15):
            with p.step(15 * epoch + i):
                p.work()
                predictions.append(p.take("prediction", 40 * KIB))
        p.give(*predictions)


@sound
def predictions_that_are_dropped_at_the_end(p: Program) -> None:
    p.model()
    predictions = []
    for i in range(50):
        with p.step(i):
            p.work()
            predictions.append(p.take("prediction", 40 * KIB))
    p.give(*predictions)


@sound
def accumulated_gradients(p: Program) -> None:
    p.model()
    for i in range(12):
        with p.step(i):
            gradients = [p.take("gradient", 256 * KIB) for _ in range(6)]
            for _ in range(4):
                p.work()
            p.give(*gradients)


@sound
def cache_of_recently_used(p: Program) -> None:
    p.model()
    cache: dict[int, int] = {}
    for i in range(200):
        with p.step(i):
            key = min(int(p.random.expovariate(0.1)), 60)
            if key in cache:
                cache[key] = cache.pop(key)
            else:
                cache[key] = p.take("entry", 64 * KIB)
                if len(cache) > 12:
                    p.give(cache.pop(next(iter(cache))))
            p.work()


@sound
def cache_that_is_cleared(p: Program) -> None:
    p.model()
    cache: list[int] = []
    for i in range(95):
        with p.step(i):
            p.work()
            cache.append(p.take("entry", 64 * KIB))
            if len(cache) == 20:
                p.give(*cache)
                cache.clear()


@sound
def random_temporaries(p: Program) -> None:
    p.model()
    live: list[int] = []
    for i in range(300):
        with p.step(i):
            live.append(p.take(f"site{p.random.randrange(5)}", p.random.randint(1, 99) * KIB))
            if p.random.random() < len(live) / 30:
                p.give(live.pop(p.random.randrange(len(live))))


@sound
def frees_that_come_later(p: Program) -> None:
    """Another stream uses each block for 5 more steps."""
    p.model()
    later: list[int] = []
    for i in range(60):
        with p.step(i):
            p.work()
            later.append(p.take("sent", 500 * KIB))
            if len(later) > 5:
                p.give(later.pop(0))


@sound
def batches_that_get_larger(p: Program) -> None:
    """A curriculum; the last batch is kept until the next one is there."""
    p.model()
    old = p.take("batch", KIB)
    for i in range(48):
        with p.step(i):
            new = p.take("batch", (8 + i) * 64 * KIB)
            p.give(old)
            old = new
            p.work(3, (8 + i) * 32 * KIB)


@sound
def nothing_but_a_few_blocks(p: Program) -> None:
    p.model(3)


@sound
def layers_that_are_made_lazily(p: Program) -> None:
    for i in range(60):
        with p.step(i):
            for layer in range(10):
                if i == 0 or (i == 1 and layer == 9):
                    p.take("lazy", 256 * KIB)
                p.work(2)


@sound
def fine_tuning_that_unfreezes(p: Program) -> None:
    """A layer more is trained every 6 steps, in a model of 6 layers."""
    p.model()
    for i in range(80):
        with p.step(i):
            if i % 6 == 0 and i < 36:
                p.take("state", 512 * KIB)
            p.work()
