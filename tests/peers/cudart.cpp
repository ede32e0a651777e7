/* The part of CUDA's runtime API that Rodinia's programs use, on the driver API of this process's libcuda.so.1.
 *
 * Kernels and variables of a module are found by their symbol: a host compiler gives the host's copy of a kernel the
 * name that NVRTC gives it. Errors of the driver have the runtime's numbers (both enumerations agree where they meet). */
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include "cuda_on_host.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#ifndef SLACK
#define SLACK 0 /* bytes around each allocation, for programs that read beyond their own */
#endif

static std::vector<CUmodule> modules;
static CUresult last = CUDA_SUCCESS;

static void *entry(const char *name) {
    static void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    void *found = library ? dlsym(library, name) : nullptr;
    if (!found) {
        fprintf(stderr, "no %s in libcuda.so.1: %s\n", name, dlerror());
        abort();
    }
    return found;
}

/* What the process took of processors until main() began and in the driver's calls from then on (seconds), written to the
 * file that TIMES names when it ends. */
static const char *times = getenv("TIMES");
static double now() {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}
static struct Times {
    double begin = now();
    std::map<std::string, std::pair<long, double>> calls;
    ~Times() {
        FILE *file = times ? fopen(times, "w") : nullptr;
        if (!file) return;
        fprintf(file, "begin 1 %.6f\n", begin);
        for (auto &[name, call] : calls) fprintf(file, "%s %ld %.6f\n", name.c_str(), call.first, call.second);
        fclose(file);
    }
} taken;
struct Timed {
    const char *name;
    double begin;
    Timed(const char *name) : name(name), begin(times ? now() : 0) {}
    ~Timed() {
        if (!times) return;
        auto &call = taken.calls[name];
        call.first++, call.second += now() - begin;
    }
};

#define TEXT(name) #name
#define NAME(name) TEXT(name) /* expanded: cuda.h calls cuMemAlloc cuMemAlloc_v2 */
#define CALL(name, ...) note((Timed(NAME(name)), ((decltype(&name))entry(NAME(name)))(__VA_ARGS__)))

static cudaError_t note(CUresult result) {
    if (result) last = result;
    return (cudaError_t)result;
}

static void begin() {
    static bool begun = false;
    CUcontext context;
    if (begun) return;
    begun = true;
    CALL(cuInit, 0);
    CALL(cuDevicePrimaryCtxRetain, &context, 0);
    CALL(cuCtxSetCurrent, context);
}

/* The name of what has a symbol. Programs from before CUDA 5 give variables of the device by their names. */
static const char *symbol(const void *of) {
    Dl_info info;
    return dladdr(of, &info) && info.dli_sname && info.dli_saddr == of ? info.dli_sname : (const char *)of;
}

static CUdeviceptr address(const void *of, size_t *size = nullptr) {
    CUdeviceptr found = 0;
    for (CUmodule module : modules)
        if (!((decltype(&cuModuleGetGlobal))entry(NAME(cuModuleGetGlobal)))(&found, size, module, symbol(of)))
            return found;
    fprintf(stderr, "no variable %s in the program's modules\n", symbol(of));
    abort();
}

/* Write what the device gave to the file that RESULTS names, for a comparison. */
extern "C" void copied(const void *to, size_t size, cudaMemcpyKind kind) {
    static FILE *file = getenv("RESULTS") ? fopen(getenv("RESULTS"), "wb") : nullptr;
    if (!file || kind != cudaMemcpyDeviceToHost) return;
    fwrite(&size, sizeof size, 1, file);
    fwrite(to, 1, size, file);
    fflush(file);
}

static CUdeviceptr number(const void *pointer) { return (CUdeviceptr)pointer; }

void bind_texture(void *reference, const void *data, size_t size, int channels) {
    CUDA_RESOURCE_DESC resource = {};
    CUDA_TEXTURE_DESC texture = {};
    CUtexObject object;
    resource.resType = CU_RESOURCE_TYPE_LINEAR;
    resource.res.linear = {number(data), CU_AD_FORMAT_FLOAT, (unsigned)channels, size};
    CALL(cuTexObjectCreate, &object, &resource, &texture, nullptr);
    CALL(cuMemcpyHtoD, address(reference), &object, sizeof object);
}

Launch next_launch;

/* Find the kernel that has the name of the function that calls this one. */
void launch_kernel(void **arguments) {
    CUfunction function;
    Dl_info info = {};
    dladdr(__builtin_return_address(0), &info);
    const auto &[grid, block, shared, stream] = next_launch;
    for (CUmodule module : modules)
        if (!((decltype(&cuModuleGetFunction))entry("cuModuleGetFunction"))(&function, module, info.dli_sname)) {
            CALL(cuLaunchKernel, function, grid.x, grid.y, grid.z, block.x, block.y, block.z, (unsigned)shared, stream,
                 arguments, nullptr);
            return;
        }
    fprintf(stderr, "no kernel %s in the program's modules\n", info.dli_sname);
    abort();
}

