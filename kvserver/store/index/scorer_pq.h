/* scorer_pq.h - product quantization: the memory of its codebooks, and its training, for the
 * table in scorer_pq.c: k-means over a sample of the chapter's keys (scorer_pq_train.c).
 * scorer.h says what each function does.
 *
 * Threads: any.  Memory: the caller's.
 */
#ifndef KV_KVSERVER_STORE_INDEX_SCORER_PQ_H
#define KV_KVSERVER_STORE_INDEX_SCORER_PQ_H

#include "kernels/kmeans.h"
#include "kvserver/store/index/scorer.h"

/* Returns the codebook in the form that the k-means kernels take: centroids, then half of each
 * one's square. */
static inline struct kv_kmeans_codebook kvs_pq_kmeans(const struct kvs_codebook *book)
{
    return (struct kv_kmeans_codebook){
        .centroids = kvs_codebook_centroids(book),
        .half_sq_norms = kvs_codebook_centroids(book) + kv_pq_centroids_size(&book->shape),
    };
}

/* Returns n vectors as the codebook takes them: rotated, in `memory`, or as they are. */
static inline const float *
kvs_pq_rotate(const struct kvs_codebook *book, const float *vectors, uint32_t n, float *memory)
{
    const float *rotation = kvs_codebook_rotation(book);

    if (rotation == NULL)
        return vectors;
    kv_rotate(book->shape.d, rotation, vectors, n, memory);
    return memory;
}

/* ---- scorer_pq_train.c ---- */

size_t kvs_pq_training_bytes(const struct kv_pq_shape *shape);
uint32_t kvs_pq_n_rows_least(const struct kv_pq_shape *shape);
uint32_t kvs_pq_rows_at_once(const struct kv_pq_shape *shape);
kv_status_t kvs_pq_train_begin(const struct kvs_codebook *book,
                               const struct kvs_chapter_keys *keys);
kv_status_t kvs_pq_train_piece(const struct kvs_codebook *book,
                               const struct kvs_chapter_keys *keys,
                               void *training,
                               uint32_t *cursor,
                               bool *ret_pays);

#endif
