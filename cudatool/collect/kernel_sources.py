"""Names of kernels' parameters as their CUDA C++ source spells them; PTX only numbers parameters."""

from __future__ import annotations

import re

__all__ = ["parameter_names"]

_NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_KERNEL = re.compile(r"\b__global__\b")
_CALLED = re.compile(r"(\w+)\s*\(")
_ATTRIBUTES = frozenset(("__launch_bounds__", "__attribute__", "__cluster_dims__", "__maxnreg__", "alignas"))
_INSIDE = re.compile(r"\(\s*[*&]+\s*(?:const\s+)?(\w+)")  # float (&name)[4], void (*name)(int)
_LAST = re.compile(r"[\s*&](\w+)\s*(?:\[[^\]]*\]\s*)*$")
_NO_NAMES = frozenset(
    (
        *("void", "bool", "char", "short", "int", "long", "float", "double", "unsigned", "signed"),
        *("const", "volatile", "__restrict__", "restrict"),
    )
)


def parameter_names(source: str, kernel: str, count: int) -> list[str]:
    """Return the names of a kernel's parameters, "" for one that has none; empty if the source does not show them.

    Parameters
    ----------
    kernel
        As :func:`cudatool.ptx.kernel_names.kernel_name` writes it; namespaces and template arguments do not count.
    count
        How many parameters it has. If overloads with as many parameters name them differently, the source does not show
        the names.
    """
    wanted = kernel.split("<")[0].rsplit("::", 1)[-1]
    text = _NOISE.sub(" ", source)
    found = []
    for start in _KERNEL.finditer(text):
        called = _CALLED.search(text, start.end())
        while called and called[1] in _ATTRIBUTES:
            called = _CALLED.search(text, _closing(text, called.end()))
        if called and called[1] == wanted:
            parameters = _split(text[called.end() : _closing(text, called.end())])
            if len(parameters) == count:
                found.append([_name(one) for one in parameters])
    return found[0] if found and all(one == found[0] for one in found) else []


def _closing(text: str, start: int) -> int:
    """Return the position where the parenthesis opened before `start` is closed."""
    depth = 1
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if not depth:
            return index
    return len(text)


def _split(parameters: str) -> list[str]:
    """Return the parts between the commas that are outside of all brackets."""
    parts, depth = [""], 0
    for character in parameters:
        depth += (character in "(<[{") - (character in ")>]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    parts = [part.strip() for part in parts]
    return [] if parts in ([""], ["void"]) else parts


def _name(parameter: str) -> str:
    declared = parameter.split("=")[0].rstrip()
    found = _INSIDE.search(declared) or _LAST.search(declared)
    return found[1] if found and found[1] not in _NO_NAMES else ""
