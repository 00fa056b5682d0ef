/* dump_kernels FOLDER SEED - seeded inputs of the kernels and what every implementation makes
 * of them, one array a file, for check_kernels.py.
 *
 * Standard output has a line for each array: its file, its element type as NumPy names it, its
 * shape.  An input is `CASE.NAME`, a result `CASE.NAME.IMPLEMENTATION`.
 */
#include "kernels/attend.h"
#include "kernels/byte_select.h"
#include "kernels/estimate.h"
#include "kernels/exact_scores.h"
#include "kernels/key_copies.h"
#include "kernels/kmeans.h"
#include "kernels/pq.h"
#include "kernels/pq_tiles.h"
#include "kernels/rope.h"
#include "kernels/select.h"
#include "kvserver/base/random.h"

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

/* Codes are what the best of k-means makes them. */
static void dump_pq(unsigned index, const struct kv_pq_shape *shape, size_t n, size_t n_queries)
{
    const size_t size = kv_pq_centroids_size(shape), n_table = kv_pq_table_size(shape);
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;
    float *centroids = some_floats(size), *keys = some_floats(n * shape->d);
    float *queries = some_floats(n_queries * shape->d), *half_squares = get(n_table, 4);
    uint8_t *codes = get(shape->m * n, 1);
    const struct kv_kmeans_codebook book = {.centroids = centroids,
                                            .half_sq_norms = half_squares};
    const struct kv_pq_kernels *kernels;

    kv_kmeans_half_sq_norms(shape, &book);
    kv_kmeans_encode(shape, &book, keys, n, codes, n);
    put("<f4", shape_of(shape->m, width, n_centroids), centroids, size, 4, "pq%u.centroids",
        index);
    put("<f4", shape_of(n_queries, shape->d, 0), queries, n_queries * shape->d, 4,
        "pq%u.queries", index);
    put("<u1", shape_of(shape->m, n, 0), codes, shape->m * n, 1, "pq%u.codes", index);
    for (unsigned i = 0; (kernels = kv_pq_kernels_at(i)) != NULL; i++) {
        uint8_t *tile = get(kv_tile_bytes(shape), 1);
        float *tables = get(n_queries * n_table, 4), *scores = get(n_queries * n, 4);
        const struct kv_tile_kernels *tiles;

        kernels->tables(shape, centroids, queries, n_queries, tables);
        for (unsigned j = 0; (tiles = kv_tile_kernels_at(j)) != NULL; j++) {
            for (size_t row = 0; row < n; row += KV_PQ_TILE) {
                const size_t n_rows = n - row < KV_PQ_TILE ? n - row : KV_PQ_TILE;

                kv_tile_put(shape, tile, 0, n_rows, codes + row, n);
                tiles->score(shape, tables, n_queries, (const uint8_t *const[]){tile}, 0,
                             n_rows, scores + row, n);
            }
            put("<f4", shape_of(n_queries, n, 0), scores, n_queries * n, 4, "pq%u.scores.%s_%s",
                index, kernels->name, tiles->name);
        }
        free(tile);
        free(tables);
        free(scores);
    }
    free(centroids);
    free(keys);
    free(queries);
    free(half_squares);
    free(codes);
}

/* One step and one update; by the inner product, keys of any length are what makes it differ.
 */
