/* A query over units alone: no request, no session, no data thread. */
#include "kvserver/store/query/pipeline.h"

#include "kvserver/base/slice.h"
#include "tests/support/units.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum {
    D = 24,
    ROW_BYTES = D * sizeof(float),
    N_UNITS = 2,
    STAGES_LEAST = 4, /* of a unit */
    TOKENS = 2000,
    K = 100,
    CACHED = 3, /* the block that the asker has */
};

static const struct kv_layer_schema layer = {
    .kind = KV_LAYER_KEYS, .dtype = KV_FP32, .d_k = D, .row_bytes = ROW_BYTES};
static const struct kv_wire_query query = {.answer = KV_ANSWER_ROWS,
                                           .merge = KV_MERGE_SUM,
                                           .n_queries = 1,
                                           .k = K,
                                           .rerank = 1,
                                           .scale = 1,
                                           .n_ranges = 2};
static const struct kv_wire_range ranges[] = {{0, 1000}, {1200, TOKENS}};
static const struct kv_wire_unit named[N_UNITS] = {{.kv_head = 0, .n_ids = 1}, {.kv_head = 1}};

static struct bench bench;
static struct kvs_unit units[N_UNITS];
static float queries[N_UNITS][D];
static struct kv_wire_cached_block cached;
static uint8_t rows[N_UNITS * K * ROW_BYTES];
static struct kv_wire_query_result found[N_UNITS];
static uint32_t ids[N_UNITS * K], crcs[N_UNITS * K];
static struct kvs_query_pipeline *querier;
static struct kvs_query_entry *entry;

static struct kvs_unit *unit_at(void *arg, uint32_t i)
{
    assert_ptr_equal(arg, &bench);
    return &units[i];
}

/* What `selected` was told. */
static uint32_t n_told, told[N_UNITS][K];

static void note_selected(void *arg,
                          const struct kvs_score *scan,
                          const struct kvs_selection *choice,
                          const uint32_t *tokens,
                          uint32_t n_tokens)
{
    assert_ptr_equal(arg, &bench);
    assert_ptr_equal(scan->unit, &units[n_told]);
    assert_int_equal(choice->k, K);
    assert_int_equal(n_tokens, K);
    memcpy(told[n_told++], tokens, sizeof(told[0]));
}

static int set_up(void **state)
{
    (void)state;
    bench_open(&bench, 64 << 20, 5);
    for (uint32_t i = 0; i < N_UNITS; i++) {
        unit_make(&bench, &units[i], i, D, TOKENS);
        for (uint32_t j = 0; j < D; j++)
            queries[i][j] = (float)kv_random_below(&bench.random, 1000) / 1000;
    }
    cached.block = CACHED;
    cached.fingerprint =
        kv_wire_block_fingerprint(kvs_unit_crc(&units[0], CACHED * KV_BLOCK_TOKENS));
    n_told = 0;
    querier = kvs_query_pipeline_create(KVS_QUERY_PIPELINE_FLOATS, KVS_QUERY_PIPELINE_FLOATS);
    return querier == NULL;
}

static int tear_down(void **state)
{
    (void)state;
    kvs_query_pipeline_destroy(querier);
    for (uint32_t i = 0; i < N_UNITS; i++)
        lone_unit_clear(&units[i]);
    bench_close(&bench);
    return 0;
}

static void begin(void)
{
    const struct kvs_query_input input = {
        .query = &query,
        .ranges = ranges,
        .n_units = N_UNITS,
        .named = named,
        .unit_at = unit_at,
        .queries = queries[0],
        .cached = &cached,
        .layers = &layer,
        .found = found,
        .ids = ids,
        .crcs = crcs,
        .rows = rows,
        .store = &bench.heap,
        .codebooks = &bench.codebooks,
        .indexer = bench.indexer,
        .selected = note_selected,
        .arg = &bench,
    };

    n_told = 0;
    kvs_query_pipeline_begin(querier);
    entry = kvs_query_pipeline_add(querier, &input);
    assert_non_null(entry);
}

