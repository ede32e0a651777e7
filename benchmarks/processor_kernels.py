"""Thirty kernels as CUDA C++ and OpenCL C, from one text, and as C with OpenMP: what bench_processors.py measures.

Kernels of classes that programs have, written as one writes them for a GPU: none is tuned for any of the three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CUDA", "Case", "OPENCL", "OPENMP", "cases"]

CUDA = """
#define KERNEL extern "C" __global__ void
#define DEVICE __device__ inline
#define GLOBAL
#define SHARED(type, name, count) __shared__ type name[count]
#define SYNC __syncthreads()
#define TX (int)threadIdx.x
#define TY (int)threadIdx.y
#define BX (int)blockIdx.x
#define BY (int)blockIdx.y
#define DX (int)blockDim.x
#define GX (int)(blockIdx.x * blockDim.x + threadIdx.x)
#define GY (int)(blockIdx.y * blockDim.y + threadIdx.y)
#define GZ (int)(blockIdx.z * blockDim.z + threadIdx.z)
#define SPAN (int)(gridDim.x * blockDim.x)
#define ADD(where, what) atomicAdd(where, what)
#define BITS(x) __popc(x)
"""

OPENCL = """
#define KERNEL __kernel void
#define DEVICE static inline
#define GLOBAL __global
#define SHARED(type, name, count) __local type name[count]
#define SYNC barrier(CLK_LOCAL_MEM_FENCE)
#define TX (int)get_local_id(0)
#define TY (int)get_local_id(1)
#define BX (int)get_group_id(0)
#define BY (int)get_group_id(1)
#define DX (int)get_local_size(0)
#define GX (int)get_global_id(0)
#define GY (int)get_global_id(1)
#define GZ (int)get_global_id(2)
#define SPAN (int)get_global_size(0)
#define ADD(where, what) atomic_add(where, what)
#define BITS(x) popcount(x)
#define expf exp
#define logf log
#define sqrtf sqrt
#define fabsf fabs
#define fmaxf fmax
"""

OPENMP = """
#include <math.h>
#define DEVICE static inline
#define FOR _Pragma("omp parallel for schedule(static)") for
#define BITS(x) __builtin_popcount(x)
"""

N = 1 << 22
M = 1024
_f32 = np.float32
Array = npt.NDArray[Any]


@dataclass
class Case:
    """A kernel, how it is launched, and the same work as a function in C.

    Attributes
    ----------
    kernel, c
        The bodies; `arguments` are declared before them, of the arrays and of the numbers in the order given.
    arrays
        What is passed; those whose names are in `results` are compared afterwards.
    steps
        The numbers of each launch.
    """

    name: str
    arguments: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arrays: list[Array]
    results: Sequence[int]
    kernel: str
    c: str
    steps: list[tuple[Any, ...]] = field(default_factory=lambda: [()])
    before: str = ""
    tolerance: float = 1e-4

    def source(self, prelude: str) -> str:
        """Return the program for CUDA or OpenCL."""
        arguments = ", ".join(f"GLOBAL {each}" if "*" in each else each for each in self.arguments.split(", "))
        return f"{prelude}\n{self.before}\nKERNEL {self.name}({arguments}) {{{self.kernel}}}\n"

    def c_source(self) -> str:
        """Return the function in C."""
        arguments = self.arguments.replace("*", "*restrict ")
        return f"{self.before}\nvoid {self.name}({arguments}) {{{self.c}}}\n"


def cases() -> list[Case]:
    """Return all of them, with the same numbers each time."""
    rng = np.random.default_rng(1)

    def floats(*shape: int) -> Array:
        return rng.random(shape, _f32)

    def zeros(*shape: int, dtype: Any = _f32) -> Array:
        return np.zeros(shape, dtype)

    line, blocks = ((N // 256,), (256,)), ((256,), (256,))
    plane = ((M // 16, M // 16), (16, 16))
    found: list[Case] = []

    def case(
        name: str, arguments: str, shape: tuple[tuple[int, ...], tuple[int, ...]], *rest: Any, **more: Any
    ) -> None:
        found.append(Case(name, arguments, *shape, *rest, **more))

    case(
        "saxpy",
        "float *x, float *y, float a, int n",
        line,
        [floats(N), floats(N)],
        [1],
        "int i = GX; if (i < n) y[i] = a * x[i] + y[i];",
        "FOR (int i = 0; i < n; i++) y[i] = a * x[i] + y[i];",
        [(2.0, N)],
    )
    case(
        "saxpy_stride",
        "float *x, float *y, float a, int n",
        blocks,
        [floats(N), floats(N)],
        [1],
        "for (int i = GX; i < n; i += SPAN) y[i] = a * x[i] + y[i];",
        "FOR (int i = 0; i < n; i++) y[i] = a * x[i] + y[i];",
        [(2.0, N)],
    )
    tree = "part[TX] = sum; SYNC; for (int s = 128; s > 0; s /= 2) { if (TX < s) part[TX] += part[TX + s]; SYNC; }"
    case(
        "reduce_blocks",
        "float *x, float *out, int n",
        line,
        [floats(N), zeros(N // 256)],
        [1],
        f"SHARED(float, part, 256); float sum = GX < n ? x[GX] : 0; {tree} if (TX == 0) out[BX] = part[0];",
        'FOR (int b = 0; b < n / 256; b++) { float s = 0; _Pragma("omp simd reduction(+:s)")'
        " for (int i = 0; i < 256; i++) s += x[b * 256 + i]; out[b] = s; }",
        [(N,)],
    )
    case(
        "reduce_stride",
        "float *x, float *out, int n",
        blocks,
        [floats(N), zeros(256)],
        [],
        f"SHARED(float, part, 256); float sum = 0; for (int i = GX; i < n; i += SPAN) sum += x[i];"
        f"{tree} if (TX == 0) out[BX] = part[0];",
        'float s = 0; _Pragma("omp parallel for simd reduction(+:s)") for (int i = 0; i < n; i++) s += x[i]; '
        "out[0] = s;",
        [(N,)],
    )
    case(
        "scan_blocks",
        "float *x, float *out, int n",
        line,
        [floats(N), zeros(N)],
        [1],
        "SHARED(float, a, 256); SHARED(float, b, 256); a[TX] = x[GX]; SYNC;"
        "for (int d = 1; d < 256; d *= 4) { b[TX] = TX >= d ? a[TX] + a[TX - d] : a[TX]; SYNC;"
        " a[TX] = TX >= 2 * d ? b[TX] + b[TX - 2 * d] : b[TX]; SYNC; } out[GX] = a[TX];",
        "FOR (int b = 0; b < n / 256; b++) { float s = 0; for (int i = 0; i < 256; i++) out[b * 256 + i] = s += "
        "x[b * 256 + i]; }",
        [(N,)],
    )
    case(
        "histogram",
        "unsigned char *x, int *bins, int n",
        blocks,
        [rng.integers(0, 256, N, np.uint8), zeros(256, dtype=np.int32)],
        [1],
        "SHARED(int, own, 256); own[TX] = 0; SYNC; for (int i = GX; i < n; i += SPAN) ADD(&own[x[i]], 1);"
        "SYNC; ADD(&bins[TX], own[TX]);",
        '_Pragma("omp parallel") { int own[256] = {0}; _Pragma("omp for") for (int i = 0; i < n; i++) own[x[i]]++;'
        ' for (int i = 0; i < 256; i++) { _Pragma("omp atomic") bins[i] += own[i]; } }',
        [(N,)],
    )
    case(
        "transpose",
        "float *x, float *y, int n",
        plane,
        [floats(M, M), zeros(M, M)],
        [1],
        "y[GX * n + GY] = x[GY * n + GX];",
        "FOR (int i = 0; i < n; i++) for (int j = 0; j < n; j++) y[j * n + i] = x[i * n + j];",
        [(M,)],
    )
    case(
        "transpose_tiled",
        "float *x, float *y, int n",
        plane,
        [floats(M, M), zeros(M, M)],
        [1],
        "SHARED(float, tile, 16 * 17); tile[TY * 17 + TX] = x[GY * n + GX]; SYNC;"
        "y[(BX * 16 + TY) * n + BY * 16 + TX] = tile[TX * 17 + TY];",
        "FOR (int i = 0; i < n; i += 16) for (int j = 0; j < n; j += 16) for (int k = i; k < i + 16; k++)"
        " for (int l = j; l < j + 16; l++) y[l * n + k] = x[k * n + l];",
        [(M,)],
    )
    m = 256
    square = ((m // 16, m // 16), (16, 16))
    multiply = (
        "FOR (int i = 0; i < n; i++) { for (int j = 0; j < n; j++) c[i * n + j] = 0;"
        " for (int k = 0; k < n; k++) for (int j = 0; j < n; j++) c[i * n + j] += a[i * n + k] * b[k * n + j]; }"
    )
    case(
        "matmul",
        "float *a, float *b, float *c, int n",
        square,
        [floats(m, m), floats(m, m), zeros(m, m)],
        [2],
        "float s = 0; for (int k = 0; k < n; k++) s += a[GY * n + k] * b[k * n + GX]; c[GY * n + GX] = s;",
        multiply,
        [(m,)],
    )
    case(
        "matmul_tiled",
        "float *a, float *b, float *c, int n",
        square,
        [floats(m, m), floats(m, m), zeros(m, m)],
        [2],
        "SHARED(float, p, 256); SHARED(float, q, 256); float s = 0; for (int t = 0; t < n; t += 16) {"
        " p[TY * 16 + TX] = a[GY * n + t + TX]; q[TY * 16 + TX] = b[(t + TY) * n + GX]; SYNC;"
        " for (int k = 0; k < 16; k++) s += p[TY * 16 + k] * q[k * 16 + TX]; SYNC; } c[GY * n + GX] = s;",
        multiply,
        [(m,)],
    )
    case(
        "stencil_shared",
        "float *x, float *y, int n",
        line,
        [floats(N + 8), zeros(N)],
        [1],
        "SHARED(float, t, 264); t[TX] = x[GX]; if (TX < 8) t[TX + 256] = x[GX + 256]; SYNC;"
        "float s = 0; for (int k = 0; k < 9; k++) s += t[TX + k]; y[GX] = s;",
        "FOR (int i = 0; i < n; i++) { float s = 0; for (int k = 0; k < 9; k++) s += x[i + k]; y[i] = s; }",
        [(N,)],
    )
    inside = "int i = GX, j = GY; if (i > 0 && j > 0 && i < n - 1 && j < n - 1)"
    over = "FOR (int j = 1; j < n - 1; j++) for (int i = 1; i < n - 1; i++)"
    five = (
        "y[j * n + i] = 0.2f * (x[j * n + i] + x[j * n + i - 1] + x[j * n + i + 1] + x[j * n - n + i] + x[j * "
        "n + n + i]);"
    )
    case(
        "jacobi",
        "float *x, float *y, int n",
        plane,
        [floats(M, M), zeros(M, M)],
        [1],
        f"{inside} {five}",
        f"{over} {five}",
        [(M,)],
    )
    seven = (
        "y[(k * n + j) * n + i] = x[(k * n + j) * n + i] * 0.4f + 0.1f * (x[(k * n + j) * n + i - 1] + x[(k * n "
        "+ j) * n + i + 1]"
        " + x[(k * n + j - 1) * n + i] + x[(k * n + j + 1) * n + i] + x[(k * n - n + j) * n + i] + x[(k * n + n "
        "+ j) * n + i]);"
    )
    case(
        "heat3d",
        "float *x, float *y, int n",
        ((4, 32, 32), (32, 4, 4)),
        [floats(128, 128, 128), zeros(128, 128, 128)],
        [1],
        f"int i = GX, j = GY, k = GZ; if (i > 0 && j > 0 && k > 0 && i < n - 1 && j < n - 1 && k < n - 1) {seven}",
        f"FOR (int k = 1; k < n - 1; k++) for (int j = 1; j < n - 1; j++) for (int i = 1; i < n - 1; i++) {seven}",
        [(128,)],
    )
    window = (
        "float s = 0; for (int v = 0; v < 5; v++) for (int u = 0; u < 5; u++) s += w[v * 5 + u] * x[(j + v) "
        "* (n + 4) + i + u];"
    )
    case(
        "convolution",
        "float *x, float *w, float *y, int n",
        plane,
        [floats(M + 4, M + 4), floats(25), zeros(M, M)],
        [2],
        f"int i = GX, j = GY; {window} y[j * n + i] = s;",
        f"FOR (int j = 0; j < n; j++) for (int i = 0; i < n; i++) {{ {window} y[j * n + i] = s; }}",
        [(M,)],
    )
    sobel = (
        "int g = x[(j - 1) * n + i + 1] + 2 * x[j * n + i + 1] + x[(j + 1) * n + i + 1] - x[(j - 1) * n + i - 1] -"
        " 2 * x[j * n + i - 1] - x[(j + 1) * n + i - 1]; y[j * n + i] = g < 0 ? 0 : g > 255 ? 255 : g;"
    )
    image = rng.integers(0, 256, (M, M), np.uint8)
    case(
        "sobel",
        "unsigned char *x, unsigned char *y, int n",
        plane,
        [image, zeros(M, M, dtype=np.uint8)],
        [1],
        f"{inside} {{ {sobel} }}",
        f"{over} {{ {sobel} }}",
        [(M,)],
    )
    life = (
        "int c = 0; for (int v = -1; v < 2; v++) for (int u = -1; u < 2; u++) c += x[(j + v) * n + i + u];"
        " y[j * n + i] = c == 3 || (c == 4 && x[j * n + i]);"
    )
    case(
        "life",
        "int *x, int *y, int n",
        plane,
        [rng.integers(0, 2, (M, M), np.int32), zeros(M, M, dtype=np.int32)],
        [1],
        f"{inside} {{ {life} }}",
        f"{over} {{ {life} }}",
        [(M,)],
    )
    pull = (
        "float fx = 0, fy = 0, fz = 0; for (int j = 0; j < n; j++) { float dx = p[4 * j] - p[4 * i],"
        " dy = p[4 * j + 1] - p[4 * i + 1], dz = p[4 * j + 2] - p[4 * i + 2];"
        " float d = dx * dx + dy * dy + dz * dz + 0.01f, w = p[4 * j + 3] / (d * sqrtf(d)); fx += dx * w; fy += "
        "dy * w; fz += dz * w; }"
        " f[3 * i] = fx; f[3 * i + 1] = fy; f[3 * i + 2] = fz;"
    )
    case(
        "nbody",
        "float *p, float *f, int n",
        ((16,), (128,)),
        [floats(2048, 4), zeros(2048, 3)],
        [1],
        f"int i = GX; {pull}",
        f"FOR (int i = 0; i < n; i++) {{ {pull} }}",
        [(2048,)],
        tolerance=1e-2,
    )
    escape = (
        "float cx = -2.0f + 3.0f * i / n, cy = -1.5f + 3.0f * j / n, zx = 0, zy = 0; int k = 0;"
        " while (k < 64 && zx * zx + zy * zy < 4.0f) { float t = zx * zx - zy * zy + cx; zy = 2.0f * zx * zy + "
        "cy; zx = t; k++; }"
        " y[j * n + i] = k;"
    )
    case(
        "mandelbrot",
        "int *y, int n",
        ((32, 32), (16, 16)),
        [zeros(512, 512, dtype=np.int32)],
        [],
        f"int i = GX, j = GY; {escape}",
        f"FOR (int j = 0; j < n; j++) for (int i = 0; i < n; i++) {{ {escape} }}",
        [(512,)],
    )
    normal = """
