"""Compare the stacks that _cupti takes of itself with Python's own, in a program that calls in every way.

python stacks.py EXTENSION LIBCUPTI SEED
"""

from __future__ import annotations

import ctypes
import importlib.util
import random
import sys
import threading
import types
from functools import partial

extension, libcupti, seed = sys.argv[1:]
spec = importlib.util.spec_from_file_location("_cupti", extension)
assert spec is not None and spec.loader is not None
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
native.open(libcupti)
native.start({"cuEventRecord": ("qq", False, False, False, 0, False)}, 1 << 20)
call_driver = ctypes.CDLL(libcupti).call_driver
call_driver.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
draw = random.Random(int(seed))
expected: list[list[tuple[str, str, int]]] = []
lock = threading.Lock()
MOST_FRAMES = 256  # of _cupti_stacks.h


def look() -> None:
    with lock:
        stack: list[tuple[str, str, int]] = []
        frame: types.FrameType | None = sys._getframe()
        while frame is not None:
            stack.append((frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno))
            frame = frame.f_back
        call_driver(1, len(expected), 0)
        stack[0] = (*stack[0][:2], stack[0][2] + 2)  # the line of the call, not that of the look at this frame
        expected.append(stack)


def deeper(left: int) -> None:
    if left and draw.random() < 0.5:
        deeper(left - 1)
    elif left:
        other(left - 1)
    look()


def other(left: int) -> None:
    list(generated(left))
    (lambda: deeper(left))()


def generated(left: int):
    yield look()
    if left:
        yield deeper(left - 1)


def made(number: int) -> None:
    """Run a function that was made just now: its code gets the memory of one that is gone."""
    text = "\n" * draw.randrange(50) + "def new(look):\n    look()\n    look()\n"
    space: dict[str, types.FunctionType] = {}
    exec(compile(text, f"<made {number}>", "exec"), space)
    space["new"](look)


class Thing:
    def method(self) -> None:
        deeper(2)

    @property
    def prop(self) -> None:
        return look()


def down(left: int) -> None:
    """Look at stacks around the most frames that one has, on the way down and back."""
    if left % 7 == 0:
        look()
    if left:
        down(left - 1)
        look()


def from_c(left: int) -> None:
    """Call from C, once or twice as deep in its stack."""
    keys = [lambda _: deeper(left) or 0, lambda _: sorted([0], key=lambda _: look() or 0)]
    sorted([0, 1], key=draw.choice(keys))


def work(count: int) -> None:
    for number in range(count):
        ways = [lambda: deeper(draw.randrange(9)), partial(made, number), Thing().method, lambda: Thing().prop]
        ways += [partial(from_c, draw.randrange(4)), partial(down, draw.choice([3, 30, 247, 255, 300]))]
        draw.choice(ways)()


work(300)
threads = [threading.Thread(target=work, args=(60,)) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
rows, _, frames, stacks, _, lost, *_ = native.drain()
native.stop()
assert not lost
known = [(*(part.decode() for part in key[4:].split(b"\0")), int.from_bytes(key[:4], "little")) for key in frames]
checked = wrong = 0
for at in range(0, len(rows), 96):
    row = rows[at : at + 96]
    if int.from_bytes(row[8:10], "little") != 1:  # no call
        continue
    number, index = int.from_bytes(row[20:24], "little"), int.from_bytes(row[32:40], "little")
    _, _, *found = memoryview(stacks[number - 1]).cast("I").tolist()
    checked += 1
    wanted = expected[index][: max(len(found), MOST_FRAMES - 6)]  # the interpreter's own frames count, too
    wrong += [known[one - 1] for one in found] != wanted
print(f"{checked} stacks, {wrong} wrong")
sys.exit(bool(wrong) or checked != len(expected))
