/* libnvJitLink.so.13 of the software CUDA device.
 *
 * Programs that link device code ask for machine code, which the software device cannot run. This library forwards
 * every call to the real nvJitLink, which needs no GPU and whose diagnostics are NVIDIA's own, except those that
 * cudatool/sim/toolchain/nvjitlink.py has hooked: they hand out the linked PTX where machine code is asked for.
 */
#include <Python.h>
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

/* No function of nvJitLink has more than five arguments, and all of them are integers or pointers: five machine words
 * pass them on unchanged in the calling conventions of x86-64 and AArch64. */
typedef long (*function_t)(long, long, long, long, long);

#define NVJITLINK_ERROR_INTERNAL 6

#define FUNCTIONS(F)                                                                                                   \
    F(nvJitLinkCreate)                                                                                                 \
    F(nvJitLinkDestroy)                                                                                                \
    F(nvJitLinkAddData)                                                                                                \
    F(nvJitLinkAddFile)                                                                                                \
    F(nvJitLinkComplete)                                                                                               \
    F(nvJitLinkGetLinkedCubinSize)                                                                                     \
    F(nvJitLinkGetLinkedCubin)                                                                                         \
    F(nvJitLinkGetLinkedPtxSize)                                                                                       \
    F(nvJitLinkGetLinkedPtx)                                                                                           \
    F(nvJitLinkGetLinkedLTOIRSize)                                                                                     \
    F(nvJitLinkGetLinkedLTOIR)                                                                                         \
    F(nvJitLinkGetErrorLogSize)                                                                                        \
    F(nvJitLinkGetErrorLog)                                                                                            \
    F(nvJitLinkGetInfoLogSize)                                                                                         \
    F(nvJitLinkGetInfoLog)                                                                                             \
    F(nvJitLinkVersion)

static volatile int closed;
static char *path;

/* The real nvJitLink is that file. It is opened when a program first calls it: that takes some ms. */
void cudatool_nvjitlink_path(const char *file) {
    if (!path) path = strdup(file);
}

/* Return the real function of this name, NULL if there is none. */
function_t cudatool_nvjitlink_real(const char *name) {
    static void *_Atomic library; /* threads that come here together open it several times, which gives the same */
    if (!library && path) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return library ? (function_t)dlsym(library, name) : NULL;
}

/* Signal handlers of the program wait until a hook is over, as in the driver (_libcuda.c). */
extern void cudatool_enter(void) __attribute__((weak));
extern void cudatool_exit(void) __attribute__((weak));

/* A C++ destructor may end a link while Python is on its way out of a function with an exception, which is not the
 * hook's: that starts without one, and the exception is there again when the hook is over. */
static long call(function_t hook, long a, long b, long c, long d, long e) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (cudatool_enter) cudatool_enter();
    long result = hook(a, b, c, d, e);
    if (cudatool_exit) cudatool_exit();
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(state);
    return result;
}

#define DEFINE(name)                                                                                                   \
    static function_t real_##name, hook_##name;                                                                        \
    long name(long a, long b, long c, long d, long e) {                                                                \
        if (hook_##name && !closed) return call(hook_##name, a, b, c, d, e);                                           \
        if (!real_##name) real_##name = cudatool_nvjitlink_real(#name);                                                \
        return real_##name ? real_##name(a, b, c, d, e) : NVJITLINK_ERROR_INTERNAL;                                    \
    }
FUNCTIONS(DEFINE)

/* nvJitLink.h names each function after its own release, 13.0 to 13.9, and libraries built with it ask for that name:
 * cuSPARSE, which PyTorch loads. */
#define RELEASE(name, minor) long __##name##_13_##minor(long, long, long, long, long) __attribute__((alias(#name)));
#define RELEASES(name)                                                                                                 \
    RELEASE(name, 0)                                                                                                   \
    RELEASE(name, 1)                                                                                                   \
    RELEASE(name, 2)                                                                                                   \
    RELEASE(name, 3)                                                                                                   \
    RELEASE(name, 4)                                                                                                   \
    RELEASE(name, 5)                                                                                                   \
    RELEASE(name, 6)                                                                                                   \
    RELEASE(name, 7)                                                                                                   \
    RELEASE(name, 8)                                                                                                   \
    RELEASE(name, 9)
FUNCTIONS(RELEASES)

/* From now on calls of the function of this name go to `hook`. Returns 0, or 1 if there is no such function. */
int cudatool_nvjitlink_hook(const char *name, function_t hook) {
#define HOOK(known)                                                                                                    \
    if (!strcmp(name, #known)) return hook_##known = hook, 0;
    FUNCTIONS(HOOK)
    return 1;
}

/* From now on every call goes to the real nvJitLink. Registered with Py_AtExit: handles may outlive the interpreter. */
void cudatool_nvjitlink_close(void) { closed = 1; }
