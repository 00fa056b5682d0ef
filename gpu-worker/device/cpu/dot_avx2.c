/* Eight lanes at a time, with AVX2, FMA and F16C.
 *
 * Each type has one function that unpacks 32 weights of a block, in order, to four vectors.
 * Products with rows and the unpacking of rows use it. */
#include "gpu-worker/device/cpu/dot.h"

#include <stddef.h>

#if defined(__x86_64__)

#include "gpu-worker/base/avx2.h"
#include "proto/kv_types.h"

#include <immintrin.h>
#include <stdbool.h>
#include <string.h>

#define AVX2   KVW_AVX2
#define INLINE KVW_AVX2_INLINE

/* ---- 32 weights of a block ---- */

INLINE float half_at(const uint8_t *at)
{
    uint16_t bits;

    memcpy(&bits, at, sizeof(bits));
    return _cvtsh_ss(bits);
}

/* (q * scale + offset) of 32 unsigned bytes. */
INLINE void affine(__m256i q, float scale, float offset, __m256 out[4])
{
    const __m256 a = _mm256_set1_ps(scale), b = _mm256_set1_ps(offset);
    const __m128i low = _mm256_castsi256_si128(q), high = _mm256_extracti128_si256(q, 1);

    out[0] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(low)), a, b);
    out[1] =
        _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(low, 8))), a, b);
    out[2] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(high)), a, b);
    out[3] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(high, 8))),
                             a, b);
}

/* (q * scale) of 8 signed bytes. */
INLINE __m256 scaled8(__m128i q, float scale)
{
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)), _mm256_set1_ps(scale));
}

/* 16 bytes to 32: their low halves, then their high halves. */
INLINE __m256i nibbles(const uint8_t *at)
{
    const __m128i bytes = _mm_loadu_si128((const __m128i *)at);
    const __m128i high = _mm_srli_epi16(bytes, 4);

    return _mm256_and_si256(_mm256_set_m128i(high, bytes), _mm256_set1_epi8(0x0f));
}

/* Expands 32 bits to bytes: 16 where the bit is set, else 0. */
INLINE __m256i fifth_bits(const uint8_t *at)
{
    const __m256i spread = _mm256_setr_epi64x(0x0000000000000000, 0x0101010101010101,
                                              0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
    int32_t bits;

    memcpy(&bits, at, sizeof(bits));
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), spread);
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);

    return _mm256_and_si256(is_set, _mm256_set1_epi8(16));
}

/* (q * scale + offset) of 16 bytes of two nibbles each: all low ones, then all high ones.  The
 * shuffle moves each byte to a 32-bit lane. */
INLINE void affine_nibbles(const uint8_t *at, __m256 scale, __m256 offset, __m256 out[4])
{
    const __m256i first = _mm256_setr_epi32(-256, -255, -254, -253, -252, -251, -250, -249);
    const __m256i second = _mm256_add_epi32(first, _mm256_set1_epi32(8));
    const __m256i low = _mm256_set1_epi32(15);
    const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)at));
    const __m256i a = _mm256_shuffle_epi8(bytes, first);
    const __m256i b = _mm256_shuffle_epi8(bytes, second);

    out[0] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_and_si256(a, low)), scale, offset);
    out[1] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_and_si256(b, low)), scale, offset);
    out[2] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(a, 4)), scale, offset);
    out[3] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(b, 4)), scale, offset);
}

INLINE void q4_0_values(const uint8_t *block, unsigned part, __m256 out[4])
{
    const float d = half_at(block);

    (void)part;
    affine_nibbles(block + 2, _mm256_set1_ps(d), _mm256_set1_ps(-8 * d), out);
}

INLINE void q4_1_values(const uint8_t *block, unsigned part, __m256 out[4])
{
    int32_t both;

    (void)part;
    memcpy(&both, block, sizeof(both));

    const __m128 scales = _mm_cvtph_ps(_mm_cvtsi32_si128(both));

    affine_nibbles(block + 4, _mm256_broadcastss_ps(scales),
                   _mm256_broadcastss_ps(_mm_movehdup_ps(scales)), out);
}

