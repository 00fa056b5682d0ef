/* columns.c - codes and summaries, beside the last block that each is of: written when they have been made of
 * saved rows (of others: when they are saved, disk_tier.c), and read before rows would be.  Those that
 * verification finds damaged, and codebooks, are replaced. */
#include "kvserver/store/tier/disk_tier_private.h"

#include "kernels/checksum.h"
#include "kvserver/base/clock.h"

#include <assert.h>
#include <stdlib.h>

enum {
    COLUMN_ALIGN = 8,
    READS_MAX = 32,           /* at once */
    PATIENCE_US = 500 * 1000, /* after which nothing has come, and rows are read instead */
};

static const enum kvs_column_kind kinds[] = {KVS_COLUMN_CODES, KVS_COLUMN_SUMMARIES};

static enum kvs_saved_kind saved_kind(enum kvs_column_kind kind)
{
    return kind == KVS_COLUMN_CODES ? KVS_SAVED_CODES : KVS_SAVED_SUMMARIES;
}

static enum kvs_column_kind column_kind(enum kvs_saved_kind kind)
{
    return kind == KVS_SAVED_CODES ? KVS_COLUMN_CODES : KVS_COLUMN_SUMMARIES;
}

/* ---- writing ------------------------------------------------------------------------------ */

static bool give(const struct kvs_disk_tier *tier,
                 const struct kvs_saved *saved,
                 enum kvs_column_kind kind,
                 uint32_t at,
                 struct kvs_kept_column *ret_column)
{
    const struct kvs_segment_store *store = tier->store;

    return store->kept != NULL &&
           store->kept(store->release_arg, kind, saved->block, at, saved->depth, ret_column);
}

struct kvs_kept_column
kvs_codes_kept(const struct kvs_disk_tier *tier, const struct kvs_saved *saved, uint32_t at)
{
    struct kvs_kept_column column;

    if (!give(tier, saved, KVS_COLUMN_CODES, at, &column))
        column = (struct kvs_kept_column){.column = &kvs_block_codes(saved->block, at)->column};
    return column;
}

void kvs_column_value_make(const struct kvs_kept_column *kept,
                           const struct kvs_saved_key *key,
                           void *ret_value)
{
    const size_t n_bytes = kept->column->n_bytes;
    /* Bad bytes would be good ones for the next process. */
    struct kvs_saved_column_tail tail = {
        .identity = kvs_column_is_sound(kept->column) ? kept->identity : 0,
        .block_begin = kept->block_begin,
        .n_blocks = kept->n_blocks,
    };

    memcpy(ret_value, kept->column->bytes, n_bytes);
    kvs_saved_column_tail_make(&tail, key, ret_value, n_bytes);
    memcpy((uint8_t *)ret_value + n_bytes, &tail, sizeof(tail));
}

uint32_t kvs_codes_fingerprint(const struct kvs_column *column, uint32_t identity)
{
    return kv_crc32c(identity, &column->crc, sizeof(column->crc)) | 1;
}

/* Returns false if it is to be tried again later. */
static bool keep(struct kvs_disk_tier *tier,
                 struct kvs_saved *saved,
                 enum kvs_column_kind kind,
                 uint32_t at)
{
    const size_t tail_bytes = sizeof(struct kvs_saved_column_tail);
    struct kvs_kept_column kept;
    struct kvs_value_op *op;

    if (!give(tier, saved, kind, at, &kept))
        return true;
    const uint32_t of = kvs_codes_fingerprint(kept.column, kept.identity);

    if ((kind == KVS_COLUMN_CODES && saved->codes_on_disk[at] == of) ||
        !kvs_column_is_sound(kept.column))
        return true;
    op = kvs_value_begin(tier, saved, saved_kind(kind), at, kept.column->n_bytes, tail_bytes);
    if (op == NULL)
        return !kvs_values_are_many(tier);
    kvs_column_value_make(&kept, &op->key, op->memory);
    if (kind == KVS_COLUMN_CODES) {
        op->block = saved->block;
        op->at = at;
        op->fingerprint = of;
    }
    const kv_status_t status = kvs_value_write(op, tail_bytes);

    if (status == KV_OK && kind == KVS_COLUMN_CODES)
        saved->codes_on_disk[at] = of;
    return status != KV_BUSY;
}

bool kvs_tier_keep_columns(void *arg, const struct kvs_block *block, uint32_t at)
{
    struct kvs_disk_tier *tier = arg;
    struct kvs_saved *saved = kvs_saved_of_block(tier, block);
    bool is_kept = true;

    if (saved == NULL || tier->queue == NULL)
        return true;
    for (unsigned i = 0; i < sizeof(kinds) / sizeof(kinds[0]) && is_kept; i++)
        is_kept = keep(tier, saved, kinds[i], at);
    return is_kept;
}

