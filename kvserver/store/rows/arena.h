/* arena.h - the memory of one data thread: pages of the node (pages.h), which size classes take
 * and return.
 *
 *     page   free -> used by a class when it needs an element
 *                 -> free, for any arena of the node, when its last element is freed
 *     class  elements of one size; a page holds as many as fit, with one bit each
 *
 * There are two kinds of classes.  Rounded classes are few, and always available.  Exact
 * classes waste no memory and keep neighbors adjacent, but their number is limited: an exact
 * class that has no holder and no page gives up its place to another size, and while all are in
 * use the rounded class serves instead.
 *
 * Neighbors matter: adjacent rows are sent and received as one piece, so a run of elements is
 * taken from one page where possible.
 *
 * Invariants, which kvs_arena_check() asserts:
 *   (1) A page of the arena is used by one class; the arena and each class count their own.
 *   (2) A page that has room is on its class's list, a full one on none.  Every back link is
 *       the reverse of a forward link.
 *   (3) A used page counts as many elements as have a bit, at least one, and no bit is set
 *       after the last element that fits.
 *   (4) The bytes of its elements are counted, and those of a use are no more than these.
 *   (5) No two classes have the same size, and at most KVS_ARENA_EXACT_MAX are exact.
 *   (6) Only elements in use have owners, and a page counts these.
 *
 * Threads: the data thread.  Memory: elements are in use until kvs_arena_free(); the bytes of a
 * new element are undefined.
 */
#ifndef KV_KVSERVER_STORE_ROWS_ARENA_H
#define KV_KVSERVER_STORE_ROWS_ARENA_H

#include "kvserver/store/rows/pages.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KVS_ARENA_CLASSES_MAX = 192,
    KVS_ARENA_EXACT_MAX = 128, /* of these, for sizes that are not rounded */
    KVS_ARENA_SKIPPED_MAX = 8,
};

struct kvs_arena;

/* What elements are used for, as far as it is told. */
enum kvs_arena_use {
    KVS_USE_ROWS,  /* and their CRCs */
    KVS_USE_CODES, /* of rows */
    KVS_USE_INDEX, /* codebooks, lists, summaries */
    KVS_USES,
};

/* Takes pages from those of the node.  Returns NULL if out of memory. */
struct kvs_arena *kvs_arena_create_in(struct kvs_pages *pages);
/* The same, with pages of its own. */
struct kvs_arena *kvs_arena_create(uint64_t bytes);
void kvs_arena_destroy(struct kvs_arena *arena);

/* Holds the exact class for elements of `bytes`, or the rounded class if all exact classes are
 * in use.  The class keeps its size until its last holder releases it and its last element is
 * freed.  Returns a negative number if `bytes` is larger than a page. */
int kvs_arena_class_hold(struct kvs_arena *arena, size_t bytes);
void kvs_arena_class_release(struct kvs_arena *arena, int class_id);

/* Returns the rounded class, whose elements are larger than `bytes` by at most a fifth.  It
 * exists for ever.  Returns a negative number if `bytes` is larger than a page. */
int kvs_arena_class_rounded(struct kvs_arena *arena, size_t bytes);

/* Returns the size of its elements, which is also the distance between neighbors. */
size_t kvs_arena_class_bytes(const struct kvs_arena *arena, int class_id);

/* Allocates up to `want` adjacent elements; *ret_count is their number, at least one.  Returns
 * NULL if the arena is full. */
void *
kvs_arena_alloc_run(struct kvs_arena *arena, int class_id, uint32_t want, uint32_t *ret_count);
void *kvs_arena_alloc(struct kvs_arena *arena, int class_id);
void kvs_arena_free(struct kvs_arena *arena, int class_id, void *element);

/* An element is used for that, from now on or no longer: kvs_arena_bytes_of() counts it. */
void kvs_arena_use(struct kvs_arena *arena, enum kvs_arena_use use, const void *element);
void kvs_arena_unuse(struct kvs_arena *arena, enum kvs_arena_use use, const void *element);

/* Returns the class of an element in use. */
int kvs_arena_class_of(const struct kvs_arena *arena, const void *element);

/* Records an element's owner, who may move it, if there is memory for that: 8 bytes an element of 4 KiB
 * or more, from the heap. */
void kvs_arena_set_owner(struct kvs_arena *arena, const void *element, void *owner);
void *kvs_arena_owner(const struct kvs_arena *arena, const void *element); /* NULL: not known */

/* Of the class's pages that have room, the first ones on its list, and whose elements all have owners,
 * that with the fewest elements but for `skipped` others, for who moves these to get a whole page.  Returns
 * its index, or KVS_PAGE_NONE: there is none, or the others have no room for all of them. */
int32_t kvs_arena_sparsest(const struct kvs_arena *arena, int class_id, uint32_t skipped);
/* Whether the page is one of the arena's: it is not once all of its elements have left. */
bool kvs_arena_has_page(const struct kvs_arena *arena, int32_t page);
/* Returns the page's first element from *at on that has an owner, and its owner; *at is behind it then.
 * NULL: there is none. */
void *kvs_arena_next_owned(const struct kvs_arena *arena,
                           int32_t page,
                           uint32_t *at,
                           void **ret_owner);
/* Allocates an element of the class in another of its pages, none that was free.  Returns NULL if none
 * has room. */
void *kvs_arena_alloc_outside(struct kvs_arena *arena, int class_id, int32_t page);

/* Returns how many elements of the class could be allocated now. */
uint64_t kvs_arena_room(const struct kvs_arena *arena, int class_id);

/* As kvs_pages_touch_ahead(). */
unsigned kvs_arena_touch_ahead(struct kvs_arena *arena);

/* Returns whether it is an element of that class in use. */
bool kvs_arena_is_in_use(const struct kvs_arena *arena, int class_id, const void *element);

/* Asserts the invariants; visits all pages. */
void kvs_arena_check(const struct kvs_arena *arena);

/* Of the node's pages. */
struct kvs_pages *kvs_arena_pages(const struct kvs_arena *arena);
void *kvs_arena_base(const struct kvs_arena *arena);
uint64_t kvs_arena_bytes(const struct kvs_arena *arena);
uint64_t kvs_arena_bytes_used(const struct kvs_arena *arena);  /* in whole pages */
uint64_t kvs_arena_bytes_taken(const struct kvs_arena *arena); /* of these, by elements */
uint64_t kvs_arena_bytes_of(const struct kvs_arena *arena, enum kvs_arena_use use);

#endif
