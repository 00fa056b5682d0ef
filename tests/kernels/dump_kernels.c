/* dump_kernels FOLDER SEED - seeded inputs of the kernels and what every implementation makes
 * of them, one array a file, for check_kernels.py.
 *
 * Standard output has a line for each array: its file, its element type as NumPy names it, its
 * shape.  An input is `CASE.NAME`, a result `CASE.NAME.IMPLEMENTATION`.
 */
#include "keys.h"
#include "pq.h"
#include "random.h"
#include "select.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *folder;
static struct kv_random dice;

__attribute__((noreturn)) static void fail(const char *what, const char *where)
{
    fprintf(stderr, "dump_kernels: %s: %s\n", what, where);
    exit(1);
}

static void *get(size_t n, size_t bytes)
{
    void *memory = calloc(n > 0 ? n : 1, bytes);

    if (memory == NULL)
        fail("memory", "none left");
    return memory;
}

/* `shape` is a list of numbers, blanks between them. */
__attribute__((format(printf, 6, 7))) static void put(const char *type,
                                                      const char *shape,
                                                      const void *data,
                                                      size_t n,
                                                      size_t bytes,
                                                      const char *format,
                                                      ...)
{
    char name[128], path[4096];
    va_list arguments;
    FILE *file;

    va_start(arguments, format);
    vsnprintf(name, sizeof(name), format, arguments);
    va_end(arguments);
    if (snprintf(path, sizeof(path), "%s/%s", folder, name) >= (int)sizeof(path))
        fail("path too long", folder);
    file = fopen(path, "wb");
    if (file == NULL || fwrite(data, bytes, n, file) != n || fclose(file) != 0)
        fail("cannot write", path);
    printf("%s %s %s\n", name, type, shape);
}

static const char *shape_of(size_t a, size_t b, size_t c)
{
    static char text[96];
    int length = snprintf(text, sizeof(text), "%zu", a);

    if (b != 0)
        length += snprintf(text + length, sizeof(text) - (size_t)length, " %zu", b);
    if (c != 0)
        snprintf(text + length, sizeof(text) - (size_t)length, " %zu", c);
    return text;
}

/* About normal. */
static float some(void)
{
    double sum = -6;

    for (int i = 0; i < 12; i++)
        sum += (double)(kv_random_next(&dice) >> 11) * 0x1p-53;
    return (float)sum;
}

static float *some_floats(size_t n)
{
    float *values = get(n, sizeof(*values));

    for (size_t i = 0; i < n; i++)
        values[i] = some();
    return values;
}

