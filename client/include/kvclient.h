/* kvclient.h - the client library of TopKV: the one header that users include.
 *
 * A client talks to a fixed list of storage nodes.  Every operation is begun, then finished:
 *
 *     struct kv_op *op;
 *     status = kv_read_begin(session, &rows, &io, 0, &op);   // starts it, returns at once
 *     ...                                                    // compute; kv_poll() at times
 *     if (status == KV_OK)
 *         status = kv_finish(op);                            // waits, frees it: how it ended
 *     if (status != KV_OK)
 *         fprintf(stderr, "%s\n", kv_client_detail(client)); // which node, what, how long
 *
 * What may be relied on:
 *   (1) Every operation ends by its deadline, whatever the nodes do; none ends twice.
 *   (2) No operation hands out part of an answer as if it were whole.  Rows and objects are
 *       checked against the CRC32C that their writer made; what fails is KV_CORRUPT.  Nodes
 *       check the rows that they attend to, and the summaries that stand for others, in the
 *       same way.  A row or object that went bad in a node is named in the failure and refused
 *       until it is put again: the same put mends it.
 *   (3) All operations may be repeated after any failure (idempotent).  A fork or a truncate
 *       that ended without an answer may have been done: KV_STALE then, until a resume.
 *   (4) After a deadline or a cancel, a transfer may still be under way into the operation's
 *       buffer.  The buffer stays in quarantine, kv_buffer_busy() says so, until nothing can
 *       land in it any more.
 *
 * Threads: a client and all that came from it are used by one thread at a time.  Open one
 * client per thread; sessions pass between clients by ticket.
 *
 * Memory: *_begin() copies its arguments, arrays and names included: when it returns, they are
 * the caller's again.  What it goes on using are buffers, and the arrays that it fills: `crcs`
 * of kv_read_begin() and kv_fetch_begin(), `objects` of kv_objects_begin().  Those are the
 * caller's when the operation has ended; a buffer is once kv_buffer_busy() is false.  Handles
 * are freed with the function named at each.
 */
#ifndef KVCLIENT_H
#define KVCLIENT_H

#include "proto/kv_types.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KV_API __attribute__((visibility("default")))

struct kv_client;
struct kv_session;
struct kv_buffer;
struct kv_op;

/* ---- client ------------------------------------------------------------------------------ */

struct kv_client_options {
    const char
        *nodes; /* "HOST:PORT,..."; or what kvs_node_address() of an embedded node said */
    const char *transport; /* "auto" (shared memory on the same host, else tcp), "tcp", "shm" */
    const char *net_devices; /* network devices for data, "lo,eth0"; NULL: the ones that reach
                                the nodes */
    const char *name;     /* shown by kvctl clients; NULL: the program's name and process id */
    uint32_t deadline_ms; /* of operations begun with deadline 0; 0: 5000.  Ten minutes is the
                             most that any operation waits: a longer one is taken as that. */
    uint32_t peer_timeout_ms; /* a node that leaves requests unanswered and says nothing for
                                 this long is taken for lost; 0: 2000 */
    uint32_t tenant;  /* whose objects and sessions it uses; those of others are out of reach */
    uint32_t ops_max; /* operations that may exist at once; 0: 1024 */
};

/* Connects to the nodes of the list; one that answers is enough.  The others are connected by
 * the first operation that needs them, and only what needs a node that is down fails, naming
 * it. Where rows and objects lie depends on the list alone, not on who answers.
 *
 * Waits until every node has connected or failed, at most deadline_ms; once one has connected,
 * at most peer_timeout_ms from the begin.  The time that the system takes to look up host names
 * comes on top.
 *
 * KV_INVALID: an option, or a node that is in the list twice; KV_VERSION: a node of another
 * version; KV_UNREACHABLE: no node answers, or as all of them fail, if that is the same
 * (KV_DRAINING).  `detail` names the nodes. */
KV_API kv_status_t kv_client_open(const struct kv_client_options *options,
                                  struct kv_client **ret_client,
                                  char *detail,
                                  size_t detail_bytes);

/* Cancels what is under way, frees every session, buffer and operation that came from the
 * client. Sessions live on in the nodes until their leases end.  NULL is allowed. */
KV_API void kv_client_close(struct kv_client *client);

/* What went wrong last in this client: "node 127.0.0.1:7400: read: deadline: 5.001 s: ...".
 * Lent until the next call. */
KV_API const char *kv_client_detail(const struct kv_client *client);

