"""Programs of CUDA C++ without nvcc: host and device parts of a source, for a host compiler and for NVRTC."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|//[^\n]*|/\*.*?\*/', re.DOTALL)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*$', re.MULTILINE)
_OTHERS = re.compile(r"#[ \t]*include\b")
_DEVICE = re.compile(r"\b__(?:device|global|constant|managed)__\b")
_LAUNCH = re.compile(r"([A-Za-z_]\w*(?:\s*<[\w\s,:]*>)?)\s*<<\s*<(.*?)>>\s*>\s*\(", re.DOTALL)
_DYNAMIC = re.compile(r"extern\s+__shared__\s+([\w\s]+?)\s+(\w+)\s*\[\s*\]\s*;")
_NAMESPACE = re.compile(r'\s*(?:extern\s*"C"|namespace\s*\w*)\s*\{|\s*\}\s*$')
_CONSTANT = re.compile(r"\s*(?:static\s+)?const\b[^(){]*=[^;]*;\s*$", re.DOTALL)
_TYPE = re.compile(r"\s*(?:template\s*<[^>]*>\s*)?(?:typedef|struct|class|union|enum|using)\b(?!\s+namespace)")
_TEXTURE = re.compile(r"\btexture\s*<\s*(\w+)[^>]*>\s*(\w+)\s*;")
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Parts:
    """A source file, for two compilers.

    Attributes
    ----------
    device
        Kernels, what they call, variables of the device, types and macros.
    host
        The rest, with kernels that pass the addresses of their arguments to ``launch_kernel``. A launch is
        ``launcher(grid, block, ...)(function that calls the kernel)(arguments)``, so that the compiler finds out which
        instance of a template is meant.
    whole
        All of it for a host compiler, kernels as they are.
    kernels
        Their names.
    """

    device: str
    host: str
    whole: str
    kernels: tuple[str, ...]


def split(path: Path, folders: tuple[Path, ...] = ()) -> Parts:
    """Return the parts of a file and of what it includes by name, found beside it or in `folders`."""
    everything = _with_includes(path, (path.parent, *folders), set())
    everything = _TEXTURE.sub(r"__constant__ TextureReference<\1> \2;", everything)
    host: list[str] = []
    kernels: list[str] = []
    device: dict[int, str] = {}  # by place
    types: dict[int, str] = {}
    for place, item in enumerate(_items(everything)):
        if item.lstrip().startswith("#"):
            host.append(item)
            if not _OTHERS.match(item.lstrip()):
                device[place] = item
            continue
        head = item.partition("{")[0]
        is_function = _is_function(item)
        if _TYPE.match(item):
            if "__device__" not in item or "__host__" in item:
                host.append(item)  # methods for the device call what the host does not have
            if "std::" not in item:
                types[place] = item
        elif _DEVICE.search(head):
            device[place] = item
            if "__global__" in head and is_function:
                name, parameters = _signature(head)
                kernels.append(name)
                pointers = "".join(f"(void *)&{parameter}, " for parameter in parameters)
                body = f"{{ void *arguments[] = {{{pointers}nullptr}}; launch_kernel(arguments); }}\n"
                host.append(re.sub(r"\b(static|inline)\b", "", head) + body)
            elif not is_function or "__host__" in head:
                host.append(re.sub(r"\bstatic\b", "", item))
        else:
            host.append(item)
            if _CONSTANT.match(item):  # for NVRTC a variable of the device, which nothing computed can initialize
                device[place] = re.sub(r"\bconst\b", "constexpr", item, count=1)
            elif "__shared__" in head or _NAMESPACE.match(item):
                device[place] = item
    _add_types_in_use(device, types)
    text = "".join(host)
    whole = _DYNAMIC.sub(r"\1 *\2 = (\1 *)dynamic_shared;", everything)
    of_device = "".join(text for _, text in sorted(device.items()))
    host_code, host_twin = (_launched(_without_bounds(code)) for code in (text, whole))
    return Parts(of_device, host_code, host_twin, tuple(kernels))


def _without_bounds(text: str) -> str:
    """Return kernels without ``__launch_bounds__(...)``, which may name types of the device."""
    first, *others = text.split("__launch_bounds__")
    for other in others:
        at = other.index("(") + 1
        depth = 1
        while depth:
            depth += (other[at] == "(") - (other[at] == ")")
            at += 1
        first += other[at:]
    return first


def _signature(head: str) -> tuple[str, list[str]]:
    """Return the name of a function, and those of its parameters."""
    end = head.rindex(")")
    begin, depth = end, 1
    while depth:
        begin -= 1
        depth += (head[begin] == ")") - (head[begin] == "(")
    parts, depth = [""], 0
    for char in head[begin + 1 : end]:
        depth += (char in "<([") - (char in ">)]")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    names = [_WORD.findall(part.partition("=")[0].partition("[")[0])[-1] for part in parts if part.strip()]
    return _WORD.findall(head[:begin])[-1], [name for name in names if name != "void"]


def instances(symbols: str, kernels: Sequence[str]) -> list[str]:
    """Return the instances of kernel templates among what ``nm -C`` prints of an object of the host."""
    found: dict[str, None] = {}
    for line in symbols.splitlines():
        text, words, depth = line[19:], [""], 0  # after the address and the type
        for char in text:
            depth += (char == "<") - (char == ">")
            if not depth and char == "(":
                break
            if not depth and char == " ":
                words.append("")
            else:
                words[-1] += char
        name, is_template, _ = words[-1].partition("<")
        if is_template and name.rpartition("::")[2] in kernels:
            found[words[-1]] = None
    return list(found)


def _add_types_in_use(device: dict[int, str], types: dict[int, str]) -> None:
    """Add the types whose names are in what the device has."""
    words = set(_WORD.findall(" ".join(device.values())))
    while found := {place for place, text in types.items() if words & _names(text)}:
        for place in found:
            device[place] = types.pop(place)
            words |= set(_WORD.findall(device[place]))


def _names(item: str) -> set[str]:
    """Return what a definition of a type names: the type, its aliases and an enumeration's values."""
    if re.match(r"\s*(?:typedef\s+)?enum\b", item):
        return set(_WORD.findall(item)) - {"typedef", "enum"}
    named = re.search(r"\b(?:struct|class|union|using)\s+(\w+)", item.partition("{")[0])
    aliases = re.findall(r"(\w+)\s*(?:\[[^]]*\]\s*)*;\s*$", item) if "typedef" in item else []
    return {*aliases, *([named[1]] if named else [])}


