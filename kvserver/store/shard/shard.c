#include "kvserver/store/shard/shard.h"

#include "kvserver/base/log.h"
#include "kvserver/base/thread.h"
#include "kvserver/base/token.h"
#include "kvserver/net/message.h"
#include "kvserver/store/index/builder.h"
#include "kvserver/store/ops/scrub.h"
#include "kvserver/store/query/pipeline.h"
#include "kvserver/store/shard/op.h"

#include <assert.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum {
    TIMERS_EVERY_US = 1000,
    STASH_MAX_US = 1000000,
    MESSAGES_PER_STEP = 64,
    MESSAGES_US = 50,      /* while a query is at work, unless one message alone takes longer */
    LOOKS_PER_STEP = 16,   /* of works that waited: each may copy what came with it */
    QUERY_SLICES = 4,      /* of queries, before messages are looked at again */
    BACKGROUND_EVERY = 16, /* slices of requests, before one in the background has its turn */
};

/* ---- the life of a work ------------------------------------------------------------------ */

static void link_work(struct kv_work **list, struct kv_work *work)
{
    work->link = list;
    work->next = *list;
    if (work->next != NULL)
        work->next->link = &work->next;
    *list = work;
}

static void unlink_work(struct kv_work *work)
{
    if (work->link == NULL)
        return;
    if (work->queue != NULL && work->queue->end == &work->next)
        work->queue->end = work->link;
    work->queue = NULL;
    *work->link = work->next;
    if (work->next != NULL)
        work->next->link = work->link;
    work->link = NULL;
    work->next = NULL;
}

static void append_work(struct kv_work_queue *queue, struct kv_work *work)
{
    unlink_work(work);
    work->state = KV_WORK_QUEUED;
    work->queue = queue;
    work->next = NULL;
    work->link = queue->end;
    *queue->end = work;
    queue->end = &work->next;
}

/* The work has to be looked at by then. */
static void work_due(const struct kv_work *work, uint64_t due_us)
{
    if (due_us < work->peer->due_us)
        work->peer->due_us = due_us;
}

/* From now on it is the client's turn. */
static void work_hand_over(struct kv_work *work, enum kv_work_state state)
{
    work->state = state;
    work->since_us = work->data->now_us;
    work_due(work, work->since_us + work->data->stuck_send_us);
}

/* Another client may have the place once nothing of this one is under way. */
static void peer_settle(struct kv_peer *peer)
{
    if (peer->state == KV_PEER_CLOSING && peer->n_works == 0 && peer->n_receipts == 0 &&
        peer->n_notes == 0)
        peer->state = KV_PEER_FREE;
}

