/* places.h - where in a file values are: extents of 8 MiB, each divided into places of one size, whole
 * pages of 4 KiB.
 *
 *     extent   free -> of one size, when a value needs a place -> free, with its last place
 *
 * Values are of few sizes and go together, so nothing is ever moved, as in the arena
 * (store/rows/arena.h).  What is taken after each other from a new extent lies side by side.
 *
 * Threads: one at a time.  Memory: create/destroy; some 280 bytes for each extent.
 */
#ifndef KV_KVSERVER_DISK_PLACES_H
#define KV_KVSERVER_DISK_PLACES_H

#include "proto/kv_status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KV_PLACE_PAGE = 4096,
    KV_PLACE_BYTES_MAX = 8 << 20,
};

struct kv_place {
    uint32_t page; /* of the file, from 1 on; 0: nowhere */
    uint32_t bytes;
};

struct kv_places;

struct kv_places *kv_places_create(void); /* NULL: out of memory */
void kv_places_destroy(struct kv_places *places);

/* Returns how many pages a value of so many bytes takes. */
static inline uint32_t kv_place_pages(uint32_t bytes)
{
    return bytes == 0 ? 1 : (bytes - 1) / KV_PLACE_PAGE + 1;
}

/* Gives a value of at most KV_PLACE_BYTES_MAX a place.  Returns false if out of memory, or if the
 * file would be larger than 16 TiB. */
bool kv_place_take(struct kv_places *places, uint32_t bytes, struct kv_place *ret_place);
void kv_place_free(struct kv_places *places, struct kv_place place);

/* The file has a value there, when it is opened: all are told, then kv_places_found() is called.
 * Fails with KV_INVALID if that cannot be, since it is no place, or one that another has, and with
 * KV_NO_MEMORY. */
kv_status_t kv_place_claim(struct kv_places *places, struct kv_place place);
void kv_places_found(struct kv_places *places);

uint64_t kv_places_pages_used(const struct kv_places *places);

/* ---- lists -------------------------------------------------------------------------------- */

/* All zeros: empty.  `list` is freed by its owner. */
struct kv_place_list {
    struct kv_place *list;
    size_t n, room;
};

/* Returns false if out of memory: nothing has changed. */
bool kv_place_list_add(struct kv_place_list *places, struct kv_place place);

#endif
