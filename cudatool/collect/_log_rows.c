// Turns rows of the log that _cupti.c writes into records of a trace. What needs to know or to change the state of
// streams, memory or code is left to Python (cupti_events.py); most rows, and most launches of loops, are not.
//
//   sort        by what rows are: calls, work that was done, contexts, operations; what is not reported is dropped
//   count       what calls there are
//   translate   calls that are a record each, and launches like earlier ones, whose accesses are known
//   remember    the calls that enqueued work
//   look_up     the call that enqueued what ran
//   streams     the streams of what no call stands for
//   ran         when work ran, and the launches that no call stands for

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "_log_rows.h"

// ---- sorting ----

enum { CALLS, WORK, CONTEXTS, OPERATIONS, SORTS };

// What a row is, -1 for nothing that is reported.
static int sort_of(const Row* row, const uint8_t* is_ours, Py_ssize_t stacks_known, const uint8_t* asks, const uint8_t* kept) {
  switch (row->what) {
    case KERNEL: case COPY: case FILL: case GRAPH: return WORK;
    case CONTEXT: return CONTEXTS;
    case OPERATION: return OPERATIONS;
  }
  // A block of PyTorch is the program's, even if a function of ours called PyTorch; so is a kernel's failure.
  int may_be_ours = !is_of_allocator(row->what) && row->what != FAILURE;
  if (may_be_ours && row->stack < stacks_known && is_ours[row->stack]) return -1;
  if (row->result && !asks[row->what]) return -1;
  return kept && !kept[row->what] ? -1 : CALLS;
}

static int is_freed(const Row* row) { return row->what == BLOCK && row->words[0] == FREED; }

static PyObject* py_sort(PyObject* self, PyObject* arguments) {
  (void)self;
  PyObject* data;
  Py_buffer is_ours, asks, kept;
  if (!PyArg_ParseTuple(arguments, "Sy*y*z*", &data, &is_ours, &asks, &kept)) return NULL;
  const Row* all = (const Row*)PyBytes_AS_STRING(data);
  Py_ssize_t count = PyBytes_GET_SIZE(data) / (Py_ssize_t)sizeof *all, found[SORTS] = {0}, doubled = 0;
  PyObject *parts[SORTS] = {NULL}, *result = NULL;
  if (asks.len <= UINT16_MAX || (kept.buf && kept.len <= UINT16_MAX)) {
    PyErr_SetString(PyExc_ValueError, "a flag for each kind of row is needed");
    goto done;
  }
  Py_BEGIN_ALLOW_THREADS
  for (Py_ssize_t i = 0; i < count; i++) {
    int sort = sort_of(&all[i], is_ours.buf, is_ours.len, asks.buf, kept.buf);
    if (sort < 0) continue;
    found[sort]++;
    doubled += is_freed(&all[i]);
  }
  found[CALLS] += doubled;
  Py_END_ALLOW_THREADS
  int is_one_sort = 0;
  for (int sort = 0; sort < SORTS; sort++) {
    if (found[sort] == count && !doubled) parts[sort] = Py_NewRef(data), is_one_sort = 1;
    else if (!(parts[sort] = PyBytes_FromStringAndSize(NULL, found[sort] * (Py_ssize_t)sizeof *all))) goto done;
  }
  if (!is_one_sort) {
    Py_BEGIN_ALLOW_THREADS
    Row* out[SORTS];
    for (int sort = 0; sort < SORTS; sort++) out[sort] = (Row*)PyBytes_AS_STRING(parts[sort]);
    for (Py_ssize_t i = 0; i < count; i++) {
      int sort = sort_of(&all[i], is_ours.buf, is_ours.len, asks.buf, kept.buf);
      if (sort < 0) continue;
      Row* row = out[sort]++;
      *row = all[i];
      if (!is_freed(row)) continue;
      row->words[0] = FREE_REQUESTED;
      row = out[sort]++;
      *row = all[i];
      row->words[0] = FREE_COMPLETED;
      row->stack = 0;
    }
    Py_END_ALLOW_THREADS
  }
  result = PyTuple_Pack(SORTS, parts[CALLS], parts[WORK], parts[CONTEXTS], parts[OPERATIONS]);
done:
  for (int sort = 0; sort < SORTS; sort++) Py_XDECREF(parts[sort]);
  PyBuffer_Release(&is_ours), PyBuffer_Release(&asks), PyBuffer_Release(&kept);
  return result;
}

static PyObject* py_count(PyObject* self, PyObject* arguments) {
  (void)self;
  Py_buffer rows, is_work;
  if (!PyArg_ParseTuple(arguments, "y*y*", &rows, &is_work)) return NULL;
  const uint8_t* flags = is_work.buf;
  Py_ssize_t works = 0, launches = 0, ranges = 0;
  Py_BEGIN_ALLOW_THREADS
  for (const Row *row = rows.buf, *end = row + rows.len / (Py_ssize_t)sizeof *row; row < end; row++) {
    launches += row->what == LAUNCH;
    ranges += row->what == RANGE;
    works += row->what < is_work.len && flags[row->what];
  }
  Py_END_ALLOW_THREADS
  PyBuffer_Release(&rows), PyBuffer_Release(&is_work);
  return Py_BuildValue("(nnn)", works + launches, launches, ranges);
}

