/* Races inside of kernels: the history of memory, and the races that it shows. Instrumented code calls what is here and in
 * _race_order.c; a launch that is checked runs on one host thread, so nothing here is locked.
 *
 *     an access:   it continues a run of alike ones, which waits; else it is looked at
 *     look at it:  two words say all of the four bytes' history, and the access fits in: no race
 *                  else the history becomes a cell of records: compare with each, drop those that it stands for
 */
#include "_races.h"

/* ---- the history of four bytes of memory ---- */

/* Most memory needs no more than two words for four bytes: each is one access, or the newest of alike ones.
 *
 *     moment (28 bits), mode (4), line (16), thread (10), PAIR, FAR, SECOND
 *
 * A word of an earlier moment than the launch, or than the block whose shared memory it is of, is empty. The second word
 * counts if the first has SECOND. Of mode FULL, the cell has the history, of which the word has the newest moment.
 *
 * What is left out differs in no verdict about a byte: accesses of one thread at one moment are ordered alike, so that a
 * read after its write adds nothing. In kernels whose threads only barriers of the whole block order (`plain`), two
 * threads that read at one moment stand for all that do, as any other thread that writes races with one of them; two of
 * different blocks (FAR) stand for all blocks. So it is with atomic updates of device scope.
 */
enum { FULL, M_READ, M_WRITE, M_ATOMIC, HALVES = 4, SINGLES = 8 }; /* of HALVES and SINGLES, thread + byte / size */
#define SECOND 1u
#define FAR 2u  /* the two are alike and of different blocks */
#define PAIR 4u /* the two are alike, of one moment and of different threads */
#define LAST ((1u << 28) - 1)
#define MOMENT(word) ((uint32_t)((word) >> 36))
#define MODE(word) ((uint32_t)((word) >> 32) & 15)
#define LINE(word) ((uint32_t)((word) >> 16) & 0xFFFF)
#define THREAD(word) ((uint32_t)((word) >> 6) & 1023)
#define WORD(moment, mode, line, thread) \
    ((uint64_t)(moment) << 36 | (uint64_t)(mode) << 32 | (uint64_t)(line) << 16 | (uint64_t)(thread) << 6)
#define KIND(mode) ((mode) & 3)

#define ALL (~(uint64_t)0)

/* ---- launches and blocks ---- */

race_t *cudatool_race_begin(uint32_t now, uint64_t blocks, uint32_t threads, uint32_t width, uint64_t shared_bytes,
                            uint32_t lines, int acquires, int plain, int programs, int observes, uint64_t base,
                            void *cells, uint64_t *words, uint64_t *seconds, uint8_t *reads_of, uint32_t stamp, uint64_t limit) {
    race_t *r = need(calloc(1, sizeof *r));
    r->runs = need(calloc(RUNS + 1, sizeof *r->runs));
    for (int i = 0; i <= RUNS; i++)
        r->runs[i].expected = ~(uint64_t)0;
    r->runs_first = RUNS;
    r->plain = r->hit = plain;
    r->programs = programs;
    r->observes = observes;
    r->limit = limit;
    r->base = base;
    r->words = words;
    r->seconds = seconds;
    r->now = r->launch = now;
    r->threads = threads;
    r->width = width;
    r->shared_bytes = shared_bytes;
    r->lines = lines;
    r->acquires = acquires;
    r->cells = cells;
    r->reads_of = reads_of;
    r->stamp = stamp * ((uint64_t)-1 / 255);
    r->level = 2;
    while (r->level < 12 && 4 * blocks > (uint64_t)1 << 5 * (r->level - 1))
        r->level++;
    r->links_size = 1024;
    r->links = need(malloc(r->links_size * sizeof *r->links));
    r->links_used = 1;
    r->flags_size = 256;
    r->flags = need(calloc(r->flags_size, sizeof *r->flags));
    r->sites = need(calloc((size_t)lines * KINDS, sizeof *r->sites));
    r->guesses = need(calloc(lines, sizeof *r->guesses));
    return r;
}

/* Whether accesses are still looked at: the history has room. */
static bool has_room(race_t *r) {
    uint64_t used = r->links_size * sizeof(link_t) + r->flags_size * sizeof(flag_t) + r->entries_size * sizeof(entry_t);
    used += r->reads_size * sizeof(cached_t) + r->flags_seen * SEEN * sizeof(seen_t);
    if (used + race_tree_bytes() > r->limit)
        r->ended = true;
    return !r->ended;
}

static void find_stale_reads(race_t *r);

static void free_block(race_t *r, block_t *b) {
    race_forget(r, b);
    free(b->of);
    free(b->shared), free(b->words), free(b->seconds);
    free(b);
}

/* Returns the moment at which the next launch may begin. */
uint32_t cudatool_race_end(race_t *r) {
    uint32_t now = r->now + 1;
    free(r->runs), free(r->entries), free(r->reads);
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
    race_end_flags(r);
    free(r->links), free(r->sites), free(r->guesses), free(r->found), free(r);
    return now;
}

uint32_t cudatool_race_found(race_t *r, found_t **found, uint32_t *ended) {
    if (race_flush(r))
        find_stale_reads(r);
    *ended = r->ended;
    *found = r->found;
    return r->found_used;
}

static void new_entry(race_t *r, uint32_t block) {
    if (r->entries_used && !r->stamped)
        r->entries_used--;
    if (r->entries_used == r->entries_size) {
        r->entries_size = r->entries_size ? 2 * r->entries_size : 256;
        r->entries = need(realloc(r->entries, r->entries_size * sizeof *r->entries));
    }
    r->entries[r->entries_used++] = (entry_t){r->now, block};
    r->stamped = false;
}

