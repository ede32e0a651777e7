/* Passes over millions of allocations in the order in which they happened, each of which needs to know what is there at
 * its moment. Arrays are contiguous NumPy arrays of the types said here; their lengths are checked, their numbers are
 * not trusted.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* --- arguments --- */

enum { MOST_ARRAYS = 8 };

struct arrays {
    Py_buffer views[MOST_ARRAYS];
    int count;
};

static void release(struct arrays *arrays)
{
    while (arrays->count)
        PyBuffer_Release(&arrays->views[--arrays->count]);
}

/* Return the elements of an array of items of `size` bytes, NULL with an error set; `length` -1 becomes its length. */
static void *open_array(struct arrays *arrays, PyObject *object, Py_ssize_t size, Py_ssize_t *length, int writable)
{
    Py_buffer *view = &arrays->views[arrays->count];
    if (PyObject_GetBuffer(object, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return NULL;
    ++arrays->count;
    if (*length < 0)
        *length = view->len / size;
    if (view->len != *length * size) {
        PyErr_SetString(PyExc_ValueError, "arrays of different lengths, or of another type");
        return NULL;
    }
    return view->buf;
}

/* --- a set of small integers with fast neighbours: a tree of 64-bit words, each bit of which stands for a word below */

enum { MOST_LEVELS = 8 };

struct set {
    uint64_t *levels[MOST_LEVELS];
    int depth;
};

static void free_set(struct set *set)
{
    for (int i = 0; i < set->depth; ++i)
        PyMem_RawFree(set->levels[i]);
    set->depth = 0;
}

static int make_set(struct set *set, Py_ssize_t size)
{
    set->depth = 0;
    do {
        size = (size + 63) / 64 + 1;
        set->levels[set->depth] = PyMem_RawCalloc((size_t)size, sizeof(uint64_t));
        if (!set->levels[set->depth]) {
            free_set(set);
            PyErr_NoMemory();
            return -1;
        }
        ++set->depth;
    } while (size > 2 && set->depth < MOST_LEVELS);
    return 0;
}

static int contains(const struct set *set, Py_ssize_t i)
{
    return set->levels[0][i >> 6] >> (i & 63) & 1;
}

static void insert(struct set *set, Py_ssize_t i)
{
    for (int level = 0; level < set->depth; ++level, i >>= 6)
        set->levels[level][i >> 6] |= (uint64_t)1 << (i & 63);
}

static void take_out(struct set *set, Py_ssize_t i)
{
    for (int level = 0; level < set->depth; ++level, i >>= 6)
        if (set->levels[level][i >> 6] &= ~((uint64_t)1 << (i & 63)))
            return;
}

/* Return the smallest element that is above `i` (from -1 on), -1 for none. */
static Py_ssize_t above(const struct set *set, Py_ssize_t i)
{
    for (int level = 0; level < set->depth; ++level) {
        Py_ssize_t from = i + 1, at = from >> 6;
        uint64_t rest = set->levels[level][at] >> (from & 63) << (from & 63);
        if (rest) {
            i = at << 6 | __builtin_ctzll(rest);
            while (level--)
                i = i << 6 | __builtin_ctzll(set->levels[level][i]);
            return i;
        }
        i = at;
    }
    return -1;
}

/* Return the largest element that is not above `i`, -1 for none. */
static Py_ssize_t up_to(const struct set *set, Py_ssize_t i)
{
    for (int level = 0; level < set->depth && i >= 0; ++level) {
        uint64_t rest = set->levels[level][i >> 6] << (63 - (i & 63));
        if (rest) {
            i -= __builtin_clzll(rest);
            while (level--)
                i = i << 6 | (63 - __builtin_clzll(set->levels[level][i]));
            return i;
        }
        i = (i >> 6) - 1;
    }
    return -1;
}

/* --- pairs --- */

enum { BORN = 1, FREED = 2, ENDED = 4 };

struct place {
    uint64_t address;
    int64_t row; /* 1 + the last row that was born here */
    int8_t device;
};

static struct place *find_place(struct place *places, size_t mask, uint64_t address, int8_t device)
{
    uint64_t hash = (address ^ (uint64_t)(uint8_t)device << 56) * 0x9E3779B97F4A7C15u;
    size_t at = (size_t)(hash >> 20);
    for (;; ++at) {
        struct place *place = &places[at & mask];
        if (!place->row || (place->address == address && place->device == device))
            return place;
    }
}

/* pair(roles: u1, addresses: u8, devices: i1, starts: i8, freed: i8, ends: i8) -> None
 *
 * The last three have an element for each birth. They are given the positions of the birth, of the first free and of
 * the first end after it; an end that never came is at the next birth of the address, else at the number of events. */
static PyObject *sweep_pair(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *objects[6], *result = NULL;
    struct arrays arrays = {.count = 0};
    Py_ssize_t count = -1, births = -1;
    if (!PyArg_ParseTuple(args, "OOOOOO", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4], &objects[5]))
        return NULL;
    const uint8_t *roles;
    const uint64_t *addresses;
    const int8_t *devices;
    int64_t *starts, *freed, *ends;
    struct place *places = NULL;
    if (!(roles = open_array(&arrays, objects[0], 1, &count, 0)) ||
        !(addresses = open_array(&arrays, objects[1], 8, &count, 0)) ||
        !(devices = open_array(&arrays, objects[2], 1, &count, 0)) ||
        !(starts = open_array(&arrays, objects[3], 8, &births, 1)) ||
        !(freed = open_array(&arrays, objects[4], 8, &births, 1)) ||
        !(ends = open_array(&arrays, objects[5], 8, &births, 1)))
        goto done;
    size_t room = 1024, used = 0;
    Py_ssize_t row = 0;
    if (!(places = PyMem_RawCalloc(room, sizeof *places))) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        struct place *place = find_place(places, room - 1, addresses[i], devices[i]);
        if (roles[i] & BORN) {
            if (row >= births) {
                PyErr_SetString(PyExc_ValueError, "more births than rows");
                goto done;
            }
            if (place->row) {
                if (ends[place->row - 1] == count)
                    ends[place->row - 1] = i;
            } else if (2 * ++used > room) {
                struct place *more = PyMem_RawCalloc(2 * room, sizeof *places);
                if (!more) {
                    PyErr_NoMemory();
                    goto done;
                }
                for (size_t j = 0; j < room; ++j)
                    if (places[j].row)
                        *find_place(more, 2 * room - 1, places[j].address, places[j].device) = places[j];
                PyMem_RawFree(places);
                places = more;
                room *= 2;
                place = find_place(places, room - 1, addresses[i], devices[i]);
            }
            starts[row] = i;
            freed[row] = ends[row] = count;
            *place = (struct place){addresses[i], ++row, devices[i]};
        } else if (place->row) {
            Py_ssize_t last = place->row - 1;
            if (roles[i] & FREED && freed[last] == count)
                freed[last] = i;
            if (roles[i] & ENDED && ends[last] == count)
                ends[last] = i;
        }
    }
    if (row < births) {
        PyErr_SetString(PyExc_ValueError, "fewer births than rows");
        goto done;
    }
    for (Py_ssize_t i = 0; i < births; ++i) {
        if (freed[i] > ends[i])
            freed[i] = ends[i];
    }
    result = Py_NewRef(Py_None);
done:
    PyMem_RawFree(places);
    release(&arrays);
    return result;
}

