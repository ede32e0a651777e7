"""`cudatool ptx`: what kernels of a file do."""

from __future__ import annotations

import json
import struct

import pytest

SOURCE = """
#include <cuda_fp16.h>
#ifndef SCALE
#define SCALE 2
#endif
struct Views { const float *in; int n; float *out; };
__device__ int counter;
template <class T> __global__ void fill(T *x, T v) { x[threadIdx.x] = v; }
extern "C" __global__ void scale(Views v) {
    __shared__ float tile[32];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= v.n) return;
    tile[threadIdx.x] = v.in[i] * SCALE;
    __syncthreads();
    v.out[i] = tile[31 - threadIdx.x];
    atomicAdd(&counter, 1);
}
extern "C" __global__ void chase(float **rows) { rows[threadIdx.x][0] = 1; }
"""
PTX = """.version 8.3
.target sm_90
.address_size 64
.visible .entry k(.param .u64 p) { .reg .b64 %d<2>; ld.param.u64 %d1, [p]; st.global.u32 [%d1], 0; ret; }
.visible .entry odd(.param .u64 p) { .reg .b64 %d<2>; frobnicate.b64 %d1; ret; }
"""


@pytest.fixture
def kernels(tmp_path):
    (tmp_path / "kernels.cu").write_text(SOURCE)
    (tmp_path / "kernels.ptx").write_text(PTX)
    return tmp_path


def test_table(run_command, kernels):
    done = run_command("ptx", "kernels.cu", "--kernel", "scale")
    assert (0, "") == (done.returncode, done.stderr)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["scale"] == lines[0]
    assert ["v+0", "b8[24]", "r", "read", "4"] in lines
    assert ["v+16", "b8[24]", "w", "write", "4"] in lines
    assert ["features:", "barriers,", "global", "atomics"] in lines
    assert ["variables:", "counter", "a"] in lines
    assert ["software", "device:", "runs", "it"] in lines
    assert "chase" not in done.stdout


def test_json(run_command, kernels):
    listing = json.loads(run_command("ptx", "kernels.cu", "--json").stdout)
    assert "cudatool.ptx/1" == listing["schema"]
    found = {one["name"]: one for one in listing["kernels"]}
    assert {"scale", "chase"} == found.keys()
    assert ["r", "w"] == [field["access"] for field in found["scale"]["parameters"][0]["fields"]]
    assert 128 == found["scale"]["shared_bytes"]
    assert ["loaded pointer"] == found["chase"]["doubts"]
    (field,) = found["chase"]["parameters"][0]["fields"]
    assert ("r", "w", [8]) == (field["access"], field["loaded_access"], field["read_widths"])
    assert sum(found["scale"]["instructions"].values()) == sum(found["scale"]["opcodes"].values())


def test_template_instances_and_macros(run_command, kernels):
    done = run_command("ptx", "kernels.cu", "--kernel", "fill<double>", "-D", "SCALE=3", "--arch", "sm_75", "--json")
    listing = json.loads(done.stdout)
    (found,) = listing["kernels"]
    assert ("sm_75", "fill<double>") == (found["target"], found["name"])
    assert [("double*", "w"), ("double", "")] == [
        (one["type"], "".join(field["access"] for field in one["fields"])) for one in found["parameters"]
    ]


def test_include_directories(run_command, kernels):
    (kernels / "headers").mkdir()
    (kernels / "headers" / "width.h").write_text("#define T short\n")
    (kernels / "near.h").write_text('#include "width.h"\n')
    (kernels / "uses.cu").write_text('#include "near.h"\nextern "C" __global__ void k(T *x) { x[0] = 1; }')
    done = run_command("ptx", "uses.cu", "-I", "headers", "--json")
    assert [2] == json.loads(done.stdout)["kernels"][0]["parameters"][0]["fields"][0]["write_widths"]


def test_ptx_as_it_is_and_what_the_software_device_refuses(run_command, kernels):
    listing = json.loads(run_command("ptx", "kernels.ptx", "--json").stdout)
    runs = {one["name"]: one["software_device"] for one in listing["kernels"]}
    assert {"runs": True, "reason": ""} == runs["k"]
    assert not runs["odd"]["runs"]
    assert "frobnicate.b64" in runs["odd"]["reason"]


def test_instruction_that_lacks_its_type_is_refused_by_name(run_command, tmp_path):
    (tmp_path / "k.ptx").write_text(PTX.replace("frobnicate.b64 %d1;", "fma.rn %d1;"))
    done = run_command("ptx", "k.ptx", "--kernel", "odd")
    assert 0 == done.returncode
    assert "no fma.rn (no such form)" in done.stdout