static void dump_pq(unsigned index, const struct kv_pq_shape *shape, size_t n, size_t n_queries)
{
    const size_t size = kv_pq_centroids_size(shape), n_table = kv_pq_table_size(shape);
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;
    float *centroids = some_floats(size), *keys = some_floats(n * shape->d);
    float *queries = some_floats(n_queries * shape->d), *half_squares = get(n_table, 4);
    const struct kv_pq_kernels *kernels;

    kv_pq_half_squares(shape, centroids, half_squares);
    put("<f4", shape_of(shape->m, width, n_centroids), centroids, size, 4, "pq%u.centroids",
        index);
    put("<f4", shape_of(shape->m, n_centroids, 0), half_squares, n_table, 4,
        "pq%u.half_squares", index);
    put("<f4", shape_of(n, shape->d, 0), keys, n * shape->d, 4, "pq%u.keys", index);
    put("<f4", shape_of(n_queries, shape->d, 0), queries, n_queries * shape->d, 4,
        "pq%u.queries", index);
    for (unsigned i = 0; (kernels = kv_pq_kernels_at(i)) != NULL; i++) {
        uint8_t *codes = get(shape->m * n, 1), tile[KV_PQ_SUBSPACES_MAX * KV_PQ_TILE];
        float *sums = get(size, 4), *tables = get(n_queries * n_table, 4);
        float *scores = get(n_queries * n, 4), *updated = get(size, 4);
        uint32_t *counts = get(n_table, 4);
        double moved;

        kernels->encode(shape, centroids, half_squares, keys, n, codes, n);
        kernels->accumulate(shape, keys, n, codes, n, sums, counts);
        memcpy(updated, centroids, size * 4);
        moved = kv_pq_update(shape, sums, counts, updated);
        for (size_t query = 0; query < n_queries; query++)
            kernels->table(shape, centroids, queries + query * shape->d,
                           tables + query * n_table);
        for (size_t row = 0; row < n; row += KV_PQ_TILE) {
            const size_t n_rows = n - row < KV_PQ_TILE ? n - row : KV_PQ_TILE;

            for (size_t j = 0; j < shape->m; j++)
                memcpy(tile + j * KV_PQ_TILE, codes + j * n + row, n_rows);
            kernels->score(shape, tables, n_queries, tile, n_rows, scores + row, n);
        }
        put("<u1", shape_of(shape->m, n, 0), codes, shape->m * n, 1, "pq%u.codes.%s", index,
            kernels->name);
        put("<u4", shape_of(shape->m, n_centroids, 0), counts, n_table, 4, "pq%u.counts.%s",
            index, kernels->name);
        put("<f4", shape_of(shape->m, width, n_centroids), updated, size, 4, "pq%u.updated.%s",
            index, kernels->name);
        put("<f8", "1", &moved, 1, 8, "pq%u.moved.%s", index, kernels->name);
        put("<f4", shape_of(n_queries, n, 0), scores, n_queries * n, 4, "pq%u.scores.%s", index,
            kernels->name);
        free(codes);
        free(sums);
        free(tables);
        free(scores);
        free(updated);
        free(counts);
    }
    free(centroids);
    free(keys);
    free(queries);
    free(half_squares);
}

/* Numbers of 16 bits are random bits but for the highest of the exponent, so that they are
 * below 2 in both types.  bf16 goes out as plain numbers. */
static void dump_keys(enum kv_key_type type, size_t n, size_t d, size_t n_queries)
{
    static const char *const names[] = {"", "fp32", "fp16", "bf16"};
    static const char *const types[] = {"", "<f4", "<f2", "<u2"};
    const size_t bytes = type == KV_KEY_FP32 ? 4 : 2;
    const char *name = names[type];
    float *wide = some_floats(n * d), *queries = some_floats(n_queries * d);
    uint16_t *halves = get(n * d, sizeof(*halves));
    const void *keys = type == KV_KEY_FP32 ? (const void *)wide : halves;
    const void **list = get(n, sizeof(*list));
    const struct kv_keys_kernels *kernels;

    for (size_t i = 0; i < n * d; i++)
        halves[i] = (uint16_t)(kv_random_next(&dice) & 0xbfff);
    for (size_t i = 0; i < n; i++)
        list[i] = (const uint8_t *)keys + (n - 1 - i) * d * bytes;
    put(types[type], shape_of(n, d, 0), keys, n * d, bytes, "keys_%s_%zu.keys", name, d);
    put("<f4", shape_of(n_queries, d, 0), queries, n_queries * d, 4, "keys_%s_%zu.queries",
        name, d);
    for (unsigned i = 0; (kernels = kv_keys_kernels_at(i)) != NULL; i++) {
        float *values = get(n * d, 4), *scores = get(n_queries * n, 4);

        kernels->load(type, keys, d * bytes, n, d, values);
        put("<f4", shape_of(n, d, 0), values, n * d, 4, "keys_%s_%zu.values.%s", name, d,
            kernels->name);
        kernels->score(type, keys, d * bytes, n, d, queries, n_queries, scores, n);
        put("<f4", shape_of(n_queries, n, 0), scores, n_queries * n, 4, "keys_%s_%zu.scores.%s",
            name, d, kernels->name);
        kernels->score_list(type, list, n, d, queries, n_queries, scores, n);
        put("<f4", shape_of(n_queries, n, 0), scores, n_queries * n, 4,
            "keys_%s_%zu.list_scores.%s", name, d, kernels->name);
        free(values);
        free(scores);
    }
    free(wide);
    free(queries);
    free(halves);
    free(list);
}

