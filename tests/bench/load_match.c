/* load_match.c - how long it takes to find a prompt among what a node keeps.
 *
 *   match.index   what an open does for its match, in an index of 10 million blocks: the longest prefix
 *                 of a prompt of 1,024 blocks is looked for, used, held, and its writers are listed.
 *                 The index alone: no rows
 *   match.bytes   what the index takes for a block, of this process's memory
 *   match.route   a router's question, kv_match_begin(), to a kvserver that has such prompts, by gRPC;
 *                 and what share of a core the node takes for 1,000 of them a second
 */
#include "tests/bench/bench.h"

#include "kvserver/base/random.h"
#include "kvserver/store/prefix/prefix.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    PROMPT_BLOCKS = 1024, /* 128K tokens */
    N_BLOCKS = 10000000,
    N_FINDS = 20000,
    N_QUESTIONS = 4000,
    ROUTED_PROMPTS = 4,
    PUT_TOKENS = 8192,
    AIM_US = 1000,
    AIM_SHARE = 20, /* per cent of a core */
};

/* ---- names ------------------------------------------------------------------------------- */

/* The names of a prompt follow from its number. */
static void make_names(uint32_t prompt, struct kv_id128 names[PROMPT_BLOCKS])
{
    struct kv_random random;

    kv_random_init(&random, prompt + 1);
    kv_random_fill(&random, names, PROMPT_BLOCKS * sizeof(names[0]));
}

static struct kvs_prefix_place place_of(const struct kv_id128 *names)
{
    struct kvs_prefix_place place = {.n_nodes = 1};

    memcpy(&place.root, &names[0], sizeof(place.root));
    return place;
}

/* ---- the index --------------------------------------------------------------------------- */

static bool add_prompt(struct kvs_prefixes *prefixes, uint32_t prompt)
{
    struct kv_id128 names[PROMPT_BLOCKS];
    struct kvs_prefix *parent = NULL;

    make_names(prompt, names);
    const struct kvs_prefix_home home = {.place = place_of(names), .block_bytes = 1 << 20};

    for (uint32_t i = 0; i < PROMPT_BLOCKS; i++) {
        struct kvs_prefix *prefix = kvs_prefix_create(&names[i], i, 0, 1);

        if (prefix == NULL)
            return false;
        prefix->writer = prompt + 1;
        if (!kvs_prefixes_add(prefixes, parent, &home, prefix, prompt))
            return false;
        kvs_prefix_release(prefixes, prefix);
        parent = prefix;
    }
    return true;
}

/* What an open does (store/control/ops_prefix.c); the prompt has `depth` blocks that are there.
 * Returns whether that many were found. */
static bool match(struct kvs_prefixes *prefixes,
                  const struct kv_id128 *names,
                  uint32_t depth,
                  uint64_t now_us)
{
    const struct kvs_prefix_place place = place_of(names);
    struct kvs_prefix *prefix = kvs_prefixes_find(prefixes, &place, NULL, names, PROMPT_BLOCKS);
    struct kv_writers *writers;

    if (prefix == NULL || prefix->depth + 1 != depth)
        return false;
    writers = kvs_prefix_writers(prefix, 7);
    kvs_prefix_hold(prefixes, prefix);
    kvs_prefix_use(prefixes, prefix, now_us);
    kvs_prefix_release(prefixes, prefix);
    free(writers);
    return writers != NULL;
}

