"""The cost of recording on a GPU at each level: one program's loop, recorded and not in turns, in one process.

    python benchmarks/bench_record.py [--rounds 9] [--only cupy] [--levels memory kernels] [--peers]
    python benchmarks/bench_record.py --sanitize [--processes 6] [--rounds 8] [--only cupy torch]
    python benchmarks/bench_record.py --alone [--processes 6] [--rounds 8] [--only cupy_graph] [--levels memory kernels]
    python benchmarks/bench_record.py --rounds 25 --only torch --levels armed armed-bare ring-memory

Two processes of one program differ by more than a recording costs, so the recording begins and ends within one. Each
round runs each way once, in an order of its own. A line has the median time of an unrecorded step; then for each way
the median of its ratios to the unrecorded loop of the same round, the interval in which that median lies with a
probability of 95 % (by the order of the ratios, whatever their distribution), and the median ratio of the processor
time of all threads. ``again`` is a second unrecorded loop: it shows what the ratios of this run are worth.

The program's first steps are recorded, so that its modules are loaded as under ``cudatool run``. A loop takes half a
second: what a recording does once, for each stack that it has not seen, is then a small part, as it is in a program of
minutes. The level ``armed`` is `cudatool.arm()`, ``armed-bare`` the same without PyTorch's history, and ``ring-LEVEL``
what ``cudatool run --when`` keeps; none is triggered. With ``--peers``, programs also run while CUPTI reports kernels,
copies and fills, and drops them (``cupti``: no tool that knows when kernels ran costs less), and PyTorch's under
its memory history, and under torch.profiler in a process of its own, as that does not give CUPTI back; with ``--alone``
only ``cupti``, from the start of the process.

With ``--sanitize``, each program runs in processes of its own, plain and under ``cudatool sanitize``, as its code must
be loaded under the recording. With ``--alone``, likewise under ``cudatool run`` with each level: graphs, and JAX, which
makes some, must be measured so, as a recording that begins after the driver has started records each kernel of a graph
at the level ``kernels``, too. Only there does CUPTI stay away from the unrecorded loop. These processes live at the
same time, and one after the other does a quarter of the loop. As two of one kind can differ by 17 % for as long as they
live, there are several of each (``--processes``); a ratio is then that of two processes, each with its median time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_CUPTI = """
import contextlib, threading
@contextlib.contextmanager
def cupti():
    from cudatool.collect import _cupti, cupti
    _cupti.open(cupti.find_library())
    _cupti.start({}, 1 << 20)
    _cupti.watch_activity(False)
    over = threading.Event()
    def drop():
        while not over.wait(0.1):
            _cupti.flush(False)
            _cupti.drain()
    reader = threading.Thread(target=drop, daemon=True)
    reader.start()
    yield
    over.set()
    reader.join()
    _cupti.stop()
"""
_FROM_THE_START = """
_whole = contextlib.ExitStack()
_whole.enter_context(cupti())
"""
_TIMED = (
    _CUPTI
    + """
import json, random, sys, time
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
    if way == "cupti":
        return cupti()
    if way == "profiler":
        return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    if way in ("armed", "armed-bare"):
        return cudatool.arm(on_signal=False, history=way == "armed")
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
        for way in random.sample(ways, len(ways)):
            with way_of(way):
                for _ in range(3):
                    step()
                synchronize()
                start, used = time.perf_counter(), time.process_time()
                for _ in range(count):
                    step()
                synchronize()
                found[way].append(((time.perf_counter() - start) / count, (time.process_time() - used) / count))
    print("TIMES", json.dumps(found))
