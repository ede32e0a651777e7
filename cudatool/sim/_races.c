/* Races inside of kernels, by the definition of PTX's memory consistency model. cudatool/sim/jit/races.py says how it
 * works and what it takes from the model; this file is the engine that instrumented code calls. A launch that is checked
 * runs on one host thread, so nothing here is locked.
 *
 * A moment is a number that grows with each synchronization of the launch. An access has the moment at which it was
 * made. What a thread knows is, for each thread of the launch, a moment: all of that thread's accesses before it
 * happened before what this thread does now.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXITED 0x7FFFFFFFu /* the region of a thread that has ended: context.EXIT */
#define GROUPS 16          /* of asynchronous copies that a thread may have committed and not waited for */

enum { READ = 1, WRITE = 2, STRONG = 4, WIDE = 8, ASYNC = 16, ACQUIRE = 32, RELEASE = 64, BLIND = 128 }; /* instrument.Flag */
enum { READ_AFTER_WRITE, WRITE_AFTER_READ, WRITE_AFTER_WRITE, KINDS };
enum { NO_BARRIER, NO_WARP_SYNC, NO_ORDER, NARROW_ATOMIC, NARROW_FENCE, NO_FENCE, NOT_WAITED }; /* race_engine.Reason */

/* ---- what is known: a tree over threads, shared between all who know the same ----
 *
 * Level 0 is a warp, level 1 a block's threads, or the copies that they started; the levels above number these halves.
 * `base` holds for everything below. A node that has several references does not change.
 */
typedef struct node {
    uint32_t refs, base;
    union {
        struct node *child[32];
        uint32_t at[32];
    };
} node_t;

static node_t *hold(node_t *node) {
    if (node)
        node->refs++;
    return node;
}

static void drop(node_t *node, int level) {
    if (!node || --node->refs)
        return;
    if (level)
        for (int i = 0; i < 32; i++)
            drop(node->child[i], level - 1);
    free(node);
}

static size_t node_bytes(int level) {
    return level ? sizeof(node_t) : offsetof(node_t, at) + sizeof(uint32_t[32]);
}

static node_t *copy_of(const node_t *old, int level) {
    node_t *node = calloc(1, node_bytes(level));
    if (!node)
        abort();
    if (old) {
        memcpy(node, old, node_bytes(level));
        if (level)
            for (int i = 0; i < 32; i++)
                hold(node->child[i]);
    }
    node->refs = 1;
    return node;
}

/* The later of each moment in `a` and `b`, which are borrowed. */
static node_t *join(node_t *a, node_t *b, int level) {
    if (!b || a == b)
        return hold(a);
    if (!a)
        return hold(b);
    bool is_a = a->base >= b->base, is_b = b->base >= a->base;
    node_t *node = calloc(1, node_bytes(level));
    if (!node)
        abort();
    node->refs = 1;
    node->base = is_a ? a->base : b->base;
    for (int i = 0; i < 32; i++) {
        if (level) {
            node->child[i] = join(a->child[i], b->child[i], level - 1);
            is_a &= node->child[i] == a->child[i];
            is_b &= node->child[i] == b->child[i];
        } else {
            node->at[i] = a->at[i] > b->at[i] ? a->at[i] : b->at[i];
            is_a &= node->at[i] == a->at[i];
            is_b &= node->at[i] == b->at[i];
        }
    }
    if (!is_a && !is_b)
        return node;
    drop(node, level);
    return hold(is_a ? a : b);
}

/* `old` with `moment` for all below the node of level `target` at `key`, for the one thread if that is -1. Takes `old`,
 * which is changed if there is no other reference to it. */
static node_t *raise(node_t *old, int level, int target, uint64_t key, uint32_t moment) {
    node_t *node = old;
    if (!old || old->refs > 1) {
        node = copy_of(old, level);
        drop(old, level);
    }
    unsigned index = key >> 5 * level & 31;
    if (level == target) {
        if (moment > node->base)
            node->base = moment;
    } else if (level)
        node->child[index] = raise(node->child[index], level - 1, target, key, moment);
    else if (moment > node->at[index])
        node->at[index] = moment;
    return node;
}

static uint32_t known(const node_t *node, int level, uint64_t key) {
    uint32_t best = 0;
    for (; node; level--) {
        if (node->base > best)
            best = node->base;
        unsigned index = key >> 5 * level & 31;
        if (!level)
            return node->at[index] > best ? node->at[index] : best;
        node = node->child[index];
    }
    return best;
}

/* ---- the history of four bytes of memory ---- */

/* Accesses of a warp's lanes by one instruction at one moment. Of `key`: bytes (0-3), flags (4-8), warp (9-13). */
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

#define KEY(bytes, flags, warp) ((bytes) | ((flags) & 31) << 4 | (warp) << 9)
#define BYTES(key) ((key) & 15)
#define FLAGS(key) ((key) >> 4 & 31)
#define WARP(key) ((key) >> 9 & 31)

