/* What every driver call does before and after its handler, which is Python (cudatool/sim/abi.py).
 *
 *     convert the arguments; note the call in progress; take the driver's lock
 *     handler(*arguments)                         or what changes the meaning of calls, while there is such a thing
 *     give the lock back; notify its watchers; carry out what was put off until the call is over
 *
 * It stands in C because it costs more than most handlers: a launch was half a dozen lines of Python, and as many again
 * in ctypes. What is rare (watchers, failures, work that was put off) is a function of abi.py that is called from here.
 *
 * Two steps of launches stand here as well: reading their configuration, and calling native code.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

enum { MOST_ARGUMENTS = 12, SLOTS = 1024 };
enum { CUDA_SUCCESS = 0, CUDA_ERROR_DEINITIALIZED = 4, CUDA_ERROR_UNKNOWN = 999 };

/* ---- the call in progress ------------------------------------------------------------------------------------ */

static __thread struct {
    int depth;                      /* calls that this thread is in, one inside of the other */
    int null_stream;                /* what stream handle 0 means in the innermost; 0 is none of the two */
    char has_message;               /* why the last one failed is known, and kept for the thread in Python */
    unsigned long long correlation; /* of the innermost */
    PyObject *entry, *arguments;    /* of the innermost, borrowed */
    unsigned long long address;     /* of the memory that the message is about */
} current;

static PyObject *message_key, *empty;

static PyObject *call_depth(PyObject *self, void *unused) {
    (void)self, (void)unused;
    return PyLong_FromLong(current.depth);
}

static PyObject *call_correlation(PyObject *self, void *unused) {
    (void)self, (void)unused;
    return PyLong_FromUnsignedLongLong(current.correlation);
}

static PyObject *call_null_stream(PyObject *self, void *unused) {
    (void)self, (void)unused;
    return PyLong_FromLong(current.null_stream ? current.null_stream : 1); /* CU_STREAM_LEGACY */
}

static PyObject *call_address(PyObject *self, void *unused) {
    (void)self, (void)unused;
    return PyLong_FromUnsignedLongLong(current.address);
}

static int set_call_address(PyObject *self, PyObject *value, void *unused) {
    (void)self, (void)unused;
    unsigned long long address = value ? PyLong_AsUnsignedLongLong(value) : 0;
    if (PyErr_Occurred()) return -1;
    current.address = address;
    return 0;
}

static PyObject *call_message(PyObject *self, void *unused) {
    (void)self, (void)unused;
    PyObject *kept = current.has_message ? PyThreadState_GetDict() : NULL;
    PyObject *found = kept ? PyDict_GetItemWithError(kept, message_key) : NULL;
    if (!found && PyErr_Occurred()) return NULL;
    return Py_NewRef(found ? found : empty);
}

static int set_call_message(PyObject *self, PyObject *value, void *unused) {
    (void)self, (void)unused;
    PyObject *kept = PyThreadState_GetDict();
    if (!value || !kept) {
        PyErr_SetString(PyExc_TypeError, "a message can only be set");
        return -1;
    }
    if (PyDict_SetItem(kept, message_key, value)) return -1;
    current.has_message = 1;
    return 0;
}

