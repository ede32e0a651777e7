"""Runs the race corpus under the sanitizer and prints precision and recall.

::

    python tests/races/run.py                    # the software device, 3 schedules
    python tests/races/run.py --schedules 20     # fifo, lifo, late and 17 random ones
    python tests/races/run.py --device cuda      # a GPU, as it is
    python tests/races/run.py --inferred         # the software device, with what a recording on a GPU has
    python tests/races/run.py --only event_wait --json

Every schedule is a process of its own, in which all programs run one after the other, each recorded by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from race_corpus import cases, compare, programs, run

__all__ = ["Runner", "devices", "run_all", "summary"]


def devices(schedules: int) -> list[str]:
    """Return the specification of a software device for each of so many schedules."""
    named = [f"sim:count=2,schedule={name}" for name in ("fifo", "lifo", "late")]
    return (named + [f"sim:count=2,schedule=random,seed={seed}" for seed in range(schedules)])[:schedules]


class Runner:
    """A process that runs programs of the corpus on `device`, one after the other, as it is asked to."""

    def __init__(self, device: str, *, inferred: bool = False) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed below)
        command = [sys.executable, __file__, "--in-this-process", "--device", device]
        command += ["--inferred"] if inferred else []
        environment = {**os.environ, "CUDATOOL_DEVICE": device}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._said}
        self._process = subprocess.Popen(command, env=environment, text=True, **pipes)

    def run(self, program: str, variant: str) -> dict:
        """Return what was found, missed and reported falsely."""
        try:
            print(program, variant, file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            self._said.seek(0)
            raise RuntimeError(f"the corpus failed at {program} {variant}:\n{self._said.read()}") from None

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._said.close()


def run_all(device: str, only: str = "", *, inferred: bool = False) -> list[dict]:
    """Run every variant on `device` in a new process; return what was found, missed and reported falsely."""
    runner = Runner(device, inferred=inferred)
    try:
        wanted = [(program.name, variant) for program, variant in cases()]
        return [runner.run(*names) for names in wanted if only in ":".join(names)]
    finally:
        runner.close()


def _run_here(device: str, inferred: bool) -> None:
    import gc

    import cudatool as ct

    as_on_a_gpu = inferred or device.startswith("cuda")
    count = ct.device_count()
    by_name = {program.name: program for program in programs()}
    for line in sys.stdin:
        name, variant = line.split()
        program = by_name[name]
        gc.freeze()  # collections look at the program's own objects alone
        result = {"program": name, "variant": variant, "device": device, "skipped": "", "error": ""}
        if as_on_a_gpu and program.cuda:
            result["skipped"] = program.cuda
        elif program.devices > count:
            result["skipped"] = f"needs {program.devices} devices"
        else:
            try:
                found = compare(program, variant, run(program, variant, as_on_a_gpu=inferred))
                result |= {"found": found.found, "missed": found.missed, "false": found.false}
            except Exception:
                result["error"] = traceback.format_exc()
        print(json.dumps(result), file=sys.__stdout__, flush=True)


def summary(results: list[dict]) -> tuple[int, int, int]:
    """Return how many expected findings were reported, how many were missed, and how many reports were false."""
    ran = [r for r in results if not r["skipped"] and not r["error"]]
    return sum(r["found"] for r in ran), sum(len(r["missed"]) for r in ran), sum(len(r["false"]) for r in ran)


def _print(results: list[dict]) -> int:
    seen: dict[str, list[str]] = {}
    for r in results:
        for what in ("error", "missed", "false"):
            if r.get(what):
                detail = r[what].splitlines()[-1] if what == "error" else ", ".join(" ".join(f) for f in r[what])
                seen.setdefault(f"{r['program']} {r['variant']}: {what}: {detail}", []).append(r["device"])
    for line, where in seen.items():
        print(f"{line}  [{len(where)}: {where[0]}]")
    skipped = {(r["program"], r["skipped"]) for r in results if r["skipped"]}
    for program, reason in sorted(skipped):
        print(f"not checked: {program}: {reason}")
    found, missed, false = summary(results)
    ran = {(r["program"], r["variant"]) for r in results if not r["skipped"]}
    print(f"{len({p for p, _ in ran})} programs, {len(ran)} variants, {len({r['device'] for r in results})} schedules")
    print(f"precision {_percent(found, found + false)} ({false} false of {found + false})")
    print(f"recall    {_percent(found, found + missed)} ({missed} missed of {found + missed})")
    return int(bool(seen))


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=3, help="of the software device")
    parser.add_argument("--device", default="sim", help="sim or cuda")
    parser.add_argument("--only", default="", help="a part of PROGRAM:VARIANT")
    parser.add_argument("--inferred", action="store_true", help="record only what a recording on a GPU would have")
    parser.add_argument("--json", action="store_true", help="one object for each variant and schedule")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_this_process:
        _run_here(options.device, options.inferred)
        return 0
    where = ["cuda"] if options.device == "cuda" else devices(options.schedules)
    results = [result for device in where for result in run_all(device, options.only, inferred=options.inferred)]
    if options.json:
        print("\n".join(json.dumps(result) for result in results))
        return 0
    status = _print(results)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{used.ru_utime + used.ru_stime:.1f} s of CPU")
    return status


if __name__ == "__main__":
    sys.exit(main())
