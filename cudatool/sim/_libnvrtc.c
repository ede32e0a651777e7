/* libnvrtc.so.13 of the software CUDA device.
 *
 * Programs often compile to "cubin", machine code that the software device cannot run. NVRTC keeps the PTX of the same
 * compilation, so this library forwards every call to the real NVRTC and hands out the PTX where the cubin is asked
 * for. The software driver recognizes PTX by its text.
 */
#include <dlfcn.h>
#include <stddef.h>

static void *library;

/* Open the real NVRTC. Returns 0, or 1 if it cannot be loaded. */
int cudatool_nvrtc_open(const char *path) {
    if (!library) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return library == NULL;
}

/* No function of NVRTC has more than six arguments, and all of them are integers or pointers: six machine words pass
 * them on unchanged in the calling conventions of x86-64 and AArch64. */
typedef long (*function_t)(long, long, long, long, long, long);

#define NVRTC_ERROR_INTERNAL_ERROR 11

#define FORWARD(name, target)                                                                                          \
    long name(long a, long b, long c, long d, long e, long f) {                                                        \
        static function_t function;                                                                                    \
        if (!function && library) function = (function_t)dlsym(library, #target);                                      \
        return function ? function(a, b, c, d, e, f) : NVRTC_ERROR_INTERNAL_ERROR;                                     \
    }

FORWARD(nvrtcGetCUBIN, nvrtcGetPTX)
FORWARD(nvrtcGetCUBINSize, nvrtcGetPTXSize)
FORWARD(nvrtcAddNameExpression, nvrtcAddNameExpression)
FORWARD(nvrtcCompileProgram, nvrtcCompileProgram)
FORWARD(nvrtcCreateProgram, nvrtcCreateProgram)
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
FORWARD(nvrtcVersion, nvrtcVersion)
