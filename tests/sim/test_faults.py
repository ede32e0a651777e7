"""Faults of kernels beside handlers of other libraries, which may have been installed before ours or after."""

from __future__ import annotations

import signal
import subprocess
import sys
from shutil import copy, which

import pytest

# As LLVM's CrashRecoveryContext: it takes its handler away and raises the signal again.
RECOVERING = """
#include <signal.h>
#include <string.h>
#include <unistd.h>
static struct sigaction before;
static volatile int is_enabled, calls;
void disable(void) {
    if (is_enabled) sigaction(SIGSEGV, &before, NULL);
    is_enabled = 0;
}
static void handle(int number) {
    if (++calls > 10) _exit(99);
    disable();
    raise(number);
}
void enable(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = handle;
    sigaction(SIGSEGV, &action, &before);
    is_enabled = 1;
}
"""
BEGIN = """
import ctypes
import numpy as np
import cudatool as ct
write = ct.compile('extern "C" __global__ void write(float *p) { p[threadIdx.x] = 1; }', "write")
x = ct.zeros(32, "f4")
def run(address):
    write[1, 1](np.uint64(address))
    ct.synchronize()
"""


@pytest.fixture(scope="module")
def recovering(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library with such a handler, and a copy of it: code that loads both."""
    compiler = which("cc") or which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("recovering")
    (folder / "recovering.c").write_text(RECOVERING)
    library = folder / "librecovering.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "recovering.c"], check=True, timeout=60)
    copy(library, folder / "other.so")
    load = f"recovering, other = ctypes.CDLL({str(library)!r}), ctypes.CDLL({str(folder / 'other.so')!r})"
    return f"import ctypes\n{load}\n"


def finished(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from cudatool import _driver; _driver.choose('sim')\n" + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_fault_of_a_kernel_has_its_address_where_another_handler_raised_the_signal_again(recovering):
    code = recovering + BEGIN + "run(x.data_ptr()); recovering.enable()\ntry: run(0x10)\n"
    code += "except ct.CudaError as error: print(error)\n"
    done = finished(code)
    assert "illegal access at 0x10," in done.stdout, done.stderr


def test_fault_of_the_program_ends_it_where_the_handler_before_ours_raises_the_signal_again(recovering):
    code = recovering + "import faulthandler\nrecovering.enable()\n" + BEGIN
    code += "run(x.data_ptr())\n"
    # faulthandler restores the handler that it found: ours, whose predecessor has taken itself away in the meantime.
    code += "faulthandler.enable(); recovering.disable(); faulthandler.disable()\nctypes.string_at(8)"
    done = finished(code)
    assert -signal.SIGSEGV == done.returncode, done.stderr


def test_fault_of_a_kernel_has_its_address_where_two_libraries_left_a_handler(recovering):
    """Each puts back the handler that it found, but the first one first: then its own handler is what the second found."""
    code = recovering + BEGIN + "run(x.data_ptr())\n"
    code += "recovering.enable(); other.enable(); recovering.disable(); other.disable()\n"
    code += "try: run(0x10)\nexcept ct.CudaError as error: print(error)\n"
    done = finished(code)
    assert "illegal access at 0x10," in done.stdout, (done.returncode, done.stderr)
