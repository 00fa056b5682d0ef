/* Queries: the wait of a layer's attention for the rows that the store finds.
 *
 *   query.*     against the same bytes as bare messages, plus the time that the node says it
 *               was at work on the query; for rows, for ids alone, for attention over the rows
 *   query.batch one layer of 8 and of 64 sequences begun in one call, microseconds an entry,
 *               against an entry a call, and that against a bare message; `forks`: of one
 *               prompt, `apart`: of sequences that share no row, `least`: forks, one head and
 *               one row of each, which is what a call and its messages cost; `overhead_us` is
 *               that less the node's own time for such a query alone.  The answers are those of
 *               an entry a call, to the bit
 *   query.busy  the node's own time for a query (waiting included), 99th percentile, while
 *               another client streams the rows of a prompt into it; the limit is the same
 *               without it
 *   query.spill the same while another client publishes prompts as fast as they go to disk, since
 *               the memory is full; the limit is the same on a node that saves nothing, and evicts
 *               them
 *   query.worst the same beside a client that does the worst that it may (worst_client.h)
 *   query.worst.own  the same in the data thread's own time, on an embedded node (own_node.h)
 *
 * Keys are random: rows are scattered as they can be, and codes tell little; which rows are
 * chosen is no matter here. */
#include "tests/bench/bench.h"
#include "tests/bench/own_node.h"
#include "tests/support/worst_client.h"

#include "kvserver/base/hash.h"

#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    N_LAYERS = 4, /* asked in turn, so that rows are not where the last query left them */
    CHUNK_TOKENS = 256,
    PUT_TOKENS = 2048,
    LEASE_MS = 60000,
    QUERIES = 64, /* sets of query vectors */
    WORST_SECONDS = 4,
    WORST_QUERIES_MIN = 100, /* p99 is of so many at least, */
    WORST_PATIENCE = 5,      /* unless they take so many times as long */
    WORST_LATE_MS = 2000,
    PEER_PATIENCE_MS = 120000, /* until it is at work */
    SETTLE_SECONDS = 1,
    NODE_BYTES = 1 << 30,
    PEER_TOKENS = 4096, /* of a prompt */
    PEER_BLOCKS = PEER_TOKENS / KV_BLOCK_TOKENS,
    SPILL_SECONDS = 6,
    SPILL_BYTES = 256 << 20, /* of a node that has not enough for what is put */
    SPILL_PROMPTS = 40,      /* until memory is full: 12 MiB each */
};
#define SPILL_DISK_BYTES ((uint64_t)4 << 30)

struct query_shape {
    const char *name;
    uint32_t n_heads, n_queries, d, n_tokens, k, rerank;
};

/* A tenth of 8,000 tokens, as kvworker asks by default; and k = 256 of 32K for a larger model.
 */
static const struct query_shape shape_worker = {"smollm2", 3, 3, 64, 8192, 751, 4};
static const struct query_shape shape_8b = {"8b", 8, 4, 128, 16384, 256, 4};

static const struct query_case {
    const char *name;
    const struct query_shape *shape;
    enum kv_answer answer;
} cases[] = {
    {"query.smollm2", &shape_worker, KV_ANSWER_ROWS},
    {"query.smollm2.ids", &shape_worker, KV_ANSWER_IDS},
    {"query.smollm2.attend", &shape_worker, KV_ANSWER_ATTEND},
    {"query.8b", &shape_8b, KV_ANSWER_ROWS},
    {"query.8b.ids", &shape_8b, KV_ANSWER_IDS},
    {"query.8b.attend", &shape_8b, KV_ANSWER_ATTEND},
};

struct queries {
    struct bench *bench;
    const char *transport;
    const struct query_shape *shape;
    enum kv_answer answer;
    struct kv_model_info model;
    struct bench_node node;
    bool has_node;
    struct bench_own_node *own; /* instead of that, or NULL */
    struct kv_client *worst_client;
    struct worst_client *worst; /* beside; NULL: none now */
    struct kv_client *client;
    struct kv_session *session;
    struct kv_buffer *from, *to;
    float *vectors; /* (QUERIES, n_heads, n_queries, d) */
    size_t n;
    double worked_us;   /* of the node, per query, in the last run */
    double seconds_max; /* of a run of measure_node(); 0: n queries however long they take */
    uint32_t late_ms;   /* a query ends then, and counts as so long; 0: it must not be late */
    struct bench_exchange bare;
};

static struct kv_range all_of(const struct queries *queries)
{
    return (struct kv_range){4, queries->shape->n_tokens - 64};
}

