/* kernels.h - the frame of `kv_bench kernels`: kernels against what one processor can do.
 *
 * A family is a file kernels_NAME.c with a function that measures its cases, and a row of the
 * table in kernels.c.  The frame has the memory, the clock, the limits and the records: each
 * case alternates with its limits, and the best run of each counts, since whatever else a
 * machine does only makes them slower.  Time is the thread's own.
 *
 * Data is cold unless a case says "hot": turn after turn walks through `from` or `to`, each of
 * which is larger than all caches, and no case begins where the last run began.
 *
 * Kernels are those that the store would use: KV_ISA=scalar measures the slow ones.  Limits
 * take the best instructions that the processor has, whatever KV_ISA says.
 *
 * Threads: one.  Memory: the frame's.
 */
#ifndef KV_TESTS_BENCH_KERNELS_H
#define KV_TESTS_BENCH_KERNELS_H

#include "tests/bench/bench.h"

/* What a turn of a case cannot do without. */
enum kernels_limit {
    KERNELS_READ,   /* bytes read from memory, one after the other */
    KERNELS_COPY,   /* bytes copied by memcpy(); overwrites `to` */
    KERNELS_STREAM, /* bytes copied by stores that pass the caches by; overwrites `to` */
    KERNELS_UPDATE, /* bytes changed where they lie, but left as they are in `to` */
    KERNELS_ROWS,   /* bytes read of isolated rows, of each its first ones */
    KERNELS_CACHED, /* bytes read again and again, 128 KB that stay in a cache */
    KERNELS_FMA,    /* operations, two for each fused multiply and add */
};

struct kernels_need {
    enum kernels_limit limit;
    double amount; /* of one turn */
    /* KERNELS_ROWS: */
    size_t row_bytes;
    size_t part_bytes; /* of each row, whole cache lines */
};

struct kernels {
    struct bench *bench;
    size_t bytes;  /* of each */
    uint8_t *from; /* numbers of fp16 between -2 and 2; stays as it is */
    uint8_t *to;   /* the family's */
};

/* The one of this bench, made when it is first wanted; bench_kernels_close() ends it.  NULL: no
 * memory, said. */
struct kernels *kernels_open(struct bench *bench);

/* What a turn is compared with that is no limit of the frame. */
struct kernels_other {
    const char *name;
    double (*part)(void *arg, size_t i); /* returns seconds, for one turn of the case */
};

enum {
    KERNELS_NEEDS_MAX = BENCH_SIDES_MAX - 1, /* with others */
    KERNELS_OTHERS_MAX = 2,
};

struct kernels_case {
    const char *name; /* dotted, "kernels.FAMILY.CASE" */
    const char *unit; /* "us": a turn's time; else what a turn does, per second */
    double amount;    /* of a turn, in the unit's measure: 1e-9 * bytes for "GB/s" */
    struct bench_params params;
    unsigned n_needs;
    struct kernels_need needs[KERNELS_NEEDS_MAX];
    unsigned n_others;
    struct kernels_other others[KERNELS_OTHERS_MAX];
    void (*turn)(void *arg, size_t i); /* i counts up, from 0 on */
    /* Instead, where only a part of a turn counts: returns that part's seconds. */
    double (*part)(void *arg, size_t i);
    void *arg;
};

/* Measures and reports; the instruction set is added to the parameters.  false: failed, said.
 */
bool kernels_measure(const struct kernels *kernels, const struct kernels_case *one);

/* Seconds that this thread has run: what else the processor did in between does not count. */
double kernels_now(void);

/* The rate of a limit, in bytes or operations a second. */
double kernels_limit_rate(const struct kernels *kernels, const struct kernels_need *need);
const char *kernels_limit_name(enum kernels_limit limit);

/* Memory of a case; what is allocated is set to 0, and so was touched.  Says it if there is
 * none. */
void *kernels_alloc(size_t n, size_t bytes);

enum {
    KERNELS_GAP = 8, /* one of so many rows, or of runs, is chosen */
};

/* Chosen rows of `from`, in runs of `run`, ascending, with gaps that nothing can guess: `n` for
 * each of so many turns, which go through all there is a few times.  Free them; NULL: said. */
const void **kernels_choose_rows(
    const struct kernels *kernels, size_t row_bytes, size_t run, size_t n, size_t *ret_n_turns);

/* Numbers about as the normal distribution's, of variance 1. */
void kernels_fill_normal(float *values, size_t n, uint64_t seed);

/* ---- shapes ------------------------------------------------------------------------------ */

/* The cache of a model: fp16, a row being key and value. */
struct kernels_shape {
    const char *name;
    uint32_t n_queries; /* query heads of a KV head */
    uint32_t d;
};
enum {
    KERNELS_N_SHAPES = 2,
};
extern const struct kernels_shape kernels_shapes[KERNELS_N_SHAPES];

static inline size_t kernels_key_bytes(const struct kernels_shape *shape)
{
    return (size_t)shape->d * 2;
}
static inline size_t kernels_row_bytes(const struct kernels_shape *shape)
{
    return kernels_key_bytes(shape) * 2;
}

/* ---- families ---------------------------------------------------------------------------- */

bool kernels_attend(struct bench *bench, const struct bench_load *load);
bool kernels_bytes(struct bench *bench, const struct bench_load *load);
bool kernels_checksum(struct bench *bench, const struct bench_load *load);
bool kernels_copies(struct bench *bench, const struct bench_load *load);
bool kernels_gather(struct bench *bench, const struct bench_load *load);
bool kernels_keys(struct bench *bench, const struct bench_load *load);
bool kernels_summary(struct bench *bench, const struct bench_load *load);
bool kernels_rope(struct bench *bench, const struct bench_load *load);
bool kernels_tile(struct bench *bench, const struct bench_load *load);
bool kernels_select(struct bench *bench, const struct bench_load *load);
bool kernels_kmeans(struct bench *bench, const struct bench_load *load);
bool kernels_pq(struct bench *bench, const struct bench_load *load);
bool kernels_query(struct bench *bench, const struct bench_load *load);
bool kernels_stages(struct bench *bench, const struct bench_load *load);

#endif
