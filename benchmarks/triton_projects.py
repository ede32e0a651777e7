"""What bench_triton.py needs of the projects whose kernels it runs: their modules, and trials with fixed inputs.

Clones that `prepare` looks for: triton-lang/triton (`triton`), linkedin/Liger-Kernel, Dao-AILab/flash-attention,
fla-org/flash-linear-attention, unslothai/unsloth, pytorch/ao, sgl-project/sglang, vllm-project/vllm and
BobMcDear/attorch.

Only the modules with kernels are imported: what a package's ``__init__`` imports beside them needs libraries and
devices that kernels do not need. A few helpers of the host's side have stand-ins for the same reason. Kernels are
unchanged.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import importlib
import importlib.machinery
import linecache
import logging
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Tensor = torch.Tensor
half, bf16, fp8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn

# ---- inputs and trials ----


class Inputs:
    """Numbers that are the same on every machine."""

    def __init__(self) -> None:
        self._random = np.random.RandomState(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, grad: bool = False) -> Tensor:
        made = torch.from_numpy(np.asarray(self._random.standard_normal(shape) * scale)).to(dtype).to(DEVICE)
        return made.requires_grad_(grad)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
        return torch.from_numpy(self._random.random_sample(shape)).to(dtype).to(DEVICE).requires_grad_(grad)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(self._random.randint(low, high, shape)).to(dtype).to(DEVICE)


@dataclass
class Trial:
    """A function with kernels, its inputs, and what must come out."""

    function: Callable[..., Any]
    inputs: Sequence[Any]
    reference: Callable[..., Any] | None = None

    def run(self) -> list[Tensor]:
        """Return the results, and the gradients of the inputs that have one."""
        return _with_gradients(self.function, [_fresh(each) for each in self.inputs])

    def expect(self) -> list[Tensor] | None:
        """Return the same from PyTorch on the host, with doubles."""
        if self.reference is None:
            return None
        return _with_gradients(self.reference, [_doubled(each) for each in self.inputs])


def _fresh(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _doubled(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value, grad = value.detach().cpu(), value.requires_grad
    return (value.double() if value.dtype.is_floating_point else value.clone()).requires_grad_(grad)


def _tensors(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    return [tensor for each in results if each is not None for tensor in _tensors(each)]


def _with_gradients(function: Callable[..., Any], inputs: Sequence[Any]) -> list[Tensor]:
    leaves = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
    with contextlib.nullcontext() if leaves else torch.no_grad():
        results = _tensors(function(*inputs))
    kept = [each.detach().clone() for each in results]
    if not leaves:
        return kept
    random = np.random.RandomState(1)
    found = [each for each in results if each.requires_grad]
    seeds = [
        torch.from_numpy(np.asarray(random.standard_normal(tuple(each.shape)))).to(each.dtype).to(each.device)
        for each in found
    ]
    torch.autograd.backward(found, seeds)
    return kept + [each.grad for each in leaves if each.grad is not None]


@dataclass(frozen=True)
class Case:
    make: Callable[[Inputs], Trial]
    tolerance: float


CASES: dict[str, Case] = {}


def case(name: str, tolerance: float = 1e-5) -> Callable[[Callable[[Inputs], Trial]], Callable[[Inputs], Trial]]:
    """Enter a function that makes a trial under a name, with the error that two devices may have."""

    def enter(make: Callable[[Inputs], Trial]) -> Callable[[Inputs], Trial]:
        CASES[name] = Case(make, tolerance)
        return make

    return enter


# ---- finding the projects' modules ----

_PACKAGES = {
    "liger_kernel": "Liger-Kernel/src/liger_kernel",
    "liger_kernel.ops": "Liger-Kernel/src/liger_kernel/ops",
    "flash_attn": "flash-attention/flash_attn",
    "fla": "flash-linear-attention/fla",
    "fla.ops": "flash-linear-attention/fla/ops",
    "fla.modules": "flash-linear-attention/fla/modules",
    "unsloth": "unsloth/unsloth",
    "unsloth.kernels": "unsloth/unsloth/kernels",
    "torchao": "ao/torchao",
    "torchao.float8": "ao/torchao/float8",
    "torchao.prototype": "ao/torchao/prototype",
    "torchao.prototype.mx_formats": "ao/torchao/prototype/mx_formats",
    "torchao.prototype.moe_training": "ao/torchao/prototype/moe_training",
    "torchao.prototype.moe_training.ep": "ao/torchao/prototype/moe_training/ep",
    "torchao.prototype.moe_training.kernels": "ao/torchao/prototype/moe_training/kernels",
    "torchao.prototype.blockwise_fp8_training": "ao/torchao/prototype/blockwise_fp8_training",
    "torchao.prototype.blockwise_fp8_inference": "ao/torchao/prototype/blockwise_fp8_inference",
    "torchao.prototype.fp8_sdpa_inference": "ao/torchao/prototype/fp8_sdpa_inference",
    "torchao.prototype.quantized_training": "ao/torchao/prototype/quantized_training",
    "torchao.prototype.hqq": "ao/torchao/prototype/hqq",
    "sglang": "sglang/python/sglang",
    "sglang.kernels": "sglang/python/sglang/kernels",
    "attorch": "attorch/attorch",
}
_ROOT = Path()


def prepare(checkouts: Path) -> None:
    """Make the projects' modules importable; answer what they ask of ``torch.cuda`` where there is no GPU."""
    global _ROOT
    _ROOT = checkouts.resolve()
    sys.path.append(str(_ROOT))
    for name, folder in _PACKAGES.items():
        _module(name).__path__ = [str(_ROOT / folder)]
    _stand_in("sglang.kernels.ops.attention.fla.utils", autotune_cache_kwargs={})
    _stand_in("fla", __version__="0")
    _stand_in("unsloth_zoo.utils", Version=importlib.import_module("packaging.version").Version)
    _stand_in("unsloth_zoo.log", logger=logging.getLogger("unsloth"))
    _stand_in("unsloth_zoo.temporary_patches.common", torch_compile=lambda function: function)
    _stand_in("unsloth_zoo.loss_utils", patch_loss_functions=None, post_patch_loss_function=None)
    _stand_in("unsloth_zoo.patching_utils", patch_layernorm=None)
    _stand_in("unsloth.device_type", DEVICE_COUNT=1)
    _stand_in(
        "transformers.models.llama.modeling_llama", logger=logging.getLogger("llama"), LlamaRMSNorm=torch.nn.Module
    )
    _stand_in("torchao.float8.config", e4m3_dtype=fp8)
    _stand_in("torchao.prototype.mx_formats.config", ScaleCalculationMode=enum.Enum("Mode", "FLOOR RCEIL CEIL EVEN"))
    _unsloth_helpers()
    importlib.import_module("torch.distributed.tensor")  # Liger-Kernel takes it for imported
    if DEVICE == "cpu":
        _answer_for_cuda()


