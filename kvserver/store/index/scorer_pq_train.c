/* Training for scorer_pq.h: k-means over a sample of the chapter's keys, in pieces. */
#include "kvserver/base/random.h"
#include "kvserver/store/index/scorer_pq.h"

#include <assert.h>

/* K-means ends when its centroids move by less than this share of their squares, together. */
static const double TOLERANCE = 1e-5;

enum {
    SAMPLE_MAX = 16384,         /* rows that k-means uses */
    PIECE_OPERATIONS = 1 << 19, /* multiply-adds: some 10 us */
    PIECE_ROWS_MAX = KVS_CODEBOOK_KEYS / 8,
};

/* Sums of the keys that are nearest to each centroid, and how many those are. */
size_t kvs_pq_training_bytes(const struct kv_pq_shape *shape)
{
    return kv_pq_centroids_size(shape) * sizeof(float) +
           kv_pq_table_size(shape) * sizeof(uint32_t);
}

static struct kv_kmeans_sums sums_in(const struct kv_pq_shape *shape, void *training)
{
    float *sums = training;

    return (struct kv_kmeans_sums){
        .sums = sums,
        .counts = (uint32_t *)(void *)(sums + kv_pq_centroids_size(shape)),
    };
}

/* The first centroids are different keys: twice as many rows leave a choice. */
uint32_t kvs_pq_n_rows_least(const struct kv_pq_shape *shape)
{
    return 2 * (uint32_t)kv_pq_n_centroids(shape);
}

/* A row costs an inner product with every centroid. */
uint32_t kvs_pq_rows_at_once(const struct kv_pq_shape *shape)
{
    const uint32_t n = PIECE_OPERATIONS / (uint32_t)kv_pq_centroids_size(shape);
    uint32_t max = KVS_CODEBOOK_KEYS / shape->d;

    if (max > PIECE_ROWS_MAX)
        max = PIECE_ROWS_MAX;
    return n < 1 ? 1 : n < max ? n : max;
}

/* ---- the sample: every stride-th row ----------------------------------------------------- */

static uint32_t stride_of(const struct kvs_chapter_keys *keys)
{
    return (keys->n_rows + SAMPLE_MAX - 1) / SAMPLE_MAX;
}

static uint32_t n_sample_of(const struct kvs_chapter_keys *keys)
{
    return (keys->n_rows + stride_of(keys) - 1) / stride_of(keys);
}

/* ---- training ---------------------------------------------------------------------------- */

/* The first centroids are keys: as many different rows of the sample, each as likely as any. */
kv_status_t kvs_pq_train_begin(const struct kvs_codebook *book,
                               const struct kvs_chapter_keys *keys)
{
    const struct kv_kmeans_codebook kmeans = kvs_pq_kmeans(book);
    const uint32_t n_centroids = (uint32_t)kv_pq_n_centroids(&book->shape);
    const uint32_t n_sample = n_sample_of(keys);
    float key[KVS_CODEBOOK_DIM_MAX], rotated[KVS_CODEBOOK_DIM_MAX];
    struct kv_random random;

    assert(n_sample >= n_centroids && book->shape.d <= KVS_CODEBOOK_DIM_MAX);
    kv_random_init(&random, keys->seed);
    for (uint32_t i = 0, n = 0; n < n_centroids; i++) {
        if (kv_random_below(&random, n_sample - i) >= n_centroids - n)
            continue;
        const kv_status_t status = keys->load(keys->arg, i * stride_of(keys), 1, 1, key);
        if (status != KV_OK)
            return status;
        kv_kmeans_set_centroid(&book->shape, &kmeans, n++,
                               kvs_pq_rotate(book, key, 1, rotated));
    }
    kv_kmeans_half_sq_norms(&book->shape, &kmeans);
    return KV_OK;
}

static double sum_of_squares(const float *half_squares, size_t n)
{
    double sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += 2.0 * half_squares[i];
    return sum;
}

/* Moves the centroids after a pass over the sample. */
static bool end_pass(const struct kvs_codebook *book,
                     const struct kv_kmeans_codebook *kmeans,
                     const struct kv_kmeans_sums *sums)
{
    const double moved = kv_kmeans_update(&book->shape, kmeans, sums);

    return moved >
           TOLERANCE * sum_of_squares(kmeans->half_sq_norms, kv_pq_table_size(&book->shape));
}

kv_status_t kvs_pq_train_piece(const struct kvs_codebook *book,
                               const struct kvs_chapter_keys *keys,
                               void *training,
                               uint32_t *cursor,
                               bool *ret_pays)
{
    const struct kv_kmeans_codebook kmeans = kvs_pq_kmeans(book);
    const struct kv_kmeans_sums sums = sums_in(&book->shape, training);
    const uint32_t n_left = n_sample_of(keys) - *cursor, stride = stride_of(keys);
    const uint32_t at_once = kvs_pq_rows_at_once(&book->shape);
    const uint32_t n = n_left < at_once ? n_left : at_once;
    uint8_t codes[KV_PQ_SUBSPACES_MAX * PIECE_ROWS_MAX];
    float some[KVS_CODEBOOK_KEYS], rotated[KVS_CODEBOOK_KEYS];
    kv_status_t status;

    status = keys->load(keys->arg, *cursor * stride, stride, n, some);
    if (status != KV_OK)
        return status;
    kv_kmeans_step(&book->shape, &kmeans, kvs_pq_rotate(book, some, n, rotated), n, codes, n,
                   &sums);
    *cursor += n;
    if (n < n_left)
        return KV_OK;
    *cursor = 0;
    *ret_pays = end_pass(book, &kmeans, &sums);
    return KV_OK;
}
