/* test_learnt.c - what was learnt of a prompt's keys outlasts the process, and is used only for the
 * same rows and the same plan.
 *
 * Embedded nodes with threads, over the loopback, a disk in memory that outlasts them, and the real
 * client library.
 */
#include "tests/support/cluster.h"
#include "tests/support/numbered_prompts.h"
#include "tests/support/objects.h"
#include "tests/support/rows.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/thread.h"
#include "kvserver/store/tier/saved_value.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_THREADS = 2,
    N_LAYERS = 2,
    N_HEADS = 2,
    N_UNITS = N_LAYERS * N_HEADS,
    DIM = 64,
    CHAPTER = 12, /* blocks */
    BLOCKS = 2 * CHAPTER,
    TOKENS = BLOCKS * KV_BLOCK_TOKENS,
    N_BOOKS = N_UNITS * BLOCKS / CHAPTER,
    BUFFER_BYTES = TOKENS * N_UNITS * 2 * DIM * 2,
    MEMORY_BYTES = 128 << 20,
    N_FILLERS = 3 * (MEMORY_BYTES / BUFFER_BYTES) / 2,
    K = 64,
};

static struct cluster cluster;
static struct kv_client *client;
static struct kv_buffer *buffer;
static struct kv_model_info model;
static uint64_t scrub_bytes; /* of the nodes of stores that are opened */

static const struct kv_index_options usual = {.tokens = TOKENS,
                                              .m = 16,
                                              .bits = 4,
                                              .chapter_blocks = CHAPTER,
                                              .rotates = true,
                                              .iterations = 5,
                                              .seed = 1,
                                              .wait = true};

static void connect_client(void)
{
    client = cluster_connect(&cluster, NULL);
    assert_int_equal(kv_buffer_alloc(client, BUFFER_BYTES, &buffer), KV_OK);
}

static void open_store(void)
{
    static const uint16_t heads[N_LAYERS] = {N_HEADS, N_HEADS};
    const struct cluster_setup setup = {.row = &kv_transport_loopback,
                                        .n_nodes = 1,
                                        .n_threads = N_THREADS,
                                        .memory_bytes = MEMORY_BYTES,
                                        .scrub_bytes = scrub_bytes,
                                        .disk_bytes = UINT64_MAX};

    assert_true(cluster_open(&cluster, &setup));
    test_model(&model, "model", N_LAYERS, heads, DIM, DIM);
    connect_client();
}

static void close_store(void)
{
    kv_client_close(client);
    cluster_close(&cluster);
}

static void restart(uint32_t n_threads)
{
    kv_client_close(client);
    cluster_end(&cluster, 0);
    cluster.setup.n_threads = n_threads;
    cluster_start(&cluster, 0);
    connect_client();
    cluster_look(&cluster);
}

static struct test_prompts prompts(void)
{
    return (struct test_prompts){.client = client, .model = &model, .n_blocks = BLOCKS};
}

/* A session with the prompt, of which the store is to have `expected` tokens. */
static struct kv_session *open_prompt(uint32_t prompt, uint32_t expected)
{
    const struct test_prompts all = prompts();
    uint32_t tokens;
    struct kv_session *session = test_prompt_open(&all, prompt, BLOCKS, &tokens);

    assert_int_equal(tokens, expected);
    return session;
}

/* Rows of finite numbers: 0.5 to 2, and minus these. */
static void put(uint32_t prompt, struct kv_session *session)
{
    const struct kv_rows rows = {.n_layers = N_LAYERS, .n_tokens = TOKENS};
    const struct kv_rows_io io = {.buffer = buffer};
    uint16_t *numbers = kv_buffer_data(buffer);
    struct kv_op *op;

    for (uint64_t i = 0; i < BUFFER_BYTES / sizeof(*numbers); i++)
        numbers[i] = (uint16_t)((kv_mix64(i + ((uint64_t)prompt << 32)) & 0x87ff) | 0x3800);
    assert_int_equal(kv_put_begin(session, &rows, &io, 0, &op), KV_OK);
    test_finish(op, "put");
}

