"""Comments in the user's source that accept a finding: ``# cudatool: ignore[race-raw, memcheck]``.

A comment counts for a finding if it stands on the line of either access or of a call that led to it, in the user's own
code (frames that are not of an installed package), or on another line of the same statement; in a CUDA source file that
can be read, on the line in the kernel. In brackets stand kinds and checks; without brackets it accepts everything.

What looks like such a comment and is none accepts nothing, and there is a remark on it.
"""

from __future__ import annotations

import ast
import difflib
import io
import re
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cudatool.limits import COMMENTED_SOURCE
from cudatool.sanitize.findings import DeviceFinding, Finding, FindingKind, Remark
from cudatool.sanitize.kinds import CHECKS, check_of
from cudatool.sanitize.places import NOT_PYTHON, source_lines
from cudatool.sanitize.report.views import sites
from cudatool.source_text import SourceLine
from cudatool.text import quoted
from cudatool.trace.frames import user_frames
from cudatool.trace.model import Frame

__all__ = ["Comments"]

_MARK = re.compile(r"#|//|/\*")
_WORD = re.compile(r"\bcudatool\b\s*(:?)\s*(\w+)(.*)")
_LIST = re.compile(r"\s*\[([^\]]*)\]")
_SEPARATORS = " \t,;.:()[]{}=-\u2013\u2014"  # between the word and a reason
_NAMES = frozenset([*CHECKS, *FindingKind])


_EVERYTHING = " "  # what a comment without brackets accepts; names have no blanks around them


@dataclass
class Comments:
    """The comments of the files that findings point to; each file is read once.

    Attributes
    ----------
    remarks
        Mistakes in the comments seen so far, and files whose comments were not read.
    """

    remarks: list[Remark] = field(default_factory=list)
    _files: dict[str, _Source] = field(default_factory=dict)
    _lines: dict[int, tuple[Sequence[Frame], list[SourceLine]]] = field(default_factory=dict)  # of stacks, by identity

    def accepting(self, finding: Finding | DeviceFinding) -> SourceLine | None:
        """Return where the comment is that accepts `finding`, None without one."""
        places = [line for site in sites(finding) for line in self._lines_of(site.stack)]
        if isinstance(finding, DeviceFinding):
            places += [source for source in (finding.source, finding.other_source) if source and source.file]
        names = _EVERYTHING, finding.kind.value, check_of(finding)
        sources = [self._of(file) for file, _ in places]  # all of them: each may hold a name that is misspelt
        for (file, line), source in zip(places, sources, strict=True):
            accepted = source.at(line)
            lines = [accepted[name] for name in names if name in accepted]
            if lines:
                return SourceLine(file, min(lines))
        return None

    def _lines_of(self, stack: Sequence[Frame]) -> list[SourceLine]:
        """Return the lines of the user's own code in a stack: found once where many findings have one long stack."""
        known = self._lines.get(id(stack))
        if known is None:  # kept with the stack, so that no other gets its identity
            lines = dict.fromkeys(SourceLine(frame.file, frame.line) for frame in user_frames(stack))
            known = self._lines[id(stack)] = stack, list(lines)
        return known[1]

    def read(self, files: Iterable[str]) -> None:
        """Read the comments of files to which no finding points: there may be remarks on them."""
        for file in files:
            self._of(file)

    def _of(self, file: str) -> _Source:
        if file not in self._files:
            self._files[file], remarks = _read(file)
            self.remarks += remarks
        return self._files[file]


@dataclass(frozen=True)
class _Source:
    """What the comments of one file accept: as much work for a statement of thousands of comments as for one."""

    statements: dict[int, int]  # line -> first line of its statement, where that is another
    accepted: dict[int, dict[str, int]] = field(default_factory=dict)  # that line -> name -> line of the comment

    def at(self, line: int) -> dict[str, int]:
        """Return what is accepted in the statement on a line, by name, each with the line of the comment."""
        return self.accepted.setdefault(self.statements.get(line, line), {})


def _statements(text: str) -> dict[int, int]:
    """Return for each line where the innermost statement, head of a compound one or decorator on it begins."""
    found: dict[int, int] = {}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return found
    for node in ast.walk(tree):  # outer statements come before inner ones
        if not isinstance(node, ast.stmt | ast.ExceptHandler):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        decorators = [(one.lineno, one.end_lineno or one.lineno) for one in getattr(node, "decorator_list", ())]
        for first, end in (*decorators, (node.lineno, max(last, node.lineno))):
            found.update(dict.fromkeys(range(first, end + 1), first))
    return found


def _read(file: str) -> tuple[_Source, list[Remark]]:
    """Return what a file's comments accept, and what is wrong with them."""
    text = "".join(source_lines(file))
    if "cudatool" not in text:
        return _Source({}), []
    if len(text) > COMMENTED_SOURCE:
        why = f"comments of a file of more than {COMMENTED_SOURCE >> 10} KiB are not read: nothing is accepted there"
        return _Source({}), [Remark(file, 1, why)]
    python = not file.endswith(NOT_PYTHON)
    source = _Source(_statements(text) if python else {})
    remarks = []
    for line, words in _comments(text) if python else enumerate(text.splitlines(), 1):
        mark = _MARK.search(words)
        names, wrong = _names_in(words[mark.end() :]) if mark else (set(), [])
        remarks += [Remark(file, line, what) for what in wrong]
        accepted = source.at(line)
        for name in names:
            accepted.setdefault(name, line)
    return source, remarks


def _names_in(comment: str) -> tuple[set[str], list[str]]:
    """Return the names in a comment that accepts findings, empty for others; and a sentence on each mistake in it."""
    match = _WORD.search(comment)
    if match is None:
        return set(), []
    colon, word, rest = match.groups()
    listed = _LIST.match(rest)
    if not colon or word != "ignore":
        # It may be prose, unless two things of three are as in such a comment.
        like = bool(difflib.get_close_matches(word, ["ignore"], cutoff=0.7))
        if bool(colon) + like + bool(listed) < 2:
            return set(), []
        return set(), [f"{quoted(match[0].strip())} accepts nothing: write `cudatool: ignore[race-raw]`"]
    if listed:
        names = {name.strip() for name in listed[1].split(",")}
        wrong = [f"ignore[{name}]: {quoted(name)} is not a kind of finding or a check" for name in names - _NAMES]
        return names, sorted(wrong)
    first = rest.strip(_SEPARATORS).split(maxsplit=1)[:1]
    if rest[:1] in ("(", "[", "{", "=") or (first and first[0].strip(_SEPARATORS) in _NAMES):
        return set(), [f"{quoted(match[0].strip())} accepts nothing: names stand in brackets, as in `ignore[race-raw]`"]
    return {_EVERYTHING}, []


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
