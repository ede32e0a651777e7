"""The PTX of machine code that compilers of a process make, as a recording on a GPU needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cudatool.collect import _cupti
from cudatool.collect.kept_ptx import KeptPtx

COMPILED = """
from cudatool.collect import _cupti
from cudatool.collect.kept_ptx import KeptPtx
kept = KeptPtx()
kept.start()
from cuda.bindings import nvrtc

def compiled(source):
    _, program = nvrtc.nvrtcCreateProgram(source, b"k.cu", 0, [], [])
    assert not nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90"])[0]
    code = bytearray(nvrtc.nvrtcGetCUBINSize(program)[1])
    assert not nvrtc.nvrtcGetCUBIN(program, code)[0]
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(code)

code = compiled(b'extern "C" __global__ void one(int* x) { *x = 1; }')
assert code.startswith(b"\\x7fELF"), code[:20]
ptx = kept.find(_cupti.digest(code))
assert b".entry one" in ptx and not ptx.endswith(b"\\0"), ptx
assert KeptPtx().find(_cupti.digest(code)) == ptx  # another process's, from the disk
kept.stop()
code = compiled(b'extern "C" __global__ void two(int* x) { *x = 2; }')
assert code.startswith(b"\\x7fELF") and kept.find(_cupti.digest(code)) is None
kept.start()
code = compiled(b'extern "C" __global__ void three(int* x) { *x = 3; }')
assert b".entry three" in kept.find(_cupti.digest(code))
"""


def test_nvrtc_gives_the_program_machine_code_and_us_its_ptx(tmp_path):
    environment = os.environ | {"CUDATOOL_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=120
    )
    assert 0 == done.returncode, done.stderr


WITH_PYTORCH = """
import ctypes, os, sys, types
sys.modules["torch"] = types.ModuleType("torch")
from cudatool.collect.kept_ptx import KeptPtx
kept = KeptPtx()
kept.start()
from cuda.bindings import nvrtc
assert not nvrtc.nvrtcVersion()[0]
with open("/proc/self/maps") as maps:
    loaded = {os.path.basename(line.split()[-1]) for line in maps if "libnvrtc" in line}
assert loaded and not any(name.startswith("_libnvrtc") for name in loaded), loaded
"""


def test_nothing_stands_in_for_nvrtc_in_a_program_with_pytorch(tmp_path):
    environment = os.environ | {"CUDATOOL_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", WITH_PYTORCH], env=environment, capture_output=True, text=True, timeout=120
    )
    assert 0 == done.returncode, done.stderr


STANDS_IN = """
import ctypes, re
from cudatool.collect import kept_ptx
from cudatool.loading.shared_libraries import wheel_library
real = wheel_library("libnvrtc.so.13")
kept_ptx._watch_nvrtc(None)
names = {name.decode() for name in re.findall(rb"\\0(_*nvrtc[A-Z]\\w*)(?=\\0)", real.read_bytes())}
exported = {name for name in names if hasattr(ctypes.CDLL(str(real)), name)}
assert "nvrtcGetCUBIN" in exported and "__nvrtcCPEx" in exported, names
assert not (missing := {name for name in exported if not hasattr(kept_ptx._library, name)}), missing
"""


def test_what_stands_in_for_nvrtc_has_its_undocumented_functions_which_cudnn_needs():
    done = subprocess.run([sys.executable, "-c", STANDS_IN], capture_output=True, text=True, timeout=120)
    assert 0 == done.returncode, done.stderr


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDATOOL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("cudatool.collect.kept_ptx._watch_nvrtc", lambda module: None)
    found = KeptPtx()
    yield found
    found.stop()


@pytest.mark.parametrize("before", [None, "/home/me/.cupy"])
def test_cupy_has_a_folder_of_its_own_while_recorded(kept, monkeypatch, before):
    if before is None:
        monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    else:
        monkeypatch.setenv("CUPY_CACHE_DIR", before)
    kept.start()
    assert os.environ["CUPY_CACHE_DIR"].endswith(os.path.join("cache", "cupy"))
    kept.stop()
    assert before == os.environ.get("CUPY_CACHE_DIR")


def test_numbas_code_has_the_ptx_that_numba_linked(kept, monkeypatch):
    class CUDACodeLibrary:
        def get_cubin(self, cc=None):
            return SimpleNamespace(code=b"machine code")

        def get_asm_str(self, cc=None):
            return ".entry numbas"

    original = CUDACodeLibrary.get_cubin
    monkeypatch.setitem(sys.modules, "numba.cuda.codegen", SimpleNamespace(CUDACodeLibrary=CUDACodeLibrary))
    kept.start()
    assert b"machine code" == CUDACodeLibrary().get_cubin((9, 0)).code
    assert b".entry numbas" == kept.find(_cupti.digest(b"machine code"))
    kept.stop()
    assert original is CUDACodeLibrary.get_cubin


def test_tritons_code_has_the_ptx_that_triton_assembled(kept, monkeypatch):
    class CompiledKernel:
        def __init__(self, asm):
            self.asm = asm

    monkeypatch.setitem(sys.modules, "triton.compiler.compiler", SimpleNamespace(CompiledKernel=CompiledKernel))
    original = CompiledKernel.__init__
    kept.start()
    CompiledKernel({"cubin": b"triton's machine code", "ptx": ".entry tritons"})
    assert b".entry tritons" == kept.find(_cupti.digest(b"triton's machine code"))
    CompiledKernel({"hsaco": b"of another device"})
    kept.stop()
    assert CompiledKernel.__init__ is original


def test_cupys_code_has_the_ptx_of_the_same_program(kept, monkeypatch):
    nvrtc = SimpleNamespace(
        getCUBIN=lambda program: b"machine code %d" % program, getPTX=lambda program: b".entry of_%d\0" % program
    )
    original = nvrtc.getCUBIN
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", nvrtc)
    kept.start()
    assert b"machine code 7" == nvrtc.getCUBIN(7)
    assert b".entry of_7" == kept.find(_cupti.digest(b"machine code 7"))
    assert b".entry of_7" == kept.find(_cupti.digest(b"machine code 7\0"))  # CuPy cuts the last byte off
    kept.stop()
    assert original is nvrtc.getCUBIN


def test_a_failure_to_keep_cupys_ptx_does_not_reach_the_program(kept, monkeypatch):
    def fails(program):
        raise RuntimeError("no PTX")

    nvrtc = SimpleNamespace(getCUBIN=lambda program: b"machine code", getPTX=fails)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", nvrtc)
    kept.start()
    assert b"machine code" == nvrtc.getCUBIN(7)
    assert kept.find(_cupti.digest(b"machine code")) is None