static void publish(uint32_t prompt, struct kv_session *session)
{
    const struct test_prompts all = prompts();

    test_prompt_publish(&all, prompt, session);
}

static void save(struct kv_session *session)
{
    struct kv_op *op;

    assert_int_equal(kv_save_begin(session, 0, &op), KV_OK);
    test_finish(op, "save");
}

static void make_index(struct kv_session *session, const struct kv_index_options *index)
{
    struct kv_op *op;

    assert_int_equal(kv_index_begin(session, index, 0, &op), KV_OK);
    test_finish(op, "index");
}

/* What queries answer: (N_UNITS, K). */
static void answers(struct kv_session *session, uint32_t *ret_ids)
{
    const struct kv_range range = {0, TOKENS};
    float vectors[N_HEADS * DIM];
    struct kv_query query = {.n_queries = 1,
                             .queries = vectors,
                             .scale = 0.125f,
                             .merge = KV_MERGE_SUM,
                             .answer = KV_ANSWER_IDS,
                             .k = K,
                             .rerank = 1,
                             .n_ranges = 1,
                             .ranges = &range};

    for (uint32_t i = 0; i < N_HEADS * DIM; i++)
        vectors[i] = (float)(i * 37 % 11) - 5;
    for (query.layer = 0; query.layer < N_LAYERS; query.layer++) {
        struct kv_op *op;

        assert_int_equal(kv_query_begin(session, &query, NULL, 0, &op), KV_OK);
        if (kv_wait(op) != KV_OK)
            fail_msg("query: %s", kv_op_detail(op));
        for (uint32_t head = 0; head < N_HEADS; head++, ret_ids += K) {
            struct kv_query_result result;

            assert_int_equal(kv_op_query_result(op, head, &result), KV_OK);
            assert_int_equal(result.n_ids, K);
            memcpy(ret_ids, result.ids, K * sizeof(*ret_ids));
        }
        kv_op_free(op);
    }
}

/* The node has trained and recalled so many codebooks since it began. */
static void expect_books(uint32_t n_trained, uint32_t n_recalled)
{
    cluster_look(&cluster);
    assert_int_equal(cluster_total(client, "stats", "codebooks_trained"), n_trained);
    assert_int_equal(cluster_total(client, "stats", "codebooks_recalled"), n_recalled);
}

/* ---- what is on the disk ------------------------------------------------------------------ */

static uint32_t damages_one_in = 1;

struct values {
    uint32_t n[KVS_SAVED_KINDS];
    uint32_t n_bad_codes;
    int damaged; /* kind of those of which a bit is flipped; -1: none */
};

static bool are_bad(const struct kvs_saved_key *key, const void *value, size_t value_bytes)
{
    struct kvs_saved_column_tail tail;
    const size_t n_bytes = value_bytes - sizeof(tail);

    memcpy(&tail, (const uint8_t *)value + n_bytes, sizeof(tail));
    return kvs_saved_column_state(&tail, key, value, n_bytes) == KVS_SAVED_DAMAGED;
}

static void
look_at(void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    struct values *values = arg;
    const struct kvs_saved_key *saved = key;
    uint32_t kind;

    if (key_bytes != sizeof(*saved))
        return;
    kind = saved->bytes[2 * sizeof(struct kv_id128)];
    values->n[kind]++;
    values->n_bad_codes += kind == KVS_SAVED_CODES && are_bad(saved, value, value_bytes);
    /* Not in the tail: another version's is not damaged. */
    if ((int)kind == values->damaged && values->n[kind] % damages_one_in == 0)
        ((uint8_t *)value)[values->n[kind] * 977 %
                           (value_bytes - sizeof(struct kvs_saved_column_tail))] ^= 4;
}

static struct values look_at_disk(int damaged)
{
    struct values values = {.damaged = damaged};

    assert_int_equal(kv_disk_scan(cluster.disks[0], KV_DISK_ROWS, "", 0, look_at, &values),
                     KV_OK);
    return values;
}

