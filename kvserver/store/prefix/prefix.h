/* prefix.h - the prefixes that a node keeps, found by content.
 *
 *     prompt   |- block 0 -|- block 1 -|- block 2 -|          its blocks' names (base/hash.h)
 *     index         p0 <------ p1 <------ p2                  a kvs_prefix for each
 *                               ^-------- p2'                 another prompt, with two in common
 *
 * A prefix is a block that was published under its name, and with it all blocks before it: the
 * name says what they are.  Prefixes form trees, by their parents.  A session that is opened with
 * the names of its prompt gets the blocks of the deepest prefix that is here; a session publishes
 * its own blocks once their rows are complete.  The first copy of a block that is published stays;
 * a later one remains its session's alone.
 *
 * What is kept is a ref of the block on each data thread that has units of it.  Sessions have refs
 * of their own, so a prefix may go at any time without them.
 *
 * A name is looked for where it was placed: by the same tenant, root, and place of the node in the
 * row (cluster/placement.h), since only then the same units are on the same data threads.
 *
 * What goes first when memory or a tenant's quota is short is one row of a table of policies; it is
 * always a prefix without children that no session has and that is not pinned.  So every prefix
 * that is here has its parent here, and the longest match is found by halving.
 *
 * Invariants, which kvs_prefixes_check() asserts:
 *   (1) The prefixes in the map are those in the trees, each under its key and one deeper than its
 *       parent, in the same home; every link back is the reverse of a link forward.
 *   (2) A tenant counts its prefixes and their bytes, and a home its prefixes; all add up.
 *   (3) Exactly the prefixes that may go are in their tenant's heap, each at its place, none worth
 *       less than the one above it.
 *   (4) The pinned ones are listed.
 *
 * Threads: the control thread.  Data threads read `parent`, `depth` and their own one of `blocks`, in
 * commands (shard/command.h), and write that one before the prefix is in the index.
 * Memory: the heap's; a prefix lives while it is in the index or somebody holds it.
 */
#ifndef KV_KVSERVER_STORE_PREFIX_PREFIX_H
#define KV_KVSERVER_STORE_PREFIX_PREFIX_H

#include "kvserver/base/writers.h"
#include "kvserver/store/prefix/eviction.h"
#include "kvserver/store/rows/pages.h"
#include "proto/kv_types.h"

#include <stdbool.h>
#include <stdint.h>

struct kvs_block;
struct kvs_prefixes;

/* Where the blocks of a tree are. */
struct kvs_prefix_place {
    uint32_t tenant;
    uint64_t root; /* of the sessions that have them */
    uint32_t n_nodes, position;
};

/* What is kept for one tenant. */
struct kvs_prefix_tenant {
    uint32_t tenant;
    uint64_t bytes; /* of rows and their CRCs, in prefixes */
    uint64_t n_prefixes;
    struct kvs_prefix **heap; /* (n_heap) those that may go, the least valuable first */
    uint32_t n_heap, heap_room;
};

/* What the prefixes of a tree have in common. */
struct kvs_prefix_home {
    struct kvs_prefix_tenant *tenant;
    struct kvs_prefix_place place;
    uint64_t block_bytes; /* of one prefix on this node */
    uint64_t n_prefixes;
};

struct kvs_prefix {
    struct kv_id128 name;
    struct kvs_prefix *parent; /* NULL: depth is 0 */
    struct kvs_prefix *child;  /* the first */
    struct kvs_prefix *next,
        *prev; /* siblings; next: also in the lists of those not in the index */
    struct kvs_prefix *pinned_next, **pinned_link; /* NULL: not pinned */
    struct kvs_prefix_home *home;                  /* NULL: it is not in the index */
    struct kv_writers *mixed; /* of the block's tokens, if they have several; NULL: `writer` */
    uint64_t writer;
    uint32_t *tokens; /* (KV_BLOCK_TOKENS) for readers of events; NULL: not told */
    uint64_t used_us;
    uint64_t pinned_us; /* until when; UINT64_MAX: until it is unpinned */
    double floor;       /* the value of what went last, when it was last used */
    double value;       /* while it is in the heap */
    uint32_t depth;     /* the block's number in its prompt */
    uint32_t n_holders; /* sessions, and who is about to free it */
    uint32_t n_uses;
    uint32_t heap_at;                /* UINT32_MAX: it may not go */
    uint8_t first_thread, n_threads; /* the data threads that have units of it */
    struct kvs_block *blocks[];      /* (n_threads) NULL: not taken */
};

/* Returns NULL if out of memory.  `policy` is a row of eviction.h.  `pages`
 * know how much of them may go at once (kvs_pages_add_spare()), NULL: nobody does. */
struct kvs_prefixes *kvs_prefixes_create(uint64_t secret,
                                         const struct kvs_eviction_policy *policy,
                                         struct kvs_pages *pages);
