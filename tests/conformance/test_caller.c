/* test_caller.c - what a caller may rely on whatever happens to a node or a connection: each
 * object of a batch has its own outcome.
 *
 * Two embedded nodes over the loopback and the real client library, over a transport that loses
 * messages when told to.
 */
#include "cluster.h"
#include "rows.h"
#include "transport_fault.h"

#include "hash.h"
#include "thread.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_NODES = 2,
    MEMORY_BYTES = 64 << 20,
    BUFFER_BYTES = 8 << 20,
    N_OBJECTS = 8,
    N_ON_FIRST = 5, /* of them on node 0 */
    OBJECT_BYTES = 100000,
    RETRY_MS = 50,
};

static struct cluster cluster;

/* A client whose messages may be lost. */
static struct {
    struct kv_transport *transport;
    struct kv_client *client;
    struct kv_buffer *buffer;
    uint8_t *memory;
} side;

static void open_side(void)
{
    struct cluster_client setup = {.retry_ms = RETRY_MS};

    assert_int_equal(fault_open(&kv_transport_loopback, NULL, &side.transport), KV_OK);
    setup.transport = side.transport;
    side.client = cluster_connect(&cluster, &setup);
    assert_int_equal(kv_buffer_alloc(side.client, BUFFER_BYTES, &side.buffer), KV_OK);
    side.memory = kv_buffer_data(side.buffer);
}

static void close_side(void)
{
    kv_client_close(side.client);
    side.transport->row->close(side.transport);
}

static int open_cluster(void **state)
{
    struct cluster_setup setup = {
        .row = &kv_transport_loopback,
        .n_nodes = N_NODES,
        .n_threads = 2,
        .memory_bytes = MEMORY_BYTES,
    };

    (void)state;
    return cluster_open(&cluster, &setup) ? 0 : -1;
}

static int close_cluster(void **state)
{
    (void)state;
    cluster_close(&cluster);
    return 0;
}

static void rule(enum fault_way way, unsigned kind, unsigned op, unsigned skip, unsigned count)
{
    fault_add(side.transport, &(struct fault_rule){way, FAULT_DROP, kind, op, skip, count});
}

/* Loses the connection to a node: the next operation that needs it connects anew. */
static void lose(uint32_t node)
{
    kv_remote_fail(&side.client->remotes[node], KV_UNREACHABLE, "lost by the test");
    kv_poll(side.client);
}

/* ---- batches of objects ------------------------------------------------------------------ */

struct batch {
    char names[N_OBJECTS][24];
    struct kv_object objects[N_OBJECTS];
};

static uint32_t node_of(const char *name)
{
    struct kv_id128 hash = kv_hash128(name, strlen(name));

    return side.client->placement.node_of[kv_placement_object_slot(&hash)];
}

/* Objects of both nodes by turns, the last ones of node 0. */
static void make_batch(struct batch *batch)
{
    uint32_t n_of[N_NODES] = {0};
    unsigned n = 0;

    memset(batch, 0, sizeof(*batch));
    for (unsigned number = 0; n < N_OBJECTS; number++) {
        char name[24];
        uint32_t node;

        snprintf(name, sizeof(name), "object %u", number);
        node = node_of(name);
        if (n_of[node] == (node == 0 ? N_ON_FIRST : N_OBJECTS - N_ON_FIRST))
            continue;
        n_of[node]++;
        memcpy(batch->names[n], name, sizeof(name));
        batch->objects[n] = (struct kv_object){
            .name = batch->names[n],
            .buffer = side.buffer,
            .offset = (size_t)n * OBJECT_BYTES,
            .bytes = OBJECT_BYTES,
        };
        n++;
    }
}

static void put_batch(struct batch *batch)
{
    struct kv_op *op;

    for (unsigned i = 0; i < N_OBJECTS; i++)
        test_fill(side.memory + (size_t)i * OBJECT_BYTES, OBJECT_BYTES, i);
    assert_int_equal(
        kv_objects_begin(side.client, KV_OBJECT_PUT, batch->objects, N_OBJECTS, 0, &op), KV_OK);
    if (kv_wait(op) != KV_OK)
        fail_msg("%s", kv_op_detail(op));
    kv_op_free(op);
    memset(side.memory, 0, N_OBJECTS * OBJECT_BYTES);
}

static struct kv_op *begin_get(struct batch *batch, uint32_t deadline_ms)
{
    struct kv_op *op;

