"""The share of models' memory at the peak that is attributed: to modules, or to nodes of compiled graphs. On a GPU.

    python benchmarks/bench_attribution.py [--jobs 4] [--only NAME] [--eager] [--keep FOLDER]

Needs timm and transformers; the weights are random. `cudatool run` records each model in a process of its own, with an
empty cache of PyTorch's compiler, and PyTorch's own recorder keeps its history of the same run:
``torch.cuda.memory._snapshot(augment_with_fx_traces=True)`` with ``enrich_profiler_metadata`` on, if this PyTorch has
them. Of that the column "PyTorch" has the share of all bytes at the peak that have a node. The last compiled model runs
again, with the compiler's cache of the first run. Models that are not compiled (mode "eager", the last rows) have the
share of all bytes with a module of the program, and with a module and a purpose.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROWS = [
    # model, training or inference, mode of torch.compile
    ("resnet18", "train", "default"),
    ("resnet18", "infer", "reduce-overhead"),
    ("vit_tiny_patch16_224", "train", "default"),
    ("vit_tiny_patch16_224", "train", "reduce-overhead"),
    ("convnext_atto", "train", "reduce-overhead"),
    ("mobilenetv3_small_100", "infer", "default"),
    ("gpt2", "train", "default"),
    ("gpt2", "infer", "reduce-overhead"),
    ("bert", "train", "reduce-overhead"),
    ("bert", "infer", "default"),
    ("llama", "infer", "reduce-overhead"),
    ("llama", "train", "default"),
]
EAGER = [
    ("resnet50", "train", "eager"),
    ("resnet50", "infer", "eager"),
    ("vit_tiny_patch16_224", "train", "eager"),
    ("gpt2", "train", "eager"),
    ("bert", "train", "eager"),
    ("llama", "train", "eager"),
    ("llama-checkpoints", "train", "eager"),
    ("llama", "infer", "eager"),
]
STEPS = 5


def make(name: str) -> tuple[Any, Any]:
    """Return a model and its input."""
    import torch

    if name.partition("-")[0] in ("gpt2", "bert", "llama"):
        import transformers as t

        sizes = {"vocab_size": 4096}
        more = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 1024}
        if name == "gpt2":
            config: Any = t.GPT2Config(n_layer=3, n_embd=256, n_head=4, n_positions=512, use_cache=False, **sizes)
            model: Any = t.GPT2LMHeadModel(config)
        elif name == "bert":
            model = t.BertForMaskedLM(t.BertConfig(**sizes, **more))
        else:
            model = t.LlamaForCausalLM(t.LlamaConfig(**sizes, **more, use_cache=False))
        if name.endswith("-checkpoints"):
            model.gradient_checkpointing_enable()
        return model.cuda(), torch.randint(0, 4096, (8, 256), device="cuda")
    import timm

    return timm.create_model(name, num_classes=100).cuda(), torch.randn(16, 3, 224, 224, device="cuda")


def work(name: str, what: str, mode: str, snapshot: str) -> None:
    """Run one model, in the process that is recorded."""
    import torch
    import torch.fx.experimental._config as fx_config

    if hasattr(fx_config, "enrich_profiler_metadata"):
        fx_config.enrich_profiler_metadata = True
    torch.cuda.memory._record_memory_history(stacks="python")
    torch.manual_seed(0)
    model, x = make(name)
    model.train(what == "train")
    optimizer = (torch.optim.AdamW if mode == "eager" else torch.optim.SGD)(model.parameters(), lr=1e-3)
    compiled = model if mode == "eager" else torch.compile(model, mode=mode)

    def forward() -> Any:
        result = compiled(x)
        return getattr(result, "logits", result)

    def loss() -> Any:
        if mode != "eager":
            return forward().square().mean()
        if hasattr(model, "config"):
            return model(x, labels=x).loss
        return torch.nn.CrossEntropyLoss()(model(x), torch.zeros(len(x), dtype=torch.long, device="cuda"))

    for _ in range(STEPS):
        if what == "train":
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with torch.no_grad():
                forward()
    torch.cuda.synchronize()
    with_nodes = "augment_with_fx_traces" in inspect.signature(torch.cuda.memory._snapshot).parameters
    with open(snapshot, "wb") as file:
        pickle.dump(torch.cuda.memory._snapshot(**({"augment_with_fx_traces": True} if with_nodes else {})), file)


def described(path: Path) -> dict[str, Any]:
    """Return the device's memory as `cudatool snapshot --json` has it."""
    command = [sys.executable, "-m", "cudatool", "snapshot", str(path), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    device: dict[str, Any] = json.loads(done.stdout)["devices"][0]
    return device


def measure(row: tuple[str, str, str], folder: Path, again: bool = False) -> str:
    """Return the line of one model."""
    name = "-".join(row)
    trace, snapshot = folder / f"{name}{'-again' * again}.ctrace", folder / f"{name}.pickle"
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / name)}
    command = [sys.executable, "-m", "cudatool", "run", "--device", "cuda", "--no-children", "-f", "-o", str(trace)]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, __file__, "--work", *row, str(snapshot)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    took = time.perf_counter() - began
    words = f"{row[0]:22} {row[1]:5} {row[2]:15}"
    if done.returncode:
        return f"{words} failed with status {done.returncode}:\n{done.stderr[-1500:]}"
    device = described(trace)
    of_torch = described(snapshot)
    active, own = device["peak"]["active"], device["generated"]
    if row[2] == "eager":
        found = device["diagnosis"]["modules"]
        missing = ", ".join(f"{part['size'] / 2**20:.1f} MiB {part['reason']}" for part in found["without"])
        shares = f"{found['with_module'] / found['size']:8.1%} {found['named'] / found['size']:8.1%}"
        return f"{words} {active / 2**20:8.1f} {shares} {took:6.1f}  {missing}"
    if own is None:
        return f"{words} {active / 2**20:8.1f} MiB, nothing by compiled code"
    noted = sum(site["size"] for site in of_torch["at_peak"] if site["compiled"]["fx_node"])
    missing = ", ".join(f"{part['size'] / 2**20:.1f} MiB {part['reason']}" for part in own["unattributed"])
    return (
        f"{words} {active / 2**20:8.1f} {own['size'] / 2**20:9.1f} {own['attributed'] / own['size']:8.1%} "
        f"{own['with_module'] / own['size']:8.1%} {noted / of_torch['peak']['active']:8.1%} {took:6.1f}  {missing}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--only", default="")
    parser.add_argument("--eager", action="store_true", help="only models that are not compiled")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    rows = [] if options.eager else [row for row in ROWS if options.only in row[0]]
    eager = [row for row in EAGER if options.only in row[0]]
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(options.jobs) as pool:
        folder = options.keep or Path(made)
        folder.mkdir(exist_ok=True)
        print(
            "peak: active MiB; compiled: MiB of it allocated by generated code; node+line, module: share of these bytes"
        )
        print(
            f"{'model':22} {'':5} {'mode':15} {'peak':>8} {'compiled':>9} node+line   module  PyTorch      s  missing"
        )
        began = time.perf_counter()
        for line in pool.map(lambda row: measure(row, folder), rows):
            print(line, flush=True)
        if rows:
            print(f"{measure(rows[-1], folder, again=True)}  (from PyTorch's cache)")
        print(f"{'not compiled':44} {'peak':>8}   module +purpose      s  missing")
        for line in pool.map(lambda row: measure(row, folder), eager):
            print(line, flush=True)
        print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
