/* What happens to every operation: it is enqueued, it becomes ready, it runs (cudatool/sim/queue.py).
 *
 * Queue is the part of Scheduler that each operation passes through, in C because a program may enqueue a million of
 * them; which one runs next, but for the plainest case, and everything that waits, is Python. All of it is called with
 * the driver's lock held, and with Python's.
 */
#include "_queue.h"
#include <stddef.h>
#include <structmember.h>

/* Interned names of attributes, and values of them that are the same for all. */
static PyObject *n_context, *n_legacy_stream, *n_last, *n_flags, *n_error, *n_device, *n_ordinal, *n_subscribers;
static PyObject *n_waiters, *n_is_interrupted, *n_enqueued, *n_executed, *n_before, *n_after, *n_run_soon;
static PyObject *no_value, *no_source, *not_programmatic, *nothing, *zero;

/* ---- operations ---------------------------------------------------------------------------------------------- */

static const size_t objects[] = {
    offsetof(Operation, stream),      offsetof(Operation, kind),        offsetof(Operation, name),
    offsetof(Operation, correlation), offsetof(Operation, predecessors), offsetof(Operation, dependents),
    offsetof(Operation, run),         offsetof(Operation, until),       offsetof(Operation, value),
    offsetof(Operation, footprint),   offsetof(Operation, findings),    offsetof(Operation, programmatic),
    offsetof(Operation, host_source), offsetof(Operation, host_target), offsetof(Operation, host_memory),
    offsetof(Operation, launch),      offsetof(Operation, node),
};
enum { OBJECTS = sizeof objects / sizeof *objects };
#define OBJECT(self, i) (*(PyObject **)((char *)(self) + objects[i]))

static int Operation_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"stream", "kind", "name", "correlation", NULL};
    Operation *self = (Operation *)object;
    PyObject *stream, *kind, *name, *correlation;
    if (!kwargs && PyTuple_GET_SIZE(args) == 4) {
        stream = PyTuple_GET_ITEM(args, 0), kind = PyTuple_GET_ITEM(args, 1);
        name = PyTuple_GET_ITEM(args, 2), correlation = PyTuple_GET_ITEM(args, 3);
    } else if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO", keywords, &stream, &kind, &name, &correlation)) {
        return -1;
    }
    PyObject *given[OBJECTS] = {stream,   kind,    name,    correlation,      nothing,   nothing, Py_None, Py_None, no_value,
                                nothing, nothing, not_programmatic, no_source, nothing, nothing, Py_None, zero};
    for (int i = 0; i < OBJECTS; ++i) Py_XSETREF(OBJECT(self, i), Py_NewRef(given[i]));
    return 0;
}

static int Operation_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    for (int i = 0; i < OBJECTS; ++i) Py_VISIT(OBJECT(self, i));
    return 0;
}

static int Operation_clear(PyObject *self) {
    for (int i = 0; i < OBJECTS; ++i) Py_CLEAR(OBJECT(self, i));
    return 0;
}

static void Operation_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    Py_TRASHCAN_BEGIN(self, Operation_dealloc) /* operations of one stream are a chain */
    PyTypeObject *type = Py_TYPE(self);
    Operation_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
    Py_TRASHCAN_END
}

#define OF_OPERATION(name, type) {#name, type, offsetof(Operation, name), 0, NULL}
#define KEPT_BY_QUEUE(name) {#name, T_OBJECT_EX, offsetof(Operation, name), READONLY, NULL}
static PyMemberDef operation_members[] = {
    OF_OPERATION(stream, T_OBJECT_EX),      OF_OPERATION(kind, T_OBJECT_EX),        OF_OPERATION(name, T_OBJECT_EX),
    OF_OPERATION(correlation, T_OBJECT_EX), KEPT_BY_QUEUE(predecessors),            KEPT_BY_QUEUE(dependents),
    OF_OPERATION(run, T_OBJECT_EX),         OF_OPERATION(until, T_OBJECT_EX),       OF_OPERATION(value, T_OBJECT_EX),
    OF_OPERATION(footprint, T_OBJECT_EX),   OF_OPERATION(findings, T_OBJECT_EX),    OF_OPERATION(programmatic, T_OBJECT_EX),
    OF_OPERATION(host_source, T_OBJECT_EX), OF_OPERATION(host_target, T_OBJECT_EX), OF_OPERATION(host_memory, T_OBJECT_EX),
    OF_OPERATION(launch, T_OBJECT_EX),      OF_OPERATION(node, T_OBJECT_EX),        OF_OPERATION(missing, T_LONGLONG),
    OF_OPERATION(sequence, T_LONGLONG),     OF_OPERATION(start, T_LONGLONG),        OF_OPERATION(end, T_LONGLONG),
    OF_OPERATION(done, T_BOOL),             {NULL, 0, 0, 0, NULL},
};

