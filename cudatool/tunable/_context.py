"""The switches and the results, one of each for the process, and the functions that programs call."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import warnings
from importlib.metadata import version
from typing import Final

from cudatool import _driver
from cudatool.blas import _gemm
from cudatool.blas._gemm import Gemm
from cudatool.config import TUNABLEOP_PREFIXES
from cudatool.errors import ConfigError, UsageError
from cudatool.runtime import calls
from cudatool.runtime.calls import check
from cudatool.runtime.capture import is_capturing
from cudatool.runtime.device import current_device, get_device_capability, get_device_name
from cudatool.runtime.stream import Stream, current_stream
from cudatool.runtime.traced_calls import traced
from cudatool.text import quoted
from cudatool.tunable._candidates import DEFAULT, candidate
from cudatool.tunable._problem import Problem, example, problem_of
from cudatool.tunable._results import Results, append_untuned, read_untuned
from cudatool.tunable._tune import Limits, Tolerances, fastest

__all__ = [
    "enable",
    "get_filename",
    "get_max_tuning_duration",
    "get_max_tuning_iterations",
    "get_results",
    "get_rotating_buffer_size",
    "get_validators",
    "install",
    "is_enabled",
    "read_file",
    "record_untuned_enable",
    "record_untuned_is_enabled",
    "reset",
    "set_filename",
    "set_max_tuning_duration",
    "set_max_tuning_iterations",
    "set_numerical_check_tolerances",
    "set_rotating_buffer_size",
    "tune_gemm_in_file",
    "tuning_enable",
    "tuning_is_enabled",
    "write_file",
    "write_file_on_exit",
]

_DEFAULTS: Final[dict[str, int | str]] = {
    # PyTorch's; a switch is 0 or 1
    "ENABLED": 0,
    "TUNING": 1,
    "RECORD_UNTUNED": 0,
    "FILENAME": "tunableop_results.csv",
    "UNTUNED_FILENAME": "tunableop_untuned.csv",
    "MAX_TUNING_DURATION_MS": 30,
    "MAX_TUNING_ITERATIONS": 100,
    "MAX_WARMUP_DURATION_MS": 0,
    "MAX_WARMUP_ITERATIONS": 0,
    "ROTATING_BUFFER_SIZE": -1,
}


class _State:
    """What programs have set, and what was found."""

    def __init__(self) -> None:
        self.set: dict[str, int | str] = {}
        self.results = Results()
        self.read: set[str] = set()  # files that were looked at
        self.is_changed = False
        self.tolerances: Tolerances | None = None
        self.writes_on_exit = True
        self.will_write = False
        self.lock = threading.RLock()


_state = _State()


def reset() -> None:
    """Forget everything that was set or found; for tests."""
    global _state
    _state = _State()
    _gemm.tuner = None
    _from_environment.cache_clear()
    _validators.cache_clear()


@functools.cache
def _from_environment(name: str) -> int | str | None:
    for prefix in TUNABLEOP_PREFIXES:
        text = os.environ.get(prefix + name)
        if text is None:
            continue
        if isinstance(_DEFAULTS[name], str):
            return text
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"{prefix}{name} must be a whole number, not {quoted(text)}") from None
    return None


def _text(name: str) -> str:
    """Return a setting that is text: the environment's, else the program's, else the default."""
    found = _from_environment(name)
    return str(_state.set.get(name, _DEFAULTS[name]) if found is None else found)


def _number(name: str) -> int:
    found = _from_environment(name)
    return int(_state.set.get(name, _DEFAULTS[name]) if found is None else found)


def _check_number(name: str, value: int, least: int) -> int:
    if not isinstance(value, int) or value < least:
        raise UsageError(f"{name} takes a whole number, {least} or more, not {value!r}")
    return value


def install() -> None:
    """Let products come through here, or no more."""
    _gemm.tuner = _tuned if _number("ENABLED") else None


# Switches.


@traced
def enable(val: bool = True) -> None:
    """Let products be computed by the fastest candidate, or all by the default again."""
    _state.set["ENABLED"] = int(bool(val))
    install()


@traced
def is_enabled() -> bool:
    """Return whether products are computed by the fastest candidate."""
    return bool(_number("ENABLED"))


@traced
def tuning_enable(val: bool = True) -> None:
    """Let a product without a result be tuned when it is called (which is the default), or not."""
    _state.set["TUNING"] = int(val)


@traced
def tuning_is_enabled() -> bool:
    """Return whether a product without a result is tuned when it is called."""
    return bool(_number("TUNING"))


@traced
def record_untuned_enable(val: bool = True) -> None:
    """Let a product without a result be written to a file, for :func:`tune_gemm_in_file`, or not."""
    _state.set["RECORD_UNTUNED"] = int(val)


@traced
def record_untuned_is_enabled() -> bool:
    """Return whether a product without a result is written to a file."""
    return bool(_number("RECORD_UNTUNED"))


@traced
def set_max_tuning_duration(duration: int) -> None:
    """Set the milliseconds for one candidate; with a limit of iterations too, the smaller counts. 0 is no limit."""
    _state.set["MAX_TUNING_DURATION_MS"] = _check_number("set_max_tuning_duration", duration, 0)


@traced
def get_max_tuning_duration() -> int:
    """Return the milliseconds for one candidate."""
    return _number("MAX_TUNING_DURATION_MS")


@traced
def set_max_tuning_iterations(iterations: int) -> None:
    """Set how often one candidate runs; with a limit of duration too, the smaller counts. 0 is no limit."""
    _state.set["MAX_TUNING_ITERATIONS"] = _check_number("set_max_tuning_iterations", iterations, 0)


@traced
def get_max_tuning_iterations() -> int:
    """Return how often one candidate runs."""
    return _number("MAX_TUNING_ITERATIONS")


@traced
def set_rotating_buffer_size(buffer_size: int) -> None:
    """Set the MiB of operands that take turns while a candidate is timed: -1 for the L2 cache's size, 0 for none."""
    _state.set["ROTATING_BUFFER_SIZE"] = _check_number("set_rotating_buffer_size", buffer_size, -1)


