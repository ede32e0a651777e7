"""What the tree promises: who imports whom, what each module exports, and that help is quick."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"cudatool": ROOT / "cudatool", "cudatool.cli": ROOT / "cli", "cudatool.viz": ROOT / "viz"}

LEAVES = {"errors", "units", "code_cache", "files", "limits", "progress", "text"}  # which everything may import
ARROWS = {
    # room -> the rooms that it may import; a room is a folder or a module right inside the package
    "text": set(),
    "errors": {"text"},
    "units": {"errors", "text"},
    "code_cache": {"errors", "units"},
    "files": {"errors"},
    "limits": set(),
    "progress": set(),
    # What knows no device.
    "trace": set(),
    "ptx": set(),
    "memory": {"trace"},
    "analyze": {"memory", "trace"},
    "sanitize": {"ptx", "trace"},
    "collect": {"memory", "ptx", "trace"},
    "viz": {"analyze", "sanitize", "trace"},
    # The device, and what programs use of it.
    "sim": {"ptx"},
    "_driver": {"sim"},
    "runtime": {"_driver", "memory", "ptx", "trace"},
    "ops": {"_driver", "runtime", "trace"},
    "random": {"_driver", "ops", "runtime"},
    "backends": {"runtime"},
    "blas": {"_driver", "backends", "ops", "runtime", "trace"},
    "array_methods": {"blas", "ops", "random", "runtime"},
    "optim": {"runtime"},
    "amp": {"ops", "optim", "runtime"},
    "graphs": {"_driver", "memory", "random", "runtime", "trace"},
    "jiterator": {"ops", "runtime", "trace"},
    "tunable": {"_driver", "blas", "runtime"},
    "comm": {"ops", "runtime"},
    "nccl": {"_driver", "runtime", "trace"},
    "gds": {"_driver", "runtime", "trace"},
    "multiprocessing": {"runtime"},
    "nvtx": {"runtime", "trace"},
    "profiler": {"runtime"},
    "cuda_core": {"memory", "runtime"},
    # What puts them together.
    "recording": {"_driver", "collect", "memory", "sim", "trace"},
    "workload": set(),
    "testing": {"_driver", "recording", "sanitize", "trace"},
    "cli": {
        *("", "_driver", "analyze", "collect", "memory", "ptx", "recording", "runtime"),
        *("sanitize", "sim", "trace", "viz", "workload"),
    },
    "__main__": {"cli"},
    "": {"runtime"},  # cudatool/__init__.py, which looks the names of the others up when they are first used
}
LARGEST_CIRCLE = 9  # modules that import each other, inside one room
FUNCTION_LEVEL_IMPORTS = 300  # of our own modules; may only fall
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


def room_of(module: str) -> str:
    """Return the room of a module: ``cudatool.trace.hooks`` is in ``trace``, ``cudatool`` itself in ``""``."""
    return [*module.split("."), ""][1]


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the name of each module or member imported, and whether a function does it; none for type checking only."""
    waiting = [(tree, False)]
    while waiting:
        node, in_function = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend((other, in_function) for other in node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            yield from ((f"{node.module}.{alias.name}", in_function) for alias in node.names)
        in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        waiting.extend((child, in_function) for child in ast.iter_child_nodes(node))


def module_of(name: str) -> str:
    """Return the module that an imported name is, or is a member of; compiled ones count as their package."""
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


IMPORTS = {module: list(imports(ast.parse(path.read_text()))) for module, path in MODULES.items()}
OURS = {
    module: [(module_of(name), in_function) for name, in_function in found if name.split(".")[0] == "cudatool"]
    for module, found in IMPORTS.items()
}


def circles(arrows: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Return the sets of nodes of which each reaches each: Tarjan's strongly connected components."""
    found: list[set[str]] = []
    low: dict[str, int] = {}
    path: list[str] = []

    def visit(node: str) -> None:
        index = low[node] = len(low)
        path.append(node)
        for other in arrows[node]:
            if other not in low:
                visit(other)
            if other in path:
                low[node] = min(low[node], low[other])
        if low[node] == index:
            found.append(set(path[path.index(node) :]))
            del path[path.index(node) :]

    for node in arrows:
        if node not in low:
            visit(node)
    return [circle for circle in found if len(circle) > 1]


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


def test_imports_follow_the_arrows() -> None:
    rooms = {room_of(module) for module in MODULES}
    assert rooms == ARROWS.keys()
    wrong = {
        f"{module} -> {target}"
        for module, targets in OURS.items()
        for target, _ in targets
        if room_of(target) not in {room_of(module), *ARROWS[room_of(module)], *LEAVES}
    }
    assert wrong == set()
    assert (
        circles({room: allowed | (LEAVES if room not in LEAVES else set()) for room, allowed in ARROWS.items()}) == []
    )


def test_circles_stay_small() -> None:
    arrows = {module: [target for target, _ in targets if target != module] for module, targets in OURS.items()}
    assert max(map(len, circles(arrows))) <= LARGEST_CIRCLE
    assert sum(in_function for targets in OURS.values() for _, in_function in targets) <= FUNCTION_LEVEL_IMPORTS


def test_pure_parts_import_only_the_standard_library_and_numpy() -> None:
    wrong = {
        f"{module} -> {name}"
        for module, found in IMPORTS.items()
        if room_of(module) in ONLY_NUMPY and module != CUDA_PROVIDER
        for name, _ in found
        if name.split(".")[0] not in {*sys.stdlib_module_names, "cudatool", "numpy"}
    }
    assert wrong == set()


def test_all_is_complete_and_true() -> None:
    for module, path in MODULES.items():
        if module.startswith("cudatool.sim.api_"):
            continue  # the driver's entry points are reached through a table, not by import
        tree = ast.parse(path.read_text())
        names = dict(defined_names(tree))
        public = {name for name, own in names.items() if own and not name.startswith("_")}
        exported = exported_names(tree)
        if exported is None:
            assert public == set(), f"{module} has public names, and no __all__"
            continue
        assert len(exported) == len(set(exported)), module
        assert public - set(exported) == set(), module
        if "__getattr__" not in names:
            assert set(exported) - names.keys() == set(), module


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
