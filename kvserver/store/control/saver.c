#include "kvserver/store/control/saver.h"

#include "kvserver/base/config.h"
#include "kvserver/base/log.h"
#include "kvserver/store/control/control.h"
#include "kvserver/store/control/disk_verify.h"
#include "kvserver/store/control/manifest.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    BLOCKS_AT_ONCE = KV_DISK_WRITES_MAX, /* a record each, in one write */
    BYTES_AT_ONCE = 256 << 20,
    DELAY_US = 500000,
    RETRY_US = 1000000,
    EVICT_AT_ONCE = 256, /* from the disk */
    LOOKS_AT_ONCE = 4 * BLOCKS_AT_ONCE,
    TRIES = 5,
    SLOW_US = 1000000,     /* that leaving may take */
    STAY_US = 10000,       /* after nothing could leave, until it is tried again */
    WORTH_US = 2000000,    /* that a batch may take, and be waited for */
    GIVE_BYTES = 16 << 20, /* to objects that lack room, at once */
    WARN_US = 60 * 1000 * 1000,
};

/* A block in a list: its prefix, if any, has a ref. */
struct entry {
    struct entry *next;
    struct kvs_tier_item item;
};

struct list {
    struct entry *first, **end;
};

/* A list of blocks, on its way through data threads and the disk. */
struct kvs_batch {
    struct kvs_control *control;
    struct kvs_control_call *call; /* NULL: nothing is under way */
    struct kvs_tier_item items[BLOCKS_AT_ONCE];
    uint32_t n;
    void *records[BLOCKS_AT_ONCE]; /* that are being written */
    uint32_t n_records;
    kv_status_t status;
    void (*next)(struct kvs_batch *batch); /* when the disk is done */
};

struct kvs_saver {
    struct kvs_prefix *first, **end; /* to be saved */
    uint64_t waiting_bytes, waiting_blocks;
    uint64_t saving_bytes, saving_blocks; /* in a batch */
    uint64_t again_blocks;  /* could not be saved, and are tried again when they are erased */
    uint64_t erasing_bytes; /* of what is to be erased, and not in a batch */
    struct list erasures;   /* of these the disk may have something that is not to be found */
    struct list needed;     /* of these a session needs rows that are nowhere else */
    bool is_retrying;       /* what is being erased is of the needed ones alone */
    struct list leaving;    /* have been let go */
    uint64_t leaving_bytes; /* of what is on its way out */
    struct kvs_batch disk;  /* SAVE and ERASE */
    struct kvs_batch leave;
    uint64_t retry_us;               /* nothing is begun before */
    uint64_t needed_us;              /* when what is needed is looked at again */
    uint64_t leave_us;               /* when the batch that leaves began */
    uint64_t stay_us;                /* until then nothing is expected to leave */
    uint64_t disk_us;                /* when the batch of the disk began */
    uint64_t hurry_us;               /* what was listed by then is not to wait */
    kv_status_t disk_status;         /* of the last batch of the disk, as a whole */
    uint64_t disk_ended_us;          /* when that ended */
    uint64_t full_us, full_since_us; /* when there was no room last, and since when without a
                                      * break; 0: there is some */
    uint64_t warned_us;
    uint64_t saved_bytes, saved_blocks;
};

static uint64_t now_of(const struct kvs_control *control)
{
    return kv_clock_now(control->config.clock);
}

/* What prefixes may take of the disk. */
static uint64_t room_of(const struct kvs_control *control)
{
    return kvs_disk_left(&control->disk_room, KVS_DISK_PREFIXES);
}

static void warn(struct kvs_control *control, const char *what)
{
    struct kvs_saver *saver = control->saver;
    char room[16];

    if (saver->warned_us != 0 && now_of(control) - saver->warned_us < WARN_US)
        return;
    saver->warned_us = now_of(control);
    kv_config_format_size(control->disk_room.bytes, room, sizeof(room));
    kv_log(KV_LOG_WARN, "disk: %s: %llu blocks wait to be saved (room for saved rows: %s)",
           what, (unsigned long long)saver->waiting_blocks, room);
}

/* ---- lists -------------------------------------------------------------------------------- */

static void list_init(struct list *list)
{
    list->first = NULL;
    list->end = &list->first;
}

/* The list has the ref of the item's prefix from then on.  Returns false if out of memory. */
static bool list_add(struct list *list, const struct kvs_tier_item *item)
{
    struct entry *entry = malloc(sizeof(*entry));

    if (entry == NULL)
        return false;
    *entry = (struct entry){.item = *item};
    *list->end = entry;
    list->end = &entry->next;
    return true;
}

