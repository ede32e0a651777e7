"""How many processors the process may use: what control groups of both versions allow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cudatool import processors


def quota(tmp_path: Path, groups: str, files: dict[str, str]) -> int | None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "self").write_text(groups)
    return processors._quota(tmp_path / "self", tmp_path / "cgroup")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a/b/cpu.max": "200000 100000\n"}, 2),
        ({"a/b/cpu.max": "150000 100000\n"}, 2),
        ({"a/b/cpu.max": "20000 100000\n"}, 1),
        ({"a/b/cpu.max": "max 100000\n"}, None),
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),  # it holds for those below it
        ({"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ({"cpu.max": "400000 100000\n"}, 4),  # of a container, which does not see its path
        ({"cpu.max": "nonsense\n"}, None),
        ({}, None),
    ],
)
def test_version_2(tmp_path, files, expected):
    assert expected == quota(tmp_path, "0::/a/b\n", files)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu/a/cpu.cfs_quota_us": "250000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/a/cpu.cfs_quota_us": "100000\n", "cpu/a/cpu.cfs_period_us": "0\n"}, None),
        ({"memory/a/cpu.cfs_quota_us": "100000\n", "memory/a/cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_version_1(tmp_path, files, expected):
    assert expected == quota(tmp_path, "5:memory:/a\n4:cpu,cpuacct:/a\n0::/\n", files)


def test_without_control_groups_nothing_is_limited(tmp_path):
    assert processors._quota(tmp_path / "missing", tmp_path) is None


def test_a_process_that_may_run_on_one_processor_has_one():
    one = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{one}}}); from cudatool.processors import *; print(processors())"
    assert "1\n" == subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
