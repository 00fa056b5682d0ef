/* What a node does for a query of one kv head, d = 128, m = 2, b = 6: tables for each chapter,
 * scores, one weight from several query heads, exactly k rows, ascending.
 *
 *   cells  scores and weights of cells (sum of the heads' softmaxes)
 *   tiles  those of rows, in fp32 (the same)
 *   bytes  rows by the largest of the heads' rounded sums, each head's offset from a sample
 *
 * Queries are other ones in every turn.  Hot: one head's codes, over and over. */
#include "tests/bench/kernels.h"

#include "kernels/byte_select.h"
#include "kernels/pq_cells.h"
#include "kvserver/store/query/selection.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const unsigned sizes[] = {32 << 10, 128 << 10, 1 << 20};
enum {
    N_SIZES = sizeof(sizes) / sizeof(sizes[0]),
    N_MAX = 1 << 20,
    D = 128,
    SUBSPACES = 2,
    BITS = 6,
    N_CELLS = 1 << SUBSPACES * BITS,
    HEADS_MAX = 4, /* query heads */
    N_QUERIES = 64,
    FEW = 256,
    RUN_ROWS = 4096, /* scored at once, as a node does */
    SAMPLED = 8,     /* one of so many tiles */
};

static const struct kv_pq_shape shape = {D, SUBSPACES, BITS};

enum form {
    FORM_CELLS,
    FORM_TILES,
    FORM_BYTES,
    N_FORMS,
};
static const char *const forms[N_FORMS] = {"cells", "tiles", "bytes"};

struct query {
    const struct kernels *kernels;
    enum form form;
    unsigned n_heads, n, k, chapter;
    size_t n_units, unit_bytes; /* whose codes are asked in turn */
    const uint8_t **tiles;      /* (n_units, n / KV_PQ_TILE) */
    float *centroids, *queries, *tables, *scores;
    uint32_t *counts, *chosen, *at_bound;
    uint64_t *bits, *equal;
    float *all_tables;       /* of all chapters, for bytes */
    uint8_t *rounded, *sums; /* the same, rounded; a byte a row */
    struct kvs_selector chooser;
};

static void make_tables(const struct query *query, const float *vectors)
{
    kv_pq_tables(&shape, query->centroids, vectors, query->n_heads, query->tables);
}

static void choose(struct query *query, const float *maxima, uint32_t *counts, uint32_t n_items)
{
    const struct kvs_selection choice = {.merge = KV_MERGE_SUM,
                                         .n_queries = query->n_heads,
                                         .scale = 0.08838835f,
                                         .k = query->k,
                                         .factor = 1};

    kvs_select_begin(&query->chooser, &choice, query->scores, maxima, counts, NULL, n_items,
                     false, query->scores + (size_t)n_items * query->n_heads);
    while (!kvs_select_piece(&query->chooser))
        ;
}

/* The lists of a unit's chapters, one after the other. */
static uint32_t *lists_of(const struct query *query, size_t unit, unsigned chapter)
{
    return (uint32_t *)(void *)(query->kernels->to + unit * query->unit_bytes) +
           chapter * (kv_cells_head(&shape) + query->chapter);
}

static struct kv_cells cells_of(const struct query *query, size_t unit, unsigned chapter)
{
    return kv_cells_at(&shape, lists_of(query, unit, chapter), query->chapter);
}

static void by_cells(struct query *query, size_t unit, const float *vectors)
{
    const unsigned n_chapters = query->n / query->chapter;
    struct kv_topk *selector = &query->chooser.groups[0];
    uint32_t n_items = 0, item = 0;
    size_t n = 0;

    for (unsigned i = 0; i < n_chapters; i++) {
        const struct kv_cells cells = cells_of(query, unit, i);

        n_items += kv_cells_n_full(&shape, &cells);
    }
    for (unsigned i = 0; i < n_chapters; i++) {
        const struct kv_cells cells = cells_of(query, unit, i);

        make_tables(query, vectors);
        kv_cells_score(&shape, query->tables, query->n_heads, &cells, query->scores + item,
                       n_items);
        kv_cells_counts(&shape, &cells, 0, query->chapter, query->counts + item);
        item += kv_cells_n_full(&shape, &cells);
    }
    choose(query, NULL, query->counts, n_items);
    item = 0;
    for (unsigned i = 0; i < n_chapters; i++) {
        const struct kv_cells cells = cells_of(query, unit, i);
        const uint32_t n_full = kv_cells_n_full(&shape, &cells);
        uint32_t above[N_CELLS + KV_TOPK_SPARE], equal[N_CELLS + KV_TOPK_SPARE];
        size_t n_above, n_equal;

        kv_topk_items(selector, query->chooser.weights + item, query->counts + item, n_full,
                      above, &n_above, equal, &n_equal);
        item += n_full;
        for (size_t at = 0; at < n_above; at++)
            kv_cells_mark(&cells, above[at], 0, query->chapter, (uint64_t)i * query->chapter,
                          query->bits);
        for (size_t at = 0; at < n_equal; at++)
            kv_cells_mark(&cells, equal[at], 0, query->chapter, (uint64_t)i * query->chapter,
                          query->equal);
    }
    n = kv_bits_take(query->equal, 0, query->n, selector->ties, query->at_bound);
    for (size_t i = 0; i < n; i++)
        query->bits[query->at_bound[i] / 64] |= (uint64_t)1 << query->at_bound[i] % 64;
    kv_bits_take(query->bits, 0, query->n, query->n, query->chosen);
}

