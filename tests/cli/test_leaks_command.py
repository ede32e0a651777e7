from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "samples"
RECORDING = ROOT / "tests" / "data" / "streams_default.pickle.xz"
SOUND = ("fragmentation", "mlp", "pipeline_fixed", "pipeline_racy", "vector_add")


def test_the_sample_that_leaks_is_found_with_its_line(run_command, tmp_path: Path) -> None:
    run_command("run", "-o", "leak.ctrace", SAMPLES / "leak.py")
    done = run_command("leaks", "leak.ctrace")
    assert 1 == done.returncode
    line = next(number for number, text in enumerate(SAMPLES.joinpath("leak.py").read_text().splitlines(), 1)
                if "ct.zeros" in text)  # fmt: skip
    assert f"leak.py:{line} (<module>)" in done.stdout
    assert "+1 MiB" in done.stdout
    assert "49 of 49" in done.stdout
    assert [] == [text for text in done.stdout.splitlines() if len(text) > 80]


@pytest.mark.parametrize("sample", SOUND)
def test_the_other_samples_do_not_leak(run_command, sample: str) -> None:
    run_command("run", "-o", "sound.ctrace", SAMPLES / f"{sample}.py")
    done = run_command("leaks", "sound.ctrace")
    assert (0, "") == (done.returncode, done.stderr)
    assert "no call sites grow" in done.stdout


def test_json_tells_steps_and_leaks_in_bytes(run_command) -> None:
    run_command("run", "-o", "leak.ctrace", SAMPLES / "leak.py")
    done = run_command("leaks", "leak.ctrace", "--json")
    assert 1 == done.returncode
    document = json.loads(done.stdout)
    assert "cudatool.leaks/1" == document["schema"]
    (device,) = document["devices"]
    (leak,) = device["leaks"]
    assert (1 << 20, 49 << 20, 49, 49) == (leak["per_step"], leak["growth"], leak["grew"], leak["steps"])
    assert {"count", "source", "confidence"} == device["steps"].keys()


def test_the_newest_trace_is_the_default(run_command) -> None:
    run_command("run", "-o", "leak.ctrace", SAMPLES / "leak.py")
    assert 1 == run_command("leaks").returncode


def test_a_snapshot_without_steps_says_how_to_name_them(run_command) -> None:
    done = run_command("leaks", ROOT / "tests" / "data" / "graphs__default.pickle.xz")
    assert 0 == done.returncode
    assert "name the steps of your program with a range" in " ".join(done.stdout.split())


@pytest.mark.parametrize("arguments", [["missing.ctrace"], [], ["text"]])
def test_what_cannot_be_read_is_one_line_and_status_2(run_command, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "text").write_text("text")
    done = run_command("leaks", *arguments)
    assert (2, "", 1) == (done.returncode, done.stdout, len(done.stderr.splitlines()))
