"""What memory is for: parameters, gradients, optimizer state, activations, workspaces. Mostly an inference.

Neither the driver nor the allocator knows. The recorder names tensors that modules and optimizers of PyTorch hold. What
any other block is for is read from the frames that allocated it, from the ranges it was allocated or freed in, and from
when in a step it was allocated and freed. Every block gets the first rule of :data:`RULES` that applies; the rule says
what decided, and how sure that is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import IntFlag, StrEnum
from itertools import pairwise
from typing import Any, Final

import numpy as np

from cudatool.analyze.sites import range_at
from cudatool.analyze.steps import Confidence, Steps
from cudatool.trace.events import OF_BACKWARD, OF_MODULE, GeneratedFlag, Kind, TensorRole
from cudatool.trace.lifetimes import Ints, Lifetimes, Mask, Timeline
from cudatool.trace.model import Frame, Trace, recorded_from
from cudatool.trace.module_tensors import BlockModules, block_modules

__all__ = ["RULES", "Categories", "Category", "CategoryRule", "CategoryShare", "categorize"]


class Category(StrEnum):
    """What a block is for."""

    PARAMETERS = "parameters"
    """Also buffers, such as running means."""
    GRADIENTS = "gradients"
    """Also those of activations, which live for a moment of the backward pass."""
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATIONS = "activations"
    """Also inputs and temporaries of the forward pass."""
    WORKSPACE = "workspace"
    """Of libraries such as cuBLAS and cuDNN, and temporaries of the optimizer."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CategoryRule:
    """One way to infer a category: what decides, in words, and how sure the result is."""

    category: Category
    confidence: Confidence
    reason: str


@dataclass(frozen=True, slots=True)
class CategoryShare:
    """The bytes and blocks that one rule assigns at the peak."""

    rule: CategoryRule
    size: int
    count: int


@dataclass(frozen=True, slots=True)
class Categories:
    """Inferred purposes.

    Attributes
    ----------
    device
        Whose blocks.
    rule
        For each block of this device, in the order of the lifetimes, an index into :data:`RULES`.
    at_peak
        Live bytes at the peak of active bytes, by rule, the largest first.
    """

    device: int
    rule: Ints
    at_peak: tuple[CategoryShare, ...]

    def sizes(self) -> dict[Category, int]:
        """Return the bytes at the peak by category, the largest first; categories without any are left out."""
        total: dict[Category, int] = {}
        for share in self.at_peak:
            total[share.rule.category] = total.get(share.rule.category, 0) + share.size
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: the shares, without the column."""
        return {
            "inferred": True,
            "at_peak": [{**asdict(share.rule), "size": share.size, "count": share.count} for share in self.at_peak],
        }


class _Seen(IntFlag):
    """Facts that the frames of a stack show."""

    ANY = 1
    OPTIMIZER = 2
    OPTIMIZER_INIT = 4
    MODULE_APPLY = 8
    BACKWARD = 16
    FORWARD = 32
    LIBRARY = 64


_LIBRARIES: Final = re.compile(r"(^|/)lib(cublas|cudnn|cufft|cusolver|cusparse|cutensor|nccl)[^/]*\.so[^/]*$")
"""Libraries that take memory from the driver for themselves."""


def _frame_flags(frame: Frame) -> _Seen:
    """Return what one frame shows; names as in PyTorch 2, with and without C++ frames."""
    seen = _Seen.ANY
    file, function = frame.file.lower(), frame.function
    if re.search("workspace|CUDABlas(Lt)?Handle", function, re.IGNORECASE) or _LIBRARIES.search(file):
        seen |= _Seen.LIBRARY
    if "torch/optim/" in file:
        seen |= _Seen.OPTIMIZER
        if function in ("_init_group", "_init_state", "_lazy_init"):
            seen |= _Seen.OPTIMIZER_INIT
    elif "torch/autograd/" in file or "torch::autograd::engine" in function.lower() or function == "backward":
        seen |= _Seen.BACKWARD
    elif "torch/nn/modules/" in file and function in ("_apply", "reset_parameters", "__init__", "to_empty"):
        seen |= _Seen.MODULE_APPLY
    elif "torch/nn/functional" in file or function in ("forward", "_call_impl", "_wrapped_call_impl"):
        seen |= _Seen.FORWARD
    return seen


def _stack_flags(trace: Trace) -> Ints:
    """Return what each stack shows."""
    of_frame = [int(_frame_flags(frame)) for frame in trace.frames]
    result = np.zeros(len(trace.stacks), np.int64)
    for i, stack in enumerate(trace.stacks):
        for frame in stack:
            result[i] |= of_frame[frame]
    for i, (at, _) in trace.generated.at.items():  # a backward pass, with the lines of the forward one
        if trace.generated.flags.get(at.file, GeneratedFlag(0)) & GeneratedFlag.BACKWARD:
            result[i] |= int(_Seen.BACKWARD)
    return result


@dataclass(frozen=True, slots=True)
class _Facts:
    """The inputs of the rules; a row for each block."""

    role: Ints
    """The :class:`~cudatool.trace.events.TensorRole` of what a module or optimizer holds in it, 0 for none."""
    in_module: Mask
    """Allocated while a module of PyTorch was called."""
    in_backward: Mask
    """Allocated by a node of PyTorch's backward graph."""
    seen: Ints
    born_in: dict[str, Mask]
    """Whether the innermost range at the allocation is the optimizer's, a backward or a forward pass."""
    zeroed: Mask
    """Freed by ``zero_grad``."""
    kept: Mask
    """Never freed, or only after two more steps."""
    outlives: Mask
    """Lives into the next step, or is never freed."""
    prior: Mask
    """There before the recording began."""
    unseen: Mask
    """Not in PyTorch's history, which was on for a part of the time."""
    before: Mask
    """Allocated before the turn of the first step."""
    forward: Mask
    """Allocated in a step of training before its turn, the moment with the most bytes active."""
    backward: Mask
    """Allocated in a step of training after its turn."""
    traced: bool
    """The trace has Python stacks."""
    requested: Ints

    def shows(self, flag: _Seen) -> Mask:
        return self.seen & int(flag) > 0


