/* load_spilled.c - a query over a session of which a part is on disk only.
 *
 *   tier.query    one layer of a session at rest, whose last 0, 50 or 100 % of the rows have left
 *                 memory, until its answer is there.  The limit is the same with all of them in memory,
 *                 and what the disk takes for that part of the layer's rows; those of the other layers
 *                 come behind.  The answers are the same, to the bit
 *   tier.query.read what the node has read from disk by then, against the rows of a layer
 *
 * Memory is made short with objects that nobody needs, until so much of the session has left it, and
 * is free again before the query: what is measured is the way back, not the room for it.
 */
#include "tests/bench/bench.h"

#include "kvserver/base/hash.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_LAYERS = 4,
    N_HEADS = 8,
    N_QUERIES = 4,
    DIM = 128,
    ROW_BYTES = 4 * DIM,
    N_TOKENS = 8192, /* 64 blocks of 2 MiB */
    SMOKE_TOKENS = 2048,
    PUT_TOKENS = 1024,
    K_MAX = 1024,
    ROUNDS = 15,
    FILLER_BYTES = 1 << 20,
    FILLER_MS = 1900, /* what lives no longer is not saved */
    REST_MS = 300,
    WAIT_S = 60,
};

static const struct spilled_case {
    uint32_t k, rerank;
} cases[] = {{64, 1}, {64, 4}, {K_MAX, 1}, {K_MAX, 4}};

static const unsigned shares[] = {0, 50, 100};

struct spilled {
    struct bench *bench;
    const char *transport;
    struct bench_node node;
    struct kv_client *client;
    struct kv_session *session;
    struct kv_buffer *from, *to, *filler;
    struct kv_model_info model;
    struct kv_id128 *names; /* (n_tokens / KV_BLOCK_TOKENS) */
    float *vectors;         /* (N_HEADS, N_QUERIES, DIM) */
    uint32_t n_tokens;
    unsigned n_fillers;
    double reads;      /* GB/s of the disk */
    double read_bytes; /* by the node, for a query, in the last measure() */
    uint64_t hash;     /* of the answer with all rows in memory */
};

/* ---- the session -------------------------------------------------------------------------- */

static bool open_session(struct spilled *spilled)
{
    const struct kv_session_options options = {.block_names = spilled->names,
                                               .n_block_names =
                                                   spilled->n_tokens / KV_BLOCK_TOKENS,
                                               .is_fresh = true};
    struct kv_op *op;
    const kv_status_t status =
        kv_open_begin(spilled->client, &spilled->model, &options, 0, &op);

    if (status == KV_OK && kv_wait(op) == KV_OK)
        spilled->session = kv_op_session(op);
    return bench_finish_op(spilled->client, "open", status, op);
}

/* bf16 numbers in (-1, 1). */
static void fill_rows(struct kv_buffer *buffer, uint64_t seed)
{
    uint16_t *at = kv_buffer_data(buffer);

    bench_fill(at, kv_buffer_bytes(buffer), seed);
    for (size_t i = 0; i < kv_buffer_bytes(buffer) / sizeof(*at); i++) {
        const float value = (float)at[i] / 32768 - 1;
        uint32_t bits;

        memcpy(&bits, &value, sizeof(bits));
        at[i] = (uint16_t)(bits >> 16);
    }
}

static bool put_rows(struct spilled *spilled)
{
    struct kv_rows box = {.n_layers = 1, .n_tokens = PUT_TOKENS};
    const struct kv_rows_io io = {.buffer = spilled->from};

    for (; box.token_begin < spilled->n_tokens; box.token_begin += PUT_TOKENS)
        for (box.layer_begin = 0; box.layer_begin < N_LAYERS; box.layer_begin++) {
            struct kv_op *op;
            kv_status_t status;

            fill_rows(spilled->from, box.token_begin + box.layer_begin);
            status = kv_put_begin(spilled->session, &box, &io, 0, &op);
            if (!bench_finish_op(spilled->client, "put", status, op))
                return false;
        }
    return true;
}

static bool make_index(struct spilled *spilled)
{
    const struct kv_index_options index = {.tokens = spilled->n_tokens,
                                           .chapter_blocks = 16,
                                           .m = 2,
                                           .bits = 6,
                                           .iterations = 3,
                                           .wait = true};
    struct kv_op *op;
    const kv_status_t status = kv_index_begin(spilled->session, &index, 120000, &op);

    return bench_finish_op(spilled->client, "index", status, op);
}

static bool publish(struct spilled *spilled)
{
    const struct kv_publish blocks = {.names = spilled->names,
                                      .n_names = spilled->n_tokens / KV_BLOCK_TOKENS};
    struct kv_op *op;
    const kv_status_t status = kv_publish_begin(spilled->session, &blocks, 0, &op);

    return bench_finish_op(spilled->client, "publish", status, op);
}

