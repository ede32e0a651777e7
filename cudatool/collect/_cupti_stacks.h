// Who calls the driver: the thread, Python's stack, the module of PyTorch, and the library, of which some report their
// calls themselves.

#pragma once

enum { MOST_FRAMES = 256, MOST_LOOKED_AT = 8, MOST_NATIVE = 32 };
// The lock guards these.
static Table paths;    // of modules of PyTorch
static Table modules;  // their addresses
static uint32_t *path_of_module, module_room;  // by the number of an address; 0 for a module without a name
static uint32_t *real_path, path_room;  // of a path of classes: that of the module that it stood for; itself if not known
static uint32_t *variant_of, variant_room;  // of a path of classes: how often it has stood for another one
static PyCodeObject* _Atomic module_call;   // of torch.nn.Module.__call__; NULL while modules are not watched
static PyObject* name_modules;      // called soon after a module without a name was seen
static _Atomic int naming;          // whether it will be
static uint64_t naming_took, watched_since;  // ns
enum { MOST_UNNAMED = 64, MOST_NESTED = 16, MOST_VARIANTS = 64, MOST_PATH = 2048, NAMING_AT_FIRST = 200000000, NAMING_SHARE = 100 };
static struct { uint32_t path; uint64_t module, class; } unnamed[MOST_UNNAMED];  // seen so
static int unnamed_count;
static Table codes;  // addresses of the code objects in `places`
// Read without the lock, too: a thread's own frames change, and their code is destroyed, only with the interpreter's.
static _Atomic uint32_t generation = 1;  // of what is known of frames: a new one begins when code is destroyed
static _Atomic uint32_t namings;         // of modules: how often one got a name, or lost it
static uint32_t* frame_of_place;  // by the number of a place
static uint32_t place_room;
// Of Python's frames: the number of the chain of outer ones, and that of the innermost, or of its module's path.
static Table chains;
#define IS_MODULE (1u << 31)
static uint32_t* stack_of_chain;  // by the number of a chain; 0 if it has none yet
static uint32_t chain_room;

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

// What a frame executes, mostly a code object; its instruction; its first variable; and a thread's innermost frame.
#if PY_VERSION_HEX >= 0x030E0000
#define EXECUTES(frame) ((PyCodeObject*)PyStackRef_AsPyObjectBorrow((frame)->f_executable))
#define FIRST_VARIABLE(frame) PyStackRef_AsPyObjectBorrow((frame)->localsplus[0])
#elif PY_VERSION_HEX >= 0x030D0000
#define EXECUTES(frame) ((PyCodeObject*)(frame)->f_executable)
#define FIRST_VARIABLE(frame) ((frame)->localsplus[0])
#else
#define EXECUTES(frame) ((PyCodeObject*)(frame)->f_code)
#define FIRST_VARIABLE(frame) ((frame)->localsplus[0])
#endif
#if PY_VERSION_HEX >= 0x030D0000
#define INSTRUCTION(frame) ((const void*)(frame)->instr_ptr)
static struct _PyInterpreterFrame* frame_of(const PyThreadState* state) { return state->current_frame; }
#else
#define INSTRUCTION(frame) ((const void*)(frame)->prev_instr)
static struct _PyInterpreterFrame* frame_of(const PyThreadState* state) {
  return state->cframe ? state->cframe->current_frame : NULL;
}
#endif

// NULL for a frame that stands for a call from C.
static PyCodeObject* code_of(struct _PyInterpreterFrame* frame) {
#if PY_VERSION_HEX >= 0x030C0000 && PY_VERSION_HEX < 0x030D0000
  if (frame->owner == FRAME_OWNED_BY_CSTACK) return NULL;
#endif
  PyCodeObject* code = EXECUTES(frame);
  return code && PyCode_Check(code) ? code : NULL;
}

// The number of the frame at an instruction of a code object, 0 if out of memory. The lock is held.
static uint32_t frame_at(PyCodeObject* code, int offset) {
  uint64_t place[2] = {(uintptr_t)code, (uint64_t)offset};
  uint32_t known = places.count, at_place = intern(&places, place, sizeof place);
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
  uint64_t key;
  uint32_t with, found;
} Cached;
enum { MOST_SETS = 256, IN_SET = 4 };  // each lies in one of the places of a set, which is a line of a cache
// Used by its own thread alone, and so without the lock, which would wait for all that the program wrote to memory before.
typedef struct {
  Cached steps[MOST_SETS][IN_SET];   // by the instruction of a frame and the chain of its caller: the chain of both
  Cached placed[MOST_SETS][IN_SET];  // by a module that has a name, or none, and a chain: the number of the stack
  Known known[MOST_FRAMES];  // outermost first: most of the next stack is the same
  Known fresh[MOST_FRAMES];  // innermost first: what is not
  int depth;                 // of `known`
  uint32_t generation, namings;
} Thread;
static __thread Thread* this_one;
static pthread_key_t ended;  // frees it with the thread

static void end_thread(void* thread) {
  this_one = NULL;  // what else ends with the thread may call the driver
  free(thread);
}

