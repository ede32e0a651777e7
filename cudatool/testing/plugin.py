"""What pytest loads: options, markers and the fixture. It does nothing until one of them is used.

``--cudatool`` checks every test; the markers and the fixture ``cuda_trace`` work without it too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final

import pytest

from cudatool.errors import ConfigError, CudatoolError, UsageError
from cudatool.testing.options import add_options, is_on, options_of
from cudatool.testing.terminal_summary import SummaryPlugin
from cudatool.units import parse_bytes

if TYPE_CHECKING:
    from cudatool.sanitize import Report
    from cudatool.testing.session import CudaTrace, Session, Test

__all__ = [
    "CudaCheckFailed",
    "cuda_trace",
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_configure",
    "pytest_fixture_setup",
    "pytest_load_initial_conftests",
    "pytest_runtest_call",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
    "pytest_sessionfinish",
    "pytest_sessionstart",
]

_MARKERS: Final = {
    "cuda_sanitize": "cuda_sanitize(checks=...): check the test for these mistakes in its use of CUDA; () for none.",
    "limit_cuda_memory": 'limit_cuda_memory("100 MiB"): fail if the test allocates more device memory at one time.',
    "limit_cuda_leaks": 'limit_cuda_leaks("0 B"): fail if the test leaves more device memory allocated.',
}
_FIXTURE: Final = "cuda_trace"

_SESSION: Final = pytest.StashKey["Session"]()
_RESULT: Final = pytest.StashKey[dict[str, Any]]()  # of an item: what its next report says of it


class CudaCheckFailed(pytest.fail.Exception):  # type: ignore[name-defined, misc]  # pytest declares a variable
    """A test did what the sanitizer or one of its limits forbids; the message is the report."""

    __module__ = "builtins"  # as pytest's own: a summary has no room for where it is defined

    def __init__(self, message: str) -> None:
        super().__init__(message, pytrace=False)


# ---- the run ----


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, and the same as ini settings."""
    add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Choose the device before any of the project's code can use another."""
    if is_on(early_config):
        options_of(early_config)


def pytest_configure(config: pytest.Config) -> None:
    """Say what the markers are."""
    for line in _MARKERS.values():
        config.addinivalue_line("markers", line)
    config.pluginmanager.register(SummaryPlugin(config))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Record from the start, also what modules do when they are imported."""
    if not is_on(session.config):
        return
    if not _is_controller(session.config):
        _start(session.config)
    elif options_of(session.config).device.startswith("cuda"):
        from cudatool import _driver  # most runs need no device

        if not _driver.gpu_names():  # said once, instead of by every process
            raise pytest.UsageError("no NVIDIA GPU answers on this machine; use --cudatool-device=sim")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record if a test asks for it, and run kernels under all checks that any test asks for."""
    if not _is_controller(session.config) and any(map(_uses_us, session.items)):
        marked = {check for item in session.items for check in _checks_of(item)}
        _start(session.config).widen(marked)


def _is_controller(config: pytest.Config) -> bool:
    """Return whether other processes run the tests (pytest-xdist)."""
    return config.pluginmanager.hasplugin("dsession")


def _uses_us(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in _MARKERS) or _FIXTURE in getattr(item, "fixturenames", ())


def _checks_of(item: pytest.Item) -> tuple[str, ...]:
    """Return what a test is checked for."""
    mark = item.get_closest_marker("cuda_sanitize")
    if mark is None:
        return options_of(item.config).checks if is_on(item.config) else ()
    given = mark.args[0] if mark.args else mark.kwargs.get("checks")
    if given is None:
        return options_of(item.config).checks
    from cudatool.sanitize import named_checks  # the sanitizer, that a run without marks does not need

    try:
        return named_checks(given)
    except UsageError as error:
        raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.cuda_sanitize: {error}") from error


