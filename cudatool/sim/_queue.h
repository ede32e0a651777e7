/* What the two halves of cudatool.sim._queue know of each other: operations in the queue, and kernels' launches. */
#ifndef CUDATOOL_QUEUE_H
#define CUDATOOL_QUEUE_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef struct {
    PyObject_HEAD
    PyObject *stream, *kind, *name, *correlation, *predecessors, *dependents, *run, *until, *value, *footprint, *findings,
        *programmatic, *host_source, *host_target, *host_memory, *launch, *node;
    long long missing, sequence, start, end;
    char done;
} Operation;

typedef struct {
    PyObject_HEAD
    PyObject *pending, *ready, *until, *engines, *watch, *turn;
    long long host_time, sequence, running;
    char in_order, is_shared;
} Queue;

/* _queue.c: return the object as an operation, NULL with an exception if it is none; put an operation at the end of its
 * stream, 0 or -1 with an exception. */
Operation *cudatool_as_operation(PyObject *object);
int cudatool_enqueue(Queue *queue, PyObject *operation, long long ns, PyObject *engine, PyObject *after);

/* _launches.c: add its types and functions to the module, 0 or -1 with an exception; whether what an operation runs is a
 * launch; and let Ctrl-C end the launches that follow each other, from the first to `after_launches`. */
int cudatool_add_launches(PyObject *module);
int cudatool_is_launch(PyObject *run);
int cudatool_before_launch(void);
void cudatool_after_launches(void);

#endif