/* ---- threads, blocks, flags ---- */

typedef struct {
    node_t *root; /* what else the thread knew */
    uint32_t moment, block, warp, copied;
} snapshot_t;

typedef struct {
    node_t *root;          /* what it knows beyond its block's and warp's moments */
    node_t *gained[2];     /* read with strong reads, and known after a fence: of the block, of the device */
    snapshot_t fenced[2];  /* at its last fence of any scope, and at its last one of the device */
    uint32_t copied;       /* its asynchronous copies before this moment are complete */
    uint32_t group, groups[GROUPS];
    bool narrow, unfenced; /* it read a flag whose writer has too narrow a scope, or no fence */
} thread_t;

typedef struct block {
    struct block *next;
    uint64_t index, base; /* base: where its shared memory is */
    uint32_t start, moment, warps[32], threads;
    bool touched, mixed; /* a thread's state is not zero; not all threads have the same root */
    bool halves;         /* since the last barrier a thread had a fence, or read a flag */
    node_t *arrived[16]; /* at named barriers, by bar.arrive */
    cell_t *shared;
    thread_t *of;
} block_t;

/* What was written to a flag or lock, and who may see it. */
typedef struct {
    uint64_t address;
    uint32_t block, thread;
    bool written;
    node_t *wide, *narrow; /* for all blocks, and for the writer's */
    node_t *phase, *done;  /* of an mbarrier: of its current phase and of the one before */
    uint32_t parity;
} flag_t;

/* One race: the first of its kind at a line. race_engine.RaceRecord. */
typedef struct {
    uint64_t address, block, other_block;
    uint32_t kind, line, other_line, size, mode, other_mode, space, thread, other_thread, reason, count, other_size;
} found_t;

typedef struct {
    uint32_t now, launch, lines, threads;
    uint64_t shared_bytes;
    int level;                  /* of the root of a tree */
    bool acquires, copies, narrows; /* may blocks learn of others; are there asynchronous copies, narrow atomics */
    cell_t *cells;
    block_t *block, *live[1024], *spare;
    link_t *links;
    uint32_t links_used, links_size, links_free;
    flag_t *flags;
    uint32_t flags_used, flags_size;
    uint32_t *sites; /* for each line and kind: the number of its record, from 1 */
    found_t *found;
    uint32_t found_used, found_size;
    bool incomplete;
} race_t;

#define ALL (~(uint64_t)0)

static uint64_t key_of(uint64_t block, bool copy, uint32_t thread) {
    return (2 * block + copy) << 10 | thread;
}

static void *need(void *memory) {
    if (!memory)
        abort();
    return memory;
}

race_t *cudatool_race_begin(uint32_t now, uint64_t blocks, uint32_t threads, uint64_t shared_bytes, uint32_t lines,
                            int acquires, void *cells) {
    race_t *r = need(calloc(1, sizeof *r));
    r->now = r->launch = now;
    r->threads = threads;
    r->shared_bytes = shared_bytes;
    r->lines = lines;
    r->acquires = acquires;
    r->cells = cells;
    r->level = 2;
    while (r->level < 12 && 2 * blocks > (uint64_t)1 << 5 * (r->level - 1))
        r->level++;
    r->links_size = 1024;
    r->links = need(malloc(r->links_size * sizeof *r->links));
    r->links_used = 1;
    r->flags_size = 256;
    r->flags = need(calloc(r->flags_size, sizeof *r->flags));
    r->sites = need(calloc((size_t)lines * KINDS, sizeof *r->sites));
    return r;
}

static void forget(race_t *r, block_t *b) {
    if (!b->touched)
        return;
    for (uint32_t t = 0; t < b->threads; t++) {
        thread_t *thread = &b->of[t];
        drop(thread->root, r->level);
        for (int i = 0; i < 2; i++) {
            drop(thread->gained[i], r->level);
            drop(thread->fenced[i].root, r->level);
        }
    }
    for (int i = 0; i < 16; i++)
        drop(b->arrived[i], r->level);
    memset(b->arrived, 0, sizeof b->arrived);
    memset(b->of, 0, b->threads * sizeof *b->of);
    b->touched = b->mixed = b->halves = false;
}

static void free_block(race_t *r, block_t *b) {
    forget(r, b);
    free(b->of);
    free(b->shared);
    free(b);
}

/* Returns the moment at which the next launch may begin. */
uint32_t cudatool_race_end(race_t *r) {
    uint32_t now = r->now + 1;
    for (int i = 0; i < 1024; i++)
        while (r->live[i]) {
            block_t *b = r->live[i];
            r->live[i] = b->next;
            free_block(r, b);
        }
    while (r->spare) {
        block_t *b = r->spare;
        r->spare = b->next;
        free_block(r, b);
    }
    for (uint32_t i = 0; i < r->flags_size; i++) {
        flag_t *f = &r->flags[i];
        drop(f->wide, r->level), drop(f->narrow, r->level), drop(f->phase, r->level), drop(f->done, r->level);
    }
    free(r->flags), free(r->links), free(r->sites), free(r->found), free(r);
    return now;
}

