/* Every implementation that this CPU has gives the numbers of a bitwise reference, which is
 * itself checked against published values: on all small lengths, every alignment, chained
 * calls, lengths around the sizes where the implementations change their way, and rows of any
 * shape. */
#include "kernels/checksum.h"
#include "kvserver/base/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint32_t reference(uint32_t seed, const uint8_t *data, size_t bytes)
{
    uint32_t state = ~seed;

    while (bytes-- > 0) {
        state ^= *data++;
        for (int bit = 0; bit < 8; bit++)
            state = state >> 1 ^ (state & 1 ? 0x82f63b78u : 0);
    }
    return ~state;
}

/* Exactly as long as asked, so that the address sanitizer sees a read too far. */
static uint8_t *random_bytes(struct kv_random *random, size_t bytes)
{
    uint8_t *data = malloc(bytes + 1);

    assert_non_null(data);
    data = realloc(data, bytes > 0 ? bytes : 1);
    assert_non_null(data);
    kv_random_fill(random, data, bytes);
    return data;
}

static void published_values(void **state)
{
    uint8_t bytes[32];

    (void)state;
    /* RFC 3720, B.4 */
    memset(bytes, 0, sizeof(bytes));
    assert_int_equal(reference(0, bytes, 32), 0x8a9136aa);
    memset(bytes, 0xff, sizeof(bytes));
    assert_int_equal(reference(0, bytes, 32), 0x62a8ab43);
    for (uint8_t i = 0; i < 32; i++)
        bytes[i] = i;
    assert_int_equal(reference(0, bytes, 32), 0x46dd794e);
    assert_int_equal(kv_crc32c(0, bytes, 32), 0x46dd794e);
    assert_int_equal(kv_crc32c(0, "123456789", 9), 0xe3069283);
    assert_int_equal(kv_crc32c(0, NULL, 0), 0);
    assert_int_equal(kv_crc32c(77, NULL, 0), 77);
}

static void tiers(void **state)
{
    unsigned n = 0;

    (void)state;
    while (kv_checksum_kernels_at(n) != NULL) {
        print_message("checksum: %s\n", kv_checksum_kernels_at(n)->name);
        assert_true(kv_checksum_kernels_at(n)->supported());
        n++;
    }
    assert_true(n >= 1);
    assert_string_equal(kv_checksum_kernels_at(0)->name, "scalar");
    assert_null(kv_checksum_kernels_at(n));
    assert_null(kv_checksum_kernels_at(~0u));
}

static void buffers(void **state)
{
    static const size_t sizes[] = {751,   752,   753,   3007,  3008,  3009,  24063,  24064,
                                   24065, 383,   384,   385,   1983,  1984,  1985,   3968,
                                   6143,  6144,  6145,  8192,  12289, 15871, 15872,  15873,
                                   31744, 40000, 65535, 65536, 65537, 99991, 262147, 1 << 20};
    const struct kv_checksum_kernels *kernels;
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 1);
    for (unsigned i = 0; (kernels = kv_checksum_kernels_at(i)) != NULL; i++) {
        for (size_t bytes = 0; bytes < 600; bytes++)
            for (size_t offset = 0; offset < 8; offset += bytes < 80 ? 1 : 5) {
                uint8_t *data = random_bytes(&random, bytes + offset);
                uint32_t seed = (uint32_t)kv_random_next(&random);

                assert_int_equal(kernels->crc32c(seed, data + offset, bytes),
                                 reference(seed, data + offset, bytes));
                free(data);
            }
        for (size_t j = 0; j < sizeof(sizes) / sizeof(sizes[0]); j++) {
            size_t offset = kv_random_below(&random, 64);
            uint8_t *data = random_bytes(&random, sizes[j] + offset);
            uint32_t seed = (uint32_t)kv_random_next(&random);

            assert_int_equal(kernels->crc32c(seed, data + offset, sizes[j]),
                             reference(seed, data + offset, sizes[j]));
            free(data);
        }
    }
}

static void chained(void **state)
{
    enum {
        BYTES = 50000
    };
    const struct kv_checksum_kernels *kernels;
    struct kv_random random;
    uint8_t *data;

    (void)state;
    kv_random_init(&random, 2);
    data = random_bytes(&random, BYTES);
    for (unsigned i = 0; (kernels = kv_checksum_kernels_at(i)) != NULL; i++)
        for (int round = 0; round < 50; round++) {
            size_t cut = kv_random_below(&random, BYTES + 1);
            uint32_t seed = (uint32_t)kv_random_next(&random);
            uint32_t first = kernels->crc32c(seed, data, cut);

            assert_int_equal(kernels->crc32c(first, data + cut, BYTES - cut),
                             kernels->crc32c(seed, data, BYTES));
        }
    free(data);
}

