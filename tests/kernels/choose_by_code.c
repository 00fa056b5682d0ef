/* choose_by_code KEYS QUERIES OUT D SEED ITERATIONS K M BITS ROTATES CANDIDATES RERANK: trains a codebook of
 * M subspaces as the store does, in the space of the keys or, if ROTATES is 1, of their principal
 * components, gives all keys their codes, and writes the K rows that each query's scores by code are
 * largest for.  Unless CANDIDATES is 0, they are chosen by the scores of copies of 4 bits, among
 * CANDIDATES * K rows that are chosen by code; if RERANK is above 1, by those of the keys, among
 * RERANK * K rows that are chosen so.  For compare_recall.py.
 *
 * Files are arrays without a head: keys (n, D) and queries (n_queries, D) of float, choices
 * (n_queries, K) of uint32. */
#include "kernels/key_copies.h"
#include "kernels/kmeans.h"
#include "kernels/pq_tiles.h"
#include "kernels/rotation.h"
#include "kernels/select.h"
#include "kvserver/base/random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
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
    uint8_t *codes = get(book->shape.m * n_sample, 1);

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
    uint8_t *tiles = get(n_tiles, bytes), codes[KV_PQ_SUBSPACES_MAX * KV_PQ_TILE];

    for (size_t row = 0; row < n; row += KV_PQ_TILE) {
        const size_t n_rows = n - row < KV_PQ_TILE ? n - row : KV_PQ_TILE;

        kv_kmeans_encode(&book->shape, &book->means, keys + row * book->shape.d, n_rows, codes,
                         KV_PQ_TILE);
        kv_tile_put(&book->shape, tiles + row / KV_PQ_TILE * bytes, 0, n_rows, codes,
                    KV_PQ_TILE);
    }
    return tiles;
}

/* Rotates rows (n, d) in place. */
static void rotate(const float *matrix, uint32_t d, float *rows, size_t n)
{
    float *row = get(d, sizeof(float));

    for (size_t i = 0; i < n; i++) {
        kv_rotate(d, matrix, rows + i * d, 1, row);
        memcpy(rows + i * d, row, d * sizeof(float));
    }
    free(row);
}

/* Returns the axes of a sample's principal components, dealt to m subspaces. */
static float *principal_axes(const struct kv_pq_shape *shape, const float *sample, size_t n)
{
    float *matrix = get(kv_rotation_size(shape->d), sizeof(float));
    void *work = get(kv_rotation_work_bytes(shape->d), 1);

    kv_rotation_add(shape->d, work, sample, n);
    while (!kv_rotation_diagonalize(shape->d, work, 4096))
        ;
    kv_rotation_deal(shape->d, shape->m, work, matrix);
    free(work);
    return matrix;
}

/* Copies of 4 bits, of the differences to the mean key. */
struct copies {
    float *mean;
    uint8_t *blocks;
    size_t block_bytes;
    void *rounded;
    const void **blocks_of;
    uint8_t *rows_of;
};

static struct copies copy_keys(uint32_t d, const float *keys, size_t n, size_t n_candidates)
{
    struct copies copies = {
        .mean = get(d, sizeof(float)),
        .blocks = get((n + KV_PQ_TILE - 1) / KV_PQ_TILE, kv_key_copies_bytes(d)),
        .block_bytes = kv_key_copies_bytes(d),
        .rounded = get(1, kv_key_copies_query_bytes(d, 1)),
        .blocks_of = get(n_candidates, sizeof(void *)),
        .rows_of = get(n_candidates, 1),
    };

    for (uint32_t i = 0; i < d; i++) {
        double sum = 0;

        for (size_t row = 0; row < n; row++)
            sum += keys[row * d + i];
        copies.mean[i] = (float)(sum / (double)n);
    }
    for (size_t row = 0; row < n; row += KV_PQ_TILE)
        kv_key_copies_put(d, copies.mean, keys + row * d, 0,
                          n - row < KV_PQ_TILE ? n - row : KV_PQ_TILE,
                          copies.blocks + row / KV_PQ_TILE * copies.block_bytes);
    return copies;
}

/* Leaves the k of the n chosen rows whose scores are largest, ascending. */
static void keep_best(uint32_t *chosen, size_t n, size_t k, float *scores, uint32_t *places)
{
    kv_topk_select(scores, n, k, places, scores + n);
    for (size_t i = 0; i < k; i++)
        chosen[i] = chosen[places[i]];
}

/* Leaves the k of the n chosen rows whose copies score highest for the query, ascending. */
static void cut(const struct copies *copies,
                uint32_t d,
                const float *query,
                uint32_t *chosen,
                size_t n,
                size_t k,
                float *scores,
                uint32_t *places)
{
    for (size_t i = 0; i < n; i++) {
        copies->blocks_of[i] = copies->blocks + chosen[i] / KV_PQ_TILE * copies->block_bytes;
        copies->rows_of[i] = (uint8_t)(chosen[i] % KV_PQ_TILE);
    }
    kv_key_copies_round(d, copies->mean, query, 1, copies->rounded);
    kv_key_copies_score_list(d, copies->blocks_of, copies->rows_of, n, copies->rounded, 1,
                             scores, n);
    keep_best(chosen, n, k, scores, places);
}

