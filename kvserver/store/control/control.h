/* control.h - the control thread's side of a node: models, clients, sessions, and the calls
 * that change them.
 *
 *   request -> kvs_control_call -> handler (ops_*.c)
 *                                   |  sends a command to every data thread that it concerns
 *                                   v  (kvs_control_broadcast_session, kvs_control_broadcast)
 *                                 next step, when all have returned it  -> kvs_control_reply
 *
 * A session or client is changed by one call at a time (`busy`); a second call gets KV_BUSY.
 *
 * Invariants, which kvs_control_check() asserts between two steps:
 *   (1) The number of calls in the list is the one counted; every link back is the reverse of a
 *       link forward.
 *   (2) A session is busy exactly while one call changes it, as its session or as the child.
 *   (3) The sessions in use are those in the map, each under its id, and they are counted.
 *   (4) A session's generation is one more than the operations in its log; these are of the
 *       generations before it, one each, and no two are the same operation.
 *   (5) A session has writers, as writers.h says that they are; one not in use has none.
 *   (6) A model counts the sessions that use it, and has none while it is being saved; no two
 *       models are the same.
 *   (7) Guaranteed, granted and spare credits add up to the number of requests; a client has at
 *       least the guaranteed credits, and no more than the configuration says.
 *   (8) The sessions in use are in the heap of leases, each at its place and not due before the
 *       one above it; all others are in the list of free places.
 *   (9) A client that is being opened has a hello in progress; one that data threads are
 *       closing, a goodbye.  Those that are open or being opened are in the map, each under its
 *       id.  Exactly the free places, the open clients that are not attached, and those that no
 *       goodbye closes any more are in the list of these.
 *  (10) A root that sessions were opened with counts those that are here, and, row by row, those
 *       of them that came since it has as many rows as it has.  It has at least one session.
 *  (11) The prefixes are sound by their own checks.  Each is held once by every session that has
 *       it for its deepest, once by a publish that goes on from it, and once if it is to be freed.
 *
 * Threads: the control thread, except where stated otherwise.
 */
#ifndef KV_KVSERVER_STORE_CONTROL_CONTROL_H
#define KV_KVSERVER_STORE_CONTROL_CONTROL_H

#include "kvserver/base/map.h"
#include "kvserver/base/random.h"
#include "kvserver/base/writers.h"
#include "kvserver/cluster/placement.h"
#include "kvserver/disk/disk.h"
#include "kvserver/store/control/config.h"
#include "kvserver/store/control/events.h"
#include "kvserver/store/prefix/prefix.h"
#include "kvserver/store/prefix/reuse.h"
#include "kvserver/store/shard/op.h"
#include "kvserver/store/shard/shard.h"

#include <protobuf-c/protobuf-c.h>

enum {
    KVS_MODELS_MAX = 256,
    KVS_CALLS_MAX = 1024, /* control requests in flight */
    KVS_LOG_ENTRIES = 16, /* lifecycle operations that a session remembers */
    KVS_CLIENT_NAME_BYTES = 64,
    KVS_PERIODIC_TASKS = 6,                /* control.c */
    KVS_VERIFY_ASKED_US = 5 * 1000 * 1000, /* how long a wish to have all verified counts */
};

/* A model stays known, also on disk, while sessions use it.  After that it stays until another
 * model needs its place; the least recently used one is then forgotten.  So a client may take
 * its time between registering a model and opening a session. */
struct kvs_model {
    struct kv_model_info info;
    struct kv_id128
        rows_id; /* a hash of its fingerprint and its schema: rows of equal ones are of
                              * the same keys and shape, also if it was forgotten in between */
    bool saving; /* the disk has not confirmed it */
    uint32_t n_sessions;
    uint64_t used_us; /* when it was last named, or its last session ended */
};