INLINE void q5_0_values(const uint8_t *block, unsigned part, __m256 out[4])
{
    const float d = half_at(block);

    (void)part;
    affine(_mm256_or_si256(nibbles(block + 6), fifth_bits(block + 2)), d, -16 * d, out);
}

INLINE void q5_1_values(const uint8_t *block, unsigned part, __m256 out[4])
{
    (void)part;
    affine(_mm256_or_si256(nibbles(block + 8), fifth_bits(block + 4)), half_at(block),
           half_at(block + 2), out);
}

INLINE void q8_0_values(const uint8_t *block, unsigned part, __m256 out[4])
{
    const float d = half_at(block);

    (void)part;
    for (unsigned i = 0; i < 4; i++)
        out[i] = scaled8(_mm_loadl_epi64((const __m128i *)(block + 2 + 8 * i)), d);
}

/* Scale and minimum, six bits each, of one of eight groups: twelve bytes hold all of them. */
INLINE void
k_scale(const uint8_t *packed, unsigned group, unsigned *ret_scale, unsigned *ret_min)
{
    if (group < 4) {
        *ret_scale = packed[group] & 63;
        *ret_min = packed[group + 4] & 63;
    } else {
        *ret_scale = (packed[group + 4] & 15u) | (packed[group - 4] >> 6) << 4;
        *ret_min = packed[group + 4] >> 4 | (packed[group] >> 6) << 4;
    }
}

/* Groups 2i and 2i + 1 lie in the low and the high halves of the same 32 bytes. */
INLINE __m256i k_nibbles(const uint8_t *at, unsigned part)
{
    __m256i bytes = _mm256_loadu_si256((const __m256i *)(at + 32 * (part / 2)));

    if (part % 2 == 1)
        bytes = _mm256_srli_epi16(bytes, 4);
    return _mm256_and_si256(bytes, _mm256_set1_epi8(0x0f));
}

INLINE void q4_k_values(const uint8_t *block, unsigned part, __m256 out[4])
{
    unsigned scale, min;

    k_scale(block + 4, part, &scale, &min);
    affine(k_nibbles(block + 16, part), half_at(block) * (float)scale,
           -half_at(block + 2) * (float)min, out);
}

INLINE void q5_k_values(const uint8_t *block, unsigned part, __m256 out[4])
{
    const __m256i bit = _mm256_set1_epi8((char)(1u << part));
    const __m256i high = _mm256_loadu_si256((const __m256i *)(block + 16));
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(high, bit), bit);
    unsigned scale, min;

    k_scale(block + 4, part, &scale, &min);
    affine(_mm256_or_si256(k_nibbles(block + 48, part),
                           _mm256_and_si256(is_set, _mm256_set1_epi8(16))),
           half_at(block) * (float)scale, -half_at(block + 2) * (float)min, out);
}

/* Each half of a block is 128 weights: four parts of 32, whose low four bits are in 64 bytes
 * and high two in 32.  A scale serves 16. */
