/* What is called so often, and takes so little itself, that what Python does around it counts.
 *
 * Launcher converts the arguments of a kernel and launches it in one step. It holds no state of a launch, so that any
 * number of threads can use one. What is enqueued, and where, is decided in cudatool/runtime/kernel.py and event.py.
 * Region lets NumPy lay an array over device memory, and address_of says where one lies.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <unistd.h>

typedef int (*launch_function)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **parameters,
                               void **extra); /* cuLaunchKernel */

struct parameter {
    Py_ssize_t offset, size;
};

typedef struct {
    PyObject_HEAD
    launch_function launch;
    void *function;
    PyTypeObject *array; /* whose attribute _address is passed, if it is known already */
    PyTypeObject *scalar; /* whose bytes are passed */
    PyObject *convert; /* (index, argument) -> bytes, for everything else */
    Py_ssize_t count, size;
    struct parameter *parameters;
} Launcher;

enum { MOST_ON_STACK = 1024 }; /* bytes of arguments */
enum { MOST_BYTES = 1 << 20 }; /* far more than any kernel takes */

static PyObject *address_name; /* "_address" */

static int Launcher_init(Launcher *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"launch", "function", "parameters", "array", "scalar", "convert", NULL};
    unsigned long long launch, function;
    PyObject *parameters, *convert;
    PyTypeObject *array, *scalar;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKO!O!O!O", names, &launch, &function, &PyList_Type, &parameters,
                                     &PyType_Type, &array, &PyType_Type, &scalar, &convert))
        return -1;
    if (self->parameters) {
        PyErr_SetString(PyExc_RuntimeError, "a Launcher cannot be initialized again");
        return -1;
    }
    PyObject *held = PyList_AsTuple(parameters); /* __index__ of a number may change the list */
    if (!held)
        return -1;
    Py_ssize_t count = PyTuple_GET_SIZE(held), size = 0;
    struct parameter *made = PyMem_Calloc(count ? count : 1, sizeof(struct parameter));
    if (!made) {
        Py_DECREF(held);
        PyErr_NoMemory();
        return -1;
    }
    int good = 1;
    for (Py_ssize_t i = 0; good && i < count; ++i) {
        struct parameter *one = &made[i];
        PyObject *pair = PyTuple_GET_ITEM(held, i);
        good = PyTuple_Check(pair);
        if (!good) {
            PyErr_SetString(PyExc_TypeError, "a parameter is a tuple of offset and size");
        } else if (!PyArg_ParseTuple(pair, "nn", &one->offset, &one->size)) {
            good = 0;
        } else if (one->offset < 0 || one->size <= 0 || one->offset > MOST_BYTES || one->size > MOST_BYTES) {
            PyErr_SetString(PyExc_ValueError, "a parameter has a size and an offset, of at most 1 MiB each");
            good = 0;
        } else if (size < one->offset + one->size) {
            size = one->offset + one->size;
        }
    }
    Py_DECREF(held);
    if (good && self->parameters) { /* __index__ has initialized it */
        PyErr_SetString(PyExc_RuntimeError, "a Launcher cannot be initialized again");
        good = 0;
    }
    if (!good) {
        PyMem_Free(made);
        return -1;
    }
    self->parameters = made;
    self->count = count;
    self->size = size;
    self->launch = (launch_function)(uintptr_t)launch;
    self->function = (void *)(uintptr_t)function;
    self->array = (PyTypeObject *)Py_NewRef(array);
    self->scalar = (PyTypeObject *)Py_NewRef(scalar);
    self->convert = Py_NewRef(convert);
    return 0;
}

static int Launcher_traverse(Launcher *self, visitproc visit, void *arg)
{
    Py_VISIT(self->array);
    Py_VISIT(self->scalar);
    Py_VISIT(self->convert);
    return 0;
}