static struct kv_query
query_of(const struct queries *queries, size_t i, const struct kv_range *range)
{
    const struct query_shape *shape = queries->shape;

    return (struct kv_query){
        .layer = (uint32_t)(i % N_LAYERS),
        .n_queries = shape->n_queries,
        .queries =
            queries->vectors + i % QUERIES * shape->n_heads * shape->n_queries * shape->d,
        .scale = 1 / sqrtf((float)shape->d),
        .merge = KV_MERGE_SUM,
        .answer = queries->answer,
        .k = shape->k,
        .rerank = shape->rerank,
        .n_ranges = 1,
        .ranges = range,
    };
}

/* Drives a node that has no threads, and the client beside. */
static void step_own(struct queries *queries)
{
    if (queries->worst != NULL) {
        worst_client_step(queries->worst);
        kv_poll(queries->worst_client);
    }
    bench_own_node_step(queries->own);
}

static kv_status_t wait_for(struct queries *queries, struct kv_op *op)
{
    while (queries->own != NULL && kv_op_status(op) == KV_IN_PROGRESS) {
        kv_poll(queries->client);
        step_own(queries);
    }
    return kv_wait(op);
}

/* One query; what its slowest data thread says of its time.  Negative: failed. */
static double ask(struct queries *queries, size_t i, bool with_wait)
{
    const struct kv_range range = all_of(queries);
    const struct kv_query query = query_of(queries, i, &range);
    const struct kv_rows_io io = {.buffer = queries->to};
    double most = 0;
    struct kv_op *op;
    kv_status_t status = kv_query_begin(queries->session, &query, &io, queries->late_ms, &op);

    if (status == KV_OK)
        status = wait_for(queries, op);
    if ((status == KV_DEADLINE || status == KV_UNREACHABLE) && queries->late_ms > 0) {
        kv_op_free(op);
        return queries->late_ms * 1e3;
    }
    for (uint32_t head = 0; status == KV_OK && head < queries->shape->n_heads; head++) {
        struct kv_query_result found;
        double us;

        status = kv_op_query_result(op, head, &found);
        us = found.service_us + (with_wait ? found.queue_us : 0);
        most = us > most ? us : most;
        if (status == KV_OK && found.n_selected != queries->shape->k) {
            bench_complain("query: %u rows of a head, %u expected", found.n_selected,
                           queries->shape->k);
            status = KV_CORRUPT;
        }
    }
    if (status != KV_OK)
        bench_finish_op(queries->client, "query", status, NULL);
    kv_op_free(op);
    return status == KV_OK ? most : -1;
}

/* ---- sides ------------------------------------------------------------------------------- */

static bool measure_query(void *arg, struct bench_sample *ret_sample)
{
    struct queries *queries = arg;
    struct bench_watch watch;
    double worked_us = 0;

    if (!bench_watch_start(&watch, queries->n))
        return false;
    for (size_t i = 0; i < queries->n; i++) {
        const double begin = bench_now();
        const double us = ask(queries, i, false);

        if (us < 0) {
            bench_watch_times(&watch, ret_sample);
            return false;
        }
        bench_watch_add(&watch, bench_now() - begin);
        worked_us += us;
    }
    queries->worked_us = worked_us / (double)queries->n;
    bench_watch_times(&watch, ret_sample);
    return true;
}

static bool measure_parts(void *arg, struct bench_sample *ret_sample)
{
    struct queries *queries = arg;

    if (!bench_wire_measure(&queries->bare, ret_sample))
        return false;
    ret_sample->value += queries->worked_us;
    ret_sample->p99 = 0;
    return true;
}

static bool takes_too_long(const struct queries *queries, size_t n, double seconds)
{
    const double max = n < WORST_QUERIES_MIN ? WORST_PATIENCE : 1;

    return queries->seconds_max > 0 && seconds > max * queries->seconds_max;
}

/* The node's 99th percentile. */
static bool measure_node(void *arg, struct bench_sample *ret_sample)
{
    struct queries *queries = arg;
    struct bench_watch watch;

    if (!bench_watch_start(&watch, queries->n))
        return false;
    for (size_t i = 0; i < queries->n; i++) {
        double us;

        if (takes_too_long(queries, i, bench_now() - watch.begin))
            break;
        us = ask(queries, i, true);
        if (us < 0) {
            bench_watch_times(&watch, ret_sample);
            return false;
        }
        bench_watch_add(&watch, us / 1e6);
    }
    bench_watch_times(&watch, ret_sample);
    if (queries->seconds_max > 0)
        ret_sample->p50 = ret_sample->value;
    ret_sample->value = ret_sample->p99;
    return true;
}

