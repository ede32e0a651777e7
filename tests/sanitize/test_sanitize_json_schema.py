"""The schema of sanitize's report describes what --format json writes, and all of it."""

from __future__ import annotations

import json
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any

import jsonschema
import pytest
from report_examples import every_kind, pipeline, race

from cudatool.cli._schemas import schema_of_command
from cudatool.sanitize import Report, ReportContext, findings, render_json
from cudatool.sanitize.findings import Gap, GapKind, Known, Outcome, Remark, SetAside
from cudatool.sanitize.kinds import CHECKS
from cudatool.trace.model import Frame

SCHEMA = schema_of_command("sanitize")


@pytest.fixture
def report(tmp_path: Path) -> Report:
    file = pipeline(tmp_path)
    known = Known("a", "race-raw", "race", "what", "why", "2020-01-31")
    return Report(
        **{field: getattr(every_kind(file), field) for field in ("findings", "on_device", "edges", "notes")},
        possible=(race(file, exact=False),),
        set_aside=(SetAside(every_kind(file).on_device[0], "rule", "kind=memcheck"),),
        expired=(known,),
        stale=(known,),
        remarks=(Remark(file, 1, "no"),),
        gaps=(Gap(GapKind.CHILD_PROCESSES, 2, ("python train.py",)), Gap(GapKind.CHECKS, 1, ("memcheck",), whole=True)),
    )


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("run", [None, ReportContext("/", ("race", "leak"), 3)])
def test_a_report_with_everything_is_valid(report, run):
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(render_json(report, run)))


def test_the_schema_lists_all_that_there_is():
    assert sorted(GapKind) == sorted(SCHEMA["$defs"]["gap"]["properties"]["kind"]["enum"])
    assert sorted(Outcome) == sorted(SCHEMA["properties"]["outcome"]["enum"])
    assert sorted(Outcome) == sorted(SCHEMA["$defs"]["process"]["properties"]["outcome"]["enum"])
    assert sorted(CHECKS) == sorted(SCHEMA["properties"]["checks"]["items"]["enum"])


def test_the_schema_refuses_another_version(report):
    data = json.loads(render_json(report)) | {"schema": "cudatool.sanitize/2"}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(data)


def undescribed(kind: Any, schema: dict[str, Any], path: str) -> list[str]:
    """Return the fields of a dataclass, and of those in it, that the schema does not name."""
    if "oneOf" in schema:
        schema = schema["oneOf"][-1]
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind, vars(findings))
        members = {field.name: hints[field.name] for field in fields(kind)}
    elif kind is Frame:
        members = dict.fromkeys(Frame._fields)
    elif typing.get_origin(kind) is tuple:
        return undescribed(typing.get_args(kind)[0], schema["items"], path)
    elif typing.get_origin(kind) is UnionType and "anyOf" not in schema:
        return [name for one in typing.get_args(kind) for name in undescribed(one, schema, path)]
    else:
        return []
    missing = []
    for name, member in members.items():
        if name not in schema["properties"]:
            missing.append(f"{path}.{name}")
        else:
            missing += undescribed(member, schema["properties"][name], f"{path}.{name}")
    return missing


def test_every_field_of_a_report_is_described():
    assert [] == undescribed(Report, SCHEMA, "report")


def test_what_is_not_described_would_be_seen():
    poorer = json.loads(json.dumps(SCHEMA))
    del poorer["properties"]["set_aside"]
    assert "report.set_aside" in undescribed(Report, poorer, "report")