/* Rows anywhere, in any order, some of them twice. */
static void rows_of_any_shape(void **state)
{
    enum {
        ROWS_MAX = 60
    };
    const struct kv_checksum_kernels *kernels;
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 3);
    for (unsigned i = 0; (kernels = kv_checksum_kernels_at(i)) != NULL; i++)
        for (int round = 0; round < 3000; round++) {
            size_t n_rows = kv_random_below(&random, ROWS_MAX + 1);
            size_t row_bytes =
                round < 600 ? (size_t)round / 2 : 32 * (1 + kv_random_below(&random, 40));
            size_t offset = kv_random_below(&random, 9);
            uint8_t *data = random_bytes(&random, n_rows * row_bytes + offset);
            uint32_t seeds[ROWS_MAX], crcs[ROWS_MAX + 1];
            const void *rows[ROWS_MAX];

            kv_random_fill(&random, seeds, sizeof(seeds));
            for (size_t row = 0; row < n_rows; row++)
                rows[row] = data + offset + kv_random_below(&random, n_rows) * row_bytes;
            crcs[n_rows] = 0x12345678;
            kernels->list_crc(rows, n_rows, false, row_bytes, seeds, crcs);
            for (size_t row = 0; row < n_rows; row++)
                assert_int_equal(crcs[row], reference(seeds[row], rows[row], row_bytes));
            assert_int_equal(crcs[n_rows], 0x12345678);
            free(data);
        }
}

/* Rows side by side, by the best implementation: more than one call of a kernel takes. */
static void rows_in_order(void **state)
{
    enum {
        ROWS_MAX = 1200
    };
    static uint32_t tokens[ROWS_MAX], crcs[ROWS_MAX + 1];
    struct kv_random random;

    (void)state;
    kv_random_init(&random, 5);
    for (int round = 0; round < 60; round++) {
        size_t n_rows = kv_random_below(&random, ROWS_MAX + 1);
        size_t row_bytes = kv_random_below(&random, 300);
        uint8_t *data = random_bytes(&random, n_rows * row_bytes);
        uint32_t unit_seed = (uint32_t)kv_random_next(&random);
        uint32_t step = (uint32_t)kv_random_next(&random);
        uint32_t begin = (uint32_t)kv_random_next(&random);
        const uint32_t *used = round % 3 == 0 ? NULL : tokens;

        kv_random_fill(&random, tokens, sizeof(tokens));
        crcs[n_rows] = 0x12345678;
        kv_rows_crc(data, n_rows, row_bytes, unit_seed, step, begin, used, crcs);
        for (size_t row = 0; row < n_rows; row++) {
            uint32_t token = used != NULL ? tokens[row] : begin + (uint32_t)row;

            assert_int_equal(crcs[row], reference(unit_seed + token * step,
                                                  data + row * row_bytes, row_bytes));
        }
        assert_int_equal(crcs[n_rows], 0x12345678);
        free(data);
    }
}

static void verify_finds_the_first(void **state)
{
    enum {
        ROWS = 1000,
        ROW_BYTES = 96
    };
    static uint32_t tokens[ROWS], crcs[ROWS];
    struct kv_random random;
    uint8_t *data;

    (void)state;
    kv_random_init(&random, 4);
    data = random_bytes(&random, ROWS * ROW_BYTES);
    kv_random_fill(&random, tokens, sizeof(tokens));
    for (int with_tokens = 0; with_tokens < 2; with_tokens++) {
        const uint32_t *used = with_tokens ? tokens : NULL;

        kv_rows_crc(data, ROWS, ROW_BYTES, 5, 7, 11, used, crcs);
        assert_int_equal(kv_rows_verify(data, ROWS, ROW_BYTES, 5, 7, 11, used, crcs), ROWS);
        assert_int_equal(kv_rows_verify(data, 0, ROW_BYTES, 5, 7, 11, used, crcs), 0);
        for (int round = 0; round < 300; round++) {
            size_t row = kv_random_below(&random, ROWS);
            size_t later = row + kv_random_below(&random, ROWS - row);
            size_t byte = kv_random_below(&random, ROW_BYTES);

            data[row * ROW_BYTES + byte] ^= 0x10;
            crcs[later] ^= later == row ? 0 : 1;
            assert_int_equal(kv_rows_verify(data, ROWS, ROW_BYTES, 5, 7, 11, used, crcs), row);
            crcs[later] ^= later == row ? 0 : 1;
            data[row * ROW_BYTES + byte] ^= 0x10;
        }
        /* Right rows in a wrong place. */
        assert_int_equal(kv_rows_verify(data, ROWS, ROW_BYTES, 6, 7, 11, used, crcs), 0);
        if (!with_tokens)
            assert_int_equal(kv_rows_verify(data, ROWS, ROW_BYTES, 5, 7, 12, used, crcs), 0);
    }
    free(data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_values),
        cmocka_unit_test(tiers),
        cmocka_unit_test(buffers),
        cmocka_unit_test(chained),
        cmocka_unit_test(rows_of_any_shape),
        cmocka_unit_test(rows_in_order),
        cmocka_unit_test(verify_finds_the_first),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
