"""Kernels that draw, and the shapes in which they are launched.

Which thread draws which number decides what a seed means, so these are PyTorch's rules (measured on an H200, see
tests/data/torch_rng.npz): blocks of 256 threads, at most as many as run on the device at once; thread t uses
subsequence t of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and fills
elements t, t + threads, t + 2 threads ... with the numbers of one block of the counter after the other. A stream of
numbers therefore belongs to a number of processors; the software device has as many as an H200.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from cudatool.errors import UsageError
from cudatool.ops import Op, op
from cudatool.random._generator import Drawn, Generator, default_generator
from cudatool.random._layout import in_memory_order
from cudatool.runtime import calls
from cudatool.runtime.array import DeviceArray, check_writeable, empty
from cudatool.runtime.device import device as on_device
from cudatool.runtime.device import get_device_properties
from cudatool.runtime.kernel import compile_own, launch
from cudatool.runtime.stream import Stream, current_stream

__all__ = [
    "BLOCK",
    "PHILOX",
    "REALS",
    "blocks",
    "draws",
    "fill",
    "kernel",
    "operation",
    "real_type",
    "run",
    "take",
    "word_type",
]

BLOCK: Final = 256
"""Threads of a block of all kernels whose numbers depend on it."""

PHILOX: Final = r"""
typedef unsigned long long Word64;

// The numbers of one thread: word 4i+k of its subsequence is word k of block i.
struct Philox {
    uint4 counter;
    uint2 key;

    // `place` is null, or has the seed and what comes before the offset (kernels of a graph).
    __device__ Philox(Word64 subsequence, Word64 seed, Word64 offset, const Word64 *place) {
        if (place) {
            seed = place[0];
            offset += place[1];
        }
        key = make_uint2(seed, seed >> 32);
        counter = make_uint4(offset / 4, offset / 4 >> 32, subsequence, subsequence >> 32);
    }

    __device__ uint4 next() {
        uint4 x = counter;
        uint2 k = key;
        #pragma unroll
        for (int round = 0; round < 10; ++round) {
            x = make_uint4(__umulhi(0xCD9E8D57u, x.z) ^ x.y ^ k.x, 0xCD9E8D57u * x.z,
                           __umulhi(0xD2511F53u, x.x) ^ x.w ^ k.y, 0xD2511F53u * x.x);
            k.x += 0x9E3779B9u;  // the golden ratio
            k.y += 0xBB67AE85u;  // sqrt(3) - 1
        }
        if (++counter.x == 0) ++counter.y;
        return x;
    }
};

// Uniform in (0, 1], as cuRAND makes it: 32 bits rounded to a float, 53 of 64 bits to a double.
__device__ float unit(unsigned x) { return fmaf((float)x, 0x1p-32f, 0x1p-33f); }
__device__ double unit(unsigned low, unsigned high) {
    return fma((double)(low ^ ((Word64)high << 21)), 0x1p-53, 0x1p-54);
}

