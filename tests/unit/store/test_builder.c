/* Index jobs on units directly. */
#include "kvserver/store/index/builder.h"

#include "kvserver/store/index/encode.h"
#include "tests/support/units.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    D = 16,
    ARENA_BYTES = 64 << 20,
    STEPS_MAX = 1000000,
};

static struct bench bench;

/* All tests run with rotated keys, too, and with copies of the keys. */
static bool rotates, copies;

static struct kvs_index_plan plan_of(uint32_t chapter_blocks)
{
    return (struct kvs_index_plan){
        .chapter_blocks = chapter_blocks,
        .shape = {.d = D, .m = 2, .bits = 4},
        .rotates = rotates,
        .copies = copies,
        .type = KV_KEY_FP32,
        .iterations = 3,
        .seed = 7,
    };
}

static struct kvs_indexer_stats stats_of(void)
{
    struct kvs_indexer_stats stats;

    kvs_indexer_get_stats(bench.indexer, &stats);
    return stats;
}

static void finish_jobs(void)
{
    uint32_t n_steps = 0;

    while (kvs_indexer_step(bench.indexer))
        assert_true(++n_steps < STEPS_MAX);
    assert_int_equal(stats_of().n_jobs, 0);
}

/* Queues what there is to queue; returns how many jobs. */
static uint32_t cut(const struct kvs_unit *unit, uint32_t tokens, uint32_t chapter_blocks)
{
    struct kvs_index_plan plan = plan_of(chapter_blocks);
    uint32_t before = stats_of().n_jobs;

    assert_int_equal(kvs_index_schedule(bench.indexer, unit, tokens, &plan), KV_OK);
    return stats_of().n_jobs - before;
}

static struct kvs_index_look look_at(const struct kvs_unit *unit, uint64_t serial)
{
    struct kvs_index_look whole = {0}, some = {0};

    assert_true(
        kvs_index_look_on(&bench.codebooks, unit, unit->committed, serial, UINT32_MAX, &whole));
    while (!kvs_index_look_on(&bench.codebooks, unit, unit->committed, serial, 3, &some))
        assert_int_equal(some.n_blocks % 3, 0);
    assert_memory_equal(&some, &whole, sizeof(some));
    return whole;
}

/* Blocks [begin, end) have codes of one codebook, and those around them have not. */
static void check_chapter(const struct kvs_unit *unit, uint32_t begin, uint32_t end)
{
    for (uint32_t i = begin; i < end; i++) {
        assert_non_null(kvs_unit_codes(unit, i)->column.bytes);
        assert_int_equal(kvs_unit_codes(unit, i)->n_coded, KV_BLOCK_TOKENS);
        assert_int_equal(kvs_unit_codes(unit, i)->codebook,
                         kvs_unit_codes(unit, begin)->codebook);
        assert_false(kvs_unit_segment(unit, i)->training);
        assert_int_equal(kvs_unit_block(unit, i)->pins, 0);
    }
    if (begin > 0 && kvs_unit_codes(unit, begin - 1)->column.bytes != NULL)
        assert_int_not_equal(kvs_unit_codes(unit, begin - 1)->codebook,
                             kvs_unit_codes(unit, begin)->codebook);
    if (end < kvs_unit_n_segments(unit) && kvs_unit_codes(unit, end)->column.bytes != NULL)
        assert_int_not_equal(kvs_unit_codes(unit, end)->codebook,
                             kvs_unit_codes(unit, begin)->codebook);
}

static void check_bare(const struct kvs_unit *unit, uint32_t begin, uint32_t end)
{
    for (uint32_t i = begin; i < end; i++)
        assert_null(kvs_unit_codes(unit, i)->column.bytes);
}

static void check_empty(void)
{
    assert_int_equal(bench.heap.n_segments, 0);
    assert_int_equal(kv_pool_used(bench.codebooks.pool), 0);
}

/* The mean that copies lack is the mean of the chapter's keys, all of which are its sample. */
static void check_mean(const struct kvs_unit *unit, uint32_t begin, uint32_t end)
{
    const uint32_t codebook = kvs_unit_codes(unit, begin)->codebook;
    const struct kvs_codebook *book = kvs_codebook_at(&bench.codebooks, codebook);

    for (uint32_t i = 0; i < D && copies; i++) {
        double sum = 0;

        for (uint32_t row = begin * KV_BLOCK_TOKENS; row < end * KV_BLOCK_TOKENS; row++)
            sum += (double)((const float *)(const void *)kvs_unit_row(unit, row))[i];
        sum /= (end - begin) * KV_BLOCK_TOKENS;
        assert_true(fabs((double)kvs_codebook_mean(book)[i] - sum) < 1e-5);
    }
}

static void chapters(void **state)
{
    struct kvs_index_look look;
    struct kvs_unit unit;
    uint32_t session;

    (void)state;
    unit_make(&bench, &unit, 0, D, 20 * KV_BLOCK_TOKENS + 50);
    assert_int_equal(cut(&unit, 7 * KV_BLOCK_TOKENS + 127, 8), 0);
    assert_int_equal(cut(&unit, unit.committed, 8), 2); /* four blocks are left */
    assert_int_equal(cut(&unit, unit.committed, 8), 0);
    look = look_at(&unit, 0);
    assert_int_equal(look.n_pending, 2);
    assert_int_equal(look.n_coded, 0);
    finish_jobs();
    assert_true(kvs_indexer_take_ended(bench.indexer, &session));
    assert_false(kvs_indexer_take_ended(bench.indexer, &session));
    assert_int_equal(session, 0);
    check_chapter(&unit, 0, 8);
    check_chapter(&unit, 8, 16);
    check_bare(&unit, 16, 21);
    check_mean(&unit, 0, 8);
    check_mean(&unit, 8, 16);
    assert_true(unit_codes_are_right(&bench, &unit));

    /* Another length cuts only what has no codes: 16..30 of a chapter that ends at 32. */
    assert_int_equal(unit_append(&bench, &unit, 10 * KV_BLOCK_TOKENS), KV_OK);
    assert_int_equal(cut(&unit, unit.committed, 16), 1);
    finish_jobs();
    check_chapter(&unit, 0, 8);
    check_chapter(&unit, 16, 30);
    check_bare(&unit, 30, 31);
    look = look_at(&unit, 2);
    assert_int_equal(look.n_coded, 30 * KV_BLOCK_TOKENS);
    assert_int_equal(look.n_old, 2);
    assert_int_equal(look.n_new, 1);
    assert_in_range(look.iterations, 1, 3);
    lone_unit_clear(&unit);
    check_empty();
}

