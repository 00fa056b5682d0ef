/* CRC32C by the crc32 instruction, alone ("sse42") and together with the carry-less multiplier
 * ("fold").  Folding is Gopal et al., Fast CRC Computation for Generic Polynomials Using
 * PCLMULQDQ Instruction (Intel, 2009).
 *
 * A "state" is the CRC without its two inversions.  States are linear in the data, so parts of
 * a buffer can be computed separately and joined. */
#include "kernels/checksum.h"
#include "kernels/dispatch.h"
#include "kernels/x86/checksum_common.h"

#if defined(__x86_64__)

/* The crc32 instruction has a throughput of 8 bytes per cycle and a latency of 3 cycles, so
 * three streams run at once.  Their states are joined by multiplying with a power of x.  The
 * product of two reflected words is one bit short, and the instruction that reduces it
 * multiplies by x^32, so exponents are less by 33.
 *
 * The carry-less multiplier is a separate unit of the core with about the same throughput, so
 * "fold" gives it half of the bytes. */
enum {
    LONG_BYTES = 2048, /* of a stream, before the three are joined */
    SHORT_BYTES = 128,
    JOIN_BYTES = 72, /* below, one stream is as fast: a join takes as long as 4 words */
    FOLD_STEP = 128, /* bytes folded per iteration, in four registers */
    FOLD_STREAM =
        40,         /* bytes of each crc32 stream per iteration, which take as long as a step */
    FOLD_LONG = 64, /* iterations before the parts are joined */
    FOLD_SHORT = 8,
    GROUP = 6, /* rows at once: three folded, three by the crc32 instruction */
};

static struct checksum_join join_long, join_short, join_fold_long, join_fold_short;
/* Factors that shift a state by n words, for data too short for streams of SHORT_BYTES. */
static uint32_t shift_by_words[2 * SHORT_BYTES / 8];
static struct checksum_fold fold_128, fold_256, fold_1024;

/* a * b modulo P, reflected; for constants only, so one bit at a time. */
static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;

    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1, b = kv_crc32c_times_x(b))
        if (a & bit)
            product ^= b;
    return product;
}

/* x^exponent modulo P, by squaring. */
static uint64_t power_of_x(uint64_t exponent)
{
    uint32_t result = 1u << 31;

    for (uint32_t square = 1u << 30; exponent != 0; exponent >>= 1) {
        if (exponent & 1)
            result = multiply(result, square);
        square = multiply(square, square);
    }
    return result;
}

struct checksum_join checksum_join_of(uint64_t stream_bytes, uint64_t all_bytes)
{
    return (struct checksum_join){
        .by_1 = power_of_x(8 * stream_bytes - 33),
        .by_2 = power_of_x(16 * stream_bytes - 33),
        .by_3 = power_of_x(24 * stream_bytes - 33),
        .by_all = power_of_x(8 * all_bytes - 33),
    };
}

struct checksum_fold checksum_fold_of(uint64_t bits)
{
    /* The first half of a lane stands 64 bits higher.  A word in a 64-bit register counts as
     * multiplied by x^32. */
    return (struct checksum_fold){.low = power_of_x(bits + 64 - 33),
                                  .high = power_of_x(bits - 33)};
}

/* Before main(), as the tables of checksum.c. */
__attribute__((constructor)) static void x86_init(void)
{
    enum {
        LONG = FOLD_LONG * FOLD_STREAM,
        SHORT = FOLD_SHORT * FOLD_STREAM
    };

    join_long = checksum_join_of(LONG_BYTES, STREAMS * LONG_BYTES);
    join_short = checksum_join_of(SHORT_BYTES, STREAMS * SHORT_BYTES);
    join_fold_long = checksum_join_of(LONG, STREAMS * LONG + FOLD_LONG * FOLD_STEP);
    join_fold_short = checksum_join_of(SHORT, STREAMS * SHORT + FOLD_SHORT * FOLD_STEP);
    for (uint64_t n = 1; n < sizeof(shift_by_words) / sizeof(shift_by_words[0]); n++)
        shift_by_words[n] = (uint32_t)power_of_x(64 * n - 33);
    fold_128 = checksum_fold_of(128);
    fold_256 = checksum_fold_of(256);
    fold_1024 = checksum_fold_of(1024);
}

