#include "kvserver/store/shard/shard_private.h"

#include "kvserver/store/index/builder.h"
#include "kvserver/store/shard/op.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    TIMERS_EVERY_US = 1000,
    BACKGROUND_EVERY = 16, /* slices of requests, before one in the background has its turn */
};

bool kv_data_step(struct kv_data *data)
{
    bool busy = false;

    data->now_us = kv_clock_now(data->clock);
    busy = kv_data_take_messages(data);
    busy = kv_data_command_step(data) || busy;
    bool sliced = kv_data_run_slice(data);
    if (!sliced || ++data->turns >= BACKGROUND_EVERY)
        sliced = kv_data_run_background(data) || sliced;
    busy = busy || sliced;
    busy = kv_data_look_again(data) || busy;
    if (busy)
        data->moved_us = data->now_us;
    if (data->now_us >= data->timers_us) {
        data->timers_us = data->now_us + TIMERS_EVERY_US;
        atomic_store_explicit(&data->seen_us, data->now_us, memory_order_relaxed);
        kv_data_timers(data);
        kv_data_tell_stats(data);
        busy = busy || kv_pool_lent(data->works) > 0;
    }
    if (!busy)
        busy = kv_arena_touch_ahead(data->arena) > 0;
    return busy;
}

static bool ops_open(struct kv_data *data)
{
    for (unsigned op = 0; op < KV_OP_COUNT; op++) {
        if (data->ops[op].open == NULL)
            continue;
        data->op_state[op] = data->ops[op].open(data);
        if (data->op_state[op] == NULL)
            return false;
    }
    return true;
}

static void ops_close(struct kv_data *data)
{
    for (unsigned op = 0; op < KV_OP_COUNT; op++)
        if (data->op_state[op] != NULL)
            data->ops[op].close(data->op_state[op]);
}

static bool background_open(struct kv_data *data, const struct kv_data_setup *setup)
{
    assert(data->n_background <= KVS_BACKGROUND_MAX);
    for (uint32_t i = 0; i < data->n_background; i++) {
        if (data->background[i].open == NULL)
            continue;
        data->background_state[i] = data->background[i].open(data, setup);
        if (data->background_state[i] == NULL)
            return false;
    }
    return true;
}

static void background_close(struct kv_data *data)
{
    for (uint32_t i = 0; i < data->n_background; i++)
        if (data->background_state[i] != NULL)
            data->background[i].close(data->background_state[i]);
}

kv_status_t kv_data_init(struct kv_data *data, const struct kv_data_setup *setup)
{
    kv_status_t status = KV_NO_MEMORY;

    memset(data, 0, sizeof(*data));
    data->ops = setup->ops;
    data->background = setup->background;
    data->n_background = setup->n_background;
    data->index = setup->index;
    data->n_threads = setup->n_threads;
    data->stuck_send_us = setup->stuck_send_us;
    data->clock = setup->clock;
    atomic_init(&data->seen_us, kv_clock_now(setup->clock));
    data->answers = setup->answers;
    data->n_parts = setup->n_parts;
    data->n_peers = setup->n_peers;
    for (int i = 0; i < KV_PRIORITY_COUNT; i++)
        data->queues[i].end = &data->queues[i].first;
    data->unstaged.end = &data->unstaged.first;
    data->looking.end = &data->looking.first;
    data->woken_end = &data->woken;

    data->arena = kv_arena_create(setup->memory_bytes);
    data->parts = calloc(setup->n_parts, sizeof(*data->parts));
    data->peers = calloc(setup->n_peers, sizeof(*data->peers));
    data->works = kv_pool_create(setup->n_works, sizeof(struct kv_work));
    data->middles = kv_pool_create(setup->n_works, KV_MIDDLE_BYTES);
    data->bodies = kv_pool_create(KV_BODIES, KV_WIRE_BODY_MAX);
    data->stagings = kv_pool_create(KV_STAGINGS, KV_WIRE_BULK_MAX);
    data->receipts = kv_pool_create(KV_RECEIPTS, sizeof(struct receipt));
    data->commands = kv_ring_create(setup->n_commands);
    if (data->arena == NULL || data->parts == NULL || data->peers == NULL ||
        data->works == NULL || data->middles == NULL || data->bodies == NULL ||
        data->stagings == NULL || data->receipts == NULL || data->commands == NULL ||
        !kv_heap_init(&data->heap, data->arena) ||
        !kv_codebooks_init(&data->codebooks, &data->heap) ||
        !kv_objects_init(&data->objects, data->arena, &data->heap.health, setup->secret,
                         setup->object_version))
        goto err_fini;
    data->indexer = kv_indexer_create(&data->codebooks, data->clock);
    if (data->indexer == NULL || !ops_open(data) || !background_open(data, setup))
        goto err_fini;
    for (uint32_t i = 0; i < setup->n_parts; i++)
        data->parts[i].index = i;
    status =
        setup->transport->row->port_open(setup->transport, &kv_data_events, data, &data->port);
    if (status == KV_OK)
        return KV_OK;

err_fini:
    kv_data_fini(data);
    return status;
}

void kv_data_fini(struct kv_data *data)
{
    if (data->peers != NULL)
        for (uint32_t i = 0; i < data->n_peers; i++)
            kv_peer_close(data, &data->peers[i]);
    if (data->port != NULL)
        data->port->row->port_close(data->port);
    kv_ring_destroy(data->commands);
    background_close(data);
    ops_close(data);
    kv_indexer_destroy(data->indexer);
    kv_codebooks_fini(&data->codebooks);
    kv_objects_fini(&data->objects);
    kv_pool_destroy(data->receipts);
    kv_pool_destroy(data->stagings);
    kv_pool_destroy(data->bodies);
    kv_pool_destroy(data->middles);
    kv_pool_destroy(data->works);
    free(data->peers);
    free(data->parts);
    kv_arena_destroy(data->arena);
    memset(data, 0, sizeof(*data));
}
