/* Reads untrusted pickles of plain data, piece by piece; cudatool/collect/plain_pickle.py explains why.
 *
 * A stack machine with the opcodes that plain data needs. None of them imports or calls anything. Nothing is reserved
 * for a number in the file: memory grows with the bytes that were read.
 *
 * Dicts that have a certain key (of a snapshot: its events, of which there are millions) become rows of a table with a
 * column of 64-bit words for each key. A list of them becomes the range of their numbers. So an event takes some 60
 * bytes instead of 600.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* A value: three bits of type, and the rest. */
typedef uint64_t word;
enum kind {
    OBJECT = 0, /* a reference that the holder owns */
    NUMBER = 1, /* an integer of 61 bits */
    ROW = 2, /* number of a row */
    ROWS = 3, /* number of a span: a list of rows */
    EMPTY_LIST = 4, /* an empty list or dict */
    EMPTY_DICT = 5,
    LIST = 6, /* number of a shared list: one for all lists of the same dicts */
};
#define KIND(w) ((enum kind)((w) & 7))
#define INDEX(w) ((Py_ssize_t)((w) >> 3))
#define VALUE(w) ((int64_t)(w) >> 3)
#define MADE(kind, index) ((word)(index) << 3 | (kind))
#define AS_OBJECT(w) ((PyObject *)(uintptr_t)(w))
#define FROM_OBJECT(o) ((word)(uintptr_t)(o))
static const int64_t MOST_NUMBER = ((int64_t)1 << 60) - 1;

enum { MOST_COLUMNS = 64, MOST_SHARED = 1000, MOST_DIGITS = 48, MOST_LONG = 17 };
static const int64_t MISSING = INT64_MIN; /* the cell of a row without the key */

/* What is on the stack. Where `memo` names a place of the memo, that holds the value, which may have become another
 * since: an empty list becomes a list of rows. Only the slot that made a list or dict may fill it. */
struct slot {
    word value;
    Py_ssize_t memo;
    int is_new;
};

/* While all values are the same there is only that one. A value is a number << 1 | 1, or an object's index << 1. */
struct column {
    PyObject *key;
    int64_t *values;
    int64_t constant;
    Py_ssize_t filled, capacity;
};

struct span {
    Py_ssize_t start, count;
};

struct shared {
    PyObject *list;
    Py_ssize_t object; /* its index among the table's objects, -1 for none yet */
};

typedef struct {
    PyObject_HEAD
    PyObject *row_key;
    struct slot *stack;
    Py_ssize_t *marks;
    word *memo;
    Py_ssize_t depth, stack_room, mark_count, mark_room, memo_room, memo_next;
    uint64_t taken; /* bytes */
    uint64_t made; /* bytes of the objects that were made */
    int done;
    struct column columns[MOST_COLUMNS];
    Py_ssize_t column_count, rows;
    PyObject *objects, *object_ids;
    struct span *spans;
    Py_ssize_t span_count, span_room;
    struct shared *shared;
    Py_ssize_t shared_count, shared_room;
    Py_ssize_t *table; /* hash table of shared lists: 1 + number */
    Py_ssize_t table_size;
    PyObject *pair; /* the last tuple of two numbers, */
    int64_t pair_values[2];
    PyObject *pairs; /* and all of them */
    PyObject *empty_list; /* the one that cells refer to, */
    Py_ssize_t empty_index; /* 1 + its index among the objects */
} Unpickler;

static int fail(const char *what)
{
    PyErr_SetString(PyExc_ValueError, what);
    return -1;
}

/* Make room for one more element. */
static int grow(void **array, Py_ssize_t *room, Py_ssize_t count, size_t size)
{
    if (count < *room)
        return 0;
    Py_ssize_t more = count + (count >> 1) + 64;
    void *bigger = PyMem_RawRealloc(*array, (size_t)more * size);
    if (!bigger) {
        PyErr_NoMemory();
        return -1;
    }
    *array = bigger;
    *room = more;
    return 0;
}

static void drop(word value)
{
    if (KIND(value) == OBJECT)
        Py_XDECREF(AS_OBJECT(value));
}

static word keep(word value)
{
    if (KIND(value) == OBJECT)
        Py_INCREF(AS_OBJECT(value));
    return value;
}

/* --- the stack and the memo --- */

/* Push a value, whose reference the stack takes over (also if this fails). */
static int push(Unpickler *self, word value, Py_ssize_t memo, int is_new)
{
    if (grow((void **)&self->stack, &self->stack_room, self->depth, sizeof(struct slot)) < 0) {
        drop(value);
        return -1;
    }
    self->stack[self->depth++] = (struct slot){value, memo, is_new};
    return 0;
}

static int push_object(Unpickler *self, PyObject *object)
{
    if (object && Py_REFCNT(object) == 1) /* a new one */
        self->made += 64 + (PyUnicode_CheckExact(object) ? (uint64_t)PyUnicode_GET_LENGTH(object) * PyUnicode_KIND(object)
                            : PyBytes_CheckExact(object) || PyTuple_CheckExact(object)
                                ? (uint64_t)Py_SIZE(object) * (PyTuple_CheckExact(object) ? 40 : 1)
                                : 0);
    return object ? push(self, FROM_OBJECT(object), -1, 0) : -1;
}

