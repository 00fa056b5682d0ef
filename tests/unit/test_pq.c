/* pq.h: every implementation that this CPU has gives the bits of the scalar one, of any shape,
 * place and values, also of NaN, infinities and ties, and writes nothing else.  The scalar one
 * is checked against plain sums in double.  Then what the method promises: a score from codes
 * is the query's product with the centroids, and with a centroid for each of the sub-vectors
 * that occur, the rows chosen by codes are those chosen by keys. */
#include "floats.h"
#include "keys.h"
#include "pq.h"
#include "select.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    ROUNDS = 700,
    N_MAX = 300,
    QUERIES_MAX = 9,
    GUARD = 0x5a,
};

static const char *const kind_names[] = {"uniform", "integers", "equal", "any bits", "special"};

static uint64_t seed;
static struct kv_random dice;

#define EXPECT(condition)                                                                 \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            print_error("KV_TEST_SEED=%llu round %d %s %s d %u m %u bits %u n %zu: %s\n", \
                        (unsigned long long)seed, world->round, kernels->name,            \
                        kind_names[world->kind], world->shape.d, world->shape.m,          \
                        world->shape.bits, world->n, #condition);                         \
            fail();                                                                       \
        }                                                                                 \
    } while (0)

/* Centroids and keys of a random shape. */
struct world {
    int round;
    enum float_kind kind;
    struct kv_pq_shape shape;
    size_t n, codes_stride, n_table;
    float *centroids, *half_squares, *keys;
    uint8_t *codes; /* (m, codes_stride), random ones */
    void *bases[4];
};

static float *some_floats(size_t n, void **ret_base)
{
    return floats_exact(&dice, n * sizeof(float), sizeof(float), ret_base);
}

static struct kv_pq_shape some_shape(void)
{
    struct kv_pq_shape shape;

    do {
        shape.m = 1 + (uint32_t)kv_random_below(&dice, KV_PQ_SUBSPACES_MAX);
        shape.d = shape.m * (1 + (uint32_t)kv_random_below(&dice, 256 / shape.m));
    } while (shape.d < 8);
    shape.bits = 1 + (uint32_t)kv_random_below(&dice, KV_PQ_BITS_MAX);
    assert_true(kv_pq_shape_valid(&shape));
    return shape;
}

static void make_world(struct world *world, int round)
{
    const struct kv_pq_shape *shape = &world->shape;
    size_t n_codes;

    world->round = round;
    world->kind = (enum float_kind)(round % FLOATS_N_KINDS);
    world->shape = some_shape();
    world->n = kv_random_below(&dice, kv_random_below(&dice, 4) == 0 ? N_MAX + 1 : 12);
    world->codes_stride = world->n + kv_random_below(&dice, 5);
    world->n_table = kv_pq_table_size(shape);
    n_codes = shape->m * world->codes_stride;
    world->centroids = some_floats(kv_pq_centroids_size(shape), &world->bases[0]);
    world->half_squares = some_floats(world->n_table, &world->bases[1]);
    world->keys = some_floats(world->n * shape->d, &world->bases[2]);
    world->codes = floats_exact(&dice, n_codes, 1, &world->bases[3]);
    floats_fill(&dice, world->kind, world->centroids, kv_pq_centroids_size(shape));
    floats_fill(&dice, world->kind, world->keys, world->n * shape->d);
    kv_pq_half_squares(shape, world->centroids, world->half_squares);
    for (size_t i = 0; i < n_codes; i++)
        world->codes[i] = (uint8_t)kv_random_below(&dice, kv_pq_n_centroids(shape));
}

static void clear_world(struct world *world)
{
    for (int i = 0; i < 4; i++)
        free(world->bases[i]);
}

static void tiers(void **state)
{
    unsigned n = 0;

    (void)state;
    for (; kv_pq_kernels_at(n) != NULL; n++)
        print_message("pq: %s\n", kv_pq_kernels_at(n)->name);
    assert_true(n >= 1);
    assert_string_equal(kv_pq_kernels_at(0)->name, "scalar");
    assert_null(kv_pq_kernels_at(~0u));
}

