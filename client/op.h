/* op.h - kv_op: what the caller began; kv_op_kind: a row for each operation of the API.
 *
 * An operation:
 *
 *   begin --> QUEUED --> PREPARING --------------> RUNNING ------------------> ENDED
 *             behind a    nodes connect,            errands become trips while
 *             lifecycle   the session's nodes       lanes have credits; calls
 *             operation   catch up                  go to the control carriers
 *
 * Threads: the client's.  Memory: kv_op_begin() / kv_op_free(), from the client's pool.
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

struct kv_call;
struct kv_trip;
struct kvc_op_events;
struct kv_iov;

enum {
    KVC_OP_STATE_BYTES = 1088,  /* of what a kind keeps; fetch is the largest */
    KV_OP_ROOM_KEPT = 64 << 10, /* of an operation's room, for the next one in its place */
};

enum kv_op_stage {
    KV_STAGE_QUEUED,
    KV_STAGE_PREPARING,
    KV_STAGE_RUNNING,
    KV_STAGE_ENDED,
};

/* An operation of the API: one row each. */
struct kv_op_kind {
    const char *name;
    enum kv_op_id id;
    bool is_exclusive;  /* the session's other operations wait for it, and it for them */
    bool needs_current; /* the session's nodes must have seen every lifecycle operation */
    bool is_tolerant;   /* a node that cannot be reached does not end it */

    /* The nodes it needs are ready.  Adds errands, begins calls; may end the operation. */
    void (*start)(struct kv_op *op);

    /* Instead, where a node's share does not depend on other nodes: one that it needs is ready.
     * Both or neither of these two. */
    void (*start_node)(struct kv_op *op, const struct kv_remote *remote);
    /* What it had to do on the node has come to nothing; the rest goes on. */
    void (*lost)(struct kv_op *op,
                 const struct kv_remote *remote,
                 kv_status_t status,
                 const char *why);

    /* Whether rows of this client's are under way that lead up to those of the trip: the node
     * is told that they come, and a refusal for want of them may pass.  NULL: none do. */
    bool (*awaits)(const struct kv_trip *trip);

    /* Fills a trip with what the errand asks next and moves the errand on.  KV_BUSY: no
     * envelope now, nothing happened. */
    kv_status_t (*build)(struct kv_errand *errand, struct kv_trip *trip);
    /* Where `bytes` of the answer's data go; 0: they are not what was asked for. */
    unsigned (*land)(struct kv_trip *trip, uint64_t bytes, struct kv_iov *ret_iov);
    /* An answer's header and body.  Not KV_OK: it is not what was asked for; `detail` says
     * which field has which value. */
    kv_status_t (*reply)(struct kv_trip *trip,
                         const uint8_t *body,
                         char *detail,
                         size_t detail_bytes);
    /* The answer and its data are there.  Not KV_OK: it fails its checks. */
    kv_status_t (*finish)(struct kv_trip *trip, char *detail, size_t detail_bytes);
    /* A trip failed.  NULL: so does the operation. */
    void (*failed)(struct kv_trip *trip, kv_status_t status, const char *detail);

    /* A node is beyond the generation that the operation waits for: begin anew, from PREPARING.
     * NULL: that is a failure. */
    void (*overtaken)(struct kv_op *op);
    /* It ends, however: the last look at what it holds. */
    void (*ended)(struct kv_op *op);
    /* Frees what `ended` has left for the caller. */
    void (*fini)(struct kv_op *op);
    /* What it is about, for texts: "session 1a2b, layer 3".  May be NULL. */
    void (*describe)(const struct kv_op *op,
                     const struct kv_trip *trip,
                     char *text,
                     size_t text_bytes);
};

struct kv_op {
    struct kv_list of_client; /* until it ends */
    struct kv_list of_session;
    struct kv_client *client;
    const struct kv_op_kind *kind;
    bool is_lent; /* by the pool */
    kv_status_t status;
    enum kv_op_stage stage;
    struct kvc_owner owner; /* of its requests and calls */
    uint64_t end_us;
    uint64_t needs[KV_NODES_MAX / 64]; /* nodes, a bit each */

    struct kv_session *session; /* NULL once ended */
    struct kv_list errands;
    uint32_t phase;
    bool needs_current;

    kv_status_t partial; /* the first failure that did not end it */
    const struct kv_remote *partial_remote;
    char partial_text[200];

