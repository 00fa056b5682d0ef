#include "kvserver/store/index/builder_private.h"

#include "kvserver/base/slice.h"
#include "kvserver/store/index/encode.h"
#include "kvserver/store/index/job_queue.h"
#include "kvserver/store/index/kept.h"
#include "kvserver/store/index/learnt.h"
#include "kvserver/store/index/scorer.h"
#include "kvserver/store/rows/arena.h"
#include "kvserver/store/rows/residency.h"
#include "kvserver/store/rows/verify.h"

#include <assert.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum {
    PIECE_BLOCKS = 8, /* whose rows are listed by item at a time: some us */
    KEPT_BLOCKS = 4,  /* whose codes are copied to be kept at a time: some 10 us */
    JOBS_PER_LOOK = 16,
    AGAIN_US = 500,   /* between two looks for memory */
    ROOM_US = 500000, /* that a job waits for memory */
};

struct kvs_indexer {
    struct kvs_codebooks *books;
    const struct kv_clock *clock;
    struct kv_pool *jobs;
    struct kvs_job_queue *queue;
    struct kvs_indexer_stats stats;
    struct kvs_summariser summariser; /* of the job at work, in KVS_JOB_SUMMARIES */
};

static_assert(offsetof(struct kvs_index_job, queued) == 0, "NULL, too, can be cast");

static struct kvs_index_job *job_of(struct kvs_queued_job *queued)
{
    return (struct kvs_index_job *)queued;
}

static struct kvs_index_job *job_at_work(const struct kvs_indexer *indexer)
{
    return job_of(kvs_job_queue_at_work(indexer->queue));
}

struct kvs_indexer *kvs_indexer_create(struct kvs_codebooks *books,
                                       const struct kv_clock *clock,
                                       uint32_t n_sessions)
{
    struct kvs_indexer *indexer = calloc(1, sizeof(*indexer));

    if (indexer == NULL)
        return NULL;
    indexer->books = books;
    indexer->clock = clock;
    indexer->queue = kvs_job_queue_create(n_sessions);
    indexer->jobs = kv_pool_create(KVS_INDEX_JOBS_MAX, sizeof(struct kvs_index_job));
    if (indexer->jobs == NULL || indexer->queue == NULL) {
        kvs_indexer_destroy(indexer);
        return NULL;
    }
    return indexer;
}

struct kvs_codebooks *kvs_indexer_books(const struct kvs_indexer *indexer)
{
    return indexer->books;
}

static struct kvs_codebook *book_of(const struct kvs_indexer *indexer,
                                    const struct kvs_index_job *job)
{
    return kvs_codebook_at(indexer->books, job->codebook);
}

static const struct kvs_scorer_ops *scorer_of(const struct kvs_index_job *job)
{
    return kvs_scorer_at(job->plan.scorer);
}

/* ---- jobs -------------------------------------------------------------------------------- */

/* Whether it waits for what a tier has kept, or takes it. */
static bool is_recalling(const struct kvs_index_job *job)
{
    return job->state == KVS_JOB_RECALL || job->state == KVS_JOB_RECALL_CHAPTER ||
           job->state == KVS_JOB_RECALL_CODES || job->state == KVS_JOB_TAKE_CODES ||
           job->state == KVS_JOB_RECALL_SUMMARIES;
}

/* A job that replaces a broken codebook ends before all segments have codes of the new one: no
 * query uses these either, until a job replaces both. */
static void give_up_replacing(struct kvs_indexer *indexer, const struct kvs_index_job *job)
{
    struct kvs_codebook *book = book_of(indexer, job);

    book->is_broken = true;
    book->n_most = job->n_rows / KV_BLOCK_TOKENS;
}

static void job_end(struct kvs_indexer *indexer, struct kvs_index_job *job)
{
    struct kvs_arena *arena = indexer->books->store->arena;

    if (job->replaces && job->state == KVS_JOB_ENCODE)
        give_up_replacing(indexer, job);

    kvs_job_queue_remove(indexer->queue, &job->queued);
    if (is_recalling(job))
        kvs_recall_end(indexer->books);
    if (job->state == KVS_JOB_SUMMARIES)
        kvs_summarise_drop(&indexer->summariser);
    job->blocks[0]->segments[job->at].begins_job = false;
    for (uint32_t i = 0; i < job->n_segments; i++) {
        if (!job->is_late)
            job->blocks[i]->segments[job->at].training = false;
        kvs_block_unpin(indexer->books->store, job->blocks[i]);
    }
    if (job->before != NULL)
        kvs_block_unpin(indexer->books->store, job->before);
    kvs_arena_free(arena, job->blocks_class, job->blocks);
    if (job->training != NULL)
        kvs_arena_free(arena, job->training_class, job->training);
    kvs_column_drop(&job->lists_column, arena);
    if (job->has_codebook)
        kvs_codebook_unref(indexer->books, job->codebook);
    kv_pool_put(indexer->jobs, job);
}

