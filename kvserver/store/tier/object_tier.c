#include "kvserver/store/tier/object_tier.h"

#include "kvserver/base/clock.h"
#include "kvserver/base/hash.h"
#include "kvserver/base/log.h"
#include "kvserver/base/map.h"
#include "kvserver/base/slice.h"
#include "kvserver/store/tier/object_tier_private.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    DELAY_US = 500000,
    SHORT_LIFE_US = 2000000, /* what lives no longer is not saved */
    RETRY_US = 1000000,
    BYTES_AT_ONCE = 64 << 20,
    WRITING_BYTES = 16 << 20, /* given to the disk at once */
    EVICT_AT_ONCE = 64,       /* from the disk */
    LOOKS = 256,              /* at those that wait, in a step */
    RECORD_BYTES = 512,       /* about, of memory for one that is away */
    RECORDS_PART = 8,         /* of memory that those take, which may go */
};

static uint64_t now_of(const struct kvs_object_tier *tier)
{
    return kv_clock_now(tier->setup.clock);
}

/* ---- lists -------------------------------------------------------------------------------- */

static void list_init(struct kvs_kept_list *list)
{
    *list = (struct kvs_kept_list){.end = &list->first};
}

static void list_add(struct kvs_kept_list *list, struct kvs_object_kept *kept)
{
    assert(kept->link == NULL);
    kept->next = NULL;
    kept->link = list->end;
    *list->end = kept;
    list->end = &kept->next;
    list->n++;
    list->bytes += kept->bytes;
}

static void list_remove(struct kvs_kept_list *list, struct kvs_object_kept *kept)
{
    *kept->link = kept->next;
    if (kept->next != NULL)
        kept->next->link = kept->link;
    else
        list->end = kept->link;
    kept->link = NULL;
    list->n--;
    list->bytes -= kept->bytes;
}

/* ---- the room on the disk ----------------------------------------------------------------- */

/* Returns what an object takes of the disk: each piece but the last is whole pages. */
static uint64_t on_disk(uint64_t bytes)
{
    return bytes == 0 ? KV_DISK_PAGE : (bytes + KV_DISK_PAGE - 1) / KV_DISK_PAGE * KV_DISK_PAGE;
}

static void take_room(struct kvs_object_tier *tier, struct kvs_object_kept *kept)
{
    if (!kept->has_room)
        atomic_fetch_add_explicit(&tier->setup.room->taken[KVS_DISK_OBJECTS], kept->bytes,
                                  memory_order_relaxed);
    kept->has_room = true;
}

static void give_room(struct kvs_object_tier *tier, struct kvs_object_kept *kept)
{
    if (kept->has_room)
        atomic_fetch_sub_explicit(&tier->setup.room->taken[KVS_DISK_OBJECTS], kept->bytes,
                                  memory_order_relaxed);
    kept->has_room = false;
}

/* Returns whether so many more bytes fit. */
static bool fits(const struct kvs_object_tier *tier, uint64_t bytes)
{
    const struct kvs_disk_room *room = tier->setup.room;

    return kvs_disk_taken(room, KVS_DISK_OBJECTS) + bytes <=
           kvs_disk_left(room, KVS_DISK_OBJECTS);
}

/* Evicts what is away until so many bytes will fit.  Returns false if they will not. */
static bool make_room(struct kvs_object_tier *tier, uint64_t bytes)
{
    if (bytes > kvs_disk_left(tier->setup.room, KVS_DISK_OBJECTS) ||
        kvs_disk_has_too_much(tier->setup.room))
        return false;
    for (int i = 0; i < EVICT_AT_ONCE; i++) {
        const uint64_t on_its_way = tier->erasures.bytes;

        if (fits(tier, bytes > on_its_way ? bytes - on_its_way : 0))
            return true;
        if (!kvs_objects_evict_away(tier->objects))
            return false;
    }
    return true;
}

/* Whether those that wait cannot leave memory soon. */
static bool are_stuck(const struct kvs_object_tier *tier)
{
    return tier->is_full || tier->is_failing;
}

/* After one of the reasons for it has come, or has gone. */
static void tell_stuck(struct kvs_object_tier *tier, bool were_stuck)
{
    if (are_stuck(tier) == were_stuck)
        return;
    for (struct kvs_object_kept *kept = tier->waiting.first; kept != NULL; kept = kept->next)
        kvs_object_set_stuck(tier->objects, kept->object, !were_stuck);
}

