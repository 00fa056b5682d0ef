/* dot.h: every table against exact sums, and one order of sums within a table. */
#include "gpu-worker/device/cpu/dot.h"
#include "gpu-worker/gguf/dequantize.h"
#include "kvserver/base/random.h"
#include "proto/kv_types.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    ROWS = 7, /* no multiple of what a table does at once */
    COLUMNS_MAX = 2048,
    ROW_BYTES_MAX = COLUMNS_MAX * 4,
};

static struct kv_random dice;

static float some(void)
{
    return (float)((double)(kv_random_next(&dice) >> 40) / (1 << 24) * 2 - 1);
}

/* Random bytes are rows of any type of blocks, but for the scales: random fp16 may be infinite.
 */
static void make_rows(enum kvw_tensor_type type, uint8_t *rows, size_t n)
{
    const struct kvw_tensor_layout *layout = kvw_tensor_get_layout(type);
    const size_t bytes = kvw_tensor_row_bytes(type, n);
    const uint16_t scale = kvw_f16_from_f32(0.01f);

    kv_random_fill(&dice, rows, ROWS * bytes);
    for (size_t at = 0; at < ROWS * bytes; at += layout->block_bytes) {
        const float value = some();

        if (type == KVW_TENSOR_F32) {
            memcpy(rows + at, &value, sizeof(value));
        } else if (type == KVW_TENSOR_F16 || type == KVW_TENSOR_BF16) {
            const uint16_t half =
                type == KVW_TENSOR_F16 ? kvw_f16_from_f32(value) : kvw_bf16_from_f32(value);

            memcpy(rows + at, &half, sizeof(half));
        } else if (type == KVW_TENSOR_Q6_K) {
            memcpy(rows + at + 208, &scale, sizeof(scale));
        } else {
            memcpy(rows + at, &scale, sizeof(scale));
            if (type == KVW_TENSOR_Q4_1 || type == KVW_TENSOR_Q5_1 || type == KVW_TENSOR_Q4_K ||
                type == KVW_TENSOR_Q5_K)
                memcpy(rows + at + 2, &scale, sizeof(scale));
        }
    }
}

static void check_type(const struct kvw_dot_table *table, enum kvw_tensor_type type, size_t n)
{
    static uint8_t rows[ROWS * ROW_BYTES_MAX + 1];
    static float x[COLUMNS_MAX], exact[COLUMNS_MAX], unpacked[ROWS * COLUMNS_MAX];
    /* Rows need no alignment. */
    uint8_t *at = type == KVW_TENSOR_F32 ? rows : rows + 1;
    const size_t stride = kvw_tensor_row_bytes(type, n);
    float products[ROWS], alone[ROWS], together[ROWS];

    make_rows(type, at, n);
    for (size_t i = 0; i < n; i++)
        x[i] = some();
    table->dot[type](at, stride, ROWS, x, n, products);
    for (size_t row = 0; row < ROWS; row++) {
        double sum = 0, magnitude = 0;

        kvw_dequantize_row(type, at + row * stride, n, exact);
        table->unpack[type](at + row * stride, unpacked + row * n, n);
        for (size_t i = 0; i < n; i++) {
            const double product = (double)exact[i] * (double)x[i];

            /* One rounding more or less: a table may use fused products. */
            assert_true(fabs((double)unpacked[row * n + i] - (double)exact[i]) <=
                        4e-7 * (0.2 + fabs((double)exact[i])));
            sum += product;
            magnitude += fabs(product);
        }
        assert_true(fabs((double)products[row] - sum) <= 1e-5 * magnitude + 1e-6);
        table->dot[type](at + row * stride, stride, 1, x, n, &alone[row]);
    }
    /* The same bits alone, with others, and unpacked before. */
    assert_memory_equal(products, alone, sizeof(alone));
    table->products(x, n, 1, unpacked, n, ROWS, n, together, ROWS);
    assert_memory_equal(products, together, sizeof(together));
}

static void test_products_of_every_type(void **state)
{
    (void)state;
    for (unsigned i = 0; kvw_dot_table_at(i) != NULL; i++)
        for (size_t j = 0; kvw_tensor_layout_at(j) != NULL; j++) {
            const struct kvw_tensor_layout *layout = kvw_tensor_layout_at(j);

            check_type(kvw_dot_table_at(i), layout->type, layout->block_elements);
            check_type(kvw_dot_table_at(i), layout->type, 1024);
            check_type(kvw_dot_table_at(i), layout->type, 2048);
            if (layout->block_elements == 1)
                check_type(kvw_dot_table_at(i), layout->type, 203);
        }
}

static void test_products_in_any_company(void **state)
{
    enum {
        N_A = 9,
        N_B = 130,
        K = 1541,
    };
    float *a = malloc(N_A * K * sizeof(*a)), *b = malloc(N_B * K * sizeof(*b));
    float *all = malloc(N_A * N_B * sizeof(*all)), one;

    (void)state;
    assert_true(a != NULL && b != NULL && all != NULL);
    for (size_t i = 0; i < N_A * K; i++)
        a[i] = some();
    for (size_t i = 0; i < N_B * K; i++)
        b[i] = some();
    for (unsigned i = 0; kvw_dot_table_at(i) != NULL; i++) {
        const struct kvw_dot_table *table = kvw_dot_table_at(i);

        table->products(a, K, N_A, b, K, N_B, K, all, N_B);
        for (size_t y = 0; y < N_A; y++)
            for (size_t x = 0; x < N_B; x++) {
                table->dot[KVW_TENSOR_F32](b + x * K, 0, 1, a + y * K, K, &one);
                assert_memory_equal(&one, &all[y * N_B + x], sizeof(one));
            }
    }
    free(a);
    free(b);
    free(all);
}

