"""Data sets made of PyTorch's recordings that lie here."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from recordings import HERE

from cudatool.cli._sources import read_trace
from cudatool.fleet.convert import Input, convert


@pytest.fixture(autouse=True)
def needs_duckdb() -> None:
    """Skip where DuckDB is missing. Imported while tests are collected, it complains of leaks at exit (gc.freeze)."""
    if importlib.util.find_spec("duckdb") is None:
        pytest.skip("needs DuckDB (cudatool[fleet])")


@pytest.fixture(scope="session")
def five_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data set of one run: ranks 0 to 2 the same recording, ranks 3 and 4 another one."""
    folder = tmp_path_factory.mktemp("night")
    names = ["streams_default"] * 3 + ["prefetch__default"] * 2
    for rank, name in enumerate(names):
        shutil.copy(HERE / f"{name}.pickle.xz", folder / f"rank{rank}.pickle.xz")
    inputs = [Input(path, ".") for path in sorted(folder.iterdir())]
    dataset = tmp_path_factory.mktemp("sets") / "night's [1].dataset"
    assert [] == [o.error for o in convert(inputs, dataset, read_trace, jobs=1) if o.error]
    return dataset
