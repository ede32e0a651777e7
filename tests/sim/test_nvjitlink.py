"""nvJitLink on the software device: real diagnostics, and PTX where machine code is asked for."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from functools import cache

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvjitlink", reason="cuda.bindings has no nvJitLink")

CALLEE = 'extern "C" __device__ int f(int x) { return 3 * x + 1; }'
CALLER = """extern "C" __device__ int f(int);
extern "C" __device__ int offset = 5;
extern "C" __global__ void kernel(int *p) { p[threadIdx.x] = f(p[threadIdx.x]) + offset; }"""
CUBIN = b"\x7fELF\x02\x01\x01".ljust(18, b"\0") + struct.pack("<H", 190) + bytes(44)


@pytest.fixture(scope="module")
def nvjitlink():
    from cudatool import _driver

    _driver.initialize()
    from cuda.bindings import nvjitlink

    try:
        nvjitlink.version()
    except Exception as error:
        if "DynamicLibNotFound" not in type(error).__name__:
            raise
        pytest.skip("nvJitLink is not installed")
    return nvjitlink


@cache
def compiled(source: str, kind: str) -> bytes:
    """Compile CUDA C++ to ``"PTX"`` or ``"LTOIR"``, relocatable."""
    from cuda.bindings import nvrtc

    options = [b"-arch=sm_90", b"-rdc=true", *([b"-dlto"] if kind == "LTOIR" else [])]
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, [], [])
    assert 0 == error
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert 0 == error
    _, size = getattr(nvrtc, f"nvrtcGet{kind}Size")(program)
    data = b" " * size
    getattr(nvrtc, f"nvrtcGet{kind}")(program, data)
    return data


class Link:
    """A link that is destroyed at the end of the block."""

    def __init__(self, nvjitlink, *options: str) -> None:
        self.nvjitlink = nvjitlink
        self.handle = nvjitlink.create(1 + len(options), ["-arch=sm_90", *options])

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.nvjitlink.destroy(self.handle)

    def add(self, kind: str, data: bytes, name: str = "input") -> None:
        self.nvjitlink.add_data(self.handle, getattr(self.nvjitlink.InputType, kind), data, len(data), name)

    def complete(self) -> None:
        self.nvjitlink.complete(self.handle)

    def get(self, what: str) -> bytes:
        buffer = bytearray(getattr(self.nvjitlink, f"get_{what}_size")(self.handle))
        getattr(self.nvjitlink, f"get_{what}")(self.handle, buffer)
        return bytes(buffer)


def result_of(driver, ok, image: bytes) -> list[int]:
    """Load an image and return what its kernel makes of 0, 1, 2, 3."""
    module = ok(driver.cuModuleLoadData(image))
    function = ok(driver.cuModuleGetFunction(module, b"kernel"))
    values = np.arange(4, dtype=np.int32)
    memory = ok(driver.cuMemAlloc(values.nbytes))
    ok(driver.cuMemcpyHtoD(memory, values, values.nbytes))
    ok(driver.cuLaunchKernel(function, 1, 1, 1, 4, 1, 1, 0, 0, ((int(memory),), (ctypes.c_void_p,)), 0))
    ok(driver.cuMemcpyDtoH(values, memory, values.nbytes))
    ok(driver.cuMemFree(memory))
    ok(driver.cuModuleUnload(module))
    return values.tolist()


@pytest.mark.parametrize(("caller", "callee"), [("PTX", "PTX"), ("LTOIR", "LTOIR"), ("LTOIR", "PTX"), ("PTX", "LTOIR")])
def test_linked_modules_run(nvjitlink, driver, ok, caller, callee):
    with Link(nvjitlink, *(["-lto"] if "LTOIR" in (caller, callee) else [])) as link:
        link.add(caller, compiled(CALLER, caller))
        link.add(callee, compiled(CALLEE, callee))
        link.complete()
        image = link.get("linked_cubin")
    assert [6, 9, 12, 15] == result_of(driver, ok, image)


def test_ptx_uses_variables_and_functions_of_ltoir(nvjitlink, driver, ok):
    caller = CALLER.replace('extern "C" __device__ int offset = 5', "extern __device__ int offset")
    callee = "__device__ int offset = 5;\n" + CALLEE
    with Link(nvjitlink, "-lto") as link:
        link.add("PTX", compiled(caller, "PTX"))
        link.add("LTOIR", compiled(callee, "LTOIR"))
        link.complete()
        assert [6, 9, 12, 15] == result_of(driver, ok, link.get("linked_cubin"))


def test_linked_image_holds_no_kernel_but_the_program_s(nvjitlink, driver, ok):
    with Link(nvjitlink, "-lto") as link:
        link.add("PTX", compiled(CALLER, "PTX"))
        link.add("LTOIR", compiled(CALLEE, "LTOIR"))
        link.complete()
        module = ok(driver.cuModuleLoadData(link.get("linked_cubin")))
    assert 1 == ok(driver.cuModuleGetFunctionCount(module))
    ok(driver.cuModuleUnload(module))


def test_what_nvrtc_and_the_linker_call_machine_code_can_be_linked(nvjitlink, driver, ok):
    with Link(nvjitlink) as link:
        link.add("PTX", compiled(CALLEE, "PTX"))
        link.complete()
        part = link.get("linked_cubin")
    with Link(nvjitlink) as link:
        link.add("CUBIN", part)
        link.add("ANY", compiled(CALLER, "PTX"))
        link.complete()
        assert [6, 9, 12, 15] == result_of(driver, ok, link.get("linked_cubin"))


def test_files_are_linked(nvjitlink, driver, ok, tmp_path):
    with Link(nvjitlink) as link:
        for name, source in (("caller.ptx", CALLER), ("callee.ptx", CALLEE)):
            path = tmp_path / name
            path.write_bytes(compiled(source, "PTX"))
            nvjitlink.add_file(link.handle, nvjitlink.InputType.PTX, str(path))
        link.complete()
        assert [6, 9, 12, 15] == result_of(driver, ok, link.get("linked_cubin"))
        with pytest.raises(nvjitlink.nvJitLinkError, match="INVALID_INPUT"):
            nvjitlink.add_file(link.handle, nvjitlink.InputType.PTX, str(tmp_path / "missing.ptx"))


def test_registers_are_those_of_the_machine_code(nvjitlink, driver, ok):
    many = "".join(f"double v{n} = p[{n} * threadIdx.x];" for n in range(40))
    uses = "".join(f"p[{n}] = v{n} + v{7 * n % 40};" for n in range(40))
    source = f'extern "C" __global__ void kernel(double *p) {{ {many} __syncthreads(); {uses} }}'
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
    counts, blocks = [], []
    for options in ((), ("-maxrregcount=32",)):
        with Link(nvjitlink, *options) as link:
            link.add("PTX", compiled(source, "PTX"))
            link.complete()
            module = ok(driver.cuModuleLoadData(link.get("linked_cubin")))
        function = ok(driver.cuModuleGetFunction(module, b"kernel"))
        counts.append(ok(driver.cuFuncGetAttribute(attribute, function)))
        blocks.append(ok(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, 1024, 0)))
        ok(driver.cuModuleUnload(module))
    assert counts[0] > 64 and counts[1] <= 32
    assert [0 if counts[0] * 1024 > 65536 else 1, 2] == blocks


def test_undefined_function_is_named_in_the_error_log(nvjitlink):
    with Link(nvjitlink) as link:
        link.add("PTX", compiled(CALLER, "PTX"))
        with pytest.raises(nvjitlink.nvJitLinkError):
            link.complete()
        assert b"'f'" in link.get("error_log")
        with pytest.raises(nvjitlink.nvJitLinkError):
            link.get("linked_cubin")


def test_invalid_ptx_and_options_are_refused(nvjitlink):
    with Link(nvjitlink) as link, pytest.raises(nvjitlink.nvJitLinkError, match="PTX_COMPILE"):
        link.add("PTX", compiled(CALLEE, "PTX").replace(b"ret;", b"return;"))
        link.complete()
    with pytest.raises(nvjitlink.nvJitLinkError, match="UNRECOGNIZED_OPTION"):
        Link(nvjitlink, "-no-such-option")


def test_linked_ptx_is_nvidia_s_own(nvjitlink):
    with Link(nvjitlink, "-lto", "-ptx") as link:
        link.add("LTOIR", compiled(CALLER, "LTOIR"))
        link.add("LTOIR", compiled(CALLEE, "LTOIR"))
        link.complete()
        assert b".visible .entry kernel(" in link.get("linked_ptx")


def test_machine_code_is_refused_and_said_to_be(nvjitlink):
    from cudatool.sim.toolchain.nvjitlink import InputType, _Link

    class Anything:
        """A linker that finds nothing wrong."""

        def add(self, *_: object) -> int:
            return 0

    link = _Link([b"-arch=sm_90a"])
    assert 90 == link.arch
    link.take(Anything(), 1, InputType.CUBIN, CUBIN, b"a.cubin")
    assert 3 == link.finish(Anything(), 1)
    assert b"ERROR: a.cubin: machine code without PTX, which the software device cannot run\n" == link.error


def test_names_of_each_release_are_there_in_the_version_of_the_library(nvjitlink) -> None:
    """As cuSPARSE asks for them, without which PyTorch cannot be imported."""
    from cudatool.loading.shared_libraries import wheel_library

    if wheel_library("libnvJitLink.so.13") is None:
        pytest.skip("nvJitLink is not installed as a wheel")
    stand_in, process = ctypes.CDLL("libnvJitLink.so.13"), ctypes.CDLL(None)
    process.dlvsym.restype = ctypes.c_void_p
    process.dlvsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
    assert hasattr(stand_in, "cudatool_nvjitlink_path")
    for name in (b"nvJitLinkCreate", b"__nvJitLinkCreate_13_0", b"__nvJitLinkAddData_13_5"):
        assert process.dlvsym(stand_in._handle, name, b"libnvJitLink.so.13"), name


def test_a_program_that_compiles_nothing_opens_no_compiler() -> None:
    program = """
import cudatool
assert [2.0, 2.0] == cudatool.full(2, 2.0).get().tolist()
print(*{line.split("/")[-1].strip() for line in open("/proc/self/maps") if "/cu13/lib/" in line})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=True)
    assert not {name for name in done.stdout.split() if "libnvrtc.so" in name or "libnvJitLink.so" in name}
