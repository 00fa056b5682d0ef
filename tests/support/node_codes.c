#include "tests/support/node_codes.h"

#include "kvserver/store/node_private.h"
#include "kvserver/store/rows/residency.h"

#include <string.h>

/* The code of a row in subspace j, as kernels/pq_tiles.h says that they lie. */
static uint32_t
code_at(const struct kv_pq_shape *shape, const uint8_t *tile, uint32_t row, uint32_t j)
{
    const uint32_t half = row / 64, at = row % 64;

    if (shape->bits <= 4)
        return tile[j * 64 + at] >> 4 * half & 15;
    if (shape->bits > 6)
        return tile[j * 128 + row];
    const uint8_t *pair = tile + j / 2 * 192;
    if (j == shape->m - 1 && j % 2 == 0)
        return pair[row];
    if (j % 2 == 0)
        return pair[64 * half + at] & 63;
    if (half == 0)
        return pair[128 + at] & 63;
    return pair[at] >> 6 | pair[64 + at] >> 6 << 2 | pair[128 + at] >> 6 << 4;
}

static void
stand_for(const struct kvs_codebook *book, const uint8_t *tile, uint32_t row, double *ret_key)
{
    const uint32_t width = book->shape.d / book->shape.m;
    const float *rotation = kvs_codebook_rotation(book);
    double rotated[KV_ROTATION_DIM_MAX];

    for (uint32_t j = 0; j < book->shape.m; j++) {
        const uint32_t code = code_at(&book->shape, tile, row, j);

        for (uint32_t i = 0; i < width; i++)
            ret_key[j * width + i] = (double)kvs_codebook_centroids(
                book)[((size_t)j * width + i) << book->shape.bits | code];
    }
    if (rotation == NULL)
        return;
    /* Back from its axes to those of keys. */
    const size_t stride = kv_rotation_size(book->shape.d) / book->shape.d;
    memcpy(rotated, ret_key, book->shape.d * sizeof(*rotated));
    for (uint32_t i = 0; i < book->shape.d; i++) {
        ret_key[i] = 0;
        for (uint32_t r = 0; r < book->shape.d; r++)
            ret_key[i] += (double)rotation[i * stride + r] * rotated[r];
    }
}

static bool are_here(const struct kvs_unit *unit, uint32_t n_tokens)
{
    for (uint32_t i = 0; i < kvs_blocks_for(n_tokens); i++)
        if (!kvs_block_is_here(kvs_unit_block(unit, i)))
            return false;
    return true;
}

static void codes_of_unit(const struct kvs_shard *data,
                          const struct kvs_unit *unit,
                          uint32_t d_k,
                          uint32_t n_tokens,
                          double *ret_keys,
                          bool *ret_coded)
{
    for (uint32_t token = 0; token < n_tokens; token++) {
        const struct kvs_codes *codes = kvs_unit_codes(unit, token / KV_BLOCK_TOKENS);
        const uint32_t row = token % KV_BLOCK_TOKENS;

        ret_coded[token] = codes->column.bytes != NULL && row < codes->n_coded;
        if (ret_coded[token])
            stand_for(kvs_codebook_at(&data->codebooks, codes->codebook), codes->column.bytes,
                      row, ret_keys + (size_t)token * d_k);
    }
}

bool node_codes(struct kvs_node *node,
                const struct kv_id128 *session_token,
                uint32_t layer,
                uint32_t kv_head,
                uint32_t n_tokens,
                double *ret_keys,
                bool *ret_coded)
{
    for (uint32_t i = 0; i < node->n_threads; i++) {
        const struct kvs_shard *data = &node->shard[i];

        for (uint32_t j = 0; j < data->n_sessions; j++) {
            const struct kvs_shard_session *part = &data->sessions[j];
            const struct kvs_unit *unit;

            if (!part->used || memcmp(&part->token, session_token, sizeof(*session_token)) != 0)
                continue;
            unit = kvs_shard_session_unit(part, layer, kv_head);
            if (unit == NULL || unit->committed < n_tokens || !are_here(unit, n_tokens))
                continue;
            const uint32_t d_k = part->schema->layers[layer].d_k;
            memset(ret_keys, 0, (size_t)n_tokens * d_k * sizeof(*ret_keys));
            codes_of_unit(data, unit, d_k, n_tokens, ret_keys, ret_coded);
            return true;
        }
    }
    return false;
}
