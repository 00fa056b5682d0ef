#include "gpu-worker/engine/forward.h"

#include "gpu-worker/base/time.h"

#include <assert.h>
#include <stdlib.h>

enum {
    LOGIT_ROWS = 32, /* computed at once */
};

/* An item of the pass under way, and its part of the buffers. */
struct item {
    struct kvw_forward_item *of;
    struct kvw_device_buffer *q, *k, *v, *mixed;
    bool is_part; /* else they are the forward's own */
};

struct kvw_forward {
    const struct kvw_model *model;
    struct kvw_method *attention; /* of steps; NULL: it is for passes */
    uint32_t tokens_max, items_max;
    struct item *items; /* (items_max) */
    uint32_t n_items, n_tokens;
    uint32_t *tokens; /* (tokens_max) of all items */
    struct kvw_device *device;
    struct kvw_trace *trace;
    uint64_t traced_us; /* where the last span ended */
    float *rotations_host;

    /* (tokens_max, ...) */
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
    free(forward->items);
    free(forward->tokens);
    free(forward);
}

kv_status_t kvw_forward_create(const struct kvw_model *model,
                               struct kvw_method *attention,
                               struct kvw_forward **ret_forward)
{
    const kv_status_t status =
        kvw_forward_create_many(model, KVW_FORWARD_CHUNK, 1, ret_forward);

    if (status == KV_OK)
        (*ret_forward)->attention = attention;
    return status;
}