static int push_number(Unpickler *self, int64_t value)
{
    if (-MOST_NUMBER <= value && value <= MOST_NUMBER)
        return push(self, (word)value << 3 | NUMBER, -1, 0);
    return push_object(self, PyLong_FromLongLong(value));
}

static word value_of(Unpickler *self, struct slot *slot)
{
    return slot->memo >= 0 ? self->memo[slot->memo] : slot->value;
}

/* Give a slot, and its place in the memo, another value. Takes over the reference. */
static void set_value(Unpickler *self, struct slot *slot, word value)
{
    if (slot->memo >= 0) {
        drop(self->memo[slot->memo]);
        self->memo[slot->memo] = keep(value);
    }
    drop(slot->value);
    slot->value = value;
}

/* The first slot above the stack's floor: the topmost mark. */
static Py_ssize_t floor_of(Unpickler *self)
{
    return self->mark_count ? self->marks[self->mark_count - 1] : 0;
}

static struct slot *top(Unpickler *self, Py_ssize_t count)
{
    if (self->depth - count < floor_of(self)) {
        fail("takes more from its stack than there is");
        return NULL;
    }
    return &self->stack[self->depth - count];
}

static void pop_to(Unpickler *self, Py_ssize_t depth)
{
    while (self->depth > depth)
        drop(self->stack[--self->depth].value);
}

/* Remove the topmost mark and return where it was, -1 if there is none. */
static Py_ssize_t pop_mark(Unpickler *self)
{
    if (!self->mark_count)
        return fail("has no mark where one is needed");
    return self->marks[--self->mark_count];
}

/* Return a new reference to a slot's value as an object. */
static PyObject *object_of(Unpickler *self, struct slot *slot)
{
    word value = value_of(self, slot);
    PyObject *made = NULL;
    switch (KIND(value)) {
    case OBJECT:
        return Py_NewRef(AS_OBJECT(value));
    case NUMBER:
        return PyLong_FromLongLong(VALUE(value));
    case LIST:
        return Py_NewRef(self->shared[INDEX(value)].list);
    case ROWS: {
        struct span *span = &self->spans[INDEX(value)];
        return PyObject_CallFunction((PyObject *)&PyRange_Type, "nn", span->start, span->start + span->count);
    }
    case ROW:
        fail("has an event that is in no list of events");
        return NULL;
    case EMPTY_LIST:
        made = PyList_New(0);
        break;
    case EMPTY_DICT:
        made = PyDict_New();
        break;
    }
    if (made) {
        self->made += 64;
        set_value(self, slot, FROM_OBJECT(Py_NewRef(made)));
    }
    return made;
}

static int memoize(Unpickler *self, uint64_t index)
{
    struct slot *slot = top(self, 1);
    if (!slot)
        return -1;
    if (index > self->taken) /* more than can exist so far */
        return fail("names a place of its memo that no file of its size has");
    if (slot->memo >= 0) { /* a second place: both must be one object */
        PyObject *object = object_of(self, slot);
        if (!object)
            return -1;
        Py_DECREF(object);
    }
    if ((Py_ssize_t)index >= self->memo_room) {
        Py_ssize_t before = self->memo_room;
        if (grow((void **)&self->memo, &self->memo_room, (Py_ssize_t)index, sizeof(word)) < 0)
            return -1;
        memset(self->memo + before, 0, (size_t)(self->memo_room - before) * sizeof(word));
    }
    if (self->memo[index])
        return fail("uses a place of its memo twice");
    word value = keep(value_of(self, slot));
    self->memo[index] = value;
    if (KIND(value) != OBJECT && KIND(value) != NUMBER)
        slot->memo = (Py_ssize_t)index;
    if (self->memo_next <= (Py_ssize_t)index)
        self->memo_next = (Py_ssize_t)index + 1;
    return 0;
}

/* --- the table of rows --- */

static Py_ssize_t add_object(Unpickler *self, PyObject *object)
{
    return PyList_Append(self->objects, object) < 0 ? -1 : PyList_GET_SIZE(self->objects) - 1;
}

