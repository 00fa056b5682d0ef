/* key_copies.h: every implementation that this CPU has gives the bytes and the bits of the
 * scalar one, of any dimension, rows, place and list, also of NaN, infinities and zeros, and
 * writes nothing else.  The scalar one is checked against the layout and the definition in
 * double, its scores against the bound that the header gives. */
#include "kernels/key_copies.h"
#include "tests/support/floats.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    ROUNDS = 600,
    N_MAX = 90, /* more than are prefetched */
    QUERIES_MAX = 11,
    BLOCKS = 3,
};

static const uint32_t guard_bits = 0x7fabcdef; /* a NaN that nothing computes */

static uint64_t seed;
static struct kv_random dice;

struct shape {
    size_t d, n, n_queries, scores_stride;
};

#define EXPECT(condition)                                                                 \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            print_error("KV_TEST_SEED=%llu round %d %s d %zu n %zu queries %zu: %s\n",    \
                        (unsigned long long)seed, round, kernels->name, shape.d, shape.n, \
                        shape.n_queries, #condition);                                     \
            fail();                                                                       \
        }                                                                                 \
    } while (0)

static struct shape some_shape(int round)
{
    static const size_t dimensions[] = {1, 3, 16, 33, 64, 80, 96, 128, 129, 256, 1024};
    struct shape shape;

    shape.d = round % 3 == 0
                  ? 1 + kv_random_below(&dice, 300)
                  : dimensions[kv_random_below(&dice, sizeof(dimensions) / sizeof(size_t))];
    shape.n = kv_random_below(&dice, N_MAX + 1);
    shape.n_queries = 1 + kv_random_below(&dice, QUERIES_MAX);
    shape.scores_stride = shape.n + kv_random_below(&dice, 5);
    return shape;
}

/* ---- the layout, as the header has it ---------------------------------------------------- */

static unsigned code_at(size_t d, const uint8_t *copies, size_t row, size_t i)
{
    const size_t h = kv_key_copy_bytes(d);
    const uint8_t *group = copies + row / 32 * (32 * h + 64);
    const uint8_t byte = group[row % 32 * h + i % h];

    return i < h ? byte & 15u : byte >> 4;
}

static double scale_at(size_t d, const uint8_t *copies, size_t row)
{
    const size_t h = kv_key_copy_bytes(d);
    const uint8_t *at = copies + row / 32 * (32 * h + 64) + 32 * h + row % 32 * 2;
    const unsigned half = at[0] | (unsigned)at[1] << 8;
    const int exponent = half >> 10 & 31, fraction = half & 1023;

    assert_true(exponent < 31 && half < 0x8000);
    return exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
}

static void tiers(void **state)
{
    unsigned n = 0;

    (void)state;
    for (; kv_key_copies_kernels_at(n) != NULL; n++)
        print_message("key copies: %s\n", kv_key_copies_kernels_at(n)->name);
    assert_true(n >= 1);
    assert_string_equal(kv_key_copies_kernels_at(0)->name, "scalar");
    assert_null(kv_key_copies_kernels_at(~0u));
    assert_int_equal(kv_key_copy_bytes(1), 16);
    assert_int_equal(kv_key_copy_bytes(64), 32);
    assert_int_equal(kv_key_copy_bytes(80), 48);
    assert_int_equal(kv_key_copy_bytes(128), 64);
    assert_int_equal(kv_key_copy_bytes(129), 80);
    assert_int_equal(kv_key_copies_bytes(128), 128 * 66);
}

/* ---- by hand ----------------------------------------------------------------------------- */

