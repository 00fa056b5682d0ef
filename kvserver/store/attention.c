#include "attention.h"

enum {
    SLICE_PRODUCTS = 1 << 20, /* multiplications and additions: 16 or more a cycle */
    SLICE_BYTES = 512 << 10,  /* of rows that come from memory, one by one */
};

const char *kv_attention_shape(const struct kv_layer_schema *layer,
                               uint32_t n_queries,
                               float scale,
                               struct kv_attend_shape *ret_shape)
{
    const struct kv_attend_shape shape = {.type = (enum kv_key_type)layer->dtype,
                                          .d_k = layer->d_k,
                                          .d_v = layer->d_v,
                                          .n_queries = n_queries,
                                          .scale = scale};

    if (layer->kind != KV_LAYER_KV)
        return "rows are keys without values";
    if (!kv_attend_shape_valid(&shape))
        return "no attention over rows of this type and size, at this scale";
    *ret_shape = shape;
    return NULL;
}

static uint32_t slice_rows(const struct kv_attend_shape *shape)
{
    const size_t products = (size_t)shape->n_queries * (shape->d_k + shape->d_v);
    size_t n = SLICE_PRODUCTS / products;

    if (n > SLICE_BYTES / kv_attend_row_bytes(shape))
        n = SLICE_BYTES / kv_attend_row_bytes(shape);
    if (n > KV_ATTENTION_ROWS)
        n = KV_ATTENTION_ROWS;
    n -= n % KV_ATTEND_GROUP;
    return n == 0 ? KV_ATTEND_GROUP : (uint32_t)n;
}

void kv_attention_begin(struct kv_attention *attention,
                        const struct kv_attend_shape *shape,
                        const float *queries,
                        bool each)
{
    attention->shape = *shape;
    attention->queries = queries;
    attention->each = each;
    attention->slice_rows = slice_rows(shape);
    attention->n = 0;
    kv_attend_begin(shape, attention->state);
}

void kv_attention_slice(struct kv_attention *attention)
{
    if (attention->n == 0)
        return;
    kv_attend_rows(&attention->shape, attention->queries, attention->rows, attention->n,
                   attention->each ? attention->among : NULL, attention->state);
    attention->n = 0;
}

void kv_attention_end(const struct kv_attention *attention, float *ret_output, float *ret_lse)
{
    kv_attend_end(&attention->shape, attention->state, ret_output, ret_lse);
}
