/* A group goes through three steps: the scores of all its keys, weights, and the sum of its
 * values.  The first prefetches the keys of the next group, the last its values.
 *
 * Scores: four rows by four queries are sixteen sums (inner_products_avx512.h), and a converted
 * element is used for all queries of a block.  Values: slices of four vectors of elements, for
 * four queries, are sixteen sums as well. */
#include "kernels/attend.h"
#include "kernels/checksum.h"
#include "kernels/dispatch.h"
#include "kernels/x86/for_size.h"
#include "kernels/x86/inner_products_avx512.h"

#if defined(__x86_64__)

#include <float.h>
#include <stdbool.h>

enum {
    SLICE = 4, /* vectors of a value at a time, at most */
};

struct group {
    unsigned n;
    const uint8_t *rows[KV_ATTEND_BATCH];
    const uint8_t *ahead[KV_ATTEND_BATCH]; /* rows of the next group, or of this one again */
    float scores[KV_ATTEND_QUERIES_MAX][KV_ATTEND_BATCH]; /* then weights */
    float old[KV_ATTEND_QUERIES_MAX];                     /* c of attend.h: earlier groups */
};

#include "kernels/x86/attend_common.h"

/* Computes the scores of all keys of a group for a block of queries, whose number is a constant
 * at the calls. */
INLINE void score_block(enum kv_key_type type,
                        const struct group *group,
                        const float *queries,
                        unsigned n_queries,
                        size_t d,
                        bool prefetch_on,
                        float (*ret_scores)[KV_ATTEND_BATCH])
{
    const size_t bytes = d * element_bytes(type);
    unsigned row = 0;

    for (; row + TILE <= group->n; row += TILE) {
        if (prefetch_on)
            for (unsigned i = 0; i < TILE; i++)
                prefetch(group->ahead[row + i], bytes);
        score_tile(type, group->rows + row, TILE, queries, n_queries, d, &ret_scores[0][row],
                   KV_ATTEND_BATCH);
    }
    for (; row < group->n; row++) {
        if (prefetch_on)
            prefetch(group->ahead[row], bytes);
        score_tile(type, group->rows + row, 1, queries, n_queries, d, &ret_scores[0][row],
                   KV_ATTEND_BATCH);
    }
}

/* Computes the weights of one query, as attend.h defines them. */
INLINE void weigh(const struct group *group,
                  float scale,
                  const uint32_t *query_mask,
                  unsigned query,
                  float *scores,
                  float *max,
                  float *sum,
                  float *ret_old)
{
    const __m512 none = _mm512_set1_ps(-__builtin_inff()), by = _mm512_set1_ps(scale);
    const __m512 limit = _mm512_set1_ps(FLT_MAX);
    const __m512i bit = _mm512_set1_epi32((int)(1u << query));
    __m512 most = none, sums = _mm512_setzero_ps(), shift;
    float larger;

    for (unsigned i = 0; i < KV_ATTEND_BATCH; i += LANES) {
        const __mmask16 here = first_lanes(i < group->n ? group->n - i : 0);
        __m512 s = _mm512_mul_ps(_mm512_maskz_loadu_ps(here, scores + i), by);
        __mmask16 has = here;

        if (query_mask != NULL)
            has = _mm512_mask_test_epi32_mask(
                here, _mm512_maskz_loadu_epi32(here, query_mask + i), bit);
        /* MAXPS and MINPS return their second operand if one is a NaN. */
        s = _mm512_min_ps(_mm512_max_ps(s, none), limit);
        s = _mm512_mask_mov_ps(none, has, s);
        most = _mm512_max_ps(s, most);
        _mm512_storeu_ps(scores + i, s);
    }
    larger = max16(most);
    larger = (larger > *max ? larger : *max) + 0.0f;
    shift = _mm512_set1_ps(larger);
    for (unsigned i = 0; i < KV_ATTEND_BATCH; i += LANES) {
        const __m512 weights = exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + i), shift));

        sums = _mm512_add_ps(sums, weights);
        _mm512_storeu_ps(scores + i, weights);
    }
    *ret_old = _mm512_cvtss_f32(exp16(_mm512_set1_ps(*max - larger)));
    *sum = _mm_cvtss_f32(
        _mm_fmadd_ss(_mm_set_ss(*sum), _mm_set_ss(*ret_old), _mm_set_ss(sum16(sums))));
    *max = larger;
}

/* Adds a slice of the values, from byte `at` of each row on, for a block of queries: n_vectors
 * vectors, of which the last one has the lanes `last`.  All but `at` and `last` are constants
 * at the calls; `whole` says that the last vector has all lanes. */
