"""What ``cudatool live --plain`` and ``--json`` print: whole sentences in order, without drawings and positions."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from cudatool.analyze.live_rows import LiveDevice, LiveKernel, LivePicture, LiveSite, LiveStream
from cudatool.cli._watched import Watched
from cudatool.text import printable, short_names
from cudatool.trace.model import Ending
from cudatool.units import counted, format_bytes, format_time

__all__ = ["ENDINGS", "as_json", "as_lines", "change", "clock", "device_words", "ledger_rows", "rate"]

ENDINGS: Final = {
    Ending.CLOSED: "the recording ended",
    Ending.GROWING: "the recording goes on",
    Ending.KILLED: "the program was killed, or left by os._exit; no event is missing",
    Ending.STOPPED: "the recording stopped early; what happened later is missing",
    Ending.CUT: "the file ends early; what was recorded later is missing",
    Ending.DAMAGED: "the file is damaged; what comes after the damage was not read",
}


def clock(time_ns: int) -> str:
    """Return a duration as hours, minutes and seconds: ``"0:12:31"``."""
    seconds = max(time_ns, 0) // 10**9
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def change(size: int) -> str:
    """Return a change in bytes with its sign, ``"0 B"`` for none."""
    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)


def rate(per_second: float) -> str:
    """Return how often something happens each second, as a number: ``"1,200"``, ``"0.4"``."""
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.1f}".removesuffix(".0")


def device_words(device: LiveDevice) -> str:
    """Return the memory of a device in words."""
    parts = [
        f"{format_bytes(device.allocated)} allocated (peak {format_bytes(device.peak_allocated)})",
        f"{format_bytes(device.reserved)} reserved (peak {format_bytes(device.peak_reserved)})",
    ]
    if device.charged is not None:
        parts.append(f"{format_bytes(device.charged)} charged by the driver")
    if device.total is not None:
        parts.append(f"of {format_bytes(device.total)}")
    if device.ooms:
        parts.append(f"out of memory {counted(device.ooms, 'time')}")
    return ", ".join(parts)


def ledger_rows(device: LiveDevice) -> list[tuple[int, str, str]]:
    """Return what all the memory is that the driver charges: bytes, who holds them, and as what."""
    rows = [(line.size, *line.words) for line in device.ledger]
    return [*rows, (device.unknown, "unknown", "")] if device.unknown else rows


def as_json(watched: Watched, picture: LivePicture) -> dict[str, Any]:
    """Return a picture as plain data."""
    return {
        "schema": "cudatool.live/1",
        "source": watched.path,
        "device": watched.device,
        "ending": str(watched.ending),
        **asdict(picture),
    }


def as_lines(watched: Watched, picture: LivePicture) -> list[str]:
    """Return a picture as lines of text."""
    lines = [
        f"After {clock(picture.time_ns)}: {counted(picture.events, 'event')}, {rate(picture.per_second)} a second; "
        f"{ENDINGS[watched.ending]}."
    ]
    lines += [f"Device {device.device}: {device_words(device)}." for device in picture.devices]
    if not picture.events:
        lines.append("No events yet." if watched.ending is Ending.GROWING else "No events.")
    for device in picture.devices:
        if held := ledger_rows(device):
            lines.append(f"Memory that the driver charges, device {device.device}:")
            words = (f"{owner}, {how}" if how else owner for _, owner, how in held)
            sizes = (format_bytes(size) for size, _, _ in held)
            lines += [f"{n}. {who}: {size}" for n, (who, size) in enumerate(zip(words, sizes, strict=True), 1)]
    names = short_names([kernel.name for kernel in picture.kernels])
    where = "on the device (simulated)" if watched.is_simulated else "on the device"
    kernels = [_kernel(name, kernel, where) for name, kernel in zip(names, picture.kernels, strict=True)]
    for title, rows, count in (
        ("Call sites by live bytes", [_site(site, picture) for site in picture.sites], picture.site_count),
        ("Kernels by launches a second", kernels, picture.kernel_count),
        ("Streams by operations a second", [_stream(stream) for stream in picture.streams], picture.stream_count),
    ):
        if rows:
            more = f", {len(rows)} of {count:,}" if count > len(rows) else ""
            lines.append(f"{title}{more}:")
            lines += [f"{number}. {row}" for number, row in enumerate(rows, 1)]
    return [printable(line) for line in lines]


def _site(site: LiveSite, picture: LivePicture) -> str:
    since = f", {change(site.change)} since {clock(picture.marked_ns)}" if picture.marked_ns else ""
    grows = "; grows period after period" if site.grows else ""
    return f"{site.label}: {format_bytes(site.bytes)} in {counted(site.blocks, 'block')}{since}{grows}"


def _kernel(name: str, kernel: LiveKernel, where: str) -> str:
    time = f", {format_time(kernel.time_ns)} {where}" if kernel.time_ns else ""
    return f"{name}: {rate(kernel.per_second)} a second, {counted(kernel.launches, 'launch')}{time}"


def _stream(stream: LiveStream) -> str:
    return f"{stream.label}: {rate(stream.per_second)} a second, {counted(stream.operations, 'operation')}"
