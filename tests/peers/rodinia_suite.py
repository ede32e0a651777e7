"""Rodinia's CUDA programs on the software device: are the results right, and how long do they take?

    python tests/peers/rodinia_suite.py DIR [--only TEXT] [--times N] [--seconds S] [--threads N] [--touch N] [--table FILE]

DIR is a checkout of yuhc/gpu-rodinia. Its programs are C++: hosts are compiled with g++, kernels with NVRTC, and
``cudart.cpp`` stands in for the part of CUDA's runtime that they call, on the driver API of the software device.

What the device gives to a program is held against the same program with its kernels compiled for the host by g++
(``cuda_on_host.cpp``), which shares no code with the software device. ``--times`` runs larger inputs, and the suite's
own OpenMP program on as many threads as there are processors, in turns: whole programs, input and output included.

Both are compiled with ``-O3 -march=native``. Sizes are those of the suite's ``run`` files, or larger. Beside whole
processes stand the parts of them that are counterparts: calls of the driver by main(), and OpenMP's parallel regions.
These are of runs of their own, as looking at the clock around each call takes time, too: nn has 100,000 parallel regions. On
a machine that does other work as well, processor time with ``--threads 1`` is what can be compared.

A virtual machine may give memory that was free for two seconds back to its host. ``--touch 256`` touches and frees as many
MiB before each run of either side, so that neither pays for what the other had just before.

Whole suites take a while: ``--times 3 --seconds 20`` begins no more turns of a program after 20 s of them, those that
take long come last, and ``--only-times`` compares no results. ``--table`` adds a row to a table in Markdown when a program is measured, so that a run that is
interrupted keeps what it has.

Not here: mummergpu, which binds CUDA arrays to references of textures.
"""

from __future__ import annotations

import argparse
import mmap
import os
import re
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from cuda_sources import instances, split

from cudatool import _driver

HERE = Path(__file__).resolve().parent
LIMIT_S = 300  # a run of a program
THREADS = "THREADS"  # in arguments: how many the measurement is of
_DEVICE_HEAD = """
#define NULL 0
#define INT_MAX 2147483647
#define CHAR_BIT 8
#define RAND_MAX 2147483647
typedef unsigned char uchar;
typedef unsigned int uint;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
template <class T> struct TextureReference { cudaTextureObject_t object; };
template <class T> __device__ T tex1Dfetch(const TextureReference<T> &from, int i) {
    return tex1Dfetch<T>(from.object, i);
}
#line 1
"""
# Properties of a device that CUDA has no more, which programs print.
_GONE = ("-DclockRate=major", "-DcomputeMode=major", "-DdeviceOverlap=major")
_ERROR = re.compile(r"CUDA_ERROR_(?!NOT_FOUND)")  # a kernel is looked for in each module


@dataclass(frozen=True)
class Program:
    """A program of the suite.

    Attributes
    ----------
    sources
        What is compiled, beside the folder; kernels are in the ``.cu`` files.
    small, large
        Arguments of a comparison and of a measurement.
    inputs
        Writes the files that the arguments name.
    copies
        How many copies to the host are compared, 0 for all: what comes after them overflows.
    says
        What it prints if its own check is passed. Its kernels rely on warps that run in step, as fibers do not.
    kind
        The type of the floats that the device gives.
    tolerance
        How far results may be apart, as a share of the largest: functions of the host differ in the last places.
    flags
        For the compilers.
    folders
        Of the suite, with headers that CUDA's samples have.
    openmp
        The OpenMP program: its sources, its flags and its arguments.
    """

    folder: str
    sources: tuple[str, ...]
    small: str
    large: str
    inputs: Callable[[str], None] = lambda arguments: None
    copies: int = 0
    says: str = ""
    kind: str = "f4"
    tolerance: float = 1e-5
    flags: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    openmp: tuple[str, tuple[str, ...], str] | None = None
    openmp_flags: tuple[str, ...] = field(default=())


def _graph(arguments: str) -> None:
    """As Rodinia's generator makes it: each node has a few edges to any others."""
    path = arguments.split()[-1]
    nodes = int(path.partition("_")[2].partition(".")[0])
    draw = np.random.default_rng(7)
    counts = draw.integers(1, 11, nodes)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    edges = draw.integers(0, nodes, counts.sum())
    with open(path, "w") as file:
        file.write(f"{nodes}\n" + "".join(f"{s} {c}\n" for s, c in zip(starts, counts, strict=True)))
        file.write(f"\n0\n\n{len(edges)}\n" + "".join(f"{e} 1\n" for e in edges))