/* A completed fork or truncate. */
struct kvs_log_entry {
    uint64_t op_id;
    uint32_t kind;       /* KV_OP_FORK, KV_OP_TRUNCATE */
    uint32_t generation; /* before the operation */
    uint32_t tokens;
    struct kv_id128 child_id, child_token;
    uint64_t writer;      /* fork: the child's; truncate: the session's own, from then on */
    uint32_t child_index; /* at that time; the child may be gone */
};

/* A root that prompts of one tenant have in common (placement.h). */
struct kvs_root {
    struct kv_id128 key; /* in control->roots: prompt root and tenant */
    uint32_t n_rows;     /* over which its sessions are opened, as far as this node knows */
    uint32_t n_sessions; /* here */
    uint32_t n_since[KV_ROOT_ROWS_MAX]; /* of those, opened or forked since it has n_rows, on
                                         * each of these rows */
};

struct kvs_session {
    bool used;
    bool busy;
    uint32_t index;
    struct kv_id128 id, token;
    struct kvs_model *model; /* its n_sessions counts this one */
    uint32_t generation;
    char owner[KVS_CLIENT_NAME_BYTES]; /* name of the client that opened or forked it */
    uint64_t opened_us;
    uint32_t tenant;
    uint32_t tokens_max;
    uint64_t lease_us; /* kvs_session_set_lease() sets it */
    uint64_t renewed_us;
    uint64_t due_us;               /* its lease cannot have ended before */
    uint32_t due_at;               /* its place in control->due */
    struct kvs_session *next_free; /* while it is not in use */
    uint64_t root, epoch;          /* its placement, as the client that opened it says */
    uint32_t n_nodes, position;
    uint32_t first_thread, n_threads; /* the data threads that know it: those on which its units
                                       * can be */
    struct kvs_root *shared_root;     /* counts it; NULL: it is not counted */
    uint32_t rows_then, row_then;     /* of shared_root, when it came; and which one it is on */
    struct kv_writers *writers; /* data threads read it, until they have carried out the command
                                 * that replaces it */
    uint32_t shared_tokens;     /* of its own writer: at most so many have been inherited by
                                 * forks, or published */
    uint32_t matched;           /* tokens that it was opened with */
    uint32_t matched_on_disk;   /* of these, those that were not in memory */
    struct kv_id128 *names;     /* (n_names) of its blocks, as far as they are known */
    uint32_t n_names;
    uint32_t n_asked; /* of these, the first ones that its open looked for */
    struct kvs_prefix
        *prefix;        /* the deepest that it has, or had when it was looked for; NULL: none */
    bool is_resting;    /* its prefix may leave memory: rest.c */
    uint64_t rested_us; /* when rows of it were needed last before that */
    struct kvs_log_entry log[KVS_LOG_ENTRIES];
    uint32_t n_log; /* entries ever added; the last KVS_LOG_ENTRIES are kept */
};

enum kvs_client_state {
    KVS_CLIENT_FREE = 0,
    KVS_CLIENT_OPENING,
    KVS_CLIENT_OPEN,
    KVS_CLIENT_CLOSING,
};

struct kvs_client_record {
    enum kvs_client_state state;
    struct kvs_client_record *next, **link; /* in one of the control's lists; NULL: in none */
    uint32_t index;
    uint32_t n_asked; /* data threads that have yet to close it */
    struct kv_id128 id, token;
    char name[KVS_CLIENT_NAME_BYTES];
    enum kv_channel_mode mode;
    uint32_t tenant;
    uint32_t version; /* of the protocol, from its hello */
    uint32_t credits; /* granted until the place is free again */
    bool attached;    /* a control transport watches its process */
    uint64_t since_us, heard_us;
    uint64_t requests_seen;     /* by all data threads, at the last check */
    uint64_t closing_us;        /* time of the last attempt to close it */
    struct kv_channel *channel; /* of the control port; NULL: its control transport is gRPC */
};

/* What a client says of a prefix, and how far that has been done: ops_keep.c. */
struct kvs_keep {
    uint32_t verb; /* enum kv_prefix_verb */
    bool is_walk;  /* all prefixes are looked through for the name */
    struct kv_id128 name;
    uint64_t until_us;
    size_t cursor;
    uint64_t n_blocks;
    struct kvs_control_call *next;
};

