/* verify.c - what is saved of blocks is read, and compared with its checksum: some values at once, of
 * one block after the other: rows, then what was made of them.
 *
 * A block may leave the index, memory, or come back while its values are read: each is judged by what
 * the block is then.  While it comes back its rows and codes are verified anyway (load.c).
 *
 * Rows that are bad make the block bad.  Codes, codebooks and summaries can be made again: those that are
 * damaged are replaced by what memory has, or removed (columns.c). */
#include "kvserver/store/tier/disk_tier_private.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/slice.h"
#include "kvserver/store/rows/residency.h"

#include <stdlib.h>
#include <string.h>

enum {
    READ_TRIES = 3,
    COLUMN_ROOM = 16 << 10, /* for what was made of rows: how much it is, only the disk knows */
    COLUMN_MAX = 8 << 20,
};

/* What becomes of a read. */
enum verdict {
    IS_OVER,
    IS_TO_WAIT,
    IS_READ_AGAIN,
    IS_READ_LARGER, /* with room for all of it */
};

static struct kvs_tier_item *item_of(const struct kvs_verify_read *read)
{
    return &read->tier->jobs[KVS_TIER_VERIFY].items[read->item];
}

static void count(_Atomic uint32_t *counter)
{
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

/* ---- reading ------------------------------------------------------------------------------ */

/* Returns NULL if out of memory. */
static struct kvs_verify_read *
read_create(struct kvs_disk_tier *tier, uint32_t item, size_t room)
{
    struct kvs_verify_read *read = malloc(sizeof(*read) + room);

    if (read == NULL)
        return NULL;
    *read = (struct kvs_verify_read){.tier = tier, .item = item, .room = room};
    tier->verifying_bytes += room;
    return read;
}

static void read_free(struct kvs_verify_read *read)
{
    read->tier->verifying_bytes -= read->room;
    free(read);
}

/* Takes it out of those under way, and puts it with those that are ready. */
static void read_done(void *arg, kv_status_t status, size_t bytes)
{
    struct kvs_verify_read *read = arg;
    struct kvs_disk_tier *tier = read->tier;

    if (status != KV_OK && status != KV_NOT_FOUND)
        kvs_tier_count(&tier->counts.failed, 1);
    *read->link = read->next;
    if (read->next != NULL)
        read->next->link = read->link;
    read->status = status;
    read->bytes = bytes;
    read->next = tier->verify_ready;
    tier->verify_ready = read;
}

static kv_status_t read_start(struct kvs_verify_read *read, const struct kvs_saved *saved)
{
    struct kvs_disk_tier *tier = read->tier;
    const struct kvs_saved_key key = kvs_saved_key_at(saved, read->kind, read->at);
    const kv_status_t status = kv_disk_read(tier->queue, KV_DISK_ROWS, &key, sizeof(key),
                                            read->memory, read->room, read_done, read);

    if (status != KV_OK)
        return status;
    read->next = tier->verifying;
    read->link = &tier->verifying;
    if (read->next != NULL)
        read->next->link = &read->next;
    tier->verifying = read;
    return KV_OK;
}

/* Returns how many bytes the segment has on disk, or 0: the block is not as it was saved. */
static size_t
saved_bytes(const struct kvs_disk_tier *tier, struct kvs_block *block, uint32_t at)
{
    const struct kvs_block *owner = kvs_block_owner(block, at);
    struct kvs_segment_image image;

    if (kvs_segment_is_away(&owner->segments[at]))
        return kvs_segment_away_bytes(tier->store, &owner->segments[at]) +
               sizeof(struct kvs_saved_tail);
    return kvs_block_image(tier->store, owner, at, &image)
               ? image.rows_bytes + sizeof(struct kvs_saved_tail)
               : 0;
}

static void go_on(struct kvs_item_progress *progress, const struct kvs_saved *saved)
{
    if (++progress->at < saved->units.n)
        return;
    progress->at = 0;
    progress->kind++;
}

bool kvs_verify_item(struct kvs_disk_tier *tier, uint32_t i)
{
    struct kvs_job *job = &tier->jobs[KVS_TIER_VERIFY];
    struct kvs_item_progress *progress = &job->progress[i];
    const struct kvs_saved *saved = kvs_saved_of_item(tier, &job->items[i]);
    struct kvs_verify_read *read;
    size_t room;

    if (saved == NULL || saved->n_wanted > 0 || saved->units.n == 0 ||
        progress->kind == KVS_SAVED_KINDS) {
        if (progress->n_ops > 0)
            return false;
        progress->state = KVS_ITEM_OVER;
        return true;
    }
    if (tier->verifying_bytes >= KVS_TIER_VERIFYING)
        return false;
    room = progress->kind == KVS_SAVED_ROWS ? saved_bytes(tier, saved->block, progress->at)
                                            : COLUMN_ROOM;
    read = room > 0 ? read_create(tier, i, room) : NULL;
    if (read == NULL) {
        count(&job->items[i].n_unread);
        go_on(progress, saved);
        return true;
    }
    read->kind = progress->kind;
    read->at = progress->at;
    if (read_start(read, saved) != KV_OK) {
        read_free(read);
        return false;
    }
    progress->n_ops++;
    go_on(progress, saved);
    return true;
}

/* ---- judging ------------------------------------------------------------------------------ */

static bool is_right(const struct kvs_verify_read *read, const struct kvs_saved *saved)
{
    const size_t rows_bytes = read->room - sizeof(struct kvs_saved_tail);
    const struct kvs_saved_key key = kvs_saved_key_at(saved, KVS_SAVED_ROWS, read->at);
    struct kvs_saved_tail tail;

    if (read->status != KV_OK || read->bytes != read->room)
        return false;
    memcpy(&tail, (const uint8_t *)read->memory + rows_bytes, sizeof(tail));
    return kvs_saved_tail_is_right(&tail, &key, read->memory, rows_bytes);
}

static enum verdict judge_rows(struct kvs_verify_read *read, const struct kvs_saved *saved)
{
    struct kvs_disk_tier *tier = read->tier;
    struct kvs_tier_item *item = item_of(read);

    if (is_right(read, saved))
        return IS_OVER;
    if (!kvs_can_mend(saved, read->at)) {
        count(&item->n_bad);
    } else {
        if (!kvs_mend(tier, read->item, saved, read->at))
            return IS_TO_WAIT;
        count(&item->n_mended);
    }
    kvs_tier_count(&tier->counts.bad_segments, 1);
    return IS_OVER;
}

/* Whether the checksum of a value, which was read whole, is wrong. */
static bool is_damaged(const struct kvs_verify_read *read, const struct kvs_saved *saved)
{
    const struct kvs_saved_key key = kvs_saved_key_at(saved, read->kind, read->at);
    const uint8_t *value = (const uint8_t *)read->memory;
    struct kvs_saved_learnt_tail of_learnt;
    struct kvs_saved_column_tail of_column;
    const size_t tail_bytes =
        read->kind == KVS_SAVED_LEARNT ? sizeof(of_learnt) : sizeof(of_column);

    if (read->bytes < tail_bytes)
        return true;
    const size_t n_bytes = read->bytes - tail_bytes;

    if (read->kind == KVS_SAVED_LEARNT) {
        memcpy(&of_learnt, value + n_bytes, sizeof(of_learnt));
        return kvs_saved_learnt_state(&of_learnt, &key, value, n_bytes) == KVS_SAVED_DAMAGED;
    }
    memcpy(&of_column, value + n_bytes, sizeof(of_column));
    return kvs_saved_column_state(&of_column, &key, value, n_bytes) == KVS_SAVED_DAMAGED;
}

/* Few segments have a codebook beside them, or summaries, and not all have codes.  One is damaged if it was
 * each time that it was read: another may have been written meanwhile. */
static enum verdict judge_column(struct kvs_verify_read *read, struct kvs_saved *saved)
{
    struct kvs_disk_tier *tier = read->tier;

    if (read->status == KV_NOT_FOUND)
        return IS_OVER;
    if (read->bytes > read->room)
        return tier->verifying == NULL ||
                       tier->verifying_bytes - read->room + read->bytes <= KVS_TIER_VERIFYING
                   ? IS_READ_LARGER
                   : IS_TO_WAIT;
    if (!is_damaged(read, saved))
        return IS_OVER;
    if (++read->n_tries < READ_TRIES)
        return IS_READ_AGAIN;
    /* A recall takes note of what it has read. */
    if (tier->columns != NULL || !kvs_tier_replace_damaged(tier, saved, read->kind, read->at))
        return IS_TO_WAIT;
    kvs_tier_count(&tier->counts.bad_columns, 1);
    return IS_OVER;
}

static enum verdict judge(struct kvs_verify_read *read, struct kvs_saved *saved)
{
    if (saved == NULL || saved->n_wanted > 0)
        return IS_OVER;
    if (read->status != KV_OK && read->status != KV_NOT_FOUND) {
        if (++read->n_tries < READ_TRIES)
            return IS_READ_AGAIN;
        count(&item_of(read)->n_unread);
        return IS_OVER;
    }
    return read->kind == KVS_SAVED_ROWS ? judge_rows(read, saved) : judge_column(read, saved);
}

/* Reads it again.  Returns false if that cannot be. */
static bool
start_again(struct kvs_verify_read *read, const struct kvs_saved *saved, enum verdict verdict)
{
    struct kvs_verify_read *larger;

    if (verdict == IS_READ_AGAIN)
        return read_start(read, saved) == KV_OK;
    larger =
        read->bytes <= COLUMN_MAX ? read_create(read->tier, read->item, read->bytes) : NULL;
    if (larger == NULL)
        return false;
    larger->kind = read->kind;
    larger->at = read->at;
    if (read_start(larger, saved) != KV_OK) {
        read_free(larger);
        return false;
    }
    read_free(read);
    return true;
}

bool kvs_verify_judge(struct kvs_disk_tier *tier)
{
    struct kv_slice slice = kv_slice_begin(tier->clock, 1);
    bool has_moved = false;

    while (tier->verify_ready != NULL) {
        struct kvs_verify_read *read = tier->verify_ready;
        struct kvs_saved *saved = kvs_saved_of_item(tier, item_of(read));
        const enum verdict verdict = judge(read, saved);

        if (verdict == IS_TO_WAIT)
            return has_moved;
        tier->verify_ready = read->next;
        has_moved = true;
        if (verdict != IS_OVER && start_again(read, saved, verdict))
            continue;
        if (verdict != IS_OVER)
            count(&item_of(read)->n_unread);
        tier->jobs[KVS_TIER_VERIFY].progress[read->item].n_ops--;
        read_free(read);
        if (kv_slice_over(&slice))
            break;
    }
    return has_moved;
}

void kvs_verify_close(struct kvs_disk_tier *tier)
{
    struct kvs_verify_read *lists[] = {tier->verifying, tier->verify_ready};

    for (unsigned i = 0; i < 2; i++)
        for (struct kvs_verify_read *read = lists[i], *next; read != NULL; read = next) {
            next = read->next;
            free(read);
        }
}