INLINE void q6_k_values(const uint8_t *block, unsigned part, __m256 out[4])
{
    const unsigned half = part / 4, quarter = part % 4;
    const uint8_t *low_at = block + 64 * half + 32 * (quarter % 2);
    const int8_t *scales = (const int8_t *)(block + 192 + 8 * half + 2 * quarter);
    const float d = half_at(block + 208);
    const float d0 = d * (float)scales[0], d1 = d * (float)scales[1];
    __m256i low = _mm256_loadu_si256((const __m256i *)low_at);
    __m256i high = _mm256_loadu_si256((const __m256i *)(block + 128 + 32 * half));

    if (quarter >= 2)
        low = _mm256_srli_epi16(low, 4);
    high = _mm256_srl_epi16(high, _mm_cvtsi32_si128((int)(2 * quarter)));
    low = _mm256_and_si256(low, _mm256_set1_epi8(0x0f));
    high = _mm256_slli_epi16(_mm256_and_si256(high, _mm256_set1_epi8(3)), 4);

    const __m256i q = _mm256_sub_epi8(_mm256_or_si256(low, high), _mm256_set1_epi8(32));
    const __m128i q0 = _mm256_castsi256_si128(q), q1 = _mm256_extracti128_si256(q, 1);

    out[0] = scaled8(q0, d0);
    out[1] = scaled8(_mm_srli_si128(q0, 8), d0);
    out[2] = scaled8(q1, d1);
    out[3] = scaled8(_mm_srli_si128(q1, 8), d1);
}

/* ---- rows ----
 *
 * The one order of sums: eight lanes, each adding its elements from first to last, then the
 * lanes as sums4() does.  Four rows at a time keep the multipliers busy. */

/* The sums of four vectors, in order. */
INLINE __m128 sums4(__m256 a, __m256 b, __m256 c, __m256 d)
{
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));

    return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

INLINE void put_sums(const __m256 acc[4], size_t count, float *ret_products)
{
    const __m128 sums = sums4(acc[0], acc[1], acc[2], acc[3]);

    if (count == 4) {
        _mm_storeu_ps(ret_products, sums);
    } else {
        float all[4];

        _mm_storeu_ps(all, sums);
        memcpy(ret_products, all, count * sizeof(all[0]));
    }
}

/* The last elements of a row, fewer than eight. */
INLINE __m256i tail_mask(size_t count)
{
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);

    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), lanes);
}

/* The two functions of a type of blocks. */
#define BLOCK_TYPE(name, BYTES, PARTS)                                                   \
    INLINE void dot4_##name(const uint8_t *block, size_t stride, unsigned count,         \
                            const float *x, size_t n, float *ret_products)               \
    {                                                                                    \
        __m256 acc[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),  \
                         _mm256_setzero_ps()};                                           \
                                                                                         \
        for (size_t i = 0; i < n; i += 32 * (PARTS), block += (BYTES))                   \
            for (unsigned part = 0; part < (PARTS); part++)                              \
                for (unsigned row = 0; row < count; row++) {                             \
                    __m256 v[4];                                                         \
                                                                                         \
                    name##_values(block + row * stride, part, v);                        \
                    for (unsigned j = 0; j < 4; j++)                                     \
                        acc[row] = _mm256_fmadd_ps(                                      \
                            v[j], _mm256_loadu_ps(x + i + 32 * part + 8 * j), acc[row]); \
                }                                                                        \
        put_sums(acc, count, ret_products);                                              \
    }                                                                                    \
                                                                                         \
    AVX2 static void dot_##name(const void *rows, size_t stride, size_t n_rows,          \
                                const float *x, size_t n, float *ret_products)           \
    {                                                                                    \
        size_t r = 0;                                                                    \
                                                                                         \
        for (; r + 4 <= n_rows; r += 4)                                                  \
            dot4_##name((const uint8_t *)rows + r * stride, stride, 4, x, n,             \
                        ret_products + r);                                               \
        for (; r < n_rows; r++)                                                          \
            dot4_##name((const uint8_t *)rows + r * stride, stride, 1, x, n,             \
                        ret_products + r);                                               \
    }                                                                                    \
                                                                                         \
    AVX2 static void unpack_##name(const void *row, float *ret_values, size_t n)         \
    {                                                                                    \
        const uint8_t *block = row;                                                      \
                                                                                         \
        for (size_t i = 0; i < n; i += 32 * (PARTS), block += (BYTES))                   \
            for (unsigned part = 0; part < (PARTS); part++) {                            \
                __m256 v[4];                                                             \
                                                                                         \
                name##_values(block, part, v);                                           \
                for (unsigned j = 0; j < 4; j++)                                         \
                    _mm256_storeu_ps(ret_values + i + 32 * part + 8 * j, v[j]);          \
            }                                                                            \
    }

