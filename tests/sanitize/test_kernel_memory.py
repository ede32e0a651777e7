"""Memory of kernels whose limits the driver does not check at each access: variables, mappings, arrays of a thread."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cuda.bindings import driver

import cudatool as ct
from cudatool.recording import record
from cudatool.sanitize import check
from cudatool.trace import reader

pytestmark = pytest.mark.skipif(not ct.get_device_name().startswith("cudatool"), reason="needs the software device")

SOURCE = """
__device__ int table[64]; __constant__ int weights[64]; __device__ int *other;
extern "C" __global__ void write(int i) { table[i] = 1; if (i < 0) other = table; }
extern "C" __global__ void read(int i) { table[0] = weights[i]; if (i < 0) other = table; }
__device__ __noinline__ void fill(int *p, int n) { for (int i = 0; i < n; i++) p[i] = i; }
__device__ __noinline__ int sum(int *p) { int t = 0; for (int i = 0; i < 8; i++) t += p[i]; return t; }
extern "C" __global__ void fixed(int i) { __shared__ int s[64]; s[i] = i; __syncthreads(); table[1] = s[i]; }
extern "C" __global__ void chosen(int i) { extern __shared__ int d[]; d[i] = i; __syncthreads(); table[1] = d[i]; }
extern "C" __global__ void local(int n) { int p[8]; fill(p, n); table[1] = sum(p); }
"""

HEAP = """
extern "C" __global__ void keep(volatile int **p, int n) { *p = (int *)malloc(4 * n); **p = 1; }
extern "C" __global__ void use(volatile int **p, int i) { (*p)[i] = (*p)[0]; }
extern "C" __global__ void drop(volatile int **p, int i) { free((void *)*p); (*p)[i] = 1; }
"""

LAST = """
__device__ int alone[64];
extern "C" __global__ void last(int i) { alone[i + 64] = 1; }
"""


def _found(folder: Path, name: str, value: int, shared: int = 0) -> list[tuple[str, str]]:
    kernel = ct.compile(LAST if name == "last" else SOURCE, name)
    with record(folder / "run.ctrace", checks=["memcheck"], force=True):
        ct.launch(ct.current_stream(), ct.LaunchConfig(grid=1, block=1, shmem_size=shared), kernel, np.int32(value))
        ct.synchronize()
    return [(one.kind.value, one.text) for one in check(reader.read(folder / "run.ctrace")).on_device]


@pytest.mark.parametrize(("name", "variable"), [("write", "table"), ("read", "weights")])
def test_an_access_beyond_a_variable_of_the_module_is_out_of_its_bounds(tmp_path, name, variable):
    assert [] == _found(tmp_path, name, 63)
    kind = "__constant__ variable" if variable == "weights" else "variable"
    expected = ("out-of-bounds", f"0 bytes after the end of the {kind} {variable} of 256 B")
    assert [expected] == _found(tmp_path, name, 64)


def test_an_access_beyond_the_last_variable_of_a_module_names_it(tmp_path):
    text = _found(tmp_path, "last", 64)
    assert [("out-of-bounds", "256 bytes after the end of the variable alone of 256 B")] == text


@pytest.mark.parametrize(("name", "dynamic"), [("fixed", 0), ("chosen", 256)])
def test_an_access_beyond_shared_memory_says_how_much_the_block_has(tmp_path, name, dynamic):
    assert [] == _found(tmp_path, name, 63, dynamic)
    write, read = _found(tmp_path, name, 64, dynamic)
    assert write == read == ("out-of-bounds", "the block's shared memory has 256 bytes")


def test_a_write_beyond_an_array_of_a_thread_is_found(tmp_path):
    assert [] == _found(tmp_path, "local", 8)
    assert ["out-of-bounds"] == [kind for kind, _ in _found(tmp_path, "local", 9)]


def test_the_heap_of_kernels_is_checked_though_it_exists_when_checks_begin(tmp_path):
    """As it does for the second test of a run, or the second cell of a notebook."""
    kernels = {name: ct.compile(HEAP, name) for name in ("keep", "use", "drop")}
    block = ct.zeros(1, np.int64)

    def run(name, value):
        with record(tmp_path / "run.ctrace", checks=["memcheck", "initcheck"], force=True):
            kernels[name][1, 1](block, np.int32(value))
            ct.synchronize()
        return [one.kind.value for one in check(reader.read(tmp_path / "run.ctrace")).on_device]

    numbers = 3000  # of 4 B, in several pages
    assert [] == run("keep", numbers)
    assert [] == run("use", numbers - 1)
    assert ["out-of-bounds"] == run("use", numbers + 4)  # the 16 bytes that memcheck left after it count as its own
    assert [] == run("use", 0)
    assert ["use-after-free"] == run("drop", numbers - 1)
    assert ["out-of-bounds"] * 2 == run("use", 1)  # its read and its write
    assert [] == run("keep", 1)


def test_a_kernel_that_writes_to_a_mapping_for_reading_is_reported_and_goes_on(tmp_path):
    def ok(result):
        assert not result[0], result[0]
        return result[1] if len(result) > 1 else None

    kernel = ct.compile('extern "C" __global__ void copy(int *p) { p[1] = p[0] + 1; }', "copy")
    properties, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    for one in (properties, access):
        one.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    size = 2 << 20
    kinds = driver.CUmemAccess_flags
    address = int(ok(driver.cuMemAddressReserve(size, 0, 0, 0)))
    handle = ok(driver.cuMemCreate(size, properties, 0))
    ok(driver.cuMemMap(address, size, 0, handle, 0))
    try:
        with record(tmp_path / "run.ctrace", checks=["memcheck"]):
            for kind in ("READ", "READWRITE", "READ", "READWRITE"):
                access.flags = getattr(kinds, f"CU_MEM_ACCESS_FLAGS_PROT_{kind}")
                ok(driver.cuMemSetAccess(address, size, [access], 1))
                ct.launch(ct.current_stream(), ct.LaunchConfig(grid=1, block=1), kernel, np.uint64(address))
                ct.synchronize()
        found = check(reader.read(tmp_path / "run.ctrace")).on_device
        assert [("read-only", 2)] == [(one.kind.value, one.count) for one in found]
        assert found[0].text.endswith("CU_MEM_ACCESS_FLAGS_PROT_READ")
        back = np.zeros(2, np.int32)
        ok(driver.cuMemcpyDtoH(back.ctypes.data, address, 8))
        assert [0, 1] == back.tolist()
    finally:
        ok(driver.cuMemUnmap(address, size))
        ok(driver.cuMemRelease(handle))
        ok(driver.cuMemAddressFree(address, size))


PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.global .u32 value;
.visible .entry triggers() { griddepcontrol.launch_dependents; st.global.u32 [value], 1; ret; }
.visible .entry plain() { st.global.u32 [value], 1; ret; }
.visible .entry waits() { griddepcontrol.wait; st.global.u32 [value], 1; ret; }
"""


