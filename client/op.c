#include "client/op.h"

#include "client/buffer.h"
#include "client/call.h"
#include "client/client.h"
#include "client/connection.h"
#include "client/include/kvclient.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/request.h"
#include "client/session.h"
#include "kvserver/base/clock.h"
#include "kvserver/base/pool.h"
#include "proto/kv_wire.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- words ------------------------------------------------------------------------------- */

void kv_op_fail(struct kv_op *op,
                const struct kv_remote *remote,
                const struct kv_trip *trip,
                kv_status_t status,
                const char *format,
                ...)
{
    struct kv_client *client = op->client;
    size_t name_bytes = strlen(op->kind->name);
    char text[200], about[120] = "";
    const char *why = text;
    va_list args;

    if (op->stage == KV_STAGE_ENDED)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    /* Nodes begin their texts with the operation's name, too. */
    if (strncmp(text, op->kind->name, name_bytes) == 0 &&
        strncmp(text + name_bytes, ": ", 2) == 0)
        why = text + name_bytes + 2;
    if (op->kind->describe != NULL)
        op->kind->describe(op, trip, about, sizeof(about));
    snprintf(op->detail, sizeof(op->detail), "%s%s%s%s: %s: after %.3f s%s%s%s%s",
             remote != NULL ? "node " : "", remote != NULL ? remote->address : "",
             remote != NULL ? ": " : "", op->kind->name, kv_status_name(status),
             (double)(client->loop.now_us - op->owner.begin_us) / 1e6, why[0] != 0 ? ": " : "",
             why, about[0] != 0 ? ": " : "", about);
    kv_op_end(op, status);
}

void kv_session_describe_op(const struct kv_op *op,
                            const struct kv_trip *trip,
                            char *text,
                            size_t text_bytes)
{
    const struct kv_session *session = op->session != NULL ? op->session : op->result;
    char id[KV_SESSION_TEXT];

    (void)trip;
    if (session != NULL)
        snprintf(text, text_bytes, "session %s",
                 kv_session_text(&session->ticket.session_id, id));
}

void kv_op_note(struct kv_op *op,
                const struct kv_remote *remote,
                kv_status_t status,
                const char *text)
{
    if (op->partial != KV_OK)
        return;
    op->partial = status;
    op->partial_remote = remote;
    snprintf(op->partial_text, sizeof(op->partial_text), "%.*s",
             (int)sizeof(op->partial_text) - 1, text);
}

/* ---- its requests and calls --------------------------------------------------------------- */

/* Ends it with success or op->partial if nothing is left to do. */
static void check_end(struct kv_op *op);

struct kv_op *kvc_request_op(const struct kv_trip *trip)
{
    return trip->owner != NULL ? KV_LIST_ENTRY(trip->owner, struct kv_op, owner) : NULL;
}

struct kv_op *kvc_call_op(const struct kv_call *call)
{
    return call->owner != NULL ? KV_LIST_ENTRY(call->owner, struct kv_op, owner) : NULL;
}

struct kv_trip *kvc_op_take_request(struct kv_op *op, struct kv_lane *lane)
{
    return kv_trip_take(lane, kv_op_priority(op->kind->id), &op->owner);
}

static bool awaits_others(const struct kv_trip *trip)
{
    const struct kv_op_kind *kind = kvc_request_op(trip)->kind;

    return kind->awaits != NULL && kind->awaits(trip);
}

static void address(const struct kv_trip *trip, struct kv_wire_header *header)
{
    const struct kv_op *op = kvc_request_op(trip);
    const struct kv_session *session = op->session;

    if (session != NULL) {
        header->session_index = session->nodes[trip->remote->index].index;
        header->generation = session->generation;
        header->token = session->ticket.token;
    }
    if (op->kind->awaits != NULL)
        header->snapshot = awaits_others(trip) ? header->token_begin : 0;
}

static unsigned land(struct kv_trip *trip, uint64_t bytes, struct kv_iov *ret_iov)
{
    const struct kv_op_kind *kind = kvc_request_op(trip)->kind;

    return kind->land != NULL ? kind->land(trip, bytes, ret_iov) : 0;
}

static kv_status_t
reply(struct kv_trip *trip, const uint8_t *body, char *detail, size_t detail_bytes)
{
    return kvc_request_op(trip)->kind->reply(trip, body, detail, detail_bytes);
}

