/* arena.h - the memory of one data thread: pages of 2 MiB, lent to size classes and given back.
 *
 *     page   free -> lent to a class when an element is wanted
 *                 -> free when its last one is back
 *     class  all elements of one size; a page holds as many as fit, one bit each
 *
 * Classes come in two kinds.  Rounded ones are few, whatever sizes are asked for, and always to
 * be had.  Exact ones waste nothing and keep neighbours adjacent, but there are only so many:
 * one that nobody holds and that no page is lent to gives its place to another size, and while
 * all are in use the rounded class serves instead.
 *
 * Neighbours matter: rows that lie side by side are sent and received in one piece, so a run of
 * elements is taken from one page where possible.
 *
 * Invariants, which kvs_arena_check() asserts:
 *   (1) A page is free, or lent to one class: n_free counts the free ones, and each class's
 *       count those lent to it.
 *   (2) Free pages are on the free list; a lent page that has room is on its class's list, a full
 *       one on none.  Every link back is the reverse of a link forward.
 *   (3) A page counts as many elements as have a bit, one at least, and none has a bit that lies
 *       behind the last that fits.
 *   (4) No two classes are of one size, and at most KVS_ARENA_EXACT_MAX are exact.
 *
 * Threads: the data thread.  Memory: elements are lent until kvs_arena_free(); the bytes of a
 * free page are whatever they were.
 */
#ifndef KV_KVSERVER_STORE_ROWS_ARENA_H
#define KV_KVSERVER_STORE_ROWS_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KVS_ARENA_PAGE = 2 << 20,
    KVS_ARENA_ELEMENT_MIN = 256,
    KVS_ARENA_CLASSES_MAX = 192,
    KVS_ARENA_EXACT_MAX = 128, /* of them, of sizes that are not rounded ones */
};

struct kvs_arena;

/* Reserves `bytes`, rounded down to whole pages, at least one.  NULL: refused. */
struct kvs_arena *kvs_arena_create(uint64_t bytes);
void kvs_arena_destroy(struct kvs_arena *arena);

/* Holds the exact class of elements of `bytes`, or the rounded one if too many sizes are in
 * use. The class is that size's until its last holder releases it and its last element is back.
 * Negative: larger than a page. */
int kvs_arena_class_hold(struct kvs_arena *arena, size_t bytes);
void kvs_arena_class_release(struct kvs_arena *arena, int class_id);

/* The rounded class: `bytes` rounded up by at most a fifth.  It stays.  Negative: larger than a
 * page. */
int kvs_arena_class_rounded(struct kvs_arena *arena, size_t bytes);

/* The size of its elements, and the distance of neighbours. */
size_t kvs_arena_class_bytes(const struct kvs_arena *arena, int class_id);

/* Up to `want` adjacent elements; *ret_count says how many, at least one.  NULL: full. */
void *
kvs_arena_alloc_run(struct kvs_arena *arena, int class_id, uint32_t want, uint32_t *ret_count);
void *kvs_arena_alloc(struct kvs_arena *arena, int class_id);
void kvs_arena_free(struct kvs_arena *arena, int class_id, void *element);

/* Elements of that class that could be had now. */
uint64_t kvs_arena_room(const struct kvs_arena *arena, int class_id);

/* Touches a part of a page more ahead of need, so that the first to use it does not pay for the
 * system clearing it.  Returns 0 when enough are ready. */
unsigned kvs_arena_touch_ahead(struct kvs_arena *arena);

/* Whether it is an element of that class, lent now. */
bool kvs_arena_is_lent(const struct kvs_arena *arena, int class_id, const void *element);

/* Walks all pages. */
void kvs_arena_check(const struct kvs_arena *arena);

void *kvs_arena_base(const struct kvs_arena *arena);
uint64_t kvs_arena_bytes(const struct kvs_arena *arena);
uint64_t kvs_arena_bytes_used(const struct kvs_arena *arena); /* whole pages */

#endif
