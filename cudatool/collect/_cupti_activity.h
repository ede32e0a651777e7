// When kernels, copies and fills ran: the buffers in which CUPTI hands back its records.

#pragma once

enum { BUFFER = 1 << 20 };

// A forced flush hands back the buffers of work that still runs, too, and CUPTI may write its end there later. Such buffers
// are not freed: they wait, the oldest first, until a later recording takes them, or this one when there are many. By then
// that work has long ended.
enum { MOST_ASIDE = 64 };
typedef struct {
  uint8_t* buffer;
  uint32_t recording;
} Aside;
static Aside aside[MOST_ASIDE];
static int aside_count;
static atomic_int forces;  // flushes that are forced at the moment

// The oldest buffer, if it may be used; NULL if not. The lock is held.
static uint8_t* take_aside(void) {
  if (!aside_count || (aside[0].recording == recordings && aside_count < MOST_ASIDE)) return NULL;
  uint8_t* oldest = aside[0].buffer;
  memmove(aside, aside + 1, (size_t)--aside_count * sizeof *aside);
  return oldest;
}

// Returns the buffer that is to be freed instead. The lock is held.
static uint8_t* put_aside(uint8_t* buffer) {
  uint8_t* oldest = aside_count == MOST_ASIDE ? take_aside() : NULL;
  aside[aside_count++] = (Aside){buffer, recordings};
  return oldest;
}

static void buffer_requested(uint8_t** buffer, size_t* size, size_t* most) {
  int is_ours = recording && getpid() == owner;
  pthread_mutex_lock(&lock);
  *buffer = is_ours ? take_aside() : NULL;
  pthread_mutex_unlock(&lock);
  if (is_ours && !*buffer) *buffer = aligned_alloc(8, BUFFER);
  *size = *buffer ? BUFFER : 0;
  *most = 0;
}

// When work ran. A forced flush hands back what still runs, too, and then one time or both are 0.
static void set_times(Row* row, uint64_t start, uint64_t end) {
  row->time = row->words[0] = start ? start : now();
  row->words[1] = end > row->time ? end : row->time;
}

// Fills in a row that says when work ran; returns 0 for a record of something else. A kernel's name is still to be added.
static int describe_work(Row* row, const void* record) {
  uint32_t kind = *(const uint32_t*)record;
  memset(row, 0, sizeof *row);
  if (kind == KIND_KERNEL) {
    const KernelRecord* kernel = record;
    row->what = KERNEL;
    row->device = kernel->device;
    row->context = kernel->context;
    row->correlation = kernel->correlation;
    set_times(row, kernel->start, kernel->end);
    row->words[2] = kernel->stream;
    row->words[4] = packed(kernel->grid);
    row->words[5] = packed(kernel->block);
    row->words[6] = (uint64_t)(uint32_t)kernel->static_shared + (uint32_t)kernel->dynamic_shared;
    row->words[7] = kernel->graph;
  } else if (kind == KIND_GRAPH) {
    const GraphRecord* graph = record;
    row->what = GRAPH;
    row->device = graph->device;
    row->context = graph->context;
    row->correlation = graph->correlation;
    set_times(row, graph->start, graph->end);
    row->words[2] = graph->stream;
  } else if (kind == KIND_MEMCPY || kind == KIND_MEMSET) {
    const CopyRecord* copy = record;  // a fill has the same fields at the same places
    row->what = kind == KIND_MEMCPY ? COPY : FILL;
    row->device = copy->device;
    row->context = copy->context;
    row->correlation = copy->correlation;
    set_times(row, copy->start, copy->end);
    row->words[2] = copy->stream;
    row->words[3] = copy->bytes;
    row->words[4] = copy->copy_kind;
  } else {
    return 0;
  }
  return 1;
}

// The numbers of the kernels' names in one buffer, by their addresses: to look one up by its text, which may have hundreds
// of letters, takes longer than all else of its row.
enum { MOST_KNOWN_NAMES = 256 };
typedef struct {
  const char* name;
  uint32_t number;
} KnownName;

static uint32_t number_of_name(KnownName* known, const char* name) {
  if (!name) name = "";
  KnownName* one = &known[((uintptr_t)name >> 4 ^ (uintptr_t)name >> 12) % MOST_KNOWN_NAMES];
  if (one->name != name) {
    pthread_mutex_lock(&lock);
    one->number = intern(&names, name, strlen(name));
    pthread_mutex_unlock(&lock);
    one->name = name;
  }
  return one->number;
}

// The program waits for the lock at its next call of the driver: a few rows at a time.
enum { AT_ONCE = 16 };

static void put_work(const Row* found, const KernelRecord* const* kernels, int count) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < count; i++) {
    Row* row = new_row();
    if (!row) continue;
    waiting--;
    *row = found[i];
    const KernelRecord* kernel = kernels[i];
    if (kernel && kernel->device < MOST_DEVICES && kernel->local_per_thread > sampled_devices[kernel->device].local) {
      sampled_devices[kernel->device].local = kernel->local_per_thread;
      took(kernel->device, USE_KERNEL);
    }
  }
  pthread_mutex_unlock(&lock);
}

static void buffer_completed(void* context, uint32_t stream, uint8_t* buffer, size_t size, size_t valid) {
  (void)size;
  Row found[AT_ONCE];
  const KernelRecord* kernels[AT_ONCE];
  KnownName known[MOST_KNOWN_NAMES] = {0};
  int count = 0;
  for (void* record = NULL; buffer && valid && !cupti.ActivityGetNextRecord(buffer, valid, &record);) {
    if (!describe_work(&found[count], record)) continue;
    kernels[count] = found[count].what == KERNEL ? record : NULL;
    if (kernels[count]) found[count].words[3] = number_of_name(known, kernels[count]->name);
    if (++count == AT_ONCE) put_work(found, kernels, count), count = 0;
  }
  put_work(found, kernels, count);
  size_t dropped = 0;
  if (cupti.ActivityGetNumDroppedRecords(context, stream, &dropped)) dropped = 0;
  pthread_mutex_lock(&lock);
  lost += dropped;
  if (buffer && forces) buffer = put_aside(buffer);
  pthread_mutex_unlock(&lock);
  free(buffer);
}
