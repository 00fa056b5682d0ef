/* A group goes through three steps: the scores of all its keys, weights, and the sum of its
 * values.  The first and the last prefetch rows of the next group (plan_prefetch()).
 *
 * Scores are computed by inner_products_avx2.h.  Values are summed in slices of up to four
 * vectors of elements over all rows, so that the sums stay in registers.
 *
 * kernels/README.md lists what did not help. */
#include "kernels/attend.h"
#include "kernels/checksum.h"
#include "kernels/dispatch.h"
#include "kernels/x86/inner_products_avx2.h"

#if defined(__x86_64__)

#include <float.h>
#include <stdbool.h>

enum {
    SLICE = 4, /* vectors of a value at a time, at most */
};

struct group {
    unsigned n;
    const uint8_t *rows[KV_ATTEND_BATCH];
    const uint8_t
        *ahead[KV_ATTEND_BATCH]; /* rows of the next group; stale after its last row */
    /* What is prefetched: with the score of row i as many bytes as a key has, with its value as
     * many as a value has. */
    const uint8_t *with_scores[KV_ATTEND_BATCH], *with_values[KV_ATTEND_BATCH];
    bool is_consecutive;
    float scores[KV_ATTEND_QUERIES_MAX][KV_ATTEND_BATCH]; /* then weights */
    float old[KV_ATTEND_QUERIES_MAX];                     /* c of attend.h: earlier groups */
};

#include "kernels/x86/attend_common.h"

/* Loads the first n elements of fewer than eight, with 0 after them. */
INLINE __m256 load_few(enum kv_key_type type, const uint8_t *at, size_t n)
{
    uint8_t bytes[LANES * sizeof(float)] = {0};

    memcpy(bytes, at, n * element_bytes(type));
    return load8(type, bytes);
}

/* Computes the scores of all keys of a group for a block of queries. */
INLINE void score_block(enum kv_key_type type,
                        const struct group *group,
                        const float *queries,
                        unsigned n_queries,
                        size_t d,
                        bool prefetch_on,
                        float (*ret_scores)[KV_ATTEND_BATCH])
{
    const unsigned n_keys = tile_keys(n_queries);
    const size_t bytes = d * element_bytes(type);
    unsigned row = 0;

    for (; row + n_keys <= group->n; row += n_keys) {
        if (prefetch_on && group->is_consecutive)
            for (unsigned i = 0; i < n_keys; i++)
                prefetch(group->with_scores[row + i], bytes);
        score_tile(type, group->rows + row, n_keys, queries, n_queries, d,
                   prefetch_on && !group->is_consecutive ? group->with_scores + row : NULL,
                   &ret_scores[0][row], KV_ATTEND_BATCH);
    }
    for (; row < group->n; row++) {
        if (prefetch_on)
            prefetch(group->with_scores[row], bytes);
        score_tile(type, group->rows + row, 1, queries, n_queries, d, NULL, &ret_scores[0][row],
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
    const __m256 none = _mm256_set1_ps(-__builtin_inff()), by = _mm256_set1_ps(scale);
    const __m256 limit = _mm256_set1_ps(FLT_MAX);
    __m256 most = none, sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()}, shift;
    float larger;

    for (unsigned i = group->n; i < KV_ATTEND_BATCH; i++)
        scores[i] = -__builtin_inff();
    for (unsigned i = 0; i < KV_ATTEND_BATCH; i += LANES) {
        /* MAXPS and MINPS return their second operand if one is a NaN. */
        __m256 s = _mm256_mul_ps(_mm256_loadu_ps(scores + i), by);

        s = _mm256_min_ps(_mm256_max_ps(s, none), limit);
        if (query_mask != NULL && i < group->n) {
            const __m256i has =
                i + LANES <= group->n
                    ? _mm256_loadu_si256((const __m256i *)(const void *)(query_mask + i))
                    : _mm256_maskload_epi32((const int *)(const void *)(query_mask + i),
                                            first_lanes(group->n - i));

            s = _mm256_blendv_ps(
                none, s,
                _mm256_castsi256_ps(_mm256_sll_epi32(
                    has, _mm_cvtsi32_si128((int)(KV_ATTEND_QUERIES_MAX - 1 - query)))));
        }
        most = _mm256_max_ps(s, most);
        _mm256_storeu_ps(scores + i, s);
    }
    larger = max8(most);
    larger = (larger > *max ? larger : *max) + 0.0f;
    shift = _mm256_set1_ps(larger);
    for (unsigned i = 0; i < KV_ATTEND_BATCH; i += STEP)
        for (unsigned half = 0; half < 2; half++) {
            float *at = scores + i + half * LANES;
            const __m256 weights = exp8(_mm256_sub_ps(_mm256_loadu_ps(at), shift));

            sums[half] = _mm256_add_ps(sums[half], weights);
            _mm256_storeu_ps(at, weights);
        }
    *ret_old = _mm256_cvtss_f32(exp8(_mm256_set1_ps(*max - larger)));
    *sum = _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(*sum), _mm_set_ss(*ret_old),
                                      _mm_set_ss(sum16(sums[0], sums[1]))));
    *max = larger;
}

