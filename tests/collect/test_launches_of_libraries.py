"""What a launch on a GPU is found to access: its arguments, as CUPTI's log has them, and the PTX of its code."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from cudatool.collect import _cupti, gpu_launches
from cudatool.collect.gpu_launches import Launches, LaunchRowFlag, Pointed
from cudatool.collect.live_memory import LiveMemory
from cudatool.collect.loaded_code import ImageKind, LoadedCode
from cudatool.trace.events import AccessFlag

PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry copy(.param .u64 to, .param .u64 from, .param .u32 n)
{
    .reg .b64 %rd<5>;
    .reg .f32 %f<2>;
    ld.param.u64 %rd1, [to];
    ld.param.u64 %rd2, [from];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    ld.global.f32 %f1, [%rd4];
    st.global.f32 [%rd3], %f1;
    ret;
}
"""
MODULE, FUNCTION, KERNEL, LIBRARY = 0x100, 0x200, 0x300, 0x400
TO, FROM = 1 << 40, 2 << 40
READ, WRITE = AccessFlag.READ | AccessFlag.INEXACT, AccessFlag.WRITE | AccessFlag.INEXACT


def arguments(to: int = TO + 16, source: int = FROM) -> bytes:
    return struct.pack("<QQI", to, source, 3)


@pytest.fixture
def launches():
    found = Launches({}.get)
    found.code.loaded(MODULE, ImageKind.TEXT, 0, PTX)
    found.code.found(FUNCTION, MODULE, "copy")
    return found


@pytest.fixture
def memory():
    device = LiveMemory()
    device.add(TO, 4096)
    device.add(FROM, 512)
    return device


def test_a_launch_touches_the_allocations_that_its_pointers_lie_in(launches, memory):
    found = launches.judge(FUNCTION, "copy", 0, arguments(), (memory,))
    assert [(TO, 4096, WRITE), (FROM, 512, READ)] == list(found.accesses)
    assert not found.doubts and not found.flags


def test_a_block_of_a_pool_counts_rather_than_the_whole_allocation(launches, memory):
    launches.blocks.add(TO, 128)
    assert (TO, 128, WRITE) in launches.judge(FUNCTION, "copy", 0, arguments(), (memory,)).accesses
    launches.blocks.remove(TO)
    assert (TO, 4096, WRITE) in launches.judge(FUNCTION, "copy", 0, arguments(), (memory,)).accesses


def test_a_pointer_to_no_known_memory_is_a_doubt(launches, memory):
    found = launches.judge(FUNCTION, "copy", 0, arguments(source=3 << 40), (memory,))
    assert "unknown address" == found.doubts
    assert [(TO, 4096, WRITE)] == list(found.accesses)


@pytest.mark.parametrize("case", ["other function", "no arguments", "flagged", "machine code"])
def test_nothing_is_said_of_what_is_not_known(launches, memory, case):
    function, given, flags = FUNCTION, arguments(), 0
    if case == "other function":
        function = 0x999
    elif case == "no arguments":
        given = None
    elif case == "flagged":
        flags = LaunchRowFlag.ARGUMENTS_UNKNOWN
    else:
        launches.code.loaded(MODULE, ImageKind.MACHINE_CODE, 77, None)
    found = launches.judge(function, "copy", flags, given, (memory,))
    assert ((), "") == (tuple(found.accesses), found.doubts)


def test_arguments_that_are_too_few_for_the_kernel_say_nothing(launches, memory):
    assert () == tuple(launches.judge(FUNCTION, "copy", 0, arguments()[:8], (memory,)).accesses)


def test_machine_code_has_the_ptx_that_its_compiler_kept():
    code = LoadedCode({77: PTX}.get)
    code.loaded(MODULE, ImageKind.MACHINE_CODE, 77, None)
    code.found(FUNCTION, MODULE, "copy")
    assert ["to", "from", "n"] == [one.name for one in code.kernel(FUNCTION, "copy").accesses.parameters]


def test_a_function_of_a_kernel_and_a_module_of_a_library_are_followed():
    code = LoadedCode({}.get)
    code.loaded(LIBRARY, ImageKind.TEXT, 0, PTX)
    code.found(KERNEL, LIBRARY, "copy")
    code.same(FUNCTION, KERNEL)
    code.same(MODULE, LIBRARY)
    code.found(0x201, MODULE, "copy")
    assert code.kernel(FUNCTION, "") is code.kernel(FUNCTION, "") is not None
    assert code.kernel(0x201, "") is not None


