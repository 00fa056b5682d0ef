/* full_rows.h - all rows of a session on the model's device, with a copy in the store.
 *
 * Shared by the methods that fetch nothing.  Rows are rounded to the element type, kept by
 * layer in device.h's layout, and sent to the store while the computation goes on.  So the rows
 * that another method fetches from the store are, bit for bit, the rows that these methods
 * attend to.  What the session had when it was opened is read during the first pass.
 *
 * Threads: one at a time.  Memory: create/destroy; keeps what the setup names.
 */
#ifndef KV_GPU_WORKER_KVCACHE_FULL_ROWS_H
#define KV_GPU_WORKER_KVCACHE_FULL_ROWS_H

#include "gpu-worker/kvcache/session.h"

struct kvw_full_rows;

/* Opens a session of the model in the store.  `detail`: `what: where: value`. */
kv_status_t kvw_full_rows_create(const struct kvw_session_setup *setup,
                                 struct kvw_full_rows **ret_full_rows,
                                 char *detail,
                                 size_t detail_bytes);
/* Closes the session.  NULL is allowed. */
void kvw_full_rows_destroy(struct kvw_full_rows *full_rows);

/* Returns the session that it opened and will close. */
struct kvw_session *kvw_full_rows_session(const struct kvw_full_rows *full_rows);

const struct kvw_rows_shape *kvw_full_rows_shape(const struct kvw_full_rows *full_rows);
/* (n_kv_heads, capacity, 2 d) */
const struct kvw_device_buffer *kvw_full_rows_of(const struct kvw_full_rows *full_rows,
                                                 uint32_t layer);

/* Returns how long it waited for rows that the session had when it was opened. */
double kvw_full_rows_wait_s(const struct kvw_full_rows *full_rows);
/* Returns the bytes of the rows on the device. */
uint64_t kvw_full_rows_bytes(const struct kvw_full_rows *full_rows);

/* Stores a layer's new keys and values (n, n_kv_heads, d) on the device, and starts sending
 * them. */
kv_status_t kvw_full_rows_put(struct kvw_full_rows *full_rows,
                              enum kvw_phase phase,
                              uint32_t layer,
                              uint32_t token_begin,
                              uint32_t n,
                              const struct kvw_device_buffer *k,
                              const struct kvw_device_buffer *v);

#endif
