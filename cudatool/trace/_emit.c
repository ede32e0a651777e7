/* How an event goes to its subscribers while none of them fails (cudatool/trace/hooks.py).
 *
 *     make the event; put it after those that wait (there are some where a finalizer emits in the middle of this)
 *     call each subscriber with the first that waits, until none does
 *
 * As soon as anything raises, functions of hooks.py take over from where this was, and what was raised with it: a
 * subscriber's mistake is its end, and a signal handler's exception waits for the others. Signal handlers run only
 * inside of what is called from here and is Python, never between two steps of this.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <structmember.h>
#include <time.h>

/* ---- what hooks.py knows about one thread -------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    long long id, depth, correlation, host_function, node;
    PyObject *pending;
    char emitting, named, began, lost;
} Thread;

static PyObject *Thread_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args, (void)kwargs;
    Thread *self = (Thread *)type->tp_alloc(type, 0);
    if (self && !(self->pending = PyList_New(0))) Py_CLEAR(self);
    return (PyObject *)self;
}

static int Thread_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Thread *)self)->pending);
    return 0;
}

static int Thread_clear(PyObject *self) {
    Py_CLEAR(((Thread *)self)->pending);
    return 0;
}

static void Thread_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Thread_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

#define NUMBER(name) {#name, T_LONGLONG, offsetof(Thread, name), 0, NULL}
static PyMemberDef thread_members[] = {
    NUMBER(id), NUMBER(depth), NUMBER(correlation), NUMBER(host_function), NUMBER(node),
    {"pending", T_OBJECT_EX, offsetof(Thread, pending), READONLY, NULL},
    {"emitting", T_BOOL, offsetof(Thread, emitting), 0, NULL},
    {"named", T_BOOL, offsetof(Thread, named), 0, NULL},
    {"began", T_BOOL, offsetof(Thread, began), 0, NULL},
    {"lost", T_BOOL, offsetof(Thread, lost), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot thread_slots[] = {
    {Py_tp_new, Thread_new},         {Py_tp_traverse, Thread_traverse}, {Py_tp_clear, Thread_clear},
    {Py_tp_dealloc, Thread_dealloc}, {Py_tp_members, thread_members},   {0, NULL},
};
static PyType_Spec thread_spec = {"cudatool.trace._emit.Thread", sizeof(Thread), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, thread_slots};
static PyTypeObject *ThreadType;

/* ---- emitting ------------------------------------------------------------------------------------------------ */

/* What hooks.py gave: its module's namespace, where `_subscribers` stands; what has the thread; the type of events; how
 * to capture a stack; the functions for what is rare. */
static PyObject *names, *local, *event_type, *capture, *emit_with_care, *deliver_with_care;
static PyObject *n_subscribers, *n_thread, *zero, *none_given, *no_name;

enum { KINDS = 256 };
static char has_stack[KINDS], is_of_host_function[KINDS];

/* The fields of an event as emit_with_care takes them, and what its keywords are called. */
enum { KIND, DEVICE, FLAGS, STREAM, CORRELATION, STACK, NAME, ADDRESS, SIZE, AUX0, AUX1, GIVEN };
static const char *const texts[GIVEN] = {"kind", "device", "flags",   "stream", "correlation", "stack",
                                         "name", "address", "size", "aux0",   "aux1"};
static PyObject *keywords[GIVEN];

enum { ATTEMPTS = 10 }; /* to have hooks.py go on: a signal handler does not raise each time that it begins to */

static Thread *running_thread(void) {
    PyObject *found = PyObject_GetAttr(local, n_thread);
    if (found && !PyObject_TypeCheck(found, ThreadType)) {
        PyErr_Format(PyExc_TypeError, "not the state of a thread: %.100s", Py_TYPE(found)->tp_name);
        Py_CLEAR(found);
    }
    return (Thread *)found;
}

