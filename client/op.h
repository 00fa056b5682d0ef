/* op.h - kv_op: what the caller began; kvc_op_type: a row for each operation of the API.
 *
 * An operation:
 *
 *   begin --> QUEUED --> PREPARING --------------> RUNNING ------------------> ENDED
 *             behind a    nodes connect,            sub-operations become requests while
 *             lifecycle   the session's nodes       connections have credits; calls
 *             operation   catch up                  go to the control control transports
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
#include "client/session.h"
#include "kvserver/cluster/placement.h"
#include "proto/kv_wire.h"

struct kvc_call;
struct kvc_request;
struct kvc_op_events;
struct kv_iov;

enum {
    KVC_OP_STATE_BYTES = 1088,       /* of what a kind keeps; fetch is the largest */
    KVC_OP_CAPACITY_KEPT = 64 << 10, /* of an operation's room, for the next one in its place */
};

enum kvc_op_stage {
    KVC_STAGE_QUEUED,
    KVC_STAGE_PREPARING,
    KVC_STAGE_RUNNING,
    KVC_STAGE_ENDED,
};

/* An operation of the API: one row each. */
struct kvc_op_type {
    const char *name;
    enum kv_op_id id;
    bool is_exclusive;   /* the session's other operations wait for it, and it for them */
    bool needs_current;  /* the session's nodes must have seen every lifecycle operation */
    bool is_best_effort; /* a node that cannot be reached does not end it */

    /* The nodes it needs are ready.  Adds sub-operations, begins calls; may end the operation. */
    void (*start)(struct kv_op *op);

    /* Instead, where a node's share does not depend on other nodes: one that it needs is ready.
     * Both or neither of these two. */
    void (*start_node)(struct kv_op *op, const struct kvc_node *node);
    /* What it had to do on the node has come to nothing; the rest goes on. */
    void (*lost)(struct kv_op *op,
                 const struct kvc_node *node,
                 kv_status_t status,
                 const char *why);

    /* Whether rows of this client's are under way that lead up to those of the request: the node
     * is told that they come, and a refusal for want of them may pass.  NULL: none do. */
    bool (*awaits)(const struct kvc_request *request);

    /* Fills a request with what the sub-operation asks next and moves the sub-operation on.  KV_BUSY: no
     * message buffer now, nothing happened. */
    kv_status_t (*build)(struct kvc_subop *subop, struct kvc_request *request);
    /* Where `bytes` of the answer's data go; 0: they are not what was asked for. */
    unsigned (*land)(struct kvc_request *request, uint64_t bytes, struct kv_iov *ret_iov);
    /* An answer's header and body.  Not KV_OK: it is not what was asked for; `detail` says
     * which field has which value. */
    kv_status_t (*reply)(struct kvc_request *request,
                         const uint8_t *body,
                         char *detail,
                         size_t detail_bytes);
    /* The answer and its data are there.  Not KV_OK: it fails its checks. */
    kv_status_t (*finish)(struct kvc_request *request, char *detail, size_t detail_bytes);
    /* A request failed.  NULL: so does the operation. */
    void (*failed)(struct kvc_request *request, kv_status_t status, const char *detail);

    /* A node is beyond the generation that the operation waits for: begin anew, from PREPARING.
     * NULL: that is a failure. */
    void (*stale)(struct kv_op *op);
    /* It ends, however: the last look at what it holds. */
    void (*ended)(struct kv_op *op);
    /* Frees what `ended` has left for the caller. */
    void (*fini)(struct kv_op *op);
    /* What it is about, for texts: "session 1a2b, layer 3".  May be NULL. */
    void (*describe)(const struct kv_op *op,
                     const struct kvc_request *request,
                     char *text,
                     size_t text_bytes);
};

struct kv_op {
    struct kvc_list of_client; /* until it ends */
    struct kvc_list of_session;
    struct kv_client *client;
    const struct kvc_op_type *type;
    bool is_lent; /* by the pool */
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
    struct kv_session *result; /* being made; the caller's after KV_OK */
    uint32_t tokens;
    uint32_t lease_ms; /* renew: the least that a node granted */

