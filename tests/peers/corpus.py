"""Translate every kernel of a corpus of PTX files; say which share the software device can run, and what it lacks.

    python tests/peers/corpus.py DIRECTORY... [--compile-every N] [--json FILE] [--markdown]

Each ``*.ptx`` file below the directories is parsed, each kernel in it is translated to LLVM IR, and LLVM checks the
result; every N-th kernel is compiled to native code as well (0: none). A kernel whose PTX occurs in several files
counts once, source positions aside. Nothing is run: ``corpus_run.py`` does that.

A file is read in a process of its own, so that one that crashes or hangs is one failure. Exit code: 0, whatever the
share; 2 if there are no PTX files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import llvmlite.binding as llvm

from cudatool.ptx import Function, PtxError, parse
from cudatool.sim.jit import JitKernel, JitModule, Source, UnsupportedInstruction

__all__ = ["Translation", "main", "translate"]

_TIMEOUT_S = 120
_IDENTIFIER = re.compile(r"(?<![\w.])[\w$%]*[%$_][\w$%]*")


@dataclass(frozen=True, slots=True)
class Translation:
    """What became of one kernel.

    Attributes
    ----------
    digest
        Of its PTX without source positions: equal kernels have equal digests.
    cause
        Why it does not translate, the same for all kernels that fail alike; empty if it does.
    message
        The error.
    """

    file: str
    kernel: str
    digest: str
    cause: str = ""
    message: str = ""


def _digest(function: Function) -> str:
    return hashlib.sha256(re.sub(r"(?m)^\s*\.loc\b.*$", "", function.text).encode()).hexdigest()


def _cause(error: Exception) -> str:
    """Return what failed without the names that differ from kernel to kernel."""
    if isinstance(error, UnsupportedInstruction):
        return _IDENTIFIER.sub("...", error.instruction)
    if isinstance(error, PtxError):
        return _IDENTIFIER.sub("...", str(error.args[0])).partition(" (PTX line")[0]
    return f"{type(error).__name__} in the translator"


def translate(kernel: JitKernel, *, compiled: bool = False) -> None:
    """Translate one kernel and let LLVM check the result; compile it if asked. Raises what goes wrong."""
    module = llvm.parse_assembly(kernel.llvm_ir())
    module.verify()
    if compiled:
        kernel.prepare()


def _file(path: Path, compile_every: int) -> Iterator[Translation]:
    text = path.read_bytes()
    try:
        module = parse(text)
    except PtxError as error:
        for name in re.findall(rb"\.entry\s+([\w$]+)", text):
            kernel = name.decode()
            yield Translation(str(path), kernel, f"{path}:{kernel}", f"not parsed: {_cause(error)}", str(error))
        return
    for index, (name, kernel) in enumerate(JitModule(Source(text, None, parsed=module)).kernels.items()):
        digest = _digest(module.functions[name])
        try:
            translate(kernel, compiled=compile_every > 0 and index % compile_every == 0)
        except Exception as error:  # whatever it is, it is a failure to count
            yield Translation(str(path), name, digest, _cause(error), str(error)[:500])
        else:
            yield Translation(str(path), name, digest)


def _send(path: Path, compile_every: int, pipe: Connection) -> None:
    pipe.send(list(_file(path, compile_every)))


def _isolated(path: Path, compile_every: int) -> list[Translation]:
    """Translate a file's kernels in a child process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(path, compile_every, theirs))
    child.start()
    theirs.close()
    try:
        if ours.poll(_TIMEOUT_S):
            return list(ours.recv())
        cause = f"translation takes more than {_TIMEOUT_S} s"
    except EOFError:
        cause = "the translator crashes"
    finally:
        child.kill()
        child.join()
    return [Translation(str(path), "*", str(path), cause, cause)]


def _table(failed: list[Translation], markdown: bool) -> Iterator[str]:
    by_cause: dict[str, list[Translation]] = defaultdict(list)
    for one in failed:
        by_cause[one.cause].append(one)
    if markdown:
        yield "| kernels | what is missing | for example |\n|---|---|---|"
    for cause, ones in sorted(by_cause.items(), key=lambda item: (-len(item[1]), item[0])):
        example = f"{Path(ones[0].file).stem}: {ones[0].kernel}"
        yield f"| {len(ones)} | `{cause}` | {example} |" if markdown else f"{len(ones):6}  {cause}  ({example})"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--compile-every", type=int, default=0, metavar="N", help="compile every N-th kernel of a file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every kernel's outcome there")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args(arguments)
    files = sorted({path for directory in options.directories for path in directory.rglob("*.ptx")})
    if not files:
        print(f"no PTX files below {', '.join(map(str, options.directories))}", file=sys.stderr)
        return 2
    kernels: dict[str, Translation] = {}
    for path in files:
        for one in _isolated(path, options.compile_every):
            kernels.setdefault(one.digest, one)
    failed = [one for one in kernels.values() if one.cause]
    share = 1 - len(failed) / len(kernels) if kernels else 1.0
    print(f"{len(files)} files, {len(kernels)} different kernels, {len(kernels) - len(failed)} translate: {share:.2%}")
    for line in _table(failed, options.markdown):
        print(line)
    if options.json:
        causes = Counter(one.cause for one in failed)
        content = {
            "schema": "cudatool.corpus/1",
            "files": len(files),
            "kernels": [asdict(one) for one in kernels.values()],
            "share": share,
            "causes": dict(causes.most_common()),
        }
        with tempfile.NamedTemporaryFile("w", dir=options.json.parent, delete=False) as file:
            json.dump(content, file, indent=1)
        Path(file.name).replace(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
