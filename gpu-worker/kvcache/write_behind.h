/* write_behind.h - rows on their way from a device to the store, in the background.
 *
 * Rows are copied into a slot of staging memory, and the client library sends them from there
 * while the computation goes on.  There are a fixed number of slots: who needs one when all are
 * under way waits for the oldest, and that time is counted.
 *
 * The client library has no threads: rows move while kvw_write_behind_poll() is called.
 *
 * Threads: the client's.  Memory: create/destroy; keeps the client and the session.
 */
#ifndef KV_GPU_WORKER_KVCACHE_WRITE_BEHIND_H
#define KV_GPU_WORKER_KVCACHE_WRITE_BEHIND_H

#include "client/include/kvclient.h"
#include "gpu-worker/base/trace.h"

struct kvw_write_behind;

/* Slots of slot_bytes each; `trace` is kept, NULL: none. */
kv_status_t kvw_write_behind_create(struct kv_client *client,
                                    struct kv_session *session,
                                    size_t slot_bytes,
                                    struct kvw_trace *trace,
                                    struct kvw_write_behind **ret_writer);
/* Cancels what is under way.  NULL is allowed. */
void kvw_write_behind_destroy(struct kvw_write_behind *writer);

/* Rows sent from now on are another session's; those under way arrive where they belong. */
void kvw_write_behind_go_on(struct kvw_write_behind *writer, struct kv_session *session);

/* A slot to fill; waits if there is none free.  The same until it is sent.  Fails with what an
 * earlier row failed with. */
kv_status_t kvw_write_behind_slot(struct kvw_write_behind *writer, void **ret_slot);

/* Sends the slot, which holds `rows` as kv_put_begin() takes them; `is_step`: of a decode step.
 */
kv_status_t kvw_write_behind_send(struct kvw_write_behind *writer,
                                  const struct kv_rows *rows,
                                  bool is_step);

/* Lets rows move, without waiting. */
kv_status_t kvw_write_behind_poll(struct kvw_write_behind *writer);

/* Waits until all are in the store. */
kv_status_t kvw_write_behind_flush(struct kvw_write_behind *writer);

/* The first failure in words, "" if there was none. */
const char *kvw_write_behind_detail(const struct kvw_write_behind *writer);
double kvw_write_behind_wait_s(const struct kvw_write_behind *writer);
uint64_t kvw_write_behind_bytes(const struct kvw_write_behind *writer);

#endif
