#include "tests/bench/own_node.h"

#include "kvserver/base/log.h"
#include "kvserver/disk/disk.h"
#include "kvserver/net/transport.h"
#include "kvserver/store/node.h"
#include "tests/bench/bench.h"

#include <stdlib.h>
#include <time.h>

enum {
    SESSIONS_MAX = 64,
    CLIENTS_MAX = 8,
    LEASE_MS = 600000,
    DEADLINE_MS = 60000,
};

struct bench_own_node {
    struct kv_clock clock; /* first */
    bool is_started;
    bool is_in_step;
    uint64_t shown_us; /* before this step */
    double step_begin; /* of the thread's time */
    struct kv_transport *transport;
    struct kv_disk *disk;
    struct kvs_node *node;
};

static double thread_seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static uint64_t own_now(const struct kv_clock *clock)
{
    const struct bench_own_node *own = (const struct bench_own_node *)clock;

    if (own->is_started)
        return own->shown_us + kv_clock_now(&kv_clock_real);
    if (own->is_in_step)
        return own->shown_us + (uint64_t)((thread_seconds() - own->step_begin) * 1e6);
    return own->shown_us;
}

bool bench_own_node_start(struct bench_own_node *own)
{
    if (own->is_started)
        return true;
    const kv_status_t status = kvs_node_start(own->node, true);

    if (status == KV_OK) {
        own->shown_us -= kv_clock_now(&kv_clock_real);
        own->is_started = true;
        return true;
    }
    bench_complain("node: start: %s", kv_status_name(status));
    return false;
}

void bench_own_node_stop(struct bench_own_node *own)
{
    kvs_node_stop(own->node);
    own->shown_us = own_now(&own->clock);
    own->is_started = false;
}

void bench_own_node_step(struct bench_own_node *own)
{
    kvs_node_control_step(own->node);
    own->step_begin = thread_seconds();
    own->is_in_step = true;
    kvs_node_data_step(own->node, 0);
    own->shown_us = own_now(&own->clock);
    own->is_in_step = false;
}

struct bench_own_node *bench_own_node_open(uint64_t memory_bytes)
{
    const struct kv_transport_config transport_config = {0};
    struct bench_own_node *own = calloc(1, sizeof(*own));
    char detail[256] = "out of memory";
    kv_status_t status = KV_NO_MEMORY;

    if (own == NULL) {
        bench_complain("node: out of memory");
        return NULL;
    }
    kv_log_set_level(KV_LOG_WARN);
    own->clock = (struct kv_clock){.name = "own", .now_us = own_now};
    own->shown_us = kv_clock_now(&kv_clock_real);
    own->disk = kv_disk_memory_open(&own->clock, 0);
    if (own->disk != NULL)
        status = kv_transport_loopback.open(&transport_config, &own->transport, detail,
                                            sizeof(detail));
    if (status == KV_OK) {
        const struct kvs_node_config config = {
            .name = "own",
            .memory_bytes = memory_bytes,
            .n_threads = 1,
            .sessions_max = SESSIONS_MAX,
            .clients_max = CLIENTS_MAX,
            .lease_ms = LEASE_MS,
            .client_lease_ms = LEASE_MS,
            .clock = &own->clock,
            .transport = own->transport,
            .message_control = true,
            .disk = own->disk,
        };

        status = kvs_node_create(&config, &own->node, detail, sizeof(detail));
    }
    if (status != KV_OK)
        bench_complain("node: %s: %s", kv_status_name(status), detail);
    if (status == KV_OK && bench_own_node_start(own))
        return own;
    bench_own_node_close(own);
    return NULL;
}

void bench_own_node_close(struct bench_own_node *own)
{
    if (own == NULL)
        return;
    if (own->is_started)
        bench_own_node_stop(own);
    if (own->node != NULL)
        kvs_node_destroy(own->node);
    if (own->transport != NULL)
        own->transport->ops->close(own->transport);
    kv_disk_close(own->disk);
    free(own);
}

struct kv_client *bench_own_node_client(struct bench_own_node *own)
{
    const struct kv_client_options options = {
        .nodes = kvs_node_address(own->node),
        .name = "kv_bench",
        .deadline_ms = DEADLINE_MS,
        .peer_timeout_ms = DEADLINE_MS,
    };
    struct kv_client *client = NULL;
    char detail[512] = "";
    const kv_status_t status = kv_client_open(&options, &client, detail, sizeof(detail));

    if (status == KV_OK)
        return client;
    bench_complain("client: %s: %s", kv_status_name(status), detail);
    return NULL;
}
