/* test_placement.c - where sessions are, in a store of more nodes than a session has: on eight
 * nodes and on no other, wherever the client has them in its list.  A node that is down hurts
 * those that are on it, and nobody else.
 *
 * Twelve embedded nodes over the loopback and the real client library.
 */
#include "tests/support/cluster.h"
#include "tests/support/numbered_prompts.h"
#include "tests/support/rows.h"

#include "client/node.h"
#include "client/ops/copy.h"
#include "client/session.h"
#include "client/state.h"
#include "kvserver/base/hash.h"
#include "kvserver/net/message.h"
#include "proto/kvstore.pb-c.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_NODES = 12,
    N_THREADS = 2,
    MEMORY_BYTES = 32 << 20,
    BUFFER_BYTES = 2 << 20,
    N_LAYERS = 3,
    N_HEADS = 7,
    N_TOKENS = 200,
    N_MORE = 40,
    N_FORKED = 150,
    DIM = 16,
    SESSIONS = 24,
    ROOT_SESSIONS = 4,
    BUSY_SESSIONS = 60, /* of one root */
    BRANCHES = 12,
    COPIED_US = 120 * 1000 * 1000,
};

static struct cluster cluster;
static struct kv_client *client, *other; /* `other` has the list in another order */
static struct kv_buffer *buffer, *others_buffer;

static int open_store(void **state)
{
    const struct cluster_setup setup = {
        .row = &kv_transport_loopback,
        .n_nodes = N_NODES,
        .n_threads = N_THREADS,
        .memory_bytes = MEMORY_BYTES,
        .root_sessions = ROOT_SESSIONS,
    };
    const struct cluster_client reversed = {.is_reversed = true};

    (void)state;
    if (!cluster_open(&cluster, &setup))
        return -1;
    client = cluster_connect(&cluster, NULL);
    other = cluster_connect(&cluster, &reversed);
    assert_int_equal(kv_buffer_alloc(client, BUFFER_BYTES, &buffer), KV_OK);
    assert_int_equal(kv_buffer_alloc(other, BUFFER_BYTES, &others_buffer), KV_OK);
    return 0;
}

static int close_store(void **state)
{
    (void)state;
    kv_client_close(client);
    kv_client_close(other);
    cluster_close(&cluster);
    return 0;
}

static struct kv_session *take_session(struct kv_op *op)
{
    struct kv_session *session;

    if (kv_wait(op) != KV_OK)
        fail_msg("%s", kv_op_detail(op));
    session = kv_op_session(op);
    kv_op_free(op);
    assert_non_null(session);
    return session;
}

static bool has_few_units; /* models: fewer than a row has nodes */

static struct kv_op *begin_open_by(struct kv_client *by,
                                   const struct kv_session_options *options)
{
    static const uint16_t heads[N_LAYERS] = {N_HEADS, N_HEADS, N_HEADS},
                          few[N_LAYERS] = {1, 1, 1};
    struct kv_model_info model;
    struct kv_op *op;

    if (has_few_units)
        test_model(&model, "small", N_LAYERS, few, DIM, DIM);
    else
        test_model(&model, "model", N_LAYERS, heads, DIM, DIM);
    assert_int_equal(kv_open_begin(by, &model, options, 0, &op), KV_OK);
    return op;
}

static struct kv_op *begin_open(const struct kv_session_options *options)
{
    return begin_open_by(client, options);
}

static struct kv_session *open_session(void)
{
    return take_session(begin_open(NULL));
}

static struct kv_session *resume(struct kv_client *by, const struct kv_ticket *ticket)
{
    struct kv_op *op;

    assert_int_equal(kv_resume_begin(by, ticket, 0, &op), KV_OK);
    return take_session(op);
}

static struct kv_rows all_heads(uint32_t begin, uint32_t n_tokens)
{
    return (struct kv_rows){.n_layers = N_LAYERS, .token_begin = begin, .n_tokens = n_tokens};
}