DEVICE float normal(float d) {
    float k = 1.0f / (1.0f + 0.2316419f * fabsf(d));
    float c = 0.39894228f * expf(-0.5f * d * d)
        * (k * (0.31938153f + k * (-0.356563782f + k * (1.781477937f + k * (-1.821255978f + k * 1.330274429f)))));
    return d > 0 ? 1.0f - c : c;
}
"""
    price = (
        "float t = years[i], s = sqrtf(t), d = (logf(spot[i] / strike[i]) + 0.065f * t) / (0.3f * s), e = d - 0.3f * s;"
        " call[i] = spot[i] * normal(d) - strike[i] * expf(-0.02f * t) * normal(e);"
    )
    q = N // 4
    case(
        "black_scholes",
        "float *spot, float *strike, float *years, float *call, int n",
        ((q // 256,), (256,)),
        [floats(q) + 1, floats(q) + 1, floats(q) + _f32(0.1), zeros(q)],
        [3],
        f"int i = GX; if (i < n) {{ {price} }}",
        f"FOR (int i = 0; i < n; i++) {{ {price} }}",
        [(q,)],
        before=normal,
        tolerance=1e-3,
    )
    horner = "float v = x[i], s = 0.1f; for (int k = 0; k < 32; k++) s = s * v + 0.25f; y[i] = s;"
    case(
        "polynomial",
        "float *x, float *y, int n",
        line,
        [floats(N) * _f32(0.5), zeros(N)],
        [1],
        f"int i = GX; {horner}",
        f"FOR (int i = 0; i < n; i++) {{ {horner} }}",
        [(N,)],
    )
    rows = 1 << 17
    starts = np.concatenate([[0], np.cumsum(rng.integers(0, 17, rows))]).astype(np.int32)
    product = "float s = 0; for (int k = start[i]; k < start[i + 1]; k++) s += value[k] * x[column[k]]; y[i] = s;"
    case(
        "spmv",
        "int *start, int *column, float *value, float *x, float *y, int n",
        ((rows // 256,), (256,)),
        [starts, rng.integers(0, rows, starts[-1]).astype(np.int32), floats(starts[-1]), floats(rows), zeros(rows)],
        [4],
        f"int i = GX; {product}",
        f"FOR (int i = 0; i < n; i++) {{ {product} }}",
        [(rows,)],
    )
    order = rng.permutation(N).astype(np.int32)
    case(
        "gather",
        "float *x, int *at, float *y, int n",
        line,
        [floats(N), order, zeros(N)],
        [2],
        "int i = GX; if (i < n) y[i] = x[at[i]];",
        "FOR (int i = 0; i < n; i++) y[i] = x[at[i]];",
        [(N,)],
    )
    case(
        "scatter",
        "float *x, int *at, float *y, int n",
        line,
        [floats(N), order, zeros(N)],
        [2],
        "int i = GX; if (i < n) y[at[i]] = x[i];",
        "FOR (int i = 0; i < n; i++) y[at[i]] = x[i];",
        [(N,)],
    )
    swap = (
        "int l = i ^ j; if (l > i) { float a = x[i], b = x[l]; if ((a > b) == ((i & k) == 0)) { x[i] = b; x[l] = a; } }"
    )
    s = 1 << 16
    case(
        "bitonic",
        "float *x, int j, int k, int n",
        ((s // 256,), (256,)),
        [floats(s)],
        [0],
        f"int i = GX; {swap}",
        f"FOR (int i = 0; i < n; i++) {{ {swap} }}",
        [(1 << j, 1 << k, s) for k in range(1, 17) for j in reversed(range(k))],
    )
    w = 256
    relax = "float t = d[i * n + k] + d[k * n + j]; if (t < d[i * n + j]) d[i * n + j] = t;"
    case(
        "floyd_warshall",
        "float *d, int k, int n",
        ((w // 16, w // 16), (16, 16)),
        [floats(w, w)],
        [0],
        f"int j = GX, i = GY; {relax}",
        f"FOR (int i = 0; i < n; i++) for (int j = 0; j < n; j++) {{ {relax} }}",
        [(k, w) for k in range(w)],
    )
    most = tree.replace("part[TX] += part[TX + s]", "part[TX] = fmaxf(part[TX], part[TX + s])").replace(
        "= sum;", "= most;", 1
    )
    case(
        "softmax",
        "float *x, float *y, int n",
        ((1024,), (256,)),
        [floats(1024, 1024), zeros(1024, 1024)],
        [1],
        "SHARED(float, part, 256); float most = -1e30f; for (int i = TX; i < n; i += DX) most = fmaxf(most, x[BX "
        "* n + i]);"
        f"{most} most = part[0]; SYNC; float sum = 0; for (int i = TX; i < n; i += DX) sum += expf(x[BX * n + i] "
        f"- most);"
        f"{tree} for (int i = TX; i < n; i += DX) y[BX * n + i] = expf(x[BX * n + i] - most) / part[0];",
        "FOR (int r = 0; r < 1024; r++) { float m = -1e30f, s = 0; for (int i = 0; i < n; i++) m = fmaxf(m, x[r "
        "* n + i]);"
        " for (int i = 0; i < n; i++) s += y[r * n + i] = expf(x[r * n + i] - m); for (int i = 0; i < n; i++) "
        "y[r * n + i] /= s; }",
        [(1024,)],
    )
    case(
        "layer_norm",
        "float *x, float *y, int n",
        ((1024,), (256,)),
        [floats(1024, 1024), zeros(1024, 1024)],
        [1],
        "SHARED(float, part, 256); float sum = 0; for (int i = TX; i < n; i += DX) sum += x[BX * n + i];"
        f"{tree} float mean = part[0] / n; SYNC; sum = 0;"
        "for (int i = TX; i < n; i += DX) sum += (x[BX * n + i] - mean) * (x[BX * n + i] - mean);"
        f"{tree} float scale = 1.0f / sqrtf(part[0] / n + 1e-5f);"
        "for (int i = TX; i < n; i += DX) y[BX * n + i] = (x[BX * n + i] - mean) * scale;",
        'FOR (int r = 0; r < 1024; r++) { float s = 0, v = 0; _Pragma("omp simd reduction(+:s)") for (int i = 0; '
        "i < n; i++) s += x[r * n + i];"
        ' float m = s / n; _Pragma("omp simd reduction(+:v)") for (int i = 0; i < n; i++) v += (x[r * n + i] - '
        "m) * (x[r * n + i] - m);"
        " float f = 1.0f / sqrtf(v / n + 1e-5f); for (int i = 0; i < n; i++) y[r * n + i] = (x[r * n + i] - m) * f; }",
        [(1024,)],
    )
    nearest = (
        "int b = 0; float least = 1e30f; for (int c = 0; c < 16; c++) { float d = 0; for (int f = 0; f < 8; f++) {"
        " float t = x[f * n + i] - m[c * 8 + f]; d += t * t; } if (d < least) { least = d; b = c; } } out[i] = b;"
    )
    case(
        "kmeans",
        "float *x, float *m, int *out, int n",
        ((rows // 256,), (256,)),
        [floats(8, rows), floats(16, 8), zeros(rows, dtype=np.int32)],
        [],
        f"int i = GX; {nearest}",
        f"FOR (int i = 0; i < n; i++) {{ {nearest} }}",
        [(rows,)],
    )
    throw = (
        "unsigned int r = i * 747796405u + 2891336453u; int h = 0; for (int k = 0; k < 64; k++) { r ^= r << 13; "
        "r ^= r >> 17; r ^= r << 5;"
        " float u = (r & 65535) / 65536.0f, v = (r >> 16) / 65536.0f; h += u * u + v * v < 1.0f; } out[i] = h;"
    )
    case(
        "monte_carlo",
        "int *out, int n",
        ((1024,), (256,)),
        [zeros(1 << 18, dtype=np.int32)],
        [0],
        f"int i = GX; {throw}",
        f"FOR (int i = 0; i < n; i++) {{ {throw} }}",
        [(1 << 18,)],
    )
    case(
        "gray",
        "unsigned char *x, unsigned char *y, int n",
        line,
        [rng.integers(0, 256, 3 * N, np.uint8), zeros(N, dtype=np.uint8)],
        [1],
        "int i = GX; if (i < n) y[i] = (x[3 * i] * 77 + x[3 * i + 1] * 150 + x[3 * i + 2] * 29) >> 8;",
        "FOR (int i = 0; i < n; i++) y[i] = (x[3 * i] * 77 + x[3 * i + 1] * 150 + x[3 * i + 2] * 29) >> 8;",
        [(N,)],
    )
    return found
