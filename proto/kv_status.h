/* kv_status.h - the one error type of TopKV, in the library, on the wire and in logs.
 *
 * Statuses are grouped by what the caller should do next.  The numbers travel on the wire: none
 * is ever renumbered or reused.
 */
#ifndef KV_PROTO_KV_STATUS_H
#define KV_PROTO_KV_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kv_status {
    KV_OK = 0,
    KV_IN_PROGRESS = 1, /* started; it completes later, exactly once */

    /* An error in the request: nothing changed, and the same request would fail again. */
    KV_INVALID = -1,     /* a field is out of bounds or contradicts another */
    KV_NOT_FOUND = -2,   /* no such session, model, object, client or operation */
    KV_EXISTS = -3,      /* the name is in use for different bytes */
    KV_CONFLICT = -4,    /* different rows are committed there; an object was replaced */
    KV_STALE = -5,       /* the request's generation is not the session's: resume, then retry */
    KV_MOVED = -6,       /* another node or data thread owns that unit */
    KV_UNSUPPORTED = -7, /* valid, but this build or schema does not support it */
    KV_VERSION = -8,     /* the peer has another version of the protocol */
    KV_DENIED = -9,      /* wrong token, or another tenant */
    KV_TOO_LARGE = -10,  /* more than a limit of the protocol, the session or the node */

    /* Temporary: nothing changed, and the same request may succeed later. */
    KV_BUSY = -20,      /* too many requests or operations outstanding, or a buffer in use */
    KV_NOT_READY = -21, /* rows that the request needs are not committed */
    KV_NO_MEMORY = -22, /* the store is full, or the process is out of memory */
    KV_DRAINING = -23,  /* the node is about to stop and accepts nothing new */

    /* The outcome is unknown, or a peer, disk or device failed. */
    KV_DEADLINE = -40,    /* no reply before the deadline */
    KV_CANCELLED = -41,   /* cancelled before the reply arrived */
    KV_UNREACHABLE = -42, /* the node is down, or no node has this address */
    KV_CORRUPT = -43,     /* bytes failed their checksum, on arrival or in the store; they were
                             not delivered */
    KV_IO = -44,          /* a local system call or a disk failed */
} kv_status_t;

/* Returns the status as one lower-case word: "not_found" for KV_NOT_FOUND, "unknown" for any
 * other number.  The string is static. */
const char *kv_status_name(kv_status_t status);

#ifdef __cplusplus
}
#endif
#endif
