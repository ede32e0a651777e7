"""What textures read, as checkers and footprints see it."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cudatool.sim import jit
from cudatool.sim.jit import DefectCode, Instrument, texture
from cudatool.sim.jit.footprint import READ, WRITE
from cudatool.sim.textures import TextureRecord, describe

FLOAT, BYTE = 0x20, 0x01


@pytest.fixture
def memory() -> np.ndarray:
    """64 KiB that begin at a page: the numbers from 0 as floats."""
    whole = np.zeros((64 << 10) + 4096, np.uint8)
    region = whole[-whole.ctypes.data % 4096 :][: 64 << 10]
    region.view("f4")[:] = np.arange(16384)
    return region


def fetch(memory, ptx_kernel, record: TextureRecord, instruction: str, threads: int = 1, **options) -> list[jit.Found]:
    """Fetch at (thread + 0.5, 1.5), or what integer coordinates say; results lie from byte 32768 on, 16 for each."""
    body = f""".reg .b64 %a, %h; .reg .b32 %t, %r<5>; .reg .f32 %x, %y;
    mov.u32 %t, %tid.x; cvt.rn.f32.u32 %x, %t; add.f32 %x, %x, 0.5; mov.f32 %y, 1.5; mov.u32 %r4, 1;
    ld.param.u64 %h, [handle]; ld.param.u64 %a, [out]; mad.wide.u32 %a, %t, 16, %a;
    {instruction.replace("(xy)", "{%x, %y}").replace("(ij)", "{%t, %r4}")};
    st.global.v4.b32 [%a], {{%r0, %r1, %r2, %r3}}; ret;"""
    kernel = ptx_kernel(".param .u64 handle, .param .u64 out", body)
    params = (ctypes.c_uint64 * 2)(ctypes.addressof(record), memory[32768:].ctypes.data)
    return kernel.launch(
        jit.LaunchShape((1, 1, 1), (threads, 1, 1)), ctypes.addressof(params), jit.LaunchOptions(**options)
    )


FETCH = "tex.2d.v4.u32.f32 {%r0, %r1, %r2, %r3}, [%h, (xy)]"


@pytest.mark.parametrize(
    ("instruction", "linear", "expected"),
    [
        (FETCH, False, [(64, 4 * 8)]),
        ("tex.2d.v4.u32.s32 {%r0, %r1, %r2, %r3}, [%h, (ij)]", True, [(64, 4 * 8)]),
        ("tld4.r.2d.v4.u32.f32 {%r0, %r1, %r2, %r3}, [%h, (xy)]", False, [(64, 4 * 9), (128, 4 * 9)]),
        (FETCH, True, [(64, 4 * 8)]),  # at centres, what lies beside them has no share
    ],
)
def test_footprints_have_the_texels_that_a_fetch_reads(memory, ptx_kernel, instruction, linear, expected):
    record = describe(memory.ctypes.data, FLOAT, 1, 16, 16)
    record.linear = linear
    footprint = jit.Footprint(memory.ctypes.data, memory.nbytes)
    fetch(memory, ptx_kernel, record, instruction, threads=8, footprint=footprint)
    found = [(address - footprint.base, size, flags) for address, size, flags in footprint.ranges()]
    assert [*((at, size, READ) for at, size in expected), (32768, 128, WRITE)] == found


@pytest.mark.parametrize(("format_", "channels", "size"), [(BYTE, 1, 1), (BYTE, 2, 2), (BYTE, 4, 4), (FLOAT, 4, 4)])
def test_texels_behind_the_memory_are_reported_and_read_as_zero(memory, ptx_kernel, format_, channels, size):
    record = describe(memory.ctypes.data, format_, channels, 1024, 2)
    record.as_integer = 1
    shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, Instrument.MEMCHECK)
    shadow.allocated(memory.ctypes.data, record.row_bytes + 2 * channels * record.channel_bytes)
    shadow.allocated(memory.ctypes.data + 32768, 4096)
    memory[:32768] = 1
    found = fetch(memory, ptx_kernel, record, FETCH, threads=4, shadow=shadow)
    pieces = channels * record.channel_bytes // size
    assert [(DefectCode.INVALID, "read", size, 2 * pieces)] == [(f.defect, f.mode, f.size, f.count) for f in found]
    out = memory[32768:].view("u4")[:16].reshape(-1, 4)
    one = int.from_bytes(bytes([1]) * record.channel_bytes, "little")
    assert [one, one, 0, 0] == out[:, 0].tolist()


def test_texels_that_were_never_written_are_reported(memory, ptx_kernel):
    record = describe(memory.ctypes.data, FLOAT, 1, 16, 16)
    shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, Instrument.INITCHECK)
    shadow.allocated(memory.ctypes.data, memory.nbytes)
    shadow.written(memory.ctypes.data + 64, 12)
    found = fetch(memory, ptx_kernel, record, FETCH, threads=8, shadow=shadow)
    assert [(DefectCode.UNINITIALIZED, memory.ctypes.data + 76, 5)] == [(f.defect, f.address, f.count) for f in found]


def test_a_store_races_with_another_threads_fetch(memory, ptx_kernel):
    record = describe(memory[32768:].ctypes.data, FLOAT, 1, 16, 16)
    shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, Instrument.RACECHECK)
    found = fetch(memory, ptx_kernel, record, FETCH, threads=8, shadow=shadow)
    assert DefectCode.WRITE_AFTER_READ in {f.defect for f in found}


@pytest.mark.parametrize(
    ("first", "second", "expected"), [("st", "tex", {DefectCode.STALE_READ: 8}), ("tex", "st", {})]
)
def test_a_fetch_after_a_write_of_its_own_launch_is_reported_and_one_before_it_is_not(
    memory, ptx_kernel, first, second, expected
):
    """Each thread fetches the word that it alone writes: nothing races."""
    record = describe(memory.ctypes.data, FLOAT, 1, 16, 1)
    code = {
        "tex": "tex.1d.v4.u32.s32 {%r0, %r1, %r2, %r3}, [%h, {%t}]; st.global.v4.b32 [%a+32768], {%r0, %r1, %r2, %r3};",
        "st": "st.global.b32 [%b], %t;",
    }
    body = f""".reg .b64 %a, %b, %h; .reg .b32 %t, %r<5>; mov.u32 %t, %tid.x;
    ld.param.u64 %h, [handle]; ld.param.u64 %b, [out]; mad.wide.u32 %a, %t, 16, %b; mad.wide.u32 %b, %t, 4, %b;
    {code[first]} {code[second]} ret;"""
    kernel = ptx_kernel(".param .u64 handle, .param .u64 out", body)
    params = (ctypes.c_uint64 * 2)(ctypes.addressof(record), memory.ctypes.data)
    shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, Instrument.RACECHECK)
    for _ in range(2):  # what the launch before has written may be fetched
        found = kernel.launch(
            jit.LaunchShape((1, 1, 1), (8, 1, 1)), ctypes.addressof(params), jit.LaunchOptions(shadow=shadow)
        )
        assert expected == {one.defect: one.count for one in found}
        assert all((one.address, one.thread) == (memory.ctypes.data, one.other_thread) for one in found)


def test_a_fetch_between_levels_of_detail_reads_both(memory, ptx_kernel):
    records = (TextureRecord * 2)(
        describe(memory.ctypes.data, FLOAT, 1, 16, 16), describe(memory.ctypes.data + 1024, FLOAT, 1, 8, 8)
    )
    for record in records:
        record.levels, record.blends, record.most = 2, 1, 1.0
    footprint = jit.Footprint(memory.ctypes.data, memory.nbytes)
    instruction = "mov.f32 %y, 0.5; tex.level.2d.v4.u32.f32 {%r0, %r1, %r2, %r3}, [%h, (xy)], %y"
    fetch(memory, ptx_kernel, records[0], instruction, threads=4, footprint=footprint)
    found = [(address - footprint.base, size, flags) for address, size, flags in footprint.ranges()]
    assert [(0, 16, READ), (1024, 16, READ), (32768, 64, WRITE)] == found


def test_the_fields_of_a_record_are_where_kernels_look_for_them():
    renamed = {"array_size": "depth", "normalized_coords": "normalized"}
    assert texture._FIELDS == {name: getattr(TextureRecord, renamed.get(name, name)).offset for name in texture._FIELDS}


def test_a_fetch_at_an_integer_place_reads_most_texels_itself(ptx_kernel):
    body = """.reg .b64 %t; .reg .b32 %x, %r<4>; ld.param.u64 %t, [t]; mov.u32 %x, 3;
    tex.1d.v4.s32.s32 {%r0, %r1, %r2, %r3}, [%t, {%x}]; st.global.b32 [%t], %r0; ret;"""
    text = ptx_kernel(".param .u64 t", body).llvm_ir()
    call, load = text.index("call <4 x i32> @cudatool_texture_level"), text.index("<4 x i32> zeroinitializer, i32 %")
    assert load < call