static int has_sse42(void)
{
    return kv_isa_ceiling() > KV_ISA_SCALAR && __builtin_cpu_supports("sse4.2") &&
           __builtin_cpu_supports("pclmul");
}

int checksum_has_fold(void)
{
    return has_sse42() && __builtin_cpu_supports("avx2") &&
           __builtin_cpu_supports("vpclmulqdq");
}

/* Returns the state after STREAMS pieces of `bytes` bytes each, one stream per piece. */
TARGET_SSE42 INLINE uint64_t state_streams(uint64_t state,
                                           const uint8_t *at,
                                           size_t bytes,
                                           const struct checksum_join *join)
{
    uint64_t second = 0, third = 0;

    for (size_t i = 0; i < bytes; i += 8) {
        state = _mm_crc32_u64(state, load64(at + i));
        second = _mm_crc32_u64(second, load64(at + bytes + i));
        third = _mm_crc32_u64(third, load64(at + 2 * bytes + i));
    }
    return third ^ _mm_crc32_u64(0, shift(state, join->by_2) ^ shift(second, join->by_1));
}

TARGET_SSE42 uint64_t checksum_sse42_state(uint64_t state, const uint8_t *at, size_t bytes)
{
    for (; bytes >= STREAMS * LONG_BYTES; bytes -= STREAMS * LONG_BYTES) {
        state = state_streams(state, at, LONG_BYTES, &join_long);
        at += STREAMS * LONG_BYTES;
    }
    for (; bytes >= STREAMS * SHORT_BYTES; bytes -= STREAMS * SHORT_BYTES) {
        state = state_streams(state, at, SHORT_BYTES, &join_short);
        at += STREAMS * SHORT_BYTES;
    }
    /* Message headers, and the ends of rows. */
    if (bytes >= JOIN_BYTES) {
        const size_t words = bytes / (STREAMS * 8);
        const struct checksum_join join = {.by_1 = shift_by_words[words],
                                           .by_2 = shift_by_words[2 * words]};

        state = state_streams(state, at, words * 8, &join);
        at += words * STREAMS * 8;
        bytes -= words * STREAMS * 8;
    }
    return state_bytes(state, at, bytes);
}

TARGET_SSE42 static uint32_t sse42_crc32c(uint32_t seed, const void *data, size_t bytes)
{
    return ~(uint32_t)checksum_sse42_state(~seed, data, bytes);
}

TARGET_SSE42 void checksum_sse42_list(const void *const *rows,
                                      size_t n_rows,
                                      bool is_run,
                                      size_t row_bytes,
                                      const uint32_t *seeds,
                                      uint32_t *ret_crcs)
{
    struct checksum_ahead ahead =
        ahead_of((const uint8_t *const *)rows, n_rows, is_run, STREAMS, row_bytes);
    size_t words_bytes = row_bytes & ~(size_t)7, rest = row_bytes & 7, row = 0;

    for (; row + STREAMS <= n_rows; row += STREAMS) {
        const uint8_t *a = rows[row], *b = rows[row + 1], *c = rows[row + 2];
        uint64_t state_a = ~seeds[row], state_b = ~seeds[row + 1], state_c = ~seeds[row + 2];
        size_t i = 0;

        for (; i + CHECKSUM_LINE <= words_bytes; i += CHECKSUM_LINE) {
            prefetch_ahead(&ahead, STREAMS);
#pragma GCC unroll 8
            for (size_t word = i; word < i + CHECKSUM_LINE; word += 8) {
                state_a = _mm_crc32_u64(state_a, load64(a + word));
                state_b = _mm_crc32_u64(state_b, load64(b + word));
                state_c = _mm_crc32_u64(state_c, load64(c + word));
            }
        }
        if (i < words_bytes)
            prefetch_ahead(&ahead, STREAMS);
        for (; i < words_bytes; i += 8) {
            state_a = _mm_crc32_u64(state_a, load64(a + i));
            state_b = _mm_crc32_u64(state_b, load64(b + i));
            state_c = _mm_crc32_u64(state_c, load64(c + i));
        }
        ret_crcs[row] = ~(uint32_t)state_bytes(state_a, a + words_bytes, rest);
        ret_crcs[row + 1] = ~(uint32_t)state_bytes(state_b, b + words_bytes, rest);
        ret_crcs[row + 2] = ~(uint32_t)state_bytes(state_c, c + words_bytes, rest);
    }
    for (; row < n_rows; row++)
        ret_crcs[row] = sse42_crc32c(seeds[row], rows[row], row_bytes);
}