/* Takes the first one out.  Returns false if there is none. */
static bool list_take(struct list *list, struct kvs_tier_item *ret_item)
{
    struct entry *entry = list->first;

    if (entry == NULL)
        return false;
    *ret_item = entry->item;
    list->first = entry->next;
    if (list->first == NULL)
        list->end = &list->first;
    free(entry);
    return true;
}

static void item_unref(const struct kvs_tier_item *item)
{
    if (item->prefix != NULL)
        kvs_prefix_unref(item->prefix);
}

static void list_drop(struct list *list)
{
    struct kvs_tier_item item;

    while (list_take(list, &item))
        item_unref(&item);
}

static void list_at_end(struct kvs_saver *saver, struct kvs_prefix *prefix)
{
    prefix->save_next = NULL;
    prefix->save_link = saver->end;
    *saver->end = prefix;
    saver->end = &prefix->save_next;
    saver->waiting_bytes += prefix->home->block_bytes;
    saver->waiting_blocks++;
}

static void unlist(struct kvs_saver *saver, struct kvs_prefix *prefix)
{
    *prefix->save_link = prefix->save_next;
    if (prefix->save_next != NULL)
        prefix->save_next->save_link = prefix->save_link;
    else
        saver->end = prefix->save_link;
    prefix->save_link = NULL;
    prefix->save_next = NULL;
    saver->waiting_bytes -= prefix->home->block_bytes;
    saver->waiting_blocks--;
}

void kvs_saver_add(struct kvs_control *control, struct kvs_prefix *prefix)
{
    if (control->saver == NULL)
        return;
    list_at_end(control->saver, prefix);
    kvs_prefix_set_saved(control->prefixes, prefix, KVS_PREFIX_SAVING);
}

struct kvs_tier_item kvs_saver_item(struct kvs_prefix *prefix)
{
    const struct kvs_prefix_home *home = prefix->home;

    return (struct kvs_tier_item){.prefix = prefix,
                                  .home = kvs_manifest_home_id(&home->place, &home->rows_id),
                                  .name = prefix->name,
                                  .place = home->place,
                                  .rows_id = home->rows_id,
                                  .depth = prefix->depth,
                                  .n_units = home->n_units,
                                  .block_bytes = home->block_bytes};
}

/* Something of the block may be on disk; a ref of its prefix, if any, is the list's.  Without memory
 * to say so it stays there until the node is started again; what was saved is found again then. */
static void add_erasure(struct kvs_saver *saver, const struct kvs_tier_item *item)
{
    if (!list_add(&saver->erasures, item)) {
        item_unref(item);
        return;
    }
    saver->again_blocks += item->prefix != NULL;
    saver->erasing_bytes += item->block_bytes;
    saver->is_retrying = false;
}

static bool take_erasure(struct kvs_saver *saver, struct kvs_tier_item *ret_item)
{
    if (!list_take(&saver->erasures, ret_item))
        return false;
    saver->again_blocks -= ret_item->prefix != NULL;
    saver->erasing_bytes -= ret_item->block_bytes;
    return true;
}

void kvs_saver_found(struct kvs_control *control,
                     const struct kvs_tier_item *item,
                     kv_status_t status)
{
    struct kvs_saver *saver = control->saver;

    saver->saved_bytes += item->block_bytes;
    if (status == KV_OK)
        saver->saved_blocks++;
    else if (status != KV_NO_MEMORY)
        add_erasure(saver, item);
}

void kvs_saver_remove(struct kvs_control *control, struct kvs_prefix *prefix)
{
    struct kvs_saver *saver = control->saver;

    if (saver == NULL)
        return;
    if (prefix->save_link != NULL)
        unlist(saver, prefix);
    if (prefix->saved == KVS_PREFIX_SAVED) {
        struct kvs_tier_item item = kvs_saver_item(prefix);

        item.prefix = NULL; /* data threads know of it by the command that follows */
        add_erasure(saver, &item);
        saver->saved_blocks--;
        kvs_disk_verify_remove(control, prefix);
    }
}

/* ---- steps of a batch --------------------------------------------------------------------- */

static void records_written(void *arg, kv_status_t status, size_t bytes)
{
    struct kvs_batch *batch = arg;

    (void)bytes;
    for (uint32_t i = 0; i < batch->n_records; i++)
        free(batch->records[i]);
    batch->n_records = 0;
    batch->status = status;
    batch->next(batch);
}