static float score_of(uint32_t unit, uint32_t token)
{
    float score;

    kv_exact_scores_score(KV_KEY_FP32, kvs_unit_row(&units[unit], token), ROW_BYTES, 1, D,
                          queries[unit], 1, &score, 1);
    return score;
}

/* Candidates that have a higher score. */
static uint32_t n_better(uint32_t unit, uint32_t token)
{
    const float score = score_of(unit, token);
    uint32_t n = 0;

    for (uint32_t i = 0; i < query.n_ranges; i++)
        for (uint32_t other = ranges[i].begin; other < ranges[i].end; other++)
            n += score_of(unit, other) > score;
    return n;
}

/* A clock at which every piece of work is a slice. */
static uint64_t hurry(const struct kv_clock *clock)
{
    static uint64_t now_us;

    (void)clock;
    return now_us += KV_SLICE_US;
}

static const struct kv_clock hurried = {.name = "hurried", .now_us = hurry};

/* The rows with the highest scores, and all of them but those that the asker has. */
static void check_answer(void)
{
    uint32_t n_rows = 0;

    assert_int_equal(n_told, N_UNITS);
    assert_int_equal(entry->n_ids, N_UNITS * K);
    for (uint32_t i = 0; i < N_UNITS * K; i++) {
        const uint32_t unit = i / K, token = ids[i] & ~KV_WIRE_ID_CACHED;
        const bool is_cached = unit == 0 && token / KV_BLOCK_TOKENS == CACHED;

        assert_true(n_better(unit, token) < K);
        assert_int_equal(told[unit][i % K], token);
        assert_true(i % K == 0 || token > told[unit][i % K - 1]);
        assert_int_equal((ids[i] & KV_WIRE_ID_CACHED) != 0, is_cached);
        if (is_cached)
            continue;
        assert_memory_equal(rows + n_rows * ROW_BYTES, kvs_unit_row(&units[unit], token),
                            ROW_BYTES);
        assert_int_equal(crcs[n_rows++], *kvs_unit_crc(&units[unit], token));
    }
    assert_int_equal(entry->n_rows, n_rows);
    assert_true(n_rows < N_UNITS * K);
    assert_int_equal(entry->rows_bytes, n_rows * ROW_BYTES);
}

static uint32_t n_slices(const struct kv_clock *clock)
{
    uint32_t n = 0;

    begin();
    for (; !kvs_query_pipeline_is_done(querier); n++)
        assert_true(kvs_query_pipeline_slice(querier, clock));
    return n;
}

/* The same ones wherever slices end: after each piece of work, or after many. */
static void answers_the_best_rows(void **state)
{
    struct kv_clock still;

    (void)state;
    const uint32_t n_pieces = n_slices(&hurried);
    check_answer();
    assert_true(n_pieces >= N_UNITS * STAGES_LEAST);
    kv_clock_virtual_init(&still, 0);
    assert_int_equal(n_slices(&still), (n_pieces + KV_SLICE_LOOKS - 1) / KV_SLICE_LOOKS);
    check_answer();
}

/* One that is given up leaves nothing to the next. */
static void is_given_up(void **state)
{
    (void)state;
    begin();
    while (kvs_query_pipeline_is_between(querier))
        assert_true(kvs_query_pipeline_slice(querier, &hurried));
    kvs_query_pipeline_remove(querier, entry);
    assert_true(kvs_query_pipeline_is_done(querier));
    assert_true(kvs_query_pipeline_is_between(querier));
    answers_the_best_rows(state);
}

/* There is no answer with a row that is bad. */
static void fails_for_a_bad_row(void **state)
{
    bool good = true;

    (void)state;
    kvs_segment_mark_bad(&bench.heap, kvs_unit_block(&units[1], 0), 0, 10);
    begin();
    while (good && !kvs_query_pipeline_is_done(querier))
        good = kvs_query_pipeline_slice(querier, &hurried);
    assert_false(good);
    assert_int_equal(querier->unit, 1);
    assert_int_equal(querier->bad, 10);
}

