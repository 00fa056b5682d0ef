/* prefix.h - the prefixes that a node keeps, found by content.
 *
 *     prompt   |- block 0 -|- block 1 -|- block 2 -|          its blocks' names (base/hash.h)
 *     index         p0 <------ p1 <------ p2                  a kvs_prefix for each
 *                               ^-------- p2'                 another prompt, with two in common
 *
 * A prefix is a block that was published under its name, and with it all blocks before it: the
 * name depends on all of them.  Prefixes form trees, by their parents.  A session that is
 * opened with the names of its prompt's blocks gets those of the deepest prefix in the index;
 * a session publishes its own blocks once their rows are complete.  The first published copy of
 * a block is the one in the index; a later copy remains its session's alone.
 *
 * The index keeps a ref of the block on each data thread that has units of it.  Sessions have
 * refs of their own, so a prefix may leave the index while sessions use its blocks.
 *
 * A prefix is looked up by its name and its place: the tenant, the root, and the position of the
 * node in the row (cluster/placement.h).  Only with the same place are the same units on the
 * same data threads.  Names are the clients' to make: a session gets only rows of its own model,
 * whatever names it has.
 *
 * When memory or a tenant's quota is short, a policy (eviction.h) chooses among the prefixes in
 * memory that have no children there, that no session has, and that are not pinned.  What is saved on
 * disk leaves memory and stays in the index, `is_away`; what is not is evicted.  What only sessions
 * have that rest may leave memory if it is saved: they get it back when they go on.  When the disk is
 * full, the same policy chooses among those that are away and have no children at all.  So the
 * parent of every prefix in the index is in the index, the longest match is found by binary search,
 * and what is away of a prompt is its end.
 *
 * Invariants, which kvs_prefixes_check() asserts:
 *   (1) The prefixes in the map are those in the trees, each under its key and one deeper than its
 *       parent, in the same home; every link back is the reverse of a link forward.
 *   (2) A tenant counts its prefixes and their bytes, and a home its prefixes; all add up.
 *   (3) A tenant's heaps have exactly its prefixes that may leave memory, or the disk, and none is
 *       worth less than the one above it.
 *   (4) The list of pinned prefixes has all of them.
 *   (5) What is away is saved, and so are its parent and those before it; its children are away.
 *
 * Threads: the control thread.  Data threads read `parent`, `depth` and their own one of
 * `blocks` in commands (shard/command.h), and write that one before it is in the index.
 * Memory: the heap; a prefix exists while it is in the index, is held, or has refs.
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

/* Whether a prefix is on disk. */
enum kvs_prefix_saved {
    KVS_PREFIX_UNSAVED,
    KVS_PREFIX_SAVING, /* it will be, or not */
    KVS_PREFIX_SAVED,
};

/* Where a prefix is that may go. */
enum kvs_prefix_where {
    KVS_PREFIX_IN_MEMORY, /* only there */
    KVS_PREFIX_IN_BOTH,
    KVS_PREFIX_AWAY, /* on disk only */
    KVS_PREFIX_PLACES,
};

/* Prefixes that may go, the least valuable first. */
struct kvs_prefix_heap {
    struct kvs_prefix **list; /* (n) */
    uint32_t n, room;
};

/* The prefixes of one tenant. */
struct kvs_prefix_tenant {
    uint32_t tenant;
    uint64_t bytes;      /* of rows and their CRCs, in prefixes that are in memory */
    uint64_t away_bytes; /* the same of those that are away */
    uint64_t n_prefixes;
    struct kvs_prefix_heap heaps[KVS_PREFIX_PLACES];
};

/* What the prefixes of a tree have in common. */
struct kvs_prefix_home {
    struct kvs_prefix_tenant *tenant;
    struct kvs_prefix_place place;
    struct kv_id128 rows_id; /* whose rows they are, and of what shape: kvs_model */
    uint32_t n_units;        /* of that model, on all nodes */
    uint64_t block_bytes;    /* of one prefix on this node */
    uint64_t n_prefixes;
};

