/* Two nodes and several clients, over tcp: random operations against a model, and what is left
 * when a node is killed in the middle: the failures name it and come in time, all that lies on
 * the other node goes on, and the node is found again when it comes back. */
#include "tests/support/rows.h"
#include "tests/system/system.h"
#include "tests/system/traffic.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    N_OPS = 100000,
    N_CLIENTS = 2,
    TRAFFIC_MS = 1000 * 60 * 60, /* the time-out of ctest comes first */
    DEADLINE_MS = 4000,          /* of what needs a node that is down */
    TRAFFIC_DEADLINE_MS = 20000, /* of what needs any, while one is down now and then */
    N_TOKENS = 50,
};

static const char *const tcp_only[] = {"--transport", "tcp", NULL};
static uint64_t n_ops = N_OPS;
static const char *example_loop; /* its path; NULL: not given */

struct pair {
    struct process_node nodes[2];
    char addresses[160];
};

static void start_pair(struct pair *pair)
{
    memset(pair, 0, sizeof(*pair));
    for (unsigned i = 0; i < 2; i++)
        system_node_start(&pair->nodes[i], tcp_only);
    snprintf(pair->addresses, sizeof(pair->addresses), "%s,%s", pair->nodes[0].control,
             pair->nodes[1].control);
}

static void stop_pair(struct pair *pair)
{
    for (unsigned i = 0; i < 2; i++)
        system_node_stop(&pair->nodes[i]);
}

/* ---- traffic ----------------------------------------------------------------------------- */

struct report {
    unsigned long long ok, failed, sessions;
    unsigned long long in[2], out[2];
};

static void start_traffic(struct process *process,
                          const struct pair *pair,
                          unsigned seed,
                          uint64_t ops,
                          bool nodes_may_fail)
{
    char seed_text[16], ops_text[24];
    const char *const arguments[] = {pair->addresses, seed_text, ops_text,
                                     nodes_may_fail ? "may-fail" : "must-not-fail", NULL};

    snprintf(seed_text, sizeof(seed_text), "%u", seed);
    snprintf(ops_text, sizeof(ops_text), "%llu", (unsigned long long)ops);
    assert_true(process_start_self(process, "traffic", arguments));
}

static int traffic_child(int argc, char **argv)
{
    struct traffic_options options = {.transport = "tcp"};

    if (argc != 5 || strcmp(argv[0], "traffic") != 0)
        return 2;
    options.nodes = argv[1];
    options.seed = strtoull(argv[2], NULL, 10);
    options.n_ops = strtoull(argv[3], NULL, 10);
    options.nodes_may_fail = strcmp(argv[4], "may-fail") == 0;
    options.deadline_ms = options.nodes_may_fail ? TRAFFIC_DEADLINE_MS : SYSTEM_DEADLINE_MS;
    return traffic_run(&options);
}

/* The next of its reports.  false: it has ended. */
static bool next_report(struct process *process, struct report *report, unsigned timeout_ms)
{
    char line[PROCESS_LINE_BYTES];

    if (!process_read_line(process, line, timeout_ms))
        return false;
    return sscanf(line, "traffic ok=%llu failed=%llu sessions=%llu rows=%llu/%llu,%llu/%llu",
                  &report->ok, &report->failed, &report->sessions, &report->in[0],
                  &report->out[0], &report->in[1], &report->out[1]) == 7;
}

static void random_operations(void **state)
{
    struct process clients[N_CLIENTS];
    struct report report = {0};
    struct kv_client *client;
    struct pair pair;

    (void)state;
    start_pair(&pair);
    for (unsigned i = 0; i < N_CLIENTS; i++)
        start_traffic(&clients[i], &pair, i + 1, n_ops / N_CLIENTS, false);
    for (unsigned i = 0; i < N_CLIENTS; i++) {
        while (next_report(&clients[i], &report, TRAFFIC_MS))
            continue;
        assert_int_equal(process_wait(&clients[i], PROCESS_PATIENCE_MS), 0);
        assert_true(report.ok >= n_ops / N_CLIENTS);
        assert_int_equal(report.failed, 0);
        for (unsigned node = 0; node < 2; node++)
            assert_true(report.in[node] > 0 && report.out[node] > 0);
    }
    client = system_open(pair.addresses, "tcp");
    for (uint32_t node = 0; node < 2; node++) {
        double in = system_number(client, node, "stats", "rows_in");
        double out = system_number(client, node, "stats", "rows_out");

        print_message("node %u: %.0f rows in, %.0f rows out\n", node, in, out);
        assert_true(in > 0 && out > 0);
        assert_int_equal(system_number(client, node, "stats", "corrupt_rows"), 0);
        assert_int_equal(system_number(client, node, "stats", "bad_messages"), 0);
    }
    kv_client_close(client);
    stop_pair(&pair);
}