INLINE void add_slice(enum kv_key_type type,
                      const struct group *group,
                      size_t at,
                      unsigned n_vectors,
                      bool whole,
                      __mmask16 last,
                      unsigned n_queries,
                      bool prefetch_on,
                      const float (*weights)[KV_ATTEND_BATCH],
                      const float *old,
                      float *output,
                      size_t d_v)
{
    const size_t bytes = LANES * element_bytes(type);
    __m512 sums[TILE][SLICE];

    for (unsigned query = 0; query < n_queries; query++)
        for (unsigned i = 0; i < n_vectors; i++)
            sums[query][i] = _mm512_setzero_ps();
    for (unsigned row = 0; row < group->n; row++) {
        const uint8_t *value = group->rows[row] + at;
        __m512 held[SLICE];

        if (prefetch_on)
            prefetch(group->ahead[row] + at, n_vectors * bytes);
        for (unsigned i = 0; i < n_vectors; i++)
            held[i] = whole || i + 1 < n_vectors ? load16(type, value + i * bytes)
                                                 : load_some(type, last, value + i * bytes);
        for (unsigned query = 0; query < n_queries; query++) {
            const __m512 weight = _mm512_set1_ps(weights[query][row]);

            for (unsigned i = 0; i < n_vectors; i++)
                sums[query][i] = _mm512_fmadd_ps(weight, held[i], sums[query][i]);
        }
    }
    for (unsigned query = 0; query < n_queries; query++)
        for (unsigned i = 0; i < n_vectors; i++) {
            float *to = output + query * d_v + i * LANES;
            const __m512 by = _mm512_set1_ps(old[query]);

            if (whole || i + 1 < n_vectors)
                _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), by, sums[query][i]));
            else
                _mm512_mask_storeu_ps(
                    to, last,
                    _mm512_fmadd_ps(_mm512_maskz_loadu_ps(last, to), by, sums[query][i]));
        }
}

/* Adds the values of a group with the weights of a block of queries. */
INLINE void add_block(enum kv_key_type type,
                      const struct group *group,
                      size_t key_bytes,
                      unsigned n_queries,
                      bool prefetch_on,
                      const float (*weights)[KV_ATTEND_BATCH],
                      const float *old,
                      float *output,
                      size_t d_v)
{
    const __mmask16 all = first_lanes(LANES);
    size_t j = 0;

    for (; j + SLICE * LANES <= d_v; j += SLICE * LANES)
        add_slice(type, group, key_bytes + j * element_bytes(type), SLICE, true, all, n_queries,
                  prefetch_on, weights, old, output + j, d_v);
    if (j + 2 * LANES <= d_v) {
        add_slice(type, group, key_bytes + j * element_bytes(type), 2, true, all, n_queries,
                  prefetch_on, weights, old, output + j, d_v);
        j += 2 * LANES;
    }
    if (j + LANES <= d_v) {
        add_slice(type, group, key_bytes + j * element_bytes(type), 1, true, all, n_queries,
                  prefetch_on, weights, old, output + j, d_v);
        j += LANES;
    }
    if (j < d_v)
        add_slice(type, group, key_bytes + j * element_bytes(type), 1, false,
                  first_lanes(d_v - j), n_queries, prefetch_on, weights, old, output + j, d_v);
}

INLINE void add_group(enum kv_key_type type,
                      const struct kv_attend_shape *shape,
                      const float *queries,
                      struct group *group,
                      const uint32_t *query_mask,
                      float *state)
{
    const unsigned n_queries = shape->n_queries, n_blocks = (n_queries + TILE - 1) / TILE;
    const size_t d_k = shape->d_k, d_v = shape->d_v, key_bytes = d_k * element_bytes(type);
    float *output = state + 2 * (size_t)n_queries;

    /* Blocks as even as can be: 5 queries are 3 and 2. */
    for (unsigned block = 0, from = 0, n; block < n_blocks; block++, from += n) {
        n = (n_queries - from + n_blocks - block - 1) / (n_blocks - block);
#define SCORE(N) \
    score_block(type, group, queries + from * d_k, N, d_k, block == 0, group->scores + from)
        FOR_SIZE(n, SCORE);
#undef SCORE
    }
    for (unsigned query = 0; query < n_queries; query++)
        weigh(group, shape->scale, query_mask, query, group->scores[query], &state[query],
              &state[n_queries + query], &group->old[query]);
    for (unsigned block = 0, from = 0, n; block < n_blocks; block++, from += n) {
        n = (n_queries - from + n_blocks - block - 1) / (n_blocks - block);
#define ADD(N)                                                                          \
    add_block(type, group, key_bytes, N, block == 0,                                    \
              (const float(*)[KV_ATTEND_BATCH])group->scores + from, group->old + from, \
              output + from * d_v, d_v)
        FOR_SIZE(n, ADD);
#undef ADD
    }
}

/* Nothing to plan: keys are prefetched with the scores, values with the values. */
INLINE void
plan_prefetch(struct group *group, unsigned n_ahead, size_t row_bytes, size_t key_bytes)
{
    (void)group, (void)n_ahead, (void)row_bytes, (void)key_bytes;
}

const struct kv_attend_kernels kv_attend_avx512 = {
    .name = "avx512",
    .supported = kv_has_avx512,
    .rows = attend_rows,
    .run = attend_run,
};

#endif
