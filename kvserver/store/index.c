#include "index.h"

#include "random.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    SLICE_OPERATIONS = 1 << 21, /* multiply-adds of one slice: some 50 us */
    JOBS_PER_LOOK = 16,
};

/* K-means ends when its centroids move by less than this share of their squares, together. */
static const double TOLERANCE = 1e-5;

enum job_state {
    JOB_QUEUED,
    JOB_LLOYD,
    JOB_ENCODE,
};

struct job {
    struct job *next;
    enum job_state state;
    struct kv_index_plan plan;
    struct kv_segment **segments; /* pinned, of the arena */
    int segments_class;
    uint32_t n_segments;
    uint32_t n_rows; /* from the first one's row 0 on */
    uint32_t row_bytes;
    uint16_t layer, kv_head;
    uint32_t block_begin;

    /* At work. */
    uint32_t codebook;
    bool has_codebook;
    void *sums; /* then counts; of the arena */
    int sums_class;
    uint32_t stride, n_sample; /* every stride-th row is looked at */
    uint32_t cursor;           /* sample, or segment */
};

struct kv_indexer {
    struct kv_heap *heap;
    const struct kv_clock *clock;
    struct kv_pool *jobs;
    struct job *first, **end;
    struct job **looked; /* the next one of which is asked whether anybody wants it */
    bool ended;
    struct kv_indexer_stats stats;
    uint8_t codes[KV_PQ_SUBSPACES_MAX * KV_CODEBOOK_KEYS / 8];
    float keys[KV_CODEBOOK_KEYS];
};

struct kv_indexer *kv_indexer_create(struct kv_heap *heap, const struct kv_clock *clock)
{
    struct kv_indexer *indexer = calloc(1, sizeof(*indexer));

    if (indexer == NULL)
        return NULL;
    indexer->heap = heap;
    indexer->clock = clock;
    indexer->end = indexer->looked = &indexer->first;
    indexer->jobs = kv_pool_create(KV_INDEX_JOBS_MAX, sizeof(struct job));
    if (indexer->jobs == NULL) {
        free(indexer);
        return NULL;
    }
    return indexer;
}

static struct kv_codebook *book_of(const struct kv_indexer *indexer, const struct job *job)
{
    return kv_codebook_at(&indexer->heap->codebooks, job->codebook);
}

static uint32_t *counts_of(const struct job *job)
{
    return (uint32_t *)(void *)((float *)job->sums + kv_pq_centroids_size(&job->plan.shape));
}

/* ---- jobs -------------------------------------------------------------------------------- */

static void job_end(struct kv_indexer *indexer, struct job **link)
{
    struct kv_arena *arena = indexer->heap->arena;
    struct job *job = *link;

    *link = job->next;
    if (indexer->end == &job->next)
        indexer->end = link;
    if (indexer->looked == &job->next)
        indexer->looked = link;
    for (uint32_t i = 0; i < job->n_segments; i++) {
        job->segments[i]->training = job->segments[i]->begins_job = false;
        kv_segment_unpin(indexer->heap, job->segments[i]);
    }
    kv_arena_free(arena, job->segments_class, job->segments);
    if (job->sums != NULL)
        kv_arena_free(arena, job->sums_class, job->sums);
    if (job->has_codebook)
        kv_codebook_unref(&indexer->heap->codebooks, job->codebook);
    kv_pool_put(indexer->jobs, job);
    indexer->ended = true;
    indexer->stats.n_jobs--;
}

void kv_indexer_destroy(struct kv_indexer *indexer)
{
    if (indexer == NULL)
        return;
    while (indexer->first != NULL)
        job_end(indexer, &indexer->first);
    kv_pool_destroy(indexer->jobs);
    free(indexer);
}

