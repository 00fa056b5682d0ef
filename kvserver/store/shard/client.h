/* client.h - a client, as a data thread sees it: its channel, its requests, and what they
 * use. */
#ifndef KV_KVSERVER_STORE_SHARD_CLIENT_H
#define KV_KVSERVER_STORE_SHARD_CLIENT_H

#include "kvserver/store/shard/command.h"
#include "kvserver/store/shard/queue.h"
#include "proto/kv_priority.h"
#include "proto/kv_wire.h"

#include <stdatomic.h>

enum {
    KVS_CREDITS_SURE = 8, /* granted to every client, even if others have all the rest */
    KVS_NOTES = 4,        /* replies without a request, in flight to one client */
    KVS_NOTE_BYTES = 96,
};

enum kvs_shard_client_state {
    KVS_SHARD_CLIENT_FREE = 0,
    KVS_SHARD_CLIENT_OPEN,
    KVS_SHARD_CLIENT_CLOSING, /* its channel is closed; requests are still ending */
};

/* A reply without a request: kvs_shard_client_note(). */
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
    uint32_t tenant;  /* from its hello */
    uint32_t version; /* of the protocol, agreed on in its hello */
    struct kv_channel *channel;
    uint32_t credits;                          /* granted at hello */
    uint32_t puts_settled;                     /* object_puts below this number have ended for
                                                * the client */
    uint64_t puts_done[KV_WIRE_PUTS_MAX / 64]; /* from there on: which of them are stored */
    struct kvs_request *requests;              /* all requests of the client */
    struct kvs_client_queue queues[KV_PRIORITY_COUNT];
    uint32_t n_requests, n_bodies, n_stagings, n_pending_receives, n_notes;
    uint32_t n_reply_batches; /* with the transport */
    uint64_t heard_us;        /* when a message or its data last arrived */
    uint64_t due_us;          /* nothing of this client needs checking before */
    uint32_t due_at;          /* its place in shard->due */
    struct kvs_note notes[KVS_NOTES];
    bool is_told; /* the control thread knows that the channel is lost */
    struct kvs_command notice;
    struct kvs_early_bulk { /* bulk that arrived before its request */
        struct kv_incoming *incoming;
        uint64_t request_id;
        uint64_t bytes;
        uint64_t until_us;
    } early_bulk[4];
    /* for the table of clients */
    _Atomic uint64_t n_received, busy, dropped, rows_in, rows_out, in_flight;
};

#endif
