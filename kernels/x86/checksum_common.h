/* checksum_common.h - private to kernels/: joins of states and prefetching, for checksum_x86.c
 * and checksum_avx512.c.
 *
 * Threads: pure functions from main() on; their constants are computed before it.  Memory: the
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
    STREAMS = 3,        /* of the crc32 instruction, at once: its latency in cycles */
    CHECKSUM_LINE = 64, /* bytes of a cache line */
    /* How far ahead bytes are prefetched.  Measured for a run of rows in L3: 10 to 25 % faster
     * than without, with little difference between 4 and 8 KB.  Isolated rows, which the
     * hardware prefetcher does not help, need more. */
    AHEAD_BYTES = 4096,
    ALONE_BYTES = 16 << 10,
};

/* Factors that shift a state by 1, 2 and 3 streams and, where bytes are folded, by the whole
 * part.
 */
struct checksum_join {
    uint64_t by_1, by_2, by_3, by_all;
};
struct checksum_join checksum_join_of(uint64_t stream_bytes, uint64_t all_bytes);

/* Factors that move a 128-bit lane by a number of bits, one for each of its halves. */
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

/* Multiplies a state by a power of x, without reducing it.  Both have 32 bits, so the product
 * fits the low half. */
TARGET_SSE42 INLINE uint64_t shift(uint64_t state, uint64_t power)
{
    return (uint64_t)_mm_cvtsi128_si64(_mm_clmulepi64_si128(
        _mm_cvtsi64_si128((long long)state), _mm_cvtsi64_si128((long long)power), 0x00));
}

/* Returns the state after `bytes` bytes, by one stream. */
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

/* A cursor over the rows to prefetch while earlier ones are computed.  The kernels read more
 * places at once than the hardware prefetcher follows.  The cursor takes all lines of a row
 * before the next row; measured on Zen 4, alternating between rows halves the rate. */
struct checksum_ahead {
    const uint8_t *const *rows, *const *rows_end; /* the rows after the current one */
    const uint8_t *at;                            /* next line of the current row */
    size_t n_lines, row_lines;                    /* lines left of it; lines of a whole row */
};

INLINE size_t lines_of(size_t bytes)
{
    return (bytes + CHECKSUM_LINE - 1) / CHECKSUM_LINE;
}

/* Returns a cursor that is ahead of the first n_done rows.  is_run: adjacent rows count as one
 * long row.  The cursor then passes the end by AHEAD_BYTES: the next call often continues
 * there, and if it does not, some lines were prefetched in vain. */
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

/* Prefetches the next n lines, n a constant.  It runs inside of the loops over bytes, so n
 * lines of one row take a single branch. */
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

/* Returns whether the CPU has the crc32 instruction, AVX2 and VPCLMULQDQ, and KV_ISA allows
 * them.
 */
int checksum_has_fold(void);

/* The state after some bytes, and the CRCs of a list of rows, by the crc32 instruction alone:
 * for what is left over after folding. */
uint64_t checksum_sse42_state(uint64_t state, const uint8_t *at, size_t bytes);
void checksum_sse42_list(const void *const *rows,
                         size_t n_rows,
                         bool is_run,
                         size_t row_bytes,
                         const uint32_t *seeds,
                         uint32_t *ret_crcs);

#endif

#endif
