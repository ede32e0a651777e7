"""A trace names the files that reports quote: none but source is, whatever a stranger's trace says."""

from __future__ import annotations

import linecache
import math
import os
import time
from pathlib import Path

import pytest
from hostile_traces import records_of, trace_bytes
from warm_process import COMMAND_LINE, run_python

from cudatool import analyze
from cudatool.limits import QUOTED_SOURCE
from cudatool.sanitize import check
from cudatool.sanitize.places import recorded_at, source_line, source_lines
from cudatool.trace import reader
from cudatool.trace.events import AccessFlag, Kind
from cudatool.trace.model import Frame
from cudatool.viz.payload import payload

SECRET = "root:$6$secret:19000"
FORMATS = ("text", "json", "junit", "github", "gitlab", "sarif")


def racy_trace(path: Path, *files: str, **header: str) -> str:
    """Write a trace with a race, whose stacks have a line of each of the files."""
    kernel = {"kind": Kind.KERNEL_LAUNCH, "stack": 1, "name": 1}
    access = {"kind": Kind.ACCESS, "stack": 1, "address": 1 << 20, "size": 64}
    records = records_of(
        *({"kind": Kind.STREAM_CREATE, "stream": stream, "flags": 1, "stack": 1} for stream in (1, 2)),
        {**kernel, "stream": 1, "correlation": 1},
        {**access, "correlation": 1, "flags": AccessFlag.WRITE},
        {**kernel, "stream": 2, "correlation": 2},
        {**access, "correlation": 2, "flags": AccessFlag.READ},
    )
    frames = [Frame(file, "main", 1) for file in files]
    stacks = ((), tuple(range(len(files))))
    path.write_bytes(trace_bytes(records, header=header, names=("", "k"), frames=frames, stacks=stacks))
    return str(path)


def test_no_report_prints_a_file_that_is_no_source(tmp_path: Path) -> None:
    private = [tmp_path / name for name in ("shadow", "id_rsa.pem", "settings.json")]
    source = tmp_path / "program.py"
    link = tmp_path / "link.py"
    for path in private:
        path.write_text(SECRET + "\n")
    source.write_text("quoted = 1\n")
    link.symlink_to(private[0])
    odd = [str(link), "/proc/self/environ", "/proc/self/pagemap", "/dev/zero", str(tmp_path), "\0", "/proc/self/mem"]
    os.mkfifo(tmp_path / "pipe.py")
    trace = racy_trace(tmp_path / "x.ctrace", str(source), *map(str, private), *odd, str(tmp_path / "pipe.py"))
    outputs = [f"--format={name}={tmp_path / name}" for name in FORMATS]
    done = run_python(COMMAND_LINE, "sanitize", *outputs, "--html", str(tmp_path / "html"), trace, timeout_s=60)
    assert done.returncode == 1, done.stderr
    said = {name: (tmp_path / name).read_text() for name in FORMATS}
    report = analyze.report(reader.read(trace))
    said["html"] = payload(report, check(report.trace)).decode(errors="replace")
    assert {"quoted = 1" in text for text in (said["text"], said["junit"], said["html"])} == {True}
    assert [] == [name for name, text in said.items() if SECRET in text or "PATH=" in text]


def test_a_source_file_is_quoted_and_others_are_not(tmp_path: Path) -> None:
    for name, content, expected in (
        ("a.py", b"x = 1\n", "x = 1"),
        ("a.cu", b"__global__ void k() {}\n", "__global__ void k() {}"),
        ("script", b"#!/usr/bin/env python3\n", "#!/usr/bin/env python3"),
        ("a.txt", b"x = 1\n", ""),
        ("other", b"#!/bin/sh\n", ""),
        ("empty.py", b"", ""),
        ("latin.py", b"# coding: latin-1\nx = 1  # \xe9\n", "# coding: latin-1"),
        ("unknown.py", b"# coding: what\n", ""),
        ("bad.py", b"x = '\xff'\n", ""),
        ("bad.cu", b"// \xff\n", "// \N{REPLACEMENT CHARACTER}"),
    ):
        (tmp_path / name).write_bytes(content)
        assert expected == source_line(str(tmp_path / name), 1), name
    assert "x = 1  # \xe9" == source_line(str(tmp_path / "latin.py"), 2)


def test_lines_are_counted_as_python_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"a = '\x0c'\r\nb = '\xe2\x80\xa8'\nc = 3\rd = 4")
    assert ["a = '\x0c'\n", "b = '\u2028'\n", "c = 3\n", "d = 4"] == source_lines(str(path))


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"x = 1\n".ljust(QUOTED_SOURCE, b"#"))
    assert "x = 1" == source_line(str(path), 1)
    path.write_bytes(b"x = 1\n".ljust(QUOTED_SOURCE + 1, b"#"))
    assert "" == source_line(str(path), 1)


def test_a_file_that_changed_after_the_recording_is_not_quoted(tmp_path: Path) -> None:
    path, now = tmp_path / "a.py", time.time()
    path.write_text("x = 1\n")
    trace = racy_trace(tmp_path / "x.ctrace", str(path), start_time="2020-01-01T00:00:00+00:00")
    recorded = recorded_at(reader.read(trace))
    assert recorded == pytest.approx(1577836800, abs=1)
    assert "" == source_line(str(path), 1, recorded_at=recorded)
    os.utime(path, (now, recorded - 10))
    assert "x = 1" == source_line(str(path), 1, recorded_at=recorded)
    assert recorded_at(reader.read(racy_trace(tmp_path / "y.ctrace", str(path)))) == pytest.approx(now, abs=60)


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    for number in range(3):
        path.write_text(f"x = {number}\n")
        os.utime(path, (number, number))
        assert f"x = {number}" == source_line(str(path), 1)


def test_source_that_was_compiled_from_a_string_is_quoted() -> None:
    linecache.cache["of a string.cu"] = 5, None, ["int k;\n"], "of a string.cu"
    try:
        assert "int k;" == source_line("of a string.cu", 1, recorded_at=-math.inf)
    finally:
        del linecache.cache["of a string.cu"]
