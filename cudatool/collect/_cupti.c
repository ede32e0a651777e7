// Records a program's calls of the CUDA driver, and when its kernels and copies ran, through CUPTI.
//
//   driver calls    a callback at each of the calls that Python has chosen: arguments, result, thread, Python's stack
//                   and, where asked, the library that called. Launches are not among them: a callback costs too much.
//   operations      which calls that enqueue work are made for an operation of our runtime: a callback at the beginning
//                   of launches, too, from the first such operation on
//   launches        on request, each launch with its arguments, and the images that its code was loaded from: what a
//                   kernel may touch is inferred from them
//   activity        kernels, copies and fills, with their times on the device, in buffers that CUPTI hands back
//   use             how much of a device's memory the driver charges to this process, read from NVML after
//                   calls that may take memory implicitly: contexts, modules, graphs, streams, local memory
//
// Everything becomes a fixed-size row in a log that Python drains. No code here takes the interpreter's lock: a
// library may call the driver while it holds a lock of its own that another thread, with the interpreter's, waits for.
// So a thread reads its own frames, which do not change while it is in here.
//
// CUPTI is loaded at run time, and its few structures are declared here, so that the package builds without CUPTI.

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <dlfcn.h>
#include <execinfo.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "_log_rows.h"

#if PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)
#define READS_FRAMES 1
#define Py_BUILD_CORE
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#else
#define READS_FRAMES 0  // stacks hold only the calling library
#endif

// ---- CUPTI, as documented in its headers (cupti_callbacks.h, cupti_activity.h) ----

enum { DOMAIN_DRIVER_API = 1, DOMAIN_RESOURCE = 3, API_ENTER = 0, API_EXIT = 1, MODULE_LOADED = 6 };
enum { KIND_MEMCPY = 1, KIND_MEMSET = 2, KIND_KERNEL = 10, KIND_GRAPH = 51 };

typedef struct {
  uint32_t site;
  const char* function;
  const void* params;
  void* result;
  const char* symbol;
  void* context;
  uint32_t context_uid;
  uint64_t* correlation_data;
  uint32_t correlation;
} CallbackData;

typedef struct __attribute__((packed, aligned(8))) {
  uint32_t kind, config;
  uint32_t partitioned[2];
  uint64_t start, end, completed;
  uint32_t device, context, stream;
  int32_t grid[3], block[3], static_shared, dynamic_shared;
  uint32_t local_per_thread, local_total, correlation;
  int64_t grid_id;
  const char* name;
  void* reserved;
  uint64_t queued, submitted;
  uint8_t launch[8];
  uint64_t graph_node;
  uint32_t shared_limit, graph;
} KernelRecord;

typedef struct __attribute__((packed, aligned(8))) {
  uint32_t kind;
  uint8_t copy_kind, source, destination, flags;
  uint64_t bytes, start, end;
  uint32_t device, context, stream, correlation;
} CopyRecord;

typedef struct __attribute__((packed, aligned(8))) {
  uint32_t kind, value;
  uint64_t bytes, start, end;
  uint32_t device, context, stream, correlation;
} FillRecord;

typedef struct __attribute__((packed, aligned(8))) {
  uint32_t kind, correlation;
  uint64_t start, end;
  uint32_t device, graph, context, stream;
} GraphRecord;

typedef void (*Callback)(void*, uint32_t, uint32_t, const CallbackData*);
typedef void (*BufferRequested)(uint8_t**, size_t*, size_t*);
typedef void (*BufferCompleted)(void*, uint32_t, uint8_t*, size_t, size_t);

static struct {
  void* handle;
  int (*Subscribe)(void**, Callback, void*);
  int (*Unsubscribe)(void*);
  int (*EnableCallback)(uint32_t, void*, uint32_t, uint32_t);
  int (*GetCallbackName)(uint32_t, uint32_t, const char**);
  int (*GetResultString)(int, const char**);
  int (*GetVersion)(uint32_t*);
  int (*GetDeviceId)(void*, uint32_t*);
  int (*GetStreamIdEx)(void*, void*, uint8_t, uint32_t*);
  int (*ActivityRegisterCallbacks)(BufferRequested, BufferCompleted);
  int (*ActivityRegisterTimestampCallback)(uint64_t (*)(void));
  int (*ActivityEnable)(uint32_t);
  int (*ActivityDisable)(uint32_t);
  int (*ActivityFlushAll)(uint32_t);
  int (*ActivityGetNextRecord)(uint8_t*, size_t, void**);
  int (*ActivityGetNumDroppedRecords)(void*, uint32_t, size_t*);
} cupti;

// ---- the log ----

enum { MOST_CALLS = 2048, MOST_FRAMES = 256, MOST_LOOKED_AT = 8, MOST_NATIVE = 32, MOST_SPARE = 1 << 17 };
// What may take device memory implicitly (cudatool.trace.events.UseFlag).
enum { USE_CONTEXT = 1, USE_MODULE = 2, USE_GRAPH = 4, USE_STREAM = 8, USE_KERNEL = 16, USE_HEAP = 32, USE_POOL = 64 };
enum { CAPTURE_BEGINS = 256, CAPTURE_ENDS = 512 };  // not causes of use, but noted by the same calls

typedef struct {
  // i: 4 bytes; q: 8 bytes; P: what 8 bytes point to; b: 1 byte; h: 2 bytes; .: 8 bytes, left out;
  // n: 8 bytes, of which each value is noted only once; s: a text, whose number among the names is noted;
  // m: an image of code, noted in this word and the two that follow, so that it is the last one
  char arguments[WORDS + 1];
  uint8_t at_enter, wants_library, wants_stream_id;
  uint16_t use;      // the cause of use, one of the above
  uint8_t only_use;  // it gets no row of its own
  uint8_t enqueues;  // for an operation of our runtime its row is an OPERATION, at the call's beginning
  uint8_t launches;  // it is of interest for that only
} Call;

static Call calls[MOST_CALLS];
static void* subscriber;
static __thread uint32_t operation, marked_in;  // of our runtime, open on this thread: its correlation; which recording
static uint32_t recordings;  // begun so far
static int sees_work, sees_launches;
static volatile int recording;  // 0 in a forked child, where CUDA does not work
static pid_t owner;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  // guards all that follows
static Row* rows;
static size_t row_count, row_capacity, most_rows;
static Row* spare;  // a buffer that was read: fresh memory costs the program a page fault for each 4 KiB
static size_t spare_capacity;
static uint64_t lost;
static uint64_t rows_so_far;  // since the memory use was last read
static uint64_t waiting;  // rows that have a place among other sources' events, which are reported when they happen
static char* blob;  // what rows point to: arguments of launches, images of code
static size_t blob_used, blob_capacity;
static uint64_t blob_base;  // how much was read before; rows have offsets from the beginning of the recording

// An interning table: byte strings, numbered from 1 in the order in which they were added.
typedef struct {
  char* bytes;
  size_t used, capacity;
  struct { size_t start, length; }* entries;
  uint32_t count, room;
  uint32_t* slots;
  uint32_t mask, sent;
} Table;

static Table names, frames, stacks, places;
static Table paths;    // of modules of PyTorch
static Table modules;  // their addresses
static uint32_t *path_of_module, module_room;  // by the number of an address; 0 for a module without a name
static uint32_t *real_path, path_room;  // of a path of classes: that of the module that it stood for; itself if not known
static uint32_t *variant_of, variant_room;  // of a path of classes: how often it has stood for another one
static PyCodeObject* module_call;   // of torch.nn.Module.__call__; NULL while modules are not watched
static PyObject* name_modules;      // called soon after a module without a name was seen
static _Atomic int naming;          // whether it will be
static uint64_t naming_took, watched_since;  // ns
enum { MOST_UNNAMED = 64, MOST_NESTED = 16, MOST_VARIANTS = 64, MOST_PATH = 2048, NAMING_AT_FIRST = 200000000, NAMING_SHARE = 100 };
static struct { uint32_t path; uint64_t module; } unnamed[MOST_UNNAMED];  // seen so
static int unnamed_count;
static Table noted;  // values that are noted only once
static Table codes;  // addresses of the code objects in `places`
static int watches_code;  // a destroyed code object is removed from `places`
static uint32_t generation = 1;  // of what is known of frames: a new one begins when code is destroyed
static uint32_t namings;         // of modules: how often one got a name, or lost it
static uint32_t* frame_of_place;  // by the number of a place
static uint32_t place_room;
// Of Python's frames: the number of the chain of outer ones, and that of the innermost, or of its module's path.
static Table chains;
#define IS_MODULE (1u << 31)
static uint32_t* stack_of_chain;  // by the number of a chain; 0 if it has none yet
static uint32_t chain_room;
static void* contexts[64];
static uint32_t context_devices[64];
static int context_count;

static uint64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static uint64_t hashed(const void* data, size_t length) {
  const uint8_t* at = data;
  uint64_t h = 1469598103934665603u;
  for (; length >= 8; at += 8, length -= 8) {
    uint64_t word;
    memcpy(&word, at, 8);
    h = (h ^ word) * 0x9E3779B97F4A7C15u;
    h ^= h >> 29;
  }
  for (; length; at++, length--) h = (h ^ *at) * 1099511628211u;
  return h ^ h >> 32;
}

static int table_grow(Table* table) {
  uint32_t size = table->mask ? (table->mask + 1) * 2 : 1024;
  uint32_t* slots = calloc(size, sizeof *slots);
  if (!slots) return -1;
  for (uint32_t i = 0; i < table->count; i++) {
    uint64_t at = hashed(table->bytes + table->entries[i].start, table->entries[i].length);
    while (slots[at & (size - 1)]) at++;
    slots[at & (size - 1)] = i + 1;
  }
  free(table->slots);
  table->slots = slots;
  table->mask = size - 1;
  return 0;
}

// The number of a key, 0 for none; and its slot, or the one that it would get. The table must have slots.
static uint32_t look_up(const Table* table, const void* data, size_t length, uint64_t* at) {
  *at = hashed(data, length);
  for (uint32_t found; (found = table->slots[*at & table->mask]); ++*at) {
    if (table->entries[found - 1].length == length &&
        !memcmp(table->bytes + table->entries[found - 1].start, data, length)) return found;
  }
  return 0;
}

// The number of a key, which is added if it is new; 0 if out of memory. The lock is held.
static uint32_t intern(Table* table, const void* data, size_t length) {
  if (table->count * 2 >= table->mask && table_grow(table)) return 0;
  uint64_t at;
  uint32_t found = look_up(table, data, length, &at);
  if (found) return found;
  if (table->used + length > table->capacity) {
    size_t capacity = (table->used + length) * 2 + 4096;
    char* bytes = realloc(table->bytes, capacity);
    if (!bytes) return 0;
    table->bytes = bytes;
    table->capacity = capacity;
  }
  if (table->count == table->room) {
    uint32_t room = table->room * 2 + 256;
    void* entries = realloc(table->entries, room * sizeof *table->entries);
    if (!entries) return 0;
    table->entries = entries;
    table->room = room;
  }
  memcpy(table->bytes + table->used, data, length);
  table->entries[table->count].start = table->used;
  table->entries[table->count].length = length;
  table->used += length;
  return table->slots[at & table->mask] = ++table->count;
}

