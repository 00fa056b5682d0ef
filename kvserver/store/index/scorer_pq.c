/* scorer_pq.c - product quantization (PQCache): centroids in subspaces of the keys, and tables
 * of their inner products with a query.  Items are cells (kernels/pq_cells.h). */
#include "kvserver/store/index/scorer_pq.h"

enum {
    PREFETCH_ITEMS = 8, /* lists that are asked for ahead */
};

static size_t codebook_bytes(const struct kv_pq_shape *shape)
{
    return (kv_pq_centroids_size(shape) + kv_pq_table_size(shape)) * sizeof(float);
}

/* ---- codes ------------------------------------------------------------------------------- */

static void encode(const struct kvs_codebook *book,
                   const float *keys,
                   uint32_t begin,
                   uint32_t n,
                   uint8_t *codes)
{
    const struct kv_kmeans_codebook kmeans = kvs_pq_kmeans(book);
    uint8_t unpacked[KV_TILE_BYTES_MAX];
    float rotated[KVS_CODEBOOK_KEYS];

    kv_kmeans_encode(&book->shape, &kmeans, kvs_pq_rotate(book, keys, n, rotated), n, unpacked,
                     KV_PQ_TILE);
    kv_tile_put(&book->shape, codes, begin, n, unpacked, KV_PQ_TILE);
}

/* ---- scores ------------------------------------------------------------------------------ */

static void make_tables(const struct kvs_codebook *book,
                        const float *queries,
                        uint32_t n_queries,
                        float *ret_tables)
{
    kv_pq_tables(&book->shape, kvs_codebook_centroids(book), queries, n_queries, ret_tables);
}

static void score_rows(const struct kvs_codebook *book,
                       const float *tables,
                       uint32_t n_queries,
                       const uint8_t *const *codes,
                       uint32_t begin,
                       uint32_t n,
                       float *ret_scores,
                       size_t scores_stride)
{
    kv_tiles_score(&book->shape, tables, n_queries, codes, begin, n, ret_scores, scores_stride);
}

static void table_range(const struct kvs_codebook *book,
                        const float *table,
                        float *ret_least,
                        float *ret_most)
{
    kv_pq_table_range(&book->shape, table, ret_least, ret_most);
}

static void round_table(const struct kvs_codebook *book,
                        const float *table,
                        float base,
                        float inv_step,
                        uint8_t *ret_rounded)
{
    kv_pq_table_round8_to(&book->shape, table, base, inv_step, ret_rounded);
}

static void sum_rows(const struct kvs_codebook *book,
                     const uint8_t *rounded,
                     const uint8_t *const *codes,
                     uint32_t n,
                     uint8_t *ret_sums)
{
    kv_tiles_scan8(&book->shape, rounded, 1, codes, n, ret_sums, (size_t)n * KV_PQ_TILE);
}

static void most_rows(const struct kvs_codebook *book,
                      const uint8_t *rounded,
                      const int16_t *offsets,
                      uint32_t n_queries,
                      const uint8_t *const *codes,
                      uint32_t n,
                      uint8_t *ret_most)
{
    kv_tiles_scan8_max(&book->shape, rounded, offsets, n_queries, codes, n, ret_most);
}

/* ---- items ------------------------------------------------------------------------------- */

/* With random codes, which fill most cells, 4,096 cells took 1.0 to 1.2 times as long as
 * chapters of 4,096 rows, and 0.4 times as long as those of 16,384 (four vectors, 128K rows,
 * AVX2: kv_bench kernels query.cold); those of real keys leave most cells empty. */
static uint32_t items_pay(const struct kv_pq_shape *shape)
{
    return kv_cells_n(shape) + kv_cells_n(shape) / 4;
}

static size_t lists_bytes(const struct kv_pq_shape *shape, uint32_t n_rows)
{
    return (kv_cells_head(shape) + n_rows) * sizeof(uint32_t);
}

/* The first pass counts the rows of each cell, the second one places them. */
static void lists_add(const struct kvs_item_lists *lists, const uint8_t *codes, uint32_t row)
{
    const struct kv_cells cells = kv_cells_at(lists->shape, lists->memory, lists->n_rows);

    if (lists->pass == 0)
        kv_cells_count(lists->shape, codes, KV_PQ_TILE, &cells);
    else
        kv_cells_place(lists->shape, codes, KV_PQ_TILE, row, &cells);
}

