/* Host threads that run the blocks of a launch beside the thread that launches.
 *
 * They start with the first launch that several threads are to run, and sleep between launches. Each takes a ticket, the
 * number of the call that it makes; the launching thread makes call 0 itself. When that returns there are no blocks
 * left, so tickets that were not taken by then are void: what is small need not wait for a thread to wake up.
 *
 *     launching thread                        helper
 *     fill in the calls, give out tickets
 *     wake as many as there are tickets       take a ticket: make that call, count it as finished
 *     make call 0                             none: sleep until there are new ones
 *     void the tickets that are left
 *     wait for those who took one
 *
 * Tickets carry the number of their launch: a helper that was late takes none of another launch by mistake, and looks at
 * no launch of which it has no ticket, which may be over.
 */
#define _GNU_SOURCE
#include "_workers.h"
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int cudatool_guarded_call(void (*function)(void *), void *argument, uintptr_t *address, int interruptible, int64_t limit_ns);
int cudatool_stop_signal(void);

enum { MOST_HELPERS = 255, PATIENCE_NS = 200000000 };

static struct {
    pthread_mutex_t in_use;
    struct cudatool_calls *calls;
    atomic_uint go;       /* changes when there are new tickets: helpers sleep on it */
    _Atomic uint64_t tickets; /* number of the launch << 32 | tickets left; the next one is as many */
    atomic_uint finished; /* calls of helpers: the launching thread sleeps on it */
    uint32_t launches;
    unsigned helpers;
    pthread_t threads[MOST_HELPERS];
    atomic_uint at_work[MOST_HELPERS];
} team = {.in_use = PTHREAD_MUTEX_INITIALIZER};

static void sleep_on(atomic_uint *word, unsigned value, const struct timespec *limit) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, limit, NULL, 0);
}

static void wake(atomic_uint *word, unsigned count) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0); }

/* Let no thread begin another block. */
static void end_launch(struct cudatool_calls *calls) { atomic_store(calls->next_block, calls->blocks); }

static void make_call(struct cudatool_calls *calls, unsigned n) {
    calls->numbers[n] = cudatool_guarded_call(calls->function, calls->arguments[n], &calls->addresses[n], 0, 0);
    if (calls->numbers[n]) end_launch(calls);
}

static void *help(void *own) {
    atomic_uint *at_work = own;
    pthread_setname_np(pthread_self(), "cudatool-sim");
    for (;;) {
        unsigned seen = atomic_load(&team.go);
        uint64_t left = atomic_load(&team.tickets);
        while ((uint32_t)left && !atomic_compare_exchange_weak(&team.tickets, &left, left - 1)) {}
        if ((uint32_t)left) {
            atomic_store(at_work, 1);
            make_call(team.calls, (uint32_t)left);
            atomic_store(at_work, 0);
            atomic_fetch_add(&team.finished, 1);
            wake(&team.finished, 1);
        } else {
            sleep_on(&team.go, seen, NULL);
        }
    }
    return NULL;
}

static int start_helper(void) {
    unsigned n = team.helpers;
    sigset_t none, before; /* Python's signals are for its own threads */
    sigfillset(&none);
    const int wanted[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, cudatool_stop_signal()};
    for (unsigned i = 0; i < sizeof wanted / sizeof *wanted; i++) sigdelset(&none, wanted[i]);
    pthread_sigmask(SIG_SETMASK, &none, &before);
    int failed = pthread_create(&team.threads[n], NULL, help, &team.at_work[n]);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) return 0;
    pthread_detach(team.threads[n]);
    team.helpers = n + 1;
    return 1;
}

/* A child has no helpers: threads do not survive a fork. */
static void forget_helpers(void) {
    pthread_mutex_init(&team.in_use, NULL);
    team.helpers = 0;
    atomic_store(&team.tickets, 0);
}

__attribute__((constructor)) static void prepare(void) { pthread_atfork(NULL, NULL, forget_helpers); }

static int was_stopped(const struct cudatool_calls *calls) {
    for (unsigned n = 0; n < calls->count; n++)
        if (calls->numbers[n] || *(volatile uint32_t *)(calls->arguments[n] + calls->status)) return 1;
    return 0;
}

static void stop_helpers(void) {
    for (unsigned n = 0; n < team.helpers; n++)
        if (atomic_load(&team.at_work[n])) pthread_kill(team.threads[n], cudatool_stop_signal());
}

/* Wait until so many calls of helpers are finished. Where the launch has been stopped, blocks that run on are ended. */
static void wait_for(void *wanted) {
    const struct timespec patience = {0, PATIENCE_NS};
    unsigned seen;
    while ((seen = atomic_load(&team.finished)) < *(unsigned *)wanted) {
        sleep_on(&team.finished, seen, &patience);
        if (atomic_load(&team.finished) == seen && was_stopped(team.calls)) stop_helpers();
    }
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Make all calls, as cudatool_guarded_call does, on as many threads as there are. Returns whether any ended early. */
int cudatool_guarded_calls(struct cudatool_calls *calls, int interruptible) {
    uint64_t begin = calls->spent ? now_ns() : 0;
    unsigned others = calls->count - 1;
    int is_ours = others && !pthread_mutex_trylock(&team.in_use); /* else this thread runs all blocks */
    for (unsigned n = 0; n < calls->count; n++) calls->numbers[n] = 0;
    if (is_ours) {
        while (team.helpers < others && team.helpers < MOST_HELPERS && start_helper()) {}
        team.calls = calls;
        atomic_store(&team.finished, 0);
        atomic_store(&team.tickets, (uint64_t)++team.launches << 32 | others);
        atomic_fetch_add(&team.go, 1);
        wake(&team.go, others);
    }
    calls->numbers[0] = cudatool_guarded_call(calls->function, calls->arguments[0], calls->addresses,
                                              interruptible, 0);
    if (calls->numbers[0]) end_launch(calls);
    if (is_ours) {
        unsigned wanted = others - (uint32_t)atomic_exchange(&team.tickets, (uint64_t)team.launches << 32);
        if (wanted > atomic_load(&team.finished)) {
            int number = cudatool_guarded_call(wait_for, &wanted, NULL, interruptible, 0);
            if (number) { /* Ctrl-C */
                end_launch(calls);
                calls->numbers[0] = number;
                stop_helpers();
                wait_for(&wanted);
            }
        }
        pthread_mutex_unlock(&team.in_use);
    }
    if (calls->spent) atomic_fetch_add(calls->spent, now_ns() - begin);
    return was_stopped(calls);
}