// A row to fill; NULL if the log is full, and then one more row is counted as lost. The lock is held.
static Row* new_row(void) {
  if (!rows && spare) {
    rows = spare;
    row_capacity = spare_capacity;
    spare = NULL;
  }
  if (row_count == row_capacity) {
    size_t capacity = row_capacity ? row_capacity * 2 : 4096;
    Row* more = capacity > most_rows ? NULL : realloc(rows, capacity * sizeof *more);
    if (!more) {
      lost++;
      return NULL;
    }
    rows = more;
    row_capacity = capacity;
  }
  Row* row = &rows[row_count++];
  memset(row, 0, sizeof *row);
  rows_so_far++;
  waiting++;
  return row;
}

enum { MOST_BLOB = 1 << 28, MOST_IMAGE = 1 << 24 };

// The offset of a copy of these bytes in the blob; UINT64_MAX if there is no room. The lock is held.
static uint64_t put_blob(const void* data, size_t length) {
  if (blob_used + length > blob_capacity) {
    size_t capacity = (blob_used + length) * 2 + 4096;
    char* more = capacity > MOST_BLOB ? NULL : realloc(blob, capacity);
    if (!more) return UINT64_MAX;
    blob = more;
    blob_capacity = capacity;
  }
  memcpy(blob + blob_used, data, length);
  blob_used += length;
  return blob_base + blob_used - length;
}

// Whether an array of numbers, 0 where none was put, has a place `at`. The lock is held.
static int has_room(uint32_t** array, uint32_t* room, uint32_t at) {
  if (at < *room) return 1;
  uint32_t size = at * 2 + 256, *more = realloc(*array, size * sizeof *more);
  if (!more) return 0;
  memset(more + *room, 0, (size - *room) * sizeof *more);
  *array = more;
  *room = size;
  return 1;
}

static uint32_t number_in(const uint32_t* array, uint32_t room, uint32_t number) { return number < room ? array[number] : 0; }

// ---- images of code ----

enum { IMAGE_TEXT = 1, IMAGE_ELF = 2, IMAGE_FATBIN = 3 };
#define ELF_MAGIC 0x464C457Fu
#define FATBIN_MAGIC 0xBA55ED50u
#define FATBIN_WRAPPER_MAGIC 0x466243B1u

static uint64_t number_at(const char* at, size_t size) {
  uint64_t value = 0;
  memcpy(&value, at, size);
  return value;
}

// The bytes of an ELF file: up to the end of its last section, segment or table.
static size_t elf_size(const char* image) {
  uint64_t sections = number_at(image + 0x28, 8), segments = number_at(image + 0x20, 8);
  uint64_t section_size = number_at(image + 0x3A, 2), section_count = number_at(image + 0x3C, 2);
  uint64_t end = sections + section_size * section_count;
  uint64_t of_segments = segments + number_at(image + 0x36, 2) * number_at(image + 0x38, 2);
  if (of_segments > end) end = of_segments;
  for (uint64_t i = 0; i < section_count; i++) {
    const char* section = image + sections + i * section_size;
    int has_bytes = number_at(section + 4, 4) != 8;  // SHT_NOBITS
    uint64_t stop = number_at(section + 0x18, 8) + number_at(section + 0x20, 8);
    if (has_bytes && stop > end) end = stop;
  }
  return (size_t)end;
}

// What an image is, where it begins and how long it is; the call that loads it has accepted it.
static int image_at(const char** image, size_t* length) {
  uint32_t magic = (uint32_t)number_at(*image, 4);
  if (magic == FATBIN_WRAPPER_MAGIC) {
    *image = (const char*)(uintptr_t)number_at(*image + 8, 8);
    magic = (uint32_t)number_at(*image, 4);
  }
  if (magic == FATBIN_MAGIC) {
    *length = (size_t)(number_at(*image + 6, 2) + number_at(*image + 8, 8));
    return IMAGE_FATBIN;
  }
  if (magic == ELF_MAGIC) {
    *length = elf_size(*image);
    return IMAGE_ELF;
  }
  *length = strlen(*image);
  return IMAGE_TEXT;
}

// Words: what it is, and its length; a digest; the offset of a copy, unless it is machine code alone. The lock is held.
static void note_image(const char* image, uint64_t* words) {
  size_t length = 0;
  int kind = image_at(&image, &length);
  words[0] = (uint64_t)kind | (uint64_t)length << 8;
  words[1] = length <= MOST_IMAGE ? hashed(image, length) : 0;
  words[2] = kind != IMAGE_ELF && length <= MOST_IMAGE ? put_blob(image, length) : UINT64_MAX;
}

// ---- the caller ----

static __thread uint32_t thread_number;

static uint32_t this_thread(void) {
  if (!thread_number) thread_number = (uint32_t)syscall(SYS_gettid);
  return thread_number;
}

#if READS_FRAMES
static size_t put_text(char* out, size_t room, PyObject* text) {  // UTF-8, cut to the room there is
  if (!text || !PyUnicode_Check(text)) return 0;
  int kind = PyUnicode_KIND(text);
  const void* data = PyUnicode_DATA(text);
  Py_ssize_t length = PyUnicode_GET_LENGTH(text);
  size_t at = 0;
  for (Py_ssize_t i = 0; i < length && at + 4 <= room; i++) {
    Py_UCS4 c = PyUnicode_READ(kind, data, i);
    if (c < 0x80) out[at++] = (char)c;
    else if (c < 0x800) { out[at++] = (char)(0xC0 | c >> 6); out[at++] = (char)(0x80 | (c & 63)); }
    else if (c < 0x10000) {
      out[at++] = (char)(0xE0 | c >> 12); out[at++] = (char)(0x80 | (c >> 6 & 63)); out[at++] = (char)(0x80 | (c & 63));
    } else {
      out[at++] = (char)(0xF0 | c >> 18); out[at++] = (char)(0x80 | (c >> 12 & 63));
      out[at++] = (char)(0x80 | (c >> 6 & 63)); out[at++] = (char)(0x80 | (c & 63));
    }
  }
  return at;
}

static PyCodeObject* code_of(struct _PyInterpreterFrame* frame) {
#if PY_VERSION_HEX >= 0x030D0000
  return frame->f_executable && PyCode_Check(frame->f_executable) ? (PyCodeObject*)frame->f_executable : NULL;
#elif PY_VERSION_HEX >= 0x030C0000
  return frame->owner == FRAME_OWNED_BY_CSTACK ? NULL : frame->f_code;
#else
  return frame->f_code;
#endif
}

// The number of the frame at an instruction of a code object, 0 if out of memory. The lock is held.
static uint32_t frame_at(PyCodeObject* code, int offset) {
  uint64_t place[6] = {(uintptr_t)code, (uint64_t)offset};
  size_t size = 2 * sizeof *place;
  if (!watches_code) {  // then a new code object may reuse a destroyed one's address, but hardly all its parts'
    const void* lines = PyBytes_AS_STRING(code->co_linetable);
    place[2] = (uintptr_t)code->co_filename;
    place[3] = (uintptr_t)code->co_qualname;
    place[4] = (uint64_t)code->co_firstlineno;
    place[5] = hashed(lines, (size_t)PyBytes_GET_SIZE(code->co_linetable));
    size = sizeof place;
  }
  uint32_t known = places.count, at_place = intern(&places, place, size);
  if (!at_place) return 0;
  if (at_place > known) {
    char key[4096];
    intern(&codes, place, sizeof *place);
    if (!has_room(&frame_of_place, &place_room, at_place)) return 0;
    uint32_t line = (uint32_t)PyCode_Addr2Line(code, offset);
    memcpy(key, &line, 4);
    size_t at = 4 + put_text(key + 4, 2800, code->co_filename);
    key[at++] = 0;
    at += put_text(key + at, sizeof key - at, code->co_qualname);
    frame_of_place[at_place] = intern(&frames, key, at);
  }
  return frame_of_place[at_place];
}

// A frame of a thread's last stack, and the number in `chains` of the stack that ends with it. The instruction, which
// lies inside of its code object, tells which code it is as well.
typedef struct {
  const struct _PyInterpreterFrame* at;
  const void* instruction;
  const struct _PyInterpreterFrame* module;  // the innermost frame, up to this one, that calls a module; NULL for none
  uint32_t chain;
} Known;
typedef struct {
  const void* instruction;
  uint32_t outer, chain;
} Step;  // from the stack that ends with a caller to the one that ends with what it calls
typedef struct {
  uint64_t module;
  uint32_t chain, stack;
} Placed;  // the number of the stack that ends with a module that has a name
enum { MOST_STEPS = 512 };
typedef struct {
  Known known[MOST_FRAMES];  // outermost first: most of the next stack is the same
  Known fresh[MOST_FRAMES];  // innermost first: what is not
  int depth;                 // of `known`
  uint32_t generation, namings;
  Step steps[MOST_STEPS];  // taken lately, each at a place of its own
  Placed placed[MOST_STEPS];
} Thread;
static __thread Thread* this_one;
static pthread_key_t ended;  // frees it with the thread

static void end_thread(void* thread) {
  this_one = NULL;  // what else ends with the thread may call the driver
  free(thread);
}

static Thread* this_threads(void) {
  if (!this_one && (this_one = calloc(1, sizeof *this_one))) pthread_setspecific(ended, this_one);
  return this_one;
}

#if PY_VERSION_HEX >= 0x030D0000
#define EXECUTES(frame) ((PyCodeObject*)(frame)->f_executable)
#define INSTRUCTION(frame) ((const void*)(frame)->instr_ptr)
static struct _PyInterpreterFrame* frame_of(const PyThreadState* state) { return state->current_frame; }
#else
#define EXECUTES(frame) ((PyCodeObject*)(frame)->f_code)
#define INSTRUCTION(frame) ((const void*)(frame)->prev_instr)
static struct _PyInterpreterFrame* frame_of(const PyThreadState* state) {
  return state->cframe ? state->cframe->current_frame : NULL;
}
#endif

// Whether frame `at` of the last stack, and all outside of it, are where they were. If not, `*same` is how many of the
// outermost may still be.
static int is_known(const Known* known, int at, const struct _PyInterpreterFrame* frame, int* same) {
  for (; at >= 0; at--, frame = frame->previous) {
    int is_there = known[at].at == frame;
    if (!is_there || known[at].instruction != INSTRUCTION(frame)) {
      *same = at + !is_there;
      return 0;
    }
  }
  *same = 0;
  return !frame;
}

