/* A comparison of 64 bytes gives a mask, whose bits are counted, and which compresses a register
 * of row numbers: in the register, because a compressing store is slow on a Zen. */
#include "kernels/byte_select.h"
#include "kernels/dispatch.h"
#include "kernels/x86/avx512.h"

#if defined(__x86_64__)

enum {
    BYTES = 64, /* in a register */
    PARTS = 4,
    HALF_LANES = 8,
};

static_assert((int)HALF_LANES <= (int)KV_TOPK_SPARE, "write_set() writes eight at a time");

static const uint8_t numbers[BYTES] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63,
};

/* Returns a mask of the first n bytes; all 64 if n is larger. */
INLINE uint64_t first_bytes(size_t n)
{
    return n >= BYTES ? UINT64_MAX : ((uint64_t)1 << n) - 1;
}

AVX512 static size_t count_from(const uint8_t *values, size_t n, uint8_t least)
{
    const __m512i bound = _mm512_set1_epi8((char)least);
    size_t counts[PARTS] = {0}, i = 0;

    for (; i + PARTS * BYTES <= n; i += PARTS * BYTES)
        for (unsigned part = 0; part < PARTS; part++)
            counts[part] += (size_t)__builtin_popcountll(
                _mm512_cmpge_epu8_mask(_mm512_loadu_si512(values + i + part * BYTES), bound));
    for (; i < n; i += BYTES) {
        const uint64_t there = first_bytes(n - i);

        counts[0] += (size_t)__builtin_popcountll(_mm512_mask_cmpge_epu8_mask(
            there, _mm512_maskz_loadu_epi8(there, values + i), bound));
    }
    return counts[0] + counts[1] + counts[2] + counts[3];
}

INLINE void write8(uint32_t *to, __m128i rows, uint32_t base)
{
    _mm256_storeu_si256((__m256i *)(void *)to, _mm256_add_epi32(_mm256_cvtepu8_epi32(rows),
                                                                _mm256_set1_epi32((int)base)));
}

/* Appends base + row for each row of the set, overwriting up to eight numbers behind them.
 * Returns the new n. */
INLINE size_t write_set(uint32_t *to, size_t n, uint64_t set, uint32_t base)
{
    const size_t n_rows = (size_t)__builtin_popcountll(set);
    const __m512i packed = _mm512_maskz_compress_epi8(set, _mm512_loadu_si512(numbers));

    /* Few sets have more. */
    write8(to + n, _mm256_castsi256_si128(_mm512_castsi512_si256(packed)), base);
    if (n_rows > HALF_LANES) {
        uint8_t rows[BYTES];

        _mm512_storeu_si512(rows, packed);
        for (size_t i = HALF_LANES; i < n_rows; i += HALF_LANES)
            write8(to + n + i, _mm_loadl_epi64((const __m128i *)(const void *)(rows + i)),
                   base);
    }
    return n + n_rows;
}

/* Returns the first n bits of the set, which has more. */
INLINE uint64_t first_of(uint64_t set, uint64_t n)
{
    uint64_t first = 0;

    for (; n > 0; n--, set &= set - 1)
        first |= set & -set;
    return first;
}

/* Collects from 64 values, of which those of the mask count. */
INLINE size_t collect_some(__m512i values,
                           uint64_t there,
                           __m512i bound,
                           uint64_t *ties,
                           uint32_t base,
                           uint32_t *ret_indices,
                           size_t n)
{
    uint64_t chosen = _mm512_mask_cmpgt_epu8_mask(there, values, bound);

    if (*ties > 0) {
        const uint64_t equal = _mm512_mask_cmpeq_epi8_mask(there, values, bound);
        const uint64_t n_equal = (uint64_t)__builtin_popcountll(equal);

        chosen |= n_equal > *ties ? first_of(equal, *ties) : equal;
        *ties -= n_equal > *ties ? *ties : n_equal;
    }
    return write_set(ret_indices, n, chosen, base);
}

AVX512 static size_t collect(const uint8_t *values,
                             size_t n,
                             uint8_t bound,
                             uint64_t *ties,
                             uint32_t base,
                             uint32_t *ret_indices)
{
    const __m512i at_bound = _mm512_set1_epi8((char)bound);
    uint64_t left = *ties;
    size_t n_collected = 0, i = 0;

    /* One branch for several registers: whether one of them has any is hard to predict. */
    for (; i + PARTS * BYTES <= n; i += PARTS * BYTES) {
        __m512i at[PARTS], most;

        for (unsigned part = 0; part < PARTS; part++)
            at[part] = _mm512_loadu_si512(values + i + part * BYTES);
        most = _mm512_max_epu8(_mm512_max_epu8(at[0], at[1]), _mm512_max_epu8(at[2], at[3]));
        if (_mm512_cmpge_epu8_mask(most, at_bound) == 0)
            continue;
        for (unsigned part = 0; part < PARTS; part++)
            n_collected =
                collect_some(at[part], UINT64_MAX, at_bound, &left,
                             base + (uint32_t)i + part * BYTES, ret_indices, n_collected);
    }
    for (; i < n; i += BYTES) {
        const uint64_t there = first_bytes(n - i);

        n_collected = collect_some(_mm512_maskz_loadu_epi8(there, values + i), there, at_bound,
                                   &left, base + (uint32_t)i, ret_indices, n_collected);
    }
    *ties = left;
    return n_collected;
}

const struct kv_bytes_kernels kv_bytes_avx512 = {
    .name = "avx512",
    .supported = kv_has_avx512,
    .count_from = count_from,
    .collect = collect,
};

#endif
