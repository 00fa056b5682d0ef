#include "kernels/pq_cells.h"
#include "kernels/dispatch.h"
#include "kernels/pq_cells_prefix.h"

#include <assert.h>
#include <string.h>

static const struct kv_cells_kernels *best;

/* Cell numbers are taken modulo n_cells, and positions compared with n_rows, wherever they come
 * from memory that may have changed (pq_cells.h): a bit that flips in a tile or a list must not
 * lead outside of the arrays. */

void kv_cells_count(const struct kv_pq_shape *shape,
                    const uint8_t *tile,
                    size_t n,
                    const struct kv_cells *cells)
{
    uint16_t numbers[KV_PQ_TILE];

    kv_tile_cells(shape, tile, 0, n, numbers);
    for (size_t i = 0; i < n; i++)
        cells->offsets[numbers[i] % cells->n_cells + 1]++;
}

void kv_cells_sum(const struct kv_pq_shape *shape, const struct kv_cells *cells)
{
    assert(kv_cells_n(shape) > 0); /* the shape has cells */
    for (uint32_t cell = 0; cell < kv_cells_n(shape); cell++)
        cells->offsets[cell + 1] += cells->offsets[cell];
}

/* offsets[cell] is where the cell's next row goes.  After the last tile it is where the cell's
 * list ends, which is where the next list began. */
void kv_cells_place(const struct kv_pq_shape *shape,
                    const uint8_t *tile,
                    size_t n,
                    uint32_t row,
                    const struct kv_cells *cells)
{
    uint16_t numbers[KV_PQ_TILE];

    kv_tile_cells(shape, tile, 0, n, numbers);
    for (size_t i = 0; i < n; i++) {
        const uint32_t at = cells->offsets[numbers[i] % cells->n_cells]++;

        if (at < cells->n_rows)
            cells->rows[at] = row + (uint32_t)i;
    }
}

/* On entry offsets[cell] is the end of each cell's list.  Moves the ends of full cells down to
 * offsets[item + 1], in place: an item is never above its cell, and the next end is read before
 * it can be overwritten. */
void kv_cells_end(const struct kv_pq_shape *shape, const struct kv_cells *cells)
{
    const uint32_t n_cells = kv_cells_n(shape);
    uint32_t begin = 0, end = cells->offsets[0], n = 0;

    memset(cells->full, 0, kv_cells_n_words(shape) * sizeof(*cells->full));
    cells->offsets[0] = 0;
    for (uint32_t cell = 0; cell < n_cells; cell++) {
        const uint32_t next = cells->offsets[cell + 1];

        if (cell % 64 == 0)
            cells->before[cell / 64] = n;
        if (end > begin) {
            cells->full[cell / 64] |= (uint64_t)1 << cell % 64;
            cells->offsets[++n] = end;
        }
        begin = end;
        end = next;
    }
    cells->before[kv_cells_n_words(shape)] = n;
}

static uint32_t lower(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Returns the first position in [from, to) of an ascending list whose row is not below
 * `row`. */
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
                     const struct kv_cells *cells,
                     uint32_t begin,
                     uint32_t end,
                     uint32_t *ret_counts)
{
    const uint32_t n = kv_cells_n_full(shape, cells), n_rows = cells->n_rows;

    if (begin == 0 && end >= n_rows) {
        best->lengths(cells->offsets, n, ret_counts);
        for (uint32_t item = 0; item < n; item++)
            ret_counts[item] = ret_counts[item] < n_rows ? ret_counts[item] : n_rows;
        return;
    }
    for (uint32_t item = 0; item < n; item++) {
        uint32_t to = lower(cells->offsets[item + 1], n_rows);
        uint32_t from = lower(cells->offsets[item], to);

        if (begin > 0)
            from = lower_bound(cells->rows, from, to, begin);
        if (end < n_rows)
            to = lower_bound(cells->rows, from, to, end);
        ret_counts[item] = to - from;
    }
}

/* Most lists are wholly within [begin, end), so their ends are compared before any search.  The
 * test in the loop guards against rows out of order, after a bit has flipped. */
size_t kv_cells_mark(const struct kv_cells *cells,
                     uint32_t item,
                     uint32_t begin,
                     uint32_t end,
                     uint64_t first,
                     uint64_t *bits)
{
    const uint32_t *rows = cells->rows;
    const uint32_t n = end - begin;
    uint32_t to = lower(cells->offsets[item + 1], cells->n_rows);
    uint32_t from = lower(cells->offsets[item], to);

    if (from < to && rows[from] < begin)
        from = lower_bound(rows, from, to, begin);
    if (from < to && rows[to - 1] >= end)
        to = lower_bound(rows, from, to, end);
    for (uint32_t i = from; i < to; i++)
        if (rows[i] - begin < n)
            bits[(first + rows[i]) / 64] |= (uint64_t)1 << (first + rows[i]) % 64;
    return to - from;
}

size_t kv_bits_take(uint64_t *bits, size_t begin, size_t end, size_t max, uint32_t *ret_numbers)
{
    size_t n = 0;

    assert(begin % 64 == 0); /* else bits before it would be returned */
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

static void scalar_score(const struct kv_pq_shape *shape,
                         const float *tables,
                         size_t n_queries,
                         const struct kv_cells *cells,
                         float *ret_scores,
                         size_t scores_stride)
{
    const size_t n_centroids = kv_pq_n_centroids(shape);
    float room[KV_CELLS_PREFIXES_MAX];

    for (size_t query = 0; query < n_queries; query++) {
        const float *table = tables + query * kv_pq_table_size(shape);
        const float *prefixes = kv_cells_prefix_scores(shape, table, room);
        const float *last = table + (shape->m - 1) * n_centroids;
        size_t n = 0;

        for (size_t cell = 0; cell < kv_cells_n(shape); cell++)
            if (kv_cells_full(cells, cell, 1))
                ret_scores[query * scores_stride + n++] =
                    prefixes[cell / n_centroids] + last[cell % n_centroids];
    }
}

static void scalar_lengths(const uint32_t *offsets, size_t n, uint32_t *ret_lengths)
{
    for (size_t i = 0; i < n; i++)
        ret_lengths[i] = offsets[i + 1] - offsets[i];
}

static const struct kv_cells_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .score = scalar_score,
    .lengths = scalar_lengths,
};

/* Slowest first; the last one that this CPU supports is used. */
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

void kv_cells_score(const struct kv_pq_shape *shape,
                    const float *tables,
                    size_t n_queries,
                    const struct kv_cells *cells,
                    float *ret_scores,
                    size_t scores_stride)
{
    best->score(shape, tables, n_queries, cells, ret_scores, scores_stride);
}
