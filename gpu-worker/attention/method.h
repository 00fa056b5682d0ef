/* method.h - an attention method: a table of functions over (layer, q, k, v) and the store.
 *
 * A forward pass calls, for each run of tokens:
 *
 *     for each layer     guess()      of a decode step, only to methods that speculate: the query as
 *                                     an earlier layer's state has it
 *                        ask()        of a decode step: the query is there, its key and value are not
 *                        attend()     stores the layer's new keys and values, writes its output
 *     after the last     end_pass()   the tokens have been through all layers
 *
 * Tokens come in order and without gaps, as part of a prompt or as decode steps.  Prompt tokens
 * attend to all earlier tokens; that includes the last one, even if it comes alone.  In a
 * decode step (one token), the method chooses which rows to attend to.  In both phases it
 * decides where rows are kept; sinks, windows and indexes are internal to the method.  It
 * writes every row to the store while the computation goes on: kvw_method_flush() waits for
 * these writes.  What a step asks of the store is asked in ask(), and waited for in attend() when
 * everything else has been done: the store works meanwhile.
 *
 * methods.c does what every method does with its session; a method adds its own part.  A new
 * method is one file and one entry in methods.c.
 *
 * Threads: one at a time.  Memory: create/destroy.
 */
#ifndef KV_GPU_WORKER_ATTENTION_METHOD_H
#define KV_GPU_WORKER_ATTENTION_METHOD_H

#include "client/include/kvclient.h"
#include "gpu-worker/attention/options.h"
#include "gpu-worker/kvcache/setup.h"

struct kvw_method_ops;

struct kvw_method_setup {
    struct kvw_session_setup session;
    struct kvw_method_options options;
};

/* What the computation waited for, in seconds; a request that was waited for in part counts with the
 * share that each had in the whole of it. */
struct kvw_waits {
    double node_s;  /* nodes at work on queries and fetches */
    double queue_s; /* requests in a node before it worked on them */
    /* Requests and replies on their way, and threads that woke for them: nothing dates a message
     * between its sender and the thread that takes it. */
    double wire_s;
    double index_s; /* codebooks */
    double rows_s;  /* rows that were sent, or read to be on the device */
};

struct kvw_method_stats {
    uint64_t bytes_put;     /* rows sent to the store */
    uint64_t bytes_read;    /* rows received from it as they are: those that the session had, or
                             * that the device lacks when its rows change their form */
    uint64_t bytes_fetched; /* rows and attention outputs received from it to answer queries */
    uint64_t rows_attended; /* (query, kv head) pairs of one row */
    uint64_t rows_possible; /* the same if every query had attended to all earlier rows */
    /* The same two of decode steps alone. */
    uint64_t step_rows_attended, step_rows_possible;
    double exposed_wait_s; /* that the computation waited for the store: the sum of `waits` */
    struct kvw_waits waits;
    const double *layer_wait_s; /* (n_layers) of it, for queries, fetches and codebooks; the
                                 * method's; NULL: it asks nothing */
    /* Rows that exact scores would have selected, and how many of them were; 0 of 0: not
     * measured. */
    uint64_t rows_recalled, rows_to_recall;

    /* Methods with an index in the store; the nodes report these numbers. */
    double index_wait_s;          /* of exposed_wait_s, for codebooks */
    uint64_t rows_to_choose_from; /* eligible rows, per kv head and step */
    uint64_t rows_scored_by_code,
        rows_scored_by_key; /* eligible rows, by how step 1 scored them */
    uint64_t rows_reranked;
    uint64_t rows_estimated;             /* rows not selected, estimated by summaries */
    double nodes_worked_s;               /* time of the nodes' threads, on queries */
    struct kv_query_reads nodes_read;    /* bytes of the nodes' memory, for queries */
    uint64_t rows_selected, rows_cached; /* rows_cached: in the worker's cache */
    uint64_t rows_sent;                  /* to answer queries */
    uint32_t codebooks_trained, codebooks_found;
    double recall_sum; /* of recall_count estimates of the nodes */
    uint64_t recall_count;

    /* Methods that guess queries. */
    const double *guess_cosines; /* (n_layers) sums of the cosines between guessed queries and
                                  * true ones since the options were set; the method's; NULL: none
                                  * are guessed */
    uint64_t n_guess_cosines;    /* in each layer's sum */
};

