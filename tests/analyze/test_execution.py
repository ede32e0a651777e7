from __future__ import annotations

from typing import Any

from records import trace

from cudatool import analyze
from cudatool.trace.events import CopyFlag, Kind, StreamFlag


def launch(correlation: int, name: str, stream: int = 1) -> tuple[Kind, dict[str, Any]]:
    return Kind.KERNEL_LAUNCH, {"correlation": correlation, "name": name, "stream": stream}


def ran(correlation: int, start: int, end: int, stream: int = 1) -> tuple[Kind, dict[str, Any]]:
    return Kind.EXECUTION, {"correlation": correlation, "stream": stream, "aux0": start, "aux1": end}


def test_executions_are_tied_to_their_calls_and_sorted_by_start() -> None:
    made = trace(launch(7, "a"), launch(8, "b"), ran(8, 50, 60), ran(7, 10, 30), ran(99, 70, 80))
    found = analyze.operations(made)
    assert [(0, 10, 30), (1, 50, 60), (-1, 70, 80)] == list(
        zip(found.call.tolist(), found.start.tolist(), found.end.tolist(), strict=True)
    )


def test_kernels_are_summed_by_name_the_slowest_first() -> None:
    made = trace(launch(1, "quick"), launch(2, "slow"), launch(3, "slow"), ran(1, 0, 5), ran(2, 5, 15), ran(3, 20, 50))
    # The helper gives every event its own name, as a trace would not.
    made.names = ["", "quick", "slow"]
    made.records["name"][2] = 2
    assert (analyze.KernelTotal("slow", 2, 40), analyze.KernelTotal("quick", 1, 5)) == analyze.kernels(
        made, analyze.operations(made)
    )


def test_a_kernel_that_was_never_timed_has_no_time() -> None:
    made = trace(launch(1, "k"))
    assert (analyze.KernelTotal("k", 1, None),) == analyze.kernels(made, analyze.operations(made))


def test_copies_are_summed_by_direction() -> None:
    def copy(correlation: int, size: int, flags: CopyFlag) -> tuple[Kind, dict[str, Any]]:
        return Kind.MEMCPY, {"correlation": correlation, "size": size, "flags": flags}

    made = trace(
        copy(1, 100, CopyFlag.DESTINATION_DEVICE | CopyFlag.SOURCE_PAGEABLE),
        copy(2, 50, CopyFlag.DESTINATION_DEVICE),
        copy(3, 400, CopyFlag.SOURCE_DEVICE | CopyFlag.DESTINATION_DEVICE),
        (Kind.MEMSET, {"correlation": 4, "size": 10, "flags": CopyFlag.DESTINATION_DEVICE}),
        ran(1, 0, 3),
        ran(2, 3, 8),
    )
    assert (
        analyze.Copies("device to device", 1, 400, None),
        analyze.Copies("host to device", 2, 150, 8),
        analyze.Copies("fill", 1, 10, None),
    ) == analyze.copies(made, analyze.operations(made))


def test_a_stream_is_busy_for_the_union_of_its_work() -> None:
    made = trace(
        (Kind.STREAM_CREATE, {"stream": 1, "flags": StreamFlag.LEGACY_DEFAULT}),
        (Kind.STREAM_CREATE, {"stream": 2, "address": 0xAB}),
        *(ran(0, 0, 10), ran(0, 5, 8), ran(0, 9, 20), ran(0, 100, 101)),
    )
    found = analyze.streams(made, analyze.operations(made))
    assert [("default stream", 4, 21), ("stream 2", 0, 0)] == [(s.label, s.operations, s.busy) for s in found]