/* Reads reports until `wanted` has grown by that much. */
static void await(struct process *process,
                  struct report *report,
                  const unsigned long long *wanted,
                  unsigned long long more)
{
    unsigned long long least = *wanted + more;

    while (*wanted < least)
        assert_true(next_report(process, report, PROCESS_PATIENCE_MS));
}

static void traffic_through_a_kill(void **state)
{
    struct process client;
    struct report report = {0};
    struct pair pair;

    (void)state;
    start_pair(&pair);
    start_traffic(&client, &pair, 77, 0, true);
    await(&client, &report, &report.ok, 2000);
    assert_int_equal(report.failed, 0);

    process_kill(&pair.nodes[1].process);
    await(&client, &report, &report.failed, 1);
    await(&client, &report, &report.ok, 40); /* objects of the other node */

    system_node_start(&pair.nodes[1], tcp_only);
    await(&client, &report, &report.sessions, 4); /* these need both */
    await(&client, &report, &report.ok, 2000);
    close(client.in);
    client.in = -1;
    while (next_report(&client, &report, PROCESS_PATIENCE_MS))
        continue;
    assert_int_equal(process_wait(&client, PROCESS_PATIENCE_MS), 0);
    stop_pair(&pair);
}

/* ---- one step after the other ------------------------------------------------------------ */

/* A session whose one unit lies on that node. */
static struct kv_session *
session_on(struct kv_client *client, struct kv_buffer *buffer, uint32_t node)
{
    while (true) {
        struct kv_session *session = system_session(client, system_narrow_model(), 0);
        struct kv_node_info before, after;

        kv_client_node(client, node, &before);
        system_put(client, session, buffer, 0, N_TOKENS, node);
        kv_client_node(client, node, &after);
        if (after.rows_in > before.rows_in)
            return session;
        kv_session_free(session);
    }
}

/* A name whose object lies on that node. */
static void
object_on(struct kv_client *client, struct kv_buffer *buffer, uint32_t node, char name[32])
{
    struct kv_node_info before, after;
    static unsigned n;

    do {
        snprintf(name, 32, "two_nodes/%u", n++);
        kv_client_node(client, node, &before);
        test_fill(kv_buffer_data(buffer), 1000, 5);
        assert_int_equal(system_object(client, KV_OBJECT_PUT, name, buffer, 1000, 0), KV_OK);
        kv_client_node(client, node, &after);
    } while (after.requests == before.requests);
}

/* The failure says which node, what, after how long, and came in time. */
static void expect_failure(struct kv_op *op, const char *address, const char *what)
{
    kv_status_t status = kv_wait(op);
    const char *detail = kv_op_detail(op);
    char begin[120];

    snprintf(begin, sizeof(begin), "node %s: %s: %s: after ", address, what,
             kv_status_name(status));
    if (strncmp(detail, begin, strlen(begin)) != 0)
        fail_msg("not `%s...`: %s", begin, detail);
    assert_true(status == KV_UNREACHABLE || status == KV_DEADLINE);
    assert_true(kv_op_elapsed_us(op) <= (DEADLINE_MS + SYSTEM_SLACK_MS) * UINT64_C(1000));
    kv_op_free(op);
}

