/* request.h - a request on a data thread, from its arrival until its reply has been sent, and
 * the functions that operations use on it.
 */
#ifndef KV_KVSERVER_STORE_SHARD_REQUEST_H
#define KV_KVSERVER_STORE_SHARD_REQUEST_H

#include "kvserver/store/rows/object.h"
#include "kvserver/store/rows/residency.h"
#include "kvserver/store/rows/unit.h"
#include "kvserver/store/shard/queue.h"
#include "proto/kv_wire.h"

enum {
    KVS_REQUESTS_SPARE = 4096, /* of one data thread at any time, beyond the KVS_CREDITS_SURE of
                                * each client; divided among clients at hello.  Each takes 7.4
                                * KiB once it has been used */
    KVS_BODIES = 192,          /* buffers for bodies and replies above KVS_MIDDLE_BYTES */
    KVS_BODIES_KEPT = 64, /* of these, for requests that wait neither for rows nor for data */
    KVS_BODIES_PUTS =
        64, /* further ones for requests whose data is still arriving: others wait for their
             * rows */
    KVS_BODIES_CLIENT = 128,         /* that one client may use */
    KVS_BODIES_CLIENT_WAITING = 32,  /* a client that uses more has no further request wait for
                                     * rows with one */
    KVS_STAGINGS = 32,               /* staging buffers */
    KVS_STAGINGS_KEPT = 8,           /* of these, for replies */
    KVS_STAGINGS_CLIENT = 16,        /* that one client may use */
    KVS_PENDING_RECEIVES = 32,       /* further requests, whose body is still arriving */
    KVS_PENDING_RECEIVES_CLIENT = 8, /* of these, for one client */
    KVS_SMALL_BYTES = 512,
    KVS_MIDDLE_BYTES = 4096,      /* of a body for which every request has room */
    KVS_PINS_MAX = 144,           /* blocks that one transfer may pin */
    KVS_REPLY_BATCHES = 16,       /* with the transport, each with several replies */
    KVS_REPLY_BATCHES_CLIENT = 4, /* of these, to one client, which may not receive */
    KVS_REPLY_BATCH_BYTES = 64 << 10,
    KVS_REPLY_JOINS_BYTES =
        8 << 10, /* of a body: a larger reply is sent alone, without a copy */
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

struct kvs_shard;
struct kvs_query_rows;
struct kvs_op_type;
struct kvs_shard_session;
struct kvs_shard_client;

struct kvs_request {
    enum kvs_request_state state;
    struct kvs_shard *shard;
    const struct kvs_op_type *type;
    struct kvs_shard_client *client;
    struct kvs_request *client_next, **client_link; /* list of the client's requests */
    struct kvs_request *next, **link;               /* list of a session's waiters, or a
                                                     * queue */
    struct kvs_request_queue *queue;                /* the queue it is in, or NULL */
    uint32_t needs; /* tokens that it waits for; UINT32_MAX: something other than tokens */
    const void
        *missing; /* that it waits for, in shard->missing, or did last: a segment, if it is of a
                          * session; NULL: it waits for something else */
    bool sends_lent; /* an object's piece that goes when it has been sent */
    struct kvs_work at_work;
    struct kv_wire_header header;
    uint64_t begin_us, deadline_us;
    uint64_t since_us; /* when the node began to wait for the client to send or receive */
    bool orphan;       /* ended for the client: no reply is sent */
    bool is_of_batch;  /* it came in a batch */

    /* The request's session; valid while session_serial equals the session's serial. */
    struct kvs_shard_session *session;
    uint32_t session_serial;

    /* The body after begin(), if the operation keeps it; aligned. */
    uint8_t *body;
    uint8_t *body_slot;

    /* Where the bulk data is received. */
    struct kv_iov iov[KV_IOV_MAX];
    unsigned n_iov;
    bool discard;  /* refuse the bulk, then reply with `status` */
    bool deferred; /* the data is not wanted yet: it waits at the sender, or in bulk_slot */
    struct kv_incoming *incoming; /* deferred: the data at the sender, once it is announced */
    uint8_t *bulk_slot;           /* data that arrived whole while deferred */
    bool transfer;                /* counted in its units' n_transfers */
    bool coming;                  /* counted in its units' n_coming */
    bool received;
    kv_status_t status;
    struct kvs_block *pins[KVS_PINS_MAX];
    unsigned n_pins;
    struct kvs_stored_object *object; /* pinned */
    uint8_t *staging;

