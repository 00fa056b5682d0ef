#include "kvserver/store/control/manifest.h"

#include "kvserver/base/hash.h"
#include "kvserver/cluster/placement.h"
#include "proto/manifest.pb-c.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FORMAT_KEY "format"
#define PREFIX_KEY "prefix/"

enum {
    ID_BYTES = sizeof(struct kv_id128),
    DEPTH_AT = sizeof(PREFIX_KEY) - 1 + ID_BYTES,
    PREFIX_KEY_BYTES = DEPTH_AT + 4 + ID_BYTES,
};

struct kv_id128 kvs_manifest_home_id(const struct kvs_prefix_place *place,
                                     const struct kv_id128 *rows_id)
{
    struct {
        uint64_t root;
        uint32_t tenant, n_nodes, position, zero;
        struct kv_id128 rows_id;
    } hashed = {.root = place->root,
                .tenant = place->tenant,
                .n_nodes = place->n_nodes,
                .position = place->position,
                .rows_id = *rows_id};

    static_assert(sizeof(hashed) == 8 + 4 * 4 + ID_BYTES, "no bytes that nobody sets");
    return kv_hash128(&hashed, sizeof(hashed));
}

/* ---- writing ------------------------------------------------------------------------------ */

static void put_prefix_key(uint8_t *key, const struct kvs_tier_item *item)
{
    memcpy(key, PREFIX_KEY, sizeof(PREFIX_KEY) - 1);
    memcpy(key + sizeof(PREFIX_KEY) - 1, &item->home, ID_BYTES);
    for (int i = 0; i < 4; i++)
        key[DEPTH_AT + i] = (uint8_t)(item->depth >> (24 - 8 * i));
    memcpy(key + DEPTH_AT + 4, &item->name, ID_BYTES);
}

/* Allocates a record of a key and this message; NULL: without a value. */
static bool make(size_t key_bytes,
                 const ProtobufCMessage *message,
                 struct kv_disk_write *ret_write,
                 void **ret_memory)
{
    const size_t bytes = message != NULL ? protobuf_c_message_get_packed_size(message) : 0;
    uint8_t *memory = malloc(key_bytes + bytes + 1);

    if (memory == NULL)
        return false;
    if (message != NULL)
        protobuf_c_message_pack(message, memory + key_bytes);
    *ret_write = (struct kv_disk_write){.key = memory,
                                        .key_bytes = key_bytes,
                                        .value = message != NULL ? memory + key_bytes : NULL,
                                        .value_bytes = bytes};
    *ret_memory = memory;
    return true;
}

static ProtobufCBinaryData bytes_of(const struct kv_id128 *id)
{
    return (ProtobufCBinaryData){.data = (uint8_t *)id->bytes, .len = ID_BYTES};
}

static Kvpb__SavedHome home_of(const struct kvs_tier_item *item)
{
    Kvpb__SavedHome home = KVPB__SAVED_HOME__INIT;

    home.tenant = item->place.tenant;
    home.root = item->place.root;
    home.n_nodes = item->place.n_nodes;
    home.position = item->place.position;
    home.rows_id = bytes_of(&item->rows_id);
    home.n_units = item->n_units;
    home.block_bytes = item->block_bytes;
    return home;
}

bool kvs_manifest_prefix(const struct kvs_tier_item *item,
                         const struct kvs_prefix *prefix,
                         struct kv_disk_write *ret_write,
                         void **ret_memory)
{
    Kvpb__SavedPrefix message = KVPB__SAVED_PREFIX__INIT;
    Kvpb__SavedWriter writers[KV_BLOCK_TOKENS], *list[KV_BLOCK_TOKENS];
    Kvpb__SavedHome home = home_of(item);

    if (prefix == NULL || item->depth == 0)
        message.home = &home;
    if (prefix != NULL) {
        const struct kv_writers *mixed = prefix->mixed;

        message.counts = true;
        if (prefix->parent != NULL)
            message.parent = bytes_of(&prefix->parent->name);
        message.n_writers = mixed != NULL ? mixed->n_runs : 1;
        message.writers = list;
        for (size_t i = 0; i < message.n_writers; i++) {
            writers[i] = (Kvpb__SavedWriter)KVPB__SAVED_WRITER__INIT;
            writers[i].writer = mixed != NULL ? mixed->runs[i].writer : prefix->writer;
            writers[i].end = mixed != NULL ? mixed->runs[i].end : UINT32_MAX;
            list[i] = &writers[i];
        }
    }
    if (!make(PREFIX_KEY_BYTES, &message.base, ret_write, ret_memory))
        return false;
    put_prefix_key(*ret_memory, item);
    return true;
}