static void a_node_dies(void **state)
{
    enum {
        N_READS = 16
    };
    struct kv_rows box = {.n_layers = 1, .n_tokens = N_TOKENS};
    struct kv_session *here, *there;
    struct kv_op *reads[N_READS], *op;
    struct kv_rows_io io = {0};
    struct kv_client *client;
    struct kv_buffer *buffer;
    char near[32], far[32];
    struct kv_node_info info;
    struct kv_object object;
    const char *dead;
    struct pair pair;

    (void)state;
    start_pair(&pair);
    dead = pair.nodes[1].control;
    client = system_open(pair.addresses, "tcp");
    io.buffer = buffer = system_buffer(client, 1 << 20);
    here = session_on(client, buffer, 0);
    there = session_on(client, buffer, 1);
    object_on(client, buffer, 0, near);
    object_on(client, buffer, 1, far);

    /* Stopped first, so that the reads are under way when it dies. */
    assert_true(process_freeze(&pair.nodes[1].process));
    for (unsigned i = 0; i < N_READS; i++)
        assert_int_equal(kv_read_begin(there, &box, &io, DEADLINE_MS, &reads[i]), KV_OK);
    kv_poll(client);
    process_kill(&pair.nodes[1].process);
    for (unsigned i = 0; i < N_READS; i++)
        expect_failure(reads[i], dead, "read");

    /* What needs it says so again; what does not need it goes on. */
    assert_int_equal(kv_read_begin(there, &box, &io, DEADLINE_MS, &op), KV_OK);
    expect_failure(op, dead, "read");
    object = (struct kv_object){.name = far, .buffer = buffer, .bytes = 1000};
    assert_int_equal(kv_objects_begin(client, KV_OBJECT_GET, &object, 1, DEADLINE_MS, &op),
                     KV_OK);
    expect_failure(op, dead, "object_get");
    assert_int_equal(kv_open_begin(client, system_model(), NULL, DEADLINE_MS, &op), KV_OK);
    expect_failure(op, dead, "open");
    kv_client_node(client, 1, &info);
    assert_int_equal(info.state, KV_NODE_LOST);
    system_read(client, here, buffer, 0, N_TOKENS, 0);
    system_put(client, here, buffer, N_TOKENS, 1, 0);
    assert_int_equal(system_object(client, KV_OBJECT_GET, near, buffer, 1000, 0), KV_OK);
    assert_true(test_is_filled(kv_buffer_data(buffer), 1000, 5));

    /* Back on the same port, with nothing in memory. */
    system_node_start(&pair.nodes[1], tcp_only);
    assert_int_equal(system_object(client, KV_OBJECT_GET, far, buffer, 1000, 0), KV_NOT_FOUND);
    test_fill(kv_buffer_data(buffer), 1000, 6);
    assert_int_equal(system_object(client, KV_OBJECT_PUT, far, buffer, 1000, 0), KV_OK);
    kv_client_node(client, 1, &info);
    assert_int_equal(info.state, KV_NODE_CONNECTED);
    assert_int_equal(info.reconnects, 1);
    system_finish(client, kv_read_begin(there, &box, &io, 0, &op), &op, KV_NOT_FOUND);
    kv_session_free(there);
    there = session_on(client, buffer, 1);
    system_read(client, there, buffer, 0, N_TOKENS, 1);
    system_read(client, here, buffer, 0, N_TOKENS + 1, 0);
    kv_client_close(client);
    stop_pair(&pair);
}