    /* Progress of a sliced operation. */
    uint32_t cursor_unit, cursor_row;
    size_t cursor_bytes;
    uint32_t crc;    /* object_put: of the first cursor_bytes of its piece */
    uint64_t serial; /* index: serial of the newest codebook at the start */
    void *work;      /* query: its entry in a pipeline, or NULL */
    struct kvs_query_rows
        *noted; /* query: rows that it waits for (ops/query_rows.h), or NULL */
    uint64_t
        lacks_us; /* query: since when there is no room for it; 0: there was, or it has not looked */

    /* The reply. */
    struct kv_wire_header reply, reply_bulk;
    struct kv_iov pair[2]; /* body and bulk, if they are sent in one message; the body of a
                            * reply that was collected */
    uint8_t *reply_body, *reply_slot;
    unsigned n_sends;
    kv_status_t send_status;
    uint8_t small[KVS_SMALL_BYTES] __attribute__((aligned(16)));
};

/* Copies the body to where it stays, aligned, until the request ends.  Fails with KV_BUSY if no
 * buffer is free. */
kv_status_t kvs_request_keep_body(struct kvs_request *request, const uint8_t *body);

/* Gets a buffer of KV_WIRE_BODY_MAX for the reply's body.  Fails with KV_BUSY if none is
 * free. */
kv_status_t kvs_request_get_reply_slot(struct kvs_request *request, size_t bytes);
/* The same for a request that could wait: leaves KVS_BODIES_KEPT buffers to others. */
kv_status_t kvs_request_get_spare_slot(struct kvs_request *request, size_t bytes);
/* Gives the buffer of either back. */
void kvs_request_release_reply_slot(struct kvs_request *request);

/* Returns true if the session has been closed, or has another generation, since the request
 * began. */
bool kvs_request_stale(const struct kvs_request *request);
/* Returns whether it is not stale.  Fails the request if it is. */
bool kvs_request_check_current(struct kvs_request *request);

/* Sets state WAITING until `needs` tokens are there.  Fails the request if too many requests
 * with large bodies are waiting. */
void kvs_request_wait(struct kvs_request *request, uint32_t needs);
/* Sets state WAITING until the segment is in memory, for who has not begun.  Data that is still to
 * come stays at the sender, and the staging buffer goes back, unless it has the data. */
void kvs_request_wait_for_segment(struct kvs_request *request,
                                  const struct kvs_segment *segment);
/* The same until that has arrived, of a request without data to come: a piece of an object, or its
 * erasure. */
void kvs_request_wait_for(struct kvs_request *request, const void *what);
/* The request is at work at the units in request->at_work: what it has found there in memory stays
 * until it ends or replies. */
void kvs_request_begin_work(struct kvs_request *request);
/* It is not any more, and begins anew. */
void kvs_request_end_work(struct kvs_request *request);
/* It needs nothing any more that is not in memory: if it was the first of those that do, another one
 * is. */
void kvs_request_is_served(struct kvs_request *request);
void kvs_request_enqueue(struct kvs_request *request); /* state QUEUED */
/* The same, in a queue that the operation owns: it calls kvs_request_enqueue() later. */
void kvs_request_queue_at(struct kvs_request *request, struct kvs_request_queue *queue);
/* Removes the request from its list or queue, if it is in one. */
void kvs_request_unlink(struct kvs_request *request);
void kvs_request_await_bulk(struct kvs_request *request, bool discard); /* state AWAIT_BULK */

/* As kvs_request_wait(), and leaves the data that is to come at the sender until
 * kvs_request_await_bulk().  Data that arrives whole is kept, `received` is set, and the request
 * is queued if it is only waiting for a buffer. */
void kvs_request_defer_bulk(struct kvs_request *request, uint32_t needs);

/* Gets a staging buffer; fewer are there for data that is still to arrive.  Returns false if
 * none is free, or the client uses too many; the request then waits, its data deferred, and is
 * queued again once it has one. */
bool kvs_request_acquire_staging(struct kvs_request *request);
/* Returns the staging buffer, if there is one. */
void kvs_request_release_staging(struct kvs_request *request);

/* Fails the request with a message.  If its bulk has yet to arrive, the reply is sent once that
 * has been refused. */
void kvs_request_fail(struct kvs_request *request, kv_status_t status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Fails a request that found no memory for `bytes`: with KV_BUSY if evictable data makes room for
 * them, so that the client sends it again, and with KV_NO_MEMORY if there is none. */
void kvs_request_fail_full(struct kvs_request *request, uint64_t bytes);

/* Sends the reply (the operation has set its fields in request->reply), body and bulk.  Borrows
 * them until they have been sent, which ends the request. */
void kvs_request_reply(struct kvs_request *request,
                       const void *body,
                       size_t body_bytes,
                       const void *bulk,
                       size_t bulk_bytes);

#endif