static PyGetSetDef call_attributes[] = {
    {"depth", call_depth, NULL, NULL, NULL},
    {"correlation", call_correlation, NULL, NULL, NULL},
    {"null_stream", call_null_stream, NULL, NULL, NULL},
    {"address", call_address, set_call_address, NULL, NULL},
    {"message", call_message, set_call_message, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject CallType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cudatool.sim._calls.Call",
    .tp_doc = "The driver call in progress on the running thread.",
    .tp_basicsize = sizeof(PyObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_getset = call_attributes,
};

/* ---- calls --------------------------------------------------------------------------------------------------- */

/* What abi.py gave: its module's namespace, where `guard` and `subscribers` stand; the methods of the driver's lock; the
 * functions for what is rare; and what was put off. Held for ever: handles are destroyed when modules are gone. */
static PyObject *names, *acquire, *release, *refusal, *refused, *crashed, *results, *finish, *deferred, *callbacks;
static PyObject *guard_name, *subscribers_name, *handler_name, *n_enter, *n_leave;
static unsigned long long correlations;

/* Call the handler, or what stands in its place, under the lock. Returns 0, or -1 with an exception. */
static int handle(PyObject *entry, PyObject *arguments) {
    PyObject *taken = PyObject_CallNoArgs(acquire);
    if (!taken) return -1;
    Py_DECREF(taken);
    PyObject *guard = PyDict_GetItemWithError(names, guard_name), *done = NULL, *handler = NULL;
    if (guard && guard != Py_None) {
        Py_INCREF(guard);
        done = PyObject_CallFunctionObjArgs(guard, entry, arguments, NULL);
        Py_DECREF(guard);
    } else if (!PyErr_Occurred() && (handler = PyObject_GetAttr(entry, handler_name))) {
        done = PyObject_Vectorcall(handler, ((PyTupleObject *)arguments)->ob_item, PyTuple_GET_SIZE(arguments), NULL);
    }
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *given = PyObject_CallNoArgs(release);
    if (!given) PyErr_WriteUnraisable(release);
    Py_XDECREF(given);
    PyErr_Restore(type, value, traceback);
    Py_XDECREF(done), Py_XDECREF(handler);
    return done ? 0 : -1;
}

/* Return the CUresult of the exception that a handler raised if it is a DriverError, which `refused` takes note of; else
 * -1, and the exception stays. */
static int result_of_refusal(PyObject *entry) {
    if (!PyErr_ExceptionMatches(refusal)) return -1;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *number = PyObject_CallFunctionObjArgs(refused, entry, value, NULL);
    Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(traceback);
    int result = number ? (int)PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    return result;
}

/* Notify each watcher of the call, the last one first if it is over. Returns 0, or -1 with an exception. */
static int notify(PyObject *watchers, PyObject *method, int is_over, PyObject *entry, PyObject *arguments,
                PyObject *correlation, PyObject *result) {
    Py_ssize_t count = PyTuple_GET_SIZE(watchers);
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *watcher = PyTuple_GET_ITEM(watchers, is_over ? count - 1 - i : i);
        PyObject *const given[] = {watcher, entry, arguments, correlation, result};
        PyObject *done = PyObject_VectorcallMethod(method, given, result ? 5 : 4, NULL);
        if (!done) return -1;
        Py_DECREF(done);
    }
    return 0;
}

/* The handler's part of a call, and what its watchers get of it. Returns the CUresult, or -1 with an exception. */
static int watched(PyObject *entry, PyObject *arguments) {
    PyObject *watchers = PyDict_GetItemWithError(names, subscribers_name);
    if (!watchers && PyErr_Occurred()) return -1;
    if (!watchers || !PyTuple_Check(watchers) || !PyTuple_GET_SIZE(watchers))
        return handle(entry, arguments) ? result_of_refusal(entry) : CUDA_SUCCESS;
    PyObject *correlation = PyLong_FromUnsignedLongLong(current.correlation);
    Py_INCREF(watchers);
    int result = -1;
    if (correlation && !notify(watchers, n_enter, 0, entry, arguments, correlation, NULL)) {
        result = handle(entry, arguments) ? result_of_refusal(entry) : CUDA_SUCCESS;
        PyObject *number = result >= 0 ? PyLong_FromLong(result) : NULL;
        PyObject *named = number ? PyDict_GetItemWithError(results, number) : NULL;
        if (number && !named && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, number);
        if (!named || notify(watchers, n_leave, 1, entry, arguments, correlation, named)) result = -1;
        Py_XDECREF(number);
    }
    Py_XDECREF(correlation);
    Py_DECREF(watchers);
    return result;
}

/* Notify each watcher of something in the middle of the call in progress, without the lock. A call that is made inside of
 * another one keeps it: the other one may be in the middle of a change. */
static PyObject *py_notify(PyObject *module, PyObject *args) {
    PyObject *method, *what, *watchers = PyDict_GetItemWithError(names, subscribers_name), *done;
    (void)module;
    if (!PyArg_ParseTuple(args, "UO", &method, &what) || (!watchers && PyErr_Occurred())) return NULL;
    if (!watchers || !PyTuple_Check(watchers) || !PyTuple_GET_SIZE(watchers)) Py_RETURN_NONE;
    int is_outermost = current.depth == 1;
    PyObject *correlation = PyLong_FromUnsignedLongLong(current.correlation);
    if (!correlation) return NULL;
    if (is_outermost) {
        if (!(done = PyObject_CallNoArgs(release))) {
            Py_DECREF(correlation);
            return NULL;
        }
        Py_DECREF(done);
    }
    Py_INCREF(watchers);
    int failed = notify(watchers, method, 0, current.entry, current.arguments, correlation, what);
    Py_DECREF(watchers), Py_DECREF(correlation);
    if (is_outermost) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        while (!(done = PyObject_CallNoArgs(acquire))) PyErr_Clear(); /* without it the call cannot go on */
        Py_DECREF(done);
        PyErr_Restore(type, value, traceback);
    }
    if (failed) return NULL;
    Py_RETURN_NONE;
}

