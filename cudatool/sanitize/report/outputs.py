"""Where a report goes: several formats at once, each to a file or to stdout."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cudatool.errors import OutputError, UsageError, unknown
from cudatool.files import check_outputs, check_writable, write_whole
from cudatool.sanitize.findings import Report
from cudatool.sanitize.report.github import render_github, render_summary
from cudatool.sanitize.report.gitlab import render_gitlab
from cudatool.sanitize.report.junit import render_junit
from cudatool.sanitize.report.sarif import render_sarif
from cudatool.sanitize.report.text import render_json, render_text
from cudatool.sanitize.report.views import ReportContext

__all__ = ["FORMATS", "Output", "Outputs", "Renderer"]

Renderer = Callable[[Report, ReportContext], str]

FORMATS: Final[dict[str, Renderer]] = {
    "text": render_text,
    "json": render_json,
    "sarif": render_sarif,
    "junit": render_junit,
    "github": render_github,
    "gitlab": render_gitlab,
}
_SUMMARY: Final = "GITHUB_STEP_SUMMARY"
_FOR_LOGS: Final = ("text", "github")  # can follow one another on stdout


@dataclass(frozen=True, slots=True)
class Output:
    """One format, and the absolute path of its file, empty for stdout."""

    format: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Everything that one run writes."""

    outputs: tuple[Output, ...]

    @staticmethod
    def parse(texts: Sequence[str], *others: str | None, inputs: Sequence[str] = ()) -> Outputs:
        """Return what ``FORMAT`` and ``FORMAT=FILE`` ask for; the text report goes to stdout if nothing else does.

        `others` are files that the caller writes, `inputs` those that it reads: no result may replace one.

        Raises
        ------
        UsageError
            An unknown format, two formats on stdout that would spoil each other, or a file that is an input or another
            result.
        OutputError
            A file that cannot be written.
        """
        outputs = list(dict.fromkeys(_parse(text) for text in texts))
        if not any(not output.path for output in outputs):
            outputs.insert(0, Output("text"))
        on_stdout = [output.format for output in outputs if not output.path]
        if len(set(on_stdout)) > 1 and not set(on_stdout) <= set(_FOR_LOGS):
            raise UsageError(f"only one of {' and '.join(on_stdout)} can go to stdout; write {on_stdout[-1]}=FILE")
        if "github" in {output.format for output in outputs} and (summary := os.environ.get(_SUMMARY)):
            check_writable(summary)
        paths = [output.path for output in outputs if output.path]
        check_outputs([os.path.relpath(path) for path in [*paths, *filter(None, others)]], inputs)
        return Outputs(tuple(outputs))

    def write(
        self, report: Report, run: ReportContext, echo: Callable[[str], None], text: Renderer = render_text
    ) -> list[str]:
        """Write the files and return their paths; `echo` prints what goes to stdout, the text report as `text` has it.

        Raises
        ------
        OutputError
            A file could not be written. All others have been.
        """
        failed: OutputError | None = None
        written = []
        for output in sorted(self.outputs, key=lambda output: not output.path):  # stdout last: its reader may be gone
            render = text if output == Output("text") else FORMATS[output.format]
            try:
                if output.path:
                    write_whole(output.path, render(report, run) + "\n")
                    written.append(output.path)
                else:
                    echo(render(report, run))
                if output.format == "github" and (summary := os.environ.get(_SUMMARY)):
                    _append(summary, render_summary(report, run))
            except OutputError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return written


def _parse(text: str) -> Output:
    form, equals, path = text.partition("=")
    if form not in FORMATS:
        raise UsageError(unknown("format", form, FORMATS))
    if equals and not path:
        raise UsageError(f"--format {text} names no file")
    return Output(form, "" if path in ("", "-") else os.path.abspath(path))


def _append(path: str, text: str) -> None:
    try:
        with Path(path).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
