"""PyTorch watched as it runs, with the host's tensors in the place of a device's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest

from cudatool.collect.torch_accesses import IDLE
from cudatool.collect.torch_program import TorchCollector
from cudatool.trace import hooks, stacks
from cudatool.trace.events import AccessFlag, Event, Kind

if find_spec("torch") is None:
    pytest.skip("PyTorch is not installed", allow_module_level=True)
if which("g++") is None:
    pytest.skip("there is no C++ compiler", allow_module_level=True)
torch = pytest.importorskip("torch")


@pytest.fixture
def seen() -> Iterator[list[Event]]:
    """What is recorded while the test runs; the test calls `flush` to have it."""
    hooks.reset()
    found: list[Event] = []
    hooks.subscribe(found.append)
    collector = TorchCollector(device="cpu")
    collector.start()
    flush.collector = collector
    yield found
    collector.stop()
    hooks.reset()


def flush() -> None:
    flush.collector.flush()


def launches(events: list[Event]) -> list[str]:
    return [event.name for event in events if event.kind is Kind.KERNEL_LAUNCH]


def relu(events: list[Event]) -> Event:
    return next(event for event in events if event.name == "aten::relu")


def lines(event: Event) -> list[str]:
    return [Path(frame.file).read_text().splitlines()[frame.line - 1].strip() for frame in stacks.frames(event.stack)]


def test_operator_has_the_bytes_of_its_views(seen):
    x = torch.zeros(8, 8)
    (x[:, :2] + 1).sum()
    flush()
    add = next(event for event in seen if event.name == "aten::add.Tensor")
    accesses = [e for e in seen if e.kind is Kind.ACCESS and e.correlation == add.correlation]
    read, _, written = accesses  # the view, the number, the result
    assert (read.address, read.size, read.aux0, read.aux1, read.flags) == (x.data_ptr(), 8, 32, 8, AccessFlag.READ)
    assert (written.size, written.aux1, written.flags) == (64, 0, AccessFlag.WRITE)


def test_operator_has_the_line_of_the_program_that_called_it(seen):
    x = torch.ones(4)
    torch.nn.functional.softplus(x)
    flush()
    found = next(event for event in seen if event.name == "aten::softplus")
    assert lines(found)[0] == "torch.nn.functional.softplus(x)"


def test_views_and_allocation_are_no_operations(seen):
    x = torch.empty(4, 4)
    x.t()[1:].view(-1, 4).unsqueeze(0).detach()
    flush()
    assert launches(seen) == []


def test_operators_made_of_others_are_seen_as_those(seen):
    torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4))
    flush()
    assert launches(seen) == ["aten::fill_.Scalar"] * 3 + ["aten::addmm"]


def test_what_an_operator_calls_inside_is_not_seen(seen):
    torch.ones(4, 4).clone()  # allocates and copies
    flush()
    assert launches(seen) == ["aten::fill_.Scalar", "aten::clone"]


def test_functions_of_the_program_have_their_own_names_as_nodes(seen):
    def function(name):
        forward, backward = staticmethod(lambda ctx, x: x * 2), staticmethod(lambda ctx, gradient: gradient * 2)
        return type(name, (torch.autograd.Function,), {"forward": forward, "backward": backward})

    x = torch.ones(4, requires_grad=True)
    function("Second").apply(function("First").apply(x)).sum().backward()
    flush()
    nodes = [name.partition("(")[2] for name in launches(seen) if name.startswith("aten::mul") and "(" in name]
    assert nodes == ["SecondBackward)", "FirstBackward)"]


def test_backward_operator_has_its_node_and_the_line_of_the_forward_one(seen):
    x = torch.ones(4, requires_grad=True)
    y = x.exp()
    y.sum().backward()
    flush()
    backward = next(event for event in seen if event.name == "aten::mul.Tensor (ExpBackward0)")
    assert lines(backward)[0] == "y = x.exp()"


def test_gradients_are_accumulated_at_the_line_that_calls_backward(seen):
    x = torch.ones(4, requires_grad=True)
    for _ in range(2):
        x.exp().sum().backward()
    flush()
    accumulation = next(event for event in seen if event.name.endswith("(AccumulateGrad)"))
    assert lines(accumulation)[0] == "x.exp().sum().backward()"


def test_operators_of_every_thread_are_seen(seen):
    thread = threading.Thread(target=lambda: torch.ones(4).relu())
    thread.start()
    thread.join()
    flush()
    assert relu(seen).thread != hooks.thread_id()


def test_operator_under_a_python_mode_is_seen_once(seen):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x = torch.ones(4)
    with Mode():
        x.relu()
    flush()
    assert launches(seen) == ["aten::fill_.Scalar", "aten::relu"]


def test_operator_on_a_class_of_tensors_that_have_memory_is_seen(seen):
    class Kept(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    x = torch.Tensor._make_subclass(Kept, torch.ones(4))
    x.relu()
    flush()
    assert launches(seen) == ["aten::fill_.Scalar", "aten::relu"]
    accesses = [event for event in seen if event.kind is Kind.ACCESS and event.correlation == relu(seen).correlation]
    assert [x.data_ptr()] == [event.address for event in accesses if event.flags & AccessFlag.READ]


def test_operators_that_are_defined_while_it_watches_are_seen(seen):
    x = torch.ones(4)
    for written, result in (("", "Tensor"), ("(a!)", "()")):  # the second time it writes to its argument
        library = torch.library.Library("defined_later", "DEF")
        library.define(f"op(Tensor{written} x) -> {result}")
        library.impl("op", torch.clone if result == "Tensor" else lambda x: None, "CPU")
        x.relu()
        torch.ops.defined_later.op(x)
        library._destroy()
    flush()
    assert launches(seen)[1:] == ["aten::relu", "defined_later::op"] * 2
    first, second = [event for event in seen if event.name == "defined_later::op"]
    flags = [
        {e.flags for e in seen if e.kind is Kind.ACCESS and e.correlation == op.correlation} for op in (first, second)
    ]
    assert not any(flag & AccessFlag.WRITE for flag in flags[0] if flag & AccessFlag.READ)
    assert all(flag & AccessFlag.WRITE for flag in flags[1])


def test_operators_of_a_vectorized_function_are_seen_with_all_their_memory(seen):
    x = torch.ones(3, 4)
    torch.func.vmap(torch.relu)(x)
    flush()
    accesses = [event for event in seen if event.kind is Kind.ACCESS and event.correlation == relu(seen).correlation]
    assert [48, 48] == [event.size for event in accesses]


def of_launch(events: list[Event], name: str) -> list[Event]:
    (launch,) = [event for event in events if event.name == name]
    return [event for event in events if event.kind is Kind.ACCESS and event.correlation == launch.correlation]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_operator_on_sparse_tensors_touches_what_they_consist_of(seen):
    whole = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 4.0]])
    coordinates, rows = whole.to_sparse(), whole.to_sparse_csr()
    coordinates @ torch.ones(3, 2)
    rows @ torch.ones(3, 2)
    flush()
    parts = [coordinates._indices(), coordinates._values()], [rows.crow_indices(), rows.col_indices(), rows.values()]
    for name, expected in zip(("aten::mm", "aten::addmm"), parts, strict=False):
        read = {
            (event.address, event.size) for event in seen if event.flags & AccessFlag.READ and event.kind is Kind.ACCESS
        }
        assert {(part.data_ptr(), part.nbytes) for part in expected} <= read, name


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_operator_on_a_nested_tensor_touches_at_most_its_memory(seen):
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    nested.relu()
    flush()
    (read, written) = of_launch(seen, "aten::relu")
    assert (read.address, read.size, read.flags) == (
        nested.data_ptr(),
        80,
        AccessFlag.READ | AccessFlag.INEXACT,
    )
    assert (written.size, written.flags) == (80, AccessFlag.WRITE | AccessFlag.INEXACT)


def test_dynamic_shapes_are_traced_as_without_it(seen):
    from torch.fx.experimental.proxy_tensor import make_fx

    def some(x):
        y = x.clone().to(torch.float64)
        return torch.rot90(y + y.new_empty(x.shape).zero_(), 1), torch.zeros(x.shape[0]).sum()

    traced = make_fx(some, tracing_mode="symbolic")(torch.ones(3, 5))
    assert "3" not in [str(argument) for node in traced.graph.nodes for argument in node.args]
    assert traced(torch.ones(7, 2))[0].shape == (2, 7)
    assert launches(seen) == []


def test_tensors_without_memory_are_left_out(seen):
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.empty(4, device="meta").relu()
    with FakeTensorMode():
        torch.empty(4).relu()
    flush()
    assert launches(seen) == []


def test_operator_that_fails_is_over(seen):
    with pytest.raises(RuntimeError):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    torch.ones(4).relu()
    flush()
    assert launches(seen)[-1] == "aten::relu"


def test_own_events_come_after_what_pytorch_did_before(seen):
    torch.ones(4).relu()
    hooks.emit(Kind.DEVICE_SYNCHRONIZE, device=0)
    kinds = [event.kind for event in seen]
    assert kinds.index(Kind.KERNEL_LAUNCH) < kinds.index(Kind.DEVICE_SYNCHRONIZE)
    assert kinds[0] is Kind.STREAM_CREATE


def test_long_logs_go_to_a_file_and_come_back_whole(seen):
    extension = flush.collector._extension
    extension.stop()
    extension.start("cpu", stacks.capture, hooks.thread_id, IDLE, 64)
    x = torch.ones(4)
    for _ in range(50):
        x.relu_()
    flush()
    assert launches(seen) == ["aten::fill_.Scalar"] + ["aten::relu_"] * 50
    extension.start("cpu", stacks.capture, hooks.thread_id, IDLE, 8 << 20)


def test_nothing_is_left_behind(seen):
    query, backward = torch.Tensor.numpy, torch.autograd._engine_run_backward
    flush.collector.stop()
    assert torch.Tensor.numpy is not query
    assert torch.autograd._engine_run_backward is not backward
    torch.ones(4)
    hooks.emit(Kind.DEVICE_SYNCHRONIZE, device=0)
    assert launches(seen) == []


def test_without_the_caching_allocator_nothing_is_watched(seen, monkeypatch):
    flush.collector.stop()
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    collector = TorchCollector(device="cpu")
    collector.start()
    torch.ones(4).relu()
    collector.flush()
    assert launches(seen) == []
    assert [event.name.partition(":")[0] for event in seen if event.kind is Kind.WARNING] == ["PyTorch is not watched"]


def program(source: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(
        "from cudatool.collect.torch_program import TorchCollector\n"
        "from cudatool.trace import hooks\n"
        "import os, sys\n"
        "names = []\n"
        "hooks.subscribe(lambda event: names.append(event.name) if event.kind in (40, 73) else None)\n"
        "collector = TorchCollector(device='cpu')\n"
        "collector.start()\n" + source
    )
    return subprocess.run(
        [sys.executable, "-W", "error", path],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_program_is_watched_from_its_import_of_torch(tmp_path):
    done = program(
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "assert type(torch.__spec__.loader).__name__ == type(torch.__loader__).__name__ == 'SourceFileLoader'\n"
        "torch.ones(3).relu()\n"
        "collector.flush()\n"
        "print(names)\n",
        tmp_path,
    )
    assert done.stdout == "['aten::fill_.Scalar', 'aten::relu']\n", done.stderr


def test_forked_child_goes_on_unwatched(tmp_path):
    done = program(
        "import torch\n"
        "torch.ones(3)\n"
        "if not (child := os.fork()):\n"
        "    torch.ones(3).relu()\n"
        "    collector.flush()\n"
        "    os._exit(len(names) - 1)\n"  # the parent's operator alone
        "status = os.waitpid(child, 0)[1]\n"
        "collector.flush()\n"
        "print(status, names)\n",
        tmp_path,
    )
    assert done.stdout == "0 ['aten::fill_.Scalar']\n", done.stderr


@pytest.mark.parametrize(("compiler", "reason"), [("false", "cannot be built"), ("", "needs a C++ compiler")])
def test_without_a_compiler_the_program_runs_and_a_warning_says_so(tmp_path, compiler, reason):
    done = program(
        "import torch\ncollector.flush()\nprint(torch.ones(3).sum().item(), names)\n",
        tmp_path,
        CUDATOOL_CACHE_DIR=str(tmp_path / "cache"),
        CXX=compiler,
        PATH=os.environ["PATH"] if compiler else str(tmp_path),
    )
    assert done.returncode == 0
    assert done.stdout.startswith("3.0 ['PyTorch is not watched:")
    assert reason in done.stdout