void kvs_indexer_destroy(struct kvs_indexer *indexer)
{
    if (indexer == NULL)
        return;
    if (indexer->queue != NULL)
        while (kvs_job_queue_first(indexer->queue) != NULL)
            job_end(indexer, job_of(kvs_job_queue_first(indexer->queue)));
    kv_pool_destroy(indexer->jobs);
    kvs_job_queue_destroy(indexer->queue);
    free(indexer);
}

kv_status_t kvs_index_job_create(struct kvs_indexer *indexer,
                                 const struct kvs_unit *unit,
                                 uint32_t block_begin,
                                 uint32_t row_end,
                                 const struct kvs_index_plan *plan,
                                 enum kvs_index_job_kind kind)
{
    const bool is_late = kind == KVS_INDEX_JOB_LATE;
    struct kvs_arena *arena = indexer->books->store->arena;
    uint32_t first = block_begin * KV_BLOCK_TOKENS, n_rows = row_end - first;
    uint32_t n_segments = kvs_blocks_for(n_rows);
    const size_t list_bytes = n_segments * sizeof(struct kvs_block *);
    const struct kv_writers *writers = unit->writers != NULL ? *unit->writers : NULL;
    const size_t runs_bytes =
        writers != NULL ? kv_writers_slice_bytes(writers, first, row_end) : 0;
    int class_id = kvs_arena_class_rounded(arena, list_bytes + runs_bytes);

    if (class_id < 0)
        return KV_NO_MEMORY;
    for (uint32_t i = 0; i < n_segments && kind != KVS_INDEX_JOB_RECALL; i++)
        if (!kvs_unit_is_here(unit, block_begin + i))
            return KV_NOT_READY;
    /* Whatever one session queues, others may queue as much. */
    if (kvs_job_queue_n_of(indexer->queue, unit->session) >=
        KVS_INDEX_JOBS_MAX - kv_pool_used(indexer->jobs))
        return KV_BUSY;
    struct kvs_index_job *job = kv_pool_get(indexer->jobs);
    if (job == NULL)
        return KV_BUSY;
    struct kvs_block **blocks = kvs_arena_alloc(arena, class_id);
    if (blocks == NULL) {
        kv_pool_put(indexer->jobs, job);
        return KV_NO_MEMORY;
    }
    *job = (struct kvs_index_job){
        .plan = *plan,
        .blocks = blocks,
        .blocks_class = class_id,
        .n_segments = n_segments,
        .at = unit->at,
        .n_rows = n_rows,
        .row_bytes = unit->row_bytes,
        .layer = unit->layer,
        .kv_head = unit->kv_head,
        .block_begin = block_begin,
        .is_late = is_late,
        .is_mixed = unit->blocks->is_mixed,
        .replaces = kind == KVS_INDEX_JOB_REPLACE,
        .is_recall = kind == KVS_INDEX_JOB_RECALL,
    };
    if (writers != NULL) {
        job->writers = (struct kv_writers *)(void *)(blocks + n_segments);
        kv_writers_slice(writers, first, row_end, job->writers);
    }
    for (uint32_t i = 0; i < n_segments; i++) {
        blocks[i] = kvs_unit_block(unit, block_begin + i);
        assert(blocks[i]->pins < UINT32_MAX);
        blocks[i]->pins++;
        if (job->is_recall)
            kvs_block_need_columns(indexer->books->store, blocks[i]);
        if (!is_late)
            blocks[i]->segments[job->at].training = true;
    }
    blocks[0]->segments[job->at].begins_job = true;
    if (plan->rotates && !is_late && block_begin > 0) {
        job->before = kvs_unit_block(unit, block_begin - 1);
        assert(job->before->pins < UINT32_MAX);
        job->before->pins++;
        kvs_block_need_columns(indexer->books->store, job->before);
    }
    if (is_late) {
        job->has_codebook = true;
        job->codebook = kvs_block_codes(blocks[0], job->at)->codebook;
        kvs_codebook_ref(indexer->books, job->codebook);
        job->wants_lists = kvs_codebook_can_mend_cells(book_of(indexer, job), n_rows);
    }
    kvs_job_queue_append(indexer->queue, &job->queued, unit->session);
    return KV_OK;
}

/* ---- pieces of some us: each advances job->cursor or job->state -------------------------- */

static const struct kvs_codes *codes_at(const struct kvs_index_job *job, uint32_t i)
{
    return kvs_block_codes(job->blocks[i], job->at);
}

