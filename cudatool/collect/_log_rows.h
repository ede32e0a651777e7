// The rows of the log that _cupti.c writes and _log_rows.c reads. Python's names for them are in cupti_rows.py.

#pragma once

#include <stdint.h>

enum { WORDS = 8 };
// Kinds of rows that are not driver calls.
enum { KERNEL = 0xFF01, COPY = 0xFF02, FILL = 0xFF03, GRAPH = 0xFF04, CONTEXT = 0xFF05, USE = 0xFF06 };
enum { OPERATION = 0xFF07, LAUNCH = 0xFF08, FAILURE = 0xFF09 };
enum { BLOCK = 0xFF10, POOL_ALLOC = 0xFF11, POOL_FREE = 0xFF12 };
enum { RANGE = 0xFF13 };  // the kind of its event, the offset and the length of its name, its own number

typedef struct {
  uint64_t time;
  uint16_t what;  // the callback's number, or one of the above
  uint16_t result;
  uint32_t thread, correlation, stack, device, context;
  uint64_t words[WORDS];
} Row;

// Of a LAUNCH: flags in the upper half of its fifth word (cudatool.collect.gpu_launches).
enum { COOPERATIVE = 1, PROGRAMMATIC = 2, ARGUMENTS_UNKNOWN = 4, PER_THREAD = 8, CAPTURED = 16 };

// Of a row of PyTorch's allocator: its action (TraceEntry::Action), and the two of most frees as one.
enum { ALLOC, FREE_REQUESTED, FREE_COMPLETED, SNAPSHOT = 7, OUT_OF_MEMORY, FREED = 16 };

static inline int is_of_allocator(uint16_t what) { return what == BLOCK || what == POOL_ALLOC || what == POOL_FREE; }