def fatbin(*versions: tuple[int, str]) -> bytes:
    """Make an uncompressed fatbin of one unit's PTX for several architectures."""
    entries = b""
    for arch, text in versions:
        header = struct.pack("<HHIQIIHHIIIQQQ", 1, 0x101, 72, len(text), 0, 64, 3, 8, arch, 64, 0, 0x11, 0, 0)
        entries += header.ljust(72, b"\0") + text.encode()
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def test_damaged_code_in_a_fatbin_is_one_line(run_command, tmp_path):
    good = bytearray(fatbin((90, PTX)))
    good[16 + 40] = 0  # flags of the entry: compressed with LZ4, which its text is not
    good[16 + 41] = 0x20
    struct.pack_into("<I", good, 16 + 16, len(PTX))
    struct.pack_into("<Q", good, 16 + 56, 2000)
    (tmp_path / "k.fatbin").write_bytes(good * 2)
    done = run_command("ptx", "k.fatbin")
    assert (2, "cudatool: error: damaged LZ4 data in a fatbin\n") == (done.returncode, done.stderr)


def test_newest_ptx_in_a_fatbin(run_command, tmp_path):
    versions = [(arch, PTX.replace("sm_90", f"sm_{arch}")) for arch in (75, 86, 100)]
    (tmp_path / "k.fatbin").write_bytes(fatbin(*versions))
    listing = json.loads(run_command("ptx", "k.fatbin", "--kernel", "k", "--json").stdout)
    assert [("k", "sm_86")] == [(one["kernel"], one["target"]) for one in listing["kernels"]]
    assert "no PTX for sm_70" in run_command("ptx", "k.fatbin", "--arch", "sm_70").stderr


def test_file_without_kernels_says_how_to_get_one(run_command, tmp_path):
    (tmp_path / "t.cu").write_text("template <class T> __global__ void f(T *x) { *x = 1; }")
    done = run_command("ptx", "t.cu")
    assert (0, "") == (done.returncode, done.stdout)
    assert "--kernel" in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("no.ptx", None, (), "No such file"),
        ("k.txt", "", (), "neither PTX (.ptx), nor CUDA C++ (.cu)"),
        ("k.ptx", "hello", (), "k.ptx: unexpected 'hello' (PTX line 1)"),
        ("k.ptx", "\0\1\2", (), "k.ptx: unexpected character"),
        ("k.ptx", PTX, ("--kernel", "other"), "no kernel 'other'"),
        ("k.cu", "__global__ void k(", (), "k.cu(1): error"),
        ("k.cu", "#include <nothing.h>\n", (), "nothing.h"),
        ("k.o", b"\x7fELF" + bytes(100), (), "k.o has no PTX for sm_90"),
        ("k.cu", "", ("--arch", "hopper"), "'hopper' is no architecture"),
        ("k.cu", "", ("--arch", "sm_11"), "--gpu-architecture=compute_11"),
        ("k.cu", SOURCE, ("--kernel", "fill<nonsense>"), "nonsense"),
    ],
)
def test_bad_input_is_one_line(run_command, tmp_path, name, content, options, message):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    done = run_command("ptx", name, *options)
    assert (2, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith("cudatool: error: ")
    assert message in done.stderr
    assert 1 == done.stderr.count("\n")


def test_a_kernel_without_parameters_has_no_empty_table(run_command, tmp_path):
    (tmp_path / "none.cu").write_text('extern "C" __global__ void none() {}')
    done = run_command("ptx", "none.cu")
    assert (0, "") == (done.returncode, done.stderr)
    assert "Parameter" not in done.stdout


def test_overloads_and_instances_have_headings_of_their_own(run_command, tmp_path):
    (tmp_path / "k.cu").write_text(
        "template <class A, class B> struct Pair {};\n"
        "template <class T> __global__ void nested(int *x) { *x = 1; }\n"
        "template __global__ void nested<Pair<Pair<Pair<Pair<int, long>, Pair<int, long>>, int>, Pair<int, long>>>(int *);\n"
        "__global__ void scale(float *x) { *x = 1; }\n"
        "__global__ void scale(double *x) { *x = 1; }\n"
    )
    done = run_command("ptx", "k.cu")
    assert done.returncode == 0, done.stderr
    headings = [line for line in done.stdout.splitlines() if line.startswith(("scale", "nested"))]
    assert sorted(headings)[1:] == ["scale(double*)", "scale(float*)"]
    assert sorted(headings)[0].startswith("nested<Pair<") and "<...>" in sorted(headings)[0]