static void set_full(struct kvs_object_tier *tier, bool is_full)
{
    const bool were_stuck = are_stuck(tier);

    /* Another data thread may have said that there is some again. */
    if (is_full || tier->is_full)
        kvs_disk_lack(tier->setup.room, KVS_DISK_OBJECTS, is_full);
    if (tier->is_full == is_full)
        return;
    tier->is_full = is_full;
    tell_stuck(tier, were_stuck);
    if (is_full)
        kv_log(KV_LOG_WARN, "disk: there is no room: %llu objects wait to be saved",
               (unsigned long long)tier->waiting.n);
}

/* ---- what has been removed and may return -------------------------------------------------- */

static void may_return(struct kvs_object_tier *tier, struct kvs_object_kept *kept)
{
    kept->same_name = kv_map_get(tier->returns, &kept->key);
    kept->returns =
        kv_map_set(tier->returns, &kept->key, kept) ? KVS_RETURNS_LISTED : KVS_RETURNS_UNLISTED;
    tier->n_unlisted += kept->returns == KVS_RETURNS_UNLISTED;
    kept->removal = ++tier->removal;
    kept->newer = NULL;
    kept->newer_link = tier->newest_end;
    *tier->newest_end = kept;
    tier->newest_end = &kept->newer;
}

static void cannot_return(struct kvs_object_tier *tier, struct kvs_object_kept *kept)
{
    struct kvs_object_kept *first = kv_map_get(tier->returns, &kept->key);

    *kept->newer_link = kept->newer;
    if (kept->newer != NULL)
        kept->newer->newer_link = kept->newer_link;
    else
        tier->newest_end = kept->newer_link;
    tier->n_unlisted -= kept->returns == KVS_RETURNS_UNLISTED;
    if (kept->returns != KVS_RETURNS_LISTED) {
        kept->returns = KVS_RETURNS_NEVER;
        return;
    }
    kept->returns = KVS_RETURNS_NEVER;
    if (first != kept) {
        while (first->same_name != kept)
            first = first->same_name;
        first->same_name = kept->same_name;
    } else if (kept->same_name == NULL) {
        (void)kv_map_remove(tier->returns, &kept->key);
    } else {
        (void)kv_map_set(tier->returns, &kept->key, kept->same_name); /* which is there */
    }
}

/* ---- steps of a batch --------------------------------------------------------------------- */

/* A write or a sync of a batch is done. */
static void step_done(void *arg, kv_status_t status, size_t bytes)
{
    struct kvs_object_batch *batch = arg;

    (void)bytes;
    for (uint32_t i = 0; i < batch->n_records; i++)
        free(batch->records[i]);
    batch->n_records = 0;
    batch->status = status;
    if (status != KV_OK)
        kvs_object_count(&batch->tier->counts.failed, 1);
    batch->next(batch);
}

static void sync(struct kvs_object_batch *batch, void (*next)(struct kvs_object_batch *batch))
{
    kv_status_t status;

    batch->next = next;
    status = kv_disk_sync(batch->tier->queue, step_done, batch);
    if (status != KV_OK)
        step_done(batch, status, 0);
}

/* Goes on with `good` after a step that has not failed, and else with `end`. */
static void sync_or(struct kvs_object_batch *batch,
                    void (*good)(struct kvs_object_batch *batch),
                    void (*end)(struct kvs_object_batch *batch))
{
    if (batch->status == KV_OK)
        sync(batch, good);
    else
        end(batch);
}

enum record_kind {
    RECORD_COUNTS,
    RECORD_IS_VOID, /* pieces may be there, and are to be erased */
    RECORD_IS_GONE, /* nothing is there */
};

/* A time of the node's clock on one that outlasts the process. */
static uint64_t lasting_of(const struct kvs_object_tier *tier, uint64_t us)
{
    return kv_clock_lasting(tier->setup.clock) + (us - now_of(tier));
}

