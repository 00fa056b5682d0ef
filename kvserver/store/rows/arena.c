#include "kvserver/store/rows/arena.h"

#include "kvserver/base/memory.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    ELEMENTS_MAX = KVS_ARENA_PAGE / KVS_ARENA_ELEMENT_MIN,
    WORDS = ELEMENTS_MAX / 64,
    NONE = -1,
    TOUCH_AHEAD_PAGES = 32, /* 64 MiB are kept ready */
    TOUCH_BYTES = 64 << 10, /* touched per call: the kernel may clear fresh memory at less than
                             * 1 GB/s */
};

/* A page in use is on its class's list while it has room, and on no list when it is full. */
struct page {
    int32_t class_id; /* NONE: free */
    uint32_t n_used;
    int32_t next, prev; /* in the list of the class's pages with room, or of the free pages */
    uint64_t used[WORDS];
};

struct size_class {
    size_t bytes;
    uint32_t per_page;
    int32_t first;    /* list of pages with room */
    uint32_t n_pages; /* that it uses */
    uint32_t n_holds;
};

struct kvs_arena {
    char *base;
    uint64_t bytes;
    uint32_t n_pages, n_free;
    int32_t free_first;
    uint32_t touched;       /* pages [0, touched) have been touched at least once */
    uint32_t touched_bytes; /* of the next page */
    struct page *pages;
    uint32_t n_classes, n_exact;
    struct size_class classes[KVS_ARENA_CLASSES_MAX];
};

/* Lists are doubly linked: a page that becomes free leaves its class's list from the middle. */
static void list_push(struct kvs_arena *arena, int32_t *first, uint32_t index)
{
    struct page *page = &arena->pages[index];

    page->prev = NONE;
    page->next = *first;
    if (*first != NONE)
        arena->pages[*first].prev = (int32_t)index;
    *first = (int32_t)index;
}

static void list_remove(struct kvs_arena *arena, int32_t *first, uint32_t index)
{
    struct page *page = &arena->pages[index];

    if (page->prev != NONE)
        arena->pages[page->prev].next = page->next;
    else
        *first = page->next;
    if (page->next != NONE)
        arena->pages[page->next].prev = page->prev;
}

struct kvs_arena *kvs_arena_create(uint64_t bytes)
{
    struct kvs_arena *arena = calloc(1, sizeof(*arena));

    if (arena == NULL)
        return NULL;
    uint64_t n_pages = bytes / KVS_ARENA_PAGE;
    if (n_pages == 0)
        n_pages = 1;
    if (n_pages > INT32_MAX)
        goto err_destroy;
    arena->n_pages = arena->n_free = (uint32_t)n_pages;
    arena->bytes = n_pages * KVS_ARENA_PAGE;
    arena->pages = calloc(n_pages, sizeof(*arena->pages));
    arena->base = kv_memory_reserve(arena->bytes);
    if (arena->pages == NULL || arena->base == NULL)
        goto err_destroy;

    /* Lowest pages first, so that touched pages are reused. */
    arena->free_first = NONE;
    for (uint32_t i = arena->n_pages; i-- > 0;) {
        arena->pages[i].class_id = NONE;
        list_push(arena, &arena->free_first, i);
    }
    return arena;

err_destroy:
    kvs_arena_destroy(arena);
    return NULL;
}

void kvs_arena_destroy(struct kvs_arena *arena)
{
    if (arena == NULL)
        return;
    kv_memory_release(arena->base, arena->bytes);
    free(arena->pages);
    free(arena);
}

/* ---- size classes ------------------------------------------------------------------------ */

/* Returns the element size of the rounded class for `bytes`: at least four sizes per power of
 * two. */
static size_t rounded(size_t bytes)
{
    size_t step = KVS_ARENA_ELEMENT_MIN / 4;

    if (bytes < KVS_ARENA_ELEMENT_MIN)
        bytes = KVS_ARENA_ELEMENT_MIN;
    while (step * 8 <= bytes)
        step *= 2;
    return (bytes + step - 1) / step * step;
}

static int find_class(const struct kvs_arena *arena, size_t bytes)
{
    for (uint32_t i = 0; i < arena->n_classes; i++)
        if (arena->classes[i].bytes == bytes)
            return (int)i;
    return NONE;
}

/* Returns an exact class that has neither holders nor pages, or NONE. */
static int find_unused(const struct kvs_arena *arena)
{
    for (uint32_t i = 0; i < arena->n_classes; i++) {
        const struct size_class *class = &arena->classes[i];

        if (class->n_pages == 0 && class->n_holds == 0 && rounded(class->bytes) != class->bytes)
            return (int)i;
    }
    return NONE;
}

static int set_class(struct kvs_arena *arena, uint32_t class_id, size_t bytes)
{
    arena->classes[class_id] = (struct size_class){
        .bytes = bytes,
        .per_page = (uint32_t)(KVS_ARENA_PAGE / bytes),
        .first = NONE,
    };
    return (int)class_id;
}

