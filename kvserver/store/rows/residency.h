/* residency.h - whether a block is in memory, and how it leaves and comes back.
 *
 *                      kvs_block_leave()            kvs_residency_step(): nobody uses it
 *     KVS_IN_MEMORY ---------------------> KVS_LEAVING ---------------------------> KVS_ABSENT
 *          ^  ^                                |                tier->keep()            |
 *          |  +--------------------------------+                     tier->load()       |
 *          |     kvs_block_need(): it stays                        kvs_block_need()     |
 *          |                                                                            v
 *          +------------------------------------------------------------------- KVS_LOADING
 *                        kvs_block_restore() of each segment, kvs_block_restored();
 *                                    or back: kvs_block_stop_loading()
 *
 * A tier keeps what is absent: its bytes, wherever that is.  It chooses what leaves, and brings
 * back what is asked for.  A store without a tier has all its blocks in memory.
 *
 * A block leaves with all its segments and all their columns: rows, CRCs, codes.  What stays is
 * its record, the records of its codes, which refer to codebooks, and the marks of its bad rows:
 * sessions with absent blocks are forked, truncated and closed without a row.  In place of each
 * segment's address the record has a fingerprint of its rows and CRCs, so that a segment is
 * verified when it comes back, before anybody sees it, whatever the tier did with it.  One that is
 * not what left, or that the tier has lost, has only bad rows: whoever needs one of them gets
 * KV_CORRUPT, as for any bad row.
 *
 * Who touches rows, CRCs or codes asks for their blocks before it begins (ops/need_rows.h), and
 * waits for them without a buffer or a pipeline.  What began goes on between slices, with nothing
 * but places of blocks in its hands, so its blocks have to stay:
 *
 *   transfers, index jobs   pin their blocks: a pinned block does not leave.
 *   queries, staged reads   are at work from kvs_work_begin() to kvs_work_end().  A block that was
 *                           marked leaves only when all have ended that were at work at that
 *                           time; who begins later and needs it takes the mark away.  So a query
 *                           pays for two counts, whatever it reads.  Both end by themselves:
 *                           neither waits for its client while it is at work.
 *   scrub, samples of recall  look at each slice, and skip what is absent: they are no reason to
 *                           load anything, and what is away is verified when it comes back.
 *
 * Whoever waits for a block is not at work and keeps nothing in memory: otherwise those who wait
 * for memory and those who wait for blocks would wait for each other.  It is the tier's part not
 * to choose what was just asked for.
 *
 * A block that is loading does not leave again before it is back, unless the tier gives it up
 * (kvs_block_stop_loading()), and its segments that are back keep their memory.  So a tier makes sure
 * that there is memory for a whole block before it restores the first segment (kvs_arena_room()), or
 * that one block gets all its memory before another gets any: blocks of which a part is back would
 * otherwise wait for each other's memory.
 *
 * Threads: the data thread.  Memory: that of the segment store; what is absent is the tier's.
 */
#ifndef KV_KVSERVER_STORE_ROWS_RESIDENCY_H
#define KV_KVSERVER_STORE_ROWS_RESIDENCY_H

#include "kvserver/store/rows/segment.h"

#include <stddef.h>

/* What a tier keeps of a segment. */
struct kvs_segment_image {
    const void *rows;
    const uint32_t *crcs; /* (KV_BLOCK_TOKENS) */
    const void *codes;    /* NULL: none */
    size_t rows_bytes, codes_bytes;
};

struct kvs_tier {
    /* The block leaves: keeps an image of each segment that kvs_block_image() has.  Returns false
     * if it cannot: the block stays. */
    bool (*keep)(void *arg, const struct kvs_block *block);
    /* The block, which it keeps, is needed.  It comes back after this call, or never. */
    void (*load)(void *arg, struct kvs_block *block);
    /* The block has been freed while it was absent: nobody needs what the tier keeps. */
    void (*forget)(void *arg, const struct kvs_block *block);

