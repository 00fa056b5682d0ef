#include "kernels/rope.h"
#include "kernels/dispatch.h"

#include <assert.h>
#include <math.h>

static const double two_pi = 6.283185307179586;

static const struct kv_rope_kernels *best;

static int always(void)
{
    return 1;
}

/* Llama 3's rule for one frequency, as transformers and the GGUF converter of llama.cpp
 * compute it. */
static double stretch(double frequency, const struct kv_rope_scaling *scaling)
{
    const double rotations = (double)scaling->context * frequency / two_pi; /* in the context */
    const double low = (double)scaling->low, high = (double)scaling->high;
    double kept;

    if (rotations > high)
        return frequency;
    kept = rotations < low ? 0 : (rotations - low) / (high - low);
    return (1 - kept) * frequency / (double)scaling->factor + kept * frequency;
}

void kv_rope_frequencies(double base,
                         size_t n_rot,
                         const struct kv_rope_scaling *scaling,
                         double *ret_frequencies)
{
    static const struct kv_rope_scaling none = {0};

    assert(n_rot % 2 == 0 && base > 0);
    if (scaling == NULL)
        scaling = &none;
    for (size_t i = 0; i < n_rot / 2; i++) {
        double frequency = pow(base, -2.0 * (double)i / (double)n_rot);

        if (scaling->factors != NULL)
            frequency /= (double)scaling->factors[i];
        if (scaling->linear != 0)
            frequency /= (double)scaling->linear;
        if (scaling->factor != 0)
            frequency = stretch(frequency, scaling);
        ret_frequencies[i] = frequency;
    }
}

static void
make_rotations(const double *frequencies, size_t n_rot, double position, float *ret_rotations)
{
    for (size_t i = 0; i < n_rot / 2; i++) {
        const double angle = position * frequencies[i];

        ret_rotations[2 * i] = (float)cos(angle);
        ret_rotations[2 * i + 1] = (float)sin(angle);
    }
}

void kv_rope_rotations(
    const double *frequencies, size_t n_rot, int64_t position, size_t n, float *ret_rotations)
{
    for (size_t i = 0; i < n; i++)
        make_rotations(frequencies, n_rot, (double)(position + (int64_t)i),
                       ret_rotations + i * (n_rot / 2 * 2));
}

void kv_rope_rotations_at(const double *frequencies,
                          size_t n_rot,
                          const uint32_t *positions,
                          size_t n,
                          float *ret_rotations)
{
    for (size_t i = 0; i < n; i++)
        make_rotations(frequencies, n_rot, (double)positions[i],
                       ret_rotations + i * (n_rot / 2 * 2));
}

static void scalar_rotate(enum kv_rope_style style,
                          enum kv_rope_direction direction,
                          const float *rotations,
                          size_t rotations_stride,
                          size_t n_rot,
                          float *x,
                          size_t n,
                          size_t n_heads,
                          size_t d)
{
    const size_t half = n_rot / 2;
    const size_t step = style == KV_ROPE_ADJACENT ? 2 : 1;
    const size_t other = style == KV_ROPE_ADJACENT ? 1 : half;

    for (size_t row = 0; row < n; row++, rotations += rotations_stride)
        for (size_t head = 0; head < n_heads; head++, x += d)
            for (size_t i = 0; i < half; i++) {
                const float c = rotations[2 * i], s = direction == KV_ROPE_INVERSE
                                                          ? -rotations[2 * i + 1]
                                                          : rotations[2 * i + 1];
                const float a = x[i * step], b = x[i * step + other];

                x[i * step] = a * c - b * s;
                x[i * step + other] = a * s + b * c;
            }
}

static const struct kv_rope_kernels scalar = {
    .name = "scalar",
    .supported = always,
    .rotate = scalar_rotate,
};

/* Slowest first; the last one that this CPU supports is used. */
static const struct kv_rope_kernels *const tiers[] = {
    &scalar,
#if defined(__x86_64__)
    &kv_rope_avx2,
#endif
};

__attribute__((constructor)) static void choose(void)
{
    for (unsigned i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++)
        if (tiers[i]->supported())
            best = tiers[i];
}

const struct kv_rope_kernels *kv_rope_kernels_at(unsigned i)
{
    for (unsigned tier = 0; tier < sizeof(tiers) / sizeof(tiers[0]); tier++)
        if (tiers[tier]->supported() && i-- == 0)
            return tiers[tier];
    return NULL;
}

void kv_rope_rotate(enum kv_rope_style style,
                    enum kv_rope_direction direction,
                    const float *rotations,
                    size_t rotations_stride,
                    size_t n_rot,
                    float *x,
                    size_t n,
                    size_t n_heads,
                    size_t d)
{
    assert(n_rot % 2 == 0 && n_rot <= d);
    best->rotate(style, direction, rotations, rotations_stride, n_rot, x, n, n_heads, d);
}
