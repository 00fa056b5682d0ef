/* key_copies.h - 4-bit copies of keys, and rough scores of candidates from them.
 *
 * Which of a query's candidates deserve an exact score, or attention, can be told from copies
 * that are a quarter of an fp16 key.  Keys of one unit have a large part in common: a copy is of
 * the difference to a mean key, which the caller gives and which all keys that were copied with
 * it share.  On recorded keys of a model, the mean raises the share of the exact top-k that the
 * copies' top-k has from 0.80 to 0.88.
 *
 * A copy of a key x of d elements, 1..KV_KEY_COPY_D_MAX, is a scale and d codes of 4 bits:
 *   y[i]   x[i] - mean[i]; a NaN counts as 0
 *   scale  max |y[i]| / 15, at most 65504, rounded to fp16 (the nearest, ties to even)
 *   u[i]   fma(y[i], 0.5 / scale, 7.5), at least 0 and at most 15, rounded to the nearest, ties
 *          to even; 8 if the scale is 0
 * all in fp32.  It stands for mean[i] + (2 u[i] - 15) * scale.  An infinite difference makes the
 * scale 65504 and has the last code of its sign.
 *
 * The copies of a block, KV_PQ_TILE rows, are one piece of memory without pointers: for each
 * KV_KEY_COPIES_GROUP rows
 *   (KV_KEY_COPIES_GROUP, h) bytes of codes, h being d / 2 rounded up to a multiple of 16; byte i
 *       has the code of element i in its lower half and of element h + i in its upper half, and 8
 *       for elements that do not exist
 *   (KV_KEY_COPIES_GROUP) scales, fp16
 * If it is aligned to cache lines, the codes of 128 elements are one line, and so are the scales
 * of a group.  Scales stand near their codes because that is faster: with those of all rows
 * together, 8 KiB behind the first codes, reading one row in 16 took 1.5 times as long (Zen 4).
 *
 * A query q is rounded to 8 bits (kv_key_copies_round()):
 *   scale  max |q[i]| / 127 in fp32; a NaN counts as 0 and an infinity as FLT_MAX
 *   q8[i]  q[i] / scale, at least -127 and at most 127, rounded to the nearest, ties to even; 0
 *          if the scale is 0
 *   dot    the inner product of q, as given, and the mean, in 16 lanes (exact_scores.h); a NaN
 *          or an infinity in q makes it one of the two, and so the scores
 *
 * Score of a copy:
 *     fma(2 * sum(u[i] * q8[i]) - 15 * sum(q8[i]), scale of the copy * scale of q, dot)
 * with the scales' product rounded to fp32.  The first argument is a whole number below 2^23 and
 * exact, so that every instruction set gives the same bits, whatever its order; the payload of a
 * NaN is not specified.
 *
 * Error.  Let s and t be the scales of the copy and of q, no difference be larger than
 * 15 * 65504, and nothing be near the subnormal numbers of fp32.  Then
 *     |score - q.x| <= (1.001 s + 2^-21) * sum |q[i]| + 7.51 * d * s * t
 *                      + (d / 16 + 8) * 2^-24 * sum |q[i] * mean[i]|
 * The first term is the copy's error (2^-21 is for scales that are subnormal in fp16), the
 * second the query's, and the third that of dot.
 *
 * Threads: pure functions.  Memory: the caller's; nothing is kept.  Copies may have any
 * alignment; rounded queries need that of a float.  Inputs and outputs must not overlap.
 */
#ifndef KV_KERNELS_KEY_COPIES_H
#define KV_KERNELS_KEY_COPIES_H

#include "kernels/pq.h"

#include <stddef.h>
#include <stdint.h>

enum {
    KV_KEY_COPY_D_MAX = 1024,
    KV_KEY_COPIES_QUERIES_MAX = 32,
    KV_KEY_COPIES_GROUP = 32,
    KV_KEY_COPIES_FORMAT = 1, /* names the layout where copies are stored */
};

/* Returns the bytes of the codes of one copy, h above. */
static inline size_t kv_key_copy_bytes(size_t d)
{
    return ((d + 1) / 2 + 15) / 16 * 16;
}

/* Returns the bytes of the copies of a block. */
static inline size_t kv_key_copies_bytes(size_t d)
{
    return KV_PQ_TILE * (kv_key_copy_bytes(d) + sizeof(uint16_t));
}

/* Copies keys to rows [begin, begin + n) of a block, leaving its other rows as they are.
 *   mean    (d)
 *   keys    (n, d)
 *   copies  kv_key_copies_bytes(d) */
void kv_key_copies_put(
    size_t d, const float *mean, const float *keys, size_t begin, size_t n, void *copies);

/* Returns the bytes of rounded queries. */
static inline size_t kv_key_copies_query_bytes(size_t d, size_t n_queries)
{
    return n_queries * (2 * kv_key_copy_bytes(d) + 3 * sizeof(float));
}

/* Rounds queries for copies with this mean.
 *   mean         (d)
 *   queries      (n_queries, d), n_queries 1..KV_KEY_COPIES_QUERIES_MAX
 *   ret_rounded  kv_key_copies_query_bytes(d, n_queries) */
void kv_key_copies_round(
    size_t d, const float *mean, const float *queries, size_t n_queries, void *ret_rounded);

/* Makes the same rounded queries ready for copies with another mean: only `dot` changes. */
void kv_key_copies_dots(
    size_t d, const float *mean, const float *queries, size_t n_queries, void *rounded);

/* Computes the scores of copies in any blocks, which are prefetched.
 *   blocks      (n) the copies of the block that each one is in
 *   rows        (n) their rows in the block, below KV_PQ_TILE
 *   rounded     by kv_key_copies_round(), of so many queries
 *   ret_scores  (n_queries, n), scores_stride elements apart */
void kv_key_copies_score_list(size_t d,
                              const void *const *blocks,
                              const uint8_t *rows,
                              size_t n,
                              const void *rounded,
                              size_t n_queries,
                              float *ret_scores,
                              size_t scores_stride);

/* One implementation of the family; functions as above, but that `round` leaves the dots to
 * kv_key_copies_dots().  The last one in the list that this CPU supports is used. */
struct kv_key_copies_kernels {
    const char *name; /* "scalar", "avx2", "avx512" */
    int (*supported)(void);
    void (*put)(
        size_t d, const float *mean, const float *keys, size_t begin, size_t n, void *copies);
    void (*round)(size_t d, const float *queries, size_t n_queries, void *ret_rounded);
    void (*score_list)(size_t d,
                       const void *const *blocks,
                       const uint8_t *rows,
                       size_t n,
                       const void *rounded,
                       size_t n_queries,
                       float *ret_scores,
                       size_t scores_stride);
};

/* The i-th implementation that this CPU supports, slowest first; NULL after the last. */
const struct kv_key_copies_kernels *kv_key_copies_kernels_at(unsigned i);

#endif