struct kvs_batch;
struct kvs_disk_verify;
struct kvs_saver;

struct kvs_control_call {
    struct kvs_control *control;
    enum kv_op_id op;
    uint32_t tenant;                        /* of the client, from its hello */
    const struct kvs_client_record *caller; /* valid until the handler returns; NULL: hello,
                                             * goodbye and internal calls */
    const uint8_t *packed; /* the message that it carries; valid until the handler returns */
    size_t packed_bytes;
    kvs_node_reply_fn reply; /* NULL: an internal call */
    void *arg;
    uint64_t begin_us; /* when it arrived; not of an internal call */
    void (*next)(struct kvs_control_call *call);
    uint32_t n_pending; /* replies of data threads or of the disk */
    kv_status_t status; /* first failure among them */

    struct kvs_session *session, *child;
    struct kvs_client_record *client;
    struct kvs_model *model;
    struct kvs_log_entry log_entry;
    bool keeps_generation;      /* fork: the session's */
    bool tells_writer;          /* truncate, session: the client is told the session's own */
    struct kv_writers *writers; /* truncate: the session's writers afterwards */
    kv_status_t refusal;        /* status to reply with once its changes are undone */
    uint32_t tokens; /* smallest number on any data thread with units of the session */
    bool has_units;  /* one has */
    struct kvs_prefix *prefix;   /* publish: goes on from it; prefix: evicts it; held */
    struct kvs_prefix *prefixes; /* to be published, or freed: a list, held */
    struct kvs_keep keep;        /* prefix */
    uint64_t bytes;              /* sum over all data threads */
    _Atomic uint32_t
        *layer_tokens; /* (n_layers) session: kvs_command's; owned; NULL: not wanted */
    struct kvs_session_size *sizes; /* (n_sizes) table of sessions: owned */
    uint32_t n_sizes;
    struct kvs_object_page *object_page; /* objects: owned */
    uint32_t thread;                     /* objects: the data thread that is asked */
    uint8_t *address;                    /* hello: address of the client's port; owned */
    uint8_t *record;                     /* model: what the disk is given of it; owned */
    struct kvs_batch *batch;             /* of the saver's; NULL: it is not */
    struct kvs_control_call *list_next, **list_link;
    struct kvs_command commands[]; /* (n_threads) part of the call, so that a broadcast cannot
                                    * fail */
};

/* Why a prefix leaves the index. */
enum kvs_evict_why {
    KVS_EVICT_MEMORY, /* the node's */
    KVS_EVICT_QUOTA,  /* of its tenant */
    KVS_EVICT_DISK,   /* room for what is saved */
    KVS_EVICT_BAD,    /* rows of it, or of those before it */
    KVS_EVICT_ASKED,  /* a client said so */
};

struct kvs_control {
    struct kvs_node_config config;
    const struct kvs_op_type *ops; /* (KV_OP_COUNT) by number: op.h */
    char name[KV_NAME_BYTES_MAX + 1];
    char address[2 * KV_WIRE_ADDRESS_MAX + 16];
    struct kv_id128 id;
    struct kv_random random;
    uint64_t started_us;
    struct kvs_shard *shard; /* (n_threads) owned by the node */
    uint32_t n_threads;
    struct kv_ring *replies;