/* --- overlaps --- */

/* Without a sign, so that no number that a file has can overflow. */
static uint64_t end_of(int64_t address, int64_t size)
{
    return (uint64_t)address + (uint64_t)size;
}

/* The bytes from one number to another; what overflows wraps around. */
static int64_t gap(int64_t from, int64_t to)
{
    return (int64_t)((uint64_t)to - (uint64_t)from);
}

/* overlaps(events: i8, ranks: i8, addresses: i8, sizes: i8) -> (count, position of the first, -1 for none)
 *
 * An event is the number of a row that is born, or of one that dies as ~number. A row's rank is that of its address
 * among all addresses. A row that is born over another is counted, and not there. */
static PyObject *sweep_overlaps(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *objects[4], *result = NULL;
    struct arrays arrays = {.count = 0};
    Py_ssize_t count = -1, rows = -1, found = 0, first = -1;
    if (!PyArg_ParseTuple(args, "OOOO", &objects[0], &objects[1], &objects[2], &objects[3]))
        return NULL;
    const int64_t *events, *ranks, *addresses, *sizes;
    int64_t *owner = NULL; /* 1 + the row that is there, by rank */
    struct set live = {.depth = 0};
    if (!(events = open_array(&arrays, objects[0], 8, &count, 0)) ||
        !(ranks = open_array(&arrays, objects[1], 8, &rows, 0)) ||
        !(addresses = open_array(&arrays, objects[2], 8, &rows, 0)) ||
        !(sizes = open_array(&arrays, objects[3], 8, &rows, 0)))
        goto done;
    if (!(owner = PyMem_RawCalloc((size_t)rows + 1, sizeof *owner))) {
        PyErr_NoMemory();
        goto done;
    }
    if (make_set(&live, rows) < 0)
        goto done;
    for (Py_ssize_t i = 0; i < count; ++i) {
        int64_t row = events[i] < 0 ? ~events[i] : events[i];
        if (row >= rows || ranks[row] < 0 || ranks[row] >= rows) {
            PyErr_SetString(PyExc_ValueError, "an event of a row that is not there");
            goto done;
        }
        Py_ssize_t rank = (Py_ssize_t)ranks[row];
        if (events[i] < 0) {
            if (owner[rank] == row + 1) {
                owner[rank] = 0;
                take_out(&live, rank);
            }
            continue;
        }
        Py_ssize_t below = up_to(&live, rank), next = above(&live, rank);
        int64_t under = below < 0 ? -1 : owner[below] - 1, over = next < 0 ? -1 : owner[next] - 1;
        if ((under >= 0 && end_of(addresses[under], sizes[under]) > (uint64_t)addresses[row]) ||
            (over >= 0 && (uint64_t)addresses[over] < end_of(addresses[row], sizes[row]))) {
            first = found++ ? first : i;
            continue;
        }
        owner[rank] = row + 1;
        insert(&live, rank);
    }
    result = Py_BuildValue("nn", found, first);
done:
    free_set(&live);
    PyMem_RawFree(owner);
    release(&arrays);
    return result;
}