/* Return the index of an object of the table, -1 with an error set. Texts and pairs are there once. */
static Py_ssize_t object_index(Unpickler *self, PyObject *object)
{
    if (!PyUnicode_CheckExact(object) && !PyTuple_CheckExact(object) && object != Py_None)
        return add_object(self, object);
    PyObject *known = PyDict_GetItemWithError(self->object_ids, object);
    if (known)
        return PyLong_AsSsize_t(known);
    if (PyErr_Occurred())
        return -1;
    Py_ssize_t index = add_object(self, object);
    PyObject *number = index < 0 ? NULL : PyLong_FromSsize_t(index);
    int failed = !number || PyDict_SetItem(self->object_ids, object, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : index;
}

/* Put what a slot holds into a cell's form. */
static int cell_of(Unpickler *self, struct slot *slot, int64_t *cell)
{
    word value = value_of(self, slot);
    Py_ssize_t index;
    if (KIND(value) == NUMBER) {
        *cell = VALUE(value) * 2 + 1;
        return 0;
    }
    if (KIND(value) == EMPTY_LIST) { /* one for all rows: what is empty by now stays empty */
        if (!self->empty_list)
            self->empty_list = PyList_New(0);
        if (!self->empty_list || (!self->empty_index && (index = add_object(self, self->empty_list)) < 0))
            return -1;
        if (!self->empty_index)
            self->empty_index = index + 1;
        *cell = (int64_t)(self->empty_index - 1) * 2;
        return 0;
    }
    if (KIND(value) == LIST && self->shared[INDEX(value)].object >= 0)
        index = self->shared[INDEX(value)].object;
    else {
        PyObject *object = object_of(self, slot);
        if (!object)
            return -1;
        index = object_index(self, object);
        Py_DECREF(object);
        if (index >= 0 && KIND(value) == LIST)
            self->shared[INDEX(value)].object = index;
    }
    *cell = (int64_t)index * 2;
    return index < 0 ? -1 : 0;
}

static struct column *column_of(Unpickler *self, PyObject *key)
{
    for (Py_ssize_t i = 0; i < self->column_count; ++i)
        if (self->columns[i].key == key)
            return &self->columns[i];
    for (Py_ssize_t i = 0; i < self->column_count; ++i)
        if (PyUnicode_Compare(self->columns[i].key, key) == 0)
            return &self->columns[i];
    if (self->column_count == MOST_COLUMNS) {
        fail("has events with too many different keys");
        return NULL;
    }
    struct column *new = &self->columns[self->column_count++];
    /* Rows up to this one do not have the key. */
    *new = (struct column){Py_NewRef(key), NULL, MISSING, self->rows - 1, 0};
    return new;
}

static int set_cell(Unpickler *self, struct column *column, int64_t cell)
{
    Py_ssize_t row = self->rows - 1;
    if (!column->values) {
        if (row == column->filled && (row == 0 || cell == column->constant)) {
            column->constant = cell;
            column->filled = row + 1;
            return 0;
        }
        if (grow((void **)&column->values, &column->capacity, row, sizeof(int64_t)) < 0)
            return -1;
        for (Py_ssize_t i = 0; i < column->filled; ++i)
            column->values[i] = column->constant;
    }
    if (grow((void **)&column->values, &column->capacity, row, sizeof(int64_t)) < 0)
        return -1;
    while (column->filled < row)
        column->values[column->filled++] = MISSING;
    column->values[row] = cell;
    column->filled = row + 1;
    return 0;
}

/* Push another row like one: a list of rows has consecutive numbers, also where a dict is in it twice. */
static int copy_row(Unpickler *self, Py_ssize_t row)
{
    ++self->rows;
    for (Py_ssize_t i = 0; i < self->column_count; ++i) {
        struct column *column = &self->columns[i];
        int64_t cell = row >= column->filled ? MISSING : column->values ? column->values[row] : column->constant;
        if (cell != MISSING && set_cell(self, column, cell) < 0)
            return -1;
    }
    return push(self, MADE(ROW, self->rows - 1), -1, 0);
}

static int recall(Unpickler *self, uint64_t index)
{
    if (index >= (uint64_t)self->memo_room || !self->memo[index])
        return fail("takes something from its memo that is not there");
    word value = self->memo[index];
    if (KIND(value) == ROW)
        return copy_row(self, INDEX(value));
    int may_change = KIND(value) != OBJECT && KIND(value) != NUMBER;
    return push(self, keep(value), may_change ? (Py_ssize_t)index : -1, 0);
}

static int is_row_key(Unpickler *self, struct slot *slot)
{
    word value = value_of(self, slot);
    PyObject *key = KIND(value) == OBJECT ? AS_OBJECT(value) : NULL;
    if (key == self->row_key)
        return key != NULL;
    return key && self->row_key && PyUnicode_CheckExact(key) && PyUnicode_Compare(key, self->row_key) == 0;
}

/* Add keys and values, `count` slots from `first` on, to the last row. */
static int fill_row(Unpickler *self, struct slot *first, Py_ssize_t count)
{
    for (struct slot *slot = first; slot < first + count; slot += 2) {
        word key = value_of(self, slot);
        if (KIND(key) != OBJECT || !PyUnicode_CheckExact(AS_OBJECT(key)))
            return fail("has an event with a key that is no text");
        struct column *column = column_of(self, AS_OBJECT(key));
        int64_t cell;
        if (!column || cell_of(self, slot + 1, &cell) < 0 || set_cell(self, column, cell) < 0)
            return -1;
    }
    return 0;
}

/* --- dicts --- */

static int fill_dict(Unpickler *self, struct slot *container, struct slot *first, Py_ssize_t count)
{
    if (count % 2)
        return fail("has a dict with a key without a value");
    word value = value_of(self, container);
    if (KIND(value) == EMPTY_DICT && container->is_new) {
        int is_row = 0;
        for (struct slot *slot = first; slot < first + count && !is_row; slot += 2)
            is_row = is_row_key(self, slot);
        if (is_row) {
            value = MADE(ROW, self->rows++);
            set_value(self, container, value);
        }
    }
    if (KIND(value) == ROW) {
        if (!container->is_new || INDEX(value) != self->rows - 1)
            return fail("changes an event after its end");
        return fill_row(self, first, count);
    }
    PyObject *dict = object_of(self, container);
    if (!dict)
        return -1;
    int failed = 0;
    self->made += (uint64_t)count * 64; /* an entry takes about 100 bytes, and a number may come with it */
    if (!container->is_new || !PyDict_CheckExact(dict))
        failed = fail("puts keys into something that is no new dict");
    for (struct slot *slot = first; slot < first + count && !failed; slot += 2) {
        PyObject *key = object_of(self, slot), *item = key ? object_of(self, slot + 1) : NULL;
        if (!item)
            failed = -1;
        else if (!PyUnicode_CheckExact(key) && !PyLong_CheckExact(key))
            failed = fail("has a dict with a key that is neither text nor an integer");
        else
            failed = PyDict_SetItem(dict, key, item);
        Py_XDECREF(key);
        Py_XDECREF(item);
    }
    Py_DECREF(dict);
    return failed;
}

/* --- lists --- */

/* Return the hash of the addresses of objects, none of which goes away while the table of shared lists is there. */
static size_t hash_of(PyObject *const *items, Py_ssize_t count)
{
    uint64_t hash = (uint64_t)count;
    for (Py_ssize_t i = 0; i < count; ++i) {
        hash = (hash ^ (uint64_t)(uintptr_t)items[i] >> 4) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    return (size_t)hash;
}

static PyObject *const *items_of(PyObject *list)
{
    return ((PyListObject *)list)->ob_item;
}

static int rehash(Unpickler *self)
{
    if (2 * self->shared_count < self->table_size)
        return 0;
    Py_ssize_t size = self->table_size ? 2 * self->table_size : 1024;
    Py_ssize_t *table = PyMem_RawCalloc((size_t)size, sizeof(Py_ssize_t));
    if (!table) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->shared_count; ++i) {
        PyObject *list = self->shared[i].list;
        size_t at = hash_of(items_of(list), PyList_GET_SIZE(list));
        while (table[at & (size_t)(size - 1)])
            ++at;
        table[at & (size_t)(size - 1)] = i + 1;
    }
    PyMem_RawFree(self->table);
    self->table = table;
    self->table_size = size;
    return 0;
}

/* Return the number of the shared list of these dicts, which it makes if need be; -1 with an error set. */
static Py_ssize_t share(Unpickler *self, struct slot *first, Py_ssize_t count)
{
    PyObject *items[MOST_SHARED];
    for (Py_ssize_t i = 0; i < count; ++i)
        items[i] = AS_OBJECT(value_of(self, first + i));
    if (rehash(self) < 0 ||
        grow((void **)&self->shared, &self->shared_room, self->shared_count, sizeof(struct shared)) < 0)
        return -1;
    size_t at = hash_of(items, count), mask = (size_t)(self->table_size - 1);
    for (; self->table[at & mask]; ++at) {
        PyObject *list = self->shared[self->table[at & mask] - 1].list;
        if (PyList_GET_SIZE(list) == count && !memcmp(items_of(list), items, (size_t)count * sizeof *items))
            return self->table[at & mask] - 1;
    }
    PyObject *list = PyList_New(count);
    if (!list)
        return -1;
    self->made += 64 + (uint64_t)count * sizeof(PyObject *);
    for (Py_ssize_t i = 0; i < count; ++i)
        PyList_SET_ITEM(list, i, Py_NewRef(items[i]));
    self->shared[self->shared_count] = (struct shared){list, -1};
    self->table[at & mask] = ++self->shared_count;
    return self->shared_count - 1;
}

/* Return whether all items are dicts that were made, so that their addresses say which they are. */
static int are_dicts(Unpickler *self, struct slot *first, Py_ssize_t count)
{
    if (count < 1 || count > MOST_SHARED)
        return 0;
    for (Py_ssize_t i = 0; i < count; ++i) {
        word value = value_of(self, first + i);
        if (KIND(value) != OBJECT || !PyDict_CheckExact(AS_OBJECT(value)))
            return 0;
    }
    return 1;
}

static int add_rows(Unpickler *self, struct slot *list, struct slot *first, Py_ssize_t count)
{
    word value = value_of(self, list);
    if (KIND(value) == EMPTY_LIST) {
        if (grow((void **)&self->spans, &self->span_room, self->span_count, sizeof(struct span)) < 0)
            return -1;
        self->spans[self->span_count] = (struct span){INDEX(value_of(self, first)), 0};
        value = MADE(ROWS, self->span_count++);
        set_value(self, list, value);
    }
    if (KIND(value) != ROWS)
        return fail("has a list of events and of other things");
    struct span *span = &self->spans[INDEX(value)];
    for (Py_ssize_t i = 0; i < count; ++i) {
        word row = value_of(self, first + i);
        if (KIND(row) != ROW || INDEX(row) != span->start + span->count)
            return fail("has a list of events with something else in it, or with an event that has no action");
        ++span->count;
    }
    return 0;
}

static int fill_list(Unpickler *self, struct slot *list, struct slot *first, Py_ssize_t count)
{
    if (!count)
        return 0;
    if (!list->is_new)
        return fail("puts items into something that is no new list");
    word value = value_of(self, list);
    if (KIND(value) == ROWS || KIND(value_of(self, first)) == ROW)
        return add_rows(self, list, first, count);
    if (KIND(value) == EMPTY_LIST && are_dicts(self, first, count)) {
        Py_ssize_t number = share(self, first, count);
        if (number < 0)
            return -1;
        set_value(self, list, MADE(LIST, number));
        return 0;
    }
    PyObject *object = object_of(self, list);
    if (object && KIND(value) == LIST) { /* more than pickle writes at once: it becomes a list of its own */
        Py_SETREF(object, PyList_GetSlice(object, 0, PyList_GET_SIZE(object)));
        if (object)
            set_value(self, list, FROM_OBJECT(Py_NewRef(object)));
    }
    if (!object)
        return -1;
    int failed = PyList_CheckExact(object) ? 0 : fail("puts items into something that is no list");
    self->made += (uint64_t)count * (KIND(value_of(self, first)) == OBJECT ? 9 : 72);
    for (Py_ssize_t i = 0; i < count && !failed; ++i) {
        PyObject *item = object_of(self, first + i);
        failed = item ? PyList_Append(object, item) : -1;
        Py_XDECREF(item);
    }
    Py_DECREF(object);
    return failed;
}

/* --- tuples --- */

/* Replace the topmost `count` slots by a tuple. Of numbers only: tuples of tuples may take forever to hash. */
static int make_tuple(Unpickler *self, Py_ssize_t count)
{
    struct slot *first = top(self, count);
    if (!first)
        return -1;
    int is_pair = count == 2 && KIND(first[0].value) == NUMBER && KIND(first[1].value) == NUMBER;
    if (is_pair && self->pair && self->pair_values[0] == VALUE(first[0].value) &&
        self->pair_values[1] == VALUE(first[1].value)) {
        pop_to(self, self->depth - 2);
        return push_object(self, Py_NewRef(self->pair));
    }
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; i < count && tuple; ++i) {
        word value = value_of(self, first + i);
        PyObject *item = KIND(value) == NUMBER || KIND(value) == OBJECT ? object_of(self, first + i) : NULL;
        if (item && (PyLong_Check(item) || PyFloat_CheckExact(item) || item == Py_None))
            PyTuple_SET_ITEM(tuple, i, item);
        else {
            Py_XDECREF(item);
            Py_CLEAR(tuple);
            if (!PyErr_Occurred())
                fail("has a tuple of other things than numbers");
        }
    }
    if (tuple && is_pair) {
        int64_t values[2] = {VALUE(first[0].value), VALUE(first[1].value)};
        PyObject *known = PyDict_SetDefault(self->pairs, tuple, tuple);
        Py_XSETREF(tuple, Py_XNewRef(known));
        if (tuple) {
            Py_XSETREF(self->pair, Py_NewRef(tuple));
            memcpy(self->pair_values, values, sizeof values);
        }
    }
    if (!tuple)
        return -1;
    pop_to(self, self->depth - count);
    return push_object(self, tuple);
}

