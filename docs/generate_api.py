"""Write docs/api.md from the public modules: signature and first paragraph of everything a program may use.

python docs/generate_api.py          (or: make docs)
"""

from __future__ import annotations

import enum
import inspect
import re
import types
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from cudatool.runtime.public_modules import PUBLIC_MODULES

PAGE: Final = Path(__file__).with_name("api.md")

_AT_USE: Final = {
    # values that a look at starts the driver for
    "cudatool.LaunchConfig": "cuda.core's class, as it is there: grid, block and shared memory of a launch.",
    "cudatool.ProgramOptions": "cuda.core's class, as it is there: options of a compilation.",
    "cudatool.random.default_generators": "The generator of each device, which functions use when given none: a tuple.",
}
_CLASS: Final = re.compile(r"<class '(?:[\w.]*\.)?(\w+)'>")  # as a default: a dtype
_ROLE: Final = re.compile(r":\w+:`~?([^`<]*?)(?:\s*<[^`]*>)?`")  # :func:`cudatool.mm`


def page() -> str:
    """Return docs/api.md."""
    lines = [
        "# What cudatool offers to programs",
        "",
        "Written by `docs/generate_api.py` from the docstrings, which also say units, shapes and errors. Functions are",
        "in traces under these names. What stands for which part of `torch.cuda`: [torch-cuda.md](torch-cuda.md).",
        "",
        "Modules: " + ", ".join(f"[{name}](#{name.replace('.', '')})" for name in PUBLIC_MODULES),
    ]
    for name in PUBLIC_MODULES:
        module = import_module(name)
        lines += ["", f"## {name}", "", summary(module)]
        for member, value in sorted(members(module), key=lambda found: found[0].casefold()):
            lines += ["", *entry(f"{name}.{member}", value)]
    return "\n".join(lines) + "\n"


def members(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield name and value of what a module exports, except other modules; starts no device."""
    for name in module.__all__:
        text = _AT_USE.get(f"{module.__name__}.{name}")
        value = getattr(module, name) if text is None else Described(text)
        if not isinstance(value, types.ModuleType):
            yield name, value


class Described:
    """What a value is, in the place of one that is not made to write about it."""

    def __init__(self, text: str) -> None:
        self.__doc__ = text


def entry(name: str, value: Any) -> list[str]:
    """Return the lines about one function, class or value."""
    if inspect.isclass(value) and not value.__module__.startswith("cudatool"):
        return [f"### {name}", "", f"`{value.__module__}.{value.__qualname__}`, as it is there."]
    if inspect.isclass(value):
        made = signature(value) if is_made_by_ours(value) else ""
        return [f"### {name}", "", f"`class {shortened(name)}{made}`", "", summary(value), *methods(value)]
    if callable(value):
        return [f"### {name}", "", f"`{shortened(name)}{signature(value)}`", "", summary(value)]
    return [f"### {name}", "", summary(value)]


def is_made_by_ours(class_: type) -> bool:
    """Return whether the parameters of a class are its own, or those of another of our classes."""
    maker = next(base for base in class_.__mro__ if {"__init__", "__new__"} & vars(base).keys())
    return maker.__module__.startswith("cudatool") and not issubclass(class_, enum.Enum)


def methods(class_: type) -> list[str]:
    """Return the lines about a class's own public methods and properties, and which classes it has others from."""
    ours = [base for base in class_.__bases__ if base.__module__.startswith("cudatool")]
    bases = [base.__name__ for base in ours if any(not name.startswith("_") for name in dir(base))]
    lines = [f"All of {' and '.join(f'`{base}`' for base in bases)}; and:"] if bases else []
    count = len(lines)
    for name in sorted(vars(class_)):
        value = getattr(class_, name)
        text = inspect.getdoc(value)
        if (
            name.startswith("_")
            or not text
            or text.startswith("Alias for field")  # of a named tuple
            or any(text == inspect.getdoc(getattr(b, name, None)) for b in class_.__bases__)
        ):
            continue
        if callable(value):
            lines.append(f"- `{name}{signature(value)}`: {summary(value)}")
        elif inspect.isdatadescriptor(value):
            lines.append(f"- `{name}`: {summary(value)}")
    if issubclass(class_, enum.Enum):
        lines += [f"- `{member.name}`: {member.value}" for member in class_]
    return ["", *lines] if len(lines) > count else []


def shortened(name: str) -> str:
    return name.rpartition(".")[2]


def signature(value: Any) -> str:
    """Return the parameters with their defaults, and what is returned; no other annotations, which repeat the text."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = []
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls") or parameter.name.startswith("_"):
            continue
        parameters.append(parameter.replace(annotation=parameter.empty))
    text = re.sub(_CLASS, r"\1", str(found.replace(parameters=parameters, return_annotation=found.empty)))
    returned = found.return_annotation
    if returned is found.empty or inspect.isclass(value):
        return text
    return f"{text} -> {returned if isinstance(returned, str) else inspect.formatannotation(returned)}"


def summary(value: Any) -> str:
    """Return the first paragraph of a docstring on one line, without links."""
    text = repr(value) if isinstance(value, int | str | tuple | frozenset) else inspect.getdoc(value) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return _ROLE.sub(lambda role: f"`{role[1]}`", paragraph).replace("``", "`").removesuffix("::").rstrip()


if __name__ == "__main__":
    PAGE.write_text(page())
