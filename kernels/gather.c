#include "kernels/gather.h"
#include "kernels/dispatch.h"
#include "kernels/gather_common.h"

#include <string.h>

static const struct kv_gather_kernels *best;

static int always(void)
{
    return 1;
}

static void scalar_gather(void *dst, const void *const *rows, size_t n_rows, size_t row_bytes)
{
    uint8_t *to = dst;
    size_t ahead;

    if (row_bytes == 0)
        return;
    ahead = kv_gather_ahead(row_bytes);
    for (size_t i = 0; i < ahead && i < n_rows; i++)
        kv_gather_prefetch(rows[i], row_bytes);
    for (size_t i = 0; i < n_rows; i++) {
        if (ahead < n_rows - i)
            kv_gather_prefetch(rows[i + ahead], row_bytes);
        memcpy(to, rows[i], row_bytes);
        to += row_bytes;
    }
}

static const struct kv_gather_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .gather = scalar_gather,
};

/* Slowest first; the last one that this CPU supports is used. */
static const struct kv_gather_kernels *const tiers[] = {
    &scalar,
#if defined(__x86_64__)
    &kv_gather_avx2,
#endif
};

__attribute__((constructor)) static void choose(void)
{
    for (unsigned i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++)
        if (tiers[i]->supported())
            best = tiers[i];
}

const struct kv_gather_kernels *kv_gather_kernels_at(unsigned i)
{
    for (unsigned tier = 0; tier < sizeof(tiers) / sizeof(tiers[0]); tier++)
        if (tiers[tier]->supported() && i-- == 0)
            return tiers[tier];
    return NULL;
}

void kv_rows_gather(void *dst, const void *const *rows, size_t n_rows, size_t row_bytes)
{
    best->gather(dst, rows, n_rows, row_bytes);
}
