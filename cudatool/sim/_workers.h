/* What the threads that run a launch are given: _Calls of cudatool/sim/jit/team.py, and the functions of libcuda.so.1 that
 * run native code. */
#ifndef CUDATOOL_WORKERS_H
#define CUDATOOL_WORKERS_H
#include <stdatomic.h>
#include <stdint.h>

struct cudatool_calls {
    void (*function)(void *);
    char **arguments;     /* a context for each call */
    uintptr_t *addresses; /* of each call's fault */
    int *numbers;         /* the signal that ended each call, 0 for none */
    _Atomic uint64_t *next_block;
    uint64_t blocks;
    _Atomic uint64_t *spent; /* where the ns that the launch takes are added, if they are of interest */
    uint32_t count;
    uint32_t status; /* where a context says that its kernel was stopped */
    uint32_t params; /* where a context has the address of the packed arguments */
};

int cudatool_guarded_calls(struct cudatool_calls *calls, int interruptible);
void cudatool_hold_interrupts(void);
void cudatool_release_interrupts(void);

#endif
