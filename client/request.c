/* Requests, the sending side: memory of requests and messages, sending, resending, and release.
 * The receiving side is request_receive.c.
 */
#include "client/request.h"

#include "client/buffer.h"
#include "client/connection.h"
#include "client/control_message.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/request_private.h"
#include "client/state.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/pool.h"
#include "kvserver/cluster/placement.h"
#include "kvserver/net/message.h"
#include "kvserver/net/transport.h"
#include "proto/kv_wire.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    ID_ATTEMPT_SHIFT = KVC_ID_SLOT_BITS + KVC_ID_NODE_BITS,
    NO_SLOT = 0xffff,
    PAGE_BYTES = 4096,
    RETRY_DOUBLINGS = 8,
};
static_assert((int)KVC_REQUESTS_MAX < (int)NO_SLOT, "a request's slot fits its id");
static_assert((int)KV_NODES_MAX <= 1 << KVC_ID_NODE_BITS, "a node's index fits a request's id");

/* ---- memory ------------------------------------------------------------------------------ */

kv_status_t kvc_requests_init(struct kv_client *client)
{
    client->requests = kv_pool_create(KVC_REQUESTS_MAX, sizeof(struct kvc_request));
    client->cancel_messages = calloc(KVC_CANCEL_MESSAGES, sizeof(*client->cancel_messages));
    return client->requests != NULL && client->cancel_messages != NULL ? KV_OK : KV_NO_MEMORY;
}

static struct kvc_message *create_large_message(struct kv_client *client)
{
    const size_t bytes = (sizeof(struct kvc_message) + KV_WIRE_BODY_MAX + PAGE_BYTES - 1) /
                         PAGE_BYTES * PAGE_BYTES;
    struct kv_mapping *mapping;
    struct kvc_message *message;
    void *memory;

    if (client->n_large >= KVC_MESSAGES_LARGE_MAX ||
        client->transport->ops->alloc(client->transport, bytes, &memory, &mapping) != KV_OK)
        return NULL;
    client->n_large++;
    message = memory;
    message->mapping = mapping;
    return message;
}

static void free_message(struct kv_client *client, struct kvc_message *message)
{
    if (message != NULL && message->is_large)
        client->transport->ops->unmap(client->transport, message->mapping);
    else
        free(message);
}

static void free_messages(struct kv_client *client, struct kvc_message *message)
{
    while (message != NULL) {
        struct kvc_message *next = message->next;

        free_message(client, message);
        message = next;
    }
}

void kvc_requests_fini(struct kv_client *client)
{
    struct kvc_list *link, *follow;

    if (client->requests != NULL) {
        for (uint32_t i = 0; i < kv_pool_size(client->requests); i++) {
            struct kvc_request *request = kv_pool_at(client->requests, i);

            if (request->is_live) {
                free_message(client, request->message);
                kvc_buffer_release(request->buffer);
            }
        }
    }
    KVC_LIST_EACH(link, follow, &client->pending_receives)
    free(KVC_LIST_ENTRY(link, struct kvc_pending_receive, of_client));
    kvc_list_init(&client->pending_receives);
    free_messages(client, client->free_small);
    free_messages(client, client->free_large);
    kv_pool_destroy(client->requests);
    free(client->cancel_messages);
    client->cancel_messages = NULL;
    client->free_small = client->free_large = NULL;
    client->requests = NULL;
}

bool kvc_request_message(struct kvc_request *request, size_t bytes)
{
    struct kv_client *client = request->client;
    bool is_large = bytes > KVC_MESSAGE_SMALL;
    struct kvc_message **free_list = is_large ? &client->free_large : &client->free_small;
    struct kvc_message *message = *free_list;

    assert(bytes <= KV_WIRE_BODY_MAX && request->message == NULL);
    if (message != NULL) {
        *free_list = message->next;
    } else {
        message = is_large ? create_large_message(client)
                           : malloc(sizeof(*message) + KVC_MESSAGE_SMALL);
        if (message == NULL)
            return false;
    }
    message->is_large = is_large;
    for (unsigned i = 0; i < KVC_SENDS; i++)
        message->sends[i].busy = false;
    request->message = message;
    return true;
}

