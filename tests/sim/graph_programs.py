"""Kernels, and short ways to build graphs of them through cuda.bindings.driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

PTX = b"""
.version 8.0
.target sm_90
.address_size 64

.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);

.visible .entry affine(.param .u64 p, .param .u32 m, .param .u32 b)  // *p = *p * m + b
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<4>;
    ld.param.u64 %rd1, [p];
    ld.param.u32 %r1, [m];
    ld.param.u32 %r2, [b];
    ld.global.u32 %r3, [%rd1];
    mad.lo.s32 %r3, %r3, %r1, %r2;
    st.global.u32 [%rd1], %r3;
    ret;
}

.visible .entry set_value(.param .u64 handle, .param .u32 value)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [handle];
    ld.param.u32 %r1, [value];
    {
    .param .b64 param0;
    .param .b32 param1;
    st.param.b64 [param0], %rd1;
    st.param.b32 [param1], %r1;
    call.uni cudaGraphSetConditional, (param0, param1);
    }
    ret;
}

.visible .entry count_down(.param .u64 p, .param .u64 handle)  // the condition becomes --*p
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [p];
    ld.param.u64 %rd2, [handle];
    ld.global.u32 %r1, [%rd1];
    sub.u32 %r1, %r1, 1;
    st.global.u32 [%rd1], %r1;
    {
    .param .b64 param0;
    .param .b32 param1;
    st.param.b64 [param0], %rd2;
    st.param.b32 [param1], %r1;
    call.uni cudaGraphSetConditional, (param0, param1);
    }
    ret;
}
"""

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_TYPES = {
    "affine": (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32),
    "set_value": (ctypes.c_uint64, ctypes.c_uint32),
    "count_down": (ctypes.c_uint64, ctypes.c_uint64),
}


class Programs:
    """Kernels that are loaded, device memory of 64 numbers that are 0, and what adds nodes."""

    def __init__(self, driver: Any, ok: Callable[[Any], Any]) -> None:
        self.driver, self._ok = driver, ok
        self._module = ok(driver.cuModuleLoadData(PTX + b"\0"))
        self.functions = {name: ok(driver.cuModuleGetFunction(self._module, name.encode())) for name in _TYPES}
        self.memory = int(ok(driver.cuMemAlloc(256)))
        ok(driver.cuMemsetD32(self.memory, 0, 64))
        ok(driver.cuCtxSynchronize())
        self.stream = ok(driver.cuStreamCreate(1))
        self.graph = ok(driver.cuGraphCreate(0))
        self.context = ok(driver.cuCtxGetCurrent())
        self.order: list[str] = []
        self._keep: list[Any] = []

    def close(self) -> None:
        driver, ok = self.driver, self._ok
        driver.cuGraphDestroy(self.graph)
        ok(driver.cuStreamDestroy(self.stream))
        ok(driver.cuMemFree(self.memory))
        ok(driver.cuModuleUnload(self._module))

    # ---- nodes ----

    def kernel_params(self, name: str, *values: int, grid: int = 1) -> Any:
        arguments = [kind(value) for kind, value in zip(_TYPES[name], values, strict=True)]
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._keep.append((arguments, pointers))
        params = self.driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = self.functions[name]
        params.gridDimX, params.gridDimY, params.gridDimZ = grid, 1, 1
        params.blockDimX = params.blockDimY = params.blockDimZ = 1
        params.kernelParams = ctypes.addressof(pointers)
        return params

    def add_kernel(self, name: str, *values: int, after: Sequence[Any] = (), graph: Any = None) -> Any:
        params = self.kernel_params(name, *values)
        graph = self.graph if graph is None else graph
        return self._ok(self.driver.cuGraphAddKernelNode(graph, list(after), len(after), params))

    def affine(self, m: int, b: int, *, at: int = 0, after: Sequence[Any] = (), graph: Any = None) -> Any:
        """Add a kernel that makes number `at` of the memory x * m + b."""
        return self.add_kernel("affine", self.memory + 4 * at, m, b, after=after, graph=graph)

    def copy_params(
        self, target: int, source: int, size: int, *, to_host: bool = False, from_host: bool = False
    ) -> Any:
        params = self.driver.CUDA_MEMCPY3D()
        kinds = self.driver.CUmemorytype
        params.srcMemoryType = kinds.CU_MEMORYTYPE_HOST if from_host else kinds.CU_MEMORYTYPE_DEVICE
        params.dstMemoryType = kinds.CU_MEMORYTYPE_HOST if to_host else kinds.CU_MEMORYTYPE_DEVICE
        setattr(params, "srcHost" if from_host else "srcDevice", source)
        setattr(params, "dstHost" if to_host else "dstDevice", target)
        params.WidthInBytes, params.Height, params.Depth = size, 1, 1
        return params

    def set_params(
        self, address: int, value: int, width: int, *, element: int = 4, height: int = 1, pitch: int = 0
    ) -> Any:
        params = self.driver.CUDA_MEMSET_NODE_PARAMS()
        params.dst, params.value, params.elementSize = address, value, element
        params.width, params.height, params.pitch = width, height, pitch
        return params

    def host_function(self, name: str) -> int:
        """Return the address of a function that appends `name` to :attr:`order`."""
        function = HostFunction(lambda _: self.order.append(name))
        self._keep.append(function)
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    def add_host(self, name: str, after: Sequence[Any] = (), graph: Any = None) -> Any:
        params = self.driver.CUDA_HOST_NODE_PARAMS()
        params.fn = self.driver.CUhostFn(self.host_function(name))
        graph = self.graph if graph is None else graph
        return self._ok(self.driver.cuGraphAddHostNode(graph, list(after), len(after), params))

    def alloc_params(self, size: int) -> Any:
        driver = self.driver
        params = driver.CUDA_MEM_ALLOC_NODE_PARAMS()
        params.poolProps.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        params.poolProps.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        params.poolProps.location.id = 0
        params.bytesize = size
        return params

    def add_alloc(self, size: int, after: Sequence[Any] = ()) -> tuple[Any, int]:
        params = self.alloc_params(size)
        node = self._ok(self.driver.cuGraphAddMemAllocNode(self.graph, list(after), len(after), params))
        return node, int(params.dptr)

    def condition(self, default: int | None = None) -> int:
        flags = 0 if default is None else 1
        made = self.driver.cuGraphConditionalHandleCreate(self.graph, self.context, default or 0, flags)
        return int(self._ok(made))

    def conditional_params(self, kind: int, size: int, handle: int) -> Any:
        driver = self.driver
        params = driver.CUgraphNodeParams()
        params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle = handle
        params.conditional.type = driver.CUgraphConditionalNodeType(kind)
        params.conditional.size = size
        params.conditional.ctx = self.context
        return params

    def add_conditional(self, kind: int, size: int, handle: int, after: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
        """Return the node and its bodies. `kind` is 0 for IF, 1 for WHILE, 2 for SWITCH."""
        params = self.conditional_params(kind, size, handle)
        node = self._ok(self.driver.cuGraphAddNode(self.graph, list(after), None, len(after), params))
        return node, list(params.conditional.phGraph_out)

    # ---- running ----

    def instantiate(self, flags: int = 0, graph: Any = None) -> Any:
        return self._ok(self.driver.cuGraphInstantiate(self.graph if graph is None else graph, flags))

    def run(self, executable: Any = None, times: int = 1) -> None:
        """Launch the executable graph, or one made from the graph and destroyed afterwards, and wait."""
        mine = self.instantiate() if executable is None else None
        for _ in range(times):
            self._ok(self.driver.cuGraphLaunch(executable or mine, self.stream))
        self._ok(self.driver.cuStreamSynchronize(self.stream))
        if mine is not None:
            self._ok(self.driver.cuGraphExecDestroy(mine))

    def numbers(self, count: int = 1, at: int = 0, address: int = 0) -> list[int]:
        """Return numbers of the memory."""
        found = (ctypes.c_int * count)()
        self._ok(self.driver.cuMemcpyDtoH(found, (address or self.memory) + 4 * at, 4 * count))
        return list(found)

    def set(self, *numbers: int) -> None:
        """Set the first numbers of the memory."""
        self._ok(self.driver.cuMemcpyHtoD(self.memory, (ctypes.c_int * len(numbers))(*numbers), 4 * len(numbers)))

    def launch(self, stream: Any, m: int, b: int, at: int = 0) -> tuple[Any, ...]:
        """Launch the affine kernel in a stream, and return the driver's answer."""
        arguments = (self.memory + 4 * at, m, b), _TYPES["affine"]
        answer: tuple[Any, ...] = self.driver.cuLaunchKernel(
            self.functions["affine"], 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0
        )
        return answer