/* The same by their keys' scores. */
static void rerank(const float *keys,
                   size_t d,
                   const float *query,
                   uint32_t *chosen,
                   size_t n,
                   size_t k,
                   float *scores,
                   uint32_t *places)
{
    for (size_t i = 0; i < n; i++) {
        double sum = 0;

        for (size_t j = 0; j < d; j++)
            sum += (double)keys[chosen[i] * d + j] * (double)query[j];
        scores[i] = (float)sum;
    }
    keep_best(chosen, n, k, scores, places);
}

static void choose(const struct book *book,
                   const uint8_t *tiles,
                   size_t n,
                   const float *query,
                   size_t k,
                   float *scores,
                   uint32_t *ret_chosen)
{
    float table[KV_PQ_SUBSPACES_MAX << KV_PQ_BITS_MAX];

    kv_pq_tables(&book->shape, book->means.centroids, query, 1, table);
    for (size_t row = 0; row < n; row += KV_PQ_TILE)
        kv_tile_score(&book->shape, table, 1,
                      tiles + row / KV_PQ_TILE * kv_tile_bytes(&book->shape), 0,
                      n - row < KV_PQ_TILE ? n - row : KV_PQ_TILE, scores + row, n);
    kv_topk_select(scores, n, k, ret_chosen, scores + n);
}

int main(int argc, char **argv)
{
    struct book book;
    struct copies copies = {.mean = NULL};
    struct kv_random random;
    size_t n, n_queries, n_sample;

    if (argc != 13) {
        fprintf(stderr,
                "usage: choose_by_code KEYS QUERIES OUT D SEED ITERATIONS K M BITS ROTATES "
                "CANDIDATES RERANK\n");
        return 2;
    }
    const size_t d = strtoull(argv[4], NULL, 10), k = strtoull(argv[7], NULL, 10);
    const bool rotates = strcmp(argv[10], "1") == 0;
    const size_t candidates = strtoull(argv[11], NULL, 10),
                 n_reranked = strtoull(argv[12], NULL, 10);

    book.shape = (struct kv_pq_shape){(uint32_t)d, (uint32_t)strtoul(argv[8], NULL, 10),
                                      (uint32_t)strtoul(argv[9], NULL, 10)};
    if (!kv_pq_shape_valid(&book.shape) || d != book.shape.d)
        fail("D", argv[4]);
    float *keys = read_rows(argv[1], d, &n), *queries = read_rows(argv[2], d, &n_queries);
    if (k == 0 || k > n)
        fail("K", argv[7]);
    if (n_reranked == 0)
        fail("RERANK", argv[12]);
    const size_t n_left = n_reranked < n / k ? n_reranked * k : n,
                 n_candidates = candidates == 0      ? n_left
                                : candidates < n / k ? candidates * k
                                                     : n;
    /* Copies are of the keys as they are. */
    if (candidates > 0)
        copies = copy_keys((uint32_t)d, keys, n, n_candidates);
    if (n_left > n_candidates)
        fail("RERANK: more than CANDIDATES", argv[12]);
    float *asked = get(n_queries * d, sizeof(float)), *as_they_are = get(n * d, sizeof(float));
    memcpy(asked, queries, n_queries * d * sizeof(float));
    memcpy(as_they_are, keys, n * d * sizeof(float));
    book.means.centroids = get(kv_pq_centroids_size(&book.shape), sizeof(float));
    book.means.half_sq_norms = get(kv_pq_table_size(&book.shape), sizeof(float));

    const size_t stride = (n + SAMPLE_MAX - 1) / SAMPLE_MAX;
    n_sample = (n + stride - 1) / stride;
    float *sample = get(n_sample * d, sizeof(float));
    for (size_t i = 0; i < n_sample; i++)
        memcpy(sample + i * d, keys + i * stride * d, d * sizeof(float));
    if (rotates) {
        float *axes = principal_axes(&book.shape, sample, n_sample);

        rotate(axes, (uint32_t)d, sample, n_sample);
        rotate(axes, (uint32_t)d, keys, n);
        rotate(axes, (uint32_t)d, queries, n_queries);
        free(axes);
    }
    kv_random_init(&random, strtoull(argv[5], NULL, 10));
    seed_book(&book, sample, n_sample, &random);
    train(&book, sample, n_sample, (unsigned)strtoul(argv[6], NULL, 10));

    uint8_t *tiles = encode(&book, keys, n);
    float *scores = get(2 * n, sizeof(float));
    uint32_t *chosen = get(n_candidates + KV_TOPK_SPARE, sizeof(uint32_t));
    uint32_t *places = get(n_left + KV_TOPK_SPARE, sizeof(uint32_t));
    FILE *out = fopen(argv[3], "wb");
    if (out == NULL)
        fail("cannot write", argv[3]);
    for (size_t i = 0; i < n_queries; i++) {
        choose(&book, tiles, n, queries + i * d, n_candidates, scores, chosen);
        if (candidates > 0)
            cut(&copies, (uint32_t)d, asked + i * d, chosen, n_candidates, n_left, scores,
                places);
        if (n_reranked > 1)
            rerank(as_they_are, d, asked + i * d, chosen, n_left, k, scores, places);
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
    free(places);
    free(asked);
    free(as_they_are);
    free(copies.mean);
    free(copies.blocks);
    free(copies.rounded);
    free(copies.blocks_of);
    free(copies.rows_of);
    return 0;
}
