/* Which index jobs a unit needs, and the state of its index (builder.h). */
#include "kvserver/store/index/builder_private.h"
#include "kvserver/store/index/encode.h"
#include "kvserver/store/index/kept.h"
#include "kvserver/store/index/scorer.h"

#include <assert.h>

static bool is_training(const struct kvs_unit *unit, uint32_t block)
{
    return kvs_unit_segment(unit, block)->training;
}

static bool is_bare(const struct kvs_unit *unit, uint32_t block)
{
    return kvs_unit_codes(unit, block)->column.bytes == NULL && !is_training(unit, block);
}

/* Returns whether an index job works on the segment, or begins with it. */
static bool has_job(const struct kvs_unit *unit, uint32_t block)
{
    return is_training(unit, block) || kvs_unit_segment(unit, block)->begins_job;
}

/* Queues a job; none to recall what nobody can have kept, or less than a chapter. */
static kv_status_t job_create(struct kvs_indexer *indexer,
                              const struct kvs_unit *unit,
                              uint32_t begin,
                              uint32_t row_end,
                              const struct kvs_index_plan *plan,
                              enum kvs_index_job_kind kind)
{
    if (kind == KVS_INDEX_JOB_RECALL) {
        const uint32_t end = row_end / KV_BLOCK_TOKENS;

        row_end = end * KV_BLOCK_TOKENS;
        while (begin < end && !kvs_kept_may_have(kvs_indexer_books(indexer),
                                                 kvs_unit_block(unit, begin), unit->at))
            begin++;
        if (end - begin < KV_CHAPTER_BLOCKS_MIN)
            return KV_OK;
    }
    return kvs_index_job_create(indexer, unit, begin, row_end, plan, kind);
}

/* Queues a job for one codebook of all rows.  It is made once, by the first request; later rows
 * get their codes from queries. */
static kv_status_t cut_whole(struct kvs_indexer *indexer,
                             const struct kvs_unit *unit,
                             uint32_t tokens,
                             const struct kvs_index_plan *plan,
                             enum kvs_index_job_kind kind)
{
    uint32_t n_blocks = kvs_blocks_for(tokens), begin = n_blocks;

    while (begin > 0 && is_bare(unit, begin - 1))
        begin--;
    if (begin > 0) {
        const struct kvs_codes *before = kvs_unit_codes(unit, begin - 1);
        if (is_training(unit, begin - 1) ||
            kvs_codebook_at(kvs_indexer_books(indexer), before->codebook)->open)
            return KV_OK;
    }
    /* Too few rows for a codebook: no index, as in PQCache's code. */
    if (!kvs_index_is_enough(plan, begin, tokens))
        return KV_OK;
    return job_create(indexer, unit, begin, tokens, plan, kind);
}

/* Queues jobs for chapters without codes. */
static kv_status_t cut_chapters(struct kvs_indexer *indexer,
                                const struct kvs_unit *unit,
                                uint32_t n_blocks,
                                const struct kvs_index_plan *plan,
                                enum kvs_index_job_kind kind)
{
    kv_status_t status = KV_OK;

    for (uint32_t begin = 0, end; begin < n_blocks && status == KV_OK; begin = end) {
        const uint64_t planned =
            (begin / plan->chapter_blocks + 1) * (uint64_t)plan->chapter_blocks;
        /* What is recalled tells itself where chapters end. */
        const uint32_t chapter_end =
            kind == KVS_INDEX_JOB_RECALL || planned > n_blocks ? n_blocks : (uint32_t)planned;

        for (end = begin; end < chapter_end && is_bare(unit, end); end++)
            ;
        if (end - begin >= KV_CHAPTER_BLOCKS_MIN)
            status = job_create(indexer, unit, begin, end * KV_BLOCK_TOKENS, plan, kind);
        if (end == begin)
            end++;
    }
    return status;
}

/* Queues jobs for summaries of chapters that have codes. */
static kv_status_t cut_late(struct kvs_indexer *indexer,
                            const struct kvs_unit *unit,
                            uint32_t n_blocks,
                            const struct kvs_index_plan *plan)
{
    kv_status_t status = KV_OK;

    for (uint32_t begin = 0, end; begin < n_blocks && status == KV_OK; begin = end) {
        const struct kvs_codes *codes = kvs_unit_codes(unit, begin);

        end = begin + 1;
        if (!codes->in_chapter)
            continue;
        const struct kvs_codebook *book =
            kvs_codebook_at(kvs_indexer_books(indexer), codes->codebook);
        end = kvs_unit_chapter_end(unit, begin, n_blocks);
        if (begin != book->block_begin || has_job(unit, begin) || book->is_broken)
            continue;
        uint32_t n_rows =
            kvs_summaries_are(&book->summaries, plan->summaries_bits, plan->summaries_rows) &&
                    book->summaries.shape.d_v == plan->d_v
                ? book->summaries.n_rows
                : 0;
        if ((end - begin) * KV_BLOCK_TOKENS > n_rows)
            status = kvs_index_job_create(indexer, unit, begin, end * KV_BLOCK_TOKENS, plan,
                                          KVS_INDEX_JOB_LATE);
    }
    return status;
}

