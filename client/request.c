#include "client/client.h"

#include "kvserver/base/token.h"
#include "kvserver/net/message.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ID_SLOT_BITS = 16,
    ID_REMOTE_BITS = 8,
    ID_ATTEMPT_SHIFT = ID_SLOT_BITS + ID_REMOTE_BITS,
    NO_SLOT = 0xffff,
    BACKOFF_MIN_US = 200,
    BACKOFF_MAX_US = 20000,
    PATIENCE_DOUBLINGS = 8,
    NODE_MARGIN_MAX_US = 50000,
    TEXT_BYTES = 160,
};
static_assert((int)KV_TRIPS_MAX < (int)NO_SLOT, "a trip's number fits its id");
static_assert((int)KV_NODES_MAX <= 1 << ID_REMOTE_BITS, "a node's number fits a trip's id");

/* An answer that is too large to come with its header, on its way. */
struct receipt {
    struct kv_list of_client;
    struct kv_remote *remote;
    struct kv_wire_header header; /* as it came, unchecked */
    size_t bytes;
    uint8_t data[] __attribute__((aligned(16)));
};

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

struct kv_trip *kv_trip_take(struct kv_lane *lane, enum kv_lane_class class, struct kv_op *op)
{
    struct kv_client *client = lane->link.remote->client;
    uint32_t n_left = kv_pool_size(client->trips) - kv_pool_lent(client->trips);
    struct kv_trip *trip = NULL;

    /* A node that owes answers is asked whether it lives, whatever else is in flight. */
    if (op == NULL || n_left > client->n_remotes)
        trip = kv_pool_get(client->trips);
    if (trip == NULL)
        return NULL;
    memset(trip, 0, sizeof(*trip));
    kv_list_init(&trip->of_op);
    trip->client = client;
    trip->remote = lane->link.remote;
    trip->lane = lane;
    trip->class = class;
    trip->is_live = true;
    trip->patience_us = client->retry_us;
    lane->in_flight[class]++;
    lane->n_in_flight++;
    trip->remote->n_trips++;
    if (op != NULL) {
        trip->op = op;
        trip->buffer = op->buffer;
        kv_buffer_hold(trip->buffer);
        kv_list_append(&op->trips, &trip->of_op);
    }
    return trip;
}

