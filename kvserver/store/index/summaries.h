/* summaries.h - the summaries of a chapter's rows (kernels/summary.h), and how they are made,
 * in pieces.
 *
 *     kvs_summarise_begin();  while (kvs_summarise_piece(...)) other work;
 *     kvs_summarise_end();
 *
 * 1,024 or 3,072 rows (`rows` of the shape), counted from the chapter's first row, form a group;
 * the last group may have fewer.
 *
 * Invariants, which kvs_summaries_check() asserts:
 *   (1) There is a list of groups if they stand for rows, and none if for none.
 *   (2) The list and the bytes of each group are elements of the arena in use.
 *
 * Threads: the data thread.  Memory: from the arena.
 */
#ifndef KV_KVSERVER_STORE_INDEX_SUMMARIES_H
#define KV_KVSERVER_STORE_INDEX_SUMMARIES_H

#include "kernels/summary.h"
#include "kvserver/store/rows/column.h"
#include "proto/kv_status.h"
#include "proto/kv_types.h"

#include <stdbool.h>

/* The summaries of one chapter; all zeros: none. */
struct kvs_summaries {
    struct kv_summary_shape shape;
    uint64_t seed;             /* of the plan by which they were made (codebook.h) */
    uint32_t n_rows;           /* that they cover, from the chapter's first row */
    struct kvs_column *groups; /* (kvs_summaries_n_groups()), each of kv_summary_bytes() */
    int list_class;
};

static inline uint32_t kvs_summaries_n_groups(const struct kvs_summaries *summaries)
{
    const uint32_t rows = summaries->shape.rows;

    return summaries->n_rows == 0 ? 0 : (summaries->n_rows + rows - 1) / rows;
}

/* Returns the size of all groups, without the arena's rounding. */
static inline uint64_t kvs_summaries_bytes(const struct kvs_summaries *summaries)
{
    return summaries->n_rows == 0 ? 0
                                  : kvs_summaries_n_groups(summaries) *
                                        (uint64_t)kv_summary_bytes(&summaries->shape);
}

/* Returns the number of summaries per group: what a query requests; 0: none. */
static inline uint32_t kvs_summaries_each(const struct kvs_summaries *summaries)
{
    return summaries->n_rows == 0 ? 0 : (uint32_t)kv_summary_count(&summaries->shape);
}

/* Returns the bits for that number of summaries per group: 16 or 64; 0: unknown. */
static inline uint32_t kvs_summaries_bits(uint32_t each)
{
    return each == 16 ? KV_SUMMARY_16 : each == 64 ? KV_SUMMARY_64 : 0;
}

/* Returns the rows of a group for the blocks that a request says share one; 0, as peers sent
 * before there was a choice, stands for 1,024 rows.  Returns 0 if groups of so many blocks are
 * not made. */
static inline uint32_t kvs_summaries_rows(uint32_t blocks)
{
    const uint32_t rows = blocks == 0 ? KV_SUMMARY_ROWS_LEAST : blocks * KV_BLOCK_TOKENS;

    return kv_summary_rows_valid(rows) ? rows : 0;
}

/* Returns whether there are summaries, so many each and of groups of so many rows. */
static inline bool
kvs_summaries_are(const struct kvs_summaries *summaries, uint32_t bits, uint32_t rows)
{
    return summaries->n_rows > 0 && summaries->shape.bits == bits &&
           summaries->shape.rows == rows;
}

void kvs_summaries_check(const struct kvs_summaries *summaries, const struct kvs_arena *arena);

/* Allocates summaries of n_rows >= 1 rows; their bytes are undefined.  After KV_NO_MEMORY nothing is
 * allocated. */
kv_status_t kvs_summaries_create(struct kvs_arena *arena,
                                 const struct kv_summary_shape *shape,
                                 uint32_t n_rows,
                                 struct kvs_summaries *ret_summaries);

/* Frees the summaries; none are left. */
void kvs_summaries_clear(struct kvs_summaries *summaries, struct kvs_arena *arena);

/* Summaries that are being made. */
struct kvs_summariser {
    struct kvs_arena *arena;
    struct kvs_summaries made; /* has n_rows, and memory for all groups, from the start */
    uint64_t seed;
    uint32_t group; /* the current one */
    bool begun;     /* it has been started */
    struct kv_summary_build build;
    void *scratch;
    int scratch_class;
};

/* Starts summaries of n_rows >= 1 rows.  After KV_NO_MEMORY nothing is allocated. */
kv_status_t kvs_summarise_begin(struct kvs_summariser *summariser,
                                struct kvs_arena *arena,
                                const struct kv_summary_shape *shape,
                                uint32_t n_rows,
                                uint64_t seed);

/* Returns the rows that the next piece needs: at most KV_SUMMARY_SLICE, between two multiples
 * of it; *ret_n is 0 if it needs none. */
void kvs_summarise_next(const struct kvs_summariser *summariser,
                        uint32_t *ret_first,
                        uint32_t *ret_n);

/* Does a piece of work of some 10 us.  `rows` are those of kvs_summarise_next(), `stride` bytes
 * apart.  Returns false after the last piece. */
bool kvs_summarise_piece(struct kvs_summariser *summariser, const void *rows, size_t stride);

/* Returns the summaries after the last piece; the caller owns them. */
struct kvs_summaries kvs_summarise_end(struct kvs_summariser *summariser);

/* Frees everything instead. */
void kvs_summarise_drop(struct kvs_summariser *summariser);

#endif
