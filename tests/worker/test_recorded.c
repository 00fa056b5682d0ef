/* test_recorded.c - the worker's logits on a made model, beside those of an earlier build: for
 * changes that must not change a bit of them.
 *
 * recorded/logits.txt has a hash of the logits' bits for the prompt's last token and for each
 * step, for full attention and for what the store chooses, in each form of answer.  Cosines,
 * exponentials and the like are the C library's: another one may give other bits.
 *
 * A change that is meant to change answers records anew, in the repository:
 *
 *     build/tests/worker/test_worker_recorded tests/worker/recorded --record
 */
#define _GNU_SOURCE /* open_memstream */
#include "tests/support/model_session.h"
#include "tests/support/recorded.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    PROMPT = 1200, /* nine blocks and some: a chapter, and rows behind it */
    STEPS = 16,
};

static const char *folder;

static const struct variant {
    const char *name;
    const struct kvw_method_ops *row;
    enum kv_dtype dtype;
    enum kvw_result_mode answer;
    uint32_t rest;
    enum kv_first_cut cut;
} variants[] = {
    {"full fp16", &kvw_method_full, KV_FP16, KVW_RESULT_AUTO, 0, KV_CUT_NONE},
    {"full bf16", &kvw_method_full, KV_BF16, KVW_RESULT_AUTO, 0, KV_CUT_NONE},
    {"pqcache rows", &kvw_method_pqcache, KV_FP16, KVW_RESULT_ROWS, 0, KV_CUT_NONE},
    {"pqcache rows, rest 64", &kvw_method_pqcache, KV_FP16, KVW_RESULT_ROWS, 64, KV_CUT_NONE},
    {"pqcache attend", &kvw_method_pqcache, KV_FP16, KVW_RESULT_ATTEND, 0, KV_CUT_NONE},
    {"pqcache attend, rest 16", &kvw_method_pqcache, KV_BF16, KVW_RESULT_ATTEND, 16,
     KV_CUT_NONE},
    {"pqcache rows, int4", &kvw_method_pqcache, KV_FP16, KVW_RESULT_ROWS, 0, KV_CUT_INT4},
    {"pqcache attend, rest 16, int4", &kvw_method_pqcache, KV_FP16, KVW_RESULT_ATTEND, 16,
     KV_CUT_INT4},
};

/* Nothing that a time decides: the index is waited for, k-means has a number of iterations. */
static struct kvw_method_options options_of(const struct variant *variant)
{
    struct kvw_method_options options = kvw_method_defaults;

    options.budget = (struct kvw_budget_options){.top_k = 60, .sinks = 4, .window = 16};
    options.index.chapter_blocks = 8;
    options.index.subspaces = variant->cut == KV_CUT_NONE ? 2 : 4;
    options.index.bits = 4;
    options.index.copies = variant->cut != KV_CUT_NONE;
    options.index.iterations = 4;
    options.index.wait = true;
    options.index.summary_rows = 1024;
    options.first_cut = variant->cut;
    options.candidates = 4;
    options.rerank = 2;
    options.answer = variant->answer;
    options.index.summaries = variant->rest;
    return options;
}

static void run(const struct variant *variant, FILE *out)
{
    static struct model_session session;
    static float logits[STEPS + 1][MADE_VOCABULARY];
    const struct kvw_method_options options = options_of(variant);

    model_session_open(&session, variant->row, &options, variant->dtype, PROMPT + STEPS);
    model_session_pass(&session, 0, PROMPT, PROMPT + STEPS, logits);
    model_session_close(&session);
    for (unsigned i = 0; i <= STEPS; i++)
        fprintf(out, "%s, step %u: %016llx\n", variant->name, i,
                (unsigned long long)recorded_hash(logits[i], sizeof(logits[i])));
}

/* The caller frees it. */
static char *run_all(void)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);

    assert_non_null(out);
    for (unsigned i = 0; i < sizeof(variants) / sizeof(variants[0]); i++)
        run(&variants[i], out);
    assert_int_equal(fclose(out), 0);
    return text;
}

static const char *path(void)
{
    static char text[4096];

    snprintf(text, sizeof(text), "%s/logits.txt", folder);
    return text;
}

static void the_same_logits(void **state)
{
    char *text = run_all();

    (void)state;
    assert_true(recorded_same(path(), text));
    free(text);
}

static void record(void **state)
{
    static const char head[] =
        "Hashes of a made model's logits: the prompt's last token, then each step.  How to\n"
        "record them anew: tests/worker/test_recorded.c.\n";
    char *text = run_all();

    (void)state;
    assert_true(recorded_write(path(), head, text));
    free(text);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_same_logits)};
    const struct CMUnitTest records[] = {cmocka_unit_test(record)};

    if (argc < 2 || argc > 3 || (argc == 3 && strcmp(argv[2], "--record") != 0)) {
        fprintf(stderr, "usage: test_worker_recorded FOLDER [--record]\n");
        return 2;
    }
    folder = argv[1];
    return argc == 3 ? cmocka_run_group_tests(records, NULL, NULL)
                     : cmocka_run_group_tests(tests, NULL, NULL);
}
