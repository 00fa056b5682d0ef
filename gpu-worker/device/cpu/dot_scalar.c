/* One element at a time: for processors without another table, and the reference of tests. */
#include "gpu-worker/device/cpu/dot.h"
#include "gpu-worker/gguf/dequantize.h"
#include "proto/kv_types.h"

#include <math.h>
#include <string.h>

enum {
    PIECE = 256, /* elements unpacked at once: a multiple of every block */
};

/* Adds the eight partial sums in which products are accumulated, as the vector tables do. */
static float sum8(const float sums[8])
{
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) +
           ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

static void add_products(float sums[8], const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        sums[i % 8] += a[i] * b[i];
}

static float dot_row(enum kvw_tensor_type type, const void *row, const float *x, size_t n)
{
    const char *at = row;
    float sums[8] = {0};
    float values[PIECE];

    for (size_t i = 0; i < n; i += PIECE) {
        const size_t count = n - i < PIECE ? n - i : PIECE;

        kvw_dequantize_row(type, at, count, values);
        add_products(sums, values, x + i, count);
        at += kvw_tensor_row_bytes(type, count);
    }
    return sum8(sums);
}

static void dot_rows(enum kvw_tensor_type type,
                     const void *rows,
                     size_t stride,
                     size_t n_rows,
                     const float *x,
                     size_t n,
                     float *ret_products)
{
    for (size_t r = 0; r < n_rows; r++)
        ret_products[r] = dot_row(type, (const char *)rows + r * stride, x, n);
}

static void products(const float *a,
                     size_t lda,
                     size_t n_a,
                     const float *b,
                     size_t ldb,
                     size_t n_b,
                     size_t k,
                     float *ret_products,
                     size_t ldc)
{
    for (size_t i = 0; i < n_a; i++)
        for (size_t j = 0; j < n_b; j++)
            ret_products[i * ldc + j] = dot_row(KVW_TENSOR_F32, b + j * ldb, a + i * lda, k);
}

#define TENSOR_TYPE(NAME)                                                                  \
    static void dot_##NAME(const void *rows, size_t stride, size_t n_rows, const float *x, \
                           size_t n, float *ret_products)                                  \
    {                                                                                      \
        dot_rows(KVW_TENSOR_##NAME, rows, stride, n_rows, x, n, ret_products);             \
    }                                                                                      \
                                                                                           \
    static void unpack_##NAME(const void *row, float *ret_values, size_t n)                \
    {                                                                                      \
        kvw_dequantize_row(KVW_TENSOR_##NAME, row, n, ret_values);                         \
    }

TENSOR_TYPE(F32)
TENSOR_TYPE(F16)
TENSOR_TYPE(BF16)
TENSOR_TYPE(Q4_0)
TENSOR_TYPE(Q4_1)
TENSOR_TYPE(Q5_0)
TENSOR_TYPE(Q5_1)
TENSOR_TYPE(Q8_0)
TENSOR_TYPE(Q4_K)
TENSOR_TYPE(Q5_K)
TENSOR_TYPE(Q6_K)

/* ---- rows of a cache ---- */

static uint16_t round_fp16(float value)
{
    if (value > 65504.0f)
        value = 65504.0f;
    if (value < -65504.0f)
        value = -65504.0f;
    return kvw_f16_from_f32(value);
}

static void store_fp32(const float *values, void *ret_row, size_t n)
{
    memcpy(ret_row, values, n * sizeof(values[0]));
}

static void store_fp16(const float *values, void *ret_row, size_t n)
{
    for (size_t i = 0; i < n; i++)
        ((uint16_t *)ret_row)[i] = round_fp16(values[i]);
}

static void store_bf16(const float *values, void *ret_row, size_t n)
{
    for (size_t i = 0; i < n; i++)
        ((uint16_t *)ret_row)[i] = kvw_bf16_from_f32(values[i]);
}

#define ROW_TYPE(name, TENSOR)                                                               \
    static void score_##name(const void *rows, size_t stride, size_t n_rows,                 \
                             const float *queries, size_t n_queries, size_t d,               \
                             float *ret_scores, size_t scores_stride)                        \
    {                                                                                        \
        for (size_t r = 0; r < n_rows; r++)                                                  \
            for (size_t q = 0; q < n_queries; q++)                                           \
                ret_scores[q * scores_stride + r] =                                          \
                    dot_row(TENSOR, (const char *)rows + r * stride, queries + q * d, d);    \
    }                                                                                        \
                                                                                             \
    static void gather_##name(const void *rows, size_t stride, size_t n_rows,                \
                              const float *weights, size_t weights_stride, size_t n_queries, \
                              size_t d, float *out)                                          \
    {                                                                                        \
        float values[KV_DIM_MAX];                                                            \
                                                                                             \
        for (size_t r = 0; r < n_rows; r++) {                                                \
            kvw_dequantize_row(TENSOR, (const char *)rows + r * stride, d, values);          \
            for (size_t q = 0; q < n_queries; q++)                                           \
                for (size_t i = 0; i < d; i++)                                               \
                    out[q * d + i] += weights[q * weights_stride + r] * values[i];           \
        }                                                                                    \
    }

