#include "kvserver/disk/places.h"

#include <stdlib.h>
#include <string.h>

enum {
    EXTENT_PAGES = KV_PLACE_BYTES_MAX / KV_PLACE_PAGE,
    NONE = -1,
};

struct extent {
    uint16_t pages; /* of a place; 0: the extent is free */
    uint16_t n_used;
    int32_t next, prev; /* with room and of that size; next: of the free ones */
    bool is_listed;
    uint64_t used[EXTENT_PAGES / 64];
};

struct kv_places {
    struct extent *extents;
    int32_t n_extents, room, free_extent;
    int32_t with_room[EXTENT_PAGES + 1]; /* the first extent by pages of a place */
    uint64_t used_pages;
};

struct kv_places *kv_places_create(void)
{
    struct kv_places *places = calloc(1, sizeof(*places));

    if (places == NULL)
        return NULL;
    places->free_extent = NONE;
    for (unsigned pages = 0; pages <= EXTENT_PAGES; pages++)
        places->with_room[pages] = NONE;
    return places;
}

void kv_places_destroy(struct kv_places *places)
{
    if (places != NULL)
        free(places->extents);
    free(places);
}

uint64_t kv_places_pages_used(const struct kv_places *places)
{
    return places->used_pages;
}

bool kv_place_list_add(struct kv_place_list *places, struct kv_place place)
{
    if (places->n == places->room) {
        const size_t room = places->room > 0 ? 2 * places->room : 64;
        struct kv_place *list = realloc(places->list, room * sizeof(*list));

        if (list == NULL)
            return false;
        places->list = list;
        places->room = room;
    }
    places->list[places->n++] = place;
    return true;
}

static void list_extent(struct kv_places *places, int32_t at)
{
    struct extent *extent = &places->extents[at];

    extent->prev = NONE;
    extent->next = places->with_room[extent->pages];
    if (extent->next != NONE)
        places->extents[extent->next].prev = at;
    places->with_room[extent->pages] = at;
    extent->is_listed = true;
}

static void unlist_extent(struct kv_places *places, int32_t at)
{
    struct extent *extent = &places->extents[at];

    if (extent->prev != NONE)
        places->extents[extent->prev].next = extent->next;
    else
        places->with_room[extent->pages] = extent->next;
    if (extent->next != NONE)
        places->extents[extent->next].prev = extent->prev;
    extent->is_listed = false;
}

/* Makes extents up to number n - 1, all free.  Returns false if out of memory. */
static bool grow(struct kv_places *places, int32_t n)
{
    if (n > places->room) {
        const int32_t room = n > 2 * places->room ? n : 2 * places->room;
        struct extent *extents = realloc(places->extents, (size_t)room * sizeof(*extents));

        if (extents == NULL)
            return false;
        places->extents = extents;
        places->room = room;
    }
    /* The first ones are to be used first. */
    for (int32_t at = n - 1; at >= places->n_extents; at--) {
        places->extents[at] = (struct extent){.next = places->free_extent};
        places->free_extent = at;
    }
    places->n_extents = n > places->n_extents ? n : places->n_extents;
    return true;
}

/* An extent of places of that size with room; NONE: out of memory, or the file is as large as it may
 * be. */
static int32_t extent_with_room(struct kv_places *places, uint32_t pages)
{
    int32_t at = places->with_room[pages];

    if (at != NONE)
        return at;
    if (places->free_extent == NONE &&
        (places->n_extents == (int32_t)(UINT32_MAX / EXTENT_PAGES) ||
         !grow(places, places->n_extents + 1)))
        return NONE;
    at = places->free_extent;
    places->free_extent = places->extents[at].next;
    places->extents[at] = (struct extent){.pages = (uint16_t)pages};
    list_extent(places, at);
    return at;
}

static void take(struct kv_places *places, int32_t at, uint32_t slot)
{
    struct extent *extent = &places->extents[at];

    extent->used[slot / 64] |= UINT64_C(1) << slot % 64;
    places->used_pages += extent->pages;
    if (++extent->n_used == EXTENT_PAGES / extent->pages)
        unlist_extent(places, at);
}

bool kv_place_take(struct kv_places *places, uint32_t bytes, struct kv_place *ret_place)
{
    const uint32_t pages = kv_place_pages(bytes);
    const int32_t at = extent_with_room(places, pages);
    uint32_t slot = 0;

    if (at == NONE)
        return false;
    for (uint32_t i = 0;; i++)
        if (~places->extents[at].used[i] != 0) {
            slot = i * 64 + (uint32_t)__builtin_ctzll(~places->extents[at].used[i]);
            break;
        }
    take(places, at, slot);
    *ret_place = (struct kv_place){.page = (uint32_t)at * EXTENT_PAGES + slot * pages + 1,
                                   .bytes = bytes};
    return true;
}

void kv_place_free(struct kv_places *places, struct kv_place place)
{
    const int32_t at = (int32_t)((place.page - 1) / EXTENT_PAGES);
    struct extent *extent = &places->extents[at];
    const uint32_t slot = (place.page - 1) % EXTENT_PAGES / extent->pages;

    extent->used[slot / 64] &= ~(UINT64_C(1) << slot % 64);
    places->used_pages -= extent->pages;
    if (!extent->is_listed)
        list_extent(places, at);
    if (--extent->n_used > 0)
        return;
    unlist_extent(places, at);
    *extent = (struct extent){.next = places->free_extent};
    places->free_extent = at;
}

kv_status_t kv_place_claim(struct kv_places *places, struct kv_place place)
{
    const uint32_t pages = kv_place_pages(place.bytes);
    const int32_t at = (int32_t)((place.page - 1) / EXTENT_PAGES);
    struct extent *extent;
    uint32_t slot;

    if (place.page == 0 || pages > EXTENT_PAGES ||
        place.page - 1 > UINT32_MAX - 2 * EXTENT_PAGES)
        return KV_INVALID;
    if (!grow(places, at + 1))
        return KV_NO_MEMORY;
    extent = &places->extents[at];
    if ((place.page - 1) % EXTENT_PAGES % pages != 0 ||
        (extent->pages != 0 && extent->pages != pages))
        return KV_INVALID;
    slot = (place.page - 1) % EXTENT_PAGES / pages;
    if (slot >= EXTENT_PAGES / pages || (extent->used[slot / 64] >> slot % 64 & 1) != 0)
        return KV_INVALID;
    if (extent->pages == 0) {
        /* The list of free ones is made anew: kv_places_found(). */
        *extent = (struct extent){.pages = (uint16_t)pages};
        list_extent(places, at);
    }
    take(places, at, slot);
    return KV_OK;
}

void kv_places_found(struct kv_places *places)
{
    places->free_extent = NONE;
    for (int32_t at = places->n_extents - 1; at >= 0; at--)
        if (places->extents[at].pages == 0) {
            places->extents[at].next = places->free_extent;
            places->free_extent = at;
        }
}
