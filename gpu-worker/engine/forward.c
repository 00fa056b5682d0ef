#include "gpu-worker/engine/forward.h"

#include "gpu-worker/base/time.h"

#include <assert.h>
#include <stdlib.h>

enum {
    LOGIT_ROWS = 32,   /* of states, for which logits are computed at once, ... */
    LOGIT_STRIPES = 8, /* ... a stripe of the output matrix at a time */
};

/* An item of the pass under way, and its part of the buffers. */
struct item {
    struct kvw_forward_item *of;
    struct kvw_device_buffer *q, *k, *v, *mixed;
    bool is_part; /* else they are the forward's own */
};

/* Logits that are being computed. */
struct logits {
    const uint32_t *rows; /* (n); NULL: first, first + 1, ... */
    uint32_t first, n;
    uint32_t n_done, stripe; /* rows whose logits are complete, and stripes of the next ones' */
    float *to;               /* (n, n_vocabulary) */
};

struct kvw_forward {
    const struct kvw_model *model;
    struct kvw_method *attention; /* of steps; NULL: it is for passes */
    uint32_t tokens_max, items_max;
    struct item *items; /* (items_max) */
    uint32_t n_items,
        n_tokens;     /* of the pass under way, or of the last one; no items: none is */
    uint32_t layer;   /* that has been asked for */
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
    struct logits pending;
    uint32_t n_stripes;
    struct kvw_weight *output[LOGIT_STRIPES]; /* (n_stripes) */
    /* (LOGIT_ROWS, ...) */
    struct kvw_device_buffer *last;   /* n_hidden */
    struct kvw_device_buffer *logits; /* of the widest stripe */
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
    for (uint32_t i = 0; i < forward->n_stripes; i++)
        forward->device->ops->weight_destroy(forward->output[i]);
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

/* The row of the output matrix from which a stripe begins; there are n_stripes. */
static uint32_t stripe_begin(const struct kvw_forward *forward, uint32_t stripe)
{
    return (uint32_t)((uint64_t)forward->model->params.n_vocabulary * stripe /
                      forward->n_stripes);
}

static uint32_t stripe_rows(const struct kvw_forward *forward, uint32_t stripe)
{
    return stripe_begin(forward, stripe + 1) - stripe_begin(forward, stripe);
}

static kv_status_t take_output_stripes(struct kvw_forward *forward)
{
    const struct kvw_model *model = forward->model;
    const uint32_t n_vocabulary = model->params.n_vocabulary;
    kv_status_t status = KV_OK;

    forward->n_stripes = n_vocabulary < LOGIT_STRIPES ? n_vocabulary : LOGIT_STRIPES;
    for (uint32_t i = 0; i < forward->n_stripes && status == KV_OK; i++)
        status = model->device->ops->weight_part(model->device, model->output,
                                                 stripe_begin(forward, i),
                                                 stripe_rows(forward, i), &forward->output[i]);
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
        {&forward->logits, LOGIT_ROWS, params->n_vocabulary / LOGIT_STRIPES + 1},
    };

    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        status = forward->device->ops->buffer_create(
            forward->device, wanted[i].rows * wanted[i].columns * sizeof(float),
            wanted[i].buffer);
        if (status != KV_OK)
            goto err;
    }
    status = take_output_stripes(forward);
    if (status != KV_OK)
        goto err;
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

/* ---- logits ------------------------------------------------------------------------------- */

/* Brings states to forward->last, from row `to` on. */
static void take_states(struct kvw_forward *forward, uint32_t to, uint32_t first, uint32_t n)
{
    const size_t bytes = forward->model->params.n_hidden * sizeof(float);

    forward->device->ops->copy(forward->device, KVW_STREAM_COMPUTE, forward->last,
                               (struct kvw_place){to * bytes, bytes}, forward->x,
                               (struct kvw_place){first * bytes, bytes},
                               (struct kvw_pieces){n, bytes});
}

/* Of the next n rows. */
static void take_next_states(struct kvw_forward *forward, uint32_t n)
{
    const struct logits *pending = &forward->pending;

    if (pending->rows == NULL)
        take_states(forward, 0, pending->first + pending->n_done, n);
    for (uint32_t i = 0; pending->rows != NULL && i < n; i++)
        take_states(forward, i, pending->rows[pending->n_done + i], 1);
    forward->device->ops->rms_norm(forward->device, forward->model->output_norm,
                                   forward->model->params.epsilon, forward->last, n,
                                   forward->last);
}