// ---- from rows to records of a trace ----

enum { LEFT_OUT = 255 };  // a kind of rows that become nothing

// How a kind of row becomes a record without Python; rows of `kind` 0 are left to Python. Fields that select a word
// are -1 for none. The layout is that of HOW in cupti_rows.py.
typedef struct __attribute__((packed)) {
  uint8_t kind;
  int8_t stream, event, flags;
  uint8_t asks;        // aux1: whether the query's answer was yes
  uint8_t per_thread;  // default streams are those of each thread
  uint8_t is_copy;     // words: to, from, bytes
  uint8_t item;        // of a fill, whose words are: to, value, number of such items
  uint8_t is_graph;    // a launch of one, whose words are: graph, stream
  uint8_t copy_flags;
  uint32_t name;
} How;

typedef struct __attribute__((packed)) {
  int64_t time;
  uint8_t kind;
  int8_t device;
  uint16_t flags, thread, reserved;
  uint32_t stream, correlation, stack, name;
  uint64_t address, size, aux0, aux1;
} Record;

enum { OF_MODULE = 8, OF_BACKWARD = 16, BLOCK_BYTES = 512 };

// Kinds of a trace's records, by what PyTorch's allocator did (torch_rows.Action).
static const uint8_t kinds_of_actions[] = {1, 2, 3, 5, 6, 7, 8, 0, 9};

// The value of a key in a dictionary of integers, -1 if it is missing; -2 with an exception set.
static int64_t found_in(PyObject* dictionary, uint64_t key) {
  PyObject* number = PyLong_FromUnsignedLongLong(key);
  if (!number) return -2;
  PyObject* value = PyDict_GetItemWithError(dictionary, number);
  Py_DECREF(number);
  if (!value) return PyErr_Occurred() ? -2 : -1;
  return PyLong_AsLongLong(value);
}

enum { KERNEL_LAUNCHED = 40, EXECUTED = 62 };  // kinds of a trace's records
enum { LAUNCHED_PROGRAMMATIC = 1 };            // LaunchFlag.PROGRAMMATIC

// The first names are those of what runs that has none: WORK in cupti_rows.py.
static uint32_t name_of_work(const Row* row) {
  return row->what == KERNEL ? (uint32_t)row->words[3] + GRAPH - KERNEL : (uint32_t)row->what - KERNEL;
}

// A call that enqueued work, by CUPTI's number and by ours.
typedef struct {
  uint32_t called, correlation, stream;
} Work;

// The latest calls that enqueued work: each is in one of the WAYS places that the last bits of its number select, and
// there takes the place of the oldest.
enum { WAYS = 4 };

static Work* places_of(const Py_buffer* known, uint32_t called) {
  size_t places = (size_t)known->len / sizeof(Work) / WAYS;
  return (Work*)known->buf + (called & (places - 1)) * WAYS;
}

static int is_power_of_2(Py_ssize_t number) { return number > 0 && !(number & (number - 1)); }

static PyObject* py_remember(PyObject* self, PyObject* arguments) {
  (void)self;
  Py_buffer known, calls;
  if (!PyArg_ParseTuple(arguments, "w*y*", &known, &calls)) return NULL;
  int fits = is_power_of_2(known.len / (Py_ssize_t)sizeof(Work) / WAYS);
  if (!fits) PyErr_SetString(PyExc_ValueError, "room for a power of 2 of calls is needed");
  Py_BEGIN_ALLOW_THREADS
  for (const Work *call = calls.buf, *end = call + calls.len / (Py_ssize_t)sizeof *call; fits && call < end; call++) {
    Work *places = places_of(&known, call->called), *oldest = places;
    for (Work* one = places; one < places + WAYS; one++) {
      if (!one->called || one->called == call->called) {
        oldest = one;
        break;
      }
      if ((int32_t)(oldest->called - one->called) > 0) oldest = one;
    }
    if (oldest->called != call->called) *oldest = *call;
  }
  Py_END_ALLOW_THREADS
  PyBuffer_Release(&known), PyBuffer_Release(&calls);
  if (!fits) return NULL;
  Py_RETURN_NONE;
}