static int rounded_class(struct kvs_arena *arena, size_t bytes)
{
    int class_id = find_class(arena, bytes);

    if (class_id != NONE)
        return class_id;
    /* Rounded sizes are fewer than the places left for them: a test counts them. */
    assert(arena->n_classes < KVS_ARENA_CLASSES_MAX);
    return set_class(arena, arena->n_classes++, bytes);
}

static int exact_class(struct kvs_arena *arena, size_t bytes)
{
    int class_id = find_class(arena, bytes);

    if (class_id != NONE)
        return class_id;
    if (arena->n_exact < KVS_ARENA_EXACT_MAX) {
        arena->n_exact++;
        return set_class(arena, arena->n_classes++, bytes);
    }
    class_id = find_unused(arena);
    return class_id != NONE ? set_class(arena, (uint32_t)class_id, bytes) : NONE;
}

int kvs_arena_class_hold(struct kvs_arena *arena, size_t bytes)
{
    size_t exact =
        bytes < KVS_ARENA_ELEMENT_MIN ? KVS_ARENA_ELEMENT_MIN : (bytes + 63) & ~(size_t)63;
    int class_id = NONE;

    if (exact > KVS_ARENA_PAGE)
        return NONE;
    if (exact != rounded(exact))
        class_id = exact_class(arena, exact);
    if (class_id == NONE)
        class_id = rounded_class(arena, rounded(exact));
    arena->classes[class_id].n_holds++;
    return class_id;
}

void kvs_arena_class_release(struct kvs_arena *arena, int class_id)
{
    assert(class_id >= 0 && (uint32_t)class_id < arena->n_classes &&
           arena->classes[class_id].n_holds > 0);
    arena->classes[class_id].n_holds--;
}

int kvs_arena_class_rounded(struct kvs_arena *arena, size_t bytes)
{
    return bytes <= KVS_ARENA_PAGE ? rounded_class(arena, rounded(bytes)) : NONE;
}

size_t kvs_arena_class_bytes(const struct kvs_arena *arena, int class_id)
{
    return arena->classes[class_id].bytes;
}

/* ---- elements ---------------------------------------------------------------------------- */

/* Finds the first free element of the page; returns how many are free from there on, at most
 * `want`.  The first rather than the longest run: pages stay dense, and become free sooner. */
static uint32_t
find_run(const struct page *page, uint32_t per_page, uint32_t want, uint32_t *begin)
{
    uint32_t at = 0;

    for (uint32_t word = 0; word * 64 < per_page; word++) {
        if (page->used[word] != UINT64_MAX) {
            at = word * 64 + (uint32_t)__builtin_ctzll(~page->used[word]);
            break;
        }
    }
    uint32_t count = 0;
    while (count < want && at + count < per_page &&
           (page->used[(at + count) / 64] >> (at + count) % 64 & 1) == 0)
        count++;
    *begin = at;
    return count;
}

void *
kvs_arena_alloc_run(struct kvs_arena *arena, int class_id, uint32_t want, uint32_t *ret_count)
{
    assert(class_id >= 0 && (uint32_t)class_id < arena->n_classes && want > 0);
    struct size_class *class = &arena->classes[class_id];

    if (class->first == NONE) {
        if (arena->free_first == NONE)
            return NULL;
        uint32_t index = (uint32_t)arena->free_first;
        struct page *page = &arena->pages[index];
        list_remove(arena, &arena->free_first, index);
        arena->n_free--;
        page->class_id = class_id;
        class->n_pages++;
        page->n_used = 0;
        memset(page->used, 0, sizeof(page->used));
        list_push(arena, &class->first, index);
        if (index >= arena->touched) {
            arena->touched = index + 1;
            arena->touched_bytes = 0;
        }
    }

    uint32_t index = (uint32_t) class->first, begin;
    struct page *page = &arena->pages[index];
    uint32_t count = find_run(page, class->per_page, want, &begin);

    assert(count > 0);
    for (uint32_t i = begin; i < begin + count; i++)
        page->used[i / 64] |= (uint64_t)1 << i % 64;
    page->n_used += count;
    if (page->n_used == class->per_page)
        list_remove(arena, &class->first, index);
    *ret_count = count;
    return arena->base + (uint64_t)index * KVS_ARENA_PAGE + begin * class->bytes;
}

void *kvs_arena_alloc(struct kvs_arena *arena, int class_id)
{
    uint32_t count;

    return kvs_arena_alloc_run(arena, class_id, 1, &count);
}

void kvs_arena_free(struct kvs_arena *arena, int class_id, void *element)
{
    if (element == NULL)
        return;
    uint64_t offset = (uint64_t)((char *)element - arena->base);
    uint32_t index = (uint32_t)(offset / KVS_ARENA_PAGE);
    struct size_class *class = &arena->classes[class_id];
    struct page *page = &arena->pages[index];
    uint32_t bit = (uint32_t)(offset % KVS_ARENA_PAGE / class->bytes);

    assert(index < arena->n_pages && page->class_id == class_id);
    assert(page->used[bit / 64] >> bit % 64 & 1);
    page->used[bit / 64] &= ~((uint64_t)1 << bit % 64);
    /* A full page was on no list. */
    if (page->n_used-- == class->per_page)
        list_push(arena, &class->first, index);
    if (page->n_used == 0) {
        list_remove(arena, &class->first, index);
        class->n_pages--;
        page->class_id = NONE;
        list_push(arena, &arena->free_first, index);
        arena->n_free++;
    }
}