/* Waits until what was learnt is on the disk, of so many chapters, and their codes. */
static void wait_written(uint32_t n)
{
    for (int i = 0;; i++) {
        /* The disk in memory is not to change meanwhile. */
        kvs_node_stop(cluster.nodes[0]);
        const struct values found = look_at_disk(-1);
        assert_int_equal(kvs_node_start(cluster.nodes[0], true), KV_OK);
        if (found.n[KVS_SAVED_LEARNT] == n && found.n[KVS_SAVED_CODES] == n * CHAPTER)
            return;
        if (i == 10000)
            fail_msg("%u of %u codebooks, and %u of %u codes, are on the disk",
                     found.n[KVS_SAVED_LEARNT], n, found.n[KVS_SAVED_CODES], n * CHAPTER);
        kv_client_wait(client, 1000);
    }
}

/* Puts a prompt that has been saved, and learnt of, in one order or the other. */
static void begin(uint32_t prompt, bool is_saved_first, uint32_t *ret_ids)
{
    struct kv_session *session = open_prompt(prompt, 0);

    put(prompt, session);
    if (!is_saved_first)
        make_index(session, &usual);
    publish(prompt, session);
    save(session);
    if (is_saved_first)
        make_index(session, &usual);
    answers(session, ret_ids);
    test_session_close(session);
    wait_written((prompt + 1) * N_BOOKS);
}

/* ---- tests -------------------------------------------------------------------------------- */

static uint32_t before[N_UNITS * K], after[N_UNITS * K];

/* The next process has the same answers, without learning; on whatever threads. */
static void nothing_is_learnt_twice(void **state)
{
    (void)state;
    for (int is_saved_first = 0; is_saved_first < 2; is_saved_first++)
        for (uint32_t n_threads = 1; n_threads < 4; n_threads++) {
            struct kv_session *session;

            open_store();
            begin(0, is_saved_first, before);
            expect_books(N_BOOKS, 0);
            restart(n_threads);
            session = open_prompt(0, TOKENS);
            make_index(session, &usual);
            expect_books(0, N_BOOKS);
            answers(session, after);
            assert_memory_equal(before, after, sizeof(before));
            test_session_close(session);
            close_store();
        }
}

/* Another plan is another matter. */
static void it_is_for_the_same_only(void **state)
{
    struct kv_index_options other = usual;
    struct kv_session *session;

    (void)state;
    open_store();
    begin(0, true, before);
    for (int kind = 0; kind < 5; kind++) {
        other = usual;
        other.seed += kind == 0;
        other.copies = kind == 1;
        other.m /= kind == 2 ? 2 : 1;
        other.rotates = kind != 3;
        other.chapter_blocks = kind == 4 ? BLOCKS : usual.chapter_blocks;
        restart(N_THREADS);
        session = open_prompt(0, TOKENS);
        make_index(session, &other);
        expect_books(kind == 4 ? N_UNITS : N_BOOKS, 0);
        test_session_close(session);
        /* What was learnt last stays in its place, and the rest beside it. */
        wait_written(N_BOOKS);
        restart(N_THREADS);
        session = open_prompt(0, TOKENS);
        make_index(session, &other);
        expect_books(0, kind == 4 ? N_UNITS : N_BOOKS);
        test_session_close(session);
    }
    /* Chapters are as they were made, and how much work that was does not matter. */
    other = usual;
    other.iterations++;
    restart(N_THREADS);
    session = open_prompt(0, TOKENS);
    make_index(session, &other);
    expect_books(0, N_UNITS);
    test_session_close(session);
    close_store();
}

/* What is damaged is learnt again, and written again. */
static void damage_is_learnt_again(void **state)
{
    struct kv_session *session;

    (void)state;
    open_store();
    begin(0, true, before);
    for (int round = 0; round < 8; round++) {
        kv_client_close(client);
        cluster_end(&cluster, 0);
        assert_int_equal(
            look_at_disk(round % 2 == 0 ? KVS_SAVED_LEARNT : -1).n[KVS_SAVED_LEARNT], N_BOOKS);
        cluster_start(&cluster, 0);
        connect_client();
        session = open_prompt(0, TOKENS);
        make_index(session, &usual);
        expect_books(round % 2 == 0 ? N_BOOKS : 0, round % 2 == 0 ? 0 : N_BOOKS);
        answers(session, after);
        assert_memory_equal(before, after, sizeof(before));
        test_session_close(session);
    }
    close_store();
}

