/* control.h - the control thread's side of a node: models, clients, sessions, and the calls
 * that change them.
 *
 *   request -> kvs_control_call -> handler (ops_*.c)
 *                                   |  asks every data thread (kvs_control_broadcast)
 *                                   v
 *                                 next step, when all have answered ... -> kvs_control_reply
 *
 * A session or client is changed by one call at a time (`busy`); a second one is told KV_BUSY.
 *
 * Threads: the control thread, except where said.
 */
#ifndef KV_KVSERVER_STORE_CONTROL_CONTROL_H
#define KV_KVSERVER_STORE_CONTROL_CONTROL_H

#include "kvserver/base/map.h"
#include "kvserver/base/random.h"
#include "kvserver/base/writers.h"
#include "kvserver/cluster/placement.h"
#include "kvserver/disk/disk.h"
#include "kvserver/store/control/config.h"
#include "kvserver/store/shard/op.h"
#include "kvserver/store/shard/shard.h"

#include <protobuf-c/protobuf-c.h>

enum {
    KVS_MODELS_MAX = 256,
    KVS_CALLS_MAX = 1024, /* control requests under way */
    KVS_LOG_ENTRIES = 16, /* lifecycle operations that a session remembers */
    KVS_CLIENT_NAME_BYTES = 64,
    KVS_PERIODIC_TASKS = 2, /* control.c */
};

/* Stays known, on the disk too, while sessions use it; after that until another model needs its
 * place, and then the one that was used longest ago goes.  So a client may take its time
 * between making a model known and opening a session of it. */
struct kvs_model {
    struct kv_model_info info;
    bool saving; /* the disk has not said yes */
    uint32_t n_sessions;
    uint64_t used_us; /* when it was last asked for, or its last session ended */
};

/* A fork or a truncate that was done. */
struct kvs_log_entry {
    uint64_t op_id;
    uint32_t kind;       /* KV_OP_FORK, KV_OP_TRUNCATE */
    uint32_t generation; /* before it */
    uint32_t tokens;
    struct kv_id128 child_id, child_token;
    uint64_t writer;      /* fork: the child's; truncate: the session's own from then on */
    uint32_t child_index; /* as it was then; the child may be gone */
};

struct kvs_session {
    bool used;
    bool busy;
    uint32_t index;
    struct kv_id128 id, token;
    struct kvs_model *model; /* which counts the session */
    uint32_t generation;
    uint32_t tenant;
    uint32_t tokens_max;
    uint64_t lease_us;
    uint64_t renewed_us;
    uint64_t root;
    uint32_t epoch, n_nodes, node_index;
    struct kv_writers *writers; /* data threads use it, too, until they have answered to what
                                   replaces it */
    uint32_t shared_tokens;     /* of its own writer, that forks have inherited, at most */
    struct kvs_log_entry log[KVS_LOG_ENTRIES];
    uint32_t n_log; /* ever done; the last KVS_LOG_ENTRIES are kept */
};

enum kvs_client_state {
    KVS_CLIENT_FREE = 0,
    KVS_CLIENT_OPENING,
    KVS_CLIENT_OPEN,
    KVS_CLIENT_CLOSING,
};

struct kvs_client_record {
    enum kvs_client_state state;
    uint32_t index;
    uint32_t n_asked; /* threads that still have to close it */
    struct kv_id128 id, token;
    char name[KVS_CLIENT_NAME_BYTES];
    enum kv_channel_mode mode;
    uint32_t tenant;
    uint32_t credits; /* granted until the place is free again */
    bool attached;    /* a carrier watches its process */
    uint64_t since_us, heard_us;
    uint64_t requests_seen;     /* of all data threads, when it was last heard */
    uint64_t closing_us;        /* of the last attempt */
    struct kv_channel *channel; /* of the control port: message carrier only */
};

struct kvs_control_call {
    struct kvs_control *control;
    enum kv_op_id op;
    uint32_t tenant;        /* of the client that asks, as it said at hello */
    const uint8_t *request; /* only until the handler returns */
    size_t request_bytes;
    kvs_node_reply_fn reply; /* NULL: nobody waits */
    void *arg;
    void (*next)(struct kvs_control_call *call);
    uint32_t n_pending; /* answers of data threads, or the disk's */
    kv_status_t status; /* first failure among them */

