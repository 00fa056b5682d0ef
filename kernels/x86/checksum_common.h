/* checksum_common.h - private to kernels/: what checksum_x86.c and checksum_avx512.c have
 * in common.
 *
 * Threads: pure functions once main() runs: constants are made before it.  Memory: the
 * caller's.
 */
#ifndef KV_KERNELS_X86_CHECKSUM_COMMON_H
#define KV_KERNELS_X86_CHECKSUM_COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#define TARGET_SSE42 __attribute__((target("sse4.2,pclmul")))
#define TARGET_FOLD  __attribute__((target("sse4.2,pclmul,avx2,vpclmulqdq")))
#define INLINE       static inline __attribute__((always_inline))

enum {
    STREAMS = 3, /* of the crc32 instruction, side by side */
    CHECKSUM_LINE = 64,
    /* How far ahead bytes are fetched.  Measured for a run of rows in L3: 10-25 % over none,
     * flat from 4 to 8 KB.  Rows that lie alone come from farther away. */
    AHEAD_BYTES = 4096,
    ALONE_BYTES = 16 << 10,
};

/* Shifts of a state by 1, 2 and 3 streams and, where bytes are folded, by the whole part. */
struct checksum_join {
    uint64_t by_1, by_2, by_3, by_all;
};
struct checksum_join checksum_join_of(uint64_t stream_bytes, uint64_t all_bytes);

/* For the two halves of a 128-bit lane: by how many bits it moves. */
struct checksum_fold {
    uint64_t low, high;
};
struct checksum_fold checksum_fold_of(uint64_t bits);

INLINE uint64_t load64(const uint8_t *at)
{
    uint64_t word;

    memcpy(&word, at, sizeof(word));
    return word;
}

/* Two words without carries; only the low half of the answer is ever set. */
TARGET_SSE42 INLINE uint64_t shift(uint64_t state, uint64_t power)
{
    return (uint64_t)_mm_cvtsi128_si64(_mm_clmulepi64_si128(
        _mm_cvtsi64_si128((long long)state), _mm_cvtsi64_si128((long long)power), 0x00));
}

TARGET_SSE42 INLINE uint64_t state_bytes(uint64_t state, const uint8_t *at, size_t bytes)
{
    for (; bytes >= 8; bytes -= 8, at += 8)
        state = _mm_crc32_u64(state, load64(at));
    if (bytes & 4) {
        uint32_t word;

        memcpy(&word, at, sizeof(word));
        state = _mm_crc32_u32((uint32_t)state, word);
        at += 4;
    }
    for (bytes &= 3; bytes > 0; bytes--, at++)
        state = _mm_crc32_u8((uint32_t)state, *at);
    return state;
}

/* Rows that are fetched while those before them are summed up: several places are read at once,
 * too many for the hardware's prefetcher.  Line by line through each row: measured (Zen 4), the
 * same lines in turns from some rows come at half the rate. */
struct checksum_ahead {
    const uint8_t *const *rows, *const *rows_end; /* behind the one at hand */
    const uint8_t *at;                            /* in it */
    size_t n_lines, row_lines;                    /* of it, from `at` on; of each */
};

INLINE size_t lines_of(size_t bytes)
{
    return (bytes + CHECKSUM_LINE - 1) / CHECKSUM_LINE;
}

/* is_run: rows side by side are as one; what lies behind them is often asked about next, and at
 * worst these are lines that nobody uses. */
INLINE struct checksum_ahead ahead_of(
    const uint8_t *const *rows, size_t n_rows, bool is_run, size_t n_done, size_t row_bytes)
{
    struct checksum_ahead ahead = {.row_lines = lines_of(row_bytes)};

    if (n_done < ALONE_BYTES / (row_bytes + 1))
        n_done = ALONE_BYTES / (row_bytes + 1);
    if (is_run && n_rows > 0) {
        ahead.at = (const uint8_t *)((uintptr_t)rows[0] + AHEAD_BYTES);
        ahead.n_lines = lines_of(n_rows * row_bytes);
    } else if (n_done < n_rows) {
        ahead.rows = rows + n_done;
        ahead.rows_end = rows + n_rows;
    }
    return ahead;
}

/* Asks for the next n lines.  n is a constant, and this goes on inside of the loops over bytes:
 * lines of one row are asked for with few branches, of a run with one. */
INLINE void prefetch_ahead(struct checksum_ahead *ahead, size_t n)
{
    if (ahead->n_lines >= n) {
#pragma GCC unroll 16
        for (size_t i = 0; i < n; i++)
            __builtin_prefetch(ahead->at + i * CHECKSUM_LINE, 0, 3);
        ahead->at += n * CHECKSUM_LINE;
        ahead->n_lines -= n;
        return;
    }
    while (n > 0) {
        if (ahead->n_lines == 0) {
            if (ahead->rows == ahead->rows_end)
                return;
            ahead->at = *ahead->rows++;
            ahead->n_lines = ahead->row_lines;
        }
        const uint8_t *end =
            ahead->at + (n < ahead->n_lines ? n : ahead->n_lines) * CHECKSUM_LINE;

        n -= (size_t)(end - ahead->at) / CHECKSUM_LINE;
        ahead->n_lines -= (size_t)(end - ahead->at) / CHECKSUM_LINE;
        for (; ahead->at != end; ahead->at += CHECKSUM_LINE)
            __builtin_prefetch(ahead->at, 0, 3);
    }
}

/* Whether there is the crc32 instruction, AVX2 and VPCLMULQDQ. */
int checksum_has_fold(void);

/* By the crc32 instruction alone. */
uint64_t checksum_sse42_state(uint64_t state, const uint8_t *at, size_t bytes);
void checksum_sse42_list(const void *const *rows,
                         size_t n_rows,
                         bool is_run,
                         size_t row_bytes,
                         const uint32_t *seeds,
                         uint32_t *ret_crcs);

#endif

#endif