uint64_t kvs_arena_room(const struct kvs_arena *arena, int class_id)
{
    const struct size_class *class = &arena->classes[class_id];
    uint64_t room = (uint64_t)arena->n_free * class->per_page;

    for (int32_t i = class->first; i != NONE; i = arena->pages[i].next)
        room += class->per_page - arena->pages[i].n_used;
    return room;
}

unsigned kvs_arena_touch_ahead(struct kvs_arena *arena)
{
    uint32_t used = arena->n_pages - arena->n_free;

    if (arena->touched >= arena->n_pages || arena->touched >= used + TOUCH_AHEAD_PAGES)
        return 0;
    /* Zeros may be written: no element has been on these pages yet. */
    volatile char *next =
        arena->base + (uint64_t)arena->touched * KVS_ARENA_PAGE + arena->touched_bytes;
    for (size_t i = 0; i < TOUCH_BYTES; i += 4096)
        next[i] = 0;
    arena->touched_bytes += TOUCH_BYTES;
    if (arena->touched_bytes == KVS_ARENA_PAGE) {
        arena->touched++;
        arena->touched_bytes = 0;
    }
    return 1;
}

void *kvs_arena_base(const struct kvs_arena *arena)
{
    return arena->base;
}

uint64_t kvs_arena_bytes(const struct kvs_arena *arena)
{
    return arena->bytes;
}

uint64_t kvs_arena_bytes_used(const struct kvs_arena *arena)
{
    return (uint64_t)(arena->n_pages - arena->n_free) * KVS_ARENA_PAGE;
}

/* ---- checks ------------------------------------------------------------------------------ */

bool kvs_arena_is_in_use(const struct kvs_arena *arena, int class_id, const void *element)
{
    const uint64_t offset = (uint64_t)((uintptr_t)element - (uintptr_t)arena->base);

    if (class_id < 0 || (uint32_t)class_id >= arena->n_classes || offset >= arena->bytes)
        return false;
    const struct page *page = &arena->pages[offset / KVS_ARENA_PAGE];
    const size_t bytes = arena->classes[class_id].bytes;
    const uint64_t bit = offset % KVS_ARENA_PAGE / bytes;

    return page->class_id == class_id && offset % KVS_ARENA_PAGE % bytes == 0 &&
           (page->used[bit / 64] >> bit % 64 & 1) != 0;
}

/* Counts the pages of a list, all of which must be in use by the class, or free (NONE). */
static uint32_t check_list(const struct kvs_arena *arena, int32_t first, int32_t class_id)
{
    uint32_t n = 0;

    for (int32_t i = first, prev = NONE; i != NONE; prev = i, i = arena->pages[i].next) {
        assert(i >= 0 && (uint32_t)i < arena->n_pages && n < arena->n_pages);
        assert(arena->pages[i].prev == prev && arena->pages[i].class_id == class_id);
        n++;
    }
    return n;
}

static void check_page(const struct page *page, uint32_t per_page)
{
    uint32_t n_used = 0;

    for (uint32_t word = 0; word * 64 < per_page; word++)
        n_used += (uint32_t)__builtin_popcountll(page->used[word]);
    if (per_page % 64 != 0)
        assert(page->used[per_page / 64] >> per_page % 64 == 0);
    assert(n_used == page->n_used && n_used > 0 && n_used <= per_page);
}

void kvs_arena_check(const struct kvs_arena *arena)
{
    uint32_t n_pages[KVS_ARENA_CLASSES_MAX] = {0}, n_roomy[KVS_ARENA_CLASSES_MAX] = {0};
    uint32_t n_free = 0, n_exact = 0;

    for (uint32_t i = 0; i < arena->n_pages; i++) {
        const struct page *page = &arena->pages[i];

        if (page->class_id == NONE) {
            n_free++;
            continue;
        }
        assert(page->class_id >= 0 && (uint32_t)page->class_id < arena->n_classes);
        const uint32_t per_page = arena->classes[page->class_id].per_page;
        check_page(page, per_page);
        n_pages[page->class_id]++;
        n_roomy[page->class_id] += page->n_used < per_page;
    }
    assert(n_free == arena->n_free && check_list(arena, arena->free_first, NONE) == n_free);
    for (uint32_t i = 0; i < arena->n_classes; i++) {
        const struct size_class *class = &arena->classes[i];

        assert(class->n_pages == n_pages[i]);
        assert(check_list(arena, class->first, (int32_t)i) == n_roomy[i]);
        assert(find_class(arena, class->bytes) == (int)i);
        n_exact += rounded(class->bytes) != class->bytes;
    }
    assert(n_exact <= KVS_ARENA_EXACT_MAX);
}
