/* histogram.h - a log-linear histogram of times: 16 steps per power of two, error below 6.3 %.
 *
 * Threads: one writer; readers on other threads see a slightly old state (relaxed atomics).
 * Memory: the caller's; initialized by zeroing.
 */
#ifndef KV_KVSERVER_BASE_HISTOGRAM_H
#define KV_KVSERVER_BASE_HISTOGRAM_H

#include <stdatomic.h>
#include <stdint.h>

enum {
    KV_HISTOGRAM_BUCKETS = 16 * 40
};

struct kv_histogram {
    _Atomic uint64_t count;
    _Atomic uint64_t sum;
    _Atomic uint64_t buckets[KV_HISTOGRAM_BUCKETS];
};

void kv_histogram_add(struct kv_histogram *histogram, uint64_t value);

/* Adds the counts of `from`. */
void kv_histogram_merge(struct kv_histogram *into, const struct kv_histogram *from);

/* Returns how many values are below 2^power; a power of 64: all. */
uint64_t kv_histogram_below(const struct kv_histogram *histogram, unsigned power);

/* Returns the q-quantile (q in 0..1), rounded up to the end of its bucket; 0 if empty. */
uint64_t kv_histogram_quantile(const struct kv_histogram *histogram, double q);

#endif
