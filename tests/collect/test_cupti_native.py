"""The log of :file:`_cupti.c` over a library that stands in for libcupti: stacks against Python's own."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from shutil import which

import forked
import numpy as np
import pytest

from cudatool.collect import _cupti
from cudatool.collect.cupti_rows import ROW

_HERE = Path(__file__).with_name("native")


def thread_of_a_row() -> int:
    _cupti.start_alone(1 << 16)
    try:
        _cupti.pool_alloc(mem_ptr=0x1000, mem_size=512, size=512, device_id=0)
        return int(np.frombuffer(_cupti.drain()[0], ROW)["thread"][0])
    finally:
        _cupti.stop()


def test_rows_of_a_forked_child_have_its_own_thread():
    assert thread_of_a_row() == threading.get_native_id()
    assert forked.status_of(lambda: thread_of_a_row() != threading.get_native_id()) == 0


@pytest.mark.some_of("seed", range(3), 1)
def test_stacks_are_pythons_own_in_functions_made_and_gone_generators_and_threads(libcupti, seed):
    command = [sys.executable, _HERE / "stacks.py", _cupti.__file__, libcupti, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("seed", range(2))
def test_memory_of_a_backward_pass_has_the_stack_of_the_forward_operator_that_anomaly_mode_knows(libcupti, seed):
    pytest.importorskip("torch")
    command = [sys.executable, "-W", "ignore", _HERE / "torch_nodes.py", libcupti, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_memory_has_the_module_that_is_called_or_whose_forward_pass_made_the_node(libcupti):
    pytest.importorskip("torch")
    command = [sys.executable, "-W", "ignore", _HERE / "torch_modules.py", libcupti]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_memory_of_a_compiled_backward_pass_has_the_line_of_the_generated_code(libcupti):
    pytest.importorskip("torch")
    command = [sys.executable, "-W", "ignore", _HERE / "torch_compiled.py", libcupti]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_launch_beside_pytorch_comes_between_the_operators_and_knows_the_blocks_of_before(libcupti):
    pytest.importorskip("torch")
    command = [sys.executable, "-W", "ignore", _HERE / "torch_beside.py", libcupti]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_operators_of_pytorch_call_the_driver_for_is_left_out(libcupti):
    pytest.importorskip("torch")
    command = [sys.executable, "-W", "ignore", _HERE / "torch_operators.py", libcupti]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_operators_of_pytorch_have_pythons_stacks_where_the_driver_is_logged_too(libcupti):
    pytest.importorskip("torch")
    command = [sys.executable, "-W", "ignore", _HERE / "torch_stacks.py", libcupti]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


ONCE = """
import ctypes, sys
from cudatool.collect import _cupti
_cupti.open(sys.argv[1])
_cupti.start({"cuEventRecord": (".n", False, False, False, 0, False)}, 1 << 20)
call_driver = ctypes.CDLL(sys.argv[1]).call_driver
call_driver.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
for handle in (5, 5, 6, 5, 6):
    call_driver(1, 0, handle)
