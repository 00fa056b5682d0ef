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

/* A mark makes any number KV_SUMMARY_NONE, so that the loop over scored rows has no branch on
 * it: such branches are unpredictable.  The count of KV_SUMMARY_NONE is not returned. */
struct kv_estimate_counted kv_estimate_count(const struct kv_summary_shape *shape,
                                             const void *group,
                                             uint32_t first,
                                             uint32_t begin,
                                             uint32_t end,
                                             const uint32_t *selected,
                                             size_t n_selected,
                                             const uint32_t *scored,
                                             size_t n_scored,
                                             uint8_t *marks,
                                             uint16_t *ret_counts,
                                             uint8_t *ret_numbers)
{
    const uint8_t *numbers = kv_summary_at(group, kv_summary_at_numbers(shape));
    const size_t n_summaries = kv_summary_count(shape);
    struct kv_estimate_counted counted = {0};
    uint16_t left[KV_SUMMARY_NONE + 1];
    struct kv_summary_head head;

    memcpy(&head, group, sizeof(head));
    begin = begin > first ? begin - first : 0;
    end = end > first ? end - first : 0;
    end = end < head.n_rows ? end : head.n_rows;
    begin = begin < end ? begin : end;
    count_rows(shape, group, begin, end, head.n_rows, left);
    for (; counted.n_selected < n_selected; counted.n_selected++) {
        const uint32_t row = selected[counted.n_selected] - first;

        if (row >= end)
            break;
        left[numbers[row]]--;
        marks[row] = KV_SUMMARY_NONE;
    }
    for (size_t c = 0; c < n_summaries; c++)
        counted.n_rows += left[c];
    for (; counted.n_scored < n_scored; counted.n_scored++) {
        const uint32_t row = scored[counted.n_scored] - first;

        if (row >= end)
            break;
        const uint8_t number = numbers[row] | marks[row];

        left[number]--;
        ret_numbers[counted.n_scored] = number;
    }
    for (size_t i = 0; i < counted.n_selected; i++)
        marks[selected[i] - first] = 0;
    memcpy(ret_counts, left, n_summaries * sizeof(*ret_counts));
    return counted;
}

/* Rounds to the nearest integer, ties to even, |x| < 2^22: next to 1.5 * 2^23 the last bit of a
 * float is worth 1. */
static float nearest_integer(float x)
{
    const float ulp_is_one = 12582912; /* 1.5 * 2^23 */

    return x + ulp_is_one - ulp_is_one;
}

/* Rounds a query (d_k) to integers, followed by zeros; returns their step. */
static float round_query(size_t d_k, const float *query, int16_t *ret_elements)
{
    bool is_finite = true;
    const float bound = KV_ESTIMATE_QUERY_MOST;
    float most = 0, step;

    for (size_t i = 0; i < d_k; i++) {
        is_finite &= fabsf(query[i]) <= FLT_MAX;
        most = fabsf(query[i]) > most ? fabsf(query[i]) : most;
    }
    memset(ret_elements, 0, kv_summary_up(d_k) * sizeof(*ret_elements));
    if (!is_finite)
        return NAN;
    step = most / bound;
    for (size_t i = 0; i < d_k && step > 0; i++) {
        const float x = query[i] / step;

        ret_elements[i] = (int16_t)nearest_integer(x > bound ? bound : x < -bound ? -bound : x);
    }
    return step;
}

struct kv_estimate_queries kv_estimate_prepare(size_t d_k,
                                               const float *queries,
                                               size_t n,
                                               int16_t *ret_elements,
                                               float *ret_steps,
                                               float *ret_squares)
{
    for (size_t query = 0; query < n; query++, queries += d_k) {
        kv_exact_scores_score(KV_KEY_FP32, queries, 0, 1, d_k, queries, 1, ret_squares + query,
                              1);
        ret_steps[query] = round_query(d_k, queries, ret_elements + query * kv_summary_up(d_k));
    }
    return (struct kv_estimate_queries){
        .n = n, .elements = ret_elements, .steps = ret_steps, .squares = ret_squares};
}

/* A NaN to -inf, +inf to FLT_MAX. */
static float without_nan(float s)
{
    return s > FLT_MAX ? FLT_MAX : s >= -FLT_MAX ? s : -INFINITY;
}

static float scalar_largest(const float *scores, size_t n)
{
    float most = -INFINITY;

    for (size_t i = 0; i < n; i++)
        most = scores[i] > most ? scores[i] : most;
    return most;
}

void kv_estimate_begin(const struct kv_summary_shape *shape,
                       size_t n_queries,
                       float scale,
                       const float *scores,
                       size_t n_scored,
                       size_t scores_stride,
                       float *state)
{
    assert(kv_summary_shape_valid(shape));
    memset(state, 0, kv_estimate_floats(shape, n_queries) * sizeof(*state));
    for (size_t query = 0; query < n_queries; query++)
        state[query] =
            n_scored == 0
                ? -INFINITY
                : without_nan(best->largest(scores + query * scores_stride, n_scored) * scale) +
                      0.0f;
}

void kv_estimate_end(const struct kv_summary_shape *shape,
                     size_t n_queries,
                     const float *state,
                     float *ret_output,
                     float *ret_lse)
{
    const float *sums = state + n_queries, *outputs = sums + n_queries * KV_ESTIMATE_LANES;

    for (size_t query = 0; query < n_queries; query++) {
        const float *output = outputs + query * shape->d_v;
        float lanes[KV_SUM_LANES];

        memcpy(lanes, sums + query * KV_ESTIMATE_LANES, sizeof(lanes));

        const float sum = kv_sum_lanes(lanes), by = sum > 0 ? 1 / sum : 0;

        for (size_t i = 0; i < shape->d_v; i++)
            ret_output[query * shape->d_v + i] = sum > 0 ? output[i] * by : 0;
        ret_lse[query] = sum > 0 ? (float)(state[query] + log(sum)) : -INFINITY;
    }
}

