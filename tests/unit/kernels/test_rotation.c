/* rotation.h: the axes are orthogonal, so that no inner product changes; along them, keys vary
 * independently; subspaces get them in rounds.  Judged by plain sums in double, and by hand. */
#include "kernels/rotation.h"
#include "tests/support/floats.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    ROUNDS = 60,
    KEYS = 1500,
};

static uint64_t seed;
static struct kv_random dice;

static const struct {
    uint32_t d, m;
} shapes[] = {{1, 1},  {2, 1},   {2, 2},   {3, 1},    {5, 5},   {16, 4},
              {24, 2}, {64, 16}, {80, 2},  {96, 4},   {128, 2}, {128, 4},
              {64, 2}, {6, 3},   {255, 3}, {256, 16}, {128, 16}};

/* Makes the matrix of n keys, in pieces of all sizes. */
static float *make(uint32_t d, uint32_t m, const float *keys, size_t n)
{
    float *matrix = calloc(kv_rotation_size(d), sizeof(*matrix));
    void *work = calloc(1, kv_rotation_work_bytes(d));

    assert_non_null(matrix);
    assert_non_null(work);
    for (size_t at = 0, some; at < n; at += some) {
        some = 1 + kv_random_below(&dice, n - at);
        kv_rotation_add(d, work, keys + at * d, some);
    }
    while (!kv_rotation_diagonalize(d, work, 1 + (uint32_t)kv_random_below(&dice, d * d)))
        ;
    kv_rotation_deal(d, m, work, matrix);
    free(work);
    return matrix;
}

/* Keys of which a few directions, not those of their elements, have most of the variance. */
static float *some_keys(uint32_t d)
{
    float *mix = malloc(d * d * sizeof(*mix)), *keys = calloc((size_t)KEYS * d, sizeof(*keys));
    float *mean = malloc(d * sizeof(*mean));

    floats_fill(&dice, FLOATS_UNIFORM, mix, (size_t)d * d);
    floats_fill(&dice, FLOATS_UNIFORM, mean, d);
    for (size_t n = 0; n < KEYS; n++) {
        for (uint32_t i = 0; i < d; i++) {
            const float size = floats_uniform(&dice) * 10 / (float)(1 + i);

            for (uint32_t j = 0; j < d; j++)
                keys[n * d + j] += size * mix[(size_t)i * d + j];
        }
        for (uint32_t j = 0; j < d; j++)
            keys[n * d + j] += 3 * mean[j];
    }
    free(mean);
    free(mix);
    return keys;
}

static double dot(const float *x, const float *y, uint32_t d)
{
    double sum = 0;

    for (uint32_t i = 0; i < d; i++)
        sum += (double)x[i] * (double)y[i];
    return sum;
}

static double covariance(const float *keys, uint32_t d, uint32_t i, uint32_t j)
{
    double products = 0, one = 0, other = 0;

    for (size_t n = 0; n < KEYS; n++) {
        products += (double)keys[n * d + i] * (double)keys[n * d + j];
        one += (double)keys[n * d + i];
        other += (double)keys[n * d + j];
    }
    return products / KEYS - one / KEYS * (other / KEYS);
}