def _temperatures(arguments: str) -> None:
    """Files of as many values as the first number says, squared, and the second says layers, if it is a grid in 3-D."""
    words = arguments.split()
    size = int(words[0])
    layers = int(words[1]) if words[-2].startswith("temp3") else 1
    draw = np.random.default_rng(5)
    for path in words:
        if path.startswith(("temp", "power")):
            values = (
                draw.uniform(320, 340, size * size * layers)
                if "temp" in path
                else draw.uniform(0, 0.01, size * size * layers)
            )
            np.savetxt(path, values, fmt="%.6f")


def _hurricanes(arguments: str) -> None:
    draw = np.random.default_rng(3)
    path = arguments.split()[0]
    Path(path).write_text("cane.db\n")
    count = int(path.partition("_")[2])
    lat, lng = draw.uniform(7, 70, count), draw.uniform(10, 180, count)
    with open("cane.db", "w") as file:
        for i in range(count):
            file.write(
                f"1990 {i % 12 + 1:2d} {i % 28 + 1:2d} {i % 24:2d} {i % 30:2d} {'ALBERTO':9s} {lat[i]:5.1f} {lng[i]:5.1f}   50  380\n"
            )


def _image(arguments: str) -> None:
    _, _, rows, columns = arguments.split()[:4]
    draw = np.random.default_rng(2)
    values = draw.integers(0, 256, int(rows) * int(columns))
    Path("../../data/srad").mkdir(parents=True, exist_ok=True)
    with open("../../data/srad/image.pgm", "w") as file:
        file.write(f"P2\n{columns} {rows}\n255\n" + " ".join(map(str, values)) + "\n")


def _points(arguments: str) -> None:
    path = arguments.split("-i ")[1].split()[0]
    count = int(path.partition("_")[2].partition(".")[0])
    values = np.random.default_rng(4).integers(0, 256, (count, 34))
    with open(path, "w") as file:
        for i, row in enumerate(values.tolist()):
            file.write(f"{i} {' '.join(map(str, row))}\n")


def _keys(arguments: str) -> None:
    count = int(arguments.partition("mil_")[2].partition(".")[0])
    with open(f"mil_{count}.txt", "w") as file:
        file.write(f"{count}\n" + "".join(f"{i}\n" for i in range(count)))
    # b+tree reads commands until a zero, which the memory that it reads them to need not have.
    Path("command.txt").write_text("j 6000 3000\nk 10000\n\0")


def _text(arguments: str) -> None:
    count = int(arguments.partition("_")[2].partition(".")[0])
    values = np.random.default_rng(6).choice(256, count, p=np.diff(np.linspace(0, 1, 257) ** 2)).astype(np.uint8)
    Path(arguments).write_bytes(values.tobytes())


def _domain(arguments: str) -> None:
    """A closed ring of cells: each has four neighbours and normals that add up to nothing."""
    count = int(arguments.partition("_")[2].partition(".")[0])
    draw = np.random.default_rng(8)
    with open(arguments, "w") as file:
        file.write(f"{count}\n")
        for i in range(count):
            a, b = draw.normal(size=3), draw.normal(size=3)
            normals = np.stack([a, -a, b, -b]) * 0.1
            neighbours = [(i - 1) % count, (i + 1) % count, (i - 64) % count, (i + 64) % count]
            words = [f"{1 + draw.uniform():.5f}"]
            for neighbour, normal in zip(neighbours, normals, strict=True):
                words += [str(neighbour + 1), *(f"{x:.6f}" for x in normal)]
            file.write(" ".join(words) + "\n")


def _pixels(arguments: str) -> None:
    """An image of three bytes a pixel, as large as its name says."""
    path = arguments.split()[0]
    width, height = (int(number) for number in path.partition("_")[2].partition(".")[0].split("x"))
    Path("../../data/dwt2d").mkdir(parents=True, exist_ok=True)
    Path("../../data/dwt2d", path).write_bytes(np.random.default_rng(9).bytes(3 * width * height))


def _cell(arguments: str) -> None:
    """A cell at rest: shares of what is open, concentrations, the voltage of its membrane; and how it is stimulated."""
    Path("../../data/myocyte").mkdir(parents=True, exist_ok=True)
    state = np.random.default_rng(10).uniform(1e-3, 1e-2, 91)
    state[[4, 29, 30]], state[31:34], state[34], state[35:38], state[38] = 1, 9, 135, 1e-4, -85
    np.savetxt("../../data/myocyte/y.txt", state)
    np.savetxt("../../data/myocyte/params.txt", [1000, 418, 0, 120, 3.6, 96, *[5.6, 24, 0.1, 0.003, 0.57] * 2, 0, 0])


