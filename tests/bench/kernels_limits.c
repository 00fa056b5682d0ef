/* What one processor can do at best: the limits that kernels are compared with.
 *
 * Tricks that were worth it: reads and copies in huge pages; of isolated rows, prefetches into
 * L2 some rows ahead (into L1 its few miss buffers bound them); of FMAs, more sums than the
 * latency times the number of units. */
#include "tests/bench/kernels.h"

#include "kvserver/base/random.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2   __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f")))
#endif

enum {
    COPY_BYTES = 1 << 20, /* as data moves; one huge memcpy() would take another path */
    CACHED_BYTES = 128 << 10,
    READ_PARTS = 4, /* read side by side: more requests under way than one stream makes */
    READ_AHEAD = 1024,
    ROWS_AHEAD = 16,
    LINES_AHEAD = 64, /* of rows that are one cache line */
    FMA_SUMS = 12,
    FMA_TURNS = 1 << 22,
};

const char *kernels_limit_name(enum kernels_limit limit)
{
    static const char *const names[] = {
        [KERNELS_READ] = "memory read",        [KERNELS_COPY] = "memcpy",
        [KERNELS_STREAM] = "stream copy",      [KERNELS_CACHED] = "cache read",
        [KERNELS_ROWS] = "isolated rows read", [KERNELS_FMA] = "fma",
        [KERNELS_UPDATE] = "memory update",
    };

    return names[limit];
}

/* ---- plain C ----------------------------------------------------------------------------- */

static void read_plain(const uint8_t *from, size_t bytes)
{
    uint64_t sums[8] = {0};

    for (size_t i = 0; i + sizeof(sums) <= bytes; i += sizeof(sums)) {
        uint64_t line[8];

        memcpy(line, from + i, sizeof(line));
        for (unsigned j = 0; j < 8; j++)
            sums[j] ^= line[j];
    }
    __asm__ volatile("" : : "m"(sums)); /* somebody might look at them */
}

static size_t rows_ahead(size_t part_bytes)
{
    return part_bytes > 64 ? ROWS_AHEAD : LINES_AHEAD;
}

static void rows_plain(
    const uint8_t *from, const uint32_t *rows, size_t n, size_t row_bytes, size_t part_bytes)
{
    const size_t n_ahead = rows_ahead(part_bytes);

    for (size_t i = 0; i < n; i++) {
        for (size_t at = 0; at < part_bytes; at += 64)
            __builtin_prefetch(from + rows[i + n_ahead] * row_bytes + at, 0, 2);
        read_plain(from + rows[i] * row_bytes, part_bytes);
    }
}

static double fma_plain(void)
{
    float sums[64] = {0};
    volatile float source = 0.5f;
    const float factor = source;

    for (size_t i = 0; i < FMA_TURNS; i++)
        for (unsigned j = 0; j < 64; j++)
            sums[j] = sums[j] * factor + factor;
    __asm__ volatile("" : : "m"(sums));
    return 2.0 * 64 * FMA_TURNS;
}

/* ---- x86 --------------------------------------------------------------------------------- */

#if defined(__x86_64__)

AVX2 static void read_avx2(const uint8_t *from, size_t bytes)
{
    const size_t part = bytes / READ_PARTS;
    __m256i sums[4];

#pragma GCC unroll 4
    for (unsigned j = 0; j < 4; j++)
        sums[j] = _mm256_setzero_si256();
    for (size_t i = 0; i + 256 <= part; i += 256)
        for (const uint8_t *at = from + i; at < from + bytes; at += part)
#pragma GCC unroll 4
            for (unsigned j = 0; j < 4; j++) {
                __builtin_prefetch(at + READ_AHEAD + 64 * j, 0, 2);
                sums[j] = _mm256_xor_si256(
                    sums[j],
                    _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(at + 64 * j)),
                                     _mm256_loadu_si256((const __m256i *)(at + 64 * j + 32))));
            }
#pragma GCC unroll 4
    for (unsigned j = 0; j < 4; j++)
        __asm__ volatile("" : : "x"(sums[j])); /* somebody might look at them */
}

AVX2 static void rows_avx2(
    const uint8_t *from, const uint32_t *rows, size_t n, size_t row_bytes, size_t part_bytes)
{
    __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    const size_t n_ahead = rows_ahead(part_bytes);

    for (size_t i = 0; i < n; i++) {
        const uint8_t *ahead = from + rows[i + n_ahead] * row_bytes;
        const uint8_t *row = from + rows[i] * row_bytes;

        for (size_t at = 0; at < part_bytes; at += 64) {
            __builtin_prefetch(ahead + at, 0, 2);
            for (unsigned j = 0; j < 2; j++)
                sums[j] = _mm256_xor_si256(
                    sums[j], _mm256_loadu_si256((const __m256i *)(row + at + 32 * j)));
        }
    }
    __asm__ volatile("" : : "x"(sums[0]), "x"(sums[1]));
}

AVX2 static double fma_avx2(void)
{
    volatile float source = 0.5f;
    const __m256 factor = _mm256_set1_ps(source);
    __m256 sums[FMA_SUMS];

#pragma GCC unroll 12
    for (unsigned j = 0; j < FMA_SUMS; j++)
        sums[j] = factor;
    for (size_t i = 0; i < FMA_TURNS; i++)
#pragma GCC unroll 12
        for (unsigned j = 0; j < FMA_SUMS; j++) {
            sums[j] = _mm256_fmadd_ps(sums[j], factor, factor);
            __asm__ volatile("" : "+x"(sums[j])); /* is computed, and stays in its register */
        }
    return 2.0 * 8 * FMA_SUMS * FMA_TURNS;
}