static kv_status_t finish(struct kv_trip *trip, char *detail, size_t detail_bytes)
{
    const struct kv_op_kind *kind = kvc_request_op(trip)->kind;

    return kind->finish != NULL ? kind->finish(trip, detail, detail_bytes) : KV_OK;
}

static void failed(struct kv_trip *trip, kv_status_t status, const char *detail)
{
    struct kv_op *op = kvc_request_op(trip);

    if (op->kind->failed == NULL) {
        kv_op_fail(op, trip->remote, trip, status, "%s", detail);
        return;
    }
    op->kind->failed(trip, status, detail);
    kv_trip_end(trip);
    check_end(op);
}

static const struct kvc_request_ops request_ops = {
    .address = address,
    .awaits = awaits_others,
    .land = land,
    .reply = reply,
    .finish = finish,
    .failed = failed,
};

static void done(struct kvc_owner *owner)
{
    check_end(KV_LIST_ENTRY(owner, struct kv_op, owner));
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
    if (reply->snapshot < tokens || reply->snapshot > kvc_request_op(trip)->session->tokens_max)
        return kv_reply_refuse(detail, detail_bytes, "snapshot: %u: %u to %u tokens are right",
                               reply->snapshot, tokens,
                               kvc_request_op(trip)->session->tokens_max);
    return KV_OK;
}

/* ---- life -------------------------------------------------------------------------------- */

kv_status_t kv_op_begin(struct kv_client *client,
                        const struct kv_op_kind *kind,
                        struct kv_session *session,
                        struct kv_buffer *buffer,
                        uint32_t deadline_ms,
                        struct kv_op **ret_op)
{
    uint64_t within_us = deadline_ms > 0 ? (uint64_t)deadline_ms * 1000 : client->deadline_us;
    struct kv_op *op;
    size_t room_bytes;
    void *room;

    if (session != NULL && session->is_closed)
        return kvc_set_error(&client->loop, KV_NOT_FOUND, "%s: the session was closed",
                             kind->name);
    op = kv_pool_get(client->op_pool);
    if (op == NULL)
        return kvc_set_error(&client->loop, KV_BUSY, "%s: %u operations exist already",
                             kind->name, kv_pool_size(client->op_pool));
    kvc_loop_update_time(&client->loop);
    room = op->room;
    room_bytes = op->room_bytes;
    memset(op, 0, sizeof(*op));
    op->room = room;
    op->room_bytes = room_bytes;
    kv_list_init(&op->of_client);
    kv_list_init(&op->of_session);
    kv_list_init(&op->owner.trips);
    op->owner.request_ops = &request_ops;
    op->owner.done = done;
    kv_list_init(&op->errands);
    op->is_lent = true;
    op->client = client;
    op->kind = kind;
    op->status = KV_IN_PROGRESS;
    op->owner.begin_us = client->loop.now_us;
    op->owner.deadline_us =
        client->loop.now_us +
        (within_us < KV_WIRE_DEADLINE_MAX_US ? within_us : KV_WIRE_DEADLINE_MAX_US);
    op->session = session;
    op->needs_current = kind->needs_current;
    op->owner.buffer = buffer;
    kv_buffer_hold(buffer);
    *ret_op = op;
    return KV_OK;
}

void *kv_op_room(struct kv_op *op, size_t bytes)
{
    bytes += bytes == 0;
    if (bytes > op->room_bytes) {
        free(op->room);
        op->room = malloc(bytes);
        op->room_bytes = op->room != NULL ? bytes : 0;
    }
    return op->room;
}

void *kv_op_keep(uint8_t **at, const void *from, size_t bytes)
{
    void *copy = *at;

    if (bytes > 0)
        memcpy(copy, from, bytes);
    *at += bytes;
    return copy;
}

static void give_back(struct kv_op *op)
{
    if (op->room_bytes > KV_OP_ROOM_KEPT) {
        free(op->room);
        op->room = NULL;
        op->room_bytes = 0;
    }
    op->is_lent = false;
    kv_pool_put(op->client->op_pool, op);
}

void kv_op_discard(struct kv_op *op)
{
    kv_buffer_release(op->owner.buffer);
    give_back(op);
}

