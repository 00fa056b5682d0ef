/* pqcache.c on a made model with a store inside of the process: what must not change
 * the result does not, and what a session has is not made again. */
#include "tests/support/model_session.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <string.h>

enum {
    PROMPT = 1200, /* nine blocks and some: a chapter, and rows behind it */
    TOKENS = 1260,
    LONG = 2400,
    STEPS_MAX = LONG - PROMPT + 1,
    UNITS = MADE_LAYERS * MADE_KV_HEADS,
};

static struct model_session s;
static float wanted[STEPS_MAX][MADE_VOCABULARY], got[STEPS_MAX][MADE_VOCABULARY];

/* Chapters of 8 blocks, waited for: the same every time.  Rows come. */
static struct kvw_method_options options_of(uint32_t k)
{
    struct kvw_method_options options = kvw_method_defaults;

    options.budget = (struct kvw_budget_options){.top_k = k, .sinks = 4, .window = 16};
    options.index.chapter_blocks = 8;
    options.index.subspaces = 2;
    options.index.bits = 4;
    options.index.copies = false;
    options.index.iterations = 4;
    options.index.summary_rows = 1024;
    options.index.wait = true;
    options.first_cut = KV_CUT_NONE;
    options.rerank = 2;
    options.answer = KVW_RESULT_ROWS;
    options.index.summaries = 0;
    return options;
}

static void run(const struct kvw_method_ops *row,
                const struct kvw_method_options *options,
                float (*logits)[MADE_VOCABULARY])
{
    model_session_open(&s, row, options, KV_FP16, LONG);
    model_session_pass(&s, 0, PROMPT, TOKENS, logits);
}

static struct kvw_method_stats stats(void)
{
    struct kvw_method_stats stats;

    kvw_method_get_stats(s.attention, &stats);
    return stats;
}

static size_t bytes_of(uint32_t n_steps)
{
    return (n_steps + 1) * sizeof(wanted[0]);
}

/* The largest difference of logits, the prompt's and those of n_steps. */
static double difference(uint32_t n_steps)
{
    double largest = 0;

    for (uint32_t i = 0; i <= n_steps; i++)
        for (unsigned j = 0; j < MADE_VOCABULARY; j++)
            largest = fmax(largest, fabs((double)wanted[i][j] - (double)got[i][j]));
    return largest;
}

/* 1A.11, check 3: with nothing left out it is full attention, in sums of two parts. */
static void all_rows_are_full_attention(void **state)
{
    const struct kvw_method_options all = options_of(TOKENS);

    (void)state;
    run(&kvw_method_full, &all, wanted);
    model_session_close(&s);
    run(&kvw_method_pqcache, &all, got);
    assert_memory_equal(wanted[0], got[0], sizeof(wanted[0])); /* the prompt's */
    assert_true(difference(TOKENS - PROMPT) < 1e-3);
    const struct kvw_method_stats after = stats();
    assert_int_equal(after.rows_attended, after.rows_possible);
    assert_int_equal(after.step_rows_attended, after.step_rows_possible);
    assert_true(after.step_rows_attended > 0 && after.step_rows_attended < after.rows_attended);
    assert_true(fabs(after.exposed_wait_s -
                     (after.waits.node_s + after.waits.queue_s + after.waits.wire_s +
                      after.waits.index_s + after.waits.rows_s)) < 1e-9);
    assert_true(after.waits.node_s > 0 && after.layer_wait_s[0] > 0);
    model_session_close(&s);
}

