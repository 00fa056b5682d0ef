/* Requests on their way out: the memory of trips and their messages, sending, sending again, and
 * releasing what nothing can touch any more.  What comes back: request_receive.c.
 */
#include "client/request.h"

#include "client/buffer.h"
#include "client/client.h"
#include "client/connection.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/request_private.h"
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
    ID_ATTEMPT_SHIFT = ID_SLOT_BITS + ID_REMOTE_BITS,
    NO_SLOT = 0xffff,
    PATIENCE_DOUBLINGS = 8,
};
static_assert((int)KV_TRIPS_MAX < (int)NO_SLOT, "a trip's number fits its id");
static_assert((int)KV_NODES_MAX <= 1 << ID_REMOTE_BITS, "a node's number fits a trip's id");

/* ---- memory ------------------------------------------------------------------------------ */

kv_status_t kv_trips_init(struct kv_client *client)
{
    client->trips = kv_pool_create(KV_TRIPS_MAX, sizeof(struct kv_trip));
    return client->trips != NULL ? KV_OK : KV_NO_MEMORY;
}

static void free_envelopes(struct kv_envelope *envelope)
{
    while (envelope != NULL) {
        struct kv_envelope *next = envelope->next;

        free(envelope);
        envelope = next;
    }
}

void kv_trips_fini(struct kv_client *client)
{
    struct kv_list *link, *follow;

    if (client->trips != NULL) {
        for (uint32_t i = 0; i < kv_pool_size(client->trips); i++) {
            struct kv_trip *trip = kv_pool_at(client->trips, i);

            if (trip->is_live) {
                free(trip->envelope);
                kv_buffer_release(trip->buffer);
            }
        }
    }
    KV_LIST_EACH(link, follow, &client->receipts)
        free(KV_LIST_ENTRY(link, struct receipt, of_client));
    kv_list_init(&client->receipts);
    free_envelopes(client->free_small);
    free_envelopes(client->free_large);
    kv_pool_destroy(client->trips);
    client->free_small = client->free_large = NULL;
    client->trips = NULL;
}

bool kv_trip_envelope(struct kv_trip *trip, size_t bytes)
{
    struct kv_client *client = trip->client;
    bool is_large = bytes > KV_ENVELOPE_SMALL;
    struct kv_envelope **free_list = is_large ? &client->free_large : &client->free_small;
    struct kv_envelope *envelope = *free_list;

    assert(bytes <= KV_WIRE_BODY_MAX && trip->envelope == NULL);
    if (envelope != NULL) {
        *free_list = envelope->next;
    } else {
        if (is_large && client->n_large >= KV_ENVELOPES_LARGE_MAX)
            return false;
        envelope =
            malloc(sizeof(*envelope) + (is_large ? KV_WIRE_BODY_MAX : KV_ENVELOPE_SMALL));
        if (envelope == NULL)
            return false;
        client->n_large += is_large;
    }
    envelope->is_large = is_large;
    for (unsigned i = 0; i < KV_SENDS; i++)
        envelope->sends[i].busy = false;
    trip->envelope = envelope;
    return true;
}

static void envelope_put(struct kv_client *client, struct kv_envelope *envelope)
{
    struct kv_envelope **free_list =
        envelope->is_large ? &client->free_large : &client->free_small;

    envelope->next = *free_list;
    *free_list = envelope;
}

struct kv_trip *
kv_trip_take(struct kv_lane *lane, enum kv_priority priority, struct kvc_owner *owner)
{
    struct kv_client *client = lane->link.remote->client;
    uint32_t n_left = kv_pool_size(client->trips) - kv_pool_lent(client->trips);
    struct kv_trip *trip = NULL;

    /* A node that owes answers is asked whether it lives, whatever else is in flight. */
    if (owner == NULL || n_left > client->n_remotes)
        trip = kv_pool_get(client->trips);
    if (trip == NULL)
        return NULL;
    memset(trip, 0, sizeof(*trip));
    kv_list_init(&trip->of_owner);
    trip->client = client;
    trip->remote = lane->link.remote;
    trip->lane = lane;
    trip->priority = priority;
    trip->is_live = true;
    trip->patience_us = client->retry_us;
    lane->in_flight[priority]++;
    lane->n_in_flight++;
    trip->remote->n_trips++;
    if (owner != NULL) {
        trip->owner = owner;
        trip->buffer = owner->buffer;
        kv_buffer_hold(trip->buffer);
        kv_list_append(&owner->trips, &trip->of_owner);
    }
    return trip;
}

