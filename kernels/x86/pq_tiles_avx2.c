/* A tile is unpacked to one byte per code, in L1, and then looked up for every query.  Byte
 * lookups are shuffles of 16-entry tables in registers (VPSHUFB), the method of Andre et al.
 * (pq_tiles.h).  Of a code with more than four bits, the higher ones select between tables:
 * each is shifted to the sign of its byte, by which VPBLENDVB selects.  fp32 lookups are loads:
 * on Zen 3, AVX2 gathers take over twice as long (1.2 ns against 0.5 for two subspaces).  A
 * load fetches the values of four or eight queries, whose tables are interleaved. */
#include "kernels/dispatch.h"
#include "kernels/pq_tiles.h"
#include "kernels/x86/avx2.h"

#include "kernels/x86/pq_tiles_common.h"

#if defined(__x86_64__)

enum {
    BYTES = 32, /* in a register */
    HALF = KV_PQ_TILE / 2,
    PARTS = KV_PQ_TILE / BYTES,
    AHEAD_BYTES = 4096, /* of tiles, prefetched */

    /* fp32 */
    ROWS = 8,      /* at once */
    GROUP_MAX = 8, /* queries at once */
    ORDERED_MAX = 4 * (KV_PQ_SUBSPACES_MAX << KV_PQ_BITS_MAX),
};

static_assert(HALF % BYTES == 0, "half of a tile is whole registers");

INLINE __m256i load(const uint8_t *at)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)at);
}

INLINE void store(void *at, __m256i value)
{
    _mm256_storeu_si256((__m256i *)at, value);
}

INLINE __m256i table16(const uint8_t *at)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)at));
}

/* ---- codes ------------------------------------------------------------------------------- */

INLINE void unpack4(const uint8_t *at, uint8_t *ret_codes)
{
    const __m256i low = _mm256_set1_epi8(15);

    for (unsigned i = 0; i < HALF; i += BYTES) {
        const __m256i both = load(at + i);

        store(ret_codes + i, _mm256_and_si256(both, low));
        store(ret_codes + HALF + i, _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
    }
}

INLINE void unpack6(const uint8_t *at, uint8_t *ret_first, uint8_t *ret_second)
{
    const __m256i low = _mm256_set1_epi8(63);

    for (unsigned i = 0; i < HALF; i += BYTES) {
        const __m256i a = load(at + i), b = load(at + HALF + i), c = load(at + 2 * HALF + i);
        const __m256i x = _mm256_or_si256(
            _mm256_and_si256(_mm256_srli_epi16(a, 6), _mm256_set1_epi8(3)),
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(b, 4), _mm256_set1_epi8(12)),
                            _mm256_and_si256(_mm256_srli_epi16(c, 2), _mm256_set1_epi8(48))));

        store(ret_first + i, _mm256_and_si256(a, low));
        store(ret_first + HALF + i, _mm256_and_si256(b, low));
        store(ret_second + i, _mm256_and_si256(c, low));
        store(ret_second + HALF + i, x);
    }
}

/* Returns the codes, those of subspace j at j * KV_PQ_TILE: unpacked to `codes`, or the tile
 * itself if its width is 8. */
INLINE const uint8_t *
unpack(const struct kv_pq_shape *shape, uint32_t width, const uint8_t *tile, uint8_t *codes)
{
    if (width == 8)
        return tile;
    if (width == 4) {
        for (size_t j = 0; j < shape->m; j++)
            unpack4(tile + j * HALF, codes + j * KV_PQ_TILE);
        return codes;
    }
    for (size_t j = 0; j + 2 <= shape->m; j += 2, tile += 3 * HALF)
        unpack6(tile, codes + j * KV_PQ_TILE, codes + (j + 1) * KV_PQ_TILE);
    if (shape->m % 2 != 0)
        for (unsigned i = 0; i < KV_PQ_TILE; i += BYTES)
            store(codes + (shape->m - 1) * KV_PQ_TILE + i, load(tile + i));
    return codes;
}

/* ---- look-ups of bytes ------------------------------------------------------------------- */

