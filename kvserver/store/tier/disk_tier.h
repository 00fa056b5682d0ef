/* disk_tier.h - the blocks of a data thread that are on the disk: they are saved, leave memory, come
 * back, and are erased.
 *
 *        the control thread                       this data thread             the disk
 *        a job, of many blocks                    kvs_disk_tier_step()
 *   SAVE    published, not saved yet          ->  each segment of each     ->  rows and their CRCs
 *   LEAVE   saved, and nobody needs it        ->  kvs_block_leave()        ->  codes, if they are new
 *   ERASE   nobody is to find them any more   ->                           ->  keys are removed
 *   VERIFY  saved                             ->  kvs_disk_tier_verify()   <-  all that is saved of it
 *
 *        a request needs absent segments      ->  kvs_segment_need()       <-  rows, CRCs, codes
 *        and there is no memory for them      ->  kvs_segment_let_go()
 *
 * What is saved of a block is found by the names of its home and its own, which say whose it is,
 * and the numbers of its units: on whichever data thread they are, of however many.  Each segment
 * is one value with a checksum over its key as well: the rows of another unit, block, prompt or
 * tenant are not taken for these.  A value that is missing or wrong is a segment of bad rows, as
 * if they had gone bad in memory (residency.h).
 *
 * Saved rows count once the control thread has written so (control/saver.h).  Codes are written
 * when an index job has made them of saved rows, when their block is saved, and when it leaves with others.
 * Codes and summaries of a whole chapter have an identity, by which the next process finds them
 * (index/kept.h); other codes are of use to this process only.  What was learnt to make them is written with
 * the last block of its chapter (index/learnt.h).
 *
 * Segments come back in the order in which they were asked for: those that requests need, and then the
 * rest of the blocks of a session that was opened.  Some reads are always under way, for the next ones,
 * too; what they read into is beside --memory, KVS_TIER_WINDOW bytes at most.  Where memory is short,
 * only those come back that one request needs, and rows that it does not need are let go of (let_go.c).
 *
 * What is saved can be verified: each segment is read, and what was made of it, and goes no further.  One
 * that is missing or wrong is written again in its place if the block is in memory.  The record that says
 * that the block counts need not change for that: what is read is the old value or the new one, whatever
 * happens, and only the new one is right.  Without its rows in memory the block is bad, and the control
 * thread's to forget; what was made of rows is replaced, or removed (columns.c).  This is work for idle
 * times, of its own bounded window, and waits while blocks come back.
 *
 * Threads: the data thread.  Memory: a record of some 200 bytes, and 4 for each unit, for each saved block, from the
 * heap; what index jobs read back, KVS_KEPT_BYTES_MAX (index/kept.h), twice if a read was given up.
 */
#ifndef KV_KVSERVER_STORE_TIER_DISK_TIER_H
#define KV_KVSERVER_STORE_TIER_DISK_TIER_H

#include "kvserver/base/histogram.h"
#include "kvserver/disk/disk.h"
#include "kvserver/store/prefix/prefix.h"
#include "kvserver/store/rows/segment.h"

struct kv_clock;
struct kvs_disk_tier;

enum {
    KVS_TIER_WINDOW = 8 << 20,    /* bytes that a data thread reads ahead */
    KVS_TIER_WRITING = 16 << 20,  /* bytes that it has given to the disk to be written */
    KVS_TIER_VERIFYING = 1 << 20, /* bytes that it reads to verify them: what a request needs is
                                   * behind these */
};

/* What is done with a list of blocks; one list of each kind at a time. */
enum kvs_tier_job {
    KVS_TIER_SAVE,
    KVS_TIER_LEAVE,
    KVS_TIER_ERASE,
    KVS_TIER_VERIFY, /* the last: the others do not wait for idle times */
    KVS_TIER_JOBS,
};

