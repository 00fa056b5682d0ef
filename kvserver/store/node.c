#include "kvserver/base/log.h"
#include "kvserver/base/memory.h"
#include "kvserver/store/control/control.h"
#include "kvserver/store/ops/ops.h"
#include "proto/kvstore.pb-c.h"

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

/* A model that an earlier node wrote to the disk. */
static void
model_load(void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    struct kv_node *node = arg;

    (void)key;
    (void)key_bytes;
    if (node->n_models == KV_MODELS_MAX)
        kv_log(KV_LOG_WARN, "model: more than %d on the disk, one left out", KV_MODELS_MAX);
    else if (!kv_model_restore(node, value, value_bytes))
        kv_log(KV_LOG_WARN, "model: a record of the disk is not a model, left out: %zu bytes",
               value_bytes);
}

static void write_address(struct kv_node *node)
{
    const void *address;
    size_t bytes;

    node->port->row->port_address(node->port, &address, &bytes);
    size_t at = (size_t)snprintf(node->address, sizeof(node->address),
                                 "%s:", node->config.transport->row->name);
    for (size_t i = 0; i < bytes && at + 2 < sizeof(node->address); i++, at += 2)
        snprintf(node->address + at, 3, "%02x", ((const uint8_t *)address)[i]);
}

static kv_status_t thread_init(struct kv_node *node, uint32_t index)
{
    const struct kv_node_config *config = &node->config;
    struct kv_data_setup setup = {
        .node = node,
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
        .secret = kv_random_next(&node->random),
        .clock = config->clock,
        .transport = config->transport,
        .answers = node->answers,
    };

    /* Clients see versions: they must not tell what the generator made before and after. */
    kv_random_fill(&node->random, &setup.object_version, sizeof(setup.object_version));
    return kv_data_init(&node->data[index], &setup);
}

kv_status_t kv_node_create(const struct kv_node_config *config,
                           struct kv_node **ret_node,
                           char *detail,
                           size_t detail_bytes)
{
    struct kv_node *node = calloc(1, sizeof(*node));
    kv_status_t status = KV_NO_MEMORY;

    if (node == NULL)
        return KV_NO_MEMORY;
    node->config = *config;
    status = config_check(&node->config, detail, detail_bytes);
    if (status != KV_OK)
        goto err_destroy;

    config = &node->config;
    snprintf(node->name, sizeof(node->name), "%s",
             config->name != NULL ? config->name : "node");
    if (config->seed != 0)
        kv_random_init(&node->random, config->seed);
    else
        kv_random_init_secure(&node->random);
    kv_random_fill(&node->random, &node->id, sizeof(node->id));
    node->started_us = kv_clock_now(config->clock);

    node->credits_sure = config->credits < KV_CREDITS_SURE ? config->credits : KV_CREDITS_SURE;
    node->credits_spare = kv_node_works_max(config) - config->clients_max * node->credits_sure;

    snprintf(detail, detail_bytes, "node: memory refused: %llu bytes",
             (unsigned long long)config->memory_bytes);
    status = KV_NO_MEMORY;
    node->sessions = calloc(config->sessions_max, sizeof(*node->sessions));
    node->clients = calloc(config->clients_max, sizeof(*node->clients));
    node->session_of_id = kv_map_create(kv_random_next(&node->random));
    node->data = calloc(config->n_threads, sizeof(*node->data));
    node->answers = kv_ring_create(config->n_threads * kv_node_commands_max(config));
    if (node->sessions == NULL || node->clients == NULL || node->session_of_id == NULL ||
        node->data == NULL || node->answers == NULL)
        goto err_destroy;
    for (; node->n_threads < config->n_threads; node->n_threads++) {
        status = thread_init(node, node->n_threads);
        if (status != KV_OK) {
            snprintf(detail, detail_bytes, "node: data thread %u: %s", node->n_threads,
                     kv_status_name(status));
            goto err_destroy;
        }
    }
    if (config->message_control) {
        status = kv_control_port_open(node);
        if (status != KV_OK) {
            snprintf(detail, detail_bytes, "node: control port: %s", kv_status_name(status));
            goto err_destroy;
        }
        write_address(node);
    }
    config->disk->row->scan(config->disk, "model/", 6, model_load, node);
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
    kv_control_fini(node);
    kv_ring_destroy(node->answers);
    free(node->data);
    free(node);
}

void kv_node_set_control_waker(struct kv_node *node, void (*wake)(void *arg), void *arg)
{
    node->wake_control = wake;
    node->wake_arg = arg;
}

void kv_node_drain(struct kv_node *node)
{
    atomic_store(&node->draining, true);
    for (uint32_t i = 0; i < node->n_threads; i++)
        atomic_store(&node->data[i].draining, true);
}

bool kv_node_drained(struct kv_node *node)
{
    if (!atomic_load(&node->draining) || node->n_calls > 0)
        return false;
    for (uint32_t i = 0; i < node->n_threads; i++)
        if (kv_counted(&node->data[i].stats.in_flight) > 0)
            return false;
    return true;
}

bool kv_node_drain_requested(const struct kv_node *node)
{
    return atomic_load((_Atomic bool *)&node->drain_requested);
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
    return node->address;
}
