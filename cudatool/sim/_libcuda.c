/* libcuda.so.1 of the software CUDA device.
 *
 * cuda.bindings opens libcuda.so.1 by name and asks it for every entry point through cuGetProcAddress. This library
 * answers with what a resolver in Python gives it (cudatool/sim/__init__.py), so it knows no entry point itself.
 *
 * It also holds the one thing that Python cannot do: run native kernel code so that a bad memory access ends the
 * kernel, as on a GPU, and not the process.
 */
#define _GNU_SOURCE
#include <Python.h>
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef int (*resolver_t)(const char *symbol, void **function, int version, uint64_t flags, int *status);

static resolver_t resolver;
static volatile int closed; /* what every entry point returns from now on, 0 while there is a driver */

void cudatool_set_resolver(resolver_t r) { resolver = r; }

/* Calls of the driver that this thread is in, and the signals (bit n - 1 for signal n) whose handlers wait until it is
 * in none (cudatool/sim/signals.py). */
static __thread int inside;
static __thread uint64_t deferred;

void cudatool_enter(void) { ++inside; }

void cudatool_exit(void) {
    if (--inside) return;
    while (deferred) {
        int number = __builtin_ctzll(deferred) + 1;
        deferred &= deferred - 1;
        raise(number);
    }
}

/* PyThreadState_SetAsyncExc raises an exception in another thread between any two bytecodes, those of the driver too. It
 * looks for the first state of a thread that has the thread's id, and leaves the exception there. So each thread that
 * calls the driver has a second state, a decoy that no code runs in: it stands before the thread's own in the list, and
 * has the thread's id while the thread is in the driver. What it has got then, the thread gets when the call returns. */
struct decoy {
    PyThreadState *state;
    struct decoy *next;
};
static __thread struct decoy *decoy;
static __thread int shields;
static pthread_key_t decoy_key;
static pthread_once_t decoy_key_made = PTHREAD_ONCE_INIT;
static struct decoy *left_over; /* of threads that have ended: they can be deleted only with Python's lock */

static int is_finalizing(void) {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

static void leave_decoy(void *ended) {
    struct decoy *mine = ended;
    mine->next = __atomic_load_n(&left_over, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(&left_over, &mine->next, mine, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) continue;
}

static void delete_decoys(struct decoy *first) {
    while (first) {
        struct decoy *next = first->next;
        PyThreadState_Clear(first->state);
        PyThreadState_Delete(first->state);
        free(first);
        first = next;
    }
}

static void forget_decoys(void) { /* Python deletes all other states in a forked child */
    decoy = left_over = NULL;
    pthread_setspecific(decoy_key, NULL);
}

static void make_decoy_key(void) {
    pthread_key_create(&decoy_key, leave_decoy);
    pthread_atfork(NULL, NULL, forget_decoys);
}

static struct decoy *new_decoy(PyInterpreterState *interpreter) {
    struct decoy *made = calloc(1, sizeof *made);
    if (made && !(made->state = PyThreadState_New(interpreter))) {
        free(made);
        made = NULL;
    }
    return made;
}

/* Both with Python's lock held. While Python finalizes, there is no other thread, and it has deleted the decoys. */
static void shield(void) {
    PyThreadState *own = PyThreadState_Get();
    if (shields++ || is_finalizing()) return;
    if (decoy && decoy->state->id < own->id) { /* it would stand after a new state of this thread */
        delete_decoys(decoy);
        decoy = NULL;
    }
    if (!decoy) {
        pthread_once(&decoy_key_made, make_decoy_key);
        delete_decoys(__atomic_exchange_n(&left_over, NULL, __ATOMIC_SEQ_CST));
        decoy = new_decoy(own->interp);
        pthread_setspecific(decoy_key, decoy);
        if (!decoy) return;
    }
    decoy->state->thread_id = own->thread_id;
    decoy->state->async_exc = own->async_exc; /* one that has not been raised yet */
    own->async_exc = NULL;
}

static void unshield(void) {
    if (--shields || !decoy || is_finalizing()) return;
    PyObject *exception = decoy->state->async_exc;
    decoy->state->async_exc = NULL;
    decoy->state->thread_id = 0;
    if (!exception) return;
    PyThreadState_SetAsyncExc(PyThreadState_Get()->thread_id, exception);
    Py_DECREF(exception);
}

/* Begin and end the part of a driver call that is Python. */
struct python {
    PyGILState_STATE state;
    int is_shielded; /* threads that Python does not know are known to nothing that could raise exceptions in them */
};

static __thread struct decoy *stay; /* of a thread that Python knows by its calls of the driver alone: its state */

static int is_known(void) { return PyGILState_GetThisThreadState() && (!stay || PyGILState_Check()); }

static struct python begin_python(void) {
    struct python python = {.is_shielded = is_known()};
    python.state = PyGILState_Ensure();
    if (python.is_shielded) shield();
    return python;
}

static void end_python(struct python python) {
    if (python.is_shielded) unshield();
    PyGILState_Release(python.state);
}

/* Call a function of Python's as a call of the driver is made. */
void cudatool_shielded(void (*function)(void)) {
    cudatool_enter();
    struct python python = begin_python();
    function();
    end_python(python);
    cudatool_exit();
}

/* Let a signal come again when this thread is in no call. Returns 0 if it is in none. */
int cudatool_defer(int number) {
    if (!inside || number < 1 || number > 64) return 0;
    deferred |= (uint64_t)1 << (number - 1);
    return 1;
}

/* NVIDIA's runtime library cannot use this driver, as it asks for tables that are not documented (cuGetExportTable). For
 * the library there is a driver without a device: then PyTorch says that there is none, as on a machine without a
 * driver, and does not warn of one that is too old. A runtime library inside of another library is not recognized. */
static int no_device(unsigned flags) {
    (void)flags;
    return 100; /* CUDA_ERROR_NO_DEVICE */
}

static int is_runtime_library(const void *address) {
    Dl_info found;
    return dladdr(address, &found) && found.dli_fname && strstr(found.dli_fname, "/libcudart.so");
}

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    if (function) *function = NULL;
    if (closed || !resolver) return closed ? closed : 3; /* CUDA_ERROR_NOT_INITIALIZED */
    if (symbol && function && !strcmp(symbol, "cuInit") && is_runtime_library(__builtin_return_address(0))) {
        if (status) *status = 0; /* CU_GET_PROC_ADDRESS_SUCCESS */
        *function = (void *)no_device;
        return 0;
    }
    cudatool_enter();
    struct python python = begin_python();
    int result = resolver(symbol, function, version, flags, status);
    end_python(python);
    cudatool_exit();
    return result;
}

int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    int status;
    return cuGetProcAddress_v2(symbol, function, version, flags, &status);
}

