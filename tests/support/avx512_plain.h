/* avx512_plain.h - AVX-512 intrinsics without AVX-512, so that kernels written for it are
 * tested on any machine with AVX2: where KV_EMULATE_AVX512 is defined, avx512.h includes
 * this instead of <immintrin.h>.  Vectors of 512 bits are unions of arrays here, what is known
 * to AVX2 is that instruction twice, and the rest is written as the manual has it (Intel 64 and
 * IA-32 Architectures Software Developer's Manual, volume 2).  Masked loads and stores touch
 * what their mask says and nothing else.
 *
 * Here are the intrinsics of the list at the end.  One more takes one line for a macro of its
 * kind, or a function plain_mm512_xxx(), and its name in that list.  _mm512_reduce_add_ps() and
 * its like are missing by intent: in which order they add is the compiler's affair.
 *
 * An `int` that the instruction wants as an immediate may be any number here; the real build
 * says whether it is a constant.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_TESTS_SUPPORT_AVX512_PLAIN_H
#define KV_TESTS_SUPPORT_AVX512_PLAIN_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

/* Names that are macros in <immintrin.h> get another meaning, which is what is wanted. */
#pragma GCC system_header

#define PLAIN __attribute__((target("avx2,fma,f16c"))) static inline

union plain512 {
    float f32[16];
    double f64[8];
    int8_t i8[64];
    int16_t i16[32];
    int32_t i32[16];
    int64_t i64[8];
    uint8_t u8[64];
    uint16_t u16[32];
    uint32_t u32[16];
    uint64_t u64[8];
    __m256 ps[2];
    __m256d pd[2];
    __m256i si[2];
};

#define LANES_OF(member)                           \
    (sizeof((union plain512){.u64 = {0}}.member) / \
     sizeof((union plain512){.u64 = {0}}.member[0]))

/* ---- kinds of intrinsics ----------------------------------------------------------------- */

#define SAME(name)                                            \
    PLAIN union plain512 plain_mm512_##name(union plain512 a) \
    {                                                         \
        return a;                                             \
    }

#define SET1(suffix, member, type)                         \
    PLAIN union plain512 plain_mm512_set1_##suffix(type a) \
    {                                                      \
        union plain512 r;                                  \
                                                           \
        for (unsigned i = 0; i < LANES_OF(member); i++)    \
            r.member[i] = a;                               \
        return r;                                          \
    }

#define LOAD(load, store)                                      \
    PLAIN union plain512 plain_mm512_##load(const void *at)    \
    {                                                          \
        union plain512 r;                                      \
                                                               \
        memcpy(&r, at, sizeof(r));                             \
        return r;                                              \
    }                                                          \
    PLAIN void plain_mm512_##store(void *at, union plain512 a) \
    {                                                          \
        memcpy(at, &a, sizeof(a));                             \
    }

#define LOAD_SOME(suffix, member, mask)                                              \
    PLAIN union plain512 plain_mm512_mask_loadu_##suffix(union plain512 r, mask k,   \
                                                         const void *at)             \
    {                                                                                \
        for (unsigned i = 0; i < LANES_OF(member); i++)                              \
            if ((uint64_t)k >> i & 1)                                                \
                memcpy(r.member + i, (const char *)at + i * sizeof(r.member[0]),     \
                       sizeof(r.member[0]));                                         \
        return r;                                                                    \
    }                                                                                \
    PLAIN union plain512 plain_mm512_maskz_loadu_##suffix(mask k, const void *at)    \
    {                                                                                \
        return plain_mm512_mask_loadu_##suffix((union plain512){.u64 = {0}}, k, at); \
    }                                                                                \
    PLAIN void plain_mm512_mask_storeu_##suffix(void *at, mask k, union plain512 a)  \
    {                                                                                \
        for (unsigned i = 0; i < LANES_OF(member); i++)                              \
            if ((uint64_t)k >> i & 1)                                                \
                memcpy((char *)at + i * sizeof(a.member[0]), a.member + i,           \
                       sizeof(a.member[0]));                                         \
    }

#define SHORT_SOME(prefix, vector, suffix, lane, mask)                                \
    PLAIN vector plain##prefix##_maskz_loadu_##suffix(mask k, const void *at)         \
    {                                                                                 \
        lane lanes[sizeof(vector) / sizeof(lane)] = {0};                              \
        vector r;                                                                     \
                                                                                      \
        for (unsigned i = 0; i < sizeof(vector) / sizeof(lane); i++)                  \
            if ((uint64_t)k >> i & 1)                                                 \
                memcpy(lanes + i, (const char *)at + i * sizeof(lane), sizeof(lane)); \
        memcpy(&r, lanes, sizeof(r));                                                 \
        return r;                                                                     \
    }                                                                                 \
    PLAIN void plain##prefix##_mask_storeu_##suffix(void *at, mask k, vector a)       \
    {                                                                                 \
        lane lanes[sizeof(vector) / sizeof(lane)];                                    \
                                                                                      \
        memcpy(lanes, &a, sizeof(a));                                                 \
        for (unsigned i = 0; i < sizeof(vector) / sizeof(lane); i++)                  \
            if ((uint64_t)k >> i & 1)                                                 \
                memcpy((char *)at + i * sizeof(lane), lanes + i, sizeof(lane));       \
    }