/* One stripe of the logits. */
static kv_status_t advance_logits(struct kvw_forward *forward, bool *ret_is_over)
{
    const struct kvw_model_params *params = &forward->model->params;
    const struct kvw_device_ops *ops = forward->device->ops;
    struct logits *pending = &forward->pending;
    const uint32_t n_left = pending->n - pending->n_done;
    const uint32_t n = n_left < LOGIT_ROWS ? n_left : LOGIT_ROWS;
    const size_t stripe_bytes = stripe_rows(forward, pending->stripe) * sizeof(float);

    assert(n > 0);
    if (pending->stripe == 0)
        take_next_states(forward, n);
    ops->matmul(forward->device, forward->output[pending->stripe], NULL, forward->last, n,
                forward->logits);
    ops->read(forward->device, KVW_STREAM_COMPUTE, forward->logits,
              (struct kvw_place){0, stripe_bytes},
              pending->to + (size_t)pending->n_done * params->n_vocabulary +
                  stripe_begin(forward, pending->stripe),
              params->n_vocabulary * sizeof(float), (struct kvw_pieces){n, stripe_bytes});
    if (++pending->stripe == forward->n_stripes) {
        pending->stripe = 0;
        pending->n_done += n;
    }
    *ret_is_over = pending->n_done == pending->n;
    return *ret_is_over ? ops->sync(forward->device) : KV_OK;
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

void kvw_forward_abandon(struct kvw_forward *forward)
{
    if (forward->n_items == 0)
        return;
    (void)forward->device->ops->sync(forward->device); /* it has the items' memory */
    release_parts(forward);
}

/* Ends the pass of all items. */
static kv_status_t end(struct kvw_forward *forward)
{
    kv_status_t status;

    for (uint32_t i = 0; i < forward->n_items; i++) {
        struct kvw_forward_item *of = forward->items[i].of;

        if (of->status == KV_OK)
            of->status = kvw_method_end_pass(of->attention, of->phase, of->token_begin, of->n);
    }
    /* Whatever comes of it: the device has the items' memory. */
    status = forward->device->ops->sync(forward->device);
    release_parts(forward);
    return status;
}

kv_status_t
kvw_forward_begin(struct kvw_forward *forward, struct kvw_forward_item *items, uint32_t n_items)
{
    const struct kvw_model_params *params = &forward->model->params;
    struct kvw_device *device = forward->device;
    kv_status_t status = KV_OK;

    assert(n_items > 0 && n_items <= forward->items_max && forward->n_items == 0);
    forward->n_tokens = forward->layer = 0;
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
    ask(forward, 0);
    return KV_OK;
}

/* Attention and what follows it in a layer, then the question of the next one. */
static kv_status_t advance_layer(struct kvw_forward *forward, bool *ret_is_over)
{
    if (!all_failed(forward))
        answer(forward, forward->layer++);
    *ret_is_over = all_failed(forward) || forward->layer == forward->model->params.n_layers;
    if (*ret_is_over)
        return end(forward);
    ask(forward, forward->layer);
    return KV_OK;
}

kv_status_t kvw_forward_advance(struct kvw_forward *forward, bool *ret_is_over)
{
    assert(forward->n_items > 0 || forward->pending.n_done < forward->pending.n);
    return forward->n_items > 0 ? advance_layer(forward, ret_is_over)
                                : advance_logits(forward, ret_is_over);
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
    bool is_over = false;
    kv_status_t status = kvw_forward_begin(forward, &item, 1);

    while (status == KV_OK && !is_over)
        status = kvw_forward_advance(forward, &is_over);
    return status == KV_OK ? item.status : status;
}

/* ---- logits of a pass --------------------------------------------------------------------- */

void kvw_forward_logits_begin(struct kvw_forward *forward,
                              const uint32_t *rows,
                              uint32_t n,
                              float *ret_logits)
{
    assert(n > 0);
    forward->pending = (struct logits){.rows = rows, .n = n, .to = ret_logits};
}

kv_status_t
kvw_forward_logits(struct kvw_forward *forward, uint32_t first, uint32_t n, float *ret_logits)
{
    bool is_over = false;
    kv_status_t status = KV_OK;

    kvw_forward_logits_begin(forward, NULL, n, ret_logits);
    forward->pending.first = first;
    while (status == KV_OK && !is_over)
        status = kvw_forward_advance(forward, &is_over);
    return status;
}
