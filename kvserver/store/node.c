/* A node: its configuration, creation and destruction, and the calls that it passes on to its
 * control thread's side and its shards. */
#include "kvserver/base/cpu_quota.h"
#include "kvserver/base/memory.h"
#include "kvserver/cluster/members.h"
#include "kvserver/store/control/metrics.h"
#include "kvserver/store/control/saver.h"
#include "kvserver/store/node_private.h"
#include "kvserver/store/ops/ops.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    MEMORY_PER_THREAD_MIN = 16 << 20
};

static_assert(KV_THREADS_MAX == 128 && KV_CREDITS_MAX == 256 &&
                  KV_OBJECT_TTL_MAX_MS == 2592000000u,
              "limits named in messages below");

static kv_status_t
reject(char *detail, size_t bytes, const char *what, unsigned long long value)
{
    snprintf(detail, bytes, "node: %s: %llu", what, value);
    return KV_INVALID;
}

/* Also puts defaults in place of zeros. */
static kv_status_t config_check(struct kvs_node_config *config,
                                enum kv_idle_mode *ret_idle,
                                char *detail,
                                size_t detail_bytes)
{
    if (config->n_threads == 0 || config->n_threads > KV_THREADS_MAX)
        return reject(detail, detail_bytes, "threads must be 1 to 128", config->n_threads);
    if (config->memory_bytes / config->n_threads < MEMORY_PER_THREAD_MIN)
        return reject(detail, detail_bytes, "memory must be at least 16M per data thread",
                      config->memory_bytes);
    /* Reserving more may succeed; the node would then be killed when it uses the memory. */
    if (config->memory_bytes > kv_memory_total()) {
        reject(detail, detail_bytes, "memory exceeds what this machine has",
               config->memory_bytes);
        return KV_NO_MEMORY;
    }
    if (config->name != NULL &&
        kv_member_check_name("node", config->name, detail, detail_bytes) != KV_OK)
        return KV_INVALID;
    if (config->sessions_max == 0)
        config->sessions_max = 4096;
    if (config->clients_max == 0)
        config->clients_max = 1000;
    if (config->credits == 0)
        config->credits = 64;
    if (config->lease_ms == 0)
        config->lease_ms = 60000;
    if (config->client_lease_ms == 0)
        config->client_lease_ms = 30000;
    if (config->stuck_send_ms == 0)
        config->stuck_send_ms = 10000;
    if (config->sessions_max > 1 << 20)
        return reject(detail, detail_bytes, "sessions must be 1 to 1048576",
                      config->sessions_max);
    if (config->root_sessions == 0)
        config->root_sessions = (config->sessions_max + 15) / 16;
    if (config->clients_max > 1 << 16)
        return reject(detail, detail_bytes, "clients must be 1 to 65536", config->clients_max);
    if (config->object_ttl_s > KV_OBJECT_TTL_MAX_MS / 1000)
        return reject(detail, detail_bytes, "object-ttl must be at most 2592000 s",
                      config->object_ttl_s);
    if (config->eviction != NULL && kvs_eviction_find(config->eviction) == NULL) {
        snprintf(detail, detail_bytes, "node: eviction: %.40s: unknown", config->eviction);
        return KV_INVALID;
    }
    if (!kv_idle_find(config->poll, ret_idle)) {
        snprintf(detail, detail_bytes, "node: poll: %.40s: must be adaptive, busy or sleep",
                 config->poll);
        return KV_INVALID;
    }
    if (config->credits > KV_CREDITS_MAX)
        return reject(detail, detail_bytes, "credits must be 1 to 256", config->credits);
    return KV_OK;
}

kv_status_t
kvs_node_check_config(const struct kvs_node_config *config, char *detail, size_t detail_bytes)
{
    struct kvs_node_config checked = *config;
    enum kv_idle_mode idle;

    return config_check(&checked, &idle, detail, detail_bytes);
}

static kv_status_t thread_init(struct kvs_node *node, uint32_t index)
{
    struct kvs_control *control = &node->control;
    const struct kvs_node_config *config = &control->config;
    struct kvs_shard_setup setup = {
        .ops = kvs_ops,
        .background = kvs_background,
        .n_background = KVS_BACKGROUND_COUNT,
        .index = index,
        .n_threads = config->n_threads,
        .n_sessions = config->sessions_max,
        .n_clients = config->clients_max,
        .n_commands = kvs_node_commands_max(config),
        .n_requests = kvs_node_requests_max(config),
        .pages = node->pages,
        .memory_bytes = config->memory_bytes / config->n_threads,
        .scrub_bytes = (config->scrub_bytes + config->n_threads - 1) / config->n_threads,
        .scrub_disk_bytes =
            (config->scrub_disk_bytes + config->n_threads - 1) / config->n_threads,
        .stuck_send_us = config->stuck_send_ms * UINT64_C(1000),
        .object_ttl_us = config->object_ttl_s * UINT64_C(1000000),
        .secret = kv_random_next(&control->random),
        .clock = config->clock,
        .transport = config->transport,
        .replies = control->replies,
        .disk = config->disk_bytes > 0 ? config->disk : NULL,
        .disk_room = &control->disk_room,
    };

    /* Clients see versions, which must not reveal other output of the generator. */
    kv_random_fill(&control->random, &setup.object_version, sizeof(setup.object_version));
    return kvs_shard_init(&node->shard[index], &setup);
}

/* Of what the control thread had started. */
static void disk_has_ended(void *arg)
{
    struct kvs_node *node = arg;

    if (node->wake_control != NULL)
        node->wake_control(node->wake_arg);
}

