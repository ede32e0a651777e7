/* Kernels as functions of the host: what a program's results are held against. Each thread of a block is a fiber, which
 * runs until it ends or comes to a barrier; blocks run one after another. Included before the program. */
#pragma once
#include <cuda_runtime.h>
#include <ucontext.h>

#include <cassert>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <vector>

#undef __shared__
#define __shared__ static
#define cudaThreadSynchronize cudaDeviceSynchronize
#define cudaThreadExit cudaDeviceReset

/* References of textures, which CUDA has no more. The device has the object alone. */
template <class T> struct TextureReference {
    unsigned long long object;
    const T *data;
    cudaChannelFormatDesc channelDesc;
    int addressMode[3], filterMode, normalized;
};
void bind_texture(void *reference, const void *data, size_t size, int channels); /* of floats */
template <class T> cudaError_t cudaBindTexture(size_t *, TextureReference<T> &to, const void *data, size_t size) {
    to.data = (const T *)data;
    bind_texture(&to, data, size, sizeof(T) / sizeof(float));
    return cudaSuccess;
}
template <class T>
cudaError_t cudaBindTexture(size_t *, TextureReference<T> &to, const void *data, cudaChannelFormatDesc, size_t size) {
    return cudaBindTexture(nullptr, to, data, size);
}
template <class T>
cudaError_t cudaBindTexture(size_t *, TextureReference<T> *to, const void *data, cudaChannelFormatDesc *, size_t size) {
    return cudaBindTexture(nullptr, *to, data, size);
}
extern "C" inline cudaChannelFormatDesc cudaCreateChannelDesc(int x, int y, int z, int w, cudaChannelFormatKind kind) {
    return {x, y, z, w, kind};
}
template <class T> cudaError_t cudaUnbindTexture(const T &) { return cudaSuccess; }

template <class T>
cudaError_t cudaMemcpyToSymbol(const T &to, const void *from, size_t size, size_t offset = 0,
                               cudaMemcpyKind kind = cudaMemcpyHostToDevice) {
    return cudaMemcpyToSymbol((const void *)&to, from, size, offset, kind);
}

#ifdef KERNELS_ON_HOST
template <class T> T tex1Dfetch(const TextureReference<T> &from, int i) { return from.data[i]; }
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
static const int warpSize = 32;
extern char *dynamic_shared; /* of the block */
void yield_thread();         /* until all others of the block have come to the barrier */
void run_grid(dim3 grid, dim3 block, size_t shared, const std::function<void()> &thread);
inline void __syncthreads() { yield_thread(); }
inline void __threadfence() {}
inline void __threadfence_block() {}
template <class T, class U> T atomicAdd(T *at, U value) { T old = *at; *at += value; return old; }
template <class T, class U> T atomicOr(T *at, U value) { T old = *at; *at |= value; return old; }
inline unsigned atomicInc(unsigned *at, unsigned limit) { unsigned old = *at; *at = old >= limit ? 0 : old + 1; return old; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __int_as_float(int x) { float f; __builtin_memcpy(&f, &x, 4); return f; }
inline int __float_as_int(float x) { int i; __builtin_memcpy(&i, &x, 4); return i; }
inline int __mul24(int a, int b) { return a * b; }
inline unsigned __umul24(unsigned a, unsigned b) { return a * b; }
#endif

/* CUDA's, which the host has as well. */
template <class T, class U> auto min(T a, U b) -> decltype(a + b) { return a < b ? a : b; }
template <class T, class U> auto max(T a, U b) -> decltype(a + b) { return a > b ? a : b; }

/* What the next kernel is launched with. Without a device, a kernel is called for each thread; with one it is called
 * once, and launches what has its name there. */
struct Launch {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};

#ifndef KERNELS_ON_HOST
extern Launch next_launch;
void launch_kernel(void **arguments); /* by the function of the host that stands for the kernel */
#undef __global__
#define __global__ __attribute__((noinline, noclone))
#endif

struct Launcher : Launch {
    template <class Call> auto operator()(Call call) const {
        return [launch = (Launch) * this, call](auto... arguments) {
#ifdef KERNELS_ON_HOST
            run_grid(launch.grid, launch.block, launch.shared, [&] { call(arguments...); });
#else
            next_launch = launch, call(arguments...);
#endif
        };
    }
};

inline Launcher launcher(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t stream = 0) {
    return {{grid, block, shared, stream}};
}
