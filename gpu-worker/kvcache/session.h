/* session.h - a model's session in the store, and rows on their way to it.
 *
 * What every method has: it opens a session, sends each layer's rows behind the computation,
 * and may go on for a while in a fork, which shares the rows so far and takes nothing with it
 * when it is closed.
 *
 * Threads: one at a time.  Memory: create/destroy; keeps what the setup names.
 */
#ifndef KV_GPU_WORKER_KVCACHE_SESSION_H
#define KV_GPU_WORKER_KVCACHE_SESSION_H

#include "gpu-worker/kvcache/setup.h"

struct kvw_session;

/* Opens a session of the model.  `detail`: `what: where: value`. */
kv_status_t kvw_session_create(const struct kvw_session_setup *setup,
                               struct kvw_session **ret_store,
                               char *detail,
                               size_t detail_bytes);
/* Closes the session, and with it the store's rows.  NULL is allowed. */
void kvw_session_destroy(struct kvw_session *store);

/* Of the fork, while there is one. */
struct kv_session *kvw_session_handle(const struct kvw_session *store);

/* A layer's new rows: those of `rows`, a buffer of device.h's cached rows, that begin at index
 * `first` in each kv head, `capacity` apart.  They are the tokens from token_begin on.  Rows of
 * a decode step leave with kvw_session_end_pass(). */
kv_status_t kvw_session_put(struct kvw_session *store,
                            enum kvw_phase phase,
                            uint32_t layer,
                            uint32_t token_begin,
                            uint32_t n,
                            const struct kvw_device_buffer *rows,
                            size_t capacity,
                            size_t first);
/* A pass is over: its tokens are on their way in all layers. */
kv_status_t
kvw_session_end_pass(struct kvw_session *store, enum kvw_phase phase, uint32_t token_begin);
/* Lets rows move, without waiting. */
kv_status_t kvw_session_poll(struct kvw_session *store);

/* Forgets the tokens from `tokens` on. */
kv_status_t kvw_session_truncate(struct kvw_session *store, uint32_t tokens);
/* Waits until the store has every row. */
kv_status_t kvw_session_flush(struct kvw_session *store);
/* Goes on in a fork, which has `tokens` tokens.  KV_UNSUPPORTED: in one already. */
kv_status_t kvw_session_enter_fork(struct kvw_session *store, uint32_t tokens);
/* Closes it, and is back in the session that it is a fork of. */
kv_status_t kvw_session_leave_fork(struct kvw_session *store);

/* Keeps a failure that a method met in its own operations, to be told by detail(). */
kv_status_t kvw_session_fail(struct kvw_session *store, kv_status_t status);

/* What went wrong, "" if nothing did. */
const char *kvw_session_detail(const struct kvw_session *store);
uint64_t kvw_session_bytes_put(const struct kvw_session *store);
double kvw_session_wait_s(const struct kvw_session *store);

#endif
