/* attend.h - step 3 of a query: attention over rows of a unit, verified, in pieces.
 *
 * Rows are added one by one.  A full piece is attended in whole batches of the kernel, so the
 * result does not depend on where pieces end (kernels/attend.h defines it).  A piece takes
 * some 10 us on a core with AVX2; more only if one batch does.
 *
 *     kvs_attention_begin();
 *     for each row: if (kvs_attention_add()) { kvs_attention_piece(); other work }
 *     kvs_attention_piece();  kvs_attention_end();
 *
 * Rows are verified in the pass that reads them (verify.h): a bad row ends the query.
 *
 * Other work may free or move rows only while every added row has been attended.
 *
 * Threads: the data thread.  Memory: the struct's own, a fixed size.
 */
#ifndef KV_KVSERVER_STORE_QUERY_ATTEND_H
#define KV_KVSERVER_STORE_QUERY_ATTEND_H

#include "kernels/attend.h"
#include "kvserver/store/rows/unit.h"

#include <stdbool.h>

enum {
    KVS_ATTENTION_ROWS = 512, /* maximum per piece */
};

struct kvs_attention {
    struct kv_attend_shape shape;
    const float *queries; /* (n_queries, d_k), the caller's */
    bool each;            /* a row counts only for the query vectors that selected it */
    uint32_t piece_rows;  /* whole batches */
    const struct kvs_unit *unit;
    uint32_t n; /* added, not yet attended */
    uint32_t tokens[KVS_ATTENTION_ROWS];
    uint32_t query_mask[KVS_ATTENTION_ROWS];
    const void *rows[KVS_ATTENTION_ROWS];
    const uint32_t *stored[KVS_ATTENTION_ROWS]; /* their stored CRCs */
    bool has_bad;                               /* one of them is known to be bad */
    uint32_t seeds[KVS_ATTENTION_ROWS], crcs[KVS_ATTENTION_ROWS];
    float state[KV_ATTEND_QUERIES_MAX * (2 + KV_ATTEND_D_MAX)];
};

/* Writes the shape of attention over the rows of a layer.  Returns NULL, or a message if
 * attention over such rows is not supported. */
const char *kvs_attention_shape(const struct kv_layer_schema *layer,
                                uint32_t n_queries,
                                float scale,
                                struct kv_attend_shape *ret_shape);

/* Begins without rows.  each: see `query_mask` below. */
void kvs_attention_begin(struct kvs_attention *attention,
                         const struct kv_attend_shape *shape,
                         const struct kvs_unit *unit,
                         const float *queries,
                         bool each);

/* Adds a row; the previous full piece has been attended.  Returns true if the piece is full.
 *   query_mask  bit q: query vector q selected it */
static inline bool
kvs_attention_add(struct kvs_attention *attention, uint32_t token, uint32_t query_mask)
{
    const struct kvs_unit *unit = attention->unit;
    const struct kvs_block *block = kvs_unit_block(unit, token / KV_BLOCK_TOKENS);
    const uint32_t row = token % KV_BLOCK_TOKENS;
    const uint32_t *crc = &kvs_block_crcs(block, unit->at)[row];

    attention->rows[attention->n] =
        kvs_block_rows(block, unit->at) + (size_t)row * unit->row_bytes;
    attention->stored[attention->n] = crc;
    attention->tokens[attention->n] = token;
    attention->query_mask[attention->n] = query_mask;
    attention->has_bad |= kvs_segment_has_bad(block, unit->at) &&
                          kvs_segment_is_bad(unit->blocks->store, block, unit->at, row);
    /* The CRC lies elsewhere, and is needed once the row has been read. */
    __builtin_prefetch(crc, 0, 2);
    return ++attention->n == attention->piece_rows;
}

/* Attends the added rows; only the last piece may be partial.  Returns a token whose row is
 * bad, which ends the query, or UINT32_MAX. */
uint32_t kvs_attention_piece(struct kvs_attention *attention, struct kvs_segment_store *store);

/* Returns the attention over all rows.
 *   ret_output  (n_queries, d_v)
 *   ret_lse     (n_queries), natural logarithm; -inf: no rows */
void kvs_attention_end(const struct kvs_attention *attention,
                       float *ret_output,
                       float *ret_lse);

#endif
