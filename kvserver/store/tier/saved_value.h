/* saved_value.h - how the segments of blocks lie on the disk: keys, and what follows the rows.
 *
 *     key     home (16 B), block's name (16), kind (1), unit (4, the larger first)
 *     rows    (KV_BLOCK_TOKENS, row_bytes), then a kvs_saved_tail
 *     codes   as they are in memory, then a kvs_saved_column_tail
 *     learnt  what was learnt of rows up to this block's (index/learnt.h), then a kvs_saved_learnt_tail
 *     summaries   of rows up to this block's, as codes
 *
 * The order of keys is that in which a block is written and read.  A change of any of this is a
 * new version of its tail.
 */
#ifndef KV_KVSERVER_STORE_TIER_SAVED_VALUE_H
#define KV_KVSERVER_STORE_TIER_SAVED_VALUE_H

#include "kernels/checksum.h"
#include "proto/kv_types.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    KVS_SAVED_VERSION = 1,
    KVS_SAVED_LEARNT_VERSION = 1,
    KVS_SAVED_COLUMN_VERSION = 1, /* before there was one, codes had no tail */
};

enum kvs_saved_kind {
    KVS_SAVED_ROWS,
    KVS_SAVED_CODES,
    KVS_SAVED_LEARNT,
    KVS_SAVED_SUMMARIES,
    KVS_SAVED_KINDS,
};

/* What a value is that was made of rows. */
enum kvs_saved_state {
    KVS_SAVED_RIGHT,
    KVS_SAVED_DAMAGED,
    KVS_SAVED_OF_NO_USE, /* of another version, or only to an earlier process */
};

struct kvs_saved_key {
    uint8_t bytes[2 * sizeof(struct kv_id128) + 1 + 4];
};

struct kvs_saved_tail {
    uint32_t version;
    uint32_t rows_bytes;
    uint32_t crcs[KV_BLOCK_TOKENS]; /* of the rows, each seeded with its writer and place */
    uint32_t crc;                   /* of the key, the rows, and the above */
};
static_assert(sizeof(struct kvs_saved_tail) == 4 * (3 + KV_BLOCK_TOKENS), "no holes");

struct kvs_saved_learnt_tail {
    uint32_t version;
    uint32_t crc; /* of the key and the bytes, seeded with the version */
};

struct kvs_saved_column_tail {
    uint32_t version;
    uint32_t identity; /* (index/kept.h); 0: of use only to the process that has its codebook */
    uint32_t block_begin, n_blocks; /* of its chapter */
    uint32_t crc;                   /* of the key, the bytes, and the above */
};
static_assert(sizeof(struct kvs_saved_column_tail) == 20, "no holes");

static inline struct kvs_saved_key kvs_saved_key(const struct kv_id128 *home,
                                                 const struct kv_id128 *name,
                                                 enum kvs_saved_kind kind,
                                                 uint32_t unit)
{
    struct kvs_saved_key key;
    uint8_t *byte = key.bytes;

    memcpy(byte, home, sizeof(*home));
    memcpy(byte + sizeof(*home), name, sizeof(*name));
    byte += sizeof(*home) + sizeof(*name);
    *byte++ = (uint8_t)kind;
    for (int shift = 24; shift >= 0; shift -= 8)
        *byte++ = (uint8_t)(unit >> shift);
    return key;
}

static inline uint32_t kvs_saved_crc(const struct kvs_saved_tail *tail,
                                     const struct kvs_saved_key *key,
                                     const void *rows,
                                     size_t rows_bytes)
{
    uint32_t crc = kv_crc32c(0, key->bytes, sizeof(key->bytes));

    crc = kv_crc32c(crc, rows, rows_bytes);
    return kv_crc32c(crc, tail, offsetof(struct kvs_saved_tail, crc));
}

/*   crcs  (KV_BLOCK_TOKENS) */
static inline void kvs_saved_tail_make(struct kvs_saved_tail *tail,
                                       const struct kvs_saved_key *key,
                                       const void *rows,
                                       size_t rows_bytes,
                                       const uint32_t *crcs)
{
    tail->version = KVS_SAVED_VERSION;
    tail->rows_bytes = (uint32_t)rows_bytes;
    memcpy(tail->crcs, crcs, sizeof(tail->crcs));
    tail->crc = kvs_saved_crc(tail, key, rows, rows_bytes);
}

/* Returns whether these are the rows that were saved under the key. */
static inline bool kvs_saved_tail_is_right(const struct kvs_saved_tail *tail,
                                           const struct kvs_saved_key *key,
                                           const void *rows,
                                           size_t rows_bytes)
{
    return tail->version == KVS_SAVED_VERSION && tail->rows_bytes == rows_bytes &&
           tail->crc == kvs_saved_crc(tail, key, rows, rows_bytes);
}

static inline uint32_t kvs_saved_learnt_crc(uint32_t version,
                                            const struct kvs_saved_key *key,
                                            const void *bytes,
                                            size_t n_bytes)
{
    const uint32_t crc = kv_crc32c(version, key->bytes, sizeof(key->bytes));

    return kv_crc32c(crc, bytes, n_bytes);
}

static inline void kvs_saved_learnt_tail_make(struct kvs_saved_learnt_tail *tail,
                                              const struct kvs_saved_key *key,
                                              const void *bytes,
                                              size_t n_bytes)
{
    tail->version = KVS_SAVED_LEARNT_VERSION;
    tail->crc = kvs_saved_learnt_crc(tail->version, key, bytes, n_bytes);
}

static inline enum kvs_saved_state
kvs_saved_learnt_state(const struct kvs_saved_learnt_tail *tail,
                       const struct kvs_saved_key *key,
                       const void *bytes,
                       size_t n_bytes)
{
    if (tail->version != KVS_SAVED_LEARNT_VERSION)
        return KVS_SAVED_OF_NO_USE;
    return tail->crc == kvs_saved_learnt_crc(tail->version, key, bytes, n_bytes)
               ? KVS_SAVED_RIGHT
               : KVS_SAVED_DAMAGED;
}

static inline uint32_t kvs_saved_column_crc(const struct kvs_saved_column_tail *tail,
                                            const struct kvs_saved_key *key,
                                            const void *bytes,
                                            size_t n_bytes)
{
    const uint32_t crc =
        kv_crc32c(kv_crc32c(0, key->bytes, sizeof(key->bytes)), bytes, n_bytes);

    return kv_crc32c(crc, tail, offsetof(struct kvs_saved_column_tail, crc));
}

/* Fills in version and crc; the caller has set the rest. */
static inline void kvs_saved_column_tail_make(struct kvs_saved_column_tail *tail,
                                              const struct kvs_saved_key *key,
                                              const void *bytes,
                                              size_t n_bytes)
{
    tail->version = KVS_SAVED_COLUMN_VERSION;
    tail->crc = kvs_saved_column_crc(tail, key, bytes, n_bytes);
}

static inline enum kvs_saved_state
kvs_saved_column_state(const struct kvs_saved_column_tail *tail,
                       const struct kvs_saved_key *key,
                       const void *bytes,
                       size_t n_bytes)
{
    if (tail->version != KVS_SAVED_COLUMN_VERSION)
        return KVS_SAVED_OF_NO_USE;
    if (tail->crc != kvs_saved_column_crc(tail, key, bytes, n_bytes))
        return KVS_SAVED_DAMAGED;
    return tail->identity != 0 ? KVS_SAVED_RIGHT : KVS_SAVED_OF_NO_USE;
}

#endif
