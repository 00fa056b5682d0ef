/* test_absence.c - requests that wait for blocks which are not in memory.  They hold nothing that
 * others need, end at their deadlines, and are answered as if the blocks had never left.
 *
 * A node and its clients, whole and over the loopback, in one thread.  The clock goes on by
 * LOOK_US whenever somebody looks at it, so a run repeats exactly. */
#include "client/client.h"
#include "client/control_message.h"
#include "client/dispatch.h"
#include "kernels/checksum.h"
#include "kvserver/disk/disk.h"
#include "kvserver/store/ops/query.h"
#include "kvserver/store/rows/verify.h"
#include "tests/sim/question.h"
#include "tests/support/memory_tier.h"
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
    CLIENTS = 2, /* the first one's blocks leave */
    TOKENS = 1132,
    HEADS = 4,
    D = 64,
    ROW_BYTES = 2 * D * 2,
    BYTES = TOKENS * HEADS * ROW_BYTES,
    K = 50,
    EACH = 6, /* queries, reads, fetches of a client */
    IDS = 100,
    HELD = 6, /* a block that the first client has */
    HELD_BEGIN = HELD * KV_BLOCK_TOKENS,
    LOST_END = HELD_BEGIN + 12, /* of the rows in it that a tier loses */
    MEMORY_BYTES = 256 << 20,
    LOOK_US = 5,
    STEPS_MOST = 100000,
};

/* What a client asks for; the results of reads and fetches lie one after the other. */
struct asked {
    struct kv_op *queries[EACH], *reads[EACH], *fetches[EACH];
    struct kv_buffer *buffer;
};

static struct {
    struct kv_clock clock;
    uint64_t look_us;
    struct kv_transport *transport;
    struct kv_disk *disk;
    struct kvs_node *node;
    struct memory_tier tier;
    struct kv_client *clients[CLIENTS];
    struct kv_session *sessions[CLIENTS];
    struct kv_model_info model;
    struct kv_random random;
    float vectors[HEADS * D];
    uint8_t *rows[CLIENTS];       /* (HEADS, TOKENS, ROW_BYTES) */
    void *held[KVS_STAGINGS + 1]; /* the last: NULL */
    unsigned n_held;              /* staging buffers that no request finds */
} it;

static uint64_t now(const struct kv_clock *clock)
{
    (void)clock;
    return it.clock.virtual_us += it.look_us;
}

static struct kvs_shard *shard(void)
{
    return node_data(it.node, 0);
}

static void step(void)
{
    for (unsigned i = 0; i < CLIENTS; i++)
        if (it.clients[i] != NULL)
            kv_poll(it.clients[i]);
    kvs_node_data_step(it.node, 0);
    kvs_node_control_step(it.node);
    if (it.n_held == 0)
        kvs_node_check(it.node);
}

static kv_status_t end_of(struct kv_op *op)
{
    for (unsigned i = 0; kv_op_status(op) == KV_IN_PROGRESS; i++) {
        assert_true(i < STEPS_MOST);
        step();
    }
    return kv_op_status(op);
}

static void run_well(kv_status_t begun, struct kv_op *op)
{
    assert_int_equal(begun, KV_OK);
    if (end_of(op) != KV_OK)
        fail_msg("%s", kv_op_detail(op));
}

/* ---- the rig ----------------------------------------------------------------------------- */

