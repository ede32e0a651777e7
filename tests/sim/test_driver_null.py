"""Every call with NULL for its pointers: an error code, before cuInit too, and nothing made that has no name."""

from __future__ import annotations

import ctypes
import re

from warm_process import run_python

from cudatool.sim.abi import ENTRIES

# Calls every entry point below its words with NULL for each pointer, and prints what it did.
_CALLS = r"""
import re, sys
from cudatool import _driver
_driver.choose("sim")
machine = _driver.initialize().machine
from cuda.bindings import driver
from cudatool.sim import abi

def ok(result):
    assert result[0] == 0, result
    return result[1] if len(result) == 2 else None

ok(driver.cuInit(0))
context = ok(driver.cuCtxCreate(None, 0, 0))
ok(driver.cuDeviceGetDefaultMemPool(0))
ok(driver.cuDeviceGetMemPool(0))
image = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k() { ret; }\0"
module = ok(driver.cuModuleLoadData(image))
kernel = ok(driver.cuModuleGetFunction(module, b"k"))
graph = ok(driver.cuGraphCreate(0))
wanted = driver.CUDA_ARRAY3D_DESCRIPTOR()
wanted.Width, wanted.NumChannels, wanted.Format = 64, 1, driver.CUarray_format.CU_AD_FORMAT_FLOAT
handles = {
    "CUstream": ok(driver.cuStreamCreate(1)), "CUevent": ok(driver.cuEventCreate(0)), "CUcontext": context,
    "CUgraph": graph, "CUgraphNode": ok(driver.cuGraphAddEmptyNode(graph, None, 0)),
    "CUgraphExec": ok(driver.cuGraphInstantiate(graph, 0)), "CUarray": ok(driver.cuArray3DCreate(wanted)),
    "CUdeviceptr": ok(driver.cuMemAlloc(4096)), "CUmodule": module, "CUlibrary": module,
    "CUfunction": kernel, "CUkernel": kernel, "CUlinkState": ok(driver.cuLinkCreate(0, [], [])),
}
ends = re.compile("Destroy|Unload|Free|Release|Unregister|Close|Reset|Pop|SetCurrent")

def state():
    return len(machine.objects), len(machine.allocations), machine.devices[0].primary_references

for name, entry in sorted(abi.ENTRIES.items()):
    if ends.search(name) or not all(kind in abi._KINDS for kind in entry.types):
        continue
    declared = re.fullmatch(r"\w+\((.*)\)", entry.prototype, re.DOTALL)[1].split(",")
    for number in (0, 1):
        kinds = [one.split()[0] for one in declared if one]
        arguments = tuple(
            0 if "*" in one or "[" in one else int(handles.get(kind, 0 if kind in abi._HANDLES else number))
            for kind, one in zip(kinds, declared)
        )
        print(name, *arguments, flush=True)
        before = state()
        result = abi.invoke(entry, arguments, 1)
        print(name, result, before == state(), flush=True)
"""


def test_a_call_that_stores_its_result_nowhere_fails_and_makes_nothing():
    done = run_python(_CALLS)
    assert 0 == done.returncode, f"{done.stdout.splitlines()[-1:]} {done.stderr[-1000:]}"
    results = re.findall(r"^(\w+) (\d+) (True|False)$", done.stdout, re.MULTILINE)
    assert len({name for name, _, _ in results}) > 200
    assert [] == [name for name, result, _ in results if result == "999"]
    assert [] == [name for name, result, unchanged in results if result != "0" and unchanged == "False"]


_EARLY = r"""
from cudatool import _driver
_driver.initialize()
from cudatool.sim import Result, abi
for name, entry in sorted(abi.ENTRIES.items()):
    if name != "cuInit" and all(kind in abi._KINDS for kind in entry.types):
        print(name, Result(abi.invoke(entry, (0,) * len(entry.types), 1)).name)
"""


def test_calls_before_cuinit_say_so():
    done = run_python(_EARLY)
    assert 0 == done.returncode, done.stderr
    results = dict(line.split() for line in done.stdout.splitlines())
    others = {name for name, result in results.items() if result != "NOT_INITIALIZED"}
    # NVIDIA's reference has no such result for these.
    assert {"cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"} == {n for n in others if "cuLogs" not in n}
    assert len(results) > 200


def test_an_image_is_not_loaded_for_a_module_that_is_stored_nowhere(machine, driver):
    from cudatool.sim import Result, abi

    image = ctypes.create_string_buffer(b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k() { ret; }")
    before = len(machine.objects)
    for name, more in (("cuModuleLoadData", ()), ("cuLibraryLoadData", (0,) * 6)):
        assert Result.INVALID_VALUE == abi.invoke(ENTRIES[name], (0, ctypes.addressof(image), *more), 1)
    assert before == len(machine.objects)