/* Codes and copies for all whole blocks of the units. */
static void train(void)
{
    const struct kvs_index_plan plan = {
        .chapter_blocks = KV_CHAPTER_BLOCKS_MIN,
        .shape = {.d = D, .m = 2, .bits = 6},
        .type = KV_KEY_FP32,
        .iterations = 2,
        .copies = true,
    };

    for (uint32_t i = 0; i < N_UNITS; i++)
        assert_int_equal(kvs_index_schedule(bench.indexer, &units[i], TOKENS, &plan), KV_OK);
    while (kvs_indexer_step(bench.indexer))
        ;
}

/* An entry whose steps leave one row takes no more room than that: the others keep what they have
 * from one step to the next. */
static void leaves_the_room_of_others(void **state)
{
    const struct kv_wire_query weighed = {.answer = KV_ANSWER_IDS,
                                          .merge = KV_MERGE_SUM,
                                          .flags = KV_WIRE_WEIGHTS,
                                          .n_queries = 1,
                                          .k = K,
                                          .rerank = 1,
                                          .scale = 1,
                                          .n_ranges = 2};
    const struct kv_wire_query one = {.answer = KV_ANSWER_IDS,
                                      .merge = KV_MERGE_SUM,
                                      .n_queries = 1,
                                      .k = 1,
                                      .first_cut = KV_CUT_INT4,
                                      .candidates = 1,
                                      .rerank = 1,
                                      .scale = 1,
                                      .n_ranges = 2};
    const struct kv_wire_unit plain[N_UNITS] = {{.kv_head = 0}, {.kv_head = 1}};
    static struct kv_wire_query_result ones[N_UNITS];
    static uint32_t one_ids[N_UNITS];
    static float weights[2][N_UNITS * K];
    struct kvs_query_input input = {
        .ranges = ranges,
        .n_units = N_UNITS,
        .named = plain,
        .unit_at = unit_at,
        .queries = queries[0],
        .layers = &layer,
        .store = &bench.heap,
        .codebooks = &bench.codebooks,
        .indexer = bench.indexer,
        .arg = &bench,
    };

    (void)state;
    train();
    for (uint32_t n_others = 0; n_others < 2; n_others++) {
        kvs_query_pipeline_begin(querier);
        input.query = &weighed;
        input.found = found;
        input.ids = ids;
        input.weights = weights[n_others];
        assert_non_null(kvs_query_pipeline_add(querier, &input));
        input.query = &one;
        input.found = ones;
        input.ids = one_ids;
        input.weights = NULL;
        for (uint32_t i = 0; i < n_others; i++)
            assert_non_null(kvs_query_pipeline_add(querier, &input));
        while (!kvs_query_pipeline_is_done(querier))
            assert_true(kvs_query_pipeline_slice(querier, &hurried));
    }
    assert_true(querier->entries[1].reads.codes > 0);
    assert_memory_equal(weights[0], weights[1], sizeof(weights[0]));
}

/* Queries that share a pipeline, and so what it costs to read rows, find what each finds alone: by
 * bytes and by scores, with a cut, with reranking, and without either. */
