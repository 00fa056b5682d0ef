/* What a data thread does in the background, first things first: the scrub, which is told how
 * little it may do, takes turns with what follows; codebooks; looks at how good they are. */
#include "kvserver/store/index/builder.h"
#include "kvserver/store/ops/ops.h"
#include "kvserver/store/ops/query.h"
#include "kvserver/store/ops/scrub.h"

static void *scrub_open(struct kv_data *data, const struct kv_data_setup *setup)
{
    return kv_scrub_create(data, setup->scrub_bytes);
}

static void scrub_close(void *state)
{
    kv_scrub_destroy(state);
}

static bool scrub_step(struct kv_data *data, void *state)
{
    (void)data;
    return kv_scrub_step(state);
}

static void scrub_tell(struct kv_data *data, const void *state)
{
    struct kv_stats *stats = &data->stats;
    struct kv_scrub_progress progress;

    kv_scrub_progress(state, &progress);
    kvs_stat_set(&stats->scrub_bytes, progress.bytes);
    kvs_stat_set(&stats->scrub_passes, progress.n_passes);
    kvs_stat_set(&stats->scrub_phase, progress.phase);
    kvs_stat_set(&stats->scrub_session, progress.session);
    kvs_stat_set(&stats->scrub_pass_bytes, progress.pass_bytes);
    kvs_stat_set(&stats->scrub_last_us, progress.last_pass_us);
    kvs_stat_set(&stats->scrub_last_bytes, progress.last_pass_bytes);
}

/* Whoever waits for codes looks again when a job has ended. */
static bool index_step(struct kv_data *data, void *state)
{
    (void)state;
    if (!kv_indexer_step(data->indexer))
        return false;
    if (kv_indexer_take_ended(data->indexer))
        for (uint32_t i = 0; i < data->n_parts; i++)
            kv_part_wake(data, &data->parts[i], UINT32_MAX);
    return true;
}

static bool recall_step(struct kv_data *data, void *state)
{
    (void)state;
    return kv_recall_step(kvs_query_queue_of(data)->recall);
}

const struct kvs_background_row kvs_background[KVS_BACKGROUND_COUNT] = {
    [KVS_BACKGROUND_SCRUB] = {.every = 2,
                              .open = scrub_open,
                              .close = scrub_close,
                              .step = scrub_step,
                              .tell = scrub_tell},
    [KVS_BACKGROUND_INDEX] = {.every = 1, .step = index_step},
    [KVS_BACKGROUND_RECALL] = {.every = 1, .step = recall_step},
};
