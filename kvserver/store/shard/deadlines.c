/* Deadlines: ends requests that are too late, and disconnects clients that make no progress. */
#include "kvserver/store/shard/shard_private.h"

#include "kvserver/store/shard/op.h"
#include "kvserver/store/tier/disk_tier.h"

#include <stdio.h>

enum {
    LOOK_AGAIN_US = 1000, /* after a look at a client that has something overdue */
    NOTE_US =
        2000, /* between two notes of sessions whose requests wait for rows: less than after
                     * which they would rest (control/rest.c) */
};

/* ---- when to look at which client -------------------------------------------------------- */

/* Clients are in a heap by the time before which none of their requests is late, so a round of
 * checks looks only at clients that may have a late one.  A client that has nothing is last. */

static void place(struct kvs_shard *shard, uint32_t at, struct kvs_shard_client *client)
{
    shard->due[at] = client;
    client->due_at = at;
}

/* Moves the client to its place, up or down from the one that it has. */
static void sift(struct kvs_shard *shard, struct kvs_shard_client *client)
{
    uint32_t at = client->due_at, child;

    for (; at > 0 && shard->due[(at - 1) / 2]->due_us > client->due_us; at = (at - 1) / 2)
        place(shard, at, shard->due[(at - 1) / 2]);
    for (; (child = 2 * at + 1) < shard->n_clients; at = child) {
        if (child + 1 < shard->n_clients &&
            shard->due[child + 1]->due_us < shard->due[child]->due_us)
            child++;
        if (shard->due[child]->due_us >= client->due_us)
            break;
        place(shard, at, shard->due[child]);
    }
    place(shard, at, client);
}

static void set_due(struct kvs_shard *shard, struct kvs_shard_client *client, uint64_t due_us)
{
    if (due_us == client->due_us)
        return;
    client->due_us = due_us;
    sift(shard, client);
}

void kvs_shard_client_due(struct kvs_shard *shard,
                          struct kvs_shard_client *client,
                          uint64_t due_us)
{
    if (due_us < client->due_us)
        set_due(shard, client, due_us);
}

void kvs_shard_due_init(struct kvs_shard *shard)
{
    for (uint32_t i = 0; i < shard->n_clients; i++) {
        shard->clients[i].due_us = UINT64_MAX;
        place(shard, i, &shard->clients[i]);
    }
}

/* ---- late requests ----------------------------------------------------------------------- */

static void end_late(struct kvs_request *request)
{
    kvs_count(&request->shard->stats.deadline_exceeded, 1);
    if (request->state == KVS_REQUEST_AWAIT_BULK) {
        /* The bulk never came.  If it still arrives, no request matches it and it is
         * refused. */
        if (!request->discard) {
            request->status = KV_DEADLINE;
            if (request->type->release != NULL)
                request->type->release(request); /* needs the body, which `small` may hold */
            snprintf((char *)request->small, sizeof(request->small),
                     "%s: the data did not arrive in time", request->type->name);
        }
        request->received = true;
        kvs_request_reply_status(request);
    } else if (request->state == KVS_REQUEST_QUEUED) {
        request->received = true;
        kvs_request_fail(request, KV_DEADLINE, "%s: not finished before the deadline",
                         request->type->name);
    } else if (request->missing != NULL) {
        request->received = true;
        kvs_request_fail(request, KV_DEADLINE, "%s: the disk was not done before the deadline",
                         request->type->name);
    } else {
        request->received = true;
        const struct kv_wire_header *header = &request->header;
        if (request->type->waits_for != NULL)
            kvs_request_fail(request, KV_NOT_READY, "%s: timed out waiting for %s",
                             request->type->name, request->type->waits_for);
        else
            kvs_request_fail(request, KV_NOT_READY, "%s: rows up to %u are not committed",
                             request->type->name,
                             header->snapshot > 0 ? header->snapshot : header->token_begin);
    }
}

void kvs_shard_end_stuck(struct kvs_shard *shard)
{
    struct kvs_request *request = shard->preferred;
    uint64_t need;

    if (request == NULL || request->state != KVS_REQUEST_WAITING || shard->tier == NULL ||
        !kvs_disk_tier_is_stuck(shard->tier, &need))
        return;
    request->received = true;
    kvs_request_fail(request, KV_NO_MEMORY,
                     "%s: %llu bytes of rows are needed in memory at once: there are %llu for "
                     "all (--memory)",
                     request->type->name, (unsigned long long)need,
                     (unsigned long long)shard->pages->bytes);
}

/* Returns since when the node has waited for the client.  Any message from the client counts as
 * progress while the node receives from it, because one transfer may delay the others; not
 * while the node sends, and not for a request that has already ended for the client. */
static uint64_t idle_since(const struct kvs_request *request)
{
    bool may_take_longer = request->state != KVS_REQUEST_SENDING && !request->orphan;

    return may_take_longer && request->client->heard_us > request->since_us
               ? request->client->heard_us
               : request->since_us;
}