extern "C" {
time_t time(time_t *) { return 7; } /* programs seed their numbers with it */

/* Load what NVRTC made of a file of the program. */
int add_module(const char *image) {
    CUmodule module;
    begin();
    cudaError_t error = CALL(cuModuleLoadData, &module, image);
    if (!error) modules.push_back(module);
    return error;
}

/* Before main(): launch a kernel that does nothing, so that what loads with the first launch counts as the start. */
int start() {
    CUmodule module;
    CUfunction function;
    begin();
    cudaError_t error = CALL(cuModuleLoadData, &module,
                             ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry empty() { ret; }");
    if (!error) error = CALL(cuModuleGetFunction, &function, module, "empty");
    if (!error) error = CALL(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr);
    if (!error) error = CALL(cuCtxSynchronize);
    taken.begin = now();
    taken.calls.clear();
    return error;
}

cudaError_t cudaMalloc(void **pointer, size_t size) {
    begin();
    cudaError_t error = CALL(cuMemAlloc, (CUdeviceptr *)pointer, size + 2 * SLACK);
    if (!error) *pointer = (char *)*pointer + SLACK;
    return error;
}
cudaError_t cudaFree(void *pointer) { return begin(), CALL(cuMemFree, pointer ? number(pointer) - SLACK : 0); }
cudaError_t cudaMallocHost(void **pointer, size_t size) { return begin(), CALL(cuMemAllocHost, pointer, size); }
cudaError_t cudaFreeHost(void *pointer) { return CALL(cuMemFreeHost, pointer); }
cudaError_t cudaMallocPitch(void **pointer, size_t *pitch, size_t width, size_t height) {
    return begin(), CALL(cuMemAllocPitch, (CUdeviceptr *)pointer, pitch, width, height, 16);
}
/* What kernels take is not the time of the copy that waits for them. */
static void finish_kernels() {
    if (times) CALL(cuCtxSynchronize);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind) {
    begin();
    finish_kernels();
    if (kind == cudaMemcpyHostToDevice) return CALL(cuMemcpyHtoD, number(to), from, size);
    if (kind == cudaMemcpyDeviceToHost) {
        CALL(cuMemcpyDtoH, to, number(from), size);
        copied(to, size, kind);
        return (cudaError_t)last;
    }
    return CALL(cuMemcpy, number(to), number(from), size);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
    return begin(), CALL(cuMemcpyAsync, number(to), number(from), size, stream);
}
cudaError_t cudaMemcpyToSymbol(const void *to, const void *from, size_t size, size_t offset, cudaMemcpyKind) {
    return begin(), finish_kernels(), CALL(cuMemcpy, address(to) + offset, number(from), size);
}
cudaError_t cudaMemset(void *to, int value, size_t size) {
    return begin(), CALL(cuMemsetD8, number(to), (unsigned char)value, size);
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { return begin(), CALL(cuMemGetInfo, free, total); }

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return begin(), CALL(cuStreamCreate, stream, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return CALL(cuStreamDestroy, stream); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return CALL(cuStreamSynchronize, stream); }
cudaError_t cudaEventCreate(cudaEvent_t *event) { return begin(), CALL(cuEventCreate, event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return CALL(cuEventDestroy, event); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return CALL(cuEventRecord, event, stream); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return CALL(cuEventSynchronize, event); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    return CALL(cuEventElapsedTime, ms, start, end);
}

cudaError_t cudaDeviceSynchronize() { return begin(), CALL(cuCtxSynchronize); }
cudaError_t cudaDeviceReset() { return cudaDeviceSynchronize(); }
cudaError_t cudaSetDevice(int) { return begin(), cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) { return begin(), CALL(cuDeviceGetCount, count); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int device) {
    int value = 0;
    begin();
    *found = {};
    CALL(cuDeviceGetName, found->name, sizeof found->name, device);
    CALL(cuDeviceTotalMem, &found->totalGlobalMem, device);
#define GET(field, attribute) CALL(cuDeviceGetAttribute, &value, CU_DEVICE_ATTRIBUTE_##attribute, device), found->field = value
    GET(major, COMPUTE_CAPABILITY_MAJOR);
    GET(minor, COMPUTE_CAPABILITY_MINOR);
    GET(multiProcessorCount, MULTIPROCESSOR_COUNT);
    GET(maxThreadsPerBlock, MAX_THREADS_PER_BLOCK);
    GET(sharedMemPerBlock, MAX_SHARED_MEMORY_PER_BLOCK);
    GET(totalConstMem, TOTAL_CONSTANT_MEMORY);
    GET(warpSize, WARP_SIZE);
    GET(regsPerBlock, MAX_REGISTERS_PER_BLOCK);
    GET(maxGridSize[0], MAX_GRID_DIM_X);
    GET(maxGridSize[1], MAX_GRID_DIM_Y);
    GET(maxThreadsDim[0], MAX_BLOCK_DIM_X);
    return cudaSuccess;
}
cudaError_t cudaFuncSetCacheConfig(const void *, cudaFuncCache) { return cudaSuccess; }
cudaError_t cudaGetLastError() {
    cudaError_t error = (cudaError_t)last;
    last = CUDA_SUCCESS;
    return error;
}
cudaError_t cudaPeekAtLastError() { return (cudaError_t)last; }
const char *cudaGetErrorString(cudaError_t error) {
    const char *text = "unknown error";
    ((decltype(&cuGetErrorString))entry("cuGetErrorString"))((CUresult)error, &text);
    return text;
}
}