static void shapes(void **state)
{
    static const struct {
        struct kv_pq_shape shape;
        bool valid;
    } cases[] = {
        {{64, 2, 6}, true},    {{1, 1, 1}, true},     {{256, 16, 8}, true},
        {{17, 17, 4}, false},  {{64, 3, 6}, false},   {{0, 1, 1}, false},
        {{64, 0, 6}, false},   {{64, 2, 0}, false},   {{64, 2, 9}, false},
        {{0, 0, 0}, false},    {{8, 16, 4}, false},   {{64, 32, 4}, false},
        {{64, 2, ~0u}, false}, {{64, ~0u, 4}, false},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        assert_int_equal(kv_pq_shape_valid(&cases[i].shape), cases[i].valid);
}

static void check_encode(const struct world *world,
                         const struct kv_pq_kernels *plain,
                         const struct kv_pq_kernels *kernels)
{
    const size_t n_codes = world->shape.m * world->codes_stride;
    void *bases[2];
    uint8_t *expected = floats_exact(&dice, n_codes, 1, &bases[0]);
    uint8_t *codes = floats_exact(&dice, n_codes, 1, &bases[1]);

    memset(expected, GUARD, n_codes);
    memset(codes, GUARD, n_codes);
    plain->encode(&world->shape, world->centroids, world->half_squares, world->keys, world->n,
                  expected, world->codes_stride);
    kernels->encode(&world->shape, world->centroids, world->half_squares, world->keys, world->n,
                    codes, world->codes_stride);
    EXPECT(memcmp(codes, expected, n_codes) == 0);
    for (size_t j = 0; j < world->shape.m; j++)
        for (size_t i = world->n; i < world->codes_stride; i++)
            EXPECT(codes[j * world->codes_stride + i] == GUARD);
    free(bases[0]);
    free(bases[1]);
}

static void check_accumulate(const struct world *world,
                             const struct kv_pq_kernels *plain,
                             const struct kv_pq_kernels *kernels)
{
    const size_t n_sums = kv_pq_centroids_size(&world->shape);
    void *bases[4];
    float *expected = some_floats(n_sums, &bases[0]), *sums = some_floats(n_sums, &bases[1]);
    uint32_t *expected_counts = floats_exact(&dice, world->n_table * 4, 4, &bases[2]);
    uint32_t *counts = floats_exact(&dice, world->n_table * 4, 4, &bases[3]);

    floats_fill(&dice, world->kind, expected, n_sums);
    memcpy(sums, expected, n_sums * sizeof(float));
    kv_random_fill(&dice, expected_counts, world->n_table * 4);
    memcpy(counts, expected_counts, world->n_table * 4);
    plain->accumulate(&world->shape, world->keys, world->n, world->codes, world->codes_stride,
                      expected, expected_counts);
    kernels->accumulate(&world->shape, world->keys, world->n, world->codes, world->codes_stride,
                        sums, counts);
    EXPECT(floats_all_same(sums, expected, n_sums));
    EXPECT(memcmp(counts, expected_counts, world->n_table * 4) == 0);
    for (int i = 0; i < 4; i++)
        free(bases[i]);
}

static void check_table_and_score(const struct world *world,
                                  const struct kv_pq_kernels *plain,
                                  const struct kv_pq_kernels *kernels)
{
    const size_t n_queries = kv_random_below(&dice, QUERIES_MAX + 1);
    const size_t n =
        kv_random_below(&dice, 3) == 0 ? KV_PQ_TILE : kv_random_below(&dice, KV_PQ_TILE + 1);
    const size_t stride = n + kv_random_below(&dice, 5), n_scores = n_queries * stride;
    const uint32_t d = world->shape.d;
    void *bases[6];
    float *queries = some_floats(n_queries * d, &bases[0]);
    float *expected_tables = some_floats(n_queries * world->n_table, &bases[1]);
    float *tables = some_floats(n_queries * world->n_table, &bases[2]);
    float *expected = some_floats(n_scores, &bases[3]),
          *scores = some_floats(n_scores, &bases[4]);
    uint8_t *tile = floats_exact(&dice, world->shape.m * KV_PQ_TILE, 1, &bases[5]);

    floats_fill(&dice, world->kind, queries, n_queries * d);
    for (size_t i = 0; i < n_queries; i++) {
        plain->table(&world->shape, world->centroids, queries + i * d,
                     expected_tables + i * world->n_table);
        kernels->table(&world->shape, world->centroids, queries + i * d,
                       tables + i * world->n_table);
    }
    EXPECT(floats_all_same(tables, expected_tables, n_queries * world->n_table));

    /* What lies behind n in a tile need not be a code. */
    memset(tile, 0xff, world->shape.m * KV_PQ_TILE);
    for (size_t j = 0; j < world->shape.m; j++)
        for (size_t i = 0; i < n; i++)
            tile[j * KV_PQ_TILE + i] =
                (uint8_t)kv_random_below(&dice, kv_pq_n_centroids(&world->shape));
    memset(expected, GUARD, n_scores * sizeof(float));
    memset(scores, GUARD, n_scores * sizeof(float));
    plain->score(&world->shape, tables, n_queries, tile, n, expected, stride);
    kernels->score(&world->shape, tables, n_queries, tile, n, scores, stride);
    EXPECT(floats_all_same(scores, expected, n_scores));
    for (int i = 0; i < 6; i++)
        free(bases[i]);
}

static void same(void **state)
{
    const struct kv_pq_kernels *plain = kv_pq_kernels_at(0), *kernels;
    struct world world;

    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        make_world(&world, round);
        for (unsigned i = 1; (kernels = kv_pq_kernels_at(i)) != NULL; i++) {
            check_encode(&world, plain, kernels);
            check_accumulate(&world, plain, kernels);
            check_table_and_score(&world, plain, kernels);
        }
        clear_world(&world);
    }
}

