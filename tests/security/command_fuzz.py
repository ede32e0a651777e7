"""Whole commands on files that are sound by their layout and say impossible things. Everything is the same in every run.

    python tests/security/command_fuzz.py --seeds 0:2000      # prints each fault once, with a seed that shows it
    python tests/security/command_fuzz.py --seeds 0:2000 --datasets

A command may give a result or refuse the file with one line. An exception other than ours, output that a terminal, a
browser or a CI system would take for more than text, and output that its own format does not allow are faults.
"""

from __future__ import annotations

import argparse
import bz2
import copy
import functools
import gzip
import json
import lzma
import os
import pickle
import random
import re
import shutil
import sqlite3
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import jsonschema
import numpy as np
from click.testing import CliRunner
from hostile_datasets import dataset_of, mutate
from hostile_traces import ESCAPES, VALUES, mutated

from cudatool.cli import group
from cudatool.cli._schemas import schema_of_command
from cudatool.errors import CudatoolError
from cudatool.recording import record
from cudatool.trace import reader
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # where a script is run, and no test
from published_schemas import checker  # noqa: E402

SNAPSHOTS = HERE.parent / "data"
PROGRAM = HERE / "recorded_program.py"

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("snapshot", "{}"),
    ("snapshot", "{}", "--json"),
    ("snapshot", "{}", "--html", "out.html", "-f"),
    ("snapshot", "{}", "--torch", "out.pickle", "-f", "--memory", "8GiB"),
    ("leaks", "{}"),
    ("leaks", "{}", "--json"),
    ("diff", "{}", "base"),
    ("diff", "base", "{}", "--json"),
    ("export", "{}", "--to", "perfetto", "-f", "-o", "out.perfetto.json"),
    ("export", "{}", "--to", "sqlite", "-f", "-o", "out.sqlite"),
    ("export", "{}", "--to", "torch", "-f", "-o", "out.pickle"),
    ("replay", "{}", "--check"),
    ("replay", "{}", "--conf", "expandable_segments:True"),
    ("replay", "{}", "--conf", "max_split_size_mb:20", "--json"),
)
SANITIZE: tuple[tuple[str, ...], ...] = (
    ("sanitize", "{}"),
    ("sanitize", "--checks", "all", "--format", "junit=out.xml", "--format", "json=out.json", "{}"),
    ("sanitize", "--checks", "all", "--format", "github", "{}"),
    ("sanitize", "--format", "sarif", "--html", "out.html", "{}"),
    ("sanitize", "--checks", "all", "--format", "gitlab", "{}"),
)
BASELINE: tuple[tuple[str, ...], ...] = (
    ("sanitize", "--checks", "all", "--baseline", "{}", "base"),
    ("sanitize", "--checks", "all", "--baseline", "{}", "--format", "sarif", "base"),
    ("sanitize", "--checks", "all", "--baseline", "{}", "--format", "json=out.json", "base"),
)
DATASETS: tuple[tuple[str, ...], ...] = (
    ("fleet", "{}"),
    ("fleet", "{}", "--json"),
    ("fleet", "{}", "--against", "{}", "--fail-on", "peak +2%"),
    ("fleet", "{}", "--against", "{}", "--html", "out.html", "-f"),
    ("fleet", "{}", "--json", "--against", "{}"),
    ("query", "{}", "FROM ranks"),
    ("query", "{}", "FROM ranks", "--json"),
    ("query", "{}", "SELECT * FROM sites JOIN steps USING (run, rank)", "--format", "csv"),
    ("query", "{}", "SELECT run, rank, site, sum(size) FROM allocations GROUP BY ALL", "--json"),
    ("query", "{}", "SUMMARIZE kernels"),
)
"""Questions about a data set of traces."""

SLOW = 5.0  # seconds of one command

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_COMMAND_OF_LOG = re.compile(r"^\s*::(?:error|warning|notice|debug|group|stop-commands)(?:\s|::)|##\w*\[")
_OWN_COMMAND = re.compile(r"^::(?:error|warning|notice) [^\n]*::")


@dataclass(frozen=True)
class Fault:
    """What a command did wrong: the same place in the code is the same fault."""

    what: str
    detail: str


def base_trace(folder: Path) -> Trace:
    """Return the recording of a program with something of everything."""
    path = folder / "base.ctrace"
    if not path.exists():
        import runpy

        checks = ["memcheck", "initcheck", "racecheck", "synccheck"]
        with record(path, device="sim:memory=64MiB", measure_accesses=True, checks=checks):
            runpy.run_path(str(PROGRAM), run_name="__main__")
    return reader.read(path)


@functools.cache
def _published() -> Callable[[str, Any], None]:
    return checker()


