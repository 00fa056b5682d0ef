/* gather.h - copies scattered rows into one place.
 *
 * Copies of isolated rows are bound by memory latency, not bandwidth: rows are prefetched into
 * L2 some rows ahead (prefetcht1; measured on Intel, it is worth 1.3-2x over none or t0).
 *
 * A call of KV_GATHER_STREAM_BYTES or more into a destination aligned to 32 bytes, of rows that
 * are multiples of 32, is written past the caches: so much would push out everything else, and
 * most of it would be gone again before it is read.  Less is left in the caches for the
 * code that sends it next.  Measured (Zen 3): past the caches into cold memory a third faster
 * for consecutive rows of 256 and 512 B, and 70-85 % of a copy of that kind; but into 256 KiB
 * that are read back at once 6.4 GB/s against 8.5.  Isolated rows come at half the rate of such
 * a copy, at 0.8-0.9 of what reading them takes; with prefetches of a row at a time instead of
 * two lines, it was 0.65-0.7.  Did not help: other distances from 4 to 64 rows; prefetches into
 * L1.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.  Rows and `dst` need no
 * alignment.  What is read and what is written do not overlap.
 */
#ifndef KV_KERNELS_GATHER_H
#define KV_KERNELS_GATHER_H

#include <stddef.h>

enum {
    KV_GATHER_STREAM_BYTES = 1 << 19, /* an L2 */
};

/* Copies rows[i] (row_bytes each) to dst + i * row_bytes.
 *   rows  (n_rows) pointers
 *   dst   (n_rows, row_bytes) */
void kv_rows_gather(void *dst, const void *const *rows, size_t n_rows, size_t row_bytes);

/* One implementation of the family.  Slowest first: the last one that this CPU supports is
 * used. */
struct kv_gather_kernels {
    const char *name; /* "scalar", "avx2" */
    int (*supported)(void);
    void (*gather)(void *dst, const void *const *rows, size_t n_rows, size_t row_bytes);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_gather_kernels *kv_gather_kernels_at(unsigned i);

#endif
