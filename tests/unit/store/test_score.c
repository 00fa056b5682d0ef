/* Scans of units, coded and not, against one row after the other. */
#include "kvserver/store/query/expand.h"

#include "tests/support/units.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    D = 24,
    ROWS_MAX = 4000,
    QUERIES_MAX = 5,
    ARENA_BYTES = 64 << 20,
    ROUNDS = 200,
};

static struct bench bench;
static float queries[QUERIES_MAX * D], room[(QUERIES_MAX + KVS_SCORE_SPARE) * 2 * ROWS_MAX];
static struct kvs_score_run runs[KVS_SCORE_RUNS_MAX];
static float rotated[KV_QUERIES_MAX * KV_ROTATION_DIM_MAX];
static float tables[QUERIES_MAX * KVS_SCORE_TABLE];

static void train_to(
    const struct kvs_unit *unit, uint32_t tokens, uint32_t blocks, uint32_t m, uint32_t bits)
{
    const struct kvs_index_plan plan = {
        .chapter_blocks = blocks,
        .shape = {.d = D, .m = m, .bits = bits},
        .type = KV_KEY_FP32,
        .iterations = 2,
    };

    assert_int_equal(kvs_index_schedule(bench.indexer, unit, tokens, &plan), KV_OK);
    while (kvs_indexer_step(bench.indexer))
        ;
}

static void train(const struct kvs_unit *unit, uint32_t tokens, uint32_t blocks, uint32_t m)
{
    train_to(unit, tokens, blocks, m, 3);
}

static float
score_of(const struct kvs_unit *unit, uint32_t token, const float *query, bool by_code)
{
    const struct kvs_codes *codes = kvs_unit_codes(unit, token / KV_BLOCK_TOKENS);
    const uint32_t row = token % KV_BLOCK_TOKENS;
    static float table[KVS_SCORE_TABLE];
    float score = 0;

    if (!by_code || codes->column.bytes == NULL || row >= codes->n_coded) {
        kv_exact_scores_score(KV_KEY_FP32, kvs_unit_row(unit, token), unit->row_bytes, 1, D,
                              query, 1, &score, 1);
        return score;
    }
    const struct kvs_codebook *book = kvs_codebook_at(&bench.codebooks, codes->codebook);
    const size_t n_centroids = kv_pq_n_centroids(&book->shape);
    kv_pq_tables(&book->shape, kvs_codebook_centroids(book), query, 1, table);
    for (uint32_t j = 0; j < book->shape.m; j++) {
        uint8_t own[KV_PQ_SUBSPACES_MAX];

        kv_tile_get(&book->shape, codes->column.bytes, row, 1, own, 1);
        score += table[j * n_centroids + own[j]];
    }
    return score;
}

static struct kvs_score scan_of(struct kvs_unit *unit,
                                const struct kv_wire_range *ranges,
                                uint32_t n_ranges,
                                uint32_t n_queries,
                                bool by_code,
                                bool by_cell)
{
    return (struct kvs_score){
        .unit = unit,
        .type = KV_KEY_FP32,
        .d = D,
        .ranges = ranges,
        .n_ranges = n_ranges,
        .n_queries = n_queries,
        .queries = queries,
        .by_code = by_code,
        .by_cell = by_cell,
        .n = kvs_ranges_count(ranges, n_ranges),
        .room = room,
        .room_floats = sizeof(room) / sizeof(room[0]),
        .runs = runs,
        .tables = tables,
        .rotated = rotated,
    };
}

/* The item of a token in the scan. */
static uint32_t item_of(const struct kvs_score *scan, uint32_t token)
{
    const struct kvs_score_run *run = scan->runs;
    uint16_t cell;

    while (token >= run->token_end)
        run++;
    assert_true(token >= run->token_begin && run < scan->runs + scan->n_runs);
    if (run->codebook == KVS_SCORE_ROWS)
        return run->item + token - run->token_begin;
    const struct kvs_codebook *book = kvs_codebook_at(&bench.codebooks, run->codebook);
    const struct kv_cells cells = kvs_codebook_cells(book);
    kv_tile_cells(&book->shape,
                  kvs_unit_codes(scan->unit, token / KV_BLOCK_TOKENS)->column.bytes,
                  token % KV_BLOCK_TOKENS, 1, &cell);
    return run->item + kv_cells_item(&cells, cell);
}

