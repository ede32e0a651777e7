// Records the ranges and marks that libraries and programs give to NVTX, NVIDIA's Tools Extension, as its injection.
//
//   NVTX_INJECTION64_PATH      names this module's file
//   the first call of NVTX     each library that was built with NVTX loads that file and calls InitializeInjectionNvtx2,
//                              which puts the functions below in the place of NVTX's own. Without that variable, NVTX's
//                              functions do nothing.
//   a range                    becomes a row in the log of _cupti.c
//
// Ranges of NVTX's default domain that are pushed and popped are nested, thread by thread. Each other domain nests its own
// ranges alone, so they become ranges that may overlap: RANGE_START and RANGE_END. Of what was pushed before the recording
// began, the end is left out.
//
// A library may call NVTX while it holds a lock of its own, so nothing here takes the interpreter's.
// NVTX's few types are declared here, so that the package builds without its headers.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>

#include "_log_exports.h"
#include "_log_rows.h"

// ---- NVTX, as declared in its headers (nvtxTypes.h, nvToolsExt.h) ----

enum { ASCII = 1, UNICODE = 2, REGISTERED = 3 };  // nvtxMessageType_t
enum { TABLE_OF_CALLBACKS = 1 };                  // NvtxExportTableID
enum { MODULE_CORE = 1, MODULE_CORE2 = 5 };       // NvtxCallbackModule
enum {                                            // NvtxCallbackIdCore
  MARK_EX = 1, MARK_A, MARK_W, START_EX, START_A, START_W, END, PUSH_EX, PUSH_A, PUSH_W, POP
};
enum {  // NvtxCallbackIdCore2
  DOMAIN_MARK = 1, DOMAIN_START, DOMAIN_END, DOMAIN_PUSH, DOMAIN_POP, REGISTER_A = 10, REGISTER_W, CREATE_A, CREATE_W
};
enum { NO_TRACKING = -2 };  // what push and pop return without a tool that counts: NVTX_NO_PUSH_POP_TRACKING

typedef struct {
  uint16_t version, size;
  uint32_t category;
  int32_t color_type;
  uint32_t color;
  int32_t payload_type, reserved;
  uint64_t payload;
  int32_t message_type;
  const void* message;
} Attributes;  // nvtxEventAttributes_t

typedef void (*Function)(void);
typedef struct {
  size_t size;
  int (*table_of)(int module, Function*** table, unsigned* count);
} Callbacks;  // NvtxExportTableCallbacks

// ---- the log of _cupti.c ----

enum { RANGE_PUSH = 70, RANGE_POP = 71, MARK = 76, RANGE_START = 77, RANGE_END = 78 };  // cudatool.trace.events.Kind
enum { MOST_TEXT = 1024, MOST_OPEN = 64 };
#define FIRST_NUMBER ((uint64_t)1 << 32)  // cudatool.nvtx counts its own from 1

static const Log* log_;
static volatile uint32_t recording;  // the number of the recording in progress, 0 for none
static uint32_t recordings;
static uint64_t next_number = FIRST_NUMBER;
static volatile int instances;  // libraries that have been injected
static PyObject* when_used;     // called when the first one is

typedef struct {
  uint32_t recording;  // that the following is of
  uint32_t depth;      // ranges of the default domain that are open
  int open_count;
  struct { const void* domain; uint64_t number; } open[MOST_OPEN];  // of other domains, innermost last
} Thread;
static __thread uint64_t notes;  // of this thread, in all recordings
static __thread Thread this_one;

static Thread* this_thread(void) {
  if (this_one.recording != recording) {
    memset(&this_one, 0, sizeof this_one);
    this_one.recording = recording;
  }
  return &this_one;
}

static void note(uint64_t kind, const char* name, uint64_t number) {
  notes++;
  uint64_t words[WORDS] = {kind, 0, 0, number};
  log_->note_text(RANGE, name ? name : "", words);
}

// ---- texts ----

static const char* narrow(const wchar_t* text, char* out) {  // to UTF-8
  size_t at = 0;
  for (; text && *text && at + 5 <= MOST_TEXT; text++) {
    uint32_t c = (uint32_t)*text;
    if (c < 0x80) {
      out[at++] = (char)c;
      continue;
    }
    int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    out[at++] = (char)((0xF0 << (3 - more)) | c >> 6 * more);
    while (more--) out[at++] = (char)(0x80 | (c >> 6 * more & 63));
  }
  out[at] = 0;
  return out;
}