static bool make_record(const struct kvs_object_tier *tier,
                        const struct kvs_object_kept *kept,
                        enum record_kind kind,
                        struct kv_disk_write *ret_write,
                        void **ret_memory)
{
    const struct kvs_stored_object *object = kept->object;
    uint32_t crcs[KV_OBJECT_BYTES_MAX / KV_WIRE_BULK_MAX];
    struct kvs_object_record record = {.key = kept->key,
                                       .version = kept->version,
                                       .n_pieces = kept->n_pieces,
                                       .bytes = kept->bytes};

    if (kind == RECORD_IS_GONE)
        return kvs_object_record_removal(&record, ret_write, ret_memory);
    if (kind == RECORD_COUNTS && !kept->is_removed && !kept->is_spoiled) {
        for (uint32_t i = 0; i < object->n_pieces; i++)
            crcs[i] = object->pieces[i].crc;
        record.counts = true;
        record.bytes = object->bytes;
        record.name = kvs_object_name(object);
        record.name_bytes = object->name_bytes;
        record.tenant = object->tenant;
        record.crcs = crcs;
        record.expires_us = object->expiry.at_us == KVS_EXPIRY_NEVER
                                ? KVS_EXPIRY_NEVER
                                : lasting_of(tier, object->expiry.at_us);
        record.created_us = lasting_of(tier, object->created_us);
        record.is_evictable = object->is_evictable;
    }
    return kvs_object_record_make(&record, ret_write, ret_memory);
}

/* Writes records of all but, where `only_new`, of what has one.  Calls `next` when that is done, or
 * has failed. */
static void write_records(struct kvs_object_batch *batch,
                          enum record_kind kind,
                          bool only_new,
                          void (*next)(struct kvs_object_batch *batch))
{
    struct kv_disk_write writes[KVS_OBJECTS_AT_ONCE];
    kv_status_t status = KV_OK;
    uint32_t n = 0;

    assert(batch->n_records == 0);
    batch->next = next;
    for (uint32_t i = 0; i < batch->n && status == KV_OK; i++) {
        if (only_new && batch->kept[i]->has_record)
            continue;
        if (make_record(batch->tier, batch->kept[i], kind, &writes[n], &batch->records[n]))
            n++;
        else
            status = KV_NO_MEMORY;
    }
    batch->n_records = n;
    if (n > 0 && status == KV_OK) {
        status =
            kv_disk_write(batch->tier->queue, KV_DISK_RECORDS, writes, n, step_done, batch);
        if (status == KV_OK)
            return;
    }
    step_done(batch, status, 0);
}

/* ---- erasing ------------------------------------------------------------------------------ */

static void erased(struct kvs_object_batch *batch)
{
    struct kvs_object_tier *tier = batch->tier;
    const uint32_t n = batch->n;

    batch->n = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct kvs_object_kept *kept = batch->kept[i];

        if (batch->status != KV_OK) {
            list_add(&tier->erasures, kept);
            continue;
        }
        give_room(tier, kept);
        free(kept);
    }
    if (batch->status != KV_OK)
        tier->erase_us = now_of(tier) + RETRY_US;
}

static void rows_gone(struct kvs_object_batch *batch)
{
    if (batch->status == KV_OK)
        write_records(batch, RECORD_IS_GONE, false, erased);
    else
        erased(batch);
}

static void removed_or_not(struct kvs_object_batch *batch)
{
    sync_or(batch, rows_gone, erased);
}

/* The disk says for sure that they do not count. */
static void voided(struct kvs_object_batch *batch)
{
    struct kvs_object_tier *tier = batch->tier;
    struct kvs_object_piece_key keys[KVS_OBJECT_PIECES_AT_ONCE];
    struct kv_disk_write writes[KVS_OBJECT_PIECES_AT_ONCE];
    kv_status_t status;
    uint32_t n = 0;

    if (batch->status != KV_OK) {
        erased(batch);
        return;
    }
    for (uint32_t i = 0; i < batch->n; i++) {
        struct kvs_object_kept *kept = batch->kept[i];

        if (kept->returns != KVS_RETURNS_NEVER) {
            cannot_return(tier, kept);
            tier->setup.arrived(tier->setup.arg, kept);
        }
        for (uint32_t piece = 0; piece < kept->n_pieces; piece++, n++) {
            keys[n] = kvs_object_piece_key(&kept->key, kept->version, piece);
            writes[n] = (struct kv_disk_write){.key = &keys[n], .key_bytes = sizeof(keys[n])};
        }
    }
    batch->next = removed_or_not;
    status = kv_disk_write(tier->queue, KV_DISK_ROWS, writes, n, step_done, batch);
    if (status != KV_OK)
        step_done(batch, status, 0);
}

static void void_written(struct kvs_object_batch *batch)
{
    sync_or(batch, voided, erased);
}

