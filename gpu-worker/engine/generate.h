/* generate.h - one run: tokens in, tokens out, and what it cost.
 *
 *     prefill   the prompt's tokens that are not in the cache yet, in chunks
 *     decode    sample a token, report it, compute it; until a token ends the answer
 *
 * Threads: one at a time.  Memory: the caller's; keeps nothing.
 */
#ifndef KV_GPU_WORKER_ENGINE_GENERATE_H
#define KV_GPU_WORKER_ENGINE_GENERATE_H

#include "gpu-worker/engine/forward.h"
#include "gpu-worker/engine/sampler.h"

#include <signal.h>
#include <stdbool.h>

struct kvw_generate_setup {
    struct kvw_forward *forward;
    struct kvw_method *attention;
    struct kvw_sampler *sampler;
    uint32_t n_vocabulary;
    uint32_t capacity;       /* maximum tokens of prompt and answer */
    uint32_t max_tokens;     /* maximum tokens of the answer */
    const _Atomic int *stop; /* becomes true: generation ends soon */

    void *arg;
    /* Called after each chunk of the prompt; may be NULL. */
    void (*prefilled)(void *arg, uint32_t done, uint32_t total);
    /* Called for each token of the answer, except those that end it; may be NULL. */
    void (*generated)(void *arg, uint32_t token);
    bool (*is_end)(void *arg, uint32_t token);
};

enum kvw_generate_end {
    KVW_END_TOKEN,     /* the model ended its answer */
    KVW_END_MAX,       /* max_tokens */
    KVW_END_CAPACITY,  /* the session is full */
    KVW_END_INTERRUPT, /* `stop` */
};

/* "stop", "length", "context", "interrupt" */
const char *kvw_generate_end_name(enum kvw_generate_end end);

struct kvw_generate_result {
    enum kvw_generate_end end;
    uint32_t prompt_tokens;
    uint32_t reused_tokens;    /* of the prompt, found in the cache */
    uint32_t generated_tokens; /* reported */
    uint32_t passed_tokens;    /* in the cache now: the beginning of prompt and answer */
    double prefill_s;
    double ttft_s; /* from the call to the first token; 0: there is none */
    double tt2t_s; /* to the second */
    double last_s; /* from the beginning to the last token */
    double tpot_s; /* per token after the first */
    double total_s;
};

/* Generates an answer to tokens (n_tokens), n_tokens > 0, of which the first n_passed are in
 * the cache.  Writes the answer after them, where the caller has room for setup->max_tokens
 * more.  Fails with KV_TOO_LARGE if the prompt is longer than the capacity, or with the error
 * of a step. */
kv_status_t kvw_generate(const struct kvw_generate_setup *setup,
                         uint32_t *tokens,
                         uint32_t n_tokens,
                         uint32_t n_passed,
                         struct kvw_generate_result *ret_result);

#endif