static const char* message_of(const Attributes* attributes, char* out) {
  const void* message = attributes ? attributes->message : NULL;
  switch (message ? attributes->message_type : 0) {
    case ASCII: case REGISTERED: return message;  // the latter's handle is the text: see register_a
    case UNICODE: return narrow(message, out);
    default: return "(unnamed)";
  }
}

// A domain's ranges are named after it, too. A domain's handle is its name.
static const char* named(const void* domain, const char* text, char* out) {
  if (!domain) return text;
  snprintf(out, MOST_TEXT, "%s: %s", (const char*)domain, text);
  return out;
}

// ---- what stands for NVTX's functions ----

static void mark_a(const char* text) {
  if (recording && text) note(MARK, text, 0);
}

static void mark_w(const wchar_t* text) {
  char out[MOST_TEXT];
  mark_a(narrow(text, out));
}

static void domain_mark(const void* domain, const Attributes* attributes) {
  char out[MOST_TEXT], full[MOST_TEXT];
  if (recording) mark_a(named(domain, message_of(attributes, out), full));
}

static void mark_ex(const Attributes* attributes) { domain_mark(NULL, attributes); }

static uint64_t start_a(const char* text) {
  if (!recording) return 0;
  uint64_t number = __atomic_fetch_add(&next_number, 1, __ATOMIC_RELAXED);
  note(RANGE_START, text ? text : "(unnamed)", number);
  return number;
}

static uint64_t start_w(const wchar_t* text) {
  char out[MOST_TEXT];
  return start_a(narrow(text, out));
}

static uint64_t domain_start(const void* domain, const Attributes* attributes) {
  char out[MOST_TEXT], full[MOST_TEXT];
  return recording ? start_a(named(domain, message_of(attributes, out), full)) : 0;
}

static uint64_t start_ex(const Attributes* attributes) { return domain_start(NULL, attributes); }

static uint64_t first_of_recording;  // earlier numbers are of ranges that an earlier recording has

static void end(uint64_t number) {
  if (recording && number >= first_of_recording) note(RANGE_END, NULL, number);
}

static void domain_end(const void* domain, uint64_t number) {
  (void)domain;
  end(number);
}

static int push_a(const char* text) {
  if (recording) {
    this_thread()->depth++;
    note(RANGE_PUSH, text ? text : "(unnamed)", 0);
  }
  return NO_TRACKING;
}

static int push_w(const wchar_t* text) {
  char out[MOST_TEXT];
  return push_a(narrow(text, out));
}

static int pop(void) {
  Thread* thread = recording ? this_thread() : NULL;
  if (thread && thread->depth) {
    thread->depth--;
    note(RANGE_POP, NULL, 0);
  }
  return NO_TRACKING;
}

static int domain_push(const void* domain, const Attributes* attributes) {
  char out[MOST_TEXT], full[MOST_TEXT];
  if (!recording) return NO_TRACKING;
  const char* text = named(domain, message_of(attributes, out), full);
  if (!domain) return push_a(text);
  Thread* thread = this_thread();
  if (thread->open_count < MOST_OPEN) {
    thread->open[thread->open_count].domain = domain;
    thread->open[thread->open_count].number = start_a(text);
  }
  thread->open_count++;
  return NO_TRACKING;
}

static int domain_pop(const void* domain) {
  if (!domain) return pop();
  Thread* thread = recording ? this_thread() : NULL;
  if (!thread || !thread->open_count) return NO_TRACKING;
  if (thread->open_count > MOST_OPEN) {  // too deep to have been noted
    thread->open_count--;
    return NO_TRACKING;
  }
  for (int i = thread->open_count - 1; i >= 0; i--) {
    if (thread->open[i].domain != domain) continue;
    end(thread->open[i].number);
    thread->open_count--;
    memmove(&thread->open[i], &thread->open[i + 1], (size_t)(thread->open_count - i) * sizeof thread->open[i]);
    break;
  }
  return NO_TRACKING;
}

static int push_ex(const Attributes* attributes) { return domain_push(NULL, attributes); }

// What NVTX registers is kept for as long as the process lives: any thread may still have a handle.
static const void* register_a(const void* domain, const char* text) {
  (void)domain;
  return text ? strndup(text, MOST_TEXT - 1) : NULL;
}

