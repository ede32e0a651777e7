"""Variables lie at addresses that are multiples of what they declare, for each thread of a block."""

from __future__ import annotations

import numpy as np
import pytest

ADDRESS = """.reg .b32 %t, %n; .reg .b64 %a, %b; ld.param.u64 %a, [p]; mov.u32 %t, %tid.x; mad.wide.u32 %a, %t, 8, %a;
{declaration} mov.u64 %b, x; cvta.{space}.u64 %b, %b; {barrier} st.global.u64 [%a], %b; ret;"""


@pytest.mark.parametrize("barrier", ["", "bar.sync 0;"], ids=["loop over threads", "cut at a barrier"])
@pytest.mark.parametrize("align", [8, 16, 64, 256])
def test_local_variables(ptx_kernel, launch, align, barrier):
    declaration = (
        f".local .align 8 .b8 first[8]; .local .align {align} .b8 x[24]; st.local.u64 [first], 1; st.local.u64 [x], 1;"
    )
    kernel = ptx_kernel(".param .u64 p", ADDRESS.format(declaration=declaration, space="local", barrier=barrier))
    addresses = np.zeros(40, "u8")
    launch(kernel, 1, 40, addresses)
    assert [0] * 40 == (addresses % align).tolist()
    assert addresses.all()


@pytest.mark.parametrize("align", [16, 128, 1024])
def test_dynamic_shared_memory_behind_static(ptx_kernel, launch, align):
    before = f".extern .shared .align {align} .b8 x[];"
    declaration = ".shared .align 4 .b8 first[20]; st.shared.u32 [first+16], 1;"
    body = ADDRESS.format(declaration=declaration, space="shared", barrier="bar.sync 0; st.shared.u64 [x+56], 1;")
    addresses = np.zeros(4, "u8")
    launch(ptx_kernel(".param .u64 p", body, before=before), 1, 4, addresses, shared_bytes=64)
    assert [0] * 4 == (addresses % align).tolist()
