"""Random numbers beside PyTorch's on the same GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import record_torch_rng
from record_torch_rng import random_cases

import cudatool
from cudatool import random

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*out of bounds:UserWarning")]

RECORDING = Path(__file__).parents[1] / "data" / "torch_rng.npz"


@pytest.mark.parametrize("case", random_cases.cases(), ids=lambda case: "-".join(map(str, case.values())))
def test_numbers_are_those_of_torch(torch: Any, case: dict[str, Any]) -> None:
    theirs = torch.Generator("cuda")
    expected = record_torch_rng.run(torch, case, theirs)
    ours = random.Generator()
    ours.manual_seed(case["seed"])
    ours.set_offset(case["offset"])
    for one in expected:
        np.testing.assert_array_equal(random_cases.draw(case, ours), one, strict=True)
    assert theirs.get_offset() == ours.get_offset()
    np.testing.assert_array_equal(theirs.get_state().numpy(), ours.get_state())


def test_the_recording_is_what_torch_draws(torch: Any, tmp_path: Path) -> None:
    record_torch_rng.main(str(tmp_path / "torch_rng.npz"))
    with np.load(tmp_path / "torch_rng.npz") as now, np.load(RECORDING) as then:
        assert str(now["cases"]) == str(then["cases"])
        for name in ("starts", "offsets"):
            np.testing.assert_array_equal(now[name], then[name])
        for index, case in enumerate(random_cases.cases()):
            dtype = np.dtype(np.int16 if case["dtype"] == "bfloat16" else case["dtype"])
            if case["method"] == "multinomial":
                dtype = np.dtype(np.int64)
            part = slice(now["starts"][index], now["starts"][index + 1])
            expected, found = (np.frombuffer(one["samples"][part].tobytes(), dtype) for one in (now, then))
            random_cases.assert_same(case, expected, found)
            if case["method"] not in random_cases.APPROXIMATE:
                np.testing.assert_array_equal(now["checks"][index], then["checks"][index], err_msg=str(case))


def test_replays_draw_what_torch_replays_draw(torch: Any) -> None:
    torch.cuda.manual_seed(11)
    theirs, uniform, normal = torch.cuda.CUDAGraph(), torch.empty(3000, device="cuda"), torch.empty(70, device="cuda")
    with torch.cuda.graph(theirs):
        uniform.uniform_()
        normal.normal_()
        kept, _ = torch.native_dropout(normal, 0.5, True)
    random.manual_seed(11)
    ours, own_uniform, own_normal = cudatool.CUDAGraph(), cudatool.empty(3000), cudatool.empty(70)
    with cudatool.graph(ours):
        random.uniform_(own_uniform)
        random.normal_(own_normal)
        own_kept = random.dropout(own_normal)
    for _ in range(3):
        theirs.replay()
        ours.replay()
        for expected, found in zip((uniform, normal, kept), (own_uniform, own_normal, own_kept), strict=True):
            np.testing.assert_array_equal(expected.cpu().numpy(), found.get())
        np.testing.assert_array_equal(torch.cuda.get_rng_state().numpy(), random.get_rng_state())
        expected = torch.rand(10, device="cuda").cpu().numpy()  # between replays, the same generator
        np.testing.assert_array_equal(expected, random.rand(10).get())


@pytest.mark.parametrize(
    ("method", "dtype", "size"), [("uniform_", "float32", 2**29 + 5), ("random_", "uint8", 2**31 + 9)]
)
def test_arrays_of_more_than_two_gib(torch: Any, method: str, dtype: str, size: int) -> None:
    """Source: test_cuda.py::test_randint_generation_for_large_numel"""
    theirs, ours = torch.Generator("cuda").manual_seed(5), random.Generator().manual_seed(5)
    expected = getattr(torch.empty(size, dtype=getattr(torch, dtype), device="cuda"), method)(generator=theirs)
    found = getattr(random, method)(cudatool.empty(size, dtype), generator=ours)
    for start in (0, size // 4 - 500, size // 2 - 500, size - 1000):
        part = slice(start, start + 1000)
        np.testing.assert_array_equal(expected[part].cpu().numpy(), found[part].get())
    assert theirs.get_offset() == ours.get_offset()
    del expected
    torch.cuda.empty_cache()