/* Looks up 32 codes in a table of 16, 64 or 256 bytes, by width. */
INLINE __m256i look_up(const uint8_t *table, uint32_t width, __m256i codes)
{
    if (width == 4)
        return _mm256_shuffle_epi8(table16(table), codes);

    const __m256i low = _mm256_and_si256(codes, _mm256_set1_epi8(15));
    const __m256i by4 = _mm256_slli_epi16(codes, 3), by5 = _mm256_slli_epi16(codes, 2);
    __m256i quarters[4];
    unsigned n_quarters = width == 6 ? 1 : 4;

    for (unsigned i = 0; i < n_quarters; i++, table += 64) {
        const __m256i a =
            _mm256_blendv_epi8(_mm256_shuffle_epi8(table16(table), low),
                               _mm256_shuffle_epi8(table16(table + 16), low), by4);
        const __m256i b =
            _mm256_blendv_epi8(_mm256_shuffle_epi8(table16(table + 32), low),
                               _mm256_shuffle_epi8(table16(table + 48), low), by4);

        quarters[i] = _mm256_blendv_epi8(a, b, by5);
    }
    if (width == 6)
        return quarters[0];

    const __m256i by6 = _mm256_slli_epi16(codes, 1);
    return _mm256_blendv_epi8(_mm256_blendv_epi8(quarters[0], quarters[1], by6),
                              _mm256_blendv_epi8(quarters[2], quarters[3], by6), codes);
}

/* What an offset makes of sums: clamp(sum + offset, 0, 255) is the sum, clamped to [low, high],
 * plus the offset, of which the highest bits do not matter. */
struct offset {
    __m256i low, high, by;
};

INLINE __m256i add_offset(const struct offset *offset, __m256i sums)
{
    return _mm256_add_epi8(_mm256_max_epu8(_mm256_min_epu8(sums, offset->high), offset->low),
                           offset->by);
}

INLINE __m256i add8(int saturates, __m256i a, __m256i b)
{
    return saturates ? _mm256_adds_epu8(a, b) : _mm256_add_epi8(a, b);
}

INLINE void scan8_width(const struct kv_pq_shape *shape,
                        uint32_t m,
                        uint32_t width,
                        int is_most,
                        int saturates,
                        int is_first,
                        const uint8_t *tables,
                        const int16_t *offsets,
                        size_t n_queries,
                        const uint8_t *const *tiles,
                        size_t n_tiles,
                        uint8_t *ret_sums,
                        size_t sums_stride)
{
    const size_t bytes = kv_tile_bytes(shape), ahead = 1 + AHEAD_BYTES / bytes;
    const size_t size = (size_t)1 << width;
    uint8_t unpacked[KV_TILE_BYTES_MAX];
    struct offset vectors[QUERIES];

    for (size_t query = 0; is_most && query < n_queries; query++) {
        const int by = offsets[query];

        vectors[query].low = _mm256_set1_epi8((char)(by < 0 ? -by : 0));
        vectors[query].high = _mm256_set1_epi8((char)(by > 0 ? UINT8_MAX - by : UINT8_MAX));
        vectors[query].by = _mm256_set1_epi8((char)by);
    }
    for (size_t tile = 0; tile < n_tiles; tile++, ret_sums += KV_PQ_TILE) {
        const uint8_t *codes = unpack(shape, width, tiles[tile], unpacked);

        if (ahead < n_tiles - tile)
            prefetch(tiles[tile + ahead], bytes);
        for (size_t query = 0; query < n_queries; query++) {
            const uint8_t *table = tables + query * m * size;
            uint8_t *to = ret_sums + query * sums_stride;
            __m256i sums[PARTS];

            for (unsigned part = 0; part < PARTS; part++)
                sums[part] = look_up(table, width, load(codes + part * BYTES));
#pragma GCC unroll 1 /* gcc adds what it sees at once in another order, with sums in memory */
            for (size_t j = 1; j < m; j++)
                for (unsigned part = 0; part < PARTS; part++)
                    sums[part] = add8(saturates, sums[part],
                                      look_up(table + j * size, width,
                                              load(codes + j * KV_PQ_TILE + part * BYTES)));
            for (unsigned part = 0; part < PARTS; part++) {
                if (is_most) {
                    sums[part] = add_offset(&vectors[query], sums[part]);
                    if (query > 0 || !is_first)
                        sums[part] = _mm256_max_epu8(sums[part], load(to + part * BYTES));
                }
                store(to + part * BYTES, sums[part]);
            }
        }
    }
}

/* ---- rounded tables ---------------------------------------------------------------------- */

