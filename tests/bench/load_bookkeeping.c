/* Bytes that a node needs to know which rows it has: the memory of blocks less that of their
 * rows and of the rows' CRCs.
 *
 *   bookkeeping.32  blocks of sessions with 32 units
 *   bookkeeping.8   with 8
 *   bookkeeping.9   with 9, whose CRCs and records are of no round size
 *
 * Rows are as small as they may be (one element of bf16, keys only), so that many blocks fit.
 * Figures are differences between a node that holds all blocks and the same node when it held an
 * eighth of them: what a node needs when it is empty is not in them.  `tables` is what the node
 * counts as memory in use, `rss` is what the system has given to its process. */
#include "tests/bench/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    ROW_BYTES = 2,
    CRC_BYTES = 4,
    SESSION_BLOCKS = 256,
    PUT_BLOCKS = 32,
    AIM_BLOCK_BYTES = 64,
    AIM_UNIT_BYTES = 8,
    LEASE_MS = 600000,
};

struct books {
    uint32_t units;
    uint32_t n_blocks; /* that the node has */
    struct bench_node node;
    bool has_node;
    struct kv_client *client;
    struct kv_buffer *rows;
    struct kv_model_info model;
    struct kv_session **sessions;
    uint32_t n_sessions;
};

/* What the node says, and what the system says of it. */
struct held {
    uint32_t n_blocks;
    double used, rss; /* bytes */
};

static bool read_rss(pid_t pid, double *ret_bytes)
{
    char path[64];
    unsigned long long all, resident;
    FILE *file;
    bool is_good;

    snprintf(path, sizeof(path), "/proc/%d/statm", (int)pid);
    file = fopen(path, "r");
    if (file == NULL)
        return false;
    is_good = fscanf(file, "%llu %llu", &all, &resident) == 2;
    fclose(file);
    *ret_bytes = (double)resident * (double)sysconf(_SC_PAGESIZE);
    return is_good;
}

/* The row `name` of the table `status`. */
static bool read_status(struct kv_client *client, const char *name, double *ret_number)
{
    *ret_number = bench_table_number(client, "status", name, "value");
    return *ret_number >= 0;
}

static bool look(struct books *books, struct held *ret_held)
{
    ret_held->n_blocks = books->n_blocks;
    if (!read_status(books->client, "memory_used_bytes", &ret_held->used))
        return false;
    if (read_rss(books->node.pid, &ret_held->rss))
        return true;
    bench_complain("bookkeeping: /proc/%d/statm: cannot be read", (int)books->node.pid);
    return false;
}

/* ---- set-up ------------------------------------------------------------------------------ */

static bool add_session(struct books *books)
{
    const struct kv_session_options options = {.lease_ms = LEASE_MS};
    struct kv_rows box = {.n_layers = 1, .n_tokens = PUT_BLOCKS * KV_BLOCK_TOKENS};
    const struct kv_rows_io io = {.buffer = books->rows};
    struct kv_session *session = NULL;
    struct kv_op *op;
    kv_status_t status = kv_open_begin(books->client, &books->model, &options, 0, &op);

    if (status == KV_OK && kv_wait(op) == KV_OK)
        session = kv_op_session(op);
    if (!bench_finish_op(books->client, "open", status, op))
        return false;
    books->sessions[books->n_sessions++] = session;
    for (uint32_t block = 0; block < SESSION_BLOCKS; block += PUT_BLOCKS) {
        box.token_begin = block * KV_BLOCK_TOKENS;
        status = kv_put_begin(session, &box, &io, 0, &op);
        if (!bench_finish_op(books->client, "put", status, op))
            return false;
        books->n_blocks += PUT_BLOCKS;
    }
    return true;
}

static bool fill(struct books *books, uint32_t n_blocks)
{
    while (books->n_blocks < n_blocks)
        if (!add_session(books))
            return false;
    return true;
}