# What cuBLAS gets by default (PyTorch's getChosenWorkspaceSize): 2 x 4 MiB + 8 x 16 KiB, and 32 MiB on Hopper.
_CUBLAS_WORKSPACES: Final = (8_519_680, 33_554_432)

_P, _G, _O, _A, _W = list(Category)[:5]
_TABLE: Final[list[tuple[Category, Confidence, str, Callable[[_Facts], Mask]]]] = [
    (
        _P,
        Confidence.HIGH,
        "a parameter or buffer of a module",
        lambda f: np.isin(f.role, (TensorRole.PARAMETER, TensorRole.BUFFER)),
    ),
    (_O, Confidence.HIGH, "in the state of an optimizer", lambda f: f.role == TensorRole.OPTIMIZER_STATE),
    (_O, Confidence.HIGH, "allocated where torch.optim sets up its state", lambda f: f.shows(_Seen.OPTIMIZER_INIT)),
    (_W, Confidence.HIGH, "a frame that makes a library's workspace", lambda f: f.shows(_Seen.LIBRARY)),
    (
        _O,
        Confidence.MEDIUM,
        "allocated in torch.optim, and lives on after the step",
        lambda f: f.shows(_Seen.OPTIMIZER) & f.outlives,
    ),
    (_W, Confidence.MEDIUM, "a temporary of torch.optim: freed within the step", lambda f: f.shows(_Seen.OPTIMIZER)),
    (_G, Confidence.HIGH, "freed by zero_grad", lambda f: f.zeroed),
    (
        _P,
        Confidence.HIGH,
        "allocated where torch.nn.Module makes or moves its parameters",
        lambda f: f.shows(_Seen.MODULE_APPLY) & ~f.shows(_Seen.FORWARD | _Seen.BACKWARD),
    ),
    (
        _G,
        Confidence.HIGH,
        "a frame of torch.autograd's backward, or of a compiled one",
        lambda f: f.shows(_Seen.BACKWARD),
    ),
    (_G, Confidence.HIGH, "allocated by a node of the backward graph", lambda f: f.in_backward),
    (_A, Confidence.HIGH, "a frame of a module's forward", lambda f: f.shows(_Seen.FORWARD)),
    (_A, Confidence.HIGH, "allocated in the call of a module", lambda f: f.in_module),
    (
        _O,
        Confidence.MEDIUM,
        "allocated in a range of the optimizer, and lives on after the step",
        lambda f: f.born_in["optimizer"] & f.outlives,
    ),
    (
        _W,
        Confidence.MEDIUM,
        "allocated in a range of the optimizer, and freed within the step",
        lambda f: f.born_in["optimizer"],
    ),
    (_G, Confidence.MEDIUM, "allocated in a range named backward", lambda f: f.born_in["backward"]),
    (_A, Confidence.MEDIUM, "allocated in a range named forward", lambda f: f.born_in["forward"]),
    (
        _W,
        Confidence.MEDIUM,
        "of the size of cuBLAS's workspace, and stays",
        lambda f: f.kept & np.isin(f.requested, _CUBLAS_WORKSPACES),
    ),
    (
        Category.UNKNOWN,
        Confidence.LOW,
        "not in PyTorch's history, which was on for a part of the time",
        lambda f: f.unseen,
    ),
    (
        Category.UNKNOWN,
        Confidence.LOW,
        "there before the recording began, and stays: parameters or optimizer state",
        lambda f: f.kept & f.prior,
    ),
    (_P, Confidence.LOW, "allocated before the first step's peak, and stays", lambda f: f.kept & f.before),
    (
        _G,
        Confidence.MEDIUM,
        "allocated without a Python stack, as autograd's threads do, after the step's peak",
        lambda f: f.backward & f.traced & ~f.shows(_Seen.ANY),
    ),
    (_A, Confidence.LOW, "allocated in a step before its peak, and does not stay", lambda f: f.forward & ~f.kept),
    (_G, Confidence.LOW, "allocated in a step after its peak, and does not stay", lambda f: f.backward & ~f.kept),
    (Category.UNKNOWN, Confidence.LOW, "no rule applies", lambda f: np.ones(len(f.seen), np.bool_)),
]
RULES: Final = tuple(CategoryRule(category, confidence, reason) for category, confidence, reason, _ in _TABLE)
"""The rules, in the order in which they are tried."""


