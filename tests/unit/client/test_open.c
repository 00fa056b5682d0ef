/* kv_client_open() and a list of which some nodes are down, silent, or not what they should be:
 * two nodes that serve, and doors that say whatever the test wants to hello. */
#include "kvserver/base/clock.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/thread.h"
#include "kvserver/net/message.h"
#include "proto/kvstore.pb-c.h"
#include "tests/support/cluster.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    DETAIL_BYTES = 1024,
    ADDRESS_BYTES = 2 * KV_WIRE_ADDRESS_MAX + 16,
    N_OBJECTS = 64,
    PATIENCE_MS = 60000, /* of what must succeed */
    SILENCE_MS = 300,
};

/* ---- a door ------------------------------------------------------------------------------ */

/* A port that answers every hello with one status; KV_IN_PROGRESS: it says nothing. */
struct door {
    struct kv_transport *transport;
    struct kv_port *port;
    struct kv_thread *thread;
    struct kv_channel *channels[64];
    unsigned n_channels;
    _Atomic(int) says; /* kv_status_t */
    atomic_bool stop;
    char address[ADDRESS_BYTES];
};

static void sent(void *arg, kv_status_t status)
{
    (void)status;
    free(arg);
}

static void say(struct door *door, const struct kv_wire_header *request, const void *body)
{
    Kvpb__HelloRequest *hello = kvpb__hello_request__unpack(NULL, request->body_bytes, body);
    Kvpb__CloseReply reply = KVPB__CLOSE_REPLY__INIT;
    Kvpb__Outcome outcome = KVPB__OUTCOME__INIT;
    struct {
        struct kv_wire_header header;
        uint8_t packed[256];
    } *message = calloc(1, sizeof(*message));
    struct kv_channel **channel = &door->channels[door->n_channels];
    size_t bytes;

    assert_non_null(hello);
    assert_non_null(message);
    assert_int_equal(door->port->ops->connect(door->port, hello->address.data,
                                              hello->address.len, KV_CHANNEL_NETWORK, NULL,
                                              channel),
                     KV_OK);
    door->n_channels = (door->n_channels + 1) % 64;
    kvpb__hello_request__free_unpacked(hello, NULL);
    outcome.status = door->says;
    outcome.detail = (char *)"the door says so";
    reply.outcome = &outcome;
    bytes = kvpb__close_reply__pack(&reply, message->packed);
    message->header = (struct kv_wire_header){.kind = KV_WIRE_REPLY,
                                              .op = request->op,
                                              .request_id = request->request_id,
                                              .client_index = request->client_index,
                                              .client_token = request->client_token};
    kv_message_seal(&message->header, message->packed, bytes);
    if (kv_channel_send(*channel, &message->header, sizeof(message->header), message->packed,
                        bytes, sent, message) != KV_IN_PROGRESS)
        free(message);
}

static void on_message(
    void *owner, const void *message, size_t message_bytes, const void *body, size_t body_bytes)
{
    struct door *door = owner;
    struct kv_wire_header request;
    const char *why;

    if (kv_message_check(message, message_bytes, body, body_bytes, &request, &why) == KV_OK &&
        request.op == KV_OP_HELLO && door->says != KV_IN_PROGRESS)
        say(door, &request, body);
}

static void on_incoming(void *owner,
                        const void *message,
                        size_t message_bytes,
                        size_t bytes,
                        struct kv_incoming *incoming)
{
    (void)owner;
    (void)message;
    (void)message_bytes;
    (void)bytes;
    kv_incoming_refuse(incoming);
}

static void on_failed(void *owner, void *channel_arg, kv_status_t status)
{
    (void)owner;
    (void)channel_arg;
    (void)status;
}

static void run_door(void *arg)
{
    struct door *door = arg;

    while (!door->stop) {
        int fd;

        if (kv_port_progress(door->port) > 0 ||
            door->port->ops->port_arm(door->port, &fd) != KV_OK)
            continue;
        kv_sleep_fds(&fd, 1, 10000);
    }
}

