"""Write docs/torch-tests.md: which of PyTorch's tests of torch.cuda are asked of our runtime, and how they end.

    python tests/peers/torch_cuda.py [--sim REPORT.xml ...] [--gpu REPORT.xml ...]

The names of PyTorch's tests, by topic, are in tests/data/torch_test_cuda.txt. A test of ours that asks the same says so
in its docstring::

    Source: test_cuda.py::test_streams, test_events

What no test of ours asks stands in :data:`ABSENT`, with the reason. A REPORT is what ``pytest --junit-xml`` wrote on
that device; without one, results stay as they are in the page. For the software device::

    CUDATOOL_DEVICE=sim:count=2 python -m pytest --junit-xml sim.xml $(grep -rl Source: tests --include "test_*.py")
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple
from xml.etree import ElementTree

ROOT: Final = Path(__file__).parents[2]
NAMES: Final = ROOT / "tests" / "data" / "torch_test_cuda.txt"
PAGE: Final = ROOT / "docs" / "torch-tests.md"

REASONS: Final = {
    # cause -> why such a test makes no sense on our arrays
    "autograd": "autograd: our arrays have no gradients",
    "modules": "`torch.nn`: there are no modules or checkpoints of them",
    "compiler": "`torch.compile`, TorchScript, FX and custom operators: there is no compiler of programs",
    "cpp": "frames of C++: the runtime is Python, so that its stacks are",
    "libraries": "a library that the runtime does not call: cuDNN, cuSPARSE, torchvision",
    "operation": "an operation that the runtime does not have",
    "storage": "`torch.save`, `torch.load` and storages: `get()` and `numpy.save` keep arrays",
    "sparse": "sparse tensors",
    "amd": "AMD's devices",
    "large": "takes gigabytes for one result",
    "green": "green contexts are cuda.core's, which programs use beside the runtime",
    "trace": "a trace always has every event; what a page shows is chosen when it is read",
    "names": "deprecated names are not offered, so that nothing warns of them",
    "accumulation": "sums of float16 products in float16 alone are not offered",
    "pytree": "`torch.nn.parallel`: containers of tensors are the program's",
    "generic": "`torch.accelerator`: one device kind, one interface",
}

ABSENT: Final[dict[str, str]] = {
    # cause -> tests
    "autograd": """
        test_cuda.py::test_streaming_backwards_sync test_cuda.py::test_streaming_backwards_multiple_streams
        test_cuda.py::test_streaming_backwards_sync_graph_root test_cuda.py::test_streaming_backwards_callback
        test_cuda_multigpu.py::test_streaming_backwards_device_transfer
        test_cuda.py::test_autocast_custom_enabled test_cuda.py::test_autocast_custom_cast_inputs
        test_cuda.py::test_autocast_custom_deprecated_warning""",
    "modules": """
        test_cuda.py::test_autocast_checkpointing test_cuda.py::test_graph_checkpoint_preserve_rng_state""",
    "compiler": """
        test_cuda.py::test_memory_compile_regions test_cuda.py::test_memory_snapshot_script
        test_cuda.py::test_fx_memory_profiler_augmentation test_cuda.py::test_autocast_cat_jit
        test_cuda.py::test_compile_kernel_as_custom_op test_cuda.py::test_compile_kernel_custom_op_validation""",
    "cpp": """
        test_cuda.py::test_direct_traceback test_cuda.py::test_memory_snapshot_with_cpp
        test_cuda.py::test_cpp_memory_snapshot_pickle""",
    "libraries": """
        test_cuda.py::test_cudnn_allow_tf32_get_set test_cuda.py::test_fp32_precision_with_tf32
        test_cuda.py::test_cudnn_multiple_threads_same_device test_cuda.py::test_cusparse_multiple_threads_same_device
        test_cuda.py::test_graph_cudnn_dropout test_cuda.py::test_autocast_rnn
        test_cuda.py::test_rnn_packed_sequence_batch_sizes_must_be_cpu test_cuda.py::test_resnet""",
    "operation": """
        test_cuda.py::test_gather_bool test_cuda.py::test_bincount_ext test_cuda.py::test_fixed_cuda_assert_async
        test_cuda.py::test_batch_norm_gather_stats test_cuda.py::test_cuda_kernel_loop_overflow
        test_cuda.py::test_cuda_kernel_loop_overflow_large test_cuda.py::test_autocast_banned""",
    "storage": """
        test_cuda.py::test_serialization_array_with_storage test_cuda.py::test_serialization_array_with_empty
        test_cuda_multigpu.py::test_load_nonexistent_device test_cuda_multigpu.py::test_multigpu_serialization_remap
        test_cuda_multigpu.py::test_multigpu_serialization_remap_dict
        test_cuda_multigpu.py::test_multigpu_storage_clone""",
    "sparse": """
        test_cuda_multigpu.py::test_broadcast_coalesced test_cuda_multigpu.py::test_reduce_add_coalesced""",
    "amd": """
        test_cuda.py::test_rocm_backward_pass_guard test_cuda.py::test_hip_device_count
        test_cuda.py::test_raw_amdsmi_device_count test_cuda.py::test_raw_amdsmi_device_uuids
        test_cuda.py::test_uuid_visible_devices""",
    "large": """
        test_cuda.py::test_arithmetic_large_tensor test_cuda.py::test_max_large_axis test_cuda.py::test_huge_index""",
    "pytree": """
        test_cuda_multigpu.py::test_scatter_namedtuple test_cuda_multigpu.py::test_gather_namedtuple
        test_cuda_multigpu.py::test_memory_format_scatter_gather""",
    "green": "test_cuda.py::test_greencontext_restores_stream",
    "trace": "test_cuda.py::test_memory_profiler_viz test_cuda.py::test_memory_snapshot_skip_actions",
    "names": "test_cuda.py::test_cuda_autocast_deprecated_warning",
    "accumulation": "test_cuda.py::test_cublas_allow_fp16_accumulation_get_set",
    "generic": "test_cuda.py::test_accelerator_graph_simple",
}

_SOURCE: Final = re.compile(r"^\s*Source:((?:.*,\s*\n)*.*)$", re.MULTILINE)  # goes on after a comma
_FILES: Final = ("test_cuda.py", "test_cuda_multigpu.py")
_TEST: Final = re.compile(r"(?:(test_\w+\.py)::)?(?:Test\w+::)?(test_\w+)")
_OUTCOMES: Final = ("failed", "passed", "skipped")  # of several tests, the first that one of them has
_NOT_RUN, _GPU_ONLY = "not run", "GPU only"


class Asked(NamedTuple):
    """A test of PyTorch's."""

    file: str
    class_name: str
    name: str

    @property
    def key(self) -> str:
        """Return its name as a docstring says it."""
        return f"{self.file}::{self.name}"


