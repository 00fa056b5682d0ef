/* shard.h - a shard: what one data thread owns.  Its port, memory, units and requests.
 *
 *   message --> kvs_request --> begin() --+--> answered at once              small requests
 *                                         +--> AWAIT_BULK -> RECEIVING ->+   put with bulk
 *                                         +--> WAITING (for rows) ------>+--> SENDING -> done
 *                                         +--> QUEUED (slices) --------->+
 *
 * Each request is one kvs_request, from its arrival until its reply has been sent.  It uses
 * only memory from pools allocated at startup.  Queued requests run in slices (base/slice.h),
 * so no request blocks the thread; queue.h says in which order.
 *
 * Every client has a kvs_request for each credit that it was granted, whatever other clients
 * do.  A request beyond its credits, or beyond the available buffers, is rejected with KV_BUSY
 * by a note (kvs_shard_client_note()), which needs no request; a ping is answered the same way.
 * Every request of a well-behaved client gets a reply.
 *
 * Invariants, which kvs_shard_check() asserts between two steps, of clients and requests:
 *   (1) The requests in use in the pool are those in the lists of clients, and each client
 *       counts its own; every link back is the reverse of a link forward, in these lists and
 *       in all queues.
 *   (2) A request that waits or is queued is in one list or queue, that of its state and its
 *       priority; any other is in none.  None is left in between.  A class lists exactly the
 *       clients that have requests queued in it.
 *   (3) Bodies and staging buffers in use belong to requests, or, bodies only, to requests that
 *       are still arriving; each client counts its own, and has no more than it may.
 *   (4) There are requests for all credits that clients were granted, and no client has more
 *       requests than credits.
 *   (5) A request has outstanding sends when it is SENDING, and only then; what it has pinned
 *       is pinned.
 *   (6) No request has to be looked at before its client is (`due_us`), unless it is overdue;
 *       each client is in the heap of clients at its place, and not due before the one above
 *       it.
 *   (7) A client has a channel while it is open, and nothing of it is in progress when it is
 *       free.
 * and kvs_shard_check_memory() asserts, of what is in memory:
 *   (8) The pools, the arena, the segment store, objects, codebooks and index jobs are sound by
 *       their own checks.
 *   (9) A session's units are those that placement gives this thread, each in its place, and
 *       sound; one that is not in use has none, unless a command is changing it.
 *  (10) Rows are reserved only for outstanding transfers; a unit counts exactly the transfers
 *       and the coming puts of requests.
 *  (11) A block has one ref per session that has it, per block over it and per prefix that
 *       keeps it, and one pin per request and job that pins it; the store counts exactly the
 *       blocks and segments that somebody has.
 *  (12) The store counts the bad rows of all segments, the blocks that are absent or leave, and
 *       the requests at work.
 *  (13) A codebook has one ref per segment with its codes, and per job that has it; it counts
 *       the segments of its chapter that have lost theirs.
 *
 * Threads: everything here belongs to the data thread, except `stats` and `sessions[].used_us`,
 * which any thread may read, and the two rings (control -> data -> control).
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
#include "kvserver/store/shard/queue.h"
#include "kvserver/store/shard/request.h"
#include "kvserver/store/shard/session.h"
#include "kvserver/store/shard/stats.h"
#include "proto/kv_priority.h"

struct kvs_indexer;
struct kvs_op_type;

/* Replies to one client that were made in one piece of a step: replies.c.  Empty between
 * steps. */
struct kvs_outbox {
    struct kvs_shard_client *client;
    struct kvs_request *requests[KV_WIRE_ENTRIES_MAX];
    uint32_t n;
    size_t bytes; /* that they take in a batch */
};

