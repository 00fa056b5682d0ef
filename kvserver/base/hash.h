/* hash.h - names by SHA-256, and a fast hash for placement.
 *
 * Threads: pure functions.
 */
#ifndef KV_KVSERVER_BASE_HASH_H
#define KV_KVSERVER_BASE_HASH_H

#include "proto/kv_types.h"

#include <string.h>

/* Returns the first 128 bits of the SHA-256 of `bytes` bytes. */
struct kv_id128 kv_hash128(const void *data, size_t bytes);

/* Returns `extra` with one more key: the first 128 bits of the SHA-256 over `extra` (zeros before
 * the first key), the key's first token, counted from the block's, as a little-endian i64, and the
 * first 128 bits of the SHA-256 of its bytes. */
struct kv_id128 kv_block_extra(const struct kv_id128 *extra,
                               int64_t first_token,
                               const void *bytes,
                               size_t n_bytes);

/* Returns the name of a block: the first 128 bits of the SHA-256 over the parent's name (zeros
 * for the first block), the model's fingerprint, the tenant's salt, the block's extra keys
 * (kv_block_extra(); zeros: none) and its tokens as little-endian u32.
 *   tokens  (n_tokens), n_tokens <= KV_BLOCK_TOKENS */
struct kv_id128 kv_block_name(const struct kv_id128 *parent,
                              const struct kv_id128 *fingerprint,
                              const struct kv_id128 *salt,
                              const struct kv_id128 *extra,
                              const uint32_t *tokens,
                              size_t n_tokens);

/* A bijection of 64-bit numbers whose output bits all depend on all input bits (splitmix64's
 * finalizer). */
static inline uint64_t kv_mix64(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Returns the seed of an object's CRC.  It depends on the name, so a correct object under the
 * wrong name fails its check. */
static inline uint32_t kv_object_seed(const struct kv_id128 *name_hash)
{
    uint64_t half[2];

    memcpy(half, name_hash->bytes, sizeof(half));
    return (uint32_t)kv_mix64(kv_mix64(half[0]) + half[1]);
}

#endif
