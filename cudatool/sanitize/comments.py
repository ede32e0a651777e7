"""Comments in the user's source that accept a finding: ``# cudatool: ignore[race-raw, memcheck]``.

A comment counts for a finding if it stands on the line of either access in the user's own code (the innermost frame
that is not of an installed package), or on another line of the same statement; in a CUDA source file that can be read,
on the line in the kernel. In brackets stand kinds and checks; without brackets it accepts everything.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass, field

from cudatool.sanitize.findings import DeviceFinding, Finding, FindingKind, Remark
from cudatool.sanitize.kinds import CHECKS, check_of
from cudatool.sanitize.places import source_lines, source_place
from cudatool.sanitize.views import sites
from cudatool.text import quoted
from cudatool.trace.frames import user_frame

__all__ = ["Comments"]

_IGNORE = re.compile(r"(?:#|//|/\*).*?\bcudatool:\s*ignore\b(?:\s*\[([^\]]*)\])?")
_NAMES = frozenset([*CHECKS, *FindingKind])


@dataclass
class Comments:
    """The comments of the files that findings point to; each file is read once.

    Attributes
    ----------
    remarks
        Names in the comments seen so far that are neither kinds nor checks.
    """

    remarks: list[Remark] = field(default_factory=list)
    _files: dict[str, dict[int, list[_Comment]]] = field(default_factory=dict)

    def accepting(self, finding: Finding | DeviceFinding) -> str:
        """Return ``"file:line"`` of the comment that accepts `finding`, an empty string without one."""
        places = [(frame.file, frame.line) for site in sites(finding) if (frame := user_frame(site.stack))]
        if isinstance(finding, DeviceFinding):
            places += [at for source in (finding.source, finding.other_source) if (at := source_place(source))]
        for file, line in places:
            for comment in self._of(file).get(line, ()):
                if comment.names is None or comment.names & {finding.kind.value, check_of(finding)}:
                    return f"{file}:{comment.line}"
        return ""

    def _of(self, file: str) -> dict[int, list[_Comment]]:
        """Return the comments of a file by each line that they count for."""
        if file not in self._files:
            comments, unknown = _read(file)
            self._files[file] = comments
            known = "a kind of finding or a check"
            self.remarks += [
                Remark(file, line, f"ignore[{name}]: {quoted(name)} is not {known}") for line, name in unknown
            ]
        return self._files[file]


@dataclass(frozen=True)
class _Comment:
    line: int
    names: frozenset[str] | None  # None accepts everything


def _statement_lines(text: str) -> dict[int, range]:
    """Return for each line the lines of the innermost statement, head of a compound one or decorator that it is in."""
    found: dict[int, range] = {}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):  # outer statements come before inner ones
        if not isinstance(node, ast.stmt | ast.ExceptHandler):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        decorators = [(one.lineno, one.end_lineno or one.lineno) for one in getattr(node, "decorator_list", ())]
        for first, end in (*decorators, (node.lineno, max(last, node.lineno))):
            lines = range(first, end + 1)
            found.update(dict.fromkeys(lines, lines))
    return found


def _read(file: str) -> tuple[dict[int, list[_Comment]], list[tuple[int, str]]]:
    """Return a file's comments by the lines they count for, and the unknown names with their lines."""
    text = "".join(source_lines(file))
    if "cudatool:" not in text:
        return {}, []
    python = file.endswith((".py", ".pyw")) or not file.endswith((".cu", ".cuh", ".h", ".hpp", ".cpp", ".ptx"))
    statements = _statement_lines(text) if python else {}
    comments: dict[int, list[_Comment]] = {}
    unknown: list[tuple[int, str]] = []
    for line, words in _comments(text) if python else enumerate(text.splitlines(), 1):
        match = _IGNORE.search(words)
        if match is None:
            continue
        names = None if match[1] is None else frozenset(name.strip() for name in match[1].split(","))
        unknown += [(line, name) for name in sorted((names or frozenset()) - _NAMES)]
        for covered in statements.get(line, (line,)):
            comments.setdefault(covered, []).append(_Comment(line, names))
    return comments, unknown


def _comments(text: str) -> list[tuple[int, str]]:
    """Return the comments of Python source with their lines: not what looks like one inside a string."""
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                found.append((token.start[0], token.string))
    except (tokenize.TokenError, SyntaxError):
        pass  # the comments before the place where it stops being Python still count
    return found