const struct kv_checksum_kernels kv_checksum_sse42 = {
    .name = "sse42",
    .supported = has_sse42,
    .crc32c = sse42_crc32c,
    .list_crc = checksum_sse42_list,
};

TARGET_FOLD INLINE __m256i load256(const uint8_t *at)
{
    return _mm256_loadu_si256((const __m256i *)at);
}

/* Moves two 128-bit lanes up by the distance of `by` and adds the next ones. */
TARGET_FOLD INLINE __m256i fold_lanes(__m256i value, __m256i by, __m256i next)
{
    __m256i low = _mm256_clmulepi64_epi128(value, by, 0x00);
    __m256i high = _mm256_clmulepi64_epi128(value, by, 0x11);

    return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}

TARGET_FOLD INLINE __m256i fold_by(const struct checksum_fold *fold)
{
    return _mm256_setr_epi64x((long long)fold->low, (long long)fold->high, (long long)fold->low,
                              (long long)fold->high);
}

/* Loads the first 32 bytes and adds the state before them, as the CRC adds it to its next
 * bytes. */
TARGET_FOLD INLINE __m256i first_lane(uint32_t state, const uint8_t *at)
{
    return _mm256_xor_si256(_mm256_zextsi128_si256(_mm_cvtsi32_si128((int)state)), load256(at));
}

/* Reduces 32 folded bytes to a state. */
TARGET_FOLD INLINE uint64_t fold_finish(__m256i value)
{
    __m128i by = _mm_set_epi64x((long long)fold_128.high, (long long)fold_128.low);
    __m128i first = _mm256_castsi256_si128(value);
    __m128i rest = _mm256_extracti128_si256(value, 1);

    rest = _mm_xor_si128(rest, _mm_clmulepi64_si128(first, by, 0x00));
    rest = _mm_xor_si128(rest, _mm_clmulepi64_si128(first, by, 0x11));
    return _mm_crc32_u64(_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(rest)),
                         (uint64_t)_mm_extract_epi64(rest, 1));
}

/* Returns the state after turns * (FOLD_STEP + STREAMS * FOLD_STREAM) bytes: first the part
 * that is folded, then the streams.  `state` is joined at the end, so that parts do not wait
 * for each other. */
TARGET_FOLD INLINE uint64_t fold_part(uint64_t state,
                                      const uint8_t *at,
                                      size_t turns,
                                      const struct checksum_join *join)
{
    const uint8_t *words = at + turns * FOLD_STEP;
    size_t stream_bytes = turns * FOLD_STREAM;
    __m256i by = fold_by(&fold_1024);
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    uint64_t first = 0, second = 0, third = 0;

    for (size_t turn = 0; turn < turns; turn++) {
        a = fold_lanes(a, by, load256(at));
        b = fold_lanes(b, by, load256(at + 32));
        c = fold_lanes(c, by, load256(at + 64));
        d = fold_lanes(d, by, load256(at + 96));
        at += FOLD_STEP;
#pragma GCC unroll 5
        for (size_t i = 0; i < FOLD_STREAM; i += 8, words += 8) {
            first = _mm_crc32_u64(first, load64(words));
            second = _mm_crc32_u64(second, load64(words + stream_bytes));
            third = _mm_crc32_u64(third, load64(words + 2 * stream_bytes));
        }
    }
    by = fold_by(&fold_256);
    b = fold_lanes(a, by, b);
    c = fold_lanes(b, by, c);
    d = fold_lanes(c, by, d);
    return third ^
           _mm_crc32_u64(0, shift(state, join->by_all) ^ shift(fold_finish(d), join->by_3) ^
                                shift(first, join->by_2) ^ shift(second, join->by_1));
}

