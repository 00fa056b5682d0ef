/* builder.h - index jobs: build codebooks, codes, cells and summaries in the background, one
 * job per chapter of a unit.  Sessions that have jobs take turns (job_queue.h).  What is learnt
 * of keys, what codes and lists of rows by code are, is the scorer's (scorer.h).
 *
 *   kvs_index_schedule() -> QUEUED -> RECALL -> [MEAN ... ->] [COVARIANCE ... -> DIAGONALIZE ... ->]
 *                                -> TRAIN ... -> ENCODE ... -> LISTS ... -> SUMMARIES ...
 *                                -> KEEP ... -> freed; one slice per kvs_indexer_step()
 *
 * What an earlier job has learnt of the same rows, in this process or before a restart, is recalled
 * (learnt.h) and not learnt again: from RECALL such a job goes to ENCODE.  What was made, codes and summaries, is kept
 * for the next process (kept.h), in which a recall job takes it, whether the rows are in memory or not:
 *
 *   kvs_index_schedule_recall() -> QUEUED -> RECALL_CHAPTER -> RECALL -> RECALL_CODES -> TAKE_CODES ...
 *                                         -> LISTS ... -> RECALL_SUMMARIES -> freed
 *
 * A late job is for a chapter that has codes: it makes only the summaries that are missing, or
 * that cover fewer rows of the chapter than the unit has, or cells that were lost.  New
 * summaries replace existing ones.  If there is no memory for summaries, queries attend the
 * rows instead.
 *
 * A job works on segments, not on the unit that requested it.  It pins them, so forks,
 * truncates and closes go on while it runs, and every unit that refers to the segments gets the
 * codes.  A job is dropped once no unit refers to enough of its first segments for a codebook.
 *
 * Rows are verified in each piece of work that reads them (verify.h).  A job that finds a bad
 * row fails, so nothing is made from bad rows.
 *
 * Invariants, which kvs_indexer_check() asserts between two steps:
 *   (1) The jobs in the queue (job_queue.h) are those in use in the pool.
 *   (2) Only the job whose turn it is is at work: the others hold nothing but their segments.
 *   (3) A job has all of its segments pinned, and the one before them if keys are rotated;
 *       it says in the first that it begins there, and in each that it gives it codes, if it
 *       does.
 *   (4) A job has a share of its codebook as soon as there is one; a late job, from the start.
 *   (5) It has room for lists of rows by item while it makes them, and only then.
 *
 * Threads: the data thread.  Memory: jobs from a pool; what a running job needs, from the
 * arena.
 */
#ifndef KV_KVSERVER_STORE_INDEX_BUILDER_H
#define KV_KVSERVER_STORE_INDEX_BUILDER_H

#include "kvserver/base/clock.h"
#include "kvserver/store/index/codebook.h"
#include "kvserver/store/rows/unit.h"

enum {
    KVS_INDEX_JOBS_MAX = 16384, /* queued on one data thread; one session has at most half */
};

struct kvs_indexer;

/* For units of that many sessions.  Returns NULL if out of memory. */
struct kvs_indexer *kvs_indexer_create(struct kvs_codebooks *books,
                                       const struct kv_clock *clock,
                                       uint32_t n_sessions);
/* Drops all jobs. */
void kvs_indexer_destroy(struct kvs_indexer *indexer); /* NULL is allowed */

/* Queues a job for every chapter of the unit's first `tokens` rows that has neither codes nor a
 * job for them, or lacks summaries of the plan's size and a job for these.  Fails with KV_BUSY
 * if there are too many jobs, or with KV_NO_MEMORY; jobs queued before that stay. */
kv_status_t kvs_index_schedule(struct kvs_indexer *indexer,
                               const struct kvs_unit *unit,
                               uint32_t tokens,
                               const struct kvs_index_plan *plan);

/* Queues recall jobs for segments without codes, while there is room for jobs.  Each takes codes and summaries
 * that an earlier process made by the same plan (kept.h), in the chapters of that time, and ends without if
 * one is missing.  Returns whether it queued any. */
bool kvs_index_schedule_recall(struct kvs_indexer *indexer,
                               const struct kvs_unit *unit,
                               uint32_t tokens,
                               const struct kvs_index_plan *plan);

