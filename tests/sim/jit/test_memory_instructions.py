"""Loads, stores, atomics, global and constant variables, access footprints."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cudatool.sim import jit

HEAD = ".reg .b32 %t, %x, %y; .reg .b64 %a, %b, %c; .reg .pred %p;\nmov.u32 %t, %tid.x;\nld.param.u64 %a, [p];\n"


@pytest.fixture(name="launch")
def launch_fixture(launch_in_turn):
    return launch_in_turn


@pytest.mark.parametrize("kind", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
def test_loads_extend_to_a_wider_register(ptx_kernel, launch, kind):
    size = int(kind[1:]) // 8
    values = np.array([0, 1, 0x7F, 0x80, 0xFF], "u1").repeat(size)
    source = values.view(f"{'i' if kind[0] == 's' else 'u'}{size}")
    body = f"""{HEAD} ld.param.u64 %b, [q]; mad.wide.u32 %a, %t, {size}, %a; mad.wide.u32 %b, %t, 8, %b;
    ld.global.{kind} %c, [%a]; st.global.u64 [%b], %c; ret;"""
    result = np.zeros(5, "u8")
    launch(ptx_kernel(".param .u64 p, .param .u64 q", body), 1, 5, source, result)
    assert source.astype("i8").view("u8").tolist() == result.tolist()


@pytest.mark.parametrize("kind", ["u8", "u16", "u32"])
def test_stores_truncate_and_touch_nothing_else(ptx_kernel, launch, kind):
    size = int(kind[1:]) // 8
    result = np.full(16, 0xEE, "u1")
    body = f"{HEAD} mov.u64 %c, 0x1122334455667788; st.global.{kind} [%a+4], %c; ret;"
    launch(ptx_kernel(".param .u64 p", body), 1, 1, result)
    assert [0xEE] * 4 + [0x88, 0x77, 0x66, 0x55][:size] + [0xEE] * (12 - size) == result.tolist()


def test_an_address_in_shared_memory_may_be_below_its_start_before_the_offset_is_added(ptx_kernel, launch):
    result = np.zeros(1, "u4")
    body = f"""{HEAD} .shared .b32 window[16];
    mov.u32 %x, window; add.s32 %x, %x, -8; mov.u32 %y, 7; st.shared.u32 [%x+8], %y;
    ld.shared.u32 %y, [window]; st.global.u32 [%a], %y; ret;"""
    launch(ptx_kernel(".param .u64 p", body), 1, 1, result)
    assert [7] == result.tolist()


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("optimized", [False, True])
def test_each_thread_may_load_another_parameter_by_its_address(ptx_kernel, launch, bits, optimized):
    """As LLVM makes of a choice between two, in 32 bits where it is told to (nvptx-short-ptr), as Triton does."""
    result = np.zeros(64, "u4")
    first, second = np.arange(64, dtype="u4"), np.arange(100, 164, dtype="u4")
    body = f"""{HEAD} .reg .b{bits} %u, %v; .reg .pred %q;
    and.b32 %x, %t, 1; setp.eq.u32 %q, %x, 0;
    mov.b{bits} %u, q; mov.b{bits} %v, r; selp.b{bits} %u, %u, %v, %q; ld.param.b64 %b, [%u];
    mad.wide.u32 %b, %t, 4, %b; ld.global.u32 %y, [%b];
    mad.wide.u32 %a, %t, 4, %a; st.global.u32 [%a], %y; ret;"""
    kernel = ptx_kernel(".param .u64 p, .param .u64 q, .param .u64 r", body)
    launch(kernel, 1, 64, result, first, second, optimized=optimized)
    assert np.where(np.arange(64) % 2, second, first).tolist() == result.tolist()


def test_constants_may_be_addressed_in_32_bits(ptx_module, launch, place_variables):
    constants = ".const .align 4 .u32 low[4] = {10, 20, 30, 40};\n.const .align 4 .u32 high[4] = {11, 21, 31, 41};"
    body = f"""{HEAD} .reg .b32 %u, %v; .reg .pred %q;
    and.b32 %x, %t, 1; setp.eq.u32 %q, %x, 0;
    mov.b32 %u, low; mov.b32 %v, high; selp.b32 %u, %u, %v, %q;
    shr.u32 %x, %t, 1; shl.b32 %x, %x, 2; add.u32 %u, %u, %x; ld.const.u32 %y, [%u];
    mad.wide.u32 %a, %t, 4, %a; st.global.u32 [%a], %y; ret;"""
    module = ptx_module(".param .u64 p", body, before=constants)
    memory = place_variables(module)
    result = np.zeros(8, "u4")
    launch(module.kernels["k"], 1, 8, result)
    assert 2 == len(memory)
    assert [10, 11, 20, 21, 30, 31, 40, 41] == result.tolist()


@pytest.mark.parametrize("lanes", [2, 4])
def test_vector_access(ptx_kernel, launch, lanes):
    registers = ", ".join(f"%v{n}" for n in range(lanes))
    backwards = ", ".join(f"%v{n}" for n in reversed(range(lanes)))
    body = f""".reg .b32 %v<4>; {HEAD} mad.wide.u32 %a, %t, {4 * lanes}, %a;
    ld.global.nc.L1::no_allocate.v{lanes}.u32 {{{registers}}}, [%a]; st.global.v{lanes}.u32 [%a], {{{backwards}}}; ret;"""
    data = np.arange(10 * lanes, dtype="u4")
    launch(ptx_kernel(".param .u64 p", body), 1, 10, data)
    assert np.arange(10 * lanes).reshape(-1, lanes)[:, ::-1].ravel().tolist() == data.tolist()


ATOMICS = {
    "add.u32": lambda old, v: old + v,
    "min.u32": min,
    "max.u32": max,
    "min.s32": lambda old, v: min((old, v), key=lambda x: x - (x >> 31 << 32)),
    "max.s32": lambda old, v: max((old, v), key=lambda x: x - (x >> 31 << 32)),
    "and.b32": lambda old, v: old & v,
    "or.b32": lambda old, v: old | v,
    "xor.b32": lambda old, v: old ^ v,
    "exch.b32": lambda old, v: v,
    "inc.u32": lambda old, v: 0 if old >= v else old + 1,
    "dec.u32": lambda old, v: v if old == 0 or old > v else old - 1,
    "add.u64": lambda old, v: old + v,
    "max.u64": max,
    "xor.b64": lambda old, v: old ^ v,
}


@pytest.mark.parametrize("space", ["global", "shared", ""])
@pytest.mark.parametrize("form", ATOMICS)
def test_atomic_operations(ptx_kernel, launch, form, space):
    operation, kind = form.split(".")
    bits = int(kind[1:])
    values = [0, 1, 5, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
    cases = list(itertools.product(values, repeat=2))
    dtype = f"u{bits // 8}"
    memory, operand = (np.array(column, dtype) for column in zip(*cases, strict=True))
    old = np.zeros(len(cases), dtype)
    spelled = f"atom{'.' if space else ''}{space}.{operation}.{kind}"
    body = f""".reg .b{bits} %v, %o; .reg .b64 %d, %e; .shared .align 8 .b8 s[1024]; {HEAD}
    ld.param.u64 %b, [q]; ld.param.u64 %c, [r];
    mad.wide.u32 %a, %t, {bits // 8}, %a; mad.wide.u32 %b, %t, {bits // 8}, %b; mad.wide.u32 %c, %t, {bits // 8}, %c;
    ld.global.b{bits} %v, [%b];"""
    if space == "shared":
        body += f"""mov.u64 %d, s; mad.wide.u32 %d, %t, {bits // 8}, %d; ld.global.b{bits} %o, [%a]; st.shared.b{bits} [%d], %o;
        {spelled} %o, [%d], %v; st.global.b{bits} [%c], %o; ld.shared.b{bits} %o, [%d]; st.global.b{bits} [%a], %o; ret;"""
    else:
        body += f"{spelled} %o, [%a], %v; st.global.b{bits} [%c], %o; ret;"
    launch(ptx_kernel(".param .u64 p, .param .u64 q, .param .u64 r", body), 1, len(cases), memory, operand, old)
    assert [case[0] for case in cases] == old.tolist()
    assert [ATOMICS[form](*case) & ((1 << bits) - 1) for case in cases] == memory.tolist()


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("threads", [1, 2])
def test_float_atomics_lose_nothing(ptx_kernel, launch, kind, threads):
    total = np.zeros(1, f"f{int(kind[1:]) // 8}")
    body = f".reg .{kind} %v; {HEAD} cvt.rn.{kind}.u32 %v, %t; red.global.add.{kind} [%a], %v; ret;"
    launch(ptx_kernel(".param .u64 p", body), 64, 64, total, threads=threads)
    assert [64 * sum(range(64))] == total.tolist()


def test_compare_and_swap(ptx_kernel, launch):
    """Only the first of the threads that expect 0 gets it."""
    data = np.zeros(66, "u4")
    body = f"""{HEAD} add.u32 %x, %t, 1; atom.relaxed.gpu.global.cas.b32 %y, [%a], 0, %x;
    mad.wide.u32 %b, %t, 4, %a; st.global.u32 [%b+8], %y; ret;"""
    launch(ptx_kernel(".param .u64 p", body), 1, 64, data)
    assert [1, 0, 0, *[1] * 63] == data.tolist()


def test_shared_atomics_count_every_thread(ptx_kernel, launch):
    data = np.zeros(4, "u4")
    body = f""".shared .align 4 .b8 s[16]; {HEAD} setp.lt.u32 %p, %t, 4; shl.b32 %x, %t, 2; mov.u32 %y, s; add.u32 %x, %x, %y;
    @%p st.shared.u32 [%x], 0; bar.sync 0; and.b32 %x, %t, 3; shl.b32 %x, %x, 2; add.u32 %x, %x, %y;
    atom.shared.add.u32 %x, [%x], 1; bar.sync 0;
    @!%p ret; shl.b32 %x, %t, 2; add.u32 %x, %x, %y; ld.shared.u32 %x, [%x];
    mad.wide.u32 %a, %t, 4, %a; red.global.add.u32 [%a], %x; ret;"""
    launch(ptx_kernel(".param .u64 p", body), 8, 128, data, threads=2)
    assert [256] * 4 == data.tolist()


VARIABLES = """
.const .align 4 .u32 table[4] = {10, 20, 30};
.global .align 8 .u64 pointer[2] = {generic(table)+8, 5};
.global .align 4 .f32 scale = 0f3FC00000;
.global .align 1 .b8 text[] = {72, 105, 0};
"""


def test_variables_carry_initial_values_and_relocations(ptx_module, launch, place_variables):
    body = f""".reg .f32 %f; .reg .b64 %d; {HEAD} ld.global.u64 %b, [pointer]; ld.u32 %x, [%b];
    and.b32 %y, %t, 3; mov.u64 %d, table; mad.wide.u32 %d, %y, 4, %d; ld.const.u32 %y, [%d]; add.u32 %x, %x, %y;
    ld.global.f32 %f, [scale]; cvt.rn.f32.u32 %f, %x; ld.global.u8 %y, [text+1]; add.u32 %x, %x, %y;
    mad.wide.u32 %a, %t, 4, %a; st.global.u32 [%a], %x; ret;"""
    module = ptx_module(".param .u64 p", body, before=VARIABLES)
    table, pointer = module.globals["table"], module.globals["pointer"]
    assert (16, True, 12) == (table.size, table.constant, len(table.initial))
    assert ([(0, "table", 8)], False) == (pointer.relocations, pointer.constant)
    assert (3, b"Hi\0") == (module.globals["text"].size, module.globals["text"].initial)
    memory = place_variables(module)
    data = np.zeros(4, "u4")
    launch(module.kernels["k"], 1, 4, data)
    assert 4 == len(memory)
    assert [30 + c + ord("i") for c in (10, 20, 30, 0)] == data.tolist()


def test_variables_of_the_module_may_be_declared_in_functions(ptx_module, launch, place_variables):
    module = ptx_module(
        ".param .u64 out",
        """.global .b32 first[2] = {11, 12}; .reg .b64 %b; .reg .b32 %v, %w;
        { .const .b32 first[2] = {13, 14}; ld.const.b32 %w, [first+4]; }
        ld.global.b32 %v, [first+4]; ld.param.u64 %b, [out]; st.global.v2.u32 [%b], {%v, %w}; ret;""",
    )
    place_variables(module)
    out = np.zeros(2, "u4")
    launch(module.kernels["k"], 1, 1, out)
    assert [12, 14] == out.tolist()


def test_an_operand_may_be_a_register_plus_a_constant(ptx_kernel, launch):
    body = """.reg .b64 %b; .reg .b32 %v; ld.param.u64 %b, [out]; mov.b32 %v, 5;
    st.global.v2.u32 [%b], {%v + 2, %v - 2}; mov.b32 %v, %v+3; st.global.u32 [%b+8], %v; ret;"""
    out = np.zeros(3, "u4")
    launch(ptx_kernel(".param .u64 out", body), 1, 1, out)
    assert [7, 3, 8] == out.tolist()


def test_parameters_are_laid_out_as_the_device_does(ptx_kernel, launch):
    params = ".param .u8 c, .param .u64 p, .param .align 8 .b8 s[12], .param .u16 h"
    body = f"{HEAD} .reg .b16 %h; ld.param.u8 %x, [c]; ld.param.u32 %y, [s+8]; add.u32 %x, %x, %y; ld.param.u16 %y, [h]; add.u32 %x, %x, %y; st.global.u32 [%a], %x; ret;"
    kernel = ptx_kernel(params, body)
    assert [(0, 1), (8, 8), (16, 12), (28, 2)] == [(p.offset, p.size) for p in kernel.params]
    assert 30 == kernel.param_bytes
    data = np.zeros(1, "u4")
    launch(kernel, 1, 1, np.uint8(7), data, np.array([1, 2], "u4")[:0].sum(dtype="u8"), np.uint32(500), np.uint16(1000))
    assert [1507] == data.tolist()


# ---- faults, traps and asserts ----


def test_a_wild_store_raises_and_the_process_lives(ptx_kernel, launch):
    kernel = ptx_kernel("", ".reg .b64 %a; mov.u64 %a, 64; st.global.u32 [%a], 1; ret;")
    for threads in (1, 2):
        with pytest.raises(jit.KernelFault) as fault:
            launch(kernel, 100, 64, threads=threads)
        assert 64 == fault.value.address


def test_shared_memory_cannot_be_left(ptx_kernel, launch):
    body = ".reg .b32 %x; mov.u32 %x, 0x7f000000; st.shared.u32 [%x], 1; ret;"
    with pytest.raises(jit.KernelFault):
        launch(ptx_kernel("", body), 1, 1)


def test_trap_names_the_thread(ptx_kernel, launch):
    body = HEAD + "setp.eq.u32 %p, %t, 5; @!%p bra E; trap; E: ret;"
    with pytest.raises(jit.KernelTrap, match=r"block \(0, 0, 0\), thread 5"):
        launch(ptx_kernel(".param .u64 p", body), 4, 8, np.zeros(1))


def test_code_behind_a_trap_that_nothing_leads_to(ptx_kernel, launch):
    body = """.reg .b32 %t; .reg .b64 %b; .reg .pred %p; mov.u32 %t, %tid.x; setp.lt.u32 %p, %t, 8; @%p bra ON;
    trap; st.global.u32 [%b], %t;
    ON: ld.param.u64 %b, [out]; mad.wide.u32 %b, %t, 4, %b; st.global.u32 [%b], %t; ret;"""
    out = np.zeros(8, "u4")
    launch(ptx_kernel(".param .u64 out", body), 1, 8, out)
    assert list(range(8)) == out.tolist()


def test_a_division_by_zero_is_no_fault(ptx_kernel, launch):
    data = np.zeros(1, "u4")
    launch(
        ptx_kernel(".param .u64 p", HEAD + "mov.u32 %x, 0; div.s32 %x, 5, %x; st.global.u32 [%a], %x; ret;"), 1, 1, data
    )
    assert [0xFFFFFFFF] == data.tolist()


def test_unsupported_instruction_is_named_with_kernel_and_line(ptx_kernel):
    kernel = ptx_kernel("", ".reg .b32 %x;\nmov.u32 %x, 1;\nwgmma.fence.sync.aligned;\nret;")
    with pytest.raises(jit.UnsupportedInstruction, match=r"^k: .*wgmma\.fence\.sync\.aligned \(PTX line 9\)$") as error:
        kernel.prepare()
    assert ("wgmma.fence.sync.aligned", "k", 9) == (error.value.instruction, error.value.kernel, error.value.line)


def test_unsupported_instruction_names_the_cuda_line_if_known():
    text = """.version 8.3\n.target sm_90\n.address_size 64
    .visible .entry good() { ret; }
    .visible .entry bad() { .reg .b32 %x; .loc 1 42 7
    wgmma.fence.sync.aligned; ret; }
    .file 1 "/src/app.cu" """
    module = jit.load(text.encode())
    module.kernels["good"].prepare()
    with pytest.raises(jit.UnsupportedInstruction, match=r"/src/app\.cu:42"):
        module.kernels["bad"].prepare()


# ---- cache ----


class Kept(dict[str, bytes]):
    """A cache in memory."""

    put = dict.__setitem__

    @property
    def codes(self) -> int:
        """How many variants of native code there are. Other entries are what is known of modules and kernels."""
        return sum(data[16:20] == b"\x7fELF" for data in self.values())


def test_native_code_comes_from_the_cache(ptx_kernel, launch):
    from cudatool.sim.jit import native

    cache, body = Kept(), HEAD + "st.global.u32 [%a], 1234; ret;"
    for expected in (1, 0, 0):
        before = native.compiled
        kernel = ptx_kernel(".param .u64 p", body, cache=cache)
        kernel.prepare()
        assert expected == native.compiled - before
        data = np.zeros(1, "u4")
        launch(kernel, 1, 1, data, optimized=True)
        assert [1234] == data.tolist()
    assert 1 == cache.codes


def test_another_kernel_or_variant_is_another_cache_entry(ptx_kernel):
    cache = Kept()
    for body in ("ret;", "exit;"):
        ptx_kernel("", body, cache=cache).prepare()
    ptx_kernel("", "ret;", cache=cache).prepare(jit.Instrument.FOOTPRINT)
    assert 3 == cache.codes


def test_code_from_the_cache_names_lines_of_the_text_that_is_loaded(ptx_kernel, launch):
    cache = Kept()
    for lines in (0, 3):
        other = ".visible .entry other() {" + "\n" * lines + "ret; }"
        with pytest.raises(jit.KernelTrap) as caught:
            launch(ptx_kernel("", "trap;", other, cache=cache), 1, 1)
        assert caught.value.args[0].endswith(f"trap at PTX line {7 + lines}")


# ---- footprints ----

READ, WRITE, ATOMIC = 1, 2, 4


@pytest.fixture
def arena():
    """Return page-aligned memory and the footprint over it."""
    pages = 64
    memory = np.zeros((pages + 1) * 4096, "u1")
    start = -memory.ctypes.data % 4096
    region = memory[start : start + pages * 4096]
    return region, jit.Footprint(region.ctypes.data, region.nbytes)


def relative(footprint: jit.Footprint) -> list[tuple[int, int, int]]:
    return [(address - footprint.base, size, flags) for address, size, flags in footprint.ranges()]


def test_footprint_of_disjoint_halves(arena, ptx_kernel, launch):
    region, footprint = arena
    body = (
        HEAD
        + """ld.param.u64 %b, [q]; mov.u32 %x, %ctaid.x; mad.lo.u32 %x, %x, 256, %t;
    mad.wide.u32 %a, %x, 4, %a; mad.wide.u32 %b, %x, 4, %b; ld.global.u32 %y, [%a]; st.global.u32 [%b], %y; ret;"""
    )
    kernel = ptx_kernel(".param .u64 p, .param .u64 q", body)
    launch(kernel, 16, 256, region[:16384], region[131072:], footprint=footprint, threads=2)
    assert [(0, 16384, READ), (131072, 16384, WRITE)] == relative(footprint)


def test_footprint_of_strided_writes(arena, ptx_kernel, launch):
    region, footprint = arena
    body = HEAD + "mad.wide.u32 %a, %t, 12, %a; st.global.u16 [%a+2], %t; ret;"
    launch(ptx_kernel(".param .u64 p", body), 1, 400, region, footprint=footprint)
    assert [(12 * t + 2, 2, WRITE) for t in range(400)] == relative(footprint)


def test_footprint_of_every_second_element_of_a_page(arena, ptx_kernel, launch):
    region, footprint = arena
    body = HEAD + "mad.wide.u32 %a, %t, 8, %a; st.global.u32 [%a], %t; ret;"
    launch(ptx_kernel(".param .u64 p", body), 1, 512, region, footprint=footprint)
    assert [(8 * t, 4, WRITE) for t in range(512)] == relative(footprint)


def test_footprint_overlap_by_one_byte(arena, ptx_kernel, launch):
    region, footprint = arena
    body = HEAD + "ld.global.u64 %b, [%a]; st.global.u8 [%a+7], 1; st.global.v2.u32 [%a+16], {%t, %t}; ret;"
    launch(ptx_kernel(".param .u64 p", body), 1, 1, region[4096:], footprint=footprint)
    assert [(4096, 7, READ), (4103, 1, READ | WRITE), (4112, 8, WRITE)] == relative(footprint)


def test_footprint_crossing_a_page_and_generic_atomics(arena, ptx_kernel, launch):
    region, footprint = arena
    body = HEAD + "ld.global.u32 %x, [%a]; atom.add.u32 %x, [%a+8], 1; red.global.add.u32 [%a+9000], 1; ret;"
    launch(ptx_kernel(".param .u64 p", body), 1, 1, region[4094:], footprint=footprint)
    assert [(4094, 4, READ), (4102, 4, ATOMIC), (13094, 4, ATOMIC)] == relative(footprint)


def test_footprint_ends_with_its_range(arena, ptx_kernel, launch):
    """Accesses outside are made and not recorded; one that begins at the last bytes is."""
    region, footprint = arena
    outside = np.zeros(4, "u4")
    body = HEAD + "ld.param.u64 %b, [q]; st.global.u32 [%a], 1; st.global.u32 [%b], 9; ret;"
    kernel = ptx_kernel(".param .u64 p, .param .u64 q", body)
    launch(kernel, 1, 1, region[-4:], outside, footprint=footprint)
    assert [(region.nbytes - 4, 4, WRITE)] == relative(footprint)
    assert 9 == outside[0]


def test_footprint_of_guarded_accesses_and_shared_memory(arena, ptx_kernel, launch):
    region, footprint = arena
    body = (
        ".shared .align 4 .b8 s[128];"
        + HEAD
        + """setp.lt.u32 %p, %t, 3; mad.wide.u32 %a, %t, 4, %a;
    @%p st.global.u32 [%a], %t; st.shared.u32 [s], %t; bar.sync 0; ret;"""
    )
    launch(ptx_kernel(".param .u64 p", body), 1, 32, region, footprint=footprint)
    assert [(0, 12, WRITE)] == relative(footprint)


def test_footprints_accumulate_until_cleared(arena, ptx_kernel, launch):
    region, footprint = arena
    kernel = ptx_kernel(".param .u64 p", HEAD + "st.global.u32 [%a], 1; ret;")
    launch(kernel, 1, 1, region[8192:], footprint=footprint)
    launch(kernel, 1, 1, region, footprint=footprint)
    assert [(0, 4, WRITE), (8192, 4, WRITE)] == relative(footprint)
    footprint.clear()
    assert [] == footprint.ranges()
    launch(kernel, 1, 1, region[4:], footprint=footprint)
    assert [(4, 4, WRITE)] == relative(footprint)


def _protection(address: int) -> str:
    """Return how the page at an address is mapped, as /proc/self/maps says it."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(part, 16) for part in line.split(None, 1)[0].split("-"))
            if first <= address < last:
                return line.split()[1]
    return ""


def test_vectors_of_loads_may_begin_before_shared_memory_where_nothing_can_be_written(ptx_kernel, launch):
    where = np.zeros(1, "u8")
    body = """.shared .align 4 .b8 s[64]; .reg .b64 %a, %w; .reg .b32 %s;
    ld.param.u64 %a, [p]; mov.u32 %s, s; cvta.shared.u64 %w, 0; st.global.u64 [%a], %w; st.shared.u32 [%s], 1; ret;"""
    launch(ptx_kernel(".param .u64 p", body), 1, 1, where)
    start = int(where[0])
    assert ("r--p", "rw-p") == (_protection(start - 1), _protection(start))
    store = ".shared .align 4 .b8 s[64]; .reg .b32 %s; mov.u32 %s, s; st.shared.u32 [%s+-4], 1; ret;"
    with pytest.raises(jit.KernelFault):
        launch(ptx_kernel("", store), 1, 1)
