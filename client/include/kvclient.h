/* kvclient.h - the client library of TopKV: the one header that users include.
 *
 * A client talks to a fixed list of storage nodes.  Every operation is started, then finished:
 *
 *     struct kv_op *op;
 *     kv_status_t status;
 *
 *     status = kv_read_begin(session, &rows, &io, 0, &op);   // starts the read and returns
 *     ...                                                    // compute; kv_poll() now and then
 *     if (status == KV_OK)
 *         status = kv_finish(op);                            // waits, frees op
 *     if (status != KV_OK)
 *         fprintf(stderr, "%s\n", kv_client_detail(client)); // which node, what, why
 *
 * Guarantees:
 *   (1) Every operation completes exactly once, by its deadline, whatever the nodes do.
 *   (2) No operation returns a partial result as if it were complete.  Rows and objects are
 *       checked against the CRC32C that their writer computed; a mismatch is KV_CORRUPT.  Nodes
 *       check the rows and the summaries that they use in attention in the same way.  If a row
 *       or object is corrupt in a node, operations that need it fail with KV_CORRUPT and name
 *       it until it is put again; the same put repairs it.
 *   (3) All operations are idempotent: any of them may be repeated after any failure.  A fork
 *       or a truncate that failed without a reply may have been applied.  If it was, other
 *       clients of the session may get KV_STALE until they resume.
 *   (4) After a deadline, a cancel or a failure, the transport may still read and write the
 *       operation's buffer.  The buffer is then in quarantine: kv_buffer_busy() returns true and
 *       kv_buffer_free() returns KV_BUSY until it is the caller's alone.
 *
 * Calls: a kv_*_begin() returns KV_OK and an operation in *ret_op, or an error and no
 * operation; *ret_op is then unchanged.  `deadline_ms` counts from the call; 0 selects the
 * client's default.  The library has no callbacks.  It makes progress inside
 * kv_poll(), kv_wait(), kv_finish() and kv_client_wait() only; poll at least once in a third of
 * a session's lease, so that the library can renew it.  The functions that every caller needs
 * have short names: kv_poll(), kv_wait(), kv_cancel(), kv_finish().
 *
 * With `progress_thread`, a thread of the library's own makes progress as soon as the caller
 * has not called for a while: messages move, leases are renewed, deadlines are kept.  Nothing
 * else changes, and no call has to be left out: a wait is the caller's own, without a
 * handover between threads.
 *
 *   a program that computes     begins operations, computes, polls now and then, and waits where
 *                               it needs a result.  With the thread, it need not poll
 *   a loop (epoll, libuv)       watches kv_client_fd(), sleeps as kv_client_arm() says, polls,
 *                               and takes what has ended: examples/loop.c.  It needs no thread;
 *                               with one, which then sleeps in its stead, an end wakes both
 *   a pool of threads           a client for each thread, with the library's where that one
 *                               computes for longer than operations may take
 *   an engine with a stream     queues its kernels, polls while they run, and waits for a result
 *                               before it queues the one that needs it.  With the thread, it may
 *                               wait for the stream instead of polling
 *
 * Threads: a client, and everything obtained from it, is used by one thread at a time; the
 * thread of `progress_thread` does not count.  Open one client per thread; pass sessions
 * between clients by ticket.
 *
 * Memory: a kv_*_begin() borrows its arguments, arrays and names included, during the call and
 * copies what it needs.  There are two exceptions.  An operation keeps its buffers until
 * kv_buffer_busy() returns false, and it keeps the arrays that it fills until it ends: `crcs`
 * of kv_read_begin() and kv_fetch_begin(), `objects` of kv_objects_begin().  The function that
 * frees a handle is named where the handle is created.
 *
 * Errors: kv_status_t says what each status means and what the caller should do next.
 * The contracts below name only the errors that are particular to a function.  In addition,
 *   every kv_*_begin()  fails with KV_INVALID if an argument is out of bounds, with
 *                       KV_NOT_FOUND if its session is closed, with KV_BUSY if ops_max
 *                       operations exist, and with KV_NO_MEMORY if the process is out of
 *                       memory;
 *   every operation     may end with KV_DEADLINE, KV_CANCELLED, KV_UNREACHABLE (a node is down
 *                       or was lost) or KV_CORRUPT; an operation on a session also with
 *                       KV_NOT_FOUND (its lease has expired) or KV_STALE (another client
 *                       truncated it, or forked it on nodes that speak no version 9 of the
 *                       protocol: resume the session).
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

/* How to open a client.  Zeros and NULLs select the defaults, except in `nodes`. */
struct kv_client_options {
    /* "HOST:PORT,NAME=HOST:PORT,...", or the result of kvs_node_address() for an embedded node;
     * at most 1,024.  All clients of a store give the same nodes, in any order: a node is known
     * by its NAME (kvserver --name) or, without one, by the text HOST:PORT. */
    const char *nodes;
    const char *transport; /* "auto" (shared memory on the same host, else tcp), "tcp", "shm" */
    /* Network devices for data, "lo,eth0"; NULL: the devices that reach the nodes. */
    const char *net_devices;
    const char *name; /* shown by kvctl clients; NULL: the program's name and process id */
    /* Milliseconds, for operations begun with deadline 0; 0: 5000.  The maximum for any
     * operation is ten minutes; a longer deadline is reduced to that. */
    uint32_t deadline_ms;
    /* Milliseconds after which a node that leaves requests unanswered and sends nothing is
     * considered lost; 0: 2000. */
    uint32_t peer_timeout_ms;
    uint32_t tenant;  /* whose objects and sessions the client uses; it cannot access others */
    uint32_t ops_max; /* operations that may exist at once; 0: 1024 */
    /* (salt_bytes) A secret that the names of blocks depend on, kv_prompt_names(), and that
     * never leaves the client: who does not have it can neither name what others stored nor
     * learn from the time of an answer that they did.  NULL: none; tenants are then kept apart
     * against mistakes only, since a node believes what a client says of its tenant. */
    const void *salt;
    size_t salt_bytes;
    /* How long kv_wait() and the like look for an answer before they sleep.  NULL, "adaptive": for
     * twice as long as answers usually take to come, if that is at most 1 ms and the machine has a core
     * to spare; "busy": they never sleep; "sleep": they sleep at once, and have to be woken. */
    const char *poll;
    /* A thread of the library's own makes progress while the caller computes.  It takes over
     * 0.1 to 8 ms after the last call, later the longer calls have come one after the other,
     * and sleeps whenever nothing has arrived and nothing is due.  On a machine without a
     * core to spare it takes time from the caller.  Fails with KV_IO if the system refuses
     * it. */
    bool progress_thread;
};