static void dump_kmeans(unsigned index, const struct kv_pq_shape *shape, size_t n, int lifted)
{
    const size_t size = kv_pq_centroids_size(shape), n_table = kv_pq_table_size(shape);
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;
    float *keys = some_floats(n * shape->d);
    const struct kv_kmeans_kernels *kernels;

    for (size_t i = 0; lifted && i < n * shape->d; i++)
        keys[i] *= 1 + (float)(i / shape->d % 7);
    put("<f4", shape_of(n, shape->d, 0), keys, n * shape->d, 4, "kmeans%u.keys", index);
    for (unsigned i = 0; (kernels = kv_kmeans_kernels_at(i)) != NULL; i++) {
        const char *name = kernels->name;
        struct kv_kmeans_codebook book = {.centroids = get(size, 4),
                                          .half_sq_norms = get(n_table, 4)};
        struct kv_kmeans_sums sums = {.sums = get(size, 4), .counts = get(n_table, 4)};
        uint8_t *codes = get(shape->m * n, 1);
        double moved;

        if (lifted) {
            book.augments = get(n_table, 4);
            book.max_norm_sq = get(shape->m, 4);
            sums.augments = get(n_table, 4);
            kernels->max_norm_sq(shape, keys, n, book.max_norm_sq);
        }
        for (uint32_t c = 0; c < n_centroids; c++)
            kv_kmeans_set_centroid(shape, &book, c, keys + c % n * shape->d);
        kernels->half_sq_norms(shape, &book);
        put("<f4", shape_of(shape->m, width, n_centroids), book.centroids, size, 4,
            "kmeans%u.centroids.%s", index, name);
        put("<f4", shape_of(shape->m, n_centroids, 0), book.half_sq_norms, n_table, 4,
            "kmeans%u.half_squares.%s", index, name);
        kernels->step(shape, &book, keys, n, codes, n, &sums);
        put("<u1", shape_of(shape->m, n, 0), codes, shape->m * n, 1, "kmeans%u.codes.%s", index,
            name);
        put("<u4", shape_of(shape->m, n_centroids, 0), sums.counts, n_table, 4,
            "kmeans%u.counts.%s", index, name);
        if (lifted) {
            put("<f4", shape_of(shape->m, 0, 0), book.max_norm_sq, shape->m, 4,
                "kmeans%u.longest.%s", index, name);
            put("<f4", shape_of(shape->m, n_centroids, 0), book.augments, n_table, 4,
                "kmeans%u.lifts.%s", index, name);
        }
        moved = kv_kmeans_update(shape, &book, &sums);
        put("<f8", "1", &moved, 1, 8, "kmeans%u.moved.%s", index, name);
        put("<f4", shape_of(shape->m, width, n_centroids), book.centroids, size, 4,
            "kmeans%u.updated.%s", index, name);
        if (lifted)
            put("<f4", shape_of(shape->m, n_centroids, 0), book.augments, n_table, 4,
                "kmeans%u.updated_lifts.%s", index, name);
        free(book.centroids);
        free(book.half_sq_norms);
        free(book.augments);
        free(book.max_norm_sq);
        free(sums.sums);
        free(sums.counts);
        free(sums.augments);
        free(codes);
    }
    free(keys);
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
    const struct kv_exact_scores_kernels *kernels;

    for (size_t i = 0; i < n * d; i++)
        halves[i] = (uint16_t)(kv_random_next(&dice) & 0xbfff);
    for (size_t i = 0; i < n; i++)
        list[i] = (const uint8_t *)keys + (n - 1 - i) * d * bytes;
    put(types[type], shape_of(n, d, 0), keys, n * d, bytes, "keys_%s_%zu.keys", name, d);
    put("<f4", shape_of(n_queries, d, 0), queries, n_queries * d, 4, "keys_%s_%zu.queries",
        name, d);
    for (unsigned i = 0; (kernels = kv_exact_scores_kernels_at(i)) != NULL; i++) {
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

/* Copies of two blocks, each with its mean, and scores of the same rows of both. */
static void dump_copies(size_t d, size_t n, size_t n_queries)
{
    const size_t bytes = kv_key_copies_bytes(d);
    float *means = some_floats(2 * d), *keys = some_floats(2 * KV_PQ_TILE * d);
    float *queries = some_floats(n_queries * d);
    uint8_t *rows = get(n, 1), *copies = get(2 * bytes, 1);
    const void **blocks = get(n, sizeof(*blocks));
    void *rounded = get(kv_key_copies_query_bytes(d, n_queries), 1);
    const struct kv_key_copies_kernels *kernels;

    for (size_t i = 0; i < d; i++)
        means[i] *= 4;
    for (size_t i = 0; i < 2 * KV_PQ_TILE * d; i++)
        keys[i] += means[i / (KV_PQ_TILE * d) * d + i % d];
    for (size_t i = 0; i < n; i++)
        rows[i] = (uint8_t)kv_random_below(&dice, KV_PQ_TILE);
    put("<f4", shape_of(2, d, 0), means, 2 * d, 4, "copies%zu.means", d);
    put("<f4", shape_of(2, KV_PQ_TILE, d), keys, 2 * KV_PQ_TILE * d, 4, "copies%zu.keys", d);
    put("<f4", shape_of(n_queries, d, 0), queries, n_queries * d, 4, "copies%zu.queries", d);
    put("<u1", shape_of(n, 0, 0), rows, n, 1, "copies%zu.rows", d);
    for (unsigned i = 0; (kernels = kv_key_copies_kernels_at(i)) != NULL; i++) {
        float *scores = get(2 * n_queries * n, 4);

        kernels->round(d, queries, n_queries, rounded);
        for (unsigned block = 0; block < 2; block++) {
            kernels->put(d, means + block * d, keys + block * KV_PQ_TILE * d, 0, KV_PQ_TILE,
                         copies + block * bytes);
            for (size_t j = 0; j < n; j++)
                blocks[j] = copies + block * bytes;
            kv_key_copies_dots(d, means + block * d, queries, n_queries, rounded);
            kernels->score_list(d, blocks, rows, n, rounded, n_queries,
                                scores + block * n_queries * n, n);
        }
        put("<u1", shape_of(2, bytes, 0), copies, 2 * bytes, 1, "copies%zu.copies.%s", d,
            kernels->name);
        put("<f4", shape_of(2, n_queries, n), scores, 2 * n_queries * n, 4,
            "copies%zu.scores.%s", d, kernels->name);
        free(scores);
    }
    free(means);
    free(keys);
    free(queries);
    free(rows);
    free(copies);
    free(blocks);
    free(rounded);
}

static void dump_select(unsigned index, size_t n, size_t k, float scale, int special)
{
    static const float odd[] = {NAN,   INFINITY, -INFINITY, 0.0f,
                                -0.0f, FLT_MAX,  -FLT_MAX,  1e-42f};
    float *scores = some_floats(n);
    const struct kv_topk_kernels *kernels;
    const float parameters[2] = {scale, 1.25f};
    const uint64_t wanted = k;

    for (size_t i = 0; special && i < n; i++)
        if (kv_random_below(&dice, 4) == 0)
            scores[i] = odd[kv_random_below(&dice, sizeof(odd) / sizeof(odd[0]))];
        else
            scores[i] = roundf(scores[i] * 8) / 8;
    put("<f4", shape_of(n, 0, 0), scores, n, 4, "select%u.scores", index);
    put("<f4", "2", parameters, 2, 4, "select%u.scale_factor", index);
    put("<u8", "1", &wanted, 1, 8, "select%u.k", index);
    for (unsigned i = 0; (kernels = kv_topk_kernels_at(i)) != NULL; i++) {
        static struct kv_topk selector;
        uint32_t *chosen = get(k + KV_TOPK_SPARE, 4);
        float *exps = get(n, 4), *merged = get(n, 4), max = kernels->max(scores, NULL, n);
        size_t n_chosen;

        memcpy(exps, scores, n * 4);
        const double sum = (double)kernels->exps(exps, NULL, n, scale, max) /
                           (double)((uint64_t)1 << KV_EXP_SUM_BITS);
        kv_topk_begin(&selector, k);
        for (unsigned pass = 0; pass < KV_TOPK_PASSES; pass++) {
            kernels->count(&selector, scores, NULL, n);
            kv_topk_next(&selector);
        }
        n_chosen = kernels->collect(&selector, scores, NULL, n, 0, chosen);

        put("<f4", "1", &max, 1, 4, "select%u.max.%s", index, kernels->name);
        put("<f8", "1", &sum, 1, 8, "select%u.exp_sum.%s", index, kernels->name);
        put("<u4", shape_of(n_chosen, 0, 0), chosen, n_chosen, 4, "select%u.chosen.%s", index,
            kernels->name);
        put("<f4", shape_of(n, 0, 0), exps, n, 4, "select%u.exps.%s", index, kernels->name);
        for (size_t j = 0; j < n; j++)
            merged[j] = (float)j / (float)n;
        kernels->merge(KV_WEIGHTS_SUM, exps, n, &parameters[1], 1, n, merged);
        put("<f4", shape_of(n, 0, 0), merged, n, 4, "select%u.sums.%s", index, kernels->name);
        for (size_t j = 0; j < n; j++)
            merged[j] = exps[n - 1 - j];
        kernels->merge(KV_WEIGHTS_MAX, exps, n, &parameters[1], 1, n, merged);
        put("<f4", shape_of(n, 0, 0), merged, n, 4, "select%u.larger.%s", index, kernels->name);
        free(exps);
        free(chosen);
        free(merged);
    }
    free(scores);
}

/* Rows as dump_keys() makes them; a third of them counts for each query.  Merged from three
 * parts, the second one empty. */
static void dump_attend(unsigned index, const struct kv_attend_shape *shape, size_t n)
{
    static const char *const types[] = {"", "<f4", "<f2", "<u2"};
    const size_t d = (size_t)shape->d_k + shape->d_v, n_queries = shape->n_queries;
    const size_t n_output = n_queries * shape->d_v, cut = n / 3;
    const size_t bytes = shape->type == KV_KEY_FP32 ? 4 : 2;
    float *wide = some_floats(n * d), *queries = some_floats(n_queries * shape->d_k);
    uint16_t *halves = get(n * d, sizeof(*halves));
    uint32_t *among = get(n, sizeof(*among));
    const void *rows = shape->type == KV_KEY_FP32 ? (const void *)wide : halves;
    const struct kv_attend_kernels *kernels;

    for (size_t i = 0; i < n * d; i++)
        halves[i] = (uint16_t)(kv_random_next(&dice) & 0xbfff);
    for (size_t i = 0; i < n; i++)
        for (unsigned query = 0; query < n_queries; query++)
            among[i] |= (uint32_t)(kv_random_below(&dice, 3) == 0) << query;
    put(types[shape->type], shape_of(n, d, 0), rows, n * d, bytes, "attend%u.rows", index);
    put("<f4", shape_of(n_queries, shape->d_k, 0), queries, n_queries * shape->d_k, 4,
        "attend%u.queries", index);
    put("<u4", shape_of(n, 0, 0), among, n, 4, "attend%u.among", index);
    put("<f4", "1", &shape->scale, 1, 4, "attend%u.scale", index);
    for (unsigned i = 0; (kernels = kv_attend_kernels_at(i)) != NULL; i++) {
        float *state = get(kv_attend_floats(shape), 4), *lses[4], *outputs[4];

        for (int part = 0; part < 4; part++) {
            const size_t from = part == 2 ? cut : 0, count = part == 0   ? n
                                                             : part == 1 ? cut
                                                             : part == 2 ? n - cut
                                                                         : 0;

            outputs[part] = get(n_output, 4);
            lses[part] = get(n_queries, 4);
            kv_attend_begin(shape, state);
            kernels->run(shape, queries, (const uint8_t *)rows + from * d * bytes, d * bytes,
                         count, among + from, state);
            kv_attend_end(shape, state, outputs[part], lses[part]);
        }
        put("<f4", shape_of(n_queries, shape->d_v, 0), outputs[0], n_output, 4,
            "attend%u.output.%s", index, kernels->name);
        put("<f4", shape_of(n_queries, 0, 0), lses[0], n_queries, 4, "attend%u.lse.%s", index,
            kernels->name);
        kv_attend_merge(n_queries, shape->d_v, 3,
                        (const float *const[3]){outputs[1], outputs[3], outputs[2]},
                        (const float *const[3]){lses[1], lses[3], lses[2]}, outputs[0],
                        lses[0]);
        put("<f4", shape_of(n_queries, shape->d_v, 0), outputs[0], n_output, 4,
            "attend%u.merged.%s", index, kernels->name);
        put("<f4", shape_of(n_queries, 0, 0), lses[0], n_queries, 4, "attend%u.merged_lse.%s",
            index, kernels->name);
        for (int part = 0; part < 4; part++) {
            free(outputs[part]);
            free(lses[part]);
        }
        free(state);
    }
    free(wide);
    free(queries);
    free(halves);
    free(among);
}

static void
dump_rope(unsigned index, enum kv_rope_style style, size_t n_rot, size_t d, int llama)
{
    enum {
        N = 50,
        HEADS = 3,
    };
    const struct kv_rope_scaling scaling = {
        .linear = llama ? 0 : 4,
        .factor = llama ? 8 : 0,
        .low = 1,
        .high = 4,
        .context = 8192,
    };
    const double parameters[7] = {500000,
                                  style == KV_ROPE_HALVES,
                                  (double)scaling.linear,
                                  (double)scaling.factor,
                                  (double)scaling.low,
                                  (double)scaling.high,
                                  (double)scaling.context};
    const size_t n_x = (size_t)N * HEADS * d;
    double *frequencies = get(n_rot / 2, 8);
    float *turns = get(N * n_rot, 4), *before = some_floats(n_x), *x = get(n_x, 4);
    uint32_t positions[N];
    const struct kv_rope_kernels *kernels;

    for (size_t i = 0; i < N; i++)
        positions[i] = (uint32_t)kv_random_below(&dice, 1 << 20);
    kv_rope_frequencies(parameters[0], n_rot, &scaling, frequencies);
    kv_rope_rotations_at(frequencies, n_rot, positions, N, turns);
    put("<f8", "7", parameters, 7, 8, "rope%u.parameters", index);
    put("<u4", shape_of(N, 0, 0), positions, N, 4, "rope%u.positions", index);
    put("<f4", shape_of(N, HEADS, d), before, n_x, 4, "rope%u.x", index);
    put("<f8", shape_of(n_rot / 2, 0, 0), frequencies, n_rot / 2, 8, "rope%u.frequencies",
        index);
    for (unsigned i = 0; (kernels = kv_rope_kernels_at(i)) != NULL; i++) {
        memcpy(x, before, n_x * 4);
        kernels->rotate(style, 0, turns, n_rot, n_rot, x, N, HEADS, d);
        put("<f4", shape_of(N, HEADS, d), x, n_x, 4, "rope%u.turned.%s", index, kernels->name);
        kernels->rotate(style, 1, turns, n_rot, n_rot, x, N, HEADS, d);
        put("<f4", shape_of(N, HEADS, d), x, n_x, 4, "rope%u.back.%s", index, kernels->name);
    }
    free(frequencies);
    free(turns);
    free(before);
    free(x);
}

/* A group of rows about 40 points, and what it answers: with all rows left, and with every
 * third one scored and every fifth one taken. */
static void
dump_rest(unsigned index, const struct kv_summary_shape *shape, size_t n, size_t n_queries)
{
    const size_t d = shape->d_k + shape->d_v, n_summaries = kv_summary_count(shape);
    const size_t bytes = shape->type == KV_KEY_FP32 ? 4 : 2;
    const size_t n_state = kv_estimate_floats(shape, n_queries);
    float *points = some_floats(40 * d), *rows = some_floats(n * d);
    float *queries = some_floats(n_queries * shape->d_k), *scores = get(n_queries * n, 4);
    float *squares = get(n_queries, 4), *steps = get(n_queries, 4);
    int16_t *elements = get(n_queries * kv_summary_up(shape->d_k), 2);
    struct kv_estimate_queries prepared;
    uint16_t *halves = get(n * d, 2), counts[KV_SUMMARIES_MAX];
    uint32_t *taken = get(n, 4), *scored = get(n, 4), first, n_next;
    uint8_t *group = get(kv_summary_bytes(shape), 1), *numbers = get(n, 1);
    uint8_t *marks = get(KV_SUMMARY_ROWS_MAX, 1);
    void *scratch = get(kv_summary_scratch_bytes(shape), 1);
    const void *stored = shape->type == KV_KEY_FP32 ? (const void *)rows : halves;
    const uint64_t parameters[] = {shape->d_k, shape->d_v, shape->bits, shape->rows, index};
    const struct kv_estimate_kernels *kernels;
    size_t n_taken = 0, n_scored = 0;
    struct kv_summary_build build;

    for (size_t i = 0; i < n * d; i++) {
        uint32_t word;

        rows[i] =
            rows[i] / 2 + points[i / d * 7 % 40 * d + i % d] * (i % d < shape->d_k ? 2 : 1);
        memcpy(&word, &rows[i], 4);
        halves[i] = (uint16_t)(word >> 16);
        if (shape->type == KV_KEY_BF16) {
            word &= 0xffff0000;
            memcpy(&rows[i], &word, 4);
        }
    }
    kv_summary_build_begin(&build, shape, (uint32_t)n, index, scratch);
    while (kv_summary_build_next(&build, &first, &n_next))
        kv_summary_build_slice(&build, (const uint8_t *)stored + first * d * bytes, d * bytes);
    kv_summary_build_end(&build, group);
    for (uint32_t row = 0; row < n; row++) {
        if (row % 5 == 0)
            taken[n_taken++] = row;
        if (row % 3 == 0)
            scored[n_scored++] = row;
    }
    put("<f4", shape_of(n, d, 0), rows, n * d, 4, "rest%u.rows", index);
    prepared = kv_estimate_prepare(shape->d_k, queries, n_queries, elements, steps, squares);
    memset(marks, 0, KV_SUMMARY_ROWS_MAX);
    put("<f4", shape_of(n_queries, shape->d_k, 0), queries, n_queries * shape->d_k, 4,
        "rest%u.queries", index);
    put("<u8", "5", parameters, 5, 8, "rest%u.shape", index);
    put("<u1", shape_of(kv_summary_bytes(shape), 0, 0), group, kv_summary_bytes(shape), 1,
        "rest%u.group", index);
    for (unsigned part = 0; part < 2; part++) {
        const struct kv_estimate_counted counted =
            kv_estimate_count(shape, group, 0, 0, (uint32_t)n, taken, part * n_taken, scored,
                              part * n_scored, marks, counts, numbers);
        for (size_t query = 0; query < n_queries; query++)
            for (size_t i = 0; i < counted.n_scored; i++)
                kv_exact_scores_score(KV_KEY_FP32, rows + scored[i] * d, 0, 1, shape->d_k,
                                      queries + query * shape->d_k, 1,
                                      scores + query * counted.n_scored + i, 1);
        put("<u2", shape_of(n_summaries, 0, 0), counts, n_summaries, 2, "rest%u.counts%u",
            index, part);
        put("<u1", shape_of(counted.n_scored, 0, 0), numbers, counted.n_scored, 1,
            "rest%u.numbers%u", index, part);
        for (unsigned i = 0; (kernels = kv_estimate_kernels_at(i)) != NULL; i++) {
            const struct kv_estimate_input input = {
                .queries = prepared,
                .scale = 0.25f,
                .counts = counts,
                .numbers = numbers,
                .scores = scores,
                .n_scored = counted.n_scored,
                .scores_stride = counted.n_scored,
            };
            float *state = get(n_state, 4), *output = get(n_queries * shape->d_v, 4);
            float *lse = get(n_queries, 4);

            kv_estimate_begin(shape, n_queries, input.scale, scores, counted.n_scored,
                              counted.n_scored, state);
            kernels->add(shape, group, &input, state);
            kv_estimate_end(shape, n_queries, state, output, lse);
            put("<f4", shape_of(n_queries, shape->d_v, 0), output, n_queries * shape->d_v, 4,
                "rest%u.output%u.%s", index, part, kernels->name);
            put("<f4", shape_of(n_queries, 0, 0), lse, n_queries, 4, "rest%u.lse%u.%s", index,
                part, kernels->name);
            free(state);
            free(output);
            free(lse);
        }
    }
    free(points);
    free(rows);
    free(queries);
    free(squares);
    free(steps);
    free(elements);
    free(marks);
    free(scores);
    free(halves);
    free(taken);
    free(scored);
    free(group);
    free(numbers);
    free(scratch);
}

/* Tables rounded by one base and step for all queries, as a query of a node does, and what rows
 * make of them. */
static void dump_scan(unsigned index, const struct kv_pq_shape *shape, size_t n_queries)
{
    enum {
        N_TILES = 3,
        N = N_TILES * KV_PQ_TILE,
    };
    const size_t n_table = kv_pq_table_size(shape), size = kv_pq_table_rounded_size(shape);
    float *tables = some_floats(n_queries * n_table), *scales = get(n_queries + 1, 4);
    uint8_t *codes = get(shape->m * N, 1), *tiles = get(N_TILES, kv_tile_bytes(shape));
    const uint8_t *tiles_at[N_TILES];
    int16_t *offsets = get(n_queries, 2);
    const struct kv_tile_kernels *kernels;
    float widest = 0;

    for (size_t i = 0; i < shape->m * N; i++)
        codes[i] = (uint8_t)kv_random_below(&dice, kv_pq_n_centroids(shape));
    for (size_t i = 0; i < N_TILES; i++) {
        tiles_at[i] = tiles + i * kv_tile_bytes(shape);
        kv_tile_put(shape, tiles + i * kv_tile_bytes(shape), 0, KV_PQ_TILE,
                    codes + i * KV_PQ_TILE, N);
    }
    for (size_t query = 0; query < n_queries; query++) {
        float most;

        kv_pq_table_range(shape, tables + query * n_table, &scales[query], &most);
        scales[query] -= (float)query / 8;
        widest = fmaxf(widest, most - scales[query]);
        offsets[query] = (int16_t)((int)kv_random_below(&dice, 200) - 120);
    }
    scales[n_queries] = (index % 2 == 0 ? (float)(255 - shape->m) : 400.0f) / widest;
    put("<f4", shape_of(n_queries, shape->m, kv_pq_n_centroids(shape)), tables,
        n_queries * n_table, 4, "scan%u.tables", index);
    put("<f4", shape_of(n_queries + 1, 0, 0), scales, n_queries + 1, 4, "scan%u.scales", index);
    put("<i2", shape_of(n_queries, 0, 0), offsets, n_queries, 2, "scan%u.offsets", index);
    put("<u1", shape_of(shape->m, N, 0), codes, shape->m * N, 1, "scan%u.codes", index);
    for (unsigned i = 0; (kernels = kv_tile_kernels_at(i)) != NULL; i++) {
        uint8_t *rounded = get(n_queries, size), *sums = get(n_queries, N), *most = get(N, 1);
        float *ranges = get(2 * n_queries, 4);

        for (size_t query = 0; query < n_queries; query++) {
            kernels->range(shape, tables + query * n_table, &ranges[2 * query],
                           &ranges[2 * query + 1]);
            kernels->round8_to(shape, tables + query * n_table, scales[query],
                               scales[n_queries], rounded + query * size);
        }
        kernels->scan8(shape, rounded, n_queries, tiles_at, N_TILES, sums, N);
        kernels->scan8_max(shape, rounded, offsets, n_queries, tiles_at, N_TILES, most);
        put("<f4", shape_of(n_queries, 2, 0), ranges, 2 * n_queries, 4, "scan%u.ranges.%s",
            index, kernels->name);
        put("<u1", shape_of(n_queries, shape->m, size / shape->m), rounded, n_queries * size, 1,
            "scan%u.rounded.%s", index, kernels->name);
        put("<u1", shape_of(n_queries, N, 0), sums, n_queries * N, 1, "scan%u.sums.%s", index,
            kernels->name);
        put("<u1", shape_of(N, 0, 0), most, N, 1, "scan%u.most.%s", index, kernels->name);
        free(rounded);
        free(sums);
        free(most);
        free(ranges);
    }
    free(tables);
    free(scales);
    free(codes);
    free(tiles);
    free(offsets);
}

/* Bytes about the middle, and what is counted and collected of them, in two pieces. */
static void dump_bytes(unsigned index, size_t n, size_t k)
{
    uint8_t *values = get(n, 1), bound = 0;
    uint32_t bins[256] = {0};
    const uint64_t wanted = k;
    const struct kv_bytes_kernels *kernels;

    for (size_t i = 0; i < n; i++)
        values[i] = (uint8_t)(128 + some() * (index % 2 == 0 ? 30 : 1));
    for (unsigned bit = 128; bit > 0; bit /= 2)
        if (kv_bytes_count_from(values, n, (uint8_t)(bound | bit)) >= k)
            bound |= (uint8_t)bit;
    kv_bytes_histogram(values, n, bins);
    put("<u1", shape_of(n, 0, 0), values, n, 1, "bytes%u.values", index);
    put("<u8", "1", &wanted, 1, 8, "bytes%u.k", index);
    put("<u4", "256", bins, 256, 4, "bytes%u.bins", index);
    for (unsigned i = 0; (kernels = kv_bytes_kernels_at(i)) != NULL; i++) {
        uint64_t counts[256], ties;
        uint32_t *chosen = get(k + KV_TOPK_SPARE, 4);
        size_t n_chosen;

        for (unsigned least = 0; least < 256; least++)
            counts[least] = kernels->count_from(values, n, (uint8_t)least);
        ties = k - (bound < 255 ? counts[bound + 1] : 0);
        n_chosen = kernels->collect(values, n / 3, bound, &ties, 0, chosen);
        n_chosen += kernels->collect(values + n / 3, n - n / 3, bound, &ties, (uint32_t)(n / 3),
                                     chosen + n_chosen);
        put("<u8", "256", counts, 256, 8, "bytes%u.counts.%s", index, kernels->name);
        put("<u4", shape_of(n_chosen, 0, 0), chosen, n_chosen, 4, "bytes%u.chosen.%s", index,
            kernels->name);
        free(chosen);
    }
    free(values);
}

int main(int argc, char **argv)
{
    static const struct kv_pq_shape shapes[] = {
        {64, 2, 6}, {128, 2, 6}, {128, 4, 8}, {96, 8, 4}, {80, 16, 3}, {60, 3, 2}, {17, 1, 1},
    };

    static const struct kv_attend_shape attended[] = {
        {KV_KEY_FP16, 64, 64, 3, 0.125f},    {KV_KEY_FP16, 128, 128, 4, 0.0884f},
        {KV_KEY_BF16, 128, 128, 7, 0.0884f}, {KV_KEY_FP32, 80, 96, 5, 0.1f},
        {KV_KEY_FP32, 17, 33, 2, 1},         {KV_KEY_BF16, 256, 256, 32, 0.0625f},
    };
    static const struct kv_summary_shape rests[] = {
        {KV_KEY_FP32, 64, 64, KV_SUMMARY_16, 1024},
        {KV_KEY_BF16, 128, 128, KV_SUMMARY_64, 1024},
        {KV_KEY_FP32, 20, 9, KV_SUMMARY_64, 1024},
        {KV_KEY_BF16, 33, 50, KV_SUMMARY_16, 1024},
        {KV_KEY_BF16, 128, 128, KV_SUMMARY_16, 3072},
        {KV_KEY_FP32, 24, 40, KV_SUMMARY_64, 3072},
    };

    static const struct kv_pq_shape scanned[] = {
        {8, 4, 6}, {8, 8, 4}, {2, 2, 6}, {16, 16, 8}, {9, 9, 5}, {3, 3, 2},
    };

    if (argc != 3) {
        fprintf(stderr, "usage: dump_kernels FOLDER SEED\n");
        return 2;
    }
    folder = argv[1];
    kv_random_init(&dice, strtoull(argv[2], NULL, 10));
    for (unsigned i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        dump_pq(i, &shapes[i], 300 + i, 1 + i);
    for (unsigned i = 0; i < 2 * sizeof(shapes) / sizeof(shapes[0]); i++)
        dump_kmeans(i, &shapes[i / 2], 1000 + i, i % 2);
    for (unsigned i = 0; i < 4; i++)
        dump_rest(i, &rests[i], i == 3 ? 333 : 1024, 4 + i);
    for (unsigned type = KV_KEY_FP32; type <= KV_KEY_BF16; type++) {
        dump_keys((enum kv_key_type)type, 101, 64, 8);
        dump_keys((enum kv_key_type)type, 100, 128, 5);
        dump_keys((enum kv_key_type)type, 33, 83, 3);
    }
    dump_select(0, 100003, 5000, 0.125f, 0);
    dump_select(1, 5000, 1234, 6, 0); /* half of the weights are 0 */
    dump_select(2, 4001, 1000, 0.125f, 1);
    dump_select(3, 4001, 3500, 2, 1);
    dump_select(4, 1, 1, 1, 0);
    dump_select(5, 77, 100, 1, 1);
    for (unsigned i = 0; i < sizeof(attended) / sizeof(attended[0]); i++)
        dump_attend(i, &attended[i], 700 + 37 * i);
    dump_rope(0, KV_ROPE_ADJACENT, 64, 64, 0);
    dump_rope(1, KV_ROPE_HALVES, 128, 128, 1);
    dump_rope(2, KV_ROPE_ADJACENT, 42, 80, 1);
    dump_rope(3, KV_ROPE_HALVES, 42, 80, 0);
    for (unsigned i = 0; i < sizeof(scanned) / sizeof(scanned[0]); i++)
        dump_scan(i, &scanned[i], 1 + 3 * i);
    dump_bytes(0, 100003, 6000);
    dump_bytes(1, 30000, 10000);
    dump_bytes(2, 63, 1);
    dump_copies(64, 300, 3);
    dump_copies(128, 301, 4);
    dump_copies(83, 77, 7);
    for (unsigned i = 4; i < sizeof(rests) / sizeof(rests[0]); i++)
        dump_rest(i, &rests[i], i == 5 ? 2900 : 3072, 4 + i % 4);
    if (fflush(stdout) != 0)
        fail("cannot write", "standard output");
    return 0;
}
