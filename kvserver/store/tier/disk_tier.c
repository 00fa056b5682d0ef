#include "kvserver/store/tier/disk_tier.h"

#include "kernels/checksum.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/map.h"
#include "kvserver/base/slice.h"
#include "kvserver/cluster/placement.h"
#include "kvserver/store/rows/arena.h"
#include "kvserver/store/rows/residency.h"
#include "kvserver/store/tier/saved_value.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    SEGMENTS_AT_ONCE = 8, /* of a write: 512 KB of rows at d = 128 */
    ERASE_AT_ONCE = KV_DISK_WRITES_MAX / KVS_SAVED_KINDS, /* units */
    READ_TRIES = 3,
    CODES_TRIES = 4, /* times that codes are written again because they have changed */
};

/* ---- what is known ------------------------------------------------------------------------ */

struct segment_read;

/* A block that is saved.  Known while its prefix is in the index; after that, while the disk is the
 * only place that has its rows. */
struct saved {
    struct kvs_block *block; /* NULL: freed, with reads under way */
    struct kv_id128 home, name;
    struct kv_placement_units units;
    uint32_t codes; /* codes_of() of those that the disk has; 0: none */
    bool is_doomed; /* the index has given it up */
    bool is_loading;
    struct saved *next_doomed, **link_doomed;
    /* While it comes back: */
    struct saved *next;
    struct segment_read *ready;
    uint64_t since_us;
    uint32_t at;        /* the next segment to read */
    uint32_t n_reading; /* segments of which values are under way */
};

/* Where the block of an item of a job is. */
enum item_state {
    ITEM_TO_DO,
    ITEM_UNDER_WAY,
    ITEM_LEAVING,
    ITEM_OVER,
};

struct item_progress {
    uint8_t state;   /* enum item_state */
    uint8_t n_tries; /* to write codes */
    uint16_t at;     /* the next segment, or unit */
    uint16_t n_ops;  /* under way */
    uint32_t codes;  /* codes_of() when they were written */
    bool has_failed;
};
static_assert(KV_UNITS_MAX <= UINT16_MAX, "units are counted in an item");

struct job {
    struct kvs_tier_item *items; /* (n); NULL: there is none */
    struct item_progress *progress;
    uint32_t n, first; /* those before `first` are over */
};

/* A write of one item's job. */
struct job_op {
    struct kvs_disk_tier *tier;
    struct job_op *next, **link;
    enum kvs_tier_job job;
    uint32_t item;
    struct kvs_block *pinned; /* NULL: none */
    size_t bytes;
    uint64_t memory[]; /* tails, or codes */
};

/* A segment that is read. */
struct segment_read {
    struct kvs_disk_tier *tier;
    struct saved *saved;
    struct segment_read *next, **link; /* of those under way; next: of those that are ready */
    uint32_t at;
    uint32_t n_left; /* values under way */
    uint32_t n_tries;
    size_t rows_room, codes_room;
    bool has_rows, has_codes;
    uint64_t memory[]; /* rows with their tail, then codes */
};

struct kvs_disk_tier {
    struct kvs_segment_store *store;
    const struct kv_clock *clock;
    uint32_t thread, n_threads;
    struct kv_disk_queue *queue;
    void (*job_done)(void *arg, enum kvs_tier_job job);
    void *arg;
    struct kv_map *saved; /* by the address of the block */
    struct saved *doomed;
    struct job jobs[KVS_TIER_JOBS];
    struct job_op *ops;
    size_t ops_bytes;
    struct saved *first, **end; /* they come back, the first one now */
    struct saved *to_read; /* of them: more is to be read of this one, and those behind it */
    struct segment_read *reads; /* under way */
    size_t reading_bytes;
    struct kvs_tier_counts counts;
};

static void count(_Atomic uint64_t *counter, uint64_t n)
{
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n,
                          memory_order_relaxed);
}

static struct kv_id128 key_of(const struct kvs_block *block)
{
    struct kv_id128 key = {{0}};

    memcpy(key.bytes, &block, sizeof(block));
    return key;
}

static struct saved *saved_of(const struct kvs_disk_tier *tier, const struct kvs_block *block)
{
    const struct kv_id128 key = key_of(block);

    return kv_map_get(tier->saved, &key);
}

static struct kv_placement_units units_of(const struct kvs_disk_tier *tier,
                                          const struct kvs_tier_item *item)
{
    return kv_placement_thread_units(item->place.root, item->n_units, item->place.n_nodes,
                                     item->place.position, tier->n_threads, tier->thread);
}

