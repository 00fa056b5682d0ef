/* The life of a request: its work and buffers, its bulk data, its answer. */
#include "kvserver/store/shard/shard_private.h"

#include "kvserver/net/message.h"
#include "kvserver/store/shard/op.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void kv_work_due(const struct kv_work *work, uint64_t due_us)
{
    if (due_us < work->peer->due_us)
        work->peer->due_us = due_us;
}

/* From now on it is the client's turn. */
static void work_hand_over(struct kv_work *work, enum kv_work_state state)
{
    work->state = state;
    work->since_us = work->data->now_us;
    kv_work_due(work, work->since_us + work->data->stuck_send_us);
}

struct kv_work *
kv_work_create(struct kv_data *data, struct kv_peer *peer, const struct kv_wire_header *request)
{
    struct kv_work *work = kv_pool_get(data->works);

    if (work == NULL)
        return NULL;
    work->state = KV_WORK_BEGUN;
    work->data = data;
    work->row = &data->ops[request->op];
    work->peer = peer;
    work->next = NULL;
    work->link = NULL;
    work->queue = NULL;
    work->request = *request;
    work->begin_us = data->now_us;
    work->deadline_us = data->now_us + (request->deadline_us < KV_WIRE_DEADLINE_MAX_US
                                            ? request->deadline_us
                                            : KV_WIRE_DEADLINE_MAX_US);
    kv_work_due(work, work->deadline_us);
    work->orphan = work->discard = work->landed = false;
    work->landing = work->coming = false;
    work->part = NULL;
    work->body = work->body_slot = NULL;
    work->answer = work->answer_slot = work->staging = NULL;
    work->object = NULL;
    work->n_iov = work->n_pins = work->n_sends = 0;
    work->status = work->send_status = KV_OK;
    work->cursor_unit = work->cursor_row = 0;
    work->cursor_bytes = 0;
    work->serial = 0;
    memset(&work->reply, 0, sizeof(work->reply));

    work->peer_next = peer->works;
    work->peer_link = &peer->works;
    if (work->peer_next != NULL)
        work->peer_next->peer_link = &work->peer_next;
    peer->works = work;
    peer->n_works++;
    atomic_store_explicit(&peer->in_flight, peer->n_works, memory_order_relaxed);
    atomic_store_explicit(&data->stats.in_flight, kv_pool_lent(data->works),
                          memory_order_relaxed);
    return work;
}

static void body_put(struct kv_work *work, uint8_t *body)
{
    if (body == NULL)
        return;
    work->peer->n_bodies--;
    kv_pool_put(work->data->bodies, body);
}

/* `kept` are for others, and half of them for others of the client, which may hold half. */
static uint8_t *staging_get(struct kv_work *work, uint32_t kept)
{
    uint8_t *staging = NULL;

    if (work->peer->n_stagings + kept / 2 < KV_STAGINGS_PEER &&
        n_left(work->data->stagings) > kept)
        staging = kv_pool_get(work->data->stagings);
    work->peer->n_stagings += staging != NULL;
    return staging;
}

/* Gives the staging buffer back, to whoever waits for one. */
static void staging_put(struct kv_work *work)
{
    if (work->staging == NULL)
        return;
    work->peer->n_stagings--;
    kv_pool_put(work->data->stagings, work->staging);
    work->staging = NULL;
    for (struct kv_work *next = work->data->unstaged.first; next != NULL; next = next->next) {
        next->staging = staging_get(next, 0);
        if (next->staging != NULL) {
            kv_work_queue(next);
            return;
        }
    }
}

void kv_work_end(struct kv_work *work)
{
    struct kv_data *data = work->data;
    struct kv_peer *peer = work->peer;
    struct kv_op_stats *stats = &data->stats.ops[work->request.op];

    assert(work->state != KV_WORK_FREE && work->n_sends == 0);
    kv_work_unlink(work);
    if (work->row->release != NULL)
        work->row->release(work);
    for (unsigned i = 0; i < work->n_pins; i++)
        kv_segment_unpin(&data->heap, work->pins[i]);
    if (work->object != NULL)
        kv_object_unpin(&data->objects, work->object);
    body_put(work, work->body_slot);
    body_put(work, work->answer_slot);
    staging_put(work);

    *work->peer_link = work->peer_next;
    if (work->peer_next != NULL)
        work->peer_next->peer_link = work->peer_link;
    peer->n_works--;
    atomic_store_explicit(&peer->in_flight, peer->n_works, memory_order_relaxed);
    kv_peer_settle(peer);

    kv_count(&stats->count, 1);
    if (work->status != KV_OK)
        kv_count(&stats->errors, 1);
    kv_histogram_add(&stats->us, kv_clock_now(data->clock) - work->begin_us);
    work->state = KV_WORK_FREE;
    kv_pool_put(data->works, work);
    atomic_store_explicit(&data->stats.in_flight, kv_pool_lent(data->works),
                          memory_order_relaxed);
}

