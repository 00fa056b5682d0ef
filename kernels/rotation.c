#include "kernels/rotation.h"

#include "kernels/pq.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum {
    SWEEPS_MAX = 8, /* of all planes; the axes hardly move after six */
    VECTORS_AT_ONCE = 8,
};

/* A plane is left alone if its two axes vary together by less than this share of their own. */
static const double TOLERANCE = 1e-7;

/* Followed by sums (d), the covariance (d, d), and the axes (d, d), one in a row. */
struct work {
    uint64_t n;
    uint32_t sweep, p, q; /* the next plane; 0, 0: none yet */
    bool is_centered, has_rotated;
};

static double *sums_of(void *work)
{
    return (double *)(void *)((char *)work + sizeof(struct work));
}

static double *covariance_of(uint32_t d, void *work)
{
    return sums_of(work) + d;
}

static double *axes_of(uint32_t d, void *work)
{
    return covariance_of(d, work) + (size_t)d * d;
}

static uint32_t log2_of(uint32_t width)
{
    return 31 - (uint32_t)__builtin_clz(width);
}

static uint32_t width_of(uint32_t d)
{
    assert(d >= 1 && d <= KV_ROTATION_DIM_MAX);
    return d <= 2 ? 2 : (uint32_t)1 << (32 - __builtin_clz(d - 1));
}

size_t kv_rotation_size(uint32_t d)
{
    return (size_t)d * width_of(d);
}

size_t kv_rotation_work_bytes(uint32_t d)
{
    return sizeof(struct work) + (d + 2 * (size_t)d * d) * sizeof(double);
}

void kv_rotation_add(uint32_t d, void *work, const float *keys, size_t n)
{
    double *sums = sums_of(work), *products = covariance_of(d, work);

    ((struct work *)work)->n += n;
    for (; n > 0; n--, keys += d) {
        for (uint32_t i = 0; i < d; i++) {
            const double x = keys[i];

            sums[i] += x;
            for (uint32_t j = i; j < d; j++)
                products[(size_t)i * d + j] += x * keys[j];
        }
    }
}

/* Sums of products become the covariance, both halves of it, and the axes those of the keys. */
static void center(uint32_t d, struct work *work)
{
    const double *sums = sums_of(work);
    double *products = covariance_of(d, work), *axes = axes_of(d, work);

    for (uint32_t i = 0; i < d; i++) {
        for (uint32_t j = i; j < d; j++) {
            products[(size_t)i * d + j] -= sums[i] * (sums[j] / (double)work->n);
            products[(size_t)j * d + i] = products[(size_t)i * d + j];
        }
        axes[(size_t)i * d + i] = 1;
    }
    work->is_centered = true;
    work->q = 1;
}

static void
rotate_rows(double *one, double *other, size_t stride, uint32_t d, double c, double s)
{
    for (uint32_t i = 0; i < d; i++, one += stride, other += stride) {
        const double x = *one, y = *other;

        *one = c * x - s * y;
        *other = s * x + c * y;
    }
}

/* Makes axes p and q vary independently.  Returns whether it rotated them. */
static bool rotate_plane(uint32_t d, struct work *work, uint32_t p, uint32_t q)
{
    double *a = covariance_of(d, work), *axes = axes_of(d, work);
    const double pp = a[(size_t)p * d + p], qq = a[(size_t)q * d + q];
    const double pq = a[(size_t)p * d + q];

    /* False for what is not a number. */
    if (!(pq * pq > TOLERANCE * TOLERANCE * fabs(pp * qq)) || pq == 0)
        return false;
    const double theta = (qq - pp) / (2 * pq);
    const double t = (theta >= 0 ? 1 : -1) / (fabs(theta) + sqrt(theta * theta + 1));
    const double c = 1 / sqrt(t * t + 1), s = t * c;

    rotate_rows(a + p, a + q, d, d, c, s);
    rotate_rows(a + (size_t)p * d, a + (size_t)q * d, 1, d, c, s);
    rotate_rows(axes + (size_t)p * d, axes + (size_t)q * d, 1, d, c, s);
    return true;
}

bool kv_rotation_diagonalize(uint32_t d, void *bytes, uint32_t most)
{
    struct work *work = bytes;

    if (!work->is_centered)
        center(d, work);
    for (; most > 0 && work->sweep < SWEEPS_MAX && d > 1; most--) {
        work->has_rotated = rotate_plane(d, work, work->p, work->q) || work->has_rotated;
        if (++work->q < d)
            continue;
        work->p++;
        work->q = work->p + 1;
        if (work->q < d)
            continue;
        work->sweep = work->has_rotated ? work->sweep + 1 : (uint32_t)SWEEPS_MAX;
        work->has_rotated = false;
        work->p = 0;
        work->q = 1;
    }
    return d == 1 || work->sweep == SWEEPS_MAX;
}

static bool is_finite(const double *values, size_t n)
{
    double sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += values[i] * 0;
    return sum == 0;
}

/* Numbers of the axes, those with the most variance first; of equal ones, the lower number. */
static void
order_axes(uint32_t d, const double *covariance, uint16_t order[KV_ROTATION_DIM_MAX])
{
    for (uint32_t i = 0; i < d; i++) {
        uint32_t at = i;

        for (; at > 0 && covariance[(size_t)order[at - 1] * d + order[at - 1]] <
                             covariance[(size_t)i * d + i];
             at--)
            order[at] = order[at - 1];
        order[at] = (uint16_t)i;
    }
}

void kv_rotation_deal(uint32_t d, uint32_t m, const void *bytes, float *ret_matrix)
{
    /* Nothing is written to it: the casts are for covariance_of() and axes_of(). */
    const double *covariance = covariance_of(d, (void *)(uintptr_t)bytes);
    const double *axes = axes_of(d, (void *)(uintptr_t)bytes);
    const uint32_t width = width_of(d);
    uint16_t order[KV_ROTATION_DIM_MAX];

    assert(m >= 1 && d % m == 0);
    memset(ret_matrix, 0, kv_rotation_size(d) * sizeof(*ret_matrix));
    if (!is_finite(covariance, 2 * (size_t)d * d)) {
        for (uint32_t i = 0; i < d; i++)
            ret_matrix[(size_t)i * width + i] = 1;
        return;
    }
    order_axes(d, covariance, order);
    for (uint32_t n = 0; n < d; n++) {
        const uint32_t round = n / m, at = n % m;
        const uint32_t subspace = round % 2 == 0 ? at : m - 1 - at;
        const uint32_t r = subspace * (d / m) + round;

        for (uint32_t i = 0; i < d; i++)
            ret_matrix[(size_t)i * width + r] = (float)axes[(size_t)order[n] * d + i];
    }
}

void kv_rotate(uint32_t d, const float *matrix, const float *vectors, size_t n, float *ret)
{
    const uint32_t width = width_of(d);
    const struct kv_pq_shape shape = {.d = d, .m = 1, .bits = log2_of(width)};
    float wide[VECTORS_AT_ONCE * KV_ROTATION_DIM_MAX];

    if (width == d) {
        kv_pq_tables(&shape, matrix, vectors, n, ret);
        return;
    }
    for (size_t at_once; n > 0; n -= at_once, vectors += at_once * d) {
        at_once = n < VECTORS_AT_ONCE ? n : VECTORS_AT_ONCE;
        kv_pq_tables(&shape, matrix, vectors, at_once, wide);
        for (size_t i = 0; i < at_once; i++, ret += d)
            memcpy(ret, wide + i * width, d * sizeof(*ret));
    }
}
