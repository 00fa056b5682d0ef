/* load.c - blocks come back from the disk: one after the other, while the next ones are read. */
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
    read->tier->reading_bytes -= read->rows_room + read->codes_room;
    free(read);
}

void kvs_load_free_ready(struct kvs_saved *saved)
{
    struct kvs_segment_read *next;

    for (; saved->ready != NULL; saved->ready = next) {
        next = saved->ready->next;
        read_free(saved->ready);
    }
}

/* A value has been read, or could not be. */
static void value_done(struct kvs_segment_read *read)
{
    struct kvs_saved *saved = read->saved;

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
    struct kvs_segment_read *read = arg;

    count_failed(read->tier, status);
    read->has_codes = status == KV_OK && bytes == read->codes_room;
    value_done(read);
}

/* Starts to read a segment.  Returns false if it is to be tried again later. */
static bool read_segment(struct kvs_disk_tier *tier, struct kvs_saved *saved, uint32_t at)
{
    const struct kvs_column *column = &kvs_block_codes(saved->block, at)->column;
    const size_t rows_room = kvs_segment_away_bytes(tier->store, &saved->block->segments[at]) +
                             sizeof(struct kvs_saved_tail);
    const size_t codes_room = column->bytes != NULL ? column->n_bytes : 0;
    struct kvs_segment_read *read = malloc(sizeof(*read) + rows_room + codes_room);

    if (read == NULL)
        return false;
    *read = (struct kvs_segment_read){.tier = tier,
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
        struct kvs_saved *saved = tier->to_read;

        if (saved->at == saved->block->n_segments) {
            tier->to_read = saved->next;
            continue;
        }
        /* Its session, which alone has the block, may have been cut or be closing. */
        if (kvs_segment_is_away(&saved->block->segments[saved->at]) &&
            !read_segment(tier, saved, saved->at))
            break;
        saved->at++;
        has_moved = true;
    }
    return has_moved;
}

/* Puts a segment back that has been read.  Returns false if there is no memory. */
static bool
restore(struct kvs_disk_tier *tier, struct kvs_saved *saved, struct kvs_segment_read *read)
{
    const size_t rows_bytes = read->rows_room - sizeof(struct kvs_saved_tail);
    const struct kvs_saved_key key = kvs_saved_key_at(saved, KVS_SAVED_ROWS, read->at);
    struct kvs_saved_tail tail;
    const struct kvs_segment_image image = {
        .rows = read->memory,
        .rows_bytes = rows_bytes,
        .crcs = tail.crcs,
        .codes = read->has_codes ? (const uint8_t *)read->memory + read->rows_room : NULL,
        .codes_bytes = read->codes_room,
    };

    memcpy(&tail, (const uint8_t *)read->memory + rows_bytes, sizeof(tail));
    /* Once, however often there is no memory. */
    if (!read->is_checked)
        read->is_good =
            read->has_rows && kvs_saved_tail_is_right(&tail, &key, image.rows, rows_bytes);
    read->is_checked = true;
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

/* Takes a block out of the list of those that come back. */
void kvs_load_give_up(struct kvs_disk_tier *tier, struct kvs_saved *saved)
{
    struct kvs_saved **link = &tier->first;

    while (*link != saved)
        link = &(*link)->next;
    *link = saved->next;
    if (tier->end == &saved->next)
        tier->end = link;
    if (tier->to_read == saved)
        tier->to_read = saved->next;
    saved->is_loading = false;
    tier->lacks_memory = false;
    kvs_load_free_ready(saved);
}

static void block_is_back(struct kvs_disk_tier *tier, struct kvs_saved *saved)
{
    kvs_load_give_up(tier, saved);
    kv_histogram_add(&tier->counts.load_us, kv_clock_now(tier->clock) - saved->since_us);
    kvs_tier_count(&tier->counts.loaded_blocks, 1);
    kvs_block_restored(tier->store, saved->block);
    if (saved->is_doomed)
        kvs_saved_drop(tier, saved);
}

/* Puts back what has been read of the first block.  Returns false if there was nothing to do. */
static bool bring_back(struct kvs_disk_tier *tier)
{
    struct kv_slice slice = kv_slice_begin(tier->clock, 1);
    struct kvs_saved *saved = tier->first;

    if (saved == NULL)
        return false;
    while (saved->ready != NULL) {
        struct kvs_segment_read *read = saved->ready;

        tier->lacks_memory = !restore(tier, saved, read);
        if (tier->lacks_memory) {
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

void kvs_load_begin(struct kvs_disk_tier *tier, struct kvs_saved *saved)
{
    saved->since_us = kv_clock_now(tier->clock);
    saved->at = 0;
    saved->is_loading = true;
    saved->next = NULL;
    *tier->end = saved;
    tier->end = &saved->next;
    if (tier->to_read == NULL)
        tier->to_read = saved;
}

bool kvs_load_step(struct kvs_disk_tier *tier)
{
    const bool has_moved = bring_back(tier);

    return read_ahead(tier) || has_moved;
}

void kvs_loads_close(struct kvs_disk_tier *tier)
{
    for (struct kvs_segment_read *read = tier->reads, *next; read != NULL; read = next) {
        next = read->next;
        if (--read->saved->n_reading == 0 && read->saved->block == NULL)
            free(read->saved);
        free(read);
    }
}
