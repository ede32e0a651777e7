/* Passes over many rows of one source of events, on their way into a trace. None holds the interpreter's lock: the
 * program runs on at the same time. Rows are contiguous and of one size; what they contain is not trusted.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* --- a map from numbers to numbers --- */

struct map {
    uint32_t *keys, *values; /* a value of 0 marks a free slot */
    uint32_t mask, count;
};

static void free_map(struct map *map)
{
    PyMem_RawFree(map->keys);
    PyMem_RawFree(map->values);
    memset(map, 0, sizeof *map);
}

/* Return the slot of a key, or the one that it would get. There is a free slot. */
static uint32_t slot_of(const struct map *map, uint32_t key)
{
    uint32_t at = key * 0x9E3779B1u;
    at ^= at >> 15;
    while (map->values[at & map->mask] && map->keys[at & map->mask] != key)
        ++at;
    return at & map->mask;
}

static int grow(struct map *map)
{
    struct map more = {.mask = map->mask ? map->mask * 2 + 1 : 255, .count = map->count};
    more.keys = PyMem_RawMalloc(((size_t)more.mask + 1) * sizeof *more.keys);
    more.values = PyMem_RawCalloc((size_t)more.mask + 1, sizeof *more.values);
    if (!more.keys || !more.values) {
        free_map(&more);
        return -1;
    }
    for (uint32_t i = 0; map->mask && i <= map->mask; ++i) {
        if (map->values[i]) {
            uint32_t slot = slot_of(&more, map->keys[i]);
            more.keys[slot] = map->keys[i];
            more.values[slot] = map->values[i];
        }
    }
    free_map(map);
    *map = more;
    return 0;
}

/* Give a key a value, unless it has one. Return whether it is new, -1 if there is no memory. */
static int put(struct map *map, uint32_t key, uint32_t value)
{
    if (map->count * 2 >= map->mask && grow(map) < 0)
        return -1;
    uint32_t slot = slot_of(map, key);
    if (map->values[slot])
        return 0;
    map->keys[slot] = key;
    map->values[slot] = value;
    ++map->count;
    return 1;
}

/* --- columns --- */

static uint32_t get_column(const char *row, Py_ssize_t width)
{
    uint32_t wide;
    uint16_t narrow;
    if (width == 4) {
        memcpy(&wide, row, 4);
        return wide;
    }
    memcpy(&narrow, row, 2);
    return narrow;
}

static void set_column(char *row, Py_ssize_t width, uint32_t value)
{
    uint16_t narrow = (uint16_t)value;
    if (width == 4)
        memcpy(row, &value, 4);
    else
        memcpy(row, &narrow, 2);
}

static int is_column(Py_ssize_t length, Py_ssize_t size, Py_ssize_t offset, Py_ssize_t width)
{
    if (size > 0 && length % size == 0 && (width == 2 || width == 4) && offset >= 0 && offset <= size - width)
        return 1;
    PyErr_SetString(PyExc_ValueError, "rows have no such column");
    return 0;
}

static PyObject *distinct(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer rows;
    Py_ssize_t size, offset, width;
    if (!PyArg_ParseTuple(arguments, "y*nnn", &rows, &size, &offset, &width))
        return NULL;
    PyObject *found = NULL;
    struct map seen = {0};
    uint32_t *values = NULL;
    uint32_t count = 0, room = 0;
    int failed = 0;
    if (!is_column(rows.len, size, offset, width))
        goto done;
    Py_BEGIN_ALLOW_THREADS
    uint32_t before = 0;
    for (const char *row = rows.buf, *end = row + rows.len; row < end && !failed; row += size) {
        uint32_t value = get_column(row + offset, width);
        if (count && value == before)
            continue;
        before = value;
        int is_new = put(&seen, value, 1);
        if (is_new > 0 && count == room) {
            uint32_t more = room * 2 + 256;
            uint32_t *larger = PyMem_RawRealloc(values, more * sizeof *values);
            if (larger)
                values = larger, room = more;
            else
                is_new = -1;
        }
        if (is_new > 0)
            values[count++] = value;
        failed = is_new < 0;
    }
    Py_END_ALLOW_THREADS
    if (failed)
        PyErr_NoMemory();
    else
        found = PyBytes_FromStringAndSize((const char *)values, (Py_ssize_t)(count * sizeof *values));
done:
    free_map(&seen);
    PyMem_RawFree(values);
    PyBuffer_Release(&rows);
    return found;
}

enum { MOST_COLUMNS = 4 };

static PyObject *copy(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer rows, out;
    Py_ssize_t size;
    PyObject *replaced;
    if (!PyArg_ParseTuple(arguments, "y*w*nO!", &rows, &out, &size, &PyTuple_Type, &replaced))
        return NULL;
    struct { Py_ssize_t offset, width; struct map map; } columns[MOST_COLUMNS] = {0};
    Py_ssize_t count = PyTuple_GET_SIZE(replaced);
    int failed = 1;
    if (count > MOST_COLUMNS || out.len != rows.len) {
        PyErr_SetString(PyExc_ValueError, "too many columns, or no room for the rows");
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        Py_buffer from, to;
        PyObject *column = PyTuple_GET_ITEM(replaced, i);
        if (!PyTuple_Check(column)) {
            PyErr_SetString(PyExc_TypeError, "a column is a tuple");
            goto done;
        }
        if (!PyArg_ParseTuple(column, "nny*y*", &columns[i].offset, &columns[i].width, &from, &to))
            goto done;
        int is_good = is_column(rows.len, size, columns[i].offset, columns[i].width) && from.len == to.len;
        for (Py_ssize_t k = 0; is_good && k < from.len / 4; ++k) {
            uint32_t value = ((const uint32_t *)to.buf)[k];
            /* stored one higher: 0 marks a free slot */
            if (value == UINT32_MAX || put(&columns[i].map, ((const uint32_t *)from.buf)[k], value + 1) < 0)
                is_good = 0;
        }
        PyBuffer_Release(&from);
        PyBuffer_Release(&to);
        if (!is_good) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a column cannot be replaced by these values");
            goto done;
        }
    }
    failed = 0;
    Py_BEGIN_ALLOW_THREADS
    memcpy(out.buf, rows.buf, (size_t)rows.len);
    for (Py_ssize_t i = 0; i < count; ++i) {
        uint32_t before = 0, value = 0;
        for (char *row = out.buf, *end = row + out.len; row < end; row += size) {
            uint32_t key = get_column(row + columns[i].offset, columns[i].width);
            if (!value || key != before) {
                value = columns[i].map.mask ? columns[i].map.values[slot_of(&columns[i].map, key)] : 0;
                before = key;
                failed |= !value;
            }
            set_column(row + columns[i].offset, columns[i].width, value - 1);
        }
    }
    Py_END_ALLOW_THREADS
    if (failed)
        PyErr_SetString(PyExc_ValueError, "a column has a value that nothing replaces");
done:
    for (Py_ssize_t i = 0; i < MOST_COLUMNS; ++i)
        free_map(&columns[i].map);
    PyBuffer_Release(&rows);
    PyBuffer_Release(&out);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"distinct", distinct, METH_VARARGS,
     "distinct(rows, size of a row, offset, width): the values of a column, as uint32 in the order of their first rows"},
    {"copy", copy, METH_VARARGS,
     "copy(rows, out, size of a row, ((offset, width, values, what replaces them), ...))"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_rows", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rows(void)
{
    return PyModuleDef_Init(&definition);
}
