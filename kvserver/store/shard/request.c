/* The life of a request: creation, buffers, bulk data, reply, end.
 *
 * Every buffer comes from a pool with a limit per client, and some are reserved for requests
 * that cannot wait, so that requests which wait for data or rows never starve those that others
 * wait for. */
#include "kvserver/store/shard/shard_private.h"

#include "kvserver/net/message.h"
#include "kvserver/store/rows/residency.h"
#include "kvserver/store/shard/op.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* From now on the node waits for the client: the request counts towards its progress. */
static void hand_over(struct kvs_request *request, enum kvs_request_state state)
{
    request->state = state;
    request->since_us = request->shard->now_us;
    kvs_shard_client_due(request->shard, request->client,
                         request->since_us + request->shard->stuck_send_us);
}

struct kvs_request *kvs_request_create(struct kvs_shard *shard,
                                       struct kvs_shard_client *client,
                                       const struct kv_wire_header *header)
{
    struct kvs_request *request = kv_pool_get(shard->requests);

    if (request == NULL)
        return NULL;
    request->state = KVS_REQUEST_BEGUN;
    request->shard = shard;
    request->type = &shard->ops[header->op];
    request->client = client;
    request->next = NULL;
    request->link = NULL;
    request->queue = NULL;
    request->header = *header;
    /* Not the time at which this step began: the message may have come later. */
    request->begin_us = kv_clock_now(shard->clock);
    request->deadline_us = request->begin_us + (header->deadline_us < KV_WIRE_DEADLINE_MAX_US
                                                    ? header->deadline_us
                                                    : KV_WIRE_DEADLINE_MAX_US);
    kvs_shard_client_due(shard, client, request->deadline_us);
    request->orphan = request->is_of_batch = request->discard = request->received = false;
    request->transfer = request->coming = request->deferred = false;
    request->session = NULL;
    request->incoming = NULL;
    request->body = request->body_slot = request->bulk_slot = NULL;
    request->reply_body = request->reply_slot = request->staging = NULL;
    request->object = NULL;
    request->sends_lent = false;
    request->n_iov = request->n_pins = request->n_sends = 0;
    request->status = request->send_status = KV_OK;
    request->cursor_unit = request->cursor_row = 0;
    request->cursor_bytes = 0;
    request->serial = 0;
    request->missing = NULL;
    request->at_work = (struct kvs_work){0};
    request->work = NULL;
    request->noted = NULL;
    request->lacks_us = 0;
    memset(&request->reply, 0, sizeof(request->reply));
    request->reply.epoch = header->epoch; /* the session's, once it is known */

    request->client_next = client->requests;
    request->client_link = &client->requests;
    if (request->client_next != NULL)
        request->client_next->client_link = &request->client_next;
    client->requests = request;
    client->n_requests++;
    atomic_store_explicit(&client->in_flight, client->n_requests, memory_order_relaxed);
    atomic_store_explicit(&shard->stats.in_flight, kv_pool_used(shard->requests),
                          memory_order_relaxed);
    return request;
}

/* ---- buffers and the end ----------------------------------------------------------------- */

void kvs_request_begin_work(struct kvs_request *request)
{
    kvs_work_begin(&request->shard->store, &request->at_work);
}

void kvs_request_end_work(struct kvs_request *request)
{
    if (request->at_work.turn != 0)
        kvs_work_end(&request->shard->store, &request->at_work);
}

static void body_put(struct kvs_request *request, uint8_t *body)
{
    if (body == NULL)
        return;
    request->client->n_bodies--;
    kv_pool_put(request->shard->bodies, body);
}

/* Leaves `kept` buffers to others.  A client gets at most KVS_STAGINGS_CLIENT - kept / 2. */
static uint8_t *staging_get(struct kvs_request *request, uint32_t kept)
{
    uint8_t *staging = NULL;

    if (request->client->n_stagings + kept / 2 < KVS_STAGINGS_CLIENT &&
        kvs_n_free(request->shard->stagings) > kept)
        staging = kv_pool_get(request->shard->stagings);
    request->client->n_stagings += staging != NULL;
    return staging;
}

/* Returns how many staging buffers the request leaves to others: whoever waits for a client's
 * data leaves some to replies. */
static uint32_t stagings_kept(const struct kvs_request *request)
{
    return request->header.bulk_bytes > 0 ? KVS_STAGINGS_KEPT : 0;
}

/* Gives the buffer to the first request in the queue that may have it.  The client has one less
 * now, so another of its requests may have one, too, if some are free. */