static Thread* this_threads(void) {
  if (!this_one && (this_one = aligned_alloc(64, (sizeof *this_one + 63) / 64 * 64))) {
    memset(this_one, 0, sizeof *this_one);
    pthread_setspecific(ended, this_one);
  }
  return this_one;
}

// Whether frame `at` of the last stack, which is there, and all outside of it are where they were. If not, `*same` is how
// many of the outermost may still be.
static int is_known(const Known* known, int at, int* same) {
  for (;; at--) {
    // Each frame is found in `known`, not in the one before it: so a processor, which guesses that they are equal, reads
    // several at once. No compiler may know that they are.
    const struct _PyInterpreterFrame *frame = known[at].at, *outer = at ? known[at - 1].at : NULL;
    __asm__("" : "+r"(frame));
    if (known[at].instruction != INSTRUCTION(frame) || frame->previous != outer) {
      *same = at;
      return 0;
    }
    if (!at) return 1;
  }
}

// Put the innermost frames into `fresh`, out to the first from which on all are known; return how many there are.
static int fresh_frames(Thread* thread, struct _PyInterpreterFrame* frame) {
  int count = 0, same = thread->depth;
  thread->depth = 0;
  for (; frame && count < MOST_FRAMES; frame = frame->previous) {
    int at = same, least = same > MOST_LOOKED_AT ? same - MOST_LOOKED_AT : 0;
    while (at > least && thread->known[at - 1].at != frame) at--;
    if (at > least && is_known(thread->known, at - 1, &same)) {
      thread->depth = at;
      break;
    }
    thread->fresh[count++] = (Known){frame, INSTRUCTION(frame), NULL, 0};
  }
  return count;
}

static const Cached* cached(const Cached* set, uint64_t key, uint32_t with) {
  for (int i = 0; i < IN_SET; i++) {
    if (set[i].key == key && set[i].with == with) return &set[i];
  }
  return NULL;
}

// In place of what was put into the set the longest ago.
static void put_into(Cached* set, uint64_t key, uint32_t with, uint32_t found) {
  memmove(&set[1], set, (IN_SET - 1) * sizeof *set);
  set[0] = (Cached){key, with, found};
}

