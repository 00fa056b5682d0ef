/* index: make codes for what a session has.
 *
 *   begin ..... checked; waits for the rows
 *   run ....... a unit per slice: its chapters become jobs (builder.h)
 *   wake ...... when a job has ended: answered once none is left, if the asker waits for that
 */
#include "kvserver/store/index/builder.h"
#include "kvserver/store/ops/ops.h"
#include "kvserver/store/ops/parse_units.h"

#include <string.h>

static const struct kv_wire_index *index_of(const struct kv_work *work)
{
    return (const struct kv_wire_index *)(const void *)work->body;
}

static bool is_ready(const struct kv_work *work)
{
    for (uint32_t i = 0; i < work->request.n_units; i++)
        if (kvs_unit_at(work, i)->committed < work->request.token_count)
            return false;
    return true;
}

static struct kv_index_plan plan_of(const struct kv_work *work, uint32_t unit)
{
    const struct kv_wire_index *index = index_of(work);
    const struct kv_layer_schema *layer = kvs_unit_layer(work, unit);

    return (struct kv_index_plan){
        .chapter_blocks = index->chapter_blocks,
        .shape = {.d = layer->d_k, .m = index->m, .bits = index->bits},
        .type = (enum kv_key_type)layer->dtype,
        .d_v = layer->d_v,
        .rest_bits = kv_summaries_bits(index->summaries),
        .iterations = index->iterations,
        .budget_us = index->budget_us,
        .seed = index->seed,
    };
}

/* On failure the work has failed. */
static bool check(struct kv_work *work)
{
    const struct kv_wire_header *request = &work->request;
    const struct kv_wire_index *index = index_of(work);
    const struct kv_wire_unit *units = kvs_units(work);

    if (!kvs_units_are_there(work) || request->body_bytes != kvs_units_bytes(work))
        return kvs_fail_units(work);
    if (request->token_begin != 0 || request->token_count > work->part->tokens_max ||
        index->wait > 1 ||
        (index->summaries != 0 && kv_summaries_bits(index->summaries) == 0) ||
        index->iterations == 0 || index->iterations > KV_KMEANS_ITERATIONS_MAX ||
        (index->chapter_blocks > 0 && index->chapter_blocks < KV_CHAPTER_BLOCKS_MIN) ||
        index->chapter_blocks > KV_TOKENS_MAX / KV_BLOCK_TOKENS) {
        kv_work_fail(work, KV_INVALID,
                     "index: %u tokens (at most %u), chapters of %u blocks, %u iterations, "
                     "wait %u, rest %u: out of bounds",
                     request->token_count, work->part->tokens_max, index->chapter_blocks,
                     index->iterations, index->wait, index->summaries);
        return false;
    }
    for (uint32_t i = 0; i < request->n_units; i++) {
        if (!kvs_check_unit_is_known(work, i) || !kvs_check_unit_has_no_ids(work, i) ||
            !kvs_check_unit_is_here(work, i))
            return false;
        struct kv_index_plan plan = plan_of(work, i);
        if (!kv_key_type_valid(plan.type) || plan.shape.d > KV_CODEBOOK_DIM_MAX ||
            !kv_pq_shape_valid(&plan.shape)) {
            kv_work_fail(work, KV_UNSUPPORTED,
                         "index: layer %u: keys of type %u with %u elements, %u subspaces of "
                         "%u bits: no such codes",
                         units[i].layer, plan.type, plan.shape.d, plan.shape.m,
                         plan.shape.bits);
            return false;
        }
        const struct kv_rest_shape rest = {plan.type, plan.shape.d, plan.d_v, plan.rest_bits};
        if (index->summaries != 0 && !kv_rest_shape_valid(&rest)) {
            kv_work_fail(work, KV_UNSUPPORTED,
                         "index: layer %u: values of %u elements: no summaries of such rows",
                         units[i].layer, plan.d_v);
            return false;
        }
    }
    return true;
}

static void answer(struct kv_work *work, const struct kv_wire_index_result *indexed)
{
    work->reply.layer = kvs_units(work)[0].layer;
    memcpy(work->small, indexed, sizeof(*indexed)); /* where the request may be */
    work->reply.snapshot = work->request.token_count;
    kv_work_answer(work, work->small, sizeof(*indexed), NULL, 0);
}

static struct kv_index_look look_at(const struct kv_work *work, uint32_t i)
{
    struct kv_index_look look;

    kv_index_look(&work->data->codebooks, kvs_unit_at(work, i), work->request.token_count,
                  work->serial, &look);
    return look;
}

/* All units have been cut.  Jobs end in the order of the units: those that were ready once are
 * not looked at again before all are. */
static void look(struct kv_work *work)
{
    struct kv_wire_index_result indexed = {0};
    const uint32_t tokens = work->request.token_count;
    const bool waits = index_of(work)->wait;

    while (waits && work->cursor_row < work->request.n_units &&
           look_at(work, work->cursor_row).n_pending == 0)
        work->cursor_row++;
    if (waits && work->cursor_row < work->request.n_units) {
        kv_work_wait(work, UINT32_MAX);
        return;
    }
    for (uint32_t i = 0; i < work->request.n_units; i++) {
        struct kv_index_look look = look_at(work, i);

        if (look.n_pending > 0 && waits) {
            work->cursor_row = i; /* somebody else asked for more */
            kv_work_wait(work, UINT32_MAX);
            return;
        }
        indexed.rows += tokens;
        indexed.rows_coded += look.n_coded;
        indexed.n_found += look.n_old;
        indexed.n_trained += look.n_new;
        indexed.n_pending += look.n_pending;
        indexed.iterations += look.iterations;
        indexed.train_us += look.train_us;
    }
    answer(work, &indexed);
}

void kv_op_index_wake(struct kv_work *work)
{
    if (kv_work_stale(work)) {
        kv_work_fail(work, KV_STALE, "index: session %u was changed meanwhile",
                     work->request.session_index);
    } else if (!is_ready(work)) {
        kv_work_wait(work, work->request.token_count);
    } else if (work->cursor_unit < work->request.n_units) {
        kv_work_queue(work);
    } else {
        look(work);
    }
}

bool kv_op_index_run(struct kv_work *work)
{
    struct kv_index_plan plan;
    kv_status_t status;

    if (kv_work_stale(work)) {
        kv_op_index_wake(work);
        return false;
    }
    if (work->cursor_unit == work->request.n_units) {
        look(work);
        return false;
    }
    plan = plan_of(work, work->cursor_unit);
    status = kv_index_cut(work->data->indexer, kvs_unit_at(work, work->cursor_unit),
                          work->request.token_count, &plan);
    if (status != KV_OK) {
        kv_work_fail(work, status, "index: layer %u head %u: %s",
                     kvs_units(work)[work->cursor_unit].layer,
                     kvs_units(work)[work->cursor_unit].kv_head,
                     status == KV_BUSY ? "too many chapters wait already"
                                       : "the store's memory is full");
        return false;
    }
    work->cursor_unit++;
    return true;
}

void kv_op_index_begin(struct kv_work *work)
{
    if (!check(work))
        return;
    /* What is newer was made for this request, or while it waited. */
    work->serial = work->data->codebooks.serial;
    kv_op_index_wake(work);
}