static bool erase_step(struct kvs_object_tier *tier)
{
    struct kvs_object_batch *batch = &tier->erase;
    uint32_t n_pieces = 0;

    if (batch->n > 0 || tier->erasures.first == NULL || now_of(tier) < tier->erase_us ||
        kvs_object_verify_is_writing(tier))
        return false;
    while (tier->erasures.first != NULL && batch->n < KVS_OBJECTS_AT_ONCE) {
        struct kvs_object_kept *kept = tier->erasures.first;

        if (n_pieces + kept->n_pieces > KVS_OBJECT_PIECES_AT_ONCE)
            break;
        n_pieces += kept->n_pieces;
        list_remove(&tier->erasures, kept);
        batch->kept[batch->n++] = kept;
    }
    write_records(batch, RECORD_IS_VOID, false, void_written);
    return true;
}

/* ---- saving ------------------------------------------------------------------------------- */

static void wait_to_save(struct kvs_object_tier *tier, struct kvs_object_kept *kept)
{
    kept->added_us = now_of(tier);
    list_add(&tier->waiting, kept);
    /* Before the put that brought it has ended: a node that drains waits for both. */
    atomic_store_explicit(&tier->counts.is_busy, true, memory_order_relaxed);
}

/* The batch of the object is over. */
static void
object_over(struct kvs_object_tier *tier, struct kvs_object_kept *kept, bool is_good)
{
    struct kvs_stored_object *object = kept->object;

    kept->is_in_batch = false;
    kept->is_tried = true;
    if (kept->is_removed) {
        list_add(&tier->erasures, kept);
    } else if (kept->is_spoiled) {
        kvs_object_set_saved(tier->objects, object, false);
        kept->is_removed = true;
        may_return(tier, kept);
        list_add(&tier->erasures, kept);
    } else {
        if (object->is_stuck == is_good)
            kvs_object_set_stuck(tier->objects, object, !is_good);
        if (is_good && !kept->has_record) {
            kept->has_record = true;
            kvs_object_set_saved(tier->objects, object, true);
            kvs_object_count(&tier->counts.saved_objects, 1);
            kvs_object_count(&tier->counts.saved_bytes, kept->bytes);
            kvs_object_verify_add(tier, kept, now_of(tier));
        }
        if (!is_good || kept->is_renewed)
            wait_to_save(tier, kept);
    }
    kvs_object_unpin(tier->objects, object);
}

static void saved(struct kvs_object_batch *batch)
{
    struct kvs_object_tier *tier = batch->tier;
    const bool were_stuck = are_stuck(tier);
    const uint32_t n = batch->n;

    /* Until one is saved, they are not counted on: sessions that are used give rows meanwhile. */
    tier->is_failing = batch->status != KV_OK;
    tell_stuck(tier, were_stuck);
    batch->n = 0;
    for (uint32_t i = 0; i < n; i++)
        object_over(tier, batch->kept[i], batch->status == KV_OK);
    if (batch->status == KV_OK)
        return;
    tier->retry_us = now_of(tier) + RETRY_US;
    KV_LOG_EVERY(KV_LOG_WARN, "disk: %u objects could not be saved: %s", n,
                 kv_status_name(batch->status));
}

static void counted(struct kvs_object_batch *batch)
{
    sync_or(batch, saved, saved);
}

static void rows_synced(struct kvs_object_batch *batch)
{
    if (batch->status == KV_OK)
        write_records(batch, RECORD_COUNTS, false, counted);
    else
        saved(batch);
}

static void piece_written(void *arg, kv_status_t status, size_t bytes)
{
    struct kvs_piece_write *write = arg;
    struct kvs_object_tier *tier = write->tier;

    (void)bytes;
    *write->link = write->next;
    if (write->next != NULL)
        write->next->link = write->link;
    tier->writing_bytes -= write->bytes;
    if (status == KV_OK) {
        kvs_object_count(&tier->counts.written_bytes, write->bytes);
    } else {
        tier->has_failed = true;
        kvs_object_count(&tier->counts.failed, 1);
    }
    free(write);
}

/* Returns false if it is to be tried again later. */
static bool
write_piece(struct kvs_object_tier *tier, struct kvs_object_kept *kept, uint32_t piece)
{
    const struct kvs_object_piece_key key =
        kvs_object_piece_key(&kept->key, kept->version, piece);
    const size_t bytes = kvs_object_piece_bytes(kept->object->bytes, piece);
    const struct kv_disk_write one = {.key = &key,
                                      .key_bytes = sizeof(key),
                                      .value = kept->object->pieces[piece].bytes,
                                      .value_bytes = bytes};
    struct kvs_piece_write *write;

    /* What is saved is to be good. */
    if (!kvs_object_verify(tier->objects, kept->object, piece)) {
        kept->is_spoiled = true;
        return true;
    }
    write = malloc(sizeof(*write));
    if (write == NULL)
        return false;
    *write = (struct kvs_piece_write){
        .tier = tier, .next = tier->writes, .link = &tier->writes, .bytes = bytes};
    if (kv_disk_write(tier->queue, KV_DISK_ROWS, &one, 1, piece_written, write) != KV_OK) {
        free(write);
        return false;
    }
    if (write->next != NULL)
        write->next->link = &write->next;
    tier->writes = write;
    tier->writing_bytes += bytes;
    return true;
}

