#include "kvserver/store/tier/disk_tier_private.h"

#include "kernels/checksum.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/slice.h"
#include "kvserver/store/rows/arena.h"
#include "kvserver/store/rows/residency.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    ERASE_AT_ONCE = 32, /* units */
    CODES_TRIES = 4,    /* times that codes are written again because they have changed */
    TAIL_BYTES = sizeof(struct kvs_saved_column_tail),
};

/* ---- what is known ------------------------------------------------------------------------ */

static struct kv_id128 key_of(const struct kvs_block *block)
{
    struct kv_id128 key = {{0}};

    memcpy(key.bytes, &block, sizeof(block));
    return key;
}

static struct kvs_saved *saved_of(const struct kvs_disk_tier *tier,
                                  const struct kvs_block *block)
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
    struct kvs_saved *saved = saved_of(tier, block);
    const struct kv_id128 key = key_of(block);

    if (saved != NULL)
        return true;
    const struct kv_placement_units units = units_of(tier, item);
    saved = calloc(1, sizeof(*saved) + units.n * sizeof(saved->codes_on_disk[0]));
    if (saved == NULL)
        return false;
    saved->block = block;
    saved->home = item->home;
    saved->name = item->name;
    saved->units = units;
    saved->depth = item->depth;
    if (!kv_map_set(tier->saved, &key, saved)) {
        free(saved);
        return false;
    }
    kvs_saved_is_here(tier, saved);
    return true;
}

void kvs_saved_drop(struct kvs_disk_tier *tier, struct kvs_saved *saved)
{
    const struct kv_id128 key = key_of(saved->block);

    assert(saved->n_wanted == 0);
    kvs_load_give_up(tier, saved);
    kvs_saved_is_away(tier, saved);
    if (saved->link_doomed != NULL) {
        *saved->link_doomed = saved->next_doomed;
        if (saved->next_doomed != NULL)
            saved->next_doomed->link_doomed = saved->link_doomed;
    }
    kv_map_remove(tier->saved, &key);
    free(saved);
}

/* Whether the segment has codes in memory that the disk has not been given; what is away it was given. */
static bool
has_new_codes(const struct kvs_disk_tier *tier, const struct kvs_saved *saved, uint32_t at)
{
    const struct kvs_column *column = &kvs_block_codes(saved->block, at)->column;

    /* Damaged ones are lost: n_coded 0. */
    return column->bytes != NULL && !kvs_column_is_away(column) &&
           kvs_block_codes(saved->block, at)->n_coded > 0 &&
           saved->codes_on_disk[at] !=
               kvs_codes_fingerprint(column, kvs_codes_kept(tier, saved, at).identity);
}