static PyObject* py_look_up(PyObject* self, PyObject* arguments) {
  (void)self;
  Py_buffer known, given, out;
  if (!PyArg_ParseTuple(arguments, "y*y*w*", &known, &given, &out)) return NULL;
  const Row* rows = given.buf;
  Work* found = out.buf;
  Py_ssize_t count = given.len / (Py_ssize_t)sizeof *rows, unknown = 0, kernels = 0, operations = 0;
  int fits = is_power_of_2(known.len / (Py_ssize_t)sizeof(Work) / WAYS) && out.len / (Py_ssize_t)sizeof *found >= count;
  if (!fits) PyErr_SetString(PyExc_ValueError, "calls of a power of 2, and room for one for each row, are needed");
  Py_BEGIN_ALLOW_THREADS
  for (Py_ssize_t i = 0; fits && i < count; i++) {
    uint32_t called = rows[i].correlation;
    const Work* one = places_of(&known, called);
    const Work* end = one + WAYS;
    while (one < end && one->called != called) one++;
    found[i] = called && one < end ? *one : (Work){0};
    unknown += !found[i].called;
    kernels += !found[i].called && rows[i].what == KERNEL;
    operations += found[i].called && !found[i].stream;
  }
  Py_END_ALLOW_THREADS
  PyBuffer_Release(&known), PyBuffer_Release(&given), PyBuffer_Release(&out);
  return fits ? Py_BuildValue("(nnn)", unknown, kernels, operations) : NULL;
}

// CUPTI's number of the stream of what ran, with the device.
static uint64_t stream_number(const Row* row) { return (uint64_t)row->device << 32 | (uint32_t)row->words[2]; }

// Where a number is among others, or how many there are. Most rows are of the stream of the `last` one.
static Py_ssize_t find_number(const uint64_t* numbers, Py_ssize_t count, uint64_t number, Py_ssize_t last) {
  if (last < count && numbers[last] == number) return last;
  for (last = 0; last < count && numbers[last] != number; last++) {}
  return last;
}

static PyObject* py_streams(PyObject* self, PyObject* arguments) {
  (void)self;
  Py_buffer given, calls;
  if (!PyArg_ParseTuple(arguments, "y*y*", &given, &calls)) return NULL;
  const Row* rows = given.buf;
  const Work* by = calls.buf;
  Py_ssize_t count = given.len / (Py_ssize_t)sizeof *rows, found = 0, room = 0, last = 0;
  if (calls.len / (Py_ssize_t)sizeof *by < count) count = calls.len / (Py_ssize_t)sizeof *by;
  uint64_t* numbers = NULL;
  int failed = 0;
  Py_BEGIN_ALLOW_THREADS
  for (Py_ssize_t i = 0; i < count && !failed; i++) {
    if (by[i].called) continue;
    uint64_t number = stream_number(&rows[i]);
    last = find_number(numbers, found, number, last);
    if (last == room) {
      room = room * 2 + 64;
      uint64_t* more = PyMem_RawRealloc(numbers, (size_t)room * sizeof *more);
      if ((failed = !more)) break;
      numbers = more;
    }
    numbers[last] = number;
    found += last == found;
  }
  Py_END_ALLOW_THREADS
  PyObject* result = failed ? PyErr_NoMemory() : PyBytes_FromStringAndSize((const char*)numbers, found * (Py_ssize_t)sizeof *numbers);
  PyMem_RawFree(numbers);
  PyBuffer_Release(&given), PyBuffer_Release(&calls);
  return result;
}

static PyObject* py_ran(PyObject* self, PyObject* arguments) {
  (void)self;
  Py_buffer given, calls, numbers, ids, out;
  unsigned int first;
  long long time;
  if (!PyArg_ParseTuple(arguments, "y*y*y*y*ILw*", &given, &calls, &numbers, &ids, &first, &time, &out)) return NULL;
  const Row* rows = given.buf;
  const Work* by = calls.buf;
  const uint64_t* streams = numbers.buf;
  const uint32_t* ids_of_streams = ids.buf;
  Record* records = out.buf;
  Py_ssize_t count = given.len / (Py_ssize_t)sizeof *rows, launched = 0, made = 0, last = 0, unknown = 0;
  Py_ssize_t known = numbers.len / (Py_ssize_t)sizeof *streams;
  int fits = 0;
  PyObject* result = NULL;
  if (calls.len / (Py_ssize_t)sizeof *by < count || ids.len / (Py_ssize_t)sizeof *ids_of_streams < known) {
    PyErr_SetString(PyExc_ValueError, "a call for each row, and an id for each stream, are needed");
    goto done;
  }
  Py_BEGIN_ALLOW_THREADS
  for (Py_ssize_t i = 0; i < count; i++) launched += !by[i].called;
  fits = out.len / (Py_ssize_t)sizeof *records >= count + launched;
  for (Py_ssize_t i = 0; fits && i < count; i++) {
    const Row* row = &rows[i];
    Record record = {.device = (int8_t)row->device, .correlation = by[i].correlation, .stream = by[i].stream, .name = name_of_work(row)};
    if (!by[i].called) {
      last = find_number(streams, known, stream_number(row), last);
      unknown += last == known;
      record.stream = last < known ? ids_of_streams[last] : 0;
      record.correlation = first++;
      Record launch = record;
      launch.kind = KERNEL_LAUNCHED;
      launch.time = (int64_t)row->words[0];
      launch.aux0 = row->words[4], launch.aux1 = row->words[5], launch.size = row->words[6];
      records[made++] = launch;
    }
    record.kind = EXECUTED;
    record.time = time;
    record.aux0 = row->words[0], record.aux1 = row->words[1];
    record.flags = row->what == KERNEL && by[i].called && row->words[7];
    records[launched + i] = record;
  }
  Py_END_ALLOW_THREADS
  if (!fits) PyErr_SetString(PyExc_ValueError, "there is no room for the records");
  else if (unknown) PyErr_SetString(PyExc_ValueError, "a stream has no id");
  else result = PyLong_FromSsize_t(launched + count);
done:
  PyBuffer_Release(&given), PyBuffer_Release(&calls), PyBuffer_Release(&numbers), PyBuffer_Release(&ids), PyBuffer_Release(&out);
  return result;
}