static void shares_what_is_read(void **state)
{
    enum {
        N = 5,
        OF_EACH = N_UNITS * K,
    };
    static const struct {
        uint32_t k, candidates, rerank;
        enum kv_first_cut cut;
        enum kv_merge merge;
    } forms[N] = {
        {50, 8, 1, KV_CUT_INT4, KV_MERGE_SUM},  {30, 8, 2, KV_CUT_INT4, KV_MERGE_MAX},
        {70, 2, 1, KV_CUT_INT4, KV_MERGE_NONE}, {60, 0, 4, KV_CUT_NONE, KV_MERGE_SUM},
        {K, 0, 1, KV_CUT_NONE, KV_MERGE_SUM},
    };
    static struct kv_wire_query queries_of[N];
    static struct kv_wire_query_result found_of[2][N][N_UNITS];
    static uint32_t ids_of[2][N][OF_EACH];
    static float weights_of[2][N][OF_EACH], vectors[N][N_UNITS][D];
    const struct kv_wire_unit plain[N_UNITS] = {{.kv_head = 0}, {.kv_head = 1}};

    (void)state;
    train();
    for (uint32_t i = 0; i < N; i++) {
        queries_of[i] = (struct kv_wire_query){
            .answer = KV_ANSWER_IDS,
            .merge = forms[i].merge,
            .flags = KV_WIRE_WEIGHTS,
            .n_queries = 1,
            .k = forms[i].k,
            .first_cut = forms[i].cut,
            .candidates = forms[i].candidates,
            .rerank = forms[i].rerank,
            .scale = 1,
            .n_ranges = 2,
        };
        for (uint32_t j = 0; j < N_UNITS * D; j++)
            vectors[i][j / D][j % D] = (float)kv_random_below(&bench.random, 1000) / 1000;
    }
    for (uint32_t together = 0; together < 2; together++) {
        for (uint32_t i = 0; i < N; i++) {
            const struct kvs_query_input input = {
                .query = &queries_of[i],
                .ranges = ranges,
                .n_units = N_UNITS,
                .named = plain,
                .unit_at = unit_at,
                .queries = vectors[i][0],
                .layers = &layer,
                .found = found_of[together][i],
                .ids = ids_of[together][i],
                .weights = weights_of[together][i],
                .store = &bench.heap,
                .codebooks = &bench.codebooks,
                .indexer = bench.indexer,
                .arg = &bench,
            };

            if (!together || i == 0)
                kvs_query_pipeline_begin(querier);
            assert_non_null(kvs_query_pipeline_add(querier, &input));
            if (together && i < N - 1)
                continue;
            while (!kvs_query_pipeline_is_done(querier))
                assert_true(kvs_query_pipeline_slice(querier, &hurried));
        }
    }
    for (uint32_t i = 0; i < N; i++)
        for (uint32_t j = 0; j < N_UNITS; j++) {
            assert_int_equal(found_of[0][i][j].n_ids, forms[i].k);
            assert_int_equal(found_of[1][i][j].n_reranked, found_of[0][i][j].n_reranked);
            assert_int_equal(found_of[1][i][j].n_scored_by_code,
                             found_of[0][i][j].n_scored_by_code);
        }
    assert_memory_equal(ids_of[0], ids_of[1], sizeof(ids_of[0]));
    assert_memory_equal(weights_of[0], weights_of[1], sizeof(weights_of[0]));
}

/* Of how many candidates an answer speaks is what its asker expects at most. */
static void keeps_to_the_candidates_of_the_asker(void **state)
{
    enum {
        ROWS = KV_CANDIDATES_MAX + 1000,
    };
    const struct kv_wire_range all = {0, ROWS};
    const struct kv_wire_query most = {.answer = KV_ANSWER_IDS,
                                       .merge = KV_MERGE_SUM,
                                       .selection = KV_SELECT_MASS,
                                       .fraction = 1,
                                       .n_queries = 1,
                                       .k = KV_SELECTED_MAX / 2,
                                       .rerank = 4,
                                       .scale = 1,
                                       .n_ranges = 1};
    static uint32_t all_ids[N_UNITS * KV_SELECTED_MAX];
    const struct kv_wire_unit plain[N_UNITS] = {{.kv_head = 0}, {.kv_head = 1}};
    struct kvs_query_input input = {
        .query = &most,
        .ranges = &all,
        .n_units = N_UNITS,
        .named = plain,
        .unit_at = unit_at,
        .queries = queries[0],
        .layers = &layer,
        .found = found,
        .ids = all_ids,
        .store = &bench.heap,
        .codebooks = &bench.codebooks,
        .indexer = bench.indexer,
        .arg = &bench,
    };

    (void)state;
    for (uint32_t i = 0; i < N_UNITS; i++)
        assert_int_equal(unit_append(&bench, &units[i], ROWS - TOKENS), KV_OK);
    for (int is_older = 0; is_older < 2; is_older++) {
        input.candidates_cap = is_older ? KV_SELECTED_MAX : 0;
        kvs_query_pipeline_begin(querier);
        assert_non_null(kvs_query_pipeline_add(querier, &input));
        while (!kvs_query_pipeline_is_done(querier))
            assert_true(kvs_query_pipeline_slice(querier, &hurried));
        for (uint32_t i = 0; i < N_UNITS; i++)
            assert_int_equal(found[i].n_reranked,
                             is_older ? KV_SELECTED_MAX : KV_CANDIDATES_MAX);
    }
}

