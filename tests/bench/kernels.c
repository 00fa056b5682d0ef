/* The frame of the kernels' benchmarks: memory, time and records. */
#include "tests/bench/kernels.h"

#include "kernels/isa.h"
#include "kvserver/base/memory.h"
#include "kvserver/base/random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const double run_seconds = 0.01;

const struct kernels_shape kernels_shapes[KERNELS_N_SHAPES] = {
    {"smollm2", 3, 64},
    {"8b", 4, 128},
};

double kernels_now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* ---- memory ------------------------------------------------------------------------------ */

void *kernels_alloc(size_t n, size_t bytes)
{
    void *memory = malloc(n * bytes);

    if (memory == NULL)
        bench_complain("memory: %zu bytes: refused", n * bytes);
    else
        memset(memory, 0, n * bytes);
    return memory;
}

void kernels_fill_normal(float *values, size_t n, uint64_t seed)
{
    struct kv_random random;

    kv_random_init(&random, seed);
    for (size_t i = 0; i < n; i++) {
        const uint64_t bits = kv_random_next(&random);
        int32_t sum = -2 * 0xffff;

        for (unsigned part = 0; part < 64; part += 16)
            sum += (int32_t)(bits >> part & 0xffff);
        values[i] = (float)sum * (1.7320508f / 65536); /* a sum of 4 has the variance 1/3 */
    }
}

const void **kernels_choose_rows(
    const struct kernels *kernels, size_t row_bytes, size_t run, size_t n, size_t *ret_n_turns)
{
    const size_t n_rows = kernels->bytes / row_bytes, n_groups = n_rows / run / KERNELS_GAP;
    const size_t n_turns = n_rows / n;
    const void **rows = kernels_alloc(n_turns * n, sizeof(*rows));
    struct kv_random random;

    if (rows == NULL)
        return NULL;
    kv_random_init(&random, run);
    for (size_t i = 0; i < n_turns * n; i++) {
        const size_t group = i / run % n_groups;

        if (i % run > 0)
            rows[i] = (const uint8_t *)rows[i - 1] + row_bytes;
        else
            rows[i] =
                kernels->from +
                (group * KERNELS_GAP + kv_random_below(&random, KERNELS_GAP)) * run * row_bytes;
    }
    *ret_n_turns = n_turns;
    return rows;
}

static bool fill(struct kernels *kernels, struct bench *bench)
{
    kernels->bench = bench;
    kernels->bytes = bench->data_bytes * 2;
    kernels->from = kv_memory_reserve(kernels->bytes);
    kernels->to = kv_memory_reserve(kernels->bytes);
    if (kernels->from == NULL || kernels->to == NULL) {
        bench_complain("memory: %zu bytes: refused", kernels->bytes);
        return false;
    }
    bench_fill(kernels->from, kernels->bytes, 5);
    for (size_t i = 0; i < kernels->bytes; i += sizeof(uint64_t)) {
        uint64_t numbers;

        memcpy(&numbers, kernels->from + i, sizeof(numbers));
        numbers &= 0xbfffbfffbfffbfff; /* exponents below that of 2 */
        memcpy(kernels->from + i, &numbers, sizeof(numbers));
    }
    memset(kernels->to, 1, kernels->bytes);
    return true;
}

struct kernels *kernels_open(struct bench *bench)
{
    if (bench->kernels != NULL)
        return bench->kernels;
    bench->kernels = kernels_alloc(1, sizeof(*bench->kernels));
    if (bench->kernels != NULL && !fill(bench->kernels, bench))
        bench_kernels_close(bench);
    return bench->kernels;
}

void bench_kernels_close(struct bench *bench)
{
    struct kernels *kernels = bench->kernels;

    if (kernels == NULL)
        return;
    if (kernels->from != NULL)
        kv_memory_release(kernels->from, kernels->bytes);
    if (kernels->to != NULL)
        kv_memory_release(kernels->to, kernels->bytes);
    free(kernels);
    bench->kernels = NULL;
}

/* ---- cases ------------------------------------------------------------------------------- */

struct ours {
    const struct kernels_case *one;
    size_t turns; /* of a run */
    size_t next;
};

struct limit {
    const struct kernels *kernels;
    const struct kernels_case *one;
    const struct kernels_need *need;
};

struct other {
    struct ours *ours;
    const struct kernels_other *way;
};