static int Launcher_clear(Launcher *self)
{
    Py_CLEAR(self->array);
    Py_CLEAR(self->scalar);
    Py_CLEAR(self->convert);
    return 0;
}

static void Launcher_dealloc(Launcher *self)
{
    PyObject_GC_UnTrack(self);
    Launcher_clear(self);
    PyMem_Free(self->parameters);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Each returns whether it has written the argument. None leaves an error set. */

static int write_integer(PyObject *argument, char *to, Py_ssize_t size)
{
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(argument, &overflow);
    if (overflow > 0 && size == 8) {
        unsigned long long large = PyLong_AsUnsignedLongLong(argument);
        if (large == (unsigned long long)-1 && PyErr_Occurred()) {
            PyErr_Clear();
            return 0;
        }
        memcpy(to, &large, 8);
        return 1;
    }
    if (overflow || (size != 1 && size != 2 && size != 4 && size != 8))
        return 0;
    if (size < 8) {
        long long limit = 1LL << (8 * size);
        if (value < -limit / 2 || value >= limit)
            return 0;
    }
    memcpy(to, &value, size); /* little-endian, as CUDA's hosts are */
    return 1;
}

static int write_float(double value, char *to, Py_ssize_t size)
{
    int failed = size == 8 ? PyFloat_Pack8(value, to, 1)
                 : size == 4 ? PyFloat_Pack4(value, to, 1)
                 : size == 2 ? PyFloat_Pack2(value, to, 1)
                             : 1;
    if (failed)
        PyErr_Clear();
    return !failed;
}

static int write_array(PyObject *argument, char *to, Py_ssize_t size)
{
    if (size != 8)
        return 0;
    PyObject *address = PyObject_GetAttr(argument, address_name);
    int written = 0;
    if (address && PyLong_Check(address)) {
        long long value = PyLong_AsLongLong(address);
        written = value >= 0;
        memcpy(to, &value, 8);
    }
    Py_XDECREF(address);
    PyErr_Clear();
    return written;
}

static int write_scalar(PyObject *argument, char *to, Py_ssize_t size)
{
    Py_buffer view;
    if (PyObject_GetBuffer(argument, &view, PyBUF_SIMPLE)) {
        PyErr_Clear();
        return 0;
    }
    int fits = view.len == size;
    if (fits)
        memcpy(to, view.buf, size);
    PyBuffer_Release(&view);
    return fits;
}

static int write_other(Launcher *self, Py_ssize_t index, PyObject *argument, char *to, Py_ssize_t size)
{
    PyObject *bytes = PyObject_CallFunction(self->convert, "nO", index, argument);
    if (!bytes)
        return -1;
    if (!PyBytes_Check(bytes) || PyBytes_GET_SIZE(bytes) != size) {
        PyErr_Format(PyExc_TypeError, "convert must return %zd bytes", size);
        Py_DECREF(bytes);
        return -1;
    }
    memcpy(to, PyBytes_AS_STRING(bytes), size);
    Py_DECREF(bytes);
    return 0;
}

/* Write all arguments; return -1 with an error if one does not fit. */
static int write_all(Launcher *self, PyObject *arguments, char *values)
{
    if (!PyTuple_Check(arguments) || PyTuple_GET_SIZE(arguments) != self->count) {
        PyErr_Format(PyExc_TypeError, "arguments must be a tuple of %zd", self->count);
        return -1;
    }
    memset(values, 0, self->size); /* also what lies between them */
    for (Py_ssize_t i = 0; i < self->count; ++i) {
        PyObject *argument = PyTuple_GET_ITEM(arguments, i);
        char *to = values + self->parameters[i].offset;
        Py_ssize_t size = self->parameters[i].size;
        int written = 0;
        if (PyLong_Check(argument))
            written = write_integer(argument, to, size);
        else if (PyObject_TypeCheck(argument, self->array))
            written = write_array(argument, to, size);
        else if (PyObject_TypeCheck(argument, self->scalar)) /* before floats: NumPy's double is one, too */
            written = write_scalar(argument, to, size);
        else if (PyFloat_Check(argument))
            written = write_float(PyFloat_AS_DOUBLE(argument), to, size);
        if (!written && write_other(self, i, argument, to, size))
            return -1;
    }
    return 0;
}

static PyObject *Launcher_pack(Launcher *self, PyObject *arguments)
{
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, self->size);
    if (bytes && write_all(self, arguments, PyBytes_AS_STRING(bytes)))
        Py_CLEAR(bytes);
    return bytes;
}

