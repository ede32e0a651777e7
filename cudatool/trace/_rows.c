/* Passes over many rows of one source of events, on their way into a trace. None holds the interpreter's lock: the
 * program runs on at the same time. Rows are contiguous and of one size; what they contain is not trusted.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

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

enum { MOST_COLUMNS = 4 };

struct column {
    Py_ssize_t offset, width;
    struct map map;
    uint32_t *values, count, room; /* found by distinct() */
};

/* Note the value of each row that is new; returns -1 if there is no memory. */
static int find_distinct(const Py_buffer *rows, Py_ssize_t size, struct column *column)
{
    uint32_t before = 0;
    for (const char *row = rows->buf, *end = row + rows->len; row < end; row += size) {
        uint32_t value = get_column(row + column->offset, column->width);
        if (column->count && value == before)
            continue;
        before = value;
        int is_new = put(&column->map, value, 1);
        if (is_new > 0 && column->count == column->room) {
            uint32_t more = column->room * 2 + 256;
            uint32_t *larger = PyMem_RawRealloc(column->values, more * sizeof *larger);
            if (!larger)
                return -1;
            column->values = larger;
            column->room = more;
        }
        if (is_new < 0)
            return -1;
        if (is_new)
            column->values[column->count++] = value;
    }
    return 0;
}

static void free_columns(struct column *columns)
{
    for (Py_ssize_t i = 0; i < MOST_COLUMNS; ++i) {
        free_map(&columns[i].map);
        PyMem_RawFree(columns[i].values);
    }
}

static PyObject *distinct(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer rows;
    Py_ssize_t size;
    PyObject *asked;
    if (!PyArg_ParseTuple(arguments, "y*nO!", &rows, &size, &PyTuple_Type, &asked))
        return NULL;
    struct column columns[MOST_COLUMNS] = {0};
    Py_ssize_t count = PyTuple_GET_SIZE(asked);
    PyObject *found = NULL;
    int failed = 0;
    if (count > MOST_COLUMNS) {
        PyErr_SetString(PyExc_ValueError, "too many columns");
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(asked, i), "nn", &columns[i].offset, &columns[i].width) ||
            !is_column(rows.len, size, columns[i].offset, columns[i].width))
            goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count && !failed; ++i)
        failed = find_distinct(&rows, size, &columns[i]) < 0;
    Py_END_ALLOW_THREADS
    found = failed ? PyErr_NoMemory() : PyTuple_New(count);
    for (Py_ssize_t i = 0; found && i < count; ++i) {
        const char *values = (const char *)columns[i].values;
        PyObject *one = PyBytes_FromStringAndSize(values, (Py_ssize_t)(columns[i].count * sizeof(uint32_t)));
        if (one)
            PyTuple_SET_ITEM(found, i, one);
        else
            Py_CLEAR(found);
    }
done:
    free_columns(columns);
    PyBuffer_Release(&rows);
    return found;
}

/* Replace the columns' values in rows; returns whether one has a value that nothing replaces. */
static int replace(char *rows, size_t length, Py_ssize_t size, const struct column *columns, Py_ssize_t count)
{
    int failed = 0;
    for (Py_ssize_t i = 0; i < count; ++i) {
        const struct map *map = &columns[i].map;
        uint32_t before = 0, value = 0;
        for (char *row = rows + columns[i].offset, *end = row + length; row < end; row += size) {
            uint32_t key = get_column(row, columns[i].width);
            if (!value || key != before) {
                value = map->mask ? map->values[slot_of(map, key)] : 0;
                before = key;
                failed |= !value;
            }
            set_column(row, columns[i].width, value - 1);
        }
    }
    return failed;
}

static int write_all(int descriptor, const char *data, size_t length, off_t at)
{
    while (length) {
        ssize_t written = pwrite(descriptor, data, length, at);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return written < 0 ? errno : EIO;
        data += written;
        at += written;
        length -= (size_t)written;
    }
    return 0;
}

enum { PIECE = 1 << 16 }; /* that stays in a processor's cache while it is changed and written */

static PyObject *write_rows(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer rows;
    Py_ssize_t size;
    int descriptor;
    long long at;
    PyObject *replaced;
    if (!PyArg_ParseTuple(arguments, "y*niLO!", &rows, &size, &descriptor, &at, &PyTuple_Type, &replaced))
        return NULL;
    struct column columns[MOST_COLUMNS] = {0};
    Py_ssize_t count = PyTuple_GET_SIZE(replaced);
    int unknown = 0, error = 0, is_good = 0;
    char *piece = NULL;
    if (count > MOST_COLUMNS || size <= 0 || size > PIECE || rows.len % size) {
        PyErr_SetString(PyExc_ValueError, "too many columns, or no whole rows");
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
        int fits = is_column(rows.len, size, columns[i].offset, columns[i].width) && from.len == to.len;
        for (Py_ssize_t k = 0; fits && k < from.len / 4; ++k) {
            uint32_t value = ((const uint32_t *)to.buf)[k];
            /* stored one higher: 0 marks a free slot */
            if (value == UINT32_MAX || put(&columns[i].map, ((const uint32_t *)from.buf)[k], value + 1) < 0)
                fits = 0;
        }
        PyBuffer_Release(&from);
        PyBuffer_Release(&to);
        if (!fits) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a column cannot be replaced by these values");
            goto done;
        }
    }
    if (!(piece = PyMem_RawMalloc(PIECE))) {
        PyErr_NoMemory();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    size_t most = (size_t)(PIECE / size * size), left = (size_t)rows.len;
    for (const char *from = rows.buf; left && !unknown && !error; from += most) {
        size_t length = left < most ? left : most;
        memcpy(piece, from, length);
        unknown = replace(piece, length, size, columns, count);
        if (!unknown)
            error = write_all(descriptor, piece, length, (off_t)at);
        at += (long long)length;
        left -= length;
    }
    Py_END_ALLOW_THREADS
    if (unknown)
        PyErr_SetString(PyExc_ValueError, "a column has a value that nothing replaces");
    errno = error;
    if (error)
        PyErr_SetFromErrno(PyExc_OSError);
    is_good = !unknown && !error;
done:
    PyMem_RawFree(piece);
    free_columns(columns);
    PyBuffer_Release(&rows);
    if (!is_good)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"distinct", distinct, METH_VARARGS,
     "distinct(rows, size of a row, ((offset, width), ...)): the values of each column, as uint32 in the order of their "
     "first rows"},
    {"write", write_rows, METH_VARARGS,
     "write(rows, size of a row, descriptor, place in the file, ((offset, width, values, what replaces them), ...))"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_rows", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rows(void)
{
    return PyModuleDef_Init(&definition);
}