static void append(struct kv_session *session, uint32_t begin, uint32_t n_tokens)
{
    const struct kv_rows rows = all_heads(begin, n_tokens);
    const struct kv_rows_io io = {.buffer = buffer};
    struct kv_op *op;

    test_box(kv_buffer_data(buffer), kv_session_schema(session), &rows, 1);
    assert_int_equal(kv_append_begin(session, &rows, &io, 0, &op), KV_OK);
    test_finish(op, "append");
}

static void expect_rows(struct kv_session *session, struct kv_buffer *into, uint32_t n_tokens)
{
    const struct kv_rows rows = all_heads(0, n_tokens);
    const struct kv_rows_io io = {.buffer = into};
    struct kv_op *op;

    memset(kv_buffer_data(into), 0, BUFFER_BYTES);
    assert_int_equal(kv_read_begin(session, &rows, &io, 0, &op), KV_OK);
    test_finish(op, "read");
    assert_true(test_is_box(kv_buffer_data(into), kv_session_schema(session), &rows, 1));
}

static void expect_length(struct kv_session *session, uint32_t n_tokens)
{
    struct kv_op *op;

    assert_int_equal(kv_length_begin(session, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("length: %s", kv_op_detail(op));
    assert_int_equal(kv_op_tokens(op), n_tokens);
    kv_op_free(op);
}

/* Whether a node of the cluster is among those of the session, as `client` numbers them. */
static bool is_on(const struct kv_session *session, uint32_t node)
{
    return kvc_row_position(&session->row, &client->nodes[node]) < KV_ROW_NODES;
}

/* ---- tests ------------------------------------------------------------------------------- */

/* Each layer is told for itself: the least of its heads, on whichever nodes they are.  Rows of
 * half of the heads are no rows of the layer. */
static void layers_for_themselves(void **state)
{
    struct kv_session *session = open_session();
    const struct kv_rows parts[] = {
        {.n_layers = 1, .n_tokens = 3},
        {.layer_begin = 1, .n_layers = 1, .n_kv_heads = N_HEADS / 2, .n_tokens = 5},
        {.layer_begin = 2, .n_layers = 1, .n_kv_heads = N_HEADS / 2, .n_tokens = 5},
        {.layer_begin = 2,
         .n_layers = 1,
         .kv_head_begin = N_HEADS / 2,
         .n_kv_heads = N_HEADS - N_HEADS / 2,
         .n_tokens = 4},
    };
    const struct kv_rows_io io = {.buffer = buffer};
    struct kv_op *op;

    (void)state;
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        test_box(kv_buffer_data(buffer), kv_session_schema(session), &parts[i], 1);
        assert_int_equal(kv_put_begin(session, &parts[i], &io, 0, &op), KV_OK);
        test_finish(op, "put");
    }
    assert_int_equal(kv_length_begin(session, 0, &op), KV_OK);
    assert_int_equal(kv_op_layer_tokens(op, 0), 0); /* not known yet */
    assert_int_equal(kv_wait(op), KV_OK);
    assert_int_equal(kv_op_tokens(op), 0);
    assert_int_equal(kv_op_layer_tokens(op, 0), 3);
    assert_int_equal(kv_op_layer_tokens(op, 1), 0);
    assert_int_equal(kv_op_layer_tokens(op, 2), 4);
    assert_int_equal(kv_op_layer_tokens(op, N_LAYERS), 0);
    kv_op_free(op);
    test_session_close(session);
}

static void on_eight_nodes_and_no_other(void **state)
{
    struct kv_session *session = open_session();
    uint32_t n_on = 0;

    (void)state;
    append(session, 0, N_TOKENS);
    expect_rows(session, buffer, N_TOKENS);
    for (uint32_t node = 0; node < N_NODES; node++) {
        assert_true(cluster_number(client, node, "status", "sessions") == is_on(session, node));
        n_on += is_on(session, node);
    }
    assert_int_equal(n_on, KV_ROW_NODES);
    test_session_close(session);
    assert_true(cluster_becomes(client, "status", "sessions", 0));
}

/* The first block's name places a session; without one it is anywhere. */
static void where_the_first_block_says(void **state)
{
    struct kv_id128 names[2] = {{{1, 2, 3}}, {{4}}};
    struct kv_session_options options = {.block_names = names, .n_block_names = 2};
    struct kv_session *first = take_session(begin_open(&options)), *same, *another, *unnamed;
    uint32_t n_other = 0;

    (void)state;
    names[1].bytes[0] = 5;
    same = take_session(begin_open(&options));
    assert_memory_equal(&first->row, &same->row, sizeof(first->row));
    for (unsigned i = 0; i < SESSIONS; i++) {
        names[0].bytes[0] = (uint8_t)(10 + i);
        another = take_session(begin_open(&options));
        unnamed = open_session();
        n_other += memcmp(&first->row, &another->row, sizeof(first->row)) != 0;
        n_other += memcmp(&another->row, &unnamed->row, sizeof(first->row)) != 0;
        test_session_close(another);
        test_session_close(unnamed);
    }
    assert_int_equal(n_other, 2 * SESSIONS);
    test_session_close(first);
    test_session_close(same);
}

/* Returns over how many rows the session's root was spread when it was opened; 0: the session is
 * not where its prompt says. */
static uint32_t rows_of(const struct kv_session *session, const struct kv_id128 *names)
{
    const uint32_t branch = kv_placement_branch(names, 2);
    struct kv_ticket ticket;

    kv_session_ticket(session, &ticket);
    for (uint32_t n_rows = 1; n_rows <= KV_ROOT_ROWS_MAX; n_rows *= 2)
        if (ticket.root ==
            kv_placement_branch_root(kv_placement_prompt_root(&names[0]), branch, n_rows))
            return n_rows;
    return 0;
}

/* Tokens that opens had asked for where they were not to stay, on all nodes. */
static double missed_elsewhere(void)
{
    double sum = 0;

    for (uint32_t node = 0; node < kv_client_n_nodes(client); node++) {
        const struct kv_table *table;
        struct kv_op *op;
        uint32_t column = 0;

        assert_int_equal(kv_table_begin(client, node, "reuse", 0, &op), KV_OK);
        assert_int_equal(kv_wait(op), KV_OK);
        table = kv_op_table(op);
        while (column < table->n_columns &&
               strcmp(table->columns[column], "missed_elsewhere") != 0)
            column++;
        assert_true(column < table->n_columns);
        for (uint32_t i = 0; i < table->n_rows; i++)
            sum += table->cells[i * table->n_columns + column].number;
        kv_op_free(op);
    }
    return sum;
}

/* One root has more and more sessions: later ones spread over more rows, and the first ones stay
 * where they are.  Two clients open them, the second one by another list.  Everything works for
 * each. */
static void a_root_under_load(void **state)
{
    struct kv_session *sessions[BUSY_SESSIONS], *there;
    struct kv_id128 names[2] = {{{99}}, {{0}}};
    struct kv_session_options options = {.block_names = names, .n_block_names = 2};
    uint32_t n_rows = 0, n_places = 0;
    const double n_moved = cluster_total(client, "stats", "sessions_moved");
    const double n_elsewhere = missed_elsewhere();
    struct kv_ticket ticket;

    (void)state;
    for (unsigned i = 0; i < BUSY_SESSIONS; i++) {
        bool is_new = true;

        names[1].bytes[0] = (uint8_t)(i % BRANCHES);
        sessions[i] = take_session(begin_open_by(i % 5 == 4 ? other : client, &options));
        n_rows = rows_of(sessions[i], names);
        assert_int_not_equal(n_rows, 0);
        for (unsigned j = 0; j < i; j++)
            is_new = is_new && sessions[j]->ticket.root != sessions[i]->ticket.root;
        n_places += is_new;
        if (i < ROOT_SESSIONS)
            assert_int_equal(n_rows, 1);
    }
    print_message("%u sessions of one root: %u rows at the end, %u of them used\n",
                  BUSY_SESSIONS, n_rows, n_places);
    assert_in_range(n_rows, 4, 32);
    assert_true(n_places >= 4);
    assert_true(cluster_total(client, "stats", "sessions_moved") > n_moved);
    /* Each that was sent elsewhere had asked for two blocks. */
    assert_true(missed_elsewhere() - n_elsewhere ==
                (cluster_total(client, "stats", "sessions_moved") - n_moved) * 2 *
                    KV_BLOCK_TOKENS);
    /* Each open was dropped where it was not to be. */
    assert_true(cluster_becomes(client, "status", "sessions", BUSY_SESSIONS * KV_ROW_NODES));
    for (unsigned i = 0; i < BUSY_SESSIONS; i++) {
        kv_session_ticket(sessions[i], &ticket);
        there = resume(other, &ticket);
        if (i % 16 == 0 && sessions[i]->client == client) {
            append(sessions[i], 0, N_TOKENS);
            expect_rows(there, others_buffer, N_TOKENS);
        }
        expect_length(there, i % 16 == 0 && sessions[i]->client == client ? N_TOKENS : 0);
        kv_session_free(there);
        test_session_close(sessions[i]);
    }
    assert_true(cluster_becomes(client, "status", "sessions", 0));
}

/* A prompt's beginning is stored where its own sessions are; longer prompts that begin with it
 * have other rows, but find it. */
static void a_beginning_on_another_row(void **state)
{
    struct kv_id128 names[4] = {{{99}}, {{7}}, {{8}}, {{9}}};
    struct kv_session_options options = {.block_names = names, .n_block_names = 2};
    const struct kv_publish publish = {.n_names = 2, .names = names};
    struct kv_session *session = take_session(begin_open(&options));
    uint32_t n_elsewhere = 0;
    struct kv_ticket ticket;
    struct kv_op *op;

    (void)state;
    assert_true(rows_of(session, names) > 1); /* as a_root_under_load() has left it */
    append(session, 0, 128);
    append(session, 128, 128);
    assert_int_equal(kv_publish_begin(session, &publish, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    assert_int_equal(kv_op_tokens(op), 256);
    kv_op_free(op);
    kv_session_ticket(session, &ticket);
    test_session_close(session);
    options.n_block_names = 4;
    for (uint32_t i = 0; i < BRANCHES; i++) {
        names[3].bytes[0] = (uint8_t)(20 + i);
        op = begin_open(&options);
        assert_int_equal(kv_wait(op), KV_OK);
        assert_int_equal(kv_op_tokens(op), 256);
        session = take_session(op);
        assert_true(session->ticket.root == ticket.root);
        n_elsewhere += kv_placement_branch(names, 4) % rows_of(session, names) !=
                       kv_placement_branch(names, 2) % rows_of(session, names);
        test_session_close(session);
    }
    assert_true(n_elsewhere > 0);
    options.is_fresh = true; /* has its own row */
    n_elsewhere = 0;
    for (uint32_t i = 0; i < BRANCHES; i++) {
        names[3].bytes[0] = (uint8_t)(20 + i);
        session = take_session(begin_open(&options));
        n_elsewhere += session->ticket.root != ticket.root;
        test_session_close(session);
    }
    assert_true(n_elsewhere > 0);
    assert_true(cluster_becomes(client, "status", "sessions", 0));
}

static uint32_t match(const struct kv_id128 *names, uint32_t n_names)
{
    uint32_t tokens;
    struct kv_op *op;

    assert_int_equal(kv_match_begin(client, names, n_names, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("match: %s", kv_op_detail(op));
    tokens = kv_op_tokens(op);
    kv_op_free(op);
    return tokens;
}

/* Of a model that has fewer units than a row has nodes, some nodes keep nothing, and lack nothing:
 * a match says what an open attaches, also where the prompt is on another row of its root. */
static void few_units(void **state)
{
    struct kv_id128 names[4] = {{{96}}, {{7}}, {{8}}, {{9}}};
    struct kv_session_options options = {.block_names = names, .n_block_names = 2};
    const struct kv_publish publish = {.n_names = 2, .names = names};
    struct kv_session *sessions[BUSY_SESSIONS], *session;
    struct kv_ticket ticket;
    struct kv_op *op;

    (void)state;
    has_few_units = true;
    session = take_session(begin_open(&options));
    assert_int_equal(match(names, 2), 0);
    append(session, 0, 200);
    assert_int_equal(kv_publish_begin(session, &publish, 0, &op), KV_OK);
    test_finish(op, "publish");
    assert_int_equal(match(names, 2), 128);
    append(session, 200, 56);
    assert_int_equal(kv_publish_begin(session, &publish, 0, &op), KV_OK);
    test_finish(op, "publish");
    kv_session_ticket(session, &ticket);
    test_session_close(session);
    assert_int_equal(match(names, 2), 256);
    assert_int_equal(match(names, 4), 256);
    op = begin_open(&options);
    assert_int_equal(kv_wait(op), KV_OK);
    assert_int_equal(kv_op_tokens(op), 256);
    test_session_close(take_session(op));
    names[0].bytes[1] = 1;
    assert_int_equal(match(names, 2), 0);
    names[0].bytes[1] = 0;

    /* Until the root has several rows. */
    options.is_fresh = true;
    for (uint32_t i = 0; i < BUSY_SESSIONS; i++)
        sessions[i] = take_session(begin_open(&options));
    for (uint32_t i = 0; i < BUSY_SESSIONS; i++)
        test_session_close(sessions[i]);
    session = take_session(begin_open(&options));
    assert_true(rows_of(session, names) > 1);
    append(session, 0, 200);
    append(session, 200, 56);
    assert_int_equal(kv_publish_begin(session, &publish, 0, &op), KV_OK);
    test_finish(op, "publish");
    kv_session_ticket(session, &ticket);
    test_session_close(session);
    options.is_fresh = false;
    options.n_block_names = 4;
    for (uint32_t i = 0; i < BRANCHES; i++) {
        names[3].bytes[0] = (uint8_t)(20 + i);
        assert_int_equal(match(names, 4), 256);
        op = begin_open(&options);
        assert_int_equal(kv_wait(op), KV_OK);
        assert_int_equal(kv_op_tokens(op), 256);
        session = take_session(op);
        assert_true(session->ticket.root == ticket.root);
        test_session_close(session);
    }
    assert_true(cluster_becomes(client, "status", "sessions", 0));
    has_few_units = false;
}

/* Polls until the client has copied a prefix. */
static void wait_for_copy(uint64_t n_before)
{
    const uint64_t until_us = kv_client_now_us(client) + COPIED_US;

    while (client->copies.n_done == n_before) {
        if (kv_client_now_us(client) > until_us)
            fail_msg("nothing was copied");
        (void)kv_client_wait(client, 1000);
    }
}

/* A prompt is stored where there are too many sessions already: the session that is sent away has
 * nothing of it, and the next one there finds what the client has copied. */
static void a_prefix_follows_its_sessions(void **state)
{
    struct kv_id128 names[4] = {{{98}}, {{7}}, {{8}}, {{9}}};
    struct kv_session_options options = {.block_names = names, .n_block_names = 2};
    const struct kv_publish publish = {.n_names = 2, .names = names};
    struct kv_session *sessions[BUSY_SESSIONS], *session = take_session(begin_open(&options));
    const uint64_t n_copied = client->copies.n_done;
    uint32_t n = 0, tokens = 256;
    struct kv_ticket ticket;
    struct kv_op *op;

    (void)state;
    append(session, 0, 128);
    append(session, 128, 128);
    assert_int_equal(kv_publish_begin(session, &publish, 0, &op), KV_OK);
    test_finish(op, "publish");
    kv_session_ticket(session, &ticket);
    test_session_close(session);
    options.n_block_names = 4;
    for (; tokens > 0 && n < BUSY_SESSIONS; n++) {
        names[3].bytes[0] = (uint8_t)n;
        op = begin_open(&options);
        assert_int_equal(kv_wait(op), KV_OK);
        tokens = kv_op_tokens(op);
        sessions[n] = take_session(op);
        assert_int_equal(sessions[n]->ticket.root != ticket.root, tokens == 0);
    }
    assert_in_range(n, ROOT_SESSIONS + 1, BUSY_SESSIONS - 1);
    wait_for_copy(n_copied);
    session = sessions[n - 1];
    op = begin_open(&options); /* with the names of the last one */
    assert_int_equal(kv_wait(op), KV_OK);
    assert_int_equal(kv_op_tokens(op), 256);
    sessions[n++] = take_session(op);
    assert_true(sessions[n - 1]->ticket.root == session->ticket.root);
    expect_rows(sessions[n - 1], buffer, 256);
    for (uint32_t i = 0; i < n; i++)
        test_session_close(sessions[i]);
    assert_int_equal(client->copies.n, 0);
    /* The copy's sessions have ended, too. */
    assert_true(cluster_becomes(client, "status", "sessions", 0));
}

/* ---- nodes that lie ---------------------------------------------------------------------- */

static const struct kv_port_events *lied_to;
#define SILENCE UINT32_MAX
enum {
    N_LIES = 6,
    N_SILENT = 3, /* sessions; each waits for what is not said */
};
static const uint32_t lies[N_LIES] = {
    1, KV_BLOCK_TOKENS - 1, KV_BLOCK_TOKENS + 1, 5 * KV_BLOCK_TOKENS, UINT32_MAX - 1, SILENCE};
static uint32_t lie;

/* What arrives, but for what nodes say that they keep of a prompt, or do not say. */
static void hear_lies(
    void *owner, const void *header, size_t header_bytes, const void *data, size_t data_bytes)
{
    struct kv_wire_header said;
    Kvpb__MatchReply *reply;
    uint8_t packed[256];
    size_t bytes;

    assert_int_equal(header_bytes, sizeof(said));
    memcpy(&said, header, sizeof(said));
    if (said.op == KV_OP_MATCH && lies[lie] == SILENCE)
        return;
    if (said.op != KV_OP_MATCH) {
        lied_to->message(owner, header, header_bytes, data, data_bytes);
        return;
    }
    reply = kvpb__match_reply__unpack(NULL, data_bytes, data);
    assert_non_null(reply);
    reply->tokens = lies[lie];
    bytes = kvpb__match_reply__pack(reply, packed);
    assert_true(bytes <= sizeof(packed));
    kvpb__match_reply__free_unpacked(reply, NULL);
    kv_message_seal(&said, packed, bytes);
    lied_to->message(owner, &said, sizeof(said), packed, bytes);
}

static kv_status_t lying_port_open(struct kv_transport *transport,
                                   const struct kv_port_events *events,
                                   void *owner,
                                   struct kv_port **ret_port)
{
    static struct kv_port_events lying;

    lied_to = events;
    lying = *events;
    lying.message = hear_lies;
    return kv_transport_loopback.port_open(transport, &lying, owner, ret_port);
}

/* A session goes where it is sent, and begins with what is there, whatever nodes say that they keep:
 * nothing is copied that is no prefix. */
static void what_is_kept_may_be_a_lie(void **state)
{
    const struct kv_transport_config config = {.transports = NULL};
    const struct kv_transport_ops ops = *cluster.transport->ops;
    struct kv_transport_ops lying_ops = ops;
    struct kv_id128 names[4] = {{{97}}, {{7}}, {{8}}, {{9}}};
    const struct kv_session_options options = {.block_names = names, .n_block_names = 4};
    struct kv_session *sessions[BUSY_SESSIONS];
    struct cluster_client by = {.deadline_ms = 10000};
    struct kv_client *credulous;
    char detail[128];
    struct kv_op *op;

    (void)state;
    assert_int_equal(ops.open(&config, &by.transport, detail, sizeof(detail)), KV_OK);
    lying_ops.port_open = lying_port_open;
    by.transport->ops = &lying_ops;
    credulous = cluster_connect(&cluster, &by);
    for (uint32_t i = 0; i < BUSY_SESSIONS; i++) {
        lie = i + N_SILENT < BUSY_SESSIONS ? i % (N_LIES - 1) : N_LIES - 1;
        op = begin_open_by(credulous, &options);
        assert_int_equal(kv_wait(op), KV_OK);
        assert_int_equal(kv_op_tokens(op), 0);
        sessions[i] = take_session(op);
        assert_int_equal(credulous->copies.n, 0);
    }
    assert_true(sessions[BUSY_SESSIONS - 1]->ticket.root != sessions[0]->ticket.root);
    for (uint32_t i = 0; i < BUSY_SESSIONS; i++)
        test_session_close(sessions[i]);
    kv_client_close(credulous);
    by.transport->ops = cluster.transport->ops;
    by.transport->ops->close(by.transport);
}

/* Where all nodes are in every row, a root has one. */
static void few_nodes_have_one_row(void **state)
{
    const struct cluster_setup setup = {
        .row = &kv_transport_loopback,
        .n_nodes = KV_ROW_NODES,
        .n_threads = 1,
        .memory_bytes = MEMORY_BYTES / 2,
        .root_sessions = 1,
    };
    struct kv_id128 names[2] = {{{99}}, {{0}}};
    const struct kv_session_options options = {.block_names = names, .n_block_names = 2};
    struct kv_session *session;
    struct kv_client *of_few;
    struct cluster few;

    (void)state;
    assert_true(cluster_open(&few, &setup));
    of_few = cluster_connect(&few, NULL);
    for (unsigned i = 0; i < BRANCHES; i++) {
        names[1].bytes[0] = (uint8_t)i;
        session = take_session(begin_open_by(of_few, &options));
        assert_true(session->ticket.root == kv_placement_prompt_root(&names[0]));
        kv_session_free(session);
    }
    kv_client_close(of_few);
    cluster_close(&few);
}

/* The order of the list means nothing. */
static void by_another_list(void **state)
{
    struct kv_session *session = open_session(), *there;
    struct kv_ticket ticket;
    struct kv_op *op;

    (void)state;
    append(session, 0, N_TOKENS);
    kv_session_ticket(session, &ticket);
    there = resume(other, &ticket);
    for (uint32_t i = 0; i < KV_ROW_NODES; i++)
        assert_string_equal(kvc_session_node(session, i)->address,
                            kvc_session_node(there, i)->address);
    expect_rows(there, others_buffer, N_TOKENS);
    expect_length(there, N_TOKENS);
    kv_session_free(there);

    /* A root that is not the session's leads elsewhere, and to nobody else's data. */
    ticket.root++;
    assert_int_equal(kv_resume_begin(other, &ticket, 0, &op), KV_OK);
    assert_true(kv_wait(op) == KV_NOT_FOUND || kv_op_status(op) == KV_INVALID);
    kv_op_free(op);
    test_session_close(session);
}

/* All that may be done with a session, and with its fork. */
static void use(struct kv_session *session)
{
    struct kv_session *child, *there;
    struct kv_ticket ticket;
    struct kv_op *op;

    append(session, N_TOKENS, N_MORE);
    expect_rows(session, buffer, N_TOKENS + N_MORE);
    assert_int_equal(kv_fork_begin(session, N_FORKED, 0, &op), KV_OK);
    child = take_session(op);
    assert_memory_equal(&session->row, &child->row, sizeof(child->row));
    expect_rows(child, buffer, N_FORKED);
    assert_int_equal(kv_truncate_begin(session, N_TOKENS, 0, &op), KV_OK);
    test_finish(op, "truncate");
    expect_length(session, N_TOKENS);
    assert_int_equal(kv_renew_begin(session, 0, 0, &op), KV_OK);
    test_finish(op, "renew");
    kv_session_ticket(child, &ticket);
    there = resume(other, &ticket);
    expect_rows(there, others_buffer, N_FORKED);
    kv_session_free(there);
    test_session_close(child);
}

/* Finds a root whose row has the node, or has it not. */
static uint64_t root_with(uint32_t node, bool is_there)
{
    struct kv_placement_row row;
    uint64_t root = 0;

    do
        kvc_client_row(client, ++root, &row);
    while ((kvc_row_position(&row, &client->nodes[node]) < KV_ROW_NODES) != is_there);
    return root;
}

/* Copies from a dead node and to one end, and so does a client that has begun one. */
static void give_up_copies(uint32_t dead)
{
    static const uint16_t heads[N_LAYERS] = {N_HEADS, N_HEADS, N_HEADS};
    const uint64_t on = root_with(dead, true), beside = root_with(dead, false);
    const uint64_t n_done = client->copies.n_done;
    const struct kv_id128 name = {{55}};
    struct kv_model_info model;

    test_model(&model, "model", N_LAYERS, heads, DIM, DIM);
    kvc_copy_want(client, &model, on, beside, &name, 1);
    kvc_copy_want(client, &model, beside, on, &name, 1);
    assert_int_equal(client->copies.n, 2);
    while (client->copies.n > 0)
        (void)kv_client_wait(client, 1000);
    assert_int_equal(client->copies.n_done, n_done);

    /* Nodes that stand still answer nothing: what has begun does not end before it was seen. */
    for (uint32_t i = 0; i < N_NODES; i++)
        if (i != dead)
            kvs_node_stop(cluster.nodes[i]);
    kvc_copy_want(other, &model, beside, beside + 1, &name, 1);
    kvc_copy_want(other, &model, beside, beside + 1, &name, 1);
    assert_int_equal(other->copies.n, 1);
    while (kvc_copies_ops(&other->copies) == 0)
        (void)kv_client_wait(other, 1000);
    kv_client_close(other);
    other = NULL;
    for (uint32_t i = 0; i < N_NODES; i++)
        if (i != dead)
            assert_int_equal(kvs_node_start(cluster.nodes[i], true), KV_OK);
}

/* A dead node outside of a session's row is not noticed; inside of it, it is named. */
static void a_dead_node(void **state)
{
    struct kv_session *session = open_session(), *opened;
    uint32_t dead = 0, n_opened = 0, n_failed = 0;
    char begin[2 * KV_WIRE_ADDRESS_MAX + 64];
    struct kv_op *op;

    (void)state;
    append(session, 0, N_TOKENS);
    while (is_on(session, dead))
        dead++;
    cluster_end(&cluster, dead);
    use(session);
    test_session_close(session);

    snprintf(begin, sizeof(begin), "node %s: open: ", client->nodes[dead].address);
    for (unsigned i = 0; i < SESSIONS; i++) {
        op = begin_open(NULL);
        if (kv_wait(op) != KV_OK) {
            assert_memory_equal(kv_op_detail(op), begin, strlen(begin));
            kv_op_free(op);
            n_failed++;
            continue;
        }
        opened = take_session(op);
        assert_false(is_on(opened, dead));
        test_session_close(opened);
        n_opened++;
    }
    print_message("%u sessions were opened, %u were not\n", n_opened, n_failed);
    assert_true(n_opened > 0 && n_failed > 0);

    /* What cannot be copied is given up, from where the dead node is and to there. */
    give_up_copies(dead);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_for_themselves),
        cmocka_unit_test(on_eight_nodes_and_no_other),
        cmocka_unit_test(where_the_first_block_says),
        cmocka_unit_test(by_another_list),
        cmocka_unit_test(a_root_under_load),
        cmocka_unit_test(a_beginning_on_another_row),
        cmocka_unit_test(few_units),
        cmocka_unit_test(a_prefix_follows_its_sessions),
        cmocka_unit_test(what_is_kept_may_be_a_lie),
        cmocka_unit_test(few_nodes_have_one_row),
        cmocka_unit_test(a_dead_node), /* the last: the node stays dead */
    };

    return cmocka_run_group_tests(tests, open_store, close_store);
}