static struct kv_disk_ops slow_ops;
static kv_status_t (*read_well)(struct kv_disk_queue *queue,
                                enum kv_disk_space space,
                                const void *key,
                                size_t key_bytes,
                                void *value,
                                size_t room,
                                kv_disk_done_fn done,
                                void *arg);
static enum kvs_saved_kind not_read;
static kv_status_t reads_end_with; /* KV_OK: never */

/* Values of a kind are not to be had. */
static kv_status_t read_not(struct kv_disk_queue *queue,
                            enum kv_disk_space space,
                            const void *key,
                            size_t key_bytes,
                            void *value,
                            size_t room,
                            kv_disk_done_fn done,
                            void *arg)
{
    const struct kvs_saved_key *saved = key;

    if (space == KV_DISK_ROWS && saved->bytes[2 * sizeof(struct kv_id128)] == not_read)
        return reads_end_with;
    return read_well(queue, space, key, key_bytes, value, room, done, arg);
}

/* From now on, or until the store is closed. */
static void hide(enum kvs_saved_kind kind)
{
    not_read = kind;
    slow_ops = *cluster.disks[0]->ops;
    read_well = slow_ops.read;
    slow_ops.read = read_not;
    cluster.disks[0]->ops = &slow_ops;
}

/* A disk that refuses to read, or takes for ever, does not keep anybody from an index. */
static void a_disk_that_does_not_answer(void **state)
{
    struct kv_session *session;

    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        reads_end_with = kind == 0 ? KV_BUSY : KV_OK;
        open_store();
        begin(0, true, before);
        kv_client_close(client);
        cluster_end(&cluster, 0);
        hide(KVS_SAVED_LEARNT);
        cluster_start(&cluster, 0);
        connect_client();
        session = open_prompt(0, TOKENS);
        make_index(session, &usual);
        expect_books(N_BOOKS, 0);
        answers(session, after);
        assert_memory_equal(before, after, sizeof(before));
        test_session_close(session);
        close_store();
    }
}

/* The rows of so many tokens of each unit have been read to be encoded, and summarised. */
static void expect_made(uint32_t n_coded, uint32_t n_summarised)
{
    cluster_look(&cluster);
    assert_int_equal(cluster_total(client, "stats", "rows_coded"), N_UNITS * n_coded);
    assert_int_equal(cluster_total(client, "stats", "rows_summarised"), N_UNITS * n_summarised);
}

/* Waits until so many groups of summaries are on the disk. */
static void wait_summaries(uint32_t n)
{
    for (int i = 0;; i++) {
        kvs_node_stop(cluster.nodes[0]);
        const struct values found = look_at_disk(-1);
        assert_int_equal(kvs_node_start(cluster.nodes[0], true), KV_OK);
        if (found.n[KVS_SAVED_SUMMARIES] == n)
            return;
        if (i == 10000)
            fail_msg("%u of %u summaries are on the disk", found.n[KVS_SAVED_SUMMARIES], n);
        kv_client_wait(client, 1000);
    }
}

/* The next process has codes and summaries while no row is to be had; then it has the same answers. */
static void codes_need_no_rows(void **state)
{
    const uint32_t n_groups = N_BOOKS * ((CHAPTER * KV_BLOCK_TOKENS + 1023) / 1024);
    struct kv_index_options index = usual;

    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        const bool is_saved_first = kind % 2 == 0;
        struct kv_session *session;

        index.summaries = kind < 2 ? 0 : 16;
        open_store();
        begin(0, is_saved_first, before);
        if (index.summaries > 0) {
            session = open_prompt(0, TOKENS);
            make_index(session, &index); /* only summaries are made */
            test_session_close(session);
            wait_summaries(n_groups);
        }
        kv_client_close(client);
        cluster_end(&cluster, 0);
        const struct kv_disk_ops *const well = cluster.disks[0]->ops;
        hide(KVS_SAVED_ROWS);
        reads_end_with = KV_OK;
        cluster_start(&cluster, 0);
        connect_client();
        session = open_prompt(0, TOKENS);
        make_index(session, &index);
        expect_books(0, N_BOOKS);
        expect_made(0, 0);
        test_session_close(session);
        kv_client_close(client);
        cluster_end(&cluster, 0);
        cluster.disks[0]->ops = well;
        cluster_start(&cluster, 0);
        connect_client();
        session = open_prompt(0, TOKENS);
        make_index(session, &index);
        answers(session, after);
        assert_memory_equal(before, after, sizeof(before));
        test_session_close(session);
        close_store();
    }
}

