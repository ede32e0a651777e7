"""Compare the stacks that memory of compiled code gets, forward and backward, with the frames that Python has there.

python torch_compiled.py LIBCUPTI

Products alone: for these the compiler needs no C++. What it calls to allocate is replaced by a function that notes the
stack which memory would get there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch._inductor.config
from drained import drained
from torch._C._dynamo import guards

from cudatool.collect import _cupti
from cudatool.collect.torch_build import load

torch._inductor.config.force_disable_caches = True
libcupti = sys.argv[1]
extension = load(torch, "torch_blocks")
_cupti.open(libcupti)
_cupti.start({"cuEventRecord": ("qq", False, False, False, 0, False)}, 1 << 20)
assert extension.start(_cupti.log), "autograd's nodes are not seen"
noted: list[tuple[bool, int, tuple[str, int]]] = []
allocate = guards._empty_strided_cpu


def noting(*args: Any) -> torch.Tensor:
    caller = sys._getframe(1)
    noted.append(
        (torch._C._current_autograd_node() is not None, extension.stack(), (caller.f_code.co_filename, caller.f_lineno))
    )
    return allocate(*args)


guards._empty_strided_cpu = noting  # type: ignore[assignment]
first, second = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
result = torch.compile(lambda x: torch.mm(torch.mm(x, first), second))(torch.randn(8, 8))
extension.backward(True)
result.sum().backward()
extension.backward(False)

stack_of = drained(libcupti)
wrong = 0
for in_backward, number, truth in noted:
    places = stack_of(number)
    if truth not in places[:2]:  # the innermost is `noting`
        wrong += 1
        print("backward" if in_backward else "forward", "\n  found", places[:3], "\n  truth", truth)
print(len(noted), "buffers,", sum(own for own, _, _ in noted), "in the backward pass,", wrong, "wrong")
extension.stop()
sys.exit(bool(wrong) or not 0 < sum(own for own, _, _ in noted) < len(noted))
