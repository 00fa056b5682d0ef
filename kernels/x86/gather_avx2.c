/* Prefetches two cache lines of a later row, then copies two of the current one, and so on.
 * Prefetching a whole row at once fills the core's miss queue, and the copy after it waits.
 * Uses non-temporal stores where that pays (gather.h). */
#include "kernels/dispatch.h"
#include "kernels/gather.h"
#include "kernels/gather_common.h"
#include "kernels/x86/avx2.h"

#if defined(__x86_64__)

#include <stdbool.h>

enum {
    VECTOR_BYTES = 32,
    PIECE_BYTES = 2 * KV_GATHER_LINE_BYTES,
};

INLINE void copy_vectors(uint8_t *to, const uint8_t *from, size_t bytes, bool is_stream)
{
    for (size_t at = 0; at < bytes; at += VECTOR_BYTES) {
        const __m256i vector = _mm256_loadu_si256((const __m256i *)(const void *)(from + at));

        if (is_stream)
            _mm256_stream_si256((__m256i *)(void *)(to + at), vector);
        else
            _mm256_storeu_si256((__m256i *)(void *)(to + at), vector);
    }
}

INLINE void
copy_rows(uint8_t *to, const void *const *rows, size_t n_rows, size_t row_bytes, bool is_stream)
{
    const size_t n_ahead = kv_gather_ahead(row_bytes);
    const size_t whole = row_bytes - row_bytes % PIECE_BYTES;

    for (size_t i = 0; i < n_ahead && i < n_rows; i++)
        kv_gather_prefetch(rows[i], row_bytes);
    for (size_t i = 0; i < n_rows; i++, to += row_bytes) {
        const uint8_t *from = rows[i];
        /* Near the end there is no later row; the current one costs nothing. */
        const uint8_t *ahead = rows[n_ahead < n_rows - i ? i + n_ahead : i];

        for (size_t at = 0; at < whole; at += PIECE_BYTES) {
            __builtin_prefetch(ahead + at, 0, 2);
            __builtin_prefetch(ahead + at + KV_GATHER_LINE_BYTES, 0, 2);
            copy_vectors(to + at, from + at, PIECE_BYTES, is_stream);
        }
        if (whole < row_bytes) {
            kv_gather_prefetch(ahead + whole, row_bytes - whole);
            copy_vectors(to + whole, from + whole, row_bytes - whole, is_stream);
        }
    }
    /* Non-temporal stores are weakly ordered.  The fence makes them visible before any later
     * store, such as one by which another thread or a network card learns of the rows. */
    if (is_stream)
        _mm_sfence();
}

AVX2 static void gather(void *dst, const void *const *rows, size_t n_rows, size_t row_bytes)
{
    if (row_bytes == 0 || row_bytes % VECTOR_BYTES != 0)
        kv_gather_kernels_at(0)->gather(dst, rows, n_rows, row_bytes);
    else if (n_rows * row_bytes >= KV_GATHER_STREAM_BYTES && (uintptr_t)dst % VECTOR_BYTES == 0)
        copy_rows(dst, rows, n_rows, row_bytes, true);
    else
        copy_rows(dst, rows, n_rows, row_bytes, false);
}

const struct kv_gather_kernels kv_gather_avx2 = {
    .name = "avx2",
    .supported = kv_has_avx2,
    .gather = gather,
};

#endif