bool kvs_job_rows_are_good(struct kvs_codebooks *books,
                           const struct kvs_index_job *job,
                           uint32_t first,
                           uint32_t stride,
                           uint32_t n)
{
    const struct kvs_row_set rows = {
        .blocks = job->blocks,
        .at = job->at,
        .block = job->block_begin,
        .row_bytes = job->row_bytes,
        .layer = job->layer,
        .kv_head = job->kv_head,
        .writers = job->writers,
    };

    return kvs_verify_run(books->store, &rows, job->block_begin * KV_BLOCK_TOKENS + first,
                          stride, n) == n;
}
/* ---- what was learnt ---------------------------------------------------------------------- */

static kv_status_t begin_codebook(struct kvs_indexer *indexer, struct kvs_index_job *job)
{
    struct kvs_codebook *book;
    kv_status_t status;

    /* The chapter before has a job of another session, which comes first. */
    if (job->plan.rotates && job->before != NULL && job->before->segments[job->at].training) {
        const uint32_t session = job->queued.session;

        kvs_job_queue_remove(indexer->queue, &job->queued);
        kvs_job_queue_append(indexer->queue, &job->queued, session);
        return KV_IN_PROGRESS;
    }
    status = kvs_codebook_create(indexer->books, &job->plan, &job->codebook);
    if (status != KV_OK)
        return status;
    job->has_codebook = true;
    book = book_of(indexer, job);
    book->open = job->plan.chapter_blocks == 0;
    book->block_begin = job->block_begin;
    book->n_blocks = job->n_segments;
    book->is_mixed = job->is_mixed;
    job->state = job->is_recall ? KVS_JOB_RECALL_CHAPTER : KVS_JOB_RECALL;
    return KV_OK;
}

/* Uses what was learnt of the rows by an earlier job, if somebody has kept it. */
static kv_status_t recall(struct kvs_indexer *indexer, struct kvs_index_job *job)
{
    const bool ends_block = job->n_rows % KV_BLOCK_TOKENS == 0;
    const kv_status_t status =
        ends_block
            ? kvs_learnt_recall(
                  indexer->books, job->codebook, job->blocks[job->n_segments - 1], job->at,
                  job->plan.rotates ? kvs_job_rotation_before(indexer->books, job) : NULL)
            : KV_NOT_FOUND;

    if (status == KV_IN_PROGRESS)
        return status;
    if (status == KV_NOT_FOUND && job->is_recall)
        return status;
    if (status == KV_NOT_FOUND) {
        job->state = KVS_JOB_LEARN;
        return KV_OK;
    }
    job->has_recalled = true;
    job->cursor = 0;
    job->state = job->is_recall ? KVS_JOB_RECALL_CODES : KVS_JOB_ENCODE;
    return KV_OK;
}

/* Releases the job's segments from `first` on. */
static void release_from(struct kvs_indexer *indexer, struct kvs_index_job *job, uint32_t first)
{
    for (uint32_t i = first; i < job->n_segments; i++) {
        job->blocks[i]->segments[job->at].training = false;
        kvs_block_unpin(indexer->books->store, job->blocks[i]);
    }
}

/* Cuts the job to its first n segments.  Another recall job gets the rest, if it is a chapter and there is
 * memory. */
static void divide(struct kvs_indexer *indexer, struct kvs_index_job *job, uint32_t n)
{
    struct kvs_arena *arena = indexer->books->store->arena;
    const uint32_t n_others = job->n_segments - n;
    const int class_id = kvs_arena_class_rounded(arena, n_others * sizeof(job->blocks[0]));
    struct kvs_index_job *other =
        n_others >= KV_CHAPTER_BLOCKS_MIN ? kv_pool_get(indexer->jobs) : NULL;
    struct kvs_block **blocks =
        other != NULL && class_id >= 0 ? kvs_arena_alloc(arena, class_id) : NULL;

    if (blocks != NULL) {
        *other = (struct kvs_index_job){
            .plan = job->plan,
            .blocks = memcpy(blocks, job->blocks + n, n_others * sizeof(blocks[0])),
            .blocks_class = class_id,
            .n_segments = n_others,
            .at = job->at,
            .n_rows = n_others * KV_BLOCK_TOKENS,
            .row_bytes = job->row_bytes,
            .layer = job->layer,
            .kv_head = job->kv_head,
            .block_begin = job->block_begin + n,
            .is_mixed = job->is_mixed,
            .is_recall = true,
        };
        blocks[0]->segments[job->at].begins_job = true;
        if (job->plan.rotates) {
            other->before = job->blocks[n - 1];
            other->before->pins++;
        }
        kvs_job_queue_append(indexer->queue, &other->queued, job->queued.session);
    } else {
        if (other != NULL)
            kv_pool_put(indexer->jobs, other);
        release_from(indexer, job, n);
    }
    job->n_segments = n;
    job->n_rows = n * KV_BLOCK_TOKENS;
}

