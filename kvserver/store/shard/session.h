/* session.h - a shard session: a session as one data thread sees it, with the units placed
 * there. */
#ifndef KV_KVSERVER_STORE_SHARD_SESSION_H
#define KV_KVSERVER_STORE_SHARD_SESSION_H

#include "kvserver/base/writers.h"
#include "kvserver/store/rows/unit.h"

#include <stdatomic.h>

struct kvs_shard_session {
    bool used;
    bool changing; /* a truncate is in progress: no request may use it */
    uint32_t index;
    uint32_t generation;
    uint32_t serial; /* of the place; tells a request that its session has been replaced */
    struct kv_id128 token;
    uint32_t tenant;
    const kv_schema_t *schema; /* owned by the control thread; valid while the session lives */
    uint64_t root, epoch;      /* its placement */
    uint32_t tokens_max;
    struct kvs_blocks blocks; /* of its units */
    struct kvs_unit *units;   /* (n_units) on this thread */
    uint16_t *unit_of;        /* (schema->n_units) index into `units`; UINT16_MAX: not here */
    uint32_t n_units;
    int units_class, unit_of_class;
    const struct kv_writers *writers; /* owned by the control thread; valid until replaced or
                                       * closed */
    struct kvs_request *waiters;
    bool is_woken; /* waiters that need at most woken_to tokens are to be woken */
    uint32_t woken_to;
    struct kvs_shard_session *woken_next;
    _Atomic uint64_t used_us; /* by a request */
};

struct kvs_shard;

/* Returns the unit, or NULL if the schema has no such unit or it is placed elsewhere. */
struct kvs_unit *kvs_shard_session_unit(const struct kvs_shard_session *session,
                                        uint32_t layer,
                                        uint32_t kv_head);

/* Compares rows of a unit with their CRCs, with the writers that the session names.  Returns
 * the index of the first row that differs, or `count` if none does.
 *   rows  (count, unit->row_bytes) of the tokens from `begin` on */
uint32_t kvs_shard_session_verify(const struct kvs_shard_session *session,
                                  const struct kvs_unit *unit,
                                  uint32_t begin,
                                  uint32_t count,
                                  const void *rows,
                                  const uint32_t *crcs);

/* Wakes the waiters that need at most `tokens`, in a later step, never from inside this call.
 * UINT32_MAX wakes all. */
void kvs_shard_session_wake(struct kvs_shard *shard,
                            struct kvs_shard_session *session,
                            uint32_t tokens);

#endif
