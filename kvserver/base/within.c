#include "kvserver/base/within.h"

#include <float.h>
#include <stdint.h>
#include <string.h>

typedef int32_t lanes __attribute__((vector_size(16)));

bool kv_are_within(const float *values, size_t n, float most)
{
    const lanes magnitude = {INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX};
    int32_t bound;
    size_t i = 0;

    /* Without their signs, floats are in the order of their bits, and NaN is the largest. */
    memcpy(&bound, &most, sizeof(bound));
    for (; i + 16 <= n; i += 16) {
        lanes bits[4];

        memcpy(bits, values + i, sizeof(bits));
        const lanes above = ((bits[0] & magnitude) > bound) | ((bits[1] & magnitude) > bound) |
                            ((bits[2] & magnitude) > bound) | ((bits[3] & magnitude) > bound);
        if ((above[0] | above[1] | above[2] | above[3]) != 0)
            return false;
    }
    for (; i < n; i++) {
        int32_t bits;

        memcpy(&bits, values + i, sizeof(bits));
        if ((bits & INT32_MAX) > bound)
            return false;
    }
    return true;
}

bool kv_are_finite(const float *values, size_t n)
{
    return kv_are_within(values, n, FLT_MAX);
}