TARGET_FOLD static uint32_t fold_crc32c(uint32_t seed, const void *data, size_t bytes)
{
    enum {
        TURN_BYTES = FOLD_STEP + STREAMS * FOLD_STREAM
    };
    const uint8_t *at = data;
    uint64_t state = ~seed;

    for (; bytes >= FOLD_LONG * TURN_BYTES; bytes -= FOLD_LONG * TURN_BYTES) {
        state = fold_part(state, at, FOLD_LONG, &join_fold_long);
        at += FOLD_LONG * TURN_BYTES;
    }
    for (; bytes >= FOLD_SHORT * TURN_BYTES; bytes -= FOLD_SHORT * TURN_BYTES) {
        state = fold_part(state, at, FOLD_SHORT, &join_fold_short);
        at += FOLD_SHORT * TURN_BYTES;
    }
    return ~(uint32_t)checksum_sse42_state(state, at, bytes);
}

/* Computes the CRCs of six rows of at least 32 bytes: three are folded, three use the crc32
 * instruction.  Prefetches `ahead`.  `rest` is row_bytes % 32, a constant at the call for 0,
 * the value of most models' rows. */
TARGET_FOLD INLINE void fold_six_rows(const uint8_t *const *rows,
                                      struct checksum_ahead *ahead,
                                      size_t row_bytes,
                                      size_t rest,
                                      const uint32_t *seeds,
                                      uint32_t *ret_crcs)
{
    const uint8_t *a = rows[0], *b = rows[1], *c = rows[2];
    const uint8_t *d = rows[3], *e = rows[4], *f = rows[5];
    size_t lanes_bytes = row_bytes - rest;
    uint64_t state_d = ~seeds[3], state_e = ~seeds[4], state_f = ~seeds[5];
    __m256i by = fold_by(&fold_256);
    __m256i lanes_a = first_lane(~seeds[0], a);
    __m256i lanes_b = first_lane(~seeds[1], b);
    __m256i lanes_c = first_lane(~seeds[2], c);

    for (size_t i = 32;; i += 32) {
#pragma GCC unroll 4
        for (size_t word = i - 32; word < i; word += 8) {
            state_d = _mm_crc32_u64(state_d, load64(d + word));
            state_e = _mm_crc32_u64(state_e, load64(e + word));
            state_f = _mm_crc32_u64(state_f, load64(f + word));
        }
        if (i & 32)
            prefetch_ahead(ahead, GROUP);
        if (i >= lanes_bytes)
            break;
        lanes_a = fold_lanes(lanes_a, by, load256(a + i));
        lanes_b = fold_lanes(lanes_b, by, load256(b + i));
        lanes_c = fold_lanes(lanes_c, by, load256(c + i));
    }
    ret_crcs[0] = ~(uint32_t)state_bytes(fold_finish(lanes_a), a + lanes_bytes, rest);
    ret_crcs[1] = ~(uint32_t)state_bytes(fold_finish(lanes_b), b + lanes_bytes, rest);
    ret_crcs[2] = ~(uint32_t)state_bytes(fold_finish(lanes_c), c + lanes_bytes, rest);
    ret_crcs[3] = ~(uint32_t)state_bytes(state_d, d + lanes_bytes, rest);
    ret_crcs[4] = ~(uint32_t)state_bytes(state_e, e + lanes_bytes, rest);
    ret_crcs[5] = ~(uint32_t)state_bytes(state_f, f + lanes_bytes, rest);
}

TARGET_FOLD static void fold_list_crc(const void *const *rows,
                                      size_t n_rows,
                                      bool is_run,
                                      size_t row_bytes,
                                      const uint32_t *seeds,
                                      uint32_t *ret_crcs)
{
    const uint8_t *const *at = (const uint8_t *const *)rows;
    struct checksum_ahead ahead = ahead_of(at, n_rows, is_run, GROUP, row_bytes);
    size_t rest = row_bytes & 31, row = 0;

    for (; row_bytes >= 32 && row + GROUP <= n_rows; row += GROUP)
        if (rest == 0)
            fold_six_rows(at + row, &ahead, row_bytes, 0, seeds + row, ret_crcs + row);
        else
            fold_six_rows(at + row, &ahead, row_bytes, rest, seeds + row, ret_crcs + row);
    checksum_sse42_list(rows + row, n_rows - row, is_run, row_bytes, seeds + row,
                        ret_crcs + row);
}

const struct kv_checksum_kernels kv_checksum_fold = {
    .name = "fold",
    .supported = checksum_has_fold,
    .crc32c = fold_crc32c,
    .list_crc = fold_list_crc,
};

#endif