Results = Mapping[str, str]
"""Test of ours, or key of one of PyTorch's -> outcome."""


def topics() -> dict[str, list[Asked]]:
    """Return PyTorch's tests by topic."""
    found: dict[str, list[Asked]] = {}
    for paragraph in NAMES.read_text().split("\n\n")[1:]:
        heading, *lines = paragraph.splitlines()
        found[heading.removeprefix("# ")] = [Asked(*line.split("::")) for line in lines]
    return found


def covered() -> dict[str, list[str]]:
    """Return which tests of ours, ``tests/runtime/test_x.py::test_y``, say that they ask what one of PyTorch's asks."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "Source:" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for key in sources(ast.get_docstring(node) or ""):
                    found.setdefault(key, []).append(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def sources(docstring: str) -> list[str]:
    """Return which tests in these two files a docstring names; one without its file is of the file before."""
    found = []
    for names in _SOURCE.findall(docstring):
        file = ""
        for given, name in _TEST.findall(names):
            file = given or file
            if file in _FILES:
                found.append(f"{file}::{name}")
    return found


def absent() -> dict[str, str]:
    """Return the cause for which each test has none of ours."""
    return {key: cause for cause, keys in ABSENT.items() for key in keys.split()}


def outcomes(reports: Iterable[Path]) -> dict[str, str]:
    """Return how each test in pytest's reports ended, parametrized ones as one, under ``module::name``."""
    found: dict[str, set[str]] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            ends = {child.tag for child in case}
            ended = "failed" if ends & {"failure", "error"} else "skipped" if "skipped" in ends else "passed"
            name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '').partition('[')[0]}"
            found.setdefault(name, set()).add(ended)
    return {name: next(outcome for outcome in _OUTCOMES if outcome in ends) for name, ends in found.items()}