static void open_door(struct door *door, kv_status_t says)
{
    static const struct kv_port_events events = {on_message, on_incoming, on_failed};
    const struct kv_transport_config config = {0};
    const uint8_t *address;
    char detail[DETAIL_BYTES];
    const void *bytes;
    size_t n_bytes;

    memset(door, 0, sizeof(*door));
    door->says = says;
    assert_int_equal(
        kv_transport_loopback.open(&config, &door->transport, detail, sizeof(detail)), KV_OK);
    assert_int_equal(
        door->transport->ops->port_open(door->transport, &events, door, &door->port), KV_OK);
    door->port->ops->port_address(door->port, &bytes, &n_bytes);
    address = bytes;
    strcpy(door->address, "loopback:");
    for (size_t i = 0; i < n_bytes; i++)
        snprintf(door->address + 9 + 2 * i, 3, "%02x", address[i]);
    assert_int_equal(kv_thread_start("door", run_door, door, &door->thread), KV_OK);
}

/* What is left is an address at which nobody is. */
static void close_door(struct door *door)
{
    door->stop = true;
    door->port->ops->port_wake(door->port);
    kv_thread_join(door->thread);
    for (unsigned i = 0; i < 64; i++)
        if (door->channels[i] != NULL)
            door->channels[i]->ops->channel_close(door->channels[i]);
    door->port->ops->port_close(door->port);
    door->transport->ops->close(door->transport);
}

/* ---- opening ----------------------------------------------------------------------------- */

static struct cluster cluster;
static char detail[DETAIL_BYTES];

static int setup(void **state)
{
    const struct cluster_setup two = {
        .row = &kv_transport_loopback, .n_nodes = 2, .n_threads = 1, .memory_bytes = 32 << 20};

    (void)state;
    return cluster_open(&cluster, &two) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    cluster_close(&cluster);
    return 0;
}

static const char *living(unsigned node)
{
    return kvs_node_address(cluster.nodes[node]);
}

static kv_status_t open_list(struct kv_client **client,
                             uint32_t peer_timeout_ms,
                             unsigned n,
                             const char *const *list)
{
    char nodes[4 * ADDRESS_BYTES] = "";
    const struct kv_client_options options = {
        .nodes = nodes, .deadline_ms = PATIENCE_MS, .peer_timeout_ms = peer_timeout_ms};

    for (unsigned i = 0; i < n; i++)
        snprintf(nodes + strlen(nodes), sizeof(nodes) - strlen(nodes), "%s%s", i > 0 ? "," : "",
                 list[i]);
    return kv_client_open(&options, client, detail, sizeof(detail));
}

/* "node ADDRESS: WHAT" is in the text. */
static void assert_named(const char *text, const char *address, const char *what)
{
    char words[ADDRESS_BYTES + 64];

    snprintf(words, sizeof(words), "node %s: %s", address, what);
    if (strstr(text, words) == NULL)
        fail_msg("not `%s`: %s", words, text);
}

static kv_status_t exists(struct kv_client *client, unsigned i)
{
    char name[16];
    struct kv_object object = {.name = name};
    struct kv_op *op;

    snprintf(name, sizeof(name), "object-%u", i);
    assert_int_equal(kv_objects_begin(client, KV_OBJECT_EXISTS, &object, 1, PATIENCE_MS, &op),
                     KV_OK);
    return kv_finish(op);
}

/* Objects of the living nodes are told of, those of the others fail as they do. */
static void expect_objects(struct kv_client *client, const char *address, kv_status_t failure)
{
    unsigned n_told = 0, n_failed = 0;

    for (unsigned i = 0; i < N_OBJECTS; i++) {
        kv_status_t status = exists(client, i);

        if (status == KV_NOT_FOUND) {
            n_told++;
            continue;
        }
        assert_int_equal(status, failure);
        assert_named(kv_client_detail(client), address, "object_exists: ");
        n_failed++;
    }
    assert_true(n_told > 0 && n_failed > 0);
}

