/* Index: builds codes for the keys of a session's rows.  Each data thread is sent one message
 * with all of its units, or several if they do not fit. */
#include "client/connection.h"
#include "client/dispatch.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/loop.h"
#include "client/op.h"
#include "client/ops/summary_rows.h"
#include "client/peer.h"
#include "client/request.h"
#include "client/session.h"
#include "client/state.h"
#include "proto/kv_wire.h"

#include <assert.h>
#include <string.h>

enum {
    /* Building codes takes long, and a resent request counts fewer codebooks as trained: resend
     * less often. */
    WAIT_RETRIES = 8,
};

struct index_part {
    struct kv_index_options index; /* n_layers is not 0 any more */
    struct kv_index_result sum;
};
static_assert(sizeof(struct index_part) <= KVC_OP_STATE_BYTES, "an operation has room for it");

static struct index_part *index_of(const struct kv_op *op)
{
    return kvc_op_state(op);
}

static uint32_t layers_end(const struct index_part *part)
{
    return part->index.layer_begin + part->index.n_layers;
}

/* Advances to the first unit, at or after (layer, head), that the connection owns. */
static bool seek(const struct kv_op *op,
                 const struct kvc_connection *connection,
                 uint32_t *layer,
                 uint32_t *head)
{
    const struct kv_session *session = op->session;

    for (; *layer < layers_end(index_of(op)); ++*layer, *head = 0)
        for (; *head < session->schema.layers[*layer].n_kv_heads; ++*head)
            if (kvc_session_connection(session, *layer, *head) == connection)
                return true;
    return false;
}

static kv_status_t build(struct kvc_subop *subop, struct kvc_request *request)
{
    const struct kv_op *op = subop->op;
    const struct kv_index_options *index = &index_of(op)->index;
    const struct kv_wire_index asked = {
        .chapter_blocks = index->chapter_blocks,
        .m = (uint16_t)index->m,
        .bits = (uint16_t)index->bits,
        .iterations = index->iterations,
        .budget_us = index->budget_us,
        .seed = index->seed,
        .flags = (index->wait ? KV_WIRE_INDEX_WAIT : 0) |
                 (index->rotates ? KV_WIRE_INDEX_ROTATES : 0) |
                 (index->copies ? KV_WIRE_INDEX_COPIES : 0),
        .summaries = (uint16_t)index->summaries,
        .summary_blocks = kvc_summary_blocks(index->summaries, index->summary_rows),
    };
    struct kv_wire_unit units[KV_WIRE_UNITS_MAX];
    uint32_t layer = subop->layer, head = subop->head;
    uint32_t n_units = 0;
    bool more = true;

    while (more && n_units < KV_WIRE_UNITS_MAX) {
        units[n_units++] =
            (struct kv_wire_unit){.layer = (uint16_t)layer, .kv_head = (uint16_t)head};
        head++;
        more = seek(op, subop->connection, &layer, &head);
    }
    request->body_bytes = sizeof(asked) + n_units * sizeof(units[0]);
    if (!kvc_request_message(request, request->body_bytes))
        return KV_BUSY;
    memcpy(request->message->body, &asked, sizeof(asked));
    memcpy(request->message->body + sizeof(asked), units, n_units * sizeof(units[0]));
    request->header.op = KV_OP_INDEX;
    request->header.n_units = n_units;
    request->header.layer = units[0].layer;
    request->header.token_count = index->tokens;
    request->header.snapshot = index->tokens;
    if (index->wait)
        request->retry_after_us *= WAIT_RETRIES;
    subop->layer = layer;
    subop->head = head;
    subop->finished = !more;
    return KV_OK;
}

static void start(struct kv_op *op)
{
    kvc_connections_unmark(op->client);
    for (uint32_t layer = index_of(op)->index.layer_begin; layer < layers_end(index_of(op));
         layer++) {
        for (uint32_t head = 0; head < op->session->schema.layers[layer].n_kv_heads; head++) {
            if (!kvc_op_ask_unit(op, layer, head, 0))
                return;
        }
    }
}

/* Returns the invalid field of a result, or NULL.  A unit has at most one codebook per block.
 */
static const char *indexed_fault(const struct kvc_request *request,
                                 const struct kv_wire_index_result *indexed,
                                 uint64_t *ret_value)
{
    const struct kv_index_options *index = &index_of(kvc_request_op(request))->index;
    const uint64_t n_units = request->header.n_units;
    const uint64_t n_books =
        n_units * ((index->tokens + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS);
    const struct {
        const char *field;
        uint64_t value, most;
    } fields[] = {
        {"rows_coded", indexed->rows_coded, indexed->rows},
        {"n_found", indexed->n_found, n_books},
        {"n_trained", indexed->n_trained, n_books},
        {"n_pending", indexed->n_pending, index->wait ? 0 : n_books},
        {"iterations", indexed->iterations,
         (uint64_t)indexed->n_trained * KV_KMEANS_ITERATIONS_MAX},
        {"train_us", indexed->train_us, indexed->n_trained * (uint64_t)UINT32_MAX},
    };

    *ret_value = indexed->rows;
    if (indexed->rows != n_units * index->tokens)
        return "rows";
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        *ret_value = fields[i].value;
        if (fields[i].value > fields[i].most)
            return fields[i].field;
    }
    return NULL;
}

