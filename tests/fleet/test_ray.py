"""`--engine ray` on a local Ray cluster of two workers: the command prints what it prints without."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fleets import Fault, make
from recordings import HERE

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray (cudatool[ray])"),
    # Ray starts a dozen processes and gives them so many seconds: not beside other tests.
    pytest.mark.skipif("CUDATOOL_TEST_RAY" not in os.environ, reason="only alone: make test-ray"),
]

# A cluster of its own, small, with all that it writes in one folder; the command then uses it.
PROGRAM = """
import json, os, sys
import ray
from click.testing import CliRunner
from cudatool.cli import group
from cudatool.fleet import cluster

folder, dataset, broken = sys.argv[1:]
ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
workers = ray.remote(lambda: os.getpid())
results = {"own": os.getpid(), "workers": ray.get([workers.remote() for _ in range(4)])}
for engine in ("duckdb", "ray"):
    done = CliRunner().invoke(group, ["fleet", dataset, "--engine", engine, "--json"])
    results[engine] = [done.exit_code, json.loads(done.stdout)]
question = "SELECT rank, count(*) AS n, sum(size) FROM allocations GROUP BY rank"
for engine in ("duckdb", "ray"):
    done = CliRunner().invoke(group, ["query", dataset, question, "--engine", engine, "--json"])
    results["query-" + engine] = sorted(json.loads(done.stdout)["rows"])
done = CliRunner().invoke(group, ["fleet", broken, "--engine", "ray"])
results["broken"] = [type(done.exception).__name__, str(done.exception)]
results["used"] = ray.is_initialized()
ray.shutdown()
print(json.dumps(results))
"""


@pytest.mark.timeout(900)
def test_the_command_prints_the_same_on_a_ray_cluster(tmp_path: Path) -> None:
    dataset = make(tmp_path / "a", HERE / "prefetch__default.pickle.xz", 5, [Fault("size", 3)], seed=1)
    broken = make(tmp_path / "b", HERE / "prefetch__default.pickle.xz", 3, [], seed=1)
    next(broken.glob("run=*/rank=2/trace=*/steps.parquet")).write_bytes(b"no Parquet")
    environment = {**os.environ, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    # In a folder with a short name, as sockets need; processes that end later may still write to it.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        words = [sys.executable, "-c", PROGRAM, folder, str(dataset), str(broken)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=800)
    assert 0 == done.returncode, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["own"] not in found["workers"] and found["used"]
    assert found["duckdb"] == found["ray"] and 1 == found["ray"][0]
    assert [3] == [finding["rank"] for finding in found["ray"][1]["runs"][0]["findings"]][:1]
    assert found["query-duckdb"] == found["query-ray"] and 5 == len(found["query-ray"])
    kind, said = found["broken"]
    assert "UsageError" == kind and "the table steps of" in said and "\n" not in said
