/* kvworker bench as a user runs it, on a small made model and a store inside of it: a line for each
 * method, context and batch, device rows as each method must have them, sequences that --kv-memory
 * keeps out, the picture, and what it refuses. */
#include "tests/support/worker_files.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TEXT_BYTES = 8000,
    ARGUMENTS_MAX = 40,
    METHODS = 3,
    CONTEXTS = 2,
    BATCHES = 2,
    STEPS = 3,
    WARM_STEPS = 2, /* room that a session has for them beside the context and the steps */
};

static const char *kvworker;
static char model[PROCESS_PATH_BYTES], text[PROCESS_PATH_BYTES];
static struct process_result result;

static int make_files(void **state)
{
    static char long_text[TEXT_BYTES];

    (void)state;
    worker_file_write_model(model, "model.gguf");
    worker_text(long_text, sizeof(long_text));
    worker_file_write(text, "text", long_text, sizeof(long_text));
    return 0;
}

/* kvworker bench --model MODEL and what follows, up to NULL. */
static void run(int status, ...)
{
    const char *argv[ARGUMENTS_MAX] = {kvworker,     "bench", "--model",   model,
                                       "--memory",   "64M",   "--threads", "2",
                                       "--recorded", "256"};
    const struct process_spec spec = {.argv = argv};
    unsigned n = 10;
    va_list more;

    va_start(more, status);
    while ((argv[n] = va_arg(more, const char *)) != NULL)
        assert_true(++n < ARGUMENTS_MAX);
    va_end(more);
    assert_true(process_run(&spec, PROCESS_PATIENCE_MS, &result));
    if (result.status != status)
        fail_msg("status %d: %s", result.status, result.errors);
}

static unsigned count(const char *where, const char *what)
{
    unsigned n = 0;

    while ((where = strstr(where, what)) != NULL) {
        where += strlen(what);
        n++;
    }
    return n;
}

static void a_line_for_each(void **state)
{
    static const double contexts[CONTEXTS] = {320, 1024}, batches[BATCHES] = {1, 3};
    char picture[PROCESS_PATH_BYTES], drawn[64 << 10];
    double token_bytes = 0;
    char *line, *rest;
    unsigned n = 0;
    FILE *file;

    (void)state;
    worker_file_write(picture, "bench.svg", "", 0);
    run(0, "--text-file", text, "--contexts", "320,1K", "--batches", "1,3", "--steps", "3",
        "--methods", "pqcache,oracle", "--budgets", "k=32", "--svg", picture, "--json", NULL);
    for (line = strtok_r(result.output, "\n", &rest); line != NULL;
         line = strtok_r(NULL, "\n", &rest), n++) {
        const double context = contexts[n / METHODS % CONTEXTS];
        const double batch = batches[n / METHODS / CONTEXTS];
        const bool is_full = strncmp(worker_json_value(line, "method"), "\"full", 5) == 0;
        const bool is_pqcache = strncmp(worker_json_value(line, "method"), "\"pqcache", 8) == 0;
        const double rows = worker_json_number(line, "device_row_bytes");

        assert_true(is_full == (n % METHODS == 0));
        assert_true(worker_json_number(line, "context") == context &&
                    worker_json_number(line, "batch") == batch);
        assert_true(worker_json_number(line, "sequences") == batch &&
                    worker_json_number(line, "steps") == STEPS);
        assert_true(worker_json_number(line, "step_min_s") > 0);
        assert_true(worker_json_number(line, "step_min_s") <=
                    worker_json_number(line, "step_s"));
        assert_true(worker_json_number(line, "step_s") <=
                    worker_json_number(line, "step_max_s"));
        if (n == 0)
            token_bytes = rows / (context + STEPS + WARM_STEPS);
        if (is_full)
            assert_true(rows == token_bytes * batch * (context + STEPS + WARM_STEPS));
        /* Sinks and a window alone, and nobody else asks nodes. */
        if (is_pqcache && context == 1024)
            assert_true(rows > 0 && rows < token_bytes * batch * context / 4);
        assert_true((worker_json_number(line, "nodes_worked_s") > 0) == is_pqcache);
    }
    assert_int_equal(n, METHODS * CONTEXTS * BATCHES);
    file = fopen(picture, "r");
    assert_non_null(file);
    drawn[fread(drawn, 1, sizeof(drawn) - 1, file)] = '\0';
    fclose(file);
    assert_non_null(strstr(drawn, "</svg>"));
    assert_int_equal(count(drawn, "<circle"), n);
    /* A label for each context, in each chart; 320 and 1K are on no other axis. */
    assert_int_equal(count(drawn, ">320<"), 2);
    assert_int_equal(count(drawn, ">1K<"), 2);
    assert_null(strstr(drawn, "nan"));
    assert_null(strstr(drawn, "inf"));
}

