/* A register holds the codes of 64 rows, or a lookup table of 64 bytes.  A lookup by six bits
 * is one instruction (VPERMB), which ignores higher bits.  A lookup by eight bits is two by
 * seven bits (VPERMI2B), and the highest bit selects one.
 *
 * For exact scores with codes of up to six bits, 16 values are looked up at a time in a table
 * of one, two or four registers.  With more bits, loads are faster. */
#include "kernels/dispatch.h"
#include "kernels/pq_tiles.h"
#include "kernels/x86/avx512.h"

#include "kernels/x86/pq_tiles_common.h"

#if defined(__x86_64__)

enum {
    ROWS = 64, /* whose codes are a register */
    HALF = KV_PQ_TILE / 2,
    VECTORS = KV_PQ_TILE / LANES,
    CODES = 2 * KV_PQ_SUBSPACES_MAX, /* registers for a tile's codes */
    AHEAD_BYTES = 4096,              /* of tiles, prefetched */
    REGISTERS_MAX = 4,               /* for 64 floats, or for 256 bytes */
};

static_assert((int)KV_PQ_TILE == 2 * (int)ROWS, "two registers are the codes of a subspace");

/* ---- codes ------------------------------------------------------------------------------- */

/* Returns the bits of a where the mask has ones, else those of b. */
INLINE __m512i choose_bits(char mask, __m512i a, __m512i b)
{
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8(mask), a, b, 0xca);
}

/* Unpacks the codes of all subspaces: of each, rows 0..63, then 64..127.  With width 6, the two
 * bits above a code are undefined unless `clear` is set. */
INLINE void
unpack(uint32_t m, uint32_t width, int clear, const uint8_t *tile, __m512i *ret_codes)
{
    if (width == 8) {
        for (size_t i = 0; i < 2 * (size_t)m; i++)
            ret_codes[i] = _mm512_loadu_si512(tile + i * ROWS);
        return;
    }
    if (width == 4) {
        const __m512i low = _mm512_set1_epi8(15);

        for (size_t j = 0; j < m; j++, ret_codes += 2) {
            const __m512i both = _mm512_loadu_si512(tile + j * HALF);

            ret_codes[0] = _mm512_and_si512(both, low);
            ret_codes[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
        return;
    }

    const __m512i low = _mm512_set1_epi8(63);

    for (size_t j = 0; j + 2 <= m; j += 2, tile += 3 * HALF, ret_codes += 4) {
        const __m512i a = _mm512_loadu_si512(tile), b = _mm512_loadu_si512(tile + HALF),
                      c = _mm512_loadu_si512(tile + 2 * HALF);
        const __m512i x =
            choose_bits(3, _mm512_srli_epi16(a, 6),
                        choose_bits(12, _mm512_srli_epi16(b, 4), _mm512_srli_epi16(c, 2)));

        ret_codes[0] = clear ? _mm512_and_si512(a, low) : a;
        ret_codes[1] = clear ? _mm512_and_si512(b, low) : b;
        ret_codes[2] = clear ? _mm512_and_si512(c, low) : c;
        ret_codes[3] = clear ? _mm512_and_si512(x, low) : x;
    }
    if (m % 2 != 0) {
        ret_codes[0] = _mm512_loadu_si512(tile);
        ret_codes[1] = _mm512_loadu_si512(tile + ROWS);
    }
}

/* ---- look-ups of bytes ------------------------------------------------------------------- */

/* Loads a table of 16, 64 or 256 bytes, by width. */
INLINE void load_table(const uint8_t *at, uint32_t width, __m512i *ret_table)
{
    if (width == 4) {
        ret_table[0] =
            _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)at));
        return;
    }
    for (unsigned i = 0; i < (width == 6 ? 1 : 4); i++)
        ret_table[i] = _mm512_loadu_si512(at + 64 * i);
}

INLINE __m512i look_up(const __m512i *table, uint32_t width, __m512i codes)
{
    if (width == 4)
        return _mm512_shuffle_epi8(table[0], codes);
    if (width == 6)
        return _mm512_permutexvar_epi8(codes, table[0]);
    return _mm512_mask_mov_epi8(_mm512_permutex2var_epi8(table[0], codes, table[1]),
                                _mm512_movepi8_mask(codes),
                                _mm512_permutex2var_epi8(table[2], codes, table[3]));
}

/* What an offset makes of sums: clamp(sum + offset, 0, 255) is the sum, clamped to [low, high],
 * plus the offset, of which the highest bits do not matter. */
struct offset {
    __m512i low, high, by;
};

INLINE __m512i add_offset(const struct offset *offset, __m512i sums)
{
    return _mm512_add_epi8(_mm512_max_epu8(_mm512_min_epu8(sums, offset->high), offset->low),
                           offset->by);
}