"""
)
_IN_TURNS = """
import socket, time
def timed(step, synchronize, count):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("turns")
        with connection.makefile("rw", buffering=1) as turns:
            for _ in turns:
                start, used, steps = time.perf_counter(), time.process_time(), max(count // 4, 1)
                for _ in range(steps):
                    step()
                synchronize()
                print((time.perf_counter() - start) / steps, (time.process_time() - used) / steps, file=turns)
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


# The time of a step and its processor time, both in seconds, one pair a round.
Times = list[tuple[float, float]]


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return between which of these values the median of what they are drawn from lies, at 95 % or the most there is.

    Of n values, k or more lie below the median as often as k or more of n coins show heads.
    """
    ordered, count = sorted(values), len(values)
    left_out, outside = 0, 2 / 2**count
    while left_out < (count - 1) // 2:
        outside += 2 * math.comb(count, left_out + 1) / 2**count
        if outside > 0.05:
            break
        left_out += 1
    return ordered[left_out], ordered[count - 1 - left_out]


def print_line(name: str, sets: list[dict[str, Times]]) -> None:
    """Print the median time of an unrecorded step, and what each way's is of it: in each set's processes, or rounds."""
    plain = statistics.median(time for one in sets for time, _ in one["plain"])
    print(f"{name:16} plain {plain * 1e6:9.2f} us, times that:")
    for way in [way for way in sets[0] if way != "plain"]:
        pairs = [pair for one in sets for pair in compared(one[way], one["plain"], by_round=len(sets) == 1)]
        low, high = median_interval([time for time, _ in pairs])
        median, processor = (statistics.median(values) for values in zip(*pairs, strict=True))
        print(f"    {way:12} {median:5.3f} ({low:5.3f} to {high:5.3f}), processor {processor:5.3f}")
    sys.stdout.flush()


def compared(taken: Times, plain: Times, *, by_round: bool) -> Times:
    """Return the ratios of times and of processor times: of each round, or one of the medians."""
    if not by_round:
        taken, plain = ([tuple(map(statistics.median, zip(*times, strict=True)))] for times in (taken, plain))
    return [(time / least, used / least_used) for (time, used), (least, least_used) in zip(taken, plain, strict=True)]


def in_processes(name: str, ways: dict[str, list[str]], rounds: int, processes: int) -> None:
    """Print how much longer a step takes in processes under each of these commands: all live, and take turns."""
    all_ways = ["plain", *ways, "again"]
    sets: list[dict[str, Times]] = [{way: [] for way in all_ways} for _ in range(processes)]
    of_processes = [(number, way) for number in range(processes) for way in all_ways]
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        servers, turns = {}, {}
        for number, way in of_processes:
            folder = Path(root, f"{way}-{number}")
            folder.mkdir()
            first = _CUPTI + _FROM_THE_START if way == "cupti" else ""
            (folder / "program.py").write_text(first + _IN_TURNS + PROGRAMS[name])
            server = stack.enter_context(socket.create_server(str(folder / "turns"), family=socket.AF_UNIX))
            server.settimeout(1)
            with open(folder / "output", "w") as output:
                command = [sys.executable, *ways.get(way, []), "program.py"]
                started = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
            servers[number, way] = server, started
            stack.callback(started.wait)
        for key, (server, process) in servers.items():
            while key not in turns and process.poll() is None:
                with contextlib.suppress(TimeoutError):
                    turns[key] = stack.enter_context(server.accept()[0].makefile("rw", buffering=1))
        for round_ in range(rounds + 1):
            for number, way in random.sample(of_processes, len(of_processes)):
                line = ""
                if (number, way) in turns:
                    print("turn", file=turns[number, way])
                    line = turns[number, way].readline()
                if not line:
                    output = Path(root, f"{way}-{number}", "output").read_text()
                    print(f"{name} ({way}) failed:\n{output[-1000:]}")
                    return
                if round_:  # the first turn loads code
                    taken, used = line.split()
                    sets[number][way].append((float(taken), float(used)))
    print_line(name, sets)


def in_one_process(name: str, ways: list[str], rounds: int) -> None:
    """Print how much longer a step takes each way, in turns in one process."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.py").write_text(_TIMED + PROGRAMS[name])
        command = [sys.executable, "program.py", ",".join(ways), str(rounds)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    found = [line for line in done.stdout.splitlines() if line.startswith("TIMES ")]
    if done.returncode or not found:
        print(f"{name}: status {done.returncode}\n{done.stderr[-1000:]}")
        return
    print_line(name, [json.loads(found[0].removeprefix("TIMES "))])


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
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    os.environ["CUDATOOL_DEVICE"] = "cuda"
    for name in options.only:
        if importlib.util.find_spec(name.partition("_")[0]) is None:
            print(f"{name:16} not installed")
            continue
        if options.sanitize or options.alone:
            levels = {level: ["run", "-f", "--level", level] for level in options.levels} if options.alone else {}
            checked = {"sanitize": ["sanitize", "--allow-empty"]} if options.sanitize else {}
            ways = {way: ["-m", "cudatool", *words] for way, words in (levels | checked).items()}
            ways |= {"cupti": []} if options.peers else {}
            in_processes(name, ways, options.rounds, options.processes)
            continue
        peers = ["cupti"] * options.peers + ["history"] * (options.peers and name.startswith("torch"))
        in_one_process(name, ["plain", *options.levels, *peers, "again"], options.rounds)
        if "history" in peers:
            in_one_process(name, ["plain", "profiler", "again"], options.rounds)


if __name__ == "__main__":
    main()
