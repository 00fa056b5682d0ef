#include "kernels/pq_prefilter.h"
#include "kernels/dispatch.h"
#include "kernels/select.h"

#include <string.h>

static const struct kv_pq_prefilter_kernels *best;

static int always(void)
{
    return 1;
}

/* ---- the reference ----------------------------------------------------------------------- */

/* Divides rows by their sums, which are in one of the two arrays; `bound` is the k-th largest
 * sum. */
static size_t divide(const uint16_t *sums16,
                     const uint8_t *sums8,
                     size_t n,
                     uint32_t bound,
                     uint32_t margin,
                     uint32_t *ret_accepted,
                     size_t *ret_n_accepted,
                     uint32_t *ret_undecided)
{
    size_t n_accepted = 0, n_undecided = 0;

    for (size_t i = 0; i < n; i++) {
        const uint32_t sum = sums8 != NULL ? sums8[i] : sums16[i];

        if (sum > bound + margin)
            ret_accepted[n_accepted++] = (uint32_t)i;
        else if (sum + margin >= bound)
            ret_undecided[n_undecided++] = (uint32_t)i;
    }
    *ret_n_accepted = n_accepted;
    return n_undecided;
}

/* Returns the bin that holds the k-th largest of the values counted in bins (256); *k becomes
 * its place in that bin. */
static uint32_t find_bin(const size_t *bins, size_t *k)
{
    uint32_t bin = UINT8_MAX;

    for (; bins[bin] < *k; bin--)
        *k -= bins[bin];
    return bin;
}

static size_t scalar_prefilter8(const uint8_t *sums,
                                size_t n,
                                size_t k,
                                uint32_t margin,
                                uint32_t *ret_accepted,
                                size_t *ret_n_accepted,
                                uint32_t *ret_undecided)
{
    size_t bins[UINT8_MAX + 1] = {0};

    for (size_t i = 0; i < n; i++)
        bins[sums[i]]++;
    return divide(NULL, sums, n, find_bin(bins, &k), margin, ret_accepted, ret_n_accepted,
                  ret_undecided);
}

/* A radix select in two passes: the high bytes, then the low bytes of sums with that high
 * byte. */
static size_t scalar_prefilter16(const uint16_t *sums,
                                 size_t n,
                                 size_t k,
                                 uint32_t margin,
                                 uint32_t *ret_accepted,
                                 size_t *ret_n_accepted,
                                 uint32_t *ret_undecided)
{
    size_t bins[UINT8_MAX + 1] = {0};
    uint32_t high;

    for (size_t i = 0; i < n; i++)
        bins[sums[i] >> 8]++;
    high = find_bin(bins, &k);
    memset(bins, 0, sizeof(bins));
    for (size_t i = 0; i < n; i++)
        if (sums[i] >> 8 == high)
            bins[sums[i] & UINT8_MAX]++;
    return divide(sums, NULL, n, high << 8 | find_bin(bins, &k), margin, ret_accepted,
                  ret_n_accepted, ret_undecided);
}

static const struct kv_pq_prefilter_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .prefilter8 = scalar_prefilter8,
    .prefilter16 = scalar_prefilter16,
};

/* Slowest first; the last one that this CPU supports is used. */
static const struct kv_pq_prefilter_kernels *const tiers[] = {
    &scalar,
#if defined(__x86_64__)
    &kv_pq_prefilter_avx2,
    &kv_pq_prefilter_avx512,
#endif
};

__attribute__((constructor)) static void choose(void)
{
    for (unsigned i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++)
        if (tiers[i]->supported())
            best = tiers[i];
}

const struct kv_pq_prefilter_kernels *kv_pq_prefilter_kernels_at(unsigned i)
{
    for (unsigned tier = 0; tier < sizeof(tiers) / sizeof(tiers[0]); tier++)
        if (tiers[tier]->supported() && i-- == 0)
            return tiers[tier];
    return NULL;
}

/* ---- all of it --------------------------------------------------------------------------- */

enum {
    NARROW_SUBSPACES = 4, /* with more of them, sums of 8 bits leave too many rows undecided */
};

