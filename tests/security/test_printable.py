"""Names from a trace, a program or a file never reach a terminal or the log of a CI system as commands."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_fuzz import COMMANDS, DATASETS, SANITIZE, control_characters, log_commands
from hostile_datasets import HAS_DUCKDB, dataset_of
from hostile_traces import ESCAPES, records_of, trace_bytes

from cudatool.cli import group, main
from cudatool.errors import FileFormatError, UsageError
from cudatool.text import QUOTED, json_text, printable, quoted
from cudatool.trace import Frame
from cudatool.trace.events import Kind, StreamFlag


@pytest.mark.parametrize("text", ESCAPES, ids=lambda text: ascii(text)[:30])
def test_printable_text_is_one_line_without_commands(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert not re.search(r"::(error|warning|stop-commands)|##\[", shown)


@pytest.mark.parametrize(
    "text", ["plain", "é 中", "at::native::fill", "a: b", "# comment", "[bold]", "C:\\x", "std::vector"]
)
def test_what_is_printable_stays_as_it_is(text: str) -> None:
    assert text == printable(text)


@pytest.mark.parametrize(
    "text", ["##vso[task.x]", "##[error]x", " ::error file=a::x", "::ADD-MASK::x", "x ::set-output name=a::b"]
)
def test_commands_of_logs_are_escaped_wherever_a_line_may_be_wrapped(text: str) -> None:
    assert text != printable(text)


def test_a_quoted_input_is_a_lines_worth() -> None:
    assert f"'{'x' * (QUOTED - 3)}...'" == quoted("x" * 10**6)
    assert r"'a\nb'" == quoted("a\nb")
    assert ("7", "None", "<list>", "<int>") == (quoted(7), quoted(None), quoted([[]]), quoted(10**5000))


@pytest.mark.parametrize("text", ESCAPES, ids=lambda text: ascii(text)[:30])
def test_json_is_printable_and_the_same(text: str) -> None:
    written = json_text({"name": text})
    assert all(line.isprintable() for line in written.split("\n"))
    assert "##[" not in written
    assert {"name": text} == json.loads(written)


def hostile_trace(name: str) -> bytes:
    """Return a trace with a name wherever a trace has one, and with something to report for each command."""
    frame = Frame(name, name, 3)
    finding = json.dumps(
        {"kind": "out-of-bounds", "check": "memcheck", "text": name, "mode": "write", "space": "global", "kernel": name}
        | {"block": [0, 0, 0], "thread": [1, 0, 0], "source": [name, 3]}
    )
    block = {"kind": Kind.BLOCK_ALLOC, "address": 1 << 21, "size": 512, "aux0": 512, "stream": 1, "stack": 1, "aux1": 5}
    rows = [{"kind": Kind.STREAM_CREATE, "stream": s, "flags": StreamFlag.NON_BLOCKING, "address": s} for s in (1, 2)]
    rows += [
        {"kind": Kind.SEGMENT_ALLOC, "address": 1 << 21, "size": 2 << 20, "flags": 1, "stream": 1, "aux1": 5},
        block,
    ]
    for step in range(6):
        more = {**block, "address": (1 << 21) + 512 * (step + 1)}
        rows += [{"kind": Kind.RANGE_PUSH, "name": 1, "device": -1}, more, {"kind": Kind.RANGE_POP, "device": -1}]
    for correlation in (1, 2):
        rows += [
            {"kind": Kind.KERNEL_LAUNCH, "name": 1, "stream": correlation, "correlation": correlation, "stack": 1},
            {"kind": Kind.ACCESS, "name": 1, "correlation": correlation, "address": 1 << 21, "size": 4, "flags": 2},
            {
                "kind": Kind.EXECUTION,
                "correlation": correlation,
                "stream": correlation,
                "aux0": 1,
                "aux1": 2,
                "name": 1,
            },
        ]
    rows += [
        {"kind": Kind.FINDING, "name": 2, "correlation": 1, "address": 1 << 30, "size": 4, "aux0": 1},
        {"kind": Kind.WARNING, "name": 1, "device": -1},
        {"kind": Kind.OOM, "size": 1 << 30, "stack": 1, "stream": 1},
        {"kind": 251},
    ]
    header = {"device": name, "device_kind": "sim", "argv": [name], "accesses": True, "recording_error": name}
    header |= {"allocator_conf": name, "start_time": name, "total_memory": [1 << 33]}
    return trace_bytes(
        records_of(*rows), header=header, names=("", name, finding), frames=[frame], stacks=[(), (0,)], threads=[name]
    )


@pytest.mark.parametrize("command", [*COMMANDS, *SANITIZE], ids=lambda command: " ".join(command[:1] + command[2:]))
@pytest.mark.some_of("number", range(7), 1, always=["all"])
def test_no_command_prints_what_a_terminal_or_a_log_obeys(
    command: tuple[str, ...], number: int | str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [name.replace("\ud800", "") for name in ESCAPES]
    name = names[number] if isinstance(number, int) else "\n".join(names)
    (tmp_path / "x.ctrace").write_bytes(hostile_trace(name))
    words = [{"{}": "x.ctrace", "base": "x.ctrace"}.get(word, word) for word in command]
    done = CliRunner().invoke(group, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), words
    said = [done.stdout, done.stderr]
    if (tmp_path / "out.xml").exists():
        said += ET.parse(tmp_path / "out.xml").getroot().itertext()
    for text in said:
        assert [] == control_characters(text), words
        assert [] == log_commands(text, "github" in words), words


@pytest.mark.skipif(not HAS_DUCKDB, reason="needs DuckDB (cudatool[fleet])")
@pytest.mark.some_of("number", range(7), 1)
def test_no_question_about_a_data_set_prints_what_a_terminal_or_a_log_obeys(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [name.replace("\ud800", "") for name in ESCAPES]
    for folder, name in (("all", "\n".join(names)), ("one", names[number])):
        (tmp_path / "x.ctrace").write_bytes(hostile_trace(name))
        dataset = dataset_of([tmp_path / "x.ctrace"] * 3, tmp_path / folder)
        for command in DATASETS:
            words = [str(dataset) if word == "{}" else word for word in command]
            done = CliRunner().invoke(group, words)  # whose gate says, after its report, that no trace has ended
            assert done.exception is None or isinstance(done.exception, (SystemExit, UsageError)), (
                words,
                done.exception,
            )
            assert done.stdout, words
            for text in (done.stdout, done.stderr):
                assert [] == control_characters(text), words
                assert [] == log_commands(text, False), words


def test_error_messages_are_printable_and_short(tmp_path: Path, monkeypatch, capsys) -> None:
    for error in (FileFormatError("x\x1b[31m", "a\n::error::b" + "y" * 10**6), FileFormatError("x", "\u202e")):
        monkeypatch.setattr(group, "main", lambda *args, error=error, **options: (_ for _ in ()).throw(error))
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr().err
        assert 2 == ended.value.code
        assert [] == control_characters(said)
        assert [] == log_commands(said, False)
        assert len(said) < 2500


@pytest.mark.parametrize("name", ["a\x1b[31m.ctrace", "\n::error::x", "\u202e"])
def test_names_of_files_are_printable_in_errors(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["snapshot"], ["sanitize"], ["leaks"], ["export", "--to", "sqlite"], ["ptx"], ["replay"], [name]):
        monkeypatch.setattr("sys.argv", ["cudatool", *command, name])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr().err
        assert 2 == ended.value.code
        assert [] == control_characters(said), command
        assert [] == log_commands(said, False), command
