/* session.h - kv_session: a session's handle, and the log of its forks and truncates.
 *
 * The handle's generation is the end of the log.  A lagging node is sent the entries that it
 * missed before the session uses it (session_catchup.h).
 *
 * What is sent for a session is in session_lease.c, session_catchup.c and ops/.
 *
 * Threads: the client's.  Memory: kvc_session_make() / kv_session_free(), which ends the
 * session's operations first.
 */
#ifndef KV_CLIENT_SESSION_H
#define KV_CLIENT_SESSION_H

#include "client/due.h"
#include "client/include/kvclient.h"
#include "client/list.h"
#include "kvserver/cluster/placement.h"
#include "proto/kv_wire.h"

struct kv_client;
struct kv_writers;
struct Kvpb__OpenReply;
struct kvc_node;

enum {
    KVC_LOG_ENTRIES = 16,
};

struct kvc_log_entry {
    uint64_t op_id;
    enum kv_op_id type;
    uint32_t generation; /* before */
    uint32_t tokens;
    struct kv_id128 child_id, child_token;
    uint64_t
        writer; /* fork: the child's; truncate: the session's own from then on, unless a node
                      * says that it is `fresh`, because others share what goes */
    uint64_t fresh;
    bool keeps_generation; /* fork: the session's; such a one is not in the log */
};

struct kvc_session_node {
    uint32_t index;      /* session_index there */
    uint32_t generation; /* in its last reply */
    uint32_t incarnation;
    bool is_catching_up;
};

struct kv_session {
    struct kvc_list of_client;
    struct kv_client *client;
    struct kv_ticket ticket;
    struct kv_id128 fingerprint;
    kv_schema_t schema;
    struct kv_placement_row row; /* the nodes that it is on */
    uint32_t lease_ms;
    uint32_t tokens_max;
    uint32_t generation; /* of every node, after it has caught up */
    /* (row.n_nodes) at that generation, by position in the row: each node may have kept another
     * session's copy of a block that several have published. */
    struct kv_writers *writers[KV_ROW_NODES];
    uint32_t
        shared_tokens; /* most tokens of its own writer that a fork has, or that are published */
    bool is_closed;

    struct kvc_list calls;  /* that have it for their handlers */
    struct kvc_list ops;    /* begun and not ended, in order */
    struct kvc_list ranked; /* of `ops`: those that have a rank (op.h), the lowest first */
    uint32_t n_queued;
    uint32_t n_exclusive; /* of `ops` */

    struct kvc_log_entry
        log[KVC_LOG_ENTRIES]; /* entries that a node may have missed, oldest first */
    uint32_t n_log;

    struct kvc_due renewal; /* in client->renewals */
    uint32_t n_renewing;

    uint64_t bytes_before[KV_LAYERS_MAX + 1];     /* of one token, in the layers before */
    uint64_t row_bytes_before[KV_LAYERS_MAX + 1]; /* sum of row_bytes of the layers before */
    struct kvc_session_node nodes[KV_ROW_NODES];  /* (row.n_nodes) by position in the row */
};

/* Creates a handle for a finished schema; the ticket is copied.  Returns NULL if out of memory.
 */
struct kv_session *kvc_session_make(struct kv_client *client,
                                    const kv_schema_t *schema,
                                    const struct kv_ticket *ticket);

/* Draws a ticket for a new session: an id and a token.  Its root is the id's. */
void kvc_ticket_draw(struct kv_client *client, struct kv_ticket *ret_ticket);

/* Gives a session that is being opened another ticket, and with it other nodes. */
void kvc_session_place(struct kv_session *session, const struct kv_ticket *ticket);

/* Computes the nodes of a session from its root. */
void kvc_client_row(const struct kv_client *client,
                    uint64_t root,
                    struct kv_placement_row *ret_row);

/* Returns the node at a position of a row, of a session's, and of the unit's session. */
struct kvc_node *kvc_row_node(const struct kv_client *client,
                              const struct kv_placement_row *row,
                              uint32_t position);
struct kvc_node *kvc_session_node(const struct kv_session *session, uint32_t position);
/* Returns a node of the row that is connected and speaks a version below this one; NULL: none. */
const struct kvc_node *kvc_session_node_below(const struct kv_session *session,
                                              uint32_t version);
/* Returns whether all nodes of the row are connected. */
bool kvc_session_is_connected(const struct kv_session *session);

/* Returns the position of a node in a row; KV_ROW_NODES: it is not in the row. */
uint32_t kvc_row_position(const struct kv_placement_row *row, const struct kvc_node *node);

/* Returns what the session knows of a node that it is on. */
struct kvc_session_node *kvc_session_on(struct kv_session *session,
                                        const struct kvc_node *node);

/* Frees a handle that no operation and no call uses (kv_session_free(), op.c). */
void kvc_session_destroy(struct kv_session *session);

/* Draws a new writer. */
uint64_t kvc_client_draw_writer(struct kv_client *client);

/* Returns the writers of the session's rows on a node. */
const struct kv_writers *kvc_session_writers(const struct kv_session *session,
                                             const struct kvc_node *node);

/* Returns the session's own writer. */
uint64_t kvc_session_own_writer(const struct kv_session *session);

/* Makes the writers, on each node of the row, of a session that keeps the first `tokens` rows of
 * `from` (NULL: none) and writes later ones as `writer`.  KV_TOO_LARGE: they would be too many. */
kv_status_t kvc_writers_make(const struct kv_session *session,
                             const struct kv_session *from,
                             uint32_t tokens,
                             uint64_t writer,
                             struct kv_writers *ret_writers[KV_ROW_NODES]);
/* Frees them; there are none any more. */
void kvc_writers_free(struct kv_writers *writers[KV_ROW_NODES]);
/* The session has them from now on; there are none any more. */
void kvc_session_take_writers(struct kv_session *session,
                              struct kv_writers *writers[KV_ROW_NODES]);
/* A node has truncated the session, which has `writer` for its own there.  Returns false if out of
 * memory. */
bool kvc_session_hear_own(struct kv_session *session,
                          uint32_t position,
                          uint32_t tokens,
                          uint64_t writer);
/* The session has those that a node tells, at a position.  Returns false if out of memory. */
bool kvc_session_hear_writers(struct kv_session *session,
                              uint32_t position,
                              const struct Kvpb__OpenReply *reply);

/* Formats the first digits of a session's id, for messages.  Returns `text`. */
enum {
    KVC_SESSION_TEXT = 24
};
const char *kvc_session_text(const struct kv_id128 *id, char text[KVC_SESSION_TEXT]);

/* "session 1a2b, layer 3" */
void kvc_session_describe(const struct kv_session *session,
                          uint32_t layer,
                          char *text,
                          size_t text_bytes);

#endif