/* --- opcodes --- */

static uint64_t little(const uint8_t *bytes, int count)
{
    uint64_t value = 0;
    for (int i = 0; i < count; ++i)
        value |= (uint64_t)bytes[i] << 8 * i;
    return value;
}

static int push_long(Unpickler *self, const uint8_t *bytes, int count)
{
    if (count > MOST_LONG)
        return fail("has a number of more than 128 bits");
    if (count > 7)
        return push_object(self, _PyLong_FromByteArray(bytes, (size_t)count, 1, 1));
    int64_t value = (int64_t)little(bytes, count);
    if (count && bytes[count - 1] & 0x80)
        value -= (int64_t)1 << 8 * count;
    return push_number(self, value);
}

/* A number in digits, which `text` has up to its end. */
static int push_digits(Unpickler *self, char opcode, const char *text, Py_ssize_t length)
{
    char digits[MOST_DIGITS + 1];
    if (length < 1 || length > MOST_DIGITS)
        return fail("has a number of too many digits");
    memcpy(digits, text, (size_t)length);
    digits[length] = 0;
    if (opcode == 'I' && length == 2 && digits[0] == '0' && (digits[1] == '0' || digits[1] == '1'))
        return push_object(self, PyBool_FromLong(digits[1] == '1'));
    if (opcode == 'F') {
        double value = PyOS_string_to_double(digits, NULL, NULL);
        return value == -1.0 && PyErr_Occurred() ? -1 : push_object(self, PyFloat_FromDouble(value));
    }
    if (opcode == 'L' && digits[length - 1] == 'L')
        digits[length - 1] = 0;
    PyObject *number = PyLong_FromString(digits, NULL, 10);
    int overflow = 0;
    int64_t value = number ? PyLong_AsLongLongAndOverflow(number, &overflow) : 0;
    if (!number || overflow)
        return push_object(self, number);
    Py_DECREF(number);
    return push_number(self, value);
}