static void message_put(struct kv_client *client, struct kvc_message *message)
{
    struct kvc_message **free_list =
        message->is_large ? &client->free_large : &client->free_small;

    message->next = *free_list;
    *free_list = message;
}

struct kvc_request *kvc_request_take(struct kvc_connection *connection,
                                     enum kv_priority priority,
                                     struct kvc_owner *owner)
{
    struct kv_client *client = connection->link.node->client;
    uint32_t n_left = kv_pool_size(client->requests) - kv_pool_used(client->requests);
    struct kvc_request *request = NULL;

    /* A ping to a node that does not reply is sent whatever else is in flight. */
    if (owner == NULL || n_left > client->n_nodes)
        request = kv_pool_get(client->requests);
    if (request == NULL)
        return NULL;
    memset(request, 0, sizeof(*request));
    kvc_list_init(&request->of_owner);
    kvc_list_init(&request->of_batch);
    request->client = client;
    request->node = connection->link.node;
    request->connection = connection;
    request->priority = priority;
    request->is_live = true;
    request->retry_after_us = client->retry_us;
    connection->in_flight[priority]++;
    connection->n_in_flight++;
    request->node->n_requests++;
    if (owner != NULL) {
        request->owner = owner;
        request->buffer = owner->buffer;
        kvc_buffer_hold(request->buffer);
        kvc_list_append(&owner->requests, &request->of_owner);
    }
    return request;
}

void kvc_request_release(struct kvc_request *request)
{
    struct kv_client *client = request->client;

    if (!request->is_over || request->is_landing)
        return;
    if (request->message != NULL)
        for (unsigned i = 0; i < KVC_SENDS; i++)
            if (request->message->sends[i].busy)
                return;
    if (request->connection != NULL) {
        request->connection->in_flight[request->priority]--;
        request->connection->n_in_flight--;
    }
    if (request->message != NULL)
        message_put(client, request->message);
    kvc_buffer_release(request->buffer);
    request->node->n_requests--;
    if (request->is_moving)
        request->node->bulk_moving -= request->header.bulk_bytes;
    request->is_live = false;
    request->message = NULL;
    kv_pool_put(client->requests, request);
    client->loop.must_dispatch = true;
}

static void refuse_deferred(struct kvc_request *request)
{
    struct kv_incoming *deferred = request->deferred;

    request->deferred = NULL;
    if (deferred != NULL)
        kv_incoming_refuse(deferred);
}

/* If it was collected and is not yet sent (batch.h), it will not be. */
static void uncollect(struct kvc_request *request)
{
    if (kvc_list_empty(&request->of_batch))
        return;
    kvc_list_remove(&request->of_batch);
    request->connection->collected_bytes -= kv_wire_entry_bytes(request->body_bytes);
    request->connection->n_collected--;
}

void kvc_request_end(struct kvc_request *request)
{
    refuse_deferred(request);
    uncollect(request);
    kvc_list_remove(&request->of_owner);
    if (request->header.op == KV_OP_OBJECT_PUT && request->connection != NULL)
        kvc_connection_put_end(request->connection, request->header.put_number);
    if (request->node->ping == request)
        request->node->ping = NULL;
    request->owner = NULL;
    request->is_waiting = false;
    request->is_over = true;
    kvc_request_release(request);
}

/* ---- out --------------------------------------------------------------------------------- */

static void send_done(void *arg, kv_status_t status)
{
    struct kvc_send *send = arg;
    struct kvc_request *request = send->request;

    send->busy = false;
    if (status != KV_OK && request->connection != NULL)
        kvc_node_fail(request->node, status, "a message could not be delivered");
    kvc_request_release(request);
}

static void cancel_message_done(void *arg, kv_status_t status)
{
    struct kvc_cancel_message *cancel_message = arg;

    (void)status;
    cancel_message->busy = false;
}

static uint64_t make_id(const struct kvc_node *node, uint32_t slot)
{
    uint64_t id = ++node->client->attempts << ID_ATTEMPT_SHIFT |
                  (uint64_t)node->index << KVC_ID_SLOT_BITS | slot;

    return id & ~KVC_CONTROL_ID_BIT;
}