/* The same while a peer does what it does. */
static bool
measure_beside(struct queries *queries, const char *peer, struct bench_sample *ret_sample)
{
    char *const argv[] = {
        (char *)"/proc/self/exe",      (char *)"--peer",           (char *)peer,
        (char *)queries->node.address, (char *)queries->transport, NULL,
    };
    char line[64];
    pid_t pid;
    int in, out;
    bool is_good;

    if (!bench_spawn(argv, queries->bench->client_cpu, &in, &out, NULL, &pid))
        return false;
    /* It says so when it is at work. */
    is_good = bench_read_line(out, line, sizeof(line), PEER_PATIENCE_MS) &&
              measure_node(queries, ret_sample);
    close(in);
    is_good = bench_reap(pid) && is_good;
    close(out);
    return is_good;
}

static bool measure_busy(void *arg, struct bench_sample *ret_sample)
{
    return measure_beside(arg, "prefill", ret_sample);
}

static bool measure_spill(void *arg, struct bench_sample *ret_sample)
{
    return measure_beside(arg, "spill", ret_sample);
}

static bool measure_worst(void *arg, struct bench_sample *ret_sample)
{
    struct queries *queries = arg;
    bool is_good = measure_beside(queries, "worst", ret_sample);
    const double until = bench_now() + SETTLE_SECONDS;

    /* The node frees what the peer left; the next side is about an idle node. */
    while (is_good && !queries->bench->smoke && bench_now() < until)
        kv_client_wait(queries->client, 10000);
    return is_good;
}

/* The same beside a client at its worst, in the node's own time. */
static bool measure_worst_own(void *arg, struct bench_sample *ret_sample)
{
    struct queries *queries = arg;
    struct kv_buffer *buffer;
    bool is_good;

    if (!bench_own_node_start(queries->own))
        return false;
    queries->worst_client = bench_own_node_client(queries->own);
    bench_own_node_stop(queries->own);
    if (queries->worst_client == NULL)
        return false;
    if (kv_buffer_alloc(queries->worst_client, WORST_CLIENT_BYTES, &buffer) == KV_OK)
        queries->worst = worst_client_open(queries->worst_client, buffer);
    while (queries->worst != NULL && !worst_client_is_at_work(queries->worst))
        step_own(queries);
    {
    }
    is_good = queries->worst != NULL && measure_node(queries, ret_sample);
    {
    }

    if (!bench_own_node_start(queries->own))
        return false;
    if (queries->worst != NULL) {
        worst_client_leave(queries->worst);
        worst_client_close(queries->worst);
    }
    queries->worst = NULL;
    kv_client_close(queries->worst_client);
    /* The node frees what it left; the next side is about an idle node. */
    for (unsigned i = 0; i < SETTLE_SECONDS * 100; i++)
        kv_client_wait(queries->client, 10000);
    bench_own_node_stop(queries->own);
    return is_good;
}

/* ---- set-up ------------------------------------------------------------------------------ */

/*   names  (PEER_BLOCKS) of a prompt that is not there yet; NULL: it is not to be kept */
static bool open_session(struct kv_client *client,
                         const struct kv_model_info *model,
                         const struct kv_id128 *names,
                         struct kv_session **ret_session)
{
    const struct kv_session_options options = {.lease_ms = LEASE_MS,
                                               .block_names = names,
                                               .n_block_names = names != NULL ? PEER_BLOCKS : 0,
                                               .is_fresh = names != NULL};
    struct kv_op *op;
    kv_status_t status = kv_open_begin(client, model, &options, 0, &op);

    if (status != KV_OK)
        return bench_finish_op(client, "open", status, NULL);
    status = kv_wait(op);
    if (status == KV_OK)
        *ret_session = kv_op_session(op);
    return bench_finish_op(client, "open", KV_OK, op);
}

static void model_of(const struct query_shape *shape, struct kv_model_info *ret_model)
{
    memset(ret_model, 0, sizeof(*ret_model));
    snprintf(ret_model->name, sizeof(ret_model->name), "bench-query-%s", shape->name);
    memcpy(ret_model->fingerprint.bytes, shape->name, strlen(shape->name));
    ret_model->fingerprint.bytes[15] = 'q';
    kv_schema_uniform(&ret_model->schema, N_LAYERS, shape->n_heads, shape->d, shape->d,
                      KV_BF16);
}

/* bf16 numbers in (-1, 1). */
static void fill_rows(void *memory, size_t bytes, uint64_t seed)
{
    uint16_t *at = memory;

    bench_fill(memory, bytes, seed);
    for (size_t i = 0; i < bytes / sizeof(*at); i++) {
        const float value = (float)at[i] / 32768 - 1;
        uint32_t bits;

        memcpy(&bits, &value, sizeof(bits));
        at[i] = (uint16_t)(bits >> 16);
    }
}