/* Frees everything, without the refs of blocks. */
void kvs_prefixes_destroy(struct kvs_prefixes *prefixes);

/* Creates a prefix that is not in the index, with its caller for a holder.  Returns NULL if out of
 * memory. */
struct kvs_prefix *kvs_prefix_create(const struct kv_id128 *name,
                                     uint32_t depth,
                                     uint32_t first_thread,
                                     uint32_t n_threads);

/* Returns the block that the data thread has of it; where to put it. */
static inline struct kvs_block **
kvs_prefix_block(struct kvs_prefix *prefix, uint32_t thread, uint32_t n_threads)
{
    const uint32_t at = (thread + n_threads - prefix->first_thread) % n_threads;

    return at < prefix->n_threads ? &prefix->blocks[at] : NULL;
}

/* Returns the deepest prefix of a prompt that is here, or NULL.  It does not count as used.
 *   names  (n) of the prompt's blocks */
struct kvs_prefix *kvs_prefixes_find(const struct kvs_prefixes *prefixes,
                                     const struct kvs_prefix_place *place,
                                     const struct kv_id128 *names,
                                     uint32_t n);

/* Returns whether a block of that name was here and left lately: of the last some 10,000 that left,
 * most are known. */
bool kvs_prefixes_had(const struct kvs_prefixes *prefixes,
                      const struct kvs_prefix_place *place,
                      const struct kv_id128 *name);

/* Returns the prefix of that name, or NULL. */
struct kvs_prefix *kvs_prefixes_get(const struct kvs_prefixes *prefixes,
                                    const struct kvs_prefix_place *place,
                                    const struct kv_id128 *name);

/* Puts a prefix into the index, which has none of its name, below `parent`, which is the one at its
 * depth - 1.  A prefix of depth 0 begins a tree: `home` says what of, and is copied.  Returns false if
 * out of memory. */
bool kvs_prefixes_add(struct kvs_prefixes *prefixes,
                      struct kvs_prefix *parent,
                      const struct kvs_prefix_home *home,
                      struct kvs_prefix *prefix,
                      uint64_t now_us);

/* It, and those before it, were used now; or will be, at a later time: until then it counts as the
 * latest. */
void kvs_prefix_use(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix, uint64_t now_us);

/* Somebody holds it, or holds it no more: until then it does not go by itself, and it is not freed. */
void kvs_prefix_hold(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix);
void kvs_prefix_release(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix);

/* Keeps it, and with it those before it, until that time; UINT64_MAX: until it is unpinned.  A
 * later pin replaces an earlier one. */
void kvs_prefix_pin(struct kvs_prefixes *prefixes,
                    struct kvs_prefix *prefix,
                    uint64_t until_us);
void kvs_prefix_unpin(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix);
/* Ends the pins whose time is over. */
void kvs_prefixes_expire(struct kvs_prefixes *prefixes, uint64_t now_us);

/* Returns what goes first, of one tenant, or of all (NULL); NULL: nothing may go.  Of all it is taken
 * from the tenants that have more than their share, which is the same for each that has anything; only if
 * nothing of theirs may go, from the others. */
struct kvs_prefix *kvs_prefixes_victim(const struct kvs_prefixes *prefixes,
                                       const struct kvs_prefix_tenant *tenant);
/* Takes a prefix without children out of the index.  Its refs of blocks, and one hold of it, are the
 * caller's from now on. */
void kvs_prefixes_remove(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix);
/* Returns a prefix without children that is the given one or one behind it. */
struct kvs_prefix *kvs_prefix_last(struct kvs_prefix *prefix);

/* Returns the tenant, or NULL if nothing is kept for it. */
struct kvs_prefix_tenant *kvs_prefixes_tenant(const struct kvs_prefixes *prefixes,
                                              uint32_t tenant);

uint64_t kvs_prefixes_count(const struct kvs_prefixes *prefixes);
uint64_t kvs_prefixes_bytes(const struct kvs_prefixes *prefixes);
uint64_t kvs_prefixes_pinned(const struct kvs_prefixes *prefixes);
/* Iterates over all tenants, as kvs_prefixes_next(). */
const struct kvs_prefix_tenant *kvs_prefixes_next_tenant(const struct kvs_prefixes *prefixes,
                                                         size_t *cursor);
/* Iterates over all; *cursor is 0 at first, NULL is the end.  Some may be met twice or not at all if the
 * index changes on the way. */
struct kvs_prefix *kvs_prefixes_next(const struct kvs_prefixes *prefixes, size_t *cursor);

/* Returns the writers of a session that has the first rows from this prefix and writes those that
 * follow as `writer`.  NULL: out of memory, or too many runs. */
struct kv_writers *kvs_prefix_writers(const struct kvs_prefix *prefix, uint64_t writer);

/* Asserts the invariants; visits all prefixes. */
void kvs_prefixes_check(const struct kvs_prefixes *prefixes);

#endif