static void by_tiles(struct query *query, size_t unit, const float *vectors)
{
    const uint8_t *const *tiles = query->tiles + unit * (query->n / KV_PQ_TILE);
    const unsigned at_once = query->chapter < RUN_ROWS ? query->chapter : RUN_ROWS;
    float maxima[HEADS_MAX];

    for (unsigned head = 0; head < query->n_heads; head++)
        maxima[head] = -INFINITY;
    for (size_t row = 0; row < query->n; row += at_once) {
        if (row % query->chapter == 0)
            make_tables(query, vectors);
        kv_tiles_score(&shape, query->tables, query->n_heads, tiles + row / KV_PQ_TILE, 0,
                       at_once, query->scores + row, query->n);
        for (unsigned head = 0; head < query->n_heads; head++) {
            const float most =
                kv_scores_max(query->scores + (size_t)head * query->n + row, NULL, at_once);

            maxima[head] = most > maxima[head] ? most : maxima[head];
        }
    }
    choose(query, maxima, NULL, query->n);
    kvs_select_rows(&query->chooser, query->chosen, NULL);
}

/* The k-th largest of bytes (n). */
static unsigned find_bound(const uint8_t *bytes, size_t n, size_t k)
{
    unsigned bound = 0;

    for (unsigned bit = 128; bit > 0; bit /= 2)
        if (kv_bytes_count_from(bytes, n, (uint8_t)(bound | bit)) >= k)
            bound |= bit;
    return bound;
}

/* Tables of all chapters, rounded by one base of each head and one step. */
static void round_tables(struct query *query, const float *vectors)
{
    const size_t size = kv_pq_table_size(&shape), n_chapters = query->n / query->chapter;
    const size_t rounded_size = kv_pq_table_rounded_size(&shape);
    float bases[HEADS_MAX], tops[HEADS_MAX], widest = 0;

    for (size_t i = 0; i < n_chapters; i++) {
        float *tables = query->all_tables + i * query->n_heads * size;

        kv_pq_tables(&shape, query->centroids, vectors, query->n_heads, tables);
        for (unsigned head = 0; head < query->n_heads; head++) {
            float least, most;

            kv_pq_table_range(&shape, tables + head * size, &least, &most);
            bases[head] = i == 0 || least < bases[head] ? least : bases[head];
            tops[head] = i == 0 || most > tops[head] ? most : tops[head];
        }
    }
    for (unsigned head = 0; head < query->n_heads; head++)
        widest = tops[head] - bases[head] > widest ? tops[head] - bases[head] : widest;
    for (size_t i = 0; i < n_chapters * query->n_heads; i++)
        kv_pq_table_round8_to(&shape, query->all_tables + i * size, bases[i % query->n_heads],
                              (UINT8_MAX - SUBSPACES) / widest,
                              query->rounded + i * rounded_size);
}