void kvs_request_release_staging(struct kvs_request *request)
{
    struct kvs_shard *shard = request->shard;

    if (request->staging == NULL)
        return;
    request->client->n_stagings--;
    kv_pool_put(shard->stagings, request->staging);
    request->staging = NULL;
    for (struct kvs_request *waiter = shard->staging_waiters.first, *next;
         waiter != NULL && kvs_n_free(shard->stagings) > 0; waiter = next) {
        next = waiter->next;
        waiter->staging = staging_get(waiter, stagings_kept(waiter));
        if (waiter->staging != NULL)
            kvs_request_enqueue(waiter);
    }
}

/* Refuses data that was announced and has not been received. */
static void refuse_bulk(struct kvs_request *request)
{
    if (request->incoming != NULL)
        kv_incoming_refuse(request->incoming);
    request->incoming = NULL;
    request->deferred = false;
}

void kvs_request_end(struct kvs_request *request)
{
    struct kvs_shard *shard = request->shard;
    struct kvs_shard_client *client = request->client;
    struct kvs_op_stats *stats = &shard->stats.ops[request->header.op];

    assert(request->state != KVS_REQUEST_FREE && request->n_sends == 0);
    kvs_request_end_work(request);
    if (request->type->release != NULL)
        request->type->release(request); /* it may look at the queue that the request is in */
    kvs_request_unlink(request);
    kvs_request_is_served(request);
    for (unsigned i = 0; i < request->n_pins; i++)
        kvs_block_unpin(&shard->store, request->pins[i]);
    if (request->sends_lent)
        kvs_object_piece_sent(&shard->objects, request->object,
                              (uint32_t)(request->header.offset / KV_WIRE_BULK_MAX));
    if (request->object != NULL)
        kvs_object_unpin(&shard->objects, request->object);
    body_put(request, request->body_slot);
    body_put(request, request->reply_slot);
    body_put(request, request->bulk_slot);
    kvs_request_release_staging(request);
    refuse_bulk(request);

    *request->client_link = request->client_next;
    if (request->client_next != NULL)
        request->client_next->client_link = request->client_link;
    client->n_requests--;
    atomic_store_explicit(&client->in_flight, client->n_requests, memory_order_relaxed);
    kvs_shard_client_settle(client);

    kvs_count(&stats->count, 1);
    if (request->status != KV_OK) {
        kvs_count(&stats->errors, 1);
        kvs_count_error(&shard->stats, request->status);
    }
    kv_histogram_add(&stats->us, kv_clock_now(shard->clock) - request->begin_us);
    request->state = KVS_REQUEST_FREE;
    kv_pool_put(shard->requests, request);
    atomic_store_explicit(&shard->stats.in_flight, kv_pool_used(shard->requests),
                          memory_order_relaxed);
}

/* Leaves `kept` buffers to others. */
static uint8_t *body_get(struct kvs_request *request, uint32_t kept)
{
    uint8_t *body = NULL;

    if (request->client->n_bodies < KVS_BODIES_CLIENT &&
        kvs_n_free(request->shard->bodies) > kept)
        body = kv_pool_get(request->shard->bodies);
    request->client->n_bodies += body != NULL;
    return body;
}

kv_status_t kvs_request_keep_body(struct kvs_request *request, const uint8_t *body)
{
    size_t bytes = request->header.body_bytes;

    if (bytes <= sizeof(request->small)) {
        request->body = request->small;
    } else if (bytes <= KVS_MIDDLE_BYTES) {
        request->body = kv_pool_at(request->shard->middles,
                                   kv_pool_index(request->shard->requests, request));
    } else {
        request->body_slot =
            body_get(request, request->header.bulk_bytes > 0 ? KVS_BODIES_KEPT : 0);
        if (request->body_slot == NULL)
            return KV_BUSY;
        request->body = request->body_slot;
    }
    if (bytes > 0)
        memcpy(request->body, body, bytes);
    return KV_OK;
}

static kv_status_t get_slot(struct kvs_request *request, size_t bytes, uint32_t kept)
{
    assert(bytes <= KV_WIRE_BODY_MAX && request->reply_slot == NULL);
    request->reply_slot = body_get(request, kept);
    if (request->reply_slot == NULL)
        return KV_BUSY;
    request->reply_body = request->reply_slot;
    return KV_OK;
}

kv_status_t kvs_request_get_reply_slot(struct kvs_request *request, size_t bytes)
{
    return get_slot(request, bytes, 0);
}