CONTEXTS, ROW = 1, 96
print(len(_cupti.drain()[0]) // ROW - CONTEXTS)
"""


def test_a_call_that_every_launch_makes_is_noted_once_for_each_handle(libcupti):
    done = subprocess.run([sys.executable, "-c", ONCE, libcupti], capture_output=True, text=True, timeout=60)
    assert "2\n" == done.stdout, done.stderr


TIMES = """
import ctypes, random, sys, threading, time
import numpy as np
from cudatool.collect import _cupti
from cudatool.collect.cupti_rows import ROW, What

_cupti.open(sys.argv[1])
library = ctypes.PyDLL(sys.argv[1])  # with the interpreter's lock: no other thread runs between the two readings
library.call_driver.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
between, rows = {}, []

def calls(first):
    for handle in range(first, first + 500):
        before = time.monotonic_ns()
        library.call_driver(1, 0, handle)
        between[handle] = before, time.monotonic_ns()
        if random.random() < 0.05:
            time.sleep(random.random() * 0.01)

for recording in range(2):
    _cupti.start({"cuEventRecord": ("qq", False, False, False, 0, False)}, 1 << 20)
    threads = [threading.Thread(target=calls, args=[(2 * recording + one + 1) * 1000]) for one in range(2)]
    for thread in threads:
        thread.start()
    running = True
    while running:
        running = any(thread.is_alive() for thread in threads)
        time.sleep(random.random() * 0.05)
        if found := _cupti.drain():
            rows.append(np.frombuffer(found[0], ROW))
    _cupti.stop()
    time.sleep(0.1)
noted = np.concatenate(rows)
noted = noted[noted["what"] < 0xFF00]
handles, times = noted["words"][:, 1].tolist(), noted["time"].astype(np.int64)
limits = np.array([between[handle] for handle in handles])
print(len(noted), bool((np.diff(times) >= 0).all()))
print(int(np.maximum(limits[:, 0] - times, times - limits[:, 1]).max() < 20_000))
"""


def test_times_of_rows_are_those_of_the_systems_clock_and_in_order(libcupti):
    done = subprocess.run([sys.executable, "-c", TIMES, libcupti], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2000 True\n1\n", done.stdout + done.stderr


RELEASED = """
import ctypes, sys, threading
import numpy as np
from cudatool.collect import _cupti, _log_rows
from cudatool.collect.cupti_rows import ROW, What

class Log(ctypes.Structure):
    _fields_ = [
        ("stack_here", ctypes.CFUNCTYPE(ctypes.c_uint32)),
        ("note", ctypes.CFUNCTYPE(None, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64 * 8)),
        ("note_text", ctypes.c_void_p),
        ("module_of", ctypes.c_void_p),
        ("note_released", ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint64 * 8)),
    ]

pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.POINTER(Log), [ctypes.py_object, ctypes.c_char_p]
log = pointer(_cupti.log, b"cudatool.collect._cupti.log").contents
words = ctypes.c_uint64 * 8
ASKED, RELEASED = 1, 2

def asked(address, device=0):
    log.note(What.BLOCK, device, 1, words(ASKED, address, 512))

def released(address, device=0):
    log.note_released(device, words(RELEASED, address, 512))

def drained():
    data = _cupti.drain()[0]
    rows = np.frombuffer(_log_rows.sort(data, b"", bytes(1 << 16), None)[0], ROW)
    found = [(*map(int, row["words"][:2]), int(row["stack"]), int(row["device"])) for row in rows]
    assert all(rows["what"] == What.BLOCK) and all(rows["words"][:, 2] == 512)
    return len(data) // ROW.itemsize, found

_cupti.open(sys.argv[1])
_cupti.start({"cuEventRecord": (".n", False, False, False, 0, False)}, 1 << 20)
asked(16), released(16)
print(*drained())
asked(16), asked(32), released(16), released(32)  # the rows of both are the last, but of another block, or no request
print(*drained())
asked(16), released(16, 1), released(16)  # another device's
print(*drained())
asked(16)
thread = threading.Thread(target=released, args=(16,))
thread.start(), thread.join()
print(*drained())
asked(16)
print(*drained())
released(16)  # the request was drained before
print(*drained())
"""


def test_a_block_that_is_released_in_the_call_that_asked_for_it_takes_one_row_of_the_log(libcupti):
    done = subprocess.run([sys.executable, "-c", RELEASED, libcupti], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    asked, released = (1, 16, 1, 0), (2, 16, 0, 0)
    assert [
        (1, [asked, released]),
        (4, [asked, (1, 32, 1, 0), released, (2, 32, 0, 0)]),
        (3, [asked, (2, 16, 0, 1), released]),
        (2, [asked, released]),
        (1, [asked]),
        (1, [released]),
    ] == [ast.literal_eval(f"({line.replace(' ', ',', 1)})") for line in done.stdout.splitlines()]


FAILED = """
import ctypes, sys
import numpy as np
from cudatool.collect import _cupti
from cudatool.collect.cupti_rows import ROW, What
_cupti.open(sys.argv[1])
_cupti.start({"cuEventRecord": (".n", False, False, False, 0, False)}, 1 << 20)
library = ctypes.CDLL(sys.argv[1])
library.call_driver.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
result = ctypes.c_int.in_dll(library, "result")
for result.value in (600, 0, 0, 600, 0):
    library.call_driver(1, 0, 5)