/* Opens a client and connects to the nodes of the list; one connected node is enough.  The
 * first operation that needs one of the others connects to it.  While a node is down, only
 * operations that need it fail, and they name it.  Where rows and objects are placed depends on
 * the list alone, not on which nodes respond.
 *
 * Waits until every node has connected or failed, at most deadline_ms; once one has connected,
 * at most peer_timeout_ms from the start.  Time for resolving host names is not included.
 *
 * Borrows `options` during the call.  Transfers *ret_client (free with kv_client_close()).
 *
 * Fails with KV_INVALID if an option is invalid, if a node is in the list twice or calls itself
 * by another name than the list, with KV_VERSION if a node speaks no version of the protocol
 * that the client speaks, with KV_UNSUPPORTED if this build has no network, and with
 * KV_UNREACHABLE if no node responds.  If all nodes fail in the same way (for example with
 * KV_DRAINING), that is the result.  `detail` (detail_bytes, 0-terminated) then says what
 * failed and names the nodes; on success it is "". */
KV_API kv_status_t kv_client_open(const struct kv_client_options *options,
                                  struct kv_client **ret_client,
                                  char *detail,
                                  size_t detail_bytes);

/* Cancels outstanding operations and frees every session, buffer and operation of the client.
 * Sessions stay in the nodes until their leases expire.  `client` may be NULL. */
KV_API void kv_client_close(struct kv_client *client);

/* Returns the most recent failure of this client: "node 127.0.0.1:7400: read: deadline: after
 * 5.001 s: ...".  That is a begin's, or an operation's from when kv_wait() or kv_finish()
 * returned it, or a poll counted its end.  Valid until the next call on the client. */
KV_API const char *kv_client_detail(const struct kv_client *client);

/* Drives all operations without waiting.  Returns how many ended. */
KV_API unsigned kv_poll(struct kv_client *client);

/* Waits until an operation ends or timeout_us microseconds have passed.  Returns how many
 * operations ended. */
KV_API unsigned kv_client_wait(struct kv_client *client, uint64_t timeout_us);

/* ---- loops ------------------------------------------------------------------------------- */

/* Returns a descriptor, the same one every time, that is readable when there is something to
 * poll for: for epoll, poll or select, level-triggered.  With `progress_thread`, that is when
 * an operation has ended since kv_client_arm().  It is the client's, until it is closed.  -1:
 * the system has none; then sleep as kv_client_arm() says. */
KV_API int kv_client_fd(struct kv_client *client);

/* Call before every sleep, after kv_poll() and after kv_client_next_ended() had nothing.  Returns
 * false if there is something to do: poll again.  Otherwise the caller may sleep until the descriptor
 * is readable, for *ret_timeout_us microseconds at most, and polls then; who begins an operation
 * meanwhile calls it anew. */
KV_API bool kv_client_arm(struct kv_client *client, uint64_t *ret_timeout_us);

/* Gives an operation a pointer of the caller's, and has kv_client_next_ended() tell its end.  It may
 * have ended. */
KV_API void kv_op_set_user(struct kv_op *op, void *user);
/* Returns the pointer; NULL: none was given. */
KV_API void *kv_op_user(const struct kv_op *op);
/* Returns an operation that has ended, of those with a pointer, each once and in the order of their
 * ends; it stays the caller's.  NULL: there is none now.  One that is freed before is not told. */
KV_API struct kv_op *kv_client_next_ended(struct kv_client *client);

/* A node as this client sees it. */
struct kv_node_info {
    const char *address; /* as in the list */
    const char *name;    /* the node's own name */
    /* In use for data: "tcp/lo", "posix/memory memfd/memory cma/memory". */
    const char *transport;
    const char *transports; /* that the node offers */
    enum kv_node_state state;
    const char *detail;    /* how the last connection failed; "" if connected or none failed */
    uint32_t n_threads;    /* data threads */
    uint64_t memory_bytes; /* of the node, for rows, objects and the work of queries */
    uint64_t requests;     /* sent to the node by this client */
    uint64_t rows_in;      /* rows stored for this client */
    uint64_t rows_out;     /* rows returned to this client */
    uint64_t reconnects;
};

/* Returns the number of nodes in the list, connected or not. */
KV_API uint32_t kv_client_n_nodes(const struct kv_client *client);

/* Describes one node.  `node` is a position in the list, from 0.  The strings are valid until
 * the next call on the client. */
KV_API void
kv_client_node(const struct kv_client *client, uint32_t node, struct kv_node_info *ret_info);

/* ---- operations -------------------------------------------------------------------------- */

/* Returns KV_IN_PROGRESS, or the result of an operation that has ended. */
KV_API kv_status_t kv_op_status(const struct kv_op *op);

/* Waits until the operation has ended.  Returns its result. */
KV_API kv_status_t kv_wait(struct kv_op *op);

/* Ends the operation now, with KV_CANCELLED, unless it has ended.  Tells the nodes to drop its
 * requests; what they have already applied remains applied. */
KV_API void kv_cancel(struct kv_op *op);

/* Frees the operation and everything it still owns; an outstanding one is cancelled first.
 * `op` may be NULL. */
KV_API void kv_op_free(struct kv_op *op);

/* Waits until the operation has ended, frees it and returns its result. */
KV_API kv_status_t kv_finish(struct kv_op *op);

/* Returns the failure as text, "" if there is none.  Valid until the operation is freed. */
KV_API const char *kv_op_detail(const struct kv_op *op);

/* Returns the microseconds between the begin and the end of the operation; 0: not ended. */
KV_API uint64_t kv_op_elapsed_us(const struct kv_op *op);

/* ---- memory ------------------------------------------------------------------------------ */

