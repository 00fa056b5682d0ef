/* A comparison gives bytes of ones, which are subtracted from counters of a byte; these are
 * added up before the first of them can overflow. */
#include "kernels/byte_select.h"
#include "kernels/dispatch.h"
#include "kernels/x86/avx2.h"

#if defined(__x86_64__)

enum {
    BYTES = 32, /* in a register */
    PARTS = 4,
    STEP_BYTES = PARTS * BYTES,
    STEPS_MAX = 255, /* until counters overflow */
};

static_assert((int)LANES <= (int)KV_TOPK_SPARE, "all lanes are written");

INLINE __m256i load(const uint8_t *at)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)at);
}

/* All ones in the bytes that are at least the bound. */
INLINE __m256i reach(__m256i values, __m256i bound)
{
    return _mm256_cmpeq_epi8(_mm256_max_epu8(values, bound), values);
}

AVX2 static size_t count_from(const uint8_t *values, size_t n, uint8_t least)
{
    const __m256i bound = _mm256_set1_epi8((char)least), zero = _mm256_setzero_si256();
    const uint8_t *end = values + n;
    __m256i sums = zero;
    uint64_t lanes[4];
    size_t n_from = 0;

    while (end - values >= STEP_BYTES) {
        __m256i counts[PARTS] = {zero, zero, zero, zero};

        for (unsigned step = 0; step < STEPS_MAX && end - values >= STEP_BYTES; step++) {
            for (unsigned part = 0; part < PARTS; part++)
                counts[part] =
                    _mm256_sub_epi8(counts[part], reach(load(values + part * BYTES), bound));
            values += STEP_BYTES;
        }
        for (unsigned part = 0; part < PARTS; part++)
            sums = _mm256_add_epi64(sums, _mm256_sad_epu8(counts[part], zero));
    }
    for (; values < end; values++)
        n_from += *values >= least;
    _mm256_storeu_si256((__m256i *)(void *)lanes, sums);
    return n_from + lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

/* Returns the first n bits of the set, which has more. */
INLINE uint32_t first_of(uint32_t set, uint64_t n)
{
    uint32_t first = 0;

    for (; n > 0; n--, set &= set - 1)
        first |= set & -set;
    return first;
}

/* Collects from 32 values; `base` has the first one's number in all lanes. */
INLINE size_t collect32(__m256i values,
                        __m256i bound,
                        uint64_t *ties,
                        __m256i base,
                        uint32_t *ret_indices,
                        size_t n)
{
    uint32_t equal = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(values, bound));
    uint32_t chosen = (uint32_t)_mm256_movemask_epi8(reach(values, bound)) & ~equal;

    if (*ties > 0) {
        const uint32_t n_equal = (uint32_t)__builtin_popcount(equal);

        equal = n_equal > *ties ? first_of(equal, *ties) : equal;
        chosen |= equal;
        *ties -= n_equal > *ties ? *ties : n_equal;
    }
    for (unsigned lane = 0; lane < BYTES; lane += LANES) {
        const uint32_t before = chosen & ((1u << lane) - 1);
        const __m128i lanes =
            _mm_cvtsi64_si128((long long)kv_lanes_of[chosen >> lane & UINT8_MAX]);

        /* As many numbers behind those of the set are overwritten as there are lanes. */
        _mm256_storeu_si256(
            (__m256i *)(void *)(ret_indices + n + (size_t)__builtin_popcount(before)),
            _mm256_add_epi32(_mm256_cvtepu8_epi32(lanes), base));
        base = _mm256_add_epi32(base, _mm256_set1_epi32(LANES));
    }
    return n + (size_t)__builtin_popcount(chosen);
}

AVX2 static size_t collect(const uint8_t *values,
                           size_t n,
                           uint8_t bound,
                           uint64_t *ties,
                           uint32_t base,
                           uint32_t *ret_indices)
{
    const __m256i at_bound = _mm256_set1_epi8((char)bound);
    uint64_t left = *ties;
    size_t n_collected = 0, i = 0;

    /* One branch for several registers: whether one of them has any is hard to predict. */
    for (; i + STEP_BYTES <= n; i += STEP_BYTES) {
        __m256i at[PARTS], most;

        for (unsigned part = 0; part < PARTS; part++)
            at[part] = load(values + i + part * BYTES);
        most = _mm256_max_epu8(_mm256_max_epu8(at[0], at[1]), _mm256_max_epu8(at[2], at[3]));
        if (_mm256_movemask_epi8(reach(most, at_bound)) == 0)
            continue;
        for (unsigned part = 0; part < PARTS; part++)
            n_collected = collect32(at[part], at_bound, &left,
                                    _mm256_set1_epi32((int)(base + (uint32_t)i + part * BYTES)),
                                    ret_indices, n_collected);
    }
    for (; i < n; i++) {
        if (values[i] < bound || (values[i] == bound && left == 0))
            continue;
        left -= values[i] == bound;
        ret_indices[n_collected++] = base + (uint32_t)i;
    }
    *ties = left;
    return n_collected;
}

const struct kv_bytes_kernels kv_bytes_avx2 = {
    .name = "avx2",
    .supported = kv_has_avx2,
    .count_from = count_from,
    .collect = collect,
};

#endif