static int read_dimensions(PyObject *tuple, unsigned dimensions[3])
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 3) {
        PyErr_SetString(PyExc_TypeError, "grid and block are tuples of three numbers");
        return -1;
    }
    for (int i = 0; i < 3; ++i) {
        unsigned long value = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(tuple, i));
        if (value == (unsigned long)-1 && PyErr_Occurred())
            return -1;
        if (value > UINT32_MAX) {
            PyErr_SetString(PyExc_OverflowError, "grid and block are numbers of 32 bits");
            return -1;
        }
        dimensions[i] = (unsigned)value;
    }
    return 0;
}

static PyObject *Launcher_launch(Launcher *self, PyObject *const *args, Py_ssize_t nargs)
{
    unsigned grid[3], block[3];
    if (nargs != 5) {
        PyErr_SetString(PyExc_TypeError, "launch(grid, block, shared, stream, arguments)");
        return NULL;
    }
    if (!self->launch) {
        PyErr_SetString(PyExc_RuntimeError, "the Launcher has no function to launch with");
        return NULL;
    }
    if (read_dimensions(args[0], grid) || read_dimensions(args[1], block))
        return NULL;
    unsigned long shared = PyLong_AsUnsignedLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (shared > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "shared is a number of 32 bits");
        return NULL;
    }
    unsigned long long stream = PyLong_AsUnsignedLongLong(args[3]);
    if (PyErr_Occurred())
        return NULL;

    /* The values, then their addresses. */
    Py_ssize_t aligned = (self->size + 15) & ~(Py_ssize_t)15;
    Py_ssize_t wanted = aligned + self->count * (Py_ssize_t)sizeof(void *);
    _Alignas(16) char stack[MOST_ON_STACK];
    char *values = wanted <= MOST_ON_STACK ? stack : PyMem_Malloc(wanted);
    if (!values)
        return PyErr_NoMemory();
    PyObject *result = NULL;
    if (!write_all(self, args[4], values)) {
        void **addresses = (void **)(values + aligned);
        for (Py_ssize_t i = 0; i < self->count; ++i)
            addresses[i] = values + self->parameters[i].offset;
        int status;
        Py_BEGIN_ALLOW_THREADS /* the driver waits while its queue is full; the software device is in Python */
        status = self->launch(self->function, grid[0], grid[1], grid[2], block[0], block[1], block[2],
                              (unsigned)shared, (void *)(uintptr_t)stream, addresses, NULL);
        Py_END_ALLOW_THREADS
        result = PyLong_FromLong(status);
    }
    if (values != stack)
        PyMem_Free(values);
    return result;
}

typedef struct {
    PyObject_HEAD
    unsigned long long address;
    Py_ssize_t size;
    PyObject *owner; /* whose free(address) is called at the end; may be NULL */
    unsigned generation;
} Region;

static PyObject *free_name; /* "free" */

static unsigned generation; /* of this process: regions of an older one are those of the process it was forked off */

static void forked(void)
{
    ++generation;
}

