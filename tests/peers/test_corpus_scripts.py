"""The corpus scripts on PTX written here: what they count, and what they call equal."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

if os.environ.get("CUDATOOL_DEVICE", "sim").startswith("cuda"):
    collect_ignore_glob = ["test_*.py"]  # the process drives a GPU

_HERE = Path(__file__).parent
HEADER = ".version 8.3\n.target sm_90\n.address_size 64\n"
ADD = """.visible .entry add(.param .u64 p, .param .u32 n) {
    .reg .b64 %d<4>; .reg .b32 %r<5>; .reg .pred %p;
    ld.param.u64 %d1, [p]; ld.param.u32 %r1, [n];
    mov.u32 %r2, %tid.x; mul.wide.u32 %d2, %r2, 4; add.u64 %d3, %d1, %d2;
    ld.global.u32 %r3, [%d3]; add.u32 %r4, %r3, %r1; st.global.u32 [%d3], %r4;
    ret;
}
"""
UNKNOWN = ".visible .entry unknown() { .reg .b32 %r; frobnicate.u32 %r, %r; ret; }\n"


def script(name):
    spec = importlib.util.spec_from_file_location(name, _HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


corpus, corpus_run = script("corpus"), script("corpus_run")


def test_share_counts_equal_kernels_once_and_names_what_is_missing(tmp_path, capsys):
    (tmp_path / "one.ptx").write_text(HEADER + ADD + UNKNOWN)
    (tmp_path / "two.ptx").write_text(HEADER + ADD)
    (tmp_path / "three.ptx").write_text(HEADER + ".visible .entry a() { ] }\n.visible .entry b() { ret; }")
    assert 0 == corpus.main([str(tmp_path), "--json", str(tmp_path / "out.json"), "--compile-every", "1"])
    found = json.loads((tmp_path / "out.json").read_text())
    assert (3, 4, 0.25) == (found["files"], len(found["kernels"]), found["share"])
    unknown, *unparsed = sorted(found["causes"])
    assert ("frobnicate.u32", True) == (unknown, all(cause.startswith("not parsed: ") for cause in unparsed))
    assert "3 files, 4 different kernels, 1 translate: 25.00%" in capsys.readouterr().out


def test_folder_without_ptx_is_an_error(tmp_path, capsys):
    assert 2 == corpus.main([str(tmp_path)])
    assert "no PTX files" in capsys.readouterr().err


def bundle(folder, **entries):
    (folder / "inputs").mkdir(parents=True)
    (folder / "k.ptx").write_text(HEADER + ADD)
    cases = []
    for name, kernel in entries.items():
        values = np.arange(32, dtype=np.uint32)
        np.savez(folder / "inputs" / f"{name}.npz", a=values, n=np.uint32(7))
        case = {"name": name, "program": "p", "ptx": "k.ptx", "kernel": kernel, "grid": [1], "block": [32]}
        cases.append({**case, "arguments": ["a", "n"]})
    (folder / "manifest.json").write_text(json.dumps({"cases": cases}))
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of a bundle whose second case names a kernel that is not there, and what the run printed."""
    folder = bundle(tmp_path_factory.mktemp("bundle") / "b", first="add", second="absent", third="add")
    out = folder.parent / "out.npz"
    command = [sys.executable, _HERE / "corpus_run.py", "--run", folder, out]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDATOOL_DEVICE": "sim"})
    return folder, out, done


def test_run_keeps_what_the_kernel_wrote_and_goes_on_after_a_failure(results):
    _, out, done = results
    assert 1 == done.returncode, done.stderr
    with np.load(out) as file:
        for name in ("first", "third"):
            assert (np.arange(7, 39) == file[f"{name}/a"]).all()
        assert ["second"] == list(json.loads(str(file["errors"])))


def test_results_agree_with_themselves_but_a_failed_case_never_does(results, capsys):
    folder, out, _ = results
    assert 1 == corpus_run.main(["--compare", str(out), str(out), "--bundle", str(folder)])
    assert "3 cases of 1 programs: 2 agree, 2 of them bit for bit" in capsys.readouterr().out


def test_bundle_that_is_none_is_an_error(tmp_path, capsys):
    assert 2 == corpus_run.main(["--run", str(tmp_path), str(tmp_path / "out.npz")])
    assert "corpus_run:" in capsys.readouterr().err


def case(**tolerances):
    return corpus_run.Case("c", "", "", "", [], [], [], **tolerances)


ONE = np.array([1.0, np.nan, np.inf], np.float32)


@pytest.mark.parametrize(
    ("tolerances", "other", "agrees"),
    [
        ({}, ONE, True),
        ({}, ONE * np.float32(1 + 1e-6), False),
        ({"rtol": 1e-5}, ONE * np.float32(1 + 1e-6), True),
        ({"rtol": 1e-7}, ONE * np.float32(1 + 1e-6), False),
        ({"atol": 1e-5}, ONE + np.float32(1e-6), True),
        ({"rtol": 1.0}, np.array([1.0, 2.0, np.inf], np.float32), False),
        ({"rtol": 1.0}, np.array([1.0, np.nan, 5.0], np.float32), False),
        ({"rtol": 1.0}, np.array([1.0, np.nan, -np.inf], np.float32), False),
        ({"rtol": 1.0}, ONE.astype(np.float64), False),
        ({}, ONE[::-1].copy(), False),
    ],
)
def test_agreement(tolerances, other, agrees):
    assert agrees == corpus_run.agreement(case(**tolerances), ONE, other)[0]


def test_agreement_in_any_order():
    a = np.array([3, 1, 2], np.int32)
    assert (True, 0.0) == corpus_run.agreement(case(order="any"), a, a[::-1].copy())
    assert not corpus_run.agreement(case(order="any"), a, a + 1)[0]


def test_difference_of_unsigned_integers_does_not_wrap():
    a, b = np.array([0], np.uint8), np.array([255], np.uint8)
    assert not corpus_run.agreement(case(atol=1.0), a, b)[0]
    assert corpus_run.agreement(case(atol=1.0), a, a + np.uint8(1))[0]