void kv_trip_release(struct kv_trip *trip)
{
    struct kv_client *client = trip->client;

    if (!trip->is_over || trip->is_landing)
        return;
    if (trip->envelope != NULL)
        for (unsigned i = 0; i < KV_SENDS; i++)
            if (trip->envelope->sends[i].busy)
                return;
    if (trip->lane != NULL) {
        trip->lane->in_flight[trip->priority]--;
        trip->lane->n_in_flight--;
    }
    if (trip->envelope != NULL)
        envelope_put(client, trip->envelope);
    kv_buffer_release(trip->buffer);
    trip->remote->n_trips--;
    if (trip->is_moving)
        trip->remote->bulk_moving -= trip->header.bulk_bytes;
    trip->is_live = false;
    trip->envelope = NULL;
    kv_pool_put(client->trips, trip);
    client->loop.must_dispatch = true;
}

static void refuse_held(struct kv_trip *trip)
{
    struct kv_incoming *held = trip->held;

    trip->held = NULL;
    if (held != NULL)
        kv_incoming_refuse(held);
}

void kv_trip_end(struct kv_trip *trip)
{
    refuse_held(trip);
    kv_list_remove(&trip->of_owner);
    if (trip->header.op == KV_OP_OBJECT_PUT && trip->lane != NULL)
        kv_lane_put_end(trip->lane, trip->header.put_number);
    if (trip->remote->ping == trip)
        trip->remote->ping = NULL;
    trip->owner = NULL;
    trip->is_waiting = false;
    trip->is_over = true;
    kv_trip_release(trip);
}

/* ---- out --------------------------------------------------------------------------------- */

static void send_done(void *arg, kv_status_t status)
{
    struct kv_send *send = arg;
    struct kv_trip *trip = send->trip;

    send->busy = false;
    if (status != KV_OK && trip->lane != NULL)
        kv_remote_fail(trip->remote, status, "a message was not delivered");
    else if (trip->lane != NULL)
        kv_remote_heard(trip->remote); /* its transport took it */
    kv_trip_release(trip);
}

static void notice_done(void *arg, kv_status_t status)
{
    struct kv_notice *notice = arg;

    (void)status;
    notice->busy = false;
}

static uint64_t make_id(const struct kv_remote *remote, uint32_t slot)
{
    uint64_t id = ++remote->client->attempts << ID_ATTEMPT_SHIFT |
                  (uint64_t)remote->index << ID_SLOT_BITS | slot;

    return id & ~KV_CONTROL_ID_BIT;
}

/* The node answers a little before the deadline, so that its answer (which rows are missing) is
 * here in time. */
static uint32_t node_deadline(const struct kv_client *client, const struct kvc_owner *owner)
{
    uint64_t left = client->peer_timeout_us;
    uint64_t margin;

    if (owner != NULL)
        left = kvc_loop_left_us(&client->loop, owner->deadline_us);
    margin = left / 16 < NODE_MARGIN_MAX_US ? left / 16 : NODE_MARGIN_MAX_US;
    left -= margin;
    return left < UINT32_MAX ? (uint32_t)left : UINT32_MAX;
}

/* Tells the node that nobody waits for an answer; if that cannot be said now, it is not said.
 */
static void send_cancel(struct kv_trip *trip)
{
    struct kv_client *client = trip->client;
    struct kv_remote *remote = trip->remote;
    struct kv_notice *notice = NULL;

    if (trip->lane == NULL || remote->state != KV_REMOTE_CONNECTED || client->loop.is_closing)
        return;
    for (unsigned i = 0; i < KV_NOTICES && notice == NULL; i++)
        if (!client->notices[i].busy)
            notice = &client->notices[i];
    if (notice == NULL)
        return;
    notice->header = (struct kv_wire_header){
        .kind = KV_WIRE_REQUEST,
        .op = KV_OP_CANCEL,
        .request_id = make_id(remote, NO_SLOT),
        .client_index = remote->client_index,
        .tenant = client->tenant,
        .client_token = remote->client_token,
        .epoch = client->placement.epoch,
        .deadline_us = node_deadline(client, NULL),
        .offset = trip->id,
    };
    kv_message_seal(&notice->header, NULL, 0);
    notice->busy = true;
    if (kv_channel_send(trip->lane->channel, &notice->header, sizeof(notice->header), NULL, 0,
                        notice_done, notice) != KV_IN_PROGRESS)
        notice->busy = false;
}

static struct kv_send *free_send(struct kv_trip *trip, const struct kv_send *other)
{
    for (unsigned i = 0; i < KV_SENDS; i++) {
        struct kv_send *send = &trip->envelope->sends[i];

        if (!send->busy && send != other)
            return send;
    }
    return NULL;
}

static kv_status_t
hand_over(struct kv_trip *trip, struct kv_send *send, const void *data, size_t bytes)
{
    kv_status_t status;

    send->trip = trip;
    send->busy = true;
    status = kv_channel_send(trip->lane->channel, &send->header, sizeof(send->header), data,
                             bytes, send_done, send);
    if (status != KV_IN_PROGRESS)
        send->busy = false;
    return status;
}