kv_status_t kv_op_go(struct kv_op *op, struct kv_op **ret_op)
{
    struct kv_client *client = op->client;
    struct kv_session *session = op->session;

    kv_list_append(&client->ops, &op->of_client);
    op->stage = KV_STAGE_PREPARING;
    if (session != NULL) {
        bool waits =
            op->kind->is_exclusive ? !kv_list_empty(&session->ops) : session->n_exclusive > 0;

        kv_list_append(&session->ops, &op->of_session);
        session->n_exclusive += op->kind->is_exclusive;
        if (waits) {
            op->stage = KV_STAGE_QUEUED;
            session->n_queued++;
        }
    }
    kvc_loop_set_timer(&client->loop, op->owner.deadline_us);
    if (op->stage == KV_STAGE_PREPARING) {
        client->n_preparing++;
        kv_op_prepare(op);
    }
    *ret_op = op;
    kv_client_pump(client);
    return KV_OK;
}

void kv_op_need(struct kv_op *op, uint32_t node)
{
    op->needs[node / 64] |= UINT64_C(1) << node % 64;
}

void kv_op_need_units(struct kv_op *op,
                      uint32_t layer_begin,
                      uint32_t layer_end,
                      uint32_t head_begin,
                      uint32_t n_heads)
{
    const struct kv_session *session = op->session;
    const kv_schema_t *schema = &session->schema;

    for (uint32_t layer = layer_begin; layer < layer_end; layer++) {
        uint32_t end = n_heads > 0 ? head_begin + n_heads : schema->layers[layer].n_kv_heads;

        for (uint32_t head = head_begin; head < end; head++) {
            uint32_t slot = session->slots[kv_schema_unit(schema, layer, head)];

            kv_op_need(op, op->client->placement.node_of[slot]);
        }
    }
}

void kv_op_need_all(struct kv_op *op)
{
    for (uint32_t i = 0; i < op->client->n_remotes; i++)
        kv_op_need(op, i);
}

bool kv_op_needs(const struct kv_op *op, uint32_t node)
{
    return op->needs[node / 64] >> node % 64 & 1;
}

static void need_no_more(struct kv_op *op, uint32_t node)
{
    op->needs[node / 64] &= ~(UINT64_C(1) << node % 64);
}

bool kv_op_uses(const struct kv_op *op, const struct kv_remote *remote)
{
    struct kv_list *link, *follow;

    KV_LIST_EACH(link, follow, &op->owner.trips) {
        if (KV_LIST_ENTRY(link, struct kv_trip, of_owner)->remote == remote)
            return true;
    }
    KV_LIST_EACH(link, follow, &op->errands) {
        if (KV_LIST_ENTRY(link, struct kv_errand, of_op)->lane->link.remote == remote)
            return true;
    }
    return false;
}

void kv_op_lose(struct kv_op *op, struct kv_remote *remote, kv_status_t status, const char *why)
{
    struct kv_list *link, *follow;

    need_no_more(op, remote->index);
    KV_LIST_EACH(link, follow, &op->owner.trips) {
        struct kv_trip *trip = KV_LIST_ENTRY(link, struct kv_trip, of_owner);

        if (trip->remote == remote)
            kv_trip_abandon(trip);
    }
    KV_LIST_EACH(link, follow, &op->errands) {
        struct kv_errand *errand = KV_LIST_ENTRY(link, struct kv_errand, of_op);

        if (errand->lane->link.remote == remote)
            kv_errand_free(errand);
    }
    op->kind->lost(op, remote, status, why);
    op->client->loop.must_dispatch = true; /* it may have been the last node */
    check_end(op);
}

bool kvc_op_ask_unit(struct kv_op *op, uint32_t layer, uint32_t head, uint64_t position)
{
    struct kv_lane *lane = kv_session_lane(op->session, layer, head);
    struct kv_errand *errand;

    if (lane->mark == op)
        return true;
    lane->mark = op;
    errand = kv_errand_add(op, lane);
    if (errand == NULL) {
        kv_op_fail(op, NULL, NULL, KV_NO_MEMORY, "out of memory");
        return false;
    }
    errand->layer = layer;
    errand->head = head;
    errand->position = position;
    return true;
}