/* ---- where it is -------------------------------------------------------------------------- */

static bool wait_saved(struct spilled *spilled)
{
    const double until = bench_now() + WAIT_S;
    double waiting;

    while ((waiting = bench_table_number(spilled->client, "tiers", "disk", "waiting")) > 0 &&
           bench_now() < until)
        kv_client_wait(spilled->client, 10000);
    if (waiting > 0)
        bench_complain("tier.query: %.0f blocks wait to be saved after %d s", waiting, WAIT_S);
    return waiting == 0;
}

static void rest(struct spilled *spilled)
{
    for (double until = bench_now() + REST_MS / 1e3; bench_now() < until;)
        kv_client_wait(spilled->client, 10000);
}

static kv_status_t with_filler(struct spilled *spilled, enum kv_object_verb verb, unsigned i)
{
    char name[32];
    struct kv_object object = {
        .name = name, .buffer = spilled->filler, .bytes = FILLER_BYTES, .ttl_ms = FILLER_MS};
    struct kv_op *op;
    kv_status_t status;

    snprintf(name, sizeof(name), "filler %u", i);
    status = kv_objects_begin(spilled->client, verb, &object, 1, 0, &op);
    if (status != KV_OK)
        return status;
    status = kv_wait(op);
    kv_op_free(op);
    return status;
}

/* Has that share of the session leave memory, which is free afterwards. */
static bool spill(struct spilled *spilled, unsigned share)
{
    const double wanted = (double)spilled->n_tokens * share / 100;
    const double until = bench_now() + WAIT_S;
    unsigned n = 0;
    double away;

    rest(spilled);
    while ((away = bench_table_number(spilled->client, "sessions", NULL, "away_tokens")) >= 0 &&
           away < wanted && bench_now() < until) {
        /* Old ones go by themselves. */
        if (with_filler(spilled, KV_OBJECT_PUT, spilled->n_fillers + n) == KV_OK)
            n++;
    }
    for (unsigned i = 0; i < n; i++)
        (void)with_filler(spilled, KV_OBJECT_DELETE, spilled->n_fillers + i);
    spilled->n_fillers += n;
    if (away >= wanted)
        return true;
    bench_complain("tier.query: %.0f of %.0f tokens left memory in %d s", away, wanted, WAIT_S);
    return false;
}

/* ---- the query ---------------------------------------------------------------------------- */

/* Microseconds; negative: failed, and said so. */
static double ask(struct spilled *spilled, const struct spilled_case *one, uint64_t *ret_hash)
{
    const struct kv_range range = {4, spilled->n_tokens - 64};
    const struct kv_query query = {.layer = 1,
                                   .n_queries = N_QUERIES,
                                   .queries = spilled->vectors,
                                   .scale = 1 / sqrtf(DIM),
                                   .merge = KV_MERGE_SUM,
                                   .answer = KV_ANSWER_ROWS,
                                   .k = one->k,
                                   .rerank = one->rerank,
                                   .n_ranges = 1,
                                   .ranges = &range};
    const struct kv_rows_io io = {.buffer = spilled->to};
    const double begin = bench_now();
    struct kv_op *op;
    const kv_status_t status = kv_query_begin(spilled->session, &query, &io, 60000, &op);
    double us;

    if (status == KV_OK)
        (void)kv_wait(op);
    us = (bench_now() - begin) * 1e6;
    if (!bench_finish_op(spilled->client, "query", status, op))
        return -1;
    const struct kv_id128 hash =
        kv_hash128(kv_buffer_data(spilled->to), (size_t)N_HEADS * one->k * ROW_BYTES);

    memcpy(ret_hash, hash.bytes, sizeof(*ret_hash));
    return us;
}

static double disk_read_bytes(struct spilled *spilled)
{
    return bench_table_number(spilled->client, "stats", "disk_read_bytes", "value");
}

static bool measure(struct spilled *spilled,
                    const struct spilled_case *one,
                    unsigned share,
                    unsigned rounds,
                    struct bench_sample *ret_sample)
{
    struct bench_watch watch;
    bool is_good = bench_watch_start(&watch, rounds);

    if (!is_good)
        return false;
    spilled->read_bytes = 0;
    for (unsigned i = 0; is_good && i < rounds; i++) {
        uint64_t hash;

        is_good = spill(spilled, share);
        const double before = disk_read_bytes(spilled);
        const double us = is_good && before >= 0 ? ask(spilled, one, &hash) : -1;

        is_good = us >= 0;
        if (!is_good)
            break;
        const double read = disk_read_bytes(spilled);

        is_good = read >= 0;
        spilled->read_bytes += (read - before) / rounds;
        bench_watch_add(&watch, us / 1e6);
        if (share == 0 && i == 0)
            spilled->hash = hash;
        if (hash != spilled->hash) {
            bench_complain("tier.query: another answer with %u %% on disk", share);
            is_good = false;
        }
    }
    bench_watch_times(&watch, ret_sample);
    return is_good;
}

