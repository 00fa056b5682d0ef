#include "kernels/estimate.h"
#include "kernels/dispatch.h"
#include "kernels/exact_scores.h"
#include "kernels/exp.h"
#include "kernels/lanes.h"
#include "kernels/summary_common.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <string.h>

static const float DAMPING = 0.15f; /* of the variance correction; see estimate.h */

static const struct kv_estimate_kernels *best;

static int always(void)
{
    return 1;
}

/* Returns the first position in ascending `tokens` whose token is not below `token`.  Often it
 * is the first, because a list starts in the group. */
static size_t place_of(const uint32_t *tokens, size_t n, uint32_t token)
{
    size_t begin = 0;

    if (n == 0 || tokens[0] >= token)
        return 0;
    while (begin < n) {
        const size_t middle = begin + (n - begin) / 2;

        if (tokens[middle] < token)
            begin = middle + 1;
        else
            n = middle;
    }
    return begin;
}

/* Counts rows [begin, end) of the group by summary number, KV_SUMMARY_NONE included.  Starts
 * from 0 or from the group's own counts, whichever leaves fewer rows to visit.  The array has
 * an entry for every byte, so that KV_SUMMARY_NONE needs no branch. */
static void count_rows(const struct kv_summary_shape *shape,
                       const void *group,
                       uint32_t begin,
                       uint32_t end,
                       uint32_t n_rows,
                       uint16_t ret_counts[KV_SUMMARY_NONE + 1])
{
    const uint8_t *numbers = kv_summary_at(group, kv_summary_at_numbers(shape));
    const size_t bytes = kv_summary_count(shape) * sizeof(*ret_counts);

    ret_counts[KV_SUMMARY_NONE] = 0;
    if (end - begin < n_rows / 2) {
        memset(ret_counts, 0, bytes);
        for (uint32_t row = begin; row < end; row++)
            ret_counts[numbers[row]]++;
        return;
    }
    memcpy(ret_counts, kv_summary_at(group, kv_summary_at_counts(shape)), bytes);
    for (uint32_t row = 0; row < begin; row++)
        ret_counts[numbers[row]]--;
    for (uint32_t row = end; row < n_rows; row++)
        ret_counts[numbers[row]]--;
}

/* Which rows are selected is kept as a set of bits, so that the loop over scored rows has no
 * branch on it: such branches are unpredictable.  A row is always written to ret_places, and
 * n_over advances only if it counts.  The count of KV_SUMMARY_NONE is not returned. */
size_t kv_estimate_count(const struct kv_summary_shape *shape,
                         const void *group,
                         uint32_t first,
                         uint32_t begin,
                         uint32_t end,
                         const uint32_t *selected,
                         size_t n_selected,
                         const uint32_t *scored,
                         size_t n_scored,
                         uint16_t *ret_counts,
                         uint32_t *ret_places,
                         uint8_t *ret_numbers)
{
    const uint8_t *numbers = kv_summary_at(group, kv_summary_at_numbers(shape));
    uint64_t is_selected[KV_SUMMARY_ROWS_MAX / 64] = {0};
    uint16_t left[KV_SUMMARY_NONE + 1];
    struct kv_summary_head head;
    size_t n_over = 0;

    memcpy(&head, group, sizeof(head));
    begin = begin > first ? begin - first : 0;
    end = end > first ? end - first : 0;
    end = end < head.n_rows ? end : head.n_rows;
    begin = begin < end ? begin : end;
    count_rows(shape, group, begin, end, head.n_rows, left);
    for (size_t t = place_of(selected, n_selected, first + begin); t < n_selected; t++) {
        const uint32_t row = selected[t] - first;

        if (row >= end)
            break;
        left[numbers[row]]--;
        is_selected[row / 64] |= (uint64_t)1 << row % 64;
    }
    for (size_t s = place_of(scored, n_scored, first + begin); s < n_scored; s++) {
        const uint32_t row = scored[s] - first;

        if (row >= end)
            break;
        const unsigned is_over = ~(is_selected[row / 64] >> row % 64) & 1;

        left[numbers[row]] = (uint16_t)(left[numbers[row]] - is_over);
        ret_places[n_over] = (uint32_t)s;
        ret_numbers[n_over] = numbers[row];
        n_over += is_over & (numbers[row] != KV_SUMMARY_NONE);
    }
    memcpy(ret_counts, left, kv_summary_count(shape) * sizeof(*ret_counts));
    return n_over;
}

void kv_estimate_squares(size_t d_k, const float *queries, size_t n, float *ret_squares)
{
    for (size_t query = 0; query < n; query++, queries += d_k)
        kv_exact_scores_score(KV_KEY_FP32, queries, 0, 1, d_k, queries, 1, ret_squares + query,
                              1);
}

void kv_estimate_begin(const struct kv_summary_shape *shape, size_t n_queries, float *state)
{
    assert(kv_summary_shape_valid(shape));
    memset(state, 0, kv_estimate_floats(shape, n_queries) * sizeof(*state));
    for (size_t query = 0; query < n_queries; query++)
        state[query] = -INFINITY;
}