INLINE void range_of(const float *values, size_t n, float *ret_least, float *ret_most)
{
    __m256 least = _mm256_set1_ps(__builtin_inff()), most = _mm256_set1_ps(-__builtin_inff());

    /* Of a NaN and a number, the instructions return the second operand. */
    for (size_t i = 0; i < n; i += LANES) {
        const __m256i there = first_lanes(n - i);
        const __m256 at = _mm256_maskload_ps(values + i, there);

        least = _mm256_blendv_ps(least, _mm256_min_ps(at, least), _mm256_castsi256_ps(there));
        most = _mm256_blendv_ps(most, _mm256_max_ps(at, most), _mm256_castsi256_ps(there));
    }
    *ret_least = -max8(_mm256_sub_ps(_mm256_setzero_ps(), least));
    *ret_most = max8(most);
}

/* Rounds eight values, of which those of the mask are read, to numbers of 32 bits. */
INLINE __m256i
round8_of(const float *at, __m256i there, float least, float shift, float inv_step)
{
    const __m256 above = _mm256_sub_ps(_mm256_maskload_ps(at, there), _mm256_set1_ps(least));
    const __m256 steps =
        _mm256_mul_ps(_mm256_add_ps(above, _mm256_set1_ps(shift)), _mm256_set1_ps(inv_step));
    const __m256 clamped =
        _mm256_min_ps(_mm256_max_ps(steps, _mm256_setzero_ps()), _mm256_set1_ps(UINT8_MAX));

    return _mm256_and_si256(there,
                            _mm256_cvttps_epi32(_mm256_add_ps(clamped, _mm256_set1_ps(0.5f))));
}

/* Rounds 16 of n values, from i on; after the last there are zeros. */
INLINE __m128i
round16_to(const float *values, size_t i, size_t n, float least, float shift, float inv_step)
{
    const __m256i a = first_lanes(n > i ? n - i : 0);
    const __m256i b = first_lanes(n > i + LANES ? n - i - LANES : 0);
    const __m256i words =
        _mm256_packus_epi32(round8_of(values + i, a, least, shift, inv_step),
                            round8_of(values + i + LANES, b, least, shift, inv_step));
    const __m256i bytes = _mm256_packus_epi16(words, words);

    return _mm256_castsi256_si128(
        _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 0, 0, 0)));
}

/* ---- fp32 -------------------------------------------------------------------------------- */

/* Interleaves the tables of up to `group` queries: for each centroid, the values of all
 * queries. Missing queries get the last one's values. */
INLINE void order_tables(
    const float *tables, size_t size, size_t n_queries, unsigned group, float *ret_ordered)
{
    const float *at[GROUP_MAX];

    for (unsigned query = 0; query < group; query++)
        at[query] = tables + (query < n_queries ? query : n_queries - 1) * size;
    for (unsigned query = 0; query < group; query += 4) {
        float *to = ret_ordered + query;
        size_t i = 0;

        for (; i + 4 <= size; i += 4, to += 4 * group) {
            __m128 a = _mm_loadu_ps(at[query] + i), b = _mm_loadu_ps(at[query + 1] + i),
                   c = _mm_loadu_ps(at[query + 2] + i), d = _mm_loadu_ps(at[query + 3] + i);

            _MM_TRANSPOSE4_PS(a, b, c, d);
            _mm_storeu_ps(to, a);
            _mm_storeu_ps(to + group, b);
            _mm_storeu_ps(to + 2 * group, c);
            _mm_storeu_ps(to + 3 * group, d);
        }
        for (; i < size; i++, to += group)
            for (unsigned of = 0; of < 4; of++)
                to[of] = at[query + of][i];
    }
}

/* Transposes eight rows of four queries, a row in each of v: lane i of ret[q] is row i's. */
INLINE void turn4(const __m128 v[ROWS], __m256 ret[4])
{
    __m256 pairs[4];

    for (unsigned i = 0; i < 4; i++)
        pairs[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(v[i]), v[i + 4], 1);

    const __m256 a = _mm256_unpacklo_ps(pairs[0], pairs[1]);
    const __m256 b = _mm256_unpackhi_ps(pairs[0], pairs[1]);
    const __m256 c = _mm256_unpacklo_ps(pairs[2], pairs[3]);
    const __m256 d = _mm256_unpackhi_ps(pairs[2], pairs[3]);

    ret[0] = _mm256_shuffle_ps(a, c, 0x44);
    ret[1] = _mm256_shuffle_ps(a, c, 0xee);
    ret[2] = _mm256_shuffle_ps(b, d, 0x44);
    ret[3] = _mm256_shuffle_ps(b, d, 0xee);
}