/* 1A.11, check 4: a cache changes what travels, and nothing else. */
static void a_cache_changes_no_bit(void **state)
{
    static const struct {
        enum kvw_cache_policy policy;
        uint32_t tokens;
    } caches[] = {{KVW_CACHE_LRU, 4096},
                  {KVW_CACHE_LFU, 4096},
                  {KVW_CACHE_LRU, 256},
                  {KVW_CACHE_LFU, 128}};
    struct kvw_method_options options = options_of(60);
    const uint64_t steps = TOKENS - PROMPT;
    struct kvw_method_stats off;

    (void)state;
    options.cache = KVW_CACHE_OFF;
    run(&kvw_method_pqcache, &options, wanted);
    off = stats();
    assert_int_equal(off.rows_selected, steps * UNITS * 60);
    assert_int_equal(off.rows_cached, 0);
    assert_int_equal(off.rows_sent, off.rows_selected);
    assert_int_equal(off.bytes_fetched, off.rows_sent * 2 * MADE_D * 2);
    assert_int_equal(off.rows_reranked, steps * UNITS * 120);
    assert_int_equal(off.codebooks_trained, UNITS);
    assert_true(off.rows_scored_by_code > 0);
    model_session_close(&s);
    for (unsigned i = 0; i < sizeof(caches) / sizeof(caches[0]); i++) {
        struct kvw_method_stats on;

        options.cache = caches[i].policy;
        options.cache_tokens = caches[i].tokens;
        run(&kvw_method_pqcache, &options, got);
        assert_memory_equal(wanted, got, bytes_of(TOKENS - PROMPT));
        on = stats();
        assert_int_equal(on.rows_selected, off.rows_selected);
        assert_true(on.rows_cached > 0);
        assert_int_equal(on.rows_cached + on.rows_sent, on.rows_selected);
        model_session_close(&s);
    }
}

/* Rows by a second question: the same rows. */
static void ids_then_rows(void **state)
{
    struct kvw_method_options options = options_of(60);

    (void)state;
    run(&kvw_method_pqcache, &options, wanted);
    model_session_close(&s);
    options.answer = KVW_RESULT_IDS;
    run(&kvw_method_pqcache, &options, got);
    assert_memory_equal(wanted, got, bytes_of(TOKENS - PROMPT));
    assert_int_equal(stats().rows_cached + stats().rows_sent, stats().rows_selected);
    model_session_close(&s);
}

/* The store attends to what it chose: the same rows, the sums in another order.  What travels
 * does not depend on how many they are. */
static void attention_there_is_near(void **state)
{
    static const uint32_t ks[] = {60, TOKENS}; /* some rows, all there are */
    const uint64_t steps = TOKENS - PROMPT;

    (void)state;
    for (unsigned i = 0; i < sizeof(ks) / sizeof(ks[0]); i++) {
        struct kvw_method_options options = options_of(ks[i]);
        struct kvw_method_stats here, there;

        run(&kvw_method_pqcache, &options, wanted);
        here = stats();
        model_session_close(&s);
        for (unsigned form = 0; form < 2; form++) {
            options.answer = form == 0 ? KVW_RESULT_ATTEND : KVW_RESULT_AUTO;
            run(&kvw_method_pqcache, &options, got);
            there = stats();
            assert_memory_equal(wanted[0], got[0], sizeof(wanted[0])); /* the prompt's */
            assert_true(difference(TOKENS - PROMPT) < 1e-3);
            assert_memory_not_equal(wanted[1], got[1], bytes_of(TOKENS - PROMPT - 1));
            assert_int_equal(there.rows_selected, here.rows_selected);
            assert_int_equal(there.rows_attended, here.rows_attended);
            assert_int_equal(there.rows_possible, here.rows_possible);
            assert_int_equal(there.rows_to_choose_from, here.rows_to_choose_from);
            assert_int_equal(there.rows_reranked, here.rows_reranked);
            assert_int_equal(there.rows_sent, 0);
            assert_int_equal(there.rows_cached, 0);
            assert_int_equal(there.bytes_fetched,
                             steps * MADE_LAYERS * MADE_Q_HEADS * (MADE_D + 1) * sizeof(float));
            assert_true(there.nodes_worked_s > 0);
            model_session_close(&s);
        }
    }
}

/* The mean square of what steps' logits differ by. */
static double distance(uint32_t n_steps)
{
    double sum = 0;

    for (uint32_t i = 1; i <= n_steps; i++)
        for (unsigned j = 0; j < MADE_VOCABULARY; j++)
            sum += pow((double)wanted[i][j] - (double)got[i][j], 2);
    return sum / (n_steps * MADE_VOCABULARY);
}

