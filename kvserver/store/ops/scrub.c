#include "kvserver/store/ops/scrub.h"

#include "kernels/checksum.h"
#include "kvserver/base/slice.h"
#include "kvserver/store/index/builder.h"
#include "kvserver/store/index/encode.h"
#include "kvserver/store/index/scorer.h"
#include "kvserver/store/ops/query.h"
#include "kvserver/store/rows/residency.h"
#include "kvserver/store/rows/verify.h"

#include <stdlib.h>

enum {
    PIECE_BYTES = 64 << 10, /* of an object, between two looks at the clock: some us */
    PIECE_SKIPS = 16,       /* places with nothing to check, between two looks */
    SLICE_COST = 4 << 10,   /* minimum cost of a slice, in bytes */
    LAG_US = 200 * 1000,    /* delay that a busy or sleeping thread may catch up */
    PASS_US = 50 * 1000,    /* minimum time between the starts of two passes */
};

struct kvs_scrub {
    struct kvs_shard *shard;
    uint64_t bytes_per_s;
    uint64_t due_us;   /* time of the next slice */
    uint64_t begun_us; /* start of the pass */
    uint16_t pass;     /* number of the pass, never 0 */
    struct kvs_scrub_progress progress;

    uint32_t session, serial, block, unit; /* the next segment: units of a block, one by one */
    uint32_t n_checked;      /* rows that all units of the block so far had, and were checked */
    uint32_t codebook, step; /* the next check of a codebook: see check_codebook() */

    uint32_t piece, at, crc; /* position in the current object, and the CRC so far */
};

/* Moves the cursor to a block. */
static void begin_block(struct kvs_scrub *scrub, uint32_t block)
{
    scrub->block = block;
    scrub->unit = 0;
    scrub->n_checked = KV_BLOCK_TOKENS;
}

struct kvs_scrub *kvs_scrub_create(struct kvs_shard *shard, uint64_t bytes_per_s)
{
    struct kvs_scrub *scrub = calloc(1, sizeof(*scrub));

    if (scrub == NULL)
        return NULL;
    scrub->shard = shard;
    scrub->bytes_per_s = bytes_per_s;
    scrub->begun_us = scrub->due_us = kv_clock_now(shard->clock);
    scrub->pass = 1;
    scrub->serial = shard->sessions[0].serial;
    begin_block(scrub, 0);
    return scrub;
}

void kvs_scrub_destroy(struct kvs_scrub *scrub)
{
    free(scrub);
}

void kvs_scrub_get_progress(const struct kvs_scrub *scrub,
                            struct kvs_scrub_progress *ret_progress)
{
    *ret_progress = scrub->progress;
    ret_progress->session = scrub->session;
}

static struct kvs_codebook *book_of(const struct kvs_scrub *scrub,
                                    const struct kvs_codes *codes)
{
    return kvs_codebook_at(&scrub->shard->codebooks, codes->codebook);
}

/* ---- rows and codes ---------------------------------------------------------------------- */

/* Returns the number of the segment's rows that the unit has. */
static uint32_t rows_of(const struct kvs_unit *unit, uint32_t block)
{
    if (unit->committed <= block * KV_BLOCK_TOKENS)
        return 0;
    const uint32_t n = unit->committed - block * KV_BLOCK_TOKENS;

    return n < KV_BLOCK_TOKENS ? n : KV_BLOCK_TOKENS;
}

static uint64_t check_rows(struct kvs_scrub *scrub, struct kvs_unit *unit, uint32_t block)
{
    const struct kvs_block *of = kvs_unit_block(unit, block);
    const struct kvs_row_set rows = kvs_unit_rows(unit);
    /* Other sessions that share the block were here in this pass. */
    const uint32_t begin = of->pass == scrub->pass ? of->n_checked : 0;
    const uint32_t end = rows_of(unit, block);

    if (begin >= end)
        return 0;
    kvs_verify_run(&scrub->shard->store, &rows, block * KV_BLOCK_TOKENS + begin, 1,
                   end - begin);
    return (uint64_t)(end - begin) * (unit->row_bytes + sizeof(uint32_t));
}

/* Returns whether all rows that have lost their codes are good. */
static bool can_recode(const struct kvs_scrub *scrub, struct kvs_unit *unit, uint32_t block)
{
    const struct kvs_row_set rows = kvs_unit_rows(unit);
    const uint32_t n = kvs_unit_codes(unit, block)->n_lost;

    return rows_of(unit, block) >= n &&
           kvs_verify_run(&scrub->shard->store, &rows, block * KV_BLOCK_TOKENS, 1, n) == n;
}

