#include "kernels/summary.h"
#include "kernels/dispatch.h"
#include "kernels/lanes.h"
#include "kernels/summary_common.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <string.h>

/* The passes of a build, in order; PLACE and UPDATE repeat KV_SUMMARY_ITERATIONS times.
 * SPREAD, PLACE and DISTANCE read all rows, a slice a call; the others are one call without
 * rows. */
enum build_state {
    BUILD_SPREAD,   /* measures how far keys and values spread, and collects first centroids */
    BUILD_SCALE,    /* sets the factor of the values, and completes the first centroids */
    BUILD_PLACE,    /* assigns rows to the nearest centroids: k-means */
    BUILD_UPDATE,   /* moves centroids to the means of their rows */
    BUILD_MEANS,    /* turns the last sums into mean keys and unscaled mean values */
    BUILD_DISTANCE, /* sums squared distances of keys to their means, for head.variance */
    BUILD_DONE,
};

static_assert(sizeof(struct kv_summary_head) == KV_SUMMARY_HEAD_BYTES,
              "it is written as it is");

static const float FACTOR_MOST = 1e15f; /* and 1 / it the least: products stay in fp32 */

static const struct kv_summary_kernels *best;

static int always(void)
{
    return 1;
}

/* ---- the layout -------------------------------------------------------------------------- */

static bool are_scales(const float *scales, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!(scales[i] >= 0 && scales[i] <= KV_SUMMARY_MOST))
            return false;
    return true;
}

bool kv_summary_valid(const struct kv_summary_shape *shape, const void *group)
{
    const size_t n_summaries = kv_summary_count(shape);
    const uint8_t *numbers = kv_summary_at(group, kv_summary_at_numbers(shape));
    uint16_t counts[KV_SUMMARIES_MAX] = {0};
    struct kv_summary_head head;

    memcpy(&head, group, sizeof(head));
    if (head.format != KV_SUMMARY_FORMAT || head.n_rows < 1 || head.n_rows > shape->rows ||
        head.d_k != shape->d_k || head.d_v != shape->d_v || head.bits != shape->bits ||
        head.rows != shape->rows || head.zero != 0 ||
        !(head.variance >= 0 && head.variance <= FLT_MAX))
        return false;
    for (size_t row = 0; row < shape->rows; row++)
        if (numbers[row] != KV_SUMMARY_NONE) {
            if (row >= head.n_rows || numbers[row] >= n_summaries)
                return false;
            counts[numbers[row]]++;
        }
    return memcmp(counts, kv_summary_at(group, kv_summary_at_counts(shape)),
                  n_summaries * sizeof(counts[0])) == 0 &&
           are_scales(kv_summary_at(group, kv_summary_at_key_scales(shape)), n_summaries) &&
           are_scales(kv_summary_at(group, kv_summary_at_value_scales(shape)), n_summaries);
}

/* ---- building ---------------------------------------------------------------------------- */

static void scalar_prepare(float *vectors, size_t n, size_t d_k, size_t d, float factor)
{
    for (size_t row = 0; row < n; row++, vectors += d) {
        bool fits = true;

        for (size_t i = 0; i < d; i++)
            fits &= fabsf(vectors[i]) <= KV_SUMMARY_MOST;
        for (size_t i = fits ? d_k : 0; i < d; i++)
            vectors[i] = fits ? vectors[i] * factor : NAN;
    }
}

static size_t scalar_spread(
    const float *vectors, size_t n, size_t d, const float *origin, float *sums, float *squares)
{
    size_t n_added = 0;

    for (size_t row = 0; row < n; row++, vectors += d) {
        if (isnan(vectors[0]))
            continue;
        for (size_t i = 0; i < d; i++) {
            const float x = vectors[i] - origin[i];

            sums[i] += x;
            squares[i] = fmaf(x, x, squares[i]);
        }
        n_added++;
    }
    return n_added;
}

static double scalar_distance(const float *keys,
                              size_t n,
                              size_t d_k,
                              const float *means,
                              size_t stride,
                              const uint8_t *numbers)
{
    double sum = 0;

    for (size_t row = 0; row < n; row++, keys += d_k) {
        float lanes[KV_SUM_LANES] = {0};

        if (numbers[row] == KV_SUMMARY_NONE)
            continue;
        for (size_t i = 0; i < d_k; i++) {
            const float x = keys[i] - means[numbers[row] * stride + i];

            lanes[i % KV_SUM_LANES] = fmaf(x, x, lanes[i % KV_SUM_LANES]);
        }
        sum += (double)kv_sum_lanes(lanes);
    }
    return sum;
}

