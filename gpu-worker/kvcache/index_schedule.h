/* index_schedule.h - the store's index of a session, layer by layer: when it is asked for, how
 * much k-means it is worth, and how long a step waits for it.
 *
 *   prompt    kvw_index_schedule_rows()     each layer's new rows are on their way: chapters that
 *                                       they complete are asked for, at the prompt's end all
 *             kvw_index_schedule_end_pass()   the pass is over in all layers
 *   step      kvw_index_schedule_await()    before a layer's first query
 *             kvw_index_schedule_end_pass()   generated text becomes chapters, too
 *
 * Clustering goes on in the nodes while the next layers compute.
 *
 * Threads: one at a time.  Memory: create/destroy; keeps what the setup names and the store.
 */
#ifndef KV_GPU_WORKER_KVCACHE_INDEX_SCHEDULE_H
#define KV_GPU_WORKER_KVCACHE_INDEX_SCHEDULE_H

#include "gpu-worker/kvcache/session.h"

struct kvw_index_schedule;

/* What can be chosen about an index. */
struct kvw_index_options {
    uint32_t summaries;       /* per 1,024 rows, by which nodes estimate what rows that are not
                                 chosen would have added: 0 (no estimate), 16, 64 */
    uint32_t chapter_blocks;  /* blocks with one codebook; 0: one for the prompt */
    uint32_t subspaces, bits; /* of a code */
    uint32_t iterations;      /* of k-means; 0: as many as the prompt's time hides */
    bool wait;                /* no step before its index is there */
};

struct kvw_index_stats {
    double wait_s; /* of steps, for codebooks */
    uint32_t codebooks_trained, codebooks_found;
};

/* `seed` is the codebooks'.  KV_NO_MEMORY. */
kv_status_t kvw_index_schedule_create(const struct kvw_session_setup *setup,
                                      struct kvw_session *store,
                                      const struct kvw_index_options *options,
                                      uint64_t seed,
                                      struct kvw_index_schedule **ret_index);
/* Cancels what is under way.  NULL is allowed. */
void kvw_index_schedule_destroy(struct kvw_index_schedule *index);

/* The prompt that comes ends before the token prompt_end, and some n_steps follow. */
void kvw_index_schedule_prompt_hint(struct kvw_index_schedule *index,
                                    uint32_t prompt_end,
                                    uint32_t n_steps);
/* Whether codes for steps may be waited for to the end. */
void kvw_index_schedule_wait(struct kvw_index_schedule *index, bool wait_index);

/* A layer of the prompt has its first `tokens` rows. */
kv_status_t
kvw_index_schedule_rows(struct kvw_index_schedule *index, uint32_t layer, uint32_t tokens);

/* All layers have them. */
kv_status_t kvw_index_schedule_end_pass(struct kvw_index_schedule *index,
                                        enum kvw_phase phase,
                                        uint32_t tokens);

/* Where the prompt ended: what comes is steps.  Asks for what nobody announced. */
kv_status_t kvw_index_schedule_end_prompt(struct kvw_index_schedule *index);
/* Rows of the prompt that steps go on from; 0: its end is not known yet. */
uint32_t kvw_index_schedule_prompt_rows(const struct kvw_index_schedule *index);

/* Waits for a layer's index as long as going on without would cost, or to its end. */
kv_status_t kvw_index_schedule_await(struct kvw_index_schedule *index, uint32_t layer);

/* Waits for all that is under way. */
kv_status_t kvw_index_schedule_settle(struct kvw_index_schedule *index);
/* The session has only `tokens` rows any more, or another one of as many takes its place;
 * nothing is under way. */
void kvw_index_schedule_truncate(struct kvw_index_schedule *index, uint32_t tokens);

void kvw_index_schedule_stats(const struct kvw_index_schedule *index,
                              struct kvw_index_stats *ret_stats);

#endif