/* Verifies the codes of a segment that has no index job.  Lost codes are made again here if the rows
 * are in memory, unless their codebook is broken: mend_codebook() then replaces it. */
static uint64_t check_codes(struct kvs_scrub *scrub,
                            const struct kvs_shard_session *session,
                            struct kvs_unit *unit,
                            uint32_t block)
{
    struct kvs_codebooks *books = &scrub->shard->codebooks;
    struct kvs_block *of = kvs_unit_block(unit, block);
    const struct kvs_codes *codes = kvs_block_codes(of, unit->at);
    const struct kvs_codebook *book = book_of(scrub, codes);

    (void)kvs_segment_check_codes(books, of, unit->at);
    if (codes->n_lost > 0 && !book->is_broken && kvs_unit_is_here(unit, block) &&
        can_recode(scrub, unit, block))
        kvs_segment_recode(books, of, unit->at,
                           (enum kv_key_type)session->schema->layers[unit->layer].dtype,
                           unit->row_bytes);
    return codes->column.n_bytes;
}

/* ---- codebooks --------------------------------------------------------------------------- */

/* Runs one check of a codebook: its centroids, its cells, then one group of its summaries after
 * the other.  Returns the number of bytes checked. */
static uint64_t check_codebook(struct kvs_scrub *scrub, uint32_t codebook)
{
    struct kvs_codebooks *books = &scrub->shard->codebooks;
    struct kvs_codebook *book = kvs_codebook_at(books, codebook);
    const struct kvs_summaries *summaries = &book->summaries;
    uint64_t bytes = 0;

    if (scrub->codebook != codebook)
        scrub->step = 0;
    scrub->codebook = codebook;
    if (scrub->step == 0) {
        bytes = book->learnt.n_bytes;
        (void)kvs_codebook_verify_learnt(books, codebook);
    } else if (scrub->step == 1) {
        bytes = book->lists.n_bytes;
        (void)kvs_codebook_verify_cells(books, codebook);
    } else if (scrub->step - 2 < kvs_summaries_n_groups(summaries)) {
        bytes = kv_summary_bytes(&summaries->shape);
        (void)kvs_codebook_verify_summaries(books, codebook, scrub->step - 2);
    }
    if (++scrub->step >= 2 + kvs_summaries_n_groups(summaries)) {
        book->pass = scrub->pass;
        scrub->step = 0;
    }
    return bytes;
}

/* ---- repair ------------------------------------------------------------------------------ */

/* Returns whether the segments before and at the block have codes of one chapter: of the same
 * codebook, or of two that a replacement which did not reach the chapter's end has left. */
static bool
is_in_chapter_before(const struct kvs_scrub *scrub, const struct kvs_unit *unit, uint32_t block)
{
    const struct kvs_codes *before = kvs_unit_codes(unit, block - 1);
    const struct kvs_codes *at = kvs_unit_codes(unit, block);

    return before->column.bytes != NULL && at->column.bytes != NULL &&
           book_of(scrub, before)->block_begin == book_of(scrub, at)->block_begin;
}

/* Returns the first of the unit's segments, up to `end`, that are in the same chapter as the
 * last. */
static uint32_t
chapter_begin(const struct kvs_scrub *scrub, const struct kvs_unit *unit, uint32_t end)
{
    uint32_t begin = end - 1;

    while (begin > 0 && is_in_chapter_before(scrub, unit, begin))
        begin--;
    return begin;
}

/* Returns whether new codes may be made for the segments: they are in memory, no job uses them,
 * and the rows are good. */
static bool may_recut(const struct kvs_unit *unit, uint32_t begin, uint32_t tokens)
{
    const uint32_t first = begin * KV_BLOCK_TOKENS;

    for (uint32_t i = begin; i * KV_BLOCK_TOKENS < tokens; i++)
        if (!kvs_unit_is_here(unit, i) || kvs_unit_segment(unit, i)->training ||
            kvs_unit_segment(unit, i)->begins_job)
            return false;
    return kvs_unit_known_bad(unit, first, tokens - first) == tokens;
}

/* Returns a plan that makes the same codebook and summaries again from the same rows. */
static struct kvs_index_plan plan_of(const struct kvs_codebook *book)
{
    struct kvs_index_plan plan = book->n_summaries_lost > 0 ? book->lost_plan : book->plan;