static bool
know(struct kvs_disk_tier *tier, const struct kvs_tier_item *item, struct kvs_block *block)
{
    struct saved *saved = saved_of(tier, block);
    const struct kv_id128 key = key_of(block);

    if (saved != NULL)
        return true;
    saved = malloc(sizeof(*saved));
    if (saved == NULL)
        return false;
    *saved = (struct saved){
        .block = block, .home = item->home, .name = item->name, .units = units_of(tier, item)};
    if (!kv_map_set(tier->saved, &key, saved)) {
        free(saved);
        return false;
    }
    return true;
}

static void know_no_more(struct kvs_disk_tier *tier, struct saved *saved)
{
    const struct kv_id128 key = key_of(saved->block);

    assert(!saved->is_loading);
    if (saved->link_doomed != NULL) {
        *saved->link_doomed = saved->next_doomed;
        if (saved->next_doomed != NULL)
            saved->next_doomed->link_doomed = saved->link_doomed;
    }
    kv_map_remove(tier->saved, &key);
    saved->block = NULL;
    if (saved->n_reading == 0)
        free(saved);
}

static struct kvs_saved_key
key_at(const struct saved *saved, enum kvs_saved_kind kind, uint32_t at)
{
    return kvs_saved_key(&saved->home, &saved->name, kind,
                         saved->units.first + at * saved->units.step);
}

/* What tells the block's codes from others that it may get; never 0. */
static uint32_t codes_of(const struct kvs_block *block)
{
    uint32_t crc = 1;

    for (uint32_t at = 0; at < block->n_segments; at++) {
        const struct kvs_codes *codes = kvs_block_codes(block, at);

        if (codes->column.bytes != NULL)
            crc = kv_crc32c(crc ^ at, &codes->column.crc, sizeof(codes->column.crc));
    }
    return crc | 1;
}

/* ---- jobs --------------------------------------------------------------------------------- */

static struct kvs_block *block_of(const struct kvs_disk_tier *tier,
                                  const struct kvs_tier_item *item)
{
    struct kvs_block *const *block =
        item->prefix != NULL ? kvs_prefix_block(item->prefix, tier->thread, tier->n_threads)
                             : NULL;

    return block != NULL ? *block : NULL;
}

static void item_over(struct kvs_tier_item *item, struct item_progress *progress, bool is_good)
{
    progress->state = ITEM_OVER;
    if (!is_good && !progress->has_failed) {
        progress->has_failed = true;
        atomic_fetch_add_explicit(&item->n_failed, 1, memory_order_relaxed);
    }
}

static void op_free(struct job_op *op)
{
    *op->link = op->next;
    if (op->next != NULL)
        op->next->link = op->link;
    op->tier->ops_bytes -= op->bytes;
    if (op->pinned != NULL)
        kvs_block_unpin(op->tier->store, op->pinned);
    free(op);
}

static void op_done(void *arg, kv_status_t status, size_t bytes)
{
    struct job_op *op = arg;
    struct job *job = &op->tier->jobs[op->job];
    struct item_progress *progress = &job->progress[op->item];

    (void)bytes;
    progress->n_ops--;
    if (status == KV_OK) {
        count(&op->tier->counts.written_bytes, op->bytes);
    } else {
        count(&op->tier->counts.failed, 1);
        /* Codes that the disk has not are made again; a block may leave without. */
        if (op->job != KVS_TIER_LEAVE)
            item_over(&job->items[op->item], progress, false);
    }
    op_free(op);
}

static struct job_op *op_create(struct kvs_disk_tier *tier,
                                enum kvs_tier_job job,
                                uint32_t item,
                                struct kvs_block *pinned,
                                size_t memory_bytes)
{
    struct job_op *op = malloc(sizeof(*op) + memory_bytes);

    if (op == NULL)
        return NULL;
    *op = (struct job_op){.tier = tier, .job = job, .item = item, .pinned = pinned};
    if (pinned != NULL)
        pinned->pins++;
    op->next = tier->ops;
    op->link = &tier->ops;
    if (op->next != NULL)
        op->next->link = &op->next;
    tier->ops = op;
    return op;
}