static void by_hand(void **state)
{
    enum {
        D = 20 /* h is 16: elements 16 to 19 are upper halves */
    };
    static uint8_t copies[KV_PQ_TILE * (16 + 2)];
    static const float mean[D] = {1, 1, 1, [16] = -2};
    const struct kv_key_copies_kernels *kernels;
    float key[D] = {0}, query[D] = {0}, score;
    uint32_t rounded[32];

    (void)state;
    assert_int_equal(kv_key_copies_bytes(D), sizeof(copies));
    assert_true(kv_key_copies_query_bytes(D, 1) <= sizeof(rounded));
    /* Differences 30, -30, 3, 0 and so on: the scale is 2, the codes are 15, 0, 8.25 and 7.5. */
    key[0] = 31;
    key[1] = -29;
    key[2] = 4;
    key[16] = -2 - 18; /* 3 */
    key[19] = 4;       /* 8.5, to the even one */
    query[0] = 127;
    query[1] = -1;
    query[16] = 2.5f; /* to the even one */
    for (unsigned i = 0; (kernels = kv_key_copies_kernels_at(i)) != NULL; i++) {
        const void *list = copies;
        const uint8_t row = 37;

        memset(copies, 0xee, sizeof(copies));
        kernels->put(D, mean, key, row, 1, copies);
        for (size_t j = 0; j < 32; j++)
            assert_int_equal(code_at(D, copies, row, j), j == 0    ? 15
                                                         : j == 1  ? 0
                                                         : j == 16 ? 3
                                                                   : 8);
        assert_true(scale_at(D, copies, row) == 2);
        kernels->round(D, query, 1, rounded);
        kv_key_copies_dots(D, mean, query, 1, rounded);
        kernels->score_list(D, &list, &row, 1, rounded, 1, &score, 1);
        /* dot + 2 * (127 * 15 - -15 + 2 * -9); the last product is 2.5 rounded times -18. */
        assert_true(score == 127 - 1 - 5 + 2 * (127 * 15 + 15 - 2 * 9));
    }
}

/* A scale is rounded to the nearest fp16, ties to even, and kept finite. */
static void scales(void **state)
{
    static const struct {
        float largest; /* over 15 */
        double scale;
    } cases[] = {
        {1, 1},
        {1 + 0x1p-11f, 1},
        {1 + 0x1.8p-10f, 1 + 0x1p-9},
        {1 + 0x1.002p-11f, 1 + 0x1p-10},
        {0x1.ffep+0f, 2}, /* a carry */
        {0x1p-14f, 0x1p-14},
        {0x1.ffep-15f, 0x1p-14}, /* a subnormal number becomes normal */
        {0x1.8p-24f, 0x1p-23},
        {0x1p-24f, 0x1p-24},
        {0x1p-25f, 0},
        {0x1.01p-25f, 0x1p-24},
        {1e-40f, 0},
        {0, 0},
        {65504, 65504},
        {65536, 65504},
        {1e30f, 65504},
        {INFINITY, 65504},
        {NAN, 0},
    };
    static uint8_t copies[KV_PQ_TILE * (16 + 2)];
    const struct kv_key_copies_kernels *kernels;

    (void)state;
    for (unsigned i = 0; (kernels = kv_key_copies_kernels_at(i)) != NULL; i++)
        for (size_t j = 0; j < sizeof(cases) / sizeof(cases[0]); j++) {
            const float mean[2] = {0}, key[2] = {0, -15 * cases[j].largest};

            kernels->put(2, mean, key, j, 1, copies);
            if (scale_at(2, copies, j) != cases[j].scale) {
                print_error("%s, case %zu: %a\n", kernels->name, j, scale_at(2, copies, j));
                fail();
            }
            if (cases[j].scale == 0)
                assert_int_equal(code_at(2, copies, j, 1), 8);
            else
                assert_true(code_at(2, copies, j, 1) < 8);
            assert_int_equal(code_at(2, copies, j, 0), 8);
        }
}

/* An element that is no number costs its row or its query no more than the header says. */
static void not_numbers(void **state)
{
    static uint8_t copies[KV_PQ_TILE * (16 + 2)];
    const struct kv_key_copies_kernels *kernels;
    uint32_t rounded[32];

    (void)state;
    for (unsigned i = 0; (kernels = kv_key_copies_kernels_at(i)) != NULL; i++) {
        const float mean[4] = {0}, keys[8] = {NAN, 15, -15, 3, INFINITY, -INFINITY, 1, NAN};
        const float queries[16] = {NAN, 127, -127, 3,   INFINITY, -INFINITY, 1,      NAN,
                                   0,   NAN, 0,    -0., 1e-45f,   -1e-45f,   1e-45f, 0};
        static const int codes[8] = {8, 15, 0, 9, 15, 0, 8, 8};
        static const int8_t expected[16] = {0, 127, -127, 3, 127, -127};
        const int8_t *q8 = (const int8_t *)rounded;

        kernels->put(4, mean, keys, 0, 2, copies);
        for (size_t j = 0; j < 8; j++)
            assert_int_equal(code_at(4, copies, j / 4, j % 4), codes[j]);
        assert_true(scale_at(4, copies, 0) == 1 && scale_at(4, copies, 1) == 65504);
        for (size_t query = 0; query < 4; query++) {
            kernels->round(4, queries + 4 * query, 1, rounded);
            assert_memory_equal(q8, expected + 4 * query, 4);
        }
    }
}

