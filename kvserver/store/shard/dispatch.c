/* Dispatch: what a data thread does with a message from the network.  A message is checked
 * (kv_message_check()), its client is found and proven by its token, its session is checked,
 * and a request begins.  Bulk data is matched with the request that waits for it. */
#include "kvserver/store/shard/shard_private.h"

#include "kvserver/base/log.h"
#include "kvserver/base/token.h"
#include "kvserver/cluster/placement.h"
#include "kvserver/net/message.h"
#include "kvserver/store/shard/op.h"

#include <string.h>

/* ---- from a message to a request --------------------------------------------------------- */

/* Fails a request whose session does not exist, has ended, or has another token. */
static void refuse_session(struct kvs_request *request, const struct kvs_shard_session *session)
{
    const struct kv_wire_header *header = &request->header;
    struct kvs_shard *shard = request->shard;
    char what[KVS_ENDED_TEXT];

    if (kvs_ended_tell(&shard->ended, &header->token, shard->now_us, what))
        kvs_request_fail(request, KV_NOT_FOUND, "%s: session %u: %s", request->type->name,
                         header->session_index, what);
    else if (session == NULL || !session->used)
        kvs_request_fail(request, KV_NOT_FOUND, "%s: no session %u", request->type->name,
                         header->session_index);
    else
        kvs_request_fail(request, KV_DENIED, "%s: wrong token for session %u",
                         request->type->name, header->session_index);
}

static void cancel(struct kvs_shard_client *client, const struct kv_wire_header *header)
{
    struct kvs_request *target = kvs_shard_client_find_request(client, header->offset);

    if (target == NULL)
        return;
    if (target->state == KVS_REQUEST_WAITING || target->state == KVS_REQUEST_QUEUED ||
        target->state == KVS_REQUEST_AWAIT_BULK)
        kvs_request_end(target);
    else if (target->state == KVS_REQUEST_RECEIVING && !target->orphan)
        kvs_request_give_up(target);
}

/* Creates the request.  Returns NULL if the message was answered without one, or if the same
 * request is already in progress. */
static struct kvs_request *admit(struct kvs_shard *shard,
                                 struct kvs_shard_client *client,
                                 const struct kv_wire_header *header)
{
    const char *name = shard->ops[header->op].name;

    /* Two requests that wait for the same bulk would block each other's rows. */
    if (header->bulk_bytes > 0 &&
        kvs_shard_client_find_request(client, header->request_id) != NULL) {
        kvs_count(&shard->stats.dropped, 1);
        kvs_count(&client->dropped, 1);
        return NULL;
    }
    struct kvs_request *request =
        client->n_requests < client->credits ? kvs_request_create(shard, client, header) : NULL;
    if (request != NULL) {
        kvs_count(&shard->stats.requests, 1);
        kvs_count(&client->n_received, 1);
    } else if (header->op == KV_OP_PING && header->token_count == 0) {
        /* A busy node still answers a ping, so that clients do not take it for lost. */
        kvs_count(&shard->stats.requests, 1);
        kvs_count(&client->n_received, 1);
        kvs_shard_client_note(shard, client, header, KV_OK, "%s", "");
    } else {
        kvs_shard_client_note(shard, client, header, KV_BUSY,
                              "%s: more than %u requests in flight",
                              name != NULL ? name : "request", client->credits);
    }
    return request;
}

/* Finds and checks the shard session.  Returns false after failing the request. */
static bool enter_session(struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;
    const char *name = request->type->name;
    struct kvs_shard *shard = request->shard;
    struct kvs_shard_session *session = header->session_index < shard->n_sessions
                                            ? &shard->sessions[header->session_index]
                                            : NULL;

    if (session == NULL || !session->used || !kv_token_equal(&session->token, &header->token)) {
        refuse_session(request, session);
    } else if (session->tenant != request->client->tenant) {
        kvs_request_fail(request, KV_DENIED, "%s: session %u belongs to another tenant", name,
                         header->session_index);
    } else if (session->generation != header->generation) {
        kvs_request_fail(request, KV_STALE, "%s: session %u is at generation %u, not %u", name,
                         header->session_index, session->generation, header->generation);
    } else if (session->changing) {
        kvs_request_fail(request, KV_BUSY, "%s: session %u is being truncated", name,
                         header->session_index);
    } else if (kv_placement_epoch32(session->epoch) != header->epoch) {
        request->reply.epoch = kv_placement_epoch32(session->epoch);
        kvs_request_fail(request, KV_MOVED, "%s: placement epoch %u is not the session's %u",
                         name, header->epoch, request->reply.epoch);
    } else {
        atomic_store_explicit(&session->used_us, shard->now_us, memory_order_relaxed);
        request->session = session;
        request->session_serial = session->serial;
        return true;
    }
    return false;
}

