/* speculated.c on a made model: a guess is the query where nothing lies between them, and without
 * guesses it is pqcache. */
#include "tests/support/model_session.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <string.h>

enum {
    PROMPT = 1200, /* nine blocks and some: a chapter, and rows behind it */
    TOKENS = 1240,
    STEPS = TOKENS - PROMPT,
    UNITS = MADE_LAYERS * MADE_KV_HEADS,
    K = 40,
};

static struct model_session s;
static float wanted[STEPS + 1][MADE_VOCABULARY], got[STEPS + 1][MADE_VOCABULARY];

/* Chapters of 8 blocks, waited for: the same every time. */
static struct kvw_method_options options_of(enum kvw_speculate speculate)
{
    struct kvw_method_options options = kvw_method_defaults;

    options.budget = (struct kvw_budget_options){.top_k = K, .sinks = 4, .window = 16};
    options.index.chapter_blocks = 8;
    options.index.subspaces = 2;
    options.index.bits = 4;
    options.index.copies = false;
    options.index.summaries = 0;
    options.index.iterations = 4;
    options.index.wait = true;
    options.first_cut = KV_CUT_NONE;
    options.rerank = 2;
    options.answer = KVW_RESULT_ROWS;
    options.recall_every = 1;
    options.speculate = speculate;
    return options;
}

static void open_session(const struct kvw_method_ops *row,
                         const struct kvw_method_options *options)
{
    model_session_open(&s, row, options, KV_FP16, TOKENS);
}

/* The first pass of a session. */
static void run(const struct kvw_method_ops *row,
                const struct kvw_method_options *options,
                float (*logits)[MADE_VOCABULARY])
{
    open_session(row, options);
    model_session_pass(&s, 0, PROMPT, TOKENS, logits);
}

/* The steps once more, with other options. */
static void again(const struct kvw_method_options *options, float (*logits)[MADE_VOCABULARY])
{
    assert_int_equal(s.attention->ops->set_options(s.attention, options), KV_OK);
    assert_int_equal(kvw_method_truncate(s.attention, PROMPT), KV_OK);
    model_session_pass(&s, PROMPT, PROMPT, TOKENS, logits);
}

static struct kvw_method_stats stats(void)
{
    struct kvw_method_stats stats;

    kvw_method_get_stats(s.attention, &stats);
    return stats;
}

static double cosine(uint32_t layer)
{
    const struct kvw_method_stats now = stats();

    assert_int_equal(now.n_guess_cosines, (uint64_t)STEPS * MADE_Q_HEADS);
    return now.guess_cosines[layer] / (double)now.n_guess_cosines;
}

static double difference(void)
{
    double largest = 0;

    for (uint32_t i = 1; i <= STEPS; i++)
        for (unsigned j = 0; j < MADE_VOCABULARY; j++)
            largest = fmax(largest, fabs((double)wanted[i][j] - (double)got[i][j]));
    return largest;
}

/* Whose candidates are the query's own selects what pqcache does, which attends in two parts. */
static void without_guesses_it_is_pqcache(void **state)
{
    struct kvw_method_options options = options_of(KVW_SPECULATE_NONE);

    (void)state;
    run(&kvw_method_pqcache, &options, wanted);
    model_session_close(&s);
    run(&kvw_method_speculated, &options, got);
    assert_memory_equal(wanted[0], got[0], sizeof(wanted[0])); /* the prompt's */
    assert_true(difference() < 1e-4);
    assert_true(cosine(0) > 1 - 1e-12 && cosine(1) > 1 - 1e-12);
    const struct kvw_method_stats now = stats();
    assert_int_equal(now.rows_to_recall, STEPS * UNITS * K);
    assert_true(now.rows_recalled < now.rows_to_recall);
    assert_int_equal(now.rows_reranked, STEPS * UNITS * 2 * K);
    assert_int_equal(now.step_rows_attended, STEPS * UNITS * (4 + K + 16));

    /* Other candidates are another result: the bound above is not too wide. */
    options.speculate = KVW_SPECULATE_INPUT;
    again(&options, got);
    assert_true(difference() > 1e-3);
    model_session_close(&s);
}

