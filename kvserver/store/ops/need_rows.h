/* need_rows.h - a request asks for the segments that it is going to touch, before it begins.
 *
 * Each function returns a segment that is not in memory yet, and that the request can wait for, or
 * NULL: all are there.  They stay there during the call, or longer if the request is at work from
 * then on (kvs_need_begin_work()).  The last one of those that are missing is returned: where
 * they come in the order in which they were asked for, the request is woken once.
 *
 * When memory is short, one request of those that miss something is preferred, the first that has
 * asked: what it needs stays in memory, and others' makes room, of its own session, too.  It
 * is served when it is at work, or over, or waits for something else (kvs_request_is_served()); then it
 * is the turn of the next.  So a request that needs no more than memory has gets it, and two that need
 * more together do not wait for each other.
 */
#ifndef KV_KVSERVER_STORE_OPS_NEED_ROWS_H
#define KV_KVSERVER_STORE_OPS_NEED_ROWS_H

#include "kvserver/store/ops/parse_units.h"

/* Needs the rows of these tokens in all units. */
const struct kvs_segment *
kvs_need_tokens(struct kvs_request *request, uint32_t begin, uint32_t end);

/* Needs the rows of those blocks in the ranges, of each of its units, that `needs` says.  The codes of
 * the others, which are in memory, stay as well. */
typedef bool (*kvs_needs_fn)(const struct kvs_request *request,
                             const void *arg,
                             uint32_t unit, /* of the request */
                             uint32_t block);
const struct kvs_segment *kvs_need_some(struct kvs_request *request,
                                        const struct kv_wire_range *ranges,
                                        uint32_t n_ranges,
                                        kvs_needs_fn needs,
                                        const void *arg);

/* Needs the rows before `end` in one of its units. */
const struct kvs_segment *
kvs_need_unit(struct kvs_request *request, uint32_t unit, uint32_t end);

/* Needs the rows of a fetch. */
const struct kvs_segment *kvs_need_ids(struct kvs_request *request);

/* Needs what a put of these tokens may change or copy: the session's own blocks, too. */
const struct kvs_segment *
kvs_need_to_write(struct kvs_request *request, uint32_t begin, uint32_t end);

/* The request, which has found all that it needs to begin, is at work: kvs_request_begin_work().
 *   knows_all  it will need nothing else; otherwise it keeps its turn until it replies */
void kvs_need_begin_work(struct kvs_request *request, bool knows_all);

#endif
