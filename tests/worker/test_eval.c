/* kvworker eval as a user runs it, on a small made model: its lines against what `kvworker
 * logits` says, its formats, and what it refuses. */
#include "gpu-worker/text/tokenizer.h"
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
    FROM = 100,
    TOKENS = 180,
    ARGUMENTS_MAX = 40,
    N_RUNS = 1 + 2 + 2 + 4, /* full, oracle and window at two budgets, random with two seeds */
    NPY_HEADER_BYTES = 128,
    TEXT_BYTES = 1499,
};

static const char *kvworker;
static char model[PROCESS_PATH_BYTES], text[PROCESS_PATH_BYTES], needles[PROCESS_PATH_BYTES];
/* The made model begins every answer with the byte of the second one. */
static const char sentences[] = "# two\nThe cat and the hat|sing\n\nThe ant thinks|\x16\n";
static uint32_t *tokens;
static size_t n_tokens;
static struct process_result result;

static int make_files(void **state)
{
    struct kvw_tokenizer *reader;
    struct kvw_gguf *gguf;
    char long_text[TEXT_BYTES], detail[KVW_GGUF_DETAIL_BYTES] = "";

    (void)state;
    worker_file_write_model(model, "model.gguf");
    worker_text(long_text, sizeof(long_text));
    worker_file_write(text, "text", long_text, sizeof(long_text));
    worker_file_write(needles, "needles", sentences, strlen(sentences));
    assert_int_equal(kvw_gguf_open(model, &gguf, detail, sizeof(detail)), KV_OK);
    assert_int_equal(kvw_tokenizer_create(gguf, &reader, detail, sizeof(detail)), KV_OK);
    assert_int_equal(kvw_tokenizer_encode(reader, long_text, sizeof(long_text), false, true,
                                          &tokens, &n_tokens),
                     KV_OK);
    assert_true(n_tokens > TOKENS);
    kvw_tokenizer_destroy(reader);
    kvw_gguf_close(gguf);
    return 0;
}

static int remove_files(void **state)
{
    (void)state;
    free(tokens); /* the files go with their folder */
    return 0;
}