/* Finds each head's offset by the sums of every eighth tile. */
static void sample(struct query *query, const uint8_t *const *tiles, int16_t *ret_offsets)
{
    const size_t chapter_tiles = query->chapter / KV_PQ_TILE, n = query->n / SAMPLED;
    const size_t rounded_size = query->n_heads * kv_pq_table_rounded_size(&shape);
    unsigned bounds[HEADS_MAX], least = UINT8_MAX;
    uint8_t *to = query->sums;

    for (size_t i = 0; i < query->n / query->chapter; i++) {
        const uint8_t *sampled[N_MAX / KV_PQ_TILE / SAMPLED];
        size_t n_sampled = 0;

        for (size_t tile = 0; tile < chapter_tiles; tile += SAMPLED)
            sampled[n_sampled++] = tiles[i * chapter_tiles + tile];
        kv_tiles_scan8(&shape, query->rounded + i * rounded_size, query->n_heads, sampled,
                       n_sampled, to, n);
        to += n_sampled * KV_PQ_TILE;
    }
    for (unsigned head = 0; head < query->n_heads; head++) {
        bounds[head] = find_bound(query->sums + head * n, n, query->k / SAMPLED);
        least = bounds[head] < least ? bounds[head] : least;
    }
    for (unsigned head = 0; head < query->n_heads; head++)
        ret_offsets[head] = (int16_t)((int)least - (int)bounds[head]);
}

static void by_bytes(struct query *query, size_t unit, const float *vectors)
{
    const uint8_t *const *tiles = query->tiles + unit * (query->n / KV_PQ_TILE);
    const size_t rounded_size = query->n_heads * kv_pq_table_rounded_size(&shape);
    int16_t offsets[HEADS_MAX] = {0};
    unsigned bound;
    uint64_t ties;

    round_tables(query, vectors);
    if (query->n_heads > 1)
        sample(query, tiles, offsets);
    for (size_t row = 0; row < query->n; row += query->chapter)
        kv_tiles_scan8_max(&shape, query->rounded + row / query->chapter * rounded_size,
                           offsets, query->n_heads, tiles + row / KV_PQ_TILE,
                           query->chapter / KV_PQ_TILE, query->sums + row);
    bound = find_bound(query->sums, query->n, query->k);
    ties = query->k - (bound < UINT8_MAX
                           ? kv_bytes_count_from(query->sums, query->n, (uint8_t)(bound + 1))
                           : 0);
    kv_bytes_collect(query->sums, query->n, (uint8_t)bound, &ties, 0, query->chosen);
}

static void answer(void *arg, size_t i)
{
    static void (*const by[N_FORMS])(struct query *, size_t, const float *) = {
        [FORM_CELLS] = by_cells, [FORM_TILES] = by_tiles, [FORM_BYTES] = by_bytes};
    struct query *query = arg;

    by[query->form](query, i % query->n_units,
                    query->queries + i % N_QUERIES * (HEADS_MAX * D));
}

/* Random codes, as tiles or as lists of them. */
static bool fill(struct query *query, bool is_hot)
{
    const size_t n_tiles = query->n / KV_PQ_TILE, tile_bytes = kv_tile_bytes(&shape);
    uint8_t tile[KV_TILE_BYTES_MAX];
    const uint8_t *from = query->kernels->from;

    query->unit_bytes = query->form == FORM_CELLS
                            ? (size_t)query->n / query->chapter *
                                  (kv_cells_head(&shape) + query->chapter) * sizeof(uint32_t)
                            : n_tiles * tile_bytes;
    query->n_units = query->kernels->bytes / query->unit_bytes;
    if (query->n_units == 0)
        return true; /* little memory was asked for */
    query->n_units = is_hot ? 1 : query->n_units;
    for (size_t unit = 0; query->form == FORM_CELLS && unit < query->n_units; unit++)
        for (unsigned i = 0; i < query->n / query->chapter; i++) {
            const struct kv_cells cells = cells_of(query, unit, i);

            memset(lists_of(query, unit, i), 0, kv_cells_head(&shape) * sizeof(uint32_t));
            for (unsigned pass = 0; pass < 2; pass++) {
                for (unsigned row = 0; row < query->chapter; row += KV_PQ_TILE) {
                    memcpy(tile,
                           from + (unit * query->n + i * query->chapter + row) * 3 / 2 %
                                      (query->kernels->bytes - sizeof(tile)),
                           tile_bytes);
                    if (pass == 0)
                        kv_cells_count(&shape, tile, KV_PQ_TILE, &cells);
                    else
                        kv_cells_place(&shape, tile, KV_PQ_TILE, row, &cells);
                }
                if (pass == 0)
                    kv_cells_sum(&shape, &cells);
            }
            kv_cells_end(&shape, &cells);
        }
    if (query->form == FORM_CELLS)
        return true;
    query->tiles = kernels_alloc(query->n_units * n_tiles, sizeof(*query->tiles));
    for (size_t i = 0; query->tiles != NULL && i < query->n_units * n_tiles; i++)
        query->tiles[i] = from + i * tile_bytes;
    return query->tiles != NULL;
}

