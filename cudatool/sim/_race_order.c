/* Races inside of kernels: what orders two accesses, by what threads know of each other.
 *
 *     a synchronization:  flush the accesses before it; join what the threads know that take part in it
 *     race_unordered():   is the moment of an access before that which a thread knows of the thread that made it?
 *
 * Barriers of a block and of a warp are a moment each, kept with the block; a tree holds only what goes beyond that. A
 * launch that is checked runs on one host thread, so nothing here is locked.
 */
#include "_races.h"

#define EXITED 0x7FFFFFFFu /* the region of a thread that has ended: context.EXIT */

/* ---- trees ---- */

static uint64_t trees; /* bytes of all nodes */

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
    __atomic_sub_fetch(&trees, sizeof(node_t), __ATOMIC_RELAXED);
}

static size_t node_bytes(int level) {
    return level ? sizeof(node_t) : offsetof(node_t, at) + sizeof(uint32_t[32]);
}

/* A node with what `like` has, whose children become its own. */
static node_t *new_node(const node_t *like, int level) {
    node_t *node = need(malloc(node_bytes(level)));
    __atomic_add_fetch(&trees, sizeof(node_t), __ATOMIC_RELAXED); /* one size, so that drop() needs no other */
    memcpy(node, like, node_bytes(level));
    node->refs = 1;
    return node;
}

static node_t *copy_of(const node_t *old, int level) {
    static const node_t empty;
    node_t *node = new_node(old ? old : &empty, level);
    for (int i = 0; level && i < 32; i++)
        hold(node->child[i]);
    return node;
}

/* The later of each moment in `a` and `b`. Takes `a`, which is changed if there is no other reference to it. If one of
 * them has all that the other has, it is the result: threads that know the same share it. */