static void dump_select(unsigned index, size_t n, size_t k, float scale, int special)
{
    static const float odd[] = {NAN,   INFINITY, -INFINITY, 0.0f,
                                -0.0f, FLT_MAX,  -FLT_MAX,  1e-42f};
    float *scores = some_floats(n);
    const struct kv_select_kernels *kernels;
    const float parameters[2] = {scale, 1.25f};
    const uint64_t wanted = k;

    for (size_t i = 0; special && i < n; i++)
        if (kv_random_below(&dice, 4) == 0)
            scores[i] = odd[kv_random_below(&dice, sizeof(odd) / sizeof(odd[0]))];
        else
            scores[i] = roundf(scores[i] * 8) / 8;
    put("<f4", shape_of(n, 0, 0), scores, n, 4, "select%u.scores", index);
    put("<f4", "2", parameters, 2, 4, "select%u.scale_lse", index);
    put("<u8", "1", &wanted, 1, 8, "select%u.k", index);
    for (unsigned i = 0; (kernels = kv_select_kernels_at(i)) != NULL; i++) {
        uint32_t *chosen = get(k, 4), scratch[KV_SELECT_SCRATCH];
        float *merged = get(n, 4), max = kernels->max(scores, n);
        const double sum = kernels->exp_sum(scores, n, scale, max);
        const size_t n_chosen = kernels->select(scores, n, k, chosen, scratch);

        put("<f4", "1", &max, 1, 4, "select%u.max.%s", index, kernels->name);
        put("<f8", "1", &sum, 1, 8, "select%u.exp_sum.%s", index, kernels->name);
        put("<u4", shape_of(n_chosen, 0, 0), chosen, n_chosen, 4, "select%u.chosen.%s", index,
            kernels->name);
        kernels->merge_softmax(scores, n, scale, parameters[1], merged);
        put("<f4", shape_of(n, 0, 0), merged, n, 4, "select%u.weights.%s", index,
            kernels->name);
        for (size_t j = 0; j < n; j++)
            merged[j] = scores[n - 1 - j];
        kernels->merge_max(scores, n, merged);
        put("<f4", shape_of(n, 0, 0), merged, n, 4, "select%u.larger.%s", index, kernels->name);
        free(chosen);
        free(merged);
    }
    free(scores);
}

int main(int argc, char **argv)
{
    static const struct kv_pq_shape shapes[] = {
        {64, 2, 6}, {128, 2, 6}, {128, 4, 8}, {96, 8, 4}, {80, 16, 3}, {60, 3, 2}, {17, 1, 1},
    };

    if (argc != 3) {
        fprintf(stderr, "usage: dump_kernels FOLDER SEED\n");
        return 2;
    }
    folder = argv[1];
    kv_random_init(&dice, strtoull(argv[2], NULL, 10));
    for (unsigned i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        dump_pq(i, &shapes[i], 300 + i, 1 + i);
    for (unsigned type = KV_KEY_FP32; type <= KV_KEY_BF16; type++) {
        dump_keys((enum kv_key_type)type, 101, 64, 8);
        dump_keys((enum kv_key_type)type, 100, 128, 5);
        dump_keys((enum kv_key_type)type, 33, 83, 3);
    }
    dump_select(0, 100003, 5000, 0.125f, 0);
    dump_select(1, 5000, 1234, 1, 0);
    dump_select(2, 4001, 1000, 0.125f, 1);
    dump_select(3, 4001, 3500, 2, 1);
    dump_select(4, 1, 1, 1, 0);
    dump_select(5, 77, 100, 1, 1);
    if (fflush(stdout) != 0)
        fail("cannot write", "standard output");
    return 0;
}
