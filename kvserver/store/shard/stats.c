/* Numbers that others keep, told in the statistics now and then. */
#include "kvserver/store/shard/shard_private.h"

#include "kvserver/store/index/builder.h"
#include "kvserver/store/ops/scrub.h"

static void tell(_Atomic uint64_t *number, uint64_t value)
{
    atomic_store_explicit(number, value, memory_order_relaxed);
}

static void tell_memory(struct kv_data *data)
{
    struct kv_stats *stats = &data->stats;
    const struct kv_codebooks *books = &data->codebooks;

    tell(&stats->memory_lent, kv_arena_bytes_lent(data->arena));
    tell(&stats->segments, data->heap.n_segments);
    tell(&stats->codebooks, kv_pool_lent(books->pool));
    tell(&stats->summarised, books->rows_summarised);
    tell(&stats->summaries_bytes, books->summaries_bytes);
    tell(&stats->objects, kv_map_count(data->objects.map));
    tell(&stats->object_bytes, data->objects.bytes);
}

static void tell_index(struct kv_data *data)
{
    struct kv_stats *stats = &data->stats;
    struct kv_indexer_stats index;

    kv_indexer_stats(data->indexer, &index);
    tell(&stats->index_jobs, index.n_jobs);
    tell(&stats->index_us, index.worked_us);
    tell(&stats->index_failed, index.failed);
    tell(&stats->codebooks_trained, index.trained);
    tell(&stats->rows_coded, index.rows_coded);
    tell(&stats->rows_summarised, index.rows_summarised);
    tell(&stats->summaries_failed, index.summaries_failed);
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
    struct kv_scrub_progress progress;

    kv_scrub_progress(data->scrub, &progress);
    for (unsigned kind = 0; kind < KV_KINDS; kind++) {
        tell(found[kind], health->found[kind]);
        tell(mended[kind], health->mended[kind]);
    }
    tell(&stats->rows_bad, health->rows_bad);
    tell(&stats->objects_bad, health->objects_bad);
    tell(&stats->scrub_bytes, progress.bytes);
    tell(&stats->scrub_passes, progress.n_passes);
    tell(&stats->scrub_phase, progress.phase);
    tell(&stats->scrub_session, progress.session);
    tell(&stats->scrub_pass_bytes, progress.pass_bytes);
    tell(&stats->scrub_last_us, progress.last_pass_us);
    tell(&stats->scrub_last_bytes, progress.last_pass_bytes);
}

void kv_data_tell_stats(struct kv_data *data)
{
    tell_memory(data);
    tell_index(data);
    tell_health(data);
}
