// The log of _cupti.c: rows, the bytes that they point to, and tables of what occurs often, as names and stacks.

#pragma once

enum { MOST_SPARE = 1 << 17, LINE = 64 };  // bytes of a line of a processor's cache

// Guards all that follows. It is held for less than a microsecond, mostly, and to sleep and be woken takes fifty.
#ifdef PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP
#define NEW_LOCK PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP
#else
#define NEW_LOCK PTHREAD_MUTEX_INITIALIZER
#endif
static pthread_mutex_t lock = NEW_LOCK;
static Row* rows;
static size_t row_count, row_capacity, most_rows;
static Row* spare;  // a buffer that was read: fresh memory costs the program a page fault for each 4 KiB
static size_t spare_capacity;
static uint64_t lost;
static uint64_t rows_so_far;  // since the memory use was last read
static uint64_t waiting;  // rows that have a place among other sources' events, which are reported when they happen
static char* blob;  // what rows point to: arguments of launches, images of code
static size_t blob_used, blob_capacity;
static uint64_t blob_base;  // how much was read before; rows have offsets from the beginning of the recording

// An interning table: byte strings, numbered from 1 in the order in which they were added.
typedef struct {
  char* bytes;
  size_t used, capacity;
  struct { size_t start, length; }* entries;
  uint32_t count, room;
  uint32_t* slots;
  uint32_t mask, sent;
} Table;

static Table names, frames, stacks, places;
static Table noted;  // values that are noted only once

static uint64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static uint64_t hashed(const void* data, size_t length) {
  const uint8_t* at = data;
  uint64_t h = 1469598103934665603u;
  for (; length >= 8; at += 8, length -= 8) {
    uint64_t word;
    memcpy(&word, at, 8);
    h = (h ^ word) * 0x9E3779B97F4A7C15u;
    h ^= h >> 29;
  }
  for (; length; at++, length--) h = (h ^ *at) * 1099511628211u;
  return h ^ h >> 32;
}

static int table_grow(Table* table) {
  uint32_t size = table->mask ? (table->mask + 1) * 2 : 1024;
  uint32_t* slots = calloc(size, sizeof *slots);
  if (!slots) return -1;
  for (uint32_t i = 0; i < table->count; i++) {
    uint64_t at = hashed(table->bytes + table->entries[i].start, table->entries[i].length);
    while (slots[at & (size - 1)]) at++;
    slots[at & (size - 1)] = i + 1;
  }
  free(table->slots);
  table->slots = slots;
  table->mask = size - 1;
  return 0;
}

// The number of a key, 0 for none; and its slot, or the one that it would get. The table must have slots.
static uint32_t look_up(const Table* table, const void* data, size_t length, uint64_t* at) {
  *at = hashed(data, length);
  for (uint32_t found; (found = table->slots[*at & table->mask]); ++*at) {
    if (table->entries[found - 1].length == length &&
        !memcmp(table->bytes + table->entries[found - 1].start, data, length)) return found;
  }
  return 0;
}

// The number of a key, which is added if it is new; 0 if out of memory. The lock is held.
static uint32_t intern(Table* table, const void* data, size_t length) {
  if (table->count * 2 >= table->mask && table_grow(table)) return 0;
  uint64_t at;
  uint32_t found = look_up(table, data, length, &at);
  if (found) return found;
  if (table->used + length >= table->capacity) {  // also if both are 0: memcpy takes no null pointer
    size_t capacity = (table->used + length) * 2 + 4096;
    char* bytes = realloc(table->bytes, capacity);
    if (!bytes) return 0;
    table->bytes = bytes;
    table->capacity = capacity;
  }
  if (table->count == table->room) {
    uint32_t room = table->room * 2 + 256;
    void* entries = realloc(table->entries, room * sizeof *table->entries);
    if (!entries) return 0;
    table->entries = entries;
    table->room = room;
  }
  memcpy(table->bytes + table->used, data, length);
  table->entries[table->count].start = table->used;
  table->entries[table->count].length = length;
  table->used += length;
  return table->slots[at & table->mask] = ++table->count;
}

// A row to fill; NULL if the log is full, and then one more row is counted as lost. The lock is held.
static Row* new_row(void) {
  if (!rows && spare) {
    rows = spare;
    row_capacity = spare_capacity;
    spare = NULL;
  }
  if (row_count == row_capacity) {
    size_t capacity = row_capacity ? row_capacity * 2 : 4096;
    Row* more = capacity > most_rows ? NULL : realloc(rows, capacity * sizeof *more);
    if (!more) {
      lost++;
      return NULL;
    }
    rows = more;
    row_capacity = capacity;
  }
  Row* row = &rows[row_count++];
  // The next row, which the reader may have in its processor's cache, is here by the time that it is needed.
  for (size_t ahead = sizeof *row; row_count < row_capacity && ahead < 2 * sizeof *row; ahead += LINE) {
    __builtin_prefetch((const char*)row + ahead, 1);
  }
  memset(row, 0, sizeof *row);
  rows_so_far++;
  waiting++;
  return row;
}

enum { MOST_BLOB = 1 << 28, MOST_IMAGE = 1 << 24 };

// The offset of a copy of these bytes in the blob; UINT64_MAX if there is no room. The lock is held.
static uint64_t put_blob(const void* data, size_t length) {
  if (blob_used + length >= blob_capacity) {
    size_t capacity = (blob_used + length) * 2 + 4096;
    char* more = capacity > MOST_BLOB ? NULL : realloc(blob, capacity);
    if (!more) return UINT64_MAX;
    blob = more;
    blob_capacity = capacity;
  }
  memcpy(blob + blob_used, data, length);
  blob_used += length;
  return blob_base + blob_used - length;
}

// Whether an array of numbers, 0 where none was put, has a place `at`. The lock is held.
static int has_room(uint32_t** array, uint32_t* room, uint32_t at) {
  if (at < *room) return 1;
  uint32_t size = at * 2 + 256, *more = realloc(*array, size * sizeof *more);
  if (!more) return 0;
  memset(more + *room, 0, (size - *room) * sizeof *more);
  *array = more;
  *room = size;
  return 1;
}

static uint32_t number_in(const uint32_t* array, uint32_t room, uint32_t number) { return number < room ? array[number] : 0; }

static uint64_t packed(const int32_t* extents) {
  return (uint32_t)extents[0] | (uint64_t)(extents[1] & 0xFFFF) << 32 | (uint64_t)(extents[2] & 0xFFFF) << 48;
}