static void one_of_three_is_gone(void **state)
{
    struct kv_client *client;
    struct kv_node_info info;
    struct door door;

    (void)state;
    open_door(&door, KV_OK);
    close_door(&door);
    for (unsigned place = 0; place < 3; place++) {
        const char *list[3];

        for (unsigned i = 0, n = 0; i < 3; i++)
            list[i] = i == place ? door.address : living(n++);
        if (open_list(&client, PATIENCE_MS, 3, list) != KV_OK)
            fail_msg("%s", detail);
        assert_string_equal(detail, "");
        assert_int_equal(kv_client_n_nodes(client), 3);
        for (unsigned i = 0; i < 3; i++) {
            kv_client_node(client, i, &info);
            assert_string_equal(info.address, list[i]);
            assert_int_equal(info.state, i == place ? KV_NODE_UNREACHED : KV_NODE_CONNECTED);
            assert_int_equal(info.n_threads, i == place ? 0 : 1);
            assert_int_equal(info.detail[0] != '\0', i == place);
        }
        expect_objects(client, door.address, KV_UNREACHABLE);
        kv_client_close(client);
    }
}

/* A node that is silent keeps nobody longer than the time after which silence is a failure. */
static void one_is_silent(void **state)
{
    uint64_t begin_us = kv_clock_now(&kv_clock_real);
    struct kv_client *client;
    struct kv_node_info info;
    struct kv_op *op;
    struct door door;
    kv_status_t status;

    (void)state;
    open_door(&door, KV_IN_PROGRESS);
    if (open_list(&client, SILENCE_MS, 2, (const char *[]){door.address, living(0)}) != KV_OK)
        fail_msg("%s", detail);
    assert_true(kv_clock_now(&kv_clock_real) - begin_us >= SILENCE_MS * 1000);
    assert_true(kv_clock_now(&kv_clock_real) - begin_us < PATIENCE_MS * 1000 / 2);
    kv_client_node(client, 0, &info);
    assert_int_equal(info.state, KV_NODE_UNREACHED);

    /* What needs it ends by its own deadline; what does not is not kept. */
    assert_int_equal(kv_table_begin(client, 0, "status", SILENCE_MS, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_DEADLINE);
    assert_named(kv_op_detail(op), door.address, "table: deadline: ");
    kv_op_free(op);
    do { /* a slow machine may keep a node silent for so long */
        assert_int_equal(kv_table_begin(client, 1, "status", PATIENCE_MS, &op), KV_OK);
        status = kv_finish(op);
    } while (status == KV_UNREACHABLE &&
             kv_clock_now(&kv_clock_real) - begin_us < 2 * PATIENCE_MS * 1000);
    assert_int_equal(status, KV_OK);
    kv_client_close(client);
    close_door(&door);
}

/* A node that cannot take clients now is as good as down; one that may never is refused. */
static void one_refuses(void **state)
{
    static const struct {
        kv_status_t says, open;
    } cases[] = {
        {KV_DRAINING, KV_OK},
        {KV_NO_MEMORY, KV_OK},
        {KV_VERSION, KV_VERSION},
        {KV_DENIED, KV_DENIED},
    };

    (void)state;
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kv_client *client;
        struct door door;
        kv_status_t status;

        open_door(&door, cases[i].says);
        status = open_list(&client, PATIENCE_MS, 2, (const char *[]){living(0), door.address});
        assert_int_equal(status, cases[i].open);
        if (status == KV_OK) {
            expect_objects(client, door.address, cases[i].says);
            kv_client_close(client);
        } else {
            assert_named(detail, door.address, "open: ");
            assert_non_null(strstr(detail, "the door says so"));
            assert_null(strstr(detail, living(0)));
        }
        close_door(&door);
    }
}

