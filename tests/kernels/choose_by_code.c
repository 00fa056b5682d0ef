/* choose_by_code KEYS QUERIES OUT D SEED ITERATIONS K: trains a codebook of m = 2, b = 6 as the
 * store does, gives all keys their codes, and writes the K rows that each query's scores by
 * code are largest for.  For compare_recall.py.
 *
 * Files are arrays without a head: keys (n, D) and queries (n_queries, D) of float, choices
 * (n_queries, K) of uint32. */
#include "kernels/kmeans.h"
#include "kernels/pq_tiles.h"
#include "kernels/select.h"
#include "kvserver/base/random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUBSPACES = 2,
    BITS = 6,
    SAMPLE_MAX = 16384, /* keys that k-means looks at */
};
static const double tolerance = 1e-5; /* of all squares; what centroids move below ends it */

struct book {
    struct kv_pq_shape shape;
    struct kv_kmeans_codebook means;
};

__attribute__((noreturn)) static void fail(const char *what, const char *where)
{
    fprintf(stderr, "choose_by_code: %s: %s\n", what, where);
    exit(1);
}

static void *get(size_t n, size_t bytes)
{
    void *memory = calloc(n > 0 ? n : 1, bytes);

    if (memory == NULL)
        fail("memory", "none left");
    return memory;
}

static float *read_rows(const char *path, size_t d, size_t *ret_n)
{
    FILE *file = fopen(path, "rb");
    float *rows;
    long bytes;

    if (file == NULL || fseek(file, 0, SEEK_END) != 0 || (bytes = ftell(file)) < 0)
        fail("cannot read", path);
    *ret_n = (size_t)bytes / (d * sizeof(float));
    rows = get(*ret_n * d, sizeof(float));
    rewind(file);
    if (fread(rows, d * sizeof(float), *ret_n, file) != *ret_n)
        fail("cannot read", path);
    fclose(file);
    return rows;
}

/* The first centroids: different keys of the sample, each as likely as any. */
static void
seed_book(struct book *book, const float *sample, size_t n_sample, struct kv_random *random)
{
    const uint32_t n_centroids = (uint32_t)kv_pq_n_centroids(&book->shape);

    if (n_sample < n_centroids)
        fail("keys", "fewer than centroids");
    for (uint32_t i = 0, n = 0; n < n_centroids; i++)
        if (kv_random_below(random, n_sample - i) < n_centroids - n)
            kv_kmeans_set_centroid(&book->shape, &book->means, n++,
                                   sample + (size_t)i * book->shape.d);
    kv_kmeans_half_sq_norms(&book->shape, &book->means);
}

static void train(struct book *book, const float *sample, size_t n_sample, unsigned iterations)
{
    const size_t n_table = kv_pq_table_size(&book->shape);
    const struct kv_kmeans_sums sums = {
        .sums = get(kv_pq_centroids_size(&book->shape), sizeof(float)),
        .counts = get(n_table, sizeof(uint32_t)),
    };
    uint8_t *codes = get(SUBSPACES * n_sample, 1);

    for (unsigned i = 0; i < iterations; i++) {
        double moved, squares = 0;

        kv_kmeans_step(&book->shape, &book->means, sample, n_sample, codes, n_sample, &sums);
        moved = kv_kmeans_update(&book->shape, &book->means, &sums);
        for (size_t j = 0; j < n_table; j++)
            squares += 2.0 * book->means.half_sq_norms[j];
        if (!(moved > tolerance * squares))
            break;
    }
    free(sums.sums);
    free(sums.counts);
    free(codes);
}

/* Tile after tile. */
static uint8_t *encode(const struct book *book, const float *keys, size_t n)
{
    const size_t n_tiles = (n + KV_PQ_TILE - 1) / KV_PQ_TILE,
                 bytes = kv_tile_bytes(&book->shape);
    uint8_t *tiles = get(n_tiles, bytes), codes[SUBSPACES * KV_PQ_TILE];

    for (size_t row = 0; row < n; row += KV_PQ_TILE) {
        const size_t n_rows = n - row < KV_PQ_TILE ? n - row : KV_PQ_TILE;

        kv_kmeans_encode(&book->shape, &book->means, keys + row * book->shape.d, n_rows, codes,
                         KV_PQ_TILE);
        kv_tile_put(&book->shape, tiles + row / KV_PQ_TILE * bytes, 0, n_rows, codes,
                    KV_PQ_TILE);
    }
    return tiles;
}

static void choose(const struct book *book,
                   const uint8_t *tiles,
                   size_t n,
                   const float *query,
                   size_t k,
                   float *scores,
                   uint32_t *ret_chosen)
{
    float table[SUBSPACES << BITS];

    kv_pq_tables(&book->shape, book->means.centroids, query, 1, table);
    for (size_t row = 0; row < n; row += KV_PQ_TILE)
        kv_tile_score(&book->shape, table, 1,
                      tiles + row / KV_PQ_TILE * kv_tile_bytes(&book->shape), 0,
                      n - row < KV_PQ_TILE ? n - row : KV_PQ_TILE, scores + row, n);
    kv_topk_select(scores, n, k, ret_chosen, scores + n);
}

int main(int argc, char **argv)
{
    struct book book = {.shape = {0, SUBSPACES, BITS}};
    struct kv_random random;
    size_t n, n_queries, n_sample;

    if (argc != 8) {
        fprintf(stderr, "usage: choose_by_code KEYS QUERIES OUT D SEED ITERATIONS K\n");
        return 2;
    }
    const size_t d = strtoull(argv[4], NULL, 10), k = strtoull(argv[7], NULL, 10);
    book.shape.d = (uint32_t)d;
    if (!kv_pq_shape_valid(&book.shape) || d != book.shape.d)
        fail("D", argv[4]);
    float *keys = read_rows(argv[1], d, &n), *queries = read_rows(argv[2], d, &n_queries);
    if (k == 0 || k > n)
        fail("K", argv[7]);
    book.means.centroids = get(kv_pq_centroids_size(&book.shape), sizeof(float));
    book.means.half_sq_norms = get(kv_pq_table_size(&book.shape), sizeof(float));

    const size_t stride = (n + SAMPLE_MAX - 1) / SAMPLE_MAX;
    n_sample = (n + stride - 1) / stride;
    float *sample = get(n_sample * d, sizeof(float));
    for (size_t i = 0; i < n_sample; i++)
        memcpy(sample + i * d, keys + i * stride * d, d * sizeof(float));
    kv_random_init(&random, strtoull(argv[5], NULL, 10));
    seed_book(&book, sample, n_sample, &random);
    train(&book, sample, n_sample, (unsigned)strtoul(argv[6], NULL, 10));

    uint8_t *tiles = encode(&book, keys, n);
    float *scores = get(2 * n, sizeof(float));
    uint32_t *chosen = get(k + KV_TOPK_SPARE, sizeof(uint32_t));
    FILE *out = fopen(argv[3], "wb");
    if (out == NULL)
        fail("cannot write", argv[3]);
    for (size_t i = 0; i < n_queries; i++) {
        choose(&book, tiles, n, queries + i * d, k, scores, chosen);
        if (fwrite(chosen, sizeof(*chosen), k, out) != k)
            fail("cannot write", argv[3]);
    }
    if (fclose(out) != 0)
        fail("cannot write", argv[3]);
    free(keys);
    free(queries);
    free(book.means.centroids);
    free(book.means.half_sq_norms);
    free(sample);
    free(tiles);
    free(scores);
    free(chosen);
    return 0;
}
