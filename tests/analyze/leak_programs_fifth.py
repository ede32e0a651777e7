"""A fifth batch of programs, of kinds that the others lack, each written down before it was tried."""

from __future__ import annotations

from math import sin

from leak_programs import KIB, MIB, Program, leak, loop, sound, varies


@leak("saved", "mask")
def input_and_mask_of_bad_batches(p: Program) -> None:
    """A handler of errors keeps two tensors of about every sixth batch."""

    def body(i: int) -> None:
        if p.random.random() < 0.17:
            p.take("saved/handler", 96 * KIB)
            p.take("mask/handler", 24 * KIB)

    loop(p, 120, body)


@leak("state")
def sessions_closed_but_for_one_part(p: Program) -> None:
    """Up to eight sessions of four tensors are open; closing one, in any order, forgets its state."""
    sessions: list[list[int]] = []

    def body(i: int) -> None:
        sessions.append([p.take("state", 16 * KIB), *(p.take(f"part{n}", 64 * KIB) for n in range(3))])
        if len(sessions) > 8:
            p.give(*sessions.pop(p.random.randrange(len(sessions)))[1:])

    loop(p, 90, body)


@leak("odd", "even")
def by_turns_at_two_places(p: Program) -> None:
    loop(p, 80, lambda i: p.take("odd" if i % 2 else "even", 40 * KIB))


@leak("slot")
def ring_whose_first_slot_is_overwritten(p: Program) -> None:
    """A ring of 16; the slot that it wraps around at is not given back."""
    ring: list[int] = []

    def body(i: int) -> None:
        block = p.take("slot", 128 * KIB)
        if len(ring) < 16:
            ring.append(block)
            return
        if i % 16:
            p.give(ring[i % 16])
        ring[i % 16] = block

    loop(p, 200, body)


