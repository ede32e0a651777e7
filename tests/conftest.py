"""What tests of several folders share."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import generated
import left_to_workers
import published_schemas
import pytest
import warm_process
from hypothesis import HealthCheck, settings


def pytest_configure(config: pytest.Config) -> None:
    """Choose the device, let programs that tests start be interrupted, and keep the modules that they compile.

    The software device has two devices in tests: what needs them needs no process of its own.

    OpenBLAS has one thread in each process, as it is loaded by hundreds: its others wait for work by looking for it all
    the time, on the cores that other tests run on.

    Tests run with SIGINT ignored under nohup. Under PYTHONDONTWRITEBYTECODE each of the many hundred programs would
    compile five hundred modules again, which takes as long as all else that it does.
    """
    if not os.path.exists("/dev/nvidiactl"):
        os.environ.setdefault("CUDATOOL_DEVICE", "sim:count=2")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _keep_temporary_files_in_memory(config)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_MEMORY = "/dev/shm"  # of Linux
_ROOM = 2 << 30


def _keep_temporary_files_in_memory(config: pytest.Config) -> None:
    """Let the temporary files of this run, and of programs that it starts, lie there if it has room and runs programs.

    On a disk the processor waits: some 10 ms to delete a recording, and until a report is there for good. The files go at
    the end, unlike those of failed tests in a folder that TMPDIR names.
    """
    if "TMPDIR" in os.environ or not os.access(_MEMORY, os.W_OK):
        return
    found = os.statvfs(_MEMORY)
    if found.f_bavail * found.f_frsize >= _ROOM and not found.f_flag & os.ST_NOEXEC:
        folder = tempfile.mkdtemp(prefix="t", dir=_MEMORY)  # a short one: paths of sockets have 107 bytes
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Tell tests the run's seed, which all workers have from here on, and how hypothesis draws.

    No test of generated data fails because the machine is busy: the first one of a process takes a second or two, in
    which hypothesis reads the constants of all our modules.
    """
    generated.seed = session.config.getoption("randomly_seed", None)
    most = generated.examples(100)  # what hypothesis draws by itself
    settings.register_profile(
        "cudatool", max_examples=most, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("cudatool")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test marked ``some_of(name, values, count)`` so many of the values, other ones in each run.

    Values to be there in each run may be given as `always`. Tests that are marked with the same word as `alike` have
    the same ones.
    """
    for marker in metafunc.definition.iter_markers("some_of"):
        name, values, count = marker.args
        chosen = generated.some_of(values, count, marker.kwargs.get("alike", metafunc.definition.nodeid))
        metafunc.parametrize(name, [*marker.kwargs.get("always", ()), *chosen])


def pytest_collection() -> None:
    """Collect tests without looking for garbage, of which there is little beside what stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Take what collecting has made and what stays, 360,000 objects, out of every collection of garbage to come."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """End the servers that programs were forked off."""
    warm_process.close()


@pytest.fixture(scope="session", autouse=True)
def what_workers_leave_to_each_other(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tell where that is: a worker's own folder lies in the run's."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        left_to_workers.folder = tmp_path_factory.getbasetemp().parent


@pytest.fixture(autouse=True)
def nothing_left_by_others() -> None:
    """Let what a test says of the device be about its own work and memory: segments and operations of others live on.

    A recording names work that was in flight when it began as not checked. Where there is memory that other processes
    can use, work begins by itself after 0.2 s: on a busy machine before a test has looked at what is pending.
    """
    driver = sys.modules.get("cudatool._driver")
    choice = None if driver is None else driver.chosen()
    if choice is not None and choice.machine is not None:
        scheduler = choice.machine.scheduler
        if scheduler.pending:
            from cudatool.sim.abi import lock

            with lock:
                scheduler.drain()
        scheduler._is_shared = False
        for allocation in choice.machine.allocations:
            allocation.is_shared = False


@pytest.fixture(scope="session")
def check_schema() -> Callable[[str, Any], None]:
    """``check_schema("sarif", data)`` fails if data is not valid by the schema that others publish for it."""
    return published_schemas.checker()


@pytest.fixture(params=["unchecked", "all checks"])
def checked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[bool]:
    """Run a test as it is and once more under all checks of kernels, which must find nothing."""
    if request.param == "unchecked":
        yield False
        return
    from cudatool.config import KERNEL_CHECKS
    from cudatool.recording import record
    from cudatool.sanitize import check
    from cudatool.trace.reader import read

    path = tmp_path / "checked.ctrace"
    with record(path, checks=KERNEL_CHECKS):
        yield True
    report = check(read(path), ())
    assert () == report.on_device
    assert report.operations > 0