static PyType_Slot operation_slots[] = {
    {Py_tp_init, Operation_init},       {Py_tp_traverse, Operation_traverse}, {Py_tp_clear, Operation_clear},
    {Py_tp_dealloc, Operation_dealloc}, {Py_tp_members, operation_members},   {Py_tp_new, PyType_GenericNew},
    {0, NULL},
};
static PyType_Spec operation_spec = {"cudatool.sim._queue.Operation", sizeof(Operation), 0,
                                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, operation_slots};
static PyTypeObject *OperationType;

Operation *cudatool_as_operation(PyObject *object) {
    if (PyObject_TypeCheck(object, OperationType)) return (Operation *)object;
    PyErr_Format(PyExc_TypeError, "an Operation is needed, not %.100s", Py_TYPE(object)->tp_name);
    return NULL;
}

/* ---- the queue ----------------------------------------------------------------------------------------------- */

/* What queue.py gave: of abi.py, its namespace and its lock with the lock's methods; of signals.py, what knows of Ctrl-C. */
static PyObject *names, *lock, *acquire, *release, *interruption;

static const size_t tables[] = {offsetof(Queue, pending), offsetof(Queue, ready), offsetof(Queue, until),
                                offsetof(Queue, engines)};
enum { TABLES = sizeof tables / sizeof *tables };

static int Queue_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    Queue *self = (Queue *)object;
    if (!PyArg_ParseTuple(args, "") || (kwargs && PyDict_GET_SIZE(kwargs))) return -1;
    for (int i = 0; i < TABLES; ++i) {
        PyObject *table = PyDict_New();
        if (!table) return -1;
        Py_XSETREF(*(PyObject **)((char *)self + tables[i]), table);
    }
    Py_XSETREF(self->watch, Py_NewRef(Py_None));
    Py_XSETREF(self->turn, Py_NewRef(Py_None));
    return 0;
}

static int Queue_traverse(PyObject *object, visitproc visit, void *arg) {
    Queue *self = (Queue *)object;
    Py_VISIT(Py_TYPE(object));
    for (int i = 0; i < TABLES; ++i) Py_VISIT(*(PyObject **)((char *)self + tables[i]));
    Py_VISIT(self->watch);
    Py_VISIT(self->turn);
    return 0;
}

static int Queue_clear(PyObject *object) {
    Queue *self = (Queue *)object;
    for (int i = 0; i < TABLES; ++i) Py_CLEAR(*(PyObject **)((char *)self + tables[i]));
    Py_CLEAR(self->watch);
    Py_CLEAR(self->turn);
    return 0;
}

static void Queue_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Queue_clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

/* Virtual time and costs are ns in 64 bits: what would be later than in 146 years is then. */
static const long long LATEST = 1LL << 62;

static long long later(long long time, long long by) { return by > LATEST - time ? LATEST : time + by; }

static long long ns_of(PyObject *number) {
    int beyond;
    long long value = PyLong_AsLongLongAndOverflow(number, &beyond);
    return beyond || value > LATEST ? LATEST : value;
}

/* Add to one of an operation's lists. Lists are made when there is something in them: most of an operation's stay empty,
 * and six objects more of each are what the search for garbage would take most of its time with. */
static int append(PyObject **list, PyObject *one) {
    if (*list != nothing) return PyList_Append(*list, one);
    PyObject *first = PyList_New(1);
    if (!first) return -1;
    PyList_SET_ITEM(first, 0, Py_NewRef(one));
    Py_SETREF(*list, first);
    return 0;
}

/* Let a pending operation, which does not run yet, wait for another one too; None is no operation. */
static int order_after(Operation *operation, PyObject *other, long long *start) {
    if (other == Py_None) return 0;
    Operation *before = cudatool_as_operation(other);
    if (!before) return -1;
    if (start && before->end > *start) *start = before->end;
    if (before->done) return 0;
    if (append(&operation->predecessors, other) || append(&before->dependents, (PyObject *)operation)) return -1;
    ++operation->missing;
    return 0;
}