/* kvworker COMMAND --model MODEL and what follows, up to NULL. */
static void run(const char *command, int status, ...)
{
    const char *argv[ARGUMENTS_MAX] = {kvworker,   command, "--model",   model,
                                       "--memory", "64M",   "--threads", "2"};
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

static double perplexity_of_logits(const char *path)
{
    FILE *file = fopen(path, "rb");
    float *logits;
    double sum = 0;
    size_t n_vocabulary;
    long end;

    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    end = ftell(file) - NPY_HEADER_BYTES;
    n_vocabulary = (size_t)end / sizeof(float) / (n_tokens - FROM);
    assert_int_equal((size_t)end, n_vocabulary * (n_tokens - FROM) * sizeof(float));
    fseek(file, NPY_HEADER_BYTES, SEEK_SET);
    logits = malloc(n_vocabulary * sizeof(float));
    assert_non_null(logits);
    for (size_t t = FROM; t + 1 < TOKENS; t++) {
        double total = 0;

        assert_int_equal(fread(logits, sizeof(float), n_vocabulary, file), n_vocabulary);
        for (size_t i = 0; i < n_vocabulary; i++)
            total += exp((double)logits[i]);
        sum += log(total) - (double)logits[tokens[t + 1]];
    }
    fclose(file);
    free(logits);
    return exp(sum / (TOKENS - 1 - FROM));
}

/* Mean KL(full || method) of the tokens, from the logits of both in two files. */
static double kl_of_logits(const char *full_path, const char *path)
{
    FILE *files[2] = {fopen(full_path, "rb"), fopen(path, "rb")};
    double sum = 0, total[2];
    float *logits[2];
    size_t n_vocabulary;

    assert_true(files[0] != NULL && files[1] != NULL);
    fseek(files[0], 0, SEEK_END);
    n_vocabulary =
        (size_t)(ftell(files[0]) - NPY_HEADER_BYTES) / sizeof(float) / (n_tokens - FROM);
    for (int i = 0; i < 2; i++) {
        fseek(files[i], NPY_HEADER_BYTES, SEEK_SET);
        logits[i] = malloc(n_vocabulary * sizeof(float));
        assert_non_null(logits[i]);
    }
    for (size_t t = FROM; t + 1 < TOKENS; t++) {
        for (int i = 0; i < 2; i++) {
            assert_int_equal(fread(logits[i], sizeof(float), n_vocabulary, files[i]),
                             n_vocabulary);
            total[i] = 0;
            for (size_t v = 0; v < n_vocabulary; v++)
                total[i] += exp((double)logits[i][v]);
        }
        for (size_t v = 0; v < n_vocabulary; v++) {
            const double p = exp((double)logits[0][v]) / total[0];

            sum += p * log(p / (exp((double)logits[1][v]) / total[1]));
        }
    }
    for (int i = 0; i < 2; i++) {
        free(logits[i]);
        fclose(files[i]);
    }
    return sum / (TOKENS - 1 - FROM);
}

static void test_perplexity(void **state)
{
    static const char *const methods[] = {"full", "oracle", "window:window=16", "random"};
    char out[PROCESS_PATH_BYTES], *line, *rest = NULL;
    double full = 0, quarter = 0, quarter_kl = 0;
    char full_out[PROCESS_PATH_BYTES];
    unsigned n = 0;

    (void)state;
    run("eval", 0, "--text-file", text, "--tokens", "180", "--from", "100", "--json",
        "--methods", "oracle,full,window:window=16,random", "--budgets", "1/4,k=9999",
        "--seeds", "3,4", "--window", "8", NULL);
    assert_string_equal(result.errors, "");
    for (line = strtok_r(result.output, "\n", &rest); line != NULL;
         line = strtok_r(NULL, "\n", &rest), n++) {
        const unsigned method = n == 0 ? 0 : n < 3 ? 1 : n < 5 ? 2 : 3;
        const bool is_all = method == 0 || strstr(line, "k=9999") != NULL;
        char key[64];

        snprintf(key, sizeof(key), "{\"method\": \"%s\",", methods[method]);
        assert_memory_equal(line, key, strlen(key));
        full = n == 0 ? worker_json_number(line, "perplexity") : full;
        assert_int_equal(worker_json_number(line, "tokens"), TOKENS);
        assert_int_equal(worker_json_number(line, "from"), FROM);
        assert_true(worker_json_number(line, "seconds") > 0 &&
                    worker_json_number(line, "tpot_s") > 0);
        assert_true(isnan(worker_json_number(line, "needles_asked")));
        assert_true(isnan(worker_json_number(line, "seed")) == (method < 3));
        if (method == 3)
            assert_int_equal(worker_json_number(line, "seed"), n < 7 ? 3 : 4);
        assert_true(isnan(worker_json_number(line, "recall")) == (method == 0));
        if (is_all) { /* nothing is left out */
            assert_true(worker_json_number(line, "perplexity") == full);
            assert_true(worker_json_number(line, "loss_percent") == 0 &&
                        worker_json_number(line, "kl") == 0);
            assert_true(worker_json_number(line, "rows_attended_share") == 1);
        } else {
            assert_true(worker_json_number(line, "perplexity") != full);
            assert_true(fabs(worker_json_number(line, "loss_percent") -
                             100 * (worker_json_number(line, "perplexity") / full - 1)) < 1e-4);
            assert_true(worker_json_number(line, "loss_error_percent") > 0);
            assert_true(worker_json_number(line, "kl") > 0 &&
                        worker_json_number(line, "kl_error") > 0);
            quarter_kl = method == 1 ? worker_json_number(line, "kl") : quarter_kl;
            assert_true(fabs(worker_json_number(line, "rows_attended_share") - 0.25) < 0.01);
            quarter = method == 1 ? worker_json_number(line, "perplexity") : quarter;
        }
        if (method == 1 || (method > 0 && is_all))
            assert_true(worker_json_number(line, "recall") == 1);
        else if (method > 1)
            assert_true(worker_json_number(line, "recall") < 0.9);
    }
    assert_int_equal(n, N_RUNS);

    process_path(full_out, "full.npy");
    process_path(out, "logits.npy");
    run("logits", 0, "--prompt-file", text, "--from", "100", "--out", full_out, NULL);
    assert_true(fabs(perplexity_of_logits(full_out) / full - 1) < 1e-6);
    run("logits", 0, "--prompt-file", text, "--from", "100", "--out", out, "--attention",
        "oracle", "--ratio", "0.25", "--top-k", "0", "--window", "8", NULL);
    assert_true(fabs(perplexity_of_logits(out) / quarter - 1) < 1e-6);
    assert_true(fabs(kl_of_logits(full_out, out) / quarter_kl - 1) < 1e-4);
}

/* Each token of --per-token, and what follows from them: means, standard errors by blocks, and
 * differences to another method. */
static void test_per_token(void **state)
{
    enum {
        N = TOKENS - 1 - FROM,
        METHODS = 3
    };
    static double loss[METHODS][N], kl[METHODS][N];
    char path[PROCESS_PATH_BYTES], line[300], *output, *rest = NULL;
    FILE *file;

    (void)state;
    process_path(path, "tokens.csv");
    run("eval", 0, "--text-file", text, "--tokens", "180", "--from", "100", "--json",
        "--methods", "oracle,window", "--budgets", "1/4", "--against", "window", "--window",
        "8", "--per-token", path, NULL);
    file = fopen(path, "r");
    assert_non_null(file);
    assert_non_null(fgets(line, sizeof(line), file));
    assert_string_equal(line, "text,method,budget,seed,token,loss,kl\n");
    for (int method = 0; method < METHODS; method++) {
        for (int i = 0; i < N; i++) {
            static const char *const names[] = {",full,", ",window,1/4,", ",oracle,1/4,"};
            unsigned token;

            assert_non_null(fgets(line, sizeof(line), file));
            assert_non_null(strstr(line, names[method]));
            assert_int_equal(
                sscanf(strstr(line, names[method]) + strlen(names[method]) + (method == 0),
                       ",%u,%lf,%lf", &token, &loss[method][i], &kl[method][i]),
                3);
            assert_int_equal(token, FROM + 1 + i);
        }
    }
    assert_null(fgets(line, sizeof(line), file));
    fclose(file);
    output = strtok_r(result.output, "\n", &rest);
    for (int method = 0; method < METHODS; method++, output = strtok_r(NULL, "\n", &rest)) {
        double sum = 0, differences = 0, blocks[2] = {0};

        assert_non_null(output);
        for (int i = 0; i < N; i++) {
            sum += kl[method][i] / N;
            differences += (loss[method][i] - loss[1][i]) / N;
        }
        for (int i = 0; i < N; i++)
            blocks[i / 64] += kl[method][i] - sum;
        assert_true(fabs(worker_json_number(output, "kl") - sum) < 1e-7);
        assert_true(fabs(worker_json_number(output, "kl_error") -
                         sqrt(2 * (blocks[0] * blocks[0] + blocks[1] * blocks[1])) / N) < 1e-7);
        assert_true(isnan(worker_json_number(output, "loss_difference")) == (method < 2));
        if (method == 2)
            assert_true(fabs(worker_json_number(output, "loss_difference") - differences) <
                        1e-7);
    }
    /* A file that is there stays. */
    run("eval", 2, "--text-file", text, "--tokens", "180", "--from", "100", "--per-token", path,
        NULL);
    assert_non_null(strstr(result.errors, "--per-token: "));
    run("eval", 2, "--text-file", text, "--tokens", "180", "--from", "100", "--against",
        "pqcache", NULL);
    assert_non_null(strstr(result.errors, "--against: not one of --methods"));
    run("eval", 2, "--text-file", text, "--from", "100", "--long-context", NULL);
    assert_non_null(strstr(result.errors, "--long-context: sets"));
    run("eval", 2, "--text-file", text, "--long-context", NULL);
    assert_non_null(strstr(result.errors, "expected at least 6502"));
}

/* Exact selection, whatever the codes; with all rows it is full attention, and without
 * summaries it is the oracle. */
static void test_oracle_and_rest(void **state)
{
    double oracle, both;

    (void)state;
    run("eval", 0, "--text-file", text, "--tokens", "180", "--from", "150", "--json",
        "--methods", "oracle,oracle+rest:summaries=0", "--budgets", "1/4", "--window", "8",
        NULL);
    oracle = worker_json_number(strstr(result.output, "\"oracle\""), "perplexity");
    both = worker_json_number(strstr(result.output, "\"oracle+rest:"), "perplexity");
    assert_true(fabs(both / oracle - 1) < 1e-3);
    run("eval", 2, "--text-file", text, "--methods", "oracle+rest:rerank=2", NULL);
    assert_non_null(strstr(result.errors, "rerank"));
}

/* Without guesses it is pqcache without summaries; with them it says how good they are. */
static void test_speculated(void **state)
{
    static const struct {
        const char *method, *error;
    } refused[] = {
        {"pqcache:speculate=none",
         "methods: speculate: not used by pqcache, only by speculated"},
        {"speculated:speculate=query",
         "methods: speculate: not input, attention or none: query"},
        {"speculated:speculate-first=0",
         "methods: speculate-first: not a layer, at least 1: 0"},
        {"speculated:speculate=none:speculate-first=2",
         "methods: speculate-first: not used by speculated, only by speculated with speculate "
         "input or attention"},
        {"speculated:summaries=16",
         "methods: summaries: not used by speculated, only by pqcache, oracle+rest"},
        {"speculated:answer=rows", "methods: answer: not used by speculated, only by pqcache"},
    };
    const char *own, *guessed;
    double usual;

    (void)state;
    run("eval", 0, "--text-file", text, "--tokens", "180", "--from", "150", "--json",
        "--methods", "pqcache:summaries=0,speculated:speculate=none,speculated:rerank=2",
        "--budgets", "1/4", "--window", "8", "--first-cut", "none", "--wait-index", "--seeds",
        "1", NULL);
    usual = worker_json_number(strstr(result.output, "\"pqcache:"), "perplexity");
    own = strstr(result.output, "\"speculated:speculate=none");
    guessed = strstr(result.output, "\"speculated:rerank=2");
    assert_true(own != NULL && guessed != NULL);
    assert_true(fabs(worker_json_number(own, "perplexity") / usual - 1) < 1e-4);
    assert_true(worker_json_number(own, "guess_cosine") > 0.999999);
    assert_true(worker_json_number(guessed, "guess_cosine") < 0.99);
    assert_non_null(strstr(guessed, "\"guess_cosine_by_layer\": [1, "));
    assert_true(
        isnan(worker_json_number(result.output, "guess_cosine"))); /* full attention's */
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        run("eval", 2, "--text-file", text, "--methods", refused[i].method, NULL);
        if (strstr(result.errors, refused[i].error) == NULL)
            fail_msg("%s: %s", refused[i].method, result.errors);
    }
}

