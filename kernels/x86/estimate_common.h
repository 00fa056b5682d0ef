/* estimate_common.h - private to kernels/: blocks of queries, in estimate_avx2.c and
 * estimate_avx512.c.
 *
 *   scores     of mean keys: lanes are summaries.  Two elements of each lie side by side, so a
 *              sum grows by two products at once, and needs no reduction
 *   rows       lanes are rows, then queries: the exps of a row, one for each query, are added to
 *              its summary's place.  Each place has four sums, of which rows take turns: rows
 *              that are next to each other are often of one summary, and an addition to memory
 *              takes longer than a row's other work
 *   weights    lanes are summaries
 *   values     lanes are elements, of two summaries side by side
 *
 * The largest score so far rarely changes after a few groups.  So exps are computed with the old
 * one, and again where a score is larger.
 *
 * The next group is prefetched while this one is computed, a few cache lines with each step, so
 * as not to fill the core's miss queue.
 *
 * Included after avx2.h or avx512.h, which define TARGET and INLINE.
 *
 * Threads: pure functions.  Memory: the caller's; what is prefetched is not read.
 */
#ifndef KV_KERNELS_X86_ESTIMATE_COMMON_H
#define KV_KERNELS_X86_ESTIMATE_COMMON_H

#include "kernels/estimate.h"
#include "kernels/exp.h"
#include "kernels/summary_common.h"

#if defined(__x86_64__)

#include <math.h>
#include <string.h>

enum {
    QUERIES = 4,         /* at once */
    SUMS = 4,            /* of a place */
    PAIRS_AHEAD = 8,     /* pairs of elements of keys with which lines are prefetched, */
    ELEMENTS_AHEAD = 16, /* elements of values, */
    ROWS_AHEAD = 16,     /* and rows */
};

struct estimate_ahead {
    const uint8_t *at;
    size_t n, n_each; /* cache lines left; cache lines of a step */
};

/* Up to four queries of an input; their number n is a constant at the calls. */
struct part {
    const struct kv_summary_shape *shape;
    const struct kv_estimate_input *input;
    size_t first; /* query */
    struct estimate_ahead ahead;
    float *maxes, *sums, *outputs;              /* of these queries: (n), (n, 16), (n, d_v) */
    bool is_exceeded;                           /* a maximum is less than a score */
    float s[QUERIES][KV_SUMMARIES_MAX];         /* scores of mean keys */
    float weights[QUERIES][KV_SUMMARIES_MAX];   /* of rows, then of rows and mean keys */
    int16_t rounded[QUERIES][KV_SUMMARIES_MAX]; /* weighted scales of mean values, and */
    float steps[QUERIES];                       /* their unit */
    float places[KV_SUMMARY_NONE + 1][SUMS][QUERIES]; /* sums of rows' exps */
};

/* Returns the cursor for the queries from `first` on: the first block prefetches all of the
 * next group, later blocks nothing. */
static inline struct estimate_ahead estimate_ahead_begin(const struct kv_summary_shape *shape,
                                                         const struct kv_estimate_input *input,
                                                         size_t first,
                                                         size_t n_steps)
{
    struct estimate_ahead ahead = {.at = input->next};

    if (first == 0 && input->next != NULL) {
        ahead.n = kv_summary_bytes(shape) / LINE_BYTES + 1;
        ahead.n_each = ahead.n / n_steps + 1;
    }
    return ahead;
}

__attribute__((always_inline)) static inline void
estimate_ahead_step(struct estimate_ahead *ahead)
{
    size_t n = ahead->n < ahead->n_each ? ahead->n : ahead->n_each;

    ahead->n -= n;
    for (; n > 0; n--, ahead->at += LINE_BYTES)
        __builtin_prefetch(ahead->at);
}

/* Two integers that lie side by side, as one. */
static inline int32_t estimate_pair(const int16_t *at)
{
    int32_t pair;

    memcpy(&pair, at, sizeof(pair));
    return pair;
}

/* Defined by each instruction set; n is the part's number of queries. */