/* As many sequences as have room, and perhaps not one; it is the method's rows that count. */
static void memory_keeps_sequences_out(void **state)
{
    char limit[32], *line, *rest;
    double bytes;

    (void)state;
    run(0, "--text-file", text, "--contexts", "1K", "--steps", "1", "--methods", "full",
        "--json", NULL);
    bytes = worker_json_number(result.output, "device_row_bytes");
    snprintf(limit, sizeof(limit), "%.0f", 2.5 * bytes);
    run(0, "--text-file", text, "--contexts", "1K", "--steps", "1", "--batches", "4",
        "--budgets", "k=32", "--kv-memory", limit, "--json", NULL);
    line = strtok_r(result.output, "\n", &rest);
    assert_true(worker_json_number(line, "sequences") == 2);
    line = strtok_r(NULL, "\n", &rest);
    assert_true(worker_json_number(line, "sequences") == 4);
    snprintf(limit, sizeof(limit), "%.0f", 0.5 * bytes);
    run(0, "--text-file", text, "--contexts", "1K", "--steps", "1", "--methods", "full",
        "--kv-memory", limit, NULL);
    assert_non_null(strstr(result.output, "its rows are more than --kv-memory"));
}

/* What a run had measured before it failed is in the picture. */
static void fails_midway(void **state)
{
    char picture[PROCESS_PATH_BYTES], drawn[64 << 10];
    FILE *file;

    (void)state;
    worker_file_write(picture, "part.svg", "", 0);
    run(1, "--text-file", text, "--contexts", "300", "--steps", "1", "--methods",
        "full,pqcache:pq-m=3", "--budgets", "k=32", "--svg", picture, NULL);
    assert_non_null(strstr(result.errors, "pq-m: 3: must divide"));
    file = fopen(picture, "r");
    assert_non_null(file);
    drawn[fread(drawn, 1, sizeof(drawn) - 1, file)] = '\0';
    fclose(file);
    assert_int_equal(count(drawn, "<circle"), 2); /* one method's, in both charts */
    assert_non_null(strstr(drawn, "</svg>"));
}

static void refused(void **state)
{
    char spoiled[PROCESS_PATH_BYTES];

    (void)state;
    worker_file_write(spoiled, "spoiled", "one\n", 4);
    run(2, NULL);
    assert_non_null(strstr(result.errors, "option: --text-file: missing"));
    run(2, "--text-file", "/nonexistent/text", NULL);
    run(2, "--text-file", spoiled, NULL);
    assert_non_null(strstr(result.errors, "--recorded takes 256"));
    run(2, "--text-file", text, "--contexts", "300,none", NULL);
    assert_non_null(strstr(result.errors, "option: --contexts: none: not a number"));
    run(2, "--text-file", text, "--contexts", "", NULL);
    run(2, "--text-file", text, "--contexts", "0", NULL);
    run(2, "--text-file", text, "--batches", "1,257", NULL);
    assert_non_null(strstr(result.errors, "option: --batches: 257"));
    run(2, "--text-file", text, "--methods", "nothing", NULL);
    run(2, "--text-file", text, "--contexts", "1M", NULL);
    assert_non_null(strstr(result.errors, "memory: "));
    run(2, "--text-file", text, "--contexts", "300", "--svg", "/nonexistent/a.svg", NULL);
    assert_non_null(strstr(result.errors, "svg: /nonexistent/a.svg"));
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_line_for_each),
        cmocka_unit_test(memory_keeps_sequences_out),
        cmocka_unit_test(fails_midway),
        cmocka_unit_test(refused),
    };

    (void)argc;
    kvworker = argv[0];
    return cmocka_run_group_tests_name("worker.bench", tests, make_files, NULL);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: test_worker_bench KVWORKER\n");
        return 2;
    }
    return process_supervise(work, argc - 1, argv + 1);
}
