/* kvworker ask as a user runs it, on a small made model and a store inside of it: an object for
 * each answer and each method, a fork for each question that trains nothing anew, the same
 * answers where nothing is left out, which of them are right, and what it refuses. */
#include "tests/support/model_maker.h"
#include "tests/support/worker_files.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TEXT_BYTES = 8000,
    QUESTIONS = 3,
    METHODS = 3,
    ARGUMENTS_MAX = 40,
    CONTEXT = 4096,       /* of a made model */
    MANY_QUESTIONS = 100, /* with long answers: minutes of work */
};

static const char *kvworker;
static char model[PROCESS_PATH_BYTES], text[PROCESS_PATH_BYTES], needles[PROCESS_PATH_BYTES];
static struct process_result result;

static int make_files(void **state)
{
    /* The made model begins every answer with the byte of the last one. */
    static const char sentences[] =
        "# three\nThe cat and the hat|sing\nThe ant thinks|the 123\nNine hats|\x16\n";
    static char long_text[TEXT_BYTES];

    (void)state;
    worker_file_write_model(model, "model.gguf");
    worker_text(long_text, sizeof(long_text));
    worker_file_write(text, "text", long_text, sizeof(long_text));
    worker_file_write(needles, "needles", sentences, strlen(sentences));
    return 0;
}

/* kvworker ask --model MODEL and what follows, up to NULL. */
static void run(int status, ...)
{
    const char *argv[ARGUMENTS_MAX] = {kvworker,   "ask", "--model",   model,
                                       "--memory", "64M", "--threads", "2"};
    const struct process_spec spec = {.argv = argv};
    unsigned n = 8;
    va_list more;

    va_start(more, status);
    while ((argv[n] = va_arg(more, const char *)) != NULL)
        assert_true(++n < ARGUMENTS_MAX);
    va_end(more);
    assert_true(process_run(&spec, PROCESS_PATIENCE_MS, &result));
    if (result.status != status)
        fail_msg("status %d: %s", result.status, result.errors);
}

static bool is_method(const char *line, const char *method)
{
    return strncmp(worker_json_value(line, "method") + 1, method, strlen(method)) == 0;
}

/* Every line is an object, says Python, where there is one. */
static void assert_objects(unsigned n_lines)
{
    char path[PROCESS_PATH_BYTES], command[2 * PROCESS_PATH_BYTES];

    worker_file_write(path, "lines", result.output, strlen(result.output));
    snprintf(command, sizeof(command),
             "command -v python3 >/dev/null || exit 0; exec python3 -c \"import json\n"
             "lines = [json.loads(line) for line in open('%s')]\n"
             "assert len(lines) == %u and all(type(line) is dict for line in lines)\"",
             path, n_lines);
    assert_int_equal(system(command), 0);
}

static void assert_answer(const char *line, unsigned question)
{
    const bool is_indexed = is_method(line, "pqcache");
    const double steps = worker_json_number(line, "steps");

    assert_int_equal(worker_json_number(line, "question"), question + 1);
    assert_true(worker_json_number(line, "prompt_tokens") >
                worker_json_number(line, "reused_tokens"));
    assert_true(worker_json_number(line, "reused_tokens") >
                1400); /* the text, and the sentences */
    assert_true(worker_json_number(line, "generated_tokens") <= 8);
    assert_true(worker_json_number(line, "ttft_s") >= worker_json_number(line, "fork_s"));
    if (question > 0 || !is_indexed)
        assert_int_equal(worker_json_number(line, "codebooks_trained"), 0);
    if (steps > 0 && is_method(line, "full"))
        assert_true(worker_json_number(line, "rows_attended_share") == 1);
    if (steps > 0 && is_method(line, "pqcache:top-k")) {
        assert_true(fabs(worker_json_number(line, "rows_attended_share") - 0.25) < 0.01);
        assert_true(worker_json_number(line, "rows_scored_by_code") > 0);
        assert_true(worker_json_number(line, "block_cache_hit_rate") <= 1);
    }
}

