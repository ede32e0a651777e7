"""A second batch of programs, written after the rule was fixed and before it was tried on them."""

from __future__ import annotations

from leak_programs import KIB, MIB, Program, leak, loop, mistaken, sound, train, undecided


@leak("store")
def hook_that_stores_what_it_sees(p: Program) -> None:
    """A forward hook stores the output of 3 layers at each validation, every 7 steps."""
    p.model(12)
    for i in range(70):
        with p.step(i):
            p.work(5)
            if i % 7 == 6:
                for layer in range(3):
                    p.take(f"store/hook/layer{layer}", 96 * KIB)


@leak("session")
def session_per_user(p: Program) -> None:
    """Sessions come and go at random, one in ten is never closed."""
    p.model(20)
    live: list[int] = []
    for i in range(500):
        with p.step(i, "request"):
            p.varying_work()
            block = p.take("session/open", p.random.randint(4, 64) * KIB)
            if p.random.random() > 0.1:
                live.append(block)
            if len(live) > 6:
                p.give(live.pop(p.random.randrange(len(live))))


@leak("part0", "part1", "part2")
def exception_that_keeps_a_frame(p: Program) -> None:
    """A failed request, 1 in 6, keeps all its temporaries."""
    p.model()
    for i in range(150):
        with p.step(i):
            blocks = [p.take(f"part{n}/handle", 48 * KIB) for n in range(3)]
            if p.random.random() > 1 / 6:
                p.give(*blocks)


@leak("metric")
def history_of_a_metric(p: Program) -> None:
    """4 bytes a step."""
    loop(p, 200, lambda i: p.take("metric", 4), p.varying_work)


@leak("encode")
def text_cache_by_prompt(p: Program) -> None:
    """A dictionary keyed by prompts that hardly ever come again."""
    seen: set[int] = set()

    def body(i: int) -> None:
        prompt = p.random.randrange(2000)
        if prompt not in seen:
            seen.add(prompt)
            p.take("encode", p.random.randint(1, 20) * 8 * KIB)

    loop(p, 120, body)


@leak("kept")
def begins_after_reloading(p: Program) -> None:
    """Half of the run is sound, then the model is loaded anew and each step leaks."""
    old = p.model(10)
    for i in range(40):
        with p.step(i):
            p.work(4)
    p.model(10)
    p.give(*old)
    for i in range(40, 90):
        with p.step(i):
            p.work(4)
            p.take("kept", 30 * KIB)


@undecided
def doubling_vector(p: Program) -> None:
    """A vector that is copied to twice its size when it is full, in a run that fills it 7 times."""
    p.model()
    held, room, count = p.take("vector", 4 * KIB), 1, 0
    for i in range(160):
        with p.step(i):
            p.work()
            count += 1
            if count > room:
                room *= 2
                old, held = held, p.take("vector", room * 4 * KIB)
                p.give(old)


@leak("copy")
def of_each_epoch(p: Program) -> None:
    """A copy of the model at each of 8 epochs of 12 steps."""
    p.model()
    for i in range(96):
        with p.step(i):
            p.work(4)
            if i % 12 == 11:
                for _ in range(6):
                    p.take("copy/checkpoint", 256 * KIB)


@leak("log")
def two_threads_one_leaks(p: Program) -> None:
    p.model()
    pending: list[int] = []
    for _ in range(300):
        if p.random.random() < 0.5:
            p.work(2, site="loader")
        else:
            pending.append(p.take("result/worker", 64 * KIB))
            if len(pending) > 3:
                p.give(pending.pop(0))
            p.take("log/worker", KIB)


@leak("kept")
def main_returns_and_a_last_word(p: Program) -> None:
    """All is given back when main returns; then one number is computed."""
    loop(p, 50, lambda i: p.take("kept", 100 * KIB))
    p.give_all()
    p.give(p.take("total", 4))


def _fused(p: Program) -> list[int]:
    p.model()
    cache = [p.take("keys", 64 * KIB), p.take("values", 64 * KIB)]
    for token in range(120):
        with p.step(token, "token"):
            p.work()
            old, cache = cache, [p.take(site, (17 + token) * 4 * KIB) for site in ("keys", "values")]
            p.give(*old)
    return cache


@sound
def cache_of_one_generation_with_a_fused_kernel(p: Program) -> None:
    """No temporary memory has the length of the sequence."""
    p.give(*_fused(p))


@sound
def cache_with_a_fused_kernel_under_way(p: Program) -> None:
    _fused(p)