/* Converts n rows, `stride` bytes apart, to ret_vectors (n, d_k + d_v), the values multiplied
 * by `factor`.  All elements of a row that is in no summary become NaN. */
static void load_rows(const struct kv_summary_shape *shape,
                      const void *rows,
                      size_t stride,
                      size_t n,
                      float factor,
                      float *ret_vectors)
{
    const size_t d = (size_t)shape->d_k + shape->d_v;

    kv_exact_scores_load(shape->type, rows, stride, n, d, ret_vectors);
    best->prepare(ret_vectors, n, shape->d_k, d, factor);
}

/* Returns the floats of the scratch, in the order of kv_summary_build_begin(): vectors of a
 * slice; origin, added and squares; centroids and sums; half_sq_norms and counts.  After them
 * come the rows' numbers, a byte each. */
static size_t scratch_floats(const struct kv_summary_shape *shape)
{
    const size_t d = (size_t)shape->d_k + shape->d_v;

    return (KV_SUMMARY_SLICE + 3 + 2 * kv_summary_count(shape)) * d +
           2 * kv_summary_count(shape);
}

size_t kv_summary_scratch_bytes(const struct kv_summary_shape *shape)
{
    return scratch_floats(shape) * sizeof(float) + shape->rows;
}

void kv_summary_build_begin(struct kv_summary_build *build,
                            const struct kv_summary_shape *shape,
                            uint32_t n_rows,
                            uint64_t seed,
                            void *scratch)
{
    const size_t d = (size_t)shape->d_k + shape->d_v, n_summaries = kv_summary_count(shape);
    float *next = scratch;

    assert(kv_summary_shape_valid(shape));
    assert(n_rows >= 1 && n_rows <= shape->rows);
    memset(scratch, 0, kv_summary_scratch_bytes(shape));
    *build = (struct kv_summary_build){
        .shape = *shape,
        .clusters = {.d = (uint32_t)d, .m = 1, .bits = shape->bits},
        .seed = seed,
        .n_rows = n_rows,
        .factor = 1,
        .vectors = next,
    };
    build->origin = next += KV_SUMMARY_SLICE * d;
    build->added = next += d;
    build->squares = next += d;
    build->book.centroids = next += d;
    build->sums.sums = next += n_summaries * d;
    build->book.half_sq_norms = next += n_summaries * d;
    build->sums.counts = (uint32_t *)(void *)(next += n_summaries);
    build->numbers = (uint8_t *)(next + n_summaries);
}

bool kv_summary_build_next(const struct kv_summary_build *build,
                           uint32_t *ret_first,
                           uint32_t *ret_n)
{
    const uint32_t left = build->n_rows - build->cursor;

    if (build->state == BUILD_DONE)
        return false;
    *ret_first = build->cursor;
    *ret_n = left < KV_SUMMARY_SLICE ? left : KV_SUMMARY_SLICE;
    if (build->state == BUILD_SCALE || build->state == BUILD_UPDATE ||
        build->state == BUILD_MEANS)
        *ret_n = 0;
    return true;
}

/* Returns a pseudo-random number for a seed and a place: the generator SplitMix64 (Steele, Lea
 * and Flood, Fast Splittable Pseudorandom Number Generators, 2014), which needs no state. */
