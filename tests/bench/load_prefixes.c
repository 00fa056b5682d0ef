/* load_prefixes.c - prompts of 64 blocks put, asked for and read back, one prompt at a time
 * over tcp: what an engine does with a store of KV blocks, beside Mooncake, to which a block is
 * an object.
 *
 *   prefix.put    open, put, publish, close; there: batch_put_from() of the prompt's blocks
 *   prefix.match  kv_match_begin(); there: batch_is_exist()
 *   prefix.read   open, which attaches, read, close; there: batch_get_into()
 *
 * tier: four times the memory, through the disk and a kill:
 *
 *   tier.put      until all that is kept is saved; limit: what the disk writes
 *   tier.kept     share of the prompts' blocks that are on disk then: what comes faster than it is
 *                 written is evicted
 *   tier.start    after kill -9, until the node is ready, per GB that is saved
 *   tier.match    of all prompts, none of which is in memory
 *   tier.read     open, read, close, of all that is kept; limit: what the disk reads
 *
 * Each prompt has bytes of its own, by stamps all over bytes that are the same, and what is read is
 * held against them: outside the times.
 */
#include "tests/bench/bench.h"

#include "kvserver/base/hash.h"
#include "kvserver/base/random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_PROMPTS = 1000,
    PROMPT_BLOCKS = BENCH_PREFIX_BLOCKS,
    N_HEADS = 2,
    DIM = 64,
    BLOCK_BYTES = KV_BLOCK_TOKENS * N_HEADS * 2 * DIM * 2, /* 64 KiB */
    PROMPT_BYTES = PROMPT_BLOCKS * BLOCK_BYTES,
    STAMP_STEP = 4096, /* bytes: eight in a block of a head */
    N_STAMPS = PROMPT_BYTES / STAMP_STEP,
};

struct prompts {
    struct kv_client *client;
    struct kv_buffer *from, *to;
    struct kv_model_info model;
    uint64_t number;                      /* of the prompt at work: no other has it */
    struct kv_id128 names[PROMPT_BLOCKS]; /* its */
    size_t n;
    const char *transport;
    unsigned round; /* of puts: each gives new names; 0: none yet */
};

static void choose_prompt(struct prompts *prompts, size_t prompt)
{
    struct kv_random random;

    prompts->number = prompts->round * (uint64_t)N_PROMPTS + prompt;
    kv_random_init(&random, prompts->number);
    kv_random_fill(&random, prompts->names, sizeof(prompts->names));
}

static uint64_t stamp_of(const struct prompts *prompts, size_t i)
{
    return kv_mix64(prompts->number * N_STAMPS + i);
}

/* Where a stamp is: one after the other at another place of its bytes. */
static uint8_t *stamp_at(struct kv_buffer *buffer, size_t i)
{
    uint8_t *bytes = kv_buffer_data(buffer);

    return bytes + i * STAMP_STEP + i * sizeof(uint64_t) % STAMP_STEP;
}

/* Makes the bytes that are put those of the prompt at work. */
static void stamp(struct prompts *prompts)
{
    for (size_t i = 0; i < N_STAMPS; i++) {
        const uint64_t stamp = stamp_of(prompts, i);

        memcpy(stamp_at(prompts->from, i), &stamp, sizeof(stamp));
    }
}

/* Returns whether what was read is of the prompt at work. */
static bool has_stamps(struct prompts *prompts)
{
    for (size_t i = 0; i < N_STAMPS; i++) {
        const uint64_t stamp = stamp_of(prompts, i);

        if (memcmp(stamp_at(prompts->to, i), &stamp, sizeof(stamp)) != 0) {
            bench_complain("prefixes: bytes of another prompt came back, at %zu",
                           i * STAMP_STEP);
            return false;
        }
    }
    return true;
}

