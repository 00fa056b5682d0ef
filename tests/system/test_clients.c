/* Clients that die or behave badly: what they held comes back, the others do not feel them, and
 * the table of clients names them. */
#include "client/connection.h"
#include "tests/system/system.h"

#include "client/client.h" /* the inside: the library itself keeps to its credits */
#include "client/node.h"
#include "kvserver/net/message.h"
#include "tests/support/rows.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    N_KILLED = 100,
    N_KILLED_SHM = 20,
    N_KILLED_WRITING = 24,
    WRITE_BYTES = 4096, /* what goes into a shared queue in one piece takes its time */
    PUT_BYTES = 10 << 20,
    PUTS = 10,
    N_TOKENS = 2000,   /* of 512 bytes: a put of a megabyte */
    KILL_AFTER_MS = 8, /* at most, from the first put on */
    BURST = 512,
    PING_BYTES = 64 << 10,
    POLITE_READS = 200,
    /* "The others do not feel them".  Who is held up is so until the bad one ends, so that any
     * bound tells; this one a slow machine meets, too. */
    HELD_UP_US = 20000000,
    PEER_TIMEOUT_MS = HELD_UP_US / 1000,
    STUCK_READS = 60,
    N_WAITERS = 30,
    WAITING_READS = 54,
    WAITING_MOST = 1400, /* fewer than they may have under way: 48 each, of 64 credits */
    N_HANGING = 4,
    N_DRIPS = 100,
    BESIDE_US = 8000000,
    WAY_BACK_MS = 4000, /* silence after which a client connects again */
};
/* Of a node with 64M, which it touches ahead of use and in its own time, and something for the
 * libraries. */
#define RSS_GROWTH_KILLED (PROCESS_MEMORY_FACTOR * 12 << 20) /* by fifty dead clients */
#define RSS_GROWTH        ((64 + 48 * PROCESS_MEMORY_FACTOR) << 20)

static const char *const small[] = {"--memory", "64M", NULL};
static const char *const medium[] = {"--memory", "128M", NULL};
static const char *const short_lease[] = {"--lease-ms", "1000", "--memory", "128M", NULL};

/* ---- the children ------------------------------------------------------------------------ */

static void say(const char *word)
{
    puts(word);
    fflush(stdout);
}

/* Takes a slow node for a live one, unless the peer timeout is 0, which is the usual one. */
static struct kv_client *
open_named(const char *nodes, const char *transport, const char *name, uint32_t peer_timeout_ms)
{
    const struct kv_client_options options = {.nodes = nodes,
                                              .transport = transport,
                                              .name = name,
                                              .deadline_ms = SYSTEM_DEADLINE_MS,
                                              .peer_timeout_ms = peer_timeout_ms};
    struct kv_client *client;
    char detail[512];

    if (kv_client_open(&options, &client, detail, sizeof(detail)) == KV_OK)
        return client;
    process_complain("%s: %s", name, detail);
    exit(EXIT_FAILURE);
}

/* Puts ten megabytes and more, until it is killed. */
static int put_until_killed(struct kv_client *client)
{
    struct kv_buffer *buffer = system_buffer(client, PUT_BYTES);

    while (true) {
        struct kv_session *session = system_session(client, system_model(), 0);
        struct kv_op *ops[PUTS];

        for (uint32_t i = 0; i < PUTS; i++) {
            struct kv_rows box = {
                .n_layers = 2, .token_begin = i * N_TOKENS, .n_tokens = N_TOKENS};
            struct kv_rows_io io = {.buffer = buffer, .offset = i * (PUT_BYTES / PUTS)};

            if (kv_put_begin(session, &box, &io, 0, &ops[i]) != KV_OK)
                return EXIT_FAILURE;
        }
        say("putting");
        for (uint32_t i = 0; i < PUTS; i++)
            if (kv_finish(ops[i]) != KV_OK)
                return EXIT_FAILURE;
        kv_session_free(session);
    }
}

struct ping {
    struct kv_wire_header header;
    bool is_busy;
};

static void ping_sent(void *arg, kv_status_t status)
{
    struct ping *ping = arg;

    (void)status;
    ping->is_busy = false;
}