def _video(arguments: str) -> None:
    """Bright discs of the radius of a blood cell, which move from frame to frame, in bytes of gray."""
    path = arguments.split()[0]
    width, height, count = (int(number) for number in path.partition("_")[2].partition(".")[0].split("x"))
    draw = np.random.default_rng(11)
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    centers = draw.uniform(0, (width, height), (40, 2))
    frames = b""
    for number in range(count):
        distance = np.min([np.hypot(x - a - number, y - b) for a, b in centers], axis=0)
        picture = 60 + 150 / (1 + np.exp(distance - 10)) + draw.normal(0, 3, (height, width))
        frames += _chunk(b"00db", picture.astype(np.uint8).tobytes())
    main = struct.pack("<14I", 40000, 0, 0, 16, count, 0, 1, width * height, width, height, 0, 0, 0, 0)
    stream = struct.pack("<4s4s10I4H", b"vids", b"Y8  ", 0, 0, 0, 1, 25, 0, count, width * height, 0, 0, 0, 0, 0, 0)
    picture = struct.pack("<3I2H6I", 40, width, height, 1, 8, 0, width * height, 0, 0, 0, 0)
    header = b"hdrl" + _chunk(b"avih", main)
    header += _chunk(b"LIST", b"strl" + _chunk(b"strh", stream) + _chunk(b"strf", picture))
    size = 8 + width * height
    places = [struct.pack("<4s3I", b"00db", 16, 4 + number * size, width * height) for number in range(count)]
    body = _chunk(b"LIST", header) + _chunk(b"LIST", b"movi" + frames) + _chunk(b"idx1", b"".join(places))
    Path(path).write_bytes(_chunk(b"RIFF", b"AVI " + body))


def _chunk(name: bytes, data: bytes) -> bytes:
    assert len(data) % 2 == 0
    return name + struct.pack("<I", len(data)) + data


