/* scorer_pq.h - product quantization's training, for its table in scorer_pq.c: k-means over a
 * sample of the chapter's keys (scorer_pq_train.c).  scorer.h says what each does.
 *
 * Threads: any.  Memory: the caller's.
 */
#ifndef KV_KVSERVER_STORE_INDEX_SCORER_PQ_H
#define KV_KVSERVER_STORE_INDEX_SCORER_PQ_H

#include "kvserver/store/index/scorer.h"

size_t kvs_pq_training_bytes(const struct kv_pq_shape *shape);
uint32_t kvs_pq_n_rows_least(const struct kv_pq_shape *shape);
uint32_t kvs_pq_rows_at_once(const struct kv_pq_shape *shape);
kv_status_t kvs_pq_train_begin(const struct kvs_codebook *book,
                               const struct kvs_chapter_keys *keys);
kv_status_t kvs_pq_train_slice(const struct kvs_codebook *book,
                               const struct kvs_chapter_keys *keys,
                               void *training,
                               uint32_t *cursor,
                               bool *ret_pays);

#endif
