/* rope_common.h - private to kernels/: divides calls into rows by style, for rope_avx2.c and
 * rope_avx512.c.
 *
 * Included after avx2.h or avx512.h, which define TARGET and INLINE.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_X86_ROPE_COMMON_H
#define KV_KERNELS_X86_ROPE_COMMON_H

#if defined(__x86_64__)

/* Defined by each instruction set: rotate the heads of one row.  `sign` multiplies the sines:
 * -1 for the inverse. */
TARGET static void rotate_adjacent(
    const float *rotations, float sign, size_t n_rot, float *x, size_t n_heads, size_t d);

TARGET static void rotate_halves(
    const float *rotations, float sign, size_t n_rot, float *x, size_t n_heads, size_t d);

TARGET static void rotate(enum kv_rope_style style,
                          enum kv_rope_direction direction,
                          const float *rotations,
                          size_t rotations_stride,
                          size_t n_rot,
                          float *x,
                          size_t n,
                          size_t n_heads,
                          size_t d)
{
    const float sign = direction == KV_ROPE_INVERSE ? -1 : 1;

    for (size_t row = 0; row < n; row++, rotations += rotations_stride, x += n_heads * d)
        if (style == KV_ROPE_ADJACENT)
            rotate_adjacent(rotations, sign, n_rot, x, n_heads, d);
        else
            rotate_halves(rotations, sign, n_rot, x, n_heads, d);
}

#endif

#endif
