/* Every allocation of a node and of its clients fails once, alone and with all after it: in a
 * run that is the same each time but for that, nothing aborts, what fails says KV_NO_MEMORY or
 * may be tried again, and all that was stored is there, right, when there is memory again.
 *
 *     test_faults_memory [FIRST [STEP]]      the FIRSTth allocation, then every STEPth
 *
 * One thread drives two nodes with two data threads each and two clients over the loopback, on a
 * virtual clock.  Each run is a process of its own: leaks are the address sanitizer's to find.
 */
#include "client/client.h"
#include "client/control_message.h"
#include "kvserver/base/clock.h"
#include "kvserver/disk/disk.h"
#include "kvserver/store/node.h"
#include "tests/support/failing_memory.h"
#include "tests/support/rows.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    N_NODES = 2,
    N_THREADS = 2,
    N_CLIENTS = 2,
    N_TOKENS = 1200,
    N_MORE = 8,       /* appended, one by one */
    FORKED_AT = 1100, /* within a block */
    N_OBJECTS = 3,
    OBJECT_BYTES = 300 << 10,
    BUFFER_BYTES = 8 << 20,
    TURN_US = 100,
    TURNS_MAX = 200000, /* of one operation */
    TRIES = 4,          /* before memory comes back, and after that */
    TABLES = 5,
    N_BLOCKS = N_TOKENS / KV_BLOCK_TOKENS, /* published */
    N_COMMON = 4,                          /* of them, that both nodes keep in the end */
};

static struct {
    struct kv_clock clock;
    struct kv_transport *transport;
    struct kv_disk *disks[N_NODES];
    struct kvs_node *nodes[N_NODES];
    struct {
        struct kv_client *client;
        struct kv_buffer *out, *in;
    } sides[N_CLIENTS];
    struct kv_model_info model;
    struct kv_ticket ticket;
    struct kv_id128 names[N_BLOCKS];
    struct kv_session *session, *fork, *resumed, *attached;
    unsigned verb; /* of objects */
    const char *table;
    uint32_t tokens; /* of the step */
} run;

static const char *step;

static void die(const char *what, const char *detail)
{
    fprintf(stderr, "%s: %s: %s\n", step, what, detail);
    exit(3);
}

/* ---- the world --------------------------------------------------------------------------- */

static void turn(void)
{
    for (unsigned node = 0; node < N_NODES; node++) {
        if (run.nodes[node] == NULL)
            continue;
        for (uint32_t i = 0; i < N_THREADS; i++)
            kvs_node_data_step(run.nodes[node], i);
        kvs_node_control_step(run.nodes[node]);
    }
    for (unsigned i = 0; i < N_CLIENTS; i++)
        if (run.sides[i].client != NULL)
            kv_poll(run.sides[i].client);
    run.clock.virtual_us += TURN_US;
}

/* The operation's outcome.  It stays to be looked at where it is KV_OK. */
static kv_status_t outcome(kv_status_t begun, struct kv_op **op)
{
    kv_status_t status = begun;

    if (begun != KV_OK)
        return begun;
    for (unsigned i = 0; i < TURNS_MAX; i++) {
        status = kv_op_status(*op);
        if (status != KV_IN_PROGRESS)
            break;
        turn();
    }
    if (status == KV_IN_PROGRESS)
        die("it does not end", "");
    if (status != KV_OK) {
        kv_op_free(*op);
        *op = NULL;
    }
    return status;
}

static kv_status_t finished(kv_status_t begun, struct kv_op **op)
{
    const kv_status_t status = outcome(begun, op);

    if (status == KV_OK)
        kv_op_free(*op);
    return status;
}

/* What an operation may end with where memory fails. */
static bool may_fail_with(kv_status_t status)
{
    return status == KV_NO_MEMORY || status == KV_BUSY || status == KV_DEADLINE ||
           status == KV_UNREACHABLE || status == KV_NOT_READY;
}

/* One thing to do, again and again until it is done: first with memory as it is, then with all
 * there is. */
