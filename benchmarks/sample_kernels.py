"""Ten kernels of the kinds that NVIDIA's samples show, for ``bench_processors.py --samples``.

No rule of the software device was made for them: what it does for the thirty of processor_kernels.py it should do here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from processor_kernels import Array, Case

__all__ = ["cases"]

_f32 = np.float32


def cases() -> list[Case]:
    """Return all of them, with the same numbers each time."""
    rng = np.random.default_rng(2)

    def floats(*shape: int) -> Array:
        return rng.random(shape, _f32)

    def zeros(*shape: int, dtype: Any = _f32) -> Array:
        return np.zeros(shape, dtype)

    m, radius = 1024, 8
    convolution = Case(
        "convolution_rows",
        "float *x, float *w, float *y, int n",
        (m // 64, m // 4),
        (64, 4),
        [floats(m, m + 2 * radius), floats(2 * radius + 1), zeros(m, m)],
        [2],
        "SHARED(float, t, 4 * 80); int pitch = n + 16, from = GY * pitch + GX; t[TY * 80 + TX] = x[from];"
        "if (TX < 16) t[TY * 80 + 64 + TX] = x[from + 64]; SYNC;"
        "float s = 0; for (int k = 0; k < 17; k++) s += w[k] * t[TY * 80 + TX + k]; y[GY * n + GX] = s;",
        "FOR (int j = 0; j < n; j++) for (int i = 0; i < n; i++) { float s = 0;"
        " for (int k = 0; k < 17; k++) s += w[k] * x[j * (n + 16) + i + k]; y[j * n + i] = s; }",
        [(m,)],
    )
    transpose = Case(
        "transpose_rows",
        "float *x, float *y, int n",
        (m // 32, m // 32),
        (32, 8),
        [floats(m, m), zeros(m, m)],
        [1],
        "SHARED(float, t, 32 * 33); int i = BX * 32 + TX, j = BY * 32 + TY;"
        "for (int k = 0; k < 32; k += 8) t[(TY + k) * 33 + TX] = x[(j + k) * n + i]; SYNC;"
        "i = BY * 32 + TX; j = BX * 32 + TY; for (int k = 0; k < 32; k += 8) y[(j + k) * n + i] = t[TX * 33 + TY + k];",
        "FOR (int i = 0; i < n; i += 32) for (int j = 0; j < n; j += 32) for (int k = i; k < i + 32; k++)"
        " for (int l = j; l < j + 32; l++) y[l * n + k] = x[k * n + l];",
        [(m,)],
    )
    s = 256
    product = Case(
        "matmul_tiles_of_32",
        "float *a, float *b, float *c, int n",
        (s // 32, s // 32),
        (32, 32),
        [floats(s, s), floats(s, s), zeros(s, s)],
        [2],
        "SHARED(float, p, 1024); SHARED(float, q, 1024); float s = 0; for (int t = 0; t < n; t += 32) {"
        " p[TY * 32 + TX] = a[GY * n + t + TX]; q[TY * 32 + TX] = b[(t + TY) * n + GX]; SYNC;"
        " for (int k = 0; k < 32; k++) s += p[TY * 32 + k] * q[k * 32 + TX]; SYNC; } c[GY * n + GX] = s;",
        "FOR (int i = 0; i < n; i++) { for (int j = 0; j < n; j++) c[i * n + j] = 0;"
        " for (int k = 0; k < n; k++) for (int j = 0; j < n; j++) c[i * n + j] += a[i * n + k] * b[k * n + j]; }",
        [(s,)],
    )
    tree = "for (int h = DX / 2; h > 0; h /= 2) { SYNC; if (TX < h) part[TX] += part[TX + h]; }"
    paths = 1 << 14
    payoff = (
        "float end = spot[{b}] * expf(0.05f * t[{b}] + 0.3f * sqrtf(t[{b}]) * z[i]) - strike[{b}];"
        " s += end > 0 ? end : 0;"
    )
    option = Case(
        "monte_carlo_options",
        "float *spot, float *strike, float *t, float *z, float *out, int n",
        (256,),
        (256,),
        [floats(256) + 1, floats(256) + 1, floats(256) + _f32(0.1), rng.normal(size=paths).astype(_f32), zeros(256)],
        [4],
        f"SHARED(float, part, 256); float s = 0; for (int i = TX; i < n; i += DX) {{ {payoff.format(b='BX')} }}"
        f" part[TX] = s; {tree} if (TX == 0) out[BX] = part[0] / n;",
        f"FOR (int b = 0; b < 256; b++) {{ float s = 0; for (int i = 0; i < n; i++) {{ {payoff.format(b='b')} }}"
        " out[b] = s / n; }",
        [(paths,)],
        tolerance=1e-3,
    )
    pull = (
        "float dx = {p}[4 * j] - x, dy = {p}[4 * j + 1] - y, dz = {p}[4 * j + 2] - z;"
        " float d = dx * dx + dy * dy + dz * dz + 0.01f, r = 1.0f / sqrtf(d), w = {p}[4 * j + 3] * r * r * r;"
        " fx += dx * w; fy += dy * w; fz += dz * w;"
    )
    mine = "float x = p[4 * i], y = p[4 * i + 1], z = p[4 * i + 2], fx = 0, fy = 0, fz = 0;"
    done = "f[3 * i] = fx; f[3 * i + 1] = fy; f[3 * i + 2] = fz;"
    bodies = Case(
        "nbody_tiles",
        "float *p, float *f, int n",
        (8,),
        (256,),
        [floats(2048, 4), zeros(2048, 3)],
        [1],
        f"SHARED(float, q, 1024); int i = GX; {mine} for (int first = 0; first < n; first += 256) {{"
        " for (int k = 0; k < 4; k++) q[4 * TX + k] = p[4 * (first + TX) + k]; SYNC;"
        f" for (int j = 0; j < 256; j++) {{ {pull.format(p='q')} }} SYNC; }} {done}",
        f"FOR (int i = 0; i < n; i++) {{ {mine} for (int j = 0; j < n; j++) {{ {pull.format(p='p')} }} {done} }}",
        [(2048,)],
        tolerance=1e-2,
    )
    depth, width = 64, 128
    around = " + ".join(f"0.0{k}f * ({{at}}[{{o}} - {k}] + {{at}}[{{o}} + {k}])" for k in range(1, 5))
    fdtd = Case(
        "fdtd3d",
        "float *x, float *y, int n, int d",
        (width // 32, width // 8),
        (32, 8),
        [floats(depth + 8, width + 8, width + 8), zeros(depth, width, width)],
        [1],
        "SHARED(float, t, 16 * 40); int w = n + 8, plane = w * w, at = (GY + 4) * w + GX + 4;"
        "float b4 = x[at], b3 = x[at + plane], b2 = x[at + 2 * plane], b1 = x[at + 3 * plane], c = x[at + 4 * plane],"
        " f1 = x[at + 5 * plane], f2 = x[at + 6 * plane], f3 = x[at + 7 * plane], f4 = x[at + 8 * plane];"
        "for (int k = 0; k < d; k++) { int o = (TY + 4) * 40 + TX + 4, here = at + (k + 4) * plane; t[o] = c;"
        " if (TX < 4) { t[o - 4] = x[here - 4]; t[o + 32] = x[here + 32]; }"
        " if (TY < 4) { t[o - 160] = x[here - 4 * w]; t[o + 320] = x[here + 8 * w]; } SYNC;"
        f" float s = 0.4f * c + {around.format(at='t', o='o')}"
        " + 0.01f * (t[o - 40] + t[o + 40]) + 0.02f * (t[o - 80] + t[o + 80]) + 0.03f * (t[o - 120] + t[o + 120])"
        " + 0.04f * (t[o - 160] + t[o + 160]) + 0.01f * (b1 + f1) + 0.02f * (b2 + f2) + 0.03f * (b3 + f3)"
        " + 0.04f * (b4 + f4); y[(k * n + GY) * n + GX] = s; SYNC;"
        " b4 = b3; b3 = b2; b2 = b1; b1 = c; c = f1; f1 = f2; f2 = f3; f3 = f4;"
        " if (k + 1 < d) f4 = x[at + (k + 9) * plane]; }",
        "int w = n + 8, p = w * w;"
        "FOR (int k = 0; k < d; k++) for (int j = 0; j < n; j++) for (int i = 0; i < n; i++) {"
        f" int o = (k + 4) * p + (j + 4) * w + i + 4; float s = 0.4f * x[o] + {around.format(at='x', o='o')};"
        " for (int r = 1; r < 5; r++)"
        " s += 0.01f * r * (x[o - r * w] + x[o + r * w]) + 0.01f * r * (x[o - r * p] + x[o + r * p]);"
        " y[(k * n + j) * n + i] = s; }",
        [(width, depth)],
    )
    n = 1 << 20
    haar = Case(
        "haar_wavelet",
        "float *x, float *y, int n",
        (n // 512,),
        (256,),
        [floats(n), zeros(n)],
        [1],
        "SHARED(float, t, 512); int at = BX * 512; t[TX] = x[at + TX]; t[TX + 256] = x[at + TX + 256]; SYNC;"
        "for (int h = 256; h > 0; h /= 2) { float a = 0, b = 0; if (TX < h) { a = t[2 * TX]; b = t[2 * TX + 1]; } SYNC;"
        " if (TX < h) { t[TX] = (a + b) * 0.70710678f; y[at + h + TX] = (a - b) * 0.70710678f; } SYNC; }"
        "if (TX == 0) y[at] = t[0];",
        "FOR (int at = 0; at < n; at += 512) { float t[512]; for (int i = 0; i < 512; i++) t[i] = x[at + i];"
        " for (int h = 256; h > 0; h /= 2) for (int i = 0; i < h; i++) { float a = t[2 * i], b = t[2 * i + 1];"
        " t[i] = (a + b) * 0.70710678f; y[at + h + i] = (a - b) * 0.70710678f; } y[at] = t[0]; }",
        [(n,)],
    )
    vectors = 256
    scalar_product = Case(
        "scalar_products",
        "float *a, float *b, float *out, int n",
        (vectors,),
        (256,),
        [floats(vectors, 4096), floats(vectors, 4096), zeros(vectors)],
        [2],
        "SHARED(float, part, 1024); for (int k = TX; k < 1024; k += DX) { float s = 0;"
        " for (int i = k; i < n; i += 1024) s += a[BX * n + i] * b[BX * n + i]; part[k] = s; }"
        "for (int h = 512; h > 0; h /= 2) { SYNC; for (int k = TX; k < h; k += DX) part[k] += part[k + h]; }"
        "if (TX == 0) out[BX] = part[0];",
        'FOR (int v = 0; v < 256; v++) { float s = 0; _Pragma("omp simd reduction(+:s)")'
        " for (int i = 0; i < n; i++) s += a[v * n + i] * b[v * n + i]; out[v] = s; }",
        [(4096,)],
    )
    swap = "float a = {t}[i], b = {t}[i + j]; if ((a > b) == up) {{ {t}[i] = b; {t}[i + j] = a; }}"
    sort = Case(
        "sorting_network",
        "float *x, int n",
        (n // 8 // 512,),
        (256,),
        [floats(n // 8)],
        [0],
        "SHARED(float, t, 512); t[TX] = x[BX * 512 + TX]; t[TX + 256] = x[BX * 512 + TX + 256];"
        "for (int k = 2; k <= 512; k *= 2) for (int j = k / 2; j > 0; j /= 2) { SYNC;"
        f" int i = 2 * TX - (TX & (j - 1)), up = (i & k) == 0; {swap.format(t='t')} }}"
        "SYNC; x[BX * 512 + TX] = t[TX]; x[BX * 512 + TX + 256] = t[TX + 256];",
        "FOR (int at = 0; at < n; at += 512) { float *t = x + at; for (int k = 2; k <= 512; k *= 2)"
        " for (int j = k / 2; j > 0; j /= 2) for (int h = 0; h < 256; h++) {"
        f" int i = 2 * h - (h & (j - 1)), up = (i & k) == 0; {swap.format(t='t')} }} }}",
        [(n // 8,)],
    )
    binomial = Case(
        "binomial_options",
        "float *spot, float *out, int steps",
        (128,),
        (256,),
        [floats(128) + _f32(0.5), zeros(128)],
        [1],
        "SHARED(float, v, 257); for (int i = TX; i <= steps; i += DX) {"
        " float end = spot[BX] * expf(0.02f * (2 * i - steps)) - 1.0f; v[i] = end > 0 ? end : 0; } SYNC;"
        "for (int k = steps; k > 0; k--) { float a = 0; if (TX < k) a = 0.49f * v[TX + 1] + 0.505f * v[TX]; SYNC;"
        " if (TX < k) v[TX] = a; SYNC; } if (TX == 0) out[BX] = v[0];",
        "FOR (int b = 0; b < 128; b++) { float v[257]; for (int i = 0; i <= steps; i++) {"
        " float end = spot[b] * expf(0.02f * (2 * i - steps)) - 1.0f; v[i] = end > 0 ? end : 0; }"
        " for (int k = steps; k > 0; k--) for (int i = 0; i < k; i++) v[i] = 0.49f * v[i + 1] + 0.505f * v[i];"
        " out[b] = v[0]; }",
        [(256,)],
        tolerance=1e-3,
    )
    every = [convolution, transpose, product, option, bodies, fdtd, haar, scalar_product, sort, binomial]
    return every
