#include "gpu-worker/engine/forward.h"

#include "gpu-worker/base/time.h"

#include <assert.h>
#include <stdlib.h>

enum {
    LOGIT_ROWS = 32, /* computed at once */
};

struct kv_forward {
    const struct kv_model *model;
    struct kv_attention *attention;
    struct kv_device *device;
    struct kv_trace *trace;
    uint64_t traced_us; /* where the last span ended */
    float *turns_host;

    /* (KV_FORWARD_CHUNK, ...) */
    struct kv_device_buffer *x;     /* n_hidden: the state */
    struct kv_device_buffer *h;     /* n_hidden: normed, or what is added to x */
    struct kv_device_buffer *q;     /* n_q_heads, d */
    struct kv_device_buffer *k, *v; /* n_kv_heads, d */
    struct kv_device_buffer *mixed; /* n_q_heads, d */
    struct kv_device_buffer *gate, *up;
    struct kv_device_buffer *turns;
    /* (LOGIT_ROWS, ...) */
    struct kv_device_buffer *last;   /* n_hidden */
    struct kv_device_buffer *logits; /* n_vocabulary */
};

void kv_forward_trace(struct kv_forward *forward, struct kv_trace *trace)
{
    forward->trace = trace;
}

/* A span from where the last one ended; NULL begins anew. */
static void trace_span(struct kv_forward *forward, const char *name, uint32_t layer)
{
    const struct kv_trace_arg args[] = {{"layer", layer}};
    uint64_t now_us;

    if (forward->trace == NULL)
        return;
    now_us = kvw_now_us();
    if (name != NULL)
        kv_trace_span(forward->trace, KV_TRACE_COMPUTE, name, forward->traced_us, now_us, args,
                      1);
    forward->traced_us = now_us;
}

void kv_forward_destroy(struct kv_forward *forward)
{
    if (forward == NULL)
        return;
    struct kv_device_buffer *const buffers[] = {
        forward->x,     forward->h,     forward->q,      forward->k,
        forward->v,     forward->mixed, forward->gate,   forward->up,
        forward->turns, forward->last,  forward->logits,
    };

    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++)
        forward->device->row->buffer_destroy(buffers[i]);
    free(forward->turns_host);
    free(forward);
}

kv_status_t kv_forward_create(const struct kv_model *model,
                              struct kv_attention *attention,
                              struct kv_forward **ret_forward)
{
    const struct kv_model_params *params = &model->params;
    const size_t q_width = (size_t)params->n_q_heads * params->d;
    const size_t kv_width = (size_t)params->n_kv_heads * params->d;
    struct kv_forward *forward = calloc(1, sizeof(*forward));
    kv_status_t status = KV_NO_MEMORY;

    if (forward == NULL)
        return KV_NO_MEMORY;
    forward->model = model;
    forward->attention = attention;
    forward->device = model->device;

    const struct {
        struct kv_device_buffer **buffer;
        size_t rows, columns;
    } wanted[] = {
        {&forward->x, KV_FORWARD_CHUNK, params->n_hidden},
        {&forward->h, KV_FORWARD_CHUNK, params->n_hidden},
        {&forward->q, KV_FORWARD_CHUNK, q_width},
        {&forward->k, KV_FORWARD_CHUNK, kv_width},
        {&forward->v, KV_FORWARD_CHUNK, kv_width},
        {&forward->mixed, KV_FORWARD_CHUNK, q_width},
        {&forward->gate, KV_FORWARD_CHUNK, params->n_ffn},
        {&forward->up, KV_FORWARD_CHUNK, params->n_ffn},
        {&forward->turns, KV_FORWARD_CHUNK, params->n_rot},
        {&forward->last, LOGIT_ROWS, params->n_hidden},
        {&forward->logits, LOGIT_ROWS, params->n_vocabulary},
    };

    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        status = forward->device->row->buffer_create(
            forward->device, wanted[i].rows * wanted[i].columns * sizeof(float),
            wanted[i].buffer);
        if (status != KV_OK)
            goto err;
    }
    forward->turns_host = calloc((size_t)KV_FORWARD_CHUNK * params->n_rot, sizeof(float));
    if (forward->turns_host == NULL) {
        status = KV_NO_MEMORY;
        goto err;
    }
    *ret_forward = forward;
    return KV_OK;

err:
    kv_forward_destroy(forward);
    return status;
}

