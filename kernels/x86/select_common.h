/* select_common.h - private to kernels/: divides calls into blocks of query heads and into
 * passes, for select_avx2.c and select_avx512.c.
 *
 * Included after avx2.h or avx512.h, which define TARGET and INLINE.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_X86_SELECT_COMMON_H
#define KV_KERNELS_X86_SELECT_COMMON_H

#if defined(__x86_64__)

enum {
    MERGED = 4, /* query heads at once */
};

/* Returns whether a sort key is that of a number, -inf and +inf included.  Scores can then be
 * compared with that number directly, which has the order of sort keys except for NaN.
 * 0x7fffffff would be -0, which kv_score_key() never returns. */
INLINE int is_number(uint32_t sort_key)
{
    return sort_key >= 0x007fffff && sort_key <= 0xff800000 && sort_key != 0x7fffffff;
}

INLINE float number_of(uint32_t sort_key)
{
    const uint32_t bits = sort_key & 0x80000000 ? sort_key ^ 0x80000000 : ~sort_key;
    float number;

    memcpy(&number, &bits, sizeof(number));
    return number;
}

/* Counts n_rows of score 0 in one pass.  Many weights are 0, and counted one by one each would
 * wait for the one before, in the same bin. */
INLINE void count_zeros(struct kv_topk *selector, uint32_t n_rows, uint32_t pass)
{
    const uint32_t sort_key = kv_score_key(0);

    if (pass == 0 ||
        sort_key >> kv_select_above(pass) == selector->bound >> kv_select_above(pass))
        selector->bins[sort_key >> kv_select_shift(pass) & kv_select_mask(pass)] += n_rows;
}

/* Defined by each instruction set.
 *
 * Merges up to MERGED heads; n_queries and is_sum are constants at the calls. */
INLINE void merge_some(const float *exps,
                       size_t exps_stride,
                       const float *factors,
                       unsigned n_queries,
                       size_t n,
                       float *merged,
                       int is_sum);

/* Counts one pass; `pass` is a constant at the calls, and so is `counted` in the first pass,
 * which sees all scores. */
INLINE void count_pass(struct kv_topk *selector,
                       const float *scores,
                       const uint32_t *counts,
                       size_t n,
                       uint32_t pass,
                       int counted);

INLINE void merge_by(const float *exps,
                     size_t exps_stride,
                     const float *factors,
                     size_t n_queries,
                     size_t n,
                     float *merged,
                     int is_sum)
{
    for (; n_queries >= MERGED; n_queries -= MERGED) {
        merge_some(exps, exps_stride, factors, MERGED, n, merged, is_sum);
        exps += MERGED * exps_stride;
        factors += MERGED;
    }
    for (; n_queries > 0; n_queries--, exps += exps_stride, factors++)
        merge_some(exps, exps_stride, factors, 1, n, merged, is_sum);
}

TARGET static void merge_all(enum kv_weights_merge by,
                             const float *exps,
                             size_t exps_stride,
                             const float *factors,
                             size_t n_queries,
                             size_t n,
                             float *merged)
{
    if (by == KV_WEIGHTS_SUM)
        merge_by(exps, exps_stride, factors, n_queries, n, merged, 1);
    else
        merge_by(exps, exps_stride, factors, n_queries, n, merged, 0);
}

TARGET static void
count(struct kv_topk *selector, const float *scores, const uint32_t *counts, size_t n)
{
    const int counted = counts != NULL;

    switch (selector->pass) {
    case 0:
        if (counted)
            count_pass(selector, scores, counts, n, 0, 1);
        else
            count_pass(selector, scores, counts, n, 0, 0);
        break;
    case 1:
        count_pass(selector, scores, counts, n, 1, counted);
        break;
    default:
        count_pass(selector, scores, counts, n, 2, counted);
    }
}

#endif

#endif
