"""Which statements of the files of PyTorch's compiler allocate. Forms: torch/_inductor/codegen/wrapper.py of 2.11, 2.13."""

from __future__ import annotations

import pytest

from cudatool.collect.generated_source import is_backward, statements

HEAD = '''# AOT ID: ['0_forward']
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
triton_poi_fused_0 = async_compile.triton("triton_poi_fused_0", """
def triton_poi_fused_0(in_ptr0, out_ptr0):
    buf9 = empty_strided_cuda((1,), (1,), torch.float32)
""")
class Runner:
    def __init__(self, partitions):
        self.partitions = partitions
    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
'''
TAIL = """
            return (buf0, )
def get_args():
    from torch._dynamo.testing import rand_strided
    arg0_1 = rand_strided((8, 8), (8, 1), device='cuda:0', dtype=torch.float32)
    return [arg0_1]
"""


def found(body: str) -> list[tuple[str, str, tuple[str, ...], list[str]]]:
    """Return buffer, output, nodes and reuses of what allocates in `body`, which stands in ``call``."""
    inside = "".join(f"            {line}\n" for line in body.strip().splitlines())
    return [(own.buffer, own.output, own.nodes, own.reused_by) for own in statements(HEAD + inside + TAIL)]


def test_a_buffer_has_the_nodes_of_the_kernel_that_writes_it_first() -> None:
    body = """
buf0 = empty_strided_cuda((32, 1), (1, 32), torch.float32)
buf1 = empty_strided_cuda((32, 64), (64, 1), torch.float32)
# Topologically Sorted Source Nodes: [h, gelu], Original ATen: [aten.native_layer_norm]
stream0 = get_raw_stream(0)
triton_poi_fused_0.run(arg0_1, buf0, 32, stream=stream0)
# Topologically Sorted Source Nodes: [linear], Original ATen: [aten.addmm]
extern_kernels.mm(buf0, arg1_1, out=buf1)
"""
    assert found(body) == [
        ("buf0", "", ("h", "gelu"), []),
        ("buf1", "", ("linear",), []),
        ("", "", ("h", "gelu"), []),
        ("", "buf1", ("linear",), []),
    ]


def test_a_reuse_is_told_from_a_view() -> None:
    body = """
buf0 = empty_strided_cuda((32, 1), (1, 32), torch.float32)
buf1 = buf0; del buf0  # reuse
buf2 = reinterpret_tensor(buf1, (32, ), (1, ), 0)
buf3 = reinterpret_tensor(buf2, (1, 32), (1, 1), 0); del buf2  # reuse
"""
    assert found(body) == [("buf0", "", (), ["buf1", "buf3"])]


def test_a_library_call_allocates_its_results() -> None:
    body = """
# Topologically Sorted Source Nodes: [x], Original ATen: [aten.convolution]
buf0 = extern_kernels.convolution(arg0_1, arg1_1, stride=(1, 1), bias=None)
assert_size_stride(buf0, (1, 8, 8, 8), (512, 64, 8, 1), 'torch.ops.aten.convolution.default')
# Topologically Sorted Source Nodes: [topk], Original ATen: [aten.topk]
buf1 = torch.ops.aten.topk.default(buf0, 4)
buf2 = buf1[0]
buf3 = buf2; del buf2  # reuse
"""
    assert found(body) == [("buf0", "", ("x",), []), ("buf1", "", ("topk",), ["buf3"])]


def test_a_comment_that_stands_further_up_belongs_to_another_kernel() -> None:
    body = """
# Topologically Sorted Source Nodes: [x], Original ATen: [aten.convolution]
buf0 = extern_kernels.convolution(arg0_1, arg1_1)
del arg1_1
triton_poi_fused_0.run(buf0, 8, stream=stream0)
"""
    assert found(body) == [("buf0", "", ("x",), []), ("", "", (), [])]


def test_statements_have_the_lines_that_they_span() -> None:
    source = "def partition_0(args):\n    buf0 = torch.ops.mylib.big.default(\n        args[0],\n        4)\n"
    ((own),) = statements(source)
    assert (own.first, own.last, own.buffer) == (2, 4, "buf0")


def test_what_is_no_python_is_refused() -> None:
    with pytest.raises(SyntaxError):
        statements("#include <torch/csrc/inductor/cpp_prefix.h>\nextern void kernel();")


def test_a_backward_pass_is_told_by_its_first_comment() -> None:
    assert not is_backward(HEAD)
    assert is_backward(HEAD.replace("0_forward", "0_backward"))
