"""A bounded part of what :mod:`command_fuzz` does; run that with more seeds after a change of what reads files."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_fuzz import fuzz, fuzz_datasets
from hostile_datasets import HAS_DUCKDB

FILES = 24  # three commands each
DATASETS = 12
TOGETHER = 4  # seeds of a test


@pytest.mark.some_of("first", range(0, FILES, TOGETHER), 2)
def test_commands_on_impossible_files_give_a_result_or_one_line(first: int, tmp_path: Path) -> None:
    ran, found = fuzz(range(first, first + TOGETHER), tmp_path)
    assert {} == {what: (seed, command, fault.detail) for what, (seed, fault, command) in found.items()}
    assert ran > TOGETHER  # those that check none of the files are left out


@pytest.mark.skipif(not HAS_DUCKDB, reason="needs DuckDB (cudatool[fleet])")
@pytest.mark.some_of("first", range(0, DATASETS, TOGETHER), 1)
def test_questions_about_impossible_data_sets_give_a_result_or_one_line(first: int, tmp_path: Path) -> None:
    ran, found = fuzz_datasets(range(first, first + TOGETHER), tmp_path)
    assert {} == {what: (seed, command, fault.detail) for what, (seed, fault, command) in found.items()}
    assert ran == 3 * TOGETHER
