#define _GNU_SOURCE /* asprintf */
/* kvworker generate --prompts as a user runs it, on a small made model and a store inside of it: each
 * prompt gets the answer that it gets alone, and a file that is wrong is refused by its line. */
#include "tests/support/worker_files.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ARGUMENTS_MAX = 40,
    TEXT_BYTES = 3000,
    PROMPTS = 5,
    IDS_BYTES = 4096,
};

static const char *kvworker;
static char model[PROCESS_PATH_BYTES], chat_model[PROCESS_PATH_BYTES];
static char text[TEXT_BYTES + 1]; /* of words alone */
static struct process_result result;

/* A prompt is the beginning of the text. */
static const struct {
    unsigned bytes, max_tokens; /* 0: not said */
} prompts[PROMPTS] = {{20, 0}, {2900, 7}, {1, 12}, {1500, 1}, {300, 0}};

static int make_files(void **state)
{
    (void)state;
    worker_file_write_model(model, "model.gguf");
    worker_file_write_chat_model(chat_model, "chat.gguf");
    worker_text(text, TEXT_BYTES);
    for (unsigned i = 0; i < TEXT_BYTES; i++)
        if (strchr("\"\\\n", text[i]) != NULL)
            text[i] = ' ';
    return 0;
}

/* kvworker generate and what follows, up to NULL. */
static void run(int status, const char *of_model, ...)
{
    const char *argv[ARGUMENTS_MAX] = {kvworker,   "generate", "--model",   of_model,
                                       "--memory", "64M",      "--threads", "2"};
    const struct process_spec spec = {.argv = argv};
    unsigned n = 8;
    va_list more;

    va_start(more, of_model);
    while ((argv[n] = va_arg(more, const char *)) != NULL)
        assert_true(++n < ARGUMENTS_MAX);
    va_end(more);
    assert_true(process_run(&spec, PROCESS_PATIENCE_MS, &result));
    if (result.status != status)
        fail_msg("status %d: %s", result.status, result.errors);
}

static void write_prompts(char path[PROCESS_PATH_BYTES], const char *id_of_first)
{
    char *lines = NULL;
    size_t bytes;
    FILE *file = open_memstream(&lines, &bytes);

    assert_non_null(file);
    for (unsigned i = 0; i < PROMPTS; i++) {
        fprintf(file, "{\"prompt\": \"%.*s\"", (int)prompts[i].bytes, text);
        if (prompts[i].max_tokens > 0)
            fprintf(file, ", \"max_tokens\": %u", prompts[i].max_tokens);
        if (i == 0)
            fprintf(file, ", \"id\": \"%s\"", id_of_first);
        fprintf(file, "}\n%s", i == 2 ? "\n  \n" : ""); /* blank lines are counted */
    }
    assert_int_equal(fclose(file), 0);
    worker_file_write(path, "prompts", lines, bytes);
    free(lines);
}

/* "[12, 7]", of the object in the line that begins at `line`. */
static void ids_of(const char *line, char ret_ids[IDS_BYTES])
{
    const char *begin = strstr(line, "\"token_ids\": ");
    const char *end = begin != NULL ? strchr(begin, ']') : NULL;

    assert_non_null(end);
    assert_true(end - begin < IDS_BYTES);
    memcpy(ret_ids, begin, (size_t)(end - begin));
    ret_ids[end - begin] = '\0';
}

/* The line of an answer, by the line of its prompt. */
static const char *answer_of(unsigned number)
{
    char key[32];
    const char *line;

    snprintf(key, sizeof(key), "{\"line\": %u,", number);
    line = strstr(result.output, key);
    if (line == NULL)
        fail_msg("no %s in %s", key, result.output);
    return line;
}

static void as_alone(const char *attention, const char *batch, const char *groups)
{
    static const unsigned lines[PROMPTS] = {1, 2, 3, 6, 7};
    char together[PROMPTS][IDS_BYTES], alone[IDS_BYTES], path[PROCESS_PATH_BYTES];

    write_prompts(path, "the first");
    run(0, model, "--prompts", path, "--raw", "--json", "--max-tokens", "9", "--attention",
        attention, "--batch", batch, "--groups", groups, NULL);
    assert_non_null(strstr(answer_of(1), "\"id\": \"the first\""));
    assert_non_null(strstr(result.errors, "kvworker: 5 prompts, "));
    for (unsigned i = 0; i < PROMPTS; i++)
        ids_of(answer_of(lines[i]), together[i]);
    for (unsigned i = 0; i < PROMPTS; i++) {
        char prompt[TEXT_BYTES + 1], max_tokens[16];

        snprintf(prompt, sizeof(prompt), "%.*s", (int)prompts[i].bytes, text);
        snprintf(max_tokens, sizeof(max_tokens), "%u",
                 prompts[i].max_tokens > 0 ? prompts[i].max_tokens : 9);
        run(0, model, "--prompt", prompt, "--raw", "--json", "--max-tokens", max_tokens,
            "--attention", attention, NULL);
        ids_of(result.output, alone);
        assert_string_equal(together[i], alone);
    }
}

