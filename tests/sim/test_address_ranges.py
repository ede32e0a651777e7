"""Ranges of addresses that one thread changes while another looks one up, as who watches the driver's calls does."""

from __future__ import annotations

import threading
from collections.abc import Callable

from cudatool.sim.allocations import AddressRanges


class Range:
    """A range that has `meanwhile` done whenever one of the numbers that it gives as its address is dropped."""

    size = 16

    def __init__(self, address: int) -> None:
        def dropped(_: int) -> None:
            self.meanwhile()

        self.meanwhile: Callable[[], None] = lambda: None
        self._address, self._type = address, type("Address", (int,), {"__del__": dropped})

    @property
    def address(self) -> int:
        return self._type(self._address)


def test_range_is_found_while_another_thread_removes_one() -> None:
    ranges: AddressRanges[Range] = AddressRanges()
    first, last = Range(16), Range(48)
    for one in (first, Range(32), last):
        ranges.add(one)
    found, threads = [], []

    def look() -> None:
        found.append(
            (ranges.look_up(ranges.at, 48), ranges.look_up(ranges.holding, 50), ranges.look_up(ranges.before, 60))
        )

    def meanwhile() -> None:  # also between the removal of the address and that of the range
        if threading.current_thread() is threading.main_thread():
            threads.append(threading.Thread(target=look))
            threads[-1].start()
            threads[-1].join(0.1)  # not for ever: it may wait for the removal

    first.meanwhile = meanwhile
    ranges.remove(first)
    for thread in threads:
        thread.join()
    assert threads
    assert [(last, last, last)] * len(threads) == found
