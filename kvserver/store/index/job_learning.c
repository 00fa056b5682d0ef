/* How an index job learns of its rows: their mean, a rotation, and what the scorer learns. */
#include "kernels/rotation.h"
#include "kvserver/base/clock.h"
#include "kvserver/store/index/builder_private.h"
#include "kvserver/store/rows/arena.h"

#include <math.h>
#include <string.h>

enum {
    SAMPLE_ROWS = 4096, /* that a mean, or a rotation, is made of: some 32 for each element of a
                         * key */
    MEAN_FLOATS = 8 << 10,       /* of keys that are added in a piece: some 10 us */
    ROTATION_PRODUCTS = 1 << 15, /* of elements, in a piece: some 10 us */
};

/* The rows of a job, whose keys the scorer reads. */
struct job_rows {
    struct kvs_codebooks *books;
    const struct kvs_index_job *job;
};

static kv_status_t
load_keys(void *arg, uint32_t first, uint32_t stride, uint32_t n, float *ret_keys)
{
    const struct job_rows *rows = arg;
    const struct kvs_index_job *job = rows->job;
    const uint32_t d = job->plan.shape.d;

    if (!kvs_job_rows_are_good(rows->books, job, first, stride, n))
        return KV_CORRUPT;
    for (uint32_t i = 0, run; i < n; i += run) {
        const uint32_t row = first + i * stride;

        run = (KV_BLOCK_TOKENS - row % KV_BLOCK_TOKENS + stride - 1) / stride;
        if (run > n - i)
            run = n - i;
        kv_exact_scores_load(job->plan.type, kvs_job_row(job, row),
                             (size_t)job->row_bytes * stride, run, d, ret_keys + (size_t)i * d);
    }
    return KV_OK;
}

static struct kvs_chapter_keys keys_of(struct job_rows *rows)
{
    return (struct kvs_chapter_keys){.n_rows = rows->job->n_rows,
                                     .seed = kvs_job_seed(rows->job),
                                     .load = load_keys,
                                     .arg = rows};
}

/* Begins the codebook, now that a rotation is there, or none is wanted. */
static kv_status_t begin_means(struct kvs_codebooks *books, struct kvs_index_job *job)
{
    struct kvs_codebook *book = kvs_job_book(books, job);
    struct job_rows rows = {books, job};
    const struct kvs_chapter_keys keys = keys_of(&rows);
    kv_status_t status;

    memset(job->training, 0, book->scorer->training_bytes(&job->plan.shape));
    status = book->scorer->train_begin(book, &keys);
    if (status != KV_OK)
        return status;
    kvs_column_seal(&book->learnt);
    job->cursor = 0;
    job->state = job->plan.iterations > 0 ? KVS_JOB_TRAIN : KVS_JOB_ENCODE;
    return KV_OK;
}

struct kvs_rotation *kvs_job_rotation_before(const struct kvs_codebooks *books,
                                             const struct kvs_index_job *job)
{
    const struct kvs_codes *codes =
        job->before != NULL ? kvs_block_codes(job->before, job->at) : NULL;
    struct kvs_rotation *rotation;

    if (codes == NULL || codes->column.bytes == NULL)
        return NULL;
    rotation = kvs_codebook_at(books, codes->codebook)->rotation;
    return rotation != NULL && rotation->d == job->plan.shape.d &&
                   kvs_column_is_sound(&rotation->matrix)
               ? rotation
               : NULL;
}

/* Begins the rotation, if one is wanted and not there. */
static kv_status_t begin_rotation(struct kvs_codebooks *books, struct kvs_index_job *job)
{
    if (!job->plan.rotates || kvs_job_book(books, job)->rotation != NULL)
        return begin_means(books, job);
    memset(job->training, 0, kv_rotation_work_bytes(job->plan.shape.d));
    job->cursor = 0;
    job->state = KVS_JOB_COVARIANCE;
    return KV_OK;
}

kv_status_t kvs_job_learn(struct kvs_codebooks *books, struct kvs_index_job *job)
{
    struct kvs_arena *arena = books->store->arena;
    struct kvs_codebook *book = kvs_job_book(books, job);
    struct kvs_rotation *rotation =
        job->plan.rotates ? kvs_job_rotation_before(books, job) : NULL;
    const size_t work_bytes =
        job->plan.rotates && rotation == NULL ? kv_rotation_work_bytes(job->plan.shape.d) : 0;
    size_t bytes = book->scorer->training_bytes(&job->plan.shape);

    if (bytes < work_bytes)
        bytes = work_bytes;
    job->training_class = kvs_arena_class_rounded(arena, bytes);
    job->training =
        job->training_class < 0 ? NULL : kvs_arena_alloc(arena, job->training_class);
    if (job->training == NULL)
        return KV_NO_MEMORY;
    if (rotation != NULL)
        kvs_codebook_share_rotation(book, rotation);
    if (!job->plan.copies)
        return begin_rotation(books, job);
    memset(kvs_codebook_mean(book), 0, job->plan.shape.d * sizeof(float));
    job->state = KVS_JOB_MEAN;
    return KV_OK;
}

