/* What one operation costs while the node holds more and more: one axis at a time.
 *
 *   scale.sessions  1 %, 10 % and 100 % of 10,000 sessions
 *   scale.clients   of 1,000 connected clients
 *   scale.threads   of 64 data threads
 *   scale.tokens    of a session of 1,048,576 tokens; fork and close per block
 *
 * The node is embedded, and this thread makes the steps of its control thread and of all data
 * threads in turn.  The time of an operation is the client's work, the control thread's, and
 * that of the data thread that worked longest: what it would take where each thread has a
 * processor.  Kernels, networks and sleeping threads have no part in it, so a machine with two
 * processors can measure 64 threads.
 *
 * An operation should not cost more because there is much that it has nothing to do with: more
 * than twice the value at 1 % is marked. */
#include "tests/bench/bench.h"

#include "kvserver/base/log.h"
#include "kvserver/disk/disk.h"
#include "kvserver/net/transport.h"
#include "kvserver/store/node.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    D = 8,
    ROW_BYTES = 2 * D * 2, /* a key and a value of bf16 */
    SESSIONS = 100,        /* on the axes that are not about them */
    SESSION_TOKENS = 16,
    PUT_TOKENS = 32768,
    QUERY_K = 4,
    ACTORS_MAX = 8, /* clients that do something; the others are connected only */
    LEASE_MS = 600000,
    DEADLINE_MS = 60000,
    TRAILING_ROUNDS = 4, /* after a reply: what the node still has to do for it */
    PASSES = 2,          /* the best counts: other work only makes them slower */
    POINTS = 3,
};

static const double slowdown_max = 2;

enum operation {
    OPEN,
    APPEND,
    QUERY,
    RESUME,
    FORK,
    CLOSE,
    N_OPERATIONS,
};

static const char *const operation_names[N_OPERATIONS] = {
    "open", "append", "query", "resume", "fork", "close",
};

struct axis {
    const char *name;
    uint32_t full, quick, smoke; /* maximum */
    bool per_block;              /* fork and close */
};

static const struct axis axes[] = {
    {"scale.sessions", 10000, 1000, 100, false},
    {"scale.clients", 1000, 100, 20, false},
    {"scale.threads", 64, 16, 4, false},
    {"scale.tokens", 1 << 20, 1 << 17, 1 << 13, true},
};

/* How much of everything there is at one point of an axis. */
struct extent {
    uint32_t n_sessions, n_clients, n_threads, n_tokens;
    uint32_t n_active;       /* sessions that operations are about, in turn */
    uint32_t n_idle_threads; /* of a node that nobody asks */
};

struct cost {
    double client_us, node_us;
};

struct rig {
    struct kv_transport *transport;
    struct kv_disk *disk;
    struct kvs_node *node;
    /* On the axis of threads: its steps take what the caches have, as those of the threads that
     * are not there yet would. */
    struct kvs_node *idle;
    struct extent extent;
    struct kv_model_info model;
    struct kv_client **clients;   /* (n_clients) */
    struct kv_session **sessions; /* (n_sessions) */
    struct kv_client **owners;    /* (n_sessions) */
    uint32_t *tokens;             /* (n_sessions) committed */
    struct kv_buffer *rows[ACTORS_MAX];
    uint32_t n_actors;
    struct cost cost;                 /* of the operation at hand */
    double thread_us[KV_THREADS_MAX]; /* of the operation at hand */
    struct kv_session *made, *branch; /* by the last open, and by the last fork */
    struct kv_ticket ticket;          /* for resume */
    float vector[D];
};

/* ---- steps ------------------------------------------------------------------------------- */

/* One step of each thread of the node.  Returns whether a data thread had something to do. */
static bool node_round(struct rig *rig)
{
    bool has_worked = false;
    double before = bench_now();

    kvs_node_control_step(rig->node);
    for (uint32_t i = 0; i < rig->extent.n_threads; i++) {
        const double begin = bench_now();

        if (i == 0)
            rig->cost.node_us += (begin - before) * 1e6;
        if (!kvs_node_data_step(rig->node, i))
            continue;
        has_worked = true;
        rig->thread_us[i] += (bench_now() - begin) * 1e6;
    }
    for (uint32_t i = 0; i < rig->extent.n_idle_threads; i++)
        kvs_node_data_step(rig->idle, i);
    return has_worked;
}