    /* What was learnt of some rows of a unit, up to those of this block (index/learnt.h): NULL, all
     * three, if the tier does not keep that.
     *   keep_learnt    there is something: asks store->learnt() for it, now or never
     *   recall_learnt  KV_IN_PROGRESS: it is looking, and the thread will be woken; KV_NOT_FOUND: it has
     *                  nothing of that size, or takes too long; KV_OK: the bytes stay until end_recall().
     *                  One at a time
     *   end_recall     of the one that was begun last; allowed if there is none */
    void (*keep_learnt)(void *arg, const struct kvs_block *block, uint32_t at);
    kv_status_t (*recall_learnt)(void *arg,
                                 const struct kvs_block *block,
                                 uint32_t at,
                                 size_t n_bytes,
                                 const void **ret_bytes);
    void (*end_recall)(void *arg);
};

/* ---- for the tier ------------------------------------------------------------------------- */

/* Sets who keeps what is absent; once, before anything is. */
void kvs_residency_set_tier(struct kvs_segment_store *store,
                            const struct kvs_tier *tier,
                            void *arg);

/* Marks a block, which then leaves when nobody uses it any more and nobody asks for it until
 * then.  Fails with KV_BUSY if it is not in memory, is pinned, or too many leave. */
kv_status_t kvs_block_leave(struct kvs_segment_store *store, struct kvs_block *block);

/* Returns false if the segment has no rows here.  The block is leaving. */
bool kvs_block_image(const struct kvs_segment_store *store,
                     const struct kvs_block *block,
                     uint32_t at,
                     struct kvs_segment_image *ret_image);

/* Brings a segment of a block that is KVS_LOADING back; NULL: its image is lost.  Does nothing if
 * it has been freed meanwhile.  Returns false if there is no memory: nothing has changed. */
bool kvs_block_restore(struct kvs_segment_store *store,
                       struct kvs_block *block,
                       uint32_t at,
                       const struct kvs_segment_image *image);

/* Returns a block of n segments that is absent, with a ref of the caller's, whose rows an earlier
 * process wrote: of each segment, rows of so many bytes, to be brought back by the tier, which
 * answers for them: there is no fingerprint.  Returns NULL if there is no memory. */
struct kvs_block *kvs_block_create_absent(struct kvs_segment_store *store,
                                          const uint32_t *row_bytes,
                                          uint32_t n_segments);

/* Returns how many bytes a segment's rows have that are away. */
size_t kvs_segment_away_bytes(const struct kvs_segment_store *store,
                              const struct kvs_segment *segment);

/* The tier gives a block up that is loading: what is back of it leaves again, and whoever waits for it
 * is told to ask again. */
void kvs_block_stop_loading(struct kvs_segment_store *store, struct kvs_block *block);
/* All its segments are back. */
void kvs_block_restored(struct kvs_segment_store *store, struct kvs_block *block);

/* ---- for who touches rows ----------------------------------------------------------------- */

/* Asks for the block.  Returns whether it is in memory; if not, store->arrived() will tell. */
bool kvs_block_need(struct kvs_segment_store *store, struct kvs_block *block);

/* Returns whether its rows, CRCs and codes may be touched during this call. */
static inline bool kvs_block_is_here(const struct kvs_block *block)
{
    return block->residency <= KVS_LEAVING;
}

/* From now on until kvs_work_end() no block leaves that the caller has found in memory.  Returns
 * what that call is to be given, never 0. */
uint8_t kvs_work_begin(struct kvs_segment_store *store);
void kvs_work_end(struct kvs_segment_store *store, uint8_t work);

/* ---- for the store ------------------------------------------------------------------------ */

/* Frees the memory of a block that has been leaving for long enough.  Returns whether any block
 * is leaving. */
bool kvs_residency_step(struct kvs_segment_store *store);

/* A segment that is away is about to be freed: the size of its rows is no longer held. */
void kvs_segment_away_release(struct kvs_segment_store *store,
                              const struct kvs_segment *segment);

/* A block that is not in memory, or leaves it, is about to be freed. */
void kvs_block_forget(struct kvs_segment_store *store, struct kvs_block *block);

/* Returns how many blocks are absent. */
static inline uint64_t kvs_residency_n_absent(const struct kvs_segment_store *store)
{
    return store->n_away - store->n_leaving;
}

#endif
