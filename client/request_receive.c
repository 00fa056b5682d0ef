/* Requests, the receiving side: messages that arrive at the client's port.
 *
 * A reply is accepted if its token is right and it has the present id of a request.  All others
 * are dropped and counted, and their data is refused.  The operation decides where a reply's
 * data is written.  When a request's reply and data have arrived, the request ends, fails, or
 * waits and is resent.
 */
#include "client/connection.h"
#include "client/control.h"
#include "client/control_message.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/owner.h"
#include "client/peer.h"
#include "client/request.h"
#include "client/request_private.h"
#include "client/state.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/pool.h"
#include "kvserver/base/token.h"
#include "kvserver/net/message.h"
#include "kvserver/net/transport.h"
#include "proto/kv_wire.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BACKOFF_MIN_US = 200,
    TEXT_BYTES = 160,
};

static struct kvc_node *node_of(struct kv_client *client, uint64_t id)
{
    uint32_t index = (id >> KVC_ID_SLOT_BITS) & ((1 << KVC_ID_NODE_BITS) - 1);

    return index < client->n_nodes ? &client->nodes[index] : NULL;
}

/* Whether the node sent the message: only it and the client know the token. */
static bool is_from(const struct kvc_node *node, const struct kv_wire_header *header)
{
    return node->state == KVC_NODE_CONNECTED && header->version == node->version &&
           kv_token_equal(&node->client_token, &header->client_token);
}

/* Returns the request that waits for this reply, or NULL.  The header is from the node that
 * its request_id names. */
static struct kvc_request *find(struct kv_client *client, const struct kv_wire_header *header)
{
    uint32_t slot = header->request_id & ((1 << KVC_ID_SLOT_BITS) - 1);
    struct kvc_request *request;

    if (slot >= kv_pool_size(client->requests))
        return NULL;
    request = kv_pool_at(client->requests, slot);
    if (!request->is_live || request->is_over || request->id != header->request_id ||
        request->header.op != header->op ||
        request->header.client_index != header->client_index ||
        request->header.session_index != header->session_index ||
        request->header.generation != header->generation)
        return NULL;
    return request;
}

static bool is_control(const struct kvc_node *node, const struct kv_wire_header *header)
{
    return (header->request_id & KVC_CONTROL_ID_BIT) != 0 && header->kind == KV_WIRE_REPLY &&
           node->control != NULL && node->control->transport == &kvc_control_transport_messages;
}

/* Returns the node whose reply this unchecked header announces; NULL if no request waits for
 * it. */
static struct kvc_node *awaited_from(struct kv_client *client,
                                     const struct kv_wire_header *header)
{
    struct kvc_node *node = node_of(client, header->request_id);
    bool is_awaited;

    if (node == NULL)
        return NULL;
    if (header->request_id & KVC_CONTROL_ID_BIT)
        is_awaited =
            is_control(node, header) && kvc_control_message_awaits(node->control, header);
    else
        is_awaited = is_from(node, header) && find(client, header) != NULL;
    return is_awaited ? node : NULL;
}

static void request_failed(struct kvc_request *request, kv_status_t status, const char *text)
{
    request->is_waiting = false;
    if (status == KV_CORRUPT)
        request->client->n_corrupt++;
    if (request->owner == NULL)
        kvc_request_end(request);
    else
        request->owner->ops->failed(request, status, text);
}

static void check_complete(struct kvc_request *request)
{
    struct kvc_owner *owner = request->owner;
    char text[TEXT_BYTES] = "";
    kv_status_t status;

    if (!request->has_reply)
        return;
    if (request->has_bulk && request->bulk_got != request->reply.bulk_bytes) {
        request_failed(request, KV_CORRUPT,
                       "the reply's data has another size than its header says");
        return;
    }
    if (request->reply.bulk_bytes > 0 && !request->has_bulk)
        return;
    request->is_waiting = false;
    if (owner == NULL) {
        kvc_request_end(request);
        return;
    }
    owner->arrived_us = kv_clock_now(request->client->loop.clock);
    if (request->reply.version >= KV_WIRE_VERSION_NODE_TIME)
        owner->node_us = request->reply.deadline_us;
    status = KV_OK;
    if (owner->request_ops->finish != NULL)
        status = owner->request_ops->finish(request, text, sizeof(text));
    if (status != KV_OK) {
        request_failed(request, status, text);
        return;
    }
    kvc_request_end(request);
    owner->ops->done(owner);
}