static void forks_inherit(void **state)
{
    struct kvs_unit unit, fork, late;

    (void)state;
    unit_make(&bench, &unit, 0, D, 20 * KV_BLOCK_TOKENS);
    lone_unit_init(&fork, &bench.heap, 0, 0, D * sizeof(float));
    lone_unit_init(&late, &bench.heap, 0, 0, D * sizeof(float));
    assert_int_equal(cut(&unit, unit.committed, 16), 1);
    assert_true(kvs_indexer_step(bench.indexer));
    /* A fork while it trains; who asked goes: the fork has what it shares. */
    assert_int_equal(lone_unit_fork(&unit, &fork, 10 * KV_BLOCK_TOKENS + 5), KV_OK);
    assert_int_equal(cut(&fork, fork.committed, 16), 0);
    lone_unit_clear(&unit);
    finish_jobs();
    assert_int_equal(stats_of().dropped, 0);
    check_chapter(&fork, 0, 11);
    /* A fork of it trains nothing. */
    assert_int_equal(lone_unit_fork(&fork, &late, 9 * KV_BLOCK_TOKENS), KV_OK);
    assert_int_equal(cut(&late, late.committed, 8), 0);
    check_chapter(&late, 0, 9);
    lone_unit_clear(&fork);
    assert_true(unit_codes_are_right(&bench, &late));
    lone_unit_clear(&late);
    check_empty();
}

/* Where a chapter ends in a unit is found without a look at each of its segments, or with one
 * where some have lost their codes. */
static void check_ends(const struct kvs_unit *unit)
{
    for (uint32_t at = 0; at < kvs_unit_n_segments(unit); at++) {
        if (!kvs_unit_codes(unit, at)->in_chapter)
            continue;
        const struct kvs_codebook *book =
            kvs_codebook_at(&bench.codebooks, kvs_unit_codes(unit, at)->codebook);
        for (uint32_t end = at; end <= kvs_unit_n_segments(unit) + 1; end++)
            assert_int_equal(kvs_codebook_chapter_end(book, unit, at, end),
                             kvs_unit_chapter_end(unit, at, end));
    }
}

static void chapter_ends(void **state)
{
    struct kvs_unit unit, fork;

    (void)state;
    unit_make(&bench, &unit, 0, D, 20 * KV_BLOCK_TOKENS);
    lone_unit_init(&fork, &bench.heap, 0, 0, D * sizeof(float));
    assert_int_equal(cut(&unit, unit.committed, 10), 2);
    finish_jobs();
    assert_int_equal(lone_unit_fork(&unit, &fork, 16 * KV_BLOCK_TOKENS + 5), KV_OK);
    assert_int_equal(unit_append(&bench, &fork, 5 * KV_BLOCK_TOKENS), KV_OK);
    check_ends(&unit);
    check_ends(&fork);
    struct kvs_codebook *book =
        kvs_codebook_at(&bench.codebooks, kvs_unit_codes(&unit, 3)->codebook);

    ((uint8_t *)kvs_unit_codes(&unit, 3)->column.bytes)[1] ^= 1;
    assert_false(kvs_segment_check_codes(&bench.codebooks, kvs_unit_block(&unit, 3), 0));
    assert_int_equal(book->n_holes, 1);
    check_ends(&unit);
    check_ends(&fork);
    kvs_segment_recode(&bench.codebooks, kvs_unit_block(&unit, 3), 0, KV_KEY_FP32,
                       unit.row_bytes);
    assert_int_equal(book->n_holes, 0);
    check_ends(&unit);
    lone_unit_clear(&unit);
    check_ends(&fork);
    lone_unit_clear(&fork);
    check_empty();
}

/* A chapter that lost some codes counts those segments only as long as they are there: none when
 * they have been cut, as a whole or in part. */
static void cut_segments_are_no_holes(void **state)
{
    struct kvs_unit unit;

    (void)state;
    unit_make(&bench, &unit, 0, D, 10 * KV_BLOCK_TOKENS);
    assert_int_equal(cut(&unit, unit.committed, 10), 1);
    finish_jobs();
    struct kvs_codebook *book =
        kvs_codebook_at(&bench.codebooks, kvs_unit_codes(&unit, 0)->codebook);

    for (uint32_t block = 7; block < 10; block += 2) {
        ((uint8_t *)kvs_unit_codes(&unit, block)->column.bytes)[1] ^= 1;
        assert_false(
            kvs_segment_check_codes(&bench.codebooks, kvs_unit_block(&unit, block), 0));
    }
    assert_int_equal(book->n_holes, 2);
    kvs_unit_truncate(&unit, 9 * KV_BLOCK_TOKENS);
    assert_int_equal(book->n_holes, 1);
    kvs_unit_truncate(&unit, 7 * KV_BLOCK_TOKENS + 5);
    assert_int_equal(unit_append(&bench, &unit, KV_BLOCK_TOKENS), KV_OK);
    assert_int_equal(book->n_holes, 0);
    check_ends(&unit);
    lone_unit_check(&unit);
    lone_unit_clear(&unit);
    check_empty();
}

/* One session queues many jobs; another, which comes after it, has one, and a third waits for
 * any.  The one is next but one, and each session is told of its own jobs alone. */
