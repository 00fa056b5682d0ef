/* rope.h: every implementation that this CPU has gives the bits of the scalar one, of both
 * styles, any length and place, and touches nothing else.  The scalar one is checked against
 * rotation in double, and for what a rotation is: it has an inverse, and turns add up.
 * Frequencies are checked against their definition. */
#include "kernels/rope.h"
#include "tests/support/floats.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    ROUNDS = 2000,
    D_MAX = 256,
    N_MAX = 4,
    HEADS_MAX = 5,
};

static const double eps = 0x1p-24;

static uint64_t seed;
static struct kv_random dice;

struct shape {
    enum kv_rope_style style;
    size_t n_rot, d, n, n_heads, turns_stride;
};

#define EXPECT(condition)                                                                  \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            print_error("KV_TEST_SEED=%llu round %d style %d n_rot %zu d %zu n %zu heads " \
                        "%zu: %s\n",                                                       \
                        (unsigned long long)seed, round, (int)shape.style, shape.n_rot,    \
                        shape.d, shape.n, shape.n_heads, #condition);                      \
            fail();                                                                        \
        }                                                                                  \
    } while (0)

static struct shape some_shape(void)
{
    struct shape shape;

    shape.style = kv_random_below(&dice, 2) == 0 ? KV_ROPE_ADJACENT : KV_ROPE_HALVES;
    shape.n_rot = kv_random_below(&dice, 2) == 0 ? 64 * (1 + kv_random_below(&dice, 4))
                                                 : 2 * kv_random_below(&dice, D_MAX / 2 + 1);
    shape.d = shape.n_rot;
    if (kv_random_below(&dice, 2) == 0)
        shape.d += kv_random_below(&dice, D_MAX - shape.n_rot + 1);
    shape.n = kv_random_below(&dice, N_MAX + 1);
    shape.n_heads = kv_random_below(&dice, HEADS_MAX + 1);
    shape.turns_stride =
        kv_random_below(&dice, 2) == 0 ? 0 : shape.n_rot + kv_random_below(&dice, 3);
    return shape;
}

/* The elements of pair i. */
static void pair_at(const struct shape *shape, size_t i, size_t *ret_a, size_t *ret_b)
{
    *ret_a = shape->style == KV_ROPE_ADJACENT ? 2 * i : i;
    *ret_b = shape->style == KV_ROPE_ADJACENT ? 2 * i + 1 : i + shape->n_rot / 2;
}

static void tiers(void **state)
{
    unsigned n = 0;

    (void)state;
    for (; kv_rope_kernels_at(n) != NULL; n++)
        print_message("rope: %s\n", kv_rope_kernels_at(n)->name);
    assert_true(n >= 1);
    assert_string_equal(kv_rope_kernels_at(0)->name, "scalar");
    assert_null(kv_rope_kernels_at(~0u));
}

static void same_bits(void **state)
{
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const enum float_kind kind = (enum float_kind)(round % FLOATS_N_KINDS);
        const struct shape shape = some_shape();
        const size_t n_x = shape.n * shape.n_heads * shape.d;
        const size_t n_turns =
            shape.n > 0 ? (shape.n - 1) * shape.turns_stride + shape.n_rot : shape.n_rot;
        const int back = kv_random_below(&dice, 2) == 0;
        void *bases[4];
        float *turns = floats_exact(&dice, n_turns * 4, 4, &bases[0]);
        float *before = floats_exact(&dice, n_x * 4, 4, &bases[1]);
        float *expected = floats_exact(&dice, n_x * 4, 4, &bases[2]);
        float *x = floats_exact(&dice, n_x * 4, 4, &bases[3]);
        const struct kv_rope_kernels *kernels;

        floats_fill(&dice, kind, turns, n_turns);
        floats_fill(&dice, kind, before, n_x);
        memcpy(expected, before, n_x * 4);
        kv_rope_kernels_at(0)->rotate(shape.style, back, turns, shape.turns_stride, shape.n_rot,
                                      expected, shape.n, shape.n_heads, shape.d);
        for (unsigned i = 0; (kernels = kv_rope_kernels_at(i)) != NULL; i++) {
            memcpy(x, before, n_x * 4);
            kernels->rotate(shape.style, back, turns, shape.turns_stride, shape.n_rot, x,
                            shape.n, shape.n_heads, shape.d);
            EXPECT(floats_all_same(x, expected, n_x));
        }
        for (size_t i = 0; i < n_x; i++)
            EXPECT(i % shape.d < shape.n_rot || floats_same(expected[i], before[i]));
        for (int i = 0; i < 4; i++)
            free(bases[i]);
    }
}