static unsigned n_lines(const char *output)
{
    unsigned n = 0;

    for (; *output != '\0'; output++)
        n += *output == '\n';
    return n;
}

/* Costs that the nodes tell, for rows that come and for attention that comes; two texts. */
static void test_costs(void **state)
{
    static const char *const methods[] = {"full", "pqcache:answer=rows:cache=off",
                                          "pqcache:answer=attend"};
    const double steps = TOKENS - 1 - FROM;
    char texts[2 * PROCESS_PATH_BYTES], other[PROCESS_PATH_BYTES], reversed[TEXT_BYTES];
    char *line, *rest = NULL;
    double by_rows = 0, share = 0;
    unsigned n = 0;

    (void)state;
    worker_text(reversed, sizeof(reversed));
    for (size_t i = 0; i < sizeof(reversed) / 2; i++) {
        const char last = reversed[sizeof(reversed) - 1 - i];

        reversed[sizeof(reversed) - 1 - i] = reversed[i];
        reversed[i] = last;
    }
    worker_file_write(other, "reversed", reversed, sizeof(reversed));
    snprintf(texts, sizeof(texts), "%s,%s", text, other);
    run("eval", 0, "--text-file", texts, "--tokens", "180", "--from", "100", "--json",
        "--methods", "pqcache:answer=rows:cache=off,pqcache:answer=attend", "--budgets", "1/4",
        "--window", "8", "--first-cut", "none", "--rerank", "2", "--wait-index", NULL);
    assert_string_equal(result.errors, "");
    for (line = strtok_r(result.output, "\n", &rest); line != NULL;
         line = strtok_r(NULL, "\n", &rest), n++) {
        const unsigned method = n % 3;
        const double bytes = worker_json_number(line, "step_bytes_fetched");
        char key[PROCESS_PATH_BYTES + 64];

        snprintf(key, sizeof(key), "{\"method\": \"%s\",", methods[method]);
        assert_memory_equal(line, key, strlen(key));
        snprintf(key, sizeof(key), "\"text\": \"%s\"}", n < 3 ? text : other);
        assert_non_null(strstr(line, key));
        assert_true(fabs(bytes * steps - worker_json_number(line, "bytes_fetched")) < 1);
        if (method == 0) {
            assert_true(bytes == 0 && isnan(worker_json_number(line, "step_node_s")));
            assert_true(isnan(worker_json_number(line, "step_bytes_read")));
            assert_true(isnan(worker_json_number(line, "rows_scored_exactly_share")));
            continue;
        }
        assert_true(worker_json_number(line, "step_node_s") > 0);
        assert_true(worker_json_number(line, "step_bytes_read_keys") > 0);
        assert_true(worker_json_number(line, "step_bytes_read_rows") > 0);
        assert_true(worker_json_number(line, "step_bytes_read_copies") == 0);
        assert_true(fabs(worker_json_number(line, "step_bytes_read") -
                         worker_json_number(line, "step_bytes_read_keys") -
                         worker_json_number(line, "step_bytes_read_rows")) < 1);
        /* So few rows have no codes: all are scored by key, and some of them once more. */
        assert_true(worker_json_number(line, "rows_coded_share") == 0);
        assert_true(worker_json_number(line, "rows_scored_exactly_share") > 1);
        assert_true(worker_json_number(line, "rows_scored_exactly_share") < 2);
        assert_true(worker_json_number(line, "rows_estimated_share") == 0);
        if (method == 1) {
            by_rows = worker_json_number(line, "perplexity");
            share = worker_json_number(line, "rows_attended_share");
            assert_true(fabs(share - 0.25) < 0.01);
            continue;
        }
        assert_true(fabs(worker_json_number(line, "perplexity") / by_rows - 1) < 1e-3);
        assert_true(worker_json_number(line, "rows_attended_share") == share);
        assert_true(bytes == MADE_LAYERS * MADE_Q_HEADS * (MADE_D + 1) * sizeof(float));
    }
    assert_int_equal(n, 6);

    run("eval", 0, "--text-file", texts, "--tokens", "120", "--from", "100", "--methods",
        "window", NULL);
    assert_int_equal(n_lines(result.output), 2 * 4);
    assert_non_null(strstr(result.output, "/reversed, 120 tokens\nmethod "));
}

