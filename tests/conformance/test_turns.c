/* test_turns.c - queries of several clients at one data thread: they progress together, small
 * ones do not wait for large ones, and each is answered as it is alone.
 *
 * A node and its clients, whole and over the loopback, in one thread.  The clock goes on by
 * LOOK_US whenever somebody looks at it, so a run repeats exactly. */
#include "client/client.h"
#include "client/control_message.h"
#include "kvserver/disk/disk.h"
#include "kvserver/store/ops/query.h"
#include "tests/support/node_data.h"
#include "tests/support/rows.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    CLIENTS = 6, /* more than have a query at work */
    TOKENS = 8192,
    PUT_TOKENS = 1024,
    HEADS = 4,
    D = 64,
    HEAVY_VECTORS = 16,
    HEAVY_K = 500,
    HEAVIES = 50,
    MEMORY_BYTES = 256 << 20,
    LOOK_US = 20,
};

static struct {
    struct kv_clock clock;
    struct kv_transport *transport;
    struct kv_disk *disk;
    struct kvs_node *node;
    struct kv_client *clients[CLIENTS];
    struct kv_session *sessions[CLIENTS];
    struct kv_model_info model;
    struct kv_random random;
    float vectors[CLIENTS][HEADS * HEAVY_VECTORS * D];
    uint64_t n_steps;
} it;

static uint64_t now(const struct kv_clock *clock)
{
    (void)clock;
    return it.clock.virtual_us += LOOK_US;
}

static void step(void)
{
    for (unsigned i = 0; i < CLIENTS; i++)
        if (it.clients[i] != NULL)
            kv_poll(it.clients[i]);
    kvs_node_data_step(it.node, 0);
    kvs_node_control_step(it.node);
    it.n_steps++;
}

static void run_well(kv_status_t begun, struct kv_op *op)
{
    assert_int_equal(begun, KV_OK);
    while (kv_op_status(op) == KV_IN_PROGRESS)
        step();
    if (kv_op_status(op) != KV_OK)
        fail_msg("%s", kv_op_detail(op));
}

static void open_client(unsigned client, const char *address)
{
    const struct kvc_node_setup remote = {.address = address, .mode = KV_CHANNEL_NETWORK};
    const struct kvc_client_setup setup = {
        .nodes = &remote,
        .n_nodes = 1,
        .transport = it.transport,
        .open_control = kvc_control_message_open,
        .clock = &it.clock,
        .seed = 2 + client,
        .name = "test",
        .deadline_ms = 3600000,
        .peer_timeout_ms = 3600000,
    };

    assert_int_equal(kvc_client_create(&setup, &it.clients[client]), KV_OK);
}

static void fill_session(unsigned client)
{
    struct kv_buffer *buffer;
    struct kv_op *op = NULL;

    kv_status_t status = kv_open_begin(it.clients[client], &it.model, NULL, 0, &op);
    run_well(status, op);
    it.sessions[client] = kv_op_session(op);
    kv_op_free(op);
    assert_int_equal(
        kv_buffer_alloc(it.clients[client], (size_t)PUT_TOKENS * HEADS * 2 * D * 2, &buffer),
        KV_OK);
    for (uint32_t begin = 0; begin < TOKENS; begin += PUT_TOKENS) {
        const struct kv_rows box = {
            .n_layers = 1, .token_begin = begin, .n_tokens = PUT_TOKENS};
        const struct kv_rows_io io = {.buffer = buffer};
        uint16_t *halves = kv_buffer_data(buffer);

        for (size_t i = 0; i < (size_t)PUT_TOKENS * HEADS * 2 * D; i++) /* below 2 */
            halves[i] = (uint16_t)(kv_random_below(&it.random, 0x4000) |
                                   kv_random_below(&it.random, 2) << 15);
        status = kv_put_begin(it.sessions[client], &box, &io, 0, &op);
        run_well(status, op);
        kv_op_free(op);
    }
    kv_buffer_free(buffer);
    for (unsigned i = 0; i < HEADS * HEAVY_VECTORS * D; i++)
        it.vectors[client][i] = (float)kv_random_below(&it.random, 2001) / 1000 - 1;
}