/* `kept` are for others. */
static uint8_t *body_get(struct kv_work *work, uint32_t kept)
{
    uint8_t *body = NULL;

    if (work->peer->n_bodies < KV_BODIES_PEER && n_left(work->data->bodies) > kept)
        body = kv_pool_get(work->data->bodies);
    work->peer->n_bodies += body != NULL;
    return body;
}

kv_status_t kv_work_keep_body(struct kv_work *work, const uint8_t *body)
{
    size_t bytes = work->request.body_bytes;

    if (bytes <= sizeof(work->small)) {
        work->body = work->small;
    } else if (bytes <= KV_MIDDLE_BYTES) {
        work->body = kv_pool_at(work->data->middles, kv_pool_index(work->data->works, work));
    } else {
        work->body_slot = body_get(work, work->request.bulk_bytes > 0 ? KV_BODIES_KEPT : 0);
        if (work->body_slot == NULL)
            return KV_BUSY;
        work->body = work->body_slot;
    }
    if (bytes > 0)
        memcpy(work->body, body, bytes);
    return KV_OK;
}

kv_status_t kv_work_answer_slot(struct kv_work *work, size_t bytes)
{
    assert(bytes <= KV_WIRE_BODY_MAX);
    work->answer_slot = body_get(work, 0);
    if (work->answer_slot == NULL)
        return KV_BUSY;
    work->answer = work->answer_slot;
    return KV_OK;
}

bool kv_work_stale(const struct kv_work *work)
{
    return !work->part->used || work->part->serial != work->part_serial ||
           work->part->generation != work->request.generation;
}

void kv_work_wait(struct kv_work *work, uint32_t needs)
{
    kv_work_unlink(work);
    /* What has landed was let in before, and others may wait for it. */
    if (work->body_slot != NULL && !work->landed &&
        n_left(work->data->bodies) < KV_BODIES_KEPT + KV_BODIES_PUTS) {
        kv_work_fail(work, KV_BUSY, "%s: too many large requests wait", work->row->name);
        return;
    }
    kv_work_link(&work->part->waiters, work);
    work->state = KV_WORK_WAITING;
    work->needs = needs;
}

bool kv_work_stage_bulk(struct kv_work *work)
{
    work->staging = staging_get(work, KV_STAGINGS_KEPT);
    return work->staging != NULL;
}

bool kv_work_stage(struct kv_work *work)
{
    work->staging = staging_get(work, 0);
    if (work->staging == NULL)
        kv_work_queue_at(work, &work->data->unstaged);
    return work->staging != NULL;
}

static void send_done(void *arg, kv_status_t status)
{
    struct kv_work *work = arg;

    if (status != KV_OK)
        work->send_status = status;
    if (--work->n_sends == 0) {
        if (work->send_status == KV_OK)
            kv_count(&work->data->stats.replies, 1);
        kv_work_end(work);
    }
}

/* What every reply says, besides what the operation has put into it. */
static void address_reply(struct kv_wire_header *reply,
                          const struct kv_wire_header *request,
                          kv_status_t status)
{
    reply->kind = KV_WIRE_REPLY;
    reply->op = request->op;
    reply->status = status;
    reply->request_id = request->request_id;
    reply->client_index = request->client_index;
    reply->session_index = request->session_index;
    reply->generation = request->generation;
    reply->tenant = request->tenant;
    reply->client_token = request->client_token;
    reply->epoch = request->epoch;
}

void kv_work_answer(struct kv_work *work,
                    const void *body,
                    size_t body_bytes,
                    const void *bulk,
                    size_t bulk_bytes)
{
    struct kv_wire_header *reply = &work->reply;
    const struct kv_wire_header *request = &work->request;

    kv_work_unlink(work);
    work_hand_over(work, KV_WORK_SENDING);
    if (work->orphan || work->peer->channel == NULL) {
        kv_work_end(work);
        return;
    }
    address_reply(reply, request, work->status);
    reply->bulk_bytes = bulk_bytes;
    kv_message_seal(reply, body, body_bytes);

    /* One more than the sends, so that neither ends the work before both are started. */
    work->n_sends = 1;
    struct kv_channel *channel = work->peer->channel;
    bool is_pair = bulk_bytes > 0 && body_bytes + bulk_bytes <= channel->pair_max;
    kv_status_t status;
    if (is_pair) {
        work->pair[0] = (struct kv_iov){(void *)body, body_bytes};
        work->pair[1] = (struct kv_iov){(void *)bulk, bulk_bytes};
        status =
            kv_channel_send_pair(channel, reply, sizeof(*reply), work->pair, send_done, work);
    } else {
        status =
            kv_channel_send(channel, reply, sizeof(*reply), body, body_bytes, send_done, work);
    }
    if (status == KV_IN_PROGRESS)
        work->n_sends++;
    else if (status != KV_OK)
        work->send_status = status;
    if (bulk_bytes > 0 && !is_pair && status >= KV_OK) {
        work->reply_bulk = *reply;
        work->reply_bulk.kind = KV_WIRE_BULK_REPLY;
        kv_message_seal(&work->reply_bulk, NULL, 0);
        status = kv_channel_send(channel, &work->reply_bulk, sizeof(work->reply_bulk), bulk,
                                 bulk_bytes, send_done, work);
        if (status == KV_IN_PROGRESS)
            work->n_sends++;
        else if (status != KV_OK)
            work->send_status = status;
    }
    send_done(work, KV_OK);
}