BLOCK_TYPE(q4_0, 18, 1)
BLOCK_TYPE(q4_1, 20, 1)
BLOCK_TYPE(q5_0, 22, 1)
BLOCK_TYPE(q5_1, 24, 1)
BLOCK_TYPE(q8_0, 34, 1)
BLOCK_TYPE(q4_k, 144, 8)
BLOCK_TYPE(q5_k, 176, 8)
BLOCK_TYPE(q6_k, 210, 8)

/* ---- plain numbers: weights, and rows of a cache ---- */

INLINE __m256 load8_fp32(const void *at)
{
    return _mm256_loadu_ps(at);
}

INLINE __m256 load8_fp16(const void *at)
{
    return _mm256_cvtph_ps(_mm_loadu_si128(at));
}

INLINE __m256 load8_bf16(const void *at)
{
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), 16));
}

INLINE void store8_fp32(void *at, __m256 v)
{
    _mm256_storeu_ps(at, v);
}

/* Numbers too large for fp16 become its largest: an infinity would make every sum infinite or
 * NaN. */
INLINE void store8_fp16(void *at, __m256 v)
{
    const __m256 most = _mm256_set1_ps(65504.0f);

    v = _mm256_min_ps(most, _mm256_max_ps(_mm256_sub_ps(_mm256_setzero_ps(), most), v));
    _mm_storeu_si128(at, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

INLINE void store8_bf16(void *at, __m256 v)
{
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i high = _mm256_srli_epi32(up, 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);

    _mm_storeu_si128(at, _mm256_castsi256_si128(packed));
}

/* The last elements of a row, in a vector filled up with zeros. */
#define PLAIN_TYPE(name, ELEMENT)                                                              \
    INLINE void dot4_##name(const char *row, size_t stride, unsigned count, const float *x,    \
                            size_t n, float *ret_products)                                     \
    {                                                                                          \
        __m256 acc[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),        \
                         _mm256_setzero_ps()};                                                 \
        size_t i = 0;                                                                          \
                                                                                               \
        for (; i + 8 <= n; i += 8)                                                             \
            for (unsigned j = 0; j < count; j++)                                               \
                acc[j] = _mm256_fmadd_ps(load8_##name(row + j * stride + i * sizeof(ELEMENT)), \
                                         _mm256_loadu_ps(x + i), acc[j]);                      \
        if (i < n) {                                                                           \
            const __m256 rest_x = _mm256_maskload_ps(x + i, tail_mask(n - i));                 \
                                                                                               \
            for (unsigned j = 0; j < count; j++) {                                             \
                ELEMENT rest[8] = {0};                                                         \
                                                                                               \
                memcpy(rest, row + j * stride + i * sizeof(ELEMENT),                           \
                       (n - i) * sizeof(rest[0]));                                             \
                acc[j] = _mm256_fmadd_ps(load8_##name(rest), rest_x, acc[j]);                  \
            }                                                                                  \
        }                                                                                      \
        put_sums(acc, count, ret_products);                                                    \
    }                                                                                          \
                                                                                               \
    AVX2 static void dot_##name(const void *rows, size_t stride, size_t n_rows,                \
                                const float *x, size_t n, float *ret_products)                 \
    {                                                                                          \
        size_t r = 0;                                                                          \
                                                                                               \
        for (; r + 4 <= n_rows; r += 4)                                                        \
            dot4_##name((const char *)rows + r * stride, stride, 4, x, n, ret_products + r);   \
        for (; r < n_rows; r++)                                                                \
            dot4_##name((const char *)rows + r * stride, stride, 1, x, n, ret_products + r);   \
    }                                                                                          \
                                                                                               \
    AVX2 static void load_##name(const void *row, float *ret_values, size_t n)                 \
    {                                                                                          \
        const ELEMENT *at = row;                                                               \
        size_t i = 0;                                                                          \
                                                                                               \
        for (; i + 8 <= n; i += 8)                                                             \
            _mm256_storeu_ps(ret_values + i, load8_##name(at + i));                            \
        if (i < n) {                                                                           \
            ELEMENT rest[8] = {0};                                                             \
            float values[8];                                                                   \
                                                                                               \
            memcpy(rest, at + i, (n - i) * sizeof(rest[0]));                                   \
            _mm256_storeu_ps(values, load8_##name(rest));                                      \
            memcpy(ret_values + i, values, (n - i) * sizeof(values[0]));                       \
        }                                                                                      \
    }                                                                                          \
                                                                                               \
    AVX2 static void store_##name(const float *values, void *ret_row, size_t n)                \
    {                                                                                          \
        ELEMENT *at = ret_row;                                                                 \
        size_t i = 0;                                                                          \
                                                                                               \
        for (; i + 8 <= n; i += 8)                                                             \
            store8_##name(at + i, _mm256_loadu_ps(values + i));                                \
        if (i < n) {                                                                           \
            ELEMENT rest[8];                                                                   \
            float rest_values[8] = {0};                                                        \
                                                                                               \
            memcpy(rest_values, values + i, (n - i) * sizeof(rest_values[0]));                 \
            store8_##name(rest, _mm256_loadu_ps(rest_values));                                 \
            memcpy(at + i, rest, (n - i) * sizeof(rest[0]));                                   \
        }                                                                                      \
    }                                                                                          \
                                                                                               \
    INLINE void score4_##name(const ELEMENT *key, const float *queries, unsigned count,        \
                              size_t d, float sums[4])                                         \
    {                                                                                          \
        __m256 acc[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),        \
                         _mm256_setzero_ps()};                                                 \
                                                                                               \
        for (size_t i = 0; i < d; i += 8) {                                                    \
            const __m256 k = load8_##name(key + i);                                            \
                                                                                               \
            for (unsigned j = 0; j < count; j++)                                               \
                acc[j] = _mm256_fmadd_ps(k, _mm256_loadu_ps(queries + j * d + i), acc[j]);     \
        }                                                                                      \
        _mm_storeu_ps(sums, sums4(acc[0], acc[1], acc[2], acc[3]));                            \
    }                                                                                          \
                                                                                               \
    AVX2 static void score_##name(const void *rows, size_t stride, size_t n_rows,              \
                                  const float *queries, size_t n_queries, size_t d,            \
                                  float *ret_scores, size_t scores_stride)                     \
    {                                                                                          \
        for (size_t r = 0; r < n_rows; r++) {                                                  \
            const ELEMENT *key = (const void *)((const char *)rows + r * stride);              \
                                                                                               \
            for (size_t q = 0; q < n_queries; q += 4) {                                        \
                const float *from = queries + q * d;                                           \
                const size_t count = n_queries - q < 4 ? n_queries - q : 4;                    \
                float sums[4];                                                                 \
                                                                                               \
                if (count == 4)                                                                \
                    score4_##name(key, from, 4, d, sums);                                      \
                else if (count == 3)                                                           \
                    score4_##name(key, from, 3, d, sums);                                      \
                else if (count == 2)                                                           \
                    score4_##name(key, from, 2, d, sums);                                      \
                else                                                                           \
                    score4_##name(key, from, 1, d, sums);                                      \
                for (size_t j = 0; j < count; j++)                                             \
                    ret_scores[(q + j) * scores_stride + r] = sums[j];                         \
            }                                                                                  \
        }                                                                                      \
    }                                                                                          \
                                                                                               \
    INLINE void gather_columns_##name(const char *at, size_t stride, size_t n_rows,            \
                                      const float *weights, size_t weights_stride,             \
                                      unsigned count, unsigned vectors, size_t d, float *out)  \
    {                                                                                          \
        __m256 acc[4][2];                                                                      \
                                                                                               \
        for (unsigned j = 0; j < count; j++)                                                   \
            for (unsigned i = 0; i < vectors; i++)                                             \
                acc[j][i] = _mm256_loadu_ps(out + j * d + 8 * i);                              \
        for (size_t r = 0; r < n_rows; r++, at += stride) {                                    \
            __m256 v[2];                                                                       \
                                                                                               \
            for (unsigned i = 0; i < vectors; i++)                                             \
                v[i] = load8_##name(at + 8 * i * sizeof(ELEMENT));                             \
            for (unsigned j = 0; j < count; j++) {                                             \
                const __m256 weight = _mm256_broadcast_ss(weights + j * weights_stride + r);   \
                                                                                               \
                for (unsigned i = 0; i < vectors; i++)                                         \
                    acc[j][i] = _mm256_fmadd_ps(v[i], weight, acc[j][i]);                      \
            }                                                                                  \
        }                                                                                      \
        for (unsigned j = 0; j < count; j++)                                                   \
            for (unsigned i = 0; i < vectors; i++)                                             \
                _mm256_storeu_ps(out + j * d + 8 * i, acc[j][i]);                              \
    }                                                                                          \
                                                                                               \
    INLINE void gather4_##name(const void *rows, size_t stride, size_t n_rows,                 \
                               const float *weights, size_t weights_stride, unsigned count,    \
                               size_t d, float *out)                                           \
    {                                                                                          \
        size_t i = 0;                                                                          \
                                                                                               \
        for (; i + 16 <= d; i += 16)                                                           \
            gather_columns_##name((const char *)rows + i * sizeof(ELEMENT), stride, n_rows,    \
                                  weights, weights_stride, count, 2, d, out + i);              \
        if (i < d)                                                                             \
            gather_columns_##name((const char *)rows + i * sizeof(ELEMENT), stride, n_rows,    \
                                  weights, weights_stride, count, 1, d, out + i);              \
    }                                                                                          \
                                                                                               \
    AVX2 static void gather_##name(const void *rows, size_t stride, size_t n_rows,             \
                                   const float *weights, size_t weights_stride,                \
                                   size_t n_queries, size_t d, float *out)                     \
    {                                                                                          \
        for (size_t q = 0; q < n_queries; q += 4) {                                            \
            const float *from = weights + q * weights_stride;                                  \
            const size_t count = n_queries - q < 4 ? n_queries - q : 4;                        \
                                                                                               \
            if (count == 4)                                                                    \
                gather4_##name(rows, stride, n_rows, from, weights_stride, 4, d, out + q * d); \
            else if (count == 3)                                                               \
                gather4_##name(rows, stride, n_rows, from, weights_stride, 3, d, out + q * d); \
            else if (count == 2)                                                               \
                gather4_##name(rows, stride, n_rows, from, weights_stride, 2, d, out + q * d); \
            else                                                                               \
                gather4_##name(rows, stride, n_rows, from, weights_stride, 1, d, out + q * d); \
        }                                                                                      \
    }

