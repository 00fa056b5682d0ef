#include "gpu-worker/engine/forward.h"

#include "gpu-worker/base/time.h"

#include <assert.h>
#include <stdlib.h>

enum {
    LOGIT_ROWS = 32, /* computed at once */
};

struct kvw_forward {
    const struct kvw_model *model;
    struct kvw_method *attention;
    struct kvw_device *device;
    struct kvw_trace *trace;
    uint64_t traced_us; /* where the last span ended */
    float *rotations_host;

    /* (KVW_FORWARD_CHUNK, ...) */
    struct kvw_device_buffer *x;     /* n_hidden: the state */
    struct kvw_device_buffer *h;     /* n_hidden: normed, or what is added to x */
    struct kvw_device_buffer *q;     /* n_q_heads, d */
    struct kvw_device_buffer *k, *v; /* n_kv_heads, d */
    struct kvw_device_buffer *mixed; /* n_q_heads, d */
    struct kvw_device_buffer *gate, *up;
    struct kvw_device_buffer *rotations;
    /* (LOGIT_ROWS, ...) */
    struct kvw_device_buffer *last;   /* n_hidden */
    struct kvw_device_buffer *logits; /* n_vocabulary */
};

void kvw_forward_trace(struct kvw_forward *forward, struct kvw_trace *trace)
{
    forward->trace = trace;
}

/* A span from where the last one ended; NULL begins anew. */
static void trace_span(struct kvw_forward *forward, const char *name, uint32_t layer)
{
    const struct kvw_trace_arg args[] = {{"layer", layer}};
    uint64_t now_us;

    if (forward->trace == NULL)
        return;
    now_us = kvw_now_us();
    if (name != NULL)
        kvw_trace_span(forward->trace, KVW_TRACE_COMPUTE, name, forward->traced_us, now_us,
                       args, 1);
    forward->traced_us = now_us;
}

void kvw_forward_destroy(struct kvw_forward *forward)
{
    if (forward == NULL)
        return;
    struct kvw_device_buffer *const buffers[] = {
        forward->x,         forward->h,     forward->q,      forward->k,
        forward->v,         forward->mixed, forward->gate,   forward->up,
        forward->rotations, forward->last,  forward->logits,
    };

    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++)
        forward->device->ops->buffer_destroy(buffers[i]);
    free(forward->rotations_host);
    free(forward);
}

kv_status_t kvw_forward_create(const struct kvw_model *model,
                               struct kvw_method *attention,
                               struct kvw_forward **ret_forward)
{
    const struct kvw_model_params *params = &model->params;
    const size_t q_width = (size_t)params->n_q_heads * params->d;
    const size_t kv_width = (size_t)params->n_kv_heads * params->d;
    struct kvw_forward *forward = calloc(1, sizeof(*forward));
    kv_status_t status = KV_NO_MEMORY;

    if (forward == NULL)
        return KV_NO_MEMORY;
    forward->model = model;
    forward->attention = attention;
    forward->device = model->device;

    const struct {
        struct kvw_device_buffer **buffer;
        size_t rows, columns;
    } wanted[] = {
        {&forward->x, KVW_FORWARD_CHUNK, params->n_hidden},
        {&forward->h, KVW_FORWARD_CHUNK, params->n_hidden},
        {&forward->q, KVW_FORWARD_CHUNK, q_width},
        {&forward->k, KVW_FORWARD_CHUNK, kv_width},
        {&forward->v, KVW_FORWARD_CHUNK, kv_width},
        {&forward->mixed, KVW_FORWARD_CHUNK, q_width},
        {&forward->gate, KVW_FORWARD_CHUNK, params->n_ffn},
        {&forward->up, KVW_FORWARD_CHUNK, params->n_ffn},
        {&forward->rotations, KVW_FORWARD_CHUNK, params->n_rot},
        {&forward->last, LOGIT_ROWS, params->n_hidden},
        {&forward->logits, LOGIT_ROWS, params->n_vocabulary},
    };

    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        status = forward->device->ops->buffer_create(
            forward->device, wanted[i].rows * wanted[i].columns * sizeof(float),
            wanted[i].buffer);
        if (status != KV_OK)
            goto err;
    }
    forward->rotations_host = calloc((size_t)KVW_FORWARD_CHUNK * params->n_rot, sizeof(float));
    if (forward->rotations_host == NULL) {
        status = KV_NO_MEMORY;
        goto err;
    }
    *ret_forward = forward;
    return KV_OK;

err:
    kvw_forward_destroy(forward);
    return status;
}

