/* Lanes are centroids.  Six rows by two vectors of centroids at a time are twelve sums, enough
 * to hide the latency of fma, and a load is used for six products or two.
 *
 * Of one or two bits there are fewer centroids than lanes: the last lanes are then masked out
 * of loads and stores, and their distances are infinite. */
#include "kernels/dispatch.h"
#include "kernels/kmeans.h"
#include "kernels/x86/avx2.h"

#include "kernels/x86/kmeans_common.h"

#if defined(__x86_64__)

enum {
    VECTORS = 2,
    ALONE_VECTORS = 8, /* of centroids at a time, for one row */
    VECTORS_MAX = ALONE_VECTORS,
};

INLINE __m256 load(const float *at, bool full, __m256i lanes)
{
    return full ? _mm256_loadu_ps(at) : _mm256_maskload_ps(at, lanes);
}

/* Loads the first n elements, with 0 after them. */
INLINE __m256 load_first(const float *at, size_t n)
{
    return _mm256_maskload_ps(at, first_lanes(n));
}

INLINE float square_of(const float *x, size_t width)
{
    __m256 low = _mm256_setzero_ps(), high = low;
    size_t i = 0;

    for (; i + STEP <= width; i += STEP) {
        const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + LANES);

        low = _mm256_fmadd_ps(a, a, low);
        high = _mm256_fmadd_ps(b, b, high);
    }
    if (i < width) {
        const __m256 a = load_first(x + i, width - i);

        low = _mm256_fmadd_ps(a, a, low);
        i += LANES;
    }
    if (i < width) {
        const __m256 b = load_first(x + i, width - i);

        high = _mm256_fmadd_ps(b, b, high);
    }
    return sum16(low, high);
}

AVX2 static void half_sq_norms(const struct kv_pq_shape *shape,
                               const struct kv_kmeans_codebook *codebook)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;
    const bool full = n_centroids >= LANES;
    const __m256i lanes = first_lanes(n_centroids);
    const __m256 half = _mm256_set1_ps(0.5f);

    for (size_t j = 0; j < shape->m; j++)
        for (size_t c = 0; c < n_centroids; c += LANES) {
            const float *at = codebook->centroids + j * width * n_centroids + c;
            const size_t row = j * n_centroids + c;
            __m256 sum = _mm256_setzero_ps();

            for (size_t i = 0; i < width; i++, at += n_centroids) {
                const __m256 x = load(at, full, lanes);

                sum = _mm256_fmadd_ps(x, x, sum);
            }
            if (codebook->augments != NULL) {
                const __m256 x = load(codebook->augments + row, full, lanes);

                sum = _mm256_fmadd_ps(x, x, sum);
            }
            if (full)
                _mm256_storeu_ps(codebook->half_sq_norms + row, _mm256_mul_ps(sum, half));
            else
                _mm256_maskstore_ps(codebook->half_sq_norms + row, lanes,
                                    _mm256_mul_ps(sum, half));
        }
}

/* Returns the code with the least distance, the lower one of equals; 0 if all are infinite. */
INLINE struct nearest nearest_lane(__m256 distances, __m256i codes)
{
    __m256 least = _mm256_min_ps(distances, _mm256_permute2f128_ps(distances, distances, 1));
    __m256i others;
    __m128i packed;

    least = _mm256_min_ps(least, _mm256_permute_ps(least, 0x4e));
    least = _mm256_min_ps(least, _mm256_permute_ps(least, 0xb1));
    /* 0xffff where it is not the least */
    others = _mm256_castps_si256(_mm256_cmp_ps(distances, least, _CMP_NEQ_UQ));
    codes = _mm256_or_si256(codes, others);
    packed = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
    return (struct nearest){
        .code = (uint8_t)_mm_cvtsi128_si32(_mm_minpos_epu16(packed)),
        .distance = _mm_cvtss_f32(_mm256_castps256_ps128(least)),
    };
}