/* There are no codes where the job begins: where the plan has its next chapter there may be. */
static void skip_chapter(struct kvs_indexer *indexer, struct kvs_index_job *job)
{
    const uint32_t chapter = job->plan.chapter_blocks;
    const uint32_t n = chapter > 0 ? chapter - job->block_begin % chapter : job->n_segments;

    if (n < job->n_segments)
        divide(indexer, job, n);
}

/* Waits for the codes of the first segment, which tell how long the chapter was. */
static kv_status_t recall_chapter(struct kvs_indexer *indexer, struct kvs_index_job *job)
{
    struct kvs_codebook *book = book_of(indexer, job);
    const struct kvs_columns_asked asked = kvs_kept_first(book, job->blocks, job->at);
    const kv_status_t status = kvs_kept_recall(indexer->books, &asked);
    struct kvs_recalled first;

    if (status == KV_NOT_FOUND)
        skip_chapter(indexer, job);
    if (status != KV_OK)
        return status;
    first = kvs_kept_at(indexer->books, 0);
    kvs_recall_end(indexer->books);
    if (first.block_begin != job->block_begin || first.n_blocks < KV_CHAPTER_BLOCKS_MIN ||
        first.n_blocks > job->n_segments) {
        skip_chapter(indexer, job);
        return KV_NOT_FOUND;
    }
    if (first.n_blocks < job->n_segments)
        divide(indexer, job, first.n_blocks);
    book->n_blocks = job->n_segments;
    job->state = KVS_JOB_RECALL;
    return KV_OK;
}

/* Waits for the chapter's codes: all of them, or none are taken. */
static kv_status_t recall_codes(struct kvs_indexer *indexer, struct kvs_index_job *job)
{
    const struct kvs_columns_asked asked =
        kvs_kept_codes(book_of(indexer, job), job->blocks, job->n_segments, job->at);
    const kv_status_t status = kvs_kept_recall(indexer->books, &asked);

    if (status == KV_OK)
        job->state = KVS_JOB_TAKE_CODES;
    return status;
}

/* Gives a segment its codes. */
static kv_status_t
take_piece(struct kvs_indexer *indexer, struct kvs_index_job *job, bool *ret_done)
{
    struct kvs_block *block = job->blocks[job->cursor];
    kv_status_t status = KV_OK;

    *ret_done = block->refs == 0; /* no unit has this segment, nor those after it */
    if (*ret_done)
        return KV_OK;
    kvs_block_need_columns(indexer->books->store, block);
    status = kvs_segment_set_codes(indexer->books, block, job->at, job->codebook,
                                   kvs_kept_at(indexer->books, job->cursor).bytes);
    job->cursor += status == KV_OK;
    *ret_done = job->cursor == job->n_segments;
    return status;
}

/* ---- codes ------------------------------------------------------------------------------- */

static bool has_codes_of_another(const struct kvs_codes *codes, uint32_t codebook)
{
    return codes->column.bytes != NULL && codes->codebook != codebook;
}

/* Encodes some rows of a segment.  *ret_done is true after the last segment.  A segment keeps the
 * codes of a broken codebook until its rows are verified: a job that fails leaves them. */
static kv_status_t
encode_piece(struct kvs_indexer *indexer, struct kvs_index_job *job, bool *ret_done)
{
    struct kvs_block *block = job->blocks[job->cursor];
    const struct kvs_codes *codes = codes_at(job, job->cursor);
    uint32_t n_rows = job->n_rows - job->cursor * KV_BLOCK_TOKENS;
    uint32_t begin, end;
    kv_status_t status;

    *ret_done = block->refs == 0; /* no unit has this segment, nor those after it */
    if (*ret_done)
        return KV_OK;
    const bool has_old = job->replaces && has_codes_of_another(codes, job->codebook);
    begin = has_old ? 0 : codes->n_coded;
    end = begin + scorer_of(job)->rows_at_once(&job->plan.shape);
    if (n_rows > KV_BLOCK_TOKENS)
        n_rows = KV_BLOCK_TOKENS;
    if (end > n_rows)
        end = n_rows;
    if (!kvs_job_rows_are_good(indexer->books, job, job->cursor * KV_BLOCK_TOKENS + begin, 1,
                               (has_old ? n_rows : end) - begin))
        return KV_CORRUPT;
    if (has_old) {
        /* Queries may be in progress, which began when this codebook was broken already. */
        assert(kvs_codebook_at(indexer->books, codes->codebook)->is_broken);
        kvs_segment_drop_codes(indexer->books, block, job->at);
    }
    status = kvs_segment_encode(indexer->books, block, job->at, job->codebook, job->plan.type,
                                job->row_bytes, end);
    if (status != KV_OK)
        return status;
    indexer->stats.rows_coded += end - begin;
    if (end == KV_BLOCK_TOKENS)
        kvs_block_codes_make(indexer->books->store, block, job->at)->in_chapter = true;
    job->cursor += end == n_rows;
    *ret_done = job->cursor == job->n_segments;
    return KV_OK;
}