/* The deadline for the node is a little earlier, so that its reply, which names missing rows,
 * arrives in time. */
static uint32_t node_deadline(const struct kv_client *client, const struct kvc_owner *owner)
{
    uint64_t left = client->peer_timeout_us;
    uint64_t margin;

    if (owner != NULL)
        left = kvc_loop_left_us(&client->loop, owner->deadline_us);
    margin = left / 16 < KVC_NODE_MARGIN_MAX_US ? left / 16 : KVC_NODE_MARGIN_MAX_US;
    left -= margin;
    return left < UINT32_MAX ? (uint32_t)left : UINT32_MAX;
}

/* Sends a cancel message, best effort. */
static void send_cancel(struct kvc_request *request)
{
    struct kv_client *client = request->client;
    struct kvc_node *node = request->node;
    struct kvc_cancel_message *cancel_message = NULL;

    if (request->connection == NULL || node->state != KVC_NODE_CONNECTED ||
        client->loop.is_closing)
        return;
    for (unsigned i = 0; i < KVC_CANCEL_MESSAGES && cancel_message == NULL; i++)
        if (!client->cancel_messages[i].busy)
            cancel_message = &client->cancel_messages[i];
    if (cancel_message == NULL)
        return;
    cancel_message->header = (struct kv_wire_header){
        .version = (uint16_t)node->version,
        .kind = KV_WIRE_REQUEST,
        .op = KV_OP_CANCEL,
        .request_id = make_id(node, NO_SLOT),
        .client_index = node->client_index,
        .tenant = client->tenant,
        .client_token = node->client_token,
        .epoch = kv_placement_epoch32(client->map->epoch),
        .deadline_us = node_deadline(client, NULL),
        .offset = request->id,
    };
    kv_message_seal(&cancel_message->header, NULL, 0);
    cancel_message->busy = true;
    if (kv_channel_send(request->connection->channel, &cancel_message->header,
                        sizeof(cancel_message->header), NULL, 0, cancel_message_done,
                        cancel_message) != KV_IN_PROGRESS)
        cancel_message->busy = false;
}

static struct kvc_send *free_send(struct kvc_request *request, const struct kvc_send *other)
{
    for (unsigned i = 0; i < KVC_SENDS; i++) {
        struct kvc_send *send = &request->message->sends[i];

        if (!send->busy && send != other)
            return send;
    }
    return NULL;
}

static kv_status_t
hand_over(struct kvc_request *request, struct kvc_send *send, const void *data, size_t bytes)
{
    kv_status_t status;

    send->request = request;
    send->busy = true;
    status = kv_channel_send(request->connection->channel, &send->header, sizeof(send->header),
                             data, bytes, send_done, send);
    if (status != KV_IN_PROGRESS)
        send->busy = false;
    return status;
}

static kv_status_t hand_over_pair(struct kvc_request *request, struct kvc_send *send)
{
    kv_status_t status;

    send->request = request;
    send->busy = true;
    send->pair[0] = (struct kv_iov){request->message->body, request->body_bytes};
    send->pair[1] = (struct kv_iov){(void *)request->bulk, request->header.bulk_bytes};
    status = kv_channel_send_pair(request->connection->channel, &send->header,
                                  sizeof(send->header), send->pair, send_done, send);
    if (status != KV_IN_PROGRESS)
        send->busy = false;
    return status;
}

/* Sets the header fields that all requests have in common. */
static void address_request(struct kvc_request *request)
{
    const struct kv_client *client = request->client;
    const struct kvc_node *node = request->node;
    struct kv_wire_header *header = &request->header;

    header->version = (uint16_t)node->version;
    header->kind = KV_WIRE_REQUEST;
    header->request_id = request->id;
    header->client_index = node->client_index;
    header->tenant = client->tenant;
    header->client_token = node->client_token;
    header->epoch = kv_placement_epoch32(client->map->epoch);
    header->put_settled = request->connection->put_settled;
    header->deadline_us = node_deadline(client, request->owner);
    if (request->owner != NULL)
        request->owner->ops->address(request, header);
}

