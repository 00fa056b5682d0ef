/* Attention in pieces.  The kernel computes a row's CRC while it reads the row for attention,
 * so that verification costs no second pass over memory. */
#include "kvserver/store/query/attend.h"

#include "kvserver/store/rows/verify.h"

#include <assert.h>

static_assert((int)KV_QUERIES_MAX <= (int)KV_ATTEND_QUERIES_MAX, "a query is attended as one");
static_assert((int)KV_KEY_FP32 == (int)KV_FP32 && (int)KV_KEY_FP16 == (int)KV_FP16 &&
                  (int)KV_KEY_BF16 == (int)KV_BF16,
              "a layer's type is what kernels take it for");

enum {
    PIECE_PRODUCTS = 1 << 18, /* multiply-adds: at least 16 per cycle */
    PIECE_BYTES = 128 << 10,  /* of rows, which are read from memory one by one */
};

const char *kvs_attention_shape(const struct kv_layer_schema *layer,
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
        return "rows have keys but no values";
    if (!kv_attend_shape_valid(&shape))
        return "attention is not supported for rows of this type and size, at this scale";
    *ret_shape = shape;
    return NULL;
}

static uint32_t piece_rows(const struct kv_attend_shape *shape)
{
    const size_t products = (size_t)shape->n_queries * (shape->d_k + shape->d_v);
    size_t n = PIECE_PRODUCTS / products;

    if (n > PIECE_BYTES / kv_attend_row_bytes(shape))
        n = PIECE_BYTES / kv_attend_row_bytes(shape);
    if (n > KVS_ATTENTION_ROWS)
        n = KVS_ATTENTION_ROWS;
    /* Pieces of whole batches: the result does not depend on where pieces end. */
    n -= n % KV_ATTEND_BATCH;
    return n == 0 ? KV_ATTEND_BATCH : (uint32_t)n;
}

void kvs_attention_begin(struct kvs_attention *attention,
                         const struct kv_attend_shape *shape,
                         const struct kvs_unit *unit,
                         const float *queries,
                         bool each)
{
    attention->unit = unit;
    attention->shape = *shape;
    attention->queries = queries;
    attention->each = each;
    attention->piece_rows = piece_rows(shape);
    attention->n = 0;
    attention->has_bad = false;
    kv_attend_begin(shape, attention->state);
}

uint32_t kvs_attention_piece(struct kvs_attention *attention, struct kvs_segment_store *store)
{
    const struct kvs_row_set rows = kvs_unit_rows(attention->unit);
    const uint32_t n = attention->n;
    uint32_t differs = 0;

    if (n == 0)
        return UINT32_MAX;
    kvs_verify_seeds(&rows, attention->tokens, n, attention->seeds);
    kv_attend_checked(&attention->shape, attention->queries, attention->rows, n,
                      attention->each ? attention->query_mask : NULL, attention->seeds,
                      attention->crcs, attention->state);
    attention->n = 0;
    /* One test for all rows.  Which row it was is found only if there is one. */
    for (uint32_t i = 0; i < n; i++)
        differs |= attention->crcs[i] ^ *attention->stored[i];
    if (differs == 0 && !attention->has_bad)
        return UINT32_MAX;
    const uint32_t bad = kvs_verify_crcs(store, &rows, attention->tokens, attention->crcs, n);
    return bad < n ? attention->tokens[bad] : UINT32_MAX;
}

void kvs_attention_end(const struct kvs_attention *attention, float *ret_output, float *ret_lse)
{
    kv_attend_end(&attention->shape, attention->state, ret_output, ret_lse);
}