/* Adds a slice of the values, from byte `at` of each row on, for a block of queries: n_vectors
 * whole vectors, or `few` elements if that is not 0.  All but `at` and `few` are constants at
 * the calls. */
INLINE void add_slice(enum kv_key_type type,
                      const struct group *group,
                      size_t at,
                      unsigned n_vectors,
                      size_t few,
                      unsigned n_queries,
                      bool prefetch_on,
                      size_t prefetch_at,
                      const float (*weights)[KV_ATTEND_BATCH],
                      const float *old,
                      float *output,
                      size_t d_v)
{
    const size_t bytes = LANES * element_bytes(type);
    const __m256i has = first_lanes(few);
    __m256 sums[BLOCK][SLICE];

    for (unsigned query = 0; query < n_queries; query++)
        for (unsigned i = 0; i < n_vectors; i++)
            sums[query][i] = _mm256_setzero_ps();
    for (unsigned row = 0; row < group->n; row++) {
        const uint8_t *value = group->rows[row] + at;
        __m256 held[SLICE];

        if (prefetch_on)
            prefetch(group->with_values[row] + prefetch_at, n_vectors * bytes);
        if (n_queries == BLOCK) {
            for (unsigned i = 0; i < n_vectors; i++)
                held[i] = few > 0 ? load_few(type, value, few) : load8(type, value + i * bytes);
            for (unsigned query = 0; query < n_queries; query++) {
                const __m256 weight = _mm256_broadcast_ss(&weights[query][row]);

                for (unsigned i = 0; i < n_vectors; i++)
                    sums[query][i] = _mm256_fmadd_ps(weight, held[i], sums[query][i]);
            }
        } else {
            for (unsigned query = 0; query < n_queries; query++)
                held[query] = _mm256_broadcast_ss(&weights[query][row]);
            for (unsigned i = 0; i < n_vectors; i++) {
                const __m256 element =
                    few > 0 ? load_few(type, value, few) : load8(type, value + i * bytes);

                for (unsigned query = 0; query < n_queries; query++)
                    sums[query][i] = _mm256_fmadd_ps(held[query], element, sums[query][i]);
            }
        }
    }
    for (unsigned query = 0; query < n_queries; query++)
        for (unsigned i = 0; i < n_vectors; i++) {
            float *to = output + query * d_v + i * LANES;
            const __m256 by = _mm256_broadcast_ss(&old[query]);

            if (few > 0)
                _mm256_maskstore_ps(
                    to, has, _mm256_fmadd_ps(_mm256_maskload_ps(to, has), by, sums[query][i]));
            else
                _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_loadu_ps(to), by, sums[query][i]));
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
    const unsigned most = n_queries == BLOCK ? 3 : SLICE;
    size_t j = 0;

    while (j + LANES <= d_v) {
        const size_t left = (d_v - j) / LANES, prefetch_at = j * element_bytes(type);
        const size_t n = left < most ? left : most, at = key_bytes + prefetch_at;

        if (n == 4)
            add_slice(type, group, at, 4, 0, n_queries, prefetch_on, prefetch_at, weights, old,
                      output + j, d_v);
        else if (n == 3)
            add_slice(type, group, at, 3, 0, n_queries, prefetch_on, prefetch_at, weights, old,
                      output + j, d_v);
        else if (n == 2)
            add_slice(type, group, at, 2, 0, n_queries, prefetch_on, prefetch_at, weights, old,
                      output + j, d_v);
        else
            add_slice(type, group, at, 1, 0, n_queries, prefetch_on, prefetch_at, weights, old,
                      output + j, d_v);
        j += n * LANES;
    }
    if (j < d_v)
        add_slice(type, group, key_bytes + j * element_bytes(type), 1, d_v - j, n_queries,
                  prefetch_on, j * element_bytes(type), weights, old, output + j, d_v);
}

