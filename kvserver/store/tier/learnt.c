/* learnt.c - what was learnt of a chapter's rows, beside its last block: written when it has been
 * learnt of saved rows (of others: when they are saved, disk_tier.c), and read before it would be
 * learnt again. */
#include "kvserver/store/tier/disk_tier_private.h"

#include "kvserver/base/clock.h"

#include <stdlib.h>

enum {
    READS_MAX = 4,            /* at once: the disk stands still if so many are under way */
    PATIENCE_US = 500 * 1000, /* after which it is quicker to learn it again */
    SYNC_US = 500 * 1000,     /* between two syncs */
};

static struct kvs_value_op *op_create(struct kvs_disk_tier *tier,
                                      const struct kvs_saved *saved,
                                      enum kvs_saved_kind kind,
                                      uint32_t at,
                                      size_t bytes,
                                      size_t tail_bytes,
                                      struct kvs_value_op **list)
{
    struct kvs_value_op *op = malloc(sizeof(*op) + bytes + tail_bytes);

    if (op == NULL)
        return NULL;
    *op = (struct kvs_value_op){.tier = tier,
                                .key = kvs_saved_key_at(saved, kind, at),
                                .bytes = bytes,
                                .since_us = kv_clock_now(tier->clock),
                                .next = *list,
                                .link = list};
    if (op->next != NULL)
        op->next->link = &op->next;
    *list = op;
    return op;
}

static void op_free(struct kvs_value_op *op)
{
    *op->link = op->next;
    if (op->next != NULL)
        op->next->link = op->link;
    free(op);
}

/* ---- writing ------------------------------------------------------------------------------ */

static void value_drop(struct kvs_value_op *op)
{
    op->tier->value_bytes -= op->bytes;
    op->tier->n_values--;
    op_free(op);
}

/* The disk has not got them.  The block may have gone, and another be in its place. */
static void forget_codes(const struct kvs_value_op *op)
{
    struct kvs_saved *saved = kvs_saved_of_block(op->tier, op->block);

    if (saved != NULL && op->at < saved->units.n &&
        memcmp(op->key.bytes, &saved->home, sizeof(saved->home)) == 0 &&
        memcmp(op->key.bytes + sizeof(saved->home), &saved->name, sizeof(saved->name)) == 0 &&
        saved->codes_on_disk[op->at] == op->fingerprint)
        saved->codes_on_disk[op->at] = 0;
}

static void write_done(void *arg, kv_status_t status, size_t bytes)
{
    struct kvs_value_op *op = arg;

    (void)bytes;
    kvs_tier_count(status == KV_OK ? &op->tier->counts.written_bytes : &op->tier->counts.failed,
                   status == KV_OK ? op->bytes : 1);
    if (status != KV_OK && op->block != NULL)
        forget_codes(op);
    if (status == KV_OK && op->tier->unsynced_us == 0)
        op->tier->unsynced_us = kv_clock_now(op->tier->clock);
    value_drop(op);
}

struct kvs_value_op *kvs_value_begin(struct kvs_disk_tier *tier,
                                     const struct kvs_saved *saved,
                                     enum kvs_saved_kind kind,
                                     uint32_t at,
                                     size_t bytes,
                                     size_t tail_bytes)
{
    struct kvs_value_op *op =
        kind == KVS_SAVED_LEARNT || !kvs_values_are_many(tier)
            ? op_create(tier, saved, kind, at, bytes, tail_bytes, &tier->value_writes)
            : NULL;

    if (op != NULL) {
        tier->value_bytes += bytes;
        tier->n_values++;
    }
    return op;
}

kv_status_t kvs_value_write(struct kvs_value_op *op, size_t tail_bytes)
{
    const struct kv_disk_write write = {.key = &op->key,
                                        .key_bytes = sizeof(op->key),
                                        .value = op->memory,
                                        .value_bytes = op->bytes + tail_bytes};

    const kv_status_t status =
        kv_disk_write(op->tier->queue, KV_DISK_ROWS, &write, 1, write_done, op);

    if (status != KV_OK)
        value_drop(op);
    return status;
}

static void synced(void *arg, kv_status_t status, size_t bytes)
{
    struct kvs_disk_tier *tier = arg;

    (void)bytes;
    tier->is_syncing = false;
    if (status != KV_OK && tier->unsynced_us == 0)
        tier->unsynced_us = kv_clock_now(tier->clock);
}

/* Saved blocks are synced by whoever saves them, but a chapter may have its codes long after. */
bool kvs_values_sync(struct kvs_disk_tier *tier)
{
    const uint64_t now_us = kv_clock_now(tier->clock);

    if (tier->unsynced_us == 0 || tier->is_syncing || now_us - tier->unsynced_us < SYNC_US)
        return false;
    tier->is_syncing = kv_disk_sync(tier->queue, synced, tier) == KV_OK;
    tier->unsynced_us = tier->is_syncing ? 0 : now_us;
    return true;
}

