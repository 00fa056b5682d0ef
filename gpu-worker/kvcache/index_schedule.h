/* index_schedule.h - the store's index of a session, layer by layer: when it is requested, how
 * many k-means iterations it gets, and how long a step waits for it.
 *
 *   prompt    kvw_index_schedule_rows()       after a layer's new rows are sent: requests an index
 *                                             for complete chapters, at the prompt's end for
 *                                             all
 *             kvw_index_schedule_end_pass()   the pass is over in all layers
 *   either    kvw_index_schedule_is_ready()   before a pass that others can do without
 *   step      kvw_index_schedule_await()      before a layer's first query
 *             kvw_index_schedule_end_pass()   generated tokens are indexed, too: no step waits for
 *                                             that
 *
 * The nodes cluster while the next layers compute.  How many iterations fit into that time
 * follows from the time that the nodes report for earlier indexes (kmeans_budget.h).
 *
 * Invariants, which kvw_index_schedule_check() asserts:
 *   (1) Neither the rows that an index was asked for in all layers nor the prompt's are more
 *       than have passed.
 *   (2) With chapters, whole blocks were asked for.
 *
 * Threads: one at a time.  Memory: create/destroy; keeps what the setup names and the store.
 */
#ifndef KV_GPU_WORKER_KVCACHE_INDEX_SCHEDULE_H
#define KV_GPU_WORKER_KVCACHE_INDEX_SCHEDULE_H

#include "gpu-worker/kvcache/session.h"

struct kvw_index_schedule;

/* The options of an index. */
struct kvw_index_options {
    uint32_t summaries;       /* per summary_rows, to estimate the contribution of rows not
                                 selected: 16 or 64; 0: no estimate */
    uint32_t summary_rows;    /* 1,024 or 3,072 */
    uint32_t chapter_blocks;  /* blocks with one codebook; 0: one for the prompt */
    uint32_t subspaces, bits; /* of a code */
    bool rotates;             /* codes are of rotated keys */
    bool copies;              /* beside the codes, copies of keys in 4 bits */
    uint32_t iterations;      /* of k-means; 0: as many as the prompt's time hides */
    bool wait;                /* steps wait for their codebooks, generated rows' too */
};

struct kvw_index_stats {
    double wait_s; /* of computation, for codebooks */
    uint32_t codebooks_trained, codebooks_found;
};

/* Creates a schedule; `seed` is used for codebooks.  Fails with KV_NO_MEMORY. */
kv_status_t kvw_index_schedule_create(const struct kvw_session_setup *setup,
                                      struct kvw_session *store,
                                      const struct kvw_index_options *options,
                                      uint64_t seed,
                                      struct kvw_index_schedule **ret_index);
/* Cancels outstanding index operations.  NULL is allowed. */
void kvw_index_schedule_destroy(struct kvw_index_schedule *index);

/* Announces a prompt that ends before the token prompt_end, and about n_steps decode steps. */
void kvw_index_schedule_prompt_hint(struct kvw_index_schedule *index,
                                    uint32_t prompt_end,
                                    uint32_t n_steps);
/* Sets whether steps wait for their codebooks without a limit. */
void kvw_index_schedule_wait(struct kvw_index_schedule *index, bool wait_index);

/* Tells that a layer of the prompt has its first `tokens` rows. */
kv_status_t
kvw_index_schedule_rows(struct kvw_index_schedule *index, uint32_t layer, uint32_t tokens);

/* Tells that all layers have them. */
kv_status_t kvw_index_schedule_end_pass(struct kvw_index_schedule *index,
                                        enum kvw_phase phase,
                                        uint32_t tokens);

/* Ends the prompt: decode steps follow.  Requests an index for rows that no hint announced. */
kv_status_t kvw_index_schedule_end_prompt(struct kvw_index_schedule *index);
/* Rows of the prompt that steps go on from; 0: its end is not known yet. */
uint32_t kvw_index_schedule_prompt_rows(const struct kvw_index_schedule *index);

/* Before a step's query: waits for the layer's index of the prompt as long as going on without would
 * cost; for one of generated rows, not at all.  With options.wait, for both to the end.
 * Adds the seconds to *waited_s. */
kv_status_t
kvw_index_schedule_await(struct kvw_index_schedule *index, uint32_t layer, double *waited_s);

/* Whether a pass, after which there are `tokens` rows, would wait for no index.  Who has other
 * work meanwhile asks before each pass, and leaves it until then.  As with
 * kvw_index_schedule_await(), it does not take longer than going on without would cost, unless
 * options.wait says so. */
bool kvw_index_schedule_is_ready(struct kvw_index_schedule *index,
                                 enum kvw_phase phase,
                                 uint32_t tokens);
/* Gives up what is under way: nobody will use it. */
void kvw_index_schedule_give_up(struct kvw_index_schedule *index);

/* Waits for all that is under way. */
kv_status_t kvw_index_schedule_settle(struct kvw_index_schedule *index);
/* The session has only `tokens` rows any more, or another one of as many takes its place;
 * nothing is under way. */
void kvw_index_schedule_truncate(struct kvw_index_schedule *index, uint32_t tokens);

void kvw_index_schedule_stats(const struct kvw_index_schedule *index,
                              struct kvw_index_stats *ret_stats);

/* Asserts the invariants. */
void kvw_index_schedule_check(const struct kvw_index_schedule *index);

#endif
