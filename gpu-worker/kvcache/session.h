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

struct kv_store_session;

/* Opens a session of the model.  `detail`: `what: where: value`. */
kv_status_t kv_store_session_create(const struct kvw_session_setup *setup,
                                    struct kv_store_session **ret_store,
                                    char *detail,
                                    size_t detail_bytes);
/* Closes the session, and with it the store's rows.  NULL is allowed. */
void kv_store_session_destroy(struct kv_store_session *store);

/* Of the fork, while there is one. */
struct kv_session *kv_store_session_handle(const struct kv_store_session *store);

/* A layer's new rows: those of `rows`, a buffer of device.h's cached rows, that begin at index
 * `first` in each kv head, `capacity` apart.  They are the tokens from token_begin on.  Rows of
 * a decode step leave with kv_store_session_passed(). */
kv_status_t kv_store_session_put(struct kv_store_session *store,
                                 enum kv_phase phase,
                                 uint32_t layer,
                                 uint32_t token_begin,
                                 uint32_t n,
                                 const struct kv_device_buffer *rows,
                                 size_t capacity,
                                 size_t first);
/* A pass is over: its tokens are on their way in all layers. */
kv_status_t kv_store_session_passed(struct kv_store_session *store,
                                    enum kv_phase phase,
                                    uint32_t token_begin);
/* Lets rows move, without waiting. */
kv_status_t kv_store_session_poll(struct kv_store_session *store);

/* Forgets the tokens from `tokens` on. */
kv_status_t kv_store_session_truncate(struct kv_store_session *store, uint32_t tokens);
/* Waits until the store has every row. */
kv_status_t kv_store_session_flush(struct kv_store_session *store);
/* Goes on in a fork, which has `tokens` tokens.  KV_UNSUPPORTED: in one already. */
kv_status_t kv_store_session_branch(struct kv_store_session *store, uint32_t tokens);
/* Closes it, and is back in the session that it is a fork of. */
kv_status_t kv_store_session_unbranch(struct kv_store_session *store);

/* Keeps a failure that a method met in its own operations, to be told by detail(). */
kv_status_t kv_store_session_fail(struct kv_store_session *store, kv_status_t status);

/* What went wrong, "" if nothing did. */
const char *kv_store_session_detail(const struct kv_store_session *store);
uint64_t kv_store_session_bytes_put(const struct kv_store_session *store);
double kv_store_session_wait_s(const struct kv_store_session *store);

#endif