AVX512 static double fma_avx512(void)
{
    volatile float source = 0.5f;
    const __m512 factor = _mm512_set1_ps(source);
    __m512 sums[FMA_SUMS];

#pragma GCC unroll 12
    for (unsigned j = 0; j < FMA_SUMS; j++)
        sums[j] = factor;
    for (size_t i = 0; i < FMA_TURNS; i++)
#pragma GCC unroll 12
        for (unsigned j = 0; j < FMA_SUMS; j++) {
            sums[j] = _mm512_fmadd_ps(sums[j], factor, factor);
            __asm__ volatile("" : "+v"(sums[j]));
        }
    return 2.0 * 16 * FMA_SUMS * FMA_TURNS;
}

/* Stores that leave the caches alone; both of them are aligned to pages. */
AVX2 static void stream_avx2(uint8_t *to, const uint8_t *from, size_t bytes)
{
    for (size_t i = 0; i + 128 <= bytes; i += 128)
#pragma GCC unroll 4
        for (unsigned j = 0; j < 4; j++)
            _mm256_stream_si256((__m256i *)(to + i + 32 * j),
                                _mm256_load_si256((const __m256i *)(from + i + 32 * j)));
    _mm_sfence();
}

AVX2 static void update_avx2(uint8_t *to, size_t bytes)
{
    __m256i change = _mm256_setzero_si256();

    __asm__("" : "+x"(change)); /* nobody knows that it changes nothing */
    for (size_t i = 0; i + 128 <= bytes; i += 128)
#pragma GCC unroll 4
        for (unsigned j = 0; j < 4; j++) {
            __m256i *at = (__m256i *)(to + i + 32 * j);

            _mm256_storeu_si256(at, _mm256_xor_si256(_mm256_loadu_si256(at), change));
        }
}

#endif

/* ---- by what the processor has ----------------------------------------------------------- */

static int has_avx2(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 0;
#endif
}

static void read_bytes(const uint8_t *from, size_t bytes)
{
#if defined(__x86_64__)
    if (has_avx2()) {
        read_avx2(from, bytes);
        return;
    }
#endif
    read_plain(from, bytes);
}

/* The first bytes of rows, of which there are rows_ahead() more than n. */
static void read_parts(
    const uint8_t *from, const uint32_t *rows, size_t n, size_t row_bytes, size_t part_bytes)
{
#if defined(__x86_64__)
    if (has_avx2()) {
        rows_avx2(from, rows, n, row_bytes, part_bytes);
        return;
    }
#endif
    rows_plain(from, rows, n, row_bytes, part_bytes);
}

static double multiply(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f"))
        return fma_avx512();
    if (has_avx2())
        return fma_avx2();
#endif
    return fma_plain();
}

static void stream(uint8_t *to, const uint8_t *from, size_t bytes)
{
#if defined(__x86_64__)
    if (has_avx2()) {
        stream_avx2(to, from, bytes);
        return;
    }
#endif
    memcpy(to, from, bytes);
}

static void update(uint8_t *to, size_t bytes)
{
    uint64_t change = 0;

#if defined(__x86_64__)
    if (has_avx2()) {
        update_avx2(to, bytes);
        return;
    }
#endif
    __asm__("" : "+r"(change));
    for (size_t i = 0; i + sizeof(change) <= bytes; i += sizeof(change)) {
        uint64_t number;

        memcpy(&number, to + i, sizeof(number));
        number ^= change;
        memcpy(to + i, &number, sizeof(number));
    }
}

/* ---- rates ------------------------------------------------------------------------------- */

/* Rows in order, with gaps that nothing can guess, other ones every time. */
static double rows_rate(const struct kernels *kernels, const struct kernels_need *need)
{
    static uint64_t seed;
    const size_t n_ahead = rows_ahead(need->part_bytes);
    const size_t n = kernels->bytes / need->row_bytes / KERNELS_GAP - n_ahead;
    uint32_t *rows = malloc((n + n_ahead) * sizeof(*rows));
    struct kv_random random;
    double begin;

    if (rows == NULL)
        return 0;
    kv_random_init(&random, seed++);
    for (size_t i = 0; i < n + n_ahead; i++)
        rows[i] = (uint32_t)(i * KERNELS_GAP + kv_random_below(&random, KERNELS_GAP));
    begin = kernels_now();
    read_parts(kernels->from, rows, n, need->row_bytes, need->part_bytes);
    begin = kernels_now() - begin;
    free(rows);
    return (double)(n * need->part_bytes) / begin;
}

double kernels_limit_rate(const struct kernels *kernels, const struct kernels_need *need)
{
    double begin = kernels_now(), amount = (double)kernels->bytes;

    switch (need->limit) {
    case KERNELS_READ:
        read_bytes(kernels->from, kernels->bytes);
        break;
    case KERNELS_CACHED:
        for (size_t i = 0; i < kernels->bytes; i += CACHED_BYTES)
            read_bytes(kernels->from, CACHED_BYTES);
        break;
    case KERNELS_COPY:
        for (size_t i = 0; i + COPY_BYTES <= kernels->bytes; i += COPY_BYTES)
            memcpy(kernels->to + i, kernels->from + i, COPY_BYTES);
        break;
    case KERNELS_STREAM:
        stream(kernels->to, kernels->from, kernels->bytes);
        break;
    case KERNELS_UPDATE:
        update(kernels->to, kernels->bytes);
        break;
    case KERNELS_ROWS:
        return rows_rate(kernels, need);
    case KERNELS_FMA:
        amount = multiply();
        break;
    }
    return amount / (kernels_now() - begin);
}