static void landed(void *arg, kv_status_t status)
{
    struct kvc_request *request = arg;

    request->is_landing = false;
    if (status == KV_OK && request->connection != NULL)
        kvc_node_mark_alive(request->node); /* replies may have queued behind its data */
    if (request->is_over) {
        kvc_request_release(request);
    } else if (status == KV_OK) {
        request->has_bulk = true;
        check_complete(request);
    }
    /* Otherwise the request is resent when its reply is late. */
}

/* Returns where `bytes` of the reply's data are written; 0: nowhere. */
static unsigned place(struct kvc_request *request, uint64_t bytes, struct kv_iov *ret_iov)
{
    if (request->owner == NULL || request->owner->request_ops->land == NULL)
        return 0;
    return request->owner->request_ops->land(request, bytes, ret_iov);
}

static void land(struct kvc_request *request, uint64_t bytes, struct kv_incoming *incoming)
{
    struct kv_iov iov[KV_IOV_MAX];
    unsigned n_iov = place(request, bytes, iov);
    kv_status_t status;

    if (n_iov == 0) {
        kv_incoming_refuse(incoming);
        request_failed(request, KV_CORRUPT, "data arrived that was not requested");
        return;
    }
    request->bulk_got = bytes;
    request->is_landing = true;
    status = kv_incoming_receive(incoming, iov, n_iov, landed, request);
    if (status != KV_IN_PROGRESS)
        landed(request, status);
}

/* Whether a rejected request may succeed when it is resent, and time is left.  If earlier rows
 * of a put failed and are resent, or have not been sent, the rows after them must be resent,
 * too. */
static bool is_passing(const struct kvc_request *request, kv_status_t status)
{
    const struct kvc_owner *owner = request->owner;
    uint64_t left_us, share_us;

    if (owner == NULL || status != KV_NOT_READY || owner->request_ops->awaits == NULL ||
        !owner->request_ops->awaits(request))
        return owner != NULL && status == KV_BUSY;
    left_us = owner->deadline_us > request->client->loop.now_us
                  ? owner->deadline_us - request->client->loop.now_us
                  : 0;
    share_us = (owner->deadline_us - owner->begin_us) / 8;
    if (share_us > 2 * KVC_NODE_MARGIN_MAX_US)
        share_us = 2 * KVC_NODE_MARGIN_MAX_US;
    return left_us > share_us;
}

static void lengthen_backoff(struct kvc_request *request)
{
    request->backoff_us = request->backoff_us == 0 ? BACKOFF_MIN_US : request->backoff_us * 2;
    if (request->backoff_us > KVC_BACKOFF_MAX_US)
        request->backoff_us = KVC_BACKOFF_MAX_US;
}

/* Sends the request again a little later. */
static void back_off(struct kvc_request *request)
{
    struct kv_client *client = request->client;

    lengthen_backoff(request);
    request->is_waiting = false;
    request->retry_after_us = client->retry_us;
    request->resend_us = client->loop.now_us + request->backoff_us;
    kvc_loop_set_timer(&client->loop, request->resend_us);
}

/* The node had no buffer for a batch: its requests are sent again, however many still wait. */
static void on_busy_batch(struct kv_client *client, uint64_t batch_id)
{
    bool is_known = false;

    for (uint32_t i = 0; i < kv_pool_size(client->requests); i++) {
        struct kvc_request *request = kv_pool_at(client->requests, i);

        if (request->is_live && !request->is_over && request->is_waiting &&
            request->batch_id != 0 && request->batch_id == batch_id) {
            back_off(request);
            is_known = true;
        }
    }
    client->n_dropped += !is_known;
}

/* Rows before a put's are missing: it waits without its credit and its memory, which the put
 * that brings them may need. */
static bool requeue(struct kvc_request *request)
{
    const struct kvc_loop *loop = &request->client->loop;

    lengthen_backoff(request);
    return request->owner->request_ops->requeue(request, loop->now_us + request->backoff_us);
}