#define MOVE(suffix, member, mask)                                                 \
    PLAIN union plain512 plain_mm512_mask_mov_##suffix(union plain512 r, mask k,   \
                                                       union plain512 a)           \
    {                                                                              \
        for (unsigned i = 0; i < LANES_OF(member); i++)                            \
            if ((uint64_t)k >> i & 1)                                              \
                r.member[i] = a.member[i];                                         \
        return r;                                                                  \
    }                                                                              \
    PLAIN union plain512 plain_mm512_maskz_mov_##suffix(mask k, union plain512 a)  \
    {                                                                              \
        return plain_mm512_mask_mov_##suffix((union plain512){.u64 = {0}}, k, a);  \
    }                                                                              \
    PLAIN union plain512 plain_mm512_mask_blend_##suffix(mask k, union plain512 a, \
                                                         union plain512 b)         \
    {                                                                              \
        return plain_mm512_mask_mov_##suffix(a, k, b);                             \
    }

/* Lanes of r where the mask has a bit, of `otherwise` elsewhere. */
#define WHERE(member, k, r, otherwise)              \
    for (unsigned i = 0; i < LANES_OF(member); i++) \
        if (!((uint64_t)(k) >> i & 1))              \
            (r).member[i] = (otherwise).member[i];

#define MASKED(name, member, mask, declared, given)                                    \
    PLAIN union plain512 plain_mm512_mask_##name(union plain512 src, mask k, declared) \
    {                                                                                  \
        union plain512 r = plain_mm512_##name given;                                   \
                                                                                       \
        WHERE(member, k, r, src)                                                       \
        return r;                                                                      \
    }                                                                                  \
    PLAIN union plain512 plain_mm512_maskz_##name(mask k, declared)                    \
    {                                                                                  \
        union plain512 r = plain_mm512_##name given;                                   \
                                                                                       \
        WHERE(member, k, r, ((union plain512){.u64 = {0}}))                            \
        return r;                                                                      \
    }

#define COMMA ,

#define TWO(name, half, member, mask)                                           \
    PLAIN union plain512 plain_mm512_##name(union plain512 a, union plain512 b) \
    {                                                                           \
        union plain512 r;                                                       \
                                                                                \
        for (unsigned i = 0; i < 2; i++)                                        \
            r.half[i] = _mm256_##name(a.half[i], b.half[i]);                    \
        return r;                                                               \
    }                                                                           \
    MASKED(name, member, mask, union plain512 a COMMA union plain512 b, (a, b))

#define THREE(name, half, member, mask)                                                       \
    PLAIN union plain512 plain_mm512_##name(union plain512 a, union plain512 b,               \
                                            union plain512 c)                                 \
    {                                                                                         \
        union plain512 r;                                                                     \
                                                                                              \
        for (unsigned i = 0; i < 2; i++)                                                      \
            r.half[i] = _mm256_##name(a.half[i], b.half[i], c.half[i]);                       \
        return r;                                                                             \
    }                                                                                         \
    PLAIN union plain512 plain_mm512_mask_##name(union plain512 a, mask k, union plain512 b,  \
                                                 union plain512 c)                            \
    {                                                                                         \
        union plain512 r = plain_mm512_##name(a, b, c);                                       \
                                                                                              \
        WHERE(member, k, r, a)                                                                \
        return r;                                                                             \
    }                                                                                         \
    PLAIN union plain512 plain_mm512_mask3_##name(union plain512 a, union plain512 b,         \
                                                  union plain512 c, mask k)                   \
    {                                                                                         \
        union plain512 r = plain_mm512_##name(a, b, c);                                       \
                                                                                              \
        WHERE(member, k, r, c)                                                                \
        return r;                                                                             \
    }                                                                                         \
    PLAIN union plain512 plain_mm512_maskz_##name(mask k, union plain512 a, union plain512 b, \
                                                  union plain512 c)                           \
    {                                                                                         \
        union plain512 r = plain_mm512_##name(a, b, c);                                       \
                                                                                              \
        WHERE(member, k, r, ((union plain512){.u64 = {0}}))                                   \
        return r;                                                                             \
    }

#define BITS(name, op)                                                          \
    PLAIN union plain512 plain_mm512_##name(union plain512 a, union plain512 b) \
    {                                                                           \
        union plain512 r;                                                       \
                                                                                \
        for (unsigned i = 0; i < 2; i++)                                        \
            r.si[i] = _mm256_##op##_si256(a.si[i], b.si[i]);                    \
        return r;                                                               \
    }

