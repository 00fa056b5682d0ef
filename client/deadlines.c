/* What ends by the clock: operations at their deadlines, and everything else that has a timer. */
#include "client/deadlines.h"

#include "client/call.h"
#include "client/client.h"
#include "client/connection.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/request.h"
#include "client/session.h"

/* The share of every node that is not done has come to nothing. */
static void expire_shares(struct kv_op *op)
{
    struct kv_client *client = op->client;

    for (uint32_t i = 0; i < client->n_remotes; i++) {
        struct kv_remote *remote = &client->remotes[i];

        if (kv_op_needs(op, i))
            kv_op_lose(op, remote, KV_DEADLINE, "connecting");
        else if (kv_op_uses(op, remote))
            kv_op_lose(op, remote, KV_DEADLINE, "");
    }
    if (op->stage == KV_STAGE_PREPARING)
        kv_op_prepare(op);
}

void kv_op_expire(struct kv_op *op)
{
    struct kv_client *client = op->client;
    const struct kv_remote *remote = NULL;
    const struct kv_trip *trip = NULL;
    const char *why = "";
    struct kv_list *link, *follow;

    if (op->kind->lost != NULL) {
        expire_shares(op);
        return;
    }
    if (op->stage == KV_STAGE_QUEUED) {
        why = "waiting for an operation of the session";
    } else if (op->stage == KV_STAGE_PREPARING) {
        for (uint32_t i = client->n_remotes; i-- > 0;)
            if (kv_op_needs(op, i) && client->remotes[i].state != KV_REMOTE_CONNECTED)
                remote = &client->remotes[i];
        why = remote != NULL ? "connecting" : "waiting for a node to catch up";
    } else if (!kv_list_empty(&op->owner.trips)) {
        trip = KV_LIST_ENTRY(op->owner.trips.next, struct kv_trip, of_owner);
        remote = trip->remote;
    } else if (!kv_list_empty(&op->errands)) {
        remote = KV_LIST_ENTRY(op->errands.next, struct kv_errand, of_op)->lane->link.remote;
        why = "waiting for credits";
    } else {
        KV_LIST_EACH(link, follow, &client->calls) {
            struct kv_call *call = KV_LIST_ENTRY(link, struct kv_call, of_client);

            if (call->owner == &op->owner && remote == NULL)
                remote = call->remote;
        }
    }
    kv_op_fail(op, remote, trip, KV_DEADLINE, "%s", why);
}

void kv_client_timers(struct kv_client *client)
{
    struct kv_list *link, *follow;

    client->loop.next_due_us = UINT64_MAX;
    KV_LIST_EACH(link, follow, &client->ops) {
        struct kv_op *op = KV_LIST_ENTRY(link, struct kv_op, of_client);

        if (op->owner.deadline_us <= client->loop.now_us)
            kv_op_expire(op);
        else
            kvc_loop_set_timer(&client->loop, op->owner.deadline_us);
    }
    KV_LIST_EACH(link, follow, &client->ops)
        kv_trips_timers(client, &KV_LIST_ENTRY(link, struct kv_op, of_client)->owner);
    kv_calls_timers(client);
    kv_sessions_timers(client);
    kv_remotes_timers(client);
    for (uint32_t i = 0; i < client->n_remotes; i++)
        if (client->remotes[i].owed_us != 0)
            kvc_loop_set_timer(&client->loop,
                               client->loop.now_us + client->peer_timeout_us / 8);
}

/* `from` moved on by `us`, at most to `now`: it may have begun within the gap. */
static uint64_t later(uint64_t from_us, uint64_t us, uint64_t now_us)
{
    return us < now_us - from_us ? from_us + us : now_us;
}

void kv_client_forgive(struct kv_client *client)
{
    uint64_t gap_us = client->loop.now_us - client->polled_us;
    uint64_t most_us = client->peer_timeout_us / 8;

    client->polled_us = client->loop.now_us;
    if (gap_us <= most_us)
        return;
    for (uint32_t i = 0; i < client->n_remotes; i++)
        if (client->remotes[i].owed_us != 0)
            client->remotes[i].owed_us =
                later(client->remotes[i].owed_us, gap_us - most_us, client->loop.now_us);
}
