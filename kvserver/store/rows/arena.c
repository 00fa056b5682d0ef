#include "kvserver/store/rows/arena.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    NONE = KVS_PAGE_NONE,
    OWNERS_MAX = 512, /* of a page: 4 KiB */
    LOOKS = 512,      /* at pages with room, in some us */
};

struct size_class {
    size_t bytes;
    uint32_t per_page;
    int32_t first;    /* list of pages with room */
    uint32_t n_pages; /* that it uses */
    uint32_t n_holds;
};

struct kvs_arena {
    struct kvs_pages *pages; /* some of which are this arena's */
    bool owns_pages;         /* all are */
    uint32_t n_used;         /* this arena's pages */
    uint64_t bytes_taken;    /* of elements in use */
    uint64_t bytes_of[KVS_USES];
    uint32_t n_classes, n_exact;
    struct size_class classes[KVS_ARENA_CLASSES_MAX];
};

static struct kvs_page *page_at(const struct kvs_arena *arena, int64_t index)
{
    return &arena->pages->pages[index];
}

static bool is_own(const struct kvs_arena *arena, const struct kvs_page *page)
{
    return atomic_load_explicit(&page->owner, memory_order_relaxed) == arena;
}

/* Lists are doubly linked: a page that becomes free leaves its class's list from the middle. */
static void list_push(struct kvs_arena *arena, int32_t *first, uint32_t index)
{
    struct kvs_page *page = page_at(arena, index);

    page->prev = NONE;
    page->next = *first;
    if (*first != NONE)
        page_at(arena, *first)->prev = (int32_t)index;
    *first = (int32_t)index;
}

static void list_remove(struct kvs_arena *arena, int32_t *first, uint32_t index)
{
    struct kvs_page *page = page_at(arena, index);

    if (page->prev != NONE)
        page_at(arena, page->prev)->next = page->next;
    else
        *first = page->next;
    if (page->next != NONE)
        page_at(arena, page->next)->prev = page->prev;
}

static void free_owners(struct kvs_page *page)
{
    free(page->owners);
    page->owners = NULL;
    page->n_owned = 0;
}

struct kvs_arena *kvs_arena_create_in(struct kvs_pages *pages)
{
    struct kvs_arena *arena = calloc(1, sizeof(*arena));

    if (arena == NULL)
        return NULL;
    arena->pages = pages;
    atomic_fetch_add(&pages->n_arenas, 1);
    return arena;
}

struct kvs_arena *kvs_arena_create(uint64_t bytes)
{
    struct kvs_pages *pages = kvs_pages_create(bytes);
    struct kvs_arena *arena = pages != NULL ? kvs_arena_create_in(pages) : NULL;

    if (arena != NULL)
        arena->owns_pages = true;
    else
        kvs_pages_destroy(pages);
    return arena;
}