#define SHIFT(name, by, member, mask)                                     \
    PLAIN union plain512 plain_mm512_##name(union plain512 a, unsigned n) \
    {                                                                     \
        union plain512 r;                                                 \
                                                                          \
        for (unsigned i = 0; i < 2; i++)                                  \
            r.si[i] = _mm256_##by(a.si[i], _mm_cvtsi32_si128((int)n));    \
        return r;                                                         \
    }                                                                     \
    MASKED(name, member, mask, union plain512 a COMMA unsigned n, (a, n))

#define SHIFT_BY(name)                                                   \
    PLAIN union plain512 plain_mm512_##name(union plain512 a, __m128i n) \
    {                                                                    \
        union plain512 r;                                                \
                                                                         \
        for (unsigned i = 0; i < 2; i++)                                 \
            r.si[i] = _mm256_##name(a.si[i], n);                         \
        return r;                                                        \
    }

#define COMPARE(name, member, mask, condition)                                     \
    PLAIN mask plain_mm512_mask_##name(mask k, union plain512 a, union plain512 b) \
    {                                                                              \
        uint64_t r = 0;                                                            \
                                                                                   \
        for (unsigned i = 0; i < LANES_OF(member); i++)                            \
            r |= (uint64_t)(condition) << i;                                       \
        return (mask)(r & k);                                                      \
    }                                                                              \
    PLAIN mask plain_mm512_##name(union plain512 a, union plain512 b)              \
    {                                                                              \
        return plain_mm512_mask_##name((mask)UINT64_MAX, a, b);                    \
    }

#define SIGNS(suffix, member, mask)                             \
    PLAIN mask plain_mm512_mov##suffix##_mask(union plain512 a) \
    {                                                           \
        uint64_t r = 0;                                         \
                                                                \
        for (unsigned i = 0; i < LANES_OF(member); i++)         \
            r |= (uint64_t)(a.member[i] < 0) << i;              \
        return (mask)r;                                         \
    }                                                           \
    PLAIN union plain512 plain_mm512_movm_##suffix(mask k)      \
    {                                                           \
        union plain512 r;                                       \
                                                                \
        for (unsigned i = 0; i < LANES_OF(member); i++)         \
            r.member[i] = (uint64_t)k >> i & 1 ? -1 : 0;        \
        return r;                                               \
    }

/* The one of two tables keeps the first where its mask has no bit, not the indices. */
#define PERMUTE(suffix, member, index, mask)                                                   \
    PLAIN union plain512 plain_mm512_permutexvar_##suffix(union plain512 at, union plain512 a) \
    {                                                                                          \
        union plain512 r;                                                                      \
                                                                                               \
        for (unsigned i = 0; i < LANES_OF(member); i++)                                        \
            r.member[i] = a.member[at.index[i] % LANES_OF(member)];                            \
        return r;                                                                              \
    }                                                                                          \
    MASKED(permutexvar_##suffix, member, mask, union plain512 at COMMA union plain512 a,       \
           (at, a))                                                                            \
    PLAIN union plain512 plain_mm512_permutex2var_##suffix(                                    \
        union plain512 a, union plain512 at, union plain512 b)                                 \
    {                                                                                          \
        union plain512 r;                                                                      \
                                                                                               \
        for (unsigned i = 0; i < LANES_OF(member); i++)                                        \
            r.member[i] = (at.index[i] / LANES_OF(member) % 2 == 0 ? a : b)                    \
                              .member[at.index[i] % LANES_OF(member)];                         \
        return r;                                                                              \
    }                                                                                          \
    PLAIN union plain512 plain_mm512_mask_permutex2var_##suffix(                               \
        union plain512 a, mask k, union plain512 at, union plain512 b)                         \
    {                                                                                          \
        union plain512 r = plain_mm512_permutex2var_##suffix(a, at, b);                        \
                                                                                               \
        WHERE(member, k, r, a)                                                                 \
        return r;                                                                              \
    }                                                                                          \
    PLAIN union plain512 plain_mm512_maskz_permutex2var_##suffix(                              \
        mask k, union plain512 a, union plain512 at, union plain512 b)                         \
    {                                                                                          \
        union plain512 r = plain_mm512_permutex2var_##suffix(a, at, b);                        \
                                                                                               \
        WHERE(member, k, r, ((union plain512){.u64 = {0}}))                                    \
        return r;                                                                              \
    }