PLAIN_TYPE(fp32, float)
PLAIN_TYPE(fp16, uint16_t)
PLAIN_TYPE(bf16, uint16_t)

/* ---- products of many rows ----
 *
 * Tiles of four rows of a by three of b, in twelve accumulators.  K_STRETCH elements of the
 * four rows stay in L1 while they are multiplied with all of b.  Between stretches the
 * accumulators are stored, so the order of sums is that of the whole row. */

enum {
    K_STRETCH = 768,
    TILE_A = 4,
    TILE_B = 3,
    B_ROWS = 126, /* of b at a time: limits the memory for accumulators */
};

INLINE void product_tile(const float *a,
                         size_t lda,
                         unsigned n_a,
                         const float *b,
                         size_t ldb,
                         unsigned n_b,
                         size_t k,
                         float *resting,
                         bool is_first,
                         bool is_last,
                         float *ret_products,
                         size_t ldc)
{
    __m256 acc[TILE_B][TILE_A];
    size_t i = 0;

    for (unsigned y = 0; y < TILE_B; y++)
        for (unsigned x = 0; x < TILE_A; x++)
            acc[y][x] = is_first || y >= n_b || x >= n_a
                            ? _mm256_setzero_ps()
                            : _mm256_loadu_ps(resting + (y * TILE_A + x) * 8);
    for (; i + 8 <= k; i += 8) {
        __m256 of_a[TILE_A];

        for (unsigned x = 0; x < n_a; x++)
            of_a[x] = _mm256_loadu_ps(a + x * lda + i);
        for (unsigned y = 0; y < n_b; y++) {
            const __m256 of_b = _mm256_loadu_ps(b + y * ldb + i);

            for (unsigned x = 0; x < n_a; x++)
                acc[y][x] = _mm256_fmadd_ps(of_b, of_a[x], acc[y][x]);
        }
    }
    if (i < k) {
        const __m256i mask = tail_mask(k - i);

        for (unsigned y = 0; y < n_b; y++)
            for (unsigned x = 0; x < n_a; x++)
                acc[y][x] =
                    _mm256_fmadd_ps(_mm256_maskload_ps(b + y * ldb + i, mask),
                                    _mm256_maskload_ps(a + x * lda + i, mask), acc[y][x]);
    }
    for (unsigned y = 0; y < n_b; y++) {
        float sums[TILE_A];

        if (!is_last) {
            for (unsigned x = 0; x < n_a; x++)
                _mm256_storeu_ps(resting + (y * TILE_A + x) * 8, acc[y][x]);
            continue;
        }
        put_sums(acc[y], TILE_A, sums);
        for (unsigned x = 0; x < n_a; x++)
            ret_products[x * ldc + y] = sums[x];
    }
}

