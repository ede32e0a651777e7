"""All cases of bench_triton.py."""

import triton_layers
import triton_models
import triton_serving
from triton_projects import CASES, Inputs, prepare

__all__ = ["CASES", "Inputs", "prepare", "triton_layers", "triton_models", "triton_serving"]
