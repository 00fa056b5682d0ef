/* query.h - the state of a query operation. */
#ifndef KV_CLIENT_OPS_QUERY_H
#define KV_CLIENT_OPS_QUERY_H

#include "client/include/kvclient.h"
#include "client/op.h"
#include "proto/kv_wire.h"

#include <assert.h>

struct kvc_saved_reply;
struct kvc_query_part {
    struct kv_query query; /* its pointers are into the operation's memory; n_cached is NULL */
    uint32_t n_heads, d_k, d_v;
    uint32_t n_candidates;
    uint32_t n_ids_min, n_ids_max; /* selected of one head */
    uint32_t n_blocks;             /* with eligible rows */
    bool has_reads;                /* replies say what was read */
    struct kv_wire_query_reads reads;
    float output_most, lse_most; /* bounds of absolute values */
    size_t row_bytes;
    uint32_t n_placed;               /* heads whose rows have a place in the buffer */
    uint8_t *base;                   /* of all rows */
    struct kv_query_result *results; /* (n_heads) */
    struct kvc_saved_reply **saved;  /* (n_heads) of the message that begins there */
    uint32_t *cached_begin;          /* (n_heads + 1) of each head's blocks in query.cached */
};
static_assert(sizeof(struct kvc_query_part) <= KVC_OP_STATE_BYTES,
              "an operation has room for it");

static inline struct kvc_query_part *kvc_query_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

#endif
