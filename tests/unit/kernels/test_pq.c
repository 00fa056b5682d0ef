/* pq.h: every implementation that this CPU has gives the bits of the scalar one, of any shape,
 * place and values, also of NaN, infinities and ties, and writes nothing else.  The scalar one
 * is checked against plain sums in double.  Then what the method promises: a score from codes
 * is the query's product with the centroids, and with a centroid for each of the sub-vectors
 * that occur, the rows chosen by codes are those chosen by keys. */
#include "kernels/exact_scores.h"
#include "kernels/kmeans.h"
#include "kernels/pq.h"
#include "kernels/pq_tiles.h"
#include "kernels/select.h"
#include "tests/support/floats.h"

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

#define EXPECT(condition)                                                           \
    do {                                                                            \
        if (!(condition)) {                                                         \
            print_error("KV_TEST_SEED=%llu round %d %s %s d %u m %u bits %u: %s\n", \
                        (unsigned long long)seed, world->round, kernels->name,      \
                        kind_names[world->kind], world->shape.d, world->shape.m,    \
                        world->shape.bits, #condition);                             \
            fail();                                                                 \
        }                                                                           \
    } while (0)

/* Centroids of a random shape. */
struct world {
    int round;
    enum float_kind kind;
    struct kv_pq_shape shape;
    size_t n_table;
    float *centroids;
    void *base;
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
    world->round = round;
    world->kind = (enum float_kind)(round % FLOATS_N_KINDS);
    world->shape = some_shape();
    world->n_table = kv_pq_table_size(&world->shape);
    world->centroids = some_floats(kv_pq_centroids_size(&world->shape), &world->base);
    floats_fill(&dice, world->kind, world->centroids, kv_pq_centroids_size(&world->shape));
}

static void clear_world(struct world *world)
{
    free(world->base);
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

static void check_tables(const struct world *world,
                         const struct kv_pq_kernels *plain,
                         const struct kv_pq_kernels *kernels)
{
    const size_t n_queries = kv_random_below(&dice, QUERIES_MAX + 1);
    const uint32_t d = world->shape.d;
    void *bases[3];
    float *queries = some_floats(n_queries * d, &bases[0]);
    float *expected = some_floats(n_queries * world->n_table, &bases[1]);
    float *tables = some_floats(n_queries * world->n_table, &bases[2]);

    floats_fill(&dice, world->kind, queries, n_queries * d);
    plain->tables(&world->shape, world->centroids, queries, n_queries, expected);
    kernels->tables(&world->shape, world->centroids, queries, n_queries, tables);
    EXPECT(floats_all_same(tables, expected, n_queries * world->n_table));
    for (int i = 0; i < 3; i++)
        free(bases[i]);
}

static void same(void **state)
{
    const struct kv_pq_kernels *plain = kv_pq_kernels_at(0), *kernels;
    struct world world;

    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        make_world(&world, round);
        for (unsigned i = 1; (kernels = kv_pq_kernels_at(i)) != NULL; i++)
            check_tables(&world, plain, kernels);
        clear_world(&world);
    }
}

static float centroid_at(const struct world *world, size_t j, size_t code, size_t i)
{
    const size_t n_centroids = kv_pq_n_centroids(&world->shape);
    const size_t width = world->shape.d / world->shape.m;

    return world->centroids[(j * width + i) * n_centroids + code];
}

/* The sum of look-ups is the product with the centroids. */
static void check_products(const struct world *world, const struct kv_pq_kernels *kernels)
{
    const uint32_t d = world->shape.d;
    const size_t width = d / world->shape.m;
    float *query = malloc(d * sizeof(float)), *table = malloc(world->n_table * sizeof(float));
    static uint8_t codes[KV_PQ_SUBSPACES_MAX * KV_PQ_TILE], tile[KV_TILE_BYTES_MAX];
    float scores[KV_PQ_TILE];

    assert_true(query != NULL && table != NULL);
    floats_fill(&dice, world->kind, query, d);
    kernels->tables(&world->shape, world->centroids, query, 1, table);
    for (size_t i = 0; i < world->shape.m * KV_PQ_TILE; i++)
        codes[i] = (uint8_t)kv_random_below(&dice, kv_pq_n_centroids(&world->shape));
    kv_tile_put(&world->shape, tile, 0, KV_PQ_TILE, codes, KV_PQ_TILE);
    kv_tile_score(&world->shape, table, 1, tile, 0, KV_PQ_TILE, scores, KV_PQ_TILE);
    for (size_t row = 0; row < KV_PQ_TILE; row++) {
        double sum = 0, magnitude = 0;

        for (size_t i = 0; i < d; i++) {
            const size_t j = i / width;
            const double product =
                (double)query[i] *
                (double)centroid_at(world, j, codes[j * KV_PQ_TILE + row], i % width);

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

static void right(void **state)
{
    const struct kv_pq_kernels *kernels;
    struct world world;

    (void)state;
    for (int round = 0; round < ROUNDS / 4; round++) {
        make_world(&world, round / 2 * FLOATS_N_KINDS + round % 2); /* uniform, integers */
        for (unsigned i = 0; (kernels = kv_pq_kernels_at(i)) != NULL; i++)
            check_products(&world, kernels);
        clear_world(&world);
    }
}

/* Keys are made of few different sub-vectors of small
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
    static float half_squares[M << BITS], table[M << BITS], query[D], scores[N], exact[N],
        scratch[N];
    static uint32_t counts[M << BITS], chosen[TOP + KV_TOPK_SPARE],
        expected[TOP + KV_TOPK_SPARE];
    static uint8_t codes[M * N];
    const struct kv_kmeans_codebook book = {.centroids = centroids,
                                            .half_sq_norms = half_squares};
    const struct kv_kmeans_sums all = {.sums = sums, .counts = counts};
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
        kv_kmeans_set_centroid(&shape, &book, c, key);
    }
    kv_kmeans_half_sq_norms(&shape, &book);
    for (; moved > 0 && steps < STEPS_MAX; steps++) {
        kv_kmeans_step(&shape, &book, keys[0], N, codes, N, &all);
        moved = kv_kmeans_update(&shape, &book, &all);
    }
    assert_true(steps < STEPS_MAX);
    assert_true(steps > 1);

    for (int round = 0; round < 20; round++) {
        floats_fill(&dice, FLOATS_INTEGERS, query, D);
        kv_pq_tables(&shape, centroids, query, 1, table);
        for (size_t row = 0; row < N; row += KV_PQ_TILE) {
            const size_t n = N - row < KV_PQ_TILE ? N - row : KV_PQ_TILE;
            uint8_t tile[M * KV_PQ_TILE];

            kv_tile_put(&shape, tile, 0, n, codes + row, N);
            kv_tile_score(&shape, table, 1, tile, 0, n, scores + row, n);
        }
        kv_exact_scores_score(KV_KEY_FP32, keys, sizeof(keys[0]), N, D, query, 1, exact, N);
        for (size_t row = 0; row < N; row++)
            assert_true(scores[row] == exact[row]);
        assert_int_equal(kv_topk_select(scores, N, TOP, chosen, scratch), TOP);
        assert_int_equal(kv_topk_select(exact, N, TOP, expected, scratch), TOP);
        assert_memory_equal(chosen, expected, TOP * sizeof(uint32_t));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiers), cmocka_unit_test(shapes),          cmocka_unit_test(same),
        cmocka_unit_test(right), cmocka_unit_test(few_sub_vectors),
    };

    seed = floats_seed();
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
