/* floats.h - what the tests of kernels share: random numbers of every kind, memory exactly as
 * long as asked, and comparing to the bit.
 *
 * Threads: one.  Memory: floats_exact() gives, free with free() of what ret_base got.
 */
#ifndef KV_TESTS_SUPPORT_FLOATS_H
#define KV_TESTS_SUPPORT_FLOATS_H

#include "kvserver/base/clock.h"
#include "kvserver/base/random.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum float_kind {
    FLOATS_UNIFORM,  /* in (-1, 1) */
    FLOATS_INTEGERS, /* few small ones: ties, and sums without rounding */
    FLOATS_EQUAL,
    FLOATS_ANY_BITS, /* also NaN and denormal ones */
    FLOATS_SPECIAL, /* uniform, with NaN, inf, zeros, and the largest and smallest among them */
    FLOATS_N_KINDS,
};

/* KV_TEST_SEED, or another one each time. */
static inline uint64_t floats_seed(void)
{
    const char *text = getenv("KV_TEST_SEED");

    return text != NULL ? strtoull(text, NULL, 10) : kv_clock_now(&kv_clock_real);
}

static inline float floats_uniform(struct kv_random *random)
{
    return (float)((double)(kv_random_next(random) >> 40) / (1 << 24) * 2 - 1);
}

static inline float floats_one(struct kv_random *random, enum float_kind kind)
{
    static const float special[] = {NAN,     -NAN,     INFINITY, -INFINITY, 0.0f,   -0.0f,
                                    FLT_MAX, -FLT_MAX, FLT_MIN,  1e-42f,    -1e-42f};
    float value;
    uint32_t bits;

    switch (kind) {
    case FLOATS_INTEGERS:
        return (float)kv_random_below(random, 9) - 4;
    case FLOATS_EQUAL:
        return 0.75f;
    case FLOATS_ANY_BITS:
        bits = (uint32_t)kv_random_next(random);
        memcpy(&value, &bits, sizeof(value));
        return value;
    case FLOATS_SPECIAL:
        if (kv_random_below(random, 8) == 0)
            return special[kv_random_below(random, sizeof(special) / sizeof(special[0]))];
        return floats_uniform(random);
    default:
        return floats_uniform(random);
    }
}

static inline void
floats_fill(struct kv_random *random, enum float_kind kind, float *ret_values, size_t n)
{
    for (size_t i = 0; i < n; i++)
        ret_values[i] = floats_one(random, kind);
}

/* `bytes` bytes that end where the allocation ends and begin 0..7 times `alignment` behind its
 * begin. */
static inline void *
floats_exact(struct kv_random *random, size_t bytes, size_t alignment, void **ret_base)
{
    const size_t offset = alignment * kv_random_below(random, 8);

    *ret_base = malloc(bytes + offset > 0 ? bytes + offset : 1);
    if (*ret_base == NULL)
        abort();
    return (char *)*ret_base + offset;
}

/* The same bits, any NaN being the same as any other. */
static inline bool floats_same(float a, float b)
{
    return (isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof(a)) == 0;
}

static inline bool floats_all_same(const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!floats_same(a[i], b[i])) {
            fprintf(stderr, "element %zu of %zu: %a and %a\n", i, n, (double)a[i],
                    (double)b[i]);
            return false;
        }
    return true;
}

#endif