// The index of a text, which is added if it is new; -1 with an exception set.
static int64_t index_of(PyObject* texts, const char* text, uint64_t length) {
  PyObject* name = PyUnicode_DecodeUTF8(text, (Py_ssize_t)length, "replace");
  PyObject* found = name ? PyDict_GetItemWithError(texts, name) : NULL;
  int64_t index = found ? PyLong_AsLongLong(found) : -1;
  if (name && !found && !PyErr_Occurred()) {
    PyObject* next = PyLong_FromSsize_t(PyDict_GET_SIZE(texts));
    if (next && !PyDict_SetItem(texts, name, next)) index = PyLong_AsLongLong(next);
    Py_XDECREF(next);
  }
  Py_XDECREF(name);
  return index;
}

// ---- launches that were judged before ----

enum { MOST_POINTERS = 128, MOST_MEMORIES = 4, MARKS_NUMBER = 1 };
#define LOWEST_ADDRESS ((uint64_t)1 << 32)  // CUDA places no memory below it: cudatool.ptx.is_number

// What a judgement depends on, as bytes: the kernel and the launch's flags, and where its pointers point.
typedef struct {
  uint64_t kernel, flags_and_length, name;
  uint64_t pieces[2 * MOST_POINTERS];  // start and size; MARKS_NUMBER and 0 for no pointer; zeros for unknown memory
} LaunchKey;

typedef struct {
  Py_buffer starts, sizes;  // sorted; the pieces do not overlap
} Memory;

static void find_piece(const Memory* memories, Py_ssize_t count, uint64_t address, uint64_t* piece) {
  piece[0] = piece[1] = 0;
  if (address < LOWEST_ADDRESS) piece[0] = MARKS_NUMBER;
  for (Py_ssize_t i = 0; i < count && !piece[0]; i++) {
    const uint64_t *starts = memories[i].starts.buf, *sizes = memories[i].sizes.buf;
    Py_ssize_t low = 0, high = memories[i].starts.len / (Py_ssize_t)sizeof *starts;
    while (low < high) {
      Py_ssize_t middle = (low + high) / 2;
      if (starts[middle] <= address) low = middle + 1;
      else high = middle;
    }
    if (low && address - starts[low - 1] < sizes[low - 1]) piece[0] = starts[low - 1], piece[1] = sizes[low - 1];
  }
}

// The key of a launch whose arguments are at hand, as a new object; NULL without an exception if it has none. The plan of
// a function is a number of its kernel and then, in 8 bytes each, where in the arguments pointers may lie.
static PyObject* key_of_launch(const Row* row, PyObject* plan, const char* arguments, const Memory* memories, Py_ssize_t count) {
  LaunchKey key;
  uint64_t length = row->words[6];
  const uint64_t* numbers = (const uint64_t*)PyBytes_AS_STRING(plan);
  size_t pointers = (size_t)PyBytes_GET_SIZE(plan) / sizeof *numbers - 1;
  if (pointers > MOST_POINTERS) return NULL;
  key.kernel = numbers[0];
  key.flags_and_length = (row->words[4] & ~(uint64_t)0xFFFFFFFF) | length;
  key.name = row->words[7];
  for (size_t i = 0; i < pointers; i++) {
    uint64_t offset = numbers[1 + i], value;
    if (length < sizeof value || offset > length - sizeof value) return NULL;
    memcpy(&value, arguments + offset, sizeof value);
    find_piece(memories, count, value, &key.pieces[2 * i]);
  }
  return PyBytes_FromStringAndSize((const char*)&key, (Py_ssize_t)(offsetof(LaunchKey, pieces) + pointers * 2 * sizeof(uint64_t)));
}

// Fill in the records of a launch that was judged before: the launch itself, and its accesses.
static void repeat_launch(Record* to, PyObject* judged, const Row* row, uint16_t thread, uint32_t stream, uint32_t correlation, uint32_t stack) {
  Py_ssize_t count = PyBytes_GET_SIZE(judged) / (Py_ssize_t)sizeof *to;
  memcpy(to, PyBytes_AS_STRING(judged), (size_t)count * sizeof *to);
  to->stack = stack;
  to->aux0 = row->words[2];
  to->aux1 = row->words[3];
  to->size = row->words[4] & 0xFFFFFFFF;
  for (Py_ssize_t i = 0; i < count; i++) {
    to[i].time = (int64_t)row->time;
    to[i].device = (int8_t)row->device;
    to[i].thread = thread;
    to[i].stream = stream;
    to[i].correlation = correlation;
  }
}