// Put the innermost frames into `fresh`, out to the first from which on all are known; return how many there are.
static int fresh_frames(Thread* thread, struct _PyInterpreterFrame* frame) {
  int count = 0, same = thread->depth;
  thread->depth = 0;
  for (; frame && count < MOST_FRAMES; frame = frame->previous) {
    int at = same, least = same > MOST_LOOKED_AT ? same - MOST_LOOKED_AT : 0;
    while (at > least && thread->known[at - 1].at != frame) at--;
    if (at > least && is_known(thread->known, at - 1, frame, &same)) {
      thread->depth = at;
      break;
    }
    thread->fresh[count++] = (Known){frame, INSTRUCTION(frame), NULL, 0};
  }
  return count;
}

// The number in `chains` of a stack that goes on with a frame. The lock is held.
static uint32_t chain_with(Thread* thread, uint32_t outer, const Known* one) {
  uint64_t mixed = ((uintptr_t)one->instruction ^ (uint64_t)outer << 32) * 0x9E3779B97F4A7C15u;
  Step* step = &thread->steps[mixed >> 32 & (MOST_STEPS - 1)];
  if (step->instruction == one->instruction && step->outer == outer && watches_code) return step->chain;
  struct _PyInterpreterFrame* frame = (struct _PyInterpreterFrame*)one->at;
  PyCodeObject* code = code_of(frame);
  uint32_t chain = outer;
  if (code && !_PyFrame_IsIncomplete(frame)) {
    uint32_t key[2] = {outer, frame_at(code, _PyInterpreterFrame_LASTI(frame) * (int)sizeof(_Py_CODEUNIT))};
    if (key[1]) chain = intern(&chains, key, sizeof key);
  }
  *step = (Step){one->instruction, outer, chain};
  return chain;
}

static int name_soon(void* unused);

// The number of a path of classes. Once it is known for which module one stood, the next one like it, which may stand for
// another module, gets a number of its own: a few times, as numbers must not grow with each step. The lock is held.
static uint32_t path_of_classes(char* path, size_t length, size_t room) {
  uint32_t first = intern(&paths, path, length), number = first;
  if (!first || !has_room(&variant_of, &variant_room, first)) return first;
  for (uint32_t variant = variant_of[first];; variant++) {
    if (variant) {
      int more = snprintf(path + length, room - length, "\n%u", variant);
      number = intern(&paths, path, length + (size_t)more);
    }
    uint32_t real = number_in(real_path, path_room, number);
    variant_of[first] = variant;
    if (!real || real == first || variant == MOST_VARIANTS) return number;
  }
}

// The number of the path of a module, given what the stack has up to the innermost module with a name: its path, and
// the modules inside of it, innermost first. Names are given in Python, which cannot run here: until then a path goes
// on with their classes. So does that of a module which is made again for each call. The lock is held.
static uint32_t path_inside(uint32_t outer, PyObject* const* inside, int count) {
  if (!count) return outer;
  char path[4096];
  size_t at = 0;
  if (outer) {
    at = paths.entries[outer - 1].length;
    memcpy(path, paths.bytes + paths.entries[outer - 1].start, at);
  }
  for (int i = count - 1; i >= 0; i--) {
    const char* class_name = Py_TYPE(inside[i])->tp_name;  // the frame holds the module, and that its class
    size_t length = strlen(class_name);
    if (at + 1 + length > sizeof path - 16) break;
    if (at) path[at++] = '.';
    memcpy(path + at, class_name, length);
    at += length;
  }
  uint32_t number = path_of_classes(path, at, sizeof path);
  int known = 0;
  while (known < unnamed_count && (unnamed[known].path != number || unnamed[known].module != (uintptr_t)inside[0])) known++;
  if (number && known == unnamed_count && known < MOST_UNNAMED) {
    unnamed[known].path = number;
    unnamed[unnamed_count++].module = (uintptr_t)inside[0];
  }
  // A model has its names at once; a program that makes modules for each step must not spend its time on them.
  int may_name = naming_took < NAMING_AT_FIRST + (now() - watched_since) / NAMING_SHARE;
  if (may_name && !atomic_exchange(&naming, 1) && Py_AddPendingCall(name_soon, NULL)) naming = 0;
  return number;
}

// The number of the path of a module that has a name; 0 for one that has none.
static uint32_t name_of_module(uint64_t module) {
  uint64_t slot;
  uint32_t number = modules.count ? look_up(&modules, &module, sizeof module, &slot) : 0;
  return number_in(path_of_module, module_room, number);
}

// The number of the path of the innermost module of PyTorch that is called by these frames, 0 for none.
static uint32_t module_path(struct _PyInterpreterFrame* frame) {
  PyObject* inside[MOST_NESTED];
  int nested = 0;
  uint32_t outer = 0;
  for (; frame && module_call && !outer; frame = frame->previous) {
    if (EXECUTES(frame) != module_call || !frame->localsplus[0]) continue;
    outer = name_of_module((uintptr_t)frame->localsplus[0]);  // its first variable, which is no cell
    if (!outer && nested < MOST_NESTED) inside[nested++] = frame->localsplus[0];
  }
  return path_inside(outer, inside, nested);
}

// The number in `stacks` of a stack: of the number of its calling library's frame or 0, that of its module's path or 0,
// and those of Python's frames, innermost first; 0 if it has none. The lock is held.
static uint32_t stack_of(uint32_t library, uint32_t chain) {
  if (!library && (!chain || (chain < chain_room && stack_of_chain[chain]))) return chain ? stack_of_chain[chain] : 0;
  uint32_t found[MOST_FRAMES + 2] = {library}, count = 2, key[2];
  for (uint32_t at = chain; at; at = key[0]) {
    memcpy(key, chains.bytes + chains.entries[at - 1].start, sizeof key);
    if (key[1] & IS_MODULE) found[1] = key[1] & ~IS_MODULE;
    else found[count++] = key[1];
  }
  uint32_t stack = intern(&stacks, found, count * sizeof *found);
  if (!library && has_room(&stack_of_chain, &chain_room, chain)) stack_of_chain[chain] = stack;
  return stack;
}

// The same for a stack in which a module is called by frame `module`, or by one outside of it.
static uint32_t stack_in_module(uint32_t library, uint32_t chain, struct _PyInterpreterFrame* module) {
  uint32_t key[2] = {chain, module_path(module)};
  if (!key[1] || key[1] >= IS_MODULE) return stack_of(library, chain);
  key[1] |= IS_MODULE;
  return stack_of(library, intern(&chains, key, sizeof key));
}

// The number of this thread's stack. The lock is held; the interpreter's need not be.
static uint32_t stack_below(uint32_t library) {
  Thread* thread = this_threads();
  PyThreadState* state = PyGILState_GetThisThreadState();
  if (!thread || !state) return stack_of(library, 0);
  struct _PyInterpreterFrame *frame = frame_of(state), *innermost = frame;
  // A frame at the same instruction is the same, as long as no code object was destroyed. Code that is not watched may
  // have been.
  if (!watches_code) thread->depth = 0;
  if (thread->generation != generation) {
    thread->depth = 0;
    thread->generation = generation;
    memset(thread->steps, 0, sizeof thread->steps);
  }
  if (thread->namings != namings) {
    thread->namings = namings;
    memset(thread->placed, 0, sizeof thread->placed);
  }
  int count = fresh_frames(thread, frame);
  if (thread->depth + count > MOST_FRAMES) {  // of a deeper stack, the innermost frames
    thread->depth = 0;
    count = fresh_frames(thread, frame);
  }
  const Known* outer = thread->depth ? &thread->known[thread->depth - 1] : NULL;
  while (count) {
    Known* one = &thread->known[thread->depth++];
    *one = thread->fresh[--count];
    one->chain = chain_with(thread, outer ? outer->chain : 0, one);
    one->module = module_call && EXECUTES(one->at) == module_call ? one->at : outer ? outer->module : NULL;
    outer = one;
  }
  uint32_t chain = outer ? outer->chain : 0;
  if (thread->depth == MOST_FRAMES) {  // it may be cut
    thread->depth = 0;
    return stack_in_module(library, chain, innermost);
  }
  struct _PyInterpreterFrame* calls = outer ? (struct _PyInterpreterFrame*)outer->module : NULL;
  if (!calls) return stack_of(library, chain);
  uint64_t module = (uintptr_t)calls->localsplus[0];
  Placed* placed = &thread->placed[(module >> 4 ^ chain * 0x9E3779B9u) & (MOST_STEPS - 1)];
  if (!library && module && placed->module == module && placed->chain == chain) return placed->stack;
  uint32_t stack = stack_in_module(library, chain, calls);
  if (!library && module && name_of_module(module)) *placed = (Placed){module, chain, stack};
  return stack;
}

#if PY_VERSION_HEX >= 0x030C0000
static void table_clear(Table* table) {
  table->used = table->count = table->sent = 0;
  if (table->slots) memset(table->slots, 0, (table->mask + 1) * sizeof *table->slots);
}

static int on_code(PyCodeEvent event, PyCodeObject* code) {
  if (event != PY_CODE_EVENT_DESTROY || !codes.count) return 0;
  uint64_t address = (uintptr_t)code;
  pthread_mutex_lock(&lock);
  uint64_t slot;
  if (codes.count && look_up(&codes, &address, sizeof address, &slot)) {  // rare: all are interned again
    table_clear(&codes);
    table_clear(&places);
    generation++;
  }
  pthread_mutex_unlock(&lock);
  return 0;
}
#endif
#else
static uint32_t stack_below(uint32_t library) {
  uint32_t found[2] = {library, 0};
  return !library ? 0 : intern(&stacks, found, sizeof found);
}
#endif

// ---- modules of PyTorch ----
//
// Each call of a module runs the code of torch.nn.Module.__call__, whose first variable is the module: the innermost of
// these frames says which module takes memory. torch_modules.py gives modules their paths, and takes them away when
// modules are destroyed, before another object can have the address.

#if READS_FRAMES
static int name_soon(void* unused) {  // run by the interpreter, with its lock
  (void)unused;
  naming = 0;
  if (!name_modules) return 0;
  PyObject* callable = Py_NewRef(name_modules);  // it may be replaced during the call
  PyObject* done = PyObject_CallNoArgs(callable);
  Py_DECREF(callable);
  Py_XDECREF(done);
  return done ? 0 : -1;  // what a signal handler of the program raised during the call
}
#endif

static PyObject* py_name_soon(PyObject* self, PyObject* unused) {
  (void)self, (void)unused;
#if READS_FRAMES
  if (!atomic_exchange(&naming, 1) && Py_AddPendingCall(name_soon, NULL)) naming = 0;
#endif
  Py_RETURN_NONE;
}