static void each_as_alone(void **state)
{
    (void)state;
    as_alone("full", "8", "2");
    as_alone("full", "2", "1");
    as_alone("window", "3", "2");
}

/* Many at once, with rows that are fetched and cached: each session has operations of its own. */
static void many_at_once(void **state)
{
    char *lines = NULL, path[PROCESS_PATH_BYTES];
    unsigned n_answers = 0;
    size_t bytes;
    FILE *file = open_memstream(&lines, &bytes);

    (void)state;
    assert_non_null(file);
    for (unsigned i = 0; i < 40; i++)
        fprintf(file, "{\"prompt\": \"%.*s\"}\n", 900, text + i);
    assert_int_equal(fclose(file), 0);
    worker_file_write(path, "many", lines, bytes);
    free(lines);
    run(0, model, "--prompts", path, "--raw", "--json", "--max-tokens", "8", "--batch", "40",
        "--batch-tokens", "16384", "--attention", "pqcache", "--window", "8", "--sinks", "1",
        "--answer", "rows", "--summaries", "0", "--fresh", NULL);
    for (const char *at = result.output; (at = strstr(at, "\"text\": ")) != NULL; at++)
        n_answers++;
    assert_in_range(n_answers, 20, 40); /* as many as the output kept has room for */
    assert_null(strstr(result.output, "\"error\""));
}

/* Without --json an answer stands under its id or its line; prompts are a user's turns without
 * --raw; others begin with what one has published. */
static void as_text(void **state)
{
    static const char lines[] = "{\"prompt\": \"The cat\", \"id\": \"of a cat\"}\r\n"
                                "{\"max_tokens\": 2, \"prompt\": \"The ant\"}";
    char path[PROCESS_PATH_BYTES];

    (void)state;
    worker_file_write(path, "two", lines, strlen(lines));
    run(0, chat_model, "--prompts", path, "--max-tokens", "3", NULL);
    assert_non_null(strstr(result.output, "--- of a cat: 3 tokens, length\n"));
    assert_non_null(strstr(result.output, "--- line 2: 2 tokens, length\n"));
    write_prompts(path, "one");
    run(0, model, "--prompts", path, "--raw", "--max-tokens", "9", "--batch", "1", NULL);
    assert_null(strstr(result.errors, ", 0 reused"));
    run(0, model, "--prompts", path, "--raw", "--max-tokens", "9", "--batch", "1", "--fresh",
        NULL);
    assert_non_null(strstr(result.errors, ", 0 reused"));
}

/* What is wrong is named with its line, and nothing is answered. */
static void wrong_files(void **state)
{
    static const struct {
        const char *lines, *said;
    } wrong[] = {
        {"", "no prompt: expected {\"prompt\": TEXT} a line"},
        {"\n \n", "no prompt: expected"},
        {"{\"prompt\": \"a\"}\n\n{\"prompt\": 3}", "line 3: prompt: must be a text"},
        {"{\"prompt\": \"a\"}\n{}", "line 2: prompt: missing, or empty"},
        {"{\"prompt\": \"\"}", "line 1: prompt: missing, or empty"},
        {"[]", "line 1: must be an object"},
        {"{\"prompt\": \"a\"", "line 1: not JSON"},
        {"{\"prompt\": \"a\"} b", "line 1: not JSON"},
        {"{\"prompt\": \"a\", \"prompt\": \"b\"}", "line 1: not JSON: duplicate object key"},
        {"{\"prompt\": \"a\", \"promt\": 1}", "line 1: unknown member: promt"},
        {"{\"prompt\": \"a\", \"id\": 1}", "line 1: id: must be a text"},
        {"{\"prompt\": \"a\", \"id\": \"b\\n--- c\"}", "line 1: id: has control characters"},
        {"{\"prompt\": \"a\", \"max_tokens\": 0}",
         "line 1: max_tokens: must be a number from 1"},
        {"{\"prompt\": \"a\", \"max_tokens\": 1.5}", "line 1: max_tokens: must be a number"},
        {"{\"prompt\": \"a\", \"max_tokens\": 99999999999}", "line 1: max_tokens: must be a"},
        {"{\"prompt\": \"\xff\"}", "line 1: not JSON"},
    };
    char path[PROCESS_PATH_BYTES];

    (void)state;
    for (unsigned i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        worker_file_write(path, "wrong", wrong[i].lines, strlen(wrong[i].lines));
        run(2, model, "--prompts", path, "--raw", NULL);
        if (strstr(result.errors, wrong[i].said) == NULL)
            fail_msg("%s: %s", wrong[i].lines, result.errors);
        assert_string_equal(result.output, "");
    }
}

