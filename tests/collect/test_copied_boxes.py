"""Which bytes a copy of rows touches, against the driver's own structures and a walk over every row."""

from __future__ import annotations

import ctypes
import random

import pytest
from cuda.bindings import driver

from cudatool.collect.copied_boxes import MEMCPY_2D, MEMCPY_3D, Rows, copied_box, rows_of_box
from cudatool.collect.cupti_calls import DESCRIBED

HOST, DEVICE, ARRAY, UNIFIED = driver.CUmemorytype


def structure(kind: type, size: int, **fields: object) -> bytes:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return ctypes.string_at(made.getPtr(), size)


def test_a_copy_of_rows_has_the_rows_of_both_sides():
    given = structure(
        driver.CUDA_MEMCPY2D, MEMCPY_2D.size, srcMemoryType=HOST, srcHost=0x1000, srcPitch=256, srcXInBytes=8, srcY=2,
        dstMemoryType=DEVICE, dstDevice=0x9000, dstPitch=64, WidthInBytes=16, Height=4,
    )  # fmt: skip
    source, target, size = copied_box(given)
    assert (source.is_host, target.is_host, size) == (True, False, 64)
    assert source.rows == (Rows(0x1000 + 2 * 256 + 8, 16, 256, 4),)
    assert target.rows == (Rows(0x9000, 16, 64, 4),)


def test_a_copy_of_a_box_has_the_rows_of_each_slice_and_whole_slices_are_one_run():
    given = structure(
        driver.CUDA_MEMCPY3D, MEMCPY_3D.size, srcMemoryType=UNIFIED, srcDevice=0x1000, srcPitch=32, srcHeight=8, srcZ=1,
        dstMemoryType=DEVICE, dstDevice=0x9000, dstPitch=16, dstHeight=4, WidthInBytes=16, Height=4, Depth=2,
    )  # fmt: skip
    source, target, size = copied_box(given)
    assert (source.is_unified, target.is_unified, size) == (True, False, 128)
    assert source.rows == (Rows(0x1000 + 256, 16, 32, 4), Rows(0x1000 + 512, 16, 32, 4))
    assert target.rows == (Rows(0x9000, 128),)


def test_an_array_has_no_rows_and_what_is_no_structure_is_no_copy():
    given = structure(
        driver.CUDA_MEMCPY2D, MEMCPY_2D.size, srcMemoryType=ARRAY, srcArray=0x77, dstMemoryType=DEVICE, dstDevice=0x9000,
        WidthInBytes=16, Height=1,
    )  # fmt: skip
    source, target, _ = copied_box(given)
    assert (source.is_array, source.place, source.rows) == (True, 0x77, ())
    assert target.rows == (Rows(0x9000, 16),)
    assert copied_box(given[:-8]) is None
    assert copied_box(b"") is None


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_boxes_are_the_bytes_that_a_walk_over_them_meets(seed):
    draw = random.Random(seed)
    width, height, depth = (draw.choice((0, 1, 2, 5)) for _ in range(3))
    pitch = width + draw.choice((0, 3))
    slice_ = pitch * (height + draw.choice((0, 2)))
    walked = {z * slice_ + y * pitch + x for z in range(depth) for y in range(height) for x in range(width)}
    found = [
        address + row * stride + byte
        for address, size, stride, number in rows_of_box(0, (width, height, depth), pitch, slice_)
        for row in range(max(number, 1))
        for byte in range(size)
    ]
    assert sorted(walked) == sorted(found)


def test_the_structures_have_the_drivers_sizes():
    assert DESCRIBED["c"] == MEMCPY_2D.size == 128
    assert DESCRIBED["C"] == MEMCPY_3D.size == 200