static PyObject* py_watch_modules(PyObject* self, PyObject* arguments) {
  (void)self;
  PyObject *code, *callable;
  if (!PyArg_ParseTuple(arguments, "OO", &code, &callable)) return NULL;
  int watch = PyCode_Check(code);
  Py_XINCREF(watch ? code : NULL);
  Py_XINCREF(watch ? callable : NULL);
  pthread_mutex_lock(&lock);
  PyObject *old_code = (PyObject*)module_call, *old_callable = name_modules;
  module_call = watch ? (PyCodeObject*)code : NULL;
  name_modules = watch ? callable : NULL;
  for (uint32_t i = 0; i < module_room; i++) path_of_module[i] = 0;  // what is destroyed while none are watched
  namings++;
  generation++;  // other frames call modules
  unnamed_count = 0;
  naming_took = 0;
  watched_since = now();
  pthread_mutex_unlock(&lock);
  Py_XDECREF(old_code), Py_XDECREF(old_callable);
  Py_RETURN_NONE;
}

// For each thread the modules that it is calling, outermost first. A frame object would outlive the call of which it is,
// and with it the program's variables, until the garbage collector runs: none is made.
static PyObject* py_called_modules(PyObject* self, PyObject* unused) {
  (void)self, (void)unused;
  PyObject* found = PyList_New(0);
#if READS_FRAMES
  // Lists are made when all threads were looked at: that may run the garbage collector, and another thread then end.
  PyObject** called = NULL;
  size_t count = 0, room = 0;
  int failed = !found;
  for (PyThreadState* state = PyInterpreterState_ThreadHead(PyInterpreterState_Get()); state && !failed;
       state = PyThreadState_Next(state)) {
    for (struct _PyInterpreterFrame* frame = frame_of(state); !failed; frame = frame->previous) {
      if (frame && (EXECUTES(frame) != module_call || !frame->localsplus[0])) continue;
      if (count == room) {
        PyObject** more = realloc(called, (room = 2 * room + 64) * sizeof *called);
        if ((failed = !more)) break;
        called = more;
      }
      called[count++] = frame ? Py_NewRef(frame->localsplus[0]) : NULL;  // the latter ends a thread
      if (!frame) break;
    }
  }
  PyObject* own = NULL;
  for (size_t i = 0; i < count && !failed; i++) {
    if (!own) failed = !(own = PyList_New(0));
    if (!failed) failed = called[i] ? PyList_Append(own, called[i]) : PyList_Reverse(own) || PyList_Append(found, own);
    if (!called[i]) Py_CLEAR(own);
  }
  Py_XDECREF(own);
  for (size_t i = 0; i < count; i++) Py_XDECREF(called[i]);
  free(called);
  if (failed) Py_CLEAR(found);
  if (failed && !PyErr_Occurred()) PyErr_NoMemory();
#endif
  return found;
}

// The living objects of a type, of those that the garbage collector knows. No other one is kept alive, not for a moment:
// another thread's tensor would keep its memory, and the next one get more. So nothing is made while all are held, which
// might run the collector, and with it code of the program.
static PyObject* py_instances(PyObject* self, PyObject* type) {
  (void)self;
  if (!PyType_Check(type)) return PyErr_Format(PyExc_TypeError, "a type is needed, not %R", type);
  PyObject *found = PyList_New(0), *collector = PyImport_ImportModule("gc");
  PyObject* objects = found && collector ? PyObject_CallMethod(collector, "get_objects", NULL) : NULL;
  int failed = !objects;
  for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(objects); i++) {
    PyObject* one = PyList_GET_ITEM(objects, i);
    if (one != found && PyType_IsSubtype(Py_TYPE(one), (PyTypeObject*)type)) failed = PyList_Append(found, one);
  }
  Py_XDECREF(objects);
  Py_XDECREF(collector);
  if (failed) Py_CLEAR(found);
  return found;
}

static PyObject* py_name_module(PyObject* self, PyObject* arguments) {
  (void)self;
  unsigned long long address;
  const char* path;
  Py_ssize_t length;
  if (!PyArg_ParseTuple(arguments, "Kz#", &address, &path, &length)) return NULL;
  uint64_t key = address, slot;
  if (length > MOST_PATH) length = MOST_PATH;
  pthread_mutex_lock(&lock);
  if (path) {
    uint32_t number = intern(&modules, &key, sizeof key), named = intern(&paths, path, (size_t)length);
    if (number && has_room(&path_of_module, &module_room, number)) path_of_module[number] = named;
  } else {
    uint32_t number = modules.count ? look_up(&modules, &key, sizeof key, &slot) : 0;
    if (number && number < module_room) path_of_module[number] = 0;
  }
  namings++;
  pthread_mutex_unlock(&lock);
  Py_RETURN_NONE;
}

static PyObject* py_unnamed_modules(PyObject* self, PyObject* unused) {
  (void)self, (void)unused;
  uint32_t path[MOST_UNNAMED];
  uint64_t module[MOST_UNNAMED];
  pthread_mutex_lock(&lock);
  int count = unnamed_count;
  for (int i = 0; i < count; i++) path[i] = unnamed[i].path, module[i] = unnamed[i].module;
  unnamed_count = 0;
  pthread_mutex_unlock(&lock);
  PyObject* list = PyList_New(0);
  for (int i = 0; list && i < count; i++) {
    PyObject* pair = Py_BuildValue("(IK)", path[i], (unsigned long long)module[i]);
    if (!pair || PyList_Append(list, pair)) Py_CLEAR(list);
    Py_XDECREF(pair);
  }
  return list;
}

static PyObject* py_modules_named(PyObject* self, PyObject* arguments) {
  (void)self;
  PyObject* found;
  unsigned long long took;
  if (!PyArg_ParseTuple(arguments, "O!K", &PyDict_Type, &found, &took)) return NULL;
  PyObject *number, *path;
  Py_ssize_t at = 0;
  pthread_mutex_lock(&lock);
  naming_took += took;
  while (PyDict_Next(found, &at, &number, &path)) {
    uint32_t made_up = (uint32_t)PyLong_AsUnsignedLong(number);
    Py_ssize_t length;
    const char* text = PyUnicode_AsUTF8AndSize(path, &length);
    if (length > MOST_PATH) length = MOST_PATH;
    if (!text || !made_up || made_up > paths.count) break;
    // Without a path it stays what it is: it may have stood for several modules.
    const char* own = paths.bytes + paths.entries[made_up - 1].start;
    size_t own_length = paths.entries[made_up - 1].length;
    const char* variant = memchr(own, '\n', own_length);
    char kept[4096];
    if (!length) {
      length = variant ? variant - own : (Py_ssize_t)own_length;
      text = memcpy(kept, own, (size_t)length);
    }
    uint32_t real = intern(&paths, text, (size_t)length);
    // Nor with one, if another module has come to it since.
    for (int i = 0; i < unnamed_count; i++) real = unnamed[i].path == made_up ? made_up : real;
    if (has_room(&real_path, &path_room, made_up) && !real_path[made_up]) real_path[made_up] = real;
  }
  pthread_mutex_unlock(&lock);
  if (PyErr_Occurred()) return NULL;
  Py_RETURN_NONE;
}

// The file of the library that called the driver: the first one outside of the driver, its profiling library and its
// runtime. The lock must not be held: the dynamic linker has its own, and programs call the driver while they hold that
// one.
static const char* calling_library(void) {
  void* addresses[MOST_NATIVE];
  int count = backtrace(addresses, MOST_NATIVE);
  const char* last = NULL;
  for (int i = 1; i < count; i++) {
    Dl_info found;
    if (!dladdr(addresses[i], &found) || !found.dli_fname || found.dli_fname == last) continue;
    last = found.dli_fname;
    const char* name = strrchr(last, '/');
    name = name ? name + 1 : last;
    if (!strncmp(name, "libcuda.so", 10) || !strncmp(name, "libcupti", 8) || !strncmp(name, "libcudart", 9) ||
        !strncmp(name, "_cupti.", 7) || !strncmp(name, "libnvidia", 9)) continue;
    return last;
  }
  return NULL;
}

// ---- calls that another source reports ----
//
// While PyTorch's operators are recorded by themselves (torch_log.cpp), its own calls are left out: those inside of an
// operator, which are marked, and those of its libraries, directly or through one of NVIDIA's such as NCCL. The innermost
// library of a native stack that is neither NVIDIA's nor the system's decides, be it the interpreter or an extension that
// PyTorch calls.

enum { NOT_LOOKED_AT, PASSES_ON, REPORTED, OTHERS, MOST_KNOWN = 1 << 12 };
static const char* const reported_names[] = {"libtorch", "libc10", "_C.", NULL};
static const char* const passing_names[] = {
    "_cupti.", "libcu", "libnv", "libnccl", "libc.", "libc-", "libm.", "libdl", "libpthread", "libstdc++", "libgcc_s", "libgomp",
    "ld-linux", NULL};
static char reported_folder[PATH_MAX];  // below which these lie; empty if no calls are left out
static struct {
  const void* address;
  int whose;
} whose_code[MOST_KNOWN];  // return addresses come again and again; guarded by the lock
static __thread uint32_t inside, inside_in;  // marked, how deep; in which recording

static void mark_inside(int change) {
  if (inside_in != recordings) inside = 0, inside_in = recordings;
  if (change > 0 || inside) inside += (uint32_t)change;
}

static int begins_as_one(const char* name, const char* const* beginnings) {
  for (; *beginnings; beginnings++) {
    if (!strncmp(name, *beginnings, strlen(*beginnings))) return 1;
  }
  return 0;
}

static int whose_library(const void* address) {
  Dl_info found;
  char path[PATH_MAX];
  if (!dladdr(address, &found) || !found.dli_fname || !realpath(found.dli_fname, path)) return PASSES_ON;
  size_t length = strlen(reported_folder);
  const char* name = strrchr(path, '/') + 1;
  int is_below = !strncmp(path, reported_folder, length) && path[length] == '/';
  if (is_below && begins_as_one(name, reported_names)) return REPORTED;
  return begins_as_one(name, passing_names) ? PASSES_ON : OTHERS;
}

// The lock must not be held, as for calling_library().
static int is_reported_elsewhere(void) {
  if (!reported_folder[0]) return 0;
  if (inside && inside_in == recordings) return 1;
  void* addresses[MOST_NATIVE];
  int count = backtrace(addresses, MOST_NATIVE);
  for (int i = 1; i < count; i++) {
    size_t place = (uintptr_t)addresses[i] * 0x9E3779B97F4A7C15u >> 52;
    pthread_mutex_lock(&lock);
    int whose = whose_code[place].address == addresses[i] ? whose_code[place].whose : NOT_LOOKED_AT;
    pthread_mutex_unlock(&lock);
    if (whose == NOT_LOOKED_AT) {
      whose = whose_library(addresses[i]);
      pthread_mutex_lock(&lock);
      whose_code[place].address = addresses[i];
      whose_code[place].whose = whose;
      pthread_mutex_unlock(&lock);
    }
    if (whose != PASSES_ON) return whose == REPORTED;
  }
  return 0;
}

static PyObject* py_mark_inside(PyObject* self, PyObject* change) {
  (void)self;
  long value = PyLong_AsLong(change);
  if (value == -1 && PyErr_Occurred()) return NULL;
  mark_inside((int)value);
  Py_RETURN_NONE;
}