uint64_t kvs_request_next_look(const struct kvs_request *request)
{
    uint64_t stuck_us = idle_since(request) + request->shard->stuck_send_us;

    switch (request->state) {
    case KVS_REQUEST_WAITING:
    case KVS_REQUEST_QUEUED:
        return request->deadline_us;
    case KVS_REQUEST_AWAIT_BULK:
    case KVS_REQUEST_RECEIVING:
        return request->orphan || stuck_us < request->deadline_us ? stuck_us
                                                                  : request->deadline_us;
    default:
        return stuck_us;
    }
}

/* The data was still arriving when the deadline passed. */
static void give_up_late(struct kvs_request *request)
{
    struct kvs_shard *shard = request->shard;

    kvs_count(&shard->stats.deadline_exceeded, 1);
    request->status = KV_DEADLINE;
    kvs_request_give_up(request);
    kvs_shard_client_note(shard, request->client, &request->header, KV_DEADLINE,
                          "%s: the data did not arrive in time", request->type->name);
}

/* Returns when the client has to be looked at next. */
static uint64_t next_look(const struct kvs_shard_client *client)
{
    uint64_t due_us = kvs_early_bulk_next_look(client);

    for (const struct kvs_request *request = client->requests; request != NULL;
         request = request->client_next) {
        const uint64_t look_us = kvs_request_next_look(request);

        due_us = look_us < due_us ? look_us : due_us;
    }
    return due_us;
}

/* Ends the client's late requests.  Returns true if the client makes no progress. */
static bool check_client(struct kvs_shard *shard, struct kvs_shard_client *client)
{
    bool stuck = false;

    for (struct kvs_request *request = client->requests, *next; request != NULL;
         request = next) {
        next = request->client_next;
        if (request->state == KVS_REQUEST_SENDING || request->state == KVS_REQUEST_AWAIT_BULK ||
            request->state == KVS_REQUEST_RECEIVING)
            stuck = stuck || shard->now_us >= idle_since(request) + shard->stuck_send_us;
        if (shard->now_us < request->deadline_us || request->orphan)
            continue;
        if (request->state == KVS_REQUEST_RECEIVING) {
            give_up_late(request);
        } else if (request->state == KVS_REQUEST_WAITING ||
                   request->state == KVS_REQUEST_AWAIT_BULK ||
                   request->state == KVS_REQUEST_QUEUED) {
            end_late(request);
            next = client->requests; /* ending one may have ended others */
        }
    }
    return stuck;
}

static void close_stuck(struct kvs_shard *shard, struct kvs_shard_client *client)
{
    kvs_count(&shard->stats.stalled_clients, 1);
    kvs_shard_client_lost(shard, client);
}

static void check_pending_receives(struct kvs_shard *shard)
{
    for (uint32_t i = 0; kv_pool_used(shard->pending_receives) > 0 && i < KVS_PENDING_RECEIVES;
         i++) {
        struct kvs_pending_receive *pending_receive = kv_pool_at(shard->pending_receives, i);

        if (pending_receive->client != NULL &&
            pending_receive->client->state == KVS_SHARD_CLIENT_OPEN &&
            shard->now_us >= pending_receive->since_us + shard->stuck_send_us)
            close_stuck(shard, pending_receive->client);
    }
}

/* A session whose request waits for rows is in use: what is back already is not to leave meanwhile. */
static void note_waiting(struct kvs_shard *shard)
{
    struct kvs_request *preferred =
        shard->preferred; /* it may wait for room, having all rows */

    if ((shard->missing.first == NULL && preferred == NULL) ||
        shard->now_us < shard->noted_us + NOTE_US)
        return;
    shard->noted_us = shard->now_us;
    if (preferred != NULL && preferred->session != NULL)
        atomic_store_explicit(&preferred->session->used_us, shard->now_us,
                              memory_order_relaxed);
    for (const struct kvs_request *request = shard->missing.first; request != NULL;
         request = request->next)
        if (request->session != NULL)
            atomic_store_explicit(&request->session->used_us, shard->now_us,
                                  memory_order_relaxed);
}

void kvs_shard_timers(struct kvs_shard *shard)
{
    note_waiting(shard);
    while (shard->n_clients > 0 && shard->due[0]->due_us <= shard->now_us) {
        struct kvs_shard_client *client = shard->due[0];

        shard->n_client_looks++;
        kvs_early_bulk_clear(client, shard->now_us);
        if (check_client(shard, client) && client->state == KVS_SHARD_CLIENT_OPEN)
            close_stuck(shard, client);
        const uint64_t look_us = next_look(client);
        set_due(shard, client,
                look_us > shard->now_us ? look_us : shard->now_us + LOOK_AGAIN_US);
    }
    check_pending_receives(shard);
}
