"""Compare the modules that memory of PyTorch gets, in forward and backward passes, with those that are being called.

python torch_modules.py LIBCUPTI

Models are made and destroyed in turns, so that their modules have addresses of earlier ones, and make modules in their
calls; checkpoints call layers anew in the backward pass. The main thread may be late to name modules that other threads
call: then the path may be that of the classes, or begin at a layer that a checkpoint called.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from types import FrameType
from typing import Any

import torch
from drained import drained_with_modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cudatool.collect import _cupti
from cudatool.collect.torch_build import load
from cudatool.collect.torch_modules import TorchModules

libcupti = sys.argv[1]
extension = load(torch, "torch_blocks")
_cupti.open(libcupti)
_cupti.start({"cuEventRecord": ("qq", False, False, False, 0, False)}, 1 << 20)
assert extension.start(_cupti.log), "autograd's nodes are not seen"
modules = TorchModules(torch, lambda records, names: None, was_imported=False)
assert modules.is_watching
checked: list[tuple[str, int, tuple[str, ...]]] = []
of_thread = threading.local()


def truth() -> tuple[str, ...]:
    """Return the paths that memory may get which is taken now: of the innermost module that is being called."""
    frame: FrameType | None = sys._getframe(1)
    called: list[torch.nn.Module] = []
    while frame is not None:
        if frame.f_code.co_name == "_wrapped_call_impl":
            called.insert(0, frame.f_locals["self"])
        frame = frame.f_back
    right = path_from(of_thread.model, "Model", called)
    if threading.current_thread() is threading.main_thread():
        return (right,)
    classes = ".".join(type(module).__name__ for module in called)
    return right, classes, *(path_from(one, type(one).__name__, called) for one in called)


def path_from(root: torch.nn.Module, name: str, called: list[torch.nn.Module]) -> str:
    """Return the path of the innermost module if that of `root` is its name."""
    path = ""
    paths = {id(module): f"{name}.{inside}".strip(".") for inside, module in root.named_modules()}
    for module in called:
        path = paths.get(id(module)) or f"{path}.{type(module).__name__}".strip(".")
    return path


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node, called = torch._C._current_autograd_node(), truth()
        is_computed_anew = node is not None and bool(called[0])  # by a checkpoint
        if is_computed_anew and not torch.is_grad_enabled():  # the checkpoint's own views
            return func(*args, **(kwargs or {}))
        assert extension.is_of_backward() == (node is not None and not is_computed_anew), func
        if node is None or is_computed_anew:
            checked.append((f"{func}{' anew' * is_computed_anew}", extension.stack(), called))
        elif "module" in node.metadata:
            checked.append((f"{func} in {node.name()}", extension.stack(), node.metadata["module"]))
        return func(*args, **(kwargs or {}))


class Nodes(TorchFunctionMode):
    """Notes at each new node of the backward graph which module makes it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        waiting = [getattr(result, "grad_fn", None)]
        while waiting:
            node = waiting.pop()
            if node is not None and "module" not in node.metadata and node.name() != "torch::autograd::AccumulateGrad":
                node.metadata["module"] = truth()
                waiting += [following for following, _ in node.next_functions]
        return result


class Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.Dropout(0.5)(self.second(torch.nn.functional.gelu(self.first(x))))


class Model(torch.nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x) * 2


def work(rounds: int) -> None:
    for number in range(rounds):
        model = of_thread.model = Model(8, 1 + number % 4)
        with Nodes(), Operators():
            for _ in range(2):
                loss = torch.nn.MSELoss()(model(torch.randn(8, 8)), torch.zeros(8, 8))
                loss.backward()
            model.layers[0](torch.randn(8, 8))  # keeps the path that it has in the model
        if threading.current_thread() is not threading.main_thread():
            lasting.append(model)  # or another may have its address when the main thread comes to name it
        del model, loss, of_thread.model
        gc.collect()


lasting: list[Model] = []
work(12)
threads = [threading.Thread(target=work, args=(4,)) for _ in range(2)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    time.sleep(0.001)  # the main thread names the modules of all
lasting.clear()
gc.collect()
assert not modules._named, "destroyed modules have names"
_, module_of = drained_with_modules(libcupti)
modules.stop()
extension.stop()
wrong = 0
for index, (what, number, right) in enumerate(checked):
    found = module_of(number)
    if found not in right:
        wrong += 1
        if wrong < 20:
            print(index, what, "\n  found", found, "\n  truth", right)
print(len(checked), "operators,", sum(" in " in what for what, *_ in checked), "in backward passes,", wrong, "wrong")
sys.exit(bool(wrong) or len(checked) < 1000 or not any(" anew" in what for what, *_ in checked))
