/* exact_scores.h: every implementation that this CPU has gives the bits of the scalar one, of
 * all types, any dimension, stride and place, also of NaN and infinities, and writes nothing
 * else.  The scalar one is checked against the definition of the types and plain sums in
 * double. */
#include "kernels/exact_scores.h"
#include "proto/kv_types.h"
#include "tests/support/floats.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    ROUNDS = 4000,
    D_MAX = 256,
    N_MAX = 21,
    QUERIES_MAX = 9,
};

static const uint32_t guard_bits = 0x7fabcdef; /* a NaN that nothing computes */
static const char *const type_names[] = {"", "fp32", "fp16", "bf16"};

static uint64_t seed;
static struct kv_random dice;

struct shape {
    enum kv_key_type type;
    size_t d, n, stride, n_queries, scores_stride;
};

#define EXPECT(condition)                                                               \
    do {                                                                                \
        if (!(condition)) {                                                             \
            print_error(                                                                \
                "KV_TEST_SEED=%llu round %d %s %s d %zu n %zu stride %zu queries %zu: " \
                "%s\n",                                                                 \
                (unsigned long long)seed, round, kernels->name, type_names[shape.type], \
                shape.d, shape.n, shape.stride, shape.n_queries, #condition);           \
            fail();                                                                     \
        }                                                                               \
    } while (0)

static size_t element_bytes(enum kv_key_type type)
{
    return type == KV_KEY_FP32 ? 4 : 2;
}

/* The value by the definition of IEEE 754 and of bf16, in double. */
static double value_of(enum kv_key_type type, const uint8_t *at)
{
    const int exponent_bits = type == KV_KEY_FP16 ? 5 : 8;
    const int fraction_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
    uint16_t half;
    float value;

    if (type == KV_KEY_FP32) {
        memcpy(&value, at, sizeof(value));
        return (double)value;
    }
    memcpy(&half, at, sizeof(half));

    const int exponent = half >> fraction_bits & ((1 << exponent_bits) - 1);
    const int fraction = half & ((1 << fraction_bits) - 1);
    const double sign = half & 0x8000 ? -1 : 1;

    if (exponent == (1 << exponent_bits) - 1)
        return fraction != 0 ? NAN : sign * INFINITY;
    if (exponent == 0)
        return sign * ldexp(fraction, 1 - bias - fraction_bits);
    return sign * ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

static struct shape some_shape(void)
{
    struct shape shape;

    shape.type = (enum kv_key_type)(1 + kv_random_below(&dice, 3));
    shape.d = kv_random_below(&dice, 2) == 0 ? 16 * (1 + kv_random_below(&dice, D_MAX / 16))
                                             : kv_random_below(&dice, D_MAX + 1);
    shape.n = kv_random_below(&dice, N_MAX + 1);
    shape.stride = shape.d * element_bytes(shape.type) +
                   (kv_random_below(&dice, 2) == 0 ? 0 : kv_random_below(&dice, 70));
    shape.n_queries = kv_random_below(&dice, QUERIES_MAX + 1);
    shape.scores_stride = shape.n + kv_random_below(&dice, 5);
    return shape;
}

static size_t keys_bytes(const struct shape *shape)
{
    return shape->n == 0
               ? 0
               : (shape->n - 1) * shape->stride + shape->d * element_bytes(shape->type);
}

/* Scores that are not too large of `kind` FLOATS_UNIFORM, else any. */
static void make_keys(const struct shape *shape, enum float_kind kind, uint8_t *keys)
{
    const size_t bytes = element_bytes(shape->type);

    kv_random_fill(&dice, keys, keys_bytes(shape));
    if (kind == FLOATS_ANY_BITS)
        return;
    for (size_t row = 0; row < shape->n; row++)
        for (size_t i = 0; i < shape->d; i++) {
            uint8_t *at = keys + row * shape->stride + i * bytes;
            const float value = floats_one(&dice, kind);
            uint16_t half;

            if (shape->type == KV_KEY_FP32) {
                memcpy(at, &value, sizeof(value));
            } else if (kind != FLOATS_SPECIAL || kv_random_below(&dice, 8) != 0) {
                memcpy(&half, at, sizeof(half));
                /* exponents from 2^-8 to 2^-1, or 0 */
                if (shape->type == KV_KEY_FP16)
                    half = (uint16_t)((half & 0x83ff) | (7 + half % 8) << 10);
                else
                    half = (uint16_t)((half & 0x807f) | (119 + half % 8) << 7);
                if (kv_random_below(&dice, 16) == 0)
                    half &= 0x8000;
                memcpy(at, &half, sizeof(half));
            }
        }
}

static void guard(float *values, size_t n)
{
    for (size_t i = 0; i < n; i++)
        memcpy(&values[i], &guard_bits, sizeof(guard_bits));
}

static bool is_guarded(const float *value)
{
    return memcmp(value, &guard_bits, sizeof(guard_bits)) == 0;
}

static void tiers(void **state)
{
    unsigned n = 0;

    (void)state;
    for (; kv_exact_scores_kernels_at(n) != NULL; n++)
        print_message("keys: %s\n", kv_exact_scores_kernels_at(n)->name);
    assert_true(n >= 1);
    assert_string_equal(kv_exact_scores_kernels_at(0)->name, "scalar");
    assert_null(kv_exact_scores_kernels_at(~0u));
    assert_int_equal(KV_KEY_FP32, KV_FP32);
    assert_int_equal(KV_KEY_FP16, KV_FP16);
    assert_int_equal(KV_KEY_BF16, KV_BF16);
    for (unsigned type = 0; type < 10; type++)
        assert_int_equal(kv_key_type_valid(type), type >= 1 && type <= 3);
}

static void every_half(void **state)
{
    static uint16_t halves[1 << 16];
    static float values[1 << 16];
    const struct kv_exact_scores_kernels *kernels;

    (void)state;
    for (unsigned i = 0; i < 1 << 16; i++)
        halves[i] = (uint16_t)i;
    for (unsigned tier = 0; (kernels = kv_exact_scores_kernels_at(tier)) != NULL; tier++)
        for (unsigned type = KV_KEY_FP16; type <= KV_KEY_BF16; type++) {
            kernels->load((enum kv_key_type)type, halves, 32, 1 << 12, 16, values);
            for (unsigned i = 0; i < 1 << 16; i++)
                assert_true(
                    floats_same(values[i], (float)value_of((enum kv_key_type)type,
                                                           (const uint8_t *)&halves[i])));
        }
}

/* Scores of `kernels`, contiguous keys or a list of them, and what is around them. */
static void check_scores(int round,
                         struct shape shape,
                         const struct kv_exact_scores_kernels *kernels,
                         const uint8_t *keys,
                         const float *queries,
                         const float *expected)
{
    const size_t n_scores = shape.n_queries * shape.scores_stride;
    size_t order[N_MAX + 1];
    void *bases[2];
    float *scores = floats_exact(&dice, n_scores * sizeof(float), sizeof(float), &bases[0]);
    const void **list =
        floats_exact(&dice, shape.n * sizeof(void *), sizeof(void *), &bases[1]);

    guard(scores, n_scores);
    kernels->score(shape.type, keys, shape.stride, shape.n, shape.d, queries, shape.n_queries,
                   scores, shape.scores_stride);
    for (size_t query = 0; query < shape.n_queries; query++)
        for (size_t row = 0; row < shape.scores_stride; row++) {
            const float *at = scores + query * shape.scores_stride + row;

            EXPECT(row < shape.n ? floats_same(*at, expected[query * shape.n + row])
                                 : is_guarded(at));
        }

    /* Any order, also one key more than once. */
    for (size_t row = 0; row < shape.n; row++) {
        order[row] = kv_random_below(&dice, shape.n);
        list[row] = keys + order[row] * shape.stride;
    }
    guard(scores, n_scores);
    kernels->score_list(shape.type, list, shape.n, shape.d, queries, shape.n_queries, scores,
                        shape.scores_stride);
    for (size_t query = 0; query < shape.n_queries; query++)
        for (size_t row = 0; row < shape.scores_stride; row++) {
            const float *at = scores + query * shape.scores_stride + row;

            EXPECT(row < shape.n ? floats_same(*at, expected[query * shape.n + order[row]])
                                 : is_guarded(at));
        }
    free(bases[0]);
    free(bases[1]);
}

static void same_and_right(void **state)
{
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const struct kv_exact_scores_kernels *kernels = kv_exact_scores_kernels_at(0);
        const enum float_kind kind = (enum float_kind)(round % FLOATS_N_KINDS);
        const struct shape shape = some_shape();
        const size_t n_values = shape.n * shape.d;
        void *bases[4];
        uint8_t *keys = floats_exact(&dice, keys_bytes(&shape), 1, &bases[0]);
        float *queries =
            floats_exact(&dice, shape.n_queries * shape.d * sizeof(float), 4, &bases[1]);
        float *expected =
            floats_exact(&dice, shape.n_queries * shape.n * sizeof(float), 4, &bases[2]);
        float *values = floats_exact(&dice, n_values * sizeof(float), 4, &bases[3]);

        make_keys(&shape, kind, keys);
        floats_fill(&dice, kind, queries, shape.n_queries * shape.d);
        kernels->score(shape.type, keys, shape.stride, shape.n, shape.d, queries,
                       shape.n_queries, expected, shape.n);
        for (unsigned i = 0; (kernels = kv_exact_scores_kernels_at(i)) != NULL; i++) {
            guard(values, n_values);
            kernels->load(shape.type, keys, shape.stride, shape.n, shape.d, values);
            for (size_t at = 0; at < n_values; at++)
                EXPECT(floats_same(
                    values[at],
                    (float)value_of(shape.type, keys + at / shape.d * shape.stride +
                                                    at % shape.d * element_bytes(shape.type))));
            check_scores(round, shape, kernels, keys, queries, expected);
        }
        kernels = kv_exact_scores_kernels_at(0);
        if (kind == FLOATS_UNIFORM || kind == FLOATS_INTEGERS)
            for (size_t query = 0; query < shape.n_queries; query++)
                for (size_t row = 0; row < shape.n; row++) {
                    double sum = 0, magnitude = 0;

                    for (size_t i = 0; i < shape.d; i++) {
                        const double product = (double)queries[query * shape.d + i] *
                                               (double)values[row * shape.d + i];

                        sum += product;
                        magnitude += fabs(product);
                    }
                    /* d / 16 roundings in a lane and four of the lanes. */
                    EXPECT(fabs((double)expected[query * shape.n + row] - sum) <=
                           (double)(shape.d / 16 + 6) * 0x1p-24 * magnitude + 1e-37);
                }
        for (int i = 0; i < 4; i++)
            free(bases[i]);
    }
}

/* Products that vanish leave -0 in a lane; the end of a row does not touch the lanes that have
 * no element there. */
static void vanishing_products(void **state)
{
    const struct kv_exact_scores_kernels *plain = kv_exact_scores_kernels_at(0), *kernels;
    float key[64], query[64], expected, score;

    (void)state;
    for (size_t i = 0; i < 64; i++) {
        key[i] = -1e-30f;
        query[i] = 1e-30f;
    }
    for (size_t d = 0; d <= 64; d++) {
        plain->score(KV_KEY_FP32, key, sizeof(key), 1, d, query, 1, &expected, 1);
        assert_true(floats_same(expected, d < 16 ? 0.0f : -0.0f));
        for (unsigned i = 1; (kernels = kv_exact_scores_kernels_at(i)) != NULL; i++) {
            kernels->score(KV_KEY_FP32, key, sizeof(key), 1, d, query, 1, &score, 1);
            assert_true(floats_same(score, expected));
        }
    }
}

/* A long list: keys asked for ahead are those of the list. */
static void long_lists(void **state)
{
    enum {
        ROWS = 3001,
        D = 64
    };
    static float keys[ROWS][D], query[D], expected[ROWS], scores[ROWS];
    static const void *list[ROWS];
    const struct kv_exact_scores_kernels *kernels;

    (void)state;
    floats_fill(&dice, FLOATS_UNIFORM, keys[0], (size_t)ROWS * D);
    floats_fill(&dice, FLOATS_UNIFORM, query, D);
    for (size_t i = 0; i < ROWS; i++)
        list[i] = keys[ROWS - 1 - i];
    kv_exact_scores_score(KV_KEY_FP32, keys, sizeof(keys[0]), ROWS, D, query, 1, expected,
                          ROWS);
    for (unsigned i = 0; (kernels = kv_exact_scores_kernels_at(i)) != NULL; i++) {
        kernels->score_list(KV_KEY_FP32, list, ROWS, D, query, 1, scores, ROWS);
        for (size_t row = 0; row < ROWS; row++)
            assert_true(floats_same(scores[row], expected[ROWS - 1 - row]));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiers),          cmocka_unit_test(every_half),
        cmocka_unit_test(same_and_right), cmocka_unit_test(vanishing_products),
        cmocka_unit_test(long_lists),
    };

    seed = floats_seed();
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