kv_status_t kvs_node_create(const struct kvs_node_config *config,
                            struct kvs_node **ret_node,
                            char *detail,
                            size_t detail_bytes)
{
    struct kvs_node *node = calloc(1, sizeof(*node));
    struct kvs_node_config checked = *config;
    uint64_t taken;

    if (node == NULL)
        return KV_NO_MEMORY;
    kv_status_t status = config_check(&checked, &node->idle, detail, detail_bytes);
    if (status != KV_OK)
        goto err_destroy;

    node->idle = kv_idle_within(node->idle, checked.n_threads, kv_cpu_quota());
    snprintf(detail, detail_bytes, "out of memory: node: %llu bytes",
             (unsigned long long)checked.memory_bytes);
    node->shard = calloc(checked.n_threads, sizeof(*node->shard));
    taken =
        checked.n_threads * kvs_shard_takes(kvs_ops, checked.memory_bytes / checked.n_threads);
    node->pages = kvs_pages_create(checked.memory_bytes - taken);
    /* Before the shards: they need its ring of replies and its random numbers. */
    status = kvs_control_init(&node->control, &checked, kvs_ops, node->shard, node->pages);
    if (status == KV_OK)
        status = checked.disk->ops->queue_open(checked.disk, disk_has_ended, node,
                                               &node->control.disk);
    if (node->shard == NULL || node->pages == NULL)
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
        status = kvs_control_port_open(&node->control);
        if (status != KV_OK) {
            snprintf(detail, detail_bytes, "node: control port: %s", kv_status_name(status));
            goto err_destroy;
        }
    }
    status = kvs_models_load(&node->control);
    if (status != KV_OK) {
        snprintf(detail, detail_bytes, "disk: the records of models cannot be read: %s",
                 kv_status_name(status));
        goto err_destroy;
    }
    status = kvs_saver_load(&node->control, detail, detail_bytes);
    if (status != KV_OK)
        goto err_destroy;
    detail[0] = '\0';
    *ret_node = node;
    return KV_OK;

err_destroy:
    kvs_node_destroy(node);
    return status;
}

void kvs_node_destroy(struct kvs_node *node)
{
    if (node == NULL)
        return;
    kvs_node_stop(node);
    /* Only a node that was created as a whole has books to check. */
    if (node->n_threads > 0 && node->n_threads == node->control.n_threads)
        kvs_node_check(node);
    for (uint32_t i = 0; i < node->n_threads; i++)
        kvs_shard_fini(&node->shard[i]);
    kvs_control_fini(&node->control);
    kvs_pages_destroy(node->pages);
    free(node->shard);
    free(node);
}

bool kvs_node_data_step(struct kvs_node *node, uint32_t thread)
{
    return kvs_shard_step(&node->shard[thread]);
}

bool kvs_node_control(struct kvs_node *node,
                      enum kv_op_id op,
                      uint32_t client_index,
                      const struct kv_id128 *client_token,
                      const uint8_t *packed,
                      size_t packed_bytes,
                      kvs_node_reply_fn reply,
                      void *arg)
{
    return kvs_control_begin(&node->control, op, client_index, client_token, packed,
                             packed_bytes, reply, arg);
}

bool kvs_node_control_step(struct kvs_node *node)
{
    return kvs_control_step(&node->control);
}

void kvs_node_client_gone(struct kvs_node *node,
                          uint32_t client_index,
                          const struct kv_id128 *client_token)
{
    kvs_control_client_gone(&node->control, client_index, client_token);
}

bool kvs_node_attach_client(struct kvs_node *node,
                            uint32_t client_index,
                            const struct kv_id128 *client_token)
{
    return kvs_control_attach_client(&node->control, client_index, client_token);
}

bool kvs_node_has_client(struct kvs_node *node,
                         uint32_t client_index,
                         const struct kv_id128 *client_token)
{
    return kvs_client_of(&node->control, client_index, client_token) != NULL;
}

uint64_t kvs_node_clients_lost(const struct kvs_node *node)
{
    return kvs_counted(&node->control.stats.clients_lost);
}

void kvs_node_drain(struct kvs_node *node)
{
    kvs_control_drain(&node->control);
}

bool kvs_node_drained(struct kvs_node *node)
{
    return kvs_control_drained(&node->control);
}

bool kvs_node_drain_requested(const struct kvs_node *node)
{
    return atomic_load((_Atomic bool *)&node->control.drain_requested);
}

uint64_t kvs_node_last_step_us(const struct kvs_node *node)
{
    uint64_t least = UINT64_MAX;

    for (uint32_t i = 0; i < node->n_threads; i++) {
        uint64_t seen_us = atomic_load_explicit(&node->shard[i].seen_us, memory_order_relaxed);

        if (seen_us < least)
            least = seen_us;
    }
    return least;
}

const char *kvs_node_address(const struct kvs_node *node)
{
    return node->control.address;
}

void kvs_node_metrics(struct kvs_node *node, FILE *out)
{
    kvs_control_metrics(&node->control, out);
}

const char *kvs_op_name(enum kv_op_id op)
{
    return (unsigned)op < KV_OP_COUNT ? kvs_ops[op].name : NULL;
}

bool kvs_op_is_control(unsigned op)
{
    return op < KV_OP_COUNT && kvs_ops[op].control != NULL;
}

void kvs_node_list_ops(FILE *out)
{
    for (unsigned op = 0; op < KV_OP_COUNT; op++)
        if (kvs_ops[op].name != NULL)
            fprintf(out, "%s\t%s\t%s\n", kvs_ops[op].name,
                    kvs_op_is_control(op) ? "control" : "data", kvs_ops[op].summary);
}
