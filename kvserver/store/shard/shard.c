/* A shard: its creation, its destruction, and one step of its data thread. */
#include "kvserver/store/shard/shard_private.h"

#include "kvserver/store/index/builder.h"
#include "kvserver/store/rows/residency.h"
#include "kvserver/store/shard/op.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    TIMERS_EVERY_US = 1000,
    BACKGROUND_EVERY = 16, /* slices of requests between two background slices */
};

bool kvs_shard_step(struct kvs_shard *shard)
{
    bool busy = false;

    shard->now_us = kv_clock_now(shard->clock);
    /* Messages first: one of them may be more urgent than what is queued. */
    busy = kvs_shard_take_messages(shard);
    busy = kvs_shard_command_step(shard) || busy;
    bool sliced = kvs_shard_run_slice(shard);
    kvs_replies_flush(shard);
    /* Background jobs run when no request does, and in every BACKGROUND_EVERY-th step
     * regardless, so that a busy node still makes codes and verifies its memory. */
    if (!sliced || ++shard->turns >= BACKGROUND_EVERY)
        sliced = kvs_shard_run_background(shard) || sliced;
    busy = busy || sliced;
    busy = (shard->tier != NULL && kvs_disk_tier_step(shard->tier)) || busy;
    kvs_shard_end_stuck(shard);
    busy = (shard->object_tier != NULL && kvs_object_tier_step(shard->object_tier)) || busy;
    busy = kvs_residency_step(&shard->store) || busy;
    busy = kvs_shard_look_again(shard) || busy;
    kvs_replies_flush(shard);
    if (busy)
        shard->moved_us = shard->now_us;
    if (shard->now_us >= shard->timers_us) {
        shard->timers_us = shard->now_us + TIMERS_EVERY_US;
        atomic_store_explicit(&shard->seen_us, shard->now_us, memory_order_relaxed);
        kvs_shard_timers(shard);
        kvs_shard_settle(shard);
        kvs_replies_flush(shard);
        kvs_shard_tell_stats(shard);
        busy = busy || kv_pool_used(shard->requests) > 0;
    }
    /* Idle time goes into preparing memory, so that later puts need not wait for it. */
    if (!busy)
        busy = kvs_arena_touch_ahead(shard->arena) > 0;
    return busy;
}

uint64_t kvs_shard_takes(const struct kvs_op_type *ops, uint64_t memory_bytes)
{
    uint64_t bytes = 0;

    for (unsigned op = 0; op < KV_OP_COUNT; op++)
        if (ops[op].takes != NULL)
            bytes += ops[op].takes(memory_bytes);
    return bytes;
}

static bool ops_open(struct kvs_shard *shard)
{
    for (unsigned op = 0; op < KV_OP_COUNT; op++) {
        if (shard->ops[op].open == NULL)
            continue;
        shard->op_state[op] = shard->ops[op].open(shard);
        if (shard->op_state[op] == NULL)
            return false;
    }
    return true;
}

static void ops_close(struct kvs_shard *shard)
{
    for (unsigned op = 0; op < KV_OP_COUNT; op++)
        if (shard->op_state[op] != NULL)
            shard->ops[op].close(shard->op_state[op]);
}

static bool background_open(struct kvs_shard *shard, const struct kvs_shard_setup *setup)
{
    assert(shard->n_background <= KVS_BACKGROUND_MAX);
    for (uint32_t i = 0; i < shard->n_background; i++) {
        if (shard->background[i].open == NULL)
            continue;
        shard->background_state[i] = shard->background[i].open(shard, setup);
        if (shard->background_state[i] == NULL)
            return false;
    }
    return true;
}

static void background_close(struct kvs_shard *shard)
{
    for (uint32_t i = 0; i < shard->n_background; i++)
        if (shard->background_state[i] != NULL)
            shard->background[i].close(shard->background_state[i]);
}

/* From a thread of the disk's. */
static void wake(void *arg)
{
    struct kvs_shard *shard = arg;

    shard->port->ops->port_wake(shard->port);
}

static kv_status_t tier_open(struct kvs_shard *shard, struct kv_disk *disk)
{
    const struct kvs_disk_tier_setup setup = {.disk = disk,
                                              .store = &shard->store,
                                              .clock = shard->clock,
                                              .thread = shard->index,
                                              .n_threads = shard->n_threads,
                                              .wake = wake,
                                              .job_done = kvs_shard_tier_done,
                                              .arg = shard};

    return kvs_disk_tier_open(&setup, &shard->tier);
}

static kv_status_t object_tier_open(struct kvs_shard *shard,
                                    const struct kvs_shard_setup *setup)
{
    const struct kvs_object_tier_setup object_setup = {.disk = setup->disk,
                                                       .room = setup->disk_room,
                                                       .objects = &shard->objects,
                                                       .clock = shard->clock,
                                                       .draining = &shard->draining,
                                                       .verify_wanted_us =
                                                           &shard->scrub_wanted_us,
                                                       .verify_bytes = setup->scrub_disk_bytes,
                                                       .wake = wake,
                                                       .arrived = kvs_shard_arrived,
                                                       .arg = shard};

    return kvs_object_tier_open(&object_setup, &shard->object_tier);
}