    if (book->summaries.n_rows > 0) {
        plan.summaries_bits = book->summaries.shape.bits;
        plan.summaries_rows = book->summaries.shape.rows;
        plan.d_v = book->summaries.shape.d_v;
    }
    plan.seed = book->plan.seed;
    plan.iterations = book->iterations;
    plan.budget_us = 0;
    return plan;
}

/* Counts the full segments of the chapter that the unit has, with or without codes. */
static uint32_t n_of_chapter(const struct kvs_unit *unit, uint32_t begin, uint32_t end)
{
    uint32_t at = begin;

    while (at < end && (at + 1) * KV_BLOCK_TOKENS <= unit->committed &&
           (kvs_unit_codes(unit, at)->in_chapter || kvs_unit_codes(unit, at)->lost_chapter))
        at++;
    return at - begin;
}

/* A unit has n full segments of the codebook's chapter. */
static void count_segments(const struct kvs_scrub *scrub, struct kvs_codebook *book, uint32_t n)
{
    if (book->count_pass != scrub->pass) {
        if (book->count_pass != 0)
            book->n_most = book->n_seen;
        book->n_seen = 0;
        book->count_pass = scrub->pass;
    }
    if (book->n_seen < n)
        book->n_seen = n;
}

/* Counts the segments of a chapter up to its last in the unit, in memory or not: a codebook is
 * never made again for fewer than any unit has.  Returns their number. */
static uint32_t
count_chapter(const struct kvs_scrub *scrub, const struct kvs_unit *unit, uint32_t end)
{
    const uint32_t begin = chapter_begin(scrub, unit, end);
    const uint32_t n_full = n_of_chapter(unit, begin, end);

    for (uint32_t i = begin; i < end; i++)
        count_segments(scrub, book_of(scrub, kvs_unit_codes(unit, i)), n_full);
    return n_full;
}

/* Returns a broken codebook of the segments, or NULL. */
static const struct kvs_codebook *find_broken(const struct kvs_scrub *scrub,
                                              const struct kvs_unit *unit,
                                              uint32_t begin,
                                              uint32_t end)
{
    for (uint32_t i = begin; i < end; i++)
        if (book_of(scrub, kvs_unit_codes(unit, i))->is_broken)
            return book_of(scrub, kvs_unit_codes(unit, i));
    return NULL;
}

/* Repairs a chapter's codebook after its last segment in this unit has been checked.  If there
 * is no memory, a query is using the codes, or a segment is absent, the next pass tries again.  If
 * the rows have become too few for a codebook, they lose their codes, which no query uses. */
static void mend_codebook(struct kvs_scrub *scrub, struct kvs_unit *unit, uint32_t end)
{
    struct kvs_shard *shard = scrub->shard;
    const uint32_t begin = chapter_begin(scrub, unit, end);
    const uint32_t tokens =
        unit->committed < end * KV_BLOCK_TOKENS ? unit->committed : end * KV_BLOCK_TOKENS;
    const struct kvs_codebook *book = book_of(scrub, kvs_unit_codes(unit, begin));
    const struct kvs_codebook *broken = find_broken(scrub, unit, begin, end);
    const uint32_t n_full = count_chapter(scrub, unit, end);

    if (broken == NULL) {
        if (book->n_summaries_lost > 0 || book->n_cells_lost > 0)
            (void)kvs_index_repair(shard->indexer, unit, begin);
        return;
    }
    /* A fork may have only the first segments of the chapter: a codebook made from these would
     * leave the other segments without one. */
    if (n_full < broken->n_most || !may_recut(unit, begin, tokens) ||
        !kvs_query_queue_is_between(kvs_query_queue_of(shard)))
        return;
    const struct kvs_index_plan plan = plan_of(broken);
    if (kvs_index_is_enough(&plan, begin, tokens)) {
        /* Of two codebooks, one may be sound: nobody begins to use it now. */
        for (uint32_t i = begin; i < end; i++)
            book_of(scrub, kvs_unit_codes(unit, i))->is_broken = true;
        (void)kvs_index_replace(shard->indexer, unit, begin, tokens, &plan);
        return;
    }
    for (uint32_t i = end; i-- > begin;)
        kvs_segment_drop_codes(&shard->codebooks, kvs_unit_block(unit, i), unit->at);
}