_LAVA = ("main.c", "util/timer/timer.c", "util/num/num.c", "kernel/kernel_gpu_cuda_wrapper.cu", "util/device/device.cu")
_WAVELETS = ("fdwt53", "fdwt97", "rdwt97", "rdwt53")
_CELLS = ("detect_main.c", "avilib.c", "find_ellipse.c", "misc_math.c", "track_ellipse.c")
_MATRICES = tuple(
    f"meschach_lib/{name}.c"
    for name in (
        *("bdfactor", "copy", "err", "givens", "hsehldr", "init", "iter0", "ivecop", "lufactor", "machine", "matop"),
        *("matrixio", "meminfo", "memory", "memstat", "norm", "pxop", "qrfactor", "solve", "sparse", "sprow", "submat"),
        *("vecop", "zmachine", "zmemory"),
    )
)
_TREE = (
    "main.c",
    "kernel/kernel_gpu_cuda_wrapper.cu",
    "kernel/kernel_gpu_cuda_wrapper_2.cu",
    "util/timer/timer.c",
    "util/num/num.c",
    "util/cuda/cuda.cu",
)
PROGRAMS = {
    "backprop": Program(
        "backprop",
        ("backprop.c", "facetrain.c", "imagenet.c", "backprop_cuda.cu"),
        "4096",
        "1048560",
        openmp=("backprop", ("backprop.c", "facetrain.c", "imagenet.c", "backprop_kernel.c"), "1048560"),
        openmp_flags=("-DOPEN",),
    ),
    "bfs": Program(
        "bfs",
        ("bfs.cu",),
        "graph_4096.txt",
        "graph_1000000.txt",
        _graph,
        openmp=("bfs", ("bfs.cpp",), f"{THREADS} graph_1000000.txt"),
        openmp_flags=("-DOPEN",),
    ),
    "b+tree": Program(
        "b+tree",
        _TREE,
        "file mil_100000.txt command command.txt",
        "file mil_1000000.txt command command.txt",
        _keys,
        openmp=(
            "b+tree",
            ("main.c", "kernel/kernel_cpu.c", "kernel/kernel_cpu_2.c", "util/timer/timer.c", "util/num/num.c"),
            f"cores {THREADS} file mil_1000000.txt command command.txt",
        ),
    ),
    "cfd": Program(
        "cfd",
        ("euler3d.cu",),
        "domain_384.txt",
        "domain_9600.txt",
        _domain,
        flags=("-Dblock_length=192",),
        folders=("cuda/hybridsort",),
        openmp=("cfd", ("euler3d_cpu.cpp",), "domain_9600.txt"),
        openmp_flags=("-Dblock_length=8",),
    ),
    "dwt2d": Program(
        "dwt2d",
        ("main.cu", "dwt.cu", "components.cu", *(f"dwt_cuda/{name}.cu" for name in ("common", *_WAVELETS))),
        "rgb_192x192.bmp -d 192x192 -f -5 -l 3",
        "rgb_1024x1024.bmp -d 1024x1024 -f -5 -l 3",
        _pixels,
        flags=("-DOUTPUT",),
    ),
    "gaussian": Program("gaussian", ("gaussian.cu",), "-s 64 -q", "-s 1024 -q"),
    "heartwall": Program(
        "heartwall",
        ("main.cu", "AVI/avilib.c", "AVI/avimod.c"),
        "heart_744x656x3.avi 2",
        "heart_744x656x11.avi 10",
        _video,
        openmp=("heartwall", ("main.c", "AVI/avilib.c", "AVI/avimod.c"), f"heart_744x656x11.avi 10 {THREADS}"),
    ),
    "hotspot": Program(
        "hotspot",
        ("hotspot.cu",),
        "64 2 6 temp_64 power_64 out",
        "1024 2 60 temp_1024 power_1024 out",
        _temperatures,
        openmp=("hotspot", ("hotspot_openmp.cpp",), f"1024 1024 60 {THREADS} temp_1024 power_1024 out"),
        openmp_flags=("-DOPEN",),
    ),
    "hotspot3D": Program(
        "hotspot3D",
        ("3D.cu",),
        "64 8 6 power3_64 temp3_64 out",
        "512 8 100 power3_512 temp3_512 out",
        _temperatures,
        openmp=("hotspot3D", ("3D.c",), "512 8 100 power3_512 temp3_512 out"),
    ),
    "huffman": Program(
        "huffman",
        ("main_test_cu.cu", "cpuencode.cpp", "stats_logger.cpp"),
        "text_262144.in",
        "text_4194304.in",
        _text,
        says="PASS! vectors are matching!",
    ),
    "hybridsort": Program(
        "hybridsort", ("main.cu", "bucketsort.cu", "mergesort.cu"), "r", "r", flags=("-DSIZE=(1<<20)",)
    ),
    "kmeans": Program(
        "kmeans",
        ("cluster.c", "getopt.c", "kmeans.c", "kmeans_clustering.c", "rmse.c", "kmeans_cuda.cu"),
        "-o -i points_2000.txt",
        "-o -i points_494020.txt",
        _points,
        openmp=(
            "kmeans/kmeans_openmp",
            ("cluster.c", "getopt.c", "kmeans.c", "kmeans_clustering.c"),
            f"-n {THREADS} -i points_494020.txt",
        ),
    ),
    "lavaMD": Program(
        "lavaMD",
        _LAVA,
        "-boxes1d 2",
        "-boxes1d 10",
        kind="f8",
        openmp=(
            "lavaMD",
            ("main.c", "util/timer/timer.c", "util/num/num.c", "kernel/kernel_cpu.c"),
            f"-cores {THREADS} -boxes1d 10",
        ),
    ),
    # 704: with other widths the last elements of its dilation are not computed.
    "leukocyte": Program(
        "leukocyte",
        (*(f"CUDA/{name}" for name in (*_CELLS, "find_ellipse_kernel.cu", "track_ellipse_kernel.cu")), *_MATRICES),
        "cells_704x480x2.avi 1",
        "cells_704x480x6.avi 5",
        _video,
        tolerance=1e-3,  # in its last round, a thread of IMGVF_kernel writes what its neighbor may not have read yet
        openmp=("leukocyte", (*(f"OpenMP/{name}" for name in _CELLS), *_MATRICES), f"5 {THREADS} cells_704x480x6.avi"),
        openmp_flags=("-DOPEN",),
    ),
    "lud": Program(
        "lud",
        ("cuda/lud.cu", "cuda/lud_kernel.cu", "common/common.c"),
        "-s 128",
        "-s 8000",
        openmp=("lud", ("omp/lud.c", "omp/lud_omp.c", "common/common.c"), f"-n {THREADS} -s 8000"),
    ),
    "myocyte": Program(
        "myocyte",
        ("main.cu",),
        "2 1 0",
        "100 1 0",
        _cell,
        copies=5,
        openmp=("myocyte", ("main.c",), f"100 1 0 {THREADS}"),
    ),
    "nn": Program(
        "nn",
        ("nn_cuda.cu",),
        "hurricanes_16384 -r 5 -lat 30 -lng 90",
        "hurricanes_1048576 -r 5 -lat 30 -lng 90",
        _hurricanes,
        openmp=("nn", ("nn_openmp.c",), "hurricanes_1048576 5 30 90"),
    ),
    "nw": Program(
        "nw",
        ("needle.cu",),
        "256 10",
        "4096 10",
        openmp=("nw", ("needle.cpp",), f"4096 10 {THREADS}"),
        openmp_flags=("-DOPENMP",),
    ),
    "particlefilter_naive": Program(
        "particlefilter",
        ("ex_particle_CUDA_naive_seq.cu",),
        "-x 64 -y 64 -z 4 -np 1000",
        "-x 128 -y 128 -z 10 -np 20000",
        kind="f8",
        openmp=("particlefilter", ("ex_particle_OPENMP_seq.c",), "-x 128 -y 128 -z 10 -np 20000"),
    ),
    "particlefilter_float": Program(
        "particlefilter",
        ("ex_particle_CUDA_float_seq.cu",),
        "-x 64 -y 64 -z 4 -np 400",
        "-x 128 -y 128 -z 10 -np 20000",
        kind="f8",
        openmp=("particlefilter", ("ex_particle_OPENMP_seq.c",), "-x 128 -y 128 -z 10 -np 20000"),
    ),
    "pathfinder": Program(
        "pathfinder",
        ("pathfinder.cu",),
        "4000 40 10",
        "1000000 100 20",
        openmp=("pathfinder", ("pathfinder.cpp",), "1000000 100"),
    ),
    "srad_v1": Program(
        "srad/srad_v1",
        ("main.cu",),
        "4 0.5 64 64",
        "50 0.5 1024 1024",
        _image,
        openmp=("srad/srad_v1", ("main.c",), f"50 0.5 1024 1024 {THREADS}"),
    ),
    "srad_v2": Program(
        "srad/srad_v2",
        ("srad.cu",),
        "64 64 0 31 0 31 0.5 2",
        "2048 2048 0 127 0 127 0.5 10",
        flags=("-DSLACK=65536",),
        openmp=("srad/srad_v2", ("srad.cpp",), f"2048 2048 0 127 0 127 {THREADS} 0.5 10"),
        openmp_flags=("-DOPEN",),
    ),
    "streamcluster": Program(
        "streamcluster",
        ("streamcluster_cuda_cpu.cpp", "streamcluster_cuda.cu"),
        "5 10 32 1024 1024 100 none out 1",
        "10 20 256 16384 16384 1000 none out 1",
        openmp=("streamcluster", ("streamcluster_omp.cpp",), f"10 20 256 16384 16384 1000 none out {THREADS}"),
    ),
}

