#include "kernels/pq_tiles.h"
#include "kernels/dispatch.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <string.h>

enum {
    HALF = KV_PQ_TILE / 2,
    MARGIN_MAX = 64, /* of 255 steps: a larger margin leaves nearly all rows undecided */
};

static const struct kv_tile_kernels *best;

size_t kv_tile_bytes(const struct kv_pq_shape *shape)
{
    switch (kv_tile_width(shape)) {
    case 4:
        return (size_t)shape->m * HALF;
    case 6:
        return (size_t)(shape->m / 2) * 3 * HALF + (size_t)(shape->m % 2) * KV_PQ_TILE;
    default:
        return (size_t)shape->m * KV_PQ_TILE;
    }
}

/* ---- one code ---------------------------------------------------------------------------- */

/* Width 6 stores a pair of subspaces A, B in three rows of HALF bytes (pq_tiles.h).  The low
 * six bits of these bytes are codes as they are; their high two bits together hold the codes of
 * B of the upper half of the rows. */
static uint8_t code6(const uint8_t *pair, unsigned is_second, size_t row)
{
    const size_t i = row % HALF;

    if (is_second == 0)
        return pair[row] & 63;
    if (row < HALF)
        return pair[2 * HALF + i] & 63;
    return (uint8_t)(pair[i] >> 6 | (pair[HALF + i] >> 6) << 2 |
                     (pair[2 * HALF + i] >> 6) << 4);
}

static void put6(uint8_t *pair, unsigned is_second, size_t row, uint8_t code)
{
    const size_t i = row % HALF;
    uint8_t *at = is_second == 0 ? pair + row : pair + 2 * HALF + i;

    if (is_second == 0 || row < HALF) {
        *at = (uint8_t)((*at & 0xc0) | code);
        return;
    }
    for (unsigned part = 0; part < 3; part++)
        pair[part * HALF + i] =
            (uint8_t)((pair[part * HALF + i] & 63) | (code >> 2 * part & 3) << 6);
}

static uint8_t
code_at(const struct kv_pq_shape *shape, const uint8_t *tile, size_t j, size_t row)
{
    switch (kv_tile_width(shape)) {
    case 4:
        return row < HALF ? tile[j * HALF + row] & 15 : tile[j * HALF + row - HALF] >> 4;
    case 6:
        if (j / 2 < shape->m / 2)
            return code6(tile + j / 2 * 3 * HALF, j % 2, row);
        return tile[j / 2 * 3 * HALF + row];
    default:
        return tile[j * KV_PQ_TILE + row];
    }
}

static void
put_at(const struct kv_pq_shape *shape, uint8_t *tile, size_t j, size_t row, uint8_t code)
{
    uint8_t *at;

    switch (kv_tile_width(shape)) {
    case 4:
        at = tile + j * HALF + row % HALF;
        *at = (uint8_t)(row < HALF ? (*at & 0xf0) | code : (*at & 15) | code << 4);
        return;
    case 6:
        if (j / 2 < shape->m / 2)
            put6(tile + j / 2 * 3 * HALF, j % 2, row, code);
        else
            tile[j / 2 * 3 * HALF + row] = code;
        return;
    default:
        tile[j * KV_PQ_TILE + row] = code;
    }
}

void kv_tile_put(const struct kv_pq_shape *shape,
                 uint8_t *tile,
                 size_t begin,
                 size_t n,
                 const uint8_t *codes,
                 size_t codes_stride)
{
    assert(begin + n <= KV_PQ_TILE);
    for (size_t j = 0; j < shape->m; j++)
        for (size_t i = 0; i < n; i++)
            put_at(shape, tile, j, begin + i, codes[j * codes_stride + i]);
}

void kv_tile_get(const struct kv_pq_shape *shape,
                 const uint8_t *tile,
                 size_t begin,
                 size_t n,
                 uint8_t *ret_codes,
                 size_t codes_stride)
{
    assert(begin + n <= KV_PQ_TILE);
    for (size_t j = 0; j < shape->m; j++)
        for (size_t i = 0; i < n; i++)
            ret_codes[j * codes_stride + i] = code_at(shape, tile, j, begin + i);
}

void kv_tiles_score_rows(const struct kv_pq_shape *shape,
                         const float *table,
                         const uint8_t *const *tiles,
                         const uint32_t *rows,
                         size_t n,
                         float *ret_scores)
{
    const size_t n_centroids = kv_pq_n_centroids(shape);
    const bool is_pair = shape->m == 2 && kv_tile_width(shape) == 6; /* the default shape */

    for (size_t i = 0; i < n; i++) {
        const uint8_t *tile = tiles[rows[i] / KV_PQ_TILE];
        const size_t row = rows[i] % KV_PQ_TILE;

        if (is_pair) {
            ret_scores[i] =
                table[code6(tile, 0, row)] + table[n_centroids + code6(tile, 1, row)];
            continue;
        }
        float score = table[code_at(shape, tile, 0, row)];

        for (size_t j = 1; j < shape->m; j++)
            score += table[j * n_centroids + code_at(shape, tile, j, row)];
        ret_scores[i] = score;
    }
}