/* ---- the walk ---------------------------------------------------------------------------- */

/* Returns whether the segment before `end` is the unit's last one of its chapter. */
static bool
is_last_of_chapter(const struct kvs_scrub *scrub, const struct kvs_unit *unit, uint32_t end)
{
    return end * KV_BLOCK_TOKENS >= unit->committed || !is_in_chapter_before(scrub, unit, end);
}

/* Returns whether the unit has codes in the block that no job works on. */
static bool has_codes_at(const struct kvs_unit *unit, uint32_t block)
{
    return kvs_unit_codes(unit, block)->column.bytes != NULL &&
           !kvs_unit_segment(unit, block)->training;
}

/* Whether the codes of the segment are in memory, and may turn out to be lost: a query that is at work needs
 * those of rows that are away. */
static bool
may_check_codes(const struct kvs_scrub *scrub, const struct kvs_codes *codes, bool has_rows)
{
    return !kvs_column_is_away(&codes->column) &&
           (has_rows || kvs_query_queue_is_between(kvs_query_queue_of(scrub->shard)));
}

/* Checks one segment, or runs one check of its codebook.  Rows that are away are verified when they come
 * back.  Returns the number of bytes checked. */
static uint64_t check_segment(struct kvs_scrub *scrub,
                              const struct kvs_shard_session *session,
                              struct kvs_unit *unit)
{
    const uint32_t block = scrub->block;
    const struct kvs_codes *codes = kvs_unit_codes(unit, block);
    const bool has_codes = has_codes_at(unit, block);
    const bool is_here = kvs_unit_is_here(unit, block);
    const uint32_t n_here = is_here ? rows_of(unit, block) : 0;
    uint64_t bytes = 0;

    if (has_codes && book_of(scrub, codes)->pass != scrub->pass)
        return check_codebook(scrub, codes->codebook);
    if (is_here)
        bytes += check_rows(scrub, unit, block);
    if (scrub->n_checked > n_here)
        scrub->n_checked = n_here;
    if (has_codes && may_check_codes(scrub, codes, is_here))
        bytes += check_codes(scrub, session, unit, block);
    scrub->unit++;
    if (!has_codes || !is_last_of_chapter(scrub, unit, block + 1))
        return bytes;
    if (is_here)
        mend_codebook(scrub, unit, block + 1);
    else
        (void)count_chapter(scrub, unit, block + 1);
    return bytes;
}

/* Moves the cursor to the next block; other sessions that share this one need not check its rows
 * again in this pass. */
static void next_block(struct kvs_scrub *scrub, const struct kvs_shard_session *session)
{
    struct kvs_block *block = session->blocks.list[scrub->block];

    scrub->progress.pass_blocks += block->pass != scrub->pass && kvs_block_is_here(block);
    if (block->pass != scrub->pass || block->n_checked < scrub->n_checked)
        block->n_checked = (uint8_t)scrub->n_checked;
    block->pass = scrub->pass;
    kvs_block_settle(&scrub->shard->store, block);
    begin_block(scrub, scrub->block + 1);
}

/* Moves the cursor to the next session. */
static void next_part(struct kvs_scrub *scrub)
{
    scrub->session++;
    scrub->step = 0;
    begin_block(scrub, 0);
    if (scrub->session < scrub->shard->n_sessions) {
        scrub->serial = scrub->shard->sessions[scrub->session].serial;
        return;
    }
    scrub->progress.phase = KVS_SCRUB_OBJECTS;
    scrub->shard->objects.looked = scrub->shard->objects.first;
    scrub->shard->objects.looked_begun = false;
}

/* Checks what the cursor is at, and moves it.  Returns the number of bytes checked. */
static uint64_t walk_on(struct kvs_scrub *scrub)
{
    const struct kvs_shard_session *session = &scrub->shard->sessions[scrub->session];

    if (!session->used || scrub->block >= session->blocks.n ||
        session->serial != scrub->serial) {
        next_part(scrub);
        return 0;
    }
    if (scrub->unit >= session->n_units) {
        next_block(scrub, session);
        return 0;
    }
    struct kvs_unit *unit = &session->units[scrub->unit];
    if (rows_of(unit, scrub->block) == 0) {
        scrub->n_checked = 0;
        scrub->unit++;
        return 0;
    }
    return check_segment(scrub, session, unit);
}