/* Drives all operations without waiting; returns how many ended in this call. */
KV_API unsigned kv_poll(struct kv_client *client);

/* Sleeps until an operation ends or timeout_us has passed; returns how many ended. */
KV_API unsigned kv_client_wait(struct kv_client *client, uint64_t timeout_us);

enum kv_node_state {
    KV_NODE_CONNECTED,
    KV_NODE_LOST,      /* reconnected by the next operation that needs it */
    KV_NODE_UNREACHED, /* never connected yet, which the next operation that needs it does;
                          until then only `address` and `detail` say anything */
};

struct kv_node_info {
    const char *address;    /* as in the list */
    const char *name;       /* as the node calls itself */
    const char *transport;  /* in use for data: "tcp/lo", "posix/memory cma/memory" */
    const char *transports; /* that the node has */
    enum kv_node_state state;
    const char *detail; /* how its last connection failed; "" if it is connected or none did */
    uint32_t n_threads;
    uint64_t memory_bytes;
    uint64_t requests; /* sent to it by this client */
    uint64_t rows_in;  /* rows that it stored for this client */
    uint64_t rows_out; /* rows that it answered with */
    uint64_t reconnects;
};

/* Of the list, connected or not. */
KV_API uint32_t kv_client_n_nodes(const struct kv_client *client);
/* Lent until the next call that takes the client. */
KV_API void
kv_client_node(const struct kv_client *client, uint32_t node, struct kv_node_info *ret_info);

/* ---- operations -------------------------------------------------------------------------- */

/* KV_IN_PROGRESS, or how it ended. */
KV_API kv_status_t kv_op_status(const struct kv_op *op);

/* Waits until the operation has ended; returns how. */
KV_API kv_status_t kv_wait(struct kv_op *op);

/* Ends the operation now with KV_CANCELLED, unless it has ended.  Nodes are told to drop it;
 * what it did before stays done. */
KV_API void kv_cancel(struct kv_op *op);

/* Frees the operation; one under way is cancelled.  NULL is allowed. */
KV_API void kv_op_free(struct kv_op *op);

/* kv_wait(), kv_op_free(), and the status. */
KV_API kv_status_t kv_finish(struct kv_op *op);

/* The failure in words, "" if there is none.  Lent until the operation is freed. */
KV_API const char *kv_op_detail(const struct kv_op *op);
KV_API uint64_t kv_op_elapsed_us(const struct kv_op *op); /* from begin to end */

/* ---- memory ------------------------------------------------------------------------------ */

enum kv_memory {
    KV_HOST_MEMORY = 0,
    KV_CUDA_MEMORY = 1, /* KV_UNSUPPORTED so far: rows are checked by the processor */
};

/* Memory that the transports know: where rows and objects come from and land.
 * alloc: the library's own, page-aligned, huge pages asked for.  map: the caller's, which must
 * outlive the buffer.  KV_NO_MEMORY, KV_UNSUPPORTED. */
KV_API kv_status_t kv_buffer_alloc(struct kv_client *client,
                                   size_t bytes,
                                   struct kv_buffer **ret_buffer);
KV_API kv_status_t kv_buffer_map(struct kv_client *client,
                                 void *base,
                                 size_t bytes,
                                 enum kv_memory memory,
                                 struct kv_buffer **ret_buffer);
KV_API void *kv_buffer_data(const struct kv_buffer *buffer);
KV_API size_t kv_buffer_bytes(const struct kv_buffer *buffer);

/* True while a transfer may still touch the memory: operations under way, and quarantine. */
KV_API bool kv_buffer_busy(const struct kv_buffer *buffer);

/* KV_BUSY: in use or in quarantine, nothing happened; poll and try again.  NULL is allowed. */
KV_API kv_status_t kv_buffer_free(struct kv_buffer *buffer);

/* ---- sessions ---------------------------------------------------------------------------- */

/* Any client of the session's tenant that has it may use the session: pass it to the worker
 * that goes on with it. */
struct kv_ticket {
    struct kv_id128 session_id;
    struct kv_id128 token;
};

struct kv_session_options {
    uint32_t lease_ms;   /* 0: the nodes' default */
    uint32_t tokens_max; /* 0: KV_TOKENS_MAX */
};

/* A new, empty session of a model, on all nodes: it fails where one is down, naming it.  The
 * model becomes known to the nodes.  `options` may be NULL.  The session: kv_op_session(). */