static int index_of_digits(const char *text, Py_ssize_t length, uint64_t *index)
{
    *index = 0;
    if (length < 1 || length > 18)
        return fail("has a place of its memo that is no number");
    for (Py_ssize_t i = 0; i < length; ++i) {
        if (text[i] < '0' || text[i] > '9')
            return fail("has a place of its memo that is no number");
        *index = *index * 10 + (uint64_t)(text[i] - '0');
    }
    return 0;
}

static int refuse_import(PyObject *module, PyObject *name)
{
    if (module && name)
        PyErr_Format(PyExc_ImportError, "%.80U.%.80U", module, name);
    Py_XDECREF(module);
    Py_XDECREF(name);
    return -1;
}

static int with_line(Unpickler *self, uint8_t opcode, const char *text, Py_ssize_t length)
{
    uint64_t index;
    switch (opcode) {
    case 'V':
        return push_object(self, PyUnicode_DecodeRawUnicodeEscape(text, length, "strict"));
    case 'p':
        return index_of_digits(text, length, &index) < 0 ? -1 : memoize(self, index);
    case 'g':
        return index_of_digits(text, length, &index) < 0 ? -1 : recall(self, index);
    default:
        return push_digits(self, (char)opcode, text, length);
    }
}

static int build(Unpickler *self, uint8_t opcode)
{
    Py_ssize_t mark;
    struct slot *container;
    int failed;
    switch (opcode) {
    case 't':
        mark = pop_mark(self);
        return mark < 0 ? -1 : make_tuple(self, self->depth - mark);
    case 'l':
    case 'd': /* the container lies below its items, as it does for APPENDS and SETITEMS */
        mark = pop_mark(self);
        if (mark < 0 || push(self, MADE(opcode == 'l' ? EMPTY_LIST : EMPTY_DICT, 0), -1, 1) < 0)
            return -1;
        container = &self->stack[self->depth - 1];
        {
            struct slot made = *container;
            memmove(self->stack + mark + 1, self->stack + mark,
                    (size_t)(self->depth - 1 - mark) * sizeof(struct slot));
            self->stack[mark] = made;
        }
        container = &self->stack[mark++];
        break;
    case 'e':
    case 'u':
        mark = pop_mark(self);
        if (mark < 0)
            return -1;
        if (mark - 1 < floor_of(self))
            return fail("has nothing to put items into");
        container = &self->stack[mark - 1];
        break;
    default: /* 'a', 's' */
        container = top(self, opcode == 'a' ? 2 : 3);
        if (!container)
            return -1;
        mark = container - self->stack + 1;
    }
    Py_ssize_t count = self->depth - mark;
    int is_list = opcode == 'l' || opcode == 'e' || opcode == 'a';
    failed = (is_list ? fill_list : fill_dict)(self, container, container + 1, count);
    pop_to(self, mark);
    return failed;
}

