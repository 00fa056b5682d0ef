/* disk_tier_private.h - what disk_tier.c (jobs), load.c (blocks that come back), verify.c (what is saved
 * of blocks is right), learnt.c and columns.c (what was made of their rows) share. */
#ifndef KV_KVSERVER_STORE_TIER_DISK_TIER_PRIVATE_H
#define KV_KVSERVER_STORE_TIER_DISK_TIER_PRIVATE_H

#include "kvserver/base/map.h"
#include "kvserver/cluster/placement.h"
#include "kvserver/store/rows/residency.h"
#include "kvserver/store/tier/disk_tier.h"
#include "kvserver/store/tier/saved_value.h"

struct kvs_columns_recall;
struct kvs_segment_read;

enum {
    KVS_SEGMENTS_AT_ONCE = 8, /* of a write: 512 KB of rows at d = 128 */
    KVS_VALUES_AT_ONCE = 256, /* a quarter of what the disk takes (KV_DISK_QUEUE_MAX) */
};

/* No kvs_codes_fingerprint(): these are odd. */
#define KVS_CODES_UNKNOWN 2u

/* A block that is saved.  Known while its prefix is in the index; after that, while the disk is the
 * only place that has its rows. */
struct kvs_saved {
    struct kvs_block *block; /* NULL: freed, with reads under way */
    struct kv_id128 home, name;
    struct kv_placement_units units;
    uint32_t depth; /* of the block in its prompt */
    bool is_doomed; /* the index has given it up */
    struct kvs_saved *next_doomed, **link_doomed;
    struct kvs_saved *next_here,
        **link_here;    /* of tier->here; link NULL: no rows of it are here */
    uint64_t preferred; /* tier->preference, if some of it is preferred */
    /* While some of it comes back: */
    uint64_t since_us;
    uint32_t n_wanted; /* segments, in tier->wanted */
    /* While the rest is to come back, too: */
    struct kvs_saved *next_ahead, **link_ahead; /* of tier->ahead; link NULL: it is not */
    uint32_t at;                                /* the next segment to look at */
    uint32_t codes_on_disk
        []; /* (units.n) kvs_codes_fingerprint() of the codes that the disk was given; 0: none;
                      * KVS_CODES_UNKNOWN: by an earlier process, or none */
};

/* Where the block of an item of a job is. */
enum kvs_item_state {
    KVS_ITEM_TO_DO,
    KVS_ITEM_UNDER_WAY,
    KVS_ITEM_LEAVING,
    KVS_ITEM_OVER,
};

struct kvs_item_progress {
    uint8_t state;     /* enum kvs_item_state */
    uint8_t n_tries;   /* to write codes */
    uint8_t kind;      /* verify: enum kvs_saved_kind of the next value */
    uint16_t at;       /* the next segment, or unit */
    uint16_t n_ops;    /* under way */
    uint16_t n_learnt; /* save: units that were asked for what was learnt of them */
    bool has_failed;
};
static_assert(KV_UNITS_MAX <= UINT16_MAX, "units are counted in an item");

struct kvs_job {
    struct kvs_tier_item *items; /* (n); NULL: there is none */
    struct kvs_item_progress *progress;
    uint32_t n, first; /* those before `first` are over */
};

/* A write of one item's job. */
struct kvs_job_op {
    struct kvs_disk_tier *tier;
    struct kvs_job_op *next, **link;
    enum kvs_tier_job job;
    uint32_t item;
    struct kvs_block *pinned; /* NULL: none */
    struct kvs_block
        *owners[KVS_SEGMENTS_AT_ONCE]; /* (n_owners) pinned, whose rows are written */
    unsigned n_owners;
    size_t bytes;
    uint64_t memory[]; /* tails, or codes with theirs */
};