/* A node that stands still during a fork: no old data is taken for new, and it catches up. */
static void a_fork_that_one_node_missed(void **state)
{
    struct kv_rows box = {.n_layers = 2, .n_tokens = 20};
    struct kv_session *session, *child, *resumed;
    struct kv_rows_io io = {0};
    struct kv_ticket ticket;
    struct kv_client *client, *other;
    struct kv_buffer *buffer, *theirs;
    uint32_t generation;
    struct kv_op *op;
    struct pair pair;

    (void)state;
    start_pair(&pair);
    client = system_open(pair.addresses, "tcp");
    other = system_open(pair.addresses, "tcp");
    io.buffer = buffer = system_buffer(client, 1 << 20);
    theirs = system_buffer(other, 1 << 20);
    session = system_session(client, system_model(), 0);
    system_put(client, session, buffer, 0, 40, 1);
    kv_session_ticket(session, &ticket);
    generation = kv_session_generation(session);
    assert_int_equal(kv_resume_begin(other, &ticket, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    resumed = kv_op_session(op);
    kv_op_free(op);
    system_read(other, resumed, theirs, 0, 40, 1);

    /* The fork reaches one node only, and so ends without an answer. */
    assert_true(process_freeze(&pair.nodes[1].process));
    assert_int_equal(kv_fork_begin(session, 30, DEADLINE_MS, &op), KV_OK);
    expect_failure(op, pair.nodes[1].control, "fork");
    process_thaw(&pair.nodes[1].process);

    /* The session goes on, on both nodes, whichever generation it is at now. */
    system_read(client, session, buffer, 0, 40, 1);
    system_put(client, session, buffer, 40, 10, 1);
    system_finish(client, kv_truncate_begin(session, 20, SYSTEM_DEADLINE_MS, &op), &op, KV_OK);
    system_put(client, session, buffer, 20, 20, 2);
    assert_true(kv_session_generation(session) > generation);

    /* Who has not heard of it is told so, and never gets or puts rows of before. */
    io.buffer = theirs;
    system_finish(other, kv_read_begin(resumed, &box, &io, 0, &op), &op, KV_STALE);
    box.token_begin = 40;
    box.n_tokens = 1;
    test_box(kv_buffer_data(theirs), kv_session_schema(resumed), &box, 3);
    system_finish(other, kv_append_begin(resumed, &box, &io, 0, &op), &op, KV_STALE);
    kv_session_free(resumed);
    assert_int_equal(kv_resume_begin(other, &ticket, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    assert_int_equal(kv_op_tokens(op), 40);
    resumed = kv_op_session(op);
    kv_op_free(op);
    system_read(other, resumed, theirs, 0, 20, 1);
    system_read(other, resumed, theirs, 20, 20, 2);

    /* And it can be forked again. */
    child = system_fork(client, session, 30);
    system_put(client, child, buffer, 30, 5, 4);
    system_read(client, child, buffer, 0, 20, 1);
    system_read(client, child, buffer, 20, 10, 2);
    system_read(client, child, buffer, 30, 5, 4);
    system_read(client, session, buffer, 20, 20, 2);
    kv_client_close(client);
    kv_client_close(other);
    stop_pair(&pair);
}

struct wait {
    uint64_t until_us;
};

static bool is_over(void *arg)
{
    return process_now_us() >= ((const struct wait *)arg)->until_us;
}

/* One thread and one epoll, with 64 operations under way: a node dies, and comes back; all goes on, and
 * no byte is wrong. */
static void a_loop_goes_on(void **state)
{
    static struct pair pair;
    const char *const argv[] = {example_loop, pair.addresses, "8", NULL};
    const struct process_spec spec = {.argv = argv};
    struct wait wait = {process_now_us() + 2000000};
    unsigned long n_compared, n_failed, n_opened;
    char line[PROCESS_LINE_BYTES];
    struct process process;

    (void)state;
    if (example_loop == NULL)
        skip();
    start_pair(&pair);
    assert_true(process_start(&process, &spec));
    assert_true(process_until(is_over, &wait, PROCESS_PATIENCE_MS));
    process_kill(&pair.nodes[1].process);
    system_node_start(&pair.nodes[1], tcp_only);
    assert_true(process_read_line(&process, line, PROCESS_PATIENCE_MS));
    assert_int_equal(process_wait(&process, PROCESS_PATIENCE_MS), 0);
    if (sscanf(line,
               "loop: %lu tokens put, read and compared; %lu operations failed; %lu sessions",
               &n_compared, &n_failed, &n_opened) != 3)
        fail_msg("%s", line);
    assert_true(n_compared > 64 && n_failed > 0 && n_opened >= 4);
    stop_pair(&pair);
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_operations),
        cmocka_unit_test(a_node_dies),
        cmocka_unit_test(a_fork_that_one_node_missed),
        cmocka_unit_test(traffic_through_a_kill),
        cmocka_unit_test(a_loop_goes_on),
    };

    if (argc > 1 && strcmp(argv[1], "--ops") != 0)
        example_loop = argv[1];
    if (argc > 2 && strcmp(argv[argc - 2], "--ops") == 0)
        n_ops = strtoull(argv[argc - 1], NULL, 10);
    return cmocka_run_group_tests_name("system.two_nodes", tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return system_main(argc, argv, work, traffic_child);
}
