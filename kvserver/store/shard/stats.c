/* Copies values that other modules keep into the shard's statistics. */
#include "kvserver/store/shard/shard_private.h"

#include "kvserver/store/index/builder.h"
#include "kvserver/store/rows/residency.h"

static void tell_memory(struct kvs_shard *shard)
{
    struct kvs_stats *stats = &shard->stats;
    const struct kvs_codebooks *books = &shard->codebooks;
    const struct kvs_arena *arena = shard->arena;
    const uint64_t taken = kvs_arena_bytes_taken(arena);
    const uint64_t rows = kvs_arena_bytes_of(arena, KVS_USE_ROWS);
    const uint64_t codes = kvs_arena_bytes_of(arena, KVS_USE_CODES);
    const uint64_t index = kvs_arena_bytes_of(arena, KVS_USE_INDEX);

    kvs_stat_set(&stats->memory_used, kvs_arena_bytes_used(shard->arena));
    kvs_stat_set(&stats->memory_rows, rows);
    kvs_stat_set(&stats->memory_codes, codes);
    kvs_stat_set(&stats->memory_index, index);
    kvs_stat_set(&stats->memory_other, taken - rows - codes - index - shard->objects.memory);
    kvs_stat_set(&stats->memory_unused, kvs_arena_bytes_used(arena) - taken);
    kvs_stat_set(&stats->segments, shard->store.n_segments);
    kvs_stat_set(&stats->absent_blocks, kvs_residency_n_absent(&shard->store));
    kvs_stat_set(&stats->codebooks, kv_pool_used(books->pool));
    kvs_stat_set(&stats->summarised, books->rows_summarised);
    kvs_stat_set(&stats->summaries_bytes, books->summaries_bytes);
    kvs_stat_set(&stats->objects, kv_map_count(shard->objects.map));
    kvs_stat_set(&stats->object_bytes, shard->objects.bytes);
    kvs_stat_set(&stats->objects_memory, shard->objects.memory);
    kvs_stat_set(&stats->objects_evictable, shard->objects.spare_bytes);
    kvs_stat_set(&stats->objects_away, shard->objects.n_absent);
    kvs_stat_set(&stats->object_pieces_away, shard->objects.n_away);
    kvs_stat_set(&stats->objects_expired, shard->objects.n_expired);
    kvs_stat_set(&stats->objects_evicted, shard->objects.n_evicted);
    kvs_stat_set(&stats->objects_left, shard->objects.n_left);
}

static void tell_index(struct kvs_shard *shard)
{
    struct kvs_stats *stats = &shard->stats;
    struct kvs_indexer_stats index;

    kvs_indexer_get_stats(shard->indexer, &index);
    kvs_stat_set(&stats->index_jobs, index.n_jobs);
    kvs_stat_set(&stats->index_us, index.worked_us);
    kvs_stat_set(&stats->index_failed, index.failed);
    kvs_stat_set(&stats->codebooks_trained, index.trained);
    kvs_stat_set(&stats->codebooks_recalled, index.recalled);
    kvs_stat_set(&stats->rows_coded, index.rows_coded);
    kvs_stat_set(&stats->rows_summarised, index.rows_summarised);
    kvs_stat_set(&stats->summaries_failed, index.summaries_failed);
}

static void tell_health(struct kvs_shard *shard)
{
    const struct kvs_health *health = &shard->store.health;
    struct kvs_stats *stats = &shard->stats;
    _Atomic uint64_t *const found[KVS_KINDS] = {
        [KVS_KIND_ROWS] = &stats->bad_rows,           [KVS_KIND_CODES] = &stats->bad_codes,
        [KVS_KIND_CENTROIDS] = &stats->bad_centroids, [KVS_KIND_CELLS] = &stats->bad_cells,
        [KVS_KIND_SUMMARIES] = &stats->bad_summaries, [KVS_KIND_OBJECTS] = &stats->bad_objects,
    };
    _Atomic uint64_t *const mended[KVS_KINDS] = {
        [KVS_KIND_ROWS] = &stats->mended_rows,
        [KVS_KIND_CODES] = &stats->mended_codes,
        [KVS_KIND_CENTROIDS] = &stats->mended_centroids,
        [KVS_KIND_CELLS] = &stats->mended_cells,
        [KVS_KIND_SUMMARIES] = &stats->mended_summaries,
        [KVS_KIND_OBJECTS] = &stats->mended_objects,
    };

    for (unsigned kind = 0; kind < KVS_KINDS; kind++) {
        kvs_stat_set(found[kind], health->found[kind]);
        kvs_stat_set(mended[kind], health->mended[kind]);
    }
    kvs_stat_set(&stats->rows_bad, health->rows_bad);
    kvs_stat_set(&stats->objects_bad, health->objects_bad);
}

