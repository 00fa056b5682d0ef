/* device_rows.h: what its check finds; rows whose read has failed are read again. */
#define kv_read_begin          test_read_begin
#define kv_finish              test_finish
#define kv_buffer_alloc        test_buffer_alloc
#define kv_buffer_data         test_buffer_data
#define kv_buffer_free         test_buffer_free
#define kvw_session_flush      test_session_flush
#define kvw_session_fail       test_session_fail
#define kvw_session_handle     test_session_handle
#define kvw_session_count_read test_session_count_read
#include "gpu-worker/kvcache/device_rows.c" /* its insides are broken below, and it has no store */
#include "tests/support/dies.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <string.h>

enum broken {
    FULL_AND_WINDOWED,
    MORE_THAN_THERE_IS_ROOM_FOR,
    FULL_FROM_THE_MIDDLE,
    NO_WINDOW,
    MORE_THAN_THE_WINDOW,
    BEGINS_BEHIND_THE_END,
    N_BROKEN,
};

static void check_broken(void *arg)
{
    const enum broken *broken = arg;
    struct kvw_device_buffer **buffers = (struct kvw_device_buffer **)arg; /* any but NULL */
    struct kvw_device_rows rows = {
        .some = buffers,
        .shape.capacity = 1000,
        .sinks = 4,
        .window = 64,
        .n_tokens = 500,
        .begin = 500 - 64,
    };

    if (*broken == FULL_AND_WINDOWED)
        rows.all = buffers;
    else if (*broken == MORE_THAN_THERE_IS_ROOM_FOR)
        rows.shape.capacity = 499;
    else if (*broken == FULL_FROM_THE_MIDDLE)
        rows.all = buffers, rows.some = NULL;
    else if (*broken == NO_WINDOW)
        rows.window = 0;
    else if (*broken == MORE_THAN_THE_WINDOW)
        rows.begin--;
    else if (*broken == BEGINS_BEHIND_THE_END)
        rows.begin = rows.n_tokens + 1;
    kvw_device_rows_check(&rows);
}

static void check_finds(void **state)
{
    (void)state;
    assert_int_equal(first_not_found(check_broken, N_BROKEN), -1);
}

/* ---- a store that fails, or has rows of ones --------------------------------------------- */

static uint8_t landing[1 << 17];
static int some_op; /* an operation is its address */
static unsigned n_reads, n_to_fail;

kv_status_t test_read_begin(struct kv_session *session,
                            const struct kv_rows *rows,
                            const struct kv_rows_io *io,
                            uint32_t deadline_ms,
                            struct kv_op **ret_op)
{
    (void)session;
    (void)rows;
    (void)io;
    (void)deadline_ms;
    n_reads++;
    if (n_to_fail > 0 && --n_to_fail == 0)
        return KV_UNREACHABLE;
    *ret_op = (struct kv_op *)(void *)&some_op;
    return KV_OK;
}

kv_status_t test_finish(struct kv_op *op)
{
    assert_ptr_equal(op, &some_op);
    return KV_OK;
}

kv_status_t
test_buffer_alloc(struct kv_client *client, size_t bytes, struct kv_buffer **ret_buffer)
{
    (void)client;
    assert_true(bytes <= sizeof(landing));
    memset(landing, 1, sizeof(landing));
    *ret_buffer = NULL;
    return KV_OK;
}

void *test_buffer_data(const struct kv_buffer *buffer)
{
    (void)buffer;
    return landing;
}

kv_status_t test_buffer_free(struct kv_buffer *buffer)
{
    (void)buffer;
    return KV_OK;
}

kv_status_t test_session_flush(struct kvw_session *store)
{
    (void)store;
    return KV_OK;
}

kv_status_t test_session_fail(struct kvw_session *store, kv_status_t status)
{
    (void)store;
    return status;
}

struct kv_session *test_session_handle(const struct kvw_session *store)
{
    (void)store;
    return NULL;
}