uint32_t cudatool_race_found(race_t *r, found_t **found) {
    *found = r->found;
    return r->found_used;
}

/* A block begins, or goes on after it waited for others. */
void cudatool_race_enter(race_t *r, uint64_t index, uint64_t base, uint32_t fresh) {
    block_t **bucket = &r->live[index & 1023];
    for (block_t *b = fresh ? NULL : *bucket; b; b = b->next)
        if (b->index == index) {
            r->block = b;
            return;
        }
    block_t *b = r->spare;
    if (b)
        r->spare = b->next;
    else {
        b = need(calloc(1, sizeof *b));
        b->of = need(calloc(r->threads, sizeof *b->of));
        b->shared = need(calloc(r->shared_bytes / 4 + 2, sizeof *b->shared));
        b->threads = r->threads;
    }
    b->index = index;
    b->base = base;
    b->start = b->moment = ++r->now;
    memset(b->warps, 0, sizeof b->warps);
    b->next = *bucket;
    *bucket = r->block = b;
}

void cudatool_race_leave(race_t *r) {
    block_t *b = r->block;
    for (block_t **at = &r->live[b->index & 1023]; *at; at = &(*at)->next)
        if (*at == b) {
            *at = b->next;
            break;
        }
    forget(r, b);
    b->next = r->spare;
    r->spare = b;
    r->block = NULL;
}

/* ---- knowledge of threads ---- */

static snapshot_t snapshot(race_t *r, uint32_t t) {
    block_t *b = r->block;
    return (snapshot_t){hold(b->of[t].root), ++r->now, b->moment, b->warps[t >> 5], b->of[t].copied};
}

/* All that thread `t` knew at a snapshot, as one tree; the snapshot's reference to its root is kept. */
static node_t *whole(race_t *r, const snapshot_t *s, uint32_t t) {
    uint64_t own = key_of(r->block->index, false, t);
    node_t *root = raise(hold(s->root), r->level, 1, own, s->block);
    if (s->warp > s->block)
        root = raise(root, r->level, 0, own, s->warp);
    if (s->copied)
        root = raise(root, r->level, -1, key_of(r->block->index, true, t), s->copied);
    return raise(root, r->level, -1, own, s->moment);
}

static void learn(race_t *r, uint32_t t, node_t *more) {
    thread_t *thread = &r->block->of[t];
    if (!more || more == thread->root)
        return;
    node_t *both = join(thread->root, more, r->level);
    drop(thread->root, r->level);
    thread->root = both;
    r->block->touched = r->block->mixed = true;
}

static void gain(race_t *r, node_t **to, node_t *more) {
    node_t *both = join(*to, more, r->level);
    drop(*to, r->level);
    *to = both;
    r->block->touched = true;
}

static void know_copies(race_t *r, node_t **root, uint32_t t) {
    uint32_t copied = r->block->of[t].copied;
    if (copied)
        *root = raise(*root, r->level, -1, key_of(r->block->index, true, t), copied);
}

/* What threads in `set` (a bit for each) know together; with the moment before which their accesses were made. */
static node_t *together(race_t *r, const uint32_t *set, uint32_t now) {
    block_t *b = r->block;
    node_t *root = NULL, *last = NULL;
    for (uint32_t t = 0; t < b->threads; t++) {
        if (!(set[t >> 5] >> (t & 31) & 1))
            continue;
        if (b->of[t].root != last) {
            gain(r, &root, b->of[t].root);
            last = b->of[t].root;
        }
        if (r->copies)
            know_copies(r, &root, t);
    }
    if (!now)
        return root;
    for (uint32_t w = 0; w < 32 && 32 * w < b->threads; w++) {
        uint32_t all = b->threads - 32 * w >= 32 ? ~0u : (1u << (b->threads & 31)) - 1;
        uint64_t key = key_of(b->index, false, 32 * w);
        if (!set[w])
            continue;
        if (set[w] == all) {
            root = raise(root, r->level, 0, key, now);
            continue;
        }
        if (b->warps[w] > b->moment)
            root = raise(root, r->level, 0, key, b->warps[w]);
        for (uint32_t lane = 0; lane < 32; lane++)
            if (set[w] >> lane & 1)
                root = raise(root, r->level, -1, key + lane, now);
    }
    return root;
}

static void give(race_t *r, const uint32_t *set, node_t *root) {
    block_t *b = r->block;
    for (uint32_t t = 0; t < b->threads; t++)
        if (set[t >> 5] >> (t & 31) & 1 && b->of[t].root != root) {
            drop(b->of[t].root, r->level);
            b->of[t].root = hold(root);
        }
    drop(root, r->level);
    b->touched = true;
}

/* Threads that meet at a barrier hand each other their halves of a pattern: a fence of one and a flag that another
 * writes after the barrier release what the first did; likewise a flag that one read and a fence of another. */
