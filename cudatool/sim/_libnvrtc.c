/* libnvrtc.so.13 of the software CUDA device; and on a GPU, where the PTX of a program's kernels is to be known.
 *
 * Programs often compile to "cubin", machine code that the software device cannot run. NVRTC keeps the PTX of the same
 * compilation, so this library forwards every call to the real NVRTC and hands out the PTX where the cubin is asked
 * for. The software driver recognizes PTX by its text.
 *
 * On a GPU the program gets the cubin that it asks for, and `cudatool_nvrtc_keep` says what gets its PTX.
 *
 * While kernels are checked, what is found in them is said with the line of their source: compilations have line
 * information then, whatever the program asked for, and its sources are kept for reports that quote their lines.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static char *path;

/* The real NVRTC is that file. It is opened when a program first calls it: that takes some ms. */
void cudatool_nvrtc_path(const char *file) {
    if (!path) path = strdup(file);
}

static void *real(const char *name) {
    static void *_Atomic library; /* threads that come here together open it several times, which gives the same */
    if (!library && path) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return library ? dlsym(library, name) : NULL;
}

/* No documented function of NVRTC has more than six arguments, and all of them are integers or pointers: six machine
 * words pass them on unchanged in the calling conventions of x86-64 and AArch64. */
typedef long (*function_t)(long, long, long, long, long, long);

#define NVRTC_ERROR_INTERNAL_ERROR 11

