/* Scans of units, coded and not, against one row after the other. */
#include "scan.h"

#include "units.h"

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
static float queries[QUERIES_MAX * D], scores[QUERIES_MAX * ROWS_MAX];
static float tables[QUERIES_MAX * KV_SCAN_TABLE];

static void train(const struct kv_unit *unit, uint32_t tokens, uint32_t blocks, uint32_t m)
{
    const struct kv_index_plan plan = {
        .chapter_blocks = blocks,
        .shape = {.d = D, .m = m, .bits = 3},
        .type = KV_KEY_FP32,
        .iterations = 2,
    };

    assert_int_equal(kv_index_cut(bench.indexer, unit, tokens, &plan), KV_OK);
    while (kv_indexer_step(bench.indexer))
        ;
}

static float
score_of(const struct kv_unit *unit, uint32_t token, const float *query, bool by_code)
{
    const struct kv_segment *segment = unit->segments[token / KV_BLOCK_TOKENS];
    const uint32_t row = token % KV_BLOCK_TOKENS;
    static float table[KV_SCAN_TABLE];
    float score = 0;

    if (!by_code || segment->codes == NULL || row >= segment->n_coded) {
        kv_keys_score(KV_KEY_FP32, kv_unit_row(unit, token), unit->row_bytes, 1, D, query, 1,
                      &score, 1);
        return score;
    }
    const struct kv_codebook *book = kv_codebook_at(&bench.heap.codebooks, segment->codebook);
    const size_t n_centroids = kv_pq_n_centroids(&book->shape);
    kv_pq_table(&book->shape, book->centroids, query, table);
    for (uint32_t j = 0; j < book->shape.m; j++)
        score += table[j * n_centroids + segment->codes[j * KV_PQ_TILE + row]];
    return score;
}

/* Scans, and checks every score; returns the scan for its counts. */
static struct kv_scan
check(struct kv_unit *unit, const struct kv_wire_range *ranges, uint32_t n_ranges, bool by_code)
{
    struct kv_scan scan = {
        .unit = unit,
        .type = KV_KEY_FP32,
        .d = D,
        .ranges = ranges,
        .n_ranges = n_ranges,
        .n_queries = 1 + (uint32_t)kv_random_below(&bench.random, QUERIES_MAX),
        .queries = queries,
        .by_code = by_code,
        .scores = scores,
        .n = kv_ranges_count(ranges, n_ranges),
        .tables = tables,
    };
    struct kv_range_walk walk = {.ranges = ranges};
    uint32_t n_slices = 0, i = 0;

    kv_scan_begin(&scan);
    while (!kv_scan_slice(&scan, &bench.heap, &kv_clock_real))
        assert_true(++n_slices < ROWS_MAX);
    assert_int_equal(scan.n_coded + scan.n_exact, scan.n);
    for (uint32_t r = 0; r < n_ranges; r++) {
        for (uint32_t token = ranges[r].begin; token < ranges[r].end; token++, i++) {
            assert_int_equal(kv_range_walk_to(&walk, i), token);
            for (uint32_t q = 0; q < scan.n_queries; q++) {
                float wanted = score_of(unit, token, queries + (size_t)q * D, by_code);

                assert_memory_equal(&scores[(size_t)q * scan.n + i], &wanted, sizeof(wanted));
            }
        }
    }
    assert_int_equal(i, scan.n);
    return scan;
}

static void whole(struct kv_unit *unit, uint32_t n_coded, uint32_t n_chapters)
{
    const struct kv_wire_range all = {0, unit->committed};
    struct kv_scan scan = check(unit, &all, 1, true);

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
    struct kv_unit unit;

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
    kv_unit_clear(&unit, &bench.heap);
}

/* Rows behind an open codebook get its codes when they are met, in forks their own. */
static void open_codebook(void **state)
{
    struct kv_wire_range ranges[8];
    struct kv_unit unit, fork;

    (void)state;
    unit_make(&bench, &unit, 0, D, 300);
    train(&unit, 290, 0, 3);
    assert_int_equal(unit.segments[2]->n_coded, 290 - 256);
    whole(&unit, 300, 1);
    kv_unit_init(&fork, &bench.heap, 0, 0, D * sizeof(float));
    assert_int_equal(kv_unit_fork(&unit, &fork, &bench.heap, 280), KV_OK);
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
    kv_unit_truncate(&fork, &bench.heap, 650);
    assert_int_equal(unit_append(&bench, &fork, 77), KV_OK);
    whole(&fork, 727, 1);
    assert_true(unit_codes_are_right(&bench, &fork));
    kv_unit_clear(&unit, &bench.heap);
    whole(&fork, 727, 1);
    kv_unit_clear(&fork, &bench.heap);
    assert_int_equal(bench.heap.n_segments, 0);
    assert_int_equal(kv_pool_lent(bench.heap.codebooks.pool), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chapters),
        cmocka_unit_test(open_codebook),
    };
    int failed;

    bench_open(&bench, ARENA_BYTES, kv_clock_now(&kv_clock_real));
    for (size_t i = 0; i < sizeof(queries) / sizeof(queries[0]); i++)
        queries[i] = (float)((int)kv_random_below(&bench.random, 2001) - 1000) / 1000;
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    bench_close(&bench);
    return failed;
}