/* Scans, and checks every score and how many rows have it; returns the scan for its counts. */
static struct kvs_score check(struct kvs_unit *unit,
                              const struct kv_wire_range *ranges,
                              uint32_t n_ranges,
                              bool by_code)
{
    struct kvs_score scan = scan_of(unit, ranges, n_ranges,
                                    1 + (uint32_t)kv_random_below(&bench.random, QUERIES_MAX),
                                    by_code, kv_random_below(&bench.random, 4) > 0);
    struct kvs_range_walk walk = {.ranges = ranges};
    static uint32_t counts[2 * ROWS_MAX];
    uint32_t n_slices = 0, i = 0;

    memset(counts, 0, sizeof(counts));
    kvs_score_begin(&scan, &bench.codebooks);
    while (!kvs_score_piece(&scan, &bench.codebooks))
        assert_true(++n_slices < ROWS_MAX);
    assert_int_equal(scan.n_coded + scan.n_exact, scan.n);
    for (uint32_t r = 0; r < n_ranges; r++) {
        for (uint32_t token = ranges[r].begin; token < ranges[r].end; token++, i++) {
            const uint32_t item = item_of(&scan, token);

            counts[item]++;
            assert_int_equal(kvs_range_walk_to(&walk, i), token);
            for (uint32_t q = 0; q < scan.n_queries; q++) {
                float wanted = score_of(unit, token, queries + (size_t)q * D, by_code);

                assert_memory_equal(&scan.scores[(size_t)q * scan.n_items + item], &wanted,
                                    sizeof(wanted));
            }
        }
    }
    for (uint32_t item = 0; item < scan.n_items; item++)
        assert_int_equal(scan.counts != NULL ? scan.counts[item] : 1, counts[item]);
    assert_int_equal(i, scan.n);
    return scan;
}

/* What a choice takes, by cells where they are or by rows. */
static uint32_t pick(struct kvs_unit *unit,
                     const struct kv_wire_range *ranges,
                     uint32_t n_ranges,
                     const struct kvs_selection *choice,
                     bool by_cell,
                     bool *ret_cells,
                     uint32_t *ret_tokens,
                     uint32_t *ret_heads,
                     float *ret_weights)
{
    static struct kvs_selector chooser;
    struct kvs_score scan = scan_of(unit, ranges, n_ranges, choice->n_queries, true, by_cell);
    struct kvs_expander *picker = kvs_expander_create(KVS_EXPAND_ROWS_MAX);
    uint32_t n;

    assert_non_null(picker);
    kvs_score_begin(&scan, &bench.codebooks);
    while (!kvs_score_piece(&scan, &bench.codebooks))
        ;
    kvs_select_begin(&chooser, choice, scan.scores, scan.maxima, scan.counts, NULL,
                     scan.n_items, true, scan.scores + (size_t)scan.n_items * scan.n_queries);
    while (!kvs_select_piece(&chooser))
        ;
    kvs_expand_begin(picker, &scan, &chooser, ret_tokens, ret_heads);
    while (!kvs_expand_piece(picker, &bench.codebooks))
        ;
    n = picker->n;
    kvs_expand_weights(&scan, &chooser, &bench.codebooks, ret_tokens, n, ret_weights);
    kvs_expander_destroy(picker);
    *ret_cells = scan.counts != NULL;
    return n;
}

static void whole(struct kvs_unit *unit, uint32_t n_coded, uint32_t n_chapters)
{
    const struct kv_wire_range all = {0, unit->committed};
    struct kvs_score scan = check(unit, &all, 1, true);

    assert_int_equal(scan.n_coded, n_coded);
    assert_int_equal(scan.n_chapters, n_chapters);
    scan = check(unit, &all, 1, false);
    assert_int_equal(scan.n_coded, 0);
}

static uint32_t some_ranges(struct kv_wire_range *ranges, uint32_t max, uint32_t tokens)
{
    uint32_t n = 0, begin = (uint32_t)kv_random_below(&bench.random, tokens);

    while (n < max && begin < tokens) {
        uint32_t end = begin + 1 + (uint32_t)kv_random_below(&bench.random, tokens - begin);

        if (kv_random_below(&bench.random, 3) == 0)
            end = (begin / KV_BLOCK_TOKENS + 1) * KV_BLOCK_TOKENS;
        if (end > tokens)
            end = tokens;
        ranges[n++] = (struct kv_wire_range){begin, end};
        begin = end + (uint32_t)kv_random_below(&bench.random, 3) * 40;
    }
    return n;
}

