/* What a query's other rows would have added, against sums in double from the same summaries,
 * row by row: any ranges, any choice, units that are coded and summarised in part. */
#include "kvserver/store/query/estimate.h"

#include "tests/support/units.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>

enum {
    D_K = 24,
    D_V = 17,
    D = D_K + D_V,
    ROWS_MAX = 4000,
    QUERIES_MAX = 5,
    RANGES_MAX = 6,
    ARENA_BYTES = 64 << 20,
    ROUNDS = 60,
};

static struct bench bench;
static struct kvs_estimate left;
static float queries[QUERIES_MAX * D_K];
static uint32_t summary_rows; /* of the groups that are made, and asked for */

static struct kvs_index_plan plan_of(uint32_t blocks, uint32_t rest_bits)
{
    return (struct kvs_index_plan){
        .chapter_blocks = blocks,
        .shape = {.d = D_K, .m = 2, .bits = 4},
        .type = KV_KEY_FP32,
        .d_v = D_V,
        .summaries_bits = rest_bits,
        .summaries_rows = summary_rows,
        .iterations = 2,
        .seed = 5,
    };
}

static void
train(const struct kvs_unit *unit, uint32_t tokens, uint32_t blocks, uint32_t rest_bits)
{
    const struct kvs_index_plan plan = plan_of(blocks, rest_bits);

    assert_int_equal(kvs_index_schedule(bench.indexer, unit, tokens, &plan), KV_OK);
    while (kvs_indexer_step(bench.indexer))
        ;
}

static uint32_t below(uint32_t bound)
{
    return (uint32_t)kv_random_below(&bench.random, bound);
}

/* ---- a question -------------------------------------------------------------------------- */

static struct {
    struct kvs_score scan;
    struct kv_wire_range ranges[RANGES_MAX];
    struct kvs_estimate_input asked;
    bool is_candidate[ROWS_MAX], is_scored[ROWS_MAX];
    uint32_t by[ROWS_MAX]; /* vectors that chose the row */
    uint32_t chosen[ROWS_MAX], among[ROWS_MAX], scored[ROWS_MAX];
    float scores[QUERIES_MAX * ROWS_MAX];
    float output[QUERIES_MAX * D_V], lse[QUERIES_MAX];
} it;

static void make_ranges(struct kvs_unit *unit)
{
    uint32_t n = 0, begin = below(3) == 0 ? 0 : below(unit->committed);

    memset(it.is_candidate, 0, sizeof(it.is_candidate));
    while (n < RANGES_MAX && begin < unit->committed) {
        uint32_t end = begin + 1 + below(unit->committed - begin);

        if (below(3) == 0)
            end = unit->committed;
        it.ranges[n++] = (struct kv_wire_range){begin, end};
        for (; begin < end; begin++)
            it.is_candidate[begin] = true;
        begin += below(40);
    }
    it.scan = (struct kvs_score){.unit = unit,
                                 .type = KV_KEY_FP32,
                                 .d = D_K,
                                 .ranges = it.ranges,
                                 .n_ranges = n,
                                 .n_queries = 1 + below(QUERIES_MAX),
                                 .queries = queries};
}

/* Chosen rows are one of `one_in`, or all where that is 1; they are scored, and others as often
 * again, or none is. */
static void make_question(struct kvs_unit *unit, uint32_t bits, uint32_t one_in)
{
    const bool is_scored = below(2);
    struct kvs_estimate_input *asked = &it.asked;

    make_ranges(unit);
    *asked = (struct kvs_estimate_input){
        .score = &it.scan,
        .shape = {.type = KV_KEY_FP32,
                  .d_k = D_K,
                  .d_v = D_V,
                  .n_queries = it.scan.n_queries,
                  .scale = 0.5f + (float)below(3)},
        .bits = bits,
        .rows = summary_rows,
        .selected = it.chosen,
        .query_mask = it.among,
        .each = below(2),
        .scored = it.scored,
        .scores = it.scores,
    };
    const uint32_t all = (1u << it.scan.n_queries) - 1;
    for (uint32_t token = 0; token < unit->committed; token++) {
        it.is_scored[token] = false;
        it.by[token] = 0;
        if (!it.is_candidate[token])
            continue;
        if (below(one_in) == 0) {
            it.by[token] = one_in == 1 ? all : 1 + below(all);
            it.chosen[asked->n_selected] = token;
            it.among[asked->n_selected++] = it.by[token];
        }
        if (is_scored && (it.by[token] != 0 || below(one_in) == 0)) {
            it.is_scored[token] = true;
            it.scored[asked->n_scored++] = token;
        }
    }
    for (uint32_t i = 0; i < asked->n_scored; i++)
        kv_exact_scores_score(KV_KEY_FP32, kvs_unit_row(unit, it.scored[i]), unit->row_bytes, 1,
                              D_K, queries, it.scan.n_queries, it.scores + i, asked->n_scored);
}