_LONG = ("cfd", "streamcluster", "lud", "kmeans", "heartwall")  # measured last


def _includes() -> list[str]:
    import nvidia

    return [f"-I{Path(folder) / 'cu13/include'}" for folder in nvidia.__path__]


def _compile_device(text: str, name: str, instances: Sequence[str], flags: Sequence[str], *, fused: bool) -> bytes:
    from cuda.core import Program as Source
    from cuda.core import ProgramOptions

    _driver.initialize()  # NVRTC's bindings ask for a driver
    defines = [tuple(flag[2:].split("=", 1)) if "=" in flag else flag[2:] for flag in flags if flag.startswith("-D")]
    options = ProgramOptions(
        arch="sm_90",
        define_macro=defines or None,
        include_path=[path[2:] for path in _includes()],
        name=name,
        fma=fused,
    )
    # What a host's header has and NVRTC's does not.
    head = _DEVICE_HEAD
    try:
        return bytes(Source(head + text, "c++", options).compile("ptx", name_expressions=instances).code) + b"\0"
    except Exception as problem:
        errors = [line for line in str(problem).splitlines() if "error" in line]
        raise RuntimeError("; ".join(errors[1:3])) from None


def build(program: Program, folder: Path, out: Path, *, on_host: bool = False, fused: bool = True) -> Path:
    """Compile a program to a library whose main() is called; its modules lie beside it."""
    source = folder / "cuda" / program.folder
    folders = (
        source,
        *(path for path in source.rglob("*") if path.is_dir()),
        *(folder / name for name in program.folders),
    )
    work = out / ("host" if on_host else "fused" if fused else "device")
    work.mkdir(parents=True)
    (work / "GL").mkdir()
    (work / "GL" / "glew.h").touch()  # included, not used
    flags = [f"-I{work}", *program.flags, *_GONE, *_includes(), *(f"-I{path}" for path in folders)]
    speed = ["-O3", "-march=native"] if fused else ["-O2", "-ffp-contract=off"]
    common = [*speed, "-fPIC", "-w", "-fno-ipa-icf", *flags]
    objects = []
    for number, name in enumerate(program.sources):
        path = source / name
        if path.suffix == ".cu" or "<<<" in path.read_text(errors="replace"):
            parts = split(path, folders)
            made = work / f"{number}.cpp"
            made.write_text(parts.whole if on_host else parts.host)
            language = [
                "g++",
                "-fpermissive",
                *(["-DKERNELS_ON_HOST"] if on_host else []),
                "-include",
                str(HERE / "cuda_on_host.h"),
            ]
        else:
            parts = None
            made, language = (
                path,
                ["g++", "-fpermissive", "-include", str(HERE / "cuda_on_host.h")]
                if path.suffix == ".cpp"
                else ["gcc", "-fopenmp", "-fcommon"],
            )
        _run([*language, *common, "-c", str(made), "-o", str(work / f"{number}.o")])
        objects.append(str(work / f"{number}.o"))
        if parts is not None and parts.kernels and not on_host:
            named = instances(_run(["nm", "-C", objects[-1]]), parts.kernels)
            module = _compile_device(parts.device, name.replace("/", "_"), named, program.flags, fused=fused)
            (work / f"{number}.ptx").write_bytes(module)
    runtime = HERE / ("cuda_on_host.cpp" if on_host else "cudart.cpp")
    _run(
        [
            "g++",
            *common,
            "-shared",
            "-Wl,-Bsymbolic",
            *objects,
            str(runtime),
            "-o",
            str(work / "program.so"),
            "-lm",
            "-ldl",
            "-fopenmp",
        ]
    )
    return work / "program.so"