/* ---- lists of rows by item -------------------------------------------------------------- */

/* Returns the number of rows in the full segments at the chapter's beginning. */
static uint32_t rows_in_chapter(const struct kvs_index_job *job)
{
    uint32_t n_full = 0;

    while (n_full < job->n_segments && codes_at(job, n_full)->in_chapter &&
           codes_at(job, n_full)->codebook == job->codebook)
        n_full++;
    return n_full * KV_BLOCK_TOKENS;
}

/* Allocates lists.  Returns false if they do not pay, or if there is no memory. */
static bool begin_lists(struct kvs_indexer *indexer, struct kvs_index_job *job)
{
    const struct kvs_codebook *book = book_of(indexer, job);

    job->lists =
        (struct kvs_item_lists){.shape = &job->plan.shape, .n_rows = rows_in_chapter(job)};
    job->cursor = 0;
    if (!kvs_codebook_alloc_lists(indexer->books, book, &job->lists.n_rows, &job->lists_column))
        return false;
    job->lists.memory = job->lists_column.bytes;
    return true;
}

/* All segments that are left have their codes: lists come next, or summaries. */
static void end_codes(struct kvs_indexer *indexer, struct kvs_index_job *job)
{
    const uint32_t n_full = rows_in_chapter(job) / KV_BLOCK_TOKENS;

    book_of(indexer, job)->n_most = n_full;
    if (job->replaces)
        indexer->books->store->health.mended[KVS_KIND_CENTROIDS]++;
    if (n_full == job->n_segments && !job->has_recalled)
        kvs_learnt_keep(indexer->books, job->blocks[n_full - 1], job->at);
    job->state = begin_lists(indexer, job) ? KVS_JOB_LISTS : KVS_JOB_SUMMARIES_BEGIN;
}

/* Frees the lists, because some codes are bad, and counts them as lost: they are made later. */
static void give_up_lists(struct kvs_indexer *indexer, struct kvs_index_job *job)
{
    book_of(indexer, job)->n_cells_lost = job->lists.n_rows;
    kvs_column_drop(&job->lists_column, indexer->books->store->arena);
}

/* Passes the finished lists to the codebook. */
static void end_lists(struct kvs_indexer *indexer, struct kvs_index_job *job)
{
    kvs_column_seal(&job->lists_column);
    kvs_codebook_set_lists(indexer->books, job->codebook, &job->lists_column,
                           job->lists.n_rows);
    job->lists_column = (struct kvs_column){0};
    if (job->wants_lists)
        indexer->books->store->health.mended[KVS_KIND_CELLS]++;
    book_of(indexer, job)->n_cells_lost = 0;
}

/* Lists the rows of some segments.  Returns true when all are listed, or the lists have been
 * given up. */
static bool lists_piece(struct kvs_indexer *indexer, struct kvs_index_job *job)
{
    const struct kvs_scorer_ops *scorer = scorer_of(job);
    const uint32_t n_segments = job->lists.n_rows / KV_BLOCK_TOKENS;
    const uint32_t end =
        n_segments - job->cursor < PIECE_BLOCKS ? n_segments : job->cursor + PIECE_BLOCKS;

    for (; job->cursor < end; job->cursor++) {
        const struct kvs_codes *codes = codes_at(job, job->cursor);

        if (!codes->in_chapter || !kvs_column_is_sound(&codes->column)) {
            give_up_lists(indexer, job);
            return true;
        }
        scorer->lists_add(&job->lists, codes->column.bytes, job->cursor * KV_BLOCK_TOKENS);
    }
    if (end < n_segments)
        return false;
    job->cursor = 0;
    if (scorer->lists_pass_end(&job->lists))
        return false;
    end_lists(indexer, job);
    return true;
}

/* ---- summaries --------------------------------------------------------------------------- */

/* Allocates summaries.  *ret_done is true if the chapter gets none. */
static kv_status_t
begin_summaries(struct kvs_indexer *indexer, struct kvs_index_job *job, bool *ret_done)
{
    const struct kv_summary_shape shape = kvs_plan_summaries(&job->plan);
    const uint32_t n_rows = job->plan.summaries_bits > 0 ? rows_in_chapter(job) : 0;
    kv_status_t status;

    *ret_done = n_rows == 0;
    if (n_rows == 0)
        return KV_OK;
    if (job->is_recall) {
        job->state = KVS_JOB_RECALL_SUMMARIES;
        return KV_OK;
    }
    status = kvs_summarise_begin(&indexer->summariser, indexer->books->store->arena, &shape,
                                 n_rows, kvs_job_seed(job));
    if (status == KV_OK)
        job->state = KVS_JOB_SUMMARIES;
    return status;
}

