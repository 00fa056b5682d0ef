/* index: makes codes for the committed rows of a session.
 *
 *   begin ..... checks the request; waits for the rows to be committed
 *   run ....... where an earlier process may have made codes: one unit per slice, has jobs look for
 *               them, and waits for these jobs; then one unit per slice: its chapters become index
 *               jobs (builder.h); then some blocks per slice: replies when no job is left, or at once if the client did not
 *               ask to wait
 *   wake ...... a job has ended: looks again
 *
 * A job that makes codes needs its rows in memory from the beginning: where some are absent, the request asks
 * for all rows of its units, and waits.  Where all have their codes already, it needs none.
 */
#include "kvserver/base/slice.h"
#include "kvserver/store/index/builder.h"
#include "kvserver/store/index/kept.h"
#include "kvserver/store/ops/need_rows.h"
#include "kvserver/store/ops/ops.h"
#include "kvserver/store/ops/parse_units.h"

#include <stdlib.h>
#include <string.h>

enum {
    LOOK_BLOCKS = 256, /* between two looks at the clock: some us */
};

/* How far a request has looked at what its units have. */
struct progress {
    uint32_t n_asked;     /* units that jobs look for codes of */
    bool has_jobs;        /* there are such jobs */
    bool recall_is_over;  /* they have ended */
    uint32_t unit, block; /* those before have no jobs */
    bool counts;          /* none has: counts codes and codebooks */
    bool
        is_again; /* jobs were queued once more: those of others may have ended without codes */
    struct kvs_index_look look;
};

/* One per request, with the same index. */
void *kvs_op_index_open(struct kvs_shard *shard)
{
    return calloc(kv_pool_size(shard->requests), sizeof(struct progress));
}

void kvs_op_index_close(void *state)
{
    free(state);
}

static struct progress *progress_of(const struct kvs_request *request)
{
    struct progress *all = request->shard->op_state[KV_OP_INDEX];

    return &all[kv_pool_index(request->shard->requests, request)];
}

static const struct kv_wire_index *index_of(const struct kvs_request *request)
{
    return (const struct kv_wire_index *)(const void *)request->body;
}

static struct kvs_index_plan plan_of(const struct kvs_request *request, uint32_t unit)
{
    const struct kv_wire_index *index = index_of(request);
    const struct kv_layer_schema *layer = kvs_unit_layer(request, unit);

    return (struct kvs_index_plan){
        .chapter_blocks = index->chapter_blocks,
        .shape = {.d = layer->d_k, .m = index->m, .bits = index->bits},
        .rotates = (index->flags & KV_WIRE_INDEX_ROTATES) != 0,
        .copies = (index->flags & KV_WIRE_INDEX_COPIES) != 0,
        .type = (enum kv_key_type)layer->dtype,
        .d_v = layer->d_v,
        .summaries_bits = kvs_summaries_bits(index->summaries),
        .summaries_rows = kvs_summaries_rows(index->summary_blocks),
        .iterations = index->iterations,
        .budget_us = index->budget_us,
        .seed = index->seed,
    };
}

/* Returns false after failing the request. */
static bool check(struct kvs_request *request)
{
    const struct kv_wire_header *header = &request->header;
    const struct kv_wire_index *index = index_of(request);
    const struct kv_wire_unit *units = kvs_units(request);

    if (!kvs_units_are_there(request) || header->body_bytes != kvs_units_bytes(request))
        return kvs_fail_units(request);
    if (header->token_begin != 0 || header->token_count > request->session->tokens_max ||
        (index->flags & ~(uint32_t)KV_WIRE_INDEX_FLAGS) != 0 ||
        (index->summaries != 0 && kvs_summaries_bits(index->summaries) == 0) ||
        kvs_summaries_rows(index->summary_blocks) == 0 || index->iterations == 0 ||
        index->iterations > KV_KMEANS_ITERATIONS_MAX ||
        (index->chapter_blocks > 0 && index->chapter_blocks < KV_CHAPTER_BLOCKS_MIN) ||
        index->chapter_blocks > KV_TOKENS_MAX / KV_BLOCK_TOKENS) {
        kvs_request_fail(request, KV_INVALID,
                         "index: %u tokens (at most %u), chapters of %u blocks, %u iterations, "
                         "flags 0x%x, %u summaries per %u blocks: value out of range",
                         header->token_count, request->session->tokens_max,
                         index->chapter_blocks, index->iterations, index->flags,
                         index->summaries, index->summary_blocks);
        return false;
    }
    for (uint32_t i = 0; i < header->n_units; i++) {
        if (!kvs_check_unit_is_known(request, i) || !kvs_check_unit_has_no_ids(request, i) ||
            !kvs_check_unit_is_here(request, i))
            return false;
        struct kvs_index_plan plan = plan_of(request, i);
        if (!kv_key_type_valid(plan.type) || plan.shape.d > KVS_CODEBOOK_DIM_MAX ||
            !kv_pq_shape_valid(&plan.shape)) {
            kvs_request_fail(
                request, KV_UNSUPPORTED,
                "index: layer %u: keys of type %u with %u elements, %u subspaces of "
                "%u bits: codes not supported",
                units[i].layer, plan.type, plan.shape.d, plan.shape.m, plan.shape.bits);
            return false;
        }
        if (plan.rotates && plan.shape.d > KV_ROTATION_DIM_MAX) {
            kvs_request_fail(request, KV_UNSUPPORTED,
                             "index: layer %u: keys of %u elements: codes of rotated keys need "
                             "at most %d",
                             units[i].layer, plan.shape.d, KV_ROTATION_DIM_MAX);
            return false;
        }
        const struct kv_summary_shape summaries = {plan.type, plan.shape.d, plan.d_v,
                                                   plan.summaries_bits, plan.summaries_rows};
        if (index->summaries != 0 && !kv_summary_shape_valid(&summaries)) {
            kvs_request_fail(request, KV_UNSUPPORTED,
                             "index: layer %u: values of %u elements: summaries not supported",
                             units[i].layer, plan.d_v);
            return false;
        }
    }
    return true;
}

