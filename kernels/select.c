#include "kernels/select.h"
#include "kernels/dispatch.h"
#include "kernels/exp.h"
#include "kernels/select_passes.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <string.h>

static const struct kv_topk_kernels *best;

static int always(void)
{
    return 1;
}

static uint32_t rows_of(const uint32_t *counts, size_t i)
{
    return counts != NULL ? counts[i] : 1;
}

static float scalar_max(const float *scores, const uint32_t *counts, size_t n)
{
    float most = -INFINITY;

    for (size_t i = 0; i < n; i++)
        most = rows_of(counts, i) > 0 && scores[i] > most ? scores[i] : most;
    return most + 0.0f; /* -0 to +0 */
}

/* Returns an exp in units of the exp sum, rounded to the nearest, ties to even: the processor's
 * own rounding of a double, whose last bit is a unit next to KV_EXP_SUM_ROUNDER. */
static uint64_t in_units(float exp)
{
    const double rounder = KV_EXP_SUM_ROUNDER, sum = (double)exp + rounder;
    uint64_t bits, zero;

    memcpy(&bits, &sum, sizeof(bits));
    memcpy(&zero, &rounder, sizeof(zero));
    return bits - zero;
}

static uint64_t
scalar_exps(float *scores, const uint32_t *counts, size_t n, float scale, float max)
{
    const float shift = -max * scale;
    uint64_t sum = 0;

    for (size_t i = 0; i < n; i++) {
        const float x = fmaf(scores[i], scale, shift);

        scores[i] = max == -INFINITY || !(x >= KV_WEIGHT_LEAST) ? 0 : kv_exp(x);
        if (rows_of(counts, i) > 0)
            sum += in_units(scores[i]) * rows_of(counts, i);
    }
    return sum;
}

static void scalar_merge(enum kv_weights_merge by,
                         const float *exps,
                         size_t exps_stride,
                         const float *factors,
                         size_t n_queries,
                         size_t n,
                         float *merged)
{
    for (size_t query = 0; query < n_queries; query++, exps += exps_stride)
        if (by == KV_WEIGHTS_SUM)
            for (size_t i = 0; i < n; i++)
                merged[i] = fmaf(exps[i], factors[query], merged[i]);
        else
            for (size_t i = 0; i < n; i++) {
                const float weight = exps[i] * factors[query];

                merged[i] = weight > merged[i] ? weight : merged[i];
            }
}

static void
scalar_count(struct kv_topk *selector, const float *scores, const uint32_t *counts, size_t n)
{
    const unsigned above = kv_select_above(selector->pass),
                   shift = kv_select_shift(selector->pass);
    const uint32_t mask = kv_select_mask(selector->pass);

    for (size_t i = 0; i < n; i++) {
        const uint32_t sort_key = kv_score_key(scores[i]);

        if (above == 32 || sort_key >> above == selector->bound >> above)
            selector->bins[sort_key >> shift & mask] += rows_of(counts, i);
    }
}

static size_t scalar_collect(struct kv_topk *selector,
                             const float *scores,
                             const uint32_t *counts,
                             size_t n,
                             uint32_t base,
                             uint32_t *ret_indices)
{
    size_t n_selected = 0;

    for (size_t i = 0; i < n; i++) {
        const uint32_t sort_key = kv_score_key(scores[i]);

        if (sort_key < selector->bound || rows_of(counts, i) == 0 ||
            (sort_key == selector->bound && selector->ties == 0))
            continue;
        selector->ties -= sort_key == selector->bound;
        ret_indices[n_selected++] = base + (uint32_t)i;
    }
    return n_selected;
}

static size_t scalar_between(const float *scores,
                             size_t n,
                             uint32_t least,
                             uint32_t most,
                             float *ret_scores,
                             size_t *ret_n_above)
{
    size_t n_between = 0, n_above = 0;

    for (size_t i = 0; i < n; i++) {
        const uint32_t sort_key = kv_score_key(scores[i]);

        n_above += sort_key > most;
        if (sort_key >= least && sort_key <= most)
            ret_scores[n_between++] = scores[i];
    }
    *ret_n_above = n_above;
    return n_between;
}

static void scalar_items(const struct kv_topk *selector,
                         const float *scores,
                         const uint32_t *counts,
                         size_t n,
                         uint32_t *ret_above,
                         size_t *ret_n_above,
                         uint32_t *ret_equal,
                         size_t *ret_n_equal)
{
    size_t n_above = 0, n_equal = 0;

    for (size_t i = 0; i < n; i++) {
        const uint32_t sort_key = kv_score_key(scores[i]);

        if (rows_of(counts, i) == 0)
            continue;
        if (sort_key > selector->bound)
            ret_above[n_above++] = (uint32_t)i;
        else if (sort_key == selector->bound)
            ret_equal[n_equal++] = (uint32_t)i;
    }
    *ret_n_above = n_above;
    *ret_n_equal = n_equal;
}

