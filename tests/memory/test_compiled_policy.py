"""The policy compiled by mypyc, as wheels have it, passes the tests that it passes uncompiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("test_caching_allocator", "test_allocator_properties", "test_expandable_segments", "test_private_pools")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the package outside the source tree, and return where it lies."""
    pytest.importorskip("mypyc", reason="mypy, which brings mypyc, is not installed")
    folder = tmp_path_factory.mktemp("build")
    for name in ("cudatool", "cli", "viz"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    command = [sys.executable, "-W", "ignore", "setup.py", "--quiet", "build", "--build-lib", "installed"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "installed"


def run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=installed, env=environment, capture_output=True, text=True, check=False)


def test_built_package_has_the_policy_compiled(installed: Path) -> None:
    done = run(installed, "-c", "import cudatool.memory.policy as policy; print(policy.__file__)")
    assert ".so" == Path(done.stdout.strip()).suffix


def test_compiled_policy_passes_the_tests_of_the_policy(installed: Path) -> None:
    files = [str(ROOT / "tests" / "memory" / f"{name}.py") for name in TESTS]
    config = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    done = run(installed, "-m", "pytest", "-q", *config, *files)
    assert done.returncode == 0, done.stdout[-3000:]
