"""Random permutations: 0, 1, 2 ... sorted by random keys.

The keys have as many bits as make equal ones unlikely: with probability 0.9 there are none (the birthday problem, in
the approximation of PyTorch, whose permutations these are). Neighbours that do have equal keys are shuffled
afterwards, so that all permutations remain equally likely.
"""

from __future__ import annotations

import math
from typing import Any, Final, SupportsIndex

import numpy as np
import numpy.typing as npt

from cudatool.errors import UsageError
from cudatool.random._creation import target
from cudatool.random._fills import float_range, random_
from cudatool.random._generator import Generator
from cudatool.random._kernels import PHILOX, operation, run, take, word_type
from cudatool.runtime.array import DeviceArray, empty
from cudatool.runtime.device import DeviceLike
from cudatool.runtime.dtypes import require_int
from cudatool.runtime.stream import Stream, current_stream

__all__ = ["randperm"]

_THREADS: Final = 256
_ITEMS: Final = 8
_TILE: Final = _THREADS * _ITEMS
_DIGITS: Final = 16

_SOURCE: Final = (
    PHILOX
    + r"""
const int THREADS = 256, ITEMS = 8, TILE = THREADS * ITEMS, BITS = 4, DIGITS = 1 << BITS;

// A stable radix sort of keys with the index of each, 4 bits at a time: count the digits of every tile, add the
// counts up, and move every element after those with a smaller digit or an earlier place. A thread has ITEMS
// neighbours, so that what comes first in a tile is what an earlier thread has, or the same thread before.

template <typename Key>
__device__ int digit(Key key, int shift) { return (int)(key >> shift) & (DIGITS - 1); }

// Add up what comes before each of THREADS values; every thread gets its own sum, and `all` the sum of all.
__device__ unsigned sum_before(unsigned mine, unsigned *shared, unsigned *all) {
    int t = threadIdx.x;
    shared[t] = mine;
    __syncthreads();
    for (int step = 1; step < THREADS; step *= 2) {
        unsigned left = t >= step ? shared[t - step] : 0;
        __syncthreads();
        shared[t] += left;
        __syncthreads();
    }
    *all = shared[THREADS - 1];
    unsigned before = shared[t] - mine;
    __syncthreads();
    return before;
}

template <typename Key>
__device__ void count_own(const Key *keys, long long size, int shift, unsigned counts[DIGITS][THREADS]) {
    for (int d = 0; d < DIGITS; ++d) counts[d][threadIdx.x] = 0;
    long long first = (long long)blockIdx.x * TILE + threadIdx.x * ITEMS;
    for (long long i = first; i < first + ITEMS && i < size; ++i) counts[digit(keys[i], shift)][threadIdx.x]++;
    __syncthreads();
}

template <typename Key>
__global__ void count_digits(const Key *keys, long long size, int shift, unsigned *totals) {
    __shared__ unsigned counts[DIGITS][THREADS];
    count_own(keys, size, shift, counts);
    if (threadIdx.x < DIGITS) {
        unsigned total = 0;
        for (int t = 0; t < THREADS; ++t) total += counts[threadIdx.x][t];
        totals[threadIdx.x * gridDim.x + blockIdx.x] = total;
    }
}

// One block: totals become what comes before them.
__global__ void add_up(unsigned *totals, int count) {
    __shared__ unsigned shared[THREADS];
    unsigned before = 0, all;
    for (int start = 0; start < count; start += THREADS) {
        int i = start + threadIdx.x;
        unsigned mine = i < count ? totals[i] : 0;
        unsigned sum = sum_before(mine, shared, &all);
        if (i < count) totals[i] = before + sum;
        before += all;
    }
}

// The counts of a tile become places: what comes before a thread's first element with a digit, among those of the
// tile in order. `starts` gets the places at which the digits begin.
__device__ void find_places(unsigned counts[DIGITS][THREADS], unsigned *shared, unsigned starts[DIGITS]) {
    const int STRETCH = THREADS / DIGITS;  // a thread adds up a stretch of one digit
    int d = threadIdx.x / DIGITS, stretch = threadIdx.x % DIGITS * STRETCH;
    unsigned own = 0, all;
    for (int k = 0; k < STRETCH; ++k) own += counts[d][stretch + k];
    unsigned place = sum_before(own, shared, &all);
    if (stretch == 0) starts[d] = place;
    for (int k = 0; k < STRETCH; ++k) {
        unsigned here = counts[d][stretch + k];
        counts[d][stretch + k] = place;
        place += here;
    }
    __syncthreads();
}

// `indices` is null as long as each element is where it was.
template <typename Key>
__device__ void move_own(const Key *keys, const unsigned *indices, Key *to_keys, unsigned *to_indices, long long size,
                         int shift, unsigned counts[DIGITS][THREADS]) {
    long long first = (long long)blockIdx.x * TILE + threadIdx.x * ITEMS;
    for (long long i = first; i < first + ITEMS && i < size; ++i) {
        unsigned to = counts[digit(keys[i], shift)][threadIdx.x]++;
        to_keys[to] = keys[i];
        to_indices[to] = indices ? indices[i] : i;
    }
}

template <typename Key>
__global__ void move(const Key *keys, const unsigned *indices, Key *to_keys, unsigned *to_indices, long long size,
                     int shift, const unsigned *totals) {
    __shared__ unsigned counts[DIGITS][THREADS], shared[THREADS], starts[DIGITS];
    count_own(keys, size, shift, counts);
    find_places(counts, shared, starts);
    for (int d = 0; d < DIGITS; ++d) counts[d][threadIdx.x] += totals[d * gridDim.x + blockIdx.x] - starts[d];
    move_own(keys, indices, to_keys, to_indices, size, shift, counts);
}

// All at once for what fits in one tile; after an even number of rounds the result is in the first arrays.
template <typename Key>
__global__ void sort_tile(Key *keys, unsigned *indices, Key *other_keys, unsigned *other_indices, int size,
                          int rounds) {
    __shared__ unsigned counts[DIGITS][THREADS], shared[THREADS], starts[DIGITS];
    for (int round = 0; round < rounds; ++round) {
        count_own(keys, size, round * BITS, counts);
        find_places(counts, shared, starts);
        move_own(keys, round ? indices : nullptr, other_keys, other_indices, size, round * BITS, counts);
        __syncthreads();
        Key *k = keys;
        keys = other_keys;
        other_keys = k;
        unsigned *i = indices;
        indices = other_indices;
        other_indices = i;
    }
}

// Fewer bits of each key, in the order of signed numbers if all are kept.
template <typename Key>
__global__ void cut(Key *keys, long long size, Key mask, Key flip) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size) keys[i] = (keys[i] & mask) ^ flip;
}

// The first of neighbours with equal keys shuffles them (Fisher and Yates); everybody stores its index.
template <typename Key>
__global__ void shuffle_equal(const Key *keys, unsigned *indices, int size, Word64 seed, Word64 offset,
                              const Word64 *place) {
    int first = blockIdx.x * blockDim.x + threadIdx.x;
    if (first >= size - 1 || keys[first] != keys[first + 1]) return;
    if (first > 0 && keys[first] == keys[first - 1]) return;
    int count = 2;
    while (first + count < size && keys[first + count] == keys[first]) ++count;
    Philox philox(first, seed, offset, place);
    uint4 x;
    for (int i = count - 1, used = 0; i > 0; --i, ++used) {
        if (used % 4 == 0) x = philox.next();
        unsigned word = used % 4 == 0 ? x.x : used % 4 == 1 ? x.y : used % 4 == 2 ? x.z : x.w;
        unsigned other = word % (unsigned)(i + 1);
        unsigned kept = indices[first + i];
        indices[first + i] = indices[first + other];
        indices[first + other] = kept;
    }
}

template <typename T>
__global__ void store(const unsigned *indices, T *out, long long size) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size) out[i] = T(indices[i]);
}
"""
)