/* Codes that are damaged, or not all there, are made again, and kept again. */
static void damaged_codes_are_made_again(void **state)
{
    struct kv_session *session;

    (void)state;
    open_store();
    begin(0, true, before);
    for (int round = 0; round < 4; round++) {
        kv_client_close(client);
        cluster_end(&cluster, 0);
        const struct kv_disk_ops *const well = cluster.disks[0]->ops;
        /* Some of each chapter, or the first, too; then none, and rows are not to be had. */
        damages_one_in = round == 0 ? 5 : 1;
        (void)look_at_disk(round % 2 == 0 ? KVS_SAVED_CODES : -1);
        reads_end_with = KV_OK;
        if (round % 2 == 1)
            hide(KVS_SAVED_ROWS);
        cluster_start(&cluster, 0);
        connect_client();
        session = open_prompt(0, TOKENS);
        make_index(session, &usual);
        expect_books(0, N_BOOKS);
        expect_made(round % 2 == 0 ? TOKENS : 0, 0);
        if (round % 2 == 0) {
            answers(session, after);
            assert_memory_equal(before, after, sizeof(before));
        }
        test_session_close(session);
        wait_written(N_BOOKS);
        kv_client_close(client);
        cluster_end(&cluster, 0);
        cluster.disks[0]->ops = well;
        cluster_start(&cluster, 0);
        connect_client();
    }
    damages_one_in = 1;
    close_store();
}

/* What the disk has of a kind is damaged while the node stands still, or, with `ends`, is down. */
static uint32_t damage(enum kvs_saved_kind kind, bool ends)
{
    uint32_t n;

    if (ends) {
        kv_client_close(client);
        cluster_end(&cluster, 0);
    } else {
        kvs_node_stop(cluster.nodes[0]);
    }
    n = look_at_disk((int)kind).n[kind];
    if (ends) {
        cluster_start(&cluster, 0);
        connect_client();
    } else {
        assert_int_equal(kvs_node_start(cluster.nodes[0], true), KV_OK);
    }
    return n;
}

/* All that is on the disk is verified: so many columns that are bad, and no block. */
static void expect_bad_columns(uint32_t n)
{
    assert_int_equal(test_verify(client, 0).disk.bad, 0);
    cluster_look(&cluster);
    assert_int_equal(cluster_total(client, "stats", "bad_saved_columns"), n);
}

/* Puts prompts that have not been there, until all others have left memory. */
static void fill_memory(uint32_t first)
{
    for (uint32_t i = 0; i < N_FILLERS; i++) {
        struct kv_session *session = open_prompt(first + i, 0);

        put(first + i, session);
        publish(first + i, session);
        save(session);
        test_session_close(session);
    }
}

/* Codes that turn out damaged when their block comes back are made again, and written again although they
 * are the same. */
static void damaged_codes_are_written_again(void **state)
{
    struct kv_session *session;
    uint32_t n_mended = 0;

    (void)state;
    scrub_bytes = 1 << 30;
    open_store();
    scrub_bytes = 0;
    begin(0, true, before);
    fill_memory(1);
    (void)damage(KVS_SAVED_CODES, false);
    session = open_prompt(0, TOKENS);
    answers(session, after); /* of rows alone, but they have come back */
    for (int i = 0; n_mended < N_UNITS * BLOCKS; i++) {
        assert_true(i < 10000);
        kv_client_wait(client, 1000);
        cluster_look(&cluster);
        n_mended = (uint32_t)cluster_total(client, "stats", "mended_codes");
    }
    assert_int_equal(cluster_total(client, "stats", "bad_saved_columns"), N_UNITS * BLOCKS);
    answers(session, after);
    assert_memory_equal(before, after, sizeof(before));
    test_session_close(session);
    fill_memory(1 + N_FILLERS);
    kvs_node_stop(cluster.nodes[0]);
    assert_int_equal(look_at_disk(-1).n_bad_codes, 0);
    assert_int_equal(kvs_node_start(cluster.nodes[0], true), KV_OK);
    session = open_prompt(0, TOKENS);
    answers(session, after);
    assert_memory_equal(before, after, sizeof(before));
    test_session_close(session);
    close_store();
}

