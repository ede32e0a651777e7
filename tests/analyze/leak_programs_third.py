"""A third batch of programs, written after what the second one showed was repaired, and before any was tried."""

from __future__ import annotations

from leak_programs import KIB, MIB, Program, leak, loop, sound, train


@leak("input", "result")
def service_that_never_frees(p: Program) -> None:
    """4 threads answer requests of random sizes and keep all they allocate."""
    p.model()
    for _ in range(200):
        thread = p.random.randrange(4)
        size = p.random.randint(1, 32) * 16 * KIB
        p.take(f"input/serve/thread{thread}", size)
        p.read(p.take(f"result/serve/thread{thread}", size // 4))


@leak("add")
def sum_of_losses(p: Program) -> None:
    """The sum of all losses keeps the graph of each."""
    loop(p, 45, lambda i: [p.take("add/loss", 4), p.take("add/loss", 512)], p.varying_work)


@leak("kept")
def at_random_intervals_after_three_epochs(p: Program) -> None:
    p.model()
    due = 60
    for i in range(200):
        with p.step(i):
            p.work(4)
            if i == due:
                p.take("kept", 256 * KIB)
                due += p.random.randint(5, 15)


@leak("kept")
def every_fourth_of_few_steps(p: Program) -> None:
    loop(p, 26, lambda i: p.take("kept", MIB) if i % 4 == 3 else None)


@leak("collect")
def predictions_of_evaluations(p: Program) -> None:
    """Every 10 steps an evaluation with its own work appends to a list that lives on."""
    p.model()
    for i in range(100):
        with p.step(i):
            p.work(4)
            if i % 10 == 9:
                for _ in range(5):
                    p.work(2, site="eval")
                    p.take("collect/eval", 20 * KIB)


@leak("kept")
def small_in_large_steps(p: Program) -> None:
    p.model(60)
    for i in range(20):
        with p.step(i):
            blocks = [p.take(f"forward/layer{n}", 128 * KIB) for n in range(40)]
            for _ in range(100):
                p.work(2, site="backward")
            p.give(*reversed(blocks))
            p.take("kept", 2 * KIB)


@leak("grow")
def vector_with_room_for_six(p: Program) -> None:
    p.model()
    held, room = p.take("grow", 24 * KIB), 6
    for i in range(90):
        with p.step(i):
            p.work()
            if i >= room:
                room += 6
                old, held = held, p.take("grow", room * 4 * KIB)
                p.give(old)


@leak("subscribe")
def listeners_that_are_not_removed(p: Program) -> None:
    """A pool of connections is rebuilt every 20 requests; each rebuild leaves a buffer of the old ones."""
    p.model()
    pool = [p.take("connect", 64 * KIB) for _ in range(4)]
    for i in range(240):
        with p.step(i, "request"):
            p.varying_work()
            if i % 20 == 19:
                p.give(*pool)
                pool = [p.take("connect", 64 * KIB) for _ in range(4)]
                p.take("subscribe", 16 * KIB)


@sound
def large_steps_that_end_midway(p: Program) -> None:
    p.model(60)
    for i in range(8):
        with p.step(i):
            blocks = [p.take(f"act/layer{n % 4}", 128 * KIB) for n in range(100)]
            if i == 7:
                return
            for _ in range(100):
                p.work(2, site="backward")
                p.give(blocks.pop())


@sound
def batch_size_finder(p: Program) -> None:
    p.model()
    for i in range(70):
        with p.step(i):
            size = min(2**i, 64) * 32 * KIB
            p.work(3, size)


@sound
def copies_of_the_model_for_evaluation(p: Program) -> None:
    p.model()
    for i in range(100):
        with p.step(i):
            p.work()
            if i % 20 == 0:
                copy = [p.take("copy", 256 * KIB) for _ in range(6)]
                p.work(6, site="eval")
                p.give(*copy)


@sound
def second_model_for_fine_tuning(p: Program) -> None:
    train(p, 15, layers=4)
    train(p, 15, layers=12)


@sound
def pipeline_of_micro_batches(p: Program) -> None:
    p.model()
    for i in range(60):
        with p.step(i):
            flying: list[int] = []
            for micro in range(16):
                flying.append(p.take("micro", 100 * KIB))
                if micro >= 7:
                    p.give(flying.pop(0))
            p.give(*flying)


@sound
def prefix_cache_with_a_limit(p: Program) -> None:
    p.model()
    cache: list[int] = []
    for i in range(200):
        with p.step(i, "request"):
            pages = [p.take("page", 64 * KIB) for _ in range(p.random.randint(1, 6))]
            p.work()
            cache.append(pages.pop())
            p.give(*pages)
            if len(cache) > 130:
                p.give(cache.pop(0))


@sound
def embeddings_then_training(p: Program) -> None:
    for _ in range(64):
        p.work(2, site="embed")
        p.take("embedding", 100 * KIB)
    train(p, 16)


@sound
def captured_graphs(p: Program) -> None:
    """A graph for each of 10 batch sizes is captured at the start; then all are replayed."""
    p.model()
    for size in range(1, 11):
        for n in range(4):
            p.take(f"static{n}/capture", size * 64 * KIB)
        p.work(3, size * 16 * KIB)
    for i in range(80):
        with p.step(i):
            p.give(p.take("batch", p.random.randint(1, 10) * 32 * KIB))


@sound
def rows_of_an_embedding_at_first_use(p: Program) -> None:
    p.model()
    seen: set[int] = set()
    for i in range(160):
        with p.step(i):
            for _ in range(3):
                row = min(int(p.random.expovariate(0.12)), 29)
                if row not in seen:
                    seen.add(row)
                    p.take("row", 32 * KIB)
            p.work()


@sound
def logging_buffer_that_is_flushed(p: Program) -> None:
    p.model()
    buffer: list[int] = []
    for i in range(150):
        with p.step(i):
            p.work()
            buffer.append(p.take("log", 4))
            if len(buffer) >= 50 or i == 149:
                p.give(*buffer)
                buffer.clear()


@sound
def search_over_settings(p: Program) -> None:
    """Each trial builds a model of another size, trains it and drops it."""
    for trial in range(10):
        model = [p.take("weight/build", (trial + 1) * 64 * KIB) for _ in range(5)]
        for i in range(8):
            with p.step(i):
                p.work(3, (trial + 1) * 16 * KIB)
        p.give(*model)


@sound
def weights_that_are_streamed_in(p: Program) -> None:
    """An offloaded model: of 12 layers 3 are on the device at a time."""
    layers: list[int] = []
    for i in range(240):
        with p.step(i // 12):
            layers.append(p.take("load", 512 * KIB))
            p.work(2)
            if len(layers) > 3:
                p.give(layers.pop(0))