/* Sends past the library, far beyond the credits, until it is killed. */
static _Noreturn void flood(struct kv_client *client, size_t data_bytes)
{
    static uint8_t data[WRITE_BYTES];
    static struct ping pings[BURST];
    const struct kvc_node *remote = &client->nodes[0];
    struct kv_channel *channel = remote->connections[0].channel;
    uint64_t id = 0;

    while (true) {
        for (unsigned i = 0; i < BURST; i++) {
            struct ping *ping = &pings[i];

            if (ping->is_busy)
                continue;
            ping->header = (struct kv_wire_header){
                .kind = KV_WIRE_REQUEST,
                .op = KV_OP_PING,
                .request_id = ++id << 24,
                .client_index = remote->client_index,
                .client_token = remote->client_token,
                .deadline_us = 1000000,
                .token_count = PING_BYTES,
            };
            kv_message_seal(&ping->header, NULL, 0);
            ping->is_busy = kv_channel_send(channel, &ping->header, sizeof(ping->header), data,
                                            data_bytes, ping_sent, ping) == KV_IN_PROGRESS;
        }
        if (id == BURST)
            say("flooding");
        kv_poll(client);
    }
}

/* Asks for much, and takes none of it until told on stdin. */
static int ask_and_wait(struct kv_client *client)
{
    struct kv_buffer *buffer = system_buffer(client, (size_t)STUCK_READS << 20);
    struct kv_session *session = system_session(client, system_model(), 60000);
    struct kv_rows box = {.n_layers = 2, .n_tokens = N_TOKENS};
    struct kv_op *ops[STUCK_READS];
    unsigned n_failed = 0;
    char byte;

    system_put(client, session, buffer, 0, N_TOKENS, 1);
    for (unsigned i = 0; i < STUCK_READS; i++) {
        struct kv_rows_io io = {.buffer = buffer, .offset = (size_t)i << 20};

        if (kv_read_begin(session, &box, &io, 60000, &ops[i]) != KV_OK)
            return EXIT_FAILURE;
    }
    say("waiting");
    if (read(STDIN_FILENO, &byte, 1) != 1)
        return EXIT_FAILURE;
    for (unsigned i = 0; i < STUCK_READS; i++)
        n_failed += kv_finish(ops[i]) != KV_OK;
    /* It finds the node again by itself, and what it had put. */
    system_read(client, session, buffer, 0, N_TOKENS, 1);
    printf("failed %u\n", n_failed);
    kv_client_close(client);
    return EXIT_SUCCESS;
}

/* Waits, with a deadline as late as can be, for rows that nobody puts; to the end of stdin. */
static int wait_for_rows(struct kv_client *client)
{
    struct kv_buffer *buffer = system_buffer(client, 1 << 20);
    struct kv_session *session = system_session(client, system_model(), 600000);
    const struct kv_rows box = {.n_layers = 2, .n_tokens = 10};
    const struct kv_rows_io io = {.buffer = buffer};
    struct pollfd in = {.fd = STDIN_FILENO, .events = POLLIN};
    struct kv_op *ops[WAITING_READS];
    unsigned n_ended = 0;

    for (unsigned i = 0; i < WAITING_READS; i++)
        if (kv_read_begin(session, &box, &io, UINT32_MAX, &ops[i]) != KV_OK)
            return EXIT_FAILURE;
    say("waiting");
    while (poll(&in, 1, 0) == 0)
        kv_client_wait(client, 10000);
    for (unsigned i = 0; i < WAITING_READS; i++) {
        if (kv_op_status(ops[i]) == KV_IN_PROGRESS)
            continue;
        process_complain("a read that waited: %s", kv_op_detail(ops[i]));
        n_ended++;
    }
    printf("ended %u\n", n_ended);
    kv_client_close(client);
    return EXIT_SUCCESS;
}