static int order_after_all(Operation *operation, PyObject *others, long long *start) {
    if (PyTuple_Check(others) && !PyTuple_GET_SIZE(others)) return 0;
    PyObject *each = PyObject_GetIter(others), *other;
    if (!each) return -1;
    int failed = 0;
    while (!failed && (other = PyIter_Next(each))) {
        failed = order_after(operation, other, start);
        Py_DECREF(other);
    }
    Py_DECREF(each);
    return failed || PyErr_Occurred() ? -1 : 0;
}

/* Begin after the last one on the same engine of the device, and note when this one ends. */
static int take_engine(Queue *self, Operation *operation, PyObject *engine, long long *start, long long cost) {
    PyObject *context = PyObject_GetAttr(operation->stream, n_context);
    PyObject *device = context ? PyObject_GetAttr(context, n_device) : NULL;
    PyObject *ordinal = device ? PyObject_GetAttr(device, n_ordinal) : NULL;
    PyObject *key = ordinal ? PyTuple_Pack(2, ordinal, engine) : NULL, *end = NULL;
    int failed = -1;
    if (key) {
        PyObject *free_at = PyDict_GetItemWithError(self->engines, key);
        if (free_at && ns_of(free_at) > *start) *start = ns_of(free_at);
        if (!PyErr_Occurred() && (end = PyLong_FromLongLong(later(*start, cost))))
            failed = PyDict_SetItem(self->engines, key, end);
    }
    Py_XDECREF(end), Py_XDECREF(key), Py_XDECREF(ordinal), Py_XDECREF(device), Py_XDECREF(context);
    return failed;
}

static int in_table(PyObject *table, long long sequence, Operation *operation) {
    PyObject *key = PyLong_FromLongLong(sequence);
    int failed = !key || PyDict_SetItem(table, key, (PyObject *)operation);
    Py_XDECREF(key);
    return failed ? -1 : 0;
}

/* Take out of a table; what is not there is left out. */
static int out_of_table(PyObject *table, long long sequence) {
    PyObject *key = PyLong_FromLongLong(sequence);
    int found = key ? PyDict_Contains(table, key) : -1;
    if (found > 0) found = PyDict_DelItem(table, key);
    Py_XDECREF(key);
    return found < 0 ? -1 : 0;
}

static int notify(PyObject *to, PyObject *method, PyObject *operation) {
    PyObject *done = PyObject_CallMethodOneArg(to, method, operation);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int notify_subscribers(PyObject *method, PyObject *operation) {
    PyObject *subscribers = PyDict_GetItemWithError(names, n_subscribers);
    if (!subscribers || !PyTuple_Check(subscribers)) return PyErr_Occurred() ? -1 : 0;
    Py_INCREF(subscribers);
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < PyTuple_GET_SIZE(subscribers); ++i)
        failed = notify(PyTuple_GET_ITEM(subscribers, i), method, operation);
    Py_DECREF(subscribers);
    return failed;
}

/* Make an operation pending after those in `orders`, each an iterable of operations and None; NULL is none. */
static int add(Queue *self, PyObject *object, long long ns, PyObject *engine, PyObject *first, PyObject *const orders[2]) {
    Operation *operation = cudatool_as_operation(object);
    if (!operation) return -1;
    long long start = self->host_time;
    operation->sequence = ++self->sequence;
    if (in_table(self->pending, operation->sequence, operation)) return -1;
    if (operation->until != Py_None && in_table(self->until, operation->sequence, operation)) return -1;
    if (first && order_after(operation, first, &start)) return -1;
    for (int i = 0; i < 2; ++i)
        if (orders[i] && order_after_all(operation, orders[i], &start)) return -1;
    if (!operation->missing && in_table(self->ready, operation->sequence, operation)) return -1;
    if (engine && PyObject_IsTrue(engine) && take_engine(self, operation, engine, &start, ns)) return -1;
    operation->start = start;
    operation->end = later(start, ns);
    if (self->is_shared && notify((PyObject *)self, n_run_soon, object)) return -1;
    if (self->watch != Py_None && notify(self->watch, n_enqueued, object)) return -1;
    return notify_subscribers(n_enqueued, object);
}

static PyObject *Queue_add(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"operation", "cost", "engine", "after", NULL};
    PyObject *operation, *cost, *engine = NULL, *after = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|OO", keywords, &operation, &cost, &engine, &after)) return NULL;
    PyObject *const orders[2] = {after, NULL};
    long long ns = ns_of(cost);
    if ((ns == -1 && PyErr_Occurred()) || add((Queue *)self, operation, ns, engine, NULL, orders)) return NULL;
    Py_RETURN_NONE;
}

