"""What the tree promises: who imports whom, what each module exports, and that help is quick."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from house import House, circles, room_of, statements

ROOT = Path(__file__).resolve().parents[1]

LEAVES = {
    "config",
    "errors",
    "units",
    "code_cache",
    "files",
    "limits",
    "processors",
    "progress",
    "source_text",
    "text",
    "loading",
}  # which everything may import
ARROWS = {
    # room -> the rooms that it may import; a room is a folder or a module right inside the package
    "text": set(),
    "config": set(),
    "errors": {"text"},
    "units": {"errors", "text"},
    "code_cache": {"errors", "units"},
    "files": {"errors"},
    "limits": set(),
    "source_text": set(),
    "loading": set(),  # also what is attached from above, by its name
    "progress": set(),
    "processors": set(),
    # What knows no device.
    "trace": set(),
    "ptx": set(),
    "memory": {"trace"},
    "overview": {"trace"},
    "analyze": {"memory", "overview", "trace"},
    "sanitize": {"trace"},
    "processes": set(),
    "cuda_arrays": set(),
    "collect": {"cuda_arrays", "memory", "processes", "ptx", "trace"},
    "export": {"collect", "trace"},
    "fleet": {"analyze", "trace"},
    "viz": {"analyze", "fleet", "sanitize", "trace"},
    # The device, and what programs use of it.
    "sim": {"cuda_arrays", "ptx"},
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
    "compiler": {"amp", "backends", "blas", "graphs", "ops", "runtime", "trace"},
    "jiterator": {"ops", "runtime", "trace"},
    "tunable": {"_driver", "blas", "runtime"},
    "comm": {"ops", "runtime"},
    "nccl": {"_driver", "runtime", "trace"},
    "gds": {"_driver", "runtime", "trace"},
    "multiprocessing": {"runtime"},
    "nvtx": {"runtime", "trace"},
    "profiler": {"runtime"},
    "cuda_core": {"memory", "runtime"},
    "triton_order": set(),
    "triton_driver": {"", "ptx", "runtime", "sim", "trace", "triton_order"},
    # What puts them together.
    "recording": {"_driver", "collect", "memory", "processes", "sim", "trace"},
    "callbacks": {"recording", "runtime"},
    "workload": set(),
    "testing": {"_driver", "recording", "sanitize", "trace"},
    "cli": {
        *("_driver", "analyze", "collect", "export", "fleet", "memory", "overview", "ptx", "recording"),
        *("runtime", "sanitize", "sim", "trace", "viz", "workload"),
    },
    "notebook": {"analyze", "cli", "recording", "sanitize", "trace", "viz"},
    "__main__": {"cli"},
    "": {"runtime"},  # cudatool/__init__.py, which looks the names of the others up when they are first used
}
LARGEST_CIRCLE = 3  # modules that import each other, inside one room
FUNCTION_LEVEL_IMPORTS = 41  # of our own modules; may only fall
ONLY_NUMPY = {
    *("config", "errors", "text", "units", "files", "limits", "processors", "progress", "source_text", "loading"),
    *("ptx", "trace", "memory", "analyze", "overview", "sanitize"),
}
TESTS_OF_THE_WHOLE = {"gpu", "peers", "programs", "races", "security", "soak"}  # folders of tests that are no room's
CUDA_PROVIDER = "cudatool.memory.driver_provider"  # where the policy meets a driver


HOUSE = House(ROOT)


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
    rooms = {room_of(module) for module in HOUSE.modules}
    assert rooms == ARROWS.keys()
    found = {
        (module, target)
        for module, targets in HOUSE.own_imports.items()
        for target in [*(target for target, _ in targets), *HOUSE.own_imports_by_name[module]]
    }
    wrong = {
        f"{module} -> {target}"
        for module, target in found
        if room_of(target) not in {room_of(module), *ARROWS[room_of(module)], *LEAVES}
    }
    assert wrong == set()
    used = {(room_of(module), room_of(target)) for module, target in found}
    assert {(room, allowed) for room in ARROWS for allowed in ARROWS[room]} - used == set()
    assert (
        circles({room: allowed | (LEAVES if room not in LEAVES else set()) for room, allowed in ARROWS.items()}) == []
    )


def test_every_package_is_installed() -> None:
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    packages = {module for module, path in HOUSE.modules.items() if path.name == "__init__.py"}
    assert packages == set(installed)


def test_circles_stay_small() -> None:
    assert max(map(len, HOUSE.circles())) <= LARGEST_CIRCLE
    assert HOUSE.circles_of_rooms() == []
    assert HOUSE.imports_in_functions() <= FUNCTION_LEVEL_IMPORTS


def test_functions_stay_short() -> None:
    assert HOUSE.long_functions() == {}


def test_imports_in_functions_say_why() -> None:
    silent = {
        f"{module}:{node.lineno}"
        for module, tree in HOUSE.trees.items()
        for function in statements(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in statements(function)
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("cudatool.")
        if not any("#" in line for line in HOUSE.lines(module)[node.lineno - 2 : node.lineno])
    }
    assert silent == set()


def test_pure_parts_import_only_the_standard_library_and_numpy() -> None:
    wrong = {
        f"{module} -> {name}"
        for module, found in HOUSE.imports.items()
        if room_of(module) in ONLY_NUMPY and module != CUDA_PROVIDER
        for name, _ in found
        if name.split(".")[0] not in {*sys.stdlib_module_names, "cudatool", "numpy"}
    }
    assert wrong == set()


def test_all_is_complete_and_true() -> None:
    for module, tree in HOUSE.trees.items():
        if module.startswith("cudatool.sim.api."):
            continue  # the driver's entry points are reached through a table, not by import
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


def test_distinct_values_are_found_by_sorting() -> None:
    """By `cudatool.trace.distinct`, which says why; other calls of numpy.unique() do more than that."""
    more = {"axis", "return_counts", "return_index", "return_inverse"}
    calls = [
        f"{module}:{node.lineno}"
        for module, found in HOUSE.calls.items()
        for node in found
        if isinstance(node.func, ast.Attribute)
        if node.func.attr in ("unique", "union1d") and ast.unparse(node.func.value) == "np"
        if not more & {keyword.arg for keyword in node.keywords}
    ]
    assert [] == calls


def test_a_command_that_reads_a_trace_does_not_load_masked_arrays() -> None:
    program = (
        "import sys\nfrom cudatool.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    print(*sys.modules, file=sys.stderr)\n"
    )
    recording = ROOT / "tests" / "data" / "streams_default.pickle.xz"
    words = [sys.executable, "-c", program, "snapshot", str(recording)]
    loaded = subprocess.run(words, capture_output=True, text=True, check=True).stderr.split()
    assert ("numpy" in loaded, "numpy.ma" in loaded) == (True, False)


def loaded_by(module: str, *, later: bool) -> set[str]:
    """Return the modules that importing `module` imports; `later`, also those that its functions import."""
    waiting, loaded = [module], set[str]()
    while waiting:
        module = waiting.pop()
        if module in HOUSE.modules and module not in loaded:
            waiting += [other for other, in_function in HOUSE.own_imports[module] if later or not in_function]
            waiting.append(module.rpartition(".")[0])  # whose __init__ runs first
            loaded.add(module)
    return loaded


def test_a_recorded_program_starts_with_what_recording_it_needs() -> None:
    """Neither analyses, reports and readers, nor what only a GPU needs: it is imported when it is used."""
    loaded = loaded_by("cudatool.cli.run", later=False)
    assert {"cudatool.recording", "cudatool.workload", "cudatool.trace.recorder"} <= loaded
    assert {room_of(module) for module in loaded} & {
        "analyze",
        "export",
        "fleet",
        "overview",
        "ptx",
        "sanitize",
        "sim",
        "viz",
    } == set()
    of_a_gpu = {"cudatool.recording.gpu", "cudatool.collect.cupti", "cudatool.collect.torch_program"}
    assert loaded & {*of_a_gpu, "cudatool.collect.torch_snapshot"} == set()


def test_a_recorded_program_ends_without_the_analyses() -> None:
    """They take longer to import than most programs of a test suite run."""
    loaded = loaded_by("cudatool.cli._run_text", later=True)
    assert "cudatool.overview.summary" in loaded
    assert {room_of(module) for module in loaded} & {"analyze", "fleet", "memory", "viz"} == set()


def test_no_two_test_files_have_one_name() -> None:
    """Folders of tests are no packages: pytest imports each file by its name alone, and refuses the second."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_folders_of_tests_are_named_as_the_rooms() -> None:
    folders = {path.parent.relative_to(ROOT / "tests").parts[:1] for path in (ROOT / "tests").rglob("*.py")} - {()}
    assert {folder for (folder,) in folders} - ARROWS.keys() - TESTS_OF_THE_WHOLE == set()
