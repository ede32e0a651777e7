/* What a program takes of processors in parallel regions of OpenMP (gcc; seconds), written to the file that TIMES names
 * when it ends. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static double taken;
static __thread int depth; /* of regions */

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags) {
    static void (*next)(void (*)(void *), void *, unsigned, unsigned);
    if (!next) next = dlsym(RTLD_NEXT, "GOMP_parallel");
    double begin = now();
    depth++;
    next(work, data, threads, flags);
    depth--;
    if (!depth && gettid() == getpid()) taken += now() - begin; /* not regions within regions */
}

__attribute__((destructor)) static void write_times(void) {
    FILE *file = getenv("TIMES") ? fopen(getenv("TIMES"), "w") : NULL;
    if (!file) return;
    fprintf(file, "regions 1 %.6f\n", taken);
    fclose(file);
}