/* A piece: what has rows left to check, or some places that have not. */
static uint64_t walk_rows(struct kvs_scrub *scrub)
{
    uint64_t bytes = 0;

    for (unsigned i = 0;
         i < PIECE_SKIPS && bytes == 0 && scrub->progress.phase == KVS_SCRUB_ROWS; i++)
        bytes = walk_on(scrub);
    return bytes;
}

static void next_piece(struct kvs_scrub *scrub,
                       struct kvs_objects *objects,
                       const struct kvs_stored_object *object)
{
    scrub->at = 0;
    if (++scrub->piece < object->n_pieces)
        return;
    objects->looked = object->next;
    objects->looked_begun = false;
}

/* Checks the next bytes of a piece that is here; marks the piece at its end if it is bad. */
static uint64_t walk_objects(struct kvs_scrub *scrub)
{
    struct kvs_objects *objects = &scrub->shard->objects;
    struct kvs_stored_object *object = objects->looked;

    if (object == NULL) {
        scrub->progress.phase = KVS_SCRUB_RESTS;
        return 0;
    }
    /* The object at the cursor may have been removed, and another one taken its place. */
    if (!objects->looked_begun)
        scrub->piece = scrub->at = 0;
    objects->looked_begun = true;
    const struct kvs_object_piece *piece = &object->pieces[scrub->piece];
    if (piece->bytes == NULL) {
        next_piece(scrub, objects, object);
        return 0;
    }
    const uint32_t left = kvs_object_piece_bytes(object->bytes, scrub->piece) - scrub->at;
    const uint32_t n = left < PIECE_BYTES ? left : PIECE_BYTES;

    if (scrub->at == 0)
        scrub->crc = object->seed + scrub->piece;
    scrub->crc = kv_crc32c(scrub->crc, piece->bytes + scrub->at, n);
    scrub->at += n;
    if (n == left) {
        if (scrub->crc != piece->crc)
            kvs_object_mark_bad(objects, object, scrub->piece);
        next_piece(scrub, objects, object);
    }
    return n;
}

static void begin_pass(struct kvs_scrub *scrub, uint64_t now_us)
{
    scrub->begun_us = now_us;
    if (++scrub->pass == 0)
        scrub->pass = 1;
    scrub->session = scrub->step = 0;
    begin_block(scrub, 0);
    scrub->serial = scrub->shard->sessions[0].serial;
    scrub->progress.pass_bytes = scrub->progress.pass_blocks = 0;
    scrub->progress.phase = KVS_SCRUB_ROWS;
}

static void end_pass(struct kvs_scrub *scrub, uint64_t now_us)
{
    scrub->progress.n_passes++;
    scrub->progress.last_pass_us = now_us - scrub->begun_us;
    scrub->progress.since_us = scrub->begun_us;
    scrub->progress.last_pass_bytes = scrub->progress.pass_bytes;
    scrub->progress.last_pass_blocks = scrub->progress.pass_blocks;
    if (scrub->due_us < scrub->begun_us + PASS_US)
        scrub->due_us = scrub->begun_us + PASS_US;
}

bool kvs_scrub_step(struct kvs_scrub *scrub)
{
    struct kvs_scrub_progress *progress = &scrub->progress;
    const uint64_t now_us = scrub->shard->now_us;
    uint64_t bytes = 0;

    const bool hurries = atomic_load_explicit(&scrub->shard->scrub_wanted_us,
                                              memory_order_relaxed) > progress->since_us;

    if (!hurries && (scrub->bytes_per_s == 0 || now_us < scrub->due_us))
        return false;
    if (progress->phase == KVS_SCRUB_RESTS)
        begin_pass(scrub, now_us);
    struct kv_slice slice = kv_slice_begin(scrub->shard->clock, 1);
    do {
        bytes += progress->phase == KVS_SCRUB_ROWS ? walk_rows(scrub) : walk_objects(scrub);
    } while (progress->phase != KVS_SCRUB_RESTS && !kv_slice_over(&slice));
    progress->bytes += bytes;
    progress->pass_bytes += bytes;
    if (scrub->due_us + LAG_US < now_us)
        scrub->due_us = now_us - LAG_US;
    if (!hurries)
        scrub->due_us +=
            (bytes < SLICE_COST ? SLICE_COST : bytes) * UINT64_C(1000000) / scrub->bytes_per_s;
    if (progress->phase == KVS_SCRUB_RESTS)
        end_pass(scrub, now_us);
    return true;
}