/* What is not chosen is estimated: nearer to full attention, whatever form the answer has. */
static void the_rest_is_estimated(void **state)
{
    static const uint32_t rests[] = {16, 64};
    static float by_rows[STEPS_MAX][MADE_VOCABULARY], by_none[STEPS_MAX][MADE_VOCABULARY];
    const uint64_t steps = TOKENS - PROMPT;
    struct kvw_method_options options = options_of(60);
    struct kvw_method_stats told;
    double without;

    (void)state;
    options.cache = KVW_CACHE_OFF;
    run(&kvw_method_full, &options, wanted);
    model_session_close(&s);
    run(&kvw_method_pqcache, &options, got);
    without = distance(TOKENS - PROMPT);
    memcpy(by_none, got, sizeof(by_none));
    assert_int_equal(stats().rows_estimated, 0);
    model_session_close(&s);
    for (unsigned i = 0; i < sizeof(rests) / sizeof(rests[0]); i++) {
        options.index.summaries = rests[i];
        options.index.summary_rows = i == 0 ? 1024 : 3072;
        options.answer = KVW_RESULT_ROWS;
        run(&kvw_method_pqcache, &options, got);
        told = stats();
        memcpy(by_rows, got, sizeof(by_rows));
        assert_true(distance(TOKENS - PROMPT) < without / 2);
        assert_int_equal(told.rows_selected, steps * UNITS * 60);
        assert_true(told.rows_estimated > steps * UNITS * (1024 - 4 - 60 - 120));
        assert_true(told.rows_estimated <= told.rows_to_choose_from - told.rows_selected);
        assert_int_equal(told.bytes_fetched,
                         told.rows_sent * 2 * MADE_D * 2 +
                             steps * MADE_LAYERS * MADE_Q_HEADS * (MADE_D + 1) * sizeof(float));

        /* Back to the prompt, and summaries are there but not asked for. */
        options.index.summaries = 0;
        assert_int_equal(s.attention->ops->set_options(s.attention, &options), KV_OK);
        assert_int_equal(kvw_method_truncate(s.attention, PROMPT), KV_OK);
        model_session_pass(&s, PROMPT, PROMPT, TOKENS, got);
        assert_memory_equal(by_none[1], got[1], bytes_of(TOKENS - PROMPT - 1));
        model_session_close(&s);
        options.index.summaries = rests[i];

        options.answer = KVW_RESULT_IDS;
        run(&kvw_method_pqcache, &options, got);
        assert_memory_equal(by_rows, got, bytes_of(TOKENS - PROMPT));
        assert_int_equal(stats().rows_estimated, told.rows_estimated);
        model_session_close(&s);

        options.answer = KVW_RESULT_ATTEND;
        run(&kvw_method_pqcache, &options, got);
        assert_int_equal(stats().rows_estimated, told.rows_estimated);
        assert_int_equal(stats().rows_attended, told.rows_attended);
        assert_true(distance(TOKENS - PROMPT) < without / 2);
        model_session_close(&s);
        memcpy(wanted, by_rows, sizeof(wanted));
        assert_true(difference(TOKENS - PROMPT) < 1e-3);

        /* Of no row, nothing: the same bits. */
        options = options_of(TOKENS);
        run(&kvw_method_pqcache, &options, wanted);
        model_session_close(&s);
        options.index.summaries = rests[i];
        run(&kvw_method_pqcache, &options, got);
        assert_memory_equal(wanted, got, bytes_of(TOKENS - PROMPT));
        assert_int_equal(stats().rows_estimated, 0);
        model_session_close(&s);
        options = options_of(60);
        options.cache = KVW_CACHE_OFF;
    }
}

/* A session is for one form of answer, and for the summaries that it began with, or none of
 * them: then it answers as one that has none. */
static void a_form_stays(void **state)
{
    struct kvw_method_options options = options_of(60);

    (void)state;
    run(&kvw_method_pqcache, &options, got);
    assert_int_equal(s.attention->ops->set_options(s.attention, &options), KV_OK);
    options.answer = KVW_RESULT_ATTEND;
    assert_int_equal(s.attention->ops->set_options(s.attention, &options), KV_UNSUPPORTED);
    options.answer = KVW_RESULT_ROWS;
    options.index.summaries = 16;
    assert_int_equal(s.attention->ops->set_options(s.attention, &options), KV_UNSUPPORTED);
    options.index.summaries = 0;
    assert_int_equal(s.attention->ops->set_options(s.attention, &options), KV_OK);
    options.index.summary_rows = 3072;
    assert_int_equal(s.attention->ops->set_options(s.attention, &options), KV_UNSUPPORTED);
    model_session_close(&s);
}

/* More candidates are taken where the estimates are low: a made model's keys tell codes little.
 */