/* Announces data and lives on without ever sending it. */
static int hang(struct kv_client *client)
{
    struct kv_buffer *buffer = system_buffer(client, PUT_BYTES);
    struct kv_session *session = system_session(client, system_model(), 600000);
    const struct kv_rows box = {.n_layers = 2, .token_begin = 100, .n_tokens = N_TOKENS};
    const struct kv_rows_io io = {.buffer = buffer};
    struct kv_op *op;

    system_put(client, session, buffer, 0, 100, 7);
    if (kv_put_begin(session, &box, &io, UINT32_MAX, &op) != KV_OK)
        return EXIT_FAILURE;
    say("hanging");
    while (true)
        pause();
}

/* ROLE NODES TRANSPORT */
static int child(int argc, char **argv)
{
    struct kv_client *client;

    if (argc != 4)
        return 2;
    client = open_named(argv[1], argv[2], argv[3],
                        strcmp(argv[0], "ask") == 0 ? 0 : PEER_TIMEOUT_MS);
    if (strcmp(argv[0], "put") == 0)
        return put_until_killed(client);
    if (strcmp(argv[0], "flood") == 0)
        flood(client, 0);
    if (strcmp(argv[0], "write") == 0)
        flood(client, WRITE_BYTES);
    if (strcmp(argv[0], "wait") == 0)
        return wait_for_rows(client);
    if (strcmp(argv[0], "hang") == 0)
        return hang(client);
    return ask_and_wait(client);
}

static void start_child(struct process *process,
                        const struct process_node *node,
                        const char *role,
                        const char *transport,
                        const char *name)
{
    const char *const arguments[] = {node->control, transport, name, NULL};

    assert_true(process_start_self(process, role, arguments));
}

static void await_word(struct process *process, const char *word)
{
    char line[PROCESS_LINE_BYTES];

    assert_true(process_read_line(process, line, PROCESS_PATIENCE_MS));
    assert_string_equal(line, word);
}

/* ---- what comes back --------------------------------------------------------------------- */

static bool is_alone(void *arg)
{
    return system_n_rows(arg, 0, "clients") == 1;
}

static bool has_no_session(void *arg)
{
    return system_n_rows(arg, 0, "sessions") == 0;
}

static bool has_no_segment(void *arg)
{
    static char page[1 << 18];

    return process_http_get(arg, "/metrics", page, sizeof(page)) == 200 &&
           strstr(page, "\ntopkv_segments 0\n") != NULL;
}

struct fds {
    const struct process_node *node;
    unsigned n, most;
};

static bool has_few_fds(void *arg)
{
    struct fds *fds = arg;

    fds->n = process_n_fds(fds->node->process.pid);
    return fds->n <= fds->most;
}

static void kill_clients(const char *transport, unsigned n)
{
    struct process_shared shared;
    struct process_node node = {0};
    struct fds fds = {.node = &node};
    unsigned fds_half = 0;
    uint64_t rss_half = 0, rss;
    struct kv_client *client;

    process_shared_look(&shared);
    system_node_start(&node, short_lease);
    client = open_named(node.control, "tcp", "polite", PEER_TIMEOUT_MS);
    for (unsigned i = 0; i < n; i++) {
        struct process process;
        struct pollfd out = {.events = POLLIN};

        start_child(&process, &node, "put", transport, "put");
        await_word(&process, "putting");
        /* Dies anywhere between the first put and the end of all. */
        out.fd = process.out;
        poll(&out, 1, (int)(i % (KILL_AFTER_MS + 1)));
        process_kill(&process);
        if (i + 1 == n / 2) {
            assert_true(process_until(is_alone, client, PROCESS_PATIENCE_MS));
            assert_true(process_until(has_no_session, client, PROCESS_PATIENCE_MS));
            rss_half = process_rss(node.process.pid);
            fds_half = process_n_fds(node.process.pid);
        }
    }
    assert_true(process_until(is_alone, client, PROCESS_PATIENCE_MS));
    assert_true(process_until(has_no_session, client, PROCESS_PATIENCE_MS));
    assert_true(process_until(has_no_segment, node.metrics, PROCESS_PATIENCE_MS));
    rss = process_rss(node.process.pid);
    /* A queue that is being replaced has some until it is closed. */
    fds.most = fds_half + 4;
    assert_true(process_until(has_few_fds, &fds, PROCESS_PATIENCE_MS));
    print_message("%s: %u killed: resident %.1f MB, %.1f at half; descriptors %u, %u at half\n",
                  transport, n, (double)rss / 1e6, (double)rss_half / 1e6, fds.n, fds_half);
    assert_true(rss < rss_half + RSS_GROWTH_KILLED);
    /* A queue that was left half written takes the next client's channel with it. */
    assert_in_range(system_number(client, 0, "stats", "clients_lost"), n,
                    strcmp(transport, "shm") == 0 ? 2 * n : n);
    kv_client_close(client);
    system_node_stop(&node);
    assert_true(process_shared_settled(&shared));
}