kv_status_t kvw_forward_create_many(const struct kvw_model *model,
                                    uint32_t n_tokens,
                                    uint32_t n_items,
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
    forward->tokens_max = n_tokens;
    forward->items_max = n_items;
    forward->device = model->device;

    const struct {
        struct kvw_device_buffer **buffer;
        size_t rows, columns;
    } wanted[] = {
        {&forward->x, n_tokens, params->n_hidden},
        {&forward->h, n_tokens, params->n_hidden},
        {&forward->q, n_tokens, q_width},
        {&forward->k, n_tokens, kv_width},
        {&forward->v, n_tokens, kv_width},
        {&forward->mixed, n_tokens, q_width},
        {&forward->gate, n_tokens, params->n_ffn},
        {&forward->up, n_tokens, params->n_ffn},
        {&forward->rotations, n_tokens, params->n_rot},
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
    forward->rotations_host = calloc((size_t)n_tokens * params->n_rot, sizeof(float));
    forward->items = calloc(n_items, sizeof(forward->items[0]));
    forward->tokens = calloc(n_tokens, sizeof(forward->tokens[0]));
    if (forward->rotations_host == NULL || forward->items == NULL || forward->tokens == NULL) {
        status = KV_NO_MEMORY;
        goto err;
    }
    *ret_forward = forward;
    return KV_OK;

err:
    kvw_forward_destroy(forward);
    return status;
}

/* ---- a pass ------------------------------------------------------------------------------- */

static void release_parts(struct kvw_forward *forward)
{
    const struct kvw_device_ops *ops = forward->device->ops;

    for (uint32_t i = 0; i < forward->n_items; i++) {
        struct item *item = &forward->items[i];

        if (!item->is_part)
            continue;
        ops->buffer_destroy(item->q);
        ops->buffer_destroy(item->k);
        ops->buffer_destroy(item->v);
        ops->buffer_destroy(item->mixed);
    }
    forward->n_items = 0;
}

/* Gives an item the rows of the buffers from `row` on. */
static kv_status_t take_part(struct kvw_forward *forward, struct item *item, uint32_t row)
{
    const struct kvw_model_params *params = &forward->model->params;
    const struct {
        struct kvw_device_buffer *of, **part;
        size_t width;
    } wanted[] = {
        {forward->q, &item->q, (size_t)params->n_q_heads * params->d},
        {forward->k, &item->k, (size_t)params->n_kv_heads * params->d},
        {forward->v, &item->v, (size_t)params->n_kv_heads * params->d},
        {forward->mixed, &item->mixed, (size_t)params->n_q_heads * params->d},
    };
    kv_status_t status = KV_OK;

    item->is_part = true;
    item->q = item->k = item->v = item->mixed = NULL;
    for (size_t i = 0; status == KV_OK && i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        const size_t row_bytes = wanted[i].width * sizeof(float);

        status =
            forward->device->ops->buffer_part(forward->device, wanted[i].of, row * row_bytes,
                                              item->of->n * row_bytes, wanted[i].part);
    }
    return status;
}

/* Takes the items, and computes what comes before the first layer. */
static kv_status_t
begin(struct kvw_forward *forward, struct kvw_forward_item *items, uint32_t n_items)
{
    const struct kvw_model_params *params = &forward->model->params;
    struct kvw_device *device = forward->device;
    kv_status_t status = KV_OK;

    assert(n_items <= forward->items_max && forward->n_items == 0);
    forward->n_tokens = 0;
    for (uint32_t i = 0; status == KV_OK && i < n_items; i++) {
        struct kvw_forward_item *of = &items[i];
        struct item *item = &forward->items[i];
        const uint32_t row = forward->n_tokens;

        assert(of->n > 0 && of->n <= (of->phase == KVW_DECODE ? 1 : KVW_FORWARD_CHUNK));
        assert(of->n <= forward->tokens_max - row);
        of->status = KV_OK;
        *item = (struct item){.of = of,
                              .q = forward->q,
                              .k = forward->k,
                              .v = forward->v,
                              .mixed = forward->mixed};
        for (uint32_t j = 0; j < of->n; j++) {
            if (of->tokens[j] >= params->n_vocabulary)
                status = KV_INVALID;
            forward->tokens[row + j] = of->tokens[j];
        }
        kvw_model_rotations(params, of->token_begin, of->n,
                            forward->rotations_host + (size_t)row * params->n_rot);
        forward->n_tokens += of->n;
        forward->n_items++;
        if (status == KV_OK && n_items > 1)
            status = take_part(forward, item, row);
    }
    if (status != KV_OK) {
        release_parts(forward);
        return status;
    }
    /* The last pass has waited for its own copy. */
    kvw_device_write(device, KVW_STREAM_COMPUTE, forward->rotations, 0, forward->rotations_host,
                     (size_t)forward->n_tokens * params->n_rot * sizeof(float));
    device->ops->embed(device, forward->model->embedding, forward->tokens, forward->n_tokens,
                       forward->x);
    return KV_OK;
}

/* The query of a layer whose input is the state as it is now.  Uses h. */
static void
project_query(struct kvw_forward *forward, uint32_t layer, struct kvw_device_buffer *ret_q)
{
    const struct kvw_model_params *params = &forward->model->params;
    const struct kvw_model_layer *weights = &forward->model->layers[layer];
    struct kvw_device *device = forward->device;
    const struct kvw_device_ops *ops = device->ops;
    const uint32_t n = forward->n_tokens;

    ops->rms_norm(device, weights->attn_norm, params->epsilon, forward->x, n, forward->h);
    ops->matmul(device, weights->q, weights->q_bias, forward->h, n, ret_q);
    ops->rope(device, params->rope_style, forward->rotations, ret_q, n, params->n_q_heads,
              params->d, params->n_rot);
}

/* Tells the methods that speculate from the state as it is now what the layer's query would be.
 * `mixed` and h are free at either time. */
static void guess(struct kvw_forward *forward, uint32_t layer, enum kvw_speculate from)
{
    bool is_projected = false;

    if (layer == forward->model->params.n_layers)
        return;
    for (uint32_t i = 0; i < forward->n_items; i++) {
        const struct item *item = &forward->items[i];
        struct kvw_forward_item *of = item->of;

        if (of->phase != KVW_DECODE || of->attention->ops->guess == NULL ||
            of->attention->speculate != from || of->status != KV_OK)
            continue;
        if (!is_projected)
            project_query(forward, layer, forward->mixed);
        is_projected = true;
        of->status =
            of->attention->ops->guess(of->attention, layer, of->token_begin, item->mixed);
    }
}

/* The first half of a layer: what attention needs. */
static void ask(struct kvw_forward *forward, uint32_t layer)
{
    const struct kvw_model_params *params = &forward->model->params;
    const struct kvw_model_layer *weights = &forward->model->layers[layer];
    struct kvw_device *device = forward->device;
    const struct kvw_device_ops *ops = device->ops;
    const uint32_t n = forward->n_tokens;

    trace_span(forward, NULL, layer);
    project_query(forward, layer, forward->q);
    trace_span(forward, "projections", layer);
    for (uint32_t i = 0; i < forward->n_items; i++) {
        const struct item *item = &forward->items[i];
        struct kvw_forward_item *of = item->of;

        if (of->phase == KVW_DECODE && of->attention->ops->ask != NULL && of->status == KV_OK)
            of->status =
                of->attention->ops->ask(of->attention, layer, of->token_begin, item->q);
    }
    trace_span(forward, "query", layer);
    ops->matmul(device, weights->k, weights->k_bias, forward->h, n, forward->k);
    ops->matmul(device, weights->v, weights->v_bias, forward->h, n, forward->v);
    ops->rope(device, params->rope_style, forward->rotations, forward->k, n, params->n_kv_heads,
              params->d, params->n_rot);
    guess(forward, layer + 1, KVW_SPECULATE_INPUT);
    trace_span(forward, "projections", layer);
}

/* The second half: attention, and what follows from it. */
static void answer(struct kvw_forward *forward, uint32_t layer)
{
    const struct kvw_model_params *params = &forward->model->params;
    const struct kvw_model_layer *weights = &forward->model->layers[layer];
    struct kvw_device *device = forward->device;
    const struct kvw_device_ops *ops = device->ops;
    const uint32_t n = forward->n_tokens;

    trace_span(forward, NULL, layer);
    for (uint32_t i = 0; i < forward->n_items; i++) {
        const struct item *item = &forward->items[i];
        struct kvw_forward_item *of = item->of;

        if (of->status == KV_OK)
            of->status =
                of->attention->ops->attend(of->attention, of->phase, layer, of->token_begin,
                                           of->n, item->q, item->k, item->v, item->mixed);
    }
    trace_span(forward, "attention", layer);
    ops->matmul(device, weights->attn_output, weights->attn_output_bias, forward->mixed, n,
                forward->h);
    ops->add(device, forward->x, forward->h, (size_t)n * params->n_hidden);
    guess(forward, layer + 1, KVW_SPECULATE_ATTENTION);

    ops->rms_norm(device, weights->ffn_norm, params->epsilon, forward->x, n, forward->h);
    ops->matmul(device, weights->gate, weights->gate_bias, forward->h, n, forward->gate);
    ops->matmul(device, weights->up, weights->up_bias, forward->h, n, forward->up);
    ops->silu_gate(device, forward->gate, forward->up, (size_t)n * params->n_ffn);
    ops->matmul(device, weights->down, weights->down_bias, forward->gate, n, forward->h);
    ops->add(device, forward->x, forward->h, (size_t)n * params->n_hidden);
    trace_span(forward, "feed-forward", layer);
}

/* Whether none of the items can go on. */
static bool all_failed(const struct kvw_forward *forward)
{
    for (uint32_t i = 0; i < forward->n_items; i++)
        if (forward->items[i].of->status == KV_OK)
            return false;
    return true;
}

/* Ends the pass of all items; the device is waited for in any case: it has their memory. */
static kv_status_t end(struct kvw_forward *forward)
{
    kv_status_t status;

    for (uint32_t i = 0; i < forward->n_items; i++) {
        struct kvw_forward_item *of = forward->items[i].of;

        if (of->status == KV_OK)
            of->status = kvw_method_end_pass(of->attention, of->phase, of->token_begin, of->n);
    }
    status = forward->device->ops->sync(forward->device);
    release_parts(forward);
    return status;
}

/* Group after group: each asks for its next layer when it has the last one's answers. */
static void run_layers(struct kvw_forward_group *groups, uint32_t n_groups, uint32_t n_layers)
{
    for (uint32_t layer = 0; layer <= n_layers; layer++)
        for (uint32_t i = 0; i < n_groups; i++) {
            if (groups[i].n_items == 0 || all_failed(groups[i].forward))
                continue;
            if (layer > 0)
                answer(groups[i].forward, layer - 1);
            if (layer < n_layers)
                ask(groups[i].forward, layer);
        }
}

kv_status_t kvw_forward_pass(struct kvw_forward_group *groups, uint32_t n_groups)
{
    kv_status_t status = KV_OK;
    uint32_t n_begun = 0;

    for (; status == KV_OK && n_begun < n_groups; n_begun++)
        if (groups[n_begun].n_items > 0)
            status =
                begin(groups[n_begun].forward, groups[n_begun].items, groups[n_begun].n_items);
    if (status == KV_OK && n_groups > 0)
        run_layers(groups, n_groups, groups[0].forward->model->params.n_layers);
    for (uint32_t i = 0; i < n_begun; i++) {
        kv_status_t last = KV_OK;

        if (groups[i].n_items > 0 && status == KV_OK)
            last = end(groups[i].forward);
        else if (groups[i].n_items > 0)
            release_parts(groups[i].forward);
        if (status == KV_OK)
            status = last;
    }
    return status;
}

kv_status_t kvw_forward_step(struct kvw_forward *forward,
                             enum kvw_phase phase,
                             const uint32_t *tokens,
                             uint32_t token_begin,
                             uint32_t n)
{
    struct kvw_forward_item item = {.attention = forward->attention,
                                    .phase = phase,
                                    .tokens = tokens,
                                    .token_begin = token_begin,
                                    .n = n};
    struct kvw_forward_group group = {forward, &item, 1};
    const kv_status_t status = kvw_forward_pass(&group, 1);

    return status == KV_OK ? item.status : status;
}

/* ---- logits ------------------------------------------------------------------------------- */

/* Of the first rows of forward->last. */
static void logits_of_last(struct kvw_forward *forward, uint32_t n, float *ret_logits)
{
    const struct kvw_model_params *params = &forward->model->params;
    const struct kvw_device_ops *ops = forward->device->ops;

    ops->rms_norm(forward->device, forward->model->output_norm, params->epsilon, forward->last,
                  n, forward->last);
    ops->matmul(forward->device, forward->model->output, NULL, forward->last, n,
                forward->logits);
    kvw_device_read(forward->device, KVW_STREAM_COMPUTE, forward->logits, 0, ret_logits,
                    n * params->n_vocabulary * sizeof(float));
}

/* Brings states to forward->last, from row `to` on. */
static void take_states(struct kvw_forward *forward, uint32_t to, uint32_t first, uint32_t n)
{
    const size_t bytes = forward->model->params.n_hidden * sizeof(float);

    forward->device->ops->copy(forward->device, KVW_STREAM_COMPUTE, forward->last,
                               (struct kvw_place){to * bytes, bytes}, forward->x,
                               (struct kvw_place){first * bytes, bytes},
                               (struct kvw_pieces){n, bytes});
}

kv_status_t
kvw_forward_logits(struct kvw_forward *forward, uint32_t first, uint32_t n, float *ret_logits)
{
    for (uint32_t done = 0; done < n;) {
        const uint32_t count = n - done < LOGIT_ROWS ? n - done : LOGIT_ROWS;

        take_states(forward, 0, first + done, count);
        logits_of_last(forward, count,
                       ret_logits + (size_t)done * forward->model->params.n_vocabulary);
        done += count;
    }
    return forward->device->ops->sync(forward->device);
}

kv_status_t kvw_forward_logits_of(struct kvw_forward *forward,
                                  const uint32_t *rows,
                                  uint32_t n,
                                  float *ret_logits)
{
    for (uint32_t done = 0; done < n;) {
        const uint32_t count = n - done < LOGIT_ROWS ? n - done : LOGIT_ROWS;

        for (uint32_t i = 0; i < count; i++)
            take_states(forward, i, rows[done + i], 1);
        logits_of_last(forward, count,
                       ret_logits + (size_t)done * forward->model->params.n_vocabulary);
        done += count;
    }
    return forward->device->ops->sync(forward->device);
}
