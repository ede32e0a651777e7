"""The table of opcodes: one row for each."""

from __future__ import annotations

from collections import Counter

from cudatool.ptx import isa


def test_an_opcode_stands_in_one_row() -> None:
    twice = [opcode for opcode, rows in Counter(" ".join(isa._ROWS).split()).items() if rows > 1]
    assert [] == twice


def test_an_opcode_without_a_row_may_do_anything() -> None:
    row = isa.opcode_of("newer")
    assert (isa.Access.UNKNOWN, False) == (row.access, row.is_pure)


def test_what_may_be_computed_again_writes_no_memory() -> None:
    writing = {isa.Access.WRITE, isa.Access.ATOMIC, isa.Access.BY_MODIFIER}
    assert not [opcodes for opcodes, row in isa._ROWS.items() if row.is_pure and row.access in writing]
