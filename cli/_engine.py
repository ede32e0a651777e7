"""Options of the commands that query a data set."""

from __future__ import annotations

import click

from cudatool.cli._command import option
from cudatool.fleet.query import MEMORY

__all__ = ["engine_option", "memory_option"]

engine_option = option(
    "--engine",
    type=click.Choice(["duckdb", "ray"]),
    default="duckdb",
    group="Engine",
    help="duckdb: this process (default). ray: a Ray cluster, the one of RAY_ADDRESS if that is set.",
)
memory_option = option(
    "--memory",
    default=MEMORY,
    metavar="SIZE",
    help=f"What DuckDB may use of the memory, in each task of a cluster too. Default: {MEMORY}.",
)
