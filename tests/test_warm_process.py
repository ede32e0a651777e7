"""Programs that are forked off a server end as those that have an interpreter of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from warm_process import run_python

_CLASS = """
class Made:
    def __init__(self, name): self.name = name
    def __del__(self, write=__import__("os").write): write(1, f"freed: {self.name}\\n".encode())
"""
_ALL_OF_AN_END = f"""
import atexit, sys, threading, time
exec({_CLASS!r})
made, in_a_circle = Made("a global"), Made("a circle")
in_a_circle.itself = in_a_circle
exec({_CLASS!r}, apart := {{}})  # this class does not keep the program's globals
sys.kept = apart.pop("Made")("an attribute of sys")
atexit.register(print, "exit function", flush=True)
threading.Thread(target=lambda: (time.sleep(0.05), print("thread", flush=True))).start()
print("program", flush=True)
"""


@pytest.mark.parametrize("is_half", [False, True], ids=["server-of-all", "server-of-others"])
@pytest.mark.parametrize(
    "program",
    [
        _ALL_OF_AN_END,
        _ALL_OF_AN_END + "del in_a_circle; sys.exit(7)",
        "import sys; sys.exit(-1)",
        "import sys; sys.exit('a message')",
        "raise SystemExit",
        "1 / 0",
        "import atexit; atexit.register(lambda: 1 / 0)",
        "import sys; print(1); sys.stdout = open('/dev/full', 'w'); print(2)",
        "import sys; sys.stdout = None",
        "import os\nprint('once', flush=True)\nif not os.fork(): raise SystemExit(3)\nraise SystemExit(os.wait()[1] >> 8)",
        "import os; os._exit(5)",
    ],
)
def test_a_forked_program_ends_as_in_an_interpreter_of_its_own(program: str, is_half: bool, tmp_path: Path) -> None:
    plain = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    forked = run_python(program, folder=tmp_path, is_half=is_half)
    assert plain.returncode == forked.returncode, forked.stderr
    assert _lines(plain.stdout) == _lines(forked.stdout)
    assert _message(plain.stderr) == _message(forked.stderr)


def _lines(stdout: str) -> list[str]:
    """Return what was printed; in which order the last objects are freed is left to chance."""
    return sorted(stdout.splitlines(), key=lambda line: line if line.startswith("freed") else "")


def _message(stderr: str) -> str:
    """Return the last line of what was printed: of a traceback, that without our own frames."""
    return stderr.rpartition("\n")[0].rpartition("\n")[2]


def test_the_server_of_all_keeps_its_modules_whole(tmp_path: Path) -> None:
    """Or each of their pages would be copied."""
    program = """
import json, os, sys, cudatool
class Late:
    def __del__(self, write=os.write, names=(vars(json), vars(cudatool.errors))):
        write(1, f"{[one['__name__'] for one in names]}".encode())
sys.kept = Late()
"""
    done = run_python(program, folder=tmp_path)
    assert (0, "['json', 'cudatool.errors']") == (done.returncode, done.stdout), done.stderr