static void share_halves(race_t *r, const uint32_t *set) {
    block_t *b = r->block;
    for (int i = 0; i < 2; i++) {
        node_t *fenced = NULL, *gained = NULL;
        for (uint32_t t = 0; t < b->threads; t++) {
            thread_t *thread = &b->of[t];
            if (!(set[t >> 5] >> (t & 31) & 1))
                continue;
            gain(r, &gained, thread->gained[i]);
            if (thread->fenced[i].moment) {
                node_t *all = whole(r, &thread->fenced[i], t);
                gain(r, &fenced, all);
                drop(all, r->level);
            }
        }
        for (uint32_t t = 0; t < b->threads; t++) {
            thread_t *thread = &b->of[t];
            if (!(set[t >> 5] >> (t & 31) & 1))
                continue;
            drop(thread->gained[i], r->level);
            thread->gained[i] = hold(gained);
            drop(thread->fenced[i].root, r->level);
            thread->fenced[i] = (snapshot_t){.root = hold(fenced), .moment = fenced != NULL};
        }
        drop(fenced, r->level), drop(gained, r->level);
    }
}

/* ---- barriers ---- */

static const uint32_t everyone[32] = {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u,
                                      ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};

/* All threads of the block were at a barrier. One that has ended counts as one that was there. */
void cudatool_race_barrier(race_t *r) {
    block_t *b = r->block;
    if (b->mixed || r->copies) {
        give(r, everyone, together(r, everyone, 0));
        b->mixed = false;
    }
    if (b->halves)
        share_halves(r, everyone), b->halves = false;
    b->moment = ++r->now;
}

/* Lanes of a warp synchronized. Those that have ended and that the mask names count as ones that came: `regions` says
 * where the block's threads are, when they do not agree. */
void cudatool_race_warp(race_t *r, uint64_t warp, uint32_t lanes, const uint32_t *regions, const uint32_t *masks) {
    block_t *b = r->block;
    uint32_t first = 32 * (uint32_t)warp, set[32] = {0};
    uint32_t all = b->threads - first >= 32 ? ~0u : (1u << (b->threads & 31)) - 1;
    lanes &= all;
    if (lanes && lanes != all) {
        uint32_t named = masks[first + (uint32_t)__builtin_ctz(lanes)] & all & ~lanes;
        for (; named; named &= named - 1)
            if (regions[first + (uint32_t)__builtin_ctz(named)] == EXITED)
                lanes |= named & -named;
    }
    set[warp] = lanes;
    bool same = !r->copies;
    for (uint32_t t = first; t < first + 32 && t < b->threads; t++)
        same &= b->of[t].root == b->of[first].root;
    uint32_t now = ++r->now;
    bool complete = lanes == all;
    if (!complete || !same)
        give(r, set, together(r, set, complete ? 0 : now)), b->mixed = true;
    if (complete)
        b->warps[warp] = now;
    if (b->halves)
        share_halves(r, set);
}

/* bar.arrive: what the lanes did is known to those that the barrier lets go. */
void cudatool_race_arrive(race_t *r, uint64_t warp, uint32_t lanes, const uint32_t *numbers) {
    for (uint32_t lane = 0; lane < 32; lane++)
        if (lanes >> lane & 1) {
            uint32_t t = 32 * (uint32_t)warp + lane;
            snapshot_t s = snapshot(r, t);
            node_t *all = whole(r, &s, t);
            gain(r, &r->block->arrived[numbers[t] & 15], all);
            drop(all, r->level), drop(s.root, r->level);
        }
}

/* Barriers open for a part of the block's threads: those in a region of a barrier kind, at a number that is open. */
void cudatool_race_barriers(race_t *r, const uint32_t *regions, const uint8_t *kinds, const uint32_t *numbers,
                            const uint32_t *counts, const uint32_t *opened, uint32_t barrier, uint32_t reduce) {
    block_t *b = r->block;
    uint32_t sets[16][32] = {{0}}, at[16] = {0};
    bool for_all[16] = {false};
    for (uint32_t t = 0; t < b->threads; t++) {
        if (regions[t] == EXITED)
            continue;
        uint8_t kind = kinds[regions[t]];
        uint32_t number = numbers[t] & 15;
        if ((kind == barrier || kind == reduce) && opened[number]) {
            sets[number][t >> 5] |= 1u << (t & 31);
            at[number]++;
            for_all[number] = !counts[t];
        }
    }
    for (int i = 0; i < 16; i++) {
        if (!at[i])
            continue;
        if ((for_all[i] || at[i] == b->threads) && !b->arrived[i]) {
            cudatool_race_barrier(r);
            continue;
        }
        uint32_t now = ++r->now;
        node_t *root = together(r, sets[i], now);
        gain(r, &root, b->arrived[i]);
        drop(b->arrived[i], r->level);
        b->arrived[i] = NULL;
        give(r, sets[i], root);
        b->mixed = true;
        if (b->halves)
            share_halves(r, sets[i]);
    }
}