/* Opens a session with the prompt at work.  NULL: failed, and said so. */
static struct kv_session *open_prompt(struct prompts *prompts, bool is_fresh)
{
    const struct kv_session_options options = {.block_names = prompts->names,
                                               .n_block_names = PROMPT_BLOCKS,
                                               .tokens_max = PROMPT_BLOCKS * KV_BLOCK_TOKENS,
                                               .is_fresh = is_fresh};
    struct kv_session *session = NULL;
    struct kv_op *op;
    const kv_status_t status =
        kv_open_begin(prompts->client, &prompts->model, &options, 0, &op);

    if (status == KV_OK && kv_wait(op) == KV_OK)
        session = kv_op_session(op);
    if (session != NULL && !is_fresh && kv_op_tokens(op) != PROMPT_BLOCKS * KV_BLOCK_TOKENS) {
        bench_complain("prefixes: open: %u tokens attached", kv_op_tokens(op));
        session = NULL;
    }
    return bench_finish_op(prompts->client, "open", status, op) ? session : NULL;
}

static bool close_prompt(struct prompts *prompts, struct kv_session *session)
{
    struct kv_op *op;
    kv_status_t status = kv_close_begin(session, 0, &op);
    const bool is_good = bench_finish_op(prompts->client, "close", status, op);

    kv_session_free(session);
    return is_good;
}

static bool put_prompt(struct prompts *prompts)
{
    const struct kv_rows box = {.n_layers = 1, .n_tokens = PROMPT_BLOCKS * KV_BLOCK_TOKENS};
    const struct kv_rows_io io = {.buffer = prompts->from};
    const struct kv_publish publish = {.names = prompts->names, .n_names = PROMPT_BLOCKS};
    struct kv_session *session = open_prompt(prompts, true);
    struct kv_op *op;
    kv_status_t status;

    if (session == NULL)
        return false;
    status = kv_put_begin(session, &box, &io, 0, &op);
    if (!bench_finish_op(prompts->client, "put", status, op))
        return false;
    status = kv_publish_begin(session, &publish, 0, &op);
    return bench_finish_op(prompts->client, "publish", status, op) &&
           close_prompt(prompts, session);
}

static bool match_prompt(struct prompts *prompts)
{
    struct kv_op *op;
    kv_status_t status = kv_match_begin(prompts->client, prompts->names, PROMPT_BLOCKS, 0, &op);

    if (status == KV_OK && kv_wait(op) == KV_OK &&
        kv_op_tokens(op) != PROMPT_BLOCKS * KV_BLOCK_TOKENS) {
        bench_complain("prefixes: match: %u tokens", kv_op_tokens(op));
        return false;
    }
    return bench_finish_op(prompts->client, "match", status, op);
}

static bool read_prompt(struct prompts *prompts)
{
    const struct kv_rows box = {.n_layers = 1, .n_tokens = PROMPT_BLOCKS * KV_BLOCK_TOKENS};
    const struct kv_rows_io io = {.buffer = prompts->to};
    struct kv_session *session = open_prompt(prompts, false);
    struct kv_op *op;
    kv_status_t status;

    if (session == NULL)
        return false;
    status = kv_read_begin(session, &box, &io, 0, &op);
    return bench_finish_op(prompts->client, "read", status, op) &&
           close_prompt(prompts, session);
}

static bool evict_prompt(struct prompts *prompts)
{
    struct kv_session *session = open_prompt(prompts, false);
    struct kv_ticket ticket;
    struct kv_op *op;

    if (session == NULL)
        return false;
    kv_session_ticket(session, &ticket);
    const struct kv_prefix prefix = {
        .verb = KV_PREFIX_EVICT, .name = &prompts->names[0], .session_id = &ticket.session_id};
    const kv_status_t status = kv_prefix_begin(prompts->client, KV_NODES_ALL, &prefix, 0, &op);

    return bench_finish_op(prompts->client, "evict", status, op) &&
           close_prompt(prompts, session);
}