static void sessions_take_turns(void **state)
{
    enum {
        N_JOBS = 12
    };
    struct kvs_unit many, one;
    uint32_t session;

    (void)state;
    unit_make(&bench, &many, 0, D, N_JOBS * 8 * KV_BLOCK_TOKENS);
    unit_make(&bench, &one, 1, D, 8 * KV_BLOCK_TOKENS);
    one.session = 1;
    assert_int_equal(cut(&many, many.committed, 8), N_JOBS);
    assert_true(kvs_indexer_step(bench.indexer));
    assert_int_equal(cut(&one, one.committed, 8), 1);
    assert_int_equal(kvs_indexer_n_jobs(bench.indexer, 0), N_JOBS);
    assert_int_equal(kvs_indexer_n_jobs(bench.indexer, 1), 1);
    assert_false(kvs_indexer_take_ended(bench.indexer, &session));

    while (kvs_indexer_n_jobs(bench.indexer, 0) == N_JOBS)
        assert_true(kvs_indexer_step(bench.indexer));
    assert_true(kvs_indexer_take_ended(bench.indexer, &session));
    assert_int_equal(session, 0);
    assert_false(kvs_indexer_take_ended(bench.indexer, &session));
    kvs_indexer_watch(bench.indexer, 2);
    while (kvs_indexer_n_jobs(bench.indexer, 1) > 0)
        assert_true(kvs_indexer_step(bench.indexer));
    assert_int_equal(kvs_indexer_n_jobs(bench.indexer, 0), N_JOBS - 1);
    check_chapter(&one, 0, 8);
    for (uint32_t told = 0; told != (1 << 1 | 1 << 2); told |= 1 << session)
        assert_true(kvs_indexer_take_ended(bench.indexer, &session));
    assert_false(kvs_indexer_take_ended(bench.indexer, &session));
    kvs_indexer_check(bench.indexer);
    finish_jobs();
    assert_true(kvs_indexer_take_ended(bench.indexer, &session));
    assert_int_equal(session, 0);
    assert_false(kvs_indexer_take_ended(bench.indexer, &session));
    lone_unit_clear(&many);
    lone_unit_clear(&one);
    check_empty();
}

/* Also a job that has long to wait gives back what nobody wants. */
static void truncates_drop(void **state)
{
    enum {
        N_UNITS = 12
    };
    struct kvs_unit units[N_UNITS];
    uint64_t dropped = stats_of().dropped;

    (void)state;
    for (uint32_t i = 0; i < N_UNITS; i++) {
        unit_make(&bench, &units[i], i, D, 16 * KV_BLOCK_TOKENS);
        assert_int_equal(cut(&units[i], units[i].committed, 8), 2);
    }
    for (int i = 0; i < 3; i++)
        assert_true(kvs_indexer_step(bench.indexer));
    for (uint32_t i = 1; i < N_UNITS; i++)
        kvs_unit_truncate(&units[i], i % 2 ? 0 : 9 * KV_BLOCK_TOKENS);
    for (int i = 0; i < 3; i++)
        assert_true(kvs_indexer_step(bench.indexer));
    assert_int_equal(stats_of().dropped - dropped, 2 * N_UNITS - 2 - N_UNITS / 2 + 1);
    assert_int_equal(bench.heap.n_segments, 16 + (N_UNITS / 2 - 1) * 9);
    finish_jobs();
    check_chapter(&units[0], 0, 8);
    check_chapter(&units[0], 8, 16);
    for (uint32_t i = 2; i < N_UNITS; i += 2) {
        check_chapter(&units[i], 0, 8);
        check_bare(&units[i], 8, 9);
    }
    for (uint32_t i = 0; i < N_UNITS; i++)
        lone_unit_clear(&units[i]);
    check_empty();
}

/* Rows that come after a truncate have no codes of the rows before them. */
static void overwritten_rows(void **state)
{
    struct kvs_unit unit, fork;

    (void)state;
    unit_make(&bench, &unit, 0, D, 1000);
    lone_unit_init(&fork, &bench.heap, 0, 0, D * sizeof(float));
    assert_int_equal(cut(&unit, 1000, 0), 1);
    /* While it trains: the job's rows stay as they are. */
    assert_true(kvs_indexer_step(bench.indexer));
    kvs_unit_truncate(&unit, 950);
    assert_int_equal(unit_append(&bench, &unit, 20), KV_OK);
    finish_jobs();
    assert_true(unit_codes_are_right(&bench, &unit));
    check_chapter(&unit, 0, 7);
    assert_null(kvs_unit_codes(&unit, 7)->column.bytes);
    /* In place. */
    assert_int_equal(kvs_segment_encode(&bench.codebooks, kvs_unit_block(&unit, 7), 0,
                                        kvs_unit_codes(&unit, 6)->codebook, KV_KEY_FP32,
                                        unit.row_bytes, 970 - 896),
                     KV_OK);
    struct kvs_block *last = kvs_unit_block(&unit, 7);
    kvs_unit_truncate(&unit, 930);
    assert_int_equal(unit_append(&bench, &unit, 40), KV_OK);
    assert_ptr_equal(kvs_unit_block(&unit, 7), last);
    assert_int_equal(kvs_unit_codes(&unit, 7)->n_coded, 930 - 896);
    assert_true(unit_codes_are_right(&bench, &unit));
    /* A copy for a fork. */
    assert_int_equal(lone_unit_fork(&unit, &fork, 920), KV_OK);
    assert_int_equal(unit_append(&bench, &fork, 200), KV_OK);
    assert_ptr_not_equal(kvs_unit_block(&fork, 7), last);
    assert_true(unit_codes_are_right(&bench, &fork));
    assert_true(unit_codes_are_right(&bench, &unit));
    lone_unit_clear(&unit);
    lone_unit_clear(&fork);
    check_empty();
}

