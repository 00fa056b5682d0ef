/* kvctl ping: latency of a round trip, and throughput in each direction.
 *
 * Latency: one round trip at a time, each timed.  Throughput: a window of 64 KiB messages, for
 * 0.2 s in each direction.  Both use all data threads in turn.
 */
#include "client/kvctl/kvctl.h"
#include "kvserver/base/json.h"

#include <stdlib.h>

enum {
    PINGS = 1000,
    WARM_PINGS = 50, /* before, not counted: connections are made */
    PING_BYTES = 64,
    RATE_BYTES = 64 << 10,
    WINDOW = 8,
};

#define RATE_S 0.2

struct result {
    double p50_us, p99_us, least_us, most_us;
    double out_bytes_per_s, back_bytes_per_s;
};

static int by_size(const void *a, const void *b)
{
    double left = *(const double *)a, right = *(const double *)b;

    return (left > right) - (left < right);
}

static kv_status_t
measure_latency(struct kv_client *client, uint32_t n_threads, struct result *result)
{
    static double times[PINGS];

    for (uint32_t i = 0; i < WARM_PINGS + PINGS; i++) {
        double start_s = kvctl_now_s();
        struct kv_op *op;
        kv_status_t status =
            kv_ping_begin(client, 0, i % n_threads, PING_BYTES, PING_BYTES, 0, &op);

        if (status == KV_OK)
            status = kv_finish(op);
        if (status != KV_OK)
            return status;
        if (i >= WARM_PINGS)
            times[i - WARM_PINGS] = (kvctl_now_s() - start_s) * 1e6;
    }
    qsort(times, PINGS, sizeof(times[0]), by_size);
    result->p50_us = times[PINGS / 2];
    result->p99_us = times[PINGS * 99 / 100];
    result->least_us = times[0];
    result->most_us = times[PINGS - 1];
    return KV_OK;
}

static kv_status_t measure_rate(struct kv_client *client,
                                uint32_t n_threads,
                                uint32_t bytes_out,
                                uint32_t bytes_back,
                                double *ret_bytes_per_s)
{
    struct kv_op *ops[WINDOW] = {NULL};
    kv_status_t status = KV_OK;
    uint32_t n_begun = 0, n_ended = 0;
    double start_s = kvctl_now_s(), elapsed_s = 0;

    while (status == KV_OK && (elapsed_s < RATE_S || n_ended < n_begun)) {
        struct kv_op **oldest = &ops[n_ended % WINDOW];

        if (elapsed_s < RATE_S && n_begun < n_ended + WINDOW) {
            status = kv_ping_begin(client, 0, n_begun % n_threads, bytes_out, bytes_back, 0,
                                   &ops[n_begun % WINDOW]);
            n_begun += status == KV_OK;
        } else {
            status = kv_finish(*oldest);
            *oldest = NULL;
            n_ended++;
            elapsed_s = kvctl_now_s() - start_s;
        }
    }
    for (uint32_t i = 0; i < WINDOW; i++)
        kv_op_free(ops[i]);
    if (status == KV_OK)
        *ret_bytes_per_s = (double)n_ended * RATE_BYTES / elapsed_s;
    return status;
}

static void
print_json(const char *node, const struct kv_node_info *info, const struct result *result)
{
    struct kv_json json;

    kv_json_begin(&json, stdout);
    kv_json_text(&json, "node", node);
    kv_json_text(&json, "name", info->name);
    kv_json_text(&json, "transport", info->transport);
    kv_json_number(&json, "threads", info->n_threads);
    kv_json_number(&json, "pings", PINGS);
    kv_json_number(&json, "ping_bytes", PING_BYTES);
    kv_json_number(&json, "p50_us", result->p50_us);
    kv_json_number(&json, "p99_us", result->p99_us);
    kv_json_number(&json, "min_us", result->least_us);
    kv_json_number(&json, "max_us", result->most_us);
    kv_json_number(&json, "rate_bytes", RATE_BYTES);
    kv_json_number(&json, "window", WINDOW);
    kv_json_number(&json, "to_node_bytes_per_s", result->out_bytes_per_s);
    kv_json_number(&json, "from_node_bytes_per_s", result->back_bytes_per_s);
    kv_json_end(&json);
}

static bool ping_node(const struct kvctl *ctl, unsigned index)
{
    const char *node = ctl->nodes[index];
    struct kv_client *client = kvctl_open_node(ctl, node);
    struct result result = {0};
    struct kv_node_info info;
    kv_status_t status;

    if (client == NULL)
        return false;
    kv_client_node(client, 0, &info);
    uint32_t n_threads = info.n_threads;

    status = measure_latency(client, n_threads, &result);
    if (status == KV_OK)
        status =
            measure_rate(client, n_threads, RATE_BYTES, PING_BYTES, &result.out_bytes_per_s);
    if (status == KV_OK)
        status =
            measure_rate(client, n_threads, PING_BYTES, RATE_BYTES, &result.back_bytes_per_s);
    if (status != KV_OK)
        kvctl_node_failed(ctl, node, status, kv_client_detail(client));
    else {
        kv_client_node(client, 0, &info);
        if (ctl->options.json)
            print_json(node, &info, &result);
        else
            printf("node %s: %d round trips of %d B: p50 %.1f us, p99 %.1f us; "
                   "%d KiB messages: %.2f GB/s sent, %.2f GB/s received; over %s\n",
                   node, PINGS, PING_BYTES, result.p50_us, result.p99_us, RATE_BYTES >> 10,
                   result.out_bytes_per_s / 1e9, result.back_bytes_per_s / 1e9, info.transport);
    }
    kv_client_close(client);
    return status == KV_OK;
}

int kvctl_ping_run(const struct kvctl *ctl)
{
    return kvctl_each_node(ctl, ping_node);
}