/* ---- thunks ----------------------------------------------------------------------------------------------------
 *
 * Programs hold pointers to entry points until the process ends, and cuda.core destroys handles from C++ when the
 * interpreter is gone. So what is handed out is never a Python callback but a slot here, which stops calling Python
 * when told that there is none any more.
 *
 * No entry point has more than twelve arguments, and all of them are integers or pointers: twelve machine words pass
 * them on unchanged in the calling conventions of x86-64 and AArch64. A slot gives them to _calls.c, which makes Python
 * objects of them; one with structures among its arguments to a callback of ctypes.
 */
typedef int (*entry_t)(long, long, long, long, long, long, long, long, long, long, long, long);
typedef int (*target_t)(int slot, const long *words);

enum { SLOTS = 1024, CUDA_ERROR_NOT_INITIALIZED = 3, CUDA_ERROR_DEINITIALIZED = 4 };
static entry_t callbacks[SLOTS];
static target_t target;

void cudatool_set_target(target_t t) { target = t; }

/* A C++ destructor may call the driver while Python is on its way out of a function with an exception. That exception
 * is not the callback's, which starts without one, and is there again when the callback is over. */
static int call_python(int slot, const long *w) {
    struct python python = begin_python();
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    entry_t callback = callbacks[slot];
    int result = callback ? callback(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11])
                          : target(slot, w);
    PyErr_Restore(type, value, traceback);
    end_python(python);
    return result;
}

/* Threads that Python does not know are at work here, or are over for Python: cuda.core lets go of its contexts when
 * the system's thread ends. Python would end them once it is finalizing, in the middle of a C++ destructor. */
static volatile int leaving;
static int strangers;

/* The same goes for Python's own threads, daemons: Python ends them where they next ask for its lock, also in the middle
 * of a callback, through C++ frames that nothing may unwind: the process would abort. So from the same moment on they
 * wait here for its end, before or after their call. Only one that holds Python's lock goes on: it keeps all others
 * from running. */
static pthread_t leaver;
static int guests;

