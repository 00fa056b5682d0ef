/* pipeline_private.h - what the files of pipeline.h share: the way from entry to entry and from unit
 * to unit (pipeline.c), and the stages of each step (pipeline_step_1.c, pipeline_step_2.c, which has
 * the cut, pipeline_step_3.c).
 *
 * Threads: the data thread.
 */
#ifndef KV_KVSERVER_STORE_QUERY_PIPELINE_PRIVATE_H
#define KV_KVSERVER_STORE_QUERY_PIPELINE_PRIVATE_H

#include "kvserver/store/query/pipeline.h"

/* Returns the layer of the current unit. */
static inline const struct kv_layer_schema *
kvs_query_layer(const struct kvs_query_pipeline *pipeline, const struct kvs_query_entry *entry)
{
    return &entry->input.layers[entry->input.named[pipeline->unit].layer];
}

static inline struct kvs_query_entry *kvs_query_current(struct kvs_query_pipeline *pipeline)
{
    return &pipeline->entries[pipeline->entry];
}

/* The query would have read a row that is bad, or away: it fails.  Returns false. */
static inline bool kvs_query_fail_bad(struct kvs_query_pipeline *pipeline, uint32_t token)
{
    pipeline->bad = token;
    return false;
}

static inline bool kvs_query_wants_weights(const struct kvs_query_entry *entry)
{
    return entry->input.query->flags & KV_WIRE_WEIGHTS;
}

/* Returns whether the entry takes part in the stage, which is CUT or RERANK. */
static inline bool kvs_query_takes_part(const struct kvs_query_entry *entry,
                                        enum kvs_query_stage stage)
{
    return entry->is_active &&
           (stage == KVS_QUERY_CUT ? entry->is_cut : entry->is_reranked && !entry->lacks_rows);
}

/* Returns the stage that follows when the selected rows are known. */
static inline enum kvs_query_stage kvs_query_selected_stage(const struct kvs_query_entry *entry)
{
    return entry->input.query->answer == KV_ANSWER_ATTEND ? KVS_QUERY_ATTEND : KVS_QUERY_GATHER;
}

/* ---- pipeline.c ---- */

/* Begins step 1 of the first entry from `from` on, or the next step of all. */
void kvs_query_begin_step_1(struct kvs_query_pipeline *pipeline, uint32_t from);
/* Begins to select among the scores of copies, of the first entry from `from` on that has a cut, or
 * says what all need. */
void kvs_query_begin_select_cut(struct kvs_query_pipeline *pipeline, uint32_t from);
/* Begins to say what the first entry from `from` on needs that is to be asked, or step 2 of all. */
void kvs_query_begin_need(struct kvs_query_pipeline *pipeline, uint32_t from);
/* Begins to select rows, or step 3, of the first entry from `from` on, or the next unit. */
void kvs_query_begin_step_3(struct kvs_query_pipeline *pipeline, uint32_t from);
/* The entry is active no more. */
void kvs_query_deactivate(struct kvs_query_pipeline *pipeline, struct kvs_query_entry *entry);

/* ---- stages: each does a piece of work; false: the row of token `bad` is bad, or away ---- */

bool kvs_query_stage_unit(struct kvs_query_pipeline *pipeline);
bool kvs_query_stage_bytes(struct kvs_query_pipeline *pipeline);
bool kvs_query_stage_score(struct kvs_query_pipeline *pipeline);
bool kvs_query_stage_select_candidates(struct kvs_query_pipeline *pipeline);
bool kvs_query_stage_expand(struct kvs_query_pipeline *pipeline);
bool kvs_query_stage_cut(struct kvs_query_pipeline *pipeline);
bool kvs_query_stage_select_cut(struct kvs_query_pipeline *pipeline);
bool kvs_query_stage_need(struct kvs_query_pipeline *pipeline);
bool kvs_query_stage_rerank(struct kvs_query_pipeline *pipeline);
bool kvs_query_stage_select(struct kvs_query_pipeline *pipeline);
bool kvs_query_stage_gather(struct kvs_query_pipeline *pipeline);
bool kvs_query_stage_attend(struct kvs_query_pipeline *pipeline);
bool kvs_query_stage_estimate(struct kvs_query_pipeline *pipeline);
bool kvs_query_stage_lacks(struct kvs_query_pipeline *pipeline);

#endif