/* Execute the opcode at the beginning of `data`; return how many bytes it has, 0 if it is cut, -1 with an error set. */
static Py_ssize_t execute(Unpickler *self, const uint8_t *data, Py_ssize_t size)
{
    uint8_t opcode = data[0];
    const uint8_t *rest = data + 1;
    Py_ssize_t here = size - 1;
    int width = 0; /* bytes of an argument of fixed length */
    switch (opcode) {
    case 0x80: case 'K': case 'h': case 'q': case 0x8a: case 0x8c: case 'C':
        width = 1;
        break;
    case 'M':
        width = 2;
        break;
    case 'J': case 'j': case 'r': case 'X': case 'B': case 0x8b:
        width = 4;
        break;
    case 0x95: case 'G': case 0x8d: case 0x8e:
        width = 8;
    }
    if (here < width)
        return 0;
    uint64_t argument = little(rest, width);
    Py_ssize_t length = 1 + width;
    int failed = 0;
    switch (opcode) {
    case 0x80: /* PROTO */
        failed = argument > 5 ? fail("is of a pickle protocol that is not known") : 0;
        break;
    case 0x95: /* FRAME: says only how much to read at once */
        break;
    case '(':
        if (grow((void **)&self->marks, &self->mark_room, self->mark_count, sizeof(Py_ssize_t)) < 0)
            return -1;
        self->marks[self->mark_count++] = self->depth;
        break;
    case '.':
        self->done = 1;
        if (self->depth != 1 || self->mark_count)
            failed = fail("does not end with one value");
        break;
    case '0':
        failed = top(self, 1) ? 0 : -1;
        if (!failed)
            pop_to(self, self->depth - 1);
        break;
    case 'N':
        failed = push_object(self, Py_NewRef(Py_None));
        break;
    case 0x88: case 0x89:
        failed = push_object(self, PyBool_FromLong(opcode == 0x88));
        break;
    case 'K': case 'M':
        failed = push_number(self, (int64_t)argument);
        break;
    case 'J':
        failed = push_number(self, (int32_t)argument);
        break;
    case 'G': {
        double value = PyFloat_Unpack8((const char *)rest, 0);
        failed = value == -1.0 && PyErr_Occurred() ? -1 : push_object(self, PyFloat_FromDouble(value));
        break;
    }
    case 'h': case 'j':
        failed = recall(self, argument);
        break;
    case 'q': case 'r':
        failed = memoize(self, argument);
        break;
    case 0x94:
        failed = memoize(self, (uint64_t)self->memo_next);
        break;
    case 0x8a: case 0x8b: case 0x8c: case 'X': case 0x8d: case 'C': case 'B': case 0x8e:
        if (argument > (uint64_t)(here - width))
            return 0;
        length += (Py_ssize_t)argument;
        if (opcode == 0x8a || opcode == 0x8b)
            failed = push_long(self, rest + width, argument > MOST_LONG ? MOST_LONG + 1 : (int)argument);
        else if (opcode == 'C' || opcode == 'B' || opcode == 0x8e)
            failed = push_object(self, PyBytes_FromStringAndSize((const char *)rest + width, (Py_ssize_t)argument));
        else
            failed = push_object(self, PyUnicode_DecodeUTF8((const char *)rest + width, (Py_ssize_t)argument,
                                                            "surrogatepass"));
        break;
    case 'I': case 'L': case 'F': case 'V': case 'p': case 'g': {
        const uint8_t *end = memchr(rest, '\n', (size_t)here);
        if (!end)
            return 0;
        length = end - data + 1;
        failed = with_line(self, opcode, (const char *)rest, end - rest);
        break;
    }
    case ']': case '}':
        failed = push(self, MADE(opcode == ']' ? EMPTY_LIST : EMPTY_DICT, 0), -1, 1);
        break;
    case ')': case 0x85: case 0x86: case 0x87:
        failed = make_tuple(self, opcode == ')' ? 0 : opcode - 0x84);
        break;
    case 't': case 'l': case 'd': case 'e': case 'u': case 'a': case 's':
        failed = build(self, opcode);
        break;
    case 'c': case 'i': { /* GLOBAL, INST */
        const uint8_t *end = memchr(rest, '\n', (size_t)here);
        const uint8_t *last = end ? memchr(end + 1, '\n', (size_t)(data + size - end - 1)) : NULL;
        if (!last)
            return 0;
        return refuse_import(PyUnicode_DecodeUTF8((const char *)rest, end - rest, "replace"),
                             PyUnicode_DecodeUTF8((const char *)end + 1, last - end - 1, "replace"));
    }
    case 0x93: { /* STACK_GLOBAL */
        struct slot *names = top(self, 2);
        if (!names)
            return -1;
        PyObject *module = object_of(self, names), *name = object_of(self, names + 1);
        if (module && name && !(PyUnicode_CheckExact(module) && PyUnicode_CheckExact(name)))
            fail("imports something that has no name");
        else
            return refuse_import(module, name);
        Py_XDECREF(module);
        Py_XDECREF(name);
        return -1;
    }
    default:
        PyErr_Format(PyExc_ValueError, "holds something that plain data does not need (pickle opcode %d)", opcode);
        return -1;
    }
    return failed ? -1 : length;
}