/* Returns false if it is to be tried again later: the disk has enough to do. */
static bool op_start(struct job_op *op, const struct kv_disk_write *writes, unsigned n)
{
    struct kvs_disk_tier *tier = op->tier;
    struct job *job = &tier->jobs[op->job];
    kv_status_t status;

    for (unsigned i = 0; i < n; i++)
        op->bytes += writes[i].value_bytes + writes[i].tail_bytes;
    tier->ops_bytes += op->bytes;
    status = kv_disk_write(tier->queue, KV_DISK_ROWS, writes, n, op_done, op);
    if (status == KV_OK) {
        job->progress[op->item].n_ops++;
        return true;
    }
    if (status != KV_BUSY && op->job != KVS_TIER_LEAVE)
        item_over(&job->items[op->item], &job->progress[op->item], false);
    op_free(op);
    return status != KV_BUSY;
}

/* ---- saving ------------------------------------------------------------------------------- */

/* Whether the segment of a block, or of one under it, can be saved now. */
static bool can_save(struct kvs_block *block, uint32_t at)
{
    const struct kvs_block *owner = kvs_block_owner(block, at);

    return owner->segments[at].rows != 0 && kvs_block_is_here(owner) &&
           owner->segments[at].n_written == KV_BLOCK_TOKENS && !kvs_segment_has_bad(owner, at);
}

/* Gives the disk some segments of an item.  Returns false if nothing more can be done now. */
static bool save_some(struct kvs_disk_tier *tier, uint32_t i)
{
    struct job *job = &tier->jobs[KVS_TIER_SAVE];
    struct kvs_tier_item *item = &job->items[i];
    struct item_progress *progress = &job->progress[i];
    struct kvs_block *block = block_of(tier, item);
    const struct kv_placement_units units = units_of(tier, item);
    struct kvs_saved_key keys[SEGMENTS_AT_ONCE];
    struct kv_disk_write writes[SEGMENTS_AT_ONCE];
    struct kvs_saved_tail *tails;
    struct job_op *op;
    unsigned n = 0;

    if (block == NULL || block->n_segments != units.n) {
        /* Without units here there is nothing to do, but if it has left the index meanwhile. */
        item_over(item, progress, units.n == 0);
        return true;
    }
    op = op_create(tier, KVS_TIER_SAVE, i, block, SEGMENTS_AT_ONCE * sizeof(*tails));
    if (op == NULL) {
        item_over(item, progress, false);
        return true;
    }
    tails = (struct kvs_saved_tail *)op->memory;
    for (; n < SEGMENTS_AT_ONCE && progress->at < block->n_segments; n++, progress->at++) {
        const uint32_t at = progress->at;
        struct kvs_segment_image image;

        if (!can_save(block, at) ||
            !kvs_block_image(tier->store, kvs_block_owner(block, at), at, &image)) {
            item_over(item, progress, false);
            op_free(op);
            return true;
        }
        keys[n] = kvs_saved_key(&item->home, &item->name, KVS_SAVED_ROWS,
                                units.first + at * units.step);
        kvs_saved_tail_make(&tails[n], &keys[n], image.rows, image.rows_bytes, image.crcs);
        writes[n] = (struct kv_disk_write){.key = &keys[n],
                                           .key_bytes = sizeof(keys[n]),
                                           .value = image.rows,
                                           .value_bytes = image.rows_bytes,
                                           .tail = &tails[n],
                                           .tail_bytes = sizeof(tails[n])};
    }
    if (!op_start(op, writes, n)) {
        progress->at -= (uint16_t)n;
        return false;
    }
    if (progress->state != ITEM_OVER && progress->at == block->n_segments)
        progress->state = ITEM_UNDER_WAY;
    return true;
}

/* All segments of an item that were given to the disk are written. */
static void saved_all(struct kvs_disk_tier *tier, struct kvs_tier_item *item)
{
    struct kvs_block *block = block_of(tier, item);

    if (block == NULL || !know(tier, item, block))
        atomic_fetch_add_explicit(&item->n_failed, 1, memory_order_relaxed);
}

static bool save_step(struct kvs_disk_tier *tier, uint32_t i)
{
    struct job *job = &tier->jobs[KVS_TIER_SAVE];
    struct item_progress *progress = &job->progress[i];

    if (progress->state == ITEM_TO_DO)
        return tier->ops_bytes < KVS_TIER_UNSAVED && save_some(tier, i);
    if (progress->n_ops > 0)
        return false;
    progress->state = ITEM_OVER;
    saved_all(tier, &job->items[i]);
    return true;
}

/* ---- leaving ------------------------------------------------------------------------------ */

