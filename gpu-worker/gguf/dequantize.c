#include "gpu-worker/gguf/dequantize.h"

#include <assert.h>
#include <string.h>

static uint32_t bits_of(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static float float_of(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

float kvw_f16_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t exponent = half >> 10 & 0x1f;
    uint32_t fraction = half & 0x3ff;

    if (exponent == 0x1f)
        return float_of(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) /* zero or subnormal: fraction * 2^-24, exact in fp32 */
        return float_of(sign | bits_of((float)fraction * 0x1p-24f));
    return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

uint16_t kvw_f16_from_f32(float value)
{
    uint32_t bits = bits_of(value);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    uint32_t magnitude = bits & 0x7fffffff;

    if (magnitude > 0x7f800000)
        return sign | 0x7e00; /* NaN */
    if (magnitude >= 0x477ff000)
        return sign | 0x7c00; /* rounds to 2^16 or more */
    if (magnitude < 0x38800000) {
        /* Subnormal: adding 0.5 leaves the result in units of 2^-24, rounded by the processor.
         */
        return sign | (uint16_t)(bits_of(float_of(magnitude) + 0.5f) - 0x3f000000);
    }
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return sign | (uint16_t)((magnitude >> 13) - (112u << 10));
}

float kvw_bf16_to_f32(uint16_t half)
{
    return float_of((uint32_t)half << 16);
}

uint16_t kvw_bf16_from_f32(float value)
{
    uint32_t bits = bits_of(value);

    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float f16_at(const uint8_t *at)
{
    uint16_t half;

    memcpy(&half, at, sizeof(half));
    return kvw_f16_to_f32(half);
}

/* --- One block of each type --- */

static void block_f32(const uint8_t *at, float *values)
{
    memcpy(values, at, sizeof(*values));
}

static void block_f16(const uint8_t *at, float *values)
{
    *values = f16_at(at);
}

static void block_bf16(const uint8_t *at, float *values)
{
    uint16_t half;

    memcpy(&half, at, sizeof(half));
    *values = kvw_bf16_to_f32(half);
}

static void block_q8_0(const uint8_t *at, float *values)
{
    float d = f16_at(at);

    for (int i = 0; i < 32; i++)
        values[i] = (float)(int8_t)at[2 + i] * d;
}

static void block_q4_0(const uint8_t *at, float *values)
{
    float d = f16_at(at);

    for (int i = 0; i < 16; i++) {
        values[i] = (float)((at[2 + i] & 15) - 8) * d;
        values[i + 16] = (float)((at[2 + i] >> 4) - 8) * d;
    }
}

static void block_q4_1(const uint8_t *at, float *values)
{
    float d = f16_at(at), m = f16_at(at + 2);

    for (int i = 0; i < 16; i++) {
        values[i] = (float)(at[4 + i] & 15) * d + m;
        values[i + 16] = (float)(at[4 + i] >> 4) * d + m;
    }
}

/* Returns element i of 32 elements of five bits: four from `nibbles` (16 bytes), and the
 * highest from `fifths` (32 bits). */
static int fifth(const uint8_t *fifths, const uint8_t *nibbles, int i)
{
    int low = i < 16 ? nibbles[i] & 15 : nibbles[i - 16] >> 4;

    return low | (fifths[i / 8] >> i % 8 & 1) << 4;
}

static void block_q5_0(const uint8_t *at, float *values)
{
    float d = f16_at(at);

    for (int i = 0; i < 32; i++)
        values[i] = (float)(fifth(at + 2, at + 6, i) - 16) * d;
}

static void block_q5_1(const uint8_t *at, float *values)
{
    float d = f16_at(at), m = f16_at(at + 2);

    for (int i = 0; i < 32; i++)
        values[i] = (float)fifth(at + 4, at + 8, i) * d + m;
}

/* Unpacks scale and minimum i of 8, six bits each, from the 12 bytes of Q4_K and Q5_K.  The
 * first four of each are the low six bits of bytes 0-3 and 4-7.  The others have their low four
 * bits in bytes 8-11, and their upper two bits in the two high bits of bytes 0-7. */
static void unpack_scale(const uint8_t *packed, int i, int *ret_scale, int *ret_minimum)
{
    if (i < 4) {
        *ret_scale = packed[i] & 63;
        *ret_minimum = packed[i + 4] & 63;
    } else {
        *ret_scale = (packed[i + 4] & 15) | packed[i - 4] >> 6 << 4;
        *ret_minimum = packed[i + 4] >> 4 | packed[i] >> 6 << 4;
    }
}

/* Q4_K and Q5_K.  Sub-block i of 32 elements is the low (i even) or high nibbles of the 32
 * bytes of run i / 2.  In Q5_K the fifth bit of element j is bit i of fifths[j]; `fifths` is
 * NULL in Q4_K. */
static void
block_k45(const uint8_t *at, const uint8_t *fifths, const uint8_t *nibbles, float *values)
{
    float d = f16_at(at), m = f16_at(at + 2);

    for (int i = 0; i < 8; i++) {
        const uint8_t *run = nibbles + i / 2 * 32;
        int scale, minimum;
        float d_scale, m_minimum;

        unpack_scale(at + 4, i, &scale, &minimum);
        d_scale = d * (float)scale;
        m_minimum = m * (float)minimum;
        for (int j = 0; j < 32; j++) {
            int q = i % 2 == 0 ? run[j] & 15 : run[j] >> 4;

            if (fifths != NULL)
                q |= (fifths[j] >> i & 1) << 4;
            values[i * 32 + j] = d_scale * (float)q - m_minimum;
        }
    }
}

static void block_q4_k(const uint8_t *at, float *values)
{
    block_k45(at, NULL, at + 16, values);
}

static void block_q5_k(const uint8_t *at, float *values)
{
    block_k45(at, at + 16, at + 48, values);
}

/* Two runs of 128 elements, each of 64 bytes of nibbles and 32 bytes of upper bits.  In a run,
 * elements 0-31 and 64-95 are the low and high nibbles of the first 32 bytes, elements 32-63
 * and 96-127 those of the next 32.  Byte j of the upper bits has, from the lowest bits up,
 * those of elements j, j + 32, j + 64 and j + 96. */
static void block_q6_k(const uint8_t *at, float *values)
{
    float d = f16_at(at + 208);

    for (int i = 0; i < 256; i++) {
        const uint8_t *nibbles = at + i / 128 * 64;
        const uint8_t *uppers = at + 128 + i / 128 * 32;
        float scale = (float)(int8_t)at[192 + i / 16];
        int in_run = i % 128;
        int q = in_run < 64 ? nibbles[in_run] & 15 : nibbles[in_run - 64] >> 4;

        q |= (uppers[in_run % 32] >> in_run / 32 * 2 & 3) << 4;
        values[i] = d * scale * (float)(q - 32);
    }
}

static void (*const block_readers[])(const uint8_t *at, float *values) = {
    [KVW_TENSOR_F32] = block_f32,   [KVW_TENSOR_F16] = block_f16,
    [KVW_TENSOR_BF16] = block_bf16, [KVW_TENSOR_Q8_0] = block_q8_0,
    [KVW_TENSOR_Q4_0] = block_q4_0, [KVW_TENSOR_Q4_1] = block_q4_1,
    [KVW_TENSOR_Q5_0] = block_q5_0, [KVW_TENSOR_Q5_1] = block_q5_1,
    [KVW_TENSOR_Q4_K] = block_q4_k, [KVW_TENSOR_Q5_K] = block_q5_k,
    [KVW_TENSOR_Q6_K] = block_q6_k,
};

void kvw_dequantize_row(enum kvw_tensor_type type,
                        const void *row,
                        size_t n_elements,
                        float *ret_values)
{
    const struct kvw_tensor_layout *layout = kvw_tensor_get_layout((uint32_t)type);
    const uint8_t *at = row;

    assert(layout != NULL && n_elements % layout->block_elements == 0);
    if (type == KVW_TENSOR_F32) {
        memcpy(ret_values, row, n_elements * sizeof(*ret_values));
        return;
    }
    for (size_t i = 0; i < n_elements; i += layout->block_elements) {
        block_readers[type](at, ret_values + i);
        at += layout->block_bytes;
    }
}
