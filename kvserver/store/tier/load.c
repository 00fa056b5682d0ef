/* load.c - segments come back from the disk: in the order in which they were asked for, while the next
 * ones are read. */
#include "kvserver/store/tier/disk_tier_private.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/slice.h"
#include "kvserver/store/rows/arena.h"
#include "kvserver/store/rows/residency.h"

#include <stdlib.h>
#include <string.h>

enum {
    READ_TRIES = 3,
};

static void read_free(struct kvs_segment_read *read)
{
    if (read->memory != NULL)
        read->tier->reading_bytes -= read->rows_room + read->codes_room;
    free(read->memory);
    free(read);
}

/* Takes it out of its list. */
static void read_unlink(struct kvs_segment_read *read)
{
    struct kvs_disk_tier *tier = read->tier;

    if (tier->to_read == read)
        tier->to_read = read->next;
    *read->link = read->next;
    if (read->next != NULL)
        read->next->link = read->link;
    else if (tier->wanted_end == &read->next)
        tier->wanted_end = read->link;
}

/* A value has been read, or could not be. */
static void value_done(struct kvs_segment_read *read)
{
    if (--read->n_left > 0 || read->saved != NULL)
        return;
    read_unlink(read);
    read_free(read);
}

static void count_failed(struct kvs_disk_tier *tier, kv_status_t status)
{
    if (status != KV_OK && status != KV_NOT_FOUND)
        kvs_tier_count(&tier->counts.failed, 1);
}

