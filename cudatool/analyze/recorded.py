"""The allocator settings that were in force when something was recorded, as far as its file says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cudatool.errors import ConfigError, FileFormatError
from cudatool.memory.settings import UNLIMITED, Settings
from cudatool.memory.snapshot import allocator_settings, divisions_of
from cudatool.trace.model import Trace

__all__ = ["recorded_settings", "torch_settings"]


def recorded_settings(trace: Trace) -> tuple[Settings, str]:
    """Return the settings of a recording, and a sentence that says where they come from, empty for an RMM log.

    PyTorch writes them into a snapshot, except for what a program sets later; our own traces have them in the header.

    Raises
    ------
    FileFormatError
        What the file says of them is of another type than PyTorch writes.
    """
    if trace.header.get("format") == "rmm-log":
        return Settings(), ""  # its allocators have none of PyTorch's
    stated: Mapping[str, Any] = getattr(trace, "settings", None) or {}
    conf = stated.get("PYTORCH_CUDA_ALLOC_CONF", trace.header.get("allocator_conf"))
    if not stated and conf is None and "device_kind" in trace.header:
        return Settings(), "recorded with the default allocator settings"
    if not stated and conf is None:
        return Settings(), "the file does not say which settings were in force: PyTorch's defaults are assumed"
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
        text = f"{settings.text},per_process_memory_fraction:{fraction}".strip(",")
        settings = replace(settings, per_process_memory_fraction=fraction, text=text)
    return settings, where


def torch_settings(trace: Trace) -> dict[str, Any]:
    """Return the settings of a recording in the schema of ``torch.cuda.memory._snapshot()["allocator_settings"]``.

    Raises
    ------
    FileFormatError
        As :func:`recorded_settings` does.
    """
    settings, _ = recorded_settings(trace)
    text = str(trace.header.get("allocator_conf") or "")  # as it was given
    return {**allocator_settings(settings), "PYTORCH_CUDA_ALLOC_CONF": text}
