"""What modules of an eager PyTorch program hold on a GPU."""

from __future__ import annotations

import pytest
from gpu_recordings import record

from cudatool import analyze
from cudatool._driver import gpu_names
from cudatool.trace.events import OF_BACKWARD

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_names(), reason="no NVIDIA GPU answers")]

TRAINING = """
import torch
from torch.utils.checkpoint import checkpoint

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 512)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.again = Block()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return checkpoint(self.again, x, use_reentrant=False)

def train():
    net = Net().cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.randn(4096, 512, device="cuda")
    for _ in range(4):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()

train()
"""
WEIGHTS = 512 * 2048 * 4


def test_each_layer_holds_its_parameters_state_and_activations(tmp_path):
    trace, _ = record(tmp_path, TRAINING, "torch")
    (diagnosis,) = analyze.report(trace).diagnoses
    modules = diagnosis.modules
    assert modules is not None and modules.named > 0.95 * modules.size, modules.sentences()
    held = {row.path: row for row in modules.held}
    for layer in ("layers.0", "layers.1", "layers.2", "again"):
        for linear in ("up", "down"):
            row = held[f"{layer}.{linear}"]
            assert WEIGHTS <= row.parameters < 1.1 * WEIGHTS, row
            assert 2 * WEIGHTS <= row.optimizer_state < 2.1 * WEIGHTS, row
        if layer != "again":  # which is not computed anew at the peak, or the last of all
            assert held[f"{layer}.up"].activations >= 4096 * 2048 * 4
            assert held[layer].activations >= 4096 * 2048 * 4  # of gelu
    assert not set(held) - {
        "Net",
        *(f"{layer}{end}" for layer in ("layers.0", "layers.1", "layers.2", "again") for end in ("", ".up", ".down")),
    }


def test_memory_of_the_backward_pass_is_that_of_the_module_whose_call_made_the_node(tmp_path):
    trace, _ = record(tmp_path, TRAINING, "torch")
    blocks = analyze.blocks(trace)
    known = analyze.block_modules(trace, blocks)
    gradients = blocks.requested == WEIGHTS  # of weights, and their state
    in_backward = trace.records["flags"][blocks.start] & OF_BACKWARD != 0
    found = [known.paths[path] for path in known.path[gradients & in_backward].tolist()]
    steps = 4
    layers = "layers.0", "layers.1", "layers.2", "again"
    linears = [f"Net.{layer}.{linear}" for layer in layers for linear in ("up", "down")]
    assert len(found) == steps * len(linears)
    # A call before there were names, which several layers share, has the path of its classes.
    assert {*linears} <= {*found} <= {*linears, "Net.Block.Linear"}
    assert all(steps - 1 <= found.count(path) <= steps for path in linears), found
