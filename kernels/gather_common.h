/* gather_common.h - private to kernels/: how far ahead rows are prefetched, the same for every
 * implementation of gather.h.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_GATHER_COMMON_H
#define KV_KERNELS_GATHER_COMMON_H

#include <stddef.h>
#include <stdint.h>

enum {
    KV_GATHER_LINE_BYTES = 64,
    KV_GATHER_AHEAD_ROWS = 8,
    /* Limits the distance for long rows: prefetched lines must still be in L2 when used. */
    KV_GATHER_AHEAD_BYTES = 16 << 10,
};

/* Returns how many rows ahead to prefetch; row_bytes > 0. */
static inline size_t kv_gather_ahead(size_t row_bytes)
{
    if (row_bytes <= KV_GATHER_AHEAD_BYTES / KV_GATHER_AHEAD_ROWS)
        return KV_GATHER_AHEAD_ROWS;
    return row_bytes < KV_GATHER_AHEAD_BYTES ? KV_GATHER_AHEAD_BYTES / row_bytes : 1;
}

/* Prefetches all cache lines of a row into L2. */
static inline void kv_gather_prefetch(const void *row, size_t row_bytes)
{
    const uintptr_t end = (uintptr_t)row + row_bytes;

    for (uintptr_t line = (uintptr_t)row & ~(uintptr_t)(KV_GATHER_LINE_BYTES - 1); line < end;
         line += KV_GATHER_LINE_BYTES)
        __builtin_prefetch((const void *)line, 0, 2);
}

#endif
