"""The allocator settings of a recorded program, if its file has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cudatool.analyze.requests import peak_reserved
from cudatool.errors import ConfigError, FileFormatError
from cudatool.memory.settings import OWN_VARIABLE, PYTORCHS_VARIABLE, UNLIMITED, Settings, setting_texts
from cudatool.memory.snapshot import allocator_settings, divisions_of
from cudatool.trace.events import Kind
from cudatool.trace.libraries import Library, libraries_of
from cudatool.trace.model import Trace

__all__ = ["recorded_settings", "settings_variable", "torch_settings"]


def recorded_settings(trace: Trace) -> tuple[Settings, str]:
    """Return the settings of a recording, and a sentence that says where they come from, empty for an RMM log.

    PyTorch writes them into a snapshot, except for what a program sets later; our own traces have them in the header,
    and an event where the program set a memory fraction.

    Raises
    ------
    FileFormatError
        The file's settings have another type than PyTorch writes.
    """
    settings, where = _stated(trace)
    if (fraction := _set_by_program(trace)) is not None:
        settings = _with_fraction(settings, fraction)
        where += f"; the program set a memory fraction of {fraction:g}"
    return settings, where


def settings_variable(trace: Trace) -> str:
    """Return the environment variable by which the allocator of a recorded program is set."""
    kind = trace.header.get("device_kind")  # of a recording of ours
    is_pytorchs = kind is None or (kind != "sim" and Library.PYTORCH in libraries_of(trace))
    return PYTORCHS_VARIABLE if is_pytorchs else OWN_VARIABLE


def _stated(trace: Trace) -> tuple[Settings, str]:
    if trace.header.get("requests_to") == "rmm":
        return Settings(), ""  # its allocators have none of PyTorch's
    stated: Mapping[str, Any] = getattr(trace, "settings", None) or {}
    conf = stated.get("PYTORCH_CUDA_ALLOC_CONF", trace.header.get("allocator_conf"))
    if not stated and conf is None and "device_kind" in trace.header:
        return Settings(), "recorded with the default allocator settings"
    if not stated and conf is None:
        return Settings(), "the file does not say which settings applied: PyTorch's defaults are assumed"
    try:
        settings = Settings.parse(str(conf or ""))
        where = "settings as the file states them"
    except ConfigError as error:
        settings = Settings()
        where = f"the file's settings cannot be read ({error}): PyTorch's defaults are assumed"
    if stated:
        limit = stated.get("max_split_size", -1)
        try:
            settings = replace(
                settings,
                max_split_size=limit if isinstance(limit, int) and limit > 0 else UNLIMITED,
                garbage_collection_threshold=float(stated.get("garbage_collection_threshold") or 0.0),
                expandable_segments=bool(stated.get("expandable_segments", settings.expandable_segments)),
                roundup_power2_divisions=divisions_of(stated),
            )
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise FileFormatError(trace.source, f"its allocator settings make no sense ({error})") from error
    fraction = trace.header.get("memory_fraction")  # set by the program: no snapshot has it
    if fraction and settings.per_process_memory_fraction is None:
        settings = _with_fraction(settings, fraction)
    return settings, where


def _with_fraction(settings: Settings, fraction: float) -> Settings:
    name = "per_process_memory_fraction"
    texts = setting_texts(settings.text) | {name: f"{name}:{fraction}"}
    text = ",".join(text for one, text in texts.items() if one != name or fraction < 1.0)
    return replace(settings, per_process_memory_fraction=fraction if fraction < 1.0 else None, text=text)


def _set_by_program(trace: Trace) -> float | None:
    """Return the memory fraction that the program set last, if it held for all that was recorded on all devices.

    It did not if more was ever reserved: that was before it was set.
    """
    events = trace.of_kind(Kind.MEMORY_FRACTION)
    fractions = events["aux0"].view(np.float64)
    last = {
        device: (fraction, total)
        for device, fraction, total in zip(
            events["device"].tolist(), fractions.tolist(), events["size"].tolist(), strict=True
        )
    }
    if len({fraction for fraction, _ in last.values()}) != 1:
        return None
    held = all(peak_reserved(trace, device) <= fraction * total for device, (fraction, total) in last.items())
    fraction = fractions.item(-1)
    return fraction if held and 0.0 < fraction <= 1.0 else None


def torch_settings(trace: Trace) -> dict[str, Any]:
    """Return the settings of a recording in the schema of ``torch.cuda.memory._snapshot()["allocator_settings"]``.

    None are returned for an RMM log: its allocators have none of PyTorch's.

    Raises
    ------
    FileFormatError
        As :func:`recorded_settings` does.
    """
    if trace.header.get("requests_to") == "rmm":
        return {}
    settings, _ = recorded_settings(trace)
    text = str(trace.header.get("allocator_conf") or "")  # as it was given
    return {**allocator_settings(settings), "PYTORCH_CUDA_ALLOC_CONF": text}