static void begin_request(struct kvs_shard *shard,
                          struct kvs_shard_client *client,
                          const struct kv_wire_header *header,
                          const uint8_t *body,
                          bool is_of_batch)
{
    const struct kvs_op_type *type = &shard->ops[header->op];

    if (header->op == KV_OP_CANCEL) {
        cancel(client, header);
        return;
    }
    struct kvs_request *request = admit(shard, client, header);
    if (request == NULL)
        return;
    request->is_of_batch = is_of_batch;
    if (type->begin == NULL) {
        kvs_request_fail(request, KV_UNSUPPORTED, "operation %u is not a data operation",
                         header->op);
        return;
    }
    if (header->tenant != client->tenant) {
        kvs_request_fail(request, KV_DENIED,
                         "%s: tenant %u, but the client belongs to tenant %u", type->name,
                         header->tenant, client->tenant);
        return;
    }
    if (header->body_bytes < type->body_min) {
        kvs_request_fail(request, KV_INVALID, "%s: body of %u bytes, at least %u needed",
                         type->name, header->body_bytes, type->body_min);
        return;
    }
    if (header->bulk_bytes > 0 && (type->flags & KVS_OP_TAKES_BULK) == 0) {
        kvs_request_fail(request, KV_INVALID, "%s: does not accept bulk data", type->name);
        return;
    }
    if ((type->flags & KVS_OP_WRITES) && atomic_load(&shard->draining)) {
        kvs_request_fail(request, KV_DRAINING, "%s: node is draining", type->name);
        return;
    }
    if (type->flags & KVS_OP_NEEDS_SESSION) {
        if (!enter_session(request))
            return;
    }
    if (type->flags & KVS_OP_KEEPS_BODY) {
        kv_status_t status = kvs_request_keep_body(request, body);
        if (status != KV_OK) {
            kvs_request_fail(request, status, "%s: no free buffer for the request", type->name);
            return;
        }
    } else {
        request->body = (uint8_t *)body;
    }
    type->begin(request);
}

/* ---- small messages: they arrive whole --------------------------------------------------- */

static void bad_message(struct kvs_shard *shard, const char *why)
{
    kvs_count(&shard->stats.bad_messages, 1);
    KV_LOG_EVERY(KV_LOG_WARN, "message dropped: data thread %u: %s", shard->index, why);
}

/* Returns the client that sent the message, proven by its token, or NULL. */
static struct kvs_shard_client *client_of(struct kvs_shard *shard,
                                          const struct kv_wire_header *header)
{
    struct kvs_shard_client *client =
        header->client_index < shard->n_clients ? &shard->clients[header->client_index] : NULL;

    if (client == NULL || client->state != KVS_SHARD_CLIENT_OPEN ||
        !kv_token_equal(&client->token, &header->client_token)) {
        kvs_count(&shard->stats.unknown_clients, 1);
        return NULL;
    }
    if (header->version != client->version) {
        bad_message(shard, "not the version of the protocol that hello agreed on");
        return NULL;
    }
    return client;
}

/* Bulk data that arrived whole, in a message of its own or together with its request: copied to
 * the request's buffers.
 */
static void bulk_message(struct kvs_shard_client *client,
                         const struct kv_wire_header *header,
                         const uint8_t *bytes)
{
    struct kvs_request *request = kvs_shard_client_find_request(client, header->request_id);

    if (request == NULL || request->header.bulk_bytes != header->bulk_bytes)
        return; /* the request has ended or has not arrived: the client sends both again */
    if (request->deferred && request->incoming == NULL) {
        kvs_request_keep_bulk(request, bytes);
        return;
    }
    if (request->state != KVS_REQUEST_AWAIT_BULK)
        return;
    if (request->discard) {
        kvs_request_bulk_discarded(request);
        return;
    }
    for (unsigned i = 0; i < request->n_iov; bytes += request->iov[i++].bytes)
        memcpy(request->iov[i].base, bytes, request->iov[i].bytes);
    kvs_request_received(request, KV_OK);
}

/* Begins the requests of a batch.  They are the client's that sent it: an entry cannot name
 * another. */
static void begin_batch(struct kvs_shard *shard,
                        struct kvs_shard_client *client,
                        const struct kv_wire_header *batch,
                        const uint8_t *entries)
{
    struct kv_wire_header header;
    const uint8_t *body;
    const char *why = "batch: not as many requests as its header says";
    uint32_t n_left = batch->n_units;

    for (size_t at = 0; at < batch->body_bytes; n_left--) {
        if (n_left == 0 || kv_message_entry(KV_WIRE_REQUEST, entries, batch->body_bytes, &at,
                                            &header, &body, &why) != KV_OK) {
            bad_message(shard, why);
            return;
        }
        if (client_of(shard, &header) != client) {
            bad_message(shard, "batch: a request of another client");
            return;
        }
        begin_request(shard, client, &header, body, true);
    }
    if (n_left > 0)
        bad_message(shard, why);
}