void kv_estimate_end(const struct kv_summary_shape *shape,
                     size_t n_queries,
                     const float *state,
                     float *ret_output,
                     float *ret_lse)
{
    const float *sums = state + n_queries, *outputs = sums + n_queries;

    for (size_t query = 0; query < n_queries; query++) {
        const float *output = outputs + query * shape->d_v;
        const float by = sums[query] > 0 ? 1 / sums[query] : 0;

        for (size_t i = 0; i < shape->d_v; i++)
            ret_output[query * shape->d_v + i] = sums[query] > 0 ? output[i] * by : 0;
        ret_lse[query] = sums[query] > 0 ? (float)(state[query] + log(sums[query])) : -INFINITY;
    }
}

/* A NaN to -inf, +inf to FLT_MAX. */
static float without_nan(float s)
{
    return s > FLT_MAX ? FLT_MAX : s >= -FLT_MAX ? s : -INFINITY;
}

static void add_query(const struct kv_summary_shape *shape,
                      const void *group,
                      const struct kv_estimate_input *input,
                      size_t index,
                      float *max,
                      float *sum,
                      float *output)
{
    const size_t n_summaries = kv_summary_count(shape), d_k = shape->d_k, d_v = shape->d_v;
    const float *key_scales = kv_summary_at(group, kv_summary_at_key_scales(shape));
    const float *value_scales = kv_summary_at(group, kv_summary_at_value_scales(shape));
    const int8_t *keys = kv_summary_at(group, kv_summary_at_keys(shape));
    const int8_t *values = kv_summary_at(group, kv_summary_at_values(shape));
    const float *query = input->queries + index * d_k;
    const uint16_t *counts = input->counts + index * input->counts_stride;
    const float *scores =
        input->n_scored > 0 ? input->scores + index * input->scores_stride : NULL;
    float weights[KV_SUMMARIES_MAX], lanes[KV_SUM_LANES] = {0};
    float variance_correction, most = *max, shrink;
    struct kv_summary_head head;

    memcpy(&head, group, sizeof(head));
    variance_correction =
        DAMPING * (input->squares[index] * (input->scale * input->scale) * head.variance);
    variance_correction = variance_correction < 1 ? variance_correction : 1;
    for (size_t c = 0; c < n_summaries; c++) {
        float product[KV_SUM_LANES] = {0};

        for (size_t i = 0; i < d_k; i++)
            product[i % KV_SUM_LANES] =
                fmaf(query[i], keys[c * kv_summary_up(d_k) + i], product[i % KV_SUM_LANES]);
        weights[c] = counts[c] == 0 ? -INFINITY
                                    : without_nan(fmaf(kv_sum_lanes(product) * key_scales[c],
                                                       input->scale, variance_correction));
        most = weights[c] > most ? weights[c] : most;
    }
    for (size_t row = 0; row < input->n_scored; row++) {
        const float s = without_nan(scores[row] * input->scale);

        most = s > most ? s : most;
    }
    most += 0.0f;

    memset(lanes, 0, sizeof(lanes));
    for (size_t c = 0; c < n_summaries; c++)
        weights[c] = counts[c] * kv_exp(weights[c] - most);
    for (size_t row = 0; row < input->n_scored; row++)
        weights[input->numbers[row]] += kv_exp(without_nan(scores[row] * input->scale) - most);
    for (size_t c = 0; c < n_summaries; c++)
        lanes[c % KV_SUM_LANES] += weights[c];
    shrink = kv_exp(*max - most);
    *sum = fmaf(*sum, shrink, kv_sum_lanes(lanes));
    *max = most;
    for (size_t i = 0; i < d_v; i++) {
        float o = 0;

        for (size_t c = 0; c < n_summaries; c++)
            o = fmaf(weights[c] * value_scales[c], values[c * kv_summary_up(d_v) + i], o);
        output[i] = fmaf(output[i], shrink, o);
    }
}

static void scalar_add(const struct kv_summary_shape *shape,
                       const void *group,
                       const struct kv_estimate_input *input,
                       float *state)
{
    float *sums = state + input->n_queries, *outputs = sums + input->n_queries;

    for (size_t query = 0; query < input->n_queries; query++)
        add_query(shape, group, input, query, state + query, sums + query,
                  outputs + query * shape->d_v);
}

static const struct kv_estimate_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .add = scalar_add,
};

/* Slowest first; the last one that this CPU supports is used. */
static const struct kv_estimate_kernels *const tiers[] = {
    &scalar,
#if defined(__x86_64__)
    &kv_estimate_avx2,
    &kv_estimate_avx512,
#endif
};

__attribute__((constructor)) static void choose(void)
{
    for (unsigned i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++)
        if (tiers[i]->supported())
            best = tiers[i];
}

const struct kv_estimate_kernels *kv_estimate_kernels_at(unsigned i)
{
    for (unsigned tier = 0; tier < sizeof(tiers) / sizeof(tiers[0]); tier++)
        if (tiers[tier]->supported() && i-- == 0)
            return tiers[tier];
    return NULL;
}

void kv_estimate_add(const struct kv_summary_shape *shape,
                     const void *group,
                     const struct kv_estimate_input *input,
                     float *state)
{
    best->add(shape, group, input, state);
}