/* ---- every implementation beside the scalar one ------------------------------------------ */

static void guard(float *values, size_t n)
{
    for (size_t i = 0; i < n; i++)
        memcpy(&values[i], &guard_bits, sizeof(guard_bits));
}

static bool is_guarded(const float *value)
{
    return memcmp(value, &guard_bits, sizeof(guard_bits)) == 0;
}

struct inputs {
    float *mean, *keys, *queries; /* (d), (BLOCKS * KV_PQ_TILE, d), (n_queries, d) */
    uint8_t *copies[BLOCKS];
    void *rounded;
    const void **blocks;
    uint8_t *rows;
    float *scores;
    void *bases[BLOCKS + 7];
    size_t n_bases;
};

static void *take(struct inputs *inputs, size_t bytes, size_t alignment)
{
    return floats_exact(&dice, bytes, alignment, &inputs->bases[inputs->n_bases++]);
}

static struct inputs make_inputs(const struct shape *shape, enum float_kind kind)
{
    struct inputs inputs = {.n_bases = 0};

    inputs.mean = take(&inputs, shape->d * sizeof(float), 4);
    inputs.keys = take(&inputs, BLOCKS * KV_PQ_TILE * shape->d * sizeof(float), 4);
    inputs.queries = take(&inputs, shape->n_queries * shape->d * sizeof(float), 4);
    inputs.rounded = take(&inputs, kv_key_copies_query_bytes(shape->d, shape->n_queries), 4);
    inputs.blocks = take(&inputs, shape->n * sizeof(void *), sizeof(void *));
    inputs.rows = take(&inputs, shape->n, 1);
    inputs.scores = take(&inputs, shape->n_queries * shape->scores_stride * sizeof(float), 4);
    floats_fill(&dice, kind, inputs.mean, shape->d);
    floats_fill(&dice, kind, inputs.keys, BLOCKS * KV_PQ_TILE * shape->d);
    floats_fill(&dice, kind, inputs.queries, shape->n_queries * shape->d);
    for (unsigned block = 0; block < BLOCKS; block++)
        inputs.copies[block] = take(&inputs, kv_key_copies_bytes(shape->d), 1);
    for (size_t i = 0; i < shape->n; i++) {
        inputs.blocks[i] = inputs.copies[kv_random_below(&dice, BLOCKS)];
        inputs.rows[i] = (uint8_t)kv_random_below(&dice, KV_PQ_TILE);
    }
    return inputs;
}

static void free_inputs(struct inputs *inputs)
{
    for (size_t i = 0; i < inputs->n_bases; i++)
        free(inputs->bases[i]);
}

