/* parse_units.h - the list of units in the body of a put, append, read, fetch, index or query.
 *
 *     fixed    the operation's own part, type->fixed_bytes
 *     units    (n_units) kv_wire_unit
 *     ...      CRCs of a put's rows, ids of a fetch, the rest of a query
 *
 * Each operation calls the checks that it needs, in its own order; the first that fails decides
 * the error that the client gets.  All of them fail the request with a message that names the
 * operation and the unit.
 */
#ifndef KV_KVSERVER_STORE_OPS_PARSE_UNITS_H
#define KV_KVSERVER_STORE_OPS_PARSE_UNITS_H

#include "kvserver/store/shard/op.h"
#include "kvserver/store/shard/shard.h"

static inline const struct kv_wire_unit *kvs_units(const struct kvs_request *request)
{
    return (const struct kv_wire_unit *)(const void *)(request->body +
                                                       request->type->fixed_bytes);
}

/* Returns what follows the units. */
static inline const void *kvs_behind_units(const struct kvs_request *request)
{
    return kvs_units(request) + request->header.n_units;
}

/* Returns the CRCs of a put, or the ids of a fetch. */
static inline const uint32_t *kvs_numbers(const struct kvs_request *request)
{
    return kvs_behind_units(request);
}

/* Returns unit i, or NULL if it is not on this data thread. */
static inline struct kvs_unit *kvs_unit_at(const struct kvs_request *request, uint32_t i)
{
    const struct kv_wire_unit *unit = &kvs_units(request)[i];

    return kvs_shard_session_unit(request->session, unit->layer, unit->kv_head);
}

/* Returns the layer of unit i, which must be in the schema. */
static inline const struct kv_layer_schema *kvs_unit_layer(const struct kvs_request *request,
                                                           uint32_t i)
{
    return &request->session->schema->layers[kvs_units(request)[i].layer];
}

/* Returns how many tokens are committed in all units, which must be on this data thread. */
uint32_t kvs_units_committed(const struct kvs_request *request);

/* Returns the size of the body up to the end of the list. */
static inline size_t kvs_units_bytes(const struct kvs_request *request)
{
    return request->type->fixed_bytes + request->header.n_units * sizeof(struct kv_wire_unit);
}

/* Returns whether there are units, not too many, and the body is large enough for them. */
static inline bool kvs_units_are_there(const struct kvs_request *request)
{
    return request->header.n_units > 0 && request->header.n_units <= KV_WIRE_UNITS_MAX &&
           kvs_units_bytes(request) <= request->header.body_bytes;
}

/* Fails the request because its list of units is missing or does not match the body.  Returns
 * false. */
bool kvs_fail_units(struct kvs_request *request);

/* Fails the request because a row of unit i is known to be bad.  Returns false. */
bool kvs_fail_bad_row(struct kvs_request *request, uint32_t i, uint32_t token);

/* Check unit i, and fail the request if the check fails: is it in the schema, is it on this
 * data thread, is it named once (see kvs_begin_units()), has it no ids.  All but the first need
 * a unit that is in the schema, and the third one that is on this thread. */
bool kvs_check_unit_is_known(struct kvs_request *request, uint32_t i);
bool kvs_check_unit_is_here(struct kvs_request *request, uint32_t i);
bool kvs_check_unit_is_single(struct kvs_request *request, uint32_t i);
bool kvs_check_unit_has_no_ids(struct kvs_request *request, uint32_t i);

/* Begins a list: kvs_check_unit_is_single() finds units that occur twice after this call. */
static inline void kvs_begin_units(struct kvs_request *request)
{
    request->shard->marks++;
}

/* Checks the units of a put, append, read or fetch, and counts rows and bytes; a fetch counts
 * its ids. */
bool kvs_parse_units(struct kvs_request *request,
                     bool fetch,
                     uint64_t *ret_rows,
                     uint64_t *ret_bytes);

#endif