static void cost_begin(struct rig *rig)
{
    rig->cost = (struct cost){0};
    memset(rig->thread_us, 0, sizeof(rig->thread_us));
}

/* Adds the data thread that worked longest. */
static void cost_end(struct rig *rig)
{
    double most = 0;

    for (uint32_t i = 0; i < rig->extent.n_threads; i++)
        most = rig->thread_us[i] > most ? rig->thread_us[i] : most;
    rig->cost.node_us += most;
}

static void poll_client(struct rig *rig, struct kv_client *client)
{
    const double begin = bench_now();

    kv_poll(client);
    rig->cost.client_us += (bench_now() - begin) * 1e6;
}

/* Drives an operation to its end. */
static kv_status_t drive(struct rig *rig, struct kv_client *client, struct kv_op *op)
{
    while (kv_op_status(op) == KV_IN_PROGRESS) {
        poll_client(rig, client);
        node_round(rig);
    }
    for (unsigned i = 0; i < TRAILING_ROUNDS && node_round(rig); i++)
        continue;
    return kv_op_status(op);
}

/* ---- operations -------------------------------------------------------------------------- */

/* The session that operation i is about.  One alone on the axes of threads and of tokens: the
 * next one's data thread would have to come into this processor's cache first. */
static uint32_t session_of(const struct rig *rig, size_t i)
{
    return (uint32_t)(i % rig->extent.n_active);
}

static struct kv_client *actor(const struct rig *rig, uint32_t i)
{
    return rig->clients[(size_t)(i % rig->n_actors) * rig->extent.n_clients / rig->n_actors];
}

static kv_status_t begin_query(struct rig *rig, uint32_t at, struct kv_op **ret_op)
{
    const struct kv_range range = {0, SESSION_TOKENS};
    const struct kv_query query = {
        .n_queries = 1,
        .queries = rig->vector,
        .scale = 1 / sqrtf(D),
        .merge = KV_MERGE_SUM,
        .answer = KV_ANSWER_IDS,
        .k = QUERY_K,
        .rerank = 1,
        .n_ranges = 1,
        .ranges = &range,
    };

    return kv_query_begin(rig->sessions[at], &query, NULL, DEADLINE_MS, ret_op);
}

static kv_status_t begin_rows(
    struct rig *rig, uint32_t at, uint32_t n_tokens, bool is_append, struct kv_op **ret_op)
{
    const struct kv_rows box = {
        .n_layers = 1, .token_begin = rig->tokens[at], .n_tokens = n_tokens};
    const struct kv_rows_io io = {.buffer = rig->rows[at % rig->n_actors]};

    return (is_append ? kv_append_begin : kv_put_begin)(rig->sessions[at], &box, &io,
                                                        DEADLINE_MS, ret_op);
}

static kv_status_t
begin(struct rig *rig, enum operation operation, size_t i, struct kv_op **ret_op)
{
    const struct kv_session_options options = {.lease_ms = LEASE_MS};
    const uint32_t at = session_of(rig, i);

    switch (operation) {
    case OPEN:
        return kv_open_begin(rig->owners[at], &rig->model, &options, DEADLINE_MS, ret_op);
    case APPEND:
        return begin_rows(rig, at, 1, true, ret_op);
    case QUERY:
        return begin_query(rig, at, ret_op);
    case RESUME:
        return kv_resume_begin(rig->owners[at], &rig->ticket, DEADLINE_MS, ret_op);
    case FORK:
        return kv_fork_begin(rig->sessions[at], rig->tokens[at], DEADLINE_MS, ret_op);
    case CLOSE:
    case N_OPERATIONS:
        break;
    }
    return kv_close_begin(rig->branch, DEADLINE_MS, ret_op);
}

/* What follows an operation that is not part of it. */
static void follow(struct rig *rig, enum operation operation, size_t i, struct kv_op *op)
{
    switch (operation) {
    case OPEN:
        rig->made = kv_op_session(op);
        break;
    case APPEND:
        rig->tokens[session_of(rig, i)]++;
        break;
    case RESUME:
        kv_session_free(kv_op_session(op));
        break;
    case FORK:
        rig->branch = kv_op_session(op);
        break;
    case CLOSE:
        kv_session_free(rig->branch);
        rig->branch = NULL;
        break;
    case QUERY:
    case N_OPERATIONS:
        break;
    }
}