static void tell_tier(struct kvs_shard *shard)
{
    const struct kvs_tier_counts *counts = kvs_disk_tier_counts(shard->tier);
    const struct kvs_object_tier_counts *of_objects =
        kvs_object_tier_counts(shard->object_tier);
    struct kvs_stats *stats = &shard->stats;

    kvs_stat_set(&stats->disk_written_bytes,
                 kvs_counted(&counts->written_bytes) + kvs_counted(&of_objects->written_bytes));
    kvs_stat_set(&stats->disk_read_bytes,
                 kvs_counted(&counts->loaded_bytes) + kvs_counted(&of_objects->loaded_bytes));
    kvs_stat_set(&stats->bad_saved_pieces,
                 kvs_counted(&of_objects->lost_pieces) + kvs_counted(&of_objects->bad_pieces));
    kvs_stat_set(&stats->disk_scrub_blocks, kvs_counted(&of_objects->verified_pieces));
    kvs_stat_set(&stats->disk_scrub_bytes, kvs_counted(&of_objects->verified_bytes));
    kvs_stat_set(&stats->disk_scrub_unread, kvs_counted(&of_objects->unread_pieces));
    kvs_stat_set(&stats->bad_saved_blocks, kvs_counted(&of_objects->bad_pieces));
    kvs_stat_set(&stats->mended_saved_blocks, kvs_counted(&of_objects->mended_pieces));
    kvs_stat_set(&stats->lost_saved_blocks, kvs_counted(&of_objects->dropped_pieces));
    kvs_stat_set(&stats->saved_objects, kvs_counted(&of_objects->saved_objects));
    kvs_stat_set(&stats->saved_object_bytes, kvs_counted(&of_objects->saved_bytes));
    kvs_stat_set(&stats->unsaved_objects, kvs_counted(&of_objects->waiting_objects));
    kvs_stat_set(&stats->unsaved_object_bytes, kvs_counted(&of_objects->waiting_bytes));
    kvs_stat_set(&stats->blocks_left, kvs_counted(&counts->left_blocks));
    kvs_stat_set(&stats->blocks_loaded, kvs_counted(&counts->loaded_blocks));
    kvs_stat_set(&stats->rows_let_go_bytes, kvs_counted(&counts->let_go_bytes));
    kvs_stat_set(&stats->rows_moved_bytes, kvs_counted(&counts->moved_bytes));
    kvs_stat_set(&stats->bad_saved_segments,
                 kvs_counted(&counts->lost_segments) + kvs_counted(&counts->bad_segments));
    kvs_stat_set(&stats->bad_saved_columns, kvs_counted(&counts->bad_columns));
    kvs_stat_set(&stats->disk_errors,
                 kvs_counted(&counts->failed) + kvs_counted(&of_objects->failed));
    atomic_store_explicit(&stats->objects_verified_since_us,
                          kvs_object_tier_verified_since(shard->object_tier),
                          memory_order_release);
}

void kvs_shard_tell_stats(struct kvs_shard *shard)
{
    tell_memory(shard);
    tell_index(shard);
    tell_health(shard);
    if (shard->tier != NULL)
        tell_tier(shard);
    for (uint32_t i = 0; i < shard->n_background; i++)
        if (shard->background[i].tell != NULL)
            shard->background[i].tell(shard, shard->background_state[i]);
}