static kv_status_t job_create(struct kv_indexer *indexer,
                              const struct kv_unit *unit,
                              uint32_t block_begin,
                              uint32_t row_end,
                              const struct kv_index_plan *plan)
{
    struct kv_arena *arena = indexer->heap->arena;
    uint32_t n_rows = row_end - block_begin * KV_BLOCK_TOKENS;
    uint32_t n_segments = (n_rows + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    int class_id = kv_arena_class_rounded(arena, n_segments * sizeof(struct kv_segment *));

    if (class_id < 0)
        return KV_NO_MEMORY;
    for (uint32_t i = 0; i < n_segments; i++)
        if (unit->segments[block_begin + i]->pins == UINT16_MAX)
            return KV_BUSY;
    struct job *job = kv_pool_get(indexer->jobs);
    if (job == NULL)
        return KV_BUSY;
    struct kv_segment **segments = kv_arena_alloc(arena, class_id);
    if (segments == NULL) {
        kv_pool_put(indexer->jobs, job);
        return KV_NO_MEMORY;
    }
    *job = (struct job){
        .plan = *plan,
        .segments = segments,
        .segments_class = class_id,
        .n_segments = n_segments,
        .n_rows = n_rows,
        .row_bytes = unit->row_bytes,
        .layer = unit->layer,
        .kv_head = unit->kv_head,
        .block_begin = block_begin,
    };
    for (uint32_t i = 0; i < n_segments; i++) {
        segments[i] = unit->segments[block_begin + i];
        segments[i]->pins++;
        segments[i]->training = true;
        segments[i]->begins_job = i == 0;
    }
    *indexer->end = job;
    indexer->end = &job->next;
    indexer->stats.n_jobs++;
    return KV_OK;
}

static bool is_bare(const struct kv_segment *segment)
{
    return segment->codes == NULL && !segment->training;
}

/* One codebook for everything: made once, by whoever comes first; what is behind it gets its
 * codes from queries. */
static kv_status_t cut_whole(struct kv_indexer *indexer,
                             const struct kv_unit *unit,
                             uint32_t tokens,
                             const struct kv_index_plan *plan)
{
    uint32_t n_blocks = (tokens + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS, begin = n_blocks;

    while (begin > 0 && is_bare(unit->segments[begin - 1]))
        begin--;
    if (begin > 0) {
        const struct kv_segment *before = unit->segments[begin - 1];
        if (before->training ||
            kv_codebook_at(&indexer->heap->codebooks, before->codebook)->open)
            return KV_OK;
    }
    /* With fewer rows than centroids there is nothing to find (PQCache's code: no index). */
    if (tokens < begin * KV_BLOCK_TOKENS + 2 * kv_pq_n_centroids(&plan->shape))
        return KV_OK;
    return job_create(indexer, unit, begin, tokens, plan);
}

kv_status_t kv_index_cut(struct kv_indexer *indexer,
                         const struct kv_unit *unit,
                         uint32_t tokens,
                         const struct kv_index_plan *plan)
{
    const uint32_t n_blocks = tokens / KV_BLOCK_TOKENS;
    kv_status_t status = KV_OK;

    assert(tokens <= unit->committed);
    if (plan->chapter_blocks == 0)
        return cut_whole(indexer, unit, tokens, plan);
    for (uint32_t begin = 0, end; begin < n_blocks && status == KV_OK; begin = end) {
        uint32_t chapter_end =
            (begin / plan->chapter_blocks + 1) * (uint64_t)plan->chapter_blocks < n_blocks
                ? (begin / plan->chapter_blocks + 1) * plan->chapter_blocks
                : n_blocks;

        for (end = begin; end < chapter_end && is_bare(unit->segments[end]); end++)
            ;
        if (end - begin >= KV_CHAPTER_BLOCKS_MIN)
            status = job_create(indexer, unit, begin, end * KV_BLOCK_TOKENS, plan);
        if (end == begin)
            end++;
    }
    return status;
}

void kv_index_look(const struct kv_heap *heap,
                   const struct kv_unit *unit,
                   uint32_t tokens,
                   uint64_t serial,
                   struct kv_index_look *ret_look)
{
    uint32_t n_blocks = (tokens + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    const struct kv_codebook *last = NULL;

    *ret_look = (struct kv_index_look){0};
    for (uint32_t i = 0; i < n_blocks; i++) {
        const struct kv_segment *segment = unit->segments[i];
        uint32_t n_rows = tokens - i * KV_BLOCK_TOKENS;

        ret_look->n_pending += segment->begins_job;
        if (segment->codes == NULL)
            continue;
        ret_look->n_coded += segment->n_coded < n_rows ? segment->n_coded : n_rows;
        const struct kv_codebook *book = kv_codebook_at(&heap->codebooks, segment->codebook);
        if (book == last || segment->training)
            continue; /* counted, or still to come */
        last = book;
        if (book->serial <= serial) {
            ret_look->n_old++;
        } else {
            ret_look->n_new++;
            ret_look->iterations += book->iterations;
            ret_look->train_us += book->train_us;
        }
    }
}

/* ---- slices ------------------------------------------------------------------------------ */

static const uint8_t *row_at(const struct job *job, uint32_t row)
{
    return job->segments[row / KV_BLOCK_TOKENS]->rows +
           (size_t)(row % KV_BLOCK_TOKENS) * job->row_bytes;
}

/* Rows of one slice, of which each costs an inner product with every centroid. */
static uint32_t rows_at_once(const struct job *job)
{
    const struct kv_pq_shape *shape = &job->plan.shape;
    uint32_t n = SLICE_OPERATIONS / (uint32_t)kv_pq_centroids_size(shape);
    uint32_t max = KV_CODEBOOK_KEYS / shape->d;

    if (max > KV_CODEBOOK_KEYS / 8)
        max = KV_CODEBOOK_KEYS / 8;
    return n < 1 ? 1 : n < max ? n : max;
}

/* The first centroids are keys: as many different rows of the sample, each as likely as any. */
static kv_status_t seed_job(struct kv_indexer *indexer, struct job *job)
{
    struct kv_heap *heap = indexer->heap;
    const struct kv_pq_shape *shape = &job->plan.shape;
    const size_t sums_bytes = kv_pq_centroids_size(shape) * sizeof(float) +
                              kv_pq_table_size(shape) * sizeof(uint32_t);
    const uint32_t n_centroids = (uint32_t)kv_pq_n_centroids(shape);
    struct kv_random random;
    kv_status_t status;

    job->sums_class = kv_arena_class_rounded(heap->arena, sums_bytes);
    job->sums = job->sums_class < 0 ? NULL : kv_arena_alloc(heap->arena, job->sums_class);
    if (job->sums == NULL)
        return KV_NO_MEMORY;
    memset(job->sums, 0, sums_bytes);
    status = kv_codebook_create(&heap->codebooks, shape, &job->codebook);
    if (status != KV_OK)
        return status;
    job->has_codebook = true;
    book_of(indexer, job)->open = job->plan.chapter_blocks == 0;

    job->stride = (job->n_rows + KV_INDEX_SAMPLE_MAX - 1) / KV_INDEX_SAMPLE_MAX;
    job->n_sample = (job->n_rows + job->stride - 1) / job->stride;
    assert(job->n_sample >= n_centroids);
    kv_random_init(&random, job->plan.seed ^ ((uint64_t)job->layer << 48) ^
                                ((uint64_t)job->kv_head << 32) ^ job->block_begin);
    for (uint32_t i = 0, n = 0; n < n_centroids; i++) {
        if (kv_random_below(&random, job->n_sample - i) >= n_centroids - n)
            continue;
        kv_keys_load(job->plan.type, row_at(job, i * job->stride), job->row_bytes, 1, shape->d,
                     indexer->keys);
        kv_pq_set_centroid(shape, book_of(indexer, job)->centroids, n++, indexer->keys);
    }
    kv_pq_half_squares(shape, book_of(indexer, job)->centroids,
                       book_of(indexer, job)->half_squares);
    job->state = job->plan.iterations > 0 ? JOB_LLOYD : JOB_ENCODE;
    return KV_OK;
}

static double sum_of_squares(const float *half_squares, size_t n)
{
    double sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += 2.0 * half_squares[i];
    return sum;
}

/* Some rows to their centroids; behind the last row, the centroids to their rows. */
static void lloyd_slice(struct kv_indexer *indexer, struct job *job, uint64_t begin_us)
{
    const struct kv_pq_shape *shape = &job->plan.shape;
    struct kv_codebook *book = book_of(indexer, job);
    const uint32_t at_once = rows_at_once(job);
    uint32_t n = job->n_sample - job->cursor < at_once ? job->n_sample - job->cursor : at_once;

    for (uint32_t i = 0, run; i < n; i += run) {
        uint32_t row = (job->cursor + i) * job->stride;

        run = (KV_BLOCK_TOKENS - row % KV_BLOCK_TOKENS + job->stride - 1) / job->stride;
        if (run > n - i)
            run = n - i;
        kv_keys_load(job->plan.type, row_at(job, row), (size_t)job->row_bytes * job->stride,
                     run, shape->d, indexer->keys + (size_t)i * shape->d);
    }
    kv_pq_encode(shape, book->centroids, book->half_squares, indexer->keys, n, indexer->codes,
                 n);
    kv_pq_accumulate(shape, indexer->keys, n, indexer->codes, n, job->sums, counts_of(job));
    job->cursor += n;
    if (job->cursor < job->n_sample)
        return;

    double moved = kv_pq_update(shape, job->sums, counts_of(job), book->centroids);
    kv_pq_half_squares(shape, book->centroids, book->half_squares);
    memset(job->sums, 0,
           kv_pq_centroids_size(shape) * sizeof(float) +
               kv_pq_table_size(shape) * sizeof(uint32_t));
    job->cursor = 0;
    book->iterations++;
    uint64_t spent_us = book->train_us + kv_clock_now(indexer->clock) - begin_us;
    if (book->iterations >= job->plan.iterations ||
        (job->plan.budget_us > 0 && spent_us >= job->plan.budget_us) ||
        !(moved > TOLERANCE * sum_of_squares(book->half_squares, kv_pq_table_size(shape))))
        job->state = JOB_ENCODE;
}

/* Some rows of a segment; true behind the last. */
static kv_status_t encode_slice(struct kv_indexer *indexer, struct job *job, bool *ret_done)
{
    struct kv_segment *segment = job->segments[job->cursor];
    uint32_t n_rows = job->n_rows - job->cursor * KV_BLOCK_TOKENS;
    uint32_t begin = segment->n_coded, end = begin + rows_at_once(job);
    kv_status_t status;

    *ret_done = segment->refs == 0; /* nobody has this one any more, nor those behind it */
    if (*ret_done)
        return KV_OK;
    if (n_rows > KV_BLOCK_TOKENS)
        n_rows = KV_BLOCK_TOKENS;
    if (end > n_rows)
        end = n_rows;
    status = kv_segment_encode(indexer->heap, segment, job->codebook, job->plan.type,
                               job->row_bytes, end);
    if (status != KV_OK)
        return status;
    indexer->stats.rows_coded += end - begin;
    job->cursor += end == n_rows;
    *ret_done = job->cursor == job->n_segments;
    return KV_OK;
}

/* Somebody still has as many of its first segments as he would get codes for. */
static bool is_wanted(const struct job *job)
{
    uint32_t least = job->plan.chapter_blocks == 0 ? 1 : KV_CHAPTER_BLOCKS_MIN;

    assert(least <= job->n_segments);
    return job->segments[least - 1]->refs > 0;
}

static void drop(struct kv_indexer *indexer, struct job **link)
{
    indexer->stats.dropped++;
    job_end(indexer, link);
}

/* Jobs far from their turn have segments pinned: some of them are looked at in each step. */
static void drop_unwanted(struct kv_indexer *indexer)
{
    for (unsigned i = 0; i < JOBS_PER_LOOK; i++) {
        if (*indexer->looked == NULL)
            indexer->looked = &indexer->first;
        if (*indexer->looked == NULL)
            return;
        if (is_wanted(*indexer->looked))
            indexer->looked = &(*indexer->looked)->next;
        else
            drop(indexer, indexer->looked);
    }
}

bool kv_indexer_step(struct kv_indexer *indexer)
{
    struct job *job = indexer->first;
    kv_status_t status = KV_OK;
    bool done = false;

    if (job == NULL)
        return false;
    if (!is_wanted(job)) {
        drop(indexer, &indexer->first);
        return true;
    }
    uint64_t begin_us = kv_clock_now(indexer->clock);
    if (job->state == JOB_QUEUED)
        status = seed_job(indexer, job);
    else if (job->state == JOB_LLOYD)
        lloyd_slice(indexer, job, begin_us);
    else
        status = encode_slice(indexer, job, &done);
    uint64_t spent_us = kv_clock_now(indexer->clock) - begin_us;
    indexer->stats.worked_us += spent_us;
    if (job->has_codebook)
        book_of(indexer, job)->train_us += spent_us;
    if (done)
        indexer->stats.trained++;
    if (status != KV_OK)
        indexer->stats.failed++;
    if (done || status != KV_OK)
        job_end(indexer, &indexer->first);
    drop_unwanted(indexer);
    return true;
}

bool kv_indexer_take_ended(struct kv_indexer *indexer)
{
    bool ended = indexer->ended;

    indexer->ended = false;
    return ended;
}

void kv_indexer_stats(const struct kv_indexer *indexer, struct kv_indexer_stats *ret_stats)
{
    *ret_stats = indexer->stats;
}