ROW_TYPE(fp32, KVW_TENSOR_F32)
ROW_TYPE(fp16, KVW_TENSOR_F16)
ROW_TYPE(bf16, KVW_TENSOR_BF16)

/* ---- elementwise ---- */

static float sum_of_squares(const float *x, size_t n)
{
    float sums[8] = {0};

    add_products(sums, x, x, n);
    return sum8(sums);
}

static void silu_gate(float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i++)
        gate[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
}

static const struct kvw_dot_table scalar = {
    .name = "scalar",
    .dot = {[KVW_TENSOR_F32] = dot_F32,
            [KVW_TENSOR_F16] = dot_F16,
            [KVW_TENSOR_BF16] = dot_BF16,
            [KVW_TENSOR_Q4_0] = dot_Q4_0,
            [KVW_TENSOR_Q4_1] = dot_Q4_1,
            [KVW_TENSOR_Q5_0] = dot_Q5_0,
            [KVW_TENSOR_Q5_1] = dot_Q5_1,
            [KVW_TENSOR_Q8_0] = dot_Q8_0,
            [KVW_TENSOR_Q4_K] = dot_Q4_K,
            [KVW_TENSOR_Q5_K] = dot_Q5_K,
            [KVW_TENSOR_Q6_K] = dot_Q6_K},
    .unpack = {[KVW_TENSOR_F32] = unpack_F32,
               [KVW_TENSOR_F16] = unpack_F16,
               [KVW_TENSOR_BF16] = unpack_BF16,
               [KVW_TENSOR_Q4_0] = unpack_Q4_0,
               [KVW_TENSOR_Q4_1] = unpack_Q4_1,
               [KVW_TENSOR_Q5_0] = unpack_Q5_0,
               [KVW_TENSOR_Q5_1] = unpack_Q5_1,
               [KVW_TENSOR_Q8_0] = unpack_Q8_0,
               [KVW_TENSOR_Q4_K] = unpack_Q4_K,
               [KVW_TENSOR_Q5_K] = unpack_Q5_K,
               [KVW_TENSOR_Q6_K] = unpack_Q6_K},
    .products = products,
    .score = {[KV_FP32] = score_fp32, [KV_FP16] = score_fp16, [KV_BF16] = score_bf16},
    .gather = {[KV_FP32] = gather_fp32, [KV_FP16] = gather_fp16, [KV_BF16] = gather_bf16},
    .load = {[KV_FP32] = unpack_F32, [KV_FP16] = unpack_F16, [KV_BF16] = unpack_BF16},
    .store = {[KV_FP32] = store_fp32, [KV_FP16] = store_fp16, [KV_BF16] = store_bf16},
    .sum_of_squares = sum_of_squares,
    .silu_gate = silu_gate,
};

const struct kvw_dot_table *kvw_dot_table_best(void)
{
    const struct kvw_dot_table *avx2 = kvw_dot_avx2();

    return avx2 != NULL ? avx2 : &scalar;
}

const struct kvw_dot_table *kvw_dot_table_at(unsigned index)
{
    return index == 0 ? &scalar : index == 1 ? kvw_dot_avx2() : NULL;
}