static float centroid_at(const struct world *world, size_t j, size_t code, size_t i)
{
    const size_t n_centroids = kv_pq_n_centroids(&world->shape);
    const size_t width = world->shape.d / world->shape.m;

    return world->centroids[(j * width + i) * n_centroids + code];
}

/* Nothing is nearer than the code's centroid, but for rounding. */
static void check_nearest(const struct world *world, const struct kv_pq_kernels *kernels)
{
    const size_t width = world->shape.d / world->shape.m;
    const size_t n_centroids = kv_pq_n_centroids(&world->shape);
    uint8_t *codes = malloc(world->shape.m * world->n + 1);

    assert_non_null(codes);
    kernels->encode(&world->shape, world->centroids, world->half_squares, world->keys, world->n,
                    codes, world->n);
    for (size_t row = 0; row < world->n; row++)
        for (size_t j = 0; j < world->shape.m; j++) {
            const float *x = world->keys + row * world->shape.d + j * width;
            const size_t code = codes[j * world->n + row];
            double least = INFINITY, of_code = INFINITY, magnitude = 0;
            size_t first = 0;

            EXPECT(code < n_centroids);
            for (size_t c = 0; c < n_centroids; c++) {
                double distance = 0, size = 0;

                for (size_t i = 0; i < width; i++) {
                    const double by = (double)x[i] - (double)centroid_at(world, j, c, i);

                    distance += by * by / 2;
                    size +=
                        (double)x[i] * (double)x[i] + 2 * (double)centroid_at(world, j, c, i) *
                                                          (double)centroid_at(world, j, c, i);
                }
                magnitude = size > magnitude ? size : magnitude;
                of_code = c == code ? distance : of_code;
                if (distance < least) {
                    least = distance;
                    first = c;
                }
            }
            EXPECT(of_code - least <= (double)(2 * width + 2) * 0x1p-24 * magnitude);
            /* Sums of small integers are exact: of ties it is the lower code. */
            if (world->kind == FLOATS_INTEGERS)
                EXPECT(code == first);
        }
    free(codes);
}

/* The first of methods.md's checks: the sum of look-ups is the product with the centroids. */
static void check_products(const struct world *world, const struct kv_pq_kernels *kernels)
{
    const uint32_t d = world->shape.d;
    const size_t width = d / world->shape.m;
    float *query = malloc(d * sizeof(float)), *table = malloc(world->n_table * sizeof(float));
    static uint8_t tile[KV_PQ_SUBSPACES_MAX * KV_PQ_TILE];
    float scores[KV_PQ_TILE];

    assert_true(query != NULL && table != NULL);
    floats_fill(&dice, world->kind, query, d);
    kernels->table(&world->shape, world->centroids, query, table);
    for (size_t i = 0; i < world->shape.m * KV_PQ_TILE; i++)
        tile[i] = (uint8_t)kv_random_below(&dice, kv_pq_n_centroids(&world->shape));
    kernels->score(&world->shape, table, 1, tile, KV_PQ_TILE, scores, KV_PQ_TILE);
    for (size_t row = 0; row < KV_PQ_TILE; row++) {
        double sum = 0, magnitude = 0;

        for (size_t i = 0; i < d; i++) {
            const size_t j = i / width;
            const double product =
                (double)query[i] *
                (double)centroid_at(world, j, tile[j * KV_PQ_TILE + row], i % width);

            sum += product;
            magnitude += fabs(product);
        }
        EXPECT(fabs((double)scores[row] - sum) <= 1e-5 * magnitude);
        EXPECT(fabs((double)scores[row] - sum) <=
               (double)(width + world->shape.m) * 0x1p-24 * magnitude);
    }
    free(query);
    free(table);
}