/* What was learnt on its way to the disk, and back; a column on its way there. */
struct kvs_value_op {
    struct kvs_disk_tier *tier;
    struct kvs_value_op *next, **link;
    struct kvs_saved_key key;
    size_t bytes;                  /* without the tail */
    const struct kvs_block *block; /* whose codes are written, of this place; NULL: none */
    uint32_t at, fingerprint;
    uint64_t since_us;
    bool is_given_up;   /* a read that nobody waits for */
    kv_status_t status; /* of a read; KV_IN_PROGRESS: it is under way; KV_BUSY: the disk has
                         * not taken it yet */
    uint64_t memory[];
};

/* A segment that is to come back. */
struct kvs_segment_read {
    struct kvs_disk_tier *tier;
    struct kvs_saved *saved;               /* NULL: given up, with values under way */
    struct kvs_segment_read *next, **link; /* of tier->wanted, or of those given up */
    uint32_t at;
    uint32_t n_left; /* values under way */
    uint32_t n_tries;
    size_t rows_room, codes_room;
    bool has_rows, has_codes;
    bool is_checked, is_good; /* the rows are those that were saved */
    uint64_t *memory;         /* rows with their tail, then codes; NULL: it has not begun */
};

/* A value that is read to be verified.  It knows its block by the job's item: that may go
 * meanwhile. */
struct kvs_verify_read {
    struct kvs_disk_tier *tier;
    struct kvs_verify_read *next,
        **link; /* of those under way; next: of those that are ready */
    enum kvs_saved_kind kind;
    uint32_t item, at, n_tries;
    kv_status_t status;
    size_t room, bytes;
    uint64_t memory[]; /* with its tail */
};

struct kvs_disk_tier {
    struct kvs_segment_store *store;
    const struct kv_clock *clock;
    uint32_t thread, n_threads;
    struct kv_disk_queue *queue;
    void (*job_done)(void *arg, enum kvs_tier_job job);
    void *arg;
    struct kv_map *saved; /* by the address of the block */
    struct kvs_saved *doomed;
    struct kvs_job jobs[KVS_TIER_JOBS];
    struct kvs_job_op *ops;
    size_t ops_bytes;
    struct kvs_saved *here; /* blocks of which rows may be in memory */
    /* Segments come back in this order; those from to_read on have not begun. */
    struct kvs_segment_read *wanted, **wanted_end, *to_read;
    struct kvs_segment_read *given_up; /* with values under way */
    size_t reading_bytes;              /* of both */
    /* Blocks that come back while there is nothing else. */
    struct kvs_saved *ahead, **ahead_end;
    /* What is needed at once now (residency.h): segments of these places of blocks with this number. */
    uint64_t preference;
    uint64_t preferred_at[KV_UNITS_MAX / 64];
    uint64_t preferred_bytes;
    uint32_t last_at;  /* the last of these places */
    uint64_t lacks_us; /* since when there is no memory for it; 0: there is */
    /* Rows that are let go of next: of this place before last_at, of this block. */
    uint32_t back;
    struct kvs_saved *to_let_go; /* NULL: the first of all */
    /* In this round of all places: rows were let go of; others are used at this moment, or preferred. */
    bool has_let_go, is_in_use, is_preferred;
    /* Idle rows are let go of first: the place and the block that are looked at next, and how many
     * places in a row had none. */
    uint32_t idle_at;
    struct kvs_saved *idle; /* NULL: the first of all */
    uint32_t n_idle_places; /* n_segments_max: none had any, */
    uint64_t idle_passes;   /* when the store had begun so many passes */
    /* A page of the arena whose rows are moved to others, from which element on, and how many sparser
     * ones there were from which somebody used some. */
    int32_t page;   /* KVS_PAGE_NONE: none */
    int page_class; /* of rows that were let go of last; -1: there were none */
    uint32_t move_at, n_skipped;
    uint64_t moved_us;       /* when no page had only rows that nobody used; 0: not lately */
    bool is_empty;           /* there was nothing in the last round, but what is preferred */
    bool gives;              /* counted in pages->n_givers */
    uint32_t n_segments_max; /* of a block */
    uint64_t looked_us;      /* when there was nothing to let go of, last */
    struct kvs_verify_read *verifying; /* under way */
    struct kvs_verify_read *verify_ready;
    size_t verifying_bytes;            /* of both */
    struct kvs_value_op *value_writes; /* under way */
    size_t value_bytes;                /* of these */
    uint32_t n_values;
    uint64_t
        unsynced_us; /* when the first was written of those that a sync is to make stay; 0: none */
    bool is_syncing;
    struct kvs_value_op *learnt_reads; /* under way, and the recall */
    unsigned n_learnt_reads;
    struct kvs_value_op *recall;          /* of learnt_reads; NULL: none */
    struct kvs_columns_recall *columns;   /* NULL: none */
    bool has_adopted;                     /* some block of an earlier process */
    struct kvs_columns_recall *abandoned; /* with reads under way */
    struct kvs_tier_counts counts;
};

