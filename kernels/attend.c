#include "kernels/attend.h"
#include "kernels/checksum.h"
#include "kernels/dispatch.h"
#include "kernels/exp.h"
#include "kernels/lanes.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <string.h>

enum {
    MERGE_PIECE = 64, /* elements of an output merged at a time: their sums stay on the stack */
};

static const struct kv_attend_kernels *best;

static int always(void)
{
    return 1;
}

void kv_attend_begin(const struct kv_attend_shape *shape, float *state)
{
    assert(kv_attend_shape_valid(shape));
    for (uint32_t query = 0; query < shape->n_queries; query++)
        state[query] = -INFINITY;
    memset(state + shape->n_queries, 0,
           (kv_attend_floats(shape) - shape->n_queries) * sizeof(*state));
}

/* Turns the scores (n) of one query into weights, and updates its maximum and sum.  *ret_old is
 * c of attend.h, the factor by which the output of earlier groups must be multiplied. */
static void
weigh(float *scores, unsigned n, float scale, float *max, float *sum, float *ret_old)
{
    float lanes[KV_SUM_LANES] = {0}, most = *max;

    for (unsigned i = 0; i < n; i++) {
        float score = scores[i] * scale;

        score = score > -INFINITY ? score : -INFINITY; /* false for a NaN */
        score = score < FLT_MAX ? score : FLT_MAX;
        most = score > most ? score : most;
        scores[i] = score;
    }
    most += 0.0f;
    for (unsigned i = 0; i < n; i++) {
        scores[i] = kv_exp(scores[i] - most);
        lanes[i % KV_SUM_LANES] += scores[i];
    }
    *ret_old = kv_exp(*max - most);
    *sum = fmaf(*sum, *ret_old, kv_sum_lanes(lanes));
    *max = most;
}

static void scalar_group(const struct kv_attend_shape *shape,
                         const float *queries,
                         const void *const *rows,
                         unsigned n,
                         const uint32_t *query_mask,
                         float *state)
{
    const struct kv_exact_scores_kernels *keys = kv_exact_scores_kernels_at(0);
    const size_t n_queries = shape->n_queries, d_v = shape->d_v;
    const size_t key_bytes = kv_attend_row_bytes(shape) / (shape->d_k + d_v) * shape->d_k;
    float scores[KV_ATTEND_QUERIES_MAX][KV_ATTEND_BATCH], old[KV_ATTEND_QUERIES_MAX];
    float value[KV_ATTEND_D_MAX], *output = state + 2 * n_queries;
    float added[KV_ATTEND_D_MAX];

    keys->score_list(shape->type, rows, n, shape->d_k, queries, n_queries, scores[0],
                     KV_ATTEND_BATCH);
    for (size_t query = 0; query < n_queries; query++) {
        for (unsigned i = 0; query_mask != NULL && i < n; i++)
            if ((query_mask[i] >> query & 1) == 0)
                scores[query][i] = -INFINITY;
        weigh(scores[query], n, shape->scale, &state[query], &state[n_queries + query],
              &old[query]);
    }
    for (size_t query = 0; query < n_queries; query++, output += d_v) {
        memset(added, 0, d_v * sizeof(*added));
        for (unsigned i = 0; i < n; i++) {
            keys->load(shape->type, (const uint8_t *)rows[i] + key_bytes, 0, 1, d_v, value);
            for (size_t j = 0; j < d_v; j++)
                added[j] = fmaf(scores[query][i], value[j], added[j]);
        }
        for (size_t j = 0; j < d_v; j++)
            output[j] = fmaf(output[j], old[query], added[j]);
    }
}

static void scalar_rows(const struct kv_attend_shape *shape,
                        const float *queries,
                        const void *const *rows,
                        size_t n,
                        const uint32_t *query_mask,
                        const uint32_t *seeds,
                        uint32_t *ret_crcs,
                        float *state)
{
    if (seeds != NULL)
        kv_rows_crc_list(rows, n, kv_attend_row_bytes(shape), seeds, ret_crcs);
    for (size_t from = 0; from < n; from += KV_ATTEND_BATCH)
        scalar_group(shape, queries, rows + from,
                     n - from < KV_ATTEND_BATCH ? (unsigned)(n - from) : KV_ATTEND_BATCH,
                     query_mask != NULL ? query_mask + from : NULL, state);
}

static void scalar_run(const struct kv_attend_shape *shape,
                       const float *queries,
                       const void *rows,
                       size_t stride,
                       size_t n,
                       const uint32_t *query_mask,
                       float *state)
{
    const void *list[KV_ATTEND_BATCH];

    for (size_t from = 0; from < n; from += KV_ATTEND_BATCH) {
        const unsigned count =
            n - from < KV_ATTEND_BATCH ? (unsigned)(n - from) : KV_ATTEND_BATCH;

        for (unsigned i = 0; i < count; i++)
            list[i] = (const uint8_t *)rows + (from + i) * stride;
        scalar_group(shape, queries, list, count, query_mask != NULL ? query_mask + from : NULL,
                     state);
    }
}