/* The same seed gives the same codes; units do not begin alike. */
static void seeds(void **state)
{
    struct kvs_unit units[4];
    const float *centroids[4];

    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        struct kvs_index_plan plan = plan_of(8);

        kv_random_init(&bench.random, 99);
        unit_make(&bench, &units[i], i == 2, D, 8 * KV_BLOCK_TOKENS);
        plan.seed += i == 3;
        assert_int_equal(
            kvs_index_schedule(bench.indexer, &units[i], units[i].committed, &plan), KV_OK);
        finish_jobs();
        check_chapter(&units[i], 0, 8);
        centroids[i] = kvs_codebook_centroids(
            kvs_codebook_at(&bench.codebooks, kvs_unit_codes(&units[i], 0)->codebook));
    }
    assert_memory_equal(centroids[0], centroids[1], D * 16 * sizeof(float));
    for (uint32_t i = 0; i < 8; i++)
        assert_memory_equal(kvs_unit_codes(&units[0], i)->column.bytes,
                            kvs_unit_codes(&units[1], i)->column.bytes, 2 * KV_PQ_TILE);
    assert_memory_not_equal(centroids[0], centroids[2], D * 16 * sizeof(float));
    assert_memory_not_equal(centroids[0], centroids[3], D * 16 * sizeof(float));
    for (uint32_t i = 0; i < 4; i++)
        lone_unit_clear(&units[i]);
    check_empty();
}

enum {
    D_V = 5,
};

static uint32_t summary_rows = 1024; /* of the plans of this test */

static struct kvs_index_plan plan_with_rest(uint32_t chapter_blocks, uint32_t bits)
{
    struct kvs_index_plan plan = plan_of(chapter_blocks);

    plan.d_v = D_V;
    plan.summaries_bits = bits;
    plan.summaries_rows = summary_rows;
    return plan;
}

/* As cut(), with summaries. */
static uint32_t
cut_rest(const struct kvs_unit *unit, uint32_t tokens, uint32_t chapter_blocks, uint32_t bits)
{
    const struct kvs_index_plan plan = plan_with_rest(chapter_blocks, bits);
    uint32_t before = stats_of().n_jobs;

    assert_int_equal(kvs_index_schedule(bench.indexer, unit, tokens, &plan), KV_OK);
    return stats_of().n_jobs - before;
}

/* The chapter's summaries are those of blocks [begin, end), as if made at once. */
static void
check_summaries(const struct kvs_unit *unit, uint32_t begin, uint32_t end, uint32_t bits)
{
    static uint8_t rows[KV_SUMMARY_ROWS_MAX * (D + D_V) * sizeof(float)];
    const struct kv_summary_shape shape = {KV_KEY_FP32, D, D_V, bits, summary_rows};
    const struct kvs_codebook *book =
        kvs_codebook_at(&bench.codebooks, kvs_unit_codes(unit, begin)->codebook);
    void *scratch = malloc(kv_summary_scratch_bytes(&shape)),
         *group = malloc(kv_summary_bytes(&shape));

    assert_true(scratch != NULL && group != NULL);
    assert_int_equal(book->block_begin, begin);
    assert_int_equal(book->summaries.n_rows, (end - begin) * KV_BLOCK_TOKENS);
    assert_int_equal(kvs_summaries_each(&book->summaries), 1u << bits);
    assert_int_equal(kvs_summaries_n_groups(&book->summaries),
                     ((end - begin) * KV_BLOCK_TOKENS + summary_rows - 1) / summary_rows);
    for (uint32_t i = 0; i < kvs_summaries_n_groups(&book->summaries); i++) {
        uint32_t first = begin * KV_BLOCK_TOKENS + i * summary_rows,
                 n = end * KV_BLOCK_TOKENS - first, at;
        struct kv_summary_build build;

        n = n < summary_rows ? n : summary_rows;
        for (uint32_t row = 0; row < n; row++)
            memcpy(rows + (size_t)row * unit->row_bytes, kvs_unit_row(unit, first + row),
                   unit->row_bytes);
        kv_summary_build_begin(&build, &shape, n,
                               (plan_of(0).seed ^ (uint64_t)unit->layer << 48 ^
                                (uint64_t)unit->kv_head << 32 ^ begin) +
                                   i,
                               scratch);
        while (kv_summary_build_next(&build, &at, &n))
            kv_summary_build_slice(&build, rows + (size_t)at * unit->row_bytes,
                                   unit->row_bytes);
        kv_summary_build_end(&build, group);
        assert_memory_equal(book->summaries.groups[i].bytes, group, kv_summary_bytes(&shape));
    }
    for (uint32_t i = begin; i < end; i++)
        assert_true(kvs_unit_codes(unit, i)->in_chapter && kvs_unit_block(unit, i)->pins == 0 &&
                    !kvs_unit_segment(unit, i)->begins_job);
    free(scratch);
    free(group);
}

/* With the codes, or later for codes that have none, or others, or fewer. */
static void summaries(void **state)
{
    struct kvs_index_look look;
    struct kvs_unit unit, fork;

    (void)state;
    unit_make(&bench, &unit, 3, D + D_V, 20 * KV_BLOCK_TOKENS + 50);
    assert_int_equal(cut_rest(&unit, unit.committed, 10, KV_SUMMARY_16), 2);
    assert_int_equal(cut_rest(&unit, unit.committed, 10, KV_SUMMARY_64),
                     0); /* jobs are there */
    finish_jobs();
    assert_int_equal(stats_of().trained, 2);
    check_summaries(&unit, 0, 10, KV_SUMMARY_16);
    check_summaries(&unit, 10, 20, KV_SUMMARY_16);
    assert_int_equal(stats_of().rows_summarised, 20 * KV_BLOCK_TOKENS);
    assert_int_equal(bench.codebooks.rows_summarised, 20 * KV_BLOCK_TOKENS);
    assert_int_equal(cut_rest(&unit, unit.committed, 10, KV_SUMMARY_16), 0);
    assert_int_equal(cut(&unit, unit.committed, 10), 0);
    /* Others take their place. */
    assert_int_equal(cut_rest(&unit, 15 * KV_BLOCK_TOKENS, 10, KV_SUMMARY_64), 2);
    look = look_at(&unit, 0);
    assert_int_equal(look.n_pending, 2);
    assert_int_equal(look.n_coded, 20 * KV_BLOCK_TOKENS);
    finish_jobs();
    assert_int_equal(stats_of().trained, 2);
    check_summaries(&unit, 0, 10, KV_SUMMARY_64);
    check_summaries(&unit, 10, 15, KV_SUMMARY_64);
    /* A fork has them; for more rows than they stand for they are made again. */
    lone_unit_init(&fork, &bench.heap, 0, 3, (D + D_V) * sizeof(float));
    assert_int_equal(lone_unit_fork(&unit, &fork, 14 * KV_BLOCK_TOKENS), KV_OK);
    assert_int_equal(cut_rest(&fork, fork.committed, 10, KV_SUMMARY_64), 0);
    assert_int_equal(cut_rest(&unit, unit.committed, 10, KV_SUMMARY_64), 1);
    lone_unit_clear(&unit); /* what the fork has is wanted still */
    assert_true(kvs_indexer_step(bench.indexer));
    finish_jobs();
    assert_int_equal(stats_of().dropped, 0);
    check_summaries(&fork, 0, 10, KV_SUMMARY_64);
    assert_int_equal(kvs_codebook_at(&bench.codebooks, kvs_unit_codes(&fork, 10)->codebook)
                         ->summaries.n_rows,
                     10 * KV_BLOCK_TOKENS);
    lone_unit_clear(&fork);
    check_empty();
    assert_int_equal(bench.codebooks.summaries_bytes, 0);
}