/* ---- flags, locks and fences ---- */

static flag_t *slot(flag_t *flags, uint32_t size, uint64_t address) {
    uint32_t i = (uint32_t)((address >> 2) * 0x9E3779B97F4A7C15u >> 40) & (size - 1);
    while (flags[i].address && flags[i].address != address)
        i = (i + 1) & (size - 1);
    return &flags[i];
}

static flag_t *flag_at(race_t *r, uint64_t address, bool make) {
    if (!r->flags_used && !make)
        return NULL;
    if (address - r->block->base < r->shared_bytes) /* other blocks have other shared memory there */
        address = (uint64_t)1 << 63 | r->block->index << 20 | (address - r->block->base);
    flag_t *f = slot(r->flags, r->flags_size, address);
    if (f->address || !make)
        return f->address ? f : NULL;
    if (2 * ++r->flags_used > r->flags_size) {
        flag_t *old = r->flags;
        uint32_t size = r->flags_size;
        r->flags_size *= 2;
        r->flags = need(calloc(r->flags_size, sizeof *r->flags));
        for (uint32_t i = 0; i < size; i++)
            if (old[i].address)
                *slot(r->flags, r->flags_size, old[i].address) = old[i];
        free(old);
        f = slot(r->flags, r->flags_size, address);
    }
    f->address = address;
    return f;
}

static void put(race_t *r, node_t **to, node_t *node) {
    drop(*to, r->level);
    *to = node;
}

/* A fence: what strong reads found before it is known after it, and what is before it is released by strong writes. */
void cudatool_race_fence(race_t *r, uint32_t wide, uint32_t t) {
    thread_t *thread = &r->block->of[t];
    for (uint32_t i = 0; i <= wide; i++) {
        learn(r, t, thread->gained[i]);
        put(r, &thread->gained[i], NULL);
    }
    snapshot_t s = snapshot(r, t);
    for (uint32_t i = 0; i <= wide; i++) {
        drop(thread->fenced[i].root, r->level);
        thread->fenced[i] = s;
        if (i)
            hold(s.root);
    }
    r->block->touched = r->block->halves = true;
}

/* A strong access was made: what it reads and releases. `flags` are instrument.Flag; `wrote` is 0 if a swap failed. */
void cudatool_race_strong(race_t *r, uint64_t address, uint32_t flags, uint32_t wrote, uint32_t t) {
    block_t *b = r->block;
    thread_t *thread = &b->of[t];
    uint32_t self = (uint32_t)b->index;
    bool wide = flags & WIDE, updates = (flags & (READ | WRITE)) == (READ | WRITE);
    flag_t *f = flag_at(r, address, false);
    if ((flags & (READ | BLIND)) == READ && f && f->written) {
        node_t *near = f->block == self ? f->narrow : NULL, *far = wide ? f->wide : NULL;
        if (flags & ACQUIRE) {
            learn(r, t, near);
            learn(r, t, far);
        } else {
            if (near)
                gain(r, &thread->gained[0], near);
            if (far)
                gain(r, &thread->gained[1], far);
            b->halves |= near || far;
        }
        if (f->block != self && (f->wide ? !wide : f->narrow != NULL)) {
            thread->narrow = true;
            b->touched = true;
        }
    }
    if (!(flags & WRITE) || !wrote)
        return;
    node_t *near = NULL, *far = NULL;
    if (flags & RELEASE) {
        snapshot_t s = snapshot(r, t);
        near = whole(r, &s, t);
        far = wide ? hold(near) : NULL;
        drop(s.root, r->level);
    } else {
        if (thread->fenced[0].moment)
            near = whole(r, &thread->fenced[0], t);
        if (wide && thread->fenced[1].moment)
            far = whole(r, &thread->fenced[1], t);
    }
    if (!near && !far && !f)
        return;
    f = flag_at(r, address, true);
    bool mine = f->written && f->block == self;
    /* An update hands on what it read, if both writers' scopes include each other; so does the thread's next write. */
    if (updates || (mine && f->thread == t)) {
        if (mine && near)
            gain(r, &near, f->narrow);
        else if (mine)
            near = hold(f->narrow);
        if (wide && f->wide) {
            if (far)
                gain(r, &far, f->wide);
            else
                far = hold(f->wide);
        }
    }
    put(r, &f->narrow, near);
    put(r, &f->wide, far);
    f->block = self;
    f->thread = t;
    f->written = true;
}

/* ---- asynchronous copies and mbarriers ---- */

void cudatool_race_commit(race_t *r, uint32_t t) {
    thread_t *thread = &r->block->of[t];
    thread->groups[thread->group++ % GROUPS] = ++r->now;
    r->block->touched = true;
}