    struct kv_disk_queue *disk; /* closed by kvs_control_fini() */
    struct kvs_model *models[KVS_MODELS_MAX];
    uint32_t n_models;
    struct kvs_session *sessions;  /* (sessions_max) */
    uint32_t n_sharing, n_resting; /* of the sessions: have a prefix; of these, rest */
    uint32_t rest_at;              /* in `due`: which one was looked at last */
    uint64_t lack_us; /* since when memory lacks, and nothing may go; 0: it does not */
    bool is_giving;   /* sessions that are used make room: kvs_sessions_tell_soon() */
    struct kv_map *session_of_id;
    uint32_t n_sessions;
    struct kvs_session *free_session; /* the first */
    struct kvs_session **due;         /* (n_sessions) a heap by due_us, the earliest first */
    struct kv_map *roots;             /* kvs_root */
    uint64_t n_lease_looks;           /* how often a lease has been computed for its end */
    struct kvs_ended_list ended;      /* sessions that ended */
    struct kvs_pages *pages;          /* of the node */
    bool has_warned_scarce, has_warned_full; /* of memory, since there was plenty */
    uint64_t quota_warned_us;                /* when a tenant's was full; 0: never */
    struct kvs_prefixes *prefixes;
    struct kvs_saver *saver; /* NULL: nothing is saved */
    struct kvs_disk_room disk_room;
    struct kvs_disk_verify *disk_verify; /* likewise */
    uint64_t scrub_asked_us; /* when that wish was heard last, of memory; 0: nobody has it */
    struct kvs_reuse reuse;
    struct kvs_prefix
        *released;     /* a list: data threads are to give refs of their blocks back */
    bool is_releasing; /* they do so for another list */
    uint64_t released_bytes, releasing_bytes; /* of the two, as far as they were in the index */
    struct kvs_client_record *clients;        /* (clients_max) */
    struct kv_map *client_of_id;              /* of those that are open or being opened */
    struct kvs_client_record *free_clients;
    struct kvs_client_record *unwatched_clients; /* open, and not attached */
    struct kvs_client_record *unclosed_clients;  /* closing: to be tried again */
    uint32_t credits_sure;                       /* guaranteed to every client */
    uint32_t credits_spare;                      /* not yet granted, beyond those */
    struct kvs_control_call *calls;
    uint32_t n_calls;
    struct kvs_control_call
        *keeping; /* calls that go on in each step, the first one at first */
    uint64_t due_us[KVS_PERIODIC_TASKS]; /* when each task is due */
    struct kvs_stats stats;              /* of the control thread */
    _Atomic bool draining, drain_requested;
    _Atomic uint32_t n_sessions_seen; /* for metrics */

    struct kv_port *port; /* for control messages; NULL: none */
    bool port_closes;     /* it closes, with all of its channels */
};

/* Returns how many credits every client is sure of. */
static inline uint32_t kvs_node_credits_sure(const struct kvs_node_config *config)
{
    return config->credits < KVS_CREDITS_SURE ? config->credits : KVS_CREDITS_SURE;
}

/* Returns the number of requests per data thread: one for each credit that can be granted.
 * However many clients there may be, some are granted more than what all are sure of. */
static inline uint32_t kvs_node_requests_max(const struct kvs_node_config *config)
{
    const uint32_t sure = config->clients_max * kvs_node_credits_sure(config);
    const uint32_t rest = config->clients_max * config->credits - sure;

    return sure + (rest < KVS_REQUESTS_SPARE ? rest : KVS_REQUESTS_SPARE);
}

/* Returns how many commands to one data thread can be in progress at once: one per session, two
 * per client, one per call, one that gives refs of prefixes back, two of the saver's, and one that
 * verifies what is saved. */
static inline uint32_t kvs_node_commands_max(const struct kvs_node_config *config)
{
    return config->sessions_max + 2 * config->clients_max + KVS_CALLS_MAX + 5;
}

static inline bool kvs_control_has_op(const struct kvs_control *control, unsigned op)
{
    return op < KV_OP_COUNT && control->ops[op].control != NULL;
}

/* Returns the name of the call's operation. */
static inline const char *kvs_call_name(const struct kvs_control_call *call)
{
    return call->control->ops[call->op].name;
}

/* ---- control.c ---- */

/* Initializes the control thread's side.  The shards of the node's n_threads data threads are
 * initialized after it, because they need its ring.  The configuration is complete and checked.
 * After KV_NO_MEMORY, call kvs_control_fini() all the same. */
