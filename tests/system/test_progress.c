/* A program that computes for long between its calls, with a thread of the library's own and
 * without one: with it, sessions outlive their leases' time, what was put arrives, deadlines
 * are kept whatever the node does, and nobody is kept busy.
 *
 *   test_system_progress KVSERVER
 */
#include "tests/system/system.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    LEASE_MS = 900,
    COMPUTE_MS = 4 * LEASE_MS, /* without a call */
    DEADLINE_MS = 500,
    N_PUTS = 16,
    PUT_TOKENS = 512,
    PUT_BYTES = PUT_TOKENS * 2 * 2 * 128,
    IDLE_MS = 2000,
    IDLE_CPU_US = 200000, /* of IDLE_MS, at most: 1 in 10 */
    N_LOSSES = 10,
};

static const char *const options[] = {"--lease-ms", "900", "--memory", "256M", NULL};

struct progress {
    struct process_node node;
    struct kv_client *client;
    struct kv_buffer *buffer;
    struct kv_session *session;
};

static void compute(unsigned ms)
{
    (void)poll(NULL, 0, (int)ms);
}

static void begin(struct progress *progress, const char *transport, bool has_thread)
{
    const struct kv_client_options open = {
        .transport = transport,
        .deadline_ms = SYSTEM_DEADLINE_MS,
        .peer_timeout_ms = SYSTEM_PEER_MS,
        .progress_thread = has_thread,
    };
    struct kv_client_options with_nodes = open;
    char detail[512];

    *progress = (struct progress){0};
    system_node_start(&progress->node, options);
    with_nodes.nodes = progress->node.control;
    if (kv_client_open(&with_nodes, &progress->client, detail, sizeof(detail)) != KV_OK)
        fail_msg("%s", detail);
    progress->buffer = system_buffer(progress->client, N_PUTS * PUT_BYTES);
    progress->session = system_session(progress->client, system_model(), LEASE_MS);
}

static void end(struct progress *progress)
{
    kv_client_close(progress->client);
    system_node_stop(&progress->node);
}

/* ---- a session whose caller computes ------------------------------------------------------ */

/* The lease is renewed while the caller computes, time and again; without a thread the
 * session ends. */
static void keep_lease(const char *transport)
{
    for (int has_thread = 0; has_thread < 2; has_thread++) {
        struct progress progress;
        struct kv_op *op;

        begin(&progress, transport, has_thread != 0);
        compute(COMPUTE_MS);
        system_finish(progress.client, kv_length_begin(progress.session, 0, &op), &op,
                      has_thread ? KV_OK : KV_NOT_FOUND);
        end(&progress);
    }
}

/* Puts end while the caller computes; without a thread, not all do. */
static void move_puts(const char *transport)
{
    for (int has_thread = 0; has_thread < 2; has_thread++) {
        struct kv_op *ops[N_PUTS];
        struct progress progress;
        unsigned n_ended = 0;

        begin(&progress, transport, has_thread != 0);
        for (unsigned i = 0; i < N_PUTS; i++) {
            const struct kv_rows rows = {
                .n_layers = 2, .token_begin = i * PUT_TOKENS, .n_tokens = PUT_TOKENS};
            const struct kv_rows_io io = {.buffer = progress.buffer,
                                          .offset = (size_t)i * PUT_BYTES};

            assert_int_equal(kv_put_begin(progress.session, &rows, &io, 0, &ops[i]), KV_OK);
        }
        compute(LEASE_MS / 2);
        if (has_thread) {
            const uint64_t until_us = process_now_us() + PROCESS_PATIENCE_MS * 1000u;

            while (kv_op_status(ops[N_PUTS - 1]) == KV_IN_PROGRESS &&
                   process_now_us() < until_us)
                compute(10);
        }
        for (unsigned i = 0; i < N_PUTS; i++)
            n_ended += kv_op_status(ops[i]) == KV_OK;
        if (has_thread)
            assert_int_equal(n_ended, N_PUTS);
        else
            assert_true(n_ended < N_PUTS);
        for (unsigned i = 0; i < N_PUTS; i++)
            assert_int_equal(kv_finish(ops[i]), KV_OK);
        end(&progress);
    }
}

