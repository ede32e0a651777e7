/* What a launch accessed, from the maps that its code has set (cudatool/sim/jit/footprint.py): small launches touch a few
 * pages, and NumPy takes longer to begin than they take to run.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, MAPS = 3, MANY = 512 /* pages; more are given back rather than cleared */ };
static const uint64_t EVERY_BYTE = 0x0101010101010101; /* a word of a map whose bytes are all accessed */

/* Maps of what is read, written and updated atomically, each a byte for a byte; and marks, one for each of `count` pages: a
 * multiple of the pages that the system counts in. */
typedef struct {
    unsigned char *maps[MAPS], *marks;
    Py_ssize_t count;
} Footprint;

typedef struct {
    Py_ssize_t *numbers, count, room;
} Pages;

static int add_page(Pages *pages, Py_ssize_t number) {
    if (pages->count && pages->numbers[pages->count - 1] >= number) return 0;
    if (pages->count == pages->room) {
        Py_ssize_t room = pages->room ? 2 * pages->room : 64;
        Py_ssize_t *more = PyMem_Realloc(pages->numbers, (size_t)room * sizeof *more);
        if (!more) return -1;
        pages->numbers = more, pages->room = room;
    }
    pages->numbers[pages->count++] = number;
    return 0;
}

/* Find the pages that were marked, and those after them: an access may cross over. Returns 0 or -1. */
static int find_pages(const Footprint *self, Pages *pages) {
    /* The marks are long and nearly empty: only what the system has given memory for was ever written. */
    Py_ssize_t bytes = (Py_ssize_t)sysconf(_SC_PAGESIZE), groups = self->count / bytes;
    unsigned char *resident = PyMem_Malloc((size_t)groups + 1);
    int failed = !resident || mincore(self->marks, (size_t)self->count, resident);
    for (Py_ssize_t group = 0; !failed && group < groups; ++group) {
        if (!(resident[group] & 1)) continue;
        const unsigned char *marks = self->marks + group * bytes;
        for (Py_ssize_t at = 0; !failed && at < bytes; at += 8) {
            uint64_t word;
            memcpy(&word, marks + at, sizeof word);
            for (Py_ssize_t n = 0; word && n < 8 && !failed; ++n) {
                Py_ssize_t page = group * bytes + at + n;
                if (marks[at + n]) failed = add_page(pages, page) || (page + 1 < self->count && add_page(pages, page + 1));
            }
        }
    }
    PyMem_Free(resident);
    return failed ? -1 : 0;
}

/* The run of bytes in progress, accessed in the same ways. */
typedef struct {
    PyObject *found;
    unsigned long long base;
    Py_ssize_t start;
    unsigned flags;
} Run;

/* From the byte `at` on, bytes are accessed in the ways `flags`. Returns 0, or -1 with an exception. */
static int go_on(Run *run, Py_ssize_t at, unsigned flags) {
    if (flags == run->flags) return 0;
    int failed = 0;
    if (run->flags) {
        PyObject *range = Py_BuildValue("(KnI)", run->base + (unsigned long long)run->start, at - run->start, run->flags);
        failed = !range || PyList_Append(run->found, range);
        Py_XDECREF(range);
    }
    run->start = at, run->flags = flags;
    return failed ? -1 : 0;
}

static int look_at_page(const Footprint *self, Run *run, Py_ssize_t page) {
    const unsigned char *maps[MAPS];
    for (int i = 0; i < MAPS; ++i) maps[i] = self->maps[i] + page * PAGE;
    for (Py_ssize_t at = 0; at < PAGE; at += 8) {
        uint64_t words[MAPS];
        unsigned flags = 0;
        int is_even = 1; /* the eight bytes are accessed in the same ways */
        for (int i = 0; i < MAPS; ++i) {
            memcpy(&words[i], maps[i] + at, sizeof words[i]);
            flags |= (words[i] != 0) << i;
            is_even &= !words[i] || words[i] == EVERY_BYTE;
        }
        if (is_even) {
            if (go_on(run, page * PAGE + at, flags)) return -1;
            continue;
        }
        for (Py_ssize_t n = at; n < at + 8; ++n)
            if (go_on(run, page * PAGE + n, maps[0][n] | (unsigned)maps[1][n] << 1 | (unsigned)maps[2][n] << 2)) return -1;
    }
    return 0;
}

/* Return (address, size, flags) of each maximal run of bytes accessed in the same ways, by address. */
static PyObject *ranges_in(const Footprint *self, const Pages *pages, unsigned long long base) {
    Run run = {PyList_New(0), base, 0, 0};
    int failed = !run.found;
    for (Py_ssize_t i = 0; !failed && i < pages->count; ++i) {
        Py_ssize_t page = pages->numbers[i];
        if (i && pages->numbers[i - 1] + 1 != page) failed = go_on(&run, (pages->numbers[i - 1] + 1) * PAGE, 0);
        if (!failed) failed = look_at_page(self, &run, page);
    }
    if (!failed && pages->count) failed = go_on(&run, (pages->numbers[pages->count - 1] + 1) * PAGE, 0);
    if (failed) Py_CLEAR(run.found);
    return run.found;
}

static void clear_pages(const Footprint *self, const Pages *pages) {
    int is_many = pages->count > MANY;
    for (int i = 0; i < MAPS; ++i) {
        if (is_many) madvise(self->maps[i], (size_t)self->count * PAGE, MADV_DONTNEED); /* zeros when they are read again */
        for (Py_ssize_t n = 0; !is_many && n < pages->count; ++n) memset(self->maps[i] + pages->numbers[n] * PAGE, 0, PAGE);
    }
    for (Py_ssize_t n = 0; n < pages->count; ++n) self->marks[pages->numbers[n]] = 0;
}

static PyObject *ranges(PyObject *module, PyObject *args) {
    unsigned long long maps[MAPS], marks, base;
    Footprint self;
    Pages pages = {0};
    int forget;
    (void)module;
    if (!PyArg_ParseTuple(args, "(KKKK)nKp", &maps[0], &maps[1], &maps[2], &marks, &self.count, &base, &forget)) return NULL;
    for (int i = 0; i < MAPS; ++i) self.maps[i] = (unsigned char *)(uintptr_t)maps[i];
    self.marks = (unsigned char *)(uintptr_t)marks;
    PyObject *found = find_pages(&self, &pages) ? PyErr_NoMemory() : ranges_in(&self, &pages, base);
    if (found && forget) clear_pages(&self, &pages);
    PyMem_Free(pages.numbers);
    return found;
}

static PyMethodDef methods[] = {{"ranges", ranges, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "cudatool.sim._footprint", NULL, 0, methods, NULL, NULL, NULL,
                                        NULL};

PyMODINIT_FUNC PyInit__footprint(void) { return PyModuleDef_Init(&definition); }