/* A buffer is memory registered with the transports.  Rows and objects are sent from buffers
 * and received into them.
 *
 * kv_buffer_alloc() allocates page-aligned memory, with huge pages where the system grants
 * them; it may provide the first 256 MiB at once, and the rest when that is first used.  A
 * node on the same host reads it directly, and a process that is forked shares it.
 * kv_buffer_map() registers the caller's memory, which must stay allocated until the buffer is
 * freed; for a node on the same host it is copied first.  Both transfer *ret_buffer (free with
 * kv_buffer_free()).
 *
 * Fail with KV_INVALID if `bytes` is 0 or `base` is NULL, with KV_NO_MEMORY, with
 * KV_UNSUPPORTED for KV_MEMORY_CUDA (checksums are computed on the CPU), or with the
 * transport's error if it cannot register the memory. */
KV_API kv_status_t kv_buffer_alloc(struct kv_client *client,
                                   size_t bytes,
                                   struct kv_buffer **ret_buffer);
KV_API kv_status_t kv_buffer_map(struct kv_client *client,
                                 void *base,
                                 size_t bytes,
                                 enum kv_memory_type memory,
                                 struct kv_buffer **ret_buffer);

/* Return the memory's address and its size in bytes.  Valid until the buffer is freed. */
KV_API void *kv_buffer_data(const struct kv_buffer *buffer);
KV_API size_t kv_buffer_bytes(const struct kv_buffer *buffer);

/* Returns true while a transfer may read or write the memory: while an operation uses the
 * buffer and while the buffer is in quarantine. */
KV_API bool kv_buffer_busy(const struct kv_buffer *buffer);

/* Frees the buffer, and its memory if kv_buffer_alloc() allocated it.  Fails with KV_BUSY, and
 * changes nothing, while kv_buffer_busy(); poll and try again.  `buffer` may be NULL. */
KV_API kv_status_t kv_buffer_free(struct kv_buffer *buffer);

/* ---- sessions ---------------------------------------------------------------------------- */

/* What a client of the session's tenant needs to use the session; plain data, copied by
 * assignment.  Pass it to the worker that continues the session.  The token is a secret. */
struct kv_ticket {
    struct kv_id128 session_id;
    struct kv_id128 token;
    /* With the list of nodes, says which of them have the session.  A fork has its parent's. */
    uint64_t root;
};

struct kv_session_options {
    uint32_t lease_ms;   /* milliseconds; 0, or more than the nodes' maximum: the maximum */
    uint32_t tokens_max; /* 0: KV_TOKENS_MAX */
    /* (n_block_names) of the prompt's full blocks, from the first one on, as kv_prompt_names()
     * makes them; NULL: unknown.  The session starts with the rows of the longest prefix of
     * these blocks that all of its nodes keep (kv_publish_begin()), and with their codes and
     * summaries.
     *
     * Sessions with the same first block are placed on the same nodes.  If these have too many
     * of them, the nodes spread later sessions over more rows of nodes.  As long as a root has
     * the same number of rows, sessions still share nodes if their prompts have block 16 in
     * common, or, of shorter prompts, the last of blocks 8, 4, 2 and 1.  Only the first 16
     * names count here.
     *
     * A session that is sent to other nodes than those that keep its prefix starts without it.
     * The client then copies the prefix there in the background, while it is polled, for later
     * sessions.  Only rows are copied: the first session that indexes them there
     * (kv_index_begin()) makes their codes and summaries, and until then its queries score
     * these rows by their keys. */
    const struct kv_id128 *block_names;
    uint32_t n_block_names;
    uint32_t match_blocks_max; /* maximum number of blocks to attach; 0: all */
    bool is_fresh;             /* attach nothing: the session starts without rows */
};

/* Creates a session for a model, on at most eight of the nodes, and registers the model there.
 * Which ones follows from the list of nodes and the ticket's root.  The session is empty,
 * unless `options` names blocks that the nodes keep; kv_op_tokens() returns how many tokens it
 * starts with.  `options` may be NULL.  kv_op_session() returns the session.
 *
 * Fails with KV_INVALID if the model's schema is invalid (kv_schema_finish()), and if one of
 * these nodes is down, naming it. */
KV_API kv_status_t kv_open_begin(struct kv_client *client,
                                 const struct kv_model_info *model,
                                 const struct kv_session_options *options,
                                 uint32_t deadline_ms,
                                 struct kv_op **ret_op);

/* Complete blocks of a session. */
struct kv_publish {
    uint32_t first_block; /* the block that names[0] belongs to */
    uint32_t n_names;
    const struct kv_id128 *names; /* (n_names), as kv_prompt_names() makes them */
    /* (n_names, KV_BLOCK_TOKENS) The blocks' tokens, for readers of the nodes' events; a node
     * that has an event feed keeps them, 4 bytes a token.  NULL: events have no tokens. */
    const uint32_t *tokens;
};

/* Makes the nodes keep blocks of the session under their names, also after the session has
 * ended: later sessions that are opened with the same names start with these rows.  The blocks
 * before `first_block` must have been attached by the open, or named by an earlier publish.
 * Blocks are kept up to the first one whose rows are not yet committed in all units; publish
 * the others later.  If a node already keeps a block of that name, its copy stays.  A node that
 * needs memory drops blocks that no session uses, in the order that its operator has chosen
 * (kvserver --eviction).  Does not change the generation.  kv_op_tokens() returns how many of
 * the session's first tokens all of its nodes keep.
 *
 * Fails with KV_UNSUPPORTED if the session was opened without the name of its first block,
 * since no later session would be placed on its nodes; with KV_CONFLICT if a block has been
 * given another name before; and with KV_INVALID if names before `first_block` are missing, or
 * if there are more than 32,768 names, or 1,024 with tokens. */
KV_API kv_status_t kv_publish_begin(struct kv_session *session,
                                    const struct kv_publish *publish,
                                    uint32_t deadline_ms,
                                    struct kv_op **ret_op);

/* Makes the nodes save on disk what the session shares by name, and ends when that is done:
 * what is saved outlasts them, also kill -9 and power cuts.  They save it anyway, about a
 * second after it was published.  Saved are the blocks that the session was opened with or has
 * published when the operation reaches a node; rows behind them are not, nor is anything of a
 * session without names.  kv_op_tokens() returns how many of the session's first tokens all of
 * its nodes have saved; 0 unless the operation succeeded.
 *
 * Fails with KV_NO_MEMORY if a node has no room on disk, and with KV_IO if its disk fails, or
 * has rows of a block that was evicted under the same name and that another session still needs:
 * the detail says which, and how many tokens it has saved; nothing is lost, and later operations
 * try again.
 * Fails with KV_CORRUPT if rows of the next block have gone bad in a node's memory: put them again.
 * Fails with KV_UNSUPPORTED at a node without a disk (kvserver --disk) or of a version below
 * 12.  After a deadline or a cancel the nodes go on all the same. */