static void none_answers(void **state)
{
    struct kv_client *client;
    struct door gone, leaving;

    (void)state;
    open_door(&gone, KV_OK);
    close_door(&gone);
    open_door(&leaving, KV_DRAINING);
    assert_int_equal(
        open_list(&client, PATIENCE_MS, 2, (const char *[]){gone.address, leaving.address}),
        KV_UNREACHABLE);
    assert_named(detail, gone.address, "open: unreachable: ");
    assert_named(detail, leaving.address, "open: draining: ");
    assert_int_equal(open_list(&client, PATIENCE_MS, 1, (const char *[]){leaving.address}),
                     KV_DRAINING);
    close_door(&leaving);

    /* A text that has no room for all ends as one that is cut. */
    char nodes[2 * ADDRESS_BYTES], short_text[16];
    const struct kv_client_options options = {
        .nodes = nodes, .deadline_ms = PATIENCE_MS, .peer_timeout_ms = PATIENCE_MS};

    snprintf(nodes, sizeof(nodes), "%s,%s", gone.address, leaving.address);
    assert_int_equal(kv_client_open(&options, &client, short_text, sizeof(short_text)),
                     KV_UNREACHABLE);
    assert_memory_equal(short_text, "node loopback:", 14);
    assert_int_equal(strlen(short_text), sizeof(short_text) - 1);
    assert_int_equal(kv_client_open(&options, &client, NULL, 0), KV_UNREACHABLE);
}

/* A node that is met later is held to the same as one that is met first. */
static void another_version_comes_up(void **state)
{
    struct kv_client *client;
    struct kv_op *op;
    struct door door;

    (void)state;
    open_door(&door, KV_DRAINING);
    assert_int_equal(
        open_list(&client, PATIENCE_MS, 2, (const char *[]){living(0), door.address}), KV_OK);
    door.says = KV_VERSION;
    assert_int_equal(kv_table_begin(client, 1, "status", PATIENCE_MS, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_VERSION);
    assert_named(kv_op_detail(op), door.address, "table: version: ");
    kv_op_free(op);
    kv_client_close(client);
    close_door(&door);
}

/* Names of blocks depend on all bytes of the salt that a program gives. */
static void the_salt_is_all_of_it(void **state)
{
    static const struct {
        const char *salt;
        size_t bytes;
    } salts[] = {
        {NULL, 0},
        {"a salt", 6},
        {"a salt of one tenant", 20},
        {"a salt of\0 1", 12},
        {"a salt of\0 2", 12},
        {"a salt of\0 2", 9},
    };
    static const struct kv_id128 none;
    static const uint32_t tokens[KV_BLOCK_TOKENS];
    static const struct kv_model_info model = {.fingerprint = {{1, 2, 3}}};

    (void)state;
    for (unsigned i = 0; i < sizeof(salts) / sizeof(salts[0]); i++) {
        const struct kv_client_options options = {.nodes = living(0),
                                                  .salt = salts[i].salt,
                                                  .salt_bytes = salts[i].bytes,
                                                  .deadline_ms = PATIENCE_MS};
        const struct kv_id128 salt =
            salts[i].bytes > 0 ? kv_hash128(salts[i].salt, salts[i].bytes) : none;
        const struct kv_id128 wanted =
            kv_block_name(&none, &model.fingerprint, &salt, &none, tokens, KV_BLOCK_TOKENS);
        struct kv_client *client;
        struct kv_id128 name;

        if (kv_client_open(&options, &client, detail, sizeof(detail)) != KV_OK)
            fail_msg("%s", detail);
        kv_prompt_names(client, &model, tokens, KV_BLOCK_TOKENS, NULL, 0, &name);
        assert_memory_equal(&name, &wanted, sizeof(name));
        kv_client_close(client);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_of_three_is_gone),
        cmocka_unit_test(one_is_silent),
        cmocka_unit_test(one_refuses),
        cmocka_unit_test(none_answers),
        cmocka_unit_test(another_version_comes_up),
        cmocka_unit_test(the_salt_is_all_of_it),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
