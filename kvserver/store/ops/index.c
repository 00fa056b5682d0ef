/* index: makes codes for the committed rows of a session.
 *
 *   begin ..... checks the request; waits for the rows
 *   run ....... one unit per slice: its chapters become index jobs (builder.h)
 *   wake ...... a job has ended: replies when none is left, if the client asked to wait
 */
#include "kvserver/store/index/builder.h"
#include "kvserver/store/ops/ops.h"
#include "kvserver/store/ops/parse_units.h"

#include <string.h>

static const struct kv_wire_index *index_of(const struct kvs_request *request)
{
    return (const struct kv_wire_index *)(const void *)request->body;
}

static bool is_ready(const struct kvs_request *request)
{
    for (uint32_t i = 0; i < request->header.n_units; i++)
        if (kvs_unit_at(request, i)->committed < request->header.token_count)
            return false;
    return true;
}

static struct kvs_index_plan plan_of(const struct kvs_request *request, uint32_t unit)
{
    const struct kv_wire_index *index = index_of(request);
    const struct kv_layer_schema *layer = kvs_unit_layer(request, unit);

    return (struct kvs_index_plan){
        .chapter_blocks = index->chapter_blocks,
        .shape = {.d = layer->d_k, .m = index->m, .bits = index->bits},
        .type = (enum kv_key_type)layer->dtype,
        .d_v = layer->d_v,
        .summaries_bits = kvs_summaries_bits(index->summaries),
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
        index->wait > 1 ||
        (index->summaries != 0 && kvs_summaries_bits(index->summaries) == 0) ||
        index->iterations == 0 || index->iterations > KV_KMEANS_ITERATIONS_MAX ||
        (index->chapter_blocks > 0 && index->chapter_blocks < KV_CHAPTER_BLOCKS_MIN) ||
        index->chapter_blocks > KV_TOKENS_MAX / KV_BLOCK_TOKENS) {
        kvs_request_fail(request, KV_INVALID,
                         "index: %u tokens (at most %u), chapters of %u blocks, %u iterations, "
                         "wait %u, summaries %u: value out of range",
                         header->token_count, request->session->tokens_max,
                         index->chapter_blocks, index->iterations, index->wait,
                         index->summaries);
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
        const struct kv_summary_shape summaries = {plan.type, plan.shape.d, plan.d_v,
                                                   plan.summaries_bits};
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

static struct kvs_index_look look_at(const struct kvs_request *request, uint32_t i)
{
    struct kvs_index_look look;

    kvs_index_get_look(&request->shard->codebooks, kvs_unit_at(request, i),
                       request->header.token_count, request->serial, &look);
    return look;
}

/* All units have been divided into jobs: replies, or waits for them.  Jobs end in the order of
 * the units, so units that were ready are not checked again until all are. */
static void look(struct kvs_request *request)
{
    struct kv_wire_index_result indexed = {0};
    const uint32_t tokens = request->header.token_count;
    const bool waits = index_of(request)->wait;

    while (waits && request->cursor_row < request->header.n_units &&
           look_at(request, request->cursor_row).n_pending == 0)
        request->cursor_row++;
    if (waits && request->cursor_row < request->header.n_units) {
        kvs_request_wait(request, UINT32_MAX);
        return;
    }
    for (uint32_t i = 0; i < request->header.n_units; i++) {
        struct kvs_index_look look = look_at(request, i);

        if (look.n_pending > 0 && waits) {
            request->cursor_row = i; /* another request has scheduled more */
            kvs_request_wait(request, UINT32_MAX);
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
    send_reply(request, &indexed);
}

void kvs_op_index_wake(struct kvs_request *request)
{
    if (kvs_request_stale(request)) {
        kvs_request_fail(request, KV_STALE,
                         "index: session %u changed while the request was waiting",
                         request->header.session_index);
    } else if (!is_ready(request)) {
        kvs_request_wait(request, request->header.token_count);
    } else if (request->cursor_unit < request->header.n_units) {
        kvs_request_enqueue(request);
    } else {
        look(request);
    }
}

bool kvs_op_index_run(struct kvs_request *request)
{
    struct kvs_index_plan plan;
    kv_status_t status;

    if (kvs_request_stale(request)) {
        kvs_op_index_wake(request);
        return false;
    }
    if (request->cursor_unit == request->header.n_units) {
        look(request);
        return false;
    }
    plan = plan_of(request, request->cursor_unit);
    status =
        kvs_index_schedule(request->shard->indexer, kvs_unit_at(request, request->cursor_unit),
                           request->header.token_count, &plan);
    if (status != KV_OK) {
        kvs_request_fail(request, status, "index: layer %u head %u: %s",
                         kvs_units(request)[request->cursor_unit].layer,
                         kvs_units(request)[request->cursor_unit].kv_head,
                         status == KV_BUSY ? "too many index jobs are queued" : "store full");
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
    kvs_op_index_wake(request);
}
