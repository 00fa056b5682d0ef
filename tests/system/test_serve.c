/* One node as a user meets it: the ready line, every kind of operation over tcp and over shared
 * memory, the page that watches it, what it listens on, and that it ends without a trace. */
#include "tests/support/rows.h"
#include "tests/system/system.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

enum {
    N_TOKENS = 300, /* more than two blocks */
    OBJECT_BYTES = 3 << 20,
};

/* ready control=HOST:PORT metrics=HOST:PORT transport=NAMES threads=N memory=SIZE
 * dir=PATH */
static void ready_line(void **state)
{
    struct process_node node = {0};
    char control[64], metrics[64], transports[128], memory[32], dir[PROCESS_PATH_BYTES];
    unsigned threads, port;
    int end = 0;

    (void)state;
    system_node_start(&node, NULL);
    assert_int_equal(sscanf(node.ready,
                            "ready control=%63s metrics=%63s transport=%127s threads=%u "
                            "memory=%31s dir=%511s%n",
                            control, metrics, transports, &threads, memory, dir, &end),
                     6);
    assert_int_equal(node.ready[end], 0);
    assert_int_equal(sscanf(control, "127.0.0.1:%u", &port), 1);
    assert_true(port > 0 && port < 65536);
    assert_int_equal(sscanf(metrics, "127.0.0.1:%u", &port), 1);
    assert_true(port > 0 && port < 65536);
    assert_int_equal(threads, 2);
    assert_string_equal(memory, "256M");
    assert_string_equal(dir, node.dir);
    assert_non_null(strstr(transports, "tcp/lo"));
    system_node_stop(&node);
}

static void fetch(struct kv_client *client,
                  struct kv_session *session,
                  struct kv_buffer *buffer,
                  uint64_t salt)
{
    static const uint32_t ids[] = {0, 299, 7, 7, 128, 127, 256};
    const uint32_t n_ids[] = {4, 3};
    struct kv_fetch wanted = {.layer = 1, .n_ids = n_ids, .ids = ids};
    uint32_t crcs[7], row_bytes = kv_session_schema(session)->layers[1].row_bytes;
    struct kv_rows_io io = {.buffer = buffer, .crcs = crcs};
    const uint8_t *row = kv_buffer_data(buffer);
    struct kv_op *op;

    system_finish(client, kv_fetch_begin(session, &wanted, &io, 0, &op), &op, KV_OK);
    for (unsigned i = 0; i < 7; i++, row += row_bytes) {
        uint32_t head = i < 4 ? 0 : 1;

        assert_true(test_is_row(row, row_bytes, salt, 1, head, ids[i]));
        assert_int_equal(crcs[i], kv_row_crc(session, row, row_bytes, 1, head, ids[i]));
    }
}

static void append(struct kv_client *client,
                   struct kv_session *session,
                   struct kv_buffer *buffer,
                   uint32_t token,
                   uint64_t salt)
{
    struct kv_rows box = {.n_layers = 2, .token_begin = token, .n_tokens = 1};
    struct kv_rows_io io = {.buffer = buffer};
    struct kv_op *op;

    test_box(kv_buffer_data(buffer), kv_session_schema(session), &box, salt);
    system_finish(client, kv_append_begin(session, &box, &io, 0, &op), &op, KV_OK);
}

static void objects(struct kv_client *client, struct kv_buffer *buffer, uint64_t salt)
{
    test_fill(kv_buffer_data(buffer), OBJECT_BYTES, salt);
    assert_int_equal(
        system_object(client, KV_OBJECT_PUT, "serve/object", buffer, OBJECT_BYTES, 0), KV_OK);
    memset(kv_buffer_data(buffer), 0, OBJECT_BYTES);
    assert_int_equal(
        system_object(client, KV_OBJECT_GET, "serve/object", buffer, OBJECT_BYTES, 0), KV_OK);
    assert_true(test_is_filled(kv_buffer_data(buffer), OBJECT_BYTES, salt));
    assert_int_equal(system_object(client, KV_OBJECT_EXISTS, "serve/object", NULL, 0, 0),
                     KV_OK);
    assert_int_equal(system_object(client, KV_OBJECT_DELETE, "serve/object", NULL, 0, 0),
                     KV_OK);
    assert_int_equal(system_object(client, KV_OBJECT_GET, "serve/object", buffer, 100, 0),
                     KV_NOT_FOUND);
}