kv_status_t kvs_control_init(struct kvs_control *control,
                             const struct kvs_node_config *config,
                             const struct kvs_op_type *ops,
                             struct kvs_shard *shard,
                             struct kvs_pages *pages);
void kvs_control_fini(struct kvs_control *control);

/* As kvs_node_control() and so on in node.h. */
bool kvs_control_begin(struct kvs_control *control,
                       enum kv_op_id op,
                       uint32_t client_index,
                       const struct kv_id128 *client_token,
                       const uint8_t *packed,
                       size_t packed_bytes,
                       kvs_node_reply_fn reply,
                       void *arg);
bool kvs_control_step(struct kvs_control *control);
void kvs_control_drain(struct kvs_control *control);
bool kvs_control_drained(struct kvs_control *control);

/* ---- check.c ---- */

/* Walks everything. */
void kvs_control_check(const struct kvs_control *control);

/* ---- call.c ---- */

/* Sends `command` to every data thread.  When all have returned it, calls call->next, with
 * call->status KV_OK or the first failure.  Copies the command.  One broadcast per call at a
 * time. */
void kvs_control_broadcast(struct kvs_control_call *call,
                           const struct kvs_command *command,
                           void (*next)(struct kvs_control_call *call));
/* The same for those data threads alone that know the session. */
void kvs_control_broadcast_session(struct kvs_control_call *call,
                                   const struct kvs_session *session,
                                   const struct kvs_command *command,
                                   void (*next)(struct kvs_control_call *call));

/* The same for one data thread. */
void kvs_control_send(struct kvs_control_call *call,
                      uint32_t thread,
                      const struct kvs_command *command,
                      void (*next)(struct kvs_control_call *call));

/* A data thread has carried out the command. */
void kvs_call_command_done(struct kvs_control_call *call, const struct kvs_command *command);

/* Ends the call with a message whose outcome the caller has set. */
void kvs_control_reply(struct kvs_control_call *call, const ProtobufCMessage *message);
/* End the call with an outcome alone: success, or a failure with a message. */
void kvs_call_reply_ok(struct kvs_control_call *call);
void kvs_control_refuse(struct kvs_control_call *call,
                        kv_status_t status,
                        const char *format,
                        ...) __attribute__((format(printf, 3, 4)));
/* Creates a call.  Returns NULL if out of memory; the client has then been told to try
 * again. */
struct kvs_control_call *kvs_call_create(struct kvs_control *control,
                                         enum kv_op_id op,
                                         kvs_node_reply_fn reply,
                                         void *arg);
/* Creates a call without a client.  Returns NULL if out of memory; its task tries again
 * later. */
struct kvs_control_call *kvs_control_call_internal(struct kvs_control *control,
                                                   enum kv_op_id op);
void kvs_control_call_end(struct kvs_control_call *call);

/* ---- sessions.c ---- */

/* Allocates the places.  Returns false if out of memory. */
bool kvs_sessions_init(struct kvs_control *control, uint64_t secret);
/* Fails with KV_BUSY if all places are in use, and with KV_NO_MEMORY.  The session has no lease
 * yet. */
kv_status_t kvs_session_create(struct kvs_control *control,
                               const struct kv_id128 *id,
                               struct kvs_model *model,
                               struct kvs_session **ret_session);
/* Refuses the call for the status with which kvs_session_create() failed. */
void kvs_session_refuse(struct kvs_control_call *call, const char *what, kv_status_t status);
void kvs_session_destroy(struct kvs_control *control, struct kvs_session *session);
/* Makes the data threads that know the session close it.  `why` is what late requests are
 * told. */
void kvs_session_close(struct kvs_control_call *call,
                       const struct kvs_session *session,
                       enum kvs_ended_why why,
                       void (*next)(struct kvs_control_call *call));
/* Places the session, once, before a data thread is told of it. */
void kvs_session_place(struct kvs_control *control,
                       struct kvs_session *session,
                       uint64_t root,
                       uint64_t epoch,
                       uint32_t n_nodes,
                       uint32_t position);