/* One that has just left a call still has to get Python's lock, in a C++ frame of its caller's. It comes here again, or
 * is asleep in Python: `visitors` are the threads that have made such calls, `parked` those that wait here. */
static int visitors, parked;
static __thread char is_visitor;
static pthread_key_t visit;
static pthread_once_t visit_made = PTHREAD_ONCE_INIT;

static void end_visit(void *is_visitor) {
    (void)is_visitor;
    __atomic_sub_fetch(&visitors, 1, __ATOMIC_SEQ_CST);
}

static void make_visit(void) { pthread_key_create(&visit, end_visit); }

static void begin_visit(void) {
    if (is_visitor) return;
    is_visitor = 1;
    pthread_once(&visit_made, make_visit);
    pthread_setspecific(visit, &is_visitor);
    __atomic_add_fetch(&visitors, 1, __ATOMIC_SEQ_CST);
}

static void wait_for_the_end(void) {
    if (!leaving || pthread_equal(pthread_self(), leaver)) return;
    __atomic_add_fetch(&parked, 1, __ATOMIC_SEQ_CST);
    for (;;) pause();
}

/* A stranger keeps the state that Python has for it from its first call until it ends. What is a thread's own, its current
 * context for example, hangs on that state: with a new one for each call, no call would know of those before it. Another
 * thread deletes it, as it does decoys. */
static pthread_key_t stay_key;
static pthread_once_t stay_key_made = PTHREAD_ONCE_INIT;

static void end_stay(void *ended) {
    stay = NULL;
    if (!PyGILState_GetThisThreadState()) leave_decoy(ended); /* else the thread may call again, and need it */
}

static void make_stay_key(void) { pthread_key_create(&stay_key, end_stay); }

static void begin_stay(void) {
    if (stay) return;
    pthread_once(&decoy_key_made, make_decoy_key);
    pthread_once(&stay_key_made, make_stay_key);
    struct decoy *made = calloc(1, sizeof *made);
    if (!made || pthread_setspecific(stay_key, made)) {
        free(made);
        return;
    }
    PyGILState_Ensure();
    delete_decoys(__atomic_exchange_n(&left_over, NULL, __ATOMIC_SEQ_CST));
    made->state = PyEval_SaveThread();
    stay = made;
}

static int call(int slot, const long *words) {
    if (closed) return closed;
    if (is_known()) {
        if (PyGILState_Check()) return call_python(slot, words);
        begin_visit();
        __atomic_add_fetch(&guests, 1, __ATOMIC_SEQ_CST);
        if (leaving && !pthread_equal(pthread_self(), leaver)) __atomic_sub_fetch(&guests, 1, __ATOMIC_SEQ_CST);
        wait_for_the_end();
        int result = call_python(slot, words);
        __atomic_sub_fetch(&guests, 1, __ATOMIC_SEQ_CST);
        wait_for_the_end();
        return result;
    }
    __atomic_add_fetch(&strangers, 1, __ATOMIC_SEQ_CST);
    int result = CUDA_ERROR_DEINITIALIZED;
    if (!leaving) {
        begin_stay();
        result = call_python(slot, words);
    }
    __atomic_sub_fetch(&strangers, 1, __ATOMIC_SEQ_CST);
    return result;
}

/* From now on entry points return CUDA_ERROR_DEINITIALIZED to threads that Python does not know, and to its own but this
 * one nothing at all. Waits, for a second at most, for those that are in one, and for about 0.1 s of it for those that
 * may have just left one: Python is about to finalize, and must not be held by the caller. */
void cudatool_leave(void) {
    leaver = pthread_self();
    leaving = 1;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (int i = 0, quiet = 0; i < 10000; ++i) {
        int busy = __atomic_load_n(&strangers, __ATOMIC_SEQ_CST) || __atomic_load_n(&guests, __ATOMIC_SEQ_CST);
        int others = __atomic_load_n(&visitors, __ATOMIC_SEQ_CST) - is_visitor;
        quiet = busy ? 0 : quiet + 1;
        if (!busy && (others <= __atomic_load_n(&parked, __ATOMIC_SEQ_CST) || quiet > 1000)) return;
        usleep(100);
    }
}