/* Groups of 3,072 rows: several of a chapter, the last one shorter; those of 1,024 take their
 * place, and the other way round. */
static void summaries_of_larger_groups(void **state)
{
    static const uint32_t sizes[] = {3072, 1024, 3072};
    struct kvs_unit unit;

    (void)state;
    unit_make(&bench, &unit, 3, D + D_V, 62 * KV_BLOCK_TOKENS);
    for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        summary_rows = sizes[i];
        assert_int_equal(cut_rest(&unit, unit.committed, 50, KV_SUMMARY_16), 2);
        finish_jobs();
        check_summaries(&unit, 0, 50, KV_SUMMARY_16);
        check_summaries(&unit, 50, 62, KV_SUMMARY_16);
        assert_int_equal(cut_rest(&unit, unit.committed, 50, KV_SUMMARY_16), 0);
        assert_int_equal(bench.codebooks.rows_summarised, unit.committed);
    }
    assert_int_equal(stats_of().trained, 2);
    summary_rows = 1024;
    lone_unit_clear(&unit);
    check_empty();
    assert_int_equal(bench.codebooks.summaries_bytes, 0);
}

/* An open codebook's are of the full segments that its job coded, however often they are
 * asked for; a job that nobody wants any more leaves nothing. */
static void summaries_of_open_codebooks(void **state)
{
    struct kvs_unit unit;

    (void)state;
    unit_make(&bench, &unit, 0, D + D_V, 1000);
    assert_int_equal(cut_rest(&unit, 1000, 0, KV_SUMMARY_16), 1);
    finish_jobs();
    check_summaries(&unit, 0, 7, KV_SUMMARY_16);
    assert_int_equal(unit_append(&bench, &unit, 600), KV_OK);
    assert_int_equal(kvs_segment_encode(&bench.codebooks, kvs_unit_block(&unit, 7), 0,
                                        kvs_unit_codes(&unit, 6)->codebook, KV_KEY_FP32,
                                        unit.row_bytes, KV_BLOCK_TOKENS),
                     KV_OK);
    assert_int_equal(cut_rest(&unit, 1600, 0, KV_SUMMARY_16), 0);
    assert_int_equal(cut_rest(&unit, 1600, 0, KV_SUMMARY_64), 1);
    for (int i = 0; i < 20; i++) /* it is at them */
        assert_true(kvs_indexer_step(bench.indexer));
    lone_unit_clear(&unit);
    finish_jobs();
    assert_int_equal(stats_of().dropped, 1);
    check_empty();
    assert_int_equal(bench.codebooks.summaries_bytes, 0);
}

/* A full arena: codes without summaries, which can be made when there is room again. */
static void full_of_codes(void **state)
{
    uint64_t n_without = 0;

    (void)state;
    bench_close(&bench);
    for (uint32_t n_free = 1; n_free < 9; n_free++) {
        const struct kvs_index_plan plan = plan_with_rest(8, KV_SUMMARY_64);
        void *filler[64];
        uint32_t n = 0;
        struct kvs_unit unit;

        bench_open(&bench, ARENA_BYTES, n_free);
        unit_make(&bench, &unit, 0, D + D_V, 16 * KV_BLOCK_TOKENS);
        int page = kvs_arena_class_hold(bench.arena, KVS_ARENA_PAGE);
        while ((filler[n] = kvs_arena_alloc(bench.arena, page)) != NULL)
            n++;
        for (uint32_t i = 0; i < n_free; i++)
            kvs_arena_free(bench.arena, page, filler[--n]);
        assert_int_equal(kvs_index_schedule(bench.indexer, &unit, unit.committed, &plan),
                         KV_OK);
        finish_jobs();
        struct kvs_indexer_stats stats = stats_of();
        assert_int_equal(stats.failed + stats.trained, 2);
        assert_int_equal(stats.rows_summarised,
                         (stats.trained - stats.summaries_failed) * 8 * KV_BLOCK_TOKENS);
        n_without += stats.summaries_failed;
        while (n > 0)
            kvs_arena_free(bench.arena, page, filler[--n]);
        assert_int_equal(kvs_index_schedule(bench.indexer, &unit, unit.committed, &plan),
                         KV_OK);
        finish_jobs();
        check_summaries(&unit, 0, 8, KV_SUMMARY_64);
        check_summaries(&unit, 8, 16, KV_SUMMARY_64);
        lone_unit_clear(&unit);
        check_empty();
        bench_close(&bench);
    }
    assert_true(n_without >= 2);
    bench_open(&bench, ARENA_BYTES, 1);
}

