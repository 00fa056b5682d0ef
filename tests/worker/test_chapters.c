/* chapters.c on a small made model: what it counts can be known before. */
#include "tests/support/model_maker.h"
#include "tests/support/worker_files.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TOKENS = 2560, /* two chapters of 8 blocks, and four blocks behind them */
    ELIGIBLE = TOKENS - 64 - 4,
    UNITS = MADE_LAYERS * MADE_KV_HEADS,
    TEXT_BYTES = 40000,
};

static const char *chapters;
static char model[PROCESS_PATH_BYTES], text[PROCESS_PATH_BYTES], first[PROCESS_PATH_BYTES],
    second[PROCESS_PATH_BYTES], both[PROCESS_PATH_BYTES];
static struct process_result result;

/* chapters and what follows, up to NULL. */
static void run(int status, ...)
{
    const char *argv[16] = {chapters};
    const struct process_spec spec = {.argv = argv};
    unsigned n = 1;
    va_list more;

    va_start(more, status);
    while ((argv[n] = va_arg(more, const char *)) != NULL)
        assert_true(++n < sizeof(argv) / sizeof(argv[0]));
    va_end(more);
    assert_true(process_run(&spec, PROCESS_PATIENCE_MS, &result));
    if (result.status != status)
        fail_msg("status %d: %s", result.status, result.errors);
}

static int record(void **state)
{
    static char words[TEXT_BYTES];

    (void)state;
    worker_file_write_model(model, "model.gguf");
    worker_text(words, sizeof(words));
    worker_file_write(text, "text", words, sizeof(words));
    worker_file_write(first, "first", "", 0);
    worker_file_write(second, "second", "", 0);
    worker_file_write(both, "both", "", 0);
    run(0, "record", model, text, "2560", "0", "2", first, NULL);
    run(0, "record", model, text, "1280", "1280", "2", second, NULL);
    return 0;
}

/* Of k rows, the candidates are a share of all: recall grows with them, to 1. */
static void recall_is_that_of_the_codes(void **state)
{
    static const unsigned factors[] = {1, 4, 11};
    char *line, *rest = NULL;
    double recall = 0;
    unsigned n = 0;

    (void)state;
    run(0, "measure", "8,0", "0.1", "1,4,11", "5", "1", first, NULL);
    for (line = strtok_r(result.output, "\n", &rest); line != NULL;
         line = strtok_r(NULL, "\n", &rest), n++) {
        const unsigned factor = factors[n % 3], n_books = n < 3 ? 2 : 1;

        assert_true(worker_json_number(line, "chapter_blocks") == (n < 3 ? 8 : 0));
        assert_true(worker_json_number(line, "rerank") == factor);
        assert_true(worker_json_number(line, "rows") == TOKENS);
        assert_true(worker_json_number(line, "k") == round(0.1 * ELIGIBLE));
        assert_true(worker_json_number(line, "units") == UNITS);
        assert_true(worker_json_number(line, "codebooks") == n_books);
        assert_true(worker_json_number(line, "codebook_bytes") ==
                    n_books * 64 * MADE_D * sizeof(float));
        assert_true(fabs(worker_json_number(line, "coded_share") - (n < 3 ? 0.8 : 1)) < 1e-3);
        assert_true(worker_json_number(line, "iterations") >= 1 &&
                    worker_json_number(line, "iterations") <= 5);
        assert_true(worker_json_number(line, "train_us") > 0);
        assert_true(fabs(worker_json_number(line, "keys_read") - (factor == 1   ? 0
                                                                  : factor == 4 ? 0.4
                                                                                : 1)) < 2e-3);
        if (n % 3 > 0)
            assert_true(worker_json_number(line, "recall") > recall);
        recall = worker_json_number(line, "recall");
        assert_true(recall > 0.1 && recall <= 1);
        assert_true(worker_json_number(line, "recall_worst") <= recall);
    }
    assert_int_equal(n, 6);
    /* Eleven times a tenth are all. */
    assert_true(recall == 1);
}

/* Several contexts are one session's rows, asked by the last one. */
static void contexts_follow_each_other(void **state)
{
    (void)state;
    run(0, "measure", "8", "0.05", "1", "5", "1", second, first, NULL);
    assert_true(worker_json_number(result.output, "rows") == TOKENS + 1280);
    assert_true(worker_json_number(result.output, "codebooks") == 3);
    assert_true(worker_json_number(result.output, "recall") < 1);
}

/* Chosen rows are candidates, and what memory holds is not missed. */
static void blocks_are_those_of_the_rows(void **state)
{
    char *line, *rest = NULL;
    double touched = 0;
    unsigned n = 0;

    (void)state;
    run(0, "blocks", "0.005,0.1", "1,4", "0.5,1", "1", first, NULL);
    for (line = strtok_r(result.output, "\n", &rest); line != NULL;
         line = strtok_r(NULL, "\n", &rest), n++) {
        const unsigned rerank = n % 2 == 0 ? 1 : 4, k = n < 2 ? 12 : 249;
        const double values = worker_json_number(line, "touched_values"),
                     any = worker_json_number(line, "touched_any");

        assert_true(worker_json_number(line, "blocks") == 20);
        assert_true(worker_json_number(line, "k") == k);
        assert_true(worker_json_number(line, "candidates") == rerank * k);
        assert_true(n % 2 == 0 || worker_json_number(line, "touched") >= touched);
        touched = worker_json_number(line, "touched");
        assert_true(touched >= 1 / 20.0 && touched <= any && any <= 1);
        assert_true(rerank == 1 ? fabs(values - touched) < 1e-9 : values <= touched);
        assert_true(worker_json_number(line, "fresh") <= touched);
        assert_true(worker_json_number(line, "1") <= worker_json_number(line, "0.5"));
        assert_true(worker_json_number(line, "0.5") <= touched);
    }
    assert_int_equal(n, 4);
    /* 996 of 2,492 rows are in nearly all blocks, and after 32 queries memory has them. */
    assert_true(touched > 0.9);
}

static void what_is_wrong_is_refused(void **state)
{
    (void)state;
    run(2, NULL);
    run(2, "measure", "8", NULL);
    run(2, "record", model, text, "2560", "1000000", "2", both, NULL);
    assert_non_null(strstr(result.errors, "tokens, 1002560 needed"));
    run(1, "record", model, text, "5000", "0", "2", both, NULL);
    run(1, "record", model, text, "2560", "0", "3", both, NULL);
    run(1, "measure", "8", "0.05", "1", "5", "1", text, NULL);
    assert_non_null(strstr(result.errors, "not a file of the same model and layers"));
    run(1, "measure", "8", "0.05", "1", "5", "1", both, NULL);
    assert_non_null(strstr(result.errors, "too short"));
    run(1, "measure", "8,x", "0.05", "1", "5", "1", first, NULL);
    assert_non_null(strstr(result.errors, "not a list of numbers"));
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recall_is_that_of_the_codes),
        cmocka_unit_test(contexts_follow_each_other),
        cmocka_unit_test(blocks_are_those_of_the_rows),
        cmocka_unit_test(what_is_wrong_is_refused),
    };

    (void)argc;
    chapters = argv[0];
    return cmocka_run_group_tests(tests, record, NULL);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: test_worker_chapters CHAPTERS\n");
        return 2;
    }
    return process_supervise(work, argc - 1, argv + 1);
}
