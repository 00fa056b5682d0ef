/* client.h - a client, as a data thread sees it. */
#ifndef KV_KVSERVER_STORE_SHARD_CLIENT_H
#define KV_KVSERVER_STORE_SHARD_CLIENT_H

#include "kvserver/store/shard/command.h"
#include "proto/kv_wire.h"

#include <stdatomic.h>

enum {
    KV_CREDITS_SURE = 8, /* of a client that comes when others have all the rest */
    KV_NOTES = 4,        /* replies on their way to one client that no work stands behind */
    KV_NOTE_BYTES = 96,
};

enum kv_peer_state {
    KV_PEER_FREE = 0,
    KV_PEER_OPEN,
    KV_PEER_CLOSING, /* no channel any more; works still finish */
};

/* A reply that no work stands behind. */
struct kv_note {
    struct kv_peer *peer;
    bool busy;
    struct kv_wire_header header;
    char text[KV_NOTE_BYTES];
};

struct kv_peer {
    enum kv_peer_state state;
    uint32_t index;
    struct kv_id128 token;
    uint32_t tenant; /* that hello said */
    struct kv_channel *channel;
    uint32_t credits;                          /* as hello granted */
    uint32_t puts_settled;                     /* object_puts below have ended for the client */
    uint64_t puts_done[KV_WIRE_PUTS_MAX / 64]; /* from there on, which have been stored */
    struct kv_work *works;                     /* all of its works */
    uint32_t n_works, n_bodies, n_stagings, n_receipts, n_notes;
    uint64_t heard_us; /* a message came, or data landed */
    uint64_t due_us;   /* before, no work of it has to be looked at */
    struct kv_note notes[KV_NOTES];
    bool is_told; /* the control thread, of the channel's loss */
    struct kv_command notice;
    struct kv_stash { /* bulk that came before its request */
        struct kv_incoming *incoming;
        uint64_t request_id;
        uint64_t bytes;
        uint64_t since_us;
    } stash[4];
    _Atomic uint64_t requests, busy, dropped, rows_in, rows_out, in_flight; /* for lists */
};

#endif