static void on_message(
    void *owner, const void *message, size_t message_bytes, const void *body, size_t body_bytes)
{
    struct kvs_shard *shard = owner;
    struct kv_wire_header header;
    const char *why;

    if (kv_message_check(message, message_bytes, body, body_bytes, &header, &why) != KV_OK) {
        bad_message(shard, why);
        return;
    }
    if (header.kind != KV_WIRE_REQUEST && header.kind != KV_WIRE_BULK_REQUEST &&
        header.kind != KV_WIRE_BATCH) {
        bad_message(shard, "unexpected kind of message");
        return;
    }
    struct kvs_shard_client *client = client_of(shard, &header);
    if (client == NULL)
        return;
    client->heard_us = shard->now_us;
    if (header.kind == KV_WIRE_BULK_REQUEST) {
        bulk_message(client, &header, body);
        return;
    }
    if (header.kind == KV_WIRE_BATCH) {
        begin_batch(shard, client, &header, body);
        return;
    }
    begin_request(shard, client, &header, body, false);
    if (body_bytes > header.body_bytes)
        bulk_message(client, &header, (const uint8_t *)body + header.body_bytes);
}

/* ---- large messages: they are announced, and received into a buffer or refused ----------- */

static void free_pending_receive(struct kvs_pending_receive *pending_receive)
{
    struct kvs_shard *shard = pending_receive->shard;
    struct kvs_shard_client *client = pending_receive->client;

    client->n_pending_receives--;
    pending_receive->client = NULL;
    kv_pool_put(shard->bodies, pending_receive->body);
    kv_pool_put(shard->pending_receives, pending_receive);
    kvs_shard_client_settle(client);
}

static void on_received(void *arg, kv_status_t status)
{
    struct kvs_pending_receive *pending_receive = arg;

    if (status == KV_OK && pending_receive->client->state == KVS_SHARD_CLIENT_OPEN)
        on_message(pending_receive->shard, &pending_receive->header,
                   sizeof(pending_receive->header), pending_receive->body,
                   pending_receive->bytes);
    free_pending_receive(pending_receive);
}

static void receive_request(struct kvs_shard_client *client,
                            struct kvs_shard *shard,
                            const struct kv_wire_header *header,
                            size_t bytes,
                            struct kv_incoming *incoming)
{
    struct kvs_pending_receive *pending_receive = NULL;
    const char *name = shard->ops[header->op].name;

    client->heard_us = shard->now_us;
    if (bytes <= KV_WIRE_BODY_MAX && client->n_pending_receives < KVS_PENDING_RECEIVES_CLIENT &&
        kvs_n_free(shard->bodies) > KVS_BODIES_KEPT)
        pending_receive = kv_pool_get(shard->pending_receives);
    if (pending_receive == NULL) {
        kv_incoming_refuse(incoming);
        kvs_shard_client_note(shard, client, header, KV_BUSY,
                              "%s: no free buffer for a request of %zu bytes",
                              name != NULL ? name : "request", bytes);
        return;
    }
    *pending_receive = (struct kvs_pending_receive){
        .shard = shard,
        .client = client,
        .since_us = shard->now_us,
        .header = *header,
        .bytes = bytes,
        .body = kv_pool_get(shard->bodies),
    };
    client->n_pending_receives++;
    struct kv_iov iov = {pending_receive->body, bytes};
    kv_status_t status = kv_incoming_receive(incoming, &iov, 1, on_received, pending_receive);
    if (status != KV_IN_PROGRESS)
        on_received(pending_receive, status);
}

static void on_incoming(void *owner,
                        const void *message,
                        size_t message_bytes,
                        size_t bytes,
                        struct kv_incoming *incoming)
{
    struct kvs_shard *shard = owner;
    struct kv_wire_header header;
    const char *why;
    struct kvs_shard_client *client = NULL;

    if (kv_message_check_header(message, message_bytes, bytes, &header, &why) != KV_OK)
        bad_message(shard, why);
    else if (header.kind != KV_WIRE_REQUEST && header.kind != KV_WIRE_BULK_REQUEST &&
             header.kind != KV_WIRE_BATCH)
        bad_message(shard, "unexpected kind of large message");
    else
        client = client_of(shard, &header);
    if (client == NULL) {
        kv_incoming_refuse(incoming);
        return;
    }
    if (header.kind != KV_WIRE_BULK_REQUEST) {
        receive_request(client, shard, &header, bytes, incoming);
        return;
    }

    struct kvs_request *request = kvs_shard_client_find_request(client, header.request_id);
    if (request != NULL) {
        if (request->state == KVS_REQUEST_AWAIT_BULK && request->header.bulk_bytes == bytes)
            kvs_request_receive_bulk(request, incoming);
        else if (request->deferred && request->incoming == NULL &&
                 request->header.bulk_bytes == bytes)
            request->incoming = incoming;
        else
            kv_incoming_refuse(incoming);
        return;
    }
    /* The bulk overtook its request: keep it for a while. */
    if (!kvs_early_bulk_keep(shard, client, header.request_id, incoming, bytes))
        kv_incoming_refuse(incoming);
}

static void on_failed(void *owner, void *channel_arg, kv_status_t status)
{
    struct kvs_shard *shard = owner;

    (void)status;
    kvs_count(&shard->stats.failed_channels, 1);
    kvs_shard_client_lost(shard, channel_arg);
}

const struct kv_port_events kvs_shard_events = {on_message, on_incoming, on_failed};