void kvs_arena_destroy(struct kvs_arena *arena)
{
    if (arena == NULL)
        return;
    for (uint32_t i = 0; i < arena->pages->n_pages && arena->n_used > 0; i++)
        if (is_own(arena, page_at(arena, i))) {
            free_owners(page_at(arena, i));
            kvs_page_return(arena->pages, i);
            arena->n_used--;
        }
    if (arena->owns_pages)
        kvs_pages_destroy(arena->pages);
    else
        atomic_fetch_sub(&arena->pages->n_arenas, 1);
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

/* Ties to the lower one. */
static bool is_sparser(const struct kvs_arena *arena, int32_t a, int32_t b)
{
    const uint32_t n_a = page_at(arena, a)->n_used, n_b = page_at(arena, b)->n_used;

    return n_a < n_b || (n_a == n_b && a < b);
}

/* ---- elements ---------------------------------------------------------------------------- */

/* Finds the first free element of the page; returns how many are free from there on, at most
 * `want`.  The first rather than the longest run: pages stay dense, and become free sooner. */
static uint32_t
find_run(const struct kvs_page *page, uint32_t per_page, uint32_t want, uint32_t *begin)
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

/* Takes up to `want` adjacent elements of a page that has room. */
static void *take(struct kvs_arena *arena, uint32_t index, uint32_t want, uint32_t *ret_count)
{
    struct kvs_page *page = page_at(arena, index);
    struct size_class *class = &arena->classes[page->class_id];
    uint32_t begin;
    const uint32_t count = find_run(page, class->per_page, want, &begin);

    assert(count > 0);
    for (uint32_t i = begin; i < begin + count; i++)
        page->used[i / 64] |= (uint64_t)1 << i % 64;
    page->n_used += count;
    arena->bytes_taken += count * class->bytes;
    if (page->n_used == class->per_page)
        list_remove(arena, &class->first, index);
    *ret_count = count;
    return arena->pages->base + (uint64_t)index * KVS_ARENA_PAGE + begin * class->bytes;
}

void *
kvs_arena_alloc_run(struct kvs_arena *arena, int class_id, uint32_t want, uint32_t *ret_count)
{
    assert(class_id >= 0 && (uint32_t)class_id < arena->n_classes && want > 0);
    struct size_class *class = &arena->classes[class_id];

    if (class->first == NONE) {
        const int32_t taken = kvs_page_take(arena->pages, arena);
        if (taken == NONE)
            return NULL;
        struct kvs_page *fresh = page_at(arena, taken);
        arena->n_used++;
        fresh->class_id = class_id;
        class->n_pages++;
        fresh->n_used = 0;
        memset(fresh->used, 0, sizeof(fresh->used));
        list_push(arena, &class->first, (uint32_t)taken);
    }
    return take(arena, (uint32_t) class->first, want, ret_count);
}

void *kvs_arena_alloc(struct kvs_arena *arena, int class_id)
{
    uint32_t count;

    return kvs_arena_alloc_run(arena, class_id, 1, &count);
}

void kvs_arena_set_owner(struct kvs_arena *arena, const void *element, void *owner)
{
    const uint64_t offset = (uint64_t)((const char *)element - arena->pages->base);
    struct kvs_page *page = page_at(arena, (int64_t)(offset / KVS_ARENA_PAGE));
    const struct size_class *class = &arena->classes[page->class_id];

    if (page->owners == NULL && class->per_page <= OWNERS_MAX)
        page->owners = calloc(class->per_page, sizeof(*page->owners));
    if (page->owners == NULL)
        return;
    void **at = &page->owners[offset % KVS_ARENA_PAGE / class->bytes];

    page->n_owned += (owner != NULL) - (*at != NULL);
    *at = owner;
}

void *kvs_arena_owner(const struct kvs_arena *arena, const void *element)
{
    const uint64_t offset = (uint64_t)((const char *)element - arena->pages->base);
    const struct kvs_page *page = page_at(arena, (int64_t)(offset / KVS_ARENA_PAGE));

    return page->owners != NULL
               ? page->owners[offset % KVS_ARENA_PAGE / arena->classes[page->class_id].bytes]
               : NULL;
}

int32_t kvs_arena_sparsest(const struct kvs_arena *arena, int class_id, uint32_t skipped)
{
    const struct size_class *class = &arena->classes[class_id];
    int32_t sparsest[KVS_ARENA_SKIPPED_MAX + 1];
    uint32_t n = 0, n_looks = 0;
    uint64_t n_free = 0;

    assert(skipped <= KVS_ARENA_SKIPPED_MAX);
    for (int32_t i = class->first; i != NONE && n_looks < LOOKS; i = page_at(arena, i)->next) {
        const struct kvs_page *page = page_at(arena, i);
        uint32_t at = n;

        n_looks++;
        n_free += class->per_page - page->n_used;
        if (page->n_owned < page->n_used)
            continue;
        for (; at > 0 && is_sparser(arena, i, sparsest[at - 1]); at--)
            if (at <= skipped)
                sparsest[at] = sparsest[at - 1];
        if (at <= skipped)
            sparsest[at] = i;
        n += n <= skipped;
    }
    /* Its own free ones count as well: together they are a page. */
    return n_free >= class->per_page && n > skipped ? sparsest[skipped] : NONE;
}

bool kvs_arena_has_page(const struct kvs_arena *arena, int32_t index)
{
    return is_own(arena, page_at(arena, index));
}

void *kvs_arena_next_owned(const struct kvs_arena *arena,
                           int32_t index,
                           uint32_t *at,
                           void **ret_owner)
{
    const struct kvs_page *page = page_at(arena, index);

    if (!is_own(arena, page) || page->owners == NULL)
        return NULL;
    const struct size_class *class = &arena->classes[page->class_id];

    while (*at < class->per_page) {
        const uint32_t i = (*at)++;

        *ret_owner = page->owners[i];
        if (*ret_owner != NULL)
            return arena->pages->base + (uint64_t)index * KVS_ARENA_PAGE + i * class->bytes;
    }
    return NULL;
}

void *kvs_arena_alloc_outside(struct kvs_arena *arena, int class_id, int32_t page)
{
    int32_t index = arena->classes[class_id].first;
    uint32_t count;

    if (index == page)
        index = page_at(arena, index)->next;
    return index != NONE ? take(arena, (uint32_t)index, 1, &count) : NULL;
}

void kvs_arena_free(struct kvs_arena *arena, int class_id, void *element)
{
    if (element == NULL)
        return;
    uint64_t offset = (uint64_t)((char *)element - arena->pages->base);
    uint32_t index = (uint32_t)(offset / KVS_ARENA_PAGE);
    struct size_class *class = &arena->classes[class_id];
    struct kvs_page *page = page_at(arena, index);
    uint32_t bit = (uint32_t)(offset % KVS_ARENA_PAGE / class->bytes);

    assert(index < arena->pages->n_pages && is_own(arena, page) && page->class_id == class_id);
    assert(page->used[bit / 64] >> bit % 64 & 1);
    page->used[bit / 64] &= ~((uint64_t)1 << bit % 64);
    arena->bytes_taken -= class->bytes;
    if (page->owners != NULL) {
        page->n_owned -= page->owners[bit] != NULL;
        page->owners[bit] = NULL;
    }
    /* A full page was on no list. */
    if (page->n_used-- == class->per_page)
        list_push(arena, &class->first, index);
    if (page->n_used == 0) {
        list_remove(arena, &class->first, index);
        class->n_pages--;
        arena->n_used--;
        free_owners(page);
        kvs_page_return(arena->pages, index);
    }
}

uint64_t kvs_arena_room(const struct kvs_arena *arena, int class_id)
{
    const struct size_class *class = &arena->classes[class_id];
    uint64_t room =
        (uint64_t)atomic_load_explicit(&arena->pages->n_free, memory_order_relaxed) *
        class->per_page;

    for (int32_t i = class->first; i != NONE; i = page_at(arena, i)->next)
        room += class->per_page - page_at(arena, i)->n_used;
    return room;
}

unsigned kvs_arena_touch_ahead(struct kvs_arena *arena)
{
    return kvs_pages_touch_ahead(arena->pages);
}

struct kvs_pages *kvs_arena_pages(const struct kvs_arena *arena)
{
    return arena->pages;
}

void *kvs_arena_base(const struct kvs_arena *arena)
{
    return arena->pages->base;
}

uint64_t kvs_arena_bytes(const struct kvs_arena *arena)
{
    return arena->pages->bytes;
}

uint64_t kvs_arena_bytes_used(const struct kvs_arena *arena)
{
    return (uint64_t)arena->n_used * KVS_ARENA_PAGE;
}

uint64_t kvs_arena_bytes_taken(const struct kvs_arena *arena)
{
    return arena->bytes_taken;
}

uint64_t kvs_arena_bytes_of(const struct kvs_arena *arena, enum kvs_arena_use use)
{
    return arena->bytes_of[use];
}

void kvs_arena_use(struct kvs_arena *arena, enum kvs_arena_use use, const void *element)
{
    arena->bytes_of[use] += arena->classes[kvs_arena_class_of(arena, element)].bytes;
}

void kvs_arena_unuse(struct kvs_arena *arena, enum kvs_arena_use use, const void *element)
{
    arena->bytes_of[use] -= arena->classes[kvs_arena_class_of(arena, element)].bytes;
}

/* ---- checks ------------------------------------------------------------------------------ */

int kvs_arena_class_of(const struct kvs_arena *arena, const void *element)
{
    const uintptr_t offset = (uintptr_t)element - (uintptr_t)arena->pages->base;

    assert(offset < arena->pages->bytes);
    return page_at(arena, (int64_t)(offset / KVS_ARENA_PAGE))->class_id;
}

bool kvs_arena_is_in_use(const struct kvs_arena *arena, int class_id, const void *element)
{
    const uint64_t offset = (uint64_t)((uintptr_t)element - (uintptr_t)arena->pages->base);

    if (class_id < 0 || (uint32_t)class_id >= arena->n_classes || offset >= arena->pages->bytes)
        return false;
    const struct kvs_page *page = page_at(arena, (int64_t)(offset / KVS_ARENA_PAGE));
    const size_t bytes = arena->classes[class_id].bytes;
    const uint64_t bit = offset % KVS_ARENA_PAGE / bytes;

    return is_own(arena, page) && page->class_id == class_id &&
           offset % KVS_ARENA_PAGE % bytes == 0 && (page->used[bit / 64] >> bit % 64 & 1) != 0;
}

/* Counts the pages of a list, all of which must be in use by the class. */
static uint32_t check_list(const struct kvs_arena *arena, int32_t first, int32_t class_id)
{
    uint32_t n = 0;

    for (int32_t i = first, prev = NONE; i != NONE; prev = i, i = page_at(arena, i)->next) {
        assert(i >= 0 && (uint32_t)i < arena->pages->n_pages && n < arena->n_used);
        assert(is_own(arena, page_at(arena, i)));
        assert(page_at(arena, i)->prev == prev && page_at(arena, i)->class_id == class_id);
        n++;
    }
    return n;
}

static void check_page(const struct kvs_page *page, uint32_t per_page)
{
    uint32_t n_used = 0, n_owned = 0;

    for (uint32_t word = 0; word * 64 < per_page; word++)
        n_used += (uint32_t)__builtin_popcountll(page->used[word]);
    if (per_page % 64 != 0)
        assert(page->used[per_page / 64] >> per_page % 64 == 0);
    assert(n_used == page->n_used && n_used > 0 && n_used <= per_page);
    for (uint32_t i = 0; page->owners != NULL && i < per_page; i++) {
        assert(page->owners[i] == NULL || (page->used[i / 64] >> i % 64 & 1) != 0);
        n_owned += page->owners[i] != NULL;
    }
    assert(n_owned == page->n_owned);
}

void kvs_arena_check(const struct kvs_arena *arena)
{
    uint32_t n_pages[KVS_ARENA_CLASSES_MAX] = {0}, n_roomy[KVS_ARENA_CLASSES_MAX] = {0};
    uint32_t n_used = 0, n_exact = 0;
    uint64_t bytes_taken = 0, bytes_of = 0;

    if (arena->owns_pages)
        kvs_pages_check(arena->pages);
    for (uint32_t i = 0; i < arena->pages->n_pages; i++) {
        const struct kvs_page *page = page_at(arena, i);

        if (!is_own(arena, page))
            continue;
        n_used++;
        assert(page->class_id >= 0 && (uint32_t)page->class_id < arena->n_classes);
        const uint32_t per_page = arena->classes[page->class_id].per_page;
        check_page(page, per_page);
        n_pages[page->class_id]++;
        bytes_taken += page->n_used * (uint64_t)arena->classes[page->class_id].bytes;
        n_roomy[page->class_id] += page->n_used < per_page;
    }
    assert(n_used == arena->n_used);
    for (unsigned use = 0; use < KVS_USES; use++)
        bytes_of += arena->bytes_of[use];
    assert(bytes_taken == arena->bytes_taken && bytes_of <= bytes_taken);
    for (uint32_t i = 0; i < arena->n_classes; i++) {
        const struct size_class *class = &arena->classes[i];

        assert(class->n_pages == n_pages[i]);
        assert(check_list(arena, class->first, (int32_t)i) == n_roomy[i]);
        assert(find_class(arena, class->bytes) == (int)i);
        n_exact += rounded(class->bytes) != class->bytes;
    }
    assert(n_exact <= KVS_ARENA_EXACT_MAX);
}
