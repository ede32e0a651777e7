"""The cost of recording on a GPU at each level: one program's loop, recorded and not in turns, in one process.

    python benchmarks/bench_record.py [--rounds 9] [--only cupy] [--levels memory kernels] [--peers]
    python benchmarks/bench_record.py --sanitize [--rounds 3] [--only cupy torch]
    python benchmarks/bench_record.py --alone [--rounds 5] [--only cupy_graph] [--levels memory kernels]
    python benchmarks/bench_record.py --rounds 21 --only torch --levels armed ring-memory ring-kernels

Two processes of one program differ by more than a recording costs, so the recording begins and ends within one. A line
has the median time of an unrecorded step, and the median ratio within a round; that of ``again``, which is not recorded
either, shows what the ratios of this run are worth. The program's first steps are recorded, so that its modules are
loaded as under ``cudatool run``. A loop takes half a second: what a recording does once, for
each stack that it has not seen, is then a small part, as it is in a program of minutes. The level ``armed`` is
`cudatool.arm()`, and ``ring-LEVEL`` what ``cudatool run --when`` keeps; neither is triggered. With ``--peers``,
PyTorch's programs also run under PyTorch's memory history and torch.profiler.

With ``--sanitize``, each program runs in processes of its own, plain and under ``cudatool sanitize`` in turns, as its
code must be loaded under the recording; a line has the ratio of the medians of their steps. With ``--alone``, likewise
under ``cudatool run`` with each level: graphs, and JAX, which makes some, must be measured so, as a recording that
begins after the driver has started records each kernel of a graph at the level ``kernels``, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_TIMED = """
import contextlib, json, sys, time
import cudatool
ways, rounds = sys.argv[1].split(","), int(sys.argv[2])
_first = contextlib.ExitStack()
_first.enter_context(cudatool.record("first.ctrace", level="kernels", force=True))

@contextlib.contextmanager
def history():
    torch.cuda.memory._record_memory_history(stacks="python")
    yield
    torch.cuda.memory._record_memory_history(enabled=None)

def way_of(way):
    if way in ("plain", "again"):
        return contextlib.nullcontext()
    if way == "history":
        return history()
    if way == "profiler":
        return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    if way == "armed":
        return cudatool.arm(on_signal=False)
    if way.startswith("ring-"):
        from cudatool.recording.armed import ArmOptions, armed_sources
        what = {"device": "cuda", "with_stacks": True, "measure_accesses": False, "level": way.removeprefix("ring-")}
        return armed_sources(ArmOptions(on_signal=False), **what)
    return cudatool.record("t.ctrace", level=way, force=True)

def timed(step, synchronize, count):
    for _ in range(5):
        step()
    synchronize()
    _first.close()
    found = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            with way_of(way):
                for _ in range(3):
                    step()
                synchronize()
                start = time.perf_counter()
                for _ in range(count):
                    step()
                synchronize()
                found[way].append((time.perf_counter() - start) / count)
    print("TIMES", json.dumps(found))
"""
_ALONE = """
import time
def timed(step, synchronize, count):
    for _ in range(5):
        step()
    synchronize()
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < 2:
        for _ in range(max(count // 50, 1)):
            step()
        synchronize()
        done += max(count // 50, 1)
    print("TIME", (time.perf_counter() - start) / done)
"""
PROGRAMS = {
    "cupy": """
import cupy as cp
x = cp.zeros(1000, cp.float32)
def step():
    global x
    x += 1
timed(step, cp.cuda.Device().synchronize, 50_000)
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
    timed(graph.launch, stream.synchronize, 25_000)
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
timed(step, lambda: x.block_until_ready(), 10_000)
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
timed(step, torch.cuda.synchronize, 80)
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
timed(step, torch.cuda.synchronize, 40)
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
timed(step, torch.cuda.synchronize, 40)
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
timed(step, torch.cuda.synchronize, 5)
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
timed(step, torch.cuda.synchronize, 100)
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
timed(graph.replay, torch.cuda.synchronize, 2000)
""",
}


def in_processes(name: str, ways: dict[str, list[str]], rounds: int) -> None:
    """Print how much longer a step takes in a process under each of these commands."""
    found: dict[str, list[float]] = {way: [] for way in ("plain", *ways)}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.py").write_text(_ALONE + PROGRAMS[name])
        for _ in range(rounds):
            for way in found:
                words = ["-m", "cudatool", *ways[way]] if way in ways else []
                command = [sys.executable, *words, "program.py"]
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
                # `sanitize` writes its report to stdout, and passes the program's on to stderr.
                written = (done.stdout + done.stderr).splitlines()
                lines = [line for line in written if line.startswith("TIME ")]
                if not lines:
                    print(f"{name} ({way}): status {done.returncode}\n{done.stderr[-1000:]}")
                    return
                found[way].append(float(lines[0].split()[1]))
    plain = statistics.median(found.pop("plain"))
    quotients = (f"{way} {statistics.median(taken) / plain:5.3f}" for way, taken in found.items())
    print(f"{name:16} plain {plain * 1e6:9.2f} us, times that: {'  '.join(quotients)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=list(PROGRAMS), metavar="PROGRAM")
    parser.add_argument(
        "--levels", nargs="*", default=["memory", "kernels", "graph-nodes", "launches"], metavar="LEVEL"
    )
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    os.environ["CUDATOOL_DEVICE"] = "cuda"
    for name in options.only:
        if importlib.util.find_spec(name.partition("_")[0]) is None:
            print(f"{name:16} not installed")
            continue
        if options.sanitize or options.alone:
            levels = {level: ["run", "-f", "--level", level] for level in options.levels} if options.alone else {}
            checked = {"sanitize": ["sanitize", "--allow-empty"]} if options.sanitize else {}
            in_processes(name, levels | checked, options.rounds)
            continue
        peers = ["history", "profiler"] if options.peers and name.startswith("torch") else []
        ways = ["plain", *options.levels, *peers, "again"]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "program.py").write_text(_TIMED + PROGRAMS[name])
            command = [sys.executable, "program.py", ",".join(ways), str(options.rounds)]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
        found = [line for line in done.stdout.splitlines() if line.startswith("TIMES ")]
        if done.returncode or not found:
            print(f"{name}: status {done.returncode}\n{done.stderr[-1000:]}")
            continue
        times = json.loads(found[0].removeprefix("TIMES "))
        plain = times.pop("plain")
        quotients = (
            f"{way} {statistics.median(a / b for a, b in zip(taken, plain, strict=True)):5.3f}"
            for way, taken in times.items()
        )
        print(
            f"{name:16} plain {statistics.median(plain) * 1e6:9.2f} us, times that: {'  '.join(quotients)}", flush=True
        )


if __name__ == "__main__":
    main()
