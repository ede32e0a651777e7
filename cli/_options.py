"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["device_option", "split_workload", "workload_arguments"]

_F = TypeVar("_F", bound=Callable[..., Any])

device_option = click.option(
    "--device",
    metavar="DEVICE",
    help="auto, cuda, or sim with options, for example sim:memory=8GiB,count=2,seed=7,schedule=lifo. "
    "Default: $CUDATOOL_DEVICE, else auto: a GPU where one answers, else sim.",
)


def workload_arguments(function: _F) -> _F:
    """Add ``(WORKLOAD.py | -m MODULE) [ARGS]...`` to a command; its own options must stand before."""
    function = click.argument("workload", nargs=-1, type=click.UNPROCESSED)(function)
    return click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m MODULE`.")(function)


def split_workload(module: str | None, workload: tuple[str, ...]) -> tuple[str, tuple[str, ...], bool]:
    """Return target, arguments and whether it is a module; complain if nothing is to be run."""
    if module is not None:
        return module, workload, True
    if not workload:
        raise click.UsageError("name a Python program to run, or a module with -m")
    return workload[0], workload[1:], False
