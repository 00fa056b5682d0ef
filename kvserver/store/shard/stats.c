/* Numbers that others keep, told in the statistics now and then. */
#include "kvserver/store/shard/shard_private.h"

#include "kvserver/store/index/builder.h"

static void tell_memory(struct kv_data *data)
{
    struct kv_stats *stats = &data->stats;
    const struct kv_codebooks *books = &data->codebooks;

    kvs_stat_set(&stats->memory_used, kv_arena_bytes_lent(data->arena));
    kvs_stat_set(&stats->segments, data->heap.n_segments);
    kvs_stat_set(&stats->codebooks, kv_pool_lent(books->pool));
    kvs_stat_set(&stats->summarised, books->rows_summarised);
    kvs_stat_set(&stats->summaries_bytes, books->summaries_bytes);
    kvs_stat_set(&stats->objects, kv_map_count(data->objects.map));
    kvs_stat_set(&stats->object_bytes, data->objects.bytes);
}

static void tell_index(struct kv_data *data)
{
    struct kv_stats *stats = &data->stats;
    struct kv_indexer_stats index;

    kv_indexer_stats(data->indexer, &index);
    kvs_stat_set(&stats->index_jobs, index.n_jobs);
    kvs_stat_set(&stats->index_us, index.worked_us);
    kvs_stat_set(&stats->index_failed, index.failed);
    kvs_stat_set(&stats->codebooks_trained, index.trained);
    kvs_stat_set(&stats->rows_coded, index.rows_coded);
    kvs_stat_set(&stats->rows_summarised, index.rows_summarised);
    kvs_stat_set(&stats->summaries_failed, index.summaries_failed);
}

static void tell_health(struct kv_data *data)
{
    const struct kv_health *health = &data->heap.health;
    struct kv_stats *stats = &data->stats;
    _Atomic uint64_t *const found[KV_KINDS] = {
        [KV_KIND_ROWS] = &stats->bad_rows,           [KV_KIND_CODES] = &stats->bad_codes,
        [KV_KIND_CENTROIDS] = &stats->bad_centroids, [KV_KIND_CELLS] = &stats->bad_cells,
        [KV_KIND_SUMMARIES] = &stats->bad_summaries, [KV_KIND_OBJECTS] = &stats->bad_objects,
    };
    _Atomic uint64_t *const mended[KV_KINDS] = {
        [KV_KIND_ROWS] = &stats->mended_rows,
        [KV_KIND_CODES] = &stats->mended_codes,
        [KV_KIND_CENTROIDS] = &stats->mended_centroids,
        [KV_KIND_CELLS] = &stats->mended_cells,
        [KV_KIND_SUMMARIES] = &stats->mended_summaries,
        [KV_KIND_OBJECTS] = &stats->mended_objects,
    };

    for (unsigned kind = 0; kind < KV_KINDS; kind++) {
        kvs_stat_set(found[kind], health->found[kind]);
        kvs_stat_set(mended[kind], health->mended[kind]);
    }
    kvs_stat_set(&stats->rows_bad, health->rows_bad);
    kvs_stat_set(&stats->objects_bad, health->objects_bad);
}

void kv_data_tell_stats(struct kv_data *data)
{
    tell_memory(data);
    tell_index(data);
    tell_health(data);
    for (uint32_t i = 0; i < data->n_background; i++)
        if (data->background[i].tell != NULL)
            data->background[i].tell(data, data->background_state[i]);
}
