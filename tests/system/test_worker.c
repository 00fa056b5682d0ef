/* kvworker over real nodes, on a small made model: the same answer wherever its rows are, and a
 * node that is killed while it answers. */
#include "tests/support/worker_files.h"
#include "tests/system/system.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_NODES = 2,
    PROMPT_BYTES = 3600,
    TRIES = 5,
    TIMEOUT_MS = 5 * PROCESS_PATIENCE_MS,
};

static const char *kvworker;
static char model[PROCESS_PATH_BYTES], prompt[PROCESS_PATH_BYTES];
static struct process_node nodes[N_NODES];
static char one[96], both[192];
static struct process_result result;
static const char *const options[] = {"--transport", "tcp", "--memory", "64M", NULL};

static int set_up(void **state)
{
    static char text[PROMPT_BYTES];

    (void)state;
    worker_file_write_model(model, "model.gguf");
    worker_text(text, sizeof(text));
    worker_file_write(prompt, "prompt", text, sizeof(text));
    for (unsigned i = 0; i < N_NODES; i++)
        system_node_start(&nodes[i], options);
    snprintf(one, sizeof(one), "%s", nodes[0].control);
    snprintf(both, sizeof(both), "%s,%s", nodes[0].control, nodes[1].control);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    for (unsigned i = 0; i < N_NODES; i++)
        if (nodes[i].process.pid != 0)
            system_node_stop(&nodes[i]);
    return 0;
}

/* For kvworker, a node that has been silent for two seconds is lost; on a slow machine one that
 * lives may be. */
static void run_kvworker(const char *const *argv)
{
    const struct process_spec spec = {.argv = argv};

    for (unsigned i = 0; i < TRIES; i++) {
        assert_true(process_run(&spec, TIMEOUT_MS, &result));
        if (result.status == 0)
            return;
        if (strstr(result.errors, ": unreachable: ") == NULL)
            break;
    }
    fail_msg("status %d: %s", result.status, result.errors);
}

/* The options that make a run repeat exactly. */
#define EXACT                                                                                 \
    "--raw", "--prompt-file", prompt, "--attention", "pqcache", "--chapter", "8",             \
        "--kmeans-iters", "4", "--seed", "3", "--wait-index", "--memory", "64M", "--threads", \
        "2", "--ratio", "1/8"

/* `cache` NULL: no rows come, so there is nothing to choose. */
static void logits(const char *store,
                   const char *name,
                   const char *answer,
                   const char *cache,
                   const char *summaries)
{
    char out[PROCESS_PATH_BYTES];
    const char *const argv[] = {kvworker,
                                "logits",
                                "--model",
                                model,
                                "--store",
                                store,
                                "--answer",
                                answer,
                                "--summaries",
                                summaries,
                                "--from",
                                "1300",
                                "--out",
                                out,
                                "--prompt-file",
                                prompt,
                                "--attention",
                                "pqcache",
                                "--chapter",
                                "8",
                                "--kmeans-iters",
                                "4",
                                "--wait-index",
                                "--memory",
                                "64M",
                                "--threads",
                                "2",
                                "--ratio",
                                "1/8",
                                cache != NULL ? "--cache" : NULL,
                                cache,
                                NULL};

    process_path(out, name);
    run_kvworker(argv);
}

static void expect_same_file(const char *name, const char *other)
{
    char path[PROCESS_PATH_BYTES], other_path[PROCESS_PATH_BYTES];
    static uint8_t data[1 << 16], other_data[1 << 16];
    FILE *file, *other_file;
    size_t bytes, total = 0;

    process_path(path, name);
    process_path(other_path, other);
    file = fopen(path, "rb");
    other_file = fopen(other_path, "rb");
    assert_non_null(file);
    assert_non_null(other_file);
    do {
        bytes = fread(data, 1, sizeof(data), file);
        assert_int_equal(bytes, fread(other_data, 1, sizeof(other_data), other_file));
        assert_memory_equal(data, other_data, bytes);
        total += bytes;
    } while (bytes > 0);
    assert_true(total > 4096);
    fclose(file);
    fclose(other_file);
}

/* Embedded, one node, two nodes that both serve, again, without a cache: the same bits.  By
 * attention, and with summaries, they are others, and the same everywhere, too. */
