"""``cudatool ptx``: what kernels consist of and which memory they may access."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cudatool.cli._command import Files, command, option
from cudatool.cli._ptx_text import headings, kernel_json, print_kernel
from cudatool.cli._text import echo_json, say
from cudatool.errors import CompileError, UsageError
from cudatool.files import open_input, read_input
from cudatool.limits import KERNELS, PTX_BYTES
from cudatool.ptx import PtxError, infer_accesses, is_container, parse, ptx_for, summarize
from cudatool.ptx.kernel_names import kernel_name
from cudatool.runtime.nvrtc import architecture_number, to_ptx
from cudatool.text import quoted

if TYPE_CHECKING:
    from cudatool.ptx import Module

__all__ = ["ptx"]


@command(
    examples=[
        ("Every kernel of a file", "cudatool ptx kernels.cu"),
        ("One instance of a template", "cudatool ptx kernels.cu --kernel 'scale<float>'"),
    ],
)
@click.argument(
    "file", type=Files(".ptx", ".cu", ".cuh", ".cpp", ".cc", ".fatbin", ".cubin", ".so", ".o", path_type=Path)
)
@option("--kernel", metavar="NAME", help="Only this kernel; of a template, the instance: 'scale<float>'.")
@option("--json", "as_json", is_flag=True, help='Print JSON ("schema": "cudatool.ptx/1").')
@option(
    "--arch",
    default="sm_90",
    show_default=True,
    metavar="ARCH",
    help="Compile for it; of several, take the newest PTX up to it.",
)
@option("-I", "include", multiple=True, metavar="DIR", help="Search headers there, too.")
@option("-D", "define", multiple=True, metavar="MACRO", help="Define NAME or NAME=VALUE.")
def ptx(
    file: Path, kernel: str | None, as_json: bool, arch: str, include: tuple[str, ...], define: tuple[str, ...]
) -> None:
    """Show what the kernels of a file do.

    The file is PTX, CUDA C++ that NVRTC compiles, or a program, library, object file or fatbin with PTX in it. For each
    kernel: which memory its parameters lead to and whether it is read, written or updated atomically, where the PTX
    shows it; instructions, registers, memory, and the features of a device that it uses. No device is needed.
    """

    results = []
    texts, source = _texts_of(file, kernel, arch, include, define)
    number = 0
    for text in texts:
        try:
            module = parse(text)
        except PtxError as error:
            raise UsageError(f"{file}: {error}") from error
        names = [name for name, function in module.kernels.items() if function.has_body]
        if kernel is not None:
            names = [name for name in names if kernel in (name, kernel_name(name))]
        number += len(names)
        if number > KERNELS:
            raise UsageError(f"{file} has more than {KERNELS:,} kernels; name one with --kernel")
        found = [(infer_accesses(module, name), summarize(module, name)) for name in names]
        refusals = _refusals(text, module, names)
        results += [(accesses, summary, refusals[accesses.kernel]) for accesses, summary in found]
    if kernel is not None and not results:
        raise UsageError(f"{file} has no kernel {quoted(kernel)}; without --kernel all are shown")
    if as_json:
        head = {"schema": "cudatool.ptx/1", "file": str(file)}
        echo_json({**head, "kernels": [kernel_json(*result, source) for result in results]})
        return
    if not results:
        say(f"{file} has no kernels; templates are compiled for an instance: --kernel 'scale<float>'")
    names = headings([accesses.kernel for accesses, _, _ in results])
    for name, result in zip(names, results, strict=True):
        print_kernel(name, *result, source)


def _texts_of(
    file: Path, kernel: str | None, arch: str, include: tuple[str, ...], define: tuple[str, ...]
) -> tuple[list[bytes], str]:
    """Return the PTX in a file, and the CUDA C++ that it was compiled from, if it was."""

    number = int(architecture_number(arch).rstrip("af"))
    try:
        with open_input(file) as opened:
            if file.suffix != ".ptx" and is_container(opened.read(16)):
                # Mapped: a library may have gigabytes. It is not closed here, since an error may still refer to parts
                # of it.
                texts = ptx_for(memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)), number)
                if not texts:
                    raise UsageError(f"{file} has no PTX for {arch} or older")
                return texts, ""
        content = read_input(file, PTX_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    if file.suffix == ".ptx":
        return [content], ""
    if file.suffix not in (".cu", ".cuh", ".cpp", ".cc"):
        raise UsageError(f"{file}: neither PTX (.ptx), nor CUDA C++ (.cu), nor a file with device code in it")
    expressions = [kernel] if kernel and "<" in kernel else []
    here = (*include, str(file.parent))
    source = content.decode("utf-8", "replace")
    try:
        text = to_ptx(source, str(file), architecture=arch, include=here, define=define, expressions=expressions)
    except CompileError as error:
        # The first message; NVRTC's log has all of them, with their lines.
        first = next((line for line in error.log.splitlines() if re.search(r"\berror\b", line)), error.args[0])
        hint = "NVRTC compiles device code; of a program with host code: nvcc -ptx"
        raise UsageError(f"{first.strip()} ({hint})") from None
    return [text], source


def _refusals(text: bytes, module: Module, names: list[str]) -> dict[str, str]:
    """Return for each kernel why the software device cannot run it, empty if it can."""
    from cudatool.sim import jit  # takes a while to load

    kernels = jit.JitModule(jit.Source(text, None, parsed=module)).kernels
    found = {}
    for name in names:
        try:
            kernels[name].llvm_ir()
            found[name] = ""
        except jit.UnsupportedInstruction as error:
            found[name] = f"no {error.instruction}" + (f" ({error.source})" if error.source else "")
        except PtxError as error:
            found[name] = str(error)
    return found