static PyObject* py_leave_out(PyObject* self, PyObject* argument) {
  (void)self;
  PyObject* folder = NULL;
  char path[PATH_MAX] = "";
  if (argument != Py_None) {
    if (!PyUnicode_FSConverter(argument, &folder)) return NULL;
    if (!realpath(PyBytes_AS_STRING(folder), path)) path[0] = 0;
    Py_DECREF(folder);
  }
  pthread_mutex_lock(&lock);
  memcpy(reported_folder, path, sizeof path);
  memset(whose_code, 0, sizeof whose_code);
  pthread_mutex_unlock(&lock);
  return PyBool_FromLong(path[0] != 0);
}

// The number of this thread's stack; its first frame is the calling library, if that is given. The lock is held.
static uint32_t this_stack(const char* library) {
  if (!library) return stack_below(0);
  char key[4096] = {0};  // line 0, the file, no function
  size_t length = strnlen(library, sizeof key - 5);
  memcpy(key + 4, library, length);
  return stack_below(intern(&frames, key, 4 + length + 1));
}

// ---- use of device memory ----

typedef struct {
  uint32_t process;
  uint64_t used;
  uint32_t instances[2];
} ProcessUse;  // nvmlProcessInfo_t
typedef struct {
  uint64_t total, free, used;
} DeviceUse;  // nvmlMemory_t

enum { MOST_DEVICES = 16, MOST_PROCESSES = 256, SAMPLE_PAUSE = 2000000 };

static struct {
  int (*Init_v2)(void);
  int (*DeviceGetHandleByPciBusId_v2)(const char*, void**);
  int (*DeviceGetComputeRunningProcesses_v3)(void*, unsigned*, ProcessUse*);
  int (*DeviceGetMemoryInfo)(void*, DeviceUse*);
  int (*bus_of)(char*, int, int);  // cuDeviceGetPCIBusId
  int is_open;  // 1, or -1 if it cannot be initialized
} nvml;
static struct {
  void* handle;
  uint32_t causes;  // since the last sample
  uint64_t sampled;  // when
  uint64_t process, used;  // what was found then
  uint32_t local;    // bytes for each thread, at most, of kernels so far
} sampled_devices[MOST_DEVICES];

static void open_nvml(void) {
  nvml.is_open = -1;
  void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW), *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (!library || !driver) return;
  *(void**)&nvml.Init_v2 = dlsym(library, "nvmlInit_v2");
  *(void**)&nvml.DeviceGetHandleByPciBusId_v2 = dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2");
  *(void**)&nvml.DeviceGetComputeRunningProcesses_v3 = dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3");
  *(void**)&nvml.DeviceGetMemoryInfo = dlsym(library, "nvmlDeviceGetMemoryInfo");
  *(void**)&nvml.bus_of = dlsym(driver, "cuDeviceGetPCIBusId");
  if (nvml.Init_v2 && nvml.DeviceGetHandleByPciBusId_v2 && nvml.DeviceGetComputeRunningProcesses_v3 &&
      nvml.DeviceGetMemoryInfo && nvml.bus_of && !nvml.Init_v2()) nvml.is_open = 1;
}

static int captures;  // of streams, in progress

// Notes what the driver charges to this process on a device. The lock must not be held: NVML is slow and takes locks.
// The driver itself is never queried, and nothing is while a stream is captured: some queries break another thread's
// capture.
static void sample(uint32_t device) {
  char bus[32];
  DeviceUse memory;
  static __thread ProcessUse processes[MOST_PROCESSES];
  unsigned count = MOST_PROCESSES;
  if (device >= MOST_DEVICES || __atomic_load_n(&captures, __ATOMIC_RELAXED) > 0) return;
  if (!nvml.is_open) open_nvml();
  if (nvml.is_open < 0) return;
  void* handle = sampled_devices[device].handle;
  if (!handle && (nvml.bus_of(bus, sizeof bus, (int)device) || nvml.DeviceGetHandleByPciBusId_v2(bus, &handle))) return;
  sampled_devices[device].handle = handle;
  uint32_t causes = __atomic_exchange_n(&sampled_devices[device].causes, 0, __ATOMIC_RELAXED);
  if (nvml.DeviceGetMemoryInfo(handle, &memory)) return;
  uint64_t own = 0;
  if (nvml.DeviceGetComputeRunningProcesses_v3(handle, &count, processes)) count = 0;
  for (unsigned i = 0; i < count; i++) {
    if (processes[i].process == (uint32_t)owner && processes[i].used != UINT64_MAX) own = processes[i].used;
  }
  pthread_mutex_lock(&lock);
  sampled_devices[device].sampled = now();
  int is_known = !causes && sampled_devices[device].process == own && sampled_devices[device].used == memory.used;
  sampled_devices[device].process = own;
  sampled_devices[device].used = memory.used;
  Row* row = is_known ? NULL : new_row();
  if (row) {
    row->time = sampled_devices[device].sampled;
    row->what = USE;
    rows_so_far--;
    row->device = device;
    row->thread = this_thread();
    row->words[0] = own;
    row->words[1] = memory.used;
    row->words[2] = memory.total;
    row->words[3] = causes;
  }
  pthread_mutex_unlock(&lock);
}

static void took(uint32_t device, uint32_t cause) {
  if (device < MOST_DEVICES) __atomic_fetch_or(&sampled_devices[device].causes, cause, __ATOMIC_RELAXED);
}

// ---- callbacks ----

// The device of a context. The lock must not be held: CUPTI returns buffers while it holds a lock of its own.
static uint32_t device_of(void* context) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < context_count; i++) {
    if (contexts[i] == context) {
      pthread_mutex_unlock(&lock);
      return context_devices[i];
    }
  }
  pthread_mutex_unlock(&lock);
  uint32_t device = 0, stream = 0;
  if (!context || cupti.GetDeviceId(context, &device)) return 0;
  cupti.GetStreamIdEx(context, NULL, 0, &stream);
  pthread_mutex_lock(&lock);
  if (context_count < (int)(sizeof contexts / sizeof *contexts)) {
    contexts[context_count] = context;
    context_devices[context_count++] = device;
  }
  Row* row = new_row();
  if (row) {
    row->what = CONTEXT;
    row->time = now();
    row->device = device;
    row->words[0] = stream;
  }
  pthread_mutex_unlock(&lock);
  return device;
}

static int is_first(uint64_t value) {
  pthread_mutex_lock(&lock);
  uint32_t known = noted.count;
  int is_new = intern(&noted, &value, sizeof value) > known;
  pthread_mutex_unlock(&lock);
  return is_new;
}

// Written before the work is enqueued, so that it stands in the log before the record that the work ran.
static void note_operation(const CallbackData* data) {
  pthread_mutex_lock(&lock);
  Row* row = new_row();
  if (row) {
    row->time = now();
    row->what = OPERATION;
    waiting--;
    row->correlation = data->correlation;
    row->words[0] = operation;
  }
  pthread_mutex_unlock(&lock);
}

// ---- launches ----

static uint64_t packed(const int32_t* extents) {
  return (uint32_t)extents[0] | (uint64_t)(extents[1] & 0xFFFF) << 32 | (uint64_t)(extents[2] & 0xFFFF) << 48;
}

// Of other libraries: not, with their arguments, or with as many stacks as MOST_STACKS allows.
enum { NO_LAUNCHES, WITH_ARGUMENTS, WITH_STACKS };
static int notes_launches;
enum { STACKS_PERIOD = 100000000, MOST_STACKS = 500 };  // in so many ns at most so many stacks of launches
static uint64_t stacks_since;
static uint32_t stacks_taken;
enum { MOST_ARGUMENTS = 1 << 15 };  // bytes: the most that a kernel can have (CUDA 12.1 and later)
enum { INVALID_VALUE = 1, INVALID_HANDLE = 400 };  // CUresult
enum { ATTRIBUTE_COOPERATIVE = 2, ATTRIBUTE_PROGRAMMATIC = 6 };  // CUlaunchAttributeID

typedef struct {
  uint32_t grid[3], block[3], shared;
  void* stream;
} Geometry;  // as in the parameters of cuLaunchKernel, and as CUlaunchConfig begins

typedef struct {
  int32_t id;
  char pad[4];
  union { int32_t number; char all[64]; } value;
} LaunchAttribute;

typedef struct {
  Geometry geometry;
  const LaunchAttribute* attributes;
  uint32_t attribute_count;
} LaunchConfig;

typedef struct {
  void* function;
  Geometry geometry;
  void **arguments, **extra;  // the latter is not there in cuLaunchCooperativeKernel
} KernelLaunch;

typedef struct {
  const LaunchConfig* config;
  void* function;
  void **arguments, **extra;
} ConfiguredLaunch;

static struct {
  int (*of_function)(void*, size_t, size_t*, size_t*);  // cuFuncGetParamInfo
  int (*of_kernel)(void*, size_t, size_t*, size_t*);    // cuKernelGetParamInfo
} layout;
static int (*is_capturing)(void*, uint32_t*);  // cuStreamIsCapturing

// Packs a launch's arguments; the bytes, or -1 if they cannot be known. The lock must not be held: it asks the driver.
static int pack_arguments(const KernelLaunch* launch, char* out) {
  void* const* extra = launch->arguments ? NULL : launch->extra;
  if (extra) {  // a buffer with all of them: pairs of a key and a value, up to key 0 (CU_LAUNCH_PARAM_END)
    const void* buffer = NULL;
    size_t size = 0;
    for (; *extra; extra += 2) {
      if (*extra == (void*)1) buffer = extra[1];
      if (*extra == (void*)2) size = *(const size_t*)extra[1];
    }
    if (!buffer || size > MOST_ARGUMENTS) return -1;
    memcpy(out, buffer, size);
    return (int)size;
  }
  size_t end = 0, offset, size;
  if (!layout.of_function || !layout.of_kernel) return -1;
  int (*of)(void*, size_t, size_t*, size_t*) = layout.of_function;
  int status = of(launch->function, 0, &offset, &size);
  if (status == INVALID_HANDLE) status = (of = layout.of_kernel)(launch->function, 0, &offset, &size);
  for (size_t i = 0; !status; status = of(launch->function, ++i, &offset, &size)) {
    if (!launch->arguments || !launch->arguments[i] || offset + size > MOST_ARGUMENTS) return -1;
    if (offset > end) memset(out + end, 0, offset - end);
    memcpy(out + offset, launch->arguments[i], size);
    end = offset + size;
  }
  return status == INVALID_VALUE ? (int)end : -1;  // there is no such parameter: these were all
}