/* Runs one operation; its cost is in rig->cost. */
static bool run_one(struct rig *rig, enum operation operation, size_t i)
{
    struct kv_client *client = rig->owners[session_of(rig, i)];
    const double begin_s = bench_now();
    struct kv_op *op = NULL;
    kv_status_t status;

    cost_begin(rig);
    status = begin(rig, operation, i, &op);
    rig->cost.client_us = (bench_now() - begin_s) * 1e6;
    if (status == KV_OK)
        status = drive(rig, client, op);
    cost_end(rig);
    if (status == KV_OK)
        follow(rig, operation, i, op);
    else
        bench_complain("scale: %s: %s: %s", operation_names[operation], kv_status_name(status),
                       kv_client_detail(client));
    kv_op_free(op);
    return status == KV_OK;
}

/* Closes what OPEN made, which no figure counts. */
static bool close_made(struct rig *rig, size_t i)
{
    struct kv_session *branch = rig->branch;
    bool is_good;

    rig->branch = rig->made;
    is_good = run_one(rig, CLOSE, i);
    rig->branch = branch;
    return is_good;
}

/* ---- set-up ------------------------------------------------------------------------------ */

static bool open_node(struct rig *rig)
{
    const struct kv_transport_config transport_config = {0};
    char detail[256] = "out of memory";
    kv_log_set_level(KV_LOG_WARN);
    kv_status_t status =
        kv_transport_loopback.open(&transport_config, &rig->transport, detail, sizeof(detail));

    if (status == KV_OK) {
        rig->disk = kv_disk_memory_open(&kv_clock_real, 0);
        status = rig->disk != NULL ? KV_OK : KV_NO_MEMORY;
    }
    if (status == KV_OK) {
        struct kvs_node_config config = {
            .name = "scale",
            .memory_bytes = UINT64_C(2) << 30,
            .n_threads = rig->extent.n_threads,
            .sessions_max = rig->extent.n_sessions + 64,
            .clients_max = rig->extent.n_clients + 8,
            .lease_ms = LEASE_MS,
            .client_lease_ms = LEASE_MS,
            .clock = &kv_clock_real,
            .transport = rig->transport,
            .message_control = true,
            .disk = rig->disk,
        };

        status = kvs_node_create(&config, &rig->node, detail, sizeof(detail));
        config.n_threads = rig->extent.n_idle_threads;
        if (status == KV_OK && config.n_threads > 0)
            status = kvs_node_create(&config, &rig->idle, detail, sizeof(detail));
    }
    if (status != KV_OK)
        bench_complain("scale: node: %s: %s", kv_status_name(status), detail);
    return status == KV_OK;
}

/* kv_client_open() waits for the node, so that it has threads meanwhile.  The node may take
 * fewer clients than asked for: then there are as many as it takes. */
static bool open_clients(struct rig *rig)
{
    const struct kv_client_options options = {
        .nodes = kvs_node_address(rig->node),
        .name = "kv_bench",
        .deadline_ms = DEADLINE_MS,
        .peer_timeout_ms = DEADLINE_MS,
        .ops_max = 16,
    };
    const uint32_t wanted = rig->extent.n_clients;
    char detail[512] = "";
    uint32_t n = 0;

    if (kvs_node_start(rig->node, true) != KV_OK)
        return false;
    while (n < wanted &&
           kv_client_open(&options, &rig->clients[n], detail, sizeof(detail)) == KV_OK)
        n++;
    kvs_node_stop(rig->node);
    if (n < wanted)
        bench_complain("scale: %u clients instead of %u: %s", n, wanted, detail);
    rig->extent.n_clients = n;
    rig->n_actors = n < ACTORS_MAX ? n : ACTORS_MAX;
    return n > 0;
}

static bool fill_session(struct rig *rig, uint32_t at, uint32_t n_tokens)
{
    while (rig->tokens[at] < n_tokens) {
        const uint32_t left = n_tokens - rig->tokens[at];
        const uint32_t n = left < PUT_TOKENS ? left : PUT_TOKENS;
        struct kv_op *op;
        kv_status_t status = begin_rows(rig, at, n, false, &op);

        if (status == KV_OK)
            drive(rig, rig->owners[at], op);
        if (!bench_finish_op(rig->owners[at], "put", status, op))
            return false;
        rig->tokens[at] += n;
    }
    return true;
}

