"""What `cudatool ptx` does with PTX that something has changed. Everything is the same in every run.

    python tests/security/ptx_fuzz.py --seeds 0:5000      # prints each fault once, with a seed that shows it
    python tests/security/ptx_fuzz.py --show 17           # prints the text of a seed

The texts are what NVRTC makes of the kernels in tests and samples. Each case must end in a result or a PtxError within
SLOW seconds and LARGE bytes; the text it is made from takes a few hundredths of a second.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

from cuda.bindings import nvrtc

from cudatool.cli._ptx_text import kernel_json
from cudatool.code_cache import CodeCache
from cudatool.errors import CompileError
from cudatool.ptx import PtxError, infer_accesses, parse, summarize
from cudatool.runtime.nvrtc import to_ptx
from cudatool.sim import jit

ROOT = Path(__file__).parents[2]
SOURCES = (  # files with kernels in strings
    "samples/mlp.py",
    "tests/sim/jit/test_calls.py",
    "tests/sim/jit/test_cuda_sources.py",
    "tests/sim/jit/test_device_printf.py",
    "tests/sim/jit/test_progress.py",
    "tests/ptx/test_ptx_analysis_of_anything.py",
    "samples/_pipeline.py",
    "samples/data_parallel.py",
    "tests/runtime/test_cuda_programs.py",
    "tests/runtime/test_low_level.py",
    "tests/sanitize/test_sanitize_graphs.py",
    "tests/cli/test_sanitize_checks.py",
)
SLOW = 5.0  # seconds of a case
LARGE = 512 << 20  # bytes that a case may take beyond what the process has
LONGEST = 40_000  # characters of a text

NUMBERS = ("0", "1", "-1", "3", "7", "255", "65536", "2147483648", "4294967295", "9223372036854775807")
NUMBERS += (
    "18446744073709551616",
    "100000000000",
    "9" * 400,
    "0x" + "f" * 300,
    "0f00000000",
    "0x",
    "1e400",
    "012",
    "09",
)
WORDS = (
    "",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    ",",
    ";",
    ":",
    "@",
    "%p1",
    "_",
    "|",
    "-",
    ".",
    '"',
    "/*",
    "\0",
    "%",
    "$x",
    "::",
)
WORDS += (
    ".reg",
    ".b128",
    ".pred",
    ".v4",
    ".align",
    ".param",
    ".local",
    ".shared",
    ".global",
    ".extern",
    ".func",
    ".entry",
)
WORDS += (
    "call",
    "bra",
    "brx.idx",
    "ret",
    "bar.sync",
    "setp.lt.u32",
    "mov.b64",
    "ld.param.u64",
    "st.local.b8",
    "cvta.to.global.u64",
)
_KEPT = CodeCache("nvrtc")
_PIECES = re.compile(r"[\w.%$]+|\s+|.", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.%$])-?\d\w*")


def bases(files: Sequence[str] = SOURCES) -> list[str]:
    """Return the texts that cases are made from."""
    found = []
    for file in files:
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if ".version" in node.value and ".entry" in node.value:
                found.append(node.value)
            elif "__global__" in node.value:
                found.append(_compiled(node.value))
    return [text for text in found if text and len(text) <= LONGEST]


@cache
def _compiled(source: str) -> str:
    """Return the PTX of a source, which later runs need not compile again; none of a part of one."""
    key = hashlib.sha256(f"{nvrtc.nvrtcVersion()} {source}".encode()).hexdigest()
    if (kept := _KEPT.get(key)) is not None:
        return kept.decode()
    try:
        text = to_ptx(source, "kernel.cu").rstrip(b"\0").decode()
    except CompileError:
        text = ""
    _KEPT.put(key, text.encode())
    return text


def case(seed: int, texts: Sequence[str]) -> str:
    """Return the text of a seed."""
    chance = random.Random(seed)
    text = chance.choice(texts)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        text = chance.choice(_CHANGES)(text, chance, texts)
    return text[: 4 * LONGEST]


def _pieces(text: str, chance: random.Random, texts: Sequence[str]) -> str:
    """Remove, repeat, replace or exchange words."""
    pieces = _PIECES.findall(text)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at, other = chance.randrange(len(pieces)), chance.randrange(len(pieces))
        match chance.randrange(5):
            case 0:
                pieces[at] = ""
            case 1:
                pieces[at] = pieces[other]
            case 2:
                pieces.insert(at, pieces[other])
            case 3:
                pieces[at], pieces[other] = pieces[other], pieces[at]
            case 4:
                pieces[at] = chance.choice(WORDS)
    return "".join(pieces) or " "


def _numbers(text: str, chance: random.Random, texts: Sequence[str]) -> str:
    """Replace a number, somewhere or in a directive."""
    places = list(_NUMBER.finditer(text))
    declared = [at for at in places if text[text.rfind("\n", 0, at.start()) + 1 :].lstrip()[:1] == "."]
    if not places:
        return text
    at = chance.choice(declared if declared and chance.random() < 0.6 else places)
    return text[: at.start()] + chance.choice(NUMBERS) + text[at.end() :]


def _lines(text: str, chance: random.Random, texts: Sequence[str]) -> str:
    """Remove, repeat or exchange lines, or take some of another text."""
    lines = text.splitlines(keepends=True) or [" "]
    at = chance.randrange(len(lines))
    some = slice(at, at + chance.choice((1, 1, 3, 20)))
    match chance.randrange(5):
        case 0:
            del lines[some]
        case 1:
            lines[at:at] = lines[some] * chance.choice((1, 2, 300))
        case 2:
            other = chance.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        case 3:
            other_lines = chance.choice(texts).splitlines(keepends=True)
            start = chance.randrange(len(other_lines))
            lines[at:at] = other_lines[start : start + chance.choice((1, 5, 30))]
        case 4:
            lines = [*lines[:at], *chance.sample(lines[some], len(lines[some])), *lines[some.stop :]]
    return "".join(lines) or " "


def _characters(text: str, chance: random.Random, texts: Sequence[str]) -> str:
    """Replace some characters."""
    data = list(text)
    for _ in range(chance.choice((1, 2, 10))):
        data[chance.randrange(len(data))] = chr(
            chance.choice((chance.randrange(128), chance.randrange(32, 127), 0x20AC))
        )
    return "".join(data)


def _deep(text: str, chance: random.Random, texts: Sequence[str]) -> str:
    """Nest or repeat something thousands of times."""
    pieces = _PIECES.findall(text)
    at = chance.randrange(len(pieces))
    what = chance.choice(
        ("{", "(", "[", "-", "!", "@", ",", "{ ", "add.s32 %r1, %r1, 1;\n", ".reg .b32 %q;", "L{}: ", "|")
    )
    number = chance.choice((10, 2000, 5000))
    pieces[at:at] = [what.replace("{}", str(index)) for index in range(number)]
    return "".join(pieces)


def _cut(text: str, chance: random.Random, texts: Sequence[str]) -> str:
    return text[: chance.randrange(len(text))] or " "


_CHANGES = (_pieces, _pieces, _pieces, _numbers, _numbers, _lines, _lines, _characters, _deep, _cut)


class SlowError(BaseException):
    """A case took too long; not an Exception, so that nothing takes it for another error."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise SlowError