/* The thread waited for all groups of copies but the last `keep`; for every copy if that is all ones. */
void cudatool_race_wait(race_t *r, uint32_t keep, uint32_t t) {
    thread_t *thread = &r->block->of[t];
    r->copies = r->block->touched = true;
    if (keep == ~0u)
        thread->copied = ++r->now;
    else if (keep < thread->group && keep < GROUPS)
        thread->copied = thread->groups[(thread->group - 1 - keep) % GROUPS];
}

enum { INIT, ARRIVE, ARRIVE_COPIES, UPDATE }; /* races.Barrier */

/* Something was done to an mbarrier, after which its word is what `word` points to. */
void cudatool_race_mbarrier(race_t *r, const uint64_t *word, uint32_t what, uint32_t t) {
    flag_t *f = flag_at(r, (uint64_t)(uintptr_t)word, true);
    uint32_t parity = (uint32_t)(*word >> 63);
    if (what == INIT) {
        put(r, &f->phase, NULL), put(r, &f->done, NULL);
        f->parity = parity;
        return;
    }
    if (what != UPDATE) {
        node_t *node = NULL;
        snapshot_t s = snapshot(r, t);
        node = whole(r, &s, t);
        drop(s.root, r->level);
        if (what != ARRIVE)
            node = raise(node, r->level, -1, key_of(r->block->index, true, t), ++r->now);
        gain(r, &f->phase, node);
        drop(node, r->level);
    }
    if (parity != f->parity) {
        put(r, &f->done, f->phase);
        f->phase = NULL;
        f->parity = parity;
    }
}

/* A thread saw that a phase of an mbarrier is complete. */
void cudatool_race_passed(race_t *r, const uint64_t *word, uint32_t passed, uint32_t t) {
    flag_t *f = passed ? flag_at(r, (uint64_t)(uintptr_t)word, false) : NULL;
    if (f)
        learn(r, t, f->done);
}

/* ---- accesses ---- */

/* Returns the lanes of `e` whose access is not known to thread `t` to have been before. */
static uint32_t unordered(const race_t *r, const record_t *e, uint32_t t) {
    const block_t *b = r->block;
    const node_t *root = b->of[t].root;
    uint32_t lanes = e->lanes, warp = WARP(e->key);
    bool copy = FLAGS(e->key) & ASYNC;
    if (e->block == (uint32_t)b->index) {
        if (!copy) {
            if (e->moment < b->moment || (warp == t >> 5 && e->moment < b->warps[warp]))
                return 0;
            if (warp == t >> 5)
                lanes &= ~(1u << (t & 31));
        } else if (warp == t >> 5 && e->moment < b->of[t].copied)
            lanes &= ~(1u << (t & 31));
    }
    if (!root)
        return lanes;
    for (uint32_t left = lanes; left; left &= left - 1) {
        uint32_t lane = (uint32_t)__builtin_ctz(left);
        if (e->moment < known(root, r->level, key_of(e->block, copy, 32 * warp + lane)))
            lanes &= ~(1u << lane);
    }
    return lanes;
}

/* Whether two strong accesses are morally strong: each one's scope includes the other's thread. */
static bool morally_strong(uint32_t a, uint32_t b, bool same_block) {
    return a & b & STRONG && (same_block || a & b & WIDE);
}

static uint32_t reason_of(const race_t *r, const record_t *e, uint32_t flags, uint32_t t) {
    const block_t *b = r->block;
    const thread_t *thread = &b->of[t];
    bool same = e->block == (uint32_t)b->index;
    if (FLAGS(e->key) & ASYNC)
        return NOT_WAITED;
    if (FLAGS(e->key) & flags & STRONG)
        return NARROW_ATOMIC;
    if (thread->narrow && !same)
        return NARROW_FENCE;
    uint64_t key = key_of(e->block, false, 32 * WARP(e->key) + (uint32_t)__builtin_ctz(e->lanes));
    for (int i = 0; i < 2; i++)
        if (e->moment < known(thread->gained[i], r->level, key))
            return NO_FENCE;
    if (!same)
        return NO_ORDER;
    return WARP(e->key) == t >> 5 ? NO_WARP_SYNC : NO_BARRIER;
}

static void report(race_t *r, const record_t *e, uint32_t lanes, uint64_t address, uint32_t size, uint32_t flags,
                   uint32_t line, uint32_t space, uint32_t t, bool *counted) {
    bool was_write = FLAGS(e->key) & WRITE, is_write = flags & WRITE;
    uint32_t kind = !is_write ? READ_AFTER_WRITE : was_write ? WRITE_AFTER_WRITE : WRITE_AFTER_READ;
    uint32_t *site = &r->sites[(line < r->lines ? line : 0) * KINDS + kind];
    if (*site) {
        if (!counted[kind])
            r->found[*site - 1].count++;
        counted[kind] = true;
        return;
    }
    counted[kind] = true;
    if (r->found_used == r->found_size) {
        r->found_size = r->found_size ? 2 * r->found_size : 16;
        r->found = need(realloc(r->found, r->found_size * sizeof *r->found));
    }
    record_t one = *e;
    one.lanes = lanes;
    r->found[r->found_used] = (found_t){
        .address = address, .block = r->block->index, .other_block = e->block, .kind = kind, .line = line,
        .other_line = e->line, .size = size, .mode = flags & 31, .other_mode = FLAGS(e->key), .space = space,
        .thread = t, .other_thread = 32 * WARP(e->key) + (uint32_t)__builtin_ctz(lanes),
        .reason = reason_of(r, &one, flags, t), .count = 1,
    };
    *site = ++r->found_used;
}