/* Whether the pieces of the object are to be written. */
static bool is_written(const struct kvs_object_kept *kept)
{
    return !kept->has_record && !kept->is_removed && !kept->is_spoiled;
}

/* Writes the next pieces of the batch, for a slice. */
static bool write_step(struct kvs_object_tier *tier)
{
    struct kvs_object_batch *batch = &tier->save;
    struct kv_slice slice = kv_slice_begin(tier->setup.clock, 1);
    bool has_moved = false;

    while (!tier->has_failed && tier->next_kept < batch->n &&
           tier->writing_bytes < WRITING_BYTES) {
        struct kvs_object_kept *kept = batch->kept[tier->next_kept];

        if (tier->next_piece == kept->n_pieces || !is_written(kept)) {
            tier->next_kept++;
            tier->next_piece = 0;
            continue;
        }
        if (!write_piece(tier, kept, tier->next_piece))
            break;
        tier->next_piece++;
        has_moved = true;
        if (kv_slice_over(&slice))
            return true;
    }
    if (tier->writes != NULL || (!tier->has_failed && tier->next_kept < batch->n))
        return has_moved;
    tier->is_writing = false;
    batch->status = tier->has_failed ? KV_IO : KV_OK;
    sync_or(batch, rows_synced, saved);
    return true;
}

/* The disk says for sure that pieces may be there. */
static void announced(struct kvs_object_batch *batch)
{
    struct kvs_object_tier *tier = batch->tier;

    if (batch->status != KV_OK) {
        saved(batch);
        return;
    }
    tier->next_kept = tier->next_piece = 0;
    tier->has_failed = false;
    tier->is_writing = true;
}

static void announcement_written(struct kvs_object_batch *batch)
{
    sync_or(batch, announced, saved);
}

/* Whether those that wait are to be saved now. */
static bool is_time(const struct kvs_object_tier *tier)
{
    const struct kvs_object_kept *first = tier->waiting.first;
    const uint64_t now_us = now_of(tier);

    if (first == NULL || tier->save.n > 0)
        return false;
    /* Some may have left memory since, which can leave the disk as well. */
    if (now_us < tier->retry_us &&
        !(tier->is_full && tier->objects->lists[KVS_OBJECTS_AWAY].n > 0))
        return false;
    return atomic_load_explicit(tier->setup.draining, memory_order_relaxed) ||
           tier->waiting.bytes >= BYTES_AT_ONCE || now_us >= first->added_us + DELAY_US ||
           kvs_pages_are_wanted(kvs_arena_pages(tier->objects->arena));
}

static bool save_step(struct kvs_object_tier *tier)
{
    struct kvs_object_batch *batch = &tier->save;
    uint64_t bytes = 0, n_pieces = 0;
    uint64_t n_looks = tier->waiting.n < LOOKS ? tier->waiting.n : LOOKS;
    bool is_coming = false, has_passed = false;

    if (tier->waiting.first == NULL)
        set_full(tier, false); /* nobody needs it any more */
    if (!is_time(tier))
        return false;
    for (; n_looks > 0 && tier->waiting.first != NULL && batch->n < KVS_OBJECTS_AT_ONCE &&
           bytes < BYTES_AT_ONCE && n_pieces < KVS_OBJECT_PIECES_AT_ONCE;
         n_looks--) {
        struct kvs_object_kept *kept = tier->waiting.first;

        is_coming = !kept->has_room && make_room(tier, kept->bytes);
        if (is_coming && !fits(tier, kept->bytes))
            break;
        list_remove(&tier->waiting, kept);
        if (!kept->has_room && !is_coming) {
            list_add(&tier->waiting, kept); /* a smaller one behind it may fit */
            has_passed = true;
            continue;
        }
        take_room(tier, kept);
        if (tier->is_full && !tier->is_failing)
            kvs_object_set_stuck(tier->objects, kept->object, false);
        kvs_object_pin(kept->object);
        kept->is_in_batch = true;
        kept->is_renewed = false;
        bytes += kept->bytes;
        n_pieces += kept->n_pieces;
        batch->kept[batch->n++] = kept;
    }
    if (batch->n == 0) {
        /* Where some are being erased, there will be. */
        set_full(tier, !is_coming);
        tier->retry_us = now_of(tier) + (is_coming ? RETRY_US / 100 : RETRY_US);
        return false;
    }
    set_full(tier, has_passed);
    tier->saving_bytes = bytes;
    write_records(batch, RECORD_IS_VOID, true, announcement_written);
    return true;
}