/* Read the arguments into `given`, references that the caller holds. Returns 0, or -1 with an exception. */
static int read_arguments(PyObject *const *args, Py_ssize_t count, PyObject *named, PyObject **given) {
    if (count > 1) {
        PyErr_SetString(PyExc_TypeError, "emit() takes one positional argument, the kind");
        return -1;
    }
    if (count) given[KIND] = args[0];
    for (Py_ssize_t i = 0; named && i < PyTuple_GET_SIZE(named); ++i) {
        PyObject *keyword = PyTuple_GET_ITEM(named, i);
        int field = 0;
        while (field < GIVEN && keywords[field] != keyword) ++field;
        if (field == GIVEN) /* not interned */
            for (field = 0; field < GIVEN && PyUnicode_Compare(keywords[field], keyword); ++field) {}
        if (PyErr_Occurred()) return -1;
        if (field == GIVEN || (field == KIND && count)) {
            PyErr_Format(PyExc_TypeError, "emit() got an unexpected keyword argument '%U'", keyword);
            return -1;
        }
        given[field] = args[count + i];
    }
    if (given[KIND]) return 0;
    PyErr_SetString(PyExc_TypeError, "emit() needs the kind of the event");
    return -1;
}

/* Return an event with these fields, whose references it takes; NULL with an exception. */
static PyObject *event_of(PyObject *const fields[GIVEN + 2]) {
    PyTypeObject *type = (PyTypeObject *)event_type;
#if PY_VERSION_HEX >= 0x030E0000 /* tuples keep their hash, which only this knows */
    PyObject *items = PyTuple_New(GIVEN + 2), *args = items ? PyTuple_Pack(1, items) : NULL, *event = NULL;
    for (int i = 0; i < GIVEN + 2; ++i) {
        if (items) PyTuple_SET_ITEM(items, i, fields[i]);
        else Py_DECREF(fields[i]);
    }
    if (args) event = PyTuple_Type.tp_new(type, args, NULL);
    Py_XDECREF(items), Py_XDECREF(args);
#else
    PyObject *event = type->tp_alloc(type, GIVEN + 2);
    for (int i = 0; i < GIVEN + 2; ++i) {
        if (event) PyTuple_SET_ITEM(event, i, fields[i]);
        else Py_DECREF(fields[i]);
    }
#endif
    return event;
}

/* Return the event, or NULL with an exception. */
static PyObject *make_event(const Thread *thread, long kind, PyObject *const *given) {
    struct timespec now;
    int is_inside = thread->host_function && is_of_host_function[kind];
    PyObject *correlation = is_inside ? PyLong_FromLongLong(thread->host_function) : Py_NewRef(given[CORRELATION]);
    PyObject *stream = is_inside && thread->node ? PyLong_FromLongLong(thread->node) : Py_NewRef(given[STREAM]);
    PyObject *stack = given[STACK] != Py_None ? Py_NewRef(given[STACK])
                      : has_stack[kind]       ? PyObject_CallNoArgs(capture)
                                              : Py_NewRef(zero);
    /* Not earlier: a finalizer that runs while the stack is captured emits events that come before this one. */
    clock_gettime(CLOCK_MONOTONIC, &now);
    PyObject *time = PyLong_FromLongLong(now.tv_sec * 1000000000LL + now.tv_nsec);
    PyObject *number = PyLong_FromLongLong(thread->id);
    if (!correlation || !stream || !stack || !time || !number) {
        Py_XDECREF(correlation), Py_XDECREF(stream), Py_XDECREF(stack), Py_XDECREF(time), Py_XDECREF(number);
        return NULL;
    }
    PyObject *const fields[GIVEN + 2] = {
        time, Py_NewRef(given[KIND]), Py_NewRef(given[DEVICE]), Py_NewRef(given[FLAGS]), number,
        stream, correlation, stack, Py_NewRef(given[NAME]), Py_NewRef(given[ADDRESS]),
        Py_NewRef(given[SIZE]), Py_NewRef(given[AUX0]), Py_NewRef(given[AUX1]),
    };
    return event_of(fields);
}

/* Return the exception that is set, which is not set any more. */
static PyObject *take_exception(void) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (value && traceback) PyException_SetTraceback(value, traceback);
    Py_XDECREF(type), Py_XDECREF(traceback);
    return value ? value : Py_NewRef(Py_None);
}

