"""How ``cudatool ptx`` shows a kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cudatool.cli._text import new_table, plain, print_rows, results
from cudatool.collect.kernel_sources import parameter_names
from cudatool.ptx import FieldAccess, KernelAccesses, KernelSummary, Mode
from cudatool.ptx.kernel_names import kernel_name, kernel_parameters
from cudatool.text import short_arguments, short_names
from cudatool.units import counted

__all__ = ["headings", "kernel_json", "print_kernel"]


def _letters(mode: Mode) -> str:
    return "".join(letter for letter, one in (("r", Mode.READ), ("w", Mode.WRITE), ("a", Mode.ATOMIC)) if mode & one)


def _widths(field: FieldAccess) -> str:
    parts = (("read", field.read_widths), ("write", field.write_widths), ("atomic", field.atomic_widths))
    return ", ".join(f"{word} {'/'.join(str(w or '?') for w in widths)}" for word, widths in parts if widths)


def _types(accesses: KernelAccesses) -> list[str]:
    """Return the type of each parameter: its C++ type if the kernel's name shows it, else its PTX type."""
    types = kernel_parameters(accesses.kernel)
    if len(types) == len(accesses.parameters):
        return types
    return [one.type if one.size <= 8 else f"{one.type}[{one.size}]" for one in accesses.parameters]


def _names(accesses: KernelAccesses, source: str) -> list[str]:
    """Return the name of each parameter in the CUDA C++ `source`, "" if the source does not show it."""
    count = len(accesses.parameters)
    return parameter_names(source, kernel_name(accesses.kernel), count) or [""] * count


def kernel_json(accesses: KernelAccesses, summary: KernelSummary, refusal: str, source: str) -> dict[str, Any]:
    """Return what :func:`print_kernel` prints, for ``json.dumps``."""
    return {
        "kernel": accesses.kernel,
        "target": summary.target,
        "name": kernel_name(accesses.kernel),
        "parameters": [
            {
                "name": parameter.name,
                "source_name": name or None,
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
            for parameter, kind, name in zip(
                accesses.parameters, _types(accesses), _names(accesses, source), strict=True
            )
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


def headings(symbols: Sequence[str]) -> list[str]:
    """Return distinct headings for kernels: overloads get the types of their parameters."""
    names = [kernel_name(symbol) for symbol in symbols]
    short, same = short_names(names), Counter(names)
    return [
        f"{name}({', '.join(map(short_arguments, kernel_parameters(symbol)))})" if same[full] > 1 else name
        for symbol, full, name in zip(symbols, names, short, strict=True)
    ]


def print_kernel(heading: str, accesses: KernelAccesses, summary: KernelSummary, refusal: str, source: str) -> None:
    """Print what a kernel does.

    Parameters
    ----------
    heading
        Its name, of :func:`headings`.
    refusal
        Why the software device cannot run it, empty if it can.
    source
        The CUDA C++ that it was compiled from, empty if there is none.
    """
    from rich.table import Table

    console = results()
    console.print(plain(heading), style="bold")
    table = new_table("Parameter", "Type", "Access", "Bytes of one access", "Through its pointers")
    names = _names(accesses, source)
    types = map(short_arguments, _types(accesses))
    for parameter, kind, named in zip(accesses.parameters, types, names, strict=True):
        short = named or parameter.name.removeprefix(f"{accesses.kernel}_")
        if not parameter.fields:
            table.add_row(plain(short), plain(kind), "", "", "")
        for field in parameter.fields:
            name = short + (f"+{field.offset}" if parameter.size > 8 else "")
            notes = [_letters(field.loaded_mode), "escapes" if field.escapes else ""]
            table.add_row(plain(name), plain(kind), _letters(field.mode), _widths(field), " ".join(filter(None, notes)))
    print_rows(console, table)
    memory = f"{summary.shared_bytes} shared, {summary.local_bytes} local, {summary.constant_bytes} constant"
    variables = [f"{one.name} {_letters(one.mode)}".rstrip() for one in accesses.variables]
    doubts = ", ".join(sorted(accesses.doubts))
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for title, text in (
        (counted(sum(summary.instructions.values()), "instruction"), _counts(summary.instructions)),
        ("registers", _counts(summary.registers)),
        ("bytes", memory),
        ("features", ", ".join(summary.features)),
        ("calls", ", ".join((*summary.calls, *summary.external_calls))),
        ("variables", ", ".join(variables)),
        ("may touch more", doubts),
        ("software device", refusal or "runs it"),
    ):
        if text:
            facts.add_row(f"  {title}:", plain(text))
    console.print(facts)
    console.print()


def _counts(counts: dict[Any, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
