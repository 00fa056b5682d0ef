/* Fetch: reads rows of one layer by token.
 *
 * Each data thread is sent the kv heads that it owns, as many per message as the request and
 * the reply can hold; a head with many ids takes several messages.  Rows are received dense, in
 * the order of the ids, and are checked like those of a read (rows.c).
 */
#include "client/buffer.h"
#include "client/connection.h"
#include "client/dispatch.h"
#include "client/enter.h"
#include "client/include/kvclient.h"
#include "client/loop.h"
#include "client/node.h"
#include "client/op.h"
#include "client/ops/rows.h"
#include "client/ops/rows_private.h"
#include "client/request.h"
#include "client/session.h"
#include "client/state.h"
#include "kvserver/net/transport.h"
#include "proto/kv_wire.h"

#include <string.h>

static uint32_t ids_of(const struct kvc_fetch_part *fetch, uint32_t head)
{
    return fetch->begin[head - fetch->kv_head_begin + 1] -
           fetch->begin[head - fetch->kv_head_begin];
}

static bool
seek_fetch(const struct kv_op *op, const struct kvc_connection *connection, uint32_t *head)
{
    const struct kvc_fetch_part *fetch = kvc_fetch_of(op);

    for (; *head < fetch->kv_head_begin + fetch->n_heads; ++*head)
        if (ids_of(fetch, *head) > 0 &&
            kvc_session_connection(op->session, fetch->layer, *head) == connection)
            return true;
    return false;
}

static kv_status_t build_fetch(struct kvc_subop *subop, struct kvc_request *request)
{
    struct kv_op *op = subop->op;
    const struct kvc_fetch_part *fetch = kvc_fetch_of(op);
    size_t row_bytes = op->session->schema.layers[fetch->layer].row_bytes;
    uint32_t rows_max = (uint32_t)(subop->connection->link.node->bulk_bytes_max / row_bytes);
    struct kv_wire_unit units[KV_HEADS_MAX];
    uint32_t head = subop->head;
    uint32_t position = (uint32_t)subop->position;
    uint32_t n_units = 0, n_rows = 0, greatest = 0;
    uint32_t *ids;
    bool more = true;
    size_t capacity;

    if (rows_max > KV_WIRE_ROWS_MAX)
        rows_max = KV_WIRE_ROWS_MAX;
    while (more && n_rows < rows_max) {
        uint32_t left = ids_of(fetch, head) - position;
        uint32_t n_ids = left < rows_max - n_rows ? left : rows_max - n_rows;

        /* More pieces than one transfer can scatter go in the reply's body, or wait. */
        if (n_units >= KV_IOV_MAX && (n_rows + n_ids) * row_bytes > KVC_INLINE_WANTED)
            break;
        units[n_units++] = (struct kv_wire_unit){
            .layer = (uint16_t)fetch->layer, .kv_head = (uint16_t)head, .n_ids = n_ids};
        n_rows += n_ids;
        position += n_ids;
        if (n_ids == left) {
            head++;
            position = 0;
            more = seek_fetch(op, subop->connection, &head);
        }
    }

    request->body_bytes = n_units * sizeof(units[0]) + n_rows * sizeof(uint32_t);
    capacity = request->body_bytes + n_rows * sizeof(uint32_t);
    if (!kvc_request_message(request, capacity))
        return KV_BUSY;
    request->n_rows = n_rows;
    request->bytes = n_rows * row_bytes;
    request->position = subop->position;
    request->crcs_offset = request->body_bytes;
    memcpy(request->message->body, units, n_units * sizeof(units[0]));
    ids = (uint32_t *)((struct kv_wire_unit *)request->message->body + n_units);
    for (uint32_t i = 0; i < n_units; i++) {
        uint32_t first = fetch->begin[units[i].kv_head - fetch->kv_head_begin] +
                         (i == 0 ? (uint32_t)subop->position : 0);

        memcpy(ids, fetch->ids + first, units[i].n_ids * sizeof(*ids));
        ids += units[i].n_ids;
    }
    for (uint32_t i = 0; i < n_rows; i++) {
        uint32_t id = *--ids;

        greatest = id > greatest ? id : greatest;
    }
    request->header.op = KV_OP_FETCH;
    request->header.n_units = n_units;
    request->header.layer = fetch->layer;
    request->header.snapshot = fetch->snapshot > greatest ? fetch->snapshot : greatest + 1;
    subop->head = head;
    subop->position = position;
    subop->finished = !more;
    return KV_OK;
}

