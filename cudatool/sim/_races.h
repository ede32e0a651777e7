/* What the two halves of the race engine share: _race_order.c says what orders two accesses, _races.c which accesses there
 * were. cudatool/sim/jit/races.py says how it works and what it takes from PTX's memory consistency model.
 *
 * A moment is a number that grows with each synchronization of the launch. An access has the moment at which it was
 * made. What a thread knows is, for each thread of the launch, a moment: all of that thread's accesses before it
 * happened before what this thread does now.
 */
#ifndef CUDATOOL_RACES_H
#define CUDATOOL_RACES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { READ = 1, WRITE = 2, STRONG = 4, WIDE = 8, ASYNC = 16, ACQUIRE = 32, RELEASE = 64, BLIND = 128,
       VOLATILE = 2048, GUESS = 4096 }; /* instrument.Flag */
enum { READ_AFTER_WRITE, WRITE_AFTER_READ, WRITE_AFTER_WRITE, STALE_READ, IN_STEP, CAS_GUESS, KINDS };
enum { NO_BARRIER, NO_WARP_SYNC, NO_ORDER, NARROW_ATOMIC, NARROW_FENCE, NO_FENCE, NOT_WAITED, READ_ONLY_CACHE,
       TEXTURE_CACHE }; /* race_engine.RaceReason */

/* ---- what is known: a tree over threads, shared between all who know the same ----
 *
 * Level 0 is a warp, level 1 a block's threads, or the writes or the reads of the copies that they started; the levels
 * above number these parts, four for each block.
 * `base` holds for everything below. A node that has several references does not change.
 */
typedef struct node {
    uint32_t refs, base;
    union {
        struct node *child[32];
        uint32_t at[32];
    };
} node_t;

/* ---- accesses ---- */

/* Accesses of a warp's lanes by one instruction at one moment. Of `key`: bytes (0-3), flags (4-8), warp (9-13),
 * whether it is volatile (14), or a guess (15). */
typedef struct {
    uint32_t moment, block, key, line, lanes;
} record_t;

typedef struct {
    record_t record;
    uint32_t next;
} link_t;

/* The newest weak write and weak read; older ones that still matter, and all strong accesses, in lists. */
typedef struct {
    record_t write, read;
    uint32_t writes, reads, strongs, strong_moment;
    uint16_t reads_room, strongs_room; /* how many more before the list is looked through */
    uint32_t unused;
} cell_t;

#define KEY(bytes, flags, warp) ((bytes) | ((flags) & 31) << 4 | (warp) << 9 | ((flags) & VOLATILE ? 1 << 14 : 0) | \
                                  ((flags) & GUESS ? 1 << 15 : 0))
#define BYTES(key) ((key) & 15)
#define FLAGS(key) ((key) >> 4 & 31)
#define WARP(key) ((key) >> 9 & 31)
#define IS_VOLATILE(key) ((key) >> 14 & 1)
#define IS_GUESS(key) ((key) >> 15 & 1)

/* Accesses that await their turn: by one instruction, of consecutive threads, at a constant distance; or of several rows
 * of a block's threads, whose first ones are at a constant distance. Threads execute one
 * after the other, so the n-th access of each continues the n-th run. Inlined code does that (races.STEP); it calls
 * cudatool_race_open where it cannot. Between two synchronizations the order in which accesses are looked at makes no
 * difference to what races. race_engine.AccessRun. */
typedef struct {
    uint64_t next, expected; /* offset and, in halves, key and thread, of the access that continues it */
    uint64_t stride, first, row_stride;
    uint32_t thread, rows; /* thread of the first; complete rows before the last one, which may be longer */
} run_t;

#define RUNS 2048 /* race_engine.RUNS; one more never matches */

/* ---- threads, blocks, flags ---- */

#define GROUPS 16 /* of asynchronous copies that a thread may have committed and not waited for */

typedef struct {
    node_t *root; /* what else the thread knew */
    uint32_t moment, block, warp, copied[2];
} snapshot_t;

typedef struct {
    node_t *root;          /* what it knows beyond its block's and warp's moments */
    node_t *gained[2];     /* read with strong reads, and known after a fence: of the block, of the device */
    snapshot_t fenced[2];  /* at its last fence of any scope, and at its last one of the device */
    uint32_t copied[2];    /* writes and reads of its asynchronous copies before these moments are complete */
    uint32_t group, groups[GROUPS];
    bool narrow, unfenced; /* it read a flag whose writer has too narrow a scope, or no fence */
} thread_t;

typedef struct block {
    struct block *next;
    uint64_t index, base; /* base: where its shared memory is */
    uint32_t start, moment, warps[32], threads;
    bool touched, mixed; /* a thread's state is not zero; not all threads have the same root */
    bool halves;         /* since the last barrier a thread had a fence, or read a flag */
    uint32_t entered;    /* what has this moment or a later one, while the block runs, is of the block */
    node_t *arrived[16]; /* at named barriers, by bar.arrive */
    node_t *cluster;     /* at the cluster's barrier */
    bool at_cluster;     /* threads wait at it */
    cell_t *shared;
    uint64_t *words, *seconds; /* of shared memory */
    thread_t *of;
} block_t;

/* A thread read a value of a flag: which writes it observed, by their moments (PTX ISA, Observation Order). */
typedef struct {
    uint32_t from, until, block, thread;
} seen_t;

#define SEEN 8 /* reads of a flag that are remembered; of older ones it is forgotten what they order */

