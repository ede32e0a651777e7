"""Processes that need not import what every program on the software device imports.

Most of the time of a short program is that of its imports. A server has done them and nothing else, above all chosen no
device, and forks once for each request. A process then goes on as if the interpreter had begun with ``-c``: in its
own directory, environment and output files, to the interpreter's own end. What only the beginning of an interpreter
reads has no effect: its options, and variables such as PYTHONPATH.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from tempfile import TemporaryDirectory
from types import MappingProxyType

__all__ = ["COMMAND_LINE", "SCRIPT", "WarmProcess", "close", "everything", "run_python", "serve"]

COMMAND_LINE = "from cudatool.cli import main; main()"
"""The program whose words are a command of cudatool's."""
SCRIPT = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""The program whose words are a file with a program, and its words."""


OTHERS = ("click", "cuda.core", "llvmlite.binding", "numpy", "rich.console", "rich.table")
"""Packages of others that programs on the software device import."""
OURS = (
    *("array_methods", "analyze", "cli.leaks", "cli.run", "cli.sanitize", "collect.sim_driver", "ops"),
    *("recording.software", "runtime.array", "runtime.kernel", "runtime.mempool", "sim.jit.checked_launches"),
    *("sim.jit.declarations", "sim.jit.kernel_work", "sim.jit.translator", "sim.observe.checkers"),
)
"""Modules of this package that they import, too."""


class WarmProcess:
    """The server, which starts with the first request; requests are carried out one after the other.

    Parameters
    ----------
    imports
        What the server imports: the packages of others only, for programs that are to load all of cudatool by
        themselves, or :func:`everything`.
    """

    def __init__(self, imports: Sequence[str]) -> None:
        self._imports = imports
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, program: str, words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python -c PROGRAM WORDS`` in a process of its own and in `folder`; return what it printed.

        Raises
        ------
        subprocess.TimeoutExpired
            It took longer than that. The process was killed, and the server, too.
        """
        if self._server is None:
            path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
            self._server = subprocess.Popen(
                [sys.executable, "-c", "exec(__import__('warm_process').serve())", *self._imports],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,
            )
        outputs = [folder / name for name in (".stdout", ".stderr")]
        request = {
            "program": program,
            "words": list(words),
            "folder": str(folder),
            "environment": dict(environment),
            "outputs": list(map(str, outputs)),
        }
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        late = threading.Timer(timeout_s, self._kill)
        late.start()
        answer = self._server.stdout.readline()
        late.cancel()
        if not answer:
            self.close()
            raise subprocess.TimeoutExpired(request["words"], timeout_s)
        texts = [path.read_bytes().decode().replace("\r\n", "\n") for path in outputs]
        for path in outputs:
            path.unlink()
        return subprocess.CompletedProcess(request["words"], int(answer), *texts)

    def _kill(self) -> None:
        if self._server is not None:
            os.killpg(self._server.pid, 9)  # its own session: the server and what it forked

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            assert self._server.stdin is not None and self._server.stdout is not None
            self._server.stdin.close()
            self._server.stdout.close()
            self._server.wait()
            self._server = None


@cache
def _server(*, is_half: bool) -> WarmProcess:
    return WarmProcess(OTHERS if is_half else everything())


def run_python(
    program: str,
    *words: str,
    folder: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    timeout_s: float = 240,
    is_half: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -c PROGRAM WORDS`` in `folder`, or an empty one, in a process that has its imports done.

    For tests of what programs do on the device, not of how an interpreter begins. All tests share the servers.

    Parameters
    ----------
    environment
        What is to be there besides the tests' own.
    is_half
        Only the packages of others are imported: cudatool is loaded as in an interpreter that has just begun.
    """
    server, environment = _server(is_half=is_half), os.environ | environment
    if folder is not None:
        return server.run(program, words, folder, environment, timeout_s)
    with TemporaryDirectory() as empty:
        return server.run(program, words, Path(empty), environment, timeout_s)


def close() -> None:
    """End the servers that :func:`run_python` has started."""
    for is_half in (False, True):
        _server(is_half=is_half).close()
    _server.cache_clear()


def everything() -> list[str]:
    """Return the modules that most programs on the software device need, ours among them."""
    from cudatool.sim import api

    entry_points = [module.name for module in iter_modules(api.__path__, f"{api.__name__}.")]
    return [*OTHERS, *(f"cudatool.{name}" for name in OURS), *entry_points]


def serve() -> str:
    """In the server: answer requests until there are no more.

    Returns in each process that was forked off for one, with the program that it is to run.
    """
    for module in sys.argv[1:]:
        import_module(module)

    # No page is copied because a child's end frees what modules hold; names still become None, and what the program
    # itself made is freed.
    held = [list(vars(module).values()) for module in list(sys.modules.values())]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    gc.collect()
    gc.freeze()  # nor because a collection looked at it, which takes time, too

    requests, answers = os.dup(0), os.dup(1)
    with open(requests, closefd=False) as lines:
        for line in iter(lines.readline, ""):
            request = json.loads(line)
            child = os.fork()
            if child == 0:
                break
            _, status = os.waitpid(child, 0)
            os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(status))
        else:
            sys.exit()
    os.close(requests)
    os.close(answers)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, path in enumerate([os.devnull, *request["outputs"]]):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.argv[1:] = request["words"]
    program: str = request["program"]
    return program