static bool put_rows(struct queries *queries)
{
    const uint32_t n_tokens = queries->shape->n_tokens;
    struct kv_rows box = {.n_layers = 1, .n_tokens = PUT_TOKENS};
    const struct kv_rows_io io = {.buffer = queries->from};

    for (box.token_begin = 0; box.token_begin < n_tokens; box.token_begin += PUT_TOKENS) {
        for (box.layer_begin = 0; box.layer_begin < N_LAYERS; box.layer_begin++) {
            struct kv_op *op;
            kv_status_t status;

            fill_rows(kv_buffer_data(queries->from), kv_buffer_bytes(queries->from),
                      box.token_begin + box.layer_begin);
            status = kv_put_begin(queries->session, &box, &io, 0, &op);
            if (!bench_finish_op(queries->client, "put", status, op))
                return false;
        }
    }
    return true;
}

static bool make_index(struct queries *queries)
{
    const struct kv_index_options index = {
        .tokens = queries->shape->n_tokens,
        .chapter_blocks = 128,
        .m = 2,
        .bits = 6,
        .iterations = 3,
        .wait = true,
    };
    struct kv_index_result indexed;
    struct kv_op *op;
    kv_status_t status = kv_index_begin(queries->session, &index, 120000, &op);

    if (status == KV_OK) {
        kv_wait(op);
        kv_op_index_result(op, &indexed);
    }
    if (!bench_finish_op(queries->client, "index", status, op))
        return false;
    if (indexed.rows_coded == indexed.rows)
        return true;
    bench_complain("index: %llu of %llu rows have codes",
                   (unsigned long long)indexed.rows_coded, (unsigned long long)indexed.rows);
    return false;
}

static void close_queries(struct queries *queries)
{
    bench_wire_close(queries->bare.wire);
    /* The client frees the session and both buffers. */
    if (queries->own != NULL)
        bench_own_node_start(queries->own);
    kv_client_close(queries->client);
    bench_own_node_close(queries->own);
    if (queries->has_node && !bench_node_stop(&queries->node))
        bench_complain("query: the node did not stop");
    bench_remove(queries->node.folder);
    free(queries->vectors);
}

/* Bytes that come back of one head. */
static size_t head_bytes(const struct query_shape *shape, enum kv_answer answer)
{
    const size_t row_bytes = (size_t)shape->d * 4;

    switch (answer) {
    case KV_ANSWER_ROWS:
        return shape->k * (row_bytes + 8);
    case KV_ANSWER_IDS:
        return shape->k * sizeof(uint32_t);
    case KV_ANSWER_ATTEND:
        return shape->n_queries * (shape->d + 1) * sizeof(float);
    }
    return 0;
}

static bool fill_session(struct queries *queries)
{
    return open_session(queries->client, &queries->model, NULL, &queries->session) &&
           put_rows(queries) && make_index(queries);
}

static bool open_queries(struct bench *bench,
                         const char *transport,
                         const struct query_case *one,
                         uint64_t memory_bytes,
                         uint64_t disk_bytes, /* 0: the node saves nothing */
                         struct queries *queries)
{
    const struct query_shape *shape = one->shape;
    const size_t n_floats = (size_t)QUERIES * shape->n_heads * shape->n_queries * shape->d;
    const size_t row_bytes = (size_t)shape->d * 4;
    const size_t head_rows = shape->k;

    memset(queries, 0, sizeof(*queries));
    queries->bench = bench;
    queries->transport = transport;
    queries->shape = shape;
    queries->answer = one->answer;
    queries->n = bench_count(bench, 2000);
    queries->vectors = malloc(n_floats * sizeof(float));
    if (queries->vectors == NULL)
        return false;
    for (size_t i = 0; i < n_floats; i++)
        queries->vectors[i] = 2 * (float)((i + 1) * 2654435761u % 65536) / 65536 - 1;
    model_of(shape, &queries->model);
    queries->bare = (struct bench_exchange){
        .out_bytes = shape->n_heads * (8 + shape->n_queries * shape->d * sizeof(float)) + 176,
        .back_bytes = shape->n_heads * head_bytes(shape, one->answer),
        .window = 1,
        .n = queries->n,
        .times = true,
    };
    if (transport == NULL) {
        queries->own = bench_own_node_open(memory_bytes);
        queries->client = queries->own != NULL ? bench_own_node_client(queries->own) : NULL;
    } else {
        queries->has_node =
            disk_bytes > 0
                ? bench_node_start_saving(bench, 1, memory_bytes, disk_bytes, &queries->node)
                : bench_node_start(bench, 1, memory_bytes, true, &queries->node);
        queries->client =
            queries->has_node ? bench_client_open(&queries->node, transport) : NULL;
    }
    return queries->client != NULL &&
           kv_buffer_alloc(queries->client, PUT_TOKENS * shape->n_heads * row_bytes,
                           &queries->from) == KV_OK &&
           kv_buffer_alloc(queries->client, shape->n_heads * head_rows * row_bytes,
                           &queries->to) == KV_OK &&
           fill_session(queries) &&
           (transport == NULL || bench_wire_open(bench, transport, &queries->bare.wire));
}

