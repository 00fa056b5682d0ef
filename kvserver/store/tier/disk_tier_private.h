/* disk_tier_private.h - what disk_tier.c (jobs), load.c (blocks that come back), verify.c (what is saved
 * of blocks is right) and learnt.c (what was learnt of their rows) share. */
#ifndef KV_KVSERVER_STORE_TIER_DISK_TIER_PRIVATE_H
#define KV_KVSERVER_STORE_TIER_DISK_TIER_PRIVATE_H

#include "kvserver/base/map.h"
#include "kvserver/cluster/placement.h"
#include "kvserver/store/tier/disk_tier.h"
#include "kvserver/store/tier/saved_value.h"

struct kvs_segment_read;

/* A block that is saved.  Known while its prefix is in the index; after that, while the disk is the
 * only place that has its rows. */
struct kvs_saved {
    struct kvs_block *block; /* NULL: freed, with reads under way */
    struct kv_id128 home, name;
    struct kv_placement_units units;
    uint32_t depth; /* of the block in its prompt */
    uint32_t codes; /* codes_of() of those that the disk has; 0: none */
    bool is_doomed; /* the index has given it up */
    bool is_loading;
    struct kvs_saved *next_doomed, **link_doomed;
    /* While it comes back: */
    struct kvs_saved *next;
    struct kvs_segment_read *ready;
    uint64_t since_us;
    uint32_t at;        /* the next segment to read */
    uint32_t n_reading; /* segments of which values are under way */
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
    uint16_t at;       /* the next segment, or unit */
    uint16_t n_ops;    /* under way */
    uint32_t codes;    /* codes_of() when they were written */
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
    size_t bytes;
    uint64_t memory[]; /* tails, or codes */
};

/* What was learnt, on its way to the disk, and back. */
struct kvs_learnt_op {
    struct kvs_disk_tier *tier;
    struct kvs_learnt_op *next, **link;
    struct kvs_saved_key key;
    size_t bytes; /* without the tail */
    uint64_t since_us;
    bool is_given_up;   /* a read that nobody waits for */
    kv_status_t status; /* of a read; KV_IN_PROGRESS: it is under way */
    uint64_t memory[];
};

/* A segment that is read. */
struct kvs_segment_read {
    struct kvs_disk_tier *tier;
    struct kvs_saved *saved;
    struct kvs_segment_read *next,
        **link; /* of those under way; next: of those that are ready */
    uint32_t at;
    uint32_t n_left; /* values under way */
    uint32_t n_tries;
    size_t rows_room, codes_room;
    bool has_rows, has_codes;
    bool is_checked, is_good; /* the rows are those that were saved */
    uint64_t memory[];        /* rows with their tail, then codes */
};

/* A segment that is read to be verified.  It knows its block by the job's item: that may go
 * meanwhile. */
struct kvs_verify_read {
    struct kvs_disk_tier *tier;
    struct kvs_verify_read *next,
        **link; /* of those under way; next: of those that are ready */
    uint32_t item, at, n_tries;
    kv_status_t status;
    size_t room, bytes;
    uint64_t memory[]; /* rows with their tail */
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
    struct kvs_saved *first, **end; /* they come back, the first one now */
    struct kvs_saved
        *to_read; /* of them: more is to be read of this one, and those behind it */
    struct kvs_segment_read *reads; /* under way */
    size_t reading_bytes;
    bool lacks_memory;                 /* for the first one */
    struct kvs_verify_read *verifying; /* under way */
    struct kvs_verify_read *verify_ready;
    size_t verifying_bytes;              /* of both */
    struct kvs_learnt_op *learnt_writes; /* under way */
    size_t learnt_bytes;                 /* of these */
    struct kvs_learnt_op *learnt_reads;  /* under way, and the recall */
    unsigned n_learnt_reads;
    struct kvs_learnt_op *recall; /* of learnt_reads; NULL: none */
    struct kvs_tier_counts counts;
};

static inline void kvs_tier_count(_Atomic uint64_t *counter, uint64_t n)
{
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n,
                          memory_order_relaxed);
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

/* ---- load.c ---- */

/* The block is to come back, which is absent. */
void kvs_load_begin(struct kvs_disk_tier *tier, struct kvs_saved *saved);
/* It is freed meanwhile, or is not to come back any more. */
void kvs_load_give_up(struct kvs_disk_tier *tier, struct kvs_saved *saved);
/* Goes on with all that come back.  Returns false if there was nothing to do. */
bool kvs_load_step(struct kvs_disk_tier *tier);
/* Frees what was under way; the queue is closed. */
void kvs_loads_close(struct kvs_disk_tier *tier);
void kvs_load_free_ready(struct kvs_saved *saved);

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
/* Whether such bytes of the block are on their way to the disk. */
bool kvs_learnt_is_written(const struct kvs_disk_tier *tier,
                           const struct kv_id128 *home,
                           const struct kv_id128 *name);
/* Frees what was under way; the queue is closed. */
void kvs_tier_learnt_close(struct kvs_disk_tier *tier);

#endif