static bool run_cases(struct spilled *spilled)
{
    const unsigned rounds = spilled->bench->smoke ? 1 : ROUNDS;
    const double layer_bytes = (double)spilled->n_tokens * N_HEADS * ROW_BYTES;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        double in_memory = 0;

        for (size_t j = 0; j < sizeof(shares) / sizeof(shares[0]); j++) {
            struct bench_sample sample;

            if (!measure(spilled, &cases[i], shares[j], rounds, &sample))
                return false;
            if (shares[j] == 0)
                in_memory = sample.value;
            const struct bench_params params = {.transport = spilled->transport,
                                                .rows = spilled->n_tokens,
                                                .k = cases[i].k,
                                                .rerank = cases[i].rerank,
                                                .away = shares[j],
                                                .window = 1};
            const double limit =
                in_memory + shares[j] / 100.0 * layer_bytes / spilled->reads / 1e3;
            bench_report(spilled->bench,
                         &(struct bench_figure){.name = "tier.query",
                                                .unit = "us",
                                                .params = params,
                                                .value = sample.value,
                                                .p99 = sample.p99,
                                                .limit = limit,
                                                .limit_name = "in memory + raw disk",
                                                .ratio = limit / sample.value});
            if (shares[j] > 0)
                bench_report(
                    spilled->bench,
                    &(struct bench_figure){.name = "tier.query.read",
                                           .unit = "MB",
                                           .params = params,
                                           .value = spilled->read_bytes / 1e6,
                                           .limit = layer_bytes / 1e6,
                                           .limit_name = "rows of a layer",
                                           .ratio = spilled->read_bytes > 0
                                                        ? layer_bytes / spilled->read_bytes
                                                        : 0});
        }
    }
    return true;
}

static bool set_up(struct spilled *spilled)
{
    const uint64_t bytes = (uint64_t)spilled->n_tokens * N_LAYERS * N_HEADS * ROW_BYTES;
    const size_t n_floats = (size_t)N_HEADS * N_QUERIES * DIM;
    const uint32_t n_blocks = spilled->n_tokens / KV_BLOCK_TOKENS;

    snprintf(spilled->model.name, sizeof(spilled->model.name), "bench-spilled");
    memcpy(spilled->model.fingerprint.bytes, "spilled", 7);
    kv_schema_uniform(&spilled->model.schema, N_LAYERS, N_HEADS, DIM, DIM, KV_BF16);
    spilled->names = malloc(n_blocks * sizeof(spilled->names[0]));
    spilled->vectors = malloc(n_floats * sizeof(float));
    if (spilled->names == NULL || spilled->vectors == NULL)
        return false;
    for (uint32_t i = 0; i < n_blocks; i++)
        spilled->names[i] = kv_hash128(&i, sizeof(i));
    for (size_t i = 0; i < n_floats; i++)
        spilled->vectors[i] = 2 * (float)((i + 1) * 2654435761u % 65536) / 65536 - 1;
    if (!bench_raw_disk(spilled->bench, bytes, true, &spilled->reads) ||
        !bench_node_start_saving(spilled->bench, 1, 2 * bytes, 4 * bytes, &spilled->node))
        return false;
    spilled->client = bench_client_open(&spilled->node, spilled->transport);
    return spilled->client != NULL &&
           kv_buffer_alloc(spilled->client, (size_t)PUT_TOKENS * N_HEADS * ROW_BYTES,
                           &spilled->from) == KV_OK &&
           kv_buffer_alloc(spilled->client, (size_t)N_HEADS * K_MAX * ROW_BYTES,
                           &spilled->to) == KV_OK &&
           kv_buffer_alloc(spilled->client, FILLER_BYTES, &spilled->filler) == KV_OK &&
           open_session(spilled) && put_rows(spilled) && make_index(spilled) &&
           publish(spilled) && wait_saved(spilled);
}

static bool run_spilled(struct bench *bench, const struct bench_load *load)
{
    struct spilled spilled = {.bench = bench,
                              .transport = bench_transport(bench, 0),
                              .n_tokens = bench->smoke ? SMOKE_TOKENS : N_TOKENS};
    bool is_good = set_up(&spilled) && run_cases(&spilled);

    (void)load;
    kv_client_close(spilled.client); /* with the session and the buffers */
    if (spilled.node.pid > 0)
        is_good = bench_node_stop(&spilled.node) && is_good;
    bench_remove(spilled.node.folder);
    free(spilled.names);
    free(spilled.vectors);
    return is_good;
}

const struct bench_load bench_spilled_loads[] = {
    {"tier.query", "queries of a session of which a part is on disk only", run_spilled, 0},
    {NULL, NULL, NULL, 0},
};
