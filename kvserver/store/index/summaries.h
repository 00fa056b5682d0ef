/* summaries.h - the summaries of a chapter's rows (kernels/summary.h), and how they come to be,
 * in slices.
 *
 *     kvs_summarise_begin();  while (kvs_summarise_slice(...)) other work;  kvs_summarise_end();
 *
 * KV_SUMMARY_ROWS rows are a group, counted from the chapter's first one; the last is of fewer.
 *
 * Threads: the data thread.  Memory: from the arena.
 */
#ifndef KV_KVSERVER_STORE_INDEX_SUMMARIES_H
#define KV_KVSERVER_STORE_INDEX_SUMMARIES_H

#include "kernels/checksum.h"
#include "kernels/summary.h"
#include "kvserver/store/rows/arena.h"
#include "proto/kv_status.h"

#include <stdbool.h>

/* One group's. */
struct kvs_summary_group {
    uint8_t *bytes; /* kv_summary_bytes() */
    uint32_t crc;   /* of them, from when they were made */
};

/* Of one chapter; all zeros: none. */
struct kvs_summaries {
    struct kv_summary_shape shape;
    uint64_t seed;                    /* of the plan by which they were made (codebook.h) */
    uint32_t n_rows;                  /* that they stand for, from the chapter's first one on */
    struct kvs_summary_group *groups; /* ((n_rows + KV_SUMMARY_ROWS - 1) / KV_SUMMARY_ROWS) */
    int list_class, group_class;
};

/* Compares a group with the checksum that was made of it. */
static inline bool kvs_summaries_are_good(const struct kvs_summaries *summaries, uint32_t group)
{
    const struct kvs_summary_group *one = &summaries->groups[group];

    return kv_crc32c(0, one->bytes, kv_summary_bytes(&summaries->shape)) == one->crc;
}

static inline uint32_t kvs_summaries_n_groups(const struct kvs_summaries *summaries)
{
    return (summaries->n_rows + KV_SUMMARY_ROWS - 1) / KV_SUMMARY_ROWS;
}

/* Of all groups, without what the arena rounds up. */
static inline uint64_t kvs_summaries_bytes(const struct kvs_summaries *summaries)
{
    return summaries->n_rows == 0 ? 0
                                  : kvs_summaries_n_groups(summaries) *
                                        (uint64_t)kv_summary_bytes(&summaries->shape);
}

/* How many summaries a group has: what a query asks for; 0: there are none. */
static inline uint32_t kvs_summaries_each(const struct kvs_summaries *summaries)
{
    return summaries->n_rows == 0 ? 0 : (uint32_t)kv_summary_count(&summaries->shape);
}

/* The bits of a question for so many summaries each: 16 or 64; 0: there is no such thing. */
static inline uint32_t kvs_summaries_bits(uint32_t each)
{
    return each == 16 ? KV_SUMMARY_16 : each == 64 ? KV_SUMMARY_64 : 0;
}

/* Gives the memory back; none are left. */
void kvs_summaries_clear(struct kvs_summaries *summaries, struct kvs_arena *arena);

/* Some that are being made. */
struct kvs_summariser {
    struct kvs_arena *arena;
    struct kvs_summaries made; /* n_rows and all groups' room from the begin on */
    uint64_t seed;
    uint32_t group; /* at work */
    bool begun;     /* ... on it */
    struct kv_summary_build build;
    void *scratch;
    int scratch_class;
};

/* Of n_rows >= 1 rows.  KV_NO_MEMORY: nothing is left behind. */
kv_status_t kvs_summarise_begin(struct kvs_summariser *summariser,
                                struct kvs_arena *arena,
                                const struct kv_summary_shape *shape,
                                uint32_t n_rows,
                                uint64_t seed);

/* The rows that the next slice is about, at most KV_SUMMARY_SLICE, between two multiples of it;
 * *ret_n 0: it needs none. */
void kvs_summarise_next(const struct kvs_summariser *summariser,
                        uint32_t *ret_first,
                        uint32_t *ret_n);

/* Some tens of us of work.  rows: those that kvs_summarise_next() said, `stride` bytes apart.
 * False: that was the last one. */
bool kvs_summarise_slice(struct kvs_summariser *summariser, const void *rows, size_t stride);

/* Behind the last slice: they are the caller's. */
struct kvs_summaries kvs_summarise_end(struct kvs_summariser *summariser);

/* Instead: everything goes. */
void kvs_summarise_drop(struct kvs_summariser *summariser);

#endif
