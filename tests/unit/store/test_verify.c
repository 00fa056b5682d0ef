/* Rows, codes, cells and summaries in memory that no longer are what was written or made:
 * found, marked, kept out of what is made of others, and mended to the same bytes. */
#include "kvserver/store/rows/verify.h"

#include "kvserver/store/query/attend.h"
#include "tests/support/units.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    D_K = 16,
    D_V = 16,
    D = D_K + D_V,
    ARENA_BYTES = 64 << 20,
};

static struct bench bench;

static int open_bench(void **state)
{
    (void)state;
    bench_open(&bench, ARENA_BYTES, 3);
    return 0;
}

static int close_bench(void **state)
{
    (void)state;
    assert_int_equal(bench.heap.n_segments, 0);
    assert_int_equal(bench.heap.health.rows_bad, 0);
    bench_close(&bench);
    return 0;
}

static uint32_t first_bad(const struct kvs_unit *unit, uint32_t begin, uint32_t n)
{
    const struct kvs_row_set rows = kvs_unit_rows(unit);

    return begin + kvs_verify_run(&bench.heap, &rows, begin, 1, n);
}

static void a_bad_row_is_bad_until_it_is_written(void **state)
{
    const struct kvs_health *health = &bench.heap.health;
    const struct kvs_row_set *rows;
    struct kvs_row_set set;
    struct kvs_unit unit;
    uint8_t row[D * sizeof(float)];
    uint32_t crc;

    (void)state;
    unit_make(&bench, &unit, 1, D, 700);
    set = kvs_unit_rows(&unit);
    rows = &set;
    assert_int_equal(first_bad(&unit, 0, 700), 700);
    assert_int_equal(kvs_unit_known_bad(&unit, 0, 700), 700);
    memcpy(row, kvs_unit_row(&unit, 300), sizeof(row));
    crc = *kvs_unit_crc(&unit, 300);

    /* A row's bytes, another one's checksum: the first is told, both are marked. */
    kvs_unit_row(&unit, 300)[7] ^= 0x20;
    *kvs_unit_crc(&unit, 600) ^= 1;
    assert_int_equal(kvs_unit_known_bad(&unit, 0, 700), 700);
    assert_int_equal(first_bad(&unit, 0, 700), 300);
    assert_int_equal(first_bad(&unit, 301, 399), 600);
    assert_int_equal(kvs_verify_run(&bench.heap, rows, 0, 7, 100), 100);
    assert_int_equal(kvs_verify_run(&bench.heap, rows, 0, 100, 7), 3);
    assert_true(kvs_unit_is_bad(&unit, 300) && kvs_unit_is_bad(&unit, 600));
    assert_int_equal(kvs_unit_known_bad(&unit, 0, 700), 300);
    assert_int_equal(kvs_unit_known_bad(&unit, 301, 299), 600);
    assert_int_equal(health->rows_bad, 2);
    assert_int_equal(health->found[KVS_KIND_ROWS], 2);

    /* What flips back is not trusted. */
    kvs_unit_row(&unit, 300)[7] ^= 0x20;
    *kvs_unit_crc(&unit, 600) ^= 1;
    assert_int_equal(first_bad(&unit, 0, 700), 300);
    assert_int_equal(health->found[KVS_KIND_ROWS], 2);

    memset(kvs_unit_row(&unit, 300), 0, sizeof(row));
    kvs_unit_mend(&unit, 300, row, crc);
    assert_memory_equal(kvs_unit_row(&unit, 300), row, sizeof(row));
    assert_int_equal(first_bad(&unit, 0, 600), 600);
    assert_int_equal(health->rows_bad, 1);
    assert_int_equal(health->mended[KVS_KIND_ROWS], 1);
    lone_unit_clear(&unit);
    assert_int_equal(health->rows_bad, 0);
}

static uint32_t attend(const struct kvs_unit *unit, uint32_t n)
{
    const struct kv_attend_shape shape = {
        .type = KV_KEY_FP32, .d_k = D_K, .d_v = D_V, .n_queries = 1, .scale = 1};
    static struct kvs_attention attention;
    const float query[D_K] = {1};

    kvs_attention_begin(&attention, &shape, unit, query, false);
    for (uint32_t token = 0; token < n; token++)
        assert_false(kvs_attention_add(&attention, token, 1));
    return kvs_attention_piece(&attention, &bench.heap);
}