static inline void kvs_tier_count(_Atomic uint64_t *counter, uint64_t n)
{
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n,
                          memory_order_relaxed);
}

/* Whether the disk has enough to do with what was made of rows. */
static inline bool kvs_values_are_many(const struct kvs_disk_tier *tier)
{
    return tier->value_bytes >= KVS_TIER_WRITING || tier->n_values >= KVS_VALUES_AT_ONCE;
}

static inline struct kvs_saved_key
kvs_saved_key_at(const struct kvs_saved *saved, enum kvs_saved_kind kind, uint32_t at)
{
    return kvs_saved_key(&saved->home, &saved->name, kind,
                         saved->units.first + at * saved->units.step);
}

/* ---- disk_tier.c ---- */

/* Returns what is saved of the item here, or NULL: it has no units here, or has left the index. */
struct kvs_saved *kvs_saved_of_item(const struct kvs_disk_tier *tier,
                                    const struct kvs_tier_item *item);
/* Whether the block, which is saved, has the segment in memory, as far as anybody knows as it should
 * be; then writes it again.  The item counts a write that fails.  Returns false if it is to be tried
 * again later. */
bool kvs_can_mend(const struct kvs_saved *saved, uint32_t at);
bool kvs_mend(struct kvs_disk_tier *tier,
              uint32_t i,
              const struct kvs_saved *saved,
              uint32_t at);
/* Nothing is on the disk any more of the block, or it does not matter. */
void kvs_saved_drop(struct kvs_disk_tier *tier, struct kvs_saved *saved);

/* Returns the block of the index that is saved, or NULL. */
struct kvs_saved *kvs_saved_of_block(const struct kvs_disk_tier *tier,
                                     const struct kvs_block *block);
/* The same of the index or of sessions only. */
struct kvs_saved *kvs_saved_any(const struct kvs_disk_tier *tier,
                                const struct kvs_block *block);

/* ---- load.c ---- */

/* What the store's tier does (rows/residency.h). */
void kvs_tier_load(void *arg, struct kvs_block *block);
void kvs_tier_want(void *arg, struct kvs_block *block, uint32_t at);
/* Nothing of the block is to come back any more, until it is asked for again. */
void kvs_load_give_up(struct kvs_disk_tier *tier, struct kvs_saved *saved);
/* Goes on with all that come back.  Returns false if there was nothing to do. */
bool kvs_load_step(struct kvs_disk_tier *tier);
/* Frees what was under way; the queue is closed. */
void kvs_loads_close(struct kvs_disk_tier *tier);

/* ---- let_go.c ---- */

void kvs_tier_prefer_none(void *arg);
void kvs_tier_prefer(void *arg, struct kvs_block *block, uint32_t at);
bool kvs_is_preferred(const struct kvs_disk_tier *tier,
                      const struct kvs_saved *saved,
                      uint32_t at);
/* Rows of the block are in memory, or may be from now on; none are. */
void kvs_saved_is_here(struct kvs_disk_tier *tier, struct kvs_saved *saved);
void kvs_saved_is_away(struct kvs_disk_tier *tier, struct kvs_saved *saved);
/* Where rows were let go of here and there, what is left of the sparsest page moves to others, for a
 * slice.  Returns false if what is free is no page, or somebody uses some of each page's rows. */
bool kvs_condense(struct kvs_disk_tier *tier);
/* Lets rows go, so many bytes or what a slice allows.  Returns how many; 0: there are none now, or
 * others make room. */