/* ---- what the store calls ----------------------------------------------------------------- */

static void published(void *arg, struct kvs_stored_object *object)
{
    struct kvs_object_tier *tier = arg;
    struct kvs_object_kept *kept;

    if (object->expiry.at_us != KVS_EXPIRY_NEVER &&
        object->expiry.at_us < now_of(tier) + SHORT_LIFE_US)
        return;
    kept = calloc(1, sizeof(*kept));
    if (kept == NULL)
        return;
    kept->key = object->key;
    kept->version = object->version;
    kept->bytes = on_disk(object->bytes);
    kept->n_pieces = object->n_pieces;
    kept->object = object;
    object->kept = kept;
    if (tier->waiting.first == NULL && tier->save.n == 0)
        tier->is_failing = false; /* none is left of those that failed */
    object->is_stuck = are_stuck(tier);
    wait_to_save(tier, kept);
}

/* Its record is to be written again. */
static void renewed(void *arg, struct kvs_stored_object *object)
{
    struct kvs_object_tier *tier = arg;
    struct kvs_object_kept *kept = object->kept;

    if (kept->is_in_batch && kept->object != object) {
        kvs_object_pin(object);
        kvs_object_unpin(tier->objects, kept->object);
    }
    kept->object = object;
    kept->is_renewed = true;
    if (kept->link == NULL && !kept->is_in_batch)
        wait_to_save(tier, kept);
}

static void removed(void *arg, struct kvs_stored_object *object)
{
    struct kvs_object_tier *tier = arg;
    struct kvs_object_kept *kept = object->kept;

    object->kept = NULL;
    object->is_saved = false;
    if (kept->link != NULL)
        list_remove(&tier->waiting, kept);
    kept->is_removed = true;
    kvs_object_verify_remove(tier, kept);
    if (kept->has_record) {
        kvs_object_count(&tier->counts.saved_objects, -UINT64_C(1));
        kvs_object_count(&tier->counts.saved_bytes, -kept->bytes);
    }
    if (!kept->has_record && !kept->is_tried && !kept->is_in_batch) {
        give_room(tier, kept);
        free(kept);
        return;
    }
    may_return(tier, kept);
    if (!kept->is_in_batch)
        list_add(&tier->erasures, kept);
}

static const void *erasure(void *arg, const struct kv_id128 *key)
{
    const struct kvs_object_tier *tier = arg;
    const void *what = kv_map_get(tier->returns, key);

    /* Of these it is not known which they are: any that is being erased may be the one. */
    if (what == NULL && tier->n_unlisted > 0)
        what = tier->erasures.first != NULL ? tier->erasures.first : tier->erase.kept[0];
    return what;
}

static uint64_t removals(void *arg, uint64_t *ret_oldest)
{
    const struct kvs_object_tier *tier = arg;

    if (tier->oldest != NULL)
        *ret_oldest = tier->oldest->removal;
    return tier->removal;
}

static const struct kvs_object_keeper keeper = {
    .published = published,
    .renewed = renewed,
    .removed = removed,
    .load = kvs_object_load,
    .erasure = erasure,
    .removals = removals,
};

/* ---- the interface ------------------------------------------------------------------------ */

kv_status_t kvs_object_tier_open(const struct kvs_object_tier_setup *setup,
                                 struct kvs_object_tier **ret_tier)
{
    struct kvs_object_tier *tier = calloc(1, sizeof(*tier));
    kv_status_t status = KV_NO_MEMORY;

    if (tier == NULL)
        return KV_NO_MEMORY;
    tier->setup = *setup;
    tier->objects = setup->objects;
    tier->save.tier = tier->erase.tier = tier;
    list_init(&tier->waiting);
    list_init(&tier->erasures);
    tier->newest_end = &tier->oldest;
    tier->returns = kv_map_create(kv_clock_now(setup->clock)); /* keys are hashes */
    if (tier->returns != NULL && kvs_object_loads_open(tier))
        status =
            setup->disk->ops->queue_open(setup->disk, setup->wake, setup->arg, &tier->queue);
    if (status != KV_OK) {
        kvs_object_tier_close(tier);
        return status;
    }
    tier->verify.end = &tier->verify.first;
    kvs_objects_set_keeper(tier->objects, &keeper, tier);
    *ret_tier = tier;
    return KV_OK;
}