/* Returns what n tokens from token_begin on add to rows_possible in a layer. */
static inline uint64_t
kvw_method_rows_possible(const struct kvw_rows_shape *shape, uint32_t token_begin, uint32_t n)
{
    return shape->n_kv_heads * ((uint64_t)n * token_begin + (uint64_t)n * (n + 1) / 2);
}

/* Returns the bytes of all rows of a session, on the device. */
static inline uint64_t kvw_method_full_row_bytes(const struct kvw_model_params *params,
                                                 enum kv_dtype dtype,
                                                 uint32_t capacity)
{
    return (uint64_t)capacity * params->n_layers * params->n_kv_heads * 2 * params->d *
           kv_dtype_bytes(dtype);
}

/* The first member of every method's struct. */
struct kvw_method {
    const struct kvw_method_ops *ops;
    struct kvw_session *session;  /* holds the method's rows; owned by the method */
    enum kvw_speculate speculate; /* of which state guess() is to be told */
};

struct kvw_method_ops {
    const char *name;    /* "full" */
    const char *summary; /* for --help */
    bool has_budget;     /* options.budget matters */
    bool has_seed;       /* options.seed matters */
    bool has_index;      /* options.index matters */
    bool
        is_exact; /* selects by exact scores, whatever the codes: their options do not matter */
    bool has_rows; /* in its memory, all: what nodes could answer does not matter */

    /* Opens a session of the model in the store, or begins to (setup.session.opens_later:
     * kvw_method_opened() tells).  `detail`: `what: where: value`. */
    kv_status_t (*create)(const struct kvw_method_setup *setup,
                          struct kvw_method **ret_attention,
                          char *detail,
                          size_t detail_bytes);
    /* Closes the session, and with it the store's rows. */
    void (*destroy)(struct kvw_method *attention);

    /* Before ask() in each layer of a decode step but the first: the layer's q as it would be if the
     * state that attention->speculate names were the layer's input.  attend() of the layer before may
     * be still to come.  `q` is valid until the call returns.  NULL: guesses are not wanted. */
    kv_status_t (*guess)(struct kvw_method *attention,
                         uint32_t layer,
                         uint32_t token,
                         const struct kvw_device_buffer *q);
    /* Before attend() in each layer of a decode step, with the same q.  NULL: nothing to do. */
    kv_status_t (*ask)(struct kvw_method *attention,
                       uint32_t layer,
                       uint32_t token,
                       const struct kvw_device_buffer *q);
    /* q, out (n, n_q_heads, d); k, v (n, n_kv_heads, d): of the tokens from token_begin on,
     * rotated by position.  Buffers of the model's device. */
    kv_status_t (*attend)(struct kvw_method *attention,
                          enum kvw_phase phase,
                          uint32_t layer,
                          uint32_t token_begin,
                          uint32_t n,
                          const struct kvw_device_buffer *q,
                          const struct kvw_device_buffer *k,
                          const struct kvw_device_buffer *v,
                          struct kvw_device_buffer *out);
    /* The pass is over and the tokens' rows are sent in all layers.  NULL: nothing to do. */
    kv_status_t (*end_pass)(struct kvw_method *attention,
                            enum kvw_phase phase,
                            uint32_t token_begin,
                            uint32_t n);

    /* Changes the options of later steps, as if they had been given to create().  Fails with
     * KV_UNSUPPORTED if that takes a new method.  NULL: it always does. */
    kv_status_t (*set_options)(struct kvw_method *attention,
                               const struct kvw_method_options *options);
    /* Announces that the prompt ends before token prompt_end and that about n_steps decode
     * steps follow, so that a method with an index can build it early and knows how much it is
     * worth.  NULL: does not matter. */
    void (*prompt_hint)(struct kvw_method *attention, uint32_t prompt_end, uint32_t n_steps);
    /* Whether a pass after which there are `tokens` tokens would wait for no index, so that who
     * has other work meanwhile can leave it until then.  NULL: always. */
    bool (*is_ready)(struct kvw_method *attention, enum kvw_phase phase, uint32_t tokens);
    /* No pass comes any more: gives up what was asked of the store for one.  NULL: nothing to
     * do. */
    void (*quit)(struct kvw_method *attention);
    /* Called before the session is truncated to its first `tokens` tokens, or replaced by
     * another one of that length: waits for outstanding work on later tokens and forgets them.
     * NULL: nothing to do. */
    kv_status_t (*rewind)(struct kvw_method *attention, uint32_t tokens);
    /* Returns the bytes that buffers for fetched rows and cached blocks will take.  NULL: there are
     * none. */
    uint64_t (*buffer_bytes)(const struct kvw_method_options *options,
                             const struct kvw_model_params *params,
                             enum kv_dtype dtype,
                             uint32_t capacity);
    /* Returns the bytes of its device rows now, buffers that fetched rows arrive in and cached blocks
     * included.  In prompts these are at least kvw_method_full_row_bytes(); in decode steps there may be
     * fewer. */
    uint64_t (*row_bytes)(const struct kvw_method *attention);
    /* Adds to what every method counts. */
    void (*stats)(const struct kvw_method *attention, struct kvw_method_stats *stats);
};

