/* Who gets a data thread's time: requests that never end, of several classes and clients, whose
 * slices take what a virtual clock says. */
#include "kvserver/store/shard/op.h"
#include "kvserver/store/shard/shard_private.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

enum {
    N_CLIENTS = 4,
    N_REQUESTS = 256,
    SLICE_US = 50,
    LONG_SLICE_US = 170,
};

static struct {
    struct kvs_shard *shard;
    struct kv_clock clock;
    struct kvs_request *requests;
    uint32_t n_requests;
    uint64_t used_us[N_CLIENTS][KV_PRIORITY_COUNT];
    uint64_t slice_us[N_CLIENTS]; /* of each client's requests */
    uint32_t n_slices;
    const struct kvs_request *ran; /* last */
} it;

static bool run(struct kvs_request *request)
{
    const uint64_t us = it.slice_us[request->client->index];

    it.clock.virtual_us += us;
    it.used_us[request->client->index][kv_op_priority(request->header.op)] += us;
    it.n_slices++;
    it.ran = request;
    return true;
}

static const struct kvs_op_type type = {.name = "endless", .run = run};

static int set_up(void **state)
{
    (void)state;
    memset(&it, 0, sizeof(it));
    it.shard = calloc(1, sizeof(*it.shard));
    it.requests = calloc(N_REQUESTS, sizeof(*it.requests));
    if (it.shard == NULL || it.requests == NULL)
        return -1;
    it.shard->clients = calloc(N_CLIENTS, sizeof(*it.shard->clients));
    if (it.shard->clients == NULL)
        return -1;
    it.shard->n_clients = N_CLIENTS;
    kv_clock_virtual_init(&it.clock, 1000);
    it.shard->clock = &it.clock;
    for (uint32_t i = 0; i < N_CLIENTS; i++) {
        it.shard->clients[i].index = i;
        it.slice_us[i] = SLICE_US;
    }
    kvs_shard_queues_init(it.shard);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    free(it.shard->clients);
    free(it.shard);
    free(it.requests);
    return 0;
}

static struct kvs_request *add(uint32_t client, enum kv_op_id op)
{
    struct kvs_request *request = &it.requests[it.n_requests++];

    assert_true(it.n_requests <= N_REQUESTS);
    request->shard = it.shard;
    request->client = &it.shard->clients[client];
    request->type = &type;
    request->header.op = op;
    kvs_request_enqueue(request);
    return request;
}

static void run_for(uint64_t us)
{
    const uint64_t end_us = it.clock.virtual_us + us;

    while (it.clock.virtual_us < end_us)
        assert_true(kvs_shard_run_slice(it.shard));
}

/* `part` of `all`, within 2 % and a slice. */
static void assert_part(uint64_t used_us, uint64_t all_us, double part)
{
    const double wanted = part * (double)all_us;

    assert_true((double)used_us > wanted * 0.98 - LONG_SLICE_US);
    assert_true((double)used_us < wanted * 1.02 + LONG_SLICE_US);
}

/* While queries never end, everything else goes on as well, by weight: 8, 4, 4, 2, 2. */
static void classes_have_weights(void **state)
{
    static const enum kv_op_id ops[KV_PRIORITY_COUNT] = {KV_OP_QUERY, KV_OP_FETCH, KV_OP_APPEND,
                                                         KV_OP_READ, KV_OP_PUT};
    static const double parts[KV_PRIORITY_COUNT] = {0.4, 0.2, 0.2, 0.1, 0.1};

    (void)state;
    for (int i = 0; i < KV_PRIORITY_COUNT; i++) {
        assert_int_equal(kv_op_priority(ops[i]), i);
        for (int j = 0; j < (i == 0 ? 50 : 1); j++)
            add(0, ops[i]);
    }
    run_for(1000000);
    for (int i = 0; i < KV_PRIORITY_COUNT; i++)
        assert_part(it.used_us[0][i], 1000000, parts[i]);
}

static void reads_go_on_under_queries(void **state)
{
    (void)state;
    it.slice_us[1] = LONG_SLICE_US; /* by time used, not by count */
    for (int i = 0; i < 50; i++)
        add(0, KV_OP_QUERY);
    add(1, KV_OP_READ);
    run_for(1000000);
    assert_part(it.used_us[1][KV_PRIORITY_READ], 1000000, 0.2);
}

/* A class that was idle saves nothing up, and is not in debt for what it had alone. */
static void idle_classes_save_nothing(void **state)
{
    (void)state;
    struct kvs_request *query = add(0, KV_OP_QUERY);

    run_for(1000000);
    add(1, KV_OP_READ);
    run_for(10000);
    assert_part(it.used_us[1][KV_PRIORITY_READ], 10000, 0.2);

    kvs_request_unlink(query);
    run_for(1000000);
    kvs_request_enqueue(query);
    assert_true(kvs_shard_run_slice(it.shard));
    assert_true(kvs_shard_run_slice(it.shard));
    assert_ptr_equal(it.ran, query);
    it.used_us[0][KV_PRIORITY_QUERY] = 0;
    run_for(10000);
    assert_part(it.used_us[0][KV_PRIORITY_QUERY], 10000, 0.8);
}

