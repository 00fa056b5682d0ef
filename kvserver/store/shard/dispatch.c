/* What comes from the network: whose it is, whether it is sound and may be done, and the work
 * that it begins. */
#include "kvserver/store/shard/shard_private.h"

#include "kvserver/base/log.h"
#include "kvserver/base/token.h"
#include "kvserver/net/message.h"
#include "kvserver/store/shard/op.h"

#include <string.h>

/* The session that a request names is not there, or another has its place by now. */
static void refuse_session(struct kv_work *work, const struct kv_part *part)
{
    const struct kv_wire_header *header = &work->request;
    struct kv_data *data = work->data;
    char what[KV_ENDED_TEXT];

    if (kv_ended_tell(&data->ended, &header->token, data->now_us, what))
        kv_work_fail(work, KV_NOT_FOUND, "%s: session %u: %s", work->row->name,
                     header->session_index, what);
    else if (part == NULL || !part->used)
        kv_work_fail(work, KV_NOT_FOUND, "%s: no session %u", work->row->name,
                     header->session_index);
    else
        kv_work_fail(work, KV_DENIED, "%s: the token is not session %u's", work->row->name,
                     header->session_index);
}

static void cancel(struct kv_peer *peer, const struct kv_wire_header *header)
{
    struct kv_work *target = kv_peer_find_work(peer, header->offset);

    if (target == NULL)
        return;
    if (target->state == KV_WORK_WAITING || target->state == KV_WORK_QUEUED ||
        target->state == KV_WORK_AWAIT_BULK)
        kv_work_end(target);
    else if (target->state == KV_WORK_RECEIVING && !target->orphan)
        kv_work_give_up(target);
}

/* A work for the request; NULL: it was answered without one, or is under way already. */
static struct kv_work *
admit(struct kv_data *data, struct kv_peer *peer, const struct kv_wire_header *header)
{
    const char *name = data->ops[header->op].name;

    /* Two works that wait for one bulk would keep each other's rows from coming. */
    if (header->bulk_bytes > 0 && kv_peer_find_work(peer, header->request_id) != NULL) {
        kv_count(&data->stats.dropped, 1);
        kv_count(&peer->dropped, 1);
        return NULL;
    }
    struct kv_work *work =
        peer->n_works < peer->credits ? kv_work_create(data, peer, header) : NULL;
    if (work != NULL) {
        kv_count(&data->stats.requests, 1);
        kv_count(&peer->requests, 1);
    } else if (header->op == KV_OP_PING && header->token_count == 0) {
        /* Whether the node lives must not depend on how busy it is. */
        kv_count(&data->stats.requests, 1);
        kv_count(&peer->requests, 1);
        kv_peer_note(data, peer, header, KV_OK, "%s", "");
    } else {
        kv_peer_note(data, peer, header, KV_BUSY, "%s: more than %u requests in flight",
                     name != NULL ? name : "request", peer->credits);
    }
    return work;
}

/* Finds the session's part.  On failure the work has failed. */
static bool enter_session(struct kv_work *work)
{
    const struct kv_wire_header *header = &work->request;
    const char *name = work->row->name;
    struct kv_data *data = work->data;
    struct kv_part *part =
        header->session_index < data->n_parts ? &data->parts[header->session_index] : NULL;

    if (part == NULL || !part->used || !kv_token_equal(&part->token, &header->token)) {
        refuse_session(work, part);
    } else if (part->tenant != work->peer->tenant) {
        kv_work_fail(work, KV_DENIED, "%s: session %u is another tenant's", name,
                     header->session_index);
    } else if (part->generation != header->generation) {
        kv_work_fail(work, KV_STALE, "%s: session %u is at generation %u, not %u", name,
                     header->session_index, part->generation, header->generation);
    } else if (part->changing) {
        kv_work_fail(work, KV_BUSY, "%s: session %u is being changed", name,
                     header->session_index);
    } else if (part->epoch != header->epoch) {
        kv_work_fail(work, KV_MOVED, "%s: placement epoch %u is not the session's %u", name,
                     header->epoch, part->epoch);
    } else {
        atomic_store_explicit(&part->used_us, data->now_us, memory_order_relaxed);
        work->part = part;
        work->part_serial = part->serial;
        return true;
    }
    return false;
}