static bool compare(struct queries *queries, const char *name, const struct bench_side *sides)
{
    const struct bench_comparison comparison = {
        .name = name,
        .unit = "us",
        .params = {.transport = queries->transport,
                   .shape = queries->shape->name,
                   .window = 1,
                   .bytes = queries->bare.back_bytes,
                   .request_bytes = queries->bare.out_bytes,
                   .rows = queries->shape->n_tokens},
        .n_sides = 2,
        .sides = {sides[0], sides[1]},
    };

    return bench_compare(queries->bench, &comparison);
}

static bool run_query(struct bench *bench, const struct bench_load *load)
{
    const struct query_case *one = cases;
    const char *transport;
    bool is_good = true;

    while (strcmp(one->name, load->name) != 0)
        one++;
    for (unsigned i = 0; is_good && (transport = bench_transport(bench, i)) != NULL; i++) {
        struct queries queries;
        struct bench_sample warm_up;
        const struct bench_side sides[] = {
            {NULL, measure_query, &queries},
            {"bare message + node's work", measure_parts, &queries},
        };

        is_good = open_queries(bench, transport, one, NODE_BYTES, 0, &queries) &&
                  measure_query(&queries, &warm_up) && measure_parts(&queries, &warm_up) &&
                  compare(&queries, load->name, sides);
        close_queries(&queries);
    }
    return is_good;
}

/* query.busy and query.worst: the node's 99th percentile beside another client. */
static bool run_beside(struct bench *bench, const struct bench_load *load)
{
    const bool is_worst = strcmp(load->name, "query.worst") == 0;
    const char *transport;
    bool is_good = true;

    for (unsigned i = 0; is_good && (transport = bench_transport(bench, i)) != NULL; i++) {
        struct queries queries;
        struct bench_sample warm_up;
        const struct bench_side sides[] = {
            {NULL, is_worst ? measure_worst : measure_busy, &queries},
            {"idle node", measure_node, &queries},
        };

        is_good = open_queries(bench, transport, &cases[0], NODE_BYTES, 0, &queries);
        if (is_worst) {
            queries.seconds_max = bench->smoke ? 0.1 : WORST_SECONDS;
            queries.late_ms = WORST_LATE_MS;
        }
        is_good =
            is_good && measure_node(&queries, &warm_up) && compare(&queries, load->name, sides);
        close_queries(&queries);
    }
    return is_good;
}

/* query.spill: two nodes, of which one saves; the one that is not being measured is idle. */
static bool run_spill(struct bench *bench, const struct bench_load *load)
{
    const char *transport;
    bool is_good = true;

    for (unsigned i = 0; is_good && (transport = bench_transport(bench, i)) != NULL; i++) {
        struct queries saving, other;
        struct bench_sample warm_up;
        const struct bench_side sides[] = {
            {NULL, measure_spill, &saving},
            {"the same, nothing saved", measure_spill, &other},
        };

        is_good =
            open_queries(bench, transport, &cases[0], SPILL_BYTES, SPILL_DISK_BYTES, &saving);
        is_good = open_queries(bench, transport, &cases[0], SPILL_BYTES, 0, &other) && is_good;
        saving.seconds_max = other.seconds_max = bench->smoke ? 0.1 : SPILL_SECONDS;
        is_good = is_good && measure_node(&saving, &warm_up) &&
                  measure_node(&other, &warm_up) && compare(&saving, load->name, sides);
        if (is_good && bench_table_number(saving.client, "stats", "disk_written_bytes",
                                          "value") < SPILL_BYTES / 4) {
            bench_complain("query.spill: the node has written little to its disk");
            is_good = false;
        }
        close_queries(&saving);
        close_queries(&other);
    }
    return is_good;
}

/* query.worst.own: the same on an embedded node, in its own time. */
static bool run_worst_own(struct bench *bench, const struct bench_load *load)
{
    struct queries queries;
    struct bench_sample warm_up;
    const struct bench_side sides[] = {
        {NULL, measure_worst_own, &queries},
        {"idle node", measure_node, &queries},
    };
    bool is_good = open_queries(bench, NULL, &cases[0], NODE_BYTES, 0, &queries);

    if (is_good)
        bench_own_node_stop(queries.own);
    queries.seconds_max = bench->smoke ? 0.1 : WORST_SECONDS;
    is_good =
        is_good && measure_node(&queries, &warm_up) && compare(&queries, load->name, sides);
    close_queries(&queries);
    return is_good;
}

/* ---- batches ----------------------------------------------------------------------------- */

enum {
    BATCH_MOST = 64,
    APART_SESSIONS = BATCH_MOST / N_LAYERS,
    SMOKE_SESSIONS = 2,
};
#define APART_NODE_BYTES ((uint64_t)6 << 30)