static void start_fetch(struct kv_op *op)
{
    const struct kvc_fetch_part *fetch = kvc_fetch_of(op);

    kvc_connections_unmark(op->client);
    for (uint32_t head = fetch->kv_head_begin; head < fetch->kv_head_begin + fetch->n_heads;
         head++) {
        if (ids_of(fetch, head) > 0 && !kvc_op_ask_unit(op, fetch->layer, head, 0))
            return;
    }
}

static const struct kvc_op_type fetch_type = {
    .name = "fetch",
    .id = KV_OP_FETCH,
    .needs_current = true,
    .start = start_fetch,
    .build = build_fetch,
    .requests.land = kvc_rows_land,
    .requests.reply = kvc_rows_reply,
    .requests.finish = kvc_rows_finish,
    .describe = kvc_rows_describe,
};

/* Adds up the ids.  NULL: all fits. */
static const char *check_fetch(const struct kv_session *session,
                               const struct kv_fetch *fetch,
                               uint32_t *ret_n_heads,
                               uint32_t ret_begin[KV_HEADS_MAX + 1])
{
    uint32_t n_heads = fetch->n_kv_heads;
    uint32_t n_kv_heads;
    uint64_t n_ids = 0;

    if (fetch->layer >= session->schema.n_layers)
        return "layer: out of bounds";
    n_kv_heads = session->schema.layers[fetch->layer].n_kv_heads;
    if (n_heads == 0 && fetch->kv_head_begin == 0)
        n_heads = n_kv_heads;
    if (n_heads == 0 || fetch->kv_head_begin >= n_kv_heads ||
        n_heads > n_kv_heads - fetch->kv_head_begin)
        return "kv heads: out of bounds";
    for (uint32_t i = 0; i < n_heads; i++) {
        ret_begin[i] = (uint32_t)n_ids;
        n_ids += fetch->n_ids[i];
        if (n_ids > UINT32_MAX)
            return "too many ids";
    }
    ret_begin[n_heads] = (uint32_t)n_ids;
    for (uint64_t i = 0; i < n_ids; i++)
        if (fetch->ids[i] >= session->tokens_max)
            return "an id is beyond the session's tokens_max";
    if (fetch->snapshot > session->tokens_max)
        return "snapshot is beyond the session's tokens_max";
    *ret_n_heads = n_heads;
    return NULL;
}

kv_status_t kv_fetch_begin(struct kv_session *session,
                           const struct kv_fetch *fetch,
                           const struct kv_rows_io *io,
                           uint32_t deadline_ms,
                           struct kv_op **ret_op)
{
    KVC_ENTER(session->client);
    struct kv_client *client = session->client;
    uint32_t begin[KV_HEADS_MAX + 1];
    uint32_t n_heads;
    kv_status_t status;
    struct kv_op *op;
    const char *fault = check_fetch(session, fetch, &n_heads, begin);
    size_t bytes, ids_bytes;
    uint8_t *capacity;

    if (fault != NULL)
        return kvc_set_error(&client->loop, KV_INVALID, "fetch: layer %u: %s", fetch->layer,
                             fault);
    bytes = (size_t)begin[n_heads] * session->schema.layers[fetch->layer].row_bytes;
    if (!kvc_buffer_holds(client, io->buffer, io->offset, bytes))
        return kvc_set_error(&client->loop, KV_INVALID,
                             "fetch: %zu bytes do not fit the buffer", bytes);
    status = kvc_op_begin(client, &fetch_type, session, io->buffer, deadline_ms, &op);
    if (status != KV_OK)
        return status;
    ids_bytes = begin[n_heads] * sizeof(*fetch->ids);
    capacity = kvc_op_capacity(op, ids_bytes);
    if (capacity == NULL) {
        kvc_op_discard(op);
        return kvc_set_error(&client->loop, KV_NO_MEMORY, "fetch: out of memory");
    }
    kvc_fetch_of(op)->layer = fetch->layer;
    kvc_fetch_of(op)->kv_head_begin = fetch->kv_head_begin;
    kvc_fetch_of(op)->n_heads = n_heads;
    kvc_fetch_of(op)->snapshot = fetch->snapshot;
    kvc_fetch_of(op)->ids = kvc_op_keep(&capacity, fetch->ids, ids_bytes);
    kvc_fetch_of(op)->base = io->buffer->base + io->offset;
    kvc_fetch_of(op)->crcs = io->crcs;
    memcpy(kvc_fetch_of(op)->begin, begin, (n_heads + 1) * sizeof(begin[0]));
    for (uint32_t head = fetch->kv_head_begin; head < fetch->kv_head_begin + n_heads; head++)
        if (ids_of(kvc_fetch_of(op), head) > 0)
            kvc_op_require_units(op, fetch->layer, fetch->layer + 1, head, 1);
    return kvc_op_submit(op, ret_op);
}
