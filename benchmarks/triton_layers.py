"""Cases of bench_triton.py: layers and losses of training, from five projects."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as everybody calls it
from triton_projects import (
    Inputs,
    Trial,
    case,
    fp8,
    half,
    load,
    rms_norm,
    scaled_attention,
    tutorial,
)

# ---- Triton's tutorials ----


@case("triton/add")
def _(new: Inputs) -> Trial:
    module = tutorial("01-vector-add")

    def add(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        module.add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK_SIZE=1024)
        return out

    return Trial(add, [new.normal(98432), new.normal(98432)], torch.add)


@case("triton/softmax")
def _(new: Inputs) -> Trial:
    module = tutorial("02-fused-softmax")

    def softmax(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        rows, columns = x.shape
        block = triton.next_power_of_2(columns)
        module.softmax_kernel[(32,)](out, x, x.stride(0), out.stride(0), rows, columns, block, 2, num_warps=8)
        return out

    return Trial(softmax, [new.normal(182, 781)], lambda x: x.softmax(1))


@case("triton/matmul", 2e-3)
def _(new: Inputs) -> Trial:
    module = tutorial("03-matrix-multiplication")
    a, b = new.normal(256, 192, dtype=half), new.normal(192, 320, dtype=half)
    return Trial(lambda a, b: module.matmul(a, b, activation="leaky_relu"), [a, b], lambda a, b: F.leaky_relu(a @ b))


@case("triton/seeded_dropout")
def _(new: Inputs) -> Trial:
    module = tutorial("04-low-memory-dropout")
    return Trial(lambda x: module.seeded_dropout(x, p=0.5, seed=123), [new.normal(10000)])


@case("triton/layer_norm", 2e-3)
def _(new: Inputs) -> Trial:
    module = tutorial("05-layer-norm")
    x, w, b = new.normal(151, 1000, dtype=half, grad=True), new.uniform(1000, dtype=half, grad=True), new.normal(1000)
    b = b.to(half).requires_grad_()
    layer_norm = module.LayerNorm.apply
    return Trial(
        lambda x, w, b: layer_norm(x, (1000,), w, b, 1e-5),
        [x, w, b],
        lambda x, w, b: F.layer_norm(x, (1000,), w, b, 1e-5),
    )


@case("triton/fused_attention", 1e-2)
def _(new: Inputs) -> Trial:
    module = tutorial("06-fused-attention", "NUM_STAGES_OPTIONS", "configs")
    q, k, v = (new.normal(1, 2, 256, 64, dtype=half, scale=0.5, grad=True) for _ in range(3))
    return Trial(
        lambda q, k, v: module._attention.apply(q, k, v, True, 0.5, False),
        [q, k, v],
        lambda q, k, v: scaled_attention(q, k, v, scale=0.5),
    )


@case("triton/asin")
def _(new: Inputs) -> Trial:
    module = tutorial("07-extern-functions")

    def asin(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        module.asin_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK_SIZE=1024)
        return out

    return Trial(asin, [new.uniform(98432)], torch.asin)


@case("triton/grouped_gemm", 2e-3)
def _(new: Inputs) -> Trial:
    module = tutorial("08-grouped-gemm", "tma_configs")
    sizes = [(256, 128, 64), (128, 256, 128), (128, 128, 192)]  # it has no masks: whole blocks
    pairs = [(new.normal(m, k, dtype=half), new.normal(k, n, dtype=half)) for m, n, k in sizes]
    matrices = [a for a, _ in pairs] + [b for _, b in pairs]
    return Trial(
        lambda *all: module.group_gemm_fn(list(all[:3]), list(all[3:])),
        matrices,
        lambda *all: [a @ b for a, b in zip(all[:3], all[3:], strict=True)],
    )


@case("triton/persistent_matmul", 2e-3)
def _(new: Inputs) -> Trial:
    module = tutorial("09-persistent-matmul")
    return Trial(
        module.matmul_persistent, [new.normal(256, 128, dtype=half), new.normal(128, 256, dtype=half)], torch.matmul
    )


@case("triton/descriptor_matmul", 2e-3)
def _(new: Inputs) -> Trial:
    module = tutorial("09-persistent-matmul")
    a, b = new.normal(256, 128, dtype=half), new.normal(256, 128, dtype=half)
    return Trial(lambda a, b: module.matmul_descriptor_persistent(a, b, False), [a, b], lambda a, b: a @ b.T)


# ---- Liger-Kernel ----


def _liger(module: str, name: str) -> Any:
    return getattr(load(f"liger_kernel.ops.{module}"), name).apply


@case("liger/rms_norm")
def _(new: Inputs) -> Trial:
    apply = _liger("rms_norm", "LigerRMSNormFunction")
    return Trial(
        lambda x, w: apply(x, w, 1e-6, 0.0, "llama", False),
        [new.normal(48, 512, grad=True), new.normal(512, grad=True)],
        rms_norm,
    )


@case("liger/layer_norm")
def _(new: Inputs) -> Trial:
    apply = _liger("layer_norm", "LigerLayerNormFunction")
    x, w, b = new.normal(48, 512, grad=True), new.normal(512, grad=True), new.normal(512, grad=True)
    return Trial(lambda x, w, b: apply(x, w, b, 1e-6), [x, w, b], lambda x, w, b: F.layer_norm(x, (512,), w, b, 1e-6))


@case("liger/group_norm")
def _(new: Inputs) -> Trial:
    apply = _liger("group_norm", "LigerGroupNormFunction")
    x, w, b = new.normal(4, 12, 64, grad=True), new.normal(12, grad=True), new.normal(12, grad=True)
    return Trial(lambda x, w, b: apply(x, w, b, 12, 4, 1e-6), [x, w, b], lambda x, w, b: F.group_norm(x, 4, w, b, 1e-6))


@case("liger/fused_add_rms_norm")
def _(new: Inputs) -> Trial:
    apply = _liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    x, r, w = new.normal(48, 512, grad=True), new.normal(48, 512, grad=True), new.normal(512, grad=True)
    return Trial(lambda x, r, w: apply(x, r, w, 1e-6), [x, r, w], lambda x, r, w: (rms_norm(x + r, w), x + r))


@case("liger/swiglu")
def _(new: Inputs) -> Trial:
    apply = _liger("swiglu", "LigerSiLUMulFunction")
    return Trial(
        lambda a, b: apply(a, b),
        [new.normal(64, 1000, grad=True), new.normal(64, 1000, grad=True)],
        lambda a, b: F.silu(a) * b,
    )


@case("liger/geglu")
def _(new: Inputs) -> Trial:
    apply = _liger("geglu", "LigerGELUMulFunction")
    a, b = new.normal(64, 1000, grad=True), new.normal(64, 1000, grad=True)
    return Trial(lambda a, b: apply(a, b), [a, b], lambda a, b: F.gelu(a, approximate="tanh") * b)


@case("liger/softmax")
def _(new: Inputs) -> Trial:
    return Trial(_liger("softmax", "LigerSoftmaxFunction"), [new.normal(64, 1000, grad=True)], lambda x: x.softmax(-1))


@case("liger/sparsemax")
def _(new: Inputs) -> Trial:
    apply = _liger("sparsemax", "LigerSparsemaxFunction")
    return Trial(lambda x: apply(x, -1), [new.normal(32, 256, grad=True)])


@case("liger/cross_entropy")
def _(new: Inputs) -> Trial:
    apply = _liger("cross_entropy", "LigerCrossEntropyFunction")
    x, target = new.normal(64, 1000, grad=True), new.integers(0, 1000, 64)
    return Trial(
        lambda x, t: apply(x, t, None, -100, 0.0, 0.1)[0],
        [x, target],
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    )


@case("liger/fused_linear_cross_entropy", 2e-5)
def _(new: Inputs) -> Trial:
    apply = _liger("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
    x, w, target = new.normal(64, 96, grad=True), new.normal(1000, 96, scale=0.1, grad=True), new.integers(0, 1000, 64)
    return Trial(lambda x, w, t: apply(x, w, t)[0], [x, w, target], lambda x, w, t: F.cross_entropy(x @ w.T, t))


@case("liger/kl_div")
def _(new: Inputs) -> Trial:
    apply = _liger("kl_div", "LigerKLDivLossFunction")
    p, q = new.normal(32, 500).log_softmax(-1).requires_grad_(), new.normal(32, 500).softmax(-1)
    return Trial(
        lambda p, q: apply(p, q, "batchmean", False, 1e-10), [p, q], lambda p, q: F.kl_div(p, q, reduction="batchmean")
    )


@case("liger/jsd")
def _(new: Inputs) -> Trial:
    apply = _liger("jsd", "LigerJSDFunction")
    p, q = new.normal(32, 500).log_softmax(-1).requires_grad_(), new.normal(32, 500).log_softmax(-1)
    return Trial(lambda p, q: apply(p, q, None, 0.5, -100), [p, q])


@case("liger/tvd")
def _(new: Inputs) -> Trial:
    apply = _liger("tvd", "LigerTVDLossFunction")
    p, q = new.normal(32, 500).softmax(-1).requires_grad_(), new.normal(32, 500).softmax(-1)
    return Trial(lambda p, q: apply(p, q, None, "batchmean", -100), [p, q], lambda p, q: (p - q).abs().sum() / 2 / 32)


@case("liger/rope")
def _(new: Inputs) -> Trial:
    apply = _liger("rope", "LigerRopeFunction")
    q, k = new.normal(2, 4, 32, 64, grad=True), new.normal(2, 2, 32, 64, grad=True)
    angles = new.normal(1, 32, 32).repeat(1, 1, 2)

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        turned = [torch.cat((-x[..., 32:], x[..., :32]), -1) for x in (q, k)]
        return [x * cos[:, None] + t * sin[:, None] for x, t in zip((q, k), turned, strict=True)]

    return Trial(lambda q, k, c, s: apply(q, k, c, s), [q, k, angles.cos(), angles.sin()], rope)


@case("liger/dyt")
def _(new: Inputs) -> Trial:
    apply = _liger("dyt", "LigerDyTFunction")
    x, a, g, b = (new.normal(*s, grad=True) for s in ((64, 512), (1,), (512,), (512,)))
    return Trial(lambda *all: apply(*all), [x, a, g, b], lambda x, a, g, b: g * torch.tanh(a * x) + b)


@case("liger/poly_norm")
def _(new: Inputs) -> Trial:
    apply = _liger("poly_norm", "LigerPolyNormFunction")
    return Trial(
        lambda x, w, b: apply(x, w, b, 1e-6, False),
        [new.normal(48, 512, grad=True), new.normal(3, grad=True), new.normal(grad=True)],
    )


@case("liger/neighborhood_attention", 5e-3)
def _(new: Inputs) -> Trial:
    apply = _liger("fused_neighborhood_attention", "LigerFusedNeighborhoodAttentionFunction")
    return Trial(lambda q, k, v: apply(q, k, v, 7, 1, None), [new.normal(1, 2, 64, 32, grad=True) for _ in range(3)])


@case("liger/grpo_loss")
def _(new: Inputs) -> Trial:
    apply = _liger("grpo_loss", "GrpoLossFunction")
    logits, ids = new.normal(3, 17, 500, grad=True), new.integers(0, 500, 3, 16)
    old, ref, advantages = new.normal(3, 16) - 6, new.normal(3, 16) - 6, new.normal(3)
    mask = (new.uniform(3, 16) > 0.2).int()
    return Trial(
        lambda x, o, r, i, a, m: apply(x, o, r, i, a, m, 0.9, 0.04, 0.2, 0.2, False)[0],
        [logits, old, ref, ids, advantages, mask],
    )


# ---- flash-attention's Triton part ----


@case("flash-attention/layer_norm")
def _(new: Inputs) -> Trial:
    function = load("flash_attn.ops.triton.layer_norm").layer_norm_fn
    x, w, b, r = (
        new.normal(48, 512, grad=True),
        new.normal(512, grad=True),
        new.normal(512, grad=True),
        new.normal(48, 512, grad=True),
    )
    return Trial(
        lambda x, w, b, r: function(x, w, b, residual=r, eps=1e-6),
        [x, w, b, r],
        lambda x, w, b, r: F.layer_norm(x + r, (512,), w, b, 1e-6),
    )


@case("flash-attention/rms_norm")
def _(new: Inputs) -> Trial:
    function = load("flash_attn.ops.triton.layer_norm").rms_norm_fn
    return Trial(
        lambda x, w: function(x, w, None, eps=1e-6),
        [new.normal(48, 500, grad=True), new.normal(500, grad=True)],
        rms_norm,
    )


@case("flash-attention/cross_entropy")
def _(new: Inputs) -> Trial:
    function = load("flash_attn.ops.triton.cross_entropy").cross_entropy_loss
    x, target = new.normal(64, 1000, grad=True), new.integers(0, 1000, 64)
    return Trial(
        lambda x, t: function(x, t, label_smoothing=0.1)[0],
        [x, target],
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1, reduction="none"),
    )


@case("flash-attention/rotary")
def _(new: Inputs) -> Trial:
    function = load("flash_attn.ops.triton.rotary").apply_rotary
    angles = new.normal(32, 32)

    def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x[..., 0::2], x[..., 1::2]
        cos, sin = cos[None, :, None], sin[None, :, None]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    return Trial(
        lambda x, c, s: function(x, c, s, interleaved=True),
        [new.normal(2, 32, 4, 64), angles.cos(), angles.sin()],
        rotary,
    )


# ---- Unsloth ----


def _unsloth(name: str) -> Any:
    return load(f"unsloth.kernels.{name}")


@case("unsloth/rms_norm")
def _(new: Inputs) -> Trial:
    apply = _unsloth("rms_layernorm").Fast_RMS_Layernorm.apply
    return Trial(
        lambda x, w: apply(x, w, 1e-6, True),
        [new.normal(48, 500, grad=True), new.normal(500)],
        lambda x, w: rms_norm(x, w + 1),
    )


@case("unsloth/layer_norm")
def _(new: Inputs) -> Trial:
    apply = _unsloth("layernorm").Fast_Layernorm.apply
    x, w, b = new.normal(48, 500, grad=True), new.normal(500), new.normal(500)
    return Trial(lambda x, w, b: apply(x, w, b, 1e-5), [x, w, b], lambda x, w, b: F.layer_norm(x, (500,), w, b, 1e-5))


@case("unsloth/cross_entropy")
def _(new: Inputs) -> Trial:
    apply = _unsloth("cross_entropy_loss").Fast_CrossEntropyLoss.apply
    x, target = new.normal(40, 1000, grad=True), new.integers(0, 1000, 40)
    # Its backward pass writes into the logits, which therefore are no leaf.
    return Trial(
        lambda x, t: apply(x * 1, t, 30.0, 0),
        [x, target],
        lambda x, t: F.cross_entropy(30 * torch.tanh(x / 30), t, reduction="none"),
    )


@case("unsloth/cross_entropy_in_chunks")
def _(new: Inputs) -> Trial:
    apply = _unsloth("cross_entropy_loss").Fast_CrossEntropyLoss.apply
    x, target = new.normal(3, 70001, grad=True), new.integers(0, 70001, 3)
    return Trial(lambda x, t: apply(x * 1, t, 0, 0), [x, target], lambda x, t: F.cross_entropy(x, t, reduction="none"))


@case("unsloth/rope")
def _(new: Inputs) -> Trial:
    apply = _unsloth("rope_embedding").Fast_RoPE_Embedding_QK.apply
    q, k, angles = (
        new.normal(2, 4, 32, 64, grad=True),
        new.normal(2, 2, 32, 64, grad=True),
        new.normal(32, 32).repeat(1, 2),
    )

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        return [x * cos + torch.cat((-x[..., 32:], x[..., :32]), -1) * sin for x in (q, k)]

    return Trial(lambda q, k, c, s: apply(q * 1, k * 1, c, s, None), [q, k, angles.cos(), angles.sin()], rope)


@case("unsloth/swiglu")
def _(new: Inputs) -> Trial:
    function = _unsloth("swiglu").swiglu_fg_kernel
    return Trial(function, [new.normal(2, 20, 500), new.normal(2, 20, 500)], lambda e, g: F.silu(e) * g)


@case("unsloth/geglu_backward")
def _(new: Inputs) -> Trial:
    function = _unsloth("geglu").geglu_exact_backward_kernel

    def backward(dw: Tensor, e: Tensor, g: Tensor) -> list[Tensor]:
        gate = e.requires_grad_()
        with torch.enable_grad():
            value = F.gelu(gate)
            (de,) = torch.autograd.grad(value, gate, dw * g)
        return [value.detach() * g, dw * value.detach(), de]

    return Trial(function, [new.normal(40, 500), new.normal(40, 500), new.normal(40, 500)], backward)


@case("unsloth/fp8_matmul", 1e-2)
def _(new: Inputs) -> Trial:
    module = _unsloth("fp8")
    scale = new.uniform(2, 2) + 0.5

    def product(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        quantized, scales = module.act_quant(x, 128)
        return module.w8a8_block_fp8_matmul_triton(quantized, w, scales, scale, [128, 128])

    return Trial(product, [new.normal(48, 256), new.normal(256, 256).to(fp8), scale])


@case("unsloth/weight_dequantized")
def _(new: Inputs) -> Trial:
    function = _unsloth("fp8").weight_dequant_block
    return Trial(lambda w, s: function(w, s, 128), [new.normal(200, 256).to(fp8), new.uniform(2, 2)])


# ---- attorch ----


def _attorch(module: str, name: str) -> Any:
    return getattr(load(f"attorch.{module}"), name).apply


@case("attorch/linear", 5e-3)
def _(new: Inputs) -> Trial:
    apply = _attorch("linear_layer", "LinearAutoGrad")
    x, w, b = new.normal(96, 128, grad=True), new.normal(128, 64, grad=True), new.normal(64, grad=True)
    return Trial(lambda x, w, b: apply(x, w, b, "relu"), [x, w, b], lambda x, w, b: F.relu(x @ w + b))


@case("attorch/convolution", 5e-3)
def _(new: Inputs) -> Trial:
    apply = _attorch("conv_layer", "Conv2dAutoGrad")
    return Trial(
        lambda x, w, b: apply(x, w, b, 1, 1, 1, 1, 1),
        [new.normal(2, 16, 14, 14), new.normal(24, 16, 3, 3), new.normal(24)],
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
    )


@case("attorch/gelu_and_dropout")
def _(new: Inputs) -> Trial:
    apply = _attorch("act_layers", "ActFuncAutoGrad")
    return Trial(lambda x: apply(x, "gelu", 0.0, True), [new.normal(64, 500, grad=True)], F.gelu)


@case("attorch/glu")
def _(new: Inputs) -> Trial:
    apply = _attorch("glu_layer", "GLUAutoGrad")
    return Trial(lambda x: apply(x, -1, "sigmoid"), [new.normal(64, 500, grad=True)], F.glu)