rows = np.frombuffer(_cupti.drain()[0], ROW)
print(rows["result"][rows["what"] != What.CONTEXT].tolist())
"""


def test_a_handle_whose_call_failed_is_noted_when_a_later_one_succeeds(libcupti):
    done = subprocess.run([sys.executable, "-c", FAILED, libcupti], capture_output=True, text=True, timeout=60)
    assert "[600, 0, 600]\n" == done.stdout, done.stderr


KERNEL_FAILED = """
import ctypes, sys
import numpy as np
from cudatool.collect import _cupti
from cudatool.collect.cupti_rows import ROW, What
_cupti.open(sys.argv[1])
library = ctypes.CDLL(sys.argv[1])
library.call_driver.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
result = ctypes.c_int.in_dll(library, "result")
calls = {"cuEventRecord": ("qq", False, False, False, 0, False), "cuMemFree_v2": ("q", True, False, False, 0, False)}
for _ in range(2):
    _cupti.start(calls, 1 << 20, (700, 719))
    _cupti.mark(7)  # our runtime's operation
    for result.value in (600, 701, 719, 700):
        library.call_driver(4, 5, 6)
        library.call_driver(1, 5, 6)
    rows = np.frombuffer(_cupti.drain()[0], ROW)
    _cupti.stop()
    print([(int(row["words"][0]), int(row["words"][1])) for row in rows if row["what"] == What.FAILURE])
"""


def test_the_first_result_that_says_that_a_kernel_failed_is_noted_whoever_called(libcupti):
    done = subprocess.run([sys.executable, "-c", KERNEL_FAILED, libcupti], capture_output=True, text=True, timeout=60)
    assert "[(719, 4)]\n" * 2 == done.stdout, done.stderr


DESCRIBED = """
import ctypes, sys
import numpy as np
from cudatool.collect import _cupti
from cudatool.collect.cupti_rows import ROW
_cupti.open(sys.argv[1])
calls = {"cuEventRecord": ("qd", False, False, False, 0, False), "cuMemAlloc_v2": ("qDi", False, False, False, 0, False)}
_cupti.start(calls, 1 << 20)
library = ctypes.CDLL(sys.argv[1])
library.call_driver.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
described = bytes(range(50))
for number in (1, 2):
    library.call_driver(number, 5, ctypes.cast(described, ctypes.c_void_p).value)
data, *_, at, blob = _cupti.drain()
rows = np.frombuffer(data, ROW)
starts = [int(row["words"][1]) - at for row in rows if row["words"][0] == 5]
assert blob == described[:24] + described[:40] and starts == [0, 24], (blob, starts)
"""


def test_the_description_of_an_array_is_noted(libcupti):
    done = subprocess.run([sys.executable, "-c", DESCRIBED, libcupti], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


OPERATIONS = """
import ctypes, sys, threading
import numpy as np
from cudatool.collect import _cupti
from cudatool.collect.cupti_rows import ROW, What
_cupti.open(sys.argv[1])
launch = (".", False, False, False, 0, True, True, True)
record = ("q", False, False, False, 0, False, False, False)
memory = ("q", False, True, False, 0, False, False, False)
_cupti.start({"cuEventRecord": record, "cuMemAlloc_v2": memory, "cuLaunchKernel": launch}, 1 << 20)
_cupti.watch_activity(False)
call_driver = ctypes.CDLL(sys.argv[1]).call_driver_at
call_driver.argtypes = [ctypes.c_uint32] * 3 + [ctypes.c_uint64] * 2
def call(correlation, number):
    call_driver(0, correlation, number, 0, 0)
    call_driver(1, correlation, number, 0, 0)
