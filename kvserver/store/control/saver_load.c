/* saver_load.c - a node is started: what an earlier process saved is there again, away: prefixes in
 * the index, objects at their data threads. */
#include "kvserver/base/config.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/log.h"
#include "kvserver/cluster/placement.h"
#include "kvserver/store/control/control.h"
#include "kvserver/store/control/disk_verify.h"
#include "kvserver/store/control/manifest.h"
#include "kvserver/store/control/saver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct loading {
    struct kvs_control *control;
    uint64_t n_loaded, n_dropped, n_left_out;
    uint64_t n_objects;
    bool has_no_memory; /* for an object */
};

/* Returns the model's, or NULL: it has been forgotten. */
static const kv_schema_t *schema_of(const struct kvs_control *control,
                                    const struct kvs_tier_item *item)
{
    for (uint32_t i = 0; i < control->n_models; i++)
        if (memcmp(&control->models[i]->rows_id, &item->rows_id, sizeof(item->rows_id)) == 0)
            return control->models[i]->info.schema.n_units == item->n_units
                       ? &control->models[i]->info.schema
                       : NULL;
    return NULL;
}

/* Bytes of a row of each of the model's units. */
static void row_bytes_of(const kv_schema_t *schema, uint32_t *ret_bytes)
{
    uint32_t n = 0;

    for (uint32_t layer = 0; layer < schema->n_layers; layer++)
        for (uint32_t head = 0; head < schema->layers[layer].n_kv_heads; head++)
            ret_bytes[n++] = schema->layers[layer].row_bytes;
}

/* Makes the block of a data thread that the prefix has, absent.  Returns false if out of memory. */
static bool make_block(struct kvs_control *control,
                       const struct kvs_manifest_entry *entry,
                       const uint32_t *row_bytes,
                       uint32_t thread,
                       struct kvs_prefix *prefix)
{
    const struct kv_placement_units units = kv_placement_thread_units(
        entry->item.place.root, entry->item.n_units, entry->item.place.n_nodes,
        entry->item.place.position, control->n_threads, thread);
    struct kvs_block **block = kvs_prefix_block(prefix, thread, control->n_threads);
    uint32_t *own;

    if (units.n == 0 || block == NULL)
        return true;
    own = malloc(units.n * sizeof(own[0]));
    if (own == NULL)
        return false;
    for (uint32_t i = 0; i < units.n; i++)
        own[i] = row_bytes[units.first + i * units.step];
    *block = kvs_disk_tier_adopt(control->shard[thread].tier, &entry->item, own, units.n);
    free(own);
    return *block != NULL;
}

static void drop_blocks(struct kvs_control *control, struct kvs_prefix *prefix)
{
    for (uint32_t i = 0; i < control->n_threads; i++) {
        struct kvs_block **block = kvs_prefix_block(prefix, i, control->n_threads);

        if (block == NULL || *block == NULL)
            continue;
        kvs_disk_tier_release(control->shard[i].tier, *block);
        kvs_block_unref(&control->shard[i].store, *block);
        *block = NULL;
    }
}

/* Returns the block before it in the index, or NULL. */
static struct kvs_prefix *parent_of(const struct kvs_control *control,
                                    const struct kvs_manifest_entry *entry)
{
    const struct kvs_tier_item *item = &entry->item;
    struct kvs_prefix *parent =
        kvs_prefixes_get(control->prefixes, &item->place, &entry->parent);

    return parent != NULL && parent->depth + 1 == item->depth &&
                   memcmp(&parent->home->rows_id, &item->rows_id, sizeof(item->rows_id)) == 0
               ? parent
               : NULL;
}

/* Returns a prefix with its blocks, which is not in the index; NULL: out of memory. */
static struct kvs_prefix *make_prefix(struct kvs_control *control,
                                      struct kvs_manifest_entry *entry,
                                      const kv_schema_t *schema)
{
    const struct kvs_tier_item *item = &entry->item;
    const struct kvs_prefix_place *place = &item->place;
    uint32_t *row_bytes = malloc(schema->n_units * sizeof(row_bytes[0]));
    struct kvs_prefix *prefix = kvs_prefix_create(
        &item->name, item->depth,
        kv_placement_unit_thread(place->root, 0, place->n_nodes, control->n_threads),
        kv_placement_session_threads(schema->n_units, place->n_nodes, control->n_threads));
    bool is_good = row_bytes != NULL && prefix != NULL;

    if (is_good)
        row_bytes_of(schema, row_bytes);
    for (uint32_t i = 0; i < control->n_threads && is_good; i++)
        is_good = make_block(control, entry, row_bytes, i, prefix);
    free(row_bytes);
    if (is_good) {
        prefix->saved = KVS_PREFIX_SAVED;
        prefix->is_away = true;
        prefix->writer = entry->writers->runs[0].writer;
        if (entry->writers->n_runs > 1) {
            prefix->mixed = entry->writers;
            entry->writers = NULL;
        }
        return prefix;
    }
    if (prefix != NULL) {
        drop_blocks(control, prefix);
        kvs_prefix_release(control->prefixes, prefix);
    }
    return NULL;
}

/* Whether the record may be true: what it says of rows is what the model says. */
static bool is_sound(const struct kvs_tier_item *item, const kv_schema_t *schema)
{
    return schema != NULL && item->block_bytes == kvs_block_bytes(schema, item->place.n_nodes,
                                                                  item->place.position);
}

/* Puts the entry into the index, held.  KV_NOT_FOUND: it is of no use, because its model or what is
 * before it is not there; KV_NO_MEMORY. */