static void note_launch(const CallbackData* data) {
  static __thread char arguments[MOST_ARGUMENTS];
  KernelLaunch launch = {0};
  uint64_t flags = 0;
  if (!strncmp(data->function, "cuLaunchKernelEx", 16)) {
    const ConfiguredLaunch* given = data->params;
    launch = (KernelLaunch){given->function, given->config->geometry, given->arguments, given->extra};
    for (uint32_t i = 0; i < given->config->attribute_count; i++) {
      const LaunchAttribute* one = &given->config->attributes[i];
      if (one->id == ATTRIBUTE_COOPERATIVE && one->value.number) flags |= COOPERATIVE;
      if (one->id == ATTRIBUTE_PROGRAMMATIC && one->value.number) flags |= PROGRAMMATIC;
    }
  } else {
    int is_cooperative = !strncmp(data->function, "cuLaunchCooperativeKernel", 25);
    memcpy(&launch, data->params, is_cooperative ? offsetof(KernelLaunch, extra) : sizeof launch);
    flags = is_cooperative ? COOPERATIVE : 0;
  }
  if (strstr(data->function, "_ptsz")) flags |= PER_THREAD;
  int length = notes_launches == WITH_ARGUMENTS ? pack_arguments(&launch, arguments) : -1;
  if (length < 0) flags |= ARGUMENTS_UNKNOWN;
  uint32_t capture = 0;
  if (__atomic_load_n(&captures, __ATOMIC_RELAXED) > 0 && is_capturing) is_capturing(launch.geometry.stream, &capture);
  if (capture) flags |= CAPTURED;
  uint32_t device = device_of(data->context);
  const char* name = data->symbol ? data->symbol : "";
  pthread_mutex_lock(&lock);
  uint64_t time = now();
  if (time - stacks_since > STACKS_PERIOD) stacks_since = time, stacks_taken = 0;
  int has_stack = notes_launches == WITH_ARGUMENTS || stacks_taken++ < MOST_STACKS;
  uint32_t stack = has_stack ? this_stack(NULL) : 0;
  Row* row = new_row();
  if (row) {
    row->time = time;
    row->what = LAUNCH;
    row->thread = this_thread();
    row->correlation = data->correlation;
    row->stack = stack;
    row->device = device;
    row->context = data->context_uid;
    row->words[0] = (uintptr_t)launch.function;
    row->words[1] = (uintptr_t)launch.geometry.stream;
    row->words[2] = packed((const int32_t*)launch.geometry.grid);
    row->words[3] = packed((const int32_t*)launch.geometry.block);
    row->words[5] = length < 0 ? UINT64_MAX : put_blob(arguments, (size_t)length);
    if (row->words[5] == UINT64_MAX) flags |= ARGUMENTS_UNKNOWN, length = 0;
    row->words[4] = launch.geometry.shared | flags << 32;
    row->words[6] = (uint64_t)length;
    row->words[7] = intern(&names, name, strlen(name));
  }
  pthread_mutex_unlock(&lock);
}

static void on_call(void* unused, uint32_t domain, uint32_t number, const CallbackData* data) {
  (void)unused;
  if (!recording) return;
  if (domain == DOMAIN_RESOURCE) {  // a module, perhaps loaded at its first use in the middle of a launch
    if (number == MODULE_LOADED) took(device_of(*(void* const*)data), USE_MODULE);
    return;
  }
  if (domain != DOMAIN_DRIVER_API || number >= MOST_CALLS) return;
  const Call* call = &calls[number];
  int is_ours = operation && marked_in == recordings;
  if (is_ours && call->enqueues) {
    if (data->site == API_ENTER) note_operation(data);
    return;
  }
  if (call->launches) {
    int succeeded = notes_launches && data->site == API_EXIT && data->result && !*(const int*)data->result;
    if (succeeded && !is_reported_elsewhere()) note_launch(data);
    return;
  }
  if (!call->arguments[0] || (data->site == API_ENTER) != (call->at_enter != 0)) return;
  uint32_t stream = 0;
  int result = data->site == API_EXIT && data->result ? *(const int*)data->result : 0;
  uint64_t words[WORDS] = {0};
  const char* at = data->params;
  for (int i = 0; at && call->arguments[i]; i++) {
    char kind = call->arguments[i];
    size_t size = kind == 'i' ? 4 : kind == 'h' ? 2 : kind == 'b' ? 1 : 8;
    at = (const char*)(((uintptr_t)at + size - 1) & ~(uintptr_t)(size - 1));
    if (kind == 'P') {
      const void* pointer;
      memcpy(&pointer, at, 8);
      if (pointer && data->site == API_EXIT) memcpy(&words[i], pointer, 8);
    } else if (kind != '.') {
      memcpy(&words[i], at, size);
    }
    if (kind == 'n' && !result && !is_first(words[i])) return;  // a call that fails leaves the first one to come
    at += size;
  }
  if (call->use == CAPTURE_BEGINS && !result) __atomic_fetch_add(&captures, 1, __ATOMIC_RELAXED);
  else if (call->use == CAPTURE_ENDS) {  // also queried for streams that are not captured
    if (__atomic_sub_fetch(&captures, 1, __ATOMIC_RELAXED) < 0) __atomic_store_n(&captures, 0, __ATOMIC_RELAXED);
  }
  else if (call->use && !result) {
    // A new context is not current yet: its device is the call's last argument.
    uint32_t device = call->use == USE_CONTEXT ? (uint32_t)words[strlen(call->arguments) - 1] : device_of(data->context);
    took(device, call->use);
    int is_due = device < MOST_DEVICES && now() - sampled_devices[device].sampled > SAMPLE_PAUSE;
    if (call->use == USE_CONTEXT || (call->use == USE_MODULE && is_due)) sample(device);
  }
  if (call->only_use) return;
  if (is_ours && !call->wants_library) return;  // our runtime reports it; memory may be that of a library below it
  if (is_reported_elsewhere()) return;
  if (call->wants_stream_id && !result && data->context) {
    cupti.GetStreamIdEx(data->context, (void*)words[0], 0, &stream);
    words[WORDS - 1] = stream;
  }
  uint32_t device = device_of(data->context);
  const char* library = call->wants_library ? calling_library() : NULL;
  pthread_mutex_lock(&lock);
  uint32_t stack = this_stack(library);
  Row* row = new_row();
  if (row) {
    row->time = now();
    row->what = (uint16_t)number;
    row->result = (uint16_t)result;
    row->thread = this_thread();
    row->correlation = data->correlation;
    row->stack = stack;
    row->device = device;
    row->context = data->context_uid;
    for (int i = 0; call->arguments[i] && !result; i++) {
      const char* given = (const char*)(uintptr_t)words[i];
      if (call->arguments[i] == 's') words[i] = given ? intern(&names, given, strlen(given)) : 0;
      if (call->arguments[i] == 'm' && given) note_image(given, &words[i]);
    }
    memcpy(row->words, words, sizeof words);
  }
  pthread_mutex_unlock(&lock);
}

enum { BUFFER = 1 << 20 };

// A forced flush hands back the buffers of work that still runs, too, and CUPTI may write its end there later. Such buffers
// are not freed: they wait, the oldest first, until a later recording takes them, or this one when there are many. By then
// that work has long ended.
enum { MOST_ASIDE = 64 };
typedef struct {
  uint8_t* buffer;
  uint32_t recording;
} Aside;
static Aside aside[MOST_ASIDE];
static int aside_count;
static atomic_int forces;  // flushes that are forced at the moment

// The oldest buffer, if it may be used; NULL if not. The lock is held.
static uint8_t* take_aside(void) {
  if (!aside_count || (aside[0].recording == recordings && aside_count < MOST_ASIDE)) return NULL;
  uint8_t* oldest = aside[0].buffer;
  memmove(aside, aside + 1, (size_t)--aside_count * sizeof *aside);
  return oldest;
}

// Returns the buffer that is to be freed instead. The lock is held.
static uint8_t* put_aside(uint8_t* buffer) {
  uint8_t* oldest = aside_count == MOST_ASIDE ? take_aside() : NULL;
  aside[aside_count++] = (Aside){buffer, recordings};
  return oldest;
}

static void buffer_requested(uint8_t** buffer, size_t* size, size_t* most) {
  int is_ours = recording && getpid() == owner;
  pthread_mutex_lock(&lock);
  *buffer = is_ours ? take_aside() : NULL;
  pthread_mutex_unlock(&lock);
  if (is_ours && !*buffer) *buffer = aligned_alloc(8, BUFFER);
  *size = *buffer ? BUFFER : 0;
  *most = 0;
}

// When work ran. A forced flush hands back what still runs, too, and then one time or both are 0.
static void set_times(Row* row, uint64_t start, uint64_t end) {
  row->time = row->words[0] = start ? start : now();
  row->words[1] = end > row->time ? end : row->time;
}

static void buffer_completed(void* context, uint32_t stream, uint8_t* buffer, size_t size, size_t valid) {
  (void)size;
  pthread_mutex_lock(&lock);
  for (void* record = NULL; buffer && valid && !cupti.ActivityGetNextRecord(buffer, valid, &record);) {
    uint32_t kind = *(uint32_t*)record;
    int is_work = kind == KIND_KERNEL || kind == KIND_MEMCPY || kind == KIND_MEMSET || kind == KIND_GRAPH;
    Row* row = is_work ? new_row() : NULL;
    if (!row) continue;
    waiting--;
    if (kind == KIND_KERNEL) {
      const KernelRecord* kernel = record;
      row->what = KERNEL;
      row->device = kernel->device;
      row->context = kernel->context;
      row->correlation = kernel->correlation;
      set_times(row, kernel->start, kernel->end);
      row->words[2] = kernel->stream;
      row->words[3] = intern(&names, kernel->name ? kernel->name : "", kernel->name ? strlen(kernel->name) : 0);
      row->words[4] = packed(kernel->grid);
      row->words[5] = packed(kernel->block);
      row->words[6] = (uint64_t)(uint32_t)kernel->static_shared + (uint32_t)kernel->dynamic_shared;
      row->words[7] = kernel->graph;
      if (kernel->device < MOST_DEVICES && kernel->local_per_thread > sampled_devices[kernel->device].local) {
        sampled_devices[kernel->device].local = kernel->local_per_thread;
        took(kernel->device, USE_KERNEL);
      }
    } else if (kind == KIND_GRAPH) {
      const GraphRecord* graph = record;
      row->what = GRAPH;
      row->device = graph->device;
      row->context = graph->context;
      row->correlation = graph->correlation;
      set_times(row, graph->start, graph->end);
      row->words[2] = graph->stream;
    } else {
      const CopyRecord* copy = record;  // a fill has the same fields at the same places
      row->what = kind == KIND_MEMCPY ? COPY : FILL;
      row->device = copy->device;
      row->context = copy->context;
      row->correlation = copy->correlation;
      set_times(row, copy->start, copy->end);
      row->words[2] = copy->stream;
      row->words[3] = copy->bytes;
      row->words[4] = copy->copy_kind;
    }
  }
  size_t dropped = 0;
  if (!cupti.ActivityGetNumDroppedRecords(context, stream, &dropped) && dropped) lost += dropped;
  if (buffer && forces) buffer = put_aside(buffer);
  pthread_mutex_unlock(&lock);
  free(buffer);
}

// ---- for other extensions ----

