"""`pytest --cudatool` as a user runs it: in its own process, on the software device."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from xml.etree import ElementTree

import pytest
from warm_process import PLAIN_PYTEST, WarmProcess, everything

pytest_plugins = "pytester"

Run = Callable[..., pytest.RunResult]

# What the suites below begin with: a race (two streams write), or the same with the missing wait.
PRELUDE = """
import cudatool as ct
import pytest

def write_twice(x, *, ordered=False):
    first, second = ct.Stream(), ct.Stream()
    first.wait_stream(ct.current_stream())
    second.wait_stream(ct.current_stream())
    with first:
        x.fill_(1)
    if ordered:
        second.wait_stream(first)
    with second:
        x.fill_(2)
    ct.current_stream().wait_stream(second)
"""


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmProcess]:
    """The server that pytest is forked off, with all that suites import."""
    server = WarmProcess(["pytest", *everything()])
    yield server
    server.close()


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, warm: WarmProcess) -> Run:
    """Run a suite with these arguments."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.delenv("CUDATOOL_DEVICE", raising=False)
    monkeypatch.setenv("COLUMNS", "120")

    def run(suite: str, *arguments: str, device: str = "sim") -> pytest.RunResult:
        pytester.makepyfile(PRELUDE + dedent(suite))
        words = [*PLAIN_PYTEST, "-p", "no:cacheprovider", f"--cudatool-device={device}", *arguments]
        words = [f"--basetemp={pytester.path / 'tmp'}", *words]
        done = warm.run("import pytest, sys; sys.exit(pytest.console_main())", words, pytester.path, os.environ, 240)
        return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0)

    return run


def findings(path: Path) -> set[tuple[str, str]]:
    """Return test and kind of everything in a report."""
    report = json.loads(path.read_text())
    assert "cudatool.sanitize/1" == report["schema"]
    kinds = {one["fingerprint"]: one["kind"] for one in report["findings"] + report["on_device"]}
    tests = [note.split(" is of ") for note in report["notes"] if " is of " in note]
    return {(test.partition("::")[2], kinds[fingerprint]) for fingerprint, names in tests for test in names.split(", ")}


ITSELF = """
import asyncio
import unittest

def test_racy(): write_twice(ct.zeros(16))
def test_ordered(): write_twice(ct.zeros(16), ordered=True)
def test_without_cuda(): pass
def test_fails_by_itself():
    write_twice(ct.zeros(16))
    assert 1 == 2
def test_skipped():
    write_twice(ct.zeros(16))
    pytest.skip()
@pytest.mark.xfail(strict=True)
def test_known(): write_twice(ct.zeros(16))
@pytest.mark.parametrize("ordered", [True, False])
def test_many(ordered): write_twice(ct.zeros(16), ordered=ordered)
def test_async():
    async def main(): write_twice(ct.zeros(16))
    asyncio.run(main())
class TestOldStyle(unittest.TestCase):
    def test_racy(self): write_twice(ct.zeros(16))
@pytest.mark.cuda_sanitize(checks=())
def test_left_out(): write_twice(ct.zeros(16))
@pytest.mark.cuda_sanitize(checks="memcheck,synccheck")
def test_not_for_races(): write_twice(ct.zeros(16))
kept = []
@pytest.mark.cuda_sanitize(checks="leak")
def test_leaks(): kept.append(ct.zeros(16))
"""
RACY = {"test_racy", "test_fails_by_itself", "test_known", "test_many[False]", "test_async", "TestOldStyle::test_racy"}


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_each_test_answers_for_itself(run: Run, pytester: pytest.Pytester, processes: tuple[str, ...]) -> None:
    result = run(ITSELF, "--cudatool", "--cudatool-report=report.json", "--junitxml=junit.xml", *processes)
    result.assert_outcomes(failed=6, passed=5, skipped=1, xfailed=1)
    expected = {*((name, "race-waw") for name in RACY), ("test_leaks", "leak")}
    assert expected == findings(pytester.path / "report.json")
    result.stdout.fnmatch_lines_random(
        [
            "FAILED *::test_racy - CudaCheckFailed: race-waw",
            "FAILED *::test_fails_by_itself - assert 1 == 2",
            "1. race: two writes in no order [[]race-waw]",
            "   why: *Nothing makes stream * wait for stream *",
            "     6 race-waw in 6 tests",
            "     1 leak in 1 test",
            "11 tests checked, * operations on the device",
            "Wrote */report.json",
        ]
    )
    result.stdout.no_fnmatch_line("*traceback entries are hidden*")
    by_itself = re.search(r"_ test_fails_by_itself _.*?(?=\n_{3,} )", result.stdout.str() + "\n___ ", re.DOTALL)
    assert by_itself is not None and "- cudatool -" in by_itself[0] and "[race-waw]" in by_itself[0]
    junit = ElementTree.parse(pytester.path / "junit.xml")
    failed = {case.get("name"): case.find("failure") for case in junit.iter("testcase")}
    assert "write by cuMemsetD32Async" in failed["test_racy"].text