kv_status_t kvs_request_get_spare_slot(struct kvs_request *request, size_t bytes)
{
    return get_slot(request, bytes, KVS_BODIES_KEPT);
}

void kvs_request_release_reply_slot(struct kvs_request *request)
{
    body_put(request, request->reply_slot);
    request->reply_body = request->reply_slot = NULL;
}

bool kvs_request_stale(const struct kvs_request *request)
{
    return !request->session->used || request->session->serial != request->session_serial ||
           request->session->generation != request->header.generation;
}

bool kvs_request_check_current(struct kvs_request *request)
{
    if (!kvs_request_stale(request))
        return true;
    kvs_request_fail(request, KV_STALE, "%s: session %u changed while the request was waiting",
                     request->type->name, request->header.session_index);
    return false;
}

/* Returns whether the client has more buffers among those that wait for rows than it may, or
 * none of these is left. */
static bool too_many_wait(const struct kvs_request *request)
{
    return kvs_n_free(request->shard->bodies) < KVS_BODIES_KEPT + KVS_BODIES_PUTS ||
           request->client->n_bodies > KVS_BODIES_CLIENT_WAITING;
}

/* Returns false after failing the request: too many like it are waiting. */
static bool may_wait(struct kvs_request *request)
{
    kvs_request_unlink(request);
    /* A request whose data has arrived may always wait: others may be waiting for its rows. */
    if (request->body_slot == NULL || request->received || !too_many_wait(request))
        return true;
    kvs_request_fail(request, KV_BUSY, "%s: too many large requests are waiting",
                     request->type->name);
    return false;
}

void kvs_request_wait(struct kvs_request *request, uint32_t needs)
{
    if (!may_wait(request))
        return;
    kvs_request_link(&request->session->waiters, request);
    kvs_request_is_served(request);
    request->state = KVS_REQUEST_WAITING;
    request->needs = needs;
    request->missing = NULL;
}

/* Returns the data that was announced before the request, or NULL. */
static struct kv_incoming *take_early_bulk(const struct kvs_request *request)
{
    uint64_t bytes;
    struct kv_incoming *incoming =
        kvs_early_bulk_take(request->client, request->header.request_id, &bytes);

    if (incoming == NULL || bytes == request->header.bulk_bytes)
        return incoming;
    kv_incoming_refuse(incoming);
    return NULL;
}

static void defer_bulk(struct kvs_request *request)
{
    request->deferred = true;
    if (request->incoming == NULL)
        request->incoming = take_early_bulk(request);
}

void kvs_request_defer_bulk(struct kvs_request *request, uint32_t needs)
{
    defer_bulk(request);
    kvs_request_wait(request, needs);
}

void kvs_request_wait_for_segment(struct kvs_request *request,
                                  const struct kvs_segment *segment)
{
    struct kvs_shard *shard = request->shard;

    assert(request->at_work.turn == 0);
    kvs_count(&shard->stats.block_waits, 1);
    if (!request->received)
        kvs_request_release_staging(request);
    if (request->header.bulk_bytes > 0 && !request->received)
        defer_bulk(request);
    kvs_request_wait_for(request, segment);
}

void kvs_request_wait_for(struct kvs_request *request, const void *what)
{
    if (!may_wait(request))
        return;
    kvs_request_queue_at(request, &request->shard->missing);
    request->state = KVS_REQUEST_WAITING;
    request->missing = what;
}

bool kvs_request_acquire_staging(struct kvs_request *request)
{
    request->staging = staging_get(request, stagings_kept(request));
    if (request->staging != NULL)
        return true;
    request->deferred = request->header.bulk_bytes > 0;
    if (request->deferred)
        kvs_request_is_served(request); /* those that have one may need segments */
    kvs_request_queue_at(request, &request->shard->staging_waiters);
    return false;
}

/* ---- replies ----------------------------------------------------------------------------- */

void kvs_request_reply_sent(void *arg, kv_status_t status)
{
    struct kvs_request *request = arg;

    if (status != KV_OK)
        request->send_status = status;
    if (--request->n_sends == 0) {
        if (request->send_status == KV_OK)
            kvs_count(&request->shard->stats.replies, 1);
        kvs_request_end(request);
    }
}

/* Fills in what every reply has, in addition to what the operation has set. */
static void address_reply(struct kv_wire_header *reply,
                          const struct kv_wire_header *header,
                          kv_status_t status)
{
    reply->version = header->version;
    reply->kind = KV_WIRE_REPLY;
    reply->op = header->op;
    reply->status = status;
    reply->request_id = header->request_id;
    reply->client_index = header->client_index;
    reply->session_index = header->session_index;
    reply->generation = header->generation;
    reply->tenant = header->tenant;
    reply->client_token = header->client_token;
}