def _start(config: pytest.Config) -> Session:
    """Return the recording, begun now if there is none."""
    found = config.stash.get(_SESSION, None)
    if found is None:
        from cudatool.testing.session import Session  # the same

        options = options_of(config)
        try:
            found = config.stash[_SESSION] = Session(options, options.checks if is_on(config) else ())
        except CudatoolError as error:
            raise pytest.UsageError(str(error)) from error
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop recording."""
    found = session.config.stash.get(_SESSION, None)
    if found is not None:
        found.close()
        del session.config.stash[_SESSION]


# ---- one test ----

_Wrapper = Generator[None, object, object]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> _Wrapper:
    """From here on what is recorded is the test's."""
    __tracebackhide__ = True
    session = item.config.stash.get(_SESSION, None)
    if session is not None:
        session.begin(item.nodeid, _checks_of(item))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> _Wrapper:
    """What a fixture records is the test's too, unless other tests use it as well."""
    __tracebackhide__ = True
    session = request.config.stash.get(_SESSION, None)
    if session is None or fixturedef.scope == "function":
        return (yield)
    with session.shared_fixture():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> _Wrapper:
    """Fail the test for what it did; if it fails by itself, only add a section."""
    __tracebackhide__ = True
    session = item.config.stash.get(_SESSION, None)
    if session is None or session.test is None:
        return (yield)
    test = session.test
    session.call(test)
    try:
        result = yield
    except pytest.skip.Exception:
        raise
    except BaseException:
        _judge(item, session, test)
        raise
    _fail([*_judge(item, session, test), *_limits(item, session, test)])
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> _Wrapper:
    """Fail the tear-down for what it did."""
    __tracebackhide__ = True
    session = item.config.stash.get(_SESSION, None)
    if session is None or session.test is None:
        return (yield)
    try:
        result = yield
        if session.test.judged >= 0:
            if "leak" in session.test.checks:
                getattr(item, "funcargs", {}).clear()  # pytest lets go of them later: they would be leaks until then
            _fail(_judge(item, session, session.test))
        return result
    finally:
        session.end()


def _fail(reasons: list[str]) -> None:
    if reasons:
        raise CudaCheckFailed("\n\n".join(reasons))


def _judge(item: pytest.Item, session: Session, test: Test) -> list[str]:
    """Check what the test has done since the last look, note it for its report, and return what it fails for."""
    report = session.judge(test)
    fails = report is not None and bool(report.findings or report.on_device) and not session.options.updates_baseline
    text = session.text(report) if report is not None and fails else ""
    item.stash[_RESULT] = session.result(test, report) | {"text": text}
    return [f"{_headline(report)}\n\n{text}"] if report is not None and text else []


def _headline(report: Report) -> str:
    """Return one line for the summary of failures."""
    kinds = Counter(map(str, (*(f.kind for f in report.findings), *(f.kind for f in report.on_device))))
    return ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in kinds.items())


def _limits(item: pytest.Item, session: Session, test: Test) -> list[str]:
    failures = []
    limits: dict[str, Callable[[Test, int], str]] = {
        "limit_cuda_memory": session.over_limit,
        "limit_cuda_leaks": session.leaked,
    }
    for name, exceeded in limits.items():
        mark = item.get_closest_marker(name)
        if mark is not None and (failure := exceeded(test, _limit(mark))):
            failures.append(failure)
    return failures


def _limit(mark: pytest.Mark) -> int:

    if len(mark.args) != 1 or mark.kwargs:
        raise pytest.UsageError(f'@pytest.mark.{mark.name} takes one size, for example "100 MiB"')
    try:
        return parse_bytes(str(mark.args[0]))
    except ConfigError as error:
        raise pytest.UsageError(f"@pytest.mark.{mark.name}: {error}") from error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let the report carry what was found: with pytest-xdist it goes to another process."""
    report = yield
    result = item.stash.get(_RESULT, {})
    item.stash[_RESULT] = {}
    if result:
        text = result.pop("text")
        if text and not (call.excinfo and call.excinfo.errisinstance(CudaCheckFailed)):
            report.sections.append(("cudatool", text))
        report.cudatool = result  # type: ignore[attr-defined]
    return report


@pytest.fixture
def cuda_trace(request: pytest.FixtureRequest) -> CudaTrace:
    """What the test has done on the CUDA device so far: events, memory and findings."""
    return _start(request.config).looks(_checks_of(request.node) or options_of(request.config).checks)
