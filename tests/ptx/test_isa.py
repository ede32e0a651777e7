"""The table of opcodes: one row for each."""

from __future__ import annotations

import importlib
from collections import Counter

from cudatool.ptx import isa, parse
from cudatool.ptx.flow import reads, writes
from cudatool.sim.jit.table import TABLE


def test_an_opcode_stands_in_one_row() -> None:
    twice = [opcode for opcode, rows in Counter(" ".join(isa._ROWS).split()).items() if rows > 1]
    assert [] == twice


def test_every_opcode_that_the_software_device_translates_has_a_row() -> None:
    importlib.import_module("cudatool.sim.jit.codegen")  # which imports all that fills the table
    assert set() == TABLE.keys() - isa._BY_OPCODE.keys()


def test_an_opcode_without_a_row_may_do_anything() -> None:
    row = isa.opcode_of("newer")
    assert (isa.OpcodeAccess.UNKNOWN, False) == (row.access, row.is_pure)


def test_what_may_be_computed_again_writes_no_memory() -> None:
    writing = {isa.OpcodeAccess.WRITE, isa.OpcodeAccess.ATOMIC, isa.OpcodeAccess.BY_MODIFIER}
    assert not [opcodes for opcodes, row in isa._ROWS.items() if row.is_pure and row.access in writing]


_SETS = {
    # By the syntax lines of the PTX ISA: what stands first is the destination "d", but for these whose first is "a".
    "atom.global.add.u32 %r1, [%d1], %r2;": ["%r1"],
    "red.global.add.u32 [%d1], %r2;": [],
    "st.global.u32 [%d1], %r2;": [],
    "ld.global.v2.u32 {%r1, %r2}, [%d1];": ["%r1", "%r2"],
    "cp.async.ca.shared.global [%r1], [%d1], 4;": [],
    "prefetch.global.L1 [%d1];": [],
    "createpolicy.fractional.L2::evict_last.b64 %d1, 1.0;": ["%d1"],
    "bar.sync %r1, %r2;": [],
    "barrier.red.popc.u32 %r1, 0, %p1;": ["%r1"],
    "bar.red.and.pred %p1, 0, %p2;": ["%p1"],
    "mbarrier.arrive.shared.b64 %d1, [%r1];": ["%d1"],
    "nanosleep.u32 %r1;": [],
    "shfl.sync.idx.b32 %r1|%p1, %r2, 0, 31, -1;": ["%r1", "%p1"],
    "elect.sync %r1|%p1, -1;": ["%r1", "%p1"],
    "setp.eq.u32 %p1, %r1, %r2;": ["%p1"],
    "mov.u32 %r1, %r2;": ["%r1"],
}


def test_registers_that_an_instruction_sets_are_those_that_the_isa_calls_its_destination() -> None:
    head = ".version 8.3 .target sm_90 .entry k() { .reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %d<9>;"
    code = parse(head + "\n".join([*_SETS, "ret; }"])).kernels["k"].instructions
    assert list(_SETS.values()) == [writes(i) for i in code[:-1]]


def test_an_instruction_reads_the_registers_that_it_does_not_set() -> None:
    head = ".version 8.3 .target sm_90 .entry k() { .reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %d<9>;"
    code = parse(head + "@%p1 atom.global.add.u32 %r1, [%d1], %r2; red.global.add.u32 [%d1], %r1; ret; }").kernels["k"]
    assert [["%d1", "%r2", "%p1"], ["%d1", "%r1"], []] == [reads(i) for i in code.instructions]
