"""Where cudatool runs or unpickles what it is given: nowhere but in the places that SECURITY.md names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for folder in ("cudatool", "cli", "viz") for path in (ROOT / folder).rglob("*.py"))
RUNS = {
    # what runs or unpickles what it is given -> where it may stand
    "eval": set(),
    "exec": {"cudatool/workload.py"},  # the workload
    "pickle.load": set(),
    "pickle.loads": set(),
    "pickle.Unpickler": {"cudatool/collect/plain_pickle.py"},  # which refuses every import
    "marshal.loads": set(),
    "shelve.open": set(),
    "numpy.load": set(),
    "np.load": set(),
    "Listener": set(),
    "Client": set(),
}
RECEIVES = {
    "cudatool/nccl/_peers.py",  # a socket's: bytes
    "cudatool/sanitize/witness.py",  # from the process that it forked
}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_run_or_unpickled_but_where_it_is_meant(path: Path) -> None:
    name, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = dotted(node.func)
            assert name in RUNS.get(called, {name}), f"line {node.lineno}: {called}"
            if called.endswith(".recv"):
                assert name in RECEIVES, f"line {node.lineno}: {called}"
        elif isinstance(node, ast.ClassDef):
            for base in map(dotted, node.bases):
                assert name in RUNS.get(base, {name}), f"line {node.lineno}: {base}"