enum record_kind {
    RECORD_COUNTS,  /* of what has not failed */
    RECORD_IS_VOID, /* rows may be there, and are to be erased */
    RECORD_IS_GONE, /* nothing is there */
};

static bool has_failed(const struct kvs_batch *batch, uint32_t i)
{
    return atomic_load_explicit((_Atomic uint32_t *)&batch->items[i].n_failed,
                                memory_order_relaxed) > 0;
}

/* Returns why an item has failed: alone, with all of its batch, or with the block before it. */
static kv_status_t why_failed(const struct kvs_batch *batch, uint32_t i)
{
    const struct kvs_prefix *parent = batch->items[i].prefix->parent;
    const int why =
        atomic_load_explicit((_Atomic int *)&batch->items[i].why, memory_order_relaxed);

    if (has_failed(batch, i))
        return (kv_status_t)why;
    return batch->status == KV_OK && parent != NULL ? (kv_status_t)parent->save_status
                                                    : batch->status;
}

static bool make_record(const struct kvs_batch *batch,
                        uint32_t i,
                        enum record_kind kind,
                        struct kv_disk_write *ret_write,
                        void **ret_memory)
{
    const struct kvs_tier_item *item = &batch->items[i];
    const bool counts = kind == RECORD_COUNTS && !has_failed(batch, i) &&
                        item->prefix != NULL && item->prefix->home != NULL;

    if (kind == RECORD_IS_GONE)
        return kvs_manifest_removal(item, ret_write, ret_memory);
    return kvs_manifest_prefix(item, counts ? item->prefix : NULL, ret_write, ret_memory);
}

/* Writes records of all items.  Calls `next` when that is done or has failed. */
static void write_records(struct kvs_batch *batch,
                          enum record_kind kind,
                          void (*next)(struct kvs_batch *batch))
{
    struct kv_disk_write writes[BLOCKS_AT_ONCE];
    kv_status_t status;
    uint32_t n = 0;

    assert(batch->n_records == 0);
    batch->next = next;
    while (n < batch->n && make_record(batch, n, kind, &writes[n], &batch->records[n]))
        n++;
    batch->n_records = n;
    status = n < batch->n ? KV_NO_MEMORY
                          : kv_disk_write(batch->control->disk, KV_DISK_RECORDS, writes, n,
                                          records_written, batch);
    if (status != KV_OK)
        records_written(batch, status, 0);
}

static void synced(void *arg, kv_status_t status, size_t bytes)
{
    struct kvs_batch *batch = arg;

    (void)bytes;
    batch->status = status;
    batch->next(batch);
}

static void sync(struct kvs_batch *batch, void (*next)(struct kvs_batch *batch))
{
    kv_status_t status;

    batch->next = next;
    status = kv_disk_sync(batch->control->disk, synced, batch);
    if (status != KV_OK)
        synced(batch, status, 0);
}

/* Has the data threads do a job.  Calls `next` when all have. */
static void run_job(struct kvs_batch *batch,
                    enum kvs_tier_job job,
                    void (*next)(struct kvs_control_call *call))
{
    for (uint32_t i = 0; i < batch->n; i++)
        atomic_store_explicit(&batch->items[i].n_failed, 0, memory_order_relaxed);
    batch->call->batch = batch;
    kvs_control_broadcast(batch->call,
                          &(struct kvs_command){.kind = KVS_COMMAND_TIER,
                                                .tier_job = job,
                                                .tier_items = batch->items,
                                                .n_tier_items = batch->n},
                          next);
}

/* A batch of the disk ends with that status. */
static void note_end(struct kvs_batch *batch)
{
    struct kvs_saver *saver = batch->control->saver;

    saver->disk_status = batch->status;
    saver->disk_ended_us = now_of(batch->control);
}

/* Empties the batch, whose items have been dealt with. */
static void batch_end(struct kvs_batch *batch)
{
    struct kvs_control_call *call = batch->call;

    for (uint32_t i = 0; i < batch->n; i++)
        item_unref(&batch->items[i]);
    batch->n = 0;
    batch->call = NULL;
    kvs_control_call_end(call);
}

static bool batch_begin(struct kvs_control *control, struct kvs_batch *batch)
{
    batch->control = control;
    batch->call = kvs_control_call_internal(control, KV_OP_PUBLISH);
    batch->n = 0;
    return batch->call != NULL;
}