    struct kvs_session *session, *child;
    struct kvs_client_record *client;
    struct kvs_model *model;
    struct kvs_log_entry log_entry;
    struct kv_writers *writers; /* truncate: the session's, when it is done */
    kv_status_t refusal;        /* that it ends with, when what it began is undone */
    uint32_t tokens;            /* the fewest that a data thread has */
    uint64_t bytes;             /* of all data threads */
    uint8_t *address;           /* hello: of the client's port; the call's */
    struct kvs_control_call *list_next, **list_link;
    struct kvs_command commands[]; /* (n_threads) so that asking the data threads cannot fail */
};

struct kvs_control {
    struct kvs_node_config config;
    const struct kvs_op_type *ops; /* (KV_OP_COUNT) by number: op.h */
    char name[64];
    char address[2 * KV_WIRE_ADDRESS_MAX + 16];
    struct kv_id128 id;
    struct kv_random random;
    uint64_t started_us;
    struct kvs_shard *shard; /* (n_threads) the node's */
    uint32_t n_threads;
    struct kv_ring *answers;

    struct kvs_model *models[KVS_MODELS_MAX];
    uint32_t n_models;
    struct kvs_session *sessions; /* (sessions_max) */
    struct kv_map *session_of_id;
    uint32_t n_sessions;
    struct kvs_ended_list ended;       /* of those */
    struct kvs_client_record *clients; /* (clients_max) */
    uint32_t credits_sure;             /* of every client */
    uint32_t credits_spare;            /* not granted to any, besides those */
    struct kvs_control_call *calls;
    uint32_t n_calls;
    uint64_t due_us[KVS_PERIODIC_TASKS]; /* when each is done next */
    struct kvs_stats stats;              /* the control thread's */
    _Atomic bool draining, drain_requested;
    _Atomic uint32_t n_sessions_seen; /* for metrics */

    struct kv_port *port; /* message carrier */
    bool port_closes;     /* and with it all of its channels */
};

/* Requests that each data thread has: one for each credit that can be granted. */
static inline uint32_t kvs_node_requests_max(const struct kvs_node_config *config)
{
    uint64_t all = (uint64_t)config->clients_max * config->credits;
    uint64_t sure = (uint64_t)config->clients_max *
                    (config->credits < KVS_CREDITS_SURE ? config->credits : KVS_CREDITS_SURE);

    if (all <= KVS_REQUESTS_MAX)
        return (uint32_t)all;
    return sure > KVS_REQUESTS_MAX ? (uint32_t)sure : KVS_REQUESTS_MAX;
}

/* Commands that can be under way to one data thread at once: one per session, two per client,
 * and one per call. */
static inline uint32_t kvs_node_commands_max(const struct kvs_node_config *config)
{
    return config->sessions_max + 2 * config->clients_max + KVS_CALLS_MAX + 1;
}

static inline bool kvs_control_has_op(const struct kvs_control *control, unsigned op)
{
    return op < KV_OP_COUNT && control->ops[op].control != NULL;
}

/* Of its operation. */
static inline const char *kvs_call_name(const struct kvs_control_call *call)
{
    return call->control->ops[call->op].name;
}

/* ---- control.c ---- */

/* For the node's n_threads data threads, which are made after it: they need its ring.  The
 * configuration is whole and checked.  KV_NO_MEMORY: kvs_control_fini() all the same. */
kv_status_t kvs_control_init(struct kvs_control *control,
                             const struct kvs_node_config *config,
                             const struct kvs_op_type *ops,
                             struct kvs_shard *shard);
void kvs_control_fini(struct kvs_control *control);

/* As node.h says of kvs_node_control() and so on. */
bool kvs_control_request(struct kvs_control *control,
                         enum kv_op_id op,
                         uint32_t client_index,
                         const struct kv_id128 *client_token,
                         const uint8_t *request,
                         size_t request_bytes,
                         kvs_node_reply_fn reply,
                         void *arg);
bool kvs_control_step(struct kvs_control *control);
void kvs_control_drain(struct kvs_control *control);
bool kvs_control_drained(struct kvs_control *control);

