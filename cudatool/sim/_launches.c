/* Launches of kernels like one before: without Python from the driver's entry point to the native code and back.
 *
 *     again:  of a kernel, device, instrumentation, grid, block and shared memory that are within limits, a Shape
 *                 copy the arguments; enqueue an operation that runs this Launch
 *     run:    of a Shape whose plan is known, where nothing is checked, measured or kept
 *                 take a team that is ready for the plan; give it the arguments; let it run
 *
 * cudatool/sim/launches.py does the same, and all that is not so plain: what is found here to be different is left to it,
 * untouched, and whatever fails is said there. tests/sim/test_launches.py compares the two.
 */
#include "_queue.h"
#include "_workers.h"
#include <stddef.h>
#include <structmember.h>

/* What launches.py gave: the namespace of machine.py, with `machine`, and a function of it; a function of its
 * own; the class of kernels; the classes of launches and operations to make; the driver call in progress. */
static PyObject *names, *stream_of, *instrument, *function_type, *launch_type, *operation_type, *call;
static PyObject *teams; /* that are idle, the one that was used last in the end (cudatool/sim/jit/team.py) */

static PyObject *n_machine, *n_measure_accesses, *n_checkers, *n_options, *n_launch_blocking, *n_context, *n_serial,
    *n_objects, *n_fitting, *n_correlation, *n_scheduler, *n_host_memory, *n_runs_plainly, *n_heap, *n_limits, *n_plan,
    *n_calls, *n_run, *n_repeats, *n_ended_early, *n_name, *n_orders_others, *n_param_layout,
    *n_param_bytes, *n_system_calls;

/* ---- what is known of launches ------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *function, *kernel, *grid, *block, *plan; /* plan is None until a plain launch has run */
    PyObject *name, *programmatic, *layout;            /* layout: the offset and the size of each argument, 32 bits each */
    long long shared, cost, threads, param_bytes;
    char needs_calls; /* of printf, malloc ...: something is to be prepared for each launch */
} Shape;

static const size_t objects[] = {
    offsetof(Shape, function), offsetof(Shape, kernel),       offsetof(Shape, grid),   offsetof(Shape, block),
    offsetof(Shape, plan),     offsetof(Shape, programmatic), offsetof(Shape, layout), offsetof(Shape, name),
};
enum { OBJECTS = sizeof objects / sizeof *objects };
#define OBJECT(self, i) (*(PyObject **)((char *)(self) + objects[i]))

static int Shape_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"function", "kernel", "grid", "block", "shared", "cost", "threads", NULL};
    Shape *self = (Shape *)object;
    PyObject *function, *kernel, *grid, *block;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO!O!LLL", keywords, &function, &kernel, &PyTuple_Type, &grid,
                                     &PyTuple_Type, &block, &self->shared, &self->cost, &self->threads))
        return -1;
    Py_XSETREF(self->function, Py_NewRef(function));
    Py_XSETREF(self->kernel, Py_NewRef(kernel));
    Py_XSETREF(self->grid, Py_NewRef(grid));
    Py_XSETREF(self->block, Py_NewRef(block));
    Py_XSETREF(self->plan, Py_NewRef(Py_None));
    Py_XSETREF(self->name, PyObject_GetAttr(function, n_name));
    Py_XSETREF(self->layout, PyObject_GetAttr(kernel, n_param_layout));
    PyObject *others = PyObject_GetAttr(function, n_orders_others);
    Py_XSETREF(self->programmatic, others ? Py_BuildValue("(OOOO)", Py_False, PyTuple_GET_ITEM(others, 0),
                                                          PyTuple_GET_ITEM(others, 1), PyTuple_GET_ITEM(others, 2))
                                          : NULL);
    PyObject *bytes = PyObject_GetAttr(kernel, n_param_bytes), *calls = PyObject_GetAttr(kernel, n_system_calls);
    int needs_calls = calls ? PyObject_IsTrue(calls) : -1;
    self->param_bytes = bytes ? PyLong_AsLongLong(bytes) : -1;
    self->needs_calls = needs_calls > 0;
    Py_XDECREF(others), Py_XDECREF(bytes), Py_XDECREF(calls);
    if (PyErr_Occurred()) return -1;
    if (PyBytes_Check(self->layout) && self->param_bytes >= 0) return 0;
    PyErr_SetString(PyExc_TypeError, "a kernel has the layout of its parameters, and their bytes");
    return -1;
}