static void answer(void)
{
    uint32_t n_slices = 0;

    kvs_estimate_begin(&left, &it.asked);
    while (!kvs_estimate_piece(&left, &bench.codebooks))
        assert_true(++n_slices < 10 * ROWS_MAX);
    kvs_estimate_end(&left, false, it.output, it.lse);
}

/* ---- the same in double ------------------------------------------------------------------ */

/* The group that stands for the row; NULL: there is none. */
static const uint8_t *
group_of(const struct kvs_unit *unit, uint32_t token, uint32_t bits, uint32_t *ret_number)
{
    const struct kvs_codes *codes = kvs_unit_codes(unit, token / KV_BLOCK_TOKENS);
    struct kv_summary_shape shape = {KV_KEY_FP32, D_K, D_V, bits, it.asked.rows};

    if (!codes->in_chapter)
        return NULL;
    const struct kvs_codebook *book = kvs_codebook_at(&bench.codebooks, codes->codebook);
    const uint32_t row = token - book->block_begin * KV_BLOCK_TOKENS;

    if (row >= book->summaries.n_rows || book->summaries.shape.bits != bits ||
        book->summaries.shape.rows != shape.rows)
        return NULL;
    const uint8_t *group = book->summaries.groups[row / shape.rows].bytes;
    assert_true(kv_summary_valid(&shape, group));
    *ret_number = group[kv_summary_at_numbers(&shape) + row % shape.rows];
    return group;
}

static double dot(const float *a, const float *b, uint32_t n)
{
    double sum = 0;

    for (uint32_t i = 0; i < n; i++)
        sum += (double)a[i] * b[i];
    return sum;
}

static double score_of(const uint8_t *group, uint32_t number, const float *query, double scale)
{
    struct kv_summary_shape shape = {KV_KEY_FP32, D_K, D_V, it.asked.bits, it.asked.rows};
    const int8_t *keys = (const int8_t *)group + kv_summary_at_keys(&shape);
    float key_scales[KV_SUMMARIES_MAX];
    struct kv_summary_head head;
    double sum = 0;

    memcpy(&head, group, sizeof(head));
    memcpy(key_scales, group + kv_summary_at_key_scales(&shape),
           kv_summary_count(&shape) * sizeof(float));
    for (uint32_t i = 0; i < D_K; i++)
        sum += (double)query[i] * keys[kv_summary_key_element(&shape, number, i)] *
               key_scales[number];
    double corr = 0.15 * scale * scale * dot(query, query, D_K) * head.variance;
    return scale * sum + (corr < 1 ? corr : 1);
}

static double value_of(const uint8_t *group, uint32_t number, uint32_t i)
{
    struct kv_summary_shape shape = {KV_KEY_FP32, D_K, D_V, it.asked.bits, it.asked.rows};
    const int8_t *values = (const int8_t *)group + kv_summary_at_values(&shape);
    float scale;

    memcpy(&scale, group + kv_summary_at_value_scales(&shape) + number * sizeof(float),
           sizeof(scale));
    return (double)values[kv_summary_value_element(&shape, number, i)] * scale;
}

