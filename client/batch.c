#include "client/batch.h"

#include "client/connection.h"
#include "client/list.h"
#include "client/node.h"
#include "client/request.h"
#include "client/request_private.h"
#include "client/state.h"
#include "kvserver/net/message.h"
#include "kvserver/net/transport.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static_assert(sizeof(struct kv_wire_header) % KV_WIRE_BATCH_ALIGN == 0,
              "the body of an entry is aligned as its header is");
static_assert((int)KVC_BATCH_REQUEST_MAX <= (int)KV_WIRE_BODY_MAX, "what is collected fits");

static void put_batch(struct kvc_batch *batch)
{
    kvc_list_remove(&batch->of_client);
    kvc_list_append(&batch->client->free_batches, &batch->of_client);
}

static void batch_done(void *arg, kv_status_t status)
{
    struct kvc_batch *batch = arg;

    if (batch->node != NULL && status != KV_OK)
        kvc_node_fail(batch->node, status, "a message could not be delivered");
    put_batch(batch);
}

/* Returns NULL if too many are with the transport, or out of memory. */
static struct kvc_batch *take_batch(struct kvc_node *node)
{
    struct kv_client *client = node->client;
    struct kvc_batch *batch = NULL;

    if (!kvc_list_empty(&client->free_batches)) {
        batch = KVC_LIST_ENTRY(client->free_batches.next, struct kvc_batch, of_client);
        kvc_list_remove(&batch->of_client);
    } else if (client->n_batches < KVC_BATCHES_MAX) {
        batch = malloc(sizeof(*batch));
        if (batch == NULL)
            return NULL;
        client->n_batches++;
    }
    if (batch == NULL)
        return NULL;
    batch->client = client;
    batch->node = node;
    kvc_list_init(&batch->of_client);
    kvc_list_append(&client->batches, &batch->of_client);
    return batch;
}

/* Copies the messages of all collected requests, one behind the other. */
static void fill(struct kvc_batch *batch, struct kvc_connection *connection)
{
    const struct kvc_request *first =
        KVC_LIST_ENTRY(connection->collected.next, struct kvc_request, of_batch);
    struct kvc_list *link, *follow;
    uint32_t n_entries = 0;
    size_t at = 0;

    KVC_LIST_EACH(link, follow, &connection->collected)
    {
        struct kvc_request *request = KVC_LIST_ENTRY(link, struct kvc_request, of_batch);

        request->batch_id = first->id;
        memcpy(batch->body + at, &request->header, sizeof(request->header));
        at += sizeof(request->header);
        if (request->body_bytes > 0)
            memcpy(batch->body + at, request->message->body, request->body_bytes);
        memset(batch->body + at + request->body_bytes, 0,
               kv_wire_entry_bytes(request->body_bytes) - sizeof(request->header) -
                   request->body_bytes);
        at += kv_wire_entry_bytes(request->body_bytes) - sizeof(request->header);
        n_entries++;
    }
    assert(at == connection->collected_bytes && at <= sizeof(batch->body));
    batch->header = first->header;
    batch->header.kind = KV_WIRE_BATCH;
    batch->header.n_units = n_entries;
    kv_message_seal(&batch->header, batch->body, at);
}

/* Takes the collected requests out of the list and sets them to `status`. */
static void note_sent(struct kvc_connection *connection, kv_status_t status)
{
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, &connection->collected)
    {
        struct kvc_request *request = KVC_LIST_ENTRY(link, struct kvc_request, of_batch);

        kvc_list_remove(&request->of_batch);
        kvc_request_sent(request, status);
    }
}

/* Sends each collected request in a message of its own. */
static void send_each(struct kvc_connection *connection)
{
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, &connection->collected)
    {
        struct kvc_request *request = KVC_LIST_ENTRY(link, struct kvc_request, of_batch);

        kvc_list_remove(&request->of_batch);
        kvc_request_sent(request, kvc_request_hand_over(request));
    }
}

static void flush(struct kvc_connection *connection)
{
    struct kvc_list *collected = &connection->collected;
    struct kvc_batch *batch = NULL;
    kv_status_t status;

    kvc_list_remove(&connection->of_collecting);
    if (!kvc_list_empty(collected) && collected->next != collected->previous)
        batch = take_batch(connection->link.node);
    if (batch == NULL) {
        send_each(connection);
    } else {
        fill(batch, connection);
        status = kv_channel_send(connection->channel, &batch->header, sizeof(batch->header),
                                 batch->body, batch->header.body_bytes, batch_done, batch);
        if (status != KV_IN_PROGRESS)
            put_batch(batch);
        note_sent(connection, status);
    }
    connection->collected_bytes = 0;
    connection->n_collected = 0;
}

void kvc_request_collect(struct kvc_request *request)
{
    struct kvc_connection *connection = request->connection;
    const size_t bytes = kv_wire_entry_bytes(request->body_bytes);
    const bool fits = request->header.bulk_bytes == 0 && bytes <= KVC_BATCH_REQUEST_MAX;

    /* What is sent alone must not overtake what was collected. */
    if (!fits || connection->collected_bytes + bytes > KV_WIRE_BODY_MAX ||
        connection->n_collected == KV_WIRE_ENTRIES_MAX)
        flush(connection);
    if (!fits) {
        kvc_request_send(request);
        return;
    }
    if (!kvc_request_prepare(request))
        return;
    kvc_list_append(&connection->collected, &request->of_batch);
    connection->collected_bytes += bytes;
    connection->n_collected++;
    kvc_list_remove(&connection->of_collecting);
    kvc_list_append(&request->client->collecting, &connection->of_collecting);
}

void kvc_batches_flush(struct kv_client *client)
{
    while (!kvc_list_empty(&client->collecting))
        flush(KVC_LIST_ENTRY(client->collecting.next, struct kvc_connection, of_collecting));
}

void kvc_batches_lose(struct kvc_node *node)
{
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, &node->client->batches)
    {
        struct kvc_batch *batch = KVC_LIST_ENTRY(link, struct kvc_batch, of_client);

        if (batch->node == node)
            batch->node = NULL;
    }
}

static void free_all(struct kvc_list *batches)
{
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, batches)
    free(KVC_LIST_ENTRY(link, struct kvc_batch, of_client));
    kvc_list_init(batches);
}

void kvc_batches_fini(struct kv_client *client)
{
    free_all(&client->batches);
    free_all(&client->free_batches);
}