static uint64_t mixed(uint64_t seed, uint64_t place)
{
    uint64_t x = seed + (place + 1) * 0x9e3779b97f4a7c15u;

    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Returns the row that becomes first centroid c: a random one of the c-th of equal parts, so
 * that first centroids are spread over the group and found in one pass in order.  With fewer
 * rows than centroids it is row c, which may not exist. */
static uint32_t seed_row(const struct kv_summary_build *build, uint32_t c)
{
    const uint32_t n_summaries = (uint32_t)kv_summary_count(&build->shape);
    const uint32_t begin = c * build->n_rows / n_summaries;
    const uint32_t end = (c + 1) * build->n_rows / n_summaries;

    if (build->n_rows < n_summaries)
        return c;
    return begin + (uint32_t)(mixed(build->seed, c) % (end - begin));
}

static void spread_slice(struct kv_summary_build *build, const float *vectors, uint32_t n)
{
    const size_t d = build->clusters.d;

    /* The first row that is in a summary is the origin: sums of differences to it lose fewer
     * bits than sums of elements with a large mean. */
    for (uint32_t row = 0; row < n && build->n_spread == 0; row++)
        if (!isnan(vectors[row * d])) {
            memcpy(build->origin, vectors + row * d, d * sizeof(float));
            break;
        }
    build->n_spread +=
        (uint32_t)best->spread(vectors, n, d, build->origin, build->added, build->squares);
    while (build->n_seeded < kv_summary_count(&build->shape) &&
           seed_row(build, build->n_seeded) < build->cursor + n) {
        const uint32_t row = seed_row(build, build->n_seeded) - build->cursor;

        kv_kmeans_set_centroid(&build->clusters, &build->book, build->n_seeded++,
                               vectors + row * d);
    }
}

/* Returns the variances of elements [begin, end), summed. */
static double total_spread(const struct kv_summary_build *build, size_t begin, size_t end)
{
    const double n = build->n_spread;
    double total = 0;

    for (size_t i = begin; i < end; i++) {
        const double mean = build->added[i] / n;

        total += build->squares[i] / n - mean * mean;
    }
    return total;
}

/* Sets the factor that gives values the spread of keys, within limits: scaled values must not
 * exceed KV_SUMMARY_MOST.  No element is farther from the origin than the root of the sum of
 * squares. */
static void choose_factor(struct kv_summary_build *build)
{
    const size_t d_k = build->shape.d_k, d = build->clusters.d;
    const double keys = total_spread(build, 0, d_k), values = total_spread(build, d_k, d);
    double factor = sqrt(keys / values);
    float most = 0;

    if (!(keys > 0 && values > 0))
        return;
    for (size_t i = d_k; i < d; i++) {
        const float end = fabsf(build->origin[i]) + sqrtf(build->squares[i]);

        most = end > most ? end : most;
    }
    if (factor > (double)KV_SUMMARY_MOST / most)
        factor = (double)KV_SUMMARY_MOST / most;
    if (factor > FACTOR_MOST)
        factor = FACTOR_MOST;
    if (factor < 1 / FACTOR_MOST)
        factor = 1 / FACTOR_MOST;
    build->factor = (float)factor;
}

/* Completes the first centroids.  One that has no row, or whose row is in no summary, is set to
 * the origin: a NaN would win no rows. */
static void finish_seeds(struct kv_summary_build *build)
{
    const uint32_t n_summaries = (uint32_t)kv_summary_count(&build->shape);
    const size_t d_k = build->shape.d_k, d = build->clusters.d;

    for (uint32_t c = 0; c < n_summaries; c++)
        if (c >= build->n_seeded || isnan(build->book.centroids[c]))
            kv_kmeans_set_centroid(&build->clusters, &build->book, c, build->origin);
    for (size_t i = d_k * n_summaries; i < d * n_summaries; i++)
        build->book.centroids[i] *= build->factor;
    kv_kmeans_half_sq_norms(&build->clusters, &build->book);
}

static void place_slice(struct kv_summary_build *build, const float *vectors, uint32_t n)
{
    uint8_t *numbers = build->numbers + build->cursor;

    kv_kmeans_step(&build->clusters, &build->book, vectors, n, numbers, KV_SUMMARY_ROWS_MAX,
                   &build->sums);
    for (uint32_t row = 0; row < n; row++)
        if (isnan(vectors[row * build->clusters.d]))
            numbers[row] = KV_SUMMARY_NONE;
}

/* Turns the sums of the last step into means, in place, with values no longer scaled. */
static void set_means(struct kv_summary_build *build)
{
    const size_t d_k = build->shape.d_k, d = build->clusters.d;

    for (size_t c = 0; c < kv_summary_count(&build->shape); c++) {
        float *mean = build->sums.sums + c * d;
        const float count = (float)build->sums.counts[c];

        if (build->sums.counts[c] == 0)
            continue;
        for (size_t i = 0; i < d; i++)
            mean[i] = i < d_k ? mean[i] / count : mean[i] / count / build->factor;
    }
}

/* Goes to the next pass. */
static void next_state(struct kv_summary_build *build)
{
    build->cursor = 0;
    if (build->state == BUILD_PLACE)
        build->state = ++build->iteration < KV_SUMMARY_ITERATIONS ? BUILD_UPDATE : BUILD_MEANS;
    else if (build->state == BUILD_UPDATE)
        build->state = BUILD_PLACE;
    else
        build->state++;
}

void kv_summary_build_slice(struct kv_summary_build *build, const void *rows, size_t stride)
{
    const struct kv_summary_shape *shape = &build->shape;
    uint32_t first, n;

    if (!kv_summary_build_next(build, &first, &n))
        return;
    switch ((enum build_state)build->state) {
    case BUILD_SPREAD:
        load_rows(shape, rows, stride, n, 1, build->vectors);
        spread_slice(build, build->vectors, n);
        break;
    case BUILD_SCALE:
        choose_factor(build);
        finish_seeds(build);
        break;
    case BUILD_PLACE:
        load_rows(shape, rows, stride, n, build->factor, build->vectors);
        place_slice(build, build->vectors, n);
        break;
    case BUILD_UPDATE:
        kv_kmeans_update(&build->clusters, &build->book, &build->sums);
        break;
    case BUILD_MEANS:
        set_means(build);
        break;
    case BUILD_DISTANCE:
        kv_exact_scores_load(shape->type, rows, stride, n, shape->d_k, build->vectors);
        build->distance += best->distance(build->vectors, n, shape->d_k, build->sums.sums,
                                          build->clusters.d, build->numbers + first);
        break;
    case BUILD_DONE:
        break;
    }
    build->cursor += n;
    if (n == 0 || build->cursor == build->n_rows)
        next_state(build);
}

/* Rounds to the nearest integer, ties to even, |x| < 2^22: next to 1.5 * 2^23 the last bit of a
 * float is worth 1. */
static float nearest_integer(float x)
{
    const float ulp_is_one = 12582912; /* 1.5 * 2^23 */

    return x + ulp_is_one - ulp_is_one;
}

/* Converts the mean of summary c to bytes of an array, where `element` says; returns its
 * scale. */
static float quantize(const struct kv_summary_shape *shape,
                      size_t (*element)(const struct kv_summary_shape *, size_t, size_t),
                      size_t c,
                      const float *mean,
                      size_t n,
                      int8_t *ret_array)
{
    float most = 0, scale;

    for (size_t i = 0; i < n; i++)
        most = fabsf(mean[i]) > most ? fabsf(mean[i]) : most;
    scale = most / 127;
    for (size_t i = 0; i < n; i++) {
        const float x = scale > 0 ? nearest_integer(mean[i] / scale) : 0;

        ret_array[element(shape, c, i)] = (int8_t)(x > 127 ? 127 : x < -127 ? -127 : x);
    }
    return scale;
}

void kv_summary_build_end(struct kv_summary_build *build, void *ret_group)
{
    const struct kv_summary_shape *shape = &build->shape;
    const size_t n_summaries = kv_summary_count(shape), d_k = shape->d_k, d_v = shape->d_v;
    struct kv_summary_head head = {
        .format = KV_SUMMARY_FORMAT,
        .n_rows = (uint16_t)build->n_rows,
        .d_k = (uint16_t)d_k,
        .d_v = (uint16_t)d_v,
        .bits = (uint8_t)shape->bits,
        .rows = (uint16_t)shape->rows,
    };
    uint8_t *group = ret_group;
    uint16_t *counts = (void *)(group + kv_summary_at_counts(shape));
    float *key_scales = (void *)(group + kv_summary_at_key_scales(shape));
    float *value_scales = (void *)(group + kv_summary_at_value_scales(shape));
    int8_t *keys = (void *)(group + kv_summary_at_keys(shape));
    int8_t *values = (void *)(group + kv_summary_at_values(shape));

    assert(build->state == BUILD_DONE);
    memset(group, 0, kv_summary_bytes(shape));
    if (build->n_spread > 0)
        head.variance = (float)(build->distance / ((double)build->n_spread * (double)d_k));
    memcpy(group, &head, sizeof(head));
    for (size_t c = 0; c < n_summaries; c++) {
        const float *mean = build->sums.sums + c * (d_k + d_v);

        counts[c] = (uint16_t)build->sums.counts[c];
        if (counts[c] == 0)
            continue;
        key_scales[c] = quantize(shape, kv_summary_key_element, c, mean, d_k, keys);
        value_scales[c] = quantize(shape, kv_summary_value_element, c, mean + d_k, d_v, values);
    }
    memset(group + kv_summary_at_numbers(shape), KV_SUMMARY_NONE, shape->rows);
    memcpy(group + kv_summary_at_numbers(shape), build->numbers, build->n_rows);
}

static const struct kv_summary_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .prepare = scalar_prepare,
    .spread = scalar_spread,
    .distance = scalar_distance,
};

/* Slowest first; the last one that this CPU supports is used. */
static const struct kv_summary_kernels *const tiers[] = {
    &scalar,
#if defined(__x86_64__)
    &kv_summary_avx2,
    &kv_summary_avx512,
#endif
};

__attribute__((constructor)) static void choose(void)
{
    for (unsigned i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++)
        if (tiers[i]->supported())
            best = tiers[i];
}

const struct kv_summary_kernels *kv_summary_kernels_at(unsigned i)
{
    for (unsigned tier = 0; tier < sizeof(tiers) / sizeof(tiers[0]); tier++)
        if (tiers[tier]->supported() && i-- == 0)
            return tiers[tier];
    return NULL;
}