static kv_status_t run_layer(struct kvw_forward *forward,
                             enum kvw_phase phase,
                             uint32_t layer,
                             uint32_t token_begin,
                             uint32_t n)
{
    const struct kvw_model_params *params = &forward->model->params;
    const struct kvw_model_layer *weights = &forward->model->layers[layer];
    struct kvw_device *device = forward->device;
    const struct kvw_device_ops *ops = device->ops;
    const struct kvw_method_ops *methods = forward->attention->ops;
    kv_status_t status;

    trace_span(forward, NULL, layer);
    ops->rms_norm(device, weights->attn_norm, params->epsilon, forward->x, n, forward->h);
    ops->matmul(device, weights->q, weights->q_bias, forward->h, n, forward->q);
    ops->rope(device, params->rope_style, forward->rotations, forward->q, n, params->n_q_heads,
              params->d, params->n_rot);
    if (phase == KVW_DECODE && methods->ask != NULL) {
        trace_span(forward, "projections", layer);
        status = methods->ask(forward->attention, layer, token_begin, forward->q);
        if (status != KV_OK)
            return status;
        trace_span(forward, "question", layer);
    }
    ops->matmul(device, weights->k, weights->k_bias, forward->h, n, forward->k);
    ops->matmul(device, weights->v, weights->v_bias, forward->h, n, forward->v);
    ops->rope(device, params->rope_style, forward->rotations, forward->k, n, params->n_kv_heads,
              params->d, params->n_rot);
    trace_span(forward, "projections", layer);
    status = methods->attend(forward->attention, phase, layer, token_begin, n, forward->q,
                             forward->k, forward->v, forward->mixed);
    if (status != KV_OK)
        return status;
    trace_span(forward, "attention", layer);
    ops->matmul(device, weights->attn_output, weights->attn_output_bias, forward->mixed, n,
                forward->h);
    ops->add(device, forward->x, forward->h, (size_t)n * params->n_hidden);

    ops->rms_norm(device, weights->ffn_norm, params->epsilon, forward->x, n, forward->h);
    ops->matmul(device, weights->gate, weights->gate_bias, forward->h, n, forward->gate);
    ops->matmul(device, weights->up, weights->up_bias, forward->h, n, forward->up);
    ops->silu_gate(device, forward->gate, forward->up, (size_t)n * params->n_ffn);
    ops->matmul(device, weights->down, weights->down_bias, forward->gate, n, forward->h);
    ops->add(device, forward->x, forward->h, (size_t)n * params->n_hidden);
    trace_span(forward, "feed-forward", layer);
    return KV_OK;
}

kv_status_t kvw_forward_step(struct kvw_forward *forward,
                             enum kvw_phase phase,
                             const uint32_t *tokens,
                             uint32_t token_begin,
                             uint32_t n)
{
    const struct kvw_model_params *params = &forward->model->params;
    struct kvw_device *device = forward->device;
    kv_status_t status = KV_OK;

    assert(n > 0 && n <= (phase == KVW_DECODE ? 1 : KVW_FORWARD_CHUNK));
    for (uint32_t i = 0; i < n; i++)
        if (tokens[i] >= params->n_vocabulary)
            return KV_INVALID;
    kvw_model_rotations(params, token_begin, n, forward->rotations_host);
    /* The last step has waited for its own copy. */
    kvw_device_write(device, KVW_STREAM_COMPUTE, forward->rotations, 0, forward->rotations_host,
                     (size_t)n * params->n_rot * sizeof(float));
    device->ops->embed(device, forward->model->embedding, tokens, n, forward->x);
    for (uint32_t layer = 0; status == KV_OK && layer < params->n_layers; layer++)
        status = run_layer(forward, phase, layer, token_begin, n);
    if (status == KV_OK)
        status = kvw_method_end_pass(forward->attention, phase, token_begin, n);
    if (status == KV_OK)
        status = device->ops->sync(device);
    return status;
}

kv_status_t
kvw_forward_logits(struct kvw_forward *forward, uint32_t first, uint32_t n, float *ret_logits)
{
    const struct kvw_model_params *params = &forward->model->params;
    const struct kvw_device_ops *ops = forward->device->ops;
    const size_t state_bytes = params->n_hidden * sizeof(float);
    const size_t logits_bytes = params->n_vocabulary * sizeof(float);

    for (uint32_t done = 0; done < n;) {
        const uint32_t count = n - done < LOGIT_ROWS ? n - done : LOGIT_ROWS;

        ops->copy(forward->device, KVW_STREAM_COMPUTE, forward->last,
                  (struct kvw_place){0, state_bytes}, forward->x,
                  (struct kvw_place){(first + done) * state_bytes, state_bytes},
                  (struct kvw_pieces){count, state_bytes});
        ops->rms_norm(forward->device, forward->model->output_norm, params->epsilon,
                      forward->last, count, forward->last);
        ops->matmul(forward->device, forward->model->output, NULL, forward->last, count,
                    forward->logits);
        kvw_device_read(forward->device, KVW_STREAM_COMPUTE, forward->logits, 0,
                        ret_logits + (size_t)done * params->n_vocabulary, count * logits_bytes);
        done += count;
    }
    return ops->sync(forward->device);
}
