"""What is written in C: regions, memory that goes back to its owner with the last array in it; and launchers."""

from __future__ import annotations

import gc
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from cudatool.runtime._native import Launcher, Region, address_of


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


def test_forked_process_gives_nothing_back_but_what_is_its_own() -> None:
    program = """
import os
from cudatool.runtime._native import Region
class Owner:
    def free(self, address): print(address, flush=True)
before = Region(1, 16, Owner())
if not os.fork():
    own = Region(2, 16, Owner())
    del before, own
    os._exit(0)
os.wait()
del before
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "2\n1\n" == done.stdout, done.stderr


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
    with pytest.raises(RuntimeError, match="cannot be initialized again"):
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


def launcher(parameters: list[tuple[int, int]]) -> Launcher:
    def convert(index: int, argument: object) -> bytes:
        raise TypeError(argument)

    return Launcher(1, 1, parameters, type(None), np.generic, convert)


def test_launcher_that_was_never_made_launches_nothing() -> None:
    with pytest.raises(RuntimeError, match="no function"):
        Launcher.__new__(Launcher).launch((1, 1, 1), (1, 1, 1), 0, 0, ())


@pytest.mark.parametrize("parameters", [[(-1, 4)], [(0, 0)], [(0, 1 << 40)], [(sys.maxsize, 1)]])
def test_launcher_refuses_parameters_that_no_kernel_has(parameters: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="a parameter has a size"):
        launcher(parameters)


def test_launcher_cuts_no_number_off() -> None:
    one = (1, 1, 1)
    for grid, block, shared in [((1 << 32, 1, 1), one, 0), (one, (1, 1, 1 << 32), 0), (one, one, 1 << 32)]:
        with pytest.raises(OverflowError, match="32 bits"):
            launcher([]).launch(grid, block, shared, 0, ())


def test_bytes_between_parameters_are_zero() -> None:
    assert b"\x01" + bytes(7) + b"\xff" * 8 == launcher([(0, 1), (8, 8)]).pack((True, -1))


class _Clears:
    """A number that empties a list when it is asked for its value, or does something else."""

    def __init__(self, value: int, action: object) -> None:
        self.value, self.action = value, action

    def __index__(self) -> int:
        self.action()  # type: ignore[operator]
        return self.value


def test_launcher_keeps_the_parameters_that_it_reads() -> None:
    parameters: list[object] = []
    parameters += [(_Clears(8 * i, parameters.clear), 8) for i in range(64)]
    made = Launcher(0, 0, parameters, int, float, lambda index, argument: b"")
    assert not parameters
    assert made.pack(tuple(range(64))) == b"".join(i.to_bytes(8, "little") for i in range(64))


def test_launcher_that_is_made_while_it_is_made_stays_as_it_is() -> None:
    launcher = Launcher.__new__(Launcher)
    inner = (0, 0, [(0, 4)], int, float, lambda index, argument: b"")
    again = (0, 0, [(_Clears(0, lambda: launcher.__init__(*inner)), 8)] * 2, int, float, None)
    with pytest.raises(RuntimeError, match="cannot be initialized again"):
        launcher.__init__(*again)
    assert launcher.pack((1,)) == b"\1\0\0\0"


@pytest.mark.parametrize("parameter", [[0, 8], None, 8])
def test_launcher_takes_tuples_alone_for_parameters(parameter: object) -> None:
    with pytest.raises(TypeError):
        Launcher(0, 0, [parameter], int, float, lambda index, argument: b"")


def test_region_that_is_made_while_it_is_made_keeps_its_owner() -> None:
    owner, region = Owner(), Region.__new__(Region)
    with pytest.raises(RuntimeError, match="cannot be initialized again"):
        region.__init__(8, _Clears(16, lambda: region.__init__(4, 2, owner)), Owner())
    assert (region.address, region.size, region.owner) == (4, 2, owner)
