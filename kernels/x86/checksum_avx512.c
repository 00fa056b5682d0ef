/* "fold" of checksum_x86.c with registers of four 128-bit lanes.  The crc32 instruction and the
 * carry-less multiplier are separate units of the core.  Measured on Zen 4, they reach 24 and
 * 48 GB/s, so a third of the bytes goes to the first and two thirds to the second. */
#include "kernels/checksum.h"
#include "kernels/dispatch.h"
#include "kernels/x86/checksum_common.h"

#if defined(__x86_64__)

#define TARGET \
    __attribute__((target("sse4.2,pclmul,avx2,avx512f,avx512vl,avx512bw,vpclmulqdq")))

enum {
    STEP = 256,  /* bytes folded per iteration, in four registers */
    STREAM = 40, /* bytes of each of the crc32 streams per iteration: 120 of 376 */
    TURN_BYTES = STEP + STREAMS * STREAM,
    N_PARTS = 3,
    FOLDED = 6, /* rows folded at once, beside STREAMS rows of the crc32 instruction */
    GROUP = FOLDED + STREAMS,
};

/* Iterations before the folded part and the streams are joined; longest first. */
static const size_t part_turns[N_PARTS] = {64, 8, 2};
static struct checksum_join joins[N_PARTS];
static struct checksum_fold fold_512, fold_2048;
static uint64_t lanes_by[8]; /* factors that move the first three lanes to the last one */

/* Before main(), as the tables of checksum.c. */
__attribute__((constructor)) static void avx512_init(void)
{
    for (unsigned i = 0; i < N_PARTS; i++)
        joins[i] = checksum_join_of(part_turns[i] * STREAM, part_turns[i] * TURN_BYTES);
    fold_512 = checksum_fold_of(512);
    fold_2048 = checksum_fold_of(2048);
    for (unsigned lane = 0; lane < 3; lane++) {
        const struct checksum_fold by = checksum_fold_of(128 * (3 - lane));

        lanes_by[2 * lane] = by.low;
        lanes_by[2 * lane + 1] = by.high;
    }
}

TARGET INLINE __m512i load512(const uint8_t *at)
{
    return _mm512_loadu_si512(at);
}

TARGET INLINE __m512i fold_by(const struct checksum_fold *fold)
{
    return _mm512_broadcast_i32x4(_mm_set_epi64x((long long)fold->high, (long long)fold->low));
}

TARGET INLINE __m512i fold_lanes(__m512i value, __m512i by, __m512i next)
{
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(value, by, 0x00),
                                     _mm512_clmulepi64_epi128(value, by, 0x11), next, 0x96);
}

/* Loads the first 64 bytes and adds the state before them, as the CRC adds it to its next
 * bytes. */
TARGET INLINE __m512i first_lanes(uint32_t state, const uint8_t *at)
{
    return _mm512_xor_si512(_mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)), load512(at));
}

/* Reduces 64 folded bytes to a state. */
TARGET INLINE uint64_t fold_finish(__m512i value)
{
    const __m512i moved = fold_lanes(value, load512((const uint8_t *)lanes_by),
                                     _mm512_maskz_mov_epi64(0xc0, value));
    const __m256i two =
        _mm256_xor_si256(_mm512_castsi512_si256(moved), _mm512_extracti64x4_epi64(moved, 1));
    const __m128i one =
        _mm_xor_si128(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));

    return _mm_crc32_u64(_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(one)),
                         (uint64_t)_mm_extract_epi64(one, 1));
}

/* Returns the state after turns * TURN_BYTES bytes: first the part that is folded, then the
 * streams.  `state` is joined at the end, so that parts do not wait for each other. */
TARGET INLINE uint64_t fold_part(uint64_t state,
                                 const uint8_t *at,
                                 size_t turns,
                                 const struct checksum_join *join)
{
    const uint8_t *words = at + turns * STEP;
    const size_t stream_bytes = turns * STREAM;
    const __m512i far = fold_by(&fold_2048), near = fold_by(&fold_512);
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    uint64_t first = 0, second = 0, third = 0;

    for (size_t turn = 0; turn < turns; turn++) {
        a = fold_lanes(a, far, load512(at));
        b = fold_lanes(b, far, load512(at + 64));
        c = fold_lanes(c, far, load512(at + 128));
        d = fold_lanes(d, far, load512(at + 192));
        at += STEP;
#pragma GCC unroll 5
        for (size_t i = 0; i < STREAM; i += 8, words += 8) {
            first = _mm_crc32_u64(first, load64(words));
            second = _mm_crc32_u64(second, load64(words + stream_bytes));
            third = _mm_crc32_u64(third, load64(words + 2 * stream_bytes));
        }
    }
    d = fold_lanes(fold_lanes(fold_lanes(a, near, b), near, c), near, d);
    return third ^
           _mm_crc32_u64(0, shift(state, join->by_all) ^ shift(fold_finish(d), join->by_3) ^
                                shift(first, join->by_2) ^ shift(second, join->by_1));
}