/* A block begins, or goes on after it waited for others. */
void cudatool_race_enter(race_t *r, uint64_t index, uint64_t base, uint32_t fresh) {
    race_flush(r);
    r->now++;
    new_entry(r, (uint32_t)index);
    block_t **bucket = &r->live[index & 1023];
    for (block_t *b = fresh ? NULL : *bucket; b; b = b->next)
        if (b->index == index) {
            r->block = b;
            b->entered = r->now;
            race_set_places(r);
            return;
        }
    block_t *b = r->spare;
    if (b)
        r->spare = b->next;
    else {
        b = need(calloc(1, sizeof *b));
        b->of = need(calloc(r->threads, sizeof *b->of));
        b->shared = need(calloc(r->shared_bytes / 4 + 2, sizeof *b->shared));
        b->words = need(calloc(r->shared_bytes / 4 + 2, sizeof *b->words));
        b->seconds = need(calloc(r->shared_bytes / 4 + 2, sizeof *b->seconds));
        b->threads = r->threads;
    }
    b->index = index;
    b->base = base;
    b->start = b->moment = b->entered = r->now;
    memset(b->warps, 0, sizeof b->warps);
    b->next = *bucket;
    *bucket = r->block = b;
    race_set_places(r);
}

void cudatool_race_leave(race_t *r) {
    race_flush(r);
    block_t *b = r->block;
    for (block_t **at = &r->live[b->index & 1023]; *at; at = &(*at)->next)
        if (*at == b) {
            *at = b->next;
            break;
        }
    race_forget(r, b);
    b->next = r->spare;
    r->spare = b;
    r->block = NULL;
}

/* ---- accesses ---- */

/* Whether two strong accesses are morally strong: each one's scope includes the other's thread. */
static bool morally_strong(uint32_t a, uint32_t b, bool same_block) {
    return a & b & STRONG && (same_block || a & b & WIDE);
}

/* The record of a kind at a line, with room made for it if there is none: then its count is 0. */
static found_t *found_at(race_t *r, uint32_t line, uint32_t kind) {
    uint32_t *site = &r->sites[(line < r->lines ? line : 0) * KINDS + kind];
    if (*site)
        return &r->found[*site - 1];
    if (r->found_used == r->found_size) {
        r->found_size = r->found_size ? 2 * r->found_size : 16;
        r->found = need(realloc(r->found, r->found_size * sizeof *r->found));
    }
    *site = ++r->found_used;
    r->found[*site - 1] = (found_t){.kind = kind, .line = line};
    return &r->found[*site - 1];
}

