#include "kvserver/base/histogram.h"

enum {
    STEPS = 16,
    STEPS_BITS = 4
};

/* Values below STEPS have a bucket each; above, every power of two has STEPS buckets.  What is
 * too large for the last power is counted in the last bucket. */
static unsigned bucket_of(uint64_t value)
{
    if (value < STEPS)
        return (unsigned)value;

    unsigned shift = 63u - (unsigned)__builtin_clzll(value) - STEPS_BITS;
    unsigned bucket = (shift + 1) * STEPS + (unsigned)(value >> shift) % STEPS;

    return bucket < KV_HISTOGRAM_BUCKETS ? bucket : KV_HISTOGRAM_BUCKETS - 1;
}

static uint64_t bucket_last(unsigned bucket)
{
    if (bucket < STEPS)
        return bucket;

    unsigned shift = bucket / STEPS - 1;

    return ((uint64_t)(STEPS + bucket % STEPS + 1) << shift) - 1;
}

/* One writer, so no locked addition is needed. */
static void add(_Atomic uint64_t *counter, uint64_t value)
{
    uint64_t before = atomic_load_explicit(counter, memory_order_relaxed);

    atomic_store_explicit(counter, before + value, memory_order_relaxed);
}

void kv_histogram_add(struct kv_histogram *histogram, uint64_t value)
{
    add(&histogram->buckets[bucket_of(value)], 1);
    add(&histogram->count, 1);
    add(&histogram->sum, value);
}

void kv_histogram_merge(struct kv_histogram *into, const struct kv_histogram *from)
{
    for (unsigned i = 0; i < KV_HISTOGRAM_BUCKETS; i++)
        add(&into->buckets[i], atomic_load_explicit(&from->buckets[i], memory_order_relaxed));
    add(&into->count, atomic_load_explicit(&from->count, memory_order_relaxed));
    add(&into->sum, atomic_load_explicit(&from->sum, memory_order_relaxed));
}

uint64_t kv_histogram_below(const struct kv_histogram *histogram, unsigned power)
{
    const unsigned end = power < 64 ? bucket_of((uint64_t)1 << power) : KV_HISTOGRAM_BUCKETS;
    uint64_t n = 0;

    for (unsigned i = 0; i < end; i++)
        n += atomic_load_explicit(&histogram->buckets[i], memory_order_relaxed);
    return n;
}

uint64_t kv_histogram_quantile(const struct kv_histogram *histogram, double q)
{
    uint64_t counts[KV_HISTOGRAM_BUCKETS], total = 0, rank = 1, seen = 0;

    /* The writer may be active, so the total is the sum of what is read here, not `count`. */
    for (unsigned i = 0; i < KV_HISTOGRAM_BUCKETS; i++) {
        counts[i] = atomic_load_explicit(&histogram->buckets[i], memory_order_relaxed);
        total += counts[i];
    }
    if (total == 0)
        return 0;
    if (q >= 1)
        rank = total;
    else if (q > 0) {
        double exact = q * (double)total;

        rank = (uint64_t)exact;
        if ((double)rank < exact || rank == 0)
            rank++;
        if (rank > total)
            rank = total;
    }
    for (unsigned i = 0;; i++) {
        seen += counts[i];
        if (seen >= rank)
            return bucket_last(i);
    }
}