static int Region_init(Region *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"address", "size", "owner", NULL};
    PyObject *owner = NULL;
    unsigned long long address;
    Py_ssize_t size;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Kn|O", names, &address, &size, &owner))
        return -1;
    if (self->owner) { /* asked last: __index__ of a number may have made it */
        PyErr_SetString(PyExc_RuntimeError, "a Region cannot be initialized again");
        return -1;
    }
    if (size < 0) {
        PyErr_SetString(PyExc_ValueError, "a region has a size that is not negative");
        return -1;
    }
    self->address = address;
    self->size = size;
    self->generation = generation;
    self->owner = Py_XNewRef(owner);
    return 0;
}

static int is_finalizing(void)
{
#if PY_VERSION_HEX >= 0x030d0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

static void Region_finalize(PyObject *object)
{
    Region *self = (Region *)object;
    if (!self->owner || self->generation != generation || is_finalizing()) /* the end of the process frees everything */
        return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback); /* one that is on its way must not be lost */
    PyObject *address = PyLong_FromUnsignedLongLong(self->address);
    PyObject *done = address ? PyObject_CallMethodOneArg(self->owner, free_name, address) : NULL;
    if (!done)
        PyErr_WriteUnraisable(object);
    Py_XDECREF(address);
    Py_XDECREF(done);
    PyErr_Restore(type, value, traceback);
}

static int Region_traverse(Region *self, visitproc visit, void *arg)
{
    Py_VISIT(self->owner);
    return 0;
}

static int Region_clear(Region *self)
{
    Py_CLEAR(self->owner);
    return 0;
}

static void Region_dealloc(Region *self)
{
    if (PyObject_CallFinalizerFromDealloc((PyObject *)self))
        return;
    PyObject_GC_UnTrack(self);
    Region_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int Region_getbuffer(Region *self, Py_buffer *view, int flags)
{
    static char nothing; /* NumPy allocates what has no address */
    void *start = self->address && self->size ? (void *)(uintptr_t)self->address : &nothing;
    return PyBuffer_FillInfo(view, (PyObject *)self, start, self->size, 0, flags);
}

static PyMemberDef Region_members[] = {
    {"address", T_ULONGLONG, offsetof(Region, address), READONLY, "Where it begins."},
    {"size", T_PYSSIZET, offsetof(Region, size), READONLY, "Bytes."},
    {"owner", T_OBJECT, offsetof(Region, owner), READONLY, "Whose ``free(address)`` is called at the end."},
    {NULL, 0, 0, 0, NULL},
};

static PyBufferProcs Region_buffer = {.bf_getbuffer = (getbufferproc)Region_getbuffer};

static PyTypeObject RegionType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cudatool.runtime._native.Region",
    .tp_doc = "Region(address, size, owner=None)\n\nBytes at a device's address, in the form of a buffer that must not "
              "be read.",
    .tp_basicsize = sizeof(Region),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Region_init,
    .tp_finalize = Region_finalize,
    .tp_traverse = (traverseproc)Region_traverse,
    .tp_clear = (inquiry)Region_clear,
    .tp_dealloc = (destructor)Region_dealloc,
    .tp_members = Region_members,
    .tp_as_buffer = &Region_buffer,
};