/* Queues a job for lost cells and summaries of the chapter that begins at the block, if the
 * unit has all of their rows, or as many as any unit still has, and no job uses them.  Fails
 * with KV_BUSY or KV_NO_MEMORY: try again later. */
kv_status_t
kvs_index_repair(struct kvs_indexer *indexer, const struct kvs_unit *unit, uint32_t block);

/* Returns whether rows [block, tokens) of a unit are enough for a codebook by the plan. */
bool kvs_index_is_enough(const struct kvs_index_plan *plan, uint32_t block, uint32_t tokens);

/* Queues a job that replaces the broken codebooks of the unit's segments from the block on, up
 * to row `tokens`; they must be enough for a codebook, all have codes, and have no other job.
 * No query may be in the middle of a unit (query/pipeline.h): the job frees codes while later
 * ones are.  They keep their
 * codes, which no query uses, until the job has made new ones.  A job that ends before it has
 * made all of them leaves its codebook as broken as those it should replace: the next try
 * replaces all, so that a chapter gets one codebook or none.  After KV_BUSY or KV_NO_MEMORY
 * nothing has changed. */
kv_status_t kvs_index_replace(struct kvs_indexer *indexer,
                              const struct kvs_unit *unit,
                              uint32_t block,
                              uint32_t tokens,
                              const struct kvs_index_plan *plan);

/* The state of the index over the first rows of units, counted some blocks at a time.  Begins
 * as zeros. */
struct kvs_index_look {
    uint64_t n_coded;      /* rows */
    uint32_t n_pending;    /* jobs that begin there */
    uint32_t n_old, n_new; /* codebooks up to the given serial, and after it */
    uint32_t iterations;   /* sum over the new ones */
    uint64_t train_us;
    uint32_t n_blocks;    /* of the current unit that are counted */
    uint64_t last_serial; /* of the codebook that was counted last; 0: none of this unit */
};
/* Counts up to `most` further blocks of the unit's first `tokens` rows.  Returns true after the
 * last; the next call begins with another unit. */
bool kvs_index_look_on(const struct kvs_codebooks *books,
                       const struct kvs_unit *unit,
                       uint32_t tokens,
                       uint64_t serial,
                       uint32_t most,
                       struct kvs_index_look *look);

/* Returns the first of the unit's blocks [block, end) at which a job begins, or `end`. */
uint32_t kvs_index_find_pending(const struct kvs_unit *unit, uint32_t block, uint32_t end);

/* Runs one slice of the job at work, and drops queued jobs that are no longer wanted.  Returns
 * false if there is no job, or it waits for what it recalls: whoever brings that wakes the thread. */
bool kvs_indexer_step(struct kvs_indexer *indexer);

/* Returns true once for each session of which a job has ended, for any reason, or that watches
 * while any job has ended. */
bool kvs_indexer_take_ended(struct kvs_indexer *indexer, uint32_t *ret_session);

/* Returns how many jobs were queued for units of the session and have not ended. */
uint32_t kvs_indexer_n_jobs(const struct kvs_indexer *indexer, uint32_t session);

/* The session is told once when any job ends: it shares segments with another session whose job
 * it waits for. */
void kvs_indexer_watch(struct kvs_indexer *indexer, uint32_t session);

/* Looks at each job. */
void kvs_indexer_check(const struct kvs_indexer *indexer);

/* What a job has of others. */
struct kvs_index_job_look {
    struct kvs_block *const *blocks; /* (n_blocks) pinned */
    uint32_t n_blocks;
    struct kvs_block *before; /* pinned; NULL: none */
    uint32_t codebook;        /* where has_codebook */
    bool has_codebook;
};

/* Shows all jobs. */
void kvs_indexer_visit(const struct kvs_indexer *indexer,
                       void (*visit)(void *arg, const struct kvs_index_job_look *look),
                       void *arg);

struct kvs_indexer_stats {
    uint64_t trained, recalled; /* codebooks: learnt, and found as they were learnt earlier */
    uint64_t dropped, failed;
    uint64_t rows_coded, rows_summarised;
    uint64_t summaries_failed; /* chapters without summaries, because memory ran out */
    uint64_t worked_us;
    uint32_t n_jobs; /* queued and running */
};
void kvs_indexer_get_stats(const struct kvs_indexer *indexer,
                           struct kvs_indexer_stats *ret_stats);

#endif
