/* parse_units.h - the list of units in the body of a put, append, read, fetch, index or query.
 *
 *     fixed    the operation's own part, row->fixed_bytes
 *     units    (n_units) kv_wire_unit
 *     ...      CRCs of a put's rows, ids that fetch names, what else a query asks
 *
 * Each operation says what it checks of a unit, and in which order: what fails first is what the
 * client hears.  All of these fail the request, with an error that names the operation and the
 * unit.
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

/* What comes behind the units. */
static inline const void *kvs_behind_units(const struct kvs_request *request)
{
    return kvs_units(request) + request->header.n_units;
}

/* CRCs of a put, ids of a fetch. */
static inline const uint32_t *kvs_numbers(const struct kvs_request *request)
{
    return kvs_behind_units(request);
}

/* NULL: there is no such unit here. */
static inline struct kvs_unit *kvs_unit_at(const struct kvs_request *request, uint32_t i)
{
    const struct kv_wire_unit *unit = &kvs_units(request)[i];

    return kvs_shard_session_unit(request->session, unit->layer, unit->kv_head);
}

/* Its layer is in the schema. */
static inline const struct kv_layer_schema *kvs_unit_layer(const struct kvs_request *request,
                                                           uint32_t i)
{
    return &request->session->schema->layers[kvs_units(request)[i].layer];
}

/* Bytes of the body up to the end of the list. */
static inline size_t kvs_units_bytes(const struct kvs_request *request)
{
    return request->type->fixed_bytes + request->header.n_units * sizeof(struct kv_wire_unit);
}

/* Whether there are units, not too many, and the body has them. */
static inline bool kvs_units_are_there(const struct kvs_request *request)
{
    return request->header.n_units > 0 && request->header.n_units <= KV_WIRE_UNITS_MAX &&
           kvs_units_bytes(request) <= request->header.body_bytes;
}

/* The error of a list that is not there, or not as long as the body.  Returns false. */
bool kvs_fail_units(struct kvs_request *request);

/* Checks of unit i.  All but the first are for a unit that the schema has, and the third for one
 * that is here. */
bool kvs_check_unit_is_known(struct kvs_request *request, uint32_t i); /* the schema has it */
bool kvs_check_unit_is_here(struct kvs_request *request, uint32_t i);  /* it is this thread's */
bool kvs_check_unit_is_single(struct kvs_request *request,
                              uint32_t i); /* see kvs_begin_units() */
bool kvs_check_unit_has_no_ids(struct kvs_request *request, uint32_t i);

/* From here on kvs_check_unit_is_single() finds units that are named twice. */
static inline void kvs_begin_units(struct kvs_request *request)
{
    request->shard->marks++;
}

/* The units of a put, append, read or fetch.  Counts rows and bytes; fetch counts by ids. */
bool kvs_parse_units(struct kvs_request *request,
                     bool fetch,
                     uint64_t *ret_rows,
                     uint64_t *ret_bytes);

#endif
