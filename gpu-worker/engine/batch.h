/* batch.h - several prompts are answered together, and each as if it were alone.
 *
 *     kvw_batch_create()
 *     kvw_batch_add()            it waits, and begins when there is a free slot
 *     while (kvw_batch_step())   a pass of a group of those that have begun
 *     kvw_batch_destroy()
 *
 * In a pass each sequence of the group that generates computes one token.  What there is room for beside
 * that, of `tokens` in all passes under way, is for prompts, a chunk of one after the other, whose turn it is: a long prompt
 * neither stops the others' answers nor shorter prompts behind it.  A sequence leaves when its
 * answer ends; the next one that waits takes its slot.
 *
 * Device rows may have a bound: a sequence that would exceed it waits, in the order of coming, until
 * others need less.  A sequence counts with all its rows until it generates, and then with
 * what its method keeps.
 *
 * No sequence waits for another's business with the store.  One joins when its session is open,
 * and leaves when its rows and the names of its blocks are in the store; one whose index is
 * being made, or whose earlier rows have all slots, is left out of passes until then.  Results
 * do not depend on that: each computes the same in whichever pass.  Rows of a prompt that the
 * store had, and a query, are waited for by all that compute with it.
 *
 * While nodes are away, so that no session can be opened, those that wait are tried again, for ten
 * seconds; then they fail, one after the other, until an open succeeds.
 *
 * With two groups, the sequences that generate are divided, and each group computes passes of its
 * own, a layer at a time: while one computes, the other's questions to the store are out, also
 * at the end of a pass.  The weights are then read twice.
 *
 * Threads: one at a time.  Memory: create/destroy; sequences are the caller's, and stay
 * until close() of the last session that they opened.
 */
#ifndef KV_GPU_WORKER_ENGINE_BATCH_H
#define KV_GPU_WORKER_ENGINE_BATCH_H

#include "gpu-worker/engine/generate.h"

enum {
    KVW_BATCH_GROUPS_MAX = 2,
    KVW_BATCH_SEQUENCES_MAX = 256,
};

struct kvw_batch;

struct kvw_batch_setup {
    const struct kvw_model *model;
    uint32_t sequences;      /* that may have begun, 1..KVW_BATCH_SEQUENCES_MAX */
    uint32_t tokens;         /* of passes under way: at least sequences + KVW_FORWARD_CHUNK */
    uint32_t groups;         /* 1 or 2 */
    uint64_t row_bytes;      /* that sequences may have together; 0: any */
    struct kvw_trace *trace; /* NULL: none */
};

/* A prompt and its answer.  Zeros where nothing is said. */
struct kvw_sequence {
    struct kvw_sampler *sampler;
    uint32_t *tokens;    /* prompt and then answer, with room for max_tokens more */
    uint32_t n_prompt;   /* more than 0 */
    uint32_t max_tokens; /* of the answer */
    uint32_t capacity;   /* maximum tokens of both */
    /* Of all rows that it may have, kvw_method_full_row_bytes(): at most those of the setup. */
    uint64_t row_bytes;

    void *arg;
    /* Begins to open its session, with the method whose session it is (all of the same client);
     * called when the sequence begins, and again after KV_UNREACHABLE, of it or of
     * kvw_method_opened().  For each call that has set *ret_attention, even if it failed then,
     * there is one of close(): before the next open(), or when it has left. */
    kv_status_t (*open)(void *arg, struct kvw_method **ret_attention);
    void (*close)(void *arg, struct kvw_method *attention);
    /* Called for each token of the answer, except those that end it. */
    void (*generated)(void *arg, uint32_t token);
    bool (*is_end)(void *arg, uint32_t token);
    /* Called when it is over, its rows in the store or its status not KV_OK; before the last
     * close(). */
    void (*over)(void *arg, kv_status_t status, const struct kvw_generate_result *result);

    /* The batch's. */
    struct kvw_sequence *next;
    struct kvw_method *attention;
    struct kvw_generate_result result;
    uint64_t begin_us;
    kv_status_t status; /* when it leaves */
    bool is_open;       /* its session has been */
    bool is_generating; /* its prompt has passed */
    bool is_passing;    /* in a pass */
    bool is_over;       /* and told so */
};

/* Fails with KV_NO_MEMORY, or KV_INVALID if the setup is not as it must be. */
kv_status_t kvw_batch_create(const struct kvw_batch_setup *setup, struct kvw_batch **ret_batch);
/* What is not over is closed, with KV_CANCELLED.  NULL is allowed. */
void kvw_batch_destroy(struct kvw_batch *batch);

void kvw_batch_add(struct kvw_batch *batch, struct kvw_sequence *sequence);

/* Computes until the pass of a group is over, or, if all wait for the store, waits a little with
 * them.  *ret_left: how many are not over.  Fails with the device's error, or KV_NO_MEMORY: then
 * nobody can go on.  What fails of one sequence ends that one alone. */
kv_status_t kvw_batch_step(struct kvw_batch *batch, uint32_t *ret_left);

struct kvw_batch_stats {
    uint64_t prompt_tokens, answer_tokens; /* computed */
    uint64_t row_bytes_most;               /* at a time */
    uint32_t sequences_most;
    double idle_s; /* while nobody could compute: opens, indexes, rows and names on their way */
};
void kvw_batch_get_stats(const struct kvw_batch *batch, struct kvw_batch_stats *ret_stats);

/* Asserts the invariants. */
void kvw_batch_check(const struct kvw_batch *batch);

#endif