/* Does nothing if the disk has enough to do: then it is learnt again one day. */
void kvs_tier_keep_learnt(void *arg, const struct kvs_block *block, uint32_t at)
{
    struct kvs_disk_tier *tier = arg;
    const struct kvs_segment_store *store = tier->store;
    const struct kvs_saved *saved = kvs_saved_of_block(tier, block);
    struct kvs_saved_learnt_tail tail;
    struct kvs_value_op *op;
    size_t bytes;

    if (saved == NULL || tier->queue == NULL)
        return;
    bytes = store->learnt(store->release_arg, block, at, saved->depth, NULL);
    op = bytes > 0 ? kvs_value_begin(tier, saved, KVS_SAVED_LEARNT, at, bytes, sizeof(tail))
                   : NULL;
    if (op == NULL)
        return;
    if (store->learnt(store->release_arg, block, at, saved->depth, op->memory) == 0) {
        value_drop(op);
        return;
    }
    kvs_saved_learnt_tail_make(&tail, &op->key, op->memory, bytes);
    memcpy((uint8_t *)op->memory + bytes, &tail, sizeof(tail));
    (void)kvs_value_write(op, sizeof(tail));
}

bool kvs_value_is_written(const struct kvs_disk_tier *tier,
                          const struct kv_id128 *home,
                          const struct kv_id128 *name)
{
    for (const struct kvs_value_op *op = tier->value_writes; op != NULL; op = op->next)
        if (memcmp(op->key.bytes, home, sizeof(*home)) == 0 &&
            memcmp(op->key.bytes + sizeof(*home), name, sizeof(*name)) == 0)
            return true;
    return false;
}

/* ---- reading ------------------------------------------------------------------------------ */

static void read_free(struct kvs_value_op *op)
{
    op->tier->n_learnt_reads--;
    op_free(op);
}

static void read_done(void *arg, kv_status_t status, size_t bytes)
{
    struct kvs_value_op *op = arg;
    struct kvs_disk_tier *tier = op->tier;
    struct kvs_saved_learnt_tail tail;

    if (status == KV_OK) {
        kvs_tier_count(&tier->counts.loaded_bytes, bytes);
        memcpy(&tail, (const uint8_t *)op->memory + op->bytes, sizeof(tail));
        const enum kvs_saved_state state =
            bytes != op->bytes + sizeof(tail)
                ? KVS_SAVED_OF_NO_USE
                : kvs_saved_learnt_state(&tail, &op->key, op->memory, op->bytes);

        kvs_tier_count(&tier->counts.bad_columns, state == KVS_SAVED_DAMAGED);
        if (state != KVS_SAVED_RIGHT)
            status = KV_NOT_FOUND;
    } else if (status != KV_NOT_FOUND) {
        kvs_tier_count(&tier->counts.failed, 1);
        status = KV_NOT_FOUND;
    }
    op->status = status;
    if (op->is_given_up)
        read_free(op);
}

static kv_status_t begin_read(struct kvs_disk_tier *tier,
                              const struct kvs_block *block,
                              uint32_t at,
                              size_t n_bytes)
{
    const struct kvs_saved *saved = kvs_saved_of_block(tier, block);
    struct kvs_value_op *op;

    if (saved == NULL || tier->queue == NULL || tier->n_learnt_reads >= READS_MAX)
        return KV_NOT_FOUND;
    op = op_create(tier, saved, KVS_SAVED_LEARNT, at, n_bytes,
                   sizeof(struct kvs_saved_learnt_tail), &tier->learnt_reads);
    if (op == NULL)
        return KV_NOT_FOUND;
    tier->n_learnt_reads++;
    op->status = KV_BUSY;
    tier->recall = op;
    return KV_IN_PROGRESS;
}

/* Gives the disk a read that it has not taken yet: it may have enough to do now. */
static void start_read(struct kvs_value_op *op)
{
    const kv_status_t status =
        op->status == KV_BUSY
            ? kv_disk_read(op->tier->queue, KV_DISK_ROWS, &op->key, sizeof(op->key), op->memory,
                           op->bytes + sizeof(struct kvs_saved_learnt_tail), read_done, op)
            : KV_BUSY;

    if (status != KV_BUSY)
        op->status = status == KV_OK ? KV_IN_PROGRESS : KV_NOT_FOUND;
}

kv_status_t kvs_tier_recall_learnt(void *arg,
                                   const struct kvs_block *block,
                                   uint32_t at,
                                   size_t n_bytes,
                                   const void **ret_bytes)
{
    struct kvs_disk_tier *tier = arg;
    kv_status_t status;

    if (tier->recall == NULL && begin_read(tier, block, at, n_bytes) != KV_IN_PROGRESS)
        return KV_NOT_FOUND;
    struct kvs_value_op *op = tier->recall;
    start_read(op);
    status = op->status == KV_BUSY ? KV_IN_PROGRESS : op->status;
    if (status == KV_IN_PROGRESS && kv_clock_now(tier->clock) - op->since_us >= PATIENCE_US)
        status = KV_NOT_FOUND;
    if (status == KV_OK)
        *ret_bytes = op->memory;
    else if (status != KV_IN_PROGRESS)
        kvs_tier_end_recall(tier);
    return status;
}

void kvs_tier_end_recall(void *arg)
{
    struct kvs_disk_tier *tier = arg;
    struct kvs_value_op *op = tier->recall;

    kvs_columns_end(tier);
    tier->recall = NULL;
    if (op == NULL)
        return;
    op->is_given_up = true;
    if (op->status != KV_IN_PROGRESS)
        read_free(op);
}

/* ---- the end ------------------------------------------------------------------------------ */

void kvs_tier_learnt_close(struct kvs_disk_tier *tier)
{
    while (tier->value_writes != NULL)
        value_drop(tier->value_writes);
    while (tier->learnt_reads != NULL)
        read_free(tier->learnt_reads);
    tier->recall = NULL;
}