/* Writes copies of some segments' codes, which may be replaced meanwhile. */
static bool write_codes(struct kvs_disk_tier *tier, uint32_t i, struct saved *saved)
{
    struct job *job = &tier->jobs[KVS_TIER_LEAVE];
    struct item_progress *progress = &job->progress[i];
    const struct kvs_block *block = saved->block;
    struct kvs_saved_key keys[SEGMENTS_AT_ONCE];
    struct kv_disk_write writes[SEGMENTS_AT_ONCE];
    uint32_t ats[SEGMENTS_AT_ONCE], at = progress->at;
    size_t bytes = 0;
    unsigned n = 0;

    for (; n < SEGMENTS_AT_ONCE && at < block->n_segments; at++) {
        const struct kvs_column *column = &kvs_block_codes(block, at)->column;

        if (column->bytes == NULL)
            continue;
        ats[n++] = at;
        bytes += column->n_bytes;
    }
    if (n > 0) {
        struct job_op *op = op_create(tier, KVS_TIER_LEAVE, i, NULL, bytes);
        uint8_t *copy;

        if (op == NULL) {
            item_over(&job->items[i], progress, false);
            return true;
        }
        copy = (uint8_t *)op->memory;
        for (unsigned j = 0; j < n; j++) {
            const struct kvs_column *column = &kvs_block_codes(block, ats[j])->column;

            keys[j] = key_at(saved, KVS_SAVED_CODES, ats[j]);
            writes[j] =
                (struct kv_disk_write){.key = &keys[j],
                                       .key_bytes = sizeof(keys[j]),
                                       .value = memcpy(copy, column->bytes, column->n_bytes),
                                       .value_bytes = column->n_bytes};
            copy += column->n_bytes;
        }
        if (!op_start(op, writes, n))
            return false;
    }
    if (progress->state != ITEM_OVER) {
        progress->at = (uint16_t)at;
        if (at == block->n_segments)
            progress->state = ITEM_UNDER_WAY;
    }
    return true;
}

/* Marks a block to leave whose codes the disk has. */
static bool mark(struct kvs_disk_tier *tier, uint32_t i, struct saved *saved)
{
    struct job *job = &tier->jobs[KVS_TIER_LEAVE];
    struct item_progress *progress = &job->progress[i];

    if (tier->store->n_leaving == KVS_LEAVING_MAX)
        return false;
    if (kvs_block_leave(tier->store, saved->block) == KV_OK)
        progress->state = ITEM_LEAVING;
    else
        item_over(&job->items[i], progress, false);
    return true;
}

static bool leave_step(struct kvs_disk_tier *tier, uint32_t i)
{
    struct job *job = &tier->jobs[KVS_TIER_LEAVE];
    struct kvs_tier_item *item = &job->items[i];
    struct item_progress *progress = &job->progress[i];
    struct kvs_block *block = block_of(tier, item);
    struct saved *saved = block != NULL ? saved_of(tier, block) : NULL;
    uint32_t codes;

    if (progress->n_ops > 0)
        return false;
    if (saved == NULL || saved->is_doomed || block->residency >= KVS_ABSENT) {
        /* It has none here, has left the index, or has left memory already. */
        item_over(item, progress, true);
        return true;
    }
    switch ((enum item_state)progress->state) {
    case ITEM_TO_DO:
        if (block->under != NULL)
            kvs_block_settle(tier->store, block);
        codes = codes_of(block);
        if (block->under != NULL || block->n_own < block->n_segments) {
            item_over(item, progress, false);
            return true;
        }
        if (progress->at == 0) {
            if (saved->codes == codes)
                return mark(tier, i, saved);
            progress->codes = codes;
            saved->codes = 0;
        }
        return tier->ops_bytes < KVS_TIER_UNSAVED && write_codes(tier, i, saved);
    case ITEM_UNDER_WAY:
        saved->codes = progress->codes;
        progress->at = 0;
        progress->state = ITEM_TO_DO;
        if (++progress->n_tries > CODES_TRIES)
            item_over(item, progress, false);
        return true;
    case ITEM_LEAVING:
        if (block->residency == KVS_LEAVING)
            return false;
        item_over(item, progress, false); /* somebody needed it: it stays */
        return true;
    case ITEM_OVER:
        break;
    }
    return false;
}

/* ---- erasing ------------------------------------------------------------------------------ */

