from __future__ import annotations

import pytest
from recordings import in_turn
from records import MIB, RECORDINGS, alloc, free, freed, report_of, stacks, trace

from cudatool import analyze
from cudatool.analyze import Category, Confidence, Steps
from cudatool.trace.events import Kind
from cudatool.trace.model import Frame, Trace

Frames = list[tuple[str, str, int]]
ADAM = "/x/site-packages/torch/optim/adam.py"
MODULE = "/x/site-packages/torch/nn/modules/module.py"


def rules_of(made: Trace) -> list[analyze.CategoryRule]:
    """Return the rule that decided for each block."""
    blocks, segments = analyze.blocks(made), analyze.segments(made)
    curve, steps = analyze.timeline(made, blocks, segments), analyze.find_steps(made, blocks, 0)
    found = analyze.categorize(made, blocks, curve, steps, 0, int(curve.index[curve.peak()]))
    return [analyze.RULES[i] for i in found.rule.tolist()]


def categories_of(made: Trace) -> list[Category]:
    return [rule.category for rule in rules_of(made)]


@pytest.mark.parametrize(
    ("stack", "category"),
    [
        ([(ADAM, "_init_group", 178), (ADAM, "step", 238), ("t.py", "main", 1)], Category.OPTIMIZER_STATE),
        ([(MODULE, "_apply", 965), (MODULE, "cuda", 1097), ("t.py", "main", 1)], Category.PARAMETERS),
        ([(MODULE, "_call_impl", 1790), ("t.py", "main", 1)], Category.ACTIVATIONS),
        ([("m.py", "forward", 5), ("t.py", "main", 1)], Category.ACTIVATIONS),
        # A parameter that is made lazily, inside of a forward, is none that the module's set-up made.
        ([(MODULE, "_apply", 965), ("m.py", "forward", 5)], Category.ACTIVATIONS),
        ([("torch/autograd/__init__.py", "backward", 374), ("t.py", "main", 1)], Category.GRADIENTS),
        ([("b.cpp", "at::cuda::blas::getCublasWorkspace()", 0), (MODULE, "_call_impl", 1)], Category.WORKSPACE),
        ([("c.cpp", "at::native::(anonymous namespace)::Workspace::Workspace", 0)], Category.WORKSPACE),
        ([("c.cpp", "at::native::cudnn_batch_norm", 0), ("m.py", "forward", 5)], Category.ACTIVATIONS),
        ([("t.py", "main", 1)], Category.UNKNOWN),
        ([], Category.UNKNOWN),
    ],
)
def test_frames_decide(stack: Frames, category: Category) -> None:
    made = trace(alloc(0, 512, stack=1), free(0), freed(0), **stacks(stack))
    assert [category] == categories_of(made)


def test_what_the_optimizer_keeps_is_state_and_what_it_drops_is_workspace() -> None:
    made = trace(alloc(0, 512, stack=1), alloc(512, 512, stack=1), free(512), freed(512), **stacks([(ADAM, "step", 9)]))
    assert [Category.OPTIMIZER_STATE, Category.WORKSPACE] == categories_of(made)


def test_what_zero_grad_frees_is_a_gradient_by_frame_or_by_range() -> None:
    zero_grad = stacks([("torch/optim/optimizer.py", "zero_grad", 9)], [("t.py", "main", 1)])
    by_frame = trace(
        alloc(0, 512, stack=2), (Kind.BLOCK_FREE_REQUESTED, {**free(0)[1], "stack": 1}), freed(0), **zero_grad
    )
    by_range = trace(alloc(0, 512), (Kind.RANGE_PUSH, {"name": "Optimizer.zero_grad#SGD.zero_grad"}), free(0), freed(0))
    assert [[Category.GRADIENTS]] * 2 == [categories_of(by_frame), categories_of(by_range)]


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("## forward ##", Category.ACTIVATIONS),
        ("backward", Category.GRADIENTS),
        ("Optimizer.step#SGD.step", Category.OPTIMIZER_STATE),
        ("load data", Category.UNKNOWN),
    ],
)
def test_ranges_decide_where_frames_do_not(name: str, category: Category) -> None:
    assert [category] == categories_of(trace((Kind.RANGE_PUSH, {"name": name}), alloc(0, 512)))


