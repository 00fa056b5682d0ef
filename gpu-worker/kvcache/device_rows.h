/* device_rows.h - the rows of a session on the worker's device; the store has all rows.
 *
 *     full       every row, for prompt tokens, which attend to all earlier rows
 *     windowed   the first `sinks` rows, and the last `window` rows in a ring, for decode steps
 *
 * Full rows need memory for the whole session, windowed rows next to none.  The change from
 * windowed to full reads missing rows from the store.
 *
 * Invariants, which kvw_device_rows_check() asserts:
 *   (1) The rows are full or windowed, not both; neither only after memory ran out.
 *   (2) Full: all rows of the session are present, and the buffers have room for them.
 *   (3) Windowed: the ring holds the last `window` rows, unless a truncate has emptied it.
 *
 * Threads: one at a time.  Memory: create/destroy; keeps what the setup names and the store.
 */
#ifndef KV_GPU_WORKER_KVCACHE_DEVICE_ROWS_H
#define KV_GPU_WORKER_KVCACHE_DEVICE_ROWS_H

#include "gpu-worker/kvcache/session.h"

struct kvw_device_rows;

/* Creates full rows; those that the session has come with the first pass.  Fails with
 * KV_NO_MEMORY. */
kv_status_t kvw_device_rows_create(const struct kvw_session_setup *setup,
                                   struct kvw_session *store,
                                   struct kvw_device_rows **ret_rows);
void kvw_device_rows_destroy(struct kvw_device_rows *rows); /* NULL is allowed */

/* Returns the shape of full rows, for device.h. */
const struct kvw_rows_shape *kvw_device_rows_shape(const struct kvw_device_rows *rows);
/* Returns the bytes of the rows on the device, in the form that they have now. */
uint64_t kvw_device_rows_bytes(const struct kvw_device_rows *rows);

/* Makes the rows [0, tokens) full, or windowed with the given sinks and window (>= 1); does
 * nothing if they are.  Waits for missing rows and adds the time to *ret_wait_us.  Fails with
 * KV_NO_MEMORY, or as the store does (kvw_session_fail()). */
kv_status_t
kvw_device_rows_full(struct kvw_device_rows *rows, uint32_t tokens, uint64_t *ret_wait_us);
kv_status_t kvw_device_rows_windowed(struct kvw_device_rows *rows,
                                     uint32_t sinks,
                                     uint32_t window,
                                     uint32_t tokens,
                                     uint64_t *ret_wait_us);

/* Stores a layer's new keys and values (n, n_kv_heads, d) on the device, and starts sending
 * them to the store.  Windowed: one token a call.  In the first pass, first waits for the rows of
 * the layer that the session had when it was opened, and adds the time to *ret_wait_us. */
kv_status_t kvw_device_rows_put(struct kvw_device_rows *rows,
                                enum kvw_phase phase,
                                uint32_t layer,
                                uint32_t token_begin,
                                uint32_t n,
                                const struct kvw_device_buffer *k,
                                const struct kvw_device_buffer *v,
                                uint64_t *ret_wait_us);

/* Returns a layer's full rows (n_kv_heads, capacity, 2 d). */
const struct kvw_device_buffer *kvw_device_rows_all(const struct kvw_device_rows *rows,
                                                    uint32_t layer);

/* Appends the runs of the tokens [begin, end) of a kv head that windowed rows hold, as sinks or
 * in the window.  Returns the new number of runs. */
uint32_t kvw_device_rows_runs(const struct kvw_device_rows *rows,
                              uint32_t layer,
                              uint32_t head,
                              uint32_t begin,
                              uint32_t end,
                              struct kvw_row_run *runs,
                              uint32_t n_runs);

/* Drops the rows from `tokens` on. */
void kvw_device_rows_truncate(struct kvw_device_rows *rows, uint32_t tokens);

/* Asserts the invariants. */
void kvw_device_rows_check(const struct kvw_device_rows *rows);

#endif