call(10, 3)  # another library's
_cupti.mark(77)
call(11, 3)
call(12, 1)
print(_cupti.is_waiting())
call(12, 2)
print(_cupti.is_waiting())
other = threading.Thread(target=call, args=(13, 3))  # no operation of ours is open there
other.start(); other.join()
call(14, 3)
_cupti.mark(0)
call(15, 3)
_cupti.mark(78)
call(16, 3)
rows = np.frombuffer(_cupti.drain()[0], ROW)
print([(int(row["correlation"]), int(row["words"][0])) for row in rows if row["what"] == What.OPERATION])
print([int(row["correlation"]) for row in rows if row["what"] == 2], any(row["what"] == 1 for row in rows))
"""


def test_calls_for_our_runtime_are_not_noted_but_what_they_enqueue_and_memory_is(libcupti):
    done = subprocess.run([sys.executable, "-c", OPERATIONS, libcupti], capture_output=True, text=True, timeout=60)
    assert "False\nTrue\n[(11, 77), (14, 77), (16, 78)]\n[12] False\n" == done.stdout, done.stderr


STOPPED = """
import ctypes, sys
from cudatool.collect import _cupti
_cupti.open(sys.argv[1])
calls = {"cuEventRecord": ("q", False, False, False, 0, False, False, False)}
_cupti.start(calls, 1 << 20)
_cupti.mark(77)
_cupti.stop()  # while an operation of our runtime is open: nobody marks its end
_cupti.start(calls, 1 << 20)
call_driver = ctypes.CDLL(sys.argv[1]).call_driver
call_driver.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
call_driver(1, 5, 0)
print(_cupti.is_waiting())
"""


def test_an_operation_that_was_open_when_a_recording_ended_is_not_open_in_the_next(libcupti):
    done = subprocess.run([sys.executable, "-c", STOPPED, libcupti], capture_output=True, text=True, timeout=60)
    assert "True\n" == done.stdout, done.stderr


THREADS = """
import ctypes, sys, threading
from cudatool.collect import _cupti
_cupti.open(sys.argv[1])
_cupti.start({"cuEventRecord": ("qq", False, False, False, 0, False)}, 1 << 20)
call_driver = ctypes.CDLL(sys.argv[1]).call_driver
call_driver.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
def used():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def many(count):
    for _ in range(count):
        thread = threading.Thread(target=call_driver, args=(1, 0, 0))
        thread.start(); thread.join()
    _cupti.drain()
many(100)
before = used()
many(1000)
print(used() - before)
"""


@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer keeps what was freed")
def test_threads_that_have_ended_leave_nothing_in_memory(libcupti):
    done = subprocess.run([sys.executable, "-c", THREADS, libcupti], capture_output=True, text=True, timeout=60)
    assert int(done.stdout) < 4 << 20, done.stderr  # each had 16 KiB for its last stack


LAUNCHES = """
import ctypes, sys
import numpy as np
from cudatool.collect import _cupti
from cudatool.collect.cupti_rows import ROW, What
_cupti.open(sys.argv[1])
launch = (".", False, False, False, 0, True, True, True)
image = ("Pm", False, False, False, 0, False, False, False)
function = ("Pqs", False, False, False, 0, False, False, False)
_cupti.start({"cuLaunchKernel": launch, "cuModuleLoadData": image, "cuModuleGetFunction": function}, 1 << 20)
_cupti.watch_launches(1)
driver = ctypes.CDLL(sys.argv[1])
driver.call_driver.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
driver.launch.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t]
handle, ptx, elf = ctypes.c_uint64(0x77), ctypes.create_string_buffer(b".version 8.0"), open(sys.executable, "rb").read()
code = ctypes.create_string_buffer(elf + b"what follows in memory")
driver.call_driver(5, ctypes.addressof(handle), ctypes.addressof(ptx))
driver.call_driver(5, ctypes.addressof(handle), ctypes.addressof(code))
driver.call_driver(6, ctypes.addressof(handle), 0x77)
driver.launch(0x77, 3, b"arguments", 9)
rows, names, *_, base, blob = _cupti.drain()
rows = [row for row in np.frombuffer(rows, ROW) if row["what"] != What.CONTEXT]
text, machine, found, launched = (row["words"].tolist() for row in rows)
assert (0x77, 1 | 12 << 8) == tuple(text[:2]) and blob[text[3] - base :][:12] == b".version 8.0", text
assert machine[1] & 255 == 2 and machine[1] >> 8 <= len(elf) and machine[3] == (1 << 64) - 1, (machine, len(elf))
assert machine[2] == _cupti.digest(elf[: machine[1] >> 8])
assert (0x77, 0x77) == tuple(found[:2]) and names[found[2] - 1] == b"scale"
assert launched[:5] == [0x77, 3, 5 | 2 << 32 | 1 << 48, 64 | 1 << 32 | 1 << 48, 128], launched
assert blob[launched[5] - base :][: launched[6]] == b"arguments" and names[launched[7] - 1] == b"scale"
driver.launch(0x77, 3, b"again", 5)
(again,) = np.frombuffer(_cupti.drain()[0], ROW)["words"].tolist()
assert again[5] == len(blob), (again, len(blob))  # offsets go on from the beginning of the log
_cupti.watch_launches(0)
driver.launch(0x77, 3, b"again", 5)
assert _cupti.drain() is None
_cupti.watch_launches(2)
for _ in range(600):
    driver.launch(0x77, 3, b"again", 5)