@dataclass(frozen=True)
class Fault:
    what: str
    detail: str


def look_at(text: str) -> str:
    """Do what `cudatool ptx --json` does with a text, and return what it prints."""
    module = parse(text)
    names = [name for name, function in module.kernels.items() if function.has_body]
    found = [(infer_accesses(module, name), summarize(module, name)) for name in names]
    kernels = jit.load(text.encode()).kernels
    refusals = []
    for name in names:
        try:
            kernels[name].llvm_ir()
            refusals.append("")
        except (jit.UnsupportedInstruction, PtxError) as error:
            refusals.append(str(error))
    return json.dumps([kernel_json(*facts, refusal, "") for facts, refusal in zip(found, refusals, strict=True)])


def fault_of(text: str) -> Fault | None:
    """Return what is wrong with how a text is looked at, if anything."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + LARGE, limits[1]))
    handler = signal.signal(signal.SIGVTALRM, _stop)  # of the processor's time: the machine may be busy
    signal.setitimer(signal.ITIMER_VIRTUAL, SLOW)
    try:
        look_at(text)
    except PtxError as error:
        if "\n" in str(error) or len(str(error)) > 400:
            return Fault(f"message of {_place(error)}", str(error)[:500])
    except BaseException as error:  # the point of it all
        return Fault(f"{type(error).__name__} at {_place(error)}", str(error)[:200])
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return None


def _place(error: BaseException) -> str:
    """Return the line of ours that an exception came through; of a deep recursion, where it went in."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/cudatool/" in f.filename]
    at = frames[0 if isinstance(error, RecursionError) else -1] if frames else None
    return f"{'/'.join(Path(at.filename).parts[-2:])}:{at.lineno} ({at.name})" if at else "?"


def fuzz(
    seeds: range, texts: Sequence[str], *, until: float = float("inf")
) -> tuple[int, dict[str, tuple[int, Fault]]]:
    """Return how many cases ran before the clock says `until`, and the faults, each with the first seed of it."""
    found: dict[str, tuple[int, Fault]] = {}
    for ran, seed in enumerate(seeds):
        if time.monotonic() > until:
            return ran, found
        fault = fault_of(case(seed, texts))
        if fault is not None:
            found.setdefault(fault.what, (seed, fault))
    return len(seeds), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:1000", help="first:last, default 0:1000")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--show", type=int, metavar="SEED", help="print the text of a seed and stop")
    arguments = parser.parse_args()
    texts = bases()
    if arguments.show is not None:
        print(case(arguments.show, texts))
        return
    first, last = map(int, arguments.seeds.split(":"))
    ran, found = fuzz(range(first, last), texts, until=time.monotonic() + arguments.seconds)
    for seed, fault in found.values():
        print(f"seed {seed}: {fault.what}\n    {fault.detail}")
    print(f"{len(texts)} texts, {ran} cases, {len(found)} faults")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
