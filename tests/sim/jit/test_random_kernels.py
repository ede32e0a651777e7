"""Random kernels of integer instructions, compared with a reference interpreter bit for bit.

Seeds are part of the tests' names; ``CUDATOOL_TEST_SEED=N`` moves all of them by N. ``random_kernels.py`` compares
kernels of all instructions with a GPU.
"""

from __future__ import annotations

import ctypes
import os
from functools import partial

import integer_interpreter
import numpy as np
import pytest
from random_kernels import EXACT, FORMS, WORDS, Form, inputs, instruction_kernel, module_of, program_kernel

from cudatool.sim import jit
from cudatool.sim.jit import Instrument

THREADS = 64
FIRST = int(os.environ.get("CUDATOOL_TEST_SEED", "0"))


def _is_integer(form: Form) -> bool:
    return all(
        name == "pred" or name[0] in "us" or name in ("b16", "b32", "b64") for name in (form.result, *form.sources)
    )


INTEGER = [form for form in EXACT if _is_integer(form)]
ALONE = [form for form in FORMS if _is_integer(form)]


@pytest.fixture(params=[True, False], ids=["optimized", "not optimized"])
def launch(launch, request):
    """Launch a kernel in each of the two forms of its native code."""
    return partial(launch, optimized=request.param)


def check(launch, text: str, seed: int) -> None:
    """Run a kernel on the software device and by the reference interpreter; both must write the same."""
    given = inputs(seed, THREADS)
    out, counters = np.zeros((THREADS, WORDS), "u4"), np.zeros(WORDS, "u4")
    memory = bytearray(given.tobytes() + out.tobytes() + counters.tobytes())
    places = {"in": 0, "out": given.nbytes, "counters": 2 * given.nbytes}
    integer_interpreter.run(text, places, memory, THREADS)
    launch(jit.load(module_of([text]).encode()).kernels["k"], 1, THREADS, given, out, counters)
    assert memory[given.nbytes :] == bytearray(out.tobytes() + counters.tobytes())


@pytest.mark.some_of("seed", range(FIRST, FIRST + 12), 2)
def test_random_programs_write_what_the_reference_does(launch, seed):
    check(launch, program_kernel(seed, "k", INTEGER, THREADS), seed)


@pytest.mark.some_of("seed", range(FIRST, FIRST + 12), 2)
def test_random_forms_write_what_the_reference_does(launch, seed):
    form = ALONE[seed * 7919 % len(ALONE)]
    check(launch, instruction_kernel(seed, "k", form, THREADS), 2 * seed + 1)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 2))
def test_random_programs_do_the_same_under_the_checkers_which_find_nothing(seed):
    text = program_kernel(seed, "k", EXACT, THREADS)
    kernel = jit.load(module_of([text]).encode()).kernels["k"]
    given = inputs(seed, THREADS)
    whole = np.zeros(4 * 4096, np.uint8)
    memory = whole[-whole.ctypes.data % 4096 :][: 3 * 4096]
    starts = memory[:4096], memory[4096:8192], memory[8192:]  # inputs and outputs take a page each
    params = (ctypes.c_uint64 * 3)(*(part.ctypes.data for part in starts))
    outputs, found = [], []
    for kinds in (Instrument.NONE, ~Instrument.FOOTPRINT):
        memory[:] = 0
        starts[0][:] = given.view(np.uint8).ravel()
        shadow = jit.Shadow(memory.ctypes.data, memory.nbytes, kinds)
        shadow.allocated(memory.ctypes.data, memory.nbytes)
        shadow.written(memory.ctypes.data, memory.nbytes)
        found += kernel.launch(
            jit.LaunchShape((1, 1, 1), (THREADS, 1, 1)), ctypes.addressof(params), jit.LaunchOptions(shadow=shadow)
        )
        outputs.append(memory.tobytes())
    assert outputs[0] == outputs[1]
    assert [] == found