static bool measure(struct query *query, bool is_hot)
{
    bool is_good = fill(query, is_hot);

    for (unsigned few = 0; is_good && query->n_units > 0 && few < 2; few++) {
        query->k = few ? FEW : query->n / 10;
        is_good = kernels_measure(
            query->kernels, &(struct kernels_case){
                                .name = is_hot ? "kernels.query.hot" : "kernels.query.cold",
                                .unit = "us",
                                .params = {.queries = query->n_heads,
                                           .n = query->n,
                                           .k = query->k,
                                           .data = is_hot ? "hot" : "cold",
                                           .form = forms[query->form],
                                           .chapter = query->chapter},
                                .n_needs = 1,
                                .needs = {{KERNELS_READ, (double)query->n * 1.5, 0, 0}},
                                .turn = answer,
                                .arg = query,
                            });
    }
    free(query->tiles);
    query->tiles = NULL;
    return is_good;
}

static bool measure_all(struct query *query, bool is_hot)
{
    static const unsigned heads[] = {1, HEADS_MAX},
                          chapters[] = {1 << 10, 4 << 10, 16 << 10, 0};

    for (unsigned i = 0; i < 2; i++)
        for (unsigned size = 0; size < N_SIZES; size++)
            for (unsigned chapter = 0; chapter < 4; chapter++)
                for (unsigned form = 0; form < N_FORMS; form++) {
                    const bool is_whole = chapters[chapter] == 0;

                    query->n_heads = heads[i];
                    query->n = sizes[size];
                    query->form = (enum form)form;
                    query->chapter = is_whole ? query->n : chapters[chapter];
                    if (is_hot && !is_whole)
                        continue;
                    if (!measure(query, is_hot))
                        return false;
                }
    return true;
}

bool kernels_query(struct bench *bench, const struct bench_load *load)
{
    const bool is_hot = strcmp(load->name, "kernels.query.hot") == 0;
    const size_t n_items = N_MAX * (N_CELLS >> 10); /* of chapters of 1,024 rows */
    struct kernels *kernels = kernels_open(bench);
    struct query *query;
    bool is_good = false;

    if (kernels == NULL)
        return false;
    query = kernels_alloc(1, sizeof(*query));
    if (query == NULL)
        return false;
    query->kernels = kernels;
    query->centroids = kernels_alloc(kv_pq_centroids_size(&shape), sizeof(float));
    query->queries = kernels_alloc(N_QUERIES * HEADS_MAX * D, sizeof(float));
    query->tables = kernels_alloc(HEADS_MAX * kv_pq_table_size(&shape), sizeof(float));
    query->scores = kernels_alloc((HEADS_MAX + KVS_SELECT_CAPACITY) * n_items, sizeof(float));
    query->counts = kernels_alloc(n_items, sizeof(uint32_t));
    query->chosen = kernels_alloc(N_MAX + KV_TOPK_SPARE, sizeof(uint32_t));
    query->at_bound = kernels_alloc(N_MAX, sizeof(uint32_t));
    query->bits = kernels_alloc(N_MAX / 64, sizeof(uint64_t));
    query->equal = kernels_alloc(N_MAX / 64, sizeof(uint64_t));
    query->all_tables =
        kernels_alloc((N_MAX >> 10) * HEADS_MAX * kv_pq_table_size(&shape), sizeof(float));
    query->rounded =
        kernels_alloc((N_MAX >> 10) * HEADS_MAX * kv_pq_table_rounded_size(&shape), 1);
    query->sums = kernels_alloc(N_MAX, 1);
    if (query->centroids != NULL && query->queries != NULL && query->tables != NULL &&
        query->scores != NULL && query->counts != NULL && query->chosen != NULL &&
        query->at_bound != NULL && query->bits != NULL && query->equal != NULL &&
        query->all_tables != NULL && query->rounded != NULL && query->sums != NULL) {
        kernels_fill_normal(query->centroids, kv_pq_centroids_size(&shape), 13);
        kernels_fill_normal(query->queries, N_QUERIES * HEADS_MAX * D, 14);
        is_good = measure_all(query, is_hot);
    }
    free(query->centroids);
    free(query->queries);
    free(query->tables);
    free(query->scores);
    free(query->counts);
    free(query->chosen);
    free(query->at_bound);
    free(query->bits);
    free(query->equal);
    free(query->all_tables);
    free(query->rounded);
    free(query->sums);
    free(query);
    return is_good;
}