static void begin_request(struct kv_data *data,
                          struct kv_peer *peer,
                          const struct kv_wire_header *header,
                          const uint8_t *body)
{
    const struct kv_op_row *row = &data->ops[header->op];

    if (header->op == KV_OP_CANCEL) {
        cancel(peer, header);
        return;
    }
    struct kv_work *work = admit(data, peer, header);
    if (work == NULL)
        return;
    if (row->begin == NULL) {
        kv_work_fail(work, KV_UNSUPPORTED, "operation %u is not of the data plane", header->op);
        return;
    }
    if (header->tenant != peer->tenant) {
        kv_work_fail(work, KV_DENIED, "%s: tenant %u, the client is of tenant %u", row->name,
                     header->tenant, peer->tenant);
        return;
    }
    if (header->body_bytes < row->body_min) {
        kv_work_fail(work, KV_INVALID, "%s: body of %u bytes, at least %u needed", row->name,
                     header->body_bytes, row->body_min);
        return;
    }
    if (header->bulk_bytes > 0 && (row->flags & KV_OP_TAKES_BULK) == 0) {
        kv_work_fail(work, KV_INVALID, "%s: takes no bulk data", row->name);
        return;
    }
    if ((row->flags & KV_OP_WRITES) && atomic_load(&data->draining)) {
        kv_work_fail(work, KV_DRAINING, "%s: the node is about to stop", row->name);
        return;
    }
    if (row->flags & KV_OP_NEEDS_SESSION) {
        if (!enter_session(work))
            return;
    }
    if (row->flags & KV_OP_KEEPS_BODY) {
        kv_status_t status = kv_work_keep_body(work, body);
        if (status != KV_OK) {
            kv_work_fail(work, status, "%s: no buffer for the request", row->name);
            return;
        }
    } else {
        work->body = (uint8_t *)body;
    }
    row->begin(work);
}

static void bad_message(struct kv_data *data, const char *why)
{
    kv_count(&data->stats.bad_messages, 1);
    KV_LOG_EVERY(KV_LOG_WARN, "message dropped: data thread %u: %s", data->index, why);
}

/* The client that sent it, proven by its token; NULL: none of this node's. */
static struct kv_peer *peer_of(struct kv_data *data, const struct kv_wire_header *header)
{
    struct kv_peer *peer =
        header->client_index < data->n_peers ? &data->peers[header->client_index] : NULL;

    if (peer == NULL || peer->state != KV_PEER_OPEN ||
        !kv_token_equal(&peer->token, &header->client_token)) {
        kv_count(&data->stats.unknown_clients, 1);
        return NULL;
    }
    return peer;
}

/* Bulk data that came at once, by itself or behind its request: copied to where that wants it.
 */
static void
bulk_message(struct kv_peer *peer, const struct kv_wire_header *header, const uint8_t *bytes)
{
    struct kv_work *work = kv_peer_find_work(peer, header->request_id);

    if (work == NULL || work->state != KV_WORK_AWAIT_BULK ||
        work->request.bulk_bytes != header->bulk_bytes)
        return; /* of a request that has ended, or that it overtook: the client sends again */
    if (work->discard) {
        kv_work_bulk_discarded(work);
        return;
    }
    for (unsigned i = 0; i < work->n_iov; bytes += work->iov[i++].bytes)
        memcpy(work->iov[i].base, bytes, work->iov[i].bytes);
    kv_work_received(work, KV_OK);
}

static void on_message(
    void *owner, const void *message, size_t message_bytes, const void *body, size_t body_bytes)
{
    struct kv_data *data = owner;
    struct kv_wire_header header;
    const char *why;

    if (kv_message_check(message, message_bytes, body, body_bytes, &header, &why) != KV_OK) {
        bad_message(data, why);
        return;
    }
    if (header.kind != KV_WIRE_REQUEST && header.kind != KV_WIRE_BULK_REQUEST) {
        bad_message(data, "a reply, and this is a node");
        return;
    }
    struct kv_peer *peer = peer_of(data, &header);
    if (peer == NULL)
        return;
    peer->heard_us = data->now_us;
    if (header.kind == KV_WIRE_BULK_REQUEST) {
        bulk_message(peer, &header, body);
        return;
    }
    begin_request(data, peer, &header, body);
    if (body_bytes > header.body_bytes)
        bulk_message(peer, &header, (const uint8_t *)body + header.body_bytes);
}

