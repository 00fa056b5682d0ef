/* index_schedule.h - the store's index of a session, layer by layer: when it is asked for, how
 * much k-means it is worth, and how long a step waits for it.
 *
 *   prompt    kv_layer_index_rows()     each layer's new rows are on their way: chapters that
 *                                       they complete are asked for, at the prompt's end all
 *             kv_layer_index_passed()   the pass is over in all layers
 *   step      kv_layer_index_await()    before a layer's first query
 *             kv_layer_index_passed()   generated text becomes chapters, too
 *
 * Clustering goes on in the nodes while the next layers compute.
 *
 * Threads: one at a time.  Memory: create/destroy; keeps what the setup names and the store.
 */
#ifndef KV_GPU_WORKER_KVCACHE_INDEX_SCHEDULE_H
#define KV_GPU_WORKER_KVCACHE_INDEX_SCHEDULE_H

#include "gpu-worker/kvcache/session.h"

struct kv_layer_index;

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
kv_status_t kv_layer_index_create(const struct kvw_session_setup *setup,
                                  struct kv_store_session *store,
                                  const struct kvw_index_options *options,
                                  uint64_t seed,
                                  struct kv_layer_index **ret_index);
/* Cancels what is under way.  NULL is allowed. */
void kv_layer_index_destroy(struct kv_layer_index *index);

/* The prompt that comes ends before the token prompt_end, and some n_steps follow. */
void kv_layer_index_expect(struct kv_layer_index *index, uint32_t prompt_end, uint32_t n_steps);
/* Whether codes for steps may be waited for to the end. */
void kv_layer_index_wait(struct kv_layer_index *index, bool wait_index);

/* A layer of the prompt has its first `tokens` rows. */
kv_status_t kv_layer_index_rows(struct kv_layer_index *index, uint32_t layer, uint32_t tokens);

/* All layers have them. */
kv_status_t
kv_layer_index_passed(struct kv_layer_index *index, enum kv_phase phase, uint32_t tokens);

/* Where the prompt ended: what comes is steps.  Asks for what nobody announced. */
kv_status_t kv_layer_index_end_prompt(struct kv_layer_index *index);
/* Rows of the prompt that steps go on from; 0: its end is not known yet. */
uint32_t kv_layer_index_prompt_rows(const struct kv_layer_index *index);

/* Waits for a layer's index as long as going on without would cost, or to its end. */
kv_status_t kv_layer_index_await(struct kv_layer_index *index, uint32_t layer);

/* Waits for all that is under way. */
kv_status_t kv_layer_index_settle(struct kv_layer_index *index);
/* The session has only `tokens` rows any more, or another one of as many takes its place;
 * nothing is under way. */
void kv_layer_index_truncate(struct kv_layer_index *index, uint32_t tokens);

void kv_layer_index_stats(const struct kv_layer_index *index,
                          struct kvw_index_stats *ret_stats);

#endif