@functools.cache
def _own_report() -> Any:
    schema = schema_of_command("sanitize")
    return jsonschema.Draft202012Validator(schema)


class Fuzzer:
    """Makes files from seeds and runs commands on them, in one folder and one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = _with_readings(base_trace(folder))
        self.program = replace(self.base, header={**self.base.header, "run": "a run", "pid": 1})
        self.child = replace(self.program, header={**self.program.header, "parent_trace": "hostile.ctrace", "pid": 7})
        self.runner = CliRunner()
        baseline = folder / "baseline.json"
        list(self._words("sanitize", "--checks", "all", "--update-baseline", "--baseline", str(baseline), "base"))
        self.baseline = json.loads(baseline.read_text())
        names = ("graphs__default", "streams_default")
        self.snapshots = [pickle.loads(lzma.decompress((SNAPSHOTS / f"{n}.pickle.xz").read_bytes())) for n in names]
        for data in self.snapshots:
            for trace in data["device_traces"]:
                del trace[400:]
                trace.insert(9, {"action": "snapshot", "addr": 0, "size": 1, "stream": 0, "frames": [], "time_us": 1})
            data["host_segments"] = copy.deepcopy(data["segments"][:1])
            data["host_traces"] = [copy.deepcopy(data["device_traces"][0][:9])]

    def file(self, seed: int) -> Path:
        """Return the hostile file of a seed."""
        chance = random.Random(seed)
        for old in self.folder.glob("hostile.*"):
            old.unlink()
        traces = (self._trace,) * 4
        makers = (*traces, self._child, self._snapshot, self._snapshot, self._log, self._damaged, self._baseline)
        name, content = chance.choice(makers)(chance)
        path = self.folder / name
        path.write_bytes(content)
        return path

    def dataset(self, seed: int) -> Path:
        """Return the hostile data set of a seed: of hostile traces, or one of sound traces that was changed."""
        chance = random.Random(seed)
        for name in ("hostile", "hostile.set"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        if chance.random() < 0.3:
            made = dataset_of([self.file(seed)] * 3, self.folder / "hostile")
        else:
            sound = self.folder / "sound"
            if not sound.exists():
                dataset_of([SNAPSHOTS / "streams_default.pickle.xz"] * 4, sound)
            made = Path(shutil.copytree(sound / "set", self.folder / "hostile" / "set"))
            mutate(made, chance)
        return made.rename(self.folder / "hostile.set")

    def _trace(self, chance: random.Random) -> tuple[str, bytes]:
        return "hostile.ctrace", mutated(self.base, chance)

    def _child(self, chance: random.Random) -> tuple[str, bytes]:
        """The trace of a process beside that of the program which started it."""
        (self.folder / "hostile.7.ctrace").write_bytes(mutated(self.child, chance))
        return "hostile.ctrace", mutated(self.program, chance)

    def _baseline(self, chance: random.Random) -> tuple[str, bytes]:
        data = _edited(copy.deepcopy(self.baseline), chance)
        try:
            text = json.dumps(data, default=str)
        except ValueError:  # a list that was put into itself: JSON has none
            text = "[[]]"
        return "hostile.json", text.encode("utf-8", "surrogatepass")

    def _snapshot(self, chance: random.Random) -> tuple[str, bytes]:
        data = _edited(copy.deepcopy(chance.choice(self.snapshots)), chance)
        return "hostile.pickle", pickle.dumps(data, protocol=chance.choice((2, 4)))

    def _log(self, chance: random.Random) -> tuple[str, bytes]:
        lines = ["Thread,Time,Action,Pointer,Size,Stream"]
        lines += [
            f"{i % 3},14:{i % 60:02d}:19.998533,{('allocate', 'free')[i % 2]},0x30a{i // 2:06x},{256 * i},0x{i % 4:x}"
            for i in range(80)
        ]
        for _ in range(chance.choice((1, 2, 5))):
            row = chance.randrange(1, len(lines))
            fields = lines[row].split(",")
            fields[chance.randrange(len(fields))] = str(
                chance.choice([*VALUES, *ESCAPES, "-1", "1e999", "9" * 5000, "0x" + "f" * 5000, "allocate failure", ""])
            )
            lines[row] = ",".join(fields)
        return "hostile.csv", "\n".join(lines).encode("utf-8", "surrogatepass")

    def _damaged(self, chance: random.Random) -> tuple[str, bytes]:
        """Bytes that were cut, changed, said twice or left out, also of what was packed."""
        name, content = chance.choice((self._trace, self._snapshot, self._log))(chance)
        ending, pack = chance.choice(
            (("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress))
        )
        data = bytearray(pack(content))
        for _ in range(chance.choice((1, 1, 2, 5))):
            at = chance.randrange(len(data) + 1)
            end = at + chance.choice((1, 4, 100, len(data)))
            data[at:end] = chance.choice((b"", b"\0", b"\xff" * 9, data[at:end] * 2, bytes(chance.randbytes(4))))
        return name + ending, bytes(data)

    def run(self, command: Sequence[str], path: Path) -> Iterator[Fault]:
        """Run one command on a file and yield what is wrong with what it did."""
        return self._words(*(str(path) if word == "{}" else word for word in command))

    def _words(self, *command: str) -> Iterator[Fault]:
        words = [str(self.folder / "base.ctrace") if word == "base" else word for word in command]
        here = os.getcwd()
        os.chdir(self.folder)
        for old in self.folder.glob("out.*"):
            old.unlink()
        began = time.process_time()
        try:
            with self.runner.isolation() as (out, err, _):
                error = _exception_of(words)
                sys.stdout.flush()
                sys.stderr.flush()
            took = time.process_time() - began
            stdout = out.getvalue().decode("utf-8", "surrogatepass")
            yield from _faults(command, error, stdout, err.getvalue().decode("utf-8", "surrogatepass"))
            yield from _faults_of_files(self.folder)
        finally:
            os.chdir(here)
        if took > SLOW:
            yield Fault(f"slow: {command[0]}", f"{took:.1f} s")


def _with_readings(trace: Trace) -> Trace:
    """Return a trace with readings of what the driver charges, as on a GPU."""
    records = trace.records
    readings = records[:: max(len(records) // 40, 1)].copy()
    for name in ("size", "address", "aux0"):
        readings[name] = {"size": 1, "address": 2, "aux0": 80}[name] << 30
    readings["kind"], readings["device"] = Kind.DEVICE_USE, 0
    readings["flags"] = 1 << np.arange(len(readings)) % 8
    where = np.arange(len(readings)) * max(len(records) // 40, 1)
    return replace(trace, records=np.insert(records, where, readings))


def _edited(data: Any, chance: random.Random) -> Any:
    """Put other values into a few places of plain data."""
    event = {"action": "alloc", "addr": 1 << 40, "size": 512}
    odd = [-1, None, 0.5, float("nan"), [], {}, (), [[]], True, "9" * 5000, 10**400, event, [event], [[event]]]
    for _ in range(chance.choice((1, 1, 2, 6))):
        container, key = chance.choice(list(_places(data)))
        container[key] = chance.choice([*VALUES, *ESCAPES, *odd])
    return data


def _exception_of(words: Sequence[str]) -> BaseException | None:
    try:
        group.main(words, prog_name="cudatool", standalone_mode=False)
    except BaseException as error:  # the point of it all
        return error
    return None


def control_characters(text: str) -> list[str]:
    """Return the surroundings of the first character that a terminal obeys, if there is one."""
    found = _CONTROL.search(text)
    return [ascii(text[max(0, found.start() - 60) : found.end() + 20])] if found else []


def log_commands(text: str, our_own: bool) -> list[str]:
    """Return the lines that a CI system's log takes for commands; `our_own` annotations are none of them."""
    lines = [line for line in text.split("\n") if _COMMAND_OF_LOG.search(line)]
    return [ascii(line[:200]) for line in lines if not (our_own and _OWN_COMMAND.match(line))]


