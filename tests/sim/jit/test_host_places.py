"""Where the maps of device memory have room for the host's."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cudatool.sim.jit import HostPlaces

ROOM = range(1 << 45, (1 << 45) + (1 << 20))


def _places(places: HostPlaces) -> dict[int, tuple[int, int]]:
    """Return size and place of each range, as native code finds them."""
    rows = [places._table[1 + 3 * i : 4 + 3 * i] for i in range(places.count)]
    assert rows == sorted(rows)  # which it looks through by halves
    return {address: (size, place) for address, size, place in rows}


@given(st.lists(st.tuples(st.integers(1, 20_000), st.integers(1, 30_000)), max_size=20))
def test_no_two_ranges_share_a_place_and_each_place_stands_for_its_address(gaps_and_sizes):
    ranges, end = {}, 1 << 40
    for gap, size in gaps_and_sizes:
        ranges[end + gap] = size
        end += gap + size
    places = HostPlaces(ranges, ROOM)
    found = _places(places)
    assert ranges == {address: size for address, (size, _) in found.items()}
    used = sorted((place, place + size) for size, place in found.values() if place < len(ROOM))
    assert all(stop <= len(ROOM) for _, stop in used)
    # A run of bytes that were accessed is of one range: pages that touch would be joined.
    assert all(stop // 4096 + 2 <= start // 4096 for (_, stop), (start, _) in pairwise(used))
    for address, (size, place) in found.items():
        if place < len(ROOM):
            assert address % 4096 == place % 4096
            at = (address, address + size - 1)
            assert at == tuple(places.address_at(ROOM.start + place + offset) for offset in (0, size - 1))
            assert [(address, size, 3)] == places.footprint([(ROOM.start + place, size, 3)])


def test_addresses_outside_of_the_room_stand_for_themselves():
    places = HostPlaces({1 << 40: 16}, ROOM)
    assert [ROOM.start - 1, ROOM.stop] == [places.address_at(one) for one in (ROOM.start - 1, ROOM.stop)]


def test_as_many_ranges_as_fit_have_a_place():
    places = HostPlaces({1 << 40: len(ROOM) - 4096, 2 << 40: 100, 3 << 40: 4097}, ROOM)
    placed = {address: place < len(ROOM) for address, (_, place) in _places(places).items()}
    assert {1 << 40: False, 2 << 40: True, 3 << 40: True} == placed
    assert not places.had_no_room  # as nothing was used
