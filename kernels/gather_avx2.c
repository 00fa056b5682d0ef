/* Writes past the caches where that pays; otherwise memcpy() is as good as anything. */
#include "gather.h"
#include "gather_parts.h"
#include "parts_avx2.h"
#include "tiers.h"

#if defined(__x86_64__)

enum {
    VECTOR_BYTES = 32,
};

AVX2 static void stream(uint8_t *to, const void *const *rows, size_t n_rows, size_t row_bytes)
{
    const size_t ahead = gather_ahead(row_bytes);

    for (size_t i = 0; i < ahead && i < n_rows; i++)
        gather_ask(rows[i], row_bytes);
    for (size_t i = 0; i < n_rows; i++) {
        const uint8_t *from = rows[i], *end = from + row_bytes;

        if (ahead < n_rows - i)
            gather_ask(rows[i + ahead], row_bytes);
        for (; from < end; from += VECTOR_BYTES, to += VECTOR_BYTES)
            _mm256_stream_si256((__m256i *)(void *)to,
                                _mm256_loadu_si256((const __m256i *)(const void *)from));
    }
    /* Such stores are not ordered with others: whoever is told of them must see them. */
    _mm_sfence();
}

AVX2 static void gather(void *dst, const void *const *rows, size_t n_rows, size_t row_bytes)
{
    if (n_rows * row_bytes >= KV_GATHER_STREAM_BYTES && row_bytes % VECTOR_BYTES == 0 &&
        (uintptr_t)dst % VECTOR_BYTES == 0)
        stream(dst, rows, n_rows, row_bytes);
    else
        kv_gather_kernels_at(0)->gather(dst, rows, n_rows, row_bytes);
}

const struct kv_gather_kernels kv_gather_avx2 = {
    .name = "avx2",
    .supported = tiers_has_avx2,
    .gather = gather,
};

#endif
