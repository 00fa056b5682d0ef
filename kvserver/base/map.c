/* Open addressing with linear probing.  Removal moves entries back instead of leaving
 * tombstones, so a map that is used for long stays as fast as a new one. */
#include "kvserver/base/map.h"
#include "kvserver/base/hash.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    SLOTS_MIN = 16
};

struct slot {
    struct kv_id128 key;
    void *value; /* NULL: the slot is empty */
};

struct kv_map {
    uint64_t secret[2];
    size_t count;
    size_t mask; /* slots - 1; slots are a power of two */
    struct slot *slots;
    size_t *watched; /* cursor of an iteration; NULL: none */
};

/* Keys are chosen by clients: without the secret, one client could choose keys that share a
 * home slot, and make every search long. */
static size_t home_of(const struct kv_map *map, const struct kv_id128 *key)
{
    uint64_t half[2];

    memcpy(half, key->bytes, sizeof(half));
    return kv_mix64(kv_mix64(half[0] ^ map->secret[0]) + (half[1] ^ map->secret[1])) &
           map->mask;
}

/* Returns the key's slot, or the empty slot for it; the map always has one. */
static size_t find(const struct kv_map *map, const struct kv_id128 *key)
{
    size_t i = home_of(map, key);

    while (map->slots[i].value != NULL && memcmp(&map->slots[i].key, key, sizeof(*key)) != 0)
        i = (i + 1) & map->mask;
    return i;
}

static bool grow(struct kv_map *map)
{
    struct kv_map larger = *map;
    size_t n_slots = map->mask + 1;

    larger.mask = n_slots * 2 - 1;
    larger.slots = calloc(n_slots * 2, sizeof(*larger.slots));
    if (larger.slots == NULL)
        return false;
    for (size_t i = 0; i < n_slots; i++)
        if (map->slots[i].value != NULL)
            larger.slots[find(&larger, &map->slots[i].key)] = map->slots[i];
    free(map->slots);
    *map = larger;
    if (map->watched != NULL)
        *map->watched = 0;
    return true;
}

struct kv_map *kv_map_create(uint64_t secret)
{
    struct kv_map *map = calloc(1, sizeof(*map));

    if (map == NULL)
        return NULL;
    map->secret[0] = kv_mix64(secret + 1);
    map->secret[1] = kv_mix64(secret + 2);
    map->mask = SLOTS_MIN - 1;
    map->slots = calloc(SLOTS_MIN, sizeof(*map->slots));
    if (map->slots == NULL) {
        kv_map_destroy(map);
        return NULL;
    }
    return map;
}

void kv_map_destroy(struct kv_map *map)
{
    if (map == NULL)
        return;
    free(map->slots);
    free(map);
}

void *kv_map_get(const struct kv_map *map, const struct kv_id128 *key)
{
    return map->slots[find(map, key)].value;
}

bool kv_map_set(struct kv_map *map, const struct kv_id128 *key, void *value)
{
    size_t i = find(map, key);

    assert(value != NULL);
    if (map->slots[i].value == NULL) {
        /* At most three quarters full: find() needs an empty slot to end at. */
        if ((map->count + 1) * 4 > (map->mask + 1) * 3) {
            if (!grow(map))
                return false;
            i = find(map, key);
        }
        map->slots[i].key = *key;
        map->count++;
    }
    map->slots[i].value = value;
    return true;
}

void *kv_map_remove(struct kv_map *map, const struct kv_id128 *key)
{
    size_t hole = find(map, key);
    void *value = map->slots[hole].value;

    if (value == NULL)
        return NULL;
    /* Moves back entries that the empty slot would separate from their home slot. */
    for (size_t i = (hole + 1) & map->mask; map->slots[i].value != NULL;
         i = (i + 1) & map->mask) {
        size_t home = home_of(map, &map->slots[i].key);

        /* Distances wrap around the end of the table. */
        if (((i - home) & map->mask) >= ((i - hole) & map->mask)) {
            map->slots[hole] = map->slots[i];
            if (map->watched != NULL && hole < *map->watched && i >= *map->watched)
                *map->watched = hole;
            hole = i;
        }
    }
    map->slots[hole].value = NULL;
    map->count--;
    return value;
}

size_t kv_map_count(const struct kv_map *map)
{
    return map->count;
}

void *kv_map_next(const struct kv_map *map, size_t *cursor)
{
    while (*cursor <= map->mask) {
        void *value = map->slots[(*cursor)++].value;

        if (value != NULL)
            return value;
    }
    return NULL;
}

void kv_map_watch(struct kv_map *map, size_t *cursor)
{
    map->watched = cursor;
}

void kv_map_check(const struct kv_map *map)
{
    const size_t n_slots = map->mask + 1;
    size_t count = 0;

    assert(n_slots >= SLOTS_MIN && (n_slots & map->mask) == 0);
    for (size_t i = 0; i < n_slots; i++) {
        if (map->slots[i].value == NULL)
            continue;
        count++;
        assert(find(map, &map->slots[i].key) == i);
    }
    assert(count == map->count && count * 4 <= n_slots * 3);
}
