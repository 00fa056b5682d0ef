#include "kernels/dispatch.h"
#include "kernels/exact_scores.h"
#include "kernels/fp16.h"
#include "kernels/key_copies_common.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <string.h>

static const struct kv_key_copies_kernels *best;

static int always(void)
{
    return 1;
}

static float difference(float x, float mean)
{
    const float y = x - mean;

    return isnan(y) ? 0 : y;
}

static void
put_row(size_t d, const float *mean, const float *key, uint8_t *ret_codes, uint8_t *ret_scale)
{
    const size_t h = kv_key_copy_bytes(d);
    float most = 0, scale, factor;
    uint16_t half;

    for (size_t i = 0; i < d; i++)
        most = fmaxf(most, fabsf(difference(key[i], mean[i])));
    half = kv_fp16_round(fminf(most / 15, 65504));
    scale = kv_fp16_load(half);
    factor = scale > 0 ? 0.5f / scale : 0;
    memcpy(ret_scale, &half, sizeof(half));
    for (size_t i = 0; i < 2 * h; i++) {
        const float y = i < d ? difference(key[i], mean[i]) : 0; /* 7.5, an 8 */
        const float code = rintf(fminf(fmaxf(fmaf(y, factor, 7.5f), 0), 15));

        if (i < h)
            ret_codes[i] = (uint8_t)code;
        else
            ret_codes[i - h] |= (uint8_t)((unsigned)code << 4);
    }
}

static void
scalar_put(size_t d, const float *mean, const float *keys, size_t begin, size_t n, void *copies)
{
    const size_t h = kv_key_copy_bytes(d);
    uint8_t *to = copies;

    for (size_t row = 0; row < n; row++)
        put_row(d, mean, keys + row * d, to + kv_key_copy_codes_at(h, begin + row),
                to + kv_key_copy_scale_at(h, begin + row));
}

/* NaN counts as 0, infinities as the largest numbers. */
static float bounded(float x)
{
    return isnan(x) ? 0 : fminf(fmaxf(x, -FLT_MAX), FLT_MAX);
}

static void scalar_round(size_t d, const float *queries, size_t n_queries, void *ret_rounded)
{
    const struct kv_rounded_queries to = kv_rounded_queries_at(d, ret_rounded, n_queries);
    const size_t padded = 2 * kv_key_copy_bytes(d);

    for (size_t query = 0; query < n_queries; query++) {
        const float *q = queries + query * d;
        int8_t *q8 = to.q8 + query * padded;
        float most = 0, scale;
        int32_t sum = 0;

        for (size_t i = 0; i < d; i++)
            most = fmaxf(most, fabsf(bounded(q[i])));
        scale = most / 127;
        memset(q8, 0, padded);
        for (size_t i = 0; i < d && scale > 0; i++) {
            q8[i] = (int8_t)rintf(fminf(fmaxf(bounded(q[i]) / scale, -127), 127));
            sum += q8[i];
        }
        to.scales[query] = scale;
        to.biases[query] = -15 * sum;
    }
}

static void scalar_score_list(size_t d,
                              const void *const *blocks,
                              const uint8_t *rows,
                              size_t n,
                              const void *rounded,
                              size_t n_queries,
                              float *ret_scores,
                              size_t scores_stride)
{
    const struct kv_rounded_queries queries = kv_rounded_queries_at(d, rounded, n_queries);
    const size_t h = kv_key_copy_bytes(d);

    for (size_t row = 0; row < n; row++) {
        const uint8_t *block = blocks[row];
        const uint8_t *codes = block + kv_key_copy_codes_at(h, rows[row]);
        uint16_t half;

        memcpy(&half, block + kv_key_copy_scale_at(h, rows[row]), sizeof(half));
        for (size_t query = 0; query < n_queries; query++) {
            const int8_t *q8 = queries.q8 + query * 2 * h;
            int32_t sum = 0;

            for (size_t i = 0; i < h; i++)
                sum += (codes[i] & 15) * q8[i] + (codes[i] >> 4) * q8[h + i];
            ret_scores[query * scores_stride + row] =
                fmaf((float)(2 * sum + queries.biases[query]),
                     kv_fp16_load(half) * queries.scales[query], queries.dots[query]);
        }
    }
}

static const struct kv_key_copies_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .put = scalar_put,
    .round = scalar_round,
    .score_list = scalar_score_list,
};

/* Slowest first; the last one that this CPU supports is used. */
static const struct kv_key_copies_kernels *const tiers[] = {
    &scalar,
#if defined(__x86_64__)
    &kv_key_copies_avx2,
    &kv_key_copies_avx512,
#endif
};

__attribute__((constructor)) static void choose(void)
{
    for (unsigned i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++)
        if (tiers[i]->supported())
            best = tiers[i];
}

const struct kv_key_copies_kernels *kv_key_copies_kernels_at(unsigned i)
{
    for (unsigned tier = 0; tier < sizeof(tiers) / sizeof(tiers[0]); tier++)
        if (tiers[tier]->supported() && i-- == 0)
            return tiers[tier];
    return NULL;
}

void kv_key_copies_put(
    size_t d, const float *mean, const float *keys, size_t begin, size_t n, void *copies)
{
    assert(d >= 1 && d <= KV_KEY_COPY_D_MAX && begin <= KV_PQ_TILE && n <= KV_PQ_TILE - begin);
    best->put(d, mean, keys, begin, n, copies);
}

void kv_key_copies_dots(
    size_t d, const float *mean, const float *queries, size_t n_queries, void *rounded)
{
    kv_exact_scores_score(KV_KEY_FP32, mean, d * sizeof(*mean), 1, d, queries, n_queries,
                          kv_rounded_queries_at(d, rounded, n_queries).dots, 1);
}

void kv_key_copies_round(
    size_t d, const float *mean, const float *queries, size_t n_queries, void *ret_rounded)
{
    assert(d >= 1 && d <= KV_KEY_COPY_D_MAX);
    assert(n_queries >= 1 && n_queries <= KV_KEY_COPIES_QUERIES_MAX);
    best->round(d, queries, n_queries, ret_rounded);
    kv_key_copies_dots(d, mean, queries, n_queries, ret_rounded);
}

void kv_key_copies_score_list(size_t d,
                              const void *const *blocks,
                              const uint8_t *rows,
                              size_t n,
                              const void *rounded,
                              size_t n_queries,
                              float *ret_scores,
                              size_t scores_stride)
{
    assert(n_queries >= 1 && n_queries <= KV_KEY_COPIES_QUERIES_MAX);
    best->score_list(d, blocks, rows, n, rounded, n_queries, ret_scores, scores_stride);
}