static void test_rotates(void **state)
{
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const uint32_t d = shapes[round % (sizeof(shapes) / sizeof(shapes[0]))].d;
        const uint32_t m = shapes[round % (sizeof(shapes) / sizeof(shapes[0]))].m;
        float *keys = some_keys(d);
        float *matrix = make(d, m, keys, KEYS), *again = make(d, m, keys, KEYS);
        float *rotated = malloc((size_t)KEYS * d * sizeof(*rotated));
        double total = 0, off = 0;

        /* Pieces of other sizes give the same bits. */
        assert_memory_equal(matrix, again, kv_rotation_size(d) * sizeof(*matrix));
        kv_rotate(d, matrix, keys, KEYS, rotated);
        for (int i = 0; i < 200; i++) {
            const float *x = keys + kv_random_below(&dice, KEYS) * d;
            const float *y = keys + kv_random_below(&dice, KEYS) * d;
            const float *x_rotated = rotated + (x - keys), *y_rotated = rotated + (y - keys);
            const double size = sqrt(dot(x, x, d) * dot(y, y, d));

            assert_true(fabs(dot(x, y, d) - dot(x_rotated, y_rotated, d)) <= 4e-6 * size);
        }
        for (uint32_t i = 0; i < d; i++)
            total += covariance(rotated, d, i, i);
        for (int i = 0; i < 200 && d > 1; i++) {
            const uint32_t p = (uint32_t)kv_random_below(&dice, d);
            const uint32_t q = (p + 1 + (uint32_t)kv_random_below(&dice, d - 1)) % d;

            off = fmax(off, fabs(covariance(rotated, d, p, q)));
        }
        if (off > 1e-5 * total)
            fail_msg("KV_TEST_SEED=%llu round %d: d %u: covariance %g of %g",
                     (unsigned long long)seed, round, d, off, total);
        free(rotated);
        free(again);
        free(matrix);
        free(keys);
    }
}

/* Points on the diagonal: the first axis is (1, 1) / sqrt(2), up to its sign. */
static void test_by_hand(void **state)
{
    static const float keys[] = {-2, -2, -1, -1, 1, 1, 2, 2, 5, 5};
    static const float vectors[] = {3, 3, 1, -1};
    float *matrix = make(2, 2, keys, 5), rotated[4];

    (void)state;
    kv_rotate(2, matrix, vectors, 2, rotated);
    assert_true(fabs(fabs((double)rotated[0]) - sqrt(18)) < 1e-5 &&
                fabs((double)rotated[1]) < 1e-5);
    assert_true(fabs((double)rotated[2]) < 1e-6 &&
                fabs(fabs((double)rotated[3]) - sqrt(2)) < 1e-6);
    free(matrix);
}

/* Axes in the order of their variance go to subspaces 0, 1, 2, 2, 1, 0. */
static void test_deals_in_rounds(void **state)
{
    static const float sizes[] = {1, 6, 3, 5, 2, 4};
    static const uint32_t places[] = {1, 0, 5, 2, 3, 4}; /* of elements, after the rotation */
    float keys[12 * 6] = {0}, *matrix, rotated[6];

    (void)state;
    for (uint32_t i = 0; i < 6; i++) {
        keys[(2 * i) * 6 + i] = sizes[i];
        keys[(2 * i + 1) * 6 + i] = -sizes[i];
    }
    matrix = make(6, 3, keys, 12);
    for (uint32_t i = 0; i < 6; i++) {
        kv_rotate(6, matrix, keys + (size_t)(2 * i) * 6, 1, rotated);
        for (uint32_t at = 0; at < 6; at++)
            assert_true(rotated[at] == (at == places[i] ? sizes[i] : 0) ||
                        (at == places[i] && rotated[at] == -sizes[i]));
    }
    free(matrix);
}

/* Keys without variance, or that are not finite, leave the axes as they are. */
static void test_nothing_to_find(void **state)
{
    float keys[40 * 16];

    (void)state;
    for (int kind = FLOATS_EQUAL; kind < FLOATS_N_KINDS; kind++) {
        floats_fill(&dice, (enum float_kind)kind, keys, sizeof(keys) / sizeof(keys[0]));
        if (kind == FLOATS_SPECIAL)
            keys[17] = NAN;
        if (kind == FLOATS_ANY_BITS)
            keys[17] = INFINITY;
        float *matrix = make(16, 1, keys, 40);

        for (uint32_t i = 0; i < 16; i++)
            for (uint32_t r = 0; r < 16; r++)
                assert_true(matrix[i * 16 + r] == (i == r));
        free(matrix);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rotates),
        cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_deals_in_rounds),
        cmocka_unit_test(test_nothing_to_find),
    };

    seed = floats_seed();
    kv_random_init(&dice, seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
