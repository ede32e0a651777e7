"""What each module of PyTorch holds at the peak, and what has no module."""

from __future__ import annotations

from records import BASE, alloc, free, freed, stacks, trace
from rich.console import Console

from cudatool import analyze
from cudatool.analyze import Category, WithoutModule
from cudatool.cli._snapshot_text import print_modules
from cudatool.text import short_paths
from cudatool.trace.events import OF_BACKWARD, OF_MODULE, Kind, TensorRole

LINES = stacks([("m.py", "forward", 5)], [("t.py", "main", 1)])


def of_module(address, size, path, flags=0):
    kind, fields = alloc(address, size, stack=1)
    return kind, {**fields, "name": path, "flags": OF_MODULE | flags}


def held_by(address, path, role):
    return Kind.MODULE_TENSOR, {"address": BASE + address, "size": 512, "name": path, "flags": role}


def modules_of(made):
    (diagnosis,) = analyze.report(made).diagnoses
    return diagnosis.modules


def test_a_module_holds_its_parameters_their_state_gradients_and_activations():
    made = trace(
        alloc(0, 512, stack=2),
        held_by(0, "Net.layers.0.weight", TensorRole.PARAMETER),
        of_module(1024, 1024, "Net.layers.0"),
        of_module(4096, 2048, "Net.layers.1"),
        of_module(8192, 4096, "Net.layers.0", OF_BACKWARD),
        alloc(16384, 8192, stack=2),
        held_by(16384, "Net.layers.0.weight", TensorRole.OPTIMIZER_STATE),
        **LINES,
    )
    found = modules_of(made)
    first, second = found.held
    assert (first.path, first.parameters, first.activations, first.gradients, first.optimizer_state) == (
        *("layers.0", 512, 1024, 4096, 8192),
    )
    assert (second.path, second.activations, second.size, second.count) == ("layers.1", 2048, 2048, 1)
    assert found.size == found.with_module == found.named == 512 + 1024 + 2048 + 4096 + 8192
    assert not found.without


def test_equal_layers_are_shown_as_one():
    made = trace(
        *(of_module(1024 * i, 512, f"Net.layers.{i}.fc") for i in range(3)), of_module(8192, 512, "Net.head"), **LINES
    )
    merged = analyze.merged_layers(modules_of(made).held)
    assert [(row.path, row.modules, row.activations) for row in merged] == [("layers.*.fc", 3, 1536), ("head", 1, 512)]


def test_paths_begin_with_the_class_where_several_models_have_modules_inside():
    made = trace(of_module(0, 512, "Net.fc"), of_module(1024, 512, "Critic.fc"), of_module(2048, 512, "Loss"), **LINES)
    assert [row.path for row in modules_of(made).held] == ["Critic.fc", "Loss", "Net.fc"]


def test_what_has_no_module_is_counted_with_the_reason():
    made = trace(
        of_module(0, 512, "Net.fc"),
        alloc(1024, 1024, stack=2),
        alloc(2048, 2048),
        (Kind.MEM_ALLOC, {"address": 1 << 30, "size": 4096}),
        (Kind.MEM_ALLOC, {"address": 1 << 31, "size": 8192, "stack": 3}),
        **stacks(
            [("m.py", "forward", 5)],
            [("t.py", "main", 1)],
            [("/x/libcublas.so.13", "libcublas.so.13", 0), ("m.py", "forward", 5)],
        ),
    )
    found = modules_of(made)
    assert [(own.reason, own.size, own.count) for own in found.without] == [
        (WithoutModule.LIBRARY, 8192, 1),
        (WithoutModule.NOT_PYTORCH, 4096, 1),
        (WithoutModule.NO_STACK, 2048, 1),
        (WithoutModule.OUTSIDE, 1024, 1),
    ]
    assert (found.with_module, found.named) == (512, 512 + 8192)
    assert found.sentences() == (
        "Of 15.5 KiB, 3.2 % have a module; 54.8 % have a purpose and a module, or are a library's.",
        "Without a module: 8 KiB in 1 block, workspace that libraries such as cuBLAS took from the driver.",
        "Without a module: 4 KiB in 1 block, not allocated by PyTorch.",
        "Without a module: 2 KiB in 1 block, allocated by a thread that ran no Python code.",
        "Without a module: 1 KiB in 1 block, allocated outside of all calls of modules.",
    )


