"""What all commands have in common: options in groups, examples, settings of the project, completion."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from cudatool.cli._project import project_file, setting
from cudatool.cli._text import say

__all__ = ["Command", "Files", "Listed", "Option", "command", "option"]

_SETTINGS = "cudatool.settings"  # key under which a context stores the names of the options from a pyproject.toml


class Option(click.Option):
    """An option below the heading `group` of the help that can take its value from ``[tool.cudatool]``.

    `setting` is its name there. The command line overrides the environment, which overrides the file.
    """

    def __init__(self, *args: Any, group: str = "Options", setting: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self.setting = setting

    def consume_value(self, ctx: click.Context, opts: Any) -> tuple[Any, ParameterSource]:
        """Return the value and its source."""
        value, source = super().consume_value(ctx, opts)
        given = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
        if self.setting is None or source in given or ctx.resilient_parsing:
            return value, source

        found = setting(self.setting, several=self.multiple)
        if found is None:
            return value, source
        ctx.meta.setdefault(_SETTINGS, []).append(self.setting)
        return found, ParameterSource.DEFAULT_MAP


option = partial(click.option, cls=Option)


class Command(click.Command):
    """A command whose options are in groups, with examples at the end of its help."""

    def __init__(self, *args: Any, examples: Iterable[tuple[str, str]] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each group of options below its heading, those without one last."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Options"), []).append(record)
        for heading in sorted(groups, key=lambda heading: heading == "Options"):
            with formatter.section(heading):
                formatter.write_dl(groups[heading])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, each below what it does."""
        if not self.examples:
            return
        with formatter.section("Examples"):
            for what, line in self.examples:
                formatter.write_text(f"# {what}")
                formatter.write(f"{'':{formatter.current_indent}}$ {line}\n")

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; first report the options that come from a pyproject.toml."""
        if names := ctx.meta.get(_SETTINGS):
            say(f"cudatool: settings of {project_file()}: {', '.join(names)}")
        return super().invoke(ctx)


def command(**kwargs: Any) -> Callable[[Callable[..., Any]], Command]:
    """Make a :class:`Command` of a function."""
    return click.command(cls=Command, **kwargs)


class Listed(click.types.StringParamType):
    """Words; `values` returns the known ones for completion, and the command itself rejects wrong ones.

    `separator` separates several words of one value.
    """

    def __init__(self, values: Callable[[], Iterable[str]], *, separator: str = "") -> None:
        self._values = values
        self._separator = separator

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the words that the last word may become."""
        before, separator, last = incomplete.rpartition(self._separator) if self._separator else ("", "", incomplete)
        used = before.split(self._separator) if separator else ()
        words = (word for word in self._values() if word.startswith(last) and word not in used)
        return [CompletionItem(before + separator + word) for word in words]


class Files(click.types.StringParamType):
    """The name of a file; completion offers those with certain endings, or every file if there are none.

    The command gets the result of `path_type` for the name.
    """

    def __init__(self, *endings: str, path_type: Callable[[str], Any] = str) -> None:
        self._endings = endings
        self._path_type = path_type

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name as the command takes it."""
        return self._path_type(super().convert(value, param, ctx))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the files and directories whose names begin so."""
        if param.nargs == -1 and ctx.params.get(param.name or ""):
            return [CompletionItem(incomplete, type="file")]  # an argument of the program
        found = list(_matching(incomplete, self._endings))
        while len(found) == 1 and found[0].endswith(os.sep):
            # Shells put a space after the only completion: go on inside of the directory.
            inside = list(_matching(found[0], self._endings))
            if not inside:
                break
            found = inside
        return [CompletionItem(name) for name in found] or [CompletionItem(incomplete, type="file")]


def _matching(start: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Yield the files with one of the endings whose names begin with `start`, and directories with a slash."""
    folder, begin = os.path.split(start)
    try:
        with os.scandir(folder or os.curdir) as entries:
            names = sorted((entry.name, entry.is_dir()) for entry in entries if entry.name.startswith(begin))
    except OSError:
        return
    for name, is_folder in names:
        if name.startswith(".") and not begin:
            continue
        if is_folder:
            yield os.path.join(folder, name, "")
        elif name.endswith(endings):
            yield os.path.join(folder, name)
