"""Processes that need not import what every program on the software device imports.

Most of the time of a short program is that of its imports. A server has done them and nothing else, above all chosen no
device, and forks once for each request. A process then goes on as if the interpreter had begun with ``-c``: in its
own directory, environment and output files, to the interpreter's own end.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

__all__ = ["WarmProcess", "serve"]


class WarmProcess:
    """The server, which starts with the first request; requests are carried out one after the other.

    Parameters
    ----------
    program
        What a process does, with the words of its request in ``sys.argv``: by default, the command line.
    imports
        A module that the server imports besides.
    """

    def __init__(self, program: str = "from cudatool.cli import main; main()", imports: str = "sys") -> None:
        self._program = f"import {imports}; from warm_process import serve; serve(); {program}"
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run the program with these words in a process of its own and in `folder`; return what it printed.

        Raises
        ------
        subprocess.TimeoutExpired
            It took longer than that. The process was killed, and the server, too.
        """
        if self._server is None:
            path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
            self._server = subprocess.Popen(
                [sys.executable, "-c", self._program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,
            )
        outputs = [folder / name for name in (".stdout", ".stderr")]
        request = {
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


def serve() -> None:
    """In the server: answer requests until there are no more. Returns in each process that was forked off for one."""
    import cuda.core  # noqa: F401
    import llvmlite.binding  # noqa: F401 (imported for those to come)

    import cudatool.array_methods
    import cudatool.cli.leaks
    import cudatool.cli.run
    import cudatool.cli.sanitize
    import cudatool.collect.sim_driver
    import cudatool.ops
    import cudatool.recording.software
    import cudatool.runtime.array
    import cudatool.runtime.kernel
    import cudatool.runtime.mempool
    import cudatool.sim.jit
    import cudatool.sim.observe.checkers  # noqa: F401
    from cudatool.sim import api

    for entry_points in iter_modules(api.__path__, f"{api.__name__}."):
        import_module(entry_points.name)

    gc.collect()
    gc.freeze()  # no page is copied because a child's collection looked at it

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
