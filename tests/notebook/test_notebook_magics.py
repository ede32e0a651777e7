"""`%%cudatool` in a notebook that nbclient executes, in a kernel of its own: a process that has just begun."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from warm_process import WarmProcess

pytest.importorskip("ipykernel", reason="Jupyter is not installed")
pytest.importorskip("nbclient", reason="Jupyter is not installed")

_EXECUTE = """
import json, sys, nbformat
from nbclient import NotebookClient
cells = json.loads(sys.argv[1])
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
NotebookClient(notebook, timeout=120, allow_errors=True).execute()
json.dump([cell.outputs for cell in notebook.cells], sys.stdout)
"""
_SETUP = """%%cudatool run --device sim:memory=256MiB
import cudatool as ct
kept = []
def hog(n=20 << 20):
    kept.append(ct.empty(n, "u1"))
hog()
"""


@cache
def _client() -> WarmProcess:
    """Return a server that has imported nbclient, for half as long as a kernel takes to start."""
    return WarmProcess(["nbclient", "nbformat"])


@pytest.fixture(scope="module", autouse=True)
def client_ends() -> Iterator[None]:
    yield
    _client().close()


def _execute(folder: Path, *cells: str) -> list[list[dict[str, Any]]]:
    """Return the outputs of each cell, after one that loads the extension."""
    environment = os.environ | {"IPYTHONDIR": str(folder / "ipython"), "JUPYTER_PLATFORM_DIRS": "1", "NO_COLOR": "1"}
    words = [json.dumps(["%load_ext cudatool", *cells])]
    done = _client().run(_EXECUTE, words, folder, environment, timeout_s=200)
    assert done.returncode == 0, done.stderr
    loaded, *outputs = json.loads(done.stdout)
    assert loaded == []
    return outputs


def _text(outputs: list[dict[str, Any]], kind: str = "text/plain") -> str:
    """Return the text of the one output that has a page of ours."""
    (shown,) = [one["data"] for one in outputs if "text/html" in one.get("data", {})]
    text: str = shown[kind]
    return text


def _errors(outputs: list[dict[str, Any]]) -> list[str]:
    return [one["ename"] for one in outputs if one["output_type"] == "error"]


def test_notebook_records_shows_and_goes_on(tmp_path):
    cells = [
        _SETUP,
        "len(kept)",
        "%%cudatool snapshot -o held.ctrace\nhog()\n'a value'",
        "%%cudatool run\nwhile True: hog()",
        "import cudatool.notebook as nb; nb.diff(_2, nb.snapshot('held.ctrace'))",
        "_4.page('page.html').name, _4.report.summary.events > 0",
        "nb.diff(_4, 'held.ctrace')",
    ]
    run, value, snapshot, failed, compared, page, same = _execute(tmp_path, *cells)
    assert "Memory     peak 20 MiB allocated" in _text(run)
    assert "In[2]:5 (hog)" in _text(run)
    assert value[0]["data"]["text/plain"] == "1"
    assert "Held at the peak" in _text(snapshot)
    assert any(one.get("data", {}).get("text/plain") == "'a value'" for one in snapshot)
    assert (tmp_path / "held.ctrace").exists()
    assert _errors(failed) == ["OutOfMemoryError"]
    assert "Out of memory: In[2]:5 (hog) requested 20 MiB on device 0" in _text(failed)
    assert "At the peak" in _text(compared)
    assert "(no stack: allocated before the recording), 20 MiB each" in _text(compared)
    assert page[0]["data"]["text/plain"] == "('page.html', True)"
    assert "2 call sites hold the same in both" in _text(same)  # a cell is called the same in the file as in memory
    assert (tmp_path / "page.html").read_text().startswith("<!")


def test_notebook_finds_accesses_out_of_bounds_and_races(tmp_path):
    wrong = """%%cudatool sanitize --device sim
