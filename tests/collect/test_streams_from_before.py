"""Streams that a program has made before its recording begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cudatool import recording
from cudatool.trace.events import Kind, StreamFlag
from cudatool.trace.reader import read

CALLS: dict[str, Callable[[Any, Any, Any], tuple[Any, ...]]] = {
    "wait": lambda driver, stream, event: driver.cuStreamSynchronize(stream),
    "query": lambda driver, stream, event: driver.cuStreamQuery(stream),
    "record": lambda driver, stream, event: driver.cuEventRecord(event, stream),
    "wait for an event": lambda driver, stream, event: driver.cuStreamWaitEvent(stream, event, 0),
    "fill": lambda driver, stream, event: driver.cuMemsetD8Async(driver.cuMemAllocAsync(64, stream)[1], 1, 64, stream),
}


def ok(result: tuple[Any, ...]) -> Any:
    assert 0 == result[0], result
    return result[1] if len(result) == 2 else None


@pytest.mark.parametrize("call", CALLS)
def test_a_stream_is_recorded_as_what_it_is_whatever_uses_it_first(call: str, tmp_path: Path) -> None:
    """A stream that is taken for a blocking one is in order with the default stream, and its races are not found."""
    with recording.record(tmp_path / "none.ctrace", device="sim"):
        from cuda.bindings import driver

        ok(driver.cuInit(0))
        context = ok(driver.cuCtxCreate(None, 0, 0))
        event = ok(driver.cuEventCreate(0))
    stream = ok(driver.cuStreamCreateWithPriority(1, -2))
    with recording.record(tmp_path / "t.ctrace", device="sim"):
        ok(CALLS[call](driver, stream, event))
    (made,) = [row for row in read(tmp_path / "t.ctrace").of_kind(Kind.STREAM_CREATE) if row["address"] == int(stream)]
    assert (StreamFlag.NON_BLOCKING, 2**64 - 2) == (made["flags"], made["aux0"])
    ok(driver.cuCtxDestroy(context))