/* Make a driver call. Returns its CUresult, or -1 with an exception that is no error of the driver's API. */
static int invoke(PyObject *entry, int deferrable, PyObject *arguments, int null_stream) {
    if (deferrable && current.depth) {
        PyObject *later = Py_BuildValue("(OOi)", entry, arguments, null_stream);
        int failed = !later || PyList_Append(deferred, later);
        Py_XDECREF(later);
        return failed ? -1 : CUDA_SUCCESS;
    }
    unsigned long long outer = current.correlation;
    int outer_null_stream = current.null_stream;
    PyObject *outer_entry = current.entry, *outer_arguments = current.arguments;
    current.correlation = ++correlations;
    current.entry = entry;
    current.arguments = arguments;
    current.null_stream = null_stream;
    ++current.depth;
    current.has_message = 0;
    current.address = 0;
    int result = watched(entry, arguments);
    --current.depth;
    current.correlation = outer;
    current.null_stream = outer_null_stream;
    current.entry = outer_entry;
    current.arguments = outer_arguments;
    if (result < 0 || current.depth || (!PyList_GET_SIZE(deferred) && !PyList_GET_SIZE(callbacks))) return result;
    PyObject *done = PyObject_CallNoArgs(finish);
    Py_XDECREF(done);
    return done ? result : -1;
}

/* ---- from C ---------------------------------------------------------------------------------------------------- */

struct binding {
    PyObject *entry;
    int deferrable, null_stream, count;
    char kinds[MOST_ARGUMENTS];
};
static struct binding bindings[SLOTS];

/* An argument is a machine word of which its type's bytes count, the others being anything. */
static PyObject *converted(char kind, long word) {
    switch (kind) {
    case 'i': return PyLong_FromLong((int)word);
    case 'I': return PyLong_FromUnsignedLong((unsigned)word);
    case 'H': return PyLong_FromUnsignedLong((unsigned short)word);
    case 'B': return PyLong_FromUnsignedLong((unsigned char)word);
    default: return PyLong_FromUnsignedLong((unsigned long)word);
    }
}

static int is_finalizing(void) {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

/* What an entry point of the driver calls, with Python's lock held and no exception set. None is left. */
static int call_slot(int slot, const long *words) {
    struct binding *binding = &bindings[slot];
    PyObject *arguments = PyTuple_New(binding->count);
    int result = -1;
    for (int i = 0; arguments && i < binding->count; ++i) {
        PyObject *argument = converted(binding->kinds[i], words[i]);
        if (!argument) Py_CLEAR(arguments);
        else PyTuple_SET_ITEM(arguments, i, argument);
    }
    if (arguments)
        result = invoke(binding->entry, binding->deferrable, arguments, binding->null_stream);
    Py_XDECREF(arguments);
    if (result >= 0) return result;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (value && traceback) PyException_SetTraceback(value, traceback);
    PyObject *number = PyObject_CallFunctionObjArgs(crashed, binding->entry, value ? value : Py_None, NULL);
    result = number ? (int)PyLong_AsLong(number) : is_finalizing() ? CUDA_ERROR_DEINITIALIZED : CUDA_ERROR_UNKNOWN;
    Py_XDECREF(number), Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(traceback);
    PyErr_Clear();
    return result;
}

/* ---- for Python ------------------------------------------------------------------------------------------------ */

static PyObject *py_install(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"names",   "acquire", "release",  "refusal",   "refused", "crashed",
                               "results", "finish",  "deferred", "callbacks", NULL};
    PyObject **kept[] = {&names, &acquire, &release, &refusal, &refused, &crashed, &results, &finish, &deferred, &callbacks};
    PyObject *given[10];
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOOOO!OO!O!", keywords, &PyDict_Type, &given[0], &given[1],
                                     &given[2], &given[3], &given[4], &given[5], &PyDict_Type, &given[6], &given[7],
                                     &PyList_Type, &given[8], &PyList_Type, &given[9]))
        return NULL;
    for (int i = 0; i < 10; ++i) Py_XSETREF(*kept[i], Py_NewRef(given[i]));
    Py_RETURN_NONE;
}

static PyObject *py_bind(PyObject *module, PyObject *args) {
    PyObject *entry;
    int slot, deferrable, null_stream;
    const char *kinds;
    Py_ssize_t count;
    (void)module;
    if (!PyArg_ParseTuple(args, "iOs#pi", &slot, &entry, &kinds, &count, &deferrable, &null_stream)) return NULL;
    if (slot < 0 || slot >= SLOTS || count > MOST_ARGUMENTS) {
        PyErr_SetString(PyExc_ValueError, "no such slot, or more arguments than it passes on");
        return NULL;
    }
    struct binding *binding = &bindings[slot];
    *binding = (struct binding){Py_NewRef(entry), deferrable, null_stream, (int)count, {0}};
    memcpy(binding->kinds, kinds, (size_t)count);
    Py_RETURN_NONE;
}