static void report(race_t *r, const record_t *e, uint32_t lanes, uint64_t address, uint32_t size, uint32_t flags,
                   uint32_t line, uint32_t space, uint32_t t, bool *counted) {
    bool was_write = FLAGS(e->key) & WRITE, is_write = flags & WRITE;
    uint32_t kind = !is_write ? READ_AFTER_WRITE : was_write ? WRITE_AFTER_WRITE : WRITE_AFTER_READ;
    found_t *found = found_at(r, line, kind);
    if (found->count) {
        if (!counted[kind])
            found->count++;
        counted[kind] = true;
        return;
    }
    counted[kind] = true;
    record_t one = *e;
    one.lanes = lanes;
    *found = (found_t){
        .address = address, .block = r->block->index, .other_block = e->block, .kind = kind, .line = line,
        .other_line = e->line, .size = size, .mode = flags & 31, .other_mode = FLAGS(e->key), .space = space,
        .thread = t, .other_thread = 32 * WARP(e->key) + (uint32_t)__builtin_ctz(lanes),
        .reason = race_reason(r, &one, flags, t), .count = 1,
    };
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
    /* What strong writes meet as a guess of its line alone: weak ones meet it as a race, too. */
    thin &= !IS_GUESS(e->key) || !(a->flags & STRONG) || (a->flags & GUESS && a->line == e->line);
    bool same = e->block == (uint32_t)r->block->index;
    uint32_t lanes = ~0u;
    if (check && (a->flags | flags) & WRITE && !morally_strong(a->flags, flags, same)) {
        lanes = race_unordered(r, e, a->t);
        if (lanes && !a->space && race_is_observed(r, e, a->address, a->t))
            lanes = 0;
        if (lanes)
            report(r, e, lanes, a->address, a->size, a->flags, a->line, a->space, a->t, a->counted);
        /* A race was reported: later accesses are compared with the newer one. */
        if (a->flags & WRITE && covers(a->flags, flags, same))
            lanes = 0;
    } else if (thin && covers(a->flags, flags, same))
        lanes = race_unordered(r, e, a->t);
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
        has_room(r);
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
    uint32_t foreign[64] = {0}, first[64] = {0}, left = 0;
    for (uint32_t *at = list; *at;) {
        link_t *link = &r->links[*at];
        meet(r, &link->record, a, check, thin);
        bool gone = !BYTES(link->record.key);
        if (!gone && thin && !r->acquires && link->record.block != (uint32_t)r->block->index &&
            BYTES(link->record.key) == 15) {
            uint32_t kind = FLAGS(link->record.key) | IS_GUESS(link->record.key) << 5;
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

static inline bool is_alike(const record_t *a, const record_t *b) {
    return a->moment == b->moment && a->key == b->key && a->block == b->block && a->line == b->line;
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

/* Volatile accesses do not race, with each other or with atomic updates: which value is read is open. Kernels for warps
 * whose lanes run in step rely on one. Find a pair of them, of two lanes of a warp, in shared memory: a write, and a read
 * that nothing orders. The launch's first one is enough. Two atomic updates are meant to come in any order. */
static void find_in_step(race_t *r, const cell_t *cell, const access_t *a) {
    r->volatiles |= a->flags & VOLATILE;
    if (!r->volatiles)
        return;
    for (uint32_t i = cell->strongs; i; i = r->links[i].next) {
        record_t e = r->links[i].record;
        uint32_t either = FLAGS(e.key) | a->flags;
        bool is_volatile = IS_VOLATILE(e.key) || a->flags & VOLATILE, guesses = IS_GUESS(e.key) || a->flags & GUESS;
        if (!is_volatile || guesses || !(either & READ) || !(either & WRITE) || !(BYTES(e.key) & a->bytes) ||
            WARP(e.key) != a->t >> 5)
            continue;
        if ((e.lanes = race_unordered(r, &e, a->t))) {
            r->in_step = true;
            *found_at(r, a->line, IN_STEP) = (found_t){
                .address = a->address, .block = r->block->index, .other_block = e.block, .kind = IN_STEP, .line = a->line,
                .other_line = e.line, .size = a->size, .mode = a->flags & 31, .other_mode = FLAGS(e.key), .space = a->space,
                .thread = a->t, .other_thread = 32 * WARP(e.key) + (uint32_t)__builtin_ctz(e.lanes),
                .reason = NO_WARP_SYNC, .count = 1,
            };
            return;
        }
    }
}

enum { MADE = 1, MET };

/* A plain read whose value an atomicCAS compares before anything depends on it (cudatool.ptx.guesses) is kept as a strong
 * one: it races with weak writes alone. By the model it races with strong ones, too, and that is found here: of each
 * line, the first such pair. */
static void find_guess(race_t *r, const cell_t *cell, const access_t *a) {
    uint8_t *own = &r->guesses[a->line < r->lines ? a->line : 0];
    if (a->flags & GUESS && !*own)
        *own = MADE, r->unmet++;
    if (!r->unmet || (a->flags & GUESS ? *own == MET : !(a->flags & WRITE)))
        return;
    for (uint32_t i = cell->strongs; i; i = r->links[i].next) {
        record_t e = r->links[i].record;
        bool is_first = IS_GUESS(e.key), is_pair = is_first ? a->flags & WRITE : a->flags & GUESS && FLAGS(e.key) & WRITE;
        uint8_t *met = is_first ? &r->guesses[e.line < r->lines ? e.line : 0] : own;
        if (!is_pair || *met == MET || !(BYTES(e.key) & a->bytes) || !(e.lanes = race_unordered(r, &e, a->t)))
            continue;
        if (!morally_strong(a->flags, FLAGS(e.key), e.block == (uint32_t)r->block->index))
            continue; /* it is a race like others */
        *met = MET, r->unmet--;
        found_t *found = found_at(r, is_first ? e.line : a->line, CAS_GUESS);
        *found = (found_t){
            .address = a->address, .block = r->block->index, .other_block = e.block, .kind = CAS_GUESS, .line = a->line,
            .other_line = e.line, .size = a->size, .mode = a->flags & 31, .other_mode = FLAGS(e.key), .space = a->space,
            .thread = a->t, .other_thread = 32 * WARP(e.key) + (uint32_t)__builtin_ctz(e.lanes), .reason = NO_ORDER,
            .count = 1,
        };
    }
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
        if (a->space && !r->in_step)
            find_in_step(r, cell, a);
        if (r->unmet || a->flags & GUESS)
            find_guess(r, cell, a);
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

/* ---- words ---- */

static uint32_t block_of(const race_t *r, uint32_t moment) {
    uint32_t low = 0, high = r->entries_used;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (r->entries[middle].moment <= moment)
            low = middle;
        else
            high = middle;
    }
    return r->entries[low].block;
}

/* Add to an empty cell's history what a word says. */
static void expand_one(race_t *r, cell_t *cell, uint64_t word) {
    static const uint32_t flags_of[4] = {0, READ, WRITE, READ | WRITE | STRONG | WIDE};
    uint32_t mode = MODE(word), flags = flags_of[KIND(mode)], size = mode & HALVES ? 2 : mode & SINGLES ? 1 : 4;
    for (uint32_t byte = 0; byte < 4; byte += size) {
        uint32_t t = THREAD(word) + byte / size, bytes = ((1u << size) - 1) << byte;
        record_t one = {MOMENT(word), block_of(r, MOMENT(word)), KEY(bytes, flags, t >> 5), LINE(word), 1u << (t & 31)};
        if (flags & STRONG) {
            push(r, &cell->strongs, &one);
            cell->strong_moment = one.moment;
            cell->strongs_room = 16;
        } else if (flags & WRITE)
            enter(r, &cell->write, &cell->writes, &one);
        else
            enter(r, &cell->read, &cell->reads, &one);
    }
}

void race_set_places(race_t *r) {
    block_t *b = r->block;
    r->shared_words = b->words;
    for (int shared = 0; shared < 2; shared++) {
        uint32_t start = shared ? b->start : r->launch;
        r->places[shared] =
            (place_t){shared ? b->words : r->words, shared ? b->seconds : r->seconds, shared ? b->shared : r->cells,
                      start < LAST ? start : LAST, b->entered, b->moment, shared};
    }
}

static uint32_t moment_now(const race_t *r) {
    return r->now < LAST ? r->now : LAST;
}

/* What is known of this launch's reads of a byte of device memory. */
static uint32_t state_of(const race_t *r, uint64_t at) {
    uint32_t state = r->reads_of[at] ^ (uint8_t)r->stamp;
    return state < 4 ? state : 0;
}

static void add_state(race_t *r, uint64_t at, uint32_t state) {
    r->reads_of[at] = (uint8_t)((uint8_t)r->stamp | state_of(r, at) | state);
}

/* Make the cell at `i` hold the history. */
static cell_t *full(race_t *r, const place_t *p, uint64_t i) {
    cell_t *cell = &p->cells[i];
    uint64_t word = p->words[i];
    if (MODE(word) != FULL || MOMENT(word) < r->launch) {
        memset(cell, 0, sizeof *cell);
        if (MOMENT(word) >= p->start) {
            expand_one(r, cell, word);
            if (word & SECOND)
                expand_one(r, cell, p->seconds[i]);
        }
    }
    p->words[i] = WORD(moment_now(r), FULL, 0, 0);
    for (uint64_t at = 4 * i; !p->shared && at < 4 * i + 4; at++)
        if (state_of(r, at) & SETTLED)
            r->reads_of[at] ^= SETTLED;
    return cell;
}

/* An access of `word` to all of the four bytes at `i`. Returns whether two words are enough for it: then there is no race. */
static inline bool note(const race_t *r, const place_t *p, uint64_t i, uint64_t word) {
    uint64_t old = p->words[i];
    uint32_t moment = MOMENT(old), mode = MODE(word), old_mode = MODE(old), kind = KIND(mode);
    if (old_mode == FULL && moment >= r->launch)
        return false;
    if (moment < p->start) {
        p->words[i] = word;
        return true;
    }
    bool mine = moment >= p->entered, past = mine && moment < p->past;
    bool own = mine && THREAD(old) == THREAD(word) && mode >> 2 == old_mode >> 2;
    bool alike = old_mode == mode && kind != M_WRITE;
    if (moment == MOMENT(word) && ((alike && (own || old & PAIR)) || (own && kind == M_READ && old_mode == mode + 1)))
        return true;
    if (!(old & SECOND)) {
        if ((past && (p->shared || kind == M_WRITE || kind == KIND(old_mode))) || (own && (alike || kind == M_WRITE))) {
            p->words[i] = word;
            return true;
        }
        bool meets = kind != KIND(old_mode) || kind == M_WRITE;
        if (meets && !past && !own)
            return false;
        if (r->plain && alike)
            old |= !mine ? FAR : moment == MOMENT(word) ? PAIR : 0;
        p->seconds[i] = word;
        p->words[i] = old | SECOND;
        return true;
    }
    if (old & FAR && alike)
        return true;
    uint64_t second = p->seconds[i];
    bool second_alike = MODE(second) == mode && kind != M_WRITE;
    if (second_alike && MOMENT(second) == MOMENT(word) && THREAD(second) == THREAD(word))
        return true;
    if (old & PAIR && alike && !mine) { /* of two of one block, one stands for its block */
        p->seconds[i] = word;
        p->words[i] = (old & ~(uint64_t)PAIR) | FAR;
        return true;
    }
    if (MOMENT(second) < p->entered || MOMENT(second) >= p->past)
        return false;
    if (past && (p->shared || kind == M_WRITE || (kind == KIND(old_mode) && kind == KIND(MODE(second))))) {
        p->words[i] = word;
        return true;
    }
    if (second_alike && mode == M_READ && (past || old_mode == M_READ)) {
        p->seconds[i] = word;
        p->words[i] = old & ~(uint64_t)(FAR | PAIR);
        return true;
    }
    return false;
}

/* An access to `bytes` of the four at `i`, with the whole history. */
static void look(race_t *r, const place_t *p, uint64_t i, const access_t *a, uint64_t word) {
    uint64_t old = p->words[i];
    if (p->shared && MODE(old) == FULL && MOMENT(old) >= r->launch && r->now < LAST &&
        MOMENT(old) < (r->copies ? p->start : p->past)) {
        /* Of another block, or before the last barrier. */
        cell_t *cell = &p->cells[i];
        free_list(r, &cell->writes), free_list(r, &cell->reads), free_list(r, &cell->strongs);
        p->words[i] = 0;
        if (word && note(r, p, i, word))
            return;
    }
    record_t own = {r->now, (uint32_t)r->block->index, KEY(a->bytes, a->flags, a->t >> 5), a->line, 1u << (a->t & 31)};
    touch(r, full(r, p, i), a, own);
}

/* The word of an access to whole words; 0 if words do not say what it is. */
static uint64_t word_of(const race_t *r, uint32_t flags, uint32_t line, uint32_t t) {
    uint32_t mode = flags & 31;
    mode = mode == (READ | WRITE | STRONG | WIDE) ? M_ATOMIC : mode <= WRITE ? mode : 0;
    return mode && line < 1u << 16 && r->now < LAST ? WORD(r->now, mode, line, t) : 0;
}

/* An access of one thread, to `size` bytes at `offset`. */
static void access_one(race_t *r, const place_t *p, uint64_t offset, uint32_t size, uint32_t flags, uint32_t line,
                       uint32_t t) {
    if (p->shared && offset + size > r->shared_bytes)
        return;
    bool counted[KINDS] = {false};
    uint64_t word = word_of(r, flags, line, t);
    access_t a = {.address = p->shared ? offset : r->base + offset, .size = size, .flags = flags, .line = line,
                  .space = p->shared, .t = t, .start = p->shared ? r->block->start : r->launch, .counted = counted};
    for (uint64_t first = offset & ~(uint64_t)3; first < offset + size; first += 4) {
        uint64_t from = first > offset ? first : offset;
        uint64_t to = first + 4 < offset + size ? first + 4 : offset + size;
        a.bytes = (uint32_t)(((1u << (to - from)) - 1) << (from & 3));
        uint64_t whole_word = a.bytes == 15 ? word : 0;
        if (!whole_word || !note(r, p, first >> 2, word))
            look(r, p, first >> 2, &a, whole_word);
    }
}

/* An access to `size` bytes: at `offset` of device memory (space 0) or of the block's shared memory (1). */
void cudatool_race_access(race_t *r, uint64_t offset, uint32_t size, uint32_t flags, uint32_t line, uint32_t space,
                          uint32_t t) {
    if (r->ended)
        return;
    if (flags & ASYNC) {
        race_flush(r);
        r->copies = true;
    }
    r->stamped = true;
    access_one(r, &r->places[space], offset, size, flags, line, t);
}

/* ---- runs ---- */

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define VECTORS
#endif

#define SURVEYED 128 /* words at once */

enum { NOTE, SKIP, STORE, JOIN, JOIN_FAR };

/* Return how many of `n` words there are before the first for which `bad` is not 0: all of them at best, which a loop
 * finds that compilers make vectors of. */
#define LEADING(bad)                    \
    do {                                \
        uint64_t any = 0, old;          \
        for (uint32_t k = 0; k < n; k++) \
            old = words[k], any |= (bad); \
        if (!any)                       \
            return n;                   \
        for (uint32_t k = 0;; k++)      \
            if (old = words[k], (bad))  \
                return k;               \
    } while (0)

#define UNLESS(good) ((good) ? 0 : ~(uint64_t)0)
#define THREAD_OF(k) (((uint64_t)(k + skip) >> shift) << 6) /* to add to the word of the first thread */

/* What note() would do for the first of `n` words, and for how many of them it would do that: nothing, put the access in
 * the word's place, or add it as a second one of the same moment or of another block. The words begin `skip` words after
 * those of the thread of `word`; each thread has 1 << `shift`. NOTE if it is something else. */
VECTORS static uint32_t survey(const place_t *p, uint64_t i, uint64_t word, uint32_t n, uint32_t skip, uint32_t shift,
                               uint32_t launch, bool plain, int *how) {
    const uint64_t mode = WORD(0, 15, 0, 0), thread = WORD(0, 0, 0, 1023), moment = WORD(LAST, 0, 0, 0);
    uint64_t start = WORD(p->start, 0, 0, 0), entered = WORD(p->entered, 0, 0, 0), past = WORD(p->past, 0, 0, 0);
    const uint64_t *words = p->words + i, *seconds = p->seconds + i;
    uint64_t first = words[0], kind = KIND(MODE(word)), writes = kind == M_WRITE;
    *how = STORE;
    if (first < start) {
        /* Full cells of other blocks' shared memory have lists to free. */
        uint64_t limit = p->shared ? WORD(launch, 0, 0, 0) : start;
        LEADING(UNLESS((old < limit) | ((old < start) & ((old & mode) != 0))));
    }
    *how = NOTE;
    if (!(first & mode))
        return 0;
    if (first >= entered && first < past) {
        uint64_t same = p->shared || writes ? 0 : mode;
        *how = STORE;
        if (first & SECOND && !same)
            LEADING(UNLESS((old >= entered) & (old < past) & ((old & mode) != 0)) |
                    UNLESS((!(old & SECOND)) | ((seconds[k] >= entered) & (seconds[k] < past))));
        LEADING(((old ^ word) & same) | (old & SECOND) |
                UNLESS((old >= entered) & (old < past) & ((old & mode) != 0)));
    }
    uint64_t own = word + ((uint64_t)(skip >> shift) << 6);
    if (first >= entered && !((first ^ own) & thread)) {
        /* Each thread was at its words before: it updates them in place, or reads again. */
        uint64_t before = mode & (writes ? WORD(0, HALVES | SINGLES, 0, 0) : mode);
        uint64_t like = word ^ (kind == M_READ && MODE(first) == MODE(word) + 1 ? WORD(0, M_READ ^ M_WRITE, 0, 0) : 0);
        bool now = !((first ^ word) & moment) && !writes;
        *how = now ? SKIP : STORE;
        if (!now && !writes)
            return *how = NOTE, 0;
        uint64_t alike = now ? before | moment | thread : before | thread, alone = now ? 0 : SECOND;
        LEADING(((old ^ (like + THREAD_OF(k))) & alike) | (old & alone) |
                UNLESS((old >= entered) & ((old & mode) != 0)));
    }
    if (!plain || writes || (first ^ word) & mode)
        return 0;
    bool here = !((first ^ word) & moment);
    if (first & FAR) {
        *how = SKIP;
        LEADING(((old ^ word) & mode) | (~old & FAR) | UNLESS(old >= start));
    }
    if (first & PAIR && here) {
        *how = SKIP;
        LEADING(((old ^ word) & (mode | moment)) | (~old & PAIR));
    }
    if (!here && first >= entered)
        return 0;
    if (here) {
        *how = JOIN;
        LEADING((old & SECOND) | ((old ^ word) & (mode | moment)) |
                UNLESS((old ^ (word + THREAD_OF(k))) & thread));
    }
    *how = JOIN_FAR; /* of two of another block, one stands for its block */
    LEADING(((old ^ word) & mode) | (old & FAR) |
            UNLESS(((old & (SECOND | PAIR)) != SECOND) & (old >= start) & (old < entered)));
}

VECTORS static void write_words(const place_t *p, uint64_t i, uint64_t word, uint32_t n, uint32_t skip, uint32_t shift,
                                int how) {
    uint64_t *restrict words = p->words + i, *restrict seconds = p->seconds + i;
    uint64_t joined = SECOND | (how == JOIN ? PAIR : FAR);
    if (how != STORE) {
        for (uint32_t k = 0; k < n; k++)
            words[k] = (words[k] & ~(uint64_t)PAIR) | joined;
        words = seconds;
    }
    if (!shift)
        for (uint32_t k = 0; k < n; k++)
            words[k] = word + ((uint64_t)(k + skip) << 6);
    else
        for (uint32_t k = 0; k < n; k++)
            words[k] = word + ((uint64_t)((k + skip) >> shift) << 6);
}

/* What accesses of a run have in common. */
typedef struct {
    const place_t *place;
    uint32_t line, size, flags;
    uint64_t stride;
} alike_t;

/* Look at adjacent accesses to whole words, of `count` threads from `t`, the first at `at`. */
static void sweep(race_t *r, const alike_t *a, uint64_t at, uint64_t word, uint32_t count, uint32_t t) {
    const place_t *p = a->place;
    uint32_t shift = (uint32_t)__builtin_ctz(a->size) - 2, n = count << shift;
    uint64_t i = at >> 2;
    for (uint32_t done = 0; done < n;) {
        int how;
        uint32_t part = n - done < SURVEYED ? n - done : SURVEYED;
        uint32_t held = survey(p, i + done, word, part, done, shift, r->launch, r->plain, &how);
        if (held) {
            if (how > SKIP)
                write_words(p, i + done, word, held, done, shift, how);
            done += held;
            continue;
        }
        uint32_t which = done >> shift;
        if (note(r, p, i + done, word + ((uint64_t)which << 6))) {
            done++;
            continue;
        }
        /* All of the access again: what is noted already is noted alike. */
        access_one(r, p, at + which * a->size, a->size, a->flags, a->line, t + which);
        done = (which + 1) << shift;
    }
}

/* Look at accesses at a constant distance, of `count` threads from `t`, the first at `at`. */
static void look_at(race_t *r, const alike_t *a, uint64_t at, uint32_t count, uint32_t t) {
    const place_t *p = a->place;
    uint32_t line = a->line, size = a->size, flags = a->flags;
    uint64_t stride = a->stride, word = word_of(r, flags, line, t);
    if (count > 2 && !stride && flags == READ && r->plain)
        count = 2; /* they stand for all */
    uint32_t last = t + count;
    if (p->shared && (at + size > r->shared_bytes || at + (count - 1) * stride + size > r->shared_bytes))
        word = 0;
    if (word && !((at | stride | size) & 3)) {
        if (count > 4 && stride == size && !(size & (size - 1))) {
            sweep(r, a, at, word, count, t);
            return;
        }
        for (; t < last; t++, at += stride, word += WORD(0, 0, 0, 1))
            for (uint32_t i = 0; i < size; i += 4)
                if (!note(r, p, (at + i) >> 2, word)) {
                    access_one(r, p, at, size, flags, line, t);
                    break;
                }
        return;
    }
    uint32_t per = 4 / size; /* threads to a word */
    if (word && size < 4 && stride == size) {
        for (; t < last && at & 3; t++, at += stride)
            access_one(r, p, at, size, flags, line, t);
        word = WORD(r->now, flags | (size == 1 ? SINGLES : HALVES), line, t);
        for (; t + per <= last; t += per, at += 4, word += WORD(0, 0, 0, per))
            if (!note(r, p, at >> 2, word))
                for (uint32_t i = 0; i < per; i++)
                    access_one(r, p, at + i * size, size, flags, line, t + i);
    }
    for (; t < last; t++, at += stride)
        access_one(r, p, at, size, flags, line, t);
}

/* Look at the accesses of a run. */
static void close_run(race_t *r, run_t *run) {
    uint32_t key = (uint32_t)(run->expected >> 32), t = run->thread, count = (uint32_t)run->expected - t;
    alike_t a = {&r->places[key & 1], key >> 9, key >> 3 & 63, key >> 1 & 3, run->stride};
    run->expected = ~(uint64_t)0;
    if (r->ended)
        return;
    r->stamped = true;
    uint64_t at = run->first;
    if (count == 1) { /* of scattered accesses most runs have one */
        uint64_t word = at + a.size <= (key & 1 ? r->shared_bytes : ALL) ? word_of(r, a.flags, a.line, t) : 0;
        uint32_t done = (at | a.size) & 3 || !word ? a.size + 1 : 0;
        while (done < a.size && note(r, a.place, (at + done) >> 2, word))
            done += 4;
        if (done != a.size)
            access_one(r, a.place, at, a.size, a.flags, a.line, t);
        return;
    }
    bool again = !run->row_stride && a.flags == READ && r->plain; /* two rows stand for all of them */
    for (uint32_t row = 0; row < run->rows; row++, at += run->row_stride, t += r->width, count -= r->width)
        if (row < 2 || !again)
            look_at(r, &a, at, r->width, t);
    if (run->rows < 2 || !again || count > r->width)
        look_at(r, &a, at, count, t);
}

/* Look at what waits. Returns whether anything is looked at from now on. */
bool race_flush(race_t *r) {
    for (uint32_t i = r->runs_first; i < r->runs_end; i++)
        if (r->runs[i].expected != ~(uint64_t)0)
            close_run(r, &r->runs[i]);
    r->runs_first = RUNS;
    r->runs_end = 0;
    return has_room(r);
}

/* Whether note() has nothing to do for any of the words of an access: two reads that are known stand for it. */
static bool is_known(race_t *r, const place_t *p, uint64_t offset, uint32_t size, uint32_t flags) {
    if (!r->plain || flags != READ || (offset | size) & 3 || (p->shared && offset + size > r->shared_bytes))
        return false;
    uint64_t now = (uint64_t)moment_now(r) << 36, start = (uint64_t)p->start << 36, far = FAR;
    for (uint64_t i = offset >> 2; i < (offset + size) >> 2; i++) {
        uint64_t word = p->words[i];
        if (MODE(word) != M_READ || word < start || !(word & FAR || (word & PAIR && word >= now)))
            return false;
        far &= word;
    }
    for (uint64_t at = offset; far && !p->shared && at < offset + size; at++)
        add_state(r, at, SETTLED);
    return true;
}

/* A weak access that does not continue run `number`: `expected` is its key and thread. */
void cudatool_race_open(race_t *r, uint32_t number, uint64_t offset, uint64_t expected) {
    run_t *run = &r->runs[number < RUNS ? number : RUNS];
    uint32_t size = (uint32_t)(expected >> 35) & 63;
    if (number < RUNS && run->expected == expected) {
        uint32_t count = (uint32_t)expected - run->thread;
        if (count == 1) {
            run->stride = offset - run->first;
            run->next = offset + run->stride;
            run->expected++;
            return;
        }
        /* Rows of a block of several dimensions, if they are at a constant distance, too. */
        if (count == (run->rows + 1) * r->width && !(run->thread % r->width)) {
            if (!run->rows)
                run->row_stride = offset - run->first;
            if (offset == run->first + (run->rows + 1) * run->row_stride) {
                run->rows++;
                run->next = offset + run->stride;
                run->expected++;
                return;
            }
        }
    }
    const place_t *p = &r->places[expected >> 32 & 1];
    bool scattered = run->expected != ~(uint64_t)0 && (uint32_t)run->expected - run->thread <= 2;
    if (scattered && (r->hit || !(++r->misses & 7))) { /* of such accesses most are known, or few */
        r->hit = is_known(r, p, offset, size, (uint32_t)(expected >> 33) & 3);
        if (r->hit)
            return; /* what waits may wait on */
    }
    if (number < RUNS)
        __builtin_prefetch(p->words + (offset >> 2), 1); /* looked at when the next thread comes */
    if (run->expected != ~(uint64_t)0)
        close_run(r, run);
    *run = (run_t){offset + size, expected + 1, size, offset, 0, (uint32_t)expected, 0};
    if (number >= RUNS) {
        close_run(r, run);
        return;
    }
    r->runs_first = number < r->runs_first ? number : r->runs_first;
    r->runs_end = number >= r->runs_end ? number + 1 : r->runs_end;
}

/* ---- reads through caches that do not see what the launch writes ----
 *
 * No order helps, so none is asked for. Data that is read through the read-only cache (ld.global.nc) is to be read-only
 * as long as the kernel runs: what was read so first is remembered, and compared with all writes at the launch's end.
 * That they are still known then is due to meet() and note(): of the writes to a byte, only another write takes the place.
 * A texture fetch or surface read is undefined if it finds what was written before in the launch: by then that is known.
 */

typedef struct {
    uint64_t address, block;
    uint32_t size, line, thread, reason;
} stale_t;

/* Take `e` if it wrote some of `bytes`. */
static bool take_write(const record_t *e, uint32_t launch, uint32_t bytes, record_t *write) {
    if (e->moment < launch || !(BYTES(e->key) & bytes) || !(FLAGS(e->key) & WRITE))
        return false;
    *write = *e;
    return true;
}

static bool take_from_list(const race_t *r, uint32_t list, uint32_t bytes, record_t *write) {
    for (uint32_t i = list; i; i = r->links[i].next)
        if (take_write(&r->links[i].record, r->launch, bytes, write))
            return true;
    return false;
}

/* Find a write that this launch has made to some of `bytes` of the four at `i` of device memory. */
static bool find_write(const race_t *r, uint64_t i, uint32_t bytes, record_t *write) {
    uint64_t word = r->words[i];
    if (MOMENT(word) < (r->launch < LAST ? r->launch : LAST))
        return false;
    if (MODE(word) == FULL) {
        const cell_t *cell = &r->cells[i];
        return take_write(&cell->write, r->launch, bytes, write) || take_from_list(r, cell->writes, bytes, write) ||
               take_from_list(r, cell->strongs, bytes, write);
    }
    if (!(MODE(word) & WRITE) && word & SECOND)
        word = r->seconds[i];
    uint32_t mode = MODE(word);
    if (!(mode & WRITE))
        return false;
    uint32_t t = THREAD(word); /* of the first byte, which is asked about: reads of a part of the four make the cell full */
    uint32_t flags = KIND(mode) == M_ATOMIC ? READ | WRITE | STRONG | WIDE : WRITE;
    *write = (record_t){MOMENT(word), block_of(r, MOMENT(word)), KEY(15, flags, t >> 5), LINE(word), 1u << (t & 31)};
    return true;
}

static void report_stale(race_t *r, const stale_t *read, const record_t *write) {
    found_t *found = found_at(r, read->line, STALE_READ);
    uint32_t count = found->count + 1;
    if (count == 1)
        *found = (found_t){
            .address = read->address, .block = read->block, .other_block = write->block, .kind = STALE_READ,
            .line = read->line, .other_line = write->line, .size = read->size, .mode = READ,
            .other_mode = FLAGS(write->key), .thread = read->thread,
            .other_thread = 32 * WARP(write->key) + (uint32_t)__builtin_ctz(write->lanes), .reason = read->reason,
        };
    found->count = count;
}

/* Which of the four bytes at `first`, a multiple of four, are among those from `from` to `to`. */
static uint32_t bytes_of(uint64_t first, uint64_t from, uint64_t to) {
    uint64_t start = from > first ? from - first : 0, stop = to < first + 4 ? to - first : 4;
    return ((1u << stop) - 1) & ~((1u << start) - 1);
}

/* Compare what one thread read through the read-only cache with what was written there. Counts each four bytes once. */
static void find_stale_read(race_t *r, const cached_t *read, uint64_t from, uint32_t t) {
    for (uint64_t i = from >> 2; i < (from + read->size + 3) >> 2; i++) {
        record_t write;
        uint32_t bytes = bytes_of(4 * i, from, from + read->size);
        if (!find_write(r, i, bytes, &write))
            continue;
        uint32_t both = bytes & BYTES(write.key), first = (uint32_t)__builtin_ctz(both);
        stale_t stale = {r->base + 4 * i + first, read->block, (uint32_t)__builtin_popcount(both), read->line, t,
                         READ_ONLY_CACHE};
        report_stale(r, &stale, &write);
    }
}

static void find_stale_reads(race_t *r) {
    for (uint64_t k = 0; k < r->reads_used; k++) {
        const cached_t *read = &r->reads[k];
        for (uint32_t n = 0; n < read->count; n++)
            find_stale_read(r, read, read->offset + n * read->size, read->thread + n);
    }
    r->reads_used = 0;
}

static void add_read(race_t *r, const cached_t *one) {
    uint64_t *latest = &r->latest[one->line % LATEST];
    cached_t *read = *latest ? &r->reads[*latest - 1] : NULL;
    if (read && read->line == one->line && read->block == one->block && read->size == one->size &&
        read->thread + read->count == one->thread && read->offset + (uint64_t)read->count * read->size == one->offset) {
        read->count++;
        return;
    }
    if (r->reads_used == r->reads_size) {
        r->reads_size = r->reads_size ? 2 * r->reads_size : 1024;
        has_room(r);
        r->reads = need(realloc(r->reads, r->reads_size * sizeof *r->reads));
    }
    r->reads[r->reads_used++] = *one;
    *latest = r->reads_used;
}

/* Compare, and forget, what was read through the read-only cache from `from` to `to`. */
static void settle_reads(race_t *r, uint64_t from, uint64_t to) {
    bool any = false;
    for (uint64_t at = from; at < to; at++) {
        any |= state_of(r, at) & CACHED;
        r->reads_of[at] = 0;
    }
    if (!any)
        return;
    memset(r->latest, 0, sizeof r->latest);
    uint64_t used = r->reads_used;
    for (uint64_t k = 0; k < used; k++) {
        cached_t whole = r->reads[k];
        if (whole.offset >= to || whole.offset + (uint64_t)whole.count * whole.size <= from)
            continue;
        r->reads[k].count = 0;
        for (uint32_t n = 0; n < whole.count; n++) {
            uint64_t first = whole.offset + n * whole.size, stop = first + whole.size;
            cached_t one = {first, whole.block, whole.line, 1, (uint16_t)(whole.thread + n), whole.size, 0};
            if (first < to && stop > from)
                find_stale_read(r, &one, first, one.thread);
            if (first < from) /* what remains */
                one.size = (uint8_t)((stop < from ? stop : from) - first), add_read(r, &one);
            if (stop > to)
                one.offset = first > to ? first : to, one.size = (uint8_t)(stop - one.offset), add_read(r, &one);
        }
    }
}

/* A read of device memory through the read-only cache: remember it for those bytes that were not read so before. */
void cudatool_race_cached(race_t *r, uint64_t offset, uint32_t size, uint32_t line, uint32_t t) {
    if (r->ended)
        return;
    for (uint64_t at = offset, stop; at < offset + size; at = stop + (stop == at)) {
        for (stop = at; stop < offset + size && !(state_of(r, stop) & CACHED); stop++)
            add_state(r, stop, CACHED);
        if (stop > at)
            add_read(r, &(cached_t){at, (uint32_t)r->block->index, line, 1, (uint16_t)t, (uint8_t)(stop - at), 0});
    }
    is_known(r, &r->places[0], offset, size, READ);
}

/* A read of device memory through the texture cache. */
void cudatool_race_fetched(race_t *r, uint64_t offset, uint32_t size, uint32_t line, uint32_t t) {
    if (!race_flush(r))
        return;
    for (uint64_t first = offset & ~(uint64_t)3; first < offset + size; first += 4) {
        record_t write;
        if (find_write(r, first >> 2, bytes_of(first, offset, offset + size), &write)) {
            stale_t stale = {r->base + offset, r->block->index, size, line, t, TEXTURE_CACHE};
            report_stale(r, &stale, &write);
            return;
        }
    }
}

/* Memory that the heap of the device gives out again: what was done with it before is over. */
void cudatool_race_clear(race_t *r, uint64_t offset, uint64_t size) {
    race_flush(r);
    settle_reads(r, offset, offset + size);
    for (uint64_t i = offset >> 2; size && i < (offset + size + 3) >> 2; i++) {
        if (MODE(r->words[i]) == FULL && MOMENT(r->words[i]) >= r->launch) {
            cell_t *cell = &r->cells[i];
            free_list(r, &cell->writes), free_list(r, &cell->reads), free_list(r, &cell->strongs);
        }
        r->words[i] = 0;
    }
}