kv_status_t kvs_shard_init(struct kvs_shard *shard, const struct kvs_shard_setup *setup)
{
    kv_status_t status = KV_NO_MEMORY;

    memset(shard, 0, sizeof(*shard));
    shard->ops = setup->ops;
    shard->background = setup->background;
    shard->n_background = setup->n_background;
    shard->index = setup->index;
    shard->n_threads = setup->n_threads;
    shard->stuck_send_us = setup->stuck_send_us;
    shard->object_ttl_us = setup->object_ttl_us;
    shard->clock = setup->clock;
    atomic_init(&shard->seen_us, kv_clock_now(setup->clock));
    shard->replies = setup->replies;
    shard->n_sessions = setup->n_sessions;
    shard->n_clients = setup->n_clients;
    shard->staging_waiters.end = &shard->staging_waiters.first;
    shard->looking.end = &shard->looking.first;
    shard->missing.end = &shard->missing.first;
    shard->woken_end = &shard->woken;

    shard->memory_bytes = setup->memory_bytes;
    shard->pages = setup->pages;
    shard->arena = kvs_arena_create_in(setup->pages);
    shard->sessions = calloc(setup->n_sessions, sizeof(*shard->sessions));
    shard->clients = calloc(setup->n_clients, sizeof(*shard->clients));
    shard->due = calloc(setup->n_clients, sizeof(*shard->due));
    if (shard->clients != NULL && shard->due != NULL) {
        kvs_shard_queues_init(shard);
        kvs_shard_due_init(shard);
    }
    shard->requests = kv_pool_create(setup->n_requests, sizeof(struct kvs_request));
    shard->middles = kv_pool_create(setup->n_requests, KVS_MIDDLE_BYTES);
    shard->bodies = kv_pool_create(KVS_BODIES, KV_WIRE_BODY_MAX);
    shard->stagings = kv_pool_create(KVS_STAGINGS, KV_WIRE_BULK_MAX);
    shard->pending_receives =
        kv_pool_create(KVS_PENDING_RECEIVES, sizeof(struct kvs_pending_receive));
    shard->reply_batches = kv_pool_create(KVS_REPLY_BATCHES, sizeof(struct kvs_reply_batch));
    shard->commands = kv_ring_create(setup->n_commands);
    if (shard->arena == NULL || shard->sessions == NULL || shard->clients == NULL ||
        shard->due == NULL || shard->requests == NULL || shard->middles == NULL ||
        shard->bodies == NULL || shard->stagings == NULL || shard->pending_receives == NULL ||
        shard->reply_batches == NULL || shard->commands == NULL ||
        !kvs_segment_store_init(&shard->store, shard->arena) ||
        !kvs_codebooks_init(&shard->codebooks, &shard->store) ||
        !kvs_objects_init(&shard->objects, shard->arena, &shard->store.health, setup->secret,
                          setup->object_version))
        goto err_fini;
    shard->store.arrived = kvs_shard_segment_arrived;
    shard->store.arrived_arg = shard;
    shard->indexer = kvs_indexer_create(&shard->codebooks, shard->clock, setup->n_sessions);
    if (shard->indexer == NULL || !ops_open(shard) || !background_open(shard, setup))
        goto err_fini;
    for (uint32_t i = 0; i < setup->n_sessions; i++)
        shard->sessions[i].index = i;
    status = setup->transport->ops->port_open(setup->transport, &kvs_shard_events, shard,
                                              &shard->port);
    if (status == KV_OK && setup->disk != NULL)
        status = tier_open(shard, setup->disk);
    if (status == KV_OK && setup->disk != NULL)
        status = object_tier_open(shard, setup);
    if (status == KV_OK)
        return KV_OK;

err_fini:
    kvs_shard_fini(shard);
    return status;
}

void kvs_shard_fini(struct kvs_shard *shard)
{
    /* Clients first, then the port: that ends requests and transfers, which use all the rest.
     * The arena goes last, and with it the memory of all sessions and objects. */
    /* They wake the port. */
    kvs_disk_tier_stop(shard->tier);
    kvs_object_tier_stop(shard->object_tier);
    if (shard->clients != NULL)
        for (uint32_t i = 0; i < shard->n_clients; i++)
            kvs_shard_client_close(shard, &shard->clients[i]);
    if (shard->port != NULL)
        shard->port->ops->port_close(shard->port);
    /* Its jobs have pinned blocks, which the tier forgets when they go. */
    kvs_indexer_destroy(shard->indexer);
    shard->indexer = NULL;
    kvs_disk_tier_close(shard->tier);
    kvs_object_tier_close(shard->object_tier);
    kv_ring_destroy(shard->commands);
    background_close(shard);
    ops_close(shard);
    kvs_codebooks_fini(&shard->codebooks);
    kvs_objects_fini(&shard->objects);
    kv_pool_destroy(shard->reply_batches);
    kv_pool_destroy(shard->pending_receives);
    kv_pool_destroy(shard->stagings);
    kv_pool_destroy(shard->bodies);
    kv_pool_destroy(shard->middles);
    kv_pool_destroy(shard->requests);
    free(shard->due);
    free(shard->clients);
    free(shard->sessions);
    kvs_arena_destroy(shard->arena);
    memset(shard, 0, sizeof(*shard));
}
