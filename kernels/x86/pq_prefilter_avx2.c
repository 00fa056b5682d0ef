/* Finds the bound by bisection: for each bit of a sum, one pass counts the sums that are at
 * least a number, 32 at a time.  The sums are still in L2, and eight such passes take no longer
 * than one pass that counts in bins.  Rows are written eight at a time, by a table of
 * permutations. */
#include "kernels/dispatch.h"
#include "kernels/pq_prefilter.h"
#include "kernels/x86/avx2.h"

#if defined(__x86_64__)

enum {
    SUMS = 32, /* 8-bit sums in a register */
    PARTS = 4,
    ROUNDS = 255, /* before a byte's count overflows */
};

/* Appends the rows of a set of up to 32. */
INLINE size_t write_set(uint32_t *to, size_t n, uint32_t set, uint32_t base)
{
    for (; set != 0; set >>= LANES, base += LANES)
        if ((set & 0xff) != 0)
            n = write_lanes(to, n, set & 0xff, base);
    return n;
}

INLINE __m256i load(const void *at)
{
    return _mm256_loadu_si256((const __m256i *)at);
}

/* ---- 8 bits ------------------------------------------------------------------------------ */

/* Counts the sums that are at least the bound, of PARTS * SUMS, per byte of four registers. */
INLINE void count_step(const uint8_t *sums, __m256i bound, __m256i *counts)
{
    for (unsigned part = 0; part < PARTS; part++) {
        const __m256i at = load(sums + part * SUMS);

        counts[part] =
            _mm256_sub_epi8(counts[part], _mm256_cmpeq_epi8(_mm256_max_epu8(at, bound), at));
    }
}

INLINE size_t count8(const uint8_t *sums, size_t n, uint32_t least)
{
    const __m256i bound = _mm256_set1_epi8((char)least);
    __m256i total = _mm256_setzero_si256();
    uint64_t lanes[4];
    size_t i = 0, count = 0;

    while (i + PARTS * SUMS <= n) {
        __m256i counts[PARTS] = {_mm256_setzero_si256(), _mm256_setzero_si256(),
                                 _mm256_setzero_si256(), _mm256_setzero_si256()};
        const size_t left = (n - i) / (PARTS * SUMS);
        const uint8_t *at = sums + i,
                      *end = at + (left < ROUNDS ? left : ROUNDS) * PARTS * SUMS;

        for (; at < end; at += PARTS * SUMS)
            count_step(at, bound, counts);
        i = (size_t)(at - sums);
        for (unsigned part = 0; part < PARTS; part++)
            total =
                _mm256_add_epi64(total, _mm256_sad_epu8(counts[part], _mm256_setzero_si256()));
    }
    _mm256_storeu_si256((__m256i *)(void *)lanes, total);
    for (; i < n; i++)
        count += sums[i] >= least;
    return count + lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

AVX2 static size_t prefilter8(const uint8_t *sums,
                              size_t n,
                              size_t k,
                              uint32_t margin,
                              uint32_t *ret_accepted,
                              size_t *ret_n_accepted,
                              uint32_t *ret_undecided)
{
    uint32_t bound = 0;
    size_t n_accepted = 0, n_undecided = 0, i = 0;

    for (uint32_t bit = 128; bit > 0; bit /= 2)
        if (count8(sums, n, bound | bit) >= k)
            bound |= bit;

    const uint32_t least = bound > margin ? bound - margin : 0;
    const bool has_accepted = bound + margin < UINT8_MAX;
    const uint32_t accepted = has_accepted ? bound + margin + 1 : UINT8_MAX;
    const __m256i from = _mm256_set1_epi8((char)least), over = _mm256_set1_epi8((char)accepted);

    for (; i + SUMS <= n; i += SUMS) {
        const __m256i at = load(sums + i);
        const uint32_t all =
            (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(at, from), at));
        const uint32_t above = has_accepted ? (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(
                                                  _mm256_max_epu8(at, over), at))
                                            : 0;

        if (all == 0)
            continue;
        n_accepted = write_set(ret_accepted, n_accepted, above, (uint32_t)i);
        n_undecided = write_set(ret_undecided, n_undecided, all & ~above, (uint32_t)i);
    }
    for (; i < n; i++) {
        if (has_accepted && sums[i] >= accepted)
            ret_accepted[n_accepted++] = (uint32_t)i;
        else if (sums[i] >= least)
            ret_undecided[n_undecided++] = (uint32_t)i;
    }
    *ret_n_accepted = n_accepted;
    return n_undecided;
}