/* Checks the answer; returns how many rows summaries stand for. */
static uint32_t check(const struct kvs_unit *unit)
{
    const uint32_t all = (1u << it.scan.n_queries) - 1;
    uint32_t n_rest = 0, n_exact = 0;

    for (uint32_t token = 0; token < unit->committed; token++) {
        const uint32_t by = it.asked.each || it.by[token] == 0 ? it.by[token] : all;
        uint32_t number;

        if (!it.is_candidate[token] || by == all)
            continue;
        if (group_of(unit, token, it.asked.bits, &number) != NULL)
            n_rest += number != KV_SUMMARY_NONE;
        else
            n_exact++;
    }
    assert_int_equal(left.n_estimated, n_rest);
    assert_int_equal(left.n_exact, n_exact);
    for (uint32_t q = 0; q < it.scan.n_queries; q++) {
        const float *query = queries + (size_t)q * D_K;
        const double scale = it.asked.shape.scale;
        double sum = 0, output[D_V] = {0};

        for (uint32_t token = 0; token < unit->committed; token++) {
            const float *row = (const float *)(const void *)kvs_unit_row(unit, token);
            uint32_t number = 0;

            if (!it.is_candidate[token] ||
                (it.asked.each ? it.by[token] >> q & 1 : it.by[token] != 0))
                continue;
            const uint8_t *group = group_of(unit, token, it.asked.bits, &number);
            if (group != NULL && number == KV_SUMMARY_NONE)
                continue;
            double weight = exp(group != NULL && !it.is_scored[token]
                                    ? score_of(group, number, query, scale)
                                    : scale * dot(row, query, D_K));
            sum += weight;
            for (uint32_t i = 0; i < D_V; i++)
                output[i] += weight * (group != NULL ? value_of(group, number, i)
                                                     : (double)row[D_K + i]);
        }
        if (sum == 0) {
            assert_true(isinf(it.lse[q]) && it.lse[q] < 0);
            continue;
        }
        assert_true(fabs(it.lse[q] - log(sum)) < 1e-3); /* of 24 rounded elements */
        for (uint32_t i = 0; i < D_V; i++)
            assert_true(fabs(it.output[q * D_V + i] - output[i] / sum) < 1e-3);
    }
    return n_rest;
}

static uint32_t ask(struct kvs_unit *unit, uint32_t rounds)
{
    uint32_t n_rest = 0;

    for (uint32_t round = 0; round < rounds; round++) {
        make_question(unit, round % 2 ? KV_SUMMARY_64 : KV_SUMMARY_16, 2 + below(30));
        answer();
        n_rest += check(unit);
    }
    return n_rest;
}

/* ---- tests ------------------------------------------------------------------------------- */

/* Chapters with summaries of one size, of another, and with none; rows behind them. */
static void chapters(void **state)
{
    struct kvs_unit unit;

    (void)state;
    unit_make(&bench, &unit, 0, D, 1500);
    assert_int_equal(ask(&unit, ROUNDS), 0);
    train(&unit, 1500, 9, KV_SUMMARY_16); /* a group of eight blocks and one of one */
    assert_true(ask(&unit, ROUNDS) > 0);
    assert_int_equal(unit_append(&bench, &unit, 1200), KV_OK);
    train(&unit, 2700, 9, 0);
    assert_int_equal(unit_append(&bench, &unit, 1300), KV_OK);
    assert_true(kvs_unit_codes(&unit, 17)->in_chapter &&
                !kvs_unit_codes(&unit, 18)->in_chapter);
    ask(&unit, ROUNDS);
    train(&unit, 2700, 9, KV_SUMMARY_64); /* all that are there */
    assert_true(ask(&unit, ROUNDS) > 0);
    train(&unit, 2000, 9, KV_SUMMARY_16);
    ask(&unit, ROUNDS);
    lone_unit_clear(&unit);
}