/* ---- call.c ---- */

/* Sends `command` to every data thread, then call->next runs when all have answered;
 * call->status is KV_OK or the first failure.  Copies the command.  One at a time of a call. */
void kvs_control_broadcast(struct kvs_control_call *call,
                           const struct kvs_command *command,
                           void (*next)(struct kvs_control_call *call));

/* A data thread has answered to the command. */
void kvs_call_answered(struct kvs_control_call *call, const struct kvs_command *command);

/* Ends the call with the packed message, whose outcome the caller has set. */
void kvs_control_reply(struct kvs_control_call *call, const ProtobufCMessage *message);
/* End the call with an outcome alone: it was done; it was not, and why. */
void kvs_call_reply_ok(struct kvs_control_call *call);
void kvs_control_refuse(struct kvs_control_call *call,
                        kv_status_t status,
                        const char *format,
                        ...) __attribute__((format(printf, 3, 4)));
/* NULL: out of memory, and who waits for the reply has been told to ask again. */
struct kvs_control_call *kvs_call_create(struct kvs_control *control,
                                         enum kv_op_id op,
                                         kvs_node_reply_fn reply,
                                         void *arg);
/* A call that nobody waits for.  NULL: out of memory, its task tries again the next time. */
struct kvs_control_call *kvs_control_call_internal(struct kvs_control *control,
                                                   enum kv_op_id op);
void kvs_control_call_end(struct kvs_control_call *call);

/* ---- sessions.c ---- */

/* NULL: there are too many. */
struct kvs_session *kvs_session_create(struct kvs_control *control,
                                       const struct kv_id128 *id,
                                       struct kvs_model *model);
void kvs_session_destroy(struct kvs_control *control, struct kvs_session *session);
/* Has every data thread give up its part; why tells those who come too late. */
void kvs_session_close(struct kvs_control_call *call,
                       const struct kvs_session *session,
                       enum kvs_ended_why why,
                       void (*next)(struct kvs_control_call *call));
uint64_t kvs_session_used_us(const struct kvs_control *control,
                             const struct kvs_session *session);

/* What is left of the lease at that moment; 0: it has ended. */
uint64_t kvs_session_lease_left_us(const struct kvs_control *control,
                                   const struct kvs_session *session,
                                   uint64_t now_us);
/* Closes those whose lease has ended. */
void kvs_sessions_expire(struct kvs_control *control, uint64_t now_us);

/* ---- clients.c ---- */

/* As node.h says of kvs_node_client_gone() and kvs_node_attach_client(). */
void kvs_control_client_gone(struct kvs_control *control,
                             uint32_t client_index,
                             const struct kv_id128 *client_token);
bool kvs_control_attach_client(struct kvs_control *control,
                               uint32_t client_index,
                               const struct kv_id128 *client_token);

/* NULL: it is no client of this node, or not its token. */
struct kvs_client_record *
kvs_client_of(struct kvs_control *control, uint32_t index, const struct kv_id128 *token);
/* Credits for a new client: what the configuration says while there are requests for so many, and
 * always credits_sure. */
uint32_t kvs_client_grant(struct kvs_control *control);
void kvs_client_remove(struct kvs_control *control, struct kvs_client_record *client);
/* A data thread says that its channel to the client stands still or has failed. */
void kvs_client_stuck(struct kvs_control *control, const struct kvs_command *notice);
/* Removes those that were not heard for too long, and goes on with those that are going. */
void kvs_clients_check(struct kvs_control *control, uint64_t now_us);

/* ---- message_port.c ---- */

/* And writes its address, as a client in the same process is given it. */
kv_status_t kvs_control_port_open(struct kvs_control *control);

/* ---- ops_model.c ---- */

/* Reads the models that an earlier node wrote to the disk. */
void kvs_models_load(struct kvs_control *control);

/* ---- ops_*.c: what the rows of the operation table call ---- */

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
void kvs_control_table(struct kvs_control_call *call);
void kvs_control_drain_begin(struct kvs_control_call *call);

/* ---- tables.c ---- */

void kvs_tables_reply(struct kvs_control_call *call, const char *name);

#endif