/* Return what the legacy default stream adds (Queue.enqueue of the stub file): a new reference. */
static PyObject *default_stream_order(PyObject *self, PyObject *stream) {
    PyObject *context = PyObject_GetAttr(stream, n_context);
    PyObject *legacy = context ? PyObject_GetAttr(context, n_legacy_stream) : NULL, *found = NULL;
    if (legacy == stream) {
        found = PyObject_CallMethod(self, "blocking_streams_last", "O", context);
    } else if (legacy) {
        PyObject *flags = PyObject_GetAttr(stream, n_flags);
        PyObject *last = NULL;
        long bits = flags ? PyLong_AsLong(flags) : -1;
        if (bits >= 0 && bits & 1) found = PyTuple_New(0); /* CU_STREAM_NON_BLOCKING */
        else if (bits >= 0 && (last = PyObject_GetAttr(legacy, n_last))) found = PyTuple_Pack(1, last);
        Py_XDECREF(last), Py_XDECREF(flags);
    }
    Py_XDECREF(legacy), Py_XDECREF(context);
    return found;
}

int cudatool_enqueue(Queue *self, PyObject *given, long long ns, PyObject *engine, PyObject *after) {
    Operation *operation = cudatool_as_operation(given);
    if (!operation) return -1;
    self->host_time = later(self->host_time, 1000);
    PyObject *stream = Py_NewRef(operation->stream);
    PyObject *last = PyObject_GetAttr(stream, n_last);
    PyObject *default_order = last ? default_stream_order((PyObject *)self, stream) : NULL;
    PyObject *const orders[2] = {default_order, after};
    int failed = !default_order || add(self, given, ns, engine, last, orders) || PyObject_SetAttr(stream, n_last, given);
    Py_XDECREF(default_order), Py_XDECREF(last), Py_DECREF(stream);
    return failed ? -1 : 0;
}

