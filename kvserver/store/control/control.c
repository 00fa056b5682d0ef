/* control.c - the control thread: its requests, its steps, and its start and end.  Within
 * control/, only message_port.c and the drain operation are above this file.
 */
#include "kvserver/store/control/control.h"

#include "kvserver/store/control/disk_verify.h"
#include "kvserver/store/control/saver.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

static void expire_pins(struct kvs_control *control, uint64_t now_us)
{
    kvs_prefixes_expire(control->prefixes, now_us);
}

/* Tasks that the control thread repeats, and how often. */
static const struct {
    uint64_t every_us;
    void (*run)(struct kvs_control *control, uint64_t now_us);
} periodic_tasks[KVS_PERIODIC_TASKS] = {
    {20000, kvs_sessions_expire}, {20000, kvs_clients_check}, {20000, expire_pins},
    {20000, kvs_memory_watch},    {20000, kvs_verify_expire}, {20000, kvs_sessions_rest},
};

bool kvs_control_begin(struct kvs_control *control,
                       enum kv_op_id op,
                       uint32_t client_index,
                       const struct kv_id128 *client_token,
                       const uint8_t *packed,
                       size_t packed_bytes,
                       kvs_node_reply_fn reply,
                       void *arg)
{
    struct kvs_client_record *client = kvs_client_of(control, client_index, client_token);

    assert(kvs_control_has_op(control, op));
    if (client == NULL && op != KV_OP_HELLO && op != KV_OP_GOODBYE) {
        kvs_count(&control->stats.unknown_clients, 1);
        return false;
    }
    /* Out of memory: kvs_call_create() has replied. */
    struct kvs_control_call *call = kvs_call_create(control, op, reply, arg);
    if (call == NULL)
        return true;
    kvs_count(&control->stats.control_requests, 1);
    kvs_count(&control->stats.ops[op].count, 1);
    call->begin_us = kv_clock_now(control->config.clock);
    if (client != NULL) {
        client->heard_us = kv_clock_now(control->config.clock);
        call->tenant = client->tenant;
        call->caller = client;
    }
    call->packed = packed;
    call->packed_bytes = packed_bytes;
    if (control->n_calls > KVS_CALLS_MAX)
        kvs_control_refuse(call, KV_BUSY, "more than %d control requests in flight",
                           KVS_CALLS_MAX);
    else if (packed_bytes > KV_WIRE_CONTROL_MAX)
        kvs_control_refuse(call, KV_TOO_LARGE, "%s: request of %zu bytes, limit %d",
                           control->ops[op].name, packed_bytes, KV_WIRE_CONTROL_MAX);
    else
        control->ops[op].control(call);
    return true;
}

/* ---- drain ------------------------------------------------------------------------------- */

void kvs_control_drain(struct kvs_control *control)
{
    atomic_store(&control->draining, true);
    for (uint32_t i = 0; i < control->n_threads; i++)
        atomic_store(&control->shard[i].draining, true);
}

bool kvs_control_drained(struct kvs_control *control)
{
    if (!atomic_load(&control->draining) || control->n_calls > 0 || !kvs_saver_is_idle(control))
        return false;
    for (uint32_t i = 0; i < control->n_threads; i++)
        if (kvs_counted(&control->shard[i].stats.in_flight) > 0 ||
            !kvs_object_tier_is_idle(control->shard[i].object_tier))
            return false;
    return true;
}

/* ---- one step ---------------------------------------------------------------------------- */

static void on_returned(struct kvs_control *control, struct kvs_command *command)
{
    if (command->kind == KVS_COMMAND_CLIENT_STUCK)
        kvs_client_stuck(control, command);
    else
        kvs_call_command_done(command->owner, command);
}

bool kvs_control_step(struct kvs_control *control)
{
    struct kvs_command *command;
    uint64_t now_us = kv_clock_now(control->config.clock);

    while ((command = kv_ring_pop(control->replies)) != NULL)
        on_returned(control, command);
    if (control->port != NULL)
        while (kv_port_progress(control->port) > 0)
            ;
    (void)kv_disk_progress(control->disk);
    for (int i = 0; i < KVS_PERIODIC_TASKS; i++) {
        if (now_us < control->due_us[i])
            continue;
        control->due_us[i] = now_us + periodic_tasks[i].every_us;
        periodic_tasks[i].run(control, now_us);
    }
    kvs_keep_step(control);
    kvs_prefixes_make_room(control);
    kvs_saver_step(control, now_us);
    kvs_disk_verify_step(control, now_us);
    return control->n_calls > 0;
}

kv_status_t kvs_control_init(struct kvs_control *control,
                             const struct kvs_node_config *config,
                             const struct kvs_op_type *ops,
                             struct kvs_shard *shard,
                             struct kvs_pages *pages)
{
    control->config = *config;
    control->ops = ops;
    control->shard = shard;
    control->pages = pages;
    control->n_threads = config->n_threads;
    snprintf(control->name, sizeof(control->name), "%s",
             config->name != NULL ? config->name : "node");
    if (config->seed != 0)
        kv_random_init(&control->random, config->seed);
    else
        kv_random_init_secure(&control->random);
    kv_random_fill(&control->random, &control->id, sizeof(control->id));
    control->started_us = kv_clock_now(config->clock);

    control->credits_sure = kvs_node_credits_sure(config);
    control->credits_spare =
        kvs_node_requests_max(config) - config->clients_max * control->credits_sure;

    control->replies = kv_ring_create(config->n_threads * kvs_node_commands_max(config));
    const uint64_t secret = kv_random_next(&control->random);
    const struct kvs_eviction_policy *policy =
        config->eviction != NULL ? kvs_eviction_find(config->eviction) : kvs_eviction_at(0);

    control->prefixes = kvs_prefixes_create(kv_mix64(secret + 1), policy, pages);
    return control->prefixes != NULL && kvs_sessions_init(control, secret) &&
                   kvs_clients_init(control, kv_mix64(kv_mix64(secret))) &&
                   control->replies != NULL && kvs_saver_create(control) &&
                   kvs_disk_verify_create(control)
               ? KV_OK
               : KV_NO_MEMORY;
}

void kvs_control_fini(struct kvs_control *control)
{
    /* Nobody is called for what is under way to the disk: it names calls, which end here. */
    if (control->disk != NULL)
        control->disk->disk->ops->queue_close(control->disk);
    /* Replies need the channels, and channels the port: in this order. */
    while (control->calls != NULL)
        kvs_control_refuse(control->calls, KV_UNREACHABLE, "node is stopping");
    if (control->clients != NULL)
        for (uint32_t i = 0; i < control->config.clients_max; i++)
            if (control->clients[i].channel != NULL)
                control->clients[i].channel->ops->channel_close(control->clients[i].channel);
    control->port_closes = true;
    if (control->port != NULL)
        control->port->ops->port_close(control->port);
    kv_map_destroy(control->session_of_id);
    kvs_roots_fini(control);
    if (control->sessions != NULL) {
        for (uint32_t i = 0; i < control->config.sessions_max; i++) {
            /* Data threads have ended: when they used it cannot be asked. */
            control->sessions[i].is_resting = false;
            kvs_session_leave_prefix(control, &control->sessions[i]);
            free(control->sessions[i].writers);
        }
    }
    kvs_disk_verify_destroy(control);
    kvs_saver_destroy(control);
    kvs_prefixes_stop(control);
    free(control->sessions);
    free(control->due);
    kvs_clients_fini(control);
    kv_ring_destroy(control->replies);
    for (uint32_t i = 0; i < control->n_models; i++)
        free(control->models[i]);
}
