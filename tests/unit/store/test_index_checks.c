/* The checks of codebooks and index jobs, each proved: what is sound passes, and what a single
 * invariant was broken in ends the process.
 *
 * The builder's own source is part of this test, which so reaches into its jobs. */
#include "kvserver/store/index/builder.c"
#include "tests/support/dies.h"
#include "tests/support/units.h"

enum {
    D = 16,
    ARENA_BYTES = 64 << 20,
    TOKENS = 16 * KV_BLOCK_TOKENS,
};

static struct bench bench;
static struct kvs_unit coded, waiting;

static int set_up(void **state)
{
    const struct kvs_index_plan plan = {
        .chapter_blocks = 16,
        .shape = {.d = D, .m = 2, .bits = 4},
        .type = KV_KEY_FP32,
        .iterations = 3,
        .seed = 5,
    };

    (void)state;
    bench_open(&bench, ARENA_BYTES, 7);
    unit_make(&bench, &coded, 0, D, TOKENS);
    unit_make(&bench, &waiting, 1, D, TOKENS);
    if (kvs_index_schedule(bench.indexer, &coded, TOKENS, &plan) != KV_OK)
        return -1;
    while (kvs_indexer_step(bench.indexer))
        continue;
    return kvs_index_schedule(bench.indexer, &waiting, TOKENS, &plan) == KV_OK ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    while (kvs_indexer_step(bench.indexer))
        continue;
    lone_unit_clear(&waiting);
    lone_unit_clear(&coded);
    bench_close(&bench);
    return 0;
}

/* ---- codebooks --------------------------------------------------------------------------- */

static void check_codebooks(void)
{
    kvs_codebooks_check(&bench.codebooks);
}

static struct kvs_codebook *book(void)
{
    return kvs_codebook_at(&bench.codebooks, kvs_unit_codes(&coded, 0)->codebook);
}

static void codebook_of_nobody(void)
{
    book()->refs = 0;
}

static void codebook_from_the_future(void)
{
    book()->serial = bench.codebooks.serial + 1;
}

static void codebook_given_back(void)
{
    kvs_arena_free(bench.arena, kvs_arena_class_of(bench.arena, book()->learnt.bytes),
                   book()->learnt.bytes);
}

static void codebook_cells_of_no_rows(void)
{
    book()->n_celled = book()->n_celled == 0 ? KV_BLOCK_TOKENS : 0;
}

static void codebook_cells_of_half_a_block(void)
{
    book()->n_celled += KV_BLOCK_TOKENS / 2;
}

static void summaries_not_counted(void)
{
    bench.codebooks.rows_summarised++;
}

static void summaries_bytes_not_counted(void)
{
    bench.codebooks.summaries_bytes++;
}

static void summaries_of_no_groups(void)
{
    book()->summaries.shape.rows = KV_SUMMARY_ROWS_LEAST;
    book()->summaries.n_rows += KV_BLOCK_TOKENS;
    bench.codebooks.rows_summarised += KV_BLOCK_TOKENS;
    bench.codebooks.summaries_bytes = kvs_summaries_bytes(&book()->summaries);
}

static void codebooks_find(void **state)
{
    (void)state;
    assert_non_null(kvs_unit_codes(&coded, 0)->column.bytes);
    check_codebooks();
    expect_found(codebook_of_nobody, check_codebooks);
    expect_found(codebook_from_the_future, check_codebooks);
    expect_found(codebook_given_back, check_codebooks);
    expect_found(codebook_cells_of_no_rows, check_codebooks);
    expect_found(codebook_cells_of_half_a_block, check_codebooks);
    expect_found(summaries_not_counted, check_codebooks);
    expect_found(summaries_bytes_not_counted, check_codebooks);
    expect_found(summaries_of_no_groups, check_codebooks);
}

/* ---- jobs -------------------------------------------------------------------------------- */

static void check_jobs(void)
{
    kvs_indexer_check(bench.indexer);
}

static struct kvs_index_job *job(void)
{
    return job_of(kvs_job_queue_first(bench.indexer->queue));
}

static void job_in_no_list(void)
{
    (void)kv_pool_get(bench.indexer->jobs);
}

static void job_of_no_rows(void)
{
    job()->n_rows = 0;
}

static void job_of_more_rows_than_segments(void)
{
    job()->n_rows += KV_BLOCK_TOKENS;
}

static void job_without_its_list(void)
{
    kvs_arena_free(bench.arena, job()->blocks_class, job()->blocks);
}

static void job_that_no_segment_begins(void)
{
    job()->blocks[0]->segments[job()->at].begins_job = false;
}

static void job_without_a_pin(void)
{
    job()->blocks[3]->pins = 0;
}

static void job_for_segments_that_train_not(void)
{
    job()->blocks[3]->segments[job()->at].training = false;
}

static void job_with_a_codebook_too_early(void)
{
    job()->has_codebook = true;
}

static void job_with_lists_too_early(void)
{
    job()->lists_column.bytes = job()->blocks;
}

static void job_in_training_too_early(void)
{
    job()->training = job()->blocks;
}

/* From here on it is at work. */
static void begin_job(void)
{
    while (job()->training == NULL)
        kvs_indexer_step(bench.indexer);
}

static void job_at_work_without_a_codebook(void)
{
    begin_job();
    job()->has_codebook = false;
}

static void job_at_work_for_a_codebook_of_nobody(void)
{
    begin_job();
    book_of(bench.indexer, job())->refs = 0;
}

static void jobs_find(void **state)
{
    (void)state;
    check_jobs();
    assert_false(finds(check_jobs, begin_job));
    expect_found(job_in_no_list, check_jobs);
    expect_found(job_of_no_rows, check_jobs);
    expect_found(job_of_more_rows_than_segments, check_jobs);
    expect_found(job_without_its_list, check_jobs);
    expect_found(job_that_no_segment_begins, check_jobs);
    expect_found(job_without_a_pin, check_jobs);
    expect_found(job_for_segments_that_train_not, check_jobs);
    expect_found(job_with_a_codebook_too_early, check_jobs);
    expect_found(job_with_lists_too_early, check_jobs);
    expect_found(job_in_training_too_early, check_jobs);
    expect_found(job_at_work_without_a_codebook, check_jobs);
    expect_found(job_at_work_for_a_codebook_of_nobody, check_jobs);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(codebooks_find, set_up, tear_down),
        cmocka_unit_test_setup_teardown(jobs_find, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
