#include "select.h"
#include "select_parts.h"
#include "tiers.h"

#include <math.h>
#include <string.h>

static const struct kv_select_kernels *best;

static int always(void)
{
    return 1;
}

static uint32_t bits_of(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static float scalar_exp(float x)
{
    static const float factors[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1, 1};
    float t, k, r, p = 1.0f / 5040, power;
    uint32_t bits;

    if (!(x >= EXP_LEAST))
        return 0;
    x = x < EXP_MOST ? x : EXP_MOST;
    t = fmaf(x, EXP_LOG2_E, EXP_ROUNDER);
    k = t - EXP_ROUNDER;
    r = fmaf(-k, EXP_LN2_LOW, fmaf(-k, EXP_LN2_HIGH, x));
    for (unsigned i = 0; i < sizeof(factors) / sizeof(factors[0]); i++)
        p = fmaf(p, r, factors[i]);
    bits = (bits_of(t) + 127) << 23;
    memcpy(&power, &bits, sizeof(power));
    return p * power;
}

static float scalar_max(const float *scores, size_t n)
{
    float most = -INFINITY;

    for (size_t i = 0; i < n; i++)
        most = scores[i] > most ? scores[i] : most;
    return most + 0.0f; /* -0 to +0 */
}

static double scalar_exp_sum(const float *scores, size_t n, float scale, float max)
{
    const float shift = -max * scale;
    double sum = 0;

    if (max == -INFINITY)
        return 0;
    for (size_t from = 0; from < n; from += KV_SELECT_GROUP) {
        const size_t end = n - from < KV_SELECT_GROUP ? n : from + KV_SELECT_GROUP;
        float lanes[SELECT_LANES] = {0};

        for (size_t i = from; i < end; i++)
            lanes[i % SELECT_LANES] += scalar_exp(fmaf(scores[i], scale, shift));
        for (size_t half = SELECT_LANES / 2; half > 0; half /= 2)
            for (size_t i = 0; i < half; i++)
                lanes[i] += lanes[i + half];
        sum += lanes[0];
    }
    return sum;
}

static void
scalar_merge_softmax(const float *scores, size_t n, float scale, float lse, float *merged)
{
    if (lse == -INFINITY)
        return;
    for (size_t i = 0; i < n; i++)
        merged[i] += scalar_exp(fmaf(scores[i], scale, -lse));
}

static void scalar_merge_max(const float *scores, size_t n, float *merged)
{
    for (size_t i = 0; i < n; i++)
        if (scores[i] > merged[i] || isnan(merged[i]))
            merged[i] = scores[i];
}

static uint32_t image(float score)
{
    const uint32_t bits = bits_of(score + 0.0f); /* -0 to +0 */

    if (isnan(score))
        return 0;
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

/* Images that agree with `prefix` from bit `from` on, by the `n_bins` values of the bits that
 * begin at `shift`. */
static void count(const float *scores,
                  size_t n,
                  uint32_t prefix,
                  unsigned from,
                  unsigned shift,
                  uint32_t n_bins,
                  uint32_t *ret_counts)
{
    memset(ret_counts, 0, n_bins * sizeof(*ret_counts));
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = image(scores[i]);

        if (from == 32 || bits >> from == prefix)
            ret_counts[bits >> shift & (n_bins - 1)]++;
    }
}

static size_t
scalar_select(const float *scores, size_t n, size_t k, uint32_t *ret_indices, uint32_t *scratch)
{
    size_t ties = k, n_chosen = 0;
    uint32_t least;

    if (k >= n) {
        for (size_t i = 0; i < n; i++)
            ret_indices[i] = (uint32_t)i;
        return n;
    }
    if (k == 0)
        return 0;
    count(scores, n, 0, 32, SELECT_HIGH_SHIFT, SELECT_HIGH_BINS, scratch);
    least = select_bin(scratch, SELECT_HIGH_BINS, &ties);
    count(scores, n, least, SELECT_HIGH_SHIFT, SELECT_MIDDLE_SHIFT, SELECT_MIDDLE_BINS,
          scratch);
    least = least * SELECT_MIDDLE_BINS + select_bin(scratch, SELECT_MIDDLE_BINS, &ties);
    count(scores, n, least, SELECT_MIDDLE_SHIFT, 0, SELECT_LOW_BINS, scratch);
    least = least * SELECT_LOW_BINS + select_bin(scratch, SELECT_LOW_BINS, &ties);
    for (size_t i = 0; n_chosen < k; i++) {
        const uint32_t bits = image(scores[i]);

        if (bits < least || (bits == least && ties == 0))
            continue;
        ties -= bits == least;
        ret_indices[n_chosen++] = (uint32_t)i;
    }
    return k;
}

static const struct kv_select_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .max = scalar_max,
    .exp_sum = scalar_exp_sum,
    .merge_softmax = scalar_merge_softmax,
    .merge_max = scalar_merge_max,
    .select = scalar_select,
};

/* Slowest first. */
static const struct kv_select_kernels *const tiers[] = {
    &scalar,
#if defined(__x86_64__)
    &kv_select_avx2,
#endif
};

__attribute__((constructor)) static void choose(void)
{
    for (unsigned i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++)
        if (tiers[i]->supported())
            best = tiers[i];
}

const struct kv_select_kernels *kv_select_kernels_at(unsigned i)
{
    for (unsigned tier = 0; tier < sizeof(tiers) / sizeof(tiers[0]); tier++)
        if (tiers[tier]->supported() && i-- == 0)
            return tiers[tier];
    return NULL;
}

float kv_scores_max(const float *scores, size_t n)
{
    return best->max(scores, n);
}

double kv_scores_exp_sum(const float *scores, size_t n, float scale, float max)
{
    return best->exp_sum(scores, n, scale, max);
}

void kv_merge_softmax(const float *scores, size_t n, float scale, float lse, float *merged)
{
    best->merge_softmax(scores, n, scale, lse, merged);
}

void kv_merge_max(const float *scores, size_t n, float *merged)
{
    best->merge_max(scores, n, merged);
}

size_t
kv_select(const float *scores, size_t n, size_t k, uint32_t *ret_indices, uint32_t *scratch)
{
    return best->select(scores, n, k, ret_indices, scratch);
}
