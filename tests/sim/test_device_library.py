"""What libcudadevrt gives kernels, called from PTX."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

# Thread 0 of each block adds to a counter; after the synchronization every block must see all additions.
KERNEL = b""".version 8.3
.target sm_90
.address_size 64
.extern .func (.param .b64 result) cudaCGGetIntrinsicHandle(.param .b32 scope);
.extern .func (.param .b32 result) cudaCGSynchronize(.param .b64 handle, .param .b32 flags);
.visible .entry kernel(.param .u64 counter, .param .u64 seen) {
    .reg .b32 %t, %b, %r; .reg .b64 %c, %s, %h; .reg .pred %p;
    .param .b32 scope; .param .b64 handle; .param .b32 flags; .param .b32 status;
    ld.param.u64 %c, [counter]; ld.param.u64 %s, [seen];
    mov.u32 %t, %tid.x; mov.u32 %b, %ctaid.x; setp.eq.u32 %p, %t, 0;
    @%p red.global.add.u32 [%c], 1;
    st.param.b32 [scope], 1;
    call (handle), cudaCGGetIntrinsicHandle, (scope);
    st.param.b32 [flags], 0;
    call (status), cudaCGSynchronize, (handle, flags);
    ld.param.b32 %r, [status]; ld.global.u32 %t, [%c]; add.u32 %t, %t, %r;
    mad.wide.u32 %s, %b, 4, %s; @%p st.global.u32 [%s], %t;
    ret;
}
"""


@pytest.mark.parametrize("blocks", [1, 2, 37])
@pytest.mark.usefixtures("checked")
def test_grid_synchronization_of_a_cooperative_launch(driver, ok, blocks):
    module = ok(driver.cuModuleLoadData(KERNEL))
    function = ok(driver.cuModuleGetFunction(module, b"kernel"))
    memory = ok(driver.cuMemAlloc(4 * (1 + blocks)))
    ok(driver.cuMemsetD8(memory, 0, 4 * (1 + blocks)))
    arguments = ((int(memory), int(memory) + 4), (ctypes.c_void_p, ctypes.c_void_p))
    ok(driver.cuLaunchCooperativeKernel(function, blocks, 1, 1, 64, 1, 1, 0, 0, arguments))
    seen = np.zeros(1 + blocks, "u4")
    ok(driver.cuMemcpyDtoH(seen, memory, seen.nbytes))
    assert [blocks] * (1 + blocks) == seen.tolist()
    ok(driver.cuMemFree(memory))
    ok(driver.cuModuleUnload(module))