static void
on_failure(struct kvc_request *request, const struct kv_wire_header *header, const char *body)
{
    char text[TEXT_BYTES];

    if (is_passing(request, header->status)) {
        if (header->status != KV_NOT_READY || !requeue(request))
            back_off(request);
        return;
    }
    kvc_peer_text(text, sizeof(text), body, header->body_bytes);
    if (kvc_peer_status(header->status) != (kv_status_t)header->status)
        kvc_reply_refuse(text, sizeof(text), "status: %d", header->status);
    request_failed(request, kvc_peer_status(header->status), text);
}

static void
on_reply(struct kvc_request *request, const struct kv_wire_header *header, const uint8_t *body)
{
    char text[TEXT_BYTES] = "";
    kv_status_t status = KV_OK;

    if (request->has_reply)
        return;
    request->reply = *header;
    if (header->status != KV_OK) {
        on_failure(request, header, (const char *)body);
        return;
    }
    request->has_reply = true;
    if (request->owner != NULL)
        status = request->owner->request_ops->reply(request, body, text, sizeof(text));
    if (status != KV_OK) {
        request_failed(request, status, text);
        return;
    }
    if (request->deferred != NULL) {
        struct kv_incoming *deferred = request->deferred;

        request->deferred = NULL;
        land(request, request->bulk_got, deferred);
        return;
    }
    if (!request->is_landing)
        check_complete(request);
}

/* Data of a small reply, which arrives in one message. */
static void on_small_bulk(struct kvc_request *request, const uint8_t *data, size_t bytes)
{
    struct kv_iov iov[KV_IOV_MAX];
    unsigned n_iov;

    if (request->has_bulk || request->is_landing || request->deferred != NULL)
        return;
    n_iov = place(request, bytes, iov);
    if (n_iov == 0) {
        /* It arrived before its header and cannot be kept; the request will be resent. */
        if (!request->needs_header_first || request->has_reply)
            request_failed(request, KV_CORRUPT, "data arrived that was not requested");
        return;
    }
    for (unsigned i = 0; i < n_iov; i++) {
        memcpy(iov[i].base, data, iov[i].bytes);
        data += iov[i].bytes;
    }
    request->bulk_got = bytes;
    request->has_bulk = true;
    check_complete(request);
}

/* A reply, or data that belongs to one, from its node. */
static void on_answer(struct kv_client *client,
                      const struct kv_wire_header *header,
                      const uint8_t *data,
                      size_t data_bytes)
{
    struct kvc_request *request;

    if (header->kind == KV_WIRE_REPLY && header->status == KV_BUSY && header->n_units > 0) {
        on_busy_batch(client, header->request_id);
        return;
    }
    request = find(client, header);
    if (request == NULL) {
        client->n_dropped++;
    } else if (header->kind == KV_WIRE_BULK_REPLY) {
        on_small_bulk(request, data, data_bytes);
    } else if (header->kind == KV_WIRE_REPLY) {
        on_reply(request, header, data);
        if (data_bytes > header->body_bytes && (request = find(client, header)) != NULL)
            on_small_bulk(request, data + header->body_bytes, data_bytes - header->body_bytes);
    }
}

/* Replies in one message.  Each must be the node's, and none an answer to a whole batch, which
 * looks at every request. */
static void
on_batch(struct kvc_node *node, const struct kv_wire_header *batch, const uint8_t *replies)
{
    struct kv_client *client = node->client;
    struct kv_wire_header header;
    const uint8_t *body;
    const char *why;
    uint32_t n_left = batch->n_units;

    for (size_t at = 0; at < batch->body_bytes; n_left--) {
        if (n_left == 0 ||
            kv_message_entry(KV_WIRE_REPLY, replies, batch->body_bytes, &at, &header, &body,
                             &why) != KV_OK ||
            (header.request_id & KVC_CONTROL_ID_BIT) != 0 || header.n_units != 0 ||
            node_of(client, header.request_id) != node || !is_from(node, &header)) {
            client->n_dropped++;
            return;
        }
        on_answer(client, &header, body, header.body_bytes);
    }
    client->n_dropped += n_left > 0;
}

