"""The jobs of docs/ci.md and the steps of action.yml, run as shell commands on a repository with tests of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import junitparser
import pytest
import yaml
from warm_process import PLAIN_PYTEST

from cudatool.cli.sanitize import sanitize
from cudatool.sanitize import parse_rules
from cudatool.sanitize.report.outputs import FORMATS
from cudatool.testing.options import DEFAULT_CHECKS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "ci.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
WITH_ACTION, WITH_STEPS, GITLAB = map(yaml.safe_load, BLOCKS)
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
INSTALL, TEST, EVERY_CHECK = [step for step in WITH_STEPS["jobs"]["without-a-gpu"]["steps"] if "run" in step]

_SCALE = '''
import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

SOURCE = """
extern "C" __global__ void scale(float *x, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i CONDITION n) x[i] *= a;
}"""

@pytest.mark.parametrize("n", [1, 100, 1000])
def test_scale(n):
    device = Device()
    device.set_current()
    stream = device.create_stream()
    options = ProgramOptions(arch=f"sm_{device.arch}", lineinfo=True)
    kernel = Program(SOURCE, "c++", options).compile("cubin").get_kernel("scale")
    host = np.arange(n, dtype=np.float32)
    buffer = device.memory_resource.allocate(host.nbytes, stream=stream)
    driver.cuMemcpyHtoDAsync(buffer.handle, host.ctypes.data, host.nbytes, stream.handle)
    launch(stream, LaunchConfig(grid=(n + 255) // 256, block=256), kernel, buffer, np.float32(2), np.int32(n))
    stream.sync()
    back = np.empty_like(host)
    driver.cuMemcpyDtoH(back.ctypes.data, buffer.handle, back.nbytes)
    buffer.close(stream)
    stream.sync()
    assert np.array_equal(back, 2 * host)
'''
_RACY = '''
import numpy as np
import pytest
import cudatool as ct

SOURCE = """
extern "C" __global__ void fill(float *x, float value) { x[threadIdx.x] = value; }
extern "C" __global__ void add(float *y, const float *x) { y[threadIdx.x] += x[threadIdx.x]; }
"""
fill, add = ct.compile(SOURCE, "fill"), ct.compile(SOURCE, "add")

@pytest.fixture
def arrays():
    made = ct.zeros(64, np.float32), ct.zeros(64, np.float32)
    ct.synchronize()
    return made

def test_read_before_write(arrays):
    x, y = arrays
    producer, consumer = ct.Stream(), ct.Stream()
    with ct.stream(producer):
        fill[(1, 64)](x, 1.0)
    with ct.stream(consumer):
        add[(1, 64)](y, x)
    ct.synchronize()

def test_two_writers(arrays):
    x, _ = arrays
    for stream in (ct.Stream(), ct.Stream()):
        with ct.stream(stream):
            fill[(1, 64)](x, 2.0)
    ct.synchronize()
'''


def test_the_same_is_checked_by_default_in_the_job_the_command_and_the_plugin() -> None:
    [of_command] = [option.default for option in sanitize.params if option.name == "checks"]
    assert {of_command} == {DEFAULT_CHECKS, ACTION["inputs"]["checks"]["default"]}


@pytest.fixture
def project(tmp_path) -> Path:
    """A repository with a suite that passes, and has nothing wrong with it."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "tests" / "test_scale.py").write_text(_SCALE.replace("CONDITION", "<"))
    return tmp_path


@pytest.fixture
def racy(project) -> Path:
    """The same with two tests that race, and pass."""
    (project / "tests" / "test_racy.py").write_text(_RACY)
    return project