/* An answer is right if it begins with what completes the sentence; JSON writes both alike. */
static bool is_right(const char *line)
{
    const char *completion = worker_json_value(line, "completion") + 1;
    const char *answer = worker_json_value(line, "answer") + 1;

    return strncmp(answer, completion, strcspn(completion, "\"")) == 0;
}

static void test_objects(void **state)
{
    /* The second one chooses all rows there are, and they come: it answers as full attention
     * does, to the bit. */
    static const char *const methods[METHODS] = {"full", "pqcache:ratio=1:top-k=0:answer=rows",
                                                 "pqcache:top-k=0:candidates=2"};
    char *line, *rest = NULL, lines[sizeof(result.output)], answer[METHODS][512];
    unsigned n = 0, n_steps = 0, n_found[METHODS] = {0};

    (void)state;
    run(0, "--text-file", text, "--needles", needles, "--tokens", "1400", "--max-tokens", "8",
        "--methods", "full,pqcache:ratio=1:top-k=0:answer=rows,pqcache:top-k=0:candidates=2",
        "--budgets", "1/4", "--kmeans-iters", "3", "--wait-index", "--json", NULL);
    assert_string_equal(result.errors, "");
    assert_objects(METHODS * (QUESTIONS + 1));
    strcpy(lines, result.output);
    for (line = strtok_r(lines, "\n", &rest); line != NULL;
         line = strtok_r(NULL, "\n", &rest), n++) {
        const unsigned method = n % METHODS;

        assert_true(is_method(line, methods[method]));
        if (n < METHODS * QUESTIONS) {
            assert_answer(line, n / METHODS);
            n_steps += (unsigned)worker_json_number(line, "steps");
            assert_memory_equal(worker_json_value(line, "found"),
                                is_right(line) ? "true" : "false", 4);
            n_found[method] += is_right(line);
            snprintf(answer[method], sizeof(answer[method]), "%.*s",
                     (int)strcspn(worker_json_value(line, "answer"), "}"),
                     worker_json_value(line, "answer"));
            *strstr(answer[method], "\"found\"") = '\0';
            if (method == 1)
                assert_string_equal(answer[1], answer[0]);
            continue;
        }
        assert_int_equal(worker_json_number(line, "asked"), QUESTIONS);
        assert_int_equal(worker_json_number(line, "found"), n_found[method]);
        assert_true(worker_json_number(line, "prefill_s") > 0 &&
                    worker_json_number(line, "ttft_s") > 0);
        assert_int_equal(worker_json_number(line, "codebooks_trained_later"), 0);
        assert_int_equal(worker_json_number(line, "codebooks_trained_first"),
                         method == 0 ? 0 : MADE_LAYERS * MADE_KV_HEADS);
    }
    assert_int_equal(n, METHODS * (QUESTIONS + 1));
    assert_true(n_steps > 0);
    assert_int_equal(n_found[0], 1);
}

static void test_text(void **state)
{
    (void)state;
    run(0, "--text-file", text, "--needles", needles, "--tokens", "300", "--max-tokens", "4",
        NULL);
    assert_non_null(strstr(result.output, "\n 1  The cat and the hat ...\n      full "));
    assert_non_null(strstr(result.output, "\n      pqcache "));
    assert_non_null(strstr(result.output, "\nmethod "));
    assert_non_null(strstr(result.errors, "full: reading "));
    assert_null(strchr(result.errors, '\r'));
}

/* The text is cut so that a question and its answer fit. */
static void test_context(void **state)
{
    double longest = 0;

    (void)state;
    run(0, "--text-file", text, "--needles", needles, "--tokens", "0", "--max-tokens", "40",
        "--methods", "full", "--json", NULL);
    for (const char *line = result.output; line != NULL && *line != '\0';
         line = strchr(line, '\n') + 1) {
        char *end = strchr(line, '\n');
        double tokens;

        assert_non_null(end);
        if (strstr(line, "\"asked\"") != NULL && strstr(line, "\"asked\"") < end)
            break;
        tokens = worker_json_number(line, "prompt_tokens");
        longest = tokens > longest ? tokens : longest;
    }
    assert_true(longest + 40 <= CONTEXT && longest + 40 > CONTEXT - 100);
}

