"""A fourth batch of programs, of kinds that the others lack, each written down before it was tried."""

from __future__ import annotations

from leak_programs import KIB, MIB, Program, leak, loop, sound


@leak("enqueue")
def queue_whose_consumer_is_too_slow(p: Program) -> None:
    """Each step puts two items into a queue and takes the oldest one out."""
    queue: list[int] = []

    def body(i: int) -> None:
        queue.extend(p.take("enqueue", 64 * KIB) for _ in range(2))
        p.give(queue.pop(0))

    loop(p, 80, body)


@leak("grown")
def hidden_by_what_shrinks(p: Program) -> None:
    """A cache that is emptied piece by piece, as fast as something else leaks: the sum stays the same."""
    cache = [p.take("cached", 128 * KIB) for _ in range(120)]

    def body(i: int) -> None:
        p.give(cache.pop())
        p.take("grown", 128 * KIB)

    loop(p, 100, body)


@leak("handles")
def cleaned_up_by_half_every_40_steps(p: Program) -> None:
    held: list[int] = []

    def body(i: int) -> None:
        held.append(p.take("handles", 32 * KIB))
        if i % 40 == 39:
            for block in held[-20:]:
                p.give(block)
            del held[-20:]

    loop(p, 400, body)


@leak("cycle")
def cycles_that_the_collector_sees_late(p: Program) -> None:
    """Cycles are collected at irregular times; one in four is never."""
    waiting: list[int] = []

    def body(i: int) -> None:
        block = p.take("cycle", 256 * KIB)
        if i % 4:
            waiting.append(block)
        if p.random.random() < 0.2:
            p.give(*waiting)
            waiting.clear()

    loop(p, 400, body)


@leak("worker")
def workers_of_each_epoch(p: Program) -> None:
    """Each epoch starts new workers, whose buffers stay."""
    p.model()
    for i in range(240):
        with p.step(i):
            if i % 20 == 0:
                for _ in range(2):
                    p.take("worker/start_epoch", MIB)
            p.work(4)


@leak("capture")
def graph_for_each_new_shape(p: Program) -> None:
    """Shapes never repeat, and each gets a graph with memory of its own."""

    def body(i: int) -> None:
        if p.random.random() < 0.3:
            p.take("capture", p.random.randint(64, 512) * 4 * KIB)

    loop(p, 150, body, p.varying_work)


@leak("log")
def of_very_unequal_sizes(p: Program) -> None:
    """Sizes have no typical value: most are small, a few are a thousand times as large."""
    loop(p, 150, lambda i: p.take("log", min(512 * int(p.random.paretovariate(1.2)), 8 * MIB)))


@leak("residual")
def of_each_model_in_a_row(p: Program) -> None:
    """Models are trained one after another; each leaves one tensor behind."""
    for _ in range(14):
        model = p.model()
        for i in range(8):
            with p.step(i):
                p.work(4)
        p.take("residual/summarize", 100 * KIB)
        p.give(*model)


@leak("recv")
def messages_of_two_peers(p: Program) -> None:
    """Two threads that receive in turn, one of which keeps what comes; nothing else is done on the device but copies."""
    for i in range(160):
        with p.step(i):
            block = p.take(f"recv/peer{i % 2}", 512 * KIB)
            p.read(block)
            if i % 2:
                p.give(block)


@leak("pad")
def while_the_inputs_get_shorter(p: Program) -> None:
    def body(i: int) -> None:
        p.work(3, (240 - i) * KIB)
        p.take("pad", 16 * KIB)

    loop(p, 200, body, lambda: None)


@sound
def flushed_every_37_steps_and_cut_in_between(p: Program) -> None:
    held: list[int] = []

    def body(i: int) -> None:
        held.append(p.take("collect", 64 * KIB))
        if len(held) == 37:
            p.give(*held)
            held.clear()

    loop(p, 215, body)


@sound
def bounded_queue_of_random_length(p: Program) -> None:
    queue: list[int] = []

    def body(i: int) -> None:
        if len(queue) < 12 and p.random.random() < 0.55:
            queue.append(p.take("enqueue", 128 * KIB))
        elif queue:
            p.give(queue.pop(0))

    loop(p, 300, body)


@sound
def pages_of_many_sequences(p: Program) -> None:
    """16 sequences at a time, each of a random length; a page for every 16 tokens, all freed with their sequence."""
    p.model()
    running = [[p.random.randint(20, 120), []] for _ in range(16)]  # tokens to come, pages
    for token in range(600):
        with p.step(token, "decode"):
            p.work(3)
            for one in running:
                if one[0] % 16 == 0:
                    one[1].append(p.take("page", 64 * KIB))
                one[0] -= 1
                if not one[0]:
                    p.give(*one[1])
                    one[:] = [p.random.randint(20, 120), []]


@sound
def averages_that_are_replaced_every_10_steps(p: Program) -> None:
    average = [p.take("average", 256 * KIB) for _ in range(6)]

    def body(i: int) -> None:
        if i % 10 == 9:
            new = [p.take("average", 256 * KIB) for _ in range(6)]
            p.give(*average)
            average[:] = new

    loop(p, 120, body)


@sound
def cut_in_a_long_forward_pass(p: Program) -> None:
    """The recording ends amid a forward pass of 300 layers, after three whole steps."""
    p.model()
    for i in range(4):
        with p.step(i):
            kept = []
            for layer in range(300):
                p.work(1, 32 * KIB)
                kept.append(p.take(f"activation{layer % 4}/forward", 128 * KIB))
                if i == 3 and layer == 220:
                    return
            p.give(*reversed(kept))


@sound
def two_phases_of_different_tensors(p: Program) -> None:
    """What the first half holds is given back as the second half takes its own."""
    first = [p.take("encoder", MIB) for _ in range(20)]
    for i in range(60):
        with p.step(i):
            p.work(3)
    p.give(*first)
    for _ in range(20):
        p.take("decoder", MIB)
    for i in range(60, 120):
        with p.step(i):
            p.work(3)


@sound
def layers_moved_to_the_host_in_turn(p: Program) -> None:
    layers = {n: p.take("layer", MIB) for n in range(4)}

    def body(i: int) -> None:
        p.give(layers.pop(i % 12, None) or layers.pop(next(iter(layers))))
        layers[(i + 4) % 12] = p.take("layer", MIB)

    loop(p, 130, body)


@sound
def cache_of_random_keys_that_is_full_midway(p: Program) -> None:
    """64 entries of random sizes; from then on each new one drives out another."""
    entries: list[int] = []

    def body(i: int) -> None:
        entries.append(p.take("entry", p.random.randint(1, 64) * 16 * KIB))
        if len(entries) > 64:
            p.give(entries.pop(p.random.randrange(64)))

    loop(p, 220, body)


@sound
def batches_that_grow_until_midway(p: Program) -> None:
    held: list[int] = []

    def body(i: int) -> None:
        p.give(*held)
        held[:] = [p.take("batch", min(i + 1, 60) * 16 * KIB)]

    loop(p, 140, body, lambda: None)


@sound
def results_that_come_back_in_any_order(p: Program) -> None:
    """Futures of 24 requests at most, which end in any order."""
    pending: list[int] = []

    def body(i: int) -> None:
        pending.append(p.take("request", p.random.randint(1, 16) * 32 * KIB))
        while len(pending) > 24 or (pending and p.random.random() < 0.5):
            p.give(pending.pop(p.random.randrange(len(pending))))

    loop(p, 260, body)