/* What the entries of a call are. */
enum batch_kind {
    BATCH_FORKS, /* one layer of forks of a session */
    BATCH_APART, /* no two of one layer of a session */
    BATCH_LEAST, /* as forks, one row of one head each */
};
static const char *const batch_loads[] = {
    [BATCH_FORKS] = "query.batch.forks",
    [BATCH_APART] = "query.batch.apart",
    [BATCH_LEAST] = "query.batch.least",
};

struct batch {
    struct queries *queries;
    enum batch_kind kind;
    struct kv_session *sessions[BATCH_MOST];
    uint32_t n_sessions;
    uint32_t n_entries; /* of one call */
    double worked_us;   /* of the node, per call, in the last run */
    double *own_us;     /* the same of the last run with one entry a call, of this batch or of
                         * another on the same node */
};

/* The arrays of one call. */
struct batch_call {
    struct kv_range range;
    struct kv_query queries[BATCH_MOST];
    struct kv_query_entry entries[BATCH_MOST];
};

static bool open_forks(struct batch *batch)
{
    struct queries *queries = batch->queries;

    for (; batch->n_sessions < BATCH_MOST; batch->n_sessions++) {
        struct kv_op *op;
        kv_status_t status = kv_fork_begin(queries->session, queries->shape->n_tokens, 0, &op);

        if (status == KV_OK)
            status = kv_wait(op);
        if (status == KV_OK)
            batch->sessions[batch->n_sessions] = kv_op_session(op);
        if (!bench_finish_op(queries->client, "fork", status, op))
            return false;
    }
    return true;
}

static bool open_apart(struct batch *batch)
{
    const uint32_t n = batch->queries->bench->smoke ? SMOKE_SESSIONS : APART_SESSIONS;

    batch->sessions[batch->n_sessions++] = batch->queries->session;
    while (batch->n_sessions < n) {
        if (!fill_session(batch->queries))
            return false;
        batch->sessions[batch->n_sessions++] = batch->queries->session;
    }
    return true;
}

/* Begins a call with n entries, from number `at` on.  layer: of forks */
static kv_status_t begin_call(
    const struct batch *batch, size_t at, uint32_t n, size_t layer, struct batch_call *ret_call)
{
    ret_call->range = all_of(batch->queries);
    if (batch->kind == BATCH_LEAST)
        ret_call->range.end = ret_call->range.begin + 1;
    for (uint32_t i = 0; i < n; i++) {
        const size_t session = (at + i) % batch->n_sessions;
        struct kv_query *query = &ret_call->queries[i];

        *query = query_of(batch->queries, at + i, &ret_call->range);
        query->layer =
            (batch->kind == BATCH_APART ? (at + i) / batch->n_sessions : layer) % N_LAYERS;
        query->n_kv_heads = batch->kind == BATCH_LEAST ? 1 : batch->queries->shape->n_heads;
        ret_call->entries[i] =
            (struct kv_query_entry){.session = batch->sessions[session], .query = query};
    }
    return kv_query_begin_batch(ret_call->entries, n, 0);
}

/* The node's time for the query, of its slowest data thread; negative: not as wanted. */
static double result_us(const struct batch *batch, const struct kv_op *op)
{
    const uint32_t n_heads = batch->kind == BATCH_LEAST ? 1 : batch->queries->shape->n_heads;
    const uint32_t k = batch->kind == BATCH_LEAST ? 1 : batch->queries->shape->k;
    double most = 0;

    for (uint32_t head = 0; head < n_heads; head++) {
        struct kv_query_result found;

        if (kv_op_query_result(op, head, &found) != KV_OK || found.n_selected != k) {
            bench_complain("query: not %u rows of head %u", k, head);
            return -1;
        }
        most = found.service_us > most ? found.service_us : most;
    }
    return most;
}

/* Waits for all entries.  Frees them, unless the call is kept.  Returns the node's time for the
 * last one; negative: one failed. */
static double end_call(const struct batch *batch,
                       kv_status_t status,
                       uint32_t n,
                       struct batch_call *call,
                       bool keeps)
{
    double us = 0;

    for (uint32_t i = 0; i < n; i++) {
        struct kv_op *op = call->entries[i].op;

        if (op == NULL)
            continue;
        if (kv_wait(op) != KV_OK && status == KV_OK)
            status = kv_op_status(op);
        if (status == KV_OK && us >= 0)
            us = result_us(batch, op);
        if (!keeps)
            kv_op_free(op);
    }
    if (status != KV_OK)
        bench_finish_op(batch->queries->client, "query", status, NULL);
    return status == KV_OK ? us : -1;
}

static void free_call(struct batch_call *call, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (call->entries[i].op != NULL)
            kv_op_free(call->entries[i].op);
}

