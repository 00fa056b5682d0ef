/* budget.h - how many rows a decode step attends to, and which of them are fixed.
 *
 *     0 .. sinks      .. window_begin      .. n_rows - 1
 *     sinks, always   the middle: k of it   window, always; the last is the step's own token
 *
 *   k = min(top_k, floor(ratio n_rows) - sinks - window)      of those that are given; at least
 *                                                             0, at most the middle
 *   KVW_WINDOW_HALF, PQCache's split, fixed when the prompt of P rows ends:
 *   k = window = floor((P - sinks) ratio / 2)                 k is also at most top_k; without
 *                                                             a ratio both are top_k
 *   selects_half: k is half of that, rounded up
 *
 * Methods with the same options here attend to the same number of rows, however they select them.
 *
 * Threads: pure functions.
 */
#ifndef KV_GPU_WORKER_ATTENTION_BUDGET_H
#define KV_GPU_WORKER_ATTENTION_BUDGET_H

#include <stdbool.h>
#include <stdint.h>

#define KVW_WINDOW_HALF UINT32_MAX

struct kvw_budget_options {
    double ratio;    /* of all rows so far, sinks and window included; 0: not given */
    uint32_t top_k;  /* rows besides sinks and window; 0: not given */
    uint32_t sinks;  /* the first rows of a session */
    uint32_t window; /* the last rows, with the step's own, at least 1; or KVW_WINDOW_HALF */
    bool selects_half;
};

struct kvw_budget {
    uint32_t n_rows;       /* so far, with the step's own */
    uint32_t sinks;        /* rows [0, sinks) */
    uint32_t window_begin; /* rows [window_begin, n_rows) */
    uint32_t k;            /* of [sinks, window_begin) */
};

/* Returns the budget of the step that appends row n_rows - 1 (n_rows >= 1), after a prompt of
 * `prompt_rows`. */
struct kvw_budget
kvw_budget_of(const struct kvw_budget_options *options, uint32_t prompt_rows, uint32_t n_rows);

/* Parses "0.1" or "1/10", in 0..1; 0: not given.  Returns false if it is not a share. */
bool kvw_budget_parse_ratio(const char *text, double *ret_ratio);
/* Parses "64" or "half".  Returns false if it is neither. */
bool kvw_budget_parse_window(const char *text, uint32_t *ret_window);
/* Parses an integer in `least`..UINT32_MAX - 1.  Returns false if it is not one. */
bool kvw_budget_parse_count(const char *text, uint32_t least, uint32_t *ret_count);

#endif
