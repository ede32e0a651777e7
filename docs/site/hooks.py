"""What the site has beside the pages of docs/: the reference of the commands, the gallery, and the files at the root.

MkDocs calls the functions ``on_...`` while it builds (``make site``).
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from cudatool import cli

ROOT: Final = Path(__file__).parents[2]
AT_ROOT: Final = {
    # file beside docs/ -> page of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")


class Shown(NamedTuple):
    """A page of the gallery: what writes it, and what to look at there."""

    file: str
    title: str
    commands: Sequence[str]  # run one by one, where the samples are
    text: str


GALLERY: Final = (
    Shown(
        "mlp.html",
        "A perceptron that learns",
        ("cudatool run --device sim -o mlp.ctrace --html mlp.html samples/mlp.py",),
        "Memory over time below the ranges of the program, and the blocks in memory at the cursor.",
    ),
    Shown(
        "fragmentation.html",
        "Reserved far above allocated",
        ("cudatool run --device sim -o fragmentation.ctrace --html fragmentation.html samples/fragmentation.py",),
        "Why more is reserved than is used, which blocks keep the segments, and what to do.",
    ),
    Shown(
        "pytorch.html",
        "A snapshot that PyTorch wrote",
        ("cudatool snapshot --html pytorch.html recordings/streams_default.pickle.xz",),
        "A recording of a PyTorch program on a GPU, with several streams.",
    ),
    Shown(
        "diff.html",
        "Two recordings compared",
        ("cudatool diff --html diff.html mlp.ctrace fragmentation.ctrace",),
        "The call sites that hold more at one peak than at the other.",
    ),
    Shown(
        "race.html",
        "A race",
        ("cudatool sanitize --device sim --html race.html samples/pipeline_racy.py",),
        "Both accesses on the timeline of the streams, and the call that is missing between them.",
    ),
)
_ENDS_WITH: Final = {"race.html": 1}  # exit status of what writes the page, where that is not 0


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are written here; mkdocs then treats them as those of docs/."""
    for source, page in AT_ROOT.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_LINK.sub(_from_root, text)))
    files.append(File.generated(config, "commands.md", content=commands()))
    files.append(File.generated(config, "gallery.md", content=gallery()))
    for name, content in shown().items():
        files.append(File.generated(config, f"gallery/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links of docs/ to files above it lead to the repository's pages on the site, or to their names only."""
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+([\w./]+)\)", lambda found: _outside(found, page), markdown)


def _outside(found: re.Match[str], page: Page) -> str:
    if (target := AT_ROOT.get(found[2])) is None:
        return f"`{found[2]}`"
    return f"[{found[1]}]({posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or '.')})"


def _from_root(found: re.Match[str]) -> str:
    """Return a link of a file beside docs/ as one of a page in docs/."""
    target = found[1]
    path, mark, anchor = target.partition("#")
    return f"]({AT_ROOT.get(path, path).removeprefix('docs/')}{mark}{anchor})"


def commands() -> str:
    """Return the reference of all commands, from click."""
    group = cli.group
    lines = ["# Commands", "", "What `cudatool COMMAND --help` says. [The command line](command-line.md) explains"]
    lines += ["what the commands have in common."]
    with click.Context(group, info_name="cudatool", **group.context_settings) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            with click.Context(command, parent=context, info_name=name, max_content_width=100) as inner:
                lines += ["", f"## cudatool {name}", "", *described(command, inner)]
    return "\n".join(lines) + "\n"


def described(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the lines about a command: how it is called, its text, its options by group, its examples."""
    yield from ("```text", command.get_usage(context), "```", "", *_plain(command.help or "").splitlines())
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None:
            groups.setdefault(getattr(parameter, "group", "Options"), []).append(record)
    for heading, records in groups.items():
        yield from ("", f"| {heading} | |", "|---|---|")
        yield from (f"| `{_cell(flags)}` | {_cell(_plain(text))} |" for flags, text in records)
    if examples := getattr(command, "examples", ()):
        yield from ("", "```text", *(line for what, shell in examples for line in (f"# {what}", f"$ {shell}")), "```")


def _plain(text: str) -> str:
    """Return a text of click's as Markdown: no marks that keep lines, no markup of a language that it is not in."""
    return text.replace("\b\n", "").replace("<", "&lt;").replace("*", r"\*")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def gallery() -> str:
    """Return the page that leads to the pages that cudatool wrote."""
    lines = ["# Gallery", "", "Pages that cudatool writes, each one file that needs no network. The commands under"]
    lines += ["each made it when this site was built."]
    for one in GALLERY:
        lines += ["", f"## {one.title}", "", f"[Open the page](gallery/{one.file}){{target=_blank}}. {one.text}"]
        lines += ["", "```console", *(f"$ {command}" for command in one.commands), "```"]
    return "\n".join(lines) + "\n"


def shown() -> dict[str, bytes]:
    """Run the commands of the gallery on the software device; return the pages by name.

    Raises
    ------
    RuntimeError
        A command ended otherwise than it should.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "samples").symlink_to(ROOT / "samples")
        (work / "recordings").symlink_to(ROOT / "tests" / "data")
        for one in GALLERY:
            for command in one.commands:
                _run(command, work, expected=_ENDS_WITH.get(one.file, 0))
        return {one.file: (work / one.file).read_bytes() for one in GALLERY}


def _run(command: str, folder: Path, *, expected: int) -> None:
    environment: dict[str, Any] = {**os.environ, "CUDATOOL_DEVICE": "sim"}
    arguments = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != expected:
        raise RuntimeError(f"{command}: exit status {done.returncode}\n{done.stderr}")