static bool
open_books(struct bench *bench, uint32_t units, uint32_t n_blocks, struct books *books)
{
    const size_t put_bytes = (size_t)PUT_BLOCKS * KV_BLOCK_TOKENS * units * ROW_BYTES;
    const char *transport = bench_transport(bench, 0);
    uint16_t *values;

    memset(books, 0, sizeof(*books));
    books->units = units;
    snprintf(books->model.name, sizeof(books->model.name), "bench-bookkeeping-%u", units);
    memcpy(books->model.fingerprint.bytes, "bookkeeping", 11);
    books->model.fingerprint.bytes[15] = (uint8_t)units;
    kv_schema_uniform(&books->model.schema, 1, units, 1, 0, KV_BF16);
    books->sessions = calloc(n_blocks / SESSION_BLOCKS + 1, sizeof(struct kv_session *));
    books->has_node = books->sessions != NULL &&
                      bench_node_start(bench, 1, UINT64_C(4) << 30, true, &books->node);
    books->client = books->has_node ? bench_client_open(&books->node, transport) : NULL;
    if (books->client == NULL ||
        kv_buffer_alloc(books->client, put_bytes, &books->rows) != KV_OK)
        return false;
    values = kv_buffer_data(books->rows);
    for (size_t i = 0; i < put_bytes / sizeof(*values); i++)
        values[i] = (uint16_t)(0x3f80 + i % 64); /* from 1 to 1.5 */
    return true;
}

static void close_books(struct books *books)
{
    /* The client frees the sessions and the buffer. */
    kv_client_close(books->client);
    if (books->has_node && !bench_node_stop(&books->node))
        bench_complain("bookkeeping: the node did not stop");
    free(books->sessions);
}

/* ---- figures ----------------------------------------------------------------------------- */

static void report(struct bench *bench,
                   const char *name,
                   const char *source,
                   const struct books *books,
                   double bytes,
                   uint32_t n_blocks)
{
    const double unit_rows = (double)KV_BLOCK_TOKENS * (ROW_BYTES + CRC_BYTES);
    const double block_bytes = bytes / n_blocks - unit_rows * books->units;
    const double value = block_bytes - AIM_UNIT_BYTES * (double)books->units;

    bench_report(bench, &(struct bench_figure){
                            .name = name,
                            .unit = "B",
                            .params = {.source = source,
                                       .per = "block",
                                       .units = books->units,
                                       .n = books->n_blocks,
                                       .block_bytes = block_bytes,
                                       .unit_bytes = block_bytes / books->units,
                                       .mark = value > AIM_BLOCK_BYTES ? "ABOVE 64" : NULL},
                            .value = value,
                            .limit_name = "aim: 64, and 8 a unit",
                            .limit = AIM_BLOCK_BYTES,
                            .ratio = AIM_BLOCK_BYTES / value,
                        });
}

static bool run_bookkeeping(struct bench *bench, const struct bench_load *load)
{
    const uint32_t units = (uint32_t)load->bytes;
    uint32_t n_blocks = 2048 * 1024 / units; /* 65,536 of 32 units */
    struct books books;
    struct held few, all;
    bool is_good;

    if (bench->quick)
        n_blocks /= 8;
    if (bench->smoke)
        n_blocks = 8 * SESSION_BLOCKS;
    is_good = open_books(bench, units, n_blocks, &books) && fill(&books, n_blocks / 8) &&
              look(&books, &few) && fill(&books, n_blocks) && look(&books, &all);
    if (is_good) {
        const uint32_t n = all.n_blocks - few.n_blocks;

        report(bench, load->name, "tables", &books, all.used - few.used, n);
        report(bench, load->name, "rss", &books, all.rss - few.rss, n);
    }
    close_books(&books);
    return is_good;
}

const struct bench_load bench_bookkeeping_loads[] = {
    {"bookkeeping.32", "a node's bytes per block of 32 units, less rows and CRCs",
     run_bookkeeping, 32},
    {"bookkeeping.8", "the same with 8 units", run_bookkeeping, 8},
    {"bookkeeping.9", "the same with 9 units", run_bookkeeping, 9},
    {NULL, NULL, NULL, 0},
};