/* N_A rows of a by all of b. */
#define PRODUCT_ROWS(N_A)                                                                    \
    AVX2 static void product_rows_##N_A(                                                     \
        const float *a, size_t lda, const float *b, size_t ldb, size_t n_b, size_t k,        \
        float *resting, bool is_first, bool is_last, float *ret_products, size_t ldc)        \
    {                                                                                        \
        size_t j = 0;                                                                        \
                                                                                             \
        for (; j + TILE_B <= n_b; j += TILE_B)                                               \
            product_tile(a, lda, N_A, b + j * ldb, ldb, TILE_B, k, resting + j * TILE_A * 8, \
                         is_first, is_last, ret_products + j, ldc);                          \
        for (; j < n_b; j++)                                                                 \
            product_tile(a, lda, N_A, b + j * ldb, ldb, 1, k, resting + j * TILE_A * 8,      \
                         is_first, is_last, ret_products + j, ldc);                          \
    }

PRODUCT_ROWS(1)
PRODUCT_ROWS(2)
PRODUCT_ROWS(3)
PRODUCT_ROWS(4)

AVX2 static void products(const float *a,
                          size_t lda,
                          size_t n_a,
                          const float *b,
                          size_t ldb,
                          size_t n_b,
                          size_t k,
                          float *ret_products,
                          size_t ldc)
{
    static void (*const of_rows[])(const float *, size_t, const float *, size_t, size_t, size_t,
                                   float *, bool, bool, float *, size_t) = {
        NULL, product_rows_1, product_rows_2, product_rows_3, product_rows_4};
    float resting[B_ROWS * TILE_A * 8];

    for (size_t j = 0; j < n_b; j += B_ROWS) {
        const size_t b_rows = n_b - j < B_ROWS ? n_b - j : B_ROWS;

        for (size_t i = 0; i < n_a; i += TILE_A) {
            const size_t a_rows = n_a - i < TILE_A ? n_a - i : TILE_A;

            for (size_t l = 0; l < k; l += K_STRETCH) {
                const size_t stretch = k - l < K_STRETCH ? k - l : K_STRETCH;

                of_rows[a_rows](a + i * lda + l, lda, b + j * ldb + l, ldb, b_rows, stretch,
                                resting, l == 0, l + stretch == k, ret_products + i * ldc + j,
                                ldc);
            }
        }
    }
}

