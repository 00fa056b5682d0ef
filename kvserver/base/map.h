/* map.h - a hash map from 128-bit keys to pointers.
 *
 * Open addressing with linear probing and backward-shift deletion, at most 3/4 full.  Keys are
 * hashed with a per-map secret, so that a peer cannot choose keys that collide.
 *
 * Invariants, which kv_map_check() asserts:
 *   (1) The number of slots is a power of two; at most three in four are full.
 *   (2) The count is the number of full slots.
 *   (3) A key is in one slot, with no empty slot between its home slot and this one.
 *
 * Threads: one at a time.  Memory: kv_map_create() / kv_map_destroy(); the map copies keys, and
 * does not own values.
 */
#ifndef KV_KVSERVER_BASE_MAP_H
#define KV_KVSERVER_BASE_MAP_H

#include "proto/kv_types.h"

#include <stdbool.h>

struct kv_map;

/* Returns NULL if out of memory. */
struct kv_map *kv_map_create(uint64_t secret);
void kv_map_destroy(struct kv_map *map);

/* Returns NULL if the map has no such key. */
void *kv_map_get(const struct kv_map *map, const struct kv_id128 *key);

/* Inserts or replaces.  Returns false, and changes nothing, if out of memory.  `value` must not
 * be NULL. */
bool kv_map_set(struct kv_map *map, const struct kv_id128 *key, void *value);

/* Removes a key.  Returns its value, or NULL if the map had no such key. */
void *kv_map_remove(struct kv_map *map, const struct kv_id128 *key);

size_t kv_map_count(const struct kv_map *map);

/* Iterates over all values: start with *cursor = 0; NULL is the end.  The map must not change
 * during the iteration, unless it watches the cursor. */
void *kv_map_next(const struct kv_map *map, size_t *cursor);

/* Lets the map change during one iteration, whose cursor it keeps right; NULL: none.  A removal that
 * moves entries past the cursor takes it back to them, and growing takes it to the beginning: what
 * is there all the while is returned, some of it twice. */
void kv_map_watch(struct kv_map *map, size_t *cursor);

/* Asserts the invariants, in time linear in the map's size. */
void kv_map_check(const struct kv_map *map);

#endif