/* What was written to a flag or lock, and who may see it. */
typedef struct {
    uint64_t address;
    uint32_t block, thread;
    bool written;
    node_t *wide, *narrow; /* for all blocks, and for the writer's */
    node_t *phase, *done;  /* of an mbarrier: of its current phase and of the one before */
    uint32_t parity;
    uint32_t chain, writes_wide;   /* writes from this moment on are read by who reads the value; scope of the last one */
    uint32_t seen_count;
    seen_t *seen; /* the last reads of a value; NULL if there was none */
} flag_t;

/* Where four bytes' history is, and from when on it counts, for the block that runs. */
typedef struct {
    uint64_t *words, *seconds;
    cell_t *cells;
    uint32_t start, entered, past; /* of a block: moments from `entered`, and before `past`, are before its last barrier */
    bool shared;
} place_t;

/* Reads through the read-only cache by one instruction, of `count` threads from `thread`, each of `size` adjacent bytes
 * from `offset`: of each byte the first. */
typedef struct {
    uint64_t offset;
    uint32_t block, line, count;
    uint16_t thread;
    uint8_t size, unused;
} cached_t;

#define LATEST 64 /* lines whose latest reads are remembered */

/* Bits of `reads_of`, which inlined code looks at: the byte is among the reads through the read-only cache; reads of
 * different blocks (FAR) stand for all further ones. instrument.READS. */
enum { CACHED = 1, SETTLED = 2 };

/* From this moment to the next entry's, moments are of one block. */
typedef struct {
    uint32_t moment, block;
} entry_t;

/* One race: the first of its kind at a line. race_engine.RaceRecord. */
typedef struct {
    uint64_t address, block, other_block;
    uint32_t kind, line, other_line, size, mode, other_mode, space, thread, other_thread, reason, count, other_size;
} found_t;

typedef struct {
    /* These first, for inlined code: race_engine.EngineState. */
    run_t *runs;
    const uint64_t *shared_words; /* of the block that runs */
    uint64_t shared_bytes;
    uint8_t *reads_of; /* of each byte of device memory: `stamp` and what this launch did, CACHED or SETTLED; or else */
    uint64_t stamp;    /* a multiple of 4 in all eight bytes */
    uint32_t now;

    uint32_t runs_first, runs_end;
    bool plain, programs, hit; /* hit: the last scattered read that was looked up was known */
    uint32_t misses;
    uint32_t launch, lines, threads, width; /* width: threads of a row */
    uint64_t base;
    uint64_t *words, *seconds;
    place_t places[2]; /* device memory, shared memory */
    entry_t *entries; /* whose the moments are */
    uint32_t entries_used, entries_size;
    bool stamped; /* was a word written since the last entry? */
    int level;                  /* of the root of a tree */
    bool acquires, copies, narrows; /* may blocks learn of others; are there asynchronous copies, narrow atomics */
    bool observes;                  /* does it access plainly what it has read a strong write of */
    cell_t *cells;
    cached_t *reads; /* through the read-only cache */
    uint64_t reads_used, reads_size, latest[LATEST]; /* by line: the number of its last reads, from 1 */
    block_t *block, *live[1024], *spare;
    link_t *links;
    uint32_t links_used, links_size, links_free;
    flag_t *flags;
    uint32_t flags_used, flags_size, flags_seen; /* the last: how many remember reads */
    uint32_t *sites; /* for each line and kind: the number of its record, from 1 */
    found_t *found;
    uint32_t found_used, found_size;
    bool in_step, volatiles; /* a pair of kind IN_STEP was found; there are volatile accesses to shared memory */
    uint8_t *guesses; /* by line: whether a guess was made there (MADE), and met a write (MET) */
    uint32_t unmet;   /* lines at which none has met a write yet */
    uint64_t limit; /* bytes that the history may take beside its maps */
    bool ended;     /* it took more: from then on nothing is looked at, as what it lacks could be a false race */
} race_t;

enum { OWN, COPY_WRITES, COPY_READS }; /* whose accesses: the thread's, or those of the copies that it started */

static inline void *need(void *memory) {
    if (!memory)
        abort();
    return memory;
}

#pragma GCC visibility push(hidden)

/* _race_order.c */

/* Bytes of all trees. */
uint64_t race_tree_bytes(void);
/* Forget what the threads of a block know. */
void race_forget(race_t *r, block_t *b);
/* Forget all flags, and free their table. */
void race_end_flags(race_t *r);
/* Returns the lanes of `e` whose access is not known to thread `t` to have been before. */
uint32_t race_unordered(const race_t *r, const record_t *e, uint32_t t);
/* Returns why nothing orders an access of thread `t`, with these flags, after that of the first lane of `e`. */
uint32_t race_reason(const race_t *r, const record_t *e, uint32_t flags, uint32_t t);
/* Whether a strong write was before an access of thread `t` since a thread has read its value, which did that before (PTX
 * ISA, Causality Order: by observation order): as a block that finds itself the last one sets the counter to zero. */
bool race_is_observed(race_t *r, const record_t *e, uint64_t address, uint32_t t);

/* _races.c */

/* Look at the accesses that await their turn: what comes next changes the order. Returns whether anything is looked at from
 * now on. */
bool race_flush(race_t *r);
/* Note from when on accesses to memory count, for the block that runs. */
void race_set_places(race_t *r);

#pragma GCC visibility pop

#endif