// The number of this thread's Python stack, 0 where there is none.
static uint32_t stack_here(void) {
  if (!recording) return 0;
  pthread_mutex_lock(&lock);
  uint32_t stack = this_stack(NULL);
  pthread_mutex_unlock(&lock);
  return stack;
}

// A row of this thread with these words; NULL as new_row() has it. The lock is held.
static Row* row_of_thread(uint16_t what, const uint64_t* words) {
  Row* row = new_row();
  if (row) {
    row->time = now();
    row->what = what;
    row->thread = this_thread();
    memcpy(row->words, words, sizeof row->words);
  }
  return row;
}

enum { HERE = -1 };  // for a stack: this thread's

// A row of this thread; `stack` may be HERE.
static void note(uint16_t what, uint32_t device, uint32_t stack, const uint64_t* words) {
  if (!recording) return;
  pthread_mutex_lock(&lock);
  if (stack == (uint32_t)HERE) stack = this_stack(NULL);
  Row* row = row_of_thread(what, words);
  if (row) {
    row->stack = stack;
    row->device = device;
  }
  pthread_mutex_unlock(&lock);
}

// PyTorch's allocator has released a block. Mostly that is the end of the call that asked for it, whose row is the last
// one, and becomes the row of both.
static void note_released(uint32_t device, const uint64_t* words) {
  if (!recording) return;
  pthread_mutex_lock(&lock);
  Row* last = row_count ? &rows[row_count - 1] : NULL;
  if (last && last->what == BLOCK && last->words[0] == FREE_REQUESTED && last->words[1] == words[1] &&
      last->device == device && last->thread == this_thread()) {
    last->words[0] = FREED;
  } else {
    Row* row = row_of_thread(BLOCK, words);
    if (row) row->device = device;
  }
  pthread_mutex_unlock(&lock);
}

// A row of this thread that points to a text: its offset and its length are words 1 and 2.
static void note_text(uint16_t what, const char* text, const uint64_t* words) {
  if (!recording) return;
  pthread_mutex_lock(&lock);
  Row* row = row_of_thread(what, words);
  if (row) {
    row->words[2] = strlen(text);
    row->words[1] = put_blob(text, row->words[2]);
  }
  pthread_mutex_unlock(&lock);
}

// The number of the path of the module that is called in a stack, 0 for none.
static uint32_t module_of(uint32_t stack) {
  uint32_t module = 0;
  pthread_mutex_lock(&lock);
  if (stack && stack <= stacks.count) {
    memcpy(&module, stacks.bytes + stacks.entries[stack - 1].start + sizeof module, sizeof module);
  }
  pthread_mutex_unlock(&lock);
  return module;
}

static struct {
  uint32_t (*stack_here)(void);
  void (*note)(uint16_t, uint32_t, uint32_t, const uint64_t*);
  void (*note_text)(uint16_t, const char*, const uint64_t*);
  uint32_t (*module_of)(uint32_t);
  void (*note_released)(uint32_t, const uint64_t*);
  void (*mark_inside)(int);
} for_others = {stack_here, note, note_text, module_of, note_released, mark_inside};

// A method of a CuPy memory hook: a C function, since a program's signal handler must not raise inside of it. It never
// fails.
static PyObject* note_of_pool(uint16_t what, PyObject* facts) {
  const char* names[] = {"mem_ptr", "mem_size", "size", "device_id"};
  uint64_t words[8] = {0};  // address, rounded size, requested size; of a free without the latter
  for (int i = 0; recording && facts && i < 4; i++) {
    PyObject* fact = PyDict_GetItemString(facts, names[i]);
    words[i] = fact ? PyLong_AsUnsignedLongLong(fact) : 0;
  }
  PyErr_Clear();
  uint32_t device = (uint32_t)words[3];
  words[3] = 0;
  if (words[0] && words[1]) note(what, device, stack_here(), words);  // the address is 0 where nothing was allocated
  Py_RETURN_NONE;
}

static PyObject* py_pool_alloc(PyObject* self, PyObject* unused, PyObject* facts) {
  (void)self, (void)unused;
  return note_of_pool(POOL_ALLOC, facts);
}

static PyObject* py_pool_free(PyObject* self, PyObject* unused, PyObject* facts) {
  (void)self, (void)unused;
  return note_of_pool(POOL_FREE, facts);
}

// ---- Python ----

static const char* text_of(int status) {
  const char* text = NULL;
  return !cupti.GetResultString(status, &text) && text ? text : "unknown error";
}

static int load(const char* path) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    PyErr_Format(PyExc_OSError, "%s", dlerror());
    return -1;
  }
#define FIND(name)                                                                       \
  if (!(*(void**)&cupti.name = dlsym(handle, "cupti" #name))) {                          \
    PyErr_SetString(PyExc_OSError, "this libcupti has no function cupti" #name);         \
    return -1;                                                                           \
  }
  FIND(Subscribe) FIND(Unsubscribe) FIND(EnableCallback) FIND(GetCallbackName) FIND(GetResultString) FIND(GetVersion)
  FIND(GetDeviceId) FIND(GetStreamIdEx) FIND(ActivityRegisterCallbacks) FIND(ActivityRegisterTimestampCallback)
  FIND(ActivityEnable) FIND(ActivityDisable) FIND(ActivityFlushAll) FIND(ActivityGetNextRecord)
  FIND(ActivityGetNumDroppedRecords)
#undef FIND
  cupti.handle = handle;
  return 0;
}

static PyObject* py_open(PyObject* self, PyObject* arguments) {
  (void)self;
  const char* path;
  if (!PyArg_ParseTuple(arguments, "s", &path)) return NULL;
  uint32_t version = 0;
  if (load(path)) return NULL;
  cupti.GetVersion(&version);
  return PyLong_FromUnsignedLong(version);
}

static void begin_log(unsigned long long most) {
  owner = getpid();
  pthread_mutex_lock(&lock);
  most_rows = (size_t)most;
  row_count = lost = waiting = 0;  // what the previous recording did not read
  blob_used = blob_base = 0;
  notes_launches = NO_LAUNCHES;
  captures = 0;
  names.sent = frames.sent = stacks.sent = paths.sent = 0;
  context_count = 0;
  sees_work = sees_launches = 0;
  recordings++;
  pthread_mutex_unlock(&lock);
}

static PyObject* py_start_alone(PyObject* self, PyObject* most) {
  (void)self;
  unsigned long long value = PyLong_AsUnsignedLongLong(most);
  if (value == (unsigned long long)-1 && PyErr_Occurred()) return NULL;
  if (recording) {
    PyErr_SetString(PyExc_RuntimeError, "it records already");
    return NULL;
  }
  begin_log(value);
  recording = 1;
  Py_RETURN_NONE;
}

static PyObject* py_start(PyObject* self, PyObject* arguments) {
  (void)self;
  PyObject* chosen;
  unsigned long long most;
  if (!PyArg_ParseTuple(arguments, "O!K", &PyDict_Type, &chosen, &most)) return NULL;
  if (!cupti.handle || subscriber) {
    PyErr_SetString(PyExc_RuntimeError, subscriber ? "it records already" : "no libcupti is open");
    return NULL;
  }
  int status = cupti.Subscribe(&subscriber, on_call, NULL);
  if (status) {
    subscriber = NULL;
    PyErr_SetString(PyExc_OSError, text_of(status));
    return NULL;
  }
  void* frame[2];
  backtrace(frame, 2);  // the first call loads a library, which must not happen in a callback
  begin_log(most);
  memset(calls, 0, sizeof calls);
  PyObject* numbers = PyDict_New();
  for (uint32_t number = 1; numbers && number < MOST_CALLS; number++) {
    const char* name;
    if (cupti.GetCallbackName(DOMAIN_DRIVER_API, number, &name) || !name) continue;
    PyObject* row = PyDict_GetItemString(chosen, name);
    if (!row) continue;
    const char* layout;
    int at_enter, wants_library, wants_stream_id, use, only_use, enqueues = 0, launches = 0;
    if (!PyArg_ParseTuple(row, "spppip|pp", &layout, &at_enter, &wants_library, &wants_stream_id, &use, &only_use,
                          &enqueues, &launches)) {
      goto failed;
    }
    Call* call = &calls[number];
    strncpy(call->arguments, layout, WORDS);
    call->at_enter = (uint8_t)at_enter;
    call->wants_library = (uint8_t)wants_library;
    call->wants_stream_id = (uint8_t)wants_stream_id;
    call->use = (uint16_t)use;
    call->only_use = (uint8_t)only_use;
    call->enqueues = (uint8_t)enqueues;
    call->launches = (uint8_t)launches;
    if (launches) continue;  // until our runtime works
    PyObject *key = PyLong_FromLong((long)number), *value = PyUnicode_FromString(name);
    int bad = !key || !value || PyDict_SetItem(numbers, key, value);
    Py_XDECREF(key);
    Py_XDECREF(value);
    if (bad) goto failed;
    if ((status = cupti.EnableCallback(1, subscriber, DOMAIN_DRIVER_API, number))) {
      PyErr_SetString(PyExc_OSError, text_of(status));
      goto failed;
    }
  }
  cupti.EnableCallback(1, subscriber, DOMAIN_RESOURCE, MODULE_LOADED);  // refused, some memory has a vaguer cause
  recording = 1;
  return numbers;
failed:
  Py_XDECREF(numbers);
  cupti.Unsubscribe(subscriber);
  subscriber = NULL;
  return NULL;
}

static void enable_launches(int on) {
  for (uint32_t number = 1; number < MOST_CALLS; number++) {
    // Where that is refused, it is not known when our runtime's kernels ran, nor what other libraries' may touch.
    if (calls[number].launches) cupti.EnableCallback((uint32_t)on, subscriber, DOMAIN_DRIVER_API, number);
  }
  sees_launches = on;
}

static PyObject* py_watch_launches(PyObject* self, PyObject* argument) {
  (void)self;
  long how = PyLong_AsLong(argument);
  if (how == -1 && PyErr_Occurred()) return NULL;
  if (how == NO_LAUNCHES) {
    notes_launches = NO_LAUNCHES;
    if (!sees_work && subscriber && getpid() == owner) enable_launches(0);
    Py_RETURN_NONE;
  }
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver) {
    *(void**)&layout.of_function = dlsym(driver, "cuFuncGetParamInfo");
    *(void**)&layout.of_kernel = dlsym(driver, "cuKernelGetParamInfo");
    *(void**)&is_capturing = dlsym(driver, "cuStreamIsCapturing");
  }
  notes_launches = (int)how;
  enable_launches(1);
  Py_RETURN_NONE;
}

// Called at the beginning and at the end (0) of each operation of our runtime.
static PyObject* py_mark(PyObject* self, PyObject* correlation) {
  (void)self;
  unsigned long value = PyLong_AsUnsignedLongMask(correlation);
  if (value == (unsigned long)-1 && PyErr_Occurred()) return NULL;
  operation = (uint32_t)value;
  marked_in = recordings;  // its end is not marked if the recording ends first
  if (operation && sees_work && recording && !sees_launches && getpid() == owner) enable_launches(1);
  Py_RETURN_NONE;
}

static const uint32_t activities[] = {KIND_KERNEL, KIND_MEMCPY, KIND_MEMSET, KIND_GRAPH};

static PyObject* py_watch_activity(PyObject* self, PyObject* arguments) {
  (void)self;
  int inside_graphs;
  if (!PyArg_ParseTuple(arguments, "p", &inside_graphs)) return NULL;
  int status = cupti.ActivityRegisterTimestampCallback(now);
  if (!status) status = cupti.ActivityRegisterCallbacks(buffer_requested, buffer_completed);
  size_t count = sizeof activities / sizeof *activities;
  for (size_t i = 0; !status && i < count; i++) {
    if (activities[i] != KIND_GRAPH || !inside_graphs) status = cupti.ActivityEnable(activities[i]);
  }
  if (status) {
    PyErr_SetString(PyExc_OSError, text_of(status));
    return NULL;
  }
  sees_work = 1;
  Py_RETURN_NONE;
}

static PyObject* py_is_waiting(PyObject* self, PyObject* unused) {
  (void)self, (void)unused;
  return PyBool_FromLong(__atomic_load_n(&waiting, __ATOMIC_RELAXED) != 0);
}

static PyObject* py_sample_use(PyObject* self, PyObject* unused) {
  (void)self, (void)unused;
  uint32_t devices = 0;
  pthread_mutex_lock(&lock);
  int is_news = rows_so_far != 0;
  rows_so_far = 0;
  for (int i = 0; i < context_count; i++) devices |= context_devices[i] < MOST_DEVICES ? 1u << context_devices[i] : 0;
  pthread_mutex_unlock(&lock);
  if (!recording || getpid() != owner) Py_RETURN_NONE;
  Py_BEGIN_ALLOW_THREADS
  for (uint32_t device = 0; device < MOST_DEVICES; device++) {
    if (devices >> device & 1 && (is_news || sampled_devices[device].causes)) sample(device);
  }
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

static PyObject* py_flush(PyObject* self, PyObject* arguments) {
  (void)self;
  int forced = 0;
  if (!PyArg_ParseTuple(arguments, "|p", &forced)) return NULL;
  if (subscriber && getpid() == owner) {
    Py_BEGIN_ALLOW_THREADS  // buffer_completed takes our lock, and CUPTI takes its own
    forces += forced;
    cupti.ActivityFlushAll(forced ? 1 : 0);
    forces -= forced;
    Py_END_ALLOW_THREADS
  }
  Py_RETURN_NONE;
}

// Adds the entries that have not been returned yet.
static int send_new(Table* table, PyObject* list) {
  for (; table->sent < table->count; table->sent++) {
    uint32_t which = table->sent;
    if (table == &paths && number_in(real_path, path_room, which + 1)) which = real_path[which + 1] - 1;
    PyObject* bytes = PyBytes_FromStringAndSize(
        table->bytes + table->entries[which].start, (Py_ssize_t)table->entries[which].length);
    int failed = !bytes || PyList_Append(list, bytes);
    Py_XDECREF(bytes);
    if (failed) return -1;
  }
  return 0;
}

static PyObject* py_digest(PyObject* self, PyObject* image) {
  (void)self;
  char* data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(image, &data, &size)) return NULL;
  return PyLong_FromUnsignedLongLong(hashed(data, (size_t)size));
}

static PyObject* py_drain(PyObject* self, PyObject* unused) {
  (void)self, (void)unused;
  // Made before the lock is taken: making a list may run the garbage collector, and that a finalizer, which calls the
  // driver. The collector does not track bytes.
  PyObject *new_names = PyList_New(0), *new_frames = PyList_New(0), *new_stacks = PyList_New(0), *data = NULL;
  PyObject *new_paths = PyList_New(0), *pointed_to = NULL;
  if (!new_names || !new_frames || !new_stacks || !new_paths) goto failed;
  // A thread that has this lock never waits for the interpreter's, so this cannot deadlock.
  pthread_mutex_lock(&lock);
  if (!row_count && !lost) {
    pthread_mutex_unlock(&lock);
    Py_DECREF(new_names), Py_DECREF(new_frames), Py_DECREF(new_stacks), Py_DECREF(new_paths);
    Py_RETURN_NONE;
  }
  Row* taken = rows;
  size_t count = row_count, capacity = row_capacity;
  uint64_t missing = lost;
  rows = NULL;
  row_count = row_capacity = 0;
  lost = waiting = 0;
  int failed = send_new(&names, new_names) || send_new(&frames, new_frames) || send_new(&stacks, new_stacks) ||
               send_new(&paths, new_paths);
  uint64_t base = blob_base;
  if (!failed) pointed_to = PyBytes_FromStringAndSize(blob, (Py_ssize_t)blob_used);
  blob_base += blob_used;
  blob_used = 0;
  pthread_mutex_unlock(&lock);
  if (pointed_to) data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof *taken));
  Py_BEGIN_ALLOW_THREADS
  if (data && count) memcpy(PyBytes_AS_STRING(data), taken, count * sizeof *taken);
  pthread_mutex_lock(&lock);
  if (!spare && capacity <= MOST_SPARE) {
    spare = taken;
    spare_capacity = capacity;
    taken = NULL;
  }
  pthread_mutex_unlock(&lock);
  free(taken);
  Py_END_ALLOW_THREADS
  if (data) {
    return Py_BuildValue("(NNNNNKKN)", data, new_names, new_frames, new_stacks, new_paths, (unsigned long long)missing,
                         (unsigned long long)base, pointed_to);
  }
  Py_XDECREF(pointed_to);