static PyObject *py_invoke(PyObject *module, PyObject *args) {
    PyObject *entry, *arguments;
    int deferrable, null_stream;
    (void)module;
    if (!PyArg_ParseTuple(args, "OpO!i", &entry, &deferrable, &PyTuple_Type, &arguments, &null_stream))
        return NULL;
    int result = invoke(entry, deferrable, arguments, null_stream);
    return result < 0 ? NULL : PyLong_FromLong(result);
}

/* Return the grid, the block, the bytes of shared memory, the stream and the number of attributes of a CUlaunchConfig. */
static PyObject *py_launch_config(PyObject *module, PyObject *address) {
    struct {
        unsigned grid[3], block[3], shared;
        unsigned long long stream;
        void *attributes;
        unsigned count;
    } const *config = PyLong_AsVoidPtr(address);
    (void)module;
    if (!config) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "there is no launch config at NULL");
        return NULL;
    }
    const unsigned *g = config->grid, *b = config->block;
    return Py_BuildValue("((III)(III)IKI)", g[0], g[1], g[2], b[0], b[1], b[2], config->shared, config->stream,
                         config->count);
}

typedef int (*guarded_call_t)(void (*)(void *), void *, uintptr_t *, int, int64_t);
static guarded_call_t guarded_call; /* cudatool_guarded_call of _libcuda.c */

static PyObject *py_guarded_call(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 5 || !guarded_call) {
        PyErr_SetString(PyExc_TypeError, "guarded_call(function, argument, address, interruptible, limit_ns)");
        return NULL;
    }
    void *function = PyLong_AsVoidPtr(args[0]), *argument = PyLong_AsVoidPtr(args[1]), *address = PyLong_AsVoidPtr(args[2]);
    int is_interruptible = PyObject_IsTrue(args[3]), number;
    long long limit_ns = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    number = guarded_call((void (*)(void *))function, argument, address, is_interruptible, limit_ns);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(number);
}

static PyObject *py_set_guard(PyObject *module, PyObject *address) {
    (void)module;
    guarded_call = (guarded_call_t)PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* Call `function` as the first thing that a new thread does. In Python 3.11 a new thread's state has, until it runs, the id
 * of the thread `starter`, and stands first in the list: an exception for that thread lands there (PyThreadState_SetAsyncExc).
 * It would end the new thread before its first line; it goes to whom it was meant for. */
static PyObject *py_begin_thread(PyObject *module, PyObject *args) {
    unsigned long starter;
    PyObject *function;
    (void)module;
    if (!PyArg_ParseTuple(args, "kO", &starter, &function)) return NULL;
    PyThreadState *own = PyThreadState_Get();
    PyObject *exception = own->async_exc;
    own->async_exc = NULL;
    if (exception) {
        PyThreadState_SetAsyncExc(starter, exception);
        Py_DECREF(exception);
    }
    return PyObject_CallNoArgs(function);
}

static PyMethodDef methods[] = {
    {"install", (PyCFunction)(void (*)(void))py_install, METH_VARARGS | METH_KEYWORDS, NULL},
    {"bind", py_bind, METH_VARARGS, NULL},
    {"invoke", py_invoke, METH_VARARGS, NULL},
    {"notify", py_notify, METH_VARARGS, NULL},
    {"launch_config", py_launch_config, METH_O, NULL},
    {"guarded_call", (PyCFunction)(void (*)(void))py_guarded_call, METH_FASTCALL, NULL},
    {"set_guard", py_set_guard, METH_O, NULL},
    {"begin_thread", py_begin_thread, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "cudatool.sim._calls", NULL, -1, methods, NULL, NULL, NULL,
                                        NULL};

PyMODINIT_FUNC PyInit__calls(void) {
    message_key = PyUnicode_InternFromString("cudatool.sim.message");
    empty = PyUnicode_InternFromString("");
    guard_name = PyUnicode_InternFromString("guard");
    subscribers_name = PyUnicode_InternFromString("subscribers");
    handler_name = PyUnicode_InternFromString("handler");
    n_enter = PyUnicode_InternFromString("enter");
    n_leave = PyUnicode_InternFromString("leave");
    if (!message_key || !empty || !guard_name || !subscribers_name || !handler_name || !n_enter || !n_leave ||
        PyType_Ready(&CallType))
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    PyObject *call = PyObject_New(PyObject, &CallType);
    PyObject *target = PyLong_FromVoidPtr((void *)call_slot);
    if (!call || !target || PyModule_AddObjectRef(module, "call", call) || PyModule_AddObjectRef(module, "TARGET", target))
        Py_CLEAR(module);
    Py_XDECREF(call), Py_XDECREF(target);
    return module;
}