static int Shape_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    for (int i = 0; i < OBJECTS; ++i) Py_VISIT(OBJECT(self, i));
    return 0;
}

static int Shape_clear(PyObject *self) {
    for (int i = 0; i < OBJECTS; ++i) Py_CLEAR(OBJECT(self, i));
    return 0;
}

static void Shape_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Shape_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef shape_members[] = {
    {"function", T_OBJECT_EX, offsetof(Shape, function), READONLY, NULL},
    {"kernel", T_OBJECT_EX, offsetof(Shape, kernel), READONLY, NULL},
    {"grid", T_OBJECT_EX, offsetof(Shape, grid), READONLY, NULL},
    {"block", T_OBJECT_EX, offsetof(Shape, block), READONLY, NULL},
    {"shared", T_LONGLONG, offsetof(Shape, shared), READONLY, NULL},
    {"cost", T_LONGLONG, offsetof(Shape, cost), READONLY, NULL},
    {"threads", T_LONGLONG, offsetof(Shape, threads), READONLY, NULL},
    {"plan", T_OBJECT_EX, offsetof(Shape, plan), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot shape_slots[] = {
    {Py_tp_init, Shape_init},       {Py_tp_traverse, Shape_traverse}, {Py_tp_clear, Shape_clear},
    {Py_tp_dealloc, Shape_dealloc}, {Py_tp_members, shape_members},   {Py_tp_new, PyType_GenericNew},
    {0, NULL},
};
static PyType_Spec shape_spec = {"cudatool.sim._queue.Shape", sizeof(Shape), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                 shape_slots};
static PyTypeObject *ShapeType;

/* The key of a shape among those of its kernel. */
static PyObject *key_of(unsigned context, unsigned instrument, const unsigned words[7]) {
    unsigned key[9] = {context, instrument};
    memcpy(key + 2, words, 7 * sizeof *words);
    return PyBytes_FromStringAndSize((const char *)key, sizeof key);
}

static PyObject *py_shape_key(PyObject *module, PyObject *args) {
    unsigned context, instrument, w[7];
    (void)module;
    if (!PyArg_ParseTuple(args, "II(III)(III)I", &context, &instrument, w, w + 1, w + 2, w + 3, w + 4, w + 5, w + 6))
        return NULL;
    return key_of(context, instrument, w);
}

/* ---- launches ------------------------------------------------------------------------------------------------ */

/* Compilers widen loads to aligned 16 bytes: so the arguments lie at a multiple of them, and are filled up to one. */
enum { ALIGNMENT = 16 };

typedef struct {
    PyObject_VAR_HEAD
    Shape *shape;
    char cooperative;
    _Alignas(ALIGNMENT) char arguments[];
} Launch;
static PyTypeObject *LaunchType;

static Launch *new_launch(PyTypeObject *type, Shape *shape) {
    Launch *self = (Launch *)type->tp_alloc(type, (Py_ssize_t)(shape->param_bytes / ALIGNMENT + 1) * ALIGNMENT);
    if (!self) return NULL;
    self->shape = (Shape *)Py_NewRef((PyObject *)shape);
    if (!((uintptr_t)self->arguments % ALIGNMENT)) return self;
    Py_DECREF(self);
    PyErr_SetString(PyExc_SystemError, "Python's memory is not aligned to 16 bytes");
    return NULL;
}

/* Copy the arguments from where `pointers` says. Returns 0 if one is missing. */
static int pack(Launch *self, void *const *pointers) {
    const uint32_t *field = (const uint32_t *)PyBytes_AS_STRING(self->shape->layout);
    Py_ssize_t fields = PyBytes_GET_SIZE(self->shape->layout) / (2 * (Py_ssize_t)sizeof *field);
    for (Py_ssize_t i = 0; i < fields; ++i, field += 2) {
        if (!pointers || !pointers[i] || (long long)field[0] + field[1] > self->shape->param_bytes) return 0;
        memcpy(self->arguments + field[0], pointers[i], field[1]);
    }
    return 1;
}

static PyObject *Launch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *shape, *given;
    int cooperative = 0;
    if ((kwargs && PyDict_GET_SIZE(kwargs)) ||
        !PyArg_ParseTuple(args, "O!O|p:Launch", ShapeType, &shape, &given, &cooperative))
        return NULL;
    Launch *self = new_launch(type, (Shape *)shape);
    if (!self) return NULL;
    self->cooperative = (char)cooperative;
    if (PyBytes_Check(given)) {
        Py_ssize_t size = PyBytes_GET_SIZE(given);
        memcpy(self->arguments, PyBytes_AS_STRING(given), (size_t)(size < Py_SIZE(self) ? size : Py_SIZE(self)));
    } else {
        void *const *pointers = PyLong_AsVoidPtr(given);
        if (!PyErr_Occurred() && !pack(self, pointers)) PyErr_SetString(PyExc_ValueError, "an argument is missing");
    }
    if (PyErr_Occurred()) Py_CLEAR(self);
    return (PyObject *)self;
}

static void Launch_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF((PyObject *)((Launch *)self)->shape);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *launch_address(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromVoidPtr(((Launch *)self)->arguments);
}

static PyObject *launch_arguments(PyObject *self, void *unused) {
    (void)unused;
    return PyBytes_FromStringAndSize(((Launch *)self)->arguments, Py_SIZE(self));
}

static PyObject *of_shape(PyObject *self, void *name) {
    return PyObject_GetAttrString((PyObject *)((Launch *)self)->shape, name);
}

static PyGetSetDef launch_attributes[] = {
    {"address", launch_address, NULL, NULL, NULL},
    {"arguments", launch_arguments, NULL, NULL, NULL},
    {"function", of_shape, NULL, NULL, "function"},
    {"kernel", of_shape, NULL, NULL, "kernel"},
    {"grid", of_shape, NULL, NULL, "grid"},
    {"block", of_shape, NULL, NULL, "block"},
    {"shared", of_shape, NULL, NULL, "shared"},
    {"cost", of_shape, NULL, NULL, "cost"},
    {"threads", of_shape, NULL, NULL, "threads"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef launch_members[] = {
    {"shape", T_OBJECT_EX, offsetof(Launch, shape), READONLY, NULL},
    {"cooperative", T_BOOL, offsetof(Launch, cooperative), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

/* ---- enqueuing ------------------------------------------------------------------------------------------------- */

/* Whether the attribute is this object; -1 with an exception. */
static int attribute_is(PyObject *object, PyObject *name, PyObject *wanted) {
    PyObject *found = PyObject_GetAttr(object, name);
    Py_XDECREF(found);
    return found ? found == wanted : -1;
}

static PyObject *the_machine(void) {
    PyObject *machine = PyDict_GetItemWithError(names, n_machine);
    if (!machine && !PyErr_Occurred()) PyErr_SetString(PyExc_SystemError, "there is no machine");
    return machine;
}

/* Whether launches return before their kernel has run; -1 with an exception. */
static int returns_at_once(PyObject *machine) {
    PyObject *options = PyObject_GetAttr(machine, n_options);
    int is = options ? attribute_is(options, n_launch_blocking, Py_False) : -1;
    Py_XDECREF(options);
    return is;
}

/* Return what kernels are instrumented for now, or -1 with an exception. */
static long instrument_of(PyObject *machine) {
    int is = attribute_is(machine, n_measure_accesses, Py_False);
    if (is > 0) is = attribute_is(machine, n_checkers, Py_None);
    if (is) return is > 0 ? 0 : -1;
    PyObject *kinds = PyObject_CallNoArgs(instrument);
    long found = kinds ? PyLong_AsLong(kinds) : -1;
    Py_XDECREF(kinds);
    return found;
}

/* Return what is known of such launches on the context of a stream, a new reference; NULL if nothing is, or with an
 * exception. */
static Shape *known_shape(PyObject *machine, PyObject *stream, PyObject *handle, const unsigned words[7]) {
    PyObject *table = PyObject_GetAttr(machine, n_objects);
    PyObject *function = table && PyDict_CheckExact(table) ? PyDict_GetItemWithError(table, handle) : NULL;
    PyObject *found = NULL, *context = NULL, *serial = NULL, *fitting = NULL, *key = NULL;
    long kinds;
    if (function && (PyObject *)Py_TYPE(function) == function_type && (context = PyObject_GetAttr(stream, n_context)) &&
        (serial = PyObject_GetAttr(context, n_serial)) &&
        (fitting = PyObject_GetAttr(function, n_fitting)) && PyDict_CheckExact(fitting) &&
        (kinds = instrument_of(machine)) >= 0 &&
        (key = key_of((unsigned)PyLong_AsUnsignedLongMask(serial), (unsigned)kinds, words)))
        found = Py_XNewRef(PyDict_GetItemWithError(fitting, key));
    Py_XDECREF(key), Py_XDECREF(fitting), Py_XDECREF(serial), Py_XDECREF(context), Py_XDECREF(table);
    if (found && !Py_IS_TYPE(found, ShapeType)) Py_CLEAR(found);
    return (Shape *)found;
}

/* Put an operation that runs the launch at the end of the stream. Returns 0, or -1 with an exception. */
static int enqueue(PyObject *machine, PyObject *stream, Launch *launch) {
    static PyObject *kind;
    if (!kind && !(kind = PyUnicode_InternFromString("kernel"))) return -1;
    Shape *shape = launch->shape;
    PyObject *scheduler = PyObject_GetAttr(machine, n_scheduler), *correlation = PyObject_GetAttr(call, n_correlation);
    PyObject *const given[] = {stream, kind, shape->name, correlation};
    PyObject *made = scheduler && correlation ? PyObject_Vectorcall(operation_type, given, 4, NULL) : NULL;
    int failed = -1;
    Operation *operation = made ? cudatool_as_operation(made) : NULL;
    if (operation) {
        Py_SETREF(operation->run, Py_NewRef((PyObject *)launch));
        Py_SETREF(operation->programmatic, Py_NewRef(shape->programmatic));
        int is_watched = ((Queue *)scheduler)->watch != Py_None;
        PyObject *ranges = is_watched ? PyObject_CallMethodNoArgs((PyObject *)launch, n_host_memory) : NULL;
        if (ranges) Py_SETREF(operation->host_memory, ranges);
        if (!PyErr_Occurred()) failed = cudatool_enqueue((Queue *)scheduler, made, shape->cost, NULL, NULL);
    }
    Py_XDECREF(made), Py_XDECREF(correlation), Py_XDECREF(scheduler);
    return failed;
}

/* Make a launch like one before. Returns whether it was one, -1 with an exception. */
static int again(PyObject *function, const unsigned words[7], PyObject *stream_handle, PyObject *pointers) {
    PyObject *machine = the_machine();
    int is_plain = machine ? returns_at_once(machine) : -1;
    if (is_plain <= 0) return is_plain;
    PyObject *stream = PyObject_CallOneArg(stream_of, stream_handle);
    if (!stream) return -1;
    int failed = 0;
    Launch *launch = NULL;
    Shape *shape = known_shape(machine, stream, function, words);
    void *const *from = PyLong_AsVoidPtr(pointers);
    if (shape && !shape->needs_calls && !PyErr_Occurred()) launch = new_launch((PyTypeObject *)launch_type, shape);
    if (launch && !pack(launch, from)) Py_CLEAR(launch); /* launches.py knows the error */
    if (launch) failed = enqueue(machine, stream, launch);
    int done = launch != NULL;
    Py_XDECREF((PyObject *)launch), Py_XDECREF((PyObject *)shape), Py_DECREF(stream);
    return failed || PyErr_Occurred() ? -1 : done;
}

static PyObject *py_again(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    unsigned words[7];
    (void)module;
    if (count != 10) {
        PyErr_SetString(PyExc_TypeError, "again(function, grid and block in 6 numbers, shared, stream, pointers)");
        return NULL;
    }
    for (int i = 0; i < 7; ++i) words[i] = (unsigned)PyLong_AsUnsignedLongMask(args[1 + i]);
    int done = PyErr_Occurred() ? -1 : again(args[0], words, args[8], args[9]);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

static PyObject *py_again_as(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    struct {
        unsigned words[7]; /* grid, block, shared memory */
        unsigned long long stream;
        void *attributes;
        unsigned count;
    } const *config = count == 3 ? PyLong_AsVoidPtr(args[0]) : NULL;
    (void)module;
    if (!config) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "again_as(config, function, pointers)");
        return NULL;
    }
    if (config->count) Py_RETURN_FALSE;
    PyObject *stream = PyLong_FromUnsignedLongLong(config->stream);
    int done = stream ? again(args[1], config->words, stream, args[2]) : -1;
    Py_XDECREF(stream);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

/* ---- running --------------------------------------------------------------------------------------------------- */

/* What host_library.py gave: functions of libcuda.so.1, and of signals.py. */
static int (*guarded_calls)(struct cudatool_calls *, int);
static void (*hold_interrupts)(void), (*release_interrupts)(void);
static PyObject *interrupts;

/* Whether Ctrl-C ends launches on this thread: it is asked once for those that follow each other. */
static __thread enum { NOT_ASKED, HELD, NOT_INTERRUPTIBLE } interruptible;

int cudatool_is_launch(PyObject *run) { return PyObject_TypeCheck(run, LaunchType); }

int cudatool_before_launch(void) {
    if (interruptible != NOT_ASKED) return 0;
    PyObject *answer = interrupts ? PyObject_CallNoArgs(interrupts) : NULL;
    if (!answer) return PyErr_Occurred() ? -1 : 0;
    Py_DECREF(answer);
    interruptible = answer == Py_True ? HELD : NOT_INTERRUPTIBLE;
    if (interruptible == HELD) hold_interrupts();
    return 0;
}

void cudatool_after_launches(void) {
    if (interruptible == HELD) release_interrupts();
    interruptible = NOT_ASKED;
}

/* Let a team run with these arguments, from a block on. Returns whether it ended early, -1 with an exception. */
static int run_team(PyObject *team, void *arguments, uint64_t first) {
    PyObject *address = PyObject_GetAttr(team, n_calls), *answer = NULL;
    struct cudatool_calls *calls = address ? PyLong_AsVoidPtr(address) : NULL;
    Py_XDECREF(address);
    if (calls && interruptible == NOT_ASKED) answer = PyObject_CallNoArgs(interrupts);
    if (!calls || PyErr_Occurred()) return -1;
    int is_interruptible = answer == Py_True, ended_early;
    Py_XDECREF(answer);
    for (uint32_t n = 0; n < calls->count; ++n) *(void **)(calls->arguments[n] + calls->params) = arguments;
    *calls->next_block = first;
    Py_BEGIN_ALLOW_THREADS
    ended_early = guarded_calls(calls, is_interruptible);
    Py_END_ALLOW_THREADS
    return ended_early;
}

static PyObject *py_run_team(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 3 || !guarded_calls) {
        PyErr_SetString(PyExc_TypeError, "run_team(team, arguments, first)");
        return NULL;
    }
    void *arguments = PyLong_AsVoidPtr(args[1]);
    uint64_t first = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[2]);
    int ended_early = PyErr_Occurred() ? -1 : run_team(args[0], arguments, first);
    return ended_early < 0 ? NULL : PyBool_FromLong(ended_early);
}

/* Return an idle team that is ready for the plan, the one that was used last, which nothing else takes then: a new
 * reference; NULL if there is none, or with an exception. */
static PyObject *take_team(PyObject *plan) {
    for (Py_ssize_t i = PyList_GET_SIZE(teams); i-- > 0;) {
        PyObject *team = Py_NewRef(PyList_GET_ITEM(teams, i));
        int is_ready = attribute_is(team, n_plan, plan);
        if (is_ready > 0 && !PyList_SetSlice(teams, i, i + 1, NULL)) return team;
        Py_DECREF(team);
        if (PyErr_Occurred()) return NULL;
    }
    return NULL;
}

static PyObject *py_take_team(PyObject *module, PyObject *plan) {
    (void)module;
    PyObject *team = take_team(plan);
    return team || PyErr_Occurred() ? team : Py_NewRef(Py_None);
}

/* Whether kernels in a context have no heap, and the limits that a context begins with; -1 with an exception. */
static int has_default_limits(PyObject *context) {
    int is = attribute_is(context, n_heap, Py_None);
    PyObject *limits = is > 0 ? PyObject_GetAttr(context, n_limits) : NULL;
    if (limits) is = PyDict_CheckExact(limits) && !PyDict_GET_SIZE(limits);
    else if (is > 0) is = -1;
    Py_XDECREF(limits);
    return is;
}

/* Run the launch if it is a plain one. Returns whether it was, -1 with an exception. */
static int run_plainly(Launch *self, PyObject *given) {
    if (self->cooperative || self->shape->plan == Py_None) return 0;
    PyObject *machine = the_machine();
    int is_plain = machine ? attribute_is(machine, n_runs_plainly, Py_True) : -1;
    if (is_plain <= 0) return is_plain;
    Operation *operation = cudatool_as_operation(given);
    PyObject *context = operation ? PyObject_GetAttr(operation->stream, n_context) : NULL;
    is_plain = context ? has_default_limits(context) : -1;
    Py_XDECREF(context);
    if (is_plain <= 0) return is_plain;
    PyObject *team = take_team(self->shape->plan);
    if (!team) return PyErr_Occurred() ? -1 : 0;
    PyObject *repeats = PyObject_CallMethodNoArgs((PyObject *)self, n_repeats);
    Py_XDECREF(repeats);
    int ended_early = repeats == Py_True ? run_team(team, self->arguments, 0) : repeats ? 0 : -1;
    int failed = ended_early < 0;
    if (!ended_early) failed = PyList_Append(teams, team);
    if (ended_early > 0) { /* launches.py knows what that means */
        PyObject *done = PyObject_CallMethodOneArg((PyObject *)self, n_ended_early, team);
        failed = !done;
        Py_XDECREF(done);
    }
    Py_DECREF(team);
    return failed ? -1 : repeats == Py_True;
}

static PyObject *Launch_call(PyObject *self, PyObject *args, PyObject *kwargs) {
    PyObject *operation;
    if ((kwargs && PyDict_GET_SIZE(kwargs)) || !PyArg_ParseTuple(args, "O:Launch", &operation)) return NULL;
    int done = run_plainly((Launch *)self, operation);
    if (done < 0) return NULL;
    if (done) Py_RETURN_NONE;
    return PyObject_CallMethodOneArg(self, n_run, operation);
}

static PyType_Slot launch_slots[] = {
    {Py_tp_new, Launch_new},           {Py_tp_dealloc, Launch_dealloc}, {Py_tp_call, Launch_call},
    {Py_tp_getset, launch_attributes}, {Py_tp_members, launch_members}, {0, NULL},
};
static PyType_Spec launch_spec = {"cudatool.sim._queue.Launch", offsetof(Launch, arguments), 1,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, launch_slots};

/* ---- the module ------------------------------------------------------------------------------------------------ */

static PyObject *py_install_launches(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"names", "stream_of", "instrument", "function", "launch", "operation", "call", NULL};
    PyObject **kept[] = {&names, &stream_of, &instrument, &function_type, &launch_type, &operation_type, &call};
    PyObject *given[7];
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOO!OO", keywords, &PyDict_Type, &given[0], &given[1], &given[2],
                                     &given[3], &PyType_Type, &given[4], &given[5], &given[6]))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)given[4], LaunchType) ||
        ((PyTypeObject *)given[4])->tp_basicsize != LaunchType->tp_basicsize) {
        PyErr_SetString(PyExc_TypeError, "the class of launches has attributes of its own, or is none");
        return NULL;
    }
    for (int i = 0; i < 7; ++i) Py_XSETREF(*kept[i], Py_NewRef(given[i]));
    Py_RETURN_NONE;
}

