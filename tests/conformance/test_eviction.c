/* test_eviction.c - a store whose memory is full of prefixes: each put finds room, what was used
 * lately stays, tenants keep to their quota and their share, and no answer is wrong.
 *
 * Embedded nodes with threads, over the loopback, and the real client library.
 */
#include "tests/support/cluster.h"
#include "tests/support/numbered_prompts.h"
#include "tests/support/rows.h"

#include "kvserver/store/node_private.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_THREADS = 2,
    MEMORY_BYTES = 128 << 20,
    N_LAYERS = 2,
    N_HEADS = 4,
    DIM = 64,
    BLOCKS = 6,
    TOKENS = BLOCKS * KV_BLOCK_TOKENS,
    BLOCK_BYTES = N_LAYERS * N_HEADS * (4 * DIM + 4) * KV_BLOCK_TOKENS,
    PROMPT_BYTES = BLOCKS * BLOCK_BYTES,
    BUFFER_BYTES = 2 << 20,
    /* Ten times the memory. */
    N_PROMPTS = (int)(10 * (int64_t)MEMORY_BYTES / PROMPT_BYTES),
    TENANTS = 2,
    GAUGE_US = 60 * 1000 * 1000,
};

static struct cluster cluster;
static struct kv_client *clients[TENANTS];
static struct kv_buffer *buffers[TENANTS];
static struct kv_model_info model;
static struct kv_id128 names[N_PROMPTS][BLOCKS];

/* What a reader of a node's events knows. */
static struct reader {
    struct block {
        struct kv_id128 name;
        uint32_t tenant;
    } blocks[N_PROMPTS * BLOCKS];
    uint32_t n_blocks;
    uint64_t n_told, n_with_tokens;
} readers[CLUSTER_NODES_MAX];

static struct block *
find_block(struct reader *reader, const struct kv_id128 *name, uint32_t tenant)
{
    for (uint32_t i = 0; i < reader->n_blocks; i++)
        if (reader->blocks[i].tenant == tenant &&
            memcmp(&reader->blocks[i].name, name, sizeof(*name)) == 0)
            return &reader->blocks[i];
    return NULL;
}

static void on_stored(void *arg, const struct kvs_blocks_stored *event)
{
    struct reader *reader = arg;
    const uint32_t *tokens = event->tokens;

    assert_int_equal(event->n, 1);
    assert_int_equal(event->medium, KVS_MEDIUM_CPU);
    assert_null(find_block(reader, event->names, event->tenant));
    assert_true(event->parent == NULL || find_block(reader, event->parent, event->tenant));
    reader->blocks[reader->n_blocks++] = (struct block){*event->names, event->tenant};
    reader->n_told++;
    if (tokens == NULL)
        return;
    /* Which tokens these are follows from the first one. */
    const struct kv_id128 *prompt = names[tokens[0] / TOKENS];
    const uint32_t block = tokens[0] % TOKENS / KV_BLOCK_TOKENS;

    for (uint32_t i = 1; i < KV_BLOCK_TOKENS; i++)
        assert_int_equal(tokens[i], tokens[0] + i);
    assert_memory_equal(event->names, &prompt[block], sizeof(prompt[block]));
    if (block == 0)
        assert_null(event->parent);
    else
        assert_memory_equal(event->parent, &prompt[block - 1], sizeof(prompt[block]));
    reader->n_with_tokens++;
}

static void on_removed(void *arg, const struct kvs_blocks_removed *event)
{
    struct reader *reader = arg;
    struct block *block = find_block(reader, event->names, event->tenant);

    assert_int_equal(event->n, 1);
    assert_int_equal(event->medium, KVS_MEDIUM_CPU);
    assert_non_null(block);
    *block = reader->blocks[--reader->n_blocks];
}

static void on_cleared(void *arg)
{
    (void)arg;
    fail_msg("all cleared");
}