/* Turns, a turn back, and turns one upon another, each within the header's bound. */
static void is_rotation(void **state)
{
    double worst[3] = {0};

    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const struct shape shape = some_shape();
        const uint32_t position = (uint32_t)kv_random_below(&dice, 1 << 20);
        const int64_t delta = (int64_t)kv_random_below(&dice, 1 << 20) - (1 << 19);
        double frequencies[D_MAX / 2];
        float first[D_MAX], shift[D_MAX], both[D_MAX], negative[D_MAX];
        float before[D_MAX], turned[D_MAX], back[D_MAX], shifted[D_MAX], at_once[D_MAX];

        kv_rope_frequencies(10000, shape.n_rot, NULL, frequencies);
        kv_rope_rotations_at(frequencies, shape.n_rot, &position, 1, first);
        kv_rope_rotations(frequencies, shape.n_rot, delta, 1, shift);
        kv_rope_rotations(frequencies, shape.n_rot, position + delta, 1, both);
        kv_rope_rotations(frequencies, shape.n_rot, -(int64_t)position, 1, negative);
        floats_fill(&dice, FLOATS_UNIFORM, before, D_MAX);
        memcpy(turned, before, sizeof(before));
        kv_rope_rotate(shape.style, KV_ROPE_FORWARD, first, 0, shape.n_rot, turned, 1, 1,
                       shape.d);
        memcpy(back, turned, sizeof(turned));
        kv_rope_rotate(shape.style, KV_ROPE_INVERSE, first, 0, shape.n_rot, back, 1, 1,
                       shape.d);
        memcpy(shifted, turned, sizeof(turned));
        kv_rope_rotate(shape.style, KV_ROPE_FORWARD, negative, 0, shape.n_rot, shifted, 1, 1,
                       shape.d);
        EXPECT(floats_all_same(shifted, back, shape.d)); /* back is turning by the negative */
        memcpy(shifted, turned, sizeof(turned));
        kv_rope_rotate(shape.style, KV_ROPE_FORWARD, shift, 0, shape.n_rot, shifted, 1, 1,
                       shape.d);
        memcpy(at_once, before, sizeof(before));
        kv_rope_rotate(shape.style, KV_ROPE_FORWARD, both, 0, shape.n_rot, at_once, 1, 1,
                       shape.d);
        for (size_t i = 0; i < shape.n_rot / 2; i++) {
            const double angle = (double)position * frequencies[i];
            size_t a, b;

            pair_at(&shape, i, &a, &b);
            {
                const double x = (double)before[a], y = (double)before[b];
                const double unit = eps * hypot(x, y) + 1e-44;
                const double errors[3] = {
                    fmax(fabs((double)turned[a] - (x * cos(angle) - y * sin(angle))),
                         fabs((double)turned[b] - (x * sin(angle) + y * cos(angle)))) /
                        unit,
                    fmax(fabs((double)back[a] - x), fabs((double)back[b] - y)) / unit,
                    fmax(fabs((double)shifted[a] - (double)at_once[a]),
                         fabs((double)shifted[b] - (double)at_once[b])) /
                        unit,
                };

                for (int j = 0; j < 3; j++)
                    worst[j] = errors[j] > worst[j] ? errors[j] : worst[j];
            }
        }
        EXPECT(worst[0] <= 3);
        EXPECT(worst[1] <= 10);
        EXPECT(worst[2] <= 15); /* two turns here, one there */
    }
    print_message("rope: turn %.2g, back %.2g, shift %.2g units of 2^-24\n", worst[0], worst[1],
                  worst[2]);
}