    _Alignas(16) uint8_t state[KVC_OP_STATE_BYTES]; /* kvc_op_state() */
    char detail[KVC_DETAIL_BYTES];
    void *capacity; /* kvc_op_capacity(); kept when the operation is freed, for the next */
    size_t capacity_bytes;
};

/* What an operation of this kind keeps, besides what all do: its own file lays it out.  Zeros
 * when the operation begins. */
static inline void *kvc_op_state(const struct kv_op *op)
{
    return (void *)op->state;
}

/* The operation that a request or a call is for; NULL: it has ended, or there was none. */
struct kv_op *kvc_request_op(const struct kvc_request *request);
struct kv_op *kvc_call_op(const struct kvc_call *call);

/* A request of the operation.  NULL: all are in use. */
struct kvc_request *kvc_op_take_request(struct kv_op *op, struct kvc_connection *connection);

/* What answers about units say in their headers: the first one's layer, and how many tokens are
 * committed, at least `tokens`. */
kv_status_t kvc_reply_check_units(const struct kvc_request *request,
                                  uint32_t layer,
                                  uint32_t tokens,
                                  char *detail,
                                  size_t detail_bytes);

/* A new operation; deadline_ms 0: the client's.  KV_BUSY: ops_max exist; KV_NOT_FOUND: the
 * session is closed. */
kv_status_t kvc_op_begin(struct kv_client *client,
                         const struct kvc_op_type *type,
                         struct kv_session *session,
                         struct kv_buffer *buffer,
                         uint32_t deadline_ms,
                         struct kv_op **ret_op);

/* Memory for what begin copies: until the operation is freed.  Asked for once by an operation.
 * NULL: out of memory. */
void *kvc_op_capacity(struct kv_op *op, size_t bytes);
/* Copies `bytes` to *at, which is moved on; returns the copy. */
void *kvc_op_keep(uint8_t **at, const void *from, size_t bytes);

/* Gives back one that did not go. */
void kvc_op_discard(struct kv_op *op);

/* Its fields are set: off it goes.  Returns KV_OK: what fails now shows in the operation. */
kv_status_t kvc_op_submit(struct kv_op *op, struct kv_op **ret_op);

/* Adds the sub-operation for the connection that owns the unit, which begins there; nothing where the
 * operation has one for that connection since kvc_connections_unmark().  false: the operation has failed. */
bool kvc_op_ask_unit(struct kv_op *op, uint32_t layer, uint32_t head, uint64_t position);

void kvc_op_require_node(struct kv_op *op, uint32_t node_index);
void kvc_op_require_all_nodes(struct kv_op *op);
/* n_kv_heads 0: all of each layer. */
void kvc_op_require_units(struct kv_op *op,
                          uint32_t layer_begin,
                          uint32_t layer_end,
                          uint32_t kv_head_begin,
                          uint32_t n_heads);
bool kvc_op_requires(const struct kv_op *op, uint32_t node_index);

/* Back to PREPARING, with other needs. */
void kvc_op_restart(struct kv_op *op);

/* Moves on if its nodes are ready. */
void kvc_op_prepare(struct kv_op *op);

/* Ends what the operation has to do on the node, of a kind that has `lost`: it is not needed
 * any more. */
void kvc_op_lose(struct kv_op *op, struct kvc_node *node, kv_status_t status, const char *why);

/* Whether something of it is under way with the node, or waits to be. */
bool kvc_op_uses(const struct kv_op *op, const struct kvc_node *node);

/* Ends it.  `remote` may be NULL. */
void kvc_op_end(struct kv_op *op, kv_status_t status);
void kvc_op_fail(struct kv_op *op,
                 const struct kvc_node *node,
                 const struct kvc_request *request,
                 kv_status_t status,
                 const char *format,
                 ...) __attribute__((format(printf, 5, 6)));

/* Keeps the first failure of an operation that goes on. */
void kvc_op_record_error(struct kv_op *op,
                         const struct kvc_node *node,
                         kv_status_t status,
                         const char *text);

/* "session 1a2b": what an operation of a session's life is about; for rows of kinds. */
void kvc_session_describe_op(const struct kv_op *op,
                             const struct kvc_request *request,
                             char *text,
                             size_t text_bytes);

extern const struct kvc_op_events kvc_op_events;

#endif