static kv_status_t hand_over_pair(struct kv_trip *trip, struct kv_send *send)
{
    kv_status_t status;

    send->trip = trip;
    send->busy = true;
    send->pair[0] = (struct kv_iov){trip->envelope->body, trip->body_bytes};
    send->pair[1] = (struct kv_iov){(void *)trip->bulk, trip->header.bulk_bytes};
    status = kv_channel_send_pair(trip->lane->channel, &send->header, sizeof(send->header),
                                  send->pair, send_done, send);
    if (status != KV_IN_PROGRESS)
        send->busy = false;
    return status;
}

/* What every request says, besides what the operation has put into it. */
static void address_request(struct kv_trip *trip)
{
    const struct kv_client *client = trip->client;
    const struct kv_remote *remote = trip->remote;
    struct kv_wire_header *header = &trip->header;

    header->kind = KV_WIRE_REQUEST;
    header->request_id = trip->id;
    header->client_index = remote->client_index;
    header->tenant = client->tenant;
    header->client_token = remote->client_token;
    header->epoch = client->placement.epoch;
    header->put_settled = trip->lane->put_settled;
    header->deadline_us = node_deadline(client, trip->owner);
    if (trip->owner != NULL)
        trip->owner->request_ops->address(trip, header);
}

void kv_trip_send(struct kv_trip *trip)
{
    struct kv_client *client = trip->client;
    struct kv_remote *remote = trip->remote;
    struct kv_send *first = free_send(trip, NULL);
    struct kv_send *second = free_send(trip, first);
    struct kv_wire_header *header = &trip->header;
    kv_status_t status;
    bool is_pair;

    /* Sending large data again while it still moves would only make it slower. */
    trip->resend_us =
        client->loop.now_us + trip->patience_us + trip->header.bulk_bytes / KV_BULK_SLOWEST;
    kvc_loop_set_timer(&client->loop, trip->resend_us);
    if (trip->lane == NULL || remote->failure != KV_OK || first == NULL || second == NULL)
        return;
    if (trip->is_waiting)
        send_cancel(trip);
    if (trip->patience_us < client->retry_us * PATIENCE_DOUBLINGS)
        trip->patience_us *= 2;

    refuse_held(trip);
    trip->has_reply = trip->has_bulk = false;
    trip->id = make_id(remote, kv_pool_index(client->trips, trip));
    address_request(trip);
    kv_message_seal(header, trip->envelope->body, trip->body_bytes);
    first->header = *header;
    is_pair = header->bulk_bytes > 0 &&
              trip->body_bytes + header->bulk_bytes <= trip->lane->channel->pair_max;
    status = is_pair ? hand_over_pair(trip, first)
                     : hand_over(trip, first, trip->envelope->body, trip->body_bytes);
    if (status >= KV_OK && header->bulk_bytes > 0 && !is_pair) {
        second->header = *header;
        second->header.kind = KV_WIRE_BULK_REQUEST;
        kv_message_seal(&second->header, NULL, 0);
        status = hand_over(trip, second, trip->bulk, header->bulk_bytes);
        if (!trip->is_moving)
            remote->bulk_moving += header->bulk_bytes;
        trip->is_moving = true;
    }
    if (status == KV_BUSY || status == KV_NO_MEMORY) {
        /* The transport is full: soon again. */
        trip->resend_us = client->loop.now_us + BACKOFF_MAX_US;
        kvc_loop_set_timer(&client->loop, trip->resend_us);
    } else if (status < KV_OK) {
        kv_remote_fail(remote, status, "a message cannot be sent");
        return;
    }
    if (status >= KV_OK && trip->owner != NULL && !trip->has_left)
        trip->owner->sent_us = kv_clock_now(client->loop.clock);
    trip->has_left = trip->has_left || status >= KV_OK;
    trip->is_waiting = true;
    remote->requests++;
    if (remote->owed_us == 0)
        remote->owed_us = client->loop.now_us;
    kvc_loop_set_timer(&client->loop, client->loop.now_us + client->peer_timeout_us / 8);
}

void kv_trip_abandon(struct kv_trip *trip)
{
    if (trip->is_waiting)
        send_cancel(trip);
    kv_trip_end(trip);
}

void kv_trips_timers(struct kv_client *client, struct kvc_owner *owner)
{
    struct kv_list *link, *follow;

    KV_LIST_EACH(link, follow, &owner->trips) {
        struct kv_trip *trip = KV_LIST_ENTRY(link, struct kv_trip, of_owner);

        if (trip->resend_us <= client->loop.now_us) {
            /* What lands is an answer: it will be there, or the node is lost. */
            if (trip->is_landing)
                trip->resend_us = client->loop.now_us + trip->patience_us;
            else
                kv_trip_send(trip);
        }
        kvc_loop_set_timer(&client->loop, trip->resend_us);
    }
}
