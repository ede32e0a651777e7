"""The calls that order work, in the words of the library that a program uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cudatool.trace.events import Api

__all__ = ["CALLS", "OrderingCalls"]


@dataclass(frozen=True, slots=True)
class OrderingCalls:
    """Code that a program can copy.

    Attributes
    ----------
    synchronize
        Lets the host wait for a stream.
    wait
        Lets one stream wait for all that another one was given; empty where that takes an event.
    wait_event
        Lets a stream wait for an event.
    record
        Records that event; empty where its name is the same everywhere (``event.record``).
    """

    synchronize: str
    wait: str
    wait_event: str
    record: str

    def after_event(self, work: str) -> str:
        """Return what makes a consumer wait for an event recorded after `work`."""
        record = f" (`{self.record}`)" if self.record else ""
        return f"`{self.wait_event}` with the event recorded after {work}{record}"

    def after_all(self, work: str) -> str:
        """Return what makes a consumer wait for a producer, whose last operation that matters is `work`."""
        event = self.after_event(work)
        return f"`{self.wait}`, or {event}" if self.wait else event


_OF_STREAMS: Final = OrderingCalls(
    "stream.synchronize()", "consumer.wait_stream(producer)", "consumer.wait_event(event)", ""
)

CALLS: Final[dict[int, OrderingCalls]] = {
    Api.UNKNOWN: _OF_STREAMS,
    Api.CUDATOOL: _OF_STREAMS,
    Api.TORCH: _OF_STREAMS,
    Api.CUDA_CORE: OrderingCalls(
        "stream.sync()", "consumer.wait(producer)", "consumer.wait(event)", "event = producer.record()"
    ),
    Api.CUDA_BINDINGS: OrderingCalls(
        "cuStreamSynchronize(stream)", "", "cuStreamWaitEvent(consumer, event, 0)", "cuEventRecord(event, producer)"
    ),
    Api.NUMBA: OrderingCalls("stream.synchronize()", "", "event.wait(consumer)", "event.record(producer)"),
}
"""By the library through which the stream was made that must wait, or that the host must wait for."""
