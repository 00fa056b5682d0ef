#include "client/roots.h"

#include "kvserver/base/hash.h"
#include "kvserver/cluster/placement.h"

#include <assert.h>

static uint32_t place_of(uint64_t root)
{
    return (uint32_t)(kv_mix64(root) % KVC_ROOTS);
}

uint32_t kvc_roots_look(const struct kvc_roots *roots, uint64_t root, uint64_t now_us)
{
    const struct kvc_root *entry = &roots->roots[place_of(root)];

    return entry->n_rows > 0 && entry->root == root && now_us < entry->until_us ? entry->n_rows
                                                                                : 1;
}

void kvc_roots_learn(struct kvc_roots *roots, uint64_t root, uint32_t n_rows, uint64_t now_us)
{
    assert(kv_placement_is_row_count(n_rows) && n_rows > 1);
    if (n_rows < kvc_roots_look(roots, root, now_us))
        return;
    roots->roots[place_of(root)] =
        (struct kvc_root){.root = root, .n_rows = n_rows, .until_us = now_us + KVC_ROOT_US};
}