static void every_operation(const char *transport, const char *in_use)
{
    struct process_node node = {0};
    struct kv_node_info info;
    struct kv_session *session, *child;
    struct kv_buffer *buffer;
    struct kv_client *client;
    struct kv_op *op;

    system_node_start(&node, NULL);
    client = system_open(node.control, transport);
    buffer = system_buffer(client, OBJECT_BYTES);
    kv_client_node(client, 0, &info);
    assert_non_null(strstr(info.transport, in_use));

    session = system_session(client, system_model(), 0);
    system_put(client, session, buffer, 0, N_TOKENS, 1);
    system_read(client, session, buffer, 0, N_TOKENS, 1);
    fetch(client, session, buffer, 1);
    append(client, session, buffer, N_TOKENS, 1);
    system_read(client, session, buffer, 0, N_TOKENS + 1, 1);

    child = system_fork(client, session, 200);
    append(client, child, buffer, 200, 2);
    append(client, session, buffer, N_TOKENS + 1, 1);
    system_read(client, child, buffer, 0, 200, 1);
    system_read(client, child, buffer, 200, 1, 2);
    system_finish(client, kv_truncate_begin(session, 128, 0, &op), &op, KV_OK);
    system_put(client, session, buffer, 128, 10, 4);
    system_read(client, session, buffer, 0, 128, 1);
    system_read(client, session, buffer, 128, 10, 4);
    assert_int_equal(system_n_rows(client, 0, "sessions"), 2);
    system_finish(client, kv_close_begin(child, 0, &op), &op, KV_OK);
    system_finish(client, kv_close_begin(session, 0, &op), &op, KV_OK);
    kv_session_free(child);
    kv_session_free(session);
    objects(client, buffer, 3);

    assert_true(system_number(client, 0, "stats", "rows_in") > 0);
    assert_true(system_number(client, 0, "stats", "rows_out") > 0);
    assert_int_equal(system_number(client, 0, "stats", "bad_messages"), 0);
    assert_int_equal(system_n_rows(client, 0, "sessions"), 0);
    assert_int_equal(system_n_rows(client, 0, "clients"), 1);
    kv_client_close(client);
    system_node_stop(&node);
}

static void over_tcp(void **state)
{
    (void)state;
    every_operation("tcp", "tcp");
}

static void over_shared_memory(void **state)
{
    (void)state;
    every_operation("shm", "memory");
}

/* ss -ltnp: nothing but loopback, and nothing that the ready line does not tell but the data
 * ports. */
static void listens_on_loopback_only(void **state)
{
    struct process_listener listeners[PROCESS_LISTENERS_MAX];
    struct process_node node = {0};
    struct kv_client *client;
    unsigned n, told = 0;

    (void)state;
    system_node_start(&node, NULL);
    client = system_open(node.control, "tcp");
    n = process_listeners(node.process.pid, listeners);
    assert_true(n >= 2);
    for (unsigned i = 0; i < n; i++) {
        char address[80];

        snprintf(address, sizeof(address), "%.63s:%u", listeners[i].host, listeners[i].port);
        if (!listeners[i].is_loopback)
            fail_msg("listens on %s", address);
        told += strcmp(address, node.control) == 0 || strcmp(address, node.metrics) == 0;
    }
    assert_int_equal(told, 2);
    kv_client_close(client);
    system_node_stop(&node);
}

static bool has_lines(const char *metrics, const char *const *lines)
{
    static char body[1 << 18];
    bool has = process_http_get(metrics, "/metrics", body, sizeof(body)) == 200;

    for (; has && *lines != NULL; lines++)
        has = strstr(body, *lines) != NULL;
    return has;
}