/* Whether whatever conflicts with `e` later conflicts with an access of these flags too. */
static bool covers(uint32_t flags, uint32_t old, bool same_block) {
    if (flags & STRONG)
        return old & STRONG && same_block && !(old & WRITE && !(flags & WRITE)) && !(flags & WIDE && !(old & WIDE));
    return flags & WRITE || !(old & WRITE);
}

typedef struct {
    uint64_t address;
    uint32_t bytes, flags, line, space, size, t;
    uint32_t start; /* records before this moment are of other launches, or of another block's shared memory */
    bool *counted;
} access_t;

/* Compare with a record; take from it what the new access makes superfluous. */
static void meet(race_t *r, record_t *e, const access_t *a, bool check, bool thin) {
    uint32_t both = BYTES(e->key) & a->bytes, flags = FLAGS(e->key);
    if (!both)
        return;
    bool same = e->block == (uint32_t)r->block->index;
    uint32_t lanes = ~0u;
    if (check && (a->flags | flags) & WRITE && !morally_strong(a->flags, flags, same)) {
        lanes = unordered(r, e, a->t);
        if (lanes)
            report(r, e, lanes, a->address, a->size, a->flags, a->line, a->space, a->t, a->counted);
        /* A race was reported: later accesses are compared with the newer one. */
        if (a->flags & WRITE && covers(a->flags, flags, same))
            lanes = 0;
    } else if (thin && covers(a->flags, flags, same))
        lanes = unordered(r, e, a->t);
    if (thin && !lanes && covers(a->flags, flags, same))
        e->key &= ~both;
}

static uint32_t new_link(race_t *r) {
    uint32_t i = r->links_free;
    if (i) {
        r->links_free = r->links[i].next;
        return i;
    }
    if (r->links_used == r->links_size) {
        r->links_size *= 2;
        r->links = need(realloc(r->links, r->links_size * sizeof *r->links));
    }
    return r->links_used++;
}

static void free_list(race_t *r, uint32_t *list) {
    while (*list) {
        uint32_t i = *list;
        *list = r->links[i].next;
        r->links[i].next = r->links_free;
        r->links_free = i;
    }
}

static void push(race_t *r, uint32_t *list, const record_t *record) {
    uint32_t i = new_link(r);
    r->links[i] = (link_t){*record, *list};
    *list = i;
}

/* Compare with all records of a list; return how many are left. If blocks cannot learn of each other, two of other
 * blocks stand for all. */
static uint32_t meet_all(race_t *r, uint32_t *list, const access_t *a, bool check, bool thin) {
    uint32_t foreign[32] = {0}, first[32] = {0}, left = 0;
    for (uint32_t *at = list; *at;) {
        link_t *link = &r->links[*at];
        meet(r, &link->record, a, check, thin);
        bool gone = !BYTES(link->record.key);
        if (!gone && thin && !r->acquires && link->record.block != (uint32_t)r->block->index &&
            BYTES(link->record.key) == 15) {
            uint32_t kind = FLAGS(link->record.key);
            gone = foreign[kind] == 2 || (foreign[kind] && link->record.block == first[kind]);
            first[kind] = foreign[kind] ? first[kind] : link->record.block;
            foreign[kind] += !gone;
        }
        if (gone) {
            uint32_t i = *at;
            *at = link->next;
            link->next = r->links_free;
            r->links_free = i;
        } else {
            at = &link->next;
            left++;
        }
    }
    return left;
}

/* Of a list that grows by one, look through it as often as it has doubled. */
static void grows(race_t *r, uint16_t *room, uint32_t *list, const access_t *a) {
    if (!*list)
        *room = 16;
    else if (!*room || !--*room) {
        uint32_t left = meet_all(r, list, a, false, true);
        *room = (uint16_t)(left < 16 ? 16 : left < 65535 ? left : 65535);
    }
}

/* Whether a record is of no interest to the thread: of another launch or block's memory, or before its last barrier. */
static inline bool is_past(const block_t *b, const record_t *e, uint32_t start) {
    return e->moment < start || (e->moment < b->moment && e->block == (uint32_t)b->index && !(FLAGS(e->key) & ASYNC));
}

static inline bool is_alike(const record_t *a, const record_t *b) {
    return a->moment == b->moment && a->key == b->key && a->block == b->block && a->line == b->line;
}