/* --- tails --- */

enum { BLOCK = 1, BLOCK_FREE = 2, BLOCK_GONE = 3, SEGMENT = 4, SEGMENT_GONE = 5 };

/* add_tails(what: u1, ranks: i8, addresses: i8, sizes: i8, limit, remainder) -> None
 *
 * Gives blocks in `sizes` the free bytes that follow them, where these are too few to be split off: at most `remainder`,
 * or any number for a block of at least `limit` bytes. Frees get the size of their block. */
static PyObject *sweep_add_tails(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *objects[4], *result = NULL;
    struct arrays arrays = {.count = 0};
    Py_ssize_t count = -1;
    long long limit, remainder;
    if (!PyArg_ParseTuple(args, "OOOOLL", &objects[0], &objects[1], &objects[2], &objects[3], &limit, &remainder))
        return NULL;
    const uint8_t *what;
    const int64_t *ranks, *addresses;
    int64_t *sizes, *starts = NULL, *held = NULL, *stops = NULL; /* by rank: address, block's size, segment's end */
    struct set blocks = {.depth = 0}, segments = {.depth = 0};
    if (!(what = open_array(&arrays, objects[0], 1, &count, 0)) ||
        !(ranks = open_array(&arrays, objects[1], 8, &count, 0)) ||
        !(addresses = open_array(&arrays, objects[2], 8, &count, 0)) ||
        !(sizes = open_array(&arrays, objects[3], 8, &count, 1)))
        goto done;
    starts = PyMem_RawCalloc((size_t)count + 1, sizeof *starts);
    held = PyMem_RawCalloc((size_t)count + 1, sizeof *held);
    stops = PyMem_RawCalloc((size_t)count + 1, sizeof *stops);
    if (!starts || !held || !stops) {
        PyErr_NoMemory();
        goto done;
    }
    if (make_set(&blocks, count) < 0 || make_set(&segments, count) < 0)
        goto done;
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (ranks[i] < 0 || ranks[i] >= count) {
            PyErr_SetString(PyExc_ValueError, "a rank that is not there");
            goto done;
        }
        Py_ssize_t rank = (Py_ssize_t)ranks[i];
        int64_t address = starts[rank] = addresses[i];
        switch (what[i]) {
        case BLOCK: {
            Py_ssize_t segment = up_to(&segments, rank), next = above(&blocks, rank);
            int64_t stop = segment < 0 ? 0 : stops[segment];
            if (address < stop) {
                int64_t room = gap(address, next >= 0 && starts[next] < stop ? starts[next] : stop);
                if (room > sizes[i] && !(sizes[i] < limit && gap(sizes[i], room) > remainder))
                    sizes[i] = room;
            }
            held[rank] = sizes[i];
            insert(&blocks, rank);
            break;
        }
        case BLOCK_FREE:
        case BLOCK_GONE:
            if (contains(&blocks, rank)) {
                sizes[i] = held[rank];
                if (what[i] == BLOCK_GONE)
                    take_out(&blocks, rank);
            }
            break;
        case SEGMENT:
            stops[rank] = (int64_t)end_of(address, sizes[i]);
            insert(&segments, rank);
            break;
        case SEGMENT_GONE:
            take_out(&segments, rank);
        }
    }
    result = Py_NewRef(Py_None);
done:
    free_set(&blocks);
    free_set(&segments);
    PyMem_RawFree(starts);
    PyMem_RawFree(held);
    PyMem_RawFree(stops);
    release(&arrays);
    return result;
}

static PyMethodDef methods[] = {
    {"pair", sweep_pair, METH_VARARGS, NULL},
    {"overlaps", sweep_overlaps, METH_VARARGS, NULL},
    {"add_tails", sweep_add_tails, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_sweep", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__sweep(void)
{
    return PyModule_Create(&module);
}