static PyObject *py_set_native(PyObject *module, PyObject *args) {
    PyObject *run, *hold, *release, *function;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOO", &run, &hold, &release, &function)) return NULL;
    guarded_calls = (int (*)(struct cudatool_calls *, int))PyLong_AsVoidPtr(run);
    hold_interrupts = (void (*)(void))PyLong_AsVoidPtr(hold);
    release_interrupts = (void (*)(void))PyLong_AsVoidPtr(release);
    Py_XSETREF(interrupts, Py_NewRef(function));
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"again", (PyCFunction)(void (*)(void))py_again, METH_FASTCALL, NULL},
    {"again_as", (PyCFunction)(void (*)(void))py_again_as, METH_FASTCALL, NULL},
    {"run_team", (PyCFunction)(void (*)(void))py_run_team, METH_FASTCALL, NULL},
    {"take_team", py_take_team, METH_O, NULL},
    {"shape_key", py_shape_key, METH_VARARGS, NULL},
    {"install_launches", (PyCFunction)(void (*)(void))py_install_launches, METH_VARARGS | METH_KEYWORDS, NULL},
    {"set_native", py_set_native, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int make_names(void) {
    static const struct {
        PyObject **where;
        const char *text;
    } texts[] = {
        {&n_machine, "machine"},           {&n_measure_accesses, "measure_accesses"},
        {&n_checkers, "checkers"},         {&n_options, "options"},
        {&n_context, "context"},           {&n_launch_blocking, "launch_blocking"},
        {&n_serial, "serial"},
        {&n_objects, "objects"},           {&n_fitting, "fitting"},
        {&n_scheduler, "scheduler"},       {&n_correlation, "correlation"},
        {&n_host_memory, "host_memory"},   {&n_runs_plainly, "runs_plainly"},
        {&n_heap, "heap"},                 {&n_limits, "limits"},
        {&n_plan, "plan"},                 {&n_calls, "calls"},
        {&n_repeats, "repeats"},           {&n_run, "run"},                   {&n_ended_early, "ended_early"},
        {&n_name, "name"},
        {&n_param_layout, "param_layout"}, {&n_orders_others, "orders_others"},
        {&n_param_bytes, "param_bytes"},   {&n_system_calls, "system_calls"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; ++i)
        if (!(*texts[i].where = PyUnicode_InternFromString(texts[i].text))) return -1;
    return 0;
}

int cudatool_add_launches(PyObject *module) {
    if (make_names()) return -1;
    ShapeType = (PyTypeObject *)PyType_FromSpec(&shape_spec);
    LaunchType = (PyTypeObject *)PyType_FromSpec(&launch_spec);
    teams = PyList_New(0);
    if (!ShapeType || !LaunchType || !teams) return -1;
    if (PyModule_AddObjectRef(module, "teams", teams)) return -1;
    if (PyModule_AddObjectRef(module, "Shape", (PyObject *)ShapeType)) return -1;
    if (PyModule_AddObjectRef(module, "Launch", (PyObject *)LaunchType)) return -1;
    return PyModule_AddFunctions(module, methods);
}
