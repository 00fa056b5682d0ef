/* need_rows.h - a request asks for the blocks that it is going to touch, before it begins.
 *
 * Each function returns a block that is not in memory yet, and that the request can wait for, or
 * NULL: all are there.  They stay there during the call, or longer if the request is at work from
 * then on (kvs_request_begin_work()).  The last one of those that are missing is returned: where
 * they come in the order in which they were asked for, the request is woken once.
 */
#ifndef KV_KVSERVER_STORE_OPS_NEED_ROWS_H
#define KV_KVSERVER_STORE_OPS_NEED_ROWS_H

#include "kvserver/store/ops/parse_units.h"

/* Needs the rows of these tokens in all units. */
const struct kvs_block *
kvs_need_tokens(struct kvs_request *request, uint32_t begin, uint32_t end);

/* The same of several ranges. */
const struct kvs_block *kvs_need_ranges(struct kvs_request *request,
                                        const struct kv_wire_range *ranges,
                                        uint32_t n_ranges);

/* Needs the rows of a fetch. */
const struct kvs_block *kvs_need_ids(struct kvs_request *request);

/* Needs what a put of these tokens may change or copy: the session's own blocks, too. */
const struct kvs_block *
kvs_need_to_write(struct kvs_request *request, uint32_t begin, uint32_t end);

#endif
