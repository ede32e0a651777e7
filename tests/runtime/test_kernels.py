from __future__ import annotations

import linecache
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda import core

import cudatool
from cudatool import _driver
from cudatool.errors import CompileError, CudaError, UsageError
from cudatool.runtime.kernel import compile_own
from cudatool.trace.events import Event, Kind, unpack_dims

SCALE = """
template <typename T> __global__ void scale(T *x, T factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor;
}
"""
STORE = 'extern "C" __global__ void store(%s *out, %s value) { *out = value; }'


@pytest.fixture
def scale() -> cudatool.Kernel:
    return cudatool.compile(SCALE, "scale<float>")


def test_kernel_runs_with_grid_and_block(scale: cudatool.Kernel) -> None:
    array = cudatool.asarray(np.arange(1000, dtype=np.float32))
    scale[4, 256](array, 3.0, 1000)
    np.testing.assert_array_equal(array.get(), 3 * np.arange(1000, dtype=np.float32))


def test_kernel_runs_on_the_stream_it_is_given(scale: cudatool.Kernel, events: list[Event]) -> None:
    stream, array = cudatool.Stream(), cudatool.ones(10)
    stream.wait_stream(cudatool.current_stream())
    cudatool.launch(stream, cudatool.LaunchConfig(grid=1, block=32), scale, array, np.float32(2), np.int32(10))
    stream.synchronize()
    assert array.get().tolist() == [2] * 10
    assert [event.stream for event in events if event.kind is Kind.KERNEL_LAUNCH] == [stream.trace_id()]


def test_any_object_with_cuda_stream_is_a_stream(scale: cudatool.Kernel) -> None:
    class Other:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, stream.cuda_stream

    stream = cudatool.Stream()
    with stream:
        array = cudatool.ones(10)
    cudatool.launch(Other(), cudatool.LaunchConfig(grid=1, block=32), scale, array, 2.0, 10)
    with stream:
        assert array.get().tolist() == [2] * 10
    with pytest.raises(UsageError, match="is not a stream"):
        cudatool.launch("s", cudatool.LaunchConfig(grid=1, block=32), scale, array, 2.0, 10)


@pytest.mark.parametrize(
    ("c_type", "dtype", "value"),
    [
        ("bool", "?", True),
        ("signed char", "i1", -100),
        ("unsigned char", "u1", 200),
        ("short", "i2", -30000),
        ("int", "i4", -(2**31)),
        ("unsigned int", "u4", 2**32 - 1),
        ("long long", "i8", -(2**63)),
        ("unsigned long long", "u8", 2**64 - 1),
        ("float", "f4", 1.5),
        ("float", "f4", np.float32(0.1)),
        ("double", "f8", 0.1),
        ("double", "f8", np.float64(-2.5)),
        ("int", "i4", np.int32(7)),
        ("short", "i2", np.array(-5, np.int16)),
    ],
)
def test_scalar_arrives_as_it_was_passed(c_type: str, dtype: str, value: Any) -> None:
    out = cudatool.zeros(1, dtype)
    cudatool.compile(STORE % (c_type, c_type), "store")[1, 1](out, value)
    assert out.get()[0] == np.array(value).astype(dtype)


def test_structure_is_passed_by_value() -> None:
    source = """
    struct Point { char tag; double x; int y[3]; };
    extern "C" __global__ void store(double *out, int before, Point p, float after) {
        out[0] = before; out[1] = p.tag; out[2] = p.x; out[3] = p.y[2]; out[4] = after;
    }"""
    point = np.zeros((), np.dtype([("tag", "i1"), ("x", "f8"), ("y", "i4", 3)], align=True))
    point["tag"], point["x"], point["y"] = 3, 2.5, [7, 8, 9]
    out = cudatool.zeros(5, np.float64)
    cudatool.compile(source, "store")[1, 1](out, 1, point[()], 4.5)
    assert out.get().tolist() == [1, 3, 2.5, 9, 4.5]