/* Whether the disk is the only place that has rows of the item, which a session still needs. */
static bool is_needed(const struct kvs_disk_tier *tier, const struct kvs_tier_item *item)
{
    for (const struct saved *saved = tier->doomed; saved != NULL; saved = saved->next_doomed)
        if (memcmp(&saved->home, &item->home, sizeof(item->home)) == 0 &&
            memcmp(&saved->name, &item->name, sizeof(item->name)) == 0)
            return true;
    return false;
}

static bool erase_some(struct kvs_disk_tier *tier, uint32_t i)
{
    struct job *job = &tier->jobs[KVS_TIER_ERASE];
    const struct kvs_tier_item *item = &job->items[i];
    struct item_progress *progress = &job->progress[i];
    const struct kv_placement_units units = units_of(tier, item);
    struct job_op *op = op_create(
        tier, KVS_TIER_ERASE, i, NULL,
        KV_DISK_WRITES_MAX * (sizeof(struct kvs_saved_key) + sizeof(struct kv_disk_write)));
    struct kv_disk_write *writes;
    struct kvs_saved_key *keys;
    uint32_t at = progress->at;
    unsigned n = 0;

    if (op == NULL) {
        item_over(&job->items[i], progress, false);
        return true;
    }
    writes = (struct kv_disk_write *)op->memory;
    keys = (struct kvs_saved_key *)(writes + KV_DISK_WRITES_MAX);
    for (unsigned end = at + ERASE_AT_ONCE; at < units.n && at < end; at++)
        for (unsigned kind = 0; kind < KVS_SAVED_KINDS; kind++, n++) {
            keys[n] =
                kvs_saved_key(&item->home, &item->name, kind, units.first + at * units.step);
            writes[n] = (struct kv_disk_write){.key = &keys[n], .key_bytes = sizeof(keys[n])};
        }
    if (!op_start(op, writes, n))
        return false;
    if (progress->state != ITEM_OVER) {
        progress->at = (uint16_t)at;
        if (at == units.n)
            progress->state = ITEM_UNDER_WAY;
    }
    return true;
}

static bool erase_step(struct kvs_disk_tier *tier, uint32_t i)
{
    struct job *job = &tier->jobs[KVS_TIER_ERASE];
    struct kvs_tier_item *item = &job->items[i];
    struct item_progress *progress = &job->progress[i];
    const struct kvs_block *block = block_of(tier, item);
    struct saved *saved = block != NULL ? saved_of(tier, block) : NULL;

    if (progress->n_ops > 0)
        return false;
    if (progress->state == ITEM_UNDER_WAY || units_of(tier, item).n == 0 ||
        is_needed(tier, item)) {
        item_over(item, progress, progress->state == ITEM_UNDER_WAY || !is_needed(tier, item));
        return true;
    }
    /* It could not be saved on all data threads: it is in memory, and was on this one. */
    if (saved != NULL && block->residency <= KVS_LEAVING)
        know_no_more(tier, saved);
    return erase_some(tier, i);
}

/* ---- all jobs ----------------------------------------------------------------------------- */

static bool (*const steps[KVS_TIER_JOBS])(struct kvs_disk_tier *tier, uint32_t i) = {
    [KVS_TIER_SAVE] = save_step,
    [KVS_TIER_LEAVE] = leave_step,
    [KVS_TIER_ERASE] = erase_step,
};

static bool is_item_over(const struct item_progress *progress)
{
    return progress->state == ITEM_OVER && progress->n_ops == 0;
}

static bool job_step(struct kvs_disk_tier *tier, enum kvs_tier_job kind)
{
    struct job *job = &tier->jobs[kind];
    struct kv_slice slice = kv_slice_begin(tier->clock, 1);
    bool has_moved = false;

    if (job->items == NULL)
        return false;
    for (uint32_t i = job->first; i < job->n; i++) {
        while (job->progress[i].state != ITEM_OVER && steps[kind](tier, i)) {
            has_moved = true;
            if (kv_slice_over(&slice))
                return true;
        }
    }
    while (job->first < job->n && is_item_over(&job->progress[job->first]))
        job->first++;
    if (job->first < job->n)
        return has_moved;
    free(job->progress);
    *job = (struct job){0};
    tier->job_done(tier->arg, kind);
    return true;
}

