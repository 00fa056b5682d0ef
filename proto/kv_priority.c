#include "proto/kv_priority.h"

#include <assert.h>

/* Operations that wait in the node for rows have another priority than those that bring rows,
 * so that they cannot use up all credits: index is with reads, not with appends.  Operations
 * that wait for nothing are with fetches. */
static const enum kv_priority priorities[KV_OP_COUNT] = {
    [KV_OP_QUERY] = KV_PRIORITY_QUERY,         [KV_OP_FETCH] = KV_PRIORITY_FETCH,
    [KV_OP_PING] = KV_PRIORITY_FETCH,          [KV_OP_OBJECT_EXISTS] = KV_PRIORITY_FETCH,
    [KV_OP_OBJECT_DELETE] = KV_PRIORITY_FETCH, [KV_OP_APPEND] = KV_PRIORITY_APPEND,
    [KV_OP_READ] = KV_PRIORITY_READ,           [KV_OP_INDEX] = KV_PRIORITY_READ,
    [KV_OP_OBJECT_GET] = KV_PRIORITY_READ,     [KV_OP_PUT] = KV_PRIORITY_PUT,
    [KV_OP_OBJECT_PUT] = KV_PRIORITY_PUT,
};

static_assert(KV_OP_COUNT == 50, "an operation was added: does it have a priority?");

enum kv_priority kv_op_priority(enum kv_op_id op)
{
    assert((unsigned)op < KV_OP_COUNT);
    return priorities[op];
}
