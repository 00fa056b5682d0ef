/* query_parse.h - the body of a query message (kv_wire.h): its parts, its validation, and the
 * pipeline's input made from it.
 *
 * Threads: the data thread.  Memory: the request's; nothing is kept.
 */
#ifndef KV_KVSERVER_STORE_OPS_QUERY_PARSE_H
#define KV_KVSERVER_STORE_OPS_QUERY_PARSE_H

#include "kvserver/store/query/pipeline.h"
#include "kvserver/store/shard/shard.h"

/* Checks everything that can be wrong with a message: values, units, vectors, and whether the
 * reply fits one message.  Returns false after failing the request with a message that names
 * the field.  The functions below are for requests that have passed. */
bool kvs_query_check(struct kvs_request *request);

const struct kv_wire_query *kvs_query_of(const struct kvs_request *request);
const struct kv_wire_range *
kvs_query_ranges(const struct kvs_request *request); /* (n_ranges) */

/* Writes the pipeline's input, whose `arg` is the request.  The result goes to the body of the
 * reply, in the order of kv_wire.h, with gaps between arrays that are not full. */
void kvs_query_parse(const struct kvs_request *request, struct kvs_query_input *ret_input);

#endif
