"""What the tree promises: who imports whom, what each module exports, and that help is quick."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"cudatool": ROOT / "cudatool", "cudatool.cli": ROOT / "cli", "cudatool.viz": ROOT / "viz"}

LEAVES = {"errors", "units", "code_cache", "files", "limits", "progress", "text"}
ALLOWED = {
    # area -> the areas it may import; an area is a folder or a module right inside the package
    "errors": {"text"},
    "text": set(),
    "units": {"errors", "text"},
    "code_cache": {"errors", "units"},
    "files": {"errors"},
    "limits": set(),
    "progress": set(),
    "ptx": LEAVES,
    "sim": {"ptx", "limits", "progress"},
    "trace": LEAVES,
    "memory": LEAVES | {"trace"},
    "analyze": LEAVES | {"memory", "trace"},
    "sanitize": LEAVES | {"trace", "ptx"},
    "collect": LEAVES | {"trace", "ptx"},
    "viz": LEAVES | {"trace", "analyze", "sanitize"},
    "__main__": {"cli"},
    "_driver": LEAVES | {"sim"},
    "testing": LEAVES | {"_driver", "recording", "trace", "sanitize"},
    "recording": LEAVES | {"_driver", "sim", "collect", "memory", "trace"},
}
BEYOND_THE_RUNTIME = {
    "sim",
    "collect",
    "analyze",
    "sanitize",
    "viz",
    "cli",
    "testing",
}  # for every area not named above
ONLY_NUMPY = {"errors", "text", "units", "files", "limits", "progress", "ptx", "trace", "memory", "analyze", "sanitize"}
CUDA_PROVIDER = "cudatool.memory.driver_provider"  # where the policy meets a driver


def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()


def area_of(module: str) -> str:
    """Return the area of a module: ``cudatool.trace.hooks`` is in ``trace``, ``cudatool`` itself in ``""``."""
    return [*module.split("."), ""][1]


def imports_at_run_time(path: Path) -> Iterator[str]:
    """Yield the dotted name of each module or member imported, at any depth, but not for type checking only."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        waiting.extend(ast.iter_child_nodes(node))


def defined_names(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield each name bound at module level, and whether the module defines it, rather than importing it."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, True
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from ((name.id, True) for name in ast.walk(target) if isinstance(name, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.split(".")[0], False) for alias in node.names)
        elif isinstance(node, ast.If | ast.Try):
            waiting.extend(ast.iter_child_nodes(node))  # type: ignore[arg-type]


def exported_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
            assert all(isinstance(name, str) for name in names)
            return list(names)
    return None


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_arrows(module: str) -> None:
    own = area_of(module)
    if own == "cli":
        return  # the outermost layer may use everything
    areas = {area_of(name) for name in MODULES} - {""}
    used = {area_of(name) for name in imports_at_run_time(MODULES[module]) if name.split(".")[0] == "cudatool"}
    allowed = ALLOWED[own] if own in ALLOWED else areas - BEYOND_THE_RUNTIME
    assert (used & areas) - allowed - {own} == set()


@pytest.mark.parametrize("module", [name for name in MODULES if area_of(name) in ONLY_NUMPY])
def test_pure_parts_import_only_the_standard_library_and_numpy(module: str) -> None:
    if module == CUDA_PROVIDER:
        return
    used = {name.split(".")[0] for name in imports_at_run_time(MODULES[module])}
    assert used - sys.stdlib_module_names - {"cudatool", "numpy"} == set()


# The driver's entry points are reached through a table, not by import.
@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith("cudatool.sim.api_")])
def test_all_is_complete_and_true(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text())
    names = dict(defined_names(tree))
    public = {name for name, own in names.items() if own and not name.startswith("_")}
    exported = exported_names(tree)
    if exported is None:
        assert public == set(), "a module with public names needs __all__"
        return
    assert len(exported) == len(set(exported))
    assert public - set(exported) == set()
    if "__getattr__" not in names:
        assert set(exported) - names.keys() == set()


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom cudatool.cli import main\nsys.argv = ['cudatool', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stderr.split()}
    assert "click" in loaded
    assert loaded & {"cuda", "llvmlite", "numpy", "plotly", "rich", "pynvml"} == set()
    assert "Usage:" in done.stdout