// Half precision: computed in float, stored in 16 bits.
struct Half {
    unsigned short bits;
    __device__ explicit Half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
    __device__ operator float() const {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
};
struct Bfloat16 {
    unsigned short bits;
    __device__ explicit Bfloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
    __device__ operator float() const { return __uint_as_float((unsigned)bits << 16); }
};
template <typename T> struct Real { typedef float type; };  // what T is computed in
template <> struct Real<double> { typedef double type; };
"""

_FILL: Final = (
    PHILOX
    + r"""
// What one block of the counter becomes: 4 numbers, or 2 of twice the size.
template <typename Number> struct Words;
template <> struct Words<unsigned> {
    static const int count = 4;
    __device__ static void make(uint4 x, unsigned *to) { to[0] = x.x; to[1] = x.y; to[2] = x.z; to[3] = x.w; }
};
template <> struct Words<Word64> {
    static const int count = 2;
    __device__ static void make(uint4 x, Word64 *to) {
        to[0] = (Word64)x.x << 32 | x.y;
        to[1] = (Word64)x.z << 32 | x.w;
    }
};

template <typename Number> struct Uniform01;
template <> struct Uniform01<float> {
    static const int count = 4;
    __device__ static void make(uint4 x, float *to) {
        to[0] = unit(x.x); to[1] = unit(x.y); to[2] = unit(x.z); to[3] = unit(x.w);
    }
};
template <> struct Uniform01<double> {
    static const int count = 2;
    __device__ static void make(uint4 x, double *to) { to[0] = unit(x.x, x.y); to[1] = unit(x.z, x.w); }
};

// Box and Muller's way from two uniform numbers to two normal ones.
__device__ void box_muller(unsigned x, unsigned y, float *to) {
    const float turn = 6.2831855f;
    float radius = sqrtf(-2.0f * logf(unit(x)));
    float sine, cosine;
    __sincosf(fmaf((float)y, 0x1p-32f * turn, 0x1p-33f * turn), &sine, &cosine);
    to[0] = sine * radius;
    to[1] = cosine * radius;
}
template <typename Number> struct Normal01;
template <> struct Normal01<float> {
    static const int count = 4;
    __device__ static void make(uint4 x, float *to) {
        box_muller(x.x, x.y, to);
        box_muller(x.z, x.w, to + 2);
    }
};
template <> struct Normal01<double> {
    static const int count = 2;
    __device__ static void make(uint4 x, double *to) {
        double radius = sqrt(-2.0 * log(unit(x.x, x.y)));
        sincospi(2.0 * unit(x.z, x.w), &to[0], &to[1]);
        to[0] *= radius;
        to[1] *= radius;
    }
};

// Distributions. Parameters come as two numbers of 8 bytes.

template <typename T> struct Uniform {  // [low, high)
    typedef T Element;
    typedef typename Real<T>::type Number;
    typedef Uniform01<Number> Draw;
    typedef double A, B;
    T low, high;
    Number range;
    __device__ Uniform(double a, double b) : low(T(a)), high(T(b)), range(T((Number)high - (Number)low)) {}
    __device__ T operator()(Number x) const {
        T value = T(fma(x, range, (Number)low));
        return (Number)value == (Number)high ? low : value;  // x can be 1, but not 0
    }
};

template <typename T> struct Normal {
    typedef T Element;
    typedef typename Real<T>::type Number;
    typedef Normal01<Number> Draw;
    typedef double A, B;
    Number mean, deviation;
    __device__ Normal(double a, double b) : mean(a), deviation(b) {}
    __device__ T operator()(Number x) const { return T(fma(x, deviation, mean)); }
};

// In float as fast as the device can, in double exact.
__device__ float quick_log(float x) { return __logf(x); }
__device__ double quick_log(double x) { return log(x); }
__device__ float quick_exp(float x) { return __expf(x); }
__device__ double quick_exp(double x) { return exp(x); }

template <typename T> struct LogNormal {
    typedef T Element;
    typedef typename Real<T>::type Number;
    typedef Normal01<Number> Draw;
    typedef double A, B;
    Number mean, deviation;
    __device__ LogNormal(double a, double b) : mean(a), deviation(b) {}
    __device__ T operator()(Number x) const { return T(quick_exp(fma(x, deviation, mean))); }
};

template <typename T> struct Exponential {  // never 0, whose logarithm a program may take
    typedef T Element;
    typedef typename Real<T>::type Number;
    typedef Uniform01<Number> Draw;
    typedef double A, B;
    Number rate, least;
    __device__ Exponential(double a, double) : rate(a), least(sizeof(Number) == 4 ? 0x1p-24 : 0x1p-53) {}
    __device__ T operator()(Number x) const {
        Number logarithm = x >= 1 - least ? -least : quick_log(x);
        return T(Number(-1) / rate * logarithm);
    }
};

// The tangent of an angle from -pi/2 to pi/2; the quick one is kept away from both ends.
__device__ float tangent(float x) {
    x = fminf(fmaxf(x, 0x1p-23f), 1 - 0x1p-23f);
    return __tanf(3.14159265f * (x - 0.5f));
}
__device__ double tangent(double x) { return tan(3.14159265358979324 * (x - 0.5)); }

template <typename T> struct Cauchy {
    typedef T Element;
    typedef typename Real<T>::type Number;
    typedef Uniform01<Number> Draw;
    typedef double A, B;
    Number median, scale;
    __device__ Cauchy(double a, double b) : median(a), scale(b) {}
    __device__ T operator()(Number x) const { return T(fma(scale, tangent(x), median)); }
};

__device__ float quick_log1p(float x) { return __logf(1 + x); }
__device__ double quick_log1p(double x) { return log1p(x); }

template <typename T> struct Geometric {  // how many trials until one succeeds
    typedef T Element;
    typedef typename Real<T>::type Number;
    typedef Uniform01<Number> Draw;
    typedef double A, B;
    Number p;
    __device__ Geometric(double a, double) : p(a) {}
    __device__ T operator()(Number x) const { return T(ceil(quick_log(x) / quick_log1p(-p))); }
};

template <typename T> struct Bernoulli {
    typedef T Element;
    typedef typename Real<T>::type Number;
    typedef Uniform01<Number> Draw;
    typedef double A, B;
    Number p;
    __device__ Bernoulli(double a, double) : p(a) {}
    __device__ T operator()(Number x) const { return T(Number(x < p)); }
};

template <typename T, typename Bits> struct Integer {  // [low, low + range); a range of 0 is all numbers of Bits
    typedef T Element;
    typedef Bits Number;
    typedef Words<Bits> Draw;
    typedef Word64 A;
    typedef long long B;
    Bits range;
    long long low;
    __device__ Integer(Word64 a, long long b) : range(a), low(b) {}
    __device__ T operator()(Bits x) const {
        Bits mask = range - 1;
        return T((long long)((range & mask ? x % range : x & mask) + low));
    }
};

template <typename D>
__global__ void fill(typename D::Element *out, long long size, typename D::A a, typename D::B b, Word64 seed,
                     Word64 offset, const Word64 *place) {
    long long threads = (long long)gridDim.x * blockDim.x;
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    Philox philox(thread, seed, offset, place);
    D distribution(a, b);
    const int count = D::Draw::count;
    for (long long at = thread; at < size; at += threads * count) {
        typename D::Number numbers[count];
        D::Draw::make(philox.next(), numbers);
        #pragma unroll
        for (int k = 0; k < count; ++k)
            if (at + threads * k < size) out[at + threads * k] = distribution(numbers[k]);
    }
}
"""
)


def operation(function: Callable[..., Any]) -> Op:
    """Make a function of this package an operation, the same for all kinds of device: its work is kernels."""
    found = op(f"cudatool.random.{function.__name__}")
    found.implementation("cuda", "sim")(function)
    return found


@functools.cache
def kernel(source: str, name: str, device: int) -> Any:
    """Return a kernel of `source`, compiled for a device."""
    with on_device(device):
        return compile_own(source, name)


@functools.cache
def _most_blocks(device: int) -> int:
    found = get_device_properties(device)
    return found.multi_processor_count * (found.max_threads_per_multi_processor // BLOCK)


def blocks(size: int, device: int) -> int:
    """Return how many blocks fill `size` elements."""
    return min(-(-size // BLOCK), _most_blocks(device))


def draws(size: int, unroll: int, device: int) -> int:
    """Return how many numbers a thread counts as drawn when all fill `size` elements, `unroll` from each block of 4."""
    return 4 * (-(-size // (BLOCK * blocks(size, device) * unroll)))


def take(generator: Generator | None, count: int, stream: Stream) -> Drawn:
    """Take `count` numbers a thread from a generator, by default the device's.