/* ---- elementwise ---- */

AVX2 static float sum_of_squares(const float *x, size_t n)
{
    float sum;

    dot_fp32(x, 0, 1, x, n, &sum);
    return sum;
}

/* -g is limited to 88, because exp(89) overflows fp32; the quotient is below 1e-36 there. */
INLINE __m256 silu8(__m256 g)
{
    const __m256 minus =
        _mm256_min_ps(_mm256_sub_ps(_mm256_setzero_ps(), g), _mm256_set1_ps(88.0f));

    return _mm256_div_ps(g, _mm256_add_ps(_mm256_set1_ps(1.0f), kvw_exp8(minus)));
}

AVX2 static void silu_gate(float *gate, const float *up, size_t n)
{
    size_t i = 0;

    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(
            gate + i, _mm256_mul_ps(silu8(_mm256_loadu_ps(gate + i)), _mm256_loadu_ps(up + i)));
    for (; i < n; i++)
        gate[i] = _mm256_cvtss_f32(silu8(_mm256_set1_ps(gate[i]))) * up[i];
}

static const struct kvw_dot_table table = {
    .name = "avx2",
    .dot = {[KVW_TENSOR_F32] = dot_fp32,
            [KVW_TENSOR_F16] = dot_fp16,
            [KVW_TENSOR_BF16] = dot_bf16,
            [KVW_TENSOR_Q4_0] = dot_q4_0,
            [KVW_TENSOR_Q4_1] = dot_q4_1,
            [KVW_TENSOR_Q5_0] = dot_q5_0,
            [KVW_TENSOR_Q5_1] = dot_q5_1,
            [KVW_TENSOR_Q8_0] = dot_q8_0,
            [KVW_TENSOR_Q4_K] = dot_q4_k,
            [KVW_TENSOR_Q5_K] = dot_q5_k,
            [KVW_TENSOR_Q6_K] = dot_q6_k},
    .unpack = {[KVW_TENSOR_F32] = load_fp32,
               [KVW_TENSOR_F16] = load_fp16,
               [KVW_TENSOR_BF16] = load_bf16,
               [KVW_TENSOR_Q4_0] = unpack_q4_0,
               [KVW_TENSOR_Q4_1] = unpack_q4_1,
               [KVW_TENSOR_Q5_0] = unpack_q5_0,
               [KVW_TENSOR_Q5_1] = unpack_q5_1,
               [KVW_TENSOR_Q8_0] = unpack_q8_0,
               [KVW_TENSOR_Q4_K] = unpack_q4_k,
               [KVW_TENSOR_Q5_K] = unpack_q5_k,
               [KVW_TENSOR_Q6_K] = unpack_q6_k},
    .products = products,
    .score = {[KV_FP32] = score_fp32, [KV_FP16] = score_fp16, [KV_BF16] = score_bf16},
    .gather = {[KV_FP32] = gather_fp32, [KV_FP16] = gather_fp16, [KV_BF16] = gather_bf16},
    .load = {[KV_FP32] = load_fp32, [KV_FP16] = load_fp16, [KV_BF16] = load_bf16},
    .store = {[KV_FP32] = store_fp32, [KV_FP16] = store_fp16, [KV_BF16] = store_bf16},
    .sum_of_squares = sum_of_squares,
    .silu_gate = silu_gate,
};

const struct kvw_dot_table *kvw_dot_avx2(void)
{
    return kvw_has_avx2() ? &table : NULL;
}

#else

const struct kvw_dot_table *kvw_dot_avx2(void)
{
    return NULL;
}

#endif