#define COMPRESS(suffix, member, mask)                                                      \
    PLAIN union plain512 plain_mm512_mask_compress_##suffix(union plain512 r, mask k,       \
                                                            union plain512 a)               \
    {                                                                                       \
        for (unsigned i = 0, n = 0; i < LANES_OF(member); i++)                              \
            if ((uint64_t)k >> i & 1)                                                       \
                r.member[n++] = a.member[i];                                                \
        return r;                                                                           \
    }                                                                                       \
    PLAIN union plain512 plain_mm512_maskz_compress_##suffix(mask k, union plain512 a)      \
    {                                                                                       \
        return plain_mm512_mask_compress_##suffix((union plain512){.u64 = {0}}, k, a);      \
    }                                                                                       \
    PLAIN void plain_mm512_mask_compressstoreu_##suffix(void *at, mask k, union plain512 a) \
    {                                                                                       \
        const union plain512 r = plain_mm512_maskz_compress_##suffix(k, a);                 \
                                                                                            \
        memcpy(at, &r, (unsigned)__builtin_popcountll(k) * sizeof(r.member[0]));            \
    }                                                                                       \
    PLAIN union plain512 plain_mm512_maskz_expand_##suffix(mask k, union plain512 a)        \
    {                                                                                       \
        union plain512 r = {.u64 = {0}};                                                    \
                                                                                            \
        for (unsigned i = 0, n = 0; i < LANES_OF(member); i++)                              \
            if ((uint64_t)k >> i & 1)                                                       \
                r.member[i] = a.member[n++];                                                \
        return r;                                                                           \
    }

#define WIDEN(name, vector, lane, member, mask)                     \
    PLAIN union plain512 plain_mm512_##name(vector a)               \
    {                                                               \
        lane lanes[sizeof(a) / sizeof(lane)];                       \
        union plain512 r;                                           \
                                                                    \
        memcpy(lanes, &a, sizeof(a));                               \
        for (unsigned i = 0; i < LANES_OF(member); i++)             \
            r.member[i] = lanes[i];                                 \
        return r;                                                   \
    }                                                               \
    PLAIN union plain512 plain_mm512_maskz_##name(mask k, vector a) \
    {                                                               \
        union plain512 r = plain_mm512_##name(a);                   \
                                                                    \
        WHERE(member, k, r, ((union plain512){.u64 = {0}}))         \
        return r;                                                   \
    }

/* ---- casts and constants ----------------------------------------------------------------- */

SAME(castps_si512)
SAME(castsi512_ps)

PLAIN union plain512 plain_mm512_castsi128_si512(__m128i a)
{
    const union plain512 r = {.si = {_mm256_zextsi128_si256(a), _mm256_setzero_si256()}};

    return r;
}

PLAIN __m256 plain_mm512_castps512_ps256(union plain512 a)
{
    return a.ps[0];
}

PLAIN __m256i plain_mm512_castsi512_si256(union plain512 a)
{
    return a.si[0];
}

PLAIN float plain_mm512_cvtss_f32(union plain512 a)
{
    return a.f32[0];
}

PLAIN union plain512 plain_mm512_setzero_ps(void)
{
    const union plain512 r = {.u64 = {0}};

    return r;
}

PLAIN union plain512 plain_mm512_setzero_si512(void)
{
    const union plain512 r = {.u64 = {0}};

    return r;
}

SET1(ps, f32, float)
SET1(epi8, i8, char)
SET1(epi32, i32, int)

PLAIN union plain512 plain_mm512_setr_epi32(int a0,
                                            int a1,
                                            int a2,
                                            int a3,
                                            int a4,
                                            int a5,
                                            int a6,
                                            int a7,
                                            int a8,
                                            int a9,
                                            int a10,
                                            int a11,
                                            int a12,
                                            int a13,
                                            int a14,
                                            int a15)
{
    const union plain512 r = {
        .i32 = {a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15}};

    return r;
}

/* ---- memory; lanes that are masked out are not touched ----------------------------------- */

LOAD(loadu_ps, storeu_ps)
LOAD(loadu_si512, storeu_si512)

LOAD_SOME(ps, f32, __mmask16)
LOAD_SOME(epi8, i8, __mmask64)
LOAD_SOME(epi16, i16, __mmask32)
LOAD_SOME(epi32, i32, __mmask16)

SHORT_SOME(_mm256, __m256i, epi8, uint8_t, __mmask32)
SHORT_SOME(_mm256, __m256i, epi16, uint16_t, __mmask16)
SHORT_SOME(_mm, __m128i, epi8, uint8_t, __mmask16)

PLAIN union plain512 plain_mm512_broadcast_i32x4(__m128i a)
{
    const union plain512 r = {
        .si = {_mm256_broadcastsi128_si256(a), _mm256_broadcastsi128_si256(a)}};

    return r;
}

/* ---- lane by lane: the AVX2 instruction, twice; each also mask_ and maskz_ --------------- */

MOVE(ps, f32, __mmask16)
MOVE(epi8, i8, __mmask64)
MOVE(epi32, i32, __mmask16)