static void batch_add(struct kvs_batch *batch, const struct kvs_tier_item *item)
{
    batch->items[batch->n++] = *item;
    if (item->prefix != NULL)
        kvs_prefix_ref(item->prefix);
}

/* ---- erasing ------------------------------------------------------------------------------ */

static void erased(struct kvs_batch *batch)
{
    struct kvs_control *control = batch->control;
    struct kvs_saver *saver = control->saver;

    for (uint32_t i = 0; i < batch->n; i++) {
        struct kvs_prefix *prefix = batch->items[i].prefix;

        if (batch->status != KV_OK) {
            if (prefix != NULL)
                kvs_prefix_ref(prefix); /* that of the batch goes */
            add_erasure(saver, &batch->items[i]);
            saver->retry_us = now_of(control) + RETRY_US;
            continue;
        }
        saver->saved_bytes -= batch->items[i].block_bytes;
        if (prefix != NULL && prefix->home != NULL) {
            if (prefix->n_save_failed < TRIES) {
                list_at_end(saver, prefix);
            } else {
                kvs_prefix_set_saved(control->prefixes, prefix, KVS_PREFIX_UNSAVED);
            }
        }
    }
    if (batch->status != KV_OK)
        warn(control, "it cannot be written");
    note_end(batch);
    batch_end(batch);
}

static void erasure_synced(struct kvs_batch *batch)
{
    if (batch->status == KV_OK)
        write_records(batch, RECORD_IS_GONE, erased);
    else
        erased(batch);
}

/* Those that a session needs, or that could not be erased, are tried again later; the records of the
 * others go. */
static void park_needed(struct kvs_batch *batch)
{
    struct kvs_saver *saver = batch->control->saver;
    const bool is_first = saver->needed.first == NULL || saver->is_retrying;
    uint32_t n = 0;

    for (uint32_t i = 0; i < batch->n; i++) {
        if (!has_failed(batch, i))
            batch->items[n++] = batch->items[i];
        else if (!list_add(&saver->needed, &batch->items[i]))
            item_unref(&batch->items[i]);
    }
    if (is_first && n < batch->n)
        saver->needed_us = now_of(batch->control) + RETRY_US; /* others are saved meanwhile */
    batch->n = n;
}

static void rows_erased(struct kvs_control_call *call)
{
    struct kvs_batch *batch = call->batch;

    park_needed(batch);
    batch->status = KV_OK;
    if (batch->n > 0)
        sync(batch, erasure_synced);
    else
        erased(batch);
}

static void void_synced(struct kvs_batch *batch)
{
    if (batch->status == KV_OK)
        run_job(batch, KVS_TIER_ERASE, rows_erased);
    else
        erased(batch);
}

/* No row goes before the disk says for sure that it does not count. */
static void voided(struct kvs_batch *batch)
{
    if (batch->status == KV_OK)
        sync(batch, void_synced);
    else
        erased(batch);
}

/* What has left the index before has been told to all data threads. */
static bool can_erase(const struct kvs_control *control)
{
    return control->saver->erasures.first != NULL && control->released == NULL;
}

static void begin_erasing(struct kvs_control *control)
{
    struct kvs_saver *saver = control->saver;
    struct kvs_batch *batch = &saver->disk;
    struct kvs_tier_item item;

    if (!batch_begin(control, batch))
        return;
    saver->disk_us = now_of(control);
    while (batch->n < BLOCKS_AT_ONCE && take_erasure(saver, &item)) {
        batch_add(batch, &item);
        item_unref(&item);
    }
    write_records(batch, RECORD_IS_VOID, voided);
}

/* ---- saving ------------------------------------------------------------------------------- */

/* What was written of it is erased first; then it is listed again: erased(). */
static void save_failed(struct kvs_batch *batch, uint32_t i)
{
    struct kvs_prefix *prefix = batch->items[i].prefix;
    struct kvs_tier_item item = batch->items[i];

    if (prefix->home == NULL) {
        item.prefix = NULL;
    } else {
        prefix->n_save_failed++;
        prefix->save_status = (int8_t)why_failed(batch, i);
        kvs_prefix_ref(prefix);
    }
    add_erasure(batch->control->saver, &item);
}