def result(tests: Iterable[str], ended: Results) -> str:
    """Return how a test of PyTorch's ended, which is how those of ours did that ask the same."""
    ends = {ended.get(f"{Path(file).stem}::{name}", "") for file, _, name in (test.partition("::") for test in tests)}
    return next((outcome for outcome in _OUTCOMES if outcome in ends), _NOT_RUN)


def is_for_gpus(tests: Iterable[str]) -> bool:
    """Return whether these tests of ours run on GPUs alone."""
    return all(test.startswith("tests/gpu/") for test in tests)


def written() -> tuple[Results, Results]:
    """Return the results that the page has."""
    sim: dict[str, str] = {}
    gpu: dict[str, str] = {}
    if PAGE.exists():
        for line in PAGE.read_text().splitlines():
            row = re.fullmatch(r"\| `(test_cuda\S+)` \|.*\| ([\w ]+) \| ([\w ]+) \|", line)
            if row:
                sim[row[1]], gpu[row[1]] = row[2], row[3]
    return sim, gpu


def page(sim: Results, gpu: Results) -> str:
    """Return docs/torch-tests.md.

    Parameters
    ----------
    sim, gpu
        Outcomes under the keys of PyTorch's tests.
    """
    ours, causes = covered(), absent()
    gpu = {key: gpu.get(key, _NOT_RUN) for key in ours}
    sim = {key: _GPU_ONLY if is_for_gpus(ours[key]) else sim.get(key, _NOT_RUN) for key in ours}
    tests = [test for group in topics().values() for test in group]
    asked = [test for test in tests if test.key in ours]
    counts = [Counter(results[test.key] for test in asked) for results in (sim, gpu)]
    kinds = (*_OUTCOMES, _NOT_RUN, _GPU_ONLY)
    said = [", ".join(f"{count[name]} {name}" for name in kinds if count[name]) for count in counts]
    lines = [
        "# PyTorch's tests of torch.cuda, asked of cudatool",
        "",
        "PyTorch's `test/test_cuda.py` and `test/test_cuda_multigpu.py` are the best description there is of what",
        f"programs expect of a runtime shaped like `torch.cuda`. Of their {len(tests)} tests, {len(asked)} are asked of",
        f"ours, rewritten for our arrays; {len(tests) - len(asked)} make no sense on them, for the reasons given.",
        "",
        f"- two software devices: {said[0]}",
        f"- GPU (one NVIDIA H200): {said[1]}; skipped are those that need a second GPU",
        "",
        "This page is written by `tests/peers/torch_cuda.py`, from the `Source:` lines in the tests' docstrings and from",
        "pytest's reports of both devices. A parametrized test stands once.",
    ]
    for topic, group in topics().items():
        lines += ["", f"## {topic[0].upper()}{topic[1:]}", ""]
        lines += ["| PyTorch's test | ours | software device | GPU |", "| --- | --- | --- | --- |"]
        for test in group:
            if test.key in ours:
                cells = "<br>".join(f"`{name.removeprefix('tests/')}`" for name in ours[test.key])
                ends = f"{sim[test.key]} | {gpu[test.key]}"
            else:
                cells, ends = REASONS[causes[test.key]], " | "
            lines.append(f"| `{test.key}` | {cells} | {ends} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sim", type=Path, nargs="+", metavar="REPORT.xml", default=[])
    parser.add_argument("--gpu", type=Path, nargs="+", metavar="REPORT.xml", default=[])
    arguments = parser.parse_args()
    results = []
    for reports, before in zip((arguments.sim, arguments.gpu), written(), strict=True):
        ended = outcomes(reports)
        results.append({key: result(tests, ended) for key, tests in covered().items()} if reports else before)
    PAGE.write_text(page(*results))


if __name__ == "__main__":
    main()
