/* query_parse.h - the body of a query message (kv_wire.h): its parts, and whether it is sound.
 *
 * Threads: the data thread.  Memory: the work's; nothing is kept.
 */
#ifndef KV_KVSERVER_STORE_OPS_QUERY_PARSE_H
#define KV_KVSERVER_STORE_OPS_QUERY_PARSE_H

#include "kvserver/store/query/selection.h"
#include "kvserver/store/shard/shard.h"

/* Everything that a message may have wrong: bounds, units, what they hold, whether the answer
 * fits one message.  False: the work has failed, with an error that names the field.  The
 * functions below are for works that have passed. */
bool kv_query_check(struct kv_work *work);

const struct kv_wire_query *kv_query_of(const struct kv_work *work);
const struct kv_wire_unit *kv_query_units(const struct kv_work *work);   /* (n_units) */
const struct kv_wire_range *kv_query_ranges(const struct kv_work *work); /* (n_ranges) */
/* Of each unit (n_queries, d_k); behind all of them the blocks that the asker holds. */
const float *kv_query_vectors(const struct kv_work *work);

/* The request's unit i, and its layer. */
struct kv_unit *kv_query_unit(const struct kv_work *work, uint32_t i);
const struct kv_layer_schema *kv_query_layer(const struct kv_work *work, uint32_t i);

/* Whether there are outputs and log-sum-exps. */
bool kv_query_has_outputs(const struct kv_wire_query *query);
/* Whether only rows are named that the asker holds. */
bool kv_query_names_held_only(const struct kv_wire_query *query);

/* What is chosen, were `rerank` times as many wanted. */
struct kv_choice kv_query_choice(const struct kv_wire_query *query, uint32_t rerank);

#endif