/* A function of the driver with handles for arguments, which the bindings take longer to convert than to call. */
static PyObject *call(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    unsigned long long words[4] = {0};
    if (nargs < 1 || nargs > 4) {
        PyErr_SetString(PyExc_TypeError, "call(function, at most three words)");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < nargs; ++i) {
        words[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (words[i] == (unsigned long long)-1 && PyErr_Occurred())
            return NULL;
    }
    int status = 0;
    Py_BEGIN_ALLOW_THREADS
    switch (nargs) {
    case 1:
        status = ((int (*)(void))(uintptr_t)words[0])();
        break;
    case 2:
        status = ((int (*)(uintptr_t))(uintptr_t)words[0])(words[1]);
        break;
    case 3:
        status = ((int (*)(uintptr_t, uintptr_t))(uintptr_t)words[0])(words[1], words[2]);
        break;
    case 4: /* the last one is an unsigned int: flags */
        status = ((int (*)(uintptr_t, uintptr_t, unsigned))(uintptr_t)words[0])(words[1], words[2], words[3]);
        break;
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

/* Where a NumPy array begins: all of its own attributes that say so make an object with much else. */
static PyObject *address_of(PyObject *Py_UNUSED(module), PyObject *array)
{
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, PyBUF_STRIDED_RO))
        return NULL;
    PyObject *address = PyLong_FromVoidPtr(view.buf);
    PyBuffer_Release(&view);
    return address;
}

/* What a signal writes to stderr before it ends the process as it would have. Python's own handlers run between two
 * bytecodes only, and a program could see them. Children that are forked have none of it. */
static const int ending_signals[] = {SIGTERM, SIGHUP,  SIGQUIT, SIGABRT, SIGALRM, SIGUSR1,
                                     SIGUSR2, SIGXCPU, SIGSEGV, SIGBUS,  SIGFPE,  SIGILL};
static char last_message[4096];
static volatile size_t last_length;
static pid_t last_owner;

static void on_termination(int number)
{
    int saved = errno;
    if (getpid() == last_owner && last_length) {
        ssize_t written = write(STDERR_FILENO, last_message, last_length);
        (void)written;
    }
    signal(number, SIG_DFL);
    raise(number); /* delivered when this handler returns */
    errno = saved;
}

static PyObject *last_words(PyObject *Py_UNUSED(module), PyObject *message)
{
    Py_ssize_t length;
    char *text;
    struct sigaction now;
    if (PyBytes_AsStringAndSize(message, &text, &length))
        return NULL;
    if ((size_t)length > sizeof last_message)
        length = sizeof last_message;
    last_length = 0;
    memcpy(last_message, text, (size_t)length);
    last_owner = getpid();
    last_length = (size_t)length;
    for (size_t i = 0; i < sizeof ending_signals / sizeof *ending_signals; ++i) {
        int number = ending_signals[i];
        if (sigaction(number, NULL, &now))
            return PyErr_SetFromErrno(PyExc_OSError);
        if (length && now.sa_handler == SIG_DFL)
            signal(number, on_termination);
        else if (!length && now.sa_handler == on_termination)
            signal(number, SIG_DFL);
    }
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"last_words", last_words, METH_O,
     "last_words(message)\n\nLet signals that end the process write a message to stderr; b'' undoes it."},
    {"address_of", address_of, METH_O, "address_of(array)\n\nReturn the address of the first element of a NumPy array."},
    {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL,
     "call(function, *words)\n\nCall a function of the driver by its address and return its status."},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef Launcher_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))Launcher_launch, METH_FASTCALL,
     "launch(grid, block, shared, stream, arguments)\n\nEnqueue the kernel and return the driver's status."},
    {"pack", (PyCFunction)Launcher_pack, METH_O,
     "pack(arguments)\n\nReturn the bytes of all parameters, each at its offset."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject LauncherType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cudatool.runtime._native.Launcher",
    .tp_doc = "Launcher(launch, function, parameters, array, scalar, convert)",
    .tp_basicsize = sizeof(Launcher),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Launcher_init,
    .tp_traverse = (traverseproc)Launcher_traverse,
    .tp_clear = (inquiry)Launcher_clear,
    .tp_dealloc = (destructor)Launcher_dealloc,
    .tp_methods = Launcher_methods,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "cudatool.runtime._native",
    .m_doc = "What is too slow in Python; see _native.c.",
    .m_size = -1,
    .m_methods = module_methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    address_name = PyUnicode_InternFromString("_address");
    free_name = PyUnicode_InternFromString("free");
    if (pthread_atfork(NULL, NULL, forked))
        return PyErr_NoMemory();
    PyObject *made = address_name && free_name ? PyModule_Create(&module) : NULL;
    if (made && (PyModule_AddType(made, &LauncherType) || PyModule_AddType(made, &RegionType)))
        Py_CLEAR(made);
    return made;
}
