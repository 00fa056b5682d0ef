#include "gpu-worker/engine/generate.h"

#include "gpu-worker/base/time.h"

#include <stdlib.h>

const char *kvw_generate_end_name(enum kvw_generate_end end)
{
    static const char *const names[] = {
        [KVW_END_TOKEN] = "stop",
        [KVW_END_MAX] = "length",
        [KVW_END_CAPACITY] = "context",
        [KVW_END_INTERRUPT] = "interrupt",
    };

    return names[end];
}

static kv_status_t prefill(const struct kvw_generate_setup *setup,
                           const uint32_t *tokens,
                           uint32_t n_tokens,
                           uint32_t *end_pass,
                           float *logits)
{
    uint32_t n = 0;

    while (*end_pass < n_tokens) {
        kv_status_t status;

        if (*setup->stop)
            return KV_CANCELLED;
        n = kvw_forward_chunk_end(*end_pass, n_tokens) - *end_pass;
        status =
            kvw_forward_step(setup->forward, KVW_PREFILL, tokens + *end_pass, *end_pass, n);
        if (status != KV_OK)
            return status;
        *end_pass += n;
        /* What the store may be short of memory for goes to its disk meanwhile. */
        if (*end_pass < n_tokens)
            kvw_method_publish(setup->attention, tokens, *end_pass, false);
        if (setup->prefilled != NULL)
            setup->prefilled(setup->arg, *end_pass, n_tokens);
    }
    return kvw_forward_logits(setup->forward, n - 1, 1, logits);
}

/* Samples and computes tokens until the answer ends. */
static kv_status_t decode(const struct kvw_generate_setup *setup,
                          uint32_t *tokens,
                          uint64_t begin_us,
                          float *logits,
                          struct kvw_generate_result *result)
{
    while (true) {
        const uint32_t n = result->prompt_tokens + result->generated_tokens;
        kv_status_t status;
        uint32_t token;

        if (*setup->stop)
            result->end = KVW_END_INTERRUPT;
        else if (result->generated_tokens == setup->max_tokens)
            result->end = KVW_END_MAX;
        else
            result->end = KVW_END_TOKEN;
        if (result->end != KVW_END_TOKEN)
            return KV_OK;

        status = kvw_sampler_next(setup->sampler, logits, &token);
        if (status != KV_OK)
            return status;
        if (setup->is_end(setup->arg, token))
            return KV_OK;
        tokens[n] = token;
        result->generated_tokens++;
        result->last_s = kvw_seconds_since(begin_us);
        if (result->generated_tokens == 1)
            result->ttft_s = result->last_s;
        else if (result->generated_tokens == 2)
            result->tt2t_s = result->last_s;
        if (setup->generated != NULL)
            setup->generated(setup->arg, token);
        if (result->generated_tokens == setup->max_tokens)
            continue;
        if (n == setup->capacity) {
            result->end = KVW_END_CAPACITY;
            return KV_OK;
        }

        status = kvw_forward_step(setup->forward, KVW_DECODE, &tokens[n], n, 1);
        if (status == KV_OK)
            status = kvw_forward_logits(setup->forward, 0, 1, logits);
        if (status != KV_OK)
            return status;
        result->passed_tokens = n + 1;
        /* By now the store has most of the prompt's rows. */
        if (result->generated_tokens == 1 || (n + 1) % KV_BLOCK_TOKENS == 0)
            kvw_method_publish(setup->attention, tokens, n + 1, false);
    }
}

kv_status_t kvw_generate(const struct kvw_generate_setup *setup,
                         uint32_t *tokens,
                         uint32_t n_tokens,
                         uint32_t n_passed,
                         struct kvw_generate_result *ret_result)
{
    const uint64_t begin_us = kvw_now_us();
    struct kvw_generate_result result = {.prompt_tokens = n_tokens, .reused_tokens = n_passed};
    float *logits;
    kv_status_t status;

    if (n_tokens > setup->capacity)
        return KV_TOO_LARGE;
    if (n_tokens == 0 || n_passed >= n_tokens)
        return KV_INVALID;
    logits = malloc(setup->n_vocabulary * sizeof(logits[0]));
    if (logits == NULL)
        return KV_NO_MEMORY;
    result.passed_tokens = n_passed;
    kvw_method_prompt_hint(setup->attention, n_tokens, setup->max_tokens);
    status = prefill(setup, tokens, n_tokens, &result.passed_tokens, logits);
    result.prefill_s = kvw_seconds_since(begin_us);
    if (status == KV_OK)
        status = decode(setup, tokens, begin_us, logits, &result);
    if (status == KV_CANCELLED && *setup->stop) {
        result.end = KVW_END_INTERRUPT;
        status = KV_OK;
    }
    free(logits);
    if (result.generated_tokens > 1)
        result.tpot_s = (result.last_s - result.ttft_s) / (double)(result.generated_tokens - 1);
    if (status == KV_OK)
        status = kvw_method_flush(setup->attention);
    if (status == KV_OK)
        kvw_method_publish(setup->attention, tokens, result.passed_tokens, true);
    result.total_s = kvw_seconds_since(begin_us);
    if (status == KV_OK)
        *ret_result = result;
    return status;
}