static void must(const char *name, kv_status_t (*what)(void))
{
    step = name;
    for (unsigned i = 0; i < 2 * TRIES; i++) {
        const kv_status_t status = what();

        if (status == KV_OK)
            return;
        if (!may_fail_with(status))
            die(kv_status_name(status),
                run.sides[0].client != NULL ? kv_client_detail(run.sides[0].client) : "");
        if (i == TRIES)
            failing_memory_arm(0, false);
    }
    die("it never succeeds", "with memory back");
}

/* ---- what is done ------------------------------------------------------------------------ */

static const char *const node_names[N_NODES] = {"a", "b"};

static kv_status_t make_nodes(void)
{
    struct kvs_node_config config = {
        .memory_bytes = 64 << 20,
        .n_threads = N_THREADS,
        .sessions_max = 16,
        .clients_max = 8,
        .clock = &run.clock,
        .message_control = true,
    };
    const struct kv_transport_config transport = {.transports = NULL};
    char detail[256] = "";
    kv_status_t status = KV_OK;

    if (run.transport == NULL) {
        status = kv_transport_loopback.open(&transport, &run.transport, detail, sizeof(detail));
        if (status != KV_OK)
            return status;
    }
    config.transport = run.transport;
    for (unsigned i = 0; status == KV_OK && i < N_NODES; i++) {
        if (run.disks[i] == NULL)
            run.disks[i] = kv_disk_memory_open(&run.clock, 0);
        if (run.disks[i] == NULL)
            return KV_NO_MEMORY;
        config.name = node_names[i];
        config.seed = i + 1;
        config.disk = run.disks[i];
        if (run.nodes[i] == NULL)
            status = kvs_node_create(&config, &run.nodes[i], detail, sizeof(detail));
    }
    return status;
}

static kv_status_t make_clients(void)
{
    struct kvc_node_setup remotes[N_NODES];
    const struct kvc_client_setup setup = {
        .nodes = remotes,
        .n_nodes = N_NODES,
        .transport = run.transport,
        .open_control = kvc_control_message_open,
        .clock = &run.clock,
        .seed = 7,
        .name = "test",
        .deadline_ms = 4000,
        .peer_timeout_ms = 1000,
        .retry_ms = 50,
    };

    for (unsigned i = 0; i < N_NODES; i++)
        remotes[i] = (struct kvc_node_setup){.name = node_names[i],
                                             .address = kvs_node_address(run.nodes[i]),
                                             .mode = KV_CHANNEL_NETWORK};
    for (unsigned i = 0; i < N_CLIENTS; i++) {
        kv_status_t status = KV_OK;

        if (run.sides[i].client == NULL)
            status = kvc_client_create(&setup, &run.sides[i].client);
        if (status == KV_OK && run.sides[i].out == NULL)
            status = kv_buffer_alloc(run.sides[i].client, BUFFER_BYTES, &run.sides[i].out);
        if (status == KV_OK && run.sides[i].in == NULL)
            status = kv_buffer_alloc(run.sides[i].client, BUFFER_BYTES, &run.sides[i].in);
        if (status != KV_OK)
            return status;
    }
    return KV_OK;
}

/* Sixteen sessions fit: if one does not, the reason is memory. */
static void expect_reason(kv_status_t status)
{
    const char *detail = kv_client_detail(run.sides[0].client);

    if (status != KV_OK && strstr(detail, "too many sessions") != NULL)
        die("out of memory is reported as", detail);
}

static kv_status_t open_session(void)
{
    const struct kv_session_options options = {.block_names = run.names,
                                               .n_block_names = N_BLOCKS};
    static uint32_t tokens[N_TOKENS];
    struct kv_op *op = NULL;

    kv_prompt_names(run.sides[0].client, &run.model, tokens, N_BLOCKS * KV_BLOCK_TOKENS, NULL,
                    0, run.names);
    const kv_status_t status =
        outcome(kv_open_begin(run.sides[0].client, &run.model, &options, 0, &op), &op);
    expect_reason(status);
    if (status != KV_OK)
        return status;
    run.session = kv_op_session(op);
    kv_op_free(op);
    kv_session_ticket(run.session, &run.ticket);
    return KV_OK;
}