/* Makes some summaries.  *ret_done is true when the codebook has them all. */
static kv_status_t
summaries_piece(struct kvs_indexer *indexer, struct kvs_index_job *job, bool *ret_done)
{
    struct kvs_codebook *book = book_of(indexer, job);
    uint32_t first, n;

    kvs_summarise_next(&indexer->summariser, &first, &n);
    if (!kvs_job_rows_are_good(indexer->books, job, first, 1, n))
        return KV_CORRUPT;
    *ret_done = !kvs_summarise_piece(&indexer->summariser,
                                     n > 0 ? kvs_job_row(job, first) : NULL, job->row_bytes);
    if (!*ret_done)
        return KV_OK;
    struct kvs_summaries made = kvs_summarise_end(&indexer->summariser);
    made.seed = job->plan.seed;
    kvs_codebook_set_summaries(indexer->books, job->codebook, &made);
    if (book->n_summaries_lost > 0)
        indexer->books->store->health.mended[KVS_KIND_SUMMARIES]++;
    book->n_summaries_lost = 0;
    indexer->stats.rows_summarised += made.n_rows;
    job->state = KVS_JOB_SUMMARIES_BEGIN;
    return KV_OK;
}

/* Waits for the chapter's summaries, and takes them.  *ret_done is true if it has them all, or if they are to
 * be made of its rows. */
static kv_status_t
recall_summaries(struct kvs_indexer *indexer, struct kvs_index_job *job, bool *ret_done)
{
    struct kvs_codebooks *books = indexer->books;
    const struct kv_summary_shape shape = kvs_plan_summaries(&job->plan);
    const uint32_t n_rows = rows_in_chapter(job);
    const struct kvs_columns_asked asked =
        kvs_kept_summaries(book_of(indexer, job), &job->plan, n_rows, job->blocks, job->at);
    struct kvs_summaries summaries;
    kv_status_t status = kvs_kept_recall(books, &asked);

    *ret_done = status == KV_NOT_FOUND;
    if (status == KV_OK)
        status = kvs_summaries_create(books->store->arena, &shape, n_rows, &summaries);
    if (status != KV_OK)
        return *ret_done ? KV_OK : status;
    *ret_done = true;
    summaries.seed = job->plan.seed;
    for (uint32_t i = 0; i < kvs_summaries_n_groups(&summaries); i++) {
        const void *group = kvs_kept_at(books, i).bytes;

        if (!kv_summary_valid(&shape, group)) {
            kvs_summaries_clear(&summaries, books->store->arena);
            return KV_OK;
        }
        memcpy(summaries.groups[i].bytes, group, summaries.groups[i].n_bytes);
        kvs_column_seal(&summaries.groups[i]);
    }
    kvs_codebook_set_summaries(books, job->codebook, &summaries);
    return KV_OK;
}

/* ---- what is kept ------------------------------------------------------------------------ */

/* Has the tier keep what some segments have.  *ret_done is true after the last, or if the tier has had enough to
 * do for too long: the next process makes them again. */
static kv_status_t
keep_piece(struct kvs_indexer *indexer, struct kvs_index_job *job, bool *ret_done)
{
    const uint32_t left = job->n_segments - job->cursor;
    const uint32_t end = job->cursor + (left < KEPT_BLOCKS ? left : KEPT_BLOCKS);

    while (job->cursor < end &&
           kvs_kept_keep(indexer->books, job->blocks[job->cursor], job->at))
        job->cursor++;
    *ret_done = job->cursor == job->n_segments ||
                kv_clock_now(indexer->clock) - job->keeps_us >= ROOM_US;
    return job->cursor < end && !*ret_done ? KV_IN_PROGRESS : KV_OK;
}

/* All is made.  Returns true if nothing is left to do. */
static bool end_making(struct kvs_indexer *indexer, struct kvs_index_job *job)
{
    if (job->is_recall || !kvs_kept_has_tier(indexer->books))
        return true;
    job->cursor = 0;
    job->keeps_us = kv_clock_now(indexer->clock);
    job->state = KVS_JOB_KEEP;
    return false;
}

/* ---- steps ------------------------------------------------------------------------------- */

/* Returns whether a session still has enough of the first blocks for codes or summaries; whether
 * its unit still has rows there is not looked at. */
static bool is_wanted(const struct kvs_index_job *job)
{
    uint32_t least = job->is_late || job->plan.chapter_blocks == 0 ? 1 : KV_CHAPTER_BLOCKS_MIN;

    assert(least <= job->n_segments);
    return job->blocks[least - 1]->refs > 0;
}

