#include "kernels/exact_scores.h"
#include "kernels/dispatch.h"
#include "kernels/fp16.h"
#include "kernels/lanes.h"

#include <assert.h>
#include <math.h>
#include <string.h>

static const struct kv_exact_scores_kernels *best;

static int always(void)
{
    return 1;
}

static size_t element_bytes(enum kv_key_type type)
{
    return type == KV_KEY_FP32 ? 4 : 2;
}

static float element(enum kv_key_type type, const void *key, size_t i)
{
    const uint8_t *at = (const uint8_t *)key + i * element_bytes(type);
    uint16_t half;
    float value;

    if (type == KV_KEY_FP32) {
        memcpy(&value, at, sizeof(value));
        return value;
    }
    memcpy(&half, at, sizeof(half));
    return type == KV_KEY_FP16 ? kv_fp16_load(half) : kv_float_of_bits((uint32_t)half << 16);
}

static void scalar_load(enum kv_key_type type,
                        const void *keys,
                        size_t stride,
                        size_t n,
                        size_t d,
                        float *ret_values)
{
    for (size_t row = 0; row < n; row++)
        for (size_t i = 0; i < d; i++)
            ret_values[row * d + i] = element(type, (const uint8_t *)keys + row * stride, i);
}

static float
scalar_product(enum kv_key_type type, const void *key, const float *query, size_t d)
{
    float lanes[KV_SUM_LANES] = {0};

    for (size_t i = 0; i < d; i++)
        lanes[i % KV_SUM_LANES] =
            fmaf(query[i], element(type, key, i), lanes[i % KV_SUM_LANES]);
    return kv_sum_lanes(lanes);
}

static void scalar_score(enum kv_key_type type,
                         const void *keys,
                         size_t stride,
                         size_t n,
                         size_t d,
                         const float *queries,
                         size_t n_queries,
                         float *ret_scores,
                         size_t scores_stride)
{
    for (size_t row = 0; row < n; row++)
        for (size_t query = 0; query < n_queries; query++)
            ret_scores[query * scores_stride + row] = scalar_product(
                type, (const uint8_t *)keys + row * stride, queries + query * d, d);
}

static void scalar_score_list(enum kv_key_type type,
                              const void *const *keys,
                              size_t n,
                              size_t d,
                              const float *queries,
                              size_t n_queries,
                              float *ret_scores,
                              size_t scores_stride)
{
    for (size_t row = 0; row < n; row++)
        for (size_t query = 0; query < n_queries; query++)
            ret_scores[query * scores_stride + row] =
                scalar_product(type, keys[row], queries + query * d, d);
}

static const struct kv_exact_scores_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .load = scalar_load,
    .score = scalar_score,
    .score_list = scalar_score_list,
};

/* Slowest first; the last one that this CPU supports is used. */
static const struct kv_exact_scores_kernels *const tiers[] = {
    &scalar,
#if defined(__x86_64__)
    &kv_exact_scores_avx2,
    &kv_exact_scores_avx512,
#endif
};

__attribute__((constructor)) static void choose(void)
{
    for (unsigned i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++)
        if (tiers[i]->supported())
            best = tiers[i];
}

const struct kv_exact_scores_kernels *kv_exact_scores_kernels_at(unsigned i)
{
    for (unsigned tier = 0; tier < sizeof(tiers) / sizeof(tiers[0]); tier++)
        if (tiers[tier]->supported() && i-- == 0)
            return tiers[tier];
    return NULL;
}

void kv_exact_scores_load(enum kv_key_type type,
                          const void *keys,
                          size_t stride,
                          size_t n,
                          size_t d,
                          float *ret_values)
{
    assert(kv_key_type_valid(type)); /* another one would leave the results unset */
    best->load(type, keys, stride, n, d, ret_values);
}

void kv_exact_scores_score(enum kv_key_type type,
                           const void *keys,
                           size_t stride,
                           size_t n,
                           size_t d,
                           const float *queries,
                           size_t n_queries,
                           float *ret_scores,
                           size_t scores_stride)
{
    assert(kv_key_type_valid(type));
    best->score(type, keys, stride, n, d, queries, n_queries, ret_scores, scores_stride);
}

void kv_exact_scores_score_list(enum kv_key_type type,
                                const void *const *keys,
                                size_t n,
                                size_t d,
                                const float *queries,
                                size_t n_queries,
                                float *ret_scores,
                                size_t scores_stride)
{
    assert(kv_key_type_valid(type));
    best->score_list(type, keys, n, d, queries, n_queries, ret_scores, scores_stride);
}