def test_buffer_of_cuda_core_is_passed_as_its_address(scale: cudatool.Kernel) -> None:
    from cuda.core import Buffer

    array = cudatool.ones(10)
    scale[1, 32](Buffer.from_handle(array.data_ptr(), array.nbytes, owner=array), 2.0, 10)
    assert array.get().tolist() == [2] * 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "takes 3 arguments, not 1"),
        (("x", 1.0, 2**31 + 2**31), "argument 2 .* does not fit in 4 bytes"),
        (("x", np.float64(1), 1), "argument 1 .* float64 has 8 bytes, the parameter 4"),
        ((np.ones(3), 1.0, 1), "argument 0 .* cudatool.asarray"),
        ((1.0, np.int64(1), 1), "argument 1"),
        (("x", 1.0, "n"), "argument 2 .* cannot pass str"),
        (("x", 1e300, 1), "argument 1"),
        (("x", 1j, 1), "argument 1 .* cannot pass complex"),
    ],
)
def test_argument_that_does_not_fit_is_refused(scale: cudatool.Kernel, arguments: Any, message: str) -> None:
    array = cudatool.ones(3)
    with pytest.raises(UsageError, match=message):
        scale[1, 1](*(array if isinstance(argument, str) and argument == "x" else argument for argument in arguments))


def test_shared_memory_comes_from_the_configuration() -> None:
    source = """
    extern "C" __global__ void reverse(int *x) {
        extern __shared__ int s[];
        s[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        x[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
    }"""
    array = cudatool.asarray(np.arange(64, dtype=np.int32))
    cudatool.compile(source, "reverse")[cudatool.LaunchConfig(grid=1, block=64, shmem_size=256)](array)
    assert array.get().tolist() == list(range(63, -1, -1))


def test_launch_that_the_driver_refuses_names_its_error(scale: cudatool.Kernel) -> None:
    with pytest.raises(CudaError) as caught:
        scale[1, 2048](cudatool.ones(3), 1.0, 3)
    assert caught.value.name == "CUDA_ERROR_INVALID_VALUE"


def test_kernel_may_have_no_parameters() -> None:
    cudatool.compile('extern "C" __global__ void nothing() {}', "nothing")[1, 1]()
    cudatool.synchronize()


def test_configuration_of_three_is_refused(scale: cudatool.Kernel) -> None:
    with pytest.raises(UsageError, match="grid, block"):
        scale[1, 2, 3]


def test_compile_error_has_the_compilers_log() -> None:
    with pytest.raises(CompileError) as caught:
        cudatool.compile('extern "C" __global__ void f(int *p) { *p = missing; }', "f")
    assert "missing" in caught.value.log
    assert "NVRTC_ERROR_COMPILATION" in caught.value.args[0]


def test_mistakes_of_inline_assembly_are_found_when_a_program_is_compiled() -> None:
    source = """extern "C" __global__ void f(int *out, float x) {
        asm("add.s32 %0, %1, 1;" : "=r"(*out) : "f"(x));
    }"""
    with pytest.raises(CompileError) as caught:
        cudatool.compile(source, "f")
    assert "Arguments mismatch" in caught.value.log


def test_of_our_own_kernels_the_software_device_has_no_machine_code_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes NVRTC as long as all else, and nothing runs it."""
    if _driver.initialize().kind == "cuda":
        pytest.skip("a GPU runs machine code")
    program, architectures = core.Program, []

    def watched(source: str, language: str, options: core.ProgramOptions) -> core.Program:
        architectures.append(options.arch)
        return program(source, language, options)

    monkeypatch.setattr(core, "Program", watched)
    source = f'extern "C" __global__ void own() {{}}  // {time.time_ns()}: not in the cache'
    cudatool.compile(source, "own")
    kernel = compile_own(source, "own")
    kernel.accesses  # noqa: B018  # needs the PTX, which is there
    number = core.Device().arch
    assert [f"sm_{number}", f"compute_{number}"] == architectures


def test_our_own_kernels_are_compiled_without_what_none_of_them_uses() -> None:
    """Textures, as an example. A program's source may have all that NVRTC knows."""
    source = "__global__ void textured(float *x, cudaTextureObject_t t) { x[0] = tex1Dfetch<float>(t, 0); }"
    assert "textured" == cudatool.compile(source, "textured").name
    with pytest.raises(CompileError, match="NVRTC_ERROR_COMPILATION"):
        compile_own(source, "textured")


def test_kernel_that_is_not_in_the_source_is_an_error() -> None:
    with pytest.raises(CompileError) as caught:
        cudatool.compile(SCALE, "missing")
    assert "missing" in caught.value.log


