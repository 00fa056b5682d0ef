#include "cells.h"
#include "tiers.h"

#include <string.h>

static const struct kv_cells_kernels *best;

void kv_cells_count(const struct kv_pq_shape *shape,
                    const uint8_t *tile,
                    size_t n,
                    uint32_t *offsets)
{
    uint16_t cells[KV_PQ_TILE];

    kv_tile_cells(shape, tile, 0, n, cells);
    for (size_t i = 0; i < n; i++)
        offsets[cells[i] + 1]++;
}

void kv_cells_sum(const struct kv_pq_shape *shape, uint32_t *offsets)
{
    for (uint32_t cell = 0; cell < kv_cells_n(shape); cell++)
        offsets[cell + 1] += offsets[cell];
}

/* A cell's offset runs ahead to where its list ends, which is where the next one began. */
void kv_cells_place(const struct kv_pq_shape *shape,
                    const uint8_t *tile,
                    size_t n,
                    uint32_t row,
                    uint32_t *offsets,
                    uint32_t *rows)
{
    uint16_t cells[KV_PQ_TILE];

    kv_tile_cells(shape, tile, 0, n, cells);
    for (size_t i = 0; i < n; i++)
        rows[offsets[cells[i]]++] = row + (uint32_t)i;
}

void kv_cells_end(const struct kv_pq_shape *shape, uint32_t *offsets)
{
    memmove(offsets + 1, offsets, kv_cells_n(shape) * sizeof(*offsets));
    offsets[0] = 0;
}

/* The first place in [from, to) of a list whose row is not below `row`. */
static uint32_t lower_bound(const uint32_t *rows, uint32_t from, uint32_t to, uint32_t row)
{
    while (from < to) {
        const uint32_t middle = from + (to - from) / 2;

        if (rows[middle] < row)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

void kv_cells_counts(const struct kv_pq_shape *shape,
                     const uint32_t *offsets,
                     const uint32_t *rows,
                     uint32_t begin,
                     uint32_t end,
                     uint32_t *ret_counts)
{
    const uint32_t n_cells = kv_cells_n(shape), n_rows = offsets[n_cells];

    for (uint32_t cell = 0; cell < n_cells; cell++) {
        uint32_t from = offsets[cell], to = offsets[cell + 1];

        if (begin > 0)
            from = lower_bound(rows, from, to, begin);
        if (end < n_rows)
            to = lower_bound(rows, from, to, end);
        ret_counts[cell] = to - from;
    }
}

size_t kv_cells_mark(const uint32_t *offsets,
                     const uint32_t *rows,
                     uint32_t cell,
                     uint32_t begin,
                     uint32_t end,
                     uint64_t first,
                     uint64_t *bits)
{
    const uint32_t from = lower_bound(rows, offsets[cell], offsets[cell + 1], begin);
    const uint32_t to = lower_bound(rows, from, offsets[cell + 1], end);

    for (uint32_t i = from; i < to; i++)
        bits[(first + rows[i]) / 64] |= (uint64_t)1 << (first + rows[i]) % 64;
    return to - from;
}

size_t kv_bits_take(uint64_t *bits, size_t begin, size_t end, size_t max, uint32_t *ret_numbers)
{
    size_t n = 0;

    for (size_t word = begin / 64; word < (end + 63) / 64; word++) {
        uint64_t left = bits[word];

        if (left == 0)
            continue;
        bits[word] = 0;
        for (; left != 0 && n < max; left &= left - 1)
            ret_numbers[n++] = (uint32_t)(word * 64 + (size_t)__builtin_ctzll(left));
    }
    return n;
}

static int always(void)
{
    return 1;
}

/* Cells of one subspace more at a time, from behind: what is read is not yet written. */
static void scalar_score(const struct kv_pq_shape *shape, const float *table, float *ret_scores)
{
    const size_t n_centroids = kv_pq_n_centroids(shape);
    size_t n = n_centroids;

    memcpy(ret_scores, table, n_centroids * sizeof(*table));
    for (size_t j = 1; j < shape->m; j++, n *= n_centroids)
        for (size_t i = n; i-- > 0;) {
            const float before = ret_scores[i];

            for (size_t c = 0; c < n_centroids; c++)
                ret_scores[i * n_centroids + c] = before + table[j * n_centroids + c];
        }
}

static const struct kv_cells_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .score = scalar_score,
};

/* Slowest first. */
static const struct kv_cells_kernels *const tiers[] = {
    &scalar,
#if defined(__x86_64__)
    &kv_cells_avx2,
    &kv_cells_avx512,
#endif
};

__attribute__((constructor)) static void choose(void)
{
    for (unsigned i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++)
        if (tiers[i]->supported())
            best = tiers[i];
}

const struct kv_cells_kernels *kv_cells_kernels_at(unsigned i)
{
    for (unsigned tier = 0; tier < sizeof(tiers) / sizeof(tiers[0]); tier++)
        if (tiers[tier]->supported() && i-- == 0)
            return tiers[tier];
    return NULL;
}

void kv_cells_score(const struct kv_pq_shape *shape, const float *table, float *ret_scores)
{
    best->score(shape, table, ret_scores);
}