void kvs_object_tier_stop(struct kvs_object_tier *tier)
{
    if (tier != NULL && tier->queue != NULL)
        tier->queue->disk->ops->queue_close(tier->queue);
    if (tier != NULL)
        tier->queue = NULL;
}

static void batch_close(struct kvs_object_batch *batch)
{
    for (uint32_t i = 0; i < batch->n_records; i++)
        free(batch->records[i]);
    for (uint32_t i = 0; i < batch->n; i++)
        if (batch->kept[i]->is_removed)
            free(batch->kept[i]);
}

void kvs_object_tier_close(struct kvs_object_tier *tier)
{
    if (tier == NULL)
        return;
    kvs_object_tier_stop(tier);
    batch_close(&tier->save);
    batch_close(&tier->erase);
    for (struct kvs_piece_write *write = tier->writes, *next; write != NULL; write = next) {
        next = write->next;
        free(write);
    }
    for (struct kvs_object_kept *kept = tier->erasures.first, *next; kept != NULL;
         kept = next) {
        next = kept->next;
        free(kept);
    }
    for (struct kvs_stored_object *object = tier->objects->first; object != NULL;
         object = object->next)
        free(object->kept);
    kvs_object_loads_close(tier);
    kvs_object_verify_close(tier);
    kv_map_destroy(tier->returns);
    free(tier);
}

static unsigned n_threads_of(const struct kvs_object_tier *tier)
{
    const struct kvs_pages *pages = kvs_arena_pages(tier->objects->arena);
    const unsigned n = atomic_load_explicit(&pages->n_arenas, memory_order_relaxed);

    return n > 0 ? n : 1;
}

/* Records of what is away are memory as well. */
static bool has_too_many(const struct kvs_object_tier *tier)
{
    return tier->objects->lists[KVS_OBJECTS_AWAY].n * RECORD_BYTES >
           kvs_arena_pages(tier->objects->arena)->bytes / RECORDS_PART / n_threads_of(tier);
}

/* Returns how many bytes of objects are to go because there is too much: of each data thread's a part. */
static uint64_t excess(const struct kvs_object_tier *tier)
{
    const struct kvs_disk_room *room = tier->setup.room;
    const uint64_t taken = kvs_disk_taken(room, KVS_DISK_OBJECTS);
    const uint64_t left = kvs_disk_left(room, KVS_DISK_OBJECTS) +
                          atomic_load_explicit(&room->going, memory_order_relaxed);

    return taken > left ? (taken - left + n_threads_of(tier) - 1) / n_threads_of(tier) : 0;
}

static void tell(struct kvs_object_tier *tier)
{
    const uint64_t now_us = now_of(tier);
    struct kvs_object_tier_counts *counts = &tier->counts;
    uint64_t n = tier->waiting.n, bytes = tier->waiting.bytes;
    bool is_busy = tier->save.n > 0 || tier->erase.n > 0;

    is_busy = is_busy || (tier->waiting.first != NULL && now_us >= tier->retry_us);
    is_busy = is_busy || (tier->erasures.first != NULL && now_us >= tier->erase_us);
    n += tier->save.n;
    bytes += tier->save.n > 0 ? tier->saving_bytes : 0;
    atomic_store_explicit(&counts->waiting_objects, n, memory_order_relaxed);
    atomic_store_explicit(&counts->waiting_bytes, bytes, memory_order_relaxed);
    atomic_store_explicit(&counts->is_busy, is_busy, memory_order_relaxed);
}

/* Evicts some of what is away, if the prefixes want its room or there is too much of it, and what went
 * before is gone. */
static bool give(struct kvs_object_tier *tier)
{
    const bool gives = kvs_disk_gives(tier->setup.room, KVS_DISK_OBJECTS) || has_too_many(tier);
    _Atomic uint64_t *going = &tier->setup.room->going;
    uint64_t excess_bytes;
    int n = 0;

    if (tier->erasures.first != NULL || tier->erase.n > 0)
        return false;
    atomic_fetch_sub_explicit(going, tier->giving_bytes, memory_order_relaxed);
    excess_bytes = excess(tier);
    while (n < EVICT_AT_ONCE && (gives || tier->erasures.bytes < excess_bytes) &&
           kvs_objects_evict_away(tier->objects))
        n++;
    tier->giving_bytes = tier->erasures.bytes;
    atomic_fetch_add_explicit(going, tier->giving_bytes, memory_order_relaxed);
    return n > 0;
}

