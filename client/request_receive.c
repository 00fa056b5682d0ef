/* What comes to the client's port.
 *
 * An answer is believed by its token, and belongs to the trip that has its id now; everything
 * else is dropped and counted, its data refused.  An answer's data lands where its operation
 * says.  A trip whose answer and data are there ends, or fails, or waits and is sent again.
 */
#include "client/client.h"
#include "client/connection.h"
#include "client/control.h"
#include "client/control_message.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/owner.h"
#include "client/request.h"
#include "client/request_private.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/pool.h"
#include "kvserver/base/token.h"
#include "kvserver/net/message.h"
#include "kvserver/net/transport.h"
#include "proto/kv_wire.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BACKOFF_MIN_US = 200,
    TEXT_BYTES = 160,
};

static struct kv_remote *remote_of(struct kv_client *client, uint64_t id)
{
    uint32_t index = (id >> ID_SLOT_BITS) & ((1 << ID_REMOTE_BITS) - 1);

    return index < client->n_remotes ? &client->remotes[index] : NULL;
}

/* Whether that node sent it: nobody else knows the token, and another node has another one. */
static bool is_from(const struct kv_remote *remote, const struct kv_wire_header *header)
{
    return remote->state == KV_REMOTE_CONNECTED &&
           kv_token_equal(&remote->client_token, &header->client_token);
}

/* The trip that waits for this answer, or NULL.  The header is from the trip's node. */
static struct kv_trip *find(struct kv_client *client, const struct kv_wire_header *header)
{
    uint32_t slot = header->request_id & ((1 << ID_SLOT_BITS) - 1);
    struct kv_trip *trip;

    if (slot >= kv_pool_size(client->trips))
        return NULL;
    trip = kv_pool_at(client->trips, slot);
    if (!trip->is_live || trip->is_over || trip->id != header->request_id ||
        trip->header.op != header->op || trip->header.client_index != header->client_index ||
        trip->header.session_index != header->session_index ||
        trip->header.generation != header->generation)
        return NULL;
    return trip;
}

static bool is_control(const struct kv_remote *remote, const struct kv_wire_header *header)
{
    return (header->request_id & KV_CONTROL_ID_BIT) != 0 && header->kind == KV_WIRE_REPLY &&
           remote->control != NULL && remote->control->row == &kv_control_message_row;
}

/* The node whose answer this header, unchecked, announces; NULL: nothing waits for it. */
static struct kv_remote *awaited_from(struct kv_client *client,
                                      const struct kv_wire_header *header)
{
    struct kv_remote *remote = remote_of(client, header->request_id);
    bool is_awaited;

    if (remote == NULL)
        return NULL;
    if (header->request_id & KV_CONTROL_ID_BIT)
        is_awaited =
            is_control(remote, header) && kv_control_message_awaits(remote->control, header);
    else
        is_awaited = is_from(remote, header) && find(client, header) != NULL;
    return is_awaited ? remote : NULL;
}

static void trip_failed(struct kv_trip *trip, kv_status_t status, const char *text)
{
    trip->is_waiting = false;
    if (status == KV_CORRUPT)
        trip->client->n_corrupt++;
    if (trip->owner == NULL)
        kv_trip_end(trip);
    else
        trip->owner->request_ops->failed(trip, status, text);
}

static void check_complete(struct kv_trip *trip)
{
    struct kvc_owner *owner = trip->owner;
    char text[TEXT_BYTES] = "";
    kv_status_t status;

    if (!trip->has_reply)
        return;
    if (trip->has_bulk && trip->bulk_got != trip->reply.bulk_bytes) {
        trip_failed(trip, KV_CORRUPT, "the answer's data has another size than it says");
        return;
    }
    if (trip->reply.bulk_bytes > 0 && !trip->has_bulk)
        return;
    trip->is_waiting = false;
    if (owner == NULL) {
        kv_trip_end(trip);
        return;
    }
    owner->arrived_us = kv_clock_now(trip->client->loop.clock);
    status = owner->request_ops->finish(trip, text, sizeof(text));
    if (status != KV_OK) {
        trip_failed(trip, status, text);
        return;
    }
    kv_trip_end(trip);
    owner->done(owner);
}

static void landed(void *arg, kv_status_t status)
{
    struct kv_trip *trip = arg;

    trip->is_landing = false;
    if (trip->is_over) {
        kv_trip_release(trip);
    } else if (status == KV_OK) {
        trip->has_bulk = true;
        check_complete(trip);
    }
    /* Else it is asked for again when it has not come in time. */
}

static void land(struct kv_trip *trip, uint64_t bytes, struct kv_incoming *incoming)
{
    struct kv_iov iov[KV_IOV_MAX];
    unsigned n_iov = 0;
    kv_status_t status;

    if (trip->owner != NULL)
        n_iov = trip->owner->request_ops->land(trip, bytes, iov);
    if (n_iov == 0) {
        kv_incoming_refuse(incoming);
        trip_failed(trip, KV_CORRUPT, "data came that was not asked for");
        return;
    }
    trip->bulk_got = bytes;
    trip->is_landing = true;
    status = kv_incoming_receive(incoming, iov, n_iov, landed, trip);
    if (status != KV_IN_PROGRESS)
        landed(trip, status);
}

