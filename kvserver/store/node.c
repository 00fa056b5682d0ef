#include "kvserver/base/memory.h"
#include "kvserver/store/control/metrics.h"
#include "kvserver/store/node_private.h"
#include "kvserver/store/ops/ops.h"

#include <assert.h>
#include <stdlib.h>

enum {
    MEMORY_PER_THREAD_MIN = 16 << 20
};

static_assert(KV_THREADS_MAX == 64 && KV_CREDITS_MAX == 256, "bounds that texts here name");

static kv_status_t
refuse(char *detail, size_t bytes, const char *what, unsigned long long value)
{
    snprintf(detail, bytes, "node: %s: %llu", what, value);
    return KV_INVALID;
}

static kv_status_t
config_check(struct kv_node_config *config, char *detail, size_t detail_bytes)
{
    if (config->n_threads == 0 || config->n_threads > KV_THREADS_MAX)
        return refuse(detail, detail_bytes, "threads out of 1..64", config->n_threads);
    if (config->memory_bytes / config->n_threads < MEMORY_PER_THREAD_MIN)
        return refuse(detail, detail_bytes, "too little memory, 16M per data thread needed",
                      config->memory_bytes);
    if (config->memory_bytes > kv_memory_total()) {
        refuse(detail, detail_bytes, "more memory than this machine may use",
               config->memory_bytes);
        return KV_NO_MEMORY;
    }
    if (config->sessions_max == 0)
        config->sessions_max = 4096;
    if (config->clients_max == 0)
        config->clients_max = 256;
    if (config->credits == 0)
        config->credits = 64;
    if (config->lease_ms == 0)
        config->lease_ms = 60000;
    if (config->client_lease_ms == 0)
        config->client_lease_ms = 30000;
    if (config->stuck_send_ms == 0)
        config->stuck_send_ms = 10000;
    if (config->sessions_max > 1 << 20)
        return refuse(detail, detail_bytes, "sessions out of 1..1048576", config->sessions_max);
    if (config->clients_max > 1 << 16)
        return refuse(detail, detail_bytes, "clients out of 1..65536", config->clients_max);
    if (config->credits > KV_CREDITS_MAX)
        return refuse(detail, detail_bytes, "credits out of 1..256", config->credits);
    return KV_OK;
}

static kv_status_t thread_init(struct kv_node *node, uint32_t index)
{
    struct kvs_control *control = &node->control;
    const struct kv_node_config *config = &control->config;
    struct kv_data_setup setup = {
        .ops = kv_ops,
        .background = kvs_background,
        .n_background = KVS_BACKGROUND_COUNT,
        .index = index,
        .n_threads = config->n_threads,
        .n_parts = config->sessions_max,
        .n_peers = config->clients_max,
        .n_commands = kv_node_commands_max(config),
        .n_works = kv_node_works_max(config),
        .memory_bytes = config->memory_bytes / config->n_threads,
        .scrub_bytes = (config->scrub_bytes + config->n_threads - 1) / config->n_threads,
        .stuck_send_us = config->stuck_send_ms * UINT64_C(1000),
        .secret = kv_random_next(&control->random),
        .clock = config->clock,
        .transport = config->transport,
        .answers = control->answers,
    };

    /* Clients see versions: they must not tell what the generator made before and after. */
    kv_random_fill(&control->random, &setup.object_version, sizeof(setup.object_version));
    return kv_data_init(&node->data[index], &setup);
}