static bool with_all(struct prompts *prompts,
                     bool (*what)(struct prompts *prompts),
                     struct bench_watch *watch)
{
    for (size_t i = 0; i < prompts->n; i++) {
        choose_prompt(prompts, i);
        if (what == put_prompt)
            stamp(prompts);
        const double begin = bench_now();
        if (!what(prompts))
            return false;
        if (watch != NULL)
            bench_watch_add(watch, bench_now() - begin);
        if (what == read_prompt && !has_stamps(prompts))
            return false;
    }
    return true;
}

/* Puts under new names; what was put in the round before goes. */
static bool measure_put(void *arg, struct bench_sample *ret_sample)
{
    struct prompts *prompts = arg;
    struct bench_watch watch;
    bool is_good;

    if (prompts->round > 0 && !with_all(prompts, evict_prompt, NULL))
        return false;
    prompts->round++;
    if (!bench_watch_start(&watch, prompts->n))
        return false;
    is_good = with_all(prompts, put_prompt, &watch);
    bench_watch_rate(&watch, PROMPT_BYTES, ret_sample);
    return is_good;
}

static bool measure_match(void *arg, struct bench_sample *ret_sample)
{
    struct prompts *prompts = arg;
    struct bench_watch watch;
    bool is_good;

    if (!bench_watch_start(&watch, prompts->n))
        return false;
    is_good = with_all(prompts, match_prompt, &watch);
    bench_watch_times(&watch, ret_sample);
    return is_good;
}

static bool measure_read(void *arg, struct bench_sample *ret_sample)
{
    struct prompts *prompts = arg;
    struct bench_watch watch;
    bool is_good;

    memset(kv_buffer_data(prompts->to), 0, PROMPT_BYTES);
    if (!bench_watch_start(&watch, prompts->n))
        return false;
    is_good = with_all(prompts, read_prompt, &watch);
    bench_watch_rate(&watch, PROMPT_BYTES, ret_sample);
    /* What was put last, all of it. */
    if (is_good &&
        memcmp(kv_buffer_data(prompts->from), kv_buffer_data(prompts->to), PROMPT_BYTES) != 0) {
        bench_complain("prefixes: other bytes came back than were stored");
        return false;
    }
    return is_good;
}

static bool compare(struct bench *bench,
                    struct prompts *prompts,
                    struct bench_mooncake *mooncake,
                    const char *name,
                    const char *verb,
                    bool (*measure)(void *arg, struct bench_sample *ret_sample))
{
    const bool times = measure == measure_match;
    struct bench_mooncake_load load = {.mooncake = mooncake,
                                       .verb = verb,
                                       .bytes = PROMPT_BYTES,
                                       .n = prompts->n,
                                       .times = times};
    struct bench_comparison comparison = {
        .name = name,
        .unit = times ? "us" : "GB/s",
        .params = {.transport = "tcp",
                   .window = 1,
                   .bytes = PROMPT_BYTES,
                   .n = (unsigned)prompts->n},
        .n_sides = 1,
        .sides = {{NULL, measure, prompts}},
    };

    if (mooncake != NULL)
        comparison.sides[comparison.n_sides++] =
            (struct bench_side){bench_mooncake_name(mooncake), bench_mooncake_measure, &load};
    return bench_compare(bench, &comparison);
}

