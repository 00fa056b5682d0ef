/* attend_common.h - private to kernels/: divides calls into groups of rows, for attend_avx2.c
 * and attend_avx512.c.  While one group is computed, the rows of the next are prefetched.
 *
 * Included after avx2.h or avx512.h, which define TARGET and INLINE, and after the definition
 * of struct group, whose members `n`, `rows` and `ahead` are used here.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_X86_ATTEND_COMMON_H
#define KV_KERNELS_X86_ATTEND_COMMON_H

#if defined(__x86_64__)

/* Defined by each instruction set.
 *
 * Adds a group to the state; the type is a constant at the calls. */
INLINE void add_group(enum kv_key_type type,
                      const struct kv_attend_shape *shape,
                      const float *queries,
                      struct group *group,
                      const uint32_t *query_mask,
                      float *state);

/* Decides which part of the next group is prefetched when. */
INLINE void
plan_prefetch(struct group *group, unsigned n_ahead, size_t row_bytes, size_t key_bytes);

/* Prefetches into L2, which can have more misses outstanding than L1. */
INLINE void prefetch(const uint8_t *from, size_t bytes)
{
    const char *at = (const char *)from, *end = at + bytes;

    for (; at + 4 * LINE_BYTES <= end; at += 4 * LINE_BYTES) {
        _mm_prefetch(at, _MM_HINT_T1);
        _mm_prefetch(at + LINE_BYTES, _MM_HINT_T1);
        _mm_prefetch(at + 2 * LINE_BYTES, _MM_HINT_T1);
        _mm_prefetch(at + 3 * LINE_BYTES, _MM_HINT_T1);
    }
    for (; at < end; at += LINE_BYTES)
        _mm_prefetch(at, _MM_HINT_T1);
}

/* One function per type, not inlined: each is large, and a call has one type throughout. */
TARGET __attribute__((noinline)) static void add_fp32(const struct kv_attend_shape *shape,
                                                      const float *queries,
                                                      struct group *group,
                                                      const uint32_t *query_mask,
                                                      float *state)
{
    add_group(KV_KEY_FP32, shape, queries, group, query_mask, state);
}

TARGET __attribute__((noinline)) static void add_fp16(const struct kv_attend_shape *shape,
                                                      const float *queries,
                                                      struct group *group,
                                                      const uint32_t *query_mask,
                                                      float *state)
{
    add_group(KV_KEY_FP16, shape, queries, group, query_mask, state);
}

TARGET __attribute__((noinline)) static void add_bf16(const struct kv_attend_shape *shape,
                                                      const float *queries,
                                                      struct group *group,
                                                      const uint32_t *query_mask,
                                                      float *state)
{
    add_group(KV_KEY_BF16, shape, queries, group, query_mask, state);
}

/* Finds the rows of the group that begins with row `from`, in a list or, if that is NULL, in a
 * run.  Returns their number, 0 after the last row. */
INLINE unsigned find_rows(const void *const *list,
                          const uint8_t *run,
                          size_t stride,
                          size_t from,
                          size_t n,
                          const uint8_t **ret_rows)
{
    const unsigned count = n - from < KV_ATTEND_BATCH ? (unsigned)(n - from) : KV_ATTEND_BATCH;

    for (unsigned i = 0; i < count; i++)
        ret_rows[i] = list != NULL ? list[from + i] : run + (from + i) * stride;
    return count;
}

TARGET static void attend(const struct kv_attend_shape *shape,
                          const float *queries,
                          const void *const *list,
                          const uint8_t *run,
                          size_t stride,
                          size_t n,
                          const uint32_t *query_mask,
                          const uint32_t *seeds,
                          uint32_t *ret_crcs,
                          float *state)
{
    const size_t row_bytes = kv_attend_row_bytes(shape);
    const size_t key_bytes = row_bytes / (shape->d_k + shape->d_v) * shape->d_k;
    struct group group;
    unsigned n_ahead;

    if (n == 0)
        return;
    n_ahead = find_rows(list, run, stride, 0, n, group.ahead);
    for (unsigned i = 0; i < n_ahead; i++)
        prefetch(group.ahead[i], row_bytes);
    for (size_t from = 0; from < n; from += group.n) {
        group.n = n_ahead;
        memcpy(group.rows, group.ahead, group.n * sizeof(group.rows[0]));
        n_ahead = find_rows(list, run, stride, from + group.n, n, group.ahead);
        if (seeds != NULL)
            kv_rows_crc_list((const void *const *)group.rows, group.n, row_bytes, seeds + from,
                             ret_crcs + from);
        plan_prefetch(&group, n_ahead, row_bytes, key_bytes);
        if (shape->type == KV_KEY_FP32)
            add_fp32(shape, queries, &group, query_mask != NULL ? query_mask + from : NULL,
                     state);
        else if (shape->type == KV_KEY_FP16)
            add_fp16(shape, queries, &group, query_mask != NULL ? query_mask + from : NULL,
                     state);
        else
            add_bf16(shape, queries, &group, query_mask != NULL ? query_mask + from : NULL,
                     state);
    }
}

TARGET static void attend_rows(const struct kv_attend_shape *shape,
                               const float *queries,
                               const void *const *rows,
                               size_t n,
                               const uint32_t *query_mask,
                               const uint32_t *seeds,
                               uint32_t *ret_crcs,
                               float *state)
{
    attend(shape, queries, rows, NULL, 0, n, query_mask, seeds, ret_crcs, state);
}

TARGET static void attend_run(const struct kv_attend_shape *shape,
                              const float *queries,
                              const void *rows,
                              size_t stride,
                              size_t n,
                              const uint32_t *query_mask,
                              float *state)
{
    attend(shape, queries, NULL, rows, stride, n, query_mask, NULL, NULL, state);
}

#endif

#endif
