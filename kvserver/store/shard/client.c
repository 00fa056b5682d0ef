/* A client of a data thread: its works, and its end. */
#include "kvserver/store/shard/shard_private.h"

struct kv_work *kv_peer_find_work(struct kv_peer *peer, uint64_t request_id)
{
    for (struct kv_work *work = peer->works; work != NULL; work = work->peer_next)
        if (work->request.request_id == request_id)
            return work;
    return NULL;
}

void kv_peer_close(struct kv_data *data, struct kv_peer *peer)
{
    if (peer->state != KV_PEER_OPEN)
        return;
    peer->state = KV_PEER_CLOSING;
    kv_early_bulk_clear(peer, UINT64_MAX);
    for (struct kv_work *work = peer->works, *next; work != NULL; work = next) {
        next = work->peer_next;
        work->orphan = true;
        if (work->state == KV_WORK_AWAIT_BULK || work->state == KV_WORK_WAITING ||
            work->state == KV_WORK_QUEUED)
            kv_work_end(work);
        else if (work->state == KV_WORK_RECEIVING)
            kv_work_give_up(work);
    }
    struct kv_channel *channel = peer->channel;
    peer->channel = NULL;
    channel->row->channel_close(channel); /* ends the works that are sending */
    kv_peer_settle(peer);
    (void)data;
}

void kv_peer_lost(struct kv_data *data, struct kv_peer *peer)
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
        peer->is_told = kvs_shard_notify(data, &peer->notice);
    }
    kv_peer_close(data, peer);
}

void kv_peer_settle(struct kv_peer *peer)
{
    if (peer->state == KV_PEER_CLOSING && peer->n_works == 0 && peer->n_receipts == 0 &&
        peer->n_notes == 0)
        peer->state = KV_PEER_FREE;
}
