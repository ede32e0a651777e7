/* A handler of a signal that may be put off, as cudatool/sim/signals.py does:
 *
 *     handler(number, frame):  if puts_off(own, number, frame): return
 *                              return own(number, frame)
 *
 * A function of Python would stand in the traceback of every KeyboardInterrupt, below the program's own line.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD PyObject *own, *puts_off;
} Handler;

static int traverse(Handler *self, visitproc visit, void *arg) {
    Py_VISIT(self->own);
    Py_VISIT(self->puts_off);
    return 0;
}

static int clear(Handler *self) {
    Py_CLEAR(self->own);
    Py_CLEAR(self->puts_off);
    return 0;
}

static void dealloc(Handler *self) {
    PyObject_GC_UnTrack(self);
    clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    PyObject *own, *puts_off;
    if (!PyArg_ParseTuple(args, "OO:Handler", &own, &puts_off)) return NULL;
    Handler *self = (Handler *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->own = Py_NewRef(own);
    self->puts_off = Py_NewRef(puts_off);
    return (PyObject *)self;
}

static PyObject *call(Handler *self, PyObject *args, PyObject *kwargs) {
    PyObject *number, *frame;
    if (!PyArg_ParseTuple(args, "OO:Handler", &number, &frame)) return NULL;
    PyObject *own = Py_NewRef(self->own); /* it may set another handler, which frees this one */
    PyObject *answer = PyObject_CallFunctionObjArgs(self->puts_off, own, number, frame, NULL);
    int is_off = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    PyObject *result = is_off < 0 ? NULL : is_off ? Py_NewRef(Py_None) : PyObject_Call(own, args, kwargs);
    Py_DECREF(own);
    return result;
}

static PyMemberDef members[] = {
    {"own", T_OBJECT_EX, offsetof(Handler, own), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject HandlerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cudatool.sim._handler.Handler",
    .tp_basicsize = sizeof(Handler),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = new,
    .tp_call = (ternaryfunc)call,
    .tp_traverse = (traverseproc)traverse,
    .tp_clear = (inquiry)clear,
    .tp_dealloc = (destructor)dealloc,
    .tp_members = members,
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "cudatool.sim._handler", NULL, -1, NULL, NULL, NULL, NULL,
                                        NULL};

PyMODINIT_FUNC PyInit__handler(void) {
    if (PyType_Ready(&HandlerType)) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddObjectRef(module, "Handler", (PyObject *)&HandlerType)) Py_CLEAR(module);
    return module;
}