static void note_done(void *arg, kv_status_t status)
{
    struct kv_note *note = arg;

    (void)status;
    note->busy = false;
    note->peer->n_notes--;
    kv_peer_settle(note->peer);
}

void kv_peer_note(struct kv_data *data,
                  struct kv_peer *peer,
                  const struct kv_wire_header *request,
                  kv_status_t status,
                  const char *format,
                  ...)
{
    struct kv_note *note = NULL;
    va_list args;

    for (unsigned i = 0; i < KV_NOTES && note == NULL; i++)
        if (!peer->notes[i].busy)
            note = &peer->notes[i];
    if (status == KV_BUSY) {
        kv_count(&data->stats.busy, 1);
        kv_count(&peer->busy, 1);
    }
    if (note == NULL || peer->channel == NULL) {
        kv_count(&data->stats.dropped, 1);
        kv_count(&peer->dropped, 1);
        return;
    }
    va_start(args, format);
    vsnprintf(note->text, sizeof(note->text), format, args);
    va_end(args);
    note->header = (struct kv_wire_header){0};
    address_reply(&note->header, request, status);
    kv_message_seal(&note->header, note->text, strlen(note->text));
    note->peer = peer;
    note->busy = true;
    peer->n_notes++;
    if (kv_channel_send(peer->channel, &note->header, sizeof(note->header), note->text,
                        note->header.body_bytes, note_done, note) != KV_IN_PROGRESS)
        note_done(note, KV_OK);
}

void kv_work_answer_status(struct kv_work *work)
{
    struct kv_data *data = work->data;

    if (work->status == KV_BUSY)
        kv_count(&data->stats.busy, 1);
    else if (work->status != KV_OK)
        kv_count(&data->stats.rejected, 1);
    kv_work_answer(work, work->small, strlen((char *)work->small), NULL, 0);
}

void kv_work_fail(struct kv_work *work, kv_status_t status, const char *format, ...)
{
    bool bulk_to_come = work->request.bulk_bytes > 0 && !work->landed;
    va_list args;

    work->status = status;
    if (work->row->release != NULL)
        work->row->release(work);
    va_start(args, format);
    vsnprintf((char *)work->small, sizeof(work->small), format, args);
    va_end(args);
    body_put(work, work->body_slot);
    work->body = work->body_slot = NULL;
    if (bulk_to_come && work->state == KV_WORK_BEGUN)
        kv_work_await_bulk(work, true);
    else
        kv_work_answer_status(work);
}

/* ---- bulk data --------------------------------------------------------------------------- */

void kv_work_received(void *arg, kv_status_t status)
{
    struct kv_work *work = arg;

    work->state = KV_WORK_BEGUN;
    work->landed = true;
    work->peer->heard_us = work->data->now_us;
    if (work->orphan) {
        kv_work_end(work);
    } else if (status != KV_OK) {
        kv_work_fail(work, status, "%s: the data did not arrive", work->row->name);
    } else {
        work->row->landed(work);
    }
}

void kv_work_bulk_discarded(struct kv_work *work)
{
    work->landed = true;
    if (work->status != KV_OK || work->row->discarded == NULL) {
        kv_work_answer_status(work);
        return;
    }
    work->state = KV_WORK_BEGUN;
    work->row->discarded(work);
}

void kv_work_receive_bulk(struct kv_work *work, struct kv_incoming *incoming)
{
    if (work->discard) {
        kv_incoming_refuse(incoming);
        kv_work_bulk_discarded(work);
        return;
    }
    work_hand_over(work, KV_WORK_RECEIVING);
    kv_status_t status =
        kv_incoming_receive(incoming, work->iov, work->n_iov, kv_work_received, work);
    if (status != KV_IN_PROGRESS)
        kv_work_received(work, status);
}

void kv_work_give_up(struct kv_work *work)
{
    work->orphan = true;
    work->since_us = work->data->now_us;
    if (work->row->release != NULL)
        work->row->release(work);
}

void kv_work_await_bulk(struct kv_work *work, bool discard)
{
    struct kv_incoming *incoming;
    uint64_t bytes;

    work_hand_over(work, KV_WORK_AWAIT_BULK);
    work->discard = discard;
    incoming = kv_early_bulk_take(work->peer, work->request.request_id, &bytes);
    if (incoming == NULL)
        return;
    if (bytes != work->request.bulk_bytes)
        kv_incoming_refuse(incoming);
    else
        kv_work_receive_bulk(work, incoming);
}