void kv_op_again(struct kv_op *op)
{
    op->stage = KV_STAGE_PREPARING;
    op->client->n_preparing++;
    op->client->loop.must_dispatch = true;
}

void kv_op_prepare(struct kv_op *op)
{
    struct kv_client *client = op->client;
    struct kv_session *session = op->session != NULL ? op->session : op->result;
    bool is_ready = true;
    char text[160];

    for (uint32_t i = 0; i < client->n_remotes; i++) {
        struct kv_remote *remote = &client->remotes[i];
        kv_status_t status = KV_OK;

        if (!kv_op_needs(op, i))
            continue;
        if (remote->state != KV_REMOTE_CONNECTED || remote->failure != KV_OK) {
            kv_remote_connect(remote);
            status = KV_IN_PROGRESS;
        } else if (op->kind->start_node != NULL) {
            need_no_more(op, i);
            op->kind->start_node(op, remote);
        } else if (op->needs_current) {
            status = kv_session_ready(session, remote, text, sizeof(text));
        }
        if (status == KV_IN_PROGRESS) {
            is_ready = false;
        } else if (status == KV_STALE && op->kind->overtaken != NULL) {
            op->kind->overtaken(op);
            client->loop.must_dispatch = true;
            return;
        } else if (status != KV_OK) {
            kv_op_fail(op, remote, NULL, status, "%s", text);
            return;
        }
    }
    if (!is_ready)
        return;
    op->stage = KV_STAGE_RUNNING;
    client->n_preparing--;
    if (op->kind->start != NULL)
        op->kind->start(op);
    check_end(op);
}

static void check_end(struct kv_op *op)
{
    if (op->stage != KV_STAGE_RUNNING || op->owner.n_calls > 0 ||
        !kv_list_empty(&op->owner.trips) || !kv_list_empty(&op->errands))
        return;
    if (op->partial != KV_OK)
        kv_op_fail(op, op->partial_remote, NULL, op->partial, "%s", op->partial_text);
    else
        kv_op_end(op, KV_OK);
}

/* Starts operations that waited for one that has ended. */
static void admit(struct kv_session *session)
{
    struct kv_client *client = session->client;
    bool is_first = true;
    struct kv_list *link, *follow;

    if (session->n_queued == 0)
        return;
    KV_LIST_EACH(link, follow, &session->ops) {
        struct kv_op *op = KV_LIST_ENTRY(link, struct kv_op, of_session);

        if (op->kind->is_exclusive && !is_first)
            return;
        if (op->stage == KV_STAGE_QUEUED) {
            op->stage = KV_STAGE_PREPARING;
            session->n_queued--;
            client->n_preparing++;
            client->loop.must_dispatch = true;
        }
        if (op->kind->is_exclusive)
            return;
        is_first = false;
    }
}

void kv_op_end(struct kv_op *op, kv_status_t status)
{
    struct kv_client *client = op->client;
    struct kv_session *session = op->session;
    struct kv_list *link, *follow;

    if (op->stage == KV_STAGE_ENDED)
        return;
    client->n_preparing -= op->stage == KV_STAGE_PREPARING;
    if (session != NULL) {
        session->n_queued -= op->stage == KV_STAGE_QUEUED;
        session->n_exclusive -= op->kind->is_exclusive;
        kv_list_remove(&op->of_session);
    }
    op->stage = KV_STAGE_ENDED;
    op->status = status;
    op->end_us = kv_clock_now(client->loop.clock);
    kv_list_remove(&op->of_client);
    KV_LIST_EACH(link, follow, &op->errands)
        kv_errand_free(KV_LIST_ENTRY(link, struct kv_errand, of_op));
    KV_LIST_EACH(link, follow, &op->owner.trips)
        kv_trip_abandon(KV_LIST_ENTRY(link, struct kv_trip, of_owner));
    kvc_calls_disown(client, &op->owner);
    if (op->kind->ended != NULL)
        op->kind->ended(op);
    op->session = NULL;
    kv_buffer_release(op->owner.buffer);
    op->owner.buffer = NULL;
    if (session != NULL)
        admit(session);
    if (status != KV_OK)
        memcpy(client->loop.detail, op->detail, sizeof(client->loop.detail));
    client->loop.n_ended++;
    client->loop.must_dispatch = true;
}

/* ---- what parts below tell ---------------------------------------------------------------- */