import cudatool as ct
x = ct.ones(10, "f4")
k = ct.compile('extern "C" __global__ void f(float *x) { x[threadIdx.x + 1] = 1; }', "f")
k[1, 10](x)
"""
    races = """%%cudatool sanitize
a, b = ct.Stream(), ct.Stream()
with ct.stream(a): x.fill_(1)
with ct.stream(b): x.fill_(2)
"""
    clean = "%%cudatool sanitize\nx.fill_(3); ct.synchronize()"
    waits = """%%cudatool sanitize
k = ct.compile('extern "C" __global__ void w(float *x) { if (threadIdx.x < 9) { x[0] = 1; __syncthreads(); } }', "w")
k[1, 64](x)
"""
    outputs = _execute(tmp_path, wrong, races, clean, "[len(one.findings.findings) for one in (_3, _4)]", waits)
    assert "out-of-bounds" in _text(outputs[0])
    assert "In[2]:5 in <module>" in _text(outputs[0])
    assert "race-waw" in _text(outputs[1])
    assert re.search(r"In\[3\]:[23] in <module>", _text(outputs[1]))
    assert "0 findings" in _text(outputs[2]) or "clean" in _text(outputs[2]) or "no finding" in _text(outputs[2])
    assert outputs[3][0]["data"]["text/plain"] == "[1, 0]"
    assert "barrier-divergence" in _text(outputs[4])


def test_html_shows_names_of_the_program_as_text(tmp_path):
    cell = _SETUP + "exec(compile('hog()', '<img src=x onerror=alert(1)>', 'exec'))\n"
    html = _text(_execute(tmp_path, cell)[0], "text/html")
    assert "<img" not in html
    assert html.startswith("<pre")


def test_line_that_makes_no_sense_is_refused_in_one_line(tmp_path):
    for outputs, said in zip(
        _execute(
            tmp_path,
            "%%cudatool nonsense\n1",
            "%%cudatool sanitize --checks rase\n1",
            "%%cudatool run --device nowhere\n1",
            "%%cudatool run -o /nowhere/x.ctrace --device sim\n1",
            "%%cudatool run\nimport asyncio\nawait asyncio.sleep(0)",
        ),
        ("invalid choice", "did you mean 'race'?", "nowhere", "/nowhere/x.ctrace", "with cudatool.record("),
        strict=True,
    ):
        streams = "".join(one.get("text", "") for one in outputs)
        (line,) = [line for line in streams.splitlines() if line.startswith("UsageError: ")]
        assert said in line
        assert "Traceback" not in streams


def test_cells_are_those_of_ipython(tmp_path):
    cell = "%%cudatool run --device sim\nhere = !echo shell\n%time x = 1\ndef f():\n    return here\nf()[0];"
    outputs = _execute(tmp_path, cell, "here[0], x", "%%cudatool run\nf()[0]")
    assert outputs[1][0]["data"]["text/plain"] == "('shell', 1)"
    assert not any(one.get("data", {}).get("text/plain") == "'shell'" for one in outputs[0])  # for the semicolon
    assert any(one.get("data", {}).get("text/plain") == "'shell'" for one in outputs[2])


def test_what_a_cell_would_have_done_after_it_failed_is_named_as_not_checked(tmp_path):
    work = "import cudatool as ct\nx = ct.zeros(8)\n"
    done, failed = _execute(tmp_path, f"%%cudatool sanitize --device sim\n{work}", f"%%cudatool sanitize\n{work}1 / 0")
    assert "no findings\n" in _text(done) + "\n"
    assert _errors(failed) == ["ZeroDivisionError"]
    (traceback,) = ["\n".join(one["traceback"]) for one in failed if one["output_type"] == "error"]
    traceback = re.sub(r"\x1b\[[\d;]*m", "", traceback)
    assert "Cell In[3], line 4" in traceback
    assert "cudatool/notebook.py" not in traceback
    assert "raised ZeroDivisionError; what it would have done after that is not known" in " ".join(
        _text(failed).split()
    )