/* Codes of row 0 of block 0, and of a list's scores, against the definition in double. */
static void check_definition(int round, struct shape shape, const struct inputs *inputs)
{
    const struct kv_key_copies_kernels *kernels = kv_key_copies_kernels_at(0);
    const size_t d = shape.d, h = kv_key_copy_bytes(d);
    const double scale = scale_at(d, inputs->copies[0], 0);
    double largest = 0;

    for (size_t i = 0; i < d; i++) {
        const double y = (double)inputs->keys[i] - (double)inputs->mean[i];
        const double code = code_at(d, inputs->copies[0], 0, i);

        largest = fmax(largest, fabs(y));
        EXPECT(fabs(y - (2 * code - 15) * scale) <= 1.001 * scale + 0x1p-21);
    }
    EXPECT(fabs(largest / 15 - scale) <= 0x1.01p-11 * scale + 0x1p-25);
    for (size_t i = d; i < 2 * h; i++)
        EXPECT(code_at(d, inputs->copies[0], 0, i) == 8);

    for (size_t query = 0; query < shape.n_queries; query++)
        for (size_t i = 0; i < shape.n; i++) {
            const float *q = inputs->queries + query * d, *key;
            double exact = 0, sum = 0, most = 0, of_mean = 0;
            size_t block = 0;

            while (inputs->blocks[i] != inputs->copies[block])
                block++;
            key = inputs->keys + (block * KV_PQ_TILE + inputs->rows[i]) * d;
            for (size_t j = 0; j < d; j++) {
                exact += (double)q[j] * (double)key[j];
                sum += fabs((double)q[j]);
                most = fmax(most, fabs((double)q[j]));
                of_mean += fabs((double)q[j] * (double)inputs->mean[j]);
            }
            const double s = scale_at(d, inputs->copies[block], inputs->rows[i]);
            const double bound = (1.001 * s + 0x1p-21) * sum +
                                 7.51 * (double)d * s * (most / 127) +
                                 ((double)d / 16 + 8) * 0x1p-24 * of_mean + 1e-30;

            EXPECT(fabs((double)inputs->scores[query * shape.scores_stride + i] - exact) <=
                   bound);
        }
}

static void same_and_right(void **state)
{
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const struct kv_key_copies_kernels *kernels = kv_key_copies_kernels_at(0);
        const enum float_kind kind = (enum float_kind)(round % FLOATS_N_KINDS);
        const struct shape shape = some_shape(round);
        const size_t bytes = kv_key_copies_bytes(shape.d);
        const size_t query_bytes = kv_key_copies_query_bytes(shape.d, shape.n_queries);
        const size_t n_scores = shape.n_queries * shape.scores_stride;
        struct inputs inputs = make_inputs(&shape, kind);
        uint8_t *expected = malloc(bytes), *expected_queries = malloc(query_bytes);
        float *expected_scores = malloc((n_scores > 0 ? n_scores : 1) * sizeof(float));

        for (unsigned block = 0; block < BLOCKS; block++)
            kernels->put(shape.d, inputs.mean, inputs.keys + block * KV_PQ_TILE * shape.d, 0,
                         KV_PQ_TILE, inputs.copies[block]);
        kernels->round(shape.d, inputs.queries, shape.n_queries, inputs.rounded);
        kv_key_copies_dots(shape.d, inputs.mean, inputs.queries, shape.n_queries,
                           inputs.rounded);
        kernels->score_list(shape.d, inputs.blocks, inputs.rows, shape.n, inputs.rounded,
                            shape.n_queries, inputs.scores, shape.scores_stride);
        if (kind == FLOATS_UNIFORM || kind == FLOATS_INTEGERS || kind == FLOATS_EQUAL)
            check_definition(round, shape, &inputs);
        memcpy(expected_queries, inputs.rounded, query_bytes);
        memcpy(expected_scores, inputs.scores, n_scores * sizeof(float));
        for (unsigned i = 1; (kernels = kv_key_copies_kernels_at(i)) != NULL; i++) {
            const size_t begin = kv_random_below(&dice, KV_PQ_TILE + 1);
            const size_t n = kv_random_below(&dice, KV_PQ_TILE + 1 - begin);
            const float *keys = inputs.keys + (KV_PQ_TILE + begin) * shape.d;

            /* Some rows of block 1 once more, into what is there. */
            kv_random_fill(&dice, inputs.copies[0], bytes);
            memcpy(expected, inputs.copies[0], bytes);
            kernels->put(shape.d, inputs.mean, keys, begin, n, inputs.copies[0]);
            kv_key_copies_kernels_at(0)->put(shape.d, inputs.mean, keys, begin, n, expected);
            EXPECT(memcmp(inputs.copies[0], expected, bytes) == 0);
            kv_key_copies_kernels_at(0)->put(shape.d, inputs.mean, inputs.keys, 0, KV_PQ_TILE,
                                             inputs.copies[0]);

            memset(inputs.rounded, 0xee, query_bytes);
            kernels->round(shape.d, inputs.queries, shape.n_queries, inputs.rounded);
            kv_key_copies_dots(shape.d, inputs.mean, inputs.queries, shape.n_queries,
                               inputs.rounded);
            /* Dots may be NaN, of which any is as good. */
            EXPECT(memcmp(inputs.rounded, expected_queries,
                          shape.n_queries * 2 * kv_key_copy_bytes(shape.d)) == 0);
            for (size_t at = query_bytes - 3 * 4 * shape.n_queries; at < query_bytes; at += 4) {
                float a, b;

                memcpy(&a, (uint8_t *)inputs.rounded + at, sizeof(a));
                memcpy(&b, expected_queries + at, sizeof(b));
                EXPECT(floats_same(a, b));
            }

            guard(inputs.scores, n_scores);
            kernels->score_list(shape.d, inputs.blocks, inputs.rows, shape.n, inputs.rounded,
                                shape.n_queries, inputs.scores, shape.scores_stride);
            for (size_t at = 0; at < n_scores; at++)
                EXPECT(at % shape.scores_stride < shape.n
                           ? floats_same(inputs.scores[at], expected_scores[at])
                           : is_guarded(&inputs.scores[at]));
        }
        free(expected);
        free(expected_queries);
        free(expected_scores);
        free_inputs(&inputs);
    }
}

