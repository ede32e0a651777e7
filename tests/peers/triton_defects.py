"""Defects planted in Triton kernels of public projects: does `cudatool sanitize` name the line, and only that?

    python tests/peers/triton_defects.py CHECKOUTS [--only TEXT]

CHECKOUTS is the folder that benchmarks/bench_triton.py takes; Triton and PyTorch's build for processors are needed. Each
defect is one change of one line of a project's kernel: a mask that is dropped, an atomic operation that becomes a store,
a stride or a size that is wrong. The case that runs the kernel is run under `sanitize` as the project wrote it, which
must be clean, and with the defect, where the first finding must have the kind and the line that the table says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks/bench_triton.py"
_MAIN = "import sys; sys.argv[0] = 'cudatool'; from cudatool.cli import main; main()"


@dataclass(frozen=True)
class Defect:
    """A change of a file, and what must be found where.

    Attributes
    ----------
    case
        The case of bench_triton.py that runs the kernel.
    file
        In the checkouts.
    before, after
        Text that stands there once (or the first time), and what takes its place.
    kind
        Of the finding.
    at
        A part of the line that must be named; by default the line that was changed.
    """

    case: str
    file: str
    before: str
    after: str
    kind: str
    at: str = ""


_OPS = "sglang/python/sglang/kernels/ops"
_TUTORIALS = "triton/python/tutorials"
OUT, RACE = "out-of-bounds", "kernel-race"
DEFECTS = {
    "store without mask": Defect(
        "triton/add",
        f"{_TUTORIALS}/01-vector-add.py",
        "tl.store(output_ptr + offsets, output, mask=mask)",
        "tl.store(output_ptr + offsets, output)",
        OUT,
    ),
    "load without mask": Defect(
        "triton/softmax",
        f"{_TUTORIALS}/02-fused-softmax.py",
        "tl.load(input_ptrs, mask=mask, other=-float('inf'))",
        "tl.load(input_ptrs)",
        OUT,
    ),
    "programs that share a sum, each with its lock": Defect(
        "triton/layer_norm",
        f"{_TUTORIALS}/05-layer-norm.py",
        "DW = DW + lock_id * N + cols",
        "DW = DW + cols",
        RACE,
        "tl.store(DW, partial_dw",
    ),
    "atomic sum that became a store": Defect(
        "liger/group_norm",
        "Liger-Kernel/src/liger_kernel/ops/group_norm.py",
        "tl.atomic_add(DW_ptr + channel_idx, dW.to(dtype))",
        "tl.store(DW_ptr + channel_idx, tl.load(DW_ptr + channel_idx) + dW.to(dtype))",
        RACE,
    ),
    "atomic minimum that became a store": Defect(
        "torchao/fp8_transposed_with_atomics",
        "ao/torchao/prototype/moe_training/kernels/float8_rowwise.py",
        "tl.atomic_min(scales_ptr + scales_offs, scales[None, :], mask=scales_mask)",
        "tl.store(scales_ptr + scales_offs, scales[None, :], mask=scales_mask)",
        RACE,
    ),
    "rows that begin too late": Defect(
        "liger/dyt",
        "Liger-Kernel/src/liger_kernel/ops/dyt.py",
        "tl.store(DX + row_id * N + col, dx, mask=mask)",
        "tl.store(DX + (row_id + 1) * N + col, dx, mask=mask)",
        OUT,
    ),
    "mask of one column more": Defect(
        "flash-attention/cross_entropy",
        "flash-attention/flash_attn/ops/triton/cross_entropy.py",
        "tl.store(dlogits_ptr + col_offsets, (dloss * logit_scale) * probs, mask=col_offsets < n_cols)",
        "tl.store(dlogits_ptr + col_offsets, (dloss * logit_scale) * probs, mask=col_offsets <= n_cols)",
        RACE,
    ),
    "gradients one place too far": Defect(
        "attorch/glu",
        "attorch/attorch/glu_kernels.py",
        "output_grad = tl.load(output_grad_pointer + offset, mask=mask)",
        "output_grad = tl.load(output_grad_pointer + offset + 1, mask=mask)",
        OUT,
    ),
    "second half of a pair, too far": Defect(
        "flash-attention/rotary",
        "flash-attention/flash_attn/ops/triton/rotary.py",
        "cos = tl.load(COS, mask=mask_cs, other=1.0).to(tl.float32)",
        "cos = tl.load(COS + ROTARY_DIM_HALF, mask=mask_cs, other=1.0).to(tl.float32)",
        OUT,
    ),
    "programs that share a place": Defect(
        "sglang/row_argmax",
        f"{_OPS}/speculative/row_argmax.py",
        "tl.store(OUTV + row * SPLITS + part, best_v)",
        "tl.store(OUTV + row * SPLITS, best_v)",
        RACE,
    ),
    "values one place too far": Defect(
        "sglang/top_k_renormalized",
        f"{_OPS}/sampling/renorm_triton.py",
        "tl.store(out_ptr + row_offsets, kept, mask=mask)",
        "tl.store(out_ptr + row_offsets + 1, kept, mask=mask)",
        OUT,
    ),
    "block's end without mask": Defect(
        "unsloth/swiglu",
        "unsloth/unsloth/kernels/swiglu.py",
        "tl.store(h + offsets, h_row, mask = mask)",
        "tl.store(h + offsets, h_row)",
        OUT,
    ),
    "rows of matrices without mask": Defect(
        "triton/matmul",
        f"{_TUTORIALS}/03-matrix-multiplication.py",
        "tl.store(c_ptrs, c, mask=c_mask)",
        "tl.store(c_ptrs, c)",
        OUT,
    ),
    "norm of a row that is not there": Defect(
        "fla/l2_norm",
        "flash-linear-attention/fla/modules/l2norm.py",
        "b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)",
        "b_x = tl.load(p_x).to(tl.float32)",
        OUT,
    ),
}


def planted(defect: Defect, checkouts: Path, folder: Path) -> int:
    """Make a folder of links to all checkouts, but for the changed file; return the line that must be named."""
    source = checkouts / defect.file
    text = source.read_text()
    if defect.before not in text:
        raise SystemExit(f"{defect.file} has no {defect.before!r}: another version?")
    changed = text.replace(defect.before, defect.after, 1)
    here, there = checkouts, folder
    for part in Path(defect.file).parts:
        for entry in here.iterdir():
            if entry.name not in (part, "__pycache__"):
                (there / entry.name).symlink_to(entry)
        here, there = here / part, there / part
        if here.is_dir():
            there.mkdir()
    there.write_text(changed)
    first = text[: text.index(defect.before)].count("\n")
    lines = changed.splitlines()
    if not defect.at:
        return first + 1
    return next(number for number, line in enumerate(lines, 1) if number > first and defect.at in line)


def sanitized(case: str, checkouts: Path, checks: str) -> dict[str, object]:
    """Return the report on a case."""
    command = ["sanitize", "--device", "sim", "--checks", checks, "--json", str(BENCHMARK), str(checkouts)]
    ran = subprocess.run(
        [sys.executable, "-c", _MAIN, *command, "--case", case, "--rounds", "0"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    if not ran.stdout.startswith("{"):
        raise SystemExit(f"{case}: {ran.stderr.strip()[-2000:]}")
    report = json.loads(ran.stdout)
    assert isinstance(report, dict)
    return report


def verdict(report: dict[str, object], defect: Defect, line: int) -> str:
    """Return whether a report names the defect, and what else it says."""
    found = [*report["on_device"], *report["findings"]]  # type: ignore[misc]
    if not found:
        return "MISSED"
    named = [(each["kind"], each["source"]["file"], each["source"]["line"]) for each in found if each.get("source")]
    if (defect.kind, Path(defect.file).name, line) in [(kind, Path(file).name, at) for kind, file, at in named]:
        return "found at its line"
    return "ELSEWHERE: " + ", ".join(f"{kind} at {Path(file).name}:{at}" for kind, file, at in named)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    arguments = parser.parse_args()
    checkouts, bad = arguments.checkouts.resolve(), 0
    for name, defect in DEFECTS.items():
        if arguments.only not in defect.case:
            continue
        checks = "memcheck,racecheck"
        clean = sanitized(defect.case, checkouts, checks)["outcome"]
        with tempfile.TemporaryDirectory() as folder:
            line = planted(defect, checkouts, Path(folder))
            says = verdict(sanitized(defect.case, Path(folder), checks), defect, line)
        bad += clean != "clean" or not says.startswith("found")
        print(f"{defect.case:36} {name:42} as written: {clean}; {defect.kind} {says}", flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
