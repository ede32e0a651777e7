"""Random programs of threads that wait for each other's flags and at barriers, against who can go on by definition."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest

from cudatool.sim import jit
from cudatool.sim.jit import launch as launches

SOURCE = r"""
extern "C" __global__ void k(volatile int *flag, const int *waits, const int *sets, const int *work,
                             const int *barriers, int rounds, int counts, int *done, int *tried) {
    int thread = blockIdx.x * blockDim.x + threadIdx.x, tries = 0;
    unsigned x = thread;
    for (int r = 0; r < rounds; r++) {
        int at = thread * rounds + r;
        if (waits[at] >= 0) {
            if (counts) while (flag[waits[at]] == 0) tries++;
            else while (flag[waits[at]] == 0) {}
        }
        for (int i = work[at]; i > 0; i--) x = x * 1664525u + 1013904223u ^ x >> 3;
        if (sets[at] >= 0) { __threadfence(); atomicExch((int *)&flag[sets[at]], 1); }
        if (barriers[r]) __syncthreads();
        done[thread] = r + 1;
    }
    tried[thread] = tries + (x == 1);
}
"""


class Waiting(NamedTuple):
    """In each of its rounds a thread waits for a flag, sets one, or neither (-1); some rounds end with a barrier."""

    blocks: int
    threads: int
    flags: int
    waits: np.ndarray  # int32: blocks x threads x rounds
    sets: np.ndarray
    work: np.ndarray
    barriers: np.ndarray  # int32: rounds


def drawn(rng: random.Random) -> Waiting:
    blocks, threads = rng.randrange(1, 8), rng.choice([1, 2, 3, 31, 32, 33, 64, 96])
    flags, shape = rng.randrange(1, 9), (blocks, threads, rng.randrange(1, 5))
    few, some, many = 0.02, 0.3, 0.7

    def sparse(share: float, value: int) -> np.ndarray:
        values = [rng.randrange(value) if rng.random() < share else -1 for _ in range(np.prod(shape))]
        return np.array(values, "i4").reshape(shape)

    waits, sets = sparse(rng.choice([few, some, many]), flags), sparse(rng.choice([few, some, many]), flags)
    work = sparse(rng.choice([few, some]), 3_000_000 if threads <= 3 else 20_000)
    barriers = np.array([rng.random() < 0.4 for _ in range(shape[2])], "i4")
    return Waiting(blocks, threads, flags, waits, sets, work, barriers)


def finished_rounds(given: Waiting) -> np.ndarray:
    """Return how many rounds each thread ends, however they are scheduled: flags are set and never cleared."""
    rounds = len(given.barriers)
    steps = np.zeros((given.blocks, given.threads), int)  # two of each round: flags, and the barrier
    flags, before = np.zeros(given.flags, bool), -1
    while before != steps.sum():
        before = steps.sum()
        for place in np.ndindex(steps.shape):
            round_, is_barrier = divmod(steps[place], 2)
            if round_ == rounds:
                continue
            if is_barrier:
                steps[place] += not given.barriers[round_] or (steps[place[0]] > 2 * round_).all()
            elif given.waits[place][round_] < 0 or flags[given.waits[place][round_]]:
                flags[given.sets[place][round_] if given.sets[place][round_] >= 0 else []] = True
                steps[place] += 1
    return steps // 2


@pytest.mark.some_of("seed", range(60), 20)
def test_threads_go_as_far_as_they_can_and_then_it_is_a_deadlock(launch, ptx_of, monkeypatch, seed):
    rng = random.Random(seed)
    monkeypatch.setattr(launches, "_WORTH_SHARING", 0)  # several threads of the host
    monkeypatch.setattr(launches, "_STALLED_S", rng.choice([0, 0.05, 0.2]))
    monkeypatch.setattr(launches, "_STALLED_ROUNDS", rng.choice([0, 100]))
    monkeypatch.setattr(launches, "_CHANGING_S", 1.0)
    given = drawn(rng)
    kernel = jit.load(ptx_of(SOURCE)).kernels["k"]
    flags = np.zeros(given.flags, "i4")
    done, tried = np.zeros((2, given.blocks, given.threads), "i4")
    counts = rng.random() < 0.2
    expected, is_deadlock = finished_rounds(given), False
    try:
        launch(
            *(kernel, given.blocks, given.threads),
            *(flags, given.waits, given.sets, given.work, given.barriers),
            *(np.int32(len(given.barriers)), np.int32(counts), done, tried),
            threads=rng.randrange(1, 5),
            optimized=rng.random() < 0.5,
            seed=rng.choice([None, rng.randrange(99)]),
        )
    except jit.KernelDeadlock:
        is_deadlock = True
    assert expected.tolist() == done.tolist()
    assert is_deadlock == (expected < len(given.barriers)).any()