/* Whether memory has what is to be in its place. */
static bool is_in_memory(const struct kvs_disk_tier *tier,
                         const struct kvs_saved *saved,
                         enum kvs_saved_kind kind,
                         uint32_t at)
{
    const struct kvs_segment_store *store = tier->store;
    struct kvs_kept_column kept;

    if (kind == KVS_SAVED_LEARNT)
        return store->learnt(store->release_arg, saved->block, at, saved->depth, NULL) > 0;
    return give(tier, saved, column_kind(kind), at, &kept) && kvs_column_is_sound(kept.column);
}

bool kvs_tier_replace_damaged(struct kvs_disk_tier *tier,
                              struct kvs_saved *saved,
                              enum kvs_saved_kind kind,
                              uint32_t at)
{
    const struct kvs_saved_key key = kvs_saved_key_at(saved, kind, at);
    const struct kv_disk_write removal = {.key = &key, .key_bytes = sizeof(key)};

    if (kind == KVS_SAVED_CODES)
        saved->codes_on_disk[at] = 0;
    if (!is_in_memory(tier, saved, kind, at))
        return kv_disk_write(tier->queue, KV_DISK_ROWS, &removal, 1, NULL, NULL) != KV_BUSY;
    if (kind == KVS_SAVED_LEARNT) {
        kvs_tier_keep_learnt(tier, saved->block, at);
        return true;
    }
    return keep(tier, saved, column_kind(kind), at);
}

/* ---- reading ------------------------------------------------------------------------------ */

struct column_read {
    struct kvs_columns_recall *recall;
    struct kvs_saved_key key;
};

/* Columns that are read, all for one job. */
struct kvs_columns_recall {
    struct kvs_disk_tier *tier;

    uint32_t n, n_begun, n_under_way;
    uint32_t identity;
    size_t n_bytes, room, stride;
    uint64_t moved_us; /* when the last of them came */
    bool is_missing;   /* one of them could not be had: */
    bool is_gone;      /* it is not there, or not right */
    uint8_t *bytes;    /* (n, stride) each with its tail: room */
    struct column_read reads[];
};

static void recall_free(struct kvs_columns_recall *recall)
{
    free(recall->bytes);
    free(recall);
}

static void column_done(void *arg, kv_status_t status, size_t bytes);

/* Starts some. */
static void read_some(struct kvs_columns_recall *recall)
{
    while (!recall->is_missing && recall->n_begun < recall->n &&
           recall->n_under_way < READS_MAX) {
        struct column_read *read = &recall->reads[recall->n_begun];
        const kv_status_t status = kv_disk_read(
            recall->tier->queue, KV_DISK_ROWS, &read->key, sizeof(read->key),
            recall->bytes + recall->n_begun * recall->stride, recall->room, column_done, read);

        if (status == KV_BUSY)
            return; /* it has enough to do now */
        if (status != KV_OK) {
            recall->is_missing = true;
            return;
        }
        recall->n_begun++;
        recall->n_under_way++;
    }
}

static void column_done(void *arg, kv_status_t status, size_t bytes)
{
    const struct column_read *read = arg;
    struct kvs_columns_recall *recall = read->recall;
    struct kvs_disk_tier *tier = recall->tier;
    const uint8_t *column = recall->bytes + (size_t)(read - recall->reads) * recall->stride;
    struct kvs_saved_column_tail tail;

    recall->n_under_way--;
    recall->moved_us = kv_clock_now(tier->clock);
    if (status == KV_OK && bytes == recall->room) {
        kvs_tier_count(&tier->counts.loaded_bytes, bytes);
        memcpy(&tail, column + recall->n_bytes, sizeof(tail));
        const enum kvs_saved_state state =
            kvs_saved_column_state(&tail, &read->key, column, recall->n_bytes);

        if (state != KVS_SAVED_RIGHT ||
            (recall->identity != 0 && recall->identity != tail.identity))
            recall->is_missing = recall->is_gone = true;
        kvs_tier_count(&tier->counts.bad_columns, state == KVS_SAVED_DAMAGED);
    } else {
        if (status != KV_OK && status != KV_NOT_FOUND)
            kvs_tier_count(&tier->counts.failed, 1);
        recall->is_missing = true;
        recall->is_gone = recall->is_gone || status == KV_OK || status == KV_NOT_FOUND;
    }
    if (recall != tier->abandoned) {
        read_some(recall);
    } else if (recall->n_under_way == 0) {
        tier->abandoned = NULL;
        recall_free(recall);
    }
}

