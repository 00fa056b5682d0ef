/* verify.h - verifies rows in memory with the CRCs of their writers.
 *
 * A row that fails is marked in its segment and counted.  It stays bad, even if its bytes
 * verify later, until it is written again.
 *
 * Threads: the data thread.  Memory: none; rows are not copied.
 */
#ifndef KV_KVSERVER_STORE_ROWS_VERIFY_H
#define KV_KVSERVER_STORE_ROWS_VERIFY_H

#include "kvserver/store/rows/unit.h"

/* The rows of some consecutive blocks of a unit. */
struct kvs_row_set {
    struct kvs_block *const *blocks; /* `block` and later ones */
    uint32_t block;
    uint32_t at; /* the unit's place in them */
    uint32_t row_bytes;
    uint32_t layer, kv_head;
    const struct kv_writers *writers; /* of their tokens; NULL: writer 0 */
};

static inline struct kvs_row_set kvs_unit_rows(const struct kvs_unit *unit)
{
    return (struct kvs_row_set){
        .blocks = unit->blocks->list,
        .at = unit->at,
        .row_bytes = unit->row_bytes,
        .layer = unit->layer,
        .kv_head = unit->kv_head,
        .writers = unit->writers != NULL ? *unit->writers : NULL,
    };
}

/* Verifies the rows of n tokens: begin, begin + stride, ...  Returns the index of the first
 * that is bad, or n. */
uint32_t kvs_verify_run(struct kvs_segment_store *store,
                        const struct kvs_row_set *rows,
                        uint32_t begin,
                        uint32_t stride,
                        uint32_t n);

/* The same, for a caller that computes the CRCs while it reads the rows: the seeds to start
 * from, and the check of its results.
 *   tokens, ret_seeds, computed  (n) */
void kvs_verify_seeds(const struct kvs_row_set *rows,
                      const uint32_t *tokens,
                      uint32_t n,
                      uint32_t *ret_seeds);
uint32_t kvs_verify_crcs(struct kvs_segment_store *store,
                         const struct kvs_row_set *rows,
                         const uint32_t *tokens,
                         const uint32_t *computed,
                         uint32_t n);

/* Returns the first of n tokens from `begin` on whose row is known to be bad, or begin + n.
 * Does not read the rows. */
uint32_t kvs_unit_known_bad(const struct kvs_unit *unit, uint32_t begin, uint32_t n);

#endif
