/* verify.h - rows in memory against the CRCs that their writers made.
 *
 * A row that fails is marked in its segment, counted, and bad from then on, whatever its bytes
 * say later, until it is written again.
 *
 * Threads: the data thread.  Memory: none; the rows stay where they are.
 */
#ifndef KV_KVSERVER_STORE_ROWS_VERIFY_H
#define KV_KVSERVER_STORE_ROWS_VERIFY_H

#include "kvserver/store/rows/unit.h"

/* Rows of some consecutive blocks of a unit. */
struct kvs_row_set {
    struct kvs_segment *const *segments; /* of `block` and those behind it */
    uint32_t block;
    uint32_t row_bytes;
    uint32_t layer, kv_head;
    const struct kv_writers *writers; /* of their tokens; NULL: writer 0 */
};

static inline struct kvs_row_set kvs_unit_rows(const struct kvs_unit *unit)
{
    return (struct kvs_row_set){
        .segments = unit->segments,
        .row_bytes = unit->row_bytes,
        .layer = unit->layer,
        .kv_head = unit->kv_head,
        .writers = unit->writers != NULL ? *unit->writers : NULL,
    };
}

/* Verifies rows of n tokens: begin, begin + stride, ...  Returns the place of the first that is
 * bad, n if none is. */
uint32_t kvs_verify_run(struct kvs_segment_store *store,
                        const struct kvs_row_set *rows,
                        uint32_t begin,
                        uint32_t stride,
                        uint32_t n);

/* The same for whoever makes the CRCs while he reads the rows: the seeds to begin with, and
 * what came out.
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

/* The first of n tokens from `begin` on whose row is known to be bad; begin + n: none is.
 * Nothing is read of the rows. */
uint32_t kvs_unit_known_bad(const struct kvs_unit *unit, uint32_t begin, uint32_t n);

#endif