def _launched(text: str) -> str:
    return _LAUNCH.sub(r"launcher(\2)([&](auto... all) { \1(all...); })(", text)


def _with_includes(path: Path, folders: tuple[Path, ...], seen: set[Path]) -> str:
    """Return a file's text without comments, with the files that it includes by name, each once."""
    seen.add(path.resolve())
    text = _COMMENT.sub(lambda found: found[1] or " " + "\n" * found[0].count("\n"), path.read_text(errors="replace"))

    def include(found: re.Match[str]) -> str:
        for folder in (path.parent, *folders):
            inner = folder / found[1]
            if inner.is_file():
                return "" if inner.resolve() in seen else _with_includes(inner, folders, seen)
        return found[0]

    return _INCLUDE.sub(include, text.replace("\r\n", "\n").replace("\\\n", " "))


def _items(text: str) -> Iterator[str]:
    """Yield directives, and declarations and definitions at the outermost level. What opens a namespace is one."""
    start = at = depth = 0
    opened = re.compile(r'\s*(?:extern\s*"C"|namespace\s*\w*)\s*\{')
    while at < len(text):
        if depth == 0 and not text[start:at].strip():
            line = re.compile(r"\s*#[^\n]*\n?|\s*\}").match(text, start) or opened.match(text, start)
            if line:
                yield line[0]
                start = at = line.end()
                continue
        char = text[at]
        if char in "\"'":
            at = _after_string(text, at)
            continue
        if char == "#" and not text[text.rfind("\n", 0, at) + 1 : at].strip():
            at = text.find("\n", at) if "\n" in text[at:] else len(text)  # a directive within a definition
            continue
        depth += (char in "{(") - (char in "})")
        at += 1
        if depth == 0 and (char == ";" or (char == "}" and _is_function(text[start:at]))):
            yield text[start:at]
            start = at
    if text[start:].strip():
        yield text[start:]


def _is_function(item: str) -> bool:
    head = item.partition("{")[0]
    return "{" in item and ")" in head and "=" not in head.rpartition(")")[2] and not _TYPE.match(head)


def _after_string(text: str, at: int) -> int:
    found = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'').match(text, at)
    return found.end() if found else at + 1
