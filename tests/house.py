"""What the tree is like: who imports whom, how long and how branched its functions are. One table a checkout::

    python tests/house.py [CHECKOUT ...]
    python tests/house.py --tests ROOM ...    # what a room's tests take, and what they reach of it

Two checkouts, before and after a change, are compared column by column. The architecture test uses what is here.
"""

from __future__ import annotations

import ast
import io
import os
import re
import resource
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FOLDERS = {"cudatool": "cudatool", "cudatool.cli": "cli", "cudatool.viz": "viz"}  # as packages install


class House:
    """The package's modules in one checkout.

    Attributes
    ----------
    modules
        Path of each, by its dotted name.
    compiled
        Dotted names of those written in C, which import none of the others.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Path] = {}
        self.compiled: set[str] = set()
        for package, folder in FOLDERS.items():
            for path in sorted((root / folder).rglob("*.py")):
                parts = [package, *path.relative_to(root / folder).with_suffix("").parts]
                self.modules[".".join(part for part in parts if part != "__init__")] = path
            for path in (root / folder).rglob("_*.pyi"):
                self.compiled.add(".".join([package, *path.relative_to(root / folder).with_suffix("").parts]))

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {module: ast.parse(path.read_text()) for module, path in self.modules.items()}

    @cached_property
    def calls(self) -> dict[str, list[ast.Call]]:
        """By module: each call in it."""
        return {
            module: [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            for module, tree in self.trees.items()
        }

    def lines(self, module: str) -> list[str]:
        """Return a module's source, line by line."""
        return self.modules[module].read_text().splitlines()

    @cached_property
    def imports(self) -> dict[str, list[tuple[str, bool]]]:
        """By module: each name that it imports, and whether a function does."""
        return {module: list(imports(tree)) for module, tree in self.trees.items()}

    @cached_property
    def own_imports(self) -> dict[str, list[tuple[str, bool]]]:
        """By module: each of the package's modules that it imports, and whether a function does."""
        return {
            module: [
                (own, in_function)
                for name, in_function in found
                if name.startswith("cudatool") and (own := self.module_of(name)) not in self.compiled
            ]
            for module, found in self.imports.items()
        }

    @cached_property
    def own_imports_by_name(self) -> dict[str, list[str]]:
        """By module: each of the package's modules that it gives to import_module(), as text."""
        return {
            module: [
                self.module_of(node.args[0].value)
                for node in calls
                if ast.unparse(node.func).endswith("import_module")
                if isinstance(node.args[0], ast.Constant) and node.args[0].value.startswith("cudatool")
            ]
            for module, calls in self.calls.items()
        }

    def module_of(self, name: str) -> str:
        """Return the module that an imported name is, or is a member of."""
        while name not in self.modules and name not in self.compiled:
            name = name.rpartition(".")[0]
        return name

    def circles(self) -> list[set[str]]:
        """Return the sets of modules that import each other."""
        return circles({module: [other for other, _ in found] for module, found in self.own_imports.items()})

    def circles_of_rooms(self) -> list[set[str]]:
        """Return the sets of rooms that import each other; the package itself, which looks names up later, is none."""
        rooms: dict[str, set[str]] = {room_of(module): set() for module in self.modules}
        for module, found in self.own_imports.items():
            rooms[room_of(module)] |= {room_of(other) for other, _ in found} - {"", room_of(module)}
        return circles(rooms)

    def imports_in_functions(self) -> int:
        """Return how often a function imports one of the package's modules."""
        return sum(in_function for found in self.own_imports.values() for _, in_function in found)

    def long_functions(self) -> dict[str, int]:
        """Return the lines of each function that has more than 50, by module and name."""
        return {
            f"{module}.{name}": length
            for module, tree in self.trees.items()
            for name, length in _functions(tree)
            if length > 50
        }

    def floors(self, *, on_loading: bool = False) -> int:
        """Return the longest chain of modules in which each imports the next, circles taken as one.

        `on_loading`, only what a module imports when it is loaded counts, not what its functions import when they run.
        """
        arrows = {
            module: [other for other, in_function in found if not (on_loading and in_function)]
            for module, found in self.own_imports.items()
        }
        one = {module: min(circle) for circle in circles(arrows) for module in circle}
        below: dict[str, set[str]] = {}
        for module, found in arrows.items():
            name = one.get(module, module)
            below.setdefault(name, set()).update({one.get(other, other) for other in found} - {name})
        height: dict[str, int] = {}

        def height_of(module: str) -> int:
            if module not in height:
                height[module] = 1 + max(map(height_of, below[module]), default=0)
            return height[module]

        return max(map(height_of, below))


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
        waiting.extend((child, in_function) for child in _own_statements(node))


def _own_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements that are right inside of a node, and what holds statements without being one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a tree and the statements in it: a tenth of what :func:`ast.walk` yields, none of them in expressions."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(_own_statements(node))