/* Whether any segment of the block has. */
static bool have_new_codes(const struct kvs_disk_tier *tier, const struct kvs_saved *saved)
{
    for (uint32_t at = 0; at < saved->block->n_segments; at++)
        if (has_new_codes(tier, saved, at))
            return true;
    return false;
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

static void item_failed(struct kvs_tier_item *item, kv_status_t status)
{
    atomic_store_explicit(&item->why, status, memory_order_relaxed);
    atomic_fetch_add_explicit(&item->n_failed, 1, memory_order_relaxed);
}

static void
item_over(struct kvs_tier_item *item, struct kvs_item_progress *progress, kv_status_t status)
{
    progress->state = KVS_ITEM_OVER;
    if (status != KV_OK && !progress->has_failed) {
        progress->has_failed = true;
        item_failed(item, status);
    }
}

static void op_free(struct kvs_job_op *op)
{
    *op->link = op->next;
    if (op->next != NULL)
        op->next->link = op->link;
    op->tier->ops_bytes -= op->bytes;
    for (unsigned i = 0; i < op->n_owners; i++)
        kvs_block_unpin(op->tier->store, op->owners[i]);
    if (op->pinned != NULL)
        kvs_block_unpin(op->tier->store, op->pinned);
    free(op);
}

static void op_done(void *arg, kv_status_t status, size_t bytes)
{
    struct kvs_job_op *op = arg;
    struct kvs_job *job = &op->tier->jobs[op->job];
    struct kvs_item_progress *progress = &job->progress[op->item];

    (void)bytes;
    progress->n_ops--;
    if (status == KV_OK) {
        kvs_tier_count(&op->tier->counts.written_bytes, op->bytes);
    } else {
        kvs_tier_count(&op->tier->counts.failed, 1);
        /* Codes that the disk has not are made again; a block may leave without. */
        if (op->job != KVS_TIER_LEAVE)
            item_over(&job->items[op->item], progress, status);
    }
    op_free(op);
}

static struct kvs_job_op *op_create(struct kvs_disk_tier *tier,
                                    enum kvs_tier_job job,
                                    uint32_t item,
                                    struct kvs_block *pinned,
                                    size_t memory_bytes)
{
    struct kvs_job_op *op = malloc(sizeof(*op) + memory_bytes);

    if (op == NULL)
        return NULL;
    *op = (struct kvs_job_op){.tier = tier, .job = job, .item = item, .pinned = pinned};
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
static bool op_start(struct kvs_job_op *op, const struct kv_disk_write *writes, unsigned n)
{
    struct kvs_disk_tier *tier = op->tier;
    struct kvs_job *job = &tier->jobs[op->job];
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
        item_over(&job->items[op->item], &job->progress[op->item], status);
    op_free(op);
    return status != KV_BUSY;
}

/* ---- saving ------------------------------------------------------------------------------- */

/* Whether the segment of a block, or of one under it, can be saved now: KV_CORRUPT: some of its rows are bad
 * in memory; KV_NOT_READY: they are not all there. */
static kv_status_t can_save(struct kvs_block *block, uint32_t at)
{
    const struct kvs_block *owner = kvs_block_owner(block, at);
    const struct kvs_segment *segment = &owner->segments[at];

    if (kvs_segment_has_bad(owner, at))
        return KV_CORRUPT;
    return segment->rows != 0 && kvs_segment_is_here(owner, at) &&
                   segment->n_written == KV_BLOCK_TOKENS
               ? KV_OK
               : KV_NOT_READY;
}

/* Shows the rows of a segment, of the block or one under it, which stay where they are until the write is
 * over.  Fails as can_save(). */
static kv_status_t borrow(struct kvs_job_op *op,
                          struct kvs_block *block,
                          uint32_t at,
                          struct kvs_segment_image *ret_image)
{
    struct kvs_block *owner = kvs_block_owner(block, at);
    kv_status_t status = can_save(block, at);

    if (status == KV_OK && !kvs_block_image(op->tier->store, owner, at, ret_image))
        status = KV_NOT_READY;
    if (status != KV_OK)
        return status;
    owner->pins++;
    op->owners[op->n_owners++] = owner;
    return KV_OK;
}

/* Gives the disk some segments of an item.  Returns false if nothing more can be done now. */
static bool save_some(struct kvs_disk_tier *tier, uint32_t i)
{
    struct kvs_job *job = &tier->jobs[KVS_TIER_SAVE];
    struct kvs_tier_item *item = &job->items[i];
    struct kvs_item_progress *progress = &job->progress[i];
    struct kvs_block *block = block_of(tier, item);
    const struct kv_placement_units units = units_of(tier, item);
    struct kvs_saved_key keys[KVS_SEGMENTS_AT_ONCE];
    struct kv_disk_write writes[KVS_SEGMENTS_AT_ONCE];
    struct kvs_saved_tail *tails;
    struct kvs_job_op *op;
    unsigned n = 0;

    if (block == NULL || block->n_segments != units.n) {
        /* Without units here there is nothing to do, but if it has left the index meanwhile. */
        item_over(item, progress, units.n == 0 ? KV_OK : KV_NOT_FOUND);
        return true;
    }
    op = op_create(tier, KVS_TIER_SAVE, i, block, KVS_SEGMENTS_AT_ONCE * sizeof(*tails));
    if (op == NULL) {
        item_over(item, progress, KV_NO_MEMORY);
        return true;
    }
    tails = (struct kvs_saved_tail *)op->memory;
    for (; n < KVS_SEGMENTS_AT_ONCE && progress->at < block->n_segments; n++, progress->at++) {
        const uint32_t at = progress->at;
        struct kvs_segment_image image;
        const kv_status_t status = borrow(op, block, at, &image);

        if (status != KV_OK) {
            item_over(item, progress, status);
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
    if (progress->state != KVS_ITEM_OVER && progress->at == block->n_segments)
        progress->state = KVS_ITEM_UNDER_WAY;
    return true;
}

/* All segments of an item that were given to the disk are written. */
static void saved_all(struct kvs_disk_tier *tier, struct kvs_tier_item *item)
{
    struct kvs_block *block = block_of(tier, item);

    if (block == NULL || !know(tier, item, block))
        item_failed(item, block == NULL ? KV_NOT_FOUND : KV_NO_MEMORY);
}

static bool save_step(struct kvs_disk_tier *tier, uint32_t i)
{
    struct kvs_job *job = &tier->jobs[KVS_TIER_SAVE];
    struct kvs_item_progress *progress = &job->progress[i];
    const struct kvs_block *block = block_of(tier, &job->items[i]);

    if (progress->state == KVS_ITEM_TO_DO)
        return tier->ops_bytes < KVS_TIER_WRITING && save_some(tier, i);
    if (progress->n_ops > 0)
        return false;
    if (progress->n_learnt == 0)
        saved_all(tier, &job->items[i]);
    /* Of its rows, before they were saved; of what comes later the indexer tells. */
    if (block != NULL && progress->n_learnt < block->n_segments) {
        if (kvs_values_are_many(tier) ||
            !kvs_tier_keep_columns(tier, block, progress->n_learnt))
            return false;
        kvs_tier_keep_learnt(tier, block, progress->n_learnt++);
        return true;
    }
    progress->state = KVS_ITEM_OVER;
    return true;
}

/* ---- leaving ------------------------------------------------------------------------------ */

/* Writes copies of some segments' codes, which may be replaced meanwhile. */
static bool write_codes(struct kvs_disk_tier *tier, uint32_t i, struct kvs_saved *saved)
{
    struct kvs_job *job = &tier->jobs[KVS_TIER_LEAVE];
    struct kvs_item_progress *progress = &job->progress[i];
    const struct kvs_block *block = saved->block;
    struct kvs_saved_key keys[KVS_SEGMENTS_AT_ONCE];
    struct kv_disk_write writes[KVS_SEGMENTS_AT_ONCE];

    uint32_t ats[KVS_SEGMENTS_AT_ONCE], at = progress->at;
    size_t bytes = 0;
    unsigned n = 0;

    for (; n < KVS_SEGMENTS_AT_ONCE && at < block->n_segments; at++)
        if (has_new_codes(tier, saved, at)) {
            ats[n++] = at;
            bytes += kvs_block_codes(block, at)->column.n_bytes + TAIL_BYTES;
        }
    if (n > 0) {
        struct kvs_job_op *op = op_create(tier, KVS_TIER_LEAVE, i, NULL, bytes);
        uint8_t *copy;

        if (op == NULL) {
            item_over(&job->items[i], progress, KV_NO_MEMORY);
            return true;
        }
        copy = (uint8_t *)op->memory;
        for (unsigned j = 0; j < n; j++) {
            const struct kvs_kept_column kept = kvs_codes_kept(tier, saved, ats[j]);
            const size_t n_bytes = kept.column->n_bytes + TAIL_BYTES;

            keys[j] = kvs_saved_key_at(saved, KVS_SAVED_CODES, ats[j]);
            kvs_column_value_make(&kept, &keys[j], copy);
            writes[j] = (struct kv_disk_write){.key = &keys[j],
                                               .key_bytes = sizeof(keys[j]),
                                               .value = copy,
                                               .value_bytes = n_bytes};
            copy += n_bytes;
            saved->codes_on_disk[ats[j]] = kvs_codes_fingerprint(kept.column, kept.identity);
        }
        if (!op_start(op, writes, n)) {
            for (unsigned j = 0; j < n; j++)
                saved->codes_on_disk[ats[j]] = 0;
            return false;
        }
    }
    if (progress->state != KVS_ITEM_OVER) {
        progress->at = (uint16_t)at;
        if (at == block->n_segments)
            progress->state = KVS_ITEM_UNDER_WAY;
    }
    return true;
}

/* Marks a block to leave whose codes the disk has. */
static bool mark(struct kvs_disk_tier *tier, uint32_t i, struct kvs_saved *saved)
{
    struct kvs_job *job = &tier->jobs[KVS_TIER_LEAVE];
    struct kvs_item_progress *progress = &job->progress[i];

    if (tier->store->n_leaving == KVS_LEAVING_MAX)
        return false;
    if (kvs_block_leave(tier->store, saved->block) == KV_OK)
        progress->state = KVS_ITEM_LEAVING;
    else
        item_over(&job->items[i], progress, KV_BUSY);
    return true;
}

static bool leave_step(struct kvs_disk_tier *tier, uint32_t i)
{
    struct kvs_job *job = &tier->jobs[KVS_TIER_LEAVE];
    struct kvs_tier_item *item = &job->items[i];
    struct kvs_item_progress *progress = &job->progress[i];
    struct kvs_block *block = block_of(tier, item);
    struct kvs_saved *saved = block != NULL ? saved_of(tier, block) : NULL;

    if (progress->n_ops > 0)
        return false;
    if (saved == NULL || saved->is_doomed || block->residency == KVS_ABSENT) {
        /* It has none here, has left the index, or has left memory already. */
        item_over(item, progress, KV_OK);
        return true;
    }
    if (saved->preferred == tier->preference) {
        item_over(item, progress, KV_BUSY); /* somebody needs it now */
        return true;
    }
    if (progress->state == KVS_ITEM_TO_DO &&
        kvs_value_is_written(tier, &saved->home, &saved->name))
        return false; /* it is to be there when they come back */
    /* Who else waits for it asks again when it is his turn. */
    kvs_load_give_up(tier, saved);
    switch ((enum kvs_item_state)progress->state) {
    case KVS_ITEM_TO_DO:
        if (block->under != NULL)
            kvs_block_settle(tier->store, block);
        if (block->under != NULL || block->n_own < block->n_segments) {
            item_over(item, progress, KV_BUSY);
            return true;
        }
        if (progress->at == 0 && !have_new_codes(tier, saved))
            return mark(tier, i, saved);
        return tier->ops_bytes < KVS_TIER_WRITING && write_codes(tier, i, saved);
    case KVS_ITEM_UNDER_WAY:
        progress->at = 0;
        progress->state = KVS_ITEM_TO_DO;
        if (++progress->n_tries > CODES_TRIES)
            item_over(item, progress, KV_BUSY);
        return true;
    case KVS_ITEM_LEAVING:
        if (block->residency == KVS_LEAVING)
            return false;
        item_over(item, progress, KV_BUSY); /* somebody needed it: it stays */
        return true;
    case KVS_ITEM_OVER:
        break;
    }
    return false;
}

/* ---- erasing ------------------------------------------------------------------------------ */

/* Whether the disk is the only place that has rows of the item, which a session still needs. */
static bool is_needed(const struct kvs_disk_tier *tier, const struct kvs_tier_item *item)
{
    for (const struct kvs_saved *saved = tier->doomed; saved != NULL;
         saved = saved->next_doomed)
        if (memcmp(&saved->home, &item->home, sizeof(item->home)) == 0 &&
            memcmp(&saved->name, &item->name, sizeof(item->name)) == 0)
            return true;
    return false;
}

static bool erase_some(struct kvs_disk_tier *tier, uint32_t i)
{
    struct kvs_job *job = &tier->jobs[KVS_TIER_ERASE];
    const struct kvs_tier_item *item = &job->items[i];
    struct kvs_item_progress *progress = &job->progress[i];
    const struct kv_placement_units units = units_of(tier, item);
    struct kvs_job_op *op = op_create(tier, KVS_TIER_ERASE, i, NULL, 0);
    struct kvs_saved_key keys[ERASE_AT_ONCE * KVS_SAVED_KINDS];
    struct kv_disk_write writes[ERASE_AT_ONCE * KVS_SAVED_KINDS];
    uint32_t at = progress->at;
    unsigned n = 0;

    if (op == NULL) {
        item_over(&job->items[i], progress, KV_NO_MEMORY);
        return true;
    }
    for (unsigned end = at + ERASE_AT_ONCE; at < units.n && at < end; at++)
        for (unsigned kind = 0; kind < KVS_SAVED_KINDS; kind++, n++) {
            keys[n] =
                kvs_saved_key(&item->home, &item->name, kind, units.first + at * units.step);
            writes[n] = (struct kv_disk_write){.key = &keys[n], .key_bytes = sizeof(keys[n])};
        }
    if (!op_start(op, writes, n))
        return false;
    if (progress->state != KVS_ITEM_OVER) {
        progress->at = (uint16_t)at;
        if (at == units.n)
            progress->state = KVS_ITEM_UNDER_WAY;
    }
    return true;
}

static bool erase_step(struct kvs_disk_tier *tier, uint32_t i)
{
    struct kvs_job *job = &tier->jobs[KVS_TIER_ERASE];
    struct kvs_tier_item *item = &job->items[i];
    struct kvs_item_progress *progress = &job->progress[i];
    const struct kvs_block *block = block_of(tier, item);
    struct kvs_saved *saved = block != NULL ? saved_of(tier, block) : NULL;

    if (progress->n_ops > 0)
        return false;
    if (progress->state == KVS_ITEM_UNDER_WAY || units_of(tier, item).n == 0) {
        item_over(item, progress, KV_OK);
        return true;
    }
    if (is_needed(tier, item)) {
        item_over(item, progress, KV_BUSY);
        return true;
    }
    if (kvs_value_is_written(tier, &item->home, &item->name))
        return false; /* it would be there after this */
    /* It could not be saved on all data threads, and was on this one. */
    if (saved != NULL && kvs_block_is_here(block)) {
        kvs_saved_drop(tier, saved);
    } else if (saved != NULL) {
        kvs_disk_tier_release(tier, block);
        item_over(item, progress, KV_BUSY);
        return true;
    }
    return erase_some(tier, i);
}

/* ---- what the others need ------------------------------------------------------------------- */

struct kvs_saved *kvs_saved_any(const struct kvs_disk_tier *tier, const struct kvs_block *block)
{
    return saved_of(tier, block);
}

struct kvs_saved *kvs_saved_of_block(const struct kvs_disk_tier *tier,
                                     const struct kvs_block *block)
{
    struct kvs_saved *saved = saved_of(tier, block);

    return saved != NULL && !saved->is_doomed ? saved : NULL;
}

struct kvs_saved *kvs_saved_of_item(const struct kvs_disk_tier *tier,
                                    const struct kvs_tier_item *item)
{
    const struct kvs_block *block = block_of(tier, item);

    return block != NULL ? kvs_saved_of_block(tier, block) : NULL;
}

bool kvs_can_mend(const struct kvs_saved *saved, uint32_t at)
{
    return can_save(saved->block, at) == KV_OK;
}

/* A row that has gone bad in memory, and is not known to be, is written as it is: its own CRC says so
 * to whoever reads it. */
bool kvs_mend(struct kvs_disk_tier *tier,
              uint32_t i,
              const struct kvs_saved *saved,
              uint32_t at)
{
    const struct kvs_saved_key key = kvs_saved_key_at(saved, KVS_SAVED_ROWS, at);
    struct kvs_saved_tail *tail;
    struct kvs_segment_image image;
    struct kvs_job_op *op =
        op_create(tier, KVS_TIER_VERIFY, i, saved->block, sizeof(struct kvs_saved_tail));

    if (op == NULL)
        return false;
    if (borrow(op, saved->block, at, &image) != KV_OK) {
        op_free(op);
        return false;
    }
    tail = (struct kvs_saved_tail *)op->memory;
    kvs_saved_tail_make(tail, &key, image.rows, image.rows_bytes, image.crcs);
    const struct kv_disk_write write = {.key = &key,
                                        .key_bytes = sizeof(key),
                                        .value = image.rows,
                                        .value_bytes = image.rows_bytes,
                                        .tail = tail,
                                        .tail_bytes = sizeof(*tail)};
    return op_start(op, &write, 1);
}

/* ---- all jobs ----------------------------------------------------------------------------- */

static bool (*const steps[KVS_TIER_JOBS])(struct kvs_disk_tier *tier, uint32_t i) = {
    [KVS_TIER_SAVE] = save_step,
    [KVS_TIER_LEAVE] = leave_step,
    [KVS_TIER_ERASE] = erase_step,
    [KVS_TIER_VERIFY] = kvs_verify_item,
};

static bool is_item_over(const struct kvs_item_progress *progress)
{
    return progress->state == KVS_ITEM_OVER && progress->n_ops == 0;
}

static bool job_step(struct kvs_disk_tier *tier, enum kvs_tier_job kind)
{
    struct kvs_job *job = &tier->jobs[kind];
    struct kv_slice slice = kv_slice_begin(tier->clock, 1);
    bool has_moved = false;

    if (job->items == NULL)
        return false;
    for (uint32_t i = job->first; i < job->n; i++) {
        while (job->progress[i].state != KVS_ITEM_OVER && steps[kind](tier, i)) {
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
    *job = (struct kvs_job){0};
    tier->job_done(tier->arg, kind);
    return true;
}

void kvs_disk_tier_begin(struct kvs_disk_tier *tier,
                         enum kvs_tier_job kind,
                         struct kvs_tier_item *items,
                         uint32_t n)
{
    struct kvs_job *job = &tier->jobs[kind];

    assert(job->items == NULL && n > 0);
    *job = (struct kvs_job){
        .items = items, .progress = calloc(n, sizeof(job->progress[0])), .n = n};
    if (job->progress != NULL)
        return;
    for (uint32_t i = 0; i < n; i++)
        item_failed(&items[i], KV_NO_MEMORY);
    *job = (struct kvs_job){0};
    tier->job_done(tier->arg, kind);
}

/* ---- what the store calls ----------------------------------------------------------------- */

static bool keep(void *arg, const struct kvs_block *block)
{
    struct kvs_disk_tier *tier = arg;
    struct kvs_saved *saved = saved_of(tier, block);

    if (saved == NULL || saved->is_doomed || have_new_codes(tier, saved) ||
        kvs_value_is_written(tier, &saved->home, &saved->name))
        return false;
    kvs_saved_is_away(tier, saved);
    kvs_tier_count(&tier->counts.left_blocks, 1);
    return true;
}

static void forget(void *arg, const struct kvs_block *block)
{
    struct kvs_disk_tier *tier = arg;
    struct kvs_saved *saved = saved_of(tier, block);

    kvs_load_give_up(tier, saved);
    kvs_saved_drop(tier, saved);
}

static const struct kvs_tier tier_ops = {.keep = keep,
                                         .load = kvs_tier_load,
                                         .want = kvs_tier_want,
                                         .prefer_none = kvs_tier_prefer_none,
                                         .prefer = kvs_tier_prefer,
                                         .forget = forget,
                                         .keep_learnt = kvs_tier_keep_learnt,
                                         .recall_learnt = kvs_tier_recall_learnt,
                                         .end_recall = kvs_tier_end_recall,
                                         .keep_columns = kvs_tier_keep_columns,
                                         .recall_columns = kvs_tier_recall_columns,
                                         .recalled = kvs_tier_recalled,
                                         .may_recall = kvs_tier_may_recall};

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
    tier->wanted_end = &tier->wanted;
    tier->ahead_end = &tier->ahead;
    tier->preference = 1;
    tier->page_class = -1;
    tier->page = KVS_PAGE_NONE;
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
    struct kvs_saved *saved;
    size_t cursor = 0;

    if (tier == NULL)
        return;
    kvs_disk_tier_stop(tier);
    /* What was under way. */
    for (struct kvs_job_op *op = tier->ops, *next; op != NULL; op = next) {
        next = op->next;
        free(op);
    }
    kvs_loads_close(tier);
    kvs_verify_close(tier);
    kvs_tier_columns_close(tier);
    kvs_tier_learnt_close(tier);
    for (unsigned i = 0; i < KVS_TIER_JOBS; i++)
        free(tier->jobs[i].progress);
    while ((saved = kv_map_next(tier->saved, &cursor)) != NULL)
        free(saved);
    kv_map_destroy(tier->saved);
    free(tier);
}

/* Whether verification has something to do that no end of a read would wake the thread for: its turn
 * comes, but not in every step. */
static bool is_verify_due(const struct kvs_disk_tier *tier)
{
    return tier->jobs[KVS_TIER_VERIFY].items != NULL && tier->verifying == NULL &&
           !kvs_disk_tier_is_loading(tier);
}

bool kvs_disk_tier_step(struct kvs_disk_tier *tier)
{
    bool has_moved = kv_disk_progress(tier->queue) > 0;

    has_moved = kvs_load_step(tier) || has_moved;
    has_moved = kvs_let_go_step(tier) || has_moved;
    has_moved = kvs_values_sync(tier) || has_moved;
    for (unsigned job = 0; job < KVS_TIER_VERIFY; job++)
        has_moved = job_step(tier, job) || has_moved;
    return has_moved || is_verify_due(tier);
}

bool kvs_disk_tier_verify(struct kvs_disk_tier *tier)
{
    if (kvs_disk_tier_is_loading(tier))
        return false; /* whoever needs these has the disk, and the time, to himself */
    return kvs_verify_judge(tier) || job_step(tier, KVS_TIER_VERIFY);
}

void kvs_disk_tier_release(struct kvs_disk_tier *tier, const struct kvs_block *block)
{
    struct kvs_saved *saved = saved_of(tier, block);

    if (saved == NULL || saved->is_doomed)
        return;
    if (kvs_block_is_here(block)) {
        kvs_saved_drop(tier, saved);
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
        struct kvs_saved *saved = saved_of(tier, block);

        for (uint32_t at = 0; at < n; at++)
            saved->codes_on_disk[at] = KVS_CODES_UNKNOWN;
        tier->has_adopted = true;
        kvs_saved_is_away(tier, saved);
        return block;
    }
    kvs_block_unref(tier->store, block);
    return NULL;
}

bool kvs_disk_tier_is_loading(const struct kvs_disk_tier *tier)
{
    return tier->wanted != NULL || tier->ahead != NULL;
}

const struct kvs_tier_counts *kvs_disk_tier_counts(const struct kvs_disk_tier *tier)
{
    return &tier->counts;
}

void kvs_disk_tier_visit_pins(const struct kvs_disk_tier *tier,
                              void (*visit)(void *arg, const struct kvs_block *block),
                              void *arg)
{
    for (const struct kvs_job_op *op = tier->ops; op != NULL; op = op->next) {
        if (op->pinned != NULL)
            visit(arg, op->pinned);
        for (unsigned i = 0; i < op->n_owners; i++)
            visit(arg, op->owners[i]);
    }
}
