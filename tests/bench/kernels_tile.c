/* Scans of packed codes: all scores of a head, in fp32 and rounded, for one query and for the
 * query heads of a kv head together; of the rounded ones also the largest over the query
 * heads. */
#include "tests/bench/kernels.h"

#include "kernels/pq_tiles.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEAD_ROWS = 32 << 10,
    HEAD_TILES = HEAD_ROWS / KV_PQ_TILE,
    QUERIES_MAX = 4,
};

static const struct kv_pq_shape shapes[] = {
    {128, 2, 6}, {64, 2, 6}, {128, 4, 6}, {128, 4, 8}, {128, 2, 8}, {128, 8, 4}, {128, 16, 4},
};

enum form {
    FORM_FLOAT,
    FORM_8,
    FORM_8_MAX,
    N_FORMS,
};
static const char *const names[N_FORMS] = {"kernels.tile.score", "kernels.tile.scan8",
                                           "kernels.tile.scan8max"};

struct scan {
    const struct kernels *kernels;
    struct kv_pq_shape shape;
    enum form form;
    unsigned n_queries;
    size_t n_heads; /* that the memory has */
    const uint8_t **tiles;
    float *tables, *scores;
    uint8_t *rounded, *sums;
};

static void scan_head(void *arg, size_t i)
{
    struct scan *scan = arg;
    const uint8_t *const *tiles = scan->tiles + i % scan->n_heads * HEAD_TILES;

    switch (scan->form) {
    case FORM_8:
        kv_tiles_scan8(&scan->shape, scan->rounded, scan->n_queries, tiles, HEAD_TILES,
                       scan->sums, HEAD_ROWS);
        break;
    case FORM_8_MAX:
        kv_tiles_scan8_max(&scan->shape, scan->rounded, (const int16_t[]){-40, 0, -20, -3},
                           scan->n_queries, tiles, HEAD_TILES, scan->sums);
        break;
    default:
        kv_tiles_score(&scan->shape, scan->tables, scan->n_queries, tiles, 0, HEAD_ROWS,
                       scan->scores, HEAD_ROWS);
    }
}

/* By one step for all queries, as a node rounds them. */
static void round_tables(struct scan *scan)
{
    const size_t size = kv_pq_table_size(&scan->shape);
    float bases[QUERIES_MAX], widest = 0;

    for (size_t query = 0; query < QUERIES_MAX; query++) {
        float most;

        kv_pq_table_range(&scan->shape, scan->tables + query * size, &bases[query], &most);
        widest = most - bases[query] > widest ? most - bases[query] : widest;
    }
    for (size_t query = 0; query < QUERIES_MAX; query++)
        kv_pq_table_round8_to(&scan->shape, scan->tables + query * size, bases[query],
                              (float)(UINT8_MAX - scan->shape.m) / widest,
                              scan->rounded + query * kv_pq_table_rounded_size(&scan->shape));
}

static bool measure_shape(struct scan *scan)
{
    static char text[64];
    const size_t bytes = kv_tile_bytes(&scan->shape);
    const size_t n_tiles = scan->kernels->bytes / bytes / HEAD_TILES * HEAD_TILES;

    scan->n_heads = n_tiles / HEAD_TILES;
    if (scan->n_heads == 0)
        return true; /* little memory was asked for */
    scan->tiles = kernels_alloc(n_tiles, sizeof(*scan->tiles));
    if (scan->tiles == NULL)
        return false;
    for (size_t i = 0; i < n_tiles; i++)
        scan->tiles[i] = scan->kernels->to + i * bytes;
    round_tables(scan);
    (void)snprintf(text, sizeof(text), "d=%u m=%u b=%u", scan->shape.d, scan->shape.m,
                   scan->shape.bits);
    for (scan->n_queries = 1; scan->n_queries <= QUERIES_MAX;
         scan->n_queries = scan->n_queries == 1 ? 3 : scan->n_queries + 1)
        for (unsigned form = 0; form < N_FORMS; form++) {
            scan->form = (enum form)form;
            if (!kernels_measure(
                    scan->kernels,
                    &(struct kernels_case){
                        .name = names[form],
                        .unit = "Gpair/s",
                        .amount = 1e-9 * HEAD_ROWS * scan->n_queries,
                        .params = {.shape = text,
                                   .queries = scan->n_queries,
                                   .n = HEAD_ROWS,
                                   .data = "cold"},
                        .n_needs = 1,
                        .needs = {{KERNELS_READ, (double)(HEAD_TILES * bytes), 0, 0}},
                        .turn = scan_head,
                        .arg = scan,
                    })) {
                free(scan->tiles);
                return false;
            }
        }
    free(scan->tiles);
    return true;
}

bool kernels_tile(struct bench *bench, const struct bench_load *load)
{
    const size_t n_table = QUERIES_MAX * (KV_PQ_SUBSPACES_MAX << KV_PQ_BITS_MAX);
    struct kernels *kernels = kernels_open(bench);
    struct scan scan = {.kernels = kernels};
    bool is_good;

    (void)load;
    if (kernels == NULL)
        return false;
    scan.tables = kernels_alloc(n_table, sizeof(float));
    scan.rounded = kernels_alloc(n_table, 1);
    scan.scores = kernels_alloc(QUERIES_MAX * HEAD_ROWS, sizeof(float));
    scan.sums = kernels_alloc(QUERIES_MAX * HEAD_ROWS, 1);
    is_good =
        scan.tables != NULL && scan.rounded != NULL && scan.scores != NULL && scan.sums != NULL;
    if (is_good)
        kernels_fill_normal(scan.tables, n_table, 11);
    for (unsigned i = 0; is_good && i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        scan.shape = shapes[i];
        /* Any bytes are codes, where a code of fewer bits is cut out of them. */
        memcpy(kernels->to, kernels->from, kernels->bytes);
        is_good = measure_shape(&scan);
    }
    free(scan.tables);
    free(scan.rounded);
    free(scan.scores);
    free(scan.sums);
    return is_good;
}
