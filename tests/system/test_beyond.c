/* A session has several times the rows that --memory has room for: it is put, read forwards, backwards and
 * here and there, forked, and all of it is there after kill -9. */
#include "kvserver/base/random.h"
#include "tests/support/rows.h"
#include "tests/system/system.h"

#include <stdlib.h>

enum {
    MEMORY = 16 << 20,
    TIMES = 4, /* the memory */
    TOKEN_BYTES = 2 * 2 * 128,
    TOKENS = TIMES * MEMORY / TOKEN_BYTES,
    BLOCKS = TOKENS / KV_BLOCK_TOKENS,
    CHUNK = 4096, /* tokens of an operation */
    CHUNKS = TOKENS / CHUNK,
    LOOKS = 64,
    SALT = 7,
};

static const char *const options[] = {"--threads", "1",  "--memory", "16M",
                                      "--disk",    "1G", NULL};

struct beyond {
    struct process_node node;
    struct kv_client *client;
    struct kv_buffer *buffer;
    struct kv_id128 names[BLOCKS];
    struct kv_random random;
};

static void begin_node(struct beyond *beyond)
{
    system_node_start(&beyond->node, options);
    beyond->client = system_open(beyond->node.control, "auto");
    beyond->buffer = system_buffer(beyond->client, CHUNK * TOKEN_BYTES);
}

static struct kv_session *open_prompt(const struct beyond *beyond, uint32_t *ret_tokens)
{
    const struct kv_session_options names = {.block_names = beyond->names,
                                             .n_block_names = BLOCKS};
    struct kv_session *session;
    struct kv_op *op;

    if (kv_open_begin(beyond->client, system_model(), &names, SYSTEM_DEADLINE_MS, &op) !=
            KV_OK ||
        kv_wait(op) != KV_OK)
        fail_msg("%s", kv_client_detail(beyond->client));
    *ret_tokens = kv_op_tokens(op);
    session = kv_op_session(op);
    kv_op_free(op);
    return session;
}

static void publish(const struct beyond *beyond, struct kv_session *session, uint32_t n_blocks)
{
    const struct kv_publish blocks = {.n_names = n_blocks, .names = beyond->names};
    struct kv_op *op;

    system_finish(beyond->client, kv_publish_begin(session, &blocks, SYSTEM_DEADLINE_MS, &op),
                  &op, KV_OK);
}

struct put {
    const struct beyond *beyond;
    struct kv_session *session;
    struct kv_rows rows;
};

/* Whether the rows fit: a disk that is slow may leave no room for a while. */
static bool is_put(void *arg)
{
    const struct put *put = arg;
    const struct kv_rows_io io = {.buffer = put->beyond->buffer};
    struct kv_op *op;
    kv_status_t status = kv_put_begin(put->session, &put->rows, &io, SYSTEM_DEADLINE_MS, &op);

    if (status == KV_OK)
        status = kv_finish(op);
    if (status != KV_OK && status != KV_NO_MEMORY)
        fail_msg("%s", kv_client_detail(put->beyond->client));
    return status == KV_OK;
}

static void put_chunk(const struct beyond *beyond,
                      struct kv_session *session,
                      uint32_t chunk,
                      uint64_t salt)
{
    struct put put = {
        .beyond = beyond,
        .session = session,
        .rows = {.n_layers = 2, .token_begin = chunk * CHUNK, .n_tokens = CHUNK},
    };

    test_box(kv_buffer_data(beyond->buffer), kv_session_schema(session), &put.rows, salt);
    assert_true(process_until(is_put, &put, PROCESS_PATIENCE_MS));
}

static void read_chunk(const struct beyond *beyond, struct kv_session *session, uint32_t chunk)
{
    system_read(beyond->client, session, beyond->buffer, chunk * CHUNK, CHUNK, SALT);
}

/* Rows that were used last are the first that are needed again, the last, and any. */
static void read_all(struct beyond *beyond, struct kv_session *session)
{
    for (uint32_t i = 0; i < CHUNKS; i++)
        read_chunk(beyond, session, i);
    for (uint32_t i = CHUNKS; i > 0; i--)
        read_chunk(beyond, session, i - 1);
    for (uint32_t i = 0; i < LOOKS; i++) {
        const uint32_t n = 1 + (uint32_t)kv_random_below(&beyond->random, CHUNK);

        system_read(beyond->client, session, beyond->buffer,
                    (uint32_t)kv_random_below(&beyond->random, TOKENS - n + 1), n, SALT);
    }
}

static void a_session_has_more_rows_than_memory(void **state)
{
    static struct beyond beyond;
    static uint32_t tokens[TOKENS];
    struct kv_session *session, *fork;
    struct kv_op *op;
    uint32_t n_there;

    (void)state;
    begin_node(&beyond);
    kv_random_init(&beyond.random, 1);
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = i;
    kv_prompt_names(beyond.client, system_model(), tokens, TOKENS, NULL, 0, beyond.names);

    session = open_prompt(&beyond, &n_there);
    assert_int_equal(n_there, 0);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        put_chunk(&beyond, session, i, SALT);
        publish(&beyond, session, (i + 1) * (CHUNK / KV_BLOCK_TOKENS));
    }
    read_all(&beyond, session);
    assert_true(system_number(beyond.client, 0, "stats", "rows_let_go_bytes") >
                (double)(TIMES - 1) * MEMORY);
    assert_true(system_number(beyond.client, 0, "stats", "disk_read_bytes") > (double)MEMORY);

    /* Both have all of it, and the fork rows of its own. */
    fork = system_fork(beyond.client, session, TOKENS - CHUNK);
    put_chunk(&beyond, fork, CHUNKS - 1, SALT + 1);
    read_chunk(&beyond, fork, 0);
    system_read(beyond.client, fork, beyond.buffer, TOKENS - CHUNK, CHUNK, SALT + 1);
    read_chunk(&beyond, session, CHUNKS - 1);

    if (kv_save_begin(session, SYSTEM_DEADLINE_MS, &op) != KV_OK || kv_wait(op) != KV_OK)
        fail_msg("%s", kv_client_detail(beyond.client));
    assert_int_equal(kv_op_tokens(op), TOKENS);
    kv_op_free(op);

    process_kill(&beyond.node.process);
    kv_session_free(fork);
    kv_session_free(session);
    kv_client_close(beyond.client);
    begin_node(&beyond);
    session = open_prompt(&beyond, &n_there);
    assert_int_equal(n_there, TOKENS);
    read_all(&beyond, session);
    kv_session_free(session);
    kv_client_close(beyond.client);
    system_node_stop(&beyond.node);
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_session_has_more_rows_than_memory),
    };

    (void)argv;
    return argc == 1 ? cmocka_run_group_tests_name("system.beyond", tests, NULL, NULL) : 2;
}

int main(int argc, char **argv)
{
    return system_main(argc, argv, work, NULL);
}