void test_session_count_read(struct kvw_session *store, const struct kv_rows *rows)
{
    (void)store;
    (void)rows;
}

enum {
    LAYERS = 3,
    TOKENS = 40,
    SINKS = 2,
    WINDOW = 8,
};

/* Rows of a session with 40 tokens, none of them on the device yet. */
static void open_rows(struct kvw_device_rows *rows)
{
    const struct kvw_device_config config = {.n_threads = 1};
    char detail[128];

    *rows = (struct kvw_device_rows){
        .n_layers = LAYERS,
        .shape = {.n_q_heads = 1, .n_kv_heads = 1, .d = 8, .capacity = 64, .dtype = KV_FP16},
        .n_tokens = TOKENS,
        .is_read = true,
    };
    rows->row_bytes = kvw_rows_shape_row_bytes(&rows->shape);
    assert_int_equal(
        kvw_device_find("cpu")->open(&config, &rows->device, detail, sizeof(detail)), KV_OK);
    assert_int_equal(rows->device->ops->event_create(rows->device, &rows->landed), KV_OK);
    n_reads = n_to_fail = 0;
}

static void close_rows(struct kvw_device_rows *rows)
{
    struct kvw_device *device = rows->device;

    buffers_destroy(rows, rows->all);
    buffers_destroy(rows, rows->some);
    device->ops->event_destroy(rows->landed);
    device->ops->close(device);
}

/* The row of a token is there. */
static bool has_row(const struct kvw_device_rows *rows, uint32_t layer, size_t place)
{
    uint8_t row[64];

    kvw_device_read(rows->device, KVW_STREAM_COMPUTE,
                    rows->all != NULL ? rows->all[layer] : rows->some[layer],
                    place * rows->row_bytes, row, rows->row_bytes);
    assert_int_equal(rows->device->ops->sync(rows->device), KV_OK);
    return row[0] == 1 && row[rows->row_bytes - 1] == 1;
}

/* Whichever read fails, the next pass reads all of it again, and the one after that nothing. */
static void what_failed_is_read_again(void **state)
{
    struct kvw_device_rows rows;
    uint64_t waited_us = 0;

    (void)state;
    for (unsigned failing = 1; failing <= 2 * LAYERS; failing++) {
        open_rows(&rows);
        n_to_fail = failing;
        assert_int_equal(kvw_device_rows_windowed(&rows, SINKS, WINDOW, TOKENS, &waited_us),
                         KV_UNREACHABLE);
        n_reads = 0;
        assert_int_equal(kvw_device_rows_windowed(&rows, SINKS, WINDOW, TOKENS, &waited_us),
                         KV_OK);
        assert_int_equal(n_reads, 2 * LAYERS); /* sinks, and the window */
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            for (size_t place = 0; place < SINKS + WINDOW; place++)
                assert_true(has_row(&rows, layer, place));
        assert_int_equal(kvw_device_rows_windowed(&rows, SINKS, WINDOW, TOKENS, &waited_us),
                         KV_OK);
        assert_int_equal(n_reads, 2 * LAYERS);
        close_rows(&rows);
    }
    for (unsigned failing = 1; failing <= LAYERS; failing++) {
        open_rows(&rows);
        n_to_fail = failing;
        assert_int_equal(kvw_device_rows_full(&rows, TOKENS, &waited_us), KV_UNREACHABLE);
        n_reads = 0;
        if (failing % 2 == 0) { /* or in the other form */
            assert_int_equal(kvw_device_rows_windowed(&rows, SINKS, WINDOW, TOKENS, &waited_us),
                             KV_OK);
            assert_true(n_reads > 0 && has_row(&rows, LAYERS - 1, SINKS + WINDOW - 1));
        } else {
            assert_int_equal(kvw_device_rows_full(&rows, TOKENS, &waited_us), KV_OK);
            assert_true(n_reads > 0 && has_row(&rows, LAYERS - 1, TOKENS - 1));
        }
        close_rows(&rows);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(check_finds),
        cmocka_unit_test(what_failed_is_read_again),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
