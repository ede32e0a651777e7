"""What pytest loads: options, markers and the fixture. It does nothing until one of them is used.

``--cudatool`` checks every test; the markers and the fixture ``cuda_trace`` work without it too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final

import pytest

from cudatool.testing.summary import Summary

if TYPE_CHECKING:
    from cudatool.sanitize import Report
    from cudatool.testing.session import CudaTrace, Session, Test

__all__ = [
    "CHECKS",
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

CHECKS: Final = ("race", "memcheck", "initcheck", "racecheck", "synccheck")
_DEFAULT_CHECKS: Final = "race,memcheck,synccheck"
_MOST: Final = "5"
_MARKERS: Final = {
    "cuda_sanitize": "cuda_sanitize(checks=...): check the test for these mistakes in its use of CUDA; () for none.",
    "limit_cuda_memory": 'limit_cuda_memory("100 MiB"): fail if the test allocates more device memory at one time.',
    "limit_cuda_leaks": 'limit_cuda_leaks("0 B"): fail if the test leaves more device memory allocated.',
}
_FIXTURE: Final = "cuda_trace"

_SESSION: Final = pytest.StashKey["Session"]()
_RESULT: Final = pytest.StashKey[dict[str, Any]]()  # of an item: what its next report says of it


class CudaCheckFailed(pytest.fail.Exception):
    """A test did what the sanitizer or one of its limits forbids; the message is the report."""

    __module__ = "builtins"  # as pytest's own: a summary has no room for where it is defined

    def __init__(self, message: str) -> None:
        super().__init__(message, pytrace=False)


# ---- options ----


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, and the same as ini settings."""
    group = parser.getgroup("cudatool", "CUDA under the sanitizer (cudatool)")
    options = (
        ("device", "DEVICE", "auto, cuda, or sim[:OPTIONS], for example sim:schedule=lifo."),
        ("checks", "LIST", f"What tests are checked for: race, memcheck, initcheck, racecheck, synccheck, or all "
         f"(default: {_DEFAULT_CHECKS})."),
        ("report", "FILE", "Write all findings to FILE as JSON."),
        ("most-allocations", "N", "Show the N tests that allocate most device memory at one time (default: 5)."),
    )  # fmt: skip
    about = "Check each test for races and memory errors on the CUDA device."
    group.addoption("--cudatool", action="store_true", help=about)
    parser.addini("cudatool", about, type="bool", default=False)
    for name, metavar, help_text in options:
        group.addoption(f"--cudatool-{name}", metavar=metavar, help=help_text)
        parser.addini(f"cudatool_{name.replace('-', '_')}", help_text)


def _option(config: pytest.Config, name: str) -> Any:
    """Return an option as the command line or the ini file has it."""
    key = f"cudatool_{name}" if name else "cudatool"
    given = getattr(config.option, key, None) or getattr(config.known_args_namespace, key, None)
    return given or config.getini(key)


def _is_on(config: pytest.Config) -> bool:
    return bool(_option(config, ""))


def _checks(config: pytest.Config) -> tuple[str, ...]:
    """Return what tests without a marker are checked for."""
    text = _option(config, "checks") or _DEFAULT_CHECKS
    return CHECKS if text == "all" else _known_checks(text)


def _known_checks(given: Any) -> tuple[str, ...]:
    names = given.split(",") if isinstance(given, str) else given
    names = tuple(name for name in map(str.strip, names) if name)
    if unknown := [name for name in names if name not in CHECKS]:
        raise pytest.UsageError(f"there is no check {unknown[0]!r}; there are {', '.join(CHECKS)}, and all")
    return names


# ---- the run ----


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Choose the device before any of the project's code can use another."""
    if _is_on(early_config):
        _choose(early_config)


def _choose(config: pytest.Config) -> None:
    from cudatool import _driver
    from cudatool.errors import CudatoolError

    try:
        _driver.choose(_option(config, "device") or None)
    except CudatoolError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_configure(config: pytest.Config) -> None:
    """Say what the markers are, and look at the options early."""
    for line in _MARKERS.values():
        config.addinivalue_line("markers", line)
    if _is_on(config):
        _checks(config)
    most = _option(config, "most_allocations") or _MOST
    if not most.isdecimal():
        raise pytest.UsageError(f"--cudatool-most-allocations={most}: not a number")
    config.pluginmanager.register(Summary(int(most), _option(config, "report")))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Record from the start, also what modules do when they are imported."""
    if _is_on(session.config) and not _is_controller(session.config):
        _start(session.config)


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
        return _checks(item.config) if _is_on(item.config) else ()
    given = mark.args[0] if mark.args else mark.kwargs.get("checks")
    return _checks(item.config) if given is None else _known_checks(given)


def _start(config: pytest.Config) -> Session:
    """Return the recording, begun now if there is none."""
    found = config.stash.get(_SESSION, None)
    if found is None:
        from cudatool.errors import CudatoolError
        from cudatool.testing.session import Session

        _choose(config)
        try:
            found = config.stash[_SESSION] = Session(_checks(config) if _is_on(config) else ())
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
    session = item.config.stash.get(_SESSION, None)
    if session is not None:
        from cudatool.testing.session import Test

        session.begin(Test(item.nodeid, _checks_of(item)))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> _Wrapper:
    """What a fixture records is the test's too, unless other tests use it as well."""
    session = request.config.stash.get(_SESSION, None)
    if session is None or fixturedef.scope == "function":
        return (yield)
    with session.shared_fixture():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> _Wrapper:
    """Fail the test for what it did; if it fails by itself, only add a section."""
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
    if failures := [*_judge(item, session, test), *_limits(item, session, test)]:
        raise CudaCheckFailed("\n\n".join(failures))
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> _Wrapper:
    """Fail the tear-down for what it did."""
    session = item.config.stash.get(_SESSION, None)
    if session is None or session.test is None:
        return (yield)
    try:
        result = yield
        if failures := _judge(item, session, session.test):
            raise CudaCheckFailed(failures[0])
        return result
    finally:
        session.end()


def _judge(item: pytest.Item, session: Session, test: Test) -> list[str]:
    """Check what the test has done since the last look, note it for its report, and return what it fails for."""
    from cudatool.sanitize import render_json, render_text

    report = session.judge(test)
    text = render_text(report, width=100) if report is not None and (report.findings or report.on_device) else ""
    item.stash[_RESULT] = {
        "device": session.device,
        "checked": bool(test.checks),
        "peak": session.memory(test).peak,
        "report": "" if report is None else render_json(report),
        "text": text,
    }
    return [f"{_headline(report)}\n\n{text}"] if report is not None and text else []


def _headline(report: Report) -> str:
    """Return one line for the summary of failures."""
    kinds = Counter(str(found.kind) for found in (*report.findings, *report.on_device))
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
    from cudatool.errors import ConfigError
    from cudatool.units import parse_bytes

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
    from cudatool.testing.session import CudaTrace

    return CudaTrace(_start(request.config), _checks_of(request.node) or _checks(request.config))