def _module(name: str) -> types.ModuleType:
    """Return a module of this name that is empty, with those that it is in."""
    parent, _, last = name.rpartition(".")
    if name not in sys.modules:
        sys.modules[name] = made = types.ModuleType(name)
        made.__path__ = []
        made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        if parent:
            setattr(_module(parent), last, made)
    return sys.modules[name]


def _stand_in(name: str, **names: Any) -> None:
    vars(_module(name)).update(names)


def _unsloth_helpers() -> None:
    from triton.language.extra import libdevice

    def calculate_settings(n: int) -> tuple[int, int]:
        block = triton.next_power_of_2(n)
        return block, 32 if block >= 32768 else 16 if block >= 8192 else 8 if block >= 2048 else 4

    _stand_in(
        "unsloth.kernels.utils",
        calculate_settings=calculate_settings,
        MAX_FUSED_SIZE=65536,
        triton_tanh=libdevice.tanh,
        triton_cast=triton.language.cast,
        torch_gpu_device=lambda device: contextlib.nullcontext(),
        torch_device_stream=None,
        is_cdna=lambda: False,
    )


def _answer_for_cuda() -> None:
    properties = types.SimpleNamespace(
        name="software device",
        multi_processor_count=16,
        major=8,
        minor=9,
        shared_memory_per_block_optin=101376,
        shared_memory_per_multiprocessor=102400,
        max_threads_per_multi_processor=1536,
        warp_size=32,
    )
    torch.Tensor.is_cuda = True
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: (8, 9)
    torch.cuda.get_device_name = lambda device=None: properties.name
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    torch.cuda.device = torch.cpu.device = lambda device=None: contextlib.nullcontext()
    torch.cuda.synchronize = lambda device=None: None
    importlib.import_module("torch.utils._triton").has_triton = lambda: True
    load("liger_kernel.utils").infer_device = lambda: "cuda"


def checkout(name: str) -> Path:
    """Return the folder of a project's clone."""
    return _ROOT / name


def load(name: str) -> Any:
    """Return a project's module."""
    return importlib.import_module(name)


def sglang(name: str) -> Any:
    """Return one of SGLang's modules with kernels, from its file alone."""
    return _from_file(_ROOT / "sglang/python/sglang/kernels/ops" / f"{name}.py")


def sglang_package(name: str) -> Any:
    """Return one of SGLang's modules that imports its neighbours."""
    for folder in Path("sglang/kernels/ops", name).parents:
        if folder.name:
            _module(str(folder).replace("/", ".")).__path__ = [str(_ROOT / "sglang/python" / folder)]
    return load("sglang.kernels.ops." + name.replace("/", "."))


def tutorial(name: str, *kept: str) -> Any:
    """Return what one of Triton's tutorials defines, and the variables in `kept`, without its tests and benchmarks."""
    path = _ROOT / "triton/python/tutorials" / f"{name}.py"
    tree = ast.parse(path.read_text())
    tree.body = [each for each in tree.body if _is_needed(each, {"DEVICE", *kept})]
    return _run(path, compile(tree, str(path), "exec"))


def _is_needed(statement: ast.stmt, kept: set[str]) -> bool:
    if isinstance(statement, ast.Import):
        return statement.names[0].name not in ("tabulate", "triton.profiler", "pytest")
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        decorators = " ".join(map(ast.unparse, statement.decorator_list))
        return "testing" not in decorators and "pytest" not in decorators
    if isinstance(statement, ast.Assign):
        return ast.unparse(statement.targets[0]) in kept
    if isinstance(statement, ast.If):
        return any(isinstance(each, ast.Assign) and _is_needed(each, kept) for each in statement.body)
    return isinstance(statement, ast.ImportFrom)


def _from_file(path: Path) -> Any:
    return _run(path, compile(path.read_text(), str(path), "exec"))


def _run(path: Path, code: types.CodeType) -> Any:
    name = "".join(c if c.isalnum() else "_" for c in path.stem)
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = str(path)
    linecache.checkcache(str(path))
    exec(code, vars(module))  # a project's own module, from the folder that the user named
    return module


# ---- what PyTorch computes for several of them ----


def scaled_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def rms_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w
