/* One node of three is down: killed, stopped, or behind a port that nobody serves.  A client
 * opens all the same, in a stated time, and finds on the living nodes what others put there;
 * what needs the node that is down fails, naming it, until it is back. */
#include "tests/support/rows.h"
#include "tests/system/system.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    N_NODES = 3,
    DOWN = 1,
    N_OBJECTS = 48,
    OBJECT_BYTES = 1000,
    N_TOKENS = 50,
    SHORT_MS = 500, /* of operations that end by their deadline */
    PEER_MS = 5000, /* silence of a node that is taken for down */
    DETAIL_BYTES = 1024,
};

static const char *const tcp_only[] = {"--transport", "tcp", NULL};

struct trio {
    struct process_node nodes[N_NODES];
    char addresses[256];
};

static void start_trio(struct trio *trio)
{
    memset(trio, 0, sizeof(*trio));
    for (unsigned i = 0; i < N_NODES; i++)
        system_node_start(&trio->nodes[i], tcp_only);
    snprintf(trio->addresses, sizeof(trio->addresses), "%s,%s,%s", trio->nodes[0].control,
             trio->nodes[1].control, trio->nodes[2].control);
}

static void stop_trio(struct trio *trio)
{
    for (unsigned i = 0; i < N_NODES; i++)
        system_node_stop(&trio->nodes[i]);
}

static kv_status_t try_open(const char *nodes,
                            uint32_t deadline_ms,
                            struct kv_client **client,
                            char detail[DETAIL_BYTES])
{
    const struct kv_client_options options = {.nodes = nodes,
                                              .transport = "tcp",
                                              .deadline_ms = deadline_ms,
                                              .peer_timeout_ms = PEER_MS};

    return kv_client_open(&options, client, detail, DETAIL_BYTES);
}

/* Far from the deadline: a node that is down costs its silence at most. */
static struct kv_client *open_soon(const char *nodes)
{
    uint64_t begin_us = process_now_us();
    struct kv_client *client;
    char detail[DETAIL_BYTES];

    if (try_open(nodes, PROCESS_PATIENCE_MS, &client, detail) != KV_OK)
        fail_msg("%s", detail);
    assert_true(process_now_us() - begin_us < PROCESS_PATIENCE_MS * UINT64_C(1000) / 2);
    return client;
}

static void object_name(char name[32], unsigned i)
{
    snprintf(name, 32, "node_down/%u", i);
}

static void put_objects(struct kv_client *client, struct kv_buffer *buffer)
{
    char name[32];

    for (unsigned i = 0; i < N_OBJECTS; i++) {
        object_name(name, i);
        test_fill(kv_buffer_data(buffer), OBJECT_BYTES, i);
        assert_int_equal(system_object(client, KV_OBJECT_PUT, name, buffer, OBJECT_BYTES, 0),
                         KV_OK);
    }
}

static bool names(const struct kv_client *client, const char *node, const char *what)
{
    char begin[96];

    snprintf(begin, sizeof(begin), "node %s: %s: ", node, what);
    return strncmp(kv_client_detail(client), begin, strlen(begin)) == 0;
}

/* A node that is only slow is asked again; `down` NULL: none is down. */
static kv_status_t
get_object(struct kv_client *client, struct kv_buffer *buffer, const char *down, unsigned i)
{
    uint64_t begin_us = process_now_us();
    char name[32];
    kv_status_t status;

    object_name(name, i);
    do
        status = system_object(client, KV_OBJECT_GET, name, buffer, OBJECT_BYTES,
                               down == NULL ? SYSTEM_DEADLINE_MS : SHORT_MS);
    while ((status == KV_UNREACHABLE || status == KV_DEADLINE) &&
           (down == NULL || !names(client, down, "object_get")) &&
           process_now_us() - begin_us < PROCESS_PATIENCE_MS * UINT64_C(1000));
    return status;
}

/* Objects of the living nodes come; of the node that is down none does, and it is named; of one
 * that is back they are gone.  Both kinds there are. */
static void
get_objects(struct kv_client *client, struct kv_buffer *buffer, const char *down, bool is_back)
{
    unsigned n_here = 0, n_down = 0;

    for (unsigned i = 0; i < N_OBJECTS; i++) {
        kv_status_t status = get_object(client, buffer, is_back ? NULL : down, i);

        if (status == KV_OK) {
            assert_true(test_is_filled(kv_buffer_data(buffer), OBJECT_BYTES, i));
            n_here++;
            continue;
        }
        if (is_back)
            assert_int_equal(status, KV_NOT_FOUND);
        else
            assert_true(status == KV_UNREACHABLE || status == KV_DEADLINE);
        assert_true(names(client, down, "object_get"));
        n_down++;
    }
    assert_true(n_here > 0 && n_down > 0);
}

