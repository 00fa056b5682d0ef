#include "kvserver/store/rows/pages.h"

#include "kvserver/base/memory.h"
#include "kvserver/base/thread.h"

#include <assert.h>
#include <stdlib.h>

enum {
    TOUCH_AHEAD_PAGES = 32, /* 64 MiB are kept ready for each arena */
    TOUCH_BYTES = 64 << 10, /* touched per call: the kernel may clear fresh memory at less than
                             * 1 GB/s */
    LEND_AT_ONCE = 8,       /* pages: giving one back to the system takes some us */
};

struct kvs_pages *kvs_pages_create(uint64_t bytes)
{
    struct kvs_pages *pages = calloc(1, sizeof(*pages));
    uint64_t n_pages = bytes / KVS_ARENA_PAGE;

    if (pages == NULL)
        return NULL;
    if (n_pages == 0)
        n_pages = 1;
    if (n_pages > INT32_MAX)
        goto err_destroy;
    pages->n_pages = (uint32_t)n_pages;
    pages->bytes = n_pages * KVS_ARENA_PAGE;
    pages->pages = calloc(n_pages, sizeof(*pages->pages));
    pages->base = kv_memory_reserve(pages->bytes);
    pages->lock = kv_lock_create();
    if (pages->pages == NULL || pages->base == NULL || pages->lock == NULL)
        goto err_destroy;

    /* Lowest pages first, so that touched pages are reused. */
    atomic_init(&pages->n_free, pages->n_pages);
    pages->free_first = KVS_PAGE_NONE;
    for (uint32_t i = pages->n_pages; i-- > 0;) {
        pages->pages[i].next = pages->free_first;
        pages->free_first = (int32_t)i;
    }
    return pages;

err_destroy:
    kvs_pages_destroy(pages);
    return NULL;
}

void kvs_pages_destroy(struct kvs_pages *pages)
{
    if (pages == NULL)
        return;
    if (pages->lock != NULL)
        kv_lock_destroy(pages->lock);
    kv_memory_release(pages->base, pages->bytes);
    free(pages->pages);
    free(pages);
}

static void raise_touched(struct kvs_pages *pages, uint64_t end)
{
    uint64_t touched = atomic_load_explicit(&pages->touched, memory_order_relaxed);

    while (touched < end &&
           !atomic_compare_exchange_weak_explicit(&pages->touched, &touched, end,
                                                  memory_order_relaxed, memory_order_relaxed))
        ;
}

int32_t kvs_page_take(struct kvs_pages *pages, const void *owner)
{
    int32_t index;

    if (atomic_load_explicit(&pages->n_free, memory_order_relaxed) == 0)
        return KVS_PAGE_NONE;
    kv_lock_take(pages->lock);
    index = pages->free_first;
    if (index != KVS_PAGE_NONE) {
        pages->free_first = pages->pages[index].next;
        atomic_fetch_sub_explicit(&pages->n_free, 1, memory_order_relaxed);
    }
    kv_lock_release(pages->lock);
    if (index == KVS_PAGE_NONE)
        return index;
    atomic_store_explicit(&pages->pages[index].owner, owner, memory_order_relaxed);
    raise_touched(pages, ((uint64_t)index + 1) * KVS_ARENA_PAGE);
    return index;
}

void kvs_page_return(struct kvs_pages *pages, uint32_t index)
{
    struct kvs_page *page = &pages->pages[index];

    atomic_store_explicit(&page->owner, NULL, memory_order_relaxed);
    kv_lock_take(pages->lock);
    page->next = pages->free_first;
    pages->free_first = (int32_t)index;
    atomic_fetch_add_explicit(&pages->n_free, 1, memory_order_relaxed);
    kv_lock_release(pages->lock);
}

bool kvs_pages_lend(struct kvs_pages *pages, struct kvs_lent_pages *lent, uint64_t bytes)
{
    for (int i = 0; i < LEND_AT_ONCE && kvs_lent_bytes(lent) < bytes; i++) {
        const int32_t index = kvs_page_take(pages, lent);

        if (index == KVS_PAGE_NONE)
            return false;
        kv_memory_drop(pages->base + (uint64_t)index * KVS_ARENA_PAGE, KVS_ARENA_PAGE);
        pages->pages[index].next = lent->first;
        lent->first = index;
        lent->n++;
    }
    return true;
}

