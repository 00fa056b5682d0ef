/* device_rows.h - the rows of a session that a worker has on its device, when the store has
 * all.
 *
 *     whole    every row; a prompt's tokens need them, they attend to all before them
 *     narrow   the first `sinks` rows, and the last `window` in a ring; decode steps
 *
 * Whole takes the memory of the session, narrow next to none; what is missing on the way from
 * narrow to whole is read from the store.
 *
 * Threads: one at a time.  Memory: create/destroy; keeps what the setup names and the store.
 */
#ifndef KV_GPU_WORKER_KVCACHE_DEVICE_ROWS_H
#define KV_GPU_WORKER_KVCACHE_DEVICE_ROWS_H

#include "gpu-worker/kvcache/session.h"

struct kvw_device_rows;

/* No tokens, whole.  KV_NO_MEMORY. */
kv_status_t kvw_device_rows_create(const struct kvw_session_setup *setup,
                                   struct kvw_session *store,
                                   struct kvw_device_rows **ret_rows);
void kvw_device_rows_destroy(struct kvw_device_rows *rows); /* NULL is allowed */

/* As device.h's shape of whole rows. */
const struct kvw_rows_shape *kvw_device_rows_shape(const struct kvw_device_rows *rows);

/* Has the rows [0, tokens) whole, or narrow with sinks and window as given, window >= 1; does
 * nothing if they are so.  Rows that are missing are waited for: ret_wait_us is added to.
 * KV_NO_MEMORY, or what the store says (kvw_session_fail()). */
kv_status_t
kvw_device_rows_full(struct kvw_device_rows *rows, uint32_t tokens, uint64_t *ret_wait_us);
kv_status_t kvw_device_rows_windowed(struct kvw_device_rows *rows,
                                     uint32_t sinks,
                                     uint32_t window,
                                     uint32_t tokens,
                                     uint64_t *ret_wait_us);

/* A layer's new keys and values (n, n_kv_heads, d): kept, and on their way to the store.
 * Narrow: one at a time. */
kv_status_t kvw_device_rows_put(struct kvw_device_rows *rows,
                                enum kvw_phase phase,
                                uint32_t layer,
                                uint32_t token_begin,
                                uint32_t n,
                                const struct kvw_device_buffer *k,
                                const struct kvw_device_buffer *v);

/* (n_kv_heads, capacity, 2 d), whole. */
const struct kvw_device_buffer *kvw_device_rows_all(const struct kvw_device_rows *rows,
                                                    uint32_t layer);

/* Appends runs of the tokens [begin, end) of a kv head, narrow, that are there: sinks, or in
 * the window.  Returns how many runs there are then. */
uint32_t kvw_device_rows_runs(const struct kvw_device_rows *rows,
                              uint32_t layer,
                              uint32_t head,
                              uint32_t begin,
                              uint32_t end,
                              struct kvw_row_run *runs,
                              uint32_t n_runs);

/* The session has only `tokens` rows any more. */
void kvw_device_rows_truncate(struct kvw_device_rows *rows, uint32_t tokens);

#endif