static bool open_sessions(struct rig *rig)
{
    kv_schema_uniform(&rig->model.schema, 1, 1, D, D, KV_BF16);
    snprintf(rig->model.name, sizeof(rig->model.name), "bench-scale");
    memcpy(rig->model.fingerprint.bytes, "bench-scale", 11);
    for (uint32_t i = 0; i < D; i++)
        rig->vector[i] = (float)(i + 1) / D;
    for (uint32_t i = 0; i < rig->n_actors; i++) {
        if (kv_buffer_alloc(actor(rig, i), (size_t)PUT_TOKENS * ROW_BYTES, &rig->rows[i]) !=
            KV_OK)
            return false;
        /* Numbers: bit 14 of a bf16 is that of the largest exponents. */
        uint16_t *values = kv_buffer_data(rig->rows[i]);
        bench_fill(values, kv_buffer_bytes(rig->rows[i]), i);
        for (size_t j = 0; j < kv_buffer_bytes(rig->rows[i]) / sizeof(*values); j++)
            values[j] &= 0xbfff;
    }
    for (uint32_t i = 0; i < rig->extent.n_sessions; i++) {
        rig->owners[i] = actor(rig, i);
        if (!run_one(rig, OPEN, i))
            return false;
        rig->sessions[i] = rig->made;
        rig->made = NULL;
        if (!fill_session(rig, i, i == 0 ? rig->extent.n_tokens : SESSION_TOKENS))
            return false;
    }
    kv_session_ticket(rig->sessions[0], &rig->ticket);
    return true;
}

static void close_rig(struct rig *rig)
{
    /* A client frees its sessions and buffers. */
    for (uint32_t i = 0; rig->clients != NULL && i < rig->extent.n_clients; i++)
        kv_client_close(rig->clients[i]);
    kvs_node_destroy(rig->node);
    kvs_node_destroy(rig->idle);
    kv_disk_close(rig->disk);
    if (rig->transport != NULL)
        rig->transport->ops->close(rig->transport);
    free(rig->clients);
    free(rig->sessions);
    free(rig->owners);
    free(rig->tokens);
}

static bool open_rig(const struct extent *extent, struct rig *rig)
{
    memset(rig, 0, sizeof(*rig));
    rig->extent = *extent;
    rig->clients = calloc(extent->n_clients, sizeof(*rig->clients));
    rig->sessions = calloc(extent->n_sessions, sizeof(struct kv_session *));
    rig->owners = calloc(extent->n_sessions, sizeof(*rig->owners));
    rig->tokens = calloc(extent->n_sessions, sizeof(*rig->tokens));
    if (rig->clients == NULL || rig->sessions == NULL || rig->owners == NULL ||
        rig->tokens == NULL) {
        bench_complain("scale: out of memory");
        return false;
    }
    return open_node(rig) && open_clients(rig) && open_sessions(rig);
}

/* ---- figures ----------------------------------------------------------------------------- */

struct figure {
    struct bench_sample all, node; /* us */
};

/* Measures one operation n times; a close needs a fork before it. */
static bool
measure(struct rig *rig, enum operation operation, size_t n, struct figure *ret_figure)
{
    struct bench_watch all, node;
    bool is_good = true;

    if (!bench_watch_start(&all, n))
        return false;
    if (!bench_watch_start(&node, n)) {
        free(all.seconds);
        return false;
    }
    for (size_t i = 0; i < n && is_good; i++) {
        is_good = (operation != CLOSE || run_one(rig, FORK, i)) && run_one(rig, operation, i);
        bench_watch_add(&all, (rig->cost.client_us + rig->cost.node_us) / 1e6);
        bench_watch_add(&node, rig->cost.node_us / 1e6);
        if (is_good && operation == OPEN)
            is_good = close_made(rig, i);
        if (is_good && operation == FORK)
            is_good = run_one(rig, CLOSE, i);
    }
    bench_watch_times(&all, &ret_figure->all);
    bench_watch_times(&node, &ret_figure->node);
    return is_good;
}

static struct extent extent_at(const struct axis *axis, uint32_t n, uint32_t n_max)
{
    struct extent extent = {SESSIONS, 1, 1, SESSION_TOKENS, SESSIONS, 0};