/* Nor does a row that was found bad enter an output before it is written again. */
static void attention_refuses_bad_rows(void **state)
{
    struct kvs_unit unit;

    (void)state;
    unit_make(&bench, &unit, 1, D, 200);
    assert_int_equal(attend(&unit, 200), UINT32_MAX);
    kvs_unit_row(&unit, 42)[7] ^= 0x20;
    assert_int_equal(attend(&unit, 42), UINT32_MAX);
    assert_int_equal(attend(&unit, 200), 42);
    kvs_unit_row(&unit, 42)[7] ^= 0x20;
    assert_int_equal(attend(&unit, 200), 42);
    assert_int_equal(attend(&unit, 42), UINT32_MAX);
    lone_unit_clear(&unit);
}

/* A row is checked by what its session says, not by where it lies. */
static void writers_are_the_sessions(void **state)
{
    struct kv_writers *one = kv_writers_create(NULL, 0, 11), *fork, *other;
    const struct kv_writers *writers;
    struct kvs_unit unit;

    (void)state;
    fork = kv_writers_create(one, 200, 22);
    other = kv_writers_create(one, 201, 22);
    assert_true(one != NULL && fork != NULL && other != NULL);
    assert_int_equal(lone_unit_init(&unit, &bench.heap, 3, 4, D * sizeof(float)), KV_OK);
    writers = fork;
    unit.writers = &writers;
    assert_int_equal(unit_append(&bench, &unit, 400), KV_OK);
    assert_int_equal(first_bad(&unit, 0, 400), 400);
    writers = other;
    assert_int_equal(first_bad(&unit, 0, 200), 200);
    assert_int_equal(first_bad(&unit, 201, 199), 400);
    assert_int_equal(first_bad(&unit, 0, 400), 200);
    lone_unit_clear(&unit);
    free(one);
    free(fork);
    free(other);
}

/* Marks go where rows go, and away with them. */
static void marks_follow_the_rows(void **state)
{
    const struct kvs_health *health = &bench.heap.health;
    struct kvs_unit unit, child;

    (void)state;
    unit_make(&bench, &unit, 0, D, 230);
    kvs_unit_row(&unit, 10)[0] ^= 1;
    kvs_unit_row(&unit, 150)[0] ^= 1;
    kvs_unit_row(&unit, 220)[0] ^= 1;
    assert_int_equal(first_bad(&unit, 0, 230), 10);
    assert_int_equal(lone_unit_init(&child, &bench.heap, 0, 0, D * sizeof(float)), KV_OK);
    assert_int_equal(lone_unit_fork(&unit, &child, 200), KV_OK);
    assert_int_equal(kvs_unit_known_bad(&child, 0, 200), 10);
    assert_int_equal(health->rows_bad, 3);

    /* The child's copy of the half-filled block. */
    assert_int_equal(unit_append(&bench, &child, 30), KV_OK);
    assert_ptr_equal(kvs_unit_block(&child, 0), kvs_unit_block(&unit, 0));
    assert_ptr_not_equal(kvs_unit_block(&child, 1), kvs_unit_block(&unit, 1));
    assert_true(kvs_unit_is_bad(&child, 150));
    assert_int_equal(first_bad(&child, 151, 79), 230);
    assert_int_equal(health->rows_bad, 4);

    /* Rows that are written anew in their place. */
    kvs_unit_truncate(&unit, 210);
    assert_int_equal(unit_append(&bench, &unit, 20), KV_OK);
    assert_int_equal(first_bad(&unit, 151, 79), 230);
    assert_int_equal(health->rows_bad, 3);
    lone_unit_clear(&unit);
    assert_int_equal(health->rows_bad, 2);
    lone_unit_clear(&child);
}

static struct kvs_index_plan plan_of(uint32_t chapter_blocks)
{
    return (struct kvs_index_plan){
        .chapter_blocks = chapter_blocks,
        .shape = {.d = D_K, .m = 2, .bits = 4},
        .type = KV_KEY_FP32,
        .d_v = D_V,
        .summaries_bits = KV_SUMMARY_16,
        .summaries_rows = KV_SUMMARY_ROWS_LEAST,
        .iterations = 3,
        .seed = 5,
    };
}

static void work_off(void)
{
    while (kvs_indexer_step(bench.indexer))
        ;
}

static void index_unit(const struct kvs_unit *unit, uint32_t chapter_blocks)
{
    const struct kvs_index_plan plan = plan_of(chapter_blocks);

    assert_int_equal(kvs_index_schedule(bench.indexer, unit, unit->committed, &plan), KV_OK);
    work_off();
}