/* Loads at most n_max further keys of the sample, every stride-th row, which are at most
 * KVS_CODEBOOK_KEYS floats.  *ret_n is their number; *ret_last: the sample has no more. */
static kv_status_t load_sample(struct kvs_codebooks *books,
                               struct kvs_index_job *job,
                               uint32_t n_max,
                               float *ret_keys,
                               uint32_t *ret_n,
                               bool *ret_last)
{
    const uint32_t stride = (job->n_rows + SAMPLE_ROWS - 1) / SAMPLE_ROWS;
    const uint32_t n_left = (job->n_rows + stride - 1) / stride - job->cursor;
    struct job_rows rows = {books, job};
    uint32_t n = n_max < n_left ? n_max : n_left;

    if (n > KVS_CODEBOOK_KEYS / job->plan.shape.d)
        n = KVS_CODEBOOK_KEYS / job->plan.shape.d;
    const kv_status_t status = load_keys(&rows, job->cursor * stride, stride, n, ret_keys);
    job->cursor += n;
    *ret_n = n;
    *ret_last = n == n_left;
    return status;
}

kv_status_t kvs_job_mean(struct kvs_codebooks *books, struct kvs_index_job *job)
{
    const uint32_t d = job->plan.shape.d;
    float *mean = kvs_codebook_mean(kvs_job_book(books, job));
    float keys[KVS_CODEBOOK_KEYS];
    uint32_t n;
    bool is_last;
    const kv_status_t status = load_sample(books, job, 1 + MEAN_FLOATS / d, keys, &n, &is_last);

    if (status != KV_OK)
        return status;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < d; j++)
            mean[j] += keys[i * d + j];
    if (!is_last)
        return KV_OK;
    /* Keys that are not finite have no mean: then copies are of the keys as they are. */
    for (uint32_t i = 0; i < d; i++)
        mean[i] = isfinite(mean[i]) ? mean[i] / (float)job->cursor : 0;
    return begin_rotation(books, job);
}

kv_status_t kvs_job_covariance(struct kvs_codebooks *books, struct kvs_index_job *job)
{
    const uint32_t d = job->plan.shape.d;
    float keys[KVS_CODEBOOK_KEYS];
    uint32_t n;
    bool is_last;
    const kv_status_t status =
        load_sample(books, job, ROTATION_PRODUCTS / (d * d) + 1, keys, &n, &is_last);

    if (status != KV_OK)
        return status;
    kv_rotation_add(d, job->training, keys, n);
    if (is_last)
        job->state = KVS_JOB_DIAGONALIZE;
    return KV_OK;
}

kv_status_t kvs_job_diagonalize(struct kvs_codebooks *books, struct kvs_index_job *job)
{
    const uint32_t d = job->plan.shape.d;
    struct kvs_rotation *rotation;

    if (!kv_rotation_diagonalize(d, job->training, 1 + ROTATION_PRODUCTS / 16 / d))
        return KV_OK;
    rotation = kvs_codebook_make_rotation(books, kvs_job_book(books, job));
    if (rotation == NULL)
        return KV_NO_MEMORY;
    kv_rotation_deal(d, job->plan.shape.m, job->training, rotation->matrix.bytes);
    kvs_column_seal(&rotation->matrix);
    return begin_means(books, job);
}

kv_status_t kvs_job_train(struct kvs_codebooks *books,
                          struct kvs_index_job *job,
                          const struct kv_clock *clock,
                          uint64_t begin_us)
{
    struct kvs_codebook *book = kvs_job_book(books, job);
    struct job_rows rows = {books, job};
    const struct kvs_chapter_keys keys = keys_of(&rows);
    bool pays = true;
    const kv_status_t status =
        book->scorer->train_piece(book, &keys, job->training, &job->cursor, &pays);

    if (status != KV_OK || job->cursor > 0)
        return status;
    book->iterations++;
    uint64_t spent_us = book->train_us + kv_clock_now(clock) - begin_us;
    if (book->iterations >= job->plan.iterations ||
        (job->plan.budget_us > 0 && spent_us >= job->plan.budget_us) || !pays) {
        kvs_column_seal(&book->learnt);
        job->state = KVS_JOB_ENCODE;
    }
    return KV_OK;
}