KV_API kv_status_t kv_open_begin(struct kv_client *client,
                                 const struct kv_model_info *model,
                                 const struct kv_session_options *options,
                                 uint32_t deadline_ms,
                                 struct kv_op **ret_op);

/* Takes up a session by its ticket, wherever it was made; brings nodes up to date that missed a
 * fork or a truncate.  KV_NOT_FOUND; KV_DENIED: it is another tenant's. */
KV_API kv_status_t kv_resume_begin(struct kv_client *client,
                                   const struct kv_ticket *ticket,
                                   uint32_t deadline_ms,
                                   struct kv_op **ret_op);

/* A new session that shares the first `tokens` tokens; costs bookkeeping only.  Waits for the
 * session's operations under way.  Raises the session's generation: other clients of it get
 * KV_STALE until they resume.  KV_INVALID: more tokens than are committed. */
KV_API kv_status_t kv_fork_begin(struct kv_session *session,
                                 uint32_t tokens,
                                 uint32_t deadline_ms,
                                 struct kv_op **ret_op);

/* Forgets all tokens from `tokens` on.  Waits and raises the generation, as fork. */
KV_API kv_status_t kv_truncate_begin(struct kv_session *session,
                                     uint32_t tokens,
                                     uint32_t deadline_ms,
                                     struct kv_op **ret_op);

/* Ends the session and frees its memory on all nodes, then the handle is only good for
 * kv_session_free(). */
KV_API kv_status_t kv_close_begin(struct kv_session *session,
                                  uint32_t deadline_ms,
                                  struct kv_op **ret_op);

/* Renews the lease; the library does so by itself while the client is polled.  Once a lease has
 * ended, every operation of the session fails with KV_NOT_FOUND.  Its text says when that was,
 * while the node remembers it: it does for the last 512 sessions that ended. */
KV_API kv_status_t kv_renew_begin(struct kv_session *session,
                                  uint32_t lease_ms,
                                  uint32_t deadline_ms,
                                  struct kv_op **ret_op);

/* Asks for the committed length, the least over all units: kv_op_tokens(). */
KV_API kv_status_t kv_length_begin(struct kv_session *session,
                                   uint32_t deadline_ms,
                                   struct kv_op **ret_op);

/* After open, resume and fork: the session, given to the caller.  NULL: failed or taken. */
KV_API struct kv_session *kv_op_session(struct kv_op *op);
KV_API uint32_t kv_op_tokens(const struct kv_op *op);

KV_API void kv_session_ticket(const struct kv_session *session, struct kv_ticket *ret_ticket);
KV_API const kv_schema_t *kv_session_schema(const struct kv_session *session);
KV_API uint32_t kv_session_generation(const struct kv_session *session);
KV_API uint32_t kv_session_lease_ms(const struct kv_session *session);

/* Forgets the handle; the session lives on in the nodes until its lease ends.  Operations of
 * the session that are under way are cancelled.  NULL is allowed. */
KV_API void kv_session_free(struct kv_session *session);

/* ---- rows -------------------------------------------------------------------------------- */

/* A box of rows: layers x kv heads x tokens. */
struct kv_rows {
    uint32_t layer_begin, n_layers;
    uint32_t kv_head_begin, n_kv_heads; /* n_kv_heads 0: all kv heads of each layer */
    uint32_t token_begin, n_tokens;
};

/* Where rows are in the caller's memory. */
struct kv_rows_io {
    struct kv_buffer *buffer;
    size_t offset;  /* rows (layer, head, token, row_bytes), dense, from this byte on */
    uint32_t *crcs; /* (layer, head, token), or NULL.  put, append: the rows' CRCs if already
                       known, see kv_row_crc(), copied; read, fetch: filled until the operation
                       ends */
};

/* Bytes of a box of rows; 0 if it does not fit the schema. */
KV_API size_t kv_rows_bytes(const kv_schema_t *schema, const struct kv_rows *rows);

/* The CRC32C of one row in its place in this session; in another session the same row has
 * another one.  A truncate may change it for the tokens that it takes away: make it for those
 * when the truncate has ended. */
KV_API uint32_t kv_row_crc(const struct kv_session *session,
                           const void *row,
                           size_t row_bytes,
                           uint32_t layer,
                           uint32_t kv_head,
                           uint32_t token);

/* Stores rows.  Rows are committed in token order: in each unit, token_begin must not exceed
 * the committed length plus the rows of puts under way, or the put fails with KV_NOT_READY at
 * once.  Puts of one session handle that are begun between two polls may be begun in any order.
 * Rows that are committed already must be the same, or the put fails with KV_CONFLICT.  On
 * KV_NO_MEMORY the message that failed stored nothing, but other messages of the same put may
 * have succeeded; repeating the put is safe. */
