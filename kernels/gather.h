/* gather.h - copies scattered rows into one place.
 *
 * Isolated rows are bound by the latency of memory, not its rate: rows are asked for into L2
 * some rows ahead (prefetcht1; measured on Intel, it is worth 1.3-2x over none or t0).
 *
 * A call of KV_GATHER_STREAM_BYTES or more into a destination aligned to 32 bytes, of rows that
 * are multiples of 32, is written past the caches: so much would push out everything else, and
 * most of it would be gone again before it is read.  Less is left in the caches for whoever
 * sends it next.  Measured (Zen 3, rows of 512 B, consecutive ones in 32s, GB/s): past the
 * caches into cold memory 9.7-11.9 against 7.2-8.5, which is 75-90 % of a copy of that kind;
 * but into 256 KiB that are read back at once 6.4 against 8.5.  Isolated rows come at 3-6
 * either way, as fast as they can be read.  Did not help: other distances from 8 to 32 rows;
 * vectors instead of memcpy() where the caches are not passed by.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.  Rows and `dst` need no
 * alignment.  What is read and what is written do not overlap.
 */
#ifndef KV_GATHER_H
#define KV_GATHER_H

#include <stddef.h>

enum {
    KV_GATHER_STREAM_BYTES = 1 << 20,
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