/* Computes s; sets is_exceeded if a score exceeds its maximum. */
INLINE void score(struct part *part, const void *group, unsigned n);
/* Sets places of summaries, and that of rows that do not count, to 0. */
INLINE void clear_places(struct part *part);
/* Adds exps of rows to places; sets is_exceeded if a score exceeds its maximum. */
INLINE void add_rows(struct part *part, unsigned n);
/* Returns the largest of a query's scores of mean keys and of rows, at least `most`. */
INLINE float largest(const struct part *part, unsigned query, float most);
/* Adds weights of mean keys to weights, these to sums, and rounds them for values. */
INLINE void weigh(struct part *part, const void *group, unsigned n);
/* Adds weighted mean values to outputs. */
INLINE void add_values(struct part *part, const int8_t *values, unsigned n);

/* Multiplies a query's sums and output. */
INLINE void shrink(struct part *part, unsigned query, float by)
{
    float *sums = part->sums + query * KV_ESTIMATE_LANES;
    float *output = part->outputs + query * part->shape->d_v;

    for (size_t i = 0; i < KV_ESTIMATE_LANES; i++)
        sums[i] *= by;
    for (size_t i = 0; i < part->shape->d_v; i++)
        output[i] *= by;
}

/* Sets weights to the sums of places. */
INLINE void sum_places(struct part *part, unsigned n)
{
    for (size_t c = 0; c < kv_summary_count(part->shape); c += QUERIES) {
        __m128 of[QUERIES];

        for (unsigned i = 0; i < QUERIES; i++) {
            const __m256 two = _mm256_add_ps(_mm256_loadu_ps(part->places[c + i][0]),
                                             _mm256_loadu_ps(part->places[c + i][2]));

            of[i] = _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
        }
        _MM_TRANSPOSE4_PS(of[0], of[1], of[2], of[3]);
        for (unsigned query = 0; query < n; query++)
            _mm_storeu_ps(part->weights[query] + c, of[query]);
    }
}

INLINE void raise(struct part *part, unsigned n)
{
    for (unsigned query = 0; query < n; query++) {
        const float max = part->maxes[query], most = largest(part, query, max) + 0.0f;

        if (most > max) {
            part->maxes[query] = most;
            shrink(part, query, kv_exp(max - most));
        }
    }
}

INLINE void add_part(const struct kv_summary_shape *shape,
                     const void *group,
                     const struct kv_estimate_input *input,
                     size_t first,
                     unsigned n,
                     float *state)
{
    const size_t n_queries = input->queries.n;
    struct part part;

    part.shape = shape;
    part.input = input;
    part.first = first;
    part.ahead = estimate_ahead_begin(
        shape, input, first,
        kv_summary_count(shape) / 16 * kv_summary_up(shape->d_k) / 2 / PAIRS_AHEAD +
            input->n_scored / ROWS_AHEAD + n + kv_summary_up(shape->d_v) / ELEMENTS_AHEAD);
    part.maxes = state + first;
    part.sums = state + n_queries + first * KV_ESTIMATE_LANES;
    part.outputs = state + n_queries * (1 + KV_ESTIMATE_LANES) + first * shape->d_v;
    part.is_exceeded = false;
    score(&part, group, n);
    if (input->n_scored > 0) {
        clear_places(&part);
        add_rows(&part, n);
    }
    if (part.is_exceeded) {
        raise(&part, n);
        if (input->n_scored > 0) {
            clear_places(&part);
            add_rows(&part, n);
        }
    }
    if (input->n_scored > 0)
        sum_places(&part, n);
    else
        for (unsigned query = 0; query < n; query++)
            memset(part.weights[query], 0, kv_summary_count(shape) * sizeof(float));
    weigh(&part, group, n);
    add_values(&part, kv_summary_at(group, kv_summary_at_values(shape)), n);
}

TARGET static void add(const struct kv_summary_shape *shape,
                       const void *group,
                       const struct kv_estimate_input *input,
                       float *state)
{
    size_t query = 0;

    for (; query + QUERIES <= input->queries.n; query += QUERIES)
        add_part(shape, group, input, query, QUERIES, state);
    switch (input->queries.n - query) {
    case 3:
        add_part(shape, group, input, query, 3, state);
        break;
    case 2:
        add_part(shape, group, input, query, 2, state);
        break;
    case 1:
        add_part(shape, group, input, query, 1, state);
        break;
    default:
        break;
    }
}

#endif

#endif