static bool run_prefixes(struct bench *bench, const struct bench_load *load)
{
    const size_t n = bench_count(bench, N_PROMPTS);
    struct prompts *prompts = calloc(1, sizeof(*prompts));
    struct bench_mooncake *mooncake = NULL;
    struct bench_node node;
    bool is_good;

    if (prompts == NULL)
        return false;
    prompts->n = n;
    snprintf(prompts->model.name, sizeof(prompts->model.name), "bench-prefixes");
    memcpy(prompts->model.fingerprint.bytes, "prefixes", 8);
    kv_schema_uniform(&prompts->model.schema, 1, N_HEADS, DIM, DIM, KV_FP16);
    if ((bench->transport != NULL && strcmp(bench->transport, "tcp") != 0) ||
        !bench_node_start(bench, 1, n * PROMPT_BYTES / 2 * 3 + (512u << 20), true, &node)) {
        free(prompts);
        return bench->transport != NULL && strcmp(bench->transport, "tcp") != 0;
    }
    prompts->client = bench_client_open(&node, "tcp");
    is_good = prompts->client != NULL &&
              kv_buffer_alloc(prompts->client, PROMPT_BYTES, &prompts->from) == KV_OK &&
              kv_buffer_alloc(prompts->client, PROMPT_BYTES, &prompts->to) == KV_OK &&
              (bench->mooncake == NULL ||
               bench_mooncake_open(bench, n * PROMPT_BYTES / 4 * 5 + (256u << 20), &mooncake));
    if (is_good)
        bench_fill(kv_buffer_data(prompts->from), PROMPT_BYTES, 6);
    is_good =
        is_good && compare(bench, prompts, mooncake, load->name, "prefix_put", measure_put) &&
        compare(bench, prompts, mooncake, "prefix.match", "prefix_match", measure_match) &&
        compare(bench, prompts, mooncake, "prefix.read", "prefix_get", measure_read);
    bench_mooncake_close(mooncake);
    kv_client_close(prompts->client);
    free(prompts);
    return bench_node_stop(&node) && is_good;
}

/* ---- through the disk --------------------------------------------------------------------- */

enum {
    TIER_TIMES = 4, /* the memory */
    TIER_WAIT_S = 120,
};

static double tier_number(struct prompts *prompts, const char *column)
{
    return bench_table_number(prompts->client, "tiers", "disk", column);
}

static bool wait_saved(struct prompts *prompts)
{
    const double until = bench_now() + TIER_WAIT_S;
    double waiting;

    while ((waiting = tier_number(prompts, "waiting")) > 0) {
        if (bench_now() > until) {
            bench_complain("tier: %.0f blocks wait to be saved after %d s", waiting,
                           TIER_WAIT_S);
            return false;
        }
        kv_client_wait(prompts->client, 10000);
    }
    return waiting == 0;
}

static void tell(struct bench *bench,
                 const struct prompts *prompts,
                 const char *name,
                 const char *unit,
                 double value,
                 double limit)
{
    bench_report(bench, &(struct bench_figure){.name = name,
                                               .unit = unit,
                                               .params = {.transport = prompts->transport,
                                                          .window = 1,
                                                          .bytes = PROMPT_BYTES,
                                                          .n = (unsigned)prompts->n},
                                               .value = value,
                                               .limit = limit,
                                               .limit_name = limit > 0 ? "raw disk" : NULL,
                                               .ratio = limit > 0 ? value / limit : 0});
}

static bool connect_prompts(struct prompts *prompts, const struct bench_node *node)
{
    prompts->client = bench_client_open(node, prompts->transport);
    if (prompts->client == NULL ||
        kv_buffer_alloc(prompts->client, PROMPT_BYTES, &prompts->from) != KV_OK ||
        kv_buffer_alloc(prompts->client, PROMPT_BYTES, &prompts->to) != KV_OK)
        return false;
    bench_fill(kv_buffer_data(prompts->from), PROMPT_BYTES, 6);
    return true;
}

/* Reads all prompts that are kept as a whole. */
static bool read_kept(struct prompts *prompts, double *ret_rate, size_t *ret_n)
{
    double seconds = 0;

    *ret_n = 0;
    for (size_t i = 0; i < prompts->n; i++) {
        struct kv_op *op;
        bool is_whole;

        choose_prompt(prompts, i);
        const kv_status_t status =
            kv_match_begin(prompts->client, prompts->names, PROMPT_BLOCKS, 0, &op);
        is_whole = status == KV_OK && kv_wait(op) == KV_OK &&
                   kv_op_tokens(op) == PROMPT_BLOCKS * KV_BLOCK_TOKENS;
        if (!bench_finish_op(prompts->client, "match", status, op))
            return false;
        if (!is_whole)
            continue;
        const double begin = bench_now();
        if (!read_prompt(prompts))
            return false;
        seconds += bench_now() - begin;
        ++*ret_n;
        if (!has_stamps(prompts))
            return false;
    }
    *ret_rate = (double)*ret_n * PROMPT_BYTES / seconds / 1e9;
    return true;
}

