/* summary.h - summaries of rows: how they are built and laid out.  estimate.h computes
 * estimates from them.
 *
 * KV_SUMMARY_ROWS rows of a unit are a group, the last one of fewer.  A row is a key and then
 * its value, adjacent, both of one type.  One k-means (kmeans.h, 3 iterations) over key and
 * value side by side, the value scaled so that values spread as far as keys, puts each row into
 * one of 16 or 64 summaries, which is a mean key, a mean value, and how many rows.
 *
 *   kv_summary_build_begin()                             for each group, once
 *   kv_summary_build_next(), kv_summary_build_slice() ...   until there is nothing next
 *   kv_summary_build_end() -> the group
 *
 * Layout of a group, format KV_SUMMARY_FORMAT, little-endian, S = 2^bits, an element count `up`
 * to the next multiple of 16 having zeros after the elements:
 *
 *   at 0                    struct kv_summary_head
 *   KV_SUMMARY_HEAD_BYTES      uint16 (S)         counts: how many rows
 *   + 2 S                   float  (S)         key scales
 *   + 4 S                   float  (S)         value scales
 *   + 4 S                   int8   (S, up d_k) mean keys, over their scales
 *   + S up d_k              int8   (S, up d_v) mean values, over theirs
 *   + S up d_v              uint8  (KV_SUMMARY_ROWS) of each row its summary's number, or
 *                           KV_SUMMARY_NONE; KV_SUMMARY_NONE after the last row
 *
 * A scale is the largest magnitude among the elements / 127, 0 where they are all 0.  An empty
 * summary is all zeros.  A row with an element that is a NaN, or beyond KV_SUMMARY_MOST, is in
 * no summary and counts nowhere.
 *
 * Numerical contract, the same in every instruction set, to the bit ("in 16 lanes" is the sum
 * of exact_scores.h; fp32 unless said otherwise):
 *   spread     x = vector[i] - origin[i]; sums[i] += x; squares[i] = fma(x, x, squares[i]),
 *              rows ascending
 *   distance   of one key to its mean: x = key[i] - mean[i], x x in 16 lanes; rows in double
 *
 * Nothing is checked but by kv_summary_valid(): what came from a file or a peer is the caller's
 * to ask it about, once.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept but in a build and its
 * scratch.  Rows need no alignment, a group that of a float, other arrays that of their type.
 * What is read and what is written do not overlap.
 */
#ifndef KV_KERNELS_SUMMARY_H
#define KV_KERNELS_SUMMARY_H

#include "kernels/exact_scores.h"
#include "kernels/kmeans.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KV_SUMMARY_FORMAT = 1,
    KV_SUMMARY_ROWS = 1024, /* of a group */
    KV_SUMMARY_16 = 4,      /* bits of a summary's number */
    KV_SUMMARY_64 = 6,
    KV_SUMMARIES_MAX = 64,
    KV_SUMMARY_D_MAX = 1024, /* elements of a key, and of a value */
    KV_SUMMARY_NONE = 255,   /* the number of a row that is in no summary */
    KV_SUMMARY_HEAD_BYTES = 16,
    KV_SUMMARY_SLICE = 64, /* rows of a slice at most; divides a block's */
    KV_SUMMARY_ITERATIONS = 3,
};

static_assert(KV_SUMMARIES_MAX == 1 << KV_SUMMARY_64, "the most that there are");
static_assert(KV_SUMMARIES_MAX <= KV_SUMMARY_NONE, "no summary has the number of none");
static_assert(KV_SUMMARY_ROWS <= UINT16_MAX, "counts are 16 bits");
static_assert(KV_SUMMARY_ROWS % KV_SUMMARY_SLICE == 0, "a group is whole slices");
static_assert(KV_SUMMARY_ROWS % 64 == 0, "a bit for each row");

#define KV_SUMMARY_MOST 1e15f /* of which squares still are far from the end of fp32 */

struct kv_summary_shape {
    enum kv_key_type type; /* of rows */
    uint32_t d_k, d_v;     /* 1..KV_SUMMARY_D_MAX */
    uint32_t bits;         /* KV_SUMMARY_16, KV_SUMMARY_64 */
};

static inline bool kv_summary_shape_valid(const struct kv_summary_shape *shape)
{
    return kv_key_type_valid(shape->type) && shape->d_k >= 1 &&
           shape->d_k <= KV_SUMMARY_D_MAX && shape->d_v >= 1 &&
           shape->d_v <= KV_SUMMARY_D_MAX &&
           (shape->bits == KV_SUMMARY_16 || shape->bits == KV_SUMMARY_64);
}

struct kv_summary_head {
    uint16_t format;
    uint16_t n_rows; /* 1..KV_SUMMARY_ROWS */
    uint16_t d_k, d_v;
    uint8_t bits;
    uint8_t zero[3];
    float variance; /* s2 */
};

static inline size_t kv_summary_count(const struct kv_summary_shape *shape)
{
    return (size_t)1 << shape->bits;
}