rows = np.frombuffer(_cupti.drain()[0], ROW)
assert 600 == len(rows) and 500 <= np.count_nonzero(rows["stack"]) <= 599, np.count_nonzero(rows["stack"])
assert all(row["words"][4] >> 32 == 4 and row["words"][6] == 0 for row in rows)
"""


def test_launches_are_noted_with_their_arguments_and_code_with_its_image(libcupti):
    done = subprocess.run([sys.executable, "-c", LAUNCHES, libcupti], capture_output=True, text=True, timeout=60)
    assert 0 == done.returncode, done.stderr


PARAMETERS = """
import ctypes, sys
import numpy as np
driver = ctypes.CDLL(sys.argv[2])  # as libcuda.so.1
from cudatool.collect import _cupti
from cudatool.collect.cupti_rows import ROW, What
_cupti.open(sys.argv[1])
def begin():
    _cupti.start({"cuLaunchKernel": (".", False, False, False, 0, True, True, True)}, 1 << 20)
    _cupti.watch_launches(1)

begin()
cupti = ctypes.CDLL(sys.argv[1])
cupti.launch_each.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]
count, size, asked = (kind.in_dll(driver, name) for kind, name in (
    (ctypes.c_size_t, "count"), (ctypes.c_size_t, "size"), (ctypes.c_int, "asked")))
given = np.arange(100, dtype=np.uint64) + 0x0102030405060700

def launched(function):
    "The arguments that the log has of a launch, and how often the driver was asked."
    asked.value = 0
    cupti.launch_each(function, given.ctypes.data, count.value)
    rows, *_, base, blob = _cupti.drain()
    (words,) = (row["words"].tolist() for row in np.frombuffer(rows, ROW) if row["what"] == What.LAUNCH)
    assert not words[4] >> 32, words
    return blob[words[5] - base :][: words[6]], asked.value

def packed(number, bytes_of_each):
    each = [value.tobytes()[:bytes_of_each].ljust(16, b"\\0") for value in given[:number]]
    return b"".join(each)[: 16 * (number - 1) + bytes_of_each] if number else b""

for function in (0x70, 0x71):
    count.value, size.value = 3, 8
    assert launched(function) == (packed(3, 8), 4)
    assert launched(function) == (packed(3, 8), 0), "what is known is not asked again"
    count.value, size.value = 2, 4  # another kernel, of code that was loaded where the first one was
    cupti.load_module()
    assert launched(function) == (packed(2, 4), 3)
    assert launched(function) == (packed(2, 4), 0)
    cupti.load_module()
    count.value = 0
    assert launched(function) == (b"", 1)
    assert launched(function) == (b"", 0)
    cupti.load_module()
    count.value = 60  # more than are kept
    assert launched(function) == launched(function) == (packed(60, 4), 61)
    cupti.load_module()
    count.value = 1
    assert launched(function) == (packed(1, 4), 2)
    _cupti.stop()
    count.value = 2  # what was loaded between two recordings is not seen
    begin()
    assert launched(function) == (packed(2, 4), 3)
"""


def test_a_kernels_parameters_are_asked_for_once_until_more_code_is_loaded(libcupti, tmp_path):
    compiler = which("cc") or which("gcc")
    assert compiler is not None, "which the stand-in for libcupti needs, too"
    driver = tmp_path / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", driver, _HERE / "libcuda.c"]
    subprocess.run(command, check=True, timeout=60)
    done = subprocess.run(
        [sys.executable, "-c", PARAMETERS, libcupti, driver], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


UNFINISHED = """
import ctypes, struct, sys, time
import numpy as np
from cudatool.collect import _cupti
from cudatool.collect.cupti_rows import ROW
_cupti.open(sys.argv[1])
_cupti.start({}, 1 << 20)
_cupti.watch_activity(False)
for start, end in ((0, 0), (100, 0), (100, 250)):
    record = ctypes.create_string_buffer(struct.pack("=II8xQQ", 10, 0, start, end).ljust(200, b"\\0"))
    before = time.monotonic_ns()
    ctypes.CDLL(sys.argv[1]).complete(record)
    row = np.frombuffer(_cupti.drain()[0], ROW)[-1]
    began, ended = map(int, row["words"][:2])
    print(began == int(row["time"]), began if start else began >= before, ended - began)