@traced
def get_rotating_buffer_size() -> int:
    """Return the MiB of operands that take turns while a candidate is timed, -1 for the L2 cache's size."""
    return _number("ROTATING_BUFFER_SIZE")


@traced
def set_numerical_check_tolerances(enable: bool, atol: float = 1e-5, rtol: float = 1e-5) -> None:
    """Set how much the result of a candidate may differ from the default's, or let it differ as it likes.

    Until this is called, results are compared with tolerances that suit their dtype.
    """
    _state.tolerances = Tolerances(enable, atol, rtol)


# Files.


@traced
def set_filename(filename: str, insert_device_ordinal: bool = False) -> None:
    """Set the file of the results.

    Parameters
    ----------
    insert_device_ordinal
        Put the current device's ordinal in front of the suffix, as is always done with the default and with the
        environment's, so that processes with a device each do not write to the same file.
    """
    _state.set["FILENAME"] = _with_ordinal(filename) if insert_device_ordinal else filename


@traced
def get_filename() -> str:
    """Return the file of the results."""
    return _text("FILENAME") if _is_set_by_program("FILENAME") else _with_ordinal(_text("FILENAME"))


def _is_set_by_program(name: str) -> bool:
    return _from_environment(name) is None and name in _state.set


def _with_ordinal(filename: str) -> str:
    stem, suffix = os.path.splitext(filename)
    return f"{stem}{current_device()}{suffix}"


@traced
def get_results() -> tuple[tuple[str, str, str, float], ...]:
    """Return operator, parameters, solution and milliseconds of every result."""
    return tuple((*problem, result.solution, result.milliseconds) for problem, result in _state.results.items())


@traced
def get_validators() -> tuple[tuple[str, str], ...]:
    """Return name and value of everything that the results hold for."""
    return _validators(current_device())