/* ---- 16 bits ----------------------------------------------------------------------------- */

INLINE size_t count16(const uint16_t *sums, size_t n, uint32_t least)
{
    const __m256i bound = _mm256_set1_epi16((short)least);
    __m256i total = _mm256_setzero_si256();
    uint32_t lanes[LANES];
    size_t i = 0, count = 0;

    while (i + SUMS <= n) {
        __m256i words = _mm256_setzero_si256();

        /* A round adds at most two to a word. */
        for (unsigned round = 0; round < ROUNDS && i + SUMS <= n; round++, i += SUMS) {
            const __m256i a = load(sums + i), b = load(sums + i + SUMS / 2);

            words = _mm256_sub_epi16(words, _mm256_cmpeq_epi16(_mm256_max_epu16(a, bound), a));
            words = _mm256_sub_epi16(words, _mm256_cmpeq_epi16(_mm256_max_epu16(b, bound), b));
        }
        total = _mm256_add_epi32(total, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
    }
    _mm256_storeu_si256((__m256i *)(void *)lanes, total);
    for (unsigned lane = 0; lane < LANES; lane++)
        count += lanes[lane];
    for (; i < n; i++)
        count += sums[i] >= least;
    return count;
}

/* Returns a bit for each of 32 sums: set if it is at least the bound. */
INLINE uint32_t reach16(const uint16_t *sums, __m256i bound)
{
    const __m256i a = load(sums), b = load(sums + SUMS / 2);
    const __m256i both = _mm256_packs_epi16(_mm256_cmpeq_epi16(_mm256_max_epu16(a, bound), a),
                                            _mm256_cmpeq_epi16(_mm256_max_epu16(b, bound), b));

    return (uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(both, 0xd8));
}

AVX2 static size_t prefilter16(const uint16_t *sums,
                               size_t n,
                               size_t k,
                               uint32_t margin,
                               uint32_t *ret_accepted,
                               size_t *ret_n_accepted,
                               uint32_t *ret_undecided)
{
    uint32_t bound = 0;
    size_t n_accepted = 0, n_undecided = 0, i = 0;

    for (uint32_t bit = 1 << 15; bit > 0; bit /= 2)
        if (count16(sums, n, bound | bit) >= k)
            bound |= bit;

    const uint32_t least = bound > margin ? bound - margin : 0;
    const bool has_accepted = bound + margin < UINT16_MAX;
    const uint32_t accepted = has_accepted ? bound + margin + 1 : UINT16_MAX;
    const __m256i from = _mm256_set1_epi16((short)least),
                  over = _mm256_set1_epi16((short)accepted);

    for (; i + SUMS <= n; i += SUMS) {
        const uint32_t all = reach16(sums + i, from);
        const uint32_t above = has_accepted ? reach16(sums + i, over) : 0;

        if (all == 0)
            continue;
        n_accepted = write_set(ret_accepted, n_accepted, above, (uint32_t)i);
        n_undecided = write_set(ret_undecided, n_undecided, all & ~above, (uint32_t)i);
    }
    for (; i < n; i++) {
        if (has_accepted && sums[i] >= accepted)
            ret_accepted[n_accepted++] = (uint32_t)i;
        else if (sums[i] >= least)
            ret_undecided[n_undecided++] = (uint32_t)i;
    }
    *ret_n_accepted = n_accepted;
    return n_undecided;
}

const struct kv_pq_prefilter_kernels kv_pq_prefilter_avx2 = {
    .name = "avx2",
    .supported = kv_has_avx2,
    .prefilter8 = prefilter8,
    .prefilter16 = prefilter16,
};

#endif