/* A session lies on all nodes: none is opened without one of them.  One that is only slow may
 * be named first. */
static void no_session(struct kv_client *client, const char *down)
{
    uint64_t begin_us = process_now_us();
    struct kv_op *op;

    do {
        assert_int_equal(kv_open_begin(client, system_model(), NULL, SHORT_MS, &op), KV_OK);
        assert_int_not_equal(kv_finish(op), KV_OK);
        assert_true(process_now_us() - begin_us < PROCESS_PATIENCE_MS * UINT64_C(1000));
    } while (!names(client, down, "open"));
}

static enum kv_node_state state_of(struct kv_client *client, uint32_t node)
{
    struct kv_node_info info;

    kv_client_node(client, node, &info);
    assert_true(info.detail[0] == '\0' || info.state != KV_NODE_CONNECTED);
    return info.state;
}

static void a_killed_node(void **state)
{
    struct kv_client *client, *late;
    struct kv_session *session;
    struct kv_buffer *buffer;
    struct trio trio;

    (void)state;
    start_trio(&trio);
    client = system_open(trio.addresses, "tcp");
    put_objects(client, system_buffer(client, 1 << 16));
    process_kill(&trio.nodes[DOWN].process);

    late = open_soon(trio.addresses);
    buffer = system_buffer(late, 1 << 16);
    assert_int_equal(kv_client_n_nodes(late), N_NODES);
    for (uint32_t i = 0; i < N_NODES; i++) {
        if (i == DOWN) {
            assert_int_equal(state_of(late, i), KV_NODE_UNREACHED);
            continue;
        }
        system_number(late, i, "status", "clients"); /* a slow one connects after open */
        assert_int_equal(state_of(late, i), KV_NODE_CONNECTED);
    }
    get_objects(late, buffer, trio.nodes[DOWN].control, false);
    no_session(late, trio.nodes[DOWN].control);
    assert_int_equal(state_of(late, DOWN), KV_NODE_UNREACHED);

    /* It comes up, empty: the client that never met it goes on with it. */
    system_node_start(&trio.nodes[DOWN], tcp_only);
    get_objects(late, buffer, trio.nodes[DOWN].control, true);
    assert_int_equal(state_of(late, DOWN), KV_NODE_CONNECTED);
    session = system_session(late, system_model(), 0);
    system_put(late, session, buffer, 0, N_TOKENS, 1);
    system_read(late, session, buffer, 0, N_TOKENS, 1);
    kv_client_close(late);
    kv_client_close(client);
    stop_trio(&trio);
}

static void a_stopped_node(void **state)
{
    struct kv_client *client, *late;
    struct kv_buffer *buffer;
    struct trio trio;

    (void)state;
    start_trio(&trio);
    client = system_open(trio.addresses, "tcp");
    put_objects(client, system_buffer(client, 1 << 16));
    assert_true(process_freeze(&trio.nodes[DOWN].process));
    late = open_soon(trio.addresses);
    buffer = system_buffer(late, 1 << 16);
    assert_int_not_equal(state_of(late, DOWN), KV_NODE_CONNECTED);
    get_objects(late, buffer, trio.nodes[DOWN].control, false);
    no_session(late, trio.nodes[DOWN].control);
    process_thaw(&trio.nodes[DOWN].process);
    for (unsigned i = 0; i < N_OBJECTS; i++) {
        assert_int_equal(get_object(late, buffer, NULL, i), KV_OK);
        assert_true(test_is_filled(kv_buffer_data(buffer), OBJECT_BYTES, i));
    }
    kv_client_close(late);
    kv_client_close(client);
    stop_trio(&trio);
}

/* ---- prefixes ---------------------------------------------------------------------------- */

enum {
    N_BLOCKS = 3,
    PROMPT_TOKENS = N_BLOCKS * KV_BLOCK_TOKENS,
};

static struct kv_id128 block_names[N_BLOCKS];

enum asked {
    PUBLISH,
    MATCH,
    PIN,
    OPEN,
    N_ASKED,
};
static const char *const asked_names[N_ASKED] = {"publish", "match", "prefix", "open"};

