/* Round trips through a data thread, without rows. */
#include "tests/bench/bench.h"

#include <stdlib.h>

struct rpc {
    struct kv_client *client;
    unsigned threads;
    uint32_t bytes_out, bytes_back;
    size_t n;
};

static kv_status_t begin_ping(void *arg, size_t i, struct kv_op **ret_op)
{
    const struct rpc *rpc = arg;

    return kv_ping_begin(rpc->client, 0, (uint32_t)(i % rpc->threads), rpc->bytes_out,
                         rpc->bytes_back, 0, ret_op);
}

static bool measure(void *arg, struct bench_sample *ret_sample)
{
    struct rpc *rpc = arg;
    struct bench_pipeline pipeline = {
        .client = rpc->client,
        .window = 1,
        .n = rpc->n,
        .begin = begin_ping,
        .load = rpc,
    };
    struct bench_watch watch;
    bool is_good;

    if (!bench_watch_start(&watch, rpc->n))
        return false;
    is_good = bench_pipeline_run(&pipeline, &watch);
    bench_watch_times(&watch, ret_sample);
    return is_good;
}

static bool run_one(struct bench *bench,
                    const char *name,
                    const char *transport,
                    unsigned threads,
                    uint32_t bytes_out,
                    uint32_t bytes_back)
{
    struct rpc rpc = {
        .threads = threads,
        .bytes_out = bytes_out,
        .bytes_back = bytes_back,
        .n = bench_count(bench, 10000),
    };
    struct bench_exchange bare = {
        .out_bytes = bytes_out,
        .back_bytes = bytes_back,
        .window = 1,
        .n = rpc.n,
        .times = true,
    };
    struct bench_node node;
    struct bench_sample warm_up;
    bool is_good = false;

    if (!bench_node_start(bench, threads, 64 << 20, threads == 1, &node))
        return false;
    rpc.client = bench_client_open(&node, transport);
    is_good = rpc.client != NULL && bench_wire_open(bench, transport, &bare.wire) &&
              measure(&rpc, &warm_up) && bench_wire_measure(&bare, &warm_up) &&
              bench_compare(bench, &(struct bench_comparison){
                                       .name = name,
                                       .unit = "us",
                                       .params = {.transport = transport,
                                                  .threads = threads,
                                                  .window = 1,
                                                  .bytes = bytes_back,
                                                  .request_bytes = bytes_out},
                                       .n_sides = 2,
                                       .sides = {{NULL, measure, &rpc},
                                                 {"bare message", bench_wire_measure, &bare}},
                                   });
    bench_wire_close(bare.wire);
    kv_client_close(rpc.client);
    return bench_node_stop(&node) && is_good;
}

static bool run_ping(struct bench *bench, const struct bench_load *load)
{
    const char *transport;

    for (unsigned i = 0; (transport = bench_transport(bench, i)) != NULL; i++)
        if (!run_one(bench, load->name, transport, 1, 64, 64))
            return false;
    return true;
}

static bool run_query(struct bench *bench, const struct bench_load *load)
{
    const char *transport;

    for (unsigned i = 0; (transport = bench_transport(bench, i)) != NULL; i++)
        if (!run_one(bench, load->name, transport, 1, 8 << 10, 1 << 10))
            return false;
    return true;
}

/* More data threads than two processors can spin for, each pinged in turn. */
static bool run_threads(struct bench *bench, const struct bench_load *load)
{
    const char *transport;

    for (unsigned i = 0; (transport = bench_transport(bench, i)) != NULL; i++)
        if (!run_one(bench, load->name, transport, 4, 64, 64))
            return false;
    return true;
}

const struct bench_load bench_rpc_loads[] = {
    {"rpc.ping", "64 B answered by 64 B", run_ping, 0},
    {"rpc.query", "a request of 8 KB answered by 1 KB", run_query, 0},
    {"rpc.threads", "64 B to each of 4 data threads in turn, nothing pinned", run_threads, 0},
    {NULL, NULL, NULL, 0},
};