/* One client's 60 queued requests do not stand before another's one. */
static void clients_have_equal_parts(void **state)
{
    (void)state;
    for (int i = 0; i < 60; i++)
        add(0, KV_OP_READ);
    run_for(10000);
    it.used_us[0][KV_PRIORITY_READ] = 0;
    const struct kvs_request *one = add(1, KV_OP_READ);
    const uint32_t n_slices = it.n_slices;

    while (it.ran != one)
        assert_true(kvs_shard_run_slice(it.shard));
    assert_true(it.n_slices - n_slices <= KVS_TURN_US / SLICE_US + 1);
    run_for(1000000);
    assert_part(it.used_us[0][KV_PRIORITY_READ], 1000000, 0.5);
    assert_part(it.used_us[1][KV_PRIORITY_READ], 1000000, 0.5);
}

/* Equal parts of the time, whatever the slices of each. */
static void parts_are_of_time(void **state)
{
    (void)state;
    it.slice_us[0] = LONG_SLICE_US;
    it.slice_us[1] = SLICE_US;
    it.slice_us[2] = 7;
    for (uint32_t i = 0; i < 3; i++)
        for (uint32_t j = 0; j <= i; j++)
            add(i, KV_OP_FETCH);
    run_for(1000000);
    for (uint32_t i = 0; i < 3; i++) /* one more microsecond for each slice */
        assert_part(it.used_us[i][KV_PRIORITY_FETCH], 1000000,
                    i == 2 ? 0.307 : (i == 1 ? 0.344 : 0.349));
}

/* One that asks now and then does not wait for others' turns. */
static void rare_requests_come_first(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 3; i++)
        for (int j = 0; j < 20; j++)
            add(i, KV_OP_READ);
    run_for(10000);
    struct kvs_request *rare = add(3, KV_OP_READ);

    assert_true(kvs_shard_run_slice(it.shard));
    assert_ptr_equal(it.ran, rare);
    kvs_request_unlink(rare);
    run_for(10000);
    kvs_request_enqueue(rare);
    assert_true(kvs_shard_run_slice(it.shard));
    assert_ptr_equal(it.ran, rare);
}

/* A client's own requests take turns; a clock that stands still stops nobody. */
static void requests_take_turns(void **state)
{
    const struct kvs_request *seen[6] = {NULL};

    (void)state;
    it.slice_us[0] = it.slice_us[1] = 0;
    for (int i = 0; i < 6; i++)
        seen[i] = add(0, KV_OP_READ);
    for (int i = 0; i < 12; i++) {
        assert_true(kvs_shard_run_slice(it.shard));
        assert_ptr_equal(it.ran, seen[i % 6]);
    }
    add(1, KV_OP_QUERY);
    const struct kvs_request *put = add(2, KV_OP_PUT);
    for (int i = 0; it.ran != put; i++) {
        assert_true(i < 100);
        assert_true(kvs_shard_run_slice(it.shard));
    }
}

/* A client that has all the buffers that it may have gives one back.  The first that waits is a
 * put of another client, which leaves some to replies, and the next one the client's: both get
 * one. */
static void all_get_staging_that_may(void **state)
{
    struct kvs_request *holders[KVS_STAGINGS - KVS_STAGINGS_KEPT];
    struct kvs_shard *shard = it.shard;

    (void)state;
    shard->staging_waiters.end = &shard->staging_waiters.first;
    shard->stagings = kv_pool_create(KVS_STAGINGS, 64);
    assert_non_null(shard->stagings);
    for (unsigned i = 0; i < KVS_STAGINGS - KVS_STAGINGS_KEPT; i++) {
        holders[i] = add(i < KVS_STAGINGS_CLIENT ? 0 : 1, KV_OP_FETCH);
        assert_true(kvs_request_acquire_staging(holders[i]));
    }
    struct kvs_request *put = add(2, KV_OP_PUT), *reply = add(0, KV_OP_FETCH);

    put->header.bulk_bytes = 1;
    assert_false(kvs_request_acquire_staging(put));
    assert_false(kvs_request_acquire_staging(reply));
    kvs_request_release_staging(holders[0]);
    assert_non_null(put->staging);
    assert_non_null(reply->staging);
    assert_null(shard->staging_waiters.first);
    kv_pool_destroy(shard->stagings);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(classes_have_weights, set_up, tear_down),
        cmocka_unit_test_setup_teardown(reads_go_on_under_queries, set_up, tear_down),
        cmocka_unit_test_setup_teardown(idle_classes_save_nothing, set_up, tear_down),
        cmocka_unit_test_setup_teardown(clients_have_equal_parts, set_up, tear_down),
        cmocka_unit_test_setup_teardown(parts_are_of_time, set_up, tear_down),
        cmocka_unit_test_setup_teardown(rare_requests_come_first, set_up, tear_down),
        cmocka_unit_test_setup_teardown(all_get_staging_that_may, set_up, tear_down),
        cmocka_unit_test_setup_teardown(requests_take_turns, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