/* A block of a list.  Belongs to the control thread; data threads read it and count failures. */
struct kvs_tier_item {
    struct kvs_prefix
        *prefix; /* has a ref; erase: NULL if it was never in the index, or left it */
    struct kv_id128 home, name;
    struct kvs_prefix_place place;
    struct kv_id128 rows_id;
    uint32_t depth, n_units;
    uint64_t block_bytes;
    _Atomic uint32_t n_failed; /* data threads on which it has not been done */
    _Atomic int why;           /* kv_status_t, of one of these */
    /* verify: segments that are bad on disk, and could not be written again, or were; and those that
     * the disk could not read, about which nothing is known. */
    _Atomic uint32_t n_bad, n_mended, n_unread;
};

struct kvs_disk_tier_setup {
    struct kv_disk *disk;
    struct kvs_segment_store *store;
    const struct kv_clock *clock;
    uint32_t thread, n_threads;
    void (*wake)(void *arg); /* any thread: kvs_disk_tier_step() has something to do */
    void (*job_done)(void *arg, enum kvs_tier_job job);
    void *arg;
};

/* Counted by the data thread, read by any. */
struct kvs_tier_counts {
    _Atomic uint64_t written_bytes; /* of rows, and what was made of them */
    _Atomic uint64_t left_blocks;
    _Atomic uint64_t let_go_bytes; /* of rows, while sessions used others of their blocks */
    _Atomic uint64_t moved_bytes;  /* of rows that were left in sparse pages */
    _Atomic uint64_t loaded_bytes, loaded_blocks;
    _Atomic uint64_t lost_segments; /* on the way back: missing, or with a wrong checksum */
    _Atomic uint64_t bad_segments;  /* the same, when they were verified */
    _Atomic uint64_t bad_columns;   /* codes, codebooks and summaries with a wrong checksum */
    _Atomic uint64_t failed;        /* writes and reads that the disk has refused */
    struct kv_histogram load_us;    /* from the first need of a block until it is back */
};

/* Becomes the store's tier.  Returns KV_NO_MEMORY, or what the disk fails with. */
kv_status_t kvs_disk_tier_open(const struct kvs_disk_tier_setup *setup,
                               struct kvs_disk_tier **ret_tier);
/* Waits for what is under way, of which nobody hears any more; nothing is begun after it.  NULL is
 * allowed. */
void kvs_disk_tier_stop(struct kvs_disk_tier *tier);
/* The blocks will not be used any more, and it has been stopped.  NULL is allowed. */
void kvs_disk_tier_close(struct kvs_disk_tier *tier);

/* Begins a job, of which there is none of its kind.  The items stay until job_done(). */
void kvs_disk_tier_begin(struct kvs_disk_tier *tier,
                         enum kvs_tier_job job,
                         struct kvs_tier_item *items,
                         uint32_t n);

/* Goes on with loads, and with jobs but VERIFY, for a slice.  Returns false if there was nothing to
 * do, and is nothing for VERIFY. */
bool kvs_disk_tier_step(struct kvs_disk_tier *tier);
/* The same with VERIFY. */
bool kvs_disk_tier_verify(struct kvs_disk_tier *tier);

/* Whether what is needed at once (store->tier->prefer()) finds no memory, and will find none: it is more
 * than there is, or others need theirs.  *ret_need is how many bytes it is. */
bool kvs_disk_tier_is_stuck(const struct kvs_disk_tier *tier, uint64_t *ret_need);

/* Whether blocks come back. */
bool kvs_disk_tier_is_loading(const struct kvs_disk_tier *tier);

/* The index of prefixes is about to give up its ref of the block: what is saved of it will be
 * erased.  Allowed of a block that is not saved. */
void kvs_disk_tier_release(struct kvs_disk_tier *tier, const struct kvs_block *block);

/* Returns a block that an earlier process saved, absent, with a ref of the caller's; NULL: no memory.
 *   row_bytes  (n) of its units here, in order */
struct kvs_block *kvs_disk_tier_adopt(struct kvs_disk_tier *tier,
                                      const struct kvs_tier_item *item,
                                      const uint32_t *row_bytes,
                                      uint32_t n);

const struct kvs_tier_counts *kvs_disk_tier_counts(const struct kvs_disk_tier *tier);

/* Visits the blocks that it pins, once for each pin. */
void kvs_disk_tier_visit_pins(const struct kvs_disk_tier *tier,
                              void (*visit)(void *arg, const struct kvs_block *block),
                              void *arg);

#endif