/* Whether there is nothing to do, or to wait for. */
static bool is_at_rest(const struct kvs_object_tier *tier)
{
    return tier->waiting.first == NULL && tier->erasures.first == NULL && tier->save.n == 0 &&
           tier->erase.n == 0 && tier->loads == NULL && tier->n_loading == 0 &&
           tier->verify.check == NULL && tier->objects->lists[KVS_OBJECTS_AWAY].n == 0 &&
           !tier->is_full && kvs_object_tier_is_idle(tier);
}

bool kvs_object_tier_step(struct kvs_object_tier *tier)
{
    bool has_moved;

    if (is_at_rest(tier))
        return false;
    has_moved = kv_disk_progress(tier->queue) > 0;

    has_moved = kvs_object_loads_step(tier) || has_moved;
    has_moved = give(tier) || has_moved;
    has_moved = erase_step(tier) || has_moved;
    has_moved = save_step(tier) || has_moved;
    if (tier->is_writing)
        has_moved = write_step(tier) || has_moved;
    tell(tier);
    return has_moved;
}

/* Returns the object of a record, away and pinned; NULL: no memory. */
static struct kvs_stored_object *make_object(struct kvs_object_tier *tier,
                                             const struct kvs_object_record *record,
                                             uint64_t now_us,
                                             uint64_t lasting_us)
{
    const struct kv_id128 name = kv_hash128(record->name, record->name_bytes);
    const uint64_t age_us =
        record->created_us < lasting_us ? lasting_us - record->created_us : 0;
    const struct kvs_object_facts facts = {
        .key = record->key,
        .bytes = record->bytes,
        .seed = kv_object_seed(&name),
        .tenant = record->tenant,
        .crcs = record->crcs,
        .name = record->name,
        .name_bytes = record->name_bytes,
        .now_us = age_us < now_us ? now_us - age_us : 0,
        .terms = {.expires_us = record->expires_us == KVS_EXPIRY_NEVER
                                    ? KVS_EXPIRY_NEVER
                                    : now_us + (record->expires_us - lasting_us),
                  .is_evictable = record->is_evictable},
        .is_away = true,
    };
    struct kvs_stored_object *object = kvs_object_create(tier->objects, &facts);

    if (object != NULL)
        object->version = record->version;
    return object;
}

bool kvs_object_tier_found(struct kvs_object_tier *tier, const struct kvs_object_record *record)
{
    const uint64_t now_us = now_of(tier), lasting_us = kv_clock_lasting(tier->setup.clock);
    struct kvs_object_kept *kept = calloc(1, sizeof(*kept));
    struct kvs_stored_object *object = NULL;

    if (kept == NULL)
        return false;
    kept->key = record->key;
    kept->version = record->version;
    kept->bytes = on_disk(record->bytes);
    kept->n_pieces = record->n_pieces;
    kept->has_record = true;
    take_room(tier, kept);
    if (record->counts && record->expires_us > lasting_us &&
        kvs_objects_find(tier->objects, &record->key) == NULL) {
        object = make_object(tier, record, now_us, lasting_us);
        if (object == NULL) {
            give_room(tier, kept);
            free(kept);
            return false;
        }
        kept->object = object;
        object->kept = kept;
        object->is_saved = true;
    }
    if (object == NULL) {
        kept->is_removed = true;
        if (record->counts)
            may_return(tier, kept);
        list_add(&tier->erasures, kept);
        return true;
    }
    if (kvs_objects_publish(tier->objects, object) != KV_OK) {
        object->kept = NULL;
        kvs_object_unpin(tier->objects, object);
        give_room(tier, kept);
        free(kept);
        return false;
    }
    kvs_object_unpin(tier->objects, object);
    kvs_object_count(&tier->counts.saved_objects, 1);
    kvs_object_count(&tier->counts.saved_bytes, kept->bytes);
    kvs_object_verify_add(tier, kept, 0);
    return true;
}

bool kvs_object_tier_is_idle(const struct kvs_object_tier *tier)
{
    return tier == NULL ||
           !atomic_load_explicit((_Atomic bool *)&tier->counts.is_busy, memory_order_relaxed);
}

const struct kvs_object_tier_counts *kvs_object_tier_counts(const struct kvs_object_tier *tier)
{
    return &tier->counts;
}