/* Rows of numbers: below 2, which fp16 has bit 14 for. */
static void make_finite(void *rows, size_t bytes)
{
    uint16_t *elements = rows;

    for (size_t i = 0; i < bytes / sizeof(*elements); i++)
        elements[i] &= 0xbfff;
}

static void make_box(void *at, const struct kv_rows *box)
{
    test_box(at, &run.model.schema, box, 1);
    make_finite(at, kv_rows_bytes(&run.model.schema, box));
}

static struct kv_rows box_of(uint32_t begin, uint32_t n_tokens)
{
    return (struct kv_rows){
        .n_layers = run.model.schema.n_layers, .token_begin = begin, .n_tokens = n_tokens};
}

static kv_status_t put_rows(void)
{
    const struct kv_rows box = box_of(0, N_TOKENS);
    const struct kv_rows_io io = {.buffer = run.sides[0].out};
    struct kv_op *op = NULL;

    make_box(kv_buffer_data(run.sides[0].out), &box);
    return finished(kv_put_begin(run.session, &box, &io, 0, &op), &op);
}

static kv_status_t append_row(void)
{
    const struct kv_rows box = box_of(run.tokens, 1);
    const struct kv_rows_io io = {.buffer = run.sides[0].out};
    struct kv_op *op = NULL;

    make_box(kv_buffer_data(run.sides[0].out), &box);
    return finished(kv_append_begin(run.session, &box, &io, 0, &op), &op);
}

static kv_status_t index_rows(void)
{
    const struct kv_index_options index = {.tokens = N_TOKENS,
                                           .chapter_blocks = 8,
                                           .m = 2,
                                           .bits = 6,
                                           .iterations = 2,
                                           .seed = 1,
                                           .summaries = 16,
                                           .wait = true};
    struct kv_op *op = NULL;

    return finished(kv_index_begin(run.session, &index, 0, &op), &op);
}

static kv_status_t query_as(enum kv_answer answer)
{
    static float vectors[8 * 64];
    const struct kv_range range = {4, N_TOKENS};
    const struct kv_rows_io io = {.buffer = run.sides[0].in};
    const struct kv_query query = {.layer = 1,
                                   .n_queries = 2,
                                   .queries = vectors,
                                   .scale = 0.125f,
                                   .merge = KV_MERGE_SUM,
                                   .answer = answer,
                                   .k = 40,
                                   .rerank = 4,
                                   .summaries = answer == KV_ANSWER_ATTEND ? 16 : 0,
                                   .n_ranges = 1,
                                   .ranges = &range};
    struct kv_op *op = NULL;

    for (unsigned i = 0; i < sizeof(vectors) / sizeof(vectors[0]); i++)
        vectors[i] = (float)(i * 37 % 101) / 50 - 1;
    const kv_status_t status = outcome(kv_query_begin(run.session, &query, &io, 0, &op), &op);
    if (status != KV_OK)
        return status;
    struct kv_query_result found;
    if (kv_op_query_result(op, 0, &found) != KV_OK || found.n_selected != 40)
        die("an answer", "without its rows");
    for (uint32_t i = 0; answer == KV_ANSWER_ROWS && i < found.n_ids; i++) {
        const uint32_t row_bytes = run.model.schema.layers[1].row_bytes;
        uint8_t row[256];

        test_row(row, row_bytes, 1, 1, 0, found.ids[i]);
        make_finite(row, row_bytes);
        if (memcmp((const uint8_t *)found.rows + (size_t)i * row_bytes, row, row_bytes) != 0)
            die("a row", "is another");
    }
    kv_op_free(op);
    return KV_OK;
}

static kv_status_t query_rows(void)
{
    return query_as(KV_ANSWER_ROWS);
}

static kv_status_t query_attended(void)
{
    return query_as(KV_ANSWER_ATTEND);
}