static node_t *join(node_t *a, node_t *b, int level) {
    if (!b || a == b)
        return a;
    if (!a)
        return hold(b);
    bool alone = a->refs == 1, is_a = a->base >= b->base, is_b = b->base >= a->base;
    node_t both = {.base = is_a ? a->base : b->base};
    for (int i = 0; i < 32; i++) {
        if (level) {
            both.child[i] = join(alone ? a->child[i] : hold(a->child[i]), b->child[i], level - 1);
            is_a &= both.child[i] == a->child[i];
            is_b &= both.child[i] == b->child[i];
        } else {
            both.at[i] = a->at[i] > b->at[i] ? a->at[i] : b->at[i];
            is_a &= both.at[i] == a->at[i];
            is_b &= both.at[i] == b->at[i];
        }
    }
    node_t *joined = a;
    if (alone) { /* `a` gave its children away */
        both.refs = 1;
        memcpy(a, &both, node_bytes(level));
    } else if (is_a || is_b) {
        for (int i = 0; level && i < 32; i++)
            drop(both.child[i], level - 1);
    } else
        joined = new_node(&both, level);
    if (is_b && (alone || !is_a))
        joined = hold(b);
    if (joined != a)
        drop(a, level);
    return joined;
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

uint64_t race_tree_bytes(void) {
    return __atomic_load_n(&trees, __ATOMIC_RELAXED);
}

static uint64_t key_of(uint64_t block, uint32_t whose, uint32_t thread) {
    return (4 * block + whose) << 10 | thread;
}

void race_forget(race_t *r, block_t *b) {
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
    drop(b->cluster, r->level);
    b->cluster = NULL;
    memset(b->of, 0, b->threads * sizeof *b->of);
    b->touched = b->mixed = b->halves = false;
}

void race_end_flags(race_t *r) {
    for (uint32_t i = 0; i < r->flags_size; i++) {
        flag_t *f = &r->flags[i];
        drop(f->wide, r->level), drop(f->narrow, r->level), drop(f->phase, r->level), drop(f->done, r->level);
        free(f->seen);
    }
    free(r->flags);
}

/* ---- knowledge of threads ---- */

static snapshot_t snapshot(race_t *r, uint32_t t) {
    block_t *b = r->block;
    const uint32_t *copied = b->of[t].copied;
    return (snapshot_t){hold(b->of[t].root), ++r->now, b->moment, b->warps[t >> 5], {copied[0], copied[1]}};
}

/* All that thread `t` knew at a snapshot, as one tree; the snapshot's reference to its root is kept. */
static node_t *whole(race_t *r, const snapshot_t *s, uint32_t t) {
    uint64_t own = key_of(r->block->index, OWN, t);
    node_t *root = raise(hold(s->root), r->level, 1, own, s->block);
    if (s->warp > s->block)
        root = raise(root, r->level, 0, own, s->warp);
    for (uint32_t i = 0; i < 2; i++)
        if (s->copied[i])
            root = raise(root, r->level, -1, key_of(r->block->index, COPY_WRITES + i, t), s->copied[i]);
    return raise(root, r->level, -1, own, s->moment);
}

static void learn(race_t *r, uint32_t t, node_t *more) {
    thread_t *thread = &r->block->of[t];
    if (!more || more == thread->root)
        return;
    thread->root = join(thread->root, more, r->level);
    r->block->touched = r->block->mixed = true;
}

static void gain(race_t *r, node_t **to, node_t *more) {
    *to = join(*to, more, r->level);
    r->block->touched = true;
}

static void know_copies(race_t *r, node_t **root, uint32_t t) {
    const uint32_t *copied = r->block->of[t].copied;
    for (uint32_t i = 0; i < 2; i++)
        if (copied[i])
            *root = raise(*root, r->level, -1, key_of(r->block->index, COPY_WRITES + i, t), copied[i]);
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
        uint64_t key = key_of(b->index, OWN, 32 * w);
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
 * writes after the barrier release what the first did; so does a flag that one read and a fence of another. */
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

/* The barrier of a cluster opens: threads learn what those before their arrivals did that released it. */
static void open_cluster(race_t *r) {
    block_t *b = r->block;
    node_t *before = NULL, *after = NULL; /* threads that knew the same know the same */
    b->at_cluster = false;
    for (uint32_t t = 0; t < b->threads; t++) {
        if (!after || b->of[t].root != before) {
            drop(before, r->level), drop(after, r->level);
            before = hold(b->of[t].root);
            learn(r, t, b->cluster);
            after = hold(b->of[t].root);
        } else {
            drop(b->of[t].root, r->level);
            b->of[t].root = hold(after);
        }
    }
    drop(before, r->level), drop(after, r->level), drop(b->cluster, r->level);
    b->cluster = NULL;
    ++r->now;
}

/* All threads of the block were at a barrier. One that has ended counts as one that was there. */
void cudatool_race_barrier(race_t *r) {
    if (!race_flush(r))
        return;
    block_t *b = r->block;
    if (b->at_cluster) {
        open_cluster(r);
        return;
    }
    if (b->mixed || r->copies) {
        give(r, everyone, together(r, everyone, 0));
        b->mixed = false;
    }
    if (b->halves)
        share_halves(r, everyone), b->halves = false;
    b->moment = ++r->now;
    race_set_places(r);
}

enum { CLUSTER_ARRIVE, CLUSTER_ARRIVE_RELAXED, CLUSTER_WAIT }; /* races.ClusterBarrier */

/* A thread arrived at the cluster's barrier, or begins to wait there. A relaxed arrival releases what a fence did. */
void cudatool_race_cluster(race_t *r, uint32_t what, uint32_t t) {
    if (!race_flush(r))
        return;
    block_t *b = r->block;
    node_t *all = NULL;
    if (what == CLUSTER_WAIT)
        b->at_cluster = true;
    if (what == CLUSTER_ARRIVE) {
        snapshot_t s = snapshot(r, t);
        all = whole(r, &s, t);
        drop(s.root, r->level);
    }
    if (what == CLUSTER_ARRIVE_RELAXED && b->of[t].fenced[0].moment)
        all = whole(r, &b->of[t].fenced[0], t);
    if (all)
        gain(r, &b->cluster, all);
    drop(all, r->level);
}

/* Lanes of a warp synchronized. Those that have ended and that the mask names count as ones that came: `regions` says
 * where the block's threads are, when they do not agree. */
void cudatool_race_warp(race_t *r, uint64_t warp, uint32_t lanes, const uint32_t *regions, const uint32_t *masks) {
    if (!race_flush(r))
        return;
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
    if (!race_flush(r))
        return;
    for (uint32_t lane = 0; lane < 32; lane++)
        if (lanes >> lane & 1) {
            uint32_t t = 32 * (uint32_t)warp + lane;
            snapshot_t s = snapshot(r, t);
            node_t *all = whole(r, &s, t);
            gain(r, &r->block->arrived[numbers[t] & 15], all);
            drop(all, r->level), drop(s.root, r->level);
        }
}

enum { CLOSED, OPEN, OPEN_FOR_ANY }; /* of a barrier; the last: more threads wait than it lets go */

/* A barrier opens for the lanes of each warp in `let`: for all threads of the block if its `count` is 0. If it could have
 * opened for others, no two threads are sure to have met at it. */
void cudatool_race_barriers(race_t *r, const uint32_t *let, uint32_t number, uint32_t state, uint32_t count) {
    if (!race_flush(r))
        return;
    block_t *b = r->block;
    node_t **arrived = &b->arrived[number & 15];
    uint32_t set[32] = {0}, there = 0;
    for (uint32_t w = 0; 32 * w < b->threads; w++) {
        uint32_t all = b->threads - 32 * w >= 32 ? ~0u : (1u << (b->threads & 31)) - 1;
        set[w] = let[w] & all;
        there += (uint32_t)__builtin_popcount(set[w]);
    }
    if (state == OPEN_FOR_ANY) {
        drop(*arrived, r->level);
        *arrived = NULL;
        return;
    }
    if ((!count || there == b->threads) && !*arrived) {
        cudatool_race_barrier(r);
        return;
    }
    uint32_t now = ++r->now;
    node_t *root = together(r, set, now);
    gain(r, &root, *arrived);
    drop(*arrived, r->level);
    *arrived = NULL;
    give(r, set, root);
    b->mixed = true;
    if (b->halves)
        share_halves(r, set);
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
    if (!race_flush(r))
        return;
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
    if (!race_flush(r))
        return;
    block_t *b = r->block;
    thread_t *thread = &b->of[t];
    uint32_t self = (uint32_t)b->index, made = r->now; /* the access has this moment; a snapshot has a later one */
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
    if (f && f->written && (flags & (READ | BLIND)) == READ && (f->block == self || (wide && f->writes_wide))) {
        if (!f->seen)
            f->seen = need(malloc(SEEN * sizeof *f->seen)), r->flags_seen++;
        f->seen[f->seen_count++ % SEEN] = (seen_t){f->chain, ++r->now, self, t};
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
    if (!near && !far && !f && (!r->observes || address - b->base < r->shared_bytes))
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
    if (!updates || !f->written || (f->block != self && !(wide && f->writes_wide)))
        f->chain = made;
    f->writes_wide = wide;
    f->block = self;
    f->thread = t;
    f->written = true;
    r->now++; /* what comes next to the flag is told from this */
}

/* ---- asynchronous copies and mbarriers ---- */

void cudatool_race_commit(race_t *r, uint32_t t) {
    if (!race_flush(r))
        return;
    thread_t *thread = &r->block->of[t];
    thread->groups[thread->group++ % GROUPS] = ++r->now;
    r->block->touched = true;
}

/* The thread waited for all groups of copies but the last `keep`; for every copy if that is all ones. If `reads`, it
 * waited only for what they read. */
void cudatool_race_wait(race_t *r, uint32_t keep, uint32_t reads, uint32_t t) {
    if (!race_flush(r))
        return;
    thread_t *thread = &r->block->of[t];
    uint32_t complete = 0;
    r->copies = r->block->touched = true;
    if (keep == ~0u)
        complete = ++r->now;
    else if (keep < thread->group && keep < GROUPS)
        complete = thread->groups[(thread->group - 1 - keep) % GROUPS];
    for (uint32_t i = reads; i < 2; i++)
        if (complete > thread->copied[i])
            thread->copied[i] = complete;
}

enum { INIT, ARRIVE, ARRIVE_COPIES, UPDATE, ARRIVE_RELAXED }; /* races.Barrier */

/* Something was done to an mbarrier, after which its word is what `word` points to. */
void cudatool_race_mbarrier(race_t *r, const uint64_t *word, uint32_t what, uint32_t t) {
    if (!race_flush(r))
        return;
    flag_t *f = flag_at(r, (uint64_t)(uintptr_t)word, true);
    uint32_t parity = (uint32_t)(*word >> 63);
    if (what == INIT) {
        put(r, &f->phase, NULL), put(r, &f->done, NULL);
        f->parity = parity;
        return;
    }
    if (what != UPDATE) {
        node_t *node = NULL;
        const snapshot_t *fenced = &r->block->of[t].fenced[0];
        if (what == ARRIVE_RELAXED) {
            if (fenced->moment)
                node = whole(r, fenced, t);
        } else {
            snapshot_t s = snapshot(r, t);
            node = whole(r, &s, t);
            drop(s.root, r->level);
        }
        for (uint32_t i = 0; what == ARRIVE_COPIES && i < 2; i++)
            node = raise(node, r->level, -1, key_of(r->block->index, COPY_WRITES + i, t), ++r->now);
        gain(r, &f->phase, node);
        drop(node, r->level);
    }
    if (parity != f->parity) {
        put(r, &f->done, f->phase);
        f->phase = NULL;
        f->parity = parity;
    }
}

/* A thread saw that a phase of an mbarrier is complete. If `relaxed`, it knows what that tells after a fence. */
void cudatool_race_passed(race_t *r, const uint64_t *word, uint32_t passed, uint32_t relaxed, uint32_t t) {
    if (!race_flush(r))
        return;
    flag_t *f = passed ? flag_at(r, (uint64_t)(uintptr_t)word, false) : NULL;
    if (f && relaxed) {
        gain(r, &r->block->of[t].gained[0], f->done);
        r->block->halves = true;
    } else if (f)
        learn(r, t, f->done);
}

/* ---- the order of two accesses ---- */

uint32_t race_unordered(const race_t *r, const record_t *e, uint32_t t) {
    const block_t *b = r->block;
    const node_t *root = b->of[t].root;
    uint32_t lanes = e->lanes, warp = WARP(e->key);
    uint32_t whose = !(FLAGS(e->key) & ASYNC) ? OWN : FLAGS(e->key) & WRITE ? COPY_WRITES : COPY_READS;
    if (e->block == (uint32_t)b->index) {
        if (r->programs)
            return 0;
        if (whose == OWN) {
            if (e->moment < b->moment || (warp == t >> 5 && e->moment < b->warps[warp]))
                return 0;
            if (warp == t >> 5)
                lanes &= ~(1u << (t & 31));
        } else if (warp == t >> 5 && e->moment < b->of[t].copied[whose - COPY_WRITES])
            lanes &= ~(1u << (t & 31));
    }
    if (!root)
        return lanes;
    for (uint32_t left = lanes; left; left &= left - 1) {
        uint32_t lane = (uint32_t)__builtin_ctz(left);
        if (e->moment < known(root, r->level, key_of(e->block, whose, 32 * warp + lane)))
            lanes &= ~(1u << lane);
    }
    return lanes;
}

uint32_t race_reason(const race_t *r, const record_t *e, uint32_t flags, uint32_t t) {
    const block_t *b = r->block;
    const thread_t *thread = &b->of[t];
    bool same = e->block == (uint32_t)b->index;
    if (FLAGS(e->key) & ASYNC)
        return NOT_WAITED;
    if (FLAGS(e->key) & flags & STRONG)
        return NARROW_ATOMIC;
    if (thread->narrow && !same)
        return NARROW_FENCE;
    uint64_t key = key_of(e->block, OWN, 32 * WARP(e->key) + (uint32_t)__builtin_ctz(e->lanes));
    for (int i = 0; i < 2; i++)
        if (e->moment < known(thread->gained[i], r->level, key))
            return NO_FENCE;
    if (!same)
        return NO_ORDER;
    return WARP(e->key) == t >> 5 ? NO_WARP_SYNC : NO_BARRIER;
}

bool race_is_observed(race_t *r, const record_t *e, uint64_t address, uint32_t t) {
    if (!(FLAGS(e->key) & STRONG) || !(FLAGS(e->key) & WRITE))
        return false;
    const flag_t *f = flag_at(r, address, false);
    for (uint32_t i = 0; f && i < SEEN && i < f->seen_count; i++) {
        const seen_t *s = &f->seen[i];
        if (e->moment < s->from || e->moment >= s->until)
            continue;
        if (s->block == (uint32_t)r->block->index && s->thread == t)
            return true;
        record_t read = {.moment = s->until, .block = s->block, .lanes = 1u << (s->thread & 31),
                         .key = KEY(0, READ, s->thread >> 5)};
        if (!race_unordered(r, &read, t))
            return true;
    }
    return false;
}