static void test_needles(void **state)
{
    (void)state;
    run("eval", 0, "--text-file", text, "--tokens", "180", "--needles", needles,
        "--needles-only", "--json", "--methods", "window", "--budgets", "1/4,1/2", NULL);
    assert_int_equal(n_lines(result.output), 3);
    for (const char *line = result.output; *line != '\0'; line = strchr(line, '\n') + 1) {
        assert_int_equal(worker_json_number(line, "needles_asked"), 2);
        assert_int_equal(worker_json_number(line, "needles_found"), 1);
        assert_true(isnan(worker_json_number(line, "perplexity")));
    }
}

static void test_formats(void **state)
{
    (void)state;
    run("eval", 0, "--text-file", text, "--tokens", "120", "--from", "100", "--csv",
        "--needles", needles, "--methods", "random", NULL);
    assert_int_equal(n_lines(result.output), 3);
    assert_memory_equal(result.output, "method,budget,seed,tokens,from,perplexity,", 42);
    assert_non_null(strstr(result.output, "\nfull,,,120,100,"));
    assert_non_null(strstr(result.output, "\nrandom,1/10,0,120,100,"));
    run("eval", 0, "--text-file", text, "--tokens", "120", "--from", "100", "--methods",
        "oracle", NULL);
    assert_int_equal(n_lines(result.output), 3);
    assert_memory_equal(result.output, "method ", 7);
}

