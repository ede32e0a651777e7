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
// CUPTI is loaded at run time, and its few structures are declared in _cupti_api.h, so that the package builds without it.

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <dlfcn.h>
#include <execinfo.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "_log_exports.h"
#include "_log_rows.h"

#if PY_VERSION_HEX < 0x03100000 && !defined(Py_GIL_DISABLED)
#define READS_FRAMES 1
#define Py_BUILD_CORE
#if PY_VERSION_HEX >= 0x030E0000
#include <internal/pycore_interpframe.h>
#else
#include <internal/pycore_frame.h>
#endif
#undef Py_BUILD_CORE
#else
#define READS_FRAMES 0  // stacks hold only the calling library
#endif

#include "_cupti_api.h"

// ---- the recording ----

enum { MOST_CALLS = 2048 };
// What may take device memory implicitly (cudatool.trace.events.UseFlag).
enum { USE_CONTEXT = 1, USE_MODULE = 2, USE_GRAPH = 4, USE_STREAM = 8, USE_KERNEL = 16, USE_HEAP = 32, USE_POOL = 64 };
enum { CAPTURE_BEGINS = 256, CAPTURE_ENDS = 512 };  // not causes of use, but noted by the same calls

typedef struct {
  // i: 4 bytes; q: 8 bytes; P: what 8 bytes point to; b: 1 byte; h: 2 bytes; .: 8 bytes, left out;
  // n: 8 bytes, of which each value is noted only once; s: a text, whose number among the names is noted;
  // m: an image of code, noted in this word and the two that follow, so that it is the last one; others: a structure
  // whose bytes are noted (described())
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
static uint8_t ends_context[1024];  // by CUresult: whether it says that a kernel failed
static int has_failed;
static int sees_work, sees_launches;
static volatile int recording;  // 0 in a forked child, where CUDA does not work
static pid_t owner;

// Its parts, each of which uses those before it. They are one translation unit, so that the compiler inlines what every
// call of the driver runs.
#include "_cupti_log.h"
#include "_cupti_stacks.h"
#include "_cupti_devices.h"
#include "_cupti_launches.h"
#include "_cupti_activity.h"

// ---- rows of this thread ----

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
  if (stack == (uint32_t)HERE) stack = this_stack(NULL);
  pthread_mutex_lock(&lock);
  Row* row = row_of_thread(what, words);
  if (row) {
    row->stack = stack;
    row->device = device;
  }
  pthread_mutex_unlock(&lock);
}

// ---- callbacks ----

// The bytes of the structure that a letter stands for, 0 if it stands for none: CUDA_ARRAY_DESCRIPTOR,
// CUDA_ARRAY3D_DESCRIPTOR, CUDA_MEMCPY2D, and CUDA_MEMCPY3D or CUDA_MEMCPY3D_PEER.
static size_t described(char letter) {
  return letter == 'd' ? 24 : letter == 'D' ? 40 : letter == 'c' ? 128 : letter == 'C' ? 200 : 0;
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

// From the first call on that says that a kernel failed, nothing of its context runs any more, and all calls say so.
static void note_failure(uint32_t number, int result, const CallbackData* data) {
  if (__atomic_exchange_n(&has_failed, 1, __ATOMIC_RELAXED)) return;
  uint64_t words[WORDS] = {(uint64_t)result, number};
  note(FAILURE, device_of(data->context), (uint32_t)HERE, words);
}

static void on_call(void* unused, uint32_t domain, uint32_t number, const CallbackData* data) {
  (void)unused;
  if (!recording) return;
  if (domain == DOMAIN_RESOURCE) {  // a module, perhaps loaded at its first use in the middle of a launch
    if (number == MODULE_LOADED) {
      code_was_loaded();
      took(device_of(*(void* const*)data), USE_MODULE);
    }
    return;
  }
  if (domain != DOMAIN_DRIVER_API || number >= MOST_CALLS) return;
  const Call* call = &calls[number];
  int result = data->site == API_EXIT && data->result ? *(const int*)data->result : 0;
  if (result > 0 && result < (int)sizeof ends_context && ends_context[result]) note_failure(number, result, data);
  int is_ours = operation && marked_in == recordings;
  if (is_ours && call->enqueues) {
    if (data->site == API_ENTER) note_operation(data);
    return;
  }
  if (call->launches) {
    int succeeded = notes_launches && data->site == API_EXIT && data->result && !result;
    if (succeeded && !is_reported_elsewhere()) note_launch(data);
    return;
  }
  // Also before it is done: the memory may be read in between. A context has no device yet.
  int takes = call->use && call->use < CAPTURE_BEGINS && call->use != USE_CONTEXT && !strchr(call->arguments, 'n');
  if (takes && data->site == API_ENTER) took(device_of(data->context), call->use);
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
    if (call->use == USE_MODULE) code_was_loaded();
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
  uint32_t stack = this_stack(library);
  pthread_mutex_lock(&lock);
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
      if (described(call->arguments[i]) && given) words[i] = put_blob(given, described(call->arguments[i]));
    }
    memcpy(row->words, words, sizeof words);
  }
  pthread_mutex_unlock(&lock);
}

// ---- for other extensions ----

// The number of this thread's Python stack, 0 where there is none.
static uint32_t stack_here(void) {
  return recording ? this_stack(NULL) : 0;
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

static Log for_others = {stack_here, note, note_text, module_of, note_released, mark_inside};

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
  has_failed = 0;
  sees_work = sees_launches = 0;
  code_was_loaded();  // perhaps, while nothing was recorded
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
  PyObject *chosen, *errors = NULL;
  unsigned long long most;
  if (!PyArg_ParseTuple(arguments, "O!K|O!", &PyDict_Type, &chosen, &most, &PyTuple_Type, &errors)) return NULL;
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
  memset(ends_context, 0, sizeof ends_context);
  for (Py_ssize_t i = 0; errors && i < PyTuple_GET_SIZE(errors); i++) {
    ends_context[PyLong_AsUnsignedLongMask(PyTuple_GET_ITEM(errors, i)) % sizeof ends_context] = 1;
  }
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
     "most rows, results that say that a kernel failed): number -> call"},
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
     "unnamed_modules(): number of the path of classes that was noted, address, and address of the class, of modules "
     "without a name since the last call"},
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
  lock = (pthread_mutex_t)NEW_LOCK;
  row_count = waiting = 0;
  thread_number = 0;  // the one thread of a child has another one
}

PyMODINIT_FUNC PyInit__cupti(void) {
  if (pthread_atfork(NULL, NULL, in_child)) return PyErr_NoMemory();
#if READS_FRAMES
  if (pthread_key_create(&ended, end_thread)) return PyErr_NoMemory();
  watch_code();
#endif
  PyObject* made = PyModule_Create(&module);
  PyObject* capsule = PyCapsule_New(&for_others, "cudatool.collect._cupti.log", NULL);
  if (made && PyModule_AddObjectRef(made, "log", capsule)) Py_CLEAR(made);
  if (made && PyModule_AddIntConstant(made, "MOST_UNNAMED", MOST_UNNAMED)) Py_CLEAR(made);
  Py_XDECREF(capsule);
  return made;
}
