/* Replies that leave together.  Those that a step makes for one client in one piece of work - of
 * the requests that arrived in one call of the port, or of one slice - are collected, and then
 * sent in one message, each with its own header.  One that is alone is sent as a message of its
 * own.  Replies are copied into the batch; their requests end when it has left, as they do when
 * a reply leaves alone, so credits and the check for clients that do not receive are the same. */
#include "kvserver/store/shard/shard_private.h"

#include "kvserver/net/message.h"

#include <assert.h>
#include <string.h>

static_assert(sizeof(struct kv_wire_header) + KVS_REPLY_JOINS_BYTES <=
                  KVS_REPLY_BATCH_BYTES / 2,
              "a batch has room for two replies");

/* Returns the bytes of a batch that arrives with its body. */
static size_t room_of(const struct kv_channel *channel)
{
    return channel->pair_max < KVS_REPLY_BATCH_BYTES ? channel->pair_max
                                                     : KVS_REPLY_BATCH_BYTES;
}

bool kvs_replies_collect(struct kvs_request *request, const void *body, size_t body_bytes)
{
    struct kvs_outbox *outbox = &request->shard->outbox;
    const size_t bytes = kv_wire_entry_bytes(body_bytes);
    const size_t room = room_of(request->client->channel);

    if (request->client->version < KV_WIRE_VERSION_REPLIES ||
        body_bytes > KVS_REPLY_JOINS_BYTES || bytes > room)
        return false;
    if (outbox->n > 0 && (outbox->client != request->client || outbox->bytes + bytes > room ||
                          outbox->n == KV_WIRE_ENTRIES_MAX))
        kvs_replies_flush(request->shard);
    outbox->client = request->client;
    outbox->requests[outbox->n++] = request;
    outbox->bytes += bytes;
    request->pair[0] = (struct kv_iov){(void *)body, body_bytes};
    return true;
}

static void send_alone(struct kvs_request *request)
{
    const kv_status_t status = kv_channel_send(
        request->client->channel, &request->reply, sizeof(request->reply),
        request->pair[0].base, request->pair[0].bytes, kvs_request_reply_sent, request);

    if (status != KV_IN_PROGRESS)
        kvs_request_reply_sent(request, status);
}

/* Returns NULL if the replies are to leave alone. */
static struct kvs_reply_batch *batch_get(struct kvs_shard *shard,
                                         const struct kvs_outbox *outbox)
{
    struct kvs_shard_client *client = outbox->client;
    struct kvs_reply_batch *batch = NULL;

    if (outbox->n > 1 && client->n_reply_batches < KVS_REPLY_BATCHES_CLIENT)
        batch = kv_pool_get(shard->reply_batches);
    if (batch == NULL)
        return NULL;
    client->n_reply_batches++;
    batch->shard = shard;
    batch->n = outbox->n;
    memcpy(batch->requests, outbox->requests, outbox->n * sizeof(struct kvs_request *));
    return batch;
}

/* Before its requests end: the client may go with the last of them. */
static void batch_put(struct kvs_reply_batch *batch)
{
    batch->requests[0]->client->n_reply_batches--;
    kv_pool_put(batch->shard->reply_batches, batch);
}

static void batch_sent(void *arg, kv_status_t status)
{
    struct kvs_reply_batch *batch = arg;
    struct kvs_request *requests[KV_WIRE_ENTRIES_MAX];
    const uint32_t n = batch->n;

    memcpy(requests, batch->requests, n * sizeof(requests[0]));
    batch_put(batch);
    for (uint32_t i = 0; i < n; i++)
        kvs_request_reply_sent(requests[i], status);
}

/* Copies the replies, one behind the other.  Returns their bytes. */
static size_t fill(struct kvs_reply_batch *batch)
{
    uint8_t *at = batch->body;

    for (uint32_t i = 0; i < batch->n; i++) {
        const struct kvs_request *request = batch->requests[i];
        const size_t bytes = request->pair[0].bytes;
        uint8_t *end = at + kv_wire_entry_bytes(bytes);

        memcpy(at, &request->reply, sizeof(request->reply));
        at += sizeof(request->reply);
        if (bytes > 0)
            memcpy(at, request->pair[0].base, bytes);
        memset(at + bytes, 0, (size_t)(end - at) - bytes);
        at = end;
    }
    return (size_t)(at - batch->body);
}

/* Returns false if the transport has no room for so large a message; the batch is put then. */
static bool send_batch(struct kvs_reply_batch *batch, struct kv_channel *channel)
{
    const size_t bytes = fill(batch);
    kv_status_t status;

    batch->header = batch->requests[0]->reply;
    batch->header.kind = KV_WIRE_BATCH;
    batch->header.status = KV_OK;
    batch->header.n_units = batch->n;
    kv_message_seal(&batch->header, batch->body, bytes);
    status = kv_channel_send(channel, &batch->header, sizeof(batch->header), batch->body, bytes,
                             batch_sent, batch);
    if (status < KV_OK && status != KV_UNREACHABLE) {
        batch_put(batch);
        return false;
    }
    if (status != KV_IN_PROGRESS)
        batch_sent(batch, status);
    return true;
}

void kvs_replies_flush(struct kvs_shard *shard)
{
    if (shard->outbox.n == 0)
        return;
    struct kvs_outbox outbox = shard->outbox; /* ending a request may collect a reply */
    struct kvs_reply_batch *batch = batch_get(shard, &outbox);

    shard->outbox.n = 0;
    shard->outbox.bytes = 0;
    if (batch != NULL && send_batch(batch, outbox.client->channel))
        return;
    for (uint32_t i = 0; i < outbox.n; i++)
        send_alone(outbox.requests[i]);
}
