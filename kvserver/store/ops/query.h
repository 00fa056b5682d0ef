/* query.h - the queries of a data thread: one runs at a time, the others queue for the
 * pipeline.
 *
 * Threads: the data thread.  Memory: kvs_op_query_open() / kvs_op_query_close().
 */
#ifndef KV_KVSERVER_STORE_OPS_QUERY_H
#define KV_KVSERVER_STORE_OPS_QUERY_H

#include "kvserver/store/ops/recall.h"
#include "kvserver/store/query/pipeline.h"

struct kvs_query_queue {
    struct kvs_query_pipeline *pipeline;
    struct kvs_request *owner;                 /* the request that has the pipeline, or NULL */
    bool begun;                                /* the owner's query has begun */
    uint64_t begun_us;                         /* time of its first slice */
    struct kvs_unit *units[KV_WIRE_UNITS_MAX]; /* of that query */
    struct kvs_request_queue waiting;          /* requests that wait for the pipeline */
    struct kvs_recall *recall;                 /* is given the selected rows */
};

static inline struct kvs_query_queue *kvs_query_queue_of(const struct kvs_shard *shard)
{
    return shard->op_state[KV_OP_QUERY];
}

#endif