/* A request is counted when it ends, which may be after its reply has arrived. */
static bool counts_a_client(void *arg)
{
    return has_lines(arg, (const char *const[]){
                              "\ntopkv_clients 1\n",
                              "\ntopkv_errors_total{status=\"not_found\"} 1\n",
                              "\ntopkv_op_errors_total{op=\"object_exists\"} 1\n",
                              "\ntopkv_op_seconds_bucket{op=\"object_exists\",le=\"+Inf\"} 1\n",
                              "\ntopkv_op_seconds_count{op=\"object_exists\"} 1\n",
                              "\ntopkv_op_seconds_bucket{op=\"hello\",le=\"+Inf\"} 1\n",
                              "\ntopkv_op_seconds_count{op=\"hello\"} 1\n", NULL});
}

static bool counts_no_client(void *arg)
{
    return has_lines(arg, (const char *const[]){"\ntopkv_clients 0\n", NULL});
}

static void page(void **state)
{
    static char body[1 << 18];
    struct process_node node = {0};
    struct kv_object object = {.name = "none"};
    struct kv_client *client;
    struct kv_op *op;

    (void)state;
    system_node_start(&node, NULL);
    assert_int_equal(process_http_get(node.metrics, "/health", body, sizeof(body)), 200);
    assert_int_equal(process_http_get(node.metrics, "/ready", body, sizeof(body)), 200);
    assert_int_equal(process_http_get(node.metrics, "/nothing", NULL, 0), 404);
    assert_int_equal(process_http_get(node.metrics, "/metrics", body, sizeof(body)), 200);
    assert_non_null(strstr(body, "\ntopkv_memory_bytes 268435456\n"));
    assert_non_null(strstr(body, "\ntopkv_rows_in_total 0\n"));
    assert_non_null(strstr(body, "\ntopkv_index_seconds_total 0.000000\n"));
    assert_non_null(strstr(body, "# TYPE topkv_op_seconds histogram\n"));
    assert_non_null(strstr(body, "\ntopkv_op_seconds_bucket{op=\"hello\",le=\"+Inf\"} 0\n"));
    assert_non_null(strstr(body, "\ntopkv_op_seconds_count{op=\"hello\"} 0\n"));
    assert_non_null(strstr(body, "\ntopkv_errors_total{status=\"not_found\"} 0\n"));
    assert_non_null(strstr(body, "\ntopkv_errors_total{status=\"io\"} 0\n"));
    assert_null(strstr(body, "unknown\""));
    assert_non_null(strstr(body, "\ntopkv_clients 0\n"));

    client = system_open(node.control, "auto");
    assert_int_equal(kv_objects_begin(client, KV_OBJECT_EXISTS, &object, 1, 0, &op), KV_OK);
    assert_int_equal(kv_finish(op), KV_NOT_FOUND);
    assert_true(process_until(counts_a_client, node.metrics, PROCESS_PATIENCE_MS));
    kv_client_close(client);
    assert_true(process_until(counts_no_client, node.metrics, PROCESS_PATIENCE_MS));
    system_node_stop(&node);
}

/* What --print-config prints, --config reads to the same effect. */
static void print_config(void **state)
{
    const char *argv[] = {process_kvserver(), "--memory", "64M",      "--threads", "3",
                          "--name",           "a node",   "--config", NULL,        NULL};
    char path[PROCESS_PATH_BYTES];
    struct process_result first, second;
    FILE *file;

    (void)state;
    argv[7] = "--print-config";
    assert_true(process_run(&(struct process_spec){.argv = argv}, PROCESS_PATIENCE_MS, &first));
    assert_int_equal(first.status, 0);
    assert_string_equal(first.errors, "");
    assert_non_null(strstr(first.output, "64M"));

    process_path(path, "kvserver.conf");
    file = fopen(path, "w");
    assert_non_null(file);
    fputs(first.output, file);
    fclose(file);
    argv[1] = "--config";
    argv[2] = path;
    argv[3] = "--print-config";
    argv[4] = NULL;
    assert_true(
        process_run(&(struct process_spec){.argv = argv}, PROCESS_PATIENCE_MS, &second));
    assert_int_equal(second.status, 0);
    assert_string_equal(second.output, first.output);
}