static bool lists_pass_end(struct kvs_item_lists *lists)
{
    const struct kv_cells cells = kv_cells_at(lists->shape, lists->memory, lists->n_rows);

    if (lists->pass > 0) {
        kv_cells_end(lists->shape, &cells);
        return false;
    }
    kv_cells_sum(lists->shape, &cells);
    lists->pass = 1;
    return true;
}

static uint32_t n_items(const struct kvs_codebook *book)
{
    const struct kv_cells cells = kvs_codebook_cells(book);

    return kv_cells_n_full(&book->shape, &cells);
}

static void score_items(const struct kvs_codebook *book,
                        const float *tables,
                        uint32_t n_queries,
                        float *ret_scores,
                        size_t scores_stride)
{
    const struct kv_cells cells = kvs_codebook_cells(book);

    kv_cells_score(&book->shape, tables, n_queries, &cells, ret_scores, scores_stride);
}

static void
count_items(const struct kvs_codebook *book, uint32_t begin, uint32_t end, uint32_t *ret_counts)
{
    const struct kv_cells cells = kvs_codebook_cells(book);

    kv_cells_counts(&book->shape, &cells, begin, end, ret_counts);
}

static void subtract_counts(const struct kvs_codebook *book,
                            const uint8_t *codes,
                            uint32_t begin,
                            uint32_t n,
                            uint32_t *counts)
{
    const struct kv_cells cells = kvs_codebook_cells(book);
    uint16_t numbers[KV_PQ_TILE];

    kv_tile_cells(&book->shape, codes, begin, n, numbers);
    for (uint32_t i = 0; i < n; i++)
        counts[kv_cells_item(&cells, numbers[i])]--;
}

static void mark_items(const struct kvs_codebook *book,
                       const uint32_t *items,
                       size_t n,
                       uint32_t begin,
                       uint32_t end,
                       uint64_t *bits)
{
    const struct kv_cells cells = kvs_codebook_cells(book);

    for (size_t i = 0; i < n; i++) {
        if (i + PREFETCH_ITEMS < n)
            __builtin_prefetch(cells.rows + cells.offsets[items[i + PREFETCH_ITEMS]]);
        kv_cells_mark(&cells, items[i], begin, end, 0, bits);
    }
}

static void row_items(const struct kvs_codebook *book,
                      const uint8_t *codes,
                      const uint32_t *tokens,
                      uint32_t n,
                      uint32_t *ret_items)
{
    const struct kv_cells cells = kvs_codebook_cells(book);
    uint16_t cell;

    for (uint32_t i = 0; i < n; i++) {
        kv_tile_cells(&book->shape, codes, tokens[i] % KV_BLOCK_TOKENS, 1, &cell);
        ret_items[i] = kv_cells_item(&cells, cell);
    }
}

static uint32_t key_item(const struct kvs_codebook *book, const float *key)
{
    const struct kv_kmeans_codebook kmeans = kvs_pq_kmeans(book);
    const struct kv_cells cells = kvs_codebook_cells(book);
    uint8_t codes[KV_PQ_SUBSPACES_MAX];
    float rotated[KVS_CODEBOOK_DIM_MAX];
    uint32_t cell = 0;

    kv_kmeans_encode(&book->shape, &kmeans, kvs_pq_rotate(book, key, 1, rotated), 1, codes, 1);
    for (uint32_t j = 0; j < book->shape.m; j++)
        cell = cell << book->shape.bits | codes[j];
    return kv_cells_item(&cells, cell);
}

const struct kvs_scorer_ops kvs_scorer_pq = {
    .name = "pq",
    .codebook_bytes = codebook_bytes,
    .codes_bytes = kv_tile_bytes,
    .training_bytes = kvs_pq_training_bytes,
    .n_rows_least = kvs_pq_n_rows_least,
    .rows_at_once = kvs_pq_rows_at_once,
    .train_begin = kvs_pq_train_begin,
    .train_piece = kvs_pq_train_piece,
    .encode = encode,
    .make_tables = make_tables,
    .score_rows = score_rows,
    .table_range = table_range,
    .round_table = round_table,
    .sum_rows = sum_rows,
    .most_rows = most_rows,
    .items_pay = items_pay,
    .lists_bytes = lists_bytes,
    .lists_add = lists_add,
    .lists_pass_end = lists_pass_end,
    .n_items = n_items,
    .score_items = score_items,
    .count_items = count_items,
    .subtract_counts = subtract_counts,
    .mark_items = mark_items,
    .row_items = row_items,
    .key_item = key_item,
};
