from __future__ import annotations

import json

import numpy as np
from generated import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from cudatool import analyze
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.model import Frame, Trace

_KINDS = [kind for kind in Kind if kind <= Kind.MEM_FREE] + [Kind.RANGE_PUSH, Kind.RANGE_POP, Kind.STREAM_CREATE]
_RECORDS = st.lists(
    st.tuples(
        st.integers(-(10**12), 10**12),  # time
        st.sampled_from(_KINDS),
        st.integers(-1, 1),  # device
        st.integers(0, 1),  # flags
        st.integers(0, 1),  # stream
        st.integers(0, 2),  # stack
        st.integers(0, 3),  # name
        st.integers(0, 12).map(lambda n: n << 9),  # address
        st.one_of(st.integers(0, 6).map(lambda n: n << 9), st.integers(0, 1 << 47)),  # size
        st.integers(0, 1 << 47),  # aux0
        st.integers(0, 2),  # aux1
    ),
    max_size=50,
)


@settings(deadline=None, max_examples=examples(150))
@given(_RECORDS, st.integers(0, 60), st.sampled_from(["clock", "index"]))
def test_any_records_give_a_report_whose_parts_add_up(rows: list[tuple[int, ...]], prior: int, axis: str) -> None:
    records = np.zeros(len(rows), RECORD)
    for record, row in zip(records, rows, strict=True):
        fields = ("time", "kind", "device", "flags", "stream", "stack", "name", "address", "size", "aux0", "aux1")
        for field, value in zip(fields, row, strict=True):
            record[field] = value
    made = Trace(
        records,
        names=["", "step 1", "backward", "zero_grad"],
        frames=[Frame("a.py", "forward", 1), Frame("torch/optim/adam.py", "step", 2)],
        stacks=[(), (0,), (1, 0)],
        header={"time_axis": axis, "prior_records": {0: prior}},
    )
    report = analyze.report(made)
    json.dumps(report.as_dict())  # plain data alone
    for device, diagnosis in zip(report.summary.devices, report.diagnoses, strict=True):
        assert device.peak_active == diagnosis.tree.total_size[0]
        assert device.peak_active == sum(share.size for share in diagnosis.categories.at_peak)
    assert [device.device for device in report.summary.devices] == [one.device for one in report.diagnoses]
    assert [] == [row for one in analyze.diff(made, made) for row in one.rows if row.change]
