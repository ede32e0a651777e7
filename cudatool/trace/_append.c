/* How a recorder writes an event whose name, stack and thread it has written before (cudatool/trace/recorder.py).
 *
 * Nothing here runs any code of the program, and Python's lock is held throughout: to signal handlers and to other
 * threads, writing an event is one step. Whatever else there is to do, Recorder._write does.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

/* ---- a chunk that is being filled ---------------------------------------------------------------------------- */

enum { LENGTH = 2 }; /* which of the header's words says how much of the payload is valid */

typedef struct {
    PyObject_HEAD
    Py_buffer bytes;    /* of the header, the payload after it; its .obj is NULL if they are gone */
    Py_ssize_t header;  /* size, in bytes */
    Py_ssize_t used, capacity;
} Tail;

static int Tail_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"bytes", "header", NULL};
    Tail *self = (Tail *)object;
    PyObject *bytes;
    Py_ssize_t header;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "On", keywords, &bytes, &header)) return -1;
    Py_buffer buffer;
    if (PyObject_GetBuffer(bytes, &buffer, PyBUF_WRITABLE)) return -1;
    if (header < (LENGTH + 1) * 8 || header > buffer.len || (uintptr_t)buffer.buf % 8) {
        PyBuffer_Release(&buffer);
        PyErr_SetString(PyExc_ValueError, "the bytes have no room for such a header, or are not aligned");
        return -1;
    }
    PyBuffer_Release(&self->bytes); /* nothing, unless this is the second call */
    self->bytes = buffer;
    self->header = header;
    self->used = 0;
    self->capacity = buffer.len - header;
    return 0;
}

static void Tail_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyBuffer_Release(&((Tail *)self)->bytes);
    type->tp_free(self);
    Py_DECREF(type);
}

/* Return where the next bytes go if there are as many; NULL without an exception if not. */
static char *next_bytes(const Tail *self, Py_ssize_t size) {
    int is_room = self->bytes.obj && size >= 0 && size <= self->bytes.len - self->header - self->used;
    return is_room ? (char *)self->bytes.buf + self->header + self->used : NULL;
}

/* Make the next bytes, which are written, valid. A reader of the file sees them before the new length. */
static void take_in(Tail *self, Py_ssize_t size) {
    self->used += size;
    __atomic_store_n((uint64_t *)self->bytes.buf + LENGTH, (uint64_t)self->used, __ATOMIC_RELEASE);
}

static PyObject *no_room(void) {
    PyErr_SetString(PyExc_ValueError, "the chunk has no room for this, or is closed");
    return NULL;
}

static PyObject *Tail_append(PyObject *object, PyObject *given) {
    Py_buffer data;
    if (PyObject_GetBuffer(given, &data, PyBUF_SIMPLE)) return NULL;
    char *to = next_bytes((Tail *)object, data.len);
    Py_ssize_t size = data.len;
    if (to) memcpy(to, data.buf, (size_t)size);
    PyBuffer_Release(&data);
    if (!to) return no_room();
    take_in((Tail *)object, size);
    Py_RETURN_NONE;
}

static PyObject *Tail_filled(PyObject *object, PyObject *number) {
    Py_ssize_t size = PyLong_AsSsize_t(number);
    if (size == -1 && PyErr_Occurred()) return NULL;
    if (!next_bytes((Tail *)object, size)) return no_room();
    take_in((Tail *)object, size);
    Py_RETURN_NONE;
}

static PyObject *Tail_release(PyObject *self, PyObject *unused) {
    (void)unused;
    PyBuffer_Release(&((Tail *)self)->bytes);
    Py_RETURN_NONE;
}