/* Sums, counts, means and how far the centroids moved, in double. */
static void check_step(const struct world *world, const struct kv_pq_kernels *kernels)
{
    const size_t n_centroids = kv_pq_n_centroids(&world->shape);
    const size_t width = world->shape.d / world->shape.m;
    const size_t size = kv_pq_centroids_size(&world->shape);
    float *sums = calloc(size, sizeof(float)), *moved = malloc(size * sizeof(float));
    uint32_t *counts = calloc(world->n_table, sizeof(uint32_t));
    double distance, expected = 0;

    assert_true(sums != NULL && moved != NULL && counts != NULL);
    kernels->accumulate(&world->shape, world->keys, world->n, world->codes, world->codes_stride,
                        sums, counts);
    memcpy(moved, world->centroids, size * sizeof(float));
    distance = kv_pq_update(&world->shape, sums, counts, moved);
    for (size_t j = 0; j < world->shape.m; j++)
        for (size_t c = 0; c < n_centroids; c++) {
            uint32_t count = 0;

            for (size_t row = 0; row < world->n; row++)
                count += world->codes[j * world->codes_stride + row] == c;
            EXPECT(counts[j * n_centroids + c] == count);
            for (size_t i = 0; i < width; i++) {
                const double old = (double)centroid_at(world, j, c, i);
                const double mean = (double)moved[(j * width + i) * n_centroids + c];
                double sum = 0, magnitude = 0;

                for (size_t row = 0; row < world->n; row++)
                    if (world->codes[j * world->codes_stride + row] == c) {
                        const double x =
                            (double)world->keys[row * world->shape.d + j * width + i];

                        sum += x;
                        magnitude += fabs(x);
                    }
                if (count == 0)
                    EXPECT(mean == old);
                else
                    EXPECT(fabs(mean - sum / count) <=
                           (count + 2) * 0x1p-24 * magnitude / count);
                expected += (mean - old) * (mean - old);
            }
        }
    EXPECT(fabs(distance - expected) <= 1e-12 * expected);
    free(sums);
    free(moved);
    free(counts);
}

static void right(void **state)
{
    const struct kv_pq_kernels *kernels;
    struct world world;

    (void)state;
    for (int round = 0; round < ROUNDS / 4; round++) {
        make_world(&world, round / 2 * FLOATS_N_KINDS + round % 2); /* uniform, integers */
        for (unsigned i = 0; (kernels = kv_pq_kernels_at(i)) != NULL; i++) {
            for (size_t j = 0; j < world.shape.m; j++)
                for (size_t c = 0; c < kv_pq_n_centroids(&world.shape); c++) {
                    const size_t width = world.shape.d / world.shape.m;
                    double sum = 0;

                    for (size_t at = 0; at < width; at++)
                        sum += pow((double)centroid_at(&world, j, c, at), 2) / 2;
                    assert_true(
                        fabs((double)
                                 world.half_squares[j * kv_pq_n_centroids(&world.shape) + c] -
                             sum) <= (double)width * 0x1p-24 * sum);
                }
            if (world.n > 40)
                world.n = 40;
            check_nearest(&world, kernels);
            check_products(&world, kernels);
            check_step(&world, kernels);
        }
        clear_world(&world);
    }
}