/* --- the type --- */

/* Return about how many bytes the machine and its objects take. */
static uint64_t held(Unpickler *self)
{
    uint64_t bytes = self->made + (uint64_t)self->stack_room * sizeof(struct slot) +
        (uint64_t)(self->mark_room + self->memo_room + self->table_size) * 8 +
        (uint64_t)self->span_room * sizeof(struct span) + (uint64_t)self->shared_room * sizeof(struct shared) +
        (uint64_t)PyList_GET_SIZE(self->objects) * 8 +
        (uint64_t)(PyDict_GET_SIZE(self->object_ids) + PyDict_GET_SIZE(self->pairs)) * 100;
    for (Py_ssize_t i = 0; i < self->column_count; ++i)
        bytes += (uint64_t)self->columns[i].capacity * sizeof(int64_t);
    return bytes;
}

static PyObject *Unpickler_feed(Unpickler *self, PyObject *args)
{
    Py_buffer view;
    unsigned long long memory = UINT64_MAX;
    if (!PyArg_ParseTuple(args, "y*|K", &view, &memory))
        return NULL;
    const uint8_t *bytes = view.buf;
    Py_ssize_t at = 0, length = 0;
    unsigned executed = 0;
    while (!self->done && at < view.len) {
        if (!(++executed & 4095) && held(self) > memory) {
            length = fail("takes more memory than a file of its size may");
            break;
        }
        length = execute(self, bytes + at, view.len - at);
        if (length <= 0)
            break;
        at += length;
        self->taken += (uint64_t)length;
    }
    PyBuffer_Release(&view);
    return length < 0 ? NULL : PyLong_FromSsize_t(at);
}

static PyObject *Unpickler_value(Unpickler *self, PyObject *Py_UNUSED(ignored))
{
    if (!self->done || self->depth != 1) {
        fail("has not come to its end");
        return NULL;
    }
    return object_of(self, self->stack);
}