KV_API kv_status_t kv_put_begin(struct kv_session *session,
                                const struct kv_rows *rows,
                                const struct kv_rows_io *io,
                                uint32_t deadline_ms,
                                struct kv_op **ret_op);

/* Stores the new rows of a decode step: as put, few tokens, all layers in one message per data
 * thread. */
KV_API kv_status_t kv_append_begin(struct kv_session *session,
                                   const struct kv_rows *rows,
                                   const struct kv_rows_io *io,
                                   uint32_t deadline_ms,
                                   struct kv_op **ret_op);

/* Reads a box of rows, whole.  Waits for rows that are not committed yet, to the deadline, then
 * KV_NOT_READY. */
KV_API kv_status_t kv_read_begin(struct kv_session *session,
                                 const struct kv_rows *rows,
                                 const struct kv_rows_io *io,
                                 uint32_t deadline_ms,
                                 struct kv_op **ret_op);

/* One whole layer's rows by id: fans out over the nodes that own the heads, gathers.
 *   n_ids  (n_kv_heads) rows wanted of each head
 *   ids    (sum of n_ids) tokens, head after head
 * Rows land in the same order, dense; crcs likewise.  `snapshot`: tokens that must be committed
 * before the rows are taken; 0: those the ids need. */
struct kv_fetch {
    uint32_t layer;
    uint32_t kv_head_begin, n_kv_heads; /* n_kv_heads 0: all */
    const uint32_t *n_ids;
    const uint32_t *ids;
    uint32_t snapshot;
};
KV_API kv_status_t kv_fetch_begin(struct kv_session *session,
                                  const struct kv_fetch *fetch,
                                  const struct kv_rows_io *io,
                                  uint32_t deadline_ms,
                                  struct kv_op **ret_op);

/* ---- retrieval --------------------------------------------------------------------------- */

/* Has the nodes make codes for the keys of rows that they have (product quantisation; PQCache,
 * section 3.2), in the background.  Rows that have codes keep them; a query needs none, it only
 * costs more without. */
struct kv_index_options {
    uint32_t layer_begin, n_layers; /* n_layers 0: all */
    uint32_t tokens;                /* rows before this token; they must be committed */
    uint32_t chapter_blocks; /* blocks that share a codebook, 8 at least, counted from token 0;
                                fewer at the end are left without codes.  0: one codebook, and
                                later rows get its codes when a query first meets them */
    uint32_t m, bits;        /* subspaces of a key, bits of a code */
    uint32_t iterations;     /* of k-means at most, 1..KV_KMEANS_ITERATIONS_MAX */
    uint32_t budget_us;      /* of a node's time for each codebook; 0: no limit */
    uint64_t seed;
    uint32_t
        summaries; /* summaries per 1,024 rows to be made, too, for queries that ask for the
                      rest: 0, 16 or 64 */
    bool wait;     /* end when the codes are there, to the deadline; else when the nodes know */
};

struct kv_index_result {
    uint64_t rows;       /* (token, kv head, layer) asked for */
    uint64_t rows_coded; /* of them with codes, when the nodes answered */
    uint32_t n_found;    /* codebooks that were there */
    uint32_t n_trained;  /* codebooks that were made meanwhile */
    uint32_t n_pending;  /* codebooks still to come */
    uint32_t iterations; /* summed over n_trained */
    uint64_t train_us;   /* of the nodes' threads, summed over n_trained */
};

KV_API kv_status_t kv_index_begin(struct kv_session *session,
                                  const struct kv_index_options *index,
                                  uint32_t deadline_ms,
                                  struct kv_op **ret_op);
/* Zeros if the operation has not ended well. */
KV_API void kv_op_index_result(const struct kv_op *op, struct kv_index_result *ret_result);

/* Tokens [begin, end). */
struct kv_range {
    uint32_t begin, end;
};

/* A block of a kv head whose rows the caller has: see kv_block_fingerprint(). */
struct kv_cached_block {
    uint32_t block;
    uint32_t fingerprint;
};

