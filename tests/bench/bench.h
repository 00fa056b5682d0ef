/* bench.h - what all loads of kv_bench share: how things are compared, timed and reported.
 *
 * A load compares what TopKV does with limits: what the same machine can do at best, measured
 * in the same minutes.  Two processors of a virtual machine may move apart and together again
 * while a program runs, and everything that crosses them changes two- to fourfold with that. So
 *
 *   run 1:  c2c | ours | limit | limit ... | c2c      c2c: round trip of one cache line between
 *   run 2:  c2c | ours | limit | limit ... | c2c           the two processors
 *   ...
 *
 * A run whose two c2c figures lie in different bins is thrown away; medians are taken over the
 * runs of one bin.
 *
 * Threads: one; the peers are processes.  Memory: as said per function.
 */
#ifndef KV_TESTS_BENCH_BENCH_H
#define KV_TESTS_BENCH_BENCH_H

#include "client/include/kvclient.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    BENCH_SIDES_MAX = 5, /* ours, two limits and two peers */
    BENCH_RUNS_MAX = 99,
    BENCH_WINDOW_MAX = 16,
};

struct bench {
    const char *kvserver;  /* path of the program */
    const char *transport; /* the only one wanted, or NULL */
    const char *mooncake;  /* the Python that has Mooncake, or NULL */
    const char *redis;     /* path of redis-server, or NULL */
    const char *tools;     /* folder of mooncake_bench.py */
    const char *folder;    /* temporary, for the nodes */
    unsigned runs;
    uint64_t data_bytes; /* cold data, each way */
    bool json;
    bool smoke;     /* few operations, one run: right or wrong only */
    bool quick;     /* a tenth of what is held: for a first look */
    int server_cpu; /* -1: there is one processor only */
    int client_cpu;
    unsigned n_nodes;        /* started so far */
    struct kernels *kernels; /* kernels.h; NULL: not made */
    bool has_header;         /* of the table */
};

/* ---- records ----------------------------------------------------------------------------- */

/* What tells one load from another of the same name; 0 and NULL are left out. */
struct bench_params {
    const char *transport; /* "tcp", "shm" */
    const char *shape;     /* the model's cache: "8b", "smollm2" */
    unsigned window;       /* operations in flight */
    size_t bytes;          /* payload of one operation */
    size_t request_bytes;
    unsigned rows;
    unsigned threads; /* data threads of the node */
    const char *data; /* "hot", "cold" */
    unsigned queries; /* query heads at once */
    unsigned n, k;    /* rows, and how many of them are chosen */
    unsigned run;     /* rows that lie side by side */
    unsigned rerank;  /* candidates for each of k */
    unsigned away;    /* per cent of the rows that are on disk only */
    const char *isa;  /* instruction set of the kernels */
    const char *form; /* of the codes: "cells", "tiles", "bytes" */
    unsigned chapter; /* rows with one codebook */
    unsigned group;   /* rows that share summaries; 0: 1,024 */
    const char *operation;
    const char *per;    /* what the value is divided by: "block" */
    const char *source; /* of a number of bytes: "tables", "rss" */
    unsigned units;     /* of a session */
    double block_bytes; /* all of a block's bookkeeping */
    double unit_bytes;  /* the same, divided by the units */
    double node_us;     /* the node's part of the value */
    double slowdown;    /* against the limit: 1 is the limit, higher is worse */
    const char *mark;   /* the value misses its aim: "ABOVE 2" */
};

struct bench_sample {
    double value;       /* in the comparison's unit */
    double p99;         /* the same unit; 0: not known */
    double p50;         /* of a load whose value is another; 0: not known */
    double overhead_us; /* the value without the node's work on the operation; 0: not known */
};

struct bench_side {
    const char *name; /* limit_name; of ours NULL */
    bool (*measure)(void *arg, struct bench_sample *ret_sample);
    void *arg;
};

/* sides[0] is ours.  Units "us" are better when less, all others when more. */
struct bench_comparison {
    const char *name;
    const char *unit;
    struct bench_params params;
    bool is_alone;   /* no second processor takes part: no c2c */
    bool takes_best; /* of the runs, not their median: nothing makes a side faster by chance */
    unsigned n_sides;
    struct bench_side sides[BENCH_SIDES_MAX];
};

/* Measures all sides in turn and reports one record per limit, or one without a limit.  false:
 * a side failed, and has said so. */
bool bench_compare(struct bench *bench, const struct bench_comparison *comparison);

/* A figure that has no second side in the same run. */
struct bench_figure {
    const char *name;
    const char *unit;
    struct bench_params params;
    double value, p99;
    const char *limit_name; /* NULL: none */
    double limit, ratio;
};

/* Reports it as a record. */
void bench_report(struct bench *bench, const struct bench_figure *figure);

/* After the last record. */
void bench_finish(const struct bench *bench);

/* A message on stderr: what: where: value. */
void bench_complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- time -------------------------------------------------------------------------------- */

