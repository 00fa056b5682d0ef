/* kv_priority.h - which operation goes first where several wait: in the client for a credit, in
 * a data thread for its turn.
 *
 * Threads: pure functions.  Memory: none.
 */
#ifndef KV_PROTO_KV_PRIORITY_H
#define KV_PROTO_KV_PRIORITY_H

#include "proto/kv_wire.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Most urgent first.  A token of a decode step waits for its query, then for rows that the
 * query named; the next step's query waits for what this one appends.  Whoever reads or puts a
 * whole range has more of it under way. */
enum kv_priority {
    KV_PRIORITY_QUERY,
    KV_PRIORITY_FETCH,
    KV_PRIORITY_APPEND,
    KV_PRIORITY_READ,
    KV_PRIORITY_PUT,
    KV_PRIORITY_COUNT,
};

/* Of an operation of the data plane. */
enum kv_priority kv_op_priority(enum kv_op_id op);

#ifdef __cplusplus
}
#endif
#endif