bool kvs_manifest_removal(const struct kvs_tier_item *item,
                          struct kv_disk_write *ret_write,
                          void **ret_memory)
{
    if (!make(PREFIX_KEY_BYTES, NULL, ret_write, ret_memory))
        return false;
    put_prefix_key(*ret_memory, item);
    return true;
}

/* ---- reading ------------------------------------------------------------------------------ */

struct reader {
    struct kvs_tier_item home; /* as the last first block of a prompt says */
    bool is_out_of_memory;
    void (*each)(void *arg, struct kvs_manifest_entry *entry);
    void *arg;
    uint64_t n_bad;
    uint32_t format;
    bool has_format;
};

static bool get_id(const ProtobufCBinaryData *from, struct kv_id128 *ret_id)
{
    if (from->len != ID_BYTES)
        return false;
    memcpy(ret_id, from->data, ID_BYTES);
    return true;
}

static void
see_format(void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    struct reader *reader = arg;
    Kvpb__DiskFormat *message = kvpb__disk_format__unpack(NULL, value_bytes, value);

    (void)key;
    if (key_bytes == sizeof(FORMAT_KEY) - 1 && message != NULL) {
        reader->has_format = true;
        reader->format = message->version;
    }
    kvpb__disk_format__free_unpacked(message, NULL);
}

static bool home_from(const Kvpb__SavedHome *message, struct kvs_tier_item *ret_item)
{
    *ret_item = (struct kvs_tier_item){.place = {.tenant = message->tenant,
                                                 .root = message->root,
                                                 .n_nodes = message->n_nodes,
                                                 .position = message->position},
                                       .n_units = message->n_units,
                                       .block_bytes = message->block_bytes};
    if (!get_id(&message->rows_id, &ret_item->rows_id) || message->n_nodes == 0 ||
        message->n_nodes > KV_ROW_NODES || message->position >= message->n_nodes ||
        message->n_units == 0 || message->n_units > KV_UNITS_MAX)
        return false;
    ret_item->home = kvs_manifest_home_id(&ret_item->place, &ret_item->rows_id);
    return true;
}

/* Whether the writers may be those of the block at `depth`: each but the last has some of its rows. */
static bool are_writers(const Kvpb__SavedPrefix *message, uint32_t depth)
{
    const uint64_t begin = (uint64_t)depth * KV_BLOCK_TOKENS, end = begin + KV_BLOCK_TOKENS;
    uint64_t last = begin;

    if (message->n_writers == 0 || message->n_writers > KV_BLOCK_TOKENS ||
        depth >= KV_TOKENS_MAX / KV_BLOCK_TOKENS)
        return false;
    for (size_t i = 0; i < message->n_writers; i++) {
        const bool is_last = i + 1 == message->n_writers;

        if (message->writers[i]->writer == 0 ||
            (!is_last && (message->writers[i]->end <= last || message->writers[i]->end >= end)))
            return false;
        last = message->writers[i]->end;
    }
    return true;
}

/* Returns NULL if out of memory. */
static struct kv_writers *writers_from(const Kvpb__SavedPrefix *message)
{
    const size_t n = message->n_writers;
    struct kv_writers *writers = malloc(sizeof(*writers) + n * sizeof(writers->runs[0]));

    if (writers == NULL)
        return NULL;
    writers->n_runs = (uint32_t)n;
    for (size_t i = 0; i < n; i++) {
        writers->runs[i].writer = message->writers[i]->writer;
        writers->runs[i].end = message->writers[i]->end;
    }
    return writers;
}

static bool entry_from(struct reader *reader,
                       const uint8_t *key,
                       const Kvpb__SavedPrefix *message,
                       struct kvs_manifest_entry *ret_entry)
{
    struct kvs_tier_item *item = &ret_entry->item;
    const uint8_t *home = key + sizeof(PREFIX_KEY) - 1;

