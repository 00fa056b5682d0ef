/* shard.h - a data thread: its port, its memory, its units, and the requests it is working on.
 *
 *   message --> kvs_request --> begin() --+--> answered at once               small requests
 *                                     +--> AWAIT_BULK -> RECEIVING ->+     put by bulk
 *                                     +--> WAITING (for rows) ------>+--> SENDING -> done
 *                                     +--> QUEUED (slices) --------->+
 *
 * One request is one kvs_request from its arrival until its answer has left; no other memory is
 * taken for it than what the pools made at start hold.  Work that is QUEUED is done in slices
 * of at most some 100 us, the most urgent first, so no request keeps the thread from others.
 *
 * Every client has requests for all credits that it was granted, whatever others do.  What it asks
 * for beyond them, or beyond the buffers that there are, is answered KV_BUSY by a note, which
 * needs no request; so is a ping.  Nothing that a client in order sends is met with silence.
 *
 * Threads: everything here belongs to the data thread, except `stats`, `used_us` of a session
 * (readable by all) and the two rings (control -> data -> control).
 */
#ifndef KV_KVSERVER_STORE_SHARD_SHARD_H
#define KV_KVSERVER_STORE_SHARD_SHARD_H

#include "kvserver/base/clock.h"
#include "kvserver/base/map.h"
#include "kvserver/base/pool.h"
#include "kvserver/base/ring.h"
#include "kvserver/net/transport.h"
#include "kvserver/store/index/codebook.h"
#include "kvserver/store/rows/object.h"
#include "kvserver/store/shard/background.h"
#include "kvserver/store/shard/client.h"
#include "kvserver/store/shard/command.h"
#include "kvserver/store/shard/ended.h"
#include "kvserver/store/shard/request.h"
#include "kvserver/store/shard/session.h"
#include "kvserver/store/shard/stats.h"
#include "proto/kv_priority.h"

struct kvs_indexer;
struct kvs_op_type;

struct kvs_shard {
    const struct kvs_op_type *ops; /* (KV_OP_COUNT) by number: op.h */
    void *op_state[KV_OP_COUNT];   /* what each keeps for this thread */
    uint32_t index;
    uint32_t n_threads;
    uint64_t stuck_send_us;
    const struct kv_clock *clock;
    uint64_t now_us;   /* of this step */
    uint64_t moved_us; /* of the last step in which a message or a request got on */
    struct kv_port *port;
    struct kvs_arena *arena;
    struct kvs_segment_store store;
    struct kvs_codebooks codebooks;
    struct kvs_objects objects;
    struct kvs_indexer *indexer;
    const struct kvs_background_row *background; /* (n_background) in the order of service */
    uint32_t n_background;
    void *background_state[KVS_BACKGROUND_MAX]; /* what each row keeps */
    uint32_t background_turns;
    uint32_t query_slices; /* since messages were last looked at */
    uint32_t turns;        /* steps since the background last had one of its turns */
    struct kvs_shard_session *sessions; /* (sessions_max) */
    uint32_t n_sessions;
    struct kvs_ended_list ended;      /* of those */
    struct kvs_shard_client *clients; /* (clients_max) */
    uint32_t n_clients;
    struct kv_pool *requests, *bodies, *stagings, *pending_receives;
    struct kv_pool *middles; /* one for each request, under its number */
    struct kvs_request_queue queues[KV_PRIORITY_COUNT];
    struct kvs_request_queue
        staging_waiters;              /* need a staging buffer: the next that comes back is the
                                    * first's that may have it */
    struct kvs_request_queue looking; /* woken: look again, some in each step */
    struct kvs_shard_session *woken,
        **woken_end;             /* sessions, in the order in which they were */
    struct kv_ring *commands;    /* from control */
    struct kvs_command *command; /* under way, in slices */
    struct kv_ring *answers;     /* to control, shared by all data threads */
    bool answers_due; /* something went into `answers` since the driver last looked */
    _Atomic bool draining;
    uint64_t timers_us;       /* next look at deadlines */
    _Atomic uint64_t seen_us; /* when it last looked: /health is about that */
    uint64_t marks;           /* requests that named units */
    struct kvs_stats stats;
};

struct kvs_shard_setup {
    const struct kvs_op_type *ops;
    const struct kvs_background_row *background;
    uint32_t n_background;
    uint32_t index, n_threads, n_sessions, n_clients, n_commands, n_requests;
    uint64_t memory_bytes, scrub_bytes, stuck_send_us, secret, object_version;
    const struct kv_clock *clock;
    struct kv_transport *transport;
    struct kv_ring *answers;
};

kv_status_t kvs_shard_init(struct kvs_shard *shard, const struct kvs_shard_setup *setup);
void kvs_shard_fini(struct kvs_shard *shard);
bool kvs_shard_step(struct kvs_shard *shard);

#endif