static void rerank_follows_recall(void **state)
{
    struct kvw_method_options options = options_of(60);
    const uint64_t usual = (uint64_t)(LONG - PROMPT) * UNITS * 60 * 4;

    (void)state;
    options.rerank = 0;
    options.index.bits = 1;
    model_session_open(&s, &kvw_method_pqcache, &options, KV_FP16, LONG);
    model_session_pass(&s, 0, PROMPT, LONG, got);
    assert_true(stats().recall_count > 0);
    assert_true(stats().rows_reranked > usual);
    model_session_close(&s);
}

/* The node's counters are the method's. */
static void the_node_counts_the_same(void **state)
{
    const struct kvw_method_options options = options_of(60);
    const struct kv_table *table;
    struct kvw_method_stats told;
    struct kv_op *op;
    unsigned n_seen = 0;

    (void)state;
    run(&kvw_method_pqcache, &options, got);
    told = stats();
    const struct {
        const char *name;
        uint64_t value;
    } expected[] = {
        {"rows_scored_by_code", told.rows_scored_by_code},
        {"rows_scored_by_key", told.rows_scored_by_key},
        {"rows_reranked", told.rows_reranked},
        {"rows_selected", told.rows_selected},
    };
    assert_int_equal(kv_table_begin(s.client, 0, "stats", 0, &op), KV_OK);
    assert_int_equal(kv_wait(op), KV_OK);
    table = kv_op_table(op);
    for (uint32_t row = 0; row < table->n_rows; row++) {
        const struct kv_cell *cells = &table->cells[row * table->n_columns];

        for (unsigned i = 0; i < sizeof(expected) / sizeof(expected[0]); i++) {
            if (strcmp(cells[0].text, expected[i].name) != 0)
                continue;
            assert_true(cells[1].number == (double)expected[i].value);
            n_seen++;
        }
    }
    assert_int_equal(n_seen, sizeof(expected) / sizeof(expected[0]));
    kv_op_free(op);
    model_session_close(&s);
}

/* Back to the prompt: the same steps again, by the codes that are there. */
static void a_second_time_trains_nothing(void **state)
{
    const struct kvw_method_options options = options_of(60);

    (void)state;
    run(&kvw_method_pqcache, &options, wanted);
    assert_int_equal(stats().codebooks_trained, UNITS);
    assert_int_equal(kvw_method_truncate(s.attention, PROMPT), KV_OK);
    model_session_pass(&s, PROMPT, PROMPT, TOKENS, got);
    assert_memory_equal(wanted[1], got[1], bytes_of(TOKENS - PROMPT) - sizeof(wanted[0]));
    assert_int_equal(stats().codebooks_trained, UNITS);

    /* A prompt behind the prompt needs rows that are in the store only. */
    const struct kvw_method_options all = options_of(LONG);
    assert_int_equal(kvw_method_truncate(s.attention, PROMPT), KV_OK);
    model_session_pass(&s, PROMPT, PROMPT + 40, PROMPT + 60, got);
    assert_int_equal(stats().codebooks_trained, UNITS);
    model_session_close(&s);
    model_session_open(&s, &kvw_method_full, &all, KV_FP16, LONG);
    model_session_pass(&s, 0, PROMPT, PROMPT, wanted);
    model_session_pass(&s, PROMPT, PROMPT + 40, PROMPT + 41, wanted);
    assert_memory_equal(wanted[0], got[0], sizeof(wanted[0]));
    model_session_close(&s);
}