static size_t tiles_of(size_t n)
{
    return (n + KV_PQ_TILE - 1) / KV_PQ_TILE;
}

/* The scratch has, one after the other: undecided rows, the selected ones of them, their scores
 * (each n + KV_TOPK_SPARE of 4 bytes, which vectors may write), and for all rows of the tiles
 * either sums of 8 or 16 bits or, without sums, 4 bytes for kv_topk_select(). */
size_t kv_tiles_top_bytes(size_t n)
{
    const size_t n_rows = tiles_of(n) * KV_PQ_TILE;

    return n_rows * sizeof(uint32_t) + 3 * (n + KV_TOPK_SPARE) * sizeof(uint32_t);
}

/* Merges the accepted rows, which are in `rows`, with the selected ones of the undecided, in
 * place.  Works from the end, because `rows` has free space there. */
static void merge(uint32_t *rows,
                  size_t n_rows,
                  const uint32_t *undecided,
                  const uint32_t *selected,
                  size_t n_selected)
{
    size_t to = n_rows + n_selected;

    while (n_selected > 0) {
        const uint32_t row = undecided[selected[n_selected - 1]];

        if (n_rows > 0 && rows[n_rows - 1] > row) {
            rows[--to] = rows[--n_rows];
        } else {
            rows[--to] = row;
            n_selected--;
        }
    }
}

size_t kv_tiles_top(const struct kv_pq_shape *shape,
                    const float *table,
                    const uint8_t *const *tiles,
                    size_t n,
                    size_t k,
                    void *scratch,
                    uint32_t *ret_rows,
                    size_t *ret_n_exact)
{
    const size_t n_tiles = tiles_of(n);
    uint16_t rounded[KV_PQ_SUBSPACES_MAX << KV_PQ_BITS_MAX];
    uint32_t *undecided = scratch, *selected = undecided + n + KV_TOPK_SPARE;
    float *scores = (float *)(void *)(selected + n + KV_TOPK_SPARE);
    /* Scratch of kv_topk_select(), which needs no sums. */
    float *exact = scores + n + KV_TOPK_SPARE;
    void *sums = exact;
    struct kv_pq_table_rounding rounding;
    size_t n_accepted = 0, n_undecided = 0, n_exact = n;
    bool is_prefiltered = true;

    k = k < n ? k : n;
    if (k == 0) {
        n_exact = 0;
        is_prefiltered = false;
    } else if (shape->m <= NARROW_SUBSPACES &&
               kv_pq_table_round8(shape, table, (uint8_t *)rounded, &rounding)) {
        kv_tiles_scan8(shape, (const uint8_t *)rounded, 1, tiles, n_tiles, sums, 0);
        n_exact = n_undecided =
            best->prefilter8(sums, n, k, rounding.margin, ret_rows, &n_accepted, undecided);
    } else if (kv_pq_table_round16(shape, table, rounded, &rounding)) {
        kv_tiles_scan16(shape, rounded, 1, tiles, n_tiles, sums, 0);
        n_exact = n_undecided =
            best->prefilter16(sums, n, k, rounding.margin, ret_rows, &n_accepted, undecided);
    } else {
        for (size_t tile = 0; tile < n_tiles; tile++)
            kv_tile_score(shape, table, 1, tiles[tile], 0,
                          n - tile * KV_PQ_TILE < KV_PQ_TILE ? n - tile * KV_PQ_TILE
                                                             : KV_PQ_TILE,
                          scores + tile * KV_PQ_TILE, 0);
        kv_topk_select(scores, n, k, ret_rows, exact);
        is_prefiltered = false;
    }
    if (ret_n_exact != NULL)
        *ret_n_exact = n_exact;
    if (!is_prefiltered)
        return k;
    kv_tiles_score_rows(shape, table, tiles, undecided, n_undecided, scores);
    merge(ret_rows, n_accepted, undecided, selected,
          kv_topk_select(scores, n_undecided, k - n_accepted, selected, exact));
    return k;
}