def test_fixtures_of_a_wider_scope(run: Run, pytester: pytest.Pytester) -> None:
    result = run(
        """
        early = ct.zeros(64)  # when the module is imported
        stream = ct.Stream()

        @pytest.fixture(scope="module")
        def shared():
            with stream:
                x = ct.full(64, 1)      # and nothing waits for it
            yield x
            with ct.Stream():
                x.fill_(2)

        # In this order:
        class TestOrder:
            def test_1_does_not_touch_it(self, shared): ct.zeros(16).get()
            def test_2_touches_it(self, shared): shared.get()
            def test_3_waits(self, shared):
                stream.synchronize()
                shared.get()
            def test_4_after_that(self, shared): shared.get()
            def test_5_leaves_work_behind(self, shared):
                with ct.Stream(): shared.fill_(1)
            def test_6_is_not_to_blame(self, shared): shared.get()
            def test_7_names_an_early_allocation(self, shared): write_twice(early)
        """,
        "--cudatool",
        "--cudatool-report=report.json",
    )
    result.assert_outcomes(failed=2, passed=5)
    assert {
        ("TestOrder::test_2_touches_it", "race-raw"),
        ("TestOrder::test_7_names_an_early_allocation", "race-waw"),
    } == findings(pytester.path / "report.json")
    report = json.loads((pytester.path / "report.json").read_text())
    early, touched = sorted(report["findings"], key=lambda one: one["kind"], reverse=True)
    assert "shared" == touched["first"]["stack"][0]["function"]
    assert ["shared", "<module>"] == [one["buffer"]["stack"][0]["function"] for one in (touched, early)]


def test_work_of_an_import_is_reported_by_the_next_test_that_is_checked(run: Run, pytester: pytest.Pytester) -> None:
    suite = """
        kept = ct.zeros(16)
        write_twice(kept)
        ct.synchronize()

        def test_1_skipped(): pytest.skip()

        @pytest.mark.cuda_sanitize(checks=())
        def test_2_left_out(): pass
        def test_3_is_next(): pass
        def test_4_after_that(cuda_trace):
            kept.get()
            assert cuda_trace.peak_memory == 0
    """
    run(suite, "--cudatool", "--cudatool-report=report.json").assert_outcomes(passed=2, skipped=1, failed=1)
    assert {("test_3_is_next", "race-waw")} == findings(pytester.path / "report.json")


def test_what_was_not_checked_of_an_import_is_named(run: Run, pytester: pytest.Pytester) -> None:
    suite = """
        import subprocess
        subprocess.run(["true"], check=True)

        def test_1(): ct.ones(16)
        def test_2(): ct.ones(16)
    """
    result = run(suite, "--cudatool", "--cudatool-report=report.json")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["no findings in what was checked", "not checked: 1 process that the program started (true)*"]
    )
    report = json.loads((pytester.path / "report.json").read_text())
    assert ["child-processes"] == [gap["kind"] for gap in report["gaps"]]


def test_graphs_and_events_from_before_the_test(run: Run, pytester: pytest.Pytester) -> None:
    result = run(
        """
        from cuda.bindings import driver

        def ok(result):
            assert not result[0]
            return result[1] if len(result) > 1 else None

        @pytest.fixture(scope="module")
        def graph():
            x, stream = ct.zeros(64), ct.Stream()
            ct.synchronize()
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            ok(driver.cuStreamBeginCapture(stream.cuda_stream, mode))
            ok(driver.cuMemsetD32Async(x.data_ptr(), 1, 64, stream.cuda_stream))
            yield x, ok(driver.cuGraphInstantiate(ok(driver.cuStreamEndCapture(stream.cuda_stream)), 0))

        @pytest.mark.parametrize("waits", [True, False])
        def test_launches(graph, waits):
            x, executable = graph
            first, second = ct.Stream(), ct.Stream()
            ct.synchronize()
            ok(driver.cuGraphLaunch(executable, first.cuda_stream))
            if waits:
                second.wait_stream(first)
            with second: x.fill_(3)
            ct.synchronize()

        events = []

        class TestOrder:
            def test_1_records(self):
                events.append(ct.Event())
                events[0].record()
            def test_2_waits(self): ct.Stream().wait_event(events[0])
        """,
        "--cudatool",
        "--cudatool-report=report.json",
    )
    result.assert_outcomes(passed=3, failed=1)
    assert {("test_launches[False]", "race-waw")} == findings(pytester.path / "report.json")
    (finding,) = json.loads((pytester.path / "report.json").read_text())["findings"]
    assert "graph" == finding["first"]["stack"][0]["function"]  # where it was captured