def _library(source: Path, out: Path) -> Path:
    _run(["gcc", "-O2", "-shared", "-fPIC", str(source), "-o", str(out / f"{source.stem}.so"), "-ldl"])
    return out / f"{source.stem}.so"


def build_openmp(program: Program, folder: Path, out: Path) -> Path | None:
    """Compile the suite's OpenMP program, if there is one."""
    if program.openmp is None:
        return None
    name, sources, _ = program.openmp
    source = folder / "openmp" / name
    out.mkdir(parents=True, exist_ok=True)
    objects = []
    for number, file in enumerate(sources):
        compiler = "gcc" if file.endswith(".c") else "g++"
        options = [
            "-O3",
            "-march=native",
            "-fopenmp",
            "-w",
            "-fcommon",
            *(["-fpermissive"] if compiler == "g++" else []),
            *(f"-I{path}" for path in (source, *source.rglob("*")) if path.is_dir()),
            *program.openmp_flags,
        ]
        _run([compiler, *options, "-c", str(source / file), "-o", str(out / f"omp{number}.o")])
        objects.append(str(out / f"omp{number}.o"))
    _run(["g++", "-fopenmp", *objects, "-lm", "-o", str(out / "openmp")])
    return out / "openmp"


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line or "undefined" in line]
        raise RuntimeError((lines or done.stderr.splitlines() or ["failed"])[0][:300])
    return done.stdout


def _command(library: Path, arguments: str) -> list[str]:
    return [sys.executable, str(HERE / "cuda_program.py"), str(library), *arguments.split()]


@dataclass(frozen=True)
class Run:
    """What a run took (seconds) and gave.

    Attributes
    ----------
    start
        Processors' until main() began: the interpreter, the device, what loads with a first launch, reading PTX.
    parts
        Processors' in the calls of each name (``cudart.cpp``, ``omp_times.c``).
    """

    wall: float
    processor: float
    start: float
    parts: dict[str, float]
    status: int
    output: str


def _measured(command: Sequence[str], work: Path, watch: Mapping[str, str], touched: int, **environment: str) -> Run:
    """Return what a run takes, and the parts of another one, whose environment has `watch`, too."""
    _touch(touched)
    whole = _timed(command, work, **environment)
    _touch(touched)
    watched = _timed(command, work, TIMES=str(work / "times"), **environment, **watch)
    return replace(whole, start=watched.start, parts=watched.parts, status=min(whole.status, watched.status))


def _touch(size: int) -> None:
    """Use so many bytes of memory, in large pages, and free them."""
    if size:
        with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory[:: mmap.PAGESIZE] = bytes(len(range(0, size, mmap.PAGESIZE)))