@functools.cache
def _validators(device: int) -> tuple[tuple[str, str], ...]:
    driver = check(calls.driver.cuDriverGetVersion())
    if _driver.initialize().kind == "cuda":
        from nvmath.bindings import cublasLt

        library = ("CUBLASLT_VERSION", str(cublasLt.get_version()))
    else:
        library = ("NUMPY_VERSION", version("numpy"))
    capability = ".".join(map(str, get_device_capability(device)))
    return (
        ("CUDATOOL_VERSION", version("cudatool")),
        ("DRIVER_VERSION", str(driver)),
        library,
        ("DEVICE", f"{get_device_name(device)} {capability}"),
    )


@traced
def write_file_on_exit(val: bool) -> None:
    """Let new results be written when the process ends (which is the default), or not."""
    _state.writes_on_exit = val


@traced
def write_file(filename: str | None = None) -> bool:
    """Write the results to a file, by default :func:`get_filename`'s, and return whether there were any.

    Raises
    ------
    OutputError
        It cannot be written.
    """
    with _state.lock:
        if not _state.results:
            return False
        _state.results.write(filename or get_filename(), get_validators())
        _state.is_changed = False
    return True


@traced
def read_file(filename: str | None = None) -> bool:
    """Take over the results in a file, by default :func:`get_filename`'s.

    Returns
    -------
    bool
        Whether they hold here. If not, a warning says what is different.

    Raises
    ------
    FileFormatError
        It is no file of results.
    OSError
        It cannot be read.
    """
    path = filename or get_filename()
    with _state.lock:
        _state.read.add(path)
        differences = _state.results.read(path, get_validators())
    if differences:
        warnings.warn(f"{path}: its results are not used, because {'; '.join(differences)}", stacklevel=2)
    return not differences


def _write_at_exit() -> None:
    if _state.writes_on_exit and _state.is_changed:
        write_file()


# Products.


def _tuned(gemm: Gemm, stream: Stream) -> bool:
    """Enqueue a product by the candidate that was found for it, or is found now; return whether it was."""
    problem = problem_of(gemm)
    if problem is None:
        return False
    result = _state.results.get(problem)
    if result is None:
        _read_once()
        result = _state.results.get(problem)
    if result is None:
        if is_capturing(stream):
            return False
        if record_untuned_is_enabled():
            append_untuned(_with_ordinal(_text("UNTUNED_FILENAME")), problem)
        if not tuning_is_enabled():
            return False
        _find(problem, gemm, stream)
        result = _state.results[problem]
    if result.solution == DEFAULT:
        return False
    candidate(result.solution, gemm)(gemm, stream)
    return True


def _read_once() -> None:
    path = get_filename()
    if path not in _state.read and os.path.exists(path):
        read_file(path)
    _state.read.add(path)


def _find(problem: Problem, gemm: Gemm, stream: Stream) -> None:
    limits = Limits(
        get_max_tuning_iterations(),
        get_max_tuning_duration(),
        _number("MAX_WARMUP_ITERATIONS"),
        _number("MAX_WARMUP_DURATION_MS"),
        get_rotating_buffer_size(),
    )
    with _state.lock:
        if problem not in _state.results:
            _state.results[problem] = fastest(gemm, stream, limits, _state.tolerances)
            _state.is_changed = True
            if not _state.will_write:
                _state.will_write = True
                atexit.register(_write_at_exit)


@traced
def tune_gemm_in_file(filename: str) -> None:
    """Tune every product in a file that was written with :func:`record_untuned_enable`, with random matrices.

    Raises
    ------
    UsageError
        Tuning is not enabled.
    FileFormatError
        It is no such file.
    """
    if not (is_enabled() and tuning_is_enabled()):
        raise UsageError("tune_gemm_in_file needs enable() and tuning_enable(), or the environment's switches")
    stream = current_stream()
    for problem in read_untuned(filename):
        if problem not in _state.results:
            _find(problem, example(problem, stream, filename), stream)
