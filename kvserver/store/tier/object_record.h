/* object_record.h - how objects lie on the disk: their records, and the keys of their pieces.
 *
 *     record      `object/`, key (16 B), version (8)     a SavedObject (proto/manifest.proto)
 *     piece       key (16 B), version (8), number (4)    its bytes
 *
 * The key is the hash of the object's name, different for each tenant; integers have the larger byte
 * first.  A piece is verified against the CRC that the record has of it, whose seed is the name's: the
 * bytes of another object or piece are not taken for it.
 *
 * Threads: any.  Memory: the caller's.
 */
#ifndef KV_KVSERVER_STORE_TIER_OBJECT_RECORD_H
#define KV_KVSERVER_STORE_TIER_OBJECT_RECORD_H

#include "kvserver/disk/disk.h"
#include "kvserver/store/rows/object.h"

struct kvs_object_piece_key {
    uint8_t bytes[sizeof(struct kv_id128) + 8 + 4];
};

struct kvs_object_piece_key
kvs_object_piece_key(const struct kv_id128 *key, uint64_t version, uint32_t piece);

/* Which object a record is of. */
struct kvs_object_record {
    struct kv_id128 key;
    uint64_t version;
    uint32_t n_pieces;
    uint64_t bytes; /* of all pieces; of one that does not count, about */
    bool counts;
    /* Of one that counts; borrowed. */
    const void *name;
    uint32_t name_bytes;
    uint32_t tenant;
    const uint32_t *crcs; /* (n_pieces) */
    uint64_t expires_us;  /* on the lasting clock; KVS_EXPIRY_NEVER */
    uint64_t created_us;  /* likewise */
    bool is_evictable;
};

/* Returns how to write the record; `memory` is the caller's to free when it is written.  Returns
 * false if out of memory. */
bool kvs_object_record_make(const struct kvs_object_record *record,
                            struct kv_disk_write *ret_write,
                            void **ret_memory);
/* The same of its removal. */
bool kvs_object_record_removal(const struct kvs_object_record *record,
                               struct kv_disk_write *ret_write,
                               void **ret_memory);

/* Calls `each` for all records of objects; each is valid during the call.  Fails with KV_IO.  Records
 * that are not valid are counted in *n_bad, and skipped. */
kv_status_t kvs_object_records_read(struct kv_disk *disk,
                                    void (*each)(void *arg,
                                                 const struct kvs_object_record *record),
                                    void *arg,
                                    uint64_t *n_bad);

#endif