/* An old name is accepted wherever the new one is, but --help does not show it.  Errors say the
 * name that was given, so they show that each was read. */
static void test_old_names(void **state)
{
    (void)state;
    run("eval", 2, "--text-file", text, "--summaries", "8", NULL);
    assert_non_null(strstr(result.errors, "option: --summaries: not one of 0|16|64: 8"));
    run("eval", 2, "--text-file", text, "--rest", "8", NULL);
    assert_non_null(strstr(result.errors, "option: --rest: not one of 0|16|64: 8"));
    run("eval", 2, "--text-file", text, "--methods", "pqcache:rest=8", NULL);
    assert_non_null(strstr(result.errors, "methods: rest: not 0, 16 or 64: 8"));
    setenv("KVWORKER_REST", "8", 1);
    run("eval", 2, "--text-file", text, NULL);
    unsetenv("KVWORKER_REST");
    assert_non_null(strstr(result.errors, "environment: KVWORKER_REST: not one of"));
    run("eval", 0, "--help", NULL);
    assert_non_null(strstr(result.output, "--summaries 0|16|64"));
    assert_null(strstr(result.output, "--rest"));
}

/* An option that no method uses is a mistake; in the environment it is a default. */
static void test_unused(void **state)
{
    (void)state;
    run("generate", 2, "--prompt", "a", "--ratio", "0.1", NULL);
    assert_non_null(strstr(result.errors, "option: --ratio: not used by full, only by pqcache, "
                                          "oracle, oracle+rest, window, random, speculated"));
    run("logits", 2, "--attention", "window", "--rest", "16", NULL);
    assert_non_null(
        strstr(result.errors, "option: --summaries: not used by window, only by pqcache"));
    run("chat", 2, "--attention", "oracle", "--wait-index", NULL);
    assert_non_null(strstr(result.errors, "option: --wait-index: not used by oracle"));
    run("eval", 2, "--text-file", text, "--methods", "window,random", "--rerank", "4", NULL);
    assert_non_null(strstr(result.errors, "option: --rerank: not used by window,random, only"));
    run("eval", 2, "--text-file", text, "--methods", "full:sinks=2", NULL);
    assert_non_null(strstr(result.errors, "methods: sinks: not used by full"));
    /* What contradicts itself is refused before anything is read or computed. */
    run("eval", 2, "--text-file", text, "--methods", "full,pqcache:rerank=auto", NULL);
    assert_non_null(strstr(result.errors, "option: rerank: auto: only with first-cut none"));
    assert_string_equal(result.output, "");
    run("generate", 2, "--prompt", "a", "--attention", "pqcache", "--rerank", "auto", NULL);
    assert_non_null(strstr(result.errors, "option: rerank: auto: only with first-cut none"));
    /* Attention outputs need no cache of rows. */
    run("generate", 2, "--attention", "pqcache", "--cache", "lfu", NULL);
    assert_non_null(strstr(result.errors, "option: --cache: not used by pqcache, only by "
                                          "pqcache, oracle+rest with answer rows or ids"));
    run("eval", 2, "--text-file", text, "--methods", "pqcache", "--cache-tokens", "256", NULL);
    assert_non_null(strstr(result.errors, "option: --cache-tokens: not used by pqcache, only"));
    run("eval", 0, "--text-file", text, "--tokens", "120", "--from", "100", "--methods",
        "pqcache,pqcache:answer=rows", "--cache-tokens", "256", NULL);
    setenv("KVWORKER_RATIO", "1/2", 1);
    run("generate", 0, "--raw", "--prompt", "a", "--max-tokens", "1", NULL);
    unsetenv("KVWORKER_RATIO");
}

