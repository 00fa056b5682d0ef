/* builder.h - codebooks, codes and summaries, made in the background: one job per chapter of a
 * unit.
 *
 *   kvs_index_schedule() -> job QUEUED -> TRAIN ... -> ENCODE ... -> CELLS ... -> SUMMARIES ... ->
 *                                   gone; one slice of at most some 100 us per
 *                                   kvs_indexer_step()
 *
 * Summaries of a chapter that has codes, but none of that size or only of fewer rows than the
 * unit has of it, are a job of the last state alone; they take the place of those there are.  Where
 * there is no memory for summaries there are none, which a query's answer does not depend on.
 *
 * A job works on segments, not on the unit that asked: it has them pinned, so forks, truncates
 * and closes go on meanwhile, and whoever refers to the segments has the codes.  A job is
 * dropped when nobody has so many of its first segments any more that they are worth a
 * codebook.
 *
 * Rows are verified in each slice that reads them (verify.h).  A job that meets a bad one
 * fails: nothing is made of such rows.
 *
 * Threads: the data thread.  Memory: jobs from a pool, what a job needs from the arena while it
 * is at work.
 */
#ifndef KV_KVSERVER_STORE_INDEX_BUILDER_H
#define KV_KVSERVER_STORE_INDEX_BUILDER_H

#include "kvserver/base/clock.h"
#include "kvserver/store/index/codebook.h"
#include "kvserver/store/rows/unit.h"

enum {
    KVS_INDEX_SAMPLE_MAX = 16384, /* rows that k-means looks at */
    KVS_INDEX_JOBS_MAX = 16384,   /* queued on one data thread */
};

struct kvs_indexer;

/* NULL: out of memory. */
struct kvs_indexer *kvs_indexer_create(struct kvs_codebooks *books,
                                       const struct kv_clock *clock);
/* Drops all jobs. */
void kvs_indexer_destroy(struct kvs_indexer *indexer); /* NULL is allowed */

/* Queues a job for every chapter of the unit's first `tokens` rows that has no codes and none
 * coming, or no such summaries and no job.  KV_BUSY: too many jobs; KV_NO_MEMORY.  What was
 * queued before stays. */
kv_status_t kvs_index_schedule(struct kvs_indexer *indexer,
                               const struct kvs_unit *unit,
                               uint32_t tokens,
                               const struct kvs_index_plan *plan);

/* Queues a job for cells and summaries that the chapter which begins at the block has lost, if
 * the unit has all of their rows, or as many as any unit still has, and no job is at them.
 * KV_BUSY, KV_NO_MEMORY: later, then. */
kv_status_t
kvs_index_repair(struct kvs_indexer *indexer, const struct kvs_unit *unit, uint32_t block);

/* Whether rows [block, tokens) of a unit are enough for a codebook by the plan. */
bool kvs_index_is_enough(const struct kvs_index_plan *plan, uint32_t block, uint32_t tokens);

/* Queues a job that replaces the broken codebook of the unit's segments from the block on, to the
 * row `tokens`, which are enough for it.  They keep their codes, which no query uses, until the
 * job has made better ones: one that fails leaves everything for the next try.  No other job is
 * at these segments.  KV_BUSY, KV_NO_MEMORY: nothing has changed. */
kv_status_t kvs_index_replace(struct kvs_indexer *indexer,
                              const struct kvs_unit *unit,
                              uint32_t block,
                              uint32_t tokens,
                              const struct kvs_index_plan *plan);

/* What the unit's first `tokens` rows have. */
struct kvs_index_look {
    uint32_t n_coded;      /* rows */
    uint32_t n_pending;    /* chapters that jobs are at */
    uint32_t n_old, n_new; /* codebooks up to and behind the given serial */
    uint32_t iterations;   /* of the new ones, summed */
    uint64_t train_us;
};
void kvs_index_look(const struct kvs_codebooks *books,
                    const struct kvs_unit *unit,
                    uint32_t tokens,
                    uint64_t serial,
                    struct kvs_index_look *ret_look);

/* One slice of the oldest job, and a look at some others: are they wanted?  Returns false if
 * there is none. */
bool kvs_indexer_step(struct kvs_indexer *indexer);

/* True once after a job has ended, however. */
bool kvs_indexer_take_ended(struct kvs_indexer *indexer);

struct kvs_indexer_stats {
    uint64_t trained; /* codebooks */
    uint64_t dropped, failed;
    uint64_t rows_coded, rows_summarised;
    uint64_t summaries_failed; /* chapters left without them: no memory */
    uint64_t worked_us;
    uint32_t n_jobs; /* queued and at work */
};
void kvs_indexer_stats(const struct kvs_indexer *indexer, struct kvs_indexer_stats *ret_stats);

#endif
