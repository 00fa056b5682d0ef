/* The background jobs of a data thread, most urgent first.  Room that the node needs is given
 * back, and expired objects are freed, before anything that may take long.  The
 * scrubber limits itself to its rate and gets every other turn, and what is verified on disk every
 * third, if that is not the scrubber's; then come index jobs, and samples of recall. */
#include "kvserver/base/slice.h"
#include "kvserver/store/index/builder.h"
#include "kvserver/store/ops/ops.h"
#include "kvserver/store/ops/query.h"
#include "kvserver/store/ops/scrub.h"

static void *scrub_open(struct kvs_shard *shard, const struct kvs_shard_setup *setup)
{
    return kvs_scrub_create(shard, setup->scrub_bytes);
}

static void scrub_close(void *state)
{
    kvs_scrub_destroy(state);
}

static bool scrub_step(struct kvs_shard *shard, void *state)
{
    (void)shard;
    return kvs_scrub_step(state);
}

static void scrub_tell(struct kvs_shard *shard, const void *state)
{
    struct kvs_stats *stats = &shard->stats;
    struct kvs_scrub_progress progress;

    kvs_scrub_get_progress(state, &progress);
    kvs_stat_set(&stats->scrub_bytes, progress.bytes);
    kvs_stat_set(&stats->scrub_passes, progress.n_passes);
    kvs_stat_set(&stats->scrub_phase, progress.phase);
    kvs_stat_set(&stats->scrub_session, progress.session);
    kvs_stat_set(&stats->scrub_pass_bytes, progress.pass_bytes);
    kvs_stat_set(&stats->scrub_last_us, progress.last_pass_us);
    kvs_stat_set(&stats->scrub_last_bytes, progress.last_pass_bytes);
    kvs_stat_set(&stats->scrub_last_blocks, progress.last_pass_blocks);
    /* Last, and after what was found: who sees it sees that, too. */
    atomic_store_explicit(&stats->scrub_since_us, progress.since_us, memory_order_release);
}

static bool disk_step(struct kvs_shard *shard, void *state)
{
    bool has_moved;

    (void)state;
    if (shard->tier == NULL)
        return false;
    has_moved = kvs_disk_tier_verify(shard->tier);
    return (!kvs_disk_tier_is_loading(shard->tier) &&
            kvs_object_tier_verify(shard->object_tier)) ||
           has_moved;
}

/* When a job has ended, wakes the requests of its session that wait for codes. */
static bool index_step(struct kvs_shard *shard, void *state)
{
    uint32_t session;
    const bool has_moved = kvs_indexer_step(shard->indexer);

    (void)state;
    while (kvs_indexer_take_ended(shard->indexer, &session))
        kvs_shard_session_wake(shard, &shard->sessions[session], UINT32_MAX);
    return has_moved;
}

static bool room_step(struct kvs_shard *shard, void *state)
{
    (void)state;
    return kvs_query_queue_drop_room(kvs_query_queue_of(shard));
}

/* Frees an object that has expired, or an evictable one while the node is short of pages. */
static bool drop_object(struct kvs_shard *shard)
{
    return kvs_objects_expire(&shard->objects, shard->now_us) ||
           (kvs_pages_are_wanted(shard->pages) && kvs_objects_evict(&shard->objects));
}

static bool objects_step(struct kvs_shard *shard, void *state)
{
    (void)state;
    if (!drop_object(shard))
        return false;
    struct kv_slice slice = kv_slice_begin(shard->clock, 1);
    while (drop_object(shard) && !kv_slice_over(&slice))
        ;
    return true;
}

static bool recall_step(struct kvs_shard *shard, void *state)
{
    (void)state;
    return kvs_recall_step(kvs_query_queue_of(shard)->recall);
}

const struct kvs_background_row kvs_background[KVS_BACKGROUND_COUNT] = {
    [KVS_BACKGROUND_ROOM] = {.every = 1, .step = room_step},
    [KVS_BACKGROUND_OBJECTS] = {.every = 1, .step = objects_step},
    [KVS_BACKGROUND_SCRUB] = {.every = 2,
                              .open = scrub_open,
                              .close = scrub_close,
                              .step = scrub_step,
                              .tell = scrub_tell},
    [KVS_BACKGROUND_DISK] = {.every = 3, .step = disk_step},
    [KVS_BACKGROUND_INDEX] = {.every = 1, .step = index_step},
    [KVS_BACKGROUND_RECALL] = {.every = 1, .step = recall_step},
};