TARGET static uint32_t fold512_crc32c(uint32_t seed, const void *data, size_t bytes)
{
    const uint8_t *at = data;
    uint64_t state = ~seed;

    for (unsigned i = 0; i < N_PARTS; i++)
        for (const size_t part_bytes = part_turns[i] * TURN_BYTES; bytes >= part_bytes;
             bytes -= part_bytes, at += part_bytes)
            state = fold_part(state, at, part_turns[i], &joins[i]);
    return ~(uint32_t)checksum_sse42_state(state, at, bytes);
}

/* Computes the CRCs of nine rows of at least 64 bytes: six are folded, three use the crc32
 * instruction.  Prefetches `ahead`.  `rest` is row_bytes % 64, a constant at the call for 0,
 * the value of most models' rows. */
TARGET INLINE void fold_nine_rows(const uint8_t *const *rows,
                                  struct checksum_ahead *ahead,
                                  size_t row_bytes,
                                  size_t rest,
                                  const uint32_t *seeds,
                                  uint32_t *ret_crcs)
{
    const uint8_t *const *streams = rows + FOLDED;
    const size_t lanes_bytes = row_bytes - rest;
    const __m512i by = fold_by(&fold_512);
    uint64_t states[STREAMS];
    __m512i lanes[FOLDED];

#pragma GCC unroll 3
    for (unsigned row = 0; row < STREAMS; row++)
        states[row] = ~seeds[FOLDED + row];
#pragma GCC unroll 6
    for (unsigned row = 0; row < FOLDED; row++)
        lanes[row] = first_lanes(~seeds[row], rows[row]);
    for (size_t i = 64;; i += 64) {
#pragma GCC unroll 8
        for (size_t word = i - 64; word < i; word += 8) {
#pragma GCC unroll 3
            for (unsigned row = 0; row < STREAMS; row++)
                states[row] = _mm_crc32_u64(states[row], load64(streams[row] + word));
        }
        prefetch_ahead(ahead, GROUP);
        if (i >= lanes_bytes)
            break;
#pragma GCC unroll 6
        for (unsigned row = 0; row < FOLDED; row++)
            lanes[row] = fold_lanes(lanes[row], by, load512(rows[row] + i));
    }
#pragma GCC unroll 6
    for (unsigned row = 0; row < FOLDED; row++)
        ret_crcs[row] =
            ~(uint32_t)state_bytes(fold_finish(lanes[row]), rows[row] + lanes_bytes, rest);
#pragma GCC unroll 3
    for (unsigned row = 0; row < STREAMS; row++)
        ret_crcs[FOLDED + row] =
            ~(uint32_t)state_bytes(states[row], streams[row] + lanes_bytes, rest);
}

TARGET static void fold512_list_crc(const void *const *rows,
                                    size_t n_rows,
                                    bool is_run,
                                    size_t row_bytes,
                                    const uint32_t *seeds,
                                    uint32_t *ret_crcs)
{
    const uint8_t *const *at = (const uint8_t *const *)rows;
    const size_t rest = row_bytes & 63;
    struct checksum_ahead ahead = ahead_of(at, n_rows, is_run, GROUP, row_bytes);
    size_t row = 0;

    for (; row_bytes >= 64 && row + GROUP <= n_rows; row += GROUP)
        if (rest == 0)
            fold_nine_rows(at + row, &ahead, row_bytes, 0, seeds + row, ret_crcs + row);
        else
            fold_nine_rows(at + row, &ahead, row_bytes, rest, seeds + row, ret_crcs + row);
    checksum_sse42_list(rows + row, n_rows - row, is_run, row_bytes, seeds + row,
                        ret_crcs + row);
}

static int has_fold512(void)
{
    return checksum_has_fold() && kv_isa() >= KV_ISA_AVX512;
}

const struct kv_checksum_kernels kv_checksum_fold512 = {
    .name = "fold512",
    .supported = has_fold512,
    .crc32c = fold512_crc32c,
    .list_crc = fold512_list_crc,
};

#endif
