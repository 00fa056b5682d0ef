/* attend.h - step 3 of a query: attention over rows of a unit, verified, a slice at a time.
 *
 * Rows are added one by one; whenever a slice of them is together they are attended, in whole
 * groups of the kernel, so that the answer does not depend on how it was cut (kernels/attend.h
 * says what it is).  A slice is some 50 to 100 microseconds of a core that has AVX2: more only
 * where one group is more.
 *
 *     kvs_attention_begin();
 *     for each row: if (kvs_attention_add()) { kvs_attention_slice(); other work }
 *     kvs_attention_slice();  kvs_attention_end();
 *
 * Rows are verified in the pass that reads them (verify.h): one that is bad ends it.
 *
 * Other work may free or move rows only while none is added and not attended.
 *
 * Threads: the data thread.  Memory: the struct's own, a fixed size.
 */
#ifndef KV_KVSERVER_STORE_QUERY_ATTEND_H
#define KV_KVSERVER_STORE_QUERY_ATTEND_H

#include "kernels/attend.h"
#include "kvserver/store/rows/unit.h"

#include <stdbool.h>

enum {
    KVS_ATTENTION_ROWS = 512, /* of a slice */
};

struct kvs_attention {
    struct kv_attend_shape shape;
    const float *queries; /* (n_queries, d_k), the caller's */
    bool each;            /* a row counts only for the vectors that chose it */
    uint32_t slice_rows;  /* whole groups */
    const struct kvs_unit *unit;
    uint32_t n; /* added, not attended yet */
    uint32_t tokens[KVS_ATTENTION_ROWS];
    uint32_t query_mask[KVS_ATTENTION_ROWS];
    const void *rows[KVS_ATTENTION_ROWS];
    const uint32_t *stored[KVS_ATTENTION_ROWS]; /* their CRCs */
    bool has_bad;                               /* one of them is known to be bad */
    uint32_t seeds[KVS_ATTENTION_ROWS], crcs[KVS_ATTENTION_ROWS];
    float state[KV_ATTEND_QUERIES_MAX * (2 + KV_ATTEND_D_MAX)];
};

/* What attention over the rows of a layer works on.  NULL: it can be done; else why not. */
const char *kvs_attention_shape(const struct kv_layer_schema *layer,
                                uint32_t n_queries,
                                float scale,
                                struct kv_attend_shape *ret_shape);

/* No row yet.  each: see `among` below. */
void kvs_attention_begin(struct kvs_attention *attention,
                         const struct kv_attend_shape *shape,
                         const struct kvs_unit *unit,
                         const float *queries,
                         bool each);

/* Adds a row; a slice that is full has been attended.  Returns true: the slice is full.
 *   among  bit q: vector q chose it */
static inline bool
kvs_attention_add(struct kvs_attention *attention, uint32_t token, uint32_t query_mask)
{
    const struct kvs_segment *segment = attention->unit->segments[token / KV_BLOCK_TOKENS];
    const uint32_t row = token % KV_BLOCK_TOKENS;

    attention->rows[attention->n] = segment->rows + (size_t)row * attention->unit->row_bytes;
    attention->stored[attention->n] = &segment->crcs[row];
    attention->tokens[attention->n] = token;
    attention->query_mask[attention->n] = query_mask;
    attention->has_bad |= kvs_segment_is_bad(segment, row);
    /* It lies alone, and is wanted when the row has been read. */
    __builtin_prefetch(&segment->crcs[row], 0, 2);
    return ++attention->n == attention->slice_rows;
}

/* Attends what was added; a slice that is not full is the last one.  Returns a token whose row
 * is bad: there is no answer then; UINT32_MAX: all are good. */
uint32_t kvs_attention_slice(struct kvs_attention *attention, struct kvs_segment_store *store);

/* What all rows amount to.
 *   ret_output  (n_queries, d_v)
 *   ret_lse     (n_queries), natural; -inf: over no row */
void kvs_attention_end(const struct kvs_attention *attention,
                       float *ret_output,
                       float *ret_lse);

#endif
