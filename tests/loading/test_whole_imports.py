"""A signal during cudatool's first use of NumPy or NVIDIA's bindings: the program gets it, and can go on."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading

import pytest

from cudatool.loading.whole_imports import whole_imports

PROGRAM = """
import signal, sys
class Stop(Exception):
    pass
def stop(number, frame):
    raise Stop
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGALRM)
signal.signal(signal.SIGALRM, stop)
sys.meta_path.insert(0, Finder())
import cudatool
try:
    cudatool.zeros(4)
    print("nothing came")
except Stop:
    assert signal.getsignal(signal.SIGALRM) is stop
    print((cudatool.zeros(4) + 1).get().tolist())
"""


@pytest.mark.parametrize(
    "module", ["numpy", "numpy._core.multiarray", "numpy.linalg", "cuda.core", "cuda.bindings.driver"]
)
def test_the_first_use_can_be_repeated_after_an_exception_of_a_handler(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module],
        env={**os.environ, "CUDATOOL_DEVICE": "sim"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "[1.0, 1.0, 1.0, 1.0]" == done.stdout.strip(), done.stderr


class StopError(Exception):
    pass


def test_handlers_come_at_the_end_of_the_block() -> None:
    def stop(number: int, frame: object) -> None:
        raise StopError(number)

    before = signal.signal(signal.SIGUSR1, stop)
    reached = []
    try:
        with pytest.raises(StopError), whole_imports(), whole_imports():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
            reached.append(1)
        assert [1] == reached
        assert signal.getsignal(signal.SIGUSR1) is stop
        assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        with pytest.raises(StopError):  # at once again
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_exception_of_the_block_comes_out_of_it() -> None:
    with pytest.raises(ImportError), whole_imports():
        raise ImportError
    with whole_imports():
        pass


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_afterwards_as_before(collects: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(ImportError), whole_imports():
            with whole_imports():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ImportError
        assert collects == gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()


def test_other_threads_set_no_handlers() -> None:
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    seen: list[object] = []

    def work() -> None:
        with whole_imports():
            seen.append({number: signal.getsignal(number) for number in signal.valid_signals()} == handlers)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [True] == seen