/* Verification finds codes, codebooks and summaries that are bad on disk: once, for they are written again
 * from memory, or go. */
static void verification_covers_columns(void **state)
{
    static const enum kvs_saved_kind kinds[] = {KVS_SAVED_CODES, KVS_SAVED_LEARNT,
                                                KVS_SAVED_SUMMARIES};
    const uint32_t n_groups = N_BOOKS * ((CHAPTER * KV_BLOCK_TOKENS + 1023) / 1024);
    struct kv_index_options index = usual;
    struct kv_session *session;
    uint32_t n_bad = 0;

    (void)state;
    index.summaries = 16;
    open_store();
    begin(0, true, before);
    session = open_prompt(0, TOKENS);
    make_index(session, &index);
    test_session_close(session);
    wait_summaries(n_groups);
    expect_bad_columns(0);
    for (unsigned i = 0; i < 3; i++) {
        n_bad += damage(kinds[i], false);
        expect_bad_columns(n_bad);
        wait_written(N_BOOKS);
        wait_summaries(n_groups);
        expect_bad_columns(n_bad);
    }
    restart(N_THREADS);
    session = open_prompt(0, TOKENS);
    make_index(session, &index);
    expect_books(0, N_BOOKS);
    expect_made(0, 0);
    answers(session, after);
    assert_memory_equal(before, after, sizeof(before));
    test_session_close(session);

    for (unsigned i = 0; i < 3; i++) {
        n_bad = damage(kinds[i], true);
        expect_bad_columns(n_bad);
        expect_bad_columns(n_bad);
        kvs_node_stop(cluster.nodes[0]);
        assert_int_equal(look_at_disk(-1).n[kinds[i]], 0);
        assert_int_equal(kvs_node_start(cluster.nodes[0], true), KV_OK);
        session = open_prompt(0, TOKENS);
        make_index(session, &index);
        answers(session, after);
        assert_memory_equal(before, after, sizeof(before));
        test_session_close(session);
        wait_written(N_BOOKS);
        wait_summaries(n_groups);
    }
    close_store();
}

/* Two sessions of a prompt are indexed, given up and closed at any moment, on nodes that are started again
 * and again: whoever waits for the index has the same answers. */
static void sessions_come_and_go(void **state)
{
    enum {
        ROUNDS = 24,
        N_SESSIONS = 2
    };
    struct kv_index_options index = usual;

    (void)state;
    open_store();
    begin(0, true, before);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        struct kv_session *sessions[N_SESSIONS];
        struct kv_op *ops[N_SESSIONS];
        const uint64_t dice = kv_mix64(round);

        restart(1 + round % 3);
        for (uint32_t i = 0; i < N_SESSIONS; i++) {
            sessions[i] = open_prompt(0, TOKENS);
            index.wait = (dice >> i & 1) != 0;
            index.tokens = (dice >> (2 + i) & 1) != 0 ? TOKENS : TOKENS / 2;
            assert_int_equal(kv_index_begin(sessions[i], &index, 0, &ops[i]), KV_OK);
        }
        for (uint64_t i = dice >> 8 & 15; i > 0; i--)
            kv_client_wait(client, 100);
        if ((dice >> 4 & 3) == 0)
            kv_cancel(ops[0]);
        (void)kv_wait(ops[0]);
        kv_op_free(ops[0]);
        test_session_close(sessions[0]);
        assert_int_equal(kv_wait(ops[1]), KV_OK);
        kv_op_free(ops[1]);
        if ((dice >> 6 & 1) != 0) {
            make_index(sessions[1], &usual);
            answers(sessions[1], after);
            assert_memory_equal(before, after, sizeof(before));
        }
        test_session_close(sessions[1]);
    }
    close_store();
}