kv_status_t kvs_index_schedule(struct kvs_indexer *indexer,
                               const struct kvs_unit *unit,
                               uint32_t tokens,
                               const struct kvs_index_plan *plan)
{
    const uint32_t n_blocks = tokens / KV_BLOCK_TOKENS;
    kv_status_t status;

    assert(tokens <= unit->committed);
    status = plan->chapter_blocks == 0
                 ? cut_whole(indexer, unit, tokens, plan, KVS_INDEX_JOB_NEW)
                 : cut_chapters(indexer, unit, n_blocks, plan, KVS_INDEX_JOB_NEW);
    if (status == KV_OK && plan->summaries_bits != 0)
        status = cut_late(indexer, unit, n_blocks, plan);
    return status;
}

bool kvs_index_schedule_recall(struct kvs_indexer *indexer,
                               const struct kvs_unit *unit,
                               uint32_t tokens,
                               const struct kvs_index_plan *plan)
{
    const uint32_t n_jobs = kvs_indexer_n_jobs(indexer, unit->session);

    if (!kvs_kept_has_tier(kvs_indexer_books(indexer)))
        return false;
    if (plan->chapter_blocks == 0)
        (void)cut_whole(indexer, unit, tokens, plan, KVS_INDEX_JOB_RECALL);
    else
        (void)cut_chapters(indexer, unit, tokens / KV_BLOCK_TOKENS, plan, KVS_INDEX_JOB_RECALL);
    return kvs_indexer_n_jobs(indexer, unit->session) > n_jobs;
}

kv_status_t
kvs_index_repair(struct kvs_indexer *indexer, const struct kvs_unit *unit, uint32_t block)
{
    const struct kvs_codes *codes = kvs_unit_codes(unit, block);

    if (!codes->in_chapter || has_job(unit, block))
        return KV_OK;
    struct kvs_codebook *book = kvs_codebook_at(kvs_indexer_books(indexer), codes->codebook);
    const uint32_t end = kvs_unit_chapter_end(unit, block, unit->committed / KV_BLOCK_TOKENS);
    const uint32_t n_rows = (end - block) * KV_BLOCK_TOKENS;
    const bool wants_cells = kvs_codebook_can_mend_cells(book, n_rows);
    const bool wants_summaries = kvs_codebook_can_mend_summaries(book, n_rows);
    struct kvs_index_plan plan = book->n_summaries_lost > 0 ? book->lost_plan : book->plan;

    if (block != book->block_begin || book->is_broken || (!wants_cells && !wants_summaries))
        return KV_OK;
    if (!wants_summaries)
        plan.summaries_bits = 0;
    return kvs_index_job_create(indexer, unit, block, block * KV_BLOCK_TOKENS + n_rows, &plan,
                                KVS_INDEX_JOB_LATE);
}

bool kvs_index_is_enough(const struct kvs_index_plan *plan, uint32_t block, uint32_t tokens)
{
    const uint32_t first = block * KV_BLOCK_TOKENS;
    const uint32_t least = plan->chapter_blocks > 0
                               ? (uint32_t)KV_CHAPTER_BLOCKS_MIN * KV_BLOCK_TOKENS
                               : kvs_scorer_at(plan->scorer)->n_rows_least(&plan->shape);

    return tokens >= first && tokens - first >= least;
}

kv_status_t kvs_index_replace(struct kvs_indexer *indexer,
                              const struct kvs_unit *unit,
                              uint32_t block,
                              uint32_t tokens,
                              const struct kvs_index_plan *plan)
{
    assert(kvs_index_is_enough(plan, block, tokens));
    for (uint32_t i = block; i * KV_BLOCK_TOKENS < tokens; i++)
        assert(kvs_codebook_at(kvs_indexer_books(indexer), kvs_unit_codes(unit, i)->codebook)
                   ->is_broken);
    return kvs_index_job_create(indexer, unit, block, tokens, plan, KVS_INDEX_JOB_REPLACE);
}

bool kvs_index_look_on(const struct kvs_codebooks *books,
                       const struct kvs_unit *unit,
                       uint32_t tokens,
                       uint64_t serial,
                       uint32_t most,
                       struct kvs_index_look *look)
{
    const uint32_t n_blocks = kvs_blocks_for(tokens);

    for (; most > 0 && look->n_blocks < n_blocks; most--, look->n_blocks++) {
        const struct kvs_segment *segment = kvs_unit_segment(unit, look->n_blocks);
        const struct kvs_codes *codes = kvs_unit_codes(unit, look->n_blocks);

        look->n_pending += segment->begins_job;
        if (codes->column.bytes == NULL)
            continue;
        look->n_coded +=
            kvs_segment_coded(books, codes, tokens - look->n_blocks * KV_BLOCK_TOKENS);
        const struct kvs_codebook *book = kvs_codebook_at(books, codes->codebook);
        if (book->serial == look->last_serial || segment->training)
            continue; /* counted, or still in progress */
        look->last_serial = book->serial;
        if (book->serial <= serial) {
            look->n_old++;
        } else {
            look->n_new++;
            look->iterations += book->iterations;
            look->train_us += book->train_us;
        }
    }
    if (look->n_blocks < n_blocks)
        return false;
    look->n_blocks = 0;
    look->last_serial = 0;
    return true;
}

uint32_t kvs_index_find_pending(const struct kvs_unit *unit, uint32_t block, uint32_t end)
{
    while (block < end && !kvs_unit_segment(unit, block)->begins_job)
        block++;
    return block;
}