/* ---- rounded tables ---------------------------------------------------------------------- */

/* Chooses the step: the sum of the ranges of all subspaces, divided by `most`, less m for
 * values that are rounded up.  Each table value is rounded once, by at most half a step, so a
 * sum is at most m / 2 steps from its score; the error bound adds what fp32 and double lose on
 * the way.  Two sums that differ by more than twice the error have the order of their
 * scores. */
static bool plan_rounding(const struct kv_pq_shape *shape,
                          const float *table,
                          uint32_t most,
                          float *ret_least,
                          struct kv_pq_table_rounding *ret_rounding,
                          double *ret_step)
{
    const size_t n_centroids = kv_pq_n_centroids(shape);
    double span = 0, offset = 0, magnitude = 0;

    for (size_t j = 0; j < shape->m; j++) {
        float least = table[j * n_centroids], largest = least;

        for (size_t c = 0; c < n_centroids; c++) {
            const float value = table[j * n_centroids + c];

            if (!isfinite(value))
                return false;
            least = fminf(least, value);
            largest = fmaxf(largest, value);
        }
        ret_least[j] = least;
        span += (double)largest - least;
        offset += least;
        magnitude += fmax(fabs((double)least), fabs((double)largest));
    }
    /* Exact scores must not overflow, and steps must not be subnormal. */
    if (magnitude > FLT_MAX / 2)
        return false;
    double step = span / (most - shape->m);
    if (step < FLT_MIN * 0x1p24)
        step = FLT_MIN * 0x1p24;
    /* Each of the m additions of the exact score rounds by at most 2^-24 of its result. */
    const double error =
        shape->m * (0.5 + most * 0x1p-22) * step + (shape->m + 2) * 0x1p-23 * magnitude;
    const double margin = floor(2 * error / step) + 1;
    if (!(margin <= (double)most * MARGIN_MAX / 255))
        return false;
    *ret_rounding = (struct kv_pq_table_rounding){
        .offset = (float)offset,
        .step = (float)step,
        .error = (float)(error * (1 + 0x1p-20)),
        .margin = (uint32_t)margin,
    };
    *ret_step = step;
    return true;
}

/* `most` is a constant where this is called: UINT8_MAX for a table of bytes, UINT16_MAX for one
 * of words.  Every value fits: plan_rounding() keeps even the largest sum of them below it. */
static inline bool round_table(const struct kv_pq_shape *shape,
                               const float *table,
                               uint32_t most,
                               void *ret_rounded,
                               struct kv_pq_table_rounding *ret_rounding)
{
    const size_t n_centroids = kv_pq_n_centroids(shape),
                 size = (size_t)1 << kv_tile_width(shape);
    uint8_t *bytes = ret_rounded;
    uint16_t *words = ret_rounded;
    float least[KV_PQ_SUBSPACES_MAX];
    double step;

    if (!plan_rounding(shape, table, most, least, ret_rounding, &step))
        return false;
    memset(ret_rounded, 0,
           kv_pq_table_rounded_size(shape) *
               (most == UINT8_MAX ? sizeof(*bytes) : sizeof(*words)));
    for (size_t j = 0; j < shape->m; j++)
        for (size_t c = 0; c < n_centroids; c++) {
            const int value =
                (int)(((double)table[j * n_centroids + c] - least[j]) / step + 0.5);

            if (most == UINT8_MAX)
                bytes[j * size + c] = (uint8_t)value;
            else
                words[j * size + c] = (uint16_t)value;
        }
    return true;
}

bool kv_pq_table_round8(const struct kv_pq_shape *shape,
                        const float *table,
                        uint8_t *ret_rounded,
                        struct kv_pq_table_rounding *ret_rounding)
{
    return round_table(shape, table, UINT8_MAX, ret_rounded, ret_rounding);
}

bool kv_pq_table_round16(const struct kv_pq_shape *shape,
                         const float *table,
                         uint16_t *ret_rounded,
                         struct kv_pq_table_rounding *ret_rounding)
{
    return round_table(shape, table, UINT16_MAX, ret_rounded, ret_rounding);
}

/* ---- the scalar reference ---------------------------------------------------------------- */

static int always(void)
{
    return 1;
}