static void killed_over_tcp(void **state)
{
    (void)state;
    kill_clients("tcp", N_KILLED);
}

static void killed_over_shared_memory(void **state)
{
    (void)state;
    kill_clients("shm", N_KILLED_SHM);
}

/* ---- the others -------------------------------------------------------------------------- */

/* Reads of a client that behaves; returns the longest, in microseconds. */
static uint64_t
polite(struct kv_client *client, struct kv_session *session, struct kv_buffer *buffer)
{
    uint64_t longest_us = 0;

    for (unsigned i = 0; i < POLITE_READS; i++) {
        uint64_t begin_us = process_now_us();
        uint64_t took_us;

        system_read(client, session, buffer, 0, 100, 7);
        took_us = process_now_us() - begin_us;
        if (took_us > longest_us)
            longest_us = took_us;
    }
    return longest_us;
}

static void a_flood(void **state)
{
    struct process_node node = {0};
    double busy = 0, dropped = 0;
    struct process process;
    struct kv_session *session;
    struct kv_buffer *buffer;
    struct kv_client *client;
    uint64_t rss, longest_us;

    (void)state;
    system_node_start(&node, small);
    client = open_named(node.control, "tcp", "polite", PEER_TIMEOUT_MS);
    buffer = system_buffer(client, 1 << 20);
    session = system_session(client, system_model(), 0);
    system_put(client, session, buffer, 0, 100, 7);
    polite(client, session, buffer);
    rss = process_rss(node.process.pid);

    start_child(&process, &node, "flood", "tcp", "flood");
    await_word(&process, "flooding");
    longest_us = polite(client, session, buffer);
    assert_true(system_client_number(client, 0, "flood", "busy", &busy));
    assert_true(system_client_number(client, 0, "flood", "dropped", &dropped));
    print_message("flood: %.0f refused, %.0f dropped, resident %+.1f MB, the longest read of "
                  "another client %.1f ms\n",
                  busy, dropped, ((double)process_rss(node.process.pid) - (double)rss) / 1e6,
                  (double)longest_us / 1e3);
    assert_true(busy + dropped > 0);
    assert_true(longest_us < HELD_UP_US);
    assert_true(process_rss(node.process.pid) < rss + RSS_GROWTH);

    process_kill(&process);
    assert_true(process_until(is_alone, client, PROCESS_PATIENCE_MS));
    system_read(client, session, buffer, 0, 100, 7);
    kv_client_close(client);
    system_node_stop(&node);
}

/* Over shared memory the clients write into the node's queue themselves, and who is killed in
 * the middle of a message leaves it stuck.  The node notices, and the others get to it again.
 */