static bool file_has(const char *path, const char *words)
{
    char line[PROCESS_LINE_BYTES];
    bool is_there = false;
    FILE *file = fopen(path, "r");

    while (file != NULL && fgets(line, sizeof(line), file) != NULL)
        is_there = is_there || strstr(line, words) != NULL;
    if (file != NULL)
        fclose(file);
    return is_there;
}

/* The text passes: there is a line about it. */
static bool has_begun(void *errors)
{
    return file_has(errors, "full: reading ");
}

/* There is work for minutes, and the signal comes while it stands still: it cannot be over. */
static void test_interrupt(void **state)
{
    static char list[MANY_QUESTIONS * 40];
    char many[PROCESS_PATH_BYTES], errors[PROCESS_PATH_BYTES];
    const char *const argv[] = {
        kvworker,   "ask",  "--model",      model,  "--text-file", text,   "--needles", many,
        "--tokens", "1000", "--max-tokens", "1000", "--methods",   "full", "--threads", "1",
        NULL};
    const struct process_spec spec = {.argv = argv, .errors = errors};
    struct process process;

    (void)state;
    for (unsigned i = 0, n = 0; i < MANY_QUESTIONS; i++)
        n += (unsigned)snprintf(list + n, sizeof(list) - n, "The cat|a\n");
    worker_file_write(many, "many", list, strlen(list));
    worker_file_write(errors, "interrupted", "", 0);
    assert_true(process_start(&process, &spec));
    assert_true(process_until(has_begun, errors, PROCESS_PATIENCE_MS));
    assert_true(process_freeze(&process));
    kill(process.pid, SIGINT);
    process_thaw(&process);
    assert_int_equal(process_wait(&process, PROCESS_PATIENCE_MS), 1);
    assert_true(file_has(errors, "kvworker: ask: stopped"));
}

static void test_refused(void **state)
{
    char spoiled[PROCESS_PATH_BYTES];

    (void)state;
    worker_file_write(spoiled, "spoiled", "one\n", 4);
    run(2, NULL);
    run(2, "--text-file", text, NULL);
    assert_non_null(strstr(result.errors, "option: --needles: missing"));
    run(2, "--text-file", "/nonexistent/text", "--needles", needles, NULL);
    run(2, "--text-file", text, "--needles", spoiled, NULL);
    assert_non_null(strstr(result.errors, "spoiled:1: expected beginning|completion"));
    run(2, "--text-file", text, "--needles", needles, "--budgets", "1/4,1/2", NULL);
    assert_non_null(strstr(result.errors, "option: --budgets: "));
    run(2, "--text-file", text, "--needles", needles, "--methods", "all", NULL);
    run(2, "--text-file", text, "--needles", needles, "--max-tokens", "5000", NULL);
    assert_non_null(strstr(result.errors, "context"));
    /* One session for each method: they do not fit together. */
    run(2, "--text-file", text, "--needles", needles, "--memory", "16M", "--tokens", "3500",
        "--methods", "full,oracle,window,pqcache,random", NULL);
    assert_non_null(strstr(result.errors, "--memory"));
    assert_string_equal(result.output, "");
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_objects), cmocka_unit_test(test_text),
        cmocka_unit_test(test_context), cmocka_unit_test(test_interrupt),
        cmocka_unit_test(test_refused),
    };

    (void)argc;
    kvworker = argv[0];
    return cmocka_run_group_tests_name("worker.ask", tests, make_files, NULL);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: test_worker_ask KVWORKER\n");
        return 2;
    }
    return process_supervise(work, argc - 1, argv + 1);
}
