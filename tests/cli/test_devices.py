"""`cudatool devices`, and how a device is chosen."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def test_table_names_the_software_device(run_warm):
    done = run_warm("devices")
    assert done.returncode == 0
    assert "cudatool software device" in done.stdout


def test_json_has_a_row_for_each_device(run_warm):
    done = run_warm("devices", "--json", "--device", "sim:count=2,memory=1GiB")
    listing = json.loads(done.stdout)
    assert listing["schema"] == "cudatool.devices/1"
    assert [row["device"] for row in listing["devices"]] == [0, 1]
    assert {row["total_memory"] for row in listing["devices"]} == {1 << 30}


def test_choice_is_said_once_on_stderr(run_warm):
    done = run_warm("devices")
    assert done.stderr.count("cudatool: using") == 1


def _python(source, **environment):
    return subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_importing_cudatool_chooses_nothing():
    done = _python(
        "import cudatool, sys; from cudatool import _driver\n"
        "assert _driver.chosen() is None\n"
        "assert not {'numpy', 'llvmlite', 'cuda.core', 'cuda.bindings'} & set(sys.modules)",
        CUDATOOL_DEVICE="nonsense",
    )
    assert done.returncode == 0, done.stderr


def test_choice_cannot_change_after_first_use():
    done = _python(
        "from cudatool import _driver, errors\n"
        "_driver.choose('sim'); _driver.initialize()\n"
        "try: _driver.choose('cuda')\n"
        "except errors.DeviceUnavailableError as error: print(error)"
    )
    assert "choose the device earlier" in done.stdout


def test_asking_for_a_gpu_where_there_is_none_says_what_to_do(run_warm):
    from cudatool import _driver

    if _driver.gpu_names():
        pytest.skip("this machine has a GPU")
    done = run_warm("devices", "--device", "cuda")
    assert done.returncode == 2
    assert "--device sim" in done.stderr


def test_hidden_gpus_do_not_count():
    source = "from cudatool import _driver; print(_driver.gpu_names())"
    assert _python(source, CUDA_VISIBLE_DEVICES="").stdout == "[]\n"
    assert _python(source, CUDA_VISIBLE_DEVICES="-1").stdout == "[]\n"


@pytest.mark.parametrize("spec", ["sim:count=0", "sim:count=99", "sim:seed=x", "sim:memory=1B", "cuda:1", "sim:memory"])
def test_specifications_that_are_refused(run_here, spec):
    done = run_here("devices", "--device", spec)
    assert done.returncode == 2
    assert done.stderr.startswith("cudatool: error: ")
    assert done.stderr.count("\n") == 1


PARENT = """
import multiprocessing, os, subprocess, sys

CODE = "import cudatool as ct; print(sys.argv[1], ct.get_device_properties(0).total_memory >> 20, flush=True)"


def child(way):
    import cudatool as ct

    kernel = ct.compile('extern "C" __global__ void one(int *x) { *x = 1; }', "one")
    x = ct.zeros(1, dtype="int32")
    kernel[1, 1](x)
    assert int(x.get()[0]) == 1
    print(way, ct.get_device_properties(0).total_memory >> 20, flush=True)


if __name__ == "__main__":
    code = "import sys; " + CODE
    subprocess.run([sys.executable, "-c", code, "subprocess"], check=True)
    subprocess.run('exec "$PYTHON" -c "$CODE" shell', shell=True, check=True,
                   env={**os.environ, "PYTHON": sys.executable, "CODE": code})
    for way in ("spawn", "forkserver", "fork"):
        process = multiprocessing.get_context(way).Process(target=child, args=(way,))
        process.start()
        process.join()
    nested = [sys.executable, "-m", "cudatool", "run", "-o", "nested.ctrace", "-c", code, "nested"]
    subprocess.run(nested, check=True)
    os.execv(sys.executable, [sys.executable, "-c", code, "exec"])
"""


def test_device_holds_for_child_processes_however_they_start(run_warm, tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    done = run_warm("run", "--device", "sim:memory=3GiB", "parent.py", environment={"CUDATOOL_DEVICE": ""})
    assert done.returncode == 0, done.stderr
    ways = ("subprocess", "shell", "spawn", "forkserver", "fork", "nested", "exec")
    assert done.stdout.splitlines() == [f"{way} 3072" for way in ways]


def test_child_forked_after_the_program_used_cuda_cannot_use_it(run_warm, tmp_path):
    used = PARENT.replace("    code = ", "    import cudatool; cudatool.zeros(1)\n    code = ")
    (tmp_path / "parent.py").write_text(used.replace('("spawn", "forkserver", "fork")', '("fork",)'))
    done = run_warm("run", "--device", "sim:memory=3GiB", "parent.py", environment={"CUDATOOL_DEVICE": ""})
    assert "forked off one that had started a CUDA driver" in done.stderr
    assert "fork 3072" not in done.stdout.splitlines()