@pytest.mark.parametrize(
    ("first", "port", "second", "races"),
    [
        ("triggers", 1, "plain", True),
        ("triggers", 1, "waits", False),
        ("plain", 1, "plain", False),
        ("plain", 2, "plain", True),
        ("triggers", 0, "plain", False),
    ],
)
def test_a_node_that_may_begin_early_comes_in_no_order_unless_it_waits(tmp_path, first, port, second, races):
    def ok(result):
        assert not result[0], result[0]
        return result[1] if len(result) == 2 else result[1:]

    ct.synchronize()
    module = ok(driver.cuModuleLoadData(PTX))
    graph, nodes = ok(driver.cuGraphCreate(0)), []
    data = driver.CUgraphEdgeData()
    data.from_port, data.type = port, int(port == 1)
    with record(tmp_path / "run.ctrace", measure_accesses=True):
        for name in (first, second):
            params = driver.CUDA_KERNEL_NODE_PARAMS()
            params.func = ok(driver.cuModuleGetFunction(module, name.encode()))
            params.gridDimX = params.gridDimY = params.gridDimZ = 1
            params.blockDimX = params.blockDimY = params.blockDimZ = 1
            nodes.append(ok(driver.cuGraphAddKernelNode(graph, None, 0, params)))
        ok(driver.cuGraphAddDependencies(graph, nodes[:1], nodes[1:], [data], 1))
        executable = ok(driver.cuGraphInstantiate(graph, 0))
        ok(driver.cuGraphLaunch(executable, ct.current_stream().cuda_stream))
        ct.synchronize()
    findings = check(reader.read(tmp_path / "run.ctrace")).findings
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(graph))
    ok(driver.cuModuleUnload(module))
    assert races == bool(findings)


TILES = """
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
extern "C" __global__ void tiles(int *out) {
    __shared__ int s[128];
    auto tile = cg::tiled_partition<64>(cg::this_thread_block());
    s[threadIdx.x] = threadIdx.x;
    tile.sync();
    int other = s[threadIdx.x ^ 63];
    out[threadIdx.x] = other * 100000 + cg::reduce(tile, other, cg::plus<int>());
}
"""


def test_a_tile_of_several_warps_has_shared_memory_apart_from_the_kernel_s(tmp_path):
    kernel, out = ct.compile(TILES, "tiles"), ct.zeros(128, np.int32)
    with record(tmp_path / "run.ctrace", checks=["memcheck", "racecheck", "synccheck"]):
        ct.launch(ct.current_stream(), ct.LaunchConfig(grid=1, block=128), kernel, out)
        found = out.get()
    thread = np.arange(128)
    other = thread ^ 63
    assert (other * 100000 + np.repeat([thread[:64].sum(), thread[64:].sum()], 64)).tolist() == found.tolist()
    assert [] == list(check(reader.read(tmp_path / "run.ctrace")).on_device)
