/* reuse.h - how much of what sessions were opened with was here: tokens, by tenant.
 *
 *   asked            of the named blocks that an open would have attached
 *   matched          of these, attached
 *   matched on disk  of the matched, those that were not in memory
 *   missed, and why  new: the first block that was missing was not here lately; evicted: it was;
 *                    elsewhere: the row has too many sessions, and sends the open to another one
 *
 * A prompt under another salt looks new: that is what a salt is for.
 *
 * Threads: the control thread writes; any thread may read, values need not belong to one moment.
 * Memory: a part of the control thread's state; zeros are valid.
 */
#ifndef KV_KVSERVER_STORE_PREFIX_REUSE_H
#define KV_KVSERVER_STORE_PREFIX_REUSE_H

#include <stdatomic.h>
#include <stdint.h>

enum {
    KVS_REUSE_TENANTS = 256, /* counted by themselves; the last place has all others */
};

enum kvs_reuse_kind {
    KVS_REUSE_ASKED,
    KVS_REUSE_MATCHED,
    KVS_REUSE_NEW,
    KVS_REUSE_EVICTED,
    KVS_REUSE_ELSEWHERE,
    KVS_REUSE_MATCHED_ON_DISK,
    KVS_REUSE_KINDS,
};

struct kvs_reuse_tenant {
    uint32_t tenant; /* written before the place counts */
    _Atomic uint64_t tokens[KVS_REUSE_KINDS];
};

struct kvs_reuse {
    struct kvs_reuse_tenant tenants[KVS_REUSE_TENANTS];
    _Atomic uint32_t n_tenants; /* places in use */
};

/* "asked", "matched", "missed_new", "missed_evicted", "missed_elsewhere", "matched_on_disk" */
const char *kvs_reuse_name(enum kvs_reuse_kind kind);

/* Counts an open that asked for so many tokens, and got so many of them, some from the disk; `why` it
 * missed the others. */
void kvs_reuse_count(struct kvs_reuse *reuse,
                     uint32_t tenant,
                     uint64_t asked,
                     uint64_t matched,
                     uint64_t on_disk,
                     enum kvs_reuse_kind why);

#endif