double bench_now(void); /* seconds */

/* Takes one operation after another; turns into a sample. */
struct bench_watch {
    double *seconds; /* (n) */
    size_t n, room;
    double begin;
};

bool bench_watch_start(struct bench_watch *watch, size_t room); /* false: out of memory */
static inline void bench_watch_add(struct bench_watch *watch, double seconds)
{
    if (watch->n < watch->room)
        watch->seconds[watch->n++] = seconds;
}
/* Microseconds, median and p99 of all operations; frees the watch. */
void bench_watch_times(struct bench_watch *watch, struct bench_sample *ret_sample);
/* GB/s since the start, of operations of `bytes`; frees the watch. */
void bench_watch_rate(struct bench_watch *watch, size_t bytes, struct bench_sample *ret_sample);

/* Tells a loop that spins when nothing has moved for ten seconds; costs next to nothing. */
struct bench_stall {
    uint32_t turns;
    double until;
};
static inline bool bench_stalled(struct bench_stall *stall, bool has_moved)
{
    if (has_moved) {
        *stall = (struct bench_stall){0};
        return false;
    }
    if (++stall->turns % (1 << 16) != 0)
        return false;
    if (stall->until == 0)
        stall->until = bench_now() + 10;
    return bench_now() > stall->until;
}

/* As many operations as make a run of a sensible length: fewer in a smoke run. */
size_t bench_count(const struct bench *bench, size_t wanted);

/* The transports to measure: bench_transport(bench, 0), 1, ... until NULL. */
const char *bench_transport(const struct bench *bench, unsigned i);

/* ---- processes (process.c) --------------------------------------------------------------- */

/* Runs `work` in a child, and whatever happens to it, ends all processes that it left and
 * removes the folder.  Returns the exit status. */
int bench_supervise(struct bench *bench,
                    int (*work)(struct bench *bench, void *arg),
                    void *arg);

/* Removes a folder with all that is in it, if it exists. */
void bench_remove(const char *folder);

void bench_pin(int cpu); /* the calling thread; -1: nothing */

/* Starts a program that dies with this one.  `cpu` -1: wherever the system puts it.  Gives the
 * descriptors that are not NULL: a pipe to its stdin, and one from its stdout; or, if
 * ret_socket is not NULL, one end of a socket pair whose other end is its stdin. */
bool bench_spawn(
    char *const argv[], int cpu, int *ret_in, int *ret_out, int *ret_socket, pid_t *ret_pid);
/* Ends it with SIGTERM, in the end with SIGKILL.  false: it failed. */
bool bench_reap(pid_t pid);

/* Reads a line without its end.  false: none came in time. */
bool bench_read_line(int fd, char *line, size_t line_bytes, unsigned timeout_ms);

struct bench_node {
    pid_t pid;
    char address[64]; /* of its control port */
    char folder[600];
};

/* A kvserver of its own folder and free ports, which saves nothing.  `pinned`: on server_cpu. */
bool bench_node_start(struct bench *bench,
                      unsigned threads,
                      uint64_t memory_bytes,
                      bool pinned,
                      struct bench_node *ret_node);
/* The same of one that saves; in the folder of a node that was killed, unless that is empty. */
bool bench_node_start_saving(struct bench *bench,
                             unsigned threads,
                             uint64_t memory_bytes,
                             uint64_t disk_bytes,
                             struct bench_node *node);
void bench_node_kill(struct bench_node *node); /* SIGKILL */
bool bench_node_stop(struct bench_node *node);

/* A client of the node; complains itself.  NULL: failed. */
struct kv_client *bench_client_open(const struct bench_node *node, const char *transport);

/* ---- operations (pipeline.c) ------------------------------------------------------------- */

/* Keeps `window` operations in flight until n have ended well. */
struct bench_pipeline {
    struct kv_client *client;
    unsigned window;
    size_t n;
    kv_status_t (*begin)(void *load, size_t i, struct kv_op **ret_op);
    void *load;
};

/* Adds every operation's time to the watch.  false: one failed, and it was said. */
bool bench_pipeline_run(const struct bench_pipeline *pipeline, struct bench_watch *watch);

/* Finishes one operation; complains if it was not KV_OK. */
bool bench_finish_op(struct kv_client *client,
                     const char *what,
                     kv_status_t status,
                     struct kv_op *op);

/* Returns a number in a table of node 0: in the row that begins with a text, or, NULL, in the last.
 * Negative: it is not there, or the request failed, and that was said. */
double bench_table_number(struct kv_client *client,
                          const char *name,
                          const char *row,
                          const char *column);

/* Fills memory with bytes that repeat nowhere. */
void bench_fill(void *memory, size_t bytes, uint64_t seed);

/* ---- limits ------------------------------------------------------------------------------ */

/* GB/s of the disk that the folder is on, past the system's memory: pieces of 1 MB, four at once.
 * Reads what it has written, if `reads`. */
bool bench_raw_disk(struct bench *bench, uint64_t bytes, bool reads, double *ret_rate);