/* Begins an operation about the prompt's blocks. */
static struct kv_op *begin_asked(struct kv_client *client,
                                 struct kv_session *session,
                                 enum asked what,
                                 uint32_t deadline_ms)
{
    const struct kv_publish publish = {.n_names = N_BLOCKS, .names = block_names};
    const struct kv_prefix prefix = {.verb = KV_PREFIX_PIN, .name = &block_names[0]};
    const struct kv_session_options options = {.block_names = block_names,
                                               .n_block_names = N_BLOCKS};
    kv_status_t status = KV_INVALID;
    struct kv_op *op;

    if (what == PUBLISH)
        status = kv_publish_begin(session, &publish, deadline_ms, &op);
    else if (what == MATCH)
        status = kv_match_begin(client, block_names, N_BLOCKS, deadline_ms, &op);
    else if (what == PIN)
        status = kv_prefix_begin(client, KV_NODES_ALL, &prefix, deadline_ms, &op);
    else if (what == OPEN)
        status = kv_open_begin(client, system_model(), &options, deadline_ms, &op);
    if (status != KV_OK)
        fail_msg("%s: %s", asked_names[what], kv_client_detail(client));
    return op;
}

/* All nodes answer; one that is slow is asked again. */
static uint32_t
asked_well(struct kv_client *client, struct kv_session *session, enum asked what)
{
    struct kv_op *op = begin_asked(client, session, what, SYSTEM_DEADLINE_MS);
    uint32_t told;

    if (kv_wait(op) != KV_OK)
        fail_msg("%s: %s", asked_names[what], kv_op_detail(op));
    told = what == PIN ? (uint32_t)kv_op_blocks(op) : kv_op_tokens(op);
    if (what == OPEN)
        kv_session_free(kv_op_session(op));
    kv_op_free(op);
    return told;
}

/* One that is only slow may be named first.  A match goes on without a node that the client has given up. */
static void asked_badly(struct kv_client *client,
                        struct kv_session *session,
                        enum asked what,
                        const char *down)
{
    const uint64_t begin_us = process_now_us();
    bool is_named;

    do {
        const uint64_t asked_us = process_now_us();
        struct kv_op *op = begin_asked(client, session, what, SHORT_MS);
        const kv_status_t status = kv_wait(op);

        if (what == MATCH && status == KV_OK && state_of(client, DOWN) != KV_NODE_CONNECTED) {
            assert_int_equal(kv_op_tokens(op), 0);
            kv_op_free(op);
            return;
        }
        if (status != KV_DEADLINE && status != KV_UNREACHABLE)
            fail_msg("%s: %s", asked_names[what], kv_status_name(status));
        is_named = names(client, down, asked_names[what]);
        kv_op_free(op);
        assert_true(process_now_us() - asked_us <
                    (SHORT_MS + SYSTEM_SLACK_MS) * UINT64_C(1000));
        assert_true(process_now_us() - begin_us < PROCESS_PATIENCE_MS * UINT64_C(1000));
    } while (!is_named);
}

/* Who publishes, asks for, pins or opens a prompt, of whose nodes one is stopped, hears by the
 * deadline which one; once it goes on, all is as it was. */
