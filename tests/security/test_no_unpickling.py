"""Where cudatool runs or unpickles what it is given: nowhere but in the places that SECURITY.md names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for folder in ("cudatool", "cli", "viz") for path in (ROOT / folder).rglob("*.py"))
RUNS = {
    # what runs or unpickles what it is given -> where it may stand
    "eval": set(),
    "exec": {"cudatool/workload.py", "cudatool/notebook.py"},  # the workload: a program, a cell
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


def runs_or_receives(path: Path) -> Iterator[str]:
    """Yield where a module calls what runs, unpickles or receives, or derives from it, and may not."""
    name = path.relative_to(ROOT).as_posix()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = [dotted(node.func)]
        elif isinstance(node, ast.ClassDef):
            called = [*map(dotted, node.bases)]
        else:
            continue
        for one in called:
            if name not in RUNS.get(one, {name}) or (one.endswith(".recv") and name not in RECEIVES):
                yield f"{name}:{node.lineno}: {one}"


def test_nothing_is_run_or_unpickled_but_where_it_is_meant() -> None:
    assert len(MODULES) > 400
    assert [] == [where for path in MODULES for where in runs_or_receives(path)]
