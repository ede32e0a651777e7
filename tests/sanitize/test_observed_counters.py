"""A counter that is reset by who has read its last value: no fence orders that, and none is needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cudatool as ct
from cudatool.recording import record
from cudatool.sanitize import check
from cudatool.sanitize.findings import FindingKind
from cudatool.trace import reader

pytestmark = pytest.mark.skipif(not ct.get_device_name().startswith("cudatool"), reason="needs the software device")

TILES = """
extern "C" __global__ void tiles(float *out, int *counter, int count) {
    __shared__ int tile;
    for (;;) {
        if (threadIdx.x == 0) {
            tile = atomicAdd(counter, 1);
            if (%s) *counter = 0;
        }
        __syncthreads();
        if (tile >= count) return;
        out[tile * blockDim.x + threadIdx.x] = 1;
        __syncthreads();
    }
}"""
LEVELS = """
extern "C" __global__ void levels(float *out, int *done, int *unused) {
    if (threadIdx.x == 0) {
        if (blockIdx.x == 0) atomicAdd(done, 1);
        while (*(volatile int *)done == 0) ;
    }
    %s
    if (threadIdx.x == 32) out[blockIdx.x] = *done;
}"""


def kinds(path: Path, name: str, source: str, *more: object) -> list[FindingKind]:
    kernel = ct.compile(source, name)
    with record(path, checks=["racecheck"]):
        out, counter = ct.zeros(1024, np.float32), ct.zeros(1, np.int32)
        ct.launch(ct.current_stream(), ct.LaunchConfig(grid=4, block=64), kernel, out, counter, *more)
        ct.synchronize()
    return [one.kind for one in check(reader.read(path), ("racecheck",)).on_device]


def test_a_counter_that_its_last_user_resets_does_not_race(tmp_path: Path) -> None:
    last = "tile == count + gridDim.x - 1"
    assert [] == kinds(tmp_path / "run.ctrace", "tiles", TILES % last, np.int32(12))


@pytest.mark.parametrize("early", ["tile == 3", "blockIdx.x == 1 && tile > 4"])
def test_a_counter_that_is_reset_while_others_may_use_it_races(tmp_path: Path, early: str) -> None:
    source = (TILES % early).replace("for (;;)", "for (int round = 0; round < 4; round++)")
    assert FindingKind.KERNEL_RACE in kinds(tmp_path / "run.ctrace", "tiles", source, np.int32(12))


@pytest.mark.parametrize(("barrier", "races"), [("__syncthreads();", False), ("", True)])
def test_what_a_thread_has_read_counts_for_those_that_it_meets_at_a_barrier(
    tmp_path: Path, barrier: str, races: bool
) -> None:
    found = kinds(tmp_path / "run.ctrace", "levels", LEVELS % barrier, np.uint64(0))
    assert races == (FindingKind.KERNEL_RACE in found)
