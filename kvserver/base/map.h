/* map.h - a hash map from 128-bit keys to pointers.
 *
 * Open addressing with linear probing and backward-shift deletion, at most 3/4 full.  Keys are
 * hashed with a per-map secret, so that chosen keys do not collide at will.
 *
 * Invariants, which kv_map_check() asserts:
 *   (1) The slots are a power of two; at most three in four are full.
 *   (2) The count is that of full slots.
 *   (3) A key is in one slot, with no empty one between its home and there.
 *
 * Threads: one at a time.  Memory: create/destroy; the map keeps copies of keys, and values as
 * plain pointers.
 */
#ifndef KV_KVSERVER_BASE_MAP_H
#define KV_KVSERVER_BASE_MAP_H

#include "proto/kv_types.h"

#include <stdbool.h>

struct kv_map;

/* NULL: out of memory. */
struct kv_map *kv_map_create(uint64_t secret);
void kv_map_destroy(struct kv_map *map);

/* NULL: no such key. */
void *kv_map_get(const struct kv_map *map, const struct kv_id128 *key);

/* Inserts or replaces.  false: out of memory, nothing changed.  `value` is not NULL. */
bool kv_map_set(struct kv_map *map, const struct kv_id128 *key, void *value);

/* Returns what was removed, or NULL. */
void *kv_map_remove(struct kv_map *map, const struct kv_id128 *key);

size_t kv_map_count(const struct kv_map *map);

/* Walks all values: begin with *cursor = 0; NULL ends.  The map must not change meanwhile. */
void *kv_map_next(const struct kv_map *map, size_t *cursor);

/* Asserts the invariants, in time that grows with the map. */
void kv_map_check(const struct kv_map *map);

#endif