/* The records say that the items count. */
static void saved(struct kvs_batch *batch)
{
    struct kvs_control *control = batch->control;
    struct kvs_saver *saver = control->saver;
    bool all_good = batch->status == KV_OK;

    saver->saving_bytes = saver->saving_blocks = 0;
    for (uint32_t i = 0; i < batch->n; i++) {
        struct kvs_prefix *prefix = batch->items[i].prefix;
        struct kvs_prefix *parent = prefix->home != NULL ? prefix->parent : NULL;

        /* Without those before it, it is of no use. */
        if (batch->status == KV_OK && !has_failed(batch, i) && prefix->home != NULL &&
            (parent == NULL || parent->saved == KVS_PREFIX_SAVED)) {
            kvs_prefix_set_saved(control->prefixes, prefix, KVS_PREFIX_SAVED);
            kvs_disk_verify_add(control, prefix, now_of(control));
            saver->saved_blocks++;
            continue;
        }
        all_good = all_good && prefix->home == NULL;
        save_failed(batch, i);
    }
    if (!all_good) {
        saver->retry_us = now_of(control) + RETRY_US;
        warn(control, "blocks could not be written");
    }
    note_end(batch);
    batch_end(batch);
}

static void counted(struct kvs_batch *batch)
{
    if (batch->status == KV_OK)
        sync(batch, saved);
    else
        saved(batch);
}

static void rows_synced(struct kvs_batch *batch)
{
    if (batch->status == KV_OK)
        write_records(batch, RECORD_COUNTS, counted);
    else
        saved(batch);
}

static void rows_written(struct kvs_control_call *call)
{
    struct kvs_batch *batch = call->batch;
    bool has_any = false;

    for (uint32_t i = 0; i < batch->n; i++)
        has_any = has_any || !has_failed(batch, i);
    batch->status = KV_OK; /* items that have failed tell why themselves */
    if (has_any)
        sync(batch, rows_synced);
    else
        saved(batch);
}

static void announcement_synced(struct kvs_batch *batch)
{
    if (batch->status == KV_OK)
        run_job(batch, KVS_TIER_SAVE, rows_written);
    else
        saved(batch);
}

/* No row is written before the disk says for sure that there may be some. */
static void announced(struct kvs_batch *batch)
{
    if (batch->status == KV_OK)
        sync(batch, announcement_synced);
    else
        saved(batch);
}

static bool has_item(const struct list *list, const struct kvs_tier_item *item)
{
    for (const struct entry *entry = list->first; entry != NULL; entry = entry->next)
        if (memcmp(&entry->item.name, &item->name, sizeof(item->name)) == 0 &&
            memcmp(&entry->item.home, &item->home, sizeof(item->home)) == 0)
            return true;
    return false;
}

/* Whether something of the block is still to be erased. */
static bool is_to_be_erased(const struct kvs_saver *saver, struct kvs_prefix *prefix)
{
    if (saver->erasures.first == NULL && saver->needed.first == NULL)
        return false;
    const struct kvs_tier_item item = kvs_saver_item(prefix);

    return has_item(&saver->erasures, &item) || has_item(&saver->needed, &item);
}

/* Whether the block's parent is saved, or will be before it. */
static bool can_be_saved(const struct kvs_saver *saver, struct kvs_prefix *prefix)
{
    const struct kvs_prefix *parent = prefix->parent;

    if (is_to_be_erased(saver, prefix))
        return false;
    return parent == NULL || parent->saved == KVS_PREFIX_SAVED ||
           (parent->saved == KVS_PREFIX_SAVING && parent->save_link == NULL &&
            !is_to_be_erased(saver, prefix->parent));
}

/* Evicts what is away until so many bytes would fit, or some have been evicted. */
static void make_room(struct kvs_control *control, uint64_t bytes)
{
    const struct kvs_saver *saver = control->saver;

    if (kvs_disk_has_too_much(&control->disk_room))
        bytes = 0;
    for (int i = 0; i < EVICT_AT_ONCE; i++) {
        struct kvs_prefix *victim;

        if (saver->saved_bytes - saver->erasing_bytes + bytes <= room_of(control))
            return;
        victim = kvs_prefixes_disk_victim(control->prefixes);
        if (victim == NULL)
            return;
        kvs_control_evict(control, victim, KVS_EVICT_DISK);
    }
}

/* Bytes that a batch of what waits takes, of a small disk a part. */
static uint64_t batch_bytes(const struct kvs_control *control)
{
    const uint64_t room = control->disk_room.bytes;
    const uint64_t most = room / 4 < BYTES_AT_ONCE ? room / 4 : BYTES_AT_ONCE;

    return control->saver->waiting_bytes < most ? control->saver->waiting_bytes : most;
}

