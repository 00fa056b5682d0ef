#include "kernels/pq_tiles.h"
#include "kernels/dispatch.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum {
    HALF = KV_PQ_TILE / 2,
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

static const struct kv_tile_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .score = scalar_score,
    .cells = scalar_cells,
    .range = scalar_range,
    .round8_to = scalar_round8_to,
    .scan8 = scalar_scan8,
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