struct kvs_prefix {
    struct kv_id128 name;
    struct kvs_prefix *parent; /* NULL: depth is 0 */
    struct kvs_prefix *child;  /* the first */
    struct kvs_prefix *next,
        *prev; /* siblings; next: also in lists of those not in the index */
    struct kvs_prefix *pinned_next, **pinned_link; /* NULL: not pinned */
    struct kvs_prefix_home *home;                  /* NULL: it is not in the index */
    struct kv_writers *mixed; /* of the block's tokens, if they have several; NULL: `writer` */
    uint64_t writer;
    uint32_t *tokens; /* (KV_BLOCK_TOKENS) for readers of events, set before it is added to the
                       * index; NULL: not told */
    uint64_t used_us;
    uint64_t pinned_us; /* until when; UINT64_MAX: until it is unpinned */
    double floor;       /* the value of what had been evicted last when it was last used */
    double value;       /* by the policy; while it is in the heap */
    uint32_t depth;     /* the block's number in its prompt */
    uint32_t n_here;    /* children in memory */
    struct kvs_prefix *save_next, **save_link; /* control/saver.c; link NULL: not listed */
    /* What is saved of it, and when that was verified; link NULL: nothing (control/disk_verify.c). */
    struct kvs_prefix *verify_next, **verify_link;
    uint64_t verified_us;
    uint64_t added_us;  /* when it came into the index */
    uint32_t n_refs;    /* kvs_prefix_ref() */
    uint32_t n_holders; /* kvs_prefix_hold(): sessions and calls */
    uint32_t n_resting; /* of these */
    uint32_t n_uses;
    uint32_t heap_at;      /* UINT32_MAX: it may not go */
    uint8_t saved;         /* enum kvs_prefix_saved */
    uint8_t n_save_failed; /* how often it could not be */
    int8_t save_status;    /* kv_status_t: why not, the last time */
    bool is_away;          /* from memory: nobody has asked for it since it left, or was
                                      * told to */
    uint8_t first_thread, n_threads; /* the data threads that have units of it */
    struct kvs_block *blocks[];      /* (n_threads) NULL: not taken */
};

/* Creates an empty index.  `policy` is a row of the table in eviction.h.  Tells `pages` how many
 * bytes may be evicted (kvs_pages_add_spare()), unless NULL.  Returns NULL if out of memory. */
struct kvs_prefixes *kvs_prefixes_create(uint64_t secret,
                                         const struct kvs_eviction_policy *policy,
                                         struct kvs_pages *pages);
/* Frees the index and its prefixes; the refs of their blocks are not given back. */
void kvs_prefixes_destroy(struct kvs_prefixes *prefixes);

/* Creates a prefix that is not in the index, and that the caller holds.  Returns NULL if out of
 * memory. */
struct kvs_prefix *kvs_prefix_create(const struct kv_id128 *name,
                                     uint32_t depth,
                                     uint32_t first_thread,
                                     uint32_t n_threads);

/* Returns where the data thread's ref of the block is, or NULL if it has no units of it. */
static inline struct kvs_block **
kvs_prefix_block(struct kvs_prefix *prefix, uint32_t thread, uint32_t n_threads)
{
    const uint32_t at = (thread + n_threads - prefix->first_thread) % n_threads;

    return at < prefix->n_threads ? &prefix->blocks[at] : NULL;
}

/* Returns the deepest prefix of a prompt that is in the index, or NULL.  Does not count as a use.
 *   rows_id  as its home has it; NULL: any
 *   names    (n) of the prompt's blocks */
struct kvs_prefix *kvs_prefixes_find(const struct kvs_prefixes *prefixes,
                                     const struct kvs_prefix_place *place,
                                     const struct kv_id128 *rows_id,
                                     const struct kv_id128 *names,
                                     uint32_t n);

/* Returns whether a block of that name has left the index lately: most of the last 10,000 or so
 * that left are remembered. */
bool kvs_prefixes_had(const struct kvs_prefixes *prefixes,
                      const struct kvs_prefix_place *place,
                      const struct kv_id128 *name);

/* Returns the prefix of that name, or NULL; it may be another model's. */
struct kvs_prefix *kvs_prefixes_get(const struct kvs_prefixes *prefixes,
                                    const struct kvs_prefix_place *place,
                                    const struct kv_id128 *name);

/* Adds a prefix to the index, which must have none of its name, as a child of `parent`, whose
 * depth is one less.  A prefix of depth 0 begins a tree, for which `home` is copied.  Returns
 * false if out of memory, or if the name was made for its key to be that of a prefix
 * elsewhere. */
bool kvs_prefixes_add(struct kvs_prefixes *prefixes,
                      struct kvs_prefix *parent,
                      const struct kvs_prefix_home *home,
                      struct kvs_prefix *prefix,
                      uint64_t now_us);

/* Counts a use of the prefix; now, or at a later time that is expected: until then it counts as the
 * most recently used.  The one before it has that use, too, when this one goes. */
void kvs_prefix_use(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix, uint64_t now_us);

/* A prefix that is held is neither chosen by kvs_prefixes_victim() nor freed.  Each hold needs
 * a release. */
void kvs_prefix_hold(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix);
void kvs_prefix_release(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix);
/* A holder of the prefix, which has used it last at that time, can wait until it is back in memory;
 * from kvs_prefix_wake() on it cannot.  While it rests it stays a holder: nothing is lost, on disk
 * either. */
void kvs_prefix_rest(struct kvs_prefixes *prefixes,
                     struct kvs_prefix *prefix,
                     uint64_t used_us);