def test_a_recording_without_modules_says_nothing_of_them():
    assert modules_of(trace(alloc(0, 512, stack=2), **LINES)) is None


def test_a_tensor_is_that_of_the_block_which_lies_there_when_it_is_told():
    made = trace(
        *(alloc(0, 512, stack=2), free(0), freed(0)),
        alloc(0, 512, stack=2),
        held_by(0, "Net.weight", TensorRole.PARAMETER),
        *(free(0), freed(0)),
        alloc(0, 512, stack=2),
        **LINES,
    )
    known = analyze.block_modules(made, analyze.blocks(made))
    assert [known.paths[path] for path in known.path] == ["", "Net", ""]
    assert known.role.tolist() == [0, TensorRole.PARAMETER, 0]


def test_a_block_with_parameters_of_several_modules_is_that_of_the_module_around_them():
    made = trace(
        alloc(0, 512, stack=2),
        held_by(0, "Net.layers.0.fc1.weight", TensorRole.OPTIMIZER_STATE),
        held_by(0, "Net.layers.0.fc2.weight", TensorRole.OPTIMIZER_STATE),
        **LINES,
    )
    (row,) = modules_of(made).held
    assert (row.path, row.optimizer_state) == ("layers.0", 512)


def test_memory_of_a_backward_pass_is_a_gradient_though_it_has_the_forward_line():
    made = trace(of_module(0, 512, "Net.fc", OF_BACKWARD), of_module(512, 512, "Net.fc"), **LINES)
    (diagnosis,) = analyze.report(made).diagnoses
    rules = [analyze.RULES[rule].category for rule in diagnosis.categories.rule.tolist()]
    assert rules == [Category.GRADIENTS, Category.ACTIVATIONS]


def test_a_part_of_a_recording_keeps_the_tensors_of_what_lives_at_its_beginning():
    made = trace(
        alloc(0, 512, stack=2),
        held_by(0, "Net.fc.weight", TensorRole.PARAMETER),
        *(alloc(1024, 512, stack=2), held_by(1024, "Net.fc.bias", TensorRole.PARAMETER), free(1024), freed(1024)),
        of_module(2048, 512, "Net.fc"),
        of_module(4096, 512, "Net.head"),
        **LINES,
    )
    part = analyze.window(made, 6, len(made.records))
    assert [(row.path, row.parameters, row.activations) for row in modules_of(part).held] == [
        ("fc", 512, 512),
        ("head", 0, 512),
    ]
    assert part.of_kind(Kind.MODULE_TENSOR)["address"].tolist() == [BASE]


def test_when_memory_runs_out_modules_are_named_too():
    made = trace(of_module(0, 512, "Net.fc"), (Kind.OOM, {"size": 1 << 30, "aux0": 0}), **LINES)
    failure = analyze.failure(made)
    assert failure is not None and failure.modules is not None
    assert [row.path for row in failure.modules.held] == ["fc"]


def test_a_long_path_is_one_line_of_the_table_and_whole_in_json(capsys):
    deep = [f"Net.model.decoder.layers.{i}.encoder_decoder_attention.projection" for i in range(12)]
    made = trace(
        *(of_module(1 << 20 | i << 12, 4096, path) for i, path in enumerate(deep)),
        of_module(8192, 512, "Net.head"),
        **LINES,
    )
    found = modules_of(made)
    print_modules(Console(width=80), "By module", found)
    rows = capsys.readouterr().out.splitlines()[3:5]
    assert [["model...n.projection", "(12)", "48", "KiB", "48", "KiB"], ["head", "512", "B", "512", "B"]] == [
        row.split() for row in rows
    ]
    assert all(len(row) <= 80 for row in rows)
    assert {*(path.removeprefix("Net.") for path in deep), "head"} == {row["path"] for row in found.as_dict()["held"]}


def test_paths_that_would_look_the_same_are_whole():
    same = ["encoder.layers.first.attention.out", "encoder.layers.other.attention.out"]
    assert [*same, "encod...layers.norm"] == short_paths([*same, "encoder.some.layers.norm"], 19)