/* A reader of all events knows what the node has, and nothing else. */
static void check_reader(const struct kvs_prefixes *prefixes, struct reader *reader)
{
    size_t cursor = 0;
    uint32_t n = 0;

    while (true) {
        const struct kvs_prefix *prefix = kvs_prefixes_next(prefixes, &cursor);
        struct block *block;

        if (prefix == NULL)
            break;
        block = find_block(reader, &prefix->name, prefix->home->place.tenant);
        assert_non_null(block);
        n++;
    }
    assert_int_equal(n, reader->n_blocks);
}

static void open_store(uint32_t n_nodes, const char *policy, uint64_t quota)
{
    static struct kvs_event_sink sinks[CLUSTER_NODES_MAX];
    static const uint16_t heads[N_LAYERS] = {N_HEADS, N_HEADS};
    const struct cluster_setup setup = {
        .row = &kv_transport_loopback,
        .n_nodes = n_nodes,
        .n_threads = N_THREADS,
        .memory_bytes = MEMORY_BYTES,
        .eviction = policy,
        .tenant_quota = quota,
        .events = sinks,
    };

    memset(readers, 0, sizeof(readers));
    for (uint32_t i = 0; i < n_nodes; i++)
        sinks[i] = (struct kvs_event_sink){on_stored, on_removed, on_cleared, &readers[i]};
    assert_true(cluster_open(&cluster, &setup));
    test_model(&model, "model", N_LAYERS, heads, DIM, DIM);
    for (uint32_t i = 0; i < TENANTS; i++) {
        const struct cluster_client of = {.tenant = i};

        clients[i] = cluster_connect(&cluster, &of);
        assert_int_equal(kv_buffer_alloc(clients[i], BUFFER_BYTES, &buffers[i]), KV_OK);
    }
    for (uint32_t i = 0; i < N_PROMPTS; i++) {
        uint32_t tokens[TOKENS];

        for (uint32_t at = 0; at < TOKENS; at++)
            tokens[at] = at + i * TOKENS;
        kv_prompt_names(clients[0], &model, tokens, TOKENS, NULL, 0, names[i]);
    }
}

/* The books are right to the byte, and readers of events know what is there. */
static void close_store(void)
{
    for (uint32_t i = 0; i < TENANTS; i++)
        kv_client_close(clients[i]);
    for (uint32_t i = 0; i < cluster.n_nodes; i++) {
        kvs_node_stop(cluster.nodes[i]);
        for (int step = 0; step < 1000; step++) {
            kvs_node_control_step(cluster.nodes[i]);
            for (uint32_t thread = 0; thread < N_THREADS; thread++)
                kvs_node_data_step(cluster.nodes[i], thread);
        }
        kvs_node_check(cluster.nodes[i]);
        kvs_node_check_memory(cluster.nodes[i]);
        check_reader(cluster.nodes[i]->control.prefixes, &readers[i]);
    }
    cluster_close(&cluster);
}

/* ---- operations -------------------------------------------------------------------------- */

static struct kv_session *open_prompt(uint32_t tenant, uint32_t prompt, uint32_t *ret_tokens)
{
    const struct kv_session_options options = {.block_names = names[prompt],
                                               .n_block_names = BLOCKS};
    struct kv_session *session;
    struct kv_op *op;