static void turns_of_many(void **state)
{
    enum {
        N_ROT = 10,
        N = 7,
    };
    static const uint32_t positions[N] = {5, 6, 7, 8, 9, 10, 11};
    double frequencies[N_ROT / 2];
    float run[N * N_ROT], list[N * N_ROT];

    (void)state;
    kv_rope_frequencies(500000, N_ROT, NULL, frequencies);
    kv_rope_rotations(frequencies, N_ROT, 5, N, run);
    kv_rope_rotations_at(frequencies, N_ROT, positions, N, list);
    assert_memory_equal(run, list, sizeof(run));
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N_ROT / 2; j++) {
            const double angle = (5 + i) * frequencies[j];

            assert_true(run[i * N_ROT + 2 * j] == (float)cos(angle));
            assert_true(run[i * N_ROT + 2 * j + 1] == (float)sin(angle));
        }
    kv_rope_rotations(frequencies, N_ROT, 0, 1, run);
    for (int j = 0; j < N_ROT / 2; j++)
        assert_true(run[2 * j] == 1 && run[2 * j + 1] == 0);
}

/* Llama 3.1's numbers: waves up to 8192 / 4 tokens stay, those from 8192 / 1 on are eight times
 * as long, and it grows between. */
static void frequency_scaling(void **state)
{
    enum {
        N_ROT = 128,
    };
    const struct kv_rope_scaling llama = {.factor = 8, .low = 1, .high = 4, .context = 8192};
    float factors[N_ROT / 2];
    const struct kv_rope_scaling named = {.linear = 2, .factors = factors},
                                 linear = {.linear = 4};
    double plain[N_ROT / 2], scaled[N_ROT / 2], divided[N_ROT / 2];
    size_t n_kept = 0, n_stretched = 0;

    (void)state;
    kv_rope_frequencies(500000, N_ROT, NULL, plain);
    kv_rope_frequencies(500000, N_ROT, &llama, scaled);
    for (size_t i = 0; i < N_ROT / 2; i++) {
        const double wave = 2 * acos(-1) / plain[i];
        const double by = plain[i] / scaled[i];

        assert_true(fabs(plain[i] * pow(500000, 2.0 * (double)i / N_ROT) - 1) < 1e-14);
        assert_true(by >= 1 && by <= 8 + 1e-12);
        if (wave < 2048) {
            assert_true(scaled[i] == plain[i]);
            n_kept++;
        } else if (wave > 8192) {
            assert_true(fabs(by - 8) < 1e-12);
            n_stretched++;
        } else {
            const double kept = (8192 / wave - 1) / 3;

            assert_true(fabs(1 / by - ((1 - kept) / 8 + kept)) < 1e-12);
        }
        factors[i] = (float)by;
    }
    assert_true(n_kept > 0 && n_stretched > 0 && n_kept + n_stretched < N_ROT / 2);

    kv_rope_frequencies(500000, N_ROT, &linear, divided);
    for (size_t i = 0; i < N_ROT / 2; i++)
        assert_true(divided[i] == plain[i] / 4);
    kv_rope_frequencies(500000, N_ROT, &named, divided);
    for (size_t i = 0; i < N_ROT / 2; i++)
        assert_true(divided[i] == plain[i] / (double)factors[i] / 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiers),
        cmocka_unit_test(same_bits),
        cmocka_unit_test(is_rotation),
        cmocka_unit_test(turns_of_many),
        cmocka_unit_test(frequency_scaling),
    };

    seed = floats_seed();
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