/* Asks one layer for the rows that matter to some query vectors:
 *
 *   1  candidates are scored by their codes, or by their keys where they have none; a vector's
 *      weights are the softmax of scale * score over the candidates; merged; the rerank * k
 *      largest are taken
 *   2  those are scored by their keys, weighed and merged again; the k largest are the answer
 *   3  if asked: attention over them, and an estimate of what all others would have added, from
 *      summaries that index made: one output and natural log-sum-exp per vector, together
 *
 * Weights that are answered are those of the last step that was needed: of all candidates where
 * rerank is 1, else of those that step 2 scored.  Where rerank * k reaches the number of
 * candidates, step 1 is left out, and n_scored_by_code and n_scored_by_key are 0.
 *
 * Ties go to the lower token.  Fewer candidates than k: all of them.  A query begun early is a
 * prefetch: the answer waits in the caller's buffer. */
struct kv_query {
    uint32_t layer;
    uint32_t kv_head_begin, n_kv_heads; /* n_kv_heads 0: all */
    uint32_t n_queries;                 /* vectors of each kv head, 1..KV_QUERIES_MAX */
    const float *queries;               /* (n_kv_heads, n_queries, d_k) */
    float scale;                        /* > 0; 1 / sqrt(d_k) as a rule */
    enum kv_merge merge;
    enum kv_answer answer;
    uint32_t k;                  /* 1..KV_SELECTED_MAX; with UNION and NONE of each vector */
    enum kv_selection selection; /* how many are chosen, never more than k; 0: k */
    float fraction;              /* 0 with KV_SELECT_TOP; else above 0, at most 1 */
    uint32_t rerank;   /* 1: what step 1 says; at most rerank * k = KV_SELECTED_MAX are taken */
    bool want_weights; /* answer the merged weights, too; KV_ANSWER_ATTEND: with `names` */
    bool want_ids;     /* KV_ANSWER_ATTEND: name all chosen rows, not only those held */
    uint32_t summaries; /* summaries per 1,024 rows for step 3's estimate: 0 (none), 16 or 64;
                          rows of which there are not so many are attended one by one */
    uint32_t snapshot;  /* tokens that must be committed; 0: those that the ranges need */
    uint32_t n_ranges;  /* 1..KV_RANGES_MAX */
    const struct kv_range *ranges; /* candidates: ascending, disjoint, not empty */
    const uint32_t *n_cached;      /* (n_kv_heads); NULL: none */
    const struct kv_cached_block
        *cached; /* (sum of n_cached) ascending in each head; chosen as others
                                      are, not sent */
};

/* Bytes that the rows of an answer may take. */
KV_API size_t kv_query_rows_bytes_max(const kv_schema_t *schema, const struct kv_query *query);

/* `io` is needed with KV_ANSWER_ROWS only: kv_query_rows_bytes_max() bytes from the offset on, `crcs` is
 * not used.  KV_TOO_LARGE: the rows of one head are more than 1 MiB; ask for ids and fetch.
 * KV_INVALID, from the node: a row that attention needs holds a NaN or an infinity. */
KV_API kv_status_t kv_query_begin(struct kv_session *session,
                                  const struct kv_query *query,
                                  const struct kv_rows_io *io,
                                  uint32_t deadline_ms,
                                  struct kv_op **ret_op);

#define KV_ROW_CACHED UINT32_MAX

/* The answer for one kv head. */
struct kv_query_result {
    uint32_t n_ids;
    const uint32_t *ids; /* (n_ids) tokens, ascending */
    const uint32_t
        *row_index; /* (n_ids) where its row is in `rows`; KV_ROW_CACHED: not sent.  With
                               KV_ANSWER_ATTEND: KV_ROW_CACHED: held, and not in `outputs`; else
                               0.  NULL with KV_ANSWER_IDS */
    uint32_t n_rows;
    const void *rows;     /* (n_rows, row_bytes), ascending by token; in the caller's buffer */
    const uint32_t *crcs; /* (n_rows), checked */
    const float *weights; /* (n_ids) merged weights; NULL if not asked for */
    const uint32_t
        *query_mask; /* (n_ids) with KV_MERGE_NONE: bit i: vector i chose it; else NULL */
    /* With KV_ANSWER_ATTEND or a rest, else NULL: over the chosen rows but for those held (with
     * KV_ANSWER_ATTEND), and over the others by estimate (with a rest). */
    const float *outputs; /* (n_queries, d_v) */
    const float *lses;    /* (n_queries), natural; -inf: over no row */
    uint32_t n_selected;  /* rows, named or not */
    uint32_t n_estimated; /* rows that summaries stand for, with NONE for some vector */
    uint32_t n_scored_by_code,
        n_scored_by_key;           /* candidates that step 1 scored by code, by key */
    uint32_t n_reranked;           /* rows that step 2 scored */
    uint32_t n_chapters;           /* codebooks used */
    float recall;                  /* the node's estimate, of exact top-k; NaN: none yet */
    uint32_t node;                 /* that answered */
    uint32_t queue_us, service_us; /* in the node: before and at work, of the whole message */
};