@mistaken
def building_with_temporaries_at_the_top(p: Program) -> None:
    for _ in range(60):
        noise = p.take("normal", 512 * KIB)
        p.take("weight", 512 * KIB)
        p.give(noise)


@sound
def beam_search(p: Program) -> None:
    p.model()
    for _ in range(12):
        beams = [p.take("beam", 16 * KIB) for _ in range(4)]
        for token in range(20):
            with p.step(token, "token"):
                new = [p.take("beam", (token + 2) * 16 * KIB) for _ in range(4)]
                p.work(2)
                p.give(*beams)
                beams = new
        p.give(*beams)


@sound
def continuous_batching(p: Program) -> None:
    """Sequences of random lengths in pages; as many begin as end."""
    p.model()
    running: list[tuple[int, list[int]]] = []
    for i in range(400):
        with p.step(i):
            p.work()
            while len(running) < 8:
                running.append((p.random.randint(5, 60), []))
            left = []
            for remaining, pages in running:
                if remaining % 4 == 0:
                    pages.append(p.take("page", 64 * KIB))
                if remaining > 1:
                    left.append((remaining - 1, pages))
                else:
                    p.give(*pages)
            running = left


@sound
def warm_pool_of_workers(p: Program) -> None:
    """Each of 8 streams gets a workspace at its first use."""
    p.model()
    ready: set[int] = set()
    for i in range(100):
        with p.step(i):
            worker = p.random.randrange(8)
            if worker not in ready:
                ready.add(worker)
                p.take(f"workspace/worker{worker}", 8 * MIB)
            p.work()


@sound
def training_with_evaluations(p: Program) -> None:
    for epoch in range(4):
        train(p, 6, state=False, model=not epoch)
        outputs = []
        for i in range(20):
            with p.step(i, "eval batch"):
                p.work(2, site="eval")
                outputs.append(p.take("output/eval", 24 * KIB))
        p.give(*outputs)


@sound
def replay_buffer_of_variable_items(p: Program) -> None:
    p.model()
    held: list[int] = []
    for i in range(300):
        with p.step(i):
            p.work()
            held.append(p.take("item", p.random.randint(1, 8) * 16 * KIB))
            if len(held) > 100:
                p.give(held.pop(p.random.randrange(len(held))))


@sound
def gradient_accumulation_over_steps(p: Program) -> None:
    p.model()
    for i in range(64):
        with p.step(i):
            p.work()
            if i % 16 == 0:
                held: list[int] = []
            held.append(p.take("micro", 128 * KIB))
            if i % 16 == 15:
                p.give(*held)


@sound
def progressive_resizing(p: Program) -> None:
    """Images get larger every 15 steps; the augmenter keeps a buffer as large as the largest."""
    p.model()
    buffer = p.take("augment", 64 * KIB)
    for i in range(75):
        with p.step(i):
            if i % 15 == 0:
                old, buffer = buffer, p.take("augment", (1 + i // 15) ** 2 * 128 * KIB)
                p.give(old)
            p.work(3, (1 + i // 15) ** 2 * 64 * KIB)


@sound
def compiled_plans_by_length(p: Program) -> None:
    """A plan for each length rounded to 64, of which there are 16; lengths come at random, short ones more often."""
    p.model()
    plans: set[int] = set()
    for i in range(250):
        with p.step(i):
            length = min(int(p.random.expovariate(1 / 250)), 1023) // 64
            if length not in plans:
                plans.add(length)
                p.take("plan", MIB)
            p.work(3, (length + 1) * 64 * KIB)


@sound
def sweep_down_then_up(p: Program) -> None:
    p.model()
    kept = p.take("scratch", 40 * 32 * KIB)
    for i in range(80):
        with p.step(i):
            length = abs(40 - i) + 1
            old, kept = kept, p.take("scratch", length * 32 * KIB)
            p.give(old)
            p.work(3, length * 16 * KIB)


@sound
def model_that_is_swapped(p: Program) -> None:
    old = p.model(8)
    for i in range(60):
        with p.step(i):
            if i % 10 == 9:
                new = p.model(8)
                p.give(*old)
                old = new
            p.work()


@sound
def moving_window_of_losses(p: Program) -> None:
    p.model()
    window: list[int] = []
    for i in range(120):
        with p.step(i):
            p.work()
            window.append(p.take("loss", 4))
            if len(window) > 100:
                p.give(window.pop(0))