    /* Results. */
    struct kv_session *result; /* being made; the caller's after KV_OK */
    uint32_t tokens;
    uint32_t lease_ms; /* renew: the least that a node granted */

    _Alignas(16) uint8_t state[KVC_OP_STATE_BYTES]; /* kvc_op_state() */
    char detail[KV_DETAIL_BYTES];
    void *room; /* kv_op_room(); kept when the operation is freed, for the next */
    size_t room_bytes;
};

/* What an operation of this kind keeps, besides what all do: its own file lays it out.  Zeros
 * when the operation begins. */
static inline void *kvc_op_state(const struct kv_op *op)
{
    return (void *)op->state;
}

/* The operation that a request or a call is for; NULL: it has ended, or there was none. */
struct kv_op *kvc_request_op(const struct kv_trip *trip);
struct kv_op *kvc_call_op(const struct kv_call *call);

/* A request of the operation.  NULL: all are in use. */
struct kv_trip *kvc_op_take_request(struct kv_op *op, struct kv_lane *lane);

/* What answers about units say in their headers: the first one's layer, and how many tokens are
 * committed, at least `tokens`. */
kv_status_t kv_reply_check_units(const struct kv_trip *trip,
                                 uint32_t layer,
                                 uint32_t tokens,
                                 char *detail,
                                 size_t detail_bytes);

/* A new operation; deadline_ms 0: the client's.  KV_BUSY: ops_max exist; KV_NOT_FOUND: the
 * session is closed. */
kv_status_t kv_op_begin(struct kv_client *client,
                        const struct kv_op_kind *kind,
                        struct kv_session *session,
                        struct kv_buffer *buffer,
                        uint32_t deadline_ms,
                        struct kv_op **ret_op);

/* Memory for what begin copies: until the operation is freed.  Asked for once by an operation.
 * NULL: out of memory. */
void *kv_op_room(struct kv_op *op, size_t bytes);
/* Copies `bytes` to *at, which is moved on; returns the copy. */
void *kv_op_keep(uint8_t **at, const void *from, size_t bytes);

/* Gives back one that did not go. */
void kv_op_discard(struct kv_op *op);

/* Its fields are set: off it goes.  Returns KV_OK: what fails now shows in the operation. */
kv_status_t kv_op_go(struct kv_op *op, struct kv_op **ret_op);

/* Adds the errand for the lane that owns the unit, which begins there; nothing where the
 * operation has one for that lane since kv_lanes_unmark().  false: the operation has failed. */
bool kvc_op_ask_unit(struct kv_op *op, uint32_t layer, uint32_t head, uint64_t position);

void kv_op_need(struct kv_op *op, uint32_t node);
void kv_op_need_all(struct kv_op *op);
/* n_kv_heads 0: all of each layer. */
void kv_op_need_units(struct kv_op *op,
                      uint32_t layer_begin,
                      uint32_t layer_end,
                      uint32_t head_begin,
                      uint32_t n_heads);
bool kv_op_needs(const struct kv_op *op, uint32_t node);

/* Back to PREPARING, with other needs. */
void kv_op_again(struct kv_op *op);

/* Moves on if its nodes are ready. */
void kv_op_prepare(struct kv_op *op);

/* Ends what the operation has to do on the node, of a kind that has `lost`: it is not needed
 * any more. */
void kv_op_lose(struct kv_op *op,
                struct kv_remote *remote,
                kv_status_t status,
                const char *why);

/* Whether something of it is under way with the node, or waits to be. */
bool kv_op_uses(const struct kv_op *op, const struct kv_remote *remote);

/* Ends it.  `remote` may be NULL. */
void kv_op_end(struct kv_op *op, kv_status_t status);
void kv_op_fail(struct kv_op *op,
                const struct kv_remote *remote,
                const struct kv_trip *trip,
                kv_status_t status,
                const char *format,
                ...) __attribute__((format(printf, 5, 6)));

/* Keeps the first failure of an operation that goes on. */
void kv_op_note(struct kv_op *op,
                const struct kv_remote *remote,
                kv_status_t status,
                const char *text);

/* "session 1a2b": what an operation of a session's life is about; for rows of kinds. */
void kv_session_describe_op(const struct kv_op *op,
                            const struct kv_trip *trip,
                            char *text,
                            size_t text_bytes);

extern const struct kvc_op_events kvc_op_events;

#endif
