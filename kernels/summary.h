/* summary.h - cluster summaries of rows: how they are built, and their layout.  estimate.h
 * computes estimates from them.
 *
 * A summary group is `rows` consecutive rows of a unit, 1,024 or 3,072, as its shape says; the
 * last one may have fewer.
 * A row is a key followed by its value, both of one element type.  k-means (kmeans.h, 3
 * iterations) assigns each row of the group to one of 16 or 64 summaries.  It runs over the
 * concatenation of key and value, the value scaled so that values spread as far as keys.  A
 * summary is a mean key, a mean value and the number of its rows.
 *
 *   kv_summary_build_begin()                                once for each group
 *   kv_summary_build_next(), kv_summary_build_slice() ...   while kv_summary_build_next()
 *   kv_summary_build_end()                                  writes the group
 *
 * Layout of a group, format KV_SUMMARY_FORMAT, little-endian, S = 2^bits; "up" rounds a number
 * of elements up to a multiple of 16, and the elements added are 0:
 *
 *   at 0                    struct kv_summary_head
 *   KV_SUMMARY_HEAD_BYTES   uint16 (S)         counts: the rows of each summary
 *   + 2 S                   float  (S)         key scales
 *   + 4 S                   float  (S)         value scales
 *   + 4 S                   int8   (S / 16, up d_k / 2, 16, 2) mean keys, divided by their
 *                           scales: of 16 summaries each, two elements of the first, of the
 *                           second, ...; then the next two
 *   + S up d_k              int8   (S / 2, up d_v, 2) mean values, divided by theirs: of two
 *                           summaries each, the first element of both, then the next
 *   + S up d_v              uint8  (rows)      the summary of each row, or
 *                           KV_SUMMARY_NONE; KV_SUMMARY_NONE after the last row
 *
 * Pairs of integers lie side by side because x86 multiplies and adds pairs (estimate.h).
 *
 * A scale is the largest magnitude of the elements / 127, 0 if all are 0.  An empty summary is
 * all zeros.  A row with an element that is a NaN or larger than KV_SUMMARY_MOST is in no
 * summary and is not counted.
 *
 * Numerical contract, the same bits in every instruction set ("in 16 lanes" is the sum of
 * exact_scores.h; fp32 unless stated otherwise):
 *   spread     x = vector[i] - origin[i]; sums[i] += x; squares[i] = fma(x, x, squares[i]),
 *              rows ascending
 *   distance   of a key to its mean: x = key[i] - mean[i], x * x summed in 16 lanes; rows are
 *              summed in double
 *
 * kv_summary_valid() checks a group; the caller calls it once for a group from a file or a
 * peer.  Other functions check nothing.
 *
 * Threads: pure functions.  Memory: the caller's; a build keeps pointers into its scratch.
 * Rows need no alignment, a group that of a float, other arrays that of their type.  Inputs and
 * outputs must not overlap.
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
    KV_SUMMARY_FORMAT = 2,        /* 1 had groups of 1,024 rows only, and did not say so */
    KV_SUMMARY_ROWS_LEAST = 1024, /* of a group: this, */
    KV_SUMMARY_ROWS_MAX = 3072,   /* or this */
    KV_SUMMARY_16 = 4,            /* bits of a summary's number: 16 summaries a group */
    KV_SUMMARY_64 = 6,            /* 64 summaries a group */
    KV_SUMMARIES_MAX = 64,
    KV_SUMMARY_D_MAX = 1024, /* elements of a key, and of a value */
    KV_SUMMARY_NONE = 255,   /* the number of a row that is in no summary */
    KV_SUMMARY_HEAD_BYTES = 16,
    KV_SUMMARY_SLICE = 64, /* rows of a slice at most; divides the rows of a block */
    KV_SUMMARY_ITERATIONS = 3,
};

static_assert(KV_SUMMARIES_MAX == 1 << KV_SUMMARY_64, "the larger of the two sizes");
static_assert(KV_PQ_TILE % KV_SUMMARY_SLICE == 0, "a slice lies in one block");
static_assert(KV_SUMMARIES_MAX <= KV_SUMMARY_NONE, "no summary has the number of none");
static_assert(KV_SUMMARY_ROWS_MAX <= UINT16_MAX, "counts are 16 bits");
static_assert(KV_SUMMARY_ROWS_LEAST % KV_SUMMARY_SLICE == 0 &&
                  KV_SUMMARY_ROWS_MAX % KV_SUMMARY_SLICE == 0,
              "a group is whole slices");

#define KV_SUMMARY_MOST 1e15f /* sums of its squares, 1e30 each, stay finite in fp32 */

struct kv_summary_shape {
    enum kv_key_type type; /* of rows */
    uint32_t d_k, d_v;     /* 1..KV_SUMMARY_D_MAX */
    uint32_t bits;         /* KV_SUMMARY_16, KV_SUMMARY_64 */
    uint32_t rows;         /* of a group: KV_SUMMARY_ROWS_LEAST, KV_SUMMARY_ROWS_MAX */
};