static const void* register_w(const void* domain, const wchar_t* text) {
  char out[MOST_TEXT];
  return register_a(domain, narrow(text, out));
}

static const void* create_a(const char* name) { return register_a(NULL, name); }

static const void* create_w(const wchar_t* name) { return register_w(NULL, name); }

// ---- the injection ----

static int now_used(void* unused) {
  (void)unused;
  PyObject* called = when_used ? PyObject_CallNoArgs(when_used) : NULL;
  if (!called && PyErr_Occurred()) PyErr_WriteUnraisable(when_used);
  Py_XDECREF(called);
  return 0;
}

static void put(Function** table, unsigned count, unsigned number, void* function) {
  if (number < count && table[number]) memcpy(table[number], &function, sizeof function);
}

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(const void* (*export_table)(uint32_t)) {
  const Callbacks* callbacks = export_table(TABLE_OF_CALLBACKS);
  Function** table;
  unsigned count;
  if (!callbacks || callbacks->size < sizeof *callbacks) return 0;
  if (callbacks->table_of(MODULE_CORE, &table, &count)) {
    put(table, count, MARK_EX, mark_ex), put(table, count, MARK_A, mark_a), put(table, count, MARK_W, mark_w);
    put(table, count, START_EX, start_ex), put(table, count, START_A, start_a), put(table, count, START_W, start_w);
    put(table, count, END, end), put(table, count, POP, pop);
    put(table, count, PUSH_EX, push_ex), put(table, count, PUSH_A, push_a), put(table, count, PUSH_W, push_w);
  }
  if (callbacks->table_of(MODULE_CORE2, &table, &count)) {
    put(table, count, DOMAIN_MARK, domain_mark), put(table, count, DOMAIN_START, domain_start);
    put(table, count, DOMAIN_END, domain_end), put(table, count, DOMAIN_PUSH, domain_push);
    put(table, count, DOMAIN_POP, domain_pop);
    put(table, count, REGISTER_A, register_a), put(table, count, REGISTER_W, register_w);
    put(table, count, CREATE_A, create_a), put(table, count, CREATE_W, create_w);
  }
  if (!__atomic_fetch_add(&instances, 1, __ATOMIC_RELAXED) && when_used) Py_AddPendingCall(now_used, NULL);
  return 1;
}

// ---- Python ----

static PyObject* py_start(PyObject* self, PyObject* callback) {
  (void)self;
  Py_XSETREF(when_used, callback == Py_None ? NULL : Py_NewRef(callback));
  first_of_recording = __atomic_load_n(&next_number, __ATOMIC_RELAXED);
  recording = ++recordings;
  return PyBool_FromLong(instances != 0);
}

static PyObject* py_stop(PyObject* self, PyObject* unused) {
  (void)self, (void)unused;
  recording = 0;
  Py_CLEAR(when_used);
  Py_RETURN_NONE;
}

static PyObject* py_notes(PyObject* self, PyObject* unused) {
  (void)self, (void)unused;
  return PyLong_FromUnsignedLongLong(notes);
}

static PyMethodDef methods[] = {
    {"start", py_start, METH_O,
     "start(callback): write ranges to the log of _cupti from now on; whether NVTX is in use already. If not, the callback "
     "is called in the main thread when it is. It may be None."},
    {"stop", py_stop, METH_NOARGS, "stop(): write nothing more"},
    {"notes", py_notes, METH_NOARGS, "notes(): how many ranges and marks of this thread have been written to the log"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_nvtx", "NVTX's ranges.", -1, methods, NULL, NULL, NULL, NULL};

static void in_child(void) { recording = 0; }

PyMODINIT_FUNC PyInit__nvtx(void) {
  PyObject* written_to = PyImport_ImportModule("cudatool.collect._cupti");
  PyObject* capsule = written_to ? PyObject_GetAttrString(written_to, "log") : NULL;
  log_ = capsule ? PyCapsule_GetPointer(capsule, "cudatool.collect._cupti.log") : NULL;
  Py_XDECREF(capsule), Py_XDECREF(written_to);
  if (!log_) return NULL;
  if (pthread_atfork(NULL, NULL, in_child)) return PyErr_NoMemory();
  return PyModule_Create(&module);
}