static void send_reply(struct kvs_request *request, const struct kv_wire_index_result *indexed)
{
    request->reply.layer = kvs_units(request)[0].layer;
    memcpy(request->small, indexed, sizeof(*indexed)); /* `indexed` is copied: `small` may hold
                                                        * the request's body */
    request->reply.snapshot = request->header.token_count;
    kvs_request_reply(request, request->small, sizeof(*indexed), NULL, 0);
}

/* Waits for a job.  If the session has none, it is another's, of a session with the same
 * segments. */
static void wait_for_job(struct kvs_request *request)
{
    struct kvs_indexer *indexer = request->shard->indexer;

    if (kvs_indexer_n_jobs(indexer, request->session->index) == 0)
        kvs_indexer_watch(indexer, request->session->index);
    kvs_request_wait(request, UINT32_MAX);
}

/* Looks for a job at the next blocks, from where it found one the last time, and waits for it if
 * it finds one. */
static void find_job(struct kvs_request *request, struct progress *progress)
{
    const uint32_t n_blocks = kvs_blocks_for(request->header.token_count);
    const uint32_t left = n_blocks - progress->block;
    const uint32_t end = progress->block + (left < LOOK_BLOCKS ? left : LOOK_BLOCKS);

    progress->block =
        kvs_index_find_pending(kvs_unit_at(request, progress->unit), progress->block, end);
    if (progress->block < end) {
        wait_for_job(request);
    } else if (end == n_blocks) {
        progress->unit++;
        progress->block = 0;
    }
}

static void reply_look(struct kvs_request *request, const struct kvs_index_look *look)
{
    const struct kv_wire_index_result indexed = {
        .rows = (uint64_t)request->header.n_units * request->header.token_count,
        .rows_coded = look->n_coded,
        .n_found = look->n_old,
        .n_trained = look->n_new,
        .n_pending = look->n_pending,
        .iterations = look->iterations,
        .train_us = look->train_us,
    };

    send_reply(request, &indexed);
}

/* Counts the next blocks, of one unit; replies after the last. */
static void count_blocks(struct kvs_request *request, struct progress *progress)
{
    struct kvs_index_look *look = &progress->look;
    const bool is_done =
        kvs_index_look_on(&request->shard->codebooks, kvs_unit_at(request, progress->unit),
                          request->header.token_count, request->serial, LOOK_BLOCKS, look);

    if (look->n_pending > 0 && (index_of(request)->flags & KV_WIRE_INDEX_WAIT)) {
        /* Another request has scheduled more. */
        *progress =
            (struct progress){.recall_is_over = true, .is_again = true, .unit = progress->unit};
        wait_for_job(request);
    } else if (is_done && ++progress->unit == request->header.n_units) {
        reply_look(request, look);
    }
}

/* All units have been divided into jobs: replies, or waits for them, a slice at a time.  Jobs
 * of a session end in the order of the units, so what was ready is not checked again until all
 * is.  Returns true if there is more to do. */