/* Returns how long the request has been here, in microseconds. */
static uint32_t time_of(const struct kvs_request *request)
{
    uint64_t us = kv_clock_now(request->shard->clock) - request->begin_us;

    return us < UINT32_MAX ? (uint32_t)us : UINT32_MAX;
}

void kvs_request_reply(struct kvs_request *request,
                       const void *body,
                       size_t body_bytes,
                       const void *bulk,
                       size_t bulk_bytes)
{
    struct kv_wire_header *reply = &request->reply;
    const struct kv_wire_header *header = &request->header;

    kvs_request_unlink(request);
    kvs_request_end_work(request);
    kvs_request_is_served(request);
    refuse_bulk(request);
    hand_over(request, KVS_REQUEST_SENDING);
    if (request->orphan || request->client->channel == NULL) {
        kvs_request_end(request);
        return;
    }
    address_reply(reply, header, request->status);
    reply->bulk_bytes = bulk_bytes;
    if (header->version >= KV_WIRE_VERSION_NODE_TIME)
        reply->deadline_us = time_of(request);
    kv_message_seal(reply, body, body_bytes);

    /* Begins at 1, so that no send can end the request before both have been started. */
    request->n_sends = 1;
    if (bulk_bytes == 0 && kvs_replies_collect(request, body, body_bytes))
        return;
    struct kv_channel *channel = request->client->channel;
    bool is_pair = bulk_bytes > 0 && body_bytes + bulk_bytes <= channel->pair_max;
    kv_status_t status;
    if (is_pair) {
        request->pair[0] = (struct kv_iov){(void *)body, body_bytes};
        request->pair[1] = (struct kv_iov){(void *)bulk, bulk_bytes};
        status = kv_channel_send_pair(channel, reply, sizeof(*reply), request->pair,
                                      kvs_request_reply_sent, request);
    } else {
        status = kv_channel_send(channel, reply, sizeof(*reply), body, body_bytes,
                                 kvs_request_reply_sent, request);
    }
    if (status == KV_IN_PROGRESS)
        request->n_sends++;
    else if (status != KV_OK)
        request->send_status = status;
    if (bulk_bytes > 0 && !is_pair && status >= KV_OK) {
        request->reply_bulk = *reply;
        request->reply_bulk.kind = KV_WIRE_BULK_REPLY;
        kv_message_seal(&request->reply_bulk, NULL, 0);
        status = kv_channel_send(channel, &request->reply_bulk, sizeof(request->reply_bulk),
                                 bulk, bulk_bytes, kvs_request_reply_sent, request);
        if (status == KV_IN_PROGRESS)
            request->n_sends++;
        else if (status != KV_OK)
            request->send_status = status;
    }
    kvs_request_reply_sent(request, KV_OK);
}

static void note_done(void *arg, kv_status_t status)
{
    struct kvs_note *note = arg;

    (void)status;
    note->busy = false;
    note->client->n_notes--;
    kvs_shard_client_settle(note->client);
}

void kvs_shard_client_note(struct kvs_shard *shard,
                           struct kvs_shard_client *client,
                           const struct kv_wire_header *header,
                           kv_status_t status,
                           const char *format,
                           ...)
{
    struct kvs_note *note = NULL;
    va_list args;

    for (unsigned i = 0; i < KVS_NOTES && note == NULL; i++)
        if (!client->notes[i].busy)
            note = &client->notes[i];
    if (status == KV_BUSY) { /* no request was made of it, so its end does not count it */
        kvs_count(&shard->stats.busy, 1);
        kvs_count_error(&shard->stats, status);
        kvs_count(&client->busy, 1);
    }
    if (note == NULL || client->channel == NULL) {
        kvs_count(&shard->stats.dropped, 1);
        kvs_count(&client->dropped, 1);
        return;
    }
    va_start(args, format);
    vsnprintf(note->text, sizeof(note->text), format, args);
    va_end(args);
    note->header = (struct kv_wire_header){.epoch = header->epoch};
    address_reply(&note->header, header, status);
    if (header->kind == KV_WIRE_BATCH)
        note->header.n_units = header->n_units; /* it is for all of them */
    kv_message_seal(&note->header, note->text, strlen(note->text));
    note->client = client;
    note->busy = true;
    client->n_notes++;
    if (kv_channel_send(client->channel, &note->header, sizeof(note->header), note->text,
                        note->header.body_bytes, note_done, note) != KV_IN_PROGRESS)
        note_done(note, KV_OK);
}

