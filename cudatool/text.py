"""Text from anywhere, made safe to show: on a terminal, in the log of a CI system, in an error message.

Names come from traces, programs and files of any origin. A terminal obeys escape sequences in them, and the
log of a CI system obeys lines such as ``::error::`` (GitHub) or ``##[error]`` and ``##vso[...]`` (Azure Pipelines).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

__all__ = [
    "QUOTED",
    "first_names",
    "json_text",
    "printable",
    "quoted",
    "short_arguments",
    "short_names",
    "short_paths",
    "shortened",
]

QUOTED: Final = 80  # characters of a text that an error message quotes
_FIRST: Final = 3  # of many names
_ARGUMENTS: Final = 60  # characters that the arguments of a C++ template may have where people read them

# Commands of GitHub's runner, which may stand after blanks at the start of a line; a line may be wrapped anywhere.
_WORDS: Final = (
    *("add-mask", "add-matcher", "add-path", "debug", "echo", "endgroup", "error", "group", "notice"),
    *("remove-matcher", "save-state", "set-env", "set-output", "stop-commands", "warning"),
)
_OF_LOGS: Final = re.compile(rf"(?P<github>::)(?=(?:{'|'.join(_WORDS)})(?:::|\s))|##(?=\w*\[)", re.IGNORECASE)


def printable(text: str) -> str:
    r"""Return `text` on one line, as a terminal and a CI log may show it; escaped as Python's ``repr`` does: ``\x1b``.

    Escaped are control characters, line ends, characters that turn the direction of text, halves of surrogate pairs,
    and what begins a command of a CI system's log.
    """
    if not text.isprintable():
        text = "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
    if "::" in text or "##" in text:
        text = _OF_LOGS.sub(lambda found: r":\x3a" if found["github"] else r"#\x23", text)
    return text


def shortened(text: str, most: int) -> str:
    """Return `text`, or its first characters and three dots if it has more than `most`."""
    return text if len(text) <= most else text[: most - 3] + "..."


def short_paths(paths: Sequence[str], most: int) -> list[str]:
    """Return paths, those of more than `most` characters with three dots for their middle, unless others get the same.

    The end of a path says more than its beginning: it gets two thirds of the room.
    """
    room = max(most - 3, 3)
    begin, end = room // 3, room - room // 3
    short = [path if len(path) <= most else f"{path[:begin]}...{path[-end:]}" for path in paths]
    times = Counter(short)
    return [one if times[one] == 1 else path for one, path in zip(short, paths, strict=True)]


def short_arguments(text: str) -> str:
    """Return `text` with dots for what is deepest inside of long template arguments: ``"scale<Pair<...>, int>"``."""
    kept, start, depth = "", 0, 0
    for index, character in enumerate(text):
        before = text[index - 1 : index]
        if character == "<" and (depth or before.isalnum() or before == "_"):
            if not depth:
                kept, start = kept + text[start:index], index
            depth += 1
        elif character == ">" and depth and before != "-":  # not an arrow
            depth -= 1
            if not depth:
                kept, start = kept + _short_list(text[start : index + 1]), index + 1
    return kept + text[start:]


def _short_list(arguments: str) -> str:
    """Return template arguments, with those that are nested deepest left out until the rest is short enough."""
    found = "<...>"
    for most in range(1, arguments.count("<") + 1):
        text, depth = "", 0
        for index, character in enumerate(arguments):
            depth += character == "<"
            if depth <= most:
                text += character
            elif depth == most + 1 and character == "<":
                text += "<...>"
            depth -= character == ">" and arguments[index - 1] != "-"
        if len(text) > _ARGUMENTS:
            break
        found = text
    return found


def short_names(names: Sequence[str]) -> list[str]:
    """Return each name as :func:`short_arguments` has it, or in full where others would be the same."""
    short = [short_arguments(name) for name in names]
    times = Counter(short)
    return [one if times[one] == 1 else name for one, name in zip(short, names, strict=True)]


def first_names(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first three of `names`, made printable, and how many more there are."""
    shown = printable(separator.join(names[:_FIRST]))
    return shown if len(names) <= _FIRST else f"{shown} and {len(names) - _FIRST} more"


def quoted(value: object) -> str:
    """Return what a message quotes of an input: text in quotation marks, printable, a line's worth of it."""
    if isinstance(value, str):
        return f"'{shortened(printable(value[: QUOTED + 1]), QUOTED)}'"
    if value is None or (isinstance(value, int | float) and abs(value) < 1 << 64):
        return str(value)
    return f"<{type(value).__name__}>"


def json_text(value: Any, *, indent: int | None = 2) -> str:
    """Return `value` as JSON that is safe to show: all that :func:`printable` escapes is written as JSON escapes."""
    text = json.dumps(value, indent=indent, allow_nan=False)  # ASCII only
    return text.replace("\x7f", "\\u007f").replace("##", "\\u0023#")