static void wrong_options(void **state)
{
    static char words[60000];
    char path[PROCESS_PATH_BYTES], *line = NULL;

    (void)state;
    write_prompts(path, "one");
    run(2, model, "--prompts", path, "--prompt", "a", NULL);
    assert_non_null(strstr(result.errors, "--prompts: not together with --prompt"));
    run(2, model, "--prompts", path, "--batch", "0", NULL);
    run(2, model, "--prompts", path, "--groups", "3", NULL);
    run(2, model, "--prompts", path, "--batch", "256", "--batch-tokens", "300", NULL);
    assert_non_null(strstr(result.errors, "--batch-tokens: 300: must be 512 at least"));
    run(2, model, "--prompts", "no/such/file", NULL);
    assert_non_null(strstr(result.errors, "no/such/file"));
    run(2, model, "--prompts", path, "--raw", "--kv-memory", "1M", NULL);
    assert_non_null(strstr(result.errors, "prompts: line "));
    assert_non_null(strstr(result.errors, " MiB of rows, more than --kv-memory, 1 MiB"));
    run(2, model, "--prompts", path, "--raw", "--temperature", "hot", NULL);
    assert_non_null(strstr(result.errors, "option: --temperature: not a number from 0 to 100"));
    run(2, model, "--prompts", path, "--raw", "--attention", "pqcache", "--pq-m", "7", NULL);
    assert_non_null(strstr(result.errors, "pq-m: 7: must divide the head dimension"));
    assert_string_equal(result.output, "");
    worker_text(words, sizeof(words) - 1);
    for (unsigned i = 0; i < sizeof(words) - 1; i++)
        if (strchr("\"\\\n", words[i]) != NULL)
            words[i] = ' ';
    assert_true(asprintf(&line, "{\"prompt\": \"a\"}\n{\"prompt\": \"%s\"}", words) > 0);
    worker_file_write(path, "long", line, strlen(line));
    free(line);
    run(2, model, "--prompts", path, "--raw", NULL);
    assert_non_null(strstr(result.errors, "prompts: line 2: "));
    assert_non_null(strstr(result.errors, "the model's context"));
}

/* What does nothing without another option is refused where that is not set, whatever it says;
 * from the environment, which is of many commands, it is not. */
static void lone_options(void **state)
{
    static const struct {
        const char *option, *value, *needs;
    } lone[] = {
        {"--batch", "8", "--prompts"},
        {"--batch-tokens", "512", "--prompts"},
        {"--kv-memory", "0", "--prompts"},
        {"--groups", "2", "--prompts"},
        {"--sample-top-k", "1", "a --temperature other than 0"},
        {"--sample-top-p", "1", "a --temperature other than 0"},
        {"--publish-tokens", NULL, "a --store other than embedded"},
    };
    char said[128];

    (void)state;
    for (unsigned i = 0; i < sizeof(lone) / sizeof(lone[0]); i++) {
        run(2, model, "--raw", "--prompt", "a", lone[i].option, lone[i].value, NULL);
        snprintf(said, sizeof(said), "kvworker: generate: option: %s: needs %s\n",
                 lone[i].option, lone[i].needs);
        assert_string_equal(result.errors, said);
        assert_string_equal(result.output, "");
    }
    run(0, model, "--raw", "--prompt", "a", "--max-tokens", "1", "--sample-top-k", "1",
        "--temperature", "1", NULL);
    setenv("KVWORKER_BATCH", "3", 1);
    run(0, model, "--raw", "--prompt", "a", "--max-tokens", "1", NULL);
    setenv("KVWORKER_PROMPTS", "no/such/file", 1);
    run(2, model, "--groups", "2", NULL);
    assert_non_null(strstr(result.errors, "no/such/file"));
    unsetenv("KVWORKER_PROMPTS");
    unsetenv("KVWORKER_BATCH");
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_as_alone), cmocka_unit_test(many_at_once),
        cmocka_unit_test(as_text),       cmocka_unit_test(wrong_files),
        cmocka_unit_test(wrong_options), cmocka_unit_test(lone_options),
    };

    (void)argc;
    kvworker = argv[0];
    return cmocka_run_group_tests_name("worker.prompts", tests, make_files, NULL);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: test_worker_prompts KVWORKER\n");
        return 2;
    }
    return process_supervise(work, argc - 1, argv + 1);
}
