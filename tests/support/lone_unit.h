/* lone_unit.h - a unit that is all of its session, for tests of what works on units directly.
 *
 * Threads: one.  Memory: the blocks of a lone unit are from malloc, freed with it.
 */
#ifndef KV_TESTS_SUPPORT_LONE_UNIT_H
#define KV_TESTS_SUPPORT_LONE_UNIT_H

#include "kvserver/store/rows/unit.h"

#include <stdlib.h>

/* As kvs_unit_init(). */
static inline kv_status_t lone_unit_init(struct kvs_unit *unit,
                                         struct kvs_segment_store *store,
                                         uint32_t layer,
                                         uint32_t kv_head,
                                         uint32_t row_bytes)
{
    struct kvs_blocks *blocks = malloc(sizeof(*blocks));

    if (blocks == NULL)
        abort();
    kvs_blocks_init(blocks, store, unit, 1);
    return kvs_unit_init(unit, blocks, 0, layer, kv_head, row_bytes);
}

/* As kvs_unit_clear(), and frees its blocks. */
static inline void lone_unit_clear(struct kvs_unit *unit)
{
    kvs_unit_clear(unit);
    kvs_blocks_clear(unit->blocks);
    free(unit->blocks);
}

/* Makes `child`, which has no rows, share the first rows. */
static inline kv_status_t
lone_unit_fork(const struct kvs_unit *unit, struct kvs_unit *child, uint32_t tokens)
{
    const kv_status_t status = kvs_blocks_fork_begin(child->blocks, tokens);

    /* A few at a time, as a data thread does it. */
    while (status == KV_OK && !kvs_blocks_fork_on(unit->blocks->list, child->blocks, tokens, 3))
        ;
    return status;
}

/* Asserts all invariants of it and its blocks. */
static inline void lone_unit_check(const struct kvs_unit *unit)
{
    kvs_unit_check(unit);
    kvs_blocks_check(unit->blocks);
    for (uint32_t i = 0; i < kvs_unit_n_segments(unit); i++)
        kvs_block_check(unit->blocks->store, kvs_unit_block(unit, i));
}

#endif
