/* request.h - a request that a data thread works on, from its arrival until its answer has
 * left, and what operations do with it.
 */
#ifndef KV_KVSERVER_STORE_SHARD_REQUEST_H
#define KV_KVSERVER_STORE_SHARD_REQUEST_H

#include "kvserver/store/rows/object.h"
#include "kvserver/store/rows/unit.h"
#include "proto/kv_wire.h"

enum {
    KV_WORKS_MAX = 4096, /* requests of one data thread at any moment, shared out at hello */
    KV_BODIES = 192,     /* bodies and answers of more than KV_MIDDLE_BYTES */
    KV_BODIES_KEPT = 64, /* of them, for requests that wait neither for rows nor for data */
    KV_BODIES_PUTS = 64, /* besides, for those that wait for data: others wait for their rows */
    KV_BODIES_PEER = 128,  /* that one client may hold */
    KV_STAGINGS = 32,      /* requests with a staging buffer */
    KV_STAGINGS_KEPT = 8,  /* of them, for answers */
    KV_STAGINGS_PEER = 16, /* that one client may hold */
    KV_RECEIPTS = 32,      /* requests whose body is on its way, besides */
    KV_RECEIPTS_PEER = 8,  /* of them, of one client */
    KV_SMALL_BYTES = 512,
    KV_MIDDLE_BYTES = 4096,     /* of a body that every work has room for, besides */
    KV_PINS_MAX = 144,          /* segments that one transfer pins */
    KV_SLICE_BYTES = 256 << 10, /* copied or checked in one slice */
};

enum kv_work_state {
    KV_WORK_FREE = 0,
    KV_WORK_BEGUN,
    KV_WORK_AWAIT_BULK,
    KV_WORK_RECEIVING,
    KV_WORK_WAITING,
    KV_WORK_QUEUED,
    KV_WORK_SENDING,
};

/* Works in the order in which they came. */
struct kv_work_queue {
    struct kv_work *first, **end;
};

struct kv_data;
struct kv_op_row;
struct kv_part;
struct kv_peer;

struct kv_work {
    enum kv_work_state state;
    struct kv_data *data;
    const struct kv_op_row *row;
    struct kv_peer *peer;
    struct kv_work *peer_next, **peer_link; /* of the peer's works */
    struct kv_work *next, **link;           /* of a part's waiters, or of a queue */
    struct kv_work_queue *queue;            /* it is in; NULL: none */
    uint32_t needs; /* tokens that must be there before it looks again; UINT32_MAX: others */
    struct kv_wire_header request;
    uint64_t begin_us, deadline_us;
    uint64_t since_us; /* the client has to send or to take something */
    bool orphan;       /* nobody waits for the answer any more */

    /* Where the request applies; valid while part_serial is the part's. */
    struct kv_part *part;
    uint32_t part_serial;

    /* The request's body after begin(), if the operation keeps it; aligned. */
    uint8_t *body;
    uint8_t *body_slot;

    /* Bulk data: where it lands. */
    struct kv_iov iov[KV_IOV_MAX];
    unsigned n_iov;
    bool discard; /* refuse the bulk, then answer `status` */
    bool landing; /* units count this work in n_landings */
    bool coming;  /* ... in n_coming */
    bool landed;
    kv_status_t status;
    struct kv_segment *pins[KV_PINS_MAX];
    unsigned n_pins;
    struct kv_stored_object *object; /* pinned */
    uint8_t *staging;

    /* Progress of a sliced operation. */
    uint32_t cursor_unit, cursor_row;
    size_t cursor_bytes;
    uint64_t serial; /* index: of the newest codebook when it began */

    /* The answer. */
    struct kv_wire_header reply, reply_bulk;
    struct kv_iov pair[2]; /* body and bulk, where they leave in one message */
    uint8_t *answer, *answer_slot;
    unsigned n_sends;
    kv_status_t send_status;
    uint8_t small[KV_SMALL_BYTES] __attribute__((aligned(16)));
};

/* Copies the request's body where it stays aligned until the work ends.  KV_BUSY: no slot. */
kv_status_t kv_work_keep_body(struct kv_work *work, const uint8_t *body);

/* A buffer of KV_WIRE_BODY_MAX for the answer's body.  KV_BUSY: no slot. */
kv_status_t kv_work_answer_slot(struct kv_work *work, size_t bytes);

/* The session is not the one that the work began with: closed, or another generation. */
bool kv_work_stale(const struct kv_work *work);

/* State WAITING, until so many tokens are there (`needs`); or the work has failed: too many
 * wait with large bodies. */
void kv_work_wait(struct kv_work *work, uint32_t needs);
void kv_work_queue(struct kv_work *work); /* state QUEUED */
/* The same, in a queue of the operation's own: who owns that calls kv_work_queue(). */
void kv_work_queue_at(struct kv_work *work, struct kv_work_queue *queue);
void kv_work_await_bulk(struct kv_work *work, bool discard); /* state AWAIT_BULK */

/* Takes a staging buffer for data that is still to come; false: there is none for that, or the
 * client has enough. */
bool kv_work_stage_bulk(struct kv_work *work);

/* Takes a staging buffer.  false: there is none, or the client has enough, and the work is
 * queued again with one. */
bool kv_work_stage(struct kv_work *work);

/* Ends the work with an error and a text; for a request whose bulk is still to come, when that
 * has come and been refused. */
void kv_work_fail(struct kv_work *work, kv_status_t status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Sends reply (header fields of work->reply as set by the operation), body and bulk; the work
 * ends when they have left. */
void kv_work_answer(struct kv_work *work,
                    const void *body,
                    size_t body_bytes,
                    const void *bulk,
                    size_t bulk_bytes);

#endif
