"""Kernels that use memory of another device: only what their device was given access to."""

from __future__ import annotations

import json

import pytest

_PROGRAM = '''
import ctypes
from cuda.bindings import driver

def ok(result):
    assert result[0] == 0, result
    return result[1] if len(result) == 2 else result[1:]

PTX = b""".version 8.0
.target sm_80
.address_size 64
.global .align 4 .u32 variable;
.visible .entry write(.param .u64 p) {
    .reg .u64 %a;
    ld.param.u64 %a, [p];
    st.global.u32 [%a], 5;
    ret;
}
\\0"""

ok(driver.cuInit(0))
first, second = ok(driver.cuDevicePrimaryCtxRetain(0)), ok(driver.cuDevicePrimaryCtxRetain(1))
ok(driver.cuCtxSetCurrent(first))
access = driver.CUmemAccessDesc()
access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

def of(properties):
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    return properties

def peers():
    ok(driver.cuCtxSetCurrent(second))
    ok(driver.cuCtxEnablePeerAccess(first, 0))

def give(device):
    access.location.id = device
    return [access]

GIVEN = {given}
{memory}
ok(driver.cuCtxSetCurrent(second))
module = ok(driver.cuModuleLoadData(PTX))
kernel = ok(driver.cuModuleGetFunction(module, b"write"))
ok(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ((int(address),), (ctypes.c_void_p,)), 0))
ok(driver.cuCtxSynchronize())
'''

MEMORY = {
    "cuCtxEnablePeerAccess": "address = ok(driver.cuMemAlloc(4))\nif GIVEN: peers()",
    "cuCtxEnablePeerAccess of a variable": (
        'address, _ = ok(driver.cuModuleGetGlobal(ok(driver.cuModuleLoadData(PTX)), b"variable"))\nif GIVEN: peers()'
    ),
    "cuMemPoolSetAccess": (
        "peers()\n"  # says nothing about pools
        "ok(driver.cuCtxSetCurrent(first))\n"
        "pool = ok(driver.cuDeviceGetDefaultMemPool(0))\n"
        "address = ok(driver.cuMemAllocAsync(4, 0))\n"
        "ok(driver.cuStreamSynchronize(0))\n"
        "if GIVEN: ok(driver.cuMemPoolSetAccess(pool, give(1), 1))"
    ),
    "cuMemSetAccess": (
        "size = 2 << 20\n"
        "address = ok(driver.cuMemAddressReserve(size, 0, 0, 0))\n"
        "ok(driver.cuMemMap(address, size, 0, ok(driver.cuMemCreate(size, of(driver.CUmemAllocationProp()), 0)), 0))\n"
        "ok(driver.cuMemSetAccess(address, size, give(0), 1))\n"
        "if GIVEN: ok(driver.cuMemSetAccess(address, size, give(1), 1))"
    ),
    "accessDescs": (
        "graph, node = ok(driver.cuGraphCreate(0)), driver.CUDA_MEM_ALLOC_NODE_PARAMS()\n"
        "node.bytesize = 4\n"
        "node.poolProps.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED\n"
        "node.poolProps.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE\n"
        "if GIVEN: node.accessDescs, node.accessDescCount = give(1), 1\n"
        "ok(driver.cuGraphAddMemAllocNode(graph, None, 0, node))\n"
        "address = node.dptr\n"
        "ok(driver.cuGraphLaunch(ok(driver.cuGraphInstantiate(graph, 0)), 0))\n"
        "ok(driver.cuStreamSynchronize(0))"
    ),
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("way", list(MEMORY))
def test_a_kernel_reaches_what_its_device_was_given_access_to(run_warm, tmp_path, way: str, given: bool) -> None:
    (tmp_path / "peer.py").write_text(_PROGRAM.replace("{given}", str(given)).replace("{memory}", MEMORY[way]))
    done = run_warm("sanitize", "--device", "sim:count=2", "--json", "--checks", "memcheck", "peer.py")
    assert int(not given) == done.returncode, done.stdout + done.stderr
    found = json.loads(done.stdout)["on_device"]
    assert ["peer-access"] * (not given) == [one["kind"] for one in found]
    for one in found:
        said = f"memory of device 0, to which device 1 was given no access ({way.partition(' ')[0]}"
        assert one["text"].startswith(said)


def test_a_device_needs_access_to_a_mapping_of_its_own_memory(run_warm, tmp_path) -> None:
    memory = MEMORY["cuMemSetAccess"].replace("give(0)", "give(1)").replace("if GIVEN:", "if False:")
    program = _PROGRAM.replace("{memory}", memory).replace("ok(driver.cuCtxSetCurrent(second))\nmodule", "module")
    (tmp_path / "own.py").write_text(program.replace("{given}", "False"))
    done = run_warm("sanitize", "--device", "sim:count=2", "--json", "--checks", "memcheck", "own.py")
    (found,) = json.loads(done.stdout)["on_device"]
    assert "memory of device 0, to which device 0 was given no access (cuMemSetAccess)" == found["text"]


def test_what_a_launch_could_not_reach_is_as_before_for_the_next(run_warm, tmp_path) -> None:
    memory = (
        "small = [ok(driver.cuMemAlloc(100)) for _ in range(3)]\n"
        "address, large = small[1], ok(driver.cuMemAlloc(3 * 4096 + 8))\n"
    )
    after = """
ok(driver.cuCtxSetCurrent(first))
mine = ok(driver.cuModuleGetFunction(ok(driver.cuModuleLoadData(PTX)), b"write"))
for place in (int(small[0]), int(small[1]) + 96, int(small[1]) + 100, int(large), int(large) + 3 * 4096 + 4,
              int(large) + 3 * 4096 + 8):
    ok(driver.cuLaunchKernel(mine, 1, 1, 1, 1, 1, 1, 0, 0, ((place,), (ctypes.c_void_p,)), 0))
ok(driver.cuCtxSynchronize())
"""
    program = _PROGRAM.replace("{given}", "False").replace("{memory}", memory) + after
    (tmp_path / "after.py").write_text(program)
    done = run_warm("sanitize", "--device", "sim:count=2", "--json", "--checks", "memcheck", "after.py")
    found = json.loads(done.stdout)["on_device"]
    assert [("peer-access", 1), ("out-of-bounds", 2)] == [(one["kind"], one["count"]) for one in found]