extern const struct kvw_method_ops kvw_method_full;
extern const struct kvw_method_ops kvw_method_pqcache;
extern const struct kvw_method_ops kvw_method_oracle_rest;
/* Baselines, and a control: they have all rows in memory and select some of them. */
extern const struct kvw_method_ops kvw_method_oracle;
extern const struct kvw_method_ops kvw_method_window;
extern const struct kvw_method_ops kvw_method_random;
extern const struct kvw_method_ops kvw_method_speculated;

/* Ends a pass: the tokens have been through all layers. */
kv_status_t kvw_method_end_pass(struct kvw_method *attention,
                                enum kvw_phase phase,
                                uint32_t token_begin,
                                uint32_t n);
/* As the table's prompt_hint(), where there is one. */
void kvw_method_prompt_hint(struct kvw_method *attention,
                            uint32_t prompt_end,
                            uint32_t n_steps);
/* Forks the session, which has `tokens` tokens, and continues in the fork.  Fails with
 * KV_UNSUPPORTED in a fork. */
kv_status_t kvw_method_enter_fork(struct kvw_method *attention, uint32_t tokens);
/* Closes the fork and returns to the session that it was forked from. */
kv_status_t kvw_method_leave_fork(struct kvw_method *attention, uint32_t tokens);
/* Forgets the tokens from `tokens` on. */
kv_status_t kvw_method_truncate(struct kvw_method *attention, uint32_t tokens);
/* Waits until the store has every row. */
kv_status_t kvw_method_flush(struct kvw_method *attention);
/* As kvw_session_publish(). */
void kvw_method_publish(struct kvw_method *attention,
                        const uint32_t *tokens,
                        uint32_t n_tokens,
                        bool waits);
/* Without waiting, for who has other sessions of the same client to work on; kvw_method_wait()
 * waits until anything of theirs ends, or so long.
 *   opened    as kvw_session_opened(); then *ret_reused: tokens of the prompt that it has
 *   is_ready  whether a pass would wait neither for an index nor for earlier rows to be sent
 *   flushed   KV_IN_PROGRESS until the store has every row
 *   leave     publishes as kvw_method_publish() with `waits`, of tokens that are flushed, and
 *             closes the session: true when it has, and only destroy() is left.  NULL tokens:
 *             publishes nothing */
kv_status_t kvw_method_opened(struct kvw_method *attention, uint32_t *ret_reused);
bool kvw_method_is_ready(struct kvw_method *attention, enum kvw_phase phase, uint32_t tokens);
kv_status_t kvw_method_flushed(struct kvw_method *attention);
bool kvw_method_leave(struct kvw_method *attention, const uint32_t *tokens, uint32_t n_tokens);
void kvw_method_wait(struct kvw_method *attention, uint64_t timeout_us);
/* Keeps the session alive; call about every second while nothing is computed. */
void kvw_method_keepalive(struct kvw_method *attention);

/* Returns the last error, `what: where: value`; valid until the next call. */
const char *kvw_method_detail(const struct kvw_method *attention);
void kvw_method_get_stats(const struct kvw_method *attention,
                          struct kvw_method_stats *ret_stats);

/* Finds a method by name; NULL: no such method. */
const struct kvw_method_ops *kvw_method_find(const char *name);

/* Returns whether the option has an effect on the method when it has these options. */
bool kvw_method_uses(const struct kvw_method_ops *ops,
                     const struct kvw_method_options *options,
                     const struct kvw_method_option *option);
/* Writes the names of the methods that use it: "pqcache, oracle", and when they do, unless
 * always.  Returns `text`. */
const char *kvw_method_users(const struct kvw_method_option *option, char *text, size_t bytes);

#endif
