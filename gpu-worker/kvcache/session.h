/* session.h - a model's session in the store, and the rows being sent to it.
 *
 * Every method has one: it opens a session, sends each layer's rows while the computation goes
 * on, and may continue for a while in a fork, which shares the rows so far; closing the fork
 * leaves the session as it was.
 *
 * Threads: one at a time.  Memory: create/destroy; keeps what the setup names.
 */
#ifndef KV_GPU_WORKER_KVCACHE_SESSION_H
#define KV_GPU_WORKER_KVCACHE_SESSION_H

#include "gpu-worker/kvcache/setup.h"

struct kvw_session;

/* Opens a session of the model, or begins to, as the setup says.  `detail`: `what: where:
 * value`. */
kv_status_t kvw_session_create(const struct kvw_session_setup *setup,
                               struct kvw_session **ret_store,
                               char *detail,
                               size_t detail_bytes);
/* Closes the session, and with it the store's rows, unless the setup says that it is kept.  NULL
 * is allowed. */
void kvw_session_destroy(struct kvw_session *store);

/* With setup.opens_later: KV_IN_PROGRESS until the session is open, then KV_OK, or why it
 * cannot be (kvw_session_detail()).  Before that it has no handle and takes no rows. */
kv_status_t kvw_session_opened(struct kvw_session *store);

/* Returns the handle of the fork if one is open, else of the session. */
struct kv_session *kvw_session_handle(const struct kvw_session *store);

/* Whether another worker may still be bringing rows; if so, whether the wait for them is to end,
 * and a call of the share's `arrived`. */
bool kvw_session_is_arriving(const struct kvw_session *store);
bool kvw_session_is_stopped(const struct kvw_session *store);
void kvw_session_tell_arrived(const struct kvw_session *store,
                              uint32_t layer,
                              uint32_t tokens,
                              uint32_t needed);

/* Sends a layer's new rows, those of the tokens from token_begin on.  `rows` is a buffer of
 * rows as device.h has them; the new ones begin at index `first` of each kv head, and kv heads
 * are `capacity` rows apart.  Rows of a decode step are sent by kvw_session_end_pass(). */
kv_status_t kvw_session_put(struct kvw_session *store,
                            enum kvw_phase phase,
                            uint32_t layer,
                            uint32_t token_begin,
                            uint32_t n,
                            const struct kvw_device_buffer *rows,
                            size_t capacity,
                            size_t first);
/* Ends a pass: afterwards its rows are being sent in all layers. */
kv_status_t
kvw_session_end_pass(struct kvw_session *store, enum kvw_phase phase, uint32_t token_begin);
/* Makes progress on transfers, without waiting. */
kv_status_t kvw_session_poll(struct kvw_session *store);
/* Whether rows of a step can be sent without waiting for earlier ones. */
bool kvw_session_takes_rows(const struct kvw_session *store);
/* Waits until an operation of the session's client ends, at most so long. */
void kvw_session_wait(struct kvw_session *store, uint64_t timeout_us);

/* Returns how many tokens of the prompt the session began with, which need not be computed. */
uint32_t kvw_session_reused(const struct kvw_session *store);
/* Asks the store how many tokens all units of the session have; 0 if it cannot tell. */
uint32_t kvw_session_stored(const struct kvw_session *store);
/* Has the store keep the full blocks of these tokens, the session's first, for others
 * (setup.publishes; else does nothing).  Blocks whose rows are still on their way are kept by a
 * later call.  `waits`: all are, when the call returns.  A failure is not the session's: nobody
 * then reuses them.  Nor does anybody what was made in a session that another worker began: how
 * is not known here.
 *   tokens  (n_tokens) */
void kvw_session_publish(struct kvw_session *store,
                         const uint32_t *tokens,
                         uint32_t n_tokens,
                         bool waits);

/* The session is not kept for others after all: it is closed at the end. */
void kvw_session_let_go(struct kvw_session *store);

/* Rows that the session began with are corrupt: it is not kept for others, and the store is to keep
 * the prompt's blocks no longer, whatever follows them.  Returns whether it did, and no longer does. */
bool kvw_session_disown(struct kvw_session *store, const uint32_t *prompt);

/* Rows from this token on are made from attention to some of the rows: under their names others
 * would take them for what full attention makes.  They are not published. */
void kvw_session_approximate(struct kvw_session *store, uint32_t token_begin);

/* Forgets the tokens from `tokens` on. */
kv_status_t kvw_session_truncate(struct kvw_session *store, uint32_t tokens);
/* Waits until the store has every row. */
kv_status_t kvw_session_flush(struct kvw_session *store);
/* The same without waiting: KV_IN_PROGRESS until it has. */
kv_status_t kvw_session_flushed(struct kvw_session *store);
/* Publishes what kvw_session_publish() would with `waits`, of tokens that are flushed, and
 * closes the session unless it is kept, without waiting: call until it returns true, with the
 * same tokens, and then destroy it.  NULL tokens: publishes nothing.  Not in a fork. */
bool kvw_session_leave(struct kvw_session *store, const uint32_t *tokens, uint32_t n_tokens);
/* Forks the session at `tokens` tokens and continues in the fork.  Fails with KV_UNSUPPORTED in
 * a fork. */
kv_status_t kvw_session_enter_fork(struct kvw_session *store, uint32_t tokens);
/* Closes the fork and returns to the session that it was forked from. */
kv_status_t kvw_session_leave_fork(struct kvw_session *store);

/* Records a failure of a method's own operation for kvw_session_detail(); returns `status`. */
kv_status_t kvw_session_fail(struct kvw_session *store, kv_status_t status);

/* Records a failure that the client does not know of; returns `status`. */
kv_status_t
kvw_session_refuse(struct kvw_session *store, kv_status_t status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Returns the first error, or "". */
const char *kvw_session_detail(const struct kvw_session *store);
uint64_t kvw_session_bytes_put(const struct kvw_session *store);
/* Counts rows of all its kv heads that were read from the store, of one layer; and what they were,
 * all together, in bytes. */
void kvw_session_count_read(struct kvw_session *store, const struct kv_rows *rows);
uint64_t kvw_session_bytes_read(const struct kvw_session *store);
double kvw_session_wait_s(const struct kvw_session *store);

#endif