static void list_ops(void **state)
{
    const char *const argv[] = {process_kvserver(), "--list-ops", NULL};
    struct process_result result;

    (void)state;
    assert_true(
        process_run(&(struct process_spec){.argv = argv}, PROCESS_PATIENCE_MS, &result));
    assert_int_equal(result.status, 0);
    assert_non_null(strstr(result.output, "fetch\tdata\t"));
    assert_non_null(strstr(result.output, "open\tcontrol\t"));
}

static bool is_locked(const char *dir)
{
    char path[PROCESS_PATH_BYTES + 8];
    bool locked;
    int fd;

    snprintf(path, sizeof(path), "%s/lock", dir);
    fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    locked = flock(fd, LOCK_EX | LOCK_NB) != 0;
    close(fd);
    return locked;
}

/* SIGTERM while clients are connected and one of them keeps it busy. */
static void ends_without_a_trace(void **state)
{
    struct process_shared shared;
    struct process_node node = {0};
    struct kv_client *tcp, *shm;
    struct kv_session *session;
    struct kv_buffer *buffer;
    kv_status_t status = KV_OK;
    struct kv_op *op;
    uint64_t until_us;

    (void)state;
    process_shared_look(&shared);
    system_node_start(&node, NULL);
    tcp = system_open(node.control, "tcp");
    shm = system_open(node.control, "shm");
    buffer = system_buffer(shm, 1 << 20);
    session = system_session(shm, system_model(), 0);
    system_put(shm, session, buffer, 0, 100, 1);
    assert_true(is_locked(node.dir));

    kill(node.process.pid, SIGTERM);
    /* Until it is gone, whatever it answers is true; then operations say that it is gone. */
    until_us = process_now_us() + PROCESS_PATIENCE_MS * UINT64_C(1000);
    while (status == KV_OK && process_now_us() < until_us) {
        struct kv_rows box = {.n_layers = 2, .n_tokens = 100};
        struct kv_rows_io io = {.buffer = buffer};

        memset(kv_buffer_data(buffer), 0, kv_buffer_bytes(buffer));
        status = kv_read_begin(session, &box, &io, SYSTEM_DEADLINE_MS, &op);
        if (status == KV_OK)
            status = kv_finish(op);
        if (status == KV_OK)
            assert_true(
                test_is_box(kv_buffer_data(buffer), kv_session_schema(session), &box, 1));
    }
    assert_int_equal(status, KV_UNREACHABLE);
    assert_int_equal(process_wait(&node.process, PROCESS_PATIENCE_MS), 0);
    assert_false(is_locked(node.dir));
    kv_client_close(tcp);
    kv_client_close(shm);
    assert_true(process_shared_settled(&shared));

    /* The same ports and the same folder, at once. */
    system_node_start(&node, NULL);
    system_node_stop(&node);
}

/* The operator's way to the same end. */
static void drains(void **state)
{
    struct process_node node = {0};
    struct kv_client *client;
    struct kv_op *op;

    (void)state;
    system_node_start(&node, NULL);
    client = system_open(node.control, "tcp");
    system_finish(client, kv_drain_begin(client, 0, 0, &op), &op, KV_OK);
    assert_int_equal(process_wait(&node.process, PROCESS_PATIENCE_MS), 0);
    kv_client_close(client);
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ready_line),
        cmocka_unit_test(over_tcp),
        cmocka_unit_test(over_shared_memory),
        cmocka_unit_test(listens_on_loopback_only),
        cmocka_unit_test(page),
        cmocka_unit_test(print_config),
        cmocka_unit_test(list_ops),
        cmocka_unit_test(ends_without_a_trace),
        cmocka_unit_test(drains),
    };

    (void)argc;
    (void)argv;
    return cmocka_run_group_tests_name("system.serve", tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return system_main(argc, argv, work, NULL);
}
