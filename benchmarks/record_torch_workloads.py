"""Record PyTorch programs under several allocator settings, on a GPU: the references for replay and what-if.

    python benchmarks/record_torch_workloads.py OUT [--jobs 6] [--only WORKLOAD]

Every pair of workload and settings runs in a separate process. It writes NAME.pickle.xz, the snapshot with its whole
history, and NAME.stats.json with the settings, the memory fraction, whether memory ran out, the device's memory, and
``torch.cuda.memory_stats()``. A workload requests the same memory under all settings.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CONFS = {
    "default": "",
    "expandable": "expandable_segments:True",
    "split64": "max_split_size_mb:64",
    "split256": "max_split_size_mb:256",
    "round4": "roundup_power2_divisions:4",
    "round8exp": "roundup_power2_divisions:8,expandable_segments:True",
}
LIMITED = {
    # name -> settings, and the memory allowed as a multiple of the default's peak of active bytes
    "tight": ("", 1.1),
    "tightgc": ("garbage_collection_threshold:0.6", 1.15),
    "tightexp": ("expandable_segments:True", 1.05),
    "toolittle": ("", 0.8),
}


def transformer(torch: Any, rng: random.Random, *, checkpoint: bool = False, half: bool = False) -> None:
    nn = torch.nn
    layers = [nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.0) for _ in range(8)]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(30):
        x = torch.randn(rng.randint(2, 12), rng.randint(64, 900), 512, device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            for layer in model:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if checkpoint else layer(x)
            loss = x.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def transformer_checkpoint(torch: Any, rng: random.Random) -> None:
    transformer(torch, rng, checkpoint=True)


def transformer_half(torch: Any, rng: random.Random) -> None:
    transformer(torch, rng, half=True)


def accumulate(torch: Any, rng: random.Random) -> None:
    nn = torch.nn
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(10))).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(8):
        for _ in range(rng.randint(2, 6)):
            model(torch.randn(rng.randint(500, 6000), 4096, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def convnet(torch: Any, rng: random.Random) -> None:
    nn = torch.nn
    blocks: list[Any] = [nn.Conv2d(3, 64, 7, 2, 3)]
    for width in (64, 128, 256):
        blocks += [nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU()]
        blocks += [nn.Conv2d(2 * width, 2 * width, 3, 1, 1), nn.BatchNorm2d(2 * width), nn.ReLU()]
    model = nn.Sequential(*blocks).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(40):
        model(torch.randn(rng.randint(4, 48), 3, 224, 224, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def unet(torch: Any, rng: random.Random) -> None:
    nn, functional = torch.nn, torch.nn.functional
    widths = [32, 64, 128, 256]
    down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in zip([3, *widths], widths, strict=False)).cuda()
    up = nn.ModuleList(nn.Conv2d(a + b, b, 3, 1, 1) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)).cuda()
    for _ in range(30):
        side = 16 * rng.randint(4, 20)
        x = torch.randn(rng.randint(1, 16), 3, side, side, device="cuda")
        skips = []
        for layer in down:
            x = functional.silu(layer(x))
            skips.append(x)
        for layer, skip in zip(up, skips[-2::-1], strict=True):
            x = functional.silu(layer(torch.cat([functional.interpolate(x, skip.shape[2:]), skip], 1)))
        x.mean().backward()
        down.zero_grad(set_to_none=True)
        up.zero_grad(set_to_none=True)


def kv_cache(torch: Any, rng: random.Random) -> None:
    caches: list[list[Any]] = []
    for step in range(500):
        if rng.random() < 0.1 or not caches:
            length = rng.randint(16, 2000)
            caches.append([torch.zeros(2, length, 16, 64, device="cuda", dtype=torch.float16) for _ in range(8)])
        for cache in caches:
            for layer in range(8):
                new = torch.zeros(2, 1, 16, 64, device="cuda", dtype=torch.float16)
                cache[layer] = torch.cat([cache[layer], new], 1)
        if len(caches) > 6 or step % 97 == 96:
            del caches[rng.randrange(len(caches))]


def lstm(torch: Any, rng: random.Random) -> None:
    model = torch.nn.LSTM(256, 512, 3, batch_first=True).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(40):
        output, _ = model(torch.randn(rng.randint(8, 64), rng.randint(20, 400), 256, device="cuda"))
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def graph_network(torch: Any, rng: random.Random) -> None:
    weights = [torch.randn(128, 128, device="cuda", requires_grad=True) for _ in range(4)]
    for _ in range(40):
        nodes, edges = rng.randint(10_000, 60_000), rng.randint(100_000, 900_000)
        x = torch.randn(nodes, 128, device="cuda")
        source = torch.arange(edges, device="cuda") * 7919 % nodes
        target = torch.arange(edges, device="cuda") * 104729 % nodes
        for weight in weights:
            x = torch.relu(torch.zeros_like(x).index_add(0, target, (x @ weight)[source]))
        x.mean().backward()
        for weight in weights:
            weight.grad = None


def experts(torch: Any, rng: random.Random) -> None:
    nn = torch.nn
    pool = nn.ModuleList(
        nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(8)
    ).cuda()
    for _ in range(30):
        tokens = torch.randn(rng.randint(2000, 16000), 1024, device="cuda")
        cuts = sorted(rng.randrange(len(tokens)) for _ in range(7))
        parts = torch.tensor_split(tokens, cuts)
        torch.cat([expert(part) for expert, part in zip(pool, parts, strict=True)]).square().mean().backward()
        pool.zero_grad(set_to_none=True)


def embeddings(torch: Any, rng: random.Random) -> None:
    nn = torch.nn
    tables = nn.ModuleList(nn.EmbeddingBag(rng.randint(50_000, 900_000), 64) for _ in range(12)).cuda()
    top = nn.Sequential(nn.Linear(12 * 64, 1024), nn.ReLU(), nn.Linear(1024, 1)).cuda()
    for _ in range(30):
        batch = rng.randint(500, 8000)
        columns = [
            table(torch.arange(batch * 5, device="cuda").view(batch, 5) * 31 % table.num_embeddings) for table in tables
        ]
        top(torch.cat(columns, 1)).mean().backward()
        tables.zero_grad(set_to_none=True)
        top.zero_grad(set_to_none=True)


def inference(torch: Any, rng: random.Random) -> None:
    nn = torch.nn
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)), nn.Linear(2048, 32000)).cuda().half()
    with torch.no_grad():
        for _ in range(300):
            logits = model(torch.randn(rng.randint(1, 9000), 2048, device="cuda", dtype=torch.float16))
            torch.topk(torch.softmax(logits.float(), -1), 40)


def temporaries(torch: Any, rng: random.Random) -> None:
    kept: list[Any] = []
    for _ in range(1500):
        kept.append(torch.empty(int(2 ** rng.uniform(8, 28)), device="cuda", dtype=torch.uint8))
        while len(kept) > 40:
            del kept[rng.randrange(len(kept))]


def prefetch(torch: Any, rng: random.Random) -> None:
    nn = torch.nn
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
    pinned = torch.zeros(16000, 1024, pin_memory=True)
    copies = torch.cuda.Stream()
    for _ in range(100):
        with torch.cuda.stream(copies):
            batch = pinned[: rng.randint(1000, 16000)].to("cuda", non_blocking=True)
        compute = torch.cuda.current_stream()
        compute.wait_stream(copies)
        batch.record_stream(compute)  # so that it is not reused before the computation has passed
        model(batch).square().mean().backward()
        model.zero_grad(set_to_none=True)


def captured(torch: Any, rng: random.Random) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6))).cuda()
    graphs = []
    for _ in range(6):
        x = torch.randn(rng.randint(100, 5000), 1024, device="cuda")
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = model(x)
        graphs.append((graph, x, y))
        if len(graphs) == 4:
            del graphs[1], graph, x, y
            torch.cuda.empty_cache()
        for captured_graph, *_ in graphs:
            captured_graph.replay()
    torch.cuda.synchronize()


WORKLOADS: dict[str, Callable[[Any, random.Random], None]] = {
    function.__name__: function
    for function in (
        transformer,
        transformer_checkpoint,
        transformer_half,
        accumulate,
        convnet,
        unet,
        kv_cache,
        lstm,
        graph_network,
        experts,
        embeddings,
        inference,
        temporaries,
        prefetch,
        captured,
    )
}


def record(workload: str, fraction: float, out: Path) -> None:
    """Run one workload in this process, and write what was recorded."""
    import torch
    import torch.utils.checkpoint

    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    torch.cuda.init()
    if fraction:
        torch.cuda.set_per_process_memory_fraction(fraction)
    torch.cuda.memory._record_memory_history(context=None, max_entries=5_000_000)
    oom = ""
    try:
        WORKLOADS[workload](torch, random.Random(workload))
    except torch.OutOfMemoryError as error:
        oom = str(error)
    torch.cuda.synchronize()
    snapshot = torch.cuda.memory._snapshot()
    stats = {key: value for key, value in torch.cuda.memory_stats().items() if isinstance(value, int)}
    facts = {
        "conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "memory_fraction": fraction,
        "oom": oom,
        "device_total_bytes": torch.cuda.get_device_properties(0).total_memory,
        "stats": stats,
    }
    with lzma.open(f"{out}.pickle.xz", "wb", preset=1) as file:
        pickle.dump(snapshot, file)
    Path(f"{out}.stats.json").write_text(json.dumps(facts))


def run(workload: str, name: str, conf: str, fraction: float, out: Path) -> str:
    """Record in a separate process; return a line about the result."""
    path = out / f"{workload}__{name}"
    command = [sys.executable, __file__, "--record", workload, "--fraction", repr(fraction), str(path)]
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": conf, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return f"{path.name}: {'recorded' if done.returncode == 0 else done.stderr.strip()[-300:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--only", choices=WORKLOADS)
    parser.add_argument("--record", choices=WORKLOADS, help=argparse.SUPPRESS)
    parser.add_argument("--fraction", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        record(options.record, options.fraction, options.out)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    names = [options.only] if options.only else list(WORKLOADS)

    def free(job: tuple[str, str]) -> str:
        workload, name = job
        return run(workload, name, CONFS[name], 0.0, options.out)

    def limited(job: tuple[str, str]) -> str:
        workload, name = job
        conf, share = LIMITED[name]
        facts = json.loads((options.out / f"{workload}__default.stats.json").read_text())
        fraction = share * facts["stats"]["active_bytes.all.peak"] / facts["device_total_bytes"]
        return run(workload, name, conf, fraction, options.out)

    with ThreadPoolExecutor(options.jobs) as pool:
        for line in pool.map(free, [(workload, name) for name in CONFS for workload in names]):
            print(line, flush=True)
        for line in pool.map(limited, [(workload, name) for name in LIMITED for workload in names]):
            print(line, flush=True)


if __name__ == "__main__":
    main()
