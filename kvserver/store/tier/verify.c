/* verify.c - what is saved of blocks is read, and compared with its checksum: some segments at once, of
 * one block after the other.
 *
 * A block may leave the index, memory, or come back while its segments are read: each is judged by what
 * the block is then.  While it comes back its segments are verified anyway (load.c). */
#include "kvserver/store/tier/disk_tier_private.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/slice.h"
#include "kvserver/store/rows/residency.h"

#include <stdlib.h>
#include <string.h>

enum {
    READ_TRIES = 3,
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
    const struct kvs_saved_key key = kvs_saved_key_at(saved, KVS_SAVED_ROWS, read->at);
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

bool kvs_verify_item(struct kvs_disk_tier *tier, uint32_t i)
{
    struct kvs_job *job = &tier->jobs[KVS_TIER_VERIFY];
    struct kvs_item_progress *progress = &job->progress[i];
    const struct kvs_saved *saved = kvs_saved_of_item(tier, &job->items[i]);
    struct kvs_verify_read *read;
    size_t room;

    if (saved == NULL || saved->n_wanted > 0 || progress->at == saved->units.n) {
        if (progress->n_ops > 0)
            return false;
        progress->state = KVS_ITEM_OVER;
        return true;
    }
    if (tier->verifying_bytes >= KVS_TIER_VERIFYING)
        return false;
    room = saved_bytes(tier, saved->block, progress->at);
    read = room > 0 ? malloc(sizeof(*read) + room) : NULL;
    if (read == NULL) {
        count(&job->items[i].n_unread);
        progress->at++;
        return true;
    }
    *read = (struct kvs_verify_read){.tier = tier, .item = i, .at = progress->at, .room = room};
    if (read_start(read, saved) != KV_OK) {
        free(read);
        return false;
    }
    tier->verifying_bytes += room;
    progress->n_ops++;
    progress->at++;
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

/* Returns false if it is to be tried again later; `ret_again`: it is read again. */
static bool judge(struct kvs_verify_read *read, const struct kvs_saved *saved, bool *ret_again)
{
    struct kvs_disk_tier *tier = read->tier;
    struct kvs_tier_item *item = item_of(read);

    *ret_again = false;
    if (read->status != KV_OK && read->status != KV_NOT_FOUND) {
        *ret_again = ++read->n_tries < READ_TRIES;
        if (*ret_again)
            return true;
        count(&item->n_unread);
        return true;
    }
    if (is_right(read, saved))
        return true;
    if (!kvs_can_mend(saved, read->at)) {
        count(&item->n_bad);
    } else {
        if (!kvs_mend(tier, read->item, saved, read->at))
            return false;
        count(&item->n_mended);
    }
    kvs_tier_count(&tier->counts.bad_segments, 1);
    return true;
}

bool kvs_verify_judge(struct kvs_disk_tier *tier)
{
    struct kv_slice slice = kv_slice_begin(tier->clock, 1);
    bool has_moved = false;

    while (tier->verify_ready != NULL) {
        struct kvs_verify_read *read = tier->verify_ready;
        const struct kvs_saved *saved = kvs_saved_of_item(tier, item_of(read));
        bool again = false;

        if (saved != NULL && saved->n_wanted == 0 && !judge(read, saved, &again))
            return has_moved;
        tier->verify_ready = read->next;
        has_moved = true;
        if (again && read_start(read, saved) == KV_OK)
            continue;
        if (again)
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