/* The address that the embedded node has inside means nothing to users. */
static void test_embedded_name(void **state)
{
    (void)state;
    run("generate", 0, "--raw", "--prompt", "a", "--max-tokens", "1", "--json", NULL);
    assert_non_null(strstr(result.output, "\"nodes\": [{\"node\": \"embedded\", "));
}

/* --store takes a list of 1,024 nodes with names. */
static void test_many_nodes(void **state)
{
    enum {
        MANY = 1024,
        ENTRY_BYTES = 64,
    };
    static char list[(MANY + 1) * ENTRY_BYTES];
    size_t bytes = 0;

    (void)state;
    for (unsigned i = 0; i < MANY; i++)
        bytes += (size_t)sprintf(list + bytes, "%sstorage-node-number-%u=127.0.0.1:%u",
                                 i > 0 ? "," : "", i, i == MANY - 1 ? 1 : i + 1);
    run("generate", 2, "--raw", "--prompt", "a", "--store", list, NULL);
    if (strstr(result.errors, ": nodes: twice in the list: 127.0.0.1:1") == NULL)
        fail_msg("%s", result.errors);
    sprintf(list + bytes, ",storage-node-number-1024=127.0.0.1:2000");
    run("generate", 2, "--raw", "--prompt", "a", "--store", list, NULL);
    assert_non_null(strstr(result.errors, ": nodes: too many nodes: limit 1024"));
    assert_true(strlen(result.errors) < 400); /* not the whole list */
}

