/* session.h - kv_session: a session's handle, and the log of its forks and truncates.
 *
 * The handle's generation is the log's end; a node that lags is sent the rest before it is used
 * (session_catchup.c).
 *
 * Threads: the client's.  Memory: kv_session_make() / kv_session_free(), which ends its operations first.
 */
#ifndef KV_CLIENT_SESSION_H
#define KV_CLIENT_SESSION_H

#include "client/call.h"
#include "client/include/kvclient.h"
#include "client/list.h"
#include "proto/kv_wire.h"

struct kv_writers;

enum {
    KV_LIFECYCLE_LOG = 16,
};

struct kv_lifecycle {
    uint64_t op_id;
    enum kv_op_id kind;
    uint32_t generation; /* before */
    uint32_t tokens;
    struct kv_id128 child_id, child_token;
    uint64_t writer; /* fork: the child's; truncate: the session's own from then on */
};

struct kv_session_node {
    uint32_t index;      /* session_index there */
    uint32_t generation; /* that it has answered with */
    uint32_t incarnation;
    bool is_catching_up;
};

struct kv_session {
    struct kv_list of_client;
    struct kv_client *client;
    struct kv_ticket ticket;
    struct kv_id128 fingerprint;
    kv_schema_t schema;
    uint64_t root;
    uint32_t lease_ms;
    uint32_t tokens_max;
    uint32_t generation;        /* that every node has or is brought to */
    struct kv_writers *writers; /* at that generation */
    uint32_t shared_tokens;     /* of its own writer, that forks have inherited, at most */
    bool is_closed;

    struct kv_list ops; /* begun and not ended, in order */
    uint32_t n_queued;
    uint32_t n_exclusive; /* of `ops` */

    struct kv_lifecycle
        log[KV_LIFECYCLE_LOG]; /* what some node may have missed, oldest first */
    uint32_t n_log;

    uint64_t renew_us;
    uint32_t n_renewing;

    uint16_t *slots;                              /* (n_units) placement slot of each unit */
    uint64_t bytes_before[KV_LAYERS_MAX + 1];     /* of one token, in the layers before */
    uint64_t row_bytes_before[KV_LAYERS_MAX + 1]; /* sum of row_bytes of the layers before */
    struct kv_session_node nodes[];
};

/* An empty handle of a finished schema.  NULL: out of memory. */
struct kv_session *
kv_session_make(struct kv_client *client, const kv_schema_t *schema, uint64_t root);

/* Frees a handle that no operation uses any more (kv_session_free(), op.c). */
void kvc_session_destroy(struct kv_session *session);

/* A writer that is nobody's yet. */
uint64_t kv_client_draw_writer(struct kv_client *client);

/* KV_OK: the session may be used on that node.  KV_IN_PROGRESS: it is catching up.  Else
 * `detail` says why not. */
kv_status_t kv_session_ready(struct kv_session *session,
                             struct kv_remote *remote,
                             char *detail,
                             size_t detail_bytes);

/* Adds to the log; false: it is full. */
bool kv_session_log(struct kv_session *session, const struct kv_lifecycle *entry);
void kv_session_trim(struct kv_session *session);

/* Sends one lifecycle operation to one node. */
kv_status_t kv_lifecycle_send(struct kv_session *session,
                              struct kv_remote *remote,
                              struct kvc_owner *owner,
                              const struct kv_lifecycle *entry,
                              kv_call_done_fn done);

/* Renews leases in the background. */
void kv_sessions_timers(struct kv_client *client);

/* The first digits of a session's id, for texts.  Returns `text`. */
enum {
    KV_SESSION_TEXT = 24
};
const char *kv_session_text(const struct kv_id128 *id, char text[KV_SESSION_TEXT]);

/* "session 1a2b, layer 3" */
void kv_session_describe(const struct kv_session *session,
                         uint32_t layer,
                         char *text,
                         size_t text_bytes);

/* Best effort: ends a session on one node, nobody waits. */
void kv_session_drop(struct kv_remote *remote, uint32_t index, const struct kv_id128 *token);

#endif
