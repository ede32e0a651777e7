"""What recording costs on a GPU: the same program plain, and under ``cudatool run`` at each level, in turns.

    python benchmarks/bench_record.py [--rounds 5] [--only cupy] [--levels memory kernels] [--peers]

Each program says how long its own loop took; what is printed is the median of the rounds, and its quotient with that of
the plain program. With ``--peers``, PyTorch's programs also under PyTorch's memory history and torch.profiler.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_TIMED = """
import time
def timed(step, synchronize, count):
    for _ in range(max(count // 10, 3)):
        step()
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize()
    print("TIME", (time.perf_counter() - start) / count)
"""
PROGRAMS = {
    "cupy": """
import cupy as cp
x = cp.zeros(1000, cp.float32)
def step():
    global x
    x += 1
timed(step, cp.cuda.Device().synchronize, 50000)
""",
    "cupy_graph": """
import cupy as cp
stream = cp.cuda.Stream(non_blocking=True)
x = cp.zeros(1000, cp.float32)
with stream:
    x += 1
    stream.begin_capture()
    for _ in range(20):
        x += 1
    graph = stream.end_capture()
    timed(graph.launch, stream.synchronize, 5000)
""",
    "jax": """
import os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax, jax.numpy as jnp
f = jax.jit(lambda x, w: jnp.tanh(x @ w))
x = w = jnp.ones((1024, 1024)) * 1e-3
def step():
    global x
    x = f(x, w)
timed(step, lambda: x.block_until_ready(), 5000)
""",
    "torch": """
import torch
layer = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.randn(8, 64, 256, device="cuda")
def step():
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()
timed(step, torch.cuda.synchronize, 100)
""",
    "torch_resnet50": """
import timm, torch
model = timm.create_model("resnet50").cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
data = torch.randn(16, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
def step():
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = model(data).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
timed(step, torch.cuda.synchronize, 60)
""",
    "torch_gpt2": """
import torch, transformers
config = transformers.GPT2Config(n_layer=6, n_head=8, n_embd=512)
model = transformers.GPT2LMHeadModel(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
batches = torch.utils.data.DataLoader(torch.randint(0, 50000, (8 * 200, 128)), batch_size=8, pin_memory=True)
def forever():
    while True:
        yield from batches
source = forever()
def step():
    tokens = next(source).to("cuda", non_blocking=True)
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
timed(step, torch.cuda.synchronize, 100)
""",
    "torch_generate": """
import torch, transformers
config = transformers.LlamaConfig(
    vocab_size=32000, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8
)
model = transformers.LlamaForCausalLM(config).cuda().to(torch.bfloat16).eval()
tokens = torch.randint(0, 32000, (1, 32), device="cuda")
def step():
    model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=16, do_sample=False, pad_token_id=0)
timed(step, torch.cuda.synchronize, 15)
""",
    "torch_compiled": """
import torch
layer = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
model = torch.compile(torch.nn.TransformerEncoder(layer, 4).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.randn(8, 64, 256, device="cuda")
def step():
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()
timed(step, torch.cuda.synchronize, 200)
""",
    "torch_graph": """
import torch
layer = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 4).cuda().eval()
data = torch.randn(8, 64, 256, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.no_grad():
    model(data)
    with torch.cuda.graph(graph):
        model(data)
timed(graph.replay, torch.cuda.synchronize, 3000)
""",
}
_PEERS = {
    "history": "import torch\ntorch.cuda.memory._record_memory_history(stacks='python')\n",
    "profiler": "import torch\ntorch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]).start()\n",
}


def time_of(command: list[str], folder: str) -> float:
    """Return the seconds that the program says for a step."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("TIME ")]
    if done.returncode or not found:
        print(f"{' '.join(command)}: status {done.returncode}\n{done.stderr[-1000:]}")
        return float("nan")
    return float(found[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--levels", nargs="*", default=["memory", "kernels", "graph-nodes"])
    parser.add_argument("--peers", action="store_true")
    options = parser.parse_args()
    os.environ["CUDATOOL_DEVICE"] = "cuda"
    recorded = [sys.executable, "-m", "cudatool", "run", "-f", "-o", "t.ctrace", "--level"]
    for name in options.only:
        if importlib.util.find_spec(name.partition("_")[0]) is None:
            print(f"{name:16} not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "program.py").write_text(_TIMED + PROGRAMS[name])
            ways = {"plain": [sys.executable, "program.py"]}
            ways |= {level: [*recorded, level, "program.py"] for level in options.levels}
            for peer, begin in _PEERS.items() if options.peers and name.startswith("torch") else ():
                Path(folder, f"{peer}.py").write_text(begin + _TIMED + PROGRAMS[name])
                ways[peer] = [sys.executable, f"{peer}.py"]
            rounds = [{way: time_of(command, folder) for way, command in ways.items()} for _ in range(options.rounds)]
        medians = {way: statistics.median(one[way] for one in rounds) for way in ways}
        plain = medians.pop("plain")
        shown = "  ".join(f"{way} {median / plain:5.3f}" for way, median in medians.items())
        print(f"{name:16} plain {plain * 1e6:9.2f} us, times that: {shown}", flush=True)


if __name__ == "__main__":
    main()