    *ret_entry = (struct kvs_manifest_entry){.item = reader->home, .counts = message->counts};
    if (message->home != NULL && !home_from(message->home, item))
        return false;
    /* The id follows from what the record says. */
    if (memcmp(&item->home, home, ID_BYTES) != 0)
        return false;
    if (message->home != NULL)
        reader->home = *item;
    for (int i = 0; i < 4; i++)
        item->depth = item->depth << 8 | key[DEPTH_AT + i];
    memcpy(&item->name, key + DEPTH_AT + 4, ID_BYTES);
    if (!message->counts)
        return true;
    if (item->depth > 0 && !get_id(&message->parent, &ret_entry->parent))
        return false;
    if (!are_writers(message, item->depth))
        return false;
    ret_entry->writers = writers_from(message);
    reader->is_out_of_memory = reader->is_out_of_memory || ret_entry->writers == NULL;
    return ret_entry->writers != NULL;
}

static void
see_prefix(void *arg, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    struct reader *reader = arg;
    Kvpb__SavedPrefix *message = kvpb__saved_prefix__unpack(NULL, value_bytes, value);
    struct kvs_manifest_entry entry = {0};

    if (message == NULL || key_bytes != PREFIX_KEY_BYTES ||
        !entry_from(reader, key, message, &entry)) {
        reader->n_bad++;
        free(entry.writers);
    } else {
        reader->each(reader->arg, &entry);
    }
    kvpb__saved_prefix__free_unpacked(message, NULL);
}

/* Writes the first record of a disk, and waits for it: before there are threads. */
static kv_status_t write_format(struct kv_disk *disk)
{
    Kvpb__DiskFormat message = KVPB__DISK_FORMAT__INIT;
    kv_status_t status;
    struct kv_disk_queue *queue;
    struct kv_disk_write write;
    void *memory;

    message.version = KVS_DISK_FORMAT;
    if (!make(sizeof(FORMAT_KEY) - 1, &message.base, &write, &memory))
        return KV_NO_MEMORY;
    memcpy(memory, FORMAT_KEY, sizeof(FORMAT_KEY) - 1);
    status = disk->ops->queue_open(disk, NULL, NULL, &queue);
    if (status == KV_OK) {
        /* Closing the queue waits for it. */
        status = kv_disk_write(queue, KV_DISK_RECORDS, &write, 1, NULL, NULL);
        disk->ops->queue_close(queue);
    }
    free(memory);
    return status;
}

/* Returns the status with its reason. */
static kv_status_t tell(kv_status_t status, char *detail, size_t detail_bytes)
{
    if (status != KV_OK)
        snprintf(detail, detail_bytes, "disk: the records cannot be read: %s",
                 kv_status_name(status));
    return status;
}

kv_status_t kvs_manifest_open(struct kv_disk *disk, char *detail, size_t detail_bytes)
{
    struct reader reader = {0};
    kv_status_t status;

    status = kv_disk_scan(disk, KV_DISK_RECORDS, FORMAT_KEY, sizeof(FORMAT_KEY) - 1, see_format,
                          &reader);
    if (status == KV_OK && reader.has_format && reader.format > KVS_DISK_FORMAT) {
        snprintf(detail, detail_bytes,
                 "disk: format %u was written by a newer version: this one reads up to %d",
                 reader.format, KVS_DISK_FORMAT);
        return KV_UNSUPPORTED;
    }
    if (status == KV_OK && !reader.has_format)
        status = write_format(disk);
    return tell(status, detail, detail_bytes);
}

kv_status_t kvs_manifest_read(struct kv_disk *disk,
                              void (*each)(void *arg, struct kvs_manifest_entry *entry),
                              void *arg,
                              uint64_t *n_bad,
                              char *detail,
                              size_t detail_bytes)
{
    struct reader reader = {.each = each, .arg = arg};
    kv_status_t status;

    status = kv_disk_scan(disk, KV_DISK_RECORDS, PREFIX_KEY, sizeof(PREFIX_KEY) - 1, see_prefix,
                          &reader);
    if (status == KV_OK && reader.is_out_of_memory)
        status = KV_NO_MEMORY;
    *n_bad += reader.n_bad;
    return tell(status, detail, detail_bytes);
}
