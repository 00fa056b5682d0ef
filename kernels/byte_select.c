#include "kernels/byte_select.h"
#include "kernels/dispatch.h"

#include <string.h>

static const struct kv_bytes_kernels *best;

static int always(void)
{
    return 1;
}

/* ---- the reference ----------------------------------------------------------------------- */

static size_t scalar_count_from(const uint8_t *values, size_t n, uint8_t least)
{
    size_t n_from = 0;

    for (size_t i = 0; i < n; i++)
        n_from += values[i] >= least;
    return n_from;
}

static size_t scalar_collect(const uint8_t *values,
                             size_t n,
                             uint8_t bound,
                             uint64_t *ties,
                             uint32_t base,
                             uint32_t *ret_indices)
{
    size_t n_collected = 0;

    for (size_t i = 0; i < n; i++) {
        if (values[i] < bound || (values[i] == bound && *ties == 0))
            continue;
        *ties -= values[i] == bound;
        ret_indices[n_collected++] = base + (uint32_t)i;
    }
    return n_collected;
}

static const struct kv_bytes_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .count_from = scalar_count_from,
    .collect = scalar_collect,
};

/* Slowest first; the last one that this CPU supports is used. */
static const struct kv_bytes_kernels *const tiers[] = {
    &scalar,
#if defined(__x86_64__)
    &kv_bytes_avx2,
    &kv_bytes_avx512,
#endif
};

__attribute__((constructor)) static void choose(void)
{
    for (unsigned i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++)
        if (tiers[i]->supported())
            best = tiers[i];
}

const struct kv_bytes_kernels *kv_bytes_kernels_at(unsigned i)
{
    for (unsigned tier = 0; tier < sizeof(tiers) / sizeof(tiers[0]); tier++)
        if (tiers[tier]->supported() && i-- == 0)
            return tiers[tier];
    return NULL;
}

size_t kv_bytes_count_from(const uint8_t *values, size_t n, uint8_t least)
{
    return best->count_from(values, n, least);
}

size_t kv_bytes_collect(const uint8_t *values,
                        size_t n,
                        uint8_t bound,
                        uint64_t *ties,
                        uint32_t base,
                        uint32_t *ret_indices)
{
    return best->collect(values, n, bound, ties, base, ret_indices);
}

/* ---- the same for all -------------------------------------------------------------------- */

/* A counter that is stored cannot be loaded again for some cycles; neighbours are often equal,
 * so that those in a row have a table each. */
void kv_bytes_histogram(const uint8_t *values, size_t n, uint32_t bins[256])
{
    enum {
        TABLES = 4,
        SHORT = 512, /* bytes that are not worth the tables */
    };
    uint32_t tables[TABLES][UINT8_MAX + 1];
    size_t i = 0;

    if (n >= SHORT) {
        memset(tables, 0, sizeof(tables));
        for (; i + sizeof(uint64_t) <= n; i += sizeof(uint64_t)) {
            uint64_t eight;

            memcpy(&eight, values + i, sizeof(eight));
            for (unsigned at = 0; at < sizeof(eight); at++)
                tables[at % TABLES][eight >> 8 * at & UINT8_MAX]++;
        }
        for (unsigned bin = 0; bin <= UINT8_MAX; bin++)
            bins[bin] += tables[0][bin] + tables[1][bin] + tables[2][bin] + tables[3][bin];
    }
    for (; i < n; i++)
        bins[values[i]]++;
}