/* All rows before run.tokens, by their CRCs, their bytes too. */
static kv_status_t read_of(struct kv_session *session, unsigned side)
{
    const struct kv_rows box = box_of(0, run.tokens);
    const struct kv_rows_io io = {.buffer = run.sides[side].in};
    struct kv_op *op = NULL;
    static uint8_t rows[BUFFER_BYTES];
    const size_t bytes = kv_rows_bytes(&run.model.schema, &box);

    memset(kv_buffer_data(run.sides[side].in), 0xdd, bytes);
    const kv_status_t status = finished(kv_read_begin(session, &box, &io, 0, &op), &op);
    if (status != KV_OK)
        return status;
    make_box(rows, &box);
    if (memcmp(rows, kv_buffer_data(run.sides[side].in), bytes) != 0)
        die("rows", "are others");
    return KV_OK;
}

static kv_status_t read_rows(void)
{
    return read_of(run.session, 0);
}

/* A fork or a truncate that ended without an answer may have been done: then the session is a
 * generation further on. */
static kv_status_t take_up(kv_status_t status, struct kv_session **session)
{
    struct kv_ticket ticket;
    struct kv_op *op = NULL;

    if (status != KV_STALE)
        return status;
    kv_session_ticket(*session, &ticket);
    status = outcome(kv_resume_begin(run.sides[0].client, &ticket, 0, &op), &op);
    if (status == KV_OK) {
        kv_session_free(*session);
        *session = kv_op_session(op);
        kv_op_free(op);
    }
    return status == KV_OK ? KV_BUSY : status;
}

static kv_status_t fork_session(void)
{
    struct kv_op *op = NULL;
    const kv_status_t status = outcome(kv_fork_begin(run.session, FORKED_AT, 0, &op), &op);

    expect_reason(status);
    if (status != KV_OK)
        return take_up(status, &run.session);
    run.fork = kv_op_session(op);
    kv_op_free(op);
    return KV_OK;
}

static kv_status_t read_fork(void)
{
    return read_of(run.fork, 0);
}

static kv_status_t truncate_fork(void)
{
    struct kv_op *op = NULL;

    return take_up(finished(kv_truncate_begin(run.fork, 700, 0, &op), &op), &run.fork);
}

static kv_status_t resume_session(void)
{
    struct kv_op *op = NULL;
    const kv_status_t status =
        outcome(kv_resume_begin(run.sides[1].client, &run.ticket, 0, &op), &op);

    if (status != KV_OK)
        return status;
    run.resumed = kv_op_session(op);
    kv_op_free(op);
    return KV_OK;
}

static kv_status_t read_resumed(void)
{
    return read_of(run.resumed, 1);
}

/* Until all is kept: a node without memory for it keeps less. */
static kv_status_t publish_blocks(void)
{
    const struct kv_publish blocks = {.n_names = N_BLOCKS, .names = run.names};
    struct kv_op *op = NULL;
    const kv_status_t status = outcome(kv_publish_begin(run.session, &blocks, 0, &op), &op);

    if (status != KV_OK)
        return status;
    const uint32_t kept = kv_op_tokens(op);
    kv_op_free(op);
    return kept == N_BLOCKS * KV_BLOCK_TOKENS ? KV_OK : KV_NO_MEMORY;
}

static kv_status_t match_blocks(void)
{
    struct kv_op *op = NULL;
    const kv_status_t status =
        outcome(kv_match_begin(run.sides[0].client, run.names, N_BLOCKS, 0, &op), &op);
    uint32_t n;

    if (status != KV_OK)
        return status;
    const uint32_t found = kv_op_tokens(op);
    (void)kv_op_matches(op, &n);
    kv_op_free(op);
    if (found > N_BLOCKS * KV_BLOCK_TOKENS || n > N_NODES)
        die("a match", "of more than there is");
    return found == N_BLOCKS * KV_BLOCK_TOKENS ? KV_OK : KV_NO_MEMORY;
}