/* Messages between two processes: a request of out_bytes answered by back_bytes.  Neither end
 * keeps, checks or looks up anything; payload comes from cold memory and goes to cold memory.
 */
struct bench_wire; /* limit_messages.c: over the table of transports */
bool bench_wire_open(struct bench *bench, const char *transport, struct bench_wire **ret_wire);
void bench_wire_close(struct bench_wire *wire); /* NULL is allowed */

struct bench_socket; /* limit_socket.c: a loopback tcp connection, both ends spinning */
bool bench_socket_open(struct bench *bench, struct bench_socket **ret_socket);
void bench_socket_close(struct bench_socket *socket); /* NULL is allowed */

/* What a side's `arg` is for the measures below.  The unit is us with window 1 and `times`,
 * else GB/s of the larger of both sizes. */
struct bench_exchange {
    struct bench_wire *wire;
    struct bench_socket *socket;
    size_t out_bytes, back_bytes;
    unsigned window;
    size_t n;
    bool times;
};
bool bench_wire_measure(void *exchange, struct bench_sample *ret_sample);
bool bench_socket_measure(void *exchange, struct bench_sample *ret_sample);

/* The peers' side: what kv_bench runs as `kv_bench --peer KIND ...`.  Returns an exit status.
 */
int bench_wire_peer(const char *transport, uint64_t data_bytes, int cpu);
int bench_socket_peer(uint64_t data_bytes, int cpu);
int bench_prefill_peer(const char *address, const char *transport, bool publishes);
int bench_worst_peer(const char *address, const char *transport);

/* Memory of this process, limit_memory.c. */
struct bench_memory {
    uint8_t *from, *to;
    size_t bytes; /* of each */
    size_t row_bytes;
    size_t rows; /* per operation */
    size_t n;    /* operations */
    bool times;
};
bool bench_memory_open(struct bench *bench, struct bench_memory *ret_memory);
void bench_memory_close(struct bench_memory *memory);
bool bench_memory_copy(void *memory, struct bench_sample *ret_sample);   /* GB/s */
bool bench_memory_read(void *memory, struct bench_sample *ret_sample);   /* GB/s */
bool bench_memory_gather(void *memory, struct bench_sample *ret_sample); /* us or GB/s */

enum {
    BENCH_PREFIX_BLOCKS = 64, /* as mooncake_bench.py has it */
};

/* The leading store of the field, mooncake.c. */
struct bench_mooncake;
/* segment_bytes: memory for objects. */
bool bench_mooncake_open(struct bench *bench,
                         uint64_t segment_bytes,
                         struct bench_mooncake **ret_mooncake);
void bench_mooncake_close(struct bench_mooncake *mooncake);             /* NULL is allowed */
const char *bench_mooncake_name(const struct bench_mooncake *mooncake); /* "mooncake 0.3.13" */
struct bench_mooncake_load {
    struct bench_mooncake *mooncake;
    const char *verb; /* "put", "get"; of BENCH_PREFIX_BLOCKS objects at once: "prefix_put",
                         "prefix_match", "prefix_get" */
    size_t bytes;     /* of an object, or of as many */
    size_t n;
    bool times; /* the value is us, else GB/s */
};
bool bench_mooncake_measure(void *load, struct bench_sample *ret_sample);

/* Redis, redis.c. */
struct bench_redis;
bool bench_redis_open(struct bench *bench, struct bench_redis **ret_redis);
void bench_redis_close(struct bench_redis *redis);             /* NULL is allowed */
const char *bench_redis_name(const struct bench_redis *redis); /* "redis 7.0.15" */
struct bench_redis_load {
    struct bench_redis *redis;
    bool is_put;     /* SET, else GET, one value after the other: GB/s */
    uint8_t *values; /* (n, bytes) */
    size_t bytes;
    size_t n;
};
bool bench_redis_measure(void *load, struct bench_sample *ret_sample);

/* Kernels without a node, kernels.h. */
void bench_kernels_close(struct bench *bench); /* where there are none: nothing */

/* ---- loads ------------------------------------------------------------------------------- */

struct bench_load {
    const char *name; /* dotted */
    const char *summary;
    bool (*run)(struct bench *bench, const struct bench_load *load);
    size_t bytes; /* of an operation, where the load comes in sizes; bookkeeping: units */
};

extern const struct bench_load bench_machine_loads[]; /* each ends with a name of NULL */
extern const struct bench_load bench_rpc_loads[];
extern const struct bench_load bench_row_loads[];
extern const struct bench_load bench_query_loads[];
extern const struct bench_load bench_object_loads[];
extern const struct bench_load bench_kernel_loads[];
extern const struct bench_load bench_scale_loads[];
extern const struct bench_load bench_bookkeeping_loads[];
extern const struct bench_load bench_match_loads[];
extern const struct bench_load bench_prefix_loads[];
extern const struct bench_load bench_spilled_loads[];
extern const struct bench_load bench_disk_loads[];

#endif