/* n_rows rows, `stride` floats apart; n_rows and n_vectors are constants at the
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
    const __m256 infinite = _mm256_set1_ps(__builtin_inff());
    const size_t n_centroids = space->n_centroids, width = space->width;
    const __m256i lanes = first_lanes(n_centroids);
    __m256 least[ROWS];
    __m256i nearest[ROWS];
    __m256i codes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);

    for (unsigned row = 0; row < n_rows; row++) {
        least[row] = infinite;
        nearest[row] = _mm256_setzero_si256();
    }
    for (size_t c = 0; c < n_centroids; c += n_vectors * LANES) {
        const float *at = space->centroids + c;
        __m256 distances[ROWS][VECTORS_MAX];

        for (unsigned v = 0; v < n_vectors; v++) {
            __m256 half = load(space->half_sq_norms + c + v * LANES, full, lanes);

            if (!full)
                half = _mm256_blendv_ps(infinite, half, _mm256_castsi256_ps(lanes));
            for (unsigned row = 0; row < n_rows; row++)
                distances[row][v] = half;
        }
        if (space->augments != NULL)
            for (unsigned v = 0; v < n_vectors; v++) {
                const __m256 augment = load(space->augments + c + v * LANES, full, lanes);

                for (unsigned row = 0; row < n_rows; row++)
                    distances[row][v] = _mm256_fnmadd_ps(_mm256_broadcast_ss(augments + row),
                                                         augment, distances[row][v]);
            }
        for (size_t i = 0; i < width; i++, at += n_centroids) {
            __m256 centroid[VECTORS_MAX];

            for (unsigned v = 0; v < n_vectors; v++)
                centroid[v] = load(at + v * LANES, full, lanes);
            for (unsigned row = 0; row < n_rows; row++) {
                const __m256 element = _mm256_broadcast_ss(x + row * stride + i);

                for (unsigned v = 0; v < n_vectors; v++)
                    distances[row][v] =
                        _mm256_fnmadd_ps(element, centroid[v], distances[row][v]);
            }
        }
        for (unsigned v = 0; v < n_vectors; v++) {
            for (unsigned row = 0; row < n_rows; row++) {
                const __m256 less = _mm256_cmp_ps(distances[row][v], least[row], _CMP_LT_OQ);

                least[row] = _mm256_blendv_ps(least[row], distances[row][v], less);
                nearest[row] =
                    _mm256_blendv_epi8(nearest[row], codes, _mm256_castps_si256(less));
            }
            codes = _mm256_add_epi32(codes, _mm256_set1_epi32(LANES));
        }
    }
    for (unsigned row = 0; row < n_rows; row++)
        ret_nearest[row] = nearest_lane(least[row], nearest[row]);
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
        _mm256_storeu_ps(sum + i,
                         _mm256_add_ps(_mm256_loadu_ps(sum + i), _mm256_loadu_ps(x + i)));
    for (; i < width; i++)
        sum[i] += x[i];
    space->counts[nearest.code]++;
    if (space->augments != NULL)
        space->augment_sums[nearest.code] += augment;
}

AVX2 static void
place(const struct space *space, const float *x, size_t stride, size_t n, uint8_t *ret_codes)
{
    if (space->n_centroids >= ALONE_VECTORS * LANES)
        place_many(space, x, stride, n, VECTORS, ALONE_VECTORS, true, ret_codes);
    else if (space->n_centroids >= 2 * LANES)
        place_many(space, x, stride, n, 2, 2, true, ret_codes);
    else
        place_many(space, x, stride, n, 1, 1, false, ret_codes);
}

const struct kv_kmeans_kernels kv_kmeans_avx2 = {
    .name = "avx2",
    .supported = kv_has_avx2,
    .max_norm_sq = max_norm_sq,
    .half_sq_norms = half_sq_norms,
    .encode = encode,
    .step = place_keys,
};

#endif