    assert_int_equal(kv_objects_begin(side.client, KV_OBJECT_GET, batch->objects, N_OBJECTS,
                                      deadline_ms, &op),
                     KV_OK);
    return op;
}

/* Node 0's objects have come, node 1's have all ended with the status. */
static void check_batch(struct kv_op *op, const struct batch *batch, kv_status_t wanted)
{
    if (kv_wait(op) != wanted)
        fail_msg("%s: %s", kv_status_name(kv_op_status(op)), kv_op_detail(op));
    assert_non_null(strstr(kv_op_detail(op), side.client->remotes[1].address));
    assert_non_null(strstr(kv_op_detail(op), ": object object "));
    kv_op_free(op);
    for (unsigned i = 0; i < N_OBJECTS; i++) {
        bool is_there = node_of(batch->names[i]) == 0;

        if (batch->objects[i].status != (is_there ? KV_OK : wanted))
            fail_msg("%s: %s", batch->names[i], kv_status_name(batch->objects[i].status));
        if (is_there)
            assert_true(
                test_is_filled(side.memory + (size_t)i * OBJECT_BYTES, OBJECT_BYTES, i));
    }
}

/* A node that is gone when the batch begins: its connection ends at once. */
static void a_node_is_gone(void **state)
{
    struct batch batch;

    (void)state;
    open_side();
    make_batch(&batch);
    put_batch(&batch);
    for (unsigned known = 0; known < 2; known++) {
        if (known == 0)
            cluster_end(&cluster, 1);
        check_batch(begin_get(&batch, 0), &batch, KV_UNREACHABLE);
        memset(side.memory, 0, N_OBJECTS * OBJECT_BYTES);
    }
    close_side();
}

/* A node that was connected and says nothing any more: given up while others go on. */
static void a_node_falls_silent(void **state)
{
    struct batch batch;
    struct kv_op *op;

    (void)state;
    open_side();
    make_batch(&batch);
    put_batch(&batch);
    rule(FAULT_OUT, KV_WIRE_REQUEST, KV_OP_OBJECT_GET, 0, 0);
    op = begin_get(&batch, 0);
    kv_poll(side.client);
    assert_int_equal(kv_op_status(op), KV_IN_PROGRESS);
    lose(1);
    fault_clear(side.transport); /* node 0 is asked again */
    check_batch(op, &batch, KV_UNREACHABLE);
    close_side();
}

/* A node that does not answer hello: only its objects wait, to the deadline. */
static void a_node_does_not_connect(void **state)
{
    struct batch batch;
    struct kv_op *op;

    (void)state;
    open_side();
    make_batch(&batch);
    put_batch(&batch);
    lose(1);
    rule(FAULT_OUT, KV_WIRE_REQUEST, KV_OP_HELLO, 0, 0);
    op = begin_get(&batch, 60000);
    for (unsigned i = 0; i < N_OBJECTS; i++)
        while (node_of(batch.names[i]) == 0 && batch.objects[i].status == KV_IN_PROGRESS &&
               kv_op_status(op) == KV_IN_PROGRESS)
            kv_client_wait(side.client, 1000);
    for (unsigned i = 0; i < N_OBJECTS; i++)
        assert_int_equal(batch.objects[i].status,
                         node_of(batch.names[i]) == 0 ? KV_OK : KV_IN_PROGRESS);
    kv_op_expire(op); /* a minute later */
    check_batch(op, &batch, KV_DEADLINE);
    close_side();
}

/* A node that comes back while the batch waits for it answers for its objects. */
static void a_node_comes_back(void **state)
{
    struct batch batch;
    struct kv_op *op;

    (void)state;
    open_side();
    make_batch(&batch);
    put_batch(&batch);
    lose(1);
    rule(FAULT_OUT, KV_WIRE_REQUEST, KV_OP_HELLO, 0, 1);
    op = begin_get(&batch, 0);
    if (kv_wait(op) != KV_OK)
        fail_msg("%s", kv_op_detail(op));
    kv_op_free(op);
    for (unsigned i = 0; i < N_OBJECTS; i++) {
        assert_int_equal(batch.objects[i].status, KV_OK);
        assert_true(test_is_filled(side.memory + (size_t)i * OBJECT_BYTES, OBJECT_BYTES, i));
    }
    close_side();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_node_falls_silent),
        cmocka_unit_test(a_node_does_not_connect),
        cmocka_unit_test(a_node_comes_back),
        /* Last: the node stays gone. */
        cmocka_unit_test(a_node_is_gone),
    };

    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, open_cluster, close_cluster);
}