/* The same of eight queries. */
INLINE void turn8(const __m256 v[ROWS], __m256 ret[8])
{
    for (unsigned half = 0; half < 2; half++) {
        __m256 pairs[4];

        for (unsigned i = 0; i < 4; i++)
            pairs[i] = half == 0 ? _mm256_permute2f128_ps(v[i], v[i + 4], 0x20)
                                 : _mm256_permute2f128_ps(v[i], v[i + 4], 0x31);

        const __m256 a = _mm256_unpacklo_ps(pairs[0], pairs[1]);
        const __m256 b = _mm256_unpackhi_ps(pairs[0], pairs[1]);
        const __m256 c = _mm256_unpacklo_ps(pairs[2], pairs[3]);
        const __m256 d = _mm256_unpackhi_ps(pairs[2], pairs[3]);

        ret[4 * half] = _mm256_shuffle_ps(a, c, 0x44);
        ret[4 * half + 1] = _mm256_shuffle_ps(a, c, 0xee);
        ret[4 * half + 2] = _mm256_shuffle_ps(b, d, 0x44);
        ret[4 * half + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
}

/* Scores eight rows for n_queries of a group of four or eight. */
INLINE void score8(const float *ordered,
                   size_t n_centroids,
                   size_t m,
                   unsigned group,
                   size_t n_queries,
                   const uint8_t *codes,
                   float *ret_scores,
                   size_t scores_stride)
{
    __m256 turned[GROUP_MAX];

    if (group == 4) {
        __m128 sums[ROWS];

        for (unsigned row = 0; row < ROWS; row++)
            sums[row] = _mm_loadu_ps(ordered + (size_t)codes[row] * 4);
        for (size_t j = 1; j < m; j++) {
            ordered += n_centroids * 4;
            codes += KV_PQ_TILE;
            for (unsigned row = 0; row < ROWS; row++)
                sums[row] =
                    _mm_add_ps(sums[row], _mm_loadu_ps(ordered + (size_t)codes[row] * 4));
        }
        turn4(sums, turned);
    } else {
        __m256 sums[ROWS];

        for (unsigned row = 0; row < ROWS; row++)
            sums[row] = _mm256_loadu_ps(ordered + (size_t)codes[row] * 8);
        for (size_t j = 1; j < m; j++) {
            ordered += n_centroids * 8;
            codes += KV_PQ_TILE;
            for (unsigned row = 0; row < ROWS; row++)
                sums[row] =
                    _mm256_add_ps(sums[row], _mm256_loadu_ps(ordered + (size_t)codes[row] * 8));
        }
        turn8(sums, turned);
    }
    for (unsigned query = 0; query < group; query++)
        if (query < n_queries)
            _mm256_storeu_ps(ret_scores + query * scores_stride, turned[query]);
}

/* Scores rows eight at a time; the last eight overlap those before them. */
INLINE void score_group(const float *ordered,
                        size_t n_centroids,
                        size_t m,
                        unsigned group,
                        size_t n_queries,
                        const uint8_t *codes,
                        size_t n,
                        float *ret_scores,
                        size_t scores_stride)
{
    for (size_t row = 0; row < n; row += ROWS) {
        if (n - row < ROWS)
            row = n - ROWS;
        score8(ordered, n_centroids, m, group, n_queries, codes + row, ret_scores + row,
               scores_stride);
    }
}

INLINE void score_rows(const float *table,
                       size_t n_centroids,
                       size_t m,
                       const uint8_t *codes,
                       size_t n,
                       float *ret_scores)
{
    for (size_t row = 0; row < n; row++) {
        float sum = table[codes[row]];

        for (size_t j = 1; j < m; j++)
            sum += table[j * n_centroids + codes[j * KV_PQ_TILE + row]];
        ret_scores[row] = sum;
    }
}

/* `group` is a constant at the calls, 1 for queries one by one; so is m, if it is the usual
 * one. */
INLINE void score_tiles(const struct kv_pq_shape *shape,
                        uint32_t width,
                        size_t m,
                        unsigned group,
                        const float *tables,
                        size_t n_queries,
                        const uint8_t *const *tiles,
                        size_t begin,
                        size_t n,
                        float *ret_scores,
                        size_t scores_stride)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), bytes = kv_tile_bytes(shape);
    const size_t ahead = 1 + AHEAD_BYTES / bytes;
    float ordered[ORDERED_MAX];
    uint8_t unpacked[KV_TILE_BYTES_MAX];

    if (group > 1)
        order_tables(tables, kv_pq_table_size(shape), n_queries, group, ordered);
    for (size_t row = begin, n_rows; row < begin + n; row += n_rows) {
        const size_t tile = row / KV_PQ_TILE, in_tile = row % KV_PQ_TILE;
        const uint8_t *codes = unpack(shape, width, tiles[tile], unpacked) + in_tile;
        float *to = ret_scores + (row - begin);

        n_rows =
            begin + n - row < KV_PQ_TILE - in_tile ? begin + n - row : KV_PQ_TILE - in_tile;
        if ((tile + ahead) * KV_PQ_TILE < begin + n)
            prefetch(tiles[tile + ahead], bytes);
        if (group > 1 && n_rows >= ROWS)
            score_group(ordered, n_centroids, m, group, n_queries, codes, n_rows, to,
                        scores_stride);
        else
            for (size_t query = 0; query < n_queries; query++)
                score_rows(tables + query * kv_pq_table_size(shape), n_centroids, m, codes,
                           n_rows, to + query * scores_stride);
    }
}

