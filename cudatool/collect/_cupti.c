// What any program asks of the CUDA driver, and when its kernels and copies ran, through CUPTI.
//
//   driver calls    a callback at each of the calls that Python has chosen: arguments, result, thread, Python's stack
//                   and, where asked, the library that called. Launches are not among them: a callback costs too much.
//   activity        kernels, copies and fills, with their times on the device, in buffers that CUPTI hands back
//
// Everything becomes a row of one size, in a log that Python drains. Here nothing takes the interpreter's lock, since a
// library may call the driver while it holds a lock of its own that another thread, with the interpreter's, waits for.
// So a thread reads its own frames, which stand still while it is in here.
//
// CUPTI is found at run time, and its few structures are declared here: the package builds where it is not installed.

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)
#define READS_FRAMES 1
#define Py_BUILD_CORE
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#else
#define READS_FRAMES 0  // stacks have the calling library alone
#endif

// ---- CUPTI, as documented in its headers (cupti_callbacks.h, cupti_activity.h) ----

enum { DOMAIN_DRIVER_API = 1, API_ENTER = 0, API_EXIT = 1 };
enum { KIND_MEMCPY = 1, KIND_MEMSET = 2, KIND_KERNEL = 10, KIND_MEMCPY_PEER = 22 };

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

enum { WORDS = 8, MOST_CALLS = 2048, MOST_FRAMES = 256, MOST_NATIVE = 32 };
// What a row tells that is no driver call.
enum { KERNEL = 0xFF01, COPY = 0xFF02, FILL = 0xFF03, CONTEXT = 0xFF05, DROPPED = 0xFF06 };

typedef struct {
  uint64_t time;
  uint16_t what;  // the callback's number, or one of the above
  uint16_t result;
  uint32_t thread, correlation, stack, device, context;
  uint64_t words[WORDS];
} Row;

typedef struct {
  char arguments[WORDS + 1];  // i: 4 bytes; q: 8 bytes; P: what 8 bytes point to; b: 1 byte; h: 2 bytes; .: 8 bytes, left out
  uint8_t at_enter, wants_library, wants_stream_id;
} Call;

static Call calls[MOST_CALLS];
static void* subscriber;
static volatile int recording;
static pid_t owner;  // a forked child has no CUDA of its own

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  // of all that follows
static Row* rows;
static size_t row_count, row_capacity, most_rows;
static uint64_t lost;

// An interning table: keys of bytes, numbered from 1 on in the order in which they came.
typedef struct {
  char* bytes;
  size_t used, capacity;
  struct { size_t start, length; }* entries;
  uint32_t count, room;
  uint32_t* slots;
  uint32_t mask, told;
} Table;

static Table names, frames, stacks, places;
static uint32_t* frame_of_place;  // by the number of a place
static uint32_t place_room;
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

