/* report.h - the table, objects or lines that `kvworker eval` prints.
 *
 * Threads: one.
 */
#ifndef KV_GPU_WORKER_EVAL_REPORT_H
#define KV_GPU_WORKER_EVAL_REPORT_H

#include "gpu-worker/eval/plan.h"

#include <stdio.h>

enum kvw_eval_format {
    KVW_EVAL_TABLE, /* aligned columns under a header */
    KVW_EVAL_JSON,  /* an object per line */
    KVW_EVAL_CSV,   /* RFC 4180, with a header line */
};

/* What all lines have in common. */
struct kvw_eval_about {
    uint32_t tokens, from;
    const char *kv_type, *store, *device;
    const char *text;     /* its file */
    bool has_many_texts;  /* it is not the only one */
    bool has_differences; /* to the method of --against */
    bool has_guesses;     /* some method guesses queries */
    uint32_t n_layers;
    int method_width; /* of the longest method name */
};

/* NAN: not measured. */
struct kvw_eval_result {
    double perplexity;
    double loss_percent;       /* perplexity above full attention's */
    double loss_error_percent; /* its standard error, by blocks of tokens (fidelity.h) */
    double kl, kl_error;       /* mean KL(full || method) of a token, in nats */
    /* Mean of a token's loss and KL above those of --against, in nats. */
    double loss_difference, loss_difference_error;
    double kl_difference, kl_difference_error;
    double recall;      /* of the rows that exact scores would have selected */
    double coded_share; /* of the eligible rows of queries, scored by their codes */
    double exact_share; /* keys read to score eligible rows, per eligible row */
    double
        guess_cosine;  /* of queries asked with to true ones, in all layers but the first: 1 in
                             * layers that ask with their own */
    double rows_share; /* of the rows so far, attended to by a step */
    double estimated_share; /* of the rows so far, in estimates */
    double needles_found, needles_asked;
    double step_s;      /* time of a decode step, logits included */
    double step_node_s; /* time of the nodes on the queries of a step */
    /* Bytes of their memory that nodes read for the queries of a step: all, and of them
     * codebooks, codes, copies of keys, keys, rows, summaries. */
    double step_read, step_books, step_codes, step_copies, step_keys, step_rows, step_summaries;
    double step_bytes;     /* received per step */
    double exposed_wait_s; /* of all steps */
    double bytes_fetched;  /* by all steps */
    double total_s;
};

/* Prints the header; with several texts, a table has one for each. */
void kvw_eval_report_head(enum kvw_eval_format format, const struct kvw_eval_about *about);
/* A field of CSV, quoted where it must be. */
void kvw_eval_print_field(FILE *file, const char *text);
/* guess_cosines (n_layers): the same of each layer, for objects only; NULL: none are guessed. */
void kvw_eval_report(enum kvw_eval_format format,
                     const struct kvw_eval_about *about,
                     const struct kvw_planned_run *run,
                     const struct kvw_eval_result *result,
                     const double *guess_cosines);

#endif