    assert_int_equal(kv_open_begin(clients[tenant], &model, &options, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("open: %s", kv_op_detail(op));
    *ret_tokens = kv_op_tokens(op);
    session = kv_op_session(op);
    kv_op_free(op);
    return session;
}

static uint64_t salt_of(uint32_t tenant, uint32_t prompt)
{
    return tenant * 100000 + prompt;
}

static struct kv_rows rows_of(uint32_t begin)
{
    return (struct kv_rows){
        .n_layers = N_LAYERS, .token_begin = begin, .n_tokens = TOKENS - begin};
}

static kv_status_t
try_put(uint32_t tenant, uint32_t prompt, struct kv_session *session, uint32_t begin)
{
    const struct kv_rows rows = rows_of(begin);
    const struct kv_rows_io io = {.buffer = buffers[tenant]};
    kv_status_t status;
    struct kv_op *op;

    test_box(kv_buffer_data(buffers[tenant]), &model.schema, &rows, salt_of(tenant, prompt));
    assert_int_equal(kv_put_begin(session, &rows, &io, 0, &op), KV_OK);
    status = kv_wait(op);
    if (status != KV_OK)
        print_message("put: %s\n", kv_op_detail(op));
    kv_op_free(op);
    /* A node may still read what a put that failed had sent. */
    while (kv_buffer_busy(buffers[tenant]))
        (void)kv_client_wait(clients[tenant], 5000);
    return status;
}

static void expect_rows(uint32_t tenant, uint32_t prompt, struct kv_session *session)
{
    const struct kv_rows rows = rows_of(0);
    const struct kv_rows_io io = {.buffer = buffers[tenant]};
    struct kv_op *op;

    memset(kv_buffer_data(buffers[tenant]), 0, BUFFER_BYTES);
    assert_int_equal(kv_read_begin(session, &rows, &io, 0, &op), KV_OK);
    test_finish(op, "read");
    assert_true(test_is_box(kv_buffer_data(buffers[tenant]), &model.schema, &rows,
                            salt_of(tenant, prompt)));
}

static uint32_t publish(uint32_t prompt, struct kv_session *session)
{
    struct kv_publish blocks = {.n_names = BLOCKS, .names = names[prompt]};
    uint32_t tokens, told[TOKENS];
    struct kv_op *op;

    for (uint32_t at = 0; at < TOKENS; at++)
        told[at] = at + prompt * TOKENS;
    if (prompt % 2 == 0)
        blocks.tokens = told;
    assert_int_equal(kv_publish_begin(session, &blocks, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("publish: %s", kv_op_detail(op));
    tokens = kv_op_tokens(op);
    kv_op_free(op);
    return tokens;
}

static uint32_t match(uint32_t tenant, uint32_t prompt)
{
    uint32_t tokens;
    struct kv_op *op;

    assert_int_equal(kv_match_begin(clients[tenant], names[prompt], BLOCKS, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("match: %s", kv_op_detail(op));
    tokens = kv_op_tokens(op);
    kv_op_free(op);
    return tokens;
}

/* A session with the prompt: what is not there is put.  Returns the tokens that were there, or are
 * kept at the end. */
static uint32_t use_prompt(uint32_t tenant, uint32_t prompt, bool publishes)
{
    uint32_t tokens;
    struct kv_session *session = open_prompt(tenant, prompt, &tokens);

    if (tokens < TOKENS)
        assert_int_equal(try_put(tenant, prompt, session, tokens), KV_OK);
    expect_rows(tenant, prompt, session);
    if (publishes)
        tokens = publish(prompt, session);
    test_session_close(session);
    return tokens;
}

/* ---- tests ------------------------------------------------------------------------------- */

/* Ten times what fits: every put is done, and what is there in the end is what came last. */
static void the_latest_stay(void **state)
{
    uint32_t n_whole = 0;
    bool is_older = false;

    (void)state;
    open_store(1, "lru", 0);
    for (uint32_t i = 0; i < N_PROMPTS; i++)
        assert_int_equal(use_prompt(0, i, true), TOKENS);
    for (uint32_t i = N_PROMPTS; i-- > 0;) {
        const uint32_t tokens = match(0, i);

        /* At most one of them is there in part, and none before it. */
        assert_true(!is_older || tokens == 0);
        is_older = is_older || tokens < TOKENS;
        n_whole += tokens == TOKENS;
    }
    print_message("%u of %d prompts are there; %.0f requests were sent again\n", n_whole,
                  N_PROMPTS, cluster_total(clients[0], "stats", "busy"));
    /* A page is free when all of its elements are, and prompts here are smaller than a page. */
    assert_in_range(n_whole, MEMORY_BYTES / PROMPT_BYTES / 4, MEMORY_BYTES / PROMPT_BYTES);
    /* Sessions need some memory, too: the oldest of these may go meanwhile. */
    for (uint32_t i = 0; i < n_whole / 2; i++)
        assert_int_equal(use_prompt(0, N_PROMPTS - 1 - i, false), TOKENS);
    assert_true(cluster_total(clients[0], "stats", "prefixes_evicted") > 0);
    close_store();
    assert_true(readers[0].n_told == N_PROMPTS * BLOCKS &&
                readers[0].n_with_tokens == readers[0].n_told / 2);
}

/* One prompt is asked for again and again, and stays. */
static void what_is_used_stays(void **state)
{
    (void)state;
    for (unsigned policy = 0; kvs_eviction_at(policy) != NULL; policy++) {
        open_store(1, kvs_eviction_at(policy)->name, 0);
        assert_int_equal(use_prompt(0, 0, true), TOKENS);
        for (uint32_t i = 1; i < N_PROMPTS / 3; i++) {
            assert_int_equal(use_prompt(0, i, true), TOKENS);
            if (i % 4 != 0)
                continue;
            assert_int_equal(match(0, 0), TOKENS);
            assert_int_equal(use_prompt(0, 0, false), TOKENS);
        }
        assert_true(cluster_total(clients[0], "stats", "prefixes_evicted") > 0);
        close_store();
    }
}

/* Sessions that are open keep theirs.  When they have all of it, a put fails; when one of them
 * ends, its rows make room. */
static void sessions_keep_theirs(void **state)
{
    static struct kv_session *sessions[N_PROMPTS];
    kv_status_t status = KV_OK;
    uint32_t tokens, n = 0;

    (void)state;
    open_store(1, NULL, 0);
    for (; status == KV_OK && n < N_PROMPTS; n++) {
        sessions[n] = open_prompt(0, n, &tokens);
        assert_int_equal(tokens, 0);
        status = try_put(0, n, sessions[n], 0);
        if (status == KV_OK)
            assert_int_equal(publish(n, sessions[n]), TOKENS);
    }
    assert_int_equal(status, KV_NO_MEMORY);
    assert_in_range(n, 4, MEMORY_BYTES / PROMPT_BYTES + 1);
    for (uint32_t i = 0; i + 1 < n; i++)
        expect_rows(0, i, sessions[i]);
    test_session_close(sessions[0]);
    test_session_close(sessions[1]);
    assert_int_equal(try_put(0, n - 1, sessions[n - 1], 0), KV_OK);
    for (uint32_t i = 2; i < n; i++) {
        expect_rows(0, i, sessions[i]);
        test_session_close(sessions[i]);
    }
    close_store();
}

/* A tenant that stores ten times the memory leaves another one its own. */
static void tenants_keep_their_share(void **state)
{
    (void)state;
    open_store(1, NULL, 0);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(use_prompt(1, i, true), TOKENS);
    for (uint32_t i = 0; i < N_PROMPTS; i++)
        assert_int_equal(use_prompt(0, i, true), TOKENS);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(match(1, i), TOKENS);
        assert_int_equal(use_prompt(1, i, false), TOKENS);
    }
    close_store();
}

/* Beyond its quota a tenant's own oldest go, and nothing of another's; while a session has them,
 * they stay, and fewer blocks are kept. */
static void tenants_have_a_quota(void **state)
{
    struct kv_session *session;
    uint32_t tokens;

    (void)state;
    open_store(1, NULL, 2 * PROMPT_BYTES);
    assert_int_equal(use_prompt(1, 0, true), TOKENS);
    assert_int_equal(use_prompt(1, 1, true), TOKENS);
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(use_prompt(0, i, true), TOKENS);
        assert_int_equal(match(0, i), TOKENS);
        if (i > 0)
            assert_int_equal(match(0, i - 1), TOKENS);
        if (i > 1)
            assert_int_equal(match(0, i - 2), 0);
    }
    assert_int_equal(match(1, 0), TOKENS);
    assert_int_equal(match(1, 1), TOKENS);
    assert_true(cluster_total(clients[0], "stats", "prefixes_over_quota") == 3 * BLOCKS);

    session = open_prompt(0, 4, &tokens);
    assert_int_equal(tokens, TOKENS);
    /* Not what the session has: so one prompt of the two. */
    assert_int_equal(use_prompt(0, 5, true), TOKENS);
    assert_int_equal(use_prompt(0, 6, true), TOKENS);
    assert_int_equal(match(0, 4), TOKENS);
    test_session_close(session);
    close_store();

    open_store(1, NULL, 2 * BLOCK_BYTES + 1000);
    assert_int_equal(use_prompt(0, 0, true), 2 * KV_BLOCK_TOKENS);
    assert_int_equal(match(0, 0), 2 * KV_BLOCK_TOKENS);
    assert_true(cluster_total(clients[0], "stats", "prefixes_refused") == 1);
    close_store();
}

/* A quota smaller than a block keeps nothing, and costs nobody anything: prompts that are published
 * are used all the same. */
static void a_quota_below_one_block(void **state)
{
    (void)state;
    for (uint64_t quota = BLOCK_BYTES; quota >= BLOCK_BYTES - 1; quota--) {
        const uint32_t n_kept = quota == BLOCK_BYTES;

        open_store(1, NULL, quota);
        for (uint32_t i = 0; i < 3; i++) {
            assert_int_equal(use_prompt(i % TENANTS, i, true), n_kept * KV_BLOCK_TOKENS);
            assert_int_equal(match(i % TENANTS, i), n_kept * KV_BLOCK_TOKENS);
        }
        assert_true(cluster_total(clients[0], "stats", "prefixes_refused") == 3);
        assert_true(cluster_total(clients[0], "stats", "prefixes_published") == 3 * n_kept);
        assert_true(cluster_total(clients[0], "stats", "prefixes_over_quota") == n_kept);
        assert_true(cluster_total(clients[0], "stats", "prefixes_evicted") == 0);
        close_store();
    }
}

/* ---- what clients say of prefixes -------------------------------------------------------- */

static uint64_t say(uint32_t tenant, struct kv_prefix prefix)
{
    struct kv_op *op;
    uint64_t blocks;

    assert_int_equal(kv_prefix_begin(clients[tenant], KV_NODES_ALL, &prefix, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("prefix: %s", kv_op_detail(op));
    blocks = kv_op_blocks(op);
    kv_op_free(op);
    return blocks;
}

static uint64_t
say_of(uint32_t tenant, enum kv_prefix_verb verb, uint32_t prompt, uint32_t block)
{
    return say(tenant, (struct kv_prefix){.verb = verb, .name = &names[prompt][block]});
}

/* Fills the memory with other prompts, twice. */
static void press(void)
{
    for (uint32_t i = 0; i < 2 * MEMORY_BYTES / PROMPT_BYTES; i++)
        (void)use_prompt(0, N_PROMPTS - 1 - i, true);
}

/* A prefix that is pinned stays, with those before it; those behind it go. */
static void pinned_stays(void **state)
{
    struct kv_session *session;
    struct kv_ticket ticket;
    uint32_t tokens;

    (void)state;
    open_store(2, NULL, 0);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(use_prompt(0, i, true), TOKENS);
    assert_int_equal(say_of(0, KV_PREFIX_PIN, 0, 3), 1);
    assert_int_equal(say_of(0, KV_PREFIX_PIN, 1, BLOCKS - 1), 1);
    assert_int_equal(say_of(1, KV_PREFIX_PIN, 2, 0), 0); /* another tenant's */
    assert_int_equal(say_of(0, KV_PREFIX_PIN, N_PROMPTS - 1, 0), 0);
    session = open_prompt(0, 3, &tokens);
    kv_session_ticket(session, &ticket);
    assert_int_equal(
        say(0, (struct kv_prefix){.verb = KV_PREFIX_PIN, .session_id = &ticket.session_id}), 1);
    assert_int_equal(
        say(1, (struct kv_prefix){.verb = KV_PREFIX_PIN, .session_id = &ticket.session_id}), 0);
    test_session_close(session);
    press();
    press();
    assert_int_equal(match(0, 0), 4 * KV_BLOCK_TOKENS);
    assert_int_equal(match(0, 1), TOKENS);
    assert_int_equal(match(0, 2), 0);
    assert_int_equal(match(0, 3), TOKENS);
    assert_int_equal(use_prompt(0, 1, false), TOKENS);

    assert_int_equal(say_of(0, KV_PREFIX_UNPIN, 0, 3), 1);
    assert_int_equal(say(0, (struct kv_prefix){.verb = KV_PREFIX_PIN,
                                               .name = &names[1][BLOCKS - 1],
                                               .for_ms = 1}),
                     1);
    press();
    press();
    assert_int_equal(match(0, 0), 0);
    assert_int_equal(match(0, 1), 0);
    assert_int_equal(match(0, 3), TOKENS);
    close_store();
}

/* A fork has the prefix that it shares, also when its parent has ended; what the parent alone had
 * goes. */
static void forks_keep_theirs(void **state)
{
    const uint32_t n_shared = 4;
    struct kv_session *parent, *fork;
    uint32_t tokens;
    struct kv_op *op;

    (void)state;
    open_store(2, NULL, 0);
    parent = open_prompt(0, 0, &tokens);
    assert_int_equal(try_put(0, 0, parent, 0), KV_OK);
    assert_int_equal(publish(0, parent), TOKENS);
    assert_int_equal(kv_fork_begin(parent, n_shared * KV_BLOCK_TOKENS, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("fork: %s", kv_op_detail(op));
    fork = kv_op_session(op);
    kv_op_free(op);
    test_session_close(parent);
    press();
    press();
    assert_int_equal(match(0, 0), n_shared * KV_BLOCK_TOKENS);
    test_session_close(fork);
    press();
    press();
    assert_int_equal(match(0, 0), 0);
    close_store();
}

/* What is evicted goes with what is behind it, on all nodes; a session that has it keeps it. */
static void evicted_goes(void **state)
{
    struct kv_session *session;
    struct kv_ticket ticket;
    uint32_t tokens;

    (void)state;
    open_store(2, NULL, 0);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(use_prompt(0, i, true), TOKENS);
    session = open_prompt(0, 0, &tokens);
    assert_int_equal(tokens, TOKENS);
    assert_int_equal(say_of(0, KV_PREFIX_PIN, 0, 4), 1);
    assert_int_equal(say_of(1, KV_PREFIX_EVICT, 0, 2), 0);
    assert_int_equal(say_of(0, KV_PREFIX_EVICT, 0, 2), BLOCKS - 2);
    assert_int_equal(match(0, 0), 2 * KV_BLOCK_TOKENS);
    assert_int_equal(match(0, 1), TOKENS);
    expect_rows(0, 0, session);
    /* By its session, which publishes it again. */
    assert_int_equal(publish(0, session), TOKENS);
    assert_int_equal(match(0, 0), TOKENS);
    kv_session_ticket(session, &ticket);
    assert_int_equal(say(0, (struct kv_prefix){.verb = KV_PREFIX_EVICT,
                                               .name = &names[0][1],
                                               .session_id = &ticket.session_id}),
                     BLOCKS - 1);
    assert_int_equal(match(0, 0), KV_BLOCK_TOKENS);
    assert_int_equal(say(0, (struct kv_prefix){.verb = KV_PREFIX_EVICT,
                                               .name = &names[1][0],
                                               .session_id = &ticket.session_id}),
                     0);
    test_session_close(session);
    assert_true(cluster_total(clients[0], "stats", "prefixes_deleted") == 2 * (2 * BLOCKS - 3));
    close_store();
}

/* What will be used soon stays longer than what was used later than it. */
static void hinted_stays(void **state)
{
    struct kv_op *op;

    (void)state;
    open_store(1, "lru", 0);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(use_prompt(0, i, true), TOKENS);
    assert_int_equal(say(0, (struct kv_prefix){.verb = KV_PREFIX_HINT,
                                               .name = &names[0][BLOCKS - 1],
                                               .for_ms = 600000}),
                     1);
    assert_int_equal(kv_prefix_begin(clients[0], 0,
                                     &(struct kv_prefix){.verb = KV_PREFIX_HINT,
                                                         .name = &names[0][0],
                                                         .for_ms = KV_PREFIX_HINT_MAX_MS + 1},
                                     0, &op),
                     KV_INVALID);
    assert_int_equal(
        kv_prefix_begin(clients[0], 0, &(struct kv_prefix){.verb = KV_PREFIX_PIN}, 0, &op),
        KV_INVALID);
    press();
    assert_int_equal(match(0, 0), TOKENS);
    assert_int_equal(match(0, 1), 0);
    close_store();
}

/* ---- what became of the tokens that sessions asked for ------------------------------------- */

static const char *const reuse_columns[] = {
    "asked", "matched", "missed_new", "missed_evicted", "missed_elsewhere", "matched_on_disk"};

enum {
    N_REUSE = sizeof(reuse_columns) / sizeof(reuse_columns[0]),
};

/* Of the nodes' metrics: the value of the line that begins so, summed over the nodes. */
static double metric(const char *line)
{
    double sum = 0;

    for (uint32_t i = 0; i < cluster.n_nodes; i++) {
        char *text = NULL;
        size_t bytes = 0;
        FILE *out = open_memstream(&text, &bytes);
        const char *at;

        assert_non_null(out);
        kvs_node_metrics(cluster.nodes[i], out);
        fclose(out);
        at = strstr(text, line);
        if (at != NULL)
            sum += strtod(at + strlen(line), NULL);
        free(text);
    }
    return sum;
}

/* Blocks, on all nodes, by the table; the metric says the same. */
static void count_reuse(uint32_t tenant, double ret_blocks[N_REUSE])
{
    memset(ret_blocks, 0, N_REUSE * sizeof(ret_blocks[0]));
    for (uint32_t node = 0; node < cluster.n_nodes; node++) {
        const struct kv_table *table;
        struct kv_op *op;

        assert_int_equal(kv_table_begin(clients[0], node, "reuse", 0, &op), KV_OK);
        assert_int_equal(kv_wait(op), KV_OK);
        table = kv_op_table(op);
        assert_int_equal(table->n_columns, 1 + N_REUSE);
        for (uint32_t i = 0; i < table->n_rows; i++)
            for (uint32_t j = 0; j < N_REUSE; j++)
                if (table->cells[i * table->n_columns].number == tenant)
                    ret_blocks[j] +=
                        table->cells[i * table->n_columns + 1 + j].number / KV_BLOCK_TOKENS;
        kv_op_free(op);
    }
    for (uint32_t j = 0; j < N_REUSE; j++) {
        char line[96];

        snprintf(line, sizeof(line), "topkv_reuse_tokens_total{tenant=\"%u\",what=\"%s\"} ",
                 tenant, reuse_columns[j]);
        assert_true(metric(line) == ret_blocks[j] * KV_BLOCK_TOKENS);
    }
}

static void
expect_reuse(uint32_t tenant, double asked, double matched, double is_new, double evicted)
{
    double blocks[N_REUSE];

    count_reuse(tenant, blocks);
    assert_true(blocks[0] == asked);
    assert_true(blocks[1] == matched);
    assert_true(blocks[2] == is_new);
    assert_true(blocks[3] == evicted);
    assert_true(blocks[4] == 0);
    assert_true(blocks[5] == 0);
}

/* A row of that block has another bit in the memory of the first node, and has been found so. */
static void spoil(uint32_t prompt, uint32_t block)
{
    struct kvs_node *node = cluster.nodes[0];
    struct kvs_prefix *prefix;
    size_t cursor = 0;

    kvs_node_stop(node);
    do
        prefix = kvs_prefixes_next(node->control.prefixes, &cursor);
    while (prefix != NULL &&
           memcmp(&prefix->name, &names[prompt][block], sizeof(prefix->name)) != 0);
    assert_non_null(prefix);
    kvs_block_rows(prefix->blocks[0], 0)[0] ^= 1;
    kvs_segment_mark_bad(&node->shard[prefix->first_thread].store, prefix->blocks[0], 0, 0);
    assert_int_equal(kvs_node_start(node, true), KV_OK);
}

/* What was missed was new, or has been evicted; an open that is repeated, since what it found has
 * rows that are known to be bad, counts once. */
static void missed_and_why(void **state)
{
    struct kv_session *session;
    uint32_t tokens;

    (void)state;
    open_store(2, NULL, 0);
    assert_int_equal(use_prompt(0, 0, true), TOKENS);
    expect_reuse(0, 2 * BLOCKS, 0, 2 * BLOCKS, 0);
    assert_int_equal(say_of(0, KV_PREFIX_EVICT, 0, 2), BLOCKS - 2);
    assert_int_equal(use_prompt(0, 0, true), TOKENS);
    expect_reuse(0, 4 * BLOCKS, 2 * 2, 2 * BLOCKS, 2 * (BLOCKS - 2));
    assert_int_equal(use_prompt(0, 0, true), TOKENS);
    expect_reuse(0, 6 * BLOCKS, 2 * 2 + 2 * BLOCKS, 2 * BLOCKS, 2 * (BLOCKS - 2));
    assert_int_equal(use_prompt(1, 0, false), 0);
    expect_reuse(1, 2 * BLOCKS, 0, 2 * BLOCKS, 0);
    expect_reuse(0, 6 * BLOCKS, 2 * 2 + 2 * BLOCKS, 2 * BLOCKS, 2 * (BLOCKS - 2));
    assert_true(metric("\ntopkv_prefixes_bad_total ") == 0);

    spoil(0, 3);
    session = open_prompt(0, 0, &tokens);
    assert_int_equal(tokens, 3 * KV_BLOCK_TOKENS);
    /* The other node has all of its part. */
    expect_reuse(0, 8 * BLOCKS, 2 * 2 + 3 * BLOCKS + 3, 2 * BLOCKS,
                 2 * (BLOCKS - 2) + BLOCKS - 3);
    assert_true(metric("\ntopkv_prefixes_bad_total ") == BLOCKS - 3);
    test_session_close(session);
    close_store();
}

/* A gauge is told now and then. */
static void expect_tokens_kept(uint32_t n_blocks)
{
    const uint64_t until_us = kv_client_now_us(clients[0]) + GAUGE_US;
    const double bytes = (double)n_blocks * KV_BLOCK_TOKENS * sizeof(uint32_t);

    while (metric("\ntopkv_prefix_tokens_bytes ") != bytes) {
        if (kv_client_now_us(clients[0]) > until_us)
            fail_msg("%g bytes, not %g", metric("\ntopkv_prefix_tokens_bytes "), bytes);
        (void)kv_client_wait(clients[0], 1000);
    }
}

/* What the tokens take that nodes keep for readers of events. */
static void tokens_are_counted(void **state)
{
    (void)state;
    open_store(2, NULL, 0);
    expect_tokens_kept(0);
    assert_int_equal(use_prompt(0, 0, true), TOKENS);
    assert_int_equal(use_prompt(0, 1, true), TOKENS); /* without tokens */
    expect_tokens_kept(2 * BLOCKS);
    assert_int_equal(use_prompt(0, 0, true), TOKENS); /* it is there already */
    assert_int_equal(use_prompt(0, 2, true), TOKENS);
    expect_tokens_kept(4 * BLOCKS);
    assert_int_equal(say_of(0, KV_PREFIX_EVICT, 0, 2), BLOCKS - 2);
    expect_tokens_kept(2 * BLOCKS + 4);
    assert_int_equal(say_of(0, KV_PREFIX_EVICT, 1, 0), BLOCKS);
    assert_int_equal(say_of(0, KV_PREFIX_EVICT, 2, 0), BLOCKS);
    expect_tokens_kept(4);
    close_store();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_latest_stay),      cmocka_unit_test(what_is_used_stays),
        cmocka_unit_test(sessions_keep_theirs), cmocka_unit_test(tenants_keep_their_share),
        cmocka_unit_test(tenants_have_a_quota), cmocka_unit_test(a_quota_below_one_block),
        cmocka_unit_test(pinned_stays),         cmocka_unit_test(forks_keep_theirs),
        cmocka_unit_test(evicted_goes),         cmocka_unit_test(hinted_stays),
        cmocka_unit_test(missed_and_why),       cmocka_unit_test(tokens_are_counted),
    };

    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("eviction", tests, NULL, NULL);
}