"""


def test_a_kernel_that_still_runs_when_its_record_is_handed_back_has_no_times_before_all_others(libcupti):
    done = subprocess.run(
        [sys.executable, "-c", UNFINISHED, libcupti], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.splitlines(), done.stderr) == (["True True 0", "True 100 0", "True 100 150"], "")


MANY = """
import ctypes, struct, sys
import numpy as np
from cudatool.collect import _cupti
from cudatool.collect.cupti_rows import ROW, What
_cupti.open(sys.argv[1])
_cupti.start({}, 1 << 20)
_cupti.watch_activity(False)
texts = [ctypes.create_string_buffer(b"kernel %d" % number) for number in range(700)]
addresses = [ctypes.addressof(text) for text in texts]
kernel = "=IIIIQQQIIIiiiiiiiiIIIqQ"  # CUpti_ActivityKernel, up to the name
KINDS = {What.KERNEL: 10, What.COPY: 1, 0: 38}  # 38: overhead, which is no work
given, expected = [], []
for number in range(5000):
    what = list(KINDS)[number % 3]
    if what == What.KERNEL:
        fields = (10, 0, 0, 0, number + 1, number + 2, 0, 0, 0, 7, *[1] * 6, 0, 0, 0, 0, number, 0, addresses[number % 700])
        given.append(struct.pack(kernel, *fields).ljust(200, b"\\0"))
        expected.append((what, number, number + 1, f"kernel {number % 700}"))
    else:
        one = struct.pack("=IBBBBQQQIIII", KINDS[what], 1, 0, 0, 0, 512, number + 1, number + 2, 0, 0, 7, number)
        given.append(one.ljust(200, b"\\0"))
        expected += [(what, number, number + 1, "")] * bool(what)
records = ctypes.create_string_buffer(b"".join(given))
names = []
for new in ("kernel ", "Kernel "):  # another module's names may lie where a former one's did
    for text in texts:
        text[:1] = new[:1].encode()
    ctypes.CDLL(sys.argv[1]).complete_all(records, ctypes.c_size_t(len(given)), ctypes.c_size_t(200))
    data, more, *_ = _cupti.drain()
    names += more
    found = [
        (row["what"], row["correlation"], row["time"], names[row["words"][3] - 1].decode() if row["what"] == What.KERNEL else "")
        for row in np.frombuffer(data, ROW)
    ]
    assert found == [(*one, name.replace("kernel ", new)) for *one, name in expected], (len(found), found[:3])
"""


def test_all_records_of_work_of_a_buffer_are_noted_in_order_with_their_names(libcupti):
    done = subprocess.run([sys.executable, "-c", MANY, libcupti], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


FORCED = """
import ctypes, sys
from cudatool.collect import _cupti
_cupti.open(sys.argv[1])
request = ctypes.CDLL(sys.argv[1]).request
request.restype = ctypes.c_void_p
def begin():
    _cupti.start({}, 1 << 20)
    _cupti.watch_activity(False)
begin()
handed_back = request()
_cupti.flush(True)  # before the work has ended, which CUPTI will write there
later = {request() for _ in range(50)}
assert handed_back not in later
_cupti.flush(False)  # hands back nothing
_cupti.stop()
begin()
assert handed_back == request()
used = set()
for _ in range(300):  # a recording of days is triggered often
    used.add(request())
    _cupti.flush(True)
assert 60 < len(used) < 70, len(used)
_cupti.stop()
"""


def test_a_buffer_that_a_forced_flush_handed_back_is_used_again_by_a_later_recording_or_after_many_others(libcupti):
    done = subprocess.run([sys.executable, "-c", FORCED, libcupti], capture_output=True, text=True, timeout=60)
    assert 0 == done.returncode, done.stderr


OTHERS = """
import ctypes, sys
import numpy as np
from cudatool.collect import _cupti
from cudatool.collect.cupti_rows import ROW, What
driver_path, torch, *libraries = sys.argv[1:]
CHOSEN = {"cuLaunchKernel": (".", False, False, False, 0, True, True, True)}
_cupti.open(driver_path)
_cupti.start(CHOSEN, 1 << 20)
_cupti.watch_launches(1)
driver = ctypes.CDLL(driver_path)
of_torch, bundled, nccl, extension = map(ctypes.CDLL, libraries)
launch = ctypes.cast(driver.launch, ctypes.c_void_p)

