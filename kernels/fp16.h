/* fp16.h - private to kernels/: conversions of fp16 (IEEE 754 binary16) in plain C, for scalar
 * references.
 *
 * Threads: pure functions.  Memory: none.
 */
#ifndef KV_KERNELS_FP16_H
#define KV_KERNELS_FP16_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float kv_float_of_bits(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* Converts as VCVTPH2PS does: subnormal numbers become normal, a signaling NaN becomes
 * quiet. */
static inline float kv_fp16_load(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t exponent = half >> 10 & 31, fraction = half & 1023;

    if (exponent == 0) { /* 0 and subnormal numbers: units of 2^-24 */
        const float value = (float)fraction * 0x1p-24f;

        return sign != 0 ? -value : value;
    }
    if (exponent == 31)
        return kv_float_of_bits(sign | 0x7f800000 | (fraction != 0 ? 0x400000 : 0) |
                                fraction << 13);
    return kv_float_of_bits(sign | (exponent + 127 - 15) << 23 | fraction << 13);
}

/* Rounds a number of [0, 65504] to the nearest, ties to even. */
static inline uint16_t kv_fp16_round(float value)
{
    int exponent;
    uint32_t units;

    /* Numbers of [2^(exponent - 1), 2^exponent) have 11 bits, and 2^-24 is the least unit. */
    frexpf(value, &exponent);
    if (exponent < -13 || value == 0)
        exponent = -13;
    units = (uint32_t)rintf(ldexpf(value, 11 - exponent));
    /* The first bit of a normal number adds 1 to the exponent, and so does a carry. */
    return (uint16_t)(((uint32_t)(exponent + 13) << 10) + units);
}

#endif