void kvs_request_reply_status(struct kvs_request *request)
{
    struct kvs_shard *shard = request->shard;

    if (request->status == KV_BUSY)
        kvs_count(&shard->stats.busy, 1);
    else if (request->status != KV_OK)
        kvs_count(&shard->stats.rejected, 1);
    kvs_request_reply(request, request->small, strlen((char *)request->small), NULL, 0);
}

void kvs_request_fail(struct kvs_request *request, kv_status_t status, const char *format, ...)
{
    bool bulk_to_come = request->header.bulk_bytes > 0 && !request->received;
    va_list args;

    request->status = status;
    if (request->type->release != NULL)
        request->type->release(request);
    va_start(args, format);
    vsnprintf((char *)request->small, sizeof(request->small), format, args);
    va_end(args);
    body_put(request, request->body_slot);
    request->body = request->body_slot = NULL;
    kvs_request_release_staging(request);
    if (bulk_to_come && request->state == KVS_REQUEST_BEGUN)
        kvs_request_await_bulk(request, true);
    else
        kvs_request_reply_status(request);
}

void kvs_request_fail_full(struct kvs_request *request, uint64_t bytes)
{
    if (kvs_pages_want(request->shard->pages, bytes)) {
        request->shard->replies_due = true; /* the control thread has something to do */
        kvs_request_fail(request, KV_BUSY, "%s: store full: evictable data makes room",
                         request->type->name);
    } else {
        kvs_request_fail(request, KV_NO_MEMORY, "%s: store full", request->type->name);
    }
}

/* ---- bulk data --------------------------------------------------------------------------- */

void kvs_request_received(void *arg, kv_status_t status)
{
    struct kvs_request *request = arg;

    request->state = KVS_REQUEST_BEGUN;
    request->received = true;
    request->client->heard_us = request->shard->now_us;
    if (request->orphan) {
        kvs_request_end(request);
    } else if (status != KV_OK) {
        kvs_request_fail(request, status, "%s: the data did not arrive", request->type->name);
    } else {
        request->type->received(request);
    }
}

void kvs_request_bulk_discarded(struct kvs_request *request)
{
    request->received = true;
    if (request->status != KV_OK || request->type->discarded == NULL) {
        kvs_request_reply_status(request);
        return;
    }
    request->state = KVS_REQUEST_BEGUN;
    request->type->discarded(request);
}

void kvs_request_receive_bulk(struct kvs_request *request, struct kv_incoming *incoming)
{
    if (request->discard) {
        kv_incoming_refuse(incoming);
        kvs_request_bulk_discarded(request);
        return;
    }
    hand_over(request, KVS_REQUEST_RECEIVING);
    kv_status_t status = kv_incoming_receive(incoming, request->iov, request->n_iov,
                                             kvs_request_received, request);
    if (status != KV_IN_PROGRESS)
        kvs_request_received(request, status);
}

void kvs_request_give_up(struct kvs_request *request)
{
    request->orphan = true;
    request->since_us = request->shard->now_us;
    if (request->type->release != NULL)
        request->type->release(request);
}

void kvs_request_keep_bulk(struct kvs_request *request, const uint8_t *bytes)
{
    const size_t n_bytes = request->header.bulk_bytes;
    uint8_t *to = request->staging;

    if (to == NULL && n_bytes <= KV_WIRE_BODY_MAX && !too_many_wait(request))
        to = request->bulk_slot = body_get(request, KVS_BODIES_KEPT + KVS_BODIES_PUTS);
    request->received = true;
    request->deferred = false;
    if (to == NULL) {
        kvs_request_fail(request, KV_BUSY, "%s: no free buffer for rows that must wait",
                         request->type->name);
        return;
    }
    memcpy(to, bytes, n_bytes);
    if (request->queue == &request->shard->staging_waiters)
        kvs_request_enqueue(request);
}

void kvs_request_await_bulk(struct kvs_request *request, bool discard)
{
    kvs_request_is_served(request);
    struct kv_incoming *incoming = request->incoming;

    request->incoming = NULL;
    request->deferred = false;
    hand_over(request, KVS_REQUEST_AWAIT_BULK);
    request->discard = discard;
    if (incoming == NULL)
        incoming = take_early_bulk(request);
    if (incoming != NULL)
        kvs_request_receive_bulk(request, incoming);
}
