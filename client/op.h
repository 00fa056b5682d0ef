/* op.h - kv_op: an operation that the caller began; kvc_op_type: the functions of each kind.
 *
 * The stages of an operation:
 *
 *   begin --> QUEUED --> PREPARING --------------> RUNNING ------------------> ENDED
 *             after a     nodes connect,            sub-operations become requests while
 *             lifecycle   the session's nodes       connections have credits; calls
 *             operation   catch up                  go to the control transports
 *
 * Threads: the client's.  Memory: kvc_op_begin() / kv_op_free(), from the client's pool.
 */
#ifndef KV_CLIENT_OP_H
#define KV_CLIENT_OP_H

#include "client/connection.h"
#include "client/include/kvclient.h"
#include "client/list.h"
#include "client/loop.h"
#include "client/owner.h"
#include "client/request.h"
#include "client/session.h"
#include "kvserver/cluster/placement.h"
#include "proto/kv_wire.h"

struct kvc_call;
struct kvc_op_events;
struct kvc_subop;

enum {
    KVC_OP_STATE_BYTES = 1088, /* of an operation type's own state; fetch has the largest */
    KVC_OP_CAPACITY_KEPT =
        64 << 10, /* of an operation's memory that the next one in its place reuses */
};

enum kvc_op_stage {
    KVC_STAGE_QUEUED,
    KVC_STAGE_PREPARING,
    KVC_STAGE_RUNNING,
    KVC_STAGE_ENDED,
};

/* An operation type: one for each operation of the API. */
struct kvc_op_type {
    const char *name;
    enum kv_op_id id;
    bool is_exclusive;   /* waits for the session's other operations, and they for it */
    bool needs_current;  /* the session's nodes must have applied every lifecycle operation */
    bool is_best_effort; /* a node that cannot be reached does not fail it */

    /* Called when all required nodes are ready.  Adds sub-operations or begins calls; may end
     * the operation. */
    void (*start)(struct kv_op *op);

    /* Called instead for each required node when it is ready, if a node's share does not depend
     * on other nodes.  Set start_node and lost, or neither. */
    void (*start_node)(struct kv_op *op, const struct kvc_node *node);
    /* The operation's share on the node has failed; the other shares continue. */
    void (*lost)(struct kv_op *op,
                 const struct kvc_node *node,
                 kv_status_t status,
                 const char *why);

    /* Fills a request with the next part of the sub-operation and advances the sub-operation.
     * Returns KV_BUSY, and changes nothing, if no message buffer is free. */
    kv_status_t (*build)(struct kvc_subop *subop, struct kvc_request *request);
    struct kvc_request_ops requests;
    /* A request has failed.  NULL: the operation fails, too. */
    void (*failed)(struct kvc_request *request, kv_status_t status, const char *detail);

    /* A node is at a later generation than the operation waits for: starts again, from
     * PREPARING.  NULL: the operation fails. */
    void (*stale)(struct kv_op *op);
    /* Its sub-operations are sent before those of greater rank of the same session, in whatever
     * order both were begun, since these wait for what they bring.  NULL: at any time. */
    uint32_t (*rank)(const struct kv_op *op);
    /* The operation ends with any result: releases what it has. */
    void (*ended)(struct kv_op *op);
    /* Frees the results that `ended` kept for the caller. */
    void (*fini)(struct kv_op *op);
    /* Describes the operation for messages: "session 1a2b, layer 3".  May be NULL. */
    void (*describe)(const struct kv_op *op,
                     const struct kvc_request *request,
                     char *text,
                     size_t text_bytes);
};

struct kv_op {
    struct kvc_list of_client; /* until it ends */
    struct kvc_list of_told;   /* of the client, from its end until that is told */
    void *user;
    bool has_user;
    struct kvc_list of_session;
    struct kvc_list of_ranked; /* of the session */
    struct kv_client *client;
    const struct kvc_op_type *type;
    bool is_in_use; /* the pool has handed it out */
    bool is_own;    /* the library's own: its end is no news to the user */
    kv_status_t status;
    enum kvc_op_stage stage;
    struct kvc_owner owner; /* of its requests and calls */
    uint64_t end_us;
    uint64_t required[KV_NODES_MAX / 64]; /* nodes, a bit each */

    struct kv_session *session; /* NULL once ended */
    struct kvc_list subops;
    uint32_t phase;
    bool needs_current;

    kv_status_t partial; /* the first failure that did not end it */
    const struct kvc_node *partial_node;
    char partial_text[200];

    /* Results. */
    struct kv_session *result; /* under construction; transferred to the caller after KV_OK */
    uint32_t tokens;
    uint32_t lease_ms; /* renew: the minimum that a node granted */

    _Alignas(16) uint8_t state[KVC_OP_STATE_BYTES]; /* kvc_op_state() */
    char detail[KVC_DETAIL_BYTES];
    void *capacity; /* kvc_op_capacity(); kept when the operation is freed, for the next */
    size_t capacity_bytes;
};

/* Returns the state of the operation's type; its own file defines it.  Zero when the operation
 * begins. */
static inline void *kvc_op_state(const struct kv_op *op)
{
    return (void *)op->state;
}

/* Return the operation of a request or a call; NULL if it has ended, or there was none. */
struct kv_op *kvc_request_op(const struct kvc_request *request);
struct kv_op *kvc_call_op(const struct kvc_call *call);

/* Returns the operation of a call that has succeeded; NULL if the operation has ended, or ends
 * now, because the call has failed. */
struct kv_op *
kvc_call_op_if_ok(const struct kvc_call *call, kv_status_t status, const char *detail);