static bool look(struct kvs_request *request)
{
    struct progress *progress = progress_of(request);
    struct kv_slice slice = kv_slice_begin(request->shard->clock, 1);

    do {
        if (progress->counts || !(index_of(request)->flags & KV_WIRE_INDEX_WAIT)) {
            count_blocks(request, progress);
        } else if (progress->unit < request->header.n_units) {
            find_job(request, progress);

        } else if (!progress->is_again && kvs_kept_has_tier(&request->shard->codebooks)) {
            *progress = (struct progress){.recall_is_over = true, .is_again = true};
            request->cursor_unit = 0;
            return true;
        } else {
            progress->counts = true;
            progress->unit = 0;
        }
    } while (request->state == KVS_REQUEST_BEGUN && !kv_slice_over(&slice));
    return request->state == KVS_REQUEST_BEGUN;
}

void kvs_op_index_wake(struct kvs_request *request)
{
    if (!kvs_request_check_current(request))
        return;
    if (kvs_units_committed(request) < request->header.token_count)
        kvs_request_wait(request, request->header.token_count);
    else if (request->cursor_unit < request->header.n_units || look(request))
        kvs_request_enqueue(request);
}

/* Has codes taken that need no rows, before rows are asked for.  Returns true if there is more to do. */
static bool take_kept(struct kvs_request *request, struct progress *progress)
{
    struct kvs_shard *shard = request->shard;

    if (progress->n_asked < request->header.n_units && kvs_pages_are_short(shard->pages) &&
        kvs_indexer_n_jobs(shard->indexer, request->session->index) > 0) {
        kvs_request_wait(request, UINT32_MAX); /* what jobs are of stays in memory */
    } else if (progress->n_asked < request->header.n_units) {
        const struct kvs_index_plan plan = plan_of(request, progress->n_asked);

        if (kvs_index_schedule_recall(shard->indexer, kvs_unit_at(request, progress->n_asked),
                                      request->header.token_count, &plan))
            progress->has_jobs = true;
        progress->n_asked++;
    } else if (progress->has_jobs && progress->unit < request->header.n_units) {
        find_job(request, progress);
    } else {
        *progress = (struct progress){.recall_is_over = true};
    }
    return request->state == KVS_REQUEST_BEGUN;
}

bool kvs_op_index_run(struct kvs_request *request)
{
    struct progress *progress = progress_of(request);
    struct kvs_index_plan plan;
    kv_status_t status;

    if (kvs_request_stale(request)) {
        kvs_op_index_wake(request);
        return false;
    }
    if (!progress->recall_is_over)
        return take_kept(request, progress);
    if (request->cursor_unit == request->header.n_units)
        return look(request);
    plan = plan_of(request, request->cursor_unit);
    status =
        kvs_index_schedule(request->shard->indexer, kvs_unit_at(request, request->cursor_unit),
                           request->header.token_count, &plan);
    /* The second time it is not worth waiting for memory. */
    if (progress->is_again && status != KV_OK &&
        (status != KV_NOT_READY || kvs_pages_are_short(request->shard->pages))) {
        request->cursor_unit++;
        return true;
    }
    if (status == KV_NOT_READY && kvs_pages_are_short(request->shard->pages) &&
        kvs_indexer_n_jobs(request->shard->indexer, request->session->index) > 0) {
        /* Jobs pin their rows, and those of all units would leave no memory for what they make. */
        kvs_request_wait(request, UINT32_MAX);
        return false;
    }
    if (status == KV_NOT_READY) {
        const struct kvs_segment *missing =
            kvs_need_unit(request, request->cursor_unit, request->header.token_count);

        if (missing != NULL)
            kvs_request_wait_for_segment(request, missing);
        return missing == NULL;
    }
    if (status == KV_NO_MEMORY) {
        /* For the job's list of blocks; memory for the codebook is allocated when the job runs. */
        kvs_request_fail_full(request, kvs_blocks_for(request->header.token_count) *
                                           sizeof(struct kvs_block *));
        return false;
    }
    if (status != KV_OK) {
        kvs_request_fail(request, status,
                         "index: layer %u head %u: too many index jobs are queued",
                         kvs_units(request)[request->cursor_unit].layer,
                         kvs_units(request)[request->cursor_unit].kv_head);
        return false;
    }
    request->cursor_unit++;
    return true;
}

void kvs_op_index_begin(struct kvs_request *request)
{
    if (!check(request))
        return;
    /* Newer codebooks were made for this request, or while it waited. */
    request->serial = request->shard->codebooks.serial;
    *progress_of(request) =
        (struct progress){.recall_is_over = !kvs_kept_has_tier(&request->shard->codebooks)};
    kvs_op_index_wake(request);
}
