/* disk_verify.h - the node verifies what it has saved on disk, block after block.
 *
 *     the list   verified longest ago ... verified last      every prefix that is saved
 *                 |                                  ^
 *                 +--> VERIFY, on the data threads --+
 *                       |          |          |
 *                      right    mended       bad   -> leaves the index with what is behind it
 *
 * So a pass is over when the first one has been verified since it began.  Passes in the background go
 * on at the configured rate, one every ten minutes at most.  While somebody waits for all to be verified
 * (kvs_disk_verify_ask()) there is no rate; who does not ask again within five seconds waits no more.
 * Either way it is work for idle times of the data threads, and of the disk (tier/disk_tier.h).
 *
 * A block that is bad on disk is written again by the data threads if it is in memory, and counts as
 * mended after a sync.  Otherwise it is a miss from then on: it leaves the index with the blocks behind
 * it, and is erased, when no session needs it any more.  What the disk cannot read is neither: it stays,
 * and is read again in the next pass.
 *
 * A kind of thing that is saved besides prefixes would have a list of its own here, and a job.
 *
 * Threads: the control thread.  Memory: the heap.
 */
#ifndef KV_KVSERVER_STORE_CONTROL_DISK_VERIFY_H
#define KV_KVSERVER_STORE_CONTROL_DISK_VERIFY_H

#include <stdbool.h>
#include <stdint.h>

struct kvs_control;
struct kvs_prefix;

/* Creates it if the node saves (kvs_saver_create()), and else does nothing.  Returns false if out of
 * memory. */
bool kvs_disk_verify_create(struct kvs_control *control);
/* What was under way is not finished.  Before the index. */
void kvs_disk_verify_destroy(struct kvs_control *control);

/* The prefix is saved; `verified_us`: 0 if that was an earlier process, and else now.  It leaves the
 * index, or does not count on disk any more: not listed is allowed. */
void kvs_disk_verify_add(struct kvs_control *control,
                         struct kvs_prefix *prefix,
                         uint64_t verified_us);
void kvs_disk_verify_remove(struct kvs_control *control, struct kvs_prefix *prefix);

/* Somebody waits for what was saved at that time to be verified.  Returns whether it is. */
bool kvs_disk_verify_ask(struct kvs_control *control, uint64_t since_us, uint64_t now_us);

void kvs_disk_verify_step(struct kvs_control *control, uint64_t now_us);

/* Asserts that exactly what is saved is listed, in order. */
void kvs_disk_verify_check(const struct kvs_control *control);

#endif