static void chapters(void **state)
{
    struct kv_wire_range ranges[8];
    struct kvs_unit unit;

    (void)state;
    unit_make(&bench, &unit, 0, D, 1500);
    whole(&unit, 0, 0);
    train(&unit, 1500, 8, 2); /* eight blocks, and three that stay */
    whole(&unit, 1024, 1);
    assert_int_equal(unit_append(&bench, &unit, 1700), KV_OK);
    train(&unit, 3200, 8, 4); /* of another shape */
    whole(&unit, 3072, 3);
    for (int round = 0; round < ROUNDS; round++)
        check(&unit, ranges, some_ranges(ranges, 8, 3200), round % 4 > 0);
    lone_unit_clear(&unit);
}

/* A unit is truncated in a block of its chapter, and goes on: the rows that are new in that block
 * have no codes and get none, and are scored by their keys; no row is left out. */
static void truncated_in_a_chapter(void **state)
{
    struct kv_wire_range ranges[8];
    struct kvs_unit unit, fork;

    (void)state;
    unit_make(&bench, &unit, 0, D, 1500);
    train(&unit, 1500, 8, 2);
    lone_unit_init(&fork, &bench.heap, 0, 0, D * sizeof(float));
    kvs_unit_truncate(&unit, 700); /* 60 rows of block 5 */
    whole(&unit, 700, 1);
    assert_int_equal(lone_unit_fork(&unit, &fork, 700), KV_OK);
    assert_int_equal(unit_append(&bench, &fork, 500), KV_OK); /* into a copy, without codes */
    whole(&fork, 640, 1);
    for (int round = 0; round < ROUNDS; round++)
        check(&fork, ranges, some_ranges(ranges, 8, 1200), round % 4 > 0);
    lone_unit_clear(&fork);

    assert_int_equal(unit_append(&bench, &unit, 500), KV_OK); /* in place */
    assert_int_equal(kvs_unit_codes(&unit, 5)->n_coded, 700 - 5 * KV_BLOCK_TOKENS);
    train(&unit, 1200, 8, 2);
    assert_int_equal(kvs_unit_codes(&unit, 5)->n_coded, 700 - 5 * KV_BLOCK_TOKENS);
    whole(&unit, 700, 1);
    for (int round = 0; round < ROUNDS; round++)
        check(&unit, ranges, some_ranges(ranges, 8, 1200), round % 4 > 0);
    assert_true(unit_codes_are_right(&bench, &unit));
    lone_unit_clear(&unit);
}

/* Rows behind an open codebook get its codes when they are met, in forks their own. */
static void open_codebook(void **state)
{
    struct kv_wire_range ranges[8];
    struct kvs_unit unit, fork;

    (void)state;
    unit_make(&bench, &unit, 0, D, 300);
    train(&unit, 290, 0, 3);
    assert_int_equal(kvs_unit_codes(&unit, 2)->n_coded, 290 - 256);
    whole(&unit, 300, 1);
    lone_unit_init(&fork, &bench.heap, 0, 0, D * sizeof(float));
    assert_int_equal(lone_unit_fork(&unit, &fork, 280), KV_OK);
    assert_int_equal(unit_append(&bench, &unit, 400), KV_OK);
    assert_int_equal(unit_append(&bench, &fork, 500), KV_OK);
    for (int round = 0; round < ROUNDS; round++) {
        check(&unit, ranges, some_ranges(ranges, 8, 700), true);
        check(&fork, ranges, some_ranges(ranges, 8, 780), true);
    }
    whole(&unit, 700, 1);
    whole(&fork, 780, 1);
    assert_true(unit_codes_are_right(&bench, &unit));
    assert_true(unit_codes_are_right(&bench, &fork));
    /* Other rows in place of some. */
    kvs_unit_truncate(&fork, 650);
    assert_int_equal(unit_append(&bench, &fork, 77), KV_OK);
    whole(&fork, 727, 1);
    assert_true(unit_codes_are_right(&bench, &fork));
    lone_unit_clear(&unit);
    whole(&fork, 727, 1);
    lone_unit_clear(&fork);
    assert_int_equal(bench.heap.n_segments, 0);
    assert_int_equal(kv_pool_used(bench.codebooks.pool), 0);
}

