/* residency.h - whether a block is in memory, and how it leaves and comes back.
 *
 *                      kvs_block_leave()            kvs_residency_step(): nobody uses it
 *     KVS_IN_MEMORY ---------------------> KVS_LEAVING ---------------------------> KVS_ABSENT
 *       ^  |   ^                            |    ^              tier->keep()            |
 *       |  |   +----------------------------+    | kvs_block_leave()                    |
 *       |  |    needed: it stays            v    |        kvs_block_need_columns()      |
 *       |  +-----------------------------> KVS_PARTLY <---------------------------------+
 *       |    kvs_segment_let_go()              |       kvs_segment_need(): tier->want()
 *       |                                      |       kvs_block_need(): tier->load()
 *       +--------------------------------------+
 *         kvs_block_restore() of each segment, kvs_block_restored()
 *
 * A tier keeps what is absent: its bytes, wherever that is.  It chooses what leaves, and brings
 * back what is asked for.  A store without a tier has all its blocks in memory.
 *
 * There are two ways to leave.  A block that nobody needs leaves with all its segments and all their
 * columns: rows, CRCs, codes.  Of a block that somebody needs a tier may let the rows of some units go,
 * and bring them back in place of others': so a session is used whose rows are more than memory, and of
 * which a layer is needed at a time.  Codes stay then, being few, and CRCs until all rows of a group of
 * segments have gone.  Queries that find their candidates by codes need the rows of these only
 * (ops/query_rows.h).
 *
 * Which rows will not be needed soon is guessed from passes.  A model uses its layers in turn: whoever
 * queries a unit again is in the next pass.  What was not used in a pass or the one before is idle; it
 * counts passes modulo 4, so what nobody has used for longer is taken for used in two of four.
 *
 * What stays of an absent block is its record, the records of its codes, which refer to codebooks, and
 * the marks of its bad rows:
 * sessions with absent blocks are forked, truncated and closed without a row.  In place of each
 * segment's address the record has a fingerprint of its rows and CRCs, so that a segment is
 * verified when it comes back, before anybody sees it, whatever the tier did with it.  One that is
 * not what left, or that the tier has lost, has only bad rows: whoever needs one of them gets
 * KV_CORRUPT, as for any bad row.
 *
 * Who touches rows or CRCs asks for their segments before it begins (ops/need_rows.h), and waits for
 * them without a buffer or a pipeline; a query begins with codes in memory, and once more when it knows
 * which rows it needs (ops/query_rows.h).  What began goes on between slices, with nothing but places of
 * blocks in its hands, so what it needs has to stay:
 *
 *   transfers, index jobs   pin their blocks: a pinned block does not leave, and of one that only jobs
 *                           have pinned, rows are let go of that no job needs.
 *   queries, staged reads   are at work from kvs_work_begin() to kvs_work_end().  A block that was
 *                           marked leaves only when all have ended that were at work at that
 *                           time; who begins later and needs it takes the mark away.  Rows of a
 *                           unit are let go of when nobody is at work at that unit of any session.
 *                           So a query pays for two counts and one for each unit, whatever it reads.
 *                           Both end by themselves: neither waits for its client while it is at work.
 *   scrub, samples of recall  look at each slice, and skip rows that are absent: they are no reason
 *                           to load anything, and what is away is verified when it comes back.  The
 *                           scrub verifies codes of such rows while no query is at work.
 *
 * Whoever waits for a block is not at work and keeps no rows in memory: otherwise those who wait
 * for memory and those who wait for blocks would wait for each other.  It is the tier's part not
 * to choose what was just asked for.
 *
 * Whoever waits for segments of several units or blocks needs all of them at once.  So that two of
 * them do not wait for each other's memory, one is first (ops/need_rows.h): the tier is told what that
 * one needs (tier->prefer()), and makes room for it with what is others'.
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

/* Columns of consecutive blocks: one for every `per_column` of them, kept with the last of these.  The last column
 * may be of fewer. */
struct kvs_columns_asked {
    enum kvs_column_kind kind;
    struct kvs_block *const *blocks; /* (n_blocks) */
    uint32_t n_blocks, per_column;
    uint32_t at;       /* the place of their unit */
    uint32_t n_bytes;  /* of each */
    uint32_t identity; /* 0: any */
};

/* A column that was read, until end_recall(), and the chapter that it belongs to. */
struct kvs_recalled {
    const void *bytes;
    uint32_t block_begin, n_blocks;
};

static inline uint32_t kvs_columns_asked_n(const struct kvs_columns_asked *asked)
{
    return (asked->n_blocks + asked->per_column - 1) / asked->per_column;
}

/* Returns the block that column i ends with. */
static inline const struct kvs_block *
kvs_columns_asked_block(const struct kvs_columns_asked *asked, uint32_t i)
{
    const uint32_t end = (i + 1) * asked->per_column;

    return asked->blocks[(end < asked->n_blocks ? end : asked->n_blocks) - 1];
}

struct kvs_tier {
    /* The block leaves: keeps an image of each segment that kvs_block_image() has.  Returns false
     * if it cannot: the block stays. */
    bool (*keep)(void *arg, const struct kvs_block *block);
    /* The block, which it keeps, will be needed.  It comes back after this call, or never. */
    void (*load)(void *arg, struct kvs_block *block);
    /* The segment, which it keeps, is needed.  It comes back after this call, or the tier gives it up:
     * kvs_segment_give_up().  NULL: load() is all it has. */
    void (*want)(void *arg, struct kvs_block *block, uint32_t at);
    /* What was preferred is not any more; a segment is, which is needed, whether it is there or not.
     * NULL, both: none ever is. */
    void (*prefer_none)(void *arg);
    void (*prefer)(void *arg, struct kvs_block *block, uint32_t at);
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

