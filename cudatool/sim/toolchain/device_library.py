"""Functions of libcudadevrt that kernels call: NVIDIA's library is machine code, so these are our own, in PTX.

They are linked to every image that names one. Grid synchronization works as in the header of cooperative groups: each
launch has a workspace whose address is in ``%envreg1`` and ``%envreg2``, with a barrier word 4 bytes from its start.
"""

from __future__ import annotations

import re

from cudatool import ptx

__all__ = ["with_device_library"]

_PTX = b""".version 8.3
.target sm_90
.address_size 64

.weak .func (.param .b64 result) cudaCGGetIntrinsicHandle(.param .b32 scope)
{
    .reg .b32 %high, %low;
    .reg .b64 %handle;
    mov.u32 %high, %envreg1;
    mov.u32 %low, %envreg2;
    mov.b64 %handle, {%low, %high};
    st.param.b64 [result], %handle;
    ret;
}

// All blocks add to the barrier word: the first one 2^31 less the number of the others, those 1 each. So the word's top
// bit changes when the last one has come, whatever its value was before.
.weak .func (.param .b32 result) cudaCGSynchronize(.param .b64 handle, .param .b32 flags)
{
    .reg .b32 %a, %b, %blocks, %share, %before, %now;
    .reg .b64 %workspace;
    .reg .pred %other, %waits;
    bar.sync 0;
    mov.u32 %a, %tid.x;
    mov.u32 %b, %tid.y;
    or.b32 %a, %a, %b;
    mov.u32 %b, %tid.z;
    or.b32 %a, %a, %b;
    setp.ne.u32 %other, %a, 0;
    @%other bra done;
    ld.param.u64 %workspace, [handle];
    mov.u32 %blocks, %nctaid.x;
    mov.u32 %a, %nctaid.y;
    mul.lo.u32 %blocks, %blocks, %a;
    mov.u32 %a, %nctaid.z;
    mul.lo.u32 %blocks, %blocks, %a;
    mov.u32 %a, %ctaid.x;
    mov.u32 %b, %ctaid.y;
    or.b32 %a, %a, %b;
    mov.u32 %b, %ctaid.z;
    or.b32 %a, %a, %b;
    setp.ne.u32 %other, %a, 0;
    sub.u32 %share, 0x80000001, %blocks;
    selp.b32 %share, 1, %share, %other;
    fence.acq_rel.gpu;
    atom.add.u32 %before, [%workspace+4], %share;
again:
    ld.volatile.u32 %now, [%workspace+4];
    xor.b32 %now, %now, %before;
    setp.ge.s32 %waits, %now, 0;
    @%waits bra again;
    fence.acq_rel.gpu;
done:
    bar.sync 0;
    st.param.b32 [result], 0;
    ret;
}
"""
_NAMES = re.compile(rb"\b(?:cudaCGGetIntrinsicHandle|cudaCGSynchronize)\b")


def with_device_library(image: bytes) -> bytes:
    """Return the PTX `image`, linked with the functions of libcudadevrt if it names one."""
    return ptx.join([image, _PTX]) if _NAMES.search(image) else image