static void scalar_score(const struct kv_pq_shape *shape,
                         const float *tables,
                         size_t n_queries,
                         const uint8_t *const *tiles,
                         size_t begin,
                         size_t n,
                         float *ret_scores,
                         size_t scores_stride)
{
    const size_t n_centroids = kv_pq_n_centroids(shape);

    for (size_t query = 0; query < n_queries; query++) {
        const float *table = tables + query * kv_pq_table_size(shape);

        for (size_t i = 0; i < n; i++) {
            const uint8_t *tile = tiles[(begin + i) / KV_PQ_TILE];
            const size_t row = (begin + i) % KV_PQ_TILE;
            float score = table[code_at(shape, tile, 0, row)];

            for (size_t j = 1; j < shape->m; j++)
                score += table[j * n_centroids + code_at(shape, tile, j, row)];
            ret_scores[query * scores_stride + i] = score;
        }
    }
}

static void scalar_cells(const struct kv_pq_shape *shape,
                         const uint8_t *tile,
                         size_t begin,
                         size_t n,
                         uint16_t *ret_cells)
{
    for (size_t i = 0; i < n; i++) {
        unsigned cell = 0;

        for (size_t j = 0; j < shape->m; j++)
            cell = cell << shape->bits | code_at(shape, tile, j, begin + i);
        ret_cells[i] = (uint16_t)cell;
    }
}

/* A subspace's least and largest value; a NaN is neither. */
static void range_of(const float *values, size_t n, float *ret_least, float *ret_most)
{
    *ret_least = INFINITY;
    *ret_most = -INFINITY;
    for (size_t i = 0; i < n; i++) {
        *ret_least = values[i] < *ret_least ? values[i] : *ret_least;
        *ret_most = values[i] > *ret_most ? values[i] : *ret_most;
    }
}

static void scalar_range(const struct kv_pq_shape *shape,
                         const float *table,
                         float *ret_least,
                         float *ret_most)
{
    const size_t n_centroids = kv_pq_n_centroids(shape);

    *ret_least = *ret_most = 0;
    for (size_t j = 0; j < shape->m; j++) {
        float least, most;

        range_of(table + j * n_centroids, n_centroids, &least, &most);
        *ret_least += least;
        *ret_most += most;
    }
}

static uint8_t to_byte(float steps)
{
    float clamped = steps > 0 ? steps : 0; /* a NaN is not above 0 */

    clamped = clamped < UINT8_MAX ? clamped : UINT8_MAX;
    return (uint8_t)(clamped + 0.5f);
}

static void scalar_round8_to(const struct kv_pq_shape *shape,
                             const float *table,
                             float base,
                             float inv_step,
                             uint8_t *ret_rounded)
{
    const size_t n_centroids = kv_pq_n_centroids(shape),
                 size = (size_t)1 << kv_tile_width(shape);
    float least, most, shift;

    scalar_range(shape, table, &least, &most);
    shift = least - base;
    memset(ret_rounded, 0, kv_pq_table_rounded_size(shape));
    for (size_t j = 0; j < shape->m; j++) {
        range_of(table + j * n_centroids, n_centroids, &least, &most);
        for (size_t c = 0; c < n_centroids; c++) {
            const float above = table[j * n_centroids + c] - least;

            ret_rounded[j * size + c] = to_byte((j == 0 ? above + shift : above) * inv_step);
        }
    }
}

static uint8_t add_saturated(uint8_t a, uint8_t b)
{
    return (uint8_t)(a + b < UINT8_MAX ? a + b : UINT8_MAX);
}

static uint8_t
sum8_at(const struct kv_pq_shape *shape, const uint8_t *table, const uint8_t *tile, size_t row)
{
    const size_t size = (size_t)1 << kv_tile_width(shape);
    uint8_t sum = 0;

    for (size_t j = 0; j < shape->m; j++)
        sum = add_saturated(sum, table[j * size + code_at(shape, tile, j, row)]);
    return sum;
}

static void scalar_scan8(const struct kv_pq_shape *shape,
                         const uint8_t *tables,
                         size_t n_queries,
                         const uint8_t *const *tiles,
                         size_t n_tiles,
                         uint8_t *ret_sums,
                         size_t sums_stride)
{
    for (size_t query = 0; query < n_queries; query++)
        for (size_t row = 0; row < n_tiles * KV_PQ_TILE; row++)
            ret_sums[query * sums_stride + row] =
                sum8_at(shape, tables + query * kv_pq_table_rounded_size(shape),
                        tiles[row / KV_PQ_TILE], row % KV_PQ_TILE);
}