/* Room goes back a few pages at a time, from the end, and its memory with it; what is a pipeline's
 * own stays, and room that has not gone yet is there again at once. */
static void room_goes_back_in_pieces(void **state)
{
    enum {
        OWN = 200000, /* floats */
        LARGE = 12 << 20,
        PAGES = 64,
        PIECE_PAGES = 4,
    };
    struct kvs_pages *pages = kvs_pages_create((uint64_t)PAGES * KVS_ARENA_PAGE);
    struct kvs_query_pipeline *pipeline =
        kvs_query_pipeline_create(OWN, KVS_QUERY_PIPELINE_FLOATS);
    kv_status_t status;

    (void)state;
    assert_false(kvs_query_pipeline_drop_room(pipeline, pages));
    do
        status = kvs_query_pipeline_get_room(pipeline, pages, LARGE);
    while (status == KV_IN_PROGRESS);
    assert_int_equal(status, KV_OK);
    const uint32_t n_lent = pipeline->lent.n;
    assert_in_range(n_lent, LARGE * sizeof(float) / KVS_ARENA_PAGE, PAGES - 1);
    for (size_t i = 0; i < LARGE; i += 512)
        pipeline->floats[i] = 1;
    assert_false(kvs_query_pipeline_drop_room(pipeline, pages)); /* it has not ended */

    kvs_query_pipeline_end_room(pipeline);
    assert_true(kvs_query_pipeline_drop_room(pipeline, pages));
    assert_in_range(n_lent - pipeline->lent.n, 1, PIECE_PAGES);
    assert_true(pipeline->floats[LARGE - 512] == 0);
    assert_true(pipeline->floats[LARGE / 2] == 1);
    assert_int_equal(kvs_query_pipeline_get_room(pipeline, pages, LARGE), KV_OK);
    assert_int_equal(pipeline->lent.n, n_lent);

    kvs_query_pipeline_end_room(pipeline);
    for (uint32_t before = n_lent; kvs_query_pipeline_drop_room(pipeline, pages);
         before = pipeline->lent.n)
        assert_in_range(before - pipeline->lent.n, 1, PIECE_PAGES);
    assert_int_equal(pipeline->lent.n, 0);
    for (size_t i = 0; i < LARGE; i += 512)
        assert_true(i + 1024 < OWN   ? pipeline->floats[i] == 1
                    : i > OWN + 1024 ? pipeline->floats[i] == 0
                                     : true);

    /* More than there is: nothing stays lent for memory that was not used. */
    do
        status = kvs_query_pipeline_get_room(pipeline, pages, KVS_QUERY_PIPELINE_FLOATS);
    while (status == KV_IN_PROGRESS);
    assert_int_equal(status, KV_NO_MEMORY);
    assert_int_equal(pipeline->lent.n, 0);
    kvs_pages_check(pages);
    kvs_query_pipeline_destroy(pipeline);
    kvs_pages_destroy(pages);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(answers_the_best_rows, set_up, tear_down),
        cmocka_unit_test_setup_teardown(is_given_up, set_up, tear_down),
        cmocka_unit_test_setup_teardown(fails_for_a_bad_row, set_up, tear_down),
        cmocka_unit_test_setup_teardown(leaves_the_room_of_others, set_up, tear_down),
        cmocka_unit_test_setup_teardown(shares_what_is_read, set_up, tear_down),
        cmocka_unit_test_setup_teardown(keeps_to_the_candidates_of_the_asker, set_up,
                                        tear_down),
        cmocka_unit_test(room_goes_back_in_pieces),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
