/* write_behind.h - sends rows from a device to the store in the background.
 *
 * Rows are copied into a slot of staging memory, and the client library sends them from there
 * while the computation goes on.  The number of slots is fixed: if all are in use, the caller
 * waits for the oldest, and that time is counted.
 *
 * Transfers progress in kvw_write_behind_poll(), and in whatever calls the client library; also
 * between these, if it was opened with a thread of its own.
 *
 * Invariants, which kvw_write_behind_check() asserts:
 *   (1) Operations are in the slots that were sent and not taken back, and in no others.
 *
 * Threads: the client's.  Memory: create/destroy; keeps the client and the session.
 */
#ifndef KV_GPU_WORKER_KVCACHE_WRITE_BEHIND_H
#define KV_GPU_WORKER_KVCACHE_WRITE_BEHIND_H

#include "client/include/kvclient.h"
#include "gpu-worker/base/trace.h"

struct kvw_write_behind;

/* Creates a writer with slots of slot_bytes each.  Keeps `trace`; NULL: none.  `session` NULL:
 * it comes with kvw_write_behind_go_on(), before anything is sent. */
kv_status_t kvw_write_behind_create(struct kv_client *client,
                                    struct kv_session *session,
                                    size_t slot_bytes,
                                    struct kvw_trace *trace,
                                    struct kvw_write_behind **ret_writer);
/* Cancels outstanding puts.  NULL is allowed. */
void kvw_write_behind_destroy(struct kvw_write_behind *writer);

/* Sends later rows to another session; outstanding ones still go to the previous one. */
void kvw_write_behind_go_on(struct kvw_write_behind *writer, struct kv_session *session);

/* Returns a slot to fill, the same one until it is sent; waits if none is free.  Fails as an
 * earlier put failed. */
kv_status_t kvw_write_behind_slot(struct kvw_write_behind *writer, void **ret_slot);

/* Sends the slot, which holds `rows` as kv_put_begin() expects them; `is_step`: a decode
 * step. */
kv_status_t kvw_write_behind_send(struct kvw_write_behind *writer,
                                  const struct kv_rows *rows,
                                  bool is_step);

/* Makes progress on transfers, without waiting. */
kv_status_t kvw_write_behind_poll(struct kvw_write_behind *writer);

/* Gives up what is under way: nobody will use it, and the session's close need not wait for it. */
void kvw_write_behind_give_up(struct kvw_write_behind *writer);
/* Takes what has ended, as far as is known without asking; fails as kvw_write_behind_poll(). */
kv_status_t kvw_write_behind_take(struct kvw_write_behind *writer);
/* Whether the store has all rows, or said no; and whether a slot is free, or will not be: as
 * far as is known without asking. */
bool kvw_write_behind_is_empty(const struct kvw_write_behind *writer);
bool kvw_write_behind_has_slot(const struct kvw_write_behind *writer);

/* Waits until the store has all rows. */
kv_status_t kvw_write_behind_flush(struct kvw_write_behind *writer);

/* Returns the first error, or "". */
const char *kvw_write_behind_detail(const struct kvw_write_behind *writer);
double kvw_write_behind_wait_s(const struct kvw_write_behind *writer);
uint64_t kvw_write_behind_bytes(const struct kvw_write_behind *writer);

/* Asserts the invariants. */
void kvw_write_behind_check(const struct kvw_write_behind *writer);

#endif