/* A broken codebook is replaced by a job; where that finds no memory, nothing has changed. */
static void broken_codebooks(void **state)
{
    enum {
        FILLERS_MAX = 1 << 20
    };
    const struct kvs_index_plan plan = plan_of(8);
    struct filler {
        void *memory;
        int class_id;
    } *fillers = malloc(FILLERS_MAX * sizeof(*fillers));
    uint32_t n = 0;
    struct kvs_unit unit;

    (void)state;
    assert_non_null(fillers);
    unit_make(&bench, &unit, 0, D + D_V, 16 * KV_BLOCK_TOKENS);
    assert_int_equal(kvs_index_schedule(bench.indexer, &unit, unit.committed, &plan), KV_OK);
    finish_jobs();
    const uint32_t broken = kvs_unit_codes(&unit, 8)->codebook;
    kvs_codebook_at(&bench.codebooks, broken)->is_broken = true;

    for (size_t bytes = KVS_ARENA_PAGE; bytes >= KVS_ARENA_ELEMENT_MIN; bytes /= 2) {
        int class_id = kvs_arena_class_rounded(bench.arena, bytes);

        while (n < FILLERS_MAX &&
               (fillers[n].memory = kvs_arena_alloc(bench.arena, class_id)) != NULL)
            fillers[n++].class_id = class_id;
    }
    /* In want of memory at once, or when the job begins. */
    if (kvs_index_replace(bench.indexer, &unit, 8, unit.committed, &plan) == KV_OK)
        finish_jobs();
    else
        assert_int_equal(stats_of().n_jobs, 0);
    check_chapter(&unit, 8, 16);
    assert_int_equal(kvs_unit_codes(&unit, 8)->codebook, broken);
    assert_int_equal(bench.heap.health.mended[KVS_KIND_CENTROIDS], 0);

    while (n-- > 0)
        kvs_arena_free(bench.arena, fillers[n].class_id, fillers[n].memory);
    free(fillers);
    assert_int_equal(kvs_index_replace(bench.indexer, &unit, 8, unit.committed, &plan), KV_OK);
    finish_jobs();
    check_chapter(&unit, 0, 8);
    check_chapter(&unit, 8, 16);
    assert_false(
        kvs_codebook_at(&bench.codebooks, kvs_unit_codes(&unit, 8)->codebook)->is_broken);
    assert_int_equal(bench.heap.health.mended[KVS_KIND_CENTROIDS], 1);
    assert_int_equal(stats_of().trained, 3);
    lone_unit_clear(&unit);
    check_empty();
}

/* A row that goes bad while a broken codebook is replaced ends the job.  The segment with that row
 * and all segments after it keep their old codes, and nobody uses those before it: the next job
 * replaces both codebooks. */
static void broken_codebooks_and_bad_rows(void **state)
{
    enum {
        BAD = 9 * KV_BLOCK_TOKENS + 5
    };
    const struct kvs_index_plan plan = plan_of(8);
    uint8_t row[(D + D_V) * sizeof(float)];
    struct kvs_unit unit;

    (void)state;
    unit_make(&bench, &unit, 0, D + D_V, 16 * KV_BLOCK_TOKENS);
    memcpy(row, kvs_unit_row(&unit, BAD), sizeof(row));
    assert_int_equal(kvs_index_schedule(bench.indexer, &unit, unit.committed, &plan), KV_OK);
    finish_jobs();
    const uint32_t broken = kvs_unit_codes(&unit, 8)->codebook;
    kvs_codebook_at(&bench.codebooks, broken)->is_broken = true;

    assert_int_equal(kvs_index_replace(bench.indexer, &unit, 8, unit.committed, &plan), KV_OK);
    while (kvs_unit_codes(&unit, 8)->codebook == broken ||
           !kvs_unit_codes(&unit, 8)->in_chapter)
        assert_true(kvs_indexer_step(bench.indexer));
    kvs_unit_row(&unit, BAD)[0] ^= 1;
    finish_jobs();
    assert_int_equal(stats_of().failed, 1);
    assert_int_equal(bench.heap.health.mended[KVS_KIND_CENTROIDS], 0);
    check_chapter(&unit, 8, 9);
    check_chapter(&unit, 9, 16);
    assert_int_equal(kvs_unit_codes(&unit, 9)->codebook, broken);
    assert_true(
        kvs_codebook_at(&bench.codebooks, kvs_unit_codes(&unit, 8)->codebook)->is_broken);

    kvs_unit_mend(&unit, BAD, row, *kvs_unit_crc(&unit, BAD));
    assert_int_equal(kvs_index_replace(bench.indexer, &unit, 8, unit.committed, &plan), KV_OK);
    finish_jobs();
    check_chapter(&unit, 8, 16);
    assert_false(
        kvs_codebook_at(&bench.codebooks, kvs_unit_codes(&unit, 8)->codebook)->is_broken);
    assert_int_equal(bench.heap.health.mended[KVS_KIND_CENTROIDS], 1);
    lone_unit_clear(&unit);
    check_empty();
}

/* Rows that are too few for a codebook get none. */
static void too_few(void **state)
{
    const struct kvs_index_plan by_chapter = plan_of(8), whole = plan_of(0);

    (void)state;
    assert_true(kvs_index_is_enough(&by_chapter, 8, 16 * KV_BLOCK_TOKENS));
    assert_false(kvs_index_is_enough(&by_chapter, 8, 16 * KV_BLOCK_TOKENS - 1));
    assert_false(kvs_index_is_enough(&by_chapter, 8, 4 * KV_BLOCK_TOKENS));
    assert_true(kvs_index_is_enough(&whole, 1, KV_BLOCK_TOKENS + 32));
    assert_false(kvs_index_is_enough(&whole, 1, KV_BLOCK_TOKENS + 31));
}

/* Makes codes of a unit.  Returns in how many slices, if a look at the clock moves it so far. */
static uint32_t n_slices(const struct kvs_unit *unit, uint64_t look_us)
{
    uint32_t n = 0;

    bench_look_us = look_us;
    assert_int_equal(cut(unit, unit->committed, 8), 1);
    for (; kvs_indexer_step(bench.indexer); n++)
        assert_true(n < STEPS_MAX);
    bench_look_us = KV_SLICE_US;
    check_chapter(unit, 0, 8);
    return n;
}