static void the_same_logits_everywhere(void **state)
{
    struct kv_client *client;

    (void)state;
    logits("embedded", "embedded.npy", "rows", "lru", "0");
    logits(one, "one.npy", "rows", "lru", "0");
    logits(both, "both.npy", "rows", "lru", "0");
    logits(both, "again.npy", "rows", "lfu", "0");
    logits(both, "off.npy", "rows", "off", "0");
    expect_same_file("embedded.npy", "one.npy");
    expect_same_file("embedded.npy", "both.npy");
    expect_same_file("embedded.npy", "again.npy");
    expect_same_file("embedded.npy", "off.npy");
    client = system_open(both, NULL);
    for (unsigned i = 0; i < N_NODES; i++) {
        assert_true(system_number(client, i, "stats", "rows_scored_by_code") > 0);
        assert_true(system_number(client, i, "stats", "codebooks_trained") > 0);
        assert_true(system_number(client, i, "stats", "rows_out") > 0);
    }
    kv_client_close(client);

    for (unsigned i = 0; i < 2; i++) {
        const char *summaries = i == 0 ? "0" : "16";

        logits("embedded", "embedded.npy", "attend", NULL, summaries);
        logits(one, "one.npy", "attend", NULL, summaries);
        logits(both, "both.npy", "auto", NULL, summaries);
        expect_same_file("embedded.npy", "one.npy");
        expect_same_file("embedded.npy", "both.npy");
    }
}

static void generate(const char *store, const char *salt_file)
{
    const char *const argv[] = {
        kvworker,       "generate", "--model",     model,     "--store", store, "--json",
        "--max-tokens", "40",       "--salt-file", salt_file, EXACT,     NULL};

    run_kvworker(argv);
}

static void the_same_tokens_everywhere(void **state)
{
    static const char *const members[] = {"\"block_cache_hit_rate\"", "\"rows_coded_share\"",
                                          "\"rows_scored_exactly\"",  "\"rows_reranked\"",
                                          "\"index_wait_s\"",         "\"tt2t_s\""};
    static char ids[sizeof(result.output)];
    const char *at;

    (void)state;
    generate("embedded", "");
    at = strstr(result.output, "\"token_ids\"");
    assert_non_null(at);
    memcpy(ids, at, strcspn(at, "]"));
    generate(both, prompt); /* a secret changes where rows are, not what they are */
    at = strstr(result.output, "\"token_ids\"");
    assert_non_null(at);
    assert_int_equal(strncmp(at, ids, strlen(ids)), 0);
    for (unsigned i = 0; i < sizeof(members) / sizeof(members[0]); i++)
        assert_non_null(strstr(result.output, members[i]));
}

/* A number of the last run's JSON. */
static double told(const char *name)
{
    char member[64];
    const char *at;

    snprintf(member, sizeof(member), "\"%s\": ", name);
    at = strstr(result.output, member);
    if (at == NULL)
        fail_msg("%s: not in %s", name, result.output);
    return strtod(at + strlen(member), NULL);
}

static void generate_again(bool is_full, const char *store, bool is_fresh)
{
    const char *const fresh = is_fresh ? "--fresh" : "--json"; /* which is given twice, then */
    const char *const full[] = {
        kvworker, "generate",      "--model", model,          "--store", store,
        "--json", "--raw",         fresh,     "--memory",     "64M",     "--threads",
        "2",      "--prompt-file", prompt,    "--max-tokens", "60",      NULL};
    const char *const pqcache[] = {kvworker,       "generate", "--model", model,
                                   "--store",      store,      "--json",  fresh,
                                   "--max-tokens", "60",       EXACT,     NULL};

    run_kvworker(is_full ? full : pqcache);
}

/* A prompt that was seen before is not computed again, but for the tokens behind its last full
 * block; whoever asks, wherever the list of nodes begins, and with the same answer. */
static void a_prompt_seen_before(void **state)
{
    static char ids[sizeof(result.output)];
    char reversed[sizeof(both)];
    const char *at;

    (void)state;
    snprintf(reversed, sizeof(reversed), "%s,%s", nodes[1].control, nodes[0].control);
    for (unsigned i = 0; i < 2; i++) {
        const char *const stores[] = {one, one, both, reversed, both};

        generate_again(i == 0, "embedded", true);
        at = strstr(result.output, "\"token_ids\"");
        assert_non_null(at);
        snprintf(ids, sizeof(ids), "%.*s", (int)strcspn(at, "]"), at);
        const uint32_t tokens = (uint32_t)told("prompt_tokens");
        const uint32_t full = (tokens - 1) / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;

        assert_true(told("reused_tokens") == 0 && full > 0);
        for (unsigned j = 0; j < sizeof(stores) / sizeof(stores[0]); j++) {
            const bool is_fresh = j + 1 == sizeof(stores) / sizeof(stores[0]);
            /* The first method computes it on each list of nodes; the second finds it there. */
            const bool is_new = i == 0 && (j == 0 || j == 2);

            generate_again(i == 0, stores[j], is_fresh);
            assert_true(told("reused_tokens") == (is_new || is_fresh ? 0 : full));
            if (i == 0) /* full attention fetches nothing else */
                assert_true((told("bytes_fetched") > 0) == (told("reused_tokens") > 0));
            at = strstr(result.output, "\"token_ids\"");
            assert_non_null(at);
            if (strncmp(at, ids, strlen(ids)) != 0)
                fail_msg("over %s: %s\nnot %s", stores[j], at, ids);
        }
    }
}