/* `head` counts from kv_head_begin.  Everything is lent until the operation is freed.  KV_INVALID:
 * no query that ended well, or no such head. */
KV_API kv_status_t kv_op_query_result(const struct kv_op *op,
                                      uint32_t head,
                                      struct kv_query_result *ret_result);

/* What tells a block of a kv head from another under the same number: its rows' CRCs, hashed.
 *   crcs  (KV_BLOCK_TOKENS) */
KV_API uint32_t kv_block_fingerprint(const uint32_t *crcs);

/* The trip of an operation, by the client's clock; 0: not yet. */
struct kv_op_times {
    uint64_t begun_us;
    uint64_t sent_us;    /* its last message was handed to the transport, the first time */
    uint64_t arrived_us; /* its last answer was there */
    uint64_t ended_us;
};
KV_API void kv_op_get_times(const struct kv_op *op, struct kv_op_times *ret_times);
KV_API uint64_t kv_client_now_us(const struct kv_client *client);

/* ---- objects ----------------------------------------------------------------------------- */

/* Immutable bytes under the caller's name, for callers that have keys and blobs and no tokens.
 */
struct kv_object {
    const char *name; /* 1..KV_NAME_BYTES_MAX bytes */
    struct kv_buffer *buffer;
    size_t offset;
    size_t bytes;       /* put: size; get: room in, size out */
    kv_status_t status; /* out, of this object */
};

enum kv_object_verb {
    KV_OBJECT_PUT,    /* KV_EXISTS: the name holds other bytes */
    KV_OBJECT_GET,    /* KV_NOT_FOUND; KV_TOO_LARGE: `bytes` tells the size, nothing landed;
                        KV_CONFLICT: replaced while it was read, try again */
    KV_OBJECT_EXISTS, /* KV_OK or KV_NOT_FOUND; `bytes` tells the size */
    KV_OBJECT_DELETE, /* KV_OK: what the node found under the name is gone, and what was put
                        there since is not; KV_NOT_FOUND: it found nothing */
};

/* One or many objects in one operation, in parallel.  What is asked is copied; `status` and
 * `bytes` of each object are written until the operation ends.  Each object has its own status:
 * a node that cannot be reached fails its objects alone.  The operation's status is KV_OK if
 * all are, else that of the first that is not. */
KV_API kv_status_t kv_objects_begin(struct kv_client *client,
                                    enum kv_object_verb verb,
                                    struct kv_object *objects,
                                    size_t n_objects,
                                    uint32_t deadline_ms,
                                    struct kv_op **ret_op);

/* ---- nodes ------------------------------------------------------------------------------- */

/* A round trip to one data thread: `bytes_out` go, `bytes_back` come, both at most 128 KiB. */
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
    const char *const *columns;
    const struct kv_cell *cells; /* (n_rows, n_columns) */
};

/* A table about one node: "status", "sessions", "clients", "models", "ops", "stats" or "scrub".
 * Its texts hold no control characters. */
KV_API kv_status_t kv_table_begin(struct kv_client *client,
                                  uint32_t node,
                                  const char *name,
                                  uint32_t deadline_ms,
                                  struct kv_op **ret_op);
/* Lent until the operation is freed; NULL if it failed. */
KV_API const struct kv_table *kv_op_table(const struct kv_op *op);

/* The node takes no new sessions, finishes what it has, and stops. */
KV_API kv_status_t kv_drain_begin(struct kv_client *client,
                                  uint32_t node,
                                  uint32_t deadline_ms,
                                  struct kv_op **ret_op);

/* The name of a block of tokens: SHA-256 cut to 128 bits over the parent's name (zeros for the
 * first block), the model's fingerprint, the tenant's salt and the tokens. */
KV_API struct kv_id128 kv_client_block_name(const struct kv_id128 *parent,
                                            const struct kv_id128 *fingerprint,
                                            const struct kv_id128 *salt,
                                            const uint32_t *tokens,
                                            size_t n_tokens);

/* "0.1.0" */
KV_API const char *kv_client_version(void);

#ifdef __cplusplus
}
#endif
#endif
