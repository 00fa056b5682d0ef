/* learnt.h - what was learnt of a chapter's keys outlasts the process: a tier (rows/residency.h) keeps
 * it with the chapter's last block, and an index job that is to learn of the same rows asks for it
 * first.
 *
 *     bytes   a head: of which rows, by which plan, in which format
 *             the rotation's matrix, if keys are rotated     (d, d) floats
 *             what the scorer has learnt, and the keys' mean  as in memory
 *
 * Learning is most of an index job: with these, the job has only to make codes, lists and summaries, or to
 * take them (kept.h).  They are of use to a job for the same
 * rows and by the same plan, but for how often it may look at them.
 *
 * Threads: the data thread.  Memory: the caller's.
 */
#ifndef KV_KVSERVER_STORE_INDEX_LEARNT_H
#define KV_KVSERVER_STORE_INDEX_LEARNT_H

#include "kvserver/store/index/codebook.h"

/* Returns the bytes for a segment whose block has this number in its prompt, 0 if none are to be
 * kept with it: it is not the last of its chapter, this has too few rows for bytes to be worth their
 * place, or its codebook is broken or not finished.
 *   ret_bytes  (as many as that); NULL: the caller only wants to know how many */
size_t kvs_learnt_give(const struct kvs_codebooks *books,
                       const struct kvs_block *block,
                       uint32_t at,
                       uint32_t number,
                       void *ret_bytes);

/* Whether what was learnt is kept: it is sound as far as anybody knows, has what its plan wants, and its
 * chapter is long enough. */
bool kvs_learnt_is_kept(const struct kvs_codebook *book);

/* The chapter has all its codes: the tier, if there is one, is to keep what was learnt. */
void kvs_learnt_keep(const struct kvs_codebooks *books,
                     const struct kvs_block *last,
                     uint32_t at);

/* Gets what was learnt earlier for a codebook that has a place and a plan, and no rotation yet.
 * KV_IN_PROGRESS: the tier is looking, call it again when that has something to tell.  KV_NOT_FOUND:
 * there is nothing of use, and KV_NO_MEMORY: no memory for it, call it again or give it up; the codebook
 * is as before.
 *   rotation  that of the chapter before, which is shared if it is the same; NULL: none */
kv_status_t kvs_learnt_recall(struct kvs_codebooks *books,
                              uint32_t codebook,
                              const struct kvs_block *last,
                              uint32_t at,
                              struct kvs_rotation *rotation);

/* Ends kvs_learnt_recall() or kvs_kept_recall() (kept.h), whatever its state: what it has returned is not there
 * any more.  Allowed if there is none. */
void kvs_recall_end(const struct kvs_codebooks *books);

#endif