/* A fork inherits rows and codes, and leaves nothing behind. */
static void a_branch_leaves_nothing_behind(void **state)
{
    const struct kvw_method_options options = options_of(60);
    const struct kvw_method_ops *row = &kvw_method_pqcache;

    (void)state;
    run(row, &options, wanted);
    model_session_close(&s);

    model_session_open(&s, row, &options, KV_FP16, LONG);
    model_session_pass(&s, 0, PROMPT, PROMPT, got);
    for (unsigned i = 0; i < 3; i++) {
        assert_int_equal(kvw_method_enter_fork(s.attention, PROMPT), KV_OK);
        assert_int_equal(kvw_method_enter_fork(s.attention, PROMPT), KV_UNSUPPORTED);
        model_session_pass(&s, PROMPT, PROMPT, TOKENS, got);
        assert_memory_equal(wanted[1], got[1], bytes_of(TOKENS - PROMPT) - sizeof(wanted[0]));
        /* Other text in another fork. */
        assert_int_equal(kvw_method_leave_fork(s.attention, PROMPT), KV_OK);
        assert_int_equal(kvw_method_enter_fork(s.attention, PROMPT), KV_OK);
        s.tokens[PROMPT] = (s.tokens[PROMPT] + 1) % MADE_VOCABULARY;
        model_session_pass(&s, PROMPT, PROMPT + 20, PROMPT + 30, got);
        s.tokens[PROMPT] = (s.tokens[PROMPT] + MADE_VOCABULARY - 1) % MADE_VOCABULARY;
        assert_int_equal(kvw_method_leave_fork(s.attention, PROMPT), KV_OK);
    }
    assert_int_equal(stats().codebooks_trained, UNITS);
    model_session_pass(&s, PROMPT, PROMPT, TOKENS, got);
    assert_memory_equal(wanted[1], got[1], bytes_of(TOKENS - PROMPT) - sizeof(wanted[0]));
    model_session_close(&s);
}

/* What is generated becomes chapters of its own; one codebook for the prompt takes in what
 * comes later (1A.6, step 7). */
static void generated_text_gets_codes(void **state)
{
    static const uint32_t chapters[] = {8, 128, 0}; /* blocks; 128: both are in one */
    struct kvw_method_options options = options_of(60);
    struct kvw_method_stats after;

    (void)state;
    for (unsigned i = 0; i < sizeof(chapters) / sizeof(chapters[0]); i++) {
        const bool whole = chapters[i] == 0;

        options.index.chapter_blocks = chapters[i];
        model_session_open(&s, &kvw_method_pqcache, &options, KV_FP16, LONG);
        model_session_pass(&s, 0, PROMPT, LONG, got);
        after = stats();
        assert_int_equal(after.codebooks_trained, whole ? UNITS : 2 * UNITS);
        if (whole)
            assert_int_equal(after.rows_scored_by_key, 0);
        else
            assert_true(after.rows_scored_by_key < after.rows_scored_by_code / 2);
        model_session_close(&s);
    }
}

/* The window is smaller than the ring was, or half of what is attended to; few rows. */
static void odd_budgets(void **state)
{
    static const struct kvw_budget_options budgets[] = {
        {.top_k = 9, .sinks = 0, .window = 1},
        {.ratio = 0.1, .sinks = 32, .window = KVW_WINDOW_HALF},
        {.top_k = 40, .sinks = 2000, .window = 1},
        {.top_k = 1, .sinks = 1, .window = 3000},
        {.ratio = 0.001, .sinks = 4, .window = 64},
    };
    struct kvw_method_options options = options_of(1);

    (void)state;
    for (unsigned i = 0; i < sizeof(budgets) / sizeof(budgets[0]); i++) {
        struct kvw_method_stats after;

        options.budget = budgets[i];
        run(&kvw_method_pqcache, &options, got);
        after = stats();
        const uint64_t prompt = UNITS * ((uint64_t)PROMPT * (PROMPT + 1) / 2);
        uint64_t steps = 0;
        for (uint32_t n = PROMPT + 1; n <= TOKENS; n++) {
            const struct kvw_budget budget = kvw_budget_of(&options.budget, PROMPT, n);

            steps += UNITS * (budget.sinks + budget.k + n - budget.window_begin);
        }
        assert_int_equal(after.rows_attended, prompt + steps);
        model_session_close(&s);
    }
    /* A prompt of one token, then steps. */
    options = options_of(4);
    model_session_open(&s, &kvw_method_pqcache, &options, KV_FP16, LONG);
    model_session_pass(&s, 0, 1, 200, got);
    model_session_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_rows_are_full_attention),
        cmocka_unit_test(a_cache_changes_no_bit),
        cmocka_unit_test(ids_then_rows),
        cmocka_unit_test(attention_there_is_near),
        cmocka_unit_test(the_rest_is_estimated),
        cmocka_unit_test(a_form_stays),
        cmocka_unit_test(rerank_follows_recall),
        cmocka_unit_test(the_node_counts_the_same),
        cmocka_unit_test(a_second_time_trains_nothing),
        cmocka_unit_test(a_branch_leaves_nothing_behind),
        cmocka_unit_test(generated_text_gets_codes),
        cmocka_unit_test(odd_budgets),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
