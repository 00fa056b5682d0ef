/* Lanes are centroids.  Six rows by four vectors of centroids at a time are 24 sums and four
 * registers of centroids, and a loaded element of a row is used for four products.  The nearest
 * of 64 centroids is found without a loop: the least of all lanes, and then the first lane
 * equal to it.
 *
 * Of few bits there are fewer centroids than lanes: the last lanes are then masked out of loads
 * and stores, and their distances are infinite. */
#include "kernels/dispatch.h"
#include "kernels/kmeans.h"
#include "kernels/x86/avx512.h"

#include "kernels/x86/kmeans_common.h"

#if defined(__x86_64__)

enum {
    VECTORS = 4,
};

INLINE float square_of(const float *x, size_t width)
{
    __m512 lanes = _mm512_setzero_ps();
    size_t i = 0;

    for (; i + LANES <= width; i += LANES) {
        const __m512 a = _mm512_loadu_ps(x + i);

        lanes = _mm512_fmadd_ps(a, a, lanes);
    }
    if (i < width) {
        const __m512 a = _mm512_maskz_loadu_ps(first_lanes(width - i), x + i);

        lanes = _mm512_fmadd_ps(a, a, lanes);
    }
    return sum16(lanes);
}

AVX512 static void half_sq_norms(const struct kv_pq_shape *shape,
                                 const struct kv_kmeans_codebook *codebook)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;
    const __mmask16 lanes = first_lanes(n_centroids);
    const __m512 half = _mm512_set1_ps(0.5f);

    for (size_t j = 0; j < shape->m; j++)
        for (size_t c = 0; c < n_centroids; c += LANES) {
            const float *at = codebook->centroids + j * width * n_centroids + c;
            const size_t row = j * n_centroids + c;
            __m512 sum = _mm512_setzero_ps();

            for (size_t i = 0; i < width; i++, at += n_centroids) {
                const __m512 x = _mm512_maskz_loadu_ps(lanes, at);

                sum = _mm512_fmadd_ps(x, x, sum);
            }
            if (codebook->augments != NULL) {
                const __m512 x = _mm512_maskz_loadu_ps(lanes, codebook->augments + row);

                sum = _mm512_fmadd_ps(x, x, sum);
            }
            _mm512_mask_storeu_ps(codebook->half_sq_norms + row, lanes,
                                  _mm512_mul_ps(sum, half));
        }
}

/* Returns the least lane, in every lane. */
INLINE __m512 least_of(__m512 v)
{
    v = _mm512_min_ps(v, _mm512_shuffle_f32x4(v, v, 0x4e));
    v = _mm512_min_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1));
    v = _mm512_min_ps(v, _mm512_shuffle_ps(v, v, 0x4e));
    return _mm512_min_ps(v, _mm512_shuffle_ps(v, v, 0xb1));
}

/* Computes one row's distances to n_vectors vectors of centroids, from number c on. */
INLINE void
take_nearest(const __m512 *distances, unsigned n_vectors, unsigned c, struct nearest *nearest)
{
    __m512 least = _mm512_set1_ps(__builtin_inff());
    uint64_t equal = 0;
    float distance;

    /* MINPS returns its second operand if one is a NaN. */
    for (unsigned v = 0; v < n_vectors; v++)
        least = _mm512_min_ps(distances[v], least);
    least = least_of(least);
    distance = _mm512_cvtss_f32(least);
    if (!(distance < nearest->distance))
        return;
    for (unsigned v = 0; v < n_vectors; v++)
        equal |= (uint64_t)_mm512_cmp_ps_mask(distances[v], least, _CMP_EQ_OQ) << v * LANES;
    nearest->distance = distance;
    nearest->code = c + (unsigned)__builtin_ctzll(equal);
}

INLINE __m512 load(const float *at, bool full, __mmask16 lanes)
{
    return full ? _mm512_loadu_ps(at) : _mm512_maskz_loadu_ps(lanes, at);
}