/* Returns a new request of the operation; NULL if all are in use. */
struct kvc_request *kvc_op_take_request(struct kv_op *op, struct kvc_connection *connection);

/* Checks the header of a reply about units: the layer, and the committed tokens, which must be
 * at least `tokens`. */
kv_status_t kvc_reply_check_units(const struct kvc_request *request,
                                  uint32_t layer,
                                  uint32_t tokens,
                                  char *detail,
                                  size_t detail_bytes);

/* Creates an operation; deadline_ms 0: the client's default.  Fails with KV_BUSY if ops_max
 * exist, and with KV_NOT_FOUND if the session is closed. */
kv_status_t kvc_op_begin(struct kv_client *client,
                         const struct kvc_op_type *type,
                         struct kv_session *session,
                         struct kv_buffer *buffer,
                         uint32_t deadline_ms,
                         struct kv_op **ret_op);

/* Creates an operation that needs all nodes of its session. */
kv_status_t kvc_op_begin_on_row(struct kv_session *session,
                                const struct kvc_op_type *type,
                                uint32_t deadline_ms,
                                struct kv_op **ret_op);

/* Returns memory for the arguments that begin copies, valid until the operation is freed; NULL
 * if out of memory.  An operation calls it at most once. */
void *kvc_op_capacity(struct kv_op *op, size_t bytes);
/* Copies `bytes` to *at and advances *at.  Returns the copy. */
void *kvc_op_keep(uint8_t **at, const void *from, size_t bytes);

/* Frees an operation that was not submitted. */
void kvc_op_discard(struct kv_op *op);

/* The part of an operation that one connection serves: a cursor over rows or objects. */
struct kvc_subop {
    struct kvc_subop *next; /* free */
    struct kvc_list of_connection;
    struct kvc_list of_op;
    struct kv_op *op;
    struct kvc_connection *connection;
    /* The cursor.  Its operation type defines what the fields mean. */
    uint32_t layer;
    uint32_t head;
    uint64_t position;
    bool alone; /* object: only the remaining requests of the object at `head`; put: only the
                      message at the cursor, which its node refused since rows before it were
                      missing */
    uint64_t due_us;     /* it is sent from then on */
    uint64_t backoff_us; /* of the request that was refused */
    bool finished;       /* everything has been requested */
};

/* Returns NULL if out of memory. */
struct kvc_subop *kvc_subop_add(struct kv_op *op, struct kvc_connection *connection);
/* Ends a request and adds a sub-operation for its message, at this cursor, to be sent from
 * due_us on.  Returns false, and changes nothing, if out of memory. */
bool kvc_subop_requeue(struct kvc_request *request,
                       uint32_t layer,
                       uint32_t head,
                       uint64_t position,
                       uint64_t due_us);
void kvc_subop_free(struct kvc_subop *subop);

/* Puts the operation in its session's list of those that have a rank. */
void kvc_op_rank(struct kv_op *op);

/* Whether the one must be sent first. */
bool kvc_subop_is_before(const struct kvc_subop *subop, const struct kvc_subop *other);

/* Adds a sub-operation, starting at this unit, for the connection that owns it; none if the
 * operation has added one for that connection since kvc_connections_unmark().  Returns false if
 * the operation has failed. */
bool kvc_op_ask_unit(struct kv_op *op, uint32_t layer, uint32_t head, uint64_t position);

void kvc_op_require_node(struct kv_op *op, uint32_t node_index);
void kvc_op_require_row(struct kv_op *op, const struct kv_placement_row *row);
/* n_kv_heads 0: all of each layer. */
void kvc_op_require_units(struct kv_op *op,
                          uint32_t layer_begin,
                          uint32_t layer_end,
                          uint32_t kv_head_begin,
                          uint32_t n_heads);
void kvc_op_require_no_more(struct kv_op *op, uint32_t node_index);
bool kvc_op_requires(const struct kv_op *op, uint32_t node_index);
/* Returns the first required node from `node_index` on; n_nodes of the client: none. */
uint32_t kvc_op_next_required(const struct kv_op *op, uint32_t node_index);

/* Detaches the operation's calls, as if it had ended: their replies are not for it. */
void kvc_op_forget_calls(struct kv_op *op);

/* Returns the operation to PREPARING, with other required nodes. */
void kvc_op_restart(struct kv_op *op);

/* Ends the operation's share on the node, which is then no longer required.  Its type must have
 * `lost`. */
void kvc_op_lose(struct kv_op *op, struct kvc_node *node, kv_status_t status, const char *why);

/* Whether the operation has requests or calls to the node, sent or waiting. */
bool kvc_op_uses(const struct kv_op *op, const struct kvc_node *node);

/* Ends the operation with a failure.  `node` and `request` may be NULL. */
void kvc_op_fail(struct kv_op *op,
                 const struct kvc_node *node,
                 const struct kvc_request *request,
                 kv_status_t status,
                 const char *format,
                 ...) __attribute__((format(printf, 5, 6)));

/* Ends the operation if nothing of it is outstanding: with KV_OK, or its first recorded failure.
 */
void kvc_op_check_end(struct kv_op *op);

/* Records the first failure of an operation that continues. */
void kvc_op_record_error(struct kv_op *op,
                         const struct kvc_node *node,
                         kv_status_t status,
                         const char *text);

/* For kvc_op_type.describe of lifecycle operations: "session 1a2b". */
void kvc_session_describe_op(const struct kv_op *op,
                             const struct kvc_request *request,
                             char *text,
                             size_t text_bytes);

extern const struct kvc_op_events kvc_op_events;

#endif