/* One of the nodes keeps less than the other. */
static kv_status_t evict_blocks(void)
{
    const struct kv_prefix prefix = {.verb = KV_PREFIX_EVICT, .name = &run.names[N_COMMON]};
    struct kv_op *op = NULL;

    return finished(kv_prefix_begin(run.sides[0].client, 1, &prefix, 0, &op), &op);
}

/* A session begins with what both keep.  A publish that ended without an answer may have been done
 * only after the eviction. */
static kv_status_t attach_blocks(void)
{
    const struct kv_session_options options = {.block_names = run.names,
                                               .n_block_names = N_BLOCKS};
    struct kv_op *op = NULL;
    const kv_status_t status =
        outcome(kv_open_begin(run.sides[1].client, &run.model, &options, 0, &op), &op);

    if (status != KV_OK)
        return status;
    const uint32_t tokens = kv_op_tokens(op);
    run.attached = kv_op_session(op);
    kv_op_free(op);
    if (tokens == N_COMMON * KV_BLOCK_TOKENS)
        return KV_OK;
    kv_session_free(run.attached);
    run.attached = NULL;
    if (tokens > N_COMMON * KV_BLOCK_TOKENS)
        (void)evict_blocks();
    return KV_NO_MEMORY;
}

static kv_status_t read_attached(void)
{
    return read_of(run.attached, 1);
}

static kv_status_t list_objects(void)
{
    const struct kv_object_list_options options = {.prefix = "some/"};
    struct kv_op *op = NULL;

    return finished(kv_object_list_begin(run.sides[0].client, 0, &options, 0, &op), &op);
}

static kv_status_t objects(void)
{
    static const char *const names[N_OBJECTS] = {"a", "some/longer name", "c"};
    struct kv_object all[N_OBJECTS];
    struct kv_buffer *buffer = run.verb == KV_OBJECT_PUT ? run.sides[0].out : run.sides[0].in;
    struct kv_op *op = NULL;

    memset(all, 0, sizeof(all));
    for (unsigned i = 0; i < N_OBJECTS; i++) {
        all[i].name = names[i];
        all[i].buffer = buffer;
        all[i].offset = (size_t)i * OBJECT_BYTES;
        all[i].bytes = OBJECT_BYTES;
        if (run.verb == KV_OBJECT_PUT)
            test_fill((uint8_t *)kv_buffer_data(buffer) + all[i].offset, OBJECT_BYTES, i);
    }
    const kv_status_t status =
        finished(kv_objects_begin(run.sides[0].client, (enum kv_object_verb)run.verb, all,
                                  N_OBJECTS, 0, &op),
                 &op);
    for (unsigned i = 0; status == KV_OK && run.verb == KV_OBJECT_GET && i < N_OBJECTS; i++)
        if (!test_is_filled((uint8_t *)kv_buffer_data(buffer) + all[i].offset, OBJECT_BYTES, i))
            die("an object", "is another");
    /* A try before this one may have done it, and not have lived to say so. */
    return status == KV_NOT_FOUND && run.verb == KV_OBJECT_DELETE ? KV_OK : status;
}

static kv_status_t table(void)
{
    struct kv_op *op = NULL;

    return finished(kv_table_begin(run.sides[0].client, 0, run.table, 0, &op), &op);
}

static kv_status_t close_session(void)
{
    struct kv_op *op = NULL;
    const kv_status_t status = finished(kv_close_begin(run.resumed, 0, &op), &op);

    return status == KV_NOT_FOUND ? KV_OK : status;
}