// The number of a key, 0 where memory is out. The lock is held.
static uint32_t intern(Table* table, const void* data, size_t length) {
  if (table->count * 2 >= table->mask && table_grow(table)) return 0;
  uint64_t at = hashed(data, length);
  for (uint32_t found; (found = table->slots[at & table->mask]); at++) {
    if (table->entries[found - 1].length == length &&
        !memcmp(table->bytes + table->entries[found - 1].start, data, length)) return found;
  }
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

// A row to fill, NULL where there is no room: then it is counted as lost. The lock is held.
static Row* new_row(void) {
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
  return row;
}

// ---- who calls ----

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

// The numbers of this thread's frames, innermost first. The lock is held; the interpreter's need not be.
static int python_frames(uint32_t* out, int room) {
  PyThreadState* state = PyGILState_GetThisThreadState();
  if (!state) return 0;
#if PY_VERSION_HEX >= 0x030D0000
  struct _PyInterpreterFrame* frame = state->current_frame;
#else
  struct _PyInterpreterFrame* frame = state->cframe ? state->cframe->current_frame : NULL;
#endif
  int count = 0;
  char key[4096];
  for (; frame && count < room; frame = frame->previous) {
    PyCodeObject* code = code_of(frame);
    if (!code || _PyFrame_IsIncomplete(frame)) continue;
    // A place is known by its code object and what that consists of: a new one may get the address of one that is gone.
    int offset = _PyInterpreterFrame_LASTI(frame) * (int)sizeof(_Py_CODEUNIT);
    const void* lines = PyBytes_AS_STRING(code->co_linetable);
    uint64_t place[] = {(uintptr_t)code, (uint64_t)offset, (uintptr_t)code->co_filename, (uintptr_t)code->co_qualname,
                        (uint64_t)code->co_firstlineno, hashed(lines, (size_t)PyBytes_GET_SIZE(code->co_linetable))};
    uint32_t known = places.count, at_place = intern(&places, place, sizeof place);
    if (!at_place) continue;
    if (at_place > known) {
      if (at_place >= place_room) {
        uint32_t room = at_place * 2 + 256;
        uint32_t* more = realloc(frame_of_place, room * sizeof *more);
        if (!more) continue;
        frame_of_place = more;
        place_room = room;
      }
      uint32_t line = (uint32_t)PyCode_Addr2Line(code, offset);
      memcpy(key, &line, 4);
      size_t at = 4 + put_text(key + 4, 2800, code->co_filename);
      key[at++] = 0;
      at += put_text(key + at, sizeof key - at, code->co_qualname);
      frame_of_place[at_place] = intern(&frames, key, at);
    }
    if (at_place < place_room && frame_of_place[at_place]) out[count++] = frame_of_place[at_place];
  }
  return count;
}
#else
static int python_frames(uint32_t* out, int room) { return 0; }
#endif

// The file of the library that called the driver: the first one outside of the driver, its profiling library and its
// runtime. The lock must not be held: the dynamic linker has one of its own, under which programs call the driver, too.
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

// The number of a stack; its first frame is the calling library, 0 where that is not known. The lock is held.
static uint32_t this_stack(const char* library) {
  uint32_t found[MOST_FRAMES + 1] = {0};
  if (library) {
    char key[4096] = {0};  // line 0, the file, no function
    size_t length = strnlen(library, sizeof key - 5);
    memcpy(key + 4, library, length);
    found[0] = intern(&frames, key, 4 + length + 1);
  }
  int count = python_frames(found + 1, MOST_FRAMES);
  return intern(&stacks, found, (size_t)(count + 1) * sizeof *found);
}

// ---- callbacks ----

// The device of a context. The lock must not be held: CUPTI has one of its own, under which it hands back buffers.
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

static void on_call(void* unused, uint32_t domain, uint32_t number, const CallbackData* data) {
  (void)unused;
  if (!recording || domain != DOMAIN_DRIVER_API || number >= MOST_CALLS || getpid() != owner) return;
  const Call* call = &calls[number];
  if (!call->arguments[0] || (data->site == API_ENTER) != (call->at_enter != 0)) return;
  uint32_t stream = 0;
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
    at += size;
  }
  int result = data->site == API_EXIT && data->result ? *(const int*)data->result : 0;
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
    memcpy(row->words, words, sizeof words);
  }
  pthread_mutex_unlock(&lock);
}

enum { BUFFER = 1 << 20 };

static void buffer_requested(uint8_t** buffer, size_t* size, size_t* most) {
  *buffer = recording && getpid() == owner ? aligned_alloc(8, BUFFER) : NULL;
  *size = *buffer ? BUFFER : 0;
  *most = 0;
}

static uint64_t packed(const int32_t* extents) {
  return (uint32_t)extents[0] | (uint64_t)(extents[1] & 0xFFFF) << 32 | (uint64_t)(extents[2] & 0xFFFF) << 48;
}