/* Releases a trip that is over, once nothing can touch memory for it. */
static void release(struct kv_trip *trip)
{
    struct kv_client *client = trip->client;

    if (!trip->is_over || trip->is_landing)
        return;
    if (trip->envelope != NULL)
        for (unsigned i = 0; i < KV_SENDS; i++)
            if (trip->envelope->sends[i].busy)
                return;
    if (trip->lane != NULL) {
        trip->lane->in_flight[trip->class]--;
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
    client->must_pump = true;
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
    kv_list_remove(&trip->of_op);
    if (trip->header.op == KV_OP_OBJECT_PUT && trip->lane != NULL)
        kv_lane_put_end(trip->lane, trip->header.put_number);
    if (trip->remote->ping == trip)
        trip->remote->ping = NULL;
    trip->op = NULL;
    trip->is_waiting = false;
    trip->is_over = true;
    release(trip);
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
    release(trip);
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
static uint32_t node_deadline(const struct kv_client *client, const struct kv_op *op)
{
    uint64_t left = client->peer_timeout_us;
    uint64_t margin;

    if (op != NULL)
        left = op->deadline_us > client->now_us ? op->deadline_us - client->now_us : 1;
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

    if (trip->lane == NULL || remote->state != KV_REMOTE_CONNECTED || client->is_closing)
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

static bool awaits_others(const struct kv_trip *trip)
{
    return trip->op != NULL && trip->op->kind->awaits != NULL && trip->op->kind->awaits(trip);
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
    header->deadline_us = node_deadline(client, trip->op);
    if (trip->op != NULL && trip->op->session != NULL) {
        const struct kv_session *session = trip->op->session;

        header->session_index = session->nodes[remote->index].index;
        header->generation = session->generation;
        header->token = session->ticket.token;
    }
    if (trip->op != NULL && trip->op->kind->awaits != NULL)
        header->snapshot = awaits_others(trip) ? header->token_begin : 0;
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
        client->now_us + trip->patience_us + trip->header.bulk_bytes / KV_BULK_SLOWEST;
    kv_client_timer(client, trip->resend_us);
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
        trip->resend_us = client->now_us + BACKOFF_MAX_US;
        kv_client_timer(client, trip->resend_us);
    } else if (status < KV_OK) {
        kv_remote_fail(remote, status, "a message cannot be sent");
        return;
    }
    if (status >= KV_OK && trip->op != NULL && !trip->has_left)
        trip->op->sent_us = kv_clock_now(client->clock);
    trip->has_left = trip->has_left || status >= KV_OK;
    trip->is_waiting = true;
    remote->requests++;
    if (remote->owed_us == 0)
        remote->owed_us = client->now_us;
    kv_client_timer(client, client->now_us + client->peer_timeout_us / 8);
}

void kv_trip_abandon(struct kv_trip *trip)
{
    if (trip->is_waiting)
        send_cancel(trip);
    kv_trip_end(trip);
}

void kv_trips_timers(struct kv_client *client, uint64_t *next_us)
{
    struct kv_list *op_link, *op_follow, *link, *follow;

    KV_LIST_EACH(op_link, op_follow, &client->ops) {
        struct kv_op *op = KV_LIST_ENTRY(op_link, struct kv_op, of_client);

        KV_LIST_EACH(link, follow, &op->trips) {
            struct kv_trip *trip = KV_LIST_ENTRY(link, struct kv_trip, of_op);

            if (trip->resend_us <= client->now_us) {
                /* What lands is an answer: it will be there, or the node is lost. */
                if (trip->is_landing)
                    trip->resend_us = client->now_us + trip->patience_us;
                else
                    kv_trip_send(trip);
            }
            if (trip->resend_us < *next_us)
                *next_us = trip->resend_us;
        }
    }
}

/* ---- in ---------------------------------------------------------------------------------- */

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
    struct kv_op *op = trip->op;

    trip->is_waiting = false;
    if (status == KV_CORRUPT)
        trip->client->n_corrupt++;
    if (op == NULL) {
        kv_trip_end(trip);
    } else if (op->kind->failed != NULL) {
        op->kind->failed(trip, status, text);
        kv_trip_end(trip);
        kv_op_check(op);
    } else {
        kv_op_fail(op, trip->remote, trip, status, "%s", text);
    }
}

static void check_complete(struct kv_trip *trip)
{
    struct kv_op *op = trip->op;
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
    if (op == NULL) {
        kv_trip_end(trip);
        return;
    }
    op->arrived_us = kv_clock_now(trip->client->clock);
    status = op->kind->finish != NULL ? op->kind->finish(trip, text, sizeof(text)) : KV_OK;
    if (status != KV_OK) {
        trip_failed(trip, status, text);
        return;
    }
    kv_trip_end(trip);
    kv_op_check(op);
}

static void landed(void *arg, kv_status_t status)
{
    struct kv_trip *trip = arg;

    trip->is_landing = false;
    if (trip->is_over) {
        release(trip);
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

    if (trip->op != NULL && trip->op->kind->land != NULL)
        n_iov = trip->op->kind->land(trip, bytes, iov);
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
    const struct kv_op *op = trip->op;
    uint64_t left_us, share_us;

    if (op == NULL || status != KV_NOT_READY || !awaits_others(trip))
        return op != NULL && status == KV_BUSY;
    left_us =
        op->deadline_us > trip->client->now_us ? op->deadline_us - trip->client->now_us : 0;
    share_us = (op->deadline_us - op->begin_us) / 8;
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

kv_status_t kv_reply_check_units(const struct kv_trip *trip,
                                 uint32_t layer,
                                 uint32_t tokens,
                                 char *detail,
                                 size_t detail_bytes)
{
    const struct kv_wire_header *reply = &trip->reply;

    if (reply->layer != layer)
        return kv_reply_refuse(detail, detail_bytes, "layer: %u", reply->layer);
    if (reply->snapshot < tokens || reply->snapshot > trip->op->session->tokens_max)
        return kv_reply_refuse(detail, detail_bytes, "snapshot: %u: %u to %u tokens are right",
                               reply->snapshot, tokens, trip->op->session->tokens_max);
    return KV_OK;
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
        trip->resend_us = client->now_us + trip->backoff_us;
        kv_client_timer(client, trip->resend_us);
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
    struct kv_op *op = trip->op;
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
    if (op != NULL)
        status = op->kind->reply(trip, body, text, sizeof(text));
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
    if (trip->op != NULL && trip->op->kind->land != NULL)
        n_iov = trip->op->kind->land(trip, bytes, iov);
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