static void scalar_scan8_max(const struct kv_pq_shape *shape,
                             const uint8_t *tables,
                             const int16_t *offsets,
                             size_t n_queries,
                             const uint8_t *const *tiles,
                             size_t n_tiles,
                             uint8_t *ret_most)
{
    for (size_t row = 0; row < n_tiles * KV_PQ_TILE; row++) {
        int most = 0;

        for (size_t query = 0; query < n_queries; query++) {
            const int sum = sum8_at(shape, tables + query * kv_pq_table_rounded_size(shape),
                                    tiles[row / KV_PQ_TILE], row % KV_PQ_TILE) +
                            offsets[query];

            most = sum > most ? sum : most;
        }
        ret_most[row] = (uint8_t)(most < UINT8_MAX ? most : UINT8_MAX);
    }
}

static void scalar_scan16(const struct kv_pq_shape *shape,
                          const uint16_t *tables,
                          size_t n_queries,
                          const uint8_t *const *tiles,
                          size_t n_tiles,
                          uint16_t *ret_sums,
                          size_t sums_stride)
{
    const size_t size = (size_t)1 << kv_tile_width(shape);

    for (size_t query = 0; query < n_queries; query++)
        for (size_t row = 0; row < n_tiles * KV_PQ_TILE; row++) {
            const uint16_t *table = tables + query * kv_pq_table_rounded_size(shape);
            unsigned sum = 0;

            for (size_t j = 0; j < shape->m; j++)
                sum += table[j * size +
                             code_at(shape, tiles[row / KV_PQ_TILE], j, row % KV_PQ_TILE)];
            ret_sums[query * sums_stride + row] = (uint16_t)sum;
        }
}

static const struct kv_tile_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .score = scalar_score,
    .cells = scalar_cells,
    .range = scalar_range,
    .round8_to = scalar_round8_to,
    .scan8 = scalar_scan8,
    .scan16 = scalar_scan16,
    .scan8_max = scalar_scan8_max,
};

/* Slowest first; the last one that this CPU supports is used. */
static const struct kv_tile_kernels *const tiers[] = {
    &scalar,
#if defined(__x86_64__)
    &kv_tile_avx2,
    &kv_tile_avx512,
#endif
};

__attribute__((constructor)) static void choose(void)
{
    for (unsigned i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++)
        if (tiers[i]->supported())
            best = tiers[i];
}

const struct kv_tile_kernels *kv_tile_kernels_at(unsigned i)
{
    for (unsigned tier = 0; tier < sizeof(tiers) / sizeof(tiers[0]); tier++)
        if (tiers[tier]->supported() && i-- == 0)
            return tiers[tier];
    return NULL;
}

void kv_tiles_score(const struct kv_pq_shape *shape,
                    const float *tables,
                    size_t n_queries,
                    const uint8_t *const *tiles,
                    size_t begin,
                    size_t n,
                    float *ret_scores,
                    size_t scores_stride)
{
    best->score(shape, tables, n_queries, tiles, begin, n, ret_scores, scores_stride);
}

void kv_tile_cells(const struct kv_pq_shape *shape,
                   const uint8_t *tile,
                   size_t begin,
                   size_t n,
                   uint16_t *ret_cells)
{
    assert(shape->m * shape->bits <= 16); /* a cell's number is 16 bits */
    assert(begin + n <= KV_PQ_TILE);
    best->cells(shape, tile, begin, n, ret_cells);
}

void kv_pq_table_range(const struct kv_pq_shape *shape,
                       const float *table,
                       float *ret_least,
                       float *ret_most)
{
    best->range(shape, table, ret_least, ret_most);
}

void kv_pq_table_round8_to(const struct kv_pq_shape *shape,
                           const float *table,
                           float base,
                           float inv_step,
                           uint8_t *ret_rounded)
{
    best->round8_to(shape, table, base, inv_step, ret_rounded);
}

void kv_tiles_scan8(const struct kv_pq_shape *shape,
                    const uint8_t *tables,
                    size_t n_queries,
                    const uint8_t *const *tiles,
                    size_t n_tiles,
                    uint8_t *ret_sums,
                    size_t sums_stride)
{
    best->scan8(shape, tables, n_queries, tiles, n_tiles, ret_sums, sums_stride);
}

void kv_tiles_scan16(const struct kv_pq_shape *shape,
                     const uint16_t *tables,
                     size_t n_queries,
                     const uint8_t *const *tiles,
                     size_t n_tiles,
                     uint16_t *ret_sums,
                     size_t sums_stride)
{
    best->scan16(shape, tables, n_queries, tiles, n_tiles, ret_sums, sums_stride);
}

void kv_tiles_scan8_max(const struct kv_pq_shape *shape,
                        const uint8_t *tables,
                        const int16_t *offsets,
                        size_t n_queries,
                        const uint8_t *const *tiles,
                        size_t n_tiles,
                        uint8_t *ret_most)
{
    best->scan8_max(shape, tables, offsets, n_queries, tiles, n_tiles, ret_most);
}
