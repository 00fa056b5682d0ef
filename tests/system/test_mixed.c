/* A node in odd conditions: more data threads than cores, nothing to do, standing still. */
#include "tests/system/system.h"

#include <stdio.h>
#include <string.h>

enum {
    N_TOKENS = 3000, /* of 512 bytes */
    BUFFER_BYTES = 2 << 20,
    IDLE_US = 2000000,
    IDLE_WINDOWS = 5,
    IDLE_PER_MILLE_MAX = 50, /* of one core; the aim is 20 */
    DEADLINE_MS = 1500,
};

static void more_threads_than_cores(void **state)
{
    const char *const options[] = {"--threads", "4", NULL};
    static const char *const transports[] = {"tcp", "shm"};
    struct process_node node = {0};

    (void)state;
    system_node_start(&node, options);
    assert_non_null(strstr(node.ready, " threads=4 "));
    for (unsigned i = 0; i < 2; i++) {
        struct kv_client *client = system_open(node.control, transports[i]);
        struct kv_buffer *buffer = system_buffer(client, BUFFER_BYTES);
        struct kv_session *session = system_session(client, system_model(), 0);

        system_put(client, session, buffer, 0, N_TOKENS, i);
        for (unsigned round = 0; round < 20; round++)
            system_read(client, session, buffer, round * 100, N_TOKENS - round * 100, i);
        kv_client_close(client);
    }
    system_node_stop(&node);
}

static bool is_past(void *arg)
{
    return process_now_us() > *(const uint64_t *)arg;
}

/* Connected clients that ask nothing cost nothing.  What a node still does after its start, and
 * what a machine under load adds, is gone in one of the windows. */
static void idle(void **state)
{
    struct process_node node = {0};
    struct kv_client *clients[3];
    uint64_t per_mille = UINT64_MAX;

    (void)state;
    system_node_start(&node, NULL);
    for (unsigned i = 0; i < 3; i++) {
        struct kv_session *session;
        struct kv_buffer *buffer;

        clients[i] = system_open(node.control, i == 0 ? "shm" : "tcp");
        buffer = system_buffer(clients[i], 1 << 20);
        session = system_session(clients[i], system_model(), 0);
        system_put(clients[i], session, buffer, 0, 10, i);
    }
    for (unsigned i = 0; i < IDLE_WINDOWS && per_mille > IDLE_PER_MILLE_MAX / 2; i++) {
        uint64_t begin_us = process_now_us(), until_us = begin_us + IDLE_US;
        uint64_t cpu_us = process_cpu_us(node.process.pid);
        uint64_t now;

        process_until(is_past, &until_us, PROCESS_PATIENCE_MS);
        cpu_us = process_cpu_us(node.process.pid) - cpu_us;
        now = cpu_us * 1000 / (process_now_us() - begin_us);
        per_mille = now < per_mille ? now : per_mille;
    }
    print_message("idle with 3 clients: %.1f %% of a core\n", (double)per_mille / 10);
    assert_true(per_mille <= IDLE_PER_MILLE_MAX);
    for (unsigned i = 0; i < 3; i++)
        kv_client_close(clients[i]);
    system_node_stop(&node);
}

/* All that is begun ends by its deadline and says which node; afterwards it works again. */
static void stands_still(const char *transport)
{
    struct kv_rows box = {.n_layers = 2, .n_tokens = 10};
    struct process_node node = {0};
    struct kv_rows_io io = {0};
    struct kv_session *session;
    struct kv_client *client;
    struct kv_op *ops[3];

    system_node_start(&node, NULL);
    client = system_open(node.control, transport);
    io.buffer = system_buffer(client, 1 << 20);
    session = system_session(client, system_model(), 0);
    system_put(client, session, io.buffer, 0, 10, 5);

    assert_true(process_freeze(&node.process));
    for (unsigned round = 0; round < 2; round++) {
        assert_int_equal(kv_read_begin(session, &box, &io, DEADLINE_MS, &ops[0]), KV_OK);
        assert_int_equal(kv_length_begin(session, DEADLINE_MS, &ops[1]), KV_OK);
        assert_int_equal(kv_ping_begin(client, 0, 0, 100, 100, DEADLINE_MS, &ops[2]), KV_OK);
        for (unsigned i = 0; i < 3; i++) {
            kv_status_t status = kv_wait(ops[i]);

            assert_true(status == KV_DEADLINE || status == KV_UNREACHABLE);
            if (strstr(kv_op_detail(ops[i]), node.control) == NULL)
                fail_msg("names no node: %s", kv_op_detail(ops[i]));
            assert_true(kv_op_elapsed_us(ops[i]) <=
                        (DEADLINE_MS + SYSTEM_SLACK_MS) * UINT64_C(1000));
            kv_op_free(ops[i]);
        }
    }
    process_thaw(&node.process);
    system_read(client, session, io.buffer, 0, 10, 5);
    system_put(client, session, io.buffer, 10, 10, 5);
    system_read(client, session, io.buffer, 0, 20, 5);
    kv_client_close(client);
    system_node_stop(&node);
}

static void stands_still_tcp(void **state)
{
    (void)state;
    stands_still("tcp");
}

static void stands_still_shm(void **state)
{
    (void)state;
    stands_still("shm");
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(more_threads_than_cores),
        cmocka_unit_test(idle),
        cmocka_unit_test(stands_still_tcp),
        cmocka_unit_test(stands_still_shm),
    };

    (void)argc;
    (void)argv;
    return cmocka_run_group_tests_name("system.mixed", tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return system_main(argc, argv, work, NULL);
}