/* There is no room, and nothing is being erased that would make some. */
static void note_full(struct kvs_control *control)
{
    struct kvs_saver *saver = control->saver;

    saver->full_us = now_of(control);
    if (saver->full_since_us == 0)
        saver->full_since_us = saver->full_us;
}

static void begin_saving(struct kvs_control *control)
{
    struct kvs_saver *saver = control->saver;
    struct kvs_batch *batch = &saver->disk;
    const uint64_t n_looks =
        saver->waiting_blocks < LOOKS_AT_ONCE ? saver->waiting_blocks : LOOKS_AT_ONCE;
    uint64_t bytes = 0;
    bool is_full = false;

    make_room(control, batch_bytes(control));
    if (!batch_begin(control, batch))
        return;
    saver->disk_us = now_of(control);
    for (uint64_t i = 0; i < n_looks && batch->n < BLOCKS_AT_ONCE && bytes < BYTES_AT_ONCE;
         i++) {
        struct kvs_prefix *prefix = saver->first;
        const uint64_t block_bytes = prefix->home->block_bytes;
        struct kvs_tier_item item;

        if (!can_be_saved(saver, prefix)) {
            const bool is_hopeless =
                prefix->parent != NULL && prefix->parent->saved == KVS_PREFIX_UNSAVED;

            unlist(saver, prefix);
            if (is_hopeless) {
                kvs_prefix_set_saved(control->prefixes, prefix, KVS_PREFIX_UNSAVED);
            } else {
                list_at_end(saver, prefix);
            }
            continue;
        }
        if (saver->saved_bytes + block_bytes > room_of(control)) {
            is_full = true;
            if (saver->erasures.first == NULL) {
                note_full(control);
                saver->retry_us = now_of(control) + RETRY_US;
                kvs_disk_lack(&control->disk_room, KVS_DISK_PREFIXES, true);
                warn(control, "there is no room");
            }
            break;
        }
        unlist(saver, prefix);
        item = kvs_saver_item(prefix);
        batch_add(batch, &item);
        saver->saving_blocks++;
        saver->saving_bytes += block_bytes;
        saver->saved_bytes += block_bytes;
        bytes += block_bytes;
    }
    if (!is_full)
        saver->full_since_us = 0;
    if (batch->n > 0) {
        kvs_disk_lack(&control->disk_room, KVS_DISK_PREFIXES, false);
        write_records(batch, RECORD_IS_VOID, announced);
        return;
    }
    batch_end(batch);
    /* What waits needs something that takes time. */
    if (saver->first != NULL && saver->erasures.first == NULL)
        saver->retry_us = now_of(control) + RETRY_US;
}

bool kvs_saver_will_save(const struct kvs_control *control, struct kvs_prefix *prefix)
{
    const struct kvs_saver *saver = control->saver;

    if (saver == NULL || prefix->saved != KVS_PREFIX_SAVING)
        return false;
    /* Those before it are first; one of which a session needs what the disk had before waits for that
     * session. */
    while (prefix->parent != NULL && prefix->parent->saved != KVS_PREFIX_SAVED)
        prefix = prefix->parent;
    if (prefix->saved != KVS_PREFIX_SAVING)
        return false;
    if (saver->needed.first != NULL) {
        const struct kvs_tier_item item = kvs_saver_item(prefix);

        if (has_item(&saver->needed, &item))
            return false;
    }
    return saver->disk.call != NULL ? now_of(control) < saver->disk_us + WORTH_US
                                    : now_of(control) >= saver->retry_us;
}

bool kvs_saver_is_saving(const struct kvs_control *control)
{
    const struct kvs_saver *saver = control->saver;

    return saver != NULL && (saver->saving_blocks > 0 ||
                             (saver->first != NULL && now_of(control) >= saver->retry_us));
}

void kvs_saver_hurry(struct kvs_control *control, struct kvs_prefix *prefix)
{
    struct kvs_saver *saver = control->saver;
    struct kvs_prefix *given_up = NULL;

    saver->hurry_us = now_of(control);
    /* Those that are not listed use the link for a list of their own: parents come first. */
    for (; prefix != NULL && prefix->saved != KVS_PREFIX_SAVED; prefix = prefix->parent) {
        prefix->n_save_failed = 0;
        if (prefix->saved != KVS_PREFIX_UNSAVED)
            continue;
        prefix->save_next = given_up;
        given_up = prefix;
    }
    while (given_up != NULL) {
        struct kvs_prefix *next = given_up->save_next;

        kvs_saver_add(control, given_up);
        given_up = next;
    }
}