struct kvs_shard {
    const struct kvs_op_type *ops; /* (KV_OP_COUNT) by number: op.h */
    void *op_state[KV_OP_COUNT];   /* each operation's state on this thread */
    uint32_t index;
    uint32_t n_threads;
    uint64_t stuck_send_us;
    uint64_t object_ttl_us; /* of objects whose put says none; 0: they stay */
    const struct kv_clock *clock;
    uint64_t now_us;       /* at the start of this step */
    uint64_t moved_us;     /* of the last step that did anything */
    uint64_t noted_us;     /* when the use of sessions whose requests wait for rows was noted */
    uint64_t memory_bytes; /* of the node's, this thread's share */
    struct kv_port *port;
    struct kvs_pages *pages; /* of the node */
    struct kvs_arena *arena; /* some of them */
    struct kvs_segment_store store;
    struct kvs_codebooks codebooks;
    struct kvs_objects objects;
    struct kvs_indexer *indexer;
    const struct kvs_background_row *background; /* (n_background) in order of priority */
    uint32_t n_background;
    void *background_state[KVS_BACKGROUND_MAX]; /* each job's state on this thread */
    uint32_t background_turns;
    uint32_t query_slices;              /* since messages were last taken */
    uint32_t turns;                     /* slices of requests since the last background slice */
    struct kvs_shard_session *sessions; /* (n_sessions) the shard sessions */
    uint32_t n_sessions;
    struct kvs_ended_list ended;      /* sessions that ended */
    struct kvs_shard_client *clients; /* (n_clients) */
    struct kvs_shard_client **due;    /* (n_clients) a heap by due_us, the earliest first */
    uint64_t n_client_looks;          /* how often a client was looked at because it was due */
    uint32_t n_clients;
    struct kv_pool *requests, *bodies, *stagings, *pending_receives;
    struct kv_pool *middles; /* one per request, with the same index */
    struct kv_pool *reply_batches;
    struct kvs_outbox outbox;
    struct kvs_request_class classes[KV_PRIORITY_COUNT];
    uint64_t class_used; /* that of the class that was served last, before that */
    /* Requests that need a staging buffer; the first that may have the next free one gets it. */
    struct kvs_request_queue staging_waiters;
    /* Requests that wait for segments, or objects, that are away. */
    struct kvs_request_queue missing;
    /* Of those that need segments (ops/need_rows.h); NULL: none. */
    struct kvs_request *preferred;
    struct kvs_request_queue looking; /* woken requests; some are run in each step */
    /* What was in memory at that time is to be verified soon: the control thread's; 0: no hurry. */
    _Atomic uint64_t scrub_wanted_us;

    struct kvs_shard_session *woken, **woken_end;     /* sessions to wake, in that order */
    struct kv_ring *commands;                         /* from the control thread */
    struct kvs_command *command;                      /* in progress, in slices */
    struct kvs_disk_tier *tier;                       /* NULL: nothing is on disk */
    struct kvs_object_tier *object_tier;              /* likewise */
    struct kvs_command *tier_commands[KVS_TIER_JOBS]; /* of the jobs that it has */
    struct kvs_command *settling; /* pages of objects that are deleted, and wait for the disk */
    _Atomic bool is_asleep;       /* who gives it a command must wake it */
    struct kv_ring *replies;      /* to the control thread; shared by all data
                                                   * threads */
    bool replies_due; /* `replies` has new entries, or pages are wanted; the driver wakes the
                       * control thread */
    _Atomic bool draining;
    uint64_t timers_us;       /* next check of deadlines */
    _Atomic uint64_t seen_us; /* time of the last check, for /health */
    uint64_t marks;           /* counts requests that named units */
    struct kvs_stats stats;
};

struct kvs_shard_setup {
    const struct kvs_op_type *ops;
    const struct kvs_background_row *background;
    uint32_t n_background;
    uint32_t index, n_threads, n_sessions, n_clients, n_commands, n_requests;
    struct kvs_pages *pages; /* of the node */
    uint64_t memory_bytes;   /* of the node's, this thread's share: what operations take is a
                              * part of it */
    uint64_t scrub_bytes, scrub_disk_bytes, stuck_send_us, object_ttl_us, secret,
        object_version;
    const struct kv_clock *clock;
    struct kv_transport *transport;
    struct kv_ring *replies;
    struct kv_disk *disk; /* for rows and objects; NULL: none are saved */
    struct kvs_disk_room *disk_room;
};

/* Returns how much of a thread's share of the memory the operations take; pages have the
 * rest. */
uint64_t kvs_shard_takes(const struct kvs_op_type *ops, uint64_t memory_bytes);

kv_status_t kvs_shard_init(struct kvs_shard *shard, const struct kvs_shard_setup *setup);
void kvs_shard_fini(struct kvs_shard *shard);
bool kvs_shard_step(struct kvs_shard *shard);

/* Gives the data thread a command, which stays the caller's and comes back through the ring of
 * replies.  Only a thread that sleeps has to be woken.  The control thread. */
void kvs_shard_give(struct kvs_shard *shard, struct kvs_command *command);
/* Says that the data thread is about to sleep.  Returns false if it must not: it has commands. */
bool kvs_shard_fall_asleep(struct kvs_shard *shard);
void kvs_shard_awake(struct kvs_shard *shard);

/* Walks clients and requests: some microseconds for each hundred. */
void kvs_shard_check(const struct kvs_shard *shard);
/* Walks all that is in memory, but for the rows.  Without memory for a walk's own list some of
 * it is left out.  `kept` visits the blocks that are kept for others than sessions; NULL: none. */
struct kvs_kept_blocks {
    void (*each)(const void *arg,
                 uint32_t thread,
                 void (*visit)(void *visitor, const struct kvs_block *block),
                 void *visitor);
    const void *arg;
};
void kvs_shard_check_memory(const struct kvs_shard *shard, const struct kvs_kept_blocks *kept);

#endif