KV_API kv_status_t kv_save_begin(struct kv_session *session,
                                 uint32_t deadline_ms,
                                 struct kv_op **ret_op);

/* How much of a prompt a node keeps. */
struct kv_match {
    uint32_t node;             /* its position in the client's list */
    uint32_t tokens;           /* of the longest prefix of which it keeps its whole part; 0 also
                                * if it has no part, since the model has fewer units than a
                                * row has nodes */
    uint32_t tokens_in_memory; /* of these, the first ones that are in memory */
};

/* Asks how much of a prompt is kept by the nodes on which its sessions, and those of its
 * beginnings, are placed, without opening a session: one message to each node of a row, and up
 * to five rows if the nodes have spread the root's sessions.  A node that is not connected
 * counts as keeping nothing; one that is, and does not answer, fails the match at its deadline.
 * kv_op_tokens() returns how many tokens an open would attach.
 *   names  (n_names) of the prompt's full blocks */
KV_API kv_status_t kv_match_begin(struct kv_client *client,
                                  const struct kv_id128 *names,
                                  uint32_t n_names,
                                  uint32_t deadline_ms,
                                  struct kv_op **ret_op);

/* Returns what each node keeps, the most first, and their number in *ret_n; a node that is in
 * several rows is listed for each of them.  Valid until the operation is freed.  NULL unless it
 * succeeded. */
KV_API const struct kv_match *kv_op_matches(const struct kv_op *op, uint32_t *ret_n);

#define KV_NODES_ALL UINT32_MAX

/* What to do with a prefix that nodes keep (kv_publish_begin()).  A prefix is a block and all
 * blocks before it in its prompt; it has the name of its last block. */
struct kv_prefix {
    enum kv_prefix_verb verb;
    const struct kv_id128 *name; /* NULL: the deepest prefix of the session */
    /* An open session of the client's tenant that has the block.  NULL: each node searches all
     * that it keeps, which takes seconds if it keeps millions of blocks. */
    const struct kv_id128 *session_id;
    /* KV_PREFIX_PIN: milliseconds, 0: until it is unpinned; KV_PREFIX_HINT: milliseconds until
     * it is used, at most KV_PREFIX_HINT_MAX_MS. */
    uint32_t for_ms;
};

/* Pins, unpins or evicts a prefix, or announces its use, on node number `node`, or on all nodes
 * (KV_NODES_ALL), since the blocks of a prompt are on several.  Each node that is asked must be
 * connected.  kv_op_blocks() returns how many blocks were found, or evicted; 0: no node keeps
 * that name.
 *
 * KV_PREFIX_PIN     Keeps the prefix even if memory is short.  A later pin replaces an
 *                   earlier one.
 * KV_PREFIX_UNPIN   Removes the pin.
 * KV_PREFIX_EVICT   Drops the block and all blocks that follow it, pinned or not.  Sessions
 *                   that have them keep their rows.  If rows that a session started with are
 *                   corrupt (KV_CORRUPT), evict their block by its name on all nodes: later
 *                   sessions then compute it again.
 * KV_PREFIX_HINT    Announces that the prefix will be used after that time.  Until then it
 *                   counts as the most recently used.
 *
 * Fails with KV_UNSUPPORTED at nodes whose version keeps no prefixes. */
KV_API kv_status_t kv_prefix_begin(struct kv_client *client,
                                   uint32_t node,
                                   const struct kv_prefix *prefix,
                                   uint32_t deadline_ms,
                                   struct kv_op **ret_op);

/* Returns the number of blocks that a prefix operation found or evicted: of several nodes, the
 * largest.  If the reply to an eviction is lost, the request is sent again and evicts what is
 * left: the number may then be too low, but never too high. */
KV_API uint64_t kv_op_blocks(const struct kv_op *op);

/* Opens an existing session by its ticket, whichever client created it.  Brings nodes up to
 * date that missed a fork or a truncate.  kv_op_session() returns the session, kv_op_tokens()
 * its committed length.
 *
 * Fails with KV_NOT_FOUND if no such session exists, with KV_DENIED if it belongs to another
 * tenant, with KV_STALE if a node missed more forks and truncates than the others have
 * logged, and with KV_CONFLICT if two clients truncated it at once and each reached a part of
 * the nodes. */
KV_API kv_status_t kv_resume_begin(struct kv_client *client,
                                   const struct kv_ticket *ticket,
                                   uint32_t deadline_ms,
                                   struct kv_op **ret_op);

/* Creates a session that shares the first `tokens` tokens; no rows are copied.  Waits for the
 * session's outstanding operations first.  Does not affect the session and its other clients,
 * unless one of its nodes speaks a version of the protocol below 9: then the generation is
 * incremented, as by a truncate.  kv_op_session() returns the new session.
 *
 * Fails with KV_INVALID if fewer than `tokens` tokens are committed, and with KV_TOO_LARGE if
 * the rows would have more writers than a session may have (forks of forks). */
KV_API kv_status_t kv_fork_begin(struct kv_session *session,
                                 uint32_t tokens,
                                 uint32_t deadline_ms,
                                 struct kv_op **ret_op);

/* Discards all tokens from `tokens` on.  Waits for the session's outstanding operations first.
 * Increments the generation: the session's other clients get KV_STALE until they resume. */
KV_API kv_status_t kv_truncate_begin(struct kv_session *session,
                                     uint32_t tokens,
                                     uint32_t deadline_ms,
                                     struct kv_op **ret_op);

/* Closes the session and frees its memory on its nodes; waits for its outstanding operations
 * first.  After that, the only valid call on the handle is kv_session_free(). */
KV_API kv_status_t kv_close_begin(struct kv_session *session,
                                  uint32_t deadline_ms,
                                  struct kv_op **ret_op);

/* Sets the lease to lease_ms milliseconds and starts it again; 0: the same lease.  The
 * library renews leases by itself while the client is polled, or has a thread.  After one has
 * expired, every operation of the session fails with KV_NOT_FOUND.  A node remembers the last
 * 512 sessions that ended; for those, the detail says how long ago the session ended. */
