"""The baseline: a file of findings that are known and accepted, each with a reason and, if wanted, a last day.

JSON, schema ``cudatool.baseline/1``, meant to be committed and edited by hand::

    {
      "schema": "cudatool.baseline/1",
      "findings": [
        {
          "fingerprint": "6f80ee944f6e3bea",
          "kind": "race-waw",
          "check": "race",
          "what": "cuMemsetD8Async in main (train.py); cuMemsetD8Async in main (train.py)",
          "reason": "both write the same zeros",
          "expires": "2027-01-31"
        }
      ]
    }
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from typing import Any

from cudatool.errors import FileFormatError
from cudatool.files import read_input, write_whole
from cudatool.limits import BASELINE_BYTES
from cudatool.sanitize.findings import Known, Report
from cudatool.sanitize.kinds import check_of
from cudatool.sanitize.report.views import what
from cudatool.text import quoted

__all__ = ["SCHEMA", "Baseline"]

SCHEMA = "cudatool.baseline/1"


@dataclass(frozen=True)
class Baseline:
    """Known findings by their fingerprints."""

    known: dict[str, Known]

    @staticmethod
    def read(path: str, *, may_be_new: bool = False) -> Baseline:
        """Return the baseline in a file; an empty one for a file that `may_be_new` and is.

        Raises
        ------
        FileFormatError
            It is not there, or no baseline; the message names the entry.
        """
        try:
            data = json.loads(read_input(path, BASELINE_BYTES))
        except FileNotFoundError as error:
            if may_be_new:
                return Baseline({})
            raise FileFormatError(path, "there is no such baseline; --update-baseline writes it") from error
        except OSError as error:
            raise FileFormatError(path, f"cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise FileFormatError(path, f"is not JSON: {error}") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise FileFormatError(path, f"is not a baseline: its schema is not {SCHEMA!r}")
        if not isinstance(data.get("findings"), list):
            raise FileFormatError(path, 'is not a baseline: "findings" is not a list')
        entries = [_entry(path, index, entry) for index, entry in enumerate(data["findings"], 1)]
        return Baseline({entry.fingerprint: entry for entry in entries})

    def write(self, path: str) -> None:
        """Write the baseline to a file, sorted, so that its changes are easy to review.

        Raises
        ------
        OutputError
            It cannot be written; what was there before still is.
        """
        ordered = sorted(self.known.values(), key=lambda entry: (entry.kind, entry.what, entry.fingerprint))
        data = {"schema": SCHEMA, "findings": [asdict(entry) for entry in ordered]}
        write_whole(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")

    def updated(self, report: Report, checks: Collection[str]) -> Baseline:
        """Return the baseline of what `checks` found, also of what shows only if the rest is accepted.

        Known entries keep reason and last day; those not found go, unless they are of other checks.
        """
        new = {key: entry for key, entry in self.known.items() if entry.check not in ("", *checks)}
        known = [one.finding for one in report.set_aside if one.by == "baseline"]
        for one in (*report.all, *known, *report.dependent):
            new[one.fingerprint] = Known(one.fingerprint, one.kind.value, check_of(one), what(one))
        for fingerprint in new.keys() & self.known.keys():
            old = self.known[fingerprint]
            new[fingerprint] = replace(new[fingerprint], reason=old.reason, expires=old.expires)
        return Baseline(new)


def _entry(path: str, index: int, entry: Any) -> Known:
    names = {field.name for field in fields(Known)}
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise FileFormatError(path, f"entry {index} is not an object of strings")
    if not entry.get("fingerprint"):
        raise FileFormatError(path, f"entry {index} has no fingerprint")
    if unknown := sorted(entry.keys() - names):
        raise FileFormatError(path, f"entry {index} has an unknown field {quoted(unknown[0])}")
    expires = entry.get("expires", "")
    if expires:
        try:
            expires = date.fromisoformat(expires).isoformat()
        except ValueError as error:
            raise FileFormatError(
                path, f"entry {index} expires on {quoted(expires)}; write a date such as 2027-01-31"
            ) from error
    return Known(**{**entry, "expires": expires})
