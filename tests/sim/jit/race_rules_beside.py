"""NVIDIA's racecheck beside ours: the pairs of kernels (:mod:`race_rules`) whose race is on shared memory.

    python tests/sim/jit/race_rules_beside.py [--ours FILE] [--json FILE] [--markdown FILE] [--logs FOLDER]

prints all pairs; with ``--markdown FILE`` these go there, and what differs is printed. Ours runs on the software device;
with ``--ours FILE`` it is read from FILE if that exists, else written to it, so that a machine with a GPU needs no
cudatool. Theirs needs nvcc, compute-sanitizer and a GPU, and looks at shared memory alone. A process of each file of
kernels runs all of them; one that makes no progress or fails is named, and the others run again without it. Exits with 1
if ours differs from the labels, and with 2 if theirs could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from race_rules import Pair, kernel_name, source
from race_rules_all import MODULES, PAIRS

__all__ = ["Module", "Theirs", "reported", "theirs"]

HARDWARE = {
    "init_without_barrier": "arrives where there may be no mbarrier yet, which the hardware may never complete",
    "bulk_in_expected_before": "its copy may still write when the block's shared memory is another's",
}
"""Pairs that only the software device runs, and why."""

_SILENCE_S, _ATTEMPTS = 25, 4  # without a line of progress until a process is ended; runs of one file of kernels
_INTEGERS = 16384  # as race_rules_run's

_HOST = r"""
#include <cstdio>
#include <cstdlib>
struct Kernel { const char *name; void (*kernel)(int *, int *); int grid, block; };
static const Kernel KERNELS[] = {
%s
};
int main(int argc, char **argv) { // the numbers of kernels to leave out
    int *memory;
    const size_t bytes = 2 * %d * sizeof(int);
    if (cudaError_t error = cudaMalloc(&memory, bytes)) { printf("no memory: %%s\n", cudaGetErrorString(error)); return 4; }
    for (int i = 0; i < int(sizeof(KERNELS) / sizeof(*KERNELS)); i++) {
        bool out = false;
        for (int j = 1; j < argc; j++) out |= atoi(argv[j]) == i;
        if (out) continue;
        printf("start %%d\n", i), fflush(stdout);
        cudaMemset(memory, 0, bytes);
        KERNELS[i].kernel<<<KERNELS[i].grid, KERNELS[i].block>>>(memory, memory + %d);
        cudaError_t error = cudaGetLastError();
        if (!error) error = cudaDeviceSynchronize();
        printf("done %%d %%s\n", i, cudaGetErrorName(error)), fflush(stdout);
        if (error) return 3;
    }
    return 0;
}
"""


@dataclass(frozen=True)
class Module:
    """A file of kernels: the name of each, with its pair."""

    name: str
    pairs: list[Pair]

    def kernels(self) -> list[tuple[str, Pair]]:
        return [(kernel_name(pair, racy=racy), pair) for pair in self.pairs for racy in (True, False)]

    def text(self) -> str:
        """Return the CUDA C++ of the kernels and of a program that runs them one by one."""
        rows = "\n".join(f'{{"{name}", {name}, {pair.grid}, {pair.block}}},' for name, pair in self.kernels())
        return source(self.pairs, MODULES[self.name].PRELUDE) + _HOST % (rows, _INTEGERS, _INTEGERS)


@dataclass
class Theirs:
    """What compute-sanitizer says: severities by kernel, why kernels did not run, and what else it printed."""

    severities: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    other: list[str] = field(default_factory=list)


# ---- ours ----


def _ours_of(part: list[tuple[str, Pair]]) -> dict[str, list[str]]:
    """Return the spaces of memory in which racecheck finds races, by kernel."""
    from conftest import nvrtc_ptx
    from race_rules_run import Checker

    from cudatool import _driver

    _driver.choose("sim")
    _driver.initialize()
    checker = Checker(nvrtc_ptx)
    return {
        kernel_name(pair, racy=racy): sorted({one.space for one in checker.found(module, pair, racy=racy)})
        for module, pair in part
        for racy in (True, False)
    }


def ours(path: Path | None, jobs: int) -> dict[str, list[str]]:
    """Return the spaces of memory in which our racecheck finds races, by kernel."""
    if path and path.exists():
        found: dict[str, list[str]] = json.loads(path.read_text())
        return found
    found = {}
    with ProcessPoolExecutor(jobs) as pool:
        for part in pool.map(_ours_of, [PAIRS[i::jobs] for i in range(jobs)]):
            found.update(part)
    if path:
        path.write_text(json.dumps(found, indent=1))
    return found


# ---- theirs ----

_ISSUE = re.compile(r"^(error|warning|info)\b", re.IGNORECASE)


def reported(log: str, names: Iterable[str]) -> tuple[dict[str, set[str]], list[str]]:
    """Return the severities of hazards by kernel, and the issues that name no kernel or are no hazards.

    An issue is a line ``========= Error: ...`` with the lines below it, up to an empty one.
    """
    issues: list[list[str]] = []
    for line in log.splitlines():
        text = line.removeprefix("=========").strip()
        if not line.startswith("========="):
            continue
        if _ISSUE.match(text):
            issues.append([text])
        elif issues and issues[-1][-1] and text and "SUMMARY" not in text:
            issues[-1].append(text)
        elif issues:
            issues[-1].append("")  # nothing more belongs to it
    known, severities, other = set(names), {}, []
    for lines in issues:
        text = "\n".join(lines).strip()
        named = known & set(re.findall(r"\w+", text))
        if not named or not re.search("race reported|hazard detected", text, re.IGNORECASE):
            other.append(text)
            continue
        for name in named:
            severities.setdefault(name, set()).add(_ISSUE.match(text)[1].lower())
    return severities, other


def _run(command: list[str], stdout: Path, silence_s: float, until: float) -> str:
    """Run a process with its output in a file; return why it was ended, empty if it was not."""
    with stdout.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    size, changed = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        now = time.monotonic()
        if (new := stdout.stat().st_size) != size:
            size, changed = new, now
        why = "no progress" if now - changed > silence_s else "out of time" if now > until else ""
        if why:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return why
    return ""


def theirs(module: Module, tools: list[str], nvcc: list[str], folder: Path, until: float) -> Theirs:
    """Compile a file of kernels and run it under compute-sanitizer, without kernels that hang or fail."""
    result, names = Theirs(), [name for name, _ in module.kernels()]
    text, program = folder / f"{module.name}.cu", folder / module.name
    text.write_text(module.text())
    done = subprocess.run([*nvcc, "-o", program, text], capture_output=True, text=True, check=False)
    if done.returncode:
        result.failed = dict.fromkeys(names, "did not compile")
        result.other = [done.stdout + done.stderr]
        return result
    left_out: list[int] = []
    for attempt in range(_ATTEMPTS):
        log, output = (folder / f"{module.name}-{attempt}.{end}" for end in ("log", "out"))
        command = [*tools, "--log-file", str(log), str(program), *map(str, left_out)]
        why = _run(command, output, _SILENCE_S, until)
        lines = output.read_text(errors="replace").splitlines()
        started, ended = ([line.split()[1:] for line in lines if line.startswith(word)] for word in ("start ", "done "))
        found, other = reported(log.read_text(errors="replace") if log.exists() else "", names)
        result.severities = {name: sorted(kinds) for name, kinds in found.items()}
        right = {int(i) for i, error in ended if error == "cudaSuccess"}
        missing = [i for i in range(len(names)) if i not in right and i not in left_out]
        if not missing and not why:
            result.other = other
            return result
        culprit = int(started[-1][0]) if started else None
        error = next(
            (error for i, error in ended if int(i) == culprit and error != "cudaSuccess"), why or "process died"
        )
        if culprit is None or culprit in right or why == "out of time":
            break  # no kernel's fault
        result.failed[names[culprit]] = error
        left_out.append(culprit)
    result.failed.update({names[i]: "not run" for i in missing if names[i] not in result.failed})
    result.other = [*other, *lines[-5:]]
    return result


# ---- both ----


def _cell(name: str, pair: Pair, outcome: Theirs | None) -> tuple[bool | None, str]:
    """Return whether compute-sanitizer reports a kernel, None if it did not run, and that in words."""
    if not outcome or name in outcome.failed or pair.name in HARDWARE:
        return None, outcome.failed.get(name, "not run") if outcome else "not run"
    severities = outcome.severities.get(name)
    return bool(severities), f"race ({', '.join(severities)})" if severities else "-"


def table(pairs: list[Pair], found: dict[str, list[str]], outcome: Theirs | None) -> tuple[list[str], list[str]]:
    """Return a Markdown table of pairs, and the sums."""
    rows = ["| pair | kernel | ours | theirs |", "|---|---|---|---|"]
    sums: Counter[tuple[str, bool, bool | None]] = Counter()
    for pair in pairs:
        for racy in (True, False):
            name = kernel_name(pair, racy=racy)
            races, text = _cell(name, pair, outcome)
            sums["ours", racy, bool(found[name])] += 1
            sums["theirs", racy, races] += 1
            rows.append(f"| {pair.name} | {'racy' if racy else 'right'} | {'race' if found[name] else '-'} | {text} |")
    return rows, [
        f"{whose}: found {sums[whose, True, True]}, missed {sums[whose, True, False]}, "
        f"false {sums[whose, False, True]}, rightly silent {sums[whose, False, False]}, "
        f"not run {sums[whose, True, None] + sums[whose, False, None]}"
        for whose in ("ours", "theirs")
    ]


def _run_theirs(options: argparse.Namespace, pairs: list[tuple[str, Pair]]) -> tuple[Theirs | None, str]:
    """Return what compute-sanitizer says of all pairs, or why it could not run."""
    tools = [shutil.which(options.nvcc), shutil.which(options.compute_sanitizer)]
    for name, tool in zip((options.nvcc, options.compute_sanitizer), tools, strict=True):
        if not tool:
            return None, f"theirs was not run: there is no {name}"
    nvcc = [str(tools[0]), "-w", "-std=c++17", f"-arch={options.arch}"]
    command = [str(tools[1]), "--tool", "racecheck", "--print-limit", "100000", *shlex.split(options.options)]
    modules = [Module(name, [p for m, p in pairs if m == name and p.name not in HARDWARE]) for name in MODULES]
    modules = [module for module in modules if module.pairs]
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(len(modules)) as pool:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        parts = list(pool.map(lambda one: theirs(one, command, nvcc, folder.resolve(), until), modules))
    whole = Theirs()
    for part in parts:
        whole.severities.update(part.severities)
        whole.failed.update(part.failed)
        whole.other += part.other
    ran = sum(len(module.kernels()) for module in modules) - len(whole.failed)
    return whole, "" if ran else "theirs was not run: no kernel ended under compute-sanitizer"


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ours", type=Path, metavar="FILE", help="results of our racecheck: read, or written if missing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="where to keep sources, programs and their reports")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8), help="processes for ours")
    parser.add_argument("--seconds", type=float, default=80, help="for theirs, without compiling")
    parser.add_argument("--arch", default="sm_90", help="of nvcc")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--compute-sanitizer", default="compute-sanitizer")
    parser.add_argument("--options", default="", help="more options for compute-sanitizer, in one word")
    options = parser.parse_args()
    begin = time.monotonic()
    found = ours(options.ours, options.jobs)
    chosen = [(module, pair) for module, pair in PAIRS if "shared" in found[kernel_name(pair, racy=True)]]
    pairs = [pair for _, pair in chosen]
    outcome, problem = _run_theirs(options, chosen)
    rows, notes = table(pairs, found, outcome)
    elsewhere = len(PAIRS) - len(pairs)
    notes.append(f"{elsewhere} pairs race on device memory alone, at which compute-sanitizer does not look.")
    notes += [f"{name}: left out on hardware: {why}" for name, why in HARDWARE.items()]
    notes += [f"unassigned: {text}" for text in sorted(set(outcome.other))] if outcome else []
    notes += [problem] * bool(problem) + [f"{time.monotonic() - begin:.0f} s"]
    if options.markdown:
        options.markdown.write_text("\n".join([*rows, "", *notes]) + "\n")
        rows = [row for row in rows if not re.search(r"racy \| race \| race|right \| - \| - ", row)]
    sys.stdout.write("\n".join([*rows, "", *notes]) + "\n")
    if options.json:
        options.json.write_text(json.dumps({"ours": found, "theirs": asdict(outcome) if outcome else None}, indent=1))
    differs = any(bool(found[kernel_name(p, racy=racy)]) != racy for p in pairs for racy in (True, False))
    return 2 if problem else int(differs)


if __name__ == "__main__":
    sys.exit(main())