def test_possible_race_between_threads_is_not_checked_in_its_test_alone(run: Run, pytester: pytest.Pytester) -> None:
    suite = """
    import _thread, time

    @pytest.fixture(scope="module")
    def shared(): return ct.zeros(16)

    def test_hands_over(shared):
        first, second, done = ct.Stream(), ct.Stream(), []
        ct.synchronize()
        with first:
            shared.fill_(1)
        first.synchronize()
        def work():
            with second:
                shared.fill_(2)
            done.append(1)
        _thread.start_new_thread(work, ())
        while not done:  # which the trace does not show
            time.sleep(0.001)

    def test_without_threads(shared):
        ct.synchronize()
        shared.fill_(3)
    """
    for name, races in (("hands_over", 1), ("without_threads", 0), ("", 1)):
        result = run(suite, "--cudatool", "-k", name, "--cudatool-report=report.json")
        result.assert_outcomes(passed=2 if not name else 1, deselected=1 if name else 0)
        gaps = json.loads((pytester.path / "report.json").read_text())["gaps"]
        assert races == sum(gap["count"] for gap in gaps if gap["kind"] == "threads")


def test_tear_down_is_checked_too(run: Run, pytester: pytest.Pytester) -> None:
    result = run(
        """
        @pytest.fixture
        def careless():
            x, stream = ct.zeros(16), ct.Stream()
            stream.wait_stream(ct.current_stream())
            with stream: x.fill_(1)
            yield
            x.fill_(2)

        def test_innocent(careless): pass
        """,
        "--cudatool",
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["ERROR *::test_innocent - CudaCheckFailed: race-waw"])


MEMORY = """
kept = []

@pytest.fixture
def prepared(): return ct.zeros(1 << 18)  # 1 MiB

@pytest.mark.limit_cuda_memory("100 KiB")
def test_within(prepared): ct.zeros(100 << 8)

@pytest.mark.limit_cuda_memory("100 KiB")
def test_beyond(prepared):
    small = ct.zeros(1 << 8)
    large = [ct.zeros(50 << 8) for _ in range(3)]
    del large

@pytest.mark.limit_cuda_memory("100 KiB")
def test_one_after_the_other(prepared):
    for _ in range(3):
        ct.zeros(100 << 8)

@pytest.mark.limit_cuda_leaks("0 B")
def test_keeps():
    kept.append(ct.zeros(1 << 8))

@pytest.mark.limit_cuda_leaks("1 KiB")
def test_keeps_what_it_may():
    kept.append(ct.zeros(1 << 8))

@pytest.mark.limit_cuda_leaks("0 B")
def test_cycle_is_no_leak():
    x = [ct.zeros(1 << 8)]
    x.append(x)

@pytest.mark.limit_cuda_leaks("0 B")
def test_frees_what_others_left():
    kept.clear()

def test_unlimited(): ct.zeros(1 << 20)

@pytest.mark.limit_cuda_memory("many")
def test_wrong_size(): pass
"""


def test_limits_work_without_the_sanitizer(run: Run) -> None:
    """Source: test_cuda_multigpu.py::test_cuda_memory_leak_detection"""
    result = run(MEMORY, "--cudatool-most-allocations=1", "--strict-markers")
    result.assert_outcomes(passed=6, failed=3)
    result.stdout.fnmatch_lines(
        [
            "the test allocated 151 KiB of device memory at its peak; the limit is 100 KiB",
            "     150 KiB in 3 allocations at",
            "*in test_beyond*",
            "       1 KiB in 1 allocation at",
            "the test left 1 KiB of device memory allocated; the limit is 0 B",
            "       1 KiB in 1 allocation at",
            "*test_limits_work_without_the_sanitizer.py:* in test_keeps",
            "*@pytest.mark.limit_cuda_memory: 'many' is not a size*",
            "device memory at the peak of a test:",
            "       4 MiB  *::test_unlimited",
            "=*",
        ]
    )
    result.stdout.no_fnmatch_line("*tests checked*")


