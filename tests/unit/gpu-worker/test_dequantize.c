/* Every type of tensor against blocks worked out by hand from the format, and the 16-bit floats
 * against what the definitions say for all of them. */
#include "gpu-worker/gguf/dequantize.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static float float_of(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* The value by the definition: (-1)^s 2^(e - 15) 1.f, or 2^-14 0.f. */
static double half_by_definition(uint16_t half)
{
    int exponent = half >> 10 & 31;
    double fraction = (half & 1023) / 1024.0;
    double value = exponent == 0 ? ldexp(fraction, -14) : ldexp(1 + fraction, exponent - 15);

    return half >> 15 ? -value : value;
}

static void every_half(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        uint16_t half = (uint16_t)bits;
        float value = kvw_f16_to_f32(half), brain = kvw_bf16_to_f32(half);

        if ((bits >> 10 & 31) == 31) {
            assert_true((bits & 1023) == 0 ? isinf(value) : isnan(value));
            assert_int_equal(signbit(value) != 0, bits >> 15);
            if ((bits & 1023) == 0)
                assert_int_equal(kvw_f16_from_f32(value), half);
            else
                assert_true(isnan(kvw_f16_to_f32(kvw_f16_from_f32(value))));
        } else {
            assert_true((double)value == half_by_definition(half));
            assert_int_equal(kvw_f16_from_f32(value), half);
        }
        if (isnan(brain))
            assert_true(isnan(kvw_bf16_to_f32(kvw_bf16_from_f32(brain))));
        else
            assert_int_equal(kvw_bf16_from_f32(brain), half);
    }
}

/* Between two neighbours: below the middle down, above it up, on it to the even one. */
static void halves_round_to_even(void **state)
{
    (void)state;
    for (uint16_t half = 0; half < 0x7bff; half++) {
        float low = kvw_f16_to_f32(half), high = kvw_f16_to_f32(half + 1);
        float middle = (low + high) / 2; /* exact in fp32 */

        assert_int_equal(kvw_f16_from_f32(middle), half % 2 == 0 ? half : half + 1);
        assert_int_equal(kvw_f16_from_f32(nextafterf(middle, 0)), half);
        assert_int_equal(kvw_f16_from_f32(nextafterf(middle, INFINITY)), half + 1);
        assert_int_equal(kvw_f16_from_f32(-middle), 0x8000 | (half % 2 == 0 ? half : half + 1));
    }
    assert_int_equal(kvw_f16_from_f32(65519.996f), 0x7bff);
    assert_int_equal(kvw_f16_from_f32(65520.0f), 0x7c00);
    assert_int_equal(kvw_f16_from_f32(1e30f), 0x7c00);
    assert_int_equal(kvw_f16_from_f32(-1e30f), 0xfc00);
    assert_int_equal(kvw_f16_from_f32(0x1p-25f), 0);
    assert_int_equal(kvw_f16_from_f32(0x1.8p-25f), 1);
    assert_int_equal(kvw_f16_from_f32(1e-40f), 0);
    assert_int_equal(kvw_bf16_from_f32(float_of(0x3f808000)), 0x3f80);
    assert_int_equal(kvw_bf16_from_f32(float_of(0x3f818000)), 0x3f82);
    assert_int_equal(kvw_bf16_from_f32(float_of(0x3f808001)), 0x3f81);
    assert_int_equal(kvw_bf16_from_f32(float_of(0x7f7fffff)), 0x7f80);
    assert_true(isnan(kvw_bf16_to_f32(kvw_bf16_from_f32(float_of(0x7f800001)))));
}

/* fp16 numbers to build blocks with. */
static const unsigned char half_2[] = {0x00, 0x40}, minus_1[] = {0x00, 0xbc};

static void blocks_of_32(void **state)
{
    unsigned char q8_0[34], q4_0[18], q4_1[20], q5_0[22], q5_1[24];
    float values[32];

    (void)state;
    memcpy(q8_0, half_2, 2);
    memcpy(q4_0, half_2, 2);
    memcpy(q4_1, half_2, 2);
    memcpy(q5_0, half_2, 2);
    memcpy(q5_1, half_2, 2);
    memcpy(q4_1 + 2, minus_1, 2);
    memcpy(q5_1 + 2, minus_1, 2);
    for (int i = 0; i < 32; i++)
        q8_0[2 + i] = (unsigned char)(i * 8 - 128);
    /* Element i is i % 16, element i + 16 is 15 - i % 16; fifth bits: every third element. */
    for (int i = 0; i < 16; i++)
        q4_0[2 + i] = q4_1[4 + i] = q5_0[6 + i] = q5_1[8 + i] =
            (unsigned char)(i | (15 - i) << 4);
    memset(q5_0 + 2, 0, 4);
    for (int i = 0; i < 32; i += 3)
        q5_0[2 + i / 8] |= (unsigned char)(1 << i % 8);
    memcpy(q5_1 + 4, q5_0 + 2, 4);

    kvw_dequantize_row(KVW_TENSOR_Q8_0, q8_0, 32, values);
    for (int i = 0; i < 32; i++)
        assert_true(values[i] == (float)((i * 8 - 128) * 2));
    kvw_dequantize_row(KVW_TENSOR_Q4_0, q4_0, 32, values);
    for (int i = 0; i < 32; i++)
        assert_true(values[i] == (float)(((i < 16 ? i : 31 - i) - 8) * 2));
    kvw_dequantize_row(KVW_TENSOR_Q4_1, q4_1, 32, values);
    for (int i = 0; i < 32; i++)
        assert_true(values[i] == (float)((i < 16 ? i : 31 - i) * 2 - 1));
    kvw_dequantize_row(KVW_TENSOR_Q5_0, q5_0, 32, values);
    for (int i = 0; i < 32; i++)
        assert_true(values[i] ==
                    (float)(((i < 16 ? i : 31 - i) + (i % 3 == 0 ? 16 : 0) - 16) * 2));
    kvw_dequantize_row(KVW_TENSOR_Q5_1, q5_1, 32, values);
    for (int i = 0; i < 32; i++)
        assert_true(values[i] ==
                    (float)(((i < 16 ? i : 31 - i) + (i % 3 == 0 ? 16 : 0)) * 2 - 1));
}

