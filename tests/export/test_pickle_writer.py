"""Pickles that are written piece by piece: pickle reads what was written, and so does PyTorch's viewer."""

from __future__ import annotations

import pickle
import pickletools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudatool.export.pickle_writer import END, START, PickleWriter, integer, integers

_NUMBERS = st.integers() | st.sampled_from(
    [s * (1 << n) + d for n in (7, 8, 15, 16, 31, 32, 63) for s in (1, -1) for d in (-1, 0, 1)]
)
_PLAIN = st.recursive(
    st.none() | st.booleans() | _NUMBERS | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.lists(_NUMBERS).map(tuple),
)


def written(value: Any) -> bytes:
    return START + PickleWriter().value(value) + END


@settings(deadline=None)
@given(_PLAIN)
def test_pickle_reads_what_was_written(value: Any) -> None:
    found = pickle.loads(written(value))
    assert repr(value) == repr(found)  # 1 == True


def test_what_is_there_several_times_is_written_once() -> None:
    frames = [{"name": "f" * 300}]
    value = [frames, frames, [frames[0]], "f" * 300]
    found = pickle.loads(written(value))
    assert value == found
    assert found[0] is found[1] and found[2][0] is found[0][0]
    assert written(value).count(b"f" * 300) == 1


def test_a_list_longer_than_a_batch_and_a_list_in_itself_come_back() -> None:
    value: list[Any] = list(range(2001))
    value.append(value)
    found = pickle.loads(written(value))
    assert value[:-1] == found[:-1]
    assert found[-1] is found


def test_only_opcodes_are_used_that_pickle_writes_for_such_data() -> None:
    value = {"a": [1, 300, 1 << 20, 1 << 40, (0, 0), 1.5, None, True, "x", "x", {}], "b": [{"k": "x" * 300}] * 2}
    ours = {opcode.name for opcode, *_ in pickletools.genops(written(value))}
    theirs = {opcode.name for opcode, *_ in pickletools.genops(pickle.dumps(value, 4))}
    assert ours <= theirs


def test_what_is_no_plain_data_is_refused() -> None:
    with pytest.raises(TypeError, match="set"):
        written({"x": {1}})


@given(st.lists(st.integers(0, (1 << 64) - 1) | st.integers(0, 1 << 31), max_size=5))
def test_columns_of_numbers_are_read_as_the_same_numbers(values: list[int]) -> None:
    for column in (values, [v & 0xFFFF for v in values], [v >> 1 for v in values]):
        spelled = integers(np.array(column, np.uint64))
        assert column == [pickle.loads(START + one + END) for one in spelled]
        assert column == [pickle.loads(START + integer(one) + END) for one in column]