static void killed_while_they_write(void **state)
{
    struct process_node node = {0};
    struct kv_session *session;
    struct kv_buffer *buffer;
    struct kv_client *client;
    uint64_t longest_us = 0;
    unsigned n_failed = 0;

    (void)state;
    system_node_start(&node, medium);
    client = open_named(node.control, "shm", "polite", WAY_BACK_MS);
    buffer = system_buffer(client, 1 << 20);
    session = system_session(client, system_model(), 60000);
    system_put(client, session, buffer, 0, 100, 7);
    for (unsigned i = 0; i < N_KILLED_WRITING; i++) {
        struct kv_rows box = {.n_layers = 2, .n_tokens = 100};
        struct kv_rows_io io = {.buffer = buffer};
        struct process process;
        struct pollfd out = {.events = POLLIN};
        uint64_t begin_us;
        kv_status_t status;

        start_child(&process, &node, "write", "shm", "write");
        await_word(&process, "flooding");
        out.fd = process.out;
        poll(&out, 1, (int)(i % (KILL_AFTER_MS + 1)));
        process_kill(&process);
        begin_us = process_now_us();
        do {
            struct kv_op *op;

            status = kv_read_begin(session, &box, &io, 1000, &op);
            if (status == KV_OK)
                status = kv_finish(op);
            n_failed += status != KV_OK;
            if (status != KV_OK && status != KV_UNREACHABLE && status != KV_DEADLINE)
                fail_msg("%s", kv_client_detail(client));
            assert_true(process_now_us() - begin_us < PROCESS_PATIENCE_MS * UINT64_C(1000));
        } while (status != KV_OK);
        if (process_now_us() - begin_us > longest_us)
            longest_us = process_now_us() - begin_us;
    }
    print_message("%d killed: %u reads failed, the longest way back %.1f s\n", N_KILLED_WRITING,
                  n_failed, (double)longest_us / 1e6);
    system_read(client, session, buffer, 0, 100, 7);
    kv_client_close(client);
    system_node_stop(&node);
}

static bool frozen_has_requests(void *arg)
{
    double in_flight;

    return system_client_number(arg, 0, "frozen", "in_flight", &in_flight) && in_flight > 0;
}

/* One stands still, the other one's program does not call the library. */
static void clients_that_take_nothing(void **state)
{
    struct process_node node = {0};
    struct process frozen, idle;
    struct kv_session *session;
    struct kv_buffer *buffer;
    struct kv_client *client;
    uint64_t rss, longest_us;

    (void)state;
    system_node_start(&node, small);
    client = open_named(node.control, "tcp", "polite", PEER_TIMEOUT_MS);
    buffer = system_buffer(client, 1 << 20);
    session = system_session(client, system_model(), 0);
    system_put(client, session, buffer, 0, 100, 7);
    rss = process_rss(node.process.pid);

    start_child(&frozen, &node, "ask", "tcp", "frozen");
    await_word(&frozen, "waiting");
    /* Seen before it may be lost, which takes the node some seconds. */
    assert_true(process_until(frozen_has_requests, client, PROCESS_PATIENCE_MS));
    assert_true(process_freeze(&frozen));
    start_child(&idle, &node, "ask", "tcp", "idle");
    await_word(&idle, "waiting");
    longest_us = polite(client, session, buffer);
    print_message("frozen: resident %+.1f MB, the longest read of another client %.1f ms\n",
                  ((double)process_rss(node.process.pid) - (double)rss) / 1e6,
                  (double)longest_us / 1e3);
    assert_true(longest_us < HELD_UP_US);

    /* Both lose their channels, in time. */
    assert_true(process_until(is_alone, client, PROCESS_PATIENCE_MS));
    assert_true(system_number(client, 0, "stats", "stalled_clients") >= 1);
    system_read(client, session, buffer, 0, 100, 7);
    assert_true(process_rss(node.process.pid) < rss + RSS_GROWTH);

    /* And find the way back. */
    process_thaw(&frozen);
    assert_int_equal(write(frozen.in, "\n", 1), 1);
    assert_int_equal(write(idle.in, "\n", 1), 1);
    assert_int_equal(process_wait(&frozen, PROCESS_PATIENCE_MS), 0);
    assert_int_equal(process_wait(&idle, PROCESS_PATIENCE_MS), 0);
    kv_client_close(client);
    system_node_stop(&node);
}

/* ---- all at once ------------------------------------------------------------------------- */