KV_API kv_status_t kv_renew_begin(struct kv_session *session,
                                  uint32_t lease_ms,
                                  uint32_t deadline_ms,
                                  struct kv_op **ret_op);

/* Requests the committed length, in tokens: the minimum over all units.  kv_op_tokens() returns
 * it, and kv_op_layer_tokens() that of each layer. */
KV_API kv_status_t kv_length_begin(struct kv_session *session,
                                   uint32_t deadline_ms,
                                   struct kv_op **ret_op);

/* Transfers the session of an open, resume or fork that succeeded (free with
 * kv_session_free()).  Returns NULL if the operation has not succeeded, or if the session was
 * transferred before. */
KV_API struct kv_session *kv_op_session(struct kv_op *op);

/* Returns the tokens that an open, publish, save, match, resume, fork, truncate or length
 * operation reports. */
KV_API uint32_t kv_op_tokens(const struct kv_op *op);

/* Returns the committed length of one layer, in tokens, that a length operation reports: the
 * minimum over its kv heads, so rows before it can be read without waiting.  Of nodes that
 * speak no version 9 of the protocol, only the minimum over all layers is known, and counts for
 * each.  0 unless the operation succeeded. */
KV_API uint32_t kv_op_layer_tokens(const struct kv_op *op, uint32_t layer);

/* Properties of a session.  The schema is valid until the session is freed; the generation and
 * the lease (milliseconds, as granted) are as of the last reply. */
KV_API void kv_session_ticket(const struct kv_session *session, struct kv_ticket *ret_ticket);
KV_API const kv_schema_t *kv_session_schema(const struct kv_session *session);
KV_API uint32_t kv_session_generation(const struct kv_session *session);
KV_API uint32_t kv_session_lease_ms(const struct kv_session *session);
/* The fingerprint of the model that the session was opened for. */
KV_API void kv_session_fingerprint(const struct kv_session *session,
                                   struct kv_id128 *ret_fingerprint);

/* Cancels the session's outstanding operations and frees the handle.  The session stays in the
 * nodes until its lease expires.  `session` may be NULL. */
KV_API void kv_session_free(struct kv_session *session);

/* ---- rows -------------------------------------------------------------------------------- */

/* A range of rows: layers x kv heads x tokens. */
struct kv_rows {
    uint32_t layer_begin, n_layers;
    uint32_t kv_head_begin, n_kv_heads; /* n_kv_heads 0: all kv heads of each layer */
    uint32_t token_begin, n_tokens;
};

/* Where rows are in the caller's memory. */
struct kv_rows_io {
    struct kv_buffer *buffer;
    size_t offset; /* in bytes, of (n_layers, n_kv_heads, n_tokens, row_bytes), dense */
    /* (n_layers, n_kv_heads, n_tokens) CRCs, or NULL.  put, append: input, see kv_row_crc();
     * NULL: the library computes them.  read, fetch: output, complete when the operation
     * has ended. */
    uint32_t *crcs;
};

/* Returns the bytes of a range of rows; 0 if the range does not fit the schema. */
KV_API size_t kv_rows_bytes(const kv_schema_t *schema, const struct kv_rows *rows);

/* Computes the CRC32C of one row (row_bytes) at its place in this session.  The seed depends on
 * the session, layer, kv head and token, so the same bytes have other CRCs elsewhere.  A
 * truncate may change the seeds of the tokens that it discards: compute their CRCs after it has
 * ended.  After one that has failed they may still change, until an operation on the session has
 * succeeded: a put with other CRCs fails with KV_CORRUPT, and stores nothing. */
KV_API uint32_t kv_row_crc(const struct kv_session *session,
                           const void *row,
                           size_t row_bytes,
                           uint32_t layer,
                           uint32_t kv_head,
                           uint32_t token);

/* Stores rows.  Rows are committed in token order: in each unit, token_begin must not exceed
 * the committed length plus the rows of outstanding puts.  Puts of one session handle that
 * are begun between two polls may be begun in any order.  The thread of `progress_thread`
 * polls at any time: with it, begin them in token order.
 *
 * Fails with KV_NOT_READY at once if rows before token_begin are missing, with KV_CONFLICT if
 * different rows are already committed there, with KV_TOO_LARGE beyond the session's
 * tokens_max, and with KV_NO_MEMORY if the store is full.  The message that failed then stored
 * nothing, but other messages of the same put may have succeeded; repeating the put is safe. */
KV_API kv_status_t kv_put_begin(struct kv_session *session,
                                const struct kv_rows *rows,
                                const struct kv_rows_io *io,
                                uint32_t deadline_ms,
                                struct kv_op **ret_op);

/* Stores the new rows of a decode step.  As kv_put_begin(), for few tokens and all layers: one
 * message per data thread, at a higher priority. */
KV_API kv_status_t kv_append_begin(struct kv_session *session,
                                   const struct kv_rows *rows,
                                   const struct kv_rows_io *io,
                                   uint32_t deadline_ms,
                                   struct kv_op **ret_op);

/* An entry of a batch: the arguments of its begin, and what came of it. */
struct kv_append_entry {
    struct kv_session *session;
    const struct kv_rows *rows;
    const struct kv_rows_io *io;
    struct kv_op *op;   /* out: the operation; NULL if it was not begun */
    kv_status_t status; /* out: of its begin */
};

/* Begins one append for each entry, of sessions of one client: the decode step of a batch of
 * sequences.  Entries of up to 32 KiB that go to one data thread travel together.  Each entry
 * is an operation of its own, with its own outcome, and uses the memory of earlier ones: once
 * there have been as many, nothing is allocated.
 *
 * Returns the first failure of a begin; the other entries are begun all the same. */
KV_API kv_status_t kv_append_begin_batch(struct kv_append_entry *entries,
                                         size_t n_entries,
                                         uint32_t deadline_ms);

/* Reads a range of rows.  Waits until all its rows are committed; fails with KV_NOT_READY if
 * they are not by the deadline. */
KV_API kv_status_t kv_read_begin(struct kv_session *session,
                                 const struct kv_rows *rows,
                                 const struct kv_rows_io *io,
                                 uint32_t deadline_ms,
                                 struct kv_op **ret_op);

