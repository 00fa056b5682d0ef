#include "kvserver/store/tier/object_record.h"

#include "kvserver/base/hash.h"
#include "proto/manifest.pb-c.h"

#include <stdlib.h>
#include <string.h>

#define OBJECT_KEY "object/"

enum {
    ID_BYTES = sizeof(struct kv_id128),
    PREFIX_BYTES = sizeof(OBJECT_KEY) - 1,
    VERSION_AT = PREFIX_BYTES + ID_BYTES,
    KEY_BYTES = VERSION_AT + 8,
};

static void put_number(uint8_t *to, uint64_t number, unsigned n_bytes)
{
    for (unsigned i = 0; i < n_bytes; i++)
        to[i] = (uint8_t)(number >> 8 * (n_bytes - 1 - i));
}

struct kvs_object_piece_key
kvs_object_piece_key(const struct kv_id128 *key, uint64_t version, uint32_t piece)
{
    struct kvs_object_piece_key made;

    memcpy(made.bytes, key, ID_BYTES);
    put_number(made.bytes + ID_BYTES, version, 8);
    put_number(made.bytes + ID_BYTES + 8, piece, 4);
    return made;
}

/* Allocates a key and `bytes` behind it. */
static uint8_t *make_key(const struct kvs_object_record *record, size_t bytes)
{
    uint8_t *memory = malloc(KEY_BYTES + bytes + 1);

    if (memory == NULL)
        return NULL;
    memcpy(memory, OBJECT_KEY, PREFIX_BYTES);
    memcpy(memory + PREFIX_BYTES, &record->key, ID_BYTES);
    put_number(memory + VERSION_AT, record->version, 8);
    return memory;
}

bool kvs_object_record_make(const struct kvs_object_record *record,
                            struct kv_disk_write *ret_write,
                            void **ret_memory)
{
    Kvpb__SavedObject message = KVPB__SAVED_OBJECT__INIT;
    uint8_t *memory;
    size_t bytes;

    message.n_pieces = record->n_pieces;
    message.bytes = record->bytes;
    if (record->counts) {
        message.counts = true;
        message.name = (ProtobufCBinaryData){record->name_bytes, (uint8_t *)record->name};
        message.tenant = record->tenant;
        message.n_crcs = record->n_pieces;
        message.crcs = (uint32_t *)record->crcs;
        message.expires_us = record->expires_us == KVS_EXPIRY_NEVER ? 0 : record->expires_us;
        message.evictable = record->is_evictable;
        message.created_us = record->created_us;
    }
    bytes = protobuf_c_message_get_packed_size(&message.base);
    memory = make_key(record, bytes);
    if (memory == NULL)
        return false;
    protobuf_c_message_pack(&message.base, memory + KEY_BYTES);
    *ret_write = (struct kv_disk_write){.key = memory,
                                        .key_bytes = KEY_BYTES,
                                        .value = memory + KEY_BYTES,
                                        .value_bytes = bytes};
    *ret_memory = memory;
    return true;
}

bool kvs_object_record_removal(const struct kvs_object_record *record,
                               struct kv_disk_write *ret_write,
                               void **ret_memory)
{
    uint8_t *memory = make_key(record, 0);

    if (memory == NULL)
        return false;
    *ret_write = (struct kv_disk_write){.key = memory, .key_bytes = KEY_BYTES};
    *ret_memory = memory;
    return true;
}

/* ---- reading ------------------------------------------------------------------------------ */

struct reader {
    void (*each)(void *arg, const struct kvs_object_record *record);
    void *arg;
    uint64_t *n_bad;
};

/* Whether the message may be of the key. */
static bool is_sound(const Kvpb__SavedObject *message, const struct kvs_object_record *record)
{
    struct kv_id128 key;

    if (message->n_pieces == 0 ||
        message->n_pieces > kvs_object_n_pieces(KV_OBJECT_BYTES_MAX) || record->version == 0 ||
        message->bytes > KV_OBJECT_BYTES_MAX)
        return false;
    if (!message->counts)
        return true;
    if (message->name.len == 0 || message->name.len > KV_NAME_BYTES_MAX ||
        message->n_pieces != kvs_object_n_pieces(message->bytes) ||
        message->n_crcs != message->n_pieces)
        return false;
    key = kv_hash128(message->name.data, message->name.len);
    kvs_object_key_of_tenant(&key, message->tenant);
    return memcmp(&key, &record->key, ID_BYTES) == 0;
}

static void
see(void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    const struct reader *reader = arg;
    Kvpb__SavedObject *message = kvpb__saved_object__unpack(NULL, value_bytes, value);
    struct kvs_object_record record = {0};
    bool is_good = message != NULL && key_bytes == KEY_BYTES;

    if (is_good) {
        memcpy(&record.key, (const uint8_t *)key + PREFIX_BYTES, ID_BYTES);
        for (unsigned i = 0; i < 8; i++)
            record.version = record.version << 8 | ((const uint8_t *)key)[VERSION_AT + i];
        is_good = is_sound(message, &record);
    }
    if (is_good) {
        record.n_pieces = message->n_pieces;
        record.bytes = message->bytes;
        record.counts = message->counts;
        record.name = message->name.data;
        record.name_bytes = (uint32_t)message->name.len;
        record.tenant = message->tenant;
        record.crcs = message->crcs;
        record.expires_us = message->expires_us == 0 ? KVS_EXPIRY_NEVER : message->expires_us;
        record.created_us = message->created_us;
        record.is_evictable = message->evictable;
        reader->each(reader->arg, &record);
    } else {
        ++*reader->n_bad;
    }
    kvpb__saved_object__free_unpacked(message, NULL);
}

kv_status_t kvs_object_records_read(struct kv_disk *disk,
                                    void (*each)(void *arg,
                                                 const struct kvs_object_record *record),
                                    void *arg,
                                    uint64_t *n_bad)
{
    struct reader reader = {.each = each, .arg = arg, .n_bad = n_bad};

    return kv_disk_scan(disk, KV_DISK_RECORDS, OBJECT_KEY, PREFIX_BYTES, see, &reader);
}