/* If every row is a candidate, it does not matter whose. */
static void all_candidates_are_the_oracle(void **state)
{
    struct kvw_method_options options = options_of(KVW_SPECULATE_INPUT);

    (void)state;
    options.rerank = TOKENS;
    run(&kvw_method_oracle, &options, wanted);
    model_session_close(&s);
    run(&kvw_method_speculated, &options, got);
    assert_memory_equal(wanted, got, sizeof(wanted));
    const struct kvw_method_stats now = stats();
    assert_int_equal(now.rows_recalled, now.rows_to_recall);
    model_session_close(&s);
}

/* Layer 0 adds nothing of this kind to the state. */
static void silence(const char *name)
{
    const struct kvw_tensor *tensor = kvw_gguf_tensor(s.made.gguf, name);

    assert_non_null(tensor);
    memset((char *)s.made.aligned + tensor->offset, 0, tensor->bytes);
}

/* Between the input of layer 0 and the query of layer 1 lie attention and feed-forward: a guess that
 * misses only what adds nothing is the query, to the bit, and its candidates are the query's. */
static void a_guess_misses_what_is_still_to_come(void **state)
{
    static const struct {
        bool attends, feeds; /* layer 0 */
        enum kvw_speculate speculate;
        uint32_t first; /* layer that guesses */
        bool is_query;
    } cases[] = {
        {true, true, KVW_SPECULATE_INPUT, 1, false},
        {true, true, KVW_SPECULATE_ATTENTION, 1, false},
        {true, true, KVW_SPECULATE_INPUT, 2, true}, /* there is no layer 2 */
        {true, true, KVW_SPECULATE_ATTENTION, 2, true},
        {true, false, KVW_SPECULATE_INPUT, 1, false},
        {true, false, KVW_SPECULATE_ATTENTION, 1, true},
        {false, true, KVW_SPECULATE_INPUT, 1, false},
        {false, true, KVW_SPECULATE_ATTENTION, 1, false},
        {false, false, KVW_SPECULATE_INPUT, 1, true},
        {false, false, KVW_SPECULATE_ATTENTION, 1, true},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kvw_method_options options = options_of(KVW_SPECULATE_NONE);

        open_session(&kvw_method_speculated, &options);
        if (!cases[i].attends)
            silence("blk.0.attn_output.weight");
        if (!cases[i].feeds)
            silence("blk.0.ffn_down.weight");
        model_session_pass(&s, 0, PROMPT, TOKENS, wanted);
        options.speculate = cases[i].speculate;
        options.speculate_first = cases[i].first;
        again(&options, got);
        assert_true(cosine(0) > 1 - 1e-12); /* always the query */
        if (cases[i].is_query) {
            assert_true(cosine(1) > 1 - 1e-12);
            assert_memory_equal(wanted[1], got[1], STEPS * sizeof(wanted[0]));
        } else {
            assert_true(cosine(1) < 0.99);
            assert_memory_not_equal(wanted[1], got[1], STEPS * sizeof(wanted[0]));
        }
        /* And once more: nothing is left of what was asked before. */
        memcpy(wanted, got, sizeof(wanted));
        again(&options, got);
        assert_memory_equal(wanted[1], got[1], STEPS * sizeof(wanted[0]));
        model_session_close(&s);
    }
}

/* What codes are of cannot change; what is asked can. */
static void codes_stay(void **state)
{
    const struct kvw_method_options options = options_of(KVW_SPECULATE_INPUT);
    struct kvw_method_options other = options;

    (void)state;
    open_session(&kvw_method_speculated, &options);
    other.index.bits = 6;
    assert_int_equal(s.attention->ops->set_options(s.attention, &other), KV_UNSUPPORTED);
    other = options;
    other.seed = 3;
    assert_int_equal(s.attention->ops->set_options(s.attention, &other), KV_UNSUPPORTED);
    other = options;
    other.rerank = 8;
    other.index.summaries = 16; /* it has none in any case */
    assert_int_equal(s.attention->ops->set_options(s.attention, &other), KV_OK);
    model_session_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_guesses_it_is_pqcache),
        cmocka_unit_test(all_candidates_are_the_oracle),
        cmocka_unit_test(a_guess_misses_what_is_still_to_come),
        cmocka_unit_test(codes_stay),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