static void buffer_completed(void* context, uint32_t stream, uint8_t* buffer, size_t size, size_t valid) {
  (void)size;
  pthread_mutex_lock(&lock);
  for (void* record = NULL; buffer && valid && !cupti.ActivityGetNextRecord(buffer, valid, &record);) {
    uint32_t kind = *(uint32_t*)record;
    Row* row = kind == KIND_KERNEL || kind == KIND_MEMCPY || kind == KIND_MEMSET ? new_row() : NULL;
    if (!row) continue;
    if (kind == KIND_KERNEL) {
      const KernelRecord* kernel = record;
      row->what = KERNEL;
      row->time = kernel->start;
      row->device = kernel->device;
      row->context = kernel->context;
      row->correlation = kernel->correlation;
      row->words[0] = kernel->start;
      row->words[1] = kernel->end;
      row->words[2] = kernel->stream;
      row->words[3] = intern(&names, kernel->name ? kernel->name : "", kernel->name ? strlen(kernel->name) : 0);
      row->words[4] = packed(kernel->grid);
      row->words[5] = packed(kernel->block);
      row->words[6] = (uint64_t)(uint32_t)kernel->static_shared + (uint32_t)kernel->dynamic_shared;
      row->words[7] = kernel->graph;
    } else {
      const CopyRecord* copy = record;  // a fill has the same fields at the same places
      row->what = kind == KIND_MEMCPY ? COPY : FILL;
      row->time = copy->start;
      row->device = copy->device;
      row->context = copy->context;
      row->correlation = copy->correlation;
      row->words[0] = copy->start;
      row->words[1] = copy->end;
      row->words[2] = copy->stream;
      row->words[3] = copy->bytes;
      row->words[4] = copy->copy_kind;
    }
  }
  size_t dropped = 0;
  if (!cupti.ActivityGetNumDroppedRecords(context, stream, &dropped) && dropped) lost += dropped;
  pthread_mutex_unlock(&lock);
  free(buffer);
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
  backtrace(frame, 2);  // its first call loads a library, which it must not do in a callback
  owner = getpid();
  pthread_mutex_lock(&lock);
  most_rows = (size_t)most;
  row_count = lost = 0;  // what the recording before did not read
  names.told = frames.told = stacks.told = 0;
  context_count = 0;
  pthread_mutex_unlock(&lock);
  memset(calls, 0, sizeof calls);
  PyObject* numbers = PyDict_New();
  for (uint32_t number = 1; numbers && number < MOST_CALLS; number++) {
    const char* name;
    if (cupti.GetCallbackName(DOMAIN_DRIVER_API, number, &name) || !name) continue;
    PyObject* row = PyDict_GetItemString(chosen, name);
    if (!row) continue;
    const char* layout;
    int at_enter, wants_library, wants_stream_id;
    if (!PyArg_ParseTuple(row, "sppp", &layout, &at_enter, &wants_library, &wants_stream_id)) goto failed;
    Call* call = &calls[number];
    strncpy(call->arguments, layout, WORDS);
    call->at_enter = (uint8_t)at_enter;
    call->wants_library = (uint8_t)wants_library;
    call->wants_stream_id = (uint8_t)wants_stream_id;
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
  recording = 1;
  return numbers;
failed:
  Py_XDECREF(numbers);
  cupti.Unsubscribe(subscriber);
  subscriber = NULL;
  return NULL;
}

static PyObject* py_watch_activity(PyObject* self, PyObject* unused) {
  (void)self, (void)unused;
  static const uint32_t kinds[] = {KIND_KERNEL, KIND_MEMCPY, KIND_MEMSET};
  int status = cupti.ActivityRegisterTimestampCallback(now);
  if (!status) status = cupti.ActivityRegisterCallbacks(buffer_requested, buffer_completed);
  for (size_t i = 0; !status && i < sizeof kinds / sizeof *kinds; i++) status = cupti.ActivityEnable(kinds[i]);
  if (status) {
    PyErr_SetString(PyExc_OSError, text_of(status));
    return NULL;
  }
  Py_RETURN_NONE;
}

static PyObject* py_flush(PyObject* self, PyObject* arguments) {
  (void)self;
  int forced = 0;
  if (!PyArg_ParseTuple(arguments, "|p", &forced)) return NULL;
  if (subscriber && getpid() == owner) {
    Py_BEGIN_ALLOW_THREADS  // buffer_completed takes our lock, and CUPTI its own
    cupti.ActivityFlushAll(forced ? 1 : 0);
    Py_END_ALLOW_THREADS
  }
  Py_RETURN_NONE;
}

static PyObject* told(Table* table) {  // entries that have not been told yet
  PyObject* list = PyList_New(0);
  for (; list && table->told < table->count; table->told++) {
    PyObject* bytes = PyBytes_FromStringAndSize(
        table->bytes + table->entries[table->told].start, (Py_ssize_t)table->entries[table->told].length);
    if (!bytes || PyList_Append(list, bytes)) Py_CLEAR(list);
    Py_XDECREF(bytes);
  }
  return list;
}

static PyObject* py_drain(PyObject* self, PyObject* unused) {
  (void)self, (void)unused;
  // Whoever has this lock never waits for the interpreter's, so waiting for it here cannot block.
  pthread_mutex_lock(&lock);
  if (!row_count && !lost) {
    pthread_mutex_unlock(&lock);
    Py_RETURN_NONE;
  }
  Row* taken = rows;
  size_t count = row_count;
  uint64_t missing = lost;
  rows = NULL;
  row_count = row_capacity = 0;
  lost = 0;
  PyObject *new_names = told(&names), *new_frames = told(&frames), *new_stacks = told(&stacks);
  pthread_mutex_unlock(&lock);
  PyObject* data = PyBytes_FromStringAndSize((const char*)taken, (Py_ssize_t)(count * sizeof *taken));
  free(taken);
  if (!data || !new_names || !new_frames || !new_stacks) {
    Py_XDECREF(data), Py_XDECREF(new_names), Py_XDECREF(new_frames), Py_XDECREF(new_stacks);
    return NULL;
  }
  return Py_BuildValue("(NNNNK)", data, new_names, new_frames, new_stacks, (unsigned long long)missing);
}

static PyObject* py_stop(PyObject* self, PyObject* unused) {
  (void)self, (void)unused;
  static const uint32_t kinds[] = {KIND_KERNEL, KIND_MEMCPY, KIND_MEMSET};
  recording = 0;
  if (subscriber && getpid() == owner) {
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) cupti.ActivityDisable(kinds[i]);
    cupti.Unsubscribe(subscriber);
    Py_END_ALLOW_THREADS
  }
  subscriber = NULL;
  Py_RETURN_NONE;
}

// In a forked child: another thread of the parent may have held the lock, and the log is the parent's.
static PyObject* py_forget(PyObject* self, PyObject* unused) {
  (void)self, (void)unused;
  recording = 0;
  pthread_mutex_init(&lock, NULL);
  row_count = 0;
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"open", py_open, METH_VARARGS, "open(path): load libcupti; its version"},
    {"start", py_start, METH_VARARGS,
     "start({call: (arguments, at its beginning, with the library, with the stream's id)}, most rows): number -> call"},
    {"watch_activity", py_watch_activity, METH_NOARGS, "watch_activity(): kernels, copies and fills, too"},
    {"flush", py_flush, METH_VARARGS, "flush(forced=False): have CUPTI hand back its buffers"},
    {"drain", py_drain, METH_NOARGS, "drain(): rows, new names, new frames, new stacks, number of rows lost; None if there are no rows"},
    {"stop", py_stop, METH_NOARGS, "stop()"},
    {"forget", py_forget, METH_NOARGS, "forget(): in a forked child"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cupti", "The driver's calls and the device's work.", -1,
                                    methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__cupti(void) { return PyModule_Create(&module); }
