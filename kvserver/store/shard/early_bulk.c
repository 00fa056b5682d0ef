/* Bulk that overtook its request: kept for a while, a little of each client. */
#include "kvserver/store/shard/shard_private.h"

bool kv_early_bulk_keep(struct kv_peer *peer,
                        uint64_t request_id,
                        struct kv_incoming *incoming,
                        uint64_t bytes,
                        uint64_t now_us)
{
    for (unsigned i = 0; i < sizeof(peer->stash) / sizeof(peer->stash[0]); i++) {
        if (peer->stash[i].incoming == NULL) {
            peer->stash[i] = (struct kv_stash){incoming, request_id, bytes, now_us};
            return true;
        }
    }
    return false;
}

struct kv_incoming *
kv_early_bulk_take(struct kv_peer *peer, uint64_t request_id, uint64_t *ret_bytes)
{
    for (unsigned i = 0; i < sizeof(peer->stash) / sizeof(peer->stash[0]); i++) {
        struct kv_stash *stash = &peer->stash[i];
        if (stash->incoming != NULL && stash->request_id == request_id) {
            struct kv_incoming *incoming = stash->incoming;
            stash->incoming = NULL;
            *ret_bytes = stash->bytes;
            return incoming;
        }
    }
    return NULL;
}

void kv_early_bulk_clear(struct kv_peer *peer, uint64_t before_us)
{
    for (unsigned i = 0; i < sizeof(peer->stash) / sizeof(peer->stash[0]); i++) {
        if (peer->stash[i].incoming != NULL && peer->stash[i].since_us < before_us) {
            kv_incoming_refuse(peer->stash[i].incoming);
            peer->stash[i].incoming = NULL;
        }
    }
}
