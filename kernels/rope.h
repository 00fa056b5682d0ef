/* rope.h - rotary position embedding (RoFormer, arXiv:2104.09864, section 3.2.2): pairs of a
 * vector's elements, rotated by an angle that grows with the position.
 *
 * Frequencies (one a pair) make turns (a cosine and a sine a pair, for one position), and turns
 * turn vectors.  A shift by `delta` positions is a turn by the turns of position `delta`, on
 * top of the one that is there; the inverse is a turn back.
 *
 * Numerical contract, the same in every instruction set, to the bit: angles are position *
 * frequency in double, their cosine and sine the C library's, rounded to fp32; of a pair (a, b)
 * and its turn (c, s), in fp32, every operation rounded by itself:
 *
 *   turn       a' = a * c - b * s     b' = a * s + b * c
 *   turn back  a' = a * c + b * s     b' = b * c - a * s
 *
 * Error: with eps = 2^-24 and r the length of the pair, a' and b' are off by at most 3 eps r,
 * and after k turns one upon another by at most 5 k eps r; so a turn and a turn back by 10 eps
 * r.  The angle adds position * frequency * 2^-52 each, which counts beyond 2^26 positions.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.  Pointers need the alignment
 * of their type only.  Frequencies, turns and vectors do not overlap.
 */
#ifndef KV_KERNELS_ROPE_H
#define KV_KERNELS_ROPE_H

#include <stddef.h>
#include <stdint.h>

/* Which elements turn together: (2i, 2i + 1), as GGUF files of `llama` have them, or (i, i +
 * n_rot / 2), as those of `qwen2` and Hugging Face's have (NeoX). */
enum kv_rope_style {
    KV_ROPE_ADJACENT,
    KV_ROPE_HALVES,
};

/* How a model stretches its positions.  All zeros: not at all. */
struct kv_rope_scaling {
    float linear;         /* positions are divided by it; 0 is 1 */
    const float *factors; /* (n_rot / 2) divisors of the frequencies, as rope_freqs.weight of a
                           * GGUF file has them; NULL: none */
    /* Llama 3's, computed: waves longer than context / low are stretched by `factor`, those
     * shorter than context / high are not, and between them it goes over.  factor 0: none;
     * otherwise 0 < low < high, and context > 0.  A file that has `factors` has this in them.
     */
    float factor, low, high;
    float context; /* tokens that the model was trained for before */
};

/* base^(-2i / n_rot) / factors[i] / linear, then Llama 3's; `scaling` NULL: none.
 *   ret_frequencies  (n_rot / 2), radians a position */
void kv_rope_frequencies(double base,
                         size_t n_rot,
                         const struct kv_rope_scaling *scaling,
                         double *ret_frequencies);

/* Turns of the positions from `position` on, which may be negative: of the position -p they are
 * those of p the other way round.  |position| + n <= 2^53.
 *   frequencies  (n_rot / 2)
 *   ret_rotations    (n, n_rot / 2, 2): cosine, sine */
void kv_rope_rotations(
    const double *frequencies, size_t n_rot, int64_t position, size_t n, float *ret_rotations);

/* As kv_rope_rotations(), of positions (n). */
void kv_rope_rotations_at(const double *frequencies,
                          size_t n_rot,
                          const uint32_t *positions,
                          size_t n,
                          float *ret_rotations);

/* Turns the first n_rot elements, an even number, of each head of x (n, n_heads, d), d >=
 * n_rot, in place.
 *   turns  (n_rot / 2, 2) for each of the n, rotations_stride floats apart; 0: the same for
 *   all */
void kv_rope_rotate(enum kv_rope_style style,
                    const float *rotations,
                    size_t rotations_stride,
                    size_t n_rot,
                    float *x,
                    size_t n,
                    size_t n_heads,
                    size_t d);

/* Turns back: the inverse of kv_rope_rotate(). */
void kv_rope_unrotate(enum kv_rope_style style,
                      const float *rotations,
                      size_t rotations_stride,
                      size_t n_rot,
                      float *x,
                      size_t n,
                      size_t n_heads,
                      size_t d);

/* One implementation of the family.  Slowest first: the last one that this CPU supports is
 * used. */
struct kv_rope_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    /* kv_rope_rotate(), or where `back` is not 0 kv_rope_unrotate() */
    void (*rotate)(enum kv_rope_style style,
                   int back,
                   const float *rotations,
                   size_t rotations_stride,
                   size_t n_rot,
                   float *x,
                   size_t n,
                   size_t n_heads,
                   size_t d);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_rope_kernels *kv_rope_kernels_at(unsigned i);

#endif