INLINE __m512i add8(int saturates, __m512i a, __m512i b)
{
    return saturates ? _mm512_adds_epu8(a, b) : _mm512_add_epi8(a, b);
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
    struct offset vectors[QUERIES];

    for (size_t query = 0; is_most && query < n_queries; query++) {
        const int by = offsets[query];

        vectors[query].low = _mm512_set1_epi8((char)(by < 0 ? -by : 0));
        vectors[query].high = _mm512_set1_epi8((char)(by > 0 ? UINT8_MAX - by : UINT8_MAX));
        vectors[query].by = _mm512_set1_epi8((char)by);
    }
    for (size_t tile = 0; tile < n_tiles; tile++, ret_sums += KV_PQ_TILE) {
        __m512i codes[CODES], most[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};

        unpack(m, width, 0, tiles[tile], codes);
        if (ahead < n_tiles - tile)
            prefetch(tiles[tile + ahead], bytes);
        for (unsigned half = 0; is_most && !is_first && half < 2; half++)
            most[half] = _mm512_loadu_si512(ret_sums + half * ROWS);
        for (size_t query = 0; query < n_queries; query++) {
            const uint8_t *at = tables + query * m * size;
            __m512i table[REGISTERS_MAX], sums[2];

            load_table(at, width, table);
            for (unsigned half = 0; half < 2; half++)
                sums[half] = look_up(table, width, codes[half]);
            for (size_t j = 1; j < m; j++) {
                load_table(at + j * size, width, table);
                for (unsigned half = 0; half < 2; half++)
                    sums[half] =
                        add8(saturates, sums[half], look_up(table, width, codes[2 * j + half]));
            }
            for (unsigned half = 0; half < 2; half++)
                if (is_most)
                    most[half] =
                        _mm512_max_epu8(most[half], add_offset(&vectors[query], sums[half]));
                else
                    _mm512_storeu_si512(ret_sums + query * sums_stride + half * ROWS,
                                        sums[half]);
        }
        for (unsigned half = 0; is_most && half < 2; half++)
            _mm512_storeu_si512(ret_sums + half * ROWS, most[half]);
    }
}

/* ---- rounded tables ---------------------------------------------------------------------- */

INLINE void range_of(const float *values, size_t n, float *ret_least, float *ret_most)
{
    __m512 least = _mm512_set1_ps(__builtin_inff()), most = _mm512_set1_ps(-__builtin_inff());

    /* Of a NaN and a number, the instructions return the second operand. */
    for (size_t i = 0; i < n; i += LANES) {
        const __mmask16 there = first_lanes(n - i);
        const __m512 at = _mm512_maskz_loadu_ps(there, values + i);

        least = _mm512_mask_min_ps(least, there, at, least);
        most = _mm512_mask_max_ps(most, there, at, most);
    }
    *ret_least = -max16(_mm512_sub_ps(_mm512_setzero_ps(), least));
    *ret_most = max16(most);
}

/* Rounds 16 of n values, from i on; after the last there are zeros. */
INLINE __m128i
round16_to(const float *values, size_t i, size_t n, float least, float shift, float inv_step)
{
    const __mmask16 there = first_lanes(n > i ? n - i : 0);
    const __m512 above =
        _mm512_sub_ps(_mm512_maskz_loadu_ps(there, values + i), _mm512_set1_ps(least));
    const __m512 steps =
        _mm512_mul_ps(_mm512_add_ps(above, _mm512_set1_ps(shift)), _mm512_set1_ps(inv_step));
    const __m512 clamped =
        _mm512_min_ps(_mm512_max_ps(steps, _mm512_setzero_ps()), _mm512_set1_ps(UINT8_MAX));

    return _mm512_cvtepi32_epi8(
        _mm512_maskz_cvttps_epi32(there, _mm512_add_ps(clamped, _mm512_set1_ps(0.5f))));
}

/* ---- fp32 -------------------------------------------------------------------------------- */

/* Looks up 16 rows, of which those of the mask are read, in a table of 1, 2 or 4 registers. */
INLINE __m512 values(const __m512 *table,
                     unsigned n_registers,
                     __mmask16 rows,
                     const uint8_t *at)
{
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(rows, at));

    if (n_registers == 1)
        return _mm512_permutexvar_ps(codes, table[0]);
    if (n_registers == 2)
        return _mm512_permutex2var_ps(table[0], codes, table[1]);
    return _mm512_mask_mov_ps(_mm512_permutex2var_ps(table[0], codes, table[1]),
                              _mm512_test_epi32_mask(codes, _mm512_set1_epi32(32)),
                              _mm512_permutex2var_ps(table[2], codes, table[3]));
}

/* Scores n_vectors times 16 rows, the last ones masked; n_registers and n_vectors are constants
 * at the calls. */