size_t kvs_let_go(struct kvs_disk_tier *tier, size_t bytes);
/* Whether there may be some. */
bool kvs_lets_go(const struct kvs_disk_tier *tier);
/* The same for whoever lacks pages of the node.  Returns false if there was nothing to do. */
bool kvs_let_go_step(struct kvs_disk_tier *tier);

/* ---- verify.c ---- */

/* Goes on with an item of the job.  Returns false if nothing more can be done now. */
bool kvs_verify_item(struct kvs_disk_tier *tier, uint32_t i);
/* Judges what has been read, for a slice.  Returns false if there was nothing to do. */
bool kvs_verify_judge(struct kvs_disk_tier *tier);
/* Frees what was under way; the queue is closed. */
void kvs_verify_close(struct kvs_disk_tier *tier);

/* ---- learnt.c: what the store's tier does (rows/residency.h) ---- */

void kvs_tier_keep_learnt(void *arg, const struct kvs_block *block, uint32_t at);
kv_status_t kvs_tier_recall_learnt(void *arg,
                                   const struct kvs_block *block,
                                   uint32_t at,
                                   size_t n_bytes,
                                   const void **ret_bytes);
void kvs_tier_end_recall(void *arg);
/* Returns a value of so many bytes, with room for a tail, that is to be written; NULL: there is no memory,
 * or the disk has enough to do, but for what was learnt: without it, others are of no use.  Writes it, and frees it then, or at once. */
struct kvs_value_op *kvs_value_begin(struct kvs_disk_tier *tier,
                                     const struct kvs_saved *saved,
                                     enum kvs_saved_kind kind,
                                     uint32_t at,
                                     size_t bytes,
                                     size_t tail_bytes);
/* Fails with what the disk fails with at once. */
kv_status_t kvs_value_write(struct kvs_value_op *op, size_t tail_bytes);
/* Syncs what kvs_value_write() has written, half a second after the first of it.  Returns false if there was
 * nothing to do. */
bool kvs_values_sync(struct kvs_disk_tier *tier);
/* Whether such values of the block are on their way to the disk. */
bool kvs_value_is_written(const struct kvs_disk_tier *tier,
                          const struct kv_id128 *home,
                          const struct kv_id128 *name);
/* Frees what was under way; the queue is closed. */
void kvs_tier_learnt_close(struct kvs_disk_tier *tier);

/* ---- columns.c: what the store's tier does for columns, and disk_tier.c for codes ---- */

/* Returns a segment's codes, or none; identity 0: they are of no use to the next process. */
struct kvs_kept_column
kvs_codes_kept(const struct kvs_disk_tier *tier, const struct kvs_saved *saved, uint32_t at);
/* Writes a column that is in memory, with its tail, as the value of a key. */
void kvs_column_value_make(const struct kvs_kept_column *kept,
                           const struct kvs_saved_key *key,
                           void *ret_value);
/* Returns what tells codes in memory that the disk has been given from others; never 0. */
uint32_t kvs_codes_fingerprint(const struct kvs_column *column, uint32_t identity);
bool kvs_tier_keep_columns(void *arg, const struct kvs_block *block, uint32_t at);
/* What the disk has of this kind, which was made of rows, is damaged: what is in memory is written in its
 * place, or else it is removed.  Returns false if it is to be tried again later. */
bool kvs_tier_replace_damaged(struct kvs_disk_tier *tier,
                              struct kvs_saved *saved,
                              enum kvs_saved_kind kind,
                              uint32_t at);
kv_status_t kvs_tier_recall_columns(void *arg, const struct kvs_columns_asked *asked);
struct kvs_recalled kvs_tier_recalled(void *arg, uint32_t i);
bool kvs_tier_may_recall(void *arg, const struct kvs_block *block, uint32_t at);
/* Nobody waits for them any more. */
void kvs_columns_end(struct kvs_disk_tier *tier);
void kvs_tier_columns_close(struct kvs_disk_tier *tier);

#endif