def functions():
    rows = np.frombuffer(_cupti.drain()[0], ROW)
    return rows["words"][rows["what"] == What.LAUNCH][:, 0].tolist()

def calls():
    of_torch.call(launch, ctypes.c_uint64(1))
    of_torch.call_through(nccl.call, launch, ctypes.c_uint64(2))
    nccl.call_through(of_torch.call, launch, ctypes.c_uint64(3))
    bundled.call(launch, ctypes.c_uint64(4))
    nccl.call(launch, ctypes.c_uint64(5))
    driver.launch(ctypes.c_uint64(6), ctypes.c_uint64(3), b"arguments", ctypes.c_size_t(9))
    of_torch.call_through(extension.call, launch, ctypes.c_uint64(20))
    extension.call_through(of_torch.call, launch, ctypes.c_uint64(21))

calls()
assert functions() == [1, 2, 3, 4, 5, 6, 20, 21]
assert _cupti.leave_out(torch)
for _ in range(2):  # once more with what is known of addresses
    calls()
    assert functions() == [4, 5, 6, 20], "all that PyTorch's own libraries do not call, or have NVIDIA's call"
# A callback of Python's in the middle of PyTorch: what it calls is the program's.
called = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)
of_torch.call(called(lambda *_: nccl.call(launch, ctypes.c_uint64(7))), ctypes.c_uint64(0))
_cupti.mark_inside(1)
_cupti.mark_inside(1)
nccl.call(launch, ctypes.c_uint64(8))
_cupti.mark_inside(-1)
nccl.call(launch, ctypes.c_uint64(9))
_cupti.mark_inside(-1)
_cupti.mark_inside(-1)  # of what began before the recording
nccl.call(launch, ctypes.c_uint64(10))
assert functions() == [7, 10]
_cupti.mark_inside(1)
_cupti.stop()
_cupti.start(CHOSEN, 1 << 20)  # another recording
_cupti.watch_launches(1)
nccl.call(launch, ctypes.c_uint64(11))
_cupti.leave_out(None)
of_torch.call(launch, ctypes.c_uint64(12))
assert functions() == [11, 12]
"""


def test_beside_pytorch_the_calls_of_its_libraries_and_operators_are_left_out_and_no_others(libcupti, tmp_path):
    compiler = which("cc") or which("gcc")
    assert compiler is not None, "which the stand-in for libcupti needs, too"
    torch = tmp_path / "site-packages" / "torch"
    libraries = [torch / "lib" / "libtorch_cuda.so", torch / "lib" / "libcublas.so.13", tmp_path / "libnccl.so.2"]
    libraries.append(tmp_path / "flash_attn.cpython-312-x86_64-linux-gnu.so")
    (torch / "lib").mkdir(parents=True)
    for library in libraries:
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, _HERE / "caller.c"], check=True, timeout=60)
    (tmp_path / "link").symlink_to(torch)  # a path is that of the file
    command = [sys.executable, "-c", OTHERS, libcupti, tmp_path / "link", *libraries]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


class _Optimizer:
    pass


class _Adam(_Optimizer):
    pass


class _Claims:
    """Says that it is of another type, as proxies do: its code must not run."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise AssertionError("the program's code ran")


def test_objects_of_a_type_and_those_derived_from_it_are_found() -> None:
    adam, optimizer, claims = _Adam(), _Optimizer(), _Claims()
    for one in (adam, optimizer, claims):
        vars(one)["kept"] = []  # so that the collector knows it
    assert {id(adam), id(optimizer)} == set(map(id, _cupti.instances(_Optimizer)))
    assert [adam] == _cupti.instances(_Adam)
    with pytest.raises(TypeError, match="a type is needed, not 1"):
        _cupti.instances(1)  # type: ignore[arg-type]


def test_no_other_threads_object_lives_longer_when_objects_are_looked_for() -> None:
    """A tensor that did would keep its memory, and the program's next one take more from the driver."""

    class Tensor:
        def __init__(self) -> None:
            self.own = {"known": "to the collector"}

    kept, rounds, over = 0, 0, threading.Event()

    def work() -> None:
        nonlocal kept, rounds
        while not over.is_set():
            tensor = Tensor()
            known = weakref.ref(tensor)
            del tensor
            kept += known() is not None
            rounds += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while rounds < 20_000 and time.monotonic() < deadline:
            _cupti.instances(_Optimizer)
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert rounds >= 20_000
    assert kept == 0