static void receipt_end(struct receipt *receipt)
{
    struct kv_data *data = receipt->data;
    struct kv_peer *peer = receipt->peer;

    peer->n_receipts--;
    receipt->peer = NULL;
    kv_pool_put(data->bodies, receipt->body);
    kv_pool_put(data->receipts, receipt);
    kv_peer_settle(peer);
}

static void receipt_done(void *arg, kv_status_t status)
{
    struct receipt *receipt = arg;

    if (status == KV_OK && receipt->peer->state == KV_PEER_OPEN)
        on_message(receipt->data, &receipt->header, sizeof(receipt->header), receipt->body,
                   receipt->bytes);
    receipt_end(receipt);
}

static void receive_request(struct kv_peer *peer,
                            struct kv_data *data,
                            const struct kv_wire_header *header,
                            size_t bytes,
                            struct kv_incoming *incoming)
{
    struct receipt *receipt = NULL;
    const char *name = data->ops[header->op].name;

    peer->heard_us = data->now_us;
    if (bytes <= KV_WIRE_BODY_MAX && peer->n_receipts < KV_RECEIPTS_PEER &&
        n_left(data->bodies) > KV_BODIES_KEPT)
        receipt = kv_pool_get(data->receipts);
    if (receipt == NULL) {
        kv_incoming_refuse(incoming);
        kv_peer_note(data, peer, header, KV_BUSY, "%s: no buffer for a request of %zu bytes",
                     name != NULL ? name : "request", bytes);
        return;
    }
    *receipt = (struct receipt){
        .data = data,
        .peer = peer,
        .since_us = data->now_us,
        .header = *header,
        .bytes = bytes,
        .body = kv_pool_get(data->bodies),
    };
    peer->n_receipts++;
    struct kv_iov iov = {receipt->body, bytes};
    kv_status_t status = kv_incoming_receive(incoming, &iov, 1, receipt_done, receipt);
    if (status != KV_IN_PROGRESS)
        receipt_done(receipt, status);
}

static void on_incoming(void *owner,
                        const void *message,
                        size_t message_bytes,
                        size_t bytes,
                        struct kv_incoming *incoming)
{
    struct kv_data *data = owner;
    struct kv_wire_header header;
    const char *why;
    struct kv_peer *peer = NULL;

    if (kv_message_check_header(message, message_bytes, bytes, &header, &why) != KV_OK)
        bad_message(data, why);
    else if (header.kind != KV_WIRE_REQUEST && header.kind != KV_WIRE_BULK_REQUEST)
        bad_message(data, "large, yet neither a request nor its bulk");
    else
        peer = peer_of(data, &header);
    if (peer == NULL) {
        kv_incoming_refuse(incoming);
        return;
    }
    if (header.kind == KV_WIRE_REQUEST) {
        receive_request(peer, data, &header, bytes, incoming);
        return;
    }

    struct kv_work *work = kv_peer_find_work(peer, header.request_id);
    if (work != NULL) {
        if (work->state == KV_WORK_AWAIT_BULK && work->request.bulk_bytes == bytes)
            kv_work_receive_bulk(work, incoming);
        else
            kv_incoming_refuse(incoming);
        return;
    }
    /* It overtook its request: keep it for a while. */
    if (!kv_early_bulk_keep(peer, header.request_id, incoming, bytes, data->now_us))
        kv_incoming_refuse(incoming);
}

static void on_failed(void *owner, void *channel_arg, kv_status_t status)
{
    struct kv_data *data = owner;

    (void)status;
    kv_count(&data->stats.failed_channels, 1);
    kv_peer_lost(data, channel_arg);
}

const struct kv_port_events kv_data_events = {on_message, on_incoming, on_failed};
