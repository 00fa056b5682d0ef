/* Rows of any length, at any address and in any order arrive whole, and nothing else is
 * written: every implementation against memcpy row by row, with a guard behind the answer.
 * Large answers into aligned memory are written another way. */
#include "kernels/gather.h"
#include "kvserver/base/random.h"
#include "tests/support/floats.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    ROWS_MAX = 70,
    SOURCE_BYTES = 1 << 18,
    GUARD = 0x5c
};

static uint64_t seed;
static struct kv_random dice;
static uint8_t *source;

/* Rows of the source anywhere, into `dst`, which has a byte more. */
static void check(uint8_t *dst, size_t n_rows, size_t row_bytes)
{
    const void **rows = malloc((n_rows + 1) * sizeof(*rows));
    const struct kv_gather_kernels *kernels;

    assert_non_null(rows);
    for (size_t i = 0; i < n_rows; i++)
        rows[i] = source + kv_random_below(&dice, SOURCE_BYTES - row_bytes + 1);
    for (unsigned tier = 0; (kernels = kv_gather_kernels_at(tier)) != NULL; tier++) {
        memset(dst, GUARD, n_rows * row_bytes + 1);
        kernels->gather(dst, rows, n_rows, row_bytes);
        for (size_t i = 0; i < n_rows; i++)
            assert_memory_equal(dst + i * row_bytes, rows[i], row_bytes);
        assert_int_equal(dst[n_rows * row_bytes], GUARD);
    }
    free(rows);
}

static void tiers(void **state)
{
    unsigned n = 0;

    (void)state;
    for (; kv_gather_kernels_at(n) != NULL; n++)
        print_message("gather: %s\n", kv_gather_kernels_at(n)->name);
    assert_true(n >= 1);
    assert_string_equal(kv_gather_kernels_at(0)->name, "scalar");
    assert_null(kv_gather_kernels_at(~0u));
}

static void scattered_rows(void **state)
{
    static const size_t sizes[] = {0,   1,   7,   63,   64,   65,   128,   200,
                                   256, 512, 999, 1024, 1025, 4096, 16383, 32768};

    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        for (size_t n_rows = 0; n_rows <= ROWS_MAX; n_rows++) {
            uint8_t *dst = malloc(n_rows * sizes[i] + 1);

            assert_non_null(dst);
            check(dst, n_rows, sizes[i]);
            free(dst);
        }
}

/* About the size from which on answers are written past the caches, aligned for that or not. */
static void large_answers(void **state)
{
    static const size_t sizes[] = {32, 96, 256, 512, 520, 1024, 32768};

    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        for (size_t offset = 0; offset <= 48; offset += 16) {
            const size_t n_rows = KV_GATHER_STREAM_BYTES / sizes[i] + offset % 3;
            const size_t bytes = 64 + offset + n_rows * sizes[i] + 1;
            uint8_t *memory = malloc(bytes), *dst;

            assert_non_null(memory);
            dst = (uint8_t *)(((uintptr_t)memory + 63) & ~(uintptr_t)63) + offset;
            check(dst, n_rows, sizes[i]);
            free(memory);
        }
}

static void of_the_best(void **state)
{
    const void *rows[2] = {source + 5, source};
    uint8_t dst[6];

    (void)state;
    kv_rows_gather(dst, rows, 2, 3);
    assert_memory_equal(dst, source + 5, 3);
    assert_memory_equal(dst + 3, source, 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiers),
        cmocka_unit_test(scattered_rows),
        cmocka_unit_test(large_answers),
        cmocka_unit_test(of_the_best),
    };
    int failed;

    seed = floats_seed();
    print_message("seed %llu (KV_TEST_SEED)\n", (unsigned long long)seed);
    kv_random_init(&dice, seed);
    source = malloc(SOURCE_BYTES);
    if (source == NULL)
        return 1;
    kv_random_fill(&dice, source, SOURCE_BYTES);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(source);
    return failed;
}
