/* gather.h - copies scattered rows into one place.
 *
 * Copying isolated rows is limited by memory latency, not bandwidth.  Rows are therefore
 * prefetched into L2, some rows ahead; measured on Intel, this is 1.3 to 2 times as fast as no
 * prefetch, or as prefetching into L1.
 *
 * A call that copies KV_GATHER_STREAM_BYTES or more, to a destination aligned to 32 bytes and
 * in rows of a multiple of 32 bytes, uses non-temporal stores: so much data would evict
 * everything else, and most of it would be evicted again before it is read.  Less data stays in
 * the cache for the code that sends it next.  Measured on Zen 3 with consecutive rows of 256
 * and 512 bytes: non-temporal stores into cold memory are a third faster; into 256 KiB that are
 * read back at once they reach 6.4 GB/s, ordinary stores 8.5.  kernels/README.md says what else
 * was tried.
 *
 * Threads: pure functions; non-temporal stores are fenced before the return, so another thread
 * that is then told of the rows sees them.  Memory: the caller's; nothing is kept.  Rows and
 * `dst` need no alignment, and must not overlap.
 */
#ifndef KV_KERNELS_GATHER_H
#define KV_KERNELS_GATHER_H

#include <stddef.h>

enum {
    KV_GATHER_STREAM_BYTES = 1 << 19, /* the L2 of a Zen 3 core */
};

/* Copies rows[i] (row_bytes each) to dst + i * row_bytes.
 *   rows  (n_rows) pointers
 *   dst   (n_rows, row_bytes) */
void kv_rows_gather(void *dst, const void *const *rows, size_t n_rows, size_t row_bytes);

/* One implementation of the family.  The last one in the list that this CPU supports is
 * used. */
struct kv_gather_kernels {
    const char *name; /* "scalar", "avx2" */
    int (*supported)(void);
    void (*gather)(void *dst, const void *const *rows, size_t n_rows, size_t row_bytes);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_gather_kernels *kv_gather_kernels_at(unsigned i);

#endif