/* Returns the scaled score of a mean key; -inf if its summary stands for no rows. */
static float score_of(const struct kv_summary_shape *shape,
                      const void *group,
                      const struct kv_estimate_input *input,
                      size_t index,
                      size_t c)
{
    const float *key_scales = kv_summary_at(group, kv_summary_at_key_scales(shape));
    const int8_t *keys = kv_summary_at(group, kv_summary_at_keys(shape));
    const int16_t *query = input->queries.elements + index * kv_summary_up(shape->d_k);
    const uint16_t *counts = input->counts + index * input->counts_stride;
    struct kv_summary_head head;
    float variance_correction;
    int32_t product = 0;

    if (counts[c] == 0)
        return -INFINITY;
    memcpy(&head, group, sizeof(head));
    variance_correction = DAMPING * (input->queries.squares[index] *
                                     (input->scale * input->scale) * head.variance);
    variance_correction = variance_correction < 1 ? variance_correction : 1;
    for (size_t i = 0; i < shape->d_k; i++)
        product += query[i] * keys[kv_summary_key_element(shape, c, i)];
    return without_nan(fmaf((float)product * input->queries.steps[index] * key_scales[c],
                            input->scale, variance_correction));
}

/* The same of row i of `numbers`; -inf if it does not count. */
static float score_of_row(const struct kv_estimate_input *input, size_t index, size_t i)
{
    return input->numbers[i] == KV_SUMMARY_NONE
               ? -INFINITY
               : without_nan(input->scores[index * input->scores_stride + i] * input->scale);
}

/* Adds mean values, weighted, to the output. */
static void add_values(const struct kv_summary_shape *shape,
                       const void *group,
                       const float *weights,
                       float *output)
{
    const float *value_scales = kv_summary_at(group, kv_summary_at_value_scales(shape));
    const int8_t *values = kv_summary_at(group, kv_summary_at_values(shape));
    const size_t n_summaries = kv_summary_count(shape);
    int16_t rounded[KV_SUMMARIES_MAX] = {0};
    float most = 0, step = 0;

    for (size_t c = 0; c < n_summaries; c++)
        most = weights[c] * value_scales[c] > most ? weights[c] * value_scales[c] : most;
    if (most > KV_ESTIMATE_LEAST) {
        step = most / (float)KV_ESTIMATE_WEIGHT_MOST;
        for (size_t c = 0; c < n_summaries; c++)
            rounded[c] = (int16_t)nearest_integer(weights[c] * value_scales[c] *
                                                  ((float)KV_ESTIMATE_WEIGHT_MOST / most));
    }
    for (size_t i = 0; i < shape->d_v; i++) {
        int32_t sum = 0;

        for (size_t c = 0; c < n_summaries; c++)
            sum += rounded[c] * values[kv_summary_value_element(shape, c, i)];
        output[i] = fmaf(step, (float)sum, output[i]);
    }
}

static void add_query(const struct kv_summary_shape *shape,
                      const void *group,
                      const struct kv_estimate_input *input,
                      size_t index,
                      float *max,
                      float *sums,
                      float *output)
{
    const size_t n_summaries = kv_summary_count(shape);
    const uint16_t *counts = input->counts + index * input->counts_stride;
    float of_rows[4][KV_SUMMARIES_MAX] = {{0}}, weights[KV_SUMMARIES_MAX];
    float most = *max, shrink;

    for (size_t c = 0; c < n_summaries; c++) {
        weights[c] = score_of(shape, group, input, index, c);
        most = weights[c] > most ? weights[c] : most;
    }
    for (size_t i = 0; i < input->n_scored; i++) {
        const float s = score_of_row(input, index, i);

        most = s > most ? s : most;
    }
    most += 0.0f;
    shrink = kv_exp(*max - most);
    *max = most;

    for (size_t i = 0; i < input->n_scored; i++)
        if (input->numbers[i] != KV_SUMMARY_NONE)
            of_rows[i % 4][input->numbers[i]] += kv_exp(score_of_row(input, index, i) - most);
    for (size_t c = 0; c < n_summaries; c++)
        weights[c] = fmaf(counts[c], kv_exp(weights[c] - most),
                          (of_rows[0][c] + of_rows[2][c]) + (of_rows[1][c] + of_rows[3][c]));
    for (size_t lane = 0; lane < KV_ESTIMATE_LANES; lane++) {
        float sum = weights[lane];

        for (size_t c = lane + KV_ESTIMATE_LANES; c < n_summaries; c += KV_ESTIMATE_LANES)
            sum += weights[c];
        sums[lane] = sums[lane] * shrink + sum;
    }
    for (size_t i = 0; i < shape->d_v; i++)
        output[i] *= shrink;
    add_values(shape, group, weights, output);
}

static void scalar_add(const struct kv_summary_shape *shape,
                       const void *group,
                       const struct kv_estimate_input *input,
                       float *state)
{
    const size_t n = input->queries.n;
    float *sums = state + n, *outputs = sums + n * KV_ESTIMATE_LANES;

    for (size_t query = 0; query < n; query++)
        add_query(shape, group, input, query, state + query, sums + query * KV_ESTIMATE_LANES,
                  outputs + query * shape->d_v);
}

static const struct kv_estimate_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .add = scalar_add,
    .largest = scalar_largest,
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