void kv_attend_end(const struct kv_attend_shape *shape,
                   const float *state,
                   float *ret_output,
                   float *ret_lse)
{
    const size_t n_queries = shape->n_queries, d_v = shape->d_v;
    const float *sums = state + n_queries, *output = sums + n_queries;

    for (size_t query = 0; query < n_queries; query++, output += d_v, ret_output += d_v) {
        const float by = 1 / sums[query];

        if (sums[query] == 0) {
            memset(ret_output, 0, d_v * sizeof(*ret_output));
            ret_lse[query] = -INFINITY;
            continue;
        }
        for (size_t j = 0; j < d_v; j++)
            ret_output[j] = output[j] * by;
        ret_lse[query] = (float)((double)state[query] + log((double)sums[query]));
    }
}

void kv_attend_merge(size_t n_queries,
                     size_t d_v,
                     size_t n_parts,
                     const float *const *outputs,
                     const float *const *lses,
                     float *ret_output,
                     float *ret_lse)
{
    double weights[KV_ATTEND_PARTS_MAX];

    assert(n_parts <= KV_ATTEND_PARTS_MAX);
    for (size_t query = 0; query < n_queries; query++) {
        double most = -INFINITY, sum = 0;

        for (size_t i = 0; i < n_parts; i++) {
            const double lse = (double)fminf(lses[i][query], FLT_MAX);

            weights[i] = isnan(lses[i][query]) ? -INFINITY : lse;
            most = weights[i] > most ? weights[i] : most;
        }
        for (size_t i = 0; i < n_parts; i++) {
            weights[i] = weights[i] == -INFINITY ? 0 : exp(weights[i] - most);
            sum += weights[i];
        }
        /* ret_output may be one of the outputs, so a piece of all of them is read before it is
         * written. */
        for (size_t from = 0; from < d_v; from += MERGE_PIECE) {
            const size_t n = d_v - from < MERGE_PIECE ? d_v - from : MERGE_PIECE;
            double merged[MERGE_PIECE] = {0};

            for (size_t i = 0; i < n_parts; i++) {
                const float *output = outputs[i] + query * d_v + from;

                if (lses[i][query] > -INFINITY)
                    for (size_t j = 0; j < n; j++)
                        merged[j] += weights[i] * (double)output[j];
            }
            for (size_t j = 0; j < n; j++)
                ret_output[query * d_v + from + j] = sum > 0 ? (float)(merged[j] / sum) : 0;
        }
        ret_lse[query] = sum > 0 ? (float)(most + log(sum)) : -INFINITY;
    }
}

static const struct kv_attend_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .rows = scalar_rows,
    .run = scalar_run,
};

/* Slowest first; choose() takes the last one that the CPU supports.  It runs before main(), so
 * that calls need neither a lock nor a check. */
static const struct kv_attend_kernels *const tiers[] = {
    &scalar,
#if defined(__x86_64__)
    &kv_attend_avx2,
    &kv_attend_avx512,
#endif
};

__attribute__((constructor)) static void choose(void)
{
    for (unsigned i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++)
        if (tiers[i]->supported())
            best = tiers[i];
}

const struct kv_attend_kernels *kv_attend_kernels_at(unsigned i)
{
    for (unsigned tier = 0; tier < sizeof(tiers) / sizeof(tiers[0]); tier++)
        if (tiers[tier]->supported() && i-- == 0)
            return tiers[tier];
    return NULL;
}

void kv_attend_rows(const struct kv_attend_shape *shape,
                    const float *queries,
                    const void *const *rows,
                    size_t n,
                    const uint32_t *query_mask,
                    float *state)
{
    best->rows(shape, queries, rows, n, query_mask, NULL, NULL, state);
}

void kv_attend_checked(const struct kv_attend_shape *shape,
                       const float *queries,
                       const void *const *rows,
                       size_t n,
                       const uint32_t *query_mask,
                       const uint32_t *seeds,
                       uint32_t *ret_crcs,
                       float *state)
{
    best->rows(shape, queries, rows, n, query_mask, seeds, ret_crcs, state);
}

void kv_attend_run(const struct kv_attend_shape *shape,
                   const float *queries,
                   const void *rows,
                   size_t stride,
                   size_t n,
                   const uint32_t *query_mask,
                   float *state)
{
    best->run(shape, queries, rows, stride, n, query_mask, state);
}
