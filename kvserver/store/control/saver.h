/* saver.h - prefixes are saved on disk, leave memory, and are there again after a restart.
 *
 *   published  -> listed -> SAVE: records, rows, sync, records, sync -> saved
 *   memory is short, and it is saved -> LEAVE -> away -> a session is opened with it -> here
 *   it leaves the index, and is saved -> ERASE: records, rows, records
 *
 * SAVE and ERASE are of up to 1,024 blocks, one after the other; a SAVE begins half a second after its
 * first block was published, or at once if memory is short, the node drains, 256 MiB wait, or a client
 * has asked for it since.  LEAVE goes on beside them.
 * What cannot be written is tried again a second later, some times, and then stays in memory
 * only.
 *
 * When the disk has no room, prefixes that are away are evicted from the end of prompts, as the
 * policy says; if none may, nothing more is saved until one may.
 *
 * Threads: the control thread.  Memory: the heap, beside --memory.
 */
#ifndef KV_KVSERVER_STORE_CONTROL_SAVER_H
#define KV_KVSERVER_STORE_CONTROL_SAVER_H

#include "kvserver/store/tier/disk_tier.h"

struct kvs_control;
struct kvs_saver;

/* What a node has on disk. */
struct kvs_saver_facts {
    uint64_t room_bytes;                    /* that it may have there */
    uint64_t saved_bytes, saved_blocks;     /* rows and their CRCs */
    uint64_t waiting_bytes, waiting_blocks; /* to be saved */
    uint64_t waiting_us;                    /* how long the first of them has been */
};

/* Creates it if the node has room on a disk (kvs_node_config), and else does nothing.  Returns false
 * if out of memory. */
bool kvs_saver_create(struct kvs_control *control);
/* Frees it; what was under way is not finished.  Before the index. */
void kvs_saver_destroy(struct kvs_control *control);

/* Puts what an earlier process saved into the index, away.  The data threads do not run yet.  Fails
 * as kvs_manifest_read(). */
kv_status_t kvs_saver_load(struct kvs_control *control, char *detail, size_t detail_bytes);

/* The disk has something of the item, when the node is started.  KV_OK: it is in the index;
 * KV_NO_MEMORY: it stays on disk, and is not found; else it is erased. */
void kvs_saver_found(struct kvs_control *control,
                     const struct kvs_tier_item *item,
                     kv_status_t status);

/* Returns what data threads are told of a prefix in the index, without a ref of it. */
struct kvs_tier_item kvs_saver_item(struct kvs_prefix *prefix);

/* The prefix is in the index: it will be saved. */
void kvs_saver_add(struct kvs_control *control, struct kvs_prefix *prefix);
/* The prefix is about to leave the index: what the disk has of it will be erased. */
void kvs_saver_remove(struct kvs_control *control, struct kvs_prefix *prefix);
/* Has a prefix that is saved, and has no children in memory, leave it.  Returns false if out of
 * memory: it stays. */
bool kvs_saver_let_go(struct kvs_control *control, struct kvs_prefix *prefix);
/* Returns the bytes of what was let go and has not left yet, or stayed. */
uint64_t kvs_saver_leaving_bytes(const struct kvs_control *control);

/* Whether a prefix that is not saved will be soon: memory that waits for that loses nothing. */
bool kvs_saver_will_save(const struct kvs_control *control, struct kvs_prefix *prefix);
/* Whether blocks are being saved, or will be soon. */
bool kvs_saver_is_saving(const struct kvs_control *control);
/* Whether leaving takes so long, or has failed so lately, that what is not saved is to be evicted
 * meanwhile. */
bool kvs_saver_is_slow(const struct kvs_control *control);
/* Has all that waits to be saved begin without delay.  What could not be saved of the prefix, which is
 * in the index, and of those before it, is tried again. */
void kvs_saver_hurry(struct kvs_control *control, struct kvs_prefix *prefix);
/* Returns why a prefix that is not saved, while the one before it is, could not be since that time:
 * KV_OK: nothing has failed; KV_NO_MEMORY: there is no room, for longer than objects take to give some, or no
 * memory for the work; KV_CORRUPT: rows of it are bad in memory; KV_IO: the disk fails, or has rows of it that cannot be erased.  *ret_why is a text of static duration. */
kv_status_t kvs_saver_failure(const struct kvs_control *control,
                              const struct kvs_prefix *prefix,
                              uint64_t since_us,
                              const char **ret_why);
/* Whether nothing waits to be saved or erased that could be now. */
bool kvs_saver_is_idle(const struct kvs_control *control);

void kvs_saver_step(struct kvs_control *control, uint64_t now_us);

/* All zeros without a disk. */
void kvs_saver_get_facts(const struct kvs_control *control,
                         uint64_t now_us,
                         struct kvs_saver_facts *ret_facts);

#endif
