"""Which findings count: those that no comment, no rule and no baseline sets aside."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from datetime import date

from cudatool.sanitize.findings import DeviceFinding, Finding, GapKind, Report, SetAside
from cudatool.sanitize.report.baseline import Baseline
from cudatool.sanitize.report.comments import Comments
from cudatool.sanitize.report.suppress import SuppressionRule

__all__ = ["accepted", "accepts_races", "known"]


def accepted(report: Report, rules: Sequence[SuppressionRule] = (), files: Iterable[str] = ()) -> Report:
    """Return the report without the findings that a comment in the source or one of `rules` accepts.

    They are in ``set_aside``. Mistakes in comments are in ``remarks``: in the files that findings point to, and in
    other `files`.
    """
    comments = Comments()

    def judge(finding: Finding | DeviceFinding) -> SetAside | None:
        if where := comments.accepting(finding):
            return SetAside(finding, "comment", comment=where)
        rule = next((rule for rule in rules if rule.matches(finding)), None)
        return SetAside(finding, "rule", rule.text) if rule else None

    report = _without_repairs(report, lambda finding: judge(finding) is not None)
    aside = {finding.fingerprint: found for finding in report.all if (found := judge(finding))}
    comments.read(files)
    return replace(_without(report, aside), remarks=(*report.remarks, *comments.remarks))


def known(report: Report, baseline: Baseline, checks: Collection[str], today: date) -> Report:
    """Return the report without the findings that `baseline` accepts on the day `today`.

    An entry holds to the end of its last day. Those past it are in ``expired``. Those whose findings are neither
    reported nor set aside, though `checks` looked for them, are in ``stale``.
    """
    gone = {key for key, entry in baseline.known.items() if entry.expires and entry.expires < today.isoformat()}
    report = _without_repairs(report, lambda finding: finding.fingerprint in baseline.known.keys() - gone)
    named = {finding.fingerprint: baseline.known.get(finding.fingerprint) for finding in report.all}
    entries = {fingerprint: entry for fingerprint, entry in named.items() if entry is not None}
    expired = [entry for entry in entries.values() if entry.fingerprint in gone]
    aside = {
        finding.fingerprint: SetAside(finding, "baseline", entry.reason, entry.expires)
        for finding in report.all
        if (entry := entries.get(finding.fingerprint)) and entry.fingerprint not in gone
    }
    seen = named.keys() | {one.finding.fingerprint for one in report.set_aside}
    seen |= {finding.fingerprint for finding in report.dependent}
    looked = not any(gap.whole or gap.kind is GapKind.RECORDING for gap in report.gaps)  # else all would be stale
    stale = tuple(entry for key, entry in baseline.known.items() if key not in seen and entry.check in ("", *checks))
    return replace(_without(report, aside), expired=tuple(expired), stale=stale if looked else ())


def accepts_races(
    report: Report, rules: Sequence[SuppressionRule], baseline: Baseline, checks: Collection[str], today: date
) -> bool:
    """Return whether one of the races of a report is set aside."""
    judged = known(accepted(report, rules), baseline, checks, today)
    return len(judged.findings) < len(report.findings)


def _without_repairs(report: Report, is_accepted: Callable[[Finding], bool]) -> Report:
    """Return the report with its dependent findings among the others, if one of those is accepted.

    Which of them depend on that one is not known. Each is a race of the program as it is.
    """
    if not any(is_accepted(finding) for finding in report.findings):
        return report
    return replace(report, findings=(*report.findings, *report.dependent), dependent=())


def _without(report: Report, aside: dict[str, SetAside]) -> Report:
    findings = tuple(one for one in report.findings if one.fingerprint not in aside)
    on_device = tuple(one for one in report.on_device if one.fingerprint not in aside)
    have_some = {process for one in findings for process in one.processes}
    have_some |= {process for one in on_device for process in one.processes}
    return replace(
        report,
        findings=findings,
        possible=tuple(one for one in report.possible if one.fingerprint not in aside),
        on_device=on_device,
        warnings=tuple(one for one in report.warnings if one.fingerprint not in aside),
        set_aside=(*report.set_aside, *aside.values()),
        processes=tuple(
            one if one.name in have_some else replace(one, outcome=one.checked) for one in report.processes
        ),
    )