// ---- calls and launches ----

// C has made the records of a row; Python is to make them; there is no room for them; an exception is set.
typedef enum { MADE, PYTHONS, NO_ROOM, FAILED } Outcome;

enum { KNOWN = 64 };
typedef struct {
  uint64_t key;
  int64_t value;
  int has_value;
} Known;
typedef struct {
  const char* text;  // in the bytes that rows point to
  uint64_t length;
  int64_t index;
} KnownText;

typedef struct {
  Py_buffer rows, how, stack_ids, module_names, kernel_names, correlations, pointed, records, enqueued;
  PyObject *texts, *streams, *events, *threads, *of_graphs;
  PyObject *plans, *judged;  // of launches; NULL if nothing is said of what they touch
  PyObject *memory, *add_block, *remove_block;  // the first memory is the blocks of pools
  int has_graphs;  // whether blocks may be of graphs
  Memory memories[MOST_MEMORIES];
  Py_ssize_t memory_count, stacks_known, made, works;
  uint64_t begins;  // where the bytes begin that rows point to
  // What the dictionaries said before: most rows are of few threads, streams, events and texts.
  Known known_threads[KNOWN], known_streams[KNOWN], known_events[KNOWN];
  KnownText known_texts[KNOWN];
  PyObject* missing;  // the key of a launch of which nothing but its records is missing
} Translation;

static Known* place_of(Known* all, uint64_t key) { return &all[key * 0x9E3779B97F4A7C15u >> 32 & (KNOWN - 1)]; }

static int is_known(const Known* one, uint64_t key) { return one->has_value && one->key == key; }

// What a dictionary has for a key, as found_in() says it.
static int64_t known_in(Known* all, PyObject* dictionary, uint64_t key) {
  Known* one = place_of(all, key);
  if (is_known(one, key)) return one->value;
  int64_t value = found_in(dictionary, key);
  if (value >= 0) *one = (Known){key, value, 1};
  return value;
}

// What a stream is known by: its handle, with the thread of a thread's default stream, and the device.
static uint64_t handle_of(const Row* row, uint64_t handle, int per_thread) {
  if (!handle && per_thread) handle = 2;
  if (handle == 2) handle |= (uint64_t)row->thread << 8;
  return handle | (uint64_t)row->device << 56;
}

static int64_t thread_of(Translation* of, const Row* row) { return known_in(of->known_threads, of->threads, row->thread); }

static int64_t stream_of(Translation* of, const Row* row, uint64_t handle, int per_thread) {
  return known_in(of->known_streams, of->streams, handle_of(row, handle, per_thread));
}

static int64_t event_of(Translation* of, uint64_t handle) { return known_in(of->known_events, of->events, handle); }

