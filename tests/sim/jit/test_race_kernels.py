"""Racecheck on labelled kernels: each that races is found, for the right reason, and no correct one is reported."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from more_race_kernels import MORE_HELPERS, MORE_PAIRS
from race_kernels import PAIRS, Pair, source

from cudatool.sim import jit
from cudatool.sim.jit import Instrument
from cudatool.sim.jit.race_engine import RaceReason


@pytest.fixture(scope="module")
def kernels(ptx_of):
    """All kernels of the table, from one compilation."""
    return jit.load(ptx_of(source((*PAIRS, *MORE_PAIRS), MORE_HELPERS))).kernels


@pytest.fixture(scope="module")
def memory() -> np.ndarray:
    """64 KiB that begin at a page, zeroed."""
    whole = np.zeros((64 << 10) + 4096, np.uint8)
    first = -whole.ctypes.data % 4096
    return whole[first : first + (64 << 10)]


@pytest.fixture(scope="module")
def shadow(memory) -> jit.Shadow:
    """One for all kernels: what earlier launches did must not matter."""
    return jit.Shadow(memory.ctypes.data, memory.nbytes, Instrument.RACECHECK)


def check(pair: Pair, kernels, memory, shadow, *, optimized: bool) -> None:
    """Compare what is reported of a pair of kernels with their labels."""

    def found(kind: str) -> list[jit.Found]:
        memory[:] = 0
        params = ctypes.c_uint64(memory.ctypes.data)
        return kernels[f"{kind}_{pair.name}"].launch(
            jit.LaunchShape((pair.grid, 1, 1), (pair.block, 1, 1)),
            ctypes.addressof(params),
            jit.LaunchOptions(shadow=shadow, optimized=optimized),
        )

    assert [] == found("correct")
    assert pair.reason in {one.reason for one in found("racy")}


@pytest.mark.parametrize("pair", (*PAIRS, *MORE_PAIRS), ids=lambda pair: pair.name)
def test_of_two_kernels_the_racy_one_is_reported(pair: Pair, kernels, memory, shadow):
    # As the driver launches kernels that are so small: that takes a tenth of the time to compile.
    check(pair, kernels, memory, shadow, optimized=False)


@pytest.mark.some_of("pair", [pytest.param(pair, id=pair.name) for pair in (*PAIRS, *MORE_PAIRS)[::5]], 3)
def test_of_two_optimized_kernels_the_racy_one_is_reported(pair: Pair, kernels, memory, shadow):
    check(pair, kernels, memory, shadow, optimized=True)


def test_the_table_has_sixty_kernels_of_different_names():
    pairs = (*PAIRS, *MORE_PAIRS)
    assert 60 <= 2 * len(pairs) == 2 * len({pair.name for pair in pairs})


def test_a_race_that_depends_on_which_warp_comes_first_is_found_under_some_order(ptx_of, memory, shadow):
    kernel = jit.load(
        ptx_of("""extern "C" __global__ void lock(int *a) {
            if (threadIdx.x % 32) return;
            while (atomicCAS(a, 0, 1)) ;
            if (threadIdx.x) __threadfence();  // the first warp lacks this one
            a[8] += 1;
            __threadfence();
            atomicExch(a, 0);
        }""")
    ).kernels["lock"]
    params = ctypes.c_uint64(memory.ctypes.data)

    def found(seed: int | None) -> set[RaceReason | None]:
        memory[:] = 0
        races = kernel.launch(
            jit.LaunchShape((1, 1, 1), (64, 1, 1)),
            ctypes.addressof(params),
            jit.LaunchOptions(shadow=shadow, seed=seed),
        )
        assert 2 == memory.view(np.int32)[8]
        return {one.reason for one in races}

    assert set() == found(None)
    assert {frozenset(), frozenset([RaceReason.NO_FENCE])} == {frozenset(found(seed)) for seed in range(8)}
