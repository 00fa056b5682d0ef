/* request.h - requests: one message to a data thread and its reply.
 *
 * The life of a request:
 *
 *   taken -> built -> sent -+-> reply and its data received ----------> released
 *                     ^     +-> no reply, or KV_BUSY: resent with a new id
 *                     +-----+
 *   If its operation ends first, the request is cancelled: it is never resent, its replies are
 *   dropped, and it is released when the transport can no longer access its memory
 *   (quarantine).
 *
 * Threads: the client's.  Memory: kvc_requests_init() / kvc_requests_fini(); requests come from
 * a pool, message buffers are reused.
 */
#ifndef KV_CLIENT_REQUEST_H
#define KV_CLIENT_REQUEST_H

#include "client/connection.h"
#include "client/list.h"
#include "client/owner.h"
#include "kvserver/net/transport.h"
#include "proto/kv_wire.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvc_request;
struct kv_buffer;

enum {
    KVC_REQUESTS_MAX = 4096,      /* messages in flight, over all nodes */
    KVC_MESSAGE_SMALL = 16 << 10, /* body of a small message buffer */
    KVC_MESSAGES_LARGE_MAX = 128, /* of KV_WIRE_BODY_MAX, allocated on demand */
    KVC_SENDS = 8,                /* messages of one request that the transport may have */
    KVC_INLINE_WANTED = 32 << 10, /* rows or object bytes up to this travel in the body */
    KVC_CANCEL_MESSAGES = 64,
    KVC_BULK_SLOWEST = 16, /* bytes/us: slower large transfers count as no reply */
};

/* One message that the transport may have. */
struct kvc_send {
    struct kvc_request *request;
    bool busy;
    struct kv_wire_header header;
    struct kv_iov pair[2]; /* body and bulk in one message */
};

struct kvc_message {
    struct kvc_message *next; /* free */
    bool is_large;
    struct kv_mapping *mapping; /* of a large one: the transport sends it without a copy */
    struct kvc_send sends[KVC_SENDS];
    uint8_t body[] __attribute__((aligned(16)));
};

struct kvc_request {
    struct kvc_list of_owner;
    struct kvc_list of_batch; /* in connection->collected: built, and not yet sent */
    struct kvc_owner *owner;  /* NULL: cancelled, or the library's own ping */
    struct kv_client *client;
    struct kvc_node *node;
    struct kvc_connection *connection; /* NULL: lost, with its credit */
    enum kv_priority priority;
    struct kv_buffer *buffer; /* held until the request is released; may be NULL */
    struct kvc_message *message;

    /* What is sent.  The header's ids are set when it is sent. */
    struct kv_wire_header header;
    size_t body_bytes;
    const void *bulk; /* header.bulk_bytes of it */

    /* What the reply must match, and where it belongs in the operation. */
    uint32_t n_rows;
    size_t bytes;       /* of rows, or of an object's piece at most */
    uint64_t position;  /* fetch: ids of the first unit before these; object: offset; query:
                           heads with their place in the caller's buffer before these */
    uint32_t item;      /* object: its number */
    size_t crcs_offset; /* in the message buffer's body: space for the reply's CRCs */
    bool needs_header_first; /* data is received only after the reply's header */

    uint64_t id;       /* of the last attempt; 0: none */
    uint64_t batch_id; /* of the batch in which the last attempt left; 0: it left alone */
    uint64_t resend_us;
    uint64_t retry_after_us; /* from an attempt to the next */
    uint64_t backoff_us;     /* from KV_BUSY to the next attempt */
    bool is_live;            /* in use */
    bool is_moving;          /* its bulk counts in node->bulk_moving */
    bool is_over;            /* no reply is expected */
    bool is_waiting;         /* a reply is due */
    bool has_left;           /* sent at least once */
    bool is_landing;
    bool has_reply;
    bool has_bulk;
    struct kv_wire_header reply;
    uint64_t bulk_got;
    struct kv_incoming *deferred; /* data that waits for the reply's header */
};

/* What is particular to the requests of an operation type.  The owner of a request has not ended
 * when they are called. */
struct kvc_request_ops {
    /* Whether outstanding puts of this client bring the rows before the request's, so that
     * KV_NOT_READY passes.  NULL: no. */
    bool (*awaits)(const struct kvc_request *request);
    /* Whether some of these puts have requests on its connection.  If so, the node is told to
     * wait for them.  Where there is `awaits`. */
    bool (*follows_sent)(const struct kvc_request *request);
    /* Ends the request, and queues its message again, to be sent from due_us on.  Returns false,
     * and changes nothing, if out of memory.  Where there is `awaits`. */
    bool (*requeue)(struct kvc_request *request, uint64_t due_us);
    /* Returns where `bytes` of the reply's data are written; 0: their size is wrong.  NULL: the
     * reply has no data. */
    unsigned (*land)(struct kvc_request *request, uint64_t bytes, struct kv_iov *ret_iov);
    /* Checks and stores a reply's header and body.  On failure `detail` names the field and its
     * value. */
    kv_status_t (*reply)(struct kvc_request *request,
                         const uint8_t *body,
                         char *detail,
                         size_t detail_bytes);
    /* The reply and its data have arrived.  Checks the data.  NULL: nothing is left to check. */
    kv_status_t (*finish)(struct kvc_request *request, char *detail, size_t detail_bytes);
};

kv_status_t kvc_requests_init(struct kv_client *client);
void kvc_requests_fini(struct kv_client *client); /* the port must be closed */

/* Returns a request on a connection, for `owner` (NULL: the library); NULL if all are in use.
 */
struct kvc_request *kvc_request_take(struct kvc_connection *connection,
                                     enum kv_priority priority,
                                     struct kvc_owner *owner);

/* Attaches a message buffer for `bytes` of body, at most KV_WIRE_BODY_MAX.  Returns false if
 * none is free. */
bool kvc_request_message(struct kvc_request *request, size_t bytes);

/* Sends or resends the request.  A failure appears later, as a missing reply. */
void kvc_request_send(struct kvc_request *request);

/* Cancels a request whose operation has ended: tells the node, and releases the request as soon
 * as that is safe. */
void kvc_request_abandon(struct kvc_request *request);

/* Ends a request whose reply has been handled. */
void kvc_request_end(struct kvc_request *request);

/* Resends an owner's requests that are due. */
void kvc_requests_timers(struct kv_client *client, struct kvc_owner *owner);

/* The callbacks of the client's port. */
extern const struct kv_port_events kvc_client_events;

/* A cancel message; it has no reply. */
struct kvc_cancel_message {
    bool busy;
    struct kv_wire_header header;
};

#endif