static void prefixes_at_a_stopped_node(void **state)
{
    const struct kv_session_options options = {.block_names = block_names,
                                               .n_block_names = N_BLOCKS};
    uint32_t tokens[PROMPT_TOKENS];
    struct kv_session *session;
    struct kv_client *client;
    struct kv_buffer *buffer;
    struct trio trio;
    struct kv_op *op;

    (void)state;
    start_trio(&trio);
    client = system_open(trio.addresses, "tcp");
    buffer = system_buffer(client, 1 << 20);
    for (uint32_t i = 0; i < PROMPT_TOKENS; i++)
        tokens[i] = i;
    kv_prompt_names(client, system_model(), tokens, PROMPT_TOKENS, NULL, 0, block_names);
    assert_int_equal(kv_open_begin(client, system_model(), &options, 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    session = kv_op_session(op);
    kv_op_free(op);
    system_put(client, session, buffer, 0, PROMPT_TOKENS, 1);
    assert_int_equal(asked_well(client, session, PUBLISH), PROMPT_TOKENS);
    assert_true(process_freeze(&trio.nodes[DOWN].process));
    for (unsigned what = 0; what < N_ASKED; what++)
        asked_badly(client, session, (enum asked)what, trio.nodes[DOWN].control);
    process_thaw(&trio.nodes[DOWN].process);
    for (unsigned what = 0; what < N_ASKED; what++)
        assert_int_equal(asked_well(client, session, (enum asked)what),
                         what == PIN ? 1 : PROMPT_TOKENS);
    system_read(client, session, buffer, 0, PROMPT_TOKENS, 1);
    kv_session_free(session);
    kv_client_close(client);
    stop_trio(&trio);
}

/* An address that swallows all that is sent to it: a port whose queue is full. */
struct hole {
    int listener, fillers[4];
    char address[64];
};

static void open_hole(struct hole *hole)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof(at);

    hole->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(hole->listener, (struct sockaddr *)&at, sizeof(at)), 0);
    assert_int_equal(listen(hole->listener, 0), 0);
    assert_int_equal(getsockname(hole->listener, (struct sockaddr *)&at, &bytes), 0);
    snprintf(hole->address, sizeof(hole->address), "127.0.0.1:%u", ntohs(at.sin_port));
    for (unsigned i = 0; i < 4; i++) {
        hole->fillers[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        (void)!connect(hole->fillers[i], (struct sockaddr *)&at, sizeof(at));
    }
}

static void close_hole(struct hole *hole)
{
    for (unsigned i = 0; i < 4; i++)
        close(hole->fillers[i]);
    close(hole->listener);
}

static void a_black_hole(void **state)
{
    struct process_node node = {0};
    struct kv_client *client;
    char list[160], name[32];
    struct hole hole;

    (void)state;
    system_node_start(&node, tcp_only);
    open_hole(&hole);
    snprintf(list, sizeof(list), "%s,%s", hole.address, node.control);
    client = open_soon(list);
    for (unsigned i = 0, n_told = 0; n_told == 0; i++) {
        object_name(name, i);
        n_told +=
            system_object(client, KV_OBJECT_EXISTS, name, NULL, 0, SHORT_MS) == KV_NOT_FOUND;
    }
    no_session(client, hole.address);
    kv_client_close(client);
    close_hole(&hole);
    system_node_stop(&node);
}

static void no_node_lives(void **state)
{
    uint64_t begin_us = process_now_us();
    char list[160], detail[DETAIL_BYTES], words[128];
    struct process_node node = {0};
    struct kv_client *client;
    struct hole hole;

    (void)state;
    system_node_start(&node, tcp_only);
    process_kill(&node.process);
    open_hole(&hole);
    snprintf(list, sizeof(list), "%s,%s", node.control, hole.address);
    assert_int_equal(try_open(list, PEER_MS, &client, detail), KV_UNREACHABLE);
    assert_true(process_now_us() - begin_us < PROCESS_PATIENCE_MS * UINT64_C(1000) / 2);
    snprintf(words, sizeof(words), "node %s: open: unreachable: after ", node.control);
    assert_memory_equal(detail, words, strlen(words));
    snprintf(words, sizeof(words), "; node %s: open: unreachable: after ", hole.address);
    assert_non_null(strstr(detail, words));
    close_hole(&hole);
}

/* A list that cannot be right is refused, whoever else answers. */
static void a_wrong_list(void **state)
{
    struct process_node node = {0};
    struct kv_client *client;
    char list[256], detail[DETAIL_BYTES];

    (void)state;
    system_node_start(&node, tcp_only);
    snprintf(list, sizeof(list), "%s,localhost:%s", node.control,
             strrchr(node.control, ':') + 1);
    assert_int_equal(try_open(list, PROCESS_PATIENCE_MS, &client, detail), KV_INVALID);
    assert_non_null(strstr(detail, "twice in the list"));
    assert_non_null(strstr(detail, node.control));
    snprintf(list, sizeof(list), "%s,127.0.0.1:port", node.control);
    assert_int_equal(try_open(list, PROCESS_PATIENCE_MS, &client, detail), KV_INVALID);
    assert_non_null(strstr(detail, "node 127.0.0.1:port: open: invalid: "));
    snprintf(list, sizeof(list), "%s,nowhere", node.control);
    assert_int_equal(try_open(list, PROCESS_PATIENCE_MS, &client, detail), KV_INVALID);
    assert_string_equal(detail, "nodes: not HOST:PORT: nowhere");

    /* A name that is not known now is that of a node that is down. */
    snprintf(list, sizeof(list), "%s,node.invalid:7400", node.control);
    client = open_soon(list);
    no_session(client, "node.invalid:7400");
    kv_client_close(client);
    assert_int_equal(try_open("node.invalid:7400", PROCESS_PATIENCE_MS, &client, detail),
                     KV_INVALID);
    assert_string_equal(detail, "nodes: unknown host or port: node.invalid:7400");
    system_node_stop(&node);
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_killed_node), cmocka_unit_test(a_stopped_node),
        cmocka_unit_test(a_black_hole),  cmocka_unit_test(no_node_lives),
        cmocka_unit_test(a_wrong_list),  cmocka_unit_test(prefixes_at_a_stopped_node),
    };

    (void)argc;
    (void)argv;
    return cmocka_run_group_tests_name("system.node_down", tests, NULL, NULL);
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
