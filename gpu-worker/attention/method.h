/* method.h - an attention method: a table of functions over (layer, q, k, v) and the store.
 *
 * A forward pass calls, for each run of tokens:
 *
 *     for each layer     attend()     takes the layer's new keys and values, gives its output
 *     after the last     passed()     the tokens have been through all layers
 *
 * Tokens come in order and without gaps, as part of a prompt or as decode steps.  A prompt's
 * tokens attend to all before them, the last one too, even if it comes alone.  In a decode
 * step, which is one token, the method decides which cached rows it attends to, and always
 * where rows are; sinks, windows and indexes are its own business.  It writes every row to the
 * store, in the background of the computation: kvw_method_flush() waits for that.
 *
 * What every method does with its session is done once, in methods.c; a method adds to it what
 * is its own.  A new method is one file and one row in methods.c.
 *
 * Threads: one at a time.  Memory: create/destroy.
 */
#ifndef KV_GPU_WORKER_ATTENTION_METHOD_H
#define KV_GPU_WORKER_ATTENTION_METHOD_H

#include "gpu-worker/attention/options.h"
#include "gpu-worker/kvcache/setup.h"

struct kvw_method_ops;

struct kvw_method_setup {
    struct kvw_session_setup session;
    struct kvw_method_options options;
};

struct kvw_method_stats {
    uint64_t bytes_put;     /* rows sent to the store */
    uint64_t bytes_fetched; /* rows and answers by attention got from it */
    uint64_t rows_attended; /* (query, kv head) pairs of one row */
    uint64_t rows_possible; /* the same, had every query attended to all before it */
    double exposed_wait_s;  /* the computation stood still for the store */
    /* Of the rows that exact scores would have chosen, how many were; 0 of 0: not measured. */
    uint64_t rows_recalled, rows_to_recall;

    /* Of an index in the store, as the nodes tell. */
    double index_wait_s;                              /* of exposed_wait_s, for codebooks */
    uint64_t rows_to_choose_from;                     /* candidates, per kv head and step */
    uint64_t rows_scored_by_code, rows_scored_by_key; /* of them, to take some for step 2 */
    uint64_t rows_reranked;
    uint64_t rows_estimated;             /* that were not chosen, by summaries */
    double nodes_worked_s;               /* of their threads, on queries */
    uint64_t rows_selected, rows_cached; /* of them, found in the worker's cache */
    uint64_t rows_sent;                  /* to answer queries */
    uint32_t codebooks_trained, codebooks_found;
    double recall_sum; /* of recall_count estimates of the nodes */
    uint64_t recall_count;
};

/* What n tokens from token_begin on add to rows_possible in a layer. */
static inline uint64_t
kvw_method_rows_possible(const struct kvw_rows_shape *shape, uint32_t token_begin, uint32_t n)
{
    return shape->n_kv_heads * ((uint64_t)n * token_begin + (uint64_t)n * (n + 1) / 2);
}

/* What every method begins with. */
struct kvw_method {
    const struct kvw_method_ops *ops;
    struct kvw_session *session; /* in which its rows are kept; the method's own */
};

struct kvw_method_ops {
    const char *name;    /* "full" */
    const char *summary; /* for --help */
    bool has_budget;     /* options.budget matters */
    bool has_seed;       /* options.seed matters */
    bool has_index;      /* what options says of an index matters */

    /* Opens a session of the model in the store.  `detail`: `what: where: value`. */
    kv_status_t (*create)(const struct kvw_method_setup *setup,
                          struct kvw_method **ret_attention,
                          char *detail,
                          size_t detail_bytes);
    /* Closes the session, and with it the store's rows. */
    void (*destroy)(struct kvw_method *attention);

    /* q, out (n, n_q_heads, d); k, v (n, n_kv_heads, d): of the tokens from token_begin on,
     * turned by position.  Buffers of the model's device. */
    kv_status_t (*attend)(struct kvw_method *attention,
                          enum kvw_phase phase,
                          uint32_t layer,
                          uint32_t token_begin,
                          uint32_t n,
                          const struct kvw_device_buffer *q,
                          const struct kvw_device_buffer *k,
                          const struct kvw_device_buffer *v,
                          struct kvw_device_buffer *out);
    /* The tokens are on their way to the store in all layers.  NULL: no matter. */
    kv_status_t (*end_pass)(struct kvw_method *attention,
                            enum kvw_phase phase,
                            uint32_t token_begin,
                            uint32_t n);

    /* Other options for the steps to come, as if they had been given to create().
     * KV_UNSUPPORTED: that takes a new one.  NULL: it always does. */
    kv_status_t (*set_options)(struct kvw_method *attention,
                               const struct kvw_method_options *options);
    /* The prompt that comes ends before the token prompt_end, and some n_steps follow: a method
     * that makes an index may begin with it early, and knows what it is worth.  NULL: no
     * matter. */
    void (*prompt_hint)(struct kvw_method *attention, uint32_t prompt_end, uint32_t n_steps);
    /* The session is about to have only `tokens` tokens any more, or another one of as many takes
     * its place: settles what was begun for others, and forgets them.  NULL: no matter. */
    kv_status_t (*rewind)(struct kvw_method *attention, uint32_t tokens);
    /* Adds to what every method counts. */
    void (*stats)(const struct kvw_method *attention, struct kvw_method_stats *stats);
};

extern const struct kvw_method_ops kvw_method_full;
extern const struct kvw_method_ops kvw_method_pqcache;
/* Controls, which have all rows at hand and choose some of them. */
extern const struct kvw_method_ops kvw_method_oracle;
extern const struct kvw_method_ops kvw_method_window;
extern const struct kvw_method_ops kvw_method_random;

/* A pass is over: the tokens have been through all layers. */
kv_status_t kvw_method_end_pass(struct kvw_method *attention,
                                enum kvw_phase phase,
                                uint32_t token_begin,
                                uint32_t n);
/* As the table's expect(), where there is one. */
void kvw_method_prompt_hint(struct kvw_method *attention,
                            uint32_t prompt_end,
                            uint32_t n_steps);
/* Goes on in a fork of the session, which has `tokens` tokens.  KV_UNSUPPORTED: in one
 * already. */
kv_status_t kvw_method_enter_fork(struct kvw_method *attention, uint32_t tokens);
/* Closes it, and is back in the session that it is a fork of. */
kv_status_t kvw_method_leave_fork(struct kvw_method *attention, uint32_t tokens);
/* Forgets the tokens from `tokens` on. */
kv_status_t kvw_method_truncate(struct kvw_method *attention, uint32_t tokens);
/* Waits until the store has every row. */
kv_status_t kvw_method_flush(struct kvw_method *attention);
/* While nothing is computed, every second or so: keeps the session alive. */
void kvw_method_keepalive(struct kvw_method *attention);

/* What went wrong, `what: where: value`; lent until the next call. */
const char *kvw_method_detail(const struct kvw_method *attention);
void kvw_method_stats(const struct kvw_method *attention, struct kvw_method_stats *ret_stats);

/* By name; NULL: there is none. */
const struct kvw_method_ops *kvw_method_find(const char *name);

#endif
