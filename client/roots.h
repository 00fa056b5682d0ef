/* roots.h - over how many rows the sessions of a root are opened, as nodes have told
 * (kvserver/cluster/placement.h).
 *
 * What is not here has one row, and a node that knows better tells it when a session is opened.
 * So the table is small, forgets what is old, and may lose any entry.
 *
 * Threads: the client's.  Memory: a part of the client; zeros are an empty table.
 */
#ifndef KV_CLIENT_ROOTS_H
#define KV_CLIENT_ROOTS_H

#include <stdint.h>

enum {
    KVC_ROOTS = 256,                  /* a power of two */
    KVC_ROOT_US = 10 * 60 * 1000000u, /* an entry is forgotten after this */
};

struct kvc_root {
    uint64_t root; /* a prompt's */
    uint64_t until_us;
    uint32_t n_rows; /* 0: empty */
};

struct kvc_roots {
    struct kvc_root roots[KVC_ROOTS]; /* each in one place only, where the last one stays */
};

/* Returns the rows of a prompt's root, at least 1. */
uint32_t kvc_roots_look(const struct kvc_roots *roots, uint64_t root, uint64_t now_us);

/* A node has told them: kv_placement_is_row_count(), more than one.  Fewer than are known are
 * not believed: that node has not heard of them yet. */
void kvc_roots_learn(struct kvc_roots *roots, uint64_t root, uint32_t n_rows, uint64_t now_us);

#endif