static kv_status_t start_value(struct kvs_segment_read *read,
                               enum kvs_saved_kind kind,
                               void *value,
                               size_t room,
                               kv_disk_done_fn done)
{
    const struct kvs_saved_key key = kvs_saved_key_at(read->saved, kind, read->at);
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
    struct kvs_segment_read *read = arg;

    count_failed(read->tier, status);
    /* It may pass; rows that are lost for it are lost for good. */
    if (status != KV_OK && status != KV_NOT_FOUND && read->saved != NULL &&
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
    struct kvs_segment_read *read = arg;

    count_failed(read->tier, status);
    read->has_codes = status == KV_OK && bytes == read->codes_room;
    value_done(read);
}

/* Starts to read it.  Returns false if it is to be tried again later. */
static bool read_start(struct kvs_segment_read *read)
{
    struct kvs_disk_tier *tier = read->tier;
    const struct kvs_block *block = read->saved->block;
    const struct kvs_column *column = &kvs_block_codes(block, read->at)->column;

    read->rows_room = kvs_segment_away_bytes(tier->store, &block->segments[read->at]) +
                      sizeof(struct kvs_saved_tail);
    read->codes_room =
        kvs_column_is_away(column) ? column->n_bytes + sizeof(struct kvs_saved_column_tail) : 0;
    read->memory = malloc(read->rows_room + read->codes_room);
    if (read->memory == NULL)
        return false;
    if (start_value(read, KVS_SAVED_ROWS, read->memory, read->rows_room, rows_read) != KV_OK) {
        free(read->memory);
        read->memory = NULL;
        return false;
    }
    /* Without codes that can be read they are made again. */
    if (read->codes_room > 0)
        (void)start_value(read, KVS_SAVED_CODES, (uint8_t *)read->memory + read->rows_room,
                          read->codes_room, codes_read);
    tier->reading_bytes += read->rows_room + read->codes_room;
    return true;
}

static bool is_away(const struct kvs_segment_read *read)
{
    return kvs_segment_is_away(&read->saved->block->segments[read->at]);
}

/* Adds a segment to those that come back.  Returns false if out of memory. */
static bool add_wanted(struct kvs_disk_tier *tier, struct kvs_saved *saved, uint32_t at)
{
    struct kvs_segment_read *read = malloc(sizeof(*read));

    if (read == NULL)
        return false;
    *read = (struct kvs_segment_read){
        .tier = tier, .saved = saved, .at = at, .link = tier->wanted_end};
    *tier->wanted_end = read;
    tier->wanted_end = &read->next;
    if (tier->to_read == NULL)
        tier->to_read = read;
    if (saved->n_wanted++ == 0)
        saved->since_us = kv_clock_now(tier->clock);
    kvs_saved_is_here(tier, saved);
    return true;
}

static void ahead_unlink(struct kvs_disk_tier *tier, struct kvs_saved *saved)
{
    if (saved->link_ahead == NULL)
        return;
    *saved->link_ahead = saved->next_ahead;
    if (saved->next_ahead != NULL)
        saved->next_ahead->link_ahead = saved->link_ahead;
    else
        tier->ahead_end = saved->link_ahead;
    saved->link_ahead = NULL;
}

/* Asks for the next segment that nobody has asked for, of a block that comes back as a whole.  Returns
 * false if there is none. */
static bool ask_ahead(struct kvs_disk_tier *tier)
{
    while (tier->ahead != NULL) {
        struct kvs_saved *saved = tier->ahead;

        for (; saved->at < saved->block->n_segments; saved->at++) {
            struct kvs_segment *segment = &saved->block->segments[saved->at];

            if (!kvs_segment_is_away(segment) || segment->is_wanted)
                continue;
            segment->is_wanted = add_wanted(tier, saved, saved->at);
            return segment->is_wanted;
        }
        ahead_unlink(tier, saved);
        kvs_block_restored(tier->store, saved->block);
    }
    return false;
}

/* Whether an index job waits for the disk: what nobody has asked for comes after that. */
static bool is_recalling(const struct kvs_disk_tier *tier)
{
    return tier->columns != NULL || tier->recall != NULL;
}

/* Starts what fits the window. */
static bool read_ahead(struct kvs_disk_tier *tier)
{
    bool has_moved = false;

    while (tier->reading_bytes < KVS_TIER_WINDOW &&
           (tier->to_read != NULL || (!is_recalling(tier) && ask_ahead(tier)))) {
        /* Its session, which alone has the block, may have been cut or be closing. */
        if (is_away(tier->to_read) && !read_start(tier->to_read))
            break;
        tier->to_read = tier->to_read->next;
        has_moved = true;
    }
    return has_moved;
}

static const uint8_t *codes_of(const struct kvs_segment_read *read)
{
    return (const uint8_t *)read->memory + read->rows_room;
}

/* Whether what was read is of use.  What is not is written again once it is made again, although that is
 * the same. */
static bool are_codes_right(const struct kvs_segment_read *read, struct kvs_saved *saved)
{
    const size_t n_bytes = read->codes_room - sizeof(struct kvs_saved_column_tail);
    const struct kvs_saved_key key = kvs_saved_key_at(saved, KVS_SAVED_CODES, read->at);
    struct kvs_saved_column_tail tail;

    if (read->has_codes) {
        memcpy(&tail, codes_of(read) + n_bytes, sizeof(tail));
        if (kvs_saved_column_state(&tail, &key, codes_of(read), n_bytes) != KVS_SAVED_DAMAGED)
            return true;
        /* Once, however often they are read before they are written again. */
        kvs_tier_count(&read->tier->counts.bad_columns, saved->codes_on_disk[read->at] != 0);
    }
    if (read->codes_room > 0)
        saved->codes_on_disk[read->at] = 0;
    return false;
}

/* Puts a segment back that has been read.  Returns false if there is no memory. */
static bool
restore(struct kvs_disk_tier *tier, struct kvs_saved *saved, struct kvs_segment_read *read)
{
    const size_t rows_bytes = read->rows_room - sizeof(struct kvs_saved_tail);
    const struct kvs_saved_key key = kvs_saved_key_at(saved, KVS_SAVED_ROWS, read->at);
    struct kvs_saved_tail tail;
    struct kvs_segment_image image = {
        .rows = read->memory,
        .rows_bytes = rows_bytes,
        .crcs = tail.crcs,
    };

    memcpy(&tail, (const uint8_t *)read->memory + rows_bytes, sizeof(tail));
    /* Once, however often there is no memory. */
    if (!read->is_checked) {
        read->is_good =
            read->has_rows && kvs_saved_tail_is_right(&tail, &key, image.rows, rows_bytes);
        read->has_codes = are_codes_right(read, saved);
    }
    read->is_checked = true;
    if (read->has_codes) {
        image.codes = codes_of(read);
        image.codes_bytes = read->codes_room - sizeof(struct kvs_saved_column_tail);
    }
    if (!kvs_block_restore(tier->store, saved->block, read->at, read->is_good ? &image : NULL))
        return false;
    if (read->has_rows)
        kvs_tier_count(&tier->counts.loaded_bytes, read->rows_room);
    if (read->has_codes)
        kvs_tier_count(&tier->counts.loaded_bytes, read->codes_room);
    if (!read->is_good)
        kvs_tier_count(&tier->counts.lost_segments, 1);
    return true;
}

/* One less of the block is to come back. */
static void forget_wanted(struct kvs_segment_read *read)
{
    read->saved->n_wanted--;
    read->saved = NULL;
    read_unlink(read);
    if (read->n_left == 0) {
        read_free(read);
        return;
    }
    read->next = read->tier->given_up;
    read->link = &read->tier->given_up;
    if (read->next != NULL)
        read->next->link = &read->next;
    read->tier->given_up = read;
}

static void give_up(struct kvs_segment_read *read)
{
    struct kvs_disk_tier *tier = read->tier;
    struct kvs_block *block = read->saved->block;
    const uint32_t at = read->at;

    forget_wanted(read);
    if (block->segments[at].is_wanted)
        kvs_segment_give_up(tier->store, block, at);
}

void kvs_load_give_up(struct kvs_disk_tier *tier, struct kvs_saved *saved)
{
    ahead_unlink(tier, saved);
    for (struct kvs_segment_read *read = tier->wanted, *next;
         read != NULL && saved->n_wanted > 0; read = next) {
        next = read->next;
        if (read->saved == saved)
            give_up(read);
    }
}

/* There is no memory for what is not needed at once: whoever waits for it asks again when it is his
 * turn. */
static void give_others_up(struct kvs_disk_tier *tier)
{
    while (tier->ahead != NULL)
        ahead_unlink(tier, tier->ahead);
    for (struct kvs_segment_read *read = tier->wanted, *next; read != NULL; read = next) {
        next = read->next;
        if (!kvs_is_preferred(tier, read->saved, read->at))
            give_up(read);
    }
}

static void is_back(struct kvs_segment_read *read)
{
    struct kvs_disk_tier *tier = read->tier;
    struct kvs_saved *saved = read->saved;

    kvs_saved_is_here(tier, saved);
    forget_wanted(read);
    if (saved->n_wanted > 0)
        return;
    kv_histogram_add(&tier->counts.load_us, kv_clock_now(tier->clock) - saved->since_us);
    if (!kvs_block_is_here(saved->block))
        return;
    ahead_unlink(tier, saved);
    kvs_tier_count(&tier->counts.loaded_blocks, 1);
    kvs_block_restored(tier->store, saved->block);
    if (saved->is_doomed)
        kvs_saved_drop(tier, saved);
}

/* Makes room for the first that comes back.  Returns false if there is none yet. */
static bool make_room(struct kvs_disk_tier *tier, const struct kvs_segment_read *read)
{
    if (!kvs_is_preferred(tier, read->saved, read->at)) {
        give_others_up(tier);
        return true;
    }
    if (tier->lacks_us == 0)
        tier->lacks_us = kv_clock_now(tier->clock);
    if (kvs_let_go(tier, read->rows_room) > 0)
        return true;
    /* Somebody has to make room, unless this thread just has not found any yet; a later step tries
     * again. */
    if (tier->n_threads > 1 || !kvs_lets_go(tier))
        (void)kvs_pages_want(kvs_arena_pages(tier->store->arena), read->rows_room);
    return false;
}

/* Puts back what has been read, in order.  Returns false if there was nothing to do. */
static bool bring_back(struct kvs_disk_tier *tier)
{
    struct kv_slice slice = kv_slice_begin(tier->clock, 1);
    bool has_moved = false;

    while (tier->wanted != NULL && tier->wanted != tier->to_read && tier->wanted->n_left == 0) {
        struct kvs_segment_read *read = tier->wanted;

        if (!is_away(read) || restore(tier, read->saved, read)) {
            is_back(read);
            tier->lacks_us = 0;
        } else if (!make_room(tier, read)) {
            return has_moved;
        }
        has_moved = true;
        if (kv_slice_over(&slice))
            break;
    }
    return has_moved;
}

void kvs_tier_load(void *arg, struct kvs_block *block)
{
    struct kvs_disk_tier *tier = arg;
    struct kvs_saved *saved = kvs_saved_any(tier, block);

    saved->at = 0;
    if (saved->link_ahead != NULL)
        return;
    saved->next_ahead = NULL;
    saved->link_ahead = tier->ahead_end;
    *tier->ahead_end = saved;
    tier->ahead_end = &saved->next_ahead;
}

void kvs_tier_want(void *arg, struct kvs_block *block, uint32_t at)
{
    struct kvs_disk_tier *tier = arg;
    struct kvs_saved *saved = kvs_saved_any(tier, block);
    const bool is_first = kvs_is_preferred(tier, saved, at);

    if ((!is_first && kvs_pages_are_short(kvs_arena_pages(tier->store->arena))) ||
        !add_wanted(tier, saved, at))
        block->segments[at].is_wanted = false; /* until it is needed at once */
}

bool kvs_load_step(struct kvs_disk_tier *tier)
{
    const bool has_moved = bring_back(tier);

    return read_ahead(tier) || has_moved;
}

void kvs_loads_close(struct kvs_disk_tier *tier)
{
    struct kvs_segment_read *lists[] = {tier->wanted, tier->given_up};

    for (unsigned i = 0; i < 2; i++)
        for (struct kvs_segment_read *read = lists[i], *next; read != NULL; read = next) {
            next = read->next;
            read_free(read);
        }
}
