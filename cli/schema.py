"""``cudatool schema``: what the JSON of a command looks like."""

from __future__ import annotations

import click

from cudatool.cli._command import Listed, command
from cudatool.cli._schemas import COMMANDS, schema_of_command
from cudatool.cli._text import echo_json

__all__ = ["schema"]


@command(
    examples=[
        ("The fields of a snapshot's JSON", "cudatool schema snapshot"),
        ("Those of the report when memory runs out", "cudatool schema oom"),
    ],
)
@click.argument("name", metavar="COMMAND", type=Listed(lambda: COMMANDS))
def schema(name: str) -> None:
    """Print the JSON schema of what COMMAND prints with --json.

    COMMAND is one of devices, diff, leaks, oom, ptx, replay, sanitize, snapshot. Fields are added to it, and never
    renamed or removed, as long as its "schema" says the same number.
    """
    echo_json(schema_of_command(name))