/* A node that stands still does not keep a deadline from ending, nor the caller from a
 * cancel. */
static void keep_deadlines(const char *transport)
{
    struct progress progress;
    struct kv_op *op, *other;

    begin(&progress, transport, true);
    assert_true(process_freeze(&progress.node.process));
    assert_int_equal(kv_ping_begin(progress.client, 0, 0, 100, 100, DEADLINE_MS, &op), KV_OK);
    assert_int_equal(kv_ping_begin(progress.client, 0, 0, 100, 100, 0, &other), KV_OK);
    compute(6 * DEADLINE_MS);
    assert_int_equal(kv_op_status(op), KV_DEADLINE);
    assert_true(kv_op_elapsed_us(op) >= DEADLINE_MS * 1000u);
    assert_true(kv_op_elapsed_us(op) < 5 * DEADLINE_MS * 1000u);
    assert_non_null(strstr(kv_op_detail(op), "ping: deadline: after 0."));
    assert_int_equal(kv_op_status(other), KV_IN_PROGRESS);
    kv_cancel(other);
    assert_int_equal(kv_finish(other), KV_CANCELLED);
    assert_int_equal(kv_finish(op), KV_DEADLINE);
    process_thaw(&progress.node.process);
    end(&progress);
}

/* A node that is killed ends its operations while the caller computes; the next operation
 * finds the one that takes its place. */
static void lose_nodes(const char *transport)
{
    struct progress progress;

    begin(&progress, transport, true);
    for (unsigned i = 0; i < N_LOSSES; i++) {
        struct kv_op *op;
        uint64_t until_us;

        assert_int_equal(kv_ping_begin(progress.client, 0, 0, 100, 100, 0, &op), KV_OK);
        assert_true(kv_finish(op) == KV_OK);
        process_kill(&progress.node.process);
        assert_int_equal(kv_ping_begin(progress.client, 0, 0, 100, 100, 0, &op), KV_OK);
        until_us = process_now_us() + SYSTEM_DEADLINE_MS / 2 * 1000u;
        while (kv_op_status(op) == KV_IN_PROGRESS && process_now_us() < until_us)
            compute(1);
        assert_int_equal(kv_op_status(op), KV_UNREACHABLE);
        kv_op_free(op);
        system_node_start(&progress.node, options);
    }
    end(&progress);
}

/* ---- what it costs ------------------------------------------------------------------------ */

static uint64_t cpu_us(void)
{
    struct timespec used;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (uint64_t)used.tv_sec * 1000000 + (uint64_t)used.tv_nsec / 1000;
}

/* Neither a thread without work nor one whose caller waits is busy. */
static void stay_idle(const char *transport)
{
    struct progress progress;
    uint64_t begun_us;

    begin(&progress, transport, true);
    begun_us = cpu_us();
    compute(IDLE_MS);
    assert_true(cpu_us() - begun_us < IDLE_CPU_US);
    begun_us = cpu_us();
    assert_int_equal(kv_client_wait(progress.client, IDLE_MS * 1000u), 0);
    assert_true(cpu_us() - begun_us < IDLE_CPU_US);
    end(&progress);
}

#define OVER_BOTH(what)                  \
    static void what##_tcp(void **state) \
    {                                    \
        (void)state;                     \
        what("tcp");                     \
    }                                    \
    static void what##_shm(void **state) \
    {                                    \
        (void)state;                     \
        what("shm");                     \
    }

OVER_BOTH(keep_lease)
OVER_BOTH(move_puts)
OVER_BOTH(keep_deadlines)
OVER_BOTH(lose_nodes)
OVER_BOTH(stay_idle)

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keep_lease_tcp),     cmocka_unit_test(keep_lease_shm),
        cmocka_unit_test(move_puts_tcp),      cmocka_unit_test(move_puts_shm),
        cmocka_unit_test(keep_deadlines_tcp), cmocka_unit_test(keep_deadlines_shm),
        cmocka_unit_test(lose_nodes_tcp),     cmocka_unit_test(lose_nodes_shm),
        cmocka_unit_test(stay_idle_tcp),      cmocka_unit_test(stay_idle_shm),
    };

    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

static int child(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    return 2;
}

int main(int argc, char **argv)
{
    return system_main(argc, argv, work, child);
}
