"""The JSON schema of what each command prints with ``--json``: derived from the types that hold the results.

A dataclass becomes an object with its fields, described by its docstring; a closed set of strings an ``enum``. The
tables below say only what the ``as_dict`` methods and the commands put together themselves. Schemas are of draft
2020-12. Fields are added, never renamed or removed.
"""

from __future__ import annotations

import json
import re
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.resources import files
from typing import Any, Final

from cudatool import analyze
from cudatool.analyze.diagnosis import Diagnosis
from cudatool.analyze.live_rows import LivePicture
from cudatool.collect.nvml import NvmlDevice
from cudatool.errors import UsageError, did_you_mean
from cudatool.fleet.compare import Comparison
from cudatool.fleet.report import RunReport
from cudatool.ptx.access import AccessDoubt
from cudatool.ptx.isa import InstructionClass
from cudatool.ptx.kernel_summary import Feature
from cudatool.trace.model import Ending

__all__ = ["COMMANDS", "schema_of_command"]

_Schema = dict[str, Any]

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_CLASS: Final = "$class"  # key of an object of a class, until it is moved to the definitions
_INTEGER: Final[_Schema] = {"type": "integer"}
_TEXT: Final[_Schema] = {"type": "string"}
_FLAG: Final[_Schema] = {"type": "boolean"}
_PRIMITIVES: Final[dict[Any, _Schema]] = {
    int: _INTEGER,
    float: {"type": "number"},
    str: _TEXT,
    bool: _FLAG,
    type(None): {"type": "null"},
}


def _object(**properties: _Schema) -> _Schema:
    return {"type": "object", "required": [*properties], "properties": properties}


def _array(items: _Schema) -> _Schema:
    return {"type": "array", "items": items}


def _nullable(schema: _Schema) -> _Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _said(schema: _Schema, description: str) -> _Schema:
    return {**schema, "description": description}


def _with(schema: _Schema, /, **properties: _Schema) -> _Schema:
    """Return the schema of an object with more fields, or others in the place of its own."""
    members = {**schema["properties"], **properties}
    others = {name: value for name, value in schema.items() if name != _CLASS}
    return {**others, "required": [*members], "properties": members}


def _of(kind: Any) -> _Schema:
    """Return the schema of a value of a type, as ``dataclasses.asdict`` and JSON show it."""
    if kind in _PRIMITIVES:
        return _PRIMITIVES[kind]
    if kind in _PLAIN:
        return _PLAIN[kind]()
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        kinds = [_of(one) for one in arguments]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if origin in (tuple, list):
        if len(arguments) > 1 and arguments[1] is not Ellipsis:
            return {"type": "array", "prefixItems": [_of(one) for one in arguments], "items": False}
        return _array(_of(arguments[0]))
    if origin is dict:
        return {"type": "object", "additionalProperties": _of(arguments[1])}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    if is_dataclass(kind):
        return _of_fields(kind)
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple, which JSON shows as a list
        hints = typing.get_type_hints(kind)
        names = ", ".join(hints)
        return {"type": "array", "prefixItems": [_of(one) for one in hints.values()], "items": False, "title": names}
    raise AssertionError(f"no schema for {kind}")


def _of_fields(kind: Any) -> _Schema:
    hints = typing.get_type_hints(kind, vars(sys.modules[kind.__module__]))
    described = _descriptions(kind.__doc__ or "")
    members = {}
    for field in fields(kind):
        member = _of(hints[field.name])
        members[field.name] = _said(member, described[field.name]) if field.name in described else member
    summary = (kind.__doc__ or "").strip().split("\n\n")[0]
    return {_CLASS: kind.__name__, "title": " ".join(summary.split()), **_object(**members)}


def _with_definitions(schema: _Schema) -> _Schema:
    """Return a schema with the objects of classes below ``$defs``, each once."""
    definitions: dict[str, _Schema] = {}

    def moved(part: Any) -> Any:
        if isinstance(part, list):
            return [moved(one) for one in part]
        if not isinstance(part, dict):
            return part
        plain = {name: moved(value) for name, value in part.items() if name not in (_CLASS, "description")}
        said = {"description": part["description"]} if isinstance(part.get("description"), str) else {}
        if not isinstance(part.get(_CLASS), str):
            if "description" in part:
                plain["description"] = said.get("description") or moved(part["description"])
            return plain
        name = part[_CLASS]
        assert definitions.setdefault(name, plain) == plain, f"two classes {name}"
        return {"$ref": f"#/$defs/{name}", **said}

    own = moved(schema)
    return {**own, "$defs": dict(sorted(definitions.items()))} if definitions else own


