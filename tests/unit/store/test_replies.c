/* Replies that leave together, over a channel that answers as it is told to. */
#include "kvserver/store/shard/shard_private.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

enum {
    N_CLIENTS = 2,
    N_REQUESTS = 64,
    PIECE = 2, /* replies that one piece of work makes */
    MESSAGES_MAX = 128,
    BODY_BYTES = 100,
};

struct message {
    kv_transport_done_fn done;
    void *arg;
};

static struct {
    struct kvs_shard *shard;
    struct kvs_shard_client *clients;
    struct kvs_request *requests;
    uint32_t n_requests;
    struct kv_channel channel;
    kv_status_t batch_status; /* what the channel says to batches */
    unsigned n_alone, n_batches;
    struct message messages[MESSAGES_MAX]; /* with the transport */
    unsigned n_messages;
} it;

static kv_status_t channel_send(struct kv_channel *channel,
                                const void *header,
                                size_t header_bytes,
                                const void *data,
                                size_t data_bytes,
                                kv_transport_done_fn done,
                                void *arg)
{
    struct kv_wire_header copy;
    bool is_batch;

    assert_ptr_equal(channel, &it.channel);
    assert_int_equal(header_bytes, sizeof(copy));
    assert_non_null(data);
    memcpy(&copy, header, sizeof(copy));
    is_batch = copy.kind == KV_WIRE_BATCH;
    assert_true(is_batch ? data_bytes > BODY_BYTES : data_bytes == BODY_BYTES);
    if (is_batch && it.batch_status != KV_IN_PROGRESS)
        return it.batch_status;
    assert_true(it.n_messages < MESSAGES_MAX);
    it.messages[it.n_messages++] = (struct message){done, arg};
    it.n_batches += is_batch;
    it.n_alone += !is_batch;
    return KV_IN_PROGRESS;
}

static const struct kv_transport_ops ops = {.name = "told", .send = channel_send};

static int set_up(void **state)
{
    (void)state;
    memset(&it, 0, sizeof(it));
    it.shard = calloc(1, sizeof(*it.shard));
    it.clients = calloc(N_CLIENTS, sizeof(*it.clients));
    it.requests = calloc(N_REQUESTS, sizeof(*it.requests));
    if (it.shard == NULL || it.clients == NULL || it.requests == NULL)
        return -1;
    it.shard->reply_batches = kv_pool_create(KVS_REPLY_BATCHES, sizeof(struct kvs_reply_batch));
    if (it.shard->reply_batches == NULL)
        return -1;
    it.channel = (struct kv_channel){.ops = &ops, .pair_max = KVS_REPLY_BATCH_BYTES};
    it.batch_status = KV_IN_PROGRESS;
    for (uint32_t i = 0; i < N_CLIENTS; i++) {
        it.clients[i].channel = &it.channel;
        it.clients[i].version = KV_WIRE_VERSION_REPLIES;
    }
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    kv_pool_destroy(it.shard->reply_batches);
    free(it.requests);
    free(it.clients);
    free(it.shard);
    return 0;
}

/* Two replies in one piece of work.  Their requests have something else under way, and so none
 * of them ends here. */
static struct kvs_request *reply_twice(uint32_t client)
{
    static const uint8_t body[BODY_BYTES];
    struct kvs_request *first = &it.requests[it.n_requests];

    for (unsigned i = 0; i < PIECE; i++) {
        struct kvs_request *request = &it.requests[it.n_requests++];

        assert_true(it.n_requests <= N_REQUESTS);
        request->shard = it.shard;
        request->client = &it.clients[client];
        request->n_sends = 2;
        request->reply.kind = KV_WIRE_REPLY;
        request->reply.body_bytes = BODY_BYTES;
        assert_true(kvs_replies_collect(request, body, BODY_BYTES));
    }
    kvs_replies_flush(it.shard);
    return first;
}

static void finish_all(void)
{
    while (it.n_messages > 0) {
        const struct message message = it.messages[--it.n_messages];

        message.done(message.arg, KV_OK);
    }
}

/* A client that does not receive keeps some batches from others, not all; its further replies
 * go alone. */
static void one_client_has_few_batches(void **state)
{
    const unsigned n_pieces = KVS_REPLY_BATCHES + 2;

    (void)state;
    for (unsigned i = 0; i < n_pieces; i++)
        reply_twice(0);
    assert_int_equal(it.n_batches, KVS_REPLY_BATCHES_CLIENT);
    assert_int_equal(it.n_alone, PIECE * (n_pieces - KVS_REPLY_BATCHES_CLIENT));
    reply_twice(1);
    assert_int_equal(it.n_batches, KVS_REPLY_BATCHES_CLIENT + 1);

    finish_all();
    assert_int_equal(kv_pool_used(it.shard->reply_batches), 0);
    assert_int_equal(it.clients[0].n_reply_batches + it.clients[1].n_reply_batches, 0);
    for (uint32_t i = 0; i < it.n_requests; i++)
        assert_true(it.requests[i].n_sends == 1 && it.requests[i].send_status == KV_OK);
    reply_twice(0);
    assert_int_equal(it.n_batches, KVS_REPLY_BATCHES_CLIENT + 2);
    finish_all();
}

/* Memory for a batch may be short where there is enough for a reply. */
static void what_finds_no_room_goes_alone(void **state)
{
    static const kv_status_t statuses[] = {KV_NO_MEMORY, KV_BUSY, KV_INVALID};

    (void)state;
    for (size_t i = 0; i < sizeof(statuses) / sizeof(statuses[0]); i++) {
        it.batch_status = statuses[i];
        const struct kvs_request *first = reply_twice(0);

        assert_int_equal(it.n_alone, PIECE * (i + 1));
        assert_int_equal(kv_pool_used(it.shard->reply_batches), 0);
        assert_int_equal(it.clients[0].n_reply_batches, 0);
        assert_int_equal(first[0].n_sends, 2);
        finish_all();
        for (unsigned j = 0; j < PIECE; j++)
            assert_true(first[j].n_sends == 1 && first[j].send_status == KV_OK);
    }
}

/* To a client that is gone nothing is sent again. */
static void what_reaches_nobody_ends(void **state)
{
    const struct kvs_request *first;

    (void)state;
    it.batch_status = KV_UNREACHABLE;
    first = reply_twice(0);
    assert_int_equal(it.n_alone, 0);
    assert_int_equal(kv_pool_used(it.shard->reply_batches), 0);
    for (unsigned j = 0; j < PIECE; j++)
        assert_true(first[j].n_sends == 1 && first[j].send_status == KV_UNREACHABLE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(one_client_has_few_batches, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_finds_no_room_goes_alone, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_reaches_nobody_ends, set_up, tear_down),
    };

    return cmocka_run_group_tests_name("replies", tests, NULL, NULL);
}
