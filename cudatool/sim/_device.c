/* What kernels call: the functions that CUDA's compiler expects of the system (vprintf, malloc, free, __assertfail).
 *
 * Native kernel code calls them directly, on whatever host thread runs it. A kernel can be ended in the middle by a
 * fault (see cudatool_guarded_call), so nothing here touches memory of the kernel's while it holds a lock.
 */
#define _GNU_SOURCE
#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Set while a lock is held: an interrupt must not end the kernel then, but when the lock is given back. */
extern __thread volatile int cudatool_busy;
void cudatool_leave_busy(void);

static void enter(pthread_mutex_t *lock) {
    cudatool_busy = 1;
    pthread_mutex_lock(lock);
}

static void leave(pthread_mutex_t *lock) {
    pthread_mutex_unlock(lock);
    cudatool_leave_busy();
}

/* ---- printf -----------------------------------------------------------------------------------------------------
 *
 * A ring of records, each a 4-byte length and the formatted text. What does not fit overwrites the oldest records
 * (CUDA C++ Programming Guide, "Formatted Output"). The host empties it when it synchronizes.
 */
enum { MAX_ARGUMENTS = 32, TEXT = 1 << 16 };

static struct {
    pthread_mutex_t lock;
    char *data;
    size_t size, start, used;
} ring = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void ring_copy(size_t at, char *to, size_t length) {
    for (size_t i = 0; i < length; i++) to[i] = ring.data[(at + i) % ring.size];
}

static void ring_drop(void) {
    uint32_t length;
    ring_copy(ring.start, (char *)&length, 4);
    ring.start = (ring.start + 4 + length) % ring.size;
    ring.used -= 4 + length;
}

static void ring_append(const char *text, size_t length) {
    for (size_t i = 0; i < length; i++) ring.data[(ring.start + ring.used + i) % ring.size] = text[i];
    ring.used += length;
}

/* Make room for `size` bytes; what was there is lost, so it is to be flushed before. Returns 0 if there is no memory. */
int cudatool_printf_resize(size_t size) {
    char *data = malloc(size);
    if (!data) return 0;
    enter(&ring.lock);
    free(ring.data);
    ring.data = data;
    ring.size = size;
    ring.start = ring.used = 0;
    leave(&ring.lock);
    return 1;
}

/* Write what has collected to the C library's stdout. */
void cudatool_printf_flush(void) {
    enter(&ring.lock);
    int any = ring.used != 0;
    while (ring.used) {
        uint32_t length;
        ring_copy(ring.start, (char *)&length, 4);
        for (size_t i = 0; i < length; i++) fputc(ring.data[(ring.start + 4 + i) % ring.size], stdout);
        ring_drop();
    }
    if (any) fflush(stdout);
    leave(&ring.lock);
}

static void add(size_t *length, int written) {
    if (written > 0) *length += written;
    if (*length > TEXT - 1) *length = TEXT - 1;
}

/* The next argument: they lie one after the other, each aligned to its size, which is 4 or 8. */
static uint64_t next(const char **arguments, int size) {
    uintptr_t at = ((uintptr_t)*arguments + size - 1) & ~(uintptr_t)(size - 1);
    uint64_t value = 0;
    memcpy(&value, (const void *)at, size);
    *arguments = (const char *)(at + size);
    return value;
}

/* A width or precision: what goes beyond the text is cut off anyway, and the C library would allocate memory for it. */
static int bounded(int64_t number) { return number > TEXT ? TEXT : number < -TEXT ? -TEXT : (int)number; }

/* printf as kernels have it: formats %[flags][width][.precision][size]type with flags "-+ #0", a width that may be
 * "*", sizes hh, h, l, ll and types diouxXcspfFeEgGaA. Returns how many arguments were formatted, -1 for a NULL format
 * (CUDA C++ Programming Guide, "Formatted Output", "Format Specifiers" and "Limitations"). */