/* Scores and gathered values of cached rows, whole and as fp32 rows. */
static void check_rows(const struct kvw_dot_table *table, enum kv_dtype dtype, size_t d)
{
    enum {
        N = 21,
        QUERIES = 5,
        D_MAX = 256,
    };
    static uint8_t rows[N * D_MAX * 4];
    static float values[N * D_MAX], queries[QUERIES * D_MAX];
    float scores[QUERIES * N], again[QUERIES * N];
    static float out[QUERIES * D_MAX], out_again[QUERIES * D_MAX];
    const size_t stride = d * kv_dtype_bytes(dtype);

    for (size_t i = 0; i < QUERIES * d; i++)
        queries[i] = some();
    for (size_t r = 0; r < N; r++) {
        for (size_t i = 0; i < d; i++)
            values[r * d + i] = some();
        table->store[dtype](values + r * d, rows + r * stride, d);
        table->load[dtype](rows + r * stride, values + r * d, d);
    }
    table->score[dtype](rows, stride, N, queries, QUERIES, d, scores, N);
    table->products(queries, d, QUERIES, values, d, N, d, again, N);
    assert_memory_equal(scores, again, sizeof(scores));

    memset(out, 0, sizeof(out));
    memset(out_again, 0, sizeof(out_again));
    table->gather[dtype](rows, stride, N, scores, N, QUERIES, d, out);
    table->gather[KV_FP32](values, d * sizeof(float), N, scores, N, QUERIES, d, out_again);
    assert_memory_equal(out, out_again, sizeof(out));
    for (size_t q = 0; q < QUERIES; q++) {
        double score = 0, value = 0;

        for (size_t i = 0; i < d; i++)
            score += (double)queries[q * d + i] * (double)values[2 * d + i];
        assert_true(fabs(score - (double)scores[q * N + 2]) < 1e-4);
        for (size_t r = 0; r < N; r++)
            value += (double)scores[q * N + r] * (double)values[r * d + d - 1];
        assert_true(fabs(value - (double)out[q * d + d - 1]) < 1e-3);
    }
}

static void test_cached_rows(void **state)
{
    (void)state;
    for (unsigned i = 0; kvw_dot_table_at(i) != NULL; i++)
        for (size_t d = 64; d <= 256; d += 24) {
            check_rows(kvw_dot_table_at(i), KV_FP32, d);
            check_rows(kvw_dot_table_at(i), KV_FP16, d);
            check_rows(kvw_dot_table_at(i), KV_BF16, d);
        }
}

static void test_rounding(void **state)
{
    static const float values[] = {0,        -0.0f, 1,     1.0005f, -2.5f,
                                   65504,    65519, 70000, -1e30f,  6e-8f,
                                   -3.1e-5f, 0.1f,  3.0f,  1e-40f,  1.00390625f};
    enum {
        N = sizeof(values) / sizeof(values[0])
    };

    (void)state;
    for (unsigned i = 0; kvw_dot_table_at(i) != NULL; i++) {
        uint16_t half[N], brain[N];

        kvw_dot_table_at(i)->store[KV_FP16](values, half, N);
        kvw_dot_table_at(i)->store[KV_BF16](values, brain, N);
        for (size_t j = 0; j < N; j++) {
            const float cut = values[j] > 65504    ? 65504
                              : values[j] < -65504 ? -65504
                                                   : values[j];

            assert_int_equal(half[j], kvw_f16_from_f32(cut));
            assert_int_equal(brain[j], kvw_bf16_from_f32(values[j]));
        }
    }
}

static void test_elementwise(void **state)
{
    enum {
        N = 1003
    };
    static float x[N], up[N], gate[N];

    (void)state;
    for (size_t i = 0; i < N; i++) {
        x[i] = some() * (float)(i % 200);
        up[i] = some();
    }
    for (unsigned i = 0; kvw_dot_table_at(i) != NULL; i++) {
        const struct kvw_dot_table *table = kvw_dot_table_at(i);
        double squares = 0;

        memcpy(gate, x, sizeof(gate));
        gate[5] = -90;
        table->silu_gate(gate, up, N);
        for (size_t j = 0; j < N; j++) {
            const double g = j == 5 ? -90 : (double)x[j];
            const double exact = g / (1 + exp(-g)) * (double)up[j];

            assert_true(fabs((double)gate[j] - exact) <= 1e-6 * fabs(exact) + 1e-30);
        }

        for (size_t j = 0; j < N; j++)
            squares += (double)up[j] * (double)up[j];
        assert_true(fabs((double)table->sum_of_squares(up, N) - squares) <= 1e-5 * squares);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products_of_every_type),
        cmocka_unit_test(test_products_in_any_company),
        cmocka_unit_test(test_cached_rows),
        cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_elementwise),
    };

    kv_random_init(&dice, 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