static inline size_t kv_summary_up(size_t n)
{
    return (n + 15) / 16 * 16;
}

/* Where the arrays of a group begin, and where it ends. */
static inline size_t kv_summary_at_counts(const struct kv_summary_shape *shape)
{
    (void)shape;
    return KV_SUMMARY_HEAD_BYTES;
}

static inline size_t kv_summary_at_key_scales(const struct kv_summary_shape *shape)
{
    return kv_summary_at_counts(shape) + 2 * kv_summary_count(shape);
}

static inline size_t kv_summary_at_value_scales(const struct kv_summary_shape *shape)
{
    return kv_summary_at_key_scales(shape) + 4 * kv_summary_count(shape);
}

static inline size_t kv_summary_at_keys(const struct kv_summary_shape *shape)
{
    return kv_summary_at_value_scales(shape) + 4 * kv_summary_count(shape);
}

static inline size_t kv_summary_at_values(const struct kv_summary_shape *shape)
{
    return kv_summary_at_keys(shape) + kv_summary_count(shape) * kv_summary_up(shape->d_k);
}

static inline size_t kv_summary_at_numbers(const struct kv_summary_shape *shape)
{
    return kv_summary_at_values(shape) + kv_summary_count(shape) * kv_summary_up(shape->d_v);
}

static inline size_t kv_summary_bytes(const struct kv_summary_shape *shape)
{
    return kv_summary_at_numbers(shape) + KV_SUMMARY_ROWS;
}

/* Whether these kv_summary_bytes() are a group of this shape, such as kv_summary_build_end()
 * writes: nothing that is read here later leads out of an array or is not finite. */
bool kv_summary_valid(const struct kv_summary_shape *shape, const void *group);

/* ---- building ---------------------------------------------------------------------------- */

/* n rows, `stride` bytes apart -> ret_vectors (n, d_k + d_v), the values times `factor`; rows
 * that are in no summary become NaN. */
void kv_summary_load(const struct kv_summary_shape *shape,
                     const void *rows,
                     size_t stride,
                     size_t n,
                     float factor,
                     float *ret_vectors);

/* The summaries of one group, as they come to be.  Read by nobody else. */
struct kv_summary_build {
    struct kv_summary_shape shape;
    struct kv_pq_shape clusters;
    struct kv_kmeans_codebook book;
    struct kv_kmeans_sums sums;
    uint64_t seed;
    uint32_t n_rows, cursor, n_seeded, n_spread;
    int state, iteration;
    float factor;
    double distance;
    float *vectors;                  /* (KV_SUMMARY_SLICE, d_k + d_v) */
    float *origin, *added, *squares; /* (d_k + d_v) */
    uint8_t *numbers;                /* (KV_SUMMARY_ROWS) */
};

/* Of kv_summary_build_begin(). */
size_t kv_summary_scratch_bytes(const struct kv_summary_shape *shape);

/* The summaries of n_rows >= 1 rows.  The same rows and seed make the same ones, however they
 * were cut by the caller's blocks.  `scratch` (kv_summary_scratch_bytes()), as aligned as a
 * float, is the build's until its end. */
void kv_summary_build_begin(struct kv_summary_build *build,
                            const struct kv_summary_shape *shape,
                            uint32_t n_rows,
                            uint64_t seed,
                            void *scratch);

/* The rows that the next slice is about: ret_n of them, at most KV_SUMMARY_SLICE, from row
 * ret_first on, all of them between two multiples of KV_SUMMARY_SLICE; 0: it needs none.
 * False: there is no next slice. */
bool kv_summary_build_next(const struct kv_summary_build *build,
                           uint32_t *ret_first,
                           uint32_t *ret_n);

/* Some tens of us of work at d_k = d_v = 128.  rows: those that kv_summary_build_next() said,
 * `stride` bytes apart. */
void kv_summary_build_slice(struct kv_summary_build *build, const void *rows, size_t stride);

/* Behind the last slice: writes the group, kv_summary_bytes() of it. */
void kv_summary_build_end(struct kv_summary_build *build, void *ret_group);

/* One implementation of the family.  Slowest first: the last one that this CPU supports is
 * used. */
struct kv_summary_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    /* Vectors (n, d), d_k of them a key's: NaN where they are in no summary, elements from d_k
     * on times `factor`. */
    void (*prepare)(float *vectors, size_t n, size_t d_k, size_t d, float factor);
    /* Adds vectors (n, d) that are not NaN to sums (d) and squares (d), about `origin`; returns
     * how many. */
    size_t (*spread)(const float *vectors,
                     size_t n,
                     size_t d,
                     const float *origin,
                     float *sums,
                     float *squares);
    /* The sum of squared distances of keys (n, d_k) to the means, `stride` apart, of their
     * numbers; those of KV_SUMMARY_NONE are left out. */
    double (*distance)(const float *keys,
                       size_t n,
                       size_t d_k,
                       const float *means,
                       size_t stride,
                       const uint8_t *numbers);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_summary_kernels *kv_summary_kernels_at(unsigned i);

#endif
