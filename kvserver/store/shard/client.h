/* client.h - a client, as a data thread sees it. */
#ifndef KV_KVSERVER_STORE_SHARD_CLIENT_H
#define KV_KVSERVER_STORE_SHARD_CLIENT_H

#include "kvserver/store/shard/command.h"
#include "proto/kv_wire.h"

#include <stdatomic.h>

enum {
    KVS_CREDITS_SURE = 8, /* of a client that comes when others have all the rest */
    KVS_NOTES = 4,        /* replies on their way to one client that no request stands behind */
    KVS_NOTE_BYTES = 96,
};

enum kvs_shard_client_state {
    KVS_SHARD_CLIENT_FREE = 0,
    KVS_SHARD_CLIENT_OPEN,
    KVS_SHARD_CLIENT_CLOSING, /* no channel any more; requests still finish */
};

/* A reply that no request stands behind. */
struct kvs_note {
    struct kvs_shard_client *client;
    bool busy;
    struct kv_wire_header header;
    char text[KVS_NOTE_BYTES];
};

struct kvs_shard_client {
    enum kvs_shard_client_state state;
    uint32_t index;
    struct kv_id128 token;
    uint32_t tenant; /* that hello said */
    struct kv_channel *channel;
    uint32_t credits;                          /* as hello granted */
    uint32_t puts_settled;                     /* object_puts below have ended for the client */
    uint64_t puts_done[KV_WIRE_PUTS_MAX / 64]; /* from there on, which have been stored */
    struct kvs_request *requests;              /* all of its requests */
    uint32_t n_requests, n_bodies, n_stagings, n_pending_receives, n_notes;
    uint64_t heard_us; /* a message came, or data landed */
    uint64_t due_us;   /* before, no request of it has to be looked at */
    struct kvs_note notes[KVS_NOTES];
    bool is_told; /* the control thread, of the channel's loss */
    struct kvs_command notice;
    struct kvs_early_bulk { /* bulk that came before its request */
        struct kv_incoming *incoming;
        uint64_t request_id;
        uint64_t bytes;
        uint64_t since_us;
    } early_bulk[4];
    _Atomic uint64_t n_received, busy, dropped, rows_in, rows_out, in_flight; /* for lists */
};

#endif