/* Whether a refusal may turn into success by itself, and there is time for it.  Rows that were
 * put before others failed to land, or have not been sent before, are sent again: those behind
 * them have to be so, too. */
static bool is_passing(const struct kv_trip *trip, kv_status_t status)
{
    const struct kvc_owner *owner = trip->owner;
    uint64_t left_us, share_us;

    if (owner == NULL || status != KV_NOT_READY || !owner->request_ops->awaits(trip))
        return owner != NULL && status == KV_BUSY;
    left_us = owner->deadline_us > trip->client->loop.now_us
                  ? owner->deadline_us - trip->client->loop.now_us
                  : 0;
    share_us = (owner->deadline_us - owner->begin_us) / 8;
    if (share_us > 2 * NODE_MARGIN_MAX_US)
        share_us = 2 * NODE_MARGIN_MAX_US;
    return left_us > share_us;
}

kv_status_t kv_reply_refuse(char *detail, size_t detail_bytes, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(detail, detail_bytes, format, args);
    va_end(args);
    return KV_CORRUPT;
}

kv_status_t kv_peer_status(int32_t status)
{
    bool exists = status < KV_OK && strcmp(kv_status_name((kv_status_t)status), "unknown") != 0;

    return exists ? (kv_status_t)status : KV_CORRUPT;
}

void kv_peer_text(char *to, size_t to_bytes, const char *from, size_t from_bytes)
{
    size_t bytes = from_bytes < to_bytes - 1 ? from_bytes : to_bytes - 1;

    for (size_t i = 0; i < bytes; i++)
        to[i] = from[i] >= ' ' && from[i] <= '~' ? from[i] : '?';
    to[bytes] = 0;
}

void kv_peer_name(char *name)
{
    for (uint8_t *at = (uint8_t *)name; at[0] != 0; at++)
        if (at[0] < ' ' || at[0] == 0x7f)
            at[0] = '?';
        else if (at[0] == 0xc2 && at[1] >= 0x80 && at[1] <= 0x9f) /* U+0080 to U+009F */
            at[0] = at[1] = '?';
}

static void
on_failure(struct kv_trip *trip, const struct kv_wire_header *header, const char *body)
{
    struct kv_client *client = trip->client;
    char text[TEXT_BYTES];

    if (is_passing(trip, header->status)) {
        trip->backoff_us = trip->backoff_us == 0 ? BACKOFF_MIN_US : trip->backoff_us * 2;
        if (trip->backoff_us > BACKOFF_MAX_US)
            trip->backoff_us = BACKOFF_MAX_US;
        trip->is_waiting = false;
        trip->patience_us = client->retry_us;
        trip->resend_us = client->loop.now_us + trip->backoff_us;
        kvc_loop_set_timer(&client->loop, trip->resend_us);
        return;
    }
    kv_peer_text(text, sizeof(text), body, header->body_bytes);
    if (kv_peer_status(header->status) != (kv_status_t)header->status)
        kv_reply_refuse(text, sizeof(text), "status: %d", header->status);
    trip_failed(trip, kv_peer_status(header->status), text);
}

static void
on_reply(struct kv_trip *trip, const struct kv_wire_header *header, const uint8_t *body)
{
    char text[TEXT_BYTES] = "";
    kv_status_t status = KV_OK;

    if (trip->has_reply)
        return;
    trip->reply = *header;
    if (header->status != KV_OK) {
        on_failure(trip, header, (const char *)body);
        return;
    }
    trip->has_reply = true;
    if (trip->owner != NULL)
        status = trip->owner->request_ops->reply(trip, body, text, sizeof(text));
    if (status != KV_OK) {
        trip_failed(trip, status, text);
        return;
    }
    if (trip->held != NULL) {
        struct kv_incoming *held = trip->held;

        trip->held = NULL;
        land(trip, trip->bulk_got, held);
        return;
    }
    if (!trip->is_landing)
        check_complete(trip);
}

/* Data of an answer that was small enough to come at once. */
static void on_small_bulk(struct kv_trip *trip, const uint8_t *data, size_t bytes)
{
    struct kv_iov iov[KV_IOV_MAX];
    unsigned n_iov = 0;

    if (trip->has_bulk || trip->is_landing || trip->held != NULL)
        return;
    if (trip->owner != NULL)
        n_iov = trip->owner->request_ops->land(trip, bytes, iov);
    if (n_iov == 0) {
        /* Too early to know, it cannot be held: asked for again, it will come later. */
        if (!trip->lands_late || trip->has_reply)
            trip_failed(trip, KV_CORRUPT, "data came that was not asked for");
        return;
    }
    for (unsigned i = 0; i < n_iov; i++) {
        memcpy(iov[i].base, data, iov[i].bytes);
        data += iov[i].bytes;
    }
    trip->bulk_got = bytes;
    trip->has_bulk = true;
    check_complete(trip);
}