/* Seconds of a turn as a figure of the case's unit. */
static double in_unit(const struct kernels_case *one, double seconds)
{
    return strcmp(one->unit, "us") == 0 ? seconds * 1e6 : one->amount / seconds;
}

/* Returns all the seconds of a run. */
static double run_turns(struct ours *ours, double *ret_counted)
{
    const struct kernels_case *one = ours->one;
    const double begin = kernels_now();
    double counted = 0, all;

    for (size_t i = 0; i < ours->turns; i++)
        if (one->part != NULL)
            counted += one->part(one->arg, ours->next++);
        else
            one->turn(one->arg, ours->next++);
    all = kernels_now() - begin;
    *ret_counted = one->part != NULL ? counted : all;
    return all;
}

static bool measure_ours(void *arg, struct bench_sample *ret_sample)
{
    struct ours *ours = arg;
    double seconds;

    run_turns(ours, &seconds);
    ret_sample->value = in_unit(ours->one, seconds / (double)ours->turns);
    return true;
}

static bool measure_limit(void *arg, struct bench_sample *ret_sample)
{
    const struct limit *limit = arg;
    const double rate = kernels_limit_rate(limit->kernels, limit->need);

    ret_sample->value = in_unit(limit->one, limit->need->amount / rate);
    return true;
}

static bool measure_other(void *arg, struct bench_sample *ret_sample)
{
    const struct other *other = arg;
    struct ours *ours = other->ours;
    double seconds = 0;

    for (size_t i = 0; i < ours->turns; i++)
        seconds += other->way->part(ours->one->arg, ours->next++);
    ret_sample->value = in_unit(ours->one, seconds / (double)ours->turns);
    return true;
}

bool kernels_measure(const struct kernels *kernels, const struct kernels_case *one)
{
    struct ours ours = {.one = one, .turns = 1};
    struct limit limits[KERNELS_NEEDS_MAX];
    struct other others[KERNELS_OTHERS_MAX];
    double counted;
    struct bench_comparison comparison = {
        .name = one->name,
        .unit = one->unit,
        .params = one->params,
        .is_alone = true,
        .takes_best = true,
        .n_sides = 1 + one->n_needs + one->n_others,
        .sides = {{NULL, measure_ours, &ours}},
    };

    comparison.params.isa = kv_isa_name(kv_isa());
    for (unsigned i = 0; i < one->n_needs; i++) {
        limits[i] = (struct limit){kernels, one, &one->needs[i]};
        comparison.sides[i + 1] = (struct bench_side){kernels_limit_name(one->needs[i].limit),
                                                      measure_limit, &limits[i]};
    }
    for (unsigned i = 0; i < one->n_others; i++) {
        others[i] = (struct other){&ours, &one->others[i]};
        comparison.sides[1 + one->n_needs + i] =
            (struct bench_side){one->others[i].name, measure_other, &others[i]};
    }
    while (!kernels->bench->smoke && run_turns(&ours, &counted) < run_seconds)
        ours.turns *= 2;
    return bench_compare(kernels->bench, &comparison);
}

/* ---- loads ------------------------------------------------------------------------------- */

const struct bench_load bench_kernel_loads[] = {
    {"kernels.checksum", "CRC32C of bytes and of rows", kernels_checksum, 0},
    {"kernels.gather", "copies of scattered rows", kernels_gather, 0},
    {"kernels.keys", "exact scores of keys, in order and of candidates", kernels_keys, 0},
    {"kernels.copies", "4-bit copies of keys, and scores of candidates from them",
     kernels_copies, 0},
    {"kernels.select", "the k largest of n scores", kernels_select, 0},
    {"kernels.bytes", "the k largest of n bytes", kernels_bytes, 0},
    {"kernels.pq", "product quantisation: tables of queries", kernels_pq, 0},
    {"kernels.tile", "scores from packed codes", kernels_tile, 0},
    {"kernels.kmeans", "codes of keys, and steps of training", kernels_kmeans, 0},
    {"kernels.attend", "exact attention over rows, alone, in runs, and all", kernels_attend, 0},
    {"kernels.summary", "summaries of rows, and estimates from them", kernels_summary, 0},
    {"kernels.rope", "rotary embedding of keys", kernels_rope, 0},
    {"kernels.query.cold", "a query's rows by code, all steps", kernels_query, 0},
    {"kernels.query.hot", "the same codes again and again", kernels_query, 0},
    {"kernels.stages", "a layer's query as a node answers it, stage by stage", kernels_stages,
     0},
    {NULL, NULL, NULL, 0},
};