INLINE void score_vectors(const float *table,
                          size_t n_centroids,
                          size_t m,
                          unsigned n_registers,
                          unsigned n_vectors,
                          __mmask16 rows,
                          const uint8_t *codes,
                          float *ret_scores)
{
    __m512 sums[VECTORS];

    for (unsigned v = 0; v < n_vectors; v++)
        sums[v] = _mm512_set1_ps(-0.0f); /* -0 + x is x, also where x is -0 */
    for (size_t j = 0; j < m; j++, table += n_centroids, codes += KV_PQ_TILE) {
        __m512 registers[REGISTERS_MAX];

        for (unsigned i = 0; i < n_registers; i++)
            registers[i] = n_registers == 1
                               ? _mm512_maskz_loadu_ps(first_lanes(n_centroids), table)
                               : _mm512_loadu_ps(table + i * LANES);
        for (unsigned v = 0; v < n_vectors; v++)
            sums[v] =
                _mm512_add_ps(sums[v], values(registers, n_registers, rows, codes + v * LANES));
    }
    for (unsigned v = 0; v < n_vectors; v++)
        _mm512_mask_storeu_ps(ret_scores + v * LANES, rows, sums[v]);
}

INLINE void score_queries(const struct kv_pq_shape *shape,
                          const float *tables,
                          size_t n_queries,
                          unsigned n_registers,
                          const uint8_t *codes,
                          size_t n,
                          float *ret_scores,
                          size_t scores_stride)
{
    const size_t n_centroids = kv_pq_n_centroids(shape);

    for (; n_queries > 0; n_queries--) {
        if (n == KV_PQ_TILE)
            score_vectors(tables, n_centroids, shape->m, n_registers, VECTORS, 0xffff, codes,
                          ret_scores);
        else
            for (size_t i = 0; i < n; i += LANES)
                score_vectors(tables, n_centroids, shape->m, n_registers, 1, first_lanes(n - i),
                              codes + i, ret_scores + i);
        tables += kv_pq_table_size(shape);
        ret_scores += scores_stride;
    }
}

AVX512 static void score(const struct kv_pq_shape *shape,
                         const float *tables,
                         size_t n_queries,
                         const uint8_t *const *tiles,
                         size_t begin,
                         size_t n,
                         float *ret_scores,
                         size_t scores_stride)
{
    const size_t bytes = kv_tile_bytes(shape), ahead = 1 + AHEAD_BYTES / bytes;
    __m512i unpacked[CODES];

    if (kv_tile_width(shape) == 8) {
        kv_tile_avx2.score(shape, tables, n_queries, tiles, begin, n, ret_scores,
                           scores_stride);
        return;
    }
    for (size_t row = begin, n_rows; row < begin + n; row += n_rows) {
        const size_t tile = row / KV_PQ_TILE, in_tile = row % KV_PQ_TILE;
        const uint8_t *codes = (const uint8_t *)unpacked + in_tile;
        float *to = ret_scores + (row - begin);

        n_rows =
            begin + n - row < KV_PQ_TILE - in_tile ? begin + n - row : KV_PQ_TILE - in_tile;
        if ((tile + ahead) * KV_PQ_TILE < begin + n)
            prefetch(tiles[tile + ahead], bytes);
        if (shape->bits <= 4) {
            unpack(shape->m, 4, 1, tiles[tile], unpacked);
            score_queries(shape, tables, n_queries, 1, codes, n_rows, to, scores_stride);
            continue;
        }
        unpack(shape->m, 6, 1, tiles[tile], unpacked);
        if (shape->bits == 5)
            score_queries(shape, tables, n_queries, 2, codes, n_rows, to, scores_stride);
        else
            score_queries(shape, tables, n_queries, 4, codes, n_rows, to, scores_stride);
    }
}

AVX512 static void cells(const struct kv_pq_shape *shape,
                         const uint8_t *tile,
                         size_t begin,
                         size_t n,
                         uint16_t *ret_cells)
{
    const __m128i bits = _mm_cvtsi32_si128((int)shape->bits);
    const uint32_t width = kv_tile_width(shape);
    const size_t at_once = 32;
    __m512i unpacked[CODES];

    if (width == 4)
        unpack(shape->m, 4, 1, tile, unpacked);
    else if (width == 6)
        unpack(shape->m, 6, 1, tile, unpacked);
    else
        unpack(shape->m, 8, 1, tile, unpacked);
    for (size_t i = 0; i < n; i += at_once) {
        const uint8_t *codes = (const uint8_t *)unpacked + begin + i;
        const __mmask32 rows = n - i < at_once ? (1u << (n - i)) - 1 : UINT32_MAX;
        __m512i numbers = _mm512_setzero_si512();

        for (size_t j = 0; j < shape->m; j++)
            numbers = _mm512_or_si512(
                _mm512_sll_epi16(numbers, bits),
                _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(rows, codes + j * KV_PQ_TILE)));
        _mm512_mask_storeu_epi16(ret_cells + i, rows, numbers);
    }
}

const struct kv_tile_kernels kv_tile_avx512 = {
    .name = "avx512",
    .supported = kv_has_avx512,
    .score = score,
    .cells = cells,
    .range = range,
    .round8_to = round8_to,
    .scan8 = scan8,
    .scan8_max = scan8_max,
};

#endif