def test_handles_of_unloaded_code_are_forgotten():
    code = LoadedCode({}.get)
    code.loaded(MODULE, ImageKind.TEXT, 0, PTX)
    code.found(FUNCTION, MODULE, "copy")
    assert code.kernel(FUNCTION, "copy") is not None
    code.unloaded(MODULE)
    assert code.kernel(FUNCTION, "copy") is None


def test_a_module_loaded_from_a_file_has_the_files_ptx(tmp_path):
    (tmp_path / "copy.ptx").write_bytes(PTX)
    code = LoadedCode({}.get)
    code.loaded_from(MODULE, str(tmp_path / "copy.ptx"), _cupti.digest)
    code.found(FUNCTION, MODULE, "copy")
    assert code.kernel(FUNCTION, "copy") is not None


def test_damaged_ptx_is_no_error_but_unknown():
    code = LoadedCode({}.get)
    code.loaded(MODULE, ImageKind.TEXT, 0, b".version nonsense {")
    code.found(FUNCTION, MODULE, "copy")
    assert code.kernel(FUNCTION, "copy") is None


def test_live_memory_finds_what_a_brute_search_finds():
    random = np.random.default_rng(7)
    memory, live = LiveMemory(), {}
    for _ in range(2000):
        start = int(random.integers(0, 64)) * 100
        if start in live and random.random() < 0.5:
            assert live.pop(start) == memory.remove(start)
        else:
            live[start] = int(random.integers(1, 101))
            memory.add(start, live[start])
        address = int(random.integers(0, 6500))
        expected = [(start, size) for start, size in live.items() if start <= address < start + size]
        assert expected == ([found] if (found := memory.find(address)) else [])
    assert memory.remove(99) is None


def test_bytes_are_found_by_their_offset_from_the_beginning_of_the_log():
    pointed = Pointed()
    pointed.add(0, b"abcdef")
    pointed.add(6, b"ghi")
    assert (b"bc", b"", b"ghi") == (pointed.find(1, 2), pointed.find(6, 0), pointed.find(6, 3))
    assert pointed.find(1, 2) is None  # was read: rows come in the order of their offsets
    assert pointed.find((1 << 64) - 1, 4) is None


def test_of_a_module_with_many_kernels_only_the_one_that_runs_is_read():
    """A text after which no other kernel's body can be parsed: only this one's is."""
    others = b"".join(
        PTX[PTX.index(b".visible") :]
        .replace(b"copy", b"k%d" % n)
        .replace(b"ld.global.f32", b'// a comment with }\n{\n}\n.pragma "}"; no such thing')
        for n in range(3)
    )
    for text in (PTX + others, PTX[: PTX.index(b".visible")] + others + PTX[PTX.index(b".visible") :]):
        code = LoadedCode({}.get)
        code.loaded(MODULE, ImageKind.TEXT, 0, text)
        code.found(FUNCTION, MODULE, "copy")
        code.found(FUNCTION + 1, MODULE, "k1")
        assert ["to", "from", "n"] == [one.name for one in code.kernel(FUNCTION, "copy").accesses.parameters]
        assert code.kernel(FUNCTION + 1, "k1") is None


def test_a_judgement_is_used_again_only_while_the_pointers_point_to_the_same_pieces(launches, memory, monkeypatch):
    """Against what is inferred anew each time, for random arguments and memory that comes and goes."""
    random = np.random.default_rng(3)
    made = []
    judge = gpu_launches.accesses_of_launch
    monkeypatch.setattr(gpu_launches, "accesses_of_launch", lambda *facts: made.append(1) or judge(*facts))
    for _ in range(500):
        if random.random() < 0.1:
            (memory.remove if TO in memory else lambda start: memory.add(start, 4096))(TO)
        if random.random() < 0.1:
            launches.blocks.add(TO, int(random.integers(1, 3)) * 128)
        pointers = [int(random.choice([TO, TO + 200, FROM, 7, 3 << 40])) for _ in range(2)]
        flags = int(random.choice([0, LaunchRowFlag.PROGRAMMATIC]))
        anew = Launches({}.get)
        anew.code, anew.blocks = launches.code, launches.blocks
        given = flags, arguments(*pointers), (memory,)
        assert anew.judge(FUNCTION, "copy", *given) == launches.judge(FUNCTION, "copy", *given)
    assert len(made) < 600  # 500 of them anew