bool kvc_request_prepare(struct kvc_request *request)
{
    struct kv_client *client = request->client;
    struct kvc_node *node = request->node;
    struct kvc_send *first = free_send(request, NULL);

    /* Resending large data while the first copy is in transfer would only slow it down. */
    request->resend_us = client->loop.now_us + request->retry_after_us +
                         request->header.bulk_bytes / KVC_BULK_SLOWEST;
    kvc_loop_set_timer(&client->loop, request->resend_us);
    if (request->connection == NULL || node->failure != KV_OK || first == NULL ||
        free_send(request, first) == NULL)
        return false;
    if (request->is_waiting)
        send_cancel(request);
    if (request->retry_after_us < client->retry_us * RETRY_DOUBLINGS)
        request->retry_after_us *= 2;

    refuse_deferred(request);
    request->has_reply = request->has_bulk = false;
    request->id = make_id(node, kv_pool_index(client->requests, request));
    request->batch_id = 0;
    address_request(request);
    kv_message_seal(&request->header, request->message->body, request->body_bytes);
    return true;
}

kv_status_t kvc_request_hand_over(struct kvc_request *request)
{
    struct kvc_send *send = free_send(request, NULL);

    send->header = request->header;
    return hand_over(request, send, request->message->body, request->body_bytes);
}

static kv_status_t hand_over_with_bulk(struct kvc_request *request)
{
    struct kvc_send *first = free_send(request, NULL), *second = free_send(request, first);
    const struct kv_wire_header *header = &request->header;
    kv_status_t status;

    first->header = *header;
    if (request->body_bytes + header->bulk_bytes <= request->connection->channel->pair_max)
        return hand_over_pair(request, first);
    status = hand_over(request, first, request->message->body, request->body_bytes);
    if (status < KV_OK)
        return status;
    second->header = *header;
    second->header.kind = KV_WIRE_BULK_REQUEST;
    kv_message_seal(&second->header, NULL, 0);
    status = hand_over(request, second, request->bulk, header->bulk_bytes);
    if (!request->is_moving)
        request->node->bulk_moving += header->bulk_bytes;
    request->is_moving = true;
    return status;
}

void kvc_request_sent(struct kvc_request *request, kv_status_t status)
{
    struct kv_client *client = request->client;
    struct kvc_node *node = request->node;

    if (status == KV_BUSY || status == KV_NO_MEMORY) {
        /* The transport is full: try again soon. */
        request->resend_us = client->loop.now_us + KVC_BACKOFF_MAX_US;
        kvc_loop_set_timer(&client->loop, request->resend_us);
    } else if (status < KV_OK) {
        kvc_node_fail(node, status, "cannot send a message");
        return;
    }
    if (status >= KV_OK && request->owner != NULL && !request->has_left)
        request->owner->sent_us = kv_clock_now(client->loop.clock);
    request->has_left = request->has_left || status >= KV_OK;
    request->is_waiting = true;
    node->requests++;
    if (node->unanswered_since_us == 0)
        node->unanswered_since_us = client->loop.now_us;
    kvc_loop_set_timer(&client->loop, client->loop.now_us + client->peer_timeout_us / 8);
}

void kvc_request_send(struct kvc_request *request)
{
    if (!kvc_request_prepare(request))
        return;
    kvc_request_sent(request, request->header.bulk_bytes > 0 ? hand_over_with_bulk(request)
                                                             : kvc_request_hand_over(request));
}

void kvc_request_abandon(struct kvc_request *request)
{
    if (request->is_waiting)
        send_cancel(request);
    kvc_request_end(request);
}

void kvc_requests_timers(struct kv_client *client, struct kvc_owner *owner)
{
    struct kvc_list *link, *follow;

    KVC_LIST_EACH(link, follow, &owner->requests)
    {
        struct kvc_request *request = KVC_LIST_ENTRY(link, struct kvc_request, of_owner);

        if (request->resend_us <= client->loop.now_us) {
            /* Its reply is being received: it will complete, or the node will be lost. */
            if (request->is_landing)
                request->resend_us = client->loop.now_us + request->retry_after_us;
            else
                kvc_request_send(request);
        }
        kvc_loop_set_timer(&client->loop, request->resend_us);
    }
}
