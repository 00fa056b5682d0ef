/* Deadlines: ends requests that are too late, and disconnects clients that make no progress. */
#include "kvserver/store/shard/shard_private.h"

#include "kvserver/store/shard/op.h"

#include <stdio.h>

enum {
    EARLY_BULK_MAX_US = 1000000,
};

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
    client->due_us = UINT64_MAX;
    for (struct kvs_request *request = client->requests; request != NULL;
         request = request->client_next)
        kvs_request_due(request, kvs_request_next_look(request));
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

void kvs_shard_timers(struct kvs_shard *shard)
{
    for (uint32_t i = 0; i < shard->n_clients; i++) {
        struct kvs_shard_client *client = &shard->clients[i];

        if (client->state == KVS_SHARD_CLIENT_FREE)
            continue;
        kvs_early_bulk_clear(
            client, shard->now_us > EARLY_BULK_MAX_US ? shard->now_us - EARLY_BULK_MAX_US : 0);
        if (shard->now_us >= client->due_us && check_client(shard, client) &&
            client->state == KVS_SHARD_CLIENT_OPEN)
            close_stuck(shard, client);
    }
    check_pending_receives(shard);
}