void kvs_prefix_wake(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix);
/* A prefix with refs may leave the index, and memory, but is not freed. */
void kvs_prefix_ref(struct kvs_prefix *prefix);
void kvs_prefix_unref(struct kvs_prefix *prefix);

/* Keeps the prefix, and so those before it, from being evicted until that time; UINT64_MAX:
 * until it is unpinned.  A later pin replaces an earlier one. */
void kvs_prefix_pin(struct kvs_prefixes *prefixes,
                    struct kvs_prefix *prefix,
                    uint64_t until_us);
void kvs_prefix_unpin(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix);
/* Removes pins that have expired, of the few that have not been looked at for longest. */
void kvs_prefixes_expire(struct kvs_prefixes *prefixes, uint64_t now_us);

/* Returns the prefix that is to leave memory next, of one tenant, or of all (NULL); NULL if none may.
 * One that is saved, which is not lost then, before one that is not.  Of all: from the tenants that
 * have more than an equal share of the bytes of all prefixes; only if none of theirs may go, from
 * the others. */
struct kvs_prefix *kvs_prefixes_victim(const struct kvs_prefixes *prefixes,
                                       const struct kvs_prefix_tenant *tenant);
/* The same of those that are not saved, of all tenants. */
struct kvs_prefix *kvs_prefixes_unsaved_victim(const struct kvs_prefixes *prefixes);
/* Returns the prefix that is away and is to be evicted next, to make room on disk; NULL: none. */
struct kvs_prefix *kvs_prefixes_disk_victim(const struct kvs_prefixes *prefixes);
/* The prefix is on disk from now on, or will be, or not: enum kvs_prefix_saved. */
void kvs_prefix_set_saved(struct kvs_prefixes *prefixes,
                          struct kvs_prefix *prefix,
                          enum kvs_prefix_saved saved);
/* The prefix, which is saved, leaves memory, or comes back.  Those before it come back with it. */
void kvs_prefix_set_away(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix);
void kvs_prefix_set_here(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix);
/* Removes a prefix without children from the index.  Transfers its refs of blocks, and a hold of
 * it, to the caller. */
void kvs_prefixes_remove(struct kvs_prefixes *prefixes, struct kvs_prefix *prefix);
/* Returns a descendant of the prefix that has no children, or the prefix itself. */
struct kvs_prefix *kvs_prefix_last(struct kvs_prefix *prefix);

/* Returns the tenant, or NULL if it has no prefixes. */
struct kvs_prefix_tenant *kvs_prefixes_tenant(const struct kvs_prefixes *prefixes,
                                              uint32_t tenant);

uint64_t kvs_prefixes_count(const struct kvs_prefixes *prefixes);
uint64_t kvs_prefixes_bytes(const struct kvs_prefixes *prefixes); /* in memory */
uint64_t kvs_prefixes_away(const struct kvs_prefixes *prefixes);  /* how many are away */
uint64_t kvs_prefixes_pinned(const struct kvs_prefixes *prefixes);
/* Returns the bytes of tokens that they have for readers of events. */
uint64_t kvs_prefixes_tokens_bytes(const struct kvs_prefixes *prefixes);
/* Iterates over all tenants, as kvs_prefixes_next(). */
const struct kvs_prefix_tenant *kvs_prefixes_next_tenant(const struct kvs_prefixes *prefixes,
                                                         size_t *cursor);
/* Iterates over all prefixes; *cursor is 0 at first, NULL is the end.  If the index changes
 * between two calls, some may be returned twice or, unless the cursor is watched, not at all. */
struct kvs_prefix *kvs_prefixes_next(const struct kvs_prefixes *prefixes, size_t *cursor);
/* Watches the cursor of one iteration (kv_map_watch()); NULL: of none. */
void kvs_prefixes_watch(struct kvs_prefixes *prefixes, size_t *cursor);

/* Returns the deepest, of a prefix and those before it, that a session can begin with which writes
 * the rows that follow as `writer`: with more than KV_WRITER_RUNS_MAX writers it could not.  NULL:
 * with none. */
struct kvs_prefix *kvs_prefix_fit(struct kvs_prefix *prefix, uint64_t writer);
/* Returns the writers of such a session.  NULL: out of memory. */
struct kv_writers *kvs_prefix_writers(const struct kvs_prefix *prefix, uint64_t writer);

/* Returns what is told of a name to whoever asks: half of it, and zeros.  It says which prefix is
 * meant; a session is not opened with it, which who knows the whole name may do. */
static inline struct kv_id128 kvs_prefix_name_told(const struct kv_id128 *name)
{
    struct kv_id128 told = *name;

    for (size_t i = sizeof(told.bytes) / 2; i < sizeof(told.bytes); i++)
        told.bytes[i] = 0;
    return told;
}

/* Asserts the invariants; visits all prefixes. */
void kvs_prefixes_check(const struct kvs_prefixes *prefixes);

#endif
