/* Selection of bytes: counts of those from a bound on, and the indices of the largest ones.
 *
 * Hot: the bytes of one head, which a scan has just left in L2, counted again and again, as
 * bisection does.  Cold: other bytes in every turn, so that no branch is learned. */
#include "tests/bench/kernels.h"

#include "kernels/byte_select.h"
#include "kvserver/base/random.h"

#include <stdlib.h>

enum {
    N = 128 << 10,
};

struct bytes {
    const struct kernels *kernels;
    size_t n_heads;
    uint8_t bound;
    uint32_t *chosen;
};

static void count_hot(void *arg, size_t i)
{
    const struct bytes *bytes = arg;
    size_t n = kv_bytes_count_from(bytes->kernels->to, N, (uint8_t)i);

    __asm__ volatile("" : : "r"(n));
}

static void count_cold(void *arg, size_t i)
{
    const struct bytes *bytes = arg;
    size_t n =
        kv_bytes_count_from(bytes->kernels->to + i % bytes->n_heads * N, N, bytes->bound);

    __asm__ volatile("" : : "r"(n));
}

static void collect(void *arg, size_t i)
{
    const struct bytes *bytes = arg;
    uint64_t ties = 100;

    kv_bytes_collect(bytes->kernels->to + i % bytes->n_heads * N, N, bytes->bound, &ties, 0,
                     bytes->chosen);
}

static bool measure(struct bytes *bytes, const char *name, bool is_hot, size_t k)
{
    const bool collects = k > 0;

    return kernels_measure(
        bytes->kernels,
        &(struct kernels_case){
            .name = name,
            .unit = "GB/s",
            .amount = 1e-9 * N,
            .params = {.n = N, .k = (unsigned)k, .data = is_hot ? "hot" : "cold"},
            .n_needs = 1,
            .needs = {{is_hot ? KERNELS_CACHED : KERNELS_READ, N, 0, 0}},
            .turn = collects ? collect
                    : is_hot ? count_hot
                             : count_cold,
            .arg = bytes,
        });
}

/* About normal, as the scores of rows are. */
static void fill(const struct kernels *kernels)
{
    struct kv_random random;

    kv_random_init(&random, 21);
    for (size_t i = 0; i < kernels->bytes; i++) {
        const uint64_t bits = kv_random_next(&random);

        kernels->to[i] = (uint8_t)(((bits & 255) + (bits >> 8 & 255) + (bits >> 16 & 255) +
                                    (bits >> 24 & 255)) /
                                   4);
    }
}

bool kernels_bytes(struct bench *bench, const struct bench_load *load)
{
    static const size_t few[] = {N / 16, N / 128};
    struct kernels *kernels = kernels_open(bench);
    struct bytes bytes = {.kernels = kernels, .bound = 128};
    bool is_good;

    (void)load;
    if (kernels == NULL)
        return false;
    bytes.n_heads = kernels->bytes / N;
    if (bytes.n_heads == 0)
        return true; /* little memory was asked for */
    bytes.chosen = kernels_alloc(N + KV_TOPK_SPARE, sizeof(*bytes.chosen));
    if (bytes.chosen == NULL)
        return false;
    fill(kernels);
    is_good = measure(&bytes, "kernels.bytes.count", true, 0) &&
              measure(&bytes, "kernels.bytes.count", false, 0);
    for (unsigned i = 0; is_good && i < sizeof(few) / sizeof(few[0]); i++) {
        bytes.bound = 0;
        for (unsigned bit = 128; bit > 0; bit /= 2)
            if (kv_bytes_count_from(kernels->to, N, (uint8_t)(bytes.bound | bit)) >= few[i])
                bytes.bound |= (uint8_t)bit;
        is_good = measure(&bytes, "kernels.bytes.collect", false, few[i]);
    }
    free(bytes.chosen);
    return is_good;
}
