/* byte_select.h: every implementation that this CPU has counts and collects what the scalar one
 * does, in one call or in pieces; bisection with it finds the k largest that sorting finds. */
#include "kernels/byte_select.h"
#include "tests/support/floats.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    ROUNDS = 4000,
    N_MAX = 2000,
    N_LONG = 200000, /* more than counters of a byte hold */
};

static uint64_t seed;
static struct kv_random dice;

#define EXPECT(condition)                                                                   \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            print_error("KV_TEST_SEED=%llu round %d n %zu: %s\n", (unsigned long long)seed, \
                        round, n, #condition);                                              \
            fail();                                                                         \
        }                                                                                   \
    } while (0)

/* Any bytes, few different ones, the largest and the smallest, or all equal. */
static void fill(int round, uint8_t *values, size_t n)
{
    const uint8_t equal = (uint8_t)kv_random_below(&dice, 256);

    for (size_t i = 0; i < n; i++)
        switch (round % 5) {
        case 0:
            values[i] = (uint8_t)kv_random_next(&dice);
            break;
        case 1:
            values[i] = (uint8_t)(127 + kv_random_below(&dice, 3));
            break;
        case 2:
            values[i] = (uint8_t)(0 - kv_random_below(&dice, 2));
            break;
        case 3:
            values[i] = (uint8_t)(kv_random_below(&dice, 30) == 0 ? 200 : i % 100);
            break;
        default:
            values[i] = equal;
        }
}

static size_t some_n(int round)
{
    return round % 500 == 0 ? N_LONG : kv_random_below(&dice, N_MAX + 1);
}

static void counts(void **state)
{
    (void)state;
    for (unsigned i = 0; kv_bytes_kernels_at(i) != NULL; i++)
        print_message("bytes: %s\n", kv_bytes_kernels_at(i)->name);
    for (int round = 0; round < ROUNDS; round++) {
        const size_t n = some_n(round), cut = kv_random_below(&dice, n + 1);
        void *base;
        uint8_t *values = floats_exact(&dice, n, 1, &base);
        const uint8_t least = (uint8_t)(round % 9 == 0   ? 0
                                        : round % 9 == 1 ? 255
                                                         : kv_random_below(&dice, 256));
        uint32_t bins[256] = {7}, own[256] = {7};
        size_t expected = 0;

        fill(round, values, n);
        for (size_t i = 0; i < n; i++) {
            expected += values[i] >= least;
            own[values[i]]++;
        }
        for (unsigned i = 0; kv_bytes_kernels_at(i) != NULL; i++)
            EXPECT(kv_bytes_kernels_at(i)->count_from(values, n, least) == expected);
        kv_bytes_histogram(values, cut, bins);
        kv_bytes_histogram(values + cut, n - cut, bins);
        EXPECT(memcmp(bins, own, sizeof(bins)) == 0);
        free(base);
    }
}

static void collects(void **state)
{
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const size_t n = some_n(round), cut = kv_random_below(&dice, n + 1);
        const uint32_t first = round % 7 == 0 ? UINT32_MAX - (uint32_t)n
                                              : (uint32_t)kv_random_below(&dice, 1000000);
        const uint64_t most = kv_random_below(&dice, n + 2);
        void *bases[3];
        uint8_t *values = floats_exact(&dice, n, 1, &bases[0]), bound;
        size_t n_expected = 0, n_above = 0, n_equal = 0;

        fill(round, values, n);
        bound = (uint8_t)(n > 0 && round % 3 > 0 ? values[kv_random_below(&dice, n)]
                                                 : kv_random_below(&dice, 256));
        for (size_t i = 0; i < n; i++) {
            n_above += values[i] > bound;
            n_equal += values[i] == bound;
        }
        n_expected = n_above + (n_equal < most ? n_equal : most);

        const size_t size = (n_expected + KV_TOPK_SPARE) * sizeof(uint32_t);
        uint32_t *expected = floats_exact(&dice, size, 4, &bases[1]);
        uint32_t *indices = floats_exact(&dice, size, 4, &bases[2]);
        uint64_t left = most;

        n_expected = 0;
        for (size_t i = 0; i < n; i++)
            if (values[i] > bound || (values[i] == bound && left > 0)) {
                left -= values[i] == bound;
                expected[n_expected++] = first + (uint32_t)i;
            }
        for (unsigned i = 0; kv_bytes_kernels_at(i) != NULL; i++) {
            const struct kv_bytes_kernels *kernels = kv_bytes_kernels_at(i);
            uint64_t ties = most;
            size_t n_collected;

            EXPECT(kernels->collect(values, n, bound, &ties, first, indices) == n_expected);
            EXPECT(ties == left);
            EXPECT(memcmp(indices, expected, n_expected * sizeof(uint32_t)) == 0);
            ties = most;
            n_collected = kernels->collect(values, cut, bound, &ties, first, indices);
            n_collected += kernels->collect(values + cut, n - cut, bound, &ties,
                                            first + (uint32_t)cut, indices + n_collected);
            EXPECT(n_collected == n_expected && ties == left);
            EXPECT(memcmp(indices, expected, n_expected * sizeof(uint32_t)) == 0);
        }
        for (int i = 0; i < 3; i++)
            free(bases[i]);
    }
}

/* As the header has it, by the functions that the store calls. */
static void the_largest(void **state)
{
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        const size_t n = 1 + some_n(round), k = 1 + kv_random_below(&dice, n);
        void *bases[2];
        uint8_t *values = floats_exact(&dice, n, 1, &bases[0]);
        uint32_t *indices =
            floats_exact(&dice, (k + KV_TOPK_SPARE) * sizeof(uint32_t), 4, &bases[1]);
        unsigned bound = 0, least = 255;
        size_t n_more = 0, at = 0;
        uint64_t ties;

        fill(round, values, n);
        for (unsigned bit = 128; bit > 0; bit /= 2)
            if (kv_bytes_count_from(values, n, (uint8_t)(bound | bit)) >= k)
                bound |= bit;
        ties = k - (bound < 255 ? kv_bytes_count_from(values, n, (uint8_t)(bound + 1)) : 0);
        EXPECT(kv_bytes_collect(values, n, (uint8_t)bound, &ties, 0, indices) == k);
        EXPECT(ties == 0);
        /* As many as wanted, and of those left out none is larger, or as large and lower. */
        for (size_t i = 0; i < k; i++)
            least = values[indices[i]] < least ? values[indices[i]] : least;
        EXPECT(least == bound);
        for (size_t i = 0; i < n; i++) {
            const bool is_in = at < k && indices[at] == i;

            at += is_in;
            n_more += !is_in && values[i] == least;
            EXPECT(is_in ? values[i] > least || n_more == 0 : values[i] <= least);
        }
        EXPECT(at == k);
        free(bases[0]);
        free(bases[1]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts),
        cmocka_unit_test(collects),
        cmocka_unit_test(the_largest),
    };

    seed = floats_seed();
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