static KnownText* place_of_text(Translation* of, const char* text, uint64_t length) {
  uint64_t hash = length, word = 0;
  for (uint64_t at = 0; at < length; at += length / 4 + 1) {  // a sample: what it has is compared
    memcpy(&word, text + at, length - at < sizeof word ? length - at : sizeof word);
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return &of->known_texts[hash & (KNOWN - 1)];
}

static int is_known_text(const KnownText* one, const char* text, uint64_t length) {
  return one->text && one->length == length && !memcmp(one->text, text, length);
}

// The index of a text that a row points to, as index_of() says it.
static int64_t index_of_text(Translation* of, const char* text, uint64_t length) {
  KnownText* one = place_of_text(of, text, length);
  if (is_known_text(one, text, length)) return one->index;
  int64_t index = index_of(of->texts, text, length);
  if (index >= 0) *one = (KnownText){text, length, index};
  return index;
}

// Where the bytes are that a row points to; NULL if they are not at hand.
static const char* pointed_to(const Translation* of, uint64_t begins, uint64_t length) {
  uint64_t offset = begins - of->begins, all = (uint64_t)of->pointed.len;
  if (begins < of->begins || offset > all || length > all - offset) return NULL;
  return (const char*)of->pointed.buf + offset;
}

static int has_room(const Translation* of, Py_ssize_t records, int is_work) {
  Py_ssize_t most = of->records.len / (Py_ssize_t)sizeof(Record), works = of->enqueued.len / (Py_ssize_t)sizeof(Work);
  if (of->correlations.len / 4 < works) works = of->correlations.len / 4;
  return of->made + records <= most && of->works + is_work <= works;
}

static uint32_t note_work(Translation* of, const Row* row, int64_t stream) {
  uint32_t correlation = ((const uint32_t*)of->correlations.buf)[of->works];
  ((Work*)of->enqueued.buf)[of->works++] = (Work){row->correlation, correlation, (uint32_t)stream};
  return correlation;
}

static int open_memory(Translation* of, Py_ssize_t number) {
  Memory* one = &of->memories[number];
  if (PyObject_GetBuffer(PyTuple_GET_ITEM(of->memory, 2 * number), &one->starts, PyBUF_SIMPLE)) return 0;
  if (!PyObject_GetBuffer(PyTuple_GET_ITEM(of->memory, 2 * number + 1), &one->sizes, PyBUF_SIMPLE)) return 1;
  PyBuffer_Release(&one->starts);
  return 0;
}

static void close_memory(Memory* memory) {
  PyBuffer_Release(&memory->starts);  // which may have been released before
  PyBuffer_Release(&memory->sizes);
}

// Open what is known of memory: starts and sizes of each kind, in turns. Returns 0 with an exception set if it fails.
static int open_memories(Translation* of) {
  Py_ssize_t count = PyTuple_GET_SIZE(of->memory) / 2;
  if (!count || count > MOST_MEMORIES) {
    PyErr_Format(PyExc_ValueError, "1 to %d memories", MOST_MEMORIES);
    return 0;
  }
  while (of->memory_count < count && open_memory(of, of->memory_count)) of->memory_count++;
  return of->memory_count == count;
}

// A pool hands out a block, or takes it back. Returns 0 with an exception set if that fails.
static int change_blocks(Translation* of, const Row* row) {
  if (!of->plans) return 1;
  close_memory(&of->memories[0]);  // an array whose bytes are in use cannot grow
  unsigned long long start = row->words[0], size = row->words[1];
  PyObject* done = row->what == POOL_ALLOC ? PyObject_CallFunction(of->add_block, "KK", start, size)
                                           : PyObject_CallFunction(of->remove_block, "K", start);
  Py_XDECREF(done);
  return done && open_memory(of, 0);
}

static void describe_block(const Translation* of, const Row* row, Record* to) {
  const uint64_t* words = row->words;
  int is_one = words[0] <= FREE_COMPLETED, is_refused = words[0] == OUT_OF_MEMORY;
  to->kind = kinds_of_actions[words[0]];
  if (words[0] == ALLOC) {
    to->name = ((const uint32_t*)of->module_names.buf)[row->stack];
    to->flags = (to->name ? OF_MODULE : 0) | (words[7] ? OF_BACKWARD : 0);
  }
  uint64_t rounded = (words[2] + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
  to->address = is_refused ? 0 : words[1];
  to->size = is_one || is_refused ? rounded : words[2];
  to->aux0 = is_refused ? words[1] : is_one ? words[2] : 0;
  to->aux1 = (words[5] & 0xFFFFFFFF) | words[6] << 32;
}

static Outcome translate_call(Translation* of, const Row* row, const How* is) {
  const uint64_t* words = row->words;
  if (is->kind == LEFT_OUT) return MADE;
  if (!is->kind || row->stack >= of->stacks_known) return PYTHONS;
  int is_block = row->what == BLOCK, is_work = is->is_copy || is->item || is->is_graph;
  if (is_block && (words[4] || words[0] > OUT_OF_MEMORY || words[0] == SNAPSHOT)) return PYTHONS;
  if (!has_room(of, 1, is_work)) return NO_ROOM;
  const char* text = row->what == RANGE ? pointed_to(of, words[1], words[2]) : "";
  if (!text) return PYTHONS;
  if (is_block && of->has_graphs) {
    PyObject* address = PyLong_FromUnsignedLongLong(words[1]);
    int is_graphs = address ? PySet_Contains(of->of_graphs, address) : -1;
    Py_XDECREF(address);
    if (is_graphs) return is_graphs < 0 ? FAILED : PYTHONS;
  }
  int64_t thread = thread_of(of, row), event = is->event >= 0 ? event_of(of, words[is->event]) : 0;
  int64_t stream = is->stream >= 0 ? stream_of(of, row, words[is->stream], is->per_thread) : 0;
  if (thread == -2 || stream == -2 || event == -2) return FAILED;
  if (thread < 0 || stream < 0 || event < 0) return PYTHONS;  // which gives it a number
  if ((row->what == POOL_ALLOC || row->what == POOL_FREE) && !change_blocks(of, row)) return FAILED;
  Record* to = (Record*)of->records.buf + of->made;
  *to = (Record){.time = (int64_t)row->time, .kind = is->kind, .device = (int8_t)row->device, .thread = (uint16_t)thread,
                 .stream = (uint32_t)stream, .stack = ((const uint32_t*)of->stack_ids.buf)[row->stack],
                 .name = is->name, .aux0 = (uint64_t)event};
  if (is->asks) to->aux1 = row->result == 0;
  if (is->flags >= 0) to->flags = words[is->flags] & 1;
  if (is_work) {
    to->flags = is->copy_flags;
    to->correlation = note_work(of, row, stream);
    to->address = is->is_graph ? 0 : words[0];
    to->size = is->is_graph ? 0 : is->item ? words[2] * is->item : words[2];
    to->aux0 = is->is_graph ? words[0] : words[1];
    to->aux1 = is->item;
  } else if (is_block) {
    describe_block(of, row, to);
  } else if (row->what == RANGE) {
    int64_t name = index_of_text(of, text, words[2]);
    if (name < 0) return FAILED;
    to->kind = (uint8_t)words[0];
    to->device = -1;
    to->name = (uint32_t)name;
    to->aux0 = words[3];
  } else if (is_of_allocator(row->what)) {
    to->address = words[0];
    to->size = words[1];
    to->aux0 = words[2];
  }
  of->made++;
  return MADE;
}

// A launch of which nothing is said but that there was one.
static Outcome translate_bare_launch(Translation* of, const Row* row, int64_t thread, int64_t stream) {
  const uint64_t* words = row->words;
  if (words[7] >= (uint64_t)of->kernel_names.len / 4) return PYTHONS;
  if (!has_room(of, 1, 1)) return NO_ROOM;
  ((Record*)of->records.buf)[of->made++] = (Record){
      .time = (int64_t)row->time, .kind = KERNEL_LAUNCHED, .device = (int8_t)row->device, .thread = (uint16_t)thread,
      .flags = words[4] >> 32 & PROGRAMMATIC ? LAUNCHED_PROGRAMMATIC : 0, .stream = (uint32_t)stream,
      .correlation = note_work(of, row, stream), .stack = ((const uint32_t*)of->stack_ids.buf)[row->stack],
      .name = ((const uint32_t*)of->kernel_names.buf)[words[7]], .size = words[4] & 0xFFFFFFFF,
      .aux0 = words[2], .aux1 = words[3]};
  return MADE;
}

static Outcome translate_launch(Translation* of, const Row* row) {
  const uint64_t* words = row->words;
  uint32_t flags = words[4] >> 32;
  if (flags & CAPTURED || row->stack >= of->stacks_known) return PYTHONS;
  int64_t thread = thread_of(of, row), stream = stream_of(of, row, words[1], flags & PER_THREAD);
  if (thread == -2 || stream == -2) return FAILED;
  if (thread < 0 || stream < 0) return PYTHONS;
  if (!of->plans) return translate_bare_launch(of, row, thread, stream);
  const char* arguments = flags & ARGUMENTS_UNKNOWN ? NULL : pointed_to(of, words[5], words[6]);
  if (!arguments) return PYTHONS;
  PyObject* function = PyLong_FromUnsignedLongLong(words[0]);
  PyObject* plan = function ? PyDict_GetItemWithError(of->plans, function) : NULL;
  Py_XDECREF(function);
  if (!plan) return PyErr_Occurred() ? FAILED : PYTHONS;
  PyObject* key = key_of_launch(row, plan, arguments, of->memories, of->memory_count);
  PyObject* before = key ? PyDict_GetItemWithError(of->judged, key) : NULL;
  if (!before) {
    of->missing = key;
    return PyErr_Occurred() ? FAILED : PYTHONS;
  }
  Py_DECREF(key);
  Py_ssize_t needed = PyBytes_GET_SIZE(before) / (Py_ssize_t)sizeof(Record);
  if (!has_room(of, needed, 1)) return NO_ROOM;
  repeat_launch((Record*)of->records.buf + of->made, before, row, (uint16_t)thread, (uint32_t)stream,
                note_work(of, row, stream), ((const uint32_t*)of->stack_ids.buf)[row->stack]);
  of->made += needed;
  return MADE;
}

static Outcome translate_row(Translation* of, const Row* row, const How* is) {
  return row->what == LAUNCH ? translate_launch(of, row) : translate_call(of, row, is);
}

static int is_of_known_stream(Translation* of, const Row* row, uint64_t handle, int per_thread) {
  handle = handle_of(row, handle, per_thread);
  return is_known(place_of(of->known_streams, handle), handle);
}

static int has_known_text(Translation* of, const Row* row) {
  const char* text = pointed_to(of, row->words[1], row->words[2]);
  return text && is_known_text(place_of_text(of, text, row->words[2]), text, row->words[2]);
}

// Whether a row is translated without a look at any object of Python's.
static int is_plain(Translation* of, const Row* row, const How* is) {
  const uint64_t* words = row->words;
  if (!is_known(place_of(of->known_threads, row->thread), row->thread)) return 0;
  if (row->what == LAUNCH) return !of->plans && is_of_known_stream(of, row, words[1], words[4] >> 32 & PER_THREAD);
  if (!is->kind || (row->what == BLOCK && of->has_graphs)) return 0;
  if ((row->what == POOL_ALLOC || row->what == POOL_FREE) && of->plans) return 0;
  if (is->event >= 0 && !is_known(place_of(of->known_events, words[is->event]), words[is->event])) return 0;
  if (is->stream >= 0 && !is_of_known_stream(of, row, words[is->stream], is->per_thread)) return 0;
  return row->what != RANGE || has_known_text(of, row);
}

static const How* how_of(const Row* row, const How* how, Py_ssize_t kinds) { return &how[row->what < kinds ? row->what : 0]; }

enum { FEW = 32 };  // rows for which the interpreter's lock is not given to a thread that waits for it

// Translate rows from *at on until Python, or room, is needed. Most are plain, and the program's thread goes on meanwhile.
static Outcome translate_rows(Translation* of, const Row* rows, Py_ssize_t count, Py_ssize_t* at, const How* how, Py_ssize_t kinds) {
  Outcome outcome = MADE;
  Py_ssize_t plain = 0;  // in a row
  while (outcome == MADE && *at < count) {
    const Row* row = &rows[*at];
    const How* is = how_of(row, how, kinds);
    plain = is_plain(of, row, is) ? plain + 1 : 0;
    if (plain < FEW) {
      outcome = translate_row(of, row, is);
      *at += outcome == MADE;
      continue;
    }
    Py_BEGIN_ALLOW_THREADS
    do {
      outcome = translate_row(of, &rows[*at], how_of(&rows[*at], how, kinds));
      *at += outcome == MADE;
    } while (outcome == MADE && *at < count && is_plain(of, &rows[*at], how_of(&rows[*at], how, kinds)));
    Py_END_ALLOW_THREADS
    plain = 0;
  }
  return outcome;
}

static PyObject* py_translate(PyObject* self, PyObject* arguments) {
  (void)self;
  Translation of = {0};
  PyObject *launches, *result = NULL;
  Py_ssize_t at;
  unsigned long long begins;
  if (!PyArg_ParseTuple(arguments, "y*ny*y*y*y*y*Ky*O!O!O!O!O!Ow*w*", &of.rows, &at, &of.how, &of.stack_ids, &of.module_names,
                        &of.kernel_names, &of.correlations, &begins, &of.pointed, &PyDict_Type, &of.texts, &PyDict_Type, &of.streams,
                        &PyDict_Type, &of.events, &PyDict_Type, &of.threads, &PySet_Type, &of.of_graphs, &launches,
                        &of.records, &of.enqueued)) return NULL;
  of.begins = begins;
  of.has_graphs = PySet_GET_SIZE(of.of_graphs) > 0;
  of.stacks_known = (of.stack_ids.len < of.module_names.len ? of.stack_ids.len : of.module_names.len) / 4;
  int is_open = launches == Py_None ||
                (PyArg_ParseTuple(launches, "O!OOO!O!", &PyTuple_Type, &of.memory, &of.add_block, &of.remove_block, &PyDict_Type,
                                  &of.plans, &PyDict_Type, &of.judged) &&
                 open_memories(&of));
  const Row* rows = of.rows.buf;
  const How* how = of.how.buf;
  Py_ssize_t count = of.rows.len / (Py_ssize_t)sizeof *rows, kinds = of.how.len / (Py_ssize_t)sizeof *how;
  Outcome outcome = FAILED;
  if (is_open) outcome = translate_rows(&of, rows, count, &at, how, kinds);
  if (outcome != FAILED) {
    result = Py_BuildValue("(nnniO)", at, of.made, of.works, outcome == PYTHONS, of.missing ? of.missing : Py_None);
  }
  Py_XDECREF(of.missing);
  while (of.memory_count) close_memory(&of.memories[--of.memory_count]);
  PyBuffer_Release(&of.rows), PyBuffer_Release(&of.how), PyBuffer_Release(&of.stack_ids), PyBuffer_Release(&of.module_names);
  PyBuffer_Release(&of.kernel_names), PyBuffer_Release(&of.correlations), PyBuffer_Release(&of.pointed), PyBuffer_Release(&of.records);
  PyBuffer_Release(&of.enqueued);
  return result;
}

static PyMethodDef methods[] = {
    {"sort", py_sort, METH_VARARGS,
     "sort(rows, whether each stack is our runtime's, whether each call asks, which are reported or None for all): "
     "rows of calls, of work that was done, of contexts, and of operations of our runtime"},
    {"count", py_count, METH_VARARGS,
     "count(rows, whether each call enqueues work): rows that enqueue work; launches of these; and ranges"},
    {"translate", py_translate, METH_VARARGS,
     "translate(rows, first, how, stack ids, names of their modules, names of kernels, correlations, where the bytes begin that rows point to, "
     "these bytes, names, streams, events, threads, blocks of graphs, launches, records, work enqueued): "
     "the first row without records, records made, work enqueued, whether that row is Python's, and its key if it is a "
     "launch of which only the records are missing. "
     "`launches`: memory as starts and sizes of each kind, of which the first is the blocks of pools, what adds one and what "
     "removes one, plans of functions, records by key; or None if nothing is said of what they touch"},
    {"remember", py_remember, METH_VARARGS,
     "remember(known, calls): add calls that enqueued work, of each CUPTI's number, our correlation and the stream, to a table "
     "of such, which had zeros at first"},
    {"look_up", py_look_up, METH_VARARGS,
     "look_up(known, rows, calls): the call of each row, or zeros; rows without one, kernels of these, and rows of operations "
     "of our runtime"},
    {"streams", py_streams, METH_VARARGS,
     "streams(rows, calls): device and CUPTI's number of the streams of rows without a call, as uint64"},
    {"ran", py_ran, METH_VARARGS,
     "ran(rows, the call of each, streams, their ids, the correlation of the first row without a call, time, records): "
     "records made; those of launches that no call stands for, and then what ran"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_log_rows", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__log_rows(void) { return PyModule_Create(&definition); }