TWO(add_ps, ps, f32, __mmask16)
TWO(sub_ps, ps, f32, __mmask16)
TWO(mul_ps, ps, f32, __mmask16)
TWO(div_ps, ps, f32, __mmask16)
TWO(min_ps, ps, f32, __mmask16)
TWO(max_ps, ps, f32, __mmask16)
TWO(and_ps, ps, f32, __mmask16)
TWO(add_epi8, si, i8, __mmask64)
TWO(adds_epu8, si, i8, __mmask64)
TWO(min_epu8, si, i8, __mmask64)
TWO(max_epu8, si, i8, __mmask64)
TWO(add_epi32, si, i32, __mmask16)
TWO(add_epi64, si, i64, __mmask8)
TWO(madd_epi16, si, i32, __mmask16)
TWO(unpacklo_ps, ps, f32, __mmask16)
TWO(unpackhi_ps, ps, f32, __mmask16)
TWO(sub_epi32, si, i32, __mmask16)
TWO(shuffle_epi8, si, i8, __mmask64)
TWO(unpacklo_epi32, si, i32, __mmask16)
TWO(unpackhi_epi32, si, i32, __mmask16)
TWO(unpacklo_epi64, si, i64, __mmask8)
TWO(unpackhi_epi64, si, i64, __mmask8)
TWO(srlv_epi32, si, i32, __mmask16)
TWO(mul_epu32, si, i64, __mmask8)

BITS(and_si512, and)
BITS(or_si512, or)
BITS(xor_si512, xor)

THREE(fmadd_ps, ps, f32, __mmask16)
THREE(fnmadd_ps, ps, f32, __mmask16)

SHIFT_BY(sll_epi16)
SHIFT(slli_epi32, sll_epi32, i32, __mmask16)
SHIFT(srli_epi16, srl_epi16, i16, __mmask32)
SHIFT(srli_epi64, srl_epi64, i64, __mmask8)
SHIFT(srai_epi32, sra_epi32, i32, __mmask16)

PLAIN union plain512
plain_mm512_ternarylogic_epi32(union plain512 a, union plain512 b, union plain512 c, int table)
{
    union plain512 r = {.u64 = {0}};

    for (unsigned bit = 0; bit < 512; bit++) {
        const unsigned at = bit / 32, shift = bit % 32;
        const unsigned row = (a.u32[at] >> shift & 1) << 2 | (b.u32[at] >> shift & 1) << 1 |
                             (c.u32[at] >> shift & 1);

        r.u32[at] |= ((unsigned)table >> row & 1) << shift;
    }
    return r;
}

/* ---- comparisons; each also mask_ -------------------------------------------------------- */

COMPARE(cmpge_epu8_mask, u8, __mmask64, a.u8[i] >= b.u8[i])
COMPARE(cmpgt_epu8_mask, u8, __mmask64, a.u8[i] > b.u8[i])
COMPARE(cmpeq_epi8_mask, u8, __mmask64, a.u8[i] == b.u8[i])
COMPARE(cmpeq_epi32_mask, i32, __mmask16, a.i32[i] == b.i32[i])
COMPARE(cmpneq_epi32_mask, i32, __mmask16, a.i32[i] != b.i32[i])
COMPARE(cmple_epu32_mask, u32, __mmask16, a.u32[i] <= b.u32[i])
COMPARE(cmpgt_epu32_mask, u32, __mmask16, a.u32[i] > b.u32[i])
COMPARE(cmpge_epu32_mask, u32, __mmask16, a.u32[i] >= b.u32[i])
COMPARE(test_epi32_mask, i32, __mmask16, (a.i32[i] & b.i32[i]) != 0)

PLAIN int plain_compares(float a, float b, int how)
{
    switch (how) {
    case _CMP_EQ_OQ:
        return a == b;
    case _CMP_LT_OQ:
    case _CMP_LT_OS:
        return a < b;
    case _CMP_LE_OQ:
    case _CMP_LE_OS:
        return a <= b;
    case _CMP_GT_OQ:
    case _CMP_GT_OS:
        return a > b;
    case _CMP_GE_OQ:
    case _CMP_GE_OS:
        return a >= b;
    case _CMP_NEQ_UQ:
        return !(a == b);
    case _CMP_NLT_UQ:
    case _CMP_NLT_US:
        return !(a < b);
    case _CMP_NLE_UQ:
    case _CMP_NLE_US:
        return !(a <= b);
    case _CMP_NGT_UQ:
    case _CMP_NGT_US:
        return !(a > b);
    case _CMP_NGE_UQ:
    case _CMP_NGE_US:
        return !(a >= b);
    case _CMP_ORD_Q:
        return a == a && b == b;
    case _CMP_UNORD_Q:
        return a != a || b != b;
    default:
        __builtin_trap();
    }
}

PLAIN __mmask16 plain_mm512_mask_cmp_ps_mask(__mmask16 k,
                                             union plain512 a,
                                             union plain512 b,
                                             int how)
{
    __mmask16 r = 0;

    for (unsigned i = 0; i < 16; i++)
        if (k >> i & 1)
            r |= (__mmask16)((unsigned)plain_compares(a.f32[i], b.f32[i], how) << i);
    return r;
}