static PyMemberDef tail_members[] = {
    {"used", T_PYSSIZET, offsetof(Tail, used), READONLY, NULL},
    {"capacity", T_PYSSIZET, offsetof(Tail, capacity), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef tail_methods[] = {
    {"append", Tail_append, METH_O, NULL},
    {"filled", Tail_filled, METH_O, NULL},
    {"_release", Tail_release, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tail_slots[] = {
    {Py_tp_init, Tail_init},       {Py_tp_dealloc, Tail_dealloc},     {Py_tp_members, tail_members},
    {Py_tp_methods, tail_methods}, {Py_tp_new, PyType_GenericNew}, {0, NULL},
};
static PyType_Spec tail_spec = {"cudatool.trace._append.Tail", sizeof(Tail), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, tail_slots};
static PyTypeObject *TailType;

/* ---- one event ----------------------------------------------------------------------------------------------- */

/* events.RECORD, which is little-endian, as every machine that has CUDA. */
struct record {
    int64_t time;
    uint8_t kind;
    int8_t device;
    uint16_t flags, thread, reserved;
    uint32_t stream, correlation, stack, name;
    uint64_t address, size, aux0, aux1;
};
_Static_assert(sizeof(struct record) == 64, "a record has 64 bytes");

/* The places of events.Event's fields. */
enum { TIME, KIND, DEVICE, FLAGS, THREAD, STREAM, CORRELATION, STACK, NAME, ADDRESS, SIZE, AUX0, AUX1, FIELDS };

typedef struct {
    PyObject_HEAD
    PyObject *lock, *records, *names, *stacks, *threads, *event;
    long long full_bytes, before;
    char closed;
} Writer;

static PyObject *n_acquire, *n_release, *n_write;

/* Read a number of at most `most`. Returns whether it is one; there is no exception then, either way. */
static int is_unsigned(PyObject *number, uint64_t most, uint64_t *value) {
    if (!PyLong_Check(number)) return 0;
    unsigned long long read = PyLong_AsUnsignedLongLong(number);
    if (read == (unsigned long long)-1 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    *value = read;
    return read <= most;
}

static int is_signed(PyObject *number, int64_t least, int64_t most, int64_t *value) {
    int beyond = 0;
    if (!PyLong_Check(number)) return 0;
    *value = PyLong_AsLongLongAndOverflow(number, &beyond);
    return !beyond && *value >= least && *value <= most;
}

/* Read the number that a table has for a key, whose comparison runs no code of the program's. */
static int is_known(PyObject *table, PyObject *key, uint64_t most, uint64_t *value) {
    if (!table || !PyDict_CheckExact(table) || !(PyUnicode_CheckExact(key) || PyLong_CheckExact(key))) return 0;
    PyObject *found = PyDict_GetItemWithError(table, key);
    if (!found) PyErr_Clear();
    return found && is_unsigned(found, most, value);
}

/* Whether all there is to do is to write this record. */
static int is_plain(const Writer *self, PyObject *event, struct record *record) {
    if (!PyTuple_Check(event) || PyTuple_GET_SIZE(event) != FIELDS) return 0;
    PyObject *const *field = ((PyTupleObject *)event)->ob_item;
    uint64_t kind, flags, thread, stream, correlation, stack, name, address, size, aux0, aux1;
    int64_t time, device;
    if (!is_known(self->names, field[NAME], UINT32_MAX, &name) ||
        !is_known(self->stacks, field[STACK], UINT32_MAX, &stack) ||
        !is_known(self->threads, field[THREAD], UINT16_MAX, &thread) ||
        !is_signed(field[TIME], INT64_MIN, INT64_MAX, &time) || !is_unsigned(field[KIND], UINT8_MAX, &kind) ||
        !is_signed(field[DEVICE], INT8_MIN, INT8_MAX, &device) || !is_unsigned(field[FLAGS], UINT16_MAX, &flags) ||
        !is_unsigned(field[STREAM], UINT32_MAX, &stream) ||
        !is_unsigned(field[CORRELATION], UINT32_MAX, &correlation) ||
        !is_unsigned(field[ADDRESS], UINT64_MAX, &address) || !is_unsigned(field[SIZE], UINT64_MAX, &size) ||
        !is_unsigned(field[AUX0], UINT64_MAX, &aux0) || !is_unsigned(field[AUX1], UINT64_MAX, &aux1))
        return 0;
    *record = (struct record){
        .time = time, .kind = (uint8_t)kind, .device = (int8_t)device, .flags = (uint16_t)flags,
        .thread = (uint16_t)thread, .stream = (uint32_t)stream, .correlation = (uint32_t)correlation,
        .stack = (uint32_t)stack, .name = (uint32_t)name, .address = address, .size = size, .aux0 = aux0, .aux1 = aux1,
    };
    return 1;
}

/* Write the event if that is all there is to do. Returns whether it was, or -1 with an exception. */
static int write_plain(Writer *self, PyObject *event) {
    struct record record;
    if (event == self->event || !self->lock || !is_plain(self, event, &record)) return 0;
    PyObject *const now[] = {self->lock, Py_False};
    PyObject *taken = PyObject_VectorcallMethod(n_acquire, now, 2, NULL);
    if (taken != Py_True) { /* another thread has it: it may be in the middle of the chunk */
        Py_XDECREF(taken);
        return taken ? 0 : -1;
    }
    Py_DECREF(taken);
    Tail *records = self->records && PyObject_TypeCheck(self->records, TailType) ? (Tail *)self->records : NULL;
    char *to = self->closed || !records ? NULL : next_bytes(records, sizeof record);
    if (to) {
        PyObject *last = self->event;
        self->event = Py_NewRef(event);
        self->before = self->full_bytes + records->used;
        memcpy(to, &record, sizeof record);
        take_in(records, sizeof record);
        Py_XDECREF(last);
    }
    PyObject *given = PyObject_CallMethodNoArgs(self->lock, n_release);
    Py_XDECREF(given);
    return given ? to != NULL : -1;
}

static PyObject *Writer_call(PyObject *self, PyObject *args, PyObject *kwargs) {
    if (PyTuple_GET_SIZE(args) != 1 || (kwargs && PyDict_GET_SIZE(kwargs))) {
        PyErr_SetString(PyExc_TypeError, "a recorder is called with one event");
        return NULL;
    }
    PyObject *event = PyTuple_GET_ITEM(args, 0);
    int written = write_plain((Writer *)self, event);
    if (written < 0) return NULL;
    if (written) Py_RETURN_NONE;
    return PyObject_CallMethodOneArg(self, n_write, event);
}

static const size_t objects[] = {
    offsetof(Writer, lock),   offsetof(Writer, records), offsetof(Writer, names),
    offsetof(Writer, stacks), offsetof(Writer, threads), offsetof(Writer, event),
};
enum { OBJECTS = sizeof objects / sizeof *objects };
#define OBJECT(self, i) (*(PyObject **)((char *)(self) + objects[i]))

static int Writer_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    for (int i = 0; i < OBJECTS; ++i) Py_VISIT(OBJECT(self, i));
    return 0;
}

static int Writer_clear(PyObject *self) {
    for (int i = 0; i < OBJECTS; ++i) Py_CLEAR(OBJECT(self, i));
    return 0;
}

static void Writer_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Writer_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef writer_members[] = {
    {"_lock", T_OBJECT_EX, offsetof(Writer, lock), 0, NULL},
    {"_records", T_OBJECT_EX, offsetof(Writer, records), 0, NULL},
    {"_names", T_OBJECT_EX, offsetof(Writer, names), 0, NULL},
    {"_stacks", T_OBJECT_EX, offsetof(Writer, stacks), 0, NULL},
    {"_threads", T_OBJECT_EX, offsetof(Writer, threads), 0, NULL},
    {"_event", T_OBJECT, offsetof(Writer, event), 0, NULL},
    {"_full_bytes", T_LONGLONG, offsetof(Writer, full_bytes), 0, NULL},
    {"_before", T_LONGLONG, offsetof(Writer, before), 0, NULL},
    {"_closed", T_BOOL, offsetof(Writer, closed), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot writer_slots[] = {
    {Py_tp_call, Writer_call},       {Py_tp_traverse, Writer_traverse}, {Py_tp_clear, Writer_clear},
    {Py_tp_dealloc, Writer_dealloc}, {Py_tp_members, writer_members},   {Py_tp_new, PyType_GenericNew},
    {0, NULL},
};
static PyType_Spec writer_spec = {"cudatool.trace._append.Writer", sizeof(Writer), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, writer_slots};

/* ---- the module ---------------------------------------------------------------------------------------------- */

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_append", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__append(void) {
    n_acquire = PyUnicode_InternFromString("acquire");
    n_release = PyUnicode_InternFromString("release");
    n_write = PyUnicode_InternFromString("_write");
    TailType = (PyTypeObject *)PyType_FromSpec(&tail_spec);
    PyObject *writer = PyType_FromSpec(&writer_spec), *module = PyModule_Create(&definition);
    if (!n_acquire || !n_release || !n_write || !TailType || !writer || !module ||
        PyModule_AddObjectRef(module, "Tail", (PyObject *)TailType) || PyModule_AddObjectRef(module, "Writer", writer))
        Py_CLEAR(module);
    Py_XDECREF(writer);
    return module;
}