INLINE void add_group(enum kv_key_type type,
                      const struct kv_attend_shape *shape,
                      const float *queries,
                      struct group *group,
                      const uint32_t *query_mask,
                      float *state)
{
    const unsigned n_queries = shape->n_queries;
    const size_t d_k = shape->d_k, d_v = shape->d_v, key_bytes = d_k * element_bytes(type);
    float *output = state + 2 * (size_t)n_queries;

    if (d_k % STEP != 0)
        kv_exact_scores_avx2.score_list(type, (const void *const *)group->rows, group->n, d_k,
                                        queries, n_queries, group->scores[0], KV_ATTEND_BATCH);
    for (unsigned from = 0, n; d_k % STEP == 0 && from < n_queries; from += n) {
        n = block_of(n_queries - from);
#define SCORE(N) \
    score_block(type, group, queries + from * d_k, N, d_k, from == 0, group->scores + from)
        FOR_SIZE(n, SCORE);
#undef SCORE
    }
    for (unsigned query = 0; query < n_queries; query++)
        weigh(group, shape->scale, query_mask, query, group->scores[query], &state[query],
              &state[n_queries + query], &group->old[query]);
    for (unsigned from = 0, n; from < n_queries; from += n) {
        n = block_of(n_queries - from);
#define ADD(N)                                                                          \
    add_block(type, group, key_bytes, N, from == 0,                                     \
              (const float(*)[KV_ATTEND_BATCH])group->scores + from, group->old + from, \
              output + from * d_v, d_v)
        FOR_SIZE(n, ADD);
#undef ADD
    }
}

/* Decides which part of the next group is prefetched when.
 *
 * Isolated rows: keys during the scores, line by line, and values during the values.
 * Prefetched as a whole, a row triggers the hardware prefetcher, which fetches memory after the
 * row as well.
 *
 * Consecutive rows: half of the rows during the scores, the other half during the values.  If
 * only keys were prefetched first, the hardware prefetcher would fetch the values along with
 * them, and memory would be idle while values are summed. */
INLINE void
plan_prefetch(struct group *group, unsigned n_ahead, size_t row_bytes, size_t key_bytes)
{
    const unsigned half = KV_ATTEND_BATCH / 2;
    unsigned n_consecutive = 0;

    for (unsigned i = 1; i < n_ahead; i++)
        n_consecutive += group->ahead[i] == group->ahead[i - 1] + row_bytes;
    group->is_consecutive = n_ahead == KV_ATTEND_BATCH && n_consecutive > half;
    if (group->is_consecutive)
        for (unsigned i = 0; i < half; i++) {
            group->with_scores[2 * i] = group->ahead[i];
            group->with_scores[2 * i + 1] = group->ahead[i] + row_bytes - key_bytes;
            group->with_values[2 * i] = group->ahead[half + i];
            group->with_values[2 * i + 1] = group->ahead[half + i] + key_bytes;
        }
    else
        for (unsigned i = 0; i < group->n; i++) {
            group->with_scores[i] = group->ahead[i];
            group->with_values[i] = group->ahead[i] + key_bytes;
        }
}

const struct kv_attend_kernels kv_attend_avx2 = {
    .name = "avx2",
    .supported = kv_has_avx2,
    .rows = attend_rows,
    .run = attend_run,
};

#endif