/* Forks and truncates leave the first rows of a group, and others come behind them. */
static void parts_of_groups(void **state)
{
    struct kvs_unit unit, fork;

    (void)state;
    unit_make(&bench, &unit, 0, D, 3000);
    train(&unit, 3000, 0, KV_SUMMARY_16);
    lone_unit_init(&fork, &bench.heap, 0, 0, D * sizeof(float));
    assert_int_equal(lone_unit_fork(&unit, &fork, 1500), KV_OK);
    assert_int_equal(unit_append(&bench, &fork, 900), KV_OK);
    assert_int_equal(unit_append(&bench, &unit, 100), KV_OK);
    assert_true(ask(&unit, ROUNDS) > 0);
    assert_true(ask(&fork, ROUNDS) > 0);
    /* The fork's codes are the codebook's, too, but its own rows are not the chapter's. */
    for (uint32_t i = 11; i < 2400 / KV_BLOCK_TOKENS; i++)
        assert_int_equal(kvs_segment_encode(&bench.codebooks, kvs_unit_block(&fork, i), 0,
                                            kvs_unit_codes(&fork, 0)->codebook, KV_KEY_FP32,
                                            fork.row_bytes, KV_BLOCK_TOKENS),
                         KV_OK);
    train(&fork, 2400, 0, KV_SUMMARY_64);
    assert_int_equal(
        kvs_codebook_at(&bench.codebooks, kvs_unit_codes(&unit, 0)->codebook)->summaries.n_rows,
        11 * KV_BLOCK_TOKENS);
    ask(&unit, ROUNDS);
    ask(&fork, ROUNDS);
    /* The unit asks for all of its own again. */
    train(&unit, 3000, 0, KV_SUMMARY_64);
    assert_int_equal(
        kvs_codebook_at(&bench.codebooks, kvs_unit_codes(&unit, 0)->codebook)->summaries.n_rows,
        23 * KV_BLOCK_TOKENS);
    ask(&unit, ROUNDS);
    ask(&fork, ROUNDS);
    lone_unit_clear(&fork);
    kvs_unit_truncate(&unit, 1234);
    ask(&unit, ROUNDS);
    assert_int_equal(unit_append(&bench, &unit, 1000), KV_OK);
    assert_false(kvs_unit_codes(&unit, 1234 / KV_BLOCK_TOKENS)->in_chapter);
    ask(&unit, ROUNDS);
    lone_unit_clear(&unit);
}

/* Where all is chosen, nothing is left. */
static void nothing_left(void **state)
{
    struct kvs_unit unit;

    (void)state;
    unit_make(&bench, &unit, 0, D, 1400);
    train(&unit, 1400, 8, KV_SUMMARY_16);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        make_question(&unit, KV_SUMMARY_16, 1);
        answer();
        assert_int_equal(check(&unit), 0);
        for (uint32_t q = 0; q < it.scan.n_queries; q++)
            assert_true(isinf(it.lse[q]) && it.lse[q] < 0);
    }
    lone_unit_clear(&unit);
}

/* Without summaries it is attention over what is left, to the bit, and merged with what was
 * there before. */
static void exact_without_summaries(void **state)
{
    static float own[QUERIES_MAX * (2 + D_V)], output[QUERIES_MAX * D_V];
    static const void *rows[ROWS_MAX];
    float lse[QUERIES_MAX];
    struct kvs_unit unit;

    (void)state;
    unit_make(&bench, &unit, 0, D, 1400);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint32_t n = 0;

        make_question(&unit, KV_SUMMARY_16, 3);
        it.asked.each = false;
        answer();
        for (uint32_t token = 0; token < unit.committed; token++)
            if (it.is_candidate[token] && it.by[token] == 0)
                rows[n++] = kvs_unit_row(&unit, token);
        kv_attend_begin(&it.asked.shape, own);
        kv_attend_rows(&it.asked.shape, queries, rows, n, NULL, own);
        kv_attend_end(&it.asked.shape, own, output, lse);
        assert_memory_equal(it.lse, lse, it.scan.n_queries * sizeof(float));
        for (uint32_t i = 0; i < it.scan.n_queries * D_V; i++)
            assert_true(fabsf(it.output[i] - output[i]) <= 1e-6f * fabsf(output[i]));
        kvs_estimate_end(&left, true, it.output, it.lse); /* with itself: twice each row */
        for (uint32_t q = 0; n > 0 && q < it.scan.n_queries; q++)
            assert_true(fabs(it.lse[q] - lse[q] - log(2)) < 1e-5);
    }
    lone_unit_clear(&unit);
}

