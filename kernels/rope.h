/* rope.h - rotary position embedding (RoFormer, arXiv:2104.09864, section 3.2.2): pairs of a
 * vector's elements, rotated by an angle that grows with the position.
 *
 * There are three steps: frequencies (one per pair, from the model's parameters), rotations (a
 * cosine and a sine per pair and position), and the rotation of vectors.  Rotated vectors are
 * moved by `delta` positions by rotating them again, with the rotations of position `delta`.
 *
 * Numerical contract, the same bits in every instruction set.  An angle is position * frequency
 * in double; its cosine and sine are the C library's, rounded to fp32.  For a pair (a, b) and
 * its rotation (c, s), in fp32, every operation rounded by itself (no fma):
 *
 *   rotate    a' = a * c - b * s     b' = a * s + b * c
 *   unrotate  a' = a * c + b * s     b' = b * c - a * s
 *
 * Error, with eps = 2^-24 and r the length of the pair: a' and b' are off by at most 3 eps r,
 * and after k rotations in a row by at most 5 k eps r.  Rotating and unrotating a vector
 * therefore changes it by at most 10 eps r.  The angle adds position * frequency * 2^-52, which
 * matters beyond 2^26 positions.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.  Pointers need the alignment
 * of their type only.  Frequencies, rotations and vectors must not overlap.
 */
#ifndef KV_KERNELS_ROPE_H
#define KV_KERNELS_ROPE_H

#include <stddef.h>
#include <stdint.h>

/* Which elements form a pair. */
enum kv_rope_style {
    KV_ROPE_ADJACENT, /* (2i, 2i + 1): GGUF files of architecture `llama` */
    KV_ROPE_HALVES,   /* (i, i + n_rot / 2): NeoX; `qwen2`, and Hugging Face's files */
};

/* How a model scales its frequencies for contexts longer than it was trained for.  All zeros:
 * not at all. */
struct kv_rope_scaling {
    float linear;         /* positions are divided by it; 0 stands for 1 */
    const float *factors; /* (n_rot / 2) divisors of the frequencies, as rope_freqs.weight of a
                           * GGUF file has them; NULL: none */
    /* Llama 3's rule: wavelengths (in positions) above context / low are stretched by `factor`,
     * those below context / high are kept, and between them the factor is interpolated.
     * factor 0: none; otherwise 0 < low < high, and context > 0.  In a file that has `factors`,
     * these already include the rule. */
    float factor, low, high;
    float context; /* the original context length, in tokens */
};

/* Computes base^(-2i / n_rot) / factors[i] / linear and applies Llama 3's rule; `scaling` NULL:
 * no scaling.
 *   ret_frequencies  (n_rot / 2), radians a position */
void kv_rope_frequencies(double base,
                         size_t n_rot,
                         const struct kv_rope_scaling *scaling,
                         double *ret_frequencies);

/* Computes the rotations of n consecutive positions, the first of which may be negative: the
 * rotation of -p is the inverse of that of p.  |position| + n <= 2^53.
 *   frequencies    (n_rot / 2)
 *   ret_rotations  (n, n_rot / 2, 2): cosine, sine */
void kv_rope_rotations(
    const double *frequencies, size_t n_rot, int64_t position, size_t n, float *ret_rotations);

/* As kv_rope_rotations(), for positions (n). */
void kv_rope_rotations_at(const double *frequencies,
                          size_t n_rot,
                          const uint32_t *positions,
                          size_t n,
                          float *ret_rotations);

enum kv_rope_direction {
    KV_ROPE_FORWARD,
    KV_ROPE_INVERSE, /* undoes KV_ROPE_FORWARD */
};

/* Rotates the first n_rot elements, an even number of at most d, of each head of x (n, n_heads,
 * d) in place.
 *   rotations  (n_rot / 2, 2) for each of the n, rotations_stride floats apart; a stride of 0
 *              uses the same rotations for all */
void kv_rope_rotate(enum kv_rope_style style,
                    enum kv_rope_direction direction,
                    const float *rotations,
                    size_t rotations_stride,
                    size_t n_rot,
                    float *x,
                    size_t n,
                    size_t n_heads,
                    size_t d);

/* One implementation of the family.  The last one in the list that this CPU supports is
 * used. */
struct kv_rope_kernels {
    const char *name; /* "scalar", "avx2" */
    int (*supported)(void);
    /* kv_rope_rotate() */
    void (*rotate)(enum kv_rope_style style,
                   enum kv_rope_direction direction,
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