    if (axis == &axes[0])
        extent.n_sessions = extent.n_active = n;
    else if (axis == &axes[1])
        extent.n_clients = n;
    else if (axis == &axes[2]) {
        extent.n_threads = n;
        extent.n_idle_threads = n_max - n;
        extent.n_active = 1;
    } else {
        extent.n_tokens = n;
        extent.n_active = 1;
    }
    return extent;
}

/* The axis' extent as it came out: a node may take fewer clients. */
static uint32_t extent_of(const struct axis *axis, const struct extent *extent)
{
    const uint32_t all[] = {extent->n_sessions, extent->n_clients, extent->n_threads,
                            extent->n_tokens};

    return all[axis - axes];
}

static bool is_per_block(const struct axis *axis, enum operation operation)
{
    return axis->per_block && (operation == FORK || operation == CLOSE);
}

/* How many of them share an operation's time. */
static uint32_t n_shares(const struct axis *axis, enum operation operation, uint32_t n)
{
    return is_per_block(axis, operation) ? (n + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS : 1;
}

/* Adds a pass over one point of the axis, which ends at n_max; *n is corrected to what there
 * was. */
static bool pass(struct bench *bench,
                 const struct axis *axis,
                 uint32_t *n,
                 uint32_t n_max,
                 struct figure figures[])
{
    const struct extent extent = extent_at(axis, *n, n_max);
    struct rig rig;
    bool is_good = open_rig(&extent, &rig);

    *n = extent_of(axis, &rig.extent);
    for (enum operation operation = 0; is_good && operation < N_OPERATIONS; operation++) {
        const bool is_long = axis->per_block && operation >= RESUME;
        const size_t count = bench_count(bench, bench->quick ? 100 : is_long ? 60 : 400);
        struct figure figure, *best = &figures[operation];

        is_good = measure(&rig, operation, count, &figure);
        if (best->all.value == 0 || figure.all.value < best->all.value)
            *best = figure;
    }
    close_rig(&rig);
    return is_good;
}

static void report(struct bench *bench,
                   const struct axis *axis,
                   enum operation operation,
                   const uint32_t n[POINTS],
                   struct figure figures[POINTS][N_OPERATIONS])
{
    const double least = figures[0][operation].all.value / n_shares(axis, operation, n[0]);

    for (unsigned point = 0; point < POINTS; point++) {
        const struct figure *figure = &figures[point][operation];
        const double share = n_shares(axis, operation, n[point]);
        const double value = figure->all.value / share;

        bench_report(bench,
                     &(struct bench_figure){
                         .name = axis->name,
                         .unit = "us",
                         .params = {.operation = operation_names[operation],
                                    .per = is_per_block(axis, operation) ? "block" : NULL,
                                    .n = n[point],
                                    .node_us = figure->node.value / share,
                                    .slowdown = value / least,
                                    .mark = value > slowdown_max * least ? "ABOVE 2" : NULL},
                         .value = value,
                         .p99 = figure->all.p99 / share,
                         .limit_name = "at 1 %",
                         .limit = least,
                         .ratio = least / value,
                     });
    }
}

static bool run_scale(struct bench *bench, const struct bench_load *load)
{
    struct figure figures[POINTS][N_OPERATIONS] = {0};
    const struct axis *axis = axes;
    uint32_t n[POINTS];

    while (strcmp(axis->name, load->name) != 0)
        axis++;
    const uint32_t n_max = bench->smoke ? axis->smoke : bench->quick ? axis->quick : axis->full;

    n[2] = n_max;
    n[1] = n_max / 10 > 0 ? n_max / 10 : 1;
    n[0] = n_max / 100 > 0 ? n_max / 100 : 1;
    for (unsigned i = 0; i < (bench->smoke || bench->quick ? 1 : PASSES); i++)
        for (unsigned point = 0; point < POINTS; point++)
            if (!pass(bench, axis, &n[point], n_max, figures[point]))
                return false;
    for (enum operation operation = 0; operation < N_OPERATIONS; operation++)
        report(bench, axis, operation, n, figures);
    return true;
}

const struct bench_load bench_scale_loads[] = {
    {"scale.sessions", "an operation's time with 100 to 10,000 sessions", run_scale, 0},
    {"scale.clients", "the same with 10 to 1,000 clients", run_scale, 0},
    {"scale.threads", "the same with 1 to 64 data threads", run_scale, 0},
    {"scale.tokens", "the same with a session of 10,485 to 1,048,576 tokens", run_scale, 0},
    {NULL, NULL, NULL, 0},
};
