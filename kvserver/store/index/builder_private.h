/* builder_private.h - what the parts of builder.h share.
 *
 *   schedule.c       which jobs a unit needs, and the state of its index
 *   builder.c        jobs, and their work in slices
 *   job_learning.c   how a job learns of its rows
 *
 * Threads: the data thread.
 */
#ifndef KV_KVSERVER_STORE_INDEX_BUILDER_PRIVATE_H
#define KV_KVSERVER_STORE_INDEX_BUILDER_PRIVATE_H

#include "kvserver/store/index/builder.h"
#include "kvserver/store/index/job_queue.h"
#include "kvserver/store/index/scorer.h"

enum kvs_job_state {
    KVS_JOB_QUEUED,
    KVS_JOB_RECALL,         /* what was learnt earlier, which saves all before KVS_JOB_ENCODE */
    KVS_JOB_RECALL_CHAPTER, /* before that, of a job without rows: how many blocks it is of */
    KVS_JOB_RECALL_CODES,   /* of a job without rows: codes that were made earlier */
    KVS_JOB_TAKE_CODES,     /* they are there */
    KVS_JOB_LEARN,          /* there is nothing of that kind */
    KVS_JOB_MEAN,           /* if the plan has copies */
    KVS_JOB_COVARIANCE, /* if the plan rotates, and no chapter before this one has a rotation */
    KVS_JOB_DIAGONALIZE,
    KVS_JOB_TRAIN,
    KVS_JOB_ENCODE,
    KVS_JOB_LISTS,            /* if the chapter is long enough for lists by item */
    KVS_JOB_SUMMARIES_BEGIN,  /* if the plan has summaries */
    KVS_JOB_RECALL_SUMMARIES, /* in place of these, of a job without rows */
    KVS_JOB_SUMMARIES,
    KVS_JOB_KEEP, /* what was made, for the next process, if there is a tier for it */
};

struct kvs_index_job {
    struct kvs_queued_job queued;
    enum kvs_job_state state;
    struct kvs_index_plan plan;
    struct kvs_block **blocks; /* that have the rows; pinned; the list is from the arena */
    int blocks_class;
    uint32_t n_segments;
    uint32_t at;     /* the unit's place in the blocks */
    uint32_t n_rows; /* from row 0 of the first segment */
    uint32_t row_bytes;
    uint16_t layer, kv_head;
    uint32_t block_begin;
    struct kvs_block
        *before; /* the one before them, whose codebook's rotation is shared; pinned;
                                 * NULL: none */
    struct kv_writers *writers; /* of its rows; stored after the list of segments, because the
                                 * session may be closed before the job ends; NULL: writer 0 */

    /* While it runs. */
    uint32_t codebook;
    bool has_codebook;
    void *training; /* of the scorer, or work of kernels/rotation.h; in the arena */
    int training_class;
    uint32_t cursor; /* of the scorer in training, sampled row, or segment */
    struct kvs_item_lists lists;
    struct kvs_column lists_column; /* their memory, until it is the codebook's */
    bool is_late;      /* its chapter has codes: it makes only summaries or lists */
    bool wants_lists;  /* a late job that makes lists */
    bool is_mixed;     /* as the session's blocks (unit.h) */
    bool replaces;     /* it replaces broken codebooks, whose codes its segments still have */
    bool has_recalled; /* what was learnt of its rows */
    bool is_recall; /* it takes what an earlier process made, or nothing, and reads no rows */
    uint64_t lacks_us; /* since when there is no memory for its next piece; 0: there was */
    uint64_t keeps_us; /* since when the tier takes what is kept */
    uint64_t again_us; /* when it looks for some again */
};

static inline struct kvs_codebook *kvs_job_book(const struct kvs_codebooks *books,
                                                const struct kvs_index_job *job)
{
    return kvs_codebook_at(books, job->codebook);
}

static inline const uint8_t *kvs_job_row(const struct kvs_index_job *job, uint32_t row)
{
    return kvs_block_rows(job->blocks[row / KV_BLOCK_TOKENS], job->at) +
           (size_t)(row % KV_BLOCK_TOKENS) * job->row_bytes;
}

static inline uint64_t kvs_job_seed(const struct kvs_index_job *job)
{
    return job->plan.seed ^ ((uint64_t)job->layer << 48) ^ ((uint64_t)job->kv_head << 32) ^
           job->block_begin;
}

/* ---- builder.c ---- */

enum kvs_index_job_kind {
    KVS_INDEX_JOB_NEW,     /* for segments that have no codes */
    KVS_INDEX_JOB_LATE,    /* for a chapter that has codes: only summaries, or lists */
    KVS_INDEX_JOB_REPLACE, /* for segments that have codes of broken codebooks */
    KVS_INDEX_JOB_RECALL,  /* for segments whose codes an earlier process may have made */
};

struct kvs_codebooks *kvs_indexer_books(const struct kvs_indexer *indexer);

/* Queues a job for the unit's rows from the block on, up to row_end.  After KV_BUSY or
 * KV_NO_MEMORY nothing has changed. */
kv_status_t kvs_index_job_create(struct kvs_indexer *indexer,
                                 const struct kvs_unit *unit,
                                 uint32_t block_begin,
                                 uint32_t row_end,
                                 const struct kvs_index_plan *plan,
                                 enum kvs_index_job_kind kind);

/* Verifies n rows, every `stride`-th, before they are used. */
bool kvs_job_rows_are_good(struct kvs_codebooks *books,
                           const struct kvs_index_job *job,
                           uint32_t first,
                           uint32_t stride,
                           uint32_t n);

/* ---- job_learning.c: pieces of some us, each advances job->cursor or job->state ---- */

/* Begins to learn. */
kv_status_t kvs_job_learn(struct kvs_codebooks *books, struct kvs_index_job *job);
/* Adds some keys of the sample to their mean, and in the end divides it. */
kv_status_t kvs_job_mean(struct kvs_codebooks *books, struct kvs_index_job *job);
/* Adds some keys of the sample to what the rotation is made of. */
kv_status_t kvs_job_covariance(struct kvs_codebooks *books, struct kvs_index_job *job);
/* Rotates the axes in some planes, and in the end makes the rotation. */
kv_status_t kvs_job_diagonalize(struct kvs_codebooks *books, struct kvs_index_job *job);
/* Learns from some keys, in the slice that began at begin_us; after all of them, from all once more, or the
 * job encodes. */
kv_status_t kvs_job_train(struct kvs_codebooks *books,
                          struct kvs_index_job *job,
                          const struct kv_clock *clock,
                          uint64_t begin_us);

/* Returns the rotation of the chapter before, if it has a sound one. */
struct kvs_rotation *kvs_job_rotation_before(const struct kvs_codebooks *books,
                                             const struct kvs_index_job *job);

#endif