/* n_rows rows, `stride` floats apart; n_rows, n_vectors and `full` are constants at the
 * calls. */
INLINE void find_rows(const struct space *space,
                      const float *x,
                      size_t stride,
                      const float *augments,
                      unsigned n_rows,
                      unsigned n_vectors,
                      bool full,
                      struct nearest *ret_nearest)
{
    const size_t n_centroids = space->n_centroids, width = space->width;
    const __mmask16 lanes = first_lanes(n_centroids);

    for (unsigned row = 0; row < n_rows; row++)
        ret_nearest[row] = (struct nearest){.distance = __builtin_inff()};
    for (size_t c = 0; c < n_centroids; c += n_vectors * LANES) {
        const float *at = space->centroids + c;
        __m512 distances[ROWS][VECTORS];

        for (unsigned v = 0; v < n_vectors; v++) {
            __m512 half = load(space->half_sq_norms + c + v * LANES, full, lanes);

            if (!full)
                half = _mm512_mask_mov_ps(_mm512_set1_ps(__builtin_inff()), lanes, half);
            for (unsigned row = 0; row < n_rows; row++)
                distances[row][v] = half;
        }
        if (space->augments != NULL)
            for (unsigned v = 0; v < n_vectors; v++) {
                const __m512 augment = load(space->augments + c + v * LANES, full, lanes);

                for (unsigned row = 0; row < n_rows; row++)
                    distances[row][v] = _mm512_fnmadd_ps(_mm512_set1_ps(augments[row]), augment,
                                                         distances[row][v]);
            }
        for (size_t i = 0; i < width; i++, at += n_centroids) {
            __m512 centroid[VECTORS];

            for (unsigned v = 0; v < n_vectors; v++)
                centroid[v] = load(at + v * LANES, full, lanes);
            for (unsigned row = 0; row < n_rows; row++) {
                const __m512 element = _mm512_set1_ps(x[row * stride + i]);

                for (unsigned v = 0; v < n_vectors; v++)
                    distances[row][v] =
                        _mm512_fnmadd_ps(element, centroid[v], distances[row][v]);
            }
        }
        for (unsigned row = 0; row < n_rows; row++)
            take_nearest(distances[row], n_vectors, (unsigned)c, &ret_nearest[row]);
    }
}

INLINE void
add_row(const struct space *space, const float *x, struct nearest nearest, float augment)
{
    const size_t width = space->width;
    float *sum = space->sums + nearest.code * width;
    size_t i = 0;

    if (!(nearest.distance > -__builtin_inff() && nearest.distance < __builtin_inff()))
        return;
    for (; i + LANES <= width; i += LANES)
        _mm512_storeu_ps(sum + i,
                         _mm512_add_ps(_mm512_loadu_ps(sum + i), _mm512_loadu_ps(x + i)));
    if (i < width) {
        const __mmask16 lanes = first_lanes(width - i);

        _mm512_mask_storeu_ps(sum + i, lanes,
                              _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, sum + i),
                                            _mm512_maskz_loadu_ps(lanes, x + i)));
    }
    space->counts[nearest.code]++;
    if (space->augments != NULL)
        space->augment_sums[nearest.code] += augment;
}

AVX512 static void
place(const struct space *space, const float *x, size_t stride, size_t n, uint8_t *ret_codes)
{
    if (space->n_centroids >= 4 * LANES)
        place_many(space, x, stride, n, 4, 4, true, ret_codes);
    else if (space->n_centroids >= 2 * LANES)
        place_many(space, x, stride, n, 2, 2, true, ret_codes);
    else
        place_many(space, x, stride, n, 1, 1, false, ret_codes);
}

const struct kv_kmeans_kernels kv_kmeans_avx512 = {
    .name = "avx512",
    .supported = kv_has_avx512,
    .max_norm_sq = max_norm_sq,
    .half_sq_norms = half_sq_norms,
    .encode = encode,
    .step = place_keys,
};

#endif