def _descriptions(doc: str) -> dict[str, str]:
    """Return what the section "Attributes" of a docstring says of each name."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in doc.partition("----------\n")[2].splitlines():
        if re.fullmatch(r" {4}\w+(, \w+)*", line):
            names = line.strip().split(", ")
        elif not line.startswith(" " * 8):
            names = []
        for name in names if line.startswith(" " * 8) else ():
            found[name] = f"{found.get(name, '')} {line.strip()}".strip().replace("`", "")
    return found


def _moment() -> _Schema:
    schema = _with(_of_fields(analyze.Moment), fragmentation=_nullable({"type": "number"}))
    members = schema["properties"]
    unknown = {name: _nullable(members[name]) for name in ("reserved", "largest_free")}
    return _with(schema, **unknown)


def _device_memory() -> _Schema:
    schema = _of_fields(analyze.DeviceMemory)
    return _with(schema, peak_reserved=_nullable(schema["properties"]["peak_reserved"]))


def _tree() -> _Schema:
    columns = {
        **dict.fromkeys(("parent", "line", "self_size", "total_size", "count"), _array(_INTEGER)),
        **dict.fromkeys(("name", "file"), _array(_TEXT)),
    }
    tree = _object(index=_INTEGER, grouping=_of(analyze.Grouping), **columns)
    return _said(tree, "Call sites as columns, an entry each; node 0 is the root.")


def _categories() -> _Schema:
    share = _with(_of_fields(analyze.CategoryRule), size=_INTEGER, count=_INTEGER)
    return _object(inferred=_FLAG, at_peak=_array(share))


def _modules() -> _Schema:
    held, without = _array(_of(analyze.ModuleMemory)), _array(_of(analyze.WithoutModuleShare))
    schema = _object(size=_INTEGER, with_module=_INTEGER, named=_INTEGER, held=held, without=without)
    described = _descriptions(analyze.Modules.__doc__ or "")
    return _with(schema, **{name: _said(one, described[name]) for name, one in schema["properties"].items()})


def _steps() -> _Schema:
    return _object(count=_INTEGER, source=_TEXT, confidence=_of(analyze.Confidence))


def _leaks() -> _Schema:
    found = _array(_of_fields(analyze.Leak))
    verdict, doubt = _of(analyze.LeakVerdict), _nullable(_of(analyze.Doubt))
    return _object(
        device=_INTEGER,
        verdict=verdict,
        doubt=doubt,
        steps=_steps(),
        leaks=found,
        unclear=found,
        unused_growth=_INTEGER,
    )


def _ledger() -> _Schema:
    return _with(_of_fields(analyze.Ledger), named={"type": "number"})


def _diagnosis() -> _Schema:
    usage, advice = _array(_of(analyze.Usage)), _nullable(_of(analyze.Advice))
    schema = _object(
        tree=_tree(),
        categories=_categories(),
        modules=_nullable(_of(analyze.Modules)),
        by_stream=usage,
        by_pool=usage,
        fragmentation=_array(_of(analyze.Fragmentation)),
        leaks=_leaks(),
        outside=_of(analyze.Outside),
        settings=advice,
        advice=_array(_TEXT),
        remedies=_array(_of(analyze.Remedy)),
    )
    described = _descriptions(Diagnosis.__doc__ or "")
    return _with(
        schema, **{name: _said(one, described[name]) for name, one in schema["properties"].items() if name in described}
    )


def _frame() -> _Schema:
    return _object(file=_TEXT, function=_TEXT, line=_INTEGER)


def _failure() -> _Schema:
    schema = _of_fields(analyze.Failure)
    return _with(schema, frames=_said(_array(_frame()), schema["properties"]["frames"]["description"]))


_PLAIN: Final[dict[Any, Callable[[], _Schema]]] = {
    analyze.Moment: _moment,
    analyze.DeviceMemory: _device_memory,
    analyze.Categories: _categories,
    analyze.Leaks: _leaks,
    analyze.Modules: _modules,
    analyze.Ledger: _ledger,
    analyze.DiffRow: lambda: _with(_of_fields(analyze.DiffRow), change=_INTEGER),
}
"""Types whose plain form has other fields than they have."""


def _snapshot() -> _Schema:
    summary = _of_fields(analyze.Summary)
    device = _with(_device_memory(), diagnosis=_diagnosis(), ledger=_nullable(_ledger()))
    report = _with(
        summary,
        devices=_array(device),
        findings=_said(_array(_of(analyze.LintFinding)), "Faults of the file itself."),
    )
    process = _with(report, process=_said(_TEXT, "Which process of the recorded program."))
    whole = _with(
        {**report, "properties": {"schema": {"const": "cudatool.snapshot/1"}, **report["properties"]}},
        cards=_said(_array(_of(NvmlDevice)), "Devices of this machine, now."),
    )
    several = _said(_array(process), "The processes that the program started, if they were recorded.")
    return {**whole, "properties": {**whole["properties"], "processes": several}}


def _replay() -> _Schema:
    tried = _with(
        _of(analyze.WhatIfOutcome),
        device=_INTEGER,
        recorded=_nullable(_of(analyze.Record)),
        replay_of_recorded=_nullable(_of(analyze.WhatIfOutcome)),
    )
    own = _of_fields(analyze.Advice)["properties"]
    advised = {
        "best": _said(_FLAG, "Whether this setting is recommended; absent if --conf named the settings."),
        "gain_bytes": _nullable(own["gain_bytes"]),
        **{name: own[name] for name in ("withheld", "left_out")},
    }
    tried = {**tried, "properties": {**tried["properties"], **advised}}
    checked = _with(_of(analyze.ReplayCheck), is_exact=_nullable(_FLAG))
    return _array({"anyOf": [tried, checked]})


def _ptx() -> _Schema:
    access = _said(_TEXT, "r, w and a: read, written, updated atomically.")
    widths = _array(_INTEGER)
    field = _object(
        offset=_INTEGER,
        access=access,
        loaded_access=access,
        read_widths=widths,
        write_widths=widths,
        atomic_widths=widths,
        escapes=_FLAG,
    )
    parameter = _object(
        name=_TEXT, source_name=_nullable(_TEXT), offset=_INTEGER, size=_INTEGER, type=_TEXT, fields=_array(field)
    )
    kernel = _object(
        kernel=_TEXT,
        target=_TEXT,
        name=_TEXT,
        parameters=_array(parameter),
        variables=_array(_object(name=_TEXT, access=access, loaded_access=access)),
        doubts=_array(_of(AccessDoubt)),
        instructions={"type": "object", "propertyNames": _of(InstructionClass), "additionalProperties": _INTEGER},
        opcodes={"type": "object", "additionalProperties": _INTEGER},
        registers={"type": "object", "additionalProperties": _INTEGER},
        shared_bytes=_INTEGER,
        local_bytes=_INTEGER,
        constant_bytes=_INTEGER,
        max_threads=_nullable(_INTEGER),
        features=_array(_of(Feature)),
        calls=_array(_TEXT),
        external_calls=_array(_TEXT),
        software_device=_object(runs=_FLAG, reason=_TEXT),
    )
    return _object(schema={"const": "cudatool.ptx/1"}, file=_TEXT, kernels=_array(kernel))


def _devices() -> _Schema:
    device = _object(
        device=_INTEGER,
        kind=_TEXT,
        name=_TEXT,
        compute_capability=_TEXT,
        multiprocessors=_INTEGER,
        total_memory=_said(_INTEGER, "Bytes."),
    )
    return _object(schema={"const": "cudatool.devices/1"}, device=_TEXT, devices=_array(device))


def _diff() -> _Schema:
    return _object(schema={"const": "cudatool.diff/1"}, before=_TEXT, after=_TEXT, devices=_array(_of(analyze.Diff)))


def _leaks_command() -> _Schema:
    of_process = {
        "source": _TEXT,
        "devices": _array(_leaks()),
        "pinned": _nullable(_leaks()),
        "not_looked_at": _array(_TEXT),
    }
    return _object(schema={"const": "cudatool.leaks/1"}, **of_process, processes=_array(_object(**of_process)))


def _live() -> _Schema:
    head = {"schema": {"const": "cudatool.live/1"}, "source": _TEXT, "device": _TEXT, "ending": _of(Ending)}
    return _with(_of(LivePicture), **head)


def _oom() -> _Schema:
    failure = _with(_failure(), source=_TEXT, process=_TEXT)
    return _object(schema={"const": "cudatool.oom/1"}, failures=_array(failure))


def _fleet() -> _Schema:
    runs, compared = _array(_of(RunReport)), _nullable(_of(Comparison))
    return _object(schema={"const": "cudatool.fleet/1"}, dataset=_TEXT, runs=runs, against=compared)


def _query() -> _Schema:
    texts = _array(_TEXT)
    rows = _said(_array({"type": "array"}), "A list of values for each row, in the order of the columns.")
    return _object(schema={"const": "cudatool.query/1"}, columns=texts, types=texts, rows=rows)


def _sanitize() -> _Schema:
    schema: _Schema = json.loads(files("cudatool.sanitize.report").joinpath("schema.json").read_text("utf-8"))
    return schema


COMMANDS: Final[dict[str, Callable[[], _Schema]]] = {
    "devices": _devices,
    "diff": _diff,
    "fleet": _fleet,
    "leaks": _leaks_command,
    "live": _live,
    "oom": _oom,
    "ptx": _ptx,
    "query": _query,
    "replay": _replay,
    "sanitize": _sanitize,
    "snapshot": _snapshot,
}
"""Every command that prints JSON."""


def schema_of_command(command: str) -> dict[str, Any]:
    """Return the JSON schema of what a command prints with ``--json``.

    Raises
    ------
    UsageError
        It prints no JSON, or there is no such command.
    """
    if command not in COMMANDS:
        near = did_you_mean(command, COMMANDS)
        raise UsageError(f"{command} prints no JSON; {near or 'these do: ' + ', '.join(COMMANDS)}")
    return {"$schema": _DIALECT, "title": f"cudatool {command} --json", **_with_definitions(COMMANDS[command]())}