static const struct kv_topk_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .max = scalar_max,
    .exps = scalar_exps,
    .merge = scalar_merge,
    .count = scalar_count,
    .between = scalar_between,
    .collect = scalar_collect,
    .items = scalar_items,
};

/* Slowest first; the last one that this CPU supports is used. */
static const struct kv_topk_kernels *const tiers[] = {
    &scalar,
#if defined(__x86_64__)
    &kv_topk_avx2,
    &kv_topk_avx512,
#endif
};

__attribute__((constructor)) static void choose(void)
{
    for (unsigned i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++)
        if (tiers[i]->supported())
            best = tiers[i];
}

const struct kv_topk_kernels *kv_topk_kernels_at(unsigned i)
{
    for (unsigned tier = 0; tier < sizeof(tiers) / sizeof(tiers[0]); tier++)
        if (tiers[tier]->supported() && i-- == 0)
            return tiers[tier];
    return NULL;
}

float kv_scores_max(const float *scores, const uint32_t *counts, size_t n)
{
    return best->max(scores, counts, n);
}

uint64_t
kv_softmax_exps(float *scores, const uint32_t *counts, size_t n, float scale, float max)
{
    assert(scale > 0 && scale <= FLT_MAX);
    return best->exps(scores, counts, n, scale, max);
}

void kv_weights_merge(enum kv_weights_merge by,
                      const float *exps,
                      size_t exps_stride,
                      const float *factors,
                      size_t n_queries,
                      size_t n,
                      float *merged)
{
    best->merge(by, exps, exps_stride, factors, n_queries, n, merged);
}

/* ---- the k largest ----------------------------------------------------------------------- */

void kv_topk_begin(struct kv_topk *selector, uint64_t k)
{
    selector->ties = k;
    selector->pass = 0;
    selector->bound = k == 0 ? UINT32_MAX : 0;
    memset(selector->bins, 0, sizeof(selector->bins));
}

void kv_topk_count(struct kv_topk *selector,
                   const float *scores,
                   const uint32_t *counts,
                   size_t n)
{
    if (selector->ties > 0)
        best->count(selector, scores, counts, n);
}

/* Adds up bins from the highest down.  The bin that holds the last of the rows still to be
 * found becomes part of the bound.  With fewer rows than k that is bin 0 in each pass, and
 * everything is selected. */
void kv_topk_next(struct kv_topk *selector)
{
    uint32_t bin = kv_select_mask(selector->pass);

    assert(selector->pass < KV_TOPK_PASSES);
    if (selector->ties > 0) {
        for (; bin > 0 && selector->bins[bin] < selector->ties; bin--)
            selector->ties -= selector->bins[bin];
        selector->bound |= bin << kv_select_shift(selector->pass);
    }
    selector->pass++;
    memset(selector->bins, 0, sizeof(selector->bins));
}

size_t kv_topk_collect(struct kv_topk *selector,
                       const float *scores,
                       const uint32_t *counts,
                       size_t n,
                       uint32_t base,
                       uint32_t *ret_indices)
{
    return best->collect(selector, scores, counts, n, base, ret_indices);
}

void kv_topk_items(const struct kv_topk *selector,
                   const float *scores,
                   const uint32_t *counts,
                   size_t n,
                   uint32_t *ret_above,
                   size_t *ret_n_above,
                   uint32_t *ret_equal,
                   size_t *ret_n_equal)
{
    best->items(selector, scores, counts, n, ret_above, ret_n_above, ret_equal, ret_n_equal);
}

/* Finds the bound by the three passes over all scores. */
static void find_plainly(struct kv_topk *selector, const float *scores, size_t n, uint64_t k)
{
    kv_topk_begin(selector, k);
    for (unsigned pass = 0; pass < KV_TOPK_PASSES; pass++) {
        kv_topk_count(selector, scores, NULL, n);
        kv_topk_next(selector);
    }
}

enum {
    SAMPLE = 1024,            /* scores of a sample: 4 KiB, and a small part of many rows */
    SAMPLED_MIN = 8 * SAMPLE, /* fewer scores are not worth a sample */
};

/* Returns the sort key of the k-th largest score of the sample. */
static uint32_t sort_key_of(const float *sample, size_t k)
{
    struct kv_topk selector;

    find_plainly(&selector, sample, SAMPLE, k);
    return selector.bound;
}

/* The number of sampled scores above the bound is binomial with mean `expected`; its standard
 * deviation is below sqrt(expected).  The band is three of these to either side, and 8 more for
 * small numbers (Floyd and Rivest's SELECT, 1975, has the same idea).  Samples are evenly
 * spaced, with a shift of 5 i that keeps them from falling on a period of the rows. */