INLINE void score_by(const struct kv_pq_shape *shape,
                     unsigned group,
                     const float *tables,
                     size_t n_queries,
                     const uint8_t *const *tiles,
                     size_t begin,
                     size_t n,
                     float *ret_scores,
                     size_t scores_stride)
{
    const uint32_t width = kv_tile_width(shape);

    if (width == 6 && shape->m == 2)
        score_tiles(shape, 6, 2, group, tables, n_queries, tiles, begin, n, ret_scores,
                    scores_stride);
    else
        score_tiles(shape, width, shape->m, group, tables, n_queries, tiles, begin, n,
                    ret_scores, scores_stride);
}

AVX2 static void score(const struct kv_pq_shape *shape,
                       const float *tables,
                       size_t n_queries,
                       const uint8_t *const *tiles,
                       size_t begin,
                       size_t n,
                       float *ret_scores,
                       size_t scores_stride)
{
    const size_t size = kv_pq_table_size(shape);
    const bool pays = n >= kv_pq_n_centroids(shape); /* to order tables */

    for (size_t left = n_queries, taken; left > 0; left -= taken) {
        taken = 1;
        if (pays && left > 4 && 8 * size <= ORDERED_MAX) {
            taken = left < 8 ? left : 8;
            score_by(shape, 8, tables, taken, tiles, begin, n, ret_scores, scores_stride);
        } else if (pays && left > 1) {
            taken = left < 4 ? left : 4;
            score_by(shape, 4, tables, taken, tiles, begin, n, ret_scores, scores_stride);
        } else {
            score_by(shape, 1, tables, 1, tiles, begin, n, ret_scores, scores_stride);
        }
        tables += taken * size;
        ret_scores += taken * scores_stride;
    }
}

AVX2 static void cells(const struct kv_pq_shape *shape,
                       const uint8_t *tile,
                       size_t begin,
                       size_t n,
                       uint16_t *ret_cells)
{
    uint8_t unpacked[KV_TILE_BYTES_MAX];
    const uint8_t *codes = unpack(shape, kv_tile_width(shape), tile, unpacked) + begin;

    for (size_t i = 0; i < n; i++)
        ret_cells[i] = codes[i];
    for (size_t j = 1; j < shape->m; j++)
        for (size_t i = 0; i < n; i++)
            ret_cells[i] = (uint16_t)(ret_cells[i] << shape->bits | codes[j * KV_PQ_TILE + i]);
}

const struct kv_tile_kernels kv_tile_avx2 = {
    .name = "avx2",
    .supported = kv_has_avx2,
    .score = score,
    .cells = cells,
    .range = range,
    .round8_to = round8_to,
    .scan8 = scan8,
    .scan8_max = scan8_max,
};

#endif