/* Selected rows of one layer, for kv_fetch_begin(). */
struct kv_fetch {
    uint32_t layer;
    uint32_t kv_head_begin, n_kv_heads; /* n_kv_heads 0: all */
    const uint32_t *n_ids;              /* (n_kv_heads) rows requested of each head */
    const uint32_t *ids;                /* (sum of n_ids) tokens, head by head */
    /* Tokens that must be committed first in every head that has ids; 0: those up to the
     * greatest id of any of them. */
    uint32_t snapshot;
};

/* Reads rows of one layer by token, from all nodes that own its heads.  The rows are written
 * dense, in the order of `ids`, and so are the CRCs.  Waits and fails as kv_read_begin(). */
KV_API kv_status_t kv_fetch_begin(struct kv_session *session,
                                  const struct kv_fetch *fetch,
                                  const struct kv_rows_io *io,
                                  uint32_t deadline_ms,
                                  struct kv_op **ret_op);

/* ---- retrieval --------------------------------------------------------------------------- */

/* Which codes kv_index_begin() builds, and how. */
struct kv_index_options {
    uint32_t layer_begin, n_layers; /* n_layers 0: all */
    uint32_t tokens;                /* rows before this token; they must be committed */
    /* Blocks that share a codebook (a chapter), at least KV_CHAPTER_BLOCKS_MIN, counted from
     * token 0; an incomplete chapter at the end has no codes.  0: one codebook for all rows,
     * and a later row is coded with it when a query first reads the row. */
    uint32_t chapter_blocks;
    uint32_t m;    /* subspaces of a key, 1..KV_SUBSPACES_MAX; d_k is a multiple of m */
    uint32_t bits; /* of a code, 1..KV_CODE_BITS_MAX */
    /* Codes are of rotated keys: the principal components of a unit's first keys, dealt to the
     * subspaces so that their variances are even.  No bytes a row, a matrix for a unit, and
     * fewer rows that the codes miss (OPQ: Ge et al., 2013).  d_k is at most 256. */
    bool rotates;
    /* Beside the codes, copies of the keys in 4 bits, for queries with a first cut: half of d_k,
     * in whole 16 bytes, and 2 bytes a row.  Rows that have codes already keep them, without
     * copies if they have none: a first cut scores such rows by their keys. */
    bool copies;
    uint32_t iterations; /* of k-means at most, 1..KV_KMEANS_ITERATIONS_MAX */
    uint32_t budget_us;  /* microseconds of a node's time for each codebook; 0: no limit */
    uint64_t seed;       /* of k-means */
    uint32_t summaries; /* cluster summaries to build per summary_rows, for queries that request
                            an estimate: 0 (none), 16 or 64 */
    uint32_t
        summary_rows; /* 1,024 or 3,072; 0: 1,024.  Nodes that do not know 3,072 are refused
                              with KV_UNSUPPORTED */
    bool wait; /* end when the codes exist, or at the deadline; false: when the nodes know */
};

struct kv_index_result {
    uint64_t rows;       /* (token, kv head, layer) requested */
    uint64_t rows_coded; /* of them with codes, when the nodes replied */
    uint32_t n_found;    /* codebooks that existed before */
    uint32_t n_trained;  /* codebooks that this operation waited for */
    uint32_t n_pending;  /* codebooks that are not built yet */
    uint32_t iterations; /* of k-means, summed over n_trained */
    uint64_t train_us;   /* microseconds of the nodes' threads, summed over n_trained */
    uint64_t busiest_us; /* of them, the most that one message took: with few units, one of the
                            slowest data thread of all nodes */
};

/* Builds product-quantized codes for the keys of committed rows, in the background on the nodes
 * (PQCache, arXiv:2407.12820, section 3.2).  Rows that already have codes keep them, and rows whose codes a node
 * has on disk get these, in the chapters in which they were made.  Queries
 * work without codes, but cost more. */
KV_API kv_status_t kv_index_begin(struct kv_session *session,
                                  const struct kv_index_options *index,
                                  uint32_t deadline_ms,
                                  struct kv_op **ret_op);

/* Returns what an index operation did; zeros unless it succeeded. */
KV_API void kv_op_index_result(const struct kv_op *op, struct kv_index_result *ret_result);

/* Tokens [begin, end). */
struct kv_range {
    uint32_t begin, end;
};

/* A block of a kv head whose rows the caller has; see kv_block_fingerprint(). */
struct kv_cached_block {
    uint32_t block;
    uint32_t fingerprint;
};

/* Selects the rows of one layer that matter most to some query vectors:
 *
 *   1  Candidates.  Every eligible row (a token of `ranges`) is scored by its code, or by its
 *      key if it has no code.  A softmax over scale * score gives each query vector's weights;
 *      `merge` combines the vectors.  The rerank * k rows of largest weight become candidates.
 *   2  Rerank.  Candidates are scored by their keys, weighted and merged again.  The k rows of
 *      largest weight are selected.
 *   3  Result.  The ids, the rows, or the attention output over the selected rows; with
 *      `summaries`, an estimate of what the other eligible rows would have added.  An output
 *      comes with its natural log-sum-exp, so that the caller can combine it with attention
 *      over other rows (FlashAttention, arXiv:2205.14135, section 3.1).
 *
 * With a first cut (KV_CUT_INT4), step 1 takes candidates * k rows, whose copies in 4 bits
 * (kv_index_options.copies) are scored before step 2, and the rerank * k rows of largest weight go
 * on: copies find what codes miss, and are a quarter of the bytes of keys.  With rerank 1 they
 * select the rows.  Candidates without a copy are scored by their keys.
 *
 * The weights returned are those of step 2, which is then taken in any case, or of step 1 if rerank
 * is 1 and there is no first cut.  If step 1 would take every eligible row, it is skipped, and
 * n_scored_by_code and n_scored_by_key are 0.
 *
 * Ties go to the lower token.  If fewer than k rows are eligible, all are selected.  To
 * prefetch, begin the query early: the rows wait in the caller's buffer. */