static void node_lost(struct kv_remote *remote, bool was_connecting)
{
    struct kv_client *client = remote->client;
    struct kv_list *link, *follow;

    KV_LIST_EACH(link, follow, &client->ops) {
        struct kv_op *op = KV_LIST_ENTRY(link, struct kv_op, of_client);
        bool waited =
            was_connecting && op->stage == KV_STAGE_PREPARING && kv_op_needs(op, remote->index);

        if (waited && op->kind->is_tolerant) {
            kv_op_note(op, remote, remote->failure, remote->failure_text);
            need_no_more(op, remote->index);
            client->loop.must_dispatch = true;
        } else if (!waited && !kv_op_uses(op, remote)) {
            continue;
        } else if (op->kind->lost != NULL) {
            kv_op_lose(op, remote, remote->failure, remote->failure_text);
        } else {
            kv_op_fail(op, remote, NULL, remote->failure, "%s", remote->failure_text);
        }
    }
}

/* The operations that wait for the node to catch up do so in vain. */
static void catch_up_failed(struct kv_session *session,
                            const struct kv_remote *remote,
                            kv_status_t status,
                            const char *detail)
{
    struct kv_client *client = session->client;
    struct kv_list *link, *follow;

    /* One that may begin anew finds out how far the node is when it looks again. */
    client->loop.must_dispatch = true;
    /* A resume that fails frees the session: it is only a name in here. */
    KV_LIST_EACH(link, follow, &client->ops) {
        struct kv_op *op = KV_LIST_ENTRY(link, struct kv_op, of_client);

        if (op->stage == KV_STAGE_PREPARING && op->needs_current &&
            (op->session == session || op->result == session) &&
            kv_op_needs(op, remote->index) &&
            (status != KV_STALE || op->kind->overtaken == NULL))
            kv_op_fail(op, remote, NULL, status, "it cannot catch up: %s", detail);
    }
}

const struct kvc_op_events kvc_op_events = {
    .node_lost = node_lost,
    .catch_up_failed = catch_up_failed,
};

/* ---- the caller's ------------------------------------------------------------------------ */

kv_status_t kv_op_status(const struct kv_op *op)
{
    return op->status;
}

kv_status_t kv_wait(struct kv_op *op)
{
    kv_client_sleep(op->client, op, UINT64_MAX);
    return op->status;
}

void kv_cancel(struct kv_op *op)
{
    if (op->stage == KV_STAGE_ENDED)
        return;
    kvc_loop_update_time(&op->client->loop);
    kv_op_fail(op, NULL, NULL, KV_CANCELLED, "%s", "");
}

void kv_session_free(struct kv_session *session)
{
    if (session == NULL)
        return;
    kvc_loop_update_time(&session->client->loop);
    while (!kv_list_empty(&session->ops))
        kv_cancel(KV_LIST_ENTRY(session->ops.previous, struct kv_op, of_session));
    kvc_session_destroy(session);
}

void kv_op_free(struct kv_op *op)
{
    if (op == NULL)
        return;
    kv_cancel(op);
    if (op->kind->fini != NULL)
        op->kind->fini(op);
    if (op->result != NULL)
        kv_session_free(op->result);
    op->result = NULL;
    give_back(op);
}

kv_status_t kv_finish(struct kv_op *op)
{
    kv_status_t status = kv_wait(op);

    kv_op_free(op);
    return status;
}

const char *kv_op_detail(const struct kv_op *op)
{
    return op->detail;
}

uint64_t kv_op_elapsed_us(const struct kv_op *op)
{
    return op->stage == KV_STAGE_ENDED ? op->end_us - op->owner.begin_us : 0;
}

void kv_op_get_times(const struct kv_op *op, struct kv_op_times *ret_times)
{
    *ret_times = (struct kv_op_times){
        .begun_us = op->owner.begin_us,
        .sent_us = op->owner.sent_us,
        .arrived_us = op->owner.arrived_us,
        .ended_us = op->end_us,
    };
}

struct kv_session *kv_op_session(struct kv_op *op)
{
    struct kv_session *session = op->status == KV_OK ? op->result : NULL;

    if (session != NULL)
        op->result = NULL;
    return session;
}

uint32_t kv_op_tokens(const struct kv_op *op)
{
    return op->tokens;
}