int32_t cudatool_vprintf(const char *format, const char *arguments) {
    static __thread char text[TEXT];
    size_t length = 0;
    int32_t count = 0;
    if (!format) return -1;
    while (*format && length < TEXT - 1) {
        if (*format != '%') {
            text[length++] = *format++;
            continue;
        }
        if (format[1] == '%') {
            text[length++] = '%';
            format += 2;
            continue;
        }
        const char *begin = format++;
        char one[128]; /* "%", 40 of flags and digits, two numbers for "*" of up to 11, ".", "ll", the type */
        size_t n = 0;
        int longs = 0, shorts = 0;
        one[n++] = '%';
        while (n < 40 && *format && strchr("-+ #0", *format)) one[n++] = *format++;
        for (int part = 0; part < 2; part++) {
            if (*format == '*' && count < MAX_ARGUMENTS) {
                int32_t number = (int32_t)next(&arguments, 4);
                if (part == 0 || number >= 0) n += snprintf(one + n, sizeof one - n, "%d", bounded(number));
                else n--; /* a negative precision is none */
                count++;
                format++;
            } else if (*format >= '0' && *format <= '9') {
                int64_t number = 0;
                for (; *format >= '0' && *format <= '9'; format++)
                    number = number < TEXT ? 10 * number + (*format - '0') : number;
                n += snprintf(one + n, sizeof one - n, "%d", bounded(number));
            }
            if (part == 0) {
                if (*format != '.') break;
                one[n++] = *format++;
            }
        }
        for (;; format++) {
            if (*format == 'l' || *format == 'z' || *format == 'j' || *format == 't') longs++;
            else if (*format == 'h') shorts++;
            else break;
        }
        char type = *format;
        size_t room = TEXT - length;
        if (!type || count == MAX_ARGUMENTS || !strchr("diouxXcspfFeEgGaA", type)) {
            /* Not a specification: it is output as it stands. */
            add(&length, snprintf(text + length, room, "%.*s", (int)(format - begin), begin));
            continue;
        }
        format++;
        count++;
        if (strchr("fFeEgGaA", type)) {
            uint64_t bits = next(&arguments, 8);
            double value;
            memcpy(&value, &bits, 8);
            one[n++] = type, one[n] = 0;
            add(&length, snprintf(text + length, room, one, value));
        } else if (type == 's' || type == 'p') {
            const char *value = (const char *)(uintptr_t)next(&arguments, 8);
            one[n++] = type, one[n] = 0;
            add(&length, snprintf(text + length, room, one, value));
        } else if (type == 'c') {
            one[n++] = type, one[n] = 0;
            add(&length, snprintf(text + length, room, one, (int)next(&arguments, 4)));
        } else {
            for (int i = 0; i < shorts && i < 2; i++) one[n++] = 'h';
            if (longs) one[n++] = 'l', one[n++] = 'l';
            one[n++] = type, one[n] = 0;
            uint64_t value = next(&arguments, longs ? 8 : 4);
            add(&length,
                longs ? snprintf(text + length, room, one, (long long)value)
                      : snprintf(text + length, room, one, (int)(int32_t)value));
        }
    }
    enter(&ring.lock);
    if (ring.size > 4) {
        uint32_t kept = length > ring.size - 4 ? (uint32_t)(ring.size - 4) : (uint32_t)length;
        while (ring.used + 4 + kept > ring.size) ring_drop();
        ring_append((const char *)&kept, 4);
        ring_append(text, kept);
    }
    leave(&ring.lock);
    return count;
}

/* ---- assert --------------------------------------------------------------------------------------------------- */

/* Say on stderr which assertion of which thread failed, in the words of CUDA's driver; the first of a launch is also
 * left in *first, for the host to free. */
void cudatool_assert(char **first, const char *message, const char *file, uint32_t line, const char *function,
                     uint32_t bx, uint32_t by, uint32_t bz, uint32_t tx, uint32_t ty, uint32_t tz) {
    static __thread char text[TEXT];
    snprintf(text, TEXT, "%s:%u: %s: block: [%u,%u,%u], thread: [%u,%u,%u] Assertion `%s` failed.", file ? file : "",
             line, function ? function : "", bx, by, bz, tx, ty, tz, message ? message : "");
    cudatool_busy = 1; /* stdio and malloc have locks, too */
    fprintf(stderr, "%s\n", text);
    if (!*first) *first = strdup(text);
    cudatool_leave_busy();
}

/* ---- the heap of a device ---------------------------------------------------------------------------------------
 *
 * Blocks of granules of 16 bytes, next fit. What is known of a block lies apart from it, in `units` at its first
 * granule, so that a kernel that writes out of bounds cannot corrupt it: its length, and whether it is in use.
 */
enum { GRANULE = 16 };
static const uint32_t USED = 0x80000000u;

typedef struct {
    pthread_mutex_t lock;
    char *base;
    uint32_t count, rover;
    uint32_t *units;
} heap_t;

/* Return a heap in the `size` bytes at `base`, NULL if there is no memory. */
heap_t *cudatool_heap_create(char *base, size_t size) {
    heap_t *heap = calloc(1, sizeof *heap);
    uint32_t count = size / GRANULE < USED ? (uint32_t)(size / GRANULE) : USED - 1;
    uint32_t *units = calloc((size_t)count + 1, sizeof *units);
    if (!heap || !units) {
        free(heap);
        free(units);
        return NULL;
    }
    pthread_mutex_init(&heap->lock, NULL);
    heap->base = base;
    heap->count = count;
    heap->units = units;
    units[0] = count;
    return heap;
}

void cudatool_heap_destroy(heap_t *heap) {
    if (heap) free(heap->units);
    free(heap);
}