/* All that the node keeps by name is on its disk. */
static void wait_saved(const char *node)
{
    struct kv_client *client = system_open(node, NULL);
    const uint64_t until_us = process_now_us() + PROCESS_PATIENCE_MS * UINT64_C(1000);

    while (!system_is_saved(client, 0)) {
        assert_true(process_now_us() < until_us);
        kv_client_wait(client, 10000);
    }
    kv_client_close(client);
}

/* kill -9 takes nothing of what was saved: the prompt is not computed again, by either method, and
 * the answer is the same. */
static void nodes_are_killed_and_come_back(void **state)
{
    static char ids[2][sizeof(result.output)];
    const char *at;

    (void)state;
    for (unsigned i = 0; i < 2; i++) {
        generate_again(i == 0, both, false);
        at = strstr(result.output, "\"token_ids\"");
        assert_non_null(at);
        snprintf(ids[i], sizeof(ids[i]), "%.*s", (int)strcspn(at, "]"), at);
    }
    for (unsigned round = 0; round < 2; round++) {
        for (unsigned i = 0; i < N_NODES; i++)
            wait_saved(nodes[i].control);
        for (unsigned i = 0; i < N_NODES; i++)
            process_kill(&nodes[i].process);
        for (unsigned i = 0; i < N_NODES; i++)
            system_node_start(&nodes[i], options);
        for (unsigned i = 0; i < 2; i++) {
            generate_again(i == 0, both, false);
            const uint32_t tokens = (uint32_t)told("prompt_tokens");

            assert_true(told("reused_tokens") ==
                        (tokens - 1) / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS);
            assert_non_null(strstr(result.output, ids[i]));
        }
    }
}

static void expect_bad_salt(const char *salt_file, const char *says)
{
    const char *const argv[] = {kvworker, "generate",    "--model", model, "--store",
                                one,      "--salt-file", salt_file, EXACT, NULL};
    const struct process_spec spec = {.argv = argv};

    assert_true(process_run(&spec, TIMEOUT_MS, &result));
    assert_int_equal(result.status, 2);
    assert_non_null(strstr(result.errors, says));
}

/* Nobody goes on without the secret that they asked for. */
static void a_salt_that_is_not_there(void **state)
{
    (void)state;
    expect_bad_salt("/nonexistent", "salt-file: /nonexistent: No such file");
    expect_bad_salt("/dev/null", "salt-file: /dev/null: empty");
}

/* It says which node, what was asked of it and after how long, and ends. */
static void a_node_dies(void **state)
{
    const char *const argv[] = {kvworker, "generate",     "--model", model, "--store",
                                both,     "--max-tokens", "2500",    EXACT, NULL};
    char errors[PROCESS_PATH_BYTES], text[4096];
    const struct process_spec spec = {.argv = argv, .errors = errors};
    struct process process;
    struct kv_client *client;
    size_t bytes;
    FILE *file;

    (void)state;
    process_path(errors, "dies.errors");
    client = system_open(nodes[1].control, NULL);
    const double before = system_number(client, 0, "stats", "rows_selected");
    assert_true(process_start(&process, &spec));
    /* It is at it. */
    for (double now = before; now < before + 2000;) {
        now = system_number(client, 0, "stats", "rows_selected");
        kv_client_wait(client, 10000);
    }
    kv_client_close(client);
    process_kill(&nodes[1].process);
    assert_int_equal(process_wait(&process, TIMEOUT_MS), 1);
    file = fopen(errors, "rb");
    assert_non_null(file);
    bytes = fread(text, 1, sizeof(text) - 1, file);
    fclose(file);
    text[bytes] = 0;
    if (strstr(text, "kvworker: generate: store: node ") == NULL ||
        strstr(text, nodes[1].control) == NULL || strstr(text, " s: ") == NULL)
        fail_msg("`%s`", text);

    /* One that starts now gets as far as its session, which needs both. */
    const struct process_spec late = {.argv = argv};

    assert_true(process_run(&late, TIMEOUT_MS, &result));
    assert_int_equal(result.status, 1);
    snprintf(text, sizeof(text), "node %s: open: unreachable: after ", nodes[1].control);
    if (strstr(result.errors, text) == NULL ||
        strstr(result.errors, nodes[0].control) != NULL ||
        strstr(result.errors, "; start the node, or take it out of --store\n") == NULL)
        fail_msg("`%s`", result.errors);
}

static int work(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_logits_everywhere),
        cmocka_unit_test(the_same_tokens_everywhere),
        cmocka_unit_test(a_prompt_seen_before),
        cmocka_unit_test(nodes_are_killed_and_come_back),
        cmocka_unit_test(a_salt_that_is_not_there),
        cmocka_unit_test(a_node_dies),
    };

    if (argc != 2)
        return 2;
    kvworker = argv[1];
    return cmocka_run_group_tests_name("system.worker", tests, set_up, tear_down);
}

static int no_children(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    return 2;
}

int main(int argc, char **argv)
{
    return system_main(argc, argv, work, no_children);
}
