/* The walk along the frames of a Python stack, for stacks.capture. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

enum { MOST_KEPT = 256 }; /* as stacks._MAX_DEPTH */

/* Return the place of a frame, a new reference, from `places` or else from `add_place(frame)`; NULL with an error set. */
static PyObject *place_of(PyFrameObject *frame, PyObject *places, PyObject *add_place)
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

static PyObject *walk(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 3 || !PyDict_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "walk(places, add_place, skip)");
        return NULL;
    }
    long skip = PyLong_AsLong(arguments[2]);
    if (skip == -1 && PyErr_Occurred())
        return NULL;
    PyObject *kept[MOST_KEPT], *result = NULL;
    Py_ssize_t length = 0;
    PyFrameObject *frame = (PyFrameObject *)Py_XNewRef((PyObject *)PyEval_GetFrame());
    while (frame != NULL && length < MOST_KEPT) {
        if (skip-- <= 0) {
            PyObject *place = place_of(frame, arguments[0], arguments[1]);
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

static PyMethodDef methods[] = {
    {"walk", (PyCFunction)(void (*)(void))walk, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_walk", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__walk(void)
{
    return PyModule_Create(&module);
}