@pytest.fixture
def shell(tmp_path_factory):
    """Run a step as a CI system does: in the checkout, with its variables, without a GPU."""
    folder = tmp_path_factory.mktemp("ci")
    (folder / "cudatool").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cudatool "$@"\n')
    (folder / "cudatool").chmod(0o755)

    def run(step: str, project: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        mine = ("CUDATOOL", "PYTEST", "GITHUB", "CI_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
        path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment |= {"PATH": path, "NO_COLOR": "1", "PYTEST_ADDOPTS": " ".join(PLAIN_PYTEST), **variables}
        if "CUDATOOL_CACHE_DIR" in os.environ:
            environment["CUDATOOL_CACHE_DIR"] = os.environ["CUDATOOL_CACHE_DIR"]
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step]
        return subprocess.run(
            command, cwd=project, env=environment, capture_output=True, text=True, check=False, timeout=240
        )

    return run


def test_the_jobs_and_the_action_are_what_their_systems_accept(check_schema):
    for workflow in (WITH_ACTION, WITH_STEPS):
        # YAML 1.1 reads `on` as a truth value; GitHub does not.
        check_schema("workflow", {"on" if key is True else key: value for key, value in workflow.items()})
    check_schema("gitlab", GITLAB)
    check_schema("action", ACTION)


def test_the_page_names_every_format_and_every_input_and_output_of_the_action():
    assert list(FORMATS) == re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    inputs, outputs = re.search(r"inputs are (.*?), its outputs (.*?);", PAGE, re.DOTALL).groups()
    assert set(ACTION["inputs"]) | {"sim"} == set(re.findall(r"`([\w-]+)`", inputs))
    assert set(ACTION["outputs"]) == set(re.findall(r"`([\w-]+)`", outputs))


def test_the_rules_of_the_page_are_rules(tmp_path):
    (rules,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "rules.txt").write_text(rules)
    assert 3 == len(parse_rules([f"@{tmp_path / 'rules.txt'}"]))


def test_the_steps_pass_for_tests_without_mistakes(project, shell):
    assert INSTALL["run"].startswith("python -m pip install")
    for step in (TEST, EVERY_CHECK):
        done = shell(step["run"], project)
        assert 0 == done.returncode, done.stdout + done.stderr
        assert "3 passed" in done.stderr
    assert [] == json.loads((project / "findings.json").read_text())["on_device"]
    (suite,) = junitparser.JUnitXml.fromfile(str(project / "cudatool.xml"))
    assert [True, True, True] == [case.is_passed for case in suite]


def test_the_steps_fail_for_a_kernel_that_writes_one_element_too_many(project, shell):
    (project / "tests" / "test_scale.py").write_text(_SCALE.replace("CONDITION", "<="))
    done = shell(TEST["run"], project)
    assert 1 == done.returncode
    assert "3 passed" in done.stderr  # the tests themselves see nothing
    assert "0 bytes after the end of 4 B" in done.stdout
    assert "tests/test_scale.py" in done.stdout


def test_two_racy_tests_fail_the_job_and_are_in_every_report(racy, shell, check_schema):
    summary = racy.parent / f"{racy.name}-summary.md"
    done = shell(TEST["run"], racy, GITHUB_WORKSPACE=str(racy), GITHUB_STEP_SUMMARY=str(summary))
    assert 1 == done.returncode, done.stderr
    assert "5 passed" in done.stderr  # on this schedule all is well
    assert "cudatool sanitize: 2 findings" in done.stdout.splitlines()

    lines = {match[1] for match in re.finditer(r"^::error file=tests/test_racy.py,line=(\d+),", done.stdout, re.M)}
    source = (racy / "tests" / "test_racy.py").read_text().splitlines()
    assert {"add[(1, 64)](y, x)", "fill[(1, 64)](x, 2.0)"} == {source[int(line) - 1].strip() for line in lines}
    assert summary.read_text().startswith("### cudatool sanitize: 2 findings\n")

    log = json.loads((racy / "cudatool.sarif").read_text())
    check_schema("sarif", log)
    (run,) = log["runs"]
    assert {"race-raw", "race-waw"} == {result["ruleId"] for result in run["results"]}
    for result in run["results"]:
        (location,) = result["locations"]
        artifact = location["physicalLocation"]["artifactLocation"]
        assert {"uri": "tests/test_racy.py", "uriBaseId": "%SRCROOT%"} == artifact
        assert 2 == len(result["relatedLocations"])  # the other access, and the allocation

    (suite,) = junitparser.JUnitXml.fromfile(str(racy / "cudatool.xml"))
    assert (4, 2, 0) == (suite.tests, suite.failures, suite.errors)


def test_the_gitlab_job_names_the_same_lines_for_its_reports(racy, shell):
    *_, step = GITLAB["cuda"]["script"]
    done = shell(step, racy, CI_PROJECT_DIR=str(racy))
    assert 1 == done.returncode, done.stderr
    reports = GITLAB["cuda"]["artifacts"]["reports"]
    (suite,) = junitparser.JUnitXml.fromfile(str(racy / reports["junit"]))
    assert 2 == suite.failures
    quality = json.loads((racy / reports["codequality"]).read_text())
    failures = "\n".join(result.text for case in suite for result in case.result)
    lines = {f"{one['location']['path']}:{one['location']['lines']['begin']} " for one in quality}
    assert 2 == len(lines)
    assert all(line in failures for line in lines)


def test_the_baseline_of_the_page_lets_the_job_pass_until_something_new_is_found(racy, shell):
    update, check = re.findall(r"^\$ (cudatool .*)$", PAGE, re.MULTILINE)
    options = " --device sim --baseline"
    done = shell(update.replace(" --baseline", options), racy)
    assert 0 == done.returncode, done.stderr
    assert 0 == shell(check.replace(" --baseline", options), racy).returncode
    (racy / "tests" / "test_new.py").write_text(_RACY)
    done = shell(check.replace(" --baseline", options), racy)
    assert 1 == done.returncode
    assert "cudatool sanitize: 2 findings, 2 known" in done.stdout.splitlines()


class TestAction:
    """The action's second step, with its expressions filled in as the runner does."""

    def run(self, shell, project: Path, **given: str) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
        inputs = {name: facts["default"] for name, facts in ACTION["inputs"].items()} | given
        github = {"server_url": "https://example.org", "action_repository": "", "action_ref": ""} | {
            name: inputs.pop(name) for name in ("action_repository", "action_ref") if name in inputs
        }

        def filled(text: str) -> str:
            context = {"inputs": inputs, "github": github}
            return re.sub(r"\$\{\{ (\w+)\.([\w-]+) \}\}", lambda match: context[match[1]][match[2]], text)

        install, step = ACTION["runs"]["steps"]
        assert 'python -m pip install "${PACKAGE:-$GITHUB_ACTION_PATH}"' == install["run"]
        assert {"bash"} == {install["shell"], step["shell"]}
        output = project.parent / f"{project.name}-output"
        output.write_text("")
        environment: dict[str, Any] = {name: filled(value) for name, value in step["env"].items()}
        environment |= {"GITHUB_OUTPUT": str(output), "GITHUB_WORKSPACE": str(project)}
        done = shell(step["run"], project / filled(step["working-directory"]), **environment)
        outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
        assert {f"${{{{ steps.sanitize.outputs.{name} }}}}" for name in ACTION["outputs"]} == {
            facts["value"] for facts in ACTION["outputs"].values()
        }
        return done, outputs

    def test_findings_fail_it_and_its_outputs_name_the_files(self, racy, shell, check_schema):
        done, outputs = self.run(shell, racy, program="-m pytest 'tests'", action_repository="o/c", action_ref="v1")
        assert 1 == done.returncode, done.stderr
        assert {"sarif": "cudatool.sarif", "junit": "cudatool.xml", "status": "1"} == outputs
        assert "::error file=tests/test_racy.py,line=" in done.stdout
        log = json.loads((racy / outputs["sarif"]).read_text())
        check_schema("sarif", log)
        rule = log["runs"][0]["tool"]["driver"]["rules"][0]
        assert "https://example.org/o/c/blob/v1/docs/findings.md#race-raw" == rule["helpUri"]

    def test_every_input_reaches_the_command(self, racy, shell):
        (racy / "rules.txt").write_text("function=test_two_writers\n")
        (racy / "known.json").write_text('{"schema": "cudatool.baseline/1", "findings": [{"fingerprint": "gone"}]}')
        done, outputs = self.run(
            shell,
            racy,
            **{
                "program": "-m pytest -k 'two_writers or scale'",
                "checks": "race",
                "device": "sim:schedule=lifo",
                "format": "text json=../all.json",
                "sarif": "out.sarif",
                "junit": "out.xml",
                "suppress": "../rules.txt",
                "baseline": "../known.json",
                "working-directory": "tests",
            },
        )
        assert 0 == done.returncode, done.stderr
        assert "4 passed" in done.stderr
        assert {"sarif": "tests/out.sarif", "junit": "tests/out.xml", "status": "0"} == outputs
        last = "cudatool sanitize: no findings, 1 suppressed, 1 stale in the baseline"
        assert last == done.stdout.splitlines()[-1]
        report = json.loads((racy / "all.json").read_text())
        assert (["race"], True) == (report["checks"], "schedule lifo" in report["device"])

    def test_an_input_is_never_part_of_the_script(self, project, shell):
        given = {"program": '-m pytest "$(touch ran)"; touch ran', "checks": "race; touch ran"}
        done, outputs = self.run(shell, project, **given)
        assert (2, {"status": "2"}) == (done.returncode, outputs)  # and no file that another step would upload
        assert "'race; touch ran'" in done.stderr
        assert not (project / "ran").exists()
