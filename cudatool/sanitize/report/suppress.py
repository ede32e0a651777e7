"""What the user does not want to hear of: rules on the command line or in a file.

A rule is a line of terms, all of which must hold::

    kind=race-* file=third_party/*.py function=warm_up     # a comment
    operation='void scale<float, 4>*'
    fingerprint=6f80ee944f6e3bea

Values are shell patterns; one with a space is quoted as in a shell. ``kind`` is a kind of finding, or a check
(``race``, ``memcheck``) for all kinds that it finds. ``file`` and ``function`` must hold for the same frame of either
access's stack; ``file`` is matched from the end of the path. ``operation`` is either access's: a kernel's name, or a
call's.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from cudatool.errors import UsageError
from cudatool.files import read_input
from cudatool.limits import RULE_BRACKETS, RULE_LENGTH, RULES, RULES_BYTES
from cudatool.sanitize.findings import DeviceFinding, Finding, FindingKind
from cudatool.sanitize.kinds import CHECKS, check_of
from cudatool.text import quoted, short_arguments
from cudatool.trace.model import Frame

__all__ = ["SuppressionRule", "parse_rules"]

_TERMS = ("kind", "file", "function", "operation", "fingerprint")


@dataclass(frozen=True, slots=True)
class SuppressionRule:
    """A pattern for each term that the rule has, and the line that it was written as."""

    text: str
    kind: str = ""
    file: str = ""
    function: str = ""
    operation: str = ""
    fingerprint: str = ""

    def matches(self, finding: Finding | DeviceFinding) -> bool:
        """Return whether every term holds."""
        if isinstance(finding, Finding):
            stacks = finding.first.stack + finding.second.stack
            operations = [finding.first.operation, finding.second.operation]
        else:
            stacks, operations = finding.stack, [finding.operation]
            # The line in the kernel counts as a frame of a function that has no name.
            sources = [source for source in (finding.source, finding.other_source) if source]
            stacks += tuple(Frame(source.file, "", source.line) for source in sources)
        operations += [short_arguments(name) for name in operations]  # as the report has them
        patterns = self.operation, f"kernel {self.operation}"
        return (
            (not self.kind or any(fnmatchcase(name, self.kind) for name in (finding.kind, check_of(finding))))
            and (not self.fingerprint or fnmatchcase(finding.fingerprint, self.fingerprint))
            and (not self.operation or any(fnmatchcase(name, one) for name in operations for one in patterns))
            and (not (self.file or self.function) or any(map(self._in_frame, stacks)))
        )

    def _in_frame(self, frame: Frame) -> bool:
        in_file = not self.file or fnmatchcase("/" + frame.file.replace("\\", "/"), f"*/{self.file}")
        return in_file and (not self.function or fnmatchcase(frame.function, self.function))


def parse_rules(texts: Iterable[str]) -> tuple[SuppressionRule, ...]:
    """Return the rules that `texts` are, or, for ``@FILE``, that the lines of a file are.

    Raises
    ------
    UsageError
        A rule or file that cannot be read, or too many of them (:mod:`cudatool.limits`); the message names the line.
    """
    rules: list[SuppressionRule] = []
    room = RULES_BYTES
    for line, where in _lines(texts):
        room -= len(line)
        if room < 0:
            raise UsageError(f"{where}: the suppressions have more than {RULES_BYTES >> 10} KiB")
        rule = _parse(line, where)
        if rule is not None:
            rules.append(rule)
        if len(rules) > RULES:
            raise UsageError(f"{where}: there are more than {RULES:,} suppressions; a --baseline may have more entries")
    return tuple(rules)


def _lines(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each line that may be a rule, and where it stands."""
    for text in texts:
        if not text.startswith("@"):
            yield text, "--suppress"
            continue
        path = Path(text[1:])
        try:
            content = read_input(path, RULES_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UsageError(f"cannot read suppressions from {path}: {why}") from error
        for number, line in enumerate(content.split("\n"), 1):
            yield line + "\n", f"{path}:{number}"


def _parse(text: str, where: str) -> SuppressionRule | None:
    text = text.strip()
    if not text or text.startswith("#"):
        return None
    if len(text) > RULE_LENGTH:
        raise UsageError(f"{where}: a suppression of more than {RULE_LENGTH:,} characters")
    if text.count("[") > RULE_BRACKETS:
        raise UsageError(f"{where}: a suppression with more than {RULE_BRACKETS} opening brackets")
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise UsageError(f"{where}: {error} in {quoted(text)}") from error
    terms: dict[str, str] = {}
    for word in words:
        term, equals, pattern = word.partition("=")
        if not equals or term not in _TERMS or not pattern:
            raise UsageError(
                f"{where}: {quoted(word)} is not a term of a rule; write for example kind=race-* file=tests/*.py"
            )
        if term in terms:
            raise UsageError(f"{where}: {term} is given twice; a rule takes one of each")
        terms[term] = pattern
    names = [*CHECKS, *FindingKind]
    if (kind := terms.get("kind")) and not any(fnmatchcase(name, kind) for name in names):
        raise UsageError(f"{where}: no kind of finding is {quoted(kind)}; there are {', '.join(names)}")
    return SuppressionRule(" ".join(words), **terms) if terms else None