@operation
def randperm(
    n: SupportsIndex,
    *,
    generator: Generator | None = None,
    out: DeviceArray | None = None,
    dtype: npt.DTypeLike | None = None,
    device: DeviceLike = None,
) -> DeviceArray:
    """Return 0 to ``n - 1`` in random order, each order as likely.

    Parameters
    ----------
    n
        At most 2^31 - 1.
    dtype
        Integer or floating-point; default: int64.

    See :func:`cudatool.random.rand` for the other parameters.

    Raises
    ------
    UsageError
        `n` is negative, or the dtype cannot hold all these numbers.
    """
    size = require_int("randperm: n", n)
    if not 0 <= size < 1 << 31:
        raise UsageError(f"randperm takes n from 0 to 2^31 - 1, not {size}")
    made = target((size,), dtype, np.int64 if out is None else out.dtype, device, out, generator)
    name = word_type(made.dtype, "randperm")
    if made.dtype.kind == "b" or size > _largest(made.dtype):
        raise UsageError(f"{made.dtype} cannot hold all numbers below {size}")
    if not size:
        return made
    stream = current_stream(made.device)
    indices = _shuffled(size, generator, stream)
    stored = made if made.is_contiguous() else empty(size, made.dtype, device=made.device)
    _each(f"store<{name}>", size, stream, indices, stored, size)
    return made if stored is made else made.copy_(stored)


