/* kv_status.h - the one error type of TopKV, in the library, on the wire and in logs.
 *
 * Grouped by what the caller should do next.  The numbers go on the wire: none is ever
 * renumbered or reused.
 */
#ifndef KV_PROTO_KV_STATUS_H
#define KV_PROTO_KV_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kv_status {
    KV_OK = 0,
    KV_IN_PROGRESS = 1, /* accepted; the completion comes later, once */

    /* The request was at fault: nothing changed, and the same request fails again. */
    KV_INVALID = -1,     /* a field is out of its bounds or contradicts another */
    KV_NOT_FOUND = -2,   /* no such session, model, object, client or operation */
    KV_EXISTS = -3,      /* the name is taken by something different */
    KV_CONFLICT = -4,    /* other rows are committed at that place; an object was replaced */
    KV_STALE = -5,       /* the generation named is not the session's: resume, then retry */
    KV_MOVED = -6,       /* another node or data thread owns that unit */
    KV_UNSUPPORTED = -7, /* understood, but this build or schema cannot do it */
    KV_VERSION = -8,     /* the peer speaks another version of the protocol */
    KV_DENIED = -9,      /* another token, or another tenant */
    KV_TOO_LARGE = -10,  /* more than the limits that hello granted */

    /* Not now: nothing changed, and the same request may succeed later. */
    KV_BUSY = -20,      /* more in flight than the credits granted, or than there is room for */
    KV_NOT_READY = -21, /* rows needed are not committed, and did not come or will not */
    KV_NO_MEMORY = -22, /* the store's memory is full */
    KV_DRAINING = -23,  /* the node is about to stop and takes nothing new */

    /* The outcome is unknown, or a peer, disk or device failed. */
    KV_DEADLINE = -40,    /* no answer in time */
    KV_CANCELLED = -41,   /* kv_cancel() came before the answer */
    KV_UNREACHABLE = -42, /* the node is dead, or was never there */
    KV_CORRUPT = -43,     /* bytes fail their checksum, as they arrived or where they are kept;
                             they were not delivered */
    KV_IO = -44,          /* a local system call or a disk failed */
} kv_status_t;

/* The status as one lower-case word, "not_found" for KV_NOT_FOUND; "unknown" for a number that
 * is no status.  The string is static. */
const char *kv_status_name(kv_status_t status);

#ifdef __cplusplus
}
#endif
#endif
