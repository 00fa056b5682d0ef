/* pages.h - the memory of a node: pages of 2 MiB, which the arenas of its
 * data threads take and return.
 *
 *   free --kvs_page_take()--> of one arena --kvs_page_return()--> free
 *   free --kvs_pages_lend()--> lent --kvs_pages_take_back()--> free
 *
 * All arenas of a node share its pages, so none is full while another has room.  A page is
 * large, so pages are taken and returned rarely, under a lock.
 *
 * Pages lie apart.  Work that needs contiguous memory has some of its own and borrows as many
 * pages, which stay empty meanwhile: so it counts as the node's memory.
 *
 * Invariants, which kvs_pages_check() asserts while no arena takes or returns a page:
 *   (1) A page is free and in the free list, or of one arena, or lent; n_free counts the free
 *       ones.
 *
 * Threads: any.  What a page says of its elements belongs to its arena's thread.
 */
#ifndef KV_KVSERVER_STORE_ROWS_PAGES_H
#define KV_KVSERVER_STORE_ROWS_PAGES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KVS_ARENA_PAGE = 2 << 20,
    KVS_ARENA_ELEMENT_MIN = 256,
    KVS_PAGE_ELEMENTS_MAX = KVS_ARENA_PAGE / KVS_ARENA_ELEMENT_MIN,
    KVS_PAGE_NONE = -1,
    KVS_PAGES_SPARE = 4, /* what a message may take at once: rows, CRCs, a list, records */
};

struct kvs_page {
    _Atomic(const void *) owner; /* an arena, or a borrower; NULL: free */
    int32_t class_id;
    uint32_t n_used, n_owned;
    int32_t next,
        prev; /* in the list of the class's pages with room; next: of the free pages */
    uint64_t used[KVS_PAGE_ELEMENTS_MAX / 64];
    void **owners; /* of its elements (arena.h); NULL: no one is known */
};

struct kvs_pages {
    char *base;
    uint64_t bytes;
    uint32_t n_pages;
    struct kvs_page *pages; /* (n_pages) */
    struct kv_lock *lock;
    int32_t free_first; /* under the lock */
    _Atomic uint32_t n_free, n_arenas;
    _Atomic uint32_t wanted;      /* pages that are to be free; 0: nobody lacks any */
    _Atomic uint64_t spare_bytes; /* evictable: of elements that their owners can free */
    _Atomic bool spare_soon;   /* there may be some of it in a moment, though there is none */
    _Atomic uint32_t n_givers; /* data threads that can let rows go of sessions that are used */
    _Atomic bool is_giving;    /* they are to: nothing else is evictable */
    _Atomic uint64_t
        loose_bytes;          /* free elements of used pages, as the control thread last saw */
    _Atomic uint64_t touched; /* bytes from the base on that the system has provided */
};

/* Reserves `bytes`, rounded down to whole pages, at least one.  Returns NULL if the system has
 * not enough memory. */
struct kvs_pages *kvs_pages_create(uint64_t bytes);
void kvs_pages_destroy(struct kvs_pages *pages); /* NULL is allowed */

/* Returns the index of a page that is the owner's from now on, or KVS_PAGE_NONE. */
int32_t kvs_page_take(struct kvs_pages *pages, const void *owner);
void kvs_page_return(struct kvs_pages *pages, uint32_t index);

/* Pages lent to one borrower.  Begins as {KVS_PAGE_NONE, 0}. */
struct kvs_lent_pages {
    int32_t first; /* a list of them */
    uint32_t n;
};

/* Lends some more pages, for `bytes` in all at most.  Returns false if the node has none left;
 * the caller has `bytes` when kvs_lent_bytes() says so, and else asks again. */
bool kvs_pages_lend(struct kvs_pages *pages, struct kvs_lent_pages *lent, uint64_t bytes);
/* Takes pages back but for n_left. */
void kvs_pages_take_back(struct kvs_pages *pages, struct kvs_lent_pages *lent, uint32_t n_left);

static inline uint64_t kvs_lent_bytes(const struct kvs_lent_pages *lent)
{
    return lent->n * (uint64_t)KVS_ARENA_PAGE;
}

/* Returns whether so few pages are free that whoever keeps some without need returns them. */
static inline bool kvs_pages_are_short(const struct kvs_pages *pages)
{
    const uint32_t n_free = atomic_load_explicit(&pages->n_free, memory_order_relaxed);

    return n_free < KVS_PAGES_SPARE || n_free < pages->n_pages / 8;
}

/* Count bytes of evictable data: its owner frees some of it while pages are wanted. */
static inline void kvs_pages_add_spare(struct kvs_pages *pages, uint64_t bytes)
{
    atomic_fetch_add_explicit(&pages->spare_bytes, bytes, memory_order_relaxed);
}

static inline void kvs_pages_sub_spare(struct kvs_pages *pages, uint64_t bytes)
{
    atomic_fetch_sub_explicit(&pages->spare_bytes, bytes, memory_order_relaxed);
}

/* Whether something is evictable, or will be in a moment. */
static inline bool kvs_pages_have_spare(const struct kvs_pages *pages)
{
    return atomic_load_explicit(&pages->spare_bytes, memory_order_relaxed) > 0 ||
           atomic_load_explicit(&pages->n_givers, memory_order_relaxed) > 0 ||
           atomic_load_explicit(&pages->spare_soon, memory_order_relaxed);
}

/* Wants pages for `bytes` to become free, because a caller has not found them.  Returns false if
 * no data is evictable, and none will be in a moment; otherwise the caller may try again. */
bool kvs_pages_want(struct kvs_pages *pages, uint64_t bytes);
/* Returns how many more pages the owners of evictable data should free: until a few are free, and
 * as many as were wanted.  Toward the few, half of the free elements of used pages count as well,
 * since eviction at random leaves few pages whole; what was wanted are whole pages. */
uint32_t kvs_pages_lacking(struct kvs_pages *pages);

static inline bool kvs_pages_are_wanted(struct kvs_pages *pages)
{
    return kvs_pages_lacking(pages) > 0;
}

/* Touches part of the next page before it is needed, so that its first user does not wait for
 * the system to clear it.  Returns 0 if enough pages are ready. */
unsigned kvs_pages_touch_ahead(struct kvs_pages *pages);

/* Asserts the invariants; visits all pages. */
void kvs_pages_check(const struct kvs_pages *pages);

#endif