/* The largest sums that there are: no instruction set may round or saturate them. */
static void largest_sums(void **state)
{
    enum {
        D = KV_KEY_COPY_D_MAX
    };
    static float key[D], mean[D], queries[KV_KEY_COPIES_QUERIES_MAX][D];
    static uint8_t copies[KV_PQ_TILE * (D / 2 + 2)];
    static float rounded[KV_KEY_COPIES_QUERIES_MAX * (D / 4 + 3)];
    const struct kv_key_copies_kernels *kernels;
    const void *list = copies;
    const uint8_t row = 127;
    float scores[KV_KEY_COPIES_QUERIES_MAX];

    (void)state;
    assert_true(kv_key_copies_query_bytes(D, KV_KEY_COPIES_QUERIES_MAX) == sizeof(rounded));
    for (size_t i = 0; i < D; i++) {
        key[i] = 15;
        for (size_t query = 0; query < KV_KEY_COPIES_QUERIES_MAX; query++)
            queries[query][i] = query % 2 == 0 ? 127 : -127;
    }
    for (unsigned i = 0; (kernels = kv_key_copies_kernels_at(i)) != NULL; i++) {
        kernels->put(D, mean, key, row, 1, copies);
        kernels->round(D, queries[0], KV_KEY_COPIES_QUERIES_MAX, rounded);
        kv_key_copies_dots(D, mean, queries[0], KV_KEY_COPIES_QUERIES_MAX, rounded);
        kernels->score_list(D, &list, &row, 1, rounded, KV_KEY_COPIES_QUERIES_MAX, scores, 1);
        for (size_t query = 0; query < KV_KEY_COPIES_QUERIES_MAX; query++)
            assert_true(scores[query] == (query % 2 == 0 ? 15.f * 127 * D : -15.f * 127 * D));
    }
}

/* Rounded queries with the dots of another mean are those rounded with it. */
static void another_mean(void **state)
{
    enum {
        D = 100,
        QUERIES = 5
    };
    float means[2][D], queries[QUERIES][D];
    uint32_t rounded[2][QUERIES * (2 * 64 + 12) / 4];

    (void)state;
    assert_int_equal(kv_key_copies_query_bytes(D, QUERIES), sizeof(rounded[0]));
    floats_fill(&dice, FLOATS_UNIFORM, means[0], 2 * D);
    floats_fill(&dice, FLOATS_UNIFORM, queries[0], QUERIES * D);
    kv_key_copies_round(D, means[0], queries[0], QUERIES, rounded[0]);
    kv_key_copies_round(D, means[1], queries[0], QUERIES, rounded[1]);
    assert_memory_not_equal(rounded[0], rounded[1], sizeof(rounded[0]));
    kv_key_copies_dots(D, means[1], queries[0], QUERIES, rounded[0]);
    assert_memory_equal(rounded[0], rounded[1], sizeof(rounded[0]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiers),          cmocka_unit_test(by_hand),
        cmocka_unit_test(scales),         cmocka_unit_test(not_numbers),
        cmocka_unit_test(same_and_right), cmocka_unit_test(largest_sums),
        cmocka_unit_test(another_mean),
    };

    seed = floats_seed();
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
