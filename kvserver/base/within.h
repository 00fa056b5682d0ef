/* within.h - whether many numbers lie within a bound, or are finite.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KVSERVER_BASE_WITHIN_H
#define KV_KVSERVER_BASE_WITHIN_H

#include <stdbool.h>
#include <stddef.h>

/* Returns whether -most <= value <= most for all values; false if one is a NaN.  most: 0 or
 * above.  Compares sixteen at a time: to look at each would take longer than a small query. */
bool kv_are_within(const float *values, size_t n, float most);

/* Returns whether no value is a NaN or an infinity. */
bool kv_are_finite(const float *values, size_t n);

#endif