static void drip(int fds[N_DRIPS], const char *address)
{
    for (unsigned i = 0; i < N_DRIPS; i++) {
        if (fds[i] >= 0 && send(fds[i], "X: y\r\n", 6, MSG_NOSIGNAL | MSG_DONTWAIT) == 6)
            continue;
        if (fds[i] >= 0)
            close(fds[i]);
        fds[i] = process_connect(address);
        if (fds[i] >= 0)
            (void)!send(fds[i], "GET / HTTP/1.1\r\n", 16, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
}

static bool is_healthy(void *arg)
{
    return process_http_get(arg, "/health", NULL, 0) == 200;
}

static bool has_stuck_clients(void *arg)
{
    return system_number(arg, 0, "stats", "stalled_clients") >= N_HANGING;
}

static bool has_many_waiting(void *arg)
{
    return system_number(arg, 0, "status", "requests_in_flight") >= WAITING_MOST;
}

/* 1,620 reads that wait, transfers that hang, connections that drip: a client beside them never
 * hears that the node is dead, nor do those who wait, and /health answers. */
static void the_worst_within_their_rights(void **state)
{
    static const char *const options[] = {"--memory", "128M", "--threads", "1", NULL};
    struct process waiters[N_WAITERS], hanging[N_HANGING];
    struct process_node node = {0};
    uint64_t begin_us, longest_us = 0;
    unsigned n_reads = 0;
    char line[PROCESS_LINE_BYTES];
    struct kv_session *session;
    struct kv_buffer *buffer;
    struct kv_client *client;
    int fds[N_DRIPS];

    (void)state;
    system_node_start(&node, options);
    client = open_named(node.control, "tcp", "polite", PEER_TIMEOUT_MS);
    buffer = system_buffer(client, 1 << 20);
    session = system_session(client, system_model(), 600000);
    system_put(client, session, buffer, 0, 100, 7);
    for (unsigned i = 0; i < N_WAITERS; i++)
        start_child(&waiters[i], &node, "wait", "tcp", "wait");
    for (unsigned i = 0; i < N_HANGING; i++)
        start_child(&hanging[i], &node, "hang", "tcp", "hang");
    for (unsigned i = 0; i < N_WAITERS; i++)
        await_word(&waiters[i], "waiting");
    for (unsigned i = 0; i < N_HANGING; i++)
        await_word(&hanging[i], "hanging");
    for (unsigned i = 0; i < N_DRIPS; i++)
        fds[i] = -1;

    begin_us = process_now_us();
    while (process_now_us() - begin_us < BESIDE_US) {
        uint64_t asked_us;

        drip(fds, node.metrics);
        asked_us = process_now_us();
        assert_true(process_until(is_healthy, node.metrics, PROCESS_PATIENCE_MS));
        if (process_now_us() - asked_us > longest_us)
            longest_us = process_now_us() - asked_us;
        for (unsigned i = 0; i < 10; i++, n_reads++)
            system_read(client, session, buffer, 0, 100, 7);
    }
    assert_true(process_until(has_many_waiting, client, PROCESS_PATIENCE_MS));
    print_message("%u reads beside %u that wait; /health in %.1f ms at most\n", n_reads,
                  N_WAITERS * WAITING_READS, (double)longest_us / 1e3);
    for (unsigned i = 0; i < N_WAITERS; i++) {
        assert_int_equal(write(waiters[i].in, "\n", 1), 1);
        assert_true(process_read_line(&waiters[i], line, PROCESS_PATIENCE_MS));
        assert_string_equal(line, "ended 0");
        assert_int_equal(process_wait(&waiters[i], PROCESS_PATIENCE_MS), 0);
    }
    /* Those that hang have lost their channels by now, or will. */
    assert_true(process_until(has_stuck_clients, client, PROCESS_PATIENCE_MS));
    for (unsigned i = 0; i < N_HANGING; i++)
        process_kill(&hanging[i]);
    for (unsigned i = 0; i < N_DRIPS; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    system_read(client, session, buffer, 0, 100, 7);
    kv_client_close(client);
    system_node_stop(&node);
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(killed_over_tcp),
        cmocka_unit_test(killed_over_shared_memory),
        cmocka_unit_test(killed_while_they_write),
        cmocka_unit_test(a_flood),
        cmocka_unit_test(clients_that_take_nothing),
        cmocka_unit_test(the_worst_within_their_rights),
    };

    (void)argc;
    (void)argv;
    return cmocka_run_group_tests_name("system.clients", tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return system_main(argc, argv, work, child);
}
