/* key_copies_common.h - private to kernels/: divides a list of copies into tiles of rows and
 * queries into blocks, for key_copies_avx2.c and key_copies_avx512.c.
 *
 * Included after avx2.h or avx512.h, which define TARGET and INLINE.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_X86_KEY_COPIES_COMMON_H
#define KV_KERNELS_X86_KEY_COPIES_COMMON_H

#include "kernels/key_copies_common.h"
#include "kernels/x86/for_size.h"

#if defined(__x86_64__)

static_assert(ROWS % 8 == 0, "load_scales() loads eight");

enum {
    BLOCK = 4, /* queries at a time, at most */
    N_BLOCKS = KV_KEY_COPIES_QUERIES_MAX / BLOCK,
    BYTES = 16, /* of codes at a time: those of several rows make a vector */
    /* Rows prefetched: 32 takes 1.4 times as long, 128 as long (Zen 4). */
    AHEAD = 64,
    LINE_H = 64, /* the bytes of a copy of 128 elements */
};

/* A block of queries, with 0 after the last. */
struct query_block {
    const int8_t *q8; /* (n_queries, 2 h) */
    int32_t biases[BLOCK];
    float scales[BLOCK], dots[BLOCK];
};

/* Where a listed row is. */
struct place {
    const uint8_t *codes, *scale;
};

/* Defined by each instruction set, as the constant ROWS is.
 *
 * Scores ROWS rows; n_queries, 1..BLOCK, is a constant at the calls.
 *   places      (ROWS)
 *   ret_scores  (n_queries, ROWS), scores_stride apart */
INLINE void score_tile(size_t h,
                       const struct place *places,
                       const struct query_block *block,
                       unsigned n_queries,
                       float *ret_scores,
                       size_t scores_stride);

INLINE void load_block(const struct kv_rounded_queries *queries,
                       size_t h,
                       size_t from,
                       size_t n,
                       struct query_block *ret_block)
{
    *ret_block = (struct query_block){.q8 = queries->q8 + from * 2 * h};
    memcpy(ret_block->biases, queries->biases + from, n * sizeof(ret_block->biases[0]));
    memcpy(ret_block->scales, queries->scales + from, n * sizeof(ret_block->scales[0]));
    memcpy(ret_block->dots, queries->dots + from, n * sizeof(ret_block->dots[0]));
}

/* Finds a row and prefetches it into L2, which can have more misses outstanding than L1: its
 * scale, and all lines of its codes if it begins with a line or its bytes are no multiple of a
 * line's. */
INLINE struct place find_row(size_t h, const uint8_t *copies, size_t row)
{
    const struct place place = {copies + kv_key_copy_codes_at(h, row),
                                copies + kv_key_copy_scale_at(h, row)};

    _mm_prefetch((const char *)place.scale, _MM_HINT_T1);
    for (size_t i = 0; i < h; i += LINE_BYTES)
        _mm_prefetch((const char *)place.codes + i, _MM_HINT_T1);
    if (h % LINE_BYTES != 0)
        _mm_prefetch((const char *)place.codes + h - 1, _MM_HINT_T1);
    return place;
}

/* Rounds a scale that is not negative to fp16, at most its largest number, and stores it.
 * Returns the rounded one. */
INLINE float round_scale(float scale, uint8_t *ret_scale)
{
    const __m128i rounded = _mm_cvtps_ph(_mm_set_ss(scale < 65504 ? scale : 65504), 0);
    const uint16_t half = (uint16_t)_mm_cvtsi128_si32(rounded);

    memcpy(ret_scale, &half, sizeof(half));
    return _mm_cvtss_f32(_mm_cvtph_ps(rounded));
}

INLINE int scale_bits(const uint8_t *at)
{
    uint16_t bits;

    memcpy(&bits, at, sizeof(bits));
    return bits;
}

/* Returns the scales of eight rows; inserted one by one, since a vector cannot be loaded at
 * once from what was stored in pieces just before. */
INLINE __m128i load_scales(const struct place *places)
{
    __m128i scales = _mm_setzero_si128();

#define INSERT(I) _mm_insert_epi16(scales, scale_bits(places[I].scale), I)
    scales = INSERT(0);
    scales = INSERT(1);
    scales = INSERT(2);
    scales = INSERT(3);
    scales = INSERT(4);
    scales = INSERT(5);
    scales = INSERT(6);
    scales = INSERT(7);
#undef INSERT
    return scales;
}

/* Scores the first `count` of ROWS rows for all queries. */
INLINE void score_some(size_t h,
                       const struct place *places,
                       size_t count,
                       const struct query_block *blocks,
                       size_t n_queries,
                       float *ret_scores,
                       size_t scores_stride)
{
    for (size_t from = 0; from < n_queries; from += BLOCK) {
        const struct query_block *block = &blocks[from / BLOCK];
        const size_t n_block = n_queries - from < BLOCK ? n_queries - from : BLOCK;
        float *to = ret_scores + from * scores_stride, some[BLOCK * ROWS];
        float *const scores = count == ROWS ? to : some;
        const size_t stride = count == ROWS ? scores_stride : ROWS;

#define SCORE(N) score_tile(h, places, block, N, scores, stride)
        FOR_SIZE(n_block, SCORE);
#undef SCORE
        for (size_t query = 0; count < ROWS && query < n_block; query++)
            memcpy(to + query * scores_stride, some + query * ROWS, count * sizeof(*to));
    }
}

INLINE void score_all(size_t h,
                      const void *const *copies,
                      const uint8_t *rows,
                      size_t n,
                      const struct query_block *blocks,
                      size_t n_queries,
                      float *ret_scores,
                      size_t scores_stride)
{
    struct place places[AHEAD]; /* of row i in element i % AHEAD */
    size_t row = 0;

    for (size_t i = 0; i < AHEAD && i < n; i++)
        places[i] = find_row(h, copies[i], rows[i]);
    for (; row + ROWS <= n; row += ROWS) {
        struct place *some = &places[row % AHEAD];
        const size_t next = row + AHEAD;

        score_some(h, some, ROWS, blocks, n_queries, ret_scores + row, scores_stride);
        if (next + ROWS <= n)
            for (size_t i = 0; i < ROWS; i++)
                some[i] = find_row(h, copies[next + i], rows[next + i]);
        else
            for (size_t i = 0; next + i < n; i++)
                some[i] = find_row(h, copies[next + i], rows[next + i]);
    }
    if (row < n) {
        struct place *some = &places[row % AHEAD];

        for (size_t i = n - row; i < ROWS; i++)
            some[i] = some[0];
        score_some(h, some, n - row, blocks, n_queries, ret_scores + row, scores_stride);
    }
}

TARGET static void score_list(size_t d,
                              const void *const *copies,
                              const uint8_t *rows,
                              size_t n,
                              const void *rounded,
                              size_t n_queries,
                              float *ret_scores,
                              size_t scores_stride)
{
    const struct kv_rounded_queries queries = kv_rounded_queries_at(d, rounded, n_queries);
    const size_t h = kv_key_copy_bytes(d);
    struct query_block blocks[N_BLOCKS];

    for (size_t from = 0; from < n_queries; from += BLOCK)
        load_block(&queries, h, from, n_queries - from < BLOCK ? n_queries - from : BLOCK,
                   &blocks[from / BLOCK]);
    /* As a constant, it makes the scan a sixth faster. */
    if (h == LINE_H)
        score_all(LINE_H, copies, rows, n, blocks, n_queries, ret_scores, scores_stride);
    else
        score_all(h, copies, rows, n, blocks, n_queries, ret_scores, scores_stride);
}

#endif

#endif