static PyObject *Queue_enqueue(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"operation", "cost", "engine", "after", NULL};
    PyObject *given, *cost, *engine = NULL, *after = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|OO", keywords, &given, &cost, &engine, &after)) return NULL;
    long long ns = ns_of(cost);
    if ((ns == -1 && PyErr_Occurred()) || cudatool_enqueue((Queue *)self, given, ns, engine, after)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *Queue_order(PyObject *object, PyObject *args) {
    Queue *self = (Queue *)object;
    PyObject *given, *after;
    if (!PyArg_ParseTuple(args, "OO", &given, &after)) return NULL;
    Operation *operation = cudatool_as_operation(given);
    if (!operation || order_after_all(operation, after, NULL)) return NULL;
    if (operation->missing && out_of_table(self->ready, operation->sequence)) return NULL;
    Py_RETURN_NONE;
}

/* ---- running ------------------------------------------------------------------------------------------------- */

/* Do the operation's work, without the lock. Returns 0, or -1 with what it raised. */
static int work(Queue *self, Operation *operation, PyObject *context) {
    PyObject *error = PyObject_GetAttr(context, n_error), *done = NULL;
    int is_sound = error == Py_None;
    Py_XDECREF(error);
    if (!error) return -1;
    if (!is_sound || operation->run == Py_None) return 0;
    PyObject *run = Py_NewRef(operation->run);
    if (self->turn == Py_None) done = PyObject_CallOneArg(run, (PyObject *)operation);
    else done = PyObject_CallMethod((PyObject *)self, "_run_in_turn", "OO", run, operation);
    Py_DECREF(run);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* The operation has run: those that wait for it may. */
static int finish(Queue *self, Operation *operation) {
    operation->done = 1;
    PyObject *dependents = operation->dependents;
    operation->dependents = Py_NewRef(nothing);
    Py_XSETREF(operation->predecessors, Py_NewRef(nothing));
    Py_XSETREF(operation->run, Py_NewRef(Py_None));
    Py_XSETREF(operation->until, Py_NewRef(Py_None));
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < Py_SIZE(dependents); ++i) {
        Operation *next = cudatool_as_operation(PyList_GET_ITEM(dependents, i));
        failed = !next || (!--next->missing && in_table(self->ready, next->sequence, next));
    }
    Py_DECREF(dependents);
    if (!failed) failed = out_of_table(self->pending, operation->sequence);
    /* Condition.notify_all does nothing but look through these, and takes longer than all of the above. */
    PyObject *waiters = failed ? NULL : PyObject_GetAttr(lock, n_waiters), *done = NULL;
    if (waiters && PyObject_Size(waiters) > 0) {
        failed = !(done = PyObject_CallMethod(lock, "notify_all", NULL));
        Py_XDECREF(done);
    }
    Py_XDECREF(waiters);
    return failed || PyErr_Occurred() ? -1 : 0;
}

static int run(Queue *self, PyObject *given) {
    Operation *operation = cudatool_as_operation(given);
    PyObject *context = operation ? PyObject_GetAttr(operation->stream, n_context) : NULL;
    if (!context) return -1;
    if (out_of_table(self->ready, operation->sequence) || out_of_table(self->until, operation->sequence)) {
        Py_DECREF(context);
        return -1;
    }
    Py_INCREF(given); /* the tables may have held the last reference */
    ++self->running;
    PyObject *type = NULL, *value = NULL, *traceback = NULL, *done = NULL;
    int is_known = self->watch == Py_None || !notify(self->watch, n_before, given);
    if (is_known && (done = PyObject_CallNoArgs(release))) { /* other threads may enqueue during the call */
        Py_DECREF(done);
        if (work(self, operation, context)) {
            PyErr_Fetch(&type, &value, &traceback);
            PyErr_NormalizeException(&type, &value, &traceback);
            if (value && traceback) PyException_SetTraceback(value, traceback);
            /* Note what a kernel's failure means for its context; what is no such failure is raised again, below. */
            done = PyObject_CallMethod((PyObject *)self, "_note_failure", "OO", operation, value);
            if (done != Py_False) {
                Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(traceback);
                type = value = traceback = NULL;
                if (!done) PyErr_Fetch(&type, &value, &traceback);
            }
            Py_XDECREF(done);
        }
        while (!(done = PyObject_CallNoArgs(acquire))) PyErr_Clear(); /* without it nothing can go on */
        Py_DECREF(done);
    } else {
        PyErr_Fetch(&type, &value, &traceback);
    }
    --self->running;
    if (self->watch != Py_None && notify(self->watch, n_after, given)) {
        if (type) PyErr_WriteUnraisable(given);
        else PyErr_Fetch(&type, &value, &traceback);
    }
    int failed = finish(self, operation); /* whatever was raised: others wait for it */
    Py_DECREF(context);
    if (type) {
        if (failed) PyErr_WriteUnraisable(given);
        PyErr_Restore(type, value, traceback);
        failed = -1;
    }
    if (!failed) failed = notify_subscribers(n_executed, given);
    Py_DECREF(given);
    return failed ? -1 : 0;
}

static PyObject *Queue_run(PyObject *self, PyObject *operation) {
    if (run((Queue *)self, operation)) return NULL;
    Py_RETURN_NONE;
}

/* Return whether operations run in the order of enqueuing until `target` is done, -1 with an exception. */
static int run_in_order(Queue *self, Operation *target) {
    while (!target->done) {
        if (!self->in_order || PyDict_GET_SIZE(self->until)) return 0;
        PyObject *interrupted = PyObject_GetAttr(interruption, n_is_interrupted);
        if (!interrupted) return -1;
        Py_DECREF(interrupted);
        if (interrupted != Py_False) return 0;
        Py_ssize_t position = 0;
        PyObject *key, *operation, *first = NULL;
        while (PyDict_Next(self->ready, &position, &key, &operation))
            if (!first || ((Operation *)operation)->sequence < ((Operation *)first)->sequence) first = operation;
        if (!first || ((Operation *)first)->sequence > target->sequence) return 0;
        if (!cudatool_is_launch(((Operation *)first)->run)) cudatool_after_launches();
        else if (cudatool_before_launch()) return -1;
        if (run(self, first)) return -1;
    }
    return 1;
}

/* Run operations in the order of enqueuing until `target` is done, where that order is the schedule; return whether it is.
 * It is not where another thread runs it, where some operation waits for a value in memory, and after Ctrl-C. */
static PyObject *Queue_run_in_order(PyObject *self, PyObject *given) {
    Operation *target = cudatool_as_operation(given);
    if (!target) return NULL;
    int is_done = run_in_order((Queue *)self, target);
    cudatool_after_launches();
    return is_done < 0 ? NULL : PyBool_FromLong(is_done);
}

#define OF_QUEUE(name, field, type, flags) {name, type, offsetof(Queue, field), flags, NULL}
static PyMemberDef queue_members[] = {
    OF_QUEUE("_pending", pending, T_OBJECT_EX, READONLY), OF_QUEUE("_ready", ready, T_OBJECT_EX, READONLY),
    OF_QUEUE("_until", until, T_OBJECT_EX, READONLY),     OF_QUEUE("_running", running, T_LONGLONG, READONLY),
    OF_QUEUE("_in_order", in_order, T_BOOL, 0),           OF_QUEUE("_is_shared", is_shared, T_BOOL, 0),
    OF_QUEUE("host_time", host_time, T_LONGLONG, 0),      OF_QUEUE("watch", watch, T_OBJECT_EX, 0),
    OF_QUEUE("turn", turn, T_OBJECT_EX, 0),               {NULL, 0, 0, 0, NULL},
};

static PyMethodDef queue_methods[] = {
    {"add", (PyCFunction)(void (*)(void))Queue_add, METH_VARARGS | METH_KEYWORDS, NULL},
    {"enqueue", (PyCFunction)(void (*)(void))Queue_enqueue, METH_VARARGS | METH_KEYWORDS, NULL},
    {"order", Queue_order, METH_VARARGS, NULL},
    {"_run", Queue_run, METH_O, NULL},
    {"_run_in_order", Queue_run_in_order, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot queue_slots[] = {
    {Py_tp_init, Queue_init},       {Py_tp_traverse, Queue_traverse}, {Py_tp_clear, Queue_clear},
    {Py_tp_dealloc, Queue_dealloc}, {Py_tp_members, queue_members},   {Py_tp_methods, queue_methods},
    {Py_tp_new, PyType_GenericNew}, {0, NULL},
};
static PyType_Spec queue_spec = {"cudatool.sim._queue.Queue", sizeof(Queue), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, queue_slots};

/* ---- the module ---------------------------------------------------------------------------------------------- */

static PyObject *py_install(PyObject *module, PyObject *args) {
    PyObject *given[5];
    PyObject **kept[] = {&names, &lock, &acquire, &release, &interruption};
    (void)module;
    if (!PyArg_ParseTuple(args, "O!OOOO", &PyDict_Type, &given[0], &given[1], &given[2], &given[3], &given[4])) return NULL;
    for (int i = 0; i < 5; ++i) Py_XSETREF(*kept[i], Py_NewRef(given[i]));
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"install", py_install, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "cudatool.sim._queue", NULL, -1, methods, NULL, NULL, NULL,
                                        NULL};

static int make_constants(void) {
    static const struct {
        PyObject **where;
        const char *text;
    } texts[] = {{&n_context, "context"},       {&n_legacy_stream, "legacy_stream"},  {&n_last, "last"},
                 {&n_flags, "flags"},           {&n_error, "error"},                  {&n_device, "device"},
                 {&n_ordinal, "ordinal"},       {&n_subscribers, "subscribers"},      {&n_waiters, "_waiters"},
                 {&n_is_interrupted, "is_interrupted"}, {&n_enqueued, "enqueued"},    {&n_executed, "executed"},
                 {&n_before, "before"},         {&n_after, "after"},                {&n_run_soon, "run_soon"}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; ++i)
        if (!(*texts[i].where = PyUnicode_InternFromString(texts[i].text))) return -1;
    no_value = Py_BuildValue("(iiii)", 0, 0, 0, 0);
    no_source = Py_BuildValue("(ii)", 0, 0);
    not_programmatic = Py_BuildValue("(OOOO)", Py_False, Py_False, Py_False, Py_False);
    nothing = PyTuple_New(0);
    zero = PyLong_FromLong(0);
    return no_value && no_source && not_programmatic && nothing && zero ? 0 : -1;
}

PyMODINIT_FUNC PyInit__queue(void) {
    if (make_constants()) return NULL;
    PyObject *module = PyModule_Create(&definition);
    OperationType = (PyTypeObject *)PyType_FromSpec(&operation_spec);
    PyObject *queue = PyType_FromSpec(&queue_spec);
    if (!module || !OperationType || !queue || PyModule_AddObjectRef(module, "Operation", (PyObject *)OperationType) ||
        PyModule_AddObjectRef(module, "Queue", queue) || cudatool_add_launches(module))
        Py_CLEAR(module);
    Py_XDECREF(queue);
    return module;
}
