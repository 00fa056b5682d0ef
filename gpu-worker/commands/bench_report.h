/* bench_report.h - what kvworker bench has measured: as a table, JSON, and a picture.
 *
 * Threads: none of its own.  Memory: nothing is kept.
 */
#ifndef KV_GPU_WORKER_COMMANDS_BENCH_REPORT_H
#define KV_GPU_WORKER_COMMANDS_BENCH_REPORT_H

#include "gpu-worker/eval/plan.h"

#include <stdio.h>

/* A method at a context and a batch. */
struct kvw_bench_result {
    const struct kvw_planned_run *run;
    uint32_t n_runs_before; /* of the plan: which line of the picture it is on */
    uint32_t context;       /* tokens that each sequence had */
    uint32_t batch;         /* sequences asked for */
    uint32_t sequences;     /* that --kv-memory let in; 0: not one */
    uint32_t steps;
    uint32_t n_layers;
    double step_s; /* the median of a pass, a token of each sequence */
    double step_min_s, step_max_s;
    double wait_s;      /* exposed, a pass, in the mean; one sequence's may be another's time to
                             * compute, so that it may be more than the pass */
    double node_s;      /* nodes' threads at work, a pass, in the mean */
    uint64_t row_bytes; /* on the device, of all sequences */
};

/* Returns the characters that the longest name of a method takes: the width of the table's first
 * column. */
int kvw_bench_name_width(const struct kvw_eval_plan *plan);
void kvw_bench_print_heading(int width, FILE *out);
void kvw_bench_print(const struct kvw_bench_result *result, int width, FILE *out);
void kvw_bench_print_json(const struct kvw_bench_result *result, FILE *out);

/* Writes two charts as SVG: time per token against the context at the smallest batch, and tokens per
 * second at the largest.  `title` says what was measured. */
void kvw_bench_draw(const struct kvw_bench_result *results,
                    size_t n,
                    const char *title,
                    FILE *out);

#endif