/* Codes of a block whose tile has changed are not sealed again by those that join them. */
static void bad_codes_are_made_again_as_they_were(void **state)
{
    struct kvs_segment_store *heap = &bench.heap;
    uint8_t tile[KV_TILE_BYTES_MAX];
    struct kvs_block *block;
    const struct kvs_codes *codes;
    struct kvs_unit unit;

    (void)state;
    unit_make(&bench, &unit, 0, D, 1000);
    index_unit(&unit, 0);
    block = kvs_unit_block(&unit, 7); /* of 104 rows */
    codes = kvs_block_codes(block, 0);
    const struct kvs_codebook *book = kvs_codebook_at(&bench.codebooks, codes->codebook);
    const size_t bytes = kv_tile_bytes(&book->shape);
    assert_int_equal(codes->n_coded, 104);
    assert_true(kvs_column_is_sound(&codes->column));
    assert_int_equal(unit_append(&bench, &unit, 10), KV_OK);
    memcpy(tile, codes->column.bytes, bytes);
    ((uint8_t *)codes->column.bytes)[3] ^= 4;
    assert_false(kvs_column_is_sound(&codes->column));
    assert_int_equal(kvs_segment_encode(&bench.codebooks, block, 0, codes->codebook,
                                        KV_KEY_FP32, unit.row_bytes, 110),
                     KV_CORRUPT);
    assert_int_equal(heap->health.found[KVS_KIND_CODES], 1);
    assert_int_equal(kvs_segment_coded(&bench.codebooks, codes, 128), 0);
    kvs_segment_recode(&bench.codebooks, block, 0, KV_KEY_FP32, unit.row_bytes);
    assert_int_equal(kvs_segment_coded(&bench.codebooks, codes, 128), 104);
    assert_memory_equal(codes->column.bytes, tile, bytes);
    assert_int_equal(kvs_segment_encode(&bench.codebooks, block, 0, codes->codebook,
                                        KV_KEY_FP32, unit.row_bytes, 110),
                     KV_OK);
    assert_true(kvs_column_is_sound(&codes->column));
    assert_int_equal(codes->n_coded, 110);
    lone_unit_clear(&unit);
}

/* Nothing is made of a row that is bad, wherever in the chapter it is. */
static void a_job_that_meets_a_bad_row_fails(void **state)
{
    struct kvs_indexer_stats stats;

    (void)state;
    for (uint32_t row = 0; row < 1024; row += 93) {
        struct kvs_unit unit;
        struct kvs_index_look look;

        unit_make(&bench, &unit, 0, D, 1024);
        kvs_unit_row(&unit, row)[D * 4 - 1] ^= 1; /* of the value, which codes do not see */
        kvs_indexer_get_stats(bench.indexer, &stats);
        const uint64_t n_failed = stats.failed;
        index_unit(&unit, 8);
        kvs_indexer_get_stats(bench.indexer, &stats);
        assert_int_equal(stats.failed, n_failed + 1);
        assert_int_equal(stats.n_jobs, 0);
        assert_int_equal(kvs_unit_known_bad(&unit, 0, 1024), row);
        look = (struct kvs_index_look){0};
        assert_true(kvs_index_look_on(&bench.codebooks, &unit, 1024, 0, UINT32_MAX, &look));
        assert_true(look.n_coded <= row / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS);
        lone_unit_clear(&unit);
    }
}

/* The same for a row that goes bad when the codes are there and summaries are made. */
static void summaries_are_of_good_rows(void **state)
{
    struct kvs_index_plan plan = plan_of(8);
    struct kvs_indexer_stats stats;
    struct kvs_unit unit;

    (void)state;
    unit_make(&bench, &unit, 0, D, 1024);
    plan.summaries_bits = 0;
    assert_int_equal(kvs_index_schedule(bench.indexer, &unit, 1024, &plan), KV_OK);
    work_off();
    plan.summaries_bits = KV_SUMMARY_16;
    assert_int_equal(kvs_index_schedule(bench.indexer, &unit, 1024, &plan), KV_OK);
    for (unsigned i = 0; i < 10; i++)
        assert_true(kvs_indexer_step(bench.indexer));
    kvs_unit_row(&unit, 1000)[1] ^= 1;
    work_off();
    kvs_indexer_get_stats(bench.indexer, &stats);
    assert_true(kvs_unit_is_bad(&unit, 1000));
    const struct kvs_codebook *book =
        kvs_codebook_at(&bench.codebooks, kvs_unit_codes(&unit, 0)->codebook);
    assert_int_equal(book->summaries.n_rows, 0);
    lone_unit_clear(&unit);
}