/* The usual case of a weak access: nothing that matters was done here since the last barrier, or alike. */
static inline bool touch_quickly(const block_t *b, cell_t *cell, const record_t *own, uint32_t start, bool writes) {
    if (cell->strong_moment >= start || cell->writes || !is_past(b, &cell->write, start))
        return false;
    if (!writes && is_alike(&cell->read, own)) {
        cell->read.lanes |= own->lanes;
        return true;
    }
    if (cell->reads || cell->strongs || !is_past(b, &cell->read, start))
        return false;
    if (writes) {
        if (BYTES(cell->write.key) & ~BYTES(own->key) && cell->write.moment >= start)
            return false;
        cell->write = *own;
        return true;
    }
    if (BYTES(cell->read.key) & ~BYTES(own->key) && cell->read.moment >= start)
        return false;
    cell->read = *own;
    return true;
}

static void enter(race_t *r, record_t *newest, uint32_t *list, const record_t *own) {
    if (BYTES(newest->key)) {
        if (is_alike(newest, own)) {
            newest->lanes |= own->lanes;
            return;
        }
        push(r, list, newest);
    }
    *newest = *own;
}

static void touch(race_t *r, cell_t *cell, const access_t *a, record_t own) {
    /* Lists of other launches are not there any more. */
    bool old = cell->write.moment < r->launch && cell->read.moment < r->launch && cell->strong_moment < r->launch;
    if (old)
        cell->writes = cell->reads = cell->strongs = 0;
    if (cell->write.moment < a->start)
        free_list(r, &cell->writes), cell->write.key = 0;
    if (cell->read.moment < a->start)
        free_list(r, &cell->reads), cell->read.key = 0;
    if (cell->strong_moment < a->start)
        free_list(r, &cell->strongs);
    if (a->flags & STRONG) {
        bool writes = a->flags & WRITE;
        meet(r, &cell->write, a, true, false);
        meet_all(r, &cell->writes, a, true, false);
        if (writes) {
            meet(r, &cell->read, a, true, false);
            meet_all(r, &cell->reads, a, true, false);
        }
        r->narrows |= !(a->flags & WIDE);
        if (r->narrows)
            meet_all(r, &cell->strongs, a, true, false);
        cell->strong_moment = r->now;
        if (cell->strongs && is_alike(&r->links[cell->strongs].record, &own)) {
            r->links[cell->strongs].record.lanes |= own.lanes;
            return;
        }
        grows(r, &cell->strongs_room, &cell->strongs, a);
        push(r, &cell->strongs, &own);
    } else if (a->flags & WRITE) {
        meet_all(r, &cell->strongs, a, true, true);
        meet(r, &cell->read, a, true, true);
        meet_all(r, &cell->reads, a, true, true);
        meet(r, &cell->write, a, true, true);
        meet_all(r, &cell->writes, a, true, true);
        enter(r, &cell->write, &cell->writes, &own);
    } else {
        meet(r, &cell->write, a, true, false);
        if (cell->writes)
            meet_all(r, &cell->writes, a, true, false);
        if (cell->strongs)
            meet_all(r, &cell->strongs, a, true, false);
        if (is_alike(&cell->read, &own)) {
            cell->read.lanes |= own.lanes;
            return;
        }
        meet(r, &cell->read, a, false, true);
        if (BYTES(cell->read.key))
            grows(r, &cell->reads_room, &cell->reads, a);
        enter(r, &cell->read, &cell->reads, &own);
    }
}

/* An access to `size` bytes: at `offset` of device memory (space 0) or of the block's shared memory (1). */
void cudatool_race_access(race_t *r, uint64_t address, uint64_t offset, uint32_t size, uint32_t flags, uint32_t line,
                          uint32_t space, uint32_t t) {
    block_t *b = r->block;
    if (space && offset + size > r->shared_bytes)
        return;
    cell_t *cells = space ? b->shared : r->cells;
    bool counted[KINDS] = {false};
    r->copies |= (flags & ASYNC) != 0;
    access_t a = {.address = space ? offset : address, .size = size, .flags = flags, .line = line, .space = space, .t = t,
                  .start = space ? b->start : r->launch, .counted = counted};
    for (uint64_t first = offset & ~(uint64_t)3; first < offset + size; first += 4) {
        uint64_t from = first > offset ? first : offset;
        uint64_t to = first + 4 < offset + size ? first + 4 : offset + size;
        a.bytes = (uint32_t)(((1u << (to - from)) - 1) << (from & 3));
        record_t own = {r->now, (uint32_t)b->index, KEY(a.bytes, flags, t >> 5), line, 1u << (t & 31)};
        if (flags & STRONG || !touch_quickly(b, &cells[first >> 2], &own, a.start, flags & WRITE))
            touch(r, &cells[first >> 2], &a, own);
    }
}

/* Memory that the heap of the device gives out anew: what was done with it before is over. */
void cudatool_race_clear(race_t *r, uint64_t offset, uint64_t size) {
    if (size)
        memset(&r->cells[offset >> 2], 0, (((offset + size + 3) >> 2) - (offset >> 2)) * sizeof(cell_t));
}