// The number in `chains` of a stack that goes on with a frame.
static uint32_t chain_with(Thread* thread, uint32_t outer, const Known* one) {
  uint64_t instruction = (uintptr_t)one->instruction, mixed = (instruction ^ (uint64_t)outer << 32) * 0x9E3779B97F4A7C15u;
  Cached* set = thread->steps[mixed >> 32 & (MOST_SETS - 1)];
  const Cached* known = cached(set, instruction, outer);
  if (known) return known->found;
  struct _PyInterpreterFrame* frame = (struct _PyInterpreterFrame*)one->at;
  PyCodeObject* code = code_of(frame);
  uint32_t chain = outer;
  if (code && !_PyFrame_IsIncomplete(frame)) {
    pthread_mutex_lock(&lock);
    uint32_t key[2] = {outer, frame_at(code, _PyInterpreterFrame_LASTI(frame) * (int)sizeof(_Py_CODEUNIT))};
    if (key[1]) chain = intern(&chains, key, sizeof key);
    pthread_mutex_unlock(&lock);
  }
  put_into(set, instruction, outer, chain);
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
    unnamed[known].class = (uintptr_t)Py_TYPE(inside[0]);
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
    PyObject* called = EXECUTES(frame) == module_call ? FIRST_VARIABLE(frame) : NULL;  // which is no cell
    if (!called) continue;
    outer = name_of_module((uintptr_t)called);
    if (!outer && nested < MOST_NESTED) inside[nested++] = called;
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

// The same for a stack in which a module is called by frame `calls`, or by one outside of it; NULL for none.
static uint32_t stack_in_module(uint32_t library, uint32_t chain, struct _PyInterpreterFrame* calls) {
  uint32_t key[2] = {chain, calls ? module_path(calls) : 0};
  if (!key[1] || key[1] >= IS_MODULE) return stack_of(library, chain);
  key[1] |= IS_MODULE;
  return stack_of(library, intern(&chains, key, sizeof key));
}

// The innermost frame of this thread's stack, all of which is in `known` then.
static const Known* innermost_of(Thread* thread, struct _PyInterpreterFrame* frame) {
  // A frame at the same instruction is the same, as long as no code object was destroyed.
  uint32_t current = generation;
  if (thread->generation != current) {
    thread->depth = 0;
    thread->generation = current;
    memset(thread->steps, 0, sizeof thread->steps);
  }
  int count = fresh_frames(thread, frame);
  if (thread->depth + count > MOST_FRAMES) {  // of a deeper stack, the innermost frames
    thread->depth = 0;
    count = fresh_frames(thread, frame);
  }
  const Known* outer = thread->depth ? &thread->known[thread->depth - 1] : NULL;
  const PyCodeObject* calls_module = module_call;
  while (count) {
    Known* one = &thread->known[thread->depth++];
    *one = thread->fresh[--count];
    one->chain = chain_with(thread, outer ? outer->chain : 0, one);
    one->module = calls_module && EXECUTES(one->at) == calls_module ? one->at : outer ? outer->module : NULL;
    outer = one;
  }
  return outer;
}

// The number of this thread's stack. The lock is not held; the interpreter's need not be.
static uint32_t stack_below(uint32_t library) {
  Thread* thread = this_threads();
  PyThreadState* state = PyGILState_GetThisThreadState();
  struct _PyInterpreterFrame *frame = thread && state ? frame_of(state) : NULL, *calls = frame;
  uint32_t chain = 0;
  uint64_t module = 0;
  Cached* set = NULL;  // where the stack may be found; NULL if it may not
  if (!frame && !library) return 0;
  if (frame) {
    const Known* innermost = innermost_of(thread, frame);
    chain = innermost->chain;
    if (thread->depth == MOST_FRAMES) {  // it may be cut
      thread->depth = 0;
    } else {
      calls = (struct _PyInterpreterFrame*)innermost->module;
      module = calls ? (uintptr_t)FIRST_VARIABLE(calls) : 0;
      if (!library && chain && (module || !calls)) set = thread->placed[(module >> 4 ^ chain * 0x9E3779B9u) & (MOST_SETS - 1)];
    }
    uint32_t current = namings;
    if (thread->namings != current) {
      thread->namings = current;
      memset(thread->placed, 0, sizeof thread->placed);
    }
  }
  const Cached* known = set ? cached(set, module, chain) : NULL;
  if (known) return known->found;
  pthread_mutex_lock(&lock);
  uint32_t stack = stack_in_module(library, chain, calls);
  if (set && (!calls || name_of_module(module))) put_into(set, module, chain, stack);
  pthread_mutex_unlock(&lock);
  return stack;
}

static void table_clear(Table* table) {
  table->used = table->count = table->sent = 0;
  if (table->slots) memset(table->slots, 0, (table->mask + 1) * sizeof *table->slots);
}

static void on_destroyed(PyCodeObject* code) {
  if (!codes.count) return;
  uint64_t address = (uintptr_t)code;
  pthread_mutex_lock(&lock);
  uint64_t slot;
  if (codes.count && look_up(&codes, &address, sizeof address, &slot)) {  // rare: all are interned again
    table_clear(&codes);
    table_clear(&places);
    generation++;
  }
  pthread_mutex_unlock(&lock);
}

// Python calls watchers from 3.12 on, eight at most. Otherwise code objects are destroyed by a function of ours.
static destructor destroy_code;

static void destroy_watched(PyObject* code) {
  on_destroyed((PyCodeObject*)code);
  destroy_code(code);
}

#if PY_VERSION_HEX >= 0x030C0000
static int on_code(PyCodeEvent event, PyCodeObject* code) {
  if (event == PY_CODE_EVENT_DESTROY) on_destroyed(code);
  return 0;
}
#endif

static void watch_code(void) {
#if PY_VERSION_HEX >= 0x030C0000
  if (PyCode_AddWatcher(on_code) >= 0) return;
  PyErr_Clear();
#endif
  destroy_code = PyCode_Type.tp_dealloc;
  PyCode_Type.tp_dealloc = destroy_watched;
}
#else
static uint32_t stack_below(uint32_t library) {
  uint32_t found[2] = {library, 0};
  if (!library) return 0;
  pthread_mutex_lock(&lock);
  uint32_t stack = intern(&stacks, found, sizeof found);
  pthread_mutex_unlock(&lock);
  return stack;
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
      PyObject* one = frame && EXECUTES(frame) == module_call ? FIRST_VARIABLE(frame) : NULL;
      if (frame && !one) continue;
      if (count == room) {
        PyObject** more = realloc(called, (room = 2 * room + 64) * sizeof *called);
        if ((failed = !more)) break;
        called = more;
      }
      called[count++] = Py_XNewRef(one);  // NULL ends a thread
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
  uint64_t module[MOST_UNNAMED], class[MOST_UNNAMED];
  pthread_mutex_lock(&lock);
  int count = unnamed_count;
  for (int i = 0; i < count; i++) path[i] = unnamed[i].path, module[i] = unnamed[i].module, class[i] = unnamed[i].class;
  unnamed_count = 0;
  pthread_mutex_unlock(&lock);
  PyObject* list = PyList_New(0);
  for (int i = 0; list && i < count; i++) {
    PyObject* one = Py_BuildValue("(IKK)", path[i], (unsigned long long)module[i], (unsigned long long)class[i]);
    if (!one || PyList_Append(list, one)) Py_CLEAR(list);
    Py_XDECREF(one);
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

// The number of this thread's stack; its first frame is the calling library, if that is given. The lock is not held.
static uint32_t this_stack(const char* library) {
  if (!library) return stack_below(0);
  char key[4096] = {0};  // line 0, the file, no function
  size_t length = strnlen(library, sizeof key - 5);
  memcpy(key + 4, library, length);
  pthread_mutex_lock(&lock);
  uint32_t frame = intern(&frames, key, 4 + length + 1);
  pthread_mutex_unlock(&lock);
  return stack_below(frame);
}
