"""``cudatool ptx``: what kernels consist of and which memory they may access."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from cudatool.ptx import FieldAccess, KernelAccesses, KernelSummary, Mode

__all__ = ["ptx"]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--kernel", metavar="NAME", help="Only this kernel; of a template, the instance: 'scale<float>'.")
@click.option("--json", "as_json", is_flag=True, help='Print JSON ("schema": "cudatool.ptx/1").')
@click.option("--arch", default="sm_90", show_default=True, metavar="ARCH", help="Compile CUDA C++ for it.")
@click.option("-I", "include", multiple=True, metavar="DIR", help="Search headers there, too.")
@click.option("-D", "define", multiple=True, metavar="MACRO", help="Define NAME or NAME=VALUE.")
def ptx(
    file: Path, kernel: str | None, as_json: bool, arch: str, include: tuple[str, ...], define: tuple[str, ...]
) -> None:
    """Show what the kernels of a file do: PTX, or CUDA C++ that NVRTC compiles.

    For each kernel: which memory its parameters lead to and whether it is read, written or updated atomically, as far
    as the PTX tells; instructions, registers, memory, and the features of a device that it uses. No device is needed.
    """
    from cudatool.collect.kernel_names import kernel_name
    from cudatool.errors import UsageError
    from cudatool.ptx import infer_accesses, parse, summarize

    text = _ptx_of(file, kernel, arch, include, define)
    module = parse(text)
    names = [name for name, function in module.kernels.items() if function.has_body]
    if kernel is not None:
        names = [name for name in names if kernel in (name, kernel_name(name))]
        if not names:
            raise UsageError(f"{file} has no kernel {kernel!r}; without --kernel all are shown")
    found = [(infer_accesses(module, name), summarize(module, name)) for name in names]
    refusals = _refusals(text, names)
    results = [(accesses, summary, refusals[accesses.kernel]) for accesses, summary in found]
    if as_json:
        head = {"schema": "cudatool.ptx/1", "file": str(file), "target": module.target}
        click.echo(json.dumps({**head, "kernels": [_as_json(*result) for result in results]}, indent=2))
        return
    if not names:
        click.echo(f"{file} has no kernels; templates are compiled for an instance: --kernel 'scale<float>'", err=True)
    for result in results:
        _print(*result)


def _ptx_of(file: Path, kernel: str | None, arch: str, include: tuple[str, ...], define: tuple[str, ...]) -> bytes:
    """Return the PTX in a file, compiled if it is CUDA C++."""
    from cudatool._nvrtc import to_ptx
    from cudatool.errors import CompileError, UsageError

    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    if file.suffix == ".ptx":
        return content
    if file.suffix not in (".cu", ".cuh", ".cpp", ".cc"):
        raise UsageError(f"{file}: neither PTX (.ptx) nor CUDA C++ (.cu)")
    expressions = [kernel] if kernel and "<" in kernel else []
    here = (*include, str(file.parent))
    source = content.decode("utf-8", "replace")
    try:
        return to_ptx(source, str(file), architecture=arch, include=here, define=define, expressions=expressions)
    except CompileError as error:
        # The first message; NVRTC's log has all of them, with the lines they are about.
        first = next((line for line in error.log.splitlines() if "error" in line), error.args[0])
        raise UsageError(
            f"{first.strip()} (NVRTC compiles device code; of a program with host code: nvcc -ptx)"
        ) from None


def _refusals(text: bytes, names: list[str]) -> dict[str, str]:
    """Return for each kernel why the software device does not run it, empty if it does."""
    from cudatool.ptx import PtxError
    from cudatool.sim import jit

    kernels = jit.load(text).kernels
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


def _letters(mode: Mode) -> str:
    from cudatool.ptx import Mode

    return "".join(letter for letter, one in (("r", Mode.READ), ("w", Mode.WRITE), ("a", Mode.ATOMIC)) if mode & one)


def _widths(field: FieldAccess) -> str:
    parts = (("read", field.read_widths), ("write", field.write_widths), ("atomic", field.atomic_widths))
    return ", ".join(f"{word} {'/'.join(str(w or '?') for w in widths)}" for word, widths in parts if widths)


def _types(accesses: KernelAccesses) -> list[str]:
    """Return the type of each parameter as C++ has it where the kernel's name tells, else as PTX has it."""
    from cudatool.collect.kernel_names import kernel_parameters

    types = kernel_parameters(accesses.kernel)
    if len(types) == len(accesses.parameters):
        return types
    return [one.type if one.size <= 8 else f"{one.type}[{one.size}]" for one in accesses.parameters]