/* Whether the data thread knows the session. */
bool kvs_session_is_on(const struct kvs_control *control,
                       const struct kvs_session *session,
                       uint32_t thread);

/* Returns when a client last had a request of the session's rows, or had one waiting for them.  Until
 * the session has had one: that of the session that had its index before. */
uint64_t kvs_session_needed_us(const struct kvs_control *control,
                               const struct kvs_session *session);
/* The same, or when it last renewed or changed the session. */
uint64_t kvs_session_used_us(const struct kvs_control *control,
                             const struct kvs_session *session);
/* Returns what is left of the lease at that time; 0: it has ended. */
uint64_t kvs_session_lease_left_us(const struct kvs_control *control,
                                   const struct kvs_session *session,
                                   uint64_t now_us);
/* Gives the session a lease of that length from its last use on. */
void kvs_session_set_lease(struct kvs_control *control,
                           struct kvs_session *session,
                           uint64_t lease_us);
/* Closes the sessions whose lease has ended.  Looks only at those that could have: a session is
 * looked at about once per lease, however often it is used. */
void kvs_sessions_expire(struct kvs_control *control, uint64_t now_us);

/* ---- rest.c ---- */

/* Looks which sessions are used, and which rest. */
void kvs_sessions_rest(struct kvs_control *control, uint64_t now_us);
/* Sessions that are in use may rest, and then leave memory: whoever lacks some waits for that, but not
 * for long. */
void kvs_sessions_tell_soon(struct kvs_control *control, bool is_lacking);
/* The session does not rest any more, if it did: it is used again, or gives its prefix up. */
void kvs_session_wake(struct kvs_control *control, struct kvs_session *session);

/* ---- roots.c ---- */

/* Returns the rows over which a new session of the root is to be opened, at least those that its
 * client knows.  A root of which one row has as many sessions as the configuration bounds gets
 * twice as many. */
uint32_t kvs_root_update_rows(struct kvs_control *control,
                              uint32_t tenant,
                              uint64_t prompt_root,
                              uint32_t branch,
                              uint32_t n_rows_known);
/* Counts a session, until kvs_root_leave(); n_rows: of a root that is new here.  Returns false if
 * out of memory. */
bool kvs_root_enter(struct kvs_control *control,
                    struct kvs_session *session,
                    uint64_t prompt_root,
                    uint32_t branch,
                    uint32_t n_rows);
/* Counts a fork where its parent is counted. */
void kvs_root_follow(struct kvs_session *child, const struct kvs_session *parent);
void kvs_root_leave(struct kvs_control *control, struct kvs_session *session);
void kvs_roots_fini(struct kvs_control *control);

/* ---- ops_prefix.c ---- */

/* Gives a session that is being opened the names of its prompt's blocks and its writers, and the
 * longest prefix of the first `match_blocks` of them that is here, which its data threads are then
 * to be told.  Fails with KV_INVALID if the field is malformed, and with KV_NO_MEMORY. */
kv_status_t kvs_session_match(struct kvs_control *control,
                              struct kvs_session *session,
                              const ProtobufCBinaryData *names,
                              uint32_t match_blocks,
                              uint64_t writer);
/* Counts what became of the tokens that an open asked for: once it has succeeded, so that one that
 * is repeated counts once. */
void kvs_session_count_match(struct kvs_control *control, const struct kvs_session *session);
/* An open of a session of these names goes to another row. */
void kvs_match_elsewhere(struct kvs_control *control,
                         uint32_t tenant,
                         const ProtobufCBinaryData *names,
                         uint32_t match_blocks);
/* The block after `tokens` that matched has bad rows: it goes, and those behind it. */
void kvs_session_found_bad(struct kvs_control *control,
                           const struct kvs_session *session,
                           uint32_t tokens);
/* What is away of the prefix and those before it is wanted in memory. */
void kvs_prefix_come_back(struct kvs_control *control, struct kvs_prefix *prefix);
/* The prefix that the session has has left the index: from now on it has the one that was published
 * under its name since, or what is left of those before it. */
