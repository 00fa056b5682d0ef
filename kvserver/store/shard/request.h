/* request.h - a request that a data thread works on, from its arrival until its answer has
 * left, and what operations do with it.
 */
#ifndef KV_KVSERVER_STORE_SHARD_REQUEST_H
#define KV_KVSERVER_STORE_SHARD_REQUEST_H

#include "kvserver/store/rows/object.h"
#include "kvserver/store/rows/unit.h"
#include "proto/kv_wire.h"

enum {
    KVS_REQUESTS_MAX =
        4096,             /* requests of one data thread at any moment, shared out at hello */
    KVS_BODIES = 192,     /* bodies and answers of more than KVS_MIDDLE_BYTES */
    KVS_BODIES_KEPT = 64, /* of them, for requests that wait neither for rows nor for data */
    KVS_BODIES_PUTS =
        64, /* besides, for those that wait for data: others wait for their rows */
    KVS_BODIES_CLIENT = 128,         /* that one client may hold */
    KVS_STAGINGS = 32,               /* requests with a staging buffer */
    KVS_STAGINGS_KEPT = 8,           /* of them, for answers */
    KVS_STAGINGS_CLIENT = 16,        /* that one client may hold */
    KVS_PENDING_RECEIVES = 32,       /* requests whose body is on its way, besides */
    KVS_PENDING_RECEIVES_CLIENT = 8, /* of them, of one client */
    KVS_SMALL_BYTES = 512,
    KVS_MIDDLE_BYTES = 4096,     /* of a body that every request has room for, besides */
    KVS_PINS_MAX = 144,          /* segments that one transfer pins */
    KVS_SLICE_BYTES = 256 << 10, /* copied or checked in one slice */
};

enum kvs_request_state {
    KVS_REQUEST_FREE = 0,
    KVS_REQUEST_BEGUN,
    KVS_REQUEST_AWAIT_BULK,
    KVS_REQUEST_RECEIVING,
    KVS_REQUEST_WAITING,
    KVS_REQUEST_QUEUED,
    KVS_REQUEST_SENDING,
};

/* Requests in the order in which they came. */
struct kvs_request_queue {
    struct kvs_request *first, **end;
};

struct kvs_shard;
struct kvs_op_type;
struct kvs_shard_session;
struct kvs_shard_client;

struct kvs_request {
    enum kvs_request_state state;
    struct kvs_shard *shard;
    const struct kvs_op_type *type;
    struct kvs_shard_client *client;
    struct kvs_request *client_next, **client_link; /* of the client's requests */
    struct kvs_request *next, **link;               /* of a session's waiters, or of a queue */
    struct kvs_request_queue *queue;                /* it is in; NULL: none */
    uint32_t needs; /* tokens that must be there before it looks again; UINT32_MAX: others */
    struct kv_wire_header header;
    uint64_t begin_us, deadline_us;
    uint64_t since_us; /* the client has to send or to take something */
    bool orphan;       /* nobody waits for the answer any more */

    /* Where the request applies; valid while session_serial is the session's. */
    struct kvs_shard_session *session;
    uint32_t session_serial;

    /* The request's body after begin(), if the operation keeps it; aligned. */
    uint8_t *body;
    uint8_t *body_slot;

    /* Bulk data: where it lands. */
    struct kv_iov iov[KV_IOV_MAX];
    unsigned n_iov;
    bool discard;  /* refuse the bulk, then answer `status` */
    bool transfer; /* units count this work in n_transfers */
    bool coming;   /* ... in n_coming */
    bool received;
    kv_status_t status;
    struct kvs_segment *pins[KVS_PINS_MAX];
    unsigned n_pins;
    struct kvs_stored_object *object; /* pinned */
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
    uint8_t small[KVS_SMALL_BYTES] __attribute__((aligned(16)));
};

/* Copies the request's body where it stays aligned until the request ends.  KV_BUSY: no slot. */
kv_status_t kvs_request_keep_body(struct kvs_request *request, const uint8_t *body);

/* A buffer of KV_WIRE_BODY_MAX for the answer's body.  KV_BUSY: no slot. */
kv_status_t kvs_request_answer_slot(struct kvs_request *request, size_t bytes);

/* The session is not the one that the request began with: closed, or another generation. */
bool kvs_request_stale(const struct kvs_request *request);

/* State WAITING, until so many tokens are there (`needs`); or the request has failed: too many
 * wait with large bodies. */
void kvs_request_wait(struct kvs_request *request, uint32_t needs);
void kvs_request_queue(struct kvs_request *request); /* state QUEUED */
/* The same, in a queue of the operation's own: who owns that calls kvs_request_queue(). */
void kvs_request_queue_at(struct kvs_request *request, struct kvs_request_queue *queue);
void kvs_request_await_bulk(struct kvs_request *request, bool discard); /* state AWAIT_BULK */

/* Takes a staging buffer for data that is still to come; false: there is none for that, or the
 * client has enough. */
bool kvs_request_stage_bulk(struct kvs_request *request);

/* Takes a staging buffer.  false: there is none, or the client has enough, and the request is
 * queued again with one. */
bool kvs_request_acquire_staging(struct kvs_request *request);

/* Ends the request with an error and a text; for a request whose bulk is still to come, when that
 * has come and been refused. */
void kvs_request_fail(struct kvs_request *request, kv_status_t status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Sends reply (header fields of work->reply as set by the operation), body and bulk; the request
 * ends when they have left. */
void kvs_request_answer(struct kvs_request *request,
                        const void *body,
                        size_t body_bytes,
                        const void *bulk,
                        size_t bulk_bytes);

#endif