/* A reply has no bulk, and the request ends with it, so no result is added twice. */
static kv_status_t
reply(struct kvc_request *request, const uint8_t *body, char *detail, size_t detail_bytes)
{
    const struct kv_wire_header *header = &request->reply;
    struct kv_index_result *sum = &index_of(kvc_request_op(request))->sum;
    struct kv_wire_index_result got;
    const char *fault;
    uint64_t value;
    kv_status_t status = kvc_reply_check_units(request, request->header.layer,
                                               request->header.snapshot, detail, detail_bytes);

    if (status != KV_OK)
        return status;
    if (header->body_bytes != sizeof(got) || header->bulk_bytes != 0)
        return kvc_reply_refuse(detail, detail_bytes, "a body of %u bytes and bulk of %llu",
                                header->body_bytes, (unsigned long long)header->bulk_bytes);
    memcpy(&got, body, sizeof(got));
    fault = indexed_fault(request, &got, &value);
    if (fault != NULL)
        return kvc_reply_refuse(detail, detail_bytes, "%s: %llu", fault,
                                (unsigned long long)value);
    sum->rows += got.rows;
    sum->rows_coded += got.rows_coded;
    sum->n_found += got.n_found;
    sum->n_trained += got.n_trained;
    sum->n_pending += got.n_pending;
    sum->iterations += got.iterations;
    sum->train_us += got.train_us;
    if (sum->busiest_us < got.train_us)
        sum->busiest_us = got.train_us;
    return KV_OK;
}

static void describe(const struct kv_op *op,
                     const struct kvc_request *request,
                     char *text,
                     size_t text_bytes)
{
    kvc_session_describe(
        op->session, request != NULL ? request->header.layer : index_of(op)->index.layer_begin,
        text, text_bytes);
}

static const struct kvc_op_type index_type = {
    .name = "index",
    .id = KV_OP_INDEX,
    .needs_current = true,
    .start = start,
    .build = build,
    .requests.reply = reply,
    .describe = describe,
};

/* Returns the invalid argument, or NULL. */
static const char *index_fault(const struct kv_session *session,
                               const struct kv_index_options *index)
{
    const kv_schema_t *schema = &session->schema;

    if (index->n_layers == 0 ? index->layer_begin != 0
                             : index->layer_begin >= schema->n_layers ||
                                   index->n_layers > schema->n_layers - index->layer_begin)
        return "layers: out of bounds";
    if (index->tokens == 0 || index->tokens > session->tokens_max)
        return "tokens: must be 1 to tokens_max";
    if (index->m == 0 || index->m > KV_SUBSPACES_MAX)
        return "m: must be 1 to 16";
    if (index->bits == 0 || index->bits > KV_CODE_BITS_MAX)
        return "bits: must be 1 to 8";
    if (index->iterations == 0 || index->iterations > KV_KMEANS_ITERATIONS_MAX)
        return "iterations: must be 1 to 1000";
    if ((index->chapter_blocks > 0 && index->chapter_blocks < KV_CHAPTER_BLOCKS_MIN) ||
        index->chapter_blocks > KV_TOKENS_MAX / KV_BLOCK_TOKENS)
        return "chapter_blocks: must be 0 or 8 to 131072";
    if (index->summaries != 0 && index->summaries != 16 && index->summaries != 64)
        return "summaries: must be 0, 16 or 64";
    if (!kvc_summary_rows_valid(index->summary_rows))
        return "summary_rows: must be 0, 1024 or 3072";
    return NULL;
}

kv_status_t kv_index_begin(struct kv_session *session,
                           const struct kv_index_options *index,
                           uint32_t deadline_ms,
                           struct kv_op **ret_op)
{
    KVC_ENTER(session->client);
    const struct kvc_node *old = kvc_session_node_below(session, KV_WIRE_VERSION_FIRST_CUT);
    const char *fault = index_fault(session, index);
    kv_status_t status;
    struct kv_op *op;

    if (fault != NULL)
        return kvc_set_error(&session->client->loop, KV_INVALID,
                             "index: %s: layers %u+%u, tokens %u, m %u, bits %u", fault,
                             index->layer_begin, index->n_layers, index->tokens, index->m,
                             index->bits);
    if (old != NULL && (index->rotates || index->copies))
        return kvc_set_error(&session->client->loop, KV_UNSUPPORTED,
                             "index: %s: node %s speaks version %u, which has none; %d does",
                             index->rotates ? "rotates" : "copies", old->name, old->version,
                             KV_WIRE_VERSION_FIRST_CUT);
    if (kvc_summary_blocks(index->summaries, index->summary_rows) != 0 && old != NULL)
        return kvc_set_error(&session->client->loop, KV_UNSUPPORTED,
                             "index: summary_rows: node %s speaks version %u, which has "
                             "summaries per 1024 rows only; %d has them per %u",
                             old->name, old->version, KV_WIRE_VERSION_FIRST_CUT,
                             index->summary_rows);
    status = kvc_op_begin(session->client, &index_type, session, NULL, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    index_of(op)->index = *index;
    if (index->n_layers == 0)
        index_of(op)->index.n_layers = session->schema.n_layers;
    kvc_op_require_units(op, index_of(op)->index.layer_begin, layers_end(index_of(op)), 0, 0);
    return kvc_op_submit(op, ret_op);
}

void kv_op_index_result(const struct kv_op *op, struct kv_index_result *ret_indexed)
{
    KVC_LOOK(op->client);

    *ret_indexed = (struct kv_index_result){0};
    if (op->type == &index_type && op->status == KV_OK)
        *ret_indexed = index_of(op)->sum;
}