struct kv_query {
    uint32_t layer;
    uint32_t kv_head_begin, n_kv_heads; /* n_kv_heads 0: all */
    uint32_t n_queries;                 /* query vectors of each kv head, 1..KV_QUERIES_MAX */
    const float *queries;               /* (n_kv_heads, n_queries, d_k) */
    float scale;                        /* > 0; usually 1 / sqrt(d_k) */
    enum kv_merge merge;
    enum kv_answer answer;
    uint32_t k;                  /* 1..KV_SELECTED_MAX; with UNION and NONE, of each vector */
    enum kv_selection selection; /* how many rows are selected, at most k; 0: k */
    float fraction;              /* 0 with KV_SELECT_TOP; else above 0, at most 1 */
    /* Rows per selected row that step 2 scores, from 1.  With KV_SELECT_TOP, rerank * k, and with a
     * first cut candidates * k, is at most KV_CANDIDATES_MAX (UNION, NONE, and nodes of a version
     * below 10: KV_SELECTED_MAX) unless fewer rows are eligible; with the others, so many are
     * taken. */
    uint32_t rerank;
    enum kv_first_cut first_cut; /* 0: none.  Others need nodes of version 10 */
    uint32_t candidates;         /* per selected row, rerank to 65,535; 0 without a first cut */
    /* (n_kv_heads) of each head instead, at most as many: `candidates`, or `rerank` where there is
     * no first cut; NULL: all alike. */
    const uint32_t *candidates_each;
    bool want_reads;    /* kv_op_query_reads() */
    bool want_weights;  /* return the merged weights; KV_ANSWER_ATTEND: of the ids returned */
    bool want_ids;      /* KV_ANSWER_ATTEND: return all selected ids, not only cached ones */
    uint32_t summaries; /* summaries per summary_rows for the estimate of step 3: 0 (no
                           estimate), 16 or 64; rows without so many are attended exactly */
    uint32_t
        summary_rows;  /* of the index, whose summaries they are: 1,024 or 3,072; 0: 1,024 */
    uint32_t snapshot; /* tokens that must be committed; 0: those that the ranges need */
    uint32_t n_ranges; /* 1..KV_RANGES_MAX */
    const struct kv_range *ranges;        /* (n_ranges) eligible rows: ascending, disjoint */
    const uint32_t *n_cached;             /* (n_kv_heads); NULL: none */
    const struct kv_cached_block *cached; /* (sum of n_cached) ascending in each head; rows
                                             are selected like others, but not sent, unless
                                             the node's block has another fingerprint */
};

/* Returns the most bytes that the rows of a result can take; 0 if the query does not fit the
 * schema. */
KV_API size_t kv_query_rows_bytes_max(const kv_schema_t *schema, const struct kv_query *query);

/* Runs a query.  `io` is used with KV_ANSWER_ROWS only and may be NULL otherwise: rows are
 * written to kv_query_rows_bytes_max() bytes of its buffer, from `offset` on; `crcs` is not
 * used.
 *
 * Fails with KV_TOO_LARGE if the rows of one head may take more than 1 MiB (use KV_ANSWER_IDS
 * and kv_fetch_begin()), with KV_INVALID if a row that attention needs has a NaN or an
 * infinity, and with KV_NOT_READY if `snapshot` tokens are not committed by the deadline. */
KV_API kv_status_t kv_query_begin(struct kv_session *session,
                                  const struct kv_query *query,
                                  const struct kv_rows_io *io,
                                  uint32_t deadline_ms,
                                  struct kv_op **ret_op);

struct kv_query_entry {
    struct kv_session *session;
    const struct kv_query *query;
    const struct kv_rows_io *io; /* with KV_ANSWER_ROWS; else it may be NULL */
    struct kv_op *op;            /* out: the operation; NULL if it was not begun */
    kv_status_t status;          /* out: of its begin */
};

/* Begins one query for each entry, as kv_append_begin_batch() does: one layer of a batch of
 * sequences. */
KV_API kv_status_t kv_query_begin_batch(struct kv_query_entry *entries,
                                        size_t n_entries,
                                        uint32_t deadline_ms);

#define KV_ROW_CACHED UINT32_MAX

/* The result for one kv head. */
struct kv_query_result {
    uint32_t n_ids;
    const uint32_t *ids; /* (n_ids) tokens, ascending */
    /* (n_ids) index of the row in `rows`, or KV_ROW_CACHED if the caller has it.
     * KV_ANSWER_ATTEND: KV_ROW_CACHED if the row is left out of `outputs`, else 0.
     * KV_ANSWER_IDS: NULL. */
    const uint32_t *row_index;
    uint32_t n_rows;
    const void *rows;           /* (n_rows, row_bytes), ascending by token; in the buffer */
    const uint32_t *crcs;       /* (n_rows), checked */
    const float *weights;       /* (n_ids) merged weights; NULL if not requested */
    const uint32_t *query_mask; /* (n_ids) with KV_MERGE_NONE: bit i is set if query vector i
                                   selected the row; else NULL */
    /* With KV_ANSWER_ATTEND: attention over the selected rows that are not cached.  With
     * `summaries`: plus the estimate for the rows that were not selected.  Else NULL. */
    const float *outputs;      /* (n_queries, d_v) */
    const float *lses;         /* (n_queries) natural log-sum-exps; -inf: over no row */
    uint32_t n_selected;       /* rows selected, whether or not they are in `ids` */
    uint32_t n_estimated;      /* rows that summaries stand for; with NONE, for some vector */
    uint32_t n_scored_by_code; /* eligible rows that step 1 scored by code */
    uint32_t n_scored_by_key;  /* eligible rows that step 1 scored by key */
    uint32_t n_reranked;       /* candidates that were scored by key; with a first cut, those
                                * without a copy may count twice */
    uint32_t n_chapters;       /* codebooks used */
    float recall;              /* of exact top-k, estimated by the node; NaN: unknown */
    uint32_t node;             /* that replied: its position in the client's list */
    uint32_t queue_us;   /* microseconds in the node before work began, of the whole message */
    uint32_t service_us; /* microseconds from there to the reply, of the whole message; entries
                          * of a batch over forks of a session are at work together */
};

/* Returns the result for one kv head; `head` counts from kv_head_begin.  Its arrays are valid
 * until the operation is freed; `rows`, while the caller keeps the buffer unchanged.  Fails
 * with KV_INVALID unless `op` is a query that succeeded and has such a head. */
KV_API kv_status_t kv_op_query_result(const struct kv_op *op,
                                      uint32_t head,
                                      struct kv_query_result *ret_result);

