"""Cases of bench_triton.py: sequence models, quantization and serving, from three projects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as everybody calls it
from triton_projects import (
    DEVICE,
    Inputs,
    Trial,
    bf16,
    case,
    half,
    load,
    rms_norm,
    scaled_attention,
    sglang,
    sglang_package,
)

FP8 = 2e-2
"""For capability 8.9 Triton converts to fp8 by way of halves, toward zero: some elements are a step (1/8) lower."""

# ---- flash-linear-attention ----


def _fla(name: str) -> Any:
    module, _, function = name.rpartition(".")
    return getattr(load(f"fla.{module}"), function)


def _heads(new: Inputs, count: int = 3, dtype: torch.dtype = torch.float32, length: int = 128) -> list[Tensor]:
    return [new.normal(1, length, 2, 64, dtype=dtype, scale=0.5, grad=True) for _ in range(count)]


@case("fla/attention", 1e-2)
def _(new: Inputs) -> Trial:
    function = _fla("ops.attn.parallel.parallel_attn")

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    return Trial(function, _heads(new, dtype=half), attention)


@case("fla/linear_attention_chunks", 5e-3)
def _(new: Inputs) -> Trial:
    function = _fla("ops.linear_attn.chunk.chunk_linear_attn")
    return Trial(lambda q, k, v: function(q, k, v, normalize=False)[0], _heads(new))


@case("fla/retention_chunks", 5e-3)
def _(new: Inputs) -> Trial:
    function = _fla("ops.retention.chunk.chunk_retention")
    return Trial(lambda q, k, v: function(q, k, v)[0], _heads(new))


@case("fla/delta_rule_chunks", 2e-2)
def _(new: Inputs) -> Trial:
    function = _fla("ops.delta_rule.chunk.chunk_delta_rule")
    q, k, v = _heads(new, dtype=bf16)
    k = F.normalize(k.detach().float(), dim=-1).to(bf16).requires_grad_()
    beta = new.uniform(1, 128, 2, dtype=bf16, grad=True)
    return Trial(lambda q, k, v, b: function(q, k, v, b)[0], [q, k, v, beta])


@case("fla/gated_linear_attention_recurrent")
def _(new: Inputs) -> Trial:
    function = _fla("ops.gla.fused_recurrent.fused_recurrent_gla")
    q, k, v = _heads(new, length=32)
    gate = F.logsigmoid(new.normal(1, 32, 2, 64)).requires_grad_()
    return Trial(lambda q, k, v, g: function(q, k, v, gk=g)[0], [q, k, v, gate])


@case("fla/gated_delta_rule_recurrent")
def _(new: Inputs) -> Trial:
    function = _fla("ops.gated_delta_rule.fused_recurrent.fused_recurrent_gated_delta_rule")
    q, k, v = (each.detach() for each in _heads(new, length=32))
    gate, beta = F.logsigmoid(new.normal(1, 32, 2)), new.uniform(1, 32, 2)
    return Trial(
        lambda q, k, v, g, b: function(q, k, v, g=g, beta=b, use_qk_l2norm_in_kernel=True)[0], [q, k, v, gate, beta]
    )


@case("fla/rwkv6_recurrent")
def _(new: Inputs) -> Trial:
    function = _fla("ops.rwkv6.fused_recurrent.fused_recurrent_rwkv6")
    r, k, v = _heads(new, length=32)
    w, u = F.logsigmoid(new.normal(1, 32, 2, 64)).requires_grad_(), new.normal(2, 64, grad=True)
    return Trial(lambda r, k, v, w, u: function(r, k, v, w, u)[0], [r, k, v, w, u])


@case("fla/hgrn_recurrent")
def _(new: Inputs) -> Trial:
    function = _fla("ops.hgrn.fused_recurrent.fused_recurrent_hgrn")
    x, g = new.normal(2, 32, 128, grad=True), F.logsigmoid(new.normal(2, 32, 128)).requires_grad_()
    return Trial(lambda x, g: function(x, g)[0], [x, g])


@case("fla/rebased", 5e-3)
def _(new: Inputs) -> Trial:
    function = _fla("ops.rebased.parallel.parallel_rebased")
    q, k, v = (
        new.normal(1, 2, 128, 16, grad=True),
        new.normal(1, 2, 128, 16, grad=True),
        new.normal(1, 2, 128, 64, grad=True),
    )
    return Trial(lambda q, k, v: function(q, k, v, use_normalize=False), [q, k, v])


@case("fla/l2_norm")
def _(new: Inputs) -> Trial:
    return Trial(
        _fla("modules.l2norm.l2norm"),
        [new.normal(64, 100, grad=True)],
        lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6),
    )


@case("fla/rms_norm_gated")
def _(new: Inputs) -> Trial:
    function = _fla("modules.fused_norm_gate.rms_norm_gated")
    x, g, w = new.normal(48, 128, grad=True), new.normal(48, 128, grad=True), new.normal(128, grad=True)
    return Trial(lambda x, g, w: function(x, g, w, None), [x, g, w], lambda x, g, w: rms_norm(x, w) * F.silu(g))


@case("fla/short_convolution")
def _(new: Inputs) -> Trial:
    function = load("fla.modules.conv.triton.ops").causal_conv1d_fwd
    x, w, b = new.normal(2, 100, 96), new.normal(96, 4), new.normal(96)

    def convolution(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.silu(F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), w[:, None], b, groups=96)).transpose(1, 2)

    return Trial(lambda x, w, b: function(x, w, b, None, activation="silu")[0], [x, w, b], convolution)


@case("fla/mean_pooling")
def _(new: Inputs) -> Trial:
    function = _fla("ops.utils.pooling.mean_pooling")
    return Trial(
        lambda x: function(x, 16), [new.normal(2, 64, 2, 64, grad=True)], lambda x: x.reshape(2, 4, 16, 2, 64).mean(2)
    )


@case("fla/cumsum")
def _(new: Inputs) -> Trial:
    function = _fla("ops.utils.cumsum.chunk_global_cumsum")
    return Trial(function, [new.normal(2, 200, 4)], lambda x: x.cumsum(1))


@case("fla/solve_triangular", 5e-3)
def _(new: Inputs) -> Trial:
    function = _fla("ops.utils.solve_tril.solve_tril")
    a = torch.tril(new.normal(2, 64, 1, 64, scale=0.1).transpose(1, 2), -1).transpose(1, 2).contiguous()

    def inverse(a: Tensor) -> Tensor:
        return torch.linalg.inv(torch.eye(64, dtype=a.dtype) + a.transpose(1, 2)).transpose(1, 2)

    return Trial(function, [a], inverse)


# ---- torchao ----


@case("torchao/int8_matmul")
def _(new: Inputs) -> Trial:
    function = load("torchao.prototype.quantized_training.int8_mm").scaled_int8_mm_cuda
    a, b = (new.integers(-128, 128, *shape, dtype=torch.int8) for shape in ((96, 128), (128, 160)))
    return Trial(
        function, [a, b, new.uniform(96), new.uniform(160)], lambda a, b, r, c: (a.long() @ b.long()) * r[:, None] * c
    )


@case("torchao/fp8_gemm_in_blocks", 1e-2)
def _(new: Inputs) -> Trial:
    module = load("torchao.prototype.blockwise_fp8_training.kernels")
    x, w = new.normal(128, 256, dtype=bf16), new.normal(256, 256, dtype=bf16)

    def product(x: Tensor, w: Tensor) -> Tensor:
        a, a_scale = module.triton_fp8_blockwise_act_quant_lhs(x, 128)
        b, b_scale = module.triton_fp8_blockwise_weight_quant_transposed_rhs(w, 128)
        return module.triton_fp8_gemm_1x128_128x128(a, b, a_scale, b_scale)

    return Trial(product, [x, w])


@case("torchao/fp8_activation_quantized", FP8)
def _(new: Inputs) -> Trial:
    function = load("torchao.prototype.blockwise_fp8_inference.kernels").fp8_blockwise_act_quant
    return Trial(function, [new.normal(64, 512)])


@case("torchao/fp8_attention_quantized", FP8)
def _(new: Inputs) -> Trial:
    function = load("torchao.prototype.fp8_sdpa_inference.fp8_sdpa_quantization").fp8_sdpa_quantize_func
    return Trial(lambda q, k, v: function(q, k, v, 4), [new.normal(1, 2, 128, 64, dtype=bf16) for _ in range(3)])


@case("torchao/fp8_transposed_with_atomics", FP8)
def _(new: Inputs) -> Trial:
    function = load("torchao.prototype.moe_training.kernels.float8_rowwise").triton_fp8_rowwise_3d_transpose_rhs
    return Trial(function, [new.normal(2, 128, 256, dtype=bf16)])


@case("torchao/mx_scales_swizzled")
def _(new: Inputs) -> Trial:
    function = load("torchao.prototype.mx_formats.kernels").triton_mx_block_rearrange
    return Trial(lambda x: function(x.to(torch.float8_e8m0fnu)), [new.uniform(256, 16)])


@case("torchao/permuted_indices")
def _(new: Inputs) -> Trial:
    module = load("torchao.prototype.moe_training.ep.kernels")
    tokens = new.integers(0, 40, 32, dtype=torch.int32)

    def fill(tokens: Tensor, launch: bool = True) -> Tensor:
        starts = (tokens.cumsum(0) - tokens).int()
        sums = tokens.view(4, 8).sum(0)
        arguments = tokens, starts, (sums.cumsum(0) - sums).int(), 8, 4, 1280
        return module.fill_indices_wrapper(*arguments) if launch else module.fill_indices_cpu(*arguments)

    return Trial(fill, [tokens], lambda tokens: fill(tokens, False))


@case("torchao/hqq_matmul", 2e-3)
def _(new: Inputs) -> Trial:
    function = load("torchao.prototype.hqq.mixed_mm").triton_mixed_mm
    # Of the scales it reads whole blocks of 256 columns, without a mask.
    packed = new.integers(0, 256, 64, 256, dtype=torch.uint8)
    a, scales, zeros = new.normal(32, 128, dtype=half), new.uniform(2, 256, dtype=half), new.uniform(2, 256, dtype=half)
    return Trial(lambda a, b, s, z: function(a, b, s, z, 64), [a, packed, scales, zeros])


# ---- SGLang ----


@case("sglang/softcap")
def _(new: Inputs) -> Trial:
    module = sglang("activation/softcap")
    return Trial(
        lambda x: module._softcap_logits(x, 30.0), [new.normal(16, 3000, scale=20)], lambda x: 30 * torch.tanh(x / 30)
    )


@case("sglang/merge_state")
def _(new: Inputs) -> Trial:
    function = sglang("attention/merge_state").merge_state_triton

    def merge(a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> list[Tensor]:
        total = torch.logaddexp(x, y)
        return [a * (x - total).exp()[..., None] + b * (y - total).exp()[..., None], total]

    return Trial(function, [new.normal(32, 4, 64), new.normal(32, 4), new.normal(32, 4, 64), new.normal(32, 4)], merge)


@case("sglang/ernie_rope")
def _(new: Inputs) -> Trial:
    function = sglang("attention/rotary_triton").triton_ernie45_rope_fused_inplace

    def rope(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> list[Tensor]:
        function(q, k, cache, positions, [22, 22, 20], 128, 128, True)
        return [q, k]

    return Trial(rope, [new.normal(32, 512), new.normal(32, 256), new.normal(100, 128), new.integers(0, 100, 3, 32)])


@case("sglang/gdn_gating")
def _(new: Inputs) -> Trial:
    function = sglang("attention/linear/fused_gdn_gating").fused_gdn_gating

    def gating(a_log: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> list[Tensor]:
        return [(-a_log.exp() * F.softplus(a + bias))[None], b.sigmoid()[None]]

    return Trial(function, [new.normal(16), new.normal(40, 16), new.normal(40, 16), new.normal(16)], gating)


@case("sglang/lightning_attention", 5e-3)
def _(new: Inputs) -> Trial:
    function = sglang("attention/linear/lightning_attn").lightning_attention
    slopes = new.uniform(2) * 0.1
    return Trial(
        lambda q, k, v, s: function(q, k, v, s), [*(new.normal(1, 2, 256, 64, scale=0.3) for _ in range(3)), slopes]
    )


@case("sglang/lightning_decode")
def _(new: Inputs) -> Trial:
    function = sglang("attention/linear/lightning_attn").linear_decode_forward_triton

    def decode(q: Tensor, k: Tensor, v: Tensor, caches: Tensor, slopes: Tensor, slots: Tensor) -> list[Tensor]:
        return [function(q, k, v, caches, slopes, slots, 32), caches]

    inputs = [*(new.normal(3, 4, 1, 64) for _ in range(3)), new.normal(5, 4, 64, 64), new.uniform(4)]
    return Trial(decode, [*inputs, torch.tensor([4, 0, 2], device=DEVICE)])


@case("sglang/awq_dequantized", 1e-3)
def _(new: Inputs) -> Trial:
    function = sglang("quantization/awq_triton").awq_dequantize_triton
    words = [new.integers(-(2**31), 2**31, *shape, dtype=torch.int32) for shape in ((128, 32), (2, 32))]
    return Trial(function, [words[0], new.uniform(2, 256, dtype=half), words[1]])


@case("sglang/mxfp8_quantized")
def _(new: Inputs) -> Trial:
    function = sglang("quantization/mxfp8_quant").to_mxfp8

    def quantized(x: Tensor) -> list[Tensor]:
        made = function(x)
        return [made.data, made.scale]

    return Trial(quantized, [new.normal(100, 256, dtype=bf16)])


@case("sglang/k_cache_quantized", FP8)
def _(new: Inputs) -> Trial:
    function = sglang("quantization/dsa_quant_k_cache")._quantize_k_cache_fast
    return Trial(function, [new.normal(30, 512, dtype=bf16), new.normal(30, 64, dtype=bf16)])


@case("sglang/streaming_top_k")
def _(new: Inputs) -> Trial:
    function = sglang("moe/gate_topk").gate_topk

    def top(x: Tensor) -> list[Tensor]:
        values, indices = x.topk(6)
        return [values, indices]

    return Trial(lambda x: function(x, 6), [new.normal(50, 200)], top)


@case("sglang/hash_top_k")
def _(new: Inputs) -> Trial:
    function = sglang("moe/triton_hash_topk").hash_topk_triton
    return Trial(
        lambda x, i, t: function(x, i, t, 1, 2.5, "sqrtsoftplus"),
        [new.normal(40, 64), new.integers(0, 100, 40), new.integers(0, 64, 100, 6, dtype=torch.int32)],
    )


@case("sglang/row_argmax")
def _(new: Inputs) -> Trial:
    return Trial(sglang("speculative/row_argmax").row_argmax, [new.normal(8, 30001)], lambda x: x.argmax(-1))


@case("sglang/temperature_softmax")
def _(new: Inputs) -> Trial:
    function = sglang("sampling/temperature_softmax").temperature_softmax
    return Trial(function, [new.normal(4, 20001), new.uniform(4, 1) + 0.5], lambda x, t: (x / t).softmax(-1))


@case("sglang/top_k_renormalized")
def _(new: Inputs) -> Trial:
    function = sglang("sampling/renorm_triton").top_k_renorm_probs_triton

    def renormalized(x: Tensor) -> Tensor:
        kept = torch.where(x >= x.topk(50).values[:, -1:], x, 0.0)
        return kept / kept.sum(-1, keepdim=True)

    return Trial(lambda x: function(x, 50), [new.normal(4, 5000).softmax(-1)], renormalized)


@case("sglang/tensor_hash")
def _(new: Inputs) -> Trial:
    function = sglang("memory/gpu_tensor_hash").gpu_tensor_hash

    def hashed(x: Tensor) -> Tensor:
        return torch.tensor([function(x) >> 32])

    return Trial(hashed, [new.normal(40000)])


@case("sglang/lanczos")
def _(new: Inputs) -> Trial:
    function = sglang("mm/process/lanczos").lanczos_resize
    return Trial(lambda x: function(x, 60, 90), [new.integers(0, 256, 100, 120, 3, dtype=torch.uint8)])


@case("sglang/patches")
def _(new: Inputs) -> Trial:
    module = sglang("mm/process/image")
    inputs = [new.normal(2, 3, 50, 60), new.uniform(1, 3, 1, 1), new.normal(1, 3, 1, 1)]
    return Trial(
        lambda *all: module.normalize_and_patchify(*all, 8, 56, 64),
        inputs,
        lambda *all: module._normalize_and_patchify_torch(*all, 8, 56, 64),
    )


@case("sglang/rms_norm")
def _(new: Inputs) -> Trial:
    function = sglang("layernorm/rmsnorm_fp32").rmsnorm_fp32
    return Trial(lambda x, w: function(x, w, 1e-6), [new.normal(48, 512), new.normal(512)], rms_norm)


@case("sglang/rms_norm_fp8")
def _(new: Inputs) -> Trial:
    function = sglang("layernorm/rmsnorm_fp8_e8m0").rmsnorm_fp8_e8m0_quant
    return Trial(lambda x, w: function(x, w, 1e-6), [new.normal(48, 512, dtype=bf16), new.normal(512, dtype=bf16)])


@case("sglang/group_norm_silu", 1e-3)
def _(new: Inputs) -> Trial:
    function = sglang("diffusion/norm/group_norm_silu_twopass_triton")._gn_silu_rows

    def rows(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.silu(F.group_norm(x.transpose(1, 2), 8, w, b, 1e-5)).transpose(1, 2)

    return Trial(
        lambda x, w, b: function(x, w, b, 8, 1e-5, True),
        [new.normal(2, 300, 64, dtype=half), new.normal(64, dtype=half), new.normal(64, dtype=half)],
        rows,
    )


@case("sglang/short_convolution", 1e-2)
def _(new: Inputs) -> Trial:
    function = sglang("mamba/lfm_short_conv").fused_lfm_short_conv_prefill

    def convolution(b: Tensor, c: Tensor, x: Tensor, w: Tensor, state: Tensor) -> list[Tensor]:
        starts, slots, known = ([0, 20, 50], [1, 0], [True, False])
        made = [
            torch.tensor(each, device=DEVICE, dtype=kind)
            for each, kind in zip((starts, slots, known), (torch.int32, torch.int32, torch.bool), strict=True)
        ]
        return [function(b, c, x, w, state, *made, 30), state]

    inputs = [new.normal(50, 256, dtype=bf16) for _ in range(3)]
    return Trial(convolution, [*inputs, new.normal(256, 3, dtype=bf16), new.normal(2, 256, 2, dtype=bf16)])


@case("sglang/state_passing")
def _(new: Inputs) -> Trial:
    function = sglang_package("mamba/triton_ops/ssd_state_passing")._state_passing_fwd
    return Trial(lambda s, a: function(s, a), [new.normal(2, 4, 3, 96), new.normal(2, 3, 4, 16)])


@case("sglang/chunk_products", 5e-3)
def _(new: Inputs) -> Trial:
    function = sglang_package("mamba/triton_ops/ssd_bmm")._bmm_chunk_fwd

    def product(a: Tensor, b: Tensor) -> Tensor:
        a, b = (x.reshape(1, 2, 64, 2, 32).permute(0, 1, 3, 2, 4) for x in (a, b))
        return a @ b.transpose(-1, -2)

    return Trial(lambda a, b: function(a, b, 64), [new.normal(1, 128, 2, 32), new.normal(1, 128, 2, 32)], product)