static uint32_t n_coded_rows(const struct kvs_unit *unit)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < kvs_unit_n_segments(unit); i++)
        n += kvs_unit_codes(unit, i)->n_coded;
    return n;
}

/* Codes of many rows that nobody has met yet are not made at once: not even those of a segment
 * where a row costs much. */
static void codes_are_made_in_pieces(void **state)
{
    const struct kv_wire_range all = {0, ROWS_MAX};
    struct kvs_unit unit;
    bool is_done = false;

    (void)state;
    unit_make(&bench, &unit, 0, D, 1300);
    train_to(&unit, 1290, 0, 3, 8);
    assert_int_equal(unit_append(&bench, &unit, ROWS_MAX - 1300), KV_OK);
    assert_int_equal(n_coded_rows(&unit), 1290);
    const struct kvs_codebook *book =
        kvs_codebook_at(&bench.codebooks, kvs_unit_codes(&unit, 0)->codebook);
    const uint32_t most = book->scorer->rows_at_once(&book->shape);
    assert_in_range(most, 1, KV_BLOCK_TOKENS - 1);
    struct kvs_score scan = scan_of(&unit, &all, 1, 2, true, true);
    kvs_score_begin(&scan, &bench.codebooks);
    for (uint32_t before = n_coded_rows(&unit), after; !is_done; before = after) {
        is_done = kvs_score_piece(&scan, &bench.codebooks);
        after = n_coded_rows(&unit);
        assert_in_range(after - before, 0, most);
    }
    assert_int_equal(scan.n_coded, ROWS_MAX);
    check(&unit, &all, 1, true);
    assert_true(unit_codes_are_right(&bench, &unit));
    lone_unit_clear(&unit);
}

/* By cells or by rows, the same rows are chosen, by the same vectors, with the same weights. */
static void cells_choose_as_rows(void **state)
{
    static uint32_t tokens[2][ROWS_MAX], heads[2][ROWS_MAX];
    static float weights[2][ROWS_MAX];
    struct kv_wire_range ranges[8];
    struct kvs_unit unit, fork;
    unsigned n_cells = 0;

    (void)state;
    unit_make(&bench, &unit, 0, D, 3300);
    train(&unit, 2100, 8, 2);
    train(&unit, 3300, 0, 3);
    lone_unit_init(&fork, &bench.heap, 0, 0, D * sizeof(float));
    assert_int_equal(lone_unit_fork(&unit, &fork, 1500), KV_OK);
    assert_int_equal(unit_append(&bench, &fork, 1300), KV_OK);
    for (int round = 0; round < 8 * ROUNDS; round++) {
        struct kvs_unit *of = round % 2 ? &unit : &fork;
        const uint32_t n_ranges = some_ranges(ranges, 8, of->committed);
        const struct kvs_selection choice = {
            .merge = (enum kv_merge)(KV_MERGE_SUM + kv_random_below(&bench.random, 4)),
            .selection = (enum kv_selection)kv_random_below(&bench.random, 3),
            .n_queries = 1 + (uint32_t)kv_random_below(&bench.random, QUERIES_MAX),
            .scale = 0.1f + (float)kv_random_below(&bench.random, 10),
            .share = (float)(1 + kv_random_below(&bench.random, 100)) / 100,
            .k = 1 + (uint32_t)kv_random_below(&bench.random, round % 3 ? 20 : ROWS_MAX),
            .factor = 1 + (uint32_t)kv_random_below(&bench.random, 4),
        };
        uint32_t n[2];
        bool cells[2];

        for (int by_cell = 0; by_cell < 2; by_cell++)
            n[by_cell] = pick(of, ranges, n_ranges, &choice, by_cell, &cells[by_cell],
                              tokens[by_cell], heads[by_cell], weights[by_cell]);
        assert_false(cells[0]);
        n_cells += cells[1];
        assert_int_equal(n[0], n[1]);
        assert_memory_equal(tokens[0], tokens[1], n[0] * sizeof(uint32_t));
        assert_memory_equal(heads[0], heads[1], n[0] * sizeof(uint32_t));
        assert_memory_equal(weights[0], weights[1], n[0] * sizeof(float));
    }
    assert_true(n_cells > ROUNDS);
    /* Other rows in the place of some that are in cells. */
    lone_unit_clear(&unit);
    kvs_unit_truncate(&fork, 700);
    assert_int_equal(unit_append(&bench, &fork, 700), KV_OK);
    for (int round = 0; round < ROUNDS; round++)
        check(&fork, ranges, some_ranges(ranges, 8, 1400), true);
    lone_unit_clear(&fork);
    assert_int_equal(bench.heap.n_segments, 0);
    assert_int_equal(kv_pool_used(bench.codebooks.pool), 0);
}