/* Codebooks and codes are the same to the bit wherever slices end. */
static void slices_change_nothing(void **state)
{
    struct kvs_unit units[2];

    (void)state;
    for (int i = 0; i < 2; i++)
        unit_make(&bench, &units[i], 0, D, 8 * KV_BLOCK_TOKENS);
    for (uint32_t row = 0; row < units[0].committed; row++)
        memcpy(kvs_unit_row(&units[1], row), kvs_unit_row(&units[0], row), D * sizeof(float));
    unit_seal(&units[1], 0, units[1].committed);
    const uint32_t n_pieces = n_slices(&units[0], KV_SLICE_US);
    assert_true(n_slices(&units[1], 1) < n_pieces / 4);
    for (uint32_t i = 0; i < 8; i++) {
        const struct kvs_codes *codes[2];

        for (int j = 0; j < 2; j++)
            codes[j] = kvs_unit_codes(&units[j], i);
        assert_int_equal(codes[0]->column.n_bytes, codes[1]->column.n_bytes);
        assert_memory_equal(codes[0]->column.bytes, codes[1]->column.bytes,
                            codes[0]->column.n_bytes);
    }
    const struct kvs_column *learnt[2];
    for (int j = 0; j < 2; j++)
        learnt[j] =
            &kvs_codebook_at(&bench.codebooks, kvs_unit_codes(&units[j], 0)->codebook)->learnt;
    assert_memory_equal(learnt[0]->bytes, learnt[1]->bytes, learnt[0]->n_bytes);
    for (int i = 0; i < 2; i++)
        lone_unit_clear(&units[i]);
    check_empty();
}

/* A piece of work is short, whatever the shape. */
static void pieces(void **state)
{
    struct kvs_index_plan plan = plan_of(8);
    uint64_t coded = stats_of().rows_coded, n_steps = 0;
    struct kvs_unit unit;

    (void)state;
    plan.shape = (struct kv_pq_shape){.d = 512, .m = 4, .bits = 8};
    plan.rotates = false; /* too long for that */
    plan.iterations = 1;
    unit_make(&bench, &unit, 0, 512, 8 * KV_BLOCK_TOKENS);
    assert_int_equal(kvs_index_schedule(bench.indexer, &unit, unit.committed, &plan), KV_OK);
    while (kvs_indexer_step(bench.indexer)) {
        assert_true(++n_steps < STEPS_MAX);
        assert_in_range(stats_of().rows_coded - coded, 0, 16);
        coded = stats_of().rows_coded;
    }
    check_chapter(&unit, 0, 8);
    assert_true(unit_codes_are_right(&bench, &unit));
    lone_unit_clear(&unit);
    check_empty();
}

/* A full arena: the rows stay as they are, and codes can be made when there is room again. */
static void full(void **state)
{
    uint64_t n_failed = 0;

    (void)state;
    bench_close(&bench);
    for (uint32_t n_free = 0; n_free < 7; n_free++) {
        void *filler[64];
        uint32_t n = 0;
        struct kvs_unit unit;
        struct kvs_index_plan plan = plan_of(8);

        bench_open(&bench, ARENA_BYTES, n_free);
        unit_make(&bench, &unit, 0, D, 16 * KV_BLOCK_TOKENS);
        int page = kvs_arena_class_hold(bench.arena, KVS_ARENA_PAGE);
        while ((filler[n] = kvs_arena_alloc(bench.arena, page)) != NULL)
            n++;
        for (uint32_t i = 0; i < n_free; i++)
            kvs_arena_free(bench.arena, page, filler[--n]);

        kv_status_t status = kvs_index_schedule(bench.indexer, &unit, unit.committed, &plan);
        assert_true(status == KV_OK || (status == KV_NO_MEMORY && n_free == 0));
        finish_jobs();
        struct kvs_indexer_stats stats = stats_of();
        assert_int_equal(stats.failed + stats.trained, status == KV_OK ? 2 : 0);
        n_failed += stats.failed;
        for (uint32_t i = 0; i < 16; i++) {
            assert_int_equal(kvs_unit_block(&unit, i)->pins, 0);
            assert_false(kvs_unit_segment(&unit, i)->training ||
                         kvs_unit_segment(&unit, i)->begins_job);
        }
        assert_true(unit_codes_are_right(&bench, &unit));
        while (n > 0)
            kvs_arena_free(bench.arena, page, filler[--n]);
        assert_int_equal(kvs_index_schedule(bench.indexer, &unit, unit.committed, &plan),
                         KV_OK);
        finish_jobs();
        check_chapter(&unit, 0, 8);
        check_chapter(&unit, 8, 16);
        lone_unit_clear(&unit);
        check_empty();
        bench_close(&bench);
    }
    assert_true(n_failed >= 2);
    bench_open(&bench, ARENA_BYTES, 1);
}

static int set_up(void **state)
{
    (void)state;
    bench_open(&bench, ARENA_BYTES, 1);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    bench_close(&bench);
    return 0;
}

/* ---- rotations --------------------------------------------------------------------------- */

static struct kvs_codebook *book_at(const struct kvs_unit *unit, uint32_t block)
{
    return kvs_codebook_at(&bench.codebooks, kvs_unit_codes(unit, block)->codebook);
}

/* The chapters of a unit have one rotation; another unit has another one, and a fork the same.  It
 * goes with the last that uses it. */