kv_status_t kvs_saver_failure(const struct kvs_control *control,
                              const struct kvs_prefix *prefix,
                              uint64_t since_us,
                              const char **ret_why)
{
    const struct kvs_saver *saver = control->saver;
    const bool has_failed = saver->disk_status != KV_OK && saver->disk_ended_us >= since_us;
    const bool is_given_up = prefix->n_save_failed > 0 || prefix->saved == KVS_PREFIX_UNSAVED;

    /* Objects, or what is away, may make room until it is tried once more. */
    if (prefix->save_link != NULL && saver->full_since_us != 0 && saver->full_us >= since_us &&
        saver->full_us - saver->full_since_us >= RETRY_US) {
        *ret_why = "there is no room on disk (--disk)";
        return KV_NO_MEMORY;
    }
    if (has_failed || is_given_up) {
        const kv_status_t status =
            has_failed ? saver->disk_status : (kv_status_t)prefix->save_status;

        *ret_why = status == KV_CORRUPT     ? "rows of the next block are bad in memory"
                   : status == KV_NO_MEMORY ? "the disk is full, or memory is short"
                                            : "the disk cannot be written";
        return status == KV_CORRUPT || status == KV_NO_MEMORY ? status : KV_IO;
    }
    /* It may take as long as a session needs it, or the disk fails: twice is enough. */
    if (now_of(control) >= since_us + 2 * RETRY_US && saver->needed.first != NULL) {
        const struct kvs_tier_item item = kvs_saver_item((struct kvs_prefix *)prefix);

        *ret_why = "what the disk had of them before is not erased yet";
        return has_item(&saver->needed, &item) ? KV_IO : KV_OK;
    }
    return KV_OK;
}

/* ---- leaving ------------------------------------------------------------------------------ */

bool kvs_saver_is_slow(const struct kvs_control *control)
{
    const struct kvs_saver *saver = control->saver;

    return saver != NULL &&
           (now_of(control) < saver->stay_us ||
            (saver->leave.call != NULL && now_of(control) > saver->leave_us + SLOW_US));
}

bool kvs_saver_let_go(struct kvs_control *control, struct kvs_prefix *prefix)
{
    struct kvs_saver *saver = control->saver;
    const struct kvs_tier_item item = kvs_saver_item(prefix);

    assert(prefix->save_link == NULL);
    if (!list_add(&saver->leaving, &item))
        return false;
    kvs_prefix_ref(prefix);
    /* In this order: what is on its way is spare all the time. */
    kvs_pages_add_spare(control->pages, item.block_bytes);
    saver->leaving_bytes += item.block_bytes;
    kvs_events_moved(control, prefix, KVS_MEDIUM_CPU, KVS_MEDIUM_DISK);
    kvs_prefix_set_away(control->prefixes, prefix);
    return true;
}

uint64_t kvs_saver_leaving_bytes(const struct kvs_control *control)
{
    return control->saver != NULL ? control->saver->leaving_bytes : 0;
}

static void have_left(struct kvs_control_call *call)
{
    struct kvs_batch *batch = call->batch;
    struct kvs_control *control = batch->control;
    bool has_any = false;

    for (uint32_t i = 0; i < batch->n; i++) {
        struct kvs_prefix *prefix = batch->items[i].prefix;

        has_any = has_any || !has_failed(batch, i);
        kvs_pages_sub_spare(control->pages, batch->items[i].block_bytes);
        control->saver->leaving_bytes -= batch->items[i].block_bytes;
        if (prefix->home == NULL || !prefix->is_away || !has_failed(batch, i))
            continue;
        /* Somebody uses it: others are to go first. */
        kvs_events_back(control, prefix);
        kvs_prefix_set_here(control->prefixes, prefix);
        kvs_prefix_use(control->prefixes, prefix, now_of(control));
    }
    control->saver->stay_us = has_any ? 0 : now_of(control) + STAY_US;
    batch_end(batch);
}

static void begin_leaving(struct kvs_control *control)
{
    struct kvs_saver *saver = control->saver;
    struct kvs_batch *batch = &saver->leave;
    struct kvs_tier_item item;

    if (!batch_begin(control, batch))
        return;
    while (batch->n < BLOCKS_AT_ONCE && list_take(&saver->leaving, &item)) {
        batch_add(batch, &item);
        item_unref(&item);
    }
    saver->leave_us = now_of(control);
    run_job(batch, KVS_TIER_LEAVE, have_left);
}

