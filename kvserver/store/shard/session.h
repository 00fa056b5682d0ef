/* session.h - what a data thread knows of a session. */
#ifndef KV_KVSERVER_STORE_SHARD_SESSION_H
#define KV_KVSERVER_STORE_SHARD_SESSION_H

#include "kvserver/base/writers.h"
#include "kvserver/store/rows/unit.h"

#include <stdatomic.h>

struct kvs_shard_session {
    bool used;
    bool changing; /* some of its units are of the generation before: nobody may use it */
    uint32_t index;
    uint32_t generation;
    uint32_t serial; /* of the slot: a request that outlives its session notices */
    struct kv_id128 token;
    uint32_t tenant;
    const kv_schema_t *schema; /* the control thread's, while the session lives */
    uint64_t root;
    uint32_t epoch;
    uint32_t tokens_max;
    struct kvs_unit *units; /* (n_units) of this thread */
    uint16_t *unit_of;      /* (schema->n_units) index into `units`; UINT16_MAX: not here */
    uint32_t n_units;
    int units_class, unit_of_class;
    const struct kv_writers *writers; /* the control thread's, until another comes or it ends */
    struct kvs_request *waiters;
    bool is_woken; /* waiters that need woken_to tokens at most are to look again */
    uint32_t woken_to;
    struct kvs_shard_session *woken_next;
    _Atomic uint64_t used_us; /* when a request last named it */
};

struct kvs_shard;

/* NULL: the schema has no such unit, or another thread or node has it. */
struct kvs_unit *kvs_shard_session_unit(const struct kvs_shard_session *session,
                                        uint32_t layer,
                                        uint32_t kv_head);

/* Compares rows of a unit with their CRCs, by the writers that the session says they have.
 * Returns the index of the first row that differs, `count` if none does.
 *   rows  (count, unit->row_bytes) of the tokens from `begin` on */
uint32_t kvs_shard_session_verify(const struct kvs_shard_session *session,
                                  const struct kvs_unit *unit,
                                  uint32_t begin,
                                  uint32_t count,
                                  const void *rows,
                                  const uint32_t *crcs);

/* Waiters of the session that need `tokens` at most look again, in the steps to come: never
 * inside this call.  UINT32_MAX: all of them do. */
void kvs_shard_session_wake(struct kvs_shard *shard,
                            struct kvs_shard_session *session,
                            uint32_t tokens);

#endif
