"""Regions: memory that goes back to its owner with the last array in it."""

from __future__ import annotations

import gc
import sys

import ml_dtypes
import numpy as np
import pytest

from cudatool._native import Region, address_of


class Owner:
    def __init__(self) -> None:
        self.freed: list[int] = []
        self.kept: object = None

    def free(self, address: int) -> None:
        self.freed.append(address)


class Derived(Region):
    __slots__ = ()


@pytest.mark.parametrize("kind", [Region, Derived])
def test_memory_goes_back_with_the_last_array_in_it(kind: type[Region]) -> None:
    owner = Owner()
    array = np.ndarray((4,), "f4", kind(0x1000, 16, owner))  # type: ignore[call-overload]
    view = array[1:]
    del array
    assert [] == owner.freed
    assert 0x1004 == view.ctypes.data
    del view
    assert [0x1000] == owner.freed


def test_array_beyond_the_region_is_refused() -> None:
    with pytest.raises(TypeError, match="buffer is too small"):
        np.ndarray((5,), "f4", Region(0x1000, 16))  # type: ignore[call-overload]


def test_region_and_owner_that_hold_each_other_are_collected() -> None:
    owner = Owner()
    freed, owner.kept = owner.freed, Region(0x1000, 16, owner)
    del owner
    gc.collect()
    assert [0x1000] == freed


def test_failure_to_free_is_told_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda failure: told.append(str(failure.exc_value)))

    def fail() -> None:
        held = Region(0x1000, 16, object())
        raise KeyError(held.size)

    with pytest.raises(KeyError, match="16") as caught:
        fail()
    caught.value.__traceback__ = None
    del caught
    gc.collect()
    assert ["'object' object has no attribute 'free'"] == told


def test_region_is_made_once_and_has_a_size() -> None:
    region = Region(0x1000, 16, Owner())
    with pytest.raises(RuntimeError, match="made anew"):
        region.__init__(0x2000, 16)  # type: ignore[misc]
    with pytest.raises(ValueError, match="not negative"):
        Region(0x1000, -1)
    assert (0x1000, 16) == (region.address, region.size)


@pytest.mark.parametrize(
    "dtype", ["?", "f2", "f4", "c16", ">i8", "M8[s]", "S3", "i4,f8", "V3", ml_dtypes.bfloat16], ids=str
)
def test_address_of_an_array_is_where_its_first_element_is(dtype):
    array = np.zeros((5, 6), dtype)
    views = [array, array.T, array[1:, 2:], array[::-1], array[2, 3, ...], np.broadcast_to(array, (3, 5, 6)), array[5:]]
    assert [view.ctypes.data for view in views] == [address_of(view) for view in views]
    laid = np.ndarray((4,), "f4", Region(0x1000, 16))
    assert 0x1004 == address_of(laid[1:])
    with pytest.raises(TypeError):
        address_of(7)