def categorize(
    trace: Trace,
    blocks: Lifetimes,
    curve: Timeline,
    steps: Steps,
    device: int,
    index: int,
    modules: BlockModules | None = None,
) -> Categories:
    """Return what each block is for, where it can be inferred, and the shares right after record `index`.

    Parameters
    ----------
    blocks, curve, steps
        Of this device.
    modules
        Of these blocks; looked up if the caller does not have them.
    """
    facts = _facts(trace, blocks, curve, steps, device, modules or block_modules(trace, blocks))
    rule = np.full(len(blocks), len(RULES) - 1, np.int64)
    undecided = np.ones(len(blocks), np.bool_)
    for i, (*_, applies) in enumerate(_TABLE):
        now = undecided & applies(facts)
        rule[now] = i
        undecided &= ~now
    live = (blocks.start <= index) & (index < blocks.end)
    size = np.zeros(len(RULES), np.int64)
    np.add.at(size, rule[live], blocks.size[live])
    count = np.bincount(rule[live], minlength=len(RULES))
    shares = [CategoryShare(RULES[i], int(size[i]), int(count[i])) for i in np.flatnonzero(count).tolist()]
    return Categories(device, rule, tuple(sorted(shares, key=lambda share: -share.size)))


_RANGES: Final = {"optimizer": r"optimizer\.step|\boptim", "backward": "backward", "forward": "forward"}


def _facts(
    trace: Trace, blocks: Lifetimes, curve: Timeline, steps: Steps, device: int, modules: BlockModules
) -> _Facts:
    never = len(trace.records)
    stack_flags = _stack_flags(trace)
    in_range = range_at(trace, blocks.start)
    named = {
        word: [i for i, name in enumerate(trace.names) if re.search(pattern, name, re.IGNORECASE)]
        for word, pattern in _RANGES.items()
    }
    born_in = {word: np.isin(in_range, names) for word, names in named.items()}

    # Freed by zero_grad: the frame is on the stack of the free, or its range is open then.
    zeroing = np.array([frame.function == "zero_grad" for frame in trace.frames])
    by_frame = np.array([bool(zeroing[list(stack)].any()) if stack else False for stack in trace.stacks])
    by_range = np.array(["zero_grad" in name for name in trace.names])
    freed = blocks.freed < never
    zeroed = np.zeros(len(blocks), np.bool_)
    at = blocks.freed[freed]
    zeroed[freed] = by_frame[trace.records["stack"][at]] | by_range[range_at(trace, at)]

    # A step is split at its turn: until then the forward pass accumulates activations, from then on they are freed.
    by_frames = stack_flags & int(_Seen.OPTIMIZER | _Seen.BACKWARD)
    trains = bool(named["optimizer"] or named["backward"] or by_frames.any())
    bounds = steps.bounds if trains and steps.confidence != Confidence.LOW else np.zeros(0, np.int64)
    step = np.searchsorted(bounds, blocks.start, side="right")  # 0: before the first bound
    turn = np.append(_turns(curve, bounds), -1)[step] if len(bounds) else np.full(len(blocks), -1)
    # Whether blocks of the last two steps stay is not known yet.
    next_bound, third_bound = np.append(bounds, never)[step], np.append(bounds, [never + 1] * 3)[step + 2]
    in_step = np.full(len(blocks), bool(len(bounds)))
    prior = blocks.start < recorded_from(trace, device)
    born = trace.records[blocks.start]
    is_block = born["kind"] == Kind.BLOCK_ALLOC
    return _Facts(
        role=modules.role,
        in_module=(is_block & (born["flags"] & OF_MODULE != 0)),
        in_backward=(is_block & (born["flags"] & OF_BACKWARD != 0)),
        seen=stack_flags[blocks.stack],
        born_in=born_in,
        zeroed=zeroed,
        kept=blocks.freed >= third_bound if len(bounds) else ~freed,
        outlives=~freed | (blocks.freed > next_bound),
        prior=prior,
        unseen=prior & ("history_kept" in trace.header),
        before=(step == 0) & (blocks.start <= turn),
        forward=in_step & (blocks.start <= turn),
        backward=in_step & (blocks.start > turn),
        traced=bool(stack_flags.any()),
        requested=blocks.requested,
    )


def _turns(curve: Timeline, bounds: Ints) -> Ints:
    """Return the record with the most bytes active before the first bound, between each two, and after the last."""
    edges = [0, *np.searchsorted(curve.index, bounds).tolist(), len(curve.index)]
    return np.array(
        [curve.index[a + np.argmax(curve.active[a:b])] if b > a else -1 for a, b in pairwise(edges)],
        np.int64,
    )