void kvs_disk_tier_begin(struct kvs_disk_tier *tier,
                         enum kvs_tier_job kind,
                         struct kvs_tier_item *items,
                         uint32_t n)
{
    struct job *job = &tier->jobs[kind];

    assert(job->items == NULL && n > 0);
    *job =
        (struct job){.items = items, .progress = calloc(n, sizeof(job->progress[0])), .n = n};
    if (job->progress != NULL)
        return;
    for (uint32_t i = 0; i < n; i++)
        atomic_fetch_add_explicit(&items[i].n_failed, 1, memory_order_relaxed);
    *job = (struct job){0};
    tier->job_done(tier->arg, kind);
}

/* ---- coming back -------------------------------------------------------------------------- */

static void read_free(struct segment_read *read)
{
    read->tier->reading_bytes -= read->rows_room + read->codes_room;
    free(read);
}

static void ready_free(struct saved *saved)
{
    struct segment_read *next;

    for (; saved->ready != NULL; saved->ready = next) {
        next = saved->ready->next;
        read_free(saved->ready);
    }
}

/* A value has been read, or could not be. */
static void value_done(struct segment_read *read)
{
    struct saved *saved = read->saved;

    if (--read->n_left > 0)
        return;
    *read->link = read->next;
    if (read->next != NULL)
        read->next->link = read->link;
    saved->n_reading--;
    if (saved->is_loading) {
        read->next = saved->ready;
        saved->ready = read;
        return;
    }
    read_free(read);
    if (saved->block == NULL && saved->n_reading == 0)
        free(saved);
}

static void count_failed(struct kvs_disk_tier *tier, kv_status_t status)
{
    if (status != KV_OK && status != KV_NOT_FOUND)
        count(&tier->counts.failed, 1);
}

static kv_status_t start_value(struct segment_read *read,
                               enum kvs_saved_kind kind,
                               void *value,
                               size_t room,
                               kv_disk_done_fn done)
{
    const struct kvs_saved_key key = key_at(read->saved, kind, read->at);
    kv_status_t status;

    read->n_left++;
    status = kv_disk_read(read->tier->queue, KV_DISK_ROWS, &key, sizeof(key), value, room, done,
                          read);
    if (status != KV_OK)
        read->n_left--;
    return status;
}

static void rows_read(void *arg, kv_status_t status, size_t bytes)
{
    struct segment_read *read = arg;

    count_failed(read->tier, status);
    /* It may pass; rows that are lost for it are lost for good. */
    if (status != KV_OK && status != KV_NOT_FOUND && read->saved->block != NULL &&
        ++read->n_tries < READ_TRIES &&
        start_value(read, KVS_SAVED_ROWS, read->memory, read->rows_room, rows_read) == KV_OK) {
        read->n_left--; /* in place of the one that has failed */
        return;
    }
    read->has_rows = status == KV_OK && bytes == read->rows_room;
    value_done(read);
}

static void codes_read(void *arg, kv_status_t status, size_t bytes)
{
    struct segment_read *read = arg;

    count_failed(read->tier, status);
    read->has_codes = status == KV_OK && bytes == read->codes_room;
    value_done(read);
}

/* Starts to read a segment.  Returns false if it is to be tried again later. */
static bool read_segment(struct kvs_disk_tier *tier, struct saved *saved, uint32_t at)
{
    const struct kvs_column *column = &kvs_block_codes(saved->block, at)->column;
    const size_t rows_room = kvs_segment_away_bytes(tier->store, &saved->block->segments[at]) +
                             sizeof(struct kvs_saved_tail);
    const size_t codes_room = column->bytes != NULL ? column->n_bytes : 0;
    struct segment_read *read = malloc(sizeof(*read) + rows_room + codes_room);

    if (read == NULL)
        return false;
    *read = (struct segment_read){.tier = tier,
                                  .saved = saved,
                                  .at = at,
                                  .rows_room = rows_room,
                                  .codes_room = codes_room};
    if (start_value(read, KVS_SAVED_ROWS, read->memory, rows_room, rows_read) != KV_OK) {
        free(read);
        return false;
    }
    /* Without codes that can be read they are made again. */
    if (codes_room > 0)
        (void)start_value(read, KVS_SAVED_CODES, (uint8_t *)read->memory + rows_room,
                          codes_room, codes_read);
    read->next = tier->reads;
    read->link = &tier->reads;
    if (read->next != NULL)
        read->next->link = &read->next;
    tier->reads = read;
    tier->reading_bytes += rows_room + codes_room;
    saved->n_reading++;
    return true;
}