static uint64_t resident_bytes(void)
{
    unsigned long long pages = 0, all;
    FILE *file = fopen("/proc/self/statm", "r");

    if (file == NULL || fscanf(file, "%llu %llu", &all, &pages) != 2)
        pages = 0;
    if (file != NULL)
        fclose(file);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

static bool time_matches(struct bench *bench,
                         struct kvs_prefixes *prefixes,
                         uint32_t n_prompts,
                         struct bench_sample *ret_sample)
{
    const size_t n = bench_count(bench, N_FINDS);
    struct kv_id128 names[PROMPT_BLOCKS];
    struct bench_watch watch;
    struct kv_random random;

    if (!bench_watch_start(&watch, n))
        return false;
    kv_random_init(&random, 99);
    for (size_t i = 0; i < n; i++) {
        const uint32_t depth = 1 + (uint32_t)kv_random_below(&random, PROMPT_BLOCKS);

        make_names((uint32_t)kv_random_below(&random, n_prompts), names);
        if (depth < PROMPT_BLOCKS)
            kv_random_fill(&random, &names[depth], (PROMPT_BLOCKS - depth) * sizeof(names[0]));
        const double begin = bench_now();
        if (!match(prefixes, names, depth, i)) {
            bench_complain("match.index: not %u blocks found", depth);
            return false;
        }
        bench_watch_add(&watch, bench_now() - begin);
    }
    bench_watch_times(&watch, ret_sample);
    return true;
}

static bool run_index(struct bench *bench, const struct bench_load *load)
{
    const uint32_t n_blocks = bench->smoke ? 1 << 16 : bench->quick ? N_BLOCKS / 10 : N_BLOCKS;
    const uint32_t n_prompts = (n_blocks + PROMPT_BLOCKS - 1) / PROMPT_BLOCKS;
    const uint64_t before = resident_bytes();
    struct kvs_prefixes *prefixes = kvs_prefixes_create(5, kvs_eviction_at(0), NULL);
    struct bench_sample sample = {0};
    bool is_good = prefixes != NULL;

    for (uint32_t i = 0; is_good && i < n_prompts; i++)
        is_good = add_prompt(prefixes, i);
    if (!is_good)
        bench_complain("match.index: out of memory: %u blocks", n_blocks);
    const double bytes =
        (double)(resident_bytes() - before) / (n_prompts * (double)PROMPT_BLOCKS);
    if (is_good && time_matches(bench, prefixes, n_prompts, &sample)) {
        bench_report(bench, &(struct bench_figure){
                                .name = load->name,
                                .unit = "us",
                                .params = {.n = n_prompts * PROMPT_BLOCKS,
                                           .mark = sample.p99 > AIM_US ? "ABOVE 1000" : NULL},
                                .value = sample.value,
                                .p99 = sample.p99,
                                .limit_name = "aim: 1 ms",
                                .limit = AIM_US,
                                .ratio = AIM_US / sample.value,
                            });
        bench_report(
            bench,
            &(struct bench_figure){
                .name = "match.bytes",
                .unit = "B",
                .params = {.n = n_prompts * PROMPT_BLOCKS, .per = "block", .source = "rss"},
                .value = bytes,
            });
    } else {
        is_good = false;
    }
    kvs_prefixes_destroy(prefixes);
    return is_good;
}

/* ---- a router's question ----------------------------------------------------------------- */

struct routing {
    struct bench_node node;
    struct kv_client *client;
    struct kv_buffer *rows;
    struct kv_model_info model;
    struct kv_id128 names[ROUTED_PROMPTS][PROMPT_BLOCKS];
};

static bool store_prompt(struct routing *routing, uint32_t prompt, uint32_t n_blocks)
{
    struct kv_id128 *names = routing->names[prompt];
    const struct kv_session_options options = {.block_names = names, .n_block_names = n_blocks};
    const struct kv_publish publish = {.names = names, .n_names = n_blocks};
    struct kv_rows box = {.n_layers = 1};
    const struct kv_rows_io io = {.buffer = routing->rows};
    struct kv_session *session = NULL;
    struct kv_op *op;
    kv_status_t status;

    make_names(prompt, names);
    status = kv_open_begin(routing->client, &routing->model, &options, 0, &op);
    if (status == KV_OK && kv_wait(op) == KV_OK)
        session = kv_op_session(op);
    if (!bench_finish_op(routing->client, "open", status, op))
        return false;
    for (; box.token_begin < n_blocks * KV_BLOCK_TOKENS; box.token_begin += box.n_tokens) {
        const uint32_t left = n_blocks * KV_BLOCK_TOKENS - box.token_begin;

        box.n_tokens = left < PUT_TOKENS ? left : PUT_TOKENS;
        status = kv_put_begin(session, &box, &io, 0, &op);
        if (!bench_finish_op(routing->client, "put", status, op))
            return false;
    }
    status = kv_publish_begin(session, &publish, 0, &op);
    return bench_finish_op(routing->client, "publish", status, op);
}

static double cpu_seconds(pid_t pid)
{
    unsigned long long user = 0, system = 0;
    char path[64];
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    file = fopen(path, "r");
    if (file == NULL ||
        fscanf(file, "%*d (%*[^)]) %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu",
               &user, &system) != 2)
        user = system = 0;
    if (file != NULL)
        fclose(file);
    return (double)(user + system) / (double)sysconf(_SC_CLK_TCK);
}

static bool
ask(struct bench *bench, struct routing *routing, uint32_t n_blocks, const char *name)
{
    const size_t n = bench_count(bench, N_QUESTIONS);
    const double before = cpu_seconds(routing->node.pid);
    struct bench_sample sample = {0};
    struct bench_watch watch;
    struct kv_op *op;

    if (!bench_watch_start(&watch, n))
        return false;
    for (size_t i = 0; i < n; i++) {
        const double begin = bench_now();
        kv_status_t status = kv_match_begin(routing->client, routing->names[i % ROUTED_PROMPTS],
                                            n_blocks, 0, &op);

        if (status == KV_OK && kv_wait(op) == KV_OK &&
            kv_op_tokens(op) != n_blocks * KV_BLOCK_TOKENS) {
            bench_complain("%s: %u tokens found", name, kv_op_tokens(op));
            return false;
        }
        if (!bench_finish_op(routing->client, "match", status, op))
            return false;
        bench_watch_add(&watch, bench_now() - begin);
    }
    const double node_us = (cpu_seconds(routing->node.pid) - before) / (double)n * 1e6;

    bench_watch_times(&watch, &sample);
    bench_report(bench, &(struct bench_figure){
                            .name = name,
                            .unit = "us",
                            .params = {.n = n_blocks, .node_us = node_us},
                            .value = sample.value,
                            .p99 = sample.p99,
                        });
    bench_report(bench, &(struct bench_figure){
                            .name = "match.share",
                            .unit = "%",
                            .params = {.n = n_blocks, .per = "1,000 a second"},
                            .value = node_us / 10,
                            .limit_name = "aim: a fifth of a core",
                            .limit = AIM_SHARE,
                            .ratio = node_us > 0 ? AIM_SHARE / (node_us / 10) : 0,
                        });
    return true;
}

static bool run_route(struct bench *bench, const struct bench_load *load)
{
    const uint32_t n_blocks = bench->smoke ? 64 : PROMPT_BLOCKS;
    struct routing *routing = calloc(1, sizeof(*routing));
    bool is_good = false, has_node = false;

    if (routing == NULL)
        return false;
    snprintf(routing->model.name, sizeof(routing->model.name), "bench-match");
    memcpy(routing->model.fingerprint.bytes, "match", 5);
    kv_schema_uniform(&routing->model.schema, 1, 1, 1, 0, KV_BF16);
    has_node = bench_node_start(bench, 1, UINT64_C(1) << 30, true, &routing->node);
    if (has_node)
        routing->client = bench_client_open(&routing->node, bench_transport(bench, 0));
    if (routing->client != NULL &&
        kv_buffer_alloc(routing->client, PUT_TOKENS * 2, &routing->rows) == KV_OK) {
        memset(kv_buffer_data(routing->rows), 0x3f, PUT_TOKENS * 2);
        is_good = true;
    }
    for (uint32_t i = 0; is_good && i < ROUTED_PROMPTS; i++)
        is_good = store_prompt(routing, i, n_blocks);
    is_good = is_good && ask(bench, routing, n_blocks, load->name);
    kv_client_close(routing->client);
    if (has_node && !bench_node_stop(&routing->node))
        bench_complain("%s: the node did not stop", load->name);
    free(routing);
    return is_good;
}

const struct bench_load bench_match_loads[] = {
    {"match.index", "an open's match of 1,024 blocks among 10 million", run_index, 0},
    {"match.route", "a router's question for a prompt of 1,024 blocks", run_route, 0},
    {NULL, NULL, NULL, 0},
};
