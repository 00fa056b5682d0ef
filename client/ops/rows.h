/* rows.h - the state of put, append, read and fetch operations. */
#ifndef KV_CLIENT_OPS_ROWS_H
#define KV_CLIENT_OPS_ROWS_H

#include "client/include/kvclient.h"
#include "client/op.h"

#include <assert.h>

struct kvc_rows_part {
    struct kv_rows row_range;
    uint8_t *base;  /* of the first row */
    uint32_t *crcs; /* may be NULL; read: the caller's, else in the operation's memory */
};

static_assert(sizeof(struct kvc_rows_part) <= KVC_OP_STATE_BYTES,
              "an operation has room for it");

static inline struct kvc_rows_part *kvc_rows_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

struct kvc_fetch_part {
    uint32_t layer, kv_head_begin, n_heads, snapshot;
    const uint32_t *ids; /* in the operation's memory */
    uint8_t *base;
    uint32_t *crcs;                   /* the caller's */
    uint32_t begin[KV_HEADS_MAX + 1]; /* of each head's ids in `ids` */
};
static_assert(sizeof(struct kvc_fetch_part) <= KVC_OP_STATE_BYTES,
              "an operation has room for it");

static inline struct kvc_fetch_part *kvc_fetch_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

#endif