/* Give the event to each subscriber. `interruption` becomes what a signal handler raised during it, if one did. Returns
 * 0, or -1 with an exception. */
static int deliver(PyObject *event, PyObject **interruption) {
    PyObject *subscribers = PyDict_GetItemWithError(names, n_subscribers);
    if (!subscribers || !PyTuple_Check(subscribers)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_SystemError, "the hooks are gone");
        return -1;
    }
    Py_INCREF(subscribers); /* the subscribers may change during the calls */
    int failed = 0;
    Py_ssize_t count = PyTuple_GET_SIZE(subscribers);
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *done = PyObject_CallOneArg(PyTuple_GET_ITEM(subscribers, i), event);
        if (!done) {
            PyObject *error = take_exception(), *rest = PyTuple_GetSlice(subscribers, i, count);
            PyObject *raised = rest ? PyObject_CallFunctionObjArgs(deliver_with_care, event, rest, error, NULL) : NULL;
            Py_XDECREF(rest), Py_DECREF(error);
            failed = raised ? 0 : -1;
            if (raised && raised != Py_None) Py_XSETREF(*interruption, Py_NewRef(raised));
            Py_XDECREF(raised);
            break;
        }
        Py_DECREF(done);
    }
    Py_DECREF(subscribers);
    return failed;
}

static int deliver_pending(Thread *thread, PyObject **interruption) {
    while (PyList_GET_SIZE(thread->pending)) {
        PyObject *first = Py_NewRef(PyList_GET_ITEM(thread->pending, 0));
        int failed = deliver(first, interruption) || PyList_SetSlice(thread->pending, 0, 1, NULL);
        Py_DECREF(first);
        if (failed) return -1;
    }
    return 0;
}

/* Let hooks.py emit the event, which is NULL if there is none yet, from where `error` was raised, which is NULL if nothing
 * was. */
static PyObject *emit_carefully(PyObject *const *given, PyObject *event, PyObject *error) {
    PyObject *arguments[GIVEN + 2];
    for (int i = 0; i < GIVEN; ++i) arguments[i] = given[i];
    arguments[GIVEN] = event ? event : Py_None;
    arguments[GIVEN + 1] = error ? error : Py_None;
    return PyObject_Vectorcall(emit_with_care, arguments, GIVEN + 2, NULL);
}

static PyObject *emit(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *named) {
    PyObject *given[GIVEN] = {NULL,    none_given, zero, zero, zero, Py_None,
                              no_name, zero,       zero, zero, zero};
    (void)module;
    if (read_arguments(args, count, named, given)) return NULL;
    Thread *thread = running_thread();
    if (!thread) return NULL;
    long kind = PyLong_Check(given[KIND]) ? PyLong_AsLong(given[KIND]) : -1;
    if (kind < 0 || kind >= KINDS || thread->emitting || !thread->named || thread->lost) {
        if (PyErr_Occurred()) PyErr_Clear();
        thread->began = 0;
        PyObject *done = emit_carefully(given, NULL, NULL);
        if (!done && !thread->began) thread->lost = 1;
        Py_DECREF(thread);
        return done;
    }
    thread->emitting = 1;
    PyObject *interruption = NULL, *result = NULL;
    PyObject *event = make_event(thread, kind, given);
    if (event && !PyList_Append(thread->pending, event) && !deliver_pending(thread, &interruption)) {
        thread->emitting = 0;
        result = Py_NewRef(Py_None);
    }
    /* hooks.py clears `emitting` in the end, unless a signal handler raised before it began. */
    for (int attempt = 0; !result && thread->emitting && attempt < ATTEMPTS; ++attempt) {
        PyObject *error = take_exception();
        result = emit_carefully(given, event, error);
        Py_DECREF(error);
    }
    if (!result && !event && thread->emitting) thread->lost = 1;
    thread->emitting = 0;
    if (result && interruption) {
        Py_CLEAR(result);
        PyErr_SetObject((PyObject *)Py_TYPE(interruption), interruption);
    }
    Py_XDECREF(event), Py_XDECREF(interruption), Py_DECREF(thread);
    return result;
}