#define FORWARD(name, target)                                                                                          \
    long name(long a, long b, long c, long d, long e, long f) {                                                        \
        static function_t function;                                                                                    \
        if (!function) function = (function_t)real(#target);                                                           \
        return function ? function(a, b, c, d, e, f) : NVRTC_ERROR_INTERNAL_ERROR;                                     \
    }

static FORWARD(cubin, nvrtcGetCUBIN)
static FORWARD(cubin_size, nvrtcGetCUBINSize)
FORWARD(nvrtcAddNameExpression, nvrtcAddNameExpression)
FORWARD(nvrtcDestroyProgram, nvrtcDestroyProgram)
FORWARD(nvrtcGetBundledHeadersInfo, nvrtcGetBundledHeadersInfo)
FORWARD(nvrtcGetErrorString, nvrtcGetErrorString)
FORWARD(nvrtcGetLTOIR, nvrtcGetLTOIR)
FORWARD(nvrtcGetLTOIRSize, nvrtcGetLTOIRSize)
FORWARD(nvrtcGetLoweredName, nvrtcGetLoweredName)
FORWARD(nvrtcGetNumSupportedArchs, nvrtcGetNumSupportedArchs)
FORWARD(nvrtcGetOptiXIR, nvrtcGetOptiXIR)
FORWARD(nvrtcGetOptiXIRSize, nvrtcGetOptiXIRSize)
FORWARD(nvrtcGetPCHCreateStatus, nvrtcGetPCHCreateStatus)
FORWARD(nvrtcGetPCHHeapSize, nvrtcGetPCHHeapSize)
FORWARD(nvrtcGetPCHHeapSizeRequired, nvrtcGetPCHHeapSizeRequired)
FORWARD(nvrtcGetPTX, nvrtcGetPTX)
FORWARD(nvrtcGetPTXSize, nvrtcGetPTXSize)
FORWARD(nvrtcGetProgramLog, nvrtcGetProgramLog)
FORWARD(nvrtcGetProgramLogSize, nvrtcGetProgramLogSize)
FORWARD(nvrtcGetSupportedArchs, nvrtcGetSupportedArchs)
FORWARD(nvrtcGetTileIR, nvrtcGetTileIR)
FORWARD(nvrtcGetTileIRSize, nvrtcGetTileIRSize)
FORWARD(nvrtcInstallBundledHeaders, nvrtcInstallBundledHeaders)
FORWARD(nvrtcRemoveBundledHeaders, nvrtcRemoveBundledHeaders)
FORWARD(nvrtcSetFlowCallback, nvrtcSetFlowCallback)
FORWARD(nvrtcSetPCHHeapSize, nvrtcSetPCHHeapSize)
FORWARD(cudatool_nvrtc_version, nvrtcVersion)
static FORWARD(create, nvrtcCreateProgram)
static FORWARD(compile, nvrtcCompileProgram)

/* Of the stand-in for libcuda, which is not there on a GPU: while a thread is in Python code that is called from here,
 * a signal of the program's waits, as what its handler raises could not pass through C. */
extern void cudatool_enter(void) __attribute__((weak));
extern void cudatool_exit(void) __attribute__((weak));

typedef long (*version_t)(int *major, int *minor);
static version_t known;

/* From now on, ask `function` for NVRTC's version: it may know it without the real library. */
void cudatool_nvrtc_know(version_t function) { known = function; }

long nvrtcVersion(long major, long minor, long c, long d, long e, long f) {
    if (!known) return cudatool_nvrtc_version(major, minor, c, d, e, f);
    if (cudatool_enter) cudatool_enter();
    long status = known((int *)major, (int *)minor);
    if (cudatool_exit) cudatool_exit();
    return status;
}

/* cuDNN, which looks for functions that are not documented, does not work without them. One has nine arguments: twelve
 * words are read and passed on. Those that a caller did not pass are its own stack, which nothing looks at. */
typedef long (*undocumented_t)(long, long, long, long, long, long, long, long, long, long, long, long);

#define FORWARD_UNDOCUMENTED(name)                                                                                     \
    long name(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, long k, long l) {        \
        static undocumented_t function;                                                                                \
        if (!function) function = (undocumented_t)real(#name);                                                         \
        return function ? function(a, b, c, d, e, f, g, h, i, j, k, l) : NVRTC_ERROR_INTERNAL_ERROR;                   \
    }

FORWARD_UNDOCUMENTED(__nvrtcCPEx)
FORWARD_UNDOCUMENTED(__nvrtcNvvmHandle)

typedef void (*keep_t)(const char *cubin, size_t cubin_size, const char *ptx, size_t ptx_size);
static keep_t kept;

/* From now on hand out cubins, and tell `function` of each and of its PTX; not any more if it is null. */
void cudatool_nvrtc_keep(keep_t function) { kept = function; }

long nvrtcGetCUBINSize(long program, long size, long c, long d, long e, long f) {
    return (kept ? cubin_size : nvrtcGetPTXSize)(program, size, c, d, e, f);
}

long nvrtcGetCUBIN(long program, long image, long c, long d, long e, long f) {
    keep_t tell = kept;
    if (!tell) return nvrtcGetPTX(program, image, c, d, e, f);
    long status = cubin(program, image, c, d, e, f);
    size_t size = 0, ptx_size = 0;
    if (status || cubin_size(program, (long)&size, 0, 0, 0, 0) || nvrtcGetPTXSize(program, (long)&ptx_size, 0, 0, 0, 0))
        return status;
    char *ptx = size && ptx_size ? malloc(ptx_size) : NULL;
    if (ptx && !nvrtcGetPTX(program, (long)ptx, 0, 0, 0, 0)) tell((const char *)image, size, ptx, ptx_size);
    free(ptx);
    return status;
}

static const char *(*created)(const char *name, const char *source);

/* From now on, tell `function` of programs, which returns another name for them or null, and compile them with line
 * information; not any more if it is null. */
void cudatool_nvrtc_watch(const char *(*function)(const char *, const char *)) { created = function; }

long nvrtcCreateProgram(long program, long source, long name, long count, long headers, long names) {
    const char *(*tell)(const char *, const char *) = created;
    const char *other = NULL;
    if (tell && source) {
        if (cudatool_enter) cudatool_enter();
        other = tell(name ? (const char *)name : "", (const char *)source);
        if (cudatool_exit) cudatool_exit();
    }
    return create(program, source, other ? (long)other : name, count, headers, names);
}

long nvrtcCompileProgram(long program, long count, long options, long d, long e, long f) {
    const char *const *given = (const char *const *)options;
    long n = given ? (int)count : 0;
    int has = 0;
    for (long i = 0; i < n; i++)
        has |= !strcmp(given[i], "-lineinfo") || !strcmp(given[i], "--generate-line-info") || !strcmp(given[i], "-G") ||
               !strcmp(given[i], "--device-debug");
    const char **all = created && !has ? malloc((size_t)(n + 1) * sizeof *all) : NULL;
    if (!all) return compile(program, count, options, d, e, f);
    for (long i = 0; i < n; i++) all[i] = given[i];
    all[n] = "--generate-line-info";
    long status = compile(program, n + 1, (long)all, d, e, f);
    free(all);
    return status;
}
