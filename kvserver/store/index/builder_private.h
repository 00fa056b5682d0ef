/* builder_private.h - what the two halves of builder.h share.
 *
 *   schedule.c   which jobs a unit needs, and the state of its index
 *   builder.c    jobs, and their work in slices
 *
 * Threads: the data thread.
 */
#ifndef KV_KVSERVER_STORE_INDEX_BUILDER_PRIVATE_H
#define KV_KVSERVER_STORE_INDEX_BUILDER_PRIVATE_H

#include "kvserver/store/index/builder.h"

/* ---- builder.c ---- */

enum kvs_index_job_kind {
    KVS_INDEX_JOB_NEW,     /* for segments that have no codes */
    KVS_INDEX_JOB_LATE,    /* for a chapter that has codes: only summaries, or lists */
    KVS_INDEX_JOB_REPLACE, /* for segments that have codes of broken codebooks */
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

#endif