/* ---- steps -------------------------------------------------------------------------------- */

bool kvs_saver_is_idle(const struct kvs_control *control)
{
    const struct kvs_saver *saver = control->saver;

    return saver == NULL || now_of(control) < saver->retry_us ||
           (saver->first == NULL && saver->erasures.first == NULL);
}

void kvs_saver_step(struct kvs_control *control, uint64_t now_us)
{
    struct kvs_saver *saver = control->saver;

    if (saver == NULL)
        return;
    atomic_store_explicit(&control->disk_room.taken[KVS_DISK_PREFIXES], saver->saved_bytes,
                          memory_order_relaxed);
    kvs_disk_note_stuck(&control->disk_room, now_us,
                        !saver->is_retrying &&
                            (saver->erasures.first != NULL || saver->disk.call != NULL));
    if (saver->first == NULL)
        kvs_disk_lack(&control->disk_room, KVS_DISK_PREFIXES, false);
    if (saver->leaving.first != NULL && saver->leave.call == NULL)
        begin_leaving(control);
    if (saver->disk.call != NULL || now_us < saver->retry_us)
        return;
    saver->is_retrying = saver->is_retrying && saver->erasures.first != NULL;
    if (saver->needed.first != NULL && now_us >= saver->needed_us) {
        struct kvs_tier_item item;

        saver->is_retrying = saver->erasures.first == NULL;
        while (list_take(&saver->needed, &item))
            add_erasure(saver, &item);
    }
    if (saver->saved_bytes > room_of(control) && saver->erasures.first == NULL)
        make_room(control, 0); /* there was more before the node was started */
    else if (kvs_disk_gives(&control->disk_room, KVS_DISK_PREFIXES) &&
             saver->erasures.first == NULL)
        make_room(control, room_of(control) - saver->saved_bytes + GIVE_BYTES);
    if (can_erase(control))
        begin_erasing(control);
    else if (saver->first != NULL && control->released == NULL &&
             (atomic_load(&control->draining) || saver->waiting_bytes >= BYTES_AT_ONCE ||
              now_us >= saver->first->added_us + DELAY_US ||
              saver->first->added_us <= saver->hurry_us ||
              kvs_pages_are_wanted(control->pages)))
        begin_saving(control);
}

/* ---- start and end ------------------------------------------------------------------------ */

bool kvs_saver_create(struct kvs_control *control)
{
    struct kvs_saver *saver;

    if (control->config.disk_bytes == 0)
        return true;
    saver = calloc(1, sizeof(*saver));
    if (saver == NULL)
        return false;
    saver->end = &saver->first;
    list_init(&saver->erasures);
    list_init(&saver->needed);
    list_init(&saver->leaving);
    control->saver = saver;
    control->disk_room.bytes = control->config.disk_bytes;
    return true;
}

static void batch_drop(struct kvs_batch *batch)
{
    for (uint32_t i = 0; i < batch->n_records; i++)
        free(batch->records[i]);
    for (uint32_t i = 0; i < batch->n; i++)
        item_unref(&batch->items[i]);
}

void kvs_saver_destroy(struct kvs_control *control)
{
    struct kvs_saver *saver = control->saver;

    if (saver == NULL)
        return;
    list_drop(&saver->erasures);
    list_drop(&saver->needed);
    list_drop(&saver->leaving);
    batch_drop(&saver->disk);
    batch_drop(&saver->leave);
    free(saver);
    control->saver = NULL;
}

void kvs_saver_get_facts(const struct kvs_control *control,
                         uint64_t now_us,
                         struct kvs_saver_facts *ret_facts)
{
    const struct kvs_saver *saver = control->saver;

    *ret_facts = (struct kvs_saver_facts){.room_bytes = control->disk_room.bytes};
    if (saver == NULL)
        return;
    ret_facts->saved_bytes = saver->saved_bytes;
    ret_facts->saved_blocks = saver->saved_blocks;
    ret_facts->waiting_bytes = saver->waiting_bytes + saver->saving_bytes;
    ret_facts->waiting_blocks = saver->waiting_blocks + saver->saving_blocks;
    /* Those that are tried again. */
    ret_facts->waiting_blocks += saver->again_blocks;
    if (saver->first != NULL && now_us > saver->first->added_us)
        ret_facts->waiting_us = now_us - saver->first->added_us;
}
