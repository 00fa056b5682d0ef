/* test_prefix.c - rows that sessions share by content: published under the names of their blocks,
 * found by whoever has the same names, on all nodes or not at all.
 *
 * Embedded nodes with threads, over the loopback, and the real client library.
 */
#include "tests/support/cluster.h"
#include "tests/support/numbered_prompts.h"
#include "tests/support/rows.h"
#include "tests/support/transport_fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_NODES = 3,
    N_THREADS = 2,
    MEMORY_BYTES = 64 << 20,
    BUFFER_BYTES = 4 << 20,
    N_LAYERS = 2,
    N_HEADS = 5,
    DIM = 16,
    BLOCKS = 6,
    TOKENS = BLOCKS * KV_BLOCK_TOKENS + 37,
    OPENS = 300,
};

static struct cluster cluster;
static struct kv_client *client, *other; /* `other` has the list in another order */
static struct kv_buffer *buffer, *others_buffer;
static struct kv_model_info model;

static void connect_all(void)
{
    const struct cluster_client reversed = {.is_reversed = true};

    client = cluster_connect(&cluster, NULL);
    other = cluster_connect(&cluster, &reversed);
    assert_int_equal(kv_buffer_alloc(client, BUFFER_BYTES, &buffer), KV_OK);
    assert_int_equal(kv_buffer_alloc(other, BUFFER_BYTES, &others_buffer), KV_OK);
}

static void leave_all(void)
{
    kv_client_close(client);
    kv_client_close(other);
}

static int open_store(void **state)
{
    static const uint16_t heads[N_LAYERS] = {N_HEADS, N_HEADS};
    const struct cluster_setup setup = {
        .row = &kv_transport_loopback,
        .n_nodes = N_NODES,
        .n_threads = N_THREADS,
        .memory_bytes = MEMORY_BYTES,
    };

    (void)state;
    if (!cluster_open(&cluster, &setup))
        return -1;
    test_model(&model, "model", N_LAYERS, heads, DIM, DIM);
    connect_all();
    return 0;
}

static int close_store(void **state)
{
    (void)state;
    leave_all();
    cluster_close(&cluster);
    return 0;
}

/* ---- prompts ----------------------------------------------------------------------------- */

/* A prompt's tokens follow from two numbers: those before block `fork` from the first, the others
 * from the second. */
struct prompt {
    uint32_t tokens[TOKENS];
    struct kv_id128 names[BLOCKS];
};

static void make_prompt(struct kv_client *by,
                        uint32_t before,
                        uint32_t fork,
                        uint32_t after,
                        struct prompt *ret_prompt)
{
    for (uint32_t i = 0; i < TOKENS; i++)
        ret_prompt->tokens[i] = i * 7 + (i < fork * KV_BLOCK_TOKENS ? before : after) * 1000;
    kv_prompt_names(by, &model, ret_prompt->tokens, TOKENS, NULL, 0, ret_prompt->names);
}

/* ---- operations -------------------------------------------------------------------------- */