@pytest.mark.parametrize("options", [(), ("--cudatool", "--cudatool-checks=leak")])
def test_workspace_of_products_is_no_leak(run: Run, options: tuple[str, ...]) -> None:
    result = run(
        """
        from cudatool.blas._workspace import workspace

        @pytest.mark.limit_cuda_leaks("0 B")
        def test(): workspace(1, ct.current_stream())
        """,
        *options,
    )
    result.assert_outcomes(passed=1)


def test_trace_of_a_test(run: Run) -> None:
    result = run(
        """
        from cudatool.trace import Kind

        @pytest.fixture
        def x(): return ct.zeros(1 << 8)

        def test_looks(x, cuda_trace):
            y = x.clone()
            del x, y
            assert [Kind.MEMSET, Kind.MEMCPY] == [
                record["kind"] for record in cuda_trace.events(Kind.MEMSET, Kind.MEMCPY)
            ]
            assert (2048, 1024) == (cuda_trace.peak_memory, cuda_trace.memory)
            assert () == cuda_trace.findings()
            write_twice(ct.zeros(16))
            (finding,) = cuda_trace.findings()
            assert "race-waw" == finding.kind
            assert 5 == cuda_trace.report().operations
            assert any("test_looks" == frame.function for frame in cuda_trace.trace().frames)

        def test_has_a_trace_of_its_own(cuda_trace):
            assert 0 == len(cuda_trace.events(Kind.MEMSET))

        def test_asks_later(request):
            write_twice(ct.zeros(16))
            assert 1 == len(request.getfixturevalue("cuda_trace").findings())
        """
    )
    result.assert_outcomes(passed=3)


KERNEL = """
SOURCE = 'extern "C" __global__ void set(float *x, int n) { if (threadIdx.x <= n) x[threadIdx.x] = 1; }'
RACY = 'extern "C" __global__ void same(float *x) { x[0] = threadIdx.x; }'
kernel = ct.compile(SOURCE, "set")

def test_one_too_many(): kernel[1, 32](ct.empty(8), 8)
def test_just_enough(): kernel[1, 32](ct.empty(9), 8)
@pytest.mark.cuda_sanitize(checks=["racecheck"])
def test_in_a_kernel(): ct.compile(RACY, "same")[1, 32](ct.empty(1))
def test_in_a_kernel_unseen(): ct.compile(RACY, "same")[1, 32](ct.empty(1))
"""


def test_checks_inside_of_kernels(run: Run, pytester: pytest.Pytester) -> None:
    result = run(KERNEL, "--cudatool", "--cudatool-report=report.json")
    result.assert_outcomes(passed=2, failed=2)
    assert {("test_one_too_many", "out-of-bounds"), ("test_in_a_kernel", "kernel-race")} == findings(
        pytester.path / "report.json"
    )


@pytest.mark.parametrize(
    ("arguments", "status"),
    [((), 1), (("--cudatool-allow-empty",), 0), (("--setup-plan",), 0), (("--collect-only",), 0)],
)
def test_run_whose_tests_are_all_skipped_or_left_out_has_checked_nothing(
    run: Run, pytester: pytest.Pytester, arguments: tuple[str, ...], status: int
) -> None:
    suite = """
        def test_skipped(): pytest.skip("no GPU here")

        @pytest.mark.cuda_sanitize(checks=())
        def test_left_out(): pass
    """
    result = run(suite, "--cudatool", "--cudatool-report=a.json", *arguments)
    assert status == result.ret
    if not arguments:
        result.stdout.fnmatch_lines(["0 tests checked, 0 operations on the device", "nothing was checked"])
        assert "not-checked" == json.loads((pytester.path / "a.json").read_text())["outcome"]


def test_ini_file_turns_it_on(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\ncudatool = true\ncudatool_device = sim:schedule=lifo\ncudatool_checks = memcheck\n")
    result = run("def test_racy(): write_twice(ct.zeros(16))", device="")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["=* cudatool on the software device (*, schedule lifo, *", "1 test checked, *"])


