/* test_saved_recorded.c - what earlier versions wrote to disk is read as what it was: prompts and
 * objects, all bytes of them.
 *
 *     test_conformance_saved_recorded FILE [--record]
 *
 * FILE has the keys and values of a disk, as recorded_messages.h writes messages: `from` is the
 * space of enum kv_disk_space, the header is the key.  --record writes it anew: only for a new
 * version of the format, and then to another file, beside the older ones.
 *
 * Embedded nodes, over the loopback, a disk in memory that outlasts them, and the real client
 * library.
 */
#include "tests/support/cluster.h"
#include "tests/support/numbered_prompts.h"
#include "tests/support/objects.h"
#include "tests/support/recorded_messages.h"
#include "tests/support/rows.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/thread.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

enum {
    N_THREADS = 2,
    N_LAYERS = 2,
    N_HEADS = 2,
    DIM = 16,
    ROW_BYTES = 2 * DIM * 2,
    BLOCKS = 2,
    TOKENS = BLOCKS * KV_BLOCK_TOKENS,
    PROMPTS = 2,
    OBJECTS = 3,
    BUFFER_BYTES = N_LAYERS * N_HEADS * TOKENS * ROW_BYTES,
};

static const char *path;
static struct cluster cluster;
static struct kv_client *client;
static struct kv_buffer *buffer;
static struct kv_model_info model;

static const struct recorded_box boxes[] = {
    {0, 0, 0, TOKENS, ROW_BYTES}, {0, 0, 1, TOKENS, ROW_BYTES}, {0, 1, 0, TOKENS, ROW_BYTES},
    {0, 1, 1, TOKENS, ROW_BYTES}, {1, 0, 0, TOKENS, ROW_BYTES}, {1, 0, 1, TOKENS, ROW_BYTES},
    {1, 1, 0, TOKENS, ROW_BYTES}, {1, 1, 1, TOKENS, ROW_BYTES}, {0},
};

static void connect_client(void)
{
    client = cluster_connect(&cluster, NULL);
    assert_int_equal(kv_buffer_alloc(client, BUFFER_BYTES, &buffer), KV_OK);
}