static kv_status_t run_layer(struct kv_forward *forward,
                             enum kv_phase phase,
                             uint32_t layer,
                             uint32_t token_begin,
                             uint32_t n)
{
    const struct kv_model_params *params = &forward->model->params;
    const struct kv_model_layer *weights = &forward->model->layers[layer];
    struct kv_device *device = forward->device;
    const struct kv_device_row *row = device->row;
    kv_status_t status;

    trace_span(forward, NULL, layer);
    row->rms_norm(device, weights->attn_norm, params->epsilon, forward->x, n, forward->h);
    row->matmul(device, weights->q, weights->q_bias, forward->h, n, forward->q);
    row->matmul(device, weights->k, weights->k_bias, forward->h, n, forward->k);
    row->matmul(device, weights->v, weights->v_bias, forward->h, n, forward->v);
    row->rope(device, params->rope_style, forward->turns, forward->q, n, params->n_q_heads,
              params->d, params->n_rot);
    row->rope(device, params->rope_style, forward->turns, forward->k, n, params->n_kv_heads,
              params->d, params->n_rot);
    trace_span(forward, "projections", layer);
    status =
        forward->attention->row->attend(forward->attention, phase, layer, token_begin, n,
                                        forward->q, forward->k, forward->v, forward->mixed);
    if (status != KV_OK)
        return status;
    trace_span(forward, "attention", layer);
    row->matmul(device, weights->attn_output, weights->attn_output_bias, forward->mixed, n,
                forward->h);
    row->add(device, forward->x, forward->h, (size_t)n * params->n_hidden);

    row->rms_norm(device, weights->ffn_norm, params->epsilon, forward->x, n, forward->h);
    row->matmul(device, weights->gate, weights->gate_bias, forward->h, n, forward->gate);
    row->matmul(device, weights->up, weights->up_bias, forward->h, n, forward->up);
    row->silu_gate(device, forward->gate, forward->up, (size_t)n * params->n_ffn);
    row->matmul(device, weights->down, weights->down_bias, forward->gate, n, forward->h);
    row->add(device, forward->x, forward->h, (size_t)n * params->n_hidden);
    trace_span(forward, "feed-forward", layer);
    return KV_OK;
}

kv_status_t kv_forward_step(struct kv_forward *forward,
                            enum kv_phase phase,
                            const uint32_t *tokens,
                            uint32_t token_begin,
                            uint32_t n)
{
    const struct kv_model_params *params = &forward->model->params;
    struct kv_device *device = forward->device;
    kv_status_t status = KV_OK;

    assert(n > 0 && n <= (phase == KV_DECODE ? 1 : KV_FORWARD_CHUNK));
    for (uint32_t i = 0; i < n; i++)
        if (tokens[i] >= params->n_vocabulary)
            return KV_INVALID;
    kv_model_turns(params, token_begin, n, forward->turns_host);
    device->row->write(forward->turns, 0, forward->turns_host,
                       (size_t)n * params->n_rot * sizeof(float));
    device->row->embed(device, forward->model->embedding, tokens, n, forward->x);
    for (uint32_t layer = 0; status == KV_OK && layer < params->n_layers; layer++)
        status = run_layer(forward, phase, layer, token_begin, n);
    if (status == KV_OK)
        status = kvw_attention_passed(forward->attention, phase, token_begin, n);
    if (status == KV_OK)
        status = device->row->sync(device);
    return status;
}

kv_status_t
kv_forward_logits(struct kv_forward *forward, uint32_t first, uint32_t n, float *ret_logits)
{
    const struct kv_model_params *params = &forward->model->params;
    const struct kv_device_row *row = forward->device->row;
    const size_t state_bytes = params->n_hidden * sizeof(float);
    const size_t logits_bytes = params->n_vocabulary * sizeof(float);

    for (uint32_t done = 0; done < n;) {
        const uint32_t count = n - done < LOGIT_ROWS ? n - done : LOGIT_ROWS;

        row->copy(forward->last, 0, forward->x, (first + done) * state_bytes,
                  count * state_bytes);
        row->rms_norm(forward->device, forward->model->output_norm, params->epsilon,
                      forward->last, count, forward->last);
        row->matmul(forward->device, forward->model->output, NULL, forward->last, count,
                    forward->logits);
        row->read(forward->logits, 0, ret_logits + (size_t)done * params->n_vocabulary,
                  count * logits_bytes);
        done += count;
    }
    return row->sync(forward->device);
}
