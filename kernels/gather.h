/* gather.h - copies scattered rows into one place.
 *
 * Isolated rows are bound by the latency of memory, not its rate: rows are prefetched into L2
 * some rows ahead (limits measured: prefetcht1 is worth 1.3-2x over none or t0).
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.
 */
#ifndef KV_GATHER_H
#define KV_GATHER_H

#include <stddef.h>

/* Copies rows[i] (row_bytes each) to dst + i * row_bytes.
 *   rows  (n_rows) pointers
 *   dst   (n_rows, row_bytes) */
void kv_rows_gather(void *dst, const void *const *rows, size_t n_rows, size_t row_bytes);

#endif