def test_inside_of_a_recording(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        PRELUDE
        + dedent("""
        def test_racy(): write_twice(ct.zeros(16))

        def test_records_itself(tmp_path):
            with ct.record(tmp_path / "t.ctrace"):
                write_twice(ct.zeros(16), ordered=True)
        """)
    )
    command = ["-m", "cudatool", "sanitize", "--device=sim", "--json", "-m", "pytest", "."]
    result = pytester.run(sys.executable, *command, *PLAIN_PYTEST, "--cudatool")
    assert 3 == result.ret
    (finding,) = json.loads(result.stdout.str())["findings"]
    assert ("race-waw", 1) == (finding["kind"], finding["count"])
    result.stderr.fnmatch_lines(["*FAILED *::test_racy - CudaCheckFailed: race-waw", "*1 failed, 1 passed*"])


def test_findings_can_be_accepted(run: Run, pytester: pytest.Pytester) -> None:
    suite = """
        def accepted_here(x):
            a, b = ct.Stream(), ct.Stream()
            with a: x.fill_(1)
            with b: x.fill_(1)  # cudatool: ignore[race]

        def test_by_a_comment():
            x = ct.zeros(16)
            ct.synchronize()
            accepted_here(x)
        def test_by_a_rule(): write_twice(ct.zeros(16))
        def test_by_the_baseline(): write_twice(ct.zeros(16))
        def test_not(): write_twice(ct.zeros(16))
        """
    accepting = ["--cudatool", "--cudatool-suppress=function=test_by_a_rule", "--cudatool-baseline=known.json"]
    result = run(suite, *accepting, "--cudatool-update-baseline", "-k", "not test_not")
    result.assert_outcomes(passed=3, deselected=1)
    first = json.loads((pytester.path / "known.json").read_text())
    assert ["race-waw"] == [entry["kind"] for entry in first["findings"]]
    run(suite, *accepting, "--cudatool-update-baseline", "-k", "not test_not").assert_outcomes(passed=3, deselected=1)
    assert first == json.loads((pytester.path / "known.json").read_text())
    result = run(suite, *accepting, "--cudatool-report=junit=junit.xml", "--cudatool-report=github", "-n", "1")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        [
            "     1 race-waw in 1 test",
            "     3 set aside by comments, rules or the baseline",
            "::error file=test_findings_can_be_accepted.py,line=*race-waw*",
            "FAILED *::test_not - CudaCheckFailed: race-waw",
        ]
    )
    junit = ElementTree.parse(pytester.path / "junit.xml")
    assert (1, 3) == (len(list(junit.iter("failure"))), len(list(junit.iter("skipped"))))


def test_what_a_test_did_whose_process_ended_in_it_is_not_called_clean(run: Run, pytester: pytest.Pytester) -> None:
    suite = """
        import os
        def test_clean(): ct.zeros(16).fill_(1)
        def test_ends():
            write_twice(ct.zeros(16))
            os._exit(3)
        """
    result = run(suite, "--cudatool", "--cudatool-report=report.json", "-n", "1")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["not checked: 1 process * ended early (the one that ran *::test_ends); *"])
    result.stdout.fnmatch_lines(["no findings in what was checked"])
    report = json.loads((pytester.path / "report.json").read_text())
    assert ("partly-checked", ["failed-processes"]) == (report["outcome"], [gap["kind"] for gap in report["gaps"]])