def _timed(command: Sequence[str], work: Path, **environment: str) -> Run:
    # Modules that are installed are compiled; a checkout's are, too, unless this is set.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times = work / "times"
    times.unlink(missing_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    done = subprocess.run(
        command,
        cwd=work,
        env={**inherited, **environment},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
    )
    wall = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = [line.split() for line in times.read_text().splitlines()] if times.exists() else []
    parts = {name: float(seconds) for name, _, seconds in lines}
    begin = parts.pop("begin", 0)
    return Run(wall, processor, begin, parts, done.returncode, done.stdout + done.stderr)


def _results(path: Path) -> list[bytes]:
    data, at, found = path.read_bytes() if path.exists() else b"", 0, []
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        found.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    return found


def difference(ours: bytes, theirs: bytes, kind: str) -> float:
    """Return how far two buffers of floats are apart, as a share of the largest. Other numbers must be equal."""
    if ours == theirs:
        return 0.0
    if len(ours) != len(theirs) or len(ours) % np.dtype(kind).itemsize:
        return np.inf
    with np.errstate(invalid="ignore"):
        a, b = (np.frombuffer(data, kind).astype(np.float64) for data in (ours, theirs))
    scale = np.abs(b[np.isfinite(b)]).max(initial=0)
    if not 1e-30 < scale < 1e30 or (np.isfinite(a) != np.isfinite(b)).any():
        return np.inf
    return float(np.nanmax(np.abs(a - b)) / scale)


def compare(program: Program, folder: Path, work: Path) -> str:
    """Return what is wrong with a program's results on small inputs, or how near they are."""
    libraries = [build(program, folder, work, on_host=on_host, fused=False) for on_host in (False, True)]
    place = work / "a" / "b"
    place.mkdir(parents=True)
    os.chdir(place)
    program.inputs(program.small)
    runs = []
    for name, library in zip(("device", "host"), libraries, strict=True):
        command = _command(library, program.small)
        # Some read memory that they never wrote: glibc fills what malloc gives with zeros.
        runs.append(_timed(command, place, RESULTS=str(work / f"{name}.bin"), MALLOC_PERTURB_="255"))
    for name, run in zip(("device", "host"), runs, strict=True):
        if run.status < 0 or _ERROR.search(run.output) or "Traceback" in run.output:
            return f"WRONG: {name} ended with {run.status}: {run.output.strip()[-300:]}"
    ours, theirs = _results(work / "device.bin"), _results(work / "host.bin")
    if program.says:
        return f"{'right' if program.says in runs[0].output else 'WRONG'}: by its own check, {len(ours)} copies"
    if not ours or len(ours) != len(theirs):
        return f"WRONG: {len(ours)} copies to the host, not {len(theirs)}: {runs[0].output.strip()[-200:]}"
    compared = list(zip(ours, theirs, strict=True))[: program.copies or None]
    worst = max(difference(a, b, program.kind) for a, b in compared)
    amount = sum(len(a) for a, _ in compared)
    of = f" of {len(ours)}" if program.copies else ""
    return f"{'right' if worst <= program.tolerance else 'WRONG'}: {len(compared)}{of} copies, {amount:,} B, apart by {worst:.1e}"


def measure(
    program: Program,
    folder: Path,
    work: Path,
    rounds: int,
    threads: int,
    seconds: float = float("inf"),
    touched: int = 0,
) -> dict[str, list[Run]]:
    """Return the runs of a program on large inputs, by who made them: ours, and OpenMP's if there is one.

    Before each, so many bytes are `touched`.
    """
    openmp = build_openmp(program, folder, work)
    place = work / "a" / "b"
    place.mkdir(parents=True, exist_ok=True)
    os.chdir(place)
    program.inputs(program.large)
    ours = _command(build(program, folder, work), program.large)
    watch = _library(HERE / "omp_times.c", work)
    times: dict[str, list[Run]] = {"ours": [], "openmp": []}
    device = f"sim:threads={threads}"
    for _ in range(2):  # compiles; optimizes what the first run has nearly had enough work for
        _timed(ours, place, CUDATOOL_DEVICE=device)
    begin = time.monotonic()
    while len(times["ours"]) < rounds and (not times["ours"] or time.monotonic() - begin < seconds):
        times["ours"].append(_measured(ours, place, {}, touched, CUDATOOL_DEVICE=device))
        if openmp is not None and program.openmp is not None:
            command = [str(openmp), *program.openmp[2].replace(THREADS, str(threads)).split()]
            watched = {"LD_PRELOAD": str(watch)}
            times["openmp"].append(_measured(command, place, watched, touched, OMP_NUM_THREADS=str(threads)))
    for run in (*times["ours"], *times["openmp"]):
        works = {"cuLaunchKernel", "regions"} & run.parts.keys()
        if not works or run.status < 0 or _ERROR.search(run.output) or "Traceback" in run.output:
            raise RuntimeError(f"a measured program ended with {run.status}: {run.output.strip()[-200:]}")
    return {name: runs for name, runs in times.items() if runs}


def describe(times: Mapping[str, list[Run]]) -> str:
    """Return lines on what was measured: the times of each, and their ratio."""
    lines = [_split(name, runs) for name, runs in times.items()]
    if "openmp" in times:
        wall, whole, part = (
            statistics.median(of(run) for run in times["ours"]) / statistics.median(of(run) for run in times["openmp"])
            for of in (lambda run: run.wall, lambda run: run.processor, lambda run: sum(run.parts.values()))
        )
        lines.append(f"{wall:.2f} times OpenMP's; of processors {whole:.2f}, copies and kernels to regions {part:.2f}")
    return "\n".join(" " * 23 + line for line in lines)


HEAD = """\
| program | turns | start | copies | kernels | whole | OpenMP: regions | whole | computing | ratio of wholes |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|
"""


def row(name: str, times: Mapping[str, list[Run]]) -> str:
    """Return a program's row of the table: processor time of the median runs, in seconds, and two ratios."""
    ours, openmp = _median(times["ours"]), _median(times["openmp"])
    called, regions = sum(ours.parts.values()), sum(openmp.parts.values())
    copies = _copies(ours)
    numbers = (ours.start, copies, called - copies, ours.processor, regions, openmp.processor)
    ratios = (called / regions, ours.processor / openmp.processor)
    cells = (name, str(len(times["ours"])), *(f"{number:.2f}" for number in (*numbers, *ratios)))
    return f"| {' | '.join(cells)} |\n"


_COPIES = re.compile("cuMemcpy|cuMemset")


def _median(runs: Sequence[Run]) -> Run:
    return sorted(runs, key=lambda run: run.processor)[(len(runs) - 1) // 2]


def _copies(run: Run) -> float:
    return sum(seconds for call, seconds in run.parts.items() if _COPIES.match(call))


def _split(name: str, runs: Sequence[Run]) -> str:
    """Return where the time of the median run goes."""
    run = _median(runs)
    called = sum(run.parts.values())
    text = f"{name:7} {run.wall:7.2f} s, {run.processor:.2f} s of processors: "
    if name == "openmp":
        return text + f"{called:.2f} s in parallel regions"
    copies = _copies(run)
    host = run.processor - run.start - called
    return text + (
        f"{run.start:.2f} s start, {copies:.2f} s copies, {called - copies:.2f} s kernels and other calls, "
        f"{host:.2f} s of the program's own"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--times", type=int, default=0, metavar="N", help="measure each N times")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), metavar="S", help="begin no more turns of a program after S s"
    )
    parser.add_argument("--only-times", action="store_true", help="compare no results")
    parser.add_argument("--touch", type=int, default=0, metavar="N", help="touch N MiB of memory before each run")
    parser.add_argument("--table", type=Path, metavar="FILE", help="add the rows of a table to a file")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="that kernels and OpenMP use"
    )
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.table:
        arguments.table = arguments.table.resolve()  # programs run in folders of their own
    os.environ.setdefault("CUDATOOL_DEVICE", "sim")
    wrong = 0
    if arguments.table and not arguments.table.exists():
        arguments.table.write_text(HEAD)
    for name, program in sorted(PROGRAMS.items(), key=lambda item: _LONG.index(item[0]) if item[0] in _LONG else -1):
        if arguments.only not in name:
            continue
        work = Path(tempfile.mkdtemp())
        try:
            text = "not compared" if arguments.only_times else compare(program, folder, work)
            if arguments.times and not text.startswith("WRONG"):
                bounds = arguments.times, arguments.threads, arguments.seconds, arguments.touch << 20
                times = measure(program, folder, work, *bounds)
                text += "\n" + describe(times)
                if arguments.table and "openmp" in times:
                    with arguments.table.open("a") as table:
                        table.write(row(name, times))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            text = f"WRONG: {error}"
        finally:
            os.chdir(folder)
            shutil.rmtree(work)
        wrong += text.startswith("WRONG")
        print(f"{name:22} {text}", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