/* Starts what fits the window, of one block after the other. */
static bool read_ahead(struct kvs_disk_tier *tier)
{
    bool has_moved = false;

    while (tier->to_read != NULL && tier->reading_bytes < KVS_TIER_WINDOW) {
        struct saved *saved = tier->to_read;

        if (saved->at == saved->block->n_segments) {
            tier->to_read = saved->next;
            continue;
        }
        if (!read_segment(tier, saved, saved->at))
            break;
        saved->at++;
        has_moved = true;
    }
    return has_moved;
}

/* Puts a segment back that has been read.  Returns false if there is no memory. */
static bool restore(struct kvs_disk_tier *tier, struct saved *saved, struct segment_read *read)
{
    const size_t rows_bytes = read->rows_room - sizeof(struct kvs_saved_tail);
    const struct kvs_saved_key key = key_at(saved, KVS_SAVED_ROWS, read->at);
    struct kvs_saved_tail tail;
    const struct kvs_segment_image image = {
        .rows = read->memory,
        .rows_bytes = rows_bytes,
        .crcs = tail.crcs,
        .codes = read->has_codes ? (const uint8_t *)read->memory + read->rows_room : NULL,
        .codes_bytes = read->codes_room,
    };
    bool is_good;

    memcpy(&tail, (const uint8_t *)read->memory + rows_bytes, sizeof(tail));
    is_good = read->has_rows && kvs_saved_tail_is_right(&tail, &key, image.rows, rows_bytes);
    if (!kvs_block_restore(tier->store, saved->block, read->at, is_good ? &image : NULL))
        return false;
    count(&tier->counts.loaded_bytes, read->rows_room + read->codes_room);
    if (!is_good)
        count(&tier->counts.lost_segments, 1);
    return true;
}

/* Takes a block out of the list of those that come back. */
static void unlist(struct kvs_disk_tier *tier, struct saved *saved)
{
    struct saved **link = &tier->first;

    while (*link != saved)
        link = &(*link)->next;
    *link = saved->next;
    if (tier->end == &saved->next)
        tier->end = link;
    if (tier->to_read == saved)
        tier->to_read = saved->next;
    saved->is_loading = false;
    ready_free(saved);
}

static void block_is_back(struct kvs_disk_tier *tier, struct saved *saved)
{
    unlist(tier, saved);
    kv_histogram_add(&tier->counts.load_us, kv_clock_now(tier->clock) - saved->since_us);
    count(&tier->counts.loaded_blocks, 1);
    kvs_block_restored(tier->store, saved->block);
    if (saved->is_doomed)
        know_no_more(tier, saved);
}

/* Puts back what has been read of the first block.  Returns false if there was nothing to do. */
static bool bring_back(struct kvs_disk_tier *tier)
{
    struct kv_slice slice = kv_slice_begin(tier->clock, 1);
    struct saved *saved = tier->first;

    if (saved == NULL)
        return false;
    while (saved->ready != NULL) {
        struct segment_read *read = saved->ready;

        if (!restore(tier, saved, read)) {
            /* Somebody has to make room; a later step tries again. */
            (void)kvs_pages_want(kvs_arena_pages(tier->store->arena), read->rows_room);
            return false;
        }
        saved->ready = read->next;
        read_free(read);
        if (kv_slice_over(&slice))
            return true;
    }
    if (saved->n_reading > 0 || saved->at < saved->block->n_segments)
        return false;
    block_is_back(tier, saved);
    return true;
}

/* ---- what the store calls ----------------------------------------------------------------- */

static bool keep(void *arg, const struct kvs_block *block)
{
    struct kvs_disk_tier *tier = arg;
    const struct saved *saved = saved_of(tier, block);

    if (saved == NULL || saved->is_doomed || saved->codes != codes_of(block))
        return false;
    count(&tier->counts.left_blocks, 1);
    return true;
}

static void load(void *arg, struct kvs_block *block)
{
    struct kvs_disk_tier *tier = arg;
    struct saved *saved = saved_of(tier, block);

    saved->since_us = kv_clock_now(tier->clock);
    saved->at = 0;
    saved->is_loading = true;
    saved->next = NULL;
    *tier->end = saved;
    tier->end = &saved->next;
    if (tier->to_read == NULL)
        tier->to_read = saved;
}

static void forget(void *arg, const struct kvs_block *block)
{
    struct kvs_disk_tier *tier = arg;
    struct saved *saved = saved_of(tier, block);

    if (saved->is_loading)
        unlist(tier, saved);
    know_no_more(tier, saved);
}