def _as_json(accesses: KernelAccesses, summary: KernelSummary, refusal: str) -> dict[str, Any]:
    from cudatool.collect.kernel_names import kernel_name

    return {
        "kernel": accesses.kernel,
        "name": kernel_name(accesses.kernel),
        "parameters": [
            {
                "name": parameter.name,
                "offset": parameter.offset,
                "size": parameter.size,
                "type": kind,
                "fields": [
                    {
                        "offset": field.offset,
                        "access": _letters(field.mode),
                        "loaded_access": _letters(field.loaded_mode),
                        "read_widths": field.read_widths,
                        "write_widths": field.write_widths,
                        "atomic_widths": field.atomic_widths,
                        "escapes": field.escapes,
                    }
                    for field in parameter.fields
                ],
            }
            for parameter, kind in zip(accesses.parameters, _types(accesses), strict=True)
        ],
        "variables": [
            {"name": one.name, "access": _letters(one.mode), "loaded_access": _letters(one.loaded_mode)}
            for one in accesses.variables
        ],
        "doubts": sorted(accesses.doubts),
        "instructions": summary.instructions,
        "opcodes": summary.opcodes,
        "registers": summary.registers,
        "shared_bytes": summary.shared_bytes,
        "local_bytes": summary.local_bytes,
        "constant_bytes": summary.constant_bytes,
        "max_threads": summary.max_threads,
        "features": summary.features,
        "calls": summary.calls,
        "external_calls": summary.external_calls,
        "software_device": {"runs": not refusal, "reason": refusal},
    }


def _print(accesses: KernelAccesses, summary: KernelSummary, refusal: str) -> None:
    from rich.console import Console

    from cudatool.cli._text import new_table, plain
    from cudatool.collect.kernel_names import kernel_name

    console = Console(highlight=False)
    console.print(plain(kernel_name(accesses.kernel)), style="bold")
    table = new_table("", "Parameter", "Type", "Access", "Bytes of one access", "Through its pointers")
    for parameter, kind in zip(accesses.parameters, _types(accesses), strict=True):
        short = parameter.name.removeprefix(f"{accesses.kernel}_")
        if not parameter.fields:
            table.add_row(plain(short), plain(kind), "", "", "")
        for field in parameter.fields:
            name = short + (f"+{field.offset}" if parameter.size > 8 else "")
            notes = [_letters(field.loaded_mode), "escapes" if field.escapes else ""]
            table.add_row(plain(name), plain(kind), _letters(field.mode), _widths(field), " ".join(filter(None, notes)))
    console.print(table)
    memory = f"{summary.shared_bytes} shared, {summary.local_bytes} local, {summary.constant_bytes} constant"
    variables = [f"{one.name} {_letters(one.mode)}".rstrip() for one in accesses.variables]
    doubts = ", ".join(sorted(accesses.doubts))
    for title, text in (
        (f"{sum(summary.instructions.values())} instructions", _counts(summary.instructions)),
        ("registers", _counts(summary.registers)),
        ("bytes", memory),
        ("features", ", ".join(summary.features)),
        ("calls", ", ".join((*summary.calls, *summary.external_calls))),
        ("variables", ", ".join(variables)),
        ("may touch more", doubts),
        ("software device", refusal or "runs it"),
    ):
        if text:
            console.print(f"  {title + ':':<18} {plain(text)}", soft_wrap=True)
    console.print()


def _counts(counts: dict[Any, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
