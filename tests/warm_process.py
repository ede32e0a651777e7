"""Processes that need not import what every program on the software device imports.

Most of the time of a short program is that of its imports. A server has done them and nothing else, above all chosen no
device, and forks once for each request. A process then goes on as if the interpreter had begun with ``-c``: in its
own directory, environment and output files, to the interpreter's own end. What only the beginning of an interpreter
reads has no effect: its options, and variables such as PYTHONPATH.

The interpreter's own end takes 30 ms in such a process, as long as many a program: it writes to what every module of
the server holds, and each page that is written to is copied. So a server that has all of cudatool lets its processes
end as soon as the program's own part of that is over: threads joined, exit functions called, output written, what the
program made freed and finalized. The server's modules stay whole, and no function runs that C libraries have for their
end. Tests of an interpreter's end need ``is_half``, or a process of their own.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import json
import os
import subprocess
import sys
import threading
import tokenize
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from tempfile import TemporaryDirectory
from types import MappingProxyType

__all__ = ["COMMAND_LINE", "PLAIN_PYTEST", "SCRIPT", "WarmProcess", "close", "everything", "run_python", "serve"]

COMMAND_LINE = "from cudatool.cli import main; main()"
"""The program whose words are a command of cudatool's."""
SCRIPT = (
    "import os, runpy, sys; sys.argv = sys.argv[1:]; sys.path.insert(0, os.path.dirname(sys.argv[0])); "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""The program whose words are a file with a program, and its words."""

PLAIN_PYTEST = ("-p", "no:randomly", "-p", "no:hypothesispytest")
"""For pytest of suites that tests run: importing these two plugins takes longer than pytest and all others."""

_SERVER = "with __import__('warm_process').ending: exec(__import__('warm_process').serve())"  # no name in __main__

OTHERS = ("click", "cuda.core", "llvmlite.binding", "numpy", "rich.console", "rich.table")
"""Packages of others that programs on the software device import."""
LATER = ("numpy.ma", "numpy.random", "tomllib")
"""Modules of others that some programs and commands import besides."""
OURS = (
    *("array_methods", "analyze", "cli.leaks", "cli.run", "cli.sanitize", "collect.sim_driver", "ops"),
    *("recording.software", "runtime.array", "runtime.cudart", "runtime.kernel", "runtime.mempool", "runtime.nvml"),
    *("runtime.ranges", "sim.jit.checked_launches", "sim.jit.declarations", "sim.jit.kernel_work", "sim.jit.shadow"),
    *("sim.jit.translator", "sim.observe.checkers", "sim.observe.host_pages", "sim.observe.host_watch"),
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
                [sys.executable, "-c", _SERVER, *self._imports],
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
    return [*OTHERS, *LATER, *(f"cudatool.{name}" for name in OURS), *entry_points]


def _prepare() -> None:
    """Do what each program would do after its imports, always with the same result."""
    from cudatool.sim.abi import ENTRIES
    from cudatool.trace import recorder

    recorder._own_version()  # reads the package's metadata
    for entry in ENTRIES.values():
        assert entry.types is not None  # read off the prototype of the entry point
    list(tokenize.generate_tokens(io.StringIO("").readline))  # compiles regular expressions


class _Ending:
    """How a process ends that was forked off a server: at once, after all that its program can notice.

    Pseudo-code::

        with ending:
            the program
            if it ended by itself, or with a status:
                join threads, call exit functions, write what is printed, as the interpreter is about to do
                take the server's modules out of sys.modules: the interpreter frees and clears what is left there,
                then what is in sys, of that `_Last` at last, with which the process is over
    """

    def __init__(self) -> None:
        self.modules: Collection[str] = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        status = error.code if isinstance(error, SystemExit) else error
        if not self.modules or not (status is None or isinstance(status, int)):
            return  # the interpreter prints the message or the exception first
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
        except (AttributeError, OSError, ValueError):
            return  # there is none, or it cannot be written: the interpreter finds that, too, and has a status for it
        for name in self.modules:
            sys.modules[name] = None  # type: ignore[assignment]  # as in the interpreter's own end
        sys.the_last_one = _Last((status or 0) & 0xFF)  # type: ignore[attr-defined]


class _Last:
    """Ends the process when it is freed."""

    def __init__(self, status: int) -> None:
        self._end = gc.collect, os._exit, status, sys.stdout, sys.stderr  # their modules are gone by then

    def __del__(self) -> None:
        collect, leave, status, *files = self._end
        collect()
        for file in files:
            if file is not None:
                file.flush()
        leave(status)


ending = _Ending()


def serve() -> str:
    """In the server: answer requests until there are no more.

    Returns in each process that was forked off for one, with the program that it is to run.
    """
    is_half = "cudatool" not in {name.partition(".")[0] for name in sys.argv[1:]}
    for module in sys.argv[1:]:
        import_module(module)

    if not is_half:
        _prepare()

    # No page is copied because a child's end frees what modules hold; what the program itself made is freed.
    modules = dict(sys.modules)
    held = [[one, *vars(one).values()] for one in modules.values()]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    if not is_half:
        ending.modules = modules.keys() - {
            "__main__",
            "builtins",
            "sys",
            "threading",
        }  # that the interpreter's end needs
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
    return str(request["program"])
