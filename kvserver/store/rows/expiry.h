/* expiry.h - what ends at a time, earliest first.
 *
 * A binary heap whose nodes are part of what they stand for, so that it needs no memory of its
 * own: a complete tree, in which a node's place follows from its number.  Each function takes
 * time logarithmic in the number of nodes.
 *
 * Invariants, which kvs_expiries_check() asserts:
 *   (1) The tree has n nodes and is complete; every link up is the reverse of a link down.
 *   (2) No node ends before its parent.
 *
 * Threads: one at a time.  Memory: the nodes'.
 */
#ifndef KV_KVSERVER_STORE_ROWS_EXPIRY_H
#define KV_KVSERVER_STORE_ROWS_EXPIRY_H

#include <stddef.h>
#include <stdint.h>

#define KVS_EXPIRY_NEVER UINT64_MAX

struct kvs_expiry {
    uint64_t at_us;
    struct kvs_expiry *parent, *left, *right;
};

struct kvs_expiries {
    struct kvs_expiry *first; /* ends first; NULL: there is none */
    size_t n;
};

void kvs_expiry_add(struct kvs_expiries *heap, struct kvs_expiry *node, uint64_t at_us);
void kvs_expiry_remove(struct kvs_expiries *heap, struct kvs_expiry *node);

/* Asserts the invariants; visits all nodes. */
void kvs_expiries_check(const struct kvs_expiries *heap);

#endif
