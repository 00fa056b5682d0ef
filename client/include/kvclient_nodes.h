/* kvclient_nodes.h - nodes themselves: what they say of themselves, and what operators have them do.
 * kvclient.h includes it, and is installed with it inside. */
#ifndef KV_CLIENT_INCLUDE_KVCLIENT_NODES_H
#define KV_CLIENT_INCLUDE_KVCLIENT_NODES_H

/* Makes a round trip to data thread `thread` of node `node`, with bytes_out bytes in the
 * request and bytes_back in the reply, both at most 128 KiB. */
KV_API kv_status_t kv_ping_begin(struct kv_client *client,
                                 uint32_t node,
                                 uint32_t thread,
                                 uint32_t bytes_out,
                                 uint32_t bytes_back,
                                 uint32_t deadline_ms,
                                 struct kv_op **ret_op);

struct kv_cell {
    const char *text; /* NULL: a number */
    double number;
};

struct kv_table {
    uint32_t n_columns, n_rows;
    const char *const *columns;  /* (n_columns) names */
    const struct kv_cell *cells; /* (n_rows, n_columns) */
};

/* Requests a table about one node: "status", "sessions", "clients", "models", "ops", "stats",
 * "scrub", "scrub-disk", "threads", "prefixes", "tenants", "reuse" or "tiers".  Its texts have no
 * control characters. */
KV_API kv_status_t kv_table_begin(struct kv_client *client,
                                  uint32_t node,
                                  const char *name,
                                  uint32_t deadline_ms,
                                  struct kv_op **ret_op);

/* Returns the table; NULL unless the operation succeeded.  Valid until the operation is freed.
 */
KV_API const struct kv_table *kv_op_table(const struct kv_op *op);

/* What a node has counted since it started, of all that it verifies in the background or because
 * somebody asks.  On disk, blocks, bad, mended, lost and unread are blocks and pieces of objects; in
 * memory, bad and mended are rows, pieces of objects, and what is made of rows. */
struct kv_verify_counts {
    /* Verified; in memory: of sessions, in the last pass of each data thread. */
    uint64_t blocks;
    uint64_t bytes;  /* likewise */
    uint64_t bad;    /* including those that were mended */
    uint64_t mended; /* written again, or made again */
    uint64_t lost;   /* no longer kept: bad blocks, and those behind them; or not read any more,
                         until the object is put again: pieces */
    uint64_t unread; /* could not be read, or not be mended; they are kept */
    uint64_t refused; /* in memory, now: rows and pieces of objects, until they are put again */
    uint64_t all_bytes; /* about as much there is, now */
};

struct kv_verification {
    uint64_t since_us; /* of the node's clock: for the next operation */
    bool is_done;      /* all that was there at that time has been verified since */
    struct kv_verify_counts memory, disk;
};

/* Has a node verify all that it has, in memory and on disk, in times when it has nothing else to
 * do.  The operation ends at once, with what has been counted so far: repeat it, twice a second
 * or so, until it says that all is done.  A node goes on for five seconds after the last one.
 * What is bad on disk is mended from memory or, if it is not there, not kept any more; an object
 * with such a piece is not served until it is put again.
 *   since_us  0: begins; else as the first one of this node has returned it
 * Fails with KV_UNSUPPORTED on a node of a version below 11. */
KV_API kv_status_t kv_verify_begin(struct kv_client *client,
                                   uint32_t node,
                                   uint64_t since_us,
                                   uint32_t deadline_ms,
                                   struct kv_op **ret_op);

/* Returns what the node says; NULL unless the operation succeeded.  Valid until the operation is
 * freed. */
KV_API const struct kv_verification *kv_op_verification(const struct kv_op *op);

/* Drains a node: it rejects new clients, sessions and writes with KV_DRAINING, finishes the
 * requests that it has, saves what waits to be saved, and stops. */
KV_API kv_status_t kv_drain_begin(struct kv_client *client,
                                  uint32_t node,
                                  uint32_t deadline_ms,
                                  struct kv_op **ret_op);

/* Closes a session of the client's tenant on one node by its id, as in the table "sessions".
 * This is an operator's command and needs no ticket; later operations of the session fail, and
 * say that an operator closed it.  Fails with KV_NOT_FOUND if the node has no such session, and
 * with KV_UNSUPPORTED on a node of a version below 9. */
KV_API kv_status_t kv_close_id_begin(struct kv_client *client,
                                     uint32_t node,
                                     const struct kv_id128 *session_id,
                                     uint32_t deadline_ms,
                                     struct kv_op **ret_op);

/* The same as kv_save_begin() on one node, for a session of the client's tenant, by its id and
 * without a ticket.  kv_op_tokens() returns what the node has saved, UINT32_MAX if it has no
 * units of the session.  Fails with KV_NOT_FOUND if the node has no such session. */
KV_API kv_status_t kv_save_id_begin(struct kv_client *client,
                                    uint32_t node,
                                    const struct kv_id128 *session_id,
                                    uint32_t deadline_ms,
                                    struct kv_op **ret_op);

#endif