static void scenario(void)
{
    static const uint16_t heads[] = {2, 2, 2};
    static const char *const tables[TABLES] = {"status", "sessions", "clients", "ops", "stats"};
    char *text = NULL;
    size_t bytes = 0;

    test_model(&run.model, "failing memory", 3, heads, 64, 64);
    kv_clock_virtual_init(&run.clock, 1000000);
    must("nodes", make_nodes);
    must("clients", make_clients);
    must("open", open_session);
    must("put", put_rows);
    for (run.tokens = N_TOKENS; run.tokens < N_TOKENS + N_MORE; run.tokens++)
        must("append", append_row);
    must("index", index_rows);
    must("query for rows", query_rows);
    must("query for attention", query_attended);
    must("read", read_rows);
    for (run.verb = KV_OBJECT_PUT; run.verb <= KV_OBJECT_DELETE; run.verb++) {
        must("objects", objects);
        must("list of objects", list_objects);
    }
    must("publish", publish_blocks);
    must("match", match_blocks);
    must("evict", evict_blocks);
    must("open with a prefix", attach_blocks);
    run.tokens = N_COMMON * KV_BLOCK_TOKENS;
    must("read the prefix", read_attached);
    for (unsigned i = 0; i < TABLES; i++) {
        run.table = tables[i];
        must("table", table);
    }
    must("fork", fork_session);
    run.tokens = FORKED_AT;
    must("read the fork", read_fork);
    must("truncate", truncate_fork);
    run.tokens = 700;
    must("read what is left", read_fork);
    run.tokens = N_TOKENS + N_MORE;
    must("resume", resume_session);
    must("read again", read_resumed);
    FILE *metrics = open_memstream(&text, &bytes);
    if (metrics != NULL) {
        kvs_node_metrics(run.nodes[0], metrics);
        fclose(metrics);
        free(text);
    }
    must("close", close_session);
}

static void tear_down(void)
{
    kv_session_free(run.session);
    kv_session_free(run.fork);
    kv_session_free(run.resumed);
    kv_session_free(run.attached);
    for (unsigned i = 0; i < N_CLIENTS; i++)
        kv_client_close(run.sides[i].client);
    memset(run.sides, 0, sizeof(run.sides));
    for (unsigned i = 0; i < 100; i++)
        turn();
    for (unsigned i = 0; i < N_NODES; i++) {
        if (run.nodes[i] != NULL)
            kvs_node_check_memory(run.nodes[i]);
        kvs_node_destroy(run.nodes[i]);
        kv_disk_close(run.disks[i]);
    }
    if (run.transport != NULL)
        run.transport->ops->close(run.transport);
}

/* ---- all of them ------------------------------------------------------------------------- */

/* One run; how many allocations there were comes back by the pipe. */
static void child(int pipe_in, uint64_t nth, bool and_on)
{
    uint64_t calls;

    failing_memory_arm(nth, and_on);
    scenario();
    tear_down();
    calls = failing_memory_calls();
    if (write(pipe_in, &calls, sizeof(calls)) != sizeof(calls))
        exit(4);
    exit(0);
}

/* false: it has failed, and was named.  *ret_calls: 0 where memory came back on the way. */
static bool one_run(uint64_t nth, bool and_on, uint64_t *ret_calls)
{
    int ends[2], status;
    pid_t pid;

    *ret_calls = 0;
    fflush(NULL);
    if (pipe(ends) != 0 || (pid = fork()) < 0) {
        perror("fork");
        exit(1);
    }
    if (pid == 0) {
        close(ends[0]);
        child(ends[1], nth, and_on);
    }
    close(ends[1]);
    if (read(ends[0], ret_calls, sizeof(*ret_calls)) < 0)
        *ret_calls = 0;
    close(ends[0]);
    waitpid(pid, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return true;
    fprintf(stderr, "allocation %llu%s: %s %d\n", (unsigned long long)nth, and_on ? "+" : "",
            WIFSIGNALED(status) ? "signal" : "exit status",
            WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    return false;
}

int main(int argc, char **argv)
{
    const uint64_t begin = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    const uint64_t by = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    uint64_t calls, n_all, n_failed = 0, n_runs = 0;

    if (!one_run(0, false, &n_all) || n_all == 0)
        return 1;
    printf("%llu allocations\n", (unsigned long long)n_all);
    for (uint64_t nth = begin; nth <= n_all && by > 0; nth += by)
        for (unsigned and_on = 0; and_on < 2; and_on++, n_runs++)
            n_failed += !one_run(nth, and_on != 0, &calls);
    printf("%llu runs, %llu failed\n", (unsigned long long)n_runs,
           (unsigned long long)n_failed);
    return n_failed > 0;
}
