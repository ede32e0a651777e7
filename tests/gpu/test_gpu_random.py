"""Random numbers beside PyTorch's on the same GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import record_torch_rng
from record_torch_rng import random_cases

from cudatool import random

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def torch() -> Any:
    found = pytest.importorskip("torch", reason="compares with PyTorch")
    if not found.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return found


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
