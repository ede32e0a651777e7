"""Options that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["BESIDE", "device_option", "html_option", "is_page", "split_workload", "workload_arguments"]

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
    """Add ``(WORKLOAD.py | -m MODULE) [ARGS]...`` to a command; its own options must stand before.

    The command gets `module`, None for a program, and `workload`, the other words.
    """

    # -m is a flag to click, so that the module's name ends our options: what follows is the module's own.
    @click.option("-m", "is_module", is_flag=True, help="WORKLOAD is a module, as for `python -m`.")
    @click.argument("workload", nargs=-1, type=click.UNPROCESSED)
    @functools.wraps(function)
    def command(*args: Any, is_module: bool, workload: tuple[str, ...], **kwargs: Any) -> Any:
        if is_module and not workload:
            raise click.UsageError("name a module to run after -m")
        module, rest = (workload[0], workload[1:]) if is_module else (None, workload)
        return function(*args, module=module, workload=rest, **kwargs)

    return command  # type: ignore[return-value]  # it takes the place of the function for click only


def split_workload(module: str | None, workload: tuple[str, ...]) -> tuple[str, tuple[str, ...], bool]:
    """Return target, arguments and whether it is a module; complain if nothing is to be run."""
    if module is not None:
        return module, workload, True
    if not workload:
        raise click.UsageError("name a Python program to run, or a module with -m")
    return workload[0], workload[1:], False
