/* shard.h - a data thread: its port, its memory, its units, and the requests it is working on.
 *
 *   message --> kv_work --> begin() --+--> answered at once               small requests
 *                                     +--> AWAIT_BULK -> RECEIVING ->+     put by bulk
 *                                     +--> WAITING (for rows) ------>+--> SENDING -> done
 *                                     +--> QUEUED (slices) --------->+
 *
 * One request is one kv_work from its arrival until its answer has left; no other memory is
 * taken for it than what the pools made at start hold.  Work that is QUEUED is done in slices
 * of at most some 100 us, the most urgent first, so no request keeps the thread from others.
 *
 * Every client has works for all credits that it was granted, whatever others do.  What it asks
 * for beyond them, or beyond the buffers that there are, is answered KV_BUSY by a note, which
 * needs no work; so is a ping.  Nothing that a client in order sends is met with silence.
 *
 * Threads: everything here belongs to the data thread, except `stats`, `part.used_us` (readable
 * by all) and the two rings (control -> data -> control).
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

struct kv_indexer;
struct kv_op_row;

struct kv_data {
    const struct kv_op_row *ops; /* (KV_OP_COUNT) by number: op.h */
    void *op_state[KV_OP_COUNT]; /* what each keeps for this thread */
    uint32_t index;
    uint32_t n_threads;
    uint64_t stuck_send_us;
    const struct kv_clock *clock;
    uint64_t now_us;   /* of this step */
    uint64_t moved_us; /* of the last step in which a message or a request got on */
    struct kv_port *port;
    struct kv_arena *arena;
    struct kv_heap heap;
    struct kv_codebooks codebooks;
    struct kv_objects objects;
    struct kv_indexer *indexer;
    const struct kvs_background_row *background; /* (n_background) in the order of service */
    uint32_t n_background;
    void *background_state[KVS_BACKGROUND_MAX]; /* what each row keeps */
    uint32_t background_turns;
    uint32_t query_slices; /* since messages were last looked at */
    uint32_t turns;        /* steps since the background last had one of its turns */
    struct kv_part *parts; /* (sessions_max) */
    uint32_t n_parts;
    struct kv_ended_list ended; /* of those */
    struct kv_peer *peers;      /* (clients_max) */
    uint32_t n_peers;
    struct kv_pool *works, *bodies, *stagings, *receipts;
    struct kv_pool *middles; /* one for each work, under its number */
    struct kv_work_queue queues[KV_PRIORITY_COUNT];
    struct kv_work_queue unstaged; /* need a staging buffer: the next that comes back is the
                                    * first's that may have it */
    struct kv_work_queue looking;  /* woken: look again, some in each step */
    struct kv_part *woken, **woken_end; /* parts, in the order in which they were */
    struct kv_ring *commands;           /* from control */
    struct kv_command *command;         /* under way, in slices */
    struct kv_ring *answers;            /* to control, shared by all data threads */
    bool answers_due; /* something went into `answers` since the driver last looked */
    _Atomic bool draining;
    uint64_t timers_us;       /* next look at deadlines */
    _Atomic uint64_t seen_us; /* when it last looked: /health is about that */
    uint64_t marks;           /* requests that named units */
    struct kv_stats stats;
};

struct kv_data_setup {
    const struct kv_op_row *ops;
    const struct kvs_background_row *background;
    uint32_t n_background;
    uint32_t index, n_threads, n_parts, n_peers, n_commands, n_works;
    uint64_t memory_bytes, scrub_bytes, stuck_send_us, secret, object_version;
    const struct kv_clock *clock;
    struct kv_transport *transport;
    struct kv_ring *answers;
};

kv_status_t kv_data_init(struct kv_data *data, const struct kv_data_setup *setup);
void kv_data_fini(struct kv_data *data);
bool kv_data_step(struct kv_data *data);

#endif