def training(*, optimizes: bool = True) -> Trace:
    """Return 5 steps without stacks: a parameter, a workspace, and in each step two activations and a gradient."""
    events = [alloc(0, 100), alloc(512, 8_519_680)]
    for _ in range(5):
        events += [alloc(20 * MIB, 1000), alloc(21 * MIB, 2000), alloc(22 * MIB, 100)]  # the peak
        events += [free(21 * MIB), freed(21 * MIB), alloc(23 * MIB, 50), free(22 * MIB), freed(22 * MIB)]
        events += [free(20 * MIB), freed(20 * MIB)]
        name = "Optimizer.step#SGD.step" if optimizes else "token 7"
        events += [(Kind.RANGE_PUSH, {"name": name}), (Kind.RANGE_POP, {})]
        events += [free(23 * MIB), freed(23 * MIB)]
    return trace(*events)


def test_without_frames_the_order_within_a_step_decides() -> None:
    parameter, workspace, *step = rules_of(training())
    assert (Category.PARAMETERS, Confidence.LOW) == (parameter.category, parameter.confidence)
    assert (Category.WORKSPACE, Confidence.MEDIUM) == (workspace.category, workspace.confidence)
    expected = [Category.ACTIVATIONS, Category.ACTIVATIONS, Category.ACTIVATIONS, Category.GRADIENTS]
    assert expected * 5 == [rule.category for rule in step]
    assert {Confidence.LOW} == {rule.confidence for rule in step}


def test_a_program_that_does_not_train_has_no_gradients() -> None:
    _, workspace, *step = categories_of(training(optimizes=False))
    assert Category.WORKSPACE == workspace
    assert {Category.UNKNOWN} == set(step)


def test_steps_of_low_confidence_decide_nothing() -> None:
    made = training()
    blocks = analyze.blocks(made)
    curve = analyze.timeline(made, blocks, analyze.segments(made))
    sure = analyze.find_steps(made, blocks, 0)
    unsure = Steps(sure.bounds, sure.source, Confidence.LOW)
    found = analyze.categorize(made, blocks, curve, unsure, 0, 4)
    reasons = {analyze.RULES[i].reason for i in found.rule.tolist()}
    assert {"no rule applies", "of the size of cuBLAS's workspace, and stays"} >= reasons


def test_autograd_threads_have_no_python_stack() -> None:
    made = training()
    made.records["stack"][[0, 1, 2, 3, 4]] = 1
    made.stacks, made.frames = [(), (0,)], [Frame("t.py", "main", 1)]
    *_, gradient = rules_of(made)
    assert (Category.GRADIENTS, Confidence.MEDIUM) == (gradient.category, gradient.confidence)


def test_shares_at_the_peak_add_up_to_it_and_say_that_they_are_inferred() -> None:
    report = analyze.report(training())
    (diagnosis,) = report.diagnoses
    assert report.summary.devices[0].peak_active == sum(share.size for share in diagnosis.categories.at_peak)
    plain = diagnosis.categories.as_dict()
    assert plain["inferred"] is True
    assert {"category", "confidence", "reason", "size", "count"} == set(plain["at_peak"][0])


def sizes(name: str) -> dict[Category, int]:
    return report_of(name).diagnoses[0].categories.sizes()


@pytest.mark.parametrize(
    ("name", "states", "tolerance"),
    [
        ("llm__default", 2, 0.01),  # AdamW: two states for each parameter
        ("llm__expandable", 2, 0.01),
        ("prefetch__default", 2, 0.02),  # Adam; 1 MiB of the 97 is an input
        ("gpt_default", 2, 0.01),
        ("resnet_default", 2, 0.04),  # Adam has no state for running means, which count as parameters
        ("convnet__default", 1, 0.01),  # SGD with momentum: one
    ],
)
def test_optimizer_state_is_a_multiple_of_the_parameters(name: str, states: int, tolerance: float) -> None:
    """Two inferences that know nothing of each other agree with what the optimizer's mathematics says."""
    found = sizes(name)
    assert states * found[Category.PARAMETERS] == pytest.approx(found[Category.OPTIMIZER_STATE], rel=tolerance)


@in_turn(RECORDINGS)
def test_every_block_of_a_recording_has_a_rule(name: str) -> None:
    (diagnosis,) = report_of(name).diagnoses
    assert len(report_of(name).blocks) == len(diagnosis.categories.rule)
    assert 0 <= diagnosis.categories.rule.min() <= diagnosis.categories.rule.max() < len(analyze.RULES)


def test_what_was_there_before_the_recording_may_be_parameters_or_state() -> None:
    made = training()
    made.header["prior_records"] = {0: 1}
    rule, *_ = rules_of(made)
    assert Category.UNKNOWN == rule.category
    assert "before the recording began" in rule.reason
