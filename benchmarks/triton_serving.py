"""Cases of bench_triton.py: vLLM's kernels."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as everybody calls it
from triton_projects import DEVICE, Inputs, Trial, bf16, case, checkout, fp8, half, load

PRODUCTS = 2e-3
"""Of halves, which PyTorch multiplies as doubles."""
FP8 = 5e-2  # between two numbers is an eighth; capability 8.9 rounds toward zero


# ---- finding the modules ----

_OWN = (
    "model_executor.layers.fused_moe.fused_batched_moe",
    "model_executor.layers.fused_moe.fused_moe",
    "model_executor.layers.lightning_attn",
    "model_executor.layers.mamba.ops",
    "model_executor.layers.quantization.awq_triton",
    "model_executor.layers.quantization.compressed_tensors.triton_scaled_mm",
    "model_executor.layers.quantization.utils.int8_utils",
    "utils.math_utils",
    "v1.attention.ops",
    "v1.sample.rejection_sampler",
)
"""Modules and packages with kernels. In the place of the others stand objects that do nothing."""


class _Anything(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "vllm" and not name.startswith("vllm."):
            return None
        inside = name.removeprefix("vllm").removeprefix(".")
        if any(inside == own or inside.startswith(own + ".") for own in _OWN):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        made = _Anything(spec.name)
        made.__path__ = [str(self._root / spec.name.replace(".", "/"))]
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        values = _VALUES.get(module.__name__, {})
        vars(module).update(values)


_VALUES: dict[str, dict[str, Any]] = {
    "vllm.triton_utils": {"tl": tl, "triton": sys.modules["triton"], "HAS_TRITON": True},
    "vllm.v1.attention.backends.utils": {"PAD_SLOT_ID": -1},
    "vllm.platforms": {
        "current_platform": types.SimpleNamespace(
            fp8_dtype=lambda: fp8,
            get_device_name=lambda: "software device",
            has_device_capability=lambda *_: True,
            is_cuda=lambda: False,  # kernels of CUDA C++ come first where it is
            is_cuda_alike=lambda: True,
            is_rocm=lambda: False,
            is_xpu=lambda: False,
            is_cpu=lambda: False,
            get_device_capability=lambda *_: types.SimpleNamespace(major=8, minor=9),
        )
    },
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
}


def _vllm(name: str) -> Any:
    """Return one of vLLM's functions."""
    if not any(isinstance(each, _StandIns) for each in sys.meta_path):
        sys.meta_path.insert(0, _StandIns(checkout("vllm")))
    module, _, function = name.rpartition(".")
    return getattr(load(f"vllm.{module}"), function)


# ---- attention ----