bool kv_scores_guess(
    const float *scores, size_t n, uint64_t k, uint32_t *ret_least, uint32_t *ret_most)
{
    const size_t expected = k < n ? (size_t)((double)k / (double)n * SAMPLE) : SAMPLE;
    const size_t around = 8 + (size_t)(3 * sqrt((double)expected));
    float sample[SAMPLE];

    if (n < SAMPLED_MIN || k == 0 || k >= n || expected + around >= SAMPLE)
        return false;
    for (size_t i = 0; i < SAMPLE; i++)
        sample[i] = scores[i * (n / SAMPLE) + i * 5 % (n / SAMPLE)];
    *ret_least = sort_key_of(sample, expected + around);
    *ret_most = expected > around ? sort_key_of(sample, expected - around) : UINT32_MAX;
    return true;
}

size_t kv_scores_between(const float *scores,
                         size_t n,
                         uint32_t least,
                         uint32_t most,
                         float *ret_scores,
                         size_t *ret_n_above)
{
    return best->between(scores, n, least, most, ret_scores, ret_n_above);
}

/* Finds the bound, by a sample if that works.  The band may miss it, by chance or because of
 * the order of the rows; then all scores are counted. */
static void
find(struct kv_topk *selector, const float *scores, size_t n, uint64_t k, float *scratch)
{
    uint32_t least, most;

    if (kv_scores_guess(scores, n, k, &least, &most)) {
        size_t n_above;
        const size_t n_between = kv_scores_between(scores, n, least, most, scratch, &n_above);

        if (n_above < k && k <= n_above + n_between) {
            find_plainly(selector, scratch, n_between, k - n_above);
            return;
        }
    }
    find_plainly(selector, scores, n, k);
}

size_t
kv_topk_select(const float *scores, size_t n, size_t k, uint32_t *ret_indices, float *scratch)
{
    struct kv_topk selector;

    assert(n <= UINT32_MAX);
    if (k >= n) {
        for (size_t i = 0; i < n; i++)
            ret_indices[i] = (uint32_t)i;
        return n;
    }
    if (k == 0)
        return 0;
    find(&selector, scores, n, k, scratch);
    return kv_topk_collect(&selector, scores, NULL, n, 0, ret_indices);
}

/* ---- by mass, by threshold --------------------------------------------------------------- */

uint64_t kv_weights_sum(const float *weights, const uint32_t *counts, size_t n)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < n; i++)
        if (rows_of(counts, i) > 0)
            sum += in_units(weights[i]) * rows_of(counts, i);
    return sum;
}

void kv_mass_begin(struct kv_mass *mass, uint64_t total, double share)
{
    const double wanted = ceil((double)total * share);

    assert(share >= 0); /* nor is it a NaN */
    memset(mass, 0, sizeof(*mass));
    mass->wanted = wanted < (double)total ? (uint64_t)wanted : total;
    mass->bound = mass->wanted == 0 ? UINT32_MAX : 0;
}

void kv_mass_count(struct kv_mass *mass, const float *weights, const uint32_t *counts, size_t n)
{
    const unsigned above = kv_select_above(mass->pass), shift = kv_select_shift(mass->pass);
    const uint32_t mask = kv_select_mask(mass->pass);

    if (mass->wanted == 0)
        return;
    for (size_t i = 0; i < n; i++) {
        const uint32_t sort_key = kv_score_key(weights[i]), n_rows = rows_of(counts, i);

        if (n_rows == 0 || (above < 32 && sort_key >> above != mass->bound >> above))
            continue;
        mass->masses[sort_key >> shift & mask] += in_units(weights[i]) * n_rows;
        mass->rows[sort_key >> shift & mask] += n_rows;
    }
}

void kv_mass_next(struct kv_mass *mass)
{
    uint32_t bin = kv_select_mask(mass->pass);

    assert(mass->pass < KV_TOPK_PASSES);
    if (mass->wanted > 0) {
        for (; bin > 0 && mass->masses[bin] < mass->wanted; bin--) {
            mass->wanted -= mass->masses[bin];
            mass->n_rows += mass->rows[bin];
        }
        mass->bound |= bin << kv_select_shift(mass->pass);
    }
    /* The bin of the last pass holds rows of a single weight: as many as the mass still
     * needs. */
    if (mass->pass == KV_TOPK_PASSES - 1 && mass->wanted > 0 && mass->rows[bin] > 0) {
        const uint64_t each = mass->masses[bin] / mass->rows[bin];

        mass->n_rows += each > 0 ? (mass->wanted + each - 1) / each : mass->rows[bin];
    }
    mass->pass++;
    memset(mass->masses, 0, sizeof(mass->masses));
    memset(mass->rows, 0, sizeof(mass->rows));
}

uint64_t kv_count_from(const float *scores, const uint32_t *counts, size_t n, float least)
{
    uint64_t n_rows = 0;

    for (size_t i = 0; i < n; i++)
        if (scores[i] >= least)
            n_rows += rows_of(counts, i);
    return n_rows;
}