static inline bool kv_summary_rows_valid(uint32_t rows)
{
    return rows == KV_SUMMARY_ROWS_LEAST || rows == KV_SUMMARY_ROWS_MAX;
}

static inline bool kv_summary_shape_valid(const struct kv_summary_shape *shape)
{
    return kv_key_type_valid(shape->type) && shape->d_k >= 1 &&
           shape->d_k <= KV_SUMMARY_D_MAX && shape->d_v >= 1 &&
           shape->d_v <= KV_SUMMARY_D_MAX &&
           (shape->bits == KV_SUMMARY_16 || shape->bits == KV_SUMMARY_64) &&
           kv_summary_rows_valid(shape->rows);
}

/* The first bytes of a group. */
struct kv_summary_head {
    uint16_t format;
    uint16_t n_rows; /* 1..rows */
    uint16_t d_k, d_v;
    uint8_t bits;
    uint8_t zero;
    uint16_t rows;  /* of the shape */
    float variance; /* s2 of estimate.h: mean squared distance of key elements to their mean */
};

static inline size_t kv_summary_count(const struct kv_summary_shape *shape)
{
    return (size_t)1 << shape->bits;
}

static inline size_t kv_summary_up(size_t n)
{
    return (n + 15) / 16 * 16;
}

/* Offsets of a group's arrays in bytes, in the order of the layout, and its size. */
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

/* Returns where the array of keys has element i of the mean key of summary c, and that of values
 * an element of its mean value. */
static inline size_t
kv_summary_key_element(const struct kv_summary_shape *shape, size_t c, size_t i)
{
    return ((c / 16 * (kv_summary_up(shape->d_k) / 2) + i / 2) * 16 + c % 16) * 2 + i % 2;
}

static inline size_t
kv_summary_value_element(const struct kv_summary_shape *shape, size_t c, size_t i)
{
    return (c / 2 * kv_summary_up(shape->d_v) + i) * 2 + c % 2;
}

static inline size_t kv_summary_bytes(const struct kv_summary_shape *shape)
{
    return kv_summary_at_numbers(shape) + shape->rows;
}

/* Returns whether these kv_summary_bytes() bytes are a group of this shape as
 * kv_summary_build_end() writes it: no number in it leads out of an array, counts agree with
 * the rows' numbers, and scales are finite. */
bool kv_summary_valid(const struct kv_summary_shape *shape, const void *group);

/* ---- building ---------------------------------------------------------------------------- */

/* A build in progress; private to summary.c. */
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
    uint8_t *numbers;                /* (rows) */
};

/* Returns the bytes of scratch that kv_summary_build_begin() needs. */
size_t kv_summary_scratch_bytes(const struct kv_summary_shape *shape);

/* Begins the summaries of n_rows rows, 1 to those of the shape.  The same rows and seed give the
 * same group, however the caller divides rows into blocks.  The build keeps `scratch`
 * (kv_summary_scratch_bytes(), with the alignment of a float) until kv_summary_build_end(). */
void kv_summary_build_begin(struct kv_summary_build *build,
                            const struct kv_summary_shape *shape,
                            uint32_t n_rows,
                            uint64_t seed,
                            void *scratch);

/* Returns which rows the next slice needs: *ret_n rows, at most KV_SUMMARY_SLICE, from row
 * *ret_first on, which do not cross a multiple of KV_SUMMARY_SLICE; *ret_n 0 means none.
 * Returns false after the last slice. */
bool kv_summary_build_next(const struct kv_summary_build *build,
                           uint32_t *ret_first,
                           uint32_t *ret_n);

/* Computes one slice: some tens of us at d_k = d_v = 128.  `rows` are those that
 * kv_summary_build_next() returned, `stride` bytes apart. */
void kv_summary_build_slice(struct kv_summary_build *build, const void *rows, size_t stride);

/* Writes the group of kv_summary_bytes() bytes, after the last slice. */
void kv_summary_build_end(struct kv_summary_build *build, void *ret_group);

/* One implementation of the family.  The last one in the list that this CPU supports is
 * used. */
struct kv_summary_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    /* Multiplies elements d_k ... d - 1 of vectors (n, d) by `factor`, and sets all elements of
     * vectors that are in no summary to NaN. */
    void (*prepare)(float *vectors, size_t n, size_t d_k, size_t d, float factor);
    /* Adds x = vector - origin and x * x, for the vectors (n, d) that are not NaN, to sums (d)
     * and squares (d); returns the number of these vectors. */
    size_t (*spread)(const float *vectors,
                     size_t n,
                     size_t d,
                     const float *origin,
                     float *sums,
                     float *squares);
    /* Returns the sum of squared distances of keys (n, d_k) to the means of their numbers,
     * which are `stride` floats apart; keys of KV_SUMMARY_NONE are left out. */
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
