/* The runtime API of cuda_on_host.h without a device: memory of the device is memory of the host. */
#define KERNELS_ON_HOST
#include "cuda_on_host.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#ifndef SLACK
#define SLACK 0
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
char *dynamic_shared;

namespace {
constexpr size_t STACK = 256 << 10;
struct Fiber {
    ucontext_t context;
    bool ended;
};
std::vector<Fiber> fibers;
std::vector<char *> stacks;
ucontext_t scheduler;
size_t running;
const std::function<void()> *body;

void enter() {
    (*body)();
    fibers[running].ended = true;
    swapcontext(&fibers[running].context, &scheduler);
}
} // namespace

void yield_thread() { swapcontext(&fibers[running].context, &scheduler); }

void run_grid(dim3 grid, dim3 block, size_t shared, const std::function<void()> &thread) {
    size_t threads = (size_t)block.x * block.y * block.z;
    fibers.resize(threads);
    while (stacks.size() < threads) stacks.push_back((char *)malloc(STACK));
    std::vector<char> memory(shared + 1);
    dynamic_shared = memory.data(), body = &thread, gridDim = grid, blockDim = block;
    for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
                for (size_t t = 0; t < threads; ++t) {
                    fibers[t].ended = false;
                    getcontext(&fibers[t].context);
                    fibers[t].context.uc_stack.ss_sp = stacks[t];
                    fibers[t].context.uc_stack.ss_size = STACK;
                    makecontext(&fibers[t].context, enter, 0);
                }
                for (bool any = true; any;) {
                    any = false;
                    for (size_t t = 0; t < threads; ++t) {
                        if (fibers[t].ended) continue;
                        any = true, running = t;
                        threadIdx = {(unsigned)(t % block.x), (unsigned)(t / block.x % block.y), (unsigned)(t / block.x / block.y)};
                        swapcontext(&scheduler, &fibers[t].context);
                    }
                }
            }
}

void bind_texture(void *, const void *, size_t, int) {}

extern "C" {
time_t time(time_t *) { return 7; } /* programs seed their numbers with it */

int add_module(const char *) { return 0; }
cudaError_t cudaMalloc(void **pointer, size_t size) { return *pointer = (char *)calloc(size + 2 * SLACK, 1) + SLACK, cudaSuccess; }
cudaError_t cudaFree(void *pointer) { return free(pointer ? (char *)pointer - SLACK : nullptr), cudaSuccess; }
cudaError_t cudaMallocHost(void **pointer, size_t size) { return cudaMalloc(pointer, size); }
cudaError_t cudaFreeHost(void *pointer) { return cudaFree(pointer); }
cudaError_t cudaMallocPitch(void **pointer, size_t *pitch, size_t width, size_t height) {
    return *pitch = (width + 511) / 512 * 512, cudaMalloc(pointer, *pitch * height);
}
/* Write what the device gave to the file that RESULTS names, for a comparison. */
static void copied(const void *to, size_t size, cudaMemcpyKind kind) {
    static FILE *file = getenv("RESULTS") ? fopen(getenv("RESULTS"), "wb") : nullptr;
    if (!file || kind != cudaMemcpyDeviceToHost) return;
    fwrite(&size, sizeof size, 1, file);
    fwrite(to, 1, size, file);
    fflush(file);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind) {
    memmove(to, from, size);
    return copied(to, size, kind), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, size, kind);
}
cudaError_t cudaMemcpyToSymbol(const void *to, const void *from, size_t size, size_t offset, cudaMemcpyKind) {
    Dl_info info;
    if (!dladdr(to, &info) || info.dli_saddr != to) { /* a name, as before CUDA 5 */
        void *library = dladdr((void *)run_grid, &info) ? dlopen(info.dli_fname, RTLD_NOW) : nullptr;
        to = library ? dlsym(library, (const char *)to) : nullptr;
    }
    return memcpy((char *)to + offset, from, size), cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t size) { return memset(to, value, size), cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { return *free = *total = 1ull << 32, cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return *stream = nullptr, cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *event) { return *event = nullptr, cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t, cudaEvent_t) { return *ms = 1, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDeviceReset() { return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int) {
    *found = {};
    found->maxThreadsPerBlock = 1024, found->multiProcessorCount = 16, found->totalGlobalMem = 1ull << 33;
    found->major = 9, found->maxGridSize[0] = 1 << 30, found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    return cudaSuccess;
}
cudaError_t cudaFuncSetCacheConfig(const void *, cudaFuncCache) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t) { return ""; }
}