def test_a_program_s_file_is_not_in_the_directory_where_it_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache gives the program to processes that run elsewhere."""
    monkeypatch.chdir(tmp_path)
    source = f'extern "C" __global__ void only_here() {{ __trap(); }}  // {tmp_path}: not in the cache'
    code, _ = cudatool.compile(source, "only_here")._ptx()
    assert [b'"only_here.cu"'] == re.findall(rb"^\s*\.file\s+1 (.+)$", code, re.MULTILINE)


def test_programs_of_one_name_have_files_of_their_own() -> None:
    """Else a message would quote a line of the program that was compiled last."""
    sources = [f'extern "C" __global__ void twins(int *x) {{ *x = {value}; }}' for value in (1, 2, 1)]
    codes = [cudatool.compile(source, "twins")._ptx()[0] for source in sources]
    files = [re.findall(rb'^\s*\.file\s+1 "(.+)"$', code, re.MULTILINE) for code in codes]
    assert sources == [linecache.getline(file.decode(), 1) for (file,) in files]


def test_headers_of_cuda_and_cccl_can_be_included() -> None:
    from cudatool.runtime.nvrtc import include_paths

    if not any(path.endswith("cccl") for path in include_paths()):
        pytest.skip("the nvidia-cuda-cccl wheel is not installed")
    source = """
    #include <cuda_fp16.h>
    #include <cuda/std/cstdint>
    extern "C" __global__ void f(cuda::std::uint16_t *out) { *out = __half_as_ushort(__float2half(1.0f)); }
    """
    out = cudatool.zeros(1, np.uint16)
    cudatool.compile(source, "f")[1, 1](out)
    assert out.get().view(np.float16)[0] == 1


def test_options_reach_the_compiler_and_nothing_is_cached_for_headers_of_ones_own(tmp_path: Any) -> None:
    source = '#include "value.h"\nextern "C" __global__ void f(int *out) { *out = VALUE + EXTRA; }'
    options = cudatool.ProgramOptions(include_path=str(tmp_path), define_macro=("EXTRA", "100"))
    out = cudatool.zeros(1, np.int32)
    for value in (1, 2):
        (tmp_path / "value.h").write_text(f"#define VALUE {value}\n")
        cudatool.compile(source, "f", options=options)[1, 1](out)
        assert out.get()[0] == value + 100


def test_compiled_program_is_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from cudatool.runtime import calls

    monkeypatch.setenv("CUDATOOL_CACHE_DIR", str(tmp_path))
    first = cudatool.compile(SCALE, "scale<double>")
    kept, *_ = sorted((tmp_path / "nvrtc").iterdir(), key=lambda file: -file.stat().st_size)  # beside NVRTC's version
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-100])  # a damaged one is compiled again
    cudatool.compile(SCALE, "scale<double>")
    assert whole == kept.read_bytes()
    monkeypatch.setattr(calls.core, "Program", None)  # another compilation would fail
    second = cudatool.compile(SCALE, "scale<double>")
    assert first.parameters == second.parameters
    array = cudatool.asarray([1.0, 2.0, 3.0])
    second[1, 32](array, 2.0, 3)
    assert array.get().tolist() == [2, 4, 6]


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUDATOOL_CACHE_DIR", str(tmp_path / "file"))
    array = cudatool.asarray([1.0, 2.0, 3.0])
    cudatool.compile(SCALE, "scale<double>")[1, 32](array, 2.0, 3)
    assert array.get().tolist() == [2, 4, 6]


def test_launch_and_load_are_recorded(events: list[Event]) -> None:
    kernel, array = cudatool.compile(SCALE, "scale<float>"), cudatool.ones(100)
    events.clear()
    kernel[cudatool.LaunchConfig(grid=(2, 3, 4), block=(8, 4, 2), shmem_size=64)](array, 2.0, 0)
    (launched,) = [event for event in events if event.kind is Kind.KERNEL_LAUNCH]
    assert launched.name == "scale<float>"
    assert (unpack_dims(launched.aux0), unpack_dims(launched.aux1)) == ((2, 3, 4), (8, 4, 2))
    assert launched.size == 64
    assert launched.correlation != 0
    assert launched.stream == cudatool.default_stream().trace_id()


def test_load_of_a_module_is_recorded(events: list[Event]) -> None:
    cudatool.compile(SCALE, "scale<int>")
    (loaded,) = [event for event in events if event.kind is Kind.MODULE_LOAD]
    assert loaded.name == "scale<int>"
    assert loaded.size > 0
