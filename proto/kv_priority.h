/* kv_priority.h - the order of service of operations: of those that wait for a credit in the
 * client, and of those that wait for execution in a data thread.
 *
 * Threads: pure functions.  Memory: none.
 */
#ifndef KV_PROTO_KV_PRIORITY_H
#define KV_PROTO_KV_PRIORITY_H

#include "proto/kv_wire.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Most urgent first.  A decode step waits for its query, then for the rows that the query
 * selected; the next step's query waits for the rows that this one appends.  A read or a put of
 * a long range has many requests outstanding and waits for all of them. */
enum kv_priority {
    KV_PRIORITY_QUERY,
    KV_PRIORITY_FETCH,
    KV_PRIORITY_APPEND,
    KV_PRIORITY_READ,
    KV_PRIORITY_PUT,
    KV_PRIORITY_COUNT,
};

/* Returns the priority of a data operation. */
enum kv_priority kv_op_priority(enum kv_op_id op);

#ifdef __cplusplus
}
#endif
#endif