static bool run_saving(struct bench *bench, struct prompts *prompts, struct bench_node *node)
{
    const uint64_t bytes = prompts->n * (uint64_t)PROMPT_BYTES, memory = bytes / TIER_TIMES;
    double writes, reads, begin, put_s, start_s, rate;
    struct bench_watch watch;
    struct bench_sample sample;
    size_t n;

    if (!bench_raw_disk(bench, bytes < 1u << 30 ? bytes : 1u << 30, false, &writes) ||
        !bench_raw_disk(bench, bytes < 1u << 30 ? bytes : 1u << 30, true, &reads) ||
        !bench_node_start_saving(bench, 1, memory, 2 * bytes, node) ||
        !connect_prompts(prompts, node))
        return false;
    begin = bench_now();
    if (!with_all(prompts, put_prompt, NULL) || !wait_saved(prompts))
        return false;
    put_s = bench_now() - begin;
    const double saved = tier_number(prompts, "blocks"),
                 saved_bytes = tier_number(prompts, "bytes");
    tell(bench, prompts, "tier.put", "GB/s", saved_bytes / put_s / 1e9, writes);
    tell(bench, prompts, "tier.kept", "%", 100 * saved / ((double)prompts->n * PROMPT_BLOCKS),
         0);
    kv_client_close(prompts->client);
    prompts->client = NULL;
    bench_node_kill(node);

    begin = bench_now();
    if (!bench_node_start_saving(bench, 1, memory, 2 * bytes, node))
        return false;
    start_s = bench_now() - begin;
    tell(bench, prompts, "tier.start", "s/GB", start_s / (saved_bytes / 1e9), 0);
    if (!connect_prompts(prompts, node) || !match_prompt(prompts) ||
        !bench_watch_start(&watch, prompts->n))
        return false;
    for (size_t i = 0; i < prompts->n; i++) {
        struct kv_op *op;

        choose_prompt(prompts, i);
        begin = bench_now();
        const kv_status_t status =
            kv_match_begin(prompts->client, prompts->names, PROMPT_BLOCKS, 0, &op);
        if (status == KV_OK)
            (void)kv_wait(op);
        bench_watch_add(&watch, bench_now() - begin);
        if (!bench_finish_op(prompts->client, "match", status, op))
            return false;
    }
    bench_watch_times(&watch, &sample);
    tell(bench, prompts, "tier.match", "us", sample.value, 0);
    if (!read_kept(prompts, &rate, &n))
        return false;
    tell(bench, prompts, "tier.read", "GB/s", rate, reads);
    return tier_number(prompts, "bad") == 0;
}

static bool run_tier(struct bench *bench, const struct bench_load *load)
{
    struct prompts *prompts = calloc(1, sizeof(*prompts));
    struct bench_node node = {0};
    bool is_good;

    (void)load;
    if (prompts == NULL)
        return false;
    prompts->n = bench->smoke ? 32 : N_PROMPTS;
    snprintf(prompts->model.name, sizeof(prompts->model.name), "bench-prefixes");
    memcpy(prompts->model.fingerprint.bytes, "prefixes", 8);
    kv_schema_uniform(&prompts->model.schema, 1, N_HEADS, DIM, DIM, KV_FP16);
    prompts->round = 1;
    prompts->transport = bench_transport(bench, 0);
    is_good = run_saving(bench, prompts, &node);
    kv_client_close(prompts->client);
    if (node.pid > 0)
        is_good = bench_node_stop(&node) && is_good;
    bench_remove(node.folder);
    free(prompts);
    return is_good;
}

const struct bench_load bench_prefix_loads[] = {
    {"prefix.put", "prompts of 64 blocks put, asked for and read back", run_prefixes, 0},
    {"tier", "the same, 4 x the memory, through disk and kill -9", run_tier, 0},
    {NULL, NULL, NULL, 0},
};
