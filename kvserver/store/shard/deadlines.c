/* What is late ends, and who is stuck is closed. */
#include "kvserver/store/shard/shard_private.h"

#include "kvserver/store/shard/op.h"

#include <stdio.h>

enum {
    STASH_MAX_US = 1000000,
};

static void work_late(struct kv_work *work)
{
    kv_count(&work->data->stats.deadline_exceeded, 1);
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
        kv_work_answer_status(work);
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

    kv_count(&data->stats.deadline_exceeded, 1);
    work->status = KV_DEADLINE;
    kv_work_give_up(work);
    kv_peer_note(data, work->peer, &work->request, KV_DEADLINE,
                 "%s: the data did not arrive in time", work->row->name);
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
        kv_work_due(work, next_look(work));
    return stuck;
}

static void peer_stuck(struct kv_data *data, struct kv_peer *peer)
{
    kv_count(&data->stats.stalled_clients, 1);
    kv_peer_lost(data, peer);
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

void kv_data_timers(struct kv_data *data)
{
    for (uint32_t i = 0; i < data->n_peers; i++) {
        struct kv_peer *peer = &data->peers[i];

        if (peer->state == KV_PEER_FREE)
            continue;
        kv_early_bulk_clear(peer,
                            data->now_us > STASH_MAX_US ? data->now_us - STASH_MAX_US : 0);
        if (data->now_us >= peer->due_us && peer_timers(data, peer) &&
            peer->state == KV_PEER_OPEN)
            peer_stuck(data, peer);
    }
    receipt_timers(data);
}