def _largest(dtype: np.dtype[Any]) -> int:
    """Return how many numbers, 0 1 2 ..., a dtype has without a gap."""
    return int(np.iinfo(dtype).max) + 1 if dtype.kind in "iu" else (1 << float_range(dtype)[1]) + 1


def _key_bits(size: int) -> int:
    return min(64, math.ceil(math.log2(size - (6 * float(size) * size + 1) / (12 * math.log(0.9)))))


def _each(kernel: str, size: int, stream: Stream, *arguments: Any) -> None:
    run(_SOURCE, kernel, -(-size // 512), 512, stream, *arguments)


def _shuffled(size: int, generator: Generator | None, stream: Stream) -> DeviceArray:
    bits = _key_bits(size)
    width = 32 if bits <= 32 else 64
    integer, key = (np.int32, "unsigned") if width == 32 else (np.int64, "Word64")
    limits = np.iinfo(integer)
    device = stream.device_index
    keys = random_(empty(size, integer, device=device), limits.min, limits.max, generator=generator)
    flip = 1 << width - 1 if bits == width else 0
    word = np.uint32 if width == 32 else np.uint64
    _each(f"cut<{key}>", size, stream, keys, size, word((1 << bits) - 1), word(flip))
    keys, indices = _sorted(keys, bits, key, stream)
    drawn = take(generator, size, stream)
    _each(f"shuffle_equal<{key}>", size, stream, keys, indices, size, *drawn)
    return indices


def _sorted(keys: DeviceArray, bits: int, key: str, stream: Stream) -> tuple[DeviceArray, DeviceArray]:
    """Return keys in order, and where each was; the first array is used as well."""
    size, device = keys.size, keys.device
    tiles, rounds = -(-size // _TILE), -(-bits // 4)
    other_keys = empty(size, keys.dtype, device=device)
    indices, other = (empty(size, np.uint32, device=device) for _ in range(2))
    if tiles == 1:
        run(_SOURCE, f"sort_tile<{key}>", 1, _THREADS, stream, keys, indices, other_keys, other, size, rounds)
        return (other_keys, other) if rounds % 2 else (keys, indices)
    totals = empty(_DIGITS * tiles, np.uint32, device=device)
    for turn in range(rounds):
        known = indices if turn else np.uint64(0)
        shift = 4 * turn
        run(_SOURCE, f"count_digits<{key}>", tiles, _THREADS, stream, keys, size, shift, totals)
        run(_SOURCE, "add_up", 1, _THREADS, stream, totals, totals.size)
        run(_SOURCE, f"move<{key}>", tiles, _THREADS, stream, keys, known, other_keys, other, size, shift, totals)
        keys, other_keys, indices, other = other_keys, keys, other, indices
    return keys, indices