PLAIN __mmask16 plain_mm512_cmp_ps_mask(union plain512 a, union plain512 b, int how)
{
    return plain_mm512_mask_cmp_ps_mask(0xffff, a, b, how);
}

SIGNS(epi8, i8, __mmask64)

/* ---- permutations ------------------------------------------------------------------------ */

PERMUTE(ps, f32, u32, __mmask16)
PERMUTE(epi8, i8, u8, __mmask64)

PLAIN union plain512 plain_mm512_shuffle_ps(union plain512 a, union plain512 b, int how)
{
    union plain512 r;

    for (unsigned i = 0; i < 16; i++)
        r.f32[i] = (i % 4 < 2 ? a : b).f32[i / 4 * 4 + ((unsigned)how >> 2 * (i % 4) & 3)];
    return r;
}

PLAIN union plain512 plain_mm512_shuffle_f32x4(union plain512 a, union plain512 b, int how)
{
    union plain512 r;

    for (unsigned i = 0; i < 16; i++)
        r.u32[i] = (i < 8 ? a : b).u32[((unsigned)how >> 2 * (i / 4) & 3) * 4 + i % 4];
    return r;
}

PLAIN union plain512 plain_mm512_shuffle_i32x4(union plain512 a, union plain512 b, int how)
{
    return plain_mm512_shuffle_f32x4(a, b, how);
}

PLAIN union plain512 plain_mm512_inserti32x4(union plain512 a, __m128i b, int which)
{
    memcpy(a.i32 + 4 * (which & 3), &b, sizeof(b));
    return a;
}

COMPRESS(ps, f32, __mmask16)
COMPRESS(epi8, i8, __mmask64)
COMPRESS(epi32, i32, __mmask16)

PLAIN __m256 plain_mm512_extractf32x8_ps(union plain512 a, int which)
{
    return a.ps[which & 1];
}

PLAIN __m256i plain_mm512_extracti64x4_epi64(union plain512 a, int which)
{
    return a.si[which & 1];
}

/* ---- conversions ------------------------------------------------------------------------- */

PLAIN union plain512 plain_mm512_cvtph_ps(__m256i a)
{
    const union plain512 r = {.ps = {_mm256_cvtph_ps(_mm256_castsi256_si128(a)),
                                     _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))}};

    return r;
}

PLAIN union plain512 plain_mm512_cvtps_epi32(union plain512 a)
{
    const union plain512 r = {.si = {_mm256_cvtps_epi32(a.ps[0]), _mm256_cvtps_epi32(a.ps[1])}};

    return r;
}

PLAIN union plain512 plain_mm512_cvtepi32_ps(union plain512 a)
{
    const union plain512 r = {.ps = {_mm256_cvtepi32_ps(a.si[0]), _mm256_cvtepi32_ps(a.si[1])}};

    return r;
}

PLAIN __m128i plain_mm512_cvtepi32_epi8(union plain512 a)
{
    int8_t lanes[16];
    __m128i r;

    for (unsigned i = 0; i < 16; i++)
        lanes[i] = a.i8[4 * i];
    memcpy(&r, lanes, sizeof(r));
    return r;
}

PLAIN __m256i plain_mm512_cvtepi32_epi16(union plain512 a)
{
    int16_t halves[16];
    __m256i r;

    for (unsigned i = 0; i < 16; i++)
        halves[i] = (int16_t)a.i32[i];
    memcpy(&r, halves, sizeof(r));
    return r;
}

PLAIN union plain512 plain_mm512_maskz_cvttps_epi32(__mmask16 k, union plain512 a)
{
    union plain512 r = {.si = {_mm256_cvttps_epi32(a.ps[0]), _mm256_cvttps_epi32(a.ps[1])}};

    WHERE(i32, k, r, ((union plain512){.u64 = {0}}))
    return r;
}

WIDEN(cvtepu8_epi32, __m128i, uint8_t, i32, __mmask16)
WIDEN(cvtepu16_epi32, __m256i, uint16_t, i32, __mmask16)
WIDEN(cvtepu8_epi16, __m256i, uint8_t, i16, __mmask32)
WIDEN(cvtepi8_epi16, __m256i, int8_t, i16, __mmask32)

/* ---- VNNI -------------------------------------------------------------------------------- */

PLAIN union plain512
plain_mm512_dpbusd_epi32(union plain512 sums, union plain512 a, union plain512 b)
{
    for (unsigned i = 0; i < 64; i++)
        sums.u32[i / 4] += (uint32_t)(a.u8[i] * b.i8[i]);
    return sums;
}

/* ---- across lanes ------------------------------------------------------------------------ */

PLAIN int plain_mm512_reduce_add_epi32(union plain512 a)
{
    uint32_t r = 0;

    for (unsigned i = 0; i < sizeof(a.u32) / sizeof(a.u32[0]); i++)
        r += a.u32[i];
    return (int)r;
}