static kv_status_t load_prefix(const struct loading *loading,
                               struct kvs_manifest_entry *entry,
                               struct kvs_prefix **ret_prefix)
{
    struct kvs_control *control = loading->control;
    const struct kvs_tier_item *item = &entry->item;
    const struct kvs_prefix_home home = {.place = item->place,
                                         .rows_id = item->rows_id,
                                         .n_units = item->n_units,
                                         .block_bytes = item->block_bytes};
    const kv_schema_t *schema = schema_of(control, item);
    struct kvs_prefix *parent = item->depth > 0 ? parent_of(control, entry) : NULL, *prefix;

    if (!is_sound(item, schema))
        return KV_NOT_FOUND;
    if (item->depth > 0 && parent == NULL)
        return loading->n_left_out > 0 ? KV_NO_MEMORY : KV_NOT_FOUND;
    /* The records of blocks take memory that sessions need: at most half of it. */
    if (atomic_load_explicit(&control->pages->n_free, memory_order_relaxed) <
        control->pages->n_pages / 2)
        return KV_NO_MEMORY;
    prefix = make_prefix(control, entry, schema);
    if (prefix == NULL)
        return KV_NO_MEMORY;
    if (kvs_prefixes_add(control->prefixes, parent, &home, prefix,
                         kv_clock_now(control->config.clock))) {
        *ret_prefix = prefix;
        return KV_OK;
    }
    drop_blocks(control, prefix);
    kvs_prefix_release(control->prefixes, prefix);
    return KV_NO_MEMORY;
}

static void load_entry(void *arg, struct kvs_manifest_entry *entry)
{
    struct loading *loading = arg;
    struct kvs_control *control = loading->control;
    struct kvs_prefix *prefix;
    kv_status_t status = KV_NOT_FOUND;

    if (entry->counts)
        status = load_prefix(loading, entry, &prefix);
    if (status == KV_OK) {
        kvs_prefix_release(control->prefixes, prefix);
        kvs_events_stored(control, prefix);
        kvs_disk_verify_add(control, prefix, 0);
        loading->n_loaded++;
    } else if (status == KV_NO_MEMORY) {
        loading->n_left_out++;
    } else {
        loading->n_dropped += entry->counts;
    }
    kvs_saver_found(control, &entry->item, status);
    free(entry->writers);
}

static void load_object(void *arg, const struct kvs_object_record *record)
{
    struct loading *loading = arg;
    struct kvs_control *control = loading->control;
    /* What does not count is of whoever erases it. */
    const struct kv_id128 name =
        record->counts ? kv_hash128(record->name, record->name_bytes) : record->key;
    const uint32_t thread =
        kv_placement_object_thread(kv_placement_object_slot(&name), control->n_threads);

    if (!kvs_object_tier_found(control->shard[thread].object_tier, record))
        loading->has_no_memory = true;
    loading->n_objects += record->counts;
}

static kv_status_t
load_objects(struct loading *loading, uint64_t *n_bad, char *detail, size_t detail_bytes)
{
    struct kvs_control *control = loading->control;
    kv_status_t status =
        kvs_object_records_read(control->config.disk, load_object, loading, n_bad);

    if (status == KV_OK && loading->has_no_memory)
        status = KV_NO_MEMORY;
    if (status != KV_OK)
        snprintf(detail, detail_bytes, "disk: the records of %llu objects cannot be read: %s%s",
                 (unsigned long long)loading->n_objects, kv_status_name(status),
                 status == KV_NO_MEMORY ? ": --memory is too little for them" : "");
    else if (loading->n_objects > 0)
        kv_log(KV_LOG_INFO, "disk: %llu saved objects are there",
               (unsigned long long)loading->n_objects);
    return status;
}

/* What was saved goes if --disk is less now. */
static void warn_of_less_room(const struct kvs_control *control)
{
    const struct kvs_disk_room *room = &control->disk_room;
    struct kvs_saver_facts facts;
    char saved[16], most[16];
    uint64_t bytes;

    kvs_saver_get_facts(control, 0, &facts);
    bytes = facts.saved_bytes + kvs_disk_taken(room, KVS_DISK_OBJECTS);
    if (bytes > room->bytes)
        kv_log(KV_LOG_WARN,
               "disk: %s are saved, and --disk is %s: the least valuable of it goes",
               kv_config_format_size(bytes, saved, sizeof(saved)),
               kv_config_format_size(room->bytes, most, sizeof(most)));
}

kv_status_t kvs_saver_load(struct kvs_control *control, char *detail, size_t detail_bytes)
{
    struct loading loading = {.control = control};
    uint64_t n_bad = 0;
    kv_status_t status;

    if (control->saver == NULL)
        return KV_OK;
    status = kvs_manifest_open(control->config.disk, detail, detail_bytes);
    /* First what is in memory whatever comes after it. */
    if (status == KV_OK)
        status = load_objects(&loading, &n_bad, detail, detail_bytes);
    if (status == KV_OK)
        status = kvs_manifest_read(control->config.disk, load_entry, &loading, &n_bad, detail,
                                   detail_bytes);
    if (status != KV_OK)
        return status;
    if (n_bad > 0)
        kv_log(KV_LOG_WARN, "disk: %llu records are not valid, skipped",
               (unsigned long long)n_bad);
    if (loading.n_dropped > 0)
        kv_log(KV_LOG_WARN,
               "disk: %llu saved blocks are of no use: what is before them, or their model, is "
               "not there",
               (unsigned long long)loading.n_dropped);
    if (loading.n_left_out > 0)
        kv_log(KV_LOG_WARN,
               "disk: %llu saved blocks do not fit the memory with their records: they stay on "
               "disk for a start with more",
               (unsigned long long)loading.n_left_out);
    if (loading.n_loaded > 0)
        kv_log(KV_LOG_INFO, "disk: %llu saved blocks are there",
               (unsigned long long)loading.n_loaded);
    warn_of_less_room(control);
    return KV_OK;
}