static bool same_result(const struct query_shape *shape, struct kv_op *a, struct kv_op *b)
{
    const size_t bytes = (size_t)shape->n_queries * shape->d * sizeof(float);
    struct kv_query_result found, other;

    for (uint32_t head = 0; kv_op_query_result(a, head, &found) == KV_OK; head++)
        if (kv_op_query_result(b, head, &other) != KV_OK ||
            memcmp(found.outputs, other.outputs, bytes) != 0 ||
            memcmp(found.lses, other.lses, shape->n_queries * sizeof(float)) != 0)
            return false;
    return true;
}

/* Each entry of a call has the answer that it gets alone. */
static bool check_call(const struct batch *batch)
{
    struct batch_call call, alone;
    bool is_good = end_call(batch, begin_call(batch, 0, batch->n_entries, 0, &call),
                            batch->n_entries, &call, true) >= 0;

    for (uint32_t i = 0; is_good && i < batch->n_entries; i++) {
        is_good = end_call(batch, begin_call(batch, i, 1, 0, &alone), 1, &alone, true) >= 0;
        if (is_good &&
            !same_result(batch->queries->shape, call.entries[i].op, alone.entries[0].op)) {
            bench_complain("query: entry %u of %u: not the answer that it gets alone", i,
                           batch->n_entries);
            is_good = false;
        }
        free_call(&alone, 1);
    }
    free_call(&call, batch->n_entries);
    return is_good;
}

static bool measure_batch(void *arg, struct bench_sample *ret_sample)
{
    struct batch *batch = arg;
    const size_t n_calls = (batch->queries->n + batch->n_entries - 1) / batch->n_entries;
    const double begin = bench_now();
    double worked_us = 0;

    for (size_t i = 0; i < n_calls; i++) {
        struct batch_call call;
        const kv_status_t status =
            begin_call(batch, i * batch->n_entries, batch->n_entries, i, &call);
        const double us = end_call(batch, status, batch->n_entries, &call, false);

        if (us < 0)
            return false;
        worked_us += us;
    }
    batch->worked_us = worked_us / (double)n_calls;
    if (batch->n_entries == 1)
        *batch->own_us = batch->worked_us;
    *ret_sample = (struct bench_sample){.value = (bench_now() - begin) * 1e6 /
                                                 (double)(n_calls * batch->n_entries)};
    /* Others share their rows, so that an entry of a batch is less work. */
    if (batch->kind == BATCH_LEAST)
        ret_sample->overhead_us = ret_sample->value - *batch->own_us;
    return true;
}

/* A bare message as large as an entry's, plus the node's work on it. */
static bool measure_single_parts(void *arg, struct bench_sample *ret_sample)
{
    struct batch *batch = arg;

    if (!bench_wire_measure(&batch->queries->bare, ret_sample))
        return false;
    ret_sample->value += batch->worked_us;
    ret_sample->p99 = 0;
    return true;
}

/* Calls of 1, 8 and as many entries as there are. */
static bool compare_batches(struct batch *batch, const char *load_name)
{
    const uint32_t most =
        batch->kind == BATCH_APART ? batch->n_sessions * N_LAYERS : batch->n_sessions;
    const uint32_t sizes[] = {1, 8, most};
    struct batch single = *batch;
    struct bench_sample warm_up;
    double own_us;

    batch->own_us = single.own_us = &own_us;
    single.n_entries = 1;
    bool is_good = measure_batch(&single, &warm_up);
    for (unsigned i = 0; is_good && i < (most > 8 ? 3 : 2); i++) {
        const struct bench_side parts = {"bare message + node's work", measure_single_parts,
                                         batch};
        const struct bench_side one_by_one = {"an entry a call", measure_batch, &single};
        const struct bench_side sides[] = {{NULL, measure_batch, batch},
                                           sizes[i] == 1 ? parts : one_by_one};
        char name[48];

        batch->n_entries = sizes[i];
        snprintf(name, sizeof(name), "%s.%u", load_name, sizes[i]);
        is_good = check_call(batch) && measure_batch(batch, &warm_up) &&
                  measure_single_parts(batch, &warm_up) && compare(batch->queries, name, sides);
    }
    return is_good;
}

static bool run_batch(struct bench *bench, const struct bench_load *load)
{
    const struct query_case one = {load->name, &shape_8b, KV_ANSWER_ATTEND};
    enum batch_kind kind = BATCH_FORKS;
    const char *transport;
    bool is_good = true;

    while (strcmp(batch_loads[kind], load->name) != 0)
        kind++;
    const uint64_t memory_bytes =
        kind == BATCH_APART && !bench->smoke ? APART_NODE_BYTES : NODE_BYTES;
    for (unsigned i = 0; is_good && (transport = bench_transport(bench, i)) != NULL; i++) {
        struct queries queries;
        struct batch batch = {.queries = &queries, .kind = kind};

        is_good = open_queries(bench, transport, &one, memory_bytes, 0, &queries) &&
                  (kind == BATCH_APART ? open_apart(&batch) : open_forks(&batch)) &&
                  compare_batches(&batch, load->name);
        close_queries(&queries);
    }
    return is_good;
}