static void put(unsigned client, uint32_t begin, uint32_t n, kv_status_t wanted)
{
    const struct kv_rows box = {.n_layers = 1, .token_begin = begin, .n_tokens = n};
    struct kv_buffer *buffer;
    struct kv_op *op = NULL;

    assert_int_equal(
        kv_buffer_alloc(it.clients[client], (size_t)n * HEADS * ROW_BYTES, &buffer), KV_OK);
    const struct kv_rows_io io = {.buffer = buffer};
    for (uint32_t head = 0; head < HEADS; head++)
        memcpy((uint8_t *)kv_buffer_data(buffer) + (size_t)head * n * ROW_BYTES,
               it.rows[client] + ((size_t)head * TOKENS + begin) * ROW_BYTES,
               (size_t)n * ROW_BYTES);
    assert_int_equal(kv_put_begin(it.sessions[client], &box, &io, 0, &op), KV_OK);
    if (end_of(op) != wanted)
        fail_msg("%s", kv_op_detail(op));
    kv_op_free(op);
    kv_buffer_free(buffer);
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
    struct kv_op *op = NULL;

    assert_int_equal(kvc_client_create(&setup, &it.clients[client]), KV_OK);
    const kv_status_t status = kv_open_begin(it.clients[client], &it.model, NULL, 0, &op);
    run_well(status, op);
    it.sessions[client] = kv_op_session(op);
    kv_op_free(op);
    it.rows[client] = malloc(BYTES);
    assert_non_null(it.rows[client]);
    uint16_t *halves = (uint16_t *)(void *)it.rows[client];
    for (size_t i = 0; i < BYTES / sizeof(*halves); i++) /* below 2 */
        halves[i] = (uint16_t)(kv_random_below(&it.random, 0x4000) |
                               kv_random_below(&it.random, 2) << 15);
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
    it.look_us = LOOK_US;
    kv_random_init(&it.random, 1);
    assert_int_equal(
        kv_transport_loopback.open(&transport, &it.transport, detail, sizeof(detail)), KV_OK);
    it.disk = kv_disk_memory_open(&it.clock, 0);
    const struct kvs_node_config config = {
        .name = "absence",
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
    memory_tier_init(&it.tier, &shard()->store);
    snprintf(address, sizeof(address), "%s", kvs_node_address(it.node));
    test_model(&it.model, "absence", 1, heads, D, D);
    for (unsigned i = 0; i < CLIENTS; i++) {
        open_client(i, address);
        put(i, 0, TOKENS - 100, KV_OK);
    }
    for (unsigned i = 0; i < HEADS * D; i++)
        it.vectors[i] = (float)kv_random_below(&it.random, 2001) / 1000 - 1;
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    for (unsigned i = 0; i < CLIENTS; i++) {
        kv_client_close(it.clients[i]);
        it.clients[i] = NULL;
        free(it.rows[i]);
    }
    for (int i = 0; i < 100; i++)
        step();
    kvs_node_check_memory(it.node);
    while (it.tier.kept != NULL)
        memory_tier_forget(&it.tier, it.tier.kept->block);
    kvs_node_destroy(it.node);
    kv_disk_close(it.disk);
    it.transport->ops->close(it.transport);
    return 0;
}

static const struct kvs_shard_session *session_of(unsigned client)
{
    struct kv_ticket ticket;

    kv_session_ticket(it.sessions[client], &ticket);
    for (uint32_t i = 0; i < shard()->n_sessions; i++)
        if (shard()->sessions[i].used &&
            memcmp(&shard()->sessions[i].token, &ticket.token, sizeof(ticket.token)) == 0)
            return &shard()->sessions[i];
    fail();
    return NULL;
}

static const struct kvs_blocks *blocks_of(unsigned client)
{
    return &session_of(client)->blocks;
}

static void evict(unsigned client)
{
    const struct kvs_blocks *blocks = blocks_of(client);

    for (uint32_t i = 0; i < blocks->n; i++)
        assert_int_equal(kvs_block_leave(&shard()->store, blocks->list[i]), KV_OK);
    for (int i = 0; i < 100; i++)
        step();
    for (uint32_t i = 0; i < blocks->n; i++)
        assert_int_equal(blocks->list[i]->residency, KVS_ABSENT);
    if (it.n_held == 0)
        kvs_node_check_memory(it.node);
}

/* ---- what is asked ----------------------------------------------------------------------- */

static struct kv_op *query(unsigned client, uint32_t deadline_ms)
{
    const struct kv_range range = {10, TOKENS - 110};
    const struct kv_query asked = {
        .n_kv_heads = HEADS,
        .n_queries = 1,
        .queries = it.vectors,
        .scale = 0.125f,
        .merge = KV_MERGE_SUM,
        .answer = KV_ANSWER_ATTEND,
        .want_ids = true,
        .k = K,
        .rerank = 2,
        .n_ranges = 1,
        .ranges = &range,
    };
    struct kv_op *op = NULL;

    assert_int_equal(kv_query_begin(it.sessions[client], &asked, NULL, deadline_ms, &op),
                     KV_OK);
    return op;
}

static uint32_t id_of(unsigned i)
{
    return 8 * (i % IDS);
}

static void ask(unsigned client, struct asked *asked)
{
    const struct kv_rows box = {.n_layers = 1, .n_tokens = 500};
    const uint32_t n_ids[HEADS] = {IDS, IDS, IDS, IDS};
    static uint32_t ids[HEADS * IDS];
    const struct kv_fetch fetch = {.n_kv_heads = HEADS, .n_ids = n_ids, .ids = ids};
    const size_t read_bytes = (size_t)500 * HEADS * ROW_BYTES;
    const size_t fetch_bytes = (size_t)IDS * HEADS * ROW_BYTES;

    for (unsigned i = 0; i < HEADS * IDS; i++)
        ids[i] = id_of(i);
    assert_int_equal(
        kv_buffer_alloc(it.clients[client], EACH * (read_bytes + fetch_bytes), &asked->buffer),
        KV_OK);
    for (unsigned i = 0; i < EACH; i++) {
        struct kv_rows_io io = {.buffer = asked->buffer, .offset = i * read_bytes};

        asked->queries[i] = query(client, 0);
        assert_int_equal(kv_read_begin(it.sessions[client], &box, &io, 0, &asked->reads[i]),
                         KV_OK);
        io.offset = EACH * read_bytes + i * fetch_bytes;
        assert_int_equal(
            kv_fetch_begin(it.sessions[client], &fetch, &io, 0, &asked->fetches[i]), KV_OK);
    }
}

static void assert_same_result(const struct kv_op *a, const struct kv_op *b)
{
    for (uint32_t head = 0; head < HEADS; head++) {
        struct kv_query_result x, y;

        assert_int_equal(kv_op_query_result(a, head, &x), KV_OK);
        assert_int_equal(kv_op_query_result(b, head, &y), KV_OK);
        assert_int_equal(x.n_ids, K);
        assert_int_equal(y.n_ids, K);
        assert_memory_equal(x.ids, y.ids, K * sizeof(*x.ids));
        assert_memory_equal(x.outputs, y.outputs, D * sizeof(float));
        assert_memory_equal(x.lses, y.lses, sizeof(float));
    }
}

/* All have ended well, with what is right. */
static void check_answers(unsigned client, struct asked *asked, const struct kv_op *alone)
{
    const uint8_t *read = kv_buffer_data(asked->buffer);
    const uint8_t *fetched = read + (size_t)EACH * 500 * HEADS * ROW_BYTES;

    for (unsigned i = 0; i < EACH; i++) {
        run_well(KV_OK, asked->queries[i]);
        run_well(KV_OK, asked->reads[i]);
        run_well(KV_OK, asked->fetches[i]);
        assert_same_result(asked->queries[i], alone);
        for (uint32_t head = 0; head < HEADS; head++, read += (size_t)500 * ROW_BYTES)
            assert_memory_equal(read, it.rows[client] + (size_t)head * TOKENS * ROW_BYTES,
                                (size_t)500 * ROW_BYTES);
        for (uint32_t head = 0; head < HEADS; head++)
            for (unsigned j = 0; j < IDS; j++, fetched += ROW_BYTES)
                assert_memory_equal(
                    fetched, it.rows[client] + ((size_t)head * TOKENS + id_of(j)) * ROW_BYTES,
                    ROW_BYTES);
        kv_op_free(asked->queries[i]);
        kv_op_free(asked->reads[i]);
        kv_op_free(asked->fetches[i]);
    }
    kv_buffer_free(asked->buffer);
}

/* ---- tests ------------------------------------------------------------------------------- */

/* While one client's requests wait, another one's find all buffers and pipelines. */
static void waiting_requests_hold_nothing(void **state)
{
    struct asked waiting, beside;
    struct kv_op *alone[CLIENTS];

    (void)state;
    for (unsigned i = 0; i < CLIENTS; i++) {
        alone[i] = query(i, 0);
        run_well(KV_OK, alone[i]);
    }
    evict(0);
    ask(0, &waiting);
    for (int i = 0; i < 300; i++)
        step();
    assert_int_equal(it.tier.n_asked, blocks_of(0)->n - 1); /* nobody needs the last */
    const uint32_t n_waiting =
        kv_pool_used(shard()->requests); /* some are of several messages */
    assert_true(n_waiting >= 3 * EACH);
    assert_int_equal(kv_pool_used(shard()->stagings), 0);
    assert_int_equal(kv_pool_used(shard()->bodies), 0);
    assert_true(kvs_query_queue_is_idle(kvs_query_queue_of(shard())));
    assert_int_equal(shard()->store.n_at_work[0] + shard()->store.n_at_work[1], 0);
    assert_int_equal(kvs_counted(&shard()->stats.block_waits), n_waiting);

    ask(1, &beside);
    check_answers(1, &beside, alone[1]);
    assert_int_equal(kv_pool_used(shard()->requests), n_waiting);

    /* One block after the other: nobody begins without all. */
    for (uint32_t i = blocks_of(0)->n - 1; i-- > 0;) {
        assert_int_equal(kv_op_status(waiting.queries[0]), KV_IN_PROGRESS);
        assert_true(memory_tier_bring_back(&it.tier, blocks_of(0)->list[i]));
        for (int j = 0; j < 20; j++)
            step();
    }
    check_answers(0, &waiting, alone[0]);
    for (unsigned i = 0; i < CLIENTS; i++)
        kv_op_free(alone[i]);
}

/* A block that never comes back costs its requests their time, and nothing else. */
static void requests_end_at_their_deadlines(void **state)
{
    struct kv_op *op, *alone = query(0, 0);

    (void)state;
    run_well(KV_OK, alone);
    evict(0);
    op = query(0, 100);
    assert_int_equal(end_of(op), KV_DEADLINE);
    kv_op_free(op);
    for (int i = 0; i < 1000; i++) /* the node's own deadline */
        step();
    assert_int_equal(kv_pool_used(shard()->requests), 0);
    assert_null(shard()->missing.first);
    op = query(0, 0);
    for (int i = 0; i < 100; i++)
        step();
    memory_tier_bring_back_all(&it.tier);
    run_well(KV_OK, op);
    assert_same_result(op, alone);
    kv_op_free(op);
    kv_op_free(alone);
}

/* A put begins in the middle of a block that is absent, and repeats what others have. */
static void puts_wait_for_their_blocks(void **state)
{
    struct kv_rows box = {.n_layers = 1, .token_begin = TOKENS - 150, .n_tokens = 100};
    struct kv_buffer *buffer;
    struct kv_op *op = NULL;

    (void)state;
    assert_int_equal(kv_buffer_alloc(it.clients[0], (size_t)100 * HEADS * ROW_BYTES, &buffer),
                     KV_OK);
    const struct kv_rows_io io = {.buffer = buffer};
    for (uint32_t head = 0; head < HEADS; head++)
        memcpy((uint8_t *)kv_buffer_data(buffer) + (size_t)head * 100 * ROW_BYTES,
               it.rows[0] + ((size_t)head * TOKENS + TOKENS - 150) * ROW_BYTES,
               (size_t)100 * ROW_BYTES);
    evict(0);
    assert_int_equal(kv_put_begin(it.sessions[0], &box, &io, 0, &op), KV_OK);
    for (int i = 0; i < 300; i++)
        step();
    assert_int_equal(kv_op_status(op), KV_IN_PROGRESS);
    assert_int_equal(it.tier.n_asked, 2); /* of all blocks */
    assert_int_equal(kv_pool_used(shard()->stagings), 0);
    memory_tier_bring_back_all(&it.tier);
    run_well(KV_OK, op);
    kv_op_free(op);
    put(0, TOKENS - 50, 50, KV_OK);

    box = (struct kv_rows){.n_layers = 1, .token_begin = TOKENS - 100, .n_tokens = 100};
    assert_int_equal(kv_read_begin(it.sessions[0], &box, &io, 0, &op), KV_OK);
    run_well(KV_OK, op);
    for (uint32_t head = 0; head < HEADS; head++)
        assert_memory_equal((uint8_t *)kv_buffer_data(buffer) + (size_t)head * 100 * ROW_BYTES,
                            it.rows[0] + ((size_t)head * TOKENS + TOKENS - 100) * ROW_BYTES,
                            (size_t)100 * ROW_BYTES);
    kv_op_free(op);
    kv_buffer_free(buffer);
}

/* A query that has begun keeps its blocks until it ends, and another client's truncate ends those
 * that wait. */
static void changes_do_not_wait(void **state)
{
    struct kv_op *alone = query(0, 0), *op = NULL, *waiting;
    const struct kvs_blocks *blocks;
    struct kv_ticket ticket;

    (void)state;
    run_well(KV_OK, alone);
    blocks = blocks_of(0);
    waiting = query(0, 0);
    while (shard()->store.n_at_work[0] + shard()->store.n_at_work[1] == 0)
        step();
    for (uint32_t i = 0; i < blocks->n; i++)
        assert_int_equal(kvs_block_leave(&shard()->store, blocks->list[i]), KV_OK);
    run_well(KV_OK, waiting);
    assert_same_result(waiting, alone);
    kv_op_free(waiting);
    for (int i = 0; i < 100; i++)
        step();
    assert_int_equal(kvs_residency_n_absent(&shard()->store), blocks->n);

    waiting = query(0, 0);
    for (int i = 0; i < 100; i++)
        step();
    kv_session_ticket(it.sessions[0], &ticket);
    assert_int_equal(kv_resume_begin(it.clients[1], &ticket, 0, &op), KV_OK);
    run_well(KV_OK, op);
    struct kv_session *other = kv_op_session(op);
    kv_op_free(op);
    assert_int_equal(kv_truncate_begin(other, 200, 0, &op), KV_OK);
    run_well(KV_OK, op);
    kv_op_free(op);
    assert_int_equal(end_of(waiting), KV_STALE);
    kv_op_free(waiting);
    kv_op_free(alone);
    assert_int_equal(kvs_residency_n_absent(&shard()->store), 2);
    kvs_node_check_memory(it.node);
    kv_session_free(other);
}

/* Rows that the tier has lost: the requests that need them say which. */
static void lost_rows_are_told(void **state)
{
    struct kv_op *op;

    (void)state;
    evict(0);
    memory_tier_forget(&it.tier, blocks_of(0)->list[2]);
    op = query(0, 0);
    for (int i = 0; i < 100; i++)
        step();
    assert_true(memory_tier_bring_back(&it.tier, blocks_of(0)->list[2]));
    memory_tier_bring_back_all(&it.tier);
    assert_int_equal(end_of(op), KV_CORRUPT);
    assert_non_null(strstr(kv_op_detail(op), "token 256"));
    kv_op_free(op);
    assert_int_equal(shard()->store.health.rows_bad, HEADS * KV_BLOCK_TOKENS);
}

/* The image of a row in the first block becomes another one's that verifies. */
static void replace_kept_row(uint32_t unit_at, uint32_t token)
{
    const struct kvs_unit *unit = &session_of(0)->units[unit_at];
    const struct kvs_row_set rows = kvs_unit_rows(unit);
    struct kvs_segment_image *image =
        memory_tier_find(&it.tier, kvs_unit_block(unit, 0), unit->at);
    uint8_t *row = (uint8_t *)image->rows + (size_t)token * ROW_BYTES;
    uint32_t seed;

    row[0] ^= 1;
    kvs_verify_seeds(&rows, &token, 1, &seed);
    ((uint32_t *)image->crcs)[token] = kv_crc32c(seed, row, ROW_BYTES);
}

/* While a read waits for a buffer its rows leave, and a query brings them back: not as they left,
 * but so that every row verifies. */
static void rows_that_were_replaced_are_not_sent(void **state)
{
    struct kv_rows box = {.n_layers = 1, .n_tokens = 100};
    struct kv_op *reading, *beside, *op;
    struct kv_buffer *buffer;
    const size_t bytes = (size_t)100 * HEADS * ROW_BYTES;

    (void)state;
    assert_int_equal(kv_buffer_alloc(it.clients[0], 2 * bytes, &buffer), KV_OK);
    struct kv_rows_io io = {.buffer = buffer};
    while ((it.held[it.n_held] = kv_pool_get(shard()->stagings)) != NULL)
        it.n_held++;
    assert_int_equal(kv_read_begin(it.sessions[0], &box, &io, 0, &reading), KV_OK);
    for (int i = 0; i < 100; i++)
        step();
    assert_non_null(shard()->staging_waiters.first);
    evict(0);
    op = query(0, 0);
    for (int i = 0; i < 100; i++)
        step();
    replace_kept_row(0, 5);
    memory_tier_bring_back_all(&it.tier);
    assert_int_equal(end_of(op), KV_CORRUPT);
    kv_op_free(op);
    while (it.n_held > 0)
        kv_pool_put(shard()->stagings, it.held[--it.n_held]);

    /* Rows of the next block; the first read gets this one's buffer. */
    box.token_begin = KV_BLOCK_TOKENS;
    io.offset = bytes;
    assert_int_equal(kv_read_begin(it.sessions[0], &box, &io, 0, &beside), KV_OK);
    run_well(KV_OK, beside);
    kv_op_free(beside);
    assert_int_equal(end_of(reading), KV_CORRUPT);
    assert_non_null(strstr(kv_op_detail(reading), "token 0"));
    kv_op_free(reading);
    kv_buffer_free(buffer);
}

/* Their blocks are back, but too late: some have not been looked at again by then.  The client's
 * clock is behind the node's, so that it is the node that ends them. */
static void late_requests_of_blocks_say_so(void **state)
{
    struct kv_op *ops[EACH];
    uint64_t begun_us;

    (void)state;
    evict(0);
    for (unsigned i = 0; i < EACH; i++)
        ops[i] = query(0, 100);
    while (kvs_counted(&shard()->stats.block_waits) < EACH)
        step();
    memory_tier_bring_back_all(&it.tier);
    assert_non_null(shard()->looking.first);
    begun_us = it.clock.virtual_us;
    it.look_us = 200000; /* the first step looks at one of them */
    while (kv_pool_used(shard()->requests) > 0)
        kvs_node_data_step(it.node, 0);
    assert_true(kvs_counted(&shard()->stats.deadline_exceeded) > 1);
    const uint64_t node_us = it.clock.virtual_us;
    it.clock.virtual_us = begun_us;
    it.look_us = LOOK_US;
    for (unsigned i = 0; i < 100; i++)
        kv_poll(it.clients[0]);
    it.clock.virtual_us = node_us;
    for (unsigned i = 0; i < EACH; i++) {
        assert_int_equal(kv_op_status(ops[i]), KV_DEADLINE);
        assert_non_null(strstr(kv_op_detail(ops[i]), "before the deadline"));
        kv_op_free(ops[i]);
    }
}

/* Makes rows of the first client, from the held block on, and a truth that knows them. */
static struct truth *write_held(uint32_t content)
{
    struct truth *truth = truth_create(kv_session_schema(it.sessions[0]));

    for (uint32_t head = 0; head < HEADS; head++)
        for (uint32_t token = HELD_BEGIN; token < TOKENS; token++) {
            truth_row_fill(it.rows[0] + ((size_t)head * TOKENS + token) * ROW_BYTES, ROW_BYTES,
                           content, 0, head, token);
            assert_true(truth_row_may(truth, head, token, content, 1, 0));
            truth_row_put(truth, head, token, content, 1, 1);
        }
    return truth;
}

static void cut(uint32_t tokens)
{
    struct kv_op *op = NULL;
    const kv_status_t status = kv_truncate_begin(it.sessions[0], tokens, 0, &op);

    run_well(status, op);
    kv_op_free(op);
}

/* The tier loses what the session has of the held block. */
static void lose_held(void)
{
    const struct kvs_blocks *blocks = blocks_of(0);

    evict(0);
    memory_tier_forget(&it.tier, blocks->list[HELD]);
    for (uint32_t i = 0; i < blocks->n; i++) {
        assert_false(kvs_block_need(&shard()->store, blocks->list[i]));
        assert_true(memory_tier_bring_back(&it.tier, blocks->list[i]));
    }
    assert_int_equal(shard()->store.health.rows_bad, HEADS * KV_BLOCK_TOKENS);
}

/* Attention over rows behind those that are lost; the asker says what it has. */
static void question_held(struct question *question)
{
    *question = (struct question){
        .query = {.n_kv_heads = HEADS,
                  .n_queries = 1,
                  .queries = it.vectors,
                  .scale = 0.125f,
                  .merge = KV_MERGE_SUM,
                  .answer = KV_ANSWER_ATTEND,
                  .k = K,
                  .rerank = 2,
                  .n_ranges = 1,
                  .ranges = question->ranges,
                  .n_cached = question->n_held,
                  .cached = question->held},
        .n_heads = HEADS,
        .vectors = it.vectors,
        .ranges = {{LOST_END, TOKENS}},
    };
    for (uint32_t head = 0; head < HEADS; head++) {
        uint32_t crcs[KV_BLOCK_TOKENS];

        for (uint32_t i = 0; i < KV_BLOCK_TOKENS; i++)
            crcs[i] =
                kv_row_crc(it.sessions[0],
                           it.rows[0] + ((size_t)head * TOKENS + HELD_BEGIN + i) * ROW_BYTES,
                           ROW_BYTES, 0, head, HELD_BEGIN + i);
        question->held[head] = (struct kv_cached_block){HELD, kv_block_fingerprint(crcs)};
        question->n_held[head] = 1;
        question->is_right[head] = true;
    }
}

/* Asks so, and whether the simulator finds fault with the answer.  *ret_left_out: rows that the
 * node left to the asker. */
static const char *
held_fault(struct question *question, const struct truth *truth, uint32_t *ret_left_out)
{
    struct kv_op *op = NULL;
    const char *why;

    const kv_status_t status = kv_query_begin(it.sessions[0], &question->query, NULL, 0, &op);
    run_well(status, op);
    *ret_left_out = 0;
    for (uint32_t head = 0; head < HEADS; head++) {
        struct kv_query_result found;

        assert_int_equal(kv_op_query_result(op, head, &found), KV_OK);
        for (uint32_t i = 0; i < found.n_ids; i++)
            *ret_left_out += found.row_index[i] == KV_ROW_CACHED;
    }
    why = question_fault(question, truth, NULL, it.sessions[0], 1, op);
    kv_op_free(op);
    return why;
}

/* The CRCs of a block's first rows are lost with them, so the node does not know the block that a
 * client has: it attends to the others, and leaves out none.  The simulator takes that for right
 * where CRCs may be lost, and only there. */
static void blocks_with_lost_rows_are_unknown(void **state)
{
    struct truth *truth = write_held(2), *other;
    struct question question;
    uint32_t n_left_out;

    (void)state;
    cut(HELD_BEGIN);
    put(0, HELD_BEGIN, TOKENS - HELD_BEGIN, KV_OK);
    for (int is_lost = 0; is_lost <= 1; is_lost++) {
        if (is_lost) {
            cut(LOST_END);
            lose_held();
            put(0, LOST_END, TOKENS - LOST_END, KV_OK);
            assert_true(kvs_unit_is_bad(&session_of(0)->units[0], LOST_END - 1));
            assert_false(kvs_unit_is_bad(&session_of(0)->units[0], LOST_END));
        }
        question_held(&question);
        for (unsigned way = 0; way < 4; way++) {
            question.query.want_ids = way & 1;
            question.query.summaries = way & 2 ? 16 : 0;
            question.may_lack_crcs = false;
            const char *why = held_fault(&question, truth, &n_left_out);
            assert_true(is_lost == (why != NULL));
            assert_true(is_lost == (n_left_out == 0));
            question.may_lack_crcs = true;
            why = held_fault(&question, truth, &n_left_out);
            if (why != NULL)
                fail_msg("way %u, lost %d: %s", way, is_lost, why);
        }
    }
    other = write_held(3);
    assert_non_null(held_fault(&question, other, &n_left_out));
    truth_destroy(other);
    truth_destroy(truth);
}

/* ---- rows of single segments -------------------------------------------------------------- */

enum {
    FEW = 2,
    FULL = (TOKENS - 100) / KV_BLOCK_TOKENS, /* blocks that have all their rows */
};

/* The segments that were asked for. */
static bool wanted[FULL][HEADS];
static unsigned n_wanted;

static void note_want(void *arg, struct kvs_block *block, uint32_t at)
{
    const struct kvs_blocks *blocks = blocks_of(0);
    uint32_t i = 0;

    (void)arg;
    while (blocks->list[i] != block)
        i++;
    assert_true(i < FULL && !wanted[i][at]);
    wanted[i][at] = true;
    n_wanted++;
}

static void index_first(uint32_t summaries, bool copies)
{
    const struct kv_index_options index = {.tokens = FULL * KV_BLOCK_TOKENS,
                                           .chapter_blocks = 8,
                                           .m = 4,
                                           .bits = 4,
                                           .rotates = true,
                                           .copies = copies,
                                           .iterations = 4,
                                           .seed = 5,
                                           .summaries = summaries,
                                           .summary_rows = 1024,
                                           .wait = true};
    struct kv_op *op = NULL;
    const kv_status_t status = kv_index_begin(it.sessions[0], &index, 0, &op);

    run_well(status, op);
    kv_op_free(op);
}

static struct kv_op *query_few(enum kv_answer answer, uint32_t summaries, bool cuts)
{
    const struct kv_range range = {10, TOKENS - 110};
    const struct kv_query asked = {
        .n_kv_heads = HEADS,
        .n_queries = 1,
        .queries = it.vectors,
        .scale = 0.125f,
        .merge = KV_MERGE_SUM,
        .answer = answer,
        .want_ids = answer == KV_ANSWER_ATTEND,
        .k = FEW,
        .rerank = cuts ? 1 : 2,
        .first_cut = cuts ? KV_CUT_INT4 : KV_CUT_NONE,
        .candidates = cuts ? 8 : 0,
        .summaries = summaries,
        .summary_rows = 1024,
        .n_ranges = 1,
        .ranges = &range,
    };
    struct kv_op *op = NULL;

    assert_int_equal(kv_query_begin(it.sessions[0], &asked, NULL, 0, &op), KV_OK);
    return op;
}

static void assert_same_few(const struct kv_op *a, const struct kv_op *b, bool has_outputs)
{
    for (uint32_t head = 0; head < HEADS; head++) {
        struct kv_query_result x, y;

        assert_int_equal(kv_op_query_result(a, head, &x), KV_OK);
        assert_int_equal(kv_op_query_result(b, head, &y), KV_OK);
        assert_int_equal(x.n_ids, FEW);
        assert_int_equal(y.n_ids, FEW);
        assert_memory_equal(x.ids, y.ids, FEW * sizeof(*x.ids));
        if (has_outputs)
            assert_memory_equal(x.outputs, y.outputs, D * sizeof(float));
    }
}

/* The rows of all full blocks go; their codes stay. */
static void let_all_go(void)
{
    const struct kvs_blocks *blocks = blocks_of(0);

    for (uint32_t i = 0; i < FULL; i++) {
        memory_tier_forget(&it.tier, blocks->list[i]);
        assert_true(memory_tier_keep(&it.tier, blocks->list[i]));
        for (uint32_t at = 0; at < HEADS; at++)
            assert_true(kvs_segment_let_go(&shard()->store, blocks->list[i], at) > 0);
    }
    memset(wanted, 0, sizeof(wanted));
    n_wanted = 0;
}

static void bring_wanted(void)
{
    const struct kvs_blocks *blocks = blocks_of(0);

    for (uint32_t i = 0; i < FULL; i++)
        for (uint32_t at = 0; at < HEADS; at++)
            if (wanted[i][at] && kvs_segment_is_away(&blocks->list[i]->segments[at]))
                assert_true(kvs_block_restore(&shard()->store, blocks->list[i], at,
                                              memory_tier_find(&it.tier, blocks->list[i], at)));
}

/* What the query asks for before it waits, if it waits at all. */
static void wait_for_rows(const struct kv_op *op)
{
    for (int i = 0; i < 200 && kv_op_status(op) == KV_IN_PROGRESS; i++)
        step();
}

/* Of rows that are away a query brings those back in whose blocks it has candidates: with a first cut
 * by copies, which stay, only the chosen ones.  It holds nothing while it waits; its answer is that over
 * all rows; the next one finds all.  Where it touches all rows, it waits for all: without summaries, or
 * copies for a first cut, that it wants, or without codes. */
static void queries_need_the_rows_of_candidates(void **state)
{
    static const struct {
        enum kv_answer answer;
        uint32_t made, summaries; /* of the index, of the query */
        bool cuts, is_exact;      /* what is touched are the chosen rows */
        bool has_no_copies;
    } ways[] = {
        {KV_ANSWER_ATTEND, 0, 0, false, false, false},
        {KV_ANSWER_ATTEND, 0, 0, true, true, false},
        {KV_ANSWER_ATTEND, 16, 16, true, true, false},
        {KV_ANSWER_ATTEND, 0, 16, true, false, false},
        {KV_ANSWER_IDS, 0, 0, true, true, false},
        {KV_ANSWER_ATTEND, 0, 0, true, false, true},
    };
    const struct kvs_tier ops = {.keep = memory_tier_keep,
                                 .load = memory_tier_load,
                                 .forget = memory_tier_forget,
                                 .want = note_want};

    (void)state;
    shard()->store.tier = &ops;
    for (unsigned way = 0; way < sizeof(ways) / sizeof(ways[0]); way++) {
        const bool needs_all = ways[way].summaries != ways[way].made || ways[way].has_no_copies;
        const bool needs_none = ways[way].answer == KV_ANSWER_IDS;
        struct kv_op *alone, *op;
        unsigned n = 0;

        cut(0);
        put(0, 0, TOKENS - 100, KV_OK);
        index_first(ways[way].made, !ways[way].has_no_copies);
        alone = query_few(ways[way].answer, ways[way].summaries, ways[way].cuts);
        run_well(KV_OK, alone);
        let_all_go();
        op = query_few(ways[way].answer, ways[way].summaries, ways[way].cuts);
        wait_for_rows(op);
        for (uint32_t head = 0; head < HEADS && !needs_none; head++) {
            struct kv_query_result found;

            assert_int_equal(kv_op_query_result(alone, head, &found), KV_OK);
            for (uint32_t i = 0; i < FEW; i++) {
                const uint32_t block = found.ids[i] / KV_BLOCK_TOKENS;

                assert_true(block >= FULL || wanted[block][head]);
                n += block < FULL && (i == 0 || found.ids[i - 1] / KV_BLOCK_TOKENS != block);
            }
        }
        print_message("way %u: %u of %u segments, %u have chosen rows\n", way, n_wanted,
                      FULL * HEADS, n);
        if (needs_all)
            assert_int_equal(n_wanted, FULL * HEADS);
        else if (ways[way].is_exact)
            assert_int_equal(n_wanted, n);
        else
            assert_true(n_wanted >= n && n_wanted <= 2 * FEW * HEADS);
        assert_int_equal(kv_op_status(op), needs_none ? KV_OK : KV_IN_PROGRESS);
        assert_true(kvs_query_queue_is_idle(kvs_query_queue_of(shard())));
        assert_int_equal(kv_pool_used(shard()->stagings), 0);
        assert_int_equal(shard()->store.n_at_work[0] + shard()->store.n_at_work[1], 0);
        bring_wanted();
        run_well(KV_OK, op);
        assert_same_few(op, alone, !needs_none);
        kv_op_free(op);

        const unsigned n_before = n_wanted;
        op = query_few(ways[way].answer, ways[way].summaries, ways[way].cuts);
        run_well(KV_OK, op);
        assert_same_few(op, alone, !needs_none);
        assert_int_equal(n_wanted, n_before);
        kv_op_free(op);

        /* The codes cannot be used any more: rows are scored by their keys, all of them. */
        for (uint32_t head = 0; head < HEADS; head++)
            kvs_codebook_at(&shard()->codebooks,
                            kvs_unit_codes(&session_of(0)->units[head], 0)->codebook)
                ->is_broken = true;
        op = query_few(KV_ANSWER_ATTEND, 0, false);
        wait_for_rows(op);
        assert_int_equal(n_wanted, FULL * HEADS);
        bring_wanted();
        run_well(KV_OK, op);
        kv_op_free(op);
        kv_op_free(alone);
        for (uint32_t i = 0; i < FULL; i++)
            kvs_block_restored(&shard()->store, blocks_of(0)->list[i]);
    }
    while (it.tier.kept != NULL)
        memory_tier_forget(&it.tier, it.tier.kept->block);
    memory_tier_init(&it.tier, &shard()->store);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(waiting_requests_hold_nothing, set_up, tear_down),
        cmocka_unit_test_setup_teardown(requests_end_at_their_deadlines, set_up, tear_down),
        cmocka_unit_test_setup_teardown(puts_wait_for_their_blocks, set_up, tear_down),
        cmocka_unit_test_setup_teardown(changes_do_not_wait, set_up, tear_down),
        cmocka_unit_test_setup_teardown(lost_rows_are_told, set_up, tear_down),
        cmocka_unit_test_setup_teardown(rows_that_were_replaced_are_not_sent, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(late_requests_of_blocks_say_so, set_up, tear_down),
        cmocka_unit_test_setup_teardown(blocks_with_lost_rows_are_unknown, set_up, tear_down),
        cmocka_unit_test_setup_teardown(queries_need_the_rows_of_candidates, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