static struct kv_session *open_prompt_as(struct kv_client *by,
                                         const struct prompt *prompt,
                                         bool is_fresh,
                                         uint32_t expected)
{
    const struct kv_session_options options = {
        .block_names = prompt->names, .n_block_names = BLOCKS, .is_fresh = is_fresh};
    struct kv_session *session;
    struct kv_op *op;

    assert_int_equal(kv_open_begin(by, &model, &options, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("open: %s", kv_op_detail(op));
    assert_int_equal(kv_op_tokens(op), expected);
    session = kv_op_session(op);
    kv_op_free(op);
    return session;
}

static struct kv_session *open_prompt(const struct prompt *prompt, uint32_t expected)
{
    return open_prompt_as(client, prompt, false, expected);
}

static struct kv_rows all_heads(uint32_t begin, uint32_t n_tokens)
{
    return (struct kv_rows){.n_layers = N_LAYERS, .token_begin = begin, .n_tokens = n_tokens};
}

static void put(struct kv_session *session, uint32_t begin, uint32_t end, uint64_t salt)
{
    const struct kv_rows rows = all_heads(begin, end - begin);
    const struct kv_rows_io io = {.buffer = buffer};
    struct kv_op *op;

    test_box(kv_buffer_data(buffer), kv_session_schema(session), &rows, salt);
    assert_int_equal(kv_put_begin(session, &rows, &io, 0, &op), KV_OK);
    test_finish(op, "put");
}

static void expect_rows_in(struct kv_session *session,
                           struct kv_buffer *into,
                           uint32_t begin,
                           uint32_t end,
                           uint64_t salt)
{
    const struct kv_rows rows = all_heads(begin, end - begin);
    const struct kv_rows_io io = {.buffer = into};
    struct kv_op *op;

    memset(kv_buffer_data(into), 0, BUFFER_BYTES);
    assert_int_equal(kv_read_begin(session, &rows, &io, 0, &op), KV_OK);
    test_finish(op, "read");
    assert_true(test_is_box(kv_buffer_data(into), kv_session_schema(session), &rows, salt));
}

static void expect_rows(struct kv_session *session, uint32_t begin, uint32_t end, uint64_t salt)
{
    expect_rows_in(session, buffer, begin, end, salt);
}

static kv_status_t publish(struct kv_session *session,
                           const struct prompt *prompt,
                           uint32_t first,
                           uint32_t n,
                           uint32_t *ret_tokens)
{
    const struct kv_publish blocks = {
        .first_block = first, .n_names = n, .names = prompt->names + first};
    kv_status_t status;
    struct kv_op *op;

    status = kv_publish_begin(session, &blocks, 0, &op);
    if (status != KV_OK)
        return status;
    status = kv_wait(op);
    *ret_tokens = kv_op_tokens(op);
    kv_op_free(op);
    return status;
}

static void expect_published(struct kv_session *session,
                             const struct prompt *prompt,
                             uint32_t first,
                             uint32_t n,
                             uint32_t expected)
{
    uint32_t tokens = 0;

    assert_int_equal(publish(session, prompt, first, n, &tokens), KV_OK);
    assert_int_equal(tokens, expected);
}

static uint32_t match(const struct prompt *prompt)
{
    const struct kv_match *matches;
    struct kv_op *op;
    uint32_t n, tokens;

    assert_int_equal(kv_match_begin(client, prompt->names, BLOCKS, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("match: %s", kv_op_detail(op));
    tokens = kv_op_tokens(op);
    matches = kv_op_matches(op, &n);
    assert_in_range(n, N_NODES - 1, N_NODES); /* one that is lost is not asked */
    for (uint32_t i = 0; i < n; i++) {
        assert_true(matches[i].tokens >= tokens);
        assert_int_equal(matches[i].tokens_in_memory, matches[i].tokens);
        assert_true(i == 0 || matches[i - 1].tokens >= matches[i].tokens);
    }
    kv_op_free(op);
    return tokens;
}

/* A prompt whose rows are stored and published, by a session that has ended. */
static void store_prompt(struct prompt *prompt, uint32_t number, uint64_t salt)
{
    struct kv_session *session;

    make_prompt(client, number, BLOCKS, number, prompt);
    session = open_prompt(prompt, 0);
    put(session, 0, TOKENS, salt);
    expect_published(session, prompt, 0, BLOCKS, BLOCKS * KV_BLOCK_TOKENS);
    test_session_close(session);
}

/* ---- tests ------------------------------------------------------------------------------- */

/* Another client, which knows the nodes in another order, goes on where the first one ended. */
static void what_was_published_is_there(void **state)
{
    struct prompt prompt;
    struct kv_session *session;

    (void)state;
    store_prompt(&prompt, 1, 11);
    assert_int_equal(match(&prompt), BLOCKS * KV_BLOCK_TOKENS);
    session = open_prompt_as(other, &prompt, false, BLOCKS * KV_BLOCK_TOKENS);
    expect_rows_in(session, others_buffer, 0, BLOCKS * KV_BLOCK_TOKENS, 11);
    test_session_close(session);

    session = open_prompt(&prompt, BLOCKS * KV_BLOCK_TOKENS);
    assert_int_equal(kv_session_generation(session), 1);
    put(session, BLOCKS * KV_BLOCK_TOKENS, TOKENS, 12);
    expect_rows(session, 0, BLOCKS * KV_BLOCK_TOKENS, 11);
    expect_rows(session, BLOCKS * KV_BLOCK_TOKENS, TOKENS, 12);
    test_session_close(session);

    session = open_prompt_as(client, &prompt, true, 0);
    test_session_close(session);
}

/* As long as the prompts are the same, and not longer. */
static void a_part_is_there(void **state)
{
    struct prompt prompt, branch;
    struct kv_session *session;

    (void)state;
    store_prompt(&prompt, 2, 21);
    for (uint32_t fork = 1; fork < BLOCKS; fork++) {
        make_prompt(client, 2, fork, 200 + fork, &branch);
        assert_int_equal(match(&branch), fork * KV_BLOCK_TOKENS);
        session = open_prompt(&branch, fork * KV_BLOCK_TOKENS);
        put(session, fork * KV_BLOCK_TOKENS, TOKENS, 22 + fork);
        expect_published(session, &branch, 0, BLOCKS, BLOCKS * KV_BLOCK_TOKENS);
        test_session_close(session);
    }
    /* Each of them is there now, with the rows of two sessions. */
    for (uint32_t fork = 1; fork < BLOCKS; fork++) {
        make_prompt(client, 2, fork, 200 + fork, &branch);
        session = open_prompt(&branch, BLOCKS * KV_BLOCK_TOKENS);
        expect_rows(session, 0, fork * KV_BLOCK_TOKENS, 21);
        expect_rows(session, fork * KV_BLOCK_TOKENS, BLOCKS * KV_BLOCK_TOKENS, 22 + fork);
        test_session_close(session);
    }
    make_prompt(client, 3, BLOCKS, 3, &branch);
    assert_int_equal(match(&branch), 0);
}

/* What is not complete is not published, and what comes later is. */
static void blocks_as_they_come(void **state)
{
    struct prompt prompt;
    struct kv_session *session;

    (void)state;
    make_prompt(client, 4, BLOCKS, 4, &prompt);
    session = open_prompt(&prompt, 0);
    expect_published(session, &prompt, 0, 2, 0);
    put(session, 0, 200, 41);
    expect_published(session, &prompt, 0, BLOCKS, KV_BLOCK_TOKENS);
    assert_int_equal(match(&prompt), KV_BLOCK_TOKENS);
    put(session, 200, 3 * KV_BLOCK_TOKENS, 41);
    expect_published(session, &prompt, 2, 1, 3 * KV_BLOCK_TOKENS);
    put(session, 3 * KV_BLOCK_TOKENS, TOKENS, 41);
    expect_published(session, &prompt, 5, 1, BLOCKS * KV_BLOCK_TOKENS);
    test_session_close(session);
    session = open_prompt(&prompt, BLOCKS * KV_BLOCK_TOKENS);
    expect_rows(session, 0, BLOCKS * KV_BLOCK_TOKENS, 41);
    test_session_close(session);
}

/* Of two sessions that have computed the same prompt, the first one to publish is found; the other
 * one keeps its own rows. */
static void the_first_copy_stays(void **state)
{
    struct prompt prompt;
    struct kv_session *first, *second, *third;

    (void)state;
    make_prompt(client, 5, BLOCKS, 5, &prompt);
    first = open_prompt(&prompt, 0);
    second = open_prompt(&prompt, 0);
    put(first, 0, TOKENS, 51);
    put(second, 0, TOKENS, 52);
    expect_published(second, &prompt, 0, 2, 2 * KV_BLOCK_TOKENS);
    expect_published(first, &prompt, 0, BLOCKS, BLOCKS * KV_BLOCK_TOKENS);
    expect_published(second, &prompt, 0, BLOCKS, BLOCKS * KV_BLOCK_TOKENS);
    third = open_prompt(&prompt, BLOCKS * KV_BLOCK_TOKENS);
    expect_rows(third, 0, 2 * KV_BLOCK_TOKENS, 52);
    expect_rows(third, 2 * KV_BLOCK_TOKENS, BLOCKS * KV_BLOCK_TOKENS, 51);
    expect_rows(first, 0, TOKENS, 51);
    expect_rows(second, 0, TOKENS, 52);
    test_session_close(first);
    test_session_close(second);
    expect_rows(third, 0, 2 * KV_BLOCK_TOKENS, 52);
    test_session_close(third);
}

static void make_codes(struct kv_session *session)
{
    const struct kv_index_options index = {.tokens = BLOCKS * KV_BLOCK_TOKENS,
                                           .m = 2,
                                           .bits = 3,
                                           .iterations = 5,
                                           .seed = 1,
                                           .wait = true};
    struct kv_op *op;

    assert_int_equal(kv_index_begin(session, &index, 0, &op), KV_OK);
    test_finish(op, "index");
}

/* Asks for some of the rows from `begin` on, by code and cell. */
static void expect_answers_from(struct kv_session *session, uint32_t begin)
{
    const struct kv_range range = {begin, BLOCKS * KV_BLOCK_TOKENS};
    float vectors[N_HEADS * DIM];
    struct kv_query query = {.n_queries = 1,
                             .queries = vectors,
                             .scale = 0.25f,
                             .merge = KV_MERGE_SUM,
                             .answer = KV_ANSWER_IDS,
                             .k = 5,
                             .rerank = 2,
                             .n_ranges = 1,
                             .ranges = &range};

    for (uint32_t i = 0; i < N_HEADS * DIM; i++)
        vectors[i] = (float)(i * 37 % 11) - 5;
    for (query.layer = 0; query.layer < N_LAYERS; query.layer++) {
        struct kv_op *op;

        assert_int_equal(kv_query_begin(session, &query, NULL, 0, &op), KV_OK);
        if (kv_wait(op) != KV_OK)
            fail_msg("query: %s", kv_op_detail(op));
        for (uint32_t head = 0; head < N_HEADS; head++) {
            struct kv_query_result result;

            assert_int_equal(kv_op_query_result(op, head, &result), KV_OK);
            assert_int_equal(result.n_ids, query.k);
            for (uint32_t i = 0; i < result.n_ids; i++)
                assert_in_range(result.ids[i], begin, range.end - 1);
        }
        kv_op_free(op);
    }
}

/* Two sessions publish a prompt in turns: who opens it has blocks of both, and a chapter of one of
 * them with a hole in it. */
static void published_in_turns(void **state)
{
    struct prompt prompt;
    struct kv_session *first, *second, *third;

    (void)state;
    make_prompt(client, 61, BLOCKS, 61, &prompt);
    first = open_prompt(&prompt, 0);
    put(first, 0, 2 * KV_BLOCK_TOKENS, 61);
    expect_published(first, &prompt, 0, 2, 2 * KV_BLOCK_TOKENS);
    second = open_prompt(&prompt, 2 * KV_BLOCK_TOKENS);
    put(second, 2 * KV_BLOCK_TOKENS, TOKENS, 61);
    put(first, 2 * KV_BLOCK_TOKENS, 4 * KV_BLOCK_TOKENS, 61);
    expect_published(first, &prompt, 0, 4, 4 * KV_BLOCK_TOKENS);
    make_codes(second);
    expect_published(second, &prompt, 0, BLOCKS, BLOCKS * KV_BLOCK_TOKENS);
    third = open_prompt(&prompt, BLOCKS * KV_BLOCK_TOKENS);
    /* The last ones first: a query gives codes to the rows that it reads. */
    for (uint32_t block = BLOCKS; block-- > 0;) {
        expect_answers_from(second, block * KV_BLOCK_TOKENS + 9);
        expect_answers_from(third, block * KV_BLOCK_TOKENS + 9);
    }
    test_session_close(first);
    test_session_close(second);
    test_session_close(third);
}

/* A session that truncates what it has published, or was opened with, writes other rows there; what
 * is kept under the names stays. */
static void truncated_and_written_again(void **state)
{
    struct prompt prompt;
    struct kv_session *session;
    struct kv_op *op;
    uint32_t tokens = 0;

    (void)state;
    store_prompt(&prompt, 6, 61);
    for (uint32_t round = 0; round < 2; round++) {
        session = open_prompt(&prompt, BLOCKS * KV_BLOCK_TOKENS);
        assert_int_equal(kv_truncate_begin(session, 300, 0, &op), KV_OK);
        test_finish(op, "truncate");
        put(session, 300, TOKENS, 62 + round);
        expect_rows(session, 0, 300, 61);
        expect_rows(session, 300, TOKENS, 62 + round);
        /* Its third block has other rows than its name says, which the caller must not claim; the
         * names after the truncate are unknown, so that it could. */
        assert_int_equal(publish(session, &prompt, 3, 1, &tokens), KV_INVALID);
        test_session_close(session);
    }
    session = open_prompt(&prompt, BLOCKS * KV_BLOCK_TOKENS);
    expect_rows(session, 0, BLOCKS * KV_BLOCK_TOKENS, 61);
    test_session_close(session);
}

/* A node that has lost everything has nothing to share: the others share no more than it has. */
static void a_node_that_was_started_again(void **state)
{
    struct prompt prompt;
    struct kv_session *session;
    struct kv_op *op;

    (void)state;
    store_prompt(&prompt, 7, 71);
    leave_all();
    cluster_end(&cluster, 1);
    cluster_start(&cluster, 1);
    connect_all();
    session = open_prompt(&prompt, 0);
    assert_int_equal(kv_session_generation(session), 2);
    assert_int_equal(match(&prompt), 0);
    put(session, 0, TOKENS, 72);
    expect_rows(session, 0, TOKENS, 72);
    expect_published(session, &prompt, 0, BLOCKS, BLOCKS * KV_BLOCK_TOKENS);
    test_session_close(session);
    /* The node has the rows of the second session now, the others those of the first: every row has
     * its own writer's checksum. */
    session = open_prompt(&prompt, BLOCKS * KV_BLOCK_TOKENS);
    const struct kv_rows rows = all_heads(0, BLOCKS * KV_BLOCK_TOKENS);
    const struct kv_rows_io io = {.buffer = buffer};

    assert_int_equal(kv_read_begin(session, &rows, &io, 0, &op), KV_OK);
    test_finish(op, "read of two writers");
    assert_false(test_is_box(kv_buffer_data(buffer), kv_session_schema(session), &rows, 71));
    assert_false(test_is_box(kv_buffer_data(buffer), kv_session_schema(session), &rows, 72));
    assert_int_equal(kv_fork_begin(session, 200, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    struct kv_session *fork = kv_op_session(op);
    kv_op_free(op);
    put(fork, 200, TOKENS, 73);
    expect_rows(fork, 200, TOKENS, 73);
    struct kv_ticket ticket;
    kv_session_ticket(fork, &ticket);
    kv_session_free(fork);
    assert_int_equal(kv_resume_begin(other, &ticket, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    fork = kv_op_session(op);
    kv_op_free(op);
    expect_rows_in(fork, others_buffer, 200, TOKENS, 73);
    const struct kv_rows_io theirs = {.buffer = others_buffer};
    const struct kv_rows begin = all_heads(0, 200);
    assert_int_equal(kv_read_begin(fork, &begin, &theirs, 0, &op), KV_OK);
    test_finish(op, "read of a fork of two writers");
    test_session_close(fork);
    test_session_close(session);
}

/* What became of the tokens that sessions asked for, as all nodes tell it. */
static void count_reuse(double ret_counts[3])
{
    ret_counts[0] = ret_counts[1] = ret_counts[2] = 0;
    for (uint32_t node = 0; node < N_NODES; node++) {
        const struct kv_table *table;
        struct kv_op *op;

        assert_int_equal(kv_table_begin(client, node, "reuse", 0, &op), KV_OK);
        assert_int_equal(kv_wait(op), KV_OK);
        table = kv_op_table(op);
        for (uint32_t i = 0; i < table->n_rows; i++)
            for (uint32_t j = 0; table->cells[i * table->n_columns].number == 0 && j < 3; j++)
                ret_counts[j] += table->cells[i * table->n_columns + 1 + j].number;
        kv_op_free(op);
    }
}

static void reuse_is_counted(void **state)
{
    const double blocks = N_NODES * KV_BLOCK_TOKENS;
    double before[3], after[3];
    struct prompt prompt, branch;

    (void)state;
    count_reuse(before);
    store_prompt(&prompt, 20, 201); /* all is new */
    test_session_close(open_prompt(&prompt, BLOCKS * KV_BLOCK_TOKENS));
    make_prompt(client, 20, 2, 21, &branch);
    test_session_close(open_prompt(&branch, 2 * KV_BLOCK_TOKENS));
    test_session_close(open_prompt_as(client, &branch, true, 0)); /* asks for nothing */
    count_reuse(after);
    assert_true(after[0] - before[0] == 3 * BLOCKS * blocks);
    assert_true(after[1] - before[1] == (BLOCKS + 2) * blocks);
    assert_true(after[2] - before[2] == (2 * BLOCKS - 2) * blocks);
}

static uint32_t match_by(struct kv_client *by, const struct kv_id128 *names)
{
    uint32_t tokens;
    struct kv_op *op;

    assert_int_equal(kv_match_begin(by, names, BLOCKS, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("match: %s", kv_op_detail(op));
    tokens = kv_op_tokens(op);
    kv_op_free(op);
    return tokens;
}

/* Another tenant, who may even have the names; another salt, or none, of the same tenant; another
 * adapter; another model, of the same shape: nobody of these finds anything, and what they publish
 * of the same tokens is theirs. */
static void others_find_nothing(void **state)
{
    static const uint16_t heads[N_LAYERS] = {N_HEADS, N_HEADS};
    static const struct kv_extra_key adapter = {0, UINT32_MAX, "adapter", 7};
    const struct cluster_client as[] = {
        {.tenant = 3}, {.salt = "pepper"}, {.salt = "peppes"}, {.tenant = 0}, {.tenant = 0}};
    const struct kv_model_info own = model;
    enum {
        TENANT,
        ADAPTER = 3,
        MODEL,
        N_OTHERS,
    };
    struct kv_model_info another;
    struct prompt prompt;
    struct kv_session *session;

    (void)state;
    test_model(&another, "another", N_LAYERS, heads, DIM, DIM);
    store_prompt(&prompt, 8, 81);
    for (unsigned i = 0; i < N_OTHERS; i++) {
        struct kv_client *stranger = cluster_connect(&cluster, &as[i]), *mine = client;
        struct kv_buffer *strangers, *my_buffer = buffer;
        struct prompt theirs = prompt;

        assert_int_equal(kv_buffer_alloc(stranger, BUFFER_BYTES, &strangers), KV_OK);
        if (i == MODEL) {
            /* By the names of the first one, whatever it is that made them equal. */
            model = another;
            session = open_prompt_as(stranger, &prompt, false, 0);
            test_session_close(session);
        }
        kv_prompt_names(stranger, &model, prompt.tokens, TOKENS, i == ADAPTER ? &adapter : NULL,
                        i == ADAPTER, theirs.names);
        if (i == TENANT)
            assert_memory_equal(theirs.names, prompt.names, sizeof(prompt.names));
        else
            for (uint32_t block = 0; block < BLOCKS; block++)
                assert_memory_not_equal(&theirs.names[block], &prompt.names[block],
                                        sizeof(prompt.names[block]));
        assert_int_equal(match_by(stranger, theirs.names), 0);
        session = open_prompt_as(stranger, &theirs, false, 0);
        client = stranger;
        buffer = strangers;
        put(session, 0, TOKENS, 82 + i);
        expect_published(session, &theirs, 0, BLOCKS, BLOCKS * KV_BLOCK_TOKENS);
        test_session_close(session);
        session = open_prompt(&theirs, BLOCKS * KV_BLOCK_TOKENS);
        expect_rows(session, 0, BLOCKS * KV_BLOCK_TOKENS, 82 + i);
        test_session_close(session);
        client = mine;
        buffer = my_buffer;
        model = own;
        kv_client_close(stranger);
        session = open_prompt(&prompt, BLOCKS * KV_BLOCK_TOKENS);
        expect_rows(session, 0, BLOCKS * KV_BLOCK_TOKENS, 81);
        test_session_close(session);
    }
    assert_int_equal(match(&prompt), BLOCKS * KV_BLOCK_TOKENS);
}

static void refused(void **state)
{
    struct prompt prompt, another;
    struct kv_session *session;
    uint32_t tokens = 0;
    struct kv_op *op;

    (void)state;
    make_prompt(client, 9, BLOCKS, 9, &prompt);
    make_prompt(client, 9, 2, 99, &another);
    session = open_prompt(&prompt, 0);
    put(session, 0, TOKENS, 91);
    assert_int_equal(publish(session, &another, 0, BLOCKS, &tokens), KV_CONFLICT);
    assert_int_equal(
        publish(session, &prompt, BLOCKS, KV_TOKENS_MAX / KV_BLOCK_TOKENS, &tokens),
        KV_INVALID);
    assert_int_equal(publish(session, &prompt, 0, 0, &tokens), KV_INVALID);
    expect_published(session, &prompt, 0, BLOCKS, BLOCKS * KV_BLOCK_TOKENS);
    test_session_close(session);

    assert_int_equal(kv_open_begin(client, &model, NULL, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    session = kv_op_session(op);
    kv_op_free(op);
    assert_int_equal(publish(session, &prompt, 0, 1, &tokens), KV_UNSUPPORTED);
    test_session_close(session);
}

/* Any number of sessions of one prompt take the memory of its rows once. */
static void rows_are_shared(void **state)
{
    static struct kv_session *sessions[OPENS];
    struct prompt prompt;
    double before;

    (void)state;
    store_prompt(&prompt, 10, 101);
    cluster_look(&cluster);
    before = cluster_total(client, "stats", "rows_in");
    for (uint32_t i = 0; i < OPENS; i++)
        sessions[i] = open_prompt(&prompt, BLOCKS * KV_BLOCK_TOKENS);
    assert_true(cluster_total(client, "stats", "rows_in") == before);
    for (uint32_t i = 0; i < OPENS; i++) {
        if (i % 50 == 0)
            expect_rows(sessions[i], 0, BLOCKS * KV_BLOCK_TOKENS, 101);
        test_session_close(sessions[i]);
    }
}

static uint64_t say(enum kv_prefix_verb verb, const struct kv_id128 *name)
{
    const struct kv_prefix prefix = {.verb = verb, .name = name};
    struct kv_op *op;
    uint64_t blocks;

    assert_int_equal(kv_prefix_begin(client, KV_NODES_ALL, &prefix, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("prefix: %s", kv_op_detail(op));
    blocks = kv_op_blocks(op);
    kv_op_free(op);
    return blocks;
}

/* Messages about prefixes get lost, come damaged and come twice: what is kept is the same. */
static void lost_and_doubled_messages(void **state)
{
    static const struct fault_rule rules[] = {
        {FAULT_IN, FAULT_DROP, KV_WIRE_REPLY, KV_OP_PUBLISH, 0, 2},
        {FAULT_OUT, FAULT_DROP, KV_WIRE_REQUEST, KV_OP_PUBLISH, 1, 2},
        {FAULT_OUT, FAULT_TWICE, KV_WIRE_REQUEST, KV_OP_PUBLISH, 0, 0},
        {FAULT_IN, FAULT_DROP, KV_WIRE_REPLY, KV_OP_MATCH, 1, 2},
        {FAULT_OUT, FAULT_TWICE, KV_WIRE_REQUEST, KV_OP_MATCH, 0, 0},
        {FAULT_IN, FAULT_GARBLE, KV_WIRE_REPLY, KV_OP_MATCH, 0, 2},
        {FAULT_IN, FAULT_GARBLE, KV_WIRE_REPLY, KV_OP_PUBLISH, 0, 2},
        {FAULT_IN, FAULT_DROP, KV_WIRE_REPLY, KV_OP_OPEN, 0, 2},
        {FAULT_OUT, FAULT_TWICE, KV_WIRE_REQUEST, KV_OP_OPEN, 0, 0},
        {FAULT_IN, FAULT_DROP, KV_WIRE_REPLY, KV_OP_PREFIX, 0, 2},
        {FAULT_OUT, FAULT_TWICE, KV_WIRE_REQUEST, KV_OP_PREFIX, 0, 0},
    };
    /* What has been evicted is not found again.  Two for each node: a reply to what came before
     * may be late, and takes the place of one. */
    static const struct fault_rule of_evict = {FAULT_IN,     FAULT_DROP, KV_WIRE_REPLY,
                                               KV_OP_PREFIX, 0,          2 * N_NODES};
    const uint32_t n_rules = sizeof(rules) / sizeof(rules[0]);
    struct kv_client *const calm = client;
    struct kv_buffer *const calm_buffer = buffer;
    struct kv_transport *transport;
    double before[3], after[3];

    (void)state;
    assert_int_equal(fault_open(&kv_transport_loopback, NULL, &transport), KV_OK);
    client = cluster_connect(&cluster,
                             &(struct cluster_client){.transport = transport, .retry_ms = 50});
    assert_int_equal(kv_buffer_alloc(client, BUFFER_BYTES, &buffer), KV_OK);
    for (uint32_t i = 0; i < n_rules + 1; i++) {
        const unsigned n_hits = fault_hits(transport);
        struct prompt prompt;

        if (i < n_rules)
            fault_add(transport, &rules[i]);
        count_reuse(before);
        store_prompt(&prompt, 300 + i, 300 + i);
        assert_int_equal(match(&prompt), BLOCKS * KV_BLOCK_TOKENS);
        struct kv_session *session = open_prompt(&prompt, BLOCKS * KV_BLOCK_TOKENS);
        count_reuse(after);
        assert_true(after[0] - before[0] == 2 * N_NODES * BLOCKS * KV_BLOCK_TOKENS);
        assert_true(after[1] - before[1] == N_NODES * BLOCKS * KV_BLOCK_TOKENS);
        expect_rows(session, 0, BLOCKS * KV_BLOCK_TOKENS, 300 + i);
        for (unsigned j = 0; j < 3; j++) {
            static const enum kv_prefix_verb verbs[] = {KV_PREFIX_PIN, KV_PREFIX_UNPIN,
                                                        KV_PREFIX_HINT};

            assert_int_equal(say(verbs[j], &prompt.names[2]), 1);
        }
        /* Only now: replies that come late before it would move a number of them to skip. */
        if (i == n_rules)
            fault_add(transport, &of_evict);
        /* A reply that is slow counts as lost. */
        assert_in_range(say(KV_PREFIX_EVICT, &prompt.names[2]), 0,
                        i < n_rules ? BLOCKS - 2 : 0);
        assert_int_equal(match(&prompt), 2 * KV_BLOCK_TOKENS);
        expect_rows(session, 0, BLOCKS * KV_BLOCK_TOKENS, 300 + i);
        test_session_close(session);
        assert_true(fault_hits(transport) > n_hits);
        fault_clear(transport);
    }
    kv_client_close(client);
    transport->ops->close(transport);
    client = calm;
    buffer = calm_buffer;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_published_is_there),
        cmocka_unit_test(a_part_is_there),
        cmocka_unit_test(blocks_as_they_come),
        cmocka_unit_test(the_first_copy_stays),
        cmocka_unit_test(published_in_turns),
        cmocka_unit_test(truncated_and_written_again),
        cmocka_unit_test(others_find_nothing),
        cmocka_unit_test(refused),
        cmocka_unit_test(rows_are_shared),
        cmocka_unit_test(reuse_is_counted),
        cmocka_unit_test(lost_and_doubled_messages),
        cmocka_unit_test(a_node_that_was_started_again),
    };

    return cmocka_run_group_tests_name("prefixes", tests, open_store, close_store);
}
