/* request.h - requests: one message to a data thread and its answer.
 *
 * A request:
 *
 *   taken -> built -> sent -+-> answered, its data landed ------------> released
 *                     ^     +-> no answer, or KV_BUSY: sent again with a new id
 *                     +-----+
 *   its operation ends first: an orphan.  It is never sent again and its answers are dropped;
 *   it is released when neither a send nor a landing can touch memory any more (quarantine).
 *
 * Threads: the client's.  Memory: kvc_requests_init() / kvc_requests_fini(); requests come from a pool,
 * message buffers are kept for the next request.
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
    KVC_MESSAGES_LARGE_MAX = 128, /* of KV_WIRE_BODY_MAX, made when they are needed */
    KVC_SENDS = 8,                /* messages of one request that the transport holds at most */
    KVC_INLINE_WANTED = 32 << 10, /* rows or object bytes up to this travel in the body */
    KVC_CANCEL_MESSAGES = 64,
    KVC_BULK_SLOWEST =
        16, /* bytes/us at which large data may move before it counts as silence */
};

/* One message that the transport may hold. */
struct kvc_send {
    struct kvc_request *request;
    bool busy;
    struct kv_wire_header header;
    struct kv_iov pair[2]; /* body and bulk in one message */
};

struct kvc_message {
    struct kvc_message *next; /* free */
    bool is_large;
    struct kvc_send sends[KVC_SENDS];
    uint8_t body[] __attribute__((aligned(16)));
};

struct kvc_request {
    struct kvc_list of_owner;
    struct kvc_owner *owner; /* NULL: an orphan, or the library's own ping */
    struct kv_client *client;
    struct kvc_node *node;
    struct kvc_connection *connection; /* NULL: lost, and the credit with it */
    enum kv_priority priority;
    struct kv_buffer *buffer; /* held until release; may be NULL */
    struct kvc_message *message;

    /* What is asked.  The header's ids are filled when it is sent. */
    struct kv_wire_header header;
    size_t body_bytes;
    const void *bulk; /* header.bulk_bytes of it */

    /* What is expected, and where in the operation it belongs. */
    uint32_t n_rows;
    size_t bytes;       /* of rows, or of an object's piece at most */
    uint64_t position;  /* fetch: ids of the first unit before these; object: offset; query:
                           heads with their place in the caller's buffer before these */
    uint32_t item;      /* object: its number */
    size_t crcs_offset; /* in the message buffer's body: room for the answer's CRCs */
    bool needs_header_first; /* data is taken only when the answer's header is known */

    uint64_t id; /* of the last attempt; 0: none */
    uint64_t resend_us;
    uint64_t retry_after_us; /* from an attempt to the next */
    uint64_t backoff_us;     /* from KV_BUSY to the next attempt */
    bool is_live;            /* lent by the pool */
    bool is_moving;          /* its bulk counts in node->bulk_moving */
    bool is_over;            /* nothing is expected any more */
    bool is_waiting;         /* an answer is owed */
    bool has_left;           /* once, at least */
    bool is_landing;
    bool has_reply;
    bool has_bulk;
    struct kv_wire_header reply;
    uint64_t bulk_got;
    struct kv_incoming *deferred; /* data that waits for the reply */
};

/* What the owner of a request does as it goes.  None is NULL. */
struct kvc_request_ops {
    /* Puts into the header what only the owner knows, each time that it is sent. */
    void (*address)(const struct kvc_request *request, struct kv_wire_header *header);
    /* Whether rows of this client's are under way that lead up to those of the request. */
    bool (*awaits)(const struct kvc_request *request);
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
    /* It came to nothing.  Ends the request, or the owner with it. */
    void (*failed)(struct kvc_request *request, kv_status_t status, const char *detail);
};

kv_status_t kvc_requests_init(struct kv_client *client);
void kvc_requests_fini(struct kv_client *client); /* the port is closed */

/* A request to a connection, for `owner` (NULL: the library's).  NULL: all are in use. */
struct kvc_request *kvc_request_take(struct kvc_connection *connection,
                                     enum kv_priority priority,
                                     struct kvc_owner *owner);

/* Gives it a message buffer with room for `bytes` of body, at most KV_WIRE_BODY_MAX.  false: there
 * is none now. */
bool kvc_request_message(struct kvc_request *request, size_t bytes);

/* Sends it, or sends it again.  A failure shows later, as no answer. */
void kvc_request_send(struct kvc_request *request);

/* Refuses an answer: KV_CORRUPT, and why. */
kv_status_t kvc_reply_refuse(char *detail, size_t detail_bytes, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* A failure as a peer says it; KV_CORRUPT where it says none that exists. */
kv_status_t kvc_peer_status(int32_t status);

/* A peer's text, which must not steer a terminal; cut to fit. */
void kvc_peer_text(char *to, size_t to_bytes, const char *from, size_t from_bytes);

/* The same of a name that is kept, in whatever language: control characters become '?'. */
void kvc_peer_name(char *name);

/* Its operation has ended: tells the node, and releases it as soon as that is safe. */
void kvc_request_abandon(struct kvc_request *request);

/* The answer is complete and dealt with. */
void kvc_request_end(struct kvc_request *request);

/* Sends again what has waited long enough, of one owner. */
void kvc_requests_timers(struct kv_client *client, struct kvc_owner *owner);

/* What the client's port calls. */
extern const struct kv_port_events kvc_client_events;

/* The least request id that is no request's: control messages. */
#define KVC_CONTROL_ID_BIT (UINT64_C(1) << 63)

/* A message that tells and expects nothing: cancel. */
struct kvc_cancel_message {
    bool busy;
    struct kv_wire_header header;
};

#endif
