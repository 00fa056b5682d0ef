/* Rows of any length, at any address and in any order arrive whole, and nothing else is
 * written: against memcpy row by row, with a guard behind the answer. */
#include "gather.h"
#include "random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void scattered_rows(void **state)
{
    static const size_t sizes[] = {0,   1,   7,   63,   64,   65,   128,   200,
                                   256, 512, 999, 1024, 1025, 4096, 16383, 32768};
    enum {
        ROWS_MAX = 70,
        SOURCE_BYTES = 1 << 18,
        GUARD = 0x5c
    };
    const void *rows[ROWS_MAX];
    struct kv_random random;
    uint8_t *source = malloc(SOURCE_BYTES);

    (void)state;
    assert_non_null(source);
    kv_random_init(&random, 1);
    kv_random_fill(&random, source, SOURCE_BYTES);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        for (size_t n_rows = 0; n_rows <= ROWS_MAX; n_rows++) {
            size_t bytes = n_rows * sizes[i];
            uint8_t *dst = malloc(bytes + 1);

            assert_non_null(dst);
            dst[bytes] = GUARD;
            for (size_t row = 0; row < n_rows; row++)
                rows[row] = source + kv_random_below(&random, SOURCE_BYTES - sizes[i] + 1);
            kv_rows_gather(dst, rows, n_rows, sizes[i]);
            for (size_t row = 0; row < n_rows; row++)
                assert_memory_equal(dst + row * sizes[i], rows[row], sizes[i]);
            assert_int_equal(dst[bytes], GUARD);
            free(dst);
        }
    free(source);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(scattered_rows)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
