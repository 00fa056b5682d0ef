/* object_load.c - pieces of objects come back from the disk, in the order in which they were asked
 * for, some at once; each is read to where it will lie. */
#include "kernels/checksum.h"
#include "kvserver/base/clock.h"
#include "kvserver/store/tier/object_tier_private.h"

#include <stdlib.h>

enum {
    LOADS_AT_ONCE = 16,
    READ_TRIES = 3,
    LENT_MAX = 4,     /* pieces beside --memory, of a data thread */
    ROOM_US = 100000, /* that making room may take */
};

bool kvs_object_loads_open(struct kvs_object_tier *tier)
{
    tier->loads_end = &tier->loads;
    tier->loading = calloc(LOADS_AT_ONCE, sizeof(tier->loading[0]));
    return tier->loading != NULL;
}

void kvs_object_loads_close(struct kvs_object_tier *tier)
{
    for (struct kvs_piece_load *load = tier->loads, *next; load != NULL; load = next) {
        next = load->next;
        free(load);
    }
    for (uint32_t i = 0; tier->loading != NULL && i < LOADS_AT_ONCE; i++) {
        if (tier->loading[i] != NULL && tier->loading[i]->class_id == KVS_PIECE_LENT)
            free(tier->loading[i]->memory);
        free(tier->loading[i]);
    }
    free(tier->loading);
}

bool kvs_object_load(void *arg, struct kvs_stored_object *object, uint32_t piece)
{
    struct kvs_object_tier *tier = arg;
    struct kvs_piece_load *load = malloc(sizeof(*load));

    if (load == NULL)
        return false;
    *load = (struct kvs_piece_load){.tier = tier,
                                    .object = object,
                                    .piece = piece,
                                    .since_us = kv_clock_now(tier->setup.clock)};
    kvs_object_pin(object);
    *tier->loads_end = load;
    tier->loads_end = &load->next;
    return true;
}

static void free_memory(struct kvs_piece_load *load)
{
    struct kvs_object_tier *tier = load->tier;

    if (load->class_id == KVS_PIECE_LENT) {
        free(load->memory);
        tier->n_lent--;
    } else {
        kvs_arena_free(tier->objects->arena, load->class_id, load->memory);
    }
    load->memory = NULL;
}

static void piece_read(void *arg, kv_status_t status, size_t bytes);

static kv_status_t start(struct kvs_piece_load *load)
{
    const struct kvs_stored_object *object = load->object;
    const struct kvs_object_piece_key key =
        kvs_object_piece_key(&object->key, object->version, load->piece);

    return kv_disk_read(load->tier->queue, KV_DISK_ROWS, &key, sizeof(key), load->memory,
                        kvs_object_piece_bytes(object->bytes, load->piece), piece_read, load);
}

static bool is_good(const struct kvs_piece_load *load, kv_status_t status, size_t bytes)
{
    const struct kvs_stored_object *object = load->object;

    return status == KV_OK && bytes == kvs_object_piece_bytes(object->bytes, load->piece) &&
           kv_crc32c(object->seed + load->piece, load->memory, bytes) ==
               object->pieces[load->piece].crc;
}

static void piece_read(void *arg, kv_status_t status, size_t bytes)
{
    struct kvs_piece_load *load = arg;
    struct kvs_object_tier *tier = load->tier;
    struct kvs_stored_object *object = load->object;
    uint32_t at = 0;

    if (status != KV_OK && status != KV_NOT_FOUND) {
        kvs_object_count(&tier->counts.failed, 1);
        /* It may pass; a piece that is lost for it is lost for good. */
        if (++load->n_tries < READ_TRIES && start(load) == KV_OK)
            return;
    }
    while (tier->loading[at] != load)
        at++;
    tier->loading[at] = NULL;
    tier->n_loading--;
    if (is_good(load, status, bytes)) {
        kvs_object_count(&tier->counts.loaded_bytes, bytes);
        tier->n_lent -= load->class_id == KVS_PIECE_LENT;
        kvs_object_piece_back(tier->objects, object, load->piece, load->memory, load->class_id);
    } else {
        /* What has been removed may have been erased. */
        kvs_object_count(&tier->counts.lost_pieces, object->published);
        free_memory(load);
        kvs_object_piece_back(tier->objects, object, load->piece, NULL, 0);
    }
    kv_histogram_add(&tier->counts.load_us, kv_clock_now(tier->setup.clock) - load->since_us);
    tier->setup.arrived(tier->setup.arg, &object->pieces[load->piece]);
    kvs_object_unpin(tier->objects, object);
    free(load);
}

/* Begins to read the first one.  Returns false if it is to be tried again later. */
static bool begin(struct kvs_object_tier *tier)
{
    struct kvs_piece_load *load = tier->loads;
    struct kvs_arena *arena = tier->objects->arena;
    const uint32_t bytes = kvs_object_piece_bytes(load->object->bytes, load->piece);
    uint32_t at = 0;

    load->class_id = kvs_arena_class_rounded(arena, bytes);
    load->memory = load->class_id < 0 ? NULL : kvs_arena_alloc(arena, load->class_id);
    if (load->memory == NULL) {
        /* Somebody is to make room.  If nobody does, what is read is not kept. */
        if (kvs_pages_want(kvs_arena_pages(arena), bytes) &&
            kv_clock_now(tier->setup.clock) < load->since_us + ROOM_US)
            return false;
        if (tier->objects->n_lent + tier->n_lent == LENT_MAX)
            return false;
        load->class_id = KVS_PIECE_LENT;
        load->memory = malloc(bytes > 0 ? bytes : 1);
        if (load->memory == NULL)
            return false;
        tier->n_lent++;
    }
    if (start(load) != KV_OK) {
        free_memory(load);
        return false;
    }
    tier->loads = load->next;
    if (tier->loads == NULL)
        tier->loads_end = &tier->loads;
    load->next = NULL;
    while (tier->loading[at] != NULL)
        at++;
    tier->loading[at] = load;
    tier->n_loading++;
    return true;
}

bool kvs_object_loads_step(struct kvs_object_tier *tier)
{
    bool has_moved = false;

    while (tier->loads != NULL && tier->n_loading < LOADS_AT_ONCE && begin(tier))
        has_moved = true;
    return has_moved;
}