static void drop(struct kvs_indexer *indexer, struct kvs_index_job *job)
{
    indexer->stats.dropped++;
    job_end(indexer, job);
}

/* Drops unwanted jobs, a few in each step: jobs far back in the queue would keep segments
 * pinned. */
static void drop_unwanted(struct kvs_indexer *indexer)
{
    for (unsigned i = 0; i < JOBS_PER_LOOK; i++) {
        struct kvs_index_job *job = job_of(kvs_job_queue_look(indexer->queue));

        if (job == NULL)
            return;
        if (!is_wanted(job))
            drop(indexer, job);
    }
}

/* Does a piece of a job, in the slice that began at begin_us.  *ret_done is true after the
 * last.  KV_IN_PROGRESS: it waits for another job, whose turn comes before its own, or for what was
 * learnt earlier. */
static kv_status_t job_piece(struct kvs_indexer *indexer,
                             struct kvs_index_job *job,
                             uint64_t begin_us,
                             bool *ret_done)
{
    kv_status_t status = KV_OK;
    bool done = false;

    switch (job->state) {
    case KVS_JOB_QUEUED:
        if (job->is_late)
            job->state = job->wants_lists && begin_lists(indexer, job)
                             ? KVS_JOB_LISTS
                             : KVS_JOB_SUMMARIES_BEGIN;
        else
            status = begin_codebook(indexer, job);
        break;
    case KVS_JOB_RECALL:
        status = recall(indexer, job);
        break;
    case KVS_JOB_RECALL_CHAPTER:
        status = recall_chapter(indexer, job);
        break;
    case KVS_JOB_RECALL_CODES:
        status = recall_codes(indexer, job);
        break;
    case KVS_JOB_TAKE_CODES:
        status = take_piece(indexer, job, &done);
        if (done) {
            kvs_recall_end(indexer->books);
            end_codes(indexer, job);
        }
        done = false;
        break;
    case KVS_JOB_LEARN:
        status = kvs_job_learn(indexer->books, job);
        break;
    case KVS_JOB_MEAN:
        status = kvs_job_mean(indexer->books, job);
        break;
    case KVS_JOB_COVARIANCE:
        status = kvs_job_covariance(indexer->books, job);
        break;
    case KVS_JOB_DIAGONALIZE:
        status = kvs_job_diagonalize(indexer->books, job);
        break;
    case KVS_JOB_TRAIN:
        status = kvs_job_train(indexer->books, job, indexer->clock, begin_us);
        break;
    case KVS_JOB_ENCODE:
        status = encode_piece(indexer, job, &done);
        if (done)
            end_codes(indexer, job);
        done = false;
        break;
    case KVS_JOB_LISTS:
        if (lists_piece(indexer, job))
            job->state = KVS_JOB_SUMMARIES_BEGIN;
        break;
    case KVS_JOB_SUMMARIES_BEGIN:
        status = begin_summaries(indexer, job, &done);
        done = done && end_making(indexer, job);
        break;
    case KVS_JOB_RECALL_SUMMARIES:
        status = recall_summaries(indexer, job, &done);
        break;
    case KVS_JOB_SUMMARIES:
        status = summaries_piece(indexer, job, &done);
        done = done && end_making(indexer, job);
        break;
    case KVS_JOB_KEEP:
        status = keep_piece(indexer, job, &done);
        break;
    }
    *ret_done = done;
    return status;
}

/* There is no memory for the next piece.  Whether rows of sessions that are used may make room for it,
 * or what else is evictable: the job waits for that, for a while. */
static bool room_comes(const struct kvs_indexer *indexer, struct kvs_index_job *job)
{
    const uint64_t now_us = kv_clock_now(indexer->clock);
    const struct kvs_codebooks *books = indexer->books;

    if (job->lacks_us == 0)
        job->lacks_us = now_us;
    if (kv_pool_used(books->pool) == KVS_CODEBOOKS_MAX ||
        kv_pool_used(books->rotations) == KVS_CODEBOOKS_MAX)
        return false; /* it is not memory that there is too little of */
    return now_us < job->lacks_us + ROOM_US &&
           kvs_pages_want(kvs_arena_pages(indexer->books->store->arena), KVS_ARENA_PAGE);
}