def circles(arrows: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Return the sets of at least two nodes of which each reaches each: Tarjan's strongly connected components."""
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


def _functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each function's name, and the lines of its body without its docstring."""
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[ast.get_docstring(node) is not None :]
            yield node.name, (node.end_lineno or node.lineno) - body[0].lineno + 1 if body else 0


def _comments(source: str) -> int:
    return sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(source).readline))


def _processor_s(command: list[str], **how: Any) -> float:
    """Return the processor time of a process and those that it waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], **how)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def of_tests(room: str) -> dict[str, object]:
    """Return what the tests of a room take, and how much of its lines and branches they reach in their own process.

    That is measured apart, as the tracer takes time, and only where coverage is installed (``pip install coverage``).
    """
    root = Path(__file__).resolve().parents[1]
    place = FOLDERS.get(f"cudatool.{room}", f"cudatool/{room}")
    tests = ["-m", "pytest", "-q", "-n", "0", "-p", "no:randomly", f"tests/{room}"]
    found: dict[str, object] = {
        f"tests of {room}": f"{_processor_s(tests, cwd=root, check=True, stdout=sys.stderr):.0f} s"
    }
    if find_spec("coverage") is not None:
        with TemporaryDirectory() as data:
            environment = os.environ | {"COVERAGE_FILE": str(Path(data, "coverage"))}
            measured = ["-m", "coverage", "run", "--branch", f"--source={','.join(FOLDERS.values())}", *tests]
            _processor_s(measured, cwd=root, check=True, env=environment, stdout=sys.stderr)
            total = [sys.executable, "-m", "coverage", "report", "--format=total", f"--include={place}/*,{place}.py"]
            reached = subprocess.run(total, cwd=root, env=environment, capture_output=True, text=True, check=True)
            found[f"reached of {room}"] = f"{reached.stdout.strip()} %"
    return found


def _start_up(code: str, root: Path) -> str:
    """Return the processor time of `code` in a new interpreter, less that of one that does nothing: the least of five."""

    def run(code: str) -> float:
        return _processor_s(["-c", code], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)

    with TemporaryDirectory() as folder:  # with the package as it installs
        package = Path(folder, "cudatool")
        package.mkdir()
        for path in [*(root / "cudatool").iterdir(), root / "cli", root / "viz"]:
            (package / path.name).symlink_to(path)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = str(Path(folder, "compiled"))  # by the first run, for the others
        return f"{1e3 * (min(run(code) for _ in range(5)) - min(run('') for _ in range(5))):.0f} ms"


def figures(root: Path) -> dict[str, object]:
    """Return what is measured of one checkout, by name."""
    house = House(root)
    sources = {module: path.read_text() for module, path in house.modules.items()}
    lines = Counter[str]()
    for module, source in sources.items():
        lines[room_of(module) or "cudatool itself"] += source.count("\n")
    rule = ["--isolated", "--select", "C901", "--config", "lint.mccabe.max-complexity=20", "--exit-zero"]
    ruff = [sys.executable, "-m", "ruff", "check", *rule, *FOLDERS.values()]
    branched = subprocess.run(ruff, cwd=root, capture_output=True, text=True, check=True).stdout
    folder = [path for path in (root / "cudatool").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    return {
        "modules": len(house.modules),
        "entries in cudatool/": len(folder),
        "longest chain of imports, on loading": house.floors(on_loading=True),
        "longest chain, with those in functions": house.floors(),
        "largest circle of imports": max(map(len, house.circles()), default=1),
        "circles between rooms": len(house.circles_of_rooms()),
        "imports in functions, of our own": house.imports_in_functions(),
        "functions": sum(1 for tree in house.trees.values() for _ in _functions(tree)),
        "functions over 50 lines": len(house.long_functions()),
        "functions over complexity 20": len(re.findall(r"^C901 ", branched, re.MULTILINE)),
        "comments per 100 lines": round(100 * sum(map(_comments, sources.values())) / lines.total(), 1),
        "import cudatool": _start_up("import cudatool", root),
        "cudatool --help": _start_up(
            "import sys; sys.argv = ['', '--help']; from cudatool.cli import main\ntry: main()\nexcept SystemExit: pass",
            root,
        ),
        **{f"lines of {room}": count for room, count in lines.most_common()},
    }


def main() -> None:
    """Print the figures of each checkout named, or of this one; or of the tests of rooms."""
    if sys.argv[1:2] == ["--tests"]:
        for room in sys.argv[2:]:
            for name, value in of_tests(room).items():
                print(f"{name:40}{value!s:>13}")
        return
    roots = [Path(name).resolve() for name in sys.argv[1:]] or [Path(__file__).resolve().parents[1]]
    columns = [figures(root) for root in roots]
    for name in {name: None for column in columns for name in column}:
        print(f"{name:40}", *(f"{column.get(name, '')!s:>12}" for column in columns))


if __name__ == "__main__":
    main()