/* A column's words, as a buffer that owns them. */
typedef struct {
    PyObject_HEAD
    int64_t *values;
    Py_ssize_t bytes;
} Words;

static int Words_buffer(Words *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, (PyObject *)self, self->values, self->bytes, 0, flags);
}

static void Words_dealloc(Words *self)
{
    PyMem_RawFree(self->values);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyBufferProcs words_buffer = {.bf_getbuffer = (getbufferproc)Words_buffer};
static PyTypeObject words_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cudatool.collect._unpickle.Words",
    .tp_basicsize = sizeof(Words),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)Words_dealloc,
    .tp_as_buffer = &words_buffer,
};

/* Return {key: words or the one cell of all rows}, and release them. */
static PyObject *Unpickler_take_columns(Unpickler *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *result = PyDict_New();
    for (Py_ssize_t i = 0; i < self->column_count && result; ++i) {
        struct column *column = &self->columns[i];
        if (column->filled < self->rows && (column->values || column->constant != MISSING)) {
            /* The last rows do not have the key. */
            Py_ssize_t last = self->rows - 1;
            int64_t *room = column->values;
            if (!room || column->capacity < self->rows) {
                room = PyMem_RawRealloc(room, (size_t)self->rows * sizeof(int64_t));
                if (!room) {
                    PyErr_NoMemory();
                    Py_CLEAR(result);
                    break;
                }
                if (!column->values)
                    for (Py_ssize_t row = 0; row < column->filled; ++row)
                        room[row] = column->constant;
                column->values = room;
                column->capacity = self->rows;
            }
            while (column->filled <= last)
                column->values[column->filled++] = MISSING;
        }
        PyObject *value;
        if (column->values) {
            Words *words = PyObject_New(Words, &words_type);
            if (words) {
                words->values = column->values;
                words->bytes = self->rows * (Py_ssize_t)sizeof(int64_t);
                column->values = NULL;
                column->filled = column->capacity = 0;
            }
            value = (PyObject *)words;
        } else
            value = PyLong_FromLongLong(column->constant);
        if (!value || PyDict_SetItem(result, column->key, value) < 0)
            Py_CLEAR(result);
        Py_XDECREF(value);
    }
    return result;
}

static PyObject *Unpickler_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"row_key", NULL};
    PyObject *row_key = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O", names, &row_key))
        return NULL;
    if (row_key != Py_None && !PyUnicode_CheckExact(row_key)) {
        PyErr_SetString(PyExc_TypeError, "row_key must be a str or None");
        return NULL;
    }
    Unpickler *self = (Unpickler *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->row_key = row_key == Py_None ? NULL : Py_NewRef(row_key);
    self->objects = PyList_New(0);
    self->object_ids = PyDict_New();
    self->pairs = PyDict_New();
    /* Reserve one slot now, so that there is a stack to point into. */
    int failed = grow((void **)&self->stack, &self->stack_room, 0, sizeof(struct slot)) < 0;
    if (failed || !self->objects || !self->object_ids || !self->pairs)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void Unpickler_dealloc(Unpickler *self)
{
    pop_to(self, 0);
    for (Py_ssize_t i = 0; i < self->memo_room; ++i)
        drop(self->memo[i]);
    for (Py_ssize_t i = 0; i < self->shared_count; ++i)
        Py_DECREF(self->shared[i].list);
    for (Py_ssize_t i = 0; i < self->column_count; ++i) {
        Py_DECREF(self->columns[i].key);
        PyMem_RawFree(self->columns[i].values);
    }
    PyMem_RawFree(self->stack);
    PyMem_RawFree(self->marks);
    PyMem_RawFree(self->memo);
    PyMem_RawFree(self->spans);
    PyMem_RawFree(self->shared);
    PyMem_RawFree(self->table);
    Py_XDECREF(self->row_key);
    Py_XDECREF(self->objects);
    Py_XDECREF(self->object_ids);
    Py_XDECREF(self->pair);
    Py_XDECREF(self->pairs);
    Py_XDECREF(self->empty_list);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *get_rows(Unpickler *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(self->rows);
}

static PyObject *get_done(Unpickler *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(self->done);
}

static PyObject *get_objects(Unpickler *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->objects);
}

static PyMethodDef methods[] = {
    {"feed", (PyCFunction)Unpickler_feed, METH_VARARGS, NULL},
    {"value", (PyCFunction)Unpickler_value, METH_NOARGS, NULL},
    {"take_columns", (PyCFunction)Unpickler_take_columns, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"rows", (getter)get_rows, NULL, NULL, NULL},
    {"done", (getter)get_done, NULL, NULL, NULL},
    {"objects", (getter)get_objects, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject unpickler_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cudatool.collect._unpickle.Unpickler",
    .tp_basicsize = sizeof(Unpickler),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Unpickler_new,
    .tp_dealloc = (destructor)Unpickler_dealloc,
    .tp_methods = methods,
    .tp_getset = properties,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_unpickle", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__unpickle(void)
{
    if (PyType_Ready(&words_type) < 0)
        return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddType(made, &unpickler_type) < 0)
        Py_CLEAR(made);
    return made;
}