#define SLOT(n)                                                                                                        \
    static int slot_##n(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, long k,        \
                        long l) {                                                                                      \
        const long words[] = {a, b, c, d, e, f, g, h, i, j, k, l};                                                     \
        cudatool_enter();                                                                                              \
        int status = call(0x##n, words);                                                                               \
        cudatool_exit();                                                                                               \
        return status;                                                                                                 \
    }
#define SLOT_NAME(n) slot_##n,
#define DIGITS(M, n) M(n##0) M(n##1) M(n##2) M(n##3) M(n##4) M(n##5) M(n##6) M(n##7)                                   \
    M(n##8) M(n##9) M(n##a) M(n##b) M(n##c) M(n##d) M(n##e) M(n##f)
#define PAGE(M, n) DIGITS(M, n##0) DIGITS(M, n##1) DIGITS(M, n##2) DIGITS(M, n##3) DIGITS(M, n##4) DIGITS(M, n##5)     \
    DIGITS(M, n##6) DIGITS(M, n##7) DIGITS(M, n##8) DIGITS(M, n##9) DIGITS(M, n##a) DIGITS(M, n##b) DIGITS(M, n##c)    \
    DIGITS(M, n##d) DIGITS(M, n##e) DIGITS(M, n##f)
PAGE(SLOT, 0)
PAGE(SLOT, 1)
PAGE(SLOT, 2)
PAGE(SLOT, 3)
static const entry_t slots[SLOTS] = {PAGE(SLOT_NAME, 0) PAGE(SLOT_NAME, 1) PAGE(SLOT_NAME, 2) PAGE(SLOT_NAME, 3)};

/* Return the C function of slot number `index`, which calls `callback` if that is not NULL; NULL if there are not so many
 * slots. */
entry_t cudatool_thunk(int index, entry_t callback) {
    if (index < 0 || index >= SLOTS) return NULL;
    callbacks[index] = callback;
    return slots[index];
}

/* From now on every entry point returns CUDA_ERROR_DEINITIALIZED. Registered with Py_AtExit. */
void cudatool_close(void) { closed = CUDA_ERROR_DEINITIALIZED; }

/* From now on every entry point returns CUDA_ERROR_NOT_INITIALIZED, as in a process forked from one that uses CUDA. */
void cudatool_forked(void) { closed = CUDA_ERROR_NOT_INITIALIZED; }

/* Return the entry point of an exported symbol (_exports.c): asked for without a version, NULL if there is none. */
entry_t cudatool_exported(const char *symbol) {
    void *function = NULL;
    int status;
    return !cuGetProcAddress_v2(symbol, &function, 0, 0, &status) ? (entry_t)function : NULL;
}

/* What an exported symbol returns that has no entry point, because there is no driver yet or no more. */
int cudatool_refusal(void) { return closed ? closed : CUDA_ERROR_NOT_INITIALIZED; }

/* ---- guarded calls ------------------------------------------------------------------------------------------- */

static __thread sigjmp_buf *landing;
static __thread volatile uintptr_t fault_address;
static __thread volatile int pending; /* a signal that came while the thread was busy */
__thread volatile int cudatool_busy;  /* it holds a lock (see _device.c) and must not be jumped out of */
static struct sigaction previous_segv, previous_bus, previous_fpe, previous_int;
static pthread_once_t installed = PTHREAD_ONCE_INIT;

static void hand_on(const struct sigaction *previous, int number, siginfo_t *info, void *context) {
    if (previous->sa_flags & SA_SIGINFO) {
        previous->sa_sigaction(number, info, context);
    } else if (previous->sa_handler != SIG_DFL && previous->sa_handler != SIG_IGN) {
        previous->sa_handler(number);
    } else if (previous->sa_handler == SIG_DFL) {
        signal(number, SIG_DFL);
        raise(number);
    }
}

/* Whether the handler before ours has the signal that this thread got. */
static __thread volatile int is_handed_on;

/* A handler that came after ours may take itself away and raise the signal again, as LLVM's CrashRecoveryContext does,
 * which Triton and other compilers enable for a while. That signal has no address. In a guarded call the instruction
 * faults again, now for us. Elsewhere it goes to the handler before ours, and that one may be the same handler from an
 * earlier time: it would raise the signal for ever. */
static void on_fault(int number, siginfo_t *info, void *context) {
    int is_raised = info->si_code == SI_TKILL && info->si_pid == getpid();
    if (landing && !cudatool_busy) {
        if (is_raised) return;
        fault_address = (uintptr_t)info->si_addr;
        siglongjmp(*landing, number);
    }
    if (is_raised && is_handed_on) {
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    /* Not ours: hand it to the handler before ours (faulthandler, or the default action). */
    is_handed_on = 1;
    hand_on(number == SIGSEGV ? &previous_segv : number == SIGBUS ? &previous_bus : &previous_fpe, number, info, context);
    is_handed_on = 0;
}

static void end_call(int number) {
    if (!landing) return;
    if (cudatool_busy) {
        pending = number;
    } else {
        siglongjmp(*landing, number);
    }
}

/* End busy time; what came in the meantime happens now. */
void cudatool_leave_busy(void) {
    cudatool_busy = 0;
    int number = pending;
    pending = 0;
    if (number) end_call(number);
}

static void on_stop(int number) { end_call(number); }

/* Ctrl-C: Python's own handler notes it, and the kernel ends so that Python can act on it. */
static void on_interrupt(int number, siginfo_t *info, void *context) {
    hand_on(&previous_int, number, info, context);
    end_call(number);
}

static int holds_interrupts; /* on the main thread, the only one that is interruptible */

static void catch_interrupts(void) {
    struct sigaction action = {0};
    action.sa_sigaction = on_interrupt;
    action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, &previous_int);
}

/* Let all guarded calls until cudatool_release_interrupts be interruptible: setting the handler for each takes longer than
 * a small kernel. Nothing of the program runs during it, which could set a handler of its own. */
void cudatool_hold_interrupts(void) {
    catch_interrupts();
    holds_interrupts = 1;
}

void cudatool_release_interrupts(void) {
    holds_interrupts = 0;
    sigaction(SIGINT, &previous_int, NULL);
}

/* The signal that ends the guarded call of the thread that it is sent to. */
int cudatool_stop_signal(void) { return SIGRTMIN + 12; }

static struct sigaction of_faults(void) {
    struct sigaction action = {0};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    return action;
}

/* Have our handler be the one that is called, whatever has been installed since. Libraries that put back the handler that
 * they found, but not in the reverse order, as two copies of LLVM on two threads, leave one of theirs, which then raises
 * the signal again for ever. */
static void come_first(void) {
    struct sigaction action, now;
    if (sigaction(SIGSEGV, NULL, &now) || now.sa_sigaction == on_fault) return;
    action = of_faults();
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    sigaction(SIGFPE, &action, NULL);
}

static void install(void) {
    struct sigaction action = of_faults();
    sigaction(SIGSEGV, &action, &previous_segv);
    sigaction(SIGBUS, &action, &previous_bus);
    sigaction(SIGFPE, &action, &previous_fpe);
    action.sa_flags = SA_RESTART | SA_ONSTACK | SA_NODEFER;
    action.sa_handler = on_stop;
    sigaction(cudatool_stop_signal(), &action, NULL);
}

/* Send this thread the stop signal in `ns`, again and again. Returns 0 if there is no timer; its id may be 0. */
static int set_timer(timer_t *timer, int64_t ns) {
    struct sigevent event;
    struct itimerspec when = {.it_value = {ns / 1000000000, ns % 1000000000}, .it_interval = {0, 10000000}};
    memset(&event, 0, sizeof event);
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = cudatool_stop_signal();
#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif
    event.sigev_notify_thread_id = (pid_t)syscall(SYS_gettid);
    if (timer_create(CLOCK_MONOTONIC, &event, timer)) return 0;
    timer_settime(*timer, 0, &when, NULL);
    return 1;
}

/* Call function(argument). Returns 0, or the number of the signal that ended it: SIGSEGV, SIGBUS or SIGFPE, with the
 * faulting address in *address; cudatool_stop_signal(), which also comes after `limit_ns` if that is not 0; or, if
 * `interruptible`, SIGINT. The function must own nothing that needs unwinding. */
int cudatool_guarded_call(void (*function)(void *), void *argument, uintptr_t *address, int interruptible,
                          int64_t limit_ns) {
    sigjmp_buf here;
    sigjmp_buf *outer = landing;
    timer_t timer;
    volatile int is_timed = 0; /* read after a jump */
    pthread_once(&installed, install);
    come_first();
    interruptible = interruptible && !holds_interrupts;
    if (interruptible) catch_interrupts();
    if (limit_ns) is_timed = set_timer(&timer, limit_ns);
    int number = sigsetjmp(here, 0); /* no handler that jumps here blocks a signal: SA_NODEFER */
    if (number == 0) {
        landing = &here;
        function(argument);
    } else if (address) {
        *address = fault_address;
    }
    landing = outer;
    pending = 0;
    if (is_timed) timer_delete(timer);
    if (interruptible) sigaction(SIGINT, &previous_int, NULL);
    return number;
}