/* Return the number of blocks that are in use. */
uint32_t cudatool_heap_blocks(heap_t *heap) {
    uint32_t used = 0;
    enter(&heap->lock);
    for (uint32_t at = 0; at < heap->count; at += heap->units[at] & ~USED) used += (heap->units[at] & USED) != 0;
    leave(&heap->lock);
    return used;
}

/* Write address and bytes of the blocks that are in use, up to `room` of them, to `found`; return how many it wrote. */
uint32_t cudatool_heap_list(heap_t *heap, uint64_t (*found)[2], uint32_t room) {
    uint32_t count = 0;
    enter(&heap->lock);
    for (uint32_t at = 0; at < heap->count && count < room; at += heap->units[at] & ~USED) {
        if (!(heap->units[at] & USED)) continue;
        found[count][0] = (uint64_t)(uintptr_t)heap->base + (uint64_t)at * GRANULE;
        found[count++][1] = (uint64_t)(heap->units[at] & ~USED) * GRANULE;
    }
    leave(&heap->lock);
    return count;
}

/* Return `size` bytes that begin at a multiple of 16, NULL if there are not so many (CUDA C++ Programming Guide,
 * "Dynamic Global Memory Allocation and Operations"). */
void *cudatool_malloc(heap_t *heap, uint64_t size) {
    if (!heap || !heap->count || size > (uint64_t)heap->count * GRANULE) return NULL;
    uint32_t want = size ? (uint32_t)((size + GRANULE - 1) / GRANULE) : 1;
    void *found = NULL;
    enter(&heap->lock);
    uint32_t at = heap->rover;
    for (uint64_t seen = 0; seen < heap->count && !found;) {
        uint32_t length = heap->units[at] & ~USED;
        if (!(heap->units[at] & USED)) {
            while (at + length < heap->count && !(heap->units[at + length] & USED)) {
                uint32_t after = heap->units[at + length];
                heap->units[at + length] = 0;
                length += after;
            }
            heap->units[at] = length;
            if (length >= want) {
                if (length > want) heap->units[at + want] = length - want;
                heap->units[at] = want | USED;
                found = heap->base + (size_t)at * GRANULE;
                length = want;
            }
        }
        seen += length;
        at += length;
        if (at >= heap->count) at = 0;
    }
    heap->rover = at;
    leave(&heap->lock);
    return found;
}

/* Return the granules of a block that is in use, in bytes; 0 if none begins there. */
uint64_t cudatool_block_bytes(heap_t *heap, char *block) {
    if (!heap || block < heap->base || (size_t)(block - heap->base) % GRANULE) return 0;
    size_t at = (size_t)(block - heap->base) / GRANULE;
    if (at >= heap->count) return 0;
    enter(&heap->lock);
    uint32_t unit = heap->units[at];
    leave(&heap->lock);
    return unit & USED ? (uint64_t)(unit & ~USED) * GRANULE : 0;
}

/* Give a block back; NULL is none. Returns 0 if `block` is not one that cudatool_malloc gave and that is in use. */
int32_t cudatool_free(heap_t *heap, char *block) {
    if (!block) return 1;
    if (!heap || block < heap->base || (size_t)(block - heap->base) % GRANULE) return 0;
    size_t at = (size_t)(block - heap->base) / GRANULE;
    if (at >= heap->count) return 0;
    enter(&heap->lock);
    int32_t good = (heap->units[at] & USED) != 0;
    if (good) {
        heap->units[at] &= ~USED;
        heap->rover = 0; /* blocks merge only on a walk that begins before them */
    }
    leave(&heap->lock);
    return good;
}

/* Arithmetic rounded in a direction: add, sub, mul, fma, div, sqrt; to nearest, down, up, to zero. The operands are
 * volatile so that nothing moves across the change of the rounding mode. */
static const int directions[] = {FE_TONEAREST, FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};

#define ROUNDED(name, type, fused, root)                                                                               \
    type name(int32_t operation, int32_t mode, type x, type y, type z) {                                               \
        volatile type a = x, b = y, c = z, result = 0;                                                                 \
        int before = fegetround();                                                                                     \
        cudatool_busy = 1;                                                                                             \
        fesetround(directions[mode & 3]);                                                                              \
        switch (operation) {                                                                                           \
        case 0: result = a + b; break;                                                                                 \
        case 1: result = a - b; break;                                                                                 \
        case 2: result = a * b; break;                                                                                 \
        case 3: result = fused(a, b, c); break;                                                                        \
        case 4: result = a / b; break;                                                                                 \
        case 5: result = root(a); break;                                                                               \
        }                                                                                                              \
        fesetround(before);                                                                                            \
        cudatool_leave_busy();                                                                                         \
        return result;                                                                                                 \
    }

ROUNDED(cudatool_rounded_f32, float, fmaf, sqrtf)
ROUNDED(cudatool_rounded_f64, double, fma, sqrt)