/* ---- the other client -------------------------------------------------------------------- */

static bool
publish(struct kv_client *client, struct kv_session *session, const struct kv_id128 *names)
{
    const struct kv_publish blocks = {.names = names, .n_names = PEER_BLOCKS};
    struct kv_op *op;
    const kv_status_t status = kv_publish_begin(session, &blocks, 0, &op);

    return bench_finish_op(client, "publish", status, op);
}

/* Puts a prompt's rows, chunk by chunk, again and again, until its stdin is closed.  With `publishes` each
 * is another prompt, which the node keeps. */
int bench_prefill_peer(const char *address, const char *transport, bool publishes)
{
    struct bench_node node = {0};
    struct kv_model_info model;
    struct kv_client *client;
    struct kv_session *session;
    struct kv_buffer *buffer;
    const size_t n_until_busy = publishes ? SPILL_PROMPTS * PEER_TOKENS / CHUNK_TOKENS : 4;
    size_t n_chunks = 0;
    struct kv_id128 names[PEER_BLOCKS];
    uint32_t n_prompts = 0;
    char byte;

    snprintf(node.address, sizeof(node.address), "%s", address);
    model_of(&shape_worker, &model);
    client = bench_client_open(&node, transport);
    if (client == NULL || kv_buffer_alloc(client,
                                          (size_t)CHUNK_TOKENS * shape_worker.n_heads *
                                              shape_worker.d * 4 * N_LAYERS,
                                          &buffer) != KV_OK)
        return 1;
    fill_rows(kv_buffer_data(buffer), kv_buffer_bytes(buffer), 1);
    while (true) {
        for (uint32_t i = 0; i < PEER_BLOCKS; i++)
            names[i] = kv_hash128((const uint32_t[]){(uint32_t)getpid(), n_prompts, i},
                                  3 * sizeof(uint32_t));
        n_prompts++;
        if (!open_session(client, &model, publishes ? names : NULL, &session))
            return 1;
        for (uint32_t token = 0; token < PEER_TOKENS; token += CHUNK_TOKENS) {
            const struct kv_rows box = {0, N_LAYERS, 0, 0, token, CHUNK_TOKENS};
            const struct kv_rows_io io = {.buffer = buffer};
            struct kv_op *op;
            kv_status_t status = kv_put_begin(session, &box, &io, 0, &op);

            if (!bench_finish_op(client, "put", status, op))
                return 1;
            if (n_chunks++ == n_until_busy) {
                printf("busy\n");
                fflush(stdout);
            }
        }
        struct kv_op *op;
        if (publishes && !publish(client, session, names))
            return 1;
        kv_status_t status = kv_close_begin(session, 0, &op);
        if (!bench_finish_op(client, "close", status, op))
            return 1;
        kv_session_free(session);
        struct pollfd waits = {.fd = 0, .events = POLLIN};
        if (poll(&waits, 1, 0) > 0 && read(0, &byte, 1) <= 0)
            break;
    }
    kv_client_close(client);
    return 0;
}

const struct bench_load bench_query_loads[] = {
    {"query.smollm2", "751 of 8,192 tokens, 9 query heads: codes, rerank 4, rows", run_query,
     0},
    {"query.smollm2.ids", "the same, ids alone", run_query, 0},
    {"query.smollm2.attend", "the same, attention over the rows", run_query, 0},
    {"query.8b", "256 of 16,384 tokens, 32 query heads: codes, rerank 4, rows", run_query, 0},
    {"query.8b.ids", "the same, ids alone", run_query, 0},
    {"query.8b.attend", "the same, attention over the rows", run_query, 0},
    {"query.batch.forks", "a layer of 1, 8 and 64 forks in one call, per entry", run_batch, 0},
    {"query.batch.least", "the same, one row of one head each: the cost of messages", run_batch,
     0},
    {"query.batch.apart", "a layer of 1, 8, 64 sequences that share no row, an entry",
     run_batch, 0},
    {"query.busy", "the node's p99 while another client puts a prompt's rows", run_beside, 0},
    {"query.spill", "the node's p99 while prompts go to disk, and without", run_spill, 0},
    {"query.worst", "the node's p99 while another client does the worst it may", run_beside, 0},
    {"query.worst.own", "the same in the data thread's own time", run_worst_own, 0},
    {NULL, NULL, NULL, 0},
};