static void open_store(uint32_t n_threads)
{
    static const uint16_t heads[N_LAYERS] = {N_HEADS, N_HEADS};
    const struct cluster_setup setup = {.row = &kv_transport_loopback,
                                        .n_nodes = 1,
                                        .n_threads = n_threads,
                                        .memory_bytes = 64 << 20,
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

static struct test_prompts prompts(void)
{
    return (struct test_prompts){.client = client, .model = &model, .n_blocks = BLOCKS};
}

static size_t bytes_of(uint32_t number)
{
    static const size_t sizes[OBJECTS] = {0, 1, 500};

    return sizes[number];
}

static struct test_objects objects(void)
{
    return (struct test_objects){.client = client, .buffer = buffer, .bytes_of = bytes_of};
}

/* ---- rows --------------------------------------------------------------------------------- */

/* All rows of a prompt, in the order of a box that has all of them. */
static void make_rows(uint32_t prompt, uint8_t *to)
{
    for (uint32_t layer = 0; layer < N_LAYERS; layer++)
        for (uint32_t head = 0; head < N_HEADS; head++)
            for (uint32_t token = 0; token < TOKENS; token++, to += ROW_BYTES)
                recorded_row(to, ROW_BYTES, prompt, layer, head, token);
}

static const struct kv_rows all_rows = {.n_layers = N_LAYERS, .n_tokens = TOKENS};

static void put(uint32_t prompt, struct kv_session *session)
{
    const struct kv_rows_io io = {.buffer = buffer};
    struct kv_op *op;

    make_rows(prompt, kv_buffer_data(buffer));
    assert_int_equal(kv_put_begin(session, &all_rows, &io, 0, &op), KV_OK);
    test_finish(op, "put");
}

static void expect_rows(uint32_t prompt, struct kv_session *session)
{
    static uint8_t expected[BUFFER_BYTES];
    const struct kv_rows_io io = {.buffer = buffer};
    struct kv_op *op;

    make_rows(prompt, expected);
    memset(kv_buffer_data(buffer), 0, BUFFER_BYTES);
    assert_int_equal(kv_read_begin(session, &all_rows, &io, 0, &op), KV_OK);
    test_finish(op, "read");
    assert_memory_equal(kv_buffer_data(buffer), expected, BUFFER_BYTES);
}

/* ---- the disk ----------------------------------------------------------------------------- */

struct listing {
    struct recorded_messages *list;
    enum kv_disk_space space;
};

static void
list_value(void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    const struct listing *listing = arg;
    struct recorded_message *one = recorded_add(listing->list, key_bytes + value_bytes);

    one->from = listing->space;
    one->header_bytes = key_bytes;
    memcpy(one->data, key, key_bytes);
    if (value_bytes > 0)
        memcpy(one->data + key_bytes, value, value_bytes);
}

static void end_node(void)
{
    kv_client_close(client);
    cluster_end(&cluster, 0);
}

static void record(void **state)
{
    static const char *const head = "Keys and values of a node's disk, in the first version of "
                                    "its format: two prompts of two\n"
                                    "blocks, and three objects (test_saved_recorded.c).\n";
    struct recorded_messages list = {0};
    uint32_t tokens;

    (void)state;
    open_store(N_THREADS);
    const struct test_prompts all = prompts();
    const struct test_objects some = objects();
    for (uint32_t i = 0; i < PROMPTS; i++) {
        struct kv_session *session = test_prompt_open(&all, i, BLOCKS, &tokens);

        put(i, session);
        test_prompt_publish(&all, i, session);
        test_session_close(session);
    }
    for (uint32_t i = 0; i < OBJECTS; i++)
        assert_int_equal(test_object_put(&some, i, 0, 0, false), KV_OK);
    test_wait_disk(client, "blocks", PROMPTS * BLOCKS, PROMPTS * BLOCKS);
    test_wait_disk(client, "objects", OBJECTS, OBJECTS);
    end_node();
    for (int space = 0; space < KV_DISK_SPACES; space++) {
        struct listing listing = {&list, space};

        assert_int_equal(
            kv_disk_scan(cluster.disks[0], listing.space, "", 0, list_value, &listing), KV_OK);
    }
    assert_true(recorded_save(path, head, &list, boxes));
    recorded_free(&list);
    cluster_close(&cluster);
}

/* Gives the disk of the node, which has ended, what the file has. */
static void load_disk(void)
{
    struct kv_disk *disk = cluster.disks[0];
    struct recorded_messages list;
    struct kv_disk_queue *queue;

    assert_true(recorded_load(path, boxes, &list));
    assert_int_equal(disk->ops->queue_open(disk, NULL, NULL, &queue), KV_OK);
    for (size_t i = 0; i < list.n; i++) {
        const struct recorded_message *one = &list.messages[i];
        const struct kv_disk_write write = {.key = one->data,
                                            .key_bytes = one->header_bytes,
                                            .value = one->data + one->header_bytes,
                                            .value_bytes = one->bytes - one->header_bytes};

        assert_true(one->from < KV_DISK_SPACES);
        assert_int_equal(kv_disk_write(queue, one->from, &write, 1, NULL, NULL), KV_OK);
    }
    disk->ops->queue_close(queue);
    recorded_free(&list);
}

static void is_read_by(uint32_t n_threads)
{
    uint32_t tokens;

    open_store(n_threads);
    end_node();
    load_disk();
    cluster_start(&cluster, 0);
    connect_client();
    const struct test_prompts all = prompts();
    const struct test_objects some = objects();
    for (uint32_t i = 0; i < PROMPTS; i++) {
        struct kv_session *session = test_prompt_open(&all, i, BLOCKS, &tokens);

        assert_int_equal(tokens, TOKENS);
        expect_rows(i, session);
        test_session_close(session);
    }
    for (uint32_t i = 0; i < OBJECTS; i++)
        assert_int_equal(test_object_get(&some, i, 0), KV_OK);
    assert_int_equal(test_verify(client, 0).disk.bad, 0);
    close_store();
}

static void all_is_there(void **state)
{
    (void)state;
    is_read_by(N_THREADS);
}

static void other_threads_have_it(void **state)
{
    (void)state;
    is_read_by(1);
    is_read_by(N_THREADS + 1);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_is_there),
        cmocka_unit_test(other_threads_have_it),
    };
    const struct CMUnitTest records[] = {cmocka_unit_test(record)};

    if (argc < 2 || argc > 3 || (argc == 3 && strcmp(argv[2], "--record") != 0)) {
        fprintf(stderr, "usage: test_conformance_saved_recorded FILE [--record]\n");
        return 2;
    }
    path = argv[1];
    return argc == 3 ? cmocka_run_group_tests(records, NULL, NULL)
                     : cmocka_run_group_tests(tests, NULL, NULL);
}