static void chapters_share_it(void **state)
{
    struct kvs_unit unit, other, fork;
    const struct kvs_rotation *rotation;

    (void)state;
    unit_make(&bench, &unit, 0, D, 20 * KV_BLOCK_TOKENS);
    unit_make(&bench, &other, 1, D, 8 * KV_BLOCK_TOKENS);
    assert_int_equal(cut(&unit, 16 * KV_BLOCK_TOKENS, 8), 2);
    assert_int_equal(cut(&other, other.committed, 8), 1);
    finish_jobs();
    rotation = book_at(&unit, 0)->rotation;
    assert_non_null(rotation);
    assert_ptr_equal(book_at(&unit, 8)->rotation, rotation);
    assert_ptr_not_equal(book_at(&other, 0)->rotation, rotation);
    assert_int_equal(rotation->refs, 2);
    assert_int_equal(kv_pool_used(bench.codebooks.rotations), 2);

    lone_unit_init(&fork, &bench.heap, 0, 0, D * sizeof(float));
    assert_int_equal(lone_unit_fork(&unit, &fork, 8 * KV_BLOCK_TOKENS), KV_OK);
    lone_unit_clear(&unit);
    assert_int_equal(rotation->refs, 1);
    assert_int_equal(unit_append(&bench, &fork, 8 * KV_BLOCK_TOKENS), KV_OK);
    assert_int_equal(cut(&fork, fork.committed, 8), 1);
    finish_jobs();
    assert_ptr_equal(book_at(&fork, 8)->rotation, rotation);
    assert_true(unit_codes_are_right(&bench, &fork));
    kvs_codebooks_check(&bench.codebooks);
    lone_unit_clear(&fork);
    lone_unit_clear(&other);
    check_empty();
    assert_int_equal(kv_pool_used(bench.codebooks.rotations), 0);
}

/* A chapter waits for the one before, though another session has its job. */
static void it_is_waited_for(void **state)
{
    struct kvs_unit first, unit, fork;

    (void)state;
    unit_make(&bench, &first, 0, D, 8 * KV_BLOCK_TOKENS);
    unit_make(&bench, &unit, 0, D, 8 * KV_BLOCK_TOKENS);
    lone_unit_init(&fork, &bench.heap, 0, 0, D * sizeof(float));
    assert_int_equal(lone_unit_fork(&unit, &fork, unit.committed), KV_OK);
    fork.session = 1;
    assert_int_equal(unit_append(&bench, &fork, 8 * KV_BLOCK_TOKENS), KV_OK);
    /* The unit's job is its session's second one: that of the fork has its turn before. */
    assert_int_equal(cut(&first, first.committed, 8), 1);
    assert_int_equal(cut(&unit, unit.committed, 8), 1);
    assert_int_equal(cut(&fork, fork.committed, 8), 1);
    finish_jobs();
    assert_non_null(book_at(&fork, 0)->rotation);
    assert_ptr_equal(book_at(&fork, 8)->rotation, book_at(&fork, 0)->rotation);
    lone_unit_clear(&first);
    lone_unit_clear(&unit);
    lone_unit_clear(&fork);
    check_empty();
}

/* One that is damaged breaks every codebook that uses it; the first to be replaced makes another,
 * and the others take that. */
static void it_breaks_all(void **state)
{
    const struct kvs_index_plan plan = plan_of(8);
    struct kvs_rotation *rotation;
    struct kvs_unit unit;

    (void)state;
    unit_make(&bench, &unit, 0, D, 16 * KV_BLOCK_TOKENS);
    assert_int_equal(cut(&unit, unit.committed, 8), 2);
    finish_jobs();
    rotation = book_at(&unit, 0)->rotation;
    ((uint8_t *)rotation->matrix.bytes)[5] ^= 4;
    for (uint32_t block = 0; block < 16; block += 8) {
        assert_false(kvs_codebook_verify_learnt(&bench.codebooks,
                                                kvs_unit_codes(&unit, block)->codebook));
        assert_true(book_at(&unit, block)->is_broken);
    }
    for (uint32_t block = 0; block < 16; block += 8) {
        assert_int_equal(kvs_index_replace(bench.indexer, &unit, block,
                                           (block + 8) * KV_BLOCK_TOKENS, &plan),
                         KV_OK);
        finish_jobs();
    }
    assert_ptr_equal(book_at(&unit, 8)->rotation, book_at(&unit, 0)->rotation);
    assert_true(kvs_column_is_sound(&book_at(&unit, 0)->rotation->matrix));
    assert_true(unit_codes_are_right(&bench, &unit));
    lone_unit_clear(&unit);
    check_empty();
}

int main(void)
{
    const struct CMUnitTest of_rotations[] = {
        cmocka_unit_test_setup_teardown(chapters_share_it, set_up, tear_down),
        cmocka_unit_test_setup_teardown(it_is_waited_for, set_up, tear_down),
        cmocka_unit_test_setup_teardown(it_breaks_all, set_up, tear_down),
    };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(chapters, set_up, tear_down),
        cmocka_unit_test_setup_teardown(forks_inherit, set_up, tear_down),
        cmocka_unit_test_setup_teardown(chapter_ends, set_up, tear_down),
        cmocka_unit_test_setup_teardown(cut_segments_are_no_holes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(sessions_take_turns, set_up, tear_down),
        cmocka_unit_test_setup_teardown(truncates_drop, set_up, tear_down),
        cmocka_unit_test_setup_teardown(overwritten_rows, set_up, tear_down),
        cmocka_unit_test_setup_teardown(seeds, set_up, tear_down),
        cmocka_unit_test_setup_teardown(summaries, set_up, tear_down),
        cmocka_unit_test_setup_teardown(summaries_of_larger_groups, set_up, tear_down),
        cmocka_unit_test_setup_teardown(summaries_of_open_codebooks, set_up, tear_down),
        cmocka_unit_test_setup_teardown(full_of_codes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(broken_codebooks, set_up, tear_down),
        cmocka_unit_test_setup_teardown(broken_codebooks_and_bad_rows, set_up, tear_down),
        cmocka_unit_test(too_few),
        cmocka_unit_test_setup_teardown(slices_change_nothing, set_up, tear_down),
        cmocka_unit_test_setup_teardown(pieces, set_up, tear_down),
        cmocka_unit_test_setup_teardown(full, set_up, tear_down),
    };

    int n_failed = cmocka_run_group_tests(tests, NULL, NULL);

    rotates = true;
    n_failed += cmocka_run_group_tests(tests, NULL, NULL);
    copies = true;
    n_failed += cmocka_run_group_tests(tests, NULL, NULL);
    return n_failed + cmocka_run_group_tests(of_rotations, NULL, NULL);
}