void kvs_session_follow_prefix(struct kvs_control *control, struct kvs_session *session);
/* The session ends. */
void kvs_session_leave_prefix(struct kvs_control *control, struct kvs_session *session);
/* The session has only `tokens` tokens left. */
void kvs_session_cut_names(struct kvs_control *control,
                           struct kvs_session *session,
                           uint32_t tokens);
/* A fork has its parent's first tokens.  Returns KV_OK or KV_NO_MEMORY. */
kv_status_t kvs_session_share_names(struct kvs_control *control,
                                    const struct kvs_session *parent,
                                    struct kvs_session *child,
                                    uint32_t tokens);
/* Returns the bytes that a block takes on a node of a row, in rows and CRCs. */
uint64_t kvs_block_bytes(const kv_schema_t *schema, uint32_t n_nodes, uint32_t position);
/* Ends the holds of a call. */
void kvs_call_drop_prefixes(struct kvs_control_call *call);

/* ---- events.c ---- */

/* Tells readers of events that a prefix is in the index, or is about to leave it. */
void kvs_events_stored(const struct kvs_control *control, const struct kvs_prefix *prefix);
void kvs_events_removed(const struct kvs_control *control, const struct kvs_prefix *prefix);
/* The prefix, which is in the index, is in another medium from now on. */
void kvs_events_moved(const struct kvs_control *control,
                      const struct kvs_prefix *prefix,
                      enum kvs_medium from,
                      enum kvs_medium to);
/* All that is away of the prefix and those before it counts as in memory from now on: a session has
 * asked for it. */
void kvs_events_back(const struct kvs_control *control, const struct kvs_prefix *prefix);

/* ---- eviction.c ---- */

/* Takes a prefix without children out of the index, to be given back.  Its blocks are freed
 * where no session has them. */
void kvs_control_evict(struct kvs_control *control,
                       struct kvs_prefix *prefix,
                       enum kvs_evict_why why);
/* The same of a prefix in the index and all that are behind it.  Returns how many that were. */
uint64_t kvs_control_evict_tree(struct kvs_control *control,
                                struct kvs_prefix *prefix,
                                enum kvs_evict_why why);
/* The caller's hold and refs of blocks of a prefix that is not in the index: both go with the next
 * kvs_prefixes_release_step(). */
void kvs_prefix_give_back(struct kvs_control *control, struct kvs_prefix *prefix);
/* Has the data threads give the refs back of all that has gathered, if they are done with what they
 * were told before. */
void kvs_prefixes_release_step(struct kvs_control *control);
/* Ends the holds of a list. */
void kvs_prefixes_drop(struct kvs_control *control, struct kvs_prefix *list);
/* Evicts while the node is short of pages, some prefixes in each call. */
void kvs_prefixes_make_room(struct kvs_control *control);
/* Makes room for a prefix in its tenant's quota.  Returns false if nothing more of the tenant's may
 * go. */
bool kvs_prefixes_admit(struct kvs_control *control, uint32_t tenant, uint64_t bytes);
/* Returns what a call fails with whose data threads had no memory: KV_BUSY if some will be free. */
kv_status_t kvs_control_full(struct kvs_control *control);
/* Frees all prefixes; no session has any. */
void kvs_prefixes_stop(struct kvs_control *control);

/* ---- memory_watch.c ---- */

/* Warns once when memory gets scarce, and once when there is none; again after there was plenty. */
void kvs_memory_watch(struct kvs_control *control, uint64_t now_us);

/* ---- ops_keep.c ---- */

/* Goes on with what clients said of prefixes, for some slices. */
void kvs_keep_step(struct kvs_control *control);

/* ---- ops_verify.c ---- */

/* Nobody has asked for long: the scrubbers have time again. */
void kvs_verify_expire(struct kvs_control *control, uint64_t now_us);

/* ---- clients.c ---- */

