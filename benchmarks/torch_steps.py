"""The steps of training that benchmarks measure, in PyTorch: the same sizes, dtypes and order of work as ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

__all__ = ["perceptron", "replay", "transformer"]

Step = Callable[[], Any]


def transformer(torch: Any, sample: Any, mode: str | None = None) -> Step:
    """Return a step of the model of samples/transformer.py.

    Parameters
    ----------
    sample
        The sample's module, whose sizes are taken.
    mode
        Of ``torch.compile``, which compiles the forward and the backward pass; None compiles nothing.
    """
    nn, functional = torch.nn, torch.nn.functional
    width, heads, context = sample.WIDTH, sample.HEADS, sample.CONTEXT
    device = torch.device("cuda")
    hidden = torch.ones(context, context, dtype=torch.bool, device=device).triu(1)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

        def forward(self, x: Any) -> Any:
            parts = self.project(x).reshape(-1, context, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            query, key, value = parts.contiguous().reshape(3, -1, context, width // heads)
            scores = torch.bmm(query, key.transpose(1, 2)) * (width // heads) ** -0.5
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            mixed = torch.bmm(weights, value).reshape(-1, heads, context, width // heads)
            return self.out(mixed.transpose(1, 2).reshape(-1, width))

    class Residual(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.norm, self.inner, self.dropout = nn.LayerNorm(width), inner, nn.Dropout(sample.DROPOUT)

        def forward(self, x: Any) -> Any:
            return x + self.dropout(self.inner(self.norm(x)))

    def perceptron() -> Any:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    letters, places = nn.Embedding(len(sample.letters), width), nn.Embedding(context, width)
    blocks = [Residual(kind()) for _ in range(sample.LAYERS) for kind in (Attention, perceptron)]
    body = nn.Sequential(*blocks, nn.LayerNorm(width), nn.Linear(width, len(sample.letters)))
    model = nn.ModuleList([letters, places, body]).to(device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=sample.RATE, weight_decay=0.01, fused=True, capturable=True)
    tokens = torch.randint(len(sample.letters), (sample.BATCH, context), device=device)
    targets = torch.randint(len(sample.letters), (sample.BATCH * context,), device=device)

    def forward(tokens: Any, targets: Any) -> Any:
        scores = body((letters(tokens) + places.weight).reshape(-1, width))
        return functional.cross_entropy(scores, targets)

    run = forward if mode is None else torch.compile(forward, mode=mode)

    def step() -> Any:
        if mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = run(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.detach()

    return step


def perceptron(torch: Any, arrays: dict[str, Any], mode: str | None = None) -> Step:
    """Return a step of a perceptron of two layers, its gradient written out, which is compiled as a whole.

    Parameters
    ----------
    arrays
        NumPy arrays: ``x``, ``y``, and the parameters ``w1``, ``b1``, ``w2``.
    mode
        Of ``torch.compile``; None compiles nothing.
    """
    x, y, w1, b1, w2 = (torch.from_numpy(arrays[name].copy()).cuda() for name in ("x", "y", "w1", "b1", "w2"))
    for parameter in (w1, b1, w2) if mode is not None else ():  # a CUDA graph may change them where they are
        torch._dynamo.mark_static_address(parameter)
    gelu, gelu_backward = torch.nn.functional.gelu, torch.ops.aten.gelu_backward

    def compute(x: Any, y: Any) -> Any:
        before = torch.mm(x, w1) + b1
        hidden = gelu(before)
        error = (torch.mm(hidden, w2) - y) * (1 / len(x))
        gradient = gelu_backward(torch.mm(error, w2.T), before)
        w2.sub_(torch.mm(hidden.T, error) * 0.1)
        w1.sub_(torch.mm(x.T, gradient) * 0.1)
        b1.sub_(gradient.sum(0) * 0.1)
        return (error * error).sum()

    run = compute if mode is None else torch.compile(compute, mode=mode)

    def step() -> Any:
        if mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return run(x, y)

    return step


def replay(torch: Any, step: Step) -> Step:
    """Return the replay of a CUDA graph of a step."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step()
    return graph.replay  # type: ignore[no-any-return]