PLAIN long long plain_mm512_reduce_add_epi64(union plain512 a)
{
    uint64_t r = 0;

    for (unsigned i = 0; i < sizeof(a.u64) / sizeof(a.u64[0]); i++)
        r += a.u64[i];
    return (long long)r;
}

/* ---- the list ---------------------------------------------------------------------------- */

#define __m512  union plain512
#define __m512i union plain512
#define __m512d union plain512

#define _mm512_castps_si512           plain_mm512_castps_si512
#define _mm512_castsi512_ps           plain_mm512_castsi512_ps
#define _mm512_castsi128_si512        plain_mm512_castsi128_si512
#define _mm512_castps512_ps256        plain_mm512_castps512_ps256
#define _mm512_castsi512_si256        plain_mm512_castsi512_si256
#define _mm512_cvtss_f32              plain_mm512_cvtss_f32
#define _mm512_setzero_ps             plain_mm512_setzero_ps
#define _mm512_setzero_si512          plain_mm512_setzero_si512
#define _mm512_set1_ps                plain_mm512_set1_ps
#define _mm512_set1_epi8              plain_mm512_set1_epi8
#define _mm512_set1_epi32             plain_mm512_set1_epi32
#define _mm512_setr_epi32             plain_mm512_setr_epi32
#define _mm512_loadu_ps               plain_mm512_loadu_ps
#define _mm512_storeu_ps              plain_mm512_storeu_ps
#define _mm512_loadu_si512            plain_mm512_loadu_si512
#define _mm512_storeu_si512           plain_mm512_storeu_si512
#define _mm512_mask_loadu_ps          plain_mm512_mask_loadu_ps
#define _mm512_maskz_loadu_ps         plain_mm512_maskz_loadu_ps
#define _mm512_mask_storeu_ps         plain_mm512_mask_storeu_ps
#define _mm512_maskz_loadu_epi8       plain_mm512_maskz_loadu_epi8
#define _mm512_mask_storeu_epi16      plain_mm512_mask_storeu_epi16
#define _mm512_maskz_loadu_epi32      plain_mm512_maskz_loadu_epi32
#define _mm512_mask_storeu_epi32      plain_mm512_mask_storeu_epi32
#define _mm256_maskz_loadu_epi8       plain_mm256_maskz_loadu_epi8
#define _mm256_maskz_loadu_epi16      plain_mm256_maskz_loadu_epi16
#define _mm_maskz_loadu_epi8          plain_mm_maskz_loadu_epi8
#define _mm512_broadcast_i32x4        plain_mm512_broadcast_i32x4
#define _mm512_mask_mov_ps            plain_mm512_mask_mov_ps
#define _mm512_maskz_mov_ps           plain_mm512_maskz_mov_ps
#define _mm512_mask_mov_epi8          plain_mm512_mask_mov_epi8
#define _mm512_maskz_mov_epi32        plain_mm512_maskz_mov_epi32
#define _mm512_add_ps                 plain_mm512_add_ps
#define _mm512_sub_ps                 plain_mm512_sub_ps
#define _mm512_mul_ps                 plain_mm512_mul_ps
#define _mm512_maskz_mul_ps           plain_mm512_maskz_mul_ps
#define _mm512_div_ps                 plain_mm512_div_ps
#define _mm512_min_ps                 plain_mm512_min_ps
#define _mm512_max_ps                 plain_mm512_max_ps
#define _mm512_mask_min_ps            plain_mm512_mask_min_ps
#define _mm512_mask_max_ps            plain_mm512_mask_max_ps
#define _mm512_and_ps                 plain_mm512_and_ps
#define _mm512_add_epi8               plain_mm512_add_epi8
#define _mm512_adds_epu8              plain_mm512_adds_epu8
#define _mm512_min_epu8               plain_mm512_min_epu8
#define _mm512_max_epu8               plain_mm512_max_epu8
#define _mm512_add_epi32              plain_mm512_add_epi32
#define _mm512_add_epi64              plain_mm512_add_epi64
#define _mm512_sub_epi32              plain_mm512_sub_epi32
#define _mm512_shuffle_epi8           plain_mm512_shuffle_epi8
#define _mm512_unpacklo_epi32         plain_mm512_unpacklo_epi32
#define _mm512_unpackhi_epi32         plain_mm512_unpackhi_epi32
#define _mm512_unpacklo_epi64         plain_mm512_unpacklo_epi64
#define _mm512_unpackhi_epi64         plain_mm512_unpackhi_epi64
#define _mm512_srlv_epi32             plain_mm512_srlv_epi32
#define _mm512_mul_epu32              plain_mm512_mul_epu32
#define _mm512_and_si512              plain_mm512_and_si512
#define _mm512_or_si512               plain_mm512_or_si512
#define _mm512_xor_si512              plain_mm512_xor_si512
#define _mm512_fmadd_ps               plain_mm512_fmadd_ps
#define _mm512_fnmadd_ps              plain_mm512_fnmadd_ps
#define _mm512_sll_epi16              plain_mm512_sll_epi16
#define _mm512_slli_epi32             plain_mm512_slli_epi32
#define _mm512_srli_epi16             plain_mm512_srli_epi16
#define _mm512_srli_epi64             plain_mm512_srli_epi64
#define _mm512_srai_epi32             plain_mm512_srai_epi32
#define _mm512_ternarylogic_epi32     plain_mm512_ternarylogic_epi32
#define _mm512_cmpge_epu8_mask        plain_mm512_cmpge_epu8_mask
#define _mm512_mask_cmpge_epu8_mask   plain_mm512_mask_cmpge_epu8_mask
#define _mm512_mask_cmpgt_epu8_mask   plain_mm512_mask_cmpgt_epu8_mask
#define _mm512_mask_cmpeq_epi8_mask   plain_mm512_mask_cmpeq_epi8_mask
#define _mm512_cmpeq_epi32_mask       plain_mm512_cmpeq_epi32_mask
#define _mm512_mask_cmpeq_epi32_mask  plain_mm512_mask_cmpeq_epi32_mask
#define _mm512_mask_cmpneq_epi32_mask plain_mm512_mask_cmpneq_epi32_mask
#define _mm512_mask_cmple_epu32_mask  plain_mm512_mask_cmple_epu32_mask
#define _mm512_mask_cmpgt_epu32_mask  plain_mm512_mask_cmpgt_epu32_mask
#define _mm512_mask_cmpge_epu32_mask  plain_mm512_mask_cmpge_epu32_mask
#define _mm512_test_epi32_mask        plain_mm512_test_epi32_mask
#define _mm512_mask_test_epi32_mask   plain_mm512_mask_test_epi32_mask
#define _mm512_cmp_ps_mask            plain_mm512_cmp_ps_mask
#define _mm512_mask_cmp_ps_mask       plain_mm512_mask_cmp_ps_mask
#define _mm512_movepi8_mask           plain_mm512_movepi8_mask
#define _mm512_permutexvar_ps         plain_mm512_permutexvar_ps
#define _mm512_permutex2var_ps        plain_mm512_permutex2var_ps
#define _mm512_permutexvar_epi8       plain_mm512_permutexvar_epi8
#define _mm512_permutex2var_epi8      plain_mm512_permutex2var_epi8
#define _mm512_shuffle_ps             plain_mm512_shuffle_ps
#define _mm512_shuffle_f32x4          plain_mm512_shuffle_f32x4
#define _mm512_shuffle_i32x4          plain_mm512_shuffle_i32x4
#define _mm512_inserti32x4            plain_mm512_inserti32x4
#define _mm512_maskz_compress_ps      plain_mm512_maskz_compress_ps
#define _mm512_maskz_compress_epi8    plain_mm512_maskz_compress_epi8
#define _mm512_maskz_compress_epi32   plain_mm512_maskz_compress_epi32
#define _mm512_extractf32x8_ps        plain_mm512_extractf32x8_ps
#define _mm512_extracti64x4_epi64     plain_mm512_extracti64x4_epi64
#define _mm512_cvtph_ps               plain_mm512_cvtph_ps
#define _mm512_cvtps_epi32            plain_mm512_cvtps_epi32
#define _mm512_cvtepi32_ps            plain_mm512_cvtepi32_ps
#define _mm512_maskz_cvttps_epi32     plain_mm512_maskz_cvttps_epi32
#define _mm512_cvtepi32_epi8          plain_mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi16         plain_mm512_cvtepi32_epi16
#define _mm512_cvtepi8_epi16          plain_mm512_cvtepi8_epi16
#define _mm512_madd_epi16             plain_mm512_madd_epi16
#define _mm512_unpacklo_ps            plain_mm512_unpacklo_ps
#define _mm512_unpackhi_ps            plain_mm512_unpackhi_ps
#define _mm512_cvtepu8_epi32          plain_mm512_cvtepu8_epi32
#define _mm512_cvtepu16_epi32         plain_mm512_cvtepu16_epi32
#define _mm512_cvtepu8_epi16          plain_mm512_cvtepu8_epi16
#define _mm512_dpbusd_epi32           plain_mm512_dpbusd_epi32
#define _mm512_reduce_add_epi32       plain_mm512_reduce_add_epi32
#define _mm512_reduce_add_epi64       plain_mm512_reduce_add_epi64

#undef PLAIN
#undef LANES_OF
#undef SAME
#undef SET1
#undef LOAD
#undef LOAD_SOME
#undef SHORT_SOME
#undef MOVE
#undef WHERE
#undef MASKED
#undef COMMA
#undef TWO
#undef THREE
#undef BITS
#undef SHIFT
#undef SHIFT_BY
#undef COMPARE
#undef SIGNS
#undef PERMUTE
#undef COMPRESS
#undef WIDEN

#endif