static const struct kvs_tier tier_ops = {.keep = keep, .load = load, .forget = forget};

/* ---- the interface ------------------------------------------------------------------------ */

kv_status_t kvs_disk_tier_open(const struct kvs_disk_tier_setup *setup,
                               struct kvs_disk_tier **ret_tier)
{
    struct kvs_disk_tier *tier = calloc(1, sizeof(*tier));
    kv_status_t status;

    if (tier == NULL)
        return KV_NO_MEMORY;
    tier->store = setup->store;
    tier->clock = setup->clock;
    tier->thread = setup->thread;
    tier->n_threads = setup->n_threads;
    tier->job_done = setup->job_done;
    tier->arg = setup->arg;
    tier->end = &tier->first;
    tier->saved = kv_map_create(kv_clock_now(setup->clock)); /* keys are addresses */
    status = tier->saved == NULL ? KV_NO_MEMORY
                                 : setup->disk->ops->queue_open(setup->disk, setup->wake,
                                                                setup->arg, &tier->queue);
    if (status != KV_OK) {
        kv_map_destroy(tier->saved);
        free(tier);
        return status;
    }
    kvs_residency_set_tier(tier->store, &tier_ops, tier);
    *ret_tier = tier;
    return KV_OK;
}

void kvs_disk_tier_stop(struct kvs_disk_tier *tier)
{
    if (tier != NULL && tier->queue != NULL)
        tier->queue->disk->ops->queue_close(tier->queue);
    if (tier != NULL)
        tier->queue = NULL;
}

void kvs_disk_tier_close(struct kvs_disk_tier *tier)
{
    struct saved *saved;
    size_t cursor = 0;

    if (tier == NULL)
        return;
    kvs_disk_tier_stop(tier);
    /* What was under way. */
    for (struct job_op *op = tier->ops, *next; op != NULL; op = next) {
        next = op->next;
        free(op);
    }
    for (struct segment_read *read = tier->reads, *next; read != NULL; read = next) {
        next = read->next;
        if (--read->saved->n_reading == 0 && read->saved->block == NULL)
            free(read->saved);
        free(read);
    }
    for (unsigned i = 0; i < KVS_TIER_JOBS; i++)
        free(tier->jobs[i].progress);
    while ((saved = kv_map_next(tier->saved, &cursor)) != NULL) {
        ready_free(saved);
        free(saved);
    }
    kv_map_destroy(tier->saved);
    free(tier);
}

bool kvs_disk_tier_step(struct kvs_disk_tier *tier)
{
    bool has_moved = kv_disk_progress(tier->queue) > 0;

    has_moved = bring_back(tier) || has_moved;
    has_moved = read_ahead(tier) || has_moved;
    for (unsigned job = 0; job < KVS_TIER_JOBS; job++)
        has_moved = job_step(tier, job) || has_moved;
    return has_moved;
}

void kvs_disk_tier_release(struct kvs_disk_tier *tier, const struct kvs_block *block)
{
    struct saved *saved = saved_of(tier, block);

    if (saved == NULL || saved->is_doomed)
        return;
    if (block->residency <= KVS_LEAVING) {
        know_no_more(tier, saved);
        return;
    }
    saved->is_doomed = true;
    saved->next_doomed = tier->doomed;
    saved->link_doomed = &tier->doomed;
    if (saved->next_doomed != NULL)
        saved->next_doomed->link_doomed = &saved->next_doomed;
    tier->doomed = saved;
}

struct kvs_block *kvs_disk_tier_adopt(struct kvs_disk_tier *tier,
                                      const struct kvs_tier_item *item,
                                      const uint32_t *row_bytes,
                                      uint32_t n)
{
    struct kvs_block *block = kvs_block_create_absent(tier->store, row_bytes, n);

    if (block == NULL)
        return NULL;
    if (know(tier, item, block)) {
        saved_of(tier, block)->codes = codes_of(block);
        return block;
    }
    kvs_block_unref(tier->store, block);
    return NULL;
}

const struct kvs_tier_counts *kvs_disk_tier_counts(const struct kvs_disk_tier *tier)
{
    return &tier->counts;
}

void kvs_disk_tier_visit_pins(const struct kvs_disk_tier *tier,
                              void (*visit)(void *arg, const struct kvs_block *block),
                              void *arg)
{
    for (const struct job_op *op = tier->ops; op != NULL; op = op->next)
        if (op->pinned != NULL)
            visit(arg, op->pinned);
}
