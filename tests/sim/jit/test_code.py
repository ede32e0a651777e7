"""Native code: which is kept for which processor, and loading it with LLVM's library and without."""

from __future__ import annotations

import platform
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cudatool.sim import jit
from cudatool.sim.jit import code, native
from cudatool.sim.jit.translation import Variant
from cudatool.sim.jit.translator import translated

on_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="LLVM links code for other processors")

# A table of constants, a function outside of the code (cudatool_vprintf), and one that a compiler calls (memset).
SOURCE = """extern "C" __global__ void k(int *out) {
    const int table[] = {3, 1, 4, 1, 5, 9, 2, 6};
    __shared__ int some[1024];
    for (int i = 0; i < 1024; i++) some[i] = 0;
    if (threadIdx.x > 1000) printf("%d", out[0]);
    out[threadIdx.x] = table[threadIdx.x % 8] + some[threadIdx.x];
}"""
EXPECTED = [3, 1, 4, 1, 5, 9, 2, 6] * 4


@pytest.fixture
def kernel(ptx_of) -> jit.JitKernel:
    return jit.load(ptx_of(SOURCE)).kernels["k"]


def run(kernel: jit.JitKernel, launch: Callable[..., None], *, optimized: bool) -> list[int]:
    out = np.zeros(32, "i4")
    launch(kernel, 1, 32, out, optimized=optimized)
    return out.tolist()


@on_x86_64
@pytest.mark.parametrize("optimized", [False, True])
def test_code_is_linked_without_llvm(monkeypatch, kernel, launch, optimized: bool) -> None:
    monkeypatch.delattr(native, "load_object")
    assert EXPECTED == run(kernel, launch, optimized=optimized)


@pytest.mark.parametrize("optimized", [False, True])
def test_llvm_links_what_is_not_known(monkeypatch, kernel, launch, optimized: bool) -> None:
    by_llvm = []
    load = native.load_object
    monkeypatch.setattr(native, "load_object", lambda data: by_llvm.append(data) or load(data))
    monkeypatch.setattr(code, "_X86_64", b"none")
    assert EXPECTED == run(kernel, launch, optimized=optimized)
    assert 1 == len(by_llvm)


def sections(data: bytes) -> list[int]:
    """Return where the headers of an object's sections are."""
    (at,), (size, count) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HH", data, 58)
    return [at + number * size for number in range(count)]


def with_other_relocation(data: bytearray) -> None:
    tables = [at for at in sections(data) if struct.unpack_from("<I", data, at + 4) == (4,)]
    for at in tables:
        (offset,) = struct.unpack_from("<Q", data, at + 24)
        struct.pack_into("<I", data, offset + 8, 2)  # R_X86_64_PC32


def with_variable(data: bytearray) -> None:
    at = next(at for at in sections(data) if struct.unpack_from("<Q", data, at + 8)[0] & 4)  # executable
    (flags,) = struct.unpack_from("<Q", data, at + 8)
    struct.pack_into("<Q", data, at + 8, flags | 1)  # SHF_WRITE


def with_unknown_function(data: bytearray) -> None:
    at = data.index(b"cudatool_vprintf\0")
    data[at : at + 16] = b"cudatool_unknown"


def without_entry(data: bytearray) -> None:
    at = data.index(b"\0grid\0")
    data[at + 1 : at + 5] = b"gird"


@on_x86_64
@pytest.mark.parametrize("change", [with_other_relocation, with_variable, with_unknown_function, without_entry])
def test_what_is_not_known_is_not_linked(monkeypatch, kernel, change: Callable[[bytearray], None]) -> None:
    data = bytearray(translated(kernel.text, Variant(jit.Instrument.NONE, optimized=False))[16:])
    by_llvm = code.Code(None, 0)
    monkeypatch.setattr(native, "load_object", lambda data: by_llvm)
    assert code.load_object(bytes(data)) is not by_llvm
    change(data)
    assert code.load_object(bytes(data)) is by_llvm


CPUINFO = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC
cpu MHz\t\t: 2400.000
flags\t\t: fpu avx avx2

processor\t: 1
"""


def key_on(monkeypatch, tmp_path: Path, cpuinfo: str) -> str:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(code, "_CPUINFO", str(tmp_path / "cpuinfo"))
    monkeypatch.setattr(code, "_processor", code._processor.__wrapped__)
    return code.cache_key("k")


@pytest.mark.parametrize(
    ("old", "new", "is_another"),
    [("2400.000", "3600.000", False), ("avx2", "avx2 avx512f", True), ("EPYC", "Ryzen", True), ("25", "26", True)],
)
def test_code_is_kept_for_one_kind_of_processor(tmp_path, old: str, new: str, is_another: bool) -> None:
    keys = []
    for text in (CPUINFO, CPUINFO.replace(old, new)):
        with pytest.MonkeyPatch.context() as patch:
            keys.append(key_on(patch, tmp_path, text))
    assert is_another == (keys[0] != keys[1])


@pytest.mark.parametrize(
    ("words", "is_another"), [("Mitigation: Microcode\n", False), ("Not affected\n", True), (None, True)]
)
def test_code_is_kept_for_gathers_of_one_speed(tmp_path, words: str | None, is_another: bool) -> None:
    keys = []
    for number, text in enumerate(("Mitigation: Microcode\n", words)):
        place = tmp_path / str(number)
        if text is not None:
            place.write_text(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(code, "_GATHER_MITIGATION", str(place))
            patch.setattr(code, "gather_mitigation", code.gather_mitigation.__wrapped__)
            keys.append(code.cache_key("k"))
    assert is_another == (keys[0] != keys[1])


@pytest.mark.parametrize("cpuinfo", ["", "processor\t: 0\n\n", "processor : 0\nmodel name : EPYC\n"])
def test_llvm_is_asked_where_linux_does_not_say_what_the_processor_can_do(monkeypatch, tmp_path, cpuinfo: str) -> None:
    keys = []
    for features in ("+avx2", "+avx512f"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "processor", lambda features=features: features)
            keys.append(key_on(patch, tmp_path, cpuinfo))
    assert keys[0] != keys[1]