/* Bytes that nodes read of their memory for a query, as they have counted them. */
struct kv_query_reads {
    uint64_t books;  /* codebooks, and matrices of rotations */
    uint64_t codes;  /* or lists of rows by code */
    uint64_t copies; /* of candidates' keys */
    uint64_t keys;   /* scored exactly */
    uint64_t rows;   /* attended, or returned */
    uint64_t summaries;
};

/* Returns what all nodes read; zeros unless `op` is a query that succeeded, with want_reads, and all
 * nodes of its session were connected when it began and count (version 10). */
KV_API void kv_op_query_reads(const struct kv_op *op, struct kv_query_reads *ret_reads);

/* Returns a hash of a block's row CRCs in one kv head.  It distinguishes blocks with the same
 * number and different rows.
 *   crcs  (KV_BLOCK_TOKENS) */
KV_API uint32_t kv_block_fingerprint(const uint32_t *crcs);

/* When an operation was where: microseconds of the client's clock; 0: not yet. */
struct kv_op_times {
    uint64_t begun_us;
    uint64_t sent_us;    /* when its last message was first given to the transport */
    uint64_t arrived_us; /* when its last reply arrived */
    uint64_t node_us;    /* how long the node had the message whose reply came last, waiting and
                          * at work; 0: less than a microsecond, or a node that does not say */
    uint64_t ended_us;
};
KV_API void kv_op_get_times(const struct kv_op *op, struct kv_op_times *ret_times);

/* Returns the client's clock, in microseconds. */
KV_API uint64_t kv_client_now_us(const struct kv_client *client);

/* ---- objects ----------------------------------------------------------------------------- */

/* An object: immutable bytes under the caller's name, for callers that have keys and blobs but
 * no tokens. */
struct kv_object {
    const char *name; /* 1..KV_NAME_BYTES_MAX bytes, 0-terminated */
    struct kv_buffer *buffer;
    size_t offset;      /* in the buffer, in bytes */
    size_t bytes;       /* put: size; get: in: capacity, out: size; exists: out: size */
    kv_status_t status; /* out: of this object */
    uint32_t ttl_ms;    /* put: milliseconds after which the node removes it, at most
                           KV_OBJECT_TTL_MAX_MS; 0: the node's default (kvserver --object-ttl);
                           KV_OBJECT_TTL_NONE: never */
    bool evictable; /* put: the node may remove it when memory, or its room on disk, is short,
                           the least recently used first: for copies of what can be had again.
                           Other objects are never removed; when they fill both, puts fail with
                           KV_NO_MEMORY */
};

/* Runs one verb on n_objects objects, in parallel.  Keeps `objects` until the operation ends,
 * and writes the `status` and `bytes` of each; names are copied.  Each object has its own
 * status: a node that cannot be reached fails only its objects.  The operation succeeds if all
 * objects do; else its status is that of the first object that failed.  Fails with KV_TOO_LARGE
 * if an object to put has more than KV_OBJECT_BYTES_MAX bytes. */
KV_API kv_status_t kv_objects_begin(struct kv_client *client,
                                    enum kv_object_verb verb,
                                    struct kv_object *objects,
                                    size_t n_objects,
                                    uint32_t deadline_ms,
                                    struct kv_op **ret_op);

/* Where a list of objects continues; {0}: at the beginning. */
struct kv_object_cursor {
    uint32_t thread;
    uint64_t after, until;
};

struct kv_object_list_options {
    const char *prefix; /* the beginning of the names; NULL: all names */
    uint32_t limit;     /* maximum number of objects in one list, at most 1000; 0: 1000 */
    bool deletes;       /* delete and count the objects instead of listing them */
    struct kv_object_cursor from;
};

struct kv_object_info {
    const char *name; /* as it was put; may contain control characters */
    uint64_t bytes;
    uint64_t age_ms;      /* since its first put */
    uint64_t ttl_left_ms; /* UINT64_MAX: it does not expire */
    uint32_t bad_pieces;  /* damaged, in memory or on disk: rejected until it is put again */
    bool evictable;
    bool pinned; /* a transfer uses it, or it is being saved or verified */
};

struct kv_object_list {
    uint32_t n_objects; /* may be 0 although there are more */
    const struct kv_object_info *objects;
    uint64_t n_deleted, bytes_deleted;
    bool is_last; /* there are no more on this node */
    struct kv_object_cursor next;
};

/* Lists objects of the client's tenant on one node, or deletes them, up to `limit` at a time;
 * the objects of one data thread in the order in which they were first put.  An object that is
 * put after the first list was made may be in no list.  If the reply to a deletion is lost, the
 * request is sent again and deletes what is left: n_deleted may then be too low, but never too
 * high.  Fails with KV_UNSUPPORTED on a node of a version below 9. */
KV_API kv_status_t kv_object_list_begin(struct kv_client *client,
                                        uint32_t node,
                                        const struct kv_object_list_options *options,
                                        uint32_t deadline_ms,
                                        struct kv_op **ret_op);

/* Returns the list; NULL unless the operation succeeded.  Valid until the operation is
 * freed. */
KV_API const struct kv_object_list *kv_op_object_list(const struct kv_op *op);

/* ---- nodes ------------------------------------------------------------------------------- */

#include "client/include/kvclient_nodes.h"

/* Names the full blocks of a prompt, KV_BLOCK_TOKENS tokens each; equal names mean equal keys
 * and values.  A name is the first 128 bits of SHA-256 over the parent's name (zeros for the
 * first block), the model's fingerprint, the client's salt, the extra keys whose tokens the
 * block has, in their order and with their places, and the block's tokens
 * (kvserver/base/hash.h).
 *   tokens     (n_tokens)
 *   keys       (n_keys)
 *   ret_names  (n_tokens / KV_BLOCK_TOKENS) */
KV_API void kv_prompt_names(const struct kv_client *client,
                            const struct kv_model_info *model,
                            const uint32_t *tokens,
                            uint32_t n_tokens,
                            const struct kv_extra_key *keys,
                            uint32_t n_keys,
                            struct kv_id128 *ret_names);

/* Returns the library's version, "0.1.0".  The string is static. */
KV_API const char *kv_client_version(void);

#ifdef __cplusplus
}
#endif
#endif