void kvs_pages_take_back(struct kvs_pages *pages, struct kvs_lent_pages *lent, uint32_t n_left)
{
    for (; lent->n > n_left; lent->n--) {
        const int32_t index = lent->first;

        lent->first = pages->pages[index].next;
        kvs_page_return(pages, (uint32_t)index);
    }
}

bool kvs_pages_want(struct kvs_pages *pages, uint64_t bytes)
{
    const uint64_t n_lacking = bytes / KVS_ARENA_PAGE + KVS_PAGES_SPARE;
    const uint64_t n = atomic_load_explicit(&pages->n_free, memory_order_relaxed) + n_lacking;
    const uint32_t n_wanted = n < pages->n_pages ? (uint32_t)n : pages->n_pages;
    uint32_t wanted = atomic_load_explicit(&pages->wanted, memory_order_relaxed);

    if (!kvs_pages_have_spare(pages))
        return false;
    while (wanted < n_wanted &&
           !atomic_compare_exchange_weak_explicit(&pages->wanted, &wanted, n_wanted,
                                                  memory_order_relaxed, memory_order_relaxed))
        ;
    return true;
}

uint32_t kvs_pages_lacking(struct kvs_pages *pages)
{
    const uint32_t n_free = atomic_load_explicit(&pages->n_free, memory_order_relaxed);
    const uint32_t wanted = atomic_load_explicit(&pages->wanted, memory_order_relaxed);
    const uint32_t n_kept =
        pages->n_pages / 64 +
        (pages->n_pages / 8 < KVS_PAGES_SPARE ? pages->n_pages / 8 : KVS_PAGES_SPARE);

    /* They are there, or there is nothing left to free. */
    if (wanted != 0 && (n_free >= wanted || !kvs_pages_have_spare(pages)))
        atomic_store_explicit(&pages->wanted, 0, memory_order_relaxed);
    const uint64_t n_loose =
        atomic_load_explicit(&pages->loose_bytes, memory_order_relaxed) / 2 / KVS_ARENA_PAGE;
    const uint64_t n_lacking[2] = {
        n_kept > n_free + n_loose ? n_kept - n_free - n_loose : 0,
        wanted > n_free ? wanted - n_free : 0,
    };

    return (uint32_t)n_lacking[n_lacking[1] > n_lacking[0]];
}

unsigned kvs_pages_touch_ahead(struct kvs_pages *pages)
{
    const uint32_t n_used =
        pages->n_pages - atomic_load_explicit(&pages->n_free, memory_order_relaxed);
    const uint32_t n_ahead =
        TOUCH_AHEAD_PAGES * atomic_load_explicit(&pages->n_arenas, memory_order_relaxed);
    uint64_t touched = atomic_load_explicit(&pages->touched, memory_order_relaxed);

    if (touched >= pages->bytes ||
        touched >= ((uint64_t)n_used + n_ahead) * (uint64_t)KVS_ARENA_PAGE)
        return 0;
    if (!atomic_compare_exchange_strong_explicit(&pages->touched, &touched,
                                                 touched + TOUCH_BYTES, memory_order_relaxed,
                                                 memory_order_relaxed))
        return 1;
    /* Another thread may take the page meanwhile and write to it. */
    kv_memory_provide(pages->base + touched, TOUCH_BYTES);
    return 1;
}

void kvs_pages_check(const struct kvs_pages *pages)
{
    uint32_t n_free = 0, n_listed = 0;

    for (uint32_t i = 0; i < pages->n_pages; i++)
        n_free += atomic_load_explicit(&pages->pages[i].owner, memory_order_relaxed) == NULL;
    for (int32_t i = pages->free_first; i != KVS_PAGE_NONE; i = pages->pages[i].next) {
        assert(i >= 0 && (uint32_t)i < pages->n_pages && n_listed < pages->n_pages);
        assert(atomic_load_explicit(&pages->pages[i].owner, memory_order_relaxed) == NULL);
        n_listed++;
    }
    assert(n_free == n_listed &&
           n_free == atomic_load_explicit(&pages->n_free, memory_order_relaxed));
}
