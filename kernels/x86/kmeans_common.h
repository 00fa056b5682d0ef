/* kmeans_common.h - private to kernels/: rows, subspaces and the sums of a step, for
 * kmeans_avx2.c and kmeans_avx512.c.
 *
 * Included after avx2.h or avx512.h, which define TARGET and INLINE.
 *
 * Threads: pure functions.  Memory: the caller's.
 */
#ifndef KV_KERNELS_X86_KMEANS_COMMON_H
#define KV_KERNELS_X86_KMEANS_COMMON_H

#if defined(__x86_64__)

#include <stdbool.h>

enum {
    ROWS = 6,  /* at once: six rows by two vectors of centroids are twelve sums */
    TILE = 96, /* rows that stay in L1 or L2 while all subspaces are processed */
};

/* One subspace. */
struct space {
    const float *centroids, *half_sq_norms;
    const float *augments; /* NULL: none */
    float max_norm_sq;
    size_t n_centroids, width;
    /* The sums that rows are added to; NULL: none. */
    float *sums, *augment_sums;
    uint32_t *counts;
};

struct nearest {
    unsigned code;
    float distance;
};

/* Defined by each instruction set.
 *
 * The sum of squares, in 16 lanes. */
INLINE float square_of(const float *x, size_t width);

/* The nearest centroids of n_rows rows, `stride` floats apart; n_rows, n_vectors and `full` are
 * constants at the calls. */
INLINE void find_rows(const struct space *space,
                      const float *x,
                      size_t stride,
                      const float *augments,
                      unsigned n_rows,
                      unsigned n_vectors,
                      bool full,
                      struct nearest *ret_nearest);

/* Adds a row to its centroid's sum, unless its distance is not finite. */
INLINE void
add_row(const struct space *space, const float *x, struct nearest nearest, float augment);

/* All rows of a subspace: place_many() with as many vectors as suit its centroids. */
TARGET static void
place(const struct space *space, const float *x, size_t stride, size_t n, uint8_t *ret_codes);

INLINE float augment_of(const float *x, size_t width, float max_norm_sq)
{
    const float left = max_norm_sq - square_of(x, width);

    return left > 0 ? _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(left))) : 0;
}

TARGET static void max_norm_sq(const struct kv_pq_shape *shape,
                               const float *keys,
                               size_t n,
                               float *ret_max_norm_sq)
{
    const size_t width = shape->d / shape->m;

    for (size_t row = 0; row < n; row++)
        for (size_t j = 0; j < shape->m; j++) {
            const float square = square_of(keys + row * shape->d + j * width, width);

            if (square > ret_max_norm_sq[j] && square < __builtin_inff())
                ret_max_norm_sq[j] = square;
        }
}

/* As find_rows(); the first `n_done` rows have been added before. */
INLINE void place_rows(const struct space *space,
                       const float *x,
                       size_t stride,
                       unsigned n_rows,
                       unsigned n_vectors,
                       bool full,
                       unsigned n_done,
                       uint8_t *ret_codes)
{
    struct nearest nearest[ROWS];
    float augments[ROWS] = {0};

    if (space->augments != NULL)
        for (unsigned row = 0; row < n_rows; row++)
            augments[row] = augment_of(x + row * stride, space->width, space->max_norm_sq);
    find_rows(space, x, stride, augments, n_rows, n_vectors, full, nearest);
    for (unsigned row = n_done; row < n_rows; row++) {
        ret_codes[row] = (uint8_t)nearest[row].code;
        if (space->sums != NULL)
            add_row(space, x + row * stride, nearest[row], augments[row]);
    }
}

/* Processes ROWS rows at a time.  The last block is moved back to overlap the one before it,
 * and rows that were added before (n_done) are not added again. */
INLINE void place_many(const struct space *space,
                       const float *x,
                       size_t stride,
                       size_t n,
                       unsigned n_vectors,
                       unsigned n_vectors_alone,
                       bool full,
                       uint8_t *ret_codes)
{
    size_t row = 0;

    if (n < ROWS) {
        for (; row < n; row++)
            place_rows(space, x + row * stride, stride, 1, n_vectors_alone, full, 0,
                       ret_codes + row);
        return;
    }
    for (; row < n; row += ROWS) {
        const unsigned n_done = n - row < ROWS ? ROWS - (unsigned)(n - row) : 0;

        row -= n_done;
        place_rows(space, x + row * stride, stride, ROWS, n_vectors, full, n_done,
                   ret_codes + row);
    }
}

TARGET static void place_keys(const struct kv_pq_shape *shape,
                              const struct kv_kmeans_codebook *codebook,
                              const float *keys,
                              size_t n,
                              uint8_t *ret_codes,
                              size_t codes_stride,
                              const struct kv_kmeans_sums *sums)
{
    const size_t n_centroids = kv_pq_n_centroids(shape), width = shape->d / shape->m;

    for (size_t row = 0, n_rows; row < n; row += n_rows) {
        n_rows = n - row < 2 * TILE ? n - row : TILE;
        for (size_t j = 0; j < shape->m; j++) {
            struct space space = {
                .centroids = codebook->centroids + j * width * n_centroids,
                .half_sq_norms = codebook->half_sq_norms + j * n_centroids,
                .n_centroids = n_centroids,
                .width = width,
            };

            if (codebook->augments != NULL) {
                space.augments = codebook->augments + j * n_centroids;
                space.max_norm_sq = codebook->max_norm_sq[j];
            }
            if (sums != NULL) {
                space.sums = sums->sums + j * width * n_centroids;
                space.counts = sums->counts + j * n_centroids;
                space.augment_sums =
                    sums->augments == NULL ? NULL : sums->augments + j * n_centroids;
            }
            place(&space, keys + row * shape->d + j * width, shape->d, n_rows,
                  ret_codes + j * codes_stride + row);
        }
    }
}

TARGET static void encode(const struct kv_pq_shape *shape,
                          const struct kv_kmeans_codebook *codebook,
                          const float *keys,
                          size_t n,
                          uint8_t *ret_codes,
                          size_t codes_stride)
{
    place_keys(shape, codebook, keys, n, ret_codes, codes_stride, NULL);
}

#endif

#endif
