"""Runs one of the training and inference programs of ``benchmarks/record_torch_workloads.py``."""

import importlib.util
import random
import sys
from pathlib import Path

import torch
import torch.utils.checkpoint

name, steps = sys.argv[1], Path(__file__).resolve().parents[3] / "benchmarks" / "record_torch_workloads.py"
spec = importlib.util.spec_from_file_location("record_torch_workloads", steps)
assert spec is not None and spec.loader is not None
workloads = importlib.util.module_from_spec(spec)
spec.loader.exec_module(workloads)
torch.manual_seed(0)
workloads.WORKLOADS[name](torch, random.Random(name))
torch.cuda.synchronize()