/* Weights are asked for when the last segment, which is in cells, has been copied meanwhile:
 * for rows behind it, in a fork.  The copy has no codes, then those of another codebook. */
static void weights_of_a_copied_segment(void **state)
{
    enum {
        TOKENS = 1000
    };
    static uint32_t tokens[ROWS_MAX + KV_TOPK_SPARE], heads[ROWS_MAX];
    static float weights[3][TOKENS];
    static struct kvs_selector chooser;
    const struct kv_wire_range all = {0, TOKENS};
    const struct kvs_selection choice = {
        .merge = KV_MERGE_SUM, .n_queries = 2, .scale = 1, .k = TOKENS, .factor = 1};
    struct kvs_expander *picker = kvs_expander_create(KVS_EXPAND_ROWS_MAX);
    struct kvs_unit unit, fork;

    (void)state;
    unit_make(&bench, &unit, 0, D, 1100);
    train(&unit, 1024, 8, 2);
    lone_unit_init(&fork, &bench.heap, 0, 0, D * sizeof(float));
    assert_int_equal(lone_unit_fork(&unit, &fork, TOKENS), KV_OK);
    struct kvs_score scan = scan_of(&fork, &all, 1, choice.n_queries, true, true);
    kvs_score_begin(&scan, &bench.codebooks);
    while (!kvs_score_piece(&scan, &bench.codebooks))
        ;
    assert_non_null(scan.counts);
    assert_int_equal(scan.n_runs, 1);
    kvs_select_begin(&chooser, &choice, scan.scores, scan.maxima, scan.counts, NULL,
                     scan.n_items, true, scan.scores + (size_t)scan.n_items * scan.n_queries);
    while (!kvs_select_piece(&chooser))
        ;
    kvs_expand_begin(picker, &scan, &chooser, tokens, heads);
    while (!kvs_expand_piece(picker, &bench.codebooks))
        ;
    assert_int_equal(picker->n, TOKENS);
    kvs_expand_weights(&scan, &chooser, &bench.codebooks, tokens, picker->n, weights[0]);
    assert_int_equal(unit_append(&bench, &fork, 500), KV_OK);
    assert_null(kvs_unit_codes(&fork, TOKENS / KV_BLOCK_TOKENS)->column.bytes);
    kvs_expand_weights(&scan, &chooser, &bench.codebooks, tokens, picker->n, weights[1]);
    train(&fork, fork.committed, 0, 3);
    assert_non_null(kvs_unit_codes(&fork, TOKENS / KV_BLOCK_TOKENS)->column.bytes);
    kvs_expand_weights(&scan, &chooser, &bench.codebooks, tokens, picker->n, weights[2]);
    assert_memory_equal(weights[0], weights[1], sizeof(weights[0]));
    assert_memory_equal(weights[0], weights[2], sizeof(weights[0]));
    kvs_expander_destroy(picker);
    lone_unit_clear(&unit);
    lone_unit_clear(&fork);
    assert_int_equal(bench.heap.n_segments, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chapters),
        cmocka_unit_test(truncated_in_a_chapter),
        cmocka_unit_test(open_codebook),
        cmocka_unit_test(codes_are_made_in_pieces),
        cmocka_unit_test(cells_choose_as_rows),
        cmocka_unit_test(weights_of_a_copied_segment),
    };
    int failed;

    bench_open(&bench, ARENA_BYTES, kv_clock_now(&kv_clock_real));
    for (size_t i = 0; i < sizeof(queries) / sizeof(queries[0]); i++)
        queries[i] = (float)((int)kv_random_below(&bench.random, 2001) - 1000) / 1000;
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    bench_close(&bench);
    return failed;
}