    Raises
    ------
    UsageError
        It is for another device, or not registered to the graph that is being captured.
    """
    found = default_generator(stream.device_index) if generator is None else generator
    if not isinstance(found, Generator):
        raise UsageError(f"generator= takes a cudatool.Generator, not {type(found).__name__}")
    return found.draw(count, stream)


def run(source: str, name: str, grid: int | tuple[int, int], block: int, stream: Stream, *arguments: Any) -> None:
    """Launch a kernel of `source` on one-dimensional blocks."""
    launch(stream, _config(grid, block), kernel(source, name, stream.device_index), *arguments)


@functools.cache
def _config(grid: int | tuple[int, int], block: int) -> Any:
    return calls.core.LaunchConfig(grid=grid, block=block)


REALS: Final = {"float16": "Half", "bfloat16": "Bfloat16", "float32": "float", "float64": "double"}
"""What kernels call the floating-point dtypes."""
_WORDS: Final = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "Word64"}


@functools.cache
def real_type(dtype: np.dtype[Any], what: str) -> str:
    """Return what kernels call a floating-point dtype.

    Raises
    ------
    UsageError
        It is none that `what` can make.
    """
    if dtype.name not in REALS:
        raise UsageError(f"{what} makes {', '.join(REALS)}, not {dtype}")
    return REALS[dtype.name]


@functools.cache
def word_type(dtype: np.dtype[Any], what: str) -> str:
    """Return what kernels call a dtype, where those of integers and bool stand for unsigned ones of the same size.

    Raises
    ------
    UsageError
        It is none that `what` can make.
    """
    if dtype.kind in "biu":
        return _WORDS[dtype.itemsize]
    if dtype.name not in REALS:
        raise UsageError(f"{what} makes integers, bool, {', '.join(REALS)}, not {dtype}")
    return REALS[dtype.name]


_INT_MAX: Final = 2**31 - 1


def fill(
    out: DeviceArray, distribution: str, unroll: int, a: float, b: float, generator: Generator | None
) -> DeviceArray:
    """Fill an array from a distribution, in the order in which its elements lie in memory, and return it.

    Parameters
    ----------
    distribution
        A C++ type of this module's source: ``"Uniform<float>"``.
    unroll
        Numbers that one block of the counter gives: 4, or 2 of 64 bits.
    a, b
        Its parameters.

    Raises
    ------
    UsageError
        The array is read-only, or the generator cannot be used.
    """
    check_writeable(out)
    if not out.size:
        return out
    ordered = in_memory_order(out)
    target = ordered if ordered.is_contiguous() else empty(ordered.shape, out.dtype, device=out.device)
    stream = current_stream(out.device)
    if 1 + (out.size - 1) * out.dtype.itemsize <= _INT_MAX:
        parts = [target]
    else:  # PyTorch takes the numbers of the whole first, and then does not use them
        take(generator, draws(out.size, unroll, out.device), stream)
        parts = _halves(target.ravel())
    for part in parts:
        drawn = take(generator, draws(part.size, unroll, out.device), stream)
        grid = blocks(part.size, out.device)
        run(_FILL, f"fill<{distribution}>", grid, BLOCK, stream, part, part.size, a, b, *drawn)
    if target is not ordered:
        ordered.copy_(target)
    return out


def _halves(array: DeviceArray) -> list[DeviceArray]:
    """Return the parts of a long array that are filled one after the other: each ends before 2 GiB of its own."""
    if 1 + (array.size - 1) * array.dtype.itemsize <= _INT_MAX:
        return [array]
    middle = array.size // 2
    return _halves(array[:middle]) + _halves(array[middle:])
