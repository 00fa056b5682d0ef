/* disk_sim.h - a disk that outlasts its node, and does what disks do when that dies.
 *
 * Each write is a version of its keys.  A sync makes the versions that were done when it was
 * started stay; of the later ones a crash keeps some:
 *
 *   records   when the process is killed: all; when the power fails: those up to some write
 *   rows      each write or not, whatever became of those before it
 *
 * and of one write all or nothing, but that pages of such rows are zeros where the power fails.
 * Besides, where it is told so, writes fail and may have taken effect all the same, reads fail,
 * the disk is full, what is read has a bit flipped, for good, and anything takes long.
 *
 * Threads: one.  Memory: the caller's; closed after its queues.
 */
#ifndef KV_TESTS_SIM_DISK_SIM_H
#define KV_TESTS_SIM_DISK_SIM_H

#include "kvserver/disk/disk.h"

#include <stdbool.h>

struct kv_clock;

/* How often, one in so many; 0: never. */
struct disk_sim_faults {
    uint64_t write_us; /* anything takes up to this long */
    uint32_t fails;    /* writes and syncs */
    uint32_t unread;   /* reads of rows: they fail */
    uint32_t rots;     /* reads of rows: they flip a bit */
    uint32_t stalls;   /* anything, for up to stall_us */
    uint64_t stall_us;
    uint64_t bytes_max; /* keys and values, with versions that are no longer needed */
};

struct disk_sim_counts {
    uint64_t n_writes, n_syncs, n_crashes;
    uint64_t n_lost, n_torn; /* versions, to crashes */
    uint64_t n_failed, n_unread, n_full, n_rotten;
};

/* Returns NULL if out of memory. */
struct kv_disk *disk_sim_open(const struct kv_clock *clock, uint64_t seed);
void disk_sim_set_faults(struct kv_disk *disk, const struct disk_sim_faults *faults);

/* Whoever used the disk has died, and its queues are closed. */
void disk_sim_crash(struct kv_disk *disk, bool power_fails);

void disk_sim_get_counts(const struct kv_disk *disk, struct disk_sim_counts *ret_counts);

#endif
