"""Rodinia's CUDA programs on the software device: are the results right, and how long do they take?

    python tests/peers/rodinia_suite.py DIR [--only TEXT] [--times N]

DIR is a checkout of yuhc/gpu-rodinia. Its programs are C++: hosts are compiled with g++, kernels with NVRTC, and
``cudart.cpp`` stands in for the part of CUDA's runtime that they call, on the driver API of the software device.

What the device gives to a program is held against the same program with its kernels compiled for the host by g++
(``cuda_on_host.cpp``), which shares no code with the software device. ``--times`` runs larger inputs, and the suite's
own OpenMP program on as many threads as there are processors, in turns: whole programs, input and output included.

Not here: heartwall, leukocyte, mummergpu, myocyte and dwt2d, whose inputs are no part of the repository.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from cuda_sources import split

from cudatool import _driver

HERE = Path(__file__).resolve().parent
THREADS = len(os.sched_getaffinity(0))
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
_TOLERANCE = 1e-5  # of the largest value: functions of the host differ in the last places


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
    says
        What it prints if its own check is passed. Its kernels rely on warps that run in step, as fibers do not.
    kind
        The type of the floats that the device gives.
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
    says: str = ""
    kind: str = "f4"
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
    with open("filelist", "w") as file:
        file.write("cane.db\n")
    count = 1 << 20 if "large" in arguments else 1 << 14
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
    values = np.random.default_rng(4).uniform(0, 255, (count, 34))
    with open(path, "w") as file:
        for i, row in enumerate(values):
            file.write(f"{i} " + " ".join(f"{x:.3f}" for x in row) + "\n")


def _keys(arguments: str) -> None:
    count = int(arguments.partition("mil_")[2].partition(".")[0])
    with open(f"mil_{count}.txt", "w") as file:
        file.write(f"{count}\n" + "".join(f"{i}\n" for i in range(count)))
    Path("command.txt").write_text("j 6000 3000\nk 10000\n")


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


_LAVA = ("main.c", "util/timer/timer.c", "util/num/num.c", "kernel/kernel_gpu_cuda_wrapper.cu", "util/device/device.cu")
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
        "524288",
        openmp=("backprop", ("backprop.c", "facetrain.c", "imagenet.c", "backprop_kernel.c"), "524288"),
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
    ),
    "cfd": Program(
        "cfd",
        ("euler3d.cu",),
        "domain_384.txt",
        "domain_6144.txt",
        _domain,
        flags=("-Dblock_length=192",),
        folders=("cuda/hybridsort",),
        openmp=("cfd", ("euler3d_cpu.cpp",), "domain_6144.txt"),
        openmp_flags=("-Dblock_length=8",),
    ),
    "gaussian": Program("gaussian", ("gaussian.cu",), "-s 64 -q", "-s 1024 -q"),
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
        "-o -i points_100000.txt",
        _points,
        openmp=(
            "kmeans/kmeans_openmp",
            ("cluster.c", "getopt.c", "kmeans.c", "kmeans_clustering.c"),
            f"-n {THREADS} -i points_100000.txt",
        ),
    ),
    "lavaMD": Program(
        "lavaMD",
        _LAVA,
        "-boxes1d 2",
        "-boxes1d 8",
        kind="f8",
        openmp=(
            "lavaMD",
            ("main.c", "util/timer/timer.c", "util/num/num.c", "kernel/kernel_cpu.c"),
            f"-cores {THREADS} -boxes1d 8",
        ),
    ),
    "lud": Program(
        "lud",
        ("cuda/lud.cu", "cuda/lud_kernel.cu", "common/common.c"),
        "-s 128",
        "-s 2048",
        openmp=("lud", ("omp/lud.c", "omp/lud_omp.c", "common/common.c"), f"-n {THREADS} -s 2048"),
    ),
    "nn": Program(
        "nn", ("nn_cuda.cu",), "filelist -r 5 -lat 30 -lng 90", "filelist -r 5 -lat 30 -lng 90 -large", _hurricanes
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
        "10 20 64 16384 16384 1000 none out 1",
        openmp=("streamcluster", ("streamcluster_omp.cpp",), f"10 20 64 16384 16384 1000 none out {THREADS}"),
    ),
}


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
    common = ["-O2", "-fPIC", "-w", "-fno-ipa-icf", "-ffp-contract=off", *flags]
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
            if not on_host and "__global__" in parts.device:
                module = _compile_device(
                    parts.device, name.replace("/", "_"), parts.instances, program.flags, fused=fused
                )
                (work / f"{number}.ptx").write_bytes(module)
        else:
            made, language = (
                path,
                ["g++", "-fpermissive", "-include", str(HERE / "cuda_on_host.h")]
                if path.suffix == ".cpp"
                else ["gcc", "-fopenmp", "-fcommon"],
            )
        _run([*language, *common, "-c", str(made), "-o", str(work / f"{number}.o")])
        objects.append(str(work / f"{number}.o"))
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


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line or "undefined" in line]
        raise RuntimeError((lines or done.stderr.splitlines() or ["failed"])[0][:300])


def call(library: Path, arguments: Sequence[str]) -> int:
    """Run a program in this process."""
    _driver.initialize()
    program = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    for module in sorted(library.parent.glob("*.ptx")):
        if program.add_module(module.read_bytes()):
            raise RuntimeError(f"{module.name} cannot be loaded")
    words = [library.stem.encode(), *(word.encode() for word in arguments)]
    argv = (ctypes.c_char_p * (len(words) + 1))(*words, None)
    main = program.main
    return int(main(len(words), argv))


@dataclass(frozen=True)
class Run:
    """What a run took (seconds) and gave."""

    wall: float
    processor: float
    status: int
    output: str


def _timed(command: Sequence[str], work: Path, **environment: str) -> Run:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=work,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=900,
    )
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(wall, processor, done.returncode, done.stdout + done.stderr)


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
        command = [sys.executable, __file__, "--call", str(library), *program.small.split()]
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
    worst = max(difference(a, b, program.kind) for a, b in zip(ours, theirs, strict=True))
    amount = sum(map(len, ours))
    return f"{'right' if worst <= _TOLERANCE else 'WRONG'}: {len(ours)} copies, {amount:,} B, apart by {worst:.1e}"


def measure(program: Program, folder: Path, work: Path, rounds: int) -> str:
    """Return the times of a program on large inputs: ours, those of OpenMP, and their ratio."""
    openmp = build_openmp(program, folder, work)
    place = work / "a" / "b"
    os.chdir(place)
    program.inputs(program.large)
    ours = [sys.executable, __file__, "--call", str(build(program, folder, work)), *program.large.split()]
    times: dict[str, list[Run]] = {"ours": [], "openmp": []}
    _timed(ours, place)  # compiles
    for _ in range(rounds):
        times["ours"].append(_timed(ours, place))
        if openmp is not None and program.openmp is not None:
            times["openmp"].append(
                _timed([str(openmp), *program.openmp[2].split()], place, OMP_NUM_THREADS=str(THREADS))
            )
    for run in times["openmp"]:
        if run.status:
            raise RuntimeError(f"OpenMP ended with {run.status}: {run.output.strip()[-200:]}")
    wall, processor = (statistics.median(getattr(run, what) for run in times["ours"]) for what in ("wall", "processor"))
    text = f"{wall:7.2f} s ({processor:.2f} s of processors)"
    if times["openmp"]:
        theirs = statistics.median(run.wall for run in times["openmp"])
        used = statistics.median(run.processor for run in times["openmp"])
        text += f"; OpenMP {theirs:.2f} s ({used:.2f}): {wall / theirs:.2f} times"
    return text


def main() -> None:
    if sys.argv[1:2] == ["--call"]:
        sys.exit(call(Path(sys.argv[2]), sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--times", type=int, default=0, metavar="N", help="measure each N times")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    os.environ.setdefault("CUDATOOL_DEVICE", "sim")
    wrong = 0
    for name, program in PROGRAMS.items():
        if arguments.only not in name:
            continue
        work = Path(tempfile.mkdtemp())
        try:
            text = compare(program, folder, work)
            if arguments.times and text.startswith("right"):
                text += "\n" + " " * 23 + measure(program, folder, work, arguments.times)
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