/* Scales 1, 10, 19 ... and minima 63, 54, 45 ..., packed the long way: bit by bit. */
static void pack(unsigned char *packed, int *scales, int *minima)
{
    memset(packed, 0, 12);
    for (int i = 0; i < 8; i++) {
        scales[i] = 1 + 8 * i;
        minima[i] = 63 - 9 * i > 0 ? 63 - 9 * i : 0;
        if (i < 4) {
            packed[i] |= (unsigned char)scales[i];
            packed[i + 4] |= (unsigned char)minima[i];
        } else {
            packed[i + 4] = (unsigned char)((scales[i] & 15) | (minima[i] & 15) << 4);
            packed[i - 4] |= (unsigned char)((scales[i] >> 4) << 6);
            packed[i] |= (unsigned char)((minima[i] >> 4) << 6);
        }
    }
}

static void blocks_of_256(void **state)
{
    unsigned char q4_k[144] = {0}, q5_k[176] = {0}, q6_k[210] = {0};
    int scales[8], minima[8];
    float values[512];

    (void)state;
    memcpy(q4_k, half_2, 2);
    memcpy(q4_k + 2, minus_1, 2);
    pack(q4_k + 4, scales, minima);
    memcpy(q5_k, q4_k, 16);
    memcpy(q6_k + 208, half_2, 2);
    /* Element i has the low bits i * 7 % 16, the fifth bit of i * 5 % 3, the upper two of i
     * % 4. */
    for (int i = 0; i < 256; i++) {
        int low = i * 7 % 16, shift = i / 32 % 2 * 4;
        int at6 = i / 128 * 64 + i % 64, shift6 = i / 64 % 2 * 4;

        q4_k[16 + i / 64 * 32 + i % 32] |= (unsigned char)(low << shift);
        q5_k[48 + i / 64 * 32 + i % 32] |= (unsigned char)(low << shift);
        q5_k[16 + i % 32] |= (unsigned char)((i * 5 % 3 == 0) << i / 32);
        q6_k[at6] |= (unsigned char)(low << shift6);
        q6_k[128 + i / 128 * 32 + i % 32] |= (unsigned char)(i % 4 << i % 128 / 32 * 2);
        q6_k[192 + i / 16] = (unsigned char)(i / 16 * 16 - 128);
    }
    kvw_dequantize_row(KVW_TENSOR_Q4_K, q4_k, 256, values);
    for (int i = 0; i < 256; i++)
        assert_true(values[i] == (float)(2 * scales[i / 32] * (i * 7 % 16) + minima[i / 32]));
    kvw_dequantize_row(KVW_TENSOR_Q5_K, q5_k, 256, values);
    for (int i = 0; i < 256; i++)
        assert_true(values[i] ==
                    (float)(2 * scales[i / 32] * (i * 7 % 16 + (i * 5 % 3 == 0) * 16) +
                            minima[i / 32]));
    kvw_dequantize_row(KVW_TENSOR_Q6_K, q6_k, 256, values);
    for (int i = 0; i < 256; i++)
        assert_true(values[i] ==
                    (float)(2 * (i / 16 * 16 - 128) * (i * 7 % 16 + i % 4 * 16 - 32)));
    /* Rows are blocks in a row. */
    {
        unsigned char two[sizeof(q4_k) * 2 + 1];

        memcpy(two + 1, q4_k, sizeof(q4_k));
        memcpy(two + 1 + sizeof(q4_k), q4_k, sizeof(q4_k));
        assert_int_equal(kvw_tensor_row_bytes(KVW_TENSOR_Q4_K, 512), sizeof(two) - 1);
        kvw_dequantize_row(KVW_TENSOR_Q4_K, two + 1, 512, values);
        assert_memory_equal(values, values + 256, 256 * sizeof(*values));
    }
}

static void plain_types(void **state)
{
    const float values[] = {1.5f, -0.0f, 3e38f};
    const uint16_t halves[] = {0x3e00, 0x8000, 0x0001}, brains[] = {0x3fc0, 0x8000, 0x7f61};
    float out[3];

    (void)state;
    kvw_dequantize_row(KVW_TENSOR_F32, values, 3, out);
    assert_memory_equal(out, values, sizeof(out));
    kvw_dequantize_row(KVW_TENSOR_F16, halves, 3, out);
    assert_true(out[0] == 1.5f && out[1] == 0 && signbit(out[1]) && out[2] == 0x1p-24f);
    kvw_dequantize_row(KVW_TENSOR_BF16, brains, 3, out);
    assert_true(out[0] == 1.5f && signbit(out[1]) && out[2] == float_of(0x7f610000));
    assert_null(kvw_tensor_get_layout(4));
    assert_string_equal(kvw_tensor_get_layout(14)->name, "Q6_K");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_half),   cmocka_unit_test(halves_round_to_even),
        cmocka_unit_test(blocks_of_32), cmocka_unit_test(blocks_of_256),
        cmocka_unit_test(plain_types),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