kv_status_t kv_node_create(const struct kv_node_config *config,
                           struct kv_node **ret_node,
                           char *detail,
                           size_t detail_bytes)
{
    struct kv_node *node = calloc(1, sizeof(*node));
    struct kv_node_config checked = *config;

    if (node == NULL)
        return KV_NO_MEMORY;
    kv_status_t status = config_check(&checked, detail, detail_bytes);
    if (status != KV_OK)
        goto err_destroy;

    snprintf(detail, detail_bytes, "node: memory refused: %llu bytes",
             (unsigned long long)checked.memory_bytes);
    node->data = calloc(checked.n_threads, sizeof(*node->data));
    status = kvs_control_init(&node->control, &checked, kv_ops, node->data);
    if (node->data == NULL)
        status = KV_NO_MEMORY;
    if (status != KV_OK)
        goto err_destroy;
    for (; node->n_threads < checked.n_threads; node->n_threads++) {
        status = thread_init(node, node->n_threads);
        if (status != KV_OK) {
            snprintf(detail, detail_bytes, "node: data thread %u: %s", node->n_threads,
                     kv_status_name(status));
            goto err_destroy;
        }
    }
    if (checked.message_control) {
        status = kv_control_port_open(&node->control);
        if (status != KV_OK) {
            snprintf(detail, detail_bytes, "node: control port: %s", kv_status_name(status));
            goto err_destroy;
        }
    }
    kvs_models_load(&node->control);
    detail[0] = '\0';
    *ret_node = node;
    return KV_OK;

err_destroy:
    kv_node_destroy(node);
    return status;
}

void kv_node_destroy(struct kv_node *node)
{
    if (node == NULL)
        return;
    kv_node_stop(node);
    for (uint32_t i = 0; i < node->n_threads; i++)
        kv_data_fini(&node->data[i]);
    kv_control_fini(&node->control);
    free(node->data);
    free(node);
}

bool kv_node_data_step(struct kv_node *node, uint32_t thread)
{
    return kv_data_step(&node->data[thread]);
}

bool kv_node_control(struct kv_node *node,
                     enum kv_op_id op,
                     uint32_t client_index,
                     const struct kv_id128 *client_token,
                     const uint8_t *request,
                     size_t request_bytes,
                     kv_node_reply_fn reply,
                     void *arg)
{
    return kvs_control_request(&node->control, op, client_index, client_token, request,
                               request_bytes, reply, arg);
}

bool kv_node_control_step(struct kv_node *node)
{
    return kvs_control_step(&node->control);
}

void kv_node_client_gone(struct kv_node *node,
                         uint32_t client_index,
                         const struct kv_id128 *client_token)
{
    kvs_control_client_gone(&node->control, client_index, client_token);
}

bool kvs_node_attach_client(struct kv_node *node,
                            uint32_t client_index,
                            const struct kv_id128 *client_token)
{
    return kvs_control_attach_client(&node->control, client_index, client_token);
}

bool kvs_node_has_client(struct kv_node *node,
                         uint32_t client_index,
                         const struct kv_id128 *client_token)
{
    return kv_client_of(&node->control, client_index, client_token) != NULL;
}

void kv_node_drain(struct kv_node *node)
{
    kvs_control_drain(&node->control);
}

bool kv_node_drained(struct kv_node *node)
{
    return kvs_control_drained(&node->control);
}

bool kv_node_drain_requested(const struct kv_node *node)
{
    return atomic_load((_Atomic bool *)&node->control.drain_requested);
}

uint64_t kv_node_last_step_us(const struct kv_node *node)
{
    uint64_t least = UINT64_MAX;

    for (uint32_t i = 0; i < node->n_threads; i++) {
        uint64_t seen_us = atomic_load_explicit(&node->data[i].seen_us, memory_order_relaxed);

        if (seen_us < least)
            least = seen_us;
    }
    return least;
}

const char *kv_node_address(const struct kv_node *node)
{
    return node->control.address;
}

void kv_node_metrics(struct kv_node *node, FILE *out)
{
    kvs_control_metrics(&node->control, out);
}

const char *kv_op_name(enum kv_op_id op)
{
    return (unsigned)op < KV_OP_COUNT ? kv_ops[op].name : NULL;
}

bool kv_op_is_control(unsigned op)
{
    return op < KV_OP_COUNT && kv_ops[op].control != NULL;
}

void kv_node_list_ops(FILE *out)
{
    for (unsigned op = 0; op < KV_OP_COUNT; op++)
        if (kv_ops[op].name != NULL)
            fprintf(out, "%s\t%s\t%s\n", kv_ops[op].name,
                    kv_op_is_control(op) ? "control" : "data", kv_ops[op].summary);
}