/* Lost cells and summaries come back to the bit, from the unit that has all of their rows. */
static void what_is_lost_is_made_again(void **state)
{
    struct kvs_segment_store *heap = &bench.heap;
    struct kvs_unit unit, fork;
    uint8_t *group;
    uint32_t *cells;

    (void)state;
    unit_make(&bench, &unit, 0, D, 1024);
    index_unit(&unit, 8);
    const uint32_t codebook = kvs_unit_codes(&unit, 0)->codebook;
    struct kvs_codebook *book = kvs_codebook_at(&bench.codebooks, codebook);
    const size_t n_cells = kv_cells_head(&book->shape) + book->n_celled;
    const size_t group_bytes = kv_summary_bytes(&book->summaries.shape);
    assert_non_null(kvs_codebook_lists(book));
    assert_int_equal(book->summaries.n_rows, 1024);
    cells = malloc(n_cells * sizeof(*cells));
    group = malloc(group_bytes);
    assert_true(cells != NULL && group != NULL);
    memcpy(cells, kvs_codebook_lists(book), n_cells * sizeof(*cells));
    memcpy(group, book->summaries.groups[0].bytes, group_bytes);
    assert_true(kvs_column_is_sound(&book->lists) && kvs_column_is_sound(&book->learnt));

    kvs_codebook_lists(book)[n_cells - 1] ^= 8;
    assert_false(kvs_column_is_sound(&book->lists));
    assert_false(kvs_codebook_verify_cells(&bench.codebooks, codebook));
    assert_true(kvs_codebook_verify_cells(&bench.codebooks, codebook)); /* that is known */
    assert_int_equal(book->n_cells_lost, book->n_celled);
    assert_int_equal(heap->health.found[KVS_KIND_CELLS], 1);
    assert_true(kvs_codebook_verify_summaries(&bench.codebooks, codebook, 0));
    ((uint8_t *)book->summaries.groups[0].bytes)[group_bytes / 2] ^= 8;
    assert_false(kvs_column_is_sound(&book->summaries.groups[0]));
    assert_false(kvs_codebook_verify_summaries(&bench.codebooks, codebook, 0));
    assert_int_equal(heap->health.found[KVS_KIND_SUMMARIES], 1);
    assert_int_equal(book->summaries.n_rows, 0);

    /* A fork of some of the rows cannot. */
    assert_int_equal(lone_unit_init(&fork, heap, 0, 0, D * sizeof(float)), KV_OK);
    assert_int_equal(lone_unit_fork(&unit, &fork, 512), KV_OK);
    assert_int_equal(kvs_index_repair(bench.indexer, &fork, 0), KV_OK);
    assert_false(kvs_indexer_step(bench.indexer));
    assert_int_equal(kvs_index_repair(bench.indexer, &unit, 0), KV_OK);
    assert_int_equal(kvs_index_repair(bench.indexer, &unit, 0), KV_OK); /* a job is at it */
    work_off();
    assert_int_equal(book->n_cells_lost, 0);
    assert_int_equal(book->n_summaries_lost, 0);
    assert_memory_equal(kvs_codebook_lists(book), cells, n_cells * sizeof(*cells));
    assert_memory_equal(book->summaries.groups[0].bytes, group, group_bytes);
    assert_int_equal(heap->health.mended[KVS_KIND_CELLS], 1);
    assert_int_equal(heap->health.mended[KVS_KIND_SUMMARIES], 1);
    free(cells);
    free(group);
    lone_unit_clear(&fork);
    lone_unit_clear(&unit);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_bench, close_bench)
    const struct CMUnitTest tests[] = {
        TEST(a_bad_row_is_bad_until_it_is_written),
        TEST(attention_refuses_bad_rows),
        TEST(writers_are_the_sessions),
        TEST(marks_follow_the_rows),
        TEST(bad_codes_are_made_again_as_they_were),
        TEST(a_job_that_meets_a_bad_row_fails),
        TEST(summaries_are_of_good_rows),
        TEST(what_is_lost_is_made_again),
    };
#undef TEST

    return cmocka_run_group_tests(tests, NULL, NULL);
}