def _faults(command: Sequence[str], error: BaseException | None, stdout: str, stderr: str) -> Iterator[Fault]:
    if isinstance(error, CudatoolError | click.ClickException):
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        if "\n" in message or len(message) > 400:
            yield Fault(f"message of {_place(error)}", message[:500])
        stderr += message
    elif isinstance(error, SystemExit):
        if error.code not in (0, 1, 2, 4, None):  # 4: nothing was checked, or it could not tell
            yield Fault(f"status {error.code}", "")
    elif error is not None:
        yield Fault(f"{type(error).__name__} at {_place(error)}", str(error)[:200])
        return
    for stream, text in (("stdout", stdout), ("stderr", stderr)):
        for around in control_characters(text):
            yield Fault(f"control character on {stream} of {command[0]} {command[-2]}", around)
        for line in log_commands(text, "github" in command):
            yield Fault(f"workflow command on {stream} of {command[0]}", line)
    if error is None or isinstance(error, SystemExit):
        formats = {"--json", "sarif", "gitlab"} & set(command)
        if formats:
            try:
                data = json.loads(stdout, parse_constant=_refuse_constant)
                if "sarif" in formats:
                    _published()("sarif", data)
                elif "gitlab" in formats:
                    _check_code_quality(data)
            except (ValueError, AssertionError) as problem:
                yield Fault(f"not what was asked for from {command[0]} {formats}", f"{problem}: {stdout[:100]!r}")