/* A NaN is never the nearest, and where all are, it is the first. */
static void nan_is_never_nearest(void **state)
{
    const struct kv_pq_shape shape = {.d = 8, .m = 1, .bits = 5};
    const struct kv_pq_kernels *kernels;
    float centroids[8 * 32], half_squares[32], keys[7 * 8];
    uint8_t codes[7];

    (void)state;
    for (unsigned tier = 0; (kernels = kv_pq_kernels_at(tier)) != NULL; tier++)
        for (unsigned only = 0; only < 32; only++) {
            floats_fill(&dice, FLOATS_UNIFORM, centroids, 8 * 32);
            floats_fill(&dice, FLOATS_UNIFORM, keys, 7 * 8);
            for (unsigned c = 0; c < 32; c++)
                centroids[3 * 32 + c] = c == only ? 0.5f : NAN;
            keys[6 * 8] = NAN;
            kv_pq_half_squares(&shape, centroids, half_squares);
            kernels->encode(&shape, centroids, half_squares, keys, 7, codes, 7);
            for (unsigned row = 0; row < 7; row++)
                assert_int_equal(codes[row], row == 6 ? 0 : only);
        }
}

/* The second of methods.md's checks.  Keys are made of few different sub-vectors of small
 * integers, so that all sums are exact; the first keys, moved a little, are the centroids to
 * begin with, and hold every sub-vector. */
static void few_sub_vectors(void **state)
{
    enum {
        D = 64,
        M = 4,
        WIDTH = D / M,
        BITS = 4,
        DISTINCT = 12,
        N = 7 * KV_PQ_TILE + 45,
        TOP = 100,
        STEPS_MAX = 20
    };
    const struct kv_pq_shape shape = {.d = D, .m = M, .bits = BITS};
    static float words[M][DISTINCT][WIDTH], keys[N][D], centroids[D << BITS], sums[D << BITS];
    static float half_squares[M << BITS], table[M << BITS], query[D], scores[N], exact[N];
    static uint32_t counts[M << BITS], chosen[TOP], expected[TOP], scratch[KV_SELECT_SCRATCH];
    static uint8_t codes[M * N];
    double moved = 1;
    int steps = 0;

    (void)state;
    floats_fill(&dice, FLOATS_INTEGERS, words[0][0], sizeof(words) / sizeof(float));
    for (size_t row = 0; row < N; row++)
        for (size_t j = 0; j < M; j++) {
            const size_t word =
                row < 1u << BITS ? (row + j) % DISTINCT : kv_random_below(&dice, DISTINCT);

            memcpy(&keys[row][j * WIDTH], words[j][word], sizeof(words[j][word]));
        }
    for (uint32_t c = 0; c < 1u << BITS; c++) {
        float key[D];

        for (size_t i = 0; i < D; i++)
            key[i] = keys[c][i] + floats_uniform(&dice) / 16;
        kv_pq_set_centroid(&shape, centroids, c, key);
    }
    for (; moved > 0 && steps < STEPS_MAX; steps++) {
        memset(sums, 0, sizeof(sums));
        memset(counts, 0, sizeof(counts));
        kv_pq_half_squares(&shape, centroids, half_squares);
        kv_pq_encode(&shape, centroids, half_squares, keys[0], N, codes, N);
        kv_pq_accumulate(&shape, keys[0], N, codes, N, sums, counts);
        moved = kv_pq_update(&shape, sums, counts, centroids);
    }
    assert_true(steps < STEPS_MAX);
    assert_true(steps > 1);

    for (int round = 0; round < 20; round++) {
        floats_fill(&dice, FLOATS_INTEGERS, query, D);
        kv_pq_table(&shape, centroids, query, table);
        for (size_t row = 0; row < N; row += KV_PQ_TILE) {
            const size_t n = N - row < KV_PQ_TILE ? N - row : KV_PQ_TILE;
            uint8_t tile[M * KV_PQ_TILE];

            for (size_t j = 0; j < M; j++)
                memcpy(tile + j * KV_PQ_TILE, codes + j * N + row, n);
            kv_pq_score(&shape, table, 1, tile, n, scores + row, n);
        }
        kv_keys_score(KV_KEY_FP32, keys, sizeof(keys[0]), N, D, query, 1, exact, N);
        for (size_t row = 0; row < N; row++)
            assert_true(scores[row] == exact[row]);
        assert_int_equal(kv_select(scores, N, TOP, chosen, scratch), TOP);
        assert_int_equal(kv_select(exact, N, TOP, expected, scratch), TOP);
        assert_memory_equal(chosen, expected, sizeof(chosen));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiers),
        cmocka_unit_test(shapes),
        cmocka_unit_test(same),
        cmocka_unit_test(right),
        cmocka_unit_test(nan_is_never_nearest),
        cmocka_unit_test(few_sub_vectors),
    };

    seed = floats_seed();
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