static PyObject *current_operation(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    Thread *thread = running_thread();
    PyObject *found = thread ? PyLong_FromLongLong(thread->correlation) : NULL;
    Py_XDECREF(thread);
    return found;
}

/* ---- the module ---------------------------------------------------------------------------------------------- */

/* Mark the kinds of events that are in `given`. Returns 0, or -1 with an exception. */
static int mark(PyObject *given, char *kinds) {
    PyObject *each = PyObject_GetIter(given), *kind;
    while (each && (kind = PyIter_Next(each))) {
        long number = PyLong_AsLong(kind);
        Py_DECREF(kind);
        if (number >= 0 && number < KINDS) kinds[number] = 1;
        else if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no such kind of event");
        if (PyErr_Occurred()) break;
    }
    Py_XDECREF(each);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *install(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *words[] = {"names",          "local",             "event_type",  "capture",
                            "emit_with_care", "deliver_with_care", "with_stacks", "of_host_functions", NULL};
    PyObject **kept[] = {&names, &local, &event_type, &capture, &emit_with_care, &deliver_with_care};
    PyObject *given[6], *with_stacks, *of_host_functions;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO!OOOOO", words, &PyDict_Type, &given[0], &given[1], &PyType_Type,
                                     &given[2], &given[3], &given[4], &given[5], &with_stacks, &of_host_functions))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)given[2], &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "an event is a tuple");
        return NULL;
    }
    if (mark(with_stacks, has_stack) || mark(of_host_functions, is_of_host_function)) return NULL;
    for (int i = 0; i < 6; ++i) Py_XSETREF(*kept[i], Py_NewRef(given[i]));
    Py_RETURN_NONE;
}

PyDoc_STRVAR(emit_doc, "emit(kind, *, device=-1, stream=0, correlation=0, name='', address=0, size=0, flags=0, aux0=0, \
aux1=0, stack=None)\n--\n\n\
Send one event to every subscriber. Call it only if :data:`active`.\n\
\n\
Parameters\n\
----------\n\
kind, device, stream, correlation, name, address, size, flags, aux0, aux1\n\
    See :data:`cudatool.trace.events.FIELDS` for what each means for `kind`.\n\
stack\n\
    A stack captured earlier; default: the Python stack of the caller, without cudatool's own frames, where\n\
    the kind has one.");

PyDoc_STRVAR(current_operation_doc, "current_operation()\n--\n\n\
Return the correlation id of the runtime operation open on this thread, 0 if none.");

static PyMethodDef methods[] = {
    {"emit", (PyCFunction)(void (*)(void))emit, METH_FASTCALL | METH_KEYWORDS, emit_doc},
    {"current_operation", current_operation, METH_NOARGS, current_operation_doc},
    {"install", (PyCFunction)(void (*)(void))install, METH_VARARGS | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "cudatool.trace._emit", NULL, -1, methods, NULL, NULL,
                                        NULL, NULL};

static int make_constants(void) {
    for (int i = 0; i < GIVEN; ++i)
        if (!(keywords[i] = PyUnicode_InternFromString(texts[i]))) return -1;
    n_subscribers = PyUnicode_InternFromString("_subscribers");
    n_thread = PyUnicode_InternFromString("thread");
    zero = PyLong_FromLong(0);
    none_given = PyLong_FromLong(-1);
    no_name = PyUnicode_InternFromString("");
    return n_subscribers && n_thread && zero && none_given && no_name ? 0 : -1;
}

PyMODINIT_FUNC PyInit__emit(void) {
    if (make_constants()) return NULL;
    PyObject *module = PyModule_Create(&definition);
    ThreadType = (PyTypeObject *)PyType_FromSpec(&thread_spec);
    if (!module || !ThreadType || PyModule_AddObjectRef(module, "Thread", (PyObject *)ThreadType)) Py_CLEAR(module);
    return module;
}