def test_race_that_depends_on_an_accepted_one_fails_its_test(run: Run, pytester: pytest.Pytester) -> None:
    suite = """
        def test_two_arrays():
            x, y = ct.zeros(16), ct.zeros(16)
            ct.synchronize()
            a, b = ct.Stream(), ct.Stream()
            with a:
                y.fill_(1)
                x.fill_(1){}
            with b: x + y
            ct.synchronize()
        """
    result = run(suite.format("  # cudatool: ignore[race]"), "--cudatool")
    result.stdout.fnmatch_lines(["FAILED *::test_two_arrays - CudaCheckFailed: race-raw"])
    baseline = "--cudatool-baseline=known.json"
    run(suite.format(""), "--cudatool", baseline, "--cudatool-update-baseline").assert_outcomes(passed=1)
    assert 2 == len(json.loads((pytester.path / "known.json").read_text())["findings"])
    run(suite.format(""), "--cudatool", baseline).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cudatool-checks=races"], "there is no check 'races'; did you mean 'race'[?]"),
        (["--cudatool-device=gpu"], "'gpu' is not a device; *"),
        (["--cudatool-device=cuda"], "no NVIDIA GPU answers on this machine; *"),
        (["--cudatool-device=cuda", "-n", "2"], "no NVIDIA GPU answers on this machine; *"),
        (["--cudatool-most-allocations=x"], "--cudatool-most-allocations=x: not a number"),
        (["--cudatool-baseline=none.json"], "none.json: there is no such baseline; *"),
        (["--cudatool-update-baseline"], "--cudatool-update-baseline needs --cudatool-baseline=FILE"),
        (["--cudatool-suppress=kind=?"], "*no kind of finding is '[?]'*"),
        (["--cudatool-report=/no/such/folder/f.json"], "*/no/such/folder/f.json*"),
    ],
)
def test_wrong_options_are_one_line(run: Run, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = run("", "--cudatool", *arguments)
    assert pytest.ExitCode.USAGE_ERROR == result.ret
    result.stderr.fnmatch_lines([f"ERROR: {said}"])
    assert "Traceback" not in result.stderr.str() + result.stdout.str()


def test_without_options_nothing_is_loaded(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_modules():
            ours = {name for name in sys.modules if name.startswith("cudatool")}
            modules = {"cudatool.testing." + name for name in ("options", "plugin", "terminal_summary")}
            # What the package itself needs to look its names up later.
            modules |= {"cudatool.runtime", "cudatool.runtime.public_modules"}
            modules |= {"cudatool." + leaf for leaf in ("config", "errors", "text", "units")}
            modules |= {"cudatool.loading", "cudatool.loading.attached", "cudatool.loading.whole_imports"}
            assert {"cudatool", "cudatool.testing"} | modules == ours
            assert not {"numpy", "cuda", "llvmlite"} & {name.partition(".")[0] for name in sys.modules}
        """
    )
    result = pytester.runpytest_subprocess(*PLAIN_PYTEST)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*cudatool on*")


@pytest.mark.parametrize("report", ["test_it.py", "link.json", "rules.txt"])
def test_a_report_replaces_no_test_and_no_rules(pytester: pytest.Pytester, report: str) -> None:
    test = pytester.makepyfile(test_it="def test_passes(): pass")
    (pytester.path / "link.json").symlink_to(test)
    (pytester.path / "rules.txt").write_text("kind=leak\n")
    before = test.read_text()
    result = pytester.runpytest_subprocess(
        *PLAIN_PYTEST, "--cudatool", f"--cudatool-report=json={report}", "--cudatool-suppress=@rules.txt", "test_it.py"
    )
    assert pytest.ExitCode.USAGE_ERROR == result.ret
    result.stderr.fnmatch_lines(["*this command reads that file; name another*"])
    assert before == test.read_text()
    assert "kind=leak\n" == (pytester.path / "rules.txt").read_text()


FIXTURES_THAT_LEAK = """
kept = []

@pytest.fixture
def leaking():
    kept.append(ct.zeros(1 << 8))
    return kept[-1]

@pytest.fixture
def leaking_at_its_end():
    yield
    kept.append(ct.zeros(1 << 8))

@pytest.fixture
def returned():
    return ct.zeros(1 << 8)

@pytest.fixture
def closed():
    x = ct.zeros(1 << 8)
    yield x
    del x

@pytest.fixture(scope="module")
def shared():
    return ct.zeros(1 << 8)

def test_leaks_in_set_up(leaking): pass
def test_leaks_in_tear_down(leaking_at_its_end): pass
def test_is_given_one(returned, closed, shared): returned.fill_(1); ct.synchronize()
def test_leaks_itself(returned): kept.append(ct.zeros(1 << 8))
"""


def test_function_fixtures_that_leak_fail_the_tear_down(run: Run) -> None:
    result = run(FIXTURES_THAT_LEAK, "--cudatool", "--cudatool-checks=leak")
    result.assert_outcomes(passed=3, failed=1, errors=2)
    result.stdout.fnmatch_lines_random(
        [
            "ERROR *::test_leaks_in_set_up - CudaCheckFailed: leak",
            "ERROR *::test_leaks_in_tear_down - CudaCheckFailed: leak",
            "FAILED *::test_leaks_itself - CudaCheckFailed: leak",
        ]
    )


def test_fixtures_leak_freely_without_the_check(run: Run) -> None:
    run(FIXTURES_THAT_LEAK, "--cudatool").assert_outcomes(passed=4)
