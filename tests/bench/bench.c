/* Comparisons, records and time. */
#define _GNU_SOURCE
#include "tests/bench/bench.h"

#include "kvserver/base/thread.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    C2C_ROUNDS = 4000,
    C2C_BATCHES = 10,
    ATTEMPTS_PER_RUN = 3, /* runs may flip; so many are tried before the figures are weak */
};

/* Between the two kinds of neighbourhood that were seen: 50 to 200 ns and 340 to 590 ns. */
static const double far_ns = 270;

void bench_complain(const char *format, ...)
{
    va_list args;

    fputs("kv_bench: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
}

double bench_now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

size_t bench_count(const struct bench *bench, size_t wanted)
{
    size_t count = bench->smoke ? wanted / 100 : wanted;

    return count < 8 ? 8 : count;
}

const char *bench_transport(const struct bench *bench, unsigned i)
{
    static const char *const both[] = {"tcp", "shm"};

    if (bench->transport != NULL)
        return i == 0 ? bench->transport : NULL;
    return i < 2 ? both[i] : NULL;
}

/* ---- samples ----------------------------------------------------------------------------- */

static int compare_doubles(const void *left, const void *right)
{
    double a = *(const double *)left, b = *(const double *)right;

    return (a > b) - (a < b);
}

static double median(double *values, size_t n)
{
    if (n == 0)
        return 0;
    qsort(values, n, sizeof(*values), compare_doubles);
    return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

static double least(double *values, size_t n)
{
    double best = n > 0 ? values[0] : 0;

    for (size_t i = 1; i < n; i++)
        best = values[i] < best ? values[i] : best;
    return best;
}

static double largest(double *values, size_t n)
{
    double best = n > 0 ? values[0] : 0;

    for (size_t i = 1; i < n; i++)
        best = values[i] > best ? values[i] : best;
    return best;
}

bool bench_watch_start(struct bench_watch *watch, size_t room)
{
    watch->seconds = malloc(room * sizeof(*watch->seconds));
    if (watch->seconds == NULL) {
        bench_complain("memory: %zu times: refused", room);
        return false;
    }
    memset(watch->seconds, 0, room * sizeof(*watch->seconds)); /* touched before it counts */
    watch->room = room;
    watch->n = 0;
    watch->begin = bench_now();
    return true;
}

void bench_watch_times(struct bench_watch *watch, struct bench_sample *ret_sample)
{
    size_t at = watch->n * 99 / 100;

    ret_sample->value = median(watch->seconds, watch->n) * 1e6;
    ret_sample->p99 =
        watch->n > 0 ? watch->seconds[at < watch->n ? at : watch->n - 1] * 1e6 : 0;
    free(watch->seconds);
}

void bench_watch_rate(struct bench_watch *watch, size_t bytes, struct bench_sample *ret_sample)
{
    double seconds = bench_now() - watch->begin;

    ret_sample->value = (double)watch->n * (double)bytes / seconds / 1e9;
    ret_sample->p99 = 0;
    free(watch->seconds);
}

/* ---- c2c --------------------------------------------------------------------------------- */

struct echo {
    _Alignas(128) _Atomic uint32_t line;
    int cpu;
};

/* Answers every odd number with the next even one; 0 was the beginning. */
static void echo_main(void *arg)
{
    struct echo *echo = arg;
    uint32_t last = 2 * C2C_ROUNDS * C2C_BATCHES;

    bench_pin(echo->cpu);
    for (uint32_t number = 1; number < last; number += 2) {
        while (atomic_load_explicit(&echo->line, memory_order_acquire) != number)
            kv_relax();
        atomic_store_explicit(&echo->line, number + 1, memory_order_release);
    }
}

/* Nanoseconds of a round trip of one cache line; 0 if there is one processor only. */
static double c2c_ns(const struct bench *bench)
{
    struct echo echo = {.cpu = bench->server_cpu};
    struct kv_thread *thread;
    double best = 0;
    uint32_t number = 1;

    if (bench->server_cpu < 0 || bench->smoke ||
        kv_thread_start("c2c", echo_main, &echo, &thread) != KV_OK)
        return 0;
    for (unsigned batch = 0; batch < C2C_BATCHES; batch++) {
        double begin = bench_now(), ns;

        for (unsigned round = 0; round < C2C_ROUNDS; round++) {
            atomic_store_explicit(&echo.line, number, memory_order_release);
            while (atomic_load_explicit(&echo.line, memory_order_acquire) != number + 1)
                kv_relax();
            number += 2;
        }
        ns = (bench_now() - begin) / C2C_ROUNDS * 1e9;
        if (batch == 0 || ns < best)
            best = ns;
    }
    kv_thread_join(thread);
    return best;
}

/* ---- comparisons ------------------------------------------------------------------------- */

enum bin {
    BIN_NONE, /* one processor */
    BIN_NEAR,
    BIN_FAR,
    BIN_FLIPPED,
    N_BINS,
};

static const char *const bin_names[N_BINS] = {NULL, "near", "far", "flipped"};

struct run {
    double before, after; /* c2c */
    enum bin bin;
    struct bench_sample samples[BENCH_SIDES_MAX];
};

struct record {
    const char *name;
    const struct bench_params *params;
    const char *unit;
    const char *limit_name;
    double value, p99;
    double limit, limit_p99;
    double p50, limit_p50;
    double overhead_us;
    double ratio;
    unsigned runs;
    double before, after;
    const char *bin;
};

static enum bin bin_of(double before, double after)
{
    if (before == 0 || after == 0)
        return BIN_NONE;
    if ((before < far_ns) != (after < far_ns))
        return BIN_FLIPPED;
    return before < far_ns ? BIN_NEAR : BIN_FAR;
}

static void print_number(const char *name, double number, bool is_known)
{
    if (is_known)
        printf(", \"%s\": %.4g", name, number);
    else
        printf(", \"%s\": null", name);
}

static void print_text_or_null(const char *name, const char *text)
{
    if (text != NULL)
        printf(", \"%s\": \"%s\"", name, text);
    else
        printf(", \"%s\": null", name);
}

/* Calls print(separator, name, text or NULL, number) for every parameter that is there. */
static void each_param(
    const struct record *record,
    void (*print)(const char *separator, const char *name, const char *text, double number))
{
    const struct bench_params *params = record->params;
    const struct {
        const char *name;
        const char *text;
        double number;
    } all[] = {
        {"transport", params->transport, 0},
        {"shape", params->shape, 0},
        {"threads", NULL, params->threads},
        {"window", NULL, params->window},
        {"bytes", NULL, (double)params->bytes},
        {"request_bytes", NULL, (double)params->request_bytes},
        {"rows", NULL, params->rows},
        {"data", params->data, 0},
        {"queries", NULL, params->queries},
        {"n", NULL, params->n},
        {"k", NULL, params->k},
        {"run", NULL, params->run},
        {"rerank", NULL, params->rerank},
        {"away", NULL, params->away},
        {"isa", params->isa, 0},
        {"form", params->form, 0},
        {"chapter", NULL, params->chapter},
        {"group", NULL, params->group},
        {"p99", NULL, record->p99},
        {"limit_p99", NULL, record->limit_p99},
        {"p50", NULL, record->p50},
        {"limit_p50", NULL, record->limit_p50},
        {"overhead_us", NULL, record->overhead_us},
        {"operation", params->operation, 0},
        {"per", params->per, 0},
        {"source", params->source, 0},
        {"units", NULL, params->units},
        {"block_bytes", NULL, params->block_bytes},
        {"unit_bytes", NULL, params->unit_bytes},
        {"node_us", NULL, params->node_us},
        {"slowdown", NULL, params->slowdown},
        {"mark", params->mark, 0},
    };
    const char *separator = "";

    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        if (all[i].text == NULL && all[i].number == 0)
            continue;
        print(separator, all[i].name, all[i].text, all[i].number);
        separator = ", ";
    }
}

static void
print_json_param(const char *separator, const char *name, const char *text, double number)
{
    if (text != NULL)
        printf("%s\"%s\": \"%s\"", separator, name, text);
    else
        printf(number < 1000 ? "%s\"%s\": %.4g" : "%s\"%s\": %.0f", separator, name, number);
}

static void print_json(const struct record *record)
{
    bool has_limit = record->limit_name != NULL;

    printf("{\"name\": \"%s\", \"params\": {", record->name);
    each_param(record, print_json_param);
    printf("}");
    print_number("value", record->value, true);
    print_text_or_null("unit", record->unit);
    print_number("limit", record->limit, has_limit);
    print_text_or_null("limit_name", record->limit_name);
    print_number("ratio", record->ratio, has_limit);
    printf(", \"runs\": %u", record->runs);
    if (record->bin != NULL)
        printf(", \"c2c_ns\": [%.0f, %.0f]", record->before, record->after);
    else
        printf(", \"c2c_ns\": null");
    print_text_or_null("bin", record->bin);
    printf("}\n");
}

static void
print_text_param(const char *separator, const char *name, const char *text, double number)
{
    printf("%s", separator);
    if (text != NULL)
        printf("%s %s", name, text);
    else
        printf(number == (uint64_t)number ? "%s %.10g" : "%s %.4g", name, number);
}

static void print_text(struct bench *bench, const struct record *record)
{
    char limit[32] = "-", ratio[16] = "-", c2c[32] = "-";

    if (!bench->has_header)
        printf("%-24s %9s %-8s %9s %6s  %-24s %4s %-9s %-8s %s\n", "name", "value", "unit",
               "limit", "ratio", "limit name", "runs", "c2c ns", "bin", "params");
    bench->has_header = true;
    if (record->limit_name != NULL) {
        snprintf(limit, sizeof(limit), "%.4g", record->limit);
        snprintf(ratio, sizeof(ratio), "%.3f", record->ratio);
    }
    if (record->bin != NULL)
        snprintf(c2c, sizeof(c2c), "%.0f-%.0f", record->before, record->after);
    printf("%-24s %9.4g %-8s %9s %6s  %-24s %4u %-9s %-8s ", record->name, record->value,
           record->unit, limit, ratio, record->limit_name != NULL ? record->limit_name : "-",
           record->runs, c2c, record->bin != NULL ? record->bin : "-");
    each_param(record, print_text_param);
    printf("\n");
}

static void print(struct bench *bench, const struct record *record)
{
    if (bench->json)
        print_json(record);
    else
        print_text(bench, record);
    fflush(stdout);
}

void bench_finish(const struct bench *bench)
{
    if (bench->json || !bench->has_header)
        return;
    printf("\n"
           "value, limit  medians over `runs`, of kernels.* the best; us: a time, GB/s: 10^9 "
           "bytes "
           "of payload a second\n"
           "ratio         against the limit: 1 is the limit, higher is better, also for times\n"
           "c2c, bin      round trip of a cache line between the two processors, before and "
           "after:\n"
           "              compare figures of one bin only; flipped: it changed in every run\n"
           "slowdown      value over limit: 1 is the limit, higher is worse\n");
    if (bench->smoke)
        printf("This was a smoke run: its figures mean nothing.\n");
}

/* Sums up the runs of one bin. */
static void report(struct bench *bench,
                   const struct bench_comparison *comparison,
                   const struct run *runs,
                   unsigned n_runs,
                   enum bin bin)
{
    struct record record = {
        .name = comparison->name,
        .params = &comparison->params,
        .unit = comparison->unit,
        .bin = bin_names[bin],
    };
    bool less_is_better = strcmp(comparison->unit, "us") == 0;
    double (*sum_up)(double *values, size_t n) = !comparison->takes_best ? median
                                                 : less_is_better        ? least
                                                                         : largest;
    double column[BENCH_RUNS_MAX * ATTEMPTS_PER_RUN];
    struct bench_sample sums[BENCH_SIDES_MAX];

#define SUM_UP(how, field, ret)                 \
    do {                                        \
        unsigned used = 0;                      \
        for (unsigned i = 0; i < n_runs; i++)   \
            if (runs[i].bin == bin)             \
                column[used++] = runs[i].field; \
        record.runs = used;                     \
        (ret) = (how)(column, used);            \
    } while (0)
    SUM_UP(median, before, record.before);
    SUM_UP(median, after, record.after);
    for (unsigned side = 0; side < comparison->n_sides; side++) {
        SUM_UP(sum_up, samples[side].value, sums[side].value);
        SUM_UP(sum_up, samples[side].p99, sums[side].p99);
        SUM_UP(sum_up, samples[side].p50, sums[side].p50);
        SUM_UP(sum_up, samples[side].overhead_us, sums[side].overhead_us);
    }
#undef SUM_UP

    record.value = sums[0].value;
    record.p99 = sums[0].p99;
    record.p50 = sums[0].p50;
    record.overhead_us = sums[0].overhead_us;
    for (unsigned side = comparison->n_sides > 1 ? 1 : 0; side < comparison->n_sides; side++) {
        if (side > 0) {
            record.limit_name = comparison->sides[side].name;
            record.limit = sums[side].value;
            record.limit_p99 = sums[side].p99;
            record.limit_p50 = sums[side].p50;
            record.ratio =
                less_is_better ? record.limit / record.value : record.value / record.limit;
        }
        print(bench, &record);
    }
}

void bench_report(struct bench *bench, const struct bench_figure *figure)
{
    const struct record record = {
        .name = figure->name,
        .params = &figure->params,
        .unit = figure->unit,
        .limit_name = figure->limit_name,
        .value = figure->value,
        .p99 = figure->p99,
        .limit = figure->limit,
        .ratio = figure->ratio,
        .runs = 1,
    };

    print(bench, &record);
}

static void
show_progress(const struct bench_comparison *comparison, unsigned run, unsigned runs)
{
    if (!isatty(STDERR_FILENO))
        return;
    if (run < runs)
        fprintf(stderr, "\r%s %s: run %u of %u\033[K", comparison->name,
                comparison->params.transport != NULL ? comparison->params.transport : "",
                run + 1, runs);
    else
        fprintf(stderr, "\r\033[K");
}

bool bench_compare(struct bench *bench, const struct bench_comparison *comparison)
{
    struct run runs[BENCH_RUNS_MAX * ATTEMPTS_PER_RUN];
    unsigned counts[N_BINS] = {0};
    unsigned n_runs = 0;
    enum bin best = BIN_NONE;

    while (n_runs < bench->runs * ATTEMPTS_PER_RUN && counts[best] < bench->runs) {
        struct run *run = &runs[n_runs];

        show_progress(comparison, counts[best], bench->runs);
        run->before = comparison->is_alone ? 0 : c2c_ns(bench);
        for (unsigned side = 0; side < comparison->n_sides; side++) {
            run->samples[side] = (struct bench_sample){0};
            if (!comparison->sides[side].measure(comparison->sides[side].arg,
                                                 &run->samples[side])) {
                show_progress(comparison, bench->runs, bench->runs);
                bench_complain("%s: %s: failed", comparison->name,
                               side > 0 ? comparison->sides[side].name : "ours");
                return false;
            }
        }
        run->after = comparison->is_alone ? 0 : c2c_ns(bench);
        run->bin = bin_of(run->before, run->after);
        counts[run->bin]++;
        n_runs++;
        /* Flipped runs count only if there is nothing else. */
        for (enum bin bin = BIN_NONE; bin < BIN_FLIPPED; bin++)
            if (counts[bin] > counts[best])
                best = bin;
    }
    show_progress(comparison, bench->runs, bench->runs);
    report(bench, comparison, runs, n_runs, counts[best] > 0 ? best : BIN_FLIPPED);
    return true;
}
