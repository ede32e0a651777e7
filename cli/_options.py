"""Options that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cudatool._driver import KINDS, SCHEDULES
from cudatool.cli._command import Files, Listed, option
from cudatool.cli._recording_files import ENDINGS
from cudatool.config import DEVICE
from cudatool.errors import UsageError
from cudatool.units import parse_bytes

__all__ = [
    "BESIDE",
    "device_option",
    "force_option",
    "html_option",
    "is_page",
    "no_children_option",
    "no_stacks_option",
    "page_option",
    "range_options",
    "size_of",
    "source_argument",
    "trace_option",
    "workload_arguments",
]

BESIDE = "\0beside"  # --html without a value: no file can have this name
_F = TypeVar("_F", bound=Callable[..., Any])


def _devices() -> list[str]:
    return [*KINDS, *(f"sim:schedule={name}" for name in SCHEDULES), "sim:memory=8GiB", "sim:count=2"]


device_option = option(
    "--device",
    envvar=DEVICE.name,
    setting="device",
    type=Listed(_devices),
    metavar="DEVICE",
    group="Device",
    help=f"auto, cuda, or sim with options, such as sim:memory=8GiB,count=2. Default: ${DEVICE.name}, else auto: a "
    "GPU where one answers, else sim.",
)

trace_option = option(
    "-o",
    "--output",
    type=Files(".ctrace"),
    metavar="FILE",
    group="Output",
    help="The trace. Default: NAME.PID.ctrace in this directory.",
)
no_stacks_option = option("--no-stacks", is_flag=True, group="Recording", help="Do not record Python stacks.")


def html_option(beside: str) -> Callable[[_F], _F]:
    """Add ``--html [FILE]`` and ``--open`` to a command; without FILE the value of ``--html`` is `BESIDE`.

    In ``--html WORD``, the word may be meant as an argument: :func:`is_page` decides. The command gets `opens`
    for ``--open``, which implies ``--html``.
    """

    def decorate(function: _F) -> _F:
        @option(
            "--html",
            is_flag=False,
            flag_value=BESIDE,
            type=Files(".html", ".htm"),
            metavar="[FILE]",
            group="Output",
            help=f"Write a page that needs no network. Default: next to {beside}, with the ending .html.",
        )
        @option("--open", "opens", is_flag=True, group="Output", help="Write the page and open it in a browser.")
        @functools.wraps(function)
        def command(*args: Any, html: str | None, opens: bool, **kwargs: Any) -> Any:
            return function(*args, html=html or (BESIDE if opens else None), opens=opens, **kwargs)

        return command  # type: ignore[return-value]  # it takes the place of the function for click only

    return decorate


def page_option(help: str) -> Callable[[_F], _F]:
    """Add ``--html FILE`` and ``--open`` to a command, which gets `html` and `opens`."""

    def decorate(function: _F) -> _F:
        @option("--html", type=Files(".html", ".htm"), metavar="FILE", group="Output", help=help)
        @option("--open", "opens", is_flag=True, group="Output", help="Open that page in a browser.")
        @functools.wraps(function)
        def command(*args: Any, html: str | None, opens: bool, **kwargs: Any) -> Any:
            if opens and not html:
                raise click.UsageError("--open needs --html FILE")
            return function(*args, html=html, opens=opens, **kwargs)

        return command  # type: ignore[return-value]  # it takes the place of the function for click only

    return decorate


force_option = option("-f", "--force", is_flag=True, group="Output", help="Overwrite files that exist.")

no_children_option = option(
    "--no-children",
    is_flag=True,
    group="Recording",
    help="Record only the program's own process. Otherwise each Python process that it starts and that uses a device "
    "gets its own trace.",
)


def range_options(function: _F) -> _F:
    """Add ``--events A:B`` and ``--time A:B``: the command gets `events` and `time`, for ``_part.part_of``."""

    @option(
        "--events",
        metavar="A:B",
        group="Range",
        help="Only the events from number A to before number B, with what was there when they began.",
    )
    @option(
        "--time",
        metavar="A:B",
        group="Range",
        help="Only from time A to time B after the first event, with units, such as 1.5s:2s.",
    )
    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return command  # type: ignore[return-value]  # it takes the place of the function for click only


def is_page(name: str) -> bool:
    """Return whether `name` names a page."""
    return name == BESIDE or name.lower().endswith((".html", ".htm"))


def source_argument(name: str = "source", *, required: bool = False) -> Callable[[_F], _F]:
    """Add an argument that is a file to read: a trace, a snapshot or a log."""
    return click.argument(name, required=required, type=Files(*ENDINGS, path_type=Path))


def workload_arguments(*endings: str) -> Callable[[_F], _F]:
    """Add ``(WORKLOAD.py | -m MODULE | -c CODE) [ARGS]...`` to a command; its own options must come before.

    The command gets `workload`: the words as they would follow ``python``. Completion offers files with `endings`.
    """

    def decorate(function: _F) -> _F:
        # -m and -c are flags to click, so that what follows ends our options: the rest is the program's own.
        @option("-m", "module", is_flag=True, group="Program", help="WORKLOAD is a module, as for `python -m`.")
        @option("-c", "code", is_flag=True, group="Program", help="WORKLOAD is code, as for `python -c`.")
        @click.argument("workload", nargs=-1, type=Files(*endings), metavar="WORKLOAD [ARGS]...")
        @functools.wraps(function)
        def command(*args: Any, module: bool, code: bool, workload: tuple[str, ...], **kwargs: Any) -> Any:
            if module and code:
                raise click.UsageError("-m and -c do not go together")
            before = ("-m",) if module else ("-c",) if code else ()
            return function(*args, workload=before + workload, **kwargs)

        return command  # type: ignore[return-value]  # it takes the place of the function for click only

    return decorate


def size_of(text: str | None, name: str) -> int | None:
    """Return the bytes that the option `name` was given, None if it was not.

    Raises
    ------
    UsageError
        It is a number without a unit, as a device's memory is not given in bytes; or it is nothing.
    ConfigError
        It is not a size.
    """

    if text is None:
        return None
    size = parse_bytes(text)
    if not text.strip()[-1:].isalpha():
        raise UsageError(f"{name} {text}: say in which unit, for example {name} {text}GiB")
    if not size:
        raise UsageError(f"{name} {text}: a device has more memory than that")
    return size
