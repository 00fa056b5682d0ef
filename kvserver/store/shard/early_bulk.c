/* Bulk data that arrived before its request: up to four per client are kept for a second. */
#include "kvserver/store/shard/shard_private.h"

enum {
    KEPT_US = 1000000,
};

bool kvs_early_bulk_keep(struct kvs_shard *shard,
                         struct kvs_shard_client *client,
                         uint64_t request_id,
                         struct kv_incoming *incoming,
                         uint64_t bytes)
{
    const uint64_t until_us = shard->now_us + KEPT_US;

    for (unsigned i = 0; i < sizeof(client->early_bulk) / sizeof(client->early_bulk[0]); i++) {
        if (client->early_bulk[i].incoming == NULL) {
            client->early_bulk[i] =
                (struct kvs_early_bulk){incoming, request_id, bytes, until_us};
            kvs_shard_client_due(shard, client, until_us);
            return true;
        }
    }
    return false;
}

struct kv_incoming *
kvs_early_bulk_take(struct kvs_shard_client *client, uint64_t request_id, uint64_t *ret_bytes)
{
    for (unsigned i = 0; i < sizeof(client->early_bulk) / sizeof(client->early_bulk[0]); i++) {
        struct kvs_early_bulk *early_bulk = &client->early_bulk[i];
        if (early_bulk->incoming != NULL && early_bulk->request_id == request_id) {
            struct kv_incoming *incoming = early_bulk->incoming;
            early_bulk->incoming = NULL;
            *ret_bytes = early_bulk->bytes;
            return incoming;
        }
    }
    return NULL;
}

void kvs_early_bulk_clear(struct kvs_shard_client *client, uint64_t now_us)
{
    for (unsigned i = 0; i < sizeof(client->early_bulk) / sizeof(client->early_bulk[0]); i++) {
        struct kvs_early_bulk *early_bulk = &client->early_bulk[i];

        if (early_bulk->incoming != NULL && early_bulk->until_us <= now_us) {
            kv_incoming_refuse(early_bulk->incoming);
            early_bulk->incoming = NULL;
        }
    }
}

uint64_t kvs_early_bulk_next_look(const struct kvs_shard_client *client)
{
    uint64_t look_us = UINT64_MAX;

    for (unsigned i = 0; i < sizeof(client->early_bulk) / sizeof(client->early_bulk[0]); i++) {
        const struct kvs_early_bulk *early_bulk = &client->early_bulk[i];

        if (early_bulk->incoming != NULL && early_bulk->until_us < look_us)
            look_us = early_bulk->until_us;
    }
    return look_us;
}