failed:
  Py_XDECREF(new_names), Py_XDECREF(new_frames), Py_XDECREF(new_stacks), Py_XDECREF(new_paths);
  return NULL;
}

static PyObject* py_stop(PyObject* self, PyObject* unused) {
  (void)self, (void)unused;
  recording = 0;
  if (subscriber && getpid() == owner) {
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < sizeof activities / sizeof *activities; i++) cupti.ActivityDisable(activities[i]);
    cupti.Unsubscribe(subscriber);
    Py_END_ALLOW_THREADS
  }
  subscriber = NULL;
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"open", py_open, METH_VARARGS, "open(path): load libcupti; its version"},
    {"start", py_start, METH_VARARGS,
     "start({call: (arguments, at its beginning, with the library, with the stream's id, UseFlag, whether only that, "
     "whether it enqueues work, whether it matters for that only)}, "
     "most rows): number -> call"},
    {"start_alone", py_start_alone, METH_O,
     "start_alone(most rows): open the log without CUPTI, for what others write to it, until stop()"},
    {"watch_activity", py_watch_activity, METH_VARARGS,
     "watch_activity(inside_graphs): kernels, copies, fills and graphs, too; or instead of graphs what they consist of"},
    {"mark", py_mark, METH_O, "mark(correlation): what this thread enqueues from now on is of this operation; 0 for none"},
    {"is_waiting", py_is_waiting, METH_NOARGS,
     "is_waiting(): whether the log has rows that come before what other sources report from now on"},
    {"sample_use", py_sample_use, METH_NOARGS, "sample_use(): note what this process uses of the devices, if it may be new"},
    {"flush", py_flush, METH_VARARGS, "flush(forced=False): have CUPTI hand back its buffers"},
    {"watch_launches", py_watch_launches, METH_O, "watch_launches(how): each launch, too: 1 with its arguments, 2 with a sample of stacks, or no more: 0"},
    {"leave_out", py_leave_out, METH_O,
     "leave_out(folder): the calls of PyTorch, whose folder this is, from now on, for another source reports them; None: "
     "no longer. Whether they are left out"},
    {"mark_inside", py_mark_inside, METH_O,
     "mark_inside(change): this thread enters (1), or leaves (-1), what another source reports"},
    {"digest", py_digest, METH_O, "digest(image): the number by which rows name an image of code"},
    {"drain", py_drain, METH_NOARGS,
     "drain(): rows, new names, new frames, new stacks, new paths of modules, number of rows lost, offset of what rows point to, and its bytes; "
     "None if there are no rows"},
    {"watch_modules", py_watch_modules, METH_VARARGS,
     "watch_modules(code, callable): note in stacks the module that is the first variable of the innermost frame of this "
     "code, and have modules without a name named soon after; or no more: None, None"},
    {"name_soon", py_name_soon, METH_NOARGS, "name_soon(): have that function called soon in the main thread"},
    {"name_module", py_name_module, METH_VARARGS, "name_module(address, path): give a module its path, None for none"},
    {"instances", py_instances, METH_O, "instances(type): the living objects of a type"},
    {"called_modules", py_called_modules, METH_NOARGS,
     "called_modules(): for each thread the modules of PyTorch that it is calling, outermost first"},
    {"unnamed_modules", py_unnamed_modules, METH_NOARGS,
     "unnamed_modules(): number of the path of classes that was noted, and address, of modules without a name since the last "
     "call"},
    {"modules_named", py_modules_named, METH_VARARGS,
     "modules_named({number: path}, ns it took): for which modules these paths of classes stand; empty if it is not known"},
    {"pool_alloc", (PyCFunction)(void (*)(void))py_pool_alloc, METH_VARARGS | METH_KEYWORDS,
     "pool_alloc(*, mem_ptr, mem_size, size, device_id): CuPy's malloc_postprocess"},
    {"pool_free", (PyCFunction)(void (*)(void))py_pool_free, METH_VARARGS | METH_KEYWORDS,
     "pool_free(*, mem_ptr, mem_size, device_id): CuPy's free_preprocess"},
    {"stop", py_stop, METH_NOARGS, "stop()"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cupti", "The driver's calls and the device's work.", -1,
                                    methods, NULL, NULL, NULL, NULL};

static void in_child(void) {  // another thread may have held the lock, and the log is the parent's
  recording = 0;
  pthread_mutex_init(&lock, NULL);
  row_count = waiting = 0;
}

PyMODINIT_FUNC PyInit__cupti(void) {
  if (pthread_atfork(NULL, NULL, in_child)) return PyErr_NoMemory();
#if READS_FRAMES
  if (pthread_key_create(&ended, end_thread)) return PyErr_NoMemory();
#endif
#if READS_FRAMES && PY_VERSION_HEX >= 0x030C0000
  watches_code = PyCode_AddWatcher(on_code) >= 0;
  if (!watches_code) PyErr_Clear();
#endif
  PyObject* made = PyModule_Create(&module);
  PyObject* capsule = PyCapsule_New(&for_others, "cudatool.collect._cupti.log", NULL);
  if (made && PyModule_AddObjectRef(made, "log", capsule)) Py_CLEAR(made);
  if (made && PyModule_AddIntConstant(made, "MOST_UNNAMED", MOST_UNNAMED)) Py_CLEAR(made);
  Py_XDECREF(capsule);
  return made;
}
