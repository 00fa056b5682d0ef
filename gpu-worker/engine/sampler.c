#include "gpu-worker/engine/sampler.h"

#include "kvserver/base/random.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct candidate {
    uint32_t token;
    float logit;
    double share;
};

struct kvw_sampler {
    struct kvw_sampler_options options;
    struct kv_random random;
    uint32_t n_vocabulary;
    struct candidate candidates[]; /* (n_vocabulary) */
};

kv_status_t kvw_sampler_create(const struct kvw_sampler_options *options,
                               uint32_t n_vocabulary,
                               struct kvw_sampler **ret_sampler)
{
    struct kvw_sampler *sampler =
        calloc(1, sizeof(*sampler) + (size_t)n_vocabulary * sizeof(sampler->candidates[0]));

    if (sampler == NULL)
        return KV_NO_MEMORY;
    sampler->options = *options;
    sampler->n_vocabulary = n_vocabulary;
    kv_random_init(&sampler->random, options->seed);
    *ret_sampler = sampler;
    return KV_OK;
}

void kvw_sampler_destroy(struct kvw_sampler *sampler)
{
    free(sampler);
}

static_assert(sizeof(((struct kv_random *)0)->state) ==
                  KVW_SAMPLER_STATE_WORDS * sizeof(uint64_t),
              "a state is all of a generator's");

void kvw_sampler_get_state(const struct kvw_sampler *sampler,
                           uint64_t ret_state[KVW_SAMPLER_STATE_WORDS])
{
    memcpy(ret_state, sampler->random.state, sizeof(sampler->random.state));
}

void kvw_sampler_set_state(struct kvw_sampler *sampler,
                           const uint64_t state[KVW_SAMPLER_STATE_WORDS])
{
    if ((state[0] | state[1] | state[2] | state[3]) != 0)
        memcpy(sampler->random.state, state, sizeof(sampler->random.state));
}

static int by_logit(const void *a, const void *b)
{
    const struct candidate *left = a, *right = b;

    if (left->logit != right->logit)
        return left->logit < right->logit ? 1 : -1;
    return left->token < right->token ? -1 : left->token > right->token;
}

static uint32_t largest(const float *logits, uint32_t n)
{
    uint32_t best = 0;

    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

kv_status_t
kvw_sampler_next(struct kvw_sampler *sampler, const float *logits, uint32_t *ret_token)
{
    const struct kvw_sampler_options *options = &sampler->options;
    struct candidate *candidates = sampler->candidates;
    uint32_t n = sampler->n_vocabulary;
    double total = 0, kept = 0, draw;

    for (uint32_t i = 0; i < n; i++) {
        if (isnan(logits[i]))
            return KV_INVALID;
        candidates[i] = (struct candidate){.token = i, .logit = logits[i]};
    }
    if (options->temperature <= 0) {
        *ret_token = largest(logits, n);
        return KV_OK;
    }

    qsort(candidates, n, sizeof(candidates[0]), by_logit);
    if (!isfinite(candidates[0].logit))
        return KV_INVALID;
    if (options->top_k > 0 && options->top_k < n)
        n = options->top_k;
    for (uint32_t i = 0; i < n; i++) {
        candidates[i].share = exp(((double)candidates[i].logit - (double)candidates[0].logit) /
                                  options->temperature);
        total += candidates[i].share;
    }
    if (options->top_p < 1) {
        uint32_t i = 0;

        do
            kept += candidates[i++].share;
        while (i < n && kept < options->top_p * total);
        n = i;
        total = kept;
    }

    /* 53 random bits: a double in [0, total). */
    draw = (double)(kv_random_next(&sampler->random) >> 11) * 0x1p-53 * total;
    for (uint32_t i = 0; i < n; i++) {
        *ret_token = candidates[i].token;
        draw -= candidates[i].share;
        if (draw < 0)
            break;
    }
    return KV_OK;
}