/* Returns false if there is no memory, or no disk any more. */
static bool begin(struct kvs_disk_tier *tier, const struct kvs_columns_asked *asked)
{
    const uint32_t n = kvs_columns_asked_n(asked);
    struct kvs_columns_recall *recall;

    if (tier->queue == NULL)
        return false;
    recall = calloc(1, sizeof(*recall) + n * sizeof(recall->reads[0]));
    if (recall == NULL)
        return false;
    recall->tier = tier;
    recall->n = n;
    recall->identity = asked->identity;
    recall->n_bytes = asked->n_bytes;
    recall->room = asked->n_bytes + sizeof(struct kvs_saved_column_tail);
    recall->stride = (recall->room + COLUMN_ALIGN - 1) / COLUMN_ALIGN * COLUMN_ALIGN;
    recall->moved_us = kv_clock_now(tier->clock);
    recall->bytes = malloc(n * recall->stride);
    recall->is_missing = recall->bytes == NULL;
    for (uint32_t i = 0; i < n && !recall->is_missing; i++) {
        const struct kvs_saved *saved =
            kvs_saved_of_block(tier, kvs_columns_asked_block(asked, i));

        recall->is_missing = saved == NULL;
        if (saved != NULL)
            recall->reads[i] = (struct column_read){
                recall, kvs_saved_key_at(saved, saved_kind(asked->kind), asked->at)};
    }
    tier->columns = recall;
    return true;
}

/* Records which codes the disk has of each segment; none if one is missing or wrong. */
static void note_codes(const struct kvs_disk_tier *tier, const struct kvs_columns_asked *asked)
{
    const struct kvs_columns_recall *recall = tier->columns;

    for (uint32_t i = 0; i < asked->n_blocks; i++) {
        struct kvs_saved *saved = kvs_saved_of_block(tier, asked->blocks[i]);
        struct kvs_column column = {0};

        if (saved == NULL)
            continue;
        saved->codes_on_disk[asked->at] = 0;
        if (recall->is_missing)
            continue;
        column.crc = kv_crc32c(0, recall->bytes + i * recall->stride, recall->n_bytes);
        saved->codes_on_disk[asked->at] = kvs_codes_fingerprint(&column, recall->identity);
    }
}

kv_status_t kvs_tier_recall_columns(void *arg, const struct kvs_columns_asked *asked)
{
    struct kvs_disk_tier *tier = arg;
    struct kvs_columns_recall *recall;

    /* Reads of an earlier one end first, or the disk stands still. */
    if (tier->columns == NULL && tier->abandoned != NULL)
        return kv_clock_now(tier->clock) - tier->abandoned->moved_us < PATIENCE_US
                   ? KV_IN_PROGRESS
                   : KV_NOT_FOUND;
    if (tier->columns == NULL && !begin(tier, asked))
        return KV_NOT_FOUND;
    recall = tier->columns;
    read_some(recall);
    if (!recall->is_missing && (recall->n_begun < recall->n || recall->n_under_way > 0)) {
        if (kv_clock_now(tier->clock) - recall->moved_us < PATIENCE_US)
            return KV_IN_PROGRESS;
        kvs_columns_end(tier);
        return KV_NOT_FOUND;
    }
    if (asked->kind == KVS_COLUMN_CODES &&
        (recall->is_gone || (recall->identity != 0 && !recall->is_missing)))
        note_codes(tier, asked);
    if (!recall->is_missing)
        return KV_OK;
    kvs_columns_end(tier);
    return KV_NOT_FOUND;
}

struct kvs_recalled kvs_tier_recalled(void *arg, uint32_t i)
{
    const struct kvs_disk_tier *tier = arg;
    const uint8_t *bytes = tier->columns->bytes + i * tier->columns->stride;
    struct kvs_saved_column_tail tail;

    memcpy(&tail, bytes + tier->columns->n_bytes, sizeof(tail));
    return (struct kvs_recalled){bytes, tail.block_begin, tail.n_blocks};
}

bool kvs_tier_may_recall(void *arg, const struct kvs_block *block, uint32_t at)
{
    const struct kvs_disk_tier *tier = arg;
    /* Who asks does so for each block of a session. */
    const struct kvs_saved *saved = tier->has_adopted ? kvs_saved_of_block(tier, block) : NULL;

    return saved != NULL && saved->codes_on_disk[at] == KVS_CODES_UNKNOWN;
}

void kvs_columns_end(struct kvs_disk_tier *tier)
{
    struct kvs_columns_recall *recall = tier->columns;

    tier->columns = NULL;
    if (recall == NULL)
        return;
    if (recall->n_under_way == 0) {
        recall_free(recall);
        return;
    }
    assert(tier->abandoned == NULL); /* none is begun before it has gone */
    tier->abandoned = recall;
}

void kvs_tier_columns_close(struct kvs_disk_tier *tier)
{
    struct kvs_columns_recall *const recalls[] = {tier->columns, tier->abandoned};

    for (unsigned i = 0; i < 2; i++)
        if (recalls[i] != NULL)
            recall_free(recalls[i]);
    tier->columns = tier->abandoned = NULL;
}