static void on_message(
    void *owner, const void *message, size_t message_bytes, const void *data, size_t data_bytes)
{
    struct kv_client *client = owner;
    struct kv_wire_header header;
    struct kv_remote *remote;
    struct kv_trip *trip;
    const char *why;

    if (kv_message_check(message, message_bytes, data, data_bytes, &header, &why) != KV_OK ||
        (remote = remote_of(client, header.request_id)) == NULL) {
        client->n_dropped++;
        return;
    }
    if (header.request_id & KV_CONTROL_ID_BIT) {
        if (!is_control(remote, &header) ||
            !kv_control_message_awaits(remote->control, &header)) {
            client->n_dropped++;
            return;
        }
        kv_remote_heard(remote);
        kv_control_message_reply(remote->control, &header, data);
        return;
    }
    if (!is_from(remote, &header)) {
        client->n_dropped++;
        return;
    }
    kv_remote_heard(remote);
    trip = find(client, &header);
    if (trip == NULL) {
        client->n_dropped++;
    } else if (header.kind == KV_WIRE_BULK_REPLY) {
        on_small_bulk(trip, data, data_bytes);
    } else if (header.kind == KV_WIRE_REPLY) {
        size_t bulk_bytes = data_bytes - header.body_bytes;

        on_reply(trip, &header, data);
        if (bulk_bytes > 0 && (trip = find(client, &header)) != NULL)
            on_small_bulk(trip, (const uint8_t *)data + header.body_bytes, bulk_bytes);
    }
}

static void receipt_done(void *arg, kv_status_t status)
{
    struct receipt *receipt = arg;

    kv_list_remove(&receipt->of_client);
    receipt->remote->n_receipts--;
    if (status == KV_OK)
        on_message(receipt->remote->client, &receipt->header, sizeof(receipt->header),
                   receipt->data, receipt->bytes);
    free(receipt);
}

/* An answer whose body is still with the node.  Each has places of its own for them: one that
 * never sends what it has announced keeps no other from answering. */
static void receive_reply(struct kv_remote *remote,
                          const struct kv_wire_header *header,
                          size_t bytes,
                          struct kv_incoming *incoming)
{
    struct kv_client *client = remote->client;
    struct kv_iov iov = {.bytes = bytes};
    struct receipt *receipt = NULL;
    kv_status_t status;

    if (remote->n_receipts < KV_RECEIPTS_MAX && bytes <= KV_WIRE_CONTROL_MAX)
        receipt = malloc(sizeof(*receipt) + bytes);
    if (receipt == NULL) {
        client->n_dropped++;
        kv_incoming_refuse(incoming);
        return;
    }
    receipt->remote = remote;
    receipt->header = *header;
    receipt->bytes = bytes;
    kv_list_append(&client->receipts, &receipt->of_client);
    remote->n_receipts++;
    iov.base = receipt->data;
    status = kv_incoming_receive(incoming, &iov, 1, receipt_done, receipt);
    if (status != KV_IN_PROGRESS)
        receipt_done(receipt, status);
}

static void on_incoming(void *owner,
                        const void *message,
                        size_t message_bytes,
                        size_t data_bytes,
                        struct kv_incoming *incoming)
{
    struct kv_client *client = owner;
    struct kv_wire_header header;
    struct kv_remote *remote;
    struct kv_trip *trip;
    const char *why;

    if (message_bytes != sizeof(header)) {
        client->n_dropped++;
        kv_incoming_refuse(incoming);
        return;
    }
    memcpy(&header, message, sizeof(header));
    if (header.version == KV_WIRE_VERSION && header.kind == KV_WIRE_REPLY &&
        header.body_bytes == data_bytes && (remote = awaited_from(client, &header)) != NULL) {
        receive_reply(remote, &header, data_bytes, incoming);
        return;
    }
    if (header.kind != KV_WIRE_BULK_REPLY ||
        kv_message_check(message, message_bytes, NULL, data_bytes, &header, &why) != KV_OK ||
        (remote = remote_of(client, header.request_id)) == NULL || !is_from(remote, &header)) {
        client->n_dropped++;
        kv_incoming_refuse(incoming);
        return;
    }
    kv_remote_heard(remote);
    trip = find(client, &header);
    if (trip == NULL || trip->has_bulk || trip->is_landing || trip->held != NULL) {
        client->n_dropped++;
        kv_incoming_refuse(incoming);
    } else if (trip->lands_late && !trip->has_reply) {
        trip->held = incoming;
        trip->bulk_got = data_bytes;
    } else {
        land(trip, data_bytes, incoming);
    }
}

static void on_failed(void *owner, void *channel_arg, kv_status_t status)
{
    struct kv_link *link = channel_arg;

    (void)owner;
    kv_remote_fail(link->remote, status, "the connection was lost");
}

const struct kv_port_events kv_client_events = {
    .message = on_message,
    .incoming = on_incoming,
    .failed = on_failed,
};
