"""docs/torch-cuda.md names everything of torch.cuda, and nothing of ours that is not there."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import cudatool
from cudatool import _driver
from cudatool.errors import CudatoolError

ROOT = Path(__file__).parents[2]
ANSWER = r"yes|no|partly: .+"
ASKING = r"get_|is_|has_|mem|max_mem|host_mem|current_|default_|device_|initial_|list_|cudart|version" + (
    r"|temperature|utilization|power|clock|init$"
)


class Row(NamedTuple):
    theirs: str
    ours: str  # with what is to say about it
    sim: str
    gpu: str


def rows() -> list[Row]:
    lines = (ROOT / "docs" / "torch-cuda.md").read_text().splitlines()
    cells = [re.split(r"\s*\|\s*", line[2:-2]) for line in lines if line.startswith("| `torch.")]
    return [Row(theirs.strip("`"), *rest) for theirs, *rest in cells]


def test_every_name_of_torch_cuda_has_a_row() -> None:
    names = (ROOT / "tests" / "data" / "torch_cuda_names.txt").read_text().splitlines()
    assert [name for name in names if name and not name.startswith("#")] == [row.theirs for row in rows()]


def value_of(row: Row) -> object:
    found = re.match(r"`cudatool((?:\.\w+)+)`", row.ours)
    assert found is not None
    value: object = cudatool
    for name in found[1].split(".")[1:]:
        if isinstance(value, ModuleType) and not hasattr(value, name):
            import_module(f"{value.__name__}.{name}")
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.theirs)
def test_what_stands_for_it_is_there(row: Row) -> None:
    if row.ours.startswith("absent"):
        assert re.fullmatch(r"absent: \w.+", row.ours)
        assert ("", "") == (row.sim, row.gpu)
        return
    value_of(row)
    assert re.fullmatch(ANSWER, row.sim)
    assert re.fullmatch(ANSWER, row.gpu)


def asks(row: Row) -> bool:
    """Return whether a row is about a function that only tells something, and needs no argument."""
    if row.ours.startswith("absent") or not re.match(ASKING, row.theirs.rpartition(".")[2]):
        return False
    value = value_of(row)
    if not inspect.isfunction(value):
        return False
    return all(p.default is not p.empty for p in inspect.signature(value).parameters.values())


@pytest.mark.parametrize("row", [row for row in rows() if asks(row)], ids=lambda row: row.theirs)
def test_it_answers_where_the_table_says_so(row: Row) -> None:
    answer = row.sim if _driver.initialize().kind == "sim" else row.gpu
    function = value_of(row)
    assert inspect.isfunction(function)
    if answer == "no":
        with pytest.raises(CudatoolError):
            function()
    else:
        function()
