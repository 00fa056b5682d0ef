/* Objects, one request in flight: what other stores do, too. */
#include "tests/bench/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    NAME_BYTES = 48
};

struct objects {
    struct bench *bench;
    struct kv_client *client;
    struct kv_buffer *from, *to;
    enum kv_object_verb verb;
    size_t bytes; /* of one */
    size_t n;
    unsigned round; /* of puts: each gives new names */
    struct kv_object object;
    char name[NAME_BYTES];
};

static kv_status_t begin_object(void *arg, size_t i, struct kv_op **ret_op)
{
    struct objects *objects = arg;
    bool is_get = objects->verb == KV_OBJECT_GET;

    snprintf(objects->name, sizeof(objects->name), "bench/%zu/%u/%zu", objects->bytes,
             objects->round, i);
    objects->object = (struct kv_object){
        .name = objects->name,
        .buffer = is_get ? objects->to : objects->from,
        .offset = i * objects->bytes,
        .bytes = objects->bytes,
    };
    return kv_objects_begin(objects->client, objects->verb, &objects->object, 1, 0, ret_op);
}

static bool
run_verb(struct objects *objects, enum kv_object_verb verb, struct bench_sample *ret_sample)
{
    struct bench_pipeline pipeline = {
        .client = objects->client,
        .window = 1,
        .n = objects->n,
        .begin = begin_object,
        .load = objects,
    };
    struct bench_watch watch;
    bool is_good;

    objects->verb = verb;
    if (!bench_watch_start(&watch, objects->n))
        return false;
    is_good = bench_pipeline_run(&pipeline, &watch);
    bench_watch_rate(&watch, objects->bytes, ret_sample);
    return is_good;
}

/* Puts under new names; what was put in the round before goes. */
static bool measure_put(void *arg, struct bench_sample *ret_sample)
{
    struct objects *objects = arg;
    struct bench_sample ignored;

    if (!run_verb(objects, KV_OBJECT_DELETE, &ignored))
        return false;
    objects->round++;
    return run_verb(objects, KV_OBJECT_PUT, ret_sample);
}

static bool measure_get(void *arg, struct bench_sample *ret_sample)
{
    return run_verb(arg, KV_OBJECT_GET, ret_sample);
}

static bool put_and_check(struct objects *objects)
{
    struct bench_sample ignored;
    size_t bytes = objects->n * objects->bytes;

    bench_fill(kv_buffer_data(objects->from), bytes, 6);
    memset(kv_buffer_data(objects->to), 0, bytes);
    if (!run_verb(objects, KV_OBJECT_PUT, &ignored) ||
        !run_verb(objects, KV_OBJECT_GET, &ignored))
        return false;
    if (memcmp(kv_buffer_data(objects->from), kv_buffer_data(objects->to), bytes) == 0)
        return true;
    bench_complain("object: other bytes came back than were stored");
    return false;
}

static bool compare(struct objects *objects,
                    const char *name,
                    struct bench_wire *wire,
                    struct bench_socket *socket,
                    struct bench_mooncake *mooncake,
                    struct bench_redis *redis,
                    bool is_put)
{
    struct bench_exchange exchange = {
        .wire = wire,
        .socket = socket,
        .out_bytes = is_put ? objects->bytes : 64,
        .back_bytes = is_put ? 64 : objects->bytes,
        .window = 1,
        .n = objects->n,
    };
    struct bench_mooncake_load load = {
        .mooncake = mooncake,
        .verb = is_put ? "put" : "get",
        .bytes = objects->bytes,
        .n = objects->n,
    };
    struct bench_redis_load redis_load = {
        .redis = redis,
        .is_put = is_put,
        .values = kv_buffer_data(objects->from),
        .bytes = objects->bytes,
        .n = objects->n,
    };
    struct bench_comparison comparison = {
        .name = name,
        .unit = "GB/s",
        .params = {.transport = "tcp",
                   .window = 1,
                   .bytes = objects->bytes,
                   .request_bytes = exchange.out_bytes},
        .n_sides = 3,
        .sides = {{NULL, is_put ? measure_put : measure_get, objects},
                  {"bare message", bench_wire_measure, &exchange},
                  {"polling socket pair", bench_socket_measure, &exchange}},
    };
    struct bench_sample warm_up;

    if (mooncake != NULL) {
        comparison.sides[comparison.n_sides++] =
            (struct bench_side){bench_mooncake_name(mooncake), bench_mooncake_measure, &load};
        if (!bench_mooncake_measure(&load, &warm_up))
            return false;
    }
    if (redis != NULL) {
        comparison.sides[comparison.n_sides++] =
            (struct bench_side){bench_redis_name(redis), bench_redis_measure, &redis_load};
        if (!bench_redis_measure(&redis_load, &warm_up))
            return false;
    }
    return bench_wire_measure(&exchange, &warm_up) &&
           bench_socket_measure(&exchange, &warm_up) &&
           bench_compare(objects->bench, &comparison);
}

static bool run_objects(struct bench *bench, const struct bench_load *load)
{
    struct objects objects = {
        .bench = bench,
        .bytes = load->bytes,
        .n = bench_count(bench, bench->data_bytes / 2 / load->bytes),
    };
    size_t bytes = objects.n * objects.bytes;
    const char *size = load->bytes == 1 << 20 ? "1M" : "64K";
    struct bench_mooncake *mooncake = NULL;
    struct bench_redis *redis = NULL;
    struct bench_wire *wire = NULL;
    struct bench_socket *socket = NULL;
    char put[32], get[32];
    struct bench_node node;
    bool is_good;

    if (bench->transport != NULL && strcmp(bench->transport, "tcp") != 0)
        return true;
    snprintf(put, sizeof(put), "object.put.%s", size);
    snprintf(get, sizeof(get), "object.get.%s", size);
    if (!bench_node_start(bench, 1, 3 * bytes + (256u << 20), true, &node))
        return false;
    objects.client = bench_client_open(&node, "tcp");
    is_good = objects.client != NULL &&
              kv_buffer_alloc(objects.client, bytes, &objects.from) == KV_OK &&
              kv_buffer_alloc(objects.client, bytes, &objects.to) == KV_OK &&
              put_and_check(&objects) && bench_wire_open(bench, "tcp", &wire) &&
              bench_socket_open(bench, &socket) &&
              (bench->mooncake == NULL || bench_mooncake_open(bench, 1 << 30, &mooncake)) &&
              (bench->redis == NULL || bench_redis_open(bench, &redis)) &&
              compare(&objects, put, wire, socket, mooncake, redis, true) &&
              compare(&objects, get, wire, socket, mooncake, redis, false);
    bench_redis_close(redis);
    bench_mooncake_close(mooncake);
    bench_socket_close(socket);
    bench_wire_close(wire);
    kv_client_close(objects.client);
    return bench_node_stop(&node) && is_good;
}

const struct bench_load bench_object_loads[] = {
    {"objects.64K", "objects of 64 KB put and got, one request in flight", run_objects,
     64 << 10},
    {"objects.1M", "objects of 1 MB put and got, one request in flight", run_objects, 1 << 20},
    {NULL, NULL, NULL, 0},
};