    /* Columns of codes and summaries (index/kept.h): NULL, all four, if the tier does not keep them for
     * the next process.
     *   keep_columns    there are some that end with the segment: asks store->kept() for them.  Returns false if
     *                   it is to be asked again, some time later
     *   recall_columns  as recall_learnt(), of all that are asked for: KV_OK if there are all of them, with
     *                   that identity.  end_recall() ends it, too
     *   recalled        one of them; after KV_OK, until end_recall()
     *   may_recall      whether an earlier process may have kept codes of the segment; false once they were
     *                   looked for */
    bool (*keep_columns)(void *arg, const struct kvs_block *block, uint32_t at);
    kv_status_t (*recall_columns)(void *arg, const struct kvs_columns_asked *asked);
    struct kvs_recalled (*recalled)(void *arg, uint32_t i);
    bool (*may_recall)(void *arg, const struct kvs_block *block, uint32_t at);
};

/* ---- for the tier ------------------------------------------------------------------------- */

/* Sets who keeps what is absent; once, before anything is. */
void kvs_residency_set_tier(struct kvs_segment_store *store,
                            const struct kvs_tier *tier,
                            void *arg);

/* Marks a block, which then leaves when nobody uses it any more and nobody asks for it until
 * then.  Fails with KV_BUSY if it is absent, is pinned, or too many leave.  None of it is wanted. */
kv_status_t kvs_block_leave(struct kvs_segment_store *store, struct kvs_block *block);

/* Lets the rows of a segment go, of which the tier has an image, while its codes and CRCs stay.
 * Returns how many bytes of memory are free for it; 0: it is away, or somebody uses it. */
size_t
kvs_segment_let_go(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at);

/* Moves the rows of a block out of a page of the arena, to another one of their class.  Returns false if
 * somebody uses them, or no other page has room. */
bool kvs_block_move_rows(struct kvs_segment_store *store,
                         struct kvs_block *block,
                         const void *rows,
                         int32_t page);

/* Returns false if the segment has no rows in memory.  The block is leaving, or in memory. */
bool kvs_block_image(const struct kvs_segment_store *store,
                     const struct kvs_block *block,
                     uint32_t at,
                     struct kvs_segment_image *ret_image);

/* Brings a segment of a block that is KVS_PARTLY back; NULL: its image is lost.  Does nothing if
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

/* The tier does not bring back what is wanted: whoever waits for it asks again. */
void kvs_segment_give_up(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at);
/* Nothing of it is on its way back.  It is in memory if nothing is away. */
void kvs_block_restored(struct kvs_segment_store *store, struct kvs_block *block);

/* ---- for who touches rows ----------------------------------------------------------------- */

/* Asks for the segment.  Returns whether it is in memory; if not, store->arrived() will tell. */
bool kvs_segment_need(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at);

/* The block will be needed: it comes back while there is memory.  Returns whether it is there. */
bool kvs_block_need(struct kvs_segment_store *store, struct kvs_block *block);

/* A block that leaves stays. */
void kvs_block_stay(struct kvs_segment_store *store, struct kvs_block *block);

/* Columns of the block may be in memory from now on, whether its rows are or not: one that is absent is
 * KVS_PARTLY, one that leaves stays.  The caller has pinned it. */
void kvs_block_need_columns(struct kvs_segment_store *store, struct kvs_block *block);

/* Rows of the segment are about to be used, or to come back for that: in this pass. */
static inline void
kvs_segment_note_use(struct kvs_segment_store *store, struct kvs_block *block, uint32_t at)
{
    block->segments[at].pass = store->passes[at % KVS_WORK_UNITS] & 3;
}

/* Returns whether rows of the segment were not used in this pass nor the one before. */
static inline bool kvs_segment_is_idle(const struct kvs_segment_store *store,
                                       const struct kvs_block *block,
                                       uint32_t at)
{
    return ((store->passes[at % KVS_WORK_UNITS] - block->segments[at].pass) & 3) >= 2;
}

/* Who uses a unit again and again begins a pass each time, or is in the one that another session has
 * begun.
 *   pass  its own, of that unit */
static inline void kvs_pass_end(struct kvs_segment_store *store, uint32_t at, uint8_t *pass)
{
    uint8_t *now = &store->passes[at % KVS_WORK_UNITS];

    if (*pass == *now) {
        ++*now;
        store->n_passes++;
    }
    *pass = *now;
}

/* Returns whether the segment's rows, CRCs and codes may be touched during this call. */
static inline bool kvs_segment_is_here(const struct kvs_block *block, uint32_t at)
{
    return !kvs_segment_is_away(&block->segments[at]);
}

/* The same of all its segments. */
bool kvs_block_is_here(const struct kvs_block *block);

/* Where somebody is at work: of each unit of a session on this thread, modulo KVS_WORK_UNITS. */
struct kvs_work {
    uint64_t units[KVS_WORK_UNITS / 64];
    uint8_t turn; /* 0: nobody is */
};

static inline void kvs_work_add(struct kvs_work *work, uint32_t at)
{
    work->units[at % KVS_WORK_UNITS / 64] |= UINT64_C(1) << at % 64;
}

/* From now on until kvs_work_end() no block leaves that the caller has found in memory, and nothing
 * of the units that were added.  `turn` is not 0 meanwhile. */
void kvs_work_begin(struct kvs_segment_store *store, struct kvs_work *work);
void kvs_work_end(struct kvs_segment_store *store, struct kvs_work *work);

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
