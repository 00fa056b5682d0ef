/* test_turns.c - queries at one data thread.  Those of several clients progress together, and
 * small ones do not wait for large ones; those of one batch over forks of a session are at work
 * together.  Each is answered as it is alone.
 *
 * A node and its clients, whole and over the loopback, in one thread.  The clock goes on by
 * LOOK_US whenever somebody looks at it, so a run repeats exactly. */
#include "client/client.h"
#include "client/control_message.h"
#include "client/dispatch.h"
#include "kvserver/disk/disk.h"
#include "kvserver/store/ops/query.h"
#include "tests/support/node_data.h"
#include "tests/support/rows.h"
#include "tests/support/worst_client.h"

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
    struct worst_client *worst; /* NULL: none */
} it;

static uint64_t now(const struct kv_clock *clock)
{
    (void)clock;
    return it.clock.virtual_us += LOOK_US;
}

static void step(void)
{
    if (it.worst != NULL)
        worst_client_step(it.worst);
    for (unsigned i = 0; i < CLIENTS; i++)
        if (it.clients[i] != NULL)
            kv_poll(it.clients[i]);
    kvs_node_data_step(it.node, 0);
    kvs_node_control_step(it.node);
    kvs_query_queue_check(node_data(it.node, 0));
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
        .sessions_max = 24,
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
    kvs_node_check(it.node);
    kvs_node_check_memory(it.node);
    kvs_node_destroy(it.node);
    kv_disk_close(it.disk);
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

static uint64_t max64(uint64_t a, uint64_t b)
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

/* A client that does the worst it may does not slow another one's queries down by more than
 * three times. */
static void the_worst_client_is_one_of_two(void **state)
{
    enum {
        QUERIES = 40
    };
    uint64_t alone = 0, beside = 0;
    struct kv_buffer *buffer;

    (void)state;
    for (unsigned i = 0; i < QUERIES; i++) {
        struct kv_op *op = ask_much(1);

        alone = max64(alone, steps_of(op));
        kv_op_free(op);
    }
    assert_int_equal(kv_buffer_alloc(it.clients[0], WORST_CLIENT_BYTES, &buffer), KV_OK);
    it.worst = worst_client_open(it.clients[0], buffer);
    assert_non_null(it.worst);
    while (!worst_client_is_at_work(it.worst))
        step();
    for (unsigned i = 0; i < QUERIES; i++) {
        struct kv_op *op = ask_much(1);

        beside = max64(beside, steps_of(op));
        kv_op_free(op);
    }
    print_message("at most %llu steps beside the worst client, %llu alone\n",
                  (unsigned long long)beside, (unsigned long long)alone);
    assert_true(beside <= 3 * alone);
    worst_client_close(it.worst);
    it.worst = NULL;
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

/* Leaves pipelines, but for the first, room for small queries only, as with less memory.  Returns
 * the room that they had. */
static size_t make_places_small(struct kvs_query_queue *queue, size_t n_floats)
{
    const size_t n_before = queue->places[1].pipeline->n_floats;

    for (unsigned i = 1; i < queue->n_places; i++)
        queue->places[i].pipeline->n_floats = n_floats;
    return n_before;
}

/* Returns the first query of a client that waits for a place. */
static struct kvs_request *first_waiter(const struct kvs_query_queue *queue)
{
    for (unsigned i = 0; i < CLIENTS; i++)
        if (queue->clients[i].waiting.first != NULL)
            return queue->clients[i].waiting.first;
    return NULL;
}

/* Behind a query that only the first pipeline has room for, and that ends while it waits, there
 * is a small one: it gets a pipeline that is free. */
static void next_gets_free_place(bool by_cancel)
{
    struct kvs_query_queue *queue = kvs_query_queue_of(node_data(it.node, 0));
    const size_t n_floats = make_places_small(queue, TOKENS);
    struct kv_op *at_work = ask_much(0), *waits = NULL, *next = NULL;

    while (queue->places[0].owner == NULL)
        step();
    waits = ask_much(1);
    next = ask_little(1);
    for (unsigned i = 0; i < 50; i++)
        step();
    assert_non_null(first_waiter(queue));
    if (by_cancel)
        kv_op_free(waits);
    else
        kvs_request_fail(first_waiter(queue), KV_DEADLINE,
                         "query: not finished before the deadline");
    (void)steps_of(next);
    assert_false(is_done(at_work));
    (void)steps_of(at_work);
    (void)make_places_small(queue, n_floats);
    kv_op_free(at_work);
    kv_op_free(next);
    if (!by_cancel) {
        assert_int_equal(kv_op_status(waits), KV_DEADLINE);
        kv_op_free(waits);
    }
}

static void places_are_free_after_a_deadline(void **state)
{
    (void)state;
    next_gets_free_place(false);
}

static void places_are_free_after_a_cancel(void **state)
{
    (void)state;
    next_gets_free_place(true);
}

/* A client whose only waiting query has ended does not wait: it gets no second place with those
 * that follow, here small ones that are at work in another place when the first becomes free. */
static void clients_have_one_place(void **state)
{
    struct kvs_query_queue *queue = kvs_query_queue_of(node_data(it.node, 0));
    const size_t n_floats = make_places_small(queue, TOKENS);
    struct kv_op *at_work = ask_much(0), *waits, *next[2];

    (void)state;
    while (queue->places[0].owner == NULL)
        step();
    waits = ask_much(1);
    while (first_waiter(queue) == NULL)
        step();
    kv_op_free(waits);
    while (first_waiter(queue) != NULL)
        step();
    for (unsigned i = 0; i < 2; i++)
        next[i] = ask(1, HEADS, 4, 512, 8);
    while (first_waiter(queue) == NULL)
        step();
    assert_true(queue->places[1].begun);
    kv_op_free(at_work);
    while (queue->places[0].owner != NULL)
        step();
    assert_non_null(queue->places[1].owner);
    for (unsigned i = 0; i < 2; i++) {
        (void)steps_of(next[i]);
        kv_op_free(next[i]);
    }
    (void)make_places_small(queue, n_floats);
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

/* Waits for a change of a session.  Returns in how many steps the data thread was in the middle
 * of it. */
static unsigned slices_of(kv_status_t begun, const struct kv_op *op)
{
    unsigned n_slices = 0;

    assert_int_equal(begun, KV_OK);
    while (!is_done(op)) {
        step();
        n_slices += node_data(it.node, 0)->command != NULL;
    }
    return n_slices;
}

/* Long sessions are cut, forked and closed in slices, even those of few units. */
static void changes_are_in_slices(void **state)
{
    struct kv_session *child;
    struct kv_op *op = NULL;
    kv_status_t status;

    (void)state;
    status = kv_truncate_begin(it.sessions[0], 100, 0, &op);
    assert_true(slices_of(status, op) > 0);
    kv_op_free(op);
    op = ask(0, 1, 1, 100, 8);
    (void)steps_of(op);
    kv_op_free(op);

    status = kv_fork_begin(it.sessions[1], TOKENS - 1, 0, &op);
    assert_true(slices_of(status, op) > 0);
    child = kv_op_session(op);
    kv_op_free(op);
    kvs_node_check_memory(it.node);
    status = kv_close_begin(it.sessions[1], 0, &op);
    assert_true(slices_of(status, op) > 0);
    kv_op_free(op);
    kv_session_free(it.sessions[1]);
    kvs_node_check_memory(it.node);
    it.sessions[1] = child;
    op = ask(1, HEADS, HEAVY_VECTORS, TOKENS - 1, HEAVY_K);
    (void)steps_of(op);
    kv_op_free(op);
}

/* Fetches that wait for a staging buffer hold no buffer for their reply. */
static void waiting_fetches_hold_no_buffers(void **state)
{
    enum {
        EACH = 40,
        IDS = 100,
        BYTES = HEADS * IDS * 2 * D * 2,
    };
    const struct kvs_shard *shard = node_data(it.node, 0);
    static uint32_t ids[HEADS * IDS];
    const uint32_t n_ids[HEADS] = {IDS, IDS, IDS, IDS};
    const struct kv_fetch fetch = {.n_ids = n_ids, .ids = ids};
    struct kv_op *ops[CLIENTS][EACH];
    struct kv_buffer *buffers[CLIENTS];
    uint32_t n_bodies = 0, n_requests = 0;

    (void)state;
    for (unsigned i = 0; i < HEADS * IDS; i++)
        ids[i] = 7 * (i % IDS);
    for (unsigned i = 0; i < CLIENTS; i++) {
        assert_int_equal(kv_buffer_alloc(it.clients[i], (size_t)EACH * BYTES, &buffers[i]),
                         KV_OK);
        for (unsigned j = 0; j < EACH; j++) {
            const struct kv_rows_io io = {.buffer = buffers[i], .offset = (size_t)j * BYTES};

            assert_int_equal(kv_fetch_begin(it.sessions[i], &fetch, &io, 0, &ops[i][j]), KV_OK);
        }
    }
    for (unsigned i = 0; i < CLIENTS; i++) {
        for (unsigned j = 0; j < EACH; j++) {
            while (!is_done(ops[i][j])) {
                step();
                n_bodies = max(n_bodies, kv_pool_used(shard->bodies));
                n_requests = max(n_requests, kv_pool_used(shard->requests));
            }
            kv_op_free(ops[i][j]);
        }
        kv_buffer_free(buffers[i]);
    }
    assert_true(n_requests > 2 * KVS_STAGINGS);
    assert_in_range(n_bodies, 1, KVS_STAGINGS);
}

/* Every row is a candidate, and is kept with a score for each vector. */
static struct kv_op *ask_most(void)
{
    const struct kv_range range = {0, TOKENS};
    struct kv_query query = query_of(0, HEADS / 2, 2 * HEAVY_VECTORS, TOKENS / 2);
    struct kv_op *op = NULL;

    query.ranges = &range;
    query.merge = KV_MERGE_NONE;
    query.want_ids = false;
    assert_int_equal(kv_query_begin(it.sessions[0], &query, NULL, 0, &op), KV_OK);
    return op;
}

/* What a query needs beyond its pipeline's own memory are pages of the node: it fails where
 * they are missing, and leaves them to others. */
static void working_memory_counts(void **state)
{
    struct kvs_pages *pages = node_data(it.node, 0)->pages;
    const struct kvs_query_pipeline *pipeline =
        kvs_query_queue_of(node_data(it.node, 0))->places[0].pipeline;
    const uint32_t n_free = atomic_load(&pages->n_free);
    struct kvs_lent_pages others = {KVS_PAGE_NONE, 0};
    struct kv_op *op;

    (void)state;
    op = ask_most();
    (void)steps_of(op);
    kv_op_free(op);
    assert_true(pipeline->lent.n > 0);
    assert_int_equal(atomic_load(&pages->n_free), n_free - pipeline->lent.n);

    /* Kept for the next one, until somebody needs them. */
    while (!kvs_pages_are_short(pages))
        assert_true(kvs_pages_lend(pages, &others, kvs_lent_bytes(&others) + 1));
    for (int i = 0; i < 100; i++)
        step();
    assert_int_equal(pipeline->lent.n, 0);
    assert_int_equal(atomic_load(&pages->n_free), n_free - others.n);

    while (kvs_pages_lend(pages, &others, UINT64_MAX))
        ;
    op = ask_most();
    while (kv_op_status(op) == KV_IN_PROGRESS)
        step();
    assert_int_equal(kv_op_status(op), KV_NO_MEMORY);
    kv_op_free(op);
    op = ask_little(0);
    (void)steps_of(op);
    kv_op_free(op);
    kvs_pages_take_back(pages, &others, 0);
    op = ask_most();
    (void)steps_of(op);
    kv_op_free(op);
    kvs_pages_check(pages);
}

/* Room that no query uses goes back to a node that needs it while index jobs wait. */
static void room_does_not_wait_for_jobs(void **state)
{
    const struct kv_index_options index = {
        .tokens = TOKENS,
        .chapter_blocks = 16,
        .m = 2,
        .bits = 6,
        .iterations = 20,
    };
    struct kvs_shard *shard = node_data(it.node, 0);
    const struct kvs_lent_pages *lent = &kvs_query_queue_of(shard)->places[0].pipeline->lent;
    struct kvs_lent_pages others = {KVS_PAGE_NONE, 0};
    struct kvs_indexer_stats stats;
    struct kv_op *op;

    (void)state;
    op = ask_most();
    (void)steps_of(op);
    kv_op_free(op);
    assert_true(lent->n > 0);
    for (unsigned i = 0; i < CLIENTS; i++) {
        const kv_status_t status = kv_index_begin(it.sessions[i], &index, 0, &op);

        run_well(status, op);
        kv_op_free(op);
    }
    while (!kvs_pages_are_short(shard->pages))
        assert_true(kvs_pages_lend(shard->pages, &others, kvs_lent_bytes(&others) + 1));
    for (unsigned i = 0; i < 100; i++)
        step();
    assert_int_equal(lent->n, 0);
    kvs_indexer_get_stats(shard->indexer, &stats);
    assert_true(stats.n_jobs > 0);
    kvs_pages_take_back(shard->pages, &others, 0);
    while (stats.n_jobs > 0) {
        step();
        kvs_indexer_get_stats(shard->indexer, &stats);
    }
    op = ask_most();
    (void)steps_of(op);
    kv_op_free(op);
    kvs_pages_check(shard->pages);
}

/* ---- batches ----------------------------------------------------------------------------- */

enum {
    ENTRIES = 8,
    SHORT = 1000, /* tokens of the shortest fork */
    OWN = 300,    /* rows that one fork has put itself */
};

/* Forks of client 0's session, which has codes and summaries of most rows, and one session that
 * is none. */
static struct kv_session *forks[ENTRIES];
static const uint32_t fork_tokens[ENTRIES] = {TOKENS, 5000,   TOKENS, SHORT,
                                              TOKENS, TOKENS, 7000,   TOKENS};
static struct kv_range fork_ranges[ENTRIES][2];
static struct kv_query fork_queries[ENTRIES];

static void make_index(void)
{
    const struct kv_index_options index = {
        .tokens = TOKENS,
        .chapter_blocks = 16,
        .m = 2,
        .bits = 4,
        .iterations = 2,
        .summaries = 16,
        .wait = true,
    };
    struct kv_op *op = NULL;
    kv_status_t status = kv_index_begin(it.sessions[0], &index, 0, &op);

    run_well(status, op);
    kv_op_free(op);
}

/* Rows that the fork does not share, behind those that it does. */
static void put_own(struct kv_session *session, uint32_t begin)
{
    const struct kv_rows box = {.n_layers = 1, .token_begin = begin, .n_tokens = OWN};
    struct kv_rows_io io = {0};
    struct kv_op *op = NULL;
    uint16_t *halves;

    assert_int_equal(
        kv_buffer_alloc(it.clients[0], (size_t)OWN * HEADS * 2 * D * 2, &io.buffer), KV_OK);
    halves = kv_buffer_data(io.buffer);
    for (size_t i = 0; i < (size_t)OWN * HEADS * 2 * D; i++)
        halves[i] = (uint16_t)kv_random_below(&it.random, 0x4000);
    kv_status_t status = kv_put_begin(session, &box, &io, 0, &op);
    run_well(status, op);
    kv_op_free(op);
    kv_buffer_free(io.buffer);
}

static int set_up_forks(void **state)
{
    if (set_up(state) != 0)
        return -1;
    make_index();
    for (unsigned i = 0; i < ENTRIES; i++) {
        const uint32_t n_own = i == 1 ? OWN : 0;
        struct kv_op *op = NULL;
        kv_status_t status = kv_fork_begin(it.sessions[0], fork_tokens[i], 0, &op);

        run_well(status, op);
        forks[i] = kv_op_session(op);
        kv_op_free(op);
        if (n_own > 0)
            put_own(forks[i], fork_tokens[i]);
        fork_ranges[i][0] = (struct kv_range){i % 3, SHORT / 2};
        fork_ranges[i][1] = (struct kv_range){SHORT / 2 + i, fork_tokens[i] + n_own - i % 2};
        fork_queries[i] = (struct kv_query){
            .n_kv_heads = HEADS,
            .n_queries = 1 + i % 4,
            .queries = it.vectors[0] + (size_t)i * D,
            .scale = 0.125f,
            .merge = i % 4 == 3 ? KV_MERGE_NONE : KV_MERGE_SUM,
            .answer = i == 6 ? KV_ANSWER_IDS : KV_ANSWER_ATTEND,
            .want_ids = i != 6,
            .want_weights = i % 2 == 0,
            .k = 20 + 30 * i,
            .rerank = i == 5 ? 1 : 2 + i,
            .summaries = i % 3 == 0 && i != 6 ? 16 : 0,
            .n_ranges = 2,
            .ranges = fork_ranges[i],
        };
    }
    return 0;
}

/* One of which all rows are selected. */
static void select_all(struct kv_query *query)
{
    query->k = SHORT;
    query->rerank = 1;
    query->want_weights = false;
}

static void assert_same_results(const struct kv_op *a, const struct kv_op *b, unsigned entry)
{
    const uint32_t n = fork_queries[entry].n_queries;

    for (uint32_t head = 0; head < HEADS; head++) {
        struct kv_query_result x, y;

        assert_int_equal(kv_op_query_result(a, head, &x), KV_OK);
        assert_int_equal(kv_op_query_result(b, head, &y), KV_OK);
        assert_int_equal(x.n_ids, y.n_ids);
        assert_memory_equal(x.ids, y.ids, x.n_ids * sizeof(*x.ids));
        assert_int_equal(x.weights == NULL, y.weights == NULL);
        if (x.weights != NULL)
            assert_memory_equal(x.weights, y.weights, x.n_ids * sizeof(*x.weights));
        if (x.query_mask != NULL)
            assert_memory_equal(x.query_mask, y.query_mask, x.n_ids * sizeof(*x.query_mask));
        if (x.outputs != NULL) {
            assert_memory_equal(x.outputs, y.outputs, n * D * sizeof(float));
            assert_memory_equal(x.lses, y.lses, n * sizeof(float));
        }
        assert_int_equal(x.n_selected, y.n_selected);
        assert_int_equal(x.n_estimated, y.n_estimated);
        assert_int_equal(x.n_scored_by_code, y.n_scored_by_code);
        assert_int_equal(x.n_scored_by_key, y.n_scored_by_key);
        assert_int_equal(x.n_reranked, y.n_reranked);
    }
}

static struct kvs_shard *shard(void)
{
    return node_data(it.node, 0);
}

static uint64_t n_wanted(void)
{
    return kvs_counted(&shard()->stats.spans_wanted);
}

static uint64_t n_read(void)
{
    return kvs_counted(&shard()->stats.spans_read);
}

static void ask_alone(struct kv_op **ret_ops)
{
    const uint64_t n_before = n_wanted();

    for (unsigned i = 0; i < ENTRIES; i++) {
        kv_status_t status = kv_query_begin(forks[i], &fork_queries[i], NULL, 0, &ret_ops[i]);

        run_well(status, ret_ops[i]);
    }
    assert_int_equal(n_wanted(), n_before);
}

static void free_ops(struct kv_op **ops)
{
    for (unsigned i = 0; i < ENTRIES; i++)
        kv_op_free(ops[i]);
}

/* A batch with a deadline for each entry. */
struct together {
    unsigned late;
    struct kv_op **ops;
};

static kv_status_t begin_one(struct kv_client *client, void *arg, size_t i, uint32_t late_ms)
{
    const struct together *together = arg;

    (void)client;
    return kv_query_begin(forks[i], &fork_queries[i], NULL, i == together->late ? late_ms : 0,
                          &together->ops[i]);
}

/* Begins all in one batch.  late: the entry that has only late_ms; ENTRIES: none */
static void ask_together(unsigned late, uint32_t late_ms, struct kv_op **ret_ops)
{
    struct together together = {late, ret_ops};

    assert_int_equal(kvc_batch_begin(it.clients[0], &together, ENTRIES, late_ms, begin_one),
                     KV_OK);
}

/* Steps until spans are read for all of them. */
static void step_to_spans(void)
{
    const uint64_t n_before = n_read();

    while (n_read() == n_before)
        step();
}

/* Forks of different lengths, one of them with rows of its own, and queries of all kinds: each is
 * answered as it is alone, to the bit, though rows are read for several of them at once. */
static void forks_are_answered_as_alone(void **state)
{
    struct kv_op *alone[ENTRIES], *ops[ENTRIES];
    struct kv_query_entry entries[ENTRIES];

    (void)state;
    select_all(&fork_queries[3]);
    ask_alone(alone);
    for (unsigned i = 0; i < ENTRIES; i++)
        entries[i] = (struct kv_query_entry){.session = forks[i], .query = &fork_queries[i]};
    const uint64_t wanted = n_wanted(), read = n_read();
    assert_int_equal(kv_query_begin_batch(entries, ENTRIES, 0), KV_OK);
    for (unsigned i = 0; i < ENTRIES; i++) {
        ops[i] = entries[i].op;
        run_well(entries[i].status, ops[i]);
    }
    for (unsigned i = 0; i < ENTRIES; i++)
        assert_same_results(ops[i], alone[i], i);
    print_message("%llu spans read, %llu wanted\n", (unsigned long long)(n_read() - read),
                  (unsigned long long)(n_wanted() - wanted));
    /* Four entries are over all tokens, and two have no candidates that are rescored. */
    assert_int_equal(n_read() - read, HEADS * TOKENS / 1024);
    assert_true(n_wanted() - wanted > 4 * (n_read() - read));
    assert_true(n_wanted() - wanted <= (ENTRIES - 2) * (n_read() - read));
    free_ops(ops);
    free_ops(alone);
}

/* Sessions that share no rows are not at work together. */
static void strangers_share_nothing(void **state)
{
    struct kv_session *other;
    struct kv_op *op = NULL;

    (void)state;
    kv_status_t status = kv_open_begin(it.clients[0], &it.model, NULL, 0, &op);
    run_well(status, op);
    other = kv_op_session(op);
    kv_op_free(op);
    put_own(other, 0);
    struct kv_query query = fork_queries[0];
    struct kv_range range = {0, OWN};
    struct kv_query_entry entries[] = {{.session = forks[0], .query = &query},
                                       {.session = other, .query = &query},
                                       {.session = forks[0], .query = &query}};
    query.ranges = &range;
    query.n_ranges = 1;
    assert_int_equal(kv_query_begin_batch(entries, 2, 0), KV_OK);
    for (unsigned i = 0; i < 2; i++) {
        run_well(entries[i].status, entries[i].op);
        kv_op_free(entries[i].op);
    }
    assert_int_equal(n_wanted(), 0);
    /* With a third one, the first and the third are. */
    assert_int_equal(kv_query_begin_batch(entries, 3, 0), KV_OK);
    for (unsigned i = 0; i < 3; i++) {
        run_well(entries[i].status, entries[i].op);
        kv_op_free(entries[i].op);
    }
    assert_int_equal(n_wanted(), 2 * HEADS);
}

/* Whichever entries are cancelled, the one that has the slices among them, and at whatever point,
 * the others are answered as alone. */
static void cancelled_entries_leave_the_others_whole(void **state)
{
    struct kv_op *alone[ENTRIES], *ops[ENTRIES];

    (void)state;
    ask_alone(alone);
    for (unsigned at = 0; at < 8; at++) {
        const unsigned gone[] = {0, at % ENTRIES, (at / 3 + 4) % ENTRIES};

        ask_together(ENTRIES, 0, ops);
        step_to_spans();
        for (unsigned i = 0; i < 50 * at; i++)
            step();
        for (unsigned i = 0; i < 3; i++) {
            kv_op_free(ops[gone[i]]);
            ops[gone[i]] = NULL;
            for (unsigned j = 0; j < at % 4; j++)
                step();
        }
        for (unsigned i = 0; i < ENTRIES; i++) {
            if (ops[i] == NULL)
                continue;
            run_well(KV_OK, ops[i]);
            assert_same_results(ops[i], alone[i], i);
        }
        free_ops(ops);
    }
    free_ops(alone);
}

/* An entry whose deadline passes while all are at work fails; the others do not. */
static void late_entries_leave_the_others_whole(void **state)
{
    struct kv_op *alone[ENTRIES], *ops[ENTRIES];

    (void)state;
    ask_alone(alone);
    for (unsigned late = 0; late < ENTRIES; late++) {
        ask_together(late, 40, ops);
        step_to_spans();
        assert_int_equal(kv_op_status(ops[late]), KV_IN_PROGRESS);
        it.clock.virtual_us += 60000;
        for (unsigned i = 0; i < ENTRIES; i++) {
            while (kv_op_status(ops[i]) == KV_IN_PROGRESS)
                step();
            if (i == late) {
                assert_int_equal(kv_op_status(ops[i]), KV_DEADLINE);
                continue;
            }
            run_well(KV_OK, ops[i]);
            assert_same_results(ops[i], alone[i], i);
        }
        free_ops(ops);
    }
    free_ops(alone);
}

/* An entry that would read a bad row, which the others do not have, fails alone. */
static void bad_rows_fail_one_entry(void **state)
{
    struct kv_op *alone[ENTRIES], *ops[ENTRIES];
    struct kvs_unit *unit = NULL;

    (void)state;
    ask_alone(alone);
    for (uint32_t i = 0; i < shard()->n_sessions && unit == NULL; i++) {
        unit = kvs_shard_session_unit(&shard()->sessions[i], 0, HEADS - 1);
        if (unit != NULL && unit->committed != fork_tokens[1] + OWN)
            unit = NULL;
    }
    assert_non_null(unit);
    for (uint32_t token = fork_tokens[1]; token < unit->committed; token++)
        kvs_segment_mark_bad(&shard()->store, kvs_unit_block(unit, token / KV_BLOCK_TOKENS),
                             unit->at, token % KV_BLOCK_TOKENS);
    ask_together(ENTRIES, 0, ops);
    for (unsigned i = 0; i < ENTRIES; i++) {
        while (kv_op_status(ops[i]) == KV_IN_PROGRESS)
            step();
        assert_int_equal(kv_op_status(ops[i]), i == 1 ? KV_CORRUPT : KV_OK);
        if (i != 1)
            assert_same_results(ops[i], alone[i], i);
    }
    free_ops(ops);
    free_ops(alone);
}

/* Where a pipeline has no room for a whole batch, some queries of it come later; in the end no
 * buffer is held. */
static void batches_may_not_fit(void **state)
{
    struct kvs_query_queue *queue = kvs_query_queue_of(shard());
    size_t n_room[KVS_QUERIES_AT_ONCE];
    struct kv_op *ops[ENTRIES];

    (void)state;
    for (unsigned i = 0; i < queue->n_places; i++) { /* as with less memory */
        n_room[i] = queue->places[i].pipeline->n_room;
        queue->places[i].pipeline->n_room = 16 * TOKENS;
    }
    ask_together(ENTRIES, 0, ops);
    for (unsigned i = 0; i < ENTRIES; i++)
        while (!is_done(ops[i])) {
            uint32_t n_entries = 0;

            step();
            for (unsigned j = 0; j < queue->n_places; j++)
                n_entries += queue->places[j].pipeline->n_active;
            assert_true(n_entries < ENTRIES);
        }
    free_ops(ops);
    for (unsigned i = 0; i < queue->n_places; i++)
        queue->places[i].pipeline->n_room = n_room[i];
    for (unsigned i = 0; i < 10; i++)
        step();
    assert_int_equal(kv_pool_used(shard()->bodies), 0);
}

/* A client that goes with a batch at work leaves its place to others. */
static void batches_of_lost_clients_are_gone(void **state)
{
    struct kv_op *ops[ENTRIES], *op;

    (void)state;
    ask_together(ENTRIES, 0, ops);
    step_to_spans();
    op = ask_much(1);
    free_ops(ops);
    kv_client_close(it.clients[0]);
    it.clients[0] = NULL;
    (void)steps_of(op);
    kv_op_free(op);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(small_queries_do_not_wait, set_up, tear_down),
        cmocka_unit_test_setup_teardown(the_worst_client_is_one_of_two, set_up, tear_down),
        cmocka_unit_test_setup_teardown(clients_progress_together, set_up, tear_down),
        cmocka_unit_test_setup_teardown(clients_have_one_place, set_up, tear_down),
        cmocka_unit_test_setup_teardown(places_are_free_after_a_deadline, set_up, tear_down),
        cmocka_unit_test_setup_teardown(places_are_free_after_a_cancel, set_up, tear_down),
        cmocka_unit_test_setup_teardown(waiting_queries_hold_no_buffers, set_up, tear_down),
        cmocka_unit_test_setup_teardown(changes_are_in_slices, set_up, tear_down),
        cmocka_unit_test_setup_teardown(waiting_fetches_hold_no_buffers, set_up, tear_down),
        cmocka_unit_test_setup_teardown(working_memory_counts, set_up, tear_down),
        cmocka_unit_test_setup_teardown(room_does_not_wait_for_jobs, set_up, tear_down),
        cmocka_unit_test_setup_teardown(places_of_lost_clients_are_free, set_up, tear_down),
        cmocka_unit_test_setup_teardown(forks_are_answered_as_alone, set_up_forks, tear_down),
        cmocka_unit_test_setup_teardown(strangers_share_nothing, set_up_forks, tear_down),
        cmocka_unit_test_setup_teardown(cancelled_entries_leave_the_others_whole, set_up_forks,
                                        tear_down),
        cmocka_unit_test_setup_teardown(late_entries_leave_the_others_whole, set_up_forks,
                                        tear_down),
        cmocka_unit_test_setup_teardown(bad_rows_fail_one_entry, set_up_forks, tear_down),
        cmocka_unit_test_setup_teardown(batches_may_not_fit, set_up_forks, tear_down),
        cmocka_unit_test_setup_teardown(batches_of_lost_clients_are_gone, set_up_forks,
                                        tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