def _pages(
    new: Inputs, *, lengths: Sequence[int], page: int = 16, heads: int = 2, size: int = 64
) -> tuple[Tensor, ...]:
    """Return a cache of keys, one of values, and where the pages of each sequence are."""
    most = -(-max(lengths) // page)
    table = torch.randperm(most * len(lengths), generator=torch.Generator().manual_seed(1)).reshape(len(lengths), most)
    k, v = (new.normal(most * len(lengths), page, heads, size, dtype=half) for _ in range(2))
    return k, v, table.to(torch.int32).to(DEVICE)


def _of_sequence(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    return cache[pages.long()].flatten(0, 1)[:length]


def _attention(q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
    """Return what the last queries of a sequence find in all of it; several of their heads share a key's."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    apart = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None] - torch.arange(k.shape[0])
    hidden = (apart < 0) | (apart >= window if window else apart < 0)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def _in_pages(q: Tensor, k: Tensor, v: Tensor, table: Tensor, queries: Sequence[int], lengths: Sequence[int]) -> Tensor:
    found = [
        _attention(each, *(_of_sequence(cache, table[i], lengths[i]) for cache in (k, v)))
        for i, each in enumerate(q.split(list(queries)))
    ]
    return torch.cat(found)


def _starts(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device=DEVICE)


def _numbers(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def _unified(queries: Sequence[int], lengths: Sequence[int], segments: int = 0) -> Callable[[Inputs], Trial]:
    def make(new: Inputs) -> Trial:
        function = _vllm("v1.attention.ops.triton_unified_attention.unified_attention")
        k, v, table = _pages(new, lengths=lengths)
        q = new.normal(sum(queries), 4, 64, dtype=half)

        def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
            out = torch.empty_like(q)
            parts: dict[str, Any] = {}
            if segments:
                shape = (len(queries), 4, segments)
                parts = {
                    "seq_threshold_3D": 64,
                    "num_par_softmax_segments": segments,
                    "softmax_segm_output": torch.empty(*shape, 64, device=DEVICE),
                    "softmax_segm_max": torch.empty(shape, device=DEVICE),
                    "softmax_segm_expsum": torch.empty(shape, device=DEVICE),
                }
            function(
                q,
                k,
                v,
                out,
                cu_seqlens_q=_starts(queries),
                max_seqlen_q=max(queries),
                seqused_k=_numbers(lengths),
                max_seqlen_k=max(lengths),
                softmax_scale=64**-0.5,
                causal=True,
                window_size=(-1, -1),
                block_table=table,
                softcap=0,
                q_descale=None,
                k_descale=None,
                v_descale=None,
                **parts,
            )
            return out

        def expect(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
            return _in_pages(q, k, v, table, queries, lengths)

        return Trial(run, (q, k, v, table), expect)

    return make


case("vllm/unified_attention_prefill", PRODUCTS)(_unified((5, 37, 1), (21, 37, 90)))
case("vllm/unified_attention_decode", PRODUCTS)(_unified((1, 1, 1), (21, 150, 90), segments=4))


@case("vllm/prefill_attention", PRODUCTS)
def _(new: Inputs) -> Trial:
    function = _vllm("v1.attention.ops.triton_prefill_attention.context_attention_fwd")
    counts = (33, 70)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        function(q, k, v, out, _starts(counts)[:-1], _numbers(counts), max(counts))
        return out

    def expect(*all_: Tensor) -> Tensor:
        return torch.cat([_attention(*each) for each in zip(*(one.split(counts) for one in all_), strict=True)])

    inputs = [new.normal(sum(counts), heads, 64, dtype=half) for heads in (4, 2, 2)]
    return Trial(run, inputs, expect)


@case("vllm/prefix_prefill", PRODUCTS)
def _(new: Inputs) -> Trial:
    function = _vllm("v1.attention.ops.prefix_prefill.context_attention_fwd")
    queries, lengths, page, x = (20, 40), (52, 75), 16, 8
    k_cache, v_cache, table = _pages(new, lengths=lengths, page=page)
    q, k, v = (new.normal(sum(queries), heads, 64, dtype=half) for heads in (4, 2, 2))

    def run(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor) -> Tensor:
        out, one = torch.empty_like(q), torch.ones(1, device=DEVICE)
        keys = k_cache.unflatten(-1, (-1, x)).permute(0, 2, 3, 1, 4).contiguous()
        values = v_cache.permute(0, 2, 3, 1).contiguous()
        function(
            q,
            k,
            v,
            out,
            "auto",
            keys,
            values,
            table,
            _starts(queries),
            _numbers(lengths),
            max(lengths),
            max(queries),
            one,
            one,
        )
        return out

    def expect(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor) -> Tensor:
        found = []
        for i, own in enumerate(zip(*(each.split(queries) for each in (q, k, v)), strict=True)):
            before = lengths[i] - queries[i]
            keys, values = (_of_sequence(cache, table[i], before) for cache in (k_cache, v_cache))
            found.append(_attention(own[0], torch.cat([keys, own[1]]), torch.cat([values, own[2]])))
        return torch.cat(found)

    return Trial(run, (q, k, v, k_cache, v_cache, table), expect)


def _decode(heads: int, kv_heads: int) -> Callable[[Inputs], Trial]:
    def make(new: Inputs) -> Trial:
        function = _vllm("v1.attention.ops.triton_decode_attention.decode_attention_fwd")
        lengths, splits = (21, 150, 90), 4
        k, v, table = _pages(new, lengths=lengths, heads=kv_heads)
        q = new.normal(len(lengths), heads, 64, dtype=half)

        def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
            out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=DEVICE)
            logits = torch.empty(*q.shape[:2], splits, 65, device=DEVICE)
            function(q, k, v, out, lse, table, _numbers(lengths), logits, splits, 64**-0.5, page_size=16)
            return out

        def expect(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
            return _in_pages(q, k, v, table, (1, 1, 1), lengths)

        return Trial(run, (q, k, v, table), expect)

    return make


case("vllm/decode_attention", PRODUCTS)(_decode(2, 2))
case("vllm/decode_attention_grouped", PRODUCTS)(_decode(8, 2))


@case("vllm/merge_attn_states")
def _(new: Inputs) -> Trial:
    function = _vllm("v1.attention.ops.triton_merge_attn_states.merge_attn_states")
    inputs = [new.normal(9, 4, 80), new.normal(4, 9), new.normal(9, 4, 80), new.normal(4, 9)]

    def run(*inputs: Tensor) -> list[Tensor]:
        out, lse = torch.empty_like(inputs[0]), torch.empty_like(inputs[1])
        function(out, *inputs, lse)
        return [out, lse]

    def expect(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> list[Tensor]:
        lse = torch.logaddexp(a_lse, b_lse)
        return [sum(x * (own - lse).exp().T[..., None] for x, own in ((a, a_lse), (b, b_lse))), lse]

    return Trial(run, inputs, expect)


@case("vllm/reshape_and_cache")
def _(new: Inputs) -> Trial:
    function = _vllm("v1.attention.ops.triton_reshape_and_cache_flash.triton_reshape_and_cache_flash")
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(2))[:23].to(DEVICE)
    slots[4] = -1

    def run(k: Tensor, v: Tensor) -> list[Tensor]:
        caches = [torch.zeros(4, 16, 2, 64, dtype=k.dtype, device=DEVICE) for _ in range(2)]
        one = torch.ones(1, device=DEVICE)
        function(k, v, *caches, slots, "auto", one, one)
        return caches

    def expect(k: Tensor, v: Tensor) -> list[Tensor]:
        caches = []
        kept = slots.cpu() >= 0
        for given in (k, v):
            caches.append(torch.zeros(64, 2, 64, dtype=given.dtype))
            caches[-1][slots.cpu()[kept]] = given[kept]
        return [cache.reshape(4, 16, 2, 64) for cache in caches]

    return Trial(run, [new.normal(23, 2, 64, dtype=bf16) for _ in range(2)], expect)


# ---- linear attention and state spaces ----


@case("vllm/lightning_attention", 5e-3)
def _(new: Inputs) -> Trial:
    function = _vllm("model_executor.layers.lightning_attn.lightning_attention")

    def run(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        return function(q, k, v, decay)[0]

    def expect(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        apart = (places[:, None] - places).double()
        factors = torch.exp(-decay[:, None, None] * apart).masked_fill(apart < 0, 0)
        return (q @ k.transpose(-1, -2) * factors) @ v

    heads = [new.normal(1, 2, 300, 64, scale=0.3) for _ in range(3)]
    return Trial(run, [*heads, new.uniform(2) * 0.1], expect)


@case("vllm/linear_decode")
def _(new: Inputs) -> Trial:
    function = _vllm("model_executor.layers.lightning_attn.linear_decode_forward_triton")

    def run(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, decay: Tensor) -> list[Tensor]:
        return [function(q, k, v, cache, decay, _numbers((2, 0, 3))), cache]

    def expect(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, decay: Tensor) -> list[Tensor]:
        slots = torch.tensor((2, 0, 3))
        cache[slots] = cache[slots] * torch.exp(-decay)[:, None, None] + k.transpose(-1, -2) * v
        return [(q @ cache[slots]).flatten(1), cache]

    inputs = [*(new.normal(3, 2, 1, 64) for _ in range(3)), new.normal(4, 2, 64, 64), new.uniform(2)]
    return Trial(run, inputs, expect)


@case("vllm/selective_state_update", 1e-4)
def _(new: Inputs) -> Trial:
    function = _vllm("model_executor.layers.mamba.ops.mamba_ssm.selective_state_update")

    def run(
        state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor
    ) -> list[Tensor]:
        out = torch.empty_like(x)
        function(state, x, dt, -a.exp(), b, c, D=d, z=z, dt_bias=d, dt_softplus=True, out=out)
        return [out, state]

    def expect(
        state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor
    ) -> list[Tensor]:
        dt = F.softplus(dt + d)
        state = state * torch.exp(dt[..., None] * -a.exp()) + (dt * x)[..., None] * b[:, None]
        return [((state * c[:, None]).sum(-1) + x * d) * F.silu(z), state]

    wide, small = [new.normal(3, 96) for _ in range(3)], [new.normal(3, 16) for _ in range(2)]
    x, dt, z = wide
    return Trial(run, (new.normal(3, 96, 16), x, dt, new.normal(96, 16), *small, new.normal(96), z), expect)


@case("vllm/mamba_chunk_scan", 5e-3)
def _(new: Inputs) -> Trial:
    function = _vllm("model_executor.layers.mamba.ops.ssd_combined.mamba_chunk_scan_combined_varlen")
    counts, chunk = (70, 40), 32
    ends = [0, 32, 64, 70, 102, 110]

    def run(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
        out = torch.empty_like(x)
        states = function(
            x,
            dt,
            -a.exp(),
            b,
            c,
            chunk,
            _starts(counts),
            _numbers(ends),
            _numbers((2, 4)),
            _numbers((0, 0, 0, 1, 1)),
            out,
            D=d,
            dt_softplus=True,
        )
        return [out, states]

    def expect(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
        dt, out, states = F.softplus(dt), [], []
        for first, last in ((0, 70), (70, 110)):
            state = torch.zeros(x.shape[1], x.shape[2], b.shape[2], dtype=x.dtype)
            for t in range(first, last):
                state = state * torch.exp(dt[t] * -a.exp())[:, None, None]
                state = state + (dt[t][:, None] * x[t])[..., None] * b[t, 0]
                out.append((state * c[t, 0]).sum(-1) + x[t] * d[:, None])
            states.append(state)
        return [torch.stack(out), torch.stack(states)]

    x, b, c = new.normal(110, 4, 32), new.normal(110, 1, 16), new.normal(110, 1, 16)
    return Trial(run, (x, new.normal(110, 4), new.normal(4), b, c, new.normal(4)), expect)


@case("vllm/causal_conv1d_update")
def _(new: Inputs) -> Trial:
    function = _vllm("model_executor.layers.mamba.ops.causal_conv1d.causal_conv1d_update")

    def run(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        return [function(x.clone(), state, weight, bias, "silu", _numbers((0, 1, 2))), state]

    def expect(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        window = torch.cat([state, x[..., None]], -1)
        return [F.silu((window * weight).sum(-1) + bias), window[..., 1:]]

    return Trial(run, (new.normal(3, 96), new.normal(3, 96, 3), new.normal(96, 4), new.normal(96)), expect)


@case("vllm/rms_norm_gated")
def _(new: Inputs) -> Trial:
    function = _vllm("model_executor.layers.mamba.ops.layernorm_gated.rms_norm_gated")

    def expect(x: Tensor, weight: Tensor, z: Tensor) -> Tensor:
        groups = (x * F.silu(z)).unflatten(-1, (2, -1))
        return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + 1e-6)).flatten(-2) * weight

    def run(x: Tensor, weight: Tensor, z: Tensor) -> Tensor:
        return function(x, weight, None, z, group_size=48, norm_before_gate=False)

    return Trial(run, (new.normal(7, 96), new.normal(96), new.normal(7, 96)), expect)


# ---- quantization ----


def _unpacked(packed: Tensor) -> Tensor:
    """Return AWQ's eight numbers of four bits in each of 32, in the order of their columns."""
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    return ((packed[..., None].long() >> (4 * order)) & 15).flatten(-2)


def _awq(new: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    packed = [new.integers(-(2**31), 2**31, rows, 8, dtype=torch.int32) for rows in (128, 4)]
    return packed[0], new.normal(4, 64, dtype=half, scale=0.1), packed[1]


def _weights(packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    zeros, scales = (each.repeat_interleave(32, 0) for each in (_unpacked(zeros), scales))
    return (_unpacked(packed) - zeros) * scales


@case("vllm/awq_dequantize", PRODUCTS)
def _(new: Inputs) -> Trial:
    return Trial(_vllm("model_executor.layers.quantization.awq_triton.awq_dequantize_triton"), _awq(new), _weights)


@case("vllm/awq_gemm", 5e-3)
def _(new: Inputs) -> Trial:
    function = _vllm("model_executor.layers.quantization.awq_triton.awq_gemm_triton")
    packed, scales, zeros = _awq(new)

    def run(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        return function(x, packed, scales, zeros, 4)

    def expect(x: Tensor, *weights: Tensor) -> Tensor:
        return x @ _weights(*weights)

    return Trial(run, (new.normal(20, 128, dtype=half), packed, scales, zeros), expect)


def _scaled_mm(dtype: torch.dtype) -> Callable[[Inputs], Trial]:
    def make(new: Inputs) -> Trial:
        function = _vllm("model_executor.layers.quantization.compressed_tensors.triton_scaled_mm.triton_scaled_mm")
        if dtype is torch.int8:
            a, b = new.integers(-128, 128, 40, 160, dtype=dtype), new.integers(-128, 128, 96, 160, dtype=dtype)
        else:
            a, b = (new.normal(rows, 160).to(dtype) for rows in (40, 96))

        def run(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor) -> Tensor:
            return function(a, b.T, a_scales, b_scales, bf16, bias)

        def expect(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor) -> Tensor:
            return (a.double() @ b.double().T) * a_scales * b_scales.T + bias

        return Trial(run, (a, b, new.uniform(40, 1), new.uniform(96, 1), new.normal(96, dtype=bf16)), expect)

    return make


case("vllm/scaled_mm_int8", 5e-3)(_scaled_mm(torch.int8))
case("vllm/scaled_mm_fp8", 5e-3)(_scaled_mm(fp8))


@case("vllm/per_token_quant_int8")
def _(new: Inputs) -> Trial:
    function = _vllm("model_executor.layers.quantization.utils.int8_utils.per_token_quant_int8")

    def expect(x: Tensor) -> list[Tensor]:
        scales = x.abs().amax(-1, keepdim=True) / 127
        return [torch.round(x / scales).to(torch.int8), scales]

    return Trial(function, (new.normal(5, 300),), expect)


@case("vllm/block_int8_matmul", 5e-3)
def _(new: Inputs) -> Trial:
    function = _vllm("model_executor.layers.quantization.utils.int8_utils.w8a8_block_int8_matmul")
    a, b = (new.integers(-128, 128, rows, 256, dtype=torch.int8) for rows in (40, 128))

    def run(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor) -> Tensor:
        return function(a, b, a_scales, b_scales, [64, 64])

    def expect(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor) -> Tensor:
        a = a * a_scales.repeat_interleave(64, 1)
        return a @ (b * b_scales.repeat_interleave(64, 0).repeat_interleave(64, 1)).T

    return Trial(run, (a, b, new.uniform(40, 4) * 1e-2, new.uniform(2, 4) * 1e-2), expect)


# ---- mixtures of experts ----

_TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 4}


def _sorted(experts: Tensor, count: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the places of tokens by expert, filled up to blocks, the experts of the blocks, and how many places."""
    flat = experts.flatten().tolist()
    order: list[int] = []
    owners: list[int] = []
    for expert in range(count):
        places = [i for i, e in enumerate(flat) if e == expert]
        places += [len(flat)] * (-len(places) % block)
        order += places
        owners += [expert] * (len(places) // block)
    return _numbers(order), _numbers(owners), _numbers([len(order)])


def _moe(dtype: torch.dtype, quantized: str = "") -> Callable[[Inputs], Trial]:
    def make(new: Inputs) -> Trial:
        function = _vllm("model_executor.layers.fused_moe.fused_moe.invoke_fused_moe_triton_kernel")
        tokens, count, n, k, top = 24, 4, 96, 128, 2
        experts = new.integers(0, count, tokens, top)
        a, b = new.normal(tokens, k, dtype=half), new.normal(count, n, k, dtype=half)
        scales = new.uniform(count, n) + 0.5
        if quantized:
            b = new.integers(-128, 128, count, n, k, dtype=torch.int8) if dtype is torch.int8 else b.to(dtype)

        def run(a: Tensor, b: Tensor, scales: Tensor, weights: Tensor) -> Tensor:
            out = torch.empty(tokens, top, n, dtype=half, device=DEVICE)
            kinds = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16")
            function(
                a.to(fp8) if quantized == "use_fp8_w8a8" else a,
                b,
                out,
                torch.ones(tokens, 1, device=DEVICE) if quantized == "use_fp8_w8a8" else None,
                scales if quantized else None,
                weights,
                *_sorted(experts, count, _TILE["BLOCK_SIZE_M"]),
                mul_routed_weight=True,
                top_k=top,
                config=_TILE,
                compute_type=tl.float16,
                per_channel_quant=quantized == "use_fp8_w8a8",
                **{kind: kind == quantized for kind in kinds},
            )
            return out

        def expect(a: Tensor, b: Tensor, scales: Tensor, weights: Tensor) -> Tensor:
            if quantized == "use_fp8_w8a8":
                a = a.half().to(fp8).double()
            b = b.double() * (scales[..., None] if quantized else 1)
            return torch.einsum("tk,tenk->ten", a, b[experts.cpu()]) * weights[..., None]

        return Trial(run, (a, b, scales, new.uniform(tokens, top)), expect)

    return make


case("vllm/fused_moe", PRODUCTS)(_moe(half))
case("vllm/fused_moe_int8_weights", PRODUCTS)(_moe(torch.int8, "use_int8_w8a16"))
case("vllm/fused_moe_fp8", FP8)(_moe(fp8, "use_fp8_w8a8"))


@case("vllm/fused_moe_int4_weights", 5e-3)
def _(new: Inputs) -> Trial:
    function = _vllm("model_executor.layers.fused_moe.fused_moe.invoke_fused_moe_wna16_triton_kernel")
    tokens, count, n, k, top, group = 24, 4, 96, 128, 2, 64
    experts = new.integers(0, count, tokens, top)

    def run(a: Tensor, packed: Tensor, scales: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty(tokens, top, n, dtype=half, device=DEVICE)
        function(
            a,
            packed,
            out,
            scales,
            None,
            weights,
            *_sorted(experts, count, _TILE["BLOCK_SIZE_M"]),
            mul_routed_weight=False,
            top_k=top,
            config=_TILE | {"SPLIT_K": 1},
            compute_type=tl.float16,
            use_int8_w8a16=False,
            use_int4_w4a16=True,
            block_shape=[0, group],
        )
        return out

    def expect(a: Tensor, packed: Tensor, scales: Tensor, weights: Tensor) -> Tensor:
        numbers = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).double() - 8
        b = numbers * scales.repeat_interleave(group, -1)
        return torch.einsum("tk,tenk->ten", a, b[experts.cpu()])

    packed = new.integers(0, 256, count, n, k // 2, dtype=torch.uint8)
    scales = new.normal(count, n, k // group, dtype=half, scale=0.1)
    return Trial(run, (new.normal(tokens, k, dtype=half), packed, scales, new.uniform(tokens, top)), expect)


@case("vllm/fused_moe_batched", PRODUCTS)
def _(new: Inputs) -> Trial:
    function = _vllm("model_executor.layers.fused_moe.fused_batched_moe.invoke_moe_batched_triton_kernel")
    load("vllm.model_executor.layers.fused_moe.fused_batched_moe").normalize_batched_scales_shape = lambda scale, _: (
        scale
    )
    used = (20, 0, 7)

    def run(a: Tensor, b: Tensor) -> Tensor:
        out = torch.zeros(3, 24, 96, dtype=half, device=DEVICE)
        function(
            a,
            b,
            out,
            _numbers(used),
            tl.float16,
            None,
            None,
            None,
            False,
            False,
            False,
            _TILE,
            per_act_token_quant=False,
        )
        return out

    def expect(a: Tensor, b: Tensor) -> Tensor:
        kept = torch.arange(24) < torch.tensor(used)[:, None]
        return a @ b.transpose(1, 2) * kept[..., None]

    return Trial(run, (new.normal(3, 24, 128, dtype=half), new.normal(3, 96, 128, dtype=half)), expect)


# ---- sampling ----


@case("vllm/rejection_sampler_random")
def _(new: Inputs) -> Trial:
    module = "v1.sample.rejection_sampler."
    kernel = _vllm(module + "rejection_random_sample_kernel")
    ends, drafted = (3, 4, 8), 8
    draft, recovered = new.integers(0, 50, drafted), new.integers(0, 50, drafted)

    def run(drafts: Tensor, targets: Tensor, chances: Tensor) -> Tensor:
        out = torch.full((3, 5), -1, device=DEVICE)
        bonus, greedy = _numbers((7, 8, 9)), _numbers((False, False, False), torch.bool)
        kernel[(3,)](
            out, _numbers(ends), draft, drafts, targets, bonus, recovered, chances, greedy, 4, 50, NO_DRAFT_PROBS=False
        )
        return out

    def expect(drafts: Tensor, targets: Tensor, chances: Tensor) -> Tensor:
        out = torch.full((3, 5), -1)
        for row, (first, last) in enumerate(((0, 3), (3, 4), (4, 8))):
            for i in range(first, last):
                token = int(draft[i])
                accepted = targets[i, token] / drafts[i, token] >= chances[i]
                out[row, i - first] = token if accepted else int(recovered[i])
                if not accepted:
                    break
            else:
                out[row, last - first] = 7 + row
        return out

    return Trial(run, (new.uniform(drafted, 50), new.uniform(drafted, 50), new.uniform(drafted) * 0.5), expect)
