/* parse_units.h - the list of units that begins the body of a put, append, read or fetch.
 *
 *     units    (n_units) kv_wire_unit
 *     numbers  (n) uint32_t: CRCs of a put's rows, or ids that fetch names
 */
#ifndef KV_KVSERVER_STORE_OPS_PARSE_UNITS_H
#define KV_KVSERVER_STORE_OPS_PARSE_UNITS_H

#include "kvserver/store/shard/shard.h"

static inline const struct kv_wire_unit *units_of(const struct kv_work *work)
{
    return (const struct kv_wire_unit *)(const void *)work->body;
}

static inline const uint32_t *numbers_of(const struct kv_work *work)
{
    return (const uint32_t *)(const void *)(work->body + work->request.n_units *
                                                             sizeof(struct kv_wire_unit));
}

static inline struct kv_unit *unit_at(const struct kv_work *work, uint32_t i)
{
    const struct kv_wire_unit *unit = &units_of(work)[i];

    return kv_part_unit(work->part, unit->layer, unit->kv_head);
}

/* Checks that every unit named is in the schema, is this thread's, and is named once.  Counts
 * rows and bytes; fetch counts by ids.  On failure the work has failed. */
bool kv_parse_units(struct kv_work *work, bool fetch, uint64_t *ret_rows, uint64_t *ret_bytes);

#endif