static void test_refused(void **state)
{
    char spoiled[PROCESS_PATH_BYTES];

    (void)state;
    worker_file_write(spoiled, "spoiled", "one\n", 4);
    run("eval", 2, NULL);
    run("eval", 2, "--text-file", "/nonexistent/text", NULL);
    run("eval", 2, "--text-file", text, "--tokens", "101", "--from", "100", NULL);
    run("eval", 2, "--text-file", text, "--tokens", "9", "--methods", "all", NULL);
    run("eval", 2, "--text-file", text, "--budgets", "3", NULL);
    run("eval", 2, "--text-file", text, "--window", "none", NULL);
    assert_non_null(strstr(result.errors, "option: --window: "));
    run("eval", 2, "--text-file", text, "--json", "--csv", NULL);
    run("eval", 2, "--text-file", text, "--needles-only", NULL);
    assert_non_null(strstr(result.errors, "option: --needles-only: needs --needles\n"));
    run("eval", 2, "--text-file", text, "--needle-tokens", "0", NULL);
    assert_non_null(strstr(result.errors, "option: --needle-tokens: needs --needles\n"));
    run("eval", 2, "--text-file", text, "--needles", spoiled, NULL);
    assert_non_null(strstr(result.errors, "spoiled:1: expected beginning|completion"));
    assert_string_equal(result.output, "");
    run("eval", 2, "--text-file", text, "--methods", "pqcache:summaries=8", NULL);
    assert_non_null(strstr(result.errors, "methods: summaries: not 0, 16 or 64: 8"));
    run("eval", 2, "--text-file", text, "--methods", "pqcache:answer=some", NULL);
    assert_string_equal(result.output, "");
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_perplexity), cmocka_unit_test(test_costs),
        cmocka_unit_test(test_per_token),  cmocka_unit_test(test_oracle_and_rest),
        cmocka_unit_test(test_speculated), cmocka_unit_test(test_needles),
        cmocka_unit_test(test_formats),    cmocka_unit_test(test_old_names),
        cmocka_unit_test(test_unused),     cmocka_unit_test(test_embedded_name),
        cmocka_unit_test(test_many_nodes), cmocka_unit_test(test_refused),
    };

    (void)argc;
    kvworker = argv[0];
    return cmocka_run_group_tests_name("worker.eval", tests, make_files, remove_files);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: test_worker_eval KVWORKER\n");
        return 2;
    }
    return process_supervise(work, argc - 1, argv + 1);
}