/* As kvs_node_client_gone() and kvs_node_attach_client() in node.h. */
void kvs_control_client_gone(struct kvs_control *control,
                             uint32_t client_index,
                             const struct kv_id128 *client_token);
bool kvs_control_attach_client(struct kvs_control *control,
                               uint32_t client_index,
                               const struct kv_id128 *client_token);

/* Allocates the places.  Returns false if out of memory. */
bool kvs_clients_init(struct kvs_control *control, uint64_t secret);
void kvs_clients_fini(struct kvs_control *control);

/* Gives a client a place, a token and credits; its data threads are to be told.  Fails with
 * KV_BUSY if all places are in use, and with KV_NO_MEMORY. */
kv_status_t kvs_client_create(struct kvs_control *control,
                              const struct kv_id128 *id,
                              struct kvs_client_record **ret_client);
/* Every data thread has opened it. */
void kvs_client_opened(struct kvs_control *control, struct kvs_client_record *client);
/* Returns the client that is open or being opened, or NULL. */
struct kvs_client_record *kvs_client_by_id(struct kvs_control *control,
                                           const struct kv_id128 *id);

/* Returns the client, or NULL if the node has no such client or the token is wrong. */
struct kvs_client_record *
kvs_client_of(struct kvs_control *control, uint32_t index, const struct kv_id128 *token);
/* Returns the credits for a new client: the configured number while requests are left, but
 * always at least credits_sure. */
uint32_t kvs_client_grant(struct kvs_control *control);
void kvs_client_remove(struct kvs_control *control, struct kvs_client_record *client);
/* As kvs_client_remove(), and ends the client's own call with a reply once no data thread sends
 * to it any more. */
void kvs_client_part(struct kvs_client_record *client, struct kvs_control_call *goodbye);
/* Returns the control port's channel to the client, also to one that has said goodbye and waits
 * for the reply; NULL: there is none. */
struct kv_channel *kvs_client_channel(const struct kvs_control *control,
                                      uint32_t index,
                                      const struct kv_id128 *token);
/* A data thread reports that its channel to the client has failed or makes no progress. */
void kvs_client_stuck(struct kvs_control *control, const struct kvs_command *notice);
/* Removes clients that have been silent for too long, and continues closing others. */
void kvs_clients_check(struct kvs_control *control, uint64_t now_us);

/* ---- message_port.c ---- */

/* Opens the control port and formats its address for clients in the same process. */
kv_status_t kvs_control_port_open(struct kvs_control *control);

/* ---- ops_model.c ---- */

/* Loads the models that an earlier process wrote to the disk.  Fails with KV_IO if not all records can
 * be read; those that are not valid are skipped. */
kv_status_t kvs_models_load(struct kvs_control *control);

/* ---- ops_*.c: handlers in the operation table ---- */

void kvs_control_hello(struct kvs_control_call *call);
void kvs_control_goodbye(struct kvs_control_call *call);
void kvs_control_model(struct kvs_control_call *call);
void kvs_control_open(struct kvs_control_call *call);
void kvs_control_resume(struct kvs_control_call *call);
void kvs_control_fork(struct kvs_control_call *call);
void kvs_control_truncate(struct kvs_control_call *call);
void kvs_control_close(struct kvs_control_call *call);
void kvs_control_renew(struct kvs_control_call *call);
void kvs_control_session(struct kvs_control_call *call);
void kvs_control_publish(struct kvs_control_call *call);
void kvs_control_match(struct kvs_control_call *call);
void kvs_control_prefix(struct kvs_control_call *call);
void kvs_control_objects(struct kvs_control_call *call);
void kvs_control_table(struct kvs_control_call *call);
void kvs_control_verify(struct kvs_control_call *call);
void kvs_control_save(struct kvs_control_call *call);
void kvs_control_drain_begin(struct kvs_control_call *call);

/* ---- tables.c ---- */

void kvs_tables_reply(struct kvs_control_call *call, const char *name);

#endif
