/* Finds the bound by bisection, as pq_prefilter_avx2.c does, with 64 or 32 sums at a time.  A
 * comparison gives a mask, whose bits are counted, and which compresses a vector of row
 * numbers. */
#include "kernels/dispatch.h"
#include "kernels/pq_prefilter.h"
#include "kernels/x86/avx512.h"

#if defined(__x86_64__)

enum {
    SUMS8 = 64, /* 8-bit sums in a register */
    SUMS16 = 32,
    PARTS = 4,
};

static const uint8_t numbers[SUMS8] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63,
};

/* Returns a mask of the first n <= 64. */
INLINE uint64_t first_bits(size_t n)
{
    return n >= 64 ? UINT64_MAX : ((uint64_t)1 << n) - 1;
}

/* Appends the rows of a set of up to 64, from `base` on; writes nothing after the last. */
INLINE size_t write_set(uint32_t *to, size_t n, uint64_t set, uint32_t base)
{
    const size_t n_rows = (size_t)__builtin_popcountll(set);
    uint8_t rows[SUMS8];

    if (set == 0)
        return n;
    _mm512_storeu_si512(rows, _mm512_maskz_compress_epi8(set, _mm512_loadu_si512(numbers)));
    for (size_t i = 0; i < n_rows; i += LANES) {
        const __m128i some = _mm_loadu_si128((const __m128i *)(const void *)(rows + i));

        _mm512_mask_storeu_epi32(
            to + n + i, first_lanes(n_rows - i),
            _mm512_add_epi32(_mm512_cvtepu8_epi32(some), _mm512_set1_epi32((int)base)));
    }
    return n + n_rows;
}

/* ---- 8 bits ------------------------------------------------------------------------------ */

/* Returns a bit for each of 64 sums: set if it is at least the bound. */
INLINE uint64_t reach8(const uint8_t *sums, __m512i bound)
{
    return _mm512_cmpge_epu8_mask(_mm512_loadu_si512(sums), bound);
}

INLINE size_t count8(const uint8_t *sums, size_t n, uint32_t least)
{
    const __m512i bound = _mm512_set1_epi8((char)least);
    size_t counts[PARTS] = {0}, i = 0;

    for (; i + PARTS * SUMS8 <= n; i += PARTS * SUMS8)
        for (unsigned part = 0; part < PARTS; part++)
            counts[part] +=
                (size_t)__builtin_popcountll(reach8(sums + i + part * SUMS8, bound));
    for (; i < n; i += SUMS8) {
        const uint64_t there = first_bits(n - i);

        counts[0] += (size_t)__builtin_popcountll(_mm512_mask_cmpge_epu8_mask(
            there, _mm512_maskz_loadu_epi8(there, sums + i), bound));
    }
    return counts[0] + counts[1] + counts[2] + counts[3];
}

AVX512 static size_t prefilter8(const uint8_t *sums,
                                size_t n,
                                size_t k,
                                uint32_t margin,
                                uint32_t *ret_accepted,
                                size_t *ret_n_accepted,
                                uint32_t *ret_undecided)
{
    uint32_t bound = 0;
    size_t n_accepted = 0, n_undecided = 0;

    for (uint32_t bit = 128; bit > 0; bit /= 2)
        if (count8(sums, n, bound | bit) >= k)
            bound |= bit;

    const uint32_t least = bound > margin ? bound - margin : 0;
    const bool has_accepted = bound + margin < UINT8_MAX;
    const uint32_t accepted = has_accepted ? bound + margin + 1 : UINT8_MAX;
    const __m512i from = _mm512_set1_epi8((char)least), over = _mm512_set1_epi8((char)accepted);

    for (size_t i = 0; i < n; i += SUMS8) {
        const uint64_t there = first_bits(n - i);
        const __m512i at = _mm512_maskz_loadu_epi8(there, sums + i);
        const uint64_t all = _mm512_mask_cmpge_epu8_mask(there, at, from);
        const uint64_t above = has_accepted ? _mm512_mask_cmpge_epu8_mask(there, at, over) : 0;

        if (all == 0)
            continue;
        n_accepted = write_set(ret_accepted, n_accepted, above, (uint32_t)i);
        n_undecided = write_set(ret_undecided, n_undecided, all & ~above, (uint32_t)i);
    }
    *ret_n_accepted = n_accepted;
    return n_undecided;
}

/* ---- 16 bits ----------------------------------------------------------------------------- */

INLINE uint32_t reach16(const uint16_t *sums, __m512i bound)
{
    return _mm512_cmpge_epu16_mask(_mm512_loadu_si512(sums), bound);
}

INLINE size_t count16(const uint16_t *sums, size_t n, uint32_t least)
{
    const __m512i bound = _mm512_set1_epi16((short)least);
    size_t counts[PARTS] = {0}, i = 0;

    for (; i + PARTS * SUMS16 <= n; i += PARTS * SUMS16)
        for (unsigned part = 0; part < PARTS; part++)
            counts[part] +=
                (size_t)__builtin_popcount(reach16(sums + i + part * SUMS16, bound));
    for (; i < n; i += SUMS16) {
        const __mmask32 there = (__mmask32)first_bits(n - i);

        counts[0] += (size_t)__builtin_popcount(_mm512_mask_cmpge_epu16_mask(
            there, _mm512_maskz_loadu_epi16(there, sums + i), bound));
    }
    return counts[0] + counts[1] + counts[2] + counts[3];
}

AVX512 static size_t prefilter16(const uint16_t *sums,
                                 size_t n,
                                 size_t k,
                                 uint32_t margin,
                                 uint32_t *ret_accepted,
                                 size_t *ret_n_accepted,
                                 uint32_t *ret_undecided)
{
    uint32_t bound = 0;
    size_t n_accepted = 0, n_undecided = 0;

    for (uint32_t bit = 1 << 15; bit > 0; bit /= 2)
        if (count16(sums, n, bound | bit) >= k)
            bound |= bit;

    const uint32_t least = bound > margin ? bound - margin : 0;
    const bool has_accepted = bound + margin < UINT16_MAX;
    const uint32_t accepted = has_accepted ? bound + margin + 1 : UINT16_MAX;
    const __m512i from = _mm512_set1_epi16((short)least),
                  over = _mm512_set1_epi16((short)accepted);

    for (size_t i = 0; i < n; i += SUMS16) {
        const __mmask32 there = (__mmask32)first_bits(n - i);
        const __m512i at = _mm512_maskz_loadu_epi16(there, sums + i);
        const uint32_t all = _mm512_mask_cmpge_epu16_mask(there, at, from);
        const uint32_t above = has_accepted ? _mm512_mask_cmpge_epu16_mask(there, at, over) : 0;

        if (all == 0)
            continue;
        n_accepted = write_set(ret_accepted, n_accepted, above, (uint32_t)i);
        n_undecided = write_set(ret_undecided, n_undecided, all & ~above, (uint32_t)i);
    }
    *ret_n_accepted = n_accepted;
    return n_undecided;
}

const struct kv_pq_prefilter_kernels kv_pq_prefilter_avx512 = {
    .name = "avx512",
    .supported = kv_has_avx512,
    .prefilter8 = prefilter8,
    .prefilter16 = prefilter16,
};

#endif
