"""Options that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["BESIDE", "device_option", "html_option", "is_page", "workload_arguments"]

BESIDE = "\0beside"  # --html without a value: no file can have this name
_F = TypeVar("_F", bound=Callable[..., Any])

device_option = click.option(
    "--device",
    metavar="DEVICE",
    help="auto, cuda, or sim with options, for example sim:memory=8GiB,count=2,seed=7,schedule=lifo. "
    "Default: $CUDATOOL_DEVICE, else auto: a GPU where one answers, else sim.",
)


def html_option(beside: str) -> Callable[[_F], _F]:
    """Add ``--html [FILE]`` to a command; without FILE its value is `BESIDE`.

    Of ``--html WORD``, the word may have been meant for an argument: :func:`is_page` tells.
    """
    return click.option(
        "--html",
        is_flag=False,
        flag_value=BESIDE,
        metavar="[FILE]",
        help=f"Write a page that needs no network. Default: beside {beside}, with the ending .html.",
    )


def is_page(name: str) -> bool:
    """Return whether `name` names a page."""
    return name == BESIDE or name.lower().endswith((".html", ".htm"))


def workload_arguments(function: _F) -> _F:
    """Add ``(WORKLOAD.py | -m MODULE | -c CODE) [ARGS]...`` to a command; its own options must stand before.

    The command gets `workload`: the words as they would stand after ``python``.
    """

    # -m and -c are flags to click, so that what follows ends our options: the rest is the program's own.
    @click.option("-m", "module", is_flag=True, help="WORKLOAD is a module, as for `python -m`.")
    @click.option("-c", "code", is_flag=True, help="WORKLOAD is code, as for `python -c`.")
    @click.argument("workload", nargs=-1, type=click.UNPROCESSED)
    @functools.wraps(function)
    def command(*args: Any, module: bool, code: bool, workload: tuple[str, ...], **kwargs: Any) -> Any:
        if module and code:
            raise click.UsageError("-m and -c do not go together")
        before = ("-m",) if module else ("-c",) if code else ()
        return function(*args, workload=before + workload, **kwargs)

    return command  # type: ignore[return-value]  # it takes the place of the function for click only
