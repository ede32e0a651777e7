/* Python stacks (cudatool/trace/stacks.py): the walk along the frames, and the look-up of a stack that is known. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

enum { MOST_KEPT = 256 }; /* as stacks._MAX_DEPTH */

/* What stacks.py gave: its module's namespace, where `_enabled` stands; its tables, and what adds to them. */
static PyObject *names, *places, *stack_ids, *add_place, *add_stack, *n_enabled;

/* Return the place of a frame, a new reference, from `places` or else from `add_place(frame)`; NULL with an error set. */
static PyObject *place_of(PyFrameObject *frame)
{
    PyCodeObject *code = PyFrame_GetCode(frame);
    /* As id(frame.f_code) + frame.f_lasti. */
    PyObject *key = PyLong_FromUnsignedLongLong((uintptr_t)code + (uintptr_t)(intptr_t)PyFrame_GetLasti(frame));
    Py_DECREF(code);
    if (key == NULL)
        return NULL;
    PyObject *place = PyDict_GetItemWithError(places, key);
    Py_DECREF(key);
    if (place != NULL)
        return Py_NewRef(place);
    return PyErr_Occurred() ? NULL : PyObject_CallOneArg(add_place, (PyObject *)frame);
}

/* Return the places of the caller's frames, innermost first, without the first `skip`. Places of 0 are left out; one
 * below 0 ends the walk. */
static PyObject *walk(long skip)
{
    PyObject *kept[MOST_KEPT], *result = NULL;
    Py_ssize_t length = 0;
    PyFrameObject *frame = (PyFrameObject *)Py_XNewRef((PyObject *)PyEval_GetFrame());
    while (frame != NULL && length < MOST_KEPT) {
        if (skip-- <= 0) {
            PyObject *place = place_of(frame);
            long role = place == NULL ? -1 : PyLong_AsLong(place);
            if (role > 0)
                kept[length++] = place;
            else
                Py_XDECREF(place);
            if (role < 0) {
                if (PyErr_Occurred())
                    goto end;
                break;
            }
        }
        PyFrameObject *back = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    result = PyTuple_New(length);
    for (Py_ssize_t n = 0; result != NULL && n < length; ++n)
        PyTuple_SET_ITEM(result, n, Py_NewRef(kept[n]));
end:
    while (length)
        Py_DECREF(kept[--length]);
    Py_XDECREF(frame);
    return result;
}

static PyObject *capture(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"skip", NULL};
    long skip = 0;
    (void)self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|l:capture", keywords, &skip))
        return NULL;
    PyObject *enabled = PyDict_GetItemWithError(names, n_enabled);
    int is_enabled = enabled == NULL ? 0 : PyObject_IsTrue(enabled);
    if (is_enabled <= 0)
        return PyErr_Occurred() ? NULL : PyLong_FromLong(0);
    PyObject *stack = walk(skip);
    if (stack == NULL)
        return NULL;
    PyObject *found = Py_XNewRef(PyDict_GetItemWithError(stack_ids, stack));
    if (found == NULL && !PyErr_Occurred())
        found = PyObject_CallOneArg(add_stack, stack);
    Py_DECREF(stack);
    return found;
}

static PyObject *install(PyObject *self, PyObject *args)
{
    PyObject **kept[] = {&names, &places, &stack_ids, &add_place, &add_stack}, *given[5];
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O!O!OO", &PyDict_Type, &given[0], &PyDict_Type, &given[1], &PyDict_Type, &given[2],
                          &given[3], &given[4]))
        return NULL;
    for (int i = 0; i < 5; ++i)
        Py_XSETREF(*kept[i], Py_NewRef(given[i]));
    Py_RETURN_NONE;
}

PyDoc_STRVAR(capture_doc, "capture(skip=0)\n--\n\n\
Return the id of the caller's Python stack; equal stacks have equal ids, 0 is the empty stack.\n\
\n\
Frames of cudatool itself, of NumPy, contextlib, ``runpy`` and the import system are left out, and so is everything\n\
outside the program that ``cudatool run`` started or the test that pytest called. At most 256 frames are kept, the\n\
innermost ones.\n\
\n\
Parameters\n\
----------\n\
skip\n\
    Number of innermost frames to leave out, on top of those.");

static PyMethodDef methods[] = {
    {"capture", (PyCFunction)(void (*)(void))capture, METH_VARARGS | METH_KEYWORDS, capture_doc},
    {"install", install, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "cudatool.trace._walk", NULL, -1, methods, NULL, NULL, NULL,
                                    NULL};

PyMODINIT_FUNC PyInit__walk(void)
{
    n_enabled = PyUnicode_InternFromString("_enabled");
    return n_enabled == NULL ? NULL : PyModule_Create(&module);
}