bool kvs_indexer_step(struct kvs_indexer *indexer)
{
    struct kvs_index_job *job = job_at_work(indexer);
    kv_status_t status;
    bool done = false;

    if (job == NULL || (job->lacks_us != 0 && kv_clock_now(indexer->clock) < job->again_us))
        return false;
    if (!is_wanted(job)) {
        drop(indexer, job);
        return true;
    }
    const uint64_t begin_us = kv_clock_now(indexer->clock);
    struct kv_slice slice = kv_slice_begin(indexer->clock, 1);
    do
        status = job_piece(indexer, job, begin_us, &done);
    while (status == KV_OK && !done && is_wanted(job) && !kv_slice_over(&slice));
    uint64_t spent_us = kv_clock_now(indexer->clock) - begin_us;
    indexer->stats.worked_us += spent_us;
    if (job->has_codebook)
        book_of(indexer, job)->train_us += spent_us;
    if (status == KV_IN_PROGRESS && (is_recalling(job) || job->state == KVS_JOB_KEEP)) {
        job->lacks_us = 0;
        drop_unwanted(indexer);
        return false;
    }
    if (status == KV_NO_MEMORY && room_comes(indexer, job)) {
        job->again_us = kv_clock_now(indexer->clock) + AGAIN_US;
        return false;
    }
    job->lacks_us = 0;
    if (status == KV_NO_MEMORY &&
        (job->state == KVS_JOB_SUMMARIES_BEGIN || job->state == KVS_JOB_RECALL_SUMMARIES)) {
        indexer->stats.summaries_failed++;
        status = KV_OK;
        done = end_making(indexer, job);
    }
    if (done && job->has_recalled)
        indexer->stats.recalled++;
    else if (done && !job->is_late)
        indexer->stats.trained++;
    if (status != KV_OK && status != KV_IN_PROGRESS && status != KV_NOT_FOUND)
        indexer->stats.failed++;
    if (done || (status != KV_OK && status != KV_IN_PROGRESS))
        job_end(indexer, job);
    drop_unwanted(indexer);
    return true;
}

bool kvs_indexer_take_ended(struct kvs_indexer *indexer, uint32_t *ret_session)
{
    return kvs_job_queue_take_told(indexer->queue, ret_session);
}

uint32_t kvs_indexer_n_jobs(const struct kvs_indexer *indexer, uint32_t session)
{
    return kvs_job_queue_n_of(indexer->queue, session);
}

void kvs_indexer_watch(struct kvs_indexer *indexer, uint32_t session)
{
    kvs_job_queue_watch(indexer->queue, session);
}

void kvs_indexer_get_stats(const struct kvs_indexer *indexer,
                           struct kvs_indexer_stats *ret_stats)
{
    *ret_stats = indexer->stats;
    ret_stats->n_jobs = kvs_job_queue_n_all(indexer->queue);
}

void kvs_indexer_visit(const struct kvs_indexer *indexer,
                       void (*visit)(void *arg, const struct kvs_index_job_look *look),
                       void *arg)
{
    struct kvs_queued_job *queued = kvs_job_queue_first(indexer->queue);

    for (; queued != NULL; queued = queued->all_next) {
        const struct kvs_index_job *job = job_of(queued);
        const struct kvs_index_job_look look = {
            .blocks = job->blocks,
            .n_blocks = job->n_segments,
            .before = job->before,
            .codebook = job->codebook,
            .has_codebook = job->has_codebook,
        };

        visit(arg, &look);
    }
}

static void check_job(const struct kvs_indexer *indexer, const struct kvs_index_job *job)
{
    const struct kvs_arena *arena = indexer->books->store->arena;

    assert(job->n_segments > 0 && job->n_rows > (job->n_segments - 1) * KV_BLOCK_TOKENS);
    assert(job->n_rows <= job->n_segments * KV_BLOCK_TOKENS);
    assert(kvs_arena_is_in_use(arena, job->blocks_class, job->blocks));
    assert(job->blocks[0]->segments[job->at].begins_job);
    for (uint32_t i = 0; i < job->n_segments; i++)
        assert(job->blocks[i]->pins > 0 &&
               (job->is_late || job->blocks[i]->segments[job->at].training));
    assert(job->before == NULL || (job->before->pins > 0 && job->plan.rotates));
    assert(job->has_codebook == (job->is_late || job->state != KVS_JOB_QUEUED));
    assert(!job->has_codebook || (kv_pool_is_used(indexer->books->pool, job->codebook) &&
                                  book_of(indexer, job)->refs > 0));
    assert((job->lists_column.bytes != NULL) == (job->state == KVS_JOB_LISTS));
    assert(kvs_column_is_in_use(&job->lists_column, arena));
    assert(job->training == NULL ||
           (!job->is_late && job->state != KVS_JOB_QUEUED &&
            kvs_arena_is_in_use(arena, job->training_class, job->training)));
    assert(job == job_at_work(indexer) || job->state == KVS_JOB_QUEUED);
}

void kvs_indexer_check(const struct kvs_indexer *indexer)
{
    struct kvs_queued_job *queued = kvs_job_queue_first(indexer->queue);

    kvs_job_queue_check(indexer->queue);
    assert(kvs_job_queue_n_all(indexer->queue) == kv_pool_used(indexer->jobs));
    for (; queued != NULL; queued = queued->all_next)
        check_job(indexer, job_of(queued));
}
