"""A launch of another library between two operators of PyTorch: both sources' events, in the order of the program."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

import torch

from cudatool.collect import cupti, torch_events
from cudatool.collect.gpu_launches import Launches
from cudatool.collect.torch_program import TorchCollector
from cudatool.collect.torch_rows import Action, Row, RowKind
from cudatool.trace import hooks
from cudatool.trace.events import Kind

PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry scale(.param .u64 to)
{
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [to];
    cvta.to.global.u64 %rd2, %rd1;
    st.global.u32 [%rd2], 7;
    ret;
}
"""
MODULE, FUNCTION, LOAD, GET_FUNCTION = 0x10, 0x77, 5, 6  # the latter two as libcupti.c numbers calls
libcupti = sys.argv[1]
cupti.find_library = lambda: libcupti
events, allocated = [], []
hooks.subscribe(events.append)
collector = cupti.CuptiCollector(
    lambda: True, cupti.Level.MEMORY, launches=Launches({}.get), pytorch_passes_on=lambda: pytorch.is_passing_on
)
pytorch = TorchCollector(device="cpu", beside_others=True)
pytorch.start()
driver = ctypes.CDLL(libcupti)
driver.launch.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t]
driver.call_driver.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]


def read_rows(log: bytes) -> Iterator[Row]:
    """Read the log of this PyTorch, which has no caching allocator, with the row that one would have written."""
    for row in original(log):
        if allocated and row.kind == RowKind.CALL:
            yield Row(RowKind.MEMORY, row.thread, row.time, (Action.ALLOC, allocated.pop(), 512, 0, 0, 0, 0, 0))
        yield row


original, torch_events.read_rows = torch_events.read_rows, read_rows
handle, image, function = ctypes.c_uint64(MODULE), ctypes.create_string_buffer(PTX), ctypes.c_uint64(FUNCTION)
driver.call_driver(LOAD, ctypes.addressof(handle), ctypes.addressof(image))
driver.call_driver(GET_FUNCTION, ctypes.addressof(function), MODULE)
x = torch.zeros(100)
allocated.append(x.data_ptr())
driver.launch(FUNCTION, 3, x.data_ptr().to_bytes(8, "little"), 8)
x + 1
pytorch.flush()
collector.flush()
assert ["aten::zero_", "scale", "aten::add.Tensor"] == [one.name for one in events if one.kind is Kind.KERNEL_LAUNCH]
(launch,) = [event for event in events if event.name == "scale"]
accesses = [(event.address, event.size) for event in events if event.correlation == launch.correlation]
assert (x.data_ptr(), 512) in accesses, events
assert sorted(event.time for event in events) == [event.time for event in events]
assert not [event for event in events if event.kind is Kind.WARNING]