static uint8_t old_codes[N_UNITS * BLOCKS][128 * (16 + 34)];

/* Copies the codes on the disk, or puts them back. */
static void
copy_codes(void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    const struct kvs_saved_key *saved = key;
    struct values *values = arg;
    uint8_t *old;

    if (key_bytes != sizeof(*saved) ||
        saved->bytes[2 * sizeof(struct kv_id128)] != KVS_SAVED_CODES)
        return;
    old = old_codes[values->n[KVS_SAVED_CODES]++];
    assert_true(value_bytes <= sizeof(old_codes[0]));
    if (values->damaged == KVS_SAVED_CODES)
        memcpy((uint8_t *)value, old, value_bytes);
    else
        memcpy(old, value, value_bytes);
}

/* Codes are taken only if they are of what was learnt last. */
static void old_codes_are_not_taken(void **state)
{
    struct kv_index_options other = usual;
    struct kv_session *session;

    (void)state;
    other.seed++;
    open_store();
    begin(0, true, before);
    for (int round = 0; round < 2; round++) {
        struct values values = {.damaged = round == 0 ? -1 : KVS_SAVED_CODES};

        kv_client_close(client);
        cluster_end(&cluster, 0);
        assert_int_equal(
            kv_disk_scan(cluster.disks[0], KV_DISK_ROWS, "", 0, copy_codes, &values), KV_OK);
        assert_int_equal(values.n[KVS_SAVED_CODES], N_UNITS * BLOCKS);
        cluster_start(&cluster, 0);
        connect_client();
        session = open_prompt(0, TOKENS);
        make_index(session, &other);
        expect_books(round == 0 ? N_BOOKS : 0, round == 0 ? 0 : N_BOOKS);
        expect_made(TOKENS, 0);
        answers(session, round == 0 ? before : after);
        test_session_close(session);
    }
    assert_memory_equal(before, after, sizeof(before));
    close_store();
}

/* What leaves the index takes what was learnt with it. */
static void it_is_erased_with_its_rows(void **state)
{
    struct values values;
    struct kv_prefix first = {.verb = KV_PREFIX_EVICT};
    struct kv_op *op;

    (void)state;
    open_store();
    const struct test_prompts all = prompts();
    first.name = test_prompt_names(&all, 1);
    begin(0, true, before);
    begin(1, false, before);
    values = look_at_disk(-1);
    assert_int_equal(values.n[KVS_SAVED_ROWS], 2 * N_UNITS * BLOCKS);
    assert_int_equal(kv_prefix_begin(client, KV_NODES_ALL, &first, 0, &op), KV_OK);
    test_finish(op, "evict");
    wait_written(N_BOOKS);
    for (int i = 0; values.n[KVS_SAVED_ROWS] > N_UNITS * BLOCKS; i++) {
        assert_true(i < 10000);
        kv_client_wait(client, 1000);
        kvs_node_stop(cluster.nodes[0]);
        values = look_at_disk(-1);
        assert_int_equal(kvs_node_start(cluster.nodes[0], true), KV_OK);
    }
    assert_int_equal(values.n[KVS_SAVED_ROWS], N_UNITS * BLOCKS);
    assert_int_equal(values.n[KVS_SAVED_CODES], N_UNITS * BLOCKS);
    assert_int_equal(values.n[KVS_SAVED_LEARNT], N_BOOKS);
    close_store();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_learnt_twice),
        cmocka_unit_test(it_is_for_the_same_only),
        cmocka_unit_test(damage_is_learnt_again),
        cmocka_unit_test(a_disk_that_does_not_answer),
        cmocka_unit_test(codes_need_no_rows),
        cmocka_unit_test(damaged_codes_are_made_again),
        cmocka_unit_test(damaged_codes_are_written_again),
        cmocka_unit_test(verification_covers_columns),
        cmocka_unit_test(sessions_come_and_go),
        cmocka_unit_test(old_codes_are_not_taken),
        cmocka_unit_test(it_is_erased_with_its_rows),
    };

    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