/* Summaries that come, change, or go between slices: each row is still counted once. */
static void summaries_change_meanwhile(void **state)
{
    struct kvs_unit unit;

    (void)state;
    unit_make(&bench, &unit, 0, D, 3300);
    for (uint32_t round = 0; round < 20; round++) {
        const uint32_t bits = round % 2 ? KV_SUMMARY_64 : KV_SUMMARY_16;
        const struct kvs_index_plan plan = plan_of(8, bits);
        uint32_t n = 0;

        make_question(&unit, KV_SUMMARY_16, 3);
        it.asked.each = false;
        for (uint32_t token = 0; token < unit.committed; token++)
            n += it.is_candidate[token] && it.by[token] == 0;
        assert_int_equal(kvs_index_schedule(bench.indexer, &unit, 3300, &plan), KV_OK);
        kvs_estimate_begin(&left, &it.asked);
        while (!kvs_estimate_piece(&left, &bench.codebooks))
            for (uint32_t i = below(500); i > 0; i--)
                kvs_indexer_step(bench.indexer);
        kvs_estimate_end(&left, false, it.output, it.lse);
        assert_int_equal(left.n_estimated + left.n_exact, n);
        while (kvs_indexer_step(bench.indexer))
            ;
    }
    lone_unit_clear(&unit);
}

/* Of many vectors a group takes long, and is a piece of the work. */
static void pieces_of_many_vectors(void **state)
{
    struct kvs_unit unit;
    bool is_done = false;

    (void)state;
    unit_make(&bench, &unit, 0, D, 3300);
    train(&unit, 3300, 0, KV_SUMMARY_64);
    make_question(&unit, KV_SUMMARY_64, 30);
    it.ranges[0] = (struct kv_wire_range){0, 3072};
    it.scan.n_ranges = 1;
    it.scan.n_queries = it.asked.shape.n_queries = QUERIES_MAX;
    it.asked.n_selected = it.asked.n_scored = 0;
    kvs_estimate_begin(&left, &it.asked);
    while (!is_done) {
        const uint32_t before = left.token;

        is_done = kvs_estimate_piece(&left, &bench.codebooks);
        assert_in_range(left.token - before, 1, summary_rows);
    }
    assert_int_equal(left.n_estimated + left.n_exact, 3072);
    lone_unit_clear(&unit);
}

/* Summaries of the same number, of groups of the other size, are none. */
static void groups_of_another_size(void **state)
{
    struct kvs_unit unit;

    (void)state;
    unit_make(&bench, &unit, 0, D, 3900);
    train(&unit, 3900, 0, KV_SUMMARY_16);
    assert_true(ask(&unit, ROUNDS) > 0);
    summary_rows = KV_SUMMARY_ROWS_LEAST + KV_SUMMARY_ROWS_MAX - summary_rows;
    assert_int_equal(ask(&unit, ROUNDS), 0);
    train(&unit, 3500, 0, KV_SUMMARY_16);
    assert_true(ask(&unit, ROUNDS) > 0);
    lone_unit_clear(&unit);
}

static int set_up(void **state)
{
    summary_rows = *state != NULL ? *(uint32_t *)*state : KV_SUMMARY_ROWS_LEAST;
    bench_open(&bench, ARENA_BYTES, kv_clock_now(&kv_clock_real));
    for (size_t i = 0; i < sizeof(queries) / sizeof(queries[0]); i++)
        queries[i] = (float)((int)below(2001) - 1000) / 1000;
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    assert_int_equal(bench.heap.n_segments, 0);
    assert_int_equal(kv_pool_used(bench.codebooks.pool), 0);
    assert_int_equal(bench.codebooks.rows_summarised, 0);
    assert_int_equal(bench.codebooks.summaries_bytes, 0);
    bench_close(&bench);
    return 0;
}

static uint32_t larger = KV_SUMMARY_ROWS_MAX;

#define TEST_LARGER(test)                                 \
    {                                                     \
#test "_larger", test, set_up, tear_down, &larger \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(chapters, set_up, tear_down),
        cmocka_unit_test_setup_teardown(parts_of_groups, set_up, tear_down),
        cmocka_unit_test_setup_teardown(nothing_left, set_up, tear_down),
        cmocka_unit_test_setup_teardown(exact_without_summaries, set_up, tear_down),
        cmocka_unit_test_setup_teardown(summaries_change_meanwhile, set_up, tear_down),
        cmocka_unit_test_setup_teardown(pieces_of_many_vectors, set_up, tear_down),
        cmocka_unit_test_setup_teardown(groups_of_another_size, set_up, tear_down),
        TEST_LARGER(chapters),
        TEST_LARGER(parts_of_groups),
        TEST_LARGER(nothing_left),
        TEST_LARGER(summaries_change_meanwhile),
        TEST_LARGER(pieces_of_many_vectors),
        TEST_LARGER(groups_of_another_size),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