def _check_code_quality(data: Any) -> None:
    """Fail if something is not as GitLab's documentation of its Code Quality report asks for."""
    for row in data:
        assert set(row) == {"description", "check_name", "fingerprint", "severity", "location"}, row
        assert all(isinstance(row[name], str) and row[name] for name in ("description", "check_name", "fingerprint")), (
            row
        )
        assert row["severity"] in ("info", "minor", "major", "critical", "blocker"), row
        path, line = row["location"]["path"], row["location"]["lines"]["begin"]
        assert path and not path.startswith("./") and isinstance(line, int) and line >= 0, row
    prints = [row["fingerprint"] for row in data]
    assert len(prints) == len(set(prints)), "two findings of one fingerprint"


_WRONG = (
    *(AssertionError, ValueError, ET.ParseError, jsonschema.ValidationError, sqlite3.Error, pickle.UnpicklingError),
)


def _faults_of_files(folder: Path) -> Iterator[Fault]:
    for path in folder.glob("out.*"):
        try:
            if path.suffix == ".json":
                data = json.loads(path.read_text(), parse_constant=_refuse_constant)
                if path.name == "out.json":
                    _own_report().validate(data)
            elif path.suffix == ".xml":
                root = ET.fromstring(path.read_bytes())
                for text in root.itertext():
                    for around in control_characters(text):
                        yield Fault("control character in JUnit", around)
            elif path.suffix == ".sqlite":
                with sqlite3.connect(path) as database:
                    database.execute("SELECT count(*) FROM by_call_site").fetchall()
                    assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            elif path.suffix == ".html":
                if "alert(1)</script>" in path.read_text():
                    yield Fault("markup in a page", "")
            else:
                pickle.loads(path.read_bytes())
        except _WRONG as error:
            yield Fault(f"{path.name} is not what it should be", str(error)[:200])


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _place(error: BaseException) -> str:
    """Return the innermost line of ours that an exception came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if re.search(r"(cudatool|cli|viz)/[a-z_/]+\.py$", frame.filename)] or frames
    return f"{'/'.join(Path(own[-1].filename).parts[-2:])}:{own[-1].lineno} ({own[-1].name})" if own else "?"


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of each value in dicts, and of a few in each list."""
    if isinstance(data, dict):
        keys: list[Any] = list(data)
    elif isinstance(data, list):
        keys = sorted({0, len(data) // 2, len(data) - 1}) if data else []
    else:
        return
    for key in keys:
        yield data, key
        yield from _places(data[key])


def fuzz(seeds: range, folder: Path, *, until: float = float("inf")) -> tuple[int, dict[str, tuple[int, Fault, str]]]:
    """Return how many commands ran before the clock says `until`, and the faults, each with the first seed of it."""
    fuzzer = Fuzzer(folder)
    ran, found = 0, {}
    for seed in seeds:
        path = fuzzer.file(seed)
        chosen = random.Random(seed).sample((*COMMANDS, *SANITIZE) if path.suffix != ".json" else BASELINE, 3)
        for command in chosen:
            if time.monotonic() > until:
                return ran, found
            if command[0] == "sanitize" and path.suffix != ".ctrace":
                continue
            ran += 1
            for fault in fuzzer.run(command, path):
                found.setdefault(fault.what, (seed, fault, " ".join(command)))
    return ran, found


def fuzz_datasets(seeds: range, folder: Path) -> tuple[int, dict[str, tuple[int, Fault, str]]]:
    """Return how many questions were asked of hostile data sets, and the faults, each with the first seed of it."""
    fuzzer = Fuzzer(folder)
    ran, found = 0, {}
    for seed in seeds:
        path = fuzzer.dataset(seed)
        for command in random.Random(seed).sample(DATASETS, 3):
            ran += 1
            for fault in fuzzer.run(command, path):
                found.setdefault(fault.what, (seed, fault, " ".join(command)))
    return ran, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:500", help="first:last, default 0:500")
    parser.add_argument("--datasets", action="store_true", help="data sets, for query and fleet")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split(":"))
    folder = Path(tempfile.mkdtemp(prefix="cudatool-fuzz-"))
    try:
        if arguments.datasets:
            ran, found = fuzz_datasets(range(first, last), folder)
        else:
            ran, found = fuzz(range(first, last), folder, until=time.monotonic() + arguments.seconds)
    finally:
        shutil.rmtree(folder)
    for seed, fault, command in found.values():
        print(f"seed {seed}: {fault.what}\n    cudatool {command}\n    {fault.detail}")
    print(f"{ran} commands, {len(found)} faults")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