static void on_message(
    void *owner, const void *message, size_t message_bytes, const void *data, size_t data_bytes)
{
    struct kv_client *client = owner;
    struct kv_wire_header header;
    struct kvc_node *node;
    const char *why;

    if (kv_message_check(message, message_bytes, data, data_bytes, &header, &why) != KV_OK ||
        (node = node_of(client, header.request_id)) == NULL) {
        client->n_dropped++;
        return;
    }
    if (header.request_id & KVC_CONTROL_ID_BIT) {
        if (!is_control(node, &header) || !kvc_control_message_awaits(node->control, &header)) {
            client->n_dropped++;
            return;
        }
        kvc_node_mark_alive(node);
        kvc_control_message_reply(node->control, &header, data);
        return;
    }
    if (!is_from(node, &header)) {
        client->n_dropped++;
        return;
    }
    kvc_node_mark_alive(node);
    if (header.kind == KV_WIRE_BATCH && header.version >= KV_WIRE_VERSION_REPLIES)
        on_batch(node, &header, data);
    else
        on_answer(client, &header, data, data_bytes);
}

static void pending_receive_done(void *arg, kv_status_t status)
{
    struct kvc_pending_receive *pending_receive = arg;

    kvc_list_remove(&pending_receive->of_client);
    pending_receive->node->n_pending_receives--;
    if (status == KV_OK)
        on_message(pending_receive->node->client, &pending_receive->header,
                   sizeof(pending_receive->header), pending_receive->data,
                   pending_receive->bytes);
    free(pending_receive);
}

/* A reply whose body is still at the node.  Each node has its own pending receives, so a node
 * that never sends what it announced does not block the others. */
static void receive_reply(struct kvc_node *node,
                          const struct kv_wire_header *header,
                          size_t bytes,
                          struct kv_incoming *incoming)
{
    struct kv_client *client = node->client;
    struct kv_iov iov = {.bytes = bytes};
    struct kvc_pending_receive *pending_receive = NULL;
    kv_status_t status;

    if (node->n_pending_receives < KVC_PENDING_RECEIVES_MAX && bytes <= KV_WIRE_CONTROL_MAX)
        pending_receive = malloc(sizeof(*pending_receive) + bytes);
    if (pending_receive == NULL) {
        client->n_dropped++;
        kv_incoming_refuse(incoming);
        return;
    }
    pending_receive->node = node;
    pending_receive->header = *header;
    pending_receive->bytes = bytes;
    kvc_list_append(&client->pending_receives, &pending_receive->of_client);
    node->n_pending_receives++;
    iov.base = pending_receive->data;
    status = kv_incoming_receive(incoming, &iov, 1, pending_receive_done, pending_receive);
    if (status != KV_IN_PROGRESS)
        pending_receive_done(pending_receive, status);
}

static void on_incoming(void *owner,
                        const void *message,
                        size_t message_bytes,
                        size_t data_bytes,
                        struct kv_incoming *incoming)
{
    struct kv_client *client = owner;
    struct kv_wire_header header;
    struct kvc_node *node;
    struct kvc_request *request;
    const char *why;

    if (message_bytes != sizeof(header)) {
        client->n_dropped++;
        kv_incoming_refuse(incoming);
        return;
    }
    memcpy(&header, message, sizeof(header));
    if (header.version >= KV_WIRE_VERSION_LEAST && header.version <= KV_WIRE_VERSION &&
        header.kind == KV_WIRE_REPLY && header.body_bytes == data_bytes &&
        (node = awaited_from(client, &header)) != NULL) {
        receive_reply(node, &header, data_bytes, incoming);
        return;
    }
    if (header.kind != KV_WIRE_BULK_REPLY ||
        kv_message_check(message, message_bytes, NULL, data_bytes, &header, &why) != KV_OK ||
        (node = node_of(client, header.request_id)) == NULL || !is_from(node, &header)) {
        client->n_dropped++;
        kv_incoming_refuse(incoming);
        return;
    }
    kvc_node_mark_alive(node);
    request = find(client, &header);
    if (request == NULL || request->has_bulk || request->is_landing ||
        request->deferred != NULL) {
        client->n_dropped++;
        kv_incoming_refuse(incoming);
    } else if (request->needs_header_first && !request->has_reply) {
        request->deferred = incoming;
        request->bulk_got = data_bytes;
    } else {
        land(request, data_bytes, incoming);
    }
}

static void on_failed(void *owner, void *channel_arg, kv_status_t status)
{
    struct kvc_link *link = channel_arg;

    (void)owner;
    kvc_node_fail(link->node, status, "connection lost");
}

const struct kv_port_events kvc_client_events = {
    .message = on_message,
    .incoming = on_incoming,
    .failed = on_failed,
};