@leak("kept")
def in_steps_of_more_and_more_layers(p: Program) -> None:
    """Each step has more temporaries than the one before; what is kept is as much each time."""

    def body(i: int) -> None:
        p.work(3 + i // 8)
        p.take("kept", 48 * KIB)

    loop(p, 80, body)


@leak("inner")
def at_the_bottom_of_a_recursion(p: Program) -> None:
    """Each step recurses to another depth, and keeps what the innermost call allocates."""

    def body(i: int) -> None:
        depth = p.random.randint(1, 6)
        held = [p.take("/".join(["visit"] * (n + 1)), 32 * KIB) for n in range(depth)]
        p.take("/".join(["inner", *["visit"] * depth]), 20 * KIB)
        p.give(*reversed(held))

    loop(p, 100, body)


@varies
def callbacks_that_are_lost(p: Program) -> None:
    """Messages live for 5 to 15 steps; of 12, one is never acknowledged."""
    due: dict[int, list[int]] = {}

    def body(i: int) -> None:
        block = p.take("message", 80 * KIB)
        if p.random.random() > 1 / 12:
            due.setdefault(i + p.random.randint(5, 15), []).append(block)
        p.give(*due.pop(i, []))

    loop(p, 240, body)


@leak("store")
def by_one_of_two_callers(p: Program) -> None:
    """The same function stores for training, which gives back, and for evaluation, which does not."""

    def body(i: int) -> None:
        p.give(p.take("store/train", 64 * KIB))
        if i % 3 == 2:
            p.take("store/evaluate", 64 * KIB)

    loop(p, 90, body)


@leak("keys", "values", "scales")
def three_of_five_after_ten_good_steps(p: Program) -> None:
    """From the tenth step on three of five tensors of a step are no longer given back at the next."""
    last: list[int] = []

    def body(i: int) -> None:
        p.give(*last)
        last[:] = [p.take(site, 32 * KIB) for site in ("query", "output", "keys", "values", "scales")]
        if i >= 10:
            del last[2:]

    loop(p, 90, body)


@leak("embedding")
def tied_weight_of_each_reloaded_model(p: Program) -> None:
    """A server loads a model anew after every 12 requests, and keeps one weight of the last one."""
    model: list[int] = []

    def body(i: int) -> None:
        if i % 12 == 0:
            p.give(*model)
            p.take("embedding", 512 * KIB)
            model[:] = [p.take(f"layer{n}", MIB) for n in range(5)]

    loop(p, 180, body)


@sound
def window_of_attention_cut_as_it_fills(p: Program) -> None:
    """A cache of the last 64 tokens in each of three generations, of which the last is under way."""
    p.model()
    for length in (150, 130, 40):
        window: list[int] = []
        for token in range(length):
            with p.step(token, "token"):
                p.work()
                window.append(p.take("append", 16 * KIB))
                if len(window) > 64:
                    p.give(window.pop(0))
        if length > 40:
            p.give(*window)


@sound
def buffers_replaced_at_each_stage(p: Program) -> None:
    """A curriculum of five stages, each with larger buffers in place of the last one's."""
    buffers: list[int] = []

    def body(i: int) -> None:
        if i % 20 == 0:
            p.give(*buffers)
            buffers[:] = [p.take("stage", (i // 20 + 1) * 256 * KIB) for _ in range(4)]

    loop(p, 100, body)


@sound
def teacher_made_late(p: Program) -> None:
    teacher: list[int] = []

    def body(i: int) -> None:
        if i == 70:
            teacher.extend(p.take("teacher", 256 * KIB) for _ in range(6))

    loop(p, 100, body)


@sound
def adapters_loaded_at_first_use(p: Program) -> None:
    """Of 12 adapters some are asked for often, some seldom; each is loaded once and stays."""
    loaded: set[int] = set()

    def body(i: int) -> None:
        wanted = min(int(p.random.expovariate(0.35)), 11)
        if wanted not in loaded:
            loaded.add(wanted)
            p.take("adapter", 200 * KIB)

    loop(p, 150, body)


@sound
def reservoir_of_samples(p: Program) -> None:
    """Fifty samples; later ones replace one of them more and more seldom."""
    kept: list[int] = []

    def body(i: int) -> None:
        block = p.take("sample", 32 * KIB)
        at = p.random.randint(0, i)
        if len(kept) < 50:
            kept.append(block)
        elif at < 50:
            p.give(kept[at])
            kept[at] = block
        else:
            p.give(block)

    loop(p, 160, body)


@sound
def checkpoints_written_in_the_background(p: Program) -> None:
    """Every 30 steps a copy of the weights, which is given back piece by piece in the next ones."""
    copies: list[int] = []

    def body(i: int) -> None:
        if i % 30 == 20:
            copies.extend(p.take("copy", 256 * KIB) for _ in range(12))
        elif copies and i % 2:
            p.give(copies.pop(0))

    loop(p, 145, body)


@sound
def connections_come_and_go(p: Program) -> None:
    """About one connection opens a step, and lives for 20 on average: their number rises to 20 and stays about that."""
    open_until: list[tuple[int, int]] = []

    def body(i: int) -> None:
        for _ in range(p.random.choice((0, 1, 1, 2))):
            open_until.append((i + int(p.random.expovariate(1 / 20)), p.take("connection", 64 * KIB)))
        for one in [one for one in open_until if one[0] <= i]:
            open_until.remove(one)
            p.give(one[1])

    loop(p, 300, body)


@sound
def search_tree_pruned_at_each_move(p: Program) -> None:
    """A tree grows by a node a step; each move of 25 steps keeps the chosen third. The last move is under way."""
    tree: list[int] = []

    def body(i: int) -> None:
        if i % 25 == 0:
            p.random.shuffle(tree)
            p.give(*tree[len(tree) // 3 :])
            del tree[len(tree) // 3 :]
        tree.append(p.take("node", 24 * KIB))

    loop(p, 25 * 8 + 18, body)


@sound
def pool_that_scales_to_the_load(p: Program) -> None:
    """Workers are added when the load is above what they can do, and stay; the load comes in waves."""
    workers: list[int] = []

    def body(i: int) -> None:
        load = 10 + 8 * sin(i / 8) + (4 if i > 50 else 0)
        while len(workers) < load:
            workers.append(p.take("worker", 300 * KIB))

    loop(p, 200, body)


@sound
def long_conversation_beside_short_ones(p: Program) -> None:
    """One conversation runs all the time and takes a page every 16 tokens; others begin and end beside it."""
    long: list[int] = []
    short: list[int] = []

    def body(i: int) -> None:
        if i % 16 == 0:
            long.append(p.take("page", 128 * KIB))
        if i % 40 == 30:
            p.give(*short)
            short.clear()
        elif i % 4 == 0:
            short.append(p.take("page", 128 * KIB))

    loop(p, 400, body)
    p.give(*long, *short)