static int set_up(void **state)
{
    static char address[2 * KV_WIRE_ADDRESS_MAX + 32];
    const struct kv_transport_config transport = {0};
    const uint16_t heads[] = {HEADS};
    char detail[256];

    (void)state;
    memset(&it, 0, sizeof(it));
    it.clock = (struct kv_clock){.name = "looks", .now_us = now, .virtual_us = 1000000};
    kv_random_init(&it.random, 1);
    assert_int_equal(
        kv_transport_loopback.open(&transport, &it.transport, detail, sizeof(detail)), KV_OK);
    it.disk = kv_disk_memory_open(&it.clock, 0);
    const struct kvs_node_config config = {
        .name = "turns",
        .memory_bytes = MEMORY_BYTES,
        .n_threads = 1,
        .sessions_max = 16,
        .clients_max = CLIENTS,
        .lease_ms = 3600 * 1000 * 24,
        .client_lease_ms = 3600 * 1000 * 24,
        .seed = 1,
        .clock = &it.clock,
        .transport = it.transport,
        .message_control = true,
        .disk = it.disk,
    };
    if (kvs_node_create(&config, &it.node, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    snprintf(address, sizeof(address), "%s", kvs_node_address(it.node));
    test_model(&it.model, "turns", 1, heads, D, D);
    for (unsigned i = 0; i < CLIENTS; i++) {
        open_client(i, address);
        fill_session(i);
    }
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    for (unsigned i = 0; i < CLIENTS; i++)
        kv_client_close(it.clients[i]);
    for (unsigned i = 0; i < CLIENTS; i++)
        it.clients[i] = NULL;
    for (int i = 0; i < 100; i++)
        step();
    assert_true(kvs_query_queue_is_idle(kvs_query_queue_of(node_data(it.node, 0))));
    kvs_node_check_memory(it.node);
    kvs_node_destroy(it.node);
    it.disk->ops->close(it.disk);
    it.transport->ops->close(it.transport);
    return 0;
}

static struct kv_query
query_of(unsigned client, uint32_t n_heads, uint32_t n_vectors, uint32_t k)
{
    return (struct kv_query){
        .n_kv_heads = n_heads,
        .n_queries = n_vectors,
        .queries = it.vectors[client],
        .scale = 0.125f,
        .merge = KV_MERGE_SUM,
        .answer = KV_ANSWER_ATTEND,
        .want_ids = true,
        .k = k,
        .rerank = 2,
        .n_ranges = 1,
    };
}

static struct kv_op *
ask(unsigned client, uint32_t n_heads, uint32_t n_vectors, uint32_t end, uint32_t k)
{
    const struct kv_range range = {0, end};
    struct kv_query query = query_of(client, n_heads, n_vectors, k);
    struct kv_op *op = NULL;

    query.ranges = &range;

    assert_int_equal(kv_query_begin(it.sessions[client], &query, NULL, 0, &op), KV_OK);
    return op;
}

static uint32_t max(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static struct kv_op *ask_much(unsigned client)
{
    return ask(client, HEADS, HEAVY_VECTORS, TOKENS, HEAVY_K);
}

static struct kv_op *ask_little(unsigned client)
{
    return ask(client, 1, 1, 256, 8);
}

static bool is_done(const struct kv_op *op)
{
    if (kv_op_status(op) == KV_IN_PROGRESS)
        return false;
    if (kv_op_status(op) != KV_OK)
        fail_msg("%s", kv_op_detail(op));
    return true;
}

static uint64_t steps_of(const struct kv_op *op)
{
    const uint64_t begun = it.n_steps;

    while (!is_done(op))
        step();
    return it.n_steps - begun;
}

static void assert_same(const struct kv_op *a, const struct kv_op *b)
{
    for (uint32_t head = 0; head < HEADS; head++) {
        struct kv_query_result x, y;

        assert_int_equal(kv_op_query_result(a, head, &x), KV_OK);
        assert_int_equal(kv_op_query_result(b, head, &y), KV_OK);
        assert_int_equal(x.n_ids, HEAVY_K);
        assert_int_equal(y.n_ids, HEAVY_K);
        assert_memory_equal(x.ids, y.ids, HEAVY_K * sizeof(*x.ids));
        assert_memory_equal(x.outputs, y.outputs, HEAVY_VECTORS * D * sizeof(float));
        assert_memory_equal(x.lses, y.lses, HEAVY_VECTORS * sizeof(float));
    }
}

/* One client has 50 large queries outstanding; another one's small query waits for a turn at
 * most, not for one of them, let alone for all. */
static void small_queries_do_not_wait(void **state)
{
    struct kv_op *heavies[HEAVIES], *op;

    (void)state;
    op = ask_much(0);
    const uint64_t alone_heavy = steps_of(op);
    kv_op_free(op);
    op = ask_little(1);
    const uint64_t alone = steps_of(op);
    kv_op_free(op);

    for (unsigned i = 0; i < HEAVIES; i++)
        heavies[i] = ask_much(0);
    for (uint64_t i = 0; i < 3 * alone_heavy; i++)
        step();
    assert_false(is_done(heavies[HEAVIES - 1]));
    for (unsigned i = 0; i < 5; i++) {
        op = ask_little(1);
        const uint64_t steps = steps_of(op);

        print_message("%llu steps beside large queries of %llu, %llu alone\n",
                      (unsigned long long)steps, (unsigned long long)alone_heavy,
                      (unsigned long long)alone);
        assert_true(steps <= 2 * alone + 10);
        assert_true(steps < alone_heavy / 2);
        kv_op_free(op);
    }
    assert_false(is_done(heavies[HEAVIES - 1]));
    for (unsigned i = 0; i < HEAVIES; i++) {
        (void)steps_of(heavies[i]);
        kv_op_free(heavies[i]);
    }
}

/* More clients than can have a query at work: none falls behind, whoever came first, and the
 * answers are those of a query alone, bit by bit. */
static void clients_progress_together(void **state)
{
    enum {
        EACH = 6
    };
    struct kv_op *alone[CLIENTS], *ops[CLIENTS][EACH];
    unsigned n_done[CLIENTS] = {0};
    bool is_over = false;

    (void)state;
    for (unsigned i = 0; i < CLIENTS; i++) {
        alone[i] = ask_much(i);
        (void)steps_of(alone[i]);
    }
    for (unsigned i = 0; i < CLIENTS; i++)
        for (unsigned j = 0; j < EACH; j++)
            ops[i][j] = ask_much(i);
    while (!is_over) {
        unsigned least = EACH, most = 0;

        step();
        for (unsigned i = 0; i < CLIENTS; i++) {
            while (n_done[i] < EACH && is_done(ops[i][n_done[i]]))
                n_done[i]++;
            least = n_done[i] < least ? n_done[i] : least;
            most = n_done[i] > most ? n_done[i] : most;
        }
        assert_true(most <= least + 2);
        is_over = least == EACH;
    }
    for (unsigned i = 0; i < CLIENTS; i++) {
        for (unsigned j = 0; j < EACH; j++) {
            assert_same(ops[i][j], alone[i]);
            kv_op_free(ops[i][j]);
        }
        kv_op_free(alone[i]);
    }
}

/* Clients that go with queries at work and waiting leave their places to others. */
static void places_of_lost_clients_are_free(void **state)
{
    struct kv_op *ops[CLIENTS][8];

    (void)state;
    for (unsigned i = 0; i < CLIENTS; i++)
        for (unsigned j = 0; j < 8; j++)
            ops[i][j] = ask_much(i);
    for (int i = 0; i < 100; i++)
        step();
    for (unsigned i = 1; i < CLIENTS; i++) {
        for (unsigned j = 0; j < 8; j++)
            kv_op_free(ops[i][j]);
        kv_client_close(it.clients[i]);
        it.clients[i] = NULL;
    }
    for (unsigned j = 0; j < 8; j++) {
        (void)steps_of(ops[0][j]);
        kv_op_free(ops[0][j]);
    }
}

/* Queries that wait for others hold no buffers, which fetches and puts need. */
static void waiting_queries_hold_no_buffers(void **state)
{
    enum {
        EACH = 40
    };
    const struct kvs_shard *shard = node_data(it.node, 0);
    const struct kv_range range = {0, TOKENS};
    struct kv_op *ops[CLIENTS][EACH];
    struct kv_buffer *buffers[CLIENTS];
    uint32_t n_stagings = 0, n_bodies = 0, n_requests = 0;

    (void)state;
    for (unsigned i = 0; i < CLIENTS; i++) {
        struct kv_query query = query_of(i, HEADS, 2, 100);

        query.ranges = &range;
        query.answer = KV_ANSWER_ROWS;
        query.want_ids = false;
        const size_t bytes = kv_query_rows_bytes_max(kv_session_schema(it.sessions[i]), &query);
        assert_int_equal(kv_buffer_alloc(it.clients[i], EACH * bytes, &buffers[i]), KV_OK);
        for (unsigned j = 0; j < EACH; j++) {
            const struct kv_rows_io io = {.buffer = buffers[i], .offset = j * bytes};

            assert_int_equal(kv_query_begin(it.sessions[i], &query, &io, 0, &ops[i][j]), KV_OK);
        }
    }
    for (unsigned i = 0; i < CLIENTS; i++) {
        for (unsigned j = 0; j < EACH; j++) {
            while (!is_done(ops[i][j])) {
                step();
                n_stagings = max(n_stagings, kv_pool_used(shard->stagings));
                n_bodies = max(n_bodies, kv_pool_used(shard->bodies));
                n_requests = max(n_requests, kv_pool_used(shard->requests));
            }
            kv_op_free(ops[i][j]);
        }
        kv_buffer_free(buffers[i]);
    }
    assert_true(n_requests >= CLIENTS * EACH);
    /* One for each query at work, and one for a reply on its way to each client. */
    assert_in_range(n_stagings, 1, KVS_QUERIES_AT_ONCE + CLIENTS);
    assert_in_range(n_bodies, 1, KVS_QUERIES_AT_ONCE + CLIENTS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(small_queries_do_not_wait, set_up, tear_down),
        cmocka_unit_test_setup_teardown(clients_progress_together, set_up, tear_down),
        cmocka_unit_test_setup_teardown(waiting_queries_hold_no_buffers, set_up, tear_down),
        cmocka_unit_test_setup_teardown(places_of_lost_clients_are_free, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