static struct kv_work *
work_create(struct kv_data *data, struct kv_peer *peer, const struct kv_wire_header *request)
{
    struct kv_work *work = kv_pool_get(data->works);

    if (work == NULL)
        return NULL;
    work->state = KV_WORK_BEGUN;
    work->data = data;
    work->row = &kv_ops[request->op];
    work->peer = peer;
    work->next = NULL;
    work->link = NULL;
    work->queue = NULL;
    work->request = *request;
    work->begin_us = data->now_us;
    work->deadline_us = data->now_us + (request->deadline_us < KV_WIRE_DEADLINE_MAX_US
                                            ? request->deadline_us
                                            : KV_WIRE_DEADLINE_MAX_US);
    work_due(work, work->deadline_us);
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

static uint32_t n_left(const struct kv_pool *pool)
{
    return kv_pool_size(pool) - kv_pool_lent(pool);
}

/* `kept` are for others. */
static uint8_t *staging_get(struct kv_work *work, uint32_t kept)
{
    uint8_t *staging = NULL;

    if (work->peer->n_stagings < KV_STAGINGS_PEER && n_left(work->data->stagings) > kept)
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

static void work_end(struct kv_work *work)
{
    struct kv_data *data = work->data;
    struct kv_peer *peer = work->peer;
    struct kv_op_stats *stats = &data->stats.ops[work->request.op];

    assert(work->state != KV_WORK_FREE && work->n_sends == 0);
    unlink_work(work);
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
    peer_settle(peer);

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
    unlink_work(work);
    /* What has landed was let in before, and others may wait for it. */
    if (work->body_slot != NULL && !work->landed &&
        n_left(work->data->bodies) < KV_BODIES_KEPT + KV_BODIES_PUTS) {
        kv_work_fail(work, KV_BUSY, "%s: too many large requests wait", work->row->name);
        return;
    }
    link_work(&work->part->waiters, work);
    work->state = KV_WORK_WAITING;
    work->needs = needs;
}

void kv_work_queue(struct kv_work *work)
{
    append_work(&work->data->queues[work->row->class], work);
}

void kv_work_queue_at(struct kv_work *work, struct kv_work_queue *queue)
{
    append_work(queue, work);
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
        append_work(&work->data->unstaged, work);
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
        work_end(work);
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

    unlink_work(work);
    work_hand_over(work, KV_WORK_SENDING);
    if (work->orphan || work->peer->channel == NULL) {
        work_end(work);
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
    peer_settle(note->peer);
}

/* Answers a request that has no work, or whose work cannot answer.  A client that does not take
 * such answers hears no more of them. */
static void note(struct kv_data *data,
                 struct kv_peer *peer,
                 const struct kv_wire_header *request,
                 kv_status_t status,
                 const char *format,
                 ...) __attribute__((format(printf, 5, 6)));
static void note(struct kv_data *data,
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

/* The answer to what needed no data, or failed: a status, and why in words. */
static void answer_status(struct kv_work *work)
{
    struct kv_data *data = work->data;

    if (work->status == KV_BUSY)
        kv_count(&data->stats.busy, 1);
    else if (work->status != KV_OK)
        kv_count(&data->stats.refused, 1);
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
        answer_status(work);
}

/* ---- bulk data --------------------------------------------------------------------------- */

static void receive_done(void *arg, kv_status_t status)
{
    struct kv_work *work = arg;

    work->state = KV_WORK_BEGUN;
    work->landed = true;
    work->peer->heard_us = work->data->now_us;
    if (work->orphan) {
        work_end(work);
    } else if (status != KV_OK) {
        kv_work_fail(work, status, "%s: the data did not arrive", work->row->name);
    } else {
        work->row->landed(work);
    }
}

/* Bulk that is not wanted has come. */
static void bulk_discarded(struct kv_work *work)
{
    work->landed = true;
    if (work->status != KV_OK || work->row->discarded == NULL) {
        answer_status(work);
        return;
    }
    work->state = KV_WORK_BEGUN;
    work->row->discarded(work);
}

static void receive_bulk(struct kv_work *work, struct kv_incoming *incoming)
{
    if (work->discard) {
        kv_incoming_refuse(incoming);
        bulk_discarded(work);
        return;
    }
    work_hand_over(work, KV_WORK_RECEIVING);
    kv_status_t status =
        kv_incoming_receive(incoming, work->iov, work->n_iov, receive_done, work);
    if (status != KV_IN_PROGRESS)
        receive_done(work, status);
}

/* Ends a work into whose memory data may still land: what it holds of units is free for others,
 * and its segments, pinned, and its staging buffer are nobody's until the transport has done.
 */
static void work_give_up(struct kv_work *work)
{
    work->orphan = true;
    work->since_us = work->data->now_us;
    if (work->row->release != NULL)
        work->row->release(work);
}

static struct kv_work *find_work(struct kv_peer *peer, uint64_t request_id)
{
    for (struct kv_work *work = peer->works; work != NULL; work = work->peer_next)
        if (work->request.request_id == request_id)
            return work;
    return NULL;
}

void kv_work_await_bulk(struct kv_work *work, bool discard)
{
    struct kv_peer *peer = work->peer;

    work_hand_over(work, KV_WORK_AWAIT_BULK);
    work->discard = discard;
    for (unsigned i = 0; i < sizeof(peer->stash) / sizeof(peer->stash[0]); i++) {
        struct kv_stash *stash = &peer->stash[i];
        if (stash->incoming != NULL && stash->request_id == work->request.request_id) {
            struct kv_incoming *incoming = stash->incoming;
            stash->incoming = NULL;
            if (stash->bytes != work->request.bulk_bytes)
                kv_incoming_refuse(incoming);
            else
                receive_bulk(work, incoming);
            return;
        }
    }
}

static void stash_clear(struct kv_peer *peer, uint64_t before_us)
{
    for (unsigned i = 0; i < sizeof(peer->stash) / sizeof(peer->stash[0]); i++) {
        if (peer->stash[i].incoming != NULL && peer->stash[i].since_us < before_us) {
            kv_incoming_refuse(peer->stash[i].incoming);
            peer->stash[i].incoming = NULL;
        }
    }
}

/* ---- messages ---------------------------------------------------------------------------- */

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
    struct kv_work *target = find_work(peer, header->offset);

    if (target == NULL)
        return;
    if (target->state == KV_WORK_WAITING || target->state == KV_WORK_QUEUED ||
        target->state == KV_WORK_AWAIT_BULK)
        work_end(target);
    else if (target->state == KV_WORK_RECEIVING && !target->orphan)
        work_give_up(target);
}

/* A work for the request; NULL: it was answered without one, or is under way already. */
static struct kv_work *
admit(struct kv_data *data, struct kv_peer *peer, const struct kv_wire_header *header)
{
    const char *name = kv_ops[header->op].name;

    /* Two works that wait for one bulk would keep each other's rows from coming. */
    if (header->bulk_bytes > 0 && find_work(peer, header->request_id) != NULL) {
        kv_count(&data->stats.dropped, 1);
        kv_count(&peer->dropped, 1);
        return NULL;
    }
    struct kv_work *work =
        peer->n_works < peer->credits ? work_create(data, peer, header) : NULL;
    if (work != NULL) {
        kv_count(&data->stats.requests, 1);
        kv_count(&peer->requests, 1);
    } else if (header->op == KV_OP_PING && header->token_count == 0) {
        /* Whether the node lives must not depend on how busy it is. */
        kv_count(&data->stats.requests, 1);
        kv_count(&peer->requests, 1);
        note(data, peer, header, KV_OK, "%s", "");
    } else {
        note(data, peer, header, KV_BUSY, "%s: more than %u requests in flight",
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
    const struct kv_op_row *row = &kv_ops[header->op];

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
    struct kv_work *work = find_work(peer, header->request_id);

    if (work == NULL || work->state != KV_WORK_AWAIT_BULK ||
        work->request.bulk_bytes != header->bulk_bytes)
        return; /* of a request that has ended, or that it overtook: the client sends again */
    if (work->discard) {
        bulk_discarded(work);
        return;
    }
    for (unsigned i = 0; i < work->n_iov; bytes += work->iov[i++].bytes)
        memcpy(work->iov[i].base, bytes, work->iov[i].bytes);
    receive_done(work, KV_OK);
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

/* A request whose body was too large to come with its header, on its way. */
struct receipt {
    struct kv_data *data;
    struct kv_peer *peer; /* NULL: not in use */
    uint64_t since_us;
    struct kv_wire_header header;
    size_t bytes;
    uint8_t *body; /* of data->bodies */
};

static void receipt_end(struct receipt *receipt)
{
    struct kv_data *data = receipt->data;
    struct kv_peer *peer = receipt->peer;

    peer->n_receipts--;
    receipt->peer = NULL;
    kv_pool_put(data->bodies, receipt->body);
    kv_pool_put(data->receipts, receipt);
    peer_settle(peer);
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

    peer->heard_us = data->now_us;
    if (bytes <= KV_WIRE_BODY_MAX && peer->n_receipts < KV_RECEIPTS_PEER &&
        n_left(data->bodies) > KV_BODIES_KEPT)
        receipt = kv_pool_get(data->receipts);
    if (receipt == NULL) {
        kv_incoming_refuse(incoming);
        note(data, peer, header, KV_BUSY, "%s: no buffer for a request of %zu bytes",
             kv_op_name(header->op) != NULL ? kv_op_name(header->op) : "request", bytes);
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

    struct kv_work *work = find_work(peer, header.request_id);
    if (work != NULL) {
        if (work->state == KV_WORK_AWAIT_BULK && work->request.bulk_bytes == bytes)
            receive_bulk(work, incoming);
        else
            kv_incoming_refuse(incoming);
        return;
    }
    /* It overtook its request: keep it for a while. */
    for (unsigned i = 0; i < sizeof(peer->stash) / sizeof(peer->stash[0]); i++) {
        if (peer->stash[i].incoming == NULL) {
            peer->stash[i] =
                (struct kv_stash){incoming, header.request_id, bytes, data->now_us};
            return;
        }
    }
    kv_incoming_refuse(incoming);
}

void kv_peer_close(struct kv_data *data, struct kv_peer *peer)
{
    if (peer->state != KV_PEER_OPEN)
        return;
    peer->state = KV_PEER_CLOSING;
    stash_clear(peer, UINT64_MAX);
    for (struct kv_work *work = peer->works, *next; work != NULL; work = next) {
        next = work->peer_next;
        work->orphan = true;
        if (work->state == KV_WORK_AWAIT_BULK || work->state == KV_WORK_WAITING ||
            work->state == KV_WORK_QUEUED)
            work_end(work);
        else if (work->state == KV_WORK_RECEIVING)
            work_give_up(work);
    }
    struct kv_channel *channel = peer->channel;
    peer->channel = NULL;
    channel->row->channel_close(channel); /* ends the works that are sending */
    peer_settle(peer);
    (void)data;
}

/* The channel is of no use any more: close it and let the control thread forget the client. */
static void peer_lost(struct kv_data *data, struct kv_peer *peer)
{
    /* Out of the ring before the peer's place is opened again: its closing is answered later.
     */
    if (!peer->is_told) {
        peer->notice = (struct kv_command){
            .kind = KV_COMMAND_PEER_STUCK,
            .thread = data->index,
            .index = peer->index,
            .token = peer->token,
        };
        peer->is_told = kv_ring_push(data->answers, &peer->notice);
        data->answers_due = true;
    }
    kv_peer_close(data, peer);
}

static void on_failed(void *owner, void *channel_arg, kv_status_t status)
{
    struct kv_data *data = owner;

    (void)status;
    kv_count(&data->stats.failed_channels, 1);
    peer_lost(data, channel_arg);
}

static const struct kv_port_events events = {on_message, on_incoming, on_failed};

/* ---- parts ------------------------------------------------------------------------------- */

struct kv_unit *kv_part_unit(const struct kv_part *part, uint32_t layer, uint32_t kv_head)
{
    if (layer >= part->schema->n_layers || kv_head >= part->schema->layers[layer].n_kv_heads)
        return NULL;
    uint16_t at = part->unit_of[kv_schema_unit(part->schema, layer, kv_head)];
    return at == UINT16_MAX ? NULL : &part->units[at];
}

uint32_t kv_part_verify(const struct kv_part *part,
                        const struct kv_unit *unit,
                        uint32_t begin,
                        uint32_t count,
                        const void *rows,
                        const uint32_t *crcs)
{
    return (uint32_t)kv_writers_verify(part->writers, unit->layer, unit->kv_head, rows, count,
                                       unit->row_bytes, begin, NULL, crcs);
}

void kv_part_wake(struct kv_data *data, struct kv_part *part, uint32_t tokens)
{
    if (part->waiters == NULL)
        return;
    if (!part->is_woken) {
        part->is_woken = true;
        part->woken_to = 0;
        part->woken_next = NULL;
        *data->woken_end = part;
        data->woken_end = &part->woken_next;
    }
    if (part->woken_to < tokens)
        part->woken_to = tokens;
}

static void take_woken(struct kv_data *data)
{
    struct kv_part *part = data->woken;

    data->woken = part->woken_next;
    if (data->woken == NULL)
        data->woken_end = &data->woken;
    part->is_woken = false;
    for (struct kv_work *work = part->waiters, *next; work != NULL; work = next) {
        next = work->next;
        if (work->needs > part->woken_to)
            continue;
        append_work(&data->looking, work);
        work->state = KV_WORK_WAITING; /* it may be late, or cancelled */
    }
}

/* Works that waited look again.  One whose rows go in wakes others: these have their turn in
 * the next step, so that a long chain of them keeps the thread from nothing. */
static bool look_again(struct kv_data *data)
{
    const bool querying = data->queues[KV_CLASS_QUERY].first != NULL;

    if (data->looking.first == NULL) {
        if (data->woken == NULL)
            return false;
        take_woken(data);
    }
    for (int i = 0; i < LOOKS_PER_STEP && data->looking.first != NULL; i++) {
        struct kv_work *work = data->looking.first;

        unlink_work(work);
        work->state = KV_WORK_BEGUN;
        work->row->wake(work);
        if (querying && kv_clock_now(data->clock) - data->now_us >= MESSAGES_US)
            break;
    }
    return true;
}

/* ---- one step ---------------------------------------------------------------------------- */

static void work_late(struct kv_work *work)
{
    kv_count(&work->data->stats.late, 1);
    if (work->state == KV_WORK_AWAIT_BULK) {
        /* Its bulk never came; should it still come, it belongs to nobody and is refused. */
        if (!work->discard) {
            work->status = KV_DEADLINE;
            if (work->row->release != NULL)
                work->row->release(work); /* needs the body, which `small` may hold */
            snprintf((char *)work->small, sizeof(work->small),
                     "%s: the data did not arrive in time", work->row->name);
        }
        work->landed = true;
        answer_status(work);
    } else if (work->state == KV_WORK_QUEUED) {
        work->landed = true;
        kv_work_fail(work, KV_DEADLINE, "%s: the node was too busy", work->row->name);
    } else {
        work->landed = true;
        const struct kv_wire_header *request = &work->request;
        if (work->row->waits_for != NULL)
            kv_work_fail(work, KV_NOT_READY, "%s: %s did not come in time", work->row->name,
                         work->row->waits_for);
        else
            kv_work_fail(work, KV_NOT_READY, "%s: rows up to %u are not committed",
                         work->row->name,
                         request->snapshot > 0 ? request->snapshot : request->token_begin);
    }
}

/* Since when the client has done nothing about it.  While it sends, one of its transfers may
 * take longer, unless the work has ended that the data was for. */
static uint64_t idle_since(const struct kv_work *work)
{
    bool may_take_longer = work->state != KV_WORK_SENDING && !work->orphan;

    return may_take_longer && work->peer->heard_us > work->since_us ? work->peer->heard_us
                                                                    : work->since_us;
}

/* When the work has to be looked at again. */
static uint64_t next_look(const struct kv_work *work)
{
    uint64_t stuck_us = idle_since(work) + work->data->stuck_send_us;

    switch (work->state) {
    case KV_WORK_WAITING:
    case KV_WORK_QUEUED:
        return work->deadline_us;
    case KV_WORK_AWAIT_BULK:
    case KV_WORK_RECEIVING:
        return work->orphan || stuck_us < work->deadline_us ? stuck_us : work->deadline_us;
    default:
        return stuck_us;
    }
}

/* Its data is on its way and did not arrive by its deadline. */
static void receive_late(struct kv_work *work)
{
    struct kv_data *data = work->data;

    kv_count(&data->stats.late, 1);
    work->status = KV_DEADLINE;
    work_give_up(work);
    note(data, work->peer, &work->request, KV_DEADLINE, "%s: the data did not arrive in time",
         work->row->name);
}

/* Ends what is late.  true: the client is stuck. */
static bool peer_timers(struct kv_data *data, struct kv_peer *peer)
{
    bool stuck = false;

    for (struct kv_work *work = peer->works, *next; work != NULL; work = next) {
        next = work->peer_next;
        if (work->state == KV_WORK_SENDING || work->state == KV_WORK_AWAIT_BULK ||
            work->state == KV_WORK_RECEIVING)
            stuck = stuck || data->now_us >= idle_since(work) + data->stuck_send_us;
        if (data->now_us < work->deadline_us || work->orphan)
            continue;
        if (work->state == KV_WORK_RECEIVING) {
            receive_late(work);
        } else if (work->state == KV_WORK_WAITING || work->state == KV_WORK_AWAIT_BULK ||
                   work->state == KV_WORK_QUEUED) {
            work_late(work);
            next = peer->works; /* ending one may have ended others */
        }
    }
    peer->due_us = UINT64_MAX;
    for (struct kv_work *work = peer->works; work != NULL; work = work->peer_next)
        work_due(work, next_look(work));
    return stuck;
}

static void peer_stuck(struct kv_data *data, struct kv_peer *peer)
{
    kv_count(&data->stats.stuck_clients, 1);
    peer_lost(data, peer);
}

static void receipt_timers(struct kv_data *data)
{
    for (uint32_t i = 0; kv_pool_lent(data->receipts) > 0 && i < KV_RECEIPTS; i++) {
        struct receipt *receipt = kv_pool_at(data->receipts, i);

        if (receipt->peer != NULL && receipt->peer->state == KV_PEER_OPEN &&
            data->now_us >= receipt->since_us + data->stuck_send_us)
            peer_stuck(data, receipt->peer);
    }
}

static void tell(_Atomic uint64_t *number, uint64_t value)
{
    atomic_store_explicit(number, value, memory_order_relaxed);
}

static void tell_memory(struct kv_data *data)
{
    struct kv_stats *stats = &data->stats;
    const struct kv_codebooks *books = &data->heap.codebooks;

    tell(&stats->memory_lent, kv_arena_bytes_lent(data->arena));
    tell(&stats->segments, data->heap.n_segments);
    tell(&stats->codebooks, kv_pool_lent(books->pool));
    tell(&stats->summarised, books->rows_summarised);
    tell(&stats->summaries_bytes, books->summaries_bytes);
    tell(&stats->objects, kv_map_count(data->objects.map));
    tell(&stats->object_bytes, data->objects.bytes);
}

static void tell_index(struct kv_data *data)
{
    struct kv_stats *stats = &data->stats;
    struct kv_indexer_stats index;

    kv_indexer_stats(data->indexer, &index);
    tell(&stats->index_jobs, index.n_jobs);
    tell(&stats->index_us, index.worked_us);
    tell(&stats->index_failed, index.failed);
    tell(&stats->codebooks_trained, index.trained);
    tell(&stats->rows_coded, index.rows_coded);
    tell(&stats->rows_summarised, index.rows_summarised);
    tell(&stats->summaries_failed, index.summaries_failed);
}

static void tell_health(struct kv_data *data)
{
    const struct kv_health *health = &data->heap.health;
    struct kv_stats *stats = &data->stats;
    _Atomic uint64_t *const found[KV_KINDS] = {
        [KV_KIND_ROWS] = &stats->bad_rows,           [KV_KIND_CODES] = &stats->bad_codes,
        [KV_KIND_CENTROIDS] = &stats->bad_centroids, [KV_KIND_CELLS] = &stats->bad_cells,
        [KV_KIND_SUMMARIES] = &stats->bad_summaries, [KV_KIND_OBJECTS] = &stats->bad_objects,
    };
    _Atomic uint64_t *const mended[KV_KINDS] = {
        [KV_KIND_ROWS] = &stats->mended_rows,
        [KV_KIND_CODES] = &stats->mended_codes,
        [KV_KIND_CENTROIDS] = &stats->mended_centroids,
        [KV_KIND_CELLS] = &stats->mended_cells,
        [KV_KIND_SUMMARIES] = &stats->mended_summaries,
        [KV_KIND_OBJECTS] = &stats->mended_objects,
    };
    struct kv_scrub_progress progress;

    kv_scrub_progress(data->scrub, &progress);
    for (unsigned kind = 0; kind < KV_KINDS; kind++) {
        tell(found[kind], health->found[kind]);
        tell(mended[kind], health->mended[kind]);
    }
    tell(&stats->rows_bad, health->rows_bad);
    tell(&stats->objects_bad, health->objects_bad);
    tell(&stats->scrub_bytes, progress.bytes);
    tell(&stats->scrub_passes, progress.n_passes);
    tell(&stats->scrub_phase, progress.phase);
    tell(&stats->scrub_session, progress.session);
    tell(&stats->scrub_pass_bytes, progress.pass_bytes);
    tell(&stats->scrub_last_us, progress.last_pass_us);
    tell(&stats->scrub_last_bytes, progress.last_pass_bytes);
}

static void timers(struct kv_data *data)
{
    for (uint32_t i = 0; i < data->n_peers; i++) {
        struct kv_peer *peer = &data->peers[i];

        if (peer->state == KV_PEER_FREE)
            continue;
        stash_clear(peer, data->now_us > STASH_MAX_US ? data->now_us - STASH_MAX_US : 0);
        if (data->now_us >= peer->due_us && peer_timers(data, peer) &&
            peer->state == KV_PEER_OPEN)
            peer_stuck(data, peer);
    }
    receipt_timers(data);
    tell_memory(data);
    tell_index(data);
    tell_health(data);
}

static bool run_slice(struct kv_data *data)
{
    for (int class = 0; class < KV_CLASS_COUNT; class ++) {
        struct kv_work *work = data->queues[class].first;
        if (work != NULL) {
            unlink_work(work);
            work->state = KV_WORK_BEGUN;
            if (work->row->run(work) && work->state == KV_WORK_BEGUN)
                kv_work_queue(work);
            return true;
        }
    }
    return false;
}

/* What nobody waits for, or waits patiently: codebooks, then looks at how good they are.  The
 * scrub takes turns with them: it is told how little it may do. */
static bool run_background(struct kv_data *data)
{
    data->turns = 0;
    data->scrub_is_next = !data->scrub_is_next;
    if (data->scrub_is_next && kv_scrub_step(data->scrub))
        return true;
    if (!kv_indexer_step(data->indexer))
        return kv_recall_step(data->querier->recall);
    if (kv_indexer_take_ended(data->indexer))
        for (uint32_t i = 0; i < data->n_parts; i++)
            kv_part_wake(data, &data->parts[i], UINT32_MAX);
    return true;
}

/* A prompt's rows come in large messages, one behind the other: while a query is at work only
 * one of them has its turn after every few slices.  Of small ones, many have: a client that
 * asks whether the node lives is not kept waiting by what others send. */
static bool take_messages(struct kv_data *data)
{
    bool querying = data->queues[KV_CLASS_QUERY].first != NULL;
    bool busy = false;

    if (querying && ++data->query_slices < QUERY_SLICES)
        return false;
    data->query_slices = 0;
    for (int i = 0; i < MESSAGES_PER_STEP && kv_port_progress(data->port) > 0; i++) {
        busy = true;
        if (querying && kv_clock_now(data->clock) - data->now_us >= MESSAGES_US)
            break;
    }
    return busy;
}

bool kv_data_step(struct kv_data *data)
{
    bool busy = false;

    data->now_us = kv_clock_now(data->clock);
    busy = take_messages(data);
    busy = kv_data_command_step(data) || busy;
    bool sliced = run_slice(data);
    if (!sliced || ++data->turns >= BACKGROUND_EVERY)
        sliced = run_background(data) || sliced;
    busy = busy || sliced;
    busy = look_again(data) || busy;
    if (busy)
        data->moved_us = data->now_us;
    if (data->now_us >= data->timers_us) {
        data->timers_us = data->now_us + TIMERS_EVERY_US;
        atomic_store_explicit(&data->seen_us, data->now_us, memory_order_relaxed);
        timers(data);
        busy = busy || kv_pool_lent(data->works) > 0;
    }
    if (!busy)
        busy = kv_arena_touch_ahead(data->arena) > 0;
    return busy;
}

/* ---- init, fini -------------------------------------------------------------------------- */

kv_status_t kv_data_init(struct kv_data *data, const struct kv_data_setup *setup)
{
    kv_status_t status = KV_NO_MEMORY;

    memset(data, 0, sizeof(*data));
    data->node = setup->node;
    data->index = setup->index;
    data->n_threads = setup->n_threads;
    data->stuck_send_us = setup->stuck_send_us;
    data->clock = setup->clock;
    atomic_init(&data->seen_us, kv_clock_now(setup->clock));
    data->answers = setup->answers;
    data->n_parts = setup->n_parts;
    data->n_peers = setup->n_peers;
    for (int i = 0; i < KV_CLASS_COUNT; i++)
        data->queues[i].end = &data->queues[i].first;
    data->unstaged.end = &data->unstaged.first;
    data->looking.end = &data->looking.first;
    data->woken_end = &data->woken;

    data->arena = kv_arena_create(setup->memory_bytes);
    data->parts = calloc(setup->n_parts, sizeof(*data->parts));
    data->peers = calloc(setup->n_peers, sizeof(*data->peers));
    data->works = kv_pool_create(setup->n_works, sizeof(struct kv_work));
    data->middles = kv_pool_create(setup->n_works, KV_MIDDLE_BYTES);
    data->bodies = kv_pool_create(KV_BODIES, KV_WIRE_BODY_MAX);
    data->stagings = kv_pool_create(KV_STAGINGS, KV_WIRE_BULK_MAX);
    data->receipts = kv_pool_create(KV_RECEIPTS, sizeof(struct receipt));
    data->commands = kv_ring_create(setup->n_commands);
    if (data->arena == NULL || data->parts == NULL || data->peers == NULL ||
        data->works == NULL || data->middles == NULL || data->bodies == NULL ||
        data->stagings == NULL || data->receipts == NULL || data->commands == NULL ||
        !kv_heap_init(&data->heap, data->arena) ||
        !kv_objects_init(&data->objects, data->arena, &data->heap.health, setup->secret,
                         setup->object_version))
        goto err_fini;
    data->indexer = kv_indexer_create(&data->heap, data->clock);
    data->querier = kv_querier_create(data);
    data->scrub = kv_scrub_create(data, setup->scrub_bytes);
    if (data->indexer == NULL || data->querier == NULL || data->scrub == NULL)
        goto err_fini;
    for (uint32_t i = 0; i < setup->n_parts; i++)
        data->parts[i].index = i;
    status = setup->transport->row->port_open(setup->transport, &events, data, &data->port);
    if (status == KV_OK)
        return KV_OK;

err_fini:
    kv_data_fini(data);
    return status;
}

void kv_data_fini(struct kv_data *data)
{
    if (data->peers != NULL)
        for (uint32_t i = 0; i < data->n_peers; i++)
            kv_peer_close(data, &data->peers[i]);
    if (data->port != NULL)
        data->port->row->port_close(data->port);
    kv_ring_destroy(data->commands);
    kv_scrub_destroy(data->scrub);
    kv_querier_destroy(data->querier);
    kv_indexer_destroy(data->indexer);
    kv_heap_fini(&data->heap);
    kv_objects_fini(&data->objects);
    kv_pool_destroy(data->receipts);
    kv_pool_destroy(data->stagings);
    kv_pool_destroy(data->bodies);
    kv_pool_destroy(data->middles);
    kv_pool_destroy(data->works);
    free(data->peers);
    free(data->parts);
    kv_arena_destroy(data->arena);
    memset(data, 0, sizeof(*data));
}
